r"""The first half of Algorithm 1 for many chains in one pass over memory (Triton): from the gradients to the proposals.

    m1' = m1 + (1 - beta1) (g - m1),   m2' = beta2 m2 + (1 - beta2) g^2,   u = lr m1hat' / (sqrt(m2hat') + eps)
    tau = theta + sigma eps + (sigma_along z - 1) u;       |u|^2 and u.eps of each chain, in float64

Four reads and three writes where the pure kernel's operations one by one make some forty. The noise is that of the chains' own
`Counters`, so that both make the same moves, to rounding. The second half (the test) stays the pure kernel's: its numbers are
one for each chain.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adammcmc.backends.philox import normals
from adammcmc.kernels import AdamMCMCKernel
from adammcmc.kernels.direction import Adam, AdamMemory
from adammcmc.kernels.proposal import Move, Prolate, draw_along
from adammcmc.target.leaves import Leaves, spread, spread_settings
from adammcmc.target.randomness import Counters, Randomness
from adammcmc.target.target import Evaluation

__all__ = ["ManyAdamMCMC", "in_one_pass"]

_BLOCK = 1024  # weights that a program works on


@triton.jit
def _advance(
    theta, grad, exp_avg, exp_avg_sq, new_avg, new_avg_sq, tau, keys, draw_at, along, count, table, sums, size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one chain. `table`: beta1, beta2, eps, then lr and sigma of each chain."""
    block, chain = tl.program_id(0), tl.program_id(1)
    beta1, beta2, eps = tl.load(table), tl.load(table + 1), tl.load(table + 2)
    k = tl.load(count)
    root = tl.sqrt(1.0 - tl.where(beta2 > 0, tl.exp(k * tl.log(tl.where(beta2 > 0, beta2, 1.0))), 0.0))
    rest = 1.0 - tl.where(beta1 > 0, tl.exp(k * tl.log(tl.where(beta1 > 0, beta1, 1.0))), 0.0)
    rate = (tl.load(table + 3 + chain) * root / rest).to(tl.float32)
    sigma = tl.load(table + 3 + tl.num_programs(1) + chain).to(tl.float32)
    forward = tl.load(along + chain).to(tl.float32)
    start = block.to(tl.int64) * BLOCK
    e = start + tl.arange(0, BLOCK)
    there = e < size
    at = chain.to(tl.int64) * size + e
    p, g = tl.load(theta + at, mask=there, other=0.0), tl.load(grad + at, mask=there, other=0.0)
    m1, m2 = tl.load(exp_avg + at, mask=there, other=0.0), tl.load(exp_avg_sq + at, mask=there, other=0.0)
    m1 += (1.0 - beta1).to(tl.float32) * (g - m1)
    m2 = beta2.to(tl.float32) * m2 + (1.0 - beta2).to(tl.float32) * g * g
    u = tl.where(there, rate * m1 / (tl.sqrt(m2) + (eps * root).to(tl.float32)), 0.0)
    index = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    n0, n1, n2, n3 = normals(tl.load(keys + chain), index, tl.load(draw_at).to(tl.uint32))
    noise = tl.interleave(tl.interleave(n0, n2), tl.interleave(n1, n3))
    tl.store(new_avg + at, m1, mask=there)
    tl.store(new_avg_sq + at, m2, mask=there)
    tl.store(tau + at, p + sigma * noise + forward * u, mask=there)
    wide = u.to(tl.float64)
    slot = sums + chain * tl.num_programs(0) + block
    tl.store(slot, tl.sum(wide * wide))
    tl.store(slot + tl.num_programs(0) * tl.num_programs(1), tl.sum(wide * noise.to(tl.float64)))


@triton.jit
def _restore(new, old, mask, size, BLOCK: tl.constexpr):
    """Rows that are not in the mask as they were."""
    chain = tl.program_id(1)
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = chain.to(tl.int64) * size + e
    to_do = e < tl.where(tl.load(mask + chain) == 0, size, 0)
    tl.store(new + at, tl.load(old + at, mask=to_do), mask=to_do)


