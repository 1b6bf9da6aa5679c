"""TOML -> frozen dataclasses: what `adammcmc sample CONFIG.toml` reads, checked before anything is loaded.

A section is a dataclass here, or it names something of the library (a sampler, a prior, an acceptance test, a burn-in), whose
own signature then says which keys there are. So the documentation of the file is that of the code.
"""

# ruff: noqa: RUF009  (a `key` makes a field)
from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from adammcmc.cli.options import Option, argument_texts, key, nearest, options_of, read_table

__all__ = [
    "Choice",
    "Config",
    "DataSection",
    "LossSection",
    "ModelSection",
    "RunSection",
    "TrainingSection",
    "apply_change",
    "named_things",
    "parse",
    "read_config",
    "read_text",
    "schema",
    "thing_options",
]


@dataclass(frozen=True)
class ModelSection:
    """The network, and where its chains start."""

    name: str | None = key("`module:attribute` of a network, or of a class or function that makes one.")
    arguments: dict[str, Any] = key("What that class or function is called with.", {})
    weights: str | None = key("File of a trained network's state dictionary: .safetensors, or .pt without pickled code.")
    device: str | None = key('Where it computes, such as "cuda"; where it was made if left out.')
    mode: Literal["train", "eval"] | None = key("What BatchNorm and dropout do while sampling; as it was made if left out.")


@dataclass(frozen=True)
class DataSection:
    """The training data, and held-out ones."""

    train: str | list[str] | None = key(
        "File .npz with inputs and targets, .npy files one for each, or `module:attribute` of tensors, a Dataset or a "
        "DataLoader, or of what makes them. Numbers in files are brought to the precision of the weights; labels of "
        "classes, and inputs of a network with an embedding, stay whole."
    )
    test: str | list[str] | None = key("Held-out data, likewise; `diagnose` and `report` look at the draws there.")
    arguments: dict[str, Any] = key("What `train` is called with, if it is a class or a function.", {})
    keys: list[str] | None = key(
        "Names of the arrays in .npz files, targets last; left out: inputs and targets, x and y, or unnamed ones."
    )
    num_data: int | None = key("How many examples there are, for iterable data without a length only.", least=1)


@dataclass(frozen=True)
class LossSection:
    """The negative log likelihood of an example."""

    name: str | None = key(
        "cross_entropy, binary_cross_entropy_with_logits, nll_loss, GaussianNLL (regression), or `module:attribute` of a loss "
        "of outputs and targets, or of model and batch."
    )
    arguments: dict[str, Any] = key(
        "What it is called with besides, such as noise = 0.1 for GaussianNLL (left out: the network predicts it).", {}
    )
    likelihood: str | None = key("What the outputs mean, for prediction; what the loss says if left out.")


@dataclass(frozen=True)
class TrainingSection:
    """Adam before the chains, for a network that is not trained yet."""

    steps: int | None = key("How many, on batches as of the run; left out: a task's own number, or none.", least=0)
    lr: float = key("Its learning rate.", 1e-2)


@dataclass(frozen=True)
class RunSection:
    """How many draws, how far apart, where they go. As the arguments of `adammcmc.sample`."""

    path: str | None = key('Folder for the draws; "runs/NAME" for NAME.toml if left out.')
    num_draws: int = key("Draws of each chain.", 200, least=1)
    gap: int = key("Steps between two draws.", 50, least=1)
    burn_in: int | None = key(
        "Steps before a chain counts; left out: until the sampler has found its settings, or a quarter of what follows.",
        least=0,
    )
    num_chains: int = key("Chains, each with its own random numbers.", 1, least=1)
    stacked: bool | None = key("Run all chains at once; left out: on a GPU, where it can be done.")
    batch_size: int | None = key("Examples in a step; left out: the DataLoader's, or all data at once.", least=1)
    seed: int = key("Fixes every random number.", 0, least=0)
    keep: Literal["draws", "moments"] | int = key(
        'What is kept: "draws", "moments" (mean and variance of the weights), or a number of last draws.', "draws", least=1
    )
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = key(
        "Of the stored draws; that of the weights if left out."
    )


