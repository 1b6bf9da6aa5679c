"""Langevin steps whose minibatch is a part of the chain's state: corrected stochastic MALA."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from adammcmc.acceptance import AcceptanceTest, Minibatch
from adammcmc.errors import PerExampleLossRequired
from adammcmc.kernels.arguments import check_chains, check_preconditioner, times
from adammcmc.kernels.direction import Gradient
from adammcmc.kernels.kernel import ChainState, Info, Once, settle, start
from adammcmc.kernels.langevin import mala
from adammcmc.kernels.proposal import Langevin
from adammcmc.target.leaves import Leaves, Setting, Settings, flatten, spread_settings
from adammcmc.target.potential import Evaluation, Potential, potential_difference
from adammcmc.target.randomness import Randomness, uniform

__all__ = ["CarriedBatch", "CorrectedMALAKernel", "corrected_mala"]


class CarriedBatch(NamedTuple):
    """What the kernel remembers between steps."""

    mask: Tensor
    """(chains, n), bool: the batch B that belongs to the current point."""


@dataclass(frozen=True)
class CorrectedMALAKernel:
    """MALA on pairs of parameters and batch. See `corrected_mala`."""

    step_size: Settings
    rho: float
    zeta: float
    compensate: bool
    proposal: Langevin
    name: str = "corrected stochastic MALA"
    structure: Any = None
    """Of the preconditioner, if it is not one tensor or a tuple of tensors."""
    acceptance: ClassVar[AcceptanceTest] = Minibatch()
    """Metropolis: the pair's ratio is exact."""
    target_acceptance: ClassVar[float] = 0.57
    has_ragged_batches: ClassVar[bool] = True
    """Batches of a size that no step knows before: nothing for a CUDA graph."""

    @property
    def weight(self) -> float:
        """w = rho^(1 - zeta) / (rho^(1 - zeta) + 1 - rho): the marginal of a small loss is exp(-w a l_i)."""
        kept: float = self.rho ** (1 - self.zeta)
        return kept / (kept + 1 - self.rho)

    def init(self, params: Any, potential: Potential) -> ChainState:
        check_chains(self, params)
        check_preconditioner(params, self.proposal.preconditioner, self.structure)
        _num_examples(potential)
        return start(params, potential)._replace(here=None)  # of fixed data: all of them are no batch of this kernel's

    def step(self, state: ChainState, potential: Potential, generator: Randomness) -> tuple[ChainState, Info]:
        params, _ = flatten(state.params)
        old = state.memory.mask if state.memory is not None else self._draw(params, potential, generator)
        new = self._draw(params, potential, generator)
        factor, correction = 1 / self.weight if self.compensate else 1.0, self.zeta * math.log(self.rho)
        before, pair = (_Pair(potential, mask, factor, correction) for mask in (old, new))
        # what was found on the old batch when the chain came here is not asked again, unless someone moved the parameters
        here = state.here or before.evaluate(params)
        rates = [h * potential.scale for h in spread_settings(self.step_size, len(params))]
        direction = Gradient(rates, self.proposal.preconditioner)
        assert here.grad is not None
        update, _ = direction(here.grad, None, params)
        move = self.proposal.propose(params, update, generator)
        there = Once(lambda: pair.evaluate(move.proposed))

        def log_q_ratio() -> Tensor:
            grad = there().grad
            assert grad is not None
            return self.proposal.log_q_ratio(move, direction(grad, None, params)[0])

        state, info = settle(
            state,
            pair,
            generator,
            acceptance=self.acceptance,
            here=here,
            move=move,
            there=there,
            log_q_ratio=Once(log_q_ratio),
        )
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

    def scaled(self, factor: float) -> CorrectedMALAKernel:
        """The same kernel with its noise `factor` times as large, and the step to match."""
        proposal = replace(self.proposal, sigma=times(self.proposal.sigma, factor))
        return replace(self, step_size=times(self.step_size, factor**2), proposal=proposal)

    def with_preconditioner(self, diagonal: Leaves, structure: Any = None) -> CorrectedMALAKernel:
        """The same kernel with this A."""
        return replace(self, proposal=replace(self.proposal, preconditioner=diagonal), structure=structure)

    def approximation(self, *, fixed_data: bool) -> list[str]:
        if self.rho == 1:
            return []
        kept = "" if self.zeta == 1 else f"rho^{1 - self.zeta:g} "
        times_lambda = f"{1 / self.weight:.4g} lambda" if self.compensate else "lambda"
        return [
            f"it samples prior * prod_i ({kept}exp(-{times_lambda} loss_i) + 1 - rho), rho = {self.rho:g}, which is the "
            "posterior only where lambda * loss_i is small"
        ]


