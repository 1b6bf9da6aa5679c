r"""Counter-based random numbers on the GPU (Triton): each is a function of a key and of its place, Philox-4x32-10.

    normal: sqrt(-2 log u) cos(2 pi v), sqrt(-2 log u) sin(2 pi v) (Box-Muller), u, v uniform from 32 bits each (float64: 52)

The order of calls and the launch configuration have no influence on them.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["fill_normal", "fill_uniform", "normal_block", "normals", "wide_uniform"]

_BLOCK = 1024


@triton.jit
def _uniform(bits):
    """A number in (0, 1] from 32 random bits."""
    return (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def normals(key, index, draw):
    """Four N(0, 1) numbers for each index; `draw` tells calls with the same key apart."""
    zero = index * 0
    a, b, c, d = tl.philox(key, index, zero, zero, zero + draw)
    r, s = tl.sqrt(-2.0 * tl.log(_uniform(a))), tl.sqrt(-2.0 * tl.log(_uniform(c)))
    # the angle between -pi and pi, where sine and cosine are most exact
    t, w = (_uniform(b) - 0.5) * 6.283185307179586, (_uniform(d) - 0.5) * 6.283185307179586
    return r * tl.cos(t), r * tl.sin(t), s * tl.cos(w), s * tl.sin(w)


@triton.jit
def normal_block(key, index, draw):
    """The N(0, 1) numbers of a block of weights: four for each index, in order."""
    n0, n1, n2, n3 = normals(key, index, draw)
    return tl.interleave(tl.interleave(n0, n2), tl.interleave(n1, n3))


@triton.jit
def wide_uniform(low, high):
    """A float64 number in (0, 1) from 64 random bits, 52 of which count."""
    return ((high.to(tl.float64) * 4294967296.0 + low.to(tl.float64)) / 4096.0 + 0.5) * 2.220446049250313e-16


@triton.jit
def _fill(out, keys, draw_at, size, base, IS_NORMAL: tl.constexpr, IS_WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Row c of `out`, (chains, size), with numbers of key c. Wide numbers (float64) take a call of Philox each."""
    chain = tl.program_id(1)
    key = tl.load(keys + chain)
    draw = tl.load(draw_at).to(tl.uint32)
    row = out + chain.to(tl.int64) * size
    start = tl.program_id(0).to(tl.int64) * BLOCK
    e = start + tl.arange(0, BLOCK)
    if IS_WIDE:
        index = (4 * base + e).to(tl.uint32)
        zero = index * 0
        a, b, c, d = tl.philox(key, index, zero, zero + 1, zero + draw)
        values = wide_uniform(a, b)
        if IS_NORMAL:
            values = tl.sqrt(-2.0 * tl.log(values)) * tl.cos(6.283185307179586 * (wide_uniform(c, d) - 0.5))
        tl.store(row + e, values, mask=e < size)
    else:
        index = (base + start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        if IS_NORMAL:
            n0, n1, n2, n3 = normals(key, index, draw)
        else:
            zero = index * 0
            a, b, c, d = tl.philox(key, index, zero, zero, zero + draw)
            # 24 bits, so that 1 is never reached
            n0, n1 = (a >> 8).to(tl.float32) * 5.960464477539063e-08, (b >> 8).to(tl.float32) * 5.960464477539063e-08
            n2, n3 = (c >> 8).to(tl.float32) * 5.960464477539063e-08, (d >> 8).to(tl.float32) * 5.960464477539063e-08
        tl.store(row + e, tl.interleave(tl.interleave(n0, n2), tl.interleave(n1, n3)), mask=e < size)


def fill_normal(out: Tensor, keys: Tensor, draw: Tensor, base: int = 0) -> None:
    """N(0, 1) numbers into `out`, (chains, ...), float32 or float64. `keys`: (chains,), `draw`: (1,), both int64.

    `base`: how many groups of four weights precede these.
    """
    _launch(out, keys, draw, base, True)


def fill_uniform(out: Tensor, keys: Tensor, draw: Tensor) -> None:
    """Uniform numbers in [0, 1), likewise."""
    _launch(out, keys, draw, 0, False)


def _launch(out: Tensor, keys: Tensor, draw: Tensor, base: int, is_normal: bool) -> None:
    size = out[0].numel()
    is_wide = out.dtype == torch.float64
    # Triton launches on the current device, which need not be that of the numbers
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        _fill[(-(-size // _BLOCK), len(out))](out, keys, draw, size, base, IS_NORMAL=is_normal, IS_WIDE=is_wide, BLOCK=_BLOCK)
