"""Where a trial that was killed goes on."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from adammcmc.encoding import read_state, write_state

__all__ = ["Checkpoint"]


class Checkpoint:
    """A file with the state of a trial under way.

    Args:
        path: the file; None keeps nothing.
        every: seconds between two states.
    """

    def __init__(self, path: Path | None = None, every: float = 120.0) -> None:
        self.path, self.every = path, every
        self._last = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next state."""
        return self.path is not None and time.monotonic() - self._last >= self.every

    def save(self, state: dict[str, Any]) -> None:
        """Keep this state instead of the one before."""
        if self.path is not None:
            write_state(self.path, state, "a trial of adammcmc replicate under way")
        self._last = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """The last state; None if there is none, or if it cannot be read: then the trial begins again."""
        if self.path is None or not self.path.exists():
            return None
        try:
            state: dict[str, Any] = read_state(self.path)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            warnings.warn(f"'{self.path}' cannot be read ({error}): this trial begins again.", stacklevel=2)
            return None
        return state

    def part(self, number: int) -> Checkpoint:
        """Of one of several parts of the work, one after the other."""
        path = None if self.path is None else self.path.with_name(f"{self.path.stem}-{number}{self.path.suffix}")
        return Checkpoint(path, self.every)

    def remove(self) -> None:
        """The work is done."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
