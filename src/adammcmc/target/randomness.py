"""Where random numbers come from: one generator for all chains, or one stream of numbers for each.

Kernels draw tensors with the chains along the first axis, by `normal` and `uniform`, and do not ask how they are made. A
`Streams` object in the place of a generator decides that: this is where a faster source (a counter-based one, for example)
belongs.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Counters", "Generators", "Randomness", "Streams", "normal", "streams", "uniform", "why_no_triton"]


class Streams(ABC):
    """A stream of random numbers for each chain. Row c of what is drawn is of chain c."""

    @abstractmethod
    def normal(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """N(0, 1) numbers of shape (chains, ...)."""

    @abstractmethod
    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uniform numbers in [0, 1) of shape (chains, ...)."""

    @abstractmethod
    def get_state(self) -> Tensor:
        """Where the streams stand, as one tensor on the host."""

    @abstractmethod
    def set_state(self, state: Tensor) -> None:
        """Go there."""


Randomness: TypeAlias = torch.Generator | Streams
"""What a kernel draws from."""


class Generators(Streams):
    """A `torch.Generator` for each chain: its numbers are those that it would draw alone, however many others there are.

    Example:
        >>> def seeded(*seeds):
        ...     return Generators([torch.Generator().manual_seed(seed) for seed in seeds])
        >>> three = seeded(1, 2, 3).normal((3, 50), torch.float32, torch.device("cpu"))
        >>> alone = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
        >>> bool((three[2:] == alone).all())
        True
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = list(generators)

    def normal(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        numbers = self._empty(shape, dtype, device)
        for row, generator in zip(numbers.unsqueeze(1), self._generators, strict=True):
            row.normal_(generator=generator)
        return numbers

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        numbers = self._empty(shape, dtype, device)
        for row, generator in zip(numbers.unsqueeze(1), self._generators, strict=True):
            row.uniform_(generator=generator)
        return numbers

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if shape[0] != len(self._generators):
            raise ValueError(f"there are random numbers for {len(self._generators)} chains, and {shape[0]} ask for them.")
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def get_state(self) -> Tensor:
        return torch.stack([generator.get_state() for generator in self._generators])

    def set_state(self, state: Tensor) -> None:
        for generator, one in zip(self._generators, state, strict=True):
            generator.set_state(one.clone())


class Counters(Streams):
    """Counter-based numbers (`philox`), for a GPU: row c is a function of seed c, of the number of the call, and of the place.

    One launch fills the rows of all chains. Where the streams stand is a count on the device, so that a CUDA graph moves it on.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        keys = [_mixed(seed) for seed in seeds]
        self._keys = torch.tensor([k - (1 << 64) if k >= 1 << 63 else k for k in keys], dtype=torch.int64).to(device)
        self._draw = torch.zeros(1, dtype=torch.int64, device=device)

    def next(self) -> tuple[Tensor, Tensor]:
        """The keys of the chains, (chains,), and the number of this call, (1,): for a kernel that makes its own numbers."""
        return self._keys, self._draw.add_(1)

    def normal(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        from adammcmc.backends.philox import fill_normal

        numbers = self._empty(shape, dtype, device)
        fill_normal(numbers, *self.next())
        return numbers

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        from adammcmc.backends.philox import fill_uniform

        numbers = self._empty(shape, dtype, device)
        fill_uniform(numbers, *self.next())
        return numbers

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if shape[0] != len(self._keys):
            raise ValueError(f"there are random numbers for {len(self._keys)} chains, and {shape[0]} ask for them.")
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
    """Why Triton's kernels do not run on this device; None if they do. Asked once, by running one."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        Counters([0], device).normal((1, 4), torch.float32, device)
    except Exception as error:  # no compiler, an old driver or device, ...
        return f"Triton fails: {next(iter(str(error).strip().splitlines()), type(error).__name__)}"
    return None


def streams(seeds: Sequence[int], device: torch.device) -> Randomness:
    """Random numbers of chains with these seeds; the numbers of a chain do not depend on how many others there are.

    On the CPU each chain has a generator of its own. On an accelerator so many generators would cost a launch each: there the
    numbers are counter-based. (Without Triton all chains share one generator, seeded by the first.)
    """
    if device.type == "cpu":
        return Generators([torch.Generator().manual_seed(seed) for seed in seeds])
    if why_no_triton(device) is None:
        return Counters(seeds, device)
    return torch.Generator(device).manual_seed(seeds[0])


def normal(shape: Sequence[int], dtype: torch.dtype, device: torch.device, generator: Randomness) -> Tensor:
    """N(0, 1) numbers, the chains along the first axis."""
    if isinstance(generator, Streams):
        return generator.normal(shape, dtype, device)
    return torch.randn(tuple(shape), dtype=dtype, device=device, generator=generator)


def uniform(shape: Sequence[int], dtype: torch.dtype, device: torch.device, generator: Randomness) -> Tensor:
    """Uniform numbers in [0, 1), the chains along the first axis."""
    if isinstance(generator, Streams):
        return generator.uniform(shape, dtype, device)
    return torch.rand(tuple(shape), dtype=dtype, device=device, generator=generator)
