"""`check_run`: it finds what is damaged, says so in one line each, and repairs what can be repaired."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import adammcmc
from adammcmc import StoreLocked, StoreMismatch, check_run
from adammcmc.posterior.store.folder import FolderStore
from tests import damage, killing
from tests.shell import ask


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    damage.run(folder / "draws")
    damage.run(folder / "last", num_draws=4, keep=1)
    return folder


def flip(file: Path, at: int = -5) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(bytes(content))


def flip_line(file: Path, number: int) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number].replace(b'"step"', b'"stop"')
    file.write_bytes(b"".join(lines))


def both(run: Path) -> None:
    flip_line(run / "index.jsonl", 1)
    flip(run / "draw-000001.safetensors")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str, list[int], bool]] = {
    # what is done to chain-0, words of the problem, draws that are usable after the repair, whether it is sound then
    "a draw is missing": (lambda p: (p / "draw-000002.safetensors").unlink(), "draw-000002.*is missing", [0, 1, 3], True),
    "a draw is flipped": (lambda p: flip(p / "draw-000002.safetensors"), "draw-000002.*checksum", [0, 1, 3], True),
    "a draw is cut": (lambda p: os.truncate(p / "draw-000000.safetensors", 40), "draw-000000.*bytes", [1, 2, 3], True),
    "a line is flipped": (lambda p: flip_line(p / "index.jsonl", 1), "line 2 does not match", [0, 1, 2, 3], True),
    "no index": (lambda p: (p / "index.jsonl").unlink(), "has 0 draws, its checkpoint 4", [0, 1, 2, 3], True),
    "an index of zeros": (lambda p: (p / "index.jsonl").write_bytes(b"\0" * 900 + b"\n"), "line 1", [0, 1, 2, 3], True),
    "the checkpoint": (lambda p: flip(p / "checkpoint.safetensors"), "checkpoint.*cannot be read", [0, 1, 2, 3], True),
    "the one before": (lambda p: flip(p / "checkpoint.previous.safetensors"), "previous.*cannot be read", [0, 1, 2, 3], True),
    "both checkpoints": (lambda p: [flip(f) for f in p.glob("checkpoint*")], "cannot be resumed", [0, 1, 2, 3], False),
    "a draw and its line": (both, "line 2 does not match", [0], False),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_repaired(name: str, good: Path, tmp_path: Path) -> None:
    run, (change, words, usable, is_sound) = tmp_path / "run", DAMAGE[name]
    shutil.copytree(good / "draws", run)
    change(run / "chain-0")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    found = check_run(run)
    assert not found.is_sound
    assert found.verdict.startswith("damaged: ")
    assert "--repair" in found.verdict
    assert any(re.search(words, problem) for problem in found.problems), found.problems
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before, "looking changes nothing"
    repaired = check_run(run, repair=True)
    assert repaired.is_sound == is_sound, repaired
    assert repaired.repairs
    assert check_run(run).is_sound == is_sound
    with warnings.catch_warnings():
        warnings.simplefilter("error" if is_sound else "ignore")
        posterior = adammcmc.Posterior.open(run, nn.Linear(3, 2))
    right = adammcmc.Posterior.open(good / "draws", nn.Linear(3, 2))
    assert [record["draw"] for record in posterior.index] == usable
    assert all(killing.same(posterior[i], right[draw]) for i, draw in enumerate(usable))
    if is_sound:
        damage.run(run, num_draws=5)
        assert len(FolderStore(run).index) == 5


def test_nothing_is_deleted(good: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(good / "draws", run)
    for file in ("draw-000001.safetensors", "checkpoint.safetensors"):
        flip(run / "chain-0" / file)
    flip_line(run / "chain-0" / "index.jsonl", 3)
    before = sorted(p.read_bytes() for p in (run / "chain-0").iterdir())
    check_run(run, repair=True)
    after = [p.read_bytes() for p in (run / "chain-0").iterdir()]
    assert all(content in after for content in before)


def test_a_sound_run(good: Path) -> None:
    for name, usable in (("draws", 4), ("last", 1)):
        found = check_run(good / name, repair=True)
        assert str(found) == f"sound: 4 draws in the index, weights of {usable}"
        assert found.is_sound


def test_what_cannot_be_checked(good: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreMismatch, match="does not exist"):
        check_run(tmp_path / "nowhere")
    shutil.copytree(good / "draws", tmp_path / "run")
    store = FolderStore(tmp_path / "run", writes=True)
    assert check_run(tmp_path / "run").is_sound, "a reader does not mind"
    with pytest.raises(StoreLocked):
        check_run(tmp_path / "run", repair=True)
    store.close()
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**manifest, "target": "another"}))
    assert check_run(tmp_path / "run", repair=True).left


def test_the_command(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good / "draws", tmp_path / "run")
    answer = ask("check", tmp_path / "run")
    assert (answer.code, answer.out) == (0, "sound: 4 draws in the index, weights of 4\n")
    flip(tmp_path / "run" / "chain-0" / "draw-000002.safetensors")
    answer = ask("check", tmp_path / "run")
    assert answer.code == 1
    assert "draw-000002.safetensors' is damaged" in answer.out.splitlines()[0]
    answer = ask("check", tmp_path / "run", "--repair")
    assert answer.code == 0
    assert answer.out.endswith("repaired: 4 draws in the index, weights of 3\n")
    assert ask("check", tmp_path / "nowhere").code == 1
