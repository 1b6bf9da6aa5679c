"""Burn-in from anywhere: far chains are brought in, the approach needs no test, and the record says what happened."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adammcmc import AlwaysAccept, BurnIn, Density, Gaussian, Microcanonical, Underdamped, kernels, sample_density, warm_up
from adammcmc.backends.streams import streams
from adammcmc.kernels.approach import NoTest
from adammcmc.samplers.approach import Approach
from adammcmc.samplers.chains import Chains
from adammcmc.samplers.descent import descend
from adammcmc.samplers.stacked import setup_of
from adammcmc.samplers.stacked import stack as stack_chains
from adammcmc.target.likelihood import Loss
from tests.optimizers import X, Y, closure, network, seeded, underdamped

DOUBLE = {"dtype": torch.float64}


def uncentred() -> tuple[Tensor, Tensor]:
    """The precision of a regression on a year, not centred: condition 1e10, correlations of .9999."""
    year = 2000 + 10 * torch.randn(100, **DOUBLE, generator=seeded())
    x = torch.stack([torch.ones(100, **DOUBLE), year, torch.randn(100, **DOUBLE, generator=seeded(1))], 1)
    return x.T @ x + torch.eye(3, **DOUBLE) / 1e4, torch.tensor([-5.0, 0.1, 2.0], **DOUBLE)


PRECISION, MEAN = uncentred()


def regression(x: Tensor) -> Tensor:
    return -0.5 * ((x - MEAN) @ PRECISION * (x - MEAN)).sum(1)


def far(num_chains: int = 64, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(num_chains, 3, **DOUBLE, generator=seeded(2))


def test_far_chains_are_brought_in_and_near_ones_stay() -> None:
    near = (
        MEAN
        + torch.linalg.solve_triangular(
            torch.linalg.cholesky(PRECISION).T, torch.randn(3, 4, **DOUBLE, generator=seeded()), upper=True
        ).T
    )
    initial = torch.cat([near, far(4)])
    assert float(-regression(initial).max()) < 20
    assert float(-regression(initial)[4:].max()) > 1e4
    (moved,), count = descend(Density(regression), (initial,))
    assert torch.equal(moved[:4], near)
    assert float(-regression(moved).min()) < 20 * math.sqrt(1.5) + 20
    assert float(-regression(moved).max()) < 100
    assert count < 100


def test_a_descent_stays_inside_the_support() -> None:
    def log_density(x: Tensor) -> Tensor:
        inside = (x > 0).all(1)
        return torch.where(inside, (3 * x.clamp_min(1e-300).log() - x).sum(1), -math.inf)

    (moved,), _ = descend(Density(log_density), (torch.tensor([[1e4, 5e3], [3.0, 2.0]], **DOUBLE),))
    assert bool((moved > 0).all())
    assert float(-log_density(moved)[0]) < 60


@pytest.mark.parametrize("kernel", [None, kernels.underdamped(0.1)], ids=["default", "underdamped"])
def test_a_badly_scaled_posterior_from_overdispersed_starts(kernel: object) -> None:
    """No chain stays behind, and the moments are those of the target."""
    done = warm_up(regression, far(), kernel, progress=False)  # type: ignore[arg-type]
    assert done.is_settled, str(done)
    assert done.frozen == ()
    assert done.num_steps < 6000
    assert done.agreement is not None
    assert done.agreement < 1.03
    assert min(done.acceptance_by_chain) > 0.6
    draws, info = sample_density(regression, done.params, done.kernel, num_steps=400, seed=1)
    assert abs(float(info.acceptance_rate.mean()) - 0.85) < 0.03
    covariance = torch.linalg.inv(PRECISION)
    deviation = (draws.mean(1) - MEAN) / covariance.diagonal().sqrt()
    assert float((deviation.mean(0) / (deviation.std(0) / 8)).abs().max()) < 4.5
    ratio = (draws - MEAN).square().mean(1) / covariance.diagonal()
    assert float(((ratio.mean(0) - 1) / (ratio.std(0) / 8)).abs().max()) < 4.5


def test_the_record_prints_and_unpacks() -> None:
    done = warm_up(regression, far(8), progress=False)
    kernel, params = done
    assert kernel is done.kernel
    assert params is done.params
    text = str(done)
    for word in ("without a test", "to bring in far chains", "dense preconditioner", "R-hat", "chains and halves agree"):
        assert word in text, text
    short = warm_up(regression, far(8), tune=BurnIn(num_steps=300), progress=False)
    assert short.num_steps == 300
    assert "300 steps were asked for" in str(short)


def test_burn_in_ends_in_time() -> None:
    slow = BurnIn(max_seconds=0.05)  # (an idle core would settle in half a second)
    with pytest.warns(UserWarning, match="U was still moving|acceptance"):
        done = warm_up(lambda x: -x.square().sum(1).sqrt() * 1e-9, far(8, 1e6), tune=slow, progress=False)
    assert done.seconds < 20
    assert not done.is_settled


@pytest.mark.parametrize("dim", [3, 300])
def test_the_approach_ends_when_u_is_level_and_its_steps_fit_each_chain(dim: int) -> None:
    """U falls in all chains for 300 steps; one chain starts higher and takes 500. Errors grow as h^3, by chain."""
    approach = Approach(dim, 20_000)
    stiffness = torch.tensor([1.0, 8.0, 1.0, 1.0])
    g = seeded()
    ended = 0
    while not approach.is_done:
        k = approach.step
        h = approach.steps(torch.zeros(1), 4)
        fall = torch.tensor([300.0, 300.0, 300.0, 500.0])
        level = 100 * math.sqrt(dim) * (1 - k / fall).clamp_min(0) + math.sqrt(dim / 2) * torch.randn(4, generator=g) * 0.5
        error = stiffness * h**3 * math.sqrt(dim) * torch.randn(4, generator=g)
        approach.observe(error, level)
        ended = approach.step
    assert approach.is_level
    assert 500 < ended < 6000
    ratio = approach.steps(torch.zeros(1), 4)
    assert 1.4 < float(ratio[0] / ratio[1]) < 2.9  # 8^(1/3) = 2
    assert float(ratio[0]) < 1.2


KRON = {"preconditioner": "kron"}
UNADJUSTED = {"acceptance": AlwaysAccept()}


@pytest.mark.parametrize(
    ("make", "options"),
    [(Underdamped, {}), (Underdamped, KRON), (Microcanonical, {}), (Microcanonical, KRON), (Microcanonical, UNADJUSTED)],
    ids=["underdamped", "underdamped, kron", "microcanonical", "microcanonical, kron", "without a test"],
)
@pytest.mark.parametrize("split", [30, 190, 300, 390])
def test_burn_in_resumes_bit_for_bit(make: type, options: dict[str, Any], split: int) -> None:
    """In the approach, while the metric is learnt, in the last window, and after its end."""

    def sampler(model):  # type: ignore[no-untyped-def]
        burn_in = BurnIn(num_steps=380)
        prior = Gaussian(1.0)
        return make(
            model.parameters(), num_data=40, prior=prior, fixed_data=True, burn_in=burn_in, generator=seeded(3), **options
        )

    model = network()
    one = sampler(model)
    for _ in range(split):
        one.step(closure(model))
    saved, weights = copy.deepcopy(one.state_dict()), copy.deepcopy(model.state_dict())
    for _ in range(400 - split):
        one.step(closure(model))
    again = network()
    again.load_state_dict(weights)
    other = sampler(again)
    other.load_state_dict(saved)
    for _ in range(400 - split):
        other.step(closure(again))
    assert not other.is_adapting
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert other.approximations() == one.approximations()
    if options is KRON:
        assert any("left" in other.state[p] for p in again.parameters())


def on_fixed_data(num_chains: int, burn_in: BurnIn, **options: Any) -> tuple[Chains, Callable[[], Any]]:
    """Chains of a small network, alone or stacked, and their step."""
    model = network()
    sampler = underdamped(model, step_size=None, fixed_data=True, burn_in=burn_in, **options)
    if num_chains == 1:
        return sampler.chains, partial(sampler.step, closure(model))
    setups = [setup_of(sampler, model) for _ in range(num_chains)]
    stack = stack_chains(sampler, model, Loss(F.cross_entropy), setups, streams(range(num_chains), torch.device("cpu")))
    return stack, partial(stack.step, (X, Y))


@pytest.mark.parametrize("num_chains", [1, 3])
def test_refused_moves_are_followed_only_from_the_last_window_on(num_chains: int) -> None:
    """Before it every step has one gradient, and nothing is accepted later; what is tuned to holds when moves are followed."""
    burn_in = BurnIn(num_steps=600, approach=False, target_acceptance=0.7)
    chains, step = on_fixed_data(num_chains, burn_in)
    adaptation = chains.adaptation
    assert adaptation is not None
    gradients, is_last = [], []
    while chains.is_adapting:
        before = adaptation.num_gradients
        is_last.append(adaptation.is_in_last_window)
        step()
        gradients.append(adaptation.num_gradients - before)
    first = is_last.index(True)
    assert 100 < first < 400
    assert all(is_last[first:])
    assert gradients[1:first] == [1.0] * (first - 1)
    assert sum(gradients[first:]) > 1.2 * len(gradients[first:])
    for _ in range(1500):
        step()
    sums = chains.health_sums()
    assert sum(s["accepted"] for s in sums) > 1.1 * sum(s["rate"] for s in sums)
    assert abs(sum(s["rate"] for s in sums) / (1500 * num_chains) - 0.7) < 0.06


@pytest.mark.parametrize("num_chains", [1, 3])
def test_without_a_test_the_steps_are_those_of_the_approach(num_chains: int) -> None:
    """Each chain's own, in the metric of the prior, with an energy error of the size that they were chosen for."""
    chains, step = on_fixed_data(num_chains, BurnIn(num_steps=900), kind=Microcanonical, acceptance=AlwaysAccept())
    while chains.is_adapting:
        assert chains.adaptation is not None
        assert chains.approximations() == ["no Metropolis correction"]
        approach = chains.adaptation.approach
        step()
    assert chains.num_steps == 900
    kernel = chains.kernel()
    dim = sum(chains.network.sizes)
    assert approach is not None
    assert chains.adaptation is not None
    lengths = [torch.as_tensor(h).expand(num_chains) for h in kernel.step_size]
    torch.testing.assert_close(lengths[0].double(), approach.steps(torch.zeros(1), num_chains), rtol=1e-6, atol=0.0)
    assert len(set(lengths[0].tolist())) == num_chains
    assert all(bool((a == 1).all()) for a in kernel.preconditioner)  # the variances of Gaussian()
    assert kernel.friction == 1.0  # as in the approach
    said = chains.approximations()
    assert said[0] == "no Metropolis correction"
    assert said[1].startswith("energy error of a step ")
    assert "approximate: no Metropolis correction; energy error" in chains.describe()
    assert said[1] in chains.adaptation.record(kernel).reason
    while chains.num_steps < 1100:
        step()
    assert bool(chains.info.is_accepted.all())
    assert not chains.health_state()["context"]["is_exact"]
    assert all(health.grade != "sound" for health in chains.health())
    with_test = replace(kernel, acceptance=NoTest())
    chains.kernel = lambda: with_test  # type: ignore[method-assign]
    squares = []
    while chains.num_steps < 1500:
        step()
        squares.append(chains.info.log_ratio.square())
    found = torch.stack(squares)
    assert 0.4 < float(found.log().mean().exp()) / (0.1 * dim) < 2.5
    assert 0.6 < float(said[1].split()[-1]) / math.sqrt(float(found.mean())) < 1.6


