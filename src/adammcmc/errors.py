"""The named exceptions, raised where a caller would want to act on the kind of failure, and `warn`."""

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

    The chain froze at that step: its weights and moments are those of the last healthy step.
    A non-finite loss at a *proposed* point is no error; it is a rejection, counted by `Info.is_finite`.
    """

    result: object = None
    """What was drawn before the error, in the form that the call would have returned; None where there is no such thing."""

    def __init__(self, message: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy
        """What to do about it, the end of the message: it differs between a loop of one's own and `sample`."""

    def __str__(self) -> str:
        return f"{super().__str__()} {self.remedy}".strip()


class ManyProcesses(RuntimeError):
    """The sampler runs in one of several processes that share a model (torch.distributed, DDP, FSDP, DTensor)."""


class PerExampleLossRequired(RuntimeError):
    """The acceptance test needs the losses of single examples, and the sampler was given no `examples`."""


class StochasticClosure(RuntimeError):
    """Two calls of the closure at the same weights gave different losses, where the loss must be a function of the weights."""


class StoreMismatch(ValueError):
    """A folder holds another run than the one that was asked for (another seed, model, data, format, ...), or none."""


class StoreCorrupt(RuntimeError):
    """A file of a run is damaged or missing."""


class StoreLocked(RuntimeError):
    """Another process writes to this run."""


class StoreFull(OSError):
    """The disk is too small for the run, or became full. What was kept before is intact."""


_INSIDE = (
    os.path.dirname(__file__) + os.sep,
    contextlib.__file__,
    functools.__file__,
)
"""Files whose lines are between a user's call and its warning."""


def warn(message: str) -> None:
    """A UserWarning at the innermost line outside of the package, however deep inside it came up."""
    # torch wraps the step of an optimizer; it is not imported here, so that `adammcmc --version` does not wait for it
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    inside = _INSIDE if torch is None else (*_INSIDE, os.path.dirname(torch) + os.sep)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__") or "sys"
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno, name, registry)
