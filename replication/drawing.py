"""What the figures share: one label and colour per sampler, points with errors, published values as black crosses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

_SAMPLERS = {
    "adam": ("Adam", "#7f7f7f", ""),
    "snapshots": ("Adam, ten points of its path", "#404040", ""),
    "sgd": ("SGD", "#b8a98f", ""),
    "sghmc": ("sgHMC", "#9467bd", ""),
    "ensemble": ("deep ensemble", "#8c564b", ""),
    "dropout": ("dropout", "#c97bb5", ""),
    "released": ("as released", "#e6741d", "o"),
    "released, data sum": ("as released, summed loss", "#f2b27c", "P"),
    "printed, batch sum": ("as printed, batch sum", "#4c9be8", "s"),
    "printed, data sum": ("as printed, data sum", "#123f8c", "D"),
    "exact": ("exact (underdamped, all data)", "#2a9d3f", "^"),
    "exact, Theorem 1": ("exact: Theorem 1", "#8fc31f", "v"),
    "exact, MALA": ("exact: MALA", "#14b8a6", "<"),
    "exact, underdamped": ("exact: underdamped", "#166534", "^"),
}
"""Label, colour and marker of each sampler, in all figures."""
LABELS = {name: label for name, (label, _, _) in _SAMPLERS.items()}
COLOURS = {name: colour for name, (_, colour, _) in _SAMPLERS.items()}
MARKERS = {name: marker for name, (_, _, marker) in _SAMPLERS.items() if marker}
Value = Sequence[float | None] | None
"""[mean, standard error], either of which may be missing."""

_STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "figure.dpi": 110,
    "savefig.dpi": 110,
    "font.size": 12,
    "axes.titlesize": 12,
    "legend.fontsize": 10.5,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "adammcmc",
}


@contextmanager
def canvas(rows: int = 1, columns: int = 2, *, width: float = 11.0, height: float = 4.2) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure and its axes (row by row) in the common style, which applies inside the `with` block."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def points(axes: Axes, x: Sequence[float], values: Sequence[Value], name: str, **options: Any) -> None:
    """Means with errors, joined by a line. Missing values are skipped; a single seed has no error to draw."""
    known = [(at, v[0], v[1]) for at, v in zip(x, values, strict=True) if v is not None and v[0] is not None]
    if not known:
        return
    style: dict[str, Any] = {
        "color": COLOURS.get(name, "black"),
        "marker": MARKERS.get(name, "o"),
        "label": LABELS.get(name, name),
        "markersize": 6,
        "linewidth": 1.6,
        "capsize": 3,
    }
    at, mean, error = zip(*known, strict=True)
    axes.errorbar(at, mean, [e or 0.0 for e in error], **{**style, **options})


def line(axes: Axes, x: Sequence[float], y: Sequence[float | None], name: str, **options: Any) -> None:
    """A theoretical curve, without points."""
    known = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
    if known:
        axes.plot(
            *zip(*known, strict=True), **{"color": COLOURS.get(name, "black"), "linestyle": ":", "linewidth": 1.6, **options}
        )


def band(axes: Axes, curves: dict[str, Sequence[float | None]], *, is_filled: bool = True, **options: Any) -> None:
    """The mean against the step, and a band from the lowest to the highest run; a gap where a number is missing."""
    steps, mean, low, high = (
        [math.nan if value is None else value for value in curves[key]] for key in ("steps", "mean", "low", "high")
    )
    [drawn] = axes.plot(steps, mean, **options)
    if is_filled:
        axes.fill_between(steps, low, high, color=drawn.get_color(), alpha=0.13, linewidth=0)


def crosses(axes: Axes, published: dict[float, float], *, x_of: Any = float, label: str | None = "published") -> None:
    """Published values, as black crosses."""
    if published:
        x = [x_of(at) for at in published]
        axes.plot(x, list(published.values()), linestyle="", marker="x", color="black", markersize=7, label=label, zorder=5)


def log_ticks(axis: Axis) -> None:
    """Plain numbers at 1, 2 and 5 of each decade."""
    axis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def legend(figure: Figure, axes: Sequence[Axes], *, columns: int = 4) -> None:
    """One legend below all axes, each name once."""
    found: dict[str, Any] = {}
    for one in axes:
        handles, labels = one.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            found.setdefault(label, handle)
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns)
