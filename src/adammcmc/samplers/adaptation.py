r"""Adaptation of a kernel's settings in burn-in, after which they are frozen.

While a kernel adapts it has no invariant distribution, so its states are not draws. `BurnIn` holds the options;
`Adaptation` applies them step by step:

    log scale <- log scale + gain (acceptance - target),   gain = min(1, 2 (k + 1)^-0.6)            (Robbins-Monro)
    sigma_along = sqrt(1 / kappa^2 - 1 / r^2), r = |u| / sigma, 2 Phi(-kappa) = proposal_acceptance (Algorithm 1)
    A: the metric of kernels with a velocity                                                        (`samplers.metric`)

Kernels with a velocity first approach the bulk by steps without a test (`samplers.approach`). Then, in windows that grow by
half, the settings are tuned until U has the same level in two consecutive windows and, for a density, chains and halves of
the window agree on U and on coordinates (R-hat). The last window tunes the scale alone; the scale is averaged over its second
half, and everything is frozen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from adammcmc.acceptance import AcceptanceTest
from adammcmc.errors import warn
from adammcmc.kernels.arguments import chain_settings, settings_by_name
from adammcmc.kernels.proposal import Prolate
from adammcmc.kernels.scaling import Scaling, restored, stored
from adammcmc.kernels.words import preconditioner_in_words
from adammcmc.samplers.approach import Approach
from adammcmc.samplers.batch_metric import BatchMetric
from adammcmc.samplers.budget import Budget
from adammcmc.samplers.diagnostics import rhat
from adammcmc.samplers.metric import Kind, MetricSums
from adammcmc.samplers.persistence import Persistence
from adammcmc.samplers.warmup import WarmUp
from adammcmc.target.leaves import Leaves, Setting, inner, per_chain, widen
from adammcmc.target.potential import Evaluation, Potential
from adammcmc.target.randomness import Randomness

__all__ = ["Adaptation", "BurnIn", "Change", "changed", "check_common", "check_tunable", "mean_of", "momentum_spread"]

_SMALLEST_NOISE = 1e-3  # relative to the step; below this, tuning the noise has no effect
_FROZEN = 0.01  # acceptance
_NAMED = 10  # chains in a warning
_WATCHED = 32  # coordinates
_LAST_WINDOW = 600  # steps of the last window, over all chains
_RESCUE, _MOST_RESCUES = 50, 6  # steps and number of the windows that follow while chains are frozen
_AGREEING = 1.02  # R-hat
_ROUGH = 2.0  # by how much more than usual a test may shorten the steps of the approach
_USUAL_ERROR = 0.4  # of a step that is accepted at 0.85
_SMALL_ERRORS = 0.005, 0.002  # of a step in the approach with this metric, which needs no longer ones (`samplers.approach`)
_NOT_SAVED = ("settings", "approach", "batches", "budget", "_persistence", "_precision", "_shapes", "_sums", "_metric_in_use")
# by what the steps of a single chain change, if its acceptance relative to the target is above the first number
_OWN_FACTORS = (-1.0, 0.125), (0.05, 0.5), (0.3, 1.0), (0.6, 2.0), (1.1, 4.0)


@dataclass(frozen=True)
class BurnIn:
    """How a sampler tunes its settings before it collects draws.

    Args:
        num_steps: steps of adaptation; None continues until U is flat.
        max_steps: the limit on waiting for a flat U; the settings are then frozen, with a warning.
        max_seconds: likewise, in seconds of wall time from the first step, also for `num_steps` (the run is then not
            reproducible).
        target_acceptance: the acceptance that the scale (sigma, or the step size) is tuned to. None is the kernel's
            own: 0.6 for Algorithm 1, 0.57 for MALA, 0.85 for the underdamped kernel, 0.25 for the exact chain of
            Theorem 1; for `Barker`, its acceptance of moves that Metropolis would accept at that rate.
        proposal_acceptance: of Algorithm 1's proposal alone, which sets sigma_along; must exceed `target_acceptance`.
            None leaves sigma_along unchanged.
        window: steps in the first window.
        learn_preconditioner: also learn A, where the kernel has one.
        scaling: which A a kernel with a velocity learns: "diagonal"; "kron", a turned diagonal for each weight matrix;
            "dense", one matrix for all numbers of a chain (a few hundred at most). None is "dense" for densities of up to
            200 numbers whose chains see enough of it, and "diagonal" elsewhere.
        approach: begin with constant-speed steps without a test. None does so for the kernels with a velocity, on fixed data
            and on densities.
    """

    num_steps: int | None = None
    max_steps: int = 41_000
    max_seconds: float | None = None
    target_acceptance: float | None = None
    proposal_acceptance: float | None = 0.8
    window: int = 100
    learn_preconditioner: bool = True
    scaling: Kind | None = None
    approach: bool | None = None

    def __post_init__(self) -> None:
        if self.scaling not in (None, *get_args(Kind)):
            raise ValueError(f"`scaling` must be one of {', '.join(get_args(Kind))}, or None, got {self.scaling!r}.")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"`max_seconds` must be positive, got {self.max_seconds}.")
        for name in ("target_acceptance", "proposal_acceptance"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ValueError(f"`{name}` must lie between 0 and 1, got {value}.")
        for name in ("num_steps", "max_steps", "window"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")


class Change(NamedTuple):
    """The change to a kernel before its next step."""

    factor: Setting
    """Multiplies the scale of its moves: one number, or one per chain."""
    sigma_along: float | None
    preconditioner: Leaves | Scaling | None
    friction: Setting | None = None


class _Looks:
    """What an adaptation may evaluate besides the steps themselves, which most do not, and what is counted."""

    num_gradients = 0.0
    """Of a network's chain, on average, in the steps so far."""
    bias: list[float] | None = None
    """By how much the spread of the draws is off, as a fraction, and its standard error; None where it is not estimated."""
    approximation: str | None = None
    """What the settings that were found leave uncorrected, in a few words."""
    _is_last = False

    @property
    def is_in_last_window(self) -> bool:
        """Whether the scale alone is still tuned, and the rest is as it will be when draws are taken."""
        return self._is_last

    def look(self, network: Any, loss: Any, batch: Any) -> None:
        """Evaluate functions at the chains' present weights, after a step on this batch."""


