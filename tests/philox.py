"""The counter-based noise again, in plain integers: a slow oracle for the kernels of `adammcmc.backends.onepass`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def philox(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32-10 (Salmon et al. 2011): four 32-bit numbers."""
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(bits: int) -> float:
    return (bits + 0.5) * 2.0**-32


def wide_uniform(low: int, high: int) -> float:
    return ((high * 2**32 + low) / 4096 + 0.5) * 2.0**-52


def normals(key: int, base: int, size: int, draw: int = 0) -> Tensor:
    """N(0, 1) numbers of a tensor of this size whose groups of four are counted from `base`; float64."""
    values: list[float] = []
    for group in range(-(-size // 4)):
        a, b, c, d = philox(key, (base + group, 0, 0, draw))
        for first, second in ((a, b), (c, d)):
            radius, angle = math.sqrt(-2 * math.log(uniform(first))), 2 * math.pi * (uniform(second) - 0.5)
            values += [radius * math.cos(angle), radius * math.sin(angle)]
    return torch.tensor(values[:size], dtype=torch.float64)


def along_and_uniform(key: int) -> tuple[float, float]:
    """z, and the log of the uniform number that decides."""
    a, b, c, d = philox(key, (0, 0, 1, 0))
    z = math.sqrt(-2 * math.log(wide_uniform(a, b))) * math.cos(2 * math.pi * (wide_uniform(c, d) - 0.5))
    a, b, _, _ = philox(key, (0, 0, 2, 0))
    return z, math.log(wide_uniform(a, b))
