"""The two-sided test of a kernel: start it above and below, and watch U."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adammcmc.kernels.kernel import Kernel
from adammcmc.samplers.density import sample_density
from adammcmc.target.leaves import flatten

__all__ = ["TwoSided", "two_sided"]


@dataclass(frozen=True)
class TwoSided:
    """What became of U from either side."""

    from_reference: Tensor
    """U along the chains that started from draws of the target, (chains, steps)."""
    from_optimum: Tensor
    """The same for those that started from an optimum."""
    level: float
    """Mean of U over the reference draws: the target's own level."""
    level_error: float

    def late(self, trace: Tensor) -> tuple[float, float]:
        """Mean of U over the last quarter, and its standard error from the spread between the chains."""
        means = trace[:, -max(1, trace.shape[1] // 4) :].mean(1)
        return float(means.mean()), float(means.std() / math.sqrt(len(means)))

    @property
    def drift(self) -> float:
        """How far the chains from the reference moved away from its level, in standard errors."""
        mean, error = self.late(self.from_reference)
        return (mean - self.level) / max(math.hypot(error, self.level_error), 1e-300)

    @property
    def gap(self) -> float:
        """How far apart the two sides are at the end, in standard errors."""
        (above, e1), (below, e2) = self.late(self.from_reference), self.late(self.from_optimum)
        return (above - below) / max(math.hypot(e1, e2), 1e-300)

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
        """In words."""
        (late, late_error), (optimum, optimum_error) = self.late(self.from_reference), self.late(self.from_optimum)
        level = f"{self.level:.4g} +- {self.level_error:.2g}"
        above, below = f"{late:.4g} +- {late_error:.2g}", f"{optimum:.4g} +- {optimum_error:.2g}"
        first = self.from_optimum[:, 0]
        error = math.hypot(float(first.std()) / math.sqrt(len(first)), self.level_error)
        if self.stays and abs(float(first.mean()) - self.level) < 4 * error:
            return f"undecided: both sides started at one level of U, {level}, so that staying there proves little"
        if self.stays and self.meets:
            return (
                f"agrees: from draws of the target (U {level}) U stays, at {above}, and from the optimum it arrives, at {below}"
            )
        if self.stays:
            return f"not mixed: from draws of the target (U {level}) U stays, at {above}, but from the optimum it is at {below}"
        meets = f", where it also arrives from the optimum ({below})" if self.meets else ""
        return f"samples another distribution: from draws of the target, U leaves {level} for {above}{meets}"


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
    """Start a kernel from draws of the target and from an optimum, and watch U: the decisive check of any kernel.

    An exact kernel stays at the level of the target from the one side and arrives there from the other. A biased one leaves it,
    however good its acceptance looks.

    Args:
        log_density: as in `sample_density`.
        kernel: with its settings fixed; adapt it before.
        reference: draws from the target (from an exact run), one for each chain; at least 8.
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
            raise ValueError(f"`{name}` must hold at least 8 starting points, one for each chain, got {count}.")
    _, above = sample_density(log_density, reference, kernel, num_steps=num_steps, seed=seed, progress=progress)
    _, below = sample_density(log_density, optimum, kernel, num_steps=num_steps, seed=seed + 1, progress=progress)
    start = above.potential[:, 0]
    return TwoSided(above.potential, below.potential, float(start.mean()), float(start.std() / math.sqrt(len(start))))
