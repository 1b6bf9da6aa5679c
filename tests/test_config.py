"""Configurations: what they mean, that they agree with the library, and that no text whatever shows a traceback."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adammcmc
from adammcmc.cli.config import apply_change, named_things, read_config, schema, section_options, thing_options
from adammcmc.cli.tasks import TASKS
from tests.shell import GOOD, ask, furnish, modules_forgotten


def test_a_configuration_is_read() -> None:
    config = read_config(GOOD, ["run.num_chains=2", "sampler.sigma=[0.1, 0.2]"])
    assert config.task is None
    assert config.model.arguments == {"width": 3}
    assert config.data.test == "test.npz"
    assert config.sampler is not None
    assert config.sampler.name == "AdamMCMC"
    assert config.sampler.options == {"lr": 0.01, "sigma": [0.1, 0.2], "sigma_along": 1.0}
    assert config.prior is not None
    assert config.prior.options == {"scale": 1.0}
    assert config.run.num_chains == 2
    assert config.run.gap == 2
    assert config.acceptance is None


def test_what_is_left_out_is_as_in_sample() -> None:
    """The defaults of [run] are those of `adammcmc.sample`, and so are its words' names."""
    parameters = inspect.signature(adammcmc.sample).parameters
    options = {option.name: option.default for option in section_options("run")}
    names = ["path", "num_draws", "gap", "burn_in", "num_chains", "stacked", "batch_size", "chunk_size"]
    names += ["seed", "keep", "dtype"]
    assert sorted(options) == sorted(names)
    for name, default in options.items():
        assert parameters[name].default == default, name


def test_every_sampler_and_test_of_the_library_can_be_named() -> None:
    assert set(named_things("sampler")) == {
        "Underdamped",
        "Microcanonical",
        "MALA",
        "AdamMCMC",
        "AsReleased",
        "ExactAdamMCMC",
        "CorrectedMALA",
        "MinibatchLangevin",
        "AmortisedLangevin",
    }
    assert next(iter(named_things("sampler"))) == "Underdamped"
    # (Tuna needs a bound, which is an object)
    tests = {"AlwaysAccept", "Barker", "Confidence", "FullData", "Minibatch", "Penalty", "Sequential"}
    assert set(named_things("acceptance")) == tests
    assert set(named_things("burn_in")) == {"BurnIn"}
    assert set(named_things("members")) == {"TrainMembers"}


def test_options_of_samplers_are_all_their_numbers() -> None:
    """None is forgotten: what remains is filled in by `sample`, has a section of its own, or is made of tensors."""
    for name, thing in named_things("sampler").items():
        known = {option.name for option in thing_options("sampler", name)}
        rest = set(inspect.signature(thing).parameters) - known
        filled = {
            "params",
            "num_data",
            "batch_size",
            "generator",
            "examples",
            "fixed_data",
            "prior",
            "acceptance",
            "burn_in",
            "preconditioner",
        }
        assert rest <= filled, rest - filled


def test_every_key_of_the_schema_has_words() -> None:
    told = {f"{heading} {option.name}": option.help for heading, _, options in schema() for option in options}
    silent = {name for name, words in told.items() if not words}
    assert len(told) > 60
    assert all(name.startswith("[prior]") for name in silent)  # told of in the prior's own sentence


def test_an_infinite_friction_survives_the_run_folder() -> None:
    """TOML has inf, JSON has not: a run remembers the text."""
    config = read_config('task = "sine"\n[sampler]\nstep_size = 0.1\nfriction = inf\nnum_leapfrog = 5')
    assert config.sampler is not None
    assert config.sampler.options["friction"] == math.inf


@pytest.mark.parametrize(
    ("change", "result"),
    [
        ("a.b=1", {"a": {"b": 1}}),
        ("a.b = 1.5 ", {"a": {"b": 1.5}}),
        ("a.b=true", {"a": {"b": True}}),
        ("a.b=word", {"a": {"b": "word"}}),
        ("a.b=my_module:make.it", {"a": {"b": "my_module:make.it"}}),
        ("a.b='two words'", {"a": {"b": "two words"}}),
        ("a.b=[1, 2]", {"a": {"b": [1, 2]}}),
        ("a.b.c={d = 1}", {"a": {"b": {"c": {"d": 1}}}}),
        ("a.b=x=y", None),
        ("a", None),
        (".=1", None),
        ("a.b=", None),
        ("a.b=two words", None),
    ],
)
def test_changes(change: str, result: dict[str, Any] | None) -> None:
    table: dict[str, Any] = {}
    if result is None:
        with pytest.raises(ValueError, match="--set"):
            apply_change(table, change)
        return
    apply_change(table, change)
    assert table == result


MANY = pytest.mark.parametrize("number", [100, pytest.param(1000, marks=pytest.mark.slow)])

# --- nothing shows a traceback --------------------------------------------------------------------------------------------

