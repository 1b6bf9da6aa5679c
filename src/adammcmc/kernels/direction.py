"""Directions: from a gradient (and the memory of earlier ones) to the update u, which is subtracted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from adammcmc.target.leaves import Leaves, PerLeaf, Settings, by_chain, select, spread, spread_settings, widen

__all__ = ["Adam", "AdamMemory", "Direction", "OptimizerStep"]


class Direction(Protocol):
    """A rule for the update u. `memory` is carried between steps, whether or not the proposal is accepted."""

    def init(self, params: Leaves) -> Any:
        """The memory before the first step."""

    def __call__(self, grad: Leaves, memory: Any, params: Leaves) -> tuple[Leaves, Any]:
        """The update u and the new memory, from the gradient of V at `params`."""

    def keep(self, mask: Tensor, new: Any, old: Any) -> Any:
        """The new memory for the chains in `mask`, the old one for the rest."""


class AdamMemory(NamedTuple):
    """Adam's moments and step counts, under torch's names."""

    exp_avg: Leaves
    exp_avg_sq: Leaves
    step: tuple[int, ...]
    """One count per leaf, as in torch.optim.Adam."""


@dataclass(frozen=True)
class Adam:
    r"""The step of Adam with bias correction (the paper's eq. (7) and u_k(m); torch's `eps` is its delta).

    m1 <- beta1 m1 + (1 - beta1) g,    m2 <- beta2 m2 + (1 - beta2) g^2,    k <- k + 1
    u = lr * m1 / (1 - beta1^k) / (sqrt(m2 / (1 - beta2^k)) + eps)
    """

    lr: Settings
    betas: PerLeaf[tuple[float, float]] = (0.99, 0.99)
    eps: PerLeaf[float] = 1e-8

    def init(self, params: Leaves) -> AdamMemory:
        first, second = (tuple(torch.zeros_like(p) for p in params) for _ in range(2))
        return AdamMemory(first, second, (0,) * len(params))

    def __call__(
        self, grad: Leaves, memory: AdamMemory, params: Leaves, out: Leaves | None = None
    ) -> tuple[Leaves, AdamMemory]:
        """`out`: memory for u; the moments are then overwritten as well."""
        n = len(params)
        options = zip(spread_settings(self.lr, n), spread(self.betas, n), spread(self.eps, n), strict=True)
        updates, exp_avgs, exp_avg_sqs = [], [], []
        step = tuple(k + 1 for k in memory.step)
        columns = zip(grad, memory.exp_avg, memory.exp_avg_sq, step, options, out or [None] * n, strict=True)
        for g, m1, m2, k, (lr, (beta1, beta2), eps), into in columns:
            exp_avg = torch.lerp(m1, g, 1 - beta1, out=None if into is None else m1)
            exp_avg_sq = torch.mul(m2, beta2, out=None if into is None else m2).addcmul_(g, g, value=1 - beta2)
            root = (1 - beta2**k) ** 0.5  # of the bias correction, moved out of the fraction to save a pass
            denominator = torch.sqrt(widen(exp_avg_sq), out=into).add_(eps * root)
            rate = by_chain(lr * root / (1 - beta1**k), denominator)
            updates.append(torch.div(widen(exp_avg), denominator, out=denominator).mul_(rate))
            exp_avgs.append(exp_avg)
            exp_avg_sqs.append(exp_avg_sq)
        return tuple(updates), AdamMemory(tuple(exp_avgs), tuple(exp_avg_sqs), step)

    def keep(self, mask: Tensor, new: AdamMemory, old: AdamMemory) -> AdamMemory:
        # the count has no chain axis, so it advances for all: bias correction is long over when a chain freezes
        if mask.device.type == "cpu" and not bool(mask.any()):
            return old
        averages = select(mask, new.exp_avg, old.exp_avg)
        return AdamMemory(averages, select(mask, new.exp_avg_sq, old.exp_avg_sq), new.step)


@dataclass(frozen=True)
class OptimizerStep:
    """The step of any `torch.optim` optimizer: u = theta - (theta after its step).

    `make(params)` builds the optimizer on a list with one parameter per chain and leaf (chain by chain). Its state is
    the memory, copied at each step so that the kernel stays a pure function: one more pass over the optimizer's state.
    An optimizer that uses the weights themselves (weight decay) makes u depend on theta, which Algorithm 1 ignores.
    """

    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

    def init(self, params: Leaves) -> None:
        return None

    def __call__(self, grad: Leaves, memory: Any, params: Leaves) -> tuple[Leaves, Any]:
        num_chains = params[0].shape[0]
        scratch = [torch.nn.Parameter(p[c].clone()) for c in range(num_chains) for p in params]
        for p, g in zip(scratch, (g[c] for c in range(num_chains) for g in grad), strict=True):
            p.grad = g.clone()
        optimizer = self.make(scratch)
        for i, state in (memory or {}).items():
            optimizer.state[scratch[i]] = copy.deepcopy(state)  # load_state_dict would cast some of it
        optimizer.step()
        after = [torch.stack([scratch[c * len(params) + i].detach() for c in range(num_chains)]) for i in range(len(params))]
        updates = tuple(widen(p) - widen(a) for p, a in zip(params, after, strict=True))
        return updates, {i: dict(optimizer.state[p]) for i, p in enumerate(scratch) if optimizer.state[p]}

    def keep(self, mask: Tensor, new: Any, old: Any) -> Any:
        # the optimizer's state is one object for all chains: the old one is kept only if no chain is healthy
        return new if bool(mask.any()) else old
