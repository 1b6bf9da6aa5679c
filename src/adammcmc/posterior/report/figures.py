"""The figures of a report, each painted from plain numbers. `FIGURES` lists them all: add one there.

A painter draws on axes and returns what the figure shows, in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
from numpy.typing import NDArray

from adammcmc.posterior.report.drawing import MUTED, SERIES, Drawing, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FIGURES", "Figure", "figure"]

Array = NDArray[numpy.float64]
_MOST_CHAINS = 6  # with names and colours; more are drawn in one colour, without names


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


def _coverage(ax: Axes, levels: Array, shares: Array, error: Array) -> str:
    """The share of targets inside central intervals of the prediction, against their level."""
    return _curve(ax, levels, shares, error, "level of the interval", "share of targets inside")


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


FIGURES = {
    "potential": Figure("U, minus the log density of the target, at the draws", _trace),
    "loss": Figure("Mean loss of the batch at the draws", _trace),
    "acceptance": Figure("Acceptance rate between draws", _acceptance, height=2.4),
    "reliability": Figure("Do predicted probabilities match observed frequencies?", _reliability, 4.6, 4.2),
    "risk": Figure("Error rate if the most uncertain examples are dropped", _risk, height=2.8),
    "coverage": Figure("Does interval coverage match the level?", _coverage, 4.6, 4.2),
    "spread": Figure("Distribution of the spread over the examples", _spreads, height=2.8),
}


def figure(name: str, *values: Any) -> Drawing:
    """One of `FIGURES`, painted from these values."""
    title, paint, width, height = FIGURES[name]
    return draw(name, title, lambda ax: paint(ax, *values), width, height)
