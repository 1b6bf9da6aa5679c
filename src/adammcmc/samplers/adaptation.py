r"""Finding the settings in burn-in, and leaving them alone afterwards.

While a kernel adapts it has no invariant distribution, so what is drawn then are not draws. `BurnIn` says how to adapt,
`Adaptation` does it, step by step, for every door:

    log scale <- log scale + gain (acceptance - target),   gain = min(1, 2 (k + 1)^-0.6)                    (Robbins-Monro)
    sigma_along = sqrt(1 / kappa^2 - 1 / r^2), r = |u| / sigma, 2 Phi(-kappa) = proposal_acceptance         (Algorithm 1)
    A = (mean of (grad U)^2 + prior precision)^-1/2                                                         (preconditioner)

in windows that grow by half, until U has the same level in two windows on end. Then the last window tunes the scale alone, its
second half is averaged, and everything is frozen.
"""

from __future__ import annotations

import math
import statistics
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

__all__ = ["Adaptation", "BurnIn", "Change", "changed", "check_common", "check_tunable", "momentum_spread", "target_rate"]

_SMALLEST_NOISE = 1e-3  # of the step: below, noise has nothing left to tune
_FROZEN = 0.01  # acceptance
_NAMED = 10  # chains in a warning


@dataclass(frozen=True)
class BurnIn:
    """How a sampler finds its own settings before it collects.

    Args:
        num_steps: steps of adaptation; None goes on until U is flat.
        max_steps: the most steps that waiting for a flat U may take; then the settings are frozen, with a warning.
        target_acceptance: what the scale (sigma, or the step size) is tuned to; None is the kernel's own: 0.6 for Algorithm 1,
            0.57 for MALA, 0.85 for the underdamped kernel, 0.25 for the exact chain of Theorem 1; for `Barker` what it makes
            of moves that Metropolis would accept so often.
        proposal_acceptance: of Algorithm 1's proposal alone, which sets sigma_along; must exceed `target_acceptance`. None
            leaves sigma_along as it is.
        window: steps in the first window.
        learn_preconditioner: learn A as well, where the kernel has one.
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
    """What a kernel must change before its next step."""

    factor: float
    """Multiplies the scale of its moves."""
    sigma_along: float | None
    preconditioner: Leaves | None


class Adaptation:
    """The state of one adaptation. It reads numbers from the device at each step (in burn-in only).

    Args:
        settings: how to adapt.
        target: the acceptance to reach.
        tunes_sigma_along: whether the kernel is Algorithm 1's.
        num_params: how many weights a chain has, for the natural scale of U: its standard deviation is about sqrt(P / 2).
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
        """Whether U had settled when the adaptation ended."""
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
        if tunes_sigma_along and settings.proposal_acceptance is not None:
            if settings.proposal_acceptance <= self.target:
                raise ValueError(
                    f"`proposal_acceptance` must exceed the target acceptance {self.target}, "
                    f"got {settings.proposal_acceptance}."
                )
            self._kappa = statistics.NormalDist().inv_cdf(1 - settings.proposal_acceptance / 2)
        self._step = 0
        self._in_window = 0
        self._length = settings.window
        self._is_last = settings.num_steps is not None and settings.num_steps < 6
        if settings.num_steps is not None:  # at least a second window, to tune the scale to the preconditioner of the first
            self._length = settings.num_steps if self._is_last else min(settings.window, settings.num_steps // 3)
        self._is_searching = True
        self._first_sign = 0
        self._log_scale = 0.0
        self._potentials: list[float] = []
        self._acceptances: list[float] = []
        self._by_chain: Tensor | None = None
        """Sums of each chain's acceptance, over the second half of the window."""
        self._log_scales: list[float] = []
        self._levels: list[tuple[float, float]] = []  # mean and standard deviation of U in each window
        self._squares: list[Tensor] | None = None
        self._ratio = math.nan
        self._diagonal: Leaves | None = None

    def observe(
        self, acceptance: Tensor, potential: Tensor, step_to_noise: Tensor, grad: Leaves | None, scale: Setting
    ) -> Change:
        """What to change after a step with these numbers (means over the chains); `grad` of V at the new point, U = scale V."""
        acceptance = acceptance.double().nan_to_num(nan=0.0)
        rate = float(acceptance.mean())
        level = float(potential.mean())
        self._step += 1
        self._in_window += 1
        self._potentials.append(level)
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
            half = self._log_scales[len(self._log_scales) // 2 :]
            move += sum(half) / len(half) - self._log_scale
        if diagonal is not None:
            move += self._rescale(diagonal)
        return Change(math.exp(move), self._along(), diagonal)

    def _towards(self, rate: float) -> float:
        """The step of log scale."""
        if self._ratio > 1 / _SMALLEST_NOISE and rate < self.target:
            return 0.0  # the noise is not what rejects
        if self._is_searching:  # from wherever it was started, in big steps, until the target is crossed
            sign = 1 if rate > self.target else -1
            if self._first_sign in (0, sign) and self._in_window < self._length // 2:
                self._first_sign = sign
                return 0.2 * sign
            self._is_searching = False
        return min(1.0, 2.0 * math.pow(self._in_window + 1, -0.6)) * (rate - self.target)

    def _along(self) -> float | None:
        if self._kappa is None or math.isnan(self._ratio):
            return None
        return math.sqrt(max(0.0, self._kappa**-2 - self._ratio**-2))

    def _add_squares(self, grad: Leaves, scale: Setting) -> None:
        squares = [(g.double() * by_chain(scale, g.double())).square().mean(0) for g in grad]
        finite = [torch.where(s.isfinite(), s, 0.0) for s in squares]
        self._squares = finite if self._squares is None else [a + b for a, b in zip(self._squares, finite, strict=True)]

    def _end_of_window(self) -> Leaves | None:
        """Close the window: is U flat? Returns a new preconditioner, if it is time for one."""
        second_half = self._acceptances[len(self._acceptances) // 2 :]
        self.reached = sum(second_half) / len(second_half)
        if self._is_last:
            self.is_done = True
            self.frozen = self._frozen()
            return None
        mean = statistics.fmean(self._potentials)
        self._levels.append((mean, statistics.pstdev(self._potentials)))
        self.is_flat = self._is_level()
        diagonal = self._preconditioner()
        grown = math.ceil(1.5 * self._length)
        limit = self.settings.num_steps if self.settings.num_steps is not None else self.settings.max_steps
        wants_more = self.settings.num_steps is not None or not self.is_flat
        left = limit - self._step
        if wants_more and left > 2 * grown:
            self._length = grown
        else:
            self._is_last = True
            self._length = max(1, left if self.settings.num_steps is not None else min(grown, max(left, self._length // 2)))
        self._in_window = 0
        self._potentials, self._acceptances, self._log_scales, self._squares = [], [], [], None
        self._by_chain = None
        return diagonal

    def _frozen(self) -> list[int]:
        """Numbers of the chains whose acceptance is next to nothing where that of the others is not."""
        if self._by_chain is None or len(self._by_chain) < 2:
            return []
        rates = (self._by_chain / (self._in_window - self._length // 2)).cpu()
        is_frozen = rates < min(_FROZEN, 0.1 * float(rates.max()))
        return [int(chain) for chain in is_frozen.nonzero().flatten()]

    def _is_level(self) -> bool:
        """Whether U was at one level in this window and the one before, within half of its own fluctuation.

        Where U is only estimated on batches, their noise must not pass for its fluctuation: that is at most the natural one,
        and the window must be long enough to see it.
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
        """What keeps the length of a move, h * sqrt(mean A), when A changes; in log scale."""

        def mean(leaves: Leaves) -> float:
            return sum(float(a.double().sum()) for a in leaves) / sum(a.numel() for a in leaves)

        before = 1.0 if self._diagonal is None else mean(self._diagonal)
        self._diagonal = diagonal
        return 0.5 * math.log(before / mean(diagonal))

    def state_dict(self) -> dict[str, Any]:
        """All that changes, as numbers, lists and tensors; and the settings, as numbers."""
        state = {key: value for key, value in self.__dict__.items() if key not in ("settings", "_precision")}
        return {**state, "settings": asdict(self.settings)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the other one stood."""
        self.__dict__.update({**state, "settings": BurnIn(**state["settings"])})

    def complaint(self) -> str | None:
        """What burn-in has not reached so far, in words; None where all is well."""
        if self.settings.num_steps is None and not self.is_flat:
            return (
                f"burn-in ended after {self._step} steps while U was still moving, and no further window fits into max_steps = "
                f"{self.settings.max_steps}: draws from there on are not from the target yet. Start where the density is "
                "higher (train a network first), or raise max_steps"
            )
        reached = self.reached or 0.0
        if reached < self.target - 0.15:
            advice = "The step itself may be what is rejected: lower lr, or allow more steps"
        elif reached > self.target + 0.6 * (1 - self.target):
            advice = "The steps are still too short: allow more steps of burn-in"
        else:
            return None
        return f"burn-in reached an acceptance of {reached:.2f} instead of {self.target:.2f}. {advice}"

    def warn(self) -> None:
        """Say what burn-in did not reach, and which chains it left behind."""
        if (complaint := self.complaint()) is not None:
            warn(f"{complaint}.")
        self.warn_of_frozen()

    def warn_of_frozen(self) -> None:
        """Name the chains that did not move."""
        if not self.frozen:
            return
        named = ", ".join(map(str, self.frozen[:_NAMED]))
        more = f" and {len(self.frozen) - _NAMED} more" if len(self.frozen) > _NAMED else ""
        assert self._by_chain is not None
        warn(
            f"{len(self.frozen)} of {len(self._by_chain)} chains stand still at the end of burn-in: {named}{more}. Their "
            f"acceptance is below {_FROZEN}, that of all chains {self.reached:.2f}. Their draws are copies of one point, and "
            "not from the target. Start them nearer to its bulk, or leave them out.",
        )


def check_tunable(acceptance: AcceptanceTest) -> None:
    """Refuse to tune to the acceptance of a test that takes everything."""
    if not acceptance.needs_noise:
        raise ValueError(
            f"there is nothing to adapt to: '{acceptance}' takes every step, however long. Give the step size and no "
            "`burn_in`, or adapt with a Metropolis test on fixed data first, then set `sampler.acceptance = AlwaysAccept()` "
            "and `sampler.fixed_data = False`."
        )


def target_rate(acceptance: AcceptanceTest, metropolis: float) -> float:
    """The acceptance to tune to where a Metropolis test would be tuned to `metropolis`: other tests may accept less."""
    translated = getattr(acceptance, "rate_like", None)
    return metropolis if translated is None else float(translated(metropolis))


def check_common(kernel: Any, settings: BurnIn) -> None:
    """Refuse to adapt, to the mean acceptance of all chains, what each chain has its own value of."""
    adapted = {"sigma", "step_size"}
    if hasattr(kernel, "with_sigma_along") and settings.proposal_acceptance is not None:
        adapted.add("sigma_along")
    for name, _ in chain_settings(kernel):
        if name in adapted:
            raise ValueError(
                f"`{name}` differs between the chains, and burn-in would adapt it to their mean acceptance: give one value for "
                "all chains to start from, or do not adapt."
            )


def changed(kernel: Any, change: Change, structure: Any = None) -> Any:
    """The kernel with what an adaptation asks for."""
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

    The proposals have the kernel's noise and steps of its length, lr for each weight, in the direction of the gradient. It
    costs `num_proposals` gradients, and should be taken where the chain will run, not at an optimum.
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
        raise ValueError("the gradient does not change over a proposal: there is no scale for `momentum_spread`. Give it.")
    return first, second


def _rms(g: Tensor) -> Tensor:
    """Root mean square of each chain, never zero."""
    mean = g.square().reshape(g.shape[0], -1).mean(1).sqrt()
    return per_chain(mean.clamp_min(torch.finfo(g.dtype).tiny), g)
