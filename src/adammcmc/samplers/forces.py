"""The arithmetic of gradients, where it may be faster than that of the losses.

A leapfrog step with any function f of the position in the place of the gradient is reversible and keeps volume. If the energies
of the test are those of the target, the chain is exact: f affects its efficiency, not what it samples. So gradients may be
computed in bfloat16 while the losses that decide are computed in float32. f must be a function, though: the same weights must
give the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

__all__ = ["Forces", "arithmetic", "checked_forces"]

Forces = Literal["float32", "tf32", "bfloat16"]
"""float32: as the model computes. tf32: products of matrices on a GPU in 10 bits. bfloat16: under torch.autocast."""


def checked_forces(name: str | None) -> Forces:
    """The name, if it is one; None is float32."""
    for known in get_args(Forces):
        if name in (known, None):
            return "float32" if name is None else known
    raise ValueError(f"`forces` must be one of {', '.join(get_args(Forces))}, or None, got {name!r}.")


@contextmanager
def arithmetic(forces: Forces, device: torch.device) -> Iterator[None]:
    """Gradients inside are computed in this way."""
    if forces == "bfloat16":
        # nothing is kept from one evaluation to the next: the weights change
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            yield
        return
    if forces == "float32" or device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
