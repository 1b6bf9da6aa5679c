"""A plan is the arguments of `sample`: the same names and defaults, checked when it is made, and the same run."""

from __future__ import annotations

import dataclasses
import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adammcmc import AdamMCMC, BurnIn, Plan, Posterior, sample

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randint(3, (60,), generator=torch.Generator().manual_seed(2))
SAMPLER = partial(AdamMCMC, lr=1e-3, sigma=1e-2, sigma_along=2.0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def plan(**changes: Any) -> Plan:
    options = {"sampler": SAMPLER, "num_draws": 4, "gap": 2, "burn_in": 3, "progress": False, **changes}
    return Plan(network(), (X, Y), F.cross_entropy, **options)


def test_it_takes_what_sample_takes() -> None:
    signatures = [
        [(p.name, p.kind, p.default, p.annotation) for p in inspect.signature(taker).parameters.values()]
        for taker in (Plan, sample)
    ]
    assert signatures[0] == signatures[1]


def test_it_runs_as_sample_does(tmp_path: Path) -> None:
    planned = plan(path=tmp_path / "run")
    first = planned.run()
    second = sample(network(), (X, Y), F.cross_entropy, sampler=SAMPLER, num_draws=4, gap=2, burn_in=3, progress=False)
    again = dataclasses.replace(planned, path=None).run()
    assert len(first) == len(second) == len(again) == 4
    for draws in zip(first, second, again, strict=True):
        assert all(torch.equal(draws[0][name], other[name]) for other in draws[1:] for name in other)
    assert len(Posterior.open(tmp_path / "run", network())) == 4


def test_it_is_checked_when_it_is_made_and_does_not_change() -> None:
    with pytest.raises(ValueError, match="`gap` must be an integer of at least 1, got 0"):
        plan(gap=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().gap = 3  # type: ignore[misc]
    assert type(plan(num_draws=np.int64(4)).num_draws) is int


@pytest.mark.parametrize("stacked", [False, True])
def test_its_manifest_is_that_of_its_run(stacked: bool, tmp_path: Path) -> None:
    planned = plan(path=tmp_path / "run", num_chains=2, stacked=stacked, config={"made": "by hand"})
    weights = {name: x.clone() for name, x in planned.model.state_dict().items()}
    manifest = planned.manifest()
    assert not (tmp_path / "run").exists()
    assert all(torch.equal(x, weights[name]) for name, x in planned.model.state_dict().items())
    stored = planned.run().store.manifest
    assert json.loads(json.dumps({**manifest, "created": ""})) == json.loads(json.dumps({**stored, "created": ""}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "AdamMCMC(lr=0.001, sigma=0.01, sigma_along=2.0)\nchains   1, each with 4 draws 2 steps apart after 3 steps of"),
        ({"sampler": None, "batch_size": 16}, "sampler  Underdamped (default), batches of 16"),
        ({"burn_in": None}, "2 steps apart after burn-in; seed 0"),
        ({"burn_in": BurnIn(num_steps=70)}, "after 70 steps of burn-in"),
        ({"keep": 2, "path": "runs/a"}, "storage  last 2 draws in 'runs/a'"),
        ({}, "model    Sequential, 51 trainable weights"),
    ],
)
def test_it_can_be_read(changes: dict[str, Any], words: str) -> None:
    assert words in str(plan(**changes))