def test_only_constant_speed_on_fixed_data_finds_its_steps_without_a_test() -> None:
    test = AlwaysAccept()
    for kind, options in [(Underdamped, {"fixed_data": True}), (Microcanonical, {}), (Microcanonical, {"num_leapfrog": 2})]:
        with pytest.raises(ValueError, match=r"nothing to adapt to.*take `Microcanonical` on fixed data"):
            underdamped(network(), kind=kind, step_size=None, acceptance=test, **options)
    for burn_in in (BurnIn(approach=False), BurnIn(num_steps=99), BurnIn(max_steps=99)):
        with pytest.raises(ValueError, match="found by burn-in's approach, in at least 100 steps"):
            underdamped(network(), kind=Microcanonical, step_size=None, acceptance=test, fixed_data=True, burn_in=burn_in)


def test_unknown_metrics_are_refused() -> None:
    model = network()
    with pytest.raises(ValueError, match="`preconditioner` must be 'diagonal', 'kron'"):
        Underdamped(model.parameters(), num_data=40, prior=Gaussian(1.0), fixed_data=True, preconditioner="dense")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`scaling` must be one of diagonal, dense, kron"):
        BurnIn(scaling="full")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a velocity"):
        warm_up(regression, far(4), kernels.mala(0.1), tune=BurnIn(scaling="kron"), progress=False)
    with pytest.raises(ValueError, match="`max_seconds` must be positive"):
        BurnIn(max_seconds=0)
