"""Metropolis-Hastings on a batch or on the whole data set, and no test at all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from adammcmc.acceptance.comparison import AcceptanceTest, Comparison, Verdict
from adammcmc.acceptance.subsample import Estimate, check_batch_size, estimate
from adammcmc.errors import PerExampleLossRequired
from adammcmc.target.leaves import is_finite
from adammcmc.target.randomness import Randomness, uniform
from adammcmc.target.sums import sums

__all__ = [
    "AlwaysAccept",
    "FullData",
    "Minibatch",
    "Penalty",
    "beta_eff",
    "decision_as_rate",
    "decisive",
    "effective_beta",
    "metropolis",
]


@dataclass(frozen=True)
class _BatchTest(AcceptanceTest):
    """A test on this step's batch, or on a batch of fixed size drawn for the decision alone."""

    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            check_batch_size(self.batch_size)

    @property
    def needs_examples(self) -> bool:  # type: ignore[override]
        return self.batch_size is not None

    reads_device = needs_examples

    @property
    def _batch(self) -> str:
        return "the batch" if self.batch_size is None else f"{self.batch_size} examples"


@dataclass(frozen=True)
class Minibatch(_BatchTest):
    """Metropolis on this step's batch, the same batch on both sides: log uniform < Y (paper: eq. (3), section 4).

    Exact if the batch is the whole data set (`fixed_data=True`) or the target is a density. Otherwise approximate:
    noise of standard deviation s in the estimated ratio makes the sampled distribution too hot. For small moves it
    multiplies the inverse temperature by

        beta_eff(s) = 2 w / (1/2 + w),    w = e^(s^2/2) Phi(-s)

    (1 is right). s is measured at each step if per-example losses are available (`Info.log_ratio_noise`).
    Data: one more forward pass of this batch.

    Args:
        batch_size: None decides on the batch of the step's gradient. A number draws that many examples for the decision
            alone, without replacement, so that the move does not depend on them; this needs `examples`.
    """

    is_metropolis = True

    @property
    def uses_batch_only(self) -> bool:  # type: ignore[override]
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
        return f"Metropolis on {self._batch}"


@dataclass(frozen=True)
class Penalty(_BatchTest):
    r"""Metropolis with a penalty for noise (Ceperley and Dewing 1999; Kawasaki and Holzmann 2022).

        accept with  min(1, exp(Yhat - s^2 / 2))

    For normal Yhat ~ N(Y, s^2) with known s, detailed balance holds exactly on average: E a(Y) / E a(-Y) = e^Y, with
    E a(Y) = Phi(Y/s - s/2) + e^Y Phi(-Y/s - s/2). As s is estimated from the per-example losses, the test is
    approximate: good for batches of 200 or more and s up to about 2. Rejection grows with s (acceptance 2 Phi(-s/2) at
    Y = 0); choose the batch so that s is about 1. Data: the batch.

    Args:
        batch_size: None decides on the batch of the step's gradient, and the closure must return per-example losses;
            the move of a Langevin kernel then depends on the noise of its own test. A number draws that many examples
            for the decision alone, which needs `examples`.
    """

    def __call__(self, comparison: Comparison, carry: None, generator: Randomness) -> tuple[Verdict, None]:
        log_uniform = decisive(comparison, generator)
        found = self._on_batch(comparison) if self.batch_size is None else estimate(comparison, generator, self.batch_size)
        y, s = found.log_ratio, found.noise
        verdict = metropolis(comparison, y - s.square() / 2, log_uniform, found.num_examples)
        return verdict._replace(log_ratio=y, is_current_finite=found.is_current_finite, log_ratio_noise=s), None

    def _on_batch(self, comparison: Comparison) -> Estimate:
        y, s, size = comparison.batch_log_ratio(), comparison.batch_noise(), comparison.batch_size
        if s is None and (size is None or size < 2):
            raise PerExampleLossRequired(
                "Penalty() needs the noise of the log ratio, but the closure returned only the mean loss of the batch. "
                'Return the per-example losses (reduction="none").'
            )
        # (outside the prior's support nothing was estimated)
        return Estimate(y, torch.zeros_like(y) if s is None else s, torch.full_like(y, size or torch.nan), None)

    def approximation(self, *, fixed_data: bool) -> str | None:
        return None if fixed_data else "the noise of the log ratio is assumed normal, of the measured size (penalty)"

    def __str__(self) -> str:
        return f"Metropolis with penalty on {self._batch}"


