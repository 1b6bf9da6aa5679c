"""The progress bar: silent without a terminal, informative on one."""

from __future__ import annotations

import io
import sys

import pytest

from adammcmc.samplers.progress import track


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(range(5), "work")) == [0, 1, 2, 3, 4]
    assert capsys.readouterr() == ("", "")


def test_it_shows_the_work_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    clock = iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    assert list(track(range(5), "work", status=lambda: "loss 0.25")) == [0, 1, 2, 3, 4]
    for word in ("work", "5/5", "steps/s", "loss 0.25"):
        assert word in terminal.getvalue()


def test_words_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither markup nor escape sequences of a status have an effect."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    clock = iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    list(track(range(2), "[b]w", status=lambda: "[bold]x\x1b]0;t\x07"))
    assert "[b]w" in terminal.getvalue()
    assert r"[bold]x\x1b]0;t\x07" in terminal.getvalue()
    assert "\x1b]0;" not in terminal.getvalue()


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(track(range(3), "work", show=False)) == [0, 1, 2]
    assert terminal.getvalue() == ""
