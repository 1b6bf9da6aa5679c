"""Corrected stochastic MALA: Langevin steps with the minibatch as part of the chain's state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from adammcmc.acceptance import Minibatch
from adammcmc.errors import PerExampleLossRequired
from adammcmc.kernels.kernel import ChainState, Info
from adammcmc.kernels.langevin import MALAKernel, mala
from adammcmc.target.leaves import Leaves, Setting, Settings, flatten
from adammcmc.target.potential import Evaluation, Potential, potential_difference
from adammcmc.target.randomness import Randomness, uniform

__all__ = ["CarriedBatch", "CorrectedMALAKernel", "corrected_mala"]


class CarriedBatch(NamedTuple):
    """The kernel's memory between steps."""

    mask: Tensor
    """(chains, n), bool: the batch B that belongs to the current point."""


@dataclass(frozen=True)
class CorrectedMALAKernel(MALAKernel):
    """MALA on pairs of parameters and batch. See `corrected_mala`."""

    name: str = "corrected stochastic MALA"
    rho: float = 1.0
    zeta: float = 1.0
    compensate: bool = True
    needs_examples: ClassVar[bool] = True  # type: ignore[misc]
    is_capturable: ClassVar[bool] = False  # type: ignore[misc]
    why_not_capturable: ClassVar[str] = "draws batches of another size at each step"  # type: ignore[misc]

    @property
    def weight(self) -> float:
        """w = rho^(1 - zeta) / (rho^(1 - zeta) + 1 - rho): the marginal of a small loss is exp(-w a l_i)."""
        kept: float = self.rho ** (1 - self.zeta)
        return kept / (kept + 1 - self.rho)

    def init(self, params: Any, potential: Potential) -> ChainState:
        _num_examples(potential)
        return super().init(params, potential)._replace(here=None)  # all data at once are not a batch of this kernel

    def step(self, state: ChainState, potential: Potential, generator: Randomness) -> tuple[ChainState, Info]:
        params, _ = flatten(state.params)
        old = state.memory.mask if state.memory is not None else self._draw(params, potential, generator)
        new = self._draw(params, potential, generator)
        factor, correction = 1 / self.weight if self.compensate else 1.0, self.zeta * math.log(self.rho)
        before, pair = (_Pair(potential, mask, factor, correction) for mask in (old, new))
        # the evaluation on the old batch is reused, unless the parameters were changed from outside
        here = state.here or before.evaluate(params)
        state, info = self._step_from(here, state, pair, generator)
        kept = torch.where(info.is_accepted[:, None], new, old)
        info = info._replace(
            loss=before.mean_loss(info.loss),
            proposed_loss=pair.mean_loss(info.proposed_loss),
            num_examples=new.sum(1).double(),
        )
        return state._replace(memory=CarriedBatch(kept)), info

    def _draw(self, params: Leaves, potential: Potential, generator: Randomness) -> Tensor:
        """b_i ~ Bernoulli(rho), (chains, n)."""
        return uniform((params[0].shape[0], _num_examples(potential)), torch.float64, params[0].device, generator) < self.rho

    def restored(self, fields: tuple[Any, ...]) -> CarriedBatch:
        return CarriedBatch(*fields)

    def details(self) -> list[str]:
        return [*super().details(), f"rho {self.rho:g}", f"zeta {self.zeta:g}"]

    def approximation(self, *, fixed_data: bool) -> list[str]:
        if self.rho == 1:
            return []
        kept = "" if self.zeta == 1 else f"rho^{1 - self.zeta:g} "
        times_lambda = f"{1 / self.weight:.4g} lambda" if self.compensate else "lambda"
        return [
            f"it samples prior * prod_i ({kept}exp(-{times_lambda} loss_i) + 1 - rho), rho = {self.rho:g}, which is "
            "the posterior only where lambda * loss_i is small"
        ]


def _num_examples(potential: Potential) -> int:
    if (n := potential.num_examples) is None:
        raise PerExampleLossRequired(
            "corrected_mala draws batches of its own, and needs per-example losses. Pass "
            "`examples=TensorExamples(loss, inputs, targets)` to the sampler."
        )
    return n


