"""Out-of-distribution jets: mutual information by kind, pT and sigma, and how well it detects them."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adammcmc.jets.data import KINDS
from replication import published
from replication.drawing import COLOURS, LABELS, Value, canvas, crosses, legend, log_ticks, points
from replication.fig1 import WIDE, long_chain
from replication.quality import title_of, yardsticks
from replication.rows import VERSIONS, exact_settings, lean, rows, version
from replication.sections import RULE, Line, exact_data, health, name_of, of_anchors, seeds_by, select, shown, table
from replication.settings import Preset
from replication.work import Work

TITLE = "Jets from elsewhere: mutual information and detection"
SIGMAS = (0.01, 0.1, 0.2, 0.5, 2.0)
KEPT = ("information", "others", "by_pt", "spread_by_pt")
LONG_SIGMAS = (0.01, 0.2, 0.5, 2.0)
LONG_VERSIONS = ("released", "printed, batch sum")
"""Also run for the paper's number of epochs: the chains of Figure 1 and two more sigmas."""


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """The paper's sigmas in each version, exact chains, and the yardsticks."""
    sigmas = preset.points(SIGMAS, at_least=(0.2,))
    scan = [version(preset, name, sigma=sigma, sigma_delta=WIDE) for name in VERSIONS for sigma in sigmas]
    anchors = [version(preset, "released", sigma=sigma, sigma_delta=WIDE, network="particlenet") for sigma in (0.01, 0.2, 2.0)]
    longer = [long_chain(preset, name, sigma) for name in LONG_VERSIONS for sigma in LONG_SIGMAS] if preset.long_steps else []
    return {
        "scan": lean(rows(work, scan), *KEPT),
        "long": lean(rows(work, longer), *KEPT),
        "exact": lean(rows(work, exact_settings(preset, targets=(0.85,)), preset.exact_chains), *KEPT),
        "yardsticks": lean(rows(work, yardsticks(preset)), *KEPT),
        "anchors": lean(rows(work, anchors, 1)) if preset.anchors else [],
    }


WHERE = 0.2
"""The sigma at which kinds and pT are compared."""


def draw(result: dict[str, Any]) -> Figure:
    """Mutual information of top jets against sigma; of all kinds, and their spread, against sigma and pT; detection."""
    with canvas(2, 4, width=19.0, height=9.0) as (figure, axes):
        known, unseen, by_sigma, by_pt, found, found_by_spread, spread_by_sigma, spread_by_pt = axes
        for one, title in ((known, "training tops"), (unseen, "tops from elsewhere")):
            for part, options in (("scan", {}), ("long", {"linestyle": ":", "markerfacecolor": "white"})):
                for name in VERSIONS:
                    own = [row for row in select(result[part], name) if "others" in row]
                    values = [_information(row, title) for row in own]
                    if own:
                        label = f"{LABELS[name]}, {own[0]['setting']['steps']:,} steps"
                        points(one, [row["setting"]["sigma"] for row in own], values, name, label=label, **options)
            crosses(one, published.OOD_BY_SIGMA[title])
            one.set(xscale="log", yscale="log")
            log_ticks(one.xaxis)
            log_ticks(one.yaxis)
            one.set(title=title, xlabel="sigma (nominal)", ylabel="mutual information (nats)")
        _against_sigma(by_sigma, result, "information", "mutual information (nats)")
        _against_sigma(spread_by_sigma, result, "spread", "median spread (75% - 25%)")
        _against_pt(by_pt, result, "by_pt", "mutual information (nats)")
        _against_pt(spread_by_pt, result, "spread_by_pt", "mean spread (75% - 25%)")
        for kind in ("top", "quark", "gluon"):  # (only a range was published for the others)
            for at, (value, _) in published.OOD_BY_PT[kind].items():
                by_pt.plot(at, value, marker="x", color=_KIND_COLOURS[kind], markersize=8, linestyle="")
        _detection(found, result, "auroc_information", "AUROC of mutual information")
        _detection(found_by_spread, result, "auroc_spread", "AUROC of the spread")
        legend(figure, (known, unseen, found), columns=4)
    return figure


