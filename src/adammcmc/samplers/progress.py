"""A progress bar: steps per second, time left and, below it, a line of numbers; silent without a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from adammcmc.samplers.terminal import printable

__all__ = ["Bar", "show_bar", "track"]

_T = TypeVar("_T")


class Bar:
    """A bar on standard error, drawn by rich; without a `display` it shows nothing."""

    def __init__(self, display: Any, description: str, unit: str = "steps") -> None:
        self._display, self._unit = display, unit
        self._task = None if display is None else display.add_task(printable(description), total=None, rate="", status="")
        self._began: tuple[float, int] | None = None
        self._shown = 0.0

    def update(self, done: int, total: int | None, status: Callable[[], str] | None = None) -> None:
        """Show `done` of `total` (None: not known yet). `status` is called only a few times a second."""
        if self._display is None:
            return
        now = time.monotonic()
        if self._began is None:
            self._began = now, done
        if now - self._shown < 0.2 and done != total:
            return
        self._shown = now
        elapsed, count = now - self._began[0], done - self._began[1]
        rate = f"{count / elapsed:.0f} {self._unit}/s" if elapsed > 0 and count > 0 else ""
        text = "" if status is None else printable(status())
        self._display.update(self._task, completed=done, total=total, rate=rate, status=text)


@contextmanager
def show_bar(description: str, *, show: bool = True, unit: str = "steps") -> Iterator[Bar]:
    """A bar that shows nothing if standard error is not a terminal or rich is missing."""
    display = _display() if show and sys.stderr.isatty() else None
    try:
        yield Bar(display, description, unit)
    finally:
        if display is not None:
            with suppress(OSError):  # a closed terminal must not hide the error that ended the work
                display.stop()


def _display() -> Any:
    """rich's progress display, started; None without rich."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.text import Text
    except ImportError:
        return None

    class WithStatus(Progress):
        """The status has a line of its own, since both together do not fit into 80 columns."""

        def get_renderables(self) -> Iterator[Any]:
            yield from super().get_renderables()
            yield from (Text(f"  {text}", "dim", no_wrap=True, overflow="ellipsis") for text in self.statuses())

        def statuses(self) -> list[str]:
            return [text for task in self.tasks if (text := task.fields["status"])]

    display = WithStatus(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),  # everything must fit into 80 columns
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    display.start()
    return display


def track(
    steps: Iterable[_T],
    description: str,
    *,
    total: int | None = None,
    show: bool = True,
    status: Callable[[], str] | None = None,
) -> Iterator[_T]:
    """Yield from `steps` under a bar (see `show_bar`); `status` is the text below it, such as loss and acceptance."""
    if total is None and isinstance(steps, Sized):
        total = len(steps)
    with show_bar(description, show=show) as bar:
        bar.update(0, total)
        for done, step in enumerate(steps, 1):
            yield step
            bar.update(done, total, status)
