"""Metropolis-Hastings on this step's batch, on the whole data set, or not at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adammcmc.acceptance.comparison import AcceptanceTest, Comparison, Verdict
from adammcmc.acceptance.subsample import check_batch_size, estimate
from adammcmc.errors import PerExampleLossRequired
from adammcmc.target.leaves import is_finite
from adammcmc.target.randomness import Randomness, uniform

__all__ = ["AlwaysAccept", "FullData", "Minibatch", "beta_eff", "decisive", "effective_beta", "metropolis"]


@dataclass(frozen=True)
class Minibatch(AcceptanceTest):
    """Metropolis on this step's batch, the same batch on both sides: log uniform < Y (paper: eq. (3), section 4).

    Exact when the batch is the whole data set (`fixed_data=True`) or the target is a density. Otherwise approximate: noise of
    standard deviation s in the estimated ratio makes the sampled distribution too hot, for small moves by the factor

        beta_eff(s) = 2 w / (1/2 + w),    w = e^(s^2/2) Phi(-s),

    in the inverse temperature (1 is right). s is measured at each step, where the losses of the examples are known
    (`Info.log_ratio_noise`). Data: one more forward of this batch.

    Args:
        batch_size: None decides on the batch that the step's gradient was taken on. A number draws so many examples for the
            decision alone, without replacement, which needs `examples`: the move then does not depend on them.
    """

    batch_size: int | None = None
    is_metropolis: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            check_batch_size(self.batch_size)

    @property
    def needs_examples(self) -> bool:
        return self.batch_size is not None

    reads_device = needs_examples

    @property
    def uses_batch_only(self) -> bool:
        return self.batch_size is None

    def __call__(self, comparison: Comparison, carry: None, generator: Randomness) -> tuple[Verdict, None]:
        log_uniform = decisive(comparison, generator)
        if self.batch_size is not None:
            found = estimate(comparison, generator, self.batch_size)
            verdict = metropolis(comparison, found.log_ratio, log_uniform, found.num_examples)
            return verdict._replace(is_current_finite=found.is_current_finite, log_ratio_noise=found.noise), None
        size = comparison.batch_size
        num_examples = float("nan") if size is None else size
        verdict = metropolis(comparison, comparison.batch_log_ratio(), log_uniform, num_examples)
        return verdict._replace(log_ratio_noise=comparison.batch_noise()), None

    def approximation(self, *, fixed_data: bool) -> str | None:
        return None if fixed_data else "the ratio is estimated on a minibatch, which heats the target"

    def __str__(self) -> str:
        return "Metropolis on " + ("the batch" if self.batch_size is None else f"{self.batch_size} examples")


@dataclass(frozen=True)
class FullData(AcceptanceTest):
    """Metropolis on the whole data set: Y from the float64 sum of l_i(tau) - l_i(theta) over all examples, in chunks.

    Exact, whatever batch the proposal's gradient was taken on. Data: all n examples, one forward each (the losses at the
    current point are remembered). The model must give the same losses when asked twice (no dropout, no batch statistics).

    Args:
        chunk_size: examples in one forward.
        early_rejection: stop as soon as rejection is certain. Exact as well, but only if no loss can be negative
            (cross entropy, squared error): a negative one is refused. It looks at the partial sum after each chunk, which on
            an accelerator waits for it.
    """

    chunk_size: int = 4096
    early_rejection: bool = False
    is_metropolis: ClassVar[bool] = True
    needs_examples: ClassVar[bool] = True
    uses_all_data: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.chunk_size >= 1:
            raise ValueError(f"`chunk_size` must be at least 1, got {self.chunk_size}.")

    @property
    def reads_device(self) -> bool:
        return self.early_rejection

    def __call__(self, comparison: Comparison, carry: Tensor | None, generator: Randomness) -> tuple[Verdict, Tensor | None]:
        log_uniform = decisive(comparison, generator)
        potential = comparison.potential
        if (n := potential.num_examples) is None:
            if not potential.fixed:
                raise PerExampleLossRequired(
                    "FullData() needs the losses of all examples. Pass `examples=TensorExamples(loss, inputs, targets)` "
                    "to the sampler, with a loss that returns one number for each example."
                )
            # the batch is all data
            verdict = metropolis(comparison, comparison.batch_log_ratio(), log_uniform, float("nan"))
            return verdict._replace(log_ratio_noise=comparison.batch_noise()), None

        chunks = [slice(i, min(i + self.chunk_size, n)) for i in range(0, n, self.chunk_size)]
        # the proposal's own evaluations come first: they may need the batch, and put the proposed weights in place
        fixed_part = comparison.log_q_ratio() + comparison.log_prior_difference()
        current = carry if carry is not None else torch.cat([comparison.current_losses(c) for c in chunks], 1)
        level = potential.inverse_temperature * current.sum(1) - comparison.here.log_prior
        if self.early_rejection:
            verdict, kept = self._decide_early(comparison, _not_negative(current), chunks, fixed_part, log_uniform)
            return verdict._replace(potential=level), kept
        proposed = torch.cat([comparison.proposed_losses(c) for c in chunks], 1)
        log_ratio = fixed_part - potential.inverse_temperature * (proposed - current).sum(1)
        verdict = metropolis(comparison, log_ratio, log_uniform, n)
        verdict = verdict._replace(is_current_finite=is_finite(level), log_ratio_noise=torch.zeros_like(level), potential=level)
        return verdict, torch.where(verdict.is_accepted[:, None], proposed, current)

    def _decide_early(
        self, comparison: Comparison, current: Tensor, chunks: list[slice], fixed_part: Tensor, log_uniform: Tensor
    ) -> tuple[Verdict, Tensor]:
        """accept iff lambda * sum(D) < budget; since l_i(tau) >= 0, unseen examples can lower the sum only by l_i(theta)."""
        lam = comparison.potential.inverse_temperature
        budget = fixed_part - log_uniform
        total, unseen = torch.zeros_like(budget), lam * current.sum(1)
        slack = 1e-9 * (1 + unseen.abs())  # rounding of the partial sums must never decide
        parts: list[Tensor] = []
        seen = 0
        while seen < current.shape[1] and not bool((total - unseen > budget + slack).all()):
            chunk = chunks[len(parts)]
            losses = _not_negative(comparison.proposed_losses(chunk))
            total = total + lam * (losses - current[:, chunk]).sum(1)
            unseen = unseen - lam * current[:, chunk].sum(1)
            parts.append(losses)
            seen = chunk.stop
        if seen == current.shape[1]:
            proposed = torch.cat(parts, 1)
            log_ratio = fixed_part - lam * (proposed - current).sum(1)
            verdict = metropolis(comparison, log_ratio, log_uniform, seen)
            # whether Y becomes known depends on the uniform, so that the mean of min(1, e^Y) over known ones would be biased
            decision, exact = verdict.is_accepted.double(), torch.zeros_like(budget)
            verdict = verdict._replace(
                acceptance_rate=decision, is_current_finite=is_finite(current.sum(1)), log_ratio_noise=exact
            )
            return verdict, torch.where(verdict.is_accepted[:, None], proposed, current)
        rejected = torch.zeros_like(budget)
        log_ratio = torch.where(fixed_part == -torch.inf, fixed_part, torch.nan)
        inside = is_finite(total) & is_finite(fixed_part)
        finite = is_finite(current.sum(1))
        return Verdict(rejected.bool(), rejected, log_ratio, inside, rejected + seen, finite, rejected), current

    def carried_losses(self, carry: Tensor | None) -> Tensor | None:
        return carry

    def approximation(self, *, fixed_data: bool) -> str | None:
        return None

    def __str__(self) -> str:
        return "Metropolis on the full data" + (", early rejection" if self.early_rejection else "")


@dataclass(frozen=True)
class AlwaysAccept(AcceptanceTest):
    """No correction: every proposal inside the prior's support is taken. Approximate (an unadjusted sampler).

    The loss at the proposal is not evaluated, so a step costs what the optimizer's own step costs. With sigma = 0 it *is*
    the optimizer. A non-finite loss is met one step later, at the new current point, where the chain freezes.
    """

    needs_noise: ClassVar[bool] = False
    is_metropolis: ClassVar[bool] = True
    uses_batch_only: ClassVar[bool] = True

    def __call__(self, comparison: Comparison, carry: None, generator: Randomness) -> tuple[Verdict, None]:
        inside = is_finite(comparison.log_prior_difference()) & comparison.may_move
        unknown = torch.full_like(comparison.here.log_prior, torch.nan)
        return Verdict(inside, inside.double(), unknown, inside, torch.zeros_like(unknown)), None

    def approximation(self, *, fixed_data: bool) -> str | None:
        return "no Metropolis correction"

    def __str__(self) -> str:
        return "always accept"


def _not_negative(losses: Tensor) -> Tensor:
    if bool((losses < 0).any()):
        raise ValueError("FullData(early_rejection=True) met a negative loss, for which it is not exact. Set it to False.")
    return losses


def decisive(comparison: Comparison, generator: Randomness) -> Tensor:
    """log of the uniform number that decides, (chains,), float64: the kernel's, or a new one."""
    if comparison.log_uniform is not None:
        return comparison.log_uniform
    return uniform((comparison.num_chains,), torch.float64, comparison.device, generator).log()