_KIND_COLOURS = {kind: f"C{number}" for number, kind in enumerate(KINDS)}


def _against_sigma(axes: Axes, result: dict[str, Any], what: str, label: str) -> None:
    """Algorithm 1 on the batch sum, one line per kind."""
    rows = [row for row in select(result["scan"], "printed, batch sum") if row.get("others")]
    for kind in rows[0]["others"] if rows else ():
        style: dict[str, Any] = {"marker": ".", "color": _KIND_COLOURS[kind], "label": kind, "elinewidth": 0.7, "capsize": 0}
        points(axes, [row["setting"]["sigma"] for row in rows], [row["others"][kind][what] for row in rows], kind, **style)
    axes.set_xscale("log")
    log_ticks(axes.xaxis)
    axes.set(title="as printed, batch sum, by kind", xlabel="sigma (nominal)", ylabel=label)


def _against_pt(axes: Axes, result: dict[str, Any], what: str, label: str) -> None:
    """Algorithm 1 on the batch sum, one line per kind."""
    rows = [row for row in select(result["scan"], "printed, batch sum", sigma=WHERE) if what in row]
    for kind, bins in rows[0][what].items() if rows else ():
        filled = [b for b in bins if b[3] is not None and b[3][0] is not None]
        centres = [(b[0] + b[1]) / 2 for b in filled]
        errors = [math.hypot(b[3][1] or 0.0, b[4]) for b in filled]  # from seeds and from jets
        style: dict[str, Any] = {"marker": ".", "color": _KIND_COLOURS[kind], "label": kind, "elinewidth": 0.7}
        axes.errorbar(centres, [b[3][0] for b in filled], errors, **style)
    axes.axvspan(550, 650, color="#eeeeee", zorder=0)
    axes.set(title=f"as printed, batch sum, sigma {WHERE:g}; grey: training", xlabel="jet pT (GeV)", ylabel=label)
    axes.set_xlim(490, 1030)
    axes.set_ylim(0.0, 1.25 * axes.get_ylim()[1])  # space for the legend
    if rows:
        axes.legend(ncols=4, fontsize=9, loc="upper center")


def _detection(axes: Axes, result: dict[str, Any], what: str, label: str) -> None:
    """How well each method separates each kind from the test jets."""
    methods, drawn = _methods(result), set[str]()
    for number, row in enumerate(methods):
        values = [row["others"][kind][what] for kind in row["others"]]
        at = [k + (number - (len(methods) - 1) / 2) * 0.1 for k in range(len(values))]
        face = "white" if name_of(row) in drawn else COLOURS[name_of(row)]  # the larger of the two ensembles is hollow
        name = name_of(row)
        steps = f", {row['setting']['steps']:,} steps" if name in VERSIONS else ""
        label_of = title_of(row) if name == "ensemble" else LABELS[name] + steps
        points(axes, at, values, name, linestyle="", label=label_of, markerfacecolor=face)
        drawn.add(name)
    if methods:
        axes.set_xticks(range(len(methods[0]["others"])), list(methods[0]["others"]), rotation=30)
    axes.axhline(0.5, color="black", linewidth=0.8)
    axes.set(ylabel=label, title=f"told from the test jets, sigma {WHERE:g} (0.5: not at all)")


COLUMNS = list(VERSIONS)


def lines(result: dict[str, Any]) -> list[Line]:
    """Mutual information against sigma, and for each kind at two pT."""
    found: list[Line] = []
    seeds = seeds_by(result["scan"])
    for title, values in published.OOD_BY_SIGMA.items():
        for sigma, value in values.items():
            rows = [row for row in result["scan"] if row["setting"]["sigma"] == sigma and "others" in row]
            ours: dict[str, Value] = {name_of(row): _information(row, title) for row in rows}
            if any(ours.values()):
                words = f"mutual information, {title}, sigma {sigma:g}"
                found.append(Line(words, value, ours, published.INFORMATION_READ_TO * value, 4, seeds))
    at_pt = [
        Line(
            f"mutual information, {kind} jets at {pt:g} GeV, sigma {WHERE:g}",
            value,
            _near(result, kind, pt),
            read_to,
            4,
            seeds,
            test_error=_jets_near(result, kind, pt),
        )
        for kind, values in published.OOD_BY_PT.items()
        for pt, (value, read_to) in values.items()
    ]
    found += [line for line in at_pt if line.ours]
    return found


