"""Before anything else is imported: without a GPU, Triton's kernels run in its interpreter (it decides once, at import)."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Import ArviZ once before the test processes do: its first import of a day writes a file, and two at a time collide."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        with contextlib.suppress(ImportError), warnings.catch_warnings(action="ignore"):
            import arviz  # noqa: F401


@pytest.fixture
def foreground() -> Iterator[None]:
    """For tests that send signals, to themselves or to processes that they start: the tests may run in the background."""
    from tests import killing

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    killing.foreground()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _no_syncs() -> Iterator[None]:
    """Waiting for the disk takes milliseconds each time, and a test could see it only if the power failed."""
    real, os.fsync = os.fsync, lambda descriptor: None
    yield
    os.fsync = real
