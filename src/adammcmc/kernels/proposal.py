r"""Where to go: Gaussian proposals around a step, stretched ("prolate") along it, and their density ratios.

    tau = theta - u + D^1/2 eps + sigma_along * z * u,    eps ~ N(0, I),  z ~ N(0, 1),  D = sigma^2 (or sigma^2 A)

that is N(theta - u, D + sigma_along^2 u u'), the paper's eq. (4) and (8). There is ONE scalar z for each step and chain: with
one for each weight the covariance would be diagonal, not prolate. The log density ratios follow from dot products of
whitened vectors, by the Sylvester identity and the Sherman-Morrison formula (eq. (5) and (6)); two densities are never
evaluated and subtracted, which at P = 1e6 in float32 loses every digit.

On a GPU `backends/triton_adam.py` repeats `Prolate` and `Elementwise`: change both. Kernels with a velocity draw their noise in
`hamiltonian.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from adammcmc.target.leaves import (
    Leaves,
    Setting,
    Settings,
    by_chain,
    inner,
    per_chain,
    spread_settings,
    standard_normal,
    widen,
)
from adammcmc.target.randomness import Randomness, normal

__all__ = ["Elementwise", "InPlace", "Langevin", "Move", "Prolate"]

Noise: TypeAlias = tuple[Tensor, Leaves]
"""z and eps of a move, if they were drawn before."""


class Move(NamedTuple):
    """A proposed move, with what its density ratio needs, and how it is taken or undone."""

    proposed: Leaves
    squares: tuple[Tensor, ...]
    """|u|^2 of each leaf, (chains,), float64: not finite where the gradient is not."""
    update: Leaves = ()
    """u"""
    noise: Leaves = ()
    """eps"""
    along: Tensor | None = None
    """z, (chains,), float64"""
    log_q_ratio: Tensor | None = None
    """The density ratio, if the backend has computed it (`update` and `noise` are then not kept)."""
    step_to_noise: Tensor | None = None
    """r = |u| / sigma, (chains,), float64, if it is defined."""
    log_uniform: Tensor | None = None
    """log of the uniform number that decides, (chains,), float64, if the backend drew it with the noise."""
    log_prior: tuple[Tensor, Tensor] | None = None
    """log prior at the current and at the proposed point, if the backend summed it in the same pass."""
    in_place: InPlace | None = None
    """Set if the proposal has overwritten the current point."""


class InPlace(Protocol):
    """A move that was made in the memory of the current point, and a faster way to settle it."""

    current: Leaves
    """A copy of the current point."""

    def decide(
        self,
        acceptance: Any,
        potential: Any,
        here: Any,
        there: Callable[[], Any],
        log_q_ratio: Callable[[], Tensor],
        move: Move,
        state: Any,
    ) -> Any | None:
        """The `Info` that `kernel.settle` would report, in one launch; None if this test or target is not covered.

        Chains that freeze are marked in `state.frozen_at`.
        """

    def keep(self, is_accepted: Tensor, new_grad: Leaves | None, old_grad: Leaves | None) -> Leaves | None:
        """Put rejected chains back. With gradients, keep the new one where accepted; returns the memory they are kept in."""

    def undo(self) -> None:
        """Put every chain back: an error occurred before the decision."""


@dataclass(frozen=True)
class Prolate:
    r"""Algorithm 1's proposal: the SAME u in both directions, as if it did not depend on where the chain stands.

    With the update u shared, the covariance is shared, its determinant cancels, and

        log q(theta|tau) - log q(tau|theta) = 2 [ sum_g u_g.eps_g / sigma_g - (1 - sigma_along z) a ] / (1 + sigma_along^2 a)
        a = sum_g |u_g|^2 / sigma_g^2                       (g: leaves, each with its own sigma_g)

    Distributed as N(-2 kappa^2, 4 kappa^2) with kappa^2 = a / (1 + sigma_along^2 a): on a flat loss the acceptance
    rate is 2 Phi(-kappa).
    """

    sigma: Settings
    sigma_along: Setting = 0.0

    def propose(
        self, params: Leaves, update: Leaves, generator: Randomness, *, noise: Noise | None = None, out: Leaves | None = None
    ) -> Move:
        """tau; with `noise` = (z, eps) drawn before, and written into `out`, where a backend has them."""
        move = _propose(params, update, deviations(self.sigma, None, update), self.sigma_along, generator, noise, out)
        if any(isinstance(s, float | int) and s == 0 for s in spread_settings(self.sigma, len(params))):
            return move
        return move._replace(step_to_noise=self.squared_ratio(move.squares).sqrt())

    def squared_ratio(self, squares: Sequence[Tensor]) -> Tensor:
        """a"""
        return _sum(square / s**2 for square, s in zip(squares, spread_settings(self.sigma, len(squares)), strict=True))

    def log_q_ratio(self, move: Move) -> Tensor:
        if move.log_q_ratio is not None:
            return move.log_q_ratio
        sigmas = spread_settings(self.sigma, len(move.update))
        a = self.squared_ratio(move.squares)
        cross = _sum(inner(u, e) / s for u, e, s in zip(move.update, move.noise, sigmas, strict=True))
        assert move.along is not None
        return (cross - (1 - self.sigma_along * move.along) * a) * (2 / (1 + self.sigma_along**2 * a))


@dataclass(frozen=True)
class Elementwise(Prolate):
    r"""The proposal of the code released with the paper: it draws one law and evaluates the density of another.

        tau = theta - u + sigma eps + sigma_along zeta * u,    zeta ~ N(0, I): a number for each WEIGHT

    Its covariance is the diagonal sigma^2 + sigma_along^2 u_i^2, but the ratio is that of the rank-one `Prolate`,

        log_q_ratio = 2 sum_g u_g.d_g / sigma_g^2 / (1 + sigma_along^2 a),    d = tau - theta

    so Metropolis-Hastings does not correct for what was drawn. In many dimensions sum_i zeta_i u_i^2 averages out and the
    ratio is about -2 / sigma_along^2 whatever the loss does. For replication only.
    """

    def propose(
        self, params: Leaves, update: Leaves, generator: Randomness, *, noise: Noise | None = None, out: Leaves | None = None
    ) -> Move:
        sigmas = deviations(self.sigma, None, update)
        moved = _propose(params, update, sigmas, 0.0, generator, noise, out)
        zetas = standard_normal(update, generator)
        shifts = [u * z * by_chain(self.sigma_along, u) for u, z in zip(update, zetas, strict=True)]
        proposed = tuple((widen(p) + s).to(p.dtype) for p, s in zip(moved.proposed, shifts, strict=True))
        # as noise in units of sigma, so that the rank-one formula (with z = 0) sees the displacement that was made
        drawn = tuple(e + s / sigma for e, s, sigma in zip(moved.noise, shifts, sigmas, strict=True))
        assert moved.along is not None
        along = torch.zeros_like(moved.along)
        return Move(proposed, moved.squares, update, drawn, along, step_to_noise=self.squared_ratio(moved.squares).sqrt())


@dataclass(frozen=True)
class Langevin:
    r"""MALA's proposal: the reverse move has its own update u', computed at tau (the paper's eq. (2) and (4)).

    Noise D^1/2 eps with D = sigma^2 A, A diagonal (identity by default). In the metric of D^-1, with w = u + u',
    e = D^1/2 eps + sigma_along z u the forward residual and e' = w - e the backward one,

        log q(theta|tau) - log q(tau|theta) = w.e - w.w / 2
            + (sigma_along^2 / 2) [ (u'.e')^2 / (1 + sigma_along^2 |u'|^2) - (u.e)^2 / (1 + sigma_along^2 |u|^2) ]
            - (1/2) log[ (1 + sigma_along^2 |u'|^2) / (1 + sigma_along^2 |u|^2) ]

    The last line is the ratio of determinants, eq. (5): here it does not cancel. Five dot products suffice.
    """

    sigma: Settings
    sigma_along: Setting = 0.0
    preconditioner: Leaves | None = None

    def propose(self, params: Leaves, update: Leaves, generator: Randomness) -> Move:
        return _propose(params, update, deviations(self.sigma, self.preconditioner, update), self.sigma_along, generator)

    def log_q_ratio(self, move: Move, reverse: Leaves) -> Tensor:
        scales = deviations(self.sigma, self.preconditioner, reverse)
        here = [u / s for u, s in zip(move.update, scales, strict=True)]
        there = [u / s for u, s in zip(reverse, scales, strict=True)]
        uu = _sum(inner(u, u) for u in here)
        vv = _sum(inner(v, v) for v in there)
        uv = _sum(inner(u, v) for u, v in zip(here, there, strict=True))
        u_eps = _sum(inner(u, e) for u, e in zip(here, move.noise, strict=True))
        v_eps = _sum(inner(v, e) for v, e in zip(there, move.noise, strict=True))

        assert move.along is not None
        s2 = self.sigma_along**2
        u_e = u_eps + self.sigma_along * move.along * uu
        v_e = v_eps + self.sigma_along * move.along * uv
        isotropic = (u_e + v_e) - 0.5 * (uu + 2 * uv + vv)
        rank_one = 0.5 * s2 * ((uv + vv - v_e) ** 2 / (1 + s2 * vv) - u_e**2 / (1 + s2 * uu))
        determinant = -0.5 * torch.log((1 + s2 * vv) / (1 + s2 * uu))
        return isotropic + rank_one + determinant


def deviations(sigma: Settings, preconditioner: Leaves | None, like: Leaves) -> Sequence[Setting]:
    """D^1/2 = sigma A^1/2 of each leaf, shaped to multiply it."""
    sigmas = [by_chain(s, x) for s, x in zip(spread_settings(sigma, len(like)), like, strict=True)]
    if preconditioner is None:
        return sigmas
    return [s * a.sqrt() for s, a in zip(sigmas, preconditioner, strict=True)]


def draw_along(params: Leaves, generator: Randomness) -> Tensor:
    """z, (chains,), float64."""
    return normal(params[0].shape[:1], torch.float64, params[0].device, generator)


def _propose(
    params: Leaves,
    update: Leaves,
    scales: Sequence[Setting],
    sigma_along: Setting,
    generator: Randomness,
    noise: Noise | None = None,
    out: Leaves | None = None,
) -> Move:
    along, eps = noise or (draw_along(params, generator), standard_normal(update, generator))
    proposed = []
    for p, u, e, s, into in zip(params, update, eps, scales, out or [None] * len(params), strict=True):
        wide = widen(p)
        moved = torch.addcmul(wide, e, s, out=into) if isinstance(s, Tensor) else torch.add(wide, e, alpha=s, out=into)
        coefficient = (sigma_along * along - 1).to(u.dtype)  # of u: drift and directional noise in one
        proposed.append(moved.addcmul_(u, per_chain(coefficient, u)).to(p.dtype))
    squares = tuple(inner(u, u) for u in update)
    return Move(tuple(proposed), squares, update, eps, along)


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)
