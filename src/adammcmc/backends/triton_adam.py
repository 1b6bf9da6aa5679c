r"""Algorithm 1's proposal in one pass over the weights of 1..C chains, where they lie (Triton).

After the gradient g is known, a step reads theta, g, m1, m2 once and writes m1, m2, a copy of theta, and tau in its place:

    m1 <- m1 + (1 - beta1) (g - m1),   m2 <- beta2 m2 + (1 - beta2) g^2,   u = lr m1hat / (sqrt(m2hat) + eps)
    tau = theta + sigma eps + (sigma_along z - 1) u;      sums of u^2, u eps / sigma, and of a Gaussian prior, in float64

eight passes over memory where Adam makes seven. The same numbers as `kernels.adam`, given the same noise. For the released
code's proposal (`proposal.Elementwise`) z is a number for each weight, and its part of u.d is in the second sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adammcmc.backends.philox import normal_block, wide_uniform
from adammcmc.backends.triton_passes import (
    BLOCK,
    WARPS,
    InPlaceMove,
    Keys,
    OnePass,
    Places,
    by_leaf_and_chain,
    contiguous,
    is_same,
    total,
)
from adammcmc.kernels.direction import AdamMemory
from adammcmc.kernels.proposal import Move
from adammcmc.target.leaves import Leaves, Setting, spread, spread_settings
from adammcmc.target.potential import Evaluation
from adammcmc.target.randomness import Randomness

__all__ = ["OnePassAdam"]

_NUM_SUMS = 5  # |u|^2, |u|^2 / sigma^2, u.eps / sigma, precision |theta|^2, precision (|tau|^2 - |theta|^2)
_TOTALS = 6  # |u|^2, |u| / sigma, log_q_ratio, log prior at theta, log prior at tau, log uniform
_PER_LEAF = 6  # lr, beta1, beta2, eps, sigma, precision


@triton.jit
def _prepare(
    keys, draw_at, settings, counts, coefficients, numbers, num_leaves, losses, num_losses, frozen_at, totals,
    ELEMENTWISE: tl.constexpr, UNIFORM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One chain: the bias corrections of its leaves, z, the uniform number, and whether it may move (it is not frozen, and
    its loss is finite)."""
    chain, num_chains = tl.program_id(0), tl.num_programs(0)
    found = tl.zeros([SIZE], tl.float64)
    for start in range(0, num_losses, SIZE):
        i = start + tl.arange(0, SIZE)
        found += tl.load(losses + chain.to(tl.int64) * num_losses + i, mask=i < num_losses, other=0.0).to(tl.float64)
    may_move = (tl.abs(tl.sum(found)) < float("inf")) & (tl.load(frozen_at + chain) < 0)
    key, last = tl.load(keys + chain), tl.load(draw_at).to(tl.uint32)
    zero = tl.zeros([1], tl.uint32)
    one = tl.arange(0, 1)
    if ELEMENTWISE:  # draws: z, eps, zeta (and the uniform number); the z of the step is not used
        z = tl.zeros([1], tl.float64)
    else:  # z, eps (and the uniform number)
        a, b, c, d = tl.philox(key, zero, zero, zero + 1, zero + last - UNIFORM - 1)
        z = tl.sqrt(-2.0 * tl.log(wide_uniform(a, b))) * tl.cos(6.283185307179586 * (wide_uniform(c, d) - 0.5))
    a, b, c, d = tl.philox(key, zero, zero, zero + 1, zero + last)
    tl.store(totals + 5 * num_chains + chain + one, tl.log(wide_uniform(a, b)))
    width = 1 + 6 * num_leaves
    settings += chain * width
    numbers += chain
    tl.store(numbers + one, z)
    tl.store(numbers + num_chains + one, tl.load(settings + one) * z - 1.0)  # the first setting is sigma_along
    tl.store(numbers + 2 * num_chains, may_move.to(tl.float64))
    for start in range(0, num_leaves, SIZE):
        t = start + tl.arange(0, SIZE)
        there = t < num_leaves
        row = settings + 1 + 6 * t
        lr = tl.load(row, mask=there, other=0.0)
        beta1 = tl.load(row + 1, mask=there, other=0.0)
        beta2 = tl.load(row + 2, mask=there, other=0.0)
        eps = tl.load(row + 3, mask=there, other=0.0)
        sigma = tl.load(row + 4, mask=there, other=0.0)
        precision = tl.load(row + 5, mask=there, other=0.0)
        k = tl.load(counts + t, mask=there, other=0).to(tl.float64) + 1.0
        root = tl.sqrt(1.0 - tl.where(beta2 > 0, tl.exp(k * tl.log(tl.where(beta2 > 0, beta2, 1.0))), 0.0))
        rest = 1.0 - tl.where(beta1 > 0, tl.exp(k * tl.log(tl.where(beta1 > 0, beta1, 1.0))), 0.0)
        out = coefficients + chain * 8 * num_leaves + 8 * t
        tl.store(out, lr * root / rest, mask=there)
        tl.store(out + 1, eps * root, mask=there)
        tl.store(out + 2, 1.0 - beta1, mask=there)
        tl.store(out + 3, beta2, mask=there)
        tl.store(out + 4, 1.0 - beta2, mask=there)
        tl.store(out + 5, sigma, mask=there)
        tl.store(out + 6, tl.where(sigma > 0, 1.0 / tl.where(sigma > 0, sigma, 1.0), 0.0), mask=there)
        tl.store(out + 7, precision, mask=there)


