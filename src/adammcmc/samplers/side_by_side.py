r"""Burn-in of a sampler without a test: its step from the size of the batches' gradients, its error from steps h and h/2.

First, in windows that grow by half until U is level:

    A = 1 / (E g^2 b/n + q)          g: batch gradients of U, whose covariance is about n/b times the curvature; q: of the prior
    h = (E |A^1/2 g|^2)^(-1/2)       so that a kick is as long as one component of the velocity

Then, with A fixed, at h and at h/2 for equal times: the spread s of the functions exp(-lambda l_i), the likelihoods of 64
training examples. The error of the sampler is of second order in h, or higher, so that

    bias at h  =  4/3 (s(h) / s(h/2) - 1),      bias at h/2  =  1/3 (s(h) / s(h/2) - 1)       as a fraction of the spread

(too large where the order is higher: by a quarter at h, several times at h/2). Slow directions make s uncertain, and too long a
step heats the fast ones. Hence the variance of a function is that of the short run, and what it has more at h is taken from
variances within eighths of the runs; their scatter gives the standard error (the jackknife). The longer step of the two with
a bias of at most 3% is used; if neither has one, h is halved, until there is one or the steps of burn-in are used up.

U is watched on the same 64 examples, where it has no noise of the batch.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from adammcmc.kernels.scaling import forces
from adammcmc.samplers.adaptation import Adaptation, BurnIn, Change
from adammcmc.samplers.metric import MetricSums
from adammcmc.target.batches import part_of
from adammcmc.target.leaves import Leaves, Setting, by_chain, inner

__all__ = ["SideBySide", "compare"]

_TOLERANCE = 0.03
_EXAMPLES = 64
_LOOKS = 200  # at the functions, in a run
_BLOCKS = 8
_TIME = 60.0  # of a run, in units of A^1/2; the fluctuations of the slow directions take about ten
_FIRST = 16  # steps before anything is known
_EVERY = 10  # steps between two changes of h
_MEMORY = 50  # steps over which the size of the gradient is averaged
_TUNING = 0.5  # of all steps, at most


class SideBySide(Adaptation):
    """See the module.

    Args:
        settings: the options; acceptances have no meaning here.
        step_size: before the first step.
        batch_share: b/n.
        num_params, precision, learns, shapes, scaling: as for `Adaptation`.
    """

    def __init__(self, settings: BurnIn, *, step_size: float, batch_share: float, learns: bool, **options: Any) -> None:
        if not (learns and settings.learn_preconditioner):
            raise ValueError(
                "the step size is found in units of the preconditioner, and both are learnt together: give `step_size` and "
                "`preconditioner`, or neither."
            )
        super().__init__(settings, target=1.0, learns=True, velocity=True, **options)
        self.reached = 1.0
        self._h, self._share = step_size, batch_share
        self._length = _FIRST
        self._square, self._num_squares = 0.0, 0  # of the whitened gradient
        self._run = 0  # number of the present run, from 1 on; 0 while the metric is learnt
        self._values: list[Tensor] = []  # of the functions in the present run, (chains, examples)
        self._longer: list[Tensor] = []  # the same in the run before
        self._probe: list[Tensor] | None = None  # examples, as the leaves of a batch
        self._has_examples = True

    def observe(
        self,
        acceptance: Tensor,
        potential: Tensor,
        step_to_noise: Tensor,
        grad: Leaves | None,
        scale: Setting,
        log_ratio: Tensor | None = None,
        params: Leaves | None = None,
    ) -> Change:
        self.budget.begin()
        self._step, self._num_chains, self._in_window = self._step + 1, len(potential), self._in_window + 1
        if not self._has_examples:
            self._potentials.append(float(potential.median()))
        before, metric = self._h, None
        self.has_new_window = self._in_window >= self._length or self.budget.is_late
        if self._run == 0:
            assert grad is not None
            self._sums.add(grad, math.sqrt(self._share) * scale, None)
            if self.has_new_window:
                metric = self._end_of_tuning()
            self._set_step(grad, scale, is_new=metric is not None)
        elif self.has_new_window:
            self._end_of_run()
        return Change(self._h / before, None, metric)

    def _set_step(self, grad: Leaves, scale: Setting, *, is_new: bool) -> None:
        """h from the length of the whitened gradient, the mean over the last steps."""
        if self._metric_in_use is None:
            return
        whitened = forces(1.0, self._metric_in_use, tuple(g.double() for g in grad))
        squares = torch.stack([inner(f, f) for f in whitened]).sum(0)
        square = float((squares * torch.as_tensor(scale, dtype=torch.float64, device=squares.device) ** 2).median())
        self._num_squares = 1 if is_new else self._num_squares + 1
        if math.isfinite(square):
            self._square += (square - self._square) / min(self._num_squares, _MEMORY)
        if (is_new or self._num_squares % _EVERY == 0) and self._square > 0:
            self._h = self._square**-0.5

    def _end_of_tuning(self) -> Leaves | Any | None:
        """Close a window: the metric it has learnt; then another one, or the first run."""
        self._note_level()
        self._was_level = self._is_level()
        self.is_flat = self._was_level and self._step > _FIRST + self.settings.window
        metric = None if self.is_flat else self._metric()
        if metric is not None:
            self._metric_in_use = metric
        grown = max(self.settings.window, math.ceil(1.5 * self._length))
        if not self.is_flat and self._step + grown <= _TUNING * self.most_steps and not self.budget.is_late:
            self._length = grown
            self._start_window()
        else:
            self._start_run()
        return metric

    def _note_level(self) -> None:
        if self._potentials:
            level = statistics.fmean(self._potentials)
            self.trend.append((self._step, level))
            self._levels.append((level, statistics.pstdev(self._potentials)))

    def _is_level(self) -> bool:
        """Whether U had the same level in this window and the previous one, within half of its own fluctuation."""
        if not self._has_examples:
            return super()._is_level()
        if len(self._levels) < 2 or (half := len(self._potentials) // 2) < _BLOCKS:
            return False
        (before, _), (now, fluctuation) = self._levels[-2:]
        drift = statistics.fmean(self._potentials[half:]) - statistics.fmean(self._potentials[:half])
        return max(abs(now - before), abs(drift)) < 0.5 * max(fluctuation, self._natural)

    def _start_run(self) -> None:
        """The first is given a third of the steps that are left; those after it as long, in time."""
        self._run += 1
        left = self.most_steps - self._step
        self._length = max(_BLOCKS, min(math.ceil(_TIME / self._h), left // 3 if self._run == 1 else left))
        self._longer, self._values = self._values, []
        self._start_window()

    def _end_of_run(self) -> None:
        self._note_level()
        if self._run > 1:
            runs = [values[len(values) // 5 :] for values in (self._longer, self._values)]
            excess, error = math.nan, math.nan
            if min(map(len, runs)) >= 3 * _BLOCKS:
                excess, error = compare(*(torch.stack(values, 1) for values in runs))
            is_over = self.most_steps - self._step < 2 * self._in_window or self.budget.is_late
            for share, factor in ((4 / 3, 2.0), (1 / 3, 1.0)):
                self.bias = [share * excess, share * error]
                if not self.bias[0] > _TOLERANCE or (is_over and factor == 1.0):
                    self._h *= factor
                    self.is_done = True
                    self.budget.stop()
                    return
        self._h /= 2
        self._start_run()

    def look(self, network: Any, loss: Any, batch: Any) -> None:
        """The functions at the chains' present weights, every so many steps of a run."""
        if self._probe is None and self._has_examples:
            leaves, _ = _pytree.tree_flatten(None if batch is None else part_of(batch, slice(0, _EXAMPLES)))
            self._has_examples = batch is not None and all(isinstance(x, Tensor) for x in leaves)
            self._probe = [x.clone() for x in leaves] if self._has_examples else None
        if self._probe is None or self._in_window % max(1, self._length // _LOOKS):
            return
        examples = _pytree.tree_unflatten(self._probe, _pytree.tree_structure(batch))
        potential = network.potential(loss, examples, None)
        devices = [network.device] if network.device.type == "cuda" else []
        with network.trial(potential) as params, torch.random.fork_rng(devices):
            found = potential.evaluate(params, with_grad=False)
        losses = found.losses.double() if found.losses.dim() > 1 else found.losses.double()[:, None]
        self._potentials.append(float((potential.scale * losses.mean(1) - found.log_prior).median()))
        if self._run > 0:
            self._values.append(torch.exp(-losses * by_chain(potential.inverse_temperature, losses)).cpu())

    def complaint(self) -> str | None:
        """What burn-in has not reached so far, in words; None if it has reached everything."""
        if not self.is_flat:
            return (
                f"burn-in ended after {self._step} steps while U was still moving, or while its level on batches was not known "
                "well enough to tell: start from a trained network, or raise max_steps"
            )
        if self.is_done and (self.bias is None or not all(map(math.isfinite, self.bias))):
            return (
                "the error of the sampler could not be estimated: burn-in was too short, or the batch is not known (call "
                "step(loss, batch), with the batch as tensors)"
            )
        return None

    def status(self) -> str:
        """The phase, and what it waits for."""
        if self._run == 0:
            return f"learning scales until U settles: U {self.trend[-1][1]:.5g}" if self.trend else "learning scales"
        return f"run {self._run} of two or more, at step size {self._h:.3g}"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._values, self._longer = [x.cpu() for x in self._values], [x.cpu() for x in self._longer]
        self._sums = self._sums if self._sums.count else MetricSums(self._kind, self._precision, self._shapes)


def compare(long: Tensor, short: Tensor) -> tuple[float, float]:
    """s(h) / s(h/2) - 1 of functions (chains, times, functions) at h and h/2, and its standard error. See the module."""
    total = short.double().var(1).mean(0)
    floor = torch.finfo(torch.float64).tiny

    def excess(own: Tensor, other: Tensor) -> float:
        wide = (total + own.mean(0) - other.mean(0)).clamp_min(0).sqrt()
        return float(wide.mean() / total.sqrt().mean().clamp_min(floor)) - 1

    parts = [_within(values) for values in (long, short)]  # (blocks, functions)
    both = [
        [excess(_without(parts[0], i), parts[1]) for i in range(_BLOCKS)],
        [excess(parts[0], _without(parts[1], i)) for i in range(_BLOCKS)],
    ]
    return excess(*parts), math.sqrt((_BLOCKS - 1) * sum(map(statistics.pvariance, both)))


def _within(values: Tensor) -> Tensor:
    """Variances within each eighth of the time, the mean over the chains."""
    length = values.shape[1] // _BLOCKS
    blocks = values[:, : length * _BLOCKS].double().reshape(len(values), _BLOCKS, length, -1)
    return blocks.var(2).mean(0)


def _without(parts: Tensor, i: int) -> Tensor:
    return torch.cat([parts[:i], parts[i + 1 :]])
