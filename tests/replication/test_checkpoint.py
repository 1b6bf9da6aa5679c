"""States of trials under way: when they are written, which are taken up, and what is left behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adammcmc.posterior.store.encoding import read_state, write_state
from replication import trials
from replication.checkpoint import Checkpoint
from replication.measures import rounded
from replication.sets import JetSets, read_sets
from replication.settings import PRESETS
from replication.trials import Trial, run_trial
from replication.work import Work

TINY = replace(PRESETS["smoke"], num_train=48, num_test=30, num_others=1, batch_size=12, steps=6, num_draws=3)
HERE = {"device": "this one", "torch": "torch 2"}


@pytest.fixture(scope="module")
def jets() -> JetSets:
    return read_sets(TINY)


class Killed(Exception):
    """Stands for SIGKILL."""


def record_of(trial: Trial, jets: JetSets, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    record: dict[str, Any] = rounded(run_trial(trial, jets, torch.device("cpu"), lambda done, total: None, checkpoint))
    return record


def killed_after(number: int, trial: Trial, jets: JetSets, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that is killed after so many states."""
    save, saved = Checkpoint.save, []

    def counted(self: Checkpoint, state: dict[str, Any]) -> None:
        save(self, state)
        saved.append(self.path)
        if len(saved) == number:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", counted)
        with pytest.raises(Killed):
            record_of(trial, jets, Checkpoint(path, every=0.0))


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return {**a, "seconds": 0} == {**b, "seconds": 0}


def test_a_state_is_due_after_some_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("replication.checkpoint.time.monotonic", lambda: now[0])
    one, nothing = Checkpoint(tmp_path / ".a.safetensors", every=60.0), Checkpoint(every=0.0)
    part = one.part(3)
    for checkpoint in (one, part):
        now[0] = 100.0 + 59.0
        assert not checkpoint.is_due
        now[0] = 100.0 + 60.0
        assert checkpoint.is_due
    one.save({"made_by": HERE})
    assert not one.is_due, "it was just written"
    now[0] += 60.0
    assert one.is_due
    assert not nothing.is_due
    nothing.save({})
    assert nothing.load(HERE) is None


def test_only_a_state_that_was_made_here_is_taken_up(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / ".a.safetensors")
    path = checkpoint.path or Path()
    checkpoint.save({"made_by": HERE, "step": 3})
    assert checkpoint.load(HERE) == {"made_by": HERE, "step": 3}
    with pytest.warns(UserWarning, match=r"made by this one, torch 2, here is another, torch 2\): this trial begins again"):
        assert checkpoint.load({**HERE, "device": "another"}) is None
    for other in ({"step": 3}, [1, 2], {"made_by": None}, {"made_by": 3}):
        write_state(path, other, "something else")
        with pytest.warns(UserWarning, match="no state of a trial.*begins again"):
            assert checkpoint.load(HERE) is None


