"""Power loss and damaged files: a run resumes to the same draws, or says what is wrong. `python -m tests.damage` does more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import adammcmc
from adammcmc.posterior.store.folder import FolderStore
from adammcmc.posterior.store.records import manifest_text
from tests import damage, killing

PREVIOUS = "checkpoint.previous.safetensors"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Finished runs of each kind, and what they left."""
    folder = tmp_path_factory.mktemp("runs")
    finished = {}
    for kind in damage.KINDS:
        damage.run(folder / kind, kind)
        finished[kind] = folder / kind, damage.content(folder / kind)
    return finished


@pytest.mark.parametrize("kind", ["draws", "last 1", "stacked"])
def test_a_run_survives_power_loss_at_any_point(kind: str, runs: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    images = damage.images_of(kind, tmp_path / "power")
    assert len(images) > 20
    for number, (name, image) in enumerate(images):
        assert damage.survives(image, kind, runs[kind][1], tmp_path / str(number)), name


@pytest.mark.parametrize(("seed", "kind"), list(enumerate(damage.KINDS)))
def test_damage_is_noticed_or_harmless(seed: int, kind: str, tmp_path: Path) -> None:
    outcomes = list(damage.damaged_folders(tmp_path, kind, 12, seed))
    assert [done for done, came in outcomes if came == "silent"] == []
    assert "noticed" in {came for _, came in outcomes}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_run_goes_on_from_the_checkpoint_before(kind: str, runs: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    """And again, before it has written another one; and after the index has lost a line."""
    total = damage.KINDS[kind].get("num_draws", 4)
    damage.run(tmp_path / "run", kind, num_draws=total - 1)
    folder = tmp_path / "run" if kind == "stacked" else tmp_path / "run" / "chain-0"
    cut(folder / "checkpoint.safetensors")
    with pytest.warns(UserWarning, match="cannot be read.*resumes from the previous checkpoint"):
        damage.run(tmp_path / "run", kind, num_draws=total - 1)
    assert (folder / "checkpoint.safetensors.damaged").exists()
    cut(folder / "checkpoint.safetensors")
    index = tmp_path / "run" / "chain-0" / "index.jsonl"
    index.write_bytes(b"".join(index.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.warns(UserWarning, match="resumes from the previous checkpoint"):
        damage.run(tmp_path / "run", kind)
    assert killing.same(damage.content(tmp_path / "run"), runs[kind][1])


@pytest.mark.parametrize("how", ["missing", "cut"])
def test_one_bad_draw_does_not_block_the_others(how: str, runs: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["draws"][0], run)
    file = run / "chain-0" / "draw-000001.safetensors"
    file.unlink() if how == "missing" else cut(file)
    with pytest.warns(UserWarning, match=r"draw-000001.*left out.*`adammcmc check .*run --repair` sets aside"):
        posterior = adammcmc.Posterior.open(run, nn.Linear(3, 2))
    assert [record["draw"] for record in posterior.index] == [0, 2, 3]
    assert posterior.predict(damage.X, progress=False).mean.shape == (24, 2)
    assert len(posterior.made) == 4
    assert str(posterior).startswith("posterior: 3 draws of 1 chain")


def test_a_draw_that_is_found_damaged_is_named(runs: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    shutil.copytree(runs["draws"][0], tmp_path / "run")
    file = tmp_path / "run" / "chain-0" / "draw-000001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    posterior = adammcmc.Posterior.open(tmp_path / "run", nn.Linear(3, 2))
    assert posterior[0].keys() == posterior[2].keys()
    with pytest.raises(adammcmc.StoreCorrupt, match=r"draw-000001.*its checksum.*`adammcmc check .*run --repair`"):
        list(posterior)


def test_a_leftover_of_another_start_is_never_fallen_back_on(tmp_path: Path) -> None:
    """A run that was killed before it began, then one with another seed and fewer chains in the same folder."""
    damage.run(tmp_path / "run", "two chains", num_draws=1, seed=7)
    for file in (*tmp_path.rglob("run.json"), *tmp_path.rglob("index.jsonl"), *tmp_path.rglob("draw-*")):
        file.unlink()
    damage.run(tmp_path / "run", "draws", num_draws=1)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["chain-0", "lock", "run.json"]
    state = FolderStore(tmp_path / "run").checkpoints(0).read(tmp_path / "run" / "chain-0" / PREVIOUS)
    assert state is not None
    assert state["num_draws"] == 0
    damage.run(tmp_path / "other", "draws", num_draws=1)
    right = FolderStore(tmp_path / "other").checkpoints(0).read(tmp_path / "other" / "chain-0" / PREVIOUS)
    assert right is not None
    assert torch.equal(state["sampler"]["adammcmc"]["generator"], right["sampler"]["adammcmc"]["generator"])


def test_a_run_of_format_1_is_refused(runs: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    """By every way in, and whether or not its `run.json` has a checksum, which format 1 did not have. Nothing is changed."""
    shutil.copytree(runs["draws"][0], tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    manifest = json.loads(file.read_text()) | {"format": 1}
    ways: list[Callable[[], Any]] = [
        lambda: adammcmc.Posterior.open(tmp_path / "run", nn.Linear(3, 2)),
        lambda: damage.run(tmp_path / "run", num_draws=5),
        lambda: adammcmc.check_run(tmp_path / "run"),
        lambda: adammcmc.check_run(tmp_path / "run", repair=True),
    ]
    words = rf"has format 1 of an older version of adammcmc \({manifest['versions']['adammcmc']}\); this one reads format 2\. "
    for text in (json.dumps({k: v for k, v in manifest.items() if k != "crc32"}).encode(), manifest_text(manifest)):
        file.write_bytes(text)
        for way in ways:
            with pytest.raises(adammcmc.StoreMismatch, match=words + r"Keep the version that made it, or run again\."):
                way()
        assert file.read_bytes() == text


def exchange(folder: Path, runs: dict[str, tuple[Path, Any]], how: str) -> None:
    """The checkpoints of a run with two chains in each other's places, or that of a run with another seed."""
    names = [folder / f"chain-{chain}" / "checkpoint.safetensors" for chain in (0, 1)]
    first, second = (name.read_bytes() for name in names)
    if how == "another run":
        damage.run(folder.parent / "other", "two chains", seed=3)
        second = (folder.parent / "other" / "chain-0" / "checkpoint.safetensors").read_bytes()
    names[0].write_bytes(second)
    if how == "exchanged":
        names[1].write_bytes(first)


@pytest.mark.parametrize("how", ["exchanged", "copied", "another run"])
def test_a_checkpoint_of_another_chain_or_run_is_not_taken(how: str, runs: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    shutil.copytree(runs["two chains"][0], tmp_path / "run")
    exchange(tmp_path / "run", runs, how)
    assert "not of this chain of this run" in str(adammcmc.check_run(tmp_path / "run"))
    with pytest.warns(UserWarning, match="not of this chain of this run.*resumes from the previous checkpoint"):
        damage.run(tmp_path / "run", "two chains")
    assert killing.same(damage.content(tmp_path / "run"), runs["two chains"][1])


@pytest.mark.parametrize("kind", ["two chains", "stacked"])
def test_a_missing_chain_is_named(kind: str, runs: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    shutil.copytree(runs[kind][0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "chain-0")
    assert "chain-0' is missing" in str(adammcmc.check_run(tmp_path / "run"))
    with pytest.warns(UserWarning, match="chain-0 missing in .*: the other chains are used"):
        posterior = adammcmc.Posterior.open(tmp_path / "run", nn.Linear(3, 2))
    assert {record["chain"] for record in posterior.index} == {1}
    if kind == "two chains":  # (a stack has one checkpoint for all)
        assert posterior.verdicts()[0] == "chain 0: cannot tell: its checkpoint is missing"
        assert posterior.verdicts()[1].startswith("chain 1: cannot tell yet")


@pytest.mark.parametrize("how", ["missing", "behind", "both missing"])
def test_a_checkpoint_that_is_missing_or_behind_is_named(how: str, runs: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    shutil.copytree(runs["draws"][0], tmp_path / "run")
    newest, previous = (tmp_path / "run" / "chain-0" / name for name in ("checkpoint.safetensors", PREVIOUS))
    if how == "behind":
        shutil.copy(previous, newest)
    else:
        newest.unlink()
        if how == "both missing":
            previous.unlink()
        assert not adammcmc.check_run(tmp_path / "run").is_sound
    posterior = adammcmc.Posterior.open(tmp_path / "run", nn.Linear(3, 2))
    words = {
        "missing": "is missing. The previous one",
        "behind": "dates from draw 3 of 4",
        "both missing": "moments are unknown",
    }
    with pytest.warns(UserWarning, match=words[how]):
        posterior.health()
