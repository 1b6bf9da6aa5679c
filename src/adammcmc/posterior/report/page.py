"""The page of a report: the verdict first, then a section for each question. The columns are in `posterior/columns.py`."""

from __future__ import annotations

import importlib.resources
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from adammcmc.posterior.calibration import ClassScores, ValueScores, plural, score, uncertainties
from adammcmc.posterior.columns import AGREEMENT, BURN_IN, KEY_NUMBERS, SELF_TESTS
from adammcmc.posterior.diagnosis import Diagnosis, by_chain
from adammcmc.posterior.report.figures import FIGURES, THEME, Array, Drawing, figure
from adammcmc.posterior.store.atomic import write_whole
from adammcmc.target.data import Data

if TYPE_CHECKING:
    from adammcmc.posterior.posterior import Posterior
    from adammcmc.posterior.predictive import Prediction
    from adammcmc.posterior.store.folder import Record
    from adammcmc.posterior.summary import Summary

__all__ = ["write_report"]

_MOST_UNCERTAIN = 12


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings; the first cell of a row names it."""

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
    tables: Sequence[Table] = ()


def write_report(
    posterior: Posterior,
    path: str | Path = "report.html",
    *,
    data: Any = None,
    names: Sequence[str] | None = None,
    title: str | None = None,
    progress: bool = True,
) -> Path:
    """Write the report of a run: one self-contained HTML page, and its figures as SVG files in a folder beside it.

    Args:
        posterior: the draws.
        path: of the page; the folder of the figures is named after it, with `_figures` in place of the suffix.
        data: held-out inputs, or (inputs, targets), as `posterior.predict` takes them. Without them the page compares
            no predictions of the chains on new data, and has no scores.
        names: of the examples, for the table of the most uncertain ones.
        title: of the page.
        progress: as in `predict`.

    Returns:
        The path of the page.
    """
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"the report must be an .html file, got '{path}'.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder '{path.parent}' for the report does not exist.")
    if hasattr(data, "__next__") and not isinstance(data, Data):  # (the library's own sources of batches can restart)
        raise TypeError("`data` is read more than once: pass tensors, a Dataset or a DataLoader, not an iterator.")
    prediction = None if data is None else posterior.predict(data, progress=progress)
    if names is not None and (prediction is None or len(names) != len(prediction)):
        raise ValueError("`names` must hold one name for each example of `data`.")
    summary = posterior.summary(data, progress=progress)
    sections = [_key_numbers(summary), _traces(posterior), *_burn_in(posterior), _self_tests(posterior), _agreement(summary)]
    if prediction is not None:
        sections += _predictions(prediction, names)
    sections.append(_settings(posterior))
    folder = path.with_name(path.stem + "_figures")
    page = _render(posterior, summary, sections, folder.name, title)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):  # files elsewhere would be written and deleted
        raise ValueError(f"'{folder}' must be a plain folder, or not exist yet: it is for the figures of the report.")
    folder.mkdir(exist_ok=True)
    drawings = {drawing.name: drawing.file for section in sections for drawing in section.drawings}
    for name, file in drawings.items():
        write_whole(folder / f"{name}.svg", file)
    write_whole(path, page)
    for name in FIGURES.keys() - drawings.keys():  # left over from an earlier report
        (folder / f"{name}.svg").unlink(missing_ok=True)
    return path


_HEADLINES = {  # by grade: style, headline, comment
    "sick": ("bad", "Do not trust these draws", "The gravest problem comes first. The numbers behind it are below."),
    "undecided": ("unsure", "No problem was found, but not everything could be judged", ""),
    "sound": ("good", "No problems found: you can use these draws", ""),
}


def _render(posterior: Posterior, summary: Summary, sections: Sequence[Section], folder: str, title: str | None) -> str:
    import jinja2
    import markupsafe

    level, headline, comment = _HEADLINES[summary.grade]
    manifest = posterior.store.manifest
    draws, chains = plural(len(posterior.made), "draw"), plural(posterior.num_chains, "chain")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    text = importlib.resources.files("adammcmc.posterior.report").joinpath("page.html").read_text("utf-8")
    return environment.from_string(text).render(
        title=title or f"{type(posterior.model).__name__}: {draws} of {chains}",
        subtitle=f"Run of {manifest['created'].replace('T', ', ')[:17]} UTC",
        theme=markupsafe.Markup(THEME),
        level=level,
        headline=headline,
        findings=[_sentence(finding.says) for finding in summary.findings],
        comment=_sentence(summary.agreement) if summary.is_healthy else comment,
        target=posterior.target,
        sections=sections,
        folder=folder,
        address=urllib.parse.quote(folder),
        version=manifest["versions"]["adammcmc"],
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _typeset(cell: str) -> str:
    """A cell of plain text for the page."""
    return "–" if cell == "-" else cell.replace("+-", "±")


def _key_numbers(summary: Summary) -> Section:
    numbers = [(name, _typeset(cell(summary))) for name, cell in KEY_NUMBERS.items()]
    return Section("numbers", "Key numbers", list(map(_sentence, summary.notes)), numbers)


def _traces(posterior: Posterior) -> Section:
    drawings = []
    rows = by_chain(posterior.made)
    steps = _column(rows, "step")
    for name, label in (("potential", "U"), ("loss", "mean loss")):
        values = _column(rows, name)
        if any(numpy.isfinite(y).any() for y in values.values()):
            drawings.append(figure(name, label, steps, values))
    rates = {chain: y / numpy.maximum(1.0, _gaps(steps[chain])) for chain, y in _column(rows, "num_accepted").items()}
    if rates:
        drawings.append(figure("acceptance", steps, rates))
    text = "A converged chain fluctuates around one level: a trend, or chains at different levels, is a warning."
    return Section("chains", "Traces", [text], drawings=drawings)


def _column(rows: dict[int, list[Record]], name: str) -> dict[int, Array]:
    """Values of each chain; an unknown value is NaN."""
    return {chain: numpy.array([record.get(name) for record in own], dtype=float) for chain, own in rows.items()}


def _gaps(steps: Array) -> Array:
    """Steps between each draw and the previous one."""
    gaps = numpy.diff(steps)
    return numpy.concatenate([gaps[:1] if len(gaps) else [1.0], gaps])


def _burn_in(posterior: Posterior) -> list[Section]:
    """What was tuned, if anything was."""
    records = Diagnosis(posterior).burn_in()
    if not records:
        return []
    names = {chain: f"chain {chain}" for chain in records}
    if posterior.store.is_stacked:  # the chains share their burn-in
        first = min(records)
        records, names = {first: records[first]}, {first: "all chains"}
    rows = [[names[chain], *(_typeset(cell(w)) for cell in BURN_IN.values())] for chain, w in records.items()]
    points = {chain: numpy.array(w.trend, dtype=float).reshape(-1, 2) for chain, w in records.items()}
    text = (
        "Settings are tuned until U has one level, then frozen; these steps are not draws. The first steps of kernels with "
        "a velocity have no test."
    )
    steps, levels = ({chain: p[:, i] for chain, p in points.items()} for i in (0, 1))
    drawings = [figure("burn-in", "U", steps, levels)] if any(len(p) for p in points.values()) else []
    return [Section("burn-in", "Burn-in", [text], drawings=drawings, tables=[Table("Burn-in", ["", *BURN_IN], rows)])]


def _self_tests(posterior: Posterior) -> Section:
    health = Diagnosis(posterior).health()  # by chain: one whose checkpoint is lost has none
    rows = [[f"chain {chain}", *(_typeset(cell(h)) for cell in SELF_TESTS.values())] for chain, h in health.items()]
    text = (
        "An exact chain at equilibrium accepts with rate 2 P(Y > 0) and has configurational temperature 1. The loss "
        "has influence if lambda times its change over a proposal varies by about 1. Noise of Y heats a plain "
        "minibatch test by 1 / beta_eff. A dash means not valid, or unknown, for this kernel."
    )
    table = Table("Self-tests of each chain since burn-in", ["chain", *SELF_TESTS], rows)
    return Section("self-tests", "Self-tests", [text], tables=[table])


def _agreement(summary: Summary) -> Section:
    rows = [[_typeset(cell(row)) for cell in AGREEMENT.values()] for row in summary.rows]
    text = (
        "R-hat compares chains and halves of chains: above 1.01, and above what chance explains for this number of "
        "draws, they have not mixed. ESS is the effective number of independent draws, for means (bulk) and for "
        "quantiles (tail). Predictions decide the verdict. The weights of layers are shown but not judged: chains may "
        "agree in all predictions while their neurons are permuted."
    )
    table = Table("R-hat and effective draws", list(AGREEMENT), rows)
    return Section("agreement", "Do the chains agree?", [text], tables=[table])


def _predictions(prediction: Prediction, names: Sequence[str] | None) -> list[Section]:
    sections = []
    is_right: Tensor | None = None
    if isinstance(prediction.targets, Tensor):
        title = "Are the predictions right?"
        try:
            scores = score(prediction)
        except (ValueError, TypeError) as error:  # a page is needed most if something is wrong
            sections.append(Section("calibration", title, [f"Not scored: {error}"]))
        else:
            text = f"{plural(scores.num_examples, 'held-out example')}: {scores.verdict}."
            numbers = [(name, _typeset(value)) for name, value in scores.numbers.items()]
            sections.append(Section("calibration", title, [text], numbers, _calibration(prediction, scores)))
            if prediction.likelihood.has_classes:
                hits = prediction.labels == prediction.targets.to(prediction.labels.dtype)
                is_right = hits.reshape(len(hits), -1).all(1)
    known = uncertainties(prediction)
    values = known["spread"].double().numpy()
    right = None if is_right is None else is_right.numpy()
    groups = {"all": values} if right is None else {"right": values[right], "wrong": values[~right]}
    table = _most_uncertain(prediction, known, is_right, names)
    drawings = [figure("spread", groups)]
    return [*sections, Section("uncertainty", "How uncertain are they?", drawings=drawings, tables=[table])]


def _calibration(prediction: Prediction, scores: ClassScores | ValueScores) -> list[Drawing]:
    if isinstance(scores, ValueScores):
        return [figure("coverage", *(numpy.array(x) for x in zip(*scores.coverage, strict=True)))]
    curve = scores.reliability
    columns = (curve.confidence, curve.frequency, curve.error, curve.counts)
    bins = (x[curve.counts > 0].double().numpy() for x in columns)
    risks = {name: (c.coverage.numpy(), c.risk.numpy()) for name, c in scores.selective.items()}
    return [figure("reliability", *bins, prediction.is_binary), figure("risk", risks)]


def _most_uncertain(
    prediction: Prediction, known: dict[str, Tensor], is_right: Tensor | None, names: Sequence[str] | None
) -> Table:
    """The examples with the largest mutual information; in regression, with the largest spread."""
    by = next(iter(known))
    order = torch.argsort(known[by].double(), descending=True)[:_MOST_UNCERTAIN].tolist()
    has_classes, targets = prediction.likelihood.has_classes, prediction.targets
    answers = prediction.labels if has_classes else prediction.mean
    columns = {
        "example": [str(i) if names is None else str(names[i]) for i in order],
        "predicted" if has_classes else "mean": [_short(answers[i]) for i in order],
        **{name: [f"{float(x[i]):.3g}" for i in order] for name, x in known.items()},
    }
    if isinstance(targets, Tensor):
        columns["target"] = [_short(targets[i]) for i in order]
    if is_right is not None:
        columns["right?"] = ["yes" if bool(is_right[i]) else "no" for i in order]
    caption = f"The {'example' if len(order) == 1 else 'examples'} with the largest {by}"
    return Table(caption, list(columns), list(zip(*columns.values(), strict=True)))


def _short(x: Tensor) -> str:
    values = x.flatten().tolist()
    return ", ".join(f"{v:.4g}" for v in values[:4]) + (", ..." if len(values) > 4 else "")


def _settings(posterior: Posterior) -> Section:
    manifest = posterior.store.manifest
    configuration = dict(manifest["configuration"])
    settings = configuration.pop("settings", {})
    values = configuration | {f"sampler: {key}": value for key, value in settings.items()}
    values["examples"] = f"{manifest['data']['num_data']:,}"
    values |= {f"version: {key}": value for key, value in manifest["versions"].items()}
    rows = [[key, text if len(text := str(value)) <= 300 else text[:297] + "..."] for key, value in values.items()]
    return Section("settings", "Settings", tables=[Table("Settings of the run", ["name", "value"], rows)])
