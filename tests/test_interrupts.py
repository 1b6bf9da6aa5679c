"""Ctrl-C waits for the end of a step, and loses nothing."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import adammcmc
from adammcmc.interrupts import deferred_interrupt


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_it_waits() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), deferred_interrupt() as interrupt:  # noqa: PT012
        press()
        assert interrupt.is_asked
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_presses_twice_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():  # noqa: PT012
        press()
        press()
        pytest.fail("this must not be reached")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_it_breaks_is_its_consequence() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, deferred_interrupt():  # noqa: PT012
        press()
        raise RuntimeError("a worker that loads data was killed")
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="by itself"), deferred_interrupt():
        raise RuntimeError("by itself")


def test_a_handler_of_the_program_stays() -> None:
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    try:
        with deferred_interrupt() as interrupt:
            press()
        assert (pressed, interrupt.is_asked) == ([1], False)
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_left_alone() -> None:
    asked = []

    def run() -> None:
        with deferred_interrupt() as interrupt:
            asked.append(interrupt.is_asked)

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
    saved = adammcmc.store.FolderStore(tmp_path / "a").saved(None if stacked else 0)
    assert saved is not None
    assert (saved["sampler"] if stacked else saved["sampler"]["adammcmc"])["num_steps"] == step
    resumed, whole = go(tmp_path / "a", resume=True), go(tmp_path / "b")
    for one, other in zip(resumed, whole, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
