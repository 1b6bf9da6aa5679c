"""Kill a run at any instant: it resumes bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import killing


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """Uninterrupted runs, and how long each took."""
    folder = tmp_path_factory.mktemp("references")
    finished = {}
    for i, scenario in enumerate(killing.SCENARIOS):
        path, began = folder / str(i), time.monotonic()
        process = killing.start(scenario, path)
        process.join()
        assert process.exitcode == 0, scenario
        finished[scenario] = path, time.monotonic() - began
    return finished


def check(references: dict[str, tuple[Path, float]], scenario: str, seed: int, tmp_path: Path) -> None:
    reference, duration = references[scenario]
    killing.kill_and_resume(scenario, tmp_path / "run", seed, duration)
    assert killing.same(killing.content(tmp_path / "run"), killing.content(reference))


@pytest.mark.parametrize(("seed", "scenario"), list(enumerate(killing.SCENARIOS)))
def test_a_killed_run_resumes_bit_for_bit(
    references: dict[str, tuple[Path, float]], scenario: str, seed: int, tmp_path: Path
) -> None:
    check(references, scenario, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 55))
def test_fifty_killed_runs_resume_bit_for_bit(references: dict[str, tuple[Path, float]], seed: int, tmp_path: Path) -> None:
    check(references, list(killing.SCENARIOS)[seed % len(killing.SCENARIOS)], seed, tmp_path)