@dataclass(frozen=True)
class InPlaceKeep(Adam):
    """Adam, whose new moments may be overwritten: only the chains that are to keep the old ones are touched."""

    def keep(self, mask: Tensor, new: AdamMemory, old: AdamMemory) -> AdamMemory:
        flags = mask.to(torch.uint8)
        for fresh, before in zip(new.exp_avg + new.exp_avg_sq, old.exp_avg + old.exp_avg_sq, strict=True):
            size = fresh[0].numel()
            _restore[(triton.cdiv(size, _BLOCK), len(fresh))](fresh, before, flags, size, BLOCK=_BLOCK)
        return new


@dataclass(frozen=True)
class ManyAdamMCMC(AdamMCMCKernel):
    """`AdamMCMCKernel` of float32 chains with `Counters`, its first half in one pass."""

    num_chains: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @functools.cached_property
    def _options(self) -> Tensor:
        """beta1, beta2, eps, lr and sigma of the chains, a row for each leaf, float64. Made before a graph is captured."""
        assert isinstance(self.direction, Adam)
        settings = [self.direction.betas, self.direction.eps, self.direction.lr, self.proposal.sigma]
        n = max([1, *(len(value) for value in settings if isinstance(value, list))])
        betas, epsilons = spread(self.direction.betas, n), spread(self.direction.eps, n)
        rows = []
        for (beta1, beta2), eps, *own in zip(
            betas, epsilons, spread_settings(self.direction.lr, n), spread_settings(self.proposal.sigma, n), strict=True
        ):
            common = torch.tensor([beta1, beta2, eps], dtype=torch.float64, device=self.device)
            wide = [torch.as_tensor(x, dtype=torch.float64).to(self.device).expand(self.num_chains) for x in own]
            rows.append(torch.cat([common, *wide]))
        return torch.stack(rows)

    def propose(self, params: Leaves, here: Evaluation, memory: AdamMemory, generator: Randomness) -> tuple[Move, AdamMemory]:
        assert here.grad is not None
        assert isinstance(self.direction, Adam)
        assert isinstance(generator, Counters)
        options = self._options.expand(len(params), -1)
        along = draw_along(params, generator)
        forward = self.proposal.sigma_along * along - 1  # of u: drift and directional noise in one
        steps = tuple(k + 1 for k in memory.step)
        sigmas = spread_settings(self.proposal.sigma, len(params))
        columns = zip(params, here.grad, memory.exp_avg, memory.exp_avg_sq, steps, options, sigmas, strict=True)
        taus, first, second, squares, crosses = [], [], [], [], []
        for p, g, m1, m2, k, row, sigma in columns:
            tau, new1, new2 = torch.empty_like(p), torch.empty_like(p), torch.empty_like(p)
            size = p[0].numel()
            sums = torch.empty(2, self.num_chains, triton.cdiv(size, _BLOCK), dtype=torch.float64, device=self.device)
            keys, draw = generator.next()
            count = k if isinstance(k, Tensor) else torch.full((), float(k), dtype=torch.float64, device=self.device)
            _advance[(sums.shape[2], self.num_chains)](
                p, g.contiguous(), m1, m2, new1, new2, tau, keys, draw, forward, count, row, sums, size, BLOCK=_BLOCK
            )  # fmt: skip
            square, cross = sums.sum(2).unbind()
            taus.append(tau)
            first.append(new1)
            second.append(new2)
            squares.append(square)
            crosses.append(cross / sigma)
        a = self.proposal._squared_ratio(squares)
        log_q_ratio = self.proposal.combine(a, torch.stack(crosses).sum(0), along)
        move = Move(tuple(taus), (), (), along, tuple(squares), log_q_ratio, a.sqrt())
        return move, AdamMemory(tuple(first), tuple(second), steps)


def in_one_pass(kernel: Any, params: Leaves, generator: Randomness) -> Any:
    """The kernel in one pass over memory, where that exists; otherwise as it is."""
    if type(kernel) is not AdamMCMCKernel or type(kernel.direction) is not Adam or type(kernel.proposal) is not Prolate:
        return kernel
    if not isinstance(generator, Counters) or any(p.dtype != torch.float32 or not p.is_contiguous() for p in params):
        return kernel
    if any(not isinstance(s, Tensor) and s == 0 for s in spread_settings(kernel.proposal.sigma, len(params))):
        return kernel  # without noise there is no density ratio
    adam = InPlaceKeep(*(getattr(kernel.direction, field.name) for field in fields(kernel.direction)))
    return ManyAdamMCMC(adam, kernel.proposal, kernel.acceptance, kernel.name, params[0].shape[0], params[0].device)
