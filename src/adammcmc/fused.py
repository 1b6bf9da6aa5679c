"""The same proposal in place, block by block, in memory that is taken once: on the CPU half of the cost is then the noise.

 Elsewhere (and for what it does not cover) the pure kernel runs.
The numbers are the pure kernel's, bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adammcmc.direction import Adam, AdamMemory
from adammcmc.kernels import AdamMCMCKernel
from adammcmc.leaves import Leaves, blocks, spread
from adammcmc.proposal import Move, draw_along

__all__ = ["InPlaceAdamMCMC", "Workspace"]


class Workspace:
    """Memory that lives as long as the sampler: for the proposal, and for the blocks it is made in.

    Memory that a step takes and gives back goes to the operating system, and is paid for again page by page.
    """

    def __init__(self, memory: tuple[Leaves, Leaves]) -> None:
        self.memory = memory
        dtypes = {x.dtype for x in memory[0]}
        size = max((s.stop - s.start for x in memory[0] for s in blocks(x[0].numel())), default=0)
        self._blocks = {t: [torch.empty(1, size, dtype=t) for _ in range(2)] for t in dtypes}
        self._wide = [torch.empty(size, dtype=torch.float64) for _ in range(2)]

    def proposed(self, current: Leaves) -> Leaves:
        """The leaves that are not the current ones."""
        return self.memory[0] if current is not self.memory[0] else self.memory[1]

    def blocks(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Two blocks of the shape (1, n) and dtype of `like`."""
        first, second = self._blocks[like.dtype]
        return first[:, : like.shape[1]], second[:, : like.shape[1]]

    def inner(self, u: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """|u|^2 and u.noise of one block, as `leaves.inner` computes them, without taking memory."""
        a, b = (wide[: u.shape[1]].copy_(x[0]) for wide, x in zip(self._wide, (u, noise), strict=True))
        return torch.dot(a, a)[None], torch.dot(a, b)[None]


@dataclass(frozen=True)
class InPlaceAdamMCMC(AdamMCMCKernel):
    """`AdamMCMCKernel` that overwrites the moments it is given, and writes its proposal into the workspace."""

    workspace: Workspace | None = None

    def propose(self, params: Leaves, grad: Leaves, memory: Any, generator: torch.Generator) -> tuple[Move, Any]:
        adam, work = self.direction, self.workspace
        if work is None or not isinstance(adam, Adam) or not _can_go_in_place(params, grad, memory):
            return super().propose(params, grad, memory, generator)
        n = len(params)
        sigmas = spread(self.proposal.sigma, n)
        options = zip(spread(adam.lr, n), spread(adam.betas, n), spread(adam.eps, n), strict=True)
        along = draw_along(params, generator)
        proposed = work.proposed(params)
        step = tuple(k + 1 for k in memory.step)
        squares, crosses = [], []
        for *rows, k, sigma, (lr, (beta1, beta2), eps) in zip(
            params, grad, memory.exp_avg, memory.exp_avg_sq, proposed, step, sigmas, options, strict=True
        ):
            coefficient = (self.proposal.sigma_along * along - 1).to(rows[0].dtype)
            rows = [row.view(1, -1) for row in rows]
            cuts = blocks(rows[0].shape[1])
            sums = []
            for s in cuts:
                p, g, m1, m2, tau = rows if len(cuts) == 1 else [row[:, s] for row in rows]
                u, noise = work.blocks(p)
                m1.lerp_(g, 1 - beta1)
                m2.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                torch.sqrt(m2, out=u).div_((1 - beta2**k) ** 0.5).add_(eps)
                torch.div(m1, u, out=u).mul_(lr / (1 - beta1**k))
                torch.add(p, noise.normal_(generator=generator), alpha=sigma, out=tau).addcmul_(u, coefficient)
                sums.append(work.inner(u, noise))
            squares.append(_total([square for square, _ in sums]))
            crosses.append(_total([cross for _, cross in sums]))
        move = Move(proposed, (), (), along, tuple(squares), tuple(crosses))
        return move, AdamMemory(memory.exp_avg, memory.exp_avg_sq, step)


def _can_go_in_place(params: Leaves, grad: Leaves, memory: AdamMemory) -> bool:
    """One chain on the CPU in single or double precision, and a finite gradient (a NaN must not reach the moments)."""
    plain = all(
        x.device.type == "cpu" and x.shape[0] == 1 and x.dtype in (torch.float32, torch.float64) and x.is_contiguous()
        for leaves in (params, grad, memory.exp_avg, memory.exp_avg_sq)
        for x in leaves
    )
    return plain and all(math.isfinite(g.sum()) for g in grad)


def _total(sums: list[Tensor]) -> Tensor:
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
