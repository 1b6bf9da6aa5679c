"""What a folder keeps, and how processes share it."""

from __future__ import annotations

import fcntl
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replication.sets import read_sets
from replication.settings import PRESETS
from replication.trials import Trial
from replication.work import Work


def test_a_preset_for_a_gpu_says_so_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"trial": {"seed": 0}, "device": "cpu", "torch": "2", "seconds": 1.0}
    monkeypatch.setattr("replication.work.run_trial", lambda *args: record)
    jets = read_sets(PRESETS["smoke"])
    assert [name for name, preset in PRESETS.items() if preset.is_for_gpu] == ["h200", "paper"]
    work = Work(replace(PRESETS["h200"], device="cpu"), tmp_path, jets, progress=False)
    with pytest.warns(UserWarning, match="'h200' needs a GPU.*`--preset small`") as said:
        work.records([Trial("adam"), Trial("sgd")])
    assert len(said) == 1, "once"
    work.records([Trial("adam")])
    Work(PRESETS["smoke"], tmp_path / "b", jets, progress=False).records([Trial("adam")])


def test_what_another_process_is_at_is_waited_for_and_all_come_in_their_order(tmp_path: Path) -> None:
    work = Work(PRESETS["smoke"], tmp_path, progress=False)
    (tmp_path / "trials").mkdir()
    made: list[str] = []

    def function(name: str) -> Any:
        made.append(name)
        return {"name": name, "third": 1 / 3}

    with (tmp_path / "trials" / ".first.lock").open("w") as lock:  # another process has it
        fcntl.flock(lock, fcntl.LOCK_EX)

        def let_go() -> None:
            time.sleep(0.5)
            assert made == ["second"]
            fcntl.flock(lock, fcntl.LOCK_UN)

        other = threading.Thread(target=let_go)
        other.start()
        found = work.all_kept({name: lambda name=name: function(name) for name in ("first", "second")})
        other.join()
    assert made == ["second", "first"]
    assert list(found) == ["first", "second"]
    assert found["first"] == {"name": "first", "third": 0.333333}
    assert work.all_kept({"second": lambda: function("again")}) == {"second": found["second"]}  # it is kept
