"""The page: gathers what a run knows of itself, puts the verdict first, and writes it down."""

from __future__ import annotations

import importlib.resources
import math
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from adammcmc.posterior.calibration import ClassScores, Measured, ValueScores, score, uncertainties
from adammcmc.posterior.report import figures
from adammcmc.posterior.report.drawing import THEME, Drawing
from adammcmc.posterior.store.whole import write_whole
from adammcmc.target.data import Data

if TYPE_CHECKING:
    from adammcmc.posterior.predictive import Prediction
    from adammcmc.posterior.summary import Summary
    from adammcmc.samplers.health import Health

__all__ = ["Section", "Table", "write_report"]

_MOST_UNCERTAIN = 12


@dataclass(frozen=True)
class Table:
    """Rows of cells under heads; the first cell of a row names it."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    name: str
    title: str
    texts: Sequence[str] = ()
    numbers: Sequence[tuple[str, str]] = ()
    drawings: Sequence[Drawing] = ()
    tables: Sequence[Table] = field(default=())


def write_report(
    posterior: Any,
    path: str | Path = "report.html",
    *,
    data: Any = None,
    names: Sequence[str] | None = None,
    title: str | None = None,
    progress: bool = True,
) -> Path:
    """Write the report of a run: one HTML page that needs no network, and its figures as SVG files in a folder beside it.

    Args:
        posterior: the draws.
        path: of the page; the folder of the figures has the same name, with `_figures` in place of the ending.
        data: held-out inputs, or (inputs, targets), as `posterior.predict` takes them. Without them the page cannot say whether
            the chains agree on predictions, nor whether these are right.
        names: of the examples, for the table of the most uncertain ones.
        title: of the page.
        progress: as in `predict`.

    Returns:
        The path of the page.
    """
    import jinja2
    import markupsafe

    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"the report must be an .html file, got '{path}'.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder '{path.parent}' for the report does not exist.")
    if hasattr(data, "__next__") and not isinstance(data, Data):  # (a source of batches of our own can begin anew)
        raise TypeError("`data` is read more than once: give tensors, a Dataset or a DataLoader, not an iterator.")
    prediction = None
    if data is not None:
        prediction = posterior.predict(data, progress=progress)
    if names is not None and (prediction is None or len(names) != len(prediction)):
        raise ValueError("`names` must hold one name for each example of `data`.")
    summary = posterior.summary(data, progress=progress)
    sections = [_numbers(summary), _chains(posterior), _self_tests(posterior, summary.health), _agreement(summary)]
    if prediction is not None:
        sections += _answers(prediction, names)
    sections.append(_settings(posterior))
    folder = path.with_name(path.stem + "_figures")
    level, headline, findings, comment = _verdict(summary)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(
        importlib.resources.files("adammcmc.posterior.report").joinpath("page.html").read_text("utf-8")
    )
    manifest = posterior.store.manifest
    page = template.render(
        title=title or _title(posterior),
        subtitle=f"Run of {manifest['created'].replace('T', ', ')[:17]} UTC",
        theme=markupsafe.Markup(THEME),
        level=level,
        headline=headline,
        findings=findings,
        comment=comment,
        target=posterior.target,
        sections=sections,
        folder=folder.name,
        address=urllib.parse.quote(folder.name),
        version=manifest["versions"]["adammcmc"],
    )
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):  # it would write, and delete, elsewhere
        raise ValueError(f"'{folder}' must be a plain folder, or not exist yet: the figures of the report go there.")
    folder.mkdir(exist_ok=True)
    drawings = {drawing.name: drawing.file for section in sections for drawing in section.drawings}
    assert drawings.keys() <= set(figures.NAMES)
    for name, file in drawings.items():
        write_whole(folder / f"{name}.svg", file)
    write_whole(path, page)
    for name in set(figures.NAMES) - drawings.keys():  # those of an earlier report, which this one does not have
        (folder / f"{name}.svg").unlink(missing_ok=True)
    return path


# --- the verdict ----------------------------------------------------------------------------------------------------------

_HEADLINES = {
    "sick": ("bad", "Do not trust these draws"),
    "undecided": ("unsure", "Nothing wrong was found, but not everything could be judged"),
    "sound": ("good", "No complaint"),
}


def _verdict(summary: Summary) -> tuple[str, str, list[str], str]:
    """A word for the style, one for the reader, what was found, and what that means."""
    level, headline = _HEADLINES[summary.grade]
    said = [_sentence(finding.says) for finding in summary.findings]
    comment = {
        "sick": "The gravest comes first. The rest of the page shows the numbers behind it.",
        "undecided": "",
        "sound": _sentence(summary.verdict.removeprefix("no complaint: ")),
    }[summary.grade]
    return level, headline, said, comment


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _numbers(summary: Summary) -> Section:
    accepted = [h.acceptance for h in summary.health if not math.isnan(h.acceptance)]
    numbers = [
        ("chains", f"{summary.num_chains:,}"),
        ("draws of each", f"{summary.num_draws:,}"),
        ("worth independent draws", _number(summary.ess, ",.0f")),
        ("largest R-hat", _number(summary.rhat, ".3f")),
        ("acceptance", _number(sum(accepted) / len(accepted) if accepted else math.nan, ".2f")),
        ("seconds", _number(summary.seconds, ",.0f")),
        ("effective draws a second", _number(summary.ess_per_second, ".3g")),
        ("effective draws for 1,000 gradients", _number(1000 * summary.ess_per_gradient, ".3g")),
    ]
    return Section("numbers", "In numbers", list(map(_sentence, summary.notes)), numbers)


def _agreement(summary: Summary) -> Section:
    rows = [
        [
            row.name if row.count == 1 else f"{row.name} (the worst of {row.count})",
            "–" if math.isnan(row.mean) else f"{row.mean:.4g} ± {row.mean_error:.1g}",
            _number(row.rhat, ".3f"),
            _number(row.ess_bulk, ",.0f"),
            _number(row.ess_tail, ",.0f"),
            row.verdict,
        ]
        for row in summary.rows
    ]
    text = (
        "R-hat compares chains, and halves of chains: above 1.01, and above what chance explains for so few draws, they have "
        "not mixed. ESS is how many independent draws these are worth, for means (bulk) and for quantiles (tail). Predictions "
        "decide; weights of a layer are shown, not judged: chains may agree in all they predict while their neurons are in "
        "another order."
    )
    heads = ["", "mean", "R-hat", "bulk ESS", "tail ESS", "verdict"]
    return Section("agreement", "Do the chains agree?", [text], tables=[Table("R-hat and effective draws", heads, rows)])


# --- what the chains did ----------------------------------------------------------------------------------------------------


def _chains(posterior: Any) -> Section:
    index = posterior.made
    drawings = []
    for name, label, title in (
        ("potential", "U", "U, minus the log of the target, at the draws"),
        ("loss", "mean loss", "Mean loss of the batch at the draws"),
    ):
        steps, values = figures.by_chain(index, name)
        if values and any(numpy.isfinite(y).any() for y in values.values()):
            drawings.append(figures.trace(name, title, label, steps, values))
    steps, accepted = figures.by_chain(index, "num_accepted")
    shares = {chain: y / numpy.maximum(1.0, _gaps(steps[chain])) for chain, y in accepted.items()}
    if shares:
        drawings.append(figures.acceptance(steps, shares))
    return Section(
        "chains",
        "What the chains did",
        ["A chain at rest wanders about one level. A slope, or chains at levels of their own, says that it is not there yet."],
        drawings=drawings,
    )


def _gaps(steps: figures.Array) -> figures.Array:
    """Steps between a draw and the one before it."""
    gaps = numpy.diff(steps)
    return numpy.concatenate([gaps[:1] if len(gaps) else [1.0], gaps])


def _self_tests(posterior: Any, health: Sequence[Health]) -> Section:
    rows = [
        [
            f"chain {chain}",
            f"{h.num_steps:,}",
            _number(h.acceptance, ".3f"),
            _number(h.twice_rises, ".3f"),
            _number(h.temperature, ".3g"),
            _number(h.loss_influence, ".3g"),
            _number(h.noise, ".3g"),
            _number(h.beta_eff, ".2f"),
            _number(h.effective_draws, ".0f"),
            h.verdict,
        ]
        for chain, h in zip(posterior.chain_numbers, health, strict=False)
    ]
    heads = [
        "chain", "steps", "acceptance", "2 P(Y > 0)", "temperature", "say of the loss", "noise of Y", "beta_eff",
        "effective draws of U", "verdict",
    ]  # fmt: skip
    texts = [
        "An exact chain at rest accepts with 2 P(Y > 0), and has configurational temperature 1. The loss has a say if lambda "
        "times its change over a proposal varies by about 1. Noise of Y heats a plain minibatch test by 1 / beta_eff. A dash: "
        "not valid, or not known, for this kernel."
    ]
    return Section("self-tests", "Self-tests", texts, tables=[Table("Self-tests of each chain, since burn-in", heads, rows)])


# --- what they predict ------------------------------------------------------------------------------------------------------


def _answers(prediction: Prediction, names: Sequence[str] | None) -> list[Section]:
    sections = []
    is_right: Tensor | None = None
    scores: ClassScores | ValueScores | None = None
    if isinstance(prediction.targets, Tensor):
        try:
            scores = score(prediction)
        except (ValueError, TypeError) as error:  # the page is needed most where something is wrong
            sections.append(Section("calibration", "Is it right?", [f"Not scored: {error}"]))
    if scores is not None:
        if isinstance(scores, ClassScores):
            assert isinstance(prediction.targets, Tensor)
            hits = prediction.labels == prediction.targets.to(prediction.labels.dtype)
            is_right = hits.reshape(len(hits), -1).all(1)
            curve = scores.reliability
            is_binary = "categorical" not in prediction.likelihood.name
            some = curve.counts > 0
            confidence, frequency, bars, counts = (
                x[some].double().numpy() for x in (curve.confidence, curve.frequency, curve.error, curve.counts)
            )
            drawings = [
                figures.reliability(confidence, frequency, bars, counts, scores.ece.value, is_binary=is_binary),
                figures.risk({name: (c.coverage.numpy(), c.risk.numpy()) for name, c in scores.selective.items()}),
            ]
            numbers = [
                ("accuracy", _measured(scores.accuracy)),
                ("negative log likelihood", _measured(scores.nll)),
                ("Brier score", _measured(scores.brier)),
                ("calibration error", _measured(Measured(scores.ece.value, scores.ece.error))),
                ("of it by chance", f"{scores.ece.by_chance:.4f}"),
            ]
        else:
            levels, shares, errors = (numpy.array(x) for x in zip(*scores.coverage, strict=True))
            drawings = [figures.coverage(levels, shares, errors)]
            numbers = [("root mean square error", _measured(scores.rmse))]
            if scores.nll_mixture is not None:
                numbers.append(("negative log likelihood", _measured(scores.nll_mixture)))
            if scores.nll_gaussian is not None:
                numbers.append(("the same of one Gaussian", _measured(scores.nll_gaussian)))
        text = f"{_plural(scores.num_examples, 'held-out example')}: {scores.verdict}."
        sections.append(Section("calibration", "Is it right?", [text], numbers, drawings))
    known = uncertainties(prediction)
    values = known["spread"].double().numpy()
    groups = {"all": values}
    if is_right is not None:
        right = is_right.numpy()
        groups = {"right": values[right], "wrong": values[~right]}
    drawing = figures.spreads("spread (75% - 25% quantile over the draws)", groups)
    table = _most_uncertain(prediction, known, is_right, names)
    sections.append(Section("uncertainty", "How sure is it?", (), drawings=[drawing], tables=[table]))
    return sections


def _most_uncertain(
    prediction: Prediction, known: dict[str, Tensor], is_right: Tensor | None, names: Sequence[str] | None
) -> Table:
    """The examples with the largest mutual information; in regression, with the largest spread."""
    by = "mutual information" if "mutual information" in known else "spread"
    order = torch.argsort(known[by].double(), descending=True)[:_MOST_UNCERTAIN].tolist()
    heads = ["example", *(["predicted"] if prediction.likelihood.has_classes else ["mean"]), *known]
    if isinstance(prediction.targets, Tensor):
        heads.append("target")
    if is_right is not None:
        heads.append("right?")
    rows = []
    for i in order:
        answer = prediction.labels[i] if prediction.likelihood.has_classes else prediction.mean[i]
        row = [str(i) if names is None else str(names[i]), _short(answer), *(f"{float(x[i]):.3g}" for x in known.values())]
        if isinstance(prediction.targets, Tensor):
            row.append(_short(prediction.targets[i]))
        if is_right is not None:
            row.append("yes" if bool(is_right[i]) else "no")
        rows.append(row)
    return Table(f"The {'example' if len(rows) == 1 else 'examples'} with the largest {by}", heads, rows)


def _short(x: Tensor) -> str:
    values = x.flatten().tolist()
    said = ", ".join(f"{v:.4g}" for v in values[:4])
    return said + (", ..." if len(values) > 4 else "")


# --- how it was made --------------------------------------------------------------------------------------------------------


def _settings(posterior: Any) -> Section:
    manifest = posterior.store.manifest
    rows = [[key, _plain(value)] for key, value in manifest["configuration"].items() if key != "settings"]
    rows += [[f"sampler: {key}", _plain(value)] for key, value in manifest["configuration"].get("settings", {}).items()]
    rows += [["examples", f"{manifest['data']['num_data']:,}"]]
    rows += [[f"version: {key}", str(value)] for key, value in manifest["versions"].items()]
    return Section("settings", "How it was made", tables=[Table("Settings of the run", ["name", "value"], rows)])


def _plain(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 300 else text[:297] + "..."


def _number(value: float, form: str) -> str:
    return "–" if value is None or math.isnan(value) else format(value, form)


def _measured(number: Measured) -> str:
    return str(number).replace("+-", "±")


def _title(posterior: Any) -> str:
    draws, chains = _plural(len(posterior.made), "draw"), _plural(posterior.num_chains, "chain")
    return f"{type(posterior.model).__name__}: {draws} of {chains}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
