r"""Estimates the log ratio from examples in random order.

    Y = c - lambda sum_i D_i   is the mean over all i of   x_i = c - lambda n D_i,    D_i = l_i(tau) - l_i(theta),

c = log_q_ratio + log prior(tau) - log prior(theta). From b of n examples, drawn without replacement,

    Yhat = mean(x),    s^2 = var(x) / b * (1 - b / n),

both unbiased (1 / (b - 1) in the variance). Each chain draws one key, which fixes its order of examples: the examples
of a chain do not depend on how many the others need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from adammcmc.acceptance.protocol import Comparison
from adammcmc.target.keyed_random import keys, order
from adammcmc.target.leaves import is_finite
from adammcmc.target.randomness import Randomness

__all__ = ["Estimate", "Sample", "check_batches", "estimate", "full_data", "look_sizes", "on_batch"]

_ALMOST_ALL = 0.9  # a batch larger than this share of the data is extended to all of it


class Sample(NamedTuple):
    """The examples drawn so far, for the chains that are still undecided."""

    chains: Tensor
    """Indices of these chains, (k,)."""
    x: Tensor
    """x_i of the examples, (k, b), float64."""
    num_data: int
    """n"""
    look: int
    """How often the batch has been inspected, from 1."""

    @property
    def size(self) -> int:
        """b"""
        return self.x.shape[1]

    @property
    def log_ratio(self) -> Tensor:
        """Yhat, (k,)."""
        return self.x.mean(1)

    @property
    def noise(self) -> Tensor:
        """s, (k,); 0 on all data."""
        if self.size == self.num_data:
            return torch.zeros_like(self.log_ratio)
        return self.x.std(1) * math.sqrt((1 - self.size / self.num_data) / self.size)


class Estimate(NamedTuple):
    """An estimate of Y; each field has shape (chains,)."""

    log_ratio: Tensor
    """Yhat; -inf outside the prior's support, NaN if no example was used."""
    num_examples: Tensor
    """b, float64; NaN if unknown."""
    noise: Tensor | None = None
    """s; 0 on all data; None if unknown."""
    is_current_finite: Tensor | None = None
    """Whether all losses at the current point were finite; None if they are those of the step's own batch."""


def on_batch(comparison: Comparison) -> Estimate:
    """Y on this step's own batch."""
    y = comparison.batch_log_ratio()
    return Estimate(y, torch.full_like(y, comparison.batch_size or math.nan), comparison.batch_noise())


def estimate(
    comparison: Comparison,
    generator: Randomness,
    batch_size: int,
    growth: float = 1.0,
    is_enough: Callable[[Sample], Tensor] | None = None,
) -> Estimate:
    """Draw more and more examples, chain by chain, until they are enough or all.

    Args:
        comparison: the move.
        generator: draws one key per chain, however many examples it needs.
        batch_size: size of the first batch.
        growth: factor by which the batch grows, by `batch_size` at least.
        is_enough: whether to stop, for each chain of a sample; None stops at the first batch.
    """
    order_of = keys(comparison.num_chains, comparison.device, generator)
    if comparison.potential.fixed:  # this step's batch is all data
        return on_batch(comparison)
    n = comparison.num_examples
    if batch_size > n:
        raise ValueError(f"`batch_size` must not exceed the number of examples, {n}, got {batch_size}.")
    known, scale = comparison.known(), comparison.inverse_temperature() * n
    log_ratio = known.masked_fill(is_finite(known), torch.nan)
    noise, num_examples = torch.zeros_like(known), torch.zeros_like(known)
    is_healthy = torch.ones_like(known, dtype=torch.bool)
    chains = (is_finite(known) & comparison.may_move).nonzero().flatten()
    x, ordered = known.new_empty(len(chains), 0), order_of.new_empty(len(chains), 0)
    for look, size in enumerate(look_sizes(batch_size, growth, n), 1):
        if len(chains) == 0:
            break
        if size == n:
            difference, is_current_finite = full_data(comparison, chains, ordered[:, : x.shape[1]])
        else:
            if ordered.shape[1] < size:  # several batches ahead, so that the sorting cost does not grow with their number
                ordered = order(order_of[chains], n, max(size, min(2 * size, int(_ALMOST_ALL * n)) if look > 1 else 0))
            difference, is_current_finite, _ = comparison.differences(ordered[:, x.shape[1] : size], chains)
        x = torch.cat([x, known[chains, None] - scale[chains, None] * difference], 1)
        sample = Sample(chains, x, n, look)
        log_ratio[chains], noise[chains], num_examples[chains] = sample.log_ratio, sample.noise, float(size)
        is_healthy[chains] &= is_current_finite
        if is_enough is None or size == n:
            break
        is_constant = (x == x[:, :1]).all(1)  # a variance of zero is no evidence about the other examples
        # (a non-finite loss stays non-finite: more examples cannot help)
        is_open = (~is_enough(sample) | is_constant) & is_finite(sample.log_ratio)
        chains, x, ordered = chains[is_open], x[is_open], ordered[is_open]
    return Estimate(log_ratio, num_examples, noise, is_healthy)


def check_batches(size: int, growth: float = 1.0, *, smallest: int = 2) -> None:
    """A standard deviation needs two examples, a normal approximation more; and the batch must not shrink."""
    if type(size) is not int or size < smallest:
        raise ValueError(f"`batch_size` must be a whole number, at least {smallest}, got {size!r}.")
    if not 1 <= growth < math.inf:
        raise ValueError(f"`growth` must be at least 1, got {growth}.")


def full_data(comparison: Comparison, chains: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """D_i of all examples not yet seen, (chains, n - seen), and whether all l_i(theta) are finite."""
    n = comparison.num_examples
    indices: slice | Tensor = slice(0, n)
    if seen is not None and seen.shape[1] > 0:
        is_new = torch.ones(len(chains), n, dtype=torch.bool, device=seen.device).scatter_(1, seen, False)
        indices = is_new.nonzero()[:, 1].view(len(chains), -1)
    values, is_current_finite, _ = comparison.differences(indices, chains)
    return values, is_current_finite


def look_sizes(first: int, growth: float, n: int) -> Iterator[int]:
    """The sizes of the growing batch, up to n.

    Example:
        >>> list(look_sizes(100, 1.5, 1000))
        [100, 200, 300, 450, 675, 1000]
    """
    size = first
    while size <= _ALMOST_ALL * n:
        yield size
        size += max(first, math.ceil((growth - 1) * size))
    yield n
