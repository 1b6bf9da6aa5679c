"""Geweke's joint distribution test: kernels on a network whose data change at every step.

Weights and data have a joint law, p(theta) p(y | theta), that is drawn from in two ways:

    marginal-conditional:    theta ~ p(theta),  y ~ p(y | theta)                         independent draws
    successive-conditional:  theta <- kernel(theta; posterior given y),  y ~ p(y | theta),  and so on

A kernel step leaves the joint law of (theta, y) invariant if and only if it leaves the posterior of (almost) every y
invariant. Every chain starts from a marginal-conditional draw, so no burn-in is needed, and standard errors come from
the spread between independent chains, whatever the autocorrelation. No fixed data anchor the weights, so that a small
bias in each step accumulates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import pytest
import torch
from scipy import stats
from torch import Tensor

from adammcmc import AlwaysAccept, ChainState, Density, Kernel, kernels
from adammcmc.kernels import CarriedBatch
from adammcmc.kernels.exact_adam import ExactAdamMCMCKernel, NoisyMoments
from adammcmc.target.potential import Evaluation
from tests.test_kernels import EXACT, exact_adam

MOST = 4.5  # standard errors
LEAST = 1e-5  # p-value

NUM_WEIGHTS = 7
CENTRE = torch.linspace(-0.6, 0.6, NUM_WEIGHTS, dtype=torch.float64)  # of the prior: no symmetry, so a wrong sign cannot hide
INPUTS = torch.linspace(-1.5, 1.5, 5, dtype=torch.float64)
NOISE = 0.7
STEP_SIZE = 0.03  # of a Langevin step, as in `tests.targets`


# --- the model ------------------------------------------------------------------------------------------------------


def outputs(theta: Tensor) -> Tensor:
    """A network 1-2-1 with tanh: (chains, 7) to (chains, 5)."""
    w, b, v, c = theta[:, 0:2], theta[:, 2:4], theta[:, 4:6], theta[:, 6:]
    hidden = torch.tanh(w[:, None, :] * INPUTS[:, None] + b[:, None, :])
    return (hidden * v[:, None, :]).sum(2) + c


def weights(num_chains: int, generator: torch.Generator) -> Tensor:
    """theta ~ p(theta) = N(CENTRE, I)"""
    return CENTRE + torch.randn(num_chains, NUM_WEIGHTS, dtype=torch.float64, generator=generator)


def data(theta: Tensor, generator: torch.Generator) -> Tensor:
    """y ~ p(y | theta) = N(f(theta), NOISE^2), a data set for each chain"""
    mean = outputs(theta)
    return mean + NOISE * torch.randn(mean.shape, dtype=torch.float64, generator=generator)


def log_likelihood(theta: Tensor, y: Tensor) -> Tensor:
    return -0.5 * ((y - outputs(theta)) / NOISE).square().sum(1)


def posterior(y: Tensor) -> Density:
    """Each chain has the posterior of its own data."""
    return Density(lambda theta: log_likelihood(theta, y) - 0.5 * (theta - CENTRE).square().sum(1))


def statistics(theta: Tensor, y: Tensor) -> Tensor:
    """What is compared, (chains, functions): of the weights, of the data, and of both."""
    f = outputs(theta)
    products = theta[:, :-1] * theta[:, 1:]
    both = (y[:, :, None] * theta[:, None, :]).flatten(1)
    level = torch.stack([log_likelihood(theta, y), (theta - CENTRE).square().sum(1)], 1)
    return torch.cat([theta, theta.square(), products, f, f.square(), y, y.square(), both, level, level.square()], 1)


# --- the test -------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """How far the successive-conditional draws are from the marginal-conditional ones."""

    z: Tensor
    """Of the means of the statistics, in standard errors."""
    p: float
    """The smallest p-value of Kolmogorov-Smirnov tests at the last step, times their number."""
    acceptance: float

    @property
    def is_passed(self) -> bool:
        return float(self.z.abs().max()) < MOST and self.p > LEAST


Refresh = Callable[[Kernel, ChainState, Tensor, Tensor], ChainState]


def with_new_data(kernel: Kernel, state: ChainState, old: Tensor, new: Tensor) -> ChainState:
    """The state of the same chains when their data are replaced: nothing that depends on the old data may stay.

    - `here`, the posterior of the old data at theta, is dropped and evaluated again at the next step.
    - The momentum of `underdamped` and `microcanonical` and the persistent uniform are at rest independent of theta
      and y. They are carried over: y ~ p(y | theta) then leaves p(theta, y) times the law of the memory invariant.
    - The momenta of `exact_adam_mcmc` are N(g(theta, y)^l, s_l^2) at rest. They depend on y, but their residuals
      m_l - g^l do not, so the residuals are carried over.
    """
    assert state.carry is None  # the test has no memory of its own
    if isinstance(kernel, ExactAdamMCMCKernel):
        (before,), (after,) = (posterior(y).evaluate((state.params,), with_grad=True).grad or () for y in (old, new))
        (m1,), (m2,) = state.memory
        state = state._replace(memory=NoisyMoments((m1 + after - before,), (m2 + after.square() - before.square(),)))
    return state._replace(here=None)


def successive(
    kernel: Kernel, num_chains: int, num_rounds: int, generator: torch.Generator, refresh: Refresh = with_new_data
) -> tuple[Tensor, Tensor, float]:
    """The statistics of each chain: the mean over the second half of the rounds, and in the last one; and the acceptance.

    A round is two kernel steps, the second of which starts from the cached evaluation of the first, and new data.
    """
    theta = weights(num_chains, generator)
    y = data(theta, generator)
    state = kernel.init(theta, posterior(y))
    total, accepted = torch.zeros(()), 0.0
    for number in range(num_rounds):
        for _ in range(2):
            state, info = kernel.step(state, posterior(y), generator)
            accepted += float(info.is_accepted.double().mean()) / (2 * num_rounds)
        last = statistics(state.params, y)
        if number >= num_rounds // 2:
            total = total + last
        new = data(state.params, generator)
        state, y = refresh(kernel, state, y, new), new
    return total / (num_rounds - num_rounds // 2), last, accepted


def compare(kernel: Kernel, num_chains: int, num_rounds: int, seed: int = 1, refresh: Refresh = with_new_data) -> Found:
    generator = torch.Generator().manual_seed(seed)
    means, last, acceptance = successive(kernel, num_chains, num_rounds, generator, refresh)
    theta = weights(10 * num_chains, generator)
    return judge(means, last, statistics(theta, data(theta, generator)), acceptance)


def judge(means: Tensor, last: Tensor, truth: Tensor, acceptance: float) -> Found:
    """Standard errors from the spread between independent chains."""
    error = (means.var(0) / len(means) + truth.var(0) / len(truth)).sqrt()
    p = min(float(stats.ks_2samp(a.numpy(), b.numpy()).pvalue) for a, b in zip(last.T, truth.T, strict=True))
    return Found((means.mean(0) - truth.mean(0)) / error, min(1.0, p * last.shape[1]), acceptance)


# --- corrected MALA: another model, whose labels are noisy ----------------------------------------------------------

PLACES = torch.linspace(-1.5, 2.0, 6, dtype=torch.float64)
SPREAD = 1.5  # of the prior
RHO = 0.5


def label_probability(theta: Tensor, y: Tensor) -> Tensor:
    """p_i(y_i) of a logistic regression with an intercept and a square, (chains, examples); y is -1 or 1."""
    features = torch.stack([torch.ones_like(PLACES), PLACES, PLACES.square()])
    return torch.sigmoid(y * (theta @ features))


class Labels(Density):
    """Logistic regressions, one data set per chain, with the weighted losses that `corrected_mala` requires."""

    num_examples = len(PLACES)  # type: ignore[assignment]
    scale = float(len(PLACES))

    def __init__(self, y: Tensor) -> None:
        super().__init__(lambda theta: theta.sum(1))  # not used
        self.y = y

    def log_prior(self, params: tuple[Tensor, ...]) -> Tensor:
        return -0.5 * (params[0] / SPREAD).square().sum(1)

    def evaluate(self, params: tuple[Tensor, ...], *, with_grad: bool) -> Evaluation:
        return self.evaluate_weighted(params, torch.ones_like(self.y))

    def evaluate_weighted(self, params: tuple[Tensor, ...], weights: Tensor) -> Evaluation:
        theta = params[0].detach().requires_grad_()
        with torch.enable_grad():
            total = -(label_probability(theta, self.y).log() * weights).sum(1) / self.scale
            log_prior = self.log_prior((theta,))
            (grad,) = torch.autograd.grad((total - log_prior / self.scale).sum(), theta)
        return Evaluation(total.detach(), log_prior.detach(), (grad,))


def labels(theta: Tensor, batch: Tensor, generator: torch.Generator) -> Tensor:
    """y | theta, B: of the model for the examples in the batch, a fair coin for the others."""
    p = torch.where(batch, label_probability(theta, torch.ones(())), 0.5)
    return (torch.rand(p.shape, dtype=torch.float64, generator=generator) < p) * 2.0 - 1


def with_batch(num_chains: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Marginal-conditional draws of weights, batch and labels."""
    theta = SPREAD * torch.randn(num_chains, 3, dtype=torch.float64, generator=generator)
    batch = torch.rand(num_chains, len(PLACES), dtype=torch.float64, generator=generator) < 1 / (3 - 2 * RHO)
    return theta, batch, labels(theta, batch, generator)


