"""The functional API with examples: invariance from exact draws for every test, with and without a control variate.

The target is a location with a log-cosh loss on heavy-tailed data, whose distribution function is known from a grid.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

import adammcmc
from adammcmc import (
    Barker,
    BurnIn,
    Confidence,
    ControlVariate,
    DataDensity,
    FullData,
    Gaussian,
    Info,
    Minibatch,
    Penalty,
    PerExampleLossRequired,
    Sequential,
    Tuna,
    UniformBox,
    kernels,
    sample_density,
    warm_up,
)
from adammcmc.acceptance import DerivativeBound, beta_eff
from adammcmc.target.randomness import Generators

GRID = torch.linspace(-1.2, 1.2, 4001, dtype=torch.float64)


def data(n: int) -> Tensor:
    """Student's t with 3 degrees of freedom, by quantiles in a shuffled order."""
    places = (torch.randperm(n, generator=torch.Generator().manual_seed(0)).double() + 0.5) / n
    return torch.from_numpy(stats.t.ppf(places.numpy(), 3)) + 0.1


def loss(params: Tensor, x: Tensor) -> Tensor:
    """log cosh(x - theta): derivatives of order 1, 2, 3 are at most 1, 1, 4 / (3 sqrt 3)."""
    z = (x - params[0]).abs()
    return z + F.softplus(-2 * z) - math.log(2)


class Truth:
    """The posterior on a grid, under a normal prior of scale 1."""

    def __init__(self, x: Tensor, lam: float = 1.0) -> None:
        z = (x - GRID[:, None]).abs()
        level = -lam * (z + F.softplus(-2 * z)).sum(1) - GRID.square() / 2
        weights = (level - level.max()).exp()
        weights /= weights.sum()
        self.steps = weights.cumsum(0)
        mean = float((weights * GRID).sum())
        self.sd = float((weights * (GRID - mean).square()).sum().sqrt())

    def draw(self, count: int, seed: int = 0) -> Tensor:
        u = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return self._between(u, self.steps, GRID + (GRID[1] - GRID[0]) / 2)[:, None]

    def cdf(self, at: Any) -> Any:
        return self._between(torch.as_tensor(at), GRID + (GRID[1] - GRID[0]) / 2, self.steps).numpy()

    @staticmethod
    def _between(x: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
        i = torch.searchsorted(xs, x).clamp(1, len(xs) - 1)
        share = ((x - xs[i - 1]) / (xs[i] - xs[i - 1])).clamp(0, 1)
        return ys[i - 1] + share * (ys[i] - ys[i - 1])


N = 150
X = data(N)
TRUTH = Truth(X)
ONES = torch.ones(N, dtype=torch.float64)
REFERENCE = torch.tensor([0.05], dtype=torch.float64)  # not the mode, on purpose
THIRD = 4 / (3 * math.sqrt(3))


def run(test: Any, *, num_chains: int = 2000, num_steps: int = 30, step: float = 0.12, **options: Any) -> tuple[Tensor, Info]:
    """Random walks from exact draws; the last point of each chain, and what was reported."""
    target = DataDensity(loss, X, prior=Gaussian(), batch_size=1, **options)
    kernel = kernels.adam_mcmc(0.0, sigma=step, acceptance=test)
    draws, info = sample_density(target, TRUTH.draw(num_chains), kernel, num_steps=num_steps, seed=5, progress=False)
    return draws, info


INVARIANT = {
    "full data": (FullData(), {}),
    "barker": (Barker(30), {}),
    "penalty": (Penalty(75), {}),
    "confidence": (Confidence(0.05, DerivativeBound(ONES), 50), {}),
    "sequential": (Sequential(1e-3, 50), {}),
    "tuna": (Tuna(DerivativeBound(ONES), 0.1), {}),
    "tuna, no extra": (Tuna(DerivativeBound(ONES), 0.0), {}),
    "tuna, first order": (Tuna(DerivativeBound(ONES, 1), 0.1), {"control_variate": ControlVariate(REFERENCE, 1)}),
    "tuna, second order": (
        Tuna(DerivativeBound(THIRD * ONES, 2), 0.1),
        {"control_variate": ControlVariate(REFERENCE)},
    ),
    "barker, second order": (Barker(30), {"control_variate": ControlVariate(REFERENCE)}),
    "minibatch, second order": (Minibatch(75), {"control_variate": ControlVariate(REFERENCE)}),
}


@pytest.mark.parametrize("name", INVARIANT)
def test_exact_draws_stay_exact(name: str) -> None:
    test, options = INVARIANT[name]
    draws, info = run(test, **options)
    assert stats.kstest(draws[:, -1, 0].numpy(), TRUTH.cdf).pvalue > 1e-5
    assert 0.05 < float(info.is_accepted.double().mean()) < 0.9
    if name != "full data":
        assert float(info.num_examples.mean()) < N


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in INVARIANT if "penalty" not in name and "minibatch" not in name])
def test_many_more_exact_draws_stay_exact(name: str) -> None:
    test, options = INVARIANT[name]
    draws, _ = run(test, num_chains=40_000, num_steps=80, **options)
    assert stats.kstest(draws[:, -1, 0].numpy(), TRUTH.cdf).pvalue > 1e-5


