"""Where a trial that was killed goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from adammcmc.errors import warn
from adammcmc.posterior.store.encoding import read_state, write_state
from adammcmc.posterior.store.whole import clear

__all__ = ["Checkpoint"]


class Checkpoint:
    """A file with the state of a trial under way. Only one process at a time may have it.

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
        """Keep this state instead of the one before. If it cannot be written, the one before stays, and the trial goes on."""
        if self.path is not None:
            try:
                write_state(self.path, state, "a trial of adammcmc replicate under way")
            except OSError as error:
                words = "the trial goes on, but from further back if it is killed"
                warn(f"'{self.path}' cannot be written ({error}): {words}.")
        self._last = time.monotonic()

    def load(self, made_by: dict[str, str]) -> dict[str, Any] | None:
        """The last state; None if there is none, or if it cannot be read: then the trial begins again.

        Args:
            made_by: what the state must have under `made_by`. On another device, or with another version of a library, a trial
                would not go on bit for bit, and its record would not tell where it was made.
        """
        if self.path is None:
            return None
        clear(self.path)
        if not self.path.exists():
            return None
        try:
            state: dict[str, Any] = read_state(self.path)
            theirs = state["made_by"]
            if theirs != made_by:
                raise ValueError(f"it was made by {', '.join(theirs.values())}, here is {', '.join(made_by.values())}")
        except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
            why = "it is no state of a trial" if isinstance(error, AttributeError | KeyError | TypeError) else error
            warn(f"'{self.path}' cannot be read ({why}): this trial begins again.")
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
