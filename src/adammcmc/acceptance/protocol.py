"""The protocol of acceptance tests: what a test can evaluate about a proposed move, and the verdict it returns.

A new test is a file beside this one, exported in `acceptance/__init__.py`; `docs/acceptance.md` has a whole one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from adammcmc.errors import PerExampleLossRequired
from adammcmc.target.leaves import Leaves, is_finite
from adammcmc.target.potential import Evaluation, Potential
from adammcmc.target.randomness import Randomness

__all__ = ["AcceptanceTest", "Comparison", "Differences", "Verdict"]

_CHUNK = 4096  # examples in one forward pass


@dataclass(frozen=True)
class Comparison:
    """A current point theta and a proposed point tau. Everything is evaluated on demand."""

    potential: Potential
    params: Leaves
    proposed: Leaves
    here: Evaluation
    """This step's batch at the current point."""
    there: Callable[[], Evaluation]
    """This step's batch at the proposed point."""
    log_q_ratio: Callable[[], Tensor]
    """log q(theta|tau) - log q(tau|theta), (chains,), float64."""
    may_move: Tensor
    """(chains,): False for a frozen chain, which no test may accept."""
    log_uniform: Tensor | None = None
    """log of the deciding uniform number, (chains,), float64, if the kernel supplies it; None: the test draws one."""

    @property
    def num_chains(self) -> int:
        return self.params[0].shape[0]

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    @property
    def batch_size(self) -> int | None:
        """Examples in this step's batch; None if the closure returned only their mean."""
        return self.here.losses.shape[1] if self.here.losses.dim() > 1 else None

    @property
    def num_examples(self) -> int:
        """n; an error if per-example losses are not available."""
        if (n := self.potential.num_examples) is None:
            raise PerExampleLossRequired(
                "the acceptance test selects examples and needs their losses. Pass `examples=TensorExamples(loss, "
                "inputs, targets)` to the sampler, with a loss that returns one number per example, or sample a "
                "`DataDensity`."
            )
        return n

    def inverse_temperature(self) -> Tensor:
        """lambda of each chain, (chains,), float64."""
        lam = torch.as_tensor(self.potential.inverse_temperature, dtype=torch.float64, device=self.device)
        return lam.expand(self.num_chains)

    # --- on this step's batch -----------------------------------------------------------------------------------------

    def batch_log_ratio(self) -> Tensor:
        """Y = U(theta) - U(tau) + log_q_ratio with U estimated on this step's batch, (chains,), float64.

        If all chains have left a bounded prior's support, the loss is not evaluated (on the CPU).
        """
        if self._is_outside():
            return torch.full_like(self.here.log_prior, -torch.inf)
        return self.log_q_ratio() - self.potential.compare(self.here, self.there())

    def batch_noise(self) -> Tensor | None:
        """s, the standard deviation of `batch_log_ratio` over batches, estimated from this batch; 0 for fixed data.

        s^2 = (lambda n)^2 var(l_i(tau) - l_i(theta)) / b * (1 - b / n). None if the closure returned only means.
        """
        if self.potential.fixed:
            return torch.zeros_like(self.here.log_prior)
        if (size := self.batch_size) is None or size < 2 or self._is_outside():
            return None
        difference = self.there().losses.double() - self.here.losses.double()
        scale, unseen = self.potential.scale, 1 - size * self.potential.inverse_temperature / self.potential.scale
        if isinstance(unseen, Tensor):  # one per chain
            return difference.std(1) * (scale * (unseen.clamp_min(0) / size).sqrt())
        return difference.std(1) * (scale * math.sqrt(max(0.0, unseen) / size))

    def log_prior_difference(self) -> Tensor:
        """log prior(tau) - log prior(theta), (chains,), float64."""
        return self.potential.log_prior(self.proposed) - self.here.log_prior

    def _is_outside(self) -> bool:
        """Whether all chains are known to have left the prior's support (on the CPU, where the check is free)."""
        if not self.potential.is_bounded or self.device.type != "cpu":
            return False
        return bool((self.log_prior_difference() == -torch.inf).all())

    # --- on selected examples -----------------------------------------------------------------------------------------

    def known(self) -> Tensor:
        """c, the part of Y that needs no data, (chains,), float64.

        log_q_ratio + log prior(tau) - log prior(theta), and with a control variate T also
        -lambda sum_i (T_i(tau) - T_i(theta)).
        """
        known = self.log_q_ratio() + self.log_prior_difference()
        if (control := self.potential.control) is None:
            return known
        return known - self.inverse_temperature() * control.total(self.params, self.proposed)

    def differences(self, indices: slice | Tensor, chains: Tensor | None = None) -> Differences:
        """D_i = l_i(tau) - l_i(theta) of selected examples, in chunks of 4,096.

        With a control variate T, D_i is the remainder l_i(tau) - l_i(theta) - (T_i(tau) - T_i(theta)), so that
        Y = known() - lambda sum_i D_i in either case.

        Args:
            indices: the examples, the same for all chains, or one row per chain, (chains, examples).
            chains: indices of the chains to evaluate; None is all of them.
        """
        pieces = _pieces(indices)
        if len(pieces) > 1:
            parts = [self.differences(piece, chains) for piece in pieces]
            finite = torch.stack([part.is_current_finite for part in parts]).all(0)
            return Differences(torch.cat([p.values for p in parts], 1), finite, torch.cat([p.rounding for p in parts], 1))
        params, proposed, rows = self.params, self.proposed, indices
        kept: slice | Tensor = slice(None)
        if chains is not None and len(chains) < self.num_chains:
            if self.potential.can_narrow:
                params, proposed = (tuple(x[chains] for x in leaves) for leaves in (params, proposed))
            else:  # the other chains get the examples of one of these, and their results are dropped
                kept = chains
                if isinstance(indices, Tensor) and indices.dim() > 1:
                    rows = indices[:1].repeat(self.num_chains, 1).index_copy_(0, chains, indices)
        losses = [self._losses(leaves, rows)[kept] for leaves in (params, proposed)]
        eps = torch.finfo(losses[0].dtype).eps
        before, after = (x.double() for x in losses)
        difference = after - before
        if (control := self.potential.control) is not None:
            difference = difference - control.differences(params, proposed, rows)[kept]
        return Differences(difference, is_finite(before.sum(1)), 4 * eps * torch.maximum(before.abs(), after.abs()))

    def current_losses(self, indices: slice | Tensor) -> Tensor:
        """l_i(theta) of selected examples, (chains, examples), float64."""
        return self._losses(self.params, indices).double()

    def proposed_losses(self, indices: slice | Tensor) -> Tensor:
        """l_i(tau) of selected examples, (chains, examples), float64."""
        return self._losses(self.proposed, indices).double()

    def _losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        losses = self.potential.example_losses(params, indices)
        if losses.dtype in (torch.bfloat16, torch.float16):
            raise TypeError(
                f"the per-example losses are in {losses.dtype}: their rounding, times num_data, would swamp the "
                "acceptance ratio. Compute them in float32, for example F.cross_entropy(model(x).float(), y, "
                "reduction='none')."
            )
        return losses


