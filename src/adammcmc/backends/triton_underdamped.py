r"""The underdamped kernel in three passes over the weights of 1..C chains, where they lie (Triton).

    depart:  p <- c p + sqrt(1 - c^2) xi,   theta -> tau = theta + h A^1/2 p1,    p1 = p - (scale h / 2) A^1/2 g(theta)
    arrive:  p2 = p1 - (scale h / 2) A^1/2 g(tau);   log q ratio = (|p|^2 - |p2|^2) / 2
    turn:    p <- p2 where accepted, -p where rejected

One momentum is stored: p1 and p2 are computed again from p and the two gradients where they are needed. The same numbers as
`kernels.hamiltonian`, given the same noise. A Gaussian prior's part of the gradient and of U is added on the way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adammcmc.backends.philox import normal_block
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
from adammcmc.kernels.proposal import Move
from adammcmc.target.leaves import Leaves, Setting, spread_settings
from adammcmc.target.potential import Evaluation
from adammcmc.target.randomness import Randomness

__all__ = ["OnePassUnderdamped"]

_NUM_SUMS = 4  # |p|^2, |p1|^2, precision |theta|^2, precision (|tau|^2 - |theta|^2)
_PER_LEAF = 4  # h, c, sqrt(1 - c^2), precision


@triton.jit
def _depart(
    places, gradients, roots, sizes, bases, chunks, num_chunks, settings, keys, draw_at, sums, num_sums, num_leaves, scales,
    HAS_PRIOR: tl.constexpr, HAS_ROOT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """theta, g, p -> p (refreshed), the copy of theta, and tau where theta was; partial sums of each program and chain."""
    program, chain, num_chains = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    key, draw, scale = tl.load(keys + chain), tl.load(draw_at).to(tl.uint32), tl.load(scales + chain)
    before = tl.zeros([], tl.float64)
    kicked = tl.zeros([], tl.float64)
    level = tl.zeros([], tl.float64)
    change = tl.zeros([], tl.float64)
    for chunk in range(program, num_chunks, tl.num_programs(0)):
        t = tl.load(chunks + 2 * chunk)
        start = tl.load(chunks + 2 * chunk + 1).to(tl.int64) * SIZE
        size = tl.load(sizes + t)
        row_at = chain.to(tl.int64) * size
        x_at = tl.load(places + t).to(tl.pointer_type(tl.float32)) + row_at
        old_at = tl.load(places + num_leaves + t).to(tl.pointer_type(tl.float32)) + row_at
        p_at = tl.load(places + 2 * num_leaves + t).to(tl.pointer_type(tl.float32)) + row_at
        g_at = tl.load(gradients + t).to(tl.pointer_type(tl.float32)) + row_at
        e = start + tl.arange(0, SIZE)
        there = e < size
        x, g = tl.load(x_at + e, mask=there, other=0.0), tl.load(g_at + e, mask=there, other=0.0)
        p = tl.load(p_at + e, mask=there, other=0.0)
        row = settings + (chain * num_leaves + t) * 4
        h, precision = tl.load(row), tl.load(row + 3)
        index = (tl.load(bases + t) + start // 4 + tl.arange(0, SIZE // 4)).to(tl.uint32)
        noise = normal_block(key, index, draw)
        p = tl.load(row + 1).to(tl.float32) * p + tl.load(row + 2).to(tl.float32) * noise
        drift = tl.zeros([SIZE], tl.float32) + h.to(tl.float32)
        if HAS_ROOT:
            drift *= tl.load(tl.load(roots + t).to(tl.pointer_type(tl.float32)) + e, mask=there, other=0.0)
        if HAS_PRIOR:
            g += x * (precision / scale).to(tl.float32)
        half = p - g * drift * (scale / 2).to(tl.float32)
        tau = x + half * drift
        tl.store(p_at + e, p, mask=there)
        tl.store(old_at + e, x, mask=there)
        tl.store(x_at + e, tau, mask=there)
        wide, wide_half = tl.where(there, p, 0.0).to(tl.float64), tl.where(there, half, 0.0).to(tl.float64)
        before += tl.sum(wide * wide)
        kicked += tl.sum(wide_half * wide_half)
        if HAS_PRIOR:
            wide_x, wide_tau = x.to(tl.float64), tl.where(there, tau, 0.0).to(tl.float64)
            level += tl.sum(wide_x * wide_x) * precision
            change += tl.sum((wide_tau - wide_x) * (wide_tau + wide_x)) * precision
    slot = sums + chain * num_sums + program
    width = num_sums * num_chains
    tl.store(slot, before)
    tl.store(slot + width, kicked)
    tl.store(slot + 2 * width, level)
    tl.store(slot + 3 * width, change)


@triton.jit
def _arrive(
    places, gradients, fresh, roots, sizes, chunks, num_chunks, settings, sums, num_sums, num_leaves, scales, accepted_at,
    HAS_PRIOR: tl.constexpr, HAS_ROOT: tl.constexpr, TURN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The last half kick: partial sums of |p2|^2; or, to turn, p2 in the place of p where accepted, -p where not."""
    program, chain = tl.program_id(0), tl.program_id(1)
    scale = tl.load(scales + chain)
    accepted = False
    if TURN:
        accepted = tl.load(accepted_at + chain) > 0
    found = tl.zeros([], tl.float64)
    for chunk in range(program, num_chunks, tl.num_programs(0)):
        t = tl.load(chunks + 2 * chunk)
        start = tl.load(chunks + 2 * chunk + 1).to(tl.int64) * SIZE
        size = tl.load(sizes + t)
        row_at = chain.to(tl.int64) * size
        e = start + tl.arange(0, SIZE)
        there = e < size
        p_at = tl.load(places + 2 * num_leaves + t).to(tl.pointer_type(tl.float32)) + row_at
        p = tl.load(p_at + e, mask=there, other=0.0)
        g = tl.load(tl.load(gradients + t).to(tl.pointer_type(tl.float32)) + row_at + e, mask=there, other=0.0)
        f = tl.load(tl.load(fresh + t).to(tl.pointer_type(tl.float32)) + row_at + e, mask=there, other=0.0)
        row = settings + (chain * num_leaves + t) * 4
        kick = tl.zeros([SIZE], tl.float32) + tl.load(row).to(tl.float32)
        if HAS_ROOT:
            kick *= tl.load(tl.load(roots + t).to(tl.pointer_type(tl.float32)) + e, mask=there, other=0.0)
        if HAS_PRIOR:
            pull = (tl.load(row + 3) / scale).to(tl.float32)
            old_at = tl.load(places + num_leaves + t).to(tl.pointer_type(tl.float32)) + row_at
            x_at = tl.load(places + t).to(tl.pointer_type(tl.float32)) + row_at
            g += pull * tl.load(old_at + e, mask=there, other=0.0)
            f += pull * tl.load(x_at + e, mask=there, other=0.0)
        kick *= (scale / 2).to(tl.float32)
        after = p - g * kick - f * kick
        if TURN:
            tl.store(p_at + e, tl.where(accepted, after, -p), mask=there)
        else:
            wide = tl.where(there, after, 0.0).to(tl.float64)
            found += tl.sum(wide * wide)
    if not TURN:
        tl.store(sums + chain * num_sums + program, found)


