"""The exact chain of Theorem 1: AdamMCMC with noisy momenta and the correction C."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from adammcmc.acceptance import AcceptanceTest, Minibatch
from adammcmc.kernels.adam import ProlateKernel
from adammcmc.kernels.arguments import check_betas, check_not_negative, checked, checked_one
from adammcmc.kernels.kernel import ChainState, Info, Once, settle
from adammcmc.kernels.proposal import Prolate
from adammcmc.target.leaves import (
    Leaves,
    PerLeaf,
    Setting,
    Settings,
    by_chain,
    flatten,
    inner,
    select,
    spread,
    spread_settings,
    standard_normal,
    widen,
)
from adammcmc.target.potential import Evaluation, Potential
from adammcmc.target.randomness import Randomness

__all__ = ["ExactAdamMCMCKernel", "NoisyMoments", "exact_adam_mcmc"]


class NoisyMoments(NamedTuple):
    """m1 and m2, part of the augmented state; m2 may be negative."""

    exp_avg: Leaves
    exp_avg_sq: Leaves


@dataclass(frozen=True)
class ExactAdamMCMCKernel(ProlateKernel):
    """Metropolis on theta with the momenta as part of the state. See `exact_adam_mcmc`."""

    lr: Settings
    betas: PerLeaf[tuple[float, float]]
    proposal: Prolate
    momentum_spread: tuple[float, float]
    floor: float
    acceptance: AcceptanceTest
    name: str = "AdamMCMC, exact chain of Theorem 1"
    target_acceptance: ClassVar[float] = 0.25

    def init(self, params: Any, potential: Potential) -> ChainState:
        if not potential.fixed:
            raise ValueError(
                "the exact chain needs fixed_data=True: the gradient of all data is part of its target, which would "
                "change at each step with minibatches. For minibatches use `underdamped` or `mala` with FullData()."
            )
        return super().init(params, potential)

    def step(self, state: ChainState, potential: Potential, generator: Randomness) -> tuple[ChainState, Info]:
        params, _ = flatten(state.params)
        here = state.here or potential.evaluate(params, with_grad=True)
        assert here.grad is not None
        moments = self._next(state.memory or self._initial(here.grad, generator), here.grad, generator)
        move = self.proposal.propose(params, self._update(moments), generator)
        there = Once(lambda: potential.evaluate(move.proposed, with_grad=True))
        ratio = Once(lambda: self.proposal.log_q_ratio(move) + self._log_correction(moments, here, there()))
        return settle(state, potential, generator, self.acceptance, here, move, there, ratio, memory=moments, keep=self._keep)

    def _initial(self, grad: Leaves, generator: Randomness) -> NoisyMoments:
        """m1 ~ N(g, s1^2), m2 ~ N(g^2, s2^2): the conditional law given theta (Theorem 2)."""
        s1, s2 = self.momentum_spread
        first, second = standard_normal(grad, generator), standard_normal(grad, generator)
        return NoisyMoments(
            tuple(g + s1 * e for g, e in zip(grad, first, strict=True)),
            tuple(g.square() + s2 * e for g, e in zip(grad, second, strict=True)),
        )

    def _next(self, moments: NoisyMoments, grad: Leaves, generator: Randomness) -> NoisyMoments:
        """m_l <- beta_l m_l + (1 - beta_l) g^l + s_l sqrt(1 - beta_l^2) xi, which leaves N(g^l, s_l^2) invariant."""
        s1, s2 = self.momentum_spread
        betas = spread(self.betas, len(grad))
        first, second = standard_normal(grad, generator), standard_normal(grad, generator)
        return NoisyMoments(
            tuple(
                torch.lerp(m, g, 1 - b1).add_(e, alpha=s1 * math.sqrt(1 - b1**2))
                for m, g, e, (b1, _) in zip(moments.exp_avg, grad, first, betas, strict=True)
            ),
            tuple(
                torch.lerp(m, g.square(), 1 - b2).add_(e, alpha=s2 * math.sqrt(1 - b2**2))
                for m, g, e, (_, b2) in zip(moments.exp_avg_sq, grad, second, betas, strict=True)
            ),
        )

    def _update(self, moments: NoisyMoments) -> Leaves:
        """u = lr m1 / sqrt(|m2| + floor): a function of the momenta alone, as Theorem 1 requires."""
        rates = spread_settings(self.lr, len(moments.exp_avg))
        pairs = zip(moments.exp_avg, moments.exp_avg_sq, rates, strict=True)
        return tuple(by_chain(lr, widen(m1)) * widen(m1) / (widen(m2).abs() + self.floor).sqrt() for m1, m2, lr in pairs)

    def _log_correction(self, moments: NoisyMoments, here: Evaluation, there: Evaluation) -> Tensor:
        """log C = sum_l [ 2 (m_l - g(theta)^l).D_l - |D_l|^2 ] / (2 s_l^2),  D_l = g(tau)^l - g(theta)^l."""
        assert here.grad is not None
        assert there.grad is not None
        s1, s2 = self.momentum_spread
        total = torch.zeros_like(here.log_prior)
        for m1, m2, g, h in zip(moments.exp_avg, moments.exp_avg_sq, here.grad, there.grad, strict=True):
            d1 = h - g
            d2 = d1 * (h + g)  # h^2 - g^2 without its cancellation
            total = total + (2 * inner(m1 - g, d1) - inner(d1, d1)) / (2 * s1**2)
            total = total + (2 * inner(m2 - g.square(), d2) - inner(d2, d2)) / (2 * s2**2)
        return total

    def _keep(self, mask: Tensor, new: NoisyMoments, old: NoisyMoments | None) -> NoisyMoments | None:
        if old is None:
            return new
        return NoisyMoments(*(select(mask, yes, no) for yes, no in zip(new, old, strict=True)))

    def restored(self, fields: tuple[Any, ...]) -> NoisyMoments:
        """The memory from its fields, as a checkpoint has them."""
        return NoisyMoments(*(tuple(leaves) for leaves in fields))

    def details(self) -> list[str]:
        s1, s2 = self.momentum_spread
        return [*super().details(), f"betas {self.betas}", f"momentum spread ({s1:.3g}, {s2:.3g})"]

    def approximation(self, *, fixed_data: bool) -> list[str]:
        own = [] if fixed_data else ["the gradient of a minibatch enters the target"]
        return own + super().approximation(fixed_data=fixed_data)


def exact_adam_mcmc(
    lr: Settings,
    betas: PerLeaf[tuple[float, float]] = (0.99, 0.99),
    *,
    sigma: Settings,
    sigma_along: Setting = 0.0,
    momentum_spread: tuple[float, float],
    floor: float | None = None,
    acceptance: AcceptanceTest | None = None,
) -> ExactAdamMCMCKernel:
    r"""The augmented chain of Theorem 1 (eq. (9) and (10)): Adam's momenta as part of the state. **Exact.**

        m_l <- beta_l m_l + (1 - beta_l) (grad V)^l + s_l sqrt(1 - beta_l^2) xi_l,    l = 1, 2;  kept on rejection
        u = lr m1 / sqrt(|m2| + floor)
        tau = theta - u + sigma eps + sigma_along z u
        accept with min(1, exp(Y)),  Y = U(theta) - U(tau) + log_q_ratio + log C
        log C = sum_l [ |m_l - g(theta)^l|^2 - |m_l - g(tau)^l|^2 ] / (2 s_l^2)

    Target: p ~ exp(-U) for theta, **exactly**, and m_l | theta ~ N(g^l, s_l^2). There is no bias correction: the
    momenta start in equilibrium (Theorem 2). It needs the full-data gradient. It is as efficient as a random walk: this
    kernel demonstrates the paper's theory; for exact sampling use `underdamped`.

    Cost: one forward and backward pass, at tau.

    Args:
        lr: Adam's learning rate.
        betas: Adam's decay rates.
        sigma: as in `adam_mcmc`, and so is `sigma_along`.
        momentum_spread: (s1, s2), rho_l / sqrt(1 - beta_l^2) in the paper's notation: the standard deviation of the
            momenta around the gradient and its square. About 1.5 times |D_l| works well; `momentum_spread` measures it.
        floor: keeps u finite where m2 crosses zero; None is s2. (With a tiny floor u has heavy tails, and nothing is
            accepted.)
        acceptance: the test; `Minibatch()` by default, which is exact here.
    """
    check_betas(betas)
    lr, sigma, sigma_along = checked("lr", lr), checked("sigma", sigma), checked_one("sigma_along", sigma_along)
    pair = momentum_spread if isinstance(momentum_spread, tuple | list) else ()
    if len(pair) != 2 or not all(0 < s < math.inf for s in pair):
        raise ValueError(f"`momentum_spread` must be two positive numbers, got {momentum_spread}.")
    if floor is not None:
        check_not_negative("floor", floor)
    s1, s2 = (float(s) for s in momentum_spread)
    floor = s2 if floor is None else floor
    return ExactAdamMCMCKernel(lr, betas, Prolate(sigma, sigma_along), (s1, s2), floor, acceptance or Minibatch())