def _pieces(indices: slice | Tensor) -> Sequence[slice | Tensor]:
    if isinstance(indices, Tensor):
        return torch.split(indices, _CHUNK, -1)
    return [slice(i, min(i + _CHUNK, indices.stop)) for i in range(indices.start, indices.stop, _CHUNK)]


class Differences(NamedTuple):
    """Loss differences of selected examples."""

    values: Tensor
    """D_i, (chains, examples), float64."""
    is_current_finite: Tensor
    """Whether all l_i(theta) were finite, (chains,)."""
    rounding: Tensor
    """A bound on the rounding error of D_i, (chains, examples), float64."""


class Verdict(NamedTuple):
    """The result of a test; each field has shape (chains,)."""

    is_accepted: Tensor
    acceptance_rate: Tensor
    """The probability of acceptance given the data used, such as min(1, exp(Y)); or the decision itself, if the amount
    of data depended on the uniform number."""
    log_ratio: Tensor
    """Y, float64; NaN if unknown."""
    is_finite: Tensor
    """Whether U was finite at the proposed point, on the data used."""
    num_examples: Tensor
    """How many examples the decision used; NaN if unknown."""
    is_current_finite: Tensor | None = None
    """Whether all losses evaluated at the current point were finite; None if the test used only the step's own batch.
    A chain whose current loss is not finite freezes."""
    log_ratio_noise: Tensor | None = None
    """Standard deviation of Y as an estimate of the full-data Y: 0 if Y is exact; None if unknown."""
    potential: Tensor | None = None
    """U at the current point on the full data, if the test computed it."""


@runtime_checkable
class AcceptanceTest(Protocol):
    """Decides whether each chain takes a proposed move.

    Write a test as a subclass with `__call__` and `approximation`; override only the traits whose defaults do not fit,
    as plain class attributes (`needs_noise = False`). A class that defines every member need not inherit.
    """

    needs_noise: bool = True
    """Whether the test uses `log_q_ratio`, which rules out sigma = 0."""
    is_metropolis: bool = False
    """Whether the decision is log uniform < Y with the reported Y and, if given, `Comparison.log_uniform`. Only then is
    the acceptance of an exact chain 2 P(Y > 0), does noise in Y heat the target by `beta_eff`, and can a kernel carry the
    uniform number from step to step."""
    needs_examples: bool = False
    """Whether the test evaluates examples other than those of the step's own batch."""
    reads_device: bool = False
    """Whether the host reads device values before the decision, which rules out CUDA graphs."""
    uses_all_data: bool = False
    """Whether every decision uses all examples, so that U is known exactly."""
    uses_batch_only: bool = False
    """Whether the decision is plain Metropolis on the step's own batch, or no decision at all. A fused backend can then
    make it: by Metropolis, or, if not `needs_noise`, by the prior's support alone."""
    chunk_size: int | None = None
    """Examples per forward pass of a test on all data; None for any other test."""
    carries_count: bool = False
    """Whether `carry` is a count over the whole run, which is checkpointed, and kept when the weights change between
    steps. Any other carry is a cache for the current weights, and is dropped."""

    @abstractmethod
    def __call__(self, comparison: Comparison, carry: Any, generator: Randomness) -> tuple[Verdict, Any]:
        """The verdict and the test's memory for the next step; `carry` is that memory, None at first."""

    @abstractmethod
    def approximation(self, *, fixed_data: bool) -> str | None:
        """Why the test is not exact, in a few words; None if it is. `fixed_data`: every batch is the whole data set."""

    def carried_losses(self, carry: Any) -> Tensor | None:
        """The losses of all examples at the current weights, (chains, n), if `carry` holds them."""
        return None

    def complaint(self, carry: Any) -> str | None:
        """Why the steps so far were not exact, in a few words; None if they were, as far as the test can tell."""
        return None

    def rate_like(self, metropolis: float) -> float:
        """The acceptance rate to tune for where a Metropolis test would be tuned for `metropolis`."""
        return metropolis
