"""What the command line shows and writes: the forecast, predictions, a configuration with every key."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adammcmc.cli.config import schema
from adammcmc.cli.forecast import Forecast
from adammcmc.cli.options import REQUIRED, Option, default_words, type_words
from adammcmc.cli.recipe import Recipe
from adammcmc.posterior.calibration import ClassScores, score
from adammcmc.posterior.predictive import Prediction
from adammcmc.posterior.store.folder import format_bytes
from adammcmc.posterior.store.whole import whole

__all__ = ["forecast_lines", "prediction_table", "schema_as_toml", "summary_line", "write_prediction"]

_WIDTH = 100


# --- before a run ---------------------------------------------------------------------------------------------------------


def forecast_lines(forecast: Forecast, recipe: Recipe, path: Path) -> Iterator[str]:
    """What would be sampled, and what it would take."""
    run = recipe.config.run
    device = next(recipe.model.parameters()).device
    batch = "batches of its own" if forecast.batch_size is None else f"{forecast.batch_size:,} in a step"
    steps = forecast.num_steps + (forecast.burn_in or 0)
    time = f"{format_seconds(forecast.seconds)}: {steps:,} steps at {format_seconds(forecast.step_seconds)}"
    if forecast.burn_in is None:
        time += ", and a burn-in that ends when the sampler has found its settings (thousands of steps)"
    else:
        time += f", {forecast.burn_in:,} of them burn-in"
    training = f", after {recipe.training_steps:,} steps of Adam" if recipe.training_steps else ""
    yield f"target:  {forecast.target}"
    yield f"network: {type(recipe.model).__name__}, {forecast.num_params:,} parameters, on {device}{training}"
    yield f"data:    {_plural(forecast.num_data, 'example')}, {batch}"
    yield f"draws:   {run.num_draws:,} of each of {run.num_chains} chain{'s' * (run.num_chains > 1)}, {run.gap} steps apart"
    yield f"size:    about {format_bytes(forecast.size)} in {path}"
    yield f"time:    about {time}"
    yield "Nothing was written: this was a dry run."


def format_seconds(seconds: float) -> str:
    """For people.

    Example:
        >>> format_seconds(0.00123), format_seconds(75.0), format_seconds(1e5)
        ('1.2 ms', '75 s', '27.8 h')
    """
    if seconds < 0.095:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


# --- predictions ----------------------------------------------------------------------------------------------------------


def summary_line(prediction: Prediction) -> str:
    """How many, and how right they are where there are targets."""
    line = f"{_plural(len(prediction), 'example')}, {_plural(prediction.num_draws, 'draw')}"
    if not isinstance(prediction.targets, Tensor):
        return line
    try:
        scores = score(prediction)
    except (ValueError, TypeError) as error:  # targets of another form than predictions can be held against
        return f"{line}; not scored: {error}"
    if isinstance(scores, ClassScores):
        return f"{line}; accuracy {scores.accuracy}"
    both = (("", scores.nll_mixture), (" of a Gaussian", scores.nll_gaussian))
    said = "".join(f", negative log likelihood{of} {number}" for of, number in both if number is not None)
    return f"{line}; root mean square error {scores.rmse}{said}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def prediction_table(prediction: Prediction, rows: int) -> Any:
    """The examples of which the draws are least sure, as a table of rich."""
    from rich.table import Table

    columns = _columns(prediction)
    if "label" in columns and prediction.mean.dim() == 2 and prediction.labels.dim() == 1:  # of the chosen class alone
        columns |= {name: columns[name].gather(1, prediction.labels[:, None]) for name in ("mean", "spread")}
    by = "mutual_information" if "mutual_information" in columns else "spread"
    uncertainty = columns[by].reshape(len(prediction), -1).double().mean(1)
    order = uncertainty.argsort(descending=True)[:rows]
    words = by.replace("_", " ")
    shown = "example" if len(order) == 1 else f"{len(order)} examples"
    table = Table(title=f"The {shown} of largest {words}", title_justify="left")
    names = {"mean": "probability", "mutual_information": "mutual information"} if "label" in columns else {}
    kept = [name for name in ("target", "label", "mean", "spread", "entropy", "mutual_information") if name in columns]
    table.add_column("example", justify="right")
    for name in kept:
        table.add_column(names.get(name, name), justify="right")
    for row in order.tolist():
        table.add_row(str(row), *(_cell(columns[name][row]) for name in kept))
    return table


def _cell(value: Tensor) -> str:
    numbers = value.reshape(-1).tolist()
    text = " ".join(str(n) if isinstance(n, int) else f"{n:.3g}" for n in numbers[:4])
    return f"{text} ..." if len(numbers) > 4 else text


def _columns(prediction: Prediction) -> dict[str, Tensor]:
    """All there is to say of each example, by name, with the examples along axis 0."""
    columns = {"mean": prediction.mean, "spread": prediction.spread, "std": prediction.std}
    if prediction.likelihood.has_classes:
        columns |= {
            "label": prediction.labels,
            "entropy": prediction.entropy,
            "expected_entropy": prediction.expected_entropy,
            "mutual_information": prediction.mutual_information,
        }
    if isinstance(prediction.targets, Tensor):
        columns["target"] = prediction.targets
    return columns


def write_prediction(path: Path, prediction: Prediction) -> None:
    """All predictions: .npz with an array for each quantity, or .csv with a line for each example."""
    arrays = {name: _as_array(x) for name, x in _columns(prediction).items()}
    if path.suffix.lower() == ".npz":
        with whole(path) as file, open(file, "wb") as archive:  # of a path, numpy would add an ending of its own to .NPZ
            np.savez_compressed(archive, **arrays)  # type: ignore[arg-type]
        return
    names, columns = ["example"], [np.arange(len(prediction))]
    for name, array in arrays.items():
        for index in np.ndindex(array.shape[1:]):
            names.append("_".join([name, *map(str, index)]))
            columns.append(array[(slice(None), *index)])
    with whole(path) as file, open(file, "w", newline="") as text:
        writer = csv.writer(text)
        writer.writerow(names)
        writer.writerows(zip(*(column.tolist() for column in columns), strict=True))


def _as_array(x: Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = (x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy()
    return array


# --- the configuration ----------------------------------------------------------------------------------------------------


def schema_as_toml() -> str:
    """A configuration with every key, as comments where it can be left out. It runs as it is."""
    lines = [
        "# A configuration of adammcmc, with every key there is. A line that begins with #: is a key that may be left out;",
        "# what stands there is its default. Paths are relative to this file, and so are modules (or to where you are).",
        "# Where the words say None, leave the key out. What keys [sampler], [prior], [acceptance] have depends on their name.",
        "# adammcmc sample FILE.toml --dry-run says what this samples, and what it takes.",
        "",
    ]
    for heading, text, options in schema():
        section, _, named = heading.partition(" ")
        if heading:
            lines += ["", *_comment(text)]
            is_named = section in ("[sampler]", "[prior]", "[acceptance]", "[burn_in]")
            lines += [f"#: {section}" if is_named else section]
            lines += [f"#: {named}"] if named else []
        for option in options:
            lines += _comment(_said(option))
            value = '"two-moons"' if option.name == "task" and not heading else default_words(option.default)
            prefix = "" if option.name == "task" and not heading else "#: "
            lines.append(f"{prefix}{option.name} = {'...' if value in ('', 'required') else value}")
    return "\n".join(lines)


def _said(option: Option) -> str:
    rule = "" if option.least is None else f" of at least {option.least}"
    needed = " (required)" if option.default is REQUIRED else ""
    kind = type_words(option.kind)
    return f"{kind[0].upper()}{kind[1:]}{rule}{needed}. {option.help}".rstrip(". ") + "."


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")
