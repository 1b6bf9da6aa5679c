"""The draws of one run: saved, opened again, and what its chains were tuned to."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import adammcmc
from adammcmc import AdamMCMC, BurnIn, Gaussian, Posterior, StoreMismatch, Underdamped

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
ALGORITHM_1 = partial(AdamMCMC, lr=1e-2, sigma=1e-2, sigma_along=2.0, prior=Gaussian())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def sample(model: nn.Module, **options: Any) -> Posterior:
    defaults = {"num_draws": 6, "gap": 3, "burn_in": 4, "sampler": ALGORITHM_1, "progress": False}
    return adammcmc.sample(model, (X, Y), F.cross_entropy, **{**defaults, **options})


def same_draws(one: Posterior, other: Posterior) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(x, there[name]) for here, there in pairs for name, x in here.items())


def lines(posterior: Posterior) -> list[dict[str, Any]]:
    """The index, without what depends on the store and the clock."""
    return [{key: x for key, x in r.items() if key not in ("file", "bytes", "crc32", "seconds")} for r in posterior.made]


# --- save -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("keep", ["draws", "moments", 2])
def test_a_run_in_memory_is_saved_and_goes_on(keep: Any, stacked: bool, tmp_path: Path) -> None:
    options = {"num_chains": 2, "keep": keep, "stacked": stacked}
    memory = sample(network(), **options)
    assert memory.save(tmp_path / "run") == tmp_path / "run"
    opened = Posterior.open(tmp_path / "run", network())
    assert lines(opened) == lines(memory)
    assert same_draws(opened, memory)
    assert str(opened) == str(memory)
    assert opened.target == memory.target
    assert len(list((tmp_path / "run").rglob("draw-*"))) == {"draws": 12, "moments": 0, 2: 4}[keep]
    assert all(torch.equal(x, opened.moments().mean[name]) for name, x in memory.moments().mean.items())
    longer = sample(network(), **options, num_draws=9, path=tmp_path / "run", resume=True)
    whole = sample(network(), **options, num_draws=9)
    assert lines(longer) == lines(whole)
    assert same_draws(longer, whole)


def test_a_run_in_a_folder_is_copied(tmp_path: Path) -> None:
    there = sample(network(), path=tmp_path / "there", dtype=torch.bfloat16)
    there.save(tmp_path / "here")
    assert same_draws(Posterior.open(tmp_path / "here", network()), there)
    manifests = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("there", "here")]
    assert manifests[0]["model"] == manifests[1]["model"]


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    run = sample(network(), num_chains=2)
    run.save(tmp_path / "run")
    with pytest.raises(StoreMismatch, match="holds a run already"):
        run.save(tmp_path / "run")
    for part in (run[:3], run.chain(0)):
        with pytest.raises(ValueError, match="only a whole run can be saved"):
            part.save(tmp_path / "part")
    run.store._tensors.clear()  # type: ignore[attr-defined]
    with pytest.raises(KeyError):
        run.save(tmp_path / "broken")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


# --- settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
def test_a_run_from_the_settings_of_another_needs_no_tuning(stacked: bool) -> None:
    options: dict[str, Any] = {"num_chains": 2, "stacked": stacked, "gap": 5, "prior": Gaussian()}
    first = sample(network(), sampler=None, burn_in=400, num_draws=50, **options)
    settings = first.settings(1)
    assert sorted(settings) == ["inverse_temperature", "preconditioner", "step_size"]
    assert [a.shape for a in settings["preconditioner"]] == [p.shape for p in network().parameters()]
    again = sample(
        network(), sampler=partial(Underdamped, **settings), burn_in=0, num_draws=50, initial=[first[49]] * 2, **options
    )
    assert again.index[0]["step"] == 5
    told = again.settings(0)
    assert told["step_size"] == settings["step_size"]
    assert all(torch.equal(a, b) for a, b in zip(told["preconditioner"], settings["preconditioner"], strict=True))
    rates = [torch.tensor([h.acceptance for h in p.health()]).mean() for p in (first.chain(1), again)]
    assert 0.7 < rates[0] < 0.95
    assert abs(rates[0] - rates[1]) < 0.05


@pytest.mark.parametrize("stacked", [False, True])
def test_what_algorithm_1_was_tuned_to(stacked: bool) -> None:
    tuned = sample(network(), burn_in=BurnIn(num_steps=200), num_chains=2, stacked=stacked)
    settings = tuned.settings(0)
    assert sorted(settings) == ["inverse_temperature", "lr", "sigma", "sigma_along"]
    assert settings["lr"] == 1e-2
    assert settings["sigma"] != 1e-2
    assert settings["sigma_along"] != 2.0
    again = sample(network(), sampler=partial(AdamMCMC, **settings, prior=Gaussian()), num_draws=2)
    assert again.settings(0) == settings
