"""Health: each verdict on a case built for it, and none on a healthy network or where a self-test does not apply."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adammcmc import (
    MALA,
    AdamMCMC,
    AlwaysAccept,
    Barker,
    FullData,
    Gaussian,
    Health,
    Info,
    Penalty,
    Sampler,
    Sequential,
    TensorExamples,
    Underdamped,
    UniformBox,
)
from adammcmc.samplers.diagnostics import ess_bulk
from adammcmc.samplers.health import _effective_draws, beta_eff, read_health
from adammcmc.samplers.running_sums import RunningSums
from tests.optimizers import X, Y, network, seeded


def run(sampler: Sampler, loss, num_steps: int) -> Health:  # type: ignore[no-untyped-def]
    for _ in range(num_steps):
        sampler.step(loss)
    return sampler.health()


def kinds(health: Health) -> list[str]:
    return [finding.kind for finding in health.findings]


def free(size: int, spread: float = 1.0) -> nn.Parameter:
    """Weights that no loss reaches: their posterior is their prior, from which they start."""
    return nn.Parameter(spread * torch.randn(size, generator=seeded(1)))


def per_example(model: nn.Module, rows: torch.Tensor | slice = slice(None)):  # type: ignore[no-untyped-def]
    return lambda: F.cross_entropy(model(X[rows]), Y[rows], reduction="none")


def test_a_healthy_network_has_no_findings() -> None:
    model = network()
    sampler = Underdamped(model.parameters(), num_data=64, prior=Gaussian(), fixed_data=True, generator=seeded())
    while sampler.is_adapting:
        sampler.step(per_example(model))
    health = run(sampler, per_example(model), 5000)
    assert health.is_healthy, health.verdict
    assert "no complaint" in str(health)
    assert abs(health.acceptance - health.twice_rises) < 0.03
    assert abs(health.temperature - 1) < 0.2
    assert len(health.temperatures) == 4
    assert health.noise == 0
    assert health.beta_eff == 1
    assert health.effective_draws > 50


def test_the_temperature_is_that_of_the_target() -> None:
    """A Gaussian: E[theta . grad U] / P = 1 within its error, for each layer."""
    p, q = free(60), free(30, 3.0)
    prior = Gaussian((1.0, 3.0))
    sampler = MALA([p, q], 0.05, num_data=1, prior=prior, fixed_data=True, generator=seeded())
    health = run(sampler, lambda: 0.0 * (p.sum() + q.sum()), 4000)
    assert abs(health.temperature - 1) < 0.06
    assert "temperature" not in kinds(health)


def test_no_prior_is_no_posterior() -> None:
    model = network()
    health = run(AdamMCMC(model.parameters(), num_data=64, sigma=1e-2, sigma_along=2.0), per_example(model), 300)
    assert "no posterior" in kinds(health)
    assert "there is no posterior to sample" in health.verdict
    assert math.isnan(health.temperature)


def test_few_steps_are_not_judged() -> None:
    model = network()
    sampler = Underdamped(model.parameters(), 1e-2, num_data=64, prior=Gaussian(), fixed_data=True)
    assert kinds(sampler.health()) == ["cannot tell"]
    assert kinds(run(sampler, per_example(model), 50)) == ["cannot tell"]


def test_a_slow_chain_is_undecided() -> None:
    p = nn.Parameter(torch.zeros(200))
    health = run(Underdamped([p], 1e-3, num_data=1, prior=Gaussian(), fixed_data=True), lambda: 0.0 * p.sum(), 1500)
    assert "cannot tell" in kinds(health)


def test_a_chain_that_cannot_move_is_stuck() -> None:
    model = network()
    sampler = MALA(model.parameters(), 10.0, num_data=64, prior=Gaussian(), fixed_data=True)
    health = run(sampler, per_example(model), 400)
    assert kinds(health) == ["stuck"]
    assert "stuck: 0.0%" in health.verdict


def test_a_loss_without_influence_is_found() -> None:
    """The mean taken for the sum: num_data forgotten."""
    model = network()
    sampler = AdamMCMC(model.parameters(), lr=1e-3, num_data=1, sigma=1e-3, sigma_along=3.0, prior=Gaussian(), fixed_data=True)
    health = run(sampler, lambda: per_example(model)().mean(), 600)
    assert "no influence" in kinds(health)
    assert "check num_data" in health.verdict


@pytest.mark.parametrize("test", [FullData(), Barker(32), Sequential(0.05, 32), Penalty(32)], ids=str)
def test_the_influence_of_the_loss_is_known_for_tests_on_other_examples(test: Any) -> None:
    """Algorithm 1 with a test that does not evaluate the step's batch: the change of U is still known."""
    model = network()
    examples = TensorExamples(lambda a, b: F.cross_entropy(model(a), b, reduction="none"), X, Y)
    options: dict[str, Any] = {"num_data": 64, "sigma": 3e-2, "sigma_along": 2.0, "prior": Gaussian(), "generator": seeded()}
    sampler = AdamMCMC(model.parameters(), acceptance=test, examples=examples, **options)
    health = run(sampler, per_example(model, slice(32)), 300)
    assert health.loss_influence > 0.05
    assert "no influence" not in kinds(health)


