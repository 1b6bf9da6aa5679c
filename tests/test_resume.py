"""Kill a run at any instant: it resumes bit for bit."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

import adammcmc
from adammcmc.posterior.store.folder import FolderStore
from tests import killing


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """Uninterrupted runs, and how long each took."""
    folder = tmp_path_factory.mktemp("references")
    finished = {}
    for i, scenario in enumerate(killing.SCENARIOS):
        path, began = folder / str(i), time.monotonic()
        process = killing.start(killing.run, scenario, str(path))
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


class Interrupt(adammcmc.Callback):
    """Stops a run at a step, as Ctrl-C would."""

    def __init__(self, chain: int, step: int) -> None:
        self.at = chain, step

    def on_step(self, event: adammcmc.Event) -> None:
        if (event.chain, event.step) == self.at:
            raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:burn-in ended")  # too early, in so few steps
@pytest.mark.parametrize("scenario", killing.SCENARIOS)
def test_an_interrupted_run_resumes_bit_for_bit(scenario: str, tmp_path: Path) -> None:
    """Without dice: stopped in burn-in, in a gap, right after a draw, in the last chain."""

    def run(path: Path, *callbacks: adammcmc.Callback) -> None:
        options = killing.SCENARIOS[scenario]()
        adammcmc.sample(loss=F.cross_entropy, path=path, resume=True, callbacks=callbacks, progress=False, **options)

    run(tmp_path / "whole")
    last = killing.SCENARIOS[scenario]().get("num_chains", 1) - 1
    for chain, step in ((0, 7), (0, 45), (last, 70), (last, 81)):
        with contextlib.suppress(KeyboardInterrupt):
            run(tmp_path / "parts", Interrupt(chain, step))
    run(tmp_path / "parts")
    assert killing.same(killing.content(tmp_path / "parts"), killing.content(tmp_path / "whole"))


def _die_between_chains(path: str) -> None:
    append = FolderStore.append

    def last(self: FolderStore, *arguments: Any) -> None:
        append(self, *arguments)
        os._exit(9)

    FolderStore.append = last  # type: ignore[method-assign]
    killing.run("stacked scan", path)


def test_a_stack_that_died_within_its_first_draw_is_readable_and_resumes(tmp_path: Path) -> None:
    """The first chain has its folder, and the others have none yet: nothing is missing."""
    process = killing.start(_die_between_chains, str(tmp_path / "run"))
    process.join()
    assert process.exitcode == 9
    assert {path.name for path in (tmp_path / "run").glob("chain-*")} == {"chain-0"}
    FolderStore(tmp_path / "run")  # without a warning
    killing.run("stacked scan", str(tmp_path / "run"))
    killing.run("stacked scan", str(tmp_path / "whole"))
    assert killing.same(killing.content(tmp_path / "run"), killing.content(tmp_path / "whole"))


@pytest.mark.parametrize("scenario", ["algorithm 1", "full data, last 3", "stacked scan", "stacked, adapting, last 2"])
def test_draws_that_are_ahead_of_their_checkpoint_are_made_again(scenario: str, tmp_path: Path) -> None:
    """As if the process had been killed between the index and the checkpoint."""
    older, folder = tmp_path / "older", "." if scenario.startswith("stacked") else "chain-0"
    at_once = killing.SCENARIOS[scenario]()["num_chains"] if scenario.startswith("stacked") else 1

    class KeepOld(adammcmc.Callback):
        def on_draw(self, event: adammcmc.Event, record: dict[str, object]) -> None:
            checkpoint = tmp_path / "run" / folder / "checkpoint.safetensors"
            if event.num_draws == 5:
                shutil.copy(checkpoint, older)
            if event.num_draws == 6:
                shutil.copy(older, checkpoint)
                raise KeyboardInterrupt

    options = killing.SCENARIOS[scenario]()
    with pytest.raises(KeyboardInterrupt):
        adammcmc.sample(loss=F.cross_entropy, path=tmp_path / "run", callbacks=[KeepOld()], progress=False, **options)
    assert len(FolderStore(tmp_path / "run").index) == 6 * at_once
    killing.run(scenario, str(tmp_path / "run"))
    killing.run(scenario, str(tmp_path / "whole"))
    assert killing.same(killing.content(tmp_path / "run"), killing.content(tmp_path / "whole"))