def test_the_plain_test_is_too_hot_by_beta_eff() -> None:
    """sd grows by beta_eff(s)^-1/2 at the rms noise s, to the 8% that the rule is good for; exact draws do not stay."""
    draws, info = run(Minibatch(15), num_chains=1000, num_steps=400, step=0.15)
    s = info.log_ratio_noise[:, 200:].square().mean().sqrt()
    assert float(s) > 1.0
    ratio = float(draws[:, 200:].std()) / TRUTH.sd
    assert ratio == pytest.approx(float(beta_eff(s)) ** -0.5, rel=0.08)
    assert ratio > 1.3
    assert stats.kstest(draws[:, -1, 0].numpy(), TRUTH.cdf).pvalue < 1e-5


def test_a_control_variate_lowers_the_noise_and_the_data() -> None:
    noise, touched = [], []
    for options in ({}, {"control_variate": ControlVariate(REFERENCE, 1)}, {"control_variate": ControlVariate(REFERENCE, 2)}):
        _, info = run(Minibatch(50), num_chains=200, num_steps=5, **options)
        noise.append(float(info.log_ratio_noise.square().mean().sqrt()))
        _, info = run(Barker(30), num_chains=200, num_steps=5, **options)
        touched.append(float(info.num_examples.mean()))
    assert noise[0] > 3 * noise[1] > 6 * noise[2]
    assert touched[0] > touched[1] >= touched[2]


@pytest.mark.parametrize(
    "make", [lambda: kernels.mala(0.01, acceptance=Barker(30)), lambda: kernels.hmc(0.1, 3, acceptance=Barker(30))]
)
def test_gradients_of_batches_do_not_matter(make: Any) -> None:
    """Langevin and Hamiltonian steps on batches of 20: the test makes up for it."""
    target = DataDensity(loss, X, prior=Gaussian(), batch_size=20)
    draws, info = sample_density(target, TRUTH.draw(3000), make(), num_steps=30, burn_in=29, progress=False)
    assert stats.kstest(draws[:, -1, 0].numpy(), TRUTH.cdf).pvalue > 1e-5
    assert float(info.is_accepted.double().mean()) > 0.1


def test_all_data_at_once_is_the_density() -> None:
    """batch_size=None: the same chain as with the log density written out, bit for bit up to rounding."""
    target = DataDensity(loss, X, prior=Gaussian(), inverse_temperature=0.5)

    def log_density(params: Tensor) -> Tensor:
        losses = torch.stack([loss(p, X) for p in params])
        return -0.5 * losses.sum(1) - params.square().sum(1) / 2

    results = []
    for density in (target, log_density):
        initial = TRUTH.draw(20)
        draws, info = sample_density(density, initial, kernels.mala(0.01), num_steps=20, seed=3, progress=False)
        results.append((draws, info.log_ratio, info.is_accepted))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "test", [Barker(30), Sequential(0.1, 30), Confidence(), Tuna(DerivativeBound(ONES)), Penalty(), Minibatch()]
)
def test_fixed_data_are_exact_with_every_test(test: Any) -> None:
    target = DataDensity(loss, X, prior=Gaussian())
    kernel = kernels.mala(0.02, acceptance=test)
    assert kernel.approximation(fixed_data=True) == []
    draws, info = sample_density(target, TRUTH.draw(3000), kernel, num_steps=20, burn_in=19, progress=False)
    assert stats.kstest(draws[:, -1, 0].numpy(), TRUTH.cdf).pvalue > 1e-5
    assert bool((info.num_examples == N).all())