def metropolis(comparison: Comparison, log_ratio: Tensor, log_uniform: Tensor, num_examples: float | Tensor) -> Verdict:
    """Accept iff log uniform < Y and Y is a number: a NaN compares false, and +inf is a loss of -inf, no place to go."""
    is_accepted = (log_uniform < log_ratio) & (log_ratio < torch.inf) & comparison.may_move
    acceptance_rate = log_ratio.clamp(max=0).exp().nan_to_num(nan=0.0)
    num = num_examples if isinstance(num_examples, Tensor) else torch.full_like(log_ratio, num_examples)
    return Verdict(is_accepted, acceptance_rate, log_ratio, is_finite(log_ratio), num)


def beta_eff(noise: Tensor) -> Tensor:
    """By what factor noise s in the log ratio of a plain test lowers the inverse temperature, for small moves.

    Example:
        >>> beta_eff(torch.tensor([0.0, 1.0, 10.0], dtype=torch.float64)).round(decimals=2)
        tensor([1.0000, 0.6900, 0.1500], dtype=torch.float64)
    """
    w: Tensor = 0.5 * torch.special.erfcx(noise / math.sqrt(2))
    return 2 * w / (0.5 + w)


def effective_beta(test: AcceptanceTest, noise: Tensor) -> Tensor:
    """`beta_eff` of a plain test; NaN for tests that allow for the noise of Y."""
    return beta_eff(noise.double()) if test.is_metropolis else torch.full_like(noise, torch.nan)
