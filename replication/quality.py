"""Quality of the error bars: NLL, ECE, coverage, accuracy and reliability, compared with the yardsticks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from replication.drawing import COLOURS, LABELS, points
from replication.rows import VERSIONS
from replication.sections import name_of, select, shown
from replication.settings import Preset
from replication.trials import Trial

QUALITY = {
    "nll": "NLL (nats per jet)",
    "ece": "calibration error (ECE)",
    "coverage": "coverage of 90% bars",
    "accuracy": "accuracy",
}


def yardsticks(preset: Preset, sizes: dict[str, Any] | None = None) -> list[Trial]:
    """Adam; ten points of its path, which noise and acceptance test must improve on; random dropout masks; an ensemble
    of five at the compute of one chain; and an ensemble of five full trainings.

    A step of AdamMCMC has two forward passes and one backward pass, where Adam has one of each: about 4/3 of its cost.
    """
    base = replace(Trial.of(preset, "adam"), **(sizes or {}))
    return [
        base,
        replace(base, method="snapshots"),
        replace(base, method="dropout"),
        replace(base, method="ensemble", num_draws=5, steps=max(2, base.steps * 4 // 15)),
        replace(base, method="ensemble", num_draws=5),
    ]


def draw_quality(axes: Sequence[Axes], scan: list[dict[str, Any]], yardsticks: list[dict[str, Any]]) -> None:
    """NLL, ECE, coverage and accuracy against sigma, with the yardsticks as horizontal lines."""
    for one, (what, title) in zip(axes, QUALITY.items(), strict=True):
        for name in VERSIONS:
            own = select(scan, name)
            points(one, [row["setting"]["sigma"] for row in own], [row[what] for row in own], name)
        _levels(one, _single(yardsticks), what)
        one.set(title=title, xlabel="sigma (nominal)")
    axes[0].set_ylabel(f"on test jets, {scan[0]['setting']['steps']:,} steps")


def draw_reliability(axes: Sequence[Axes], scan: list[dict[str, Any]], yardsticks: list[dict[str, Any]]) -> None:
    """Observed minus predicted fraction of tops, by score: one line per sigma, from dark (small) to light."""
    for one, name in zip(axes, (*VERSIONS, "yardsticks"), strict=True):
        own = _single(yardsticks) if name == "yardsticks" else select(scan, name)
        for number, row in enumerate(own):
            curve = row["reliability"]
            gaps = [found - predicted for found, predicted in zip(curve["accuracy"], curve["confidence"], strict=True)]
            colour: Any = mpl.colormaps["viridis"](number / max(1, len(own)))
            label = f"sigma {row['setting']['sigma']:g}"
            if name == "yardsticks":
                colour, label = COLOURS[name_of(row)], LABELS[name_of(row)]
            one.plot(curve["confidence"], gaps, marker=".", linewidth=1.2, color=colour, label=label)
        one.axhline(0.0, color="black", linewidth=0.8)
        one.set_ylim(-0.4, 0.4)
        one.set(title=f"reliability: {LABELS.get(name, name)}", xlabel="mean score of a top")
        one.legend(fontsize=8, ncols=1 if name == "yardsticks" else 2)
    axes[0].set_ylabel(f"tops found less promised, {scan[0]['setting']['steps']:,} steps")


def quality_table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: quality and R-hat of each row."""
    lines = [
        "| | accuracy | NLL | ECE | coverage of 90% bars | mean spread | R-hat, median (worst) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        agreement = f"{row['rhat']:.3f} ({row['worst_rhat']:.3f})" if row.get("rhat") else "–"
        numbers = [shown(row[what]) for what in ("accuracy", "nll", "ece", "coverage", "mean_spread")]
        lines.append(f"| {title_of(row)} | {' | '.join(numbers)} | {agreement} |")
    return lines


def _single(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per method: of the two ensembles the one at the compute of one chain, which comes first."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(name_of(row), row)
    return list(found.values())


def _levels(axes: Axes, rows: list[dict[str, Any]], what: str) -> None:
    """Methods without a sigma, as horizontal lines."""
    for row in rows:
        value, name = row[what], name_of(row)
        if value is not None and value[0] is not None:
            label = "deep ensemble at equal compute" if name == "ensemble" else LABELS[name]
            axes.axhline(value[0], color=COLOURS[name], linestyle="--", linewidth=1.3, label=label)


def title_of(row: dict[str, Any]) -> str:
    """A row's method and setting, for tables."""
    name, setting = name_of(row), row["setting"]
    if name in VERSIONS:
        return f"{LABELS[name]}, sigma {setting['sigma']:g}"
    if name == "exact":
        start = "" if setting["start_seed"] is None else ", all from one start"
        return f"{LABELS[name]}, target acceptance {setting['target_acceptance']:g}{start}"
    return f"{LABELS[name]}, {setting['num_draws']} of {setting['steps']:,} steps" if name == "ensemble" else LABELS[name]
