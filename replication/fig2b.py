"""Figure 2b: acceptance, and accuracy of the posterior mean, against sigma, with and without noise along the step."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from replication import published
from replication.drawing import LABELS, canvas, crosses, legend, points
from replication.fig1 import WIDE
from replication.rows import VERSIONS, lean, rows, version
from replication.sections import RULE, Line, error_of, health, of_acceptance, of_anchors, select, shown, table
from replication.settings import Preset
from replication.trials import Trial
from replication.work import Work

TITLE = "Figure 2b: acceptance and accuracy against sigma"
SIGMAS = (0.2, 0.5, 1.0, 2.0, 4.0, 6.0, 10.0)
LATE_SIGMAS = (0.5, 1.0, 2.0, 4.0, 10.0)
"""Of chains that start from weights trained by Adam for as many steps as the burn-in."""


def scan(preset: Preset, sigma_delta: float) -> list[Trial]:
    """The paper's sigmas in each version."""
    return [
        version(preset, name, sigma=sigma, sigma_delta=sigma_delta)
        for name in VERSIONS
        for sigma in preset.points(SIGMAS, at_least=(2.0,))
    ]


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """With and without noise along the step, and without it also from trained weights; some on the paper's network."""
    anchors = [
        version(preset, "released", sigma=10.0, sigma_delta=WIDE, network="particlenet"),
        version(preset, "printed, batch sum", sigma=0.2, sigma_delta=WIDE, network="particlenet"),
        version(preset, "printed, batch sum", sigma=2.0, sigma_delta=0.0, network="particlenet"),
        version(preset, "released", sigma=2.0, sigma_delta=0.0, start=preset.burn_in, network="particlenet"),
        version(preset, "printed, batch sum", sigma=2.0, sigma_delta=0.0, start=preset.burn_in, network="particlenet"),
    ]
    late = [
        version(preset, name, sigma=sigma, sigma_delta=0.0, start=preset.burn_in)
        for name in VERSIONS
        for sigma in preset.points(LATE_SIGMAS, at_least=(2.0,))
    ]
    return {
        "with": lean(rows(work, scan(preset, WIDE))),
        "without": lean(rows(work, scan(preset, 0.0))),
        "without, after Adam": lean(rows(work, late)),
        "anchors": lean(rows(work, anchors, 1)) if preset.anchors else [],
    }


PARTS = {
    "with": "with noise along the step",
    "without": "without, from initialisation",
    "without, after Adam": "without, from trained weights",
}


def _published(which: str) -> str:
    return which.partition(",")[0]


def draw(result: dict[str, Any]) -> Figure:
    """Acceptance (above) and 1 - accuracy (below) against sigma, with and without noise along the step."""
    with canvas(2, 3, width=13.0, height=7.2) as (figure, axes):
        for column, (which, title) in enumerate(PARTS.items()):
            above, below = axes[column], axes[3 + column]
            for number, name in enumerate(VERSIONS):
                own = select(result[which], name)
                x = [row["setting"]["sigma"] + 0.1 * (number - 1) for row in own]  # side by side
                points(above, x, [row["acceptance"] for row in own], name)
                points(below, x, [error_of(row["accuracy"]) for row in own], name)
            crosses(above, published.FIG2B_ACCEPTANCE[_published(which)])
            crosses(below, published.FIG2B_ERROR[_published(which)])
            above.set(title=title, ylabel="acceptance")
            above.set_ylim(-0.03, 1.03)
            below.set(ylabel="1 - accuracy of the posterior mean", xlabel="sigma (nominal)")
        legend(figure, axes)
    return figure


COLUMNS = list(VERSIONS)


def lines(result: dict[str, Any]) -> list[Line]:
    """Acceptance and error at each sigma."""
    found: list[Line] = []
    for which, title in PARTS.items():
        for sigma in sorted({row["setting"]["sigma"] for row in result[which]}):
            here = [row for row in result[which] if row["setting"]["sigma"] == sigma]
            known = [numbers[_published(which)].get(sigma) for numbers in (published.FIG2B_ACCEPTANCE, published.FIG2B_ERROR)]
            found += of_acceptance(f"{title}, sigma {sigma:g}", here, *known)
    return found


def section(result: dict[str, Any]) -> str:
    """Published and measured values at each sigma."""
    text = [table(lines(result), COLUMNS), RULE.format(read_to="0.02 in acceptance, 0.002 in accuracy"), ""]
    for name in COLUMNS:
        own = [row for row in select(result["with"], name) if row["acceptance"] is not None]
        if len(own) > 1:
            low, high = own[0], own[-1]
            text.append(
                f"{LABELS[name].capitalize()}, from sigma {low['setting']['sigma']:g} to {high['setting']['sigma']:g}, "
                f"acceptance goes from {shown(low['acceptance'])} to {shown(high['acceptance'])} and 1 - accuracy from "
                f"{shown(error_of(low['accuracy']))} to {shown(error_of(high['accuracy']))}."
            )
    return "\n".join([*text, of_anchors(result["anchors"]), health([*result["with"], *result["without, after Adam"]])])
