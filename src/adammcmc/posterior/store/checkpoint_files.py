"""Checkpoint files: the newest one, and the previous one in case the newest is damaged."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from adammcmc.errors import StoreCorrupt
from adammcmc.posterior.store.atomic import keep_as, open_plain, replace_file, set_aside, sync_folder
from adammcmc.posterior.store.encoding import encode, read_state, safetensors_parts

__all__ = ["CHECKPOINT", "PREVIOUS", "Checkpoints"]

CHECKPOINT, PREVIOUS = "checkpoint.safetensors", "checkpoint.previous.safetensors"


class Found(NamedTuple):
    """The newest usable checkpoint."""

    state: dict[str, Any] | None  # None if there is none
    problems: list[str]  # of newer ones: what is wrong with them
    is_damaged: bool  # whether one of them exists and cannot be used


class Checkpoints:
    """The two checkpoints of a chain, or of all chains at once. Those of another run or chain are refused.

    Args:
        path: the folder of the run.
        key: the number of the chain; None for all chains at once.
        manifest: of the run.
    """

    def __init__(self, path: Path, key: int | None, manifest: dict[str, Any]) -> None:
        folder = path if key is None else path / f"chain-{key}"
        self.files = self.newest, self.previous = folder / CHECKPOINT, folder / PREVIOUS
        configuration = {name: value for name, value in manifest["configuration"].items() if name != "num_draws"}
        made_from = [configuration, manifest["data"]["fingerprint"], manifest.get("starts")]
        identity = zlib.crc32(json.dumps(made_from, sort_keys=True).encode())
        self._owner = f"run {identity:08x}, {'all chains' if key is None else folder.name}"

    def write(self, state: dict[str, Any]) -> None:
        """Replace the newest, which becomes the previous one."""
        text, tensors = encode({**state, "of": self._owner})
        # the number of draws also stands by itself: a reader then need not decode the rest
        metadata = {"num_draws": str(state.get("num_draws", 0)), "state": text}
        replace_file(self.newest, safetensors_parts(tensors, metadata), previous=self.previous)

    def read(self, file: Path) -> dict[str, Any] | None:
        """The content of one of the files; None if it does not exist."""
        if not os.path.lexists(file):
            return None
        try:
            state = read_state(file, may_be_link=False)
            if not isinstance(state, dict):
                raise ValueError("it holds no state of a chain")
            if not (isinstance(count := state.get("num_draws"), int) and count >= 0):
                raise ValueError(f"it has num_draws = {count!r}")
            if (owner := state.pop("of", None)) != self._owner:
                raise ValueError(f"it is of {str(owner)[:80]}, and not of this chain of this run")
        except (OSError, ValueError) as error:
            raise StoreCorrupt(f"the checkpoint '{file}' cannot be read: {error}. The draws are not affected.") from error
        return state

    def find(self, check: Callable[[dict[str, Any]], None] = lambda state: None) -> Found:
        """The newest one that can be read and passes `check`, which raises `StoreCorrupt` otherwise."""
        problems: list[str] = []
        is_damaged = False
        for file in self.files:
            try:
                if (state := self.read(file)) is not None:
                    check(state)
                    return Found(state, problems, is_damaged)
                problems.append(f"the checkpoint '{file}' is missing.")
            except StoreCorrupt as error:
                problems.append(str(error))
                is_damaged = True
        return Found(None, problems, is_damaged)

    def num_draws(self) -> int:
        """The number of draws that the newest one counts, by its header; 0 if that cannot be read."""
        with suppress(OSError, SafetensorError, RuntimeError, KeyError, TypeError, ValueError):
            os.close(open_plain(self.newest))
            with safe_open(self.newest, framework="pt") as content:
                return int(content.metadata()["num_draws"])
        return 0

    def use_previous(self) -> Path | None:
        """Put the previous one in place of the newest. Returns the new name of the newest, if there was one."""
        aside = set_aside(self.newest) if os.path.lexists(self.newest) else None
        keep_as(self.previous, self.newest)
        sync_folder(self.newest.parent)
        return aside