@triton.jit
def _load(at, e, size, FULL: tl.constexpr):
    """A block of weights; a full one is aligned, and needs no mask."""
    if FULL:  # noqa: SIM108
        values = tl.load(tl.multiple_of(at + e, 16))  # a hint on `at` itself, an argument, would be lost
    else:
        values = tl.load(at + e, mask=e < size, other=0.0)
    return values


@triton.jit
def _store(at, e, values, size, FULL: tl.constexpr):
    if FULL:
        tl.store(tl.multiple_of(at + e, 16), values)
    else:
        tl.store(at + e, values, mask=e < size)


@triton.jit
def _propose(
    places, gradients, sizes, bases, chunks, num_chunks, coefficients, numbers, keys, draw_at, sums, num_sums, first,
    num_leaves, inverse_scales, settings, HAS_PRIOR: tl.constexpr, ELEMENTWISE: tl.constexpr, UNIFORM: tl.constexpr,
    FULL: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """theta, g, m1, m2 -> m1, m2, the copy of theta, and tau where theta was; partial sums of each program and chain."""
    program, chain, num_chains = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    key, last_draw = tl.load(keys + chain), tl.load(draw_at).to(tl.uint32)
    numbers, coefficients = numbers + chain, coefficients + chain * 8 * num_leaves
    along = tl.load(numbers + num_chains).to(tl.float32)
    sigma_along = tl.load(settings + chain * (1 + 6 * num_leaves))
    inverse_scale = tl.load(inverse_scales + chain)
    last = tl.where(tl.load(numbers + 2 * num_chains) > 0, num_chunks, 0)  # a frozen chain is not touched
    square, ratio, cross = tl.zeros([], tl.float64), tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    level, change = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    for chunk in range(program, last, tl.num_programs(0)):
        t = tl.load(chunks + 2 * chunk)
        start = tl.load(chunks + 2 * chunk + 1).to(tl.int64) * SIZE
        size = tl.load(sizes + t)
        row_at = chain.to(tl.int64) * size
        p_at = tl.load(places + t).to(tl.pointer_type(tl.float32)) + row_at
        old_at = tl.load(places + num_leaves + t).to(tl.pointer_type(tl.float32)) + row_at
        m1_at = tl.load(places + 2 * num_leaves + t).to(tl.pointer_type(tl.float32)) + row_at
        m2_at = tl.load(places + 3 * num_leaves + t).to(tl.pointer_type(tl.float32)) + row_at
        g_at = tl.load(gradients + t).to(tl.pointer_type(tl.float32)) + row_at
        e = start + tl.arange(0, SIZE)
        p, g = _load(p_at, e, size, FULL), _load(g_at, e, size, FULL)
        m1, m2 = _load(m1_at, e, size, FULL), _load(m2_at, e, size, FULL)
        row = coefficients + 8 * t
        step_size, eps = tl.load(row).to(tl.float32), tl.load(row + 1).to(tl.float32)
        new1, keep2, new2 = tl.load(row + 2).to(tl.float32), tl.load(row + 3).to(tl.float32), tl.load(row + 4).to(tl.float32)
        sigma, whiten, precision = tl.load(row + 5).to(tl.float32), tl.load(row + 6), tl.load(row + 7)
        index = (tl.load(bases + t) + start // 4 + tl.arange(0, SIZE // 4)).to(tl.uint32)
        noise = normal_block(key, index, last_draw - UNIFORM - (1 if ELEMENTWISE else 0))
        if HAS_PRIOR:
            g += p * (precision * inverse_scale).to(tl.float32)
        # a gradient that is no number, or whose square is none, freezes the chain; the moments of this weight stay clean
        sound = tl.abs(g) < 1.8e19
        u1 = m1 + new1 * (g - m1)
        u2 = keep2 * m2 + new2 * g * g
        u = tl.where(sound, step_size * u1 / (tl.sqrt(u2) + eps), float("nan"))
        m1, m2 = tl.where(sound, u1, m1), tl.where(sound, u2, m2)
        shift = along * u
        if ELEMENTWISE:
            zeta = normal_block(key, index, last_draw - UNIFORM)
            shift += sigma_along.to(tl.float32) * zeta * u
        tau = p + sigma * noise + shift
        _store(m1_at, e, m1, size, FULL)
        _store(m2_at, e, m2, size, FULL)
        _store(old_at, e, p, size, FULL)  # the copy of theta
        _store(p_at, e, tau, size, FULL)
        wide_u = u.to(tl.float64)
        if not FULL:
            wide_u, tau = tl.where(e < size, wide_u, 0.0), tl.where(e < size, tau, 0.0)
        uu = tl.sum(wide_u * wide_u)
        square += uu
        ratio += uu * whiten * whiten
        cross += tl.sum(wide_u * noise.to(tl.float64)) * whiten
        if ELEMENTWISE:  # as noise in units of sigma: the rank-one ratio is of the displacement that was made
            cross += tl.sum(wide_u * wide_u * zeta.to(tl.float64)) * sigma_along * whiten * whiten
        if HAS_PRIOR:
            wide_p, wide_tau = p.to(tl.float64), tau.to(tl.float64)
            level += tl.sum(wide_p * wide_p) * precision
            change += tl.sum((wide_tau - wide_p) * (wide_tau + wide_p)) * precision
    slot, wide = sums + chain * num_sums + first + program, num_sums * num_chains
    tl.store(slot, square)
    tl.store(slot + wide, ratio)
    tl.store(slot + 2 * wide, cross)
    tl.store(slot + 3 * wide, level)
    tl.store(slot + 4 * wide, change)


@triton.jit
def _finish(sums, num_sums, numbers, settings, num_leaves, counts, totals, SIZE: tl.constexpr):
    """One chain: the density ratio of `Prolate.log_q_ratio` from the partial sums; the counts of Adam's steps move on."""
    chain, num_chains = tl.program_id(0), tl.num_programs(0)
    wide = num_sums * num_chains
    sums += chain * num_sums
    square, ratio = total(sums, num_sums, SIZE), total(sums + wide, num_sums, SIZE)
    cross = total(sums + 2 * wide, num_sums, SIZE)
    prior = -0.5 * total(sums + 3 * wide, num_sums, SIZE)
    change = -0.5 * total(sums + 4 * wide, num_sums, SIZE)
    z, sigma_along = tl.load(numbers + chain), tl.load(settings + chain * (1 + 6 * num_leaves))
    log_q = (cross - (1.0 - sigma_along * z) * ratio) * (2.0 / (1.0 + sigma_along * sigma_along * ratio))
    out = totals + chain
    tl.store(out, square)
    tl.store(out + num_chains, tl.sqrt(ratio))
    tl.store(out + 2 * num_chains, log_q)
    tl.store(out + 3 * num_chains, prior)
    tl.store(out + 4 * num_chains, prior + change)
    if chain == 0:
        for start in range(0, num_leaves, SIZE):
            i = start + tl.arange(0, SIZE)
            tl.store(counts + i, tl.load(counts + i, mask=i < num_leaves, other=0) + 1, mask=i < num_leaves)


class OnePassAdam(OnePass):
    """Algorithm 1's proposal for chains that stay where they are (`kernels.backend.Backend`).

    Args:
        params: leaves (chains, ...), contiguous float32. Overwritten by the proposal.
        copy: as many, for the current point.
        memory: Adam's moments, overwritten at each step, and the counts of its steps, which are taken over to the device.
    """

    folds_prior = True

    def __init__(self, params: Leaves, copy: Leaves, memory: AdamMemory, *, elementwise: bool = False) -> None:
        self.params, self.copy, self.memory = params, copy, memory
        self.places = Places(params, copy, memory.exp_avg, memory.exp_avg_sq)
        self._elementwise = elementwise
        device, n, chains = self.places.device, self.places.num_leaves, self.places.num_chains
        self._counts = self.places.put([int(k) for k in memory.step], torch.int64)
        self._keys = Keys(self.places)
        width = sum(launch.width for launch in self.places.launches)
        made: Any = {"dtype": torch.float64, "device": device}
        self._settings = torch.zeros(chains, 1 + _PER_LEAF * n, **made)
        self._coefficients, self._numbers = torch.zeros(chains, n, 8, **made), torch.zeros(3, chains, **made)
        self._sums, self._inverse_scales = torch.zeros(_NUM_SUMS, chains, width, **made), torch.ones(chains, **made)
        self.pulls = torch.zeros(n, **made)
        self._uploaded: Any = None
        self._has_prior = self._has_noise = False

    def key(self) -> tuple[Any, ...]:
        """What is compiled into a CUDA graph: with another value, another graph is needed. Settings are read at each replay."""
        return self, self._has_prior, self._has_noise

    def upload(self, kernel: Any, scale: Setting, precision: list[float] | None) -> None:
        """Send the kernel's settings to the device if they have changed. Does not wait for it."""
        adam, proposal = kernel.direction, kernel.proposal
        settings = kernel, scale, precision
        if is_same(self._uploaded, settings):
            return
        self._uploaded = settings
        n, chains = self.places.num_leaves, self.places.num_chains
        lr, sigma = (by_leaf_and_chain(spread_settings(s, n), chains) for s in (adam.lr, proposal.sigma))
        along = by_leaf_and_chain([proposal.sigma_along], chains)[0]
        rest = zip(spread(adam.betas, n), spread(adam.eps, n), precision or [0.0] * n, strict=True)
        common = [(beta1, beta2, eps, q) for (beta1, beta2), eps, q in rest]
        rows = [
            [along[c], *(x for i, (b1, b2, eps, q) in enumerate(common) for x in (lr[i][c], b1, b2, eps, sigma[i][c], q))]
            for c in range(chains)
        ]
        self._settings.copy_(torch.tensor(rows, dtype=torch.float64), non_blocking=True)
        scales = by_leaf_and_chain([scale], chains)[0]
        self._inverse_scales.copy_(torch.tensor([1 / s for s in scales], dtype=torch.float64), non_blocking=True)
        self.pulls.copy_(torch.tensor([q / scales[0] for q in precision or [0.0] * n], dtype=torch.float64), non_blocking=True)
        self._has_prior = any(precision or ())
        self._has_noise = all(s > 0 for row in sigma for s in row)

    @contextmanager
    def ahead(self, generator: Randomness) -> Iterator[None]:
        """Nothing to do before the loss is evaluated."""
        yield

    def propose(
        self, kernel: Any, params: Leaves, here: Evaluation, memory: AdamMemory, generator: Randomness, frozen_at: Tensor
    ) -> tuple[Move, AdamMemory]:
        """theta -> tau, in place, for every chain that may move. `upload` must have seen the kernel's settings."""
        assert here.grad is not None
        places, n = self.places, self.places.num_leaves
        has_uniform = int(kernel.acceptance.needs_noise and kernel.acceptance.is_metropolis)
        keys, draw = self._keys.next(generator, 2 + int(self._elementwise) + has_uniform)
        grad = contiguous(here.grad)  # alive until the pass is launched
        gradients = places.point_at(grad)
        totals = torch.empty(_TOTALS, places.num_chains, dtype=torch.float64, device=places.device)
        losses = here.losses.contiguous()
        _prepare[(places.num_chains,)](
            keys, draw, self._settings, self._counts, self._coefficients, self._numbers, n, losses, losses[0].numel(),
            frozen_at, totals, ELEMENTWISE=self._elementwise, UNIFORM=has_uniform, SIZE=128,
        )  # fmt: skip
        first = 0
        for chunks, num_chunks, width, is_full in places.launches:
            _propose[(width, places.num_chains)](
                places.table, gradients, places.sizes, places.bases, chunks, num_chunks, self._coefficients, self._numbers,
                keys, draw, self._sums, self._sums.shape[2], first, n, self._inverse_scales, self._settings,
                HAS_PRIOR=self._has_prior, ELEMENTWISE=self._elementwise, UNIFORM=has_uniform, FULL=is_full,
                SIZE=BLOCK, num_warps=WARPS,
            )  # fmt: skip
            first += width
        _finish[(places.num_chains,)](
            self._sums, self._sums.shape[2], self._numbers, self._settings, n, self._counts, totals, SIZE=1024,
            num_warps=WARPS,
        )  # fmt: skip
        square, ratio, log_q, prior, prior_there, log_uniform = totals.unbind()
        move = Move(
            self.params,
            (square,),
            log_q_ratio=log_q,
            step_to_noise=ratio if self._has_noise else None,
            log_uniform=log_uniform if has_uniform else None,
            log_prior=(prior, prior_there) if self._has_prior else None,
            in_place=_AdamMove(places, self._numbers[2], self._counts),
        )
        return move, kernel.counted(memory)  # the counts on the host follow those on the device


class _AdamMove(InPlaceMove):
    """A proposal whose gradient Adam has counted."""

    def __init__(self, places: Places, moved: Tensor, counts: Tensor) -> None:
        super().__init__(places, moved)
        self._counts = counts

    def undo(self) -> None:
        super().undo()
        self._counts.sub_(1)