def _num_examples(potential: Potential) -> int:
    if (n := potential.num_examples) is None:
        raise PerExampleLossRequired(
            "corrected_mala draws batches of its own from the losses of single examples. Pass "
            "`examples=TensorExamples(loss, inputs, targets)` to the sampler."
        )
    return n


class _Pair:
    """The potential of a pair (theta, B), one B for each chain: a sum_B l_i + |B| zeta log rho - log prior(theta).

    Args:
        inner: the potential that knows the examples.
        mask: B, (chains, n).
        factor: a / lambda.
        correction: zeta log rho.
    """

    control = None
    fixed = True  # what was found for a pair stays valid for as long as the chain stays there

    def __init__(self, inner: Potential, mask: Tensor, factor: float, correction: float) -> None:
        self._inner, self._mask, self._factor, self._correction = inner, mask, factor, correction
        self.scale, self.inverse_temperature = inner.scale, inner.inverse_temperature
        self.is_bounded, self.num_examples, self.can_narrow = inner.is_bounded, inner.num_examples, inner.can_narrow
        self.log_prior, self.example_losses = inner.log_prior, inner.example_losses
        self.evaluate_weighted = inner.evaluate_weighted

    def evaluate(self, params: Leaves, *, with_grad: bool = True) -> Evaluation:
        """In the units of V, as every potential's: divided by lambda n."""
        found = self._inner.evaluate_weighted(params, self._factor * self._mask.double())
        return found._replace(losses=found.losses + self._correction / self.scale * self._mask.sum(1).double())

    def compare(self, current: Evaluation, proposed: Evaluation) -> Tensor:
        return potential_difference(self.scale, current, proposed)

    def mean_loss(self, value: Tensor) -> Tensor:
        """The mean loss of the batch, from the losses that `evaluate` gave; NaN for an empty batch."""
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

    The old loss stays on the old batch and is never asked again; the reverse gradient is that of the new batch. Target: this is
    an exact Metropolis-Hastings chain on pairs, so that, with zeta = 1, theta has **exactly** the law

        p(theta) ~ prior(theta) * prod_i ( exp(-a l_i(theta)) + 1 - rho )

    (for any zeta: rho^(1 - zeta) exp(-a l_i) + 1 - rho). That is the posterior **approximately**, where a l_i is small: the log
    of a factor is then -a l_i / (2 - rho) + ..., hence a = lambda (2 - rho). It is the posterior itself for rho = 1. At Bayes
    scale it is too wide, and it depends on the zero of the loss, which the posterior does not.

    How often it moves: a step draws a whole new batch, and Y sums zeta log rho + a l_i over the examples that leave or come. At
    rest the batch holds a share near 1 / (2 - rho) of the data, and the proposed one a share rho: with more than some tens of
    examples next to nothing is accepted, unless exp(-a l_i) is about rho^zeta. zeta = -a (mean loss) / log rho brings that
    about (as the code released with that paper does): another target, given above, and a Y that varies as sqrt(n rho) still.

    Cost: one forward and backward of about rho n examples, at tau (of the examples that any chain has drawn, for many chains at
    once), and n random numbers.

    Args:
        step_size: h. (A tensor (chains,) gives one value to each chain, a list one to each leaf; likewise below.)
        rho: the probability of an example to be in the batch, in (0, 1]. An empty batch is legal.
        zeta: 1 is the theory's correction, 0 none.
        compensate: whether a = lambda (2 - rho) (for any zeta: lambda (rho^(1 - zeta) + 1 - rho) / rho^(1 - zeta)), or lambda.
        sigma: as in `mala`, and so are `sigma_along` and `preconditioner`.
    """
    if not 0 < rho <= 1:
        raise ValueError(f"`rho` must lie in (0, 1], the probability of an example to be in the batch, got {rho}.")
    if not math.isfinite(zeta):
        raise ValueError(f"`zeta` must be finite, got {zeta}.")
    plain = mala(step_size, sigma=sigma, sigma_along=sigma_along, preconditioner=preconditioner)
    return CorrectedMALAKernel(plain.step_size, float(rho), float(zeta), compensate, plain.proposal, structure=plain.structure)
