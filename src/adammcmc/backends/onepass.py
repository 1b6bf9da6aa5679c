r"""Algorithm 1 in one pass over the parameters, on the GPU (Triton), where they lie.

A step after the gradient g is known reads theta, g, m1, m2 once and writes m1, m2, a copy of theta, and tau in theta's place:

    m1 <- m1 + (1 - beta1) (g - m1),   m2 <- beta2 m2 + (1 - beta2) g^2,   u = lr m1hat / (sqrt(m2hat) + eps)
    tau = theta + sigma eps + (sigma_along z - 1) u;      sums of u^2, u eps / sigma, and of a Gaussian prior, in float64

eight passes over memory where Adam makes seven. (For the released code's proposal, `proposal.Elementwise`, z is a number for
each weight, and its part of u.d is in the second sum.) After the loss at tau is known, one small kernel decides, and one
copies theta back if the proposal was refused (for fixed data: keeps the new gradient if it was not). Nothing waits for the
host.

The noise is counter-based: eps of weight e is a function of (key, e) alone, Philox-4x32-10 and Box-Muller, and the key of a
step comes from the sampler's generator. How the kernels are launched has no influence on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adammcmc.backends.fused import Settings
from adammcmc.backends.philox import normals, wide_uniform

__all__ = ["OnePass"]

_BLOCK = 1024  # weights that a program works on at once
_DECISIVE = 1024  # losses that are read at once
_NUM_SUMS = 5  # |u|^2, |u|^2 / sigma^2, u.eps / sigma, precision |theta|^2, precision (|tau|^2 - |theta|^2)
_NUM_COEFFICIENTS = 8
_WARPS = 4
_WAVES = 8  # programs for each multiprocessor
_SMALL = 1 << 20  # weights; below, one launch is faster than two with aligned loads in the first


# --- the kernels ------------------------------------------------------------------------------------------------------------


@triton.jit
def _prepare(
    key_at, settings, counts, coefficients, numbers, num_tensors, losses, num_losses, frozen_at, ELEMENTWISE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What is the same for all weights of a tensor (bias correction), and what for all: z, the uniform number, and whether
    the chain may move (it is not frozen, and the loss where it stands is a number)."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, num_losses, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(losses + i, mask=i < num_losses, other=0.0).to(tl.float64)
    may_move = (tl.abs(tl.sum(total)) < float("inf")) & (tl.load(frozen_at) < 0)
    tl.store(numbers + 3, may_move.to(tl.float64))
    key = tl.load(key_at)
    zero = tl.zeros([1], tl.uint32)
    a, b, c, d = tl.philox(key, zero, zero, zero + 1, zero)  # the third counter sets these apart from the weights' numbers
    radius = tl.sqrt(-2.0 * tl.log(wide_uniform(a, b)))
    z = radius * tl.cos(6.283185307179586 * (wide_uniform(c, d) - 0.5))
    a, b, c, d = tl.philox(key, zero, zero, zero + 2, zero)
    one = tl.arange(0, 1)
    if ELEMENTWISE:
        z = z * 0  # each weight has its own
    tl.store(numbers + one, z)
    tl.store(numbers + 1 + one, tl.load(settings + one) * z - 1.0)  # the first setting is sigma_along
    tl.store(numbers + 2 + one, tl.log(wide_uniform(a, b)))
    for start in range(0, num_tensors, BLOCK):
        t = start + tl.arange(0, BLOCK)
        there = t < num_tensors
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
        out = coefficients + 8 * t
        tl.store(out, lr * root / rest, mask=there)
        tl.store(out + 1, eps * root, mask=there)
        tl.store(out + 2, 1.0 - beta1, mask=there)
        tl.store(out + 3, beta2, mask=there)
        tl.store(out + 4, 1.0 - beta2, mask=there)
        tl.store(out + 5, sigma, mask=there)
        tl.store(out + 6, tl.where(sigma > 0, 1.0 / tl.where(sigma > 0, sigma, 1.0), 0.0), mask=there)
        tl.store(out + 7, precision, mask=there)


@triton.jit
def _propose(
    places, gradients, sizes, bases, chunks, num_chunks, coefficients, numbers, key_at, sums, num_sums, first,
    num_tensors, inverse_scale, settings, HAS_PRIOR: tl.constexpr, ELEMENTWISE: tl.constexpr, FULL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """theta, g, m1, m2 -> m1, m2, the copy of theta, and tau where theta was; partial sums of each program."""
    program = tl.program_id(0)
    key = tl.load(key_at)
    along = tl.load(numbers + 1).to(tl.float32)
    last = tl.where(tl.load(numbers + 3) > 0, num_chunks, 0)  # a frozen chain is not touched
    square = tl.zeros([], tl.float64)
    ratio = tl.zeros([], tl.float64)
    cross = tl.zeros([], tl.float64)
    level = tl.zeros([], tl.float64)
    change = tl.zeros([], tl.float64)
    for chunk in range(program, last, tl.num_programs(0)):
        t = tl.load(chunks + 2 * chunk)
        start = tl.load(chunks + 2 * chunk + 1).to(tl.int64) * BLOCK
        p_at = tl.load(places + t).to(tl.pointer_type(tl.float32))
        m1_at = tl.load(places + num_tensors + t).to(tl.pointer_type(tl.float32))
        m2_at = tl.load(places + 2 * num_tensors + t).to(tl.pointer_type(tl.float32))
        old_at = tl.load(places + 3 * num_tensors + t).to(tl.pointer_type(tl.float32))
        g_at = tl.load(gradients + t).to(tl.pointer_type(tl.float32))
        e = start + tl.arange(0, BLOCK)
        if FULL:
            p_at, m1_at, m2_at = tl.multiple_of(p_at, 16), tl.multiple_of(m1_at, 16), tl.multiple_of(m2_at, 16)
            old_at, g_at = tl.multiple_of(old_at, 16), tl.multiple_of(g_at, 16)
            p, g, m1, m2 = tl.load(p_at + e), tl.load(g_at + e), tl.load(m1_at + e), tl.load(m2_at + e)
        else:
            there = e < tl.load(sizes + t)
            p, g = tl.load(p_at + e, mask=there, other=0.0), tl.load(g_at + e, mask=there, other=0.0)
            m1, m2 = tl.load(m1_at + e, mask=there, other=0.0), tl.load(m2_at + e, mask=there, other=0.0)
        row = coefficients + 8 * t
        step_size, eps = tl.load(row).to(tl.float32), tl.load(row + 1).to(tl.float32)
        new1, keep2, new2 = tl.load(row + 2).to(tl.float32), tl.load(row + 3).to(tl.float32), tl.load(row + 4).to(tl.float32)
        sigma, whiten, precision = tl.load(row + 5).to(tl.float32), tl.load(row + 6), tl.load(row + 7)
        index = (tl.load(bases + t) + start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        n0, n1, n2, n3 = normals(key, index, 0)
        noise = tl.interleave(tl.interleave(n0, n2), tl.interleave(n1, n3))
        if HAS_PRIOR:
            g += p * (precision * inverse_scale).to(tl.float32)
        # a gradient that is no number, or whose square is none, freezes the chain; the moments of this weight stay clean
        sound = tl.abs(g) < 1.8e19
        u1 = m1 + new1 * (g - m1)
        u2 = keep2 * m2 + new2 * g * g
        u = step_size * u1 / (tl.sqrt(u2) + eps)
        u = tl.where(sound, u, float("nan"))
        m1, m2 = tl.where(sound, u1, m1), tl.where(sound, u2, m2)
        shift = along * u
        if ELEMENTWISE:
            n0, n1, n2, n3 = normals(key, index, 1)
            zeta = tl.interleave(tl.interleave(n0, n2), tl.interleave(n1, n3))
            shift += tl.load(settings).to(tl.float32) * zeta * u
        tau = p + sigma * noise + shift
        if FULL:
            tl.store(m1_at + e, m1)
            tl.store(m2_at + e, m2)
            tl.store(old_at + e, p)
            tl.store(p_at + e, tau)
            wide_u = u.to(tl.float64)
        else:
            tl.store(m1_at + e, m1, mask=there)
            tl.store(m2_at + e, m2, mask=there)
            tl.store(old_at + e, p, mask=there)
            tl.store(p_at + e, tau, mask=there)
            wide_u = tl.where(there, u, 0.0).to(tl.float64)
            tau = tl.where(there, tau, 0.0)
        uu = tl.sum(wide_u * wide_u)
        square += uu
        ratio += uu * whiten * whiten
        cross += tl.sum(wide_u * noise.to(tl.float64)) * whiten
        if ELEMENTWISE:  # as noise in units of sigma: the rank-one ratio sees the displacement that was made
            cross += tl.sum(wide_u * wide_u * zeta.to(tl.float64)) * tl.load(settings) * whiten * whiten
        if HAS_PRIOR:
            wide_p, wide_tau = p.to(tl.float64), tau.to(tl.float64)
            level += tl.sum(wide_p * wide_p) * precision
            change += tl.sum((wide_tau - wide_p) * (wide_tau + wide_p)) * precision
    slot = sums + first + program
    tl.store(slot, square)
    tl.store(slot + num_sums, ratio)
    tl.store(slot + 2 * num_sums, cross)
    tl.store(slot + 3 * num_sums, level)
    tl.store(slot + 4 * num_sums, change)


@triton.jit
def _total(sums, num_sums, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, num_sums, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(sums + i, mask=i < num_sums, other=0.0)
    return tl.sum(total)


@triton.jit
def _decide(
    sums, num_sums, numbers, settings, here, there, num_losses, log_prior_here, log_prior_there, frozen_at, clock, counts,
    num_tensors, slot_at, rows, num_rows, flags, action, sum_rates, scale, noise_scale, num_examples,
    HAS_PRIOR: tl.constexpr, LOOKS: tl.constexpr, FIXED: tl.constexpr, HAS_SIGMA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The Metropolis-Hastings test and all that is reported, as `kernel.settle` and `Minibatch` (or `AlwaysAccept`) have it."""
    square = _total(sums, num_sums, BLOCK)
    ratio = _total(sums + num_sums, num_sums, BLOCK)
    cross = _total(sums + 2 * num_sums, num_sums, BLOCK)
    if HAS_PRIOR:
        prior_here = -0.5 * _total(sums + 3 * num_sums, num_sums, BLOCK)
        prior_change = -0.5 * _total(sums + 4 * num_sums, num_sums, BLOCK)
    else:
        prior_here = tl.load(log_prior_here)
        prior_change = tl.load(log_prior_there) - prior_here
    z, log_uniform, sigma_along = tl.load(numbers), tl.load(numbers + 2), tl.load(settings)
    nan = float("nan")

    current = tl.zeros([BLOCK], tl.float64)
    proposed = tl.zeros([BLOCK], tl.float64)
    for start in range(0, num_losses, BLOCK):
        i = start + tl.arange(0, BLOCK)
        current += tl.load(here + i, mask=i < num_losses, other=0.0).to(tl.float64)
        if LOOKS:
            proposed += tl.load(there + i, mask=i < num_losses, other=0.0).to(tl.float64)
    loss = tl.sum(current) / num_losses
    was_free = tl.load(frozen_at) < 0
    level = square + loss + prior_here
    healthy = (tl.abs(level) < float("inf")) & was_free
    if LOOKS:
        proposed_loss = tl.sum(proposed) / num_losses
        log_q = (cross - (1.0 - sigma_along * z) * ratio) * (2.0 / (1.0 + sigma_along * sigma_along * ratio))
        # the losses are subtracted one by one: see `target.potential_difference`
        moved = tl.zeros([BLOCK], tl.float64)
        for start in range(0, num_losses, BLOCK):
            i = start + tl.arange(0, BLOCK)
            new = tl.load(there + i, mask=i < num_losses, other=0.0).to(tl.float64)
            moved += new - tl.load(here + i, mask=i < num_losses, other=0.0).to(tl.float64)
        mean = tl.sum(moved) / num_losses
        log_ratio = log_q - (scale * mean - prior_change)
        finite = tl.abs(log_ratio) < float("inf")
        accepted = (log_uniform < log_ratio) & finite & healthy
        rate = tl.where(healthy & finite, tl.exp(tl.minimum(log_ratio, 0.0)), 0.0)
        spread = tl.zeros([BLOCK], tl.float64)
        for start in range(0, num_losses, BLOCK):
            i = start + tl.arange(0, BLOCK)
            new = tl.load(there + i, mask=i < num_losses, other=0.0).to(tl.float64)
            off = new - tl.load(here + i, mask=i < num_losses, other=0.0).to(tl.float64) - mean
            spread += tl.where(i < num_losses, off * off, 0.0)
        # zero for fixed data; NaN where only a mean is known, by a noise scale of NaN
        noise = tl.sqrt(tl.sum(spread) / tl.maximum(num_losses - 1, 1)) * noise_scale
        if FIXED:
            for start in range(0, num_losses, BLOCK):
                i = start + tl.arange(0, BLOCK)
                new = tl.load(there + i, mask=i < num_losses, other=0.0)
                old = tl.load(here + i, mask=i < num_losses, other=0.0)
                tl.store(here + i, tl.where(accepted, new, old), mask=i < num_losses)
            if not HAS_PRIOR:
                tl.store(log_prior_here, prior_here + tl.where(accepted, prior_change, 0.0))
    else:
        finite = tl.abs(prior_change) < float("inf")
        accepted = finite & healthy
        rate = accepted.to(tl.float64)
        proposed_loss = nan * loss
        log_q = nan * loss
        log_ratio = nan * loss
        noise = nan * loss
    step = tl.load(clock)
    tl.store(frozen_at, tl.where(was_free & (healthy == 0), step, tl.load(frozen_at)))
    tl.store(clock, step + 1)
    # nothing to do for a chain that was not touched; else 1: put theta back, 2: the proposal stays
    tl.store(action, tl.where(tl.load(numbers + 3) > 0, tl.where(accepted, 2, 1), 0))
    tl.store(sum_rates, tl.load(sum_rates) + rate)
    tl.store(flags, accepted.to(tl.uint8))
    tl.store(flags + 1, finite.to(tl.uint8))
    slot = tl.load(slot_at)
    row = rows + 11 * slot
    tl.store(slot_at, (slot + 1) % num_rows)
    tl.store(row, loss)
    tl.store(row + 1, proposed_loss)
    tl.store(row + 2, log_q)
    tl.store(row + 3, log_ratio)
    tl.store(row + 4, rate)
    tl.store(row + 5, accepted.to(tl.float64))
    tl.store(row + 6, finite.to(tl.float64))
    tl.store(row + 7, num_examples)
    tl.store(row + 8, scale * loss - prior_here)
    if HAS_SIGMA:
        tl.store(row + 9, tl.sqrt(ratio))
    else:
        tl.store(row + 9, nan * loss)
    tl.store(row + 10, noise)
    for start in range(0, num_tensors, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(counts + i, tl.load(counts + i, mask=i < num_tensors, other=0) + 1, mask=i < num_tensors)


@triton.jit
def _copy(
    places, gradients, fresh, sizes, chunks, num_chunks, num_tensors, action_at, FIXED: tl.constexpr, BLOCK: tl.constexpr
):
    """After the decision: theta back to its place (refused), or the new gradient to the place of the old one (accepted)."""
    action = tl.load(action_at)
    last = tl.where(action == 1, num_chunks, 0)
    if FIXED:
        last = tl.where(action > 0, num_chunks, 0)
    for chunk in range(tl.program_id(0), last, tl.num_programs(0)):
        t = tl.load(chunks + 2 * chunk)
        e = tl.load(chunks + 2 * chunk + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        there = e < tl.load(sizes + t)
        source, target = tl.load(places + 3 * num_tensors + t), tl.load(places + t)
        if FIXED:
            source = tl.where(action == 2, tl.load(fresh + t), source)
            target = tl.where(action == 2, tl.load(gradients + t), target)
        values = tl.load(source.to(tl.pointer_type(tl.float32)) + e, mask=there)
        tl.store(target.to(tl.pointer_type(tl.float32)) + e, values, mask=there)


@triton.jit
def _products(places, gradients, sizes, coefficients, out, inverse_scale, BLOCK: tl.constexpr):
    """theta . grad V of each tensor, one program each; a Gaussian prior's part included."""
    t = tl.program_id(0)
    p_at = tl.load(places + t).to(tl.pointer_type(tl.float32))
    g_at = tl.load(gradients + t).to(tl.pointer_type(tl.float32))
    size = tl.load(sizes + t)
    pull = tl.load(coefficients + 8 * t + 7) * inverse_scale
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, size, BLOCK):
        e = start + tl.arange(0, BLOCK)
        p = tl.load(p_at + e, mask=e < size, other=0.0).to(tl.float64)
        total += p * (tl.load(g_at + e, mask=e < size, other=0.0).to(tl.float64) + pull * p)
    tl.store(out + t, tl.sum(total))


# --- their host -------------------------------------------------------------------------------------------------------------


class OnePass:
    """One chain of Algorithm 1 over parameters that stay where they are; moments, the copy of theta and counts on the device.

    Args:
        params: contiguous float32 tensors on one device.
        exp_avg: m1, likewise shaped; overwritten at each step.
        exp_avg_sq: m2.
        backup: where theta is kept while tau is in its place.
        counts: steps of Adam that each parameter has taken.
        num_steps: of the chain.
        frozen_at: (1,), int64, the flag of the sampler.
        sum_rates: (1,), float64, the sampler's running sum of acceptance rates.
        fixed: data are fixed: the loss and the gradient at theta are kept for the next step.
        elementwise: the released code's noise along the step, see `proposal.Elementwise`.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        exp_avg: Sequence[Tensor],
        exp_avg_sq: Sequence[Tensor],
        backup: Sequence[Tensor],
        *,
        counts: Sequence[int],
        num_steps: int,
        frozen_at: Tensor,
        sum_rates: Tensor,
        fixed: bool,
        elementwise: bool = False,
    ) -> None:
        device = params[0].device
        self._elementwise = elementwise
        self.device, self.fixed, self.num_tensors = device, fixed, len(params)
        self.backup = list(backup)
        self.largest = max(p.numel() for p in params)
        """The size of the largest tensor."""
        self._held = list(params), list(exp_avg), list(exp_avg_sq), self.backup  # what the addresses below belong to
        sizes = [p.numel() for p in params]
        bases, total = [], 0
        for size in sizes:
            bases.append(total)
            total += (size + 3) // 4  # four numbers come at once
        if total >= 1 << 32:
            raise ValueError(f"the counter of the noise has room for 2^34 weights, got {sum(sizes)}.")
        addresses = [[x.data_ptr() for x in group] for group in self._held]
        aligned = [all(group[t] % 16 == 0 for group in addresses) for t in range(len(params))]
        everything = [(t, c) for t, size in enumerate(sizes) for c in range(-(-size // _BLOCK))]
        is_small = sum(sizes) < _SMALL
        full = [(t, c) for t, c in everything if aligned[t] and (c + 1) * _BLOCK <= sizes[t] and not is_small]
        rest = sorted(set(everything) - set(full)) if full else everything

        def table(values: Any, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        self._places = table(addresses, torch.int64)
        self._sizes, self._bases = table(sizes, torch.int64), table(bases, torch.int64)
        self._launches = [(table(c, torch.int32), len(c), is_full) for c, is_full in ((full, True), (rest, False)) if c]
        self._everything = table(everything, torch.int32), len(everything)
        self._counts = table([int(k) for k in counts], torch.int64)
        self.clock = table([num_steps], torch.int64)
        self._frozen_at, self._sum_rates = frozen_at, sum_rates
        self._coefficients = torch.zeros(len(params), _NUM_COEFFICIENTS, dtype=torch.float64, device=device)
        self._numbers = torch.zeros(4, dtype=torch.float64, device=device)
        self._widths = [min(n, self._num_programs()) for _, n, _ in self._launches]
        self._sums = torch.zeros(_NUM_SUMS, sum(self._widths), dtype=torch.float64, device=device)
        self._action = torch.zeros(1, dtype=torch.int32, device=device)
        self.no_prior = torch.zeros(1, dtype=torch.float64, device=device)
        self._settings = torch.zeros(1 + 6 * len(params), dtype=torch.float64, device=device)
        self._told: Settings | None = None
        self.first_row = torch.zeros(1, dtype=torch.int64, device=device)
        """A slot for rows of one step only."""

    def _num_programs(self) -> int:
        if self.device.type != "cuda":
            return 3  # under the interpreter: a few, so that the loops are seen to work
        return torch.cuda.get_device_properties(self.device).multi_processor_count * _WAVES

    def tell(self, settings: Settings) -> None:
        """The present settings; sent to the device only when they have changed. Does not wait for it."""
        if settings == self._told:
            return
        columns = zip(
            settings.lr,
            (b[0] for b in settings.betas),
            (b[1] for b in settings.betas),
            settings.eps,
            settings.sigma,
            settings.precision,
            strict=True,
        )
        numbers = [settings.sigma_along, *(float(x) for row in columns for x in row)]
        self._settings.copy_(torch.tensor(numbers, dtype=torch.float64), non_blocking=True)
        self._told = settings

    def put_back(self) -> None:
        """theta to its place, whatever was proposed."""
        torch._foreach_copy_(self._held[0], self.backup)

    def point_at(self, gradients: Sequence[Tensor]) -> Tensor:
        """A table of addresses of gradients. They must be contiguous float32, and live until the step is done."""
        addresses = torch.tensor([g.data_ptr() for g in gradients], dtype=torch.int64)
        return addresses.to(self.device, non_blocking=True)

    def propose(self, key: Tensor, scale: float, gradients: Tensor, losses: Tensor) -> None:
        """theta -> tau, in place, if the losses there are numbers. `key`: (1,), int64; `gradients`: a table of `point_at`."""
        settings = self._told
        assert settings is not None
        n = self.num_tensors
        _prepare[(1,)](
            key, self._settings, self._counts, self._coefficients, self._numbers, n, losses, losses.numel(), self._frozen_at,
            ELEMENTWISE=self._elementwise, BLOCK=128,
        )  # fmt: skip
        first = 0
        for (chunks, num_chunks, is_full), width in zip(self._launches, self._widths, strict=True):
            _propose[(width,)](
                self._places, gradients, self._sizes, self._bases, chunks, num_chunks, self._coefficients, self._numbers,
                key, self._sums, self._sums.shape[1], first, n, 1 / scale, self._settings,
                HAS_PRIOR=any(settings.precision), ELEMENTWISE=self._elementwise, FULL=is_full, BLOCK=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip
            first += width

    def products(self, gradients: Tensor, scale: float) -> Tensor:
        """theta . grad V of each tensor, (tensors,), float64: at the present weights for fixed data, else at the last theta."""
        out = torch.empty(self.num_tensors, dtype=torch.float64, device=self.device)
        places = self._places[0 if self.fixed else 3]
        _products[(self.num_tensors,)](
            places, gradients, self._sizes, self._coefficients, out, 1 / scale, BLOCK=_BLOCK, num_warps=_WARPS
        )
        return out

    def decide(
        self,
        here: Tensor,
        there: Tensor | None,
        log_prior: tuple[Tensor, Tensor] | None,
        *,
        scale: float,
        noise_scale: float,
        gradients: Tensor,
        fresh: Tensor | None = None,
        rows: Tensor,
        slot: Tensor,
        flags: Tensor,
    ) -> None:
        """Test the proposal and settle it.

        Args:
            here: losses at theta, one or many; for fixed data overwritten by those at tau on acceptance.
            there: losses at tau; None where nobody looks (`AlwaysAccept`).
            log_prior: at theta and tau, where it is not a Gaussian that was summed on the way.
            scale: lambda * n.
            noise_scale: turns the standard deviation of the differences into the noise of Y; NaN where it is not known.
            gradients: the table given to `propose`; for fixed data the places of the gradient that is kept.
            fresh: a table of the gradients at tau, for fixed data.
            rows: (k, 11), float64: what is reported, in the row that `slot` says; which moves on by one, and around.
            slot: (1,), int64.
            flags: (2,), uint8: whether the proposal was accepted, and finite.
        """
        settings = self._told
        assert settings is not None
        prior_here, prior_there = (self.no_prior, self.no_prior) if log_prior is None else log_prior
        many = here.numel()
        known = math.nan if here.dim() < 2 else float(many)
        _decide[(1,)](
            self._sums, self._sums.shape[1], self._numbers, self._settings, here, here if there is None else there, many,
            prior_here, prior_there, self._frozen_at, self.clock, self._counts, self.num_tensors, slot, rows, rows.shape[0],
            flags, self._action, self._sum_rates, float(scale), float(noise_scale), 0.0 if there is None else known,
            HAS_PRIOR=any(settings.precision), LOOKS=there is not None, FIXED=self.fixed,
            HAS_SIGMA=0.0 not in settings.sigma, BLOCK=_DECISIVE, num_warps=_WARPS,
        )  # fmt: skip
        chunks, num_chunks = self._everything
        _copy[(min(num_chunks, self._num_programs()),)](
            self._places, gradients, gradients if fresh is None else fresh, self._sizes, chunks, num_chunks,
            self.num_tensors, self._action,
            FIXED=self.fixed, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
