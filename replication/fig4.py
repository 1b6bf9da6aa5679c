"""Figure 4: full-data and minibatch acceptance tests at the same temperature, and every subsampling test."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from replication import published
from replication.drawing import LABELS, Value, band, canvas, legend, points
from replication.fig1 import WIDE
from replication.rows import bands, lean, row, rows, seeds_of, version
from replication.sections import RULE, Line, health, of_anchors, shown, table
from replication.settings import Preset
from replication.trials import TESTS, Trial
from replication.work import Work

TITLE = "Figure 4: full against stochastic correction"
SMALLER = ((10.0, WIDE), (2.0, WIDE), (0.2, WIDE), (0.01, WIDE), (2.0, 370.0), (0.2, 370.0))
"""sigma and sigma_Delta, from other figures' trials: the paper proposes smaller ones against the noise of
minibatches."""


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """Chains in evaluation mode, where the loss is one function of the weights, after five steps of Adam and after
    many."""
    few, many = 5, preset.steps // 4
    steps = max(8, preset.steps // 4)
    sizes: dict[str, Any] = {
        "num_jets": preset.compared_data, "in_training_mode": False, "steps": steps, "burn_in": steps // 4, "looks": 0,
        "precision": "float32",
    }  # fmt: skip
    curves, compared = {}, {}
    for scale in ("printed, batch sum", "printed, data sum"):
        for name, start in (("from the start", few), ("after burn-in", many)):
            for test in ("minibatch", "full"):
                trial = version(preset, scale, sigma=2.0, sigma_delta=WIDE, test=test, start=start, **sizes)
                records = work.records(seeds_of([trial], preset.seeds))
                key = f"{scale} | {name} | {test}"
                curves[key], compared[key] = bands(records)["loss"], *lean([row(records)])
    base: Trial = version(preset, "printed, data sum", sigma=0.2, sigma_delta=1000.0, start=many, **sizes)
    tests = [replace(base, test=test) for test in TESTS]
    smaller = [version(preset, "printed, data sum", sigma=sigma, sigma_delta=delta) for sigma, delta in SMALLER]
    large = replace(base, sigma=2.0, sigma_delta=WIDE, scale="batch_sum", network="particlenet")
    anchors = [replace(large, test=test, start=start) for start in (few, many) for test in ("minibatch", "full")]
    return {
        "anchors": lean(rows(work, anchors, 1)) if preset.anchors else [],
        "curves": curves,
        "rows": compared,
        "tests": lean(rows(work, tests)),
        "smaller": lean(rows(work, smaller)),
        "num_data": preset.compared_data,
    }


STARTS = ("from the start", "after burn-in")
SCALES = ("printed, batch sum", "printed, data sum")


def draw(result: dict[str, Any]) -> Figure:
    """The loss under both tests, from the start and after burn-in; acceptance; the data that each test reads."""
    with canvas(2, 3, width=13.0, height=7.6) as (figure, axes):
        for i, scale in enumerate(SCALES):
            for j, start in enumerate(STARTS):
                one = axes[3 * i + j]
                for test, colour in (("minibatch", "#d62728"), ("full", "#1f77b4")):
                    curves = result["curves"][f"{scale} | {start} | {test}"]
                    band(one, curves, color=colour, linewidth=1.3, label=f"{test} correction")
                one.set(title=f"{LABELS[scale]}, {start}", xlabel="step", ylabel="training loss of a batch")
        names = [f"{scale} | {start}" for scale in SCALES for start in STARTS]
        for test, colour, shift in (("minibatch", "#d62728", -0.1), ("full", "#1f77b4", 0.1)):
            values = [result["rows"][f"{name} | {test}"]["acceptance"] for name in names]
            options: dict[str, Any] = {"color": colour, "linestyle": "", "marker": "o", "label": None}
            points(axes[2], [k + shift for k in range(len(names))], values, "", **options)
            for k, start in enumerate(STARTS * len(SCALES)):
                if start == "after burn-in":
                    level = [published.FIG4_ACCEPTANCE[test]] * 2
                    axes[2].plot([k - 0.4, k + 0.4], level, color=colour, linestyle=":", label=f"published, {test}")
        short = [f"{scale.split(', ')[1]},\n{when}" for scale in SCALES for when in ("start", "burned in")]
        axes[2].set_xticks(range(len(names)), short)
        axes[2].set_ylim(-0.03, 1.03)
        axes[2].set_ylabel("acceptance")
        tests = [tested["setting"]["test"] for tested in result["tests"]]
        shares: list[Value] = [[_share(tested), None] for tested in result["tests"]]
        bare: dict[str, Any] = {"linestyle": ""}
        points(axes[5], range(len(tests)), [tested["acceptance"] for tested in result["tests"]], "acceptance", **bare)
        points(
            axes[5], range(len(tests)), shares, "part of the data that a decision looks at", marker="_", markersize=18, **bare
        )
        axes[5].set_xticks(range(len(tests)), tests, rotation=30)
        axes[5].set_ylim(-0.03, 1.03)
        axes[5].set_title("each test, sigma 0.2, sigma_Delta 1000")
        legend(figure, axes, columns=3)
    return figure


COLUMNS = list(SCALES)


def lines(result: dict[str, Any]) -> list[Line]:
    """Acceptance and loss under both tests; the published numbers are those after burn-in."""
    found: list[Line] = []
    for start in reversed(STARTS):
        is_known = start == "after burn-in"
        for test in ("minibatch", "full"):
            rows = {scale: result["rows"][f"{scale} | {start} | {test}"] for scale in SCALES}
            accepted: dict[str, Value] = {scale: row["acceptance"] for scale, row in rows.items()}
            losses: dict[str, Value] = {scale: row.get("final_loss") for scale, row in rows.items()}
            seeds = next(iter(rows.values()))["seeds"]
            known = published.FIG4_ACCEPTANCE[test] if is_known else None
            found.append(Line(f"acceptance, {test} correction, {start}", known, accepted, 0.005, seeds=seeds))
            loss, scatter = published.FIG4_LOSS
            words = f"loss at the end, {test} correction, {start}"
            found.append(Line(words, loss if is_known else None, losses, scatter, seeds=seeds))
    return found


def section(result: dict[str, Any]) -> str:
    """Both tests at both scales and starts; every subsampling test; smaller steps."""
    keys = [f"{scale} | {start}" for scale in SCALES for start in STARTS]
    text = [
        table(lines(result), COLUMNS),
        RULE.format(read_to=f"0.005 in acceptance, {published.FIG4_LOSS[1]:g} in loss, as far as its batches scatter"),
        "Both corrections have the same temperature.",
        "",
    ]
    for key in keys:
        stochastic, full = (result["rows"][f"{key} | {test}"] for test in ("minibatch", "full"))
        text.append(
            f"{key.replace(' | ', ', ').capitalize()}: acceptance {shown(stochastic['acceptance'])} on minibatches and "
            f"{shown(full['acceptance'])} on all data, loss at the end {shown(stochastic.get('final_loss'))} and "
            f"{shown(full.get('final_loss'))}."
        )
    text += ["", _tests(result["tests"], "test"), _tests(result["smaller"], "step")]
    return "\n".join([*text, of_anchors(result.get("anchors", [])), health([*result["rows"].values(), *result["tests"]])])


def _share(one: dict[str, Any]) -> float:
    """The mean fraction of the data that a decision reads; NaN if unknown."""
    looked, setting = one.get("examples"), one["setting"]
    if looked is not None and looked[0] is not None:
        return float(looked[0]) / float(setting["num_jets"])
    return float(setting["batch_size"]) / float(setting["num_jets"]) if setting["test"] == "minibatch" else math.nan


def _tests(rows: list[dict[str, Any]], first: str) -> str:
    """Acceptance, data read, noise of the log ratio, effective inverse temperature."""
    table = [
        f"| {first} | acceptance | data looked at | noise of the log ratio, sd | effective lambda / lambda | loss at the end |",
        "|---|---|---|---|---|---|",
    ]
    for one in rows:
        setting = one["setting"]
        name = setting["test"] if first == "test" else f"sigma {setting['sigma']:g}, sigma_Delta {setting['sigma_delta']:g}"
        numbers = [shown(one["acceptance"]), "–" if math.isnan(_share(one)) else f"{_share(one):.3f}"]
        numbers += [shown(one["noise"], 2), shown(one["beta_eff"]), shown(one.get("final_loss"))]
        table.append(f"| {name} | {' | '.join(numbers)} |")
    return "\n".join(table) + "\n"
