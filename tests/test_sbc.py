"""Simulation-based calibration: the rank of the true weights of a network among the draws of its posterior.

Each replica draws weights from the prior, data given these weights, and runs one chain on the posterior of these data.
If the draws have the law of the posterior, the rank of f(true weights, data) among f(draws, data) is uniform, for every
function f (Talts et al. 2018). All replicas run in parallel, as the chains of one run.

Chains start from independent prior draws, not from the true weights. The true weights are an exact draw from the
posterior, so a chain that starts there need not find it, and a biased kernel leaves it only as fast as it mixes. From an
independent start a chain must both arrive and stay; its ranks are uniform only once it has forgotten its start, which is
what the burn-in and the gap between draws are for.

The functions do not change when hidden units are exchanged or change sign, as a chain need not visit all these copies
of a mode. Some functions must depend on the data: draws from the prior pass all the others (Modrak et al. 2023).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from scipy import stats
from torch import Tensor

from adammcmc import BurnIn, Kernel, kernels, sample_density, warm_up
from tests.test_joint import Unflipped, changed_to

# warnings of `warm_up` are errors elsewhere: here a wrong kernel must be noticed by its ranks
pytestmark = pytest.mark.filterwarnings("ignore:burn-in reached", "ignore:.*chains do not move")

LEAST = 1e-5  # p-value
NUM_TESTS = 2  # inputs at which only outputs are compared


class Network(NamedTuple):
    """A network with tanh, one mean as its head and known noise; one row of weights per chain."""

    widths: tuple[int, ...]
    num_data: int
    noise: float

    @property
    def layers(self) -> list[tuple[int, int]]:
        return list(zip(self.widths[:-1], self.widths[1:], strict=True))

    @property
    def scales(self) -> Tensor:
        """Standard deviations of the prior, (P,): weights have variance 4 / fan-in, biases 1."""
        rows = [torch.cat([torch.full((a * b,), 2 / math.sqrt(a)), torch.ones(b)]) for a, b in self.layers]
        return torch.cat(rows).double()

    @property
    def inputs(self) -> Tensor:
        """The same for all replicas; the last ones have no data."""
        shape = self.num_data + NUM_TESTS, self.widths[0]
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """(chains, P) to (chains, inputs)"""
        h, start = x.expand(len(theta), *x.shape), 0
        for a, b in self.layers:
            matrix, bias, rest = theta[:, start:].split([a * b, b, theta.shape[1] - start - a * b - b], 1)
            h = torch.baddbmm(bias[:, None], torch.tanh(h) if start else h, matrix.unflatten(1, (a, b)))
            start = theta.shape[1] - rest.shape[1]
        return h[:, :, 0]

    def weights(self, num: int, generator: torch.Generator) -> Tensor:
        return self.scales * torch.randn(num, len(self.scales), dtype=torch.float64, generator=generator)


class Replicas:
    """True weights and data of many replicas, and the posteriors of all of them as one batched density."""

    def __init__(self, network: Network, num: int, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.network, self.scales = network, network.scales
        self.x, self.elsewhere = network.inputs.split([network.num_data, NUM_TESTS])
        self.truth, self.start = (network.weights(num, self.generator) for _ in range(2))
        mean = network.outputs(self.truth, self.x)
        self.y = mean + network.noise * torch.randn(mean.shape, dtype=torch.float64, generator=self.generator)

    def log_likelihood(self, theta: Tensor) -> Tensor:
        return -0.5 * ((self.y - self.network.outputs(theta, self.x)) / self.network.noise).square().sum(1)

    def log_prior(self, theta: Tensor) -> Tensor:
        return -0.5 * (theta / self.scales).square().sum(1)

    def log_density(self, theta: Tensor) -> Tensor:
        return self.log_likelihood(theta) + self.log_prior(theta)

    def functions(self, theta: Tensor) -> dict[str, Tensor]:
        """What is ranked, (chains,) each."""
        first, second = self.network.outputs(theta, self.elsewhere).T
        likelihood, prior = self.log_likelihood(theta), self.log_prior(theta)
        return {
            "first test output": first,
            "second test output": second,
            "log likelihood": likelihood,
            "log prior": prior,
            "log density": likelihood + prior,
            "sum of squares": theta.square().sum(1),
        }


class Calibration(NamedTuple):
    """The ranks of one study, by function."""

    ranks: dict[str, Tensor]
    """(replicas,), 0 to `num_draws`."""
    num_draws: int
    correlation: float
    """The largest autocorrelation of successive draws, over the functions."""
    acceptance: float

    def p_values(self) -> dict[str, float]:
        """The smaller p-value of two tests of uniformity, times two: chi-square in ten bins, and Kolmogorov-Smirnov.

        A rank is moved to a uniform place in its bin of width 1 / (num_draws + 1), so that both laws are exact.
        """
        found = {}
        for name, rank in self.ranks.items():
            jitter = torch.rand(rank.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            place = (rank + jitter) / (self.num_draws + 1)
            counts = torch.histc(place, 10, 0, 1)
            chi_square = float(stats.chisquare(counts.numpy()).pvalue)
            found[name] = min(1.0, 2 * min(chi_square, float(stats.kstest(place.numpy(), "uniform").pvalue)))
        return found

    @property
    def distortion(self) -> float:
        """How far autocorrelation alone moves the distribution function of the ranks, at most.

        The share of draws below the truth has variance u (1 - u) tau / num_draws around its level u, with tau = 1 + 2 sum
        of autocorrelations; the excess over independent draws smears u by (tau - 1) / num_draws.
        """
        rho = max(self.correlation, 0.0)
        return rho / (1 - rho) / self.num_draws


def calibrate(replicas: Replicas, draws: Tensor, acceptance: float = math.nan) -> Calibration:
    """Ranks among draws (replicas, draws, P)."""
    truth = replicas.functions(replicas.truth)
    values = [replicas.functions(draws[:, i]) for i in range(draws.shape[1])]
    ranks, correlation = {}, []
    for name, true in truth.items():
        f = torch.stack([value[name] for value in values], 1)
        ranks[name] = (f < true[:, None]).sum(1).double()
        # half the mean squared difference of two draws: their variance, less their covariance
        near, far = (0.5 * (f[:, lag:] - f[:, :-lag]).square().mean() for lag in (1, f.shape[1] // 2))
        correlation.append(float(1 - near / far))
    return Calibration(ranks, draws.shape[1], max(correlation), acceptance)


def run(
    replicas: Replicas, kernel: Kernel, num_draws: int, gap: int, burn_in: int, tune: BurnIn | None = None, factor: float = 1.0
) -> Calibration:
    """Warm up from the independent start, change the step by `factor`, and draw."""
    tuned, start = warm_up(replicas.log_density, replicas.start, kernel, tune=tune, seed=replicas.generator, progress=False)
    draws, info = sample_density(
        replicas.log_density,
        start,
        tuned.scaled(factor),  # type: ignore[attr-defined]
        num_steps=burn_in + num_draws * gap,
        burn_in=burn_in,
        gap=gap,
        seed=replicas.generator,
        progress=False,
    )
    return calibrate(replicas, draws, float(info.acceptance_rate.mean()))


# --- the tests ------------------------------------------------------------------------------------------------------

SMALL = Network((2, 4, 1), num_data=8, noise=0.4)  # 17 weights
LARGE = Network((3, 6, 3, 1), num_data=20, noise=0.5)  # 49 weights
RIGHT = {"underdamped": kernels.underdamped(0.1), "microcanonical": kernels.microcanonical(0.1)}
ALGORITHM_1 = kernels.adam_mcmc(0.02, (0.9, 0.9), sigma=0.02, sigma_along=1.0)

WRONG: dict[str, tuple[Kernel, float]] = {
    "Algorithm 1": (ALGORITHM_1, 1.0),
    "the velocity not flipped, steps 1.5 times as long": (changed_to(Unflipped, kernels.underdamped(0.1)), 1.5),
}
"""Kernels, and what their tuned step is multiplied by."""


def run_small(kernel: Kernel) -> Calibration:
    """About two seconds."""
    return run(Replicas(SMALL, 500), kernel, num_draws=9, gap=60, burn_in=100, tune=BurnIn(num_steps=600))


def run_large(kernel: Kernel, tune: BurnIn | None = None, factor: float = 1.0) -> Calibration:
    """About a minute on one core."""
    return run(Replicas(LARGE, 1000), kernel, num_draws=19, gap=250, burn_in=500, tune=tune, factor=factor)


@pytest.mark.parametrize("name", RIGHT)
def test_ranks_are_uniform_on_a_small_network(name: str) -> None:
    found = run_small(RIGHT[name])
    assert found.distortion < 0.02
    assert min(found.p_values().values()) > LEAST


def test_algorithm_1_is_noticed_on_a_small_network() -> None:
    assert min(run_small(ALGORITHM_1).p_values().values()) < 1e-50


def test_draws_of_the_prior_are_noticed_by_functions_of_the_data_alone() -> None:
    """The blind spot of ranks of weights and outputs."""
    replicas = Replicas(SMALL, 500)
    draws = torch.stack([SMALL.weights(500, replicas.generator) for _ in range(9)], 1)
    p = calibrate(replicas, draws).p_values()
    assert min(p["log likelihood"], p["log density"]) < 1e-50
    assert min(p["log prior"], p["sum of squares"], p["first test output"], p["second test output"]) > LEAST


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_ranks_are_uniform_on_a_network(name: str) -> None:
    """At the defaults of `warm_up`."""
    found = run_large(RIGHT[name])
    assert found.distortion < 0.01
    assert min(found.p_values().values()) > LEAST


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_noticed_on_a_network(name: str) -> None:
    kernel, factor = WRONG[name]
    assert min(run_large(kernel, BurnIn(num_steps=1500), factor).p_values().values()) < 1e-10
