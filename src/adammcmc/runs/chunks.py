"""How many examples are evaluated at a time where a step uses all of them.

The memory that a backward pass needs grows with the number of examples. It is measured on a few of them, from the tensors
that autograd saves, so that the result is the same on machines with the same memory, most of it free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from adammcmc.posterior.store.archives import free_memory
from adammcmc.samplers.modules import is_batch_norm
from adammcmc.target.batches import Batch, Parts, part_of, to_device
from adammcmc.target.data import Data
from adammcmc.target.likelihood import Loss

__all__ = ["in_parts", "is_mean", "rows_at_once"]

_FEW = 256  # examples that are tried
_MOST = 8 << 30  # bytes; more at a time is not faster
_SHARE = 0.2  # of the memory
_TOLERANCE = 0.01  # of the mean loss, by which losses in reduced precision may differ


def rows_at_once(model: nn.Module, loss: Loss, data: Data, device: torch.device, num_chains: int) -> int | None:
    """How many examples' gradients fit in a fair share of the memory; None if all do, or if they must not be divided."""
    n = data.num_data
    if n <= 2 * _FEW or any(is_batch_norm(m) and m.training for m in model.modules()):  # whose statistics are of a batch
        return None
    try:
        few, more = (_saved_bytes(model, loss, to_device(data.fetch(slice(rows)), device)) for rows in (_FEW, 2 * _FEW))
    except Exception:  # the loss is tried out next, with an error that describes the batch
        return None
    each = max(1, more - few) * num_chains / _FEW
    most = min(_MOST, int(_SHARE * _memory(device)))
    if each * n <= most:
        return None
    number = -(-int(each * n) // most)  # of parts, about equally large
    return max(_FEW, -(-n // number))


def in_parts(data: Data, size: int, device: torch.device, generator: torch.Generator | None = None) -> Parts:
    """All examples, `size` at a time; on the device if they fill at most a fair share of its memory.

    With a generator they are cut at random, into two parts or more of about this size.
    """
    n = data.num_data
    rows: list[slice | Tensor] = [slice(i, min(i + size, n)) for i in range(0, n, size)]
    if generator is not None:
        rows = list(torch.randperm(n, generator=generator).tensor_split(max(2, round(n / size))))
    parts: list[Batch] = [data.fetch(some) for some in rows]
    held = sum(x.nbytes for x in torch.utils._pytree.tree_leaves(parts) if isinstance(x, Tensor))
    if held > 2 * _SHARE * _memory(device):
        return Parts(parts)
    return Parts([to_device(part, device) for part in parts])


def is_mean(model: nn.Module, loss: Loss, data: Data, device: torch.device) -> bool:
    """Whether the loss of some rows is the mean over their halves; only then do parts of the data have the same target.

    A loss that draws random numbers cannot be compared, and fixed data refuse it later.
    """
    rows = min(2 * _FEW, data.num_data) // 2 * 2
    batch = to_device(data.fetch(slice(rows)), device)

    def value(cut: slice) -> float:
        return float(loss(model, part_of(batch, cut)).double().mean())

    with _undisturbed(model), torch.no_grad():
        try:
            whole, again = value(slice(rows)), value(slice(rows))
            halves = (value(slice(rows // 2)) + value(slice(rows // 2, rows))) / 2
        except Exception:  # the loss is tried out next, with an error that describes the batch
            return True
    return whole != again or abs(whole - halves) <= _TOLERANCE * max(abs(whole), abs(halves))


def _memory(device: torch.device) -> int:
    """Bytes in all, or twice what is free where much of it is taken, or a container has less."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(total, 2 * free)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
    available = free_memory()
    return total if available is None else min(total, 2 * available)


def _saved_bytes(model: nn.Module, loss: Loss, batch: Batch) -> int:
    """Of the tensors that autograd keeps for the gradient of this batch's loss."""
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # alive, so that no address is used twice

    def count(x: Tensor) -> Tensor:
        if x.data_ptr() not in storages:
            kept.append(x)
            storages[x.data_ptr()] = x.nbytes
        return x

    with _undisturbed(model), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        loss(model, batch)
    return sum(storages.values())


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Buffers and random numbers are afterwards as before."""
    buffers = [(b, b.detach().clone()) for b in model.buffers() if b.is_contiguous()]
    devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
