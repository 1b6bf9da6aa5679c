"""How long a velocity is kept: found in burn-in by groups of chains."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from adammcmc import BurnIn, kernels, sample_density, warm_up
from adammcmc.samplers.adaptation import Adaptation, _new_own
from adammcmc.samplers.persistence import Persistence

CHAINS = 18


def correlated(rho: list[float], num_draws: int = 400) -> Tensor:
    """Autoregressions of two functions, (chains, draws, 2), chain i with the correlation rho[i % 3] between draws."""
    generator = torch.Generator().manual_seed(0)
    own = torch.tensor(rho, dtype=torch.float64)[torch.arange(CHAINS) % 3][:, None]
    x = torch.randn(CHAINS, 2, generator=generator, dtype=torch.float64)
    draws = []
    for _ in range(num_draws):
        x = own * x + (1 - own**2).sqrt() * torch.randn(CHAINS, 2, generator=generator, dtype=torch.float64)
        draws.append(x)
    return torch.stack(draws, 1)


@pytest.mark.parametrize(("best", "factor"), [(0, 0.4), (1, 1.0), (2, 2.5)])
def test_the_friction_with_the_least_correlated_draws_is_taken(best: int, factor: float) -> None:
    rho = [0.9, 0.9, 0.9]
    rho[best] = 0.5
    persistence = Persistence(0.5)
    persistence.learn(correlated(rho))
    assert persistence.friction == pytest.approx(0.5 * factor)


def test_a_chain_in_a_bad_place_does_not_decide() -> None:
    watched = correlated([0.5, 0.9, 0.9])
    watched[0] = watched[0, :1] + 1e-3 * watched[0].cumsum(0)  # of the best group, and hardly moves
    persistence = Persistence(0.5)
    persistence.learn(watched)
    assert persistence.friction == pytest.approx(0.2)


def test_equal_costs_few_draws_and_the_limits_change_nothing() -> None:
    persistence = Persistence(0.5)
    persistence.learn(correlated([0.8, 0.8, 0.8]))
    persistence.learn(correlated([0.5, 0.9, 0.9], num_draws=60))
    persistence.learn(torch.ones(CHAINS, 200, 2).double())
    assert persistence.friction == 0.5
    for _ in range(9):
        persistence.learn(correlated([0.5, 0.9, 0.9]))
    assert persistence.friction == 0.03


def banana(x: Tensor) -> Tensor:
    return -(x[:, 0] - 1).square() / 2 - (x[:, 1] - x[:, 0].square()).square() / (2 * 0.2**2)


def test_burn_in_freezes_one_friction_for_all_and_leaves_a_given_one() -> None:
    start = torch.randn(18, 2, generator=torch.Generator().manual_seed(0)).double()
    tune = BurnIn(num_steps=1500)
    tuned = warm_up(banana, start, tune=tune, progress=False).kernel
    assert type(tuned.friction) is float
    given = warm_up(banana, start, kernels.microcanonical(0.1, 0.3), tune=tune, progress=False).kernel
    assert given.friction == 0.3
    few = warm_up(banana, start[:14], tune=tune, progress=False).kernel  # too few for groups
    assert few.friction is None


@pytest.mark.parametrize(
    "kernel", [kernels.underdamped(0.8), kernels.microcanonical(0.8)], ids=["underdamped", "microcanonical"]
)
def test_a_friction_for_each_chain_is_what_it_says_and_exact(kernel: kernels.UnderdampedKernel) -> None:
    frictions = torch.tensor([0.05, 0.5, 5.0], dtype=torch.float64)
    (kept, noise), *_ = kernel.with_friction(frictions).kept(1)
    torch.testing.assert_close(kept, torch.exp(-0.8 * frictions))
    torch.testing.assert_close(noise, torch.sqrt(1 - torch.exp(-1.6 * frictions)))
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(12_000, 3, generator=generator).double()
    own = replace(kernel.with_friction(frictions.repeat_interleave(4000)), jitter=0.5)
    draws, _ = sample_density(lambda x: -x.square().sum(1) / 2, start, own, num_steps=30, burn_in=29, seed=2, progress=False)
    for group in draws[:, 0].view(3, 4000, 3):
        assert min(stats.kstest(group[:, i], "norm").pvalue for i in range(3)) > 1e-5


def test_jitter_is_uniform_and_its_own_at_each_step_and_chain() -> None:
    """On a flat density every step is accepted, and its length is h times the speed, which is 1."""
    kernel = kernels.microcanonical(0.1, 0.0, jitter=0.5)
    draws, _ = sample_density(lambda x: 0.0 * x.sum(1), torch.zeros(500, 2).double(), kernel, num_steps=9, progress=False)
    lengths = draws.diff(dim=1).norm(dim=2) / math.sqrt(2)
    assert float(lengths.min()) > 0.05
    assert float(lengths.max()) < 0.15
    assert stats.kstest(lengths.flatten(), stats.uniform(0.05, 0.1).cdf).pvalue > 1e-4
    assert abs(float(torch.corrcoef(lengths.T)[0, 1])) < 0.2
    assert "+- 50%" in kernel.details()[0]
    with pytest.raises(ValueError, match="`jitter` must be at least 0 and below 1, got 1"):
        kernels.underdamped(0.1, jitter=1.0)


def test_steps_of_frozen_chains_are_shortened_fast_and_grow_again() -> None:
    tune = Adaptation(BurnIn(), target=0.8, num_params=2, velocity=True)
    tune._rates = torch.tensor([0.0, 0.1, 0.4, 0.8], dtype=torch.float64)
    assert _new_own(tune).tolist() == [0.125, 0.5, 1.0, 1.0]
    tune._rates = torch.tensor([0.95, 0.8, 0.4, 0.8], dtype=torch.float64)
    assert _new_own(tune).tolist() == [4.0, 2.0, 1.0, 1.0]
    tune._rates = torch.tensor([0.95, 0.8, 0.8, 0.8], dtype=torch.float64)
    assert _new_own(tune).tolist() == [2.0, 1.0, 1.0, 1.0]  # never longer than those of the others


@pytest.mark.parametrize("num_chains", [2, 6])
def test_a_chain_that_freezes_in_the_last_window_gets_shorter_steps_until_it_moves(num_chains: int) -> None:
    """Two chains have no steps of their own, and no further windows."""
    adaptation = Adaptation(BurnIn(max_steps=300), target=0.8, num_params=2, velocity=True)
    size, steps = torch.ones(num_chains, dtype=torch.float64), 0
    generator = torch.Generator().manual_seed(0)
    while not adaptation.is_done:
        rates = torch.full((num_chains,), 0.8, dtype=torch.float64)
        if adaptation._is_last and float(size[0] / size[1]) > 0.2:
            rates[0] = 0.0
        level = torch.randn(num_chains, generator=generator).double()
        change = adaptation.observe(rates, level, torch.full((num_chains,), math.nan), None, 1.0, params=None)
        size, steps = size * change.factor, steps + 1
    if num_chains == 2:
        assert adaptation.frozen == [0]
        assert steps <= 300
    else:
        assert adaptation.frozen == []
        assert float(size[0] / size[1]) == pytest.approx(0.125)
        assert steps <= 300 + 2 * 100
