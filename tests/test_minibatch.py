"""Langevin dynamics on minibatches: drag balances the noise of their gradients, and two step sizes give the error."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import adammcmc
from adammcmc import BurnIn, DataDensity, Density, Gaussian, MinibatchLangevin, kernels
from adammcmc.samplers.health import Context, read_health
from adammcmc.samplers.running_sums import RunningSums
from adammcmc.samplers.side_by_side import SideBySide, compare
from adammcmc.target.data import as_data

GENERATOR = torch.Generator().manual_seed(0)
SLOPES = torch.randn(64, 2, dtype=torch.float64, generator=GENERATOR)
SLOPES = (SLOPES - SLOPES.mean(0)) @ torch.tensor([[0.15, 0.0], [0.04, 0.05]], dtype=torch.float64)
"""Of the losses of 64 examples, which add up to nothing: batches bring noise, and the posterior is the prior, N(0, 1)."""
TARGET = DataDensity(lambda theta, slope: slope @ theta, SLOPES, prior=Gaussian(1.0), batch_size=4)


def excess(kernel: kernels.UnderdampedKernel, num_chains: int = 4000) -> tuple[float, float]:
    """By how much theta^2 is above 1 along the noise, and its standard error: exact starts, equal times."""
    h = float(kernel.step_size)  # type: ignore[arg-type]
    along = torch.linalg.eigh(SLOPES.T @ SLOPES).eigenvectors[:, -1]
    start = torch.randn(num_chains, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    lengths = {"num_steps": round(16 / h), "gap": round(1 / h), "burn_in": round(6 / h)}
    draws, _ = adammcmc.sample_density(TARGET, start, kernel, seed=2, progress=False, **lengths)
    squares = (draws @ along).square().mean(1)
    return float(squares.mean()) - 1, float(squares.std()) / math.sqrt(num_chains)


def test_drag_makes_the_heat_of_batches_second_order_in_the_step() -> None:
    (long, error), (short, its) = (excess(kernels.minibatch_langevin(h, 0.5)) for h in (0.2, 0.1))
    assert short > 4.5 * its, "an error that can be seen"
    assert long - 3 * short > -4.5 * math.hypot(error, 3 * its), "second order: a factor of 4, or somewhat more"
    assert long - 8 * short < 4.5 * math.hypot(error, 8 * its)
    # without drag it is of first order, and much larger
    (hot, _), (warm, _) = (excess(kernels.underdamped(h, 0.5, acceptance=adammcmc.AlwaysAccept())) for h in (0.2, 0.1))
    assert warm > 10 * short
    assert hot / warm < 2.5


def test_a_kick_and_its_drag_leave_the_momentum_as_it_is() -> None:
    """E[(p - c d (d.p) - d)^2] = 1 in every direction, to second order in |d|^2; and exactly what the formula says."""
    d = torch.tensor([[0.3, 0.0]], dtype=torch.float64)
    kernel = kernels.minibatch_langevin(1.0, noise_share=0.5)
    moved = kernel._dragged((torch.tensor([[2.0, 7.0]], dtype=torch.float64),), (d,), 1.0)[0]
    assert torch.allclose(moved, torch.tensor([[2 * math.exp(-0.5 * 0.5 * 0.09), 7.0]], dtype=torch.float64))
    still = kernel._dragged((d,), (torch.zeros_like(d),), 1.0)[0]
    assert torch.equal(still, d), "no gradient, no drag"
    broken = kernel._dragged((d,), (d * math.nan,), 1.0)[0]
    assert torch.equal(broken, d), "a chain that freezes keeps its momentum"


def test_the_prior_makes_no_drag() -> None:
    """Its pull is no noise: with a loss that is zero, the kernel is the unadjusted one, bit for bit."""
    flat = DataDensity(lambda theta, x: 0 * x @ theta, SLOPES, prior=Gaussian(1.0), batch_size=4)
    start = torch.ones(3, 2, dtype=torch.float64)
    pair = kernels.minibatch_langevin(0.3, 0.5), kernels.underdamped(0.3, 0.5, acceptance=adammcmc.AlwaysAccept())
    one, other = (adammcmc.sample_density(flat, start, k, num_steps=20, progress=False).draws for k in pair)
    assert torch.equal(one, other)
    assert Density(lambda x: -x.square().sum(1)).prior_part((start,)) is None


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="noise_share"):
        kernels.minibatch_langevin(0.1, noise_share=share)


# --- the optimizer ------------------------------------------------------------------------------------------------------


class Regression:
    """A linear regression: its posterior is Gaussian, with known mean and covariance."""

    def __init__(self, num_data: int = 400) -> None:
        made = torch.Generator().manual_seed(4)
        self.x = torch.randn(num_data, 6, dtype=torch.float64, generator=made) * torch.linspace(0.3, 2, 6)
        self.y = self.x @ torch.linspace(-1, 1, 6).double() + 0.5 * torch.randn(num_data, dtype=torch.float64, generator=made)
        self.covariance = torch.linalg.inv(self.x.T @ self.x / 0.25 + torch.eye(6, dtype=torch.float64))
        self.mean = self.covariance @ self.x.T @ self.y / 0.25
        self.w = nn.Parameter(self.mean.clone())

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return 0.5 * (x @ self.w - y) ** 2 / 0.25

    def sampler(self, **options) -> MinibatchLangevin:  # type: ignore[no-untyped-def]
        usual = {"num_data": len(self.x), "batch_size": 10, "prior": Gaussian(1.0)}
        return MinibatchLangevin([self.w], **(usual | {"generator": torch.Generator().manual_seed(3)} | options))

    def batches(self) -> adammcmc.target.data.Data:
        return as_data((self.x, self.y), 10, order="independent")

    def draws(self, sampler: MinibatchLangevin, batches: adammcmc.target.data.Data, num_steps: int) -> torch.Tensor:
        kept = []
        for _ in range(num_steps):
            sampler.step(self.loss, next(batches))
            kept.append(self.w.detach().clone())
        return torch.stack(kept)


def test_burn_in_finds_a_step_with_a_small_error() -> None:
    """Of a Gaussian posterior: mean and spread of the draws, and what is said of them."""
    problem = Regression()
    sampler, batches = problem.sampler(burn_in=BurnIn(max_steps=8_000)), problem.batches()
    while sampler.is_adapting:
        sampler.step(problem.loss, next(batches))
    adaptation = sampler.chains.adaptation
    assert isinstance(adaptation, SideBySide)
    assert adaptation.complaint() is None
    assert adaptation.bias is not None
    draws = problem.draws(sampler, batches, 9_000)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(problem.covariance), (draws - problem.mean).T, upper=False).T
    blocks = white.view(30, -1, 6)
    for values, truth in ((blocks.mean(1), 0.0), (blocks.square().mean((1, 2)), 1.0)):
        off, error = values.mean(0) - truth, values.std(0) / math.sqrt(30)
        assert bool((off.abs() < 0.08 + 4.5 * error).all()), (off, error)
    assert [finding.kind for finding in sampler.health().findings] == ["approximate"]
    assert "of the posterior's spread" in sampler.health().verdict
    record = sampler.warm_up
    assert record is not None
    assert record.is_settled
    again = MinibatchLangevin([problem.w], num_data=400, batch_size=10, prior=Gaussian(1.0), **record.settings)
    assert not again.is_adapting
    assert again.param_groups[0]["lr"] == sampler.param_groups[0]["lr"]


@pytest.mark.parametrize("factor", [1.4, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_error_that_is_reported_is_the_error_there_is(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps that are too long, against the closed form: within a factor of two, and no false calm."""
    problem = Regression()
    sampler, batches = problem.sampler(burn_in=BurnIn(max_steps=16_000)), problem.batches()
    adaptation = sampler.chains.adaptation
    assert isinstance(adaptation, SideBySide)
    monkeypatch.setattr("adammcmc.samplers.side_by_side._TOLERANCE", math.inf)
    set_step = SideBySide._set_step

    def longer(self: SideBySide, *args, **options) -> None:  # type: ignore[no-untyped-def]
        set_step(self, *args, **options)
        if self._metric_in_use is not None:
            self._h = factor * self._square**-0.5

    monkeypatch.setattr(SideBySide, "_set_step", longer)
    while sampler.is_adapting:
        sampler.step(problem.loss, next(batches))
    assert adaptation.bias is not None
    estimate, error = adaptation.bias
    draws = problem.draws(sampler, batches, 7_000)
    outputs = (draws - problem.mean) @ problem.x[:100].T
    truth = (problem.x[:100] @ problem.covariance * problem.x[:100]).sum(1).sqrt()
    measured = float((outputs.square().mean(0).sqrt() / truth).mean()) - 1
    assert measured > 0.1, "hot enough to be seen"
    assert measured / 2 - 2 * error < estimate < 2 * measured + 2 * error, (estimate, error, measured)
    assert sampler.health().findings[0].kind == "too hot"


