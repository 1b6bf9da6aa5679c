"""The parameters of an optimizer's groups, in the leaves that a kernel computes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from adammcmc.samplers.packing import Packing
from adammcmc.target.leaves import same

__all__ = ["Layout", "plain"]


class Layout:
    """Which parameters are sampled, and how they are packed: made again whenever they have changed.

    Args:
        groups: the optimizer's parameter groups, in which parameters come, go and move.
        label: of a parameter and its group; parameters with equal labels share a leaf.
        is_live: whether each leaf shall be a parameter's own memory (`Packing`).
        on_new: called after the packing was replaced, with whether it holds the parameters of the last one, if there was one.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        label: Callable[[Parameter, int], Hashable | None],
        is_live: Callable[[], bool],
        on_new: Callable[[bool], None],
    ) -> None:
        self._groups, self._label, self._is_live, self._on_new = groups, label, is_live, on_new
        self._packing: Packing | None = None
        self._before: list[Parameter] = []
        """The parameters of the last packing."""
        self._owners: list[int] = []
        self._is_settled = False
        self.allows_live = True
        self.held: dict[int, tuple[int, ...]] = {}
        """By the number of a parameter, rows that stay as they are."""
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
        if self._is_settled and self._packing is not None:
            return self._packing
        params, is_live = self.trainable, self.allows_live and self._is_live()
        if not params:
            raise ValueError("no parameter requires a gradient: there is nothing to sample.")
        old, before = self._packing, self._before
        if old is None or old.is_live != is_live or not old.fits(params):
            owners = {p: i for i, group in enumerate(self._groups) for p in group["params"]}
            by_identity = {id(p): self.held[i] for i, p in enumerate(self.all) if i in self.held}
            held = {i: by_identity[id(p)] for i, p in enumerate(params) if id(p) in by_identity}
            labels = [self._label(p, owners[p]) for p in params]
            self._packing = Packing(params, labels, held, live=is_live)
            self._owners = [owners[params[members[0]]] for members in self._packing.members]
            self._checked = ()
            self._before = params
            self._on_new(not before or same(before, params))
        assert self._packing is not None
        return self._packing

    @property
    def current(self) -> Packing | None:
        """The last packing, whether or not it still fits."""
        return self._packing

    def drop(self) -> None:
        """Make the packing again at the next use."""
        self._packing, self._checked = None, ()

    def hold(self, rows: Mapping[int, frozenset[int]]) -> bool:
        """Hold these rows of parameters, given by their identity. Returns whether that is new."""
        found = {i: tuple(sorted(rows[id(p)])) for i, p in enumerate(self.all) if id(p) in rows}
        is_new = self.held | found != self.held
        self.held |= found
        if is_new:
            self.drop()
        return is_new

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


def plain(value: Any) -> Any:
    """A setting as a number: torch's schedulers write into tensors, whose identity means nothing."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else tuple(value.tolist())
    return tuple(value) if isinstance(value, list) else value
