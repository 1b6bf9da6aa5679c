"""Signals between steps: a run that is stopped is saved at the end of a step, never in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Interrupt", "deferred_interrupt"]

_DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,  # Ctrl-C
    signal.SIGTERM: signal.SIG_DFL,  # a batch system that ends a job, `kill`
    **({signal.SIGHUP: signal.SIG_DFL} if hasattr(signal, "SIGHUP") else {}),  # a closed terminal
}
"""The signals that are deferred, and their default handlers."""


class Interrupt:
    """The signal that is to stop the run."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None  # the first that arrived

    @property
    def is_set(self) -> bool:
        """Whether a signal arrived."""
        return self.signal is not None

    def exception(self) -> BaseException:
        """Ends the run as the signal would have: Ctrl-C as usual, the others with the exit code that shells use."""
        assert self.signal is not None
        if self.signal is signal.SIGINT:
            return KeyboardInterrupt()
        error = SystemExit(128 + self.signal)
        error.add_note(f"stopped by {self.signal.name}")
        return error

    def _receive(self, number: int, _: Any) -> None:
        self.signal = self.signal or signal.Signals(number)
        if signal.getsignal(signal.SIGINT) == self._receive:
            # a second Ctrl-C stops at once. (The other signals arrive twice by themselves: from the terminal that
            # closes and from its shell.)
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP only set `is_set`; the body checks it where it can stop, and raises.

    An error after a signal is taken for its consequence: signals also end data-loading workers. Nothing changes outside
    the main thread, nor for a signal that the program handles or ignores itself (SIGHUP under nohup, SIGINT in the
    background).
    """
    interrupt = Interrupt()
    is_main = threading.current_thread() is threading.main_thread()
    deferred = {s: default for s, default in _DEFAULTS.items() if is_main and signal.getsignal(s) is default}
    for number in deferred:
        signal.signal(number, interrupt._receive)
    try:
        yield interrupt
    except Exception as error:
        if interrupt.is_set:
            raise interrupt.exception() from error
        raise
    finally:
        for number, default in deferred.items():
            if signal.getsignal(number) == interrupt._receive:  # (a callback may have set another)
                signal.signal(number, default)
    if interrupt.is_set:
        raise interrupt.exception()