def section(result: dict[str, Any]) -> str:
    """Mutual information against sigma, and detection compared with the yardsticks."""
    text = [
        table(lines(result), COLUMNS),
        RULE.format(read_to="20% or the published range"),
        "(Against sigma, and of an AUROC, errors are over the seeds only; against pT those of the jets in a bin count too.)",
        "",
    ]
    text += _detected(result, "auroc_information", "mutual information")
    text += ["", *_detected(result, "auroc_spread", "the spread"), ""]
    text += [*_kinds_by_sigma(result), ""]
    for row in [row for row in result["long"] if "others" in row]:
        numbers = [shown(_information(row, title), 4) for title in published.OOD_BY_SIGMA]
        text.append(
            f"{title_of(row).capitalize()}, {row['setting']['steps']:,} steps: mutual information {numbers[0]} (training "
            f"tops) and {numbers[1]} (tops from elsewhere)."
        )
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


def _detected(result: dict[str, Any], what: str, words: str) -> list[str]:
    """A table: how well each method separates each kind of jets from the test jets."""
    methods = _methods(result)
    kinds = list(methods[0]["others"]) if methods else []
    lines = [f"| AUROC of {words} | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    cells = [" | ".join(shown(row["others"][kind][what], 2) for kind in kinds) for row in methods]
    return lines + [f"| {title_of(row)} | {cell} |" for row, cell in zip(methods, cells, strict=True)]


def _kinds_by_sigma(result: dict[str, Any]) -> list[str]:
    """A table: mutual information of each kind by version and sigma, with the median spread in brackets."""
    rows = [row for name in VERSIONS for row in select(result["scan"], name) if row.get("others")]
    kinds = list(rows[0]["others"]) if rows else []
    lines = [f"| mutual information (median spread) | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for row in rows:
        known = row["others"]
        cells = [f"{shown(known[kind]['information'])} ({known[kind]['spread'][0]:.3f})" for kind in kinds]
        lines.append(f"| {title_of(row)} | {' | '.join(cells)} |")
    return lines


def _near(result: dict[str, Any], kind: str, pt: float) -> dict[str, Value]:
    """Mutual information within 50 GeV of this pT, at one sigma. (Bins share their seeds, so errors are averaged
    too.)"""
    found: dict[str, Value] = {}
    for row in result["scan"]:
        if row["setting"]["sigma"] == WHERE and kind in row.get("by_pt", {}):
            bins = [b[3] for b in _bins_near(row, kind, pt)]
            if bins:
                error = None if any(b[1] is None for b in bins) else sum(b[1] for b in bins) / len(bins)
                found[name_of(row)] = [sum(b[0] for b in bins) / len(bins), error]
    return found


def _jets_near(result: dict[str, Any], kind: str, pt: float) -> dict[str, float]:
    """The error from the jets in these bins, which all seeds share."""
    found: dict[str, float] = {}
    for row in result["scan"]:
        if row["setting"]["sigma"] == WHERE and (bins := _bins_near(row, kind, pt)):
            found[name_of(row)] = math.hypot(*(b[4] for b in bins)) / len(bins)
    return found


def _bins_near(row: dict[str, Any], kind: str, pt: float) -> list[Any]:
    bins = row.get("by_pt", {}).get(kind, [])
    return [b for b in bins if abs((b[0] + b[1]) / 2 - pt) < 50 and b[3] and b[3][0] is not None]


def _information(row: dict[str, Any], title: str) -> Value:
    """Of training tops or of out-of-distribution tops; None if there are none."""
    tops = row["others"].get("top", {"information": None})
    value: Value = row["information"]["top"] if title == "training tops" else tops["information"]
    return value


def _methods(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each version at one sigma, the exact chains, dropout and the ensembles."""
    scan = [row for row in result["scan"] if row["setting"]["sigma"] == WHERE]
    return [row for row in [*scan, *result["exact"], *result["yardsticks"]] if "others" in row]