@dataclass(frozen=True)
class FullData(AcceptanceTest):
    """Metropolis on the whole data set: Y from the float64 sum of l_i(tau) - l_i(theta) over all examples, in chunks.

    Exact, whatever batch the proposal's gradient used. Data: one forward pass of all n examples (the losses at the
    current point are cached). The model must be deterministic (no dropout, no batch statistics).

    Args:
        chunk_size: examples in one forward pass.
        early_rejection: stop as soon as rejection is certain. Also exact, but only if no loss can be negative (cross
            entropy, squared error): a negative loss is refused. The partial sum is read after each chunk, which
            synchronises with an accelerator.
    """

    chunk_size: int = 4096
    early_rejection: bool = False
    is_metropolis = True
    needs_examples = True
    uses_all_data = True

    def __post_init__(self) -> None:
        if not self.chunk_size >= 1:
            raise ValueError(f"`chunk_size` must be at least 1, got {self.chunk_size}.")

    @property
    def reads_device(self) -> bool:  # type: ignore[override]
        return self.early_rejection

    def carried_losses(self, carry: Tensor | None) -> Tensor | None:
        return carry

    def __call__(self, comparison: Comparison, carry: Tensor | None, generator: Randomness) -> tuple[Verdict, Tensor | None]:
        log_uniform = decisive(comparison, generator)
        potential = comparison.potential
        if (n := potential.num_examples) is None:
            if not potential.fixed:
                raise PerExampleLossRequired(
                    "FullData() needs the losses of all examples. Pass `examples=TensorExamples(loss, inputs, "
                    "targets)` to the sampler, with a loss that returns one number per example."
                )
            # the batch is all data
            verdict = metropolis(comparison, comparison.batch_log_ratio(), log_uniform, float("nan"))
            return verdict._replace(log_ratio_noise=comparison.batch_noise()), None

        chunks = [slice(i, min(i + self.chunk_size, n)) for i in range(0, n, self.chunk_size)]
        # the proposal's own evaluations come first: they may need the batch, and put the proposed weights in place
        fixed_part = comparison.log_q_ratio() + comparison.log_prior_difference()
        current = carry if carry is not None else torch.cat([comparison.current_losses(c) for c in chunks], 1)
        level = potential.inverse_temperature * sums.over_examples(current.sum(1)) - comparison.here.log_prior
        if self.early_rejection:
            verdict, kept = self._decide_early(comparison, _not_negative(current), chunks, fixed_part, log_uniform)
            return verdict._replace(potential=level), kept
        proposed = torch.cat([comparison.proposed_losses(c) for c in chunks], 1)
        log_ratio = fixed_part - potential.inverse_temperature * sums.over_examples((proposed - current).sum(1))
        verdict = metropolis(comparison, log_ratio, log_uniform, n)
        verdict = verdict._replace(is_current_finite=is_finite(level), log_ratio_noise=torch.zeros_like(level), potential=level)
        return verdict, torch.where(verdict.is_accepted[:, None], proposed, current)

    def _decide_early(
        self, comparison: Comparison, current: Tensor, chunks: list[slice], fixed_part: Tensor, log_uniform: Tensor
    ) -> tuple[Verdict, Tensor]:
        """Accept iff lambda * sum(D) < budget. Unseen examples lower the sum by l_i(theta) at most: l_i(tau) >= 0."""
        lam = comparison.potential.inverse_temperature
        budget = fixed_part - log_uniform
        total, all_current = torch.zeros_like(budget), sums.over_examples(current.sum(1))
        unseen, finite = lam * all_current, is_finite(all_current)
        slack = 1e-9 * (1 + unseen.abs())  # rounding of the partial sums must never decide
        parts: list[Tensor] = []
        seen = 0
        while seen < current.shape[1] and not bool((total - unseen > budget + slack).all()):
            chunk = chunks[len(parts)]
            losses = _not_negative(comparison.proposed_losses(chunk))
            total = total + lam * sums.over_examples((losses - current[:, chunk]).sum(1))
            unseen = unseen - lam * sums.over_examples(current[:, chunk].sum(1))
            parts.append(losses)
            seen = chunk.stop
        zero = torch.zeros_like(budget)
        if seen == current.shape[1]:
            proposed = torch.cat(parts, 1)
            log_ratio = fixed_part - lam * sums.over_examples((proposed - current).sum(1))
            verdict = decision_as_rate(metropolis(comparison, log_ratio, log_uniform, seen))
            verdict = verdict._replace(is_current_finite=finite, log_ratio_noise=zero)
            return verdict, torch.where(verdict.is_accepted[:, None], proposed, current)
        log_ratio = torch.where(fixed_part == -torch.inf, fixed_part, torch.nan)
        inside = is_finite(total) & is_finite(fixed_part)
        return Verdict(zero.bool(), zero, log_ratio, inside, zero + seen, finite, zero), current

    def approximation(self, *, fixed_data: bool) -> str | None:
        return None

    def __str__(self) -> str:
        return "Metropolis on the full data" + (", early rejection" if self.early_rejection else "")


