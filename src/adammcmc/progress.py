"""A progress bar on long work: steps per second, time left and a line of numbers; silent when nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

__all__ = ["track"]

_T = TypeVar("_T")


def track(steps: Sequence[_T], description: str, *, show: bool = True, status: Callable[[], str] | None = None) -> Iterator[_T]:
    """Yield from `steps` under a progress bar on standard error; only yield if that is no terminal or rich is missing.

    `status` is called a few times a second for the text after the bar: the place for loss and acceptance.
    """
    if not (show and sys.stderr.isatty()):
        yield from steps
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield from steps
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    import time

    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=len(steps), rate="", status="")
        began = shown = time.monotonic()
        for done, step in enumerate(steps):
            yield step
            if (now := time.monotonic()) - shown > 0.2:
                shown = now
                text = status() if status is not None else ""
                bar.update(task, completed=done + 1, rate=f"{(done + 1) / (now - began):.0f} steps/s", status=text)
        bar.update(task, completed=len(steps))
