"""Jets from elsewhere: mutual information by kind, pT and sigma, and how well it finds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adammcmc.replication import published
from adammcmc.replication.drawing import COLOURS, LABELS, Value, canvas, crosses, legend, log_ticks, points
from adammcmc.replication.fig1 import WIDE, long_chain
from adammcmc.replication.fig3 import yardsticks
from adammcmc.replication.rows import VERSIONS, exact_settings, rows, version
from adammcmc.replication.sections import RULE, Line, exact_data, health, name_of, of_anchors, select, shown, table
from adammcmc.replication.settings import Preset
from adammcmc.replication.work import Work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TITLE", "draw", "run", "section"]

TITLE = "Jets from elsewhere: mutual information and detection"
SIGMAS = (0.01, 0.1, 0.2, 0.5, 2.0)
LONG_SIGMAS = (0.01, 0.2, 0.5, 2.0)
LONG_VERSIONS = ("released", "printed, batch sum")
"""Whose chains are also run for as many epochs as the paper's: those of Figure 1 and two sigmas more."""


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """The paper's widths in each version, exact chains, and what an ensemble and dropout find."""
    sigmas = preset.points(SIGMAS, at_least=(0.2,))
    scan = [version(preset, name, sigma=sigma, sigma_delta=WIDE) for name in VERSIONS for sigma in sigmas]
    anchors = [version(preset, "released", sigma=sigma, sigma_delta=WIDE, network="particlenet") for sigma in (0.01, 0.2, 2.0)]
    longer = [long_chain(preset, name, sigma) for name in LONG_VERSIONS for sigma in LONG_SIGMAS] if preset.long_steps else []
    return {
        "scan": rows(work, scan),
        "long": rows(work, longer),
        "exact": rows(work, exact_settings(preset, targets=(0.85,)), preset.exact_chains),
        "yardsticks": rows(work, yardsticks(preset)),
        "anchors": rows(work, anchors, 1) if preset.anchors else [],
    }


WHERE = 0.2
"""The sigma at which kinds and pT are looked at."""


def draw(result: dict[str, Any]) -> Figure:
    """Mutual information of top jets against sigma; by pT and kind; and how well each method finds jets from elsewhere."""
    with canvas(2, 2, width=12.0, height=9.0) as (figure, (known, unseen, by_pt, found)):
        for one, title in ((known, "training tops"), (unseen, "tops from elsewhere")):
            for name in VERSIONS:
                own = [row for row in select(result["scan"], name) if "others" in row]
                points(one, [row["setting"]["sigma"] for row in own], [_information(row, title) for row in own], name)
            crosses(one, published.OOD_BY_SIGMA[title])
            one.set_xscale("log")
            one.set_yscale("log")
            log_ticks(one.xaxis)
            log_ticks(one.yaxis)
            one.set_title(title)
            one.set_xlabel("sigma (nominal)")
            one.set_ylabel("mutual information (nats)")
        rows = [row for row in select(result["scan"], "printed, batch sum", sigma=WHERE) if "by_pt" in row]
        for number, (kind, bins) in enumerate(rows[0]["by_pt"].items() if rows else ()):
            filled = [b for b in bins if b[3] is not None and b[3][0] is not None]
            centres, values = [(b[0] + b[1]) / 2 for b in filled], [b[3][0] for b in filled]
            by_pt.plot(centres, values, marker=".", color=f"C{number}", label=kind)
        by_pt.axvspan(550, 650, color="#eeeeee", zorder=0)
        by_pt.set_title(f"as printed, batch sum, sigma {WHERE:g}; grey: the training window")
        by_pt.set_xlabel("jet pT (GeV)")
        by_pt.set_ylabel("mutual information (nats)")
        by_pt.set_xlim(490, 1030)
        by_pt.legend(ncols=2, fontsize=9)
        methods, drawn = _methods(result), set[str]()
        for number, row in enumerate(methods):
            values = [row["others"][kind]["auroc_information"] for kind in row["others"]]
            at = [k + (number - (len(methods) - 1) / 2) * 0.1 for k in range(len(values))]
            label = LABELS[name_of(row)] if name_of(row) in VERSIONS else _title(row)
            face = "white" if name_of(row) in drawn else COLOURS[name_of(row)]  # of two ensembles the larger is hollow
            points(found, at, values, name_of(row), linestyle="", label=label, markerfacecolor=face)
            drawn.add(name_of(row))
        if methods:
            found.set_xticks(range(len(methods[0]["others"])), list(methods[0]["others"]))
        found.axhline(0.5, color="black", linewidth=0.8)
        found.set_ylabel("AUROC of mutual information")
        found.set_title(f"told from the test jets, sigma {WHERE:g} (0.5: not at all)")
        legend(figure, (known, unseen, found), columns=3)
    return figure


def section(result: dict[str, Any]) -> str:
    """Mutual information against sigma, and detection beside the yardsticks."""
    columns = list(VERSIONS)
    lines = []
    for title, values in published.OOD_BY_SIGMA.items():
        for sigma, value in values.items():
            rows = [row for row in result["scan"] if row["setting"]["sigma"] == sigma and "others" in row]
            ours: dict[str, Value] = {name_of(row): _information(row, title) for row in rows}
            if ours:
                line = Line(
                    f"mutual information, {title}, sigma {sigma:g}", value, ours, published.INFORMATION_READ_TO * value, 4
                )
                lines.append(line)
    methods = _methods(result)
    kinds = list(methods[0]["others"]) if methods else []
    detected = [f"| AUROC | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for row in methods:
        numbers = [shown(row["others"][kind]["auroc_information"], 2) for kind in kinds]
        detected.append(f"| {_title(row)} | {' | '.join(numbers)} |")
    text = [table(lines, columns), RULE.format(read_to="20%"), "", *detected, ""]
    for name in VERSIONS:
        own = [row for row in select(result["scan"], name) if "others" in row]
        if len(own) > 1:
            first, last = (_information(row, "tops from elsewhere") for row in (own[0], own[-1]))
            text.append(
                f"{LABELS[name].capitalize()}, mutual information of tops from elsewhere: {shown(first, 4)} at sigma "
                f"{own[0]['setting']['sigma']:g}, {shown(last, 4)} at sigma {own[-1]['setting']['sigma']:g}."
            )
    text.append(exact_data(result["exact"], result["scan"]))
    return "\n".join([*text, of_anchors(result["anchors"]), health([*result["scan"], *result["exact"]])])


def _information(row: dict[str, Any], title: str) -> Value:
    value: Value = row["information"]["top"] if title == "training tops" else row["others"]["top"]["information"]
    return value


def _methods(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each version at one sigma, the exact chains, dropout and the ensembles."""
    scan = [row for row in result["scan"] if row["setting"]["sigma"] == WHERE]
    return [row for row in [*scan, *result["exact"], *result["yardsticks"]] if "others" in row]


def _title(row: dict[str, Any]) -> str:
    name, setting = name_of(row), row["setting"]
    if name in VERSIONS:
        return f"{LABELS[name]}, sigma {setting['sigma']:g}"
    return f"{LABELS[name]}, {setting['num_draws']} of {setting['steps']:,} steps" if name == "ensemble" else LABELS[name]
