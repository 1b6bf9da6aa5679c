"""The command line: what it does, what it says, and what it answers to bad input: one line, never a traceback."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

import adammcmc
from adammcmc.posterior.store.folder import FolderStore
from adammcmc.posterior.store.records import manifest_text
from tests.shell import Answer, ask, furnish, modules_forgotten

# so short a chain says that it has not arrived
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A furnished folder with a run, runs/good, and damaged copies of it."""
    home = tmp_path_factory.mktemp("shell")
    furnish(home)
    here = Path.cwd()
    os.chdir(home)
    try:
        with modules_forgotten(), pytest.MonkeyPatch.context() as patch:
            patch.setenv("ADAMMCMC_TRUST_CODE", "1")  # its runs import a module; what happens without is tested below
            answer = ask("sample", "good.toml")
            assert answer.code == 0, answer.err
            assert "6 draws of 1 chain" in answer.out
            _damage(home / "runs")
            yield home
    finally:
        os.chdir(here)


DAMAGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "half_config": lambda manifest: manifest["config"].pop("from_run"),
    "other_config": lambda manifest: manifest.update(config="good.toml"),
    "odd_changes": lambda manifest: manifest["config"].update(changes=[3]),
    "no_configuration": lambda manifest: manifest.pop("configuration"),
    "half_configuration": lambda manifest: manifest["configuration"].pop("num_draws"),
    "no_model": lambda manifest: manifest.pop("model"),
}


def _damage(runs: Path) -> None:
    """Runs that cannot be read, each for a reason of its own."""
    for name in ("no_manifest", "newer", "not_json", "python", "edited", "no_draws", "moments", "no_test", *DAMAGED):
        shutil.copytree(runs / "good", runs / name)
    (runs / "no_manifest" / "run.json").unlink()
    (runs / "not_json" / "run.json").write_text("{")
    manifest = json.loads((runs / "good" / "run.json").read_text())
    (runs / "newer" / "run.json").write_text(json.dumps(manifest | {"format": 99}))
    (runs / "python" / "run.json").write_bytes(manifest_text({k: v for k, v in manifest.items() if k != "config"}))
    (runs / "edited" / "run.json").write_text(json.dumps(manifest | {"keep": "moments"}))
    (runs / "no_draws" / "chain-0" / "index.jsonl").unlink()
    text = manifest["config"]["text"].replace('test = "test.npz"', "")
    (runs / "no_test" / "run.json").write_bytes(manifest_text(manifest | {"config": manifest["config"] | {"text": text}}))
    for name, damage in DAMAGED.items():
        damaged = json.loads(json.dumps(manifest))
        damage(damaged)
        (runs / name / "run.json").write_bytes(manifest_text(damaged))
    (runs / "moments" / "run.json").write_bytes(manifest_text({**manifest, "keep": "moments"}))


def listing(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_size for p in folder.rglob("*") if "__pycache__" not in p.parts}


def test_endings_may_be_in_capitals(home: Path, tmp_path: Path) -> None:
    for command, ending in (("report", "HTML"), ("diagnose", "JSON"), ("predict", "CSV"), ("predict", "NPZ")):
        file = tmp_path / f"X.{ending}"
        answer = ask(command, "runs/good", "-o", file)
        assert answer.code == 0, answer.err
        assert file.stat().st_size > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["X.CSV", "X.HTML", "X.JSON", "X.NPZ", "X_figures"]
    assert "mean" in np.load(tmp_path / "X.NPZ")


def test_one_example_is_one(home: Path) -> None:
    np.save("single.npy", np.zeros((1, 2), dtype=np.float32))
    answer = ask("predict", "runs/good", "single.npy")
    Path("single.npy").unlink()
    assert answer.out.startswith("1 example, 6 draws\nThe example with the largest mutual information")


# --- what it does ---------------------------------------------------------------------------------------------------------


def test_a_run_remembers_its_configuration(home: Path) -> None:
    posterior = adammcmc.Posterior.open(
        home / "runs" / "good", torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    )
    assert len(posterior) == 6
    assert "AdamMCMC (Algorithm 1)" in posterior.target
    remembered = json.loads((home / "runs" / "good" / "run.json").read_text())["config"]
    assert remembered == {
        "text": (home / "good.toml").read_text(),
        "changes": [],
        "file": "good.toml",
        "folder": str(home),
        "from_run": "../..",
    }


