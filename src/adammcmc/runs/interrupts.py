"""Signals between steps: a chain that is stopped is saved at the end of a step, not in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Interrupt", "deferred_interrupt"]

_DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,  # Ctrl-C
    signal.SIGTERM: signal.SIG_DFL,  # a queue that ends a job, `kill`
    **({signal.SIGHUP: signal.SIG_DFL} if hasattr(signal, "SIGHUP") else {}),  # a terminal that was closed
}
"""The signals that are deferred, and how each is handled where a program has not said otherwise."""


class Interrupt:
    """Which signal came to stop the run."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first one; None before it."""

    @property
    def is_set(self) -> bool:
        """Whether one came."""
        return self.signal is not None

    def exception(self) -> BaseException:
        """What ends the run as the signal would have: Ctrl-C as always, the others with the exit code that shells give them."""
        assert self.signal is not None
        if self.signal is signal.SIGINT:
            return KeyboardInterrupt()
        error = SystemExit(128 + self.signal)
        error.add_note(f"stopped by {self.signal.name}")
        return error

    def _receive(self, number: int, _: Any) -> None:
        self.signal = self.signal or signal.Signals(number)
        if signal.getsignal(signal.SIGINT) == self._receive:
            # who presses again does not want to wait. (The other signals come twice by themselves: from the terminal that
            # closes, and from its shell.)
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP only set `is_set`; what is inside reads it where it can stop, and raises.

    What goes wrong after a signal is taken for its consequence: signals also end the processes that load data. Outside of the
    main thread nothing changes, nor does a signal for which the program has a handler of its own, or which it ignores (SIGHUP
    under nohup, SIGINT in the background).
    """
    interrupt = Interrupt()
    is_main = threading.current_thread() is threading.main_thread()
    ours = {s: default for s, default in _DEFAULTS.items() if is_main and signal.getsignal(s) is default}
    for number in ours:
        signal.signal(number, interrupt._receive)
    try:
        yield interrupt
    except Exception as error:
        if interrupt.is_set:
            raise interrupt.exception() from error
        raise
    finally:
        for number, default in ours.items():
            if signal.getsignal(number) == interrupt._receive:  # (a callback may have set another)
                signal.signal(number, default)
    if interrupt.is_set:
        raise interrupt.exception()
