"""The figures of a report, each from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy
from numpy.typing import NDArray

from adammcmc.posterior.report.drawing import MUTED, SERIES, Drawing, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["NAMES", "acceptance", "coverage", "reliability", "risk", "spreads", "trace"]

NAMES = ("potential", "loss", "acceptance", "reliability", "risk", "coverage", "spread")
"""Files of all figures that a report may have, without suffix."""

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


def trace(name: str, title: str, label: str, steps: Mapping[int, Array], values: Mapping[int, Array]) -> Drawing:
    """One number of each draw against the step, a line for each chain."""

    def paint(ax: Axes) -> str:
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

    return draw(name, title, paint)


def acceptance(steps: Mapping[int, Array], values: Mapping[int, Array]) -> Drawing:
    """The acceptance rate since the previous draw."""

    def paint(ax: Axes) -> str:
        _lines(ax, steps, values)
        ax.set(xlabel="step", ylabel="acceptance rate", ylim=(-0.03, 1.03))
        means = [float(numpy.mean(y)) for y in values.values()]
        if len(values) == 1:
            return f"The acceptance rate of one chain, with mean {means[0]:.2f}."
        return f"Acceptance rates of {len(values)} chains, with means between {min(means):.2f} and {max(means):.2f}."

    return draw("acceptance", "Acceptance rate between draws", paint, height=2.4)


def reliability(
    confidence: Array, accuracy: Array, error: Array, count: Array, ece: float, *, is_binary: bool = False
) -> Drawing:
    """Observed frequency against predicted probability in bins; below, the number of examples in each."""
    x, y = ("mean probability of class 1", "share of class 1") if is_binary else ("mean confidence", "accuracy")

    def paint(ax: Axes) -> str:
        ax.plot([0, 1], [0, 1], color=MUTED, lw=1, ls="--")
        ax.bar(confidence, 0.25 * count / count.max(), width=0.02, color=SERIES[5], alpha=0.35, label="examples (not to scale)")
        ax.errorbar(confidence, accuracy, yerr=error, color=SERIES[0], marker="o", ms=4, lw=1, capsize=2, label="measured")
        ax.set(xlabel=f"{x} in the bin", ylabel=y, xlim=(0, 1.02), ylim=(0, 1.05))
        ax.legend(loc="upper left", fontsize=9)
        points = ", ".join(f"{c:.2f}: {a:.2f}" for c, a in zip(confidence, accuracy, strict=True))
        return f"Expected calibration error {ece:.3f}. {x.capitalize()} and {y}, bin by bin: {points}."

    title = "Do predicted probabilities match observed frequencies?" if is_binary else "Does confidence match accuracy?"
    return draw("reliability", title, paint, width=4.6, height=4.2)


def coverage(levels: Array, found: Array, error: Array) -> Drawing:
    """The share of targets inside central intervals of the prediction, against their level."""

    def paint(ax: Axes) -> str:
        ax.plot([0, 1], [0, 1], color=MUTED, lw=1, ls="--")
        ax.errorbar(levels, found, yerr=error, color=SERIES[0], marker="o", ms=4, lw=1, capsize=2)
        ax.set(xlabel="level of the interval", ylabel="share of targets inside", xlim=(0, 1.02), ylim=(0, 1.05))
        points = ", ".join(f"{level:.0%}: {share:.0%}" for level, share in zip(levels, found, strict=True))
        return f"Level of the interval and share of targets inside: {points}."

    return draw("coverage", "Does interval coverage match the level?", paint, width=4.6, height=4.2)


def spreads(label: str, groups: Mapping[str, Array]) -> Drawing:
    """The distribution of an uncertainty over the examples, by group."""
    groups = {name: values for name, values in groups.items() if len(values)}

    def paint(ax: Axes) -> str:
        top = max(float(numpy.quantile(values, 0.995)) for values in groups.values()) or 1.0
        bins = numpy.linspace(0, top, 41)
        words = []
        for colour, (name, values) in zip(SERIES, groups.items(), strict=False):
            weights = numpy.full(len(values), 1 / len(values))
            ax.hist(values.clip(0, top), bins=bins, weights=weights, histtype="step", color=colour, lw=1.4, label=name)  # type: ignore[arg-type]
            low, middle, high = numpy.quantile(values, [0.25, 0.5, 0.75])
            number = f"{len(values)} example{'s' * (len(values) != 1)}"
            words.append(f"{name} ({number}): median {middle:.3g}, quartiles {low:.3g} and {high:.3g}.")
        ax.set(xlabel=label, ylabel="share of examples")
        ax.legend(loc="upper right", fontsize=9)
        return " ".join(words)

    return draw("spread", f"Distribution of the {label}", paint, height=2.8)


def risk(curves: Mapping[str, tuple[Array, Array]]) -> Drawing:
    """The error rate among the examples that are kept, with the most uncertain dropped first."""

    def paint(ax: Axes) -> str:
        words = []
        for colour, (name, (kept, errors)) in zip(SERIES, curves.items(), strict=False):
            ax.plot(kept, errors, color=colour, lw=1.4, label=f"by {name}")
            at = int(numpy.argmin(numpy.abs(kept - 0.8)))
            words.append(f"By {name}: {errors[-1]:.1%} errors among all examples, {errors[at]:.1%} if 80% are kept.")
        ax.set(xlabel="share of examples kept", ylabel="error rate", xlim=(0, 1.02))
        ax.set_ylim(bottom=0)
        ax.legend(loc="upper left", fontsize=9)
        return " ".join(words)

    return draw("risk", "Error rate if the most uncertain examples are dropped", paint, height=2.8)