def test_the_influence_is_unknown_if_the_loss_is_never_evaluated() -> None:
    model = network()
    sampler = AdamMCMC(model.parameters(), num_data=64, sigma=1e-2, prior=Gaussian(), acceptance=AlwaysAccept())
    health = run(sampler, per_example(model), 300)
    assert math.isnan(health.loss_influence)
    assert "no influence" not in kinds(health)


def test_a_minibatch_test_is_too_hot_and_by_how_much() -> None:
    """The forecast from the noise s agrees with what the chain does: U is quadratic, its temperature can be read off."""
    generator = torch.Generator().manual_seed(3)
    centres = 3 * torch.randn(2000, generator=generator).double()
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    sampler = AdamMCMC([p], lr=0.0, num_data=2000, sigma=0.03, prior=Gaussian(100.0), generator=seeded())
    draws = []
    for _ in range(3500):
        rows = torch.randint(2000, (50,), generator=generator)
        sampler.step(lambda: 0.5 * (p - centres[rows]) ** 2)  # noqa: B023
        draws.append(float(p.detach()))
    health = sampler.health()
    assert "too hot" in kinds(health)
    assert health.noise > 2
    variance = torch.tensor(draws[500:]).var() * 2000  # 1 at the right temperature
    assert 0.6 < float(variance) * health.beta_eff < 1.6
    assert "biased" not in kinds(health), "the identity is not valid for an estimated ratio"


def test_beta_eff_is_the_table() -> None:
    noise = torch.tensor([0.1, 0.5, 1, 2, 4, 10, 100, 500], dtype=torch.float64)
    expected = torch.tensor([0.96, 0.82, 0.69, 0.50, 0.32, 0.15, 0.016, 0.003], dtype=torch.float64)
    torch.testing.assert_close(beta_eff(noise), expected, rtol=0.04, atol=0.003)


def test_unknown_noise_is_reported() -> None:
    model = network()
    sampler = AdamMCMC(model.parameters(), lr=1e-3, num_data=64, sigma=3e-3, sigma_along=2.0, prior=Gaussian())
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        rows = torch.randint(64, (16,), generator=generator)
        sampler.step(lambda: F.cross_entropy(model(X[rows]), Y[rows]))  # noqa: B023
    health = sampler.health()
    assert "unknown noise" in kinds(health)
    assert 'reduction="none"' in health.verdict


def test_proposals_outside_of_the_prior_do_not_hide_the_noise() -> None:
    generator = torch.Generator().manual_seed(3)
    centres = torch.randn(500, generator=generator).double()
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    sampler = AdamMCMC([p], lr=0.0, num_data=500, sigma=0.1, prior=UniformBox(-0.15, 0.15), generator=seeded())
    for _ in range(800):
        rows = torch.randint(500, (100,), generator=generator)
        sampler.step(lambda: 0.5 * (p - centres[rows]) ** 2)  # noqa: B023
    health = sampler.health()
    assert health.rejected_not_finite > 0.05
    assert health.noise > 0.3
    assert "unknown noise" not in kinds(health)


