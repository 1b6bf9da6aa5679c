"""How the parameters of a model lie in the leaves that a kernel computes on (`Packing`), and which of them do (`Layout`).

Small parameters that share their hyper-parameters lie end to end in one flat leaf, so that a step costs a few operations, not
a few for each tensor. A large one is a leaf of its own, which saves a copy. The model's parameters stay where they are: values
are copied in and out, never re-pointed. In a live packing there are no copies: each leaf is a parameter's own memory, for
backends that move the weights in place.

Rows that are held (`padding_idx` of an embedding) are in no leaf: a kernel neither moves nor counts them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from adammcmc.target.leaves import Leaves, same

__all__ = ["HeldRows", "Layout", "Packing", "RowsToHold", "padding_rows"]

_LARGE = 1 << 15

HeldRows = dict[int, tuple[int, ...]]
"""By the number of a parameter, its rows that stay as they are."""


class RowsToHold(Exception):
    """The modules called by a closure have padding rows that the layout does not hold: the step must be repeated."""


class Packing:
    """A layout of parameters in leaves of one chain.

    Args:
        params: the parameters.
        labels: small parameters with equal labels (and dtype) share a leaf; None gives even a small one a leaf of its own.
        held: by the index of a parameter, rows that stay as they are.
        live: each leaf is the memory of one parameter (contiguous, without held rows).
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        labels: Sequence[Hashable | None],
        held: Mapping[int, Sequence[int]] | None = None,
        *,
        live: bool = False,
    ) -> None:
        self.params = list(params)
        self.is_live = live
        self.held = {i: tuple(sorted(rows)) for i, rows in (held or {}).items() if rows}
        """By the index of a parameter, its rows that are not sampled."""
        self.free = {i: _others(params[i], rows) for i, rows in self.held.items()}
        """By the index of such a parameter, its other rows."""
        self.shapes = [
            torch.Size((len(self.free[i]), *p.shape[1:])) if i in self.free else p.shape for i, p in enumerate(self.params)
        ]
        """Of what is sampled of each parameter."""
        self._places = _places(params)
        flat = [not live and label is not None and p.numel() < _LARGE for p, label in zip(params, labels, strict=True)]
        keys = [(label, p.dtype) if f else (i,) for i, (p, label, f) in enumerate(zip(params, labels, flat, strict=True))]
        self.members = [[i for i, key in enumerate(keys) if key == leaf] for leaf in dict.fromkeys(keys)]
        """For each leaf the indices of its parameters."""
        self._flat = [flat[members[0]] for members in self.members]
        self._views: dict[int, tuple[Leaves, list[Tensor]]] = {}
        self.zero = torch.zeros(1, dtype=torch.float64, device=params[0].device)
        """The log density of a flat prior."""
        self.last_grads: Sequence[Tensor] = ()
        """What autograd returned last; released just before the next call, so that its memory is still mapped."""

    def fits(self, params: Sequence[Parameter]) -> bool:
        """Whether this is the layout of these parameters, in their present dtype and place."""
        return same(self.params, params) and self._places == _places(params)

    @property
    def sizes(self) -> list[int]:
        """How many numbers of each parameter are sampled."""
        return [shape.numel() for shape in self.shapes]

    @functools.cached_property
    def current(self) -> Leaves:
        """Memory for the current point, allocated once."""
        return self._known(tuple(p.detach()[None] for p in self.params) if self.is_live else self.new())

    @functools.cached_property
    def proposed(self) -> Leaves:
        """Memory for a second point, allocated on first use."""
        return self._known(self.new())

    def new(self) -> Leaves:
        """Zeros in this layout."""
        leaves = []
        for members, flat in zip(self.members, self._flat, strict=True):
            p = self.params[members[0]].detach()
            shape = (sum(self.shapes[i].numel() for i in members),) if flat else self.shapes[members[0]]
            leaves.append(torch.zeros((1, *shape), dtype=p.dtype, device=p.device))
        return tuple(leaves)

    def _known(self, leaves: Leaves) -> Leaves:
        """Leaves for use at every step: memory that a step allocates and frees is paid for page by page."""
        self._views[id(leaves)] = (leaves, self._cut(leaves))
        return leaves

    def views(self, leaves: Leaves) -> list[Tensor]:
        """The parts of the leaves that belong to each parameter, in the parameters' order and shapes (no copy).

        Of a parameter with held rows, the others.
        """
        known = self._views.get(id(leaves))
        return known[1] if known is not None and known[0] is leaves else self._cut(leaves)

    def _cut(self, leaves: Leaves) -> list[Tensor]:
        parts: dict[int, Tensor] = {}
        for leaf, members in zip(leaves, self.members, strict=True):
            shapes = [self.shapes[i] for i in members]
            pieces = torch.split_with_sizes(leaf[0].reshape(-1), [shape.numel() for shape in shapes])
            parts.update({i: piece.view(shape) for i, piece, shape in zip(members, pieces, shapes, strict=True)})
        return [parts[i] for i in range(len(self.params))]

    def pack(self, tensors: Sequence[Tensor], into: Leaves) -> Leaves:
        """Copy values in the parameters' shapes into leaves, which are returned."""
        if not (self.is_live and into is self.current):
            torch._foreach_copy_(self.views(into), self.sampled(tensors))
        return into

    def sampled(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Values in the parameters' shapes without those in held rows (which they may lack already)."""
        kept = list(tensors)
        for i, rows in self.free.items():
            if kept[i].shape == self.params[i].shape:
                kept[i] = kept[i].detach()[rows]
        return kept

    def whole(self, leaves: Leaves, fill: float | None = None) -> list[Tensor]:
        """As `views`, in the parameters' whole shapes: held rows have the parameters' own values, or `fill` (a copy)."""
        views = self.views(leaves)
        if not self.free:
            return views
        views = list(views)
        for i, rows in self.free.items():
            base = self.params[i].detach().to(views[i].dtype)
            base = base.clone() if fill is None else torch.full_like(base, fill)
            views[i] = base.index_copy_(0, rows, views[i])
        return views

    def join(self, tensors: Sequence[Tensor]) -> Leaves:
        """Values in the parameters' shapes as leaves; the large ones are not copied."""
        tensors = self.sampled(tensors)
        return tuple(
            torch.cat([tensors[i].reshape(-1) for i in members])[None] if flat else tensors[members[0]].contiguous()[None]
            for members, flat in zip(self.members, self._flat, strict=True)
        )

    def write(self, leaves: Leaves) -> None:
        """Copy the leaves' values into the parameters themselves, in place."""
        if self.is_live and leaves is self.current:
            return
        with torch.no_grad():
            torch._foreach_copy_(tuple(self.params), self.whole(leaves))


class Layout:
    """Which parameters are sampled, and how they are packed: made again whenever they have changed.

    Args:
        groups: the optimizer's parameter groups, in which parameters come, go and move.
        label: of a parameter and its group; parameters with equal labels share a leaf.
        is_live: whether each leaf shall be a parameter's own memory (`Packing`).
        on_new: called after the packing was replaced, with whether it holds the parameters of the last one, if there was one.
        held: by the number of a parameter, rows that stay as they are.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        label: Callable[[Parameter, int], Hashable | None],
        is_live: Callable[[], bool],
        on_new: Callable[[bool], None],
        held: HeldRows,
    ) -> None:
        self._groups, self._label, self._is_live, self._on_new = groups, label, is_live, on_new
        self.current: Packing | None = None
        """The last packing, whether or not it still fits."""
        self._before: list[Parameter] = []
        """The parameters of the last packing."""
        self._owners: list[int] = []
        self._is_settled = False
        self.allows_live = True
        self.held = held
        self._checked: tuple[float, ...] = ()

    @property
    def all(self) -> list[Parameter]:
        """All parameters."""
        return [p for group in self._groups for p in group["params"]]

    @property
    def trainable(self) -> list[Parameter]:
        """Those that are sampled."""
        return [p for p in self.all if p.requires_grad]

    def packing(self) -> Packing:
        """The trainable parameters in leaves."""
        if self._is_settled and self.current is not None:
            return self.current
        params, is_live = self.trainable, self.allows_live and self._is_live()
        if not params:
            raise ValueError("no parameter requires a gradient: there is nothing to sample.")
        old, before = self.current, self._before
        if old is not None and old.is_live == is_live and old.fits(params):
            return old
        owners = {p: i for i, group in enumerate(self._groups) for p in group["params"]}
        numbers = {p: i for i, p in enumerate(self.all)}
        held = {i: self.held[numbers[p]] for i, p in enumerate(params) if numbers[p] in self.held}
        new = self.current = Packing(params, [self._label(p, owners[p]) for p in params], held, live=is_live)
        self._owners = [owners[params[members[0]]] for members in new.members]
        self._checked, self._before = (), params
        self._on_new(not before or same(before, params))
        return new

    def drop(self) -> None:
        """Make the packing again at the next use."""
        self.current, self._checked = None, ()

    def hold(self, rows: Mapping[int, frozenset[int]]) -> None:
        """Hold these rows of parameters, given by their identity."""
        found = {i: tuple(sorted(rows[id(p)])) for i, p in enumerate(self.all) if id(p) in rows}
        if self.held | found != self.held:
            self.held |= found
            self.drop()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Nobody touches the parameters inside: they need not be examined again and again."""
        self.packing()
        before, self._is_settled = self._is_settled, True
        try:
            yield
        finally:
            self._is_settled = before

    def options(self, key: str) -> list[Any]:
        """A hyper-parameter of each leaf."""
        return [self._groups[i][key] for i in self._owners]

    def name(self, index: int) -> str:
        """Of a trainable parameter, for messages."""
        p = self.trainable[index]
        for group in self._groups:
            for other, name in zip(group["params"], group.get("param_names", []), strict=False):
                if other is p:
                    return f"parameter '{name}'"
        return f"parameter {index}"

    def check_noise(self, sigmas: list[float], noise_name: str) -> None:
        """Refuse noise below the spacing of the weights' own numbers, where it would be rounded away.

        Reads the weights (and waits for the device) at the first step and whenever a sigma shrank, not at every step.
        """
        if self._checked and all(s >= c for s, c in zip(sigmas, self._checked, strict=True)):
            return
        packing = self.packing()
        for sigma, members in zip(sigmas, packing.members, strict=True):
            for i in members:
                p = packing.params[i].detach()
                largest = float(p.abs().max()) if p.numel() else 0.0
                if sigma == 0 or largest == 0 or not math.isfinite(largest):
                    continue
                ulp = torch.finfo(p.dtype).eps * 2.0 ** math.floor(math.log2(largest))
                if sigma < ulp:
                    raise ValueError(
                        f"`{noise_name}` = {sigma:.3g} is below the spacing {ulp:.3g} of {p.dtype} numbers near the "
                        f"largest weight {largest:.3g} of {self.name(i)}: the noise would be lost in rounding. Keep the "
                        f"weights in float32 (and use bfloat16 autocast in the closure), or raise {noise_name}."
                    )
        self._checked = tuple(sigmas)


def padding_rows(modules: Iterable[nn.Module]) -> dict[int, frozenset[int]]:
    """By the identity of a weight, the rows that are padding (`padding_idx` of `nn.Embedding` and `nn.EmbeddingBag`).

    Their gradient is zero by construction, and training leaves them as they are; but their values enter the loss, so
    that sampling them would change the function. A weight that another kind of layer uses as well (weights tied to an
    output layer) has no such rows: that layer trains them.
    """
    owners: dict[int, list[frozenset[int]]] = {}
    for module in dict.fromkeys(modules):
        index = module.padding_idx if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None
        for p in module._parameters.values():
            if p is not None:
                owners.setdefault(id(p), []).append(frozenset() if index is None else frozenset([index % len(p)]))
    common = {key: frozenset.intersection(*rows) for key, rows in owners.items()}
    return {key: rows for key, rows in common.items() if rows}


def _others(p: Tensor, rows: Sequence[int]) -> Tensor:
    free = torch.ones(len(p), dtype=torch.bool)
    free[list(rows)] = False
    return free.nonzero().flatten().to(p.device)


def _places(params: Sequence[Parameter]) -> list[tuple[Any, ...]]:
    """Changes when storage is exchanged under a parameter (`p.data = ...`, `model.cpu().cuda()`)."""
    return [(p.data_ptr(), p.stride(), p.dtype, p.device) for p in params]
