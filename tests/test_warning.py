"""Warnings point at the user's line, however deep in the package they arise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from adammcmc import BurnIn, Gaussian, Underdamped, kernels, sample, warm_up

X = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1)
SHORT: dict[str, Any] = {"num_draws": 1, "gap": 1, "burn_in": 3, "progress": False}
LOADER = DataLoader(TensorDataset(X, Y), 10, sampler=WeightedRandomSampler([1.0] * 40, 40))


def steps(*, by_batch: bool) -> None:
    model = nn.Linear(2, 2)
    sampler = Underdamped(model.parameters(), num_data=40, fixed_data=True, prior=Gaussian(), burn_in=BurnIn(num_steps=3))
    for _ in range(3):
        if by_batch:
            sampler.step(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), (X, Y))
        else:
            sampler.step(lambda: F.cross_entropy(model(X), Y))


def predict() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = sample(nn.Linear(2, 2), (X, Y), F.cross_entropy, **SHORT)
    posterior.predict(LOADER)


CALLS: dict[str, Callable[[], object]] = {
    "sample": lambda: sample(nn.Linear(2, 2), (X, Y), F.cross_entropy, **SHORT),
    "sample, stacked": lambda: sample(nn.Linear(2, 2), (X, Y), F.cross_entropy, num_chains=2, stacked=True, **SHORT),
    "sample, of a DataLoader": lambda: sample(nn.Linear(2, 2), LOADER, F.cross_entropy, **SHORT),
    "step of a closure": partial(steps, by_batch=False),
    "step of a batch": partial(steps, by_batch=True),
    "warm_up": lambda: warm_up(
        lambda x: -x.square().sum(1), torch.zeros(3, 2), kernels.underdamped(1e-6), tune=BurnIn(num_steps=3), progress=False
    ),
    "predict": predict,
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_the_line_of_the_caller(name: str) -> None:
    with pytest.warns(UserWarning, match=r"burn-in reached|is not used") as caught:
        CALLS[name]()
    assert {warning.filename for warning in caught} == {__file__}


def test_a_program_can_silence_its_own_lines() -> None:
    """Filters match the module of the caller."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=__name__)
        steps(by_batch=False)
    assert not caught