def test_trees_priors_and_streams() -> None:
    """Parameters in a dictionary, a bounded prior, and chains whose draws do not depend on how many others there are."""
    x = torch.randn(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).double() * 2 - 1

    def tree_loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.softplus(-y * (x @ params["w"] + params["b"]))

    def chains(*seeds: int) -> Tensor:
        like = {"w": torch.zeros(len(seeds), 3).double(), "b": torch.zeros(len(seeds)).double()}
        target = DataDensity(
            tree_loss,
            x,
            y,
            prior=UniformBox(-0.5, 0.5),
            batch_size=10,
            like=like,
            control_variate=ControlVariate({"w": torch.full((3,), 0.3).double(), "b": torch.tensor(0.0).double()}),
        )
        kernel = kernels.adam_mcmc(0.0, sigma=0.2, acceptance=Barker(30))
        streams = Generators([torch.Generator().manual_seed(seed) for seed in seeds])
        draws, info = sample_density(target, like, kernel, num_steps=30, seed=streams, progress=False)
        assert bool((draws["w"].abs() <= 0.5).all())
        assert not bool(info.is_finite.all())
        return draws["w"]

    torch.testing.assert_close(chains(1, 2, 3)[2:], chains(3), rtol=1e-12, atol=0)


def test_burn_in_tunes_barker_to_its_own_rate() -> None:
    target = DataDensity(loss, X, prior=Gaussian(), batch_size=50)
    tune = BurnIn(num_steps=300)
    kernel, _ = warm_up(target, TRUTH.draw(200), kernels.mala(1e-4, acceptance=Barker(30)), tune=tune, progress=False)
    _, info = sample_density(target, TRUTH.draw(500), kernel, num_steps=20, progress=False)
    wanted = Barker().rate_like(0.57)
    assert 0.3 < wanted < 0.45
    assert float(info.acceptance_rate.mean()) == pytest.approx(wanted, abs=0.03)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DataDensity(loss), "tensors of one length"),
        (lambda: DataDensity(loss, X, X[:3]), "tensors of one length"),
        (
            lambda: DataDensity(loss, X, batch_size=N + 1),
            f"`batch_size` must be a whole number between 1 and the number of examples, {N}, got {N + 1}",
        ),
        (lambda: DataDensity(loss, X, batch_size=2.5), "whole number .* got 2.5"),
        (lambda: DataDensity(loss, X, inverse_temperature=0.0), "`inverse_temperature` must be positive"),
        (lambda: ControlVariate(REFERENCE, 3), "`order` must be 1 or 2, got 3"),
        (lambda: DataDensity(loss, X, control_variate=ControlVariate({"w": REFERENCE})), "structure of the parameters"),
        (
            lambda: DataDensity(loss, X, control_variate=ControlVariate(torch.zeros(2001).double())),
            "2001 parameters; the limit is 2000. Use order=1",
        ),
        (
            lambda: DataDensity(lambda w, x: (x - w[0]).square().mean(), X).example_losses((X[:4, None],), slice(0, 5)),
            "one loss for each example, shape .5,., got .*reduction",
        ),
    ],
)
def test_bad_use_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def centred(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    losses = F.softplus(-y * (x @ w))
    return losses - 0.5 * losses.mean()


def test_a_loss_that_looks_at_its_company_is_refused() -> None:
    """At the zero point all losses are log 2, and nothing can be seen: the first proposals show it."""
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    y = torch.ones(100)
    for start in (torch.ones(3, 2), torch.zeros(3, 2)):
        for size in (None, 20):
            target = DataDensity(centred, x, y, prior=Gaussian(), batch_size=size)
            with pytest.raises(PerExampleLossRequired, match=r"depends on the examples that it is evaluated with \(a mean"):
                sample_density(target, start, kernels.mala(0.1), num_steps=3, progress=False)
    with pytest.raises(PerExampleLossRequired, match="depends on the examples"):
        DataDensity(centred, x, y, control_variate=ControlVariate(torch.ones(2)))


def test_company_is_looked_for_at_a_few_points_only() -> None:
    sizes = []

    def counting(w: Tensor, x: Tensor) -> Tensor:
        sizes.append(len(x))
        return loss(w, x)

    target = DataDensity(counting, X, prior=Gaussian())
    sample_density(target, TRUTH.draw(3), kernels.mala(0.01), num_steps=10, progress=False)
    assert sizes.count(N) > 10
    assert sizes.count(16) == 4  # together; then in two parts
    assert sizes.count(8) == 8
    one = DataDensity(counting, X[:1], prior=Gaussian())
    sample_density(one, TRUTH.draw(3), kernels.mala(0.01), num_steps=1, progress=False)


def test_the_persistent_uniform_is_refused_where_it_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="`persistent_uniform` must be False with this test"):
        kernels.underdamped(0.1, persistent_uniform=True, acceptance=Barker())
    assert not kernels.underdamped(0.1, acceptance=Tuna(DerivativeBound(ONES))).persistent_uniform
    assert kernels.underdamped(0.1, acceptance=FullData()).persistent_uniform
    assert adammcmc.kernels.underdamped(0.1).persistent_uniform
