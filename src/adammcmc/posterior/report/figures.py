"""The figures of a report, each from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy
from numpy.typing import NDArray

from adammcmc.posterior.report.drawing import MUTED, SERIES, Drawing, axes

__all__ = ["NAMES", "acceptance", "coverage", "reliability", "risk", "spreads", "trace"]

NAMES = ("potential", "loss", "acceptance", "reliability", "risk", "coverage", "spread")
"""Of the files of all figures that a report may have, without ending."""

Array = NDArray[numpy.float64]
_MOST_CHAINS = 6  # by name and colour; more are drawn in one colour, without names


def _colour(chain: int, num_chains: int) -> str:
    return SERIES[chain] if num_chains <= _MOST_CHAINS else SERIES[0]


def _lines(ax: object, steps: Mapping[int, Array], values: Mapping[int, Array]) -> None:
    many = len(values) > _MOST_CHAINS
    for place, (chain, y) in enumerate(values.items()):
        label = None if many or len(values) == 1 else f"chain {chain}"
        ax.plot(  # type: ignore[attr-defined]
            steps[chain], y, color=_colour(place, len(values)), lw=1, alpha=0.35 if many else 0.9, label=label,
            marker="." if len(y) < 60 else None, ms=4,
        )  # fmt: skip


def trace(name: str, title: str, label: str, steps: Mapping[int, Array], values: Mapping[int, Array]) -> Drawing:
    """One number of each draw against the step, a line for each chain."""
    with axes(name, title) as (ax, made):
        _lines(ax, steps, values)
        ax.set(xlabel="step", ylabel=label)
        if 1 < len(values) <= _MOST_CHAINS:
            ax.legend(loc="best", fontsize=9, ncols=3)
        parts = []
        for chain, y in list(values.items())[:_MOST_CHAINS]:
            half = len(y) // 2
            first, last = (float(numpy.mean(part)) if len(part) else float("nan") for part in (y[:half], y[half:]))
            parts.append(f"Chain {chain}: mean {first:.4g} in the first half, {last:.4g} in the second.")
        made.append(f"{label} of {len(values)} chain{'s' * (len(values) != 1)} against the step.")
        made += parts
    drawing: Drawing = made[0]
    return drawing


def acceptance(steps: Mapping[int, Array], values: Mapping[int, Array]) -> Drawing:
    """The share of proposals accepted since the last draw."""
    with axes("acceptance", "Proposals accepted between two draws", height=2.4) as (ax, made):
        _lines(ax, steps, values)
        ax.set(xlabel="step", ylabel="share accepted", ylim=(-0.03, 1.03))
        means = [float(numpy.mean(y)) for y in values.values()]
        low, high = min(means), max(means)
        if len(values) == 1:
            made.append(f"The share accepted of one chain; its mean is {low:.2f}.")
        else:
            made.append(f"The share accepted of {len(values)} chains; their means lie between {low:.2f} and {high:.2f}.")
    drawing: Drawing = made[0]
    return drawing


def reliability(
    confidence: Array, accuracy: Array, error: Array, count: Array, ece: float, *, is_binary: bool = False
) -> Drawing:
    """How often the tag is right, against how sure the mean prediction is, in bins; below, how many examples are in each."""
    title = "Does it come true as often as it says?" if is_binary else "Is it as often right as it is sure?"
    with axes("reliability", title, width=4.6, height=4.2) as (ax, made):
        ax.plot([0, 1], [0, 1], color=MUTED, lw=1, ls="--")
        ax.bar(confidence, 0.25 * count / count.max(), width=0.02, color=SERIES[5], alpha=0.35, label="examples (not to scale)")
        ax.errorbar(confidence, accuracy, yerr=error, color=SERIES[0], marker="o", ms=4, lw=1, capsize=2, label="measured")
        x, y = ("mean probability of class 1", "share of class 1") if is_binary else ("mean confidence", "share that is right")
        ax.set(xlabel=f"{x} in the bin", ylabel=y, xlim=(0, 1.02), ylim=(0, 1.05))
        ax.legend(loc="upper left", fontsize=9)
        points = ", ".join(f"{c:.2f}: {a:.2f}" for c, a in zip(confidence, accuracy, strict=True))
        made.append(f"Expected calibration error {ece:.3f}. Confidence and share that is right, bin by bin: {points}.")
    drawing: Drawing = made[0]
    return drawing


def coverage(levels: Array, found: Array, error: Array) -> Drawing:
    """How many targets central intervals of the prediction hold, against how many they should."""
    with axes("coverage", "Do the intervals hold what they promise?", width=4.6, height=4.2) as (ax, made):
        ax.plot([0, 1], [0, 1], color=MUTED, lw=1, ls="--")
        ax.errorbar(levels, found, yerr=error, color=SERIES[0], marker="o", ms=4, lw=1, capsize=2)
        ax.set(xlabel="promised", ylabel="share of targets inside", xlim=(0, 1.02), ylim=(0, 1.05))
        points = ", ".join(f"{level:.0%}: {share:.0%}" for level, share in zip(levels, found, strict=True))
        made.append(f"Promised coverage and share of targets inside: {points}.")
    drawing: Drawing = made[0]
    return drawing


def spreads(label: str, groups: Mapping[str, Array]) -> Drawing:
    """The distribution of an uncertainty over the examples, by group."""
    with axes("spread", f"How the {label} is distributed", height=2.8) as (ax, made):
        top = max(float(numpy.quantile(values, 0.995)) for values in groups.values() if len(values)) or 1.0
        bins = numpy.linspace(0, top, 41)
        for i, (name, values) in enumerate(groups.items()):
            if len(values) == 0:
                continue
            weights = numpy.full(len(values), 1 / len(values))
            ax.hist(values.clip(0, top), bins=bins, weights=weights, histtype="step", color=SERIES[i], lw=1.4, label=name)  # type: ignore[arg-type]
            low, middle, high = numpy.quantile(values, [0.25, 0.5, 0.75])
            number = f"{len(values)} example{'s' * (len(values) != 1)}"
            made.append(f"{name} ({number}): median {middle:.3g}, quartiles {low:.3g} and {high:.3g}.")
        ax.set(xlabel=label, ylabel="share of examples")
        ax.legend(loc="upper right", fontsize=9)
    drawing: Drawing = made[0]
    return drawing


def risk(curves: Mapping[str, tuple[Array, Array]]) -> Drawing:
    """The share of errors among the examples that are kept, the most uncertain left out first."""
    with axes("risk", "Errors among what is kept, the most uncertain left out first", height=2.8) as (ax, made):
        for i, (name, (kept, errors)) in enumerate(curves.items()):
            ax.plot(kept, errors, color=SERIES[i], lw=1.4, label=f"by {name}")
            at = int(numpy.argmin(numpy.abs(kept - 0.8)))
            made.append(f"By {name}: {errors[-1]:.1%} errors among all examples, {errors[at]:.1%} if 80% are kept.")
        ax.set(xlabel="share of examples kept", ylabel="share of errors", xlim=(0, 1.02))
        ax.set_ylim(bottom=0)
        ax.legend(loc="upper left", fontsize=9)
    drawing: Drawing = made[0]
    return drawing


def by_chain(index: Sequence[Mapping[str, object]], value: str) -> tuple[dict[int, Array], dict[int, Array]]:
    """Steps and values of each chain from the index of the draws; a value that is not known is NaN."""
    steps: dict[int, list[float]] = {}
    values: dict[int, list[float]] = {}
    for row in index:
        chain = int(row["chain"])  # type: ignore[call-overload]
        found = row.get(value)
        steps.setdefault(chain, []).append(float(row["step"]))  # type: ignore[arg-type]
        values.setdefault(chain, []).append(float("nan") if found is None else float(found))  # type: ignore[arg-type]
    return {c: numpy.array(x) for c, x in steps.items()}, {c: numpy.array(x) for c, x in values.items()}
