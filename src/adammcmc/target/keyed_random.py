"""Random numbers as a function of a key and a position, so that chains can use different amounts independently.

A chain draws one key from its stream; further numbers follow from it by SplitMix64 (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adammcmc.target.randomness import Randomness, uniform

__all__ = ["keys", "numbers", "order", "poisson"]


def keys(num_chains: int, device: torch.device, generator: Randomness) -> Tensor:
    """64 random bits for each chain, (chains,)."""
    halves = (uniform((num_chains, 2), torch.float64, device, generator) * 2.0**32).long()
    return (halves[:, 0] << 32) ^ halves[:, 1]


def numbers(key: Tensor, count: int, stream: int = 0) -> Tensor:
    """The first `count` uniform numbers in [0, 1) of each key, (keys, count), float64: SplitMix64 from the key."""
    place = torch.arange(1 + (stream << 40), 1 + (stream << 40) + count, device=key.device)
    x = key[:, None] + place * -0x61C8864680B583EB  # 0x9E37...15; overflow is intended
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return _shifted(x ^ _shifted(x, 31), 11).double() * 2.0**-53


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def order(key: Tensor, n: int, count: int) -> Tensor:
    """The first `count` of 0 ... n - 1 in random order, (keys, count): uniform numbers without repetitions.

    The cost grows with `count`, not n, unless `count` is nearly n. A shorter order is a prefix of a longer one.
    """
    expected = -n * math.log1p(-count / (n + 1))
    num = math.ceil(expected + 6 * math.sqrt(expected)) + 16
    while True:
        values = (numbers(key, num) * n).long()
        ranked, places = values.sort(dim=1, stable=True)
        is_new = torch.ones_like(values, dtype=torch.bool)
        is_new.scatter_(1, places[:, 1:], ranked[:, 1:] != ranked[:, :-1])
        rank = is_new.cumsum(1) - 1
        if bool((rank[:, -1] >= count - 1).all()):
            break
        num *= 2
    rank = torch.where(is_new & (rank < count), rank, count)  # the rest goes to an extra last column
    return values.new_empty(len(key), count + 1).scatter_(1, rank, values)[:, :count]


def poisson(rate: Tensor, number: Tensor) -> Tensor:
    """Poisson variables from uniform numbers: the smallest k with P(N <= k) > number, by bisection."""
    low = torch.full_like(rate, -1.0)  # P(N <= low) <= number < P(N <= high)
    high = torch.ceil(rate + 10 * rate.sqrt() + 40)
    for _ in range(max(1, math.ceil(math.log2(float((high - low).max()))))):
        middle = torch.floor((low + high) / 2)
        is_above = torch.special.gammaincc(middle + 1, rate) > number  # P(N <= middle)
        low, high = torch.where(is_above, low, middle), torch.where(is_above, middle, high)
    return high.long()
