"""A folder that keeps every finished trial, so that figures share them and a stopped command continues where it was."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import adammcmc
from adammcmc.errors import warn
from adammcmc.posterior.store.atomic import clear, write_whole
from adammcmc.samplers.progress import show_bar
from replication.measures import rounded
from replication.sets import JetSets, read_sets
from replication.settings import Preset
from replication.trials import Trial, device_name, run_trial

PROCEDURE = 4
"""Part of a trial's name. Raise it when what a trial does or measures changes: all trials are then run again."""


class Work:
    """Jets, a device and a folder. Processes with the same folder share the work: each trial is run by one of them.

    Args:
        preset: how large the replication is.
        folder: keeps the trials, `trials/<method>-<digest>.json`, and the unfinished runs beside them.
        jets: the data; None: the bundled ones, read when the first trial needs them.
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
        """The data."""
        if self._jets is None:
            self._jets = read_sets(self.preset)
        return self._jets

    def records(self, trials: Sequence[Trial]) -> list[dict[str, Any]]:
        """The records of these trials, in this order; missing ones are run."""
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
        """The trials of this figure: their number, seeds, devices and versions, total time in seconds, and jets."""
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
        """`kept` for each of these, by name and in this order. Waits for those that another process is running.

        With a `title` one bar counts them; without, each shows its own.
        """
        found: dict[str, Any] = {}
        with show_bar(title or "", show=self.progress and title is not None, unit="parts") as bar:
            bar.update(0, len(functions))
            while len(found) < len(functions):
                for name, function in functions.items():
                    if name not in found:
                        with suppress(BlockingIOError):  # another process runs it
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
            with (folder / f".{name}.lock").open("w") as lock:  # released when the process ends, however it ends
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not path.exists():
                    clear(path)
                    write_whole(path, json.dumps(rounded(_called(function)), allow_nan=False))
        for unfinished in folder.glob(f".{name}.run-*"):  # (also those of a process that was killed before it got here)
            shutil.rmtree(unfinished, ignore_errors=True)
        try:
            return json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"'{path}' is damaged ({error}): remove it to run it again.") from error

    def _run(self, trial: Trial, title: str, name: str) -> dict[str, Any]:
        if not self._is_warned:
            self._is_warned = True
            warn(
                f"preset '{self.preset.name}' needs a GPU and there is none: each trial takes many minutes. "
                "Use `--preset small` on a CPU."
            )
        with show_bar(title, show=self.progress) as bar:
            return run_trial(trial, self.jets, self.device, lambda done, total: bar.update(done, total), self._unfinished(name))

    def _unfinished(self, name: str) -> Path:
        """Keeps the runs of a trial until its record is written.

        Its name contains the device and the versions: another device would not continue bit for bit, and the record
        names one.
        """
        made_by = {"device": device_name(self.device), "torch": torch.__version__, "adammcmc": adammcmc.__version__}
        return self.folder / "trials" / f".{name}.{_key(made_by, 'run')}"

    def _digest(self) -> str:
        jets = self.jets
        return "-".join(part.digest() for part in (jets.train, jets.test, jets.others))


def _called(function: Callable[[], Any]) -> Any:
    """What it returns. An error of its own must not be mistaken for a lock, which is waited for."""
    try:
        return function()
    except BlockingIOError as error:
        raise RuntimeError(str(error)) from error


def _key(settings: dict[str, Any], name: str) -> str:
    text = json.dumps(settings, sort_keys=True)
    return f"{name}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
