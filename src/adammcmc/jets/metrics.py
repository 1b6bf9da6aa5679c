"""Performance of a tagger and uncertainty of its posterior: the standard metrics, each with its error.

A score is the predicted probability of the signal. The efficiency of a cut is the fraction of jets above it, eps_S for the
signal and eps_B for the background. The rejection is 1 / eps_B at a given eps_S.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adammcmc.jets.data import KINDS, Jets, kind_number
from adammcmc.posterior.calibration import Measured, auroc
from adammcmc.posterior.predictive import Prediction
from adammcmc.posterior.store.atomic import whole
from adammcmc.posterior.store.encoding import strict_json
from adammcmc.posterior.uncertainty import quantile_of_sorted

__all__ = [
    "Band",
    "Measured",
    "Tagging",
    "accuracy",
    "as_json",
    "at_equal_score",
    "auc",
    "compare_kinds",
    "evaluate",
    "groups",
    "mean_by_pt",
    "read_scores",
    "rejection",
    "roc",
    "write_scores",
]


# --- performance -------------------------------------------------------------------------------------------------------------


def accuracy(scores: Tensor, labels: Tensor) -> Measured:
    """Fraction of jets on the right side of 1/2."""
    scores, is_signal = _checked(scores, labels)
    p = float(((scores > 0.5) == is_signal).double().mean())
    return Measured(p, (p * (1 - p) / len(scores)) ** 0.5)


def auc(scores: Tensor, labels: Tensor) -> Measured:
    """Area under the ROC curve: the probability that a signal jet scores higher than a background jet; ties count half.

    The error is DeLong's (1988): from the variance, over jets, of the fraction of the other class that a jet outscores.
    """
    return auroc(*_checked(scores, labels))


def rejection(scores: Tensor, labels: Tensor, efficiency: float) -> Measured:
    """1 / eps_B at this signal efficiency.

    The error adds two parts in quadrature: the number of background jets above the cut, and the position of the cut, which
    the signal jets fix to +- sqrt(eps_S (1 - eps_S) / N_S) of the requested efficiency. With fewer than ten background jets
    above the cut the error is itself uncertain; with none the rejection is infinite: there are too few jets to measure it.
    """
    if not 0 < efficiency < 1:
        raise ValueError(f"`efficiency` must be between 0 and 1, got {efficiency}.")
    scores, is_signal = _checked(scores, labels)
    signal, background = scores[is_signal].sort(descending=True).values, scores[~is_signal].sort().values

    def passed(share: float) -> float:
        cut = signal[min(len(signal) - 1, max(0, round(share * len(signal)) - 1))]
        return 1 - int(torch.searchsorted(background, cut)) / len(background)

    eps = passed(efficiency)
    if eps == 0:
        return Measured(float("inf"), float("nan"))
    wobble = (efficiency * (1 - efficiency) / len(signal)) ** 0.5
    from_cut = (passed(efficiency + wobble) - passed(efficiency - wobble)) / 2
    error = (eps * (1 - eps) / len(background) + from_cut**2) ** 0.5
    return Measured(1 / eps, error / eps**2)


def roc(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The ROC curve (eps_S, eps_B), as the cut decreases through all scores."""
    scores, is_signal = _checked(scores, labels)
    order = scores.argsort(descending=True)
    ordered, hits = scores[order], is_signal[order].double()
    last_of_ties = torch.cat([ordered[1:] != ordered[:-1], torch.ones(1, dtype=torch.bool)])
    return hits.cumsum(0)[last_of_ties] / hits.sum(), (1 - hits).cumsum(0)[last_of_ties] / (1 - hits).sum()


class Band(NamedTuple):
    """A group of jets: its size, and the 25%, 50% and 75% quantiles of mean prediction and posterior spread."""

    jets: int
    mean: tuple[float, float, float]
    spread: tuple[float, float, float]


def groups(mean: Tensor, spread: Tensor, labels: Tensor) -> dict[str, Band]:
    """By true class and correctness, as in the paper's Figure 3: "top, right", "top, wrong", "qcd, right", "qcd, wrong".

    Args:
        mean: the mean predicted signal probability over the draws.
        spread: its 75% - 25% range over the draws.
        labels: 1 for signal.
    """
    mean, is_signal = _checked(mean, labels)
    right = (mean > 0.5) == is_signal
    found = {}
    for name, of_class in (("top", is_signal), ("qcd", ~is_signal)):
        for word, is_right in (("right", right), ("wrong", ~right)):
            chosen = of_class & is_right
            found[f"{name}, {word}"] = Band(int(chosen.sum()), _quartiles(mean[chosen]), _quartiles(spread[chosen]))
    return found


