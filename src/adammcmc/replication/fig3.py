"""Figure 3: mean prediction and spread against sigma, by class and correctness; and whether the spread is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from adammcmc.replication import published
from adammcmc.replication.drawing import COLOURS, LABELS, Value, canvas, crosses, legend, points
from adammcmc.replication.fig1 import WIDE, long_chain
from adammcmc.replication.fig2b import scan
from adammcmc.replication.rows import VERSIONS, exact_settings, lean, rows, version
from adammcmc.replication.sections import (
    RULE,
    Line,
    at,
    error_of,
    exact_data,
    health,
    name_of,
    of_anchors,
    of_test_jets,
    seeds_by,
    select,
    shown,
    table,
)
from adammcmc.replication.settings import Preset
from adammcmc.replication.trials import Trial
from adammcmc.replication.work import Work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLUMNS",
    "GROUPS",
    "TARGETS",
    "TITLE",
    "draw",
    "draw_quality",
    "lines",
    "long_lines",
    "run",
    "section",
    "yardsticks",
]

TITLE = "Figure 3: mean prediction and spread against sigma"
LONG_SIGMAS = (0.2, 0.5, 1.0, 2.0, 4.0, 10.0)
"""Of the chains of as many epochs as the paper's."""
TARGETS = (0.6, 0.85, 0.95)
"""Acceptances that the exact chains' steps are tuned to: their sigma, so to say."""


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """The scan of Figure 2b with noise along the step; exact chains with steps of several sizes; ensembles."""
    anchors = [
        version(preset, name, sigma=sigma, sigma_delta=WIDE, network="particlenet")
        for name, sigma in (("released", 0.2), ("released", 2.0), ("released", 10.0))
    ]
    longer = [long_chain(preset, name, sigma) for name in VERSIONS for sigma in preset.points(LONG_SIGMAS, at_least=(2.0,))]
    long_anchors = [long_chain(preset, name, 2.0, network="particlenet") for name in VERSIONS]
    long_anchors += [Trial.of(preset, "snapshots", network="particlenet", **preset.long)]
    parts: dict[str, tuple[list[Trial], int]] = {
        "scan": (scan(preset, WIDE), preset.seeds),
        "long": (longer if preset.long_steps else [], preset.seeds),
        "long yardsticks": (yardsticks(preset, preset.long) if preset.long_steps else [], preset.seeds),
        "long anchors": (long_anchors if preset.long_steps and preset.anchors else [], 1),
        "exact": (exact_settings(preset, targets=TARGETS), preset.exact_chains),
        "yardsticks": (yardsticks(preset), preset.seeds),
        "anchors": (anchors if preset.anchors else [], 1),
    }
    return {name: lean(rows(work, settings, seeds), "groups", "reliability") for name, (settings, seeds) in parts.items()}


