"""`adammcmc jets ...`: from files to figures, help that teaches, errors of one line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer.main
from typer.testing import CliRunner, Result

from adammcmc.cli.commands import app
from adammcmc.cli.options import options_of
from adammcmc.jets import bundled, read_jets, write_jets
from adammcmc.jets.metrics import Measured, accuracy, read_scores
from adammcmc.jets.settings import Sampling, Training
from adammcmc.jets.tagger import Tagger

# so short a chain says that it has not arrived
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def run(*words: object) -> Result:
    """The command, which must succeed."""
    result = CliRunner().invoke(app, ["jets", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def plain(text: str) -> str:
    """Without colours, frames and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with jets and a tagger, trained and sampled from the shell: home/jets.npz, home/run."""
    home = tmp_path_factory.mktemp("jets")
    converted = run("convert", bundled("jets"), "-o", home / "jets.npz", "--max-jets", 300)
    assert "300 (" in converted.output
    assert "bytes per jet" in converted.output
    trained = run(
        "train", home / "jets.npz", "-r", home / "run", "--network", "lite", "--epochs", 2, "--batch-size", 32,
        "--held-out", 0.2, "--device", "cpu",
    )  # fmt: skip
    assert "240" in trained.output
    for epoch in (1, 2):
        line = rf"epoch {epoch}: mean loss 0\.\d+, on 60 held-out jets: accuracy 0\.\d+ \+- 0\.\d+, AUC 0\.\d+ \+- 0\.\d+"
        assert re.search(line, trained.output)
    assert f"adammcmc jets sample {home / 'jets.npz'} --run {home / 'run'}" in trained.output
    sampled = run(
        "sample", home / "jets.npz", "-r", home / "run", "--batch-size", 32, "--burn-in", 3, "--gap", 2, "--num-draws", 4,
        "--device", "cpu",
    )  # fmt: skip
    assert "n = 240" in sampled.output  # not the held-out jets
    assert (home / "run" / "posterior").is_dir()
    return home


# --- the road ---------------------------------------------------------------------------------------------------------


def test_a_tagger_is_evaluated_with_its_figures(home: Path) -> None:
    folder = home / "run"
    arguments = ("evaluate", home / "jets.npz", "-r", folder, "--held-out", "--device", "cpu", "--max-jets", 300)
    result = run(*arguments, "--others", bundled("others"))
    assert re.search(r"60 jets: accuracy 0\.\d+ \+- 0\.\d+, AUC 0\.\d+ \+- 0\.\d+, background rejection", result.output)
    for word in ("n = 240", "top, right", "qcd, wrong", "spread", "tagging.json, tagging.png, others.csv, others.png"):
        assert word in result.output
    assert re.search(r"trained network alone: accuracy 0\.\d+", result.output)
    assert re.search(r"h_ww .* mutual information 0\.\d+ .*AUROC 0\.\d+", result.output)
    written = json.loads((folder / "tagging.json").read_text())
    assert written["jets"] == 60
    assert f"60 jets: accuracy {Measured(**written['accuracy'])}, AUC {Measured(**written['auc'])}, " in result.output
    assert written["groups"]["top, right"]["jets"] > 0
    assert is_picture(folder / "tagging.png")
    assert is_picture(folder / "others.png")
    table = read_scores(folder / "scores.csv")
    assert len(table["score"]) == 60
    test = Training(held_out=0.2).split(read_jets(home / "jets.npz"))[1]  # those that were not trained on
    torch.testing.assert_close(table["pt"], test.jet[:, 0].double(), atol=0, rtol=1e-6)
    torch.testing.assert_close(read_jets(home / "jets.npz").jet[table["row"].long(), 0], test.jet[:, 0])
    assert table["trained"].isfinite().all()
    assert accuracy(table["score"], table["kind"]).value == pytest.approx(written["accuracy"]["value"], abs=1e-4)
    assert len(read_scores(folder / "others.csv")["score"]) == 300


def test_the_split_is_the_same_for_the_same_jets(home: Path) -> None:
    jets = read_jets(home / "jets.npz")
    train, test = Training(held_out=0.2).split(jets)
    torch.manual_seed(1)
    again_train, again_test = Training(held_out=0.2).split(jets)
    assert (len(train), len(test)) == (240, 60)
    assert torch.equal(train.jet, again_train.jet)
    assert torch.equal(test.particles, again_test.particles)
    assert sorted(torch.cat([train.jet, test.jet])[:, 0].tolist()) == sorted(jets.jet[:, 0].tolist())


def test_all_jets_of_other_files_are_evaluated(home: Path) -> None:
    result = run("evaluate", home / "jets.npz", "-r", home / "run", "--max-jets", 100, "--device", "cpu")
    assert re.search(r"100 jets: accuracy", result.output)
    assert "others" not in result.output.splitlines()[-1]


def test_training_goes_on_with_resume(home: Path, tmp_path: Path) -> None:
    files = ("train", home / "jets.npz", "-r", tmp_path, "--network", "lite", "--batch-size", 100, "--device", "cpu")
    run(*files, "--epochs", 1, "--held-out", 0)
    longer = run(*files, "--epochs", 2, "--held-out", 0, "--resume")
    assert "epoch 2: " in longer.output
    assert "epoch 1: " not in longer.output
    assert "held-out" not in longer.output
    assert Tagger.load(tmp_path, device="cpu").epochs == 2


def test_sampling_goes_on_with_resume(home: Path, tmp_path: Path) -> None:
    write_jets(tmp_path / "few.npz", read_jets(home / "jets.npz")[:60])
    run("train", tmp_path / "few.npz", "-r", tmp_path, "--network", "lite", "--epochs", 1, "--device", "cpu")
    for sampler in ("underdamped", "as-released"):
        chain = ("sample", tmp_path / "few.npz", "-r", tmp_path / sampler, "--sampler", sampler, "--burn-in", 2, "--gap", 2)
        chain += ("--num-chains", 1)
        Tagger.load(tmp_path).save(tmp_path / sampler)
        run(*chain, "--num-draws", 2, "--device", "cpu")
        run(*chain, "--num-draws", 3, "--device", "cpu", "--resume")
        posterior = Tagger.load(tmp_path / sampler).posterior(tmp_path / sampler / "posterior")
        assert len(posterior) == 3
        assert ("exact" in posterior.target) == (sampler == "underdamped")


def test_converted_jets_are_the_same_jets(tmp_path: Path) -> None:
    run("convert", bundled("others"), "-o", tmp_path / "a.npz", "--max-jets", 40)
    run("convert", bundled("others"), "-o", tmp_path / "b.npz", "--max-jets", 40, "--shuffle", 1)
    original, a, b = read_jets(bundled("others"), 40), read_jets(tmp_path / "a.npz"), read_jets(tmp_path / "b.npz")
    assert torch.equal(a.particles, original.particles)
    assert torch.equal(a.kind, original.kind)
    assert torch.equal(b.jet, original.shuffled(1).jet)
    assert not torch.equal(b.jet, original.jet)


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["generate", "convert", "train", "sample", "evaluate"]),
        (["generate"], ["Pythia", "--jets", "--kinds", "--pt", "--flat", "--workers", "--seed", "h_bb"]),
        (["convert"], ["compact", "--output", "--max-jets", "--shuffle", ".parquet"]),
        (["train"], ["Adam", "--run", "--network", "366,160", "--epochs", "--lr", "--held-out", "--resume", "--precision"]),
        (
            ["sample"],
            ["posterior", "--sampler", "Algorithm 1", "--sigma", "--gap", "--num-draws", "--inverse-temperature", "--resume"],
        ),
        (["evaluate"], ["AUC", "--run", "--held-out", "--others", "scores.csv", "tagging.png", "others.png"]),
    ],
)
def test_help_teaches(command: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(app, ["jets", *command, "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == 0
    for word in words:
        assert word in plain(result.output), word


@pytest.mark.parametrize(("command", "settings"), [("train", Training), ("sample", Sampling)])
def test_every_setting_is_an_option(command: str, settings: type) -> None:
    """With the name of its field, and the text of its docstring."""
    jets = typer.main.get_command(app).commands["jets"]  # type: ignore[attr-defined]
    options = {option: p.help for p in jets.commands[command].params for option in p.opts}
    for field in options_of(settings):
        assert options["--" + field.name.replace("_", "-")] == field.help


# --- what is wrong --------------------------------------------------------------------------------------------------------


def test_a_tagger_is_not_overwritten(home: Path) -> None:
    before = (home / "run" / "tagger.safetensors").read_bytes()
    result = CliRunner().invoke(app, ["jets", "train", str(home / "jets.npz"), "-r", str(home / "run")])
    assert result.exit_code == 2
    assert "already holds a tagger: choose another folder, or --resume" in plain(result.output)
    assert (home / "run" / "tagger.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convert", "nowhere.npz", "-o", "a.npz"], "there is no file 'nowhere.npz'"),
        (["train", "nowhere.npz", "-r", "run"], "there is no file 'nowhere.npz'"),
        (["sample", "nowhere.npz", "-r", "nowhere"], "there is no tagger in 'nowhere'"),
        (["evaluate", "nowhere.npz", "-r", "nowhere"], "there is no tagger in 'nowhere'"),
        (["convert", str(bundled("jets")), "-o", "a.txt"], r"written to \.npz or \.parquet, got 'a\.txt'"),
    ],
)
def test_what_is_not_there_is_told_of(words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((OSError, ValueError), match=message):
        CliRunner().invoke(app, ["jets", *words], catch_exceptions=False)
    assert not list(tmp_path.iterdir())


def test_a_tagger_that_was_not_sampled_yet_is_told_of(home: Path, tmp_path: Path) -> None:
    Tagger.load(home / "run", device="cpu").save(tmp_path)
    result = CliRunner().invoke(app, ["jets", "evaluate", str(home / "jets.npz"), "-r", str(tmp_path)])
    assert result.exit_code == 2
    assert "has no posterior yet: run `adammcmc jets sample" in plain(result.output)


@pytest.mark.parametrize("command", ["train", "sample", "evaluate"])
def test_jets_of_other_kinds_alone_are_told_of(command: str, home: Path, tmp_path: Path) -> None:
    write_jets(tmp_path / "w.npz", read_jets(bundled("others")).of_kind("w"))
    folder = tmp_path / "run" if command == "train" else home / "run"
    with pytest.raises(ValueError, match="top and QCD jets"):
        CliRunner().invoke(app, ["jets", command, str(tmp_path / "w.npz"), "-r", str(folder)], catch_exceptions=False)


def test_nothing_held_out_is_nothing_to_evaluate(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "run", tmp_path / "run")
    tagger = Tagger.load(tmp_path / "run", device="cpu")
    tagger.training = replace(tagger.training, held_out=0.0)
    tagger.save(tmp_path / "run")
    words = ["jets", "evaluate", str(home / "jets.npz"), "-r", str(tmp_path / "run"), "--held-out"]
    with pytest.raises(ValueError, match="trained on all jets: there are no held-out jets"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_another_training_cannot_be_gone_on_with(home: Path) -> None:
    words = f"--network particlenet --epochs 3 --batch-size 32 --held-out 0.2 --device cpu --resume --run {home / 'run'}"
    result = CliRunner().invoke(app, ["jets", "train", str(home / "jets.npz"), *words.split()])
    assert result.exit_code == 2
    assert "was trained with network = lite" in " ".join(plain(result.output).replace("│", " ").split())


def test_held_out_jets_of_one_kind_do_not_stop_the_training(home: Path, tmp_path: Path) -> None:
    """One jet of 100 is held out: it has no AUC, and needs none."""
    words = f"--network lite --epochs 2 --batch-size 50 --max-jets 100 --held-out 0.01 --device cpu --run {tmp_path / 'run'}"
    result = CliRunner().invoke(app, ["jets", "train", str(home / "jets.npz"), *words.split()])
    assert result.exception is None, repr(result.exception)
    assert "epoch 2: mean loss" in result.output


@pytest.mark.parametrize(
    "words",
    [
        ["train", "a.npz", "-r", "run", "--network", "resnet"],
        ["train", "a.npz", "-r", "run", "--epochs", "0"],
        ["sample", "a.npz", "-r", "run", "--sampler", "gibbs"],
        ["train", "a.npz", "-r", "run", "--held-out", "1.5"],
        ["evaluate", "a.npz"],
    ],
)
def test_wrong_options_are_told_of_before_the_work(words: list[str]) -> None:
    result = CliRunner().invoke(app, ["jets", *words])
    assert result.exit_code == 2
    name = words[-2].strip("-").replace("-", "_")
    assert name in plain(result.output) or "--run" in plain(result.output)


def shell(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "adammcmc.cli", *words], capture_output=True, text=True, check=False)


def test_an_error_is_one_line_and_debug_shows_where_it_came_from() -> None:
    command = ("jets", "evaluate", "nowhere.npz", "-r", "nowhere")
    result = shell(*command)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("adammcmc: there is no tagger in 'nowhere'")
    assert result.stderr.count("\n") == 1
    result = shell("--debug", *command)
    assert result.returncode == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert "FileNotFoundError: there is no tagger in 'nowhere'" in result.stderr


def test_a_loss_that_runs_away_is_one_line_too(home: Path, tmp_path: Path) -> None:
    result = shell(
        "jets", "train", str(home / "jets.npz"), "-r", str(tmp_path), "--network", "lite", "--max-jets", "64", "--lr", "1e30",
        "--epochs", "1", "--batch-size", "16", "--device", "cpu",
    )  # fmt: skip
    assert result.returncode == 1
    assert "lower `lr`" in result.stderr
    assert "Traceback" not in result.stderr


# --- jets of the training and others --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "--held-out", "--max-jets", "200"],
        ["sample", "--max-jets", "200", "--resume"],
        [
            "train",
            "--resume",
            "--network",
            "lite",
            "--epochs",
            "3",
            "--batch-size",
            "32",
            "--held-out",
            "0.2",
            "--max-jets",
            "200",
        ],
    ],
    ids=lambda words: words[0],
)
def test_other_jets_are_not_taken_for_those_of_the_training(words: list[str], home: Path) -> None:
    """What is held out of 200 jets is, mostly, what was trained on of 300."""
    command, *options = words
    line = ["jets", command, str(home / "jets.npz"), "-r", str(home / "run"), "--device", "cpu", *options]
    with pytest.raises(ValueError, match=r"not the jets that the tagger .* was trained on"):
        CliRunner().invoke(app, line, catch_exceptions=False)


def test_jets_of_the_training_are_no_test(home: Path) -> None:
    with pytest.raises(ValueError, match="was trained on these jets: use --held-out, or other files"):
        CliRunner().invoke(app, ["jets", "evaluate", str(home / "jets.npz"), "-r", str(home / "run")], catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sample"], "already holds draws: --resume continues"),
        (
            ["train", "--resume", "--network", "lite", "--epochs", "3", "--batch-size", "32", "--held-out", "0.2"],
            "holds draws, which more training would invalidate",
        ),
    ],
    ids=["sample", "train"],
)
def test_draws_are_not_lost_or_left_behind(words: list[str], said: str, home: Path) -> None:
    command, *options = words
    result = CliRunner().invoke(
        app, ["jets", command, str(home / "jets.npz"), "-r", str(home / "run"), "--device", "cpu", *options]
    )
    assert result.exit_code == 2
    assert said in plain(result.output)


def test_few_steps_are_told_of(home: Path, tmp_path: Path) -> None:
    trained = run(
        "train", "bundled:others", "--max-jets", 600, "-r", tmp_path, "--network", "lite", "--epochs", 1, "--device", "cpu"
    )
    assert "1 steps of 1" in trained.output
    assert "so few steps hardly train the network" in trained.output
