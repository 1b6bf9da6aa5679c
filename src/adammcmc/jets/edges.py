r"""The edge layers of ParticleNet as Triton kernels: few passes over the edges, and no synchronization with the host.

A block connects particle i with its k neighbours j. With p = x [W1 - W2, W2, Ws]^T for each particle (one product),

    y_1 = p1_i + p2_j,   z_l = relu(norm(y_l)),   y_{l+1} = z_l W_{l+1}^T,   out_i = relu(norm(p3_i) + mean_j z_L)

y_1 is never stored: its statistics, z_1 and its gradient are computed from p, which is small and stays in the cache. BatchNorm
takes one reducing pass and one applying pass; the last layer is applied and averaged over j in one pass. In the backward pass,
with g the gradient of norm(y), n edges, and xhat = (y - mean) / sd:

    dy = weight / sd (g - sum(g) / n - xhat sum(g xhat) / n)

The gradient of p2_j is a sum over the edges that end at j. They belong to the jet of j, so that one program sums them by a
product with a 0/1 matrix, without atomics: the result is deterministic, bit for bit.

Statistics follow Chan et al.: the mean and the sum of squares about it of each program's stretch of rows, combined in float64.
The number of real rows is read on the device; the rows after them (`Cloud.padded`) are zeros and do not count. torch.compile
keeps these functions outside of its graphs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from adammcmc.jets.particlenet import NOBODY, Cloud

__all__ = ["Layout", "edge_block", "mean_of_jets", "nearest_places", "norm_rows", "outside_of_graphs"]

_NOBODY = tl.constexpr(NOBODY)
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


# --- shared by the kernels --------------------------------------------------------------------------------------------------


@triton.jit
def _moments(mean_at, spread_at, eps, c, has, EVAL: tl.constexpr):
    """Mean and 1 / sd of a block of columns; in evaluation mode `spread_at` holds variances."""
    mean = tl.load(mean_at + c, mask=has, other=0.0).to(tl.float32)
    spread = tl.load(spread_at + c, mask=has, other=1.0).to(tl.float32)
    if EVAL:
        spread = 1.0 / tl.sqrt(spread + eps)
    return mean, spread


@triton.jit
def _read(
    y, own, there, places, base, row, slot, ok, c, has,
    YS: tl.constexpr, TS: tl.constexpr, PS: tl.constexpr, K: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """y of edge `slot` of a block of rows: the stored value, or own + neighbour (zero if there is none)."""
    if GATHER:
        place = tl.load(places + row * PS + slot, mask=ok, other=_NOBODY).to(tl.int32)
        j = (base + place).to(tl.int64)
        mask = (ok & (place != _NOBODY))[:, None] & has[None, :]
        return own + tl.load(there + j[:, None] * TS + c[None, :], mask=mask, other=0.0).to(tl.float32)
    else:  # noqa: RET505 (Triton compiles the code after an `if`, even if the branch returned)
        at = y + ((row * K + slot) * YS)[:, None] + c[None, :]
        return tl.load(at, mask=ok[:, None] & has[None, :], other=0.0).to(tl.float32)


@triton.jit
def _row_wise(y, start, row, ok, c, has, YS: tl.constexpr, GATHER: tl.constexpr):
    """Shared by all edges of a row: its own part of y, and the first row of its jet."""
    if GATHER:
        own = tl.load(y + (row * YS)[:, None] + c[None, :], mask=ok[:, None] & has[None, :], other=0.0).to(tl.float32)
        return own, tl.load(start + row, mask=ok, other=0)
    else:  # noqa: RET505
        return row, row


@triton.jit
def _gradient(
    dz, out, shared, row, slot, ok, c, has, K: tl.constexpr, C: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """The gradient of z: the stored value, or the row's part of the gradient of relu(... + mean z)."""
    if MEAN:
        return shared
    else:  # noqa: RET505
        at = dz + ((row * K + slot) * C)[:, None] + c[None, :]
        return tl.load(at, mask=ok[:, None] & has[None, :], other=0.0).to(tl.float32)


@triton.jit
def _shared(dz, out, row, ok, c, has, K: tl.constexpr, C: tl.constexpr, MEAN: tl.constexpr):
    if MEAN:
        mask = ok[:, None] & has[None, :]
        at = (row * C)[:, None] + c[None, :]
        g = tl.load(dz + at, mask=mask, other=0.0).to(tl.float32)
        return tl.where(tl.load(out + at, mask=mask, other=0.0).to(tl.float32) > 0, g, 0.0) / K
    else:  # noqa: RET505
        return row


# --- forward ----------------------------------------------------------------------------------------------------------------


@triton.jit
def _lay_out(counts, ends, start, total, BLOCK: tl.constexpr):
    """For each particle the first row of its jet; and the number of particles."""
    jet = tl.program_id(0)
    if jet == tl.num_programs(0) - 1:
        tl.store(total, tl.load(ends + jet))
    count = tl.load(counts + jet).to(tl.int32)
    first = tl.load(ends + jet).to(tl.int32) - count
    for i in range(0, count, BLOCK):
        place = i + tl.arange(0, BLOCK)
        tl.store(start + first + place, first + place * 0, mask=place < count)


