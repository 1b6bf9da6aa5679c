r"""Bringing in chains that start far from the bulk, before burn-in proper: a few steps of L-BFGS for each chain by itself.

    theta <- theta - t B grad U,    B: the L-BFGS estimate of the inverse Hessian (10 pairs),   t by backtracking (Armijo)

A chain whose start is 10^5 standard deviations away would need as many steps of any sampler. It stops descending as soon as
a step lowers U by less than ten of its natural spreads, sqrt(d / 2): it is then near the bulk, not at a mode. Chains that
start near the bulk stay where they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adammcmc.target.leaves import Leaves
from adammcmc.target.potential import Potential

__all__ = ["descend"]

_PAIRS = 10
_WORTH = 10.0  # natural spreads of U that a step must gain
_BACKTRACKS = 30
_ARMIJO = 1e-4
_PATIENCE = 3  # steps in a row that gain less


def descend(potential: Potential, params: Leaves, max_steps: int = 300) -> tuple[Leaves, int]:
    """The chains near their bulk, and how many evaluations of all chains that took. `potential` is fixed."""
    shapes, dtypes = [x.shape for x in params], [x.dtype for x in params]
    sizes = [x[0].numel() for x in params]

    def leaves(x: Tensor) -> Leaves:
        parts = x.split_with_sizes(sizes, 1)
        return tuple(p.reshape(shape).to(dtype) for p, shape, dtype in zip(parts, shapes, dtypes, strict=True))

    def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
        found = potential.evaluate(leaves(x), with_grad=True)
        assert found.grad is not None
        scale = torch.as_tensor(potential.scale, dtype=torch.float64, device=x.device)
        level = scale * (found.losses.double() if found.losses.dim() == 1 else found.losses.double().mean(1)) - found.log_prior
        return level, scale.reshape(-1, 1) * torch.cat([g.double().reshape(len(g), -1) for g in found.grad], 1)

    x = torch.cat([p.double().reshape(len(p), -1) for p in params], 1)
    start, count = x, 1
    level, grad = evaluate(x)
    first = level
    worth = _WORTH * math.sqrt(x.shape[1] / 2)
    idle = torch.zeros_like(level)
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(max_steps):
        direction = -_inverse(grad, pairs)
        slope = (direction * grad).sum(1)
        is_uphill = ~(slope < 0)
        direction = torch.where(is_uphill[:, None], -grad, direction)
        slope = torch.where(is_uphill, -grad.square().sum(1), slope)
        # the first direction has no scale: a step of unit length at most
        length = torch.ones_like(level) if pairs else 1 / direction.norm(dim=1).clamp_min(1.0)
        is_active, moved = idle < _PATIENCE, x
        new_level, new_grad = level, grad
        pending = is_active
        for _ in range(_BACKTRACKS):
            trial = torch.where(pending[:, None], x + length[:, None] * direction, moved)
            found, slopes = evaluate(trial)
            count += 1
            is_good = pending & (found <= level + _ARMIJO * length * slope) & slopes.isfinite().all(1)
            moved = torch.where(is_good[:, None], trial, moved)
            new_level, new_grad = torch.where(is_good, found, new_level), torch.where(is_good[:, None], slopes, new_grad)
            pending = pending & ~is_good
            length = torch.where(pending, 0.25 * length, length)
            if not bool(pending.any()):
                break
        idle = torch.where(level - new_level < worth, idle + 1, torch.zeros_like(idle))
        pairs = _remember(pairs, moved - x, new_grad - grad)
        x, level, grad = moved, new_level, new_grad
        if not bool((idle < _PATIENCE).any()):
            break
    return leaves(torch.where((first - level > worth)[:, None], x, start)), count


def _remember(pairs: list[tuple[Tensor, Tensor, Tensor]], step: Tensor, change: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The last pairs; 1 / s.y is 0, so that a pair has no effect, where the curvature is not positive."""
    product = (step * change).sum(1)
    is_curved = product > 1e-12 * step.norm(dim=1) * change.norm(dim=1)
    inverse = torch.where(is_curved, 1 / torch.where(is_curved, product, 1.0), 0.0)
    return [*pairs[1 - _PAIRS :], (step, change, inverse)]


def _inverse(grad: Tensor, pairs: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """B grad, by the two-loop recursion, for each chain."""
    q, alphas = grad, []
    scale = torch.ones_like(grad[:, :1])
    for _, change, inverse in pairs:  # the newest pair that counts sets the scale
        is_used = (inverse > 0)[:, None]
        ratio = 1 / (inverse[:, None] * change.square().sum(1, keepdim=True)).clamp_min(1e-300)
        scale = torch.where(is_used, ratio, scale)
    for step, change, inverse in reversed(pairs):
        alpha = (inverse * (step * q).sum(1))[:, None]
        alphas.append(alpha)
        q = q - alpha * change
    q = scale * q
    for (step, change, inverse), alpha in zip(pairs, reversed(alphas), strict=True):
        q = q + step * (alpha - (inverse * (change * q).sum(1))[:, None])
    return q
