"""Ctrl-C, SIGTERM and SIGHUP wait for the end of a step, and lose nothing."""

from __future__ import annotations

import logging
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import adammcmc
from adammcmc.posterior.store.folder import FolderStore
from adammcmc.runs.interrupts import deferred_interrupt
from tests import killing

pytestmark = pytest.mark.usefixtures("foreground")

DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}


def press(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, None), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_it_waits(number: signal.Signals, code: int | None) -> None:
    """And ends as the signal would have ended it: with Ctrl-C's exception, or with a shell's exit code."""
    reached = False
    kind = KeyboardInterrupt if code is None else SystemExit
    with pytest.raises(kind) as caught, deferred_interrupt() as interrupt:  # noqa: PT012
        press(number)
        assert interrupt.is_set
        reached = True
    assert reached
    assert getattr(caught.value, "code", None) == code
    assert {s: signal.getsignal(s) for s in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize("first", DEFAULTS)
def test_who_presses_ctrl_c_after_it_does_not_wait(first: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():  # noqa: PT012
        press(first)
        press()
        pytest.fail("this must not be reached")
    assert {s: signal.getsignal(s) for s in DEFAULTS} == DEFAULTS


def test_a_terminal_that_closes_may_say_so_twice() -> None:
    reached = False
    with pytest.raises(SystemExit) as caught, deferred_interrupt() as interrupt:  # noqa: PT012
        press(signal.SIGHUP)
        press(signal.SIGHUP)
        press(signal.SIGTERM)
        assert interrupt.signal == signal.SIGHUP
        reached = True
    assert (reached, caught.value.code) == (True, 129)


@pytest.mark.parametrize("number", DEFAULTS)
def test_a_signal_that_is_ignored_stays_ignored(number: signal.Signals) -> None:
    """As nohup and shells in the background have it."""
    signal.signal(number, signal.SIG_IGN)
    with deferred_interrupt() as interrupt:
        press(number)
    assert not interrupt.is_set
    assert signal.getsignal(number) is signal.SIG_IGN


def test_what_it_breaks_is_its_consequence() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, deferred_interrupt():  # noqa: PT012
        press()
        raise RuntimeError("a worker that loads data was killed")
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="by itself"), deferred_interrupt():
        raise RuntimeError("by itself")


@pytest.mark.parametrize("number", DEFAULTS)
def test_a_handler_of_the_program_stays(number: signal.Signals) -> None:
    pressed = []

    def handler(*_: object) -> None:
        pressed.append(1)

    signal.signal(number, handler)
    with deferred_interrupt() as interrupt:
        press(number)
    assert (pressed, interrupt.is_set) == ([1], False)
    with deferred_interrupt():
        signal.signal(signal.SIGTERM, handler)  # a callback's
    assert signal.getsignal(signal.SIGTERM) is handler


def test_other_threads_are_left_alone() -> None:
    asked = []

    def run() -> None:
        with deferred_interrupt() as interrupt:
            asked.append(interrupt.is_set)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert asked == [False]


class PressAt(adammcmc.Callback):
    """Ctrl-C in the middle of the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, event: adammcmc.Event) -> None:
        if event.step == self.step and event.chain == 0:
            press()


@pytest.mark.parametrize("num_chains", [1, 2])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("step", [5, 23])  # in burn-in, and between two draws
def test_a_run_is_saved_at_the_very_step(step: int, stacked: bool, num_chains: int, tmp_path: Path) -> None:
    """And goes on from there: the same draws as those of a run that nobody interrupted."""
    torch.manual_seed(0)
    model, x = nn.Linear(2, 3), torch.randn(30, 2)

    def go(path: Path, **options: object) -> adammcmc.Posterior:
        def make(params: object, **more: object) -> adammcmc.AdamMCMC:
            return adammcmc.AdamMCMC(params, sigma=0.01, sigma_along=1.0, prior=adammcmc.Gaussian(), **more)

        return adammcmc.sample(
            model, (x, x.argmax(1)), nn.functional.cross_entropy, sampler=make, batch_size=10, num_draws=4, gap=10,
            burn_in=10, num_chains=num_chains, stacked=stacked, path=path, progress=False, **options,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "a", callbacks=[PressAt(step)])
    saved = adammcmc.posterior.store.folder.FolderStore(tmp_path / "a").saved(None if stacked else 0)
    assert saved is not None
    assert (saved["sampler"] if stacked else saved["sampler"]["adammcmc"])["num_steps"] == step
    resumed, whole = go(tmp_path / "a", resume=True), go(tmp_path / "b")
    for one, other in zip(resumed, whole, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.filterwarnings("ignore:burn-in reached")
def test_a_process_that_is_ended_saves_first_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Ended in burn-in, and again between two draws."""
    for number, step in ((signal.SIGTERM, 23), (signal.SIGHUP, 45)):
        reached = killing.context.Event()
        process = killing.start(killing.run_and_stop, str(tmp_path / "parts"), step, reached)
        assert process.pid is not None
        assert reached.wait(60)
        os.kill(process.pid, number)
        process.join()
        assert process.exitcode == 128 + number
        saved = FolderStore(tmp_path / "parts").saved(0)
        assert saved is not None
        assert saved["sampler"]["adammcmc"]["num_steps"] == step
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in ("parts", "whole"):
        adammcmc.sample(path=tmp_path / name, resume=True, **killing.short())
    torch.set_num_threads(threads)
    assert killing.same(killing.content(tmp_path / "parts"), killing.content(tmp_path / "whole"))


def test_what_is_kept_is_logged_where_no_traceback_says_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class End(adammcmc.Callback):
        def on_step(self, event: adammcmc.Event) -> None:
            press(signal.SIGTERM)

    with caplog.at_level(logging.WARNING, "adammcmc"), pytest.raises(SystemExit):
        adammcmc.sample(path=tmp_path / "run", callbacks=[End()], **killing.short())
    assert caplog.messages == [
        f"stopped by SIGTERM; '{tmp_path / 'run'}' keeps 0 draws; the same call with resume=True continues it."
    ]


IN_A_TERMINAL = """
import fcntl, sys, termios, torch, torch.nn.functional as F, adammcmc
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
class Step(adammcmc.Callback):
    def on_step(self, event):
        print("step", event.step, flush=True)
x = torch.randn(60, 2)
callbacks = [Step()]
adammcmc.sample(torch.nn.Linear(2, 2), (x, x.argmax(1)), F.cross_entropy, burn_in=10**7, path=sys.argv[1], callbacks=callbacks)
"""


def test_a_terminal_that_is_closed_loses_no_step(tmp_path: Path) -> None:
    """Neither the bar nor a callback can write to it any more."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path / "run")]
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    seen = b""
    while b"step 30" not in seen:
        seen += os.read(ours, 10_000)
    os.close(ours)
    assert process.wait(60) == 129
    saved = FolderStore(tmp_path / "run").saved(0)
    assert saved is not None
    assert saved["sampler"]["adammcmc"]["num_steps"] >= 30
