"""The protocol of acceptance tests: what a test may ask about a proposed move, and what it answers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from adammcmc.errors import PerExampleLossRequired
from adammcmc.target.leaves import Leaves, is_finite
from adammcmc.target.potential import Evaluation, Potential
from adammcmc.target.randomness import Randomness

__all__ = ["AcceptanceTest", "Comparison", "Differences", "Verdict"]

_CHUNK = 4096  # examples in one forward


@dataclass(frozen=True)
class Comparison:
    """A current point and a proposed one; what a test does not ask for is not evaluated."""

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
    """(chains,): False for a chain that is frozen; no test may accept it."""
    log_uniform: Tensor | None = None
    """log of the uniform number that decides, (chains,), float64, where the kernel brings its own; None: the test draws one."""

    @property
    def num_chains(self) -> int:
        return self.params[0].shape[0]

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    @property
    def batch_size(self) -> int | None:
        """Examples in this step's batch; None when the closure returned only their mean."""
        return self.here.losses.shape[1] if self.here.losses.dim() > 1 else None

    def batch_noise(self) -> Tensor | None:
        """s, the standard deviation of `batch_log_ratio` over batches, from the losses of this batch; 0 for fixed data.

        s^2 = (lambda n)^2 var(l_i(tau) - l_i(theta)) / b * (1 - b / n). None where the closure returned only means.
        """
        if self.potential.fixed:
            return torch.zeros_like(self.here.log_prior)
        if (size := self.batch_size) is None or size < 2 or self._is_outside():
            return None
        difference = self.there().losses.double() - self.here.losses.double()
        scale, unseen = self.potential.scale, 1 - size * self.potential.inverse_temperature / self.potential.scale
        if isinstance(unseen, Tensor):  # one for each chain
            return difference.std(1) * (scale * (unseen.clamp_min(0) / size).sqrt())
        return difference.std(1) * (scale * math.sqrt(max(0.0, unseen) / size))

    def log_prior_difference(self) -> Tensor:
        """log prior(tau) - log prior(theta), (chains,), float64."""
        return self.potential.log_prior(self.proposed) - self.here.log_prior

    def batch_log_ratio(self) -> Tensor:
        """Y = U(theta) - U(tau) + log_q_ratio with U estimated on this step's batch, (chains,), float64.

        Outside a bounded prior's support the loss is not asked for, where looking costs nothing (on the CPU).
        """
        if self._is_outside():
            return torch.full_like(self.here.log_prior, -torch.inf)
        return self.log_q_ratio() - self.potential.compare(self.here, self.there())

    def _is_outside(self) -> bool:
        """Whether all chains are known to have left the support of the prior (on the CPU, where looking costs nothing)."""
        if not self.potential.is_bounded or self.device.type != "cpu":
            return False
        return bool((self.log_prior_difference() == -torch.inf).all())

    @property
    def num_examples(self) -> int:
        """n; an error where the losses of single examples cannot be asked for."""
        if (n := self.potential.num_examples) is None:
            raise PerExampleLossRequired(
                "the acceptance test chooses examples of the data and needs their losses. Pass "
                "`examples=TensorExamples(loss, inputs, targets)` to the sampler, with a loss that returns one number for each "
                "example, or sample a `DataDensity`."
            )
        return n

    def inverse_temperature(self) -> Tensor:
        """lambda of each chain, (chains,), float64."""
        lam = torch.as_tensor(self.potential.inverse_temperature, dtype=torch.float64, device=self.device)
        return lam.expand(self.num_chains)

    def known(self) -> Tensor:
        """c, what is known of Y without looking at the data, (chains,), float64.

        log_q_ratio + log prior(tau) - log prior(theta), and where the target has a control variate T,
        -lambda sum_i (T_i(tau) - T_i(theta)).
        """
        known = self.log_q_ratio() + self.log_prior_difference()
        if (control := self.potential.control) is None:
            return known
        return known - self.inverse_temperature() * control.total(self.params, self.proposed)

    def differences(self, indices: slice | Tensor, chains: Tensor | None = None) -> Differences:
        """D_i = l_i(tau) - l_i(theta) of chosen examples, in chunks of 4,096.

        Where the target has a control variate T, D_i is what is left, l_i(tau) - l_i(theta) - (T_i(tau) - T_i(theta)), so that
        Y = known() - lambda sum_i D_i in any case.

        Args:
            indices: the examples, the same for all chains, or a row for each, (chains, examples).
            chains: numbers of the chains that are asked; None is all of them.
        """
        if isinstance(indices, Tensor) and indices.shape[-1] > _CHUNK:
            parts = [self.differences(piece, chains) for piece in torch.split(indices, _CHUNK, -1)]
            finite = torch.stack([part.is_current_finite for part in parts]).all(0)
            return Differences(torch.cat([p.values for p in parts], 1), finite, torch.cat([p.rounding for p in parts], 1))
        params, proposed, rows = self.params, self.proposed, indices
        kept: slice | Tensor = slice(None)
        if chains is not None and len(chains) < self.num_chains:
            if self.potential.can_narrow:
                params, proposed = (tuple(x[chains] for x in leaves) for leaves in (params, proposed))
            else:  # chains that are not asked get the examples of another
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

    def _losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        losses = self.potential.example_losses(params, indices)
        if losses.dtype in (torch.bfloat16, torch.float16):
            raise TypeError(
                f"the losses of the examples are in {losses.dtype}: their rounding, times num_data, would swamp the acceptance "
                "ratio. Compute them in float32, for example F.cross_entropy(model(x).float(), y, reduction='none')."
            )
        return losses

    def current_losses(self, indices: slice | Tensor) -> Tensor:
        """l_i(theta) for chosen examples of the data set, (chains, examples), float64."""
        return self._losses(self.params, indices).double()

    def proposed_losses(self, indices: slice | Tensor) -> Tensor:
        """l_i(tau) for chosen examples of the data set, (chains, examples), float64."""
        return self._losses(self.proposed, indices).double()