@triton.jit
def _finish(sums, num_sums, totals, SIZE: tl.constexpr):
    """One chain: the totals of `_depart`: |p|^2, |p1|^2, log prior at theta and at tau."""
    chain, num_chains = tl.program_id(0), tl.num_programs(0)
    width = num_sums * num_chains
    sums += chain * num_sums
    prior = -0.5 * total(sums + 2 * width, num_sums, SIZE)
    tl.store(totals + chain, total(sums, num_sums, SIZE))
    tl.store(totals + num_chains + chain, total(sums + width, num_sums, SIZE))
    tl.store(totals + 2 * num_chains + chain, prior)
    tl.store(totals + 3 * num_chains + chain, prior - 0.5 * total(sums + 3 * width, num_sums, SIZE))


class OnePassUnderdamped(OnePass):
    """The underdamped step of chains that stay where they are (`kernels.backend.UnderdampedBackend`).

    Args:
        params: leaves (chains, ...), contiguous float32. Overwritten by the proposal.
        copy: as many, for the current point.
        momentum: as many; p, overwritten at each step.
        preconditioner: diagonal A, leaves (...), without a chain axis; None is the identity.
    """

    folds_prior = True

    def __init__(self, params: Leaves, copy: Leaves, momentum: Leaves, preconditioner: Leaves | None) -> None:
        self.params, self.copy, self.momentum = params, copy, momentum
        self.places = Places(params, copy, momentum)
        self.preconditioner = preconditioner
        self._roots = None if preconditioner is None else tuple(a.float().sqrt().contiguous() for a in preconditioner)
        addresses = [0] if self._roots is None else [r.data_ptr() for r in self._roots]
        self._root_table = self.places.put(addresses, torch.int64)
        device, n, chains = self.places.device, self.places.num_leaves, self.places.num_chains
        self._keys = Keys(self.places)
        made: Any = {"dtype": torch.float64, "device": device}
        self._settings, self._scales = torch.zeros(chains, n, _PER_LEAF, **made), torch.ones(chains, **made)
        self._sums = torch.zeros(_NUM_SUMS, chains, self.places.everything.width, **made)
        self._arrivals = torch.zeros(chains, self.places.everything.width, **made)
        self._moved = torch.ones(chains, **made)
        self.pulls = torch.zeros(n, **made)
        self._uploaded: Any = None
        self._has_prior = False

    def key(self) -> tuple[Any, ...]:
        """What is compiled into a CUDA graph."""
        return self, self._has_prior

    def upload(self, kernel: Any, scale: Setting, precision: list[float] | None) -> None:
        """Send the kernel's settings to the device if they have changed. Does not wait for it."""
        settings = kernel.step_size, kernel.friction, scale, precision
        if is_same(self._uploaded, settings):
            return
        self._uploaded = settings
        n, chains = self.places.num_leaves, self.places.num_chains
        h = by_leaf_and_chain(spread_settings(kernel.step_size, n), chains)
        kept, fresh = (by_leaf_and_chain(column, chains) for column in zip(*kernel.kept(n), strict=True))
        rows = [[[h[i][c], kept[i][c], fresh[i][c], q] for i, q in enumerate(precision or [0.0] * n)] for c in range(chains)]
        scales = by_leaf_and_chain([scale], chains)[0]
        self._settings.copy_(torch.tensor(rows, dtype=torch.float64), non_blocking=True)
        self._scales.copy_(torch.tensor(scales, dtype=torch.float64), non_blocking=True)
        self.pulls.copy_(torch.tensor([q / scales[0] for q in precision or [0.0] * n], dtype=torch.float64), non_blocking=True)
        self._has_prior = any(precision or ())

    def depart(self, here: Evaluation, generator: Randomness) -> Departure:
        """theta -> tau, in place. `upload` must have seen the kernel's settings."""
        assert here.grad is not None
        places = self.places
        keys, draw = self._keys.next(generator, 1)
        grad = contiguous(here.grad)
        gradients = places.point_at(grad)
        totals = torch.empty(_NUM_SUMS, places.num_chains, dtype=torch.float64, device=places.device)
        launch = places.everything
        _depart[(launch.width, places.num_chains)](
            places.table, gradients, self._root_table, places.sizes, places.bases, launch.chunks, launch.num_chunks,
            self._settings, keys, draw, self._sums, self._sums.shape[2], places.num_leaves, self._scales,
            HAS_PRIOR=self._has_prior, HAS_ROOT=self._roots is not None, SIZE=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        _finish[(places.num_chains,)](self._sums, self._sums.shape[2], totals, SIZE=1024, num_warps=WARPS)
        return Departure(self, grad, gradients, totals)

    def arrive(self, gradients: Tensor, fresh: Tensor, accepted: Tensor | None) -> Tensor:
        """|p2|^2 of each program and chain; with `accepted`, the momentum after the decision is written instead."""
        places, launch = self.places, self.places.everything
        _arrive[(launch.width, places.num_chains)](
            places.table, gradients, fresh, self._root_table, places.sizes, launch.chunks, launch.num_chunks, self._settings,
            self._arrivals, self._arrivals.shape[1], places.num_leaves, self._scales,
            self._moved if accepted is None else accepted, HAS_PRIOR=self._has_prior, HAS_ROOT=self._roots is not None,
            TURN=accepted is not None, SIZE=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return self._arrivals


class Departure(InPlaceMove):
    """A step on its way: the move, its arrival, and the momentum after the decision."""

    def __init__(self, backend: OnePassUnderdamped, grad: Leaves, gradients: Tensor, totals: Tensor) -> None:
        super().__init__(backend.places, backend._moved)
        self._backend, self._grad, self._gradients = backend, grad, gradients
        """The gradient at theta, which must live until the step is done, and its addresses."""
        self._before, kicked, prior, prior_there = totals.unbind()
        self._fresh: Tensor | None = None
        log_prior = (prior, prior_there) if backend._has_prior else None
        self.move = Move(backend.params, (kicked,), log_prior=log_prior, in_place=self)

    def arrive(self, there: Evaluation) -> Tensor:
        """log q ratio, (|p|^2 - |p2|^2) / 2."""
        assert there.grad is not None
        self._held = contiguous(there.grad)
        self._fresh = self._places.point_at(self._held)
        return 0.5 * (self._before - self._backend.arrive(self._gradients, self._fresh, None).sum(1))

    def keep(self, is_accepted: Tensor, new_grad: Leaves | None, old_grad: Leaves | None) -> Leaves | None:
        # before the old gradient is overwritten; without an arrival, no chain was accepted
        fresh = self._gradients if self._fresh is None else self._fresh
        self._backend.arrive(self._gradients, fresh, is_accepted.view(torch.uint8))
        return super().keep(is_accepted, new_grad, old_grad)