@dataclass(frozen=True)
class Tagging:
    """The metrics of a tagger on a set of jets."""

    jets: int
    accuracy: Measured
    auc: Measured
    rejection_30: Measured
    rejection_50: Measured
    groups: dict[str, Band]

    def __str__(self) -> str:
        lines = [
            f"{self.jets:,} jets: accuracy {self.accuracy}, AUC {self.auc}, background rejection {self.rejection_30} at 30% "
            f"and {self.rejection_50} at 50% signal efficiency"
        ]
        for name, band in self.groups.items():
            low, middle, high = band.spread
            spread = f"{middle:.4f} [{low:.4f}, {high:.4f}]"
            lines.append(f"{name:<11} {band.jets:>7,} jets, mean prediction {band.mean[1]:.3f}, spread {spread}")
        return "\n".join(lines)


def as_json(numbers: Tagging) -> str:
    """The metrics as JSON; null where one is not finite (no background above the cut)."""
    plain = {name: value._asdict() if isinstance(value, Measured) else value for name, value in vars(numbers).items()}
    plain["groups"] = {name: band._asdict() for name, band in numbers.groups.items()}
    return json.dumps(strict_json(plain), indent=1, allow_nan=False) + "\n"


def evaluate(prediction: Prediction, labels: Tensor) -> Tagging:
    """All metrics, from `posterior.predict(data)` and the true classes (1 for signal)."""
    mean, spread = scores_of(prediction), prediction.spread[:, 1]
    return Tagging(
        jets=len(mean),
        accuracy=accuracy(mean, labels),
        auc=auc(mean, labels),
        rejection_30=rejection(mean, labels, 0.3),
        rejection_50=rejection(mean, labels, 0.5),
        groups=groups(mean, spread, labels),
    )


def scores_of(prediction: Prediction) -> Tensor:
    """The mean signal probability, that of the second of two classes."""
    if prediction.mean.dim() != 2 or prediction.mean.shape[1] != 2:
        raise ValueError(
            f"a tagger has two classes, background and signal; the predictions have {tuple(prediction.mean.shape)}."
        )
    return prediction.mean[:, 1]


# --- uncertainty ----------------------------------------------------------------------------------------------------------


class Bin(NamedTuple):
    """Jets of one kind in a range of pT, GeV."""

    low: float
    high: float
    jets: int
    mean: Measured


def mean_by_pt(values: Tensor, jets: Jets, edges: Sequence[float]) -> dict[str, list[Bin]]:
    """Mean by kind and pT: of the mutual information, this is the paper's figure of out-of-distribution jets.

    Args:
        values: `prediction.mutual_information`, or another number per jet, (jets,).
        jets: the jets of the prediction, in the same order.
        edges: of the pT bins, GeV. Empty bins are left out.
    """
    if len(values) != len(jets):
        raise ValueError(f"{len(jets)} jets need as many values, got {len(values)}.")
    if len(edges) < 2 or any(a >= b for a, b in pairwise(edges)):
        raise ValueError(f"`edges` must be two or more increasing numbers, got {list(edges)}.")
    found: dict[str, list[Bin]] = {}
    for number, name in enumerate(KINDS):
        for low, high in pairwise(edges):
            inside = (jets.kind == number) & (jets.jet[:, 0] >= low) & (jets.jet[:, 0] < high)
            if bool(inside.any()):
                found.setdefault(name, []).append(Bin(low, high, int(inside.sum()), _mean(values[inside].double())))
    return found


class Kind(NamedTuple):
    """Out-of-distribution jets of one kind, and the predictions for them."""

    name: str
    jets: int
    pt: tuple[float, float]
    tagged: float
    """Fraction that is tagged as signal."""
    information: Measured
    """Mean mutual information, nats."""
    at_equal_score: float
    """The same for held-out jets with the same scores."""
    auroc: Measured
    """Area under the ROC curve for separating these jets from held-out ones by mutual information; 1/2 is guessing."""

    def __str__(self) -> str:
        return (
            f"{self.name:<8} {self.jets:>7,} jets of {self.pt[0]:.0f}-{self.pt[1]:.0f} GeV, {self.tagged:.0%} tagged; mutual "
            f"information {self.information} (held-out at the same scores: {self.at_equal_score:.4f}), AUROC {self.auroc}"
        )


def compare_kinds(held_out: Prediction, others: Jets, unseen: Prediction) -> list[Kind]:
    """Compare each kind of out-of-distribution jets with held-out jets of the kinds that the tagger was trained on."""
    known, known_scores = held_out.mutual_information, scores_of(held_out)
    found = []
    for number, name in [*enumerate(KINDS), (-1, "unknown")]:
        chosen = others.kind == number
        if not bool(chosen.any()):
            continue
        information, scores = unseen.mutual_information[chosen], scores_of(unseen)[chosen]
        is_other = torch.cat([torch.zeros(len(known)), torch.ones(len(information))])
        low, high = others.jet[chosen, 0].aminmax()
        found.append(
            Kind(
                name,
                int(chosen.sum()),
                (float(low), float(high)),
                float((scores > 0.5).double().mean()),
                _mean(information),
                float(at_equal_score(known, known_scores, scores).mean()),
                auc(torch.cat([known, information]), is_other),
            )
        )
    return found


