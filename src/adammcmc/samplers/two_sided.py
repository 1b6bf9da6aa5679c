"""The two-sided test of a kernel: start it above and below the target's level of U, and compare."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adammcmc.kernels.kernel import Kernel
from adammcmc.samplers.functional import sample_density
from adammcmc.target.leaves import flatten

__all__ = ["TwoSided", "two_sided"]


@dataclass(frozen=True)
class TwoSided:
    """U from either side, and the verdict."""

    from_reference: Tensor
    """U along the chains that started from draws of the target, (chains, steps)."""
    from_optimum: Tensor
    """The same for those that started from an optimum."""
    level: float
    """Mean of U over the reference draws: the target's own level."""
    level_error: float

    def late(self, trace: Tensor) -> tuple[float, float]:
        """Mean of U over the last quarter, and its standard error from the spread between the chains."""
        return _mean_of_chains(trace[:, -max(1, trace.shape[1] // 4) :].mean(1))

    @property
    def drift(self) -> float:
        """The distance of the chains from the reference's level at the end, in standard errors."""
        return _distance(self.late(self.from_reference), (self.level, self.level_error))

    @property
    def gap(self) -> float:
        """The distance between the two sides at the end, in standard errors."""
        return _distance(self.late(self.from_reference), self.late(self.from_optimum))

    @property
    def stays(self) -> bool:
        """Whether the reference's level was kept, within 4 standard errors."""
        return abs(self.drift) < 4

    @property
    def meets(self) -> bool:
        """Whether both sides ended at one level, within 4 standard errors."""
        return abs(self.gap) < 4

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        reference = self.level, self.level_error
        pairs = reference, self.late(self.from_reference), self.late(self.from_optimum)
        level, above, below = (f"{value:.4g} +- {error:.2g}" for value, error in pairs)
        if self.stays and abs(_distance(_mean_of_chains(self.from_optimum[:, 0]), reference)) < 4:
            return f"undecided: both sides started at the same level of U, {level}, so staying there proves little"
        kept = f"started from draws of the target (U {level}), U stays at {above}"
        if self.stays and self.meets:
            return f"agrees: {kept}, and from the optimum it reaches {below}"
        if self.stays:
            return f"not mixed: {kept}, but from the optimum it is at {below}"
        meets = f", where it also arrives from the optimum ({below})" if self.meets else ""
        return f"samples another distribution: from draws of the target, U leaves {level} for {above}{meets}"


def _mean_of_chains(values: Tensor) -> tuple[float, float]:
    """Mean and standard error."""
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def _distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Between two means, in standard errors."""
    return (a[0] - b[0]) / max(math.hypot(a[1], b[1]), 1e-300)


def two_sided(
    log_density: Callable[[Any], Tensor],
    kernel: Kernel,
    reference: Any,
    optimum: Any,
    *,
    num_steps: int,
    seed: int = 0,
    progress: bool = True,
) -> TwoSided:
    """Start a kernel from draws of the target and from an optimum, and compare U: the decisive check of any kernel.

    An exact kernel stays at the level of the target from one side and arrives there from the other. A biased one leaves
    it, however good its acceptance looks.

    Args:
        log_density: as in `sample_density`.
        kernel: with fixed settings; adapt it first.
        reference: draws from the target (from an exact run), one per chain; at least 8.
        optimum: as many starting points at an optimum.
        num_steps: steps of each chain.
        seed: fixes every random number.
        progress: as in `sample_density`.

    Example:
        >>> import torch
        >>> from adammcmc import kernels
        >>> normal = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
        >>> test = two_sided(
        ...     lambda x: -x.square().sum(1) / 2, kernels.underdamped(0.4), normal, torch.zeros(64, 10), num_steps=300
        ... )
        >>> test.stays, test.meets
        (True, True)
    """
    for name, value in (("reference", reference), ("optimum", optimum)):
        if (count := len(flatten(value)[0][0])) < 8:
            raise ValueError(f"`{name}` must hold at least 8 starting points, one per chain, got {count}.")
    _, above = sample_density(log_density, reference, kernel, num_steps=num_steps, seed=seed, progress=progress)
    _, below = sample_density(log_density, optimum, kernel, num_steps=num_steps, seed=seed + 1, progress=progress)
    return TwoSided(above.potential, below.potential, *_mean_of_chains(above.potential[:, 0]))
