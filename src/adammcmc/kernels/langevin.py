"""The Metropolis-adjusted Langevin algorithm: plain, directional, preconditioned."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from adammcmc.acceptance import AcceptanceTest, Minibatch
from adammcmc.kernels.arguments import check_chains, check_noise, check_preconditioner, checked, checked_one, times
from adammcmc.kernels.direction import Gradient
from adammcmc.kernels.kernel import ChainState, Info, Once, settle, start
from adammcmc.kernels.proposal import Langevin
from adammcmc.target.leaves import Leaves, Setting, Settings, flatten, spread_settings
from adammcmc.target.potential import Potential
from adammcmc.target.randomness import Randomness

__all__ = ["MALAKernel", "mala"]


@dataclass(frozen=True)
class MALAKernel:
    """A Langevin step with its own update on either side. See `mala`."""

    step_size: Settings
    proposal: Langevin
    acceptance: AcceptanceTest
    name: str = "MALA"
    structure: Any = None
    """Of the preconditioner, if it is not one tensor or a tuple of tensors."""
    target_acceptance: ClassVar[float] = 0.57

    def __post_init__(self) -> None:
        check_noise(self.proposal.sigma, self.acceptance)

    def _direction(self, potential: Potential, num_leaves: int) -> Gradient:
        """h * grad U = h * scale * grad V"""
        rates = [h * potential.scale for h in spread_settings(self.step_size, num_leaves)]
        return Gradient(rates, self.proposal.preconditioner)

    def init(self, params: Any, potential: Potential) -> ChainState:
        check_chains(self, params)
        check_preconditioner(params, self.proposal.preconditioner, self.structure)
        return start(params, potential)

    def step(self, state: ChainState, potential: Potential, generator: Randomness) -> tuple[ChainState, Info]:
        params, _ = flatten(state.params)
        direction = self._direction(potential, len(params))
        here = state.here or potential.evaluate(params, with_grad=True)
        assert here.grad is not None
        update, _ = direction(here.grad, None, params)
        move = self.proposal.propose(params, update, generator)
        there = Once(lambda: potential.evaluate(move.proposed, with_grad=True))

        def log_q_ratio() -> Tensor:
            grad = there().grad
            assert grad is not None
            return self.proposal.log_q_ratio(move, direction(grad, None, params)[0])

        return settle(
            state,
            potential,
            generator,
            acceptance=self.acceptance,
            here=here,
            move=move,
            there=there,
            log_q_ratio=Once(log_q_ratio),
        )

    def scaled(self, factor: float) -> MALAKernel:
        """The same kernel with its noise `factor` times as large, and the step to match."""
        proposal = replace(self.proposal, sigma=times(self.proposal.sigma, factor))
        return replace(self, step_size=times(self.step_size, factor**2), proposal=proposal)

    def with_preconditioner(self, diagonal: Leaves, structure: Any = None) -> MALAKernel:
        """The same kernel with this A."""
        return replace(self, proposal=replace(self.proposal, preconditioner=diagonal), structure=structure)

    def approximation(self, *, fixed_data: bool) -> list[str]:
        reason = self.acceptance.approximation(fixed_data=fixed_data)
        return [] if reason is None else [reason]


def mala(
    step_size: Settings,
    *,
    sigma: Settings | None = None,
    sigma_along: Setting = 0.0,
    preconditioner: Any = None,
    acceptance: AcceptanceTest | None = None,
) -> MALAKernel:
    r"""The Metropolis-adjusted Langevin algorithm (eq. (2)), directional (eq. (4)) and preconditioned.

        tau = theta - h A g + sigma A^1/2 eps + sigma_along z h A g,    g = grad U(theta), h = step_size
        accept with min(1, exp(Y)),  Y = U(theta) - U(tau) + log q(theta|tau) - log q(tau|theta)     (eq. (3))

    with both gradients and, for sigma_along > 0, both determinants (eq. (5)). The centre is theta MINUS the step; the plus sign
    printed below eq. (4) is a slip. Target: p ~ exp(-U), **exactly**, for a density, for fixed data, and with `FullData` for
    minibatch gradients too (both sides see the same batch). Tune h to an acceptance near 0.57.

    Cost: for a density or fixed data one forward and backward, at tau; otherwise two.

    Args:
        step_size: h. (A tensor (chains,) gives one value to each chain, a list one to each leaf; likewise below.)
        sigma: None is sqrt(2 h), the value of Langevin dynamics. (The paper's gamma, sigma with sigma^2 = 2 gamma / lambda.)
        sigma_along: noise along the step in units of the step. (The paper's sigma_nabla multiplies grad L_n, so that it is
            step_size * lambda * sigma_along with the lambda of the paper.)
        preconditioner: diagonal A, positive, in the structure of the parameters (without a chain axis). It must not depend on
            the chain's position: learn it before, then leave it.
        acceptance: the test; `Minibatch()` by default.
    """
    step_size = checked("step_size", step_size)
    if sigma is None:
        sizes = step_size if isinstance(step_size, list) else [step_size]
        sigmas: list[Setting] = [(2 * h).sqrt() if isinstance(h, Tensor) else math.sqrt(2 * h) for h in sizes]
        sigma = sigmas if isinstance(step_size, list) else sigmas[0]
    sigma, sigma_along = checked("sigma", sigma), checked_one("sigma_along", sigma_along)
    diagonal, structure = (None, None) if preconditioner is None else flatten(preconditioner)
    return MALAKernel(step_size, Langevin(sigma, sigma_along, diagonal), acceptance or Minibatch(), structure=structure)