@triton.jit
def _statistics(
    y, there, places, start, total_at, partial,
    C: tl.constexpr, YS: tl.constexpr, TS: tl.constexpr, PS: tl.constexpr, K: tl.constexpr, MULT: tl.constexpr,
    GATHER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The count, mean, and sum of squares about the mean of each program's stretch of rows."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    has = c < C
    rows = tl.load(total_at).to(tl.int32) * MULT
    blocks = tl.cdiv(rows, BR)
    each = tl.cdiv(blocks, programs)
    low = tl.minimum(program * each, blocks)
    high = tl.minimum(low + each, blocks)
    # sums are taken about the first row of the stretch: a large common offset costs no digits
    row_0 = low * BR + tl.arange(0, 1)
    ok_0 = row_0 < rows
    own_0, base_0 = _row_wise(y, start, row_0.to(tl.int64), ok_0, c, has, YS, GATHER)
    origin = _read(y, own_0, there, places, base_0, row_0.to(tl.int64), 0, ok_0, c, has, YS, TS, PS, K, GATHER)
    first = tl.zeros([BR, BC], tl.float32)
    second = tl.zeros([BR, BC], tl.float32)
    for block in range(low, high):
        row = block * BR + tl.arange(0, BR)
        ok = row < rows
        row = row.to(tl.int64)
        own, base = _row_wise(y, start, row, ok, c, has, YS, GATHER)
        for slot in tl.static_range(K):
            value = _read(y, own, there, places, base, row, slot, ok, c, has, YS, TS, PS, K, GATHER)
            off = tl.where(ok[:, None], value - origin, 0.0)
            first += off
            second += off * off
    number = (tl.minimum(high * BR, rows) - tl.minimum(low * BR, rows)).to(tl.float32) * K
    safe = tl.maximum(number, 1.0)
    first_sum = tl.sum(first, 0)
    shift = first_sum / safe
    at = partial + program * C + c
    tl.store(at, number + shift * 0, mask=has)
    tl.store(at + programs * C, tl.sum(origin, 0) + shift, mask=has)
    tl.store(at + 2 * programs * C, tl.maximum(tl.sum(second, 0) - first_sum * shift, 0.0), mask=has)


@triton.jit
def _finish_statistics(
    partial, programs, stats, running_mean, running_var, tracked, momentum, eps,
    C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Combine the stretches: mean and 1 / sd, and the running statistics as in torch."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    has = c < C
    number = tl.zeros([BP, BC], tl.float64)
    total = tl.zeros([BP, BC], tl.float64)
    for start in range(0, programs, BP):
        p = start + tl.arange(0, BP)
        mask = (p < programs)[:, None] & has[None, :]
        at = partial + p[:, None] * C + c[None, :]
        n = tl.load(at, mask=mask, other=0.0).to(tl.float64)
        number += n
        total += n * tl.load(at + programs * C, mask=mask, other=0.0).to(tl.float64)
    n_all = tl.maximum(tl.sum(number, 0), 1.0)
    mean = tl.sum(total, 0) / n_all
    square = tl.zeros([BP, BC], tl.float64)
    for start in range(0, programs, BP):
        p = start + tl.arange(0, BP)
        mask = (p < programs)[:, None] & has[None, :]
        at = partial + p[:, None] * C + c[None, :]
        n = tl.load(at, mask=mask, other=0.0).to(tl.float64)
        off = tl.load(at + programs * C, mask=mask, other=0.0).to(tl.float64) - mean[None, :]
        square += n * off * off + tl.load(at + 2 * programs * C, mask=mask, other=0.0).to(tl.float64)
    m2 = tl.sum(square, 0)
    tl.store(stats + c, mean.to(tl.float32), mask=has)
    tl.store(stats + C + c, (1.0 / tl.sqrt(m2 / n_all + eps)).to(tl.float32), mask=has)
    old_mean = tl.load(running_mean + c, mask=has, other=0.0).to(tl.float64)
    old_var = tl.load(running_var + c, mask=has, other=0.0).to(tl.float64)
    unbiased = m2 / tl.maximum(n_all - 1.0, 1.0)
    tl.store(running_mean + c, (old_mean + momentum * (mean - old_mean)).to(tl.float32), mask=has)
    tl.store(running_var + c, (old_var + momentum * (unbiased - old_var)).to(tl.float32), mask=has)
    if tl.program_id(0) == 0:
        tl.store(tracked, tl.load(tracked) + 1)


@triton.jit(do_not_specialize=["all_rows"])
def _apply(
    y, there, places, start, total_at, mean_at, spread_at, weight_at, bias_at, out, all_rows, eps,
    C: tl.constexpr, YS: tl.constexpr, TS: tl.constexpr, PS: tl.constexpr, K: tl.constexpr, MULT: tl.constexpr,
    GATHER: tl.constexpr, RELU: tl.constexpr, EVAL: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """z = relu((y - mean) / sd weight + bias); zeros after the real rows."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    has = c < C
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    ok = row < tl.load(total_at).to(tl.int32) * MULT
    inside = (row < all_rows)[:, None] & has[None, :]
    row = row.to(tl.int64)
    mean, inverse = _moments(mean_at, spread_at, eps, c, has, EVAL)
    scale = inverse * tl.load(weight_at + c, mask=has, other=0.0).to(tl.float32)
    bias = tl.load(bias_at + c, mask=has, other=0.0).to(tl.float32)
    own, base = _row_wise(y, start, row, ok, c, has, YS, GATHER)
    for slot in tl.static_range(K):
        value = _read(y, own, there, places, base, row, slot, ok, c, has, YS, TS, PS, K, GATHER)
        z = (value - mean[None, :]) * scale[None, :] + bias[None, :]
        if RELU:
            z = tl.maximum(z, 0.0)
        z = tl.where(ok[:, None], z, 0.0)
        tl.store(out + ((row * K + slot) * C)[:, None] + c[None, :], z.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["all_rows"])
def _combine(
    y, there, places, start, total_at, mean_at, spread_at, weight_at, bias_at, eps,
    s, s_mean_at, s_spread_at, s_weight_at, s_bias_at, s_eps, out, all_rows,
    C: tl.constexpr, YS: tl.constexpr, TS: tl.constexpr, PS: tl.constexpr, SS: tl.constexpr, K: tl.constexpr,
    GATHER: tl.constexpr, EVAL: tl.constexpr, S_NORM: tl.constexpr, S_EVAL: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out = relu(norm(s) + mean over the neighbours of relu(norm(y))); zeros after the real rows."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    has = c < C
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    ok = row < tl.load(total_at).to(tl.int32)
    inside = (row < all_rows)[:, None] & has[None, :]
    row = row.to(tl.int64)
    mean, inverse = _moments(mean_at, spread_at, eps, c, has, EVAL)
    scale = inverse * tl.load(weight_at + c, mask=has, other=0.0).to(tl.float32)
    bias = tl.load(bias_at + c, mask=has, other=0.0).to(tl.float32)
    own, base = _row_wise(y, start, row, ok, c, has, YS, GATHER)
    message = tl.zeros([BR, BC], tl.float32)
    for slot in tl.static_range(K):
        value = _read(y, own, there, places, base, row, slot, ok, c, has, YS, TS, PS, K, GATHER)
        message += tl.maximum((value - mean[None, :]) * scale[None, :] + bias[None, :], 0.0)
    short = tl.load(s + (row * SS)[:, None] + c[None, :], mask=ok[:, None] & has[None, :], other=0.0).to(tl.float32)
    if S_NORM:
        s_mean, s_inverse = _moments(s_mean_at, s_spread_at, s_eps, c, has, S_EVAL)
        s_scale = s_inverse * tl.load(s_weight_at + c, mask=has, other=0.0).to(tl.float32)
        s_bias = tl.load(s_bias_at + c, mask=has, other=0.0).to(tl.float32)
        short = (short - s_mean[None, :]) * s_scale[None, :] + s_bias[None, :]
    value = tl.where(ok[:, None], tl.maximum(short + message / K, 0.0), 0.0)
    tl.store(out + (row * C)[:, None] + c[None, :], value.to(out.dtype.element_ty), mask=inside)


# --- backward ---------------------------------------------------------------------------------------------------------------


@triton.jit
def _reduce(
    y, there, places, start, total_at, dz, out, mean_at, spread_at, weight_at, bias_at, partial, eps,
    C: tl.constexpr, YS: tl.constexpr, TS: tl.constexpr, PS: tl.constexpr, K: tl.constexpr, MULT: tl.constexpr,
    GATHER: tl.constexpr, RELU: tl.constexpr, EVAL: tl.constexpr, MEAN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Each program's sums of g and of g xhat."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    has = c < C
    rows = tl.load(total_at).to(tl.int32) * MULT
    blocks = tl.cdiv(rows, BR)
    each = tl.cdiv(blocks, programs)
    low = tl.minimum(program * each, blocks)
    high = tl.minimum(low + each, blocks)
    mean, inverse = _moments(mean_at, spread_at, eps, c, has, EVAL)
    scale = inverse * tl.load(weight_at + c, mask=has, other=0.0).to(tl.float32)
    bias = tl.load(bias_at + c, mask=has, other=0.0).to(tl.float32)
    first = tl.zeros([BR, BC], tl.float32)
    second = tl.zeros([BR, BC], tl.float32)
    for block in range(low, high):
        row = block * BR + tl.arange(0, BR)
        ok = row < rows
        row = row.to(tl.int64)
        own, base = _row_wise(y, start, row, ok, c, has, YS, GATHER)
        shared = _shared(dz, out, row, ok, c, has, K, C, MEAN)
        for slot in tl.static_range(K):
            off = _read(y, own, there, places, base, row, slot, ok, c, has, YS, TS, PS, K, GATHER) - mean[None, :]
            g = _gradient(dz, out, shared, row, slot, ok, c, has, K, C, MEAN)  # zero where there is no row
            if RELU:
                g = tl.where(off * scale[None, :] + bias[None, :] > 0, g, 0.0)
            first += g
            second += g * (off * inverse[None, :])
    at = partial + program * C + c
    tl.store(at, tl.sum(first, 0), mask=has)
    tl.store(at + programs * C, tl.sum(second, 0), mask=has)


@triton.jit(do_not_specialize=["programs"])
def _finish_sums(partial, programs, sums, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """Combine the sums: the gradients of bias and weight."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    has = c < C
    first = tl.zeros([BP, BC], tl.float64)
    second = tl.zeros([BP, BC], tl.float64)
    for start in range(0, programs, BP):
        p = start + tl.arange(0, BP)
        mask = (p < programs)[:, None] & has[None, :]
        at = partial + p[:, None] * C + c[None, :]
        first += tl.load(at, mask=mask, other=0.0).to(tl.float64)
        second += tl.load(at + programs * C, mask=mask, other=0.0).to(tl.float64)
    tl.store(sums + c, tl.sum(first, 0).to(tl.float32), mask=has)
    tl.store(sums + C + c, tl.sum(second, 0).to(tl.float32), mask=has)


@triton.jit(do_not_specialize=["all_rows"])
def _apply_backward(
    y, there, places, start, total_at, dz, out, mean_at, spread_at, weight_at, bias_at, sums, partial, dy, all_rows, eps,
    C: tl.constexpr, YS: tl.constexpr, TS: tl.constexpr, PS: tl.constexpr, DS: tl.constexpr, K: tl.constexpr,
    MULT: tl.constexpr, RELU: tl.constexpr, EVAL: tl.constexpr, MEAN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dy of stored y; zeros after the real rows. `dy` may be `dz`. In evaluation mode dy does not need the sums of g and
    g xhat: this kernel computes them too."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    has = c < C
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    rows = tl.load(total_at).to(tl.int32) * MULT
    ok = row < rows
    inside = (row < all_rows)[:, None] & has[None, :]
    row = row.to(tl.int64)
    mean, inverse = _moments(mean_at, spread_at, eps, c, has, EVAL)
    scale = inverse * tl.load(weight_at + c, mask=has, other=0.0).to(tl.float32)
    bias = tl.load(bias_at + c, mask=has, other=0.0).to(tl.float32)
    number = tl.maximum(rows.to(tl.float32) * K, 1.0)
    if EVAL:
        first_sum = tl.zeros([BR, BC], tl.float32)
        second_sum = tl.zeros([BR, BC], tl.float32)
    else:
        first = tl.load(sums + c, mask=has, other=0.0) / number
        second = tl.load(sums + C + c, mask=has, other=0.0) / number * inverse
    shared = _shared(dz, out, row, ok, c, has, K, C, MEAN)
    for slot in tl.static_range(K):
        off = _read(y, row, there, places, row, row, slot, ok, c, has, YS, TS, PS, K, False) - mean[None, :]
        g = _gradient(dz, out, shared, row, slot, ok, c, has, K, C, MEAN)
        if RELU:
            g = tl.where(off * scale[None, :] + bias[None, :] > 0, g, 0.0)
        if EVAL:
            first_sum += g
            second_sum += g * off
        else:
            g = g - first[None, :] - off * second[None, :]
        g = tl.where(ok[:, None], g * scale[None, :], 0.0)
        tl.store(dy + ((row * K + slot) * DS)[:, None] + c[None, :], g.to(dy.dtype.element_ty), mask=inside)
    if EVAL:
        at = partial + tl.program_id(0) * C + c
        tl.store(at, tl.sum(first_sum, 0), mask=has)
        tl.store(at + tl.num_programs(0) * C, tl.sum(second_sum, 0) * inverse, mask=has)


@triton.jit(do_not_specialize=["all_rows", "jets"])
def _scatter(
    y, there, places, counts, ends, total_at, dz, out, mean_at, spread_at, weight_at, bias_at, sums, partial, dp, all_rows,
    jets, eps, C: tl.constexpr, YS: tl.constexpr, TS: tl.constexpr, PS: tl.constexpr, DS: tl.constexpr, K: tl.constexpr,
    EVAL: tl.constexpr, MEAN: tl.constexpr, WIDE: tl.constexpr, PLACES: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dy of the first layer, summed over the edges that leave i (into columns 0 ... C) and that end at j (C ... 2 C)."""
    jet = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    has = c < C
    total = tl.load(total_at).to(tl.int32)
    place_of = tl.arange(0, PLACES)
    if jet < jets:
        count = tl.load(counts + jet).to(tl.int32)
        begin = (tl.load(ends + jet) - count).to(tl.int64)
        # from here on row indices are relative to the first row of the jet: 32 bits suffice
        own_at, other_at, places_at, dp_at = y + begin * YS, there + begin * TS, places + begin * PS, dp + begin * DS
        dz_at, out_at = dz + begin * C, out + begin * C
        if not MEAN:
            dz_at = dz + begin * (K * C)
        mean, inverse = _moments(mean_at, spread_at, eps, c, has, EVAL)
        scale = inverse * tl.load(weight_at + c, mask=has, other=0.0).to(tl.float32)
        bias = tl.load(bias_at + c, mask=has, other=0.0).to(tl.float32)
        number = tl.maximum(total.to(tl.float32) * K, 1.0)
        if EVAL:
            first_sum = tl.zeros([BR, BC], tl.float32)
            second_sum = tl.zeros([BR, BC], tl.float32)
        else:
            first = tl.load(sums + c, mask=has, other=0.0) / number
            second = tl.load(sums + C + c, mask=has, other=0.0) / number * inverse
        arrived = tl.zeros([PLACES, BC], tl.float32)
        for low in range(0, count, BR):
            row = low + tl.arange(0, BR)
            ok = row < count
            own = tl.load(own_at + (row * YS)[:, None] + c[None, :], mask=ok[:, None] & has[None, :], other=0.0).to(tl.float32)
            shared = _shared(dz_at, out_at, row, ok, c, has, K, C, MEAN)
            left = tl.zeros([BR, BC], tl.float32)
            for slot in range(K):
                off = _read(y, own, other_at, places_at, 0, row, slot, ok, c, has, YS, TS, PS, K, True) - mean[None, :]
                g = _gradient(dz_at, out_at, shared, row, slot, ok, c, has, K, C, MEAN)
                g = tl.where(off * scale[None, :] + bias[None, :] > 0, g, 0.0)
                if EVAL:
                    second_sum += g * off
                else:
                    g = tl.where(ok[:, None], g - first[None, :] - off * second[None, :], 0.0)
                left += g
                place = tl.load(places_at + row * PS + slot, mask=ok, other=_NOBODY).to(tl.int32)
                ends_at = place_of[:, None] == place[None, :]
                if WIDE:
                    arrived = tl.dot(ends_at.to(tl.float32), g, arrived, input_precision="ieee")
                else:
                    arrived = tl.dot(ends_at.to(dp.dtype.element_ty), g.to(dp.dtype.element_ty), arrived)
            at = dp_at + (row * DS)[:, None] + c[None, :]
            tl.store(at, (left * scale[None, :]).to(dp.dtype.element_ty), mask=ok[:, None] & has[None, :])
            if EVAL:
                first_sum += left
        arrived_at = dp_at + C + (place_of * DS)[:, None] + c[None, :]
        # the last of 256 slots stands for no neighbour, and belongs to no particle
        arrived = arrived * scale[None, :]
        tl.store(arrived_at, arrived.to(dp.dtype.element_ty), mask=(place_of < count)[:, None] & has[None, :])
        if EVAL:
            sums_at = partial + jet * C + c
            tl.store(sums_at, tl.sum(first_sum, 0), mask=has)
            tl.store(sums_at + jets * C, tl.sum(second_sum, 0) * inverse, mask=has)
    else:
        empty = (jet - jets) * PLACES + place_of
        mask = ((empty >= total) & (empty < all_rows))[:, None] & has[None, :]
        empty_at = dp + (empty.to(tl.int64) * DS)[:, None] + c[None, :]
        nothing = tl.zeros([PLACES, BC], dp.dtype.element_ty)
        tl.store(empty_at, nothing, mask=mask)
        tl.store(empty_at + C, nothing, mask=mask)


# --- graphs and jets --------------------------------------------------------------------------------------------------------


@triton.jit
def _nearest(
    x, counts, ends, out,
    C: tl.constexpr, XS: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, PLACES: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """|a|^2 - 2 ab + |b|^2 of a block of rows with their whole jet; the K + 1 smallest, without the first."""
    jet = tl.program_id(0)
    count = tl.load(counts + jet).to(tl.int32)
    begin = tl.load(ends + jet).to(tl.int32) - count
    rank = tl.program_id(1) * BR + tl.arange(0, BR)
    if tl.program_id(1) * BR < count:
        place = tl.arange(0, PLACES)
        is_row, is_place = rank < count, place < count
        row_at = x + ((begin + rank).to(tl.int64) * XS)[:, None]
        place_at = x + ((begin + place).to(tl.int64) * XS)[:, None]
        product = tl.zeros([BR, PLACES], tl.float32)
        a2 = tl.zeros([BR], tl.float32)
        b2 = tl.zeros([PLACES], tl.float32)
        for low in range(0, C, BC):
            c = low + tl.arange(0, BC)
            has = c < C
            a = tl.load(row_at + c[None, :], mask=is_row[:, None] & has[None, :], other=0.0)
            b = tl.load(place_at + c[None, :], mask=is_place[:, None] & has[None, :], other=0.0)
            wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
            if WIDE:
                product = tl.dot(wide_a, tl.trans(wide_b), product, input_precision="ieee")
            else:
                product = tl.dot(a, tl.trans(b), product)  # products of bfloat16 are exact in float32
            a2 += tl.sum(wide_a * wide_a, 1)
            b2 += tl.sum(wide_b * wide_b, 1)
        distance = a2[:, None] - 2.0 * product + b2[None, :]
        distance = tl.where(distance > 0, distance, 0.0)
        # nonnegative floats are ordered like their bits; the index in the low byte breaks ties
        key = (distance.to(tl.int32, bitcast=True).to(tl.int64) << 8) | place[None, :].to(tl.int64)
        far = tl.full([BR, PLACES], 0x7FFFFFFFFFFFFF, tl.int64)  # its last byte is NOBODY
        key = tl.where(is_place[None, :], key, far)
        to = out + (begin + rank).to(tl.int64) * K
        for i in tl.static_range(K + 1):
            least = tl.min(key, 1)
            if i > 0:
                tl.store(to + (i - 1), (least & 255).to(tl.uint8), mask=is_row)
            key = tl.where(key == least[:, None], far, key)


@triton.jit
def _jet_mean(x, counts, ends, out, C: tl.constexpr, XS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """The mean over the particles of a jet, in float32."""
    jet = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    has = c < C
    count = tl.load(counts + jet).to(tl.int32)
    begin = tl.load(ends + jet).to(tl.int32) - count
    total = tl.zeros([BR, BC], tl.float32)
    for low in range(0, count, BR):
        rank = low + tl.arange(0, BR)
        at = x + ((begin + rank).to(tl.int64) * XS)[:, None] + c[None, :]
        total += tl.load(at, mask=(rank < count)[:, None] & has[None, :], other=0.0).to(tl.float32)
    tl.store(out + jet * C + c, tl.sum(total, 0) / tl.maximum(count, 1).to(tl.float32), mask=has)


@triton.jit(do_not_specialize=["all_rows", "jets"])
def _jet_mean_backward(
    grad, counts, ends, total_at, dx, all_rows, jets, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    jet = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    has = c < C
    if jet < jets:
        count = tl.load(counts + jet).to(tl.int32)
        begin = tl.load(ends + jet).to(tl.int32) - count
        g = tl.load(grad + jet * C + c, mask=has, other=0.0).to(tl.float32) / tl.maximum(count, 1).to(tl.float32)
        for low in range(0, count, BR):
            rank = low + tl.arange(0, BR)
            at = dx + ((begin + rank).to(tl.int64) * C)[:, None] + c[None, :]
            value = tl.zeros([BR, BC], tl.float32) + g[None, :]
            tl.store(at, value.to(dx.dtype.element_ty), mask=(rank < count)[:, None] & has[None, :])
    else:
        empty = (jet - jets) * BR + tl.arange(0, BR)
        mask = ((empty >= tl.load(total_at).to(tl.int32)) & (empty < all_rows))[:, None] & has[None, :]
        empty_at = dx + (empty.to(tl.int64) * C)[:, None] + c[None, :]
        tl.store(empty_at, tl.zeros([BR, BC], dx.dtype.element_ty), mask=mask)


# --- the host ---------------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Positions of the particles of packed jets, for the kernels. Computed on the device, without waiting for it."""

    counts: Tensor
    """(jets,), int64."""
    ends: Tensor
    """(jets,), int64: the row after the last particle of each jet."""
    start: Tensor
    """(rows,), int32: the first row of the jet of each particle; undefined after the real rows."""
    total: Tensor
    """(1,), int64: number of real rows."""
    width: int
    """The most particles that a jet has."""

    @staticmethod
    def of(counts: Tensor, rows: int, width: int) -> Layout:
        """From the number of particles in each jet, for tensors of `rows` rows."""
        counts = counts.long()
        ends = counts.cumsum(0)
        start = torch.empty(rows, dtype=torch.int32, device=counts.device)
        total = torch.empty(1, dtype=torch.int64, device=counts.device)
        _lay_out[(len(counts),)](counts, ends, start, total, BLOCK=128)
        return Layout(counts, ends, start, total, width)


class _Norm(NamedTuple):
    """The state and settings of BatchNorm, besides its weights."""

    mean: Tensor
    var: Tensor
    tracked: Tensor
    training: bool
    momentum: float
    eps: float

    @staticmethod
    def of(bn: nn.Module) -> _Norm:
        assert isinstance(bn, nn.BatchNorm1d | nn.BatchNorm2d)
        assert bn.running_mean is not None
        assert bn.running_var is not None
        assert bn.num_batches_tracked is not None
        return _Norm(
            bn.running_mean, bn.running_var, bn.num_batches_tracked, bn.training, float(bn.momentum or 0.0), float(bn.eps)
        )


class _Edges(NamedTuple):
    """The tensor to normalize: stored, or a sum of rows and their neighbours (`gather`)."""

    y: Tensor
    there: Tensor
    places: Tensor
    y_stride: int
    places_stride: int
    channels: int
    gather: bool


class _Stats(NamedTuple):
    """Mean and 1 / sd of the batch, or (is_eval) the running mean and variance."""

    mean: Tensor
    spread: Tensor
    is_eval: bool
    eps: float


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _columns(channels: int) -> int:
    return int(min(128, triton.next_power_of_2(channels)))


def _tile(channels: int, slots: int, device: torch.device) -> tuple[int, int, int]:
    """Rows and columns of a program's block, and its number of warps."""
    columns = _columns(channels)
    if device.type != "cuda":  # in the interpreter: small blocks, so that tests exercise the loops
        return max(1, 512 // columns), columns, 4
    # one slot: 32 numbers per thread; several slots are unrolled, and 16 per thread suffice
    return (8192 // columns, columns, 8) if slots == 1 else (max(1, 2048 // columns), columns, 4)


def _num_programs(device: torch.device, column_blocks: int) -> int:
    if device.type != "cuda":
        return 3
    return max(1, 4 * _multiprocessors(device) // column_blocks)


def _block_of_stretches(device: torch.device) -> int:
    """Stretches combined in one round of loads; each round has a latency."""
    return 512 if device.type == "cuda" else 2


def _stored(y: Tensor) -> _Edges:
    return _Edges(y, y, y, y.stride(0), 0, y.shape[1], False)


def _statistics_of(edges: _Edges, norm: _Norm, layout: Layout, slots: int, multiple: int) -> _Stats:
    """Statistics of the batch (updating the running ones), or the running ones in evaluation mode."""
    if not norm.training:
        return _Stats(norm.mean, norm.var, True, norm.eps)
    device, channels = edges.y.device, edges.channels
    rows, columns, warps = _tile(channels, slots, device)
    blocks = triton.cdiv(channels, columns)
    programs = _num_programs(device, blocks)
    partial = torch.empty(3, programs, channels, device=device)
    stats = torch.empty(2, channels, device=device)
    _statistics[(programs, blocks)](
        edges.y, edges.there, edges.places, layout.start, layout.total, partial,
        C=channels, YS=edges.y_stride, TS=edges.y_stride, PS=edges.places_stride, K=slots, MULT=multiple, GATHER=edges.gather,
        BR=rows, BC=columns, num_warps=warps,
    )  # fmt: skip
    _finish_statistics[(triton.cdiv(channels, 8),)](
        partial, programs, stats, norm.mean, norm.var, norm.tracked, norm.momentum, norm.eps,
        C=channels, BP=_block_of_stretches(device), BC=8, num_warps=8,
    )  # fmt: skip
    return _Stats(stats[0], stats[1], False, norm.eps)


def _applied(
    edges: _Edges, stats: _Stats, weight: Tensor, bias: Tensor, layout: Layout, slots: int, multiple: int, relu: bool
) -> Tensor:
    channels, device = edges.channels, edges.y.device
    all_rows = len(edges.y)
    out = torch.empty(all_rows * slots, channels, dtype=edges.y.dtype, device=device)
    rows, columns, warps = _tile(channels, slots, device)
    _apply[(triton.cdiv(all_rows, rows), triton.cdiv(channels, columns))](
        edges.y, edges.there, edges.places, layout.start, layout.total, stats.mean, stats.spread, weight, bias, out, all_rows,
        stats.eps, C=channels, YS=edges.y_stride, TS=edges.y_stride, PS=edges.places_stride, K=slots, MULT=multiple,
        GATHER=edges.gather, RELU=relu, EVAL=stats.is_eval, BR=rows, BC=columns, num_warps=warps,
    )  # fmt: skip
    return out


def _sums_of(
    edges: _Edges, stats: _Stats, weight: Tensor, bias: Tensor, layout: Layout, slots: int, multiple: int, relu: bool,
    dz: Tensor, out: Tensor | None,
) -> Tensor:  # fmt: skip
    """(2, channels): the sums of g and g xhat, gradients of bias and weight. With `out`, dz is the gradient after the mean."""
    device, channels = edges.y.device, edges.channels
    rows, columns, warps = _tile(channels, slots, device)
    blocks = triton.cdiv(channels, columns)
    programs = _num_programs(device, blocks)
    partial = torch.empty(2, programs, channels, device=device)
    _reduce[(programs, blocks)](
        edges.y, edges.there, edges.places, layout.start, layout.total, dz, dz if out is None else out,
        stats.mean, stats.spread, weight, bias, partial, stats.eps,
        C=channels, YS=edges.y_stride, TS=edges.y_stride, PS=edges.places_stride, K=slots, MULT=multiple, GATHER=edges.gather,
        RELU=relu, EVAL=stats.is_eval, MEAN=out is not None, BR=rows, BC=columns, num_warps=warps,
    )  # fmt: skip
    return _finished(partial)


def _finished(partial: Tensor) -> Tensor:
    """Combine the sums of stretches, (2, stretches, channels) -> (2, channels)."""
    _, stretches, channels = partial.shape
    sums = torch.empty(2, channels, device=partial.device)
    _finish_sums[(triton.cdiv(channels, 8),)](
        partial, stretches, sums, C=channels, BP=_block_of_stretches(partial.device), BC=8, num_warps=8
    )
    return sums


def _norm_backward(
    edges: _Edges, stats: _Stats, weight: Tensor, bias: Tensor, layout: Layout, slots: int, multiple: int, relu: bool,
    dz: Tensor, out: Tensor | None, dy: Tensor,
) -> Tensor:  # fmt: skip
    """Write dy; return the sums of `_sums_of`."""
    channels = edges.channels
    all_rows = len(edges.y) // slots
    rows, columns, warps = _tile(channels, slots, edges.y.device)
    stretches = triton.cdiv(all_rows, rows)
    if stats.is_eval:
        sums = partial = torch.empty(2, stretches, channels, device=dy.device)
    else:
        sums = partial = _sums_of(edges, stats, weight, bias, layout, slots, multiple, relu, dz, out)
    _apply_backward[(stretches, triton.cdiv(channels, columns))](
        edges.y, edges.there, edges.places, layout.start, layout.total, dz, dz if out is None else out,
        stats.mean, stats.spread, weight, bias, sums, partial, dy, all_rows, stats.eps,
        C=channels, YS=edges.y_stride, TS=0, PS=0, DS=dy.stride(0), K=slots, MULT=multiple, RELU=relu, EVAL=stats.is_eval,
        MEAN=out is not None, BR=rows, BC=columns, num_warps=warps,
    )  # fmt: skip
    return _finished(partial) if stats.is_eval else sums


class _NormRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: _Norm, layout: Layout) -> Tensor:
        edges = _stored(x.contiguous())
        stats = _statistics_of(edges, norm, layout, 1, 1)
        ctx.save_for_backward(edges.y, weight, bias)
        ctx.more = stats, layout
        return _applied(edges, stats, weight, bias, layout, 1, 1, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        stats, layout = ctx.more
        grad = grads[0].contiguous()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        if dx is None:
            sums = _sums_of(_stored(x), stats, weight, bias, layout, 1, 1, False, grad, None)
        else:
            sums = _norm_backward(_stored(x), stats, weight, bias, layout, 1, 1, False, grad, None, dx)
        return dx, sums[1].to(weight.dtype), sums[0].to(bias.dtype), None, None


class _Block(torch.autograd.Function):
    """A whole block. `params` is a flat list: the matrices of the layers, the weights and the biases of their norms, then
    those of the shortcut, if there is one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, places: Tensor, norms: Sequence[_Norm], has_shortcut: bool, layout: Layout, dtype: torch.dtype,
        *params: Tensor,
    ) -> Tensor:  # fmt: skip
        depth = len(params) // 3 - has_shortcut
        k = places.shape[1]
        matrices = [w.flatten(1) for w in params[:depth]]
        weights, biases = params[depth : 2 * depth], params[2 * depth : 3 * depth]
        own, other = matrices[0].chunk(2, 1)
        parts = [own - other, other] + ([params[3 * depth].flatten(1)] if has_shortcut else [])
        matrices = [torch.cat(parts).to(dtype), *(w.to(dtype) for w in matrices[1:])]
        narrow = x.to(dtype)
        p = narrow @ matrices[0].t()
        edges = [_from_rows(p, len(own), places)]
        stats = [_statistics_of(edges[0], norms[0], layout, k, 1)]
        kept: list[Tensor] = []
        for i in range(1, depth):
            # rows are particles in the first layer, edges in the others
            slots, multiple = (k, 1) if i == 1 else (1, k)
            z = _applied(edges[-1], stats[-1], weights[i - 1], biases[i - 1], layout, slots, multiple, True)
            y = z @ matrices[i].t()
            edges.append(_stored(y))
            stats.append(_statistics_of(edges[-1], norms[i], layout, 1, k))
            kept += [z, y]
        last, channels = edges[-1], edges[-1].channels
        short, short_stats = (p[:, 2 * len(own) :], None) if has_shortcut else (x.contiguous(), None)
        s_weight = s_bias = weights[-1]
        if has_shortcut:
            s_weight, s_bias = params[3 * depth + 1 :]
            short_stats = _statistics_of(_stored(short), norms[-1], layout, 1, 1)
        s_stats = stats[-1] if short_stats is None else short_stats
        out_type = dtype if has_shortcut else torch.promote_types(x.dtype, dtype)
        out = torch.empty(len(x), channels, dtype=out_type, device=x.device)
        rows, columns, warps = _tile(channels, k, x.device)
        _combine[(triton.cdiv(len(x), rows), triton.cdiv(channels, columns))](
            last.y, last.there, last.places, layout.start, layout.total,
            stats[-1].mean, stats[-1].spread, weights[-1], biases[-1], stats[-1].eps,
            short, s_stats.mean, s_stats.spread, s_weight, s_bias, s_stats.eps, out, len(x),
            C=channels, YS=last.y_stride, TS=last.y_stride, PS=last.places_stride, SS=short.stride(0), K=k, GATHER=last.gather,
            EVAL=stats[-1].is_eval, S_NORM=has_shortcut, S_EVAL=s_stats.is_eval, BR=rows, BC=columns, num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(narrow, places, p, out, *kept, *params)
        ctx.more = layout, stats, short_stats, matrices, depth, x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        layout, stats, short_stats, matrices, depth, x_type = ctx.more
        narrow, places, p, out, *rest = ctx.saved_tensors
        kept, params = rest[: 2 * (depth - 1)], rest[2 * (depth - 1) :]
        k, half = places.shape[1], params[0].shape[0]
        weights, biases = params[depth : 2 * depth], params[2 * depth : 3 * depth]
        d_matrices: list[Tensor] = [narrow] * depth
        d_weights: list[Tensor] = [narrow] * depth
        d_biases: list[Tensor] = [narrow] * depth
        dz, seen = grads[0].contiguous(), out  # before the last layer, dz is the gradient of `out`
        dp = torch.empty_like(p)
        d_short: list[Tensor] = []
        if short_stats is not None:
            short, (s_weight, s_bias) = _stored(p[:, 2 * half :]), params[3 * depth + 1 :]
            sums = _norm_backward(short, short_stats, s_weight, s_bias, layout, 1, 1, False, dz, out, dp[:, 2 * half :])
            d_short = [sums[1].to(s_weight.dtype), sums[0].to(s_bias.dtype)]
        upper = dz
        for i in reversed(range(depth)):
            is_last = i == depth - 1
            behind = seen if is_last else None
            edges = _from_rows(p, half, places) if i == 0 else _stored(kept[2 * i - 1])
            slots, multiple = (k, 1) if i == 0 or is_last else (1, k)
            if i == 0:
                sums = _scattered(edges, stats[0], weights[0], biases[0], layout, k, dz, behind, dp)
            else:
                dy = torch.empty_like(edges.y) if is_last else dz  # in place: dz is a temporary that is not needed again
                sums = _norm_backward(edges, stats[i], weights[i], biases[i], layout, slots, multiple, True, dz, behind, dy)
            d_weights[i], d_biases[i] = sums[1].to(weights[i].dtype), sums[0].to(biases[i].dtype)
            if i == 0:
                break
            d_matrices[i] = (dy.t() @ kept[2 * i - 2]).to(params[i].dtype).view_as(params[i])
            dz = dy @ matrices[i]
        d_joint = (dp.t() @ narrow).to(params[0].dtype)
        d_own, d_other = d_joint[:half], d_joint[half : 2 * half]
        d_matrices[0] = torch.cat([d_own, d_other - d_own], 1).view_as(params[0])
        if short_stats is not None:
            d_short = [d_joint[2 * half :].view_as(params[3 * depth]), *d_short]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dp @ matrices[0]).to(x_type)
            if short_stats is None:
                dx = dx + upper.masked_fill(out <= 0, 0).to(x_type)
        return dx, None, None, None, None, None, *d_matrices, *d_weights, *d_biases, *d_short


def _from_rows(p: Tensor, half: int, places: Tensor) -> _Edges:
    return _Edges(p, p[:, half:], places, p.stride(0), places.stride(0), half, True)


def _scattered(
    edges: _Edges, stats: _Stats, weight: Tensor, bias: Tensor, layout: Layout, k: int, dz: Tensor, out: Tensor | None,
    dp: Tensor,
) -> Tensor:  # fmt: skip
    """Write the gradients of p; return the sums of `_sums_of`."""
    channels, jets, all_rows = edges.channels, len(layout.counts), len(edges.y)
    places = max(16, triton.next_power_of_2(layout.width))
    columns = int(max(16, min(64, triton.next_power_of_2(channels))))
    if stats.is_eval:
        sums = partial = torch.empty(2, jets, channels, device=dp.device)
    else:
        sums = partial = _sums_of(edges, stats, weight, bias, layout, k, 1, True, dz, out)
    _scatter[(jets + triton.cdiv(all_rows, places), triton.cdiv(channels, columns))](
        edges.y, edges.there, edges.places, layout.counts, layout.ends, layout.total, dz,
        dz if out is None else out, stats.mean, stats.spread, weight, bias, sums, partial, dp, all_rows, jets, stats.eps,
        C=channels, YS=edges.y_stride, TS=edges.y_stride, PS=edges.places_stride, DS=dp.stride(0), K=k, EVAL=stats.is_eval,
        MEAN=out is not None, WIDE=_is_wide(dp), PLACES=places, BR=32, BC=columns,
        num_warps=4 if places <= 128 else 8, num_stages=2 if _is_wide(dp) else 4,  # with few warps, loads must be prefetched
    )  # fmt: skip
    return _finished(partial) if stats.is_eval else sums


def _is_wide(x: Tensor) -> bool:
    """Whether to multiply in float32. The interpreter cannot multiply bfloat16."""
    return _INTERPRETED or x.dtype == torch.float32


class _MeanOfJets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        channels, jets = x.shape[1], len(layout.counts)
        columns = min(64, _columns(channels))
        out = torch.empty(jets, channels, device=x.device)
        ctx.more = layout, x.shape, x.dtype
        _jet_mean[(jets, triton.cdiv(channels, columns))](
            x, layout.counts, layout.ends, out, C=channels, XS=x.stride(0), BR=32, BC=columns, num_warps=4
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        layout, (rows, channels), dtype = ctx.more
        grad, jets = grads[0].contiguous(), len(layout.counts)
        columns = min(64, _columns(channels))
        dx = torch.empty(rows, channels, dtype=dtype, device=grad.device)
        _jet_mean_backward[(jets + triton.cdiv(rows, 32), triton.cdiv(channels, columns))](
            grad, layout.counts, layout.ends, layout.total, dx, rows, jets, C=channels, BR=32, BC=columns, num_warps=4
        )
        return dx, None


@torch.compiler.disable
def outside_of_graphs(function: Callable[[Cloud], Tensor], cloud: Cloud) -> Tensor:
    """Call a function outside of torch.compile's graphs."""
    return function(cloud)


def norm_rows(x: Tensor, bn: nn.Module, layout: Layout) -> Tensor:
    """BatchNorm over the real rows of (rows, channels); zeros after them."""
    out: Tensor = _NormRows.apply(x, bn.weight, bn.bias, _Norm.of(bn), layout)
    return out


def edge_block(
    x: Tensor,
    places: Tensor,
    layout: Layout,
    dtype: torch.dtype,
    convs: Sequence[nn.Module],
    norms: Sequence[nn.Module],
    shortcut: tuple[nn.Module, nn.Module] | None,
) -> Tensor:
    """A block of ParticleNet: (rows, channels) -> (rows, channels of its last layer); zeros after the real rows.

    Args:
        x: features of the particles.
        places: (rows, k), uint8: their neighbours, by index in the jet.
        layout: the jets they belong to.
        dtype: of products and edges, float32 or bfloat16. Sums are in float32.
        convs: the convolutions of the layers, whose weights can be viewed as matrices.
        norms: the BatchNorm of each layer.
        shortcut: its convolution and BatchNorm; None: the identity.
    """
    params = [*(conv.weight for conv in convs), *(bn.weight for bn in norms), *(bn.bias for bn in norms)]
    every = [_Norm.of(bn) for bn in norms]
    if shortcut is not None:
        params += [shortcut[0].weight, shortcut[1].weight, shortcut[1].bias]
        every.append(_Norm.of(shortcut[1]))
    if places.stride(1) != 1:
        places = places.contiguous()
    with torch.autocast(x.device.type, enabled=False):
        out: Tensor = _Block.apply(x, places, every, shortcut is not None, layout, dtype, *params)
    return out


@torch.no_grad()
def nearest_places(x: Tensor, layout: Layout, k: int) -> Tensor:
    """`particlenet.nearest` of the real rows; `NOBODY` after them. Ties go to the hardest particle."""
    out = torch.full((len(x), k), NOBODY, dtype=torch.uint8, device=x.device)
    places = max(16, triton.next_power_of_2(layout.width))
    channels = x.shape[1]
    columns = int(max(16, min(16 if _is_wide(x) else 64, triton.next_power_of_2(channels))))  # float32 needs more registers
    rows = 32 if places <= 128 else 16
    _nearest[(len(layout.counts), triton.cdiv(layout.width, rows))](
        x, layout.counts, layout.ends, out, C=channels, XS=x.stride(0), K=k, WIDE=_is_wide(x), PLACES=places, BR=rows,
        BC=columns, num_warps=4,
    )  # fmt: skip
    return out


def mean_of_jets(x: Tensor, layout: Layout) -> Tensor:
    """The mean over the rows of each jet, (jets, channels), in float32; zeros for an empty jet."""
    out: Tensor = _MeanOfJets.apply(x.contiguous(), layout)
    return out
