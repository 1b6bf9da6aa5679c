"""Every figure at its smallest size, from the command to the picture; and the results that are kept."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from replication.__main__ import main
from replication.results import FIGURES, figure_module, read_result, replicate
from replication.settings import PRESETS

KEPT = Path(__file__).parents[2] / "replication" / "results" / "h200"
OF_JETS = [name for name in FIGURES if name not in ("headline", "theorems")]  # which have tests of their own


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the figures, and what the command printed."""
    folder = tmp_path_factory.mktemp("replication")
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.filterwarnings("ignore", "burn-in reached")  # of the exact chains, which are far too short here
        assert main([*OF_JETS, "--preset", "smoke", "--output", str(folder)]) == 0
    return folder, printed.getvalue()


def test_the_command_writes_all_figures(made: tuple[Path, str]) -> None:
    folder, printed = made
    for name in OF_JETS:
        assert str(folder / name) in printed
        document = read_result(folder / f"{name}.json")
        assert document["command"] == f"python -m replication {name} --preset smoke"
        assert document["trials"]["number"] > 5
        assert "| verdict |" in (folder / f"{name}.md").read_text()
        image = pyplot.imread(folder / f"{name}.png")
        assert min(image.shape[:2]) > 200
        assert image[..., :3].std() > 0.05, "something is drawn"


def test_a_second_call_runs_nothing(made: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = made
    monkeypatch.setattr("replication.work.run_trial", lambda *args: pytest.fail("a trial was run again"))
    before = read_result(folder / "fig2b.json")
    after = replicate("fig2b", PRESETS["smoke"], folder, progress=False)
    assert json.loads(json.dumps(after))["result"] == before["result"]


def test_workers_share_the_trials(made: tuple[Path, str], tmp_path: Path) -> None:
    """Some are missing: they are made again, by whom does not matter. (A worker that dies would warn.)"""
    folder, _ = made
    shutil.copytree(folder / "trials", tmp_path / "trials")
    for path in sorted((tmp_path / "trials").glob("printed-*.json"))[:4]:
        path.unlink()
    document = replicate("fig2b", PRESETS["smoke"], tmp_path, workers=2, progress=False)
    again, before = (_without_seconds(x) for x in (document["result"], read_result(folder / "fig2b.json")["result"]))
    assert again == before


def _without_seconds(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _without_seconds(value) for key, value in x.items() if key != "seconds"}
    return [_without_seconds(value) for value in x] if isinstance(x, list) else x


@pytest.mark.parametrize(("words", "says"), [
    (["fig5"], "unknown figure 'fig5'. Known: headline, fig1"),
    (["fig1", "--preset", "large"], "unknown preset 'large'. Known: smoke, small, h200, paper"),
    (["fig1", "--preset", "h200"], "needs 26,000 top and QCD jets"),
    (["fig1", "--jets", "nowhere"], "'nowhere' has no train: make it with `adammcmc jets generate nowhere/train --jets"),
    (["fig1", "--output", __file__], "is a file, and the results need a folder"),
])  # fmt: skip
def test_mistakes_are_reported_in_one_line(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(tmp_path), *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("words", "says"), [
    ([], "name a figure, such as fig1, or all"),
    (["fig1", "--workers", "0"], "--workers must be at least 1, got 0"),
])  # fmt: skip
def test_missing_and_wrong_options(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert says in capsys.readouterr().err


def test_help_and_list_name_every_figure_and_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    for text in (listed, capsys.readouterr().out):
        lines = [line.split() for line in text.splitlines()]
        names = [words[0] for words in lines if words]
        assert all(names.count(name) == 1 for name in (*FIGURES, *PRESETS))


def test_a_stopped_command_tells_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("replication.work.run_trial", stopped)
    assert main(["fig1", "--output", str(tmp_path)]) == 130
    assert "Run the same command again to continue" in capsys.readouterr().err


def test_it_is_not_in_the_wheel() -> None:
    """Nor does the installed library import it, or have a command for it."""
    library = KEPT.parents[2] / "src" / "adammcmc"
    assert not (library / "replication").exists()
    assert not [path for path in library.rglob("*.py") if re.search(r"(import|from) replication", path.read_text())]


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIGURES)
def test_kept_results_draw_and_say_what_they_hold(name: str) -> None:
    document = read_result(KEPT / f"{name}.json")
    assert document["preset"]["name"] == "h200"
    assert (KEPT / f"{name}.json").stat().st_size < 300_000
    module = figure_module(name)
    figure = module.draw(document["result"])
    assert figure.axes
    pyplot.close(figure)
    assert module.section(document["result"]).count("\n") > 5


def _rows(name: str, part: str, **wanted: Any) -> list[dict[str, Any]]:
    found = read_result(KEPT / f"{name}.json")["result"][part]
    return [row for row in found if all(row["setting"][key] == value for key, value in wanted.items())]


def test_the_released_spread_follows_sigma_and_not_lambda() -> None:
    """The paper's two observations, in the kept runs of the released proposal: what the page says of them."""
    by_sigma = {r["setting"]["sigma"]: r["mean_spread"] for r in _rows("fig3", "scan", method="released")}
    assert by_sigma[10.0][0] > 4 * by_sigma[0.2][0]
    by_lambda = [r["mean_spread"][0] for r in _rows("lambda", "scan", method="released")]
    assert len(by_lambda) >= 5
    assert max(by_lambda) < 1.15 * min(by_lambda)


def test_the_released_acceptance_is_the_constant_of_its_mismatch() -> None:
    """exp(-2 / sigma_along^2), whatever the loss does, at any sigma."""
    rates = [r["acceptance"][0] for r in _rows("fig2b", "with", method="released")]
    assert len(rates) >= 5
    assert all(abs(rate - 0.947) < 0.003 for rate in rates)
