"""The figures of a report, each painted from plain numbers. `FIGURES` lists them all: add one there.

A painter draws on the axes of matplotlib and returns what the figure shows, in words. A figure is part of the page
(`Drawing.svg`) and a file of its own (`Drawing.file`). In both, colours are CSS variables, readable in light and dark
mode; figures scale with the screen, and have a description in words.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FIGURES", "THEME", "Array", "Drawing", "figure"]

Array = NDArray[numpy.float64]
_MOST_CHAINS = 6  # with names and colours; more are drawn in one colour, without names

# unique colours, to be replaced in the SVG
INK, MUTED, GRID = "#010203", "#040506", "#070809"
SERIES = ("#0a0b0c", "#0d0e0f", "#101112", "#131415", "#161718", "#191a1b")
_NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", **{colour: f"s{i}" for i, colour in enumerate(SERIES)}}

_LIGHT = {
    "paper": "#ffffff", "panel": "#f5f6f8", "ink": "#1b1f24", "muted": "#59636e", "grid": "#d1d9e0", "good": "#116329",
    "bad": "#a40e26", "unsure": "#7d4e00", "link": "#0550ae",
    "s0": "#0072b2", "s1": "#d55e00", "s2": "#007a5a", "s3": "#a6508a", "s4": "#7a6a00", "s5": "#56657a",
}  # fmt: skip
_DARK = {
    "paper": "#0d1117", "panel": "#161b22", "ink": "#e6edf3", "muted": "#9da7b1", "grid": "#30363d", "good": "#56d364",
    "bad": "#ff8182", "unsure": "#e3b341", "link": "#79c0ff",
    "s0": "#56b4e9", "s1": "#ff9a5c", "s2": "#3fd0a4", "s3": "#e3a0cc", "s4": "#e6d65c", "s5": "#a9b8cc",
}  # fmt: skip


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


THEME = (
    f":root{{color-scheme:light dark;{_variables(_LIGHT)}}}@media (prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}"
)
"""The colours of the page as CSS variables; the reader's system chooses light or dark."""


@dataclass(frozen=True)
class Drawing:
    """One figure."""

    name: str
    """The name of its file, without suffix."""
    title: str
    words: str
    """What it shows, for screen readers."""
    svg: str
    """An element for a page that has the variables of `THEME`."""
    width: float
    """Maximal, in rem."""

    @property
    def file(self) -> str:
        """The figure as a file of its own."""
        style = f"<style>{THEME}svg{{background:var(--paper)}}</style>"
        return '<?xml version="1.0" encoding="utf-8"?>\n' + re.sub(r"(<svg[^>]*>)", rf"\1{style}", self.svg, count=1)


def _themed(svg: str, name: str, title: str, words: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, variable in _NAMES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    # ids must be unique on the page
    for before in ('id="', "url(#", 'href="#'):
        svg = svg.replace(before, f"{before}{name}-")
    # as wide as the page allows, in proportion
    svg = re.sub(r'(<svg[^>]*?) width="[\d.]+pt" height="[\d.]+pt"', r"\1", svg, count=1)
    label = f'role="img" aria-labelledby="{name}-title {name}-words"'
    head = f'<title id="{name}-title">{html.escape(title)}</title><desc id="{name}-words">{html.escape(words)}</desc>'
    return re.sub(r"<svg([^>]*)>", lambda match: f"<svg {label}{match.group(1)}>{head}", svg, count=1)


def _lines(ax: Axes, steps: Mapping[int, Array], values: Mapping[int, Array]) -> None:
    many = len(values) > _MOST_CHAINS
    for place, (chain, y) in enumerate(values.items()):
        label = None if many or len(values) == 1 else f"chain {chain}"
        ax.plot(
            steps[chain], y, color=SERIES[0 if many else place], lw=1, alpha=0.35 if many else 0.9, label=label,
            marker="." if len(y) < 60 else None, ms=4,
        )  # fmt: skip


def _trace(ax: Axes, label: str, steps: Mapping[int, Array], values: Mapping[int, Array]) -> str:
    """One number of each draw against the step, a line for each chain."""
    _lines(ax, steps, values)
    ax.set(xlabel="step", ylabel=label)
    if 1 < len(values) <= _MOST_CHAINS:
        ax.legend(loc="best", fontsize=9, ncols=3)
    words = [f"{label} of {len(values)} chain{'s' * (len(values) != 1)} against the step."]
    for chain, y in list(values.items())[:_MOST_CHAINS]:
        half = len(y) // 2
        first, last = (float(numpy.mean(part)) if len(part) else float("nan") for part in (y[:half], y[half:]))
        words.append(f"Chain {chain}: mean {first:.4g} in the first half, {last:.4g} in the second.")
    return " ".join(words)


def _acceptance(ax: Axes, steps: Mapping[int, Array], values: Mapping[int, Array]) -> str:
    """The acceptance rate since the previous draw."""
    _lines(ax, steps, values)
    ax.set(xlabel="step", ylabel="acceptance rate", ylim=(-0.03, 1.03))
    means = [float(numpy.mean(y)) for y in values.values()]
    if len(values) == 1:
        return f"The acceptance rate of one chain, with mean {means[0]:.2f}."
    return f"Acceptance rates of {len(values)} chains, with means between {min(means):.2f} and {max(means):.2f}."


def _curve(ax: Axes, x: Array, y: Array, error: Array, xlabel: str, ylabel: str) -> str:
    """Measured points around the diagonal."""
    ax.plot([0, 1], [0, 1], color=MUTED, lw=1, ls="--")
    ax.errorbar(x, y, yerr=error, color=SERIES[0], marker="o", ms=4, lw=1, capsize=2, label="measured")
    ax.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, 1.02), ylim=(0, 1.05))
    points = ", ".join(f"{a:.2f}: {b:.2f}" for a, b in zip(x, y, strict=True))
    return f"{xlabel.capitalize()}, and {ylabel}: {points}."


