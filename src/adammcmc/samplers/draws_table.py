"""Mean, spread, quantiles and diagnostics of every coordinate of draws from a density, and the table that shows them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from adammcmc.samplers.diagnostics import ess_bulk, ess_tail, mcse_mean, rhat

__all__ = ["Coordinate", "DensitySummary", "coordinates", "series", "summarize_draws"]

_NUMBERS = 4_000_000  # of all draws, that are held in float64 at once


class Coordinate(NamedTuple):
    """A row of the table: one number of the parameters, over all draws."""

    name: str
    """Of its leaf, with indices: `theta[3]`."""
    mean: float
    sd: float
    q5: float
    """The 5% quantile."""
    q95: float
    """The 95% quantile."""
    mcse: float
    """Monte Carlo standard error of the mean."""
    ess_bulk: float
    """Effective draws for the mean; NaN where nothing moves."""
    ess_tail: float
    """Effective draws for the 5% and 95% quantiles, whichever is smaller."""
    rhat: float
    """Rank-normalised split R-hat; NaN for one chain, or where nothing moves."""


@dataclass(frozen=True)
class DensitySummary:
    """The coordinates of draws from a density. `print` shows the table; if they are many, the worst rows."""

    rows: tuple[Coordinate, ...]
    """All coordinates, in the order of the parameters."""
    num_rows: int = 20
    """How many are printed."""

    @property
    def moving(self) -> tuple[Coordinate, ...]:
        """Without those that never change, such as the upper triangle of a Cholesky factor."""
        return tuple(row for row in self.rows if not math.isnan(row.ess_bulk))

    @property
    def worst(self) -> tuple[Coordinate, ...]:
        """Those that move, the fewest effective draws first."""
        return tuple(sorted(self.moving, key=lambda row: min(row.ess_bulk, row.ess_tail)))

    def __str__(self) -> str:
        shown = self.rows
        note: list[str] = []
        if len(self.moving) > self.num_rows:
            shown = self.worst[: self.num_rows]
            note = [f"and {len(self.moving) - len(shown):,} of {len(self.moving):,} coordinates with more effective draws"]
        elif len(self.moving) < len(self.rows):
            shown = self.moving
        if still := len(self.rows) - len(self.moving):
            note.append(f"and {still:,} that never change{_examples(self.rows)}")
        cells = [["", *_COLUMNS], *([row.name, *_cells(row)] for row in shown)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = (
            "  ".join([line[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(line[1:], widths[1:], strict=True))])
            for line in cells
        )
        return "\n".join([*(lines if shown else []), *note])


_COLUMNS = ("mean", "sd", "5%", "95%", "MCSE", "bulk ESS", "tail ESS", "R-hat")


def _cells(row: Coordinate) -> list[str]:
    values = (f"{value:.4g}" for value in (row.mean, row.sd, row.q5, row.q95))
    return [*values, f"{row.mcse:.1g}", f"{row.ess_bulk:,.0f}", f"{row.ess_tail:,.0f}", _or_dash(row.rhat)]


def _or_dash(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _examples(rows: Sequence[Coordinate]) -> str:
    """Up to three coordinates that do not move."""
    names = [row.name for row in rows if math.isnan(row.ess_bulk)][:3]
    return f" ({', '.join(names)}{', ...' if len(names) == 3 else ''})"


def coordinates(leaves: dict[str, Tensor]) -> Iterator[str]:
    """The name of every coordinate of leaves (chains, draws, ...)."""
    for name, leaf in leaves.items():
        ranges = [range(size) for size in leaf.shape[2:]]
        yield from (f"{name}[{','.join(map(str, place))}]" if place else name for place in itertools.product(*ranges))


def series(leaves: dict[str, Tensor], at_once: int | None = None) -> Iterator[Tensor]:
    """The coordinates in their order, in chunks (chains, draws, coordinates), float64, on the CPU."""
    for leaf in leaves.values():
        flat = leaf.reshape(*leaf.shape[:2], -1)
        size = at_once or max(1, _NUMBERS // max(1, leaf.shape[0] * leaf.shape[1]))
        yield from (chunk.detach().cpu().double() for chunk in torch.split(flat, size, 2))


def summarize_draws(leaves: dict[str, Tensor], num_rows: int = 20) -> DensitySummary:
    """The table of leaves (chains, draws, ...), by name."""
    columns = [torch.stack(_columns(chunk)) for chunk in series(leaves)]
    names = coordinates(leaves)
    numbers = torch.cat(columns, 1).T.tolist() if columns else []
    rows = (Coordinate(name, *values) for name, values in zip(names, numbers, strict=True))
    return DensitySummary(tuple(rows), num_rows)


def _columns(x: Tensor) -> list[Tensor]:
    is_still = (x == x[:1, :1]).all(0).all(0)
    flat = x.flatten(0, 1)
    ascending = flat.sort(0).values
    quantiles = [_quantile(ascending, p) for p in (0.05, 0.95)]
    measures = (torch.where(is_still, torch.nan, f(x)) for f in (mcse_mean, ess_bulk, ess_tail, rhat))
    return [flat.mean(0), flat.std(0, correction=int(len(flat) > 1)), *quantiles, *measures]


def _quantile(ascending: Tensor, p: float) -> Tensor:
    place = p * (len(ascending) - 1)
    below = min(int(place), len(ascending) - 1)
    above = min(below + 1, len(ascending) - 1)
    return torch.lerp(ascending[below], ascending[above], place - below)
