"""What is said before a run is what the run then is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from adammcmc.cli.forecast import forecast, format_seconds
from adammcmc.cli.recipe import Source, prepare

TEXT = 'task = "sine"\n[sampler]\nstep_size = 0.001\n[run]\nnum_draws = 40\ngap = 10\n'

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_a_forecast_is_near_the_truth(tmp_path: Path) -> None:
    recipe = prepare(Source(TEXT, (), tmp_path, "a.toml"))
    said = forecast(recipe)
    began = time.perf_counter()
    posterior = recipe.plan(tmp_path / "run", progress=False).run()
    seconds = time.perf_counter() - began
    written = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*"))
    assert said.target == posterior.target
    assert said.num_data == said.batch_size == 60
    assert (said.num_steps, said.burn_in) == (400, 100)
    assert 0.3 * written < said.size < 10 * written
    assert seconds / 20 < said.seconds < 5 * seconds  # a loaded machine, and draws that wait for the disk


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        (["run.burn_in=7"], 7),
        (["run.burn_in=0"], 0),
        (["burn_in.num_steps=50"], 50),
        (["burn_in.max_steps=50"], None),
        ([], 100),
        (["sampler={}"], None),
        (["sampler={}", "run.burn_in=30"], 30),
        (["sampler={name='AdamMCMC', sigma=0.01}"], 100),
    ],
)
def test_the_length_of_burn_in(changes: list[str], steps: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adammcmc.cli.forecast._ENOUGH_SECONDS", 0.0)
    recipe = prepare(Source(TEXT, tuple(changes), Path(), "a.toml"))
    said = forecast(recipe)
    assert said.burn_in == steps
    [line] = [line for line in str(said).splitlines() if line.startswith("time ")]
    assert ("thousands of steps" in line) == (steps is None)


def test_seconds_for_people() -> None:
    said = [format_seconds(s) for s in (0.00012, 0.0999, 0.92, 5.25, 42.4, 150, 10_000)]
    assert said == ["0.12 ms", "0.1 s", "0.92 s", "5.2 s", "42 s", "2.5 min", "2.78 h"]
