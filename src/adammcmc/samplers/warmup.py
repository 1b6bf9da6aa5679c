"""The record of a burn-in: what was tuned, how long it took, and why it ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["WarmUp"]


@dataclass(frozen=True)
class WarmUp:
    """What burn-in did, and what it left. Unpacks as `kernel, params`.

    Example:
        >>> import adammcmc, torch
        >>> done = adammcmc.warm_up(lambda x: -x.square().sum(1) / 2, torch.randn(64, 5), progress=False)
        >>> done.is_settled, done.num_steps < 2000, 0.8 < done.acceptance < 0.9
        (True, True, True)
    """

    kernel: Any = field(repr=False)
    """With its settings frozen; a `WarmUp` of a network has none."""
    params: Any = field(repr=False)
    """Where the chains are."""
    num_steps: int
    """Steps, each with one gradient of every chain."""
    num_descent: int
    """Evaluations of all chains before the first step, to bring in those far away (`samplers.descent`)."""
    num_approach: int
    """Steps without a test (`samplers.approach`), of `num_steps`."""
    step_size: float
    """h, the median over the chains."""
    scaling: str
    """The metric: its kind and range."""
    acceptance: float
    """Over the last half window, of the chains that move."""
    acceptance_by_chain: tuple[float, ...]
    agreement: float | None
    """The largest R-hat of U and coordinates in the last window; None if it was not looked at."""
    frozen: tuple[int, ...]
    """Chains that do not move."""
    trend: tuple[tuple[int, float], ...]
    """(step, U): the median over the chains, window by window."""
    is_settled: bool
    """Whether burn-in reached all that it waits for."""
    reason: str
    """Why it ended."""
    seconds: float

    def __iter__(self) -> Iterator[Any]:
        yield self.kernel
        yield self.params

    def __str__(self) -> str:
        levels = [f"{level:.4g}" for _, level in self.trend]
        shown = levels if len(levels) <= 8 else [*levels[:3], "...", *levels[-4:]]
        rates = self.acceptance_by_chain
        worst = f", worst chain {min(rates):.2f}" if len(rates) > 1 else ""
        lines = [
            f"burn-in: {self.num_steps} steps ({self.num_approach} without a test"
            + (f", after {self.num_descent} evaluations to bring in far chains" if self.num_descent > 1 else "")
            + f"), {self.seconds:.1f} s; {self.reason}",
            f"U by window: {' '.join(shown)}",
            f"step size {self.step_size:.3g}, {self.scaling}, acceptance {self.acceptance:.2f}{worst}",
        ]
        if self.agreement is not None:
            lines.append(f"R-hat of U and coordinates in the last window: {self.agreement:.3f}")
        if self.frozen:
            lines.append(f"{len(self.frozen)} of {len(rates)} chains do not move: {', '.join(map(str, self.frozen[:10]))}")
        return "\n".join(lines)
