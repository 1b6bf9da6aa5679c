"""The lock of a run folder: one process writes to it at a time."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from adammcmc.errors import StoreLocked
from adammcmc.posterior.store.atomic import open_plain, plain_files_only

__all__ = ["LOCK", "Lock"]

LOCK = "lock"
_held: set[int] = set()


class Lock:
    """An exclusive lock on a folder, held until `release` or the end of the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.release: Callable[[], Any] = lambda: None
        try:
            import fcntl
        except ImportError:  # this system has no such locks
            return
        with plain_files_only():
            descriptor = open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT)
        _held.add(descriptor)
        self.release = weakref.finalize(self, _close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            raise StoreLocked(f"another process writes to '{folder}'. Wait for it, or choose another path.") from error


def _close(descriptor: int) -> None:
    if descriptor in _held:
        _held.discard(descriptor)
        os.close(descriptor)


def _close_all() -> None:
    """In a forked process, such as a data-loading worker: it must not keep a lock after its parent was killed."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
