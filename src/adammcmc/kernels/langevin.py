"""The Metropolis-adjusted Langevin algorithm: plain, directional, preconditioned."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from adammcmc.acceptance import AcceptanceTest, Minibatch
from adammcmc.kernels.arguments import check_noise, check_preconditioner, checked, checked_one, times
from adammcmc.kernels.kernel import ChainState, Info, Kernel, Once, settle
from adammcmc.kernels.proposal import Langevin
from adammcmc.kernels.words import preconditioner_in_words, setting
from adammcmc.target.leaves import Leaves, Setting, Settings, by_chain, flatten, spread_settings, widen
from adammcmc.target.potential import Evaluation, Potential
from adammcmc.target.randomness import Randomness

__all__ = ["MALAKernel", "mala"]


@dataclass(frozen=True)
class MALAKernel(Kernel):
    """A Langevin step whose reverse has an update of its own. See `mala`."""

    step_size: Settings
    proposal: Langevin
    acceptance: AcceptanceTest
    name: str = "MALA"
    structure: Any = None
    """Of the preconditioner, if it is not one tensor or a tuple of tensors."""
    target_acceptance: ClassVar[float] = 0.57

    def __post_init__(self) -> None:
        check_noise(self.proposal.sigma, self.acceptance)

    def init(self, params: Any, potential: Potential) -> ChainState:
        check_preconditioner(params, self.proposal.preconditioner, self.structure)
        return super().init(params, potential)

    def step(self, state: ChainState, potential: Potential, generator: Randomness) -> tuple[ChainState, Info]:
        here = state.here or potential.evaluate(flatten(state.params)[0], with_grad=True)
        return self._step_from(here, state, potential, generator)

    def _step_from(
        self, here: Evaluation, state: ChainState, potential: Potential, generator: Randomness
    ) -> tuple[ChainState, Info]:
        """One step from the evaluation `here`; `potential` evaluates the proposed point."""
        params, _ = flatten(state.params)
        move = self.proposal.propose(params, self._update(here, potential.scale), generator)
        there = Once(lambda: potential.evaluate(move.proposed, with_grad=True))
        log_q_ratio = Once(lambda: self.proposal.log_q_ratio(move, self._update(there(), potential.scale)))
        return settle(state, potential, generator, self.acceptance, here, move, there, log_q_ratio)

    def _update(self, evaluation: Evaluation, scale: Setting) -> Leaves:
        """u = h A grad U, with grad U = scale grad V."""
        assert evaluation.grad is not None
        wide = [widen(g) for g in evaluation.grad]
        rates = [h * scale for h in spread_settings(self.step_size, len(wide))]
        update = tuple(g * by_chain(rate, g) for g, rate in zip(wide, rates, strict=True))
        diagonal = self.proposal.preconditioner
        return update if diagonal is None else tuple(u * a for u, a in zip(update, diagonal, strict=True))

    def scaled(self, factor: float) -> Self:
        """The same kernel with `factor` times the noise, and the step size to match."""
        proposal = replace(self.proposal, sigma=times(self.proposal.sigma, factor))
        return replace(self, step_size=times(self.step_size, factor**2), proposal=proposal)

    def with_preconditioner(self, diagonal: Leaves, structure: Any = None) -> Self:
        """The same kernel with this A."""
        return replace(self, proposal=replace(self.proposal, preconditioner=diagonal), structure=structure)

    def details(self) -> list[str]:
        along = self.proposal.sigma_along
        more = [] if isinstance(along, float | int) and along == 0 else [setting("sigma along", along)]
        sizes = [setting("step size", self.step_size), setting("noise", self.proposal.sigma)]
        return [*sizes, *more, preconditioner_in_words(self.proposal.preconditioner)]


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

    with both gradients and, for sigma_along > 0, both determinants (eq. (5)). The centre is theta MINUS the step; the
    plus sign printed below eq. (4) is a slip. Target: p ~ exp(-U), **exactly**, for a density, for fixed data, and with
    `FullData` also for minibatch gradients (both sides use the same batch). Tune h to an acceptance near 0.57.

    Cost: one forward and backward pass, at tau, for a density or fixed data; otherwise two.

    Args:
        step_size: h. (A tensor (chains,) holds one value per chain, a list one per leaf; likewise below.)
        sigma: None is sqrt(2 h), the value of Langevin dynamics. (The paper's gamma, sigma with sigma^2 = 2 gamma /
            lambda.)
        sigma_along: noise along the step, in units of the step. (The paper's sigma_nabla multiplies grad L_n: it is
            step_size * lambda * sigma_along with the lambda of the paper.)
        preconditioner: diagonal A, positive, in the structure of the parameters (without a chain axis). It must not
            depend on the chain's position: learn it first, then keep it fixed.
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