@dataclass(frozen=True)
class Choice:
    """A thing of the library by its name, and the options it was given."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Config:
    """A whole configuration."""

    task: str | None
    model: ModelSection
    data: DataSection
    loss: LossSection
    training: TrainingSection
    sampler: Choice | None
    prior: Choice | None
    acceptance: Choice | None
    burn_in: Choice | None
    run: RunSection


_SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "data": DataSection,
    "loss": LossSection,
    "training": TrainingSection,
    "run": RunSection,
}
_DEFAULT_SAMPLER = "Underdamped"
_TASK = Option("task", str | None, None, "A bundled task, in place of [model], [data] and [loss]")
# what `sample` fills in, or what has a section of its own
_FILLED = ("params", "num_data", "generator", "examples", "fixed_data", "prior", "acceptance", "burn_in", "model", "made_for")


@cache
def named_things(section: str) -> dict[str, Callable[..., Any]]:
    """What [sampler], [prior], [acceptance] and [burn_in] may name, by name. A new class of the library is here by itself."""
    import adammcmc
    from adammcmc.samplers.sampler import Sampler

    if section == "sampler":
        classes = (getattr(adammcmc, name) for name in adammcmc.__all__)
        found = (c for c in classes if isinstance(c, type) and issubclass(c, Sampler) and c is not Sampler)
        usable = sorted((c for c in found if not _needs_more(c)), key=lambda c: c.__name__ != _DEFAULT_SAMPLER)
        return {c.__name__: c for c in usable}
    if section == "prior":
        prior = adammcmc.Gaussian
        return {
            "Gaussian": prior,
            "Gaussian.fan_in": prior.fan_in,
            "Gaussian.per_layer": prior.per_layer,
            "UniformBox": adammcmc.UniformBox,
            "UniformBall": adammcmc.UniformBall,
        }
    if section == "acceptance":
        things = {name: getattr(adammcmc.acceptance, name) for name in adammcmc.acceptance.__all__}
        return {name: thing for name, thing in things.items() if hasattr(thing, "needs_noise") and not _needs_more(thing)}
    return {"BurnIn": adammcmc.BurnIn}


def _needs_more(thing: Callable[..., Any]) -> bool:
    """Whether it must be given what TOML cannot say."""
    sayable = {option.name for option in options_of(thing)} | set(_FILLED)
    required = (p for p in inspect.signature(thing).parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD)
    return getattr(thing, "_is_protocol", False) or any(p.name not in sayable for p in required)


def thing_options(section: str, name: str) -> list[Option]:
    """What a named thing takes."""
    import adammcmc

    texts = argument_texts(adammcmc.AdamMCMC) if section == "sampler" else {}
    return options_of(named_things(section)[name], without=_FILLED, texts=texts)


def read_text(path: str | Path) -> str:
    """A configuration file as it stands."""
    path = Path(path)
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no configuration '{path}'. `adammcmc schema` prints one to start from.") from None
    except IsADirectoryError:
        raise ValueError(f"'{path}' is a folder. Give a TOML file, or go on with a run by `adammcmc resume {path}`.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is not TOML: {error}.") from error


def read_config(text: str, changes: Sequence[str] = (), what: str = "the configuration") -> Config:
    """A configuration from its text, with `section.key=value` changes on top; `what` names it in errors."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers that Python takes for too long
        raise ValueError(f"{what} is not TOML: {error}.") from error
    for change in changes:
        apply_change(table, change)
    _check_integers(table, what)
    return parse(table)


def _check_integers(value: Any, what: str) -> None:
    """TOML's are of 64 bits; Python reads any, and cannot even print the longest."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{what} has an integer of more than 64 bits.")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(item, what)


def apply_change(table: dict[str, Any], change: str) -> None:
    """Set one value, `section.key=value` with TOML's syntax for the value; a single word needs no quotes."""
    name, equals, text = change.partition("=")
    *path, last = name.strip().split(".")
    if not equals or not last or not all(path):
        raise ValueError(f"--set must look like section.key=value, got {change!r}.")
    try:
        value, *others = tomllib.loads(f"value = {text.strip()}").values()
    except (ValueError, RecursionError):
        others = []
        if not re.fullmatch(r"[\w./:+-]+", text.strip()):
            raise ValueError(f"--set {name}: {text.strip()!r} is no value of TOML. Quote a text: {name}='\"...\"'.") from None
        value = text.strip()
    if others:
        raise ValueError(f"--set must give one value, got {change!r}.")
    for step in path:
        table = table.setdefault(step, {})
        if not isinstance(table, dict):
            raise ValueError(f"--set {name}: `{step}` is a value, not a section.")
    table[last] = value


