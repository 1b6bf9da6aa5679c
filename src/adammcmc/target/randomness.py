"""Random numbers: from one generator for all chains, or from one stream per chain.

Kernels draw tensors with the chains along the first axis, by `normal`, `uniform` and `leaves.standard_normal`. How the
numbers are made is up to the generator, or to the `Streams` object in its place (`backends.streams` has a counter-based
one for GPUs).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Generators", "Randomness", "Streams", "normal", "uniform"]


class Streams(ABC):
    """A stream of random numbers for each chain. Row c of what is drawn is of chain c."""

    @abstractmethod
    def normal(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """N(0, 1) numbers of shape (chains, ...)."""

    def normals(self, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """N(0, 1) numbers in the shapes of these leaves, one after the other."""
        return tuple(self.normal(x.shape, x.dtype, x.device) for x in like)

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
        return self._filled(Tensor.normal_, shape, dtype, device)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._filled(Tensor.uniform_, shape, dtype, device)

    def _filled(self, fill: Callable[..., Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if shape[0] != len(self._generators):
            raise ValueError(f"there are generators for {len(self._generators)} chains, but {shape[0]} rows were requested.")
        numbers = torch.empty(tuple(shape), dtype=dtype, device=device)
        for row, generator in zip(numbers.unsqueeze(1), self._generators, strict=True):
            fill(row, generator=generator)
        return numbers

    def get_state(self) -> Tensor:
        return torch.stack([generator.get_state() for generator in self._generators])

    def set_state(self, state: Tensor) -> None:
        for generator, one in zip(self._generators, state, strict=True):
            generator.set_state(one.clone())


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
