"""Warnings that point at the user's line."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings

import torch

__all__ = ["warn"]

_INSIDE = (
    os.path.dirname(__file__) + os.sep,
    os.path.dirname(torch.__file__) + os.sep,  # which wraps the step of an optimizer
    contextlib.__file__,
    functools.__file__,
)
"""Files whose lines are between a user's call and its warning."""


def warn(message: str) -> None:
    """A UserWarning at the innermost line outside of the package, however deep inside it came up."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__") or "sys"
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno, name, registry)