KEYS = sorted({option.name for _, _, options in schema() for option in options} | {"name"})
SECTIONS = ["model", "data", "loss", "training", "run", "sampler", "prior", "acceptance", "burn_in", "members"]
NAMES = [
    *(name for section in SECTIONS[-5:] for name in named_things(section)),
    *TASKS,
    "cross_entropy",
    "GaussianNLL",
    "shell_things:make",
    "shell_things:network",
    "shell_things:data",
    "shell_things:fail",
    "shell_things:loss",
    "shell_things:nothing",
    "train.npz",
    "x.npy",
    "damaged.npz",
    "fits.pt",
    "cpu",
    "train",
    "bfloat16",
    "moments",
    "categorical",
    "frozen",
    "",
    ":",
    "..",
    "/",
    "\0",
]
# small numbers: a step of a billion leapfrog steps would be right, and would take its time
NUMBERS = st.one_of(
    st.integers(-2, 5), st.sampled_from([0.0, 1e-3, 0.5, 0.99, 1.0, -1.0, 1e300, 10**5000, math.inf, -math.inf, math.nan])
)
PLAIN = st.one_of(NUMBERS, st.booleans(), st.sampled_from(NAMES))
VALUES = st.one_of(
    PLAIN,
    st.lists(PLAIN, max_size=3),
    st.dictionaries(st.sampled_from([*KEYS, "width", "noise", ""]), PLAIN, max_size=2),
)


def of_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in value) + '"'
    if isinstance(value, list):
        return f"[{', '.join(map(of_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{name}" = {of_toml(v)}' for name, v in value.items()) + "}"
    return hex(value) if isinstance(value, int) and value > 10**9 else repr(value)


def plausible(section: str) -> st.SearchStrategy[dict[str, Any]]:
    """A section whose keys mostly exist, with values that mostly do not fit."""
    own = [option.name for heading, _, options in schema() if heading.startswith(f"[{section}]") for option in options]
    return st.dictionaries(st.sampled_from([*own, *own, "name", "nam"]), VALUES, max_size=4)


CONFIGURATIONS = st.fixed_dictionaries(
    {},
    optional={
        "task": st.one_of(st.sampled_from(list(TASKS)), PLAIN),
        "base": st.booleans(),
        **{section: plausible(section) for section in SECTIONS},
        "samplr": VALUES,
    },
)
GOOD_TABLE = {"model": {"name": "shell_things:make"}, "data": {"train": "train.npz"}, "loss": {"name": "cross_entropy"}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("fuzz")
    furnish(home)
    with modules_forgotten(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr("adammcmc.cli.forecast._ENOUGH_SECONDS", 0.0)
        yield home


def check_answer(home: Path, outcomes: list[str]) -> None:
    answer = ask("sample", "fuzzed.toml", "--dry-run")
    errors = [line for line in answer.err.splitlines() if not line.startswith("adammcmc: warning: ")]
    if answer.code == 0:
        assert not errors
        assert answer.out.startswith("target   p(theta)")
    else:
        assert answer.code == 1
        assert answer.out == ""
        [line] = errors
        assert line.startswith("adammcmc: ")
        assert "Traceback" not in line
        for kind in ("KeyError", "AttributeError", "IndexError", "AssertionError", "StopIteration", "UnboundLocalError"):
            assert f"adammcmc: {kind}" not in line, line  # a mistake of ours, not of the user
    outcomes.append("fine" if answer.code == 0 else errors[0])
    assert not (home / "runs").exists()


@pytest.mark.filterwarnings("ignore::UserWarning")
@MANY
def test_no_configuration_shows_a_traceback(home: Path, number: int) -> None:
    outcomes: list[str] = []

    @settings(max_examples=number, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(CONFIGURATIONS)
    def fuzz(table: dict[str, Any]) -> None:
        if table.pop("base", True) and "task" not in table:
            table = {**table, **{name: {**section, **(table.get(name) or {})} for name, section in GOOD_TABLE.items()}}
        top = [f"task = {of_toml(table.pop('task'))}"] if "task" in table else []
        sections = [
            f"[{name}]\n" + "\n".join(f'"{k}" = {of_toml(v)}' for k, v in content.items())
            if isinstance(content, dict)
            else f"{name} = {of_toml(content)}"
            for name, content in sorted(table.items(), key=lambda item: isinstance(item[1], dict))
        ]
        (home / "fuzzed.toml").write_text("\n".join([*top, *sections]))
        check_answer(home, outcomes)

    fuzz()
    # the fuzz went everywhere: configurations that run, and errors of many kinds
    assert outcomes.count("fine") > 3
    assert len(set(outcomes)) > 15


@MANY
def test_no_text_whatever_shows_a_traceback(home: Path, number: int) -> None:
    outcomes: list[str] = []

    @settings(max_examples=number, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass"))))
    def fuzz(content: bytes) -> None:
        (home / "fuzzed.toml").write_bytes(content)
        check_answer(home, outcomes)

    fuzz()
    assert len(set(outcomes)) > 5


@pytest.mark.filterwarnings("ignore::UserWarning")
@MANY
def test_no_change_whatever_shows_a_traceback(home: Path, number: int) -> None:
    outcomes: list[str] = []

    @settings(max_examples=number, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from([*SECTIONS, "task", ""]),
        st.sampled_from([*KEYS, ""]),
        st.one_of(VALUES.map(of_toml), st.text(max_size=12)),
    )
    def fuzz(section: str, name: str, value: str) -> None:
        answer = ask("sample", "good.toml", "--dry-run", "--set", f"{section}.{name}={value}")
        assert answer.code in (0, 1)
        assert "Traceback" not in answer.err
        assert len([line for line in answer.err.splitlines() if "warning" not in line]) == answer.code
        outcomes.append(answer.err)

    fuzz()
    assert len(set(outcomes)) > 30