def test_u_that_was_only_estimated_is_not_judged() -> None:
    model = network()
    sampler = AdamMCMC(model.parameters(), lr=1e-4, num_data=64, sigma=1e-4, sigma_along=2.0, prior=Gaussian())
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        rows = torch.randint(64, (32,), generator=generator)
        sampler.step(lambda: F.cross_entropy(model(X[rows]), Y[rows], reduction="none"))  # noqa: B023
    assert math.isnan(sampler.health().effective_draws)


def test_an_approximate_kernel_on_minibatches_is_not_called_healthy() -> None:
    model = network()
    sampler = AdamMCMC(
        model.parameters(), lr=1e-3, num_data=64, sigma=3e-3, sigma_along=2.0, prior=Gaussian(), generator=seeded()
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(600):
        rows = torch.randperm(64, generator=generator)[:60]
        sampler.step(lambda: F.cross_entropy(model(X[rows]), Y[rows], reduction="none"))  # noqa: B023
    assert not sampler.health().is_healthy


def test_algorithm_1_is_found_to_be_biased() -> None:
    """At a healthy acceptance it slides down its momentum. The exact kernel on the same target is not called biased."""
    p = free(100)
    sigma = 0.13
    biased = AdamMCMC(
        [p], lr=0.35 * sigma, num_data=1, sigma=sigma, sigma_along=3.0, prior=Gaussian(), fixed_data=True, generator=seeded()
    )
    run(biased, lambda: 0.0 * p.sum(), 1000)
    biased.reset_health()  # its transient is over
    health = run(biased, lambda: 0.0 * p.sum(), 2000)
    assert "biased" in kinds(health), health.verdict
    assert "samples a distribution other than its target" in health.verdict
    assert 0.3 < health.acceptance < 0.7
    q = free(100)
    exact = MALA([q], 0.25, num_data=1, prior=Gaussian(), fixed_data=True, generator=seeded())
    assert kinds(run(exact, lambda: 0.0 * q.sum(), 2000)) == ["no influence"], "there is indeed no loss"


def test_a_chain_on_its_way_is_not_at_rest() -> None:
    """An exact kernel, started far out: the identity fails because the chain is not in equilibrium, and says so."""
    p = nn.Parameter(torch.full((300,), 8.0))
    health = run(MALA([p], 2e-4, num_data=1, prior=Gaussian(), fixed_data=True), lambda: 0.0 * p.sum(), 1200)
    assert "not at rest" in kinds(health) or "cannot tell" in kinds(health)
    assert "biased" not in kinds(health)
    assert not health.is_healthy


def test_an_unadjusted_chain_with_long_steps_is_hotter() -> None:
    p = free(50)
    sampler = MALA([p], 0.6, num_data=1, prior=Gaussian(), fixed_data=True, acceptance=AlwaysAccept(), generator=seeded())
    health = run(sampler, lambda: 0.0 * p.sum(), 4000)
    assert "temperature" in kinds(health)
    assert "hotter than the target" in health.verdict
    assert abs(health.temperature - 1 / (1 - 0.6 / 2)) < 0.1  # the variance of unadjusted Langevin on a Gaussian


def test_a_layer_has_its_own_temperature() -> None:
    """The unadjusted sampler again, its step long for one layer only."""
    named = [("stiff", free(40)), ("soft", free(400, 10.0))]
    prior = Gaussian((1.0, 10.0))
    sampler = MALA(named, 0.5, num_data=1, prior=prior, fixed_data=True, acceptance=AlwaysAccept(), generator=seeded())
    health = run(sampler, lambda: 0.0 * sum(p.sum() for _, p in named), 3000)
    assert health.temperatures["parameter 'stiff'"] > 1.2
    assert abs(health.temperatures["parameter 'soft'"] - 1) < 0.2


def test_one_layer_at_another_temperature_is_named() -> None:
    level, noise = 50 + 5 * autoregressive(3000, 5), torch.randn(300, 2, generator=seeded(), dtype=torch.float64)
    monitor = watched(level, ["stiff", "soft"], [40, 4000])
    for point in noise:
        monitor.add_products(torch.tensor([40.0, 4000.0]) * (torch.tensor([1.3, 1.0]) + 0.1 * point))
    (finding,) = read_health(monitor, **{**CONTEXT, "is_exact": False}).findings
    assert finding.kind == "temperature"
    assert finding.says.startswith("layers at a temperature other than the target's: stiff 1.3")
    assert "soft" not in finding.says
    assert kinds(read_health(monitor, **CONTEXT)) == ["cannot tell"], "an exact chain has not mixed"


def test_there_is_no_temperature_where_the_edge_of_the_prior_is_met() -> None:
    p = nn.Parameter(torch.zeros(3))
    sampler = MALA([p], 0.1, num_data=1, prior=UniformBox(-1, 1), fixed_data=True)
    health = run(sampler, lambda: 0.0 * p.sum(), 1000)
    assert health.rejected_not_finite > 0
    assert math.isnan(health.temperature)
    assert health.temperatures == {}
    assert "temperature" not in kinds(health)


def test_weights_that_a_batch_norm_cancels_have_no_temperature() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).train()
    names = list(model.named_parameters())
    sampler = Underdamped(names, 0.03, num_data=64, prior=Gaussian(), fixed_data=True)
    health = run(sampler, per_example(model), 400)
    assert "parameter '0.weight'" not in health.temperatures
    assert "parameter '3.weight'" in health.temperatures


