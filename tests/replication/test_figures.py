"""Every figure at its smallest size, from the command to the picture; and the results that are kept."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from replication.results import FIGURES, figure_module, read_result, replicate
from replication.settings import PRESETS
from tests.shell import Answer, ask

KEPT = Path(__file__).parents[2] / "replication" / "results" / "h200"
OF_JETS = [name for name in FIGURES if name not in ("headline", "theorems")]  # which have tests of their own


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    folder = tmp_path_factory.mktemp("replication")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "burn-in reached")  # of the exact chains, which are far too short here
        return folder, ask("replicate", *OF_JETS, "--preset", "smoke", "--output", folder)


def test_the_command_writes_all_figures(made: tuple[Path, Answer]) -> None:
    folder, answer = made
    assert answer.code == 0, answer.err
    for name in OF_JETS:
        assert str(folder / name) in answer.out
        document = read_result(folder / f"{name}.json")
        assert document["command"] == f"adammcmc replicate {name} --preset smoke"
        assert document["trials"]["number"] > 5
        assert "| verdict |" in (folder / f"{name}.md").read_text()
        image = pyplot.imread(folder / f"{name}.png")
        assert min(image.shape[:2]) > 200
        assert image[..., :3].std() > 0.05, "something is drawn"


def test_a_second_call_runs_nothing(made: tuple[Path, Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = made
    monkeypatch.setattr("replication.work.run_trial", lambda *args: pytest.fail("a trial was run again"))
    before = read_result(folder / "fig2b.json")
    after = replicate("fig2b", PRESETS["smoke"], folder, progress=False)
    assert json.loads(json.dumps(after))["result"] == before["result"]


def test_workers_share_the_trials(made: tuple[Path, Answer], tmp_path: Path) -> None:
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
    (["fig5"], "there is no figure 'fig5'. Known: headline, fig1"),
    (["fig1", "--preset", "large"], "there is no preset 'large'. Known: smoke, small, h200, paper"),
    (["fig1", "--preset", "h200"], "needs 26,000 top and QCD jets"),
    (["fig1", "--jets", "nowhere"], "'nowhere' has no train: make it with `adammcmc jets generate nowhere/train --jets"),
])  # fmt: skip
def test_mistakes_are_said_in_one_line(words: list[str], says: str, tmp_path: Path) -> None:
    answer = ask("replicate", *words, "--output", tmp_path)
    assert answer.code != 0
    assert says in answer.err
    assert "Traceback" not in answer.err


# --- what is kept -----------------------------------------------------------------------------------------------------------


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
