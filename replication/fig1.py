"""Figure 1: optimisation. Training loss and test accuracy of Adam, SGD, sgHMC and AdamMCMC."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from replication import published
from replication.drawing import COLOURS, LABELS, Value, band, canvas, legend
from replication.rows import VERSIONS, bands, lean, row, rows, seeds_of, version
from replication.sections import RULE, Line, health, of_anchors, of_test_jets, shown, table
from replication.settings import Preset
from replication.trials import Trial
from replication.work import Work

TITLE = "Figure 1: training loss and test accuracy"
WIDE = 3661.6
GRIDS = {"adam": (3e-4, 1e-3, 3e-3), "sgd": (1e-2, 1e-1, 1.0), "sghmc": (1e-4, 1e-3, 1e-2)}
"""Learning rates that are tried with one seed each; the one with the highest final accuracy is used."""
_LOOKS = 20
_BANDS_OF_ACCURACY = ("adam", "released, sigma 2.0")


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """Learning rates with one seed, then five seeds of each method at the paper's number of epochs."""
    seeds = 5 if preset.seeds > 1 else 1
    grid: dict[str, Any] = {}
    chosen: dict[str, Trial] = {}
    for method, rates in GRIDS.items():
        trials = [Trial.of(preset, method, lr=lr, looks=_LOOKS) for lr in preset.points(rates, at_least=(1e-3, 1e-2))]
        found = work.records(trials)
        ends = [r["accuracy"]["values"][-1] for r in found]
        grid[method] = [
            {"lr": t.lr, "accuracy": end, "final_loss": row([r])["final_loss"]}
            for t, r, end in zip(trials, found, ends, strict=True)
        ]
        chosen[method] = replace(trials[ends.index(max(ends))], **preset.long)
    for name in ("released", "printed, batch sum"):
        for sigma in (0.2, 2.0):
            chosen[f"{name}, sigma {sigma}"] = long_chain(preset, name, sigma)
    curves, by_method = {}, {}
    for name, trial in chosen.items():
        records = work.records(seeds_of([trial], seeds))
        curves[name], by_method[name] = bands(records), *lean([row(records)])
    return {"grid": grid, "curves": curves, "rows": by_method, "anchors": anchors(preset, work)}


def long_chain(preset: Preset, name: str, sigma: float, **options: Any) -> Trial:
    """A chain with the paper's number of epochs."""
    return version(preset, name, sigma=sigma, sigma_delta=WIDE, looks=_LOOKS, **preset.long, **options)


def anchors(preset: Preset, work: Work) -> list[dict[str, Any]]:
    """Adam and AdamMCMC on the paper's network; also with its number of epochs, and with ten points of Adam's path."""
    if not preset.anchors:
        return []
    settings = [Trial.of(preset, "adam", network="particlenet")]
    settings += [version(preset, "released", sigma=0.2, sigma_delta=WIDE, network="particlenet")]
    settings += [
        version(preset, name, sigma=2.0, sigma_delta=WIDE, network="particlenet") for name in ("released", "printed, batch sum")
    ]
    if preset.long_steps:
        settings += [long_chain(preset, name, 2.0, network="particlenet") for name in VERSIONS]
        settings += [Trial.of(preset, "snapshots", network="particlenet", **preset.long)]
    return lean(rows(work, settings, 1))


