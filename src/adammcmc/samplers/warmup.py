"""The record of a burn-in: what was tuned, how long it took, and why it ended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["WarmUp", "in_a_line"]

_NOT_STORED = ("kernel", "params", "seconds", "sampler", "settings")
_MOST_LEVELS = 8  # of U that are printed


@dataclass(frozen=True)
class WarmUp:
    """What burn-in did, and what it left. That of a density unpacks as `kernel, params`.

    Example:
        >>> import adammcmc, torch
        >>> done = adammcmc.warm_up(lambda x: -x.square().sum(1) / 2, torch.randn(64, 5), progress=False)
        >>> done.is_settled, done.num_steps < 2000, 0.8 < done.acceptance < 0.9
        (True, True, True)
    """

    kernel: Any = field(repr=False)
    """With its settings frozen; a `WarmUp` of a network has none, but `settings`."""
    params: Any = field(repr=False)
    """Where the chains of a density are."""
    num_steps: int
    """Steps."""
    num_gradients: int | None
    """Of each chain of a network, on average: a step without chances to try on (`num_chances`) has one."""
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
    target_acceptance: float
    """What it was tuned to."""
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
    """Why it ended, or what it waits for."""
    seconds: float
    """NaN where it was not recorded, as in the checkpoints of a run: wall time is no part of a chain."""
    sampler: str = ""
    """Of a network: the name of its class."""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Of a network: what burn-in tuned, as arguments of its sampler; `sample(..., warm_up=...)` starts with them."""

    def __iter__(self) -> Iterator[Any]:
        if self.kernel is None:
            raise TypeError(
                "the record of a network's burn-in has no kernel to unpack: pass it to `sample(..., warm_up=...)`, or its "
                "`settings` to a sampler."
            )
        yield self.kernel
        yield self.params

    @property
    def levels(self) -> str:
        """U window by window, at most eight of them."""
        levels = [f"{level:.4g}" for _, level in self.trend]
        return " ".join(levels if len(levels) <= _MOST_LEVELS else [*levels[:3], "...", *levels[-4:]])

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores: the settings are in the sampler's own state, and wall time is no part of a chain."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_STORED}

    @classmethod
    def restored(cls, state: Mapping[str, Any], sampler: str, settings: Mapping[str, Any]) -> WarmUp:
        """From what was stored, and the settings that were tuned."""
        own = {"kernel": None, "params": None, "seconds": math.nan, "sampler": sampler, "settings": settings}
        return cls(**{**state, **own})

    def __str__(self) -> str:
        rates = self.acceptance_by_chain
        worst = f", worst chain {min(rates):.2f}" if len(rates) > 1 else ""
        lines = [
            f"burn-in: {self.num_steps} steps"
            + ("" if self.num_gradients is None else f" and {self.num_gradients} gradients")
            + f" ({self.num_approach} without a test"
            + (f", after {self.num_descent} evaluations to bring in far chains" if self.num_descent > 1 else "")
            + f"){'' if math.isnan(self.seconds) else f', {self.seconds:.1f} s'}; {self.reason}",
            f"U by window: {self.levels}",
            f"step size {self.step_size:.3g}, {self.scaling}, acceptance {self.acceptance:.2f}{worst}",
        ]
        if self.agreement is not None:
            lines.append(f"R-hat of U and coordinates in the last window: {self.agreement:.3f}")
        if self.frozen:
            lines.append(f"{len(self.frozen)} of {len(rates)} chains do not move: {', '.join(map(str, self.frozen[:10]))}")
        return "\n".join(lines)


def in_a_line(records: Sequence[WarmUp]) -> str:
    """The burn-in of all chains in one line; empty without records."""
    if not records:
        return ""

    def span(values: Sequence[float], form: str) -> str:
        texts = [format(v, form) for v in (min(values), max(values))]
        return texts[0] if texts[0] == texts[1] else " to ".join(texts)

    levels = [f"{level:.4g}" for _, level in (records[0].trend[:1] + records[0].trend[-1:])]
    parts = [
        f"{span([record.num_steps for record in records], ',')} steps",
        *([f"U {' -> '.join(levels)}"] if levels and len({record.trend for record in records}) == 1 else []),
        f"acceptance {span([record.acceptance for record in records], '.2f')}",
        f"step size {span([record.step_size for record in records], '.3g')}",
        *dict.fromkeys(r.scaling if len(records) == 1 else r.scaling.partition(" (")[0] for r in records),
    ]
    reasons = list(dict.fromkeys(record.reason for record in records))
    return f"{', '.join(parts)}; {'; '.join(reasons[:3])}{'; ...' if len(reasons) > 3 else ''}"