def statistics_with_batch(theta: Tensor, batch: Tensor, y: Tensor) -> Tensor:
    products = (y[:, :, None] * theta[:, None]).flatten(1)
    in_batch = batch.double()
    level = (label_probability(theta, y).log() * in_batch).sum(1, keepdim=True)
    return torch.cat(
        [theta, theta.square(), theta[:, :1] * theta[:, 1:], y, products, in_batch, in_batch * products[:, 1::3], level], 1
    )


def compare_corrected(num_chains: int, num_rounds: int, seed: int = 1, step_size: float = 0.15) -> Found:
    """With lambda = 1, not compensated, corrected MALA samples prior(theta) prod_i (p_i(y_i) + 1 - rho).

    Summed over both labels, a factor is 1 + 2 (1 - rho) for every theta, so this is the posterior of a proper model:
    with probability 1 / (3 - 2 rho) example i is in B and its label has the law p_i, otherwise the label is a fair
    coin. A round draws new labels given theta and B, the kernel's memory, and carries both over.
    """
    generator = torch.Generator().manual_seed(seed)
    kernel = kernels.corrected_mala(step_size, RHO, compensate=False)
    theta, batch, y = with_batch(num_chains, generator)
    state = kernel.init(theta, Labels(y))._replace(memory=CarriedBatch(batch))
    total, accepted = torch.zeros(()), 0.0
    for number in range(num_rounds):
        for _ in range(2):
            state, info = kernel.step(state, Labels(y), generator)
            accepted += float(info.is_accepted.double().mean()) / (2 * num_rounds)
        last = statistics_with_batch(state.params, state.memory.mask, y)
        if number >= num_rounds // 2:
            total = total + last
        y = labels(state.params, state.memory.mask, generator)
        state = state._replace(here=None)
    truth = statistics_with_batch(*with_batch(10 * num_chains, generator))
    return judge(total / (num_rounds - num_rounds // 2), last, truth, accepted)


# --- kernels and harnesses that are wrong on purpose ----------------------------------------------------------------


class Unflipped(kernels.UnderdampedKernel):
    """`underdamped` whose velocity is not flipped on rejection."""

    def step(self, state: ChainState, potential: Any, generator: Any) -> Any:
        new, info = super().step(state, potential, generator)
        (p,) = new.memory.momentum
        return new._replace(memory=new.memory._replace(momentum=(torch.where(info.is_accepted[:, None], p, -p),))), info


class NotCarried(kernels.UnderdampedKernel):
    """`underdamped` whose persistent uniform is not carried over by an accepted move."""

    def step(self, state: ChainState, potential: Any, generator: Any) -> Any:
        new, info = super().step(state, potential, generator)
        if state.memory is None:
            return new, info
        decides = self._moved(state.memory.uniform, generator)
        return new._replace(memory=new.memory._replace(uniform=decides)), info


class Uncorrected(ExactAdamMCMCKernel):
    """The chain of Theorem 1 without its correction C."""

    def _log_correction(self, moments: NoisyMoments, here: Evaluation, there: Evaluation) -> Tensor:
        return torch.zeros_like(here.log_prior)


def changed_to(kind: Any, kernel: Any) -> Any:
    """The same settings in another class."""
    return kind(**{field.name: getattr(kernel, field.name) for field in fields(kernel)})


def stale(kernel: Kernel, state: ChainState, old: Tensor, new: Tensor) -> ChainState:
    """Keeps the evaluation of the old data."""
    return state


def momenta_kept(kernel: Kernel, state: ChainState, old: Tensor, new: Tensor) -> ChainState:
    """Keeps the momenta of `exact_adam_mcmc` although their law has changed with the data."""
    return state._replace(here=None)


SIZE = math.sqrt(2 * STEP_SIZE)
WRONG: dict[str, tuple[Kernel, Refresh]] = {
    "underdamped, the velocity not flipped": (changed_to(Unflipped, kernels.underdamped(SIZE)), with_new_data),
    "underdamped, the uniform not carried over": (changed_to(NotCarried, kernels.underdamped(SIZE)), with_new_data),
    "underdamped, everything accepted": (kernels.underdamped(SIZE, acceptance=AlwaysAccept()), with_new_data),
    "microcanonical, everything accepted": (kernels.microcanonical(SIZE, acceptance=AlwaysAccept()), with_new_data),
    "mala, everything accepted": (kernels.mala(STEP_SIZE, acceptance=AlwaysAccept()), with_new_data),
    "Algorithm 1": (kernels.adam_mcmc(0.1, (0.99, 0.99), sigma=0.2, sigma_along=1.0), with_new_data),
    "exact_adam_mcmc without C": (changed_to(Uncorrected, exact_adam(STEP_SIZE)), with_new_data),
    "underdamped, the evaluation of the old data": (kernels.underdamped(SIZE), stale),
    "exact_adam_mcmc, the momenta of the old data": (exact_adam(STEP_SIZE, beta=0.9), momenta_kept),
}


# --- the tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["underdamped", "microcanonical"])
def test_the_joint_law_is_left_invariant(name: str) -> None:
    assert compare(EXACT[name](STEP_SIZE, NUM_WEIGHTS), 2000, 100).is_passed


@pytest.mark.parametrize("name", ["underdamped, the velocity not flipped", "underdamped, the evaluation of the old data"])
def test_mistakes_are_noticed(name: str) -> None:
    kernel, refresh = WRONG[name]
    assert float(compare(kernel, 2000, 100, refresh=refresh).z.abs().max()) > 2 * MOST


def test_corrected_mala_leaves_its_own_joint_law_invariant() -> None:
    assert compare_corrected(2000, 50).is_passed


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_exact_kernels_leave_the_joint_law_invariant(name: str) -> None:
    """Five times the chains of the fast test."""
    assert compare(EXACT[name](STEP_SIZE, NUM_WEIGHTS), 10_000, 100).is_passed


@pytest.mark.slow
def test_corrected_mala_leaves_its_own_joint_law_invariant_in_many_chains() -> None:
    assert compare_corrected(20_000, 100).is_passed


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_noticed(name: str) -> None:
    kernel, refresh = WRONG[name]
    assert not compare(kernel, 10_000, 100, refresh=refresh).is_passed
