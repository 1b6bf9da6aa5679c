"""TOML -> frozen dataclasses: the configuration of `adammcmc sample`, validated before anything is loaded.

A section is a dataclass below, with one `key` for each setting; or its keys are the arguments of something in the library: of
`sample` for [run], of `TrainMembers` for [members], of the named class for [sampler], [prior], [acceptance] and [burn_in]. The
documentation of the file is generated from both.
"""

# ruff: noqa: RUF009  (`key` returns a dataclass field)
from __future__ import annotations

import inspect
import re
import textwrap
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from adammcmc.cli.options import REQUIRED, Option, argument_texts, default_words, key, nearest, options_of, read_table

__all__ = [
    "ARRAYS",
    "Choice",
    "Config",
    "apply_change",
    "named_things",
    "parse",
    "read_config",
    "read_text",
    "schema",
    "schema_as_toml",
    "section_options",
    "thing_options",
]

ARRAYS = (".npy", ".npz")
"""Endings of data files."""


@dataclass(frozen=True)
class ModelSection:
    """The network, and the weights that the chains start from."""

    name: str | None = key("`module:attribute` of a network, or of a class or function that returns one.")
    arguments: dict[str, Any] | None = key("Keyword arguments for that class or function.")
    weights: str | None = key("State dictionary of a trained network: .safetensors, or .pt without pickled code.")
    device: str | None = key('Device to compute on, such as "cuda"; left out: where the network was created.')
    mode: Literal["train", "eval"] | None = key("Mode of BatchNorm and dropout while sampling; left out: as created.")


@dataclass(frozen=True)
class DataSection:
    """Training data and held-out data."""

    train: str | list[str] | None = key(
        "A .npz file with inputs and targets, one .npy file for each, or `module:attribute` of tensors, a Dataset or a "
        "DataLoader, or of a function that returns one. Numbers from files are converted to the dtype of the weights; class "
        "labels, and inputs of a network with an embedding, stay integers."
    )
    test: str | list[str] | None = key("Held-out data, in the same form; used by `predict`, `diagnose` and `report`.")
    arguments: dict[str, Any] | None = key("Keyword arguments for `train`, if it is a class or a function.")
    keys: list[str] | None = key(
        "Names of the arrays in .npz files, targets last; left out: inputs and targets, x and y, or unnamed arrays."
    )
    num_data: int | None = key("Number of examples; only for iterable data without a length.", least=1)


@dataclass(frozen=True)
class LossSection:
    """The negative log likelihood of one example."""

    name: str | None = key(
        "cross_entropy, binary_cross_entropy_with_logits, nll_loss, GaussianNLL (regression), or `module:attribute` of a loss "
        "that takes outputs and targets, or model and batch."
    )
    arguments: dict[str, Any] | None = key(
        "Further keyword arguments, such as noise = 0.1 for GaussianNLL (left out: the network predicts the noise)."
    )
    likelihood: str | None = key("How to interpret the outputs for prediction; left out: inferred from the loss.")


@dataclass(frozen=True)
class TrainingSection:
    """Adam before sampling, for a network that is not trained yet."""

    steps: int | None = key("Steps, with the batch size of the run; left out: the task's own number, or 0.", least=0)
    lr: float = key("Learning rate.", 1e-2)


