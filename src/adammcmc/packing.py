"""How the parameters of a model lie in the leaves that a kernel computes on.

Small parameters that share their hyper-parameters lie end to end in one flat leaf, so that a step costs a few operations, not
a few for each tensor; a large one is a leaf of its own, and saves a copy. The model's parameters stay where they are: values
are copied in and out, never re-pointed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from adammcmc.leaves import Leaves, same

__all__ = ["Packing"]

_LARGE = 1 << 15


class Packing:
    """A layout of parameters in leaves of one chain.

    Args:
        params: the parameters.
        labels: small parameters with equal labels (and dtype) share a leaf; None gives even a small one a leaf of its own.
    """

    def __init__(self, params: Sequence[Parameter], labels: Sequence[Hashable | None]) -> None:
        self.params = list(params)
        self._places = _places(params)
        flat = [label is not None and p.numel() < _LARGE for p, label in zip(params, labels, strict=True)]
        keys = [(label, p.dtype) if f else (i,) for i, (p, label, f) in enumerate(zip(params, labels, flat, strict=True))]
        self.members = [[i for i, key in enumerate(keys) if key == leaf] for leaf in dict.fromkeys(keys)]
        """For each leaf the indices of its parameters."""
        self._flat = [flat[members[0]] for members in self.members]
        self._views: dict[int, tuple[Leaves, list[Tensor]]] = {}
        self._memory: list[Leaves | None] = [None, None]
        self.zero = torch.zeros(1, dtype=torch.float64, device=params[0].device)
        """The log density of a flat prior."""
        self.last_grads: Sequence[Tensor] = ()
        """What autograd returned last; let go just before it is asked again, so that it finds its memory still mapped."""

    def fits(self, params: Sequence[Parameter]) -> bool:
        """Whether this is the layout of these parameters, in their present dtype and place."""
        # storage may be exchanged under a parameter (`p.data = ...`, `model.cpu().cuda()`): what knows its address must know
        return (
            same(self.params, params)
            and self._places == _places(params)
            and all(
                p.dtype == view.dtype and p.device == view.device
                for p, view in zip(params, self.views(self.current), strict=True)
            )
        )

    @property
    def current(self) -> Leaves:
        """Memory for the current point, taken once."""
        return self._lasting(0)

    @property
    def proposed(self) -> Leaves:
        """Memory for the proposed point, taken when it is first asked for."""
        return self._lasting(1)

    def new(self) -> Leaves:
        """Zeros in this layout."""
        leaves = []
        for members, flat in zip(self.members, self._flat, strict=True):
            p = self.params[members[0]].detach()
            size = sum(self.params[i].numel() for i in members)
            leaves.append(torch.zeros((1, size) if flat else (1, *p.shape), dtype=p.dtype, device=p.device))
        return tuple(leaves)

    def _lasting(self, which: int) -> Leaves:
        """Leaves for use at every step: memory that a step took and gave back would be paid for page by page."""
        if (leaves := self._memory[which]) is None:
            leaves = self._memory[which] = self.new()
            self._views[id(leaves)] = (leaves, self._cut(leaves))
        return leaves

    def views(self, leaves: Leaves) -> list[Tensor]:
        """The parts of the leaves that belong to each parameter, in the parameters' order and shapes (no copy)."""
        known = self._views.get(id(leaves))
        return known[1] if known is not None and known[0] is leaves else self._cut(leaves)

    def _cut(self, leaves: Leaves) -> list[Tensor]:
        parts: dict[int, Tensor] = {}
        for leaf, members in zip(leaves, self.members, strict=True):
            shapes = [self.params[i].shape for i in members]
            pieces = torch.split_with_sizes(leaf[0].reshape(-1), [shape.numel() for shape in shapes])
            parts.update({i: piece.view(shape) for i, piece, shape in zip(members, pieces, shapes, strict=True)})
        return [parts[i] for i in range(len(self.params))]

    def pack(self, tensors: Sequence[Tensor], into: Leaves) -> Leaves:
        """Copy values in the parameters' shapes into leaves, which are returned."""
        torch._foreach_copy_(self.views(into), list(tensors))
        return into

    def join(self, tensors: Sequence[Tensor]) -> Leaves:
        """Values in the parameters' shapes as leaves; the large ones are not copied."""
        return tuple(
            torch.cat([tensors[i].reshape(-1) for i in members])[None] if flat else tensors[members[0]].contiguous()[None]
            for members, flat in zip(self.members, self._flat, strict=True)
        )

    def write(self, leaves: Leaves) -> None:
        """Copy the leaves' values into the parameters themselves, in place."""
        with torch.no_grad():
            torch._foreach_copy_(tuple(self.params), self.views(leaves))


def _places(params: Sequence[Parameter]) -> list[tuple[int, tuple[int, ...]]]:
    return [(p.data_ptr(), p.stride()) for p in params]
