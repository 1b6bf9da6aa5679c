r"""Adaptation of a kernel's settings in burn-in, after which they are frozen.

While a kernel adapts it has no invariant distribution, so its states are not draws. `BurnIn` holds the options;
`Adaptation` applies them step by step:

    log scale <- log scale + gain (acceptance - target),   gain = min(1, 2 (k + 1)^-0.6)            (Robbins-Monro)
    sigma_along = sqrt(1 / kappa^2 - 1 / r^2), r = |u| / sigma, 2 Phi(-kappa) = proposal_acceptance (Algorithm 1)
    A = (mean of (grad U)^2 + prior precision)^-1/2                                                 (preconditioner)

in windows that grow by half, until U has the same level in two consecutive windows. The last window then tunes the
scale alone; the scale is averaged over its second half, and everything is frozen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adammcmc.acceptance import AcceptanceTest
from adammcmc.errors import warn
from adammcmc.kernels.arguments import chain_settings
from adammcmc.kernels.proposal import Prolate
from adammcmc.target.leaves import Leaves, Setting, by_chain, inner, per_chain
from adammcmc.target.potential import Evaluation, Potential
from adammcmc.target.randomness import Randomness

__all__ = ["Adaptation", "BurnIn", "Change", "changed", "check_common", "check_tunable", "mean_of", "momentum_spread"]

_SMALLEST_NOISE = 1e-3  # relative to the step; below this, tuning the noise has no effect
_FROZEN = 0.01  # acceptance
_NAMED = 10  # chains in a warning


@dataclass(frozen=True)
class BurnIn:
    """How a sampler tunes its settings before it collects draws.

    Args:
        num_steps: steps of adaptation; None continues until U is flat.
        max_steps: the limit on waiting for a flat U; the settings are then frozen, with a warning.
        target_acceptance: the acceptance that the scale (sigma, or the step size) is tuned to. None is the kernel's
            own: 0.6 for Algorithm 1, 0.57 for MALA, 0.85 for the underdamped kernel, 0.25 for the exact chain of
            Theorem 1; for `Barker`, its acceptance of moves that Metropolis would accept at that rate.
        proposal_acceptance: of Algorithm 1's proposal alone, which sets sigma_along; must exceed `target_acceptance`.
            None leaves sigma_along unchanged.
        window: steps in the first window.
        learn_preconditioner: also learn A, where the kernel has one.
    """

    num_steps: int | None = None
    max_steps: int = 50_000
    target_acceptance: float | None = None
    proposal_acceptance: float | None = 0.8
    window: int = 100
    learn_preconditioner: bool = True

    def __post_init__(self) -> None:
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

    factor: float
    """Multiplies the scale of its moves."""
    sigma_along: float | None
    preconditioner: Leaves | None


class Adaptation:
    """The state of one adaptation. It reads numbers from the device at each step (in burn-in only).

    Args:
        settings: the options.
        target: the acceptance to reach.
        tunes_sigma_along: whether the kernel is Algorithm 1's.
        num_params: weights of a chain, for the natural scale of U: its standard deviation is about sqrt(P / 2).
        precision: of the prior, in the shapes of the leaves; None where it has none.
        learns: whether the kernel takes a preconditioner.
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
        self._precision = precision
        self._natural = math.sqrt(num_params / 2)
        self._learns = learns and settings.learn_preconditioner
        self._kappa = None
        if tunes_sigma_along and (rate := settings.proposal_acceptance) is not None:
            if rate <= self.target:
                raise ValueError(f"`proposal_acceptance` must exceed the target acceptance {self.target}, got {rate}.")
            self._kappa = statistics.NormalDist().inv_cdf(1 - rate / 2)
        self._step = 0
        self._length = settings.window
        self._is_last = settings.num_steps is not None and settings.num_steps < 6
        if settings.num_steps is not None:  # two windows at least: the second tunes to the preconditioner of the first
            self._length = settings.num_steps if self._is_last else min(settings.window, settings.num_steps // 3)
        self._is_searching = True
        self._first_sign = 0
        self._log_scale = 0.0
        self._start_window()
        self._levels: list[tuple[float, float]] = []  # mean and standard deviation of U in each window
        self._ratio = math.nan
        self._diagonal: Leaves | None = None

    def _start_window(self) -> None:
        self._in_window = 0
        self._potentials: list[float] = []
        self._acceptances: list[float] = []
        self._log_scales: list[float] = []
        self._squares: list[Tensor] | None = None
        self._by_chain: Tensor | None = None  # sums of each chain's acceptance, over the second half of the window

    def observe(
        self, acceptance: Tensor, potential: Tensor, step_to_noise: Tensor, grad: Leaves | None, scale: Setting
    ) -> Change:
        """The change after a step with these numbers of each chain; `grad` of V at the new point, U = scale V."""
        acceptance = acceptance.double().nan_to_num(nan=0.0)
        rate = float(acceptance.mean())
        self._step += 1
        self._in_window += 1
        self._potentials.append(float(potential.mean()))
        self._acceptances.append(rate)
        if self._in_window > self._length // 2:
            self._by_chain = acceptance if self._by_chain is None else self._by_chain + acceptance
        ratio = float(step_to_noise.log().mean().exp())
        if math.isfinite(ratio) and ratio > 0:
            self._ratio = ratio if math.isnan(self._ratio) else math.exp(0.9 * math.log(self._ratio) + 0.1 * math.log(ratio))
        if self._learns and grad is not None and not self._is_last:
            self._add_squares(grad, scale)
        move = self._towards(rate)
        self._log_scale += move
        self._log_scales.append(self._log_scale)
        self.has_new_window = self._in_window >= self._length
        diagonal = self._end_of_window() if self.has_new_window else None
        if self.is_done:  # freeze at the mean over the second half of the last window
            move += _late_mean(self._log_scales) - self._log_scale
        if diagonal is not None:
            move += self._rescale(diagonal)
        along = None
        if self._kappa is not None and not math.isnan(self._ratio):
            along = math.sqrt(max(0.0, self._kappa**-2 - self._ratio**-2))
        return Change(math.exp(move), along, diagonal)

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

    def _add_squares(self, grad: Leaves, scale: Setting) -> None:
        squares = [(g.double() * by_chain(scale, g.double())).square().mean(0) for g in grad]
        finite = [torch.where(s.isfinite(), s, 0.0) for s in squares]
        self._squares = finite if self._squares is None else [a + b for a, b in zip(self._squares, finite, strict=True)]

    def _end_of_window(self) -> Leaves | None:
        """Close the window and decide on the next one; the new preconditioner, if one was learned."""
        self.reached = _late_mean(self._acceptances)
        if self._is_last:
            self.is_done = True
            self.frozen = self._frozen()
            return None
        self._levels.append((statistics.fmean(self._potentials), statistics.pstdev(self._potentials)))
        self.is_flat = self._is_level()
        diagonal = self._preconditioner()
        grown = math.ceil(1.5 * self._length)
        has_limit = self.settings.num_steps is not None
        left = (self.settings.num_steps or self.settings.max_steps) - self._step
        if (has_limit or not self.is_flat) and left > 2 * grown:
            self._length = grown
        else:
            self._is_last = True
            self._length = max(1, left if has_limit else min(grown, max(left, self._length // 2)))
        self._start_window()
        return diagonal

    def _frozen(self) -> list[int]:
        """The chains whose acceptance is nearly zero while that of others is not."""
        if self._by_chain is None or len(self._by_chain) < 2:
            return []
        rates = (self._by_chain / (self._in_window - self._length // 2)).cpu()
        is_frozen = rates < min(_FROZEN, 0.1 * float(rates.max()))
        return [int(chain) for chain in is_frozen.nonzero().flatten()]

    def _is_level(self) -> bool:
        """Whether U had the same level in this window and the previous one, within half of its own fluctuation.

        Where U is only estimated, batch noise must not count as fluctuation: that is at most the natural one, and the
        window must be long enough to resolve it.
        """
        if len(self._levels) < 2:
            return False
        (before, _), (now, fluctuation) = self._levels[-2:]
        half = len(self._potentials) // 2
        drift = statistics.fmean(self._potentials[half:]) - statistics.fmean(self._potentials[:half])
        resolution = 2 * fluctuation / math.sqrt(half)
        return max(abs(now - before), abs(drift), resolution) < 0.5 * min(fluctuation, self._natural)

    def _preconditioner(self) -> Leaves | None:
        if self._squares is None:
            return None
        means = [s / self._in_window for s in self._squares]
        if self._precision is None:
            floor = 1e-3 * sum(float(m.sum()) for m in means) / sum(m.numel() for m in means)
            return tuple((m + max(floor, 1e-30)).rsqrt() for m in means)
        return tuple((m + q).rsqrt() for m, q in zip(means, self._precision, strict=True))

    def _rescale(self, diagonal: Leaves) -> float:
        """The change of log scale that keeps the length of a move, h * sqrt(mean A), when A changes."""
        before = 1.0 if self._diagonal is None else mean_of(self._diagonal)
        self._diagonal = diagonal
        return 0.5 * math.log(before / mean_of(diagonal))

    def state_dict(self) -> dict[str, Any]:
        """The state as numbers, lists and tensors, and the settings as numbers."""
        state = {key: value for key, value in self.__dict__.items() if key not in ("settings", "_precision")}
        return {**state, "settings": asdict(self.settings)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.__dict__.update({**state, "settings": BurnIn(**state["settings"])})

    def complaint(self) -> str | None:
        """What burn-in has not reached so far, in words; None if it has reached everything."""
        if self.settings.num_steps is None and not self.is_flat:
            return (
                f"burn-in ended after {self._step} steps while U was still moving, and no further window fits into "
                f"max_steps = {self.settings.max_steps}: draws from there on are not from the target yet. Start where "
                "the density is higher (train a network first), or raise max_steps"
            )
        reached = self.reached or 0.0
        if reached < self.target - 0.15:
            advice = "The step itself may be the cause of rejections: lower lr, or allow more steps"
        elif reached > self.target + 0.6 * (1 - self.target):
            advice = "The steps are still too short: allow more steps of burn-in"
        else:
            return None
        return f"burn-in reached an acceptance of {reached:.2f} instead of {self.target:.2f}. {advice}"

    def warn(self) -> None:
        """Warn of what burn-in did not reach, and of the chains that do not move."""
        if (complaint := self.complaint()) is not None:
            warn(f"{complaint}.")
        self.warn_of_frozen()

    def warn_of_frozen(self) -> None:
        """Name the chains that do not move."""
        if not self.frozen:
            return
        named = ", ".join(map(str, self.frozen[:_NAMED]))
        more = f" and {len(self.frozen) - _NAMED} more" if len(self.frozen) > _NAMED else ""
        assert self._by_chain is not None
        warn(
            f"{len(self.frozen)} of {len(self._by_chain)} chains do not move at the end of burn-in: {named}{more}. "
            f"Their acceptance is below {_FROZEN}, while the mean over all chains is {self.reached:.2f}. Their draws "
            "are copies of one point, not draws from the target. Start them nearer to its bulk, or leave them out.",
        )


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
            "`burn_in`, or first adapt with a Metropolis test on fixed data, then set "
            "`sampler.acceptance = AlwaysAccept()` and `sampler.fixed_data = False`."
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