class Adaptation(_Looks):
    """The state of one adaptation. It reads numbers from the device at each step (in burn-in only).

    Args:
        settings: the options.
        target: the acceptance to reach.
        tunes_sigma_along: whether the kernel is Algorithm 1's.
        num_params: weights of a chain, for the natural scale of U: its standard deviation is about sqrt(P / 2).
        precision: of the prior, in the shapes of the leaves; None where it has none.
        learns: whether the kernel takes a preconditioner.
        velocity: whether the kernel has a velocity, so that it takes any `Scaling`.
        approaches: whether such a kernel begins with steps without a test.
        shapes: for each leaf the shapes of the parameters in it.
        scaling: which metric to learn where the settings leave it open.
        watches: whether chains must also agree on their positions before burn-in ends (a density's must).
        friction: to begin with, where it is tuned (chains must be watched).
        step_size: to begin with; where it is known, and the approach has a metric of batches, tuning begins at its steps.
    """

    def __init__(
        self,
        settings: BurnIn,
        *,
        target: float,
        num_params: int,
        tunes_sigma_along: bool = False,
        precision: Leaves | None = None,
        learns: bool = False,
        velocity: bool = False,
        approaches: bool = False,
        shapes: Sequence[Sequence[torch.Size]] = (),
        scaling: Kind = "diagonal",
        watches: bool = False,
        friction: float | None = None,
        step_size: float | None = None,
    ) -> None:
        self.settings = settings
        self.target = target if settings.target_acceptance is None else settings.target_acceptance
        self.is_done = False
        self.is_flat = False
        """Whether U was flat at the end of the adaptation."""
        self.reached: float | None = None
        """The mean acceptance over the last half window."""
        self.has_new_window = False
        """Whether the last step was the last of its window."""
        self.frozen: list[int] = []
        """Chains that did not move in the second half of the last window while others did."""
        self.agreement: float | None = None
        """The largest R-hat over U and coordinates in the last window with a level U, where chains are watched."""
        self._precision, self._shapes = precision, shapes
        self._natural = math.sqrt(num_params / 2)
        self._learns = learns and settings.learn_preconditioner
        self._kind: Kind = (settings.scaling or scaling) if velocity else "diagonal"
        if not velocity and settings.scaling not in (None, "diagonal"):
            raise ValueError(f"`scaling` = {settings.scaling!r} needs a velocity (`underdamped` or `microcanonical`).")
        self._power = 1.0 if velocity else 0.5
        self._watches = watches
        self._first_step_size = step_size
        uses_batches = velocity and approaches and self._learns and self._kind == "diagonal"
        self.batches = BatchMetric.of(precision, num_params) if uses_batches else None
        """The metric of batches, for large networks."""
        self._persistence = None if friction is None else Persistence(friction)
        self._kappa = None
        if tunes_sigma_along and (rate := settings.proposal_acceptance) is not None:
            if rate <= self.target:
                raise ValueError(f"`proposal_acceptance` must exceed the target acceptance {self.target}, got {rate}.")
            self._kappa = statistics.NormalDist().inv_cdf(1 - rate / 2)
        self.budget = Budget(settings.max_seconds)
        self._step = 0
        self.approach = self._new_approach(num_params) if velocity and approaches else None
        """The steps without a test, until they are done."""
        self._is_searching = True
        self._first_sign = 0
        self._log_scale = 0.0
        self._levels: list[tuple[float, float]] = []  # mean and standard deviation of U in each window
        self._was_level = False  # whether U was level in the last complete window
        self.trend: list[tuple[int, float]] = []
        """(step, U): the median over the chains, window by window."""
        self._ratio = math.nan
        self._metric_in_use: Leaves | Scaling | None = None
        self._own: Tensor | None = None
        """A factor of each chain's steps, at most 1: chains in bad places have shorter ones."""
        self._rates: Tensor | None = None  # each chain's acceptance in the window that has just ended
        self._takes_own, self._num_rescues = velocity, 0
        self._num_approach, self._has_approached, self._num_chains = 0, False, 1
        self._moving: Tensor | None = None  # each chain's acceptance of late
        self._start_tuning()

    def _new_approach(self, num_params: int) -> Approach | None:
        settings = self.settings
        length = settings.max_steps * 17 // 20 if settings.num_steps is None else settings.num_steps * 2 // 5
        if settings.approach is False or length < 100 or num_params < 2:
            return None
        return Approach(num_params, length)

    def _start_tuning(self) -> None:
        """The first window with a test."""
        settings, taken = self.settings, self._step
        self._length = settings.window
        left = None if settings.num_steps is None else settings.num_steps - (taken if self.approach is None else 0)
        self._is_last = left is not None and left < 6
        if left is None:
            self._length = min(self._length, max(6, (settings.max_steps - taken) // 3))
        else:  # two windows at least: the second tunes to the preconditioner of the first
            self._length = left if self._is_last else min(settings.window, left // 3)
        self._start_window()

    def _start_window(self) -> None:
        self._in_window = 0
        self._potentials: list[float] = []
        self._acceptances: list[float] = []
        self._log_scales: list[float] = []
        self._sums = MetricSums(self._kind, self._precision, self._shapes)
        self._watched: list[Tensor] = []  # U and coordinates, (chains, functions)
        self._by_chain: Tensor | None = None  # sums of each chain's acceptance, over the second half of the window

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
        """The change after a step with these numbers of each chain; `grad` of V at the new point, U = scale V.

        `log_ratio`: Y; `params`: the new point.
        """
        self.budget.begin()
        self._step, self._num_chains = self._step + 1, len(potential)
        if self._learns and grad is not None and not self._is_last:
            self._sums.add(grad, scale, params)
        if self.approach is not None:
            assert log_ratio is not None
            return self._approach(self.approach, log_ratio, potential)
        acceptance = acceptance.double().nan_to_num(nan=0.0)
        rate = self._pooled_rate(acceptance)
        self._in_window += 1
        self._potentials.append(float(potential.median()))
        self._acceptances.append(rate)
        self._watch(potential, params)
        if self._in_window > self._length // 2:
            self._by_chain = acceptance if self._by_chain is None else self._by_chain + acceptance
        ratio = float(step_to_noise.log().mean().exp())
        if math.isfinite(ratio) and ratio > 0:
            self._ratio = ratio if math.isnan(self._ratio) else math.exp(0.9 * math.log(self._ratio) + 0.1 * math.log(ratio))
        move = self._towards(rate)
        self._log_scale += move
        self._log_scales.append(self._log_scale)
        is_late = self.budget.is_over if self._is_last else self.budget.is_late and self._in_window > 1
        self.has_new_window = self._in_window >= self._length or is_late
        metric = self._end_of_window() if self.has_new_window else None
        if self.is_done:  # freeze at the mean over the second half of the last window
            move += _late_mean(self._log_scales) - self._log_scale
        if metric is not None:
            move += self._rescale(metric)
        along = None
        if self._kappa is not None and not math.isnan(self._ratio):
            along = math.sqrt(max(0.0, self._kappa**-2 - self._ratio**-2))
        factor = math.exp(move)
        own = _new_own(self)
        return Change(
            factor if own is None else factor * own.to(potential.device), along, metric, self._friction(potential.device)
        )

    def _friction(self, device: torch.device) -> Setting | None:
        """In the last window that of all chains, before it one for each group; None where it stays."""
        if self._persistence is None or not self.has_new_window or self.is_done:
            return None
        if self._is_last:
            return self._persistence.friction
        return self._persistence.of_chains(self._num_chains).to(device)

    def approach_metric(self, own: Leaves | Scaling | None, params: Leaves) -> Leaves | Scaling | None:
        """A during the approach: the kernel's own, or the prior's variances (in the dtype of a velocity of these weights)."""
        if self.batches is not None and (found := self.batches.like(params)) is not None:
            return found
        if own is not None or self._precision is None or any(bool((q <= 0).any()) for q in self._precision):
            return own
        return tuple((1 / q).to(widen(x).dtype) for q, x in zip(self._precision, params, strict=True))

    def _approach(self, approach: Approach, log_ratio: Tensor, potential: Tensor) -> Change:
        """A step without a test: only the steps of the approach change, and, where there is no prior, the metric."""
        approach.observe(log_ratio, potential)
        self.trend = approach.trend
        metric = None
        is_over = approach.is_done or self.budget.is_late
        if is_over or (approach.has_new_window and not approach.is_in_last_stretch):
            if self._learns and (is_over or self._precision is None):
                metric = self._learnt()
            self._sums = MetricSums(self._kind, self._precision, self._shapes)
        factor = 0.0 if metric is None else self._rescale(metric)
        lengthened = _lengthened(self) if is_over else 1.0
        if is_over:
            self._has_approached = approach.is_level
            self.approach, self._num_approach = None, self._step
            self._start_tuning()
        elif metric is not None:
            approach.rescale(factor)
        return Change(lengthened, None, metric)

    def look(self, network: Any, loss: Any, batch: Any) -> None:
        """Update the metric of batches if it is due: after the first step, and at the end of each window but the last."""
        approach = self.approach
        if approach is not None:
            is_due = self._step == 1 or approach.has_new_window or approach.num_left == 1
        else:
            is_due = not self._is_last and self._in_window == self._length - 1
        if self.batches is None or not is_due:
            return
        change = self.batches.update(network, loss, batch)
        if approach is not None and self.batches.value is not None:
            approach.variances = _SMALL_ERRORS
            approach.rescale(change)

    def _pooled_rate(self, acceptance: Tensor) -> float:
        """The mean acceptance of the chains that move: one in a bad place shall not shorten the steps of all."""
        if len(acceptance) > 2:
            self._moving = acceptance if self._moving is None else 0.95 * self._moving + 0.05 * acceptance
            counts = self._moving >= 0.1 * self._moving.median()
            return float(acceptance[counts].mean())
        return float(acceptance.mean())

    def _watch(self, potential: Tensor, params: Leaves | None) -> None:
        """Keep U and some coordinates of every chain, at most about 500 times a window."""
        if not self._watches or params is None or len(potential) < 4 or self._in_window % max(1, self._length // 500):
            return
        flat = torch.cat([x.flatten(1) if x.dim() > 1 else x[:, None] for x in params], 1)
        chosen = flat[:, :: max(1, flat.shape[1] // _WATCHED)]
        self._watched.append(torch.cat([potential.double()[:, None], chosen.double()], 1).cpu())

    def _towards(self, rate: float) -> float:
        """The step of log scale."""
        if self._ratio > 1 / _SMALLEST_NOISE and rate < self.target:
            return 0.0  # the noise is not the cause of rejections
        if self._is_searching:  # in large steps from any starting value, until the target is crossed
            sign = 1 if rate > self.target else -1
            if self._first_sign in (0, sign) and self._in_window < self._length // 2:
                self._first_sign = sign
                return 0.2 * sign
            self._is_searching = False
        return min(1.0, 2.0 * math.pow(self._in_window + 1, -0.6)) * (rate - self.target)

    def _end_of_window(self) -> Leaves | Scaling | None:
        """Close the window and decide on the next one; the new metric, if one was learnt."""
        self.reached = _late_mean(self._acceptances)
        self.trend.append((self._step, statistics.fmean(self._potentials)))
        if self._by_chain is not None:
            self._rates = (self._by_chain / (self._in_window - self._length // 2)).cpu()
        if self._is_last:
            self.frozen = _frozen(self)
            if not _has_rescued(self):
                self._rates, self.is_done = None, True
                self.budget.stop()
            return None
        self._levels.append((statistics.fmean(self._potentials), statistics.pstdev(self._potentials)))
        self._was_level = self._is_level()
        self.is_flat = self._was_level and self._agrees()
        if self._persistence is not None and self._watched:
            self._persistence.learn(torch.stack(self._watched, 1))
        is_cut = self._in_window < self._length  # for lack of time, with too few steps to learn from
        metric = None if is_cut and self._metric_in_use is not None else self._metric()
        grown = math.ceil(1.5 * self._length)
        has_limit = self.settings.num_steps is not None
        left = (self.settings.num_steps or self.settings.max_steps) - self._step
        if (has_limit or not self.is_flat) and left > 2 * grown and not self.budget.is_late:
            self._length = grown
        else:
            self._is_last = True
            grown = max(grown, _LAST_WINDOW // self._num_chains)  # the acceptance of one chain fluctuates for long
            self._length = max(1, left if has_limit else min(grown, max(left, self._length // 2)))
            self._length = self.budget.steps(self._step, self._length)
        self._start_window()
        return metric

    def _agrees(self) -> bool:
        """Whether chains, and their halves, agree on U and on coordinates in this window."""
        if not self._watched:
            return True
        if len(self._watched) < 8:
            return False  # too few to tell
        self.agreement = float(rhat(torch.stack(self._watched, 1)).nan_to_num(nan=1.0).max())
        return self.agreement < _AGREEING

    def _is_level(self) -> bool:
        """Whether U had the same level in this window and the previous one."""
        return _is_level(self)

    def _metric(self) -> Leaves | Scaling | None:
        if not self._learns:
            return None
        found = self._learnt()
        if isinstance(found, tuple) and self._power != 1.0:  # Adam's scaling, for kernels without a velocity
            found = tuple(a.pow(self._power) for a in found)
        return found

    def _learnt(self) -> Leaves | Scaling | None:
        """A of the batches, if there is one, or of the steps of this window."""
        of_batches = None if self.batches is None else self.batches.value
        return self._sums.learn(self._metric_in_use) if of_batches is None else of_batches

    def _rescale(self, metric: Leaves | Scaling) -> float:
        """The change of log scale that keeps the length of a move, h * sqrt(mean A), when A changes."""
        before = 1.0 if self._metric_in_use is None else mean_metric(self._metric_in_use)
        self._metric_in_use = metric
        return 0.5 * math.log(before / mean_metric(metric))

    def state_dict(self) -> dict[str, Any]:
        """The state as numbers, lists and tensors, and the settings as numbers."""
        return _state(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        _restore(self, state)

    @property
    def num_steps(self) -> int:
        """So far."""
        return self._step

    @property
    def most_steps(self) -> int:
        """Steps that burn-in takes at most; with a limit in seconds at the speed so far."""
        limit = self.settings.num_steps or self.settings.max_steps
        return self._step + self.budget.steps(self._step, max(0, limit - self._step))

    def status(self) -> str:
        """The phase, what it waits for, and U in the last window with its change from the one before; in 80 columns."""
        return _status(self)

    def record(self, kernel: Any) -> WarmUp:
        """What was done and reached, with the kernel as it is now."""
        return _record(self, kernel)

    def complaint(self) -> str | None:
        """What burn-in has not reached so far, in words; None if it has reached everything."""
        return _complaint(self)

    def warn(self) -> None:
        """Warn of what burn-in did not reach, and of the chains that do not move."""
        if (complaint := self.complaint()) is not None:
            warn(f"{complaint}.")
        self.warn_of_frozen()

    def warn_of_frozen(self) -> None:
        """Name the chains that do not move."""
        if self.frozen:
            warn(_frozen_in_words(self.frozen, self._num_chains, self.reached))


def _is_level(of: Adaptation) -> bool:
    """Whether U had the same level in this window and the previous one, within half of its own fluctuation.

    After an approach that ended level, U need only be as level as the approach requires: within its natural spread.

    Where U is only estimated, batch noise must not count as fluctuation: that is at most the natural one, and the
    window must be long enough to resolve it.
    """
    if len(of._levels) < 2:
        return False
    (before, _), (now, fluctuation) = of._levels[-2:]
    half = len(of._potentials) // 2
    drift = statistics.fmean(of._potentials[half:]) - statistics.fmean(of._potentials[:half])
    if of._has_approached:
        return max(abs(now - before), abs(drift)) < of._natural
    resolution = 2 * fluctuation / math.sqrt(half)
    return max(abs(now - before), abs(drift), resolution) < 0.5 * min(fluctuation, of._natural)


def _new_own(of: Adaptation) -> Tensor | None:
    """By what the steps of single chains change at the end of a window, (chains,); None if none does."""
    rates, of._rates = of._rates, None
    if rates is None or not of._takes_own or len(rates) < 3:
        return None
    before = torch.ones_like(rates) if of._own is None else of._own
    factor = torch.ones_like(rates)
    for rate, change in _OWN_FACTORS:
        factor = torch.where(rates / of.target > rate, change, factor)
    after = (before * factor).clamp_max(1.0)
    of._own = after
    return None if torch.equal(after, before) else after / before


def _lengthened(of: Adaptation) -> float:
    """Factor on the given step at the start of tuning. With a metric of batches, tuning starts from the approach's step."""
    assert of.approach is not None
    return of.approach.step_size / of._first_step_size if _continues_approach(of) and of._first_step_size else 1.0


def _continues_approach(of: Adaptation) -> bool:
    """Whether tuning begins, or began, at the steps of the approach."""
    return of.batches is not None and of.batches.value is not None and of._first_step_size is not None


def _usual_shortening(natural: float) -> float:
    """By what a test shortens the approach's last steps where U is smooth, so that errors grow as the cube of the step."""
    return math.cbrt(math.sqrt(2 * _SMALL_ERRORS[1]) * natural / _USUAL_ERROR)


def _has_rescued(of: Adaptation) -> bool:
    """Whether chains that froze in the last window get shorter steps, and some more steps to show that they move."""
    has_own = of._takes_own and of._num_chains > 2
    if not of.frozen or not has_own or of.settings.num_steps is not None or of.budget.is_over:
        return False
    of._num_rescues += 1
    if of._num_rescues > _MOST_RESCUES:
        return False
    of._length = max(_RESCUE, _LAST_WINDOW // of._num_chains)
    of._start_window()
    return True


def _frozen(of: Adaptation) -> list[int]:
    """The chains whose acceptance is nearly zero while that of others is not."""
    rates = of._rates
    if rates is None or len(rates) < 2:
        return []
    is_frozen = rates < min(_FROZEN, 0.1 * float(rates.max()))
    return [int(chain) for chain in is_frozen.nonzero().flatten()]


def _complaint(of: Adaptation) -> str | None:
    if of.settings.num_steps is None and not of.is_flat:
        limit = "max_seconds" if of.budget.is_late else "max_steps"
        return (
            f"burn-in ended after {of._step} steps while U was still moving, and no further window fits into "
            f"{limit} = {getattr(of.settings, limit)}: draws from there on are not from the target yet. Start where "
            f"the density is higher (train a network first), or raise {limit}"
        )
    reached = of.reached or 0.0
    if of.is_done and of._num_approach and _continues_approach(of):
        factor, usual = math.exp(-_late_mean(of._log_scales)), _usual_shortening(of._natural)
    else:
        factor, usual = 1.0, 1.0
    if factor > _ROUGH * usual:
        return (
            f"the test makes the steps {factor:.0f} times shorter than they were without it: U is rough (does it jump, where "
            "neighbours are chosen or numbers sorted?), and an exact chain hardly moves. Compare `Microcanonical` without a "
            "test (docs/large.md)"
        )
    if reached < of.target - 0.15:
        advice = "The step itself may be the cause of rejections: lower lr, or allow more steps"
    elif reached > of.target + 0.6 * (1 - of.target):
        advice = "The steps are still too short: allow more steps of burn-in"
    else:
        return None
    return f"burn-in reached an acceptance of {reached:.2f} instead of {of.target:.2f}. {advice}"


def _state(of: Adaptation) -> dict[str, Any]:
    state = {key: value for key, value in of.__dict__.items() if key not in _NOT_SAVED}
    approach = None if of.approach is None else of.approach.state_dict()
    own = {"settings": asdict(of.settings), "approach": approach, "sums": of._sums.state_dict(), "seconds": of.budget.state()}
    own["batches"] = None if of.batches is None else of.batches.state_dict()
    return {**state, **own, "metric": stored(of._metric_in_use)}


def _restore(of: Adaptation, state: dict[str, Any]) -> None:
    rest = {key: value for key, value in state.items() if key not in ("approach", "sums", "seconds", "metric", "batches")}
    of.__dict__.update({**rest, "settings": BurnIn(**state["settings"])})
    of.budget = Budget(of.settings.max_seconds)
    of.budget.restore(state["seconds"], is_new=of._step == 0)
    of._sums = MetricSums(of._kind, of._precision, of._shapes)
    of._sums.load_state_dict(state["sums"])
    of._metric_in_use = restored(state["metric"])
    if of.batches is not None and state["batches"] is not None:
        of.batches.load_state_dict(state["batches"])
    if state["approach"] is None:
        of.approach = None
    else:
        assert of.approach is not None
        of.approach.load_state_dict(state["approach"])


def _waits_for(of: Adaptation) -> str:
    """What must happen for burn-in, or its approach, to end."""
    if of.approach is not None:
        return "with shorter and shorter steps" if of.approach.is_in_last_stretch else "until U settles"
    if (number := of.settings.num_steps) is not None:
        return f"until step {number:,}"
    if of._is_last:
        return "in the last window"
    if of._was_level and of.agreement is not None:
        return f"until chains agree (R-hat {of.agreement:.2f})"
    return "until U settles"


def _status(of: Adaptation) -> str:
    words = f"{'tuning' if of.approach is None else 'approach'} {_waits_for(of)}"
    if of.trend:
        level = of.trend[-1][1]
        change = f" ({level - of.trend[-2][1]:+.2g})" if len(of.trend) > 1 else ""
        words += f": U {level:.5g}{change}"
    if of.approach is None and of._acceptances:
        words += f"{', ' if of.trend else ': '}acceptance {_late_mean(of._acceptances):.2f}"
    return words


def _record(of: Adaptation, kernel: Any) -> WarmUp:
    settings = settings_by_name(kernel)
    size = settings.get("step_size", settings.get("sigma", math.nan))
    rates = () if of._by_chain is None else tuple((of._by_chain / max(1, of._in_window - of._length // 2)).tolist())
    complaint = of.complaint() if of.is_done else f"not over yet: {_status(of)}"
    ended = "chains and halves agree" if of.agreement is not None else "U is level"
    if (number := of.settings.num_steps) is not None:
        ended = f"{number} steps were asked for"
        if of._step < number:
            ended = f"the time was up, max_seconds = {of.settings.max_seconds}; {ended}"
    return WarmUp(
        kernel=kernel,
        params=None,
        num_steps=of._step,
        num_gradients=round(of.num_gradients) if of.num_gradients else None,
        num_descent=0,
        num_approach=of._step if of.approach is not None else of._num_approach,
        step_size=float(torch.as_tensor(size, dtype=torch.float64).median()),
        scaling=preconditioner_in_words(of._metric_in_use),
        acceptance=math.nan if of.reached is None else of.reached,
        target_acceptance=of.target,
        acceptance_by_chain=rates,
        agreement=of.agreement,
        frozen=tuple(of.frozen),
        trend=tuple(of.trend),
        is_settled=complaint is None and not of.frozen,
        reason=ended if complaint is None else complaint,
        seconds=of.budget.seconds,
    )


def _frozen_in_words(frozen: Sequence[int], num_chains: int, reached: float | None) -> str:
    named = ", ".join(map(str, frozen[:_NAMED]))
    more = f" and {len(frozen) - _NAMED} more" if len(frozen) > _NAMED else ""
    return (
        f"{len(frozen)} of {num_chains} chains do not move at the end of burn-in: {named}{more}. "
        f"Their acceptance is below {_FROZEN}, while the mean over all chains is {reached:.2f}. Their draws "
        "are copies of one point, not draws from the target. Start them nearer to its bulk, or leave them out."
    )


def mean_metric(metric: Leaves | Scaling) -> float:
    """The mean of the diagonal of A."""
    return metric.mean() if isinstance(metric, Scaling) else mean_of(metric)


def mean_of(leaves: Sequence[Tensor]) -> float:
    """The mean over all numbers."""
    return sum(float(a.double().sum()) for a in leaves) / sum(a.numel() for a in leaves)


def _late_mean(values: list[float]) -> float:
    """The mean over the second half."""
    half = values[len(values) // 2 :]
    return sum(half) / len(half)


def check_tunable(acceptance: AcceptanceTest) -> None:
    """Refuse to tune to the acceptance of a test that accepts everything."""
    if not acceptance.needs_noise:
        raise ValueError(
            f"there is nothing to adapt to: '{acceptance}' accepts every step, however long. Give the step size and no "
            "`burn_in`; or take `Microcanonical` on fixed data, which finds its steps without a test; or first adapt with a "
            "Metropolis test on fixed data, then set `sampler.acceptance = AlwaysAccept()` and `sampler.fixed_data = False`."
        )


def check_common(kernel: Any, settings: BurnIn) -> None:
    """Refuse to adapt, to the mean acceptance of all chains, a setting that differs between them."""
    adapted = {"sigma", "step_size"}
    if hasattr(kernel, "with_sigma_along") and settings.proposal_acceptance is not None:
        adapted.add("sigma_along")
    for name, _ in chain_settings(kernel):
        if name in adapted:
            raise ValueError(
                f"`{name}` differs between the chains, and burn-in would adapt it to their mean acceptance: give one "
                "starting value for all chains, or do not adapt."
            )


def changed(kernel: Any, change: Change, structure: Any = None) -> Any:
    """The kernel with a change applied."""
    kernel = kernel.scaled(change.factor)
    if change.sigma_along is not None:
        kernel = kernel.with_sigma_along(change.sigma_along)
    if change.preconditioner is not None:
        kernel = kernel.with_preconditioner(change.preconditioner, structure)
    if change.friction is not None:
        kernel = kernel.with_friction(change.friction)
    return kernel


def momentum_spread(
    potential: Potential,
    params: Leaves,
    here: Evaluation,
    proposal: Prolate,
    lr: float,
    generator: Randomness,
    num_proposals: int = 20,
) -> tuple[float, float]:
    """(s1, s2) for `exact_adam_mcmc`: 1.5 times the median of |D_l| = |g(tau)^l - g(theta)^l| over a few proposals.

    The proposals have the kernel's noise and steps of its length, lr for each weight, along the gradient. The cost is
    `num_proposals` gradients. Measure where the chain will run, not at an optimum.
    """
    assert here.grad is not None
    update = tuple(lr * g / (g.abs() + _rms(g)) for g in here.grad)
    sizes: list[list[float]] = []
    for _ in range(num_proposals):
        there = potential.evaluate(proposal.propose(params, update, generator).proposed, with_grad=True)
        assert there.grad is not None
        changes = [(h - g, h.square() - g.square()) for g, h in zip(here.grad, there.grad, strict=True)]
        norms = [torch.stack([inner(pair[i], pair[i]) for pair in changes]).sum(0).sqrt() for i in (0, 1)]
        if all(bool(n.isfinite().any()) for n in norms):
            sizes.append([float(n[n.isfinite()].median()) for n in norms])
    if not sizes:
        raise ValueError("no proposal had a finite gradient: `sigma` or `lr` is far too large.")
    first, second = (1.5 * statistics.median(column) for column in zip(*sizes, strict=True))
    if not (first > 0 and second > 0):
        raise ValueError("the gradient does not change over a proposal, which gives no scale: set `momentum_spread`.")
    return first, second


def _rms(g: Tensor) -> Tensor:
    """Root mean square of each chain, never zero."""
    mean = g.square().reshape(g.shape[0], -1).mean(1).sqrt()
    return per_chain(mean.clamp_min(torch.finfo(g.dtype).tiny), g)
