"""Algorithm 1's proposal on the CPU in memory that is allocated once, with its noise drawn while the loss is evaluated.

Drawing noise is half of what a step adds to an Adam step and a forward; an idle core draws it ahead of time. Memory that a
step allocates and frees goes back to the operating system, and is paid for again page by page. The arithmetic is that of
`kernels.direction` and `kernels.proposal`, and the numbers are the same to the last bit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from adammcmc.kernels.proposal import Move, draw_along
from adammcmc.target.leaves import Leaves, Setting
from adammcmc.target.potential import Evaluation
from adammcmc.target.randomness import Randomness

__all__ = ["Workspace"]

_WORTH_A_HELPER = 1 << 16  # parameters; below, handing work to a thread costs more than drawing


class Workspace:
    """Memory for the proposals of one chain (`kernels.backend.Backend`).

    Args:
        proposed: leaves (1, ...) for the proposed point, float32 or float64, on the CPU.
    """

    folds_prior = False
    copy: Leaves | None = None

    def __init__(self, proposed: Leaves) -> None:
        self._proposed = proposed
        self._update = tuple(torch.empty_like(x) for x in proposed)
        self._noise = tuple(torch.empty_like(x) for x in proposed)
        self._drawing: Future[Tensor] | None = None
        self._is_large = sum(x.numel() for x in proposed) >= _WORTH_A_HELPER

    @staticmethod
    def fits(leaves: Leaves) -> bool:
        """Whether a workspace can serve these leaves."""
        return all(x.device.type == "cpu" and x.shape[0] == 1 and x.dtype in (torch.float32, torch.float64) for x in leaves)

    def upload(self, kernel: Any, scale: Setting, precision: list[float] | None) -> None:
        """Nothing to do: the settings are read from the kernel."""

    def key(self) -> None:
        """There are no graphs on the CPU."""

    def reserve(self) -> None:
        """There are no graphs on the CPU."""

    def resolve(self) -> None:
        """There are no graphs on the CPU."""

    def products(self, grad: Leaves, *, at_copy: bool) -> Tensor:
        """Not used: the current point stays where it is."""
        raise NotImplementedError

    @contextmanager
    def ahead(self, generator: Randomness) -> Iterator[None]:
        """Draw the noise of this step on another core, if one is idle. Nothing else may use the generator meanwhile."""
        is_shared = generator is torch.default_generator  # whose numbers the user's loss may draw
        if self._is_large and not is_shared and _num_cores() > torch.get_num_threads():
            self._drawing = _helper().submit(self._draw, generator)
        try:
            yield
        finally:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being drawn."""
        if self._drawing is not None:
            self._drawing.result()
            self._drawing = None

    def propose(
        self, kernel: Any, params: Leaves, here: Evaluation, memory: Any, generator: Randomness, frozen_at: Tensor
    ) -> tuple[Move, Any]:
        """The proposal, written into the workspace; the moments are overwritten."""
        assert here.grad is not None
        along = self._draw(generator) if self._drawing is None else self._drawing.result()
        self._drawing = None
        # a chain that is about to freeze must keep clean moments
        is_sound = all(math.isfinite(x.sum()) for x in (*here.grad, here.losses, here.log_prior))
        update, memory = kernel.direction(here.grad, memory, params, out=self._update if is_sound else None)
        return kernel.proposal.propose(params, update, generator, noise=(along, self._noise), out=self._proposed), memory

    def _draw(self, generator: Any) -> Tensor:
        along = draw_along(self._noise, generator)
        for leaf in self._noise:
            leaf.normal_(generator=generator)
        return along


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_helpers: dict[int, ThreadPoolExecutor] = {}


def _helper() -> ThreadPoolExecutor:
    """One thread for each process (threads do not survive a fork)."""
    pid = os.getpid()
    if pid not in _helpers:
        _helpers[pid] = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adammcmc-noise")
    return _helpers[pid]
