"""A stream of random numbers per chain, on any device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from adammcmc.target.randomness import Generators, Randomness, Streams

__all__ = ["Counters", "streams", "why_no_triton"]


class Counters(Streams):
    """Counter-based numbers (`philox`), for a GPU: a function of the chain's seed, the number of the draw, and the place.

    The place is the coordinate of a weight among all weights of its chain, so that the numbers do not depend on how the
    weights are cut into leaves. One launch fills the rows of all chains. The number of draws is counted on the device, so
    that a CUDA graph advances it.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        keys = [_mixed(seed) for seed in seeds]
        self._keys = torch.tensor([k - (1 << 64) if k >= 1 << 63 else k for k in keys], dtype=torch.int64).to(
            device, non_blocking=True
        )
        self._draw = torch.zeros(1, dtype=torch.int64, device=device)

    def next(self, count: int = 1) -> tuple[Tensor, Tensor]:
        """The keys of the chains, (chains,), and the number of the last of `count` draws, (1,), for a kernel of its own."""
        return self._keys, self._draw.add_(count)

    def normal(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        from adammcmc.backends.philox import fill_normal

        numbers = self._empty(shape, dtype, device)
        fill_normal(numbers, *self.next())
        return numbers

    def normals(self, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        from adammcmc.backends.philox import fill_normal

        leaves, (keys, draw) = tuple(self._empty(x.shape, x.dtype, x.device) for x in like), self.next()
        base = 0
        for leaf in leaves:
            fill_normal(leaf, keys, draw, base)
            base += -(-leaf[0].numel() // 4)
        return leaves

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        from adammcmc.backends.philox import fill_uniform

        numbers = self._empty(shape, dtype, device)
        fill_uniform(numbers, *self.next())
        return numbers

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if shape[0] != len(self._keys):
            raise ValueError(f"there are keys for {len(self._keys)} chains, but {shape[0]} rows were requested.")
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def get_state(self) -> Tensor:
        return torch.cat([self._draw, self._keys]).cpu()

    def set_state(self, state: Tensor) -> None:
        self._draw.copy_(state[:1])
        self._keys.copy_(state[1:])


def _mixed(seed: int) -> int:
    """64 bits in which neighbouring seeds have nothing in common (the finisher of SplitMix64)."""
    x = (seed + 0x9E3779B97F4A7C15) % (1 << 64)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return x ^ (x >> 31)


@functools.cache
def why_no_triton(device: torch.device) -> str | None:
    """Why Triton kernels do not run on this device; None if they do. Found once, by running one."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        Counters([0], device).normal((1, 4), torch.float32, device)
    except Exception as error:  # no compiler, an old driver or device, ...
        return f"Triton fails: {next(iter(str(error).strip().splitlines()), type(error).__name__)}"
    return None


def streams(seeds: Sequence[int], device: torch.device) -> Randomness:
    """Random numbers for chains with these seeds. A chain's numbers do not depend on how many other chains there are.

    On the CPU each chain has its own generator. On an accelerator that would cost a launch per chain, so the numbers are
    counter-based. (Without Triton all chains share one generator, seeded by the first seed.)
    """
    if device.type == "cpu":
        return Generators([torch.Generator().manual_seed(seed) for seed in seeds])
    if why_no_triton(device) is None:
        return Counters(seeds, device)
    return torch.Generator(device).manual_seed(seeds[0])