def draw(result: dict[str, Any]) -> Figure:
    """The loss of the first quarter and (smoothed) of the rest, and the test accuracy; bands span all seeds."""
    with canvas(1, 3, width=13.0, height=4.6) as (figure, axes):
        for name, curves in result["curves"].items():
            sampler, _, sigma = name.partition(", sigma ")
            style: dict[str, Any] = {"color": COLOURS[sampler], "linestyle": "--" if sigma == "0.2" else "-", "linewidth": 1.6}
            label = _label(name)
            for one, what in zip(axes, ("loss", "loss", "accuracy"), strict=True):
                shown_band = {key: _smooth(values) if one is axes[1] else values for key, values in curves[what].items()}
                # (seven bands of accuracy would cover each other)
                is_filled = what == "loss" or name in _BANDS_OF_ACCURACY
                band(one, shown_band, label=label, is_filled=is_filled, **style)
        first, whole, accuracy = axes
        end = max(max(curves["loss"]["steps"]) for curves in result["curves"].values())
        first.set(xscale="log", yscale="log")
        start = min(curves["loss"]["steps"][0] for curves in result["curves"].values())
        first.set_xlim(start, max(2.0 * start, end / 4))
        first.set_yticks([0.1, 0.2, 0.3, 0.5, 0.7, 1.0], ["0.1", "0.2", "0.3", "0.5", "0.7", "1"])
        first.minorticks_off()
        whole.set_xlim(end / 4, end)
        for one in (first, whole):
            one.set_ylabel("training loss of a batch (nats)")
            low, high = _limits(result, 0 if one is first else end / 4)
            one.set_ylim(0.95 * low, min(1.02 * high, 1.2))
        accuracy.set_ylabel("test accuracy")
        means = [value for curves in result["curves"].values() for value in curves["accuracy"]["mean"]]
        accuracy.set_ylim(sorted(means)[len(means) // 8] - 0.01, max(means) + 0.01)  # without the first steps
        for one in axes:
            one.set_xlabel("step")
        legend(figure, axes)
    return figure


COLUMNS = ("this method", "released", "printed, batch sum")


def lines(result: dict[str, Any]) -> list[Line]:
    """Loss and test accuracy of each method, with the published values."""
    seeds = result["rows"]["adam"]["seeds"]
    found: list[Line] = []
    for name, numbers in published.FIG1.items():
        own = {column: f"{column}, {name}" for column in COLUMNS[1:]} if name.startswith("sigma") else {COLUMNS[0]: name}
        known = {column: method for column, method in own.items() if method in result["rows"]}
        words = f"AdamMCMC, {name}" if name.startswith("sigma") else LABELS[name]
        losses: dict[str, Value] = {column: result["rows"][method]["final_loss"] for column, method in known.items()}
        loss = f"below {numbers['loss_at_most']:g}" if "loss_at_most" in numbers else numbers.get("loss", "follows Adam")
        early: dict[str, Value] = {column: _early(result["curves"][method]["loss"]) for column, method in known.items()}
        if all(value is not None for value in early.values()):
            found.append(Line(f"{words}: training loss after {published.FIG1_EARLY} steps", numbers["early"], early, 0.02))
        found.append(Line(f"{words}: training loss at the end", loss, losses, 0.005, seeds=seeds))
        for what, key in (("best", "best_accuracy"), ("end", "last_accuracy")):
            ours: dict[str, Value] = {column: result["rows"][method][key] for column, method in known.items()}
            found.append(
                Line(
                    f"{words}: test accuracy, {what}",
                    numbers[what],
                    ours,
                    published.ERROR_READ_TO,
                    seeds=seeds,
                    test_error=of_test_jets(numbers[what], list(result["rows"].values())),
                )
            )
    return found


def section(result: dict[str, Any]) -> str:
    """The final loss, and the best and final test accuracy of each method."""
    text = [table(lines(result), COLUMNS), RULE.format(read_to="0.002 in accuracy, 0.005 in loss"), ""]
    for method, grid in result["grid"].items():
        found = ", ".join(f"{entry['lr']:g} ({entry['accuracy']:.3f})" for entry in grid)
        text.append(f"{LABELS[method]}: learning rates tried, with the accuracy at the end: {found}.")
    drops = [f"{_label(name)} {own['best_accuracy'][0] - own['last_accuracy'][0]:.3f}" for name, own in result["rows"].items()]
    silent = result["rows"]["sghmc"].get("silent")
    if silent is not None:
        text.append(f"sgHMC adds no noise to {shown(silent)} of the weights: their gradients are too large for its step.")
    text.append(f"Test accuracy lost from its best to the end of the run: {'; '.join(drops)}.")
    return "\n".join([*text, of_anchors(result["anchors"]), health([*result["rows"].values(), *result["anchors"]])])


def _early(loss: dict[str, Any]) -> Value:
    """The mean loss within 10% of the 500th step; None for a shorter run."""
    near = [
        value
        for step, value in zip(loss["steps"], loss["mean"], strict=True)
        if abs(step - published.FIG1_EARLY) <= published.FIG1_EARLY // 10 and value is not None
    ]
    return [sum(near) / len(near), None] if near else None


def _label(name: str) -> str:
    sampler, _, sigma = name.partition(", sigma ")
    return LABELS[sampler] + (f", sigma {float(sigma):g}" if sigma else "")


def _smooth(values: list[float | None], window: int = 15) -> list[float | None]:
    """A moving average: batches scatter more than methods differ. None where a value is missing."""
    window = min(window, len(values))
    parts = [[value for value in values[i : i + window] if value is not None] for i in range(len(values) - window + 1)]
    return [sum(part) / window if len(part) == window else None for part in parts]


def _limits(result: dict[str, Any], start: float) -> tuple[float, float]:
    """The lowest and highest mean loss from this step on."""
    values = [
        value
        for curves in result["curves"].values()
        for step, value in zip(curves["loss"]["steps"], curves["loss"]["mean"], strict=True)
        if step >= start and value is not None
    ]
    return min(values), max(values)
