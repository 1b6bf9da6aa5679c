"""Langevin dynamics on minibatches, the noise of whose gradients is balanced by drag."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from adammcmc.acceptance import AlwaysAccept
from adammcmc.kernels.hamiltonian import UnderdampedKernel, underdamped
from adammcmc.kernels.kernel import ChainState, Info
from adammcmc.kernels.scaling import forces
from adammcmc.target.leaves import Leaves, Setting, Settings, by_chain, flatten, inner, is_finite, select
from adammcmc.target.potential import Potential
from adammcmc.target.randomness import Randomness

__all__ = ["MinibatchKernel", "minibatch_langevin"]


@dataclass(frozen=True)
class MinibatchKernel(UnderdampedKernel):
    """The unadjusted `UnderdampedKernel` with drag. See `minibatch_langevin`."""

    name: str = "minibatch Langevin"
    noise_share: float = 1.0
    """Of the second moment of a batch's force: what is noise."""

    def step(self, state: ChainState, potential: Potential, generator: Randomness) -> tuple[ChainState, Info]:
        params, _ = flatten(state.params)
        here = state.here or potential.evaluate(params, with_grad=True)
        memory = state.memory or self._fresh(params, generator)
        assert here.grad is not None
        grad, prior = here.grad, potential.prior_part(params)
        if prior is not None:
            grad = tuple(g - q for g, q in zip(grad, prior, strict=True))
        momentum = self._dragged(memory.momentum, grad, potential.scale)
        return super().step(state._replace(here=here, memory=memory._replace(momentum=momentum)), potential, generator)

    def _dragged(self, momentum: Leaves, grad: Leaves, scale: Setting) -> Leaves:
        """p - (1 - exp(-s |d|^2 / 2)) d (d.p) / |d|^2"""
        force = tuple(f * by_chain(scale, f) for f in forces(self.step_size, self.preconditioner, grad))
        square = _inner(force, force).clamp_min(torch.finfo(torch.float32).tiny)
        loss = -torch.expm1(-0.5 * self.noise_share * square) * _inner(force, momentum) / square
        dragged = tuple(p - by_chain(loss, d) * d for p, d in zip(momentum, force, strict=True))
        return select(is_finite(square), dragged, momentum)  # a chain that freezes keeps its momentum

    def details(self) -> list[str]:
        return [*super().details(), "drag of the gradient noise"]


def _inner(a: Leaves, b: Leaves) -> Tensor:
    return functools.reduce(torch.add, [inner(x, y) for x, y in zip(a, b, strict=True)])


def minibatch_langevin(
    step_size: Settings, friction: float | None = None, *, noise_share: float = 1.0, preconditioner: Any = None
) -> MinibatchKernel:
    r"""Underdamped Langevin dynamics with one gradient of one batch a step, and drag that balances its noise. **Approximate.**

        d = h A^1/2 (lambda n / b) sum_{i in B} grad l_i        the data's part of the kick, whitened: p ~ N(0, I) at rest
        p <- p - (1 - exp(-s |d|^2 / 2)) d (d.p) / |d|^2        drag, s = noise_share
        p <- p - h A^1/2 g_B                                    kick: g_B is d's gradient with that of the prior
        p' = c p + sqrt(1 - c^2) xi,   c = exp(-friction h),   tau = theta + (h/2) A^1/2 (p + p')
        always accept: (tau, p')

    Without the drag, the noise of the kick heats: by h (n/b) k / (2 friction) in a direction of curvature k (in units of A).
    E[s d d'] is the covariance of that noise, whatever its shape, so that on average the drag takes out of every direction
    what the noise brings in (fluctuation and dissipation), and what remains is of second order in h. This needs batches that
    are independent of everything before: an epoch without replacement, or any fixed order, makes the chain too cold. It fails
    where a single kick is no longer small, |d|^2 > 1 or so.

    Target: p ~ exp(-U), **approximately**. Cost: one forward and backward of a batch, and two inner products.

    Args:
        step_size: h; |d|^2 of about 0.5 to 1 is a good one.
        friction: as for `underdamped`.
        noise_share: s, by how much the covariance of d is smaller than E[d d']: 1 / (1 + b/n) for examples drawn with
            replacement, 1 - b/n without (the gradients of the examples vary about as much as the posterior's curvature says).
        preconditioner: A, as for `underdamped`.
    """
    if not 0 < noise_share <= 1:
        raise ValueError(f"`noise_share` must lie above 0 and not above 1, got {noise_share}.")
    like = underdamped(step_size, friction, preconditioner=preconditioner, acceptance=AlwaysAccept())
    shared = {field.name: getattr(like, field.name) for field in fields(like) if field.name != "name"}
    return MinibatchKernel(**shared, noise_share=noise_share)
