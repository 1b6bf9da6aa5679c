"""Batches: tensors in tuples, lists and dictionaries, each with one row per example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

__all__ = ["Batch", "Parts", "describe_batch", "joined_batches", "num_rows", "part_of", "regrouped", "to_device"]

Batch = Any
"""A tensor, or tensors in tuples, lists and dictionaries, each with one row per example."""


class Parts(tuple[Batch, ...]):
    """A batch in parts, one after another, which are evaluated in turn: all its rows at once would need too much memory."""

    @property
    def weights(self) -> list[float]:
        """Of each part in the mean over all rows, times the number of parts."""
        rows = [num_rows(part) for part in self]
        return [len(rows) * number / sum(rows) for number in rows]


_pytree.register_pytree_node(
    Parts, lambda parts: (list(parts), None), lambda parts, _: Parts(parts), serialized_type_name="adammcmc.Parts"
)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on this device."""
    return _pytree.tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), batch)


def num_rows(batch: Batch) -> int:
    """The number of examples in a batch."""
    for leaf in _pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return len(leaf)
    raise ValueError(f"a batch must hold tensors with one row for each example, got {type(batch).__name__}.")


def describe_batch(batch: Batch) -> str:
    """Shapes and dtypes, for messages."""
    words = _pytree.tree_map_only(Tensor, lambda x: f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}", batch)
    return str(words).replace("'", "")


def part_of(batch: Batch, rows: slice) -> Batch:
    """Some examples of a batch. A container whose tensors do not have one row per example defines `part(rows)`."""
    if isinstance(batch, Tensor):
        return batch[rows] if batch.dim() > 0 else batch
    if hasattr(batch, "part"):
        return batch.part(rows)
    if isinstance(batch, Mapping):
        return {key: part_of(value, rows) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return _like(batch, [part_of(value, rows) for value in batch])
    return batch


def joined_batches(batches: list[Batch]) -> Batch:
    """Several batches as one: tensors are concatenated, and so are lists of other things, such as names."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(batches)
    if isinstance(first, Mapping):
        return {key: joined_batches([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple | list):
        if not any(isinstance(leaf, Tensor) for leaf in _pytree.tree_leaves(first)):
            return [item for batch in batches for item in batch]
        return _like(first, [joined_batches(list(column)) for column in zip(*batches, strict=True)])
    return first


def regrouped(batches: Iterator[Batch], size: int) -> Iterator[Batch]:
    """Batches joined until they have `size` rows."""
    waiting: list[Batch] = []
    count = 0
    for batch in batches:
        waiting.append(batch)
        count += num_rows(batch)
        if count >= size:
            yield joined_batches(waiting)
            waiting, count = [], 0
    if waiting:
        yield joined_batches(waiting)


def _like(container: Any, parts: list[Any]) -> Any:
    return type(container)(*parts) if hasattr(container, "_fields") else type(container)(parts)
