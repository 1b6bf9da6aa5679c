"""What a faster way to compute a kernel's proposal must offer. The decision stays `kernel.settle`'s."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from adammcmc.kernels.proposal import InPlace, Move
from adammcmc.target.leaves import Leaves, Setting
from adammcmc.target.potential import Evaluation
from adammcmc.target.randomness import Randomness

__all__ = ["Backend", "UnderdampedBackend"]


class _Settled(Protocol):
    """What the chains need of any backend."""

    folds_prior: bool
    """Whether it adds a quadratic prior itself, to the gradient and to U."""
    copy: Leaves | None
    """Where it keeps the current point, if proposals overwrite it; None if they do not."""

    def upload(self, kernel: Any, scale: Setting, precision: list[float] | None) -> None:
        """Take over the present settings, before a step: the kernel's, lambda * n, and the precision of a folded prior."""

    def key(self) -> Hashable | None:
        """What is compiled into a CUDA graph, besides settings that are read at each replay; None: it cannot be captured."""

    def reserve(self) -> None:
        """Allocate what a CUDA graph must not allocate itself, before its capture."""

    def resolve(self) -> Any:
        """Complete a graph that was just captured; what is returned must live as long as the graph."""

    def products(self, grad: Leaves, *, at_copy: bool) -> Tensor:
        """theta . grad V of each leaf, (chains, leaves), at the copy of theta or where the chains stand."""


class Backend(_Settled, Protocol):
    """Algorithm 1's first half: from the gradient to the proposal. Implemented in `backends/`."""

    def ahead(self, generator: Randomness) -> AbstractContextManager[None]:
        """A context around the whole step, for work that can be done while the loss is evaluated."""

    def propose(
        self, kernel: Any, params: Leaves, here: Evaluation, memory: Any, generator: Randomness, frozen_at: Tensor
    ) -> tuple[Move, Any]:
        """The proposal and the kernel's new memory."""


class UnderdampedBackend(_Settled, Protocol):
    """The refresh and the first half of a leapfrog step. Implemented in `backends/`."""

    momentum: Leaves
    """p, overwritten by every step."""

    def depart(self, here: Evaluation, generator: Randomness) -> Departure:
        """Refresh, half a kick, drift."""


class Departure(InPlace, Protocol):
    """A leapfrog step on its way. `keep` also settles the momentum: p2 where accepted, -p where rejected."""

    move: Move

    def arrive(self, there: Evaluation) -> Tensor:
        """The second half kick: log q ratio, (chains,), float64."""