def test_without_the_batch_the_error_is_not_known_and_that_is_said() -> None:
    """A closure does not show its examples."""
    problem = Regression()
    sampler, batches = problem.sampler(burn_in=BurnIn(num_steps=600)), problem.batches()

    def steps(number: int) -> None:
        for _ in range(number):
            batch = next(batches)
            sampler.step(lambda: problem.loss(batch))  # noqa: B023

    with pytest.warns(UserWarning, match="could not be estimated|still moving"):
        steps(600)
    assert not sampler.is_adapting
    steps(300)
    assert sampler.chains.adaptation is not None
    assert all(map(math.isnan, sampler.chains.adaptation.bias or [math.nan]))
    assert "of the posterior's spread" not in sampler.health().verdict
    assert sampler.health().grade != "sound"


@pytest.mark.parametrize(
    ("bias", "kind", "words"),
    [
        ([0.01, 0.004], "approximate", "within 1.8% of the posterior's spread"),
        ([-0.004, 0.01], "approximate", "within 2.4%"),
        ([0.18, 0.02], "too hot", "factor of about 1.4 in temperature"),
        ([-0.2, 0.02], "cannot tell", "too short"),
    ],
)
def test_what_is_said_of_an_error(bias: list[float], kind: str, words: str) -> None:
    problem = Regression()
    sampler, batches = problem.sampler(step_size=0.002), problem.batches()
    problem.draws(sampler, batches, 800)
    monitor = sampler.chains.monitor
    assert isinstance(monitor, RunningSums)
    context = sampler.health_state()["context"] | {"bias": bias}
    findings = read_health(monitor, **context).findings
    assert any(f.kind == kind and words in f.says for f in findings), findings
    assert read_health(monitor, **(context | {"bias": None})).grade == "undecided"
    assert Context(**context).bias == bias