class _Pair:
    """The potential of a pair (theta, B), one B per chain: a sum_B l_i + |B| zeta log rho - log prior(theta).

    Args:
        inner: the potential with the examples.
        mask: B, (chains, n).
        factor: a / lambda.
        correction: zeta log rho.
    """

    control = None
    fixed = True  # an evaluation of a pair stays valid as long as the chain stays there

    def __init__(self, inner: Potential, mask: Tensor, factor: float, correction: float) -> None:
        self._inner, self._mask, self._factor, self._correction = inner, mask, factor, correction
        self.scale, self.inverse_temperature = inner.scale, inner.inverse_temperature
        self.is_bounded, self.num_examples, self.can_narrow = inner.is_bounded, inner.num_examples, inner.can_narrow
        self.log_prior, self.example_losses = inner.log_prior, inner.example_losses
        self.evaluate_weighted = inner.evaluate_weighted

    def evaluate(self, params: Leaves, *, with_grad: bool = True) -> Evaluation:
        """In the units of V, as for every potential: divided by lambda n."""
        found = self._inner.evaluate_weighted(params, self._factor * self._mask.double())
        return found._replace(losses=found.losses + self._correction / self.scale * self._mask.sum(1).double())

    def prior_part(self, params: Leaves) -> Leaves | None:
        return self._inner.prior_part(params)

    def force(self, params: Leaves) -> Leaves:
        grad = self.evaluate(params, with_grad=True).grad
        assert grad is not None
        return grad

    num_parts = 1

    def force_of(self, params: Leaves, part: int) -> Leaves:
        return self.force(params)

    def evaluate_some(self, params: Leaves, chains: Tensor) -> Evaluation:
        return self.evaluate(params)

    def compare(self, current: Evaluation, proposed: Evaluation) -> Tensor:
        return potential_difference(self.scale, current, proposed)

    def mean_loss(self, value: Tensor) -> Tensor:
        """The mean loss of the batch, from the losses of `evaluate`; NaN for an empty batch."""
        count = self._mask.sum(1).double()
        return (value - self._correction / self.scale * count) * self._mask.shape[1] / self._factor / count


def corrected_mala(
    step_size: Settings,
    rho: float,
    *,
    zeta: float = 1.0,
    compensate: bool = True,
    sigma: Settings | None = None,
    sigma_along: Setting = 0.0,
    preconditioner: Any = None,
) -> CorrectedMALAKernel:
    r"""Corrected stochastic MALA (Bieringer et al. 2023): the batch is part of the chain's state, and so is its loss.

        B' ~ Bernoulli(rho) for each example,    tau = theta - h A grad U(theta, B) + sigma A^1/2 eps,    h = step_size
        U(theta, B) = a sum_{i in B} l_i(theta) + zeta |B| log rho - log prior(theta),    a = lambda (2 - rho)
        accept (tau, B') with min(1, exp(Y)),  Y = U(theta, B) - U(tau, B') + log q(theta|tau, B') - log q(tau|theta, B)

    The old loss stays on the old batch and is not recomputed; the reverse gradient is that of the new batch. Target:
    this is an exact Metropolis-Hastings chain on pairs, so that, with zeta = 1, theta has **exactly** the law

        p(theta) ~ prior(theta) * prod_i ( exp(-a l_i(theta)) + 1 - rho )

    (for any zeta: rho^(1 - zeta) exp(-a l_i) + 1 - rho). That is the posterior **approximately**, if a l_i is small:
    the log of a factor is then -a l_i / (2 - rho) + ..., hence a = lambda (2 - rho). For rho = 1 it is the posterior
    itself. At Bayes scale it is too wide, and unlike the posterior it depends on the zero of the loss.

    Acceptance: a step draws a whole new batch, and Y sums zeta log rho + a l_i over the examples that leave or enter.
    In equilibrium the batch holds a share near 1 / (2 - rho) of the data, and the proposed one a share rho: with more
    than a few dozen examples almost nothing is accepted, unless exp(-a l_i) is about rho^zeta. zeta = -a (mean loss) /
    log rho achieves that (as in the code released with that paper), but the target is then the other one given above,
    and Y still varies as sqrt(n rho).

    Cost: one forward and backward pass of about rho n examples, at tau (with many chains, of the examples drawn by any
    of them), and n random numbers.

    Args:
        step_size: h. (A tensor (chains,) holds one value per chain, a list one per leaf; likewise below.)
        rho: the probability that an example is in the batch, in (0, 1]. An empty batch is legal.
        zeta: 1 is the theory's correction, 0 none.
        compensate: whether a = lambda (2 - rho) (for any zeta: lambda (rho^(1 - zeta) + 1 - rho) / rho^(1 - zeta)), or
            lambda.
        sigma: as in `mala`, and so are `sigma_along` and `preconditioner`.
    """
    if not 0 < rho <= 1:
        raise ValueError(f"`rho` must lie in (0, 1], the probability that an example is in the batch, got {rho}.")
    if not math.isfinite(zeta):
        raise ValueError(f"`zeta` must be finite, got {zeta}.")
    plain = mala(step_size, sigma=sigma, sigma_along=sigma_along, preconditioner=preconditioner)
    own = {"structure": plain.structure, "rho": float(rho), "zeta": float(zeta), "compensate": compensate}
    return CorrectedMALAKernel(plain.step_size, plain.proposal, Minibatch(), **own)
