"""Microcanonical Langevin dynamics: constant speed, whatever the slope; adjusted by Metropolis, or not."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from adammcmc.acceptance import AcceptanceTest
from adammcmc.kernels.hamiltonian import Momentum, UnderdampedKernel, underdamped
from adammcmc.kernels.kernel import ChainState
from adammcmc.kernels.proposal import Move
from adammcmc.kernels.scaling import forces
from adammcmc.target.leaves import Leaves, Setting, Settings, by_chain, flatten, inner
from adammcmc.target.potential import Evaluation, Potential
from adammcmc.target.randomness import Randomness

__all__ = ["MicrocanonicalKernel", "microcanonical"]


@dataclass(frozen=True)
class MicrocanonicalKernel(UnderdampedKernel):
    """`UnderdampedKernel` with a momentum of constant length: forces turn it, and noise does. See `microcanonical`.

    The momentum p has |p| = sqrt(d) in whitened units, so that a step moves each weight about as far as the underdamped
    kernel does with the same step size. The paper of the equations has the unit vector u = p / sqrt(d).
    """

    name: str = "microcanonical Langevin"
    target_acceptance: ClassVar[float] = 0.85

    def init(self, params: Any, potential: Potential) -> ChainState:
        if _dimension(flatten(params)[0]) < 2:
            raise ValueError("microcanonical dynamics needs at least two dimensions: on a line, a force cannot turn anything.")
        return super().init(params, potential)

    def _fresh(self, params: Leaves, generator: Randomness) -> Momentum:
        fresh = super()._fresh(params, generator)
        return fresh._replace(momentum=_normalised(fresh.momentum))

    def _refreshed(self, momentum: Leaves, generator: Randomness) -> Leaves:
        """p <- sqrt(d) normalise(c p + sqrt(1 - c^2) xi), which leaves the uniform law on the sphere as it is"""
        return _normalised(super()._refreshed(momentum, generator))

    def _kick(self, momentum: Leaves, grad: Leaves | None, scale: Setting) -> Leaves:
        return self._turn(momentum, grad, scale)[0]

    def _turn(self, momentum: Leaves, grad: Leaves | None, scale: Setting) -> tuple[Leaves, Tensor, Tensor]:
        """The map B of `microcanonical`: the turned momentum, K (the energy it has gained), and the squared force."""
        assert grad is not None
        pulls = forces(self.step_size, self.preconditioner, grad)
        force = tuple(-f * by_chain(scale, f) for f in pulls)  # in whitened units, times the step
        d = _dimension(momentum)
        square = _inner(force, force)
        size = square.sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        cosine = (_inner(force, momentum) / (size * math.sqrt(d))).clamp(-1, 1)
        delta = math.sqrt(d) * size / (d - 1)
        shrunk = torch.exp(-delta)
        along = -torch.expm1(-delta) * (1 + shrunk - cosine * torch.expm1(-delta)) * math.sqrt(d) / size
        turned = (by_chain(along, f) * f + by_chain(2 * shrunk, p) * p for f, p in zip(force, momentum, strict=True))
        # log cosh of a sum of two angles, less that of the first
        gained = (d - 1) * (delta - math.log(2) + torch.log(1 + cosine + (1 - cosine) * shrunk.square()))
        return _normalised(tuple(turned)), gained, square

    def _leapfrog(self, params: Leaves, here: Evaluation, momentum: Leaves, potential: Potential) -> tuple[Move, Any]:
        """All but the last half turn: the proposed point; the momentum with which it was reached, and its energy."""
        momentum, gained, square = self._turn(momentum, here.grad, potential.scale / 2)
        proposed = self._drift(params, momentum)
        for _ in range(self.num_leapfrog - 1):
            momentum, more, _ = self._turn(momentum, potential.force(proposed), potential.scale)
            gained, proposed = gained + more, self._drift(proposed, momentum)
        return Move(proposed, (square,)), (momentum, gained)

    def _arrive(self, before: Leaves, half_way: Any, there: Evaluation, scale: Setting) -> tuple[Tensor, Leaves]:
        momentum, gained = half_way
        after, more, _ = self._turn(momentum, there.grad, scale / 2)
        return -(gained + more), after


def _dimension(leaves: Leaves) -> int:
    return sum(x[0].numel() for x in leaves)


def _inner(a: Leaves, b: Leaves) -> Tensor:
    return functools.reduce(torch.add, [inner(x, y) for x, y in zip(a, b, strict=True)])


def _normalised(momentum: Leaves) -> Leaves:
    """The same direction, of length sqrt(d)."""
    factor = (_dimension(momentum) / _inner(momentum, momentum)).sqrt()
    return tuple(p * by_chain(factor, p) for p in momentum)


def microcanonical(
    step_size: Settings,
    friction: float | None = None,
    *,
    num_leapfrog: int = 1,
    persistent_uniform: bool | None = None,
    preconditioner: Any = None,
    acceptance: AcceptanceTest | None = None,
    jitter: float = 0.0,
    num_chances: int = 1,
) -> MicrocanonicalKernel:
    r"""Microcanonical (isokinetic) Langevin dynamics: momentum of constant length, turned by the force. With a test, **exact**.

        O:  u <- normalise(c u + sqrt(1 - c^2) xi / sqrt(d)),   c = exp(-friction h),   |u| = 1
        B:  e = -A^1/2 g / |A^1/2 g|,  delta = h sqrt(d) |A^1/2 g| / (d - 1),  zeta = exp(-delta),   g = grad U, h = step_size
            u <- normalise(e (1 - zeta) (1 + zeta + e.u (1 - zeta)) + 2 zeta u)
            K <- K + (d - 1) [delta - log 2 + log(1 + e.u + (1 - e.u) zeta^2)]
        A:  tau = theta + h sqrt(d) A^1/2 u
        a step: O, B/2, A, B/2 (or `num_leapfrog` times the last three, from tau on);   Y = U(theta) - U(tau) - K
        accept: (tau, u');  reject: (theta, -u)

    Target: p ~ exp(-U), **exactly**, as `underdamped` (K is the logarithm of the volume that B contracts; arXiv 2503.01707 for
    trajectories with a full refresh). With `AlwaysAccept` **approximate**: one gradient of any batch a step, kick, half
    drift, refresh, half drift. The speed does not depend on the slope, so that steep places neither heat the chain nor stop
    it. Needs at least two dimensions.

    Cost: as `underdamped`.

    Args:
        step_size: h, in units of `underdamped`: each weight moves by about h A^1/2.
        friction: how fast the direction is forgotten; None as for `underdamped`, `math.inf` is a new direction.
        num_leapfrog: steps between two refreshes and tests.
        persistent_uniform, preconditioner, acceptance, jitter, num_chances: as for `underdamped`.
    """
    like = underdamped(
        step_size,
        friction,
        num_leapfrog=num_leapfrog,
        persistent_uniform=persistent_uniform,
        preconditioner=preconditioner,
        acceptance=acceptance,
        jitter=jitter,
        num_chances=num_chances,
    )
    shared = {field.name: getattr(like, field.name) for field in fields(like) if field.name != "name"}
    return MicrocanonicalKernel(**shared)
