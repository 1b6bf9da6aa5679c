"""Metropolis-Hastings on a batch or on the whole data set, and no test at all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from adammcmc.acceptance.protocol import AcceptanceTest, Comparison, Verdict
from adammcmc.acceptance.subsample import Estimate, check_batches, estimate, on_batch
from adammcmc.errors import PerExampleLossRequired
from adammcmc.target.leaves import is_finite
from adammcmc.target.randomness import Randomness, uniform
from adammcmc.target.sums import sums

__all__ = ["AlwaysAccept", "FullData", "Minibatch", "Penalty", "beta_eff", "decisive", "effective_beta", "metropolis"]


@dataclass(frozen=True)
class _BatchTest(AcceptanceTest):
    """A test on this step's batch, or on a batch of fixed size drawn for the decision alone."""

    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            check_batches(self.batch_size)

    @property
    def needs_examples(self) -> bool:  # type: ignore[override]
        return self.batch_size is not None

    reads_device = needs_examples

    @property
    def _batch(self) -> str:
        return "the batch" if self.batch_size is None else f"{self.batch_size} examples"

    def _estimate(self, comparison: Comparison, generator: Randomness) -> Estimate:
        return on_batch(comparison) if self.batch_size is None else estimate(comparison, generator, self.batch_size)


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
        return metropolis(comparison, self._estimate(comparison, generator), log_uniform), None

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
        found = self._estimate(comparison, generator)
        y, s = found.log_ratio, found.noise
        if s is None:
            if comparison.batch_size is None or comparison.batch_size < 2:
                raise PerExampleLossRequired(
                    "Penalty() needs the noise of the log ratio, but the closure returned only the mean loss of the batch. "
                    'Return the per-example losses (reduction="none").'
                )
            s = torch.zeros_like(y)  # outside the prior's support nothing was estimated
        verdict = metropolis(comparison, found._replace(log_ratio=y - s.square() / 2, noise=s), log_uniform)
        return verdict._replace(log_ratio=y), None

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
            return metropolis(comparison, on_batch(comparison), log_uniform), None  # the batch is all data
        chunks = [slice(i, min(i + self.chunk_size, n)) for i in range(0, n, self.chunk_size)]
        # the proposal's own evaluations come first: they may need the batch, and put the proposed weights in place
        fixed_part = comparison.log_q_ratio() + comparison.log_prior_difference()
        current = carry if carry is not None else torch.cat([comparison.current_losses(c) for c in chunks], 1)
        level = potential.inverse_temperature * sums.over_examples(current.sum(1)) - comparison.here.log_prior
        proposed = self._proposed_losses(comparison, current, chunks, fixed_part - log_uniform)
        seen, zero = proposed.shape[1], torch.zeros_like(level)
        change = potential.inverse_temperature * sums.over_examples((proposed - current[:, :seen]).sum(1))
        if seen < n:  # rejected already
            log_ratio = torch.where(fixed_part == -torch.inf, fixed_part, torch.nan)
            inside = is_finite(change) & is_finite(fixed_part)
            return Verdict(zero.bool(), zero, log_ratio, inside, zero + seen, is_finite(level), zero, level), current
        found = Estimate(fixed_part - change, zero + n, zero, is_finite(level))
        verdict = metropolis(comparison, found, log_uniform, rate_by_decision=self.early_rejection)
        return verdict._replace(potential=level), torch.where(verdict.is_accepted[:, None], proposed, current)

    def _proposed_losses(self, comparison: Comparison, current: Tensor, chunks: list[slice], budget: Tensor) -> Tensor:
        """l_i(tau) of all examples, (chains, n), or of fewer if these make rejection certain.

        Accept iff lambda * sum(D) < budget. Unseen examples lower the sum by l_i(theta) at most: l_i(tau) >= 0.
        """
        if not self.early_rejection:
            return torch.cat([comparison.proposed_losses(chunk) for chunk in chunks], 1)
        lam = comparison.potential.inverse_temperature
        total, unseen = torch.zeros_like(budget), lam * sums.over_examples(_not_negative(current).sum(1))
        slack = 1e-9 * (1 + unseen.abs())  # rounding of the partial sums must never decide
        parts = [current[:, :0]]
        for chunk in chunks:
            if bool((total - unseen > budget + slack).all()):
                break
            losses = _not_negative(comparison.proposed_losses(chunk))
            total = total + lam * sums.over_examples((losses - current[:, chunk]).sum(1))
            unseen = unseen - lam * sums.over_examples(current[:, chunk].sum(1))
            parts.append(losses)
        return torch.cat(parts, 1)

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


def metropolis(comparison: Comparison, found: Estimate, log_uniform: Tensor, *, rate_by_decision: bool = False) -> Verdict:
    """Accept iff log uniform < Y < inf: a NaN compares false, and +inf would be a loss of -inf.

    `rate_by_decision`: needed if the data used depend on the uniform number. The mean of min(1, e^Y) is then biased, that
    of the decisions is not.
    """
    y, num_examples, noise, is_current_finite = found
    is_accepted = (log_uniform < y) & (y < torch.inf) & comparison.may_move
    rate = is_accepted.double() if rate_by_decision else y.clamp(max=0).exp().nan_to_num(nan=0.0)
    return Verdict(is_accepted, rate, y, is_finite(y), num_examples, is_current_finite, noise)


def _not_negative(losses: Tensor) -> Tensor:
    if bool((losses < 0).any()):
        raise ValueError("FullData(early_rejection=True) is not exact with a negative loss. Use early_rejection=False.")
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
