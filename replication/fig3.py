"""Figure 3: mean prediction and spread against sigma, by class and correctness; and their calibration."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from replication import published
from replication.drawing import LABELS, Value, canvas, crosses, legend, points
from replication.fig1 import WIDE
from replication.fig2b import scan
from replication.quality import draw_quality, draw_reliability, quality_table, yardsticks
from replication.rows import VERSIONS, exact_settings, lean, rows, version
from replication.sections import RULE, Line, exact_data, health, name_of, of_anchors, seeds_by, select, shown, table
from replication.settings import Preset
from replication.trials import Trial
from replication.work import Work

TITLE = "Figure 3: mean prediction and spread against sigma"
TARGETS = (0.6, 0.85, 0.95)
"""Acceptances that the step sizes of the exact chains are tuned to: the counterpart of sigma."""


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """The scan of Figure 2b with noise along the step; exact chains with several step sizes; the yardsticks."""
    anchors = [
        version(preset, name, sigma=sigma, sigma_delta=WIDE, network="particlenet")
        for name, sigma in (("released", 0.2), ("released", 2.0), ("released", 10.0))
    ]
    parts: dict[str, tuple[list[Trial], int]] = {
        "scan": (scan(preset, WIDE), preset.seeds),
        "exact": (exact_settings(preset, targets=TARGETS), preset.exact_chains),
        "yardsticks": (yardsticks(preset), preset.seeds),
        "anchors": (anchors if preset.anchors else [], 1),
    }
    return {name: lean(rows(work, settings, seeds), "groups", "reliability") for name, (settings, seeds) in parts.items()}


GROUPS = {
    "top, right": "top jets, taken for top",
    "top, wrong": "top jets, taken for QCD",
    "qcd, right": "QCD jets, taken for QCD",
    "qcd, wrong": "QCD jets, taken for top",
}


def draw(result: dict[str, Any]) -> Figure:
    """Mean prediction and spread of each group against sigma; below, what the paper does not show: quality and
    reliability."""
    with canvas(4, 4, width=13.0, height=13.0) as (figure, axes):
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
        axes[0].set_ylabel("mean prediction")
        axes[4].set_ylabel("spread (75% - 25%)")
        draw_quality(axes[8:12], result["scan"], result["yardsticks"])
        draw_reliability(axes[12:], result["scan"], result["yardsticks"])
        legend(figure, axes[:12])
    return figure


COLUMNS = [*VERSIONS, "exact"]


def lines(result: dict[str, Any]) -> list[Line]:
    """Mean prediction and spread of each group."""
    return of_groups(result["scan"], result["exact"])


def of_groups(scan: list[dict[str, Any]], exact: list[dict[str, Any]]) -> list[Line]:
    """The same for any scan; the middle row for the exact chains."""
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
    """Mean prediction and spread of each group, then the quality of all methods."""
    shown_rows = [row for name in VERSIONS for row in select(result["scan"], name)]
    others = quality_table([*shown_rows, *result["exact"], *result["yardsticks"]])
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
    return "\n".join([*text, of_anchors(result["anchors"]), health([*result["scan"], *result["exact"]])])


def _middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return rows[len(rows) // 2]
