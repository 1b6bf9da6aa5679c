"""Figures of a tagger and its posterior. A panel is a function of its axes; `draw` arranges panels side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from adammcmc.jets.data import KINDS, Jets
from adammcmc.jets.metrics import evaluate, groups, mean_by_pt, roc, scores_of
from adammcmc.posterior.predictive import Prediction
from adammcmc.posterior.store.atomic import whole

__all__ = ["draw", "draw_others", "draw_tagging", "panel_groups", "panel_information", "panel_roc"]

# the colour-blind safe palette of Okabe and Ito; markers differ as well
_OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
COLOURS = dict(zip(KINDS, _OKABE_ITO, strict=True))
_MARKERS = dict(zip(KINDS, "os^vDPX*", strict=True))
LABELS = dict(zip(KINDS, ("QCD", "top", "W", "Z", "H → bb", "H → WW", "quark", "gluon"), strict=True))
EDGES = (500.0, 550.0, 650.0, 750.0, 850.0, 1000.0)


@contextmanager
def draw(path: Path, columns: int, rows: int = 1, *, size: tuple[float, float] | None = None) -> Iterator[list[Any]]:
    """Yield the axes of a new figure, row by row, and write the figure atomically on exit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size or (5.1 * columns, 4.6), layout="constrained")
    yield list(figure.subplots(rows, columns, squeeze=False).flat)
    with whole(path) as file:
        figure.savefig(file, dpi=140)


def draw_tagging(path: Path, prediction: Prediction, jets: Jets) -> None:
    """ROC curve, and posterior spread by class and correctness."""
    with draw(path, 2) as (left, right):
        panel_roc(left, prediction, jets.kind)
        panel_groups(right, prediction, jets.kind)


def draw_others(path: Path, seen: tuple[Jets, Prediction], others: tuple[Jets, Prediction]) -> None:
    """Mutual information against pT, of held-out jets and of out-of-distribution jets."""
    with draw(path, 1, size=(6.4, 4.6)) as (axes,):
        panel_information(axes, seen, others)


def panel_roc(axes: Any, prediction: Prediction, labels: Tensor) -> None:
    """Background rejection of the mean prediction against signal efficiency."""
    numbers = evaluate(prediction, labels)
    signal, background = roc(scores_of(prediction), labels)
    shown = background > 0
    axes.plot(signal[shown], 1 / background[shown], color=COLOURS["qcd"])
    for efficiency, value in ((0.3, numbers.rejection_30), (0.5, numbers.rejection_50)):
        if value.value < float("inf"):
            axes.errorbar(efficiency, value.value, value.error, marker="o", color=COLOURS["top"], capsize=3)
    axes.set(
        yscale="log",
        xlim=(0, 1),
        ylim=(1, None),
        xlabel="signal efficiency",
        ylabel="background rejection",
        title=f"Tagging: accuracy {numbers.accuracy.value:.3f}, AUC {numbers.auc.value:.3f}",
    )
    axes.grid(alpha=0.3)


def panel_groups(axes: Any, prediction: Prediction, labels: Tensor, beside: tuple[str, Prediction] | None = None) -> None:
    """Posterior spread by true class and correctness: median and middle half of the jets. `beside`: medians of another run."""
    found = groups(scores_of(prediction), prediction.spread[:, 1], labels)
    ticks = []
    for place, (name, band) in enumerate(found.items()):
        kind, word = name.split(", ")
        low, middle, high = band.spread
        colour = COLOURS[kind]
        axes.bar(place, high - low, bottom=low, width=0.6, color=colour, alpha=0.35)
        axes.hlines(middle, place - 0.3, place + 0.3, color=colour, linewidth=2.5)
        axes.annotate(f"{middle:.3f}", (place, high), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=9)
        ticks.append(f"{LABELS[kind]}\n{word}\n({band.jets:,})")
    if beside is not None:
        name, other = beside
        medians = [band.spread[1] for band in groups(scores_of(other), other.spread[:, 1], labels).values()]
        axes.plot(medians, "kx", markersize=8, markeredgewidth=2, label=f"{name}, median")
        axes.legend(loc="upper left")
    axes.set_xticks(range(len(found)), ticks)
    axes.set(ylabel="spread of the score, 75% - 25%", title="Posterior spread, by class and correctness")
    axes.margins(y=0.2)
    axes.set_ylim(bottom=0)


def panel_information(axes: Any, seen: tuple[Jets, Prediction], others: tuple[Jets, Prediction]) -> None:
    """Mean mutual information against pT: bands for held-out jets, points for out-of-distribution jets."""
    jets, prediction = seen
    for name in ("top", "qcd"):
        values = prediction.mutual_information[jets.kind == KINDS.index(name)]
        low, high = jets.jet[:, 0].aminmax()
        label = f"{LABELS[name]}, held out"
        axes.hlines(float(values.mean()), float(low), float(high), color=COLOURS[name], linewidth=6, alpha=0.4, label=label)
    unseen, answers = others
    for name, bins in mean_by_pt(answers.mutual_information, unseen, EDGES).items():
        axes.errorbar(
            [(b.low + b.high) / 2 for b in bins],
            [b.mean.value for b in bins],
            [b.mean.error if b.jets > 1 else 0.0 for b in bins],
            color=COLOURS[name],
            marker=_MARKERS[name],
            markersize=5,
            capsize=2,
            linewidth=1,
            label=LABELS[name],
        )
    axes.set(xlabel="jet pT, GeV", ylabel="mutual information, nats", title="Out-of-distribution jets")
    axes.set_ylim(bottom=0)
    axes.legend(ncols=2, fontsize=7, loc="upper right")
    axes.set_ylim(top=1.35 * axes.get_ylim()[1])  # space for the legend
