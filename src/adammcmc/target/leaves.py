"""Parameters as a tuple of tensors ("leaves"), each with the chains along its first axis.

Every kernel computes on leaves: a network is one chain (axis of length 1), a density may be thousands.
Reductions over all parameters are accumulated in float64, one number for each chain.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

from adammcmc.target.randomness import Randomness, Streams, normal
from adammcmc.target.sums import sums

__all__ = [
    "Leaves",
    "PerLeaf",
    "Setting",
    "Settings",
    "blocks",
    "by_chain",
    "flatten",
    "inner",
    "is_finite",
    "leaf_names",
    "per_chain",
    "same",
    "select",
    "spread",
    "spread_settings",
    "standard_normal",
    "unflatten",
    "widen",
]

Leaves = tuple[Tensor, ...]

_BLOCK = 1 << 19
_T = TypeVar("_T")
PerLeaf: TypeAlias = _T | list[_T]
"""One value for all leaves, or a list with one value for each leaf."""
Setting: TypeAlias = float | Tensor
"""A number for all chains, or a tensor with one for each: (chains,), float64."""
Settings: TypeAlias = Setting | list[float] | list[Setting]
"""A setting for all leaves, or a list with one for each leaf."""


def flatten(tree: Any) -> tuple[Leaves, Any]:
    """The tensors of a pytree (nested tuples, lists, dicts) and the structure that puts them together again.

    A tuple of tensors is its own leaves, and is returned as the same object.
    """
    if type(tree) is tuple and all(isinstance(x, Tensor) for x in tree):
        return tree, None
    leaves, structure = _pytree.tree_flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"parameters must be tensors or nested containers of tensors, found {type(leaf).__name__}.")
    return tuple(leaves), structure


def unflatten(leaves: Leaves, structure: Any) -> Any:
    """The pytree of this structure with these tensors."""
    if structure is None:
        return leaves
    return _pytree.tree_unflatten(list(leaves), structure)


def leaf_names(tree: Any) -> list[str]:
    """The name of each leaf: its keys joined by dots; `x` for a single tensor.

    Example:
        >>> leaf_names({"mu": torch.zeros(2), "more": (torch.zeros(2), torch.zeros(2))}), leaf_names(torch.zeros(2))
        (['mu', 'more.0', 'more.1'], ['x'])
    """
    paths = (path for path, _ in _pytree.tree_flatten_with_path(tree)[0])
    return [".".join(_pytree.keystr((key,)).strip("[].'\"") for key in path) or "x" for path in paths]


def spread(value: PerLeaf[_T], num_leaves: int) -> list[_T]:
    """The value for each leaf: a list is taken as it is, anything else is repeated."""
    if not isinstance(value, list):
        return [value] * num_leaves
    if len(value) != num_leaves:
        raise ValueError(f"one value per leaf is needed: got {len(value)} values for {num_leaves} leaves.")
    return value


def spread_settings(value: Settings, num_leaves: int) -> list[Setting]:
    """The setting of each leaf, as `spread` has it."""
    return spread(list(value) if isinstance(value, list) else value, num_leaves)


def per_chain(value: Tensor, leaf: Tensor) -> Tensor:
    """`value`, of shape (chains,), shaped to multiply or mask a leaf of shape (chains, ...)."""
    return value.reshape(-1, *([1] * (leaf.dim() - 1)))


def by_chain(value: Setting, leaf: Tensor) -> Setting:
    """A setting that can multiply a leaf: a number as it is, one for each chain in the leaf's dtype and number of axes."""
    return per_chain(value, leaf).to(leaf.dtype) if isinstance(value, Tensor) and value.dim() == 1 else value


def blocks(length: int) -> list[slice]:
    """A row of numbers cut into blocks, to bound what is held at once; the last one takes what is too short for its own.

    Blocks are multiples of 16 long, so that torch draws the same normal numbers block by block as in one go.
    """
    cuts = list(range(0, max(length - 15, 1), _BLOCK))
    return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], length], strict=True)]


def inner(a: Tensor, b: Tensor) -> Tensor:
    """The dot product of two leaves for each chain, (chains,), in float64 (block by block, to spare memory)."""
    a, b = a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)
    if a.is_cuda:  # products in their own dtype, sums in float64: a third of the memory traffic, rounding of 6e-8 each
        return sums.over_parameters((a * b).sum(1, dtype=torch.float64))
    return sums.over_parameters(functools.reduce(torch.add, [_dot(a[:, s], b[:, s]) for s in blocks(a.shape[1])]))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[0] > 1:
        return (a.double() * b.double()).sum(1)
    wide = _wide(a[0], 0)
    return torch.dot(wide, wide if b is a else _wide(b[0], 1))[None]


_scratch = threading.local()


def _wide(x: Tensor, which: int) -> Tensor:
    """A block in float64, in memory that is reused: what is allocated and freed is paid for page by page."""
    if x.dtype == torch.float64 or x.device.type != "cpu":
        return x.double()
    buffers = _scratch.__dict__.setdefault("buffers", {})
    if which not in buffers or len(buffers[which]) < len(x):
        buffers[which] = torch.empty(len(x), dtype=torch.float64)
    out: Tensor = buffers[which][: len(x)]
    return out.copy_(x)


def is_finite(x: Tensor) -> Tensor:
    """`torch.isfinite` in two operations instead of five: only a finite number minus itself is zero."""
    return (x - x) == 0


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def select(mask: Tensor, yes: Leaves, no: Leaves) -> Leaves:
    """For each chain `yes` where `mask`, else `no`; the leaves are returned as they are when all chains agree.

    On the CPU, reading the mask costs nothing and saves a pass over memory; on an accelerator it would stall the device,
    which makes the choice itself.
    """
    if mask.device.type == "cpu":
        if bool(mask.all()):
            return yes
        if not bool(mask.any()):
            return no
    return tuple(torch.where(per_chain(mask, y), y, n) for y, n in zip(yes, no, strict=True))


def standard_normal(like: Sequence[Tensor], generator: Randomness) -> Leaves:
    """Independent N(0, 1) numbers in the shapes of `like`: every kernel's noise on its weights is drawn here."""
    if isinstance(generator, Streams):
        return generator.normals(like)
    return tuple(normal(x.shape, x.dtype, x.device, generator) for x in like)


def widen(x: Tensor) -> Tensor:
    """The tensor in a dtype fit for arithmetic: float32 in place of bfloat16 and float16."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