@dataclass(frozen=True)
class Choice:
    """The name of an object of the library, and the options for it."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Config:
    """A whole configuration. Each field is a section: a dataclass above, the settings of the run, or a `Choice`."""

    task: str | None
    model: ModelSection
    data: DataSection
    loss: LossSection
    training: TrainingSection
    run: SimpleNamespace
    sampler: Choice | None
    prior: Choice | None
    acceptance: Choice | None
    burn_in: Choice | None
    members: Choice | None

    @property
    def code(self) -> list[str]:
        """The code that is imported: every `module:attribute`."""
        files = [f for given in (self.data.train, self.data.test) for f in ([given] if isinstance(given, str) else given or ())]
        sampler = None if self.sampler is None else self.sampler.name
        named = [self.model.name, self.loss.name, sampler, *(name for name in files if not name.endswith(ARRAYS))]
        return list(dict.fromkeys(name for name in named if name is not None and ":" in name))


_HINTS = typing.get_type_hints(Config)
_SECTIONS: dict[str, type] = {name: kind for name, kind in _HINTS.items() if isinstance(kind, type)}
_CHOICES = [name for name, kind in _HINTS.items() if kind == Choice | None]
_UNNAMED = ("burn_in", "members")  # sections of one object, which need no `name`
_DEFAULT_SAMPLER = "Underdamped"
_DTYPES = Literal["float64", "float32", "bfloat16", "float16"] | None
_TASK = Option("task", str | None, None, "A bundled task, in place of [model], [data] and [loss]")
# filled in by `sample`, or configured in a section of its own
_FILLED = ("params", "num_data", "generator", "examples", "fixed_data", "prior", "acceptance", "burn_in", "model", "made_for")


@cache
def named_things(section: str) -> dict[str, Callable[..., Any]]:
    """The objects that [sampler], [prior], [acceptance], [burn_in] and [members] may name. New samplers and tests appear."""
    import adammcmc
    from adammcmc.samplers.sampler import Sampler

    if section == "sampler":
        classes = (getattr(adammcmc, name) for name in adammcmc.__all__)
        found = (c for c in classes if isinstance(c, type) and issubclass(c, Sampler) and c is not Sampler)
        usable = sorted((c for c in found if _is_configurable(c)), key=lambda c: c.__name__ != _DEFAULT_SAMPLER)
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
        return {name: thing for name, thing in things.items() if hasattr(thing, "needs_noise") and _is_configurable(thing)}
    return {"BurnIn": adammcmc.BurnIn} if section == "burn_in" else {"TrainMembers": adammcmc.TrainMembers}


def _is_configurable(thing: Callable[..., Any]) -> bool:
    """Whether TOML can express every required argument."""
    known = {option.name for option in options_of(thing)} | set(_FILLED)
    required = (p for p in inspect.signature(thing).parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD)
    return not getattr(thing, "_is_protocol", False) and all(p.name in known for p in required)


@cache
def section_options(section: str) -> list[Option]:
    """The keys of a section that names no object. Those of [run] are the arguments of `sample` that no other section sets."""
    if section != "run":
        return options_of(_SECTIONS[section])
    from adammcmc.runs.plan import sample

    elsewhere = ("train", "warm_start", "warm_up", "likelihood", "num_data", "config", "resume", "progress")
    path, dtype = 'Folder for the draws; left out: "runs/NAME" for NAME.toml.', argument_texts(sample)["dtype"]
    options = [o._replace(help=path) if o.name == "path" else o for o in options_of(sample, without=elsewhere)]
    return [*options, Option("dtype", _DTYPES, None, dtype)]


def thing_options(section: str, name: str) -> list[Option]:
    """The options of a named object. Some options of samplers may be lists, with one number for each chain."""
    import adammcmc
    from adammcmc.runs.factory import SCANNED

    is_sampler = section == "sampler"
    texts = argument_texts(adammcmc.AdamMCMC) if is_sampler else {}
    filled = (*_FILLED, "batch_size") if is_sampler else _FILLED  # (that of a sampler is that of the data)
    options = options_of(named_things(section)[name], without=filled, texts=texts)
    return [o._replace(kind=o.kind | list[float]) if is_sampler and o.name in SCANNED else o for o in options]


def read_text(path: Path) -> str:
    """The text of a configuration file."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no configuration '{path}'. `adammcmc schema` prints one to start from.") from None
    except IsADirectoryError:
        raise ValueError(f"'{path}' is a folder. Give a TOML file, or resume a run with `adammcmc resume {path}`.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is not TOML: {error}.") from error


def read_config(text: str, changes: Sequence[str] = ()) -> Config:
    """Parse a configuration and apply `section.key=value` changes."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also covers integers too long for Python to parse
        raise ValueError(f"the configuration is not TOML: {error}.") from error
    for change in changes:
        apply_change(table, change)
    _check_integers(table)
    return parse(table)


def _check_integers(value: Any) -> None:
    """Integers of TOML have 64 bits. Python reads longer ones, and cannot print the longest."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("the configuration has an integer of more than 64 bits.")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(item)


def apply_change(table: dict[str, Any], change: str) -> None:
    """Apply `section.key=value`. The value is written in TOML; a single word needs no quotes."""
    name, equals, text = change.partition("=")
    *path, last = name.strip().split(".")
    if not equals or not last or not all(path):
        raise ValueError(f"--set must look like section.key=value, got {change!r}.")
    try:
        value, *others = tomllib.loads(f"value = {text.strip()}").values()
    except (ValueError, RecursionError):
        value, others = text.strip(), []
        if not re.fullmatch(r"[\w./:+-]+", value):
            raise ValueError(f"--set {name}: {value!r} is not a TOML value. Quote a text: {name}='\"...\"'.") from None
    if others:
        raise ValueError(f"--set must give one value, got {change!r}.")
    for step in path:
        table = table.setdefault(step, {})
        if not isinstance(table, dict):
            raise ValueError(f"--set {name}: `{step}` is a value, not a section.")
    table[last] = value


