"""Where a replication is done: its jets, and a folder that keeps every trial, so that a command that was stopped goes on."""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adammcmc.errors import warn
from adammcmc.posterior.store.whole import clear, write_whole
from adammcmc.samplers.progress import show_bar
from replication.checkpoint import Checkpoint
from replication.measures import rounded
from replication.sets import JetSets, read_sets
from replication.settings import Preset
from replication.trials import Trial, run_trial

__all__ = ["PROCEDURE", "Work"]

PROCEDURE = 3
"""Of a trial. Raise it when what a trial does or measures changes: kept ones are then made again."""


class Work:
    """Jets, a device and a folder. Processes that share the folder share the work: each trial is run by one of them.

    Args:
        preset: how large it is.
        folder: where trials are kept: `trials/<method>-<digest>.json`.
        jets: what trials run on; None: the bundled ones, read when the first trial needs them.
        progress: show bars.
    """

    def __init__(self, preset: Preset, folder: str | Path, jets: JetSets | None = None, *, progress: bool = True) -> None:
        self.preset, self.folder, self.progress = preset, Path(folder), progress
        self.device = torch.device(preset.where)
        self._jets = jets
        self._used: dict[str, Any] = {}
        self._is_warned = not (preset.is_for_gpu and self.device.type == "cpu")

    @property
    def jets(self) -> JetSets:
        """What trials run on."""
        if self._jets is None:
            self._jets = read_sets(self.preset)
        return self._jets

    def records(self, trials: Sequence[Trial]) -> list[dict[str, Any]]:
        """Of these trials, in this order; those that are not yet in the folder are run."""
        digest = self._digest()
        names = [_key(asdict(trial) | {"jets": digest, "procedure": PROCEDURE}, trial.method) for trial in trials]
        runs = {
            name: partial(self._run, trial, f"{trial.method} {number + 1}/{len(trials)}", name)
            for number, (name, trial) in enumerate(zip(names, trials, strict=True))
        }
        found = self.all_kept(runs)
        self._used |= found
        return [found[name] for name in names]

    def used(self) -> dict[str, Any]:
        """Of the trials that were asked for: how many, their seeds, devices and versions, their seconds in all, their jets."""
        records = self._used.values()
        return {
            "number": len(records),
            "seeds": sorted({record["trial"]["seed"] for record in records}),
            "devices": sorted({record["device"] for record in records}),
            "torch": sorted({record["torch"] for record in records}),
            "seconds": round(sum(record["seconds"] for record in records), 1),
            "jets": self._digest() if records else None,
        }

    def all_kept(self, functions: Mapping[str, Callable[[], Any]], title: str | None = None) -> dict[str, Any]:
        """`kept` of each of these, by name and in this order. Processes share them: what another one is at is waited for.

        With a `title` a bar counts them; without, each shows its own.
        """
        found: dict[str, Any] = {}
        with show_bar(title or "", show=self.progress and title is not None, unit="parts") as bar:
            bar.update(0, len(functions))
            while len(found) < len(functions):
                for name, function in functions.items():
                    if name not in found:
                        with suppress(BlockingIOError):  # another process is at it
                            found[name] = self.kept(name, function)
                            bar.update(len(found), len(functions))
                time.sleep(0.1 if len(found) < len(functions) else 0)
        return {name: found[name] for name in functions}

    def kept(self, name: str, function: Callable[[], Any]) -> Any:
        """What `function` returned when it was first called under this name, in this folder: JSON.

        Raises BlockingIOError while another process calls it.
        """
        folder = self.folder / "trials"
        path = folder / f"{name}.json"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f".{name}.lock").open("w") as lock:  # a process that dies lets go of it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not path.exists():
                    clear(path)
                    write_whole(path, json.dumps(rounded(_called(function)), allow_nan=False))
        self._state_of(name).unlink(missing_ok=True)  # (here: a process may be killed between its record and this)
        try:
            return json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"'{path}' is damaged ({error}): remove it, and it is made again.") from error

    def _run(self, trial: Trial, title: str, name: str) -> dict[str, Any]:
        if not self._is_warned:
            self._is_warned = True
            warn(
                f"preset '{self.preset.name}' is made for a GPU, and there is none: each trial takes many minutes. "
                "`--preset small` is made for a CPU.",
            )
        checkpoint = Checkpoint(self._state_of(name))
        with show_bar(title, show=self.progress) as bar:
            return run_trial(trial, self.jets, self.device, lambda done, total: bar.update(done, total), checkpoint)

    def _state_of(self, name: str) -> Path:
        """The file of a trial that is under way."""
        return self.folder / "trials" / f".{name}.safetensors"

    def _digest(self) -> str:
        jets = self.jets
        return "-".join(part.digest() for part in (jets.train, jets.test, jets.others))


def _called(function: Callable[[], Any]) -> Any:
    """What it returns. An error of its own must not look like a lock, which is waited for."""
    try:
        return function()
    except BlockingIOError as error:
        raise RuntimeError(str(error)) from error


def _key(settings: dict[str, Any], name: str) -> str:
    text = json.dumps(settings, sort_keys=True)
    return f"{name}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
