"""One posterior: its density, written once, as torch and JAX compute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.posteriors.arrays import Array, jax_arrays, torch_arrays

__all__ = ["Target"]

Moments = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Target:
    """A posterior over unconstrained coordinates, in blocks.

    Args:
        name: of the table, a Python name.
        title: what it is, in a few words.
        blocks: the size of each block of coordinates, in order.
        density: (xp, **blocks) -> log density up to a constant, Jacobians included. Each block is (..., size); the
            result is (...,). `xp` are the operations of `benchmarks.posteriors.arrays`.
        start_sd: chains start from N(0, start_sd^2), far wider than the posterior or centred off it.
        exact: means and standard deviations of the coordinates, where calculus gives them.
        via: the name of another target and a map from its coordinates (draws, dim) to the ones here, if the reference is
            drawn there.
    """

    name: str
    title: str
    blocks: Mapping[str, int]
    density: Callable[..., Array]
    start_sd: float = 2.0
    exact: Callable[[], Moments] | None = None
    via: tuple[str, Callable[[np.ndarray], np.ndarray]] | None = None

    @property
    def dim(self) -> int:
        return sum(self.blocks.values())

    @property
    def names(self) -> list[str]:
        """One for each coordinate: `tau`, `z[0]`, `z[1]`."""
        return [block if size == 1 else f"{block}[{i}]" for block, size in self.blocks.items() for i in range(size)]

    def log_density(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """For torch: (chains, dim) float64 to (chains,)."""
        xp = torch_arrays()
        sizes = list(self.blocks.values())

        def log_density(x: torch.Tensor) -> torch.Tensor:
            parts = dict(zip(self.blocks, x.split(sizes, -1), strict=True))
            result: torch.Tensor = self.density(xp, **parts)
            return result

        return log_density

    def jax_log_density(self) -> Callable[[Any], Any]:
        """For JAX: (dim,) float64 to a scalar."""
        xp = jax_arrays()
        ends = np.cumsum(list(self.blocks.values()))
        starts = ends - list(self.blocks.values())

        def log_density(x: Any) -> Any:
            parts = {block: x[a:b] for block, a, b in zip(self.blocks, starts, ends, strict=True)}
            return self.density(xp, **parts)

        return log_density

    def starts(self, num_chains: int = 64, seed: int = 0) -> np.ndarray:
        """Overdispersed starting points, (chains, dim)."""
        return np.random.default_rng([seed, 2026]).normal(0.0, self.start_sd, (num_chains, self.dim))