@dataclass(frozen=True)
class AlwaysAccept(AcceptanceTest):
    """No correction: every proposal inside the prior's support is accepted. Approximate (an unadjusted sampler).

    The loss at the proposal is not evaluated, so a step costs as much as the optimizer's own step. With sigma = 0 it
    *is* the optimizer. A non-finite loss is noticed one step later, at the new current point, where the chain freezes.
    """

    needs_noise = False
    is_metropolis = True
    uses_batch_only = True

    def __call__(self, comparison: Comparison, carry: None, generator: Randomness) -> tuple[Verdict, None]:
        inside = is_finite(comparison.log_prior_difference()) & comparison.may_move
        unknown = torch.full_like(comparison.here.log_prior, torch.nan)
        return Verdict(inside, inside.double(), unknown, inside, torch.zeros_like(unknown)), None

    def approximation(self, *, fixed_data: bool) -> str | None:
        return "no Metropolis correction"

    def __str__(self) -> str:
        return "always accept"


def decisive(comparison: Comparison, generator: Randomness) -> Tensor:
    """log of the deciding uniform number, (chains,), float64: the kernel's, or a new one."""
    if comparison.log_uniform is not None:
        return comparison.log_uniform
    return uniform((comparison.num_chains,), torch.float64, comparison.device, generator).log()


def metropolis(comparison: Comparison, log_ratio: Tensor, log_uniform: Tensor, num_examples: float | Tensor) -> Verdict:
    """Accept iff log uniform < Y < inf: a NaN compares false, and +inf would be a loss of -inf."""
    is_accepted = (log_uniform < log_ratio) & (log_ratio < torch.inf) & comparison.may_move
    acceptance_rate = log_ratio.clamp(max=0).exp().nan_to_num(nan=0.0)
    num = num_examples if isinstance(num_examples, Tensor) else torch.full_like(log_ratio, num_examples)
    return Verdict(is_accepted, acceptance_rate, log_ratio, is_finite(log_ratio), num)


def decision_as_rate(verdict: Verdict) -> Verdict:
    """If the data used depend on the uniform number, the mean of min(1, e^Y) is biased, that of decisions is not."""
    return verdict._replace(acceptance_rate=verdict.is_accepted.double())


def _not_negative(losses: Tensor) -> Tensor:
    if bool((losses < 0).any()):
        raise ValueError("FullData(early_rejection=True) met a negative loss, for which it is not exact. Set it to False.")
    return losses


def beta_eff(noise: Tensor) -> Tensor:
    """The factor by which noise s in the log ratio of a Metropolis test lowers the inverse temperature (small moves).

    Example:
        >>> beta_eff(torch.tensor([0.0, 1.0, 10.0], dtype=torch.float64)).round(decimals=2)
        tensor([1.0000, 0.6900, 0.1500], dtype=torch.float64)
    """
    w: Tensor = 0.5 * torch.special.erfcx(noise / math.sqrt(2))
    return 2 * w / (0.5 + w)


def effective_beta(test: AcceptanceTest, noise: Tensor) -> Tensor:
    """`beta_eff` of a Metropolis test; NaN for tests that account for the noise of Y."""
    return beta_eff(noise.double()) if test.is_metropolis else torch.full_like(noise, torch.nan)