def _reliability(ax: Axes, confidence: Array, frequency: Array, error: Array, count: Array, is_binary: bool) -> str:
    """Observed frequency against predicted probability in bins; below, the number of examples in each."""
    height = 0.25 * count / count.max()
    ax.bar(confidence, height, width=0.02, color=SERIES[5], alpha=0.35, label="examples (not to scale)")
    x, y = ("mean probability of class 1", "share of class 1") if is_binary else ("mean confidence", "accuracy")
    words = _curve(ax, confidence, frequency, error, f"{x} in the bin", y)
    ax.legend(loc="upper left", fontsize=9)
    return words


def _spreads(ax: Axes, groups: Mapping[str, Array]) -> str:
    """The distribution of the spread over the examples, by group."""
    groups = {name: values for name, values in groups.items() if len(values)}
    top = max(float(numpy.quantile(values, 0.995)) for values in groups.values()) or 1.0
    bins: Any = numpy.linspace(0, top, 41)
    words = []
    for colour, (name, values) in zip(SERIES, groups.items(), strict=False):
        weights = numpy.full(len(values), 1 / len(values))
        ax.hist(values.clip(0, top), bins=bins, weights=weights, histtype="step", color=colour, lw=1.4, label=name)
        low, middle, high = numpy.quantile(values, [0.25, 0.5, 0.75])
        number = f"{len(values)} example{'s' * (len(values) != 1)}"
        words.append(f"{name} ({number}): median {middle:.3g}, quartiles {low:.3g} and {high:.3g}.")
    ax.set(xlabel="spread (75% - 25% quantile over the draws)", ylabel="share of examples")
    ax.legend(loc="upper right", fontsize=9)
    return " ".join(words)


def _risk(ax: Axes, curves: Mapping[str, tuple[Array, Array]]) -> str:
    """The error rate among the examples that are kept, with the most uncertain dropped first."""
    words = []
    for colour, (name, (kept, errors)) in zip(SERIES, curves.items(), strict=False):
        ax.plot(kept, errors, color=colour, lw=1.4, label=f"by {name}")
        at = int(numpy.argmin(numpy.abs(kept - 0.8)))
        words.append(f"By {name}: {errors[-1]:.1%} errors among all examples, {errors[at]:.1%} if 80% are kept.")
    ax.set(xlabel="share of examples kept", ylabel="error rate", xlim=(0, 1.02))
    ax.set_ylim(bottom=0)
    ax.legend(loc="upper left", fontsize=9)
    return " ".join(words)


class Figure(NamedTuple):
    """A figure of the report; its file has its name in `FIGURES`."""

    title: str
    paint: Callable[..., str]
    width: float = 7.2
    height: float = 3.2


_coverage = partial(_curve, xlabel="level of the interval", ylabel="share of targets inside")
FIGURES = {
    "potential": Figure("U, minus the log density of the target, at the draws", _trace),
    "loss": Figure("Mean loss of the batch at the draws", _trace),
    "acceptance": Figure("Acceptance rate between draws", _acceptance, height=2.4),
    "burn-in": Figure("U in burn-in, the mean of each window", _trace, height=2.4),
    "reliability": Figure("Do predicted probabilities match observed frequencies?", _reliability, 4.6, 4.2),
    "risk": Figure("Error rate if the most uncertain examples are dropped", _risk, height=2.8),
    "coverage": Figure("Does interval coverage match the level?", _coverage, 4.6, 4.2),
    "spread": Figure("Distribution of the spread over the examples", _spreads, height=2.8),
}


def figure(name: str, *values: Any) -> Drawing:
    """One of `FIGURES`, painted from these values."""
    import matplotlib as mpl
    from matplotlib import figure as plots

    title, paint, width, height = FIGURES[name]
    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif", "font.size": 10, "text.color": INK,
        "axes.labelcolor": INK, "axes.edgecolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "grid.color": GRID,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.linewidth": 0.6,
        "legend.frameon": False, "axes.facecolor": "none", "figure.facecolor": "none", "axes.titlesize": 11,
    }  # fmt: skip
    with mpl.rc_context(style):
        canvas = plots.Figure(figsize=(width, height), layout="constrained")
        words = paint(canvas.subplots(), *values)
        file = io.StringIO()
        canvas.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return Drawing(name, title, words, _themed(file.getvalue(), name, title, words), 6.4 * width)
