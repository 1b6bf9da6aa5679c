"""Fingerprints that tell one data set from another: stored with a run, and compared when it is resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.data import Subset, TensorDataset

from adammcmc.target.batches import Batch

__all__ = ["digest", "fingerprint", "held_arrays", "select_rows"]

_MOST_BYTES = 1 << 30  # of one tensor: more would take seconds to read


def fingerprint(num_data: int, sample: Batch) -> str:
    """Hexadecimal digits from the length of the data set, its structure, and the values of a sample of examples."""
    mark = _mix(0xCBF29CE484222325, [num_data])
    for path, leaf in _pytree.tree_flatten_with_path(sample)[0]:  # a path is the same in tuples and lists
        if isinstance(leaf, Tensor):
            words = f"{_pytree.keystr(path)} {leaf.dtype} {tuple(leaf.shape[1:])}"
            mark = _mix(mark, [*words.encode(), _checksum(leaf)])
    return f"{mark:016x}"


def _mix(mark: int, numbers: Sequence[int]) -> int:
    """Fowler, Noll and Vo's hash, 64 bits."""
    for number in numbers:
        mark = ((mark ^ (number % 2**64)) * 0x100000001B3) % 2**64
    return mark


def _checksum(x: Tensor) -> int:
    """Of the bytes, computed on the tensor's device."""
    if x.numel() == 0:
        return 0
    data = x.detach().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
    weights = torch.arange(1, data.numel() + 1, device=x.device).mul_(2_654_435_761).remainder_(2**31 - 1)
    return int((data * weights).sum())


def digest(kind: str, leaves: Sequence[Any]) -> str | None:
    """A digest of every value of the tensors and arrays up to 1 GiB; None if there are none. `kind` labels it."""
    leaves = [x for x in leaves if x.nbytes <= _MOST_BYTES]
    if not leaves:
        return None
    found = hashlib.blake2b(digest_size=8)
    for x in leaves:
        some = max(1, (1 << 24) // max(1, x.nbytes // max(1, len(x))))
        found.update(f"{tuple(x.shape)} {select_rows(x, slice(0, 0)).dtype} ".encode())
        for first in range(0, len(x), some):
            rows = select_rows(x, slice(first, first + some)).cpu().contiguous()
            found.update(cast(Any, rows.reshape(-1).view(torch.uint8).numpy()))
    return f"{kind}: {found.hexdigest()}"


def held_arrays(dataset: Any) -> list[Any]:
    """The per-example arrays that a data set holds in memory under the usual names; for a subset, its rows of them."""
    if isinstance(dataset, TensorDataset):
        return list(dataset.tensors)
    if isinstance(dataset, Subset):
        rows = torch.as_tensor(dataset.indices)
        return [select_rows(x, rows) for x in held_arrays(dataset.dataset) if x.nbytes <= _MOST_BYTES]
    found: list[Any] = []
    for name in ("data", "targets", "labels"):
        x = getattr(dataset, name, None)
        if isinstance(x, list) and x and all(isinstance(value, int | float) for value in x):
            x = np.asarray(x)
        if isinstance(x, Tensor | np.ndarray) and x.dtype != object and x.ndim > 0 and len(x) == len(dataset):
            found.append(x)
    return found


def select_rows(x: Any, indices: slice | Tensor) -> Tensor:
    """Some rows of a tensor or array, as a tensor."""
    if isinstance(x, Tensor):
        return x[indices] if isinstance(indices, slice) else x.index_select(0, indices.to(x.device))
    rows = x[indices] if isinstance(indices, slice) else x[indices.cpu().numpy()]
    rows = np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("="))  # a file may have another byte order
    return torch.from_numpy(rows if rows.flags.writeable else rows.copy())  # torch requires writable memory
