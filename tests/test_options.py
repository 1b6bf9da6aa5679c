"""Keys of a table: read off dataclasses and signatures, checked, and told of in words."""

# ruff: noqa: RUF009  (a `key` makes a field)
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from adammcmc import BurnIn, Underdamped
from adammcmc.cli.options import REQUIRED, Option, default_words, key, nearest, options_of, read_table, type_words


@dataclass(frozen=True)
class Section:
    """Keys of all kinds."""

    number: float = key("How much.", 1.5)
    count: int | None = key("How many.", least=2)
    word: Literal["one", "two"] = key("Which.", "one")
    pair: tuple[float, float] | None = key("Two.")
    table: dict[str, Any] | None = key("Anything.")


def test_a_section_says_its_own_keys() -> None:
    number, count, word, pair, table = options_of(Section)
    assert number == Option("number", float, 1.5, "How much.", None)
    assert (count.default, count.least) == (None, 2)
    assert (word.default, table.default) == ("one", None)
    assert pair.kind == tuple[float, float] | None


def test_a_class_says_its_own_options() -> None:
    options = {option.name: option for option in options_of(BurnIn)}
    assert list(options) == [
        "num_steps",
        "max_steps",
        "max_seconds",
        "target_acceptance",
        "proposal_acceptance",
        "window",
        "learn_preconditioner",
        "scaling",
        "approach",
    ]
    assert options["max_steps"].default == 41_000
    assert options["window"].help == "Steps in the first window."
    sampler = {option.name for option in options_of(Underdamped, without=("num_data",))}
    assert "preconditioner" in sampler  # by name; tensors are not TOML
    assert "generator" not in sampler
    assert "num_data" not in sampler


def test_help_that_a_docstring_lacks_comes_from_elsewhere() -> None:
    class Thing:
        """Nothing.

        Args:
            a: its own.
            b: as in another.
        """

        def __init__(self, a: int = 1, b: int = 2, c: int = 3) -> None:
            pass

    texts = {name: f"another {name}." for name in "abc"}
    assert [option.help for option in options_of(Thing, texts=texts)] == ["Its own.", "Another b.", "Another c."]


def test_what_toml_cannot_say_is_no_option() -> None:
    def function(a: int, b: Callable[[], None], c: list[str], d: Mapping[str, float], **more: float) -> None:
        """Nothing."""

    options = options_of(function)
    assert [option.name for option in options] == ["a", "c", "d"]
    assert all(option.default is REQUIRED for option in options)


@pytest.mark.parametrize(
    ("kind", "value", "result"),
    [
        (float, 1, 1.0),
        (float, math.inf, math.inf),
        (float | None, 2.5, 2.5),
        (bool, True, True),
        (tuple[float, float], [1, 2], (1.0, 2.0)),
        (tuple[float, ...], [1, 2, 3], (1.0, 2.0, 3.0)),
        (float | tuple[float, ...], [1], (1.0,)),
        (list[str], ["a"], ["a"]),
        (dict[str, float], {"a": 1}, {"a": 1.0}),
        (Literal["a", "b"] | int, 3, 3),
        (Literal["a", "b"] | int, "b", "b"),
        (Any, [1, "a"], [1, "a"]),
    ],
)
def test_values_are_brought_to_their_types(kind: Any, value: Any, result: Any) -> None:
    [(_, read)] = read_table("[a]", {"x": value}, [Option("x", kind, None, "")]).items()
    assert read == result
    assert type(read) is type(result)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (float, math.nan),
        (float, True),
        (float, "1"),
        (float, 10**400),
        (int, 1.0),
        (int, True),
        (bool, 1),
        (str, 1),
        (str, "a\0b"),
        (tuple[float, float], [1]),
        (tuple[float, float], [1, math.nan]),
        (tuple[float, float], 1),
        (list[str], "a"),
        (dict[str, float], {"a": "b"}),
        (Literal["a", "b"], "c"),
        (Literal["a", "b"], ["a"]),
        (float | None, None),
    ],
)
def test_values_of_other_types_are_refused(kind: Any, value: Any) -> None:
    with pytest.raises(ValueError, match=r"^\[a\] `x` must be .*, got "):
        read_table("[a]", {"x": value}, [Option("x", kind, None, "")])


def test_errors_say_where_and_what_is_near() -> None:
    options = options_of(Section)
    with pytest.raises(ValueError, match=r"^\[a\] `numbr` is unknown: did you mean `number`\?$"):
        read_table("[a]", {"numbr": 1}, options)
    with pytest.raises(ValueError, match=r"^\[a\] `zzz` is unknown to B: known: number, count, word, pair, table\.$"):
        read_table("[a]", {"zzz": 1}, options, of="B")
    with pytest.raises(ValueError, match=r"^\[a\] `count` must be an integer of at least 2, got 1\.$"):
        read_table("[a]", {"count": 1}, options)
    with pytest.raises(ValueError, match=r'must be "one" or "two", got \'tow\'\. Did you mean `two`\?'):
        read_table("[a]", {"word": "tow"}, options)
    with pytest.raises(ValueError, match=r"^\[a\] `x` is missing, which B needs: so much\.$"):
        read_table("[a]", {}, [Option("x", int, REQUIRED, "so much.")], of="B")


def test_words() -> None:
    assert nearest("FULLDATA", ["FullData", "Minibatch"]) == "did you mean `FullData`?"
    assert nearest("a", []) == "nothing can be set here."
    assert type_words(float | list[float]) == "a number or a list of numbers"
    assert type_words(dict[str, Any]) == "a table"
    assert type_words(tuple[float, float] | None) == "a list of 2 numbers"
    assert [default_words(x) for x in (None, REQUIRED, True, (0.9, 1.0), "a", 1e-8)] == [
        "",
        "required",
        "true",
        "[0.9, 1.0]",
        '"a"',
        "1e-08",
    ]
