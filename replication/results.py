"""Runs a figure and writes its files: `<figure>.json`, `<figure>.png` and `<figure>.md`."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from dataclasses import asdict
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

import adammcmc
from adammcmc.errors import warn
from adammcmc.posterior.store.atomic import whole, write_whole
from replication.measures import rounded
from replication.sets import read_sets
from replication.settings import Preset
from replication.work import Work

FIGURES = {
    "headline": "headline",
    "fig1": "fig1",
    "fig2a": "fig2a",
    "fig2b": "fig2b",
    "fig3": "fig3",
    "epochs": "epochs",
    "fig4": "fig4",
    "ood": "ood",
    "lambda": "temperature",
    "theorems": "theorems",
}
"""All figures in the order of the page, and the module of each."""


def figure_module(name: str) -> ModuleType:
    """The module of a figure: it has `TITLE`, `run`, `draw` and `section`."""
    if name not in FIGURES:
        raise ValueError(f"unknown figure '{name}'. Known: {', '.join(FIGURES)}.")
    return import_module(f"replication.{FIGURES[name]}")


def replicate(
    figure: str, preset: Preset, folder: str | Path, *, jets: str | Path | None = None, workers: int = 1, progress: bool = True
) -> dict[str, Any]:
    """Run the missing trials of a figure and write its files.

    Args:
        figure: one of `FIGURES`.
        preset: how large.
        folder: for the results and the finished trials.
        jets: a folder with `train` and `others`; None is the bundled jets.
        workers: processes that share the trials. On a GPU several are faster than one: most of a small network's step
            is spent on the host. (Start NVIDIA's MPS first, or they wait for each other.)
        progress: show bars.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"'{folder}' is a file, and the results need a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    module = figure_module(figure)
    began = time.monotonic()
    others = [
        multiprocessing.get_context("spawn").Process(target=_work_along, args=(figure, preset, folder, jets), daemon=True)
        for _ in range(workers - 1)
    ]
    for process in others:
        process.start()
    try:
        work = Work(preset, folder, None if jets is None else read_sets(preset, jets), progress=progress)
        result = rounded(module.run(preset, work))
    finally:
        died = [process.exitcode for process in others if process.exitcode]
        for process in others:
            process.terminate()
    if died:
        warn(f"{len(died)} of {len(others)} workers died (exit codes {died}); their trials were run again.")
    document = {
        "figure": figure,
        "title": module.TITLE,
        "command": f"python -m replication {figure} --preset {preset.name}" + ("" if jets is None else " --jets JETS"),
        "preset": asdict(preset),
        "command_seconds": round(time.monotonic() - began, 1),  # (of this command: finished trials are not in it)
        "trials": work.used(),
        "adammcmc": adammcmc.__version__,
        "result": result,
    }
    write_whole(folder / f"{figure}.json", json.dumps(document, allow_nan=False) + "\n")
    write_files(document, folder)
    return document


def write_files(document: dict[str, Any], folder: Path) -> None:
    """The picture and the section of a document."""
    module = figure_module(document["figure"])
    with whole(folder / f"{document['figure']}.png") as file:
        module.draw(document["result"]).savefig(file, dpi=110, bbox_inches="tight")
    write_whole(folder / f"{document['figure']}.md", module.section(document["result"]))


def read_result(path: str | Path) -> dict[str, Any]:
    """A document that `replicate` wrote."""
    try:
        document: dict[str, Any] = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"'{path}' is not a result of `python -m replication`: {error}.") from error
    if document.get("figure") not in FIGURES or "result" not in document:
        raise ValueError(f"'{path}' is not a result of `python -m replication`.")
    # the command as it is now: this package was once part of the wheel
    return document | {"command": document["command"].replace("adammcmc replicate", "python -m replication")}


def _work_along(figure: str, preset: Preset, folder: Path, jets: str | Path | None) -> None:
    """Another process on the same trials; it ends with its parent, however that ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    work = Work(preset, folder, None if jets is None else read_sets(preset, jets), progress=False)
    figure_module(figure).run(preset, work)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
