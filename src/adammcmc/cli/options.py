"""The keys that a table of a configuration may have, read off a dataclass or a signature: names, types, defaults, words."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

__all__ = ["REQUIRED", "Option", "argument_texts", "default_words", "key", "nearest", "options_of", "read_table", "type_words"]

REQUIRED = inspect.Parameter.empty
"""The default of what has none."""


class Option(NamedTuple):
    """One key."""

    name: str
    kind: Any
    """Its type, as annotated."""
    default: Any
    help: str
    least: int | None = None
    """The smallest number that it may be."""


def key(help: str, default: Any = None, *, least: int | None = None) -> Any:
    """A field of a section: its default, and what the documentation says of it."""
    metadata = {"help": help, "least": least, "default": default}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options_of(
    thing: Callable[..., Any], *, without: Collection[str] = (), texts: Mapping[str, str] | None = None
) -> list[Option]:
    """What a dataclass of `key`s, or anything else that is called, takes by name, as far as TOML can say it.

    Args:
        thing: a class or a function.
        without: names to leave out: what is filled in by others.
        texts: words for options that the docstring is silent about, or about which it says "as in ...".

    Example:
        >>> from adammcmc.acceptance import FullData
        >>> [(option.name, option.default) for option in options_of(FullData)]
        [('chunk_size', 4096), ('early_rejection', False)]
    """
    hints = typing.get_type_hints(thing.__init__ if isinstance(thing, type) else thing)  # type: ignore[misc]
    metadata: dict[str, Any] = (
        {f.name: f.metadata for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else {}
    )
    own = argument_texts(thing)
    options = []
    for name, parameter in inspect.signature(thing).parameters.items():
        kind = hints.get(name, Any)
        if name in without or parameter.kind is parameter.VAR_KEYWORD or not _is_plain(kind):
            continue
        said = own.get(name, "")
        if not said or said.startswith("as in "):
            said = (texts or {}).get(name, said)
        about = metadata.get(name, {})
        default = about.get("default", parameter.default)
        options.append(Option(name, kind, default, about.get("help", said), about.get("least")))
    return options


def argument_texts(thing: Any) -> dict[str, str]:
    """What the docstring says of each argument, under "Args:"; a class also inherits words."""
    texts: dict[str, str] = {}
    for owner in reversed(thing.__mro__) if isinstance(thing, type) else (thing,):
        doc = inspect.cleandoc(owner.__doc__ or "")
        _, _, block = doc.partition("Args:\n")
        block = re.split(r"^\S", block, maxsplit=1, flags=re.MULTILINE)[0]
        for name, words in re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", block, re.MULTILINE):
            texts[name] = " ".join(words.split())
    return texts


def read_table(place: str, table: Mapping[str, Any], options: Iterable[Option], of: str = "") -> dict[str, Any]:
    """The table with every value checked and in its type; what it lacks is left out.

    Args:
        place: where it stands, such as "[run]".
        table: as TOML gave it.
        options: what it may hold.
        of: what takes these options, for the error about one that it does not take.
    """
    known = {option.name: option for option in options}
    for name in table:
        if name not in known:
            raise ValueError(f"{place} `{name}` is unknown{of and f' to {of}'}: {nearest(name, known)}")
    for option in known.values():
        if option.default is REQUIRED and option.name not in table:
            raise ValueError(f"{place} `{option.name}` is missing{of and f', which {of} needs'}: {option.help or 'give it.'}")
    return {name: _checked(place, value, known[name]) for name, value in table.items()}


def nearest(name: str, known: Iterable[str]) -> str:
    """For an error about a name that is not known."""
    names = list(known)
    folded = {n.lower(): n for n in names}
    if near := difflib.get_close_matches(name.lower(), folded, n=1):
        return f"did you mean `{folded[near[0]]}`?"
    return f"known are {', '.join(names)}." if names else "there is nothing to say here."


def _checked(place: str, value: Any, option: Option) -> Any:
    try:
        result = _fit(value, option.kind)
        if option.least is not None and isinstance(result, int | float) and not result >= option.least:
            raise _Misfit
    except _Misfit:
        rule = "" if option.least is None else f" of at least {option.least}"
        words = type_words(option.kind)
        choices = [choice for arm in (option.kind, *typing.get_args(option.kind)) for choice in _choices(arm)]
        near = nearest(value, choices) if isinstance(value, str) else ""
        hint = f" D{near[1:]}" if near.startswith("did") else ""
        raise ValueError(f"{place} `{option.name}` must be {words}{rule}, got {reprlib.repr(value)}.{hint}") from None
    return result


class _Misfit(Exception):
    """A value is not of its type."""


def _fit(value: Any, kind: Any) -> Any:
    """The value in this type; TOML's integers are numbers too."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        for arm in arguments:
            try:
                return _fit(value, arm)
            except _Misfit:
                continue
        raise _Misfit
    if origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
    elif kind is float:
        with suppress(OverflowError):  # an integer beyond all numbers
            if type(value) in (int, float) and not math.isnan(value):
                return float(value)
    elif kind in (bool, int, str):
        if type(value) is kind and not (kind is str and "\0" in value):
            return value
    elif origin is tuple or origin is list:
        if isinstance(value, list):
            arms = arguments[:1] * len(value) if origin is list or arguments[-1] is ... else arguments
            if len(arms) == len(value):
                return origin(_fit(v, arm) for v, arm in zip(value, arms, strict=True))
    elif isinstance(value, dict) and isinstance(origin, type) and issubclass(origin, Mapping):
        return {name: _fit(v, arguments[1]) for name, v in value.items()}
    raise _Misfit


def _is_plain(kind: Any) -> bool:
    """Whether TOML has values of this type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return all(arm is type(None) or _is_plain(arm) for arm in arguments)
    if origin in (tuple, list):
        return all(arm is ... or _is_plain(arm) for arm in arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _is_plain(arguments[1])
    return kind in (Any, bool, int, float, str) or origin is Literal


def _choices(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def type_words(kind: Any) -> str:
    """A type as one says it to people.

    Example:
        >>> type_words(float | None), type_words(tuple[float, float]), type_words(Literal["train", "eval"])
        ('a number', 'a list of 2 numbers', '"train" or "eval"')
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_words(arm) for arm in arguments if arm is not type(None))
    if origin is Literal:
        return " or ".join(f'"{choice}"' for choice in arguments)
    if origin in (tuple, list):
        several = {float: "numbers", int: "integers", str: "texts"}.get(arguments[0], "values")
        number = "" if origin is list or arguments[-1] is ... else f"{len(arguments)} "
        return f"a list of {number}{several}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a table"
    return {bool: "true or false", int: "an integer", float: "a number", str: "a text"}.get(kind, "any value")


def default_words(value: Any) -> str:
    """A default as TOML would say it; what TOML cannot say is left out."""
    if value is None or value == {}:
        return ""
    if value is REQUIRED:
        return "required"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(default_words(v) for v in value)}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)
