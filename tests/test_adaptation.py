"""Burn-in: it reaches its target, learns the scales, waits for U, then freezes; nothing is collected meanwhile."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adammcmc import (
    AdamMCMC,
    AlwaysAccept,
    BurnIn,
    calibrate_sigma,
    kernels,
    sample_density,
    suggest,
    warm_up,
)
from adammcmc.kernels.scaling import Dense
from adammcmc.samplers.adaptation import Adaptation
from tests.optimizers import X, Y, adam_mcmc, closure, mala, network, seeded, underdamped


def gaussian(x: torch.Tensor) -> torch.Tensor:
    return -0.5 * x.square().sum(1)


CURVATURE = torch.logspace(0, 4, 12, dtype=torch.float64)


def stretched(x: torch.Tensor) -> torch.Tensor:
    return -0.5 * (x.square() * CURVATURE).sum(1)


@pytest.mark.parametrize("start", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("name", ["adam_mcmc", "mala", "underdamped", "exact_adam_mcmc"])
def test_the_target_acceptance_is_reached_from_anywhere(name: str, start: float) -> None:
    make = {
        "adam_mcmc": lambda: kernels.adam_mcmc(0.05, sigma=start),
        "mala": lambda: kernels.mala(start**2),
        "underdamped": lambda: kernels.underdamped(start),
        "exact_adam_mcmc": lambda: kernels.exact_adam_mcmc(0.05, sigma=start, momentum_spread=(2.0, 6.0)),
    }[name]
    initial = torch.randn(32, 20, dtype=torch.float64, generator=seeded())
    kernel, params = warm_up(gaussian, initial, make(), tune=BurnIn(num_steps=800), progress=False)
    _, info = sample_density(gaussian, params, kernel, num_steps=300, seed=1)
    assert abs(float(info.acceptance_rate.mean()) - kernel.target_acceptance) < 0.05  # type: ignore[attr-defined]


def test_the_noise_along_the_step_gives_the_proposal_its_acceptance() -> None:
    """2 Phi(-kappa) = 0.8 at the r = |u| / sigma that the chain has."""
    initial = torch.randn(64, 50, dtype=torch.float64, generator=seeded())
    kernel, params = warm_up(gaussian, initial, kernels.adam_mcmc(0.05, sigma=0.1), tune=BurnIn(num_steps=600), progress=False)
    _, info = sample_density(gaussian, params, kernel, num_steps=200, seed=1)
    assert isinstance(kernel, kernels.AdamMCMCKernel)
    r = info.step_to_noise
    kappa = r / (1 + kernel.proposal.sigma_along**2 * r**2).sqrt()
    proposal_only = torch.special.erfc(kappa / math.sqrt(2)).mean()
    assert abs(float(proposal_only) - 0.8) < 0.03


def test_the_preconditioner_learns_the_scales() -> None:
    """A = curvature^-1 for a Gaussian, as a dense metric and as a diagonal."""
    initial = torch.randn(64, 12, dtype=torch.float64, generator=seeded()) / CURVATURE.sqrt()
    for scaling in ("dense", "diagonal"):
        tune = BurnIn(num_steps=1500, scaling=scaling)  # type: ignore[arg-type]
        kernel, _ = warm_up(stretched, initial, kernels.underdamped(0.01), tune=tune, progress=False)
        assert isinstance(kernel, kernels.UnderdampedKernel)
        metric = kernel.preconditioner
        if isinstance(metric, Dense):
            found = metric.factor.square().sum(1)
        else:
            assert isinstance(metric, tuple)
            found = metric[0]
        torch.testing.assert_close(found, 1 / CURVATURE, rtol=0.25, atol=0)


def steps_until_flat(levels: torch.Tensor, num_params: int, max_steps: int = 50_000) -> int:
    """How long burn-in takes where U has these levels, and the acceptance is the target."""
    adaptation = Adaptation(BurnIn(max_steps=max_steps), target=0.85, num_params=num_params)
    nothing = torch.full((1,), math.nan)
    for step, level in enumerate(levels, 1):
        adaptation.observe(torch.tensor([0.85]), level[None], nothing, None, 1.0)
        if adaptation.is_done:
            assert adaptation.is_flat
            return step
    return len(levels) + 1


def test_burn_in_waits_until_u_is_flat() -> None:
    """U falls for 3,000 steps by forty standard deviations; with nothing to wait for it takes a few windows."""
    noise = 10 * torch.randn(20_000, dtype=torch.float64, generator=seeded())
    assert steps_until_flat(noise, 200) < 1500
    slope = 400 * (1 - torch.arange(20_000) / 3000).clamp_min(0)
    assert 3000 < steps_until_flat(noise + slope, 200) < 20_000


def test_noise_of_the_batch_does_not_pass_for_a_flat_u() -> None:
    """U, estimated on batches, has ten times its natural spread: a window must be long enough to see that below it."""
    noise = torch.randn(20_000, dtype=torch.float64, generator=seeded())
    natural = 10.0  # sqrt(P / 2)
    assert steps_until_flat(natural * noise, 200) < 1500
    assert steps_until_flat(10 * natural * noise, 200) > 3200  # resolution 2 s / sqrt(n / 2) below half of the natural spread


@pytest.mark.parametrize("num_frozen", [0, 2, 12])
def test_chains_that_do_not_move_are_named(num_frozen: int) -> None:
    """A few frozen chains hardly change the pooled acceptance."""
    adaptation = Adaptation(BurnIn(num_steps=60), target=0.85, num_params=10)
    rates = torch.full((100,), 0.9)
    rates[10 : 10 + num_frozen] = 1e-7
    for _ in range(60):
        adaptation.observe(rates, torch.zeros(100), torch.full((100,), math.nan), None, 1.0)
    assert adaptation.frozen == list(range(10, 10 + num_frozen))
    if num_frozen == 0:
        adaptation.warn()  # of nothing: warnings are errors here
        return
    named = {2: "2 of 100 chains do not move at the end of burn-in: 10, 11. Their", 12: "18, 19 and 2 more. Their"}[num_frozen]
    with pytest.warns(UserWarning, match=named):
        adaptation.warn()
    again = Adaptation(BurnIn(num_steps=60), target=0.85, num_params=10)
    again.load_state_dict(adaptation.state_dict())
    assert again.frozen == adaptation.frozen


@pytest.mark.parametrize("through", ["warm_up", "sample_density"])
def test_overdispersed_starts_that_freeze_are_named(through: str) -> None:
    """A quartic well: from 300 every proposal overshoots and is rejected."""
    initial = torch.cat([0.5 * torch.randn(19, 3, dtype=torch.float64, generator=seeded()), torch.full((1, 3), 300.0)])

    def steep(x: torch.Tensor) -> torch.Tensor:
        return -x.pow(4).sum(1)

    run = {
        "warm_up": lambda: warm_up(steep, initial, kernels.underdamped(0.05), tune=BurnIn(num_steps=150), progress=False),
        "sample_density": lambda: sample_density(
            steep, initial, kernels.underdamped(0.05), num_steps=152, burn_in=150, tune=BurnIn(), progress=False
        ),
    }[through]
    with pytest.warns(UserWarning, match="1 of 20 chains do not move at the end of burn-in: 19"):
        run()


def test_warming_up_warns_when_it_did_not_arrive() -> None:
    with pytest.warns(UserWarning, match="while U was still moving, and no further window fits into max_steps = 60: "):
        warm_up(gaussian, torch.full((10, 50), 1000.0), kernels.underdamped(1e-5), tune=BurnIn(max_steps=60), progress=False)


def test_nothing_is_collected_while_it_adapts() -> None:
    model = network()
    sampler = underdamped(model, fixed_data=True, step_size=None)
    sampler.step(closure(model))
    assert sampler.is_adapting
    with pytest.raises(RuntimeError, match="is still adapting its settings"):
        sampler.draw(model)
    assert "not draws yet" in str(sampler.health())
    with pytest.raises(ValueError, match="would still change the kernel while draws are kept"):
        sample_density(gaussian, torch.zeros(4, 2), kernels.mala(0.1), num_steps=100, burn_in=50, tune=BurnIn(num_steps=60))
    with pytest.raises(ValueError, match="make burn_in longer"):
        sample_density(gaussian, torch.zeros(4, 2), kernels.mala(0.1), num_steps=100, tune=BurnIn())


def test_settings_are_frozen_after_burn_in() -> None:
    model = network()
    sampler = underdamped(model, fixed_data=True, burn_in=80)
    for _ in range(80):
        sampler.step(closure(model))
    assert not sampler.is_adapting
    frozen = [dict(group) for group in sampler.param_groups]
    diagonal = [sampler.state[p]["preconditioner"].clone() for p in model.parameters()]
    for _ in range(50):
        sampler.step(closure(model))
    assert [g["lr"] for g in sampler.param_groups] == [g["lr"] for g in frozen]
    assert all(torch.equal(sampler.state[p]["preconditioner"], a) for p, a in zip(model.parameters(), diagonal, strict=True))
    draw = sampler.draw(model)
    before = {name: value.clone() for name, value in draw.items()}
    sampler.step(closure(model))
    assert all(torch.equal(draw[name], before[name]) for name in draw), "a draw is a copy"


def test_burn_in_that_cannot_finish_warns() -> None:
    model = network()
    sampler = underdamped(model, fixed_data=True, step_size=1e-6, burn_in=BurnIn(max_steps=60, window=20))

    def run() -> None:
        for _ in range(70):
            sampler.step(closure(model))

    with pytest.warns(UserWarning, match="while U was still moving"):
        run()
    assert not sampler.is_adapting


@pytest.mark.parametrize("make", [adam_mcmc, mala])
def test_optimizers_adapt(make) -> None:  # type: ignore[no-untyped-def]
    model = network()
    sampler = make(model, fixed_data=True, burn_in=600, sigma=1e-4)
    for _ in range(900):
        sampler.step(closure(model))
    assert abs(sampler.health().acceptance - sampler._target_acceptance) < 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_acceptance": 1.5}, "`target_acceptance` must lie between 0 and 1, got 1.5"),
        ({"num_steps": 0}, "`num_steps` must be at least 1, got 0"),
        ({"window": 0}, "`window` must be at least 1"),
    ],
)
def test_bad_settings_are_refused(options: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        BurnIn(**options)


def test_a_proposal_below_the_target_is_refused() -> None:
    with pytest.raises(ValueError, match="`proposal_acceptance` must exceed the target acceptance"):
        adam_mcmc(network(), burn_in=BurnIn(target_acceptance=0.9))


def test_a_test_that_accepts_everything_cannot_be_tuned_to() -> None:
    with pytest.raises(ValueError, match="there is nothing to adapt to"):
        underdamped(network(), step_size=None, acceptance=AlwaysAccept())
    with pytest.raises(ValueError, match="accepts every step, however long"):
        warm_up(gaussian, torch.zeros(4, 2), kernels.underdamped(0.1, acceptance=AlwaysAccept()), progress=False)
    model = network()
    sampler = underdamped(model, fixed_data=True, burn_in=60)
    for _ in range(60):
        sampler.step(closure(model))
    sampler.acceptance = AlwaysAccept()
    sampler.step(closure(model))
    assert bool(sampler.info.is_accepted)
    assert sampler.approximations() == ["no Metropolis correction"]


# --- suggestions ----------------------------------------------------------------------------------------------------


def networks() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], object]]:
    torch.manual_seed(0)
    images = torch.randn(300, 1, 8, 8)
    x = torch.randn(600, 4)
    return {
        "classifier": (
            nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)),
            (X, Y),
            F.cross_entropy,
        ),
        "regression": (
            nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 1)),
            (x, x[:, :1].sin() + 0.1 * torch.randn(600, 1)),
            nn.MSELoss(),
        ),
        "convolution": (
            nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)),
            (images, (images.mean((1, 2, 3)) * 20).clamp(-1.9, 1.9).add(2).long()),
            F.cross_entropy,
        ),
    }


@pytest.mark.parametrize("name", ["classifier", "regression", "convolution"])
def test_a_suggestion_reaches_its_acceptance(name: str) -> None:
    """On three different networks, without hand tuning, within 0.1."""
    model, data, loss = networks()[name]
    start = copy.deepcopy(model.state_dict())
    suggestion = suggest(model, data, loss, batch_size=100, num_steps=400, progress=False)  # type: ignore[arg-type]
    assert all(torch.equal(value, start[key]) for key, value in model.state_dict().items()), "the model is not touched"
    assert set(suggestion.reasons) == set(suggestion.options)
    assert all(word in str(suggestion) for word in ("lr =", "sigma =", "Bayes"))
    sampler = AdamMCMC(model.parameters(), num_data=len(data[0]), generator=seeded(), **suggestion.options)
    generator = torch.Generator().manual_seed(5)
    rates = []
    each = nn.MSELoss(reduction="none") if name == "regression" else lambda o, t: F.cross_entropy(o, t, reduction="none")
    for step in range(900):
        rows = torch.randperm(len(data[0]), generator=generator)[:100]
        sampler.step(lambda: each(model(data[0][rows]), data[1][rows]).flatten())  # noqa: B023
        if step >= 400:
            rates.append(float(sampler.info.acceptance_rate))
    assert abs(sum(rates) / len(rates) - 0.6) < 0.1


def test_calibrate_sigma_stops_where_confidence_meets_accuracy() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(2, (4000,), generator=generator)
    wrong = torch.rand(4000, generator=generator) < 0.2

    def draw(sigma: float) -> torch.Tensor:
        confidence = 1 - 0.5 * sigma
        said = torch.where(wrong, 1 - targets, targets)
        p = torch.full((4000, 2), 1 - confidence).scatter(1, said[:, None], confidence)
        return p[None].expand(3, -1, -1)

    found = calibrate_sigma(draw, targets, [0.1, 0.2, 0.3, 0.45, 0.6])
    assert found.sigma == 0.45
    assert found.is_bracketed
    assert [row.sigma for row in found.rows] == [0.1, 0.2, 0.3, 0.45], "it does not run further than it must"
    assert "heuristic" in str(found)
    missed = calibrate_sigma(draw, targets, [0.1, 0.2])
    assert not missed.is_bracketed
    assert "never fell" in str(missed)
    with pytest.raises(ValueError, match="apply softmax to logits"):
        calibrate_sigma(lambda sigma: torch.full((2, 4000, 2), -3.0), targets, torch.tensor([0.1]).numpy())
    with pytest.raises(ValueError, match="`sigmas` must be ascending"):
        calibrate_sigma(draw, targets, [0.2, 0.1])
    with pytest.raises(ValueError, match=r"of shape \(draws, 4000, classes\)"):
        calibrate_sigma(lambda sigma: torch.zeros(3), targets, [0.1])