def yardsticks(preset: Preset, sizes: dict[str, Any] | None = None) -> list[Trial]:
    """One network; ten points of its path, which is what noise and test must improve on; the network with draws of its dropout
    masks; five networks at the compute of one chain; and five full ones.

    A step of AdamMCMC has two forwards and one backward, where Adam has one of each: about 4/3 of it.
    """
    base = replace(Trial.of(preset, "adam"), **(sizes or {}))
    return [
        base,
        replace(base, method="snapshots"),
        replace(base, method="dropout"),
        replace(base, method="ensemble", num_draws=5, steps=max(2, base.steps * 4 // 15)),
        replace(base, method="ensemble", num_draws=5),
    ]


GROUPS = {
    "top, right": "top jets, taken for top",
    "top, wrong": "top jets, taken for QCD",
    "qcd, right": "QCD jets, taken for QCD",
    "qcd, wrong": "QCD jets, taken for top",
}
QUALITY = {
    "nll": "NLL (nats per jet)",
    "ece": "calibration error (ECE)",
    "coverage": "coverage of 90% bars",
    "accuracy": "accuracy",
}


def draw(result: dict[str, Any]) -> Figure:
    """Mean prediction and spread of each group against sigma; below, what the paper does not show: quality beside the
    yardsticks, at both lengths of the chains, and reliability."""
    longest = "long" if result["long"] else "scan"
    with canvas(5 if result["long"] else 4, 4, width=13.0, height=16.0 if result["long"] else 13.0) as (figure, axes):
        for column, (group, title) in enumerate(GROUPS.items()):
            for place, what, known in ((column, "mean", published.FIG3_MEAN), (4 + column, "spread", published.FIG3_SPREAD)):
                for name in VERSIONS:
                    own = select(result["scan"], name)
                    x = [row["setting"]["sigma"] for row in own]
                    points(axes[place], x, [row["groups"][group][what] for row in own], name)
                crosses(axes[place], known[group])
            axes[column].set_title(title)
            axes[column].set_ylim(-0.03, 1.03)
            axes[4 + column].set_ylim(-0.005, max(0.05, axes[4 + column].get_ylim()[1]))
        steps = f"{result['scan'][0]['setting']['steps']:,} steps"
        axes[0].set_ylabel(f"mean prediction, {steps}")
        axes[4].set_ylabel(f"spread (75% - 25%), {steps}")
        _quality(axes[8:12], result["scan"], result["yardsticks"])
        if result["long"]:
            _quality(axes[12:16], result["long"], result["long yardsticks"])
        _reliability(axes[-4:], result[longest], result["yardsticks" if longest == "scan" else "long yardsticks"])
        legend(figure, axes[:-4])
    return figure


def draw_quality(result: dict[str, Any]) -> Figure:
    """Of the longest runs alone: NLL, ECE, coverage and accuracy against sigma, with the yardsticks."""
    part, yardsticks = ("long", "long yardsticks") if result["long"] else ("scan", "yardsticks")
    with canvas(1, 4, width=13.0, height=4.0) as (figure, axes):
        _quality(axes, result[part], result[yardsticks])
        legend(figure, axes)
    return figure


def _quality(axes: Sequence[Axes], scan: list[dict[str, Any]], yardsticks: list[dict[str, Any]]) -> None:
    """NLL, ECE, coverage and accuracy against sigma, with the yardsticks as levels."""
    for one, (what, title) in zip(axes, QUALITY.items(), strict=True):
        for name in VERSIONS:
            own = select(scan, name)
            points(one, [row["setting"]["sigma"] for row in own], [row[what] for row in own], name)
        _levels(one, _single(yardsticks), what)
        one.set_title(title)
        one.set_xlabel("sigma (nominal)")
    axes[0].set_ylabel(f"on test jets, {scan[0]['setting']['steps']:,} steps")


def _reliability(axes: Sequence[Axes], scan: list[dict[str, Any]], yardsticks: list[dict[str, Any]]) -> None:
    """Tops that were found less tops that were promised, by score: each sigma a line, from dark (small) to light."""
    import matplotlib as mpl

    for one, name in zip(axes, (*VERSIONS, "yardsticks"), strict=True):
        own = _single(yardsticks) if name == "yardsticks" else select(scan, name)
        for number, row in enumerate(own):
            curve = row["reliability"]
            gaps = [found - said for found, said in zip(curve["accuracy"], curve["confidence"], strict=True)]
            colour: Any = mpl.colormaps["viridis"](number / max(1, len(own)))
            label = f"sigma {row['setting']['sigma']:g}"
            if name == "yardsticks":
                colour, label = COLOURS[name_of(row)], LABELS[name_of(row)]
            one.plot(curve["confidence"], gaps, marker=".", linewidth=1.2, color=colour, label=label)
        one.axhline(0.0, color="black", linewidth=0.8)
        one.set_ylim(-0.4, 0.4)
        one.set_title(f"reliability: {LABELS.get(name, name)}")
        one.set_xlabel("mean score of a top")
        one.legend(fontsize=8, ncols=1 if name == "yardsticks" else 2)
    axes[0].set_ylabel(f"tops found less promised, {scan[0]['setting']['steps']:,} steps")


COLUMNS = [*VERSIONS, "exact"]


def lines(result: dict[str, Any]) -> list[Line]:
    """Mean prediction and spread of each group."""
    return _of_groups(result["scan"], result["exact"])


def long_lines(result: dict[str, Any]) -> list[Line]:
    """The same of the chains of as many epochs as the paper's; and their acceptance and error, for Figure 2b."""
    found = _of_groups(result["long"], [])
    for sigma in sorted({row["setting"]["sigma"] for row in result["long"]}):
        here = [row for row in result["long"] if row["setting"]["sigma"] == sigma]
        accepted, error = (known["with"].get(sigma) for known in (published.FIG2B_ACCEPTANCE, published.FIG2B_ERROR))
        words = f"with noise along the step, sigma {sigma:g}"
        found.append(Line(f"acceptance, {words}", accepted, at(here, "acceptance"), published.ACCEPTANCE_READ_TO))
        if error is not None:
            wrong = {name: error_of(value) for name, value in at(here, "accuracy").items()}
            jets = of_test_jets(error, here)
            found.append(Line(f"1 - accuracy, {words}", error, wrong, published.ERROR_READ_TO, test_error=jets))
    return found


def _of_groups(scan: list[dict[str, Any]], exact: list[dict[str, Any]]) -> list[Line]:
    found: list[Line] = []
    for what, known in (("mean", published.FIG3_MEAN), ("spread", published.FIG3_SPREAD)):
        for group, title in GROUPS.items():
            for sigma, value in known[group].items():
                rows = [row for row in scan if row["setting"]["sigma"] == sigma]
                if rows:
                    rows += [_middle(exact)] if exact else []
                    ours: dict[str, Value] = {name_of(row): row["groups"][group][what] for row in rows}
                    errors = {name_of(row): row["groups"][group][f"{what}, test error"] for row in rows}
                    word = "mean prediction" if what == "mean" else "spread"
                    words = f"{word}, {title}, sigma {sigma:g}"
                    seeds = seeds_by(rows)
                    found.append(Line(words, value, ours, published.SPREAD_READ_TO, seeds=seeds, test_error=errors))
    return found


def section(result: dict[str, Any]) -> str:
    """Spread and mean prediction of each group; then calibration, with the yardsticks."""
    shown_rows = [row for name in VERSIONS for row in select(result["scan"], name)]
    others = _table_of_quality([*shown_rows, *result["exact"], *result["yardsticks"]])
    text = [table(lines(result), COLUMNS), RULE.format(read_to="0.01"), "", *others, ""]
    for name in VERSIONS:
        own = [row for row in select(result["scan"], name) if row["mean_spread"] is not None]
        if len(own) > 1:
            text.append(
                f"{LABELS[name].capitalize()}, mean spread: {shown(own[0]['mean_spread'])} at sigma "
                f"{own[0]['setting']['sigma']:g}, {shown(own[-1]['mean_spread'])} at sigma {own[-1]['setting']['sigma']:g}."
            )
    if len(result["exact"]) > 1:
        spreads = ", ".join(f"{shown(r['mean_spread'])} at {r['setting']['target_acceptance']:g}" for r in result["exact"])
        text.append(f"Exact chains, mean spread by target acceptance, which sets the length of their steps: {spreads}.")
    text.append(exact_data(result["exact"], result["scan"]))
    if result["long"]:
        longer = [row for name in VERSIONS for row in select(result["long"], name)]
        steps = longer[0]["setting"]["steps"]
        text += ["", f"Chains and trainings of {steps:,} steps, as many epochs as the paper's, by the same rule:", ""]
        text += [table(long_lines(result), list(VERSIONS)), "", *_table_of_quality([*longer, *result["long yardsticks"]])]
    anchors = [*result["anchors"], *result["long anchors"]]
    return "\n".join([*text, "", of_anchors(anchors), health([*result["scan"], *result["exact"]])])


def _table_of_quality(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| | accuracy | NLL | ECE | coverage of 90% bars | mean spread | R-hat, median (worst) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        agreement = f"{row['rhat']:.3f} ({row['worst_rhat']:.3f})" if row.get("rhat") else "–"
        numbers = [shown(row[what]) for what in ("accuracy", "nll", "ece", "coverage", "mean_spread")]
        lines.append(f"| {_title(row)} | {' | '.join(numbers)} | {agreement} |")
    return lines


def _middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return rows[len(rows) // 2]


def _single(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of each method: of two ensembles the one at the compute of one chain, which comes first."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(name_of(row), row)
    return list(found.values())


def _levels(axes: Axes, rows: list[dict[str, Any]], *path: str) -> None:
    """What has no sigma: a level line at the number under this path."""
    for row in rows:
        value: Any = row
        for key in path:
            value = value[key]
        if value is not None and value[0] is not None:
            name = name_of(row)
            label = "deep ensemble at equal compute" if name == "ensemble" else LABELS[name]
            axes.axhline(value[0], color=COLOURS[name], linestyle="--", linewidth=1.3, label=label)


def _title(row: dict[str, Any]) -> str:
    name, setting = name_of(row), row["setting"]
    if name in VERSIONS:
        return f"{LABELS[name]}, sigma {setting['sigma']:g}"
    if name == "exact":
        start = "" if setting["start_seed"] is None else ", all from one start"
        return f"{LABELS[name]}, target acceptance {setting['target_acceptance']:g}{start}"
    return f"{LABELS[name]}, {setting['num_draws']} of {setting['steps']:,} steps" if name == "ensemble" else LABELS[name]
