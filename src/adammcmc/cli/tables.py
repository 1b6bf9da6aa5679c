"""Predictions for people and for files: a summary, a table of the most uncertain examples, .npz and .csv."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adammcmc.posterior.calibration import ClassScores, score
from adammcmc.posterior.predictive import Prediction
from adammcmc.posterior.store.atomic import whole

__all__ = ["prediction_table", "summary_line", "write_prediction"]


def summary_line(prediction: Prediction) -> str:
    """The number of examples and draws, and the scores if there are targets."""
    line = f"{_plural(len(prediction), 'example')}, {_plural(prediction.num_draws, 'draw')}"
    if not isinstance(prediction.targets, Tensor):
        return line
    try:
        scores = score(prediction)
    except (ValueError, TypeError) as error:  # targets that predictions cannot be compared with
        return f"{line}; not scored: {error}"
    if isinstance(scores, ClassScores):
        return f"{line}; accuracy {scores.accuracy}"
    both = (("", scores.nll_mixture), (" of a Gaussian", scores.nll_gaussian))
    likelihoods = "".join(f", negative log likelihood{of} {number}" for of, number in both if number is not None)
    return f"{line}; root mean square error {scores.rmse}{likelihoods}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def prediction_table(prediction: Prediction, rows: int) -> Any:
    """The examples with the largest uncertainty, as a table of rich."""
    from rich.table import Table

    columns = _columns(prediction)
    if "label" in columns and prediction.mean.dim() == 2 and prediction.labels.dim() == 1:  # of the predicted class alone
        columns |= {name: columns[name].gather(1, prediction.labels[:, None]) for name in ("mean", "spread")}
    by = "mutual_information" if "mutual_information" in columns else "spread"
    order = columns[by].reshape(len(prediction), -1).double().mean(1).argsort(descending=True)[:rows].tolist()
    shown = "example" if len(order) == 1 else f"{len(order)} examples"
    table = Table(title=f"The {shown} with the largest {by.replace('_', ' ')}", title_justify="left")
    headings = {"mean": "probability", "mutual_information": "mutual information"} if "label" in columns else {}
    kept = [name for name in ("target", "label", "mean", "spread", "entropy", "mutual_information") if name in columns]
    for heading in ("example", *(headings.get(name, name) for name in kept)):
        table.add_column(heading, justify="right")
    for row in order:
        table.add_row(str(row), *(_cell(columns[name][row]) for name in kept))
    return table


def _cell(value: Tensor) -> str:
    numbers = value.reshape(-1).tolist()
    text = " ".join(str(n) if isinstance(n, int) else f"{n:.3g}" for n in numbers[:4])
    return f"{text} ..." if len(numbers) > 4 else text


def _columns(prediction: Prediction) -> dict[str, Tensor]:
    """Every quantity by name, with the examples along axis 0."""
    columns = {"mean": prediction.mean, "spread": prediction.spread, "std": prediction.std}
    if prediction.likelihood.has_classes:
        columns["label"] = prediction.labels
        columns |= {name: getattr(prediction, name) for name in ("entropy", "expected_entropy", "mutual_information")}
    if isinstance(prediction.targets, Tensor):
        columns["target"] = prediction.targets
    return columns


def write_prediction(path: Path, prediction: Prediction) -> None:
    """Write all predictions: .npz with an array for each quantity, or .csv with a line for each example."""
    arrays = {name: (x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy() for name, x in _columns(prediction).items()}
    if path.suffix.lower() == ".npz":
        with whole(path) as file, open(file, "wb") as archive:  # given a path, numpy would append .npz to .NPZ
            np.savez_compressed(archive, **arrays)  # type: ignore[arg-type]
        return
    columns: dict[str, Any] = {"example": np.arange(len(prediction))}
    for name, array in arrays.items():
        for index in np.ndindex(array.shape[1:]):
            columns["_".join([name, *map(str, index)])] = array[(slice(None), *index)]
    with whole(path) as file, open(file, "w", newline="") as text:
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
