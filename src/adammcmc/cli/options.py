"""The settings that something accepts, read from a dataclass or a signature: names, types, defaults and help."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
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
"""The default of a setting that has none."""


class Option(NamedTuple):
    """One setting."""

    name: str
    kind: Any
    """Its annotated type."""
    default: Any
    help: str
    least: int | None = None
    """The smallest number allowed."""

    @property
    def words(self) -> str:
        """Its type, and its smallest value."""
        return type_words(self.kind) + ("" if self.least is None else f" of at least {self.least}")


def key(help: str, default: Any = None, *, least: int | None = None) -> Any:
    """A dataclass field that declares one key of a configuration."""
    return dataclasses.field(default=default, metadata={"help": help, "least": least})


def options_of(
    thing: Callable[..., Any], *, without: Collection[str] = (), texts: Mapping[str, str] | None = None
) -> list[Option]:
    """The keyword arguments of a class or function that TOML can express. Help comes from `key`, or from the docstring.

    Args:
        thing: a class or a function.
        without: names to leave out.
        texts: help for arguments that the docstring does not describe, or describes by "as in ...".

    Example:
        >>> from adammcmc.acceptance import FullData
        >>> [(option.name, option.default) for option in options_of(FullData)]
        [('chunk_size', 4096), ('early_rejection', False)]
    """
    hints = typing.get_type_hints(thing.__init__ if isinstance(thing, type) else thing)  # type: ignore[misc]
    for hint in [h for h in hints.values() if typing.get_origin(h) is typing.Unpack]:  # **common: Unpack[Common]
        hints |= typing.get_type_hints(*typing.get_args(hint))
    fields = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
    metadata: dict[str, Mapping[str, Any]] = {field.name: field.metadata for field in fields}
    own, options = argument_texts(thing), []
    for name, parameter in inspect.signature(thing).parameters.items():
        kind, declared = _expressible(hints.get(name, Any)), metadata.get(name, {})
        if name in without or parameter.kind is parameter.VAR_KEYWORD or not type_words(kind):
            continue
        text = own.get(name, "")
        if not text or text.startswith("as in "):
            text = (texts or {}).get(name, text)
        text = f"{text[:1].upper()}{text[1:]}"
        options.append(Option(name, kind, parameter.default, declared.get("help", text), declared.get("least")))
    return options


def argument_texts(thing: Any) -> dict[str, str]:
    """What the docstring says under "Args:" about each argument. A class inherits descriptions."""
    texts: dict[str, str] = {}
    for owner in reversed(thing.__mro__) if isinstance(thing, type) else (thing,):
        _, _, block = inspect.cleandoc(owner.__doc__ or "").partition("Args:\n")
        block = re.split(r"^\S", block, maxsplit=1, flags=re.MULTILINE)[0]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", block, re.MULTILINE):
            texts[name] = " ".join(text.split())
    return texts


def read_table(place: str, table: Mapping[str, Any], options: Iterable[Option], of: str = "") -> dict[str, Any]:
    """The table with every value checked and converted to its type. Missing keys stay missing.

    Args:
        place: where the table stands, such as "[run]"; errors begin with it.
        table: as TOML gave it.
        options: the keys it may have.
        of: what accepts these keys, for error messages.
    """
    known = {option.name: option for option in options}
    for name in table:
        if name not in known:
            raise ValueError(f"{place} `{name}` is unknown{of and f' to {of}'}: {nearest(name, known)}")
    for option in known.values():
        if option.default is REQUIRED and option.name not in table:
            raise ValueError(f"{place} `{option.name}` is missing{of and f', which {of} needs'}: {option.help or 'set it.'}")
    return {name: _checked(place, value, known[name]) for name, value in table.items()}


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for the error about an unknown name."""
    names = list(known)
    folded = {n.lower(): n for n in names}
    if near := difflib.get_close_matches(name.lower(), folded, n=1):
        return f"did you mean `{folded[near[0]]}`?"
    return f"known: {', '.join(names)}." if names else "nothing can be set here."


def _checked(place: str, value: Any, option: Option) -> Any:
    try:
        result = _fit(value, option.kind)
        if option.least is not None and isinstance(result, int | float) and not result >= option.least:
            raise _Misfit
    except _Misfit:
        arms = (option.kind, *typing.get_args(option.kind))
        choices = [choice for arm in arms if typing.get_origin(arm) is Literal for choice in typing.get_args(arm)]
        hint = nearest(value, choices) if isinstance(value, str) else ""
        hint = f" D{hint[1:]}" if hint.startswith("did") else ""
        raise ValueError(f"{place} `{option.name}` must be {option.words}, got {reprlib.repr(value)}.{hint}") from None
    return result


class _Misfit(Exception):
    """A value does not have the required type."""


def _fit(value: Any, kind: Any) -> Any:
    """The value converted to this type; an integer of TOML is a number too."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        for arm in arguments:
            with suppress(_Misfit):
                return _fit(value, arm)
    elif origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
    elif kind is float:
        with suppress(OverflowError):  # an integer that no float can hold
            if type(value) in (int, float) and not math.isnan(value):
                return float(value)
    elif kind in (bool, int, str):
        if type(value) is kind and not (kind is str and "\0" in value):
            return value
    elif origin in (tuple, list):
        if isinstance(value, list):
            arms = arguments[:1] * len(value) if origin is list or arguments[-1] is ... else arguments
            if len(arms) == len(value):
                return origin(_fit(v, arm) for v, arm in zip(value, arms, strict=True))
    elif isinstance(value, dict) and isinstance(origin, type) and issubclass(origin, Mapping):
        return {name: _fit(v, arguments[1]) for name, v in value.items()}
    raise _Misfit


def _expressible(kind: Any) -> Any:
    """A union without the types that TOML cannot express; another type as it is."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    arms = tuple(arm for arm in typing.get_args(kind) if arm is type(None) or type_words(arm))
    return typing.Union[arms] if arms else kind  # noqa: UP007


_PLAIN = {bool: "true or false", int: "an integer", float: "a number", str: "a text", Any: "any value"}


def type_words(kind: Any) -> str:
    """A type in words; empty if TOML has no values of this type.

    Example:
        >>> type_words(float | None), type_words(tuple[float, float]), type_words(Literal["train", "eval"])
        ('a number', 'a list of 2 numbers', '"train" or "eval"')
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        arms = [type_words(arm) for arm in arguments if arm is not type(None)]
        return " or ".join(arms) if all(arms) else ""
    if origin is Literal:
        return " or ".join(f'"{choice}"' for choice in arguments)
    if origin in (tuple, list):
        if not all(arm is ... or type_words(arm) for arm in arguments):
            return ""
        several = {float: "numbers", int: "integers", str: "texts"}.get(arguments[0], "values")
        return f"a list of {'' if origin is list or arguments[-1] is ... else f'{len(arguments)} '}{several}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a table" if type_words(arguments[1]) else ""
    return _PLAIN.get(kind, "")


def default_words(value: Any) -> str:
    """A default in TOML's syntax; empty where TOML has none."""
    if value is None:
        return ""
    return "required" if value is REQUIRED else json.dumps(value)  # scalars and lists are written alike in JSON and TOML