class Differences(NamedTuple):
    """What chosen examples say of a move."""

    values: Tensor
    """D_i, (chains, examples), float64."""
    is_current_finite: Tensor
    """Whether all l_i(theta) were finite, (chains,)."""
    rounding: Tensor
    """By how much the rounding of the losses may have moved D_i, (chains, examples), float64."""


class Verdict(NamedTuple):
    """A test's answer; each field has shape (chains,)."""

    is_accepted: Tensor
    acceptance_rate: Tensor
    """The probability of acceptance given what the test saw, such as min(1, exp(Y)); or the decision itself, where how much it
    saw depends on the uniform number."""
    log_ratio: Tensor
    """Y, float64; NaN where it is not known."""
    is_finite: Tensor
    """Whether U was finite at the proposed point, as far as the test looked."""
    num_examples: Tensor
    """How many examples of the data the decision looked at; NaN where that is not known."""
    is_current_finite: Tensor | None = None
    """Whether the losses that the test looked at were finite at the current point; None if it looked at no others than the
    step's own. A chain whose current loss is not finite freezes."""
    log_ratio_noise: Tensor | None = None
    """Standard deviation of Y as an estimate of the full-data Y: 0 where Y is exact; None where it is not known."""
    potential: Tensor | None = None
    """U at the current point on the full data, where the test knows it."""


@runtime_checkable
class AcceptanceTest(Protocol):
    """Decides whether each chain takes a proposed move.

    Write a test as a subclass with `__call__` and `approximation`; override only the traits whose defaults do not fit, as
    plain class attributes (`needs_noise = False`). A class that defines every member need not inherit.
    """

    @abstractmethod
    def __call__(self, comparison: Comparison, carry: Any, generator: Randomness) -> tuple[Verdict, Any]:
        """The verdict and the test's memory for the next step; `carry` is that memory, None at first."""

    @abstractmethod
    def approximation(self, *, fixed_data: bool) -> str | None:
        """Why the test is not exact, in a few words; None if it is. `fixed_data`: every batch is the whole data set."""

    @property
    def needs_noise(self) -> bool:
        """Whether the test uses `log_q_ratio`, which rules out sigma = 0."""
        return True

    @property
    def is_metropolis(self) -> bool:
        """Whether the decision is log uniform < Y with the reported Y and, if given, `Comparison.log_uniform`.

        Only then is the acceptance of an exact chain 2 P(Y > 0), does noise in Y heat the target by `beta_eff`, and can a
        kernel carry the uniform number from step to step.
        """
        return False

    @property
    def needs_examples(self) -> bool:
        """Whether the test evaluates examples other than those of the step's own batch."""
        return False

    @property
    def reads_device(self) -> bool:
        """Whether the host reads device values before the decision, which rules out CUDA graphs."""
        return False

    @property
    def uses_all_data(self) -> bool:
        """Whether every decision uses all examples, so that U is known exactly."""
        return False

    @property
    def uses_batch_only(self) -> bool:
        """Whether the decision is plain Metropolis on the step's own batch, or no decision at all.

        A fused backend can then make it: by Metropolis, or, if not `needs_noise`, by the prior's support alone.
        """
        return False

    @property
    def chunk_size(self) -> int | None:
        """Examples per forward pass of a test on all data; None for any other test."""
        return None

    @property
    def carries_count(self) -> bool:
        """Whether `carry` is a count over the whole run.

        A count is checkpointed, and kept when the weights change between steps. Any other carry is a cache for the current
        weights, and is dropped.
        """
        return False

    def carried_losses(self, carry: Any) -> Tensor | None:
        """The losses of all examples at the current weights, (chains, n), if `carry` holds them."""
        return None

    def complaint(self, carry: Any) -> str | None:
        """Why the steps so far were not exact, in a few words; None if they were, as far as the test can tell."""
        return None

    def rate_like(self, metropolis: float) -> float:
        """The acceptance rate to tune for where a Metropolis test would be tuned for `metropolis`."""
        return metropolis