def test_two_spreads_and_the_error_of_their_ratio() -> None:
    """Independent values, a tenth wider: the ratio is found, and its standard error is that of many repetitions."""
    values = torch.randn(300, 2, 1, 400, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = values * torch.tensor([1.0, 2.0, 3.0, 0.5, 0.1])
    found = torch.tensor([compare(1.1 * long, short) for long, short in values])
    assert abs(float(found[:, 0].mean()) - 0.1) < 0.01
    assert abs(float(found[:, 1].mean()) / float(found[:, 0].std()) - 1) < 0.15
    # a slow wander of the whole run adds to the spread, and nothing to what is wider
    wander = torch.linspace(-3, 3, 400, dtype=torch.float64)[:, None]
    slow = torch.tensor([compare(1.1 * long + wander, short + wander) for long, short in values])
    assert 0.005 < float(slow[:, 0].mean()) < 0.05
    assert float(slow[:, 1].mean()) < float(found[:, 1].mean())


def test_likely_mistakes_are_named() -> None:
    problem = Regression()
    with pytest.raises(ValueError, match="at most half"):
        problem.sampler(batch_size=400)
    with pytest.raises(ValueError, match="or neither"):
        problem.sampler(preconditioner=[torch.ones(6, dtype=torch.float64)])
    with pytest.raises(TypeError, match="acceptance"):
        problem.sampler(acceptance=adammcmc.FullData())


# --- in one call --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:burn-in ended")  # far too early, for so few steps
@pytest.mark.parametrize("stacked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_in_one_call(stacked: bool) -> None:
    problem = Regression()
    x, y = problem.x.float(), (problem.y > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    posterior = adammcmc.sample(
        model,
        (x, y),
        F.cross_entropy,
        sampler=MinibatchLangevin,
        batch_size=20,
        num_draws=30,
        gap=10,
        burn_in=4000,
        num_chains=2,
        stacked=stacked,
        progress=False,
    )
    assert len(posterior) == 60
    assert "minibatch Langevin" in posterior.store.manifest["target"]
    assert all(health.grade != "sound" for health in posterior.health())
    assert posterior.warm_up[0] is not None
    with pytest.raises(ValueError, match="at most half"):
        adammcmc.sample(model, (x, y), F.cross_entropy, sampler=MinibatchLangevin, num_draws=2, progress=False)


@pytest.mark.filterwarnings("ignore:burn-in ended")
def test_a_metric_of_whole_layers_is_learnt_too() -> None:
    torch.manual_seed(0)
    problem = Regression()
    x, y = problem.x.float(), (problem.y > 0).long()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    options = {"num_data": 400, "batch_size": 20, "prior": Gaussian(1.0), "preconditioner": "kron"}
    sampler = MinibatchLangevin(model.parameters(), burn_in=BurnIn(num_steps=1500), **options)
    batches = as_data((x, y), 20, order="independent")

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    while sampler.is_adapting:
        sampler.step(loss, next(batches))
    assert "left" in sampler.state[model[0].weight]
    assert replace(sampler.kernel(), noise_share=0.5).describe().endswith("approximate: no Metropolis correction")
