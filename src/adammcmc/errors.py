"""Exceptions for failures that a caller may want to handle by kind, and `warn`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings

__all__ = [
    "ManyProcesses",
    "NonFiniteLoss",
    "PerExampleLossRequired",
    "StochasticClosure",
    "StoreCorrupt",
    "StoreFull",
    "StoreLocked",
    "StoreMismatch",
    "warn",
]


class NonFiniteLoss(RuntimeError):
    """The loss or its gradient was NaN or infinite at the chain's *current* weights.

    The chain froze at that step: its weights and moments are those of the last healthy step. A non-finite loss at a
    *proposed* point is not an error but a rejection, counted by `Info.is_finite`.
    """

    result: object = None
    """The draws before the error, in the form that the call would have returned; None where there are none."""

    def __init__(self, message: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy
        """What to do about it, at the end of the message: it differs between a training loop and `sample`."""

    def __str__(self) -> str:
        return f"{super().__str__()} {self.remedy}".strip()


class ManyProcesses(RuntimeError):
    """The sampler runs in one of several processes that share a model (torch.distributed, DDP, FSDP, DTensor)."""


class PerExampleLossRequired(RuntimeError):
    """The acceptance test requires per-example losses, and the sampler has none."""


class StochasticClosure(RuntimeError):
    """Two calls of the closure at the same weights gave different losses: the loss is not a function of the weights."""


class StoreMismatch(ValueError):
    """A folder holds a different run than the requested one (another seed, model, data, format, ...), or none."""


class StoreCorrupt(RuntimeError):
    """A file of a run is damaged or missing."""


class StoreLocked(RuntimeError):
    """Another process is writing to this run."""


class StoreFull(OSError):
    """The disk is too small for the run, or is full. Draws already stored are intact."""


_INSIDE = (os.path.dirname(__file__) + os.sep, contextlib.__file__, functools.__file__)
"""Files that lie between a user's call and its warning."""


def warn(message: str) -> None:
    """Issue a UserWarning that points to the innermost line outside the package."""
    # torch wraps an optimizer's step; it is not imported here, to keep `adammcmc --version` fast
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    inside = _INSIDE if torch is None else (*_INSIDE, os.path.dirname(torch) + os.sep)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__") or "sys"
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno, name, registry)
