"""The same proposal in place, in memory that is taken once, its noise drawn while the loss is evaluated.

On the CPU the noise is half of what a step adds to an Adam step and a forward; a free core draws it ahead of time. Elsewhere
(and for what is not covered here) the pure kernel runs. The numbers are the pure kernel's, bit for bit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adammcmc.kernels import AdamMCMCKernel
from adammcmc.kernels.direction import Adam, AdamMemory
from adammcmc.kernels.kernel import ChainState, Info
from adammcmc.kernels.proposal import Move, draw_along
from adammcmc.target.leaves import Leaves, blocks, spread
from adammcmc.target.randomness import Randomness
from adammcmc.target.target import Evaluation, Potential

__all__ = ["InPlaceAdamMCMC", "Settings", "Workspace", "read_row"]

_WORTH_A_HELPER = 1 << 16  # parameters; below, asking a thread costs more than drawing


class Settings(NamedTuple):
    """The numbers of a step in one pass (`onepass`, `compiled`), one for each parameter tensor where a list is."""

    sigma_along: float
    lr: Sequence[float]
    betas: Sequence[tuple[float, float]]
    eps: Sequence[float]
    sigma: Sequence[float]
    precision: Sequence[float]
    """Of a Gaussian prior; 0 where it is flat."""


def read_row(row: Tensor, flags: Tensor) -> Info:
    """What a step in one pass reported, (11, 1) and (2, 1), as an `Info` of one chain."""
    fields = list(row.unbind())
    fields[5], fields[6] = flags.view(torch.bool).unbind()
    return Info(*fields)


class Workspace:
    """Memory that lives as long as the sampler: for the proposal, its noise, and the blocks that are computed on.

    Memory that a step takes and gives back goes to the operating system, and is paid for again page by page.

    Args:
        memory: two sets of leaves of one chain, for the current and the proposed point.
    """

    def __init__(self, memory: tuple[Leaves, Leaves]) -> None:
        self.memory = memory
        leaves = memory[0]
        self.is_usable = all(
            x.device.type == "cpu" and x.shape[0] == 1 and x.dtype in (torch.float32, torch.float64) for x in leaves
        )
        self._drawing: Future[Tensor] | None = None
        self._is_large = self.is_usable and sum(x.numel() for x in leaves) >= _WORTH_A_HELPER
        if not self.is_usable:
            return
        self._noise = tuple(torch.empty_like(x) for x in leaves)
        size = max(s.stop - s.start for x in leaves for s in blocks(x.numel()))
        self.dtypes = {x.dtype for x in leaves}
        self._update = {dtype: torch.empty(1, size, dtype=dtype) for dtype in self.dtypes}
        self._wide = [torch.empty(size, dtype=torch.float64) for _ in range(2)]

    @contextmanager
    def draw_ahead(self, generator: torch.Generator) -> Iterator[None]:
        """Draw the noise of this step on another core, if one is free. Nobody else may touch the generator meanwhile."""
        is_shared = generator is torch.default_generator  # by whatever the user's loss draws
        if self._is_large and not is_shared and _num_cores() > torch.get_num_threads():
            self._drawing = _helper().submit(self._draw, generator)
        try:
            yield
        finally:
            self.wait()

    def wait(self) -> None:
        """Make sure that nothing is being drawn."""
        if self._drawing is not None:
            self._drawing.result()
            self._drawing = None

    def noise(self, generator: torch.Generator) -> tuple[Tensor, Leaves]:
        """z and eps of this step."""
        along = self._draw(generator) if self._drawing is None else self._drawing.result()
        self._drawing = None
        return along, self._noise

    def _draw(self, generator: torch.Generator) -> Tensor:
        along = draw_along(self._noise, generator)
        for leaf in self._noise:
            leaf.normal_(generator=generator)
        return along

    def update(self, like: Tensor) -> Tensor:
        """A block of the shape (1, n) and dtype of `like`."""
        return self._update[like.dtype][:, : like.shape[1]]

    def inner(self, u: Tensor, noise: Tensor) -> tuple[float, float]:
        """|u|^2 and u.noise of one block, as `leaves.inner` computes them, without taking memory."""
        a, b = (wide[: u.shape[1]].copy_(x[0]) for wide, x in zip(self._wide, (u, noise), strict=True))
        return torch.dot(a, a).item(), torch.dot(a, b).item()


@dataclass(frozen=True)
class InPlaceAdamMCMC(AdamMCMCKernel):
    """`AdamMCMCKernel` that overwrites the moments it is given, and writes its proposal into the workspace."""

    workspace: Workspace | None = None

    def step(self, state: ChainState, potential: Potential, generator: Randomness) -> tuple[ChainState, Info]:
        if self.workspace is None or not isinstance(generator, torch.Generator):
            return super().step(state, potential, generator)
        with self.workspace.draw_ahead(generator):
            return super().step(state, potential, generator)

    def propose(self, params: Leaves, here: Evaluation, memory: Any, generator: Randomness) -> tuple[Move, Any]:
        adam, work, grad = self.direction, self.workspace, here.grad
        if work is None or not work.is_usable or not isinstance(adam, Adam) or not isinstance(generator, torch.Generator):
            return super().propose(params, here, memory, generator)
        assert grad is not None
        along, noise = work.noise(generator)
        if not all(math.isfinite(x.sum()) for x in (*grad, here.losses, here.log_prior)):
            return super().propose(params, here, memory, generator)  # the chain will freeze: its moments must stay clean
        n = len(params)
        sigmas = spread(self.proposal.sigma, n)
        options = zip(spread(adam.lr, n), spread(adam.betas, n), spread(adam.eps, n), strict=True)
        proposed = work.memory[1]
        step = tuple(k + 1 for k in memory.step)
        coefficient = self.proposal.sigma_along * along - 1
        coefficients = {dtype: coefficient.to(dtype) for dtype in work.dtypes}
        total, a, cross = 0.0, 0.0, 0.0  # numbers of one chain: float64, as the pure kernel's tensors
        for *leaves, k, sigma, (lr, (beta1, beta2), eps) in zip(
            params, grad, memory.exp_avg, memory.exp_avg_sq, noise, proposed, step, sigmas, options, strict=True
        ):
            rows = [leaf.view(1, -1) for leaf in leaves]
            cuts = blocks(rows[0].shape[1])
            root = (1 - beta2**k) ** 0.5
            square, product = 0.0, 0.0
            for s in cuts:
                p, g, m1, m2, e, tau = rows if len(cuts) == 1 else [row[:, s] for row in rows]
                u = work.update(p)
                m1.lerp_(g, 1 - beta1)
                m2.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                torch.sqrt(m2, out=u).add_(eps * root)
                torch.div(m1, u, out=u).mul_(lr * root / (1 - beta1**k))
                torch.add(p, e, alpha=sigma, out=tau).addcmul_(u, coefficients[u.dtype])
                uu, ue = work.inner(u, e)
                square, product = square + uu, product + ue
            total += square
            if sigma > 0:
                a, cross = a + square / sigma**2, cross + product / sigma
        ratio = self.proposal.combine(a, cross, along.item())
        squares, log_q_ratio = torch.full_like(along, total), torch.full_like(along, ratio)
        move = Move(proposed, (), (), along, (squares,), log_q_ratio, torch.full_like(along, a).sqrt_())
        return move, AdamMemory(memory.exp_avg, memory.exp_avg_sq, step)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_helpers: dict[int, ThreadPoolExecutor] = {}


def _helper() -> ThreadPoolExecutor:
    """One thread for each process (threads do not survive a fork)."""
    pid = os.getpid()
    if pid not in _helpers:
        _helpers[pid] = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adammcmc-noise")
    return _helpers[pid]
