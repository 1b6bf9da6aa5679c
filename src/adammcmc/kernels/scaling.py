r"""The metric of a kernel with a velocity: A = S S', fixed while sampling. Weights move by S p, forces enter as S' g.

    kick:   p <- p - h S' g(theta)          drift:   theta <- theta + h S p          (p ~ N(0, I) at rest)

Any invertible S leaves the target invariant, since the map theta = S x is linear and fixed. A diagonal S is kept as its
square, a tuple of tensors (the `preconditioner` of the kernels); the others are classes with the two products.

    `Dense`        S S' = A, a matrix over all numbers of a chain: for a few hundred of them at most
    `Kronecker`    S p = L (D * p) R' for each weight matrix: its rows and columns are turned into the bases L and R in which
                   the gradients of that layer vary independently (the eigenvectors of E[G G'] and E[G' G]), and scaled there
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adammcmc.kernels.proposal import deviations
from adammcmc.target.leaves import Leaves, Settings, by_chain, spread_settings, widen

__all__ = ["Block", "Dense", "Kronecker", "Scaling", "forces", "moves", "restored", "stored", "turned"]


class Scaling(ABC):
    """S, as a linear map of leaves (chains, ...), which all have the shapes and dtypes it was made for."""

    @abstractmethod
    def forward(self, momentum: Leaves) -> Leaves:
        """S p, of a momentum."""

    @abstractmethod
    def transposed(self, grad: Leaves) -> Leaves:
        """S' g, of a gradient."""

    @abstractmethod
    def fits(self, shapes: Sequence[torch.Size]) -> bool:
        """Whether it is a map of leaves of these shapes, (...), without the chain axis."""

    @abstractmethod
    def mean(self) -> float:
        """The mean of the diagonal of A."""

    @abstractmethod
    def smallest(self) -> list[float]:
        """The least A^1/2 of each leaf: how short a move can become."""


def forces(step_size: Settings, scaling: Leaves | Scaling | None, grad: Leaves) -> Leaves:
    """h S' g; `scaling` as a tuple of tensors is the diagonal of A."""
    wide = tuple(widen(g) for g in grad)
    return _times(step_size, scaling, wide if not isinstance(scaling, Scaling) else scaling.transposed(wide))


def moves(step_size: Settings, scaling: Leaves | Scaling | None, momentum: Leaves) -> Leaves:
    """h S p"""
    return _times(step_size, scaling, momentum if not isinstance(scaling, Scaling) else scaling.forward(momentum))


def _times(step_size: Settings, scaling: Leaves | Scaling | None, leaves: Leaves) -> Leaves:
    if isinstance(scaling, Scaling):
        sizes = [by_chain(h, x) for h, x in zip(spread_settings(step_size, len(leaves)), leaves, strict=True)]
    else:
        sizes = list(deviations(step_size, scaling, leaves))
    return tuple(x * h for x, h in zip(leaves, sizes, strict=True))


class Dense(Scaling):
    """S as one matrix over all numbers of a chain.

    Args:
        factor: S, (dim, dim), the numbers of all leaves end to end. Invertible.
        shapes: of the leaves, without the chain axis.
    """

    def __init__(self, factor: Tensor, shapes: Sequence[torch.Size]) -> None:
        self.factor, self.shapes = factor, [torch.Size(shape) for shape in shapes]
        if factor.shape != (self.dim, self.dim) or not bool(factor.isfinite().all()):
            raise ValueError(f"`factor` must be a finite matrix {(self.dim, self.dim)}, got shape {tuple(factor.shape)}.")

    @property
    def dim(self) -> int:
        """Numbers of a chain."""
        return sum(shape.numel() for shape in self.shapes)

    def _times(self, matrix: Tensor, leaves: Leaves) -> Leaves:
        flat = torch.cat([x.flatten(1) if x.dim() > 1 else x[:, None] for x in leaves], 1)
        parts = (flat @ matrix.to(flat.dtype)).split_with_sizes([shape.numel() for shape in self.shapes], 1)
        return tuple(part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True))

    def forward(self, momentum: Leaves) -> Leaves:
        return self._times(self.factor.T, momentum)

    def transposed(self, grad: Leaves) -> Leaves:
        return self._times(self.factor, grad)

    def fits(self, shapes: Sequence[torch.Size]) -> bool:
        return list(shapes) == self.shapes

    def mean(self) -> float:
        return float(self.factor.square().sum(1).mean())

    def smallest(self) -> list[float]:
        rows = self.factor.square().sum(1).sqrt().split_with_sizes([shape.numel() for shape in self.shapes])
        return [float(row.min()) for row in rows]