def parse(table: Mapping[str, Any]) -> Config:
    """Turn a TOML table into a configuration. Errors name the section and the key."""
    for name, value in table.items():
        if name not in _HINTS:
            what = f"[{name}] is unknown" if isinstance(value, dict) else f"`{name}` is unknown (or outside of its section)"
            raise ValueError(f"{what}: {nearest(name, _HINTS)}")
        if name != "task" and not isinstance(value, dict):
            raise ValueError(f"[{name}] must be a section with keys, got {name} = {value!r}.")
    parts: dict[str, Any] = {"task": None, **read_table("", {k: v for k, v in table.items() if k == "task"}, [_TASK])}
    for name, kind in _SECTIONS.items():
        given = read_table(f"[{name}]", table.get(name, {}), section_options(name))
        parts[name] = kind(**{option.name: option.default for option in section_options(name)} | given)
    for name in _CHOICES:
        parts[name] = _choice(name, table[name]) if name in table else None
    config = Config(**parts)
    _check_whole(config)
    return config


def _choice(section: str, table: Mapping[str, Any]) -> Choice:
    """The named object and its validated options."""
    place, things, given = f"[{section}]", named_things(section), dict(table)
    name = given.pop("name", next(iter(things)) if section in (*_UNNAMED, "sampler") else None)
    if not isinstance(name, str):
        raise ValueError(f"{place} `name` must be one of {', '.join(things)}{'' if name is None else f', got {name!r}'}.")
    if section == "sampler" and ":" in name:
        return Choice(name, given)  # the user's own sampler validates its options itself
    if name not in things:
        raise ValueError(f"{place} there is no '{name}': {nearest(name, things)}")
    return Choice(name, read_table(place, given, thing_options(section, name), of=name))


def _check_whole(config: Config) -> None:
    """Check what involves several sections."""
    from adammcmc.cli.tasks import TASKS
    from adammcmc.target.likelihood import LIKELIHOODS

    three = {"[model] `name`": config.model.name, "[data] `train`": config.data.train, "[loss] `name`": config.loss.name}
    if config.task is not None:
        if config.task not in TASKS:
            raise ValueError(f"there is no task '{config.task}': {nearest(config.task, TASKS)}")
        if doubled := [place for place, value in three.items() if value is not None]:
            raise ValueError(f"`task` includes a network, data and a loss: remove `task`, or {doubled[0]}.")
    elif missing := [place for place, value in three.items() if value is None]:
        raise ValueError(f"{missing[0]} is missing. A configuration names a network, data and a loss, or a `task`.")
    if config.run.burn_in is not None and config.burn_in is not None:
        raise ValueError("[run] `burn_in` and [burn_in] both set the burn-in: remove one of them.")
    if config.training.steps and config.members is not None:
        raise ValueError("[training] `steps` and [members] both train before sampling: remove one of them.")
    if (likelihood := config.loss.likelihood) is not None and likelihood not in LIKELIHOODS:
        raise ValueError(f"[loss] there is no likelihood '{likelihood}': {nearest(likelihood, LIKELIHOODS)}")


# --- the documentation of the file ----------------------------------------------------------------------------------------


def schema() -> Iterator[tuple[str, str, list[Option]]]:
    """Every section with its heading, a description, and its keys: for `adammcmc schema` and the documentation."""
    from adammcmc.cli.tasks import TASKS

    tasks = "; ".join(f'"{name}": {(make.__doc__ or "").rstrip(".")}' for name, make in TASKS.items())
    yield "", "Before the first section", [_TASK._replace(help=f"{_TASK.help}. {tasks}.")]
    for name, kind in _SECTIONS.items():
        text = "How many draws, how far apart, and where they are stored." if name == "run" else kind.__doc__ or ""
        yield f"[{name}]", text, section_options(name)
    for section in _CHOICES:
        for name, thing in named_things(section).items():
            heading = f"[{section}]" if section in _UNNAMED else f'[{section}] name = "{name}"'
            first = inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0]
            yield heading, " ".join(first.split()), thing_options(section, name)


_HEADER = """\
# A configuration of adammcmc, with every key. Lines that begin with #: are optional keys with their defaults.
# Paths are relative to this file. Modules are found beside this file, or in the working directory.
# Where a description says None, leave the key out. The keys of [sampler], [prior] and [acceptance] depend on `name`.
# adammcmc sample FILE.toml --dry-run shows what this samples, and its cost.
"""


def schema_as_toml() -> str:
    """A configuration with every key; optional ones are comments. It runs as printed."""
    lines = [_HEADER]
    for heading, text, options in schema():
        section, _, named = heading.partition(" ")
        if heading:
            lines += ["", *_comment(text), section if section.strip("[]") in _SECTIONS else f"#: {section}"]
            lines += [f"#: {named}"] if named else []
        for option in options:
            required = " (required)" if option.default is REQUIRED else ""
            lines += _comment(f"{option.words[0].upper()}{option.words[1:]}{required}. {option.help}".rstrip(". ") + ".")
            value = default_words(option.default)
            lines.append(
                f"#: {option.name} = {'...' if value in ('', 'required') else value}" if heading else 'task = "two-moons"'
            )
    return "\n".join(lines)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="# ")