def test_full_data_has_no_noise() -> None:
    model = network()
    examples = TensorExamples(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), X, Y)
    sampler = Underdamped(
        model.parameters(), 0.02, num_data=64, prior=Gaussian(), acceptance=FullData(), examples=examples, generator=seeded()
    )
    health = run(sampler, per_example(model, slice(0, 32)), 400)
    assert health.noise == 0
    assert "too hot" not in kinds(health)


def watched(levels: torch.Tensor, layers: Sequence[str] = ("a",), sizes: Sequence[int] = (50,)) -> RunningSums:
    """A monitor of a chain with these values of U, and nothing else known."""
    monitor = RunningSums(torch.device("cpu"), layers, sizes)
    zero, nan = torch.zeros(1, dtype=torch.float64), torch.full((1,), math.nan, dtype=torch.float64)
    rate = torch.full((1,), 0.8, dtype=torch.float64)
    accepted = torch.ones(1, dtype=torch.float64)
    for level in levels:
        monitor.add((Info(zero, nan, zero, nan, rate, accepted, accepted, zero, level[None], nan, zero), 1.0))
    return monitor


def autoregressive(num: int, memory: float, seed: int = 0) -> torch.Tensor:
    """exp(-t / memory) is its correlation at lag t."""
    x = torch.randn(num, generator=seeded(seed), dtype=torch.float64)
    a = math.exp(-1 / memory)
    for t in range(1, num):
        x[t] = a * x[t - 1] + math.sqrt(1 - a * a) * x[t]
    return x


CONTEXT: dict[str, Any] = {"is_exact": True, "knows_potential": True, "has_proper_prior": True, "has_edge": False}


@pytest.mark.parametrize("memory", [1, 10, 40, 200])
def test_effective_draws_are_those_of_the_diagnostics(memory: float) -> None:
    """Whether stretches of the trace are longer than the memory of the chain or shorter."""
    x = 300 + 7 * autoregressive(10_000, memory)
    length = 32  # of a stretch: 10,000 steps in at most 512
    found = _effective_draws(x[: 312 * length].view(312, length).mean(1), length, float(x.var()))
    assert found == pytest.approx(float(ess_bulk(x[None])), rel=0.25)