def parse(table: Mapping[str, Any]) -> Config:
    """A table of TOML as a configuration; anything unknown, missing or of another type is an error that says where."""
    named = ("sampler", "prior", "acceptance", "burn_in")
    known = ["task", *_SECTIONS, *named]
    for name, value in table.items():
        if name not in known:
            what = (
                f"[{name}] is unknown" if isinstance(value, dict) else f"`{name}` is unknown (or stands outside of its section)"
            )
            raise ValueError(f"{what}: {nearest(name, known)}")
        if name != "task" and not isinstance(value, dict):
            raise ValueError(f"[{name}] must be a section with keys, got {name} = {value!r}.")
    task = read_table("", {name: table[name] for name in ("task",) if name in table}, [_TASK]).get("task")
    sections: dict[str, Any] = {name: kind(**_read(name, kind, table.get(name, {}))) for name, kind in _SECTIONS.items()}
    choices: dict[str, Any] = {name: _choice(name, table[name]) if name in table else None for name in named}
    config = Config(task=task, **sections, **choices)
    _check_whole(config)
    return config


def _read(name: str, kind: type, table: Mapping[str, Any]) -> dict[str, Any]:
    return read_table(f"[{name}]", table, options_of(kind))


def _choice(section: str, table: Mapping[str, Any]) -> Choice:
    """The named thing and its checked options. Of samplers some options may be lists, with one number for each chain."""
    place, things = f"[{section}]", named_things(section)
    given = dict(table)
    name = given.pop("name", next(iter(things)) if section in ("burn_in", "sampler") else None)
    if not isinstance(name, str):
        raise ValueError(f"{place} `name` must be one of {', '.join(things)}{'' if name is None else f', got {name!r}'}.")
    if section == "sampler" and ":" in name:
        return Choice(name, given)  # the user's own, which checks its options itself
    if name not in things:
        raise ValueError(f"{place} there is no '{name}': {nearest(name, things)}")
    return Choice(name, read_table(place, given, _with_scans(section, name), of=name))


def _with_scans(section: str, name: str) -> Iterator[Option]:
    from adammcmc.runs.factory import SCANNED

    for option in thing_options(section, name):
        is_scanned = section == "sampler" and option.name in SCANNED
        yield option._replace(kind=option.kind | list[float]) if is_scanned else option


def _check_whole(config: Config) -> None:
    """What sections say together."""
    from adammcmc.cli.tasks import TASKS
    from adammcmc.target.likelihood import LIKELIHOODS

    three = {"[model] `name`": config.model.name, "[data] `train`": config.data.train, "[loss] `name`": config.loss.name}
    if config.task is not None:
        if config.task not in TASKS:
            raise ValueError(f"there is no task '{config.task}': {nearest(config.task, TASKS)}")
        if doubled := [place for place, value in three.items() if value is not None]:
            raise ValueError(f"`task` brings its own network, data and loss: leave out it, or {doubled[0]}.")
    elif missing := [place for place, value in three.items() if value is None]:
        raise ValueError(f"{missing[0]} is missing. A configuration names a network, data and a loss, or a `task`.")
    if config.run.burn_in is not None and config.burn_in is not None:
        raise ValueError("[run] `burn_in` and [burn_in] both say how long to burn in: leave one out.")
    if (likelihood := config.loss.likelihood) is not None and likelihood not in LIKELIHOODS:
        raise ValueError(f"[loss] there is no likelihood '{likelihood}': {nearest(likelihood, LIKELIHOODS)}")


# --- the documentation of the file ----------------------------------------------------------------------------------------


def schema() -> Iterator[tuple[str, str, list[Option]]]:
    """Every section with its heading, a sentence about it, and its keys: for `adammcmc schema` and the documentation."""
    from adammcmc.cli.tasks import TASKS

    tasks = "; ".join(f'"{name}": {(make.__doc__ or "").rstrip(".")}' for name, make in TASKS.items())
    yield "", "Before the first section", [_TASK._replace(help=f"{_TASK.help}. {tasks}.")]
    for name, kind in _SECTIONS.items():
        yield f"[{name}]", kind.__doc__ or "", options_of(kind)
    for section in ("sampler", "prior", "acceptance", "burn_in"):
        for name, thing in named_things(section).items():
            heading = f"[{section}]" if section == "burn_in" else f'[{section}] name = "{name}"'
            first = inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0]
            yield heading, " ".join(first.split()), list(_with_scans(section, name))