def test_sampling_from_the_shell_is_sampling_from_python(home: Path) -> None:
    """The same draws, bit for bit."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    data = np.load(home / "train.npz")
    train = torch.from_numpy(data["inputs"]).float(), torch.from_numpy(data["targets"]).long()

    def make(params: object, **options: object) -> adammcmc.AdamMCMC:
        return adammcmc.AdamMCMC(params, lr=1e-2, sigma=1e-2, sigma_along=1.0, prior=adammcmc.Gaussian(1.0), **options)

    ours = adammcmc.sample(
        model, train, torch.nn.functional.cross_entropy, sampler=make, num_draws=6, gap=2, burn_in=4, seed=0, progress=False
    )
    theirs = adammcmc.Posterior.open(home / "runs" / "good", model)
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_settings_can_be_changed_on_the_way(home: Path, tmp_path: Path) -> None:
    words = ["--set", "run.num_draws=3", "--set", "sampler.sigma = 0.02", "--set", "prior.name=Gaussian.fan_in"]
    answer = ask("sample", "good.toml", "-o", tmp_path / "run", *words, "--set", "prior.scale=2")
    assert answer.code == 1
    assert "[prior] `scale` is unknown to Gaussian.fan_in: did you mean `bias_scale`?" in answer.err
    text = (home / "good.toml").read_text().replace("scale = 1.0", "gain = 1.5")
    (home / "fan.toml").write_text(text)
    answer = ask("sample", "fan.toml", "-o", tmp_path / "run", *words)
    assert answer.code == 0, answer.err
    manifest = FolderStore(tmp_path / "run").manifest
    assert manifest["configuration"]["num_draws"] == 3
    assert manifest["chains"][0]["sigma"] == 0.02
    assert "0.866..1.06 by tensor" in manifest["target"]
    # and the run remembers the changes
    answer = ask("resume", tmp_path / "run", "--num-draws", 5)
    assert answer.code == 0, answer.err
    assert "5 draws of 1 chain" in answer.out
    assert "the run was complete" not in answer.out
    assert (
        f"the run was complete: `adammcmc resume {tmp_path / 'run'} --num-draws N` adds draws"
        in ask("resume", tmp_path / "run").out
    )


def test_more_draws_of_a_run_are_those_of_a_longer_run(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "runs" / "good", home / "runs" / "more")
    assert ask("resume", "runs/more", "--num-draws", 9).code == 0
    assert ask("sample", "good.toml", "--set", "run.num_draws=9", "-o", tmp_path / "run").code == 0
    files = sorted(p.name for p in (tmp_path / "run" / "chain-0").glob("draw-*"))
    assert len(files) == 9
    for name in files:
        assert (home / "runs" / "more" / "chain-0" / name).read_bytes() == (tmp_path / "run" / "chain-0" / name).read_bytes()


def test_predictions_are_those_of_the_library(home: Path, tmp_path: Path) -> None:
    answer = ask("predict", "runs/good", "test.npz", "-o", tmp_path / "p.npz")
    assert answer.code == 0, answer.err
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    posterior = adammcmc.Posterior.open(home / "runs" / "good", model)
    data = np.load("test.npz")
    p = posterior.predict(torch.from_numpy(data["inputs"]).float())
    written = np.load(tmp_path / "p.npz")
    for name in ("mean", "spread", "std", "entropy", "expected_entropy", "mutual_information"):
        np.testing.assert_array_equal(written[name], getattr(p, name).numpy())
    np.testing.assert_array_equal(written["target"], data["targets"])
    accuracy = (p.labels.numpy() == data["targets"]).mean()
    assert f"20 examples, 6 draws; accuracy {accuracy:.2f} +- 0." in answer.out
    first = int(p.mutual_information.argmax())
    rows = [line for line in answer.out.splitlines() if line.startswith("│")]
    assert rows[0].split()[1] == str(first)
    assert len(rows) == 10
    # the same as text, from the held-out data of the run itself
    assert ask("predict", "runs/good", "-o", tmp_path / "p.csv", "--rows", 0).code == 0
    table = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [float(row["mean_1"]) for row in table] == pytest.approx(p.mean[:, 1].tolist(), rel=1e-6)
    assert [int(row["example"]) for row in table] == list(range(20))


def test_inputs_alone_are_predicted_too(home: Path) -> None:
    answer = ask("predict", "runs/good", "x.npy", "--rows", 2)
    assert answer.code == 0, answer.err
    assert answer.out.startswith("40 examples, 6 draws\n")
    answer = ask("predict", "runs/good", "shell_things:data", "--rows", 2)
    assert "40 examples, 6 draws; accuracy" in answer.out


def test_who_predicts_needs_no_training_data(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.delitem(sys.modules, "shell_things", raising=False)  # that of `home`
    assert ask("sample", tmp_path / "good.toml").code == 0
    (tmp_path / "train.npz").unlink()
    assert ask("predict", tmp_path / "runs" / "good").code == 0
    assert ask("diagnose", tmp_path / "runs" / "good").code == 0
    answer = ask("resume", tmp_path / "runs" / "good", "--num-draws", 8)
    assert answer.code == 1
    assert "[data] `train`: there is no file" in answer.err


def test_regression_is_predicted(tmp_path: Path) -> None:
    (tmp_path / "sine.toml").write_text('task = "sine"\n[training]\nsteps = 20\n[run]\nnum_draws = 4\ngap = 1\nburn_in = 10\n')
    answer = ask("sample", tmp_path / "sine.toml")
    assert answer.code == 0, answer.err
    assert "trained: 20 steps of Adam" in answer.out
    assert "samples p(theta) ~ exp(-lambda * sum_i loss_i) * prior | lambda = 1 (T = 1), n = 60" in answer.out
    answer = ask("predict", tmp_path / "runs" / "sine")
    assert "201 examples, 4 draws; root mean square error" in answer.out
    assert "largest spread" in answer.out


def test_a_run_is_diagnosed(home: Path, tmp_path: Path) -> None:
    answer = ask("diagnose", "runs/good", "-o", tmp_path / "d.json")
    assert answer.code == 0, answer.err
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    posterior = adammcmc.Posterior.open(home / "runs" / "good", model)
    data = np.load("test.npz")
    test = torch.from_numpy(data["inputs"]).float(), torch.from_numpy(data["targets"]).long()
    assert answer.out == f"{posterior.summary(test)}\n\n{posterior.score(test)}\n"
    assert answer.out.startswith("undecided: ")  # the verdict first
    assert json.loads((tmp_path / "d.json").read_text())["grade"] == "undecided"


def test_a_report_is_written_beside_the_draws_or_where_one_says(home: Path, tmp_path: Path) -> None:
    answer = ask("report", "runs/good", "-o", tmp_path / "page.html", "--title", "mine & <yours>")
    assert answer.code == 0, answer.err
    assert answer.out.strip() == f"report: {(tmp_path / 'page.html').as_uri()}"
    text = (tmp_path / "page.html").read_text()
    assert "mine &amp; &lt;yours&gt;" in text
    assert "Are the predictions right?" in text
    shutil.copytree("runs/good", "runs/reported")
    answer = ask("report", "runs/reported")
    assert answer.code == 0, answer.err
    assert Path("runs/reported/report.html").exists()
    assert ask("diagnose", "runs/reported").code == 0  # and does not disturb the run


def test_moments_alone_are_diagnosed_too(home: Path, tmp_path: Path) -> None:
    assert ask("sample", "good.toml", "-o", tmp_path / "run", "--set", "run.keep=moments").code == 0
    answer = ask("diagnose", tmp_path / "run")
    assert answer.code == 0, answer.err
    assert "note: no draws were kept to predict with" in answer.out


def test_held_out_data_that_cannot_be_predicted_do_not_stop_a_diagnosis(home: Path, tmp_path: Path) -> None:
    words = ["sample", "good.toml", "-o", tmp_path / "run", "--set", "data.test=wide.npy"]
    assert ask(*words).code == 0
    answer = ask("diagnose", tmp_path / "run")
    assert answer.code == 0, answer.err
    assert "note: cannot predict the held-out data: " in answer.out


def test_a_run_made_in_python_needs_its_network_named(home: Path) -> None:
    answer = ask("diagnose", "runs/python", "--config", "good.toml")
    assert answer.code == 0, answer.err
    assert "approximate: momentum" in answer.out


def test_a_dry_run_says_all_and_writes_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adammcmc.cli.forecast._ENOUGH_SECONDS", 0.0)
    before = listing(home)
    answer = ask("sample", "good.toml", "-o", "dry", "--dry-run", "--set", "run.num_draws=1000")
    assert answer.code == 0, answer.err
    assert listing(home) == before
    for words in (
        "target   p(theta) ~ exp(-lambda * sum_i loss_i) * prior | lambda = 1 (T = 1), n = 40 | prior: N(0, 1^2), P = 17",
        "model    Sequential, 17 trainable weights",
        "data     40 examples, 40 in a step",
        "sampler  AdamMCMC(lr=0.01, sigma=0.01, sigma_along=1.0)",
        "chains   1, each with 1000 draws 2 steps apart after 4 steps of burn-in; seed 0",
        "in 'dry'",
        " on cpu, ",
        "2,004 steps at",
        "4 of them burn-in",
        "Nothing was written",
    ):
        assert words in answer.out, words


def test_members_are_trained_once_and_not_in_a_dry_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adammcmc.cli.forecast._ENOUGH_SECONDS", 0.0)
    real = adammcmc.TrainMembers.train

    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("it trained")

    monkeypatch.setattr(adammcmc.TrainMembers, "train", fail)
    call = ("sample", "good.toml", "-o", "runs/apart", "--set", "members={max_steps=20}", "--set", "run.num_chains=2")
    answer = ask(*call, "--dry-run")
    assert answer.code == 0, answer.err
    assert "starts   a member trained for each chain: Adam, lr 0.001" in answer.out
    monkeypatch.setattr(adammcmc.TrainMembers, "train", real)
    answer = ask(*call)
    assert answer.code == 0, answer.err
    assert "trained 2 members in " in answer.out
    assert "validation loss " in answer.out
    monkeypatch.setattr(adammcmc.TrainMembers, "train", fail)
    answer = ask("resume", "runs/apart", "--num-draws", "9", "--trust-code")
    assert answer.code == 0, answer.err
    assert "18 draws of 2 chains" in answer.out


def test_the_schema_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adammcmc.cli.forecast._ENOUGH_SECONDS", 0.0)
    answer = ask("schema")
    assert answer.code == 0
    (tmp_path / "my.toml").write_text(answer.out)
    answer = ask("sample", tmp_path / "my.toml", "--dry-run")
    assert answer.code == 0, answer.err
    assert "354 trainable weights" in answer.out
    assert "| exact" in answer.out


def test_what_to_cite(home: Path) -> None:
    answer = ask("cite")
    citation = (Path(__file__).parent.parent / "CITATION.cff").read_text()
    assert answer.code == 0
    for name in ("Bieringer", "Kasieczka", "Steffen", "Trabs"):
        assert name in answer.out
        assert name in citation
    assert "2312.14027" in answer.out
    assert "2312.14027" in citation
    assert f"version = {{{adammcmc.__version__}}}" in answer.out


def test_the_version_does_not_wait_for_torch() -> None:
    check = (
        "import sys; from adammcmc.cli.__main__ import run; assert run(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    )
    for words in (["--version"], ["--help"], ["sample", "--help"], ["jets", "train", "--help"]):
        subprocess.run([sys.executable, "-c", check, *words], check=True, capture_output=True)
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "adammcmc.cli", "--version"], check=True, capture_output=True)
        seconds.append(time.monotonic() - began)
    assert min(seconds) < 1


@pytest.mark.parametrize(
    "command", ["demo", "sample", "resume", "check", "predict", "diagnose", "report", "schema", "cite", "jets"]
)
def test_every_command_has_help(command: str) -> None:
    answer = ask(command, "--help")
    assert answer.code == 0
    assert f"Usage: adammcmc {command}" in answer.out


@pytest.mark.usefixtures("foreground")
def test_ctrl_c_keeps_what_there_is_and_says_how_to_go_on(home: Path, tmp_path: Path) -> None:
    """Interrupted, then resumed: the same draws as those of a run that nobody interrupted."""
    words = ["sample", "good.toml", "--set", "run.num_draws=50", "--set", "run.gap=10"]
    process = subprocess.Popen(
        [sys.executable, "-m", "adammcmc.cli", *words, "-o", str(tmp_path / "run")], stderr=subprocess.PIPE, text=True
    )
    index = tmp_path / "run" / "chain-0" / "index.jsonl"
    until = time.monotonic() + 60
    while not (index.exists() and index.stat().st_size > 0) and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    number = len(FolderStore(tmp_path / "run").index)
    assert 0 < number < 50
    assert (
        said.strip()
        == f"stopped; {tmp_path / 'run'} keeps {number} draws. Continue with: adammcmc resume {tmp_path / 'run'} --trust-code"
    )
    assert ask("resume", tmp_path / "run").code == 0
    assert ask(*words, "-o", tmp_path / "whole").code == 0
    whole = sorted((tmp_path / "whole" / "chain-0").glob("draw-*"))
    assert len(whole) == 50
    assert all(file.read_bytes() == (tmp_path / "run" / "chain-0" / file.name).read_bytes() for file in whole)


def test_ctrl_c_before_the_first_step(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **options: object) -> None:
        raise KeyboardInterrupt

    for function in ("Plan.run", "prepare"):
        monkeypatch.setattr(f"adammcmc.cli.recipe.{function}", stop)
        answer = ask("sample", "good.toml", "-o", tmp_path / "run")
        assert answer == Answer(130, "", "stopped before the first step; nothing was written.\n")
    again = "adammcmc resume runs/good --trust-code"
    assert ask("resume", "runs/good").err == f"stopped; runs/good keeps 6 draws. Continue with: {again}\n"


def test_other_signals_have_their_exit_codes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **options: object) -> None:
        raise SystemExit(143)

    monkeypatch.setattr("adammcmc.cli.recipe.Plan.run", stop)
    words = "stopped; runs/good keeps 6 draws. Continue with: adammcmc resume runs/good --trust-code\n"
    assert ask("resume", "runs/good") == Answer(143, "", words)


@pytest.mark.parametrize(
    ("command", "file", "breaks"),
    [
        ("predict", "x.npz", "numpy.savez_compressed"),
        ("predict", "x.csv", "csv.writer"),
        ("diagnose", "x.json", "pathlib.Path.write_text"),
        ("report", "x.html", "pathlib.Path.write_text"),
    ],
)
def test_an_output_that_fails_leaves_the_old_file(
    command: str, file: str, breaks: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **options: object) -> None:
        raise OSError("no space left")

    (tmp_path / file).write_text("the old one")
    with monkeypatch.context() as patch:
        patch.setattr(breaks, fail)
        answer = ask(command, "runs/good", "-o", tmp_path / file)
    assert (answer.code, "no space left" in answer.err) == (1, True)
    assert (tmp_path / file).read_text() == "the old one"
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [file]


def test_help_is_set_to_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the source is not a line of the help."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 100)  # (read from the environment once, when it is first imported)
    lines = [line.strip() for line in ask("sample", "--help").out.splitlines()]
    assert "resume RUN continues it, bit for bit." in lines


def test_ctrl_c_elsewhere_is_silent(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (KeyboardInterrupt, typer.Abort):

        def stop(*_: object, error: type[BaseException] = error) -> None:
            raise error

        monkeypatch.setattr("adammcmc.cli.commands.say", stop)
        assert ask("cite") == Answer(130, "", "")


# --- bad input ------------------------------------------------------------------------------------------------------------

SAMPLE = ["sample", "good.toml", "-o", "new"]
BAD: list[tuple[list[str], int, str]] = [
    # the command line
    (["simple"], 2, "No such command 'simple'"),
    (["sample"], 2, "Missing argument"),
    (["sample", "good.toml", "--dry"], 2, "No such option"),
    (["predict", "runs/good", "test.npz", "--rows", "many"], 2, "Invalid value for '--rows'"),
    (["predict", "runs/good", "test.npz", "--rows", "-1"], 2, "Invalid value for '--rows'"),
    (["resume", "runs/good", "--num-draws", "0"], 2, "Invalid value for '--num-draws'"),
    (["predict", "runs/good", "test.npz", "-o", "p.txt"], 2, "must end in .npz or .csv, got 'p.txt'"),
    (["predict", "runs/good", "test.npz", "-o", "nowhere/p.npz"], 2, "the folder 'nowhere' for --output does not exist"),
    ([*SAMPLE, "--set", "run.num_draws"], 1, "--set must look like section.key=value, got 'run.num_draws'"),
    ([*SAMPLE, "--set", "=3"], 1, "--set must look like section.key=value"),
    ([*SAMPLE, "--set", "run.num_draws=[1,"], 1, "--set run.num_draws: '[1,' is not a TOML value"),
    ([*SAMPLE, "--set", "run.num_draws=1\nrun.gap=2"], 1, "--set must give one value"),
    ([*SAMPLE, "--set", "run.gap.more=1"], 1, "--set run.gap.more: `gap` is a value, not a section"),
    ([*SAMPLE, "--set", "run.seed.more=1"], 1, "[run] `seed` must be an integer, got {'more': 1}"),
    # the file
    (["sample", "nowhere.toml"], 1, "there is no configuration 'nowhere.toml'. `adammcmc schema` prints one"),
    (["sample", "full"], 1, "'full' is a folder"),
    (["sample", "not.toml"], 1, "is not TOML: Expected ']'"),
    (["sample", "bytes.toml"], 1, "'bytes.toml' is not TOML: 'utf-8' codec"),
    # sections and keys
    ([*SAMPLE, "--set", "samplr.sigma=1"], 1, "[samplr] is unknown: did you mean `sampler`?"),
    ([*SAMPLE, "--set", "num_draws=1"], 1, "`num_draws` is unknown (or outside of its section)"),
    ([*SAMPLE, "--set", "run=1"], 1, "[run] must be a section with keys, got run = 1"),
    ([*SAMPLE, "--set", "sampler.sigm=1"], 1, "[sampler] `sigm` is unknown to AdamMCMC: did you mean `sigma`?"),
    ([*SAMPLE, "--set", "sampler.friction=1"], 1, "[sampler] `friction` is unknown to AdamMCMC"),
    ([*SAMPLE, "--set", "sampler.num_data=40"], 1, "[sampler] `num_data` is unknown to AdamMCMC"),
    ([*SAMPLE, "--set", "run.numdraws=1"], 1, "[run] `numdraws` is unknown: did you mean `num_draws`?"),
    ([*SAMPLE, "--set", "task=two-moons"], 1, "`task` includes a network, data and a loss: remove `task`, or [model] `name`"),
    ([*SAMPLE, "--set", "run.burn_in=3", "--set", "burn_in.num_steps=3"], 1, "both set the burn-in: remove one"),
    (["sample", "task.toml", "--set", "task=two-moon"], 1, "there is no task 'two-moon': did you mean `two-moons`?"),
    (["sample", "task.toml"], 1, "[model] `name` is missing. A configuration names a network, data and a loss, or a `task`"),
    (["sample", "good.toml", "--dry", "--debug"], 2, "No such option"),  # nothing of ours went wrong: no traceback
    ([*SAMPLE, "--set", "sampler={name='Underdamped'}", "--set", "run.burn_in=0"], 1, "`burn_in` is 0, and the sampler finds"),
    (
        [*SAMPLE, "--set", "sampler={name='ExactAdamMCMC',lr=1e-3,sigma=1e-3}", "--set", "acceptance.name=Sequential"],
        1,
        "ExactAdamMCMC has no option `acceptance`",
    ),
    # values
    ([*SAMPLE, "--set", "run.num_draws=0"], 1, "[run] `num_draws` must be an integer of at least 1, got 0"),
    ([*SAMPLE, "--set", "run.num_draws=many"], 1, "[run] `num_draws` must be an integer, got 'many'"),
    ([*SAMPLE, "--set", "run.num_draws=true"], 1, "[run] `num_draws` must be an integer, got True"),
    ([*SAMPLE, "--set", "run.num_draws=2.5"], 1, "[run] `num_draws` must be an integer, got 2.5"),
    ([*SAMPLE, "--set", "run.seed=-1"], 1, "[run] `seed` must be an integer of at least 0, got -1"),
    ([*SAMPLE, "--set", "run.keep=draw"], 1, '`keep` must be "draws" or "moments" or an integer, got \'draw\''),
    ([*SAMPLE, "--set", "run.dtype=float8"], 1, "got 'float8'"),
    ([*SAMPLE, "--set", "run.num_draws=2024-01-01"], 1, "[run] `num_draws` must be an integer"),
    ([*SAMPLE, "--set", "sampler.sigma=nan"], 1, "[sampler] `sigma` must be a number"),
    ([*SAMPLE, "--set", "sampler.sigma=-0.1"], 1, "`sigma` must not be negative, and must be finite, got -0.1"),
    ([*SAMPLE, "--set", "sampler.sigma=0"], 1, "sigma = 0 needs `acceptance=AlwaysAccept()`"),
    ([*SAMPLE, "--set", "sampler.betas=[0.9]"], 1, "[sampler] `betas` must be a list of 2 numbers, got [0.9]"),
    ([*SAMPLE, "--set", "sampler.betas=[0.9, 1.5]"], 1, "betas"),
    ([*SAMPLE, "--set", "sampler.sigma=[0.1, 0.2]"], 1, "`sigma` has 2 values, and `num_chains` is 1: give one for each chain"),
    ([*SAMPLE, "--set", "sampler.batch_norm=batches"], 1, "Did you mean `batch`?"),
    ([*SAMPLE, "--set", "sampler.name=AdamMCM"], 1, "[sampler] there is no 'AdamMCM': did you mean `AdamMCMC`?"),
    ([*SAMPLE, "--set", "sampler.name=OptimizerMCMC"], 1, "[sampler] there is no 'OptimizerMCMC'"),
    ([*SAMPLE, "--set", "sampler.name=3"], 1, "[sampler] `name` must be one of Underdamped, "),
    ([*SAMPLE, "--set", "sampler.inverse_temperature=0"], 1, "`inverse_temperature` must be positive"),
    ([*SAMPLE, "--set", "prior.scale=-1"], 1, "[prior] `scale` must be positive and finite, got -1"),
    ([*SAMPLE, "--set", "prior.name=Laplace"], 1, "[prior] there is no 'Laplace'"),
    ([*SAMPLE, "--set", "acceptance.name=Fulldata"], 1, "[acceptance] there is no 'Fulldata': did you mean `FullData`?"),
    ([*SAMPLE, "--set", "acceptance.chunk_size=3"], 1, "[acceptance] `name` must be one of AlwaysAccept, Barker, Conf"),
    ([*SAMPLE, "--set", "run={}", "--set", "burn_in.target_acceptance=2"], 1, "[burn_in] `target_acceptance` must lie"),
    ([*SAMPLE, "--set", "loss.likelihood=gauss"], 1, "[loss] there is no likelihood 'gauss': did you mean `gaussian`?"),
    # the network
    ([*SAMPLE, "--set", "model.name=shell_things"], 1, "[model] `name` must look like module:attribute, got 'shell_things'"),
    ([*SAMPLE, "--set", "model.name=shell_thing:make"], 1, "[model] `name`: there is no module 'shell_thing' in"),
    ([*SAMPLE, "--set", "model.name=shell_things:mak"], 1, "'shell_things' has no 'mak': did you mean `make`?"),
    ([*SAMPLE, "--set", "model.name=shell_broken:make"], 1, "importing 'shell_broken' failed: ZeroDivisionError"),
    ([*SAMPLE, "--set", "model.name=shell_needy:make"], 1, "importing 'shell_needy' failed: No module named 'a_module_that"),
    ([*SAMPLE, "--set", "model.name=shell_exits:make"], 1, "importing 'shell_exits' failed: SystemExit: 3"),
    ([*SAMPLE, "--set", "model.name=shell_things:number"], 1, "must be a network or make one, got int"),
    ([*SAMPLE, "--set", "model.name=shell_things:make_nothing", "--set", "model.arguments={}"], 1, "must make a torch.nn"),
    ([*SAMPLE, "--set", "model.name=shell_things:fail", "--set", "model.arguments={}"], 1, "fail() failed: RuntimeError"),
    ([*SAMPLE, "--set", "model.arguments.widht=3"], 1, "TypeError: make() got an unexpected keyword argument 'widht'"),
    ([*SAMPLE, "--set", "model.name=shell_things:network"], 1, "shell_things:network is a network already, and takes none"),
    ([*SAMPLE, "--set", "model.name=shell_things:frozen", "--set", "model.arguments={}"], 1, "there is nothing to sample"),
    ([*SAMPLE, "--set", "model.arguments.classes=1"], 1, "the loss of a batch could not be computed"),
    ([*SAMPLE, "--set", "model.device=gpu"], 1, "[model] `device`: the network cannot be moved to 'gpu'"),
    ([*SAMPLE, "--set", "model.mode=test"], 1, '[model] `mode` must be "train" or "eval", got \'test\''),
    ([*SAMPLE, "--set", "model.weights=none.pt"], 1, "[model] `weights`: there is no file"),
    ([*SAMPLE, "--set", "model.weights=other.pt"], 1, "cannot be loaded: Error(s) in loading state_dict for Sequential"),
    ([*SAMPLE, "--set", "model.weights=damaged.pt"], 1, "[model] `weights`: "),
    ([*SAMPLE, "--set", "model.weights=damaged.safetensors"], 1, "damaged.safetensors' cannot be loaded"),
    # the data
    ([*SAMPLE, "--set", "data.train=none.npz"], 1, "[data] `train`: there is no file"),
    ([*SAMPLE, "--set", "data.train=a_file"], 1, "[data] `train` must be .npz, .npy or module:attribute, got 'a_file'"),
    ([*SAMPLE, "--set", "data.train=[]"], 1, "[data] `train` names no file"),
    ([*SAMPLE, "--set", "data.train=damaged.npz"], 1, "[data] `train`: "),
    ([*SAMPLE, "--set", "data.train=damaged.npy"], 1, "[data] `train`: "),
    ([*SAMPLE, "--set", "data.train=named.npz"], 1, "it has arrays a, b: select them, targets last, with [data] keys"),
    ([*SAMPLE, "--set", 'data.keys=["inputs", "target"]'], 1, "there is no array 'target' (`keys`): did you mean `targets`?"),
    ([*SAMPLE, "--set", "data.train=words.npz"], 1, "words.npz' holds <U1, not numbers"),
    ([*SAMPLE, "--set", "data.train=objects.npz"], 1, "array 'x' holds Python objects, which are not read"),
    ([*SAMPLE, "--set", "data.train=empty.npz"], 1, "the file is empty"),
    ([*SAMPLE, "--set", "data.train=one.npy"], 1, "holds one number, not an array with a row for each example"),
    ([*SAMPLE, "--set", 'data.train=["wide.npy", "y.npy"]'], 1, "must have one length"),
    ([*SAMPLE, "--set", 'data.train=["y.npy", "x.npy"]'], 1, "the loss of a batch could not be computed"),
    ([*SAMPLE, "--set", "data.train=shell_things:empty"], 1, "the data set is empty"),
    ([*SAMPLE, "--set", "data.train=shell_things:of_two_lengths"], 1, "one row for each example, got 5, 4"),
    ([*SAMPLE, "--set", "data.train=shell_things:number"], 1, "the data must be tensors"),
    ([*SAMPLE, "--set", "data.train=shell_things:not_a_number"], 1, "the loss of the first batch is nan"),
    ([*SAMPLE, "--set", "data.arguments.number=3"], 1, "`arguments` are for a class or function of a module, not for files"),
    ([*SAMPLE, "--set", "data.num_data=41"], 1, "`num_data` is 41, but the data set holds 40 examples"),
    ([*SAMPLE, "--set", "run.batch_size=0"], 1, "`batch_size` must be a positive integer, got 0"),
    # the loss
    ([*SAMPLE, "--set", "loss.name=crossentropy"], 1, "[loss] there is no 'crossentropy': did you mean `cross_entropy`?"),
    ([*SAMPLE, "--set", "loss.name=shell_things:number"], 1, "[loss] `name`: shell_things:number must be a function, got int"),
    ([*SAMPLE, "--set", "loss.name=shell_things:total"], 1, "looks like a sum"),
    ([*SAMPLE, "--set", "loss.arguments.smoothing=1"], 1, "unexpected keyword argument 'smoothing'"),
    ([*SAMPLE, "--set", "loss.name=GaussianNLL", "--set", "loss.arguments.noise=-1"], 1, "`noise` must be a positive"),
    # samplers that do not fit
    ([*SAMPLE, "--set", "sampler.name=shell_things:no_sampler"], 1, "`sampler` must make a sampler of adammcmc"),
    (["sample", "exact.toml", "-o", "new", "--set", "run.batch_size=10"], 1, "ExactAdamMCMC needs fixed_data=True"),
    # where it goes
    (["sample", "good.toml"], 1, "'runs/good' already holds a run: `adammcmc resume runs/good --trust-code` continues it"),
    (["sample", "good.toml", "-o", "full"], 1, "is not empty and holds no run (it has 'notes.txt')"),
    (["sample", "good.toml", "-o", "a_file"], 1, "'a_file' is a file: the draws need a folder"),
    ([*SAMPLE, "--set", "run.num_draws=1000000000000"], 1, "Keep fewer draws"),
    # runs
    (["resume", "nowhere"], 1, "nowhere' does not exist"),
    (["resume", "full"], 1, "holds no run of adammcmc (it has no run.json)"),
    (["resume", "runs/good/chain-0"], 1, "the run is 'runs/good'"),
    (["diagnose", "a_file"], 1, "a_file"),
    (["report", "runs/no_manifest"], 1, "holds no run of adammcmc"),
    (["report", "runs/no_draws"], 1, "has no draws yet"),
    (["report", "runs/good", "-o", "r.pdf"], 2, "must end in .html, got 'r.pdf'"),
    (["report", "runs/good", "-o", "nowhere/r.html"], 2, "for --output does not exist"),
    (["report", "runs/good", "wide.npy"], 1, "mat1 and mat2 shapes cannot be multiplied"),
    (["diagnose", "runs/no_manifest"], 1, "holds no run of adammcmc"),
    (["diagnose", "runs/not_json"], 1, "is not JSON"),
    (["diagnose", "runs/newer"], 1, "has format 99 of a newer version of adammcmc"),
    (["diagnose", "runs/python"], 1, "was not made by `adammcmc sample`, so that it does not name its network"),
    (["diagnose", "runs/python", "--config", "task.toml"], 1, "[model] `name` is missing"),
    (["diagnose", "runs/python", "--config", "exact.toml"], 1, "is of another model"),
    (["diagnose", "runs/half_config"], 1, "run.json' is damaged: its `config` was not written by `adammcmc sample`. Give --"),
    (["predict", "runs/other_config"], 1, "run.json' is damaged: its `config` was not written by"),
    (["report", "runs/odd_changes"], 1, "run.json' is damaged: its `config` was not written by"),
    (["resume", "runs/no_configuration"], 1, "run.json' is damaged: it has no 'configuration'"),
    (["resume", "runs/half_configuration"], 1, "run.json' is damaged: it has no 'num_draws' in configuration"),
    (["diagnose", "runs/no_model"], 1, "run.json' is damaged: it has no 'model'"),
    (["diagnose", "runs/edited"], 1, "run.json' is damaged, or was edited by hand: its content does not match its checksum"),
    (["check", "nowhere"], 1, "nowhere' does not exist"),
    (["diagnose", "runs/no_draws"], 1, "has no draws yet: `adammcmc resume runs/no_draws` continues it"),
    (["resume", "runs/no_draws"], 1, "lines are missing"),
    (["resume", "runs/good", "--num-draws", "3"], 1, "the number may grow, not shrink"),
    (["resume", "runs/good", "--config", "exact.toml"], 1, "is of another model"),
    # prediction
    (["predict", "runs/good", "nowhere.npz"], 1, "DATA: there is no file"),
    (["predict", "runs/good", "wide.npy"], 1, "mat1 and mat2 shapes cannot be multiplied"),
    (["predict", "runs/good", "named.npz"], 1, "it has arrays a, b"),
    (["predict", "runs/good", "a_file"], 1, "DATA must be .npz, .npy or module:attribute, got 'a_file'"),
    (["diagnose", "runs/good", "wide.npy"], 1, "mat1 and mat2 shapes cannot be multiplied"),
    (["diagnose", "runs/good", "-o", "d.txt"], 2, "must end in .json, got 'd.txt'"),
    (["predict", "runs/no_test"], 2, "the configuration of the run has no held-out data ([data] `test`): give DATA"),
    (["predict", "runs/moments", "test.npz"], 1, "there are no draws to predict with"),
]  # fmt: skip


@pytest.fixture(scope="module")
def others(home: Path) -> None:
    """Configurations that only bad input needs."""
    (home / "task.toml").write_text("")
    (home / "exact.toml").write_text(
        (home / "good.toml").read_text().replace("AdamMCMC", "ExactAdamMCMC").replace("width = 3", "width = 5")
    )


def test_the_table_is_long_enough() -> None:
    assert len(BAD) >= 40


@pytest.mark.parametrize(("words", "code", "message"), BAD, ids=[" ".join(words)[-60:] for words, _, _ in BAD])
@pytest.mark.usefixtures("others")
def test_bad_input_is_answered_in_one_line(words: list[str], code: int, message: str, home: Path) -> None:
    before = listing(home)
    answer = ask(*words)
    assert message in answer.err
    assert answer.code == code
    assert answer.err.startswith("adammcmc: ")
    assert answer.err.count("\n") == 1
    assert "Traceback" not in answer.err
    assert answer.out == ""
    left = {name for name in set(listing(home)) - set(before) if Path(name).name != "lock" and not Path(name).is_dir()}
    assert not left, left
    shutil.rmtree(home / "new", ignore_errors=True)


# --- what comes from others -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["resume", "predict", "diagnose", "report"])
def test_a_run_imports_nothing_unless_it_is_trusted(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.delenv("ADAMMCMC_TRUST_CODE")
    monkeypatch.delitem(sys.modules, "shell_things", raising=False)
    before, path = listing(home), list(sys.path)
    answer = ask(command, "runs/good")
    assert answer.code == 1
    assert answer.err == (
        f"adammcmc: the run in 'runs/good' imports code: shell_things:make, from '{home}' or an installed package. Add "
        "--trust-code if you trust the author of the run, or --config with a TOML file of yours. (--debug shows where)\n"
    )
    assert answer.out == ""
    assert "shell_things" not in sys.modules
    assert sys.path == path
    assert listing(home) == before
    page = ["-o", tmp_path / "page.html"] if command == "report" else []
    assert ask(command, "runs/good", "--trust-code", *page).code == 0
    assert ask(command, "runs/good", "--config", "good.toml", *page).code == 0


def test_a_run_of_a_bundled_task_needs_no_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ADAMMCMC_TRUST_CODE", raising=False)
    (tmp_path / "moons.toml").write_text(
        'task = "two-moons"\n[sampler]\nname = "AdamMCMC"\nsigma = 0.1\n[training]\nsteps = 0\n'
        "[run]\nnum_draws = 2\ngap = 1\nburn_in = 1\n"
    )
    answer = ask("sample", tmp_path / "moons.toml")
    assert answer.code == 0, answer.err
    run = tmp_path / "runs" / "moons"
    assert f"Next: adammcmc diagnose {run}, adammcmc report {run}, adammcmc predict {run}\n" in answer.out
    assert ask("predict", run).code == 0
    assert ask("resume", run, "--num-draws", 3).code == 0


def test_the_next_commands_are_said_with_the_trust_that_they_need(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    answer = ask("sample", "good.toml", "-o", run)
    assert f"Next: adammcmc diagnose {run} --trust-code, adammcmc report {run} --trust-code, " in answer.out


ESCAPES = "a\x1b]0;title\x07\x1b[2J\x9b31m\u202eb\u2066"
SHOWN = r"a\x1b]0;title\x07\x1b[2J\x9b31m\u202eb\u2066"


def test_a_terminal_is_given_no_escape_sequences(home: Path, tmp_path: Path) -> None:
    """Neither in what is printed nor in errors and warnings."""
    answer = ask("predict", "runs/good", "-o", tmp_path / f"{ESCAPES}.csv", "--rows", 0)
    assert answer.out.endswith(f"{SHOWN}.csv\n")
    for words in (["predict", "runs/good", f"{ESCAPES}.npz"], ["diagnose", ESCAPES], [ESCAPES], ["jets", "convert", ESCAPES]):
        said = ask(*words, *(["-o", "b.npz"] if "jets" in words else []))
        assert said.code in (1, 2)
        assert SHOWN in said.err
        assert not set(said.err) & set("\x1b\x07\x9b\u202e\u2066")


def test_debug_shows_the_traceback_wherever_it_stands(home: Path) -> None:
    for words in (["--debug", "diagnose", "nowhere"], ["diagnose", "--debug", "nowhere"], ["diagnose", "nowhere", "--debug"]):
        with pytest.raises(adammcmc.StoreMismatch, match="does not exist"):
            ask(*words)
    assert ask("diagnose", "--", "--debug").err.startswith("adammcmc: '--debug' does not exist")


def test_a_warning_is_one_line(home: Path, tmp_path: Path) -> None:
    changes = ["burn_in.num_steps=3", "run={num_draws=1, gap=1}", "sampler.sigma=10.0"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        answer = ask("sample", "good.toml", "-o", tmp_path / "run", *(word for change in changes for word in ("--set", change)))
    assert answer.code == 0
    assert answer.err.startswith("adammcmc: warning: burn-in reached an acceptance of")
    assert answer.err.count("\n") == 1
