"""Ctrl-C between steps: a chain that is stopped is saved where it stands, not in the middle of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Interrupt", "deferred_interrupt"]


class Interrupt:
    """Whether somebody pressed Ctrl-C."""

    def __init__(self) -> None:
        self.is_asked = False

    def _ask(self, *_: Any) -> None:
        self.is_asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # who presses again does not want to wait


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Inside, the first Ctrl-C only sets `is_asked`; what is inside looks at it when it can stop, and raises.

    What goes wrong after it was asked is taken for its consequence: Ctrl-C also ends the processes that load data. Outside of
    the main thread, and where a program has a handler of its own, everything is as it was.
    """
    interrupt = Interrupt()
    is_ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours:
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt._ask)
    try:
        yield interrupt
    except Exception as error:
        if interrupt.is_asked:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupt.is_asked:
        raise KeyboardInterrupt
