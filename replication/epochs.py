"""Figures 2b and 3 at the paper's number of epochs: where Adam overfits."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from replication import published
from replication.drawing import canvas, legend
from replication.fig1 import WIDE, long_chain
from replication.fig2b import scan
from replication.fig3 import of_groups
from replication.quality import draw_quality, draw_reliability, quality_table, yardsticks
from replication.rows import VERSIONS, lean, rows
from replication.sections import RULE, Line, health, of_acceptance, select, table
from replication.settings import Preset
from replication.work import Work

TITLE = "Figures 2b and 3 after 100 epochs"
SIGMAS = (0.2, 0.5, 1.0, 2.0, 4.0, 10.0)
COLUMNS = list(VERSIONS)


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """Long chains with noise along the step, and long trainings; those of Figure 3 if all runs have the same length."""
    chains = [long_chain(preset, name, sigma) for name in VERSIONS for sigma in preset.points(SIGMAS, at_least=(2.0,))]
    parts = {"scan": chains if preset.long_steps else scan(preset, WIDE), "yardsticks": yardsticks(preset, preset.long)}
    return {name: lean(rows(work, settings), "groups", "reliability") for name, settings in parts.items()}


def draw(result: dict[str, Any]) -> Figure:
    """NLL, ECE, coverage, accuracy and reliability against sigma, with the yardsticks."""
    with canvas(2, 4, width=13.0, height=7.4) as (figure, axes):
        draw_quality(axes[:4], result["scan"], result["yardsticks"])
        draw_reliability(axes[4:], result["scan"], result["yardsticks"])
        legend(figure, axes[:4])
    return figure


def lines(result: dict[str, Any]) -> list[Line]:
    """The numbers of Figure 3, then acceptance and error for Figure 2b."""
    found = of_groups(result["scan"], [])
    for sigma in sorted({row["setting"]["sigma"] for row in result["scan"]}):
        here = [row for row in result["scan"] if row["setting"]["sigma"] == sigma]
        accepted, error = (known["with"].get(sigma) for known in (published.FIG2B_ACCEPTANCE, published.FIG2B_ERROR))
        found += of_acceptance(f"with noise along the step, sigma {sigma:g}", here, accepted, error)
    return found


def section(result: dict[str, Any]) -> str:
    """Published and measured values, then the quality of all methods."""
    own = [row for name in VERSIONS for row in select(result["scan"], name)]
    text = [
        table(lines(result), COLUMNS),
        RULE.format(read_to="0.01, 0.02 in acceptance, 0.002 in accuracy"),
        "",
        f"Chains and trainings of {own[0]['setting']['steps']:,} steps:",
        "",
        *quality_table([*own, *result["yardsticks"]]),
        "",
    ]
    return "\n".join([*text, health(result["scan"])])