def test_the_monitor_agrees_with_the_diagnostics() -> None:
    x = 50 + 5 * autoregressive(3000, 20)
    health = read_health(watched(x), **CONTEXT)
    assert health.is_healthy, health.verdict
    assert health.effective_draws == pytest.approx(float(ess_bulk(x[None])), rel=0.25)


@pytest.mark.parametrize(("size", "word"), [(-60.0, "falling"), (60.0, "rising")])
def test_a_trend_is_reported_with_its_size_and_worth_few_draws(size: float, word: str) -> None:
    x = 50 + 5 * autoregressive(1500, 5) + torch.linspace(0, size, 1500)
    health = read_health(watched(x), **CONTEXT)
    assert kinds(health) == ["cannot tell"]
    assert health.effective_draws < 3
    third = abs(float(x[992:1488].mean() - x[:496].mean()))
    assert f"U is still {word}: by {third:.3g} (" in health.verdict
    assert "standard deviations) from the first third of the run to the last" in health.verdict


def test_a_failed_burn_in_is_forgiven_when_u_has_settled() -> None:
    level = 50 + 5 * autoregressive(1500, 5)
    failed = {**CONTEXT, "burn_in": "burn-in ended too early"}
    assert read_health(watched(level), **failed).is_healthy
    assert kinds(read_health(watched(level[:100]), **failed)) == ["cannot tell", "burn-in"]
    assert kinds(read_health(watched(level - torch.linspace(0, 60, 1500)), **failed)) == ["cannot tell", "burn-in"]
    assert "burn-in" in kinds(read_health(watched(level), **{**failed, "knows_potential": False}))


@pytest.mark.parametrize("num_steps", [1, 15, 16, 17, 1023, 1024, 1025, 3000])
def test_sums_are_right_at_every_length(num_steps: int) -> None:
    monitor, rates = RunningSums(torch.device("cpu")), torch.rand(num_steps, generator=seeded(), dtype=torch.float64)
    for rate in rates:
        monitor.add((Info(*(rate[None] for _ in Info._fields)), 1.0))
    health = read_health(monitor, **CONTEXT)
    assert health.num_steps == num_steps
    assert monitor.totals()[0]["rate"] == pytest.approx(float(rates.sum()), rel=1e-9)
    per_batch = 16 * monitor.steps.per_batch
    whole = num_steps // per_batch * per_batch
    assert not whole or health.acceptance == pytest.approx(float(rates[:whole].mean()), rel=1e-9)


def test_separate_sums_equal_those_of_chains_run_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    together = RunningSums(torch.device("cpu"), ["a", "b"], [3, 4], num_chains=3)
    alone = [RunningSums(torch.device("cpu"), ["a", "b"], [3, 4]) for _ in range(3)]
    scale = torch.tensor([10.0, 20.0, 5.0], dtype=torch.float64)
    for step in range(333):
        info = Info(*(torch.rand(3, generator=generator, dtype=torch.float64) for _ in Info._fields))
        products = torch.rand(3, 2, generator=generator, dtype=torch.float64)
        together.add((info, scale))
        for c, monitor in enumerate(alone):
            monitor.add((Info(*(field[c : c + 1] for field in info)), float(scale[c])))
        if step % 10 == 0:
            together.add_products(products)
            for c, monitor in enumerate(alone):
                monitor.add_products(products[c : c + 1])
    assert together.totals() == [pytest.approx(monitor.totals()[0]) for monitor in alone]
    for c, monitor in enumerate(alone):
        found, expected = read_health(together, c, **CONTEXT), read_health(monitor, **CONTEXT)
        assert found.acceptance == pytest.approx(expected.acceptance)
        assert found.temperatures == pytest.approx(expected.temperatures)
        for part in ("steps", "products", "trace"):
            torch.testing.assert_close(getattr(together, part).means(c), getattr(monitor, part).means(0))
