"""The named kernels. Each docstring says: the equation, what is sampled, exact or not, and what a step costs.

U is the potential of the target, V = U / (lambda n) what is differentiated (`adammcmc.target`); for a density U = V = -log p.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adammcmc.acceptance import Minibatch, Test
from adammcmc.direction import Adam, Direction, Gradient, OptimizerStep
from adammcmc.kernel import ChainState, Info, Once, settle, start
from adammcmc.leaves import Leaves, PerLeaf, flatten, spread
from adammcmc.proposal import Langevin, Move, Prolate
from adammcmc.target import Evaluation, Potential

__all__ = ["AdamMCMCKernel", "MALAKernel", "adam_mcmc", "mala", "optimizer_mcmc"]


@dataclass(frozen=True)
class AdamMCMCKernel:
    """Algorithm 1: one update u for both directions, from a direction with memory. See `adam_mcmc`."""

    direction: Direction
    proposal: Prolate
    acceptance: Test
    name: str = "AdamMCMC (Algorithm 1)"

    def __post_init__(self) -> None:
        _check_noise(self.proposal.sigma, self.acceptance)

    def init(self, params: Any, potential: Potential) -> ChainState:
        return start(params, potential, self.direction)

    def propose(self, params: Leaves, here: Evaluation, memory: Any, generator: torch.Generator) -> tuple[Move, Any]:
        """m <- ..., u(m), tau ~ N(theta - u, Sigma(u)): the first half of Algorithm 1."""
        assert here.grad is not None
        update, memory = self.direction(here.grad, memory, params)
        return self.proposal.propose(params, update, generator), memory

    def step(self, state: ChainState, potential: Potential, generator: torch.Generator) -> tuple[ChainState, Info]:
        params, _ = flatten(state.params)
        here = state.here or potential.evaluate(params, with_grad=True)
        move, memory = self.propose(params, here, state.memory, generator)
        there = Once(lambda: potential.evaluate(move.proposed, with_grad=potential.fixed))
        log_q_ratio = Once(lambda: self.proposal.log_q_ratio(move))
        return settle(  # the Metropolis-Hastings correction, the second half of Algorithm 1
            state,
            potential,
            generator,
            acceptance=self.acceptance,
            direction=self.direction,
            here=here,
            memory=memory,
            move=move,
            there=there,
            log_q_ratio=log_q_ratio,
        )

    def approximation(self, *, fixed_data: bool) -> list[str]:
        reasons = ["momentum without its correction C (Theorem 1)", self.acceptance.approximation(fixed_data=fixed_data)]
        return [reason for reason in reasons if reason is not None]


@dataclass(frozen=True)
class MALAKernel:
    """A Langevin step with its own update on either side. See `mala`."""

    step_size: PerLeaf[float]
    proposal: Langevin
    acceptance: Test
    name: str = "MALA"
    structure: Any = None
    """Of the preconditioner, if it is not one tensor or a tuple of tensors."""

    def __post_init__(self) -> None:
        _check_noise(self.proposal.sigma, self.acceptance)

    def _direction(self, potential: Potential, num_leaves: int) -> Gradient:
        """h * grad U = h * scale * grad V"""
        rates = [h * potential.scale for h in spread(self.step_size, num_leaves)]
        return Gradient(rates, self.proposal.preconditioner)

    def init(self, params: Any, potential: Potential) -> ChainState:
        if self.proposal.preconditioner is not None:
            leaves, structure = flatten(params)
            shapes = [tuple(a.shape) for a in self.proposal.preconditioner]
            if shapes != [tuple(x.shape[1:]) for x in leaves] or self.structure != structure:
                raise ValueError(
                    "`preconditioner` must have the structure of the parameters, keys in the same order, without the chain "
                    f"axis: shapes {[tuple(x.shape[1:]) for x in leaves]}, got {shapes}."
                )
            if not all(bool((a > 0).all()) for a in self.proposal.preconditioner):
                raise ValueError("`preconditioner` must be positive everywhere.")
        return start(params, potential, Gradient(1.0))

    def step(self, state: ChainState, potential: Potential, generator: torch.Generator) -> tuple[ChainState, Info]:
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
            direction=direction,
            here=here,
            memory=None,
            move=move,
            there=there,
            log_q_ratio=Once(log_q_ratio),
        )

    def approximation(self, *, fixed_data: bool) -> list[str]:
        reason = self.acceptance.approximation(fixed_data=fixed_data)
        return [] if reason is None else [reason]


def adam_mcmc(
    lr: PerLeaf[float],
    betas: PerLeaf[tuple[float, float]] = (0.99, 0.99),
    eps: PerLeaf[float] = 1e-8,
    *,
    sigma: PerLeaf[float],
    sigma_along: float = 0.0,
    acceptance: Test | None = None,
) -> AdamMCMCKernel:
    r"""Algorithm 1 of the paper, as printed.

        m1 <- beta1 m1 + (1 - beta1) grad V,    m2 <- beta2 m2 + (1 - beta2) (grad V)^2
        u = lr * m1hat / (sqrt(m2hat) + eps)
        tau = theta - u + sigma eps + sigma_along z u                    (z: one number for each step)
        accept with min(1, exp(Y)),  Y = U(theta) - U(tau) + log q(theta|tau, m) - log q(tau|theta, m)

    The momenta are kept on rejection. Target: p ~ exp(-U), **approximately**: the correction C of Theorem 1 is set to 1, as in
    the paper. The bias is small only if the momentum carries little information on theta (see the docs, "What Algorithm 1
    really samples"); `mala` is exact. lr = 0 is random walk Metropolis, and exact.

    Cost: one forward and backward at theta and one forward at tau; for a density or fixed data one forward and backward in
    all, at tau.

    Args:
        lr: Adam's learning rate. (A list gives one value to each leaf; likewise below.)
        betas: Adam's decay rates.
        eps: Adam's, the paper's delta.
        sigma: standard deviation of the noise on one weight. 0 only with `AlwaysAccept`, where it gives Adam itself.
        sigma_along: noise along the update in units of the update, the paper's sigma_Delta. Proposals alone are accepted
            at a rate of at least 2 Phi(-1/sigma_along), however small sigma is.
        acceptance: the test; `Minibatch()` by default.
    """
    for name, values, low, high in (("lr", lr, 0, math.inf), ("eps", eps, 0, math.inf)):
        _check_range(name, values, low, high)
    for pair in betas if isinstance(betas, list) else [betas]:
        if not all(0 <= beta < 1 for beta in pair):
            raise ValueError(f"`betas` must lie in [0, 1), got {pair}.")
    return AdamMCMCKernel(Adam(lr, betas, eps), _prolate(sigma, sigma_along), acceptance or Minibatch())


def optimizer_mcmc(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    *,
    sigma: PerLeaf[float],
    sigma_along: float = 0.0,
    acceptance: Test | None = None,
) -> AdamMCMCKernel:
    """Algorithm 1 with the step of any `torch.optim` optimizer in place of Adam's: SGD, NAdam, RMSprop, ...

        u = theta - (theta after the optimizer's step)

    and the rest as in `adam_mcmc`. Target: p ~ exp(-U), **approximately**, for the same reason; weight decay makes u depend on
    theta too. Cost: as `adam_mcmc`, and a copy of the optimizer's state.

    Args:
        make: builds the optimizer from a list of parameters, such as `functools.partial(torch.optim.SGD, lr=0.1)`.
        sigma: as in `adam_mcmc`.
        sigma_along: as in `adam_mcmc`.
        acceptance: as in `adam_mcmc`.
    """
    name = "Algorithm 1 with a torch optimizer's step"
    return AdamMCMCKernel(OptimizerStep(make), _prolate(sigma, sigma_along), acceptance or Minibatch(), name)


def mala(
    step_size: PerLeaf[float],
    *,
    sigma: PerLeaf[float] | None = None,
    sigma_along: float = 0.0,
    preconditioner: Any = None,
    acceptance: Test | None = None,
) -> MALAKernel:
    r"""The Metropolis-adjusted Langevin algorithm (eq. (2)), directional (eq. (4)) and preconditioned.

        tau = theta - h A g + sigma A^1/2 eps + sigma_along z h A g,    g = grad U(theta), h = step_size
        accept with min(1, exp(Y)),  Y = U(theta) - U(tau) + log q(theta|tau) - log q(tau|theta)     (eq. (3))

    with both gradients and, for sigma_along > 0, both determinants (eq. (5)). The centre is theta MINUS the step; the plus sign
    printed below eq. (4) is a slip. Target: p ~ exp(-U), **exactly**, for a density, for fixed data, and with `FullData` for
    minibatch gradients too (both sides see the same batch). Tune h to an acceptance near 0.57.

    Cost: for a density or fixed data one forward and backward, at tau; otherwise two.

    Args:
        step_size: h.
        sigma: None is sqrt(2 h), the value of Langevin dynamics. (The paper's gamma, sigma with sigma^2 = 2 gamma / lambda.)
        sigma_along: noise along the step in units of the step. (The paper's sigma_nabla multiplies grad L_n, so that it is
            step_size * lambda * sigma_along with the lambda of the paper.)
        preconditioner: diagonal A, positive, in the structure of the parameters (without a chain axis). It must not depend on
            the chain's position: learn it before, then leave it.
        acceptance: the test; `Minibatch()` by default.
    """
    _check_range("step_size", step_size, 0, math.inf)
    if sigma is None:
        sizes = step_size if isinstance(step_size, list) else [step_size]
        sigma = [math.sqrt(2 * h) for h in sizes]
        sigma = sigma if isinstance(step_size, list) else sigma[0]
    _prolate(sigma, sigma_along)
    diagonal, structure = (None, None) if preconditioner is None else flatten(preconditioner)
    return MALAKernel(step_size, Langevin(sigma, sigma_along, diagonal), acceptance or Minibatch(), structure=structure)


def _prolate(sigma: PerLeaf[float], sigma_along: float) -> Prolate:
    _check_range("sigma", sigma, 0, math.inf)
    _check_range("sigma_along", sigma_along, 0, math.inf)
    return Prolate(sigma, sigma_along)


def _check_range(name: str, values: PerLeaf[float], low: float, high: float) -> None:
    for value in values if isinstance(values, list) else [values]:
        if not low <= value < high:
            raise ValueError(f"`{name}` must not be negative, and must be finite, got {value}.")


def _check_noise(sigma: PerLeaf[float], acceptance: Test) -> None:
    if acceptance.needs_noise and not all(s > 0 for s in (sigma if isinstance(sigma, list) else [sigma])):
        raise ValueError(
            f"`sigma` must be positive, got {sigma}: without noise the proposal has no density to test. "
            "sigma = 0 needs `acceptance=AlwaysAccept()`."
        )
