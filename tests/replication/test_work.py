"""What a folder keeps, and how processes share it."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path
from typing import Any

from adammcmc.replication.settings import PRESETS
from adammcmc.replication.work import Work


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
