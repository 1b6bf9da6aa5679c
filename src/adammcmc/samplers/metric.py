r"""Learning the metric A of a kernel with a velocity, from the gradients and positions of chains in burn-in.

    diagonal    A = 1 / (E g^2 + q) with a prior's precision q;   without a prior  sqrt(Var x / Var g)
    dense       A = the matrix with A (Cov g) A = Cov x: the geometric mean of Cov x and (Cov g)^-1
    kron        L, R: eigenvectors of E[G G'] and E[G' G] of each weight matrix G = dU/dW;  D^2 = 1 / (E (L'GR)^2 + q)

From 10,000 weights on, a diagonal is learnt from the gradients of batches instead (`samplers.batch_metric`).

g = grad U. Covariances are those within a chain: where U is quadratic, g = H x and A = H^-1 wherever the chains are and however
little they have mixed. Few steps must not mislead: a dense A is learnt in the units of the last one, so that each window
corrects what the shrinkage of the one before has left; and E g^2 is shrunk towards its geometric mean m,
(n E g^2 + 5 m) / (n + 5), with n the number of draws that count as independent (one in ten, at most). Chains are pooled by
their median where there are three or more, so that one in a bad place does not spoil the metric of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from adammcmc.kernels.scaling import Block, Dense, Kronecker, Scaling, turned
from adammcmc.target.leaves import Leaves, Setting, by_chain

__all__ = ["Kind", "MetricSums", "largest_dense"]

Kind = Literal["diagonal", "dense", "kron"]

largest_dense = 200
"""Numbers of a chain up to which a density gets a dense metric by default."""

_PRIOR_DRAWS = 5.0
_APART = 10  # steps between two gradients that count as independent
_KEPT = 128  # gradients for a Kronecker basis
_MEMORY = 1 << 29  # bytes for them
_LARGEST_BASIS = 1024  # rows or columns that are turned


class MetricSums:
    """Sums over the steps of one window.

    Args:
        kind: what is learnt.
        precision: of the prior, in the shapes of the leaves (...); None where it has none.
        shapes: for each leaf the shapes of the parameters in it, for `kron`.
    """

    def __init__(self, kind: Kind, precision: Leaves | None, shapes: Sequence[Sequence[torch.Size]]) -> None:
        self.kind, self._precision, self._shapes = kind, precision, shapes
        self.count = 0
        self._sums: dict[str, list[Tensor]] = {}
        self._first: dict[str, list[Tensor]] = {}
        self._kept: list[list[Tensor]] = []
        self._stride = 1

    def add(self, grad: Leaves, scale: Setting, params: Leaves | None) -> None:
        """A step's gradient of V, U = scale V, and where it was taken; leaves (chains, ...)."""
        wide = [(g.double() * by_chain(scale, g.double())).reshape(len(g), -1) for g in grad]
        wide = [torch.where(g.isfinite(), g, 0.0) for g in wide]
        self.count += 1
        if self.kind == "dense":
            (g,) = self._from_first("g", [torch.cat(wide, 1)])
            self._add("g", [g])
            self._add("gg", [g[:, :, None] * g[:, None, :]])
        elif self.kind == "kron" and self.count % self._stride == 0:
            self._keep([g.to(like.dtype) for g, like in zip(wide, grad, strict=True)])
        if self.kind != "dense":
            self._add("g2", [g.square() for g in wide])
        if params is not None and self._precision is None:
            flat = [x.double().reshape(len(x), -1) for x in params]
            if self.kind == "dense":
                (x,) = self._from_first("x", [torch.cat(flat, 1)])
                self._add("x", [x])
                self._add("xx", [x[:, :, None] * x[:, None, :]])
            else:
                flat, wide = self._from_first("x", flat), self._from_first("g", wide)
                self._add("x", flat)
                self._add("x2", [x.square() for x in flat])
                self._add("g", wide)
                self._add("gg", [g.square() for g in wide])

    def _from_first(self, name: str, values: list[Tensor]) -> list[Tensor]:
        """Differences from the first of the window: sums of squares of large numbers would lose what is small."""
        first = self._first.setdefault(name, values)
        return [value - start for value, start in zip(values, first, strict=True)]

    def _add(self, name: str, values: list[Tensor]) -> None:
        if name not in self._sums:
            self._sums[name] = [v.clone() for v in values]
        else:
            torch._foreach_add_(self._sums[name], values)

    def _keep(self, gradients: list[Tensor]) -> None:
        """One gradient in so many; when there is no more room every second one is dropped."""
        self._kept.append([g.clone() for g in gradients])
        size = sum(g.numel() * g.element_size() for g in gradients)
        if len(self._kept) > max(8, min(_KEPT, _MEMORY // max(1, size))):
            self._kept, self._stride = self._kept[1::2], 2 * self._stride

    def learn(self, last: Leaves | Scaling | None = None) -> Leaves | Scaling | None:
        """A of this window; None if it cannot be learnt from it. `last`: the A it replaces."""
        if self.count < 2:
            return None
        if self.kind == "dense":
            return self._dense(last)
        if self.kind == "kron":
            return self._kronecker()
        return tuple(a.view(shape) for a, shape in zip(self._diagonal(), self._leaf_shapes, strict=True))

    @property
    def _leaf_shapes(self) -> list[torch.Size]:
        """(a leaf of one parameter has its shape, one of several is flat)"""
        flat = [torch.Size((sum(shape.numel() for shape in row),)) for row in self._shapes]
        return [row[0] if len(row) == 1 else one for row, one in zip(self._shapes, flat, strict=True)]

    @property
    def _independent(self) -> float:
        chains = next(iter(self._sums.values()))[0].shape[0]
        return max(1.0, self.count / _APART) * chains

    def _pooled(self, values: Tensor) -> Tensor:
        return values.mean(0) if values.shape[0] < 3 else values.median(0).values

    def _shrunk(self, squares: Tensor) -> Tensor:
        positive = squares[squares > 0]
        middle = positive.log().mean().exp() if positive.numel() else torch.ones((), dtype=squares.dtype)
        n = self._independent
        return (n * squares + _PRIOR_DRAWS * middle) / (n + _PRIOR_DRAWS)

    def _diagonal(self) -> list[Tensor]:
        if self._precision is not None or "x" not in self._sums or self._independent < 20:
            squares = [self._shrunk(self._pooled(s / self.count)) for s in self._sums["g2"]]
            if self._precision is None:
                return [1 / s.clamp_min(1e-300) for s in squares]
            return [1 / (s + q.flatten()) for s, q in zip(squares, self._precision, strict=True)]

        def within(first: Tensor, second: Tensor) -> Tensor:
            return self._shrunk(self._pooled(second / self.count - (first / self.count).square()).clamp_min(0.0))

        names = ("x", "x2", "g", "gg")
        rows = zip(*(self._sums[name] for name in names), strict=True)
        return [(within(x, x2) / within(g, gg).clamp_min(1e-300)).sqrt() for x, x2, g, gg in rows]

    def _dense(self, last: Leaves | Scaling | None) -> Scaling | None:
        def within(first: str, second: str) -> Tensor:
            mean = self._sums[first][0] / self.count
            return self._sums[second][0] / self.count - mean[:, :, None] * mean[:, None, :]

        spread, forces = within("x", "xx"), within("g", "gg")
        # a chain that is far away, or does not move, must not count for more than the others: chains are pooled in units
        # of their own forces
        weights = 1 / forces.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-300)
        weights = (weights / weights.median()).clamp_max(1.0)
        weights = (weights / weights.sum())[:, None, None]
        root = _as_matrix(last, spread.shape[1]).to(spread)
        inverse = torch.linalg.inv(root)
        spread, forces = inverse @ (weights * spread).sum(0) @ inverse.T, root.T @ (weights * forces).sum(0) @ root
        dim = spread.shape[0]
        # the error of a covariance is relative, direction by direction: with many more draws than numbers little is shrunk
        keep = 1 / (1 + ((_PRIOR_DRAWS + dim) / self._independent) ** 2)
        spread, forces = (keep * c + (1 - keep) * c.diagonal().diag() for c in (spread, forces))
        try:
            return Dense(root @ _root_of_mean(spread, forces), self._leaf_shapes)
        except (RuntimeError, ValueError):  # not positive definite: chains that have hardly moved
            return None

    def _kronecker(self) -> Scaling | None:
        if not self._kept:
            return None
        n = len(self._kept) * self._kept[0][0].shape[0]
        rows: list[list[Block]] = []
        for leaf, shapes in enumerate(self._shapes):
            gradients = torch.stack([kept[leaf] for kept in self._kept]).flatten(0, 1)  # (draws, numbers)
            precision = None if self._precision is None else self._precision[leaf].flatten()
            sizes = [shape.numel() for shape in shapes]
            row, at = [], 0
            for shape, size in zip(shapes, sizes, strict=True):
                q = torch.zeros(size, device=gradients.device) if precision is None else precision[at : at + size]
                row.append(_block(gradients[:, at : at + size], shape, q, n))
                at += size
            rows.append(row)
        return Kronecker(rows)

    def state_dict(self) -> dict[str, Any]:
        """The sums, as numbers, lists and tensors."""
        return {"count": self.count, "sums": self._sums, "first": self._first, "kept": self._kept, "stride": self._stride}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved sums."""
        self.count, self._sums, self._first = state["count"], state["sums"], state["first"]
        self._kept, self._stride = state["kept"], state["stride"]


def _as_matrix(metric: Leaves | Scaling | None, dim: int) -> Tensor:
    """S of a metric; of one that is not dense, the identity."""
    if isinstance(metric, Dense):
        return metric.factor.double()
    if isinstance(metric, tuple):
        return torch.cat([a.double().flatten() for a in metric]).sqrt().diag()
    return torch.eye(dim, dtype=torch.float64)


def _root_of_mean(spread: Tensor, forces: Tensor) -> Tensor:
    """S with S S' = A, where A forces A = spread: A = K (K' forces K)^-1/2 K' with spread = K K'."""
    lower = torch.linalg.cholesky(spread)
    values, vectors = torch.linalg.eigh(lower.T @ forces @ lower)
    root: Tensor = lower @ (vectors * values.clamp_min(1e-300).pow(-0.25)) @ vectors.T
    return root


def _block(gradients: Tensor, shape: torch.Size, precision: Tensor, n: int) -> Block:
    """The scaling of one parameter: turned if it is a matrix (a convolution counts as one), else a diagonal."""
    if len(shape) < 2:
        squares = gradients.double().square().mean(0)
        return Block((_shrink(squares, n) + precision).rsqrt().to(gradients.dtype))
    rows, columns = shape[0], shape[1:].numel()
    g = gradients.view(-1, rows, columns)
    left = torch.linalg.eigh(torch.einsum("dij,dkj->ik", g, g).double())[1] if 1 < rows <= _LARGEST_BASIS else None
    right = torch.linalg.eigh(torch.einsum("dij,dik->jk", g, g).double())[1] if 1 < columns <= _LARGEST_BASIS else None
    left, right = (None if b is None else b.to(g.dtype) for b in (left, right))
    squares = turned(g.reshape(len(g), -1), (rows, columns), left, right).double().square().mean(0)
    # one precision for a parameter is that of every direction of it
    root = (_shrink(squares, n) + precision.mean()).rsqrt().to(g.dtype)
    return Block(root, left, right)


def _shrink(squares: Tensor, n: int) -> Tensor:
    positive = squares[squares > 0]
    middle = positive.log().mean().exp() if positive.numel() else torch.ones((), dtype=squares.dtype)
    return (n * squares + _PRIOR_DRAWS * middle) / (n + _PRIOR_DRAWS)