@pytest.mark.parametrize("method", ["sgd", "ensemble"])
def test_a_trial_of_another_device_begins_again(
    method: str, jets: JetSets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is not mixed into a record that says it was made here."""
    trial, path = Trial.of(TINY, method, num_draws=2), tmp_path / ".a.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(trials, "device_name", lambda device: "another")
        killed_after(TINY.steps + 2 if method == "ensemble" else 3, trial, jets, path, monkeypatch)
    taken = []
    monkeypatch.setattr(trials._Run, "_load", lambda self, *args: taken.append(self))
    with pytest.warns(UserWarning, match="made by another, torch"):
        record = record_of(trial, jets, Checkpoint(path))
    assert not taken
    assert same(record, record_of(trial, jets))


def test_a_state_that_cannot_be_written_is_told_and_the_trial_goes_on(
    jets: JetSets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".a.safetensors"
    trial = Trial.of(TINY, "adam")
    killed_after(2, trial, jets, path, monkeypatch)

    def full(*args: Any, **options: Any) -> Any:
        yield b"the first bytes"
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("adammcmc.posterior.store.encoding.safetensors_parts", full)
        with pytest.warns(UserWarning, match=r"a\.safetensors' cannot be written .*No space left"):
            record = record_of(trial, jets, Checkpoint(path, every=0.0))
    assert same(record, record_of(trial, jets))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert read_state(path)["step"] == 2, "the one before stays"


@pytest.mark.parametrize("method", ["adam", "ensemble"])
def test_seconds_are_those_of_all_processes(
    method: str, jets: JetSets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, path = Trial.of(TINY, method, num_draws=2, start=3), tmp_path / ".a.safetensors"
    killed_after(2, trial, jets, path, monkeypatch)  # in Adam's steps before the chain, of an ensemble's first member
    if method == "ensemble":
        _add(tmp_path / ".a-0.safetensors", 1000.0)
        killed_after(9, trial, jets, path, monkeypatch)  # (7 states of the member, the scores, one of the next member)
        assert read_state(path)["seconds"] > 1000
        _add(tmp_path / ".a-1.safetensors", 1000.0)
        assert 2000 < record_of(trial, jets, Checkpoint(path))["seconds"] < 2060
    else:
        _add(path, 1000.0)
        killed_after(3, trial, jets, path, monkeypatch)
        assert 1000 < record_of(trial, jets, Checkpoint(path))["seconds"] < 1060


def _add(path: Path, seconds: float) -> None:
    state = read_state(path)
    write_state(path, {**state, "seconds": state["seconds"] + seconds}, "a test")


def test_weights_that_run_away_are_told_with_the_trial(jets: JetSets) -> None:
    with pytest.raises(ValueError, match=r"sgd with learning rate 1e\+30, sigma 0, seed 4: its scores are not finite"):
        record_of(Trial.of(TINY, "sgd", lr=1e30, seed=4), jets)


# --- what is left behind ------------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_an_ensemble_that_was_killed_after_a_member(
    jets: JetSets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, trial = tmp_path / ".a.safetensors", Trial.of(TINY, "ensemble", num_draws=2)
    killed_after(TINY.steps + 1, trial, jets, path, monkeypatch)  # after its scores, before its state was removed
    assert {p.name for p in tmp_path.iterdir()} == {".a.safetensors", ".a-0.safetensors"}
    for name in (".a.safetensors", ".a-1.safetensors"):  # and in the middle of writing
        (tmp_path / f".{name}.99999.safetensors").write_bytes(b"half")
    record_of(trial, jets, Checkpoint(path))
    assert {p.name for p in tmp_path.iterdir()} == {".a.safetensors"}, "which Work removes"


def test_a_folder_is_tidy_after_kills_at_the_end(tmp_path: Path, jets: JetSets) -> None:
    """While the record was written, and after that, before its state was removed."""
    folder = tmp_path / "trials"
    folder.mkdir()
    work = Work(TINY, tmp_path, jets, progress=False)
    (folder / ".a.json.99999.json").write_text("{")
    assert work.kept("a", lambda: 1) == 1
    (folder / ".a.safetensors").write_bytes(b"a state")
    assert work.kept("a", lambda: 2) == 1
    assert {p.name for p in folder.iterdir()} == {"a.json", ".a.lock"}


def test_a_state_is_not_removed_before_its_record_is_there(tmp_path: Path, jets: JetSets) -> None:
    work = Work(TINY, tmp_path, jets, progress=False)
    (tmp_path / "trials").mkdir()
    state = tmp_path / "trials" / ".a.safetensors"
    state.write_bytes(b"a state")

    def fails() -> None:
        assert state.exists()
        raise Killed

    with pytest.raises(Killed):
        work.kept("a", fails)
    assert state.exists()


def test_a_trials_own_error_is_not_taken_for_a_lock(tmp_path: Path) -> None:
    """Or it would be called again and again without a word."""

    calls: list[str] = []

    def fails() -> None:
        assert not calls
        calls.append("once")
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with pytest.raises(RuntimeError, match="temporarily unavailable"):
        Work(TINY, tmp_path, progress=False).all_kept({"a": fails})