def at_equal_score(values: Tensor, scores: Tensor, wanted: Tensor, neighbours: int = 50) -> Tensor:
    """For each score in `wanted`, the mean value of the jets with the nearest scores.

    Spread and mutual information depend on the score: any jitter of the weights moves a score of 1/2 more than one near 0 or 1.
    Only the excess over jets with the same score is information beyond the score.

    Args:
        values: of the jets to compare with, (jets,).
        scores: theirs.
        wanted: scores of other jets.
        neighbours: number of jets to average over.
    """
    order = scores.argsort()
    ordered = scores[order].contiguous()
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), values[order].double().cumsum(0)])
    number = min(neighbours, len(ordered))
    first = (torch.searchsorted(ordered, wanted.contiguous()) - number // 2).clamp(0, len(ordered) - number)
    return (sums[first + number] - sums[first]) / number


# --- score files ----------------------------------------------------------------------------------------------------------

_COLUMNS = ("row", "kind", "pt", "eta", "phi", "mass", "trained", "score", "q25", "q50", "q75", "entropy", "mutual_information")


def write_scores(
    path: str | Path, jets: Jets, prediction: Prediction, *, rows: Tensor | None = None, trained: Tensor | None = None
) -> None:
    """One comma-separated line per jet: row, kind, pT, eta, phi, mass; the score of the trained network; the mean score over
    the draws, its quartiles, entropy, mutual information.

    Args:
        path: of the file.
        jets: the jets of the prediction.
        prediction: of the draws.
        rows: (jets,) rows of the jets in their files; None: 0, 1, 2, ...
        trained: (jets,) scores of the trained network; None: nan.
    """
    rows = torch.arange(len(jets)) if rows is None else rows
    trained = torch.full((len(jets),), torch.nan) if trained is None else trained
    score = scores_of(prediction)
    if len(score) != len(jets):
        raise ValueError(f"{len(jets)} jets need as many predictions, got {len(score)}.")
    kinds = [KINDS[k] if k >= 0 else "unknown" for k in jets.kind.tolist()]
    quantiles = [prediction.quantile(q)[:, 1] for q in (0.25, 0.5, 0.75)]
    answers = [trained, score, *quantiles, prediction.entropy, prediction.mutual_information]
    columns = [*jets.jet[:, :4].unbind(1), *answers]
    with whole(Path(path)) as file, file.open("w", newline="") as text:
        writer = csv.writer(text)
        writer.writerow(_COLUMNS)
        for row, kind, *values in zip(rows.tolist(), kinds, *(column.tolist() for column in columns), strict=True):
            writer.writerow([row, kind, *(f"{value:.7g}" for value in values)])


def read_scores(path: str | Path) -> dict[str, Tensor]:
    """Read a file of `write_scores`, by column; kinds as indices."""
    with Path(path).open(newline="") as file:
        rows = list(csv.reader(file))
    if not rows or tuple(rows[0]) != _COLUMNS:
        raise ValueError(f"'{path}' is not a score file: its first line must be {','.join(_COLUMNS)}.")
    for number, row in enumerate(rows, 1):
        if len(row) != len(_COLUMNS):
            raise ValueError(f"'{path}': line {number} has {len(row)} of {len(_COLUMNS)} values. Is the file complete?")
    table: dict[str, Tensor] = {}
    for name, *values in zip(*rows, strict=True):
        if name == "kind":
            table[name] = torch.tensor([-1 if value == "unknown" else kind_number(value) for value in values])
        else:
            table[name] = torch.tensor(np.array(values, np.float64))
    return table


def _checked(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if scores.dim() != 1 or scores.shape != labels.shape:
        raise ValueError(
            f"scores and labels must have one number per jet, got {tuple(scores.shape)} and {tuple(labels.shape)}."
        )
    if not bool(scores.isfinite().all()):
        raise ValueError("a score is not finite.")
    is_signal = labels == 1
    if bool(((labels != 0) & ~is_signal).any()):
        raise ValueError("labels must be 0 (background) or 1 (signal); select jets with jets.of_kind('qcd', 'top').")
    if not 0 < int(is_signal.sum()) < len(labels):
        raise ValueError("there must be jets of both classes.")
    return scores.double().cpu(), is_signal.cpu()


def _mean(x: Tensor) -> Measured:
    return Measured(float(x.mean()), float(x.double().var() / len(x)) ** 0.5 if len(x) > 1 else float("nan"))


def _quartiles(x: Tensor) -> tuple[float, float, float]:
    if len(x) == 0:
        return float("nan"), float("nan"), float("nan")
    low, middle, high = (float(quantile_of_sorted(x.double().sort().values, q)) for q in (0.25, 0.5, 0.75))
    return low, middle, high
