"""The inverse temperature lambda: spread, acceptance and accuracy over the paper's range, and its value in our
units."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from adammcmc.target.paper_units import from_paper
from replication.drawing import LABELS, canvas, legend, log_ticks, points
from replication.fig1 import WIDE
from replication.rows import VERSIONS, exact_settings, lean, rows, version
from replication.sections import Line, at, exact_data, health, of_anchors, select, shown, table
from replication.settings import Preset
from replication.work import Work

TITLE = "The inverse temperature lambda"
LAMS = (1e-4, 1e-2, 1.0, 1e2, 1e3)
EXACT_LAMS = (0.01, 0.1, 1.0)
WHATS = {
    "acceptance": "acceptance",
    "mean_spread": "mean spread of the prediction (75% - 25%)",
    "accuracy": "accuracy of the posterior mean",
}


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """The paper's range in each version, and exact chains at three temperatures."""
    lams = preset.points(LAMS, at_least=(1.0,))
    scan = [version(preset, name, lam=lam, sigma=0.2, sigma_delta=WIDE) for name in VERSIONS for lam in lams]
    anchors = [
        version(preset, "released", lam=lam, sigma=0.2, sigma_delta=WIDE, network="particlenet") for lam in (1e-4, 1.0, 1e3)
    ]
    return {
        "scan": lean(rows(work, scan)),
        "exact": lean(rows(work, exact_settings(preset, lams=EXACT_LAMS, targets=(0.85,)), preset.exact_chains)),
        "anchors": lean(rows(work, anchors, 1)) if preset.anchors else [],
    }


def draw(result: dict[str, Any]) -> Figure:
    """Acceptance, spread and accuracy against lambda. (That of exact chains multiplies the data sum.)"""
    with canvas(1, 3, width=13.0, height=4.6) as (figure, axes):
        for one, (what, title) in zip(axes, WHATS.items(), strict=True):
            for name in (*VERSIONS, "exact"):
                own = select([*result["scan"], *result["exact"]], name)
                points(one, [row["setting"]["lam"] for row in own], [row[what] for row in own], name)
            one.set(xscale="log", xlabel="lambda", ylabel=title)
        axes[0].set_ylim(-0.03, 1.03)
        axes[1].set_yscale("log")
        log_ticks(axes[1].yaxis)
        legend(figure, axes)
    return figure


def section(result: dict[str, Any]) -> str:
    """All numbers at each lambda."""
    columns = [*VERSIONS, "exact"]
    every = [*result["scan"], *result["exact"]]
    lines = [
        Line(
            f"{what.replace('_', ' ')}, lambda {lam:g}",
            "no strong effect" if what == "mean_spread" else None,
            at(every, what, lam=lam),
        )
        for what in WHATS
        for lam in sorted({row["setting"]["lam"] for row in every})
    ]
    text = [table(lines, columns), "Ours: mean ± standard error over the seeds.", ""]
    for name in columns:
        own = [row for row in select(every, name) if row["mean_spread"] is not None and row["mean_spread"][0]]
        if len(own) > 1:
            low, high = own[0], own[-1]
            factor = low["mean_spread"][0] / high["mean_spread"][0]
            text.append(
                f"{LABELS[name].capitalize()}, from lambda {low['setting']['lam']:g} to {high['setting']['lam']:g}: the mean "
                f"spread changes by a factor 1 / {factor:.3g}, acceptance goes from {shown(low['acceptance'])} to "
                f"{shown(high['acceptance'])}, accuracy from {shown(low['accuracy'])} to {shown(high['accuracy'])}."
            )
    scales = {}
    for name in VERSIONS:
        for row in select(result["scan"], name)[:1]:
            sizes = row["setting"]["num_jets"], row["setting"]["batch_size"]
            ours = from_paper(1.0, 1.0, 1.0, num_params=1, num_data=sizes[0], loss=row["setting"]["scale"], batch_size=sizes[1])
            scales[LABELS[name]] = ours.inverse_temperature
    units = "; ".join(f"{label} {scale:.3g} times that" for label, scale in scales.items())
    text.append(f"The lambdas are the paper's. In this library's units (`inverse_temperature`; 1 is Bayes): {units}.")
    agreement = [
        f"{row['rhat']:.3f} (worst {row['worst_rhat']:.3f}) at lambda {row['setting']['lam']:g}"
        for row in result["exact"]
        if row.get("rhat")
    ]
    if agreement:
        text.append(f"R-hat of the exact chains over test jets, median: {', '.join(agreement)}.")
    text.append(exact_data(result["exact"], result["scan"]))
    return "\n".join([*text, of_anchors(result["anchors"]), health(every)])
