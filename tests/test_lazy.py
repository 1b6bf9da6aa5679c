"""Public names come when they are asked for."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import adammcmc


def fresh(code: str) -> None:
    """In a new process."""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_heavy_comes_before_it_is_asked_for() -> None:
    fresh(
        "import adammcmc, sys; assert 'torch' not in sys.modules; assert 'sample' in dir(adammcmc); adammcmc.__version__;"
        "assert 'torch' not in sys.modules; from adammcmc import kernels; assert 'torch' in sys.modules; adammcmc.sample"
    )


def test_a_room_can_be_imported_first() -> None:
    fresh("from adammcmc.posterior.predictive import predict; from adammcmc import *; sample, AdamMCMC, kernels")


def test_every_public_name_is_there() -> None:
    for name in adammcmc.__all__:
        thing = getattr(adammcmc, name)
        # a name that is also a package's must mean the package, or importing it would change what the name means
        assert isinstance(thing, ModuleType) or f"adammcmc.{name}" not in sys.modules, name


def test_others_are_not() -> None:
    with pytest.raises(AttributeError, match="module 'adammcmc' has no attribute 'sampel'"):
        adammcmc.sampel  # noqa: B018