class Block(NamedTuple):
    """Numbers of a leaf that are scaled together: those of one parameter."""

    root: Tensor
    """D, (rows, columns), or (numbers,) where nothing is turned. Positive."""
    left: Tensor | None = None
    """L, (rows, rows), orthogonal; None is the identity."""
    right: Tensor | None = None
    """R, (columns, columns), likewise."""

    def forward(self, x: Tensor) -> Tensor:
        """L (D * x) R', x (chains, numbers)."""
        scaled = x.view(-1, *self.root.shape) * self.root
        if self.left is not None:
            scaled = self.left @ scaled
        if self.right is not None:
            scaled = scaled @ self.right.T
        return scaled.reshape(x.shape)

    def transposed(self, x: Tensor) -> Tensor:
        """D * (L' x R)"""
        return (turned(x, self.root.shape, self.left, self.right) * self.root).reshape(x.shape)


def turned(x: Tensor, shape: Sequence[int], left: Tensor | None, right: Tensor | None) -> Tensor:
    """L' x R, (chains, rows, columns), of x (chains, numbers)."""
    x = x.reshape(-1, *shape)
    if left is not None:
        x = left.T @ x
    return x if right is None else x @ right


class Kronecker(Scaling):
    """S as a turn and a diagonal for each parameter.

    Args:
        blocks: for each leaf the blocks of its numbers, in their order.
    """

    def __init__(self, blocks: Sequence[Sequence[Block]]) -> None:
        self.blocks = [list(row) for row in blocks]

    def _each(self, leaves: Leaves, how: str) -> Leaves:
        made = []
        for leaf, row in zip(leaves, self.blocks, strict=True):
            # a momentum may be kept in float64: that of stacked chains, from the approach
            flat = leaf.reshape(leaf.shape[0], -1).to(row[0].root.dtype)
            parts = flat.split_with_sizes([block.root.numel() for block in row], 1)
            done = [getattr(block, how)(part) for block, part in zip(row, parts, strict=True)]
            made.append((done[0] if len(done) == 1 else torch.cat(done, 1)).reshape(leaf.shape))
        return tuple(made)

    def forward(self, momentum: Leaves) -> Leaves:
        return self._each(momentum, "forward")

    def transposed(self, grad: Leaves) -> Leaves:
        return self._each(grad, "transposed")

    def fits(self, shapes: Sequence[torch.Size]) -> bool:
        return [shape.numel() for shape in shapes] == [sum(block.root.numel() for block in row) for row in self.blocks]

    def mean(self) -> float:  # of the diagonal in the turned bases: a turn keeps the trace
        roots = [block.root for row in self.blocks for block in row]
        return sum(float(r.double().square().sum()) for r in roots) / sum(r.numel() for r in roots)

    def smallest(self) -> list[float]:
        return [min(float(block.root.min()) for block in row) for row in self.blocks]


def stored(metric: Leaves | Scaling | None) -> dict[str, Any] | None:
    """A metric as tensors, lists and words, for a checkpoint."""
    if isinstance(metric, Dense):
        return {"kind": "dense", "factor": metric.factor, "shapes": [list(shape) for shape in metric.shapes]}
    if isinstance(metric, Kronecker):
        return {"kind": "kron", "blocks": [[list(block) for block in row] for row in metric.blocks]}
    return None if metric is None else {"kind": "diagonal", "leaves": list(metric)}  # type: ignore[arg-type]


def restored(state: dict[str, Any] | None) -> Leaves | Scaling | None:
    """The metric that was stored."""
    if state is None:
        return None
    if state["kind"] == "dense":
        return Dense(state["factor"], [torch.Size(shape) for shape in state["shapes"]])
    if state["kind"] == "kron":
        return Kronecker([[Block(*block) for block in row] for row in state["blocks"]])
    return tuple(state["leaves"])
