"""Pythia jets in the phase space of the Top Quark Tagging Reference Dataset, in shards.

A shard is a file of some thousand jets of one kind (`events` makes them); its random numbers depend on its name and the seed
alone, so that any number of workers makes the same files, and a run that stopped goes on with the missing ones.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from importlib.metadata import version
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread

import numpy as np

from adammcmc.jets.data import Jets, kind_number
from adammcmc.jets.events import PROCEDURE, Events, Settings, jets_of_events
from adammcmc.jets.files import JetFileError, read_jets, write_jets
from adammcmc.posterior.store.whole import write_whole
from adammcmc.samplers.progress import show_bar
from adammcmc.target.data import derive_seed

__all__ = ["generate"]


def generate(
    folder: str | Path,
    wanted: dict[str, int],
    settings: Settings | None = None,
    *,
    workers: int | None = None,
    progress: bool = True,
) -> list[Path]:
    """Make so many jets of each kind, in shards under `folder`. Goes on where an earlier call stopped; returns the files.

    Args:
        folder: one file `<kind>-<number>.npz` a shard, and `generator.json` with the settings.
        wanted: kind -> number of jets; kinds are those of `KINDS`.
        settings: the phase space, the detector, the seed; those of the reference set if None.
        workers: processes; None is one for each core.
        progress: whether to show a bar (in a terminal).
    """
    settings = settings or Settings()
    for kind, number in wanted.items():
        kind_number(kind)
        if number < 1:
            raise ValueError(f"the number of {kind} jets must be positive, got {number}.")
    _check_installed()
    folder = Path(folder)
    _claim(folder, settings)
    names = [(kind, i, size) for kind, number in wanted.items() for i, size in _shards(number, settings.shard_size)]
    names.sort(key=lambda name: (name[1], name[0]))  # kinds side by side: a run that is cut short has some of each
    paths = [folder / f"{kind}-{i:05d}.npz" for kind, i, _ in names]
    missing = [(path, *name) for path, name in zip(paths, names, strict=True) if not _is_made(path, name[2])]
    total, done = sum(size for *_, size in missing), 0
    with show_bar("generating", show=progress, unit="jets") as bar:
        bar.update(0, total)
        for size in _made(missing, settings, min(workers or _cores(), max(1, len(missing)))):
            done += size
            bar.update(done, total)
    return paths


def _shards(number: int, size: int) -> Iterator[tuple[int, int]]:
    for i in range(-(-number // size)):
        yield i, min(size, number - i * size)


def _made(jobs: list[tuple[Path, str, int, int]], settings: Settings, workers: int) -> Iterator[int]:
    """Make the shards, side by side; yields the size of each when its file is there."""
    if workers == 1 or len(jobs) == 1:
        for job in jobs:
            yield _make_shard(job, settings)
        return
    others = set(active_children())
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
    try:
        for done in as_completed([pool.submit(_make_shard, job, settings) for job in jobs]):
            yield done.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in set(active_children()) - others:
            worker.terminate()
        raise
    pool.shutdown()


def _start_worker() -> None:
    """An interrupt is for the first process, which ends the others; if it was killed and could not, they end themselves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _make_shard(job: tuple[Path, str, int, int], settings: Settings) -> int:
    path, kind, number, size = job
    seed = derive_seed(settings.seed, kind_number(kind), number)
    parts, have = [], 0
    events = Events(kind, settings, seed)
    random = np.random.default_rng(seed)
    while have < size:
        jets = jets_of_events(events.batch(200), kind, settings, random)
        parts.append(jets)
        have += len(jets)
        if events.made >= 20_000 and have * 2_000 < events.made:
            raise RuntimeError(
                f"{events.made} events gave {have} {kind} jets between {settings.window.low:g} and {settings.window.high:g} "
                "GeV: there are hardly any in this window."
            )
    write_jets(path, Jets.cat(parts)[:size])
    return size


def _is_made(path: Path, size: int) -> bool:
    """Whether this shard is there, whole: it has the right number of jets (another number was asked for before?)."""
    try:
        return path.exists() and len(read_jets(path)) >= size  # a longer one begins with the same jets
    except JetFileError:
        return False  # a broken one is made again


def _claim(folder: Path, settings: Settings) -> None:
    """Write the settings into the folder, or see that those in it are the same."""
    made_by = {"pythia": version("pythia8mc"), "fastjet": version("fastjet"), "procedure": PROCEDURE}
    what = "Pythia jets in the phase space of the reference set"
    text = json.dumps({"what": what, "made_by": made_by, **asdict(settings)}, indent=1)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "generator.json"
    if manifest.exists():
        try:
            theirs, ours = json.loads(manifest.read_text()), json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"'{manifest}' is broken ({error}): choose a new folder, or remove it if the jets are yours."
            ) from error
        other = [key for key in ours if theirs.get(key) != ours[key]]
        if other:
            raise ValueError(
                f"'{folder}' holds jets made with another {other[0]}: {theirs.get(other[0])}, now {ours[other[0]]}. "
                "Choose a new folder, or the same settings to go on."
            )
        return
    if any(folder.glob("*.npz")):
        raise ValueError(f"'{folder}' holds .npz files and no generator.json: choose a new folder.")
    write_whole(manifest, text)


def _check_installed() -> None:
    try:
        import awkward  # noqa: F401
        import fastjet  # noqa: F401
        import pythia8mc  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"making jets needs {error.name}. Run: pip install --only-binary :all: 'adammcmc[jets]'", name=error.name
        ) from error


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
