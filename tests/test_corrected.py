"""Corrected stochastic MALA: its chain on pairs is exact, its marginal is the documented one, in every API."""

from __future__ import annotations

import io
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import adammcmc
from adammcmc import (
    CorrectedMALA,
    DataDensity,
    Gaussian,
    PerExampleLossRequired,
    StochasticClosure,
    TensorExamples,
    kernels,
)
from adammcmc.kernels.corrected import CarriedBatch
from adammcmc.kernels.kernel import ChainState, Info
from adammcmc.target.density import Density
from adammcmc.target.leaves import Leaves
from adammcmc.target.potential import Evaluation, potential_difference
from tests.optimizers import X, Y, network, same, seeded, weights


class Location:
    """l_i(theta) = log cosh(theta - x_i) + offset, a N(0, 2^2) prior on theta, many chains at once."""

    fixed = is_bounded = can_narrow = False

    def __init__(self, data: Tensor, lam: float = 1.0, offset: float = 0.0) -> None:
        self.data, self.inverse_temperature, self.scale, self.offset = data, lam, lam * len(data), offset
        self.asked: list[Tensor] = []

    @property
    def num_examples(self) -> int:
        return len(self.data)

    def losses(self, theta: Tensor) -> Tensor:
        return torch.log(torch.cosh(theta - self.data)) + self.offset

    def evaluate(self, params: Leaves, *, with_grad: bool) -> Evaluation:
        raise AssertionError("the kernel draws its batches itself")

    def evaluate_weighted(self, params: Leaves, weights: Tensor) -> Evaluation:
        self.asked.append(weights)
        theta = params[0]
        slope = (weights * torch.tanh(theta - self.data)).sum(1, keepdim=True) / len(self.data)
        return Evaluation(
            (weights * self.losses(theta)).sum(1) / len(self.data), self.log_prior(params), (slope + theta / 4 / self.scale,)
        )

    def compare(self, current: Evaluation, proposed: Evaluation) -> Tensor:
        return potential_difference(self.scale, current, proposed)

    def log_prior(self, params: Leaves) -> Tensor:
        return -(params[0][:, 0] ** 2) / 8

    def example_losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        return self.losses(params[0])[:, indices]


DATA = torch.tensor(stats.t.ppf((torch.arange(12).numpy() + 0.5) / 12, df=3) + 0.4)
GRID = torch.linspace(-8, 8, 8001, dtype=torch.float64)


def marginal(potential: Location, rho: float, zeta: float = 1.0, compensate: bool = True) -> Tensor:
    """The documented law of theta on a grid, by quadrature."""
    kept = rho ** (1 - zeta)
    a = potential.inverse_temperature * ((kept + 1 - rho) / kept if compensate else 1.0)
    log_p = (kept * torch.exp(-a * potential.losses(GRID[:, None])) + 1 - rho).log().sum(1) - GRID**2 / 8
    p = (log_p - log_p.max()).exp()
    return p / p.sum()


def exact_pairs(potential: Location, kernel: kernels.CorrectedMALAKernel, count: int, g: torch.Generator) -> ChainState:
    """theta from the marginal, then the batch given theta: b_i is 1 with odds rho^(1 - zeta) e^(-a l_i) : 1 - rho."""
    law = marginal(potential, kernel.rho, kernel.zeta, kernel.compensate)
    cumulative = law.cumsum(0)
    theta = GRID[torch.searchsorted(cumulative, torch.rand(count, dtype=torch.float64, generator=g)).clamp(max=len(GRID) - 1)]
    theta = theta + (GRID[1] - GRID[0]) * (torch.rand(count, dtype=torch.float64, generator=g) - 0.5)
    kept, a = kernel.rho ** (1 - kernel.zeta), potential.inverse_temperature / (kernel.weight if kernel.compensate else 1.0)
    inside = kept * torch.exp(-a * potential.losses(theta[:, None]))
    mask = torch.rand(inside.shape, dtype=torch.float64, generator=g) < inside / (inside + 1 - kernel.rho)
    state = kernel.init(theta[:, None], potential)
    return state._replace(memory=CarriedBatch(mask))


def walk(
    state: ChainState, potential: Location, kernel: kernels.CorrectedMALAKernel, steps: int, g: torch.Generator
) -> tuple[ChainState, list[Info]]:
    infos = []
    for _ in range(steps):
        state, info = kernel.step(state, potential, g)
        infos.append(info)
    return state, infos


CASES = {
    "theory": {"rho": 0.5},
    "small batches": {"rho": 0.2},
    "not compensated": {"rho": 0.5, "compensate": False},
    "uncorrected": {"rho": 0.5, "zeta": 0.0},
    "between": {"rho": 0.3, "zeta": 0.6},
    "all data": {"rho": 1.0},
    "directional": {"rho": 0.5, "sigma_along": 1.0},
    "preconditioned": {"rho": 0.5, "preconditioner": torch.tensor([1.7], dtype=torch.float64)},
}


def p_value(potential: Location, kernel: kernels.CorrectedMALAKernel, law: Tensor, steps: int = 60) -> float:
    g = seeded(3)
    state, infos = walk(exact_pairs(potential, kernel, 20_000, g), potential, kernel, steps, g)
    rate = float(torch.stack([info.acceptance_rate for info in infos]).mean())
    assert 0.05 < rate < 0.99
    cdf = law.cumsum(0).numpy()
    return float(stats.kstest(state.params[:, 0].numpy(), lambda x: _interpolated(x, cdf)).pvalue)


def _interpolated(x, cdf):  # type: ignore[no-untyped-def]
    half = float(GRID[1] - GRID[0]) / 2
    return torch.tensor(cdf)[torch.searchsorted(GRID + half, torch.tensor(x)).clamp(max=len(GRID) - 1)].numpy()


@pytest.mark.parametrize("case", CASES)
def test_exact_draws_of_pairs_stay_exact(case: str) -> None:
    """12 data, where the marginal is known by quadrature: prior * prod_i (rho^(1 - zeta) e^(-a l_i) + 1 - rho)."""
    kernel, potential = kernels.corrected_mala(0.15, **CASES[case]), Location(DATA)
    law = marginal(potential, kernel.rho, kernel.zeta, kernel.compensate)
    assert p_value(potential, kernel, law) > 1e-5


@pytest.mark.parametrize("case", ["theory", "small batches"])
def test_a_long_run_finds_the_marginal_from_anywhere(case: str) -> None:
    kernel, potential = kernels.corrected_mala(0.15, **CASES[case]), Location(DATA)
    law = marginal(potential, kernel.rho)
    state = kernel.init(torch.full((2000, 1), 2.0, dtype=torch.float64), potential)
    g, draws = seeded(4), []
    state, _ = walk(state, potential, kernel, 1000, g)
    for _ in range(300):
        state, _ = kernel.step(state, potential, g)
        draws.append(state.params[:, 0])
    for power in (1, 2):
        each = torch.stack(draws).pow(power).mean(0)
        truth = float((law * GRID**power).sum())
        assert abs(float(each.mean()) - truth) < 4.5 * float(each.std()) / math.sqrt(len(each))


def test_the_log_rho_term_and_the_other_law_are_noticed() -> None:
    """The chain of one zeta is none of another zeta's law, nor of the posterior's: the tests above could fail."""
    potential = Location(DATA)
    theory = kernels.corrected_mala(0.15, 0.5)
    for wrong in (marginal(potential, 0.5, 0.0), marginal(potential, 0.5, compensate=False), marginal(potential, 1.0)):
        assert p_value(potential, theory, wrong) < 1e-5


def test_compensation_brings_small_losses_to_the_posterior() -> None:
    """At lambda = 1/100 the marginal's sd is the Gibbs posterior's with 2 - rho, and another without."""

    def deviation(law: Tensor) -> float:
        mean = (law * GRID).sum()
        return float((law * (GRID - mean) ** 2).sum().sqrt())

    potential = Location(torch.cat([DATA] * 20), lam=0.01)
    truth = deviation(marginal(potential, 1.0))
    for rho in (0.1, 0.5):
        assert abs(deviation(marginal(potential, rho)) / truth - 1) < 0.01
        assert deviation(marginal(potential, rho, compensate=False)) / truth > 1.1
    assert kernels.corrected_mala(0.1, 0.3).weight == pytest.approx(1 / 1.7)
    assert kernels.corrected_mala(0.1, 0.3, zeta=0.0).weight == pytest.approx(0.3)


def test_the_ratio_is_that_of_the_pairs() -> None:
    """Y by hand: corrected potentials of (theta, B) and (tau, B'), and two full Gaussian densities."""
    rho, h, lam, a = 0.4, 0.2, 0.7, 0.7 * 1.6
    potential, kernel = Location(DATA, lam), kernels.corrected_mala(h, rho)
    g = seeded(9)
    state = exact_pairs(potential, kernel, 50, g)

    def u(theta: Tensor, mask: Tensor) -> Tensor:
        return a * (mask * potential.losses(theta)).sum(1) + mask.sum(1).double() * math.log(rho) + theta[:, 0] ** 2 / 8

    def slope(theta: Tensor, mask: Tensor) -> Tensor:
        return a * (mask * torch.tanh(theta - DATA)).sum(1) + theta[:, 0] / 4

    old, theta = state.memory.mask, state.params
    generator = seeded(10)
    new = torch.rand(50, 12, dtype=torch.float64, generator=generator) < rho
    torch.randn(50, dtype=torch.float64, generator=generator)  # z
    tau = (
        theta - h * slope(theta, old)[:, None] + math.sqrt(2 * h) * torch.randn(50, 1, dtype=torch.float64, generator=generator)
    )
    there = (theta - tau + h * slope(tau, new)[:, None]) ** 2 / (4 * h)
    back = (tau - theta + h * slope(theta, old)[:, None]) ** 2 / (4 * h)
    expected = u(theta, old) - u(tau, new) - there[:, 0] + back[:, 0]
    potential.asked.clear()
    after, info = kernel.step(state, potential, seeded(10))
    torch.testing.assert_close(info.log_ratio, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(info.loss, (old * potential.losses(theta)).sum(1) / old.sum(1))
    torch.testing.assert_close(info.proposed_loss, (new * potential.losses(tau)).sum(1) / new.sum(1), equal_nan=True)
    assert torch.equal(info.num_examples, new.sum(1).double())
    assert torch.equal(after.memory.mask, torch.where(info.is_accepted[:, None], new, old))
    assert 0 < int(info.is_accepted.sum()) < 50
    # the first step asked for both batches; from now on the old one is known
    assert len(potential.asked) == 2
    kernel.step(after, potential, seeded(11))
    assert len(potential.asked) == 3
    assert torch.equal(potential.asked[0] != 0, old)


def test_an_empty_batch_is_legal() -> None:
    potential, kernel = Location(DATA[:2]), kernels.corrected_mala(0.3, 0.3)
    g = seeded(5)
    state = exact_pairs(potential, kernel, 20_000, g)
    state, infos = walk(state, potential, kernel, 40, g)
    assert any(bool((info.num_examples == 0).any()) for info in infos)
    assert int((state.memory.mask.sum(1) == 0).sum()) > 100
    assert (state.frozen_at == -1).all()
    cdf = marginal(potential, 0.3).cumsum(0).numpy()
    assert stats.kstest(state.params[:, 0].numpy(), lambda x: _interpolated(x, cdf)).pvalue > 1e-5


def test_with_all_data_it_is_mala() -> None:
    """rho = 1: the same proposals and decisions as MALA on the density, given the same numbers."""
    potential = Location(DATA)
    theta = torch.linspace(-1, 1, 200, dtype=torch.float64)[:, None]
    kernel, plain = kernels.corrected_mala(0.1, 1.0), kernels.mala(0.1)
    density = Density(lambda x: -potential.losses(x).sum(1) - x[:, 0] ** 2 / 8)
    one, other = kernel.init(theta, potential), plain.init(theta, density)
    one = one._replace(memory=CarriedBatch(torch.ones(200, 12, dtype=torch.bool)))
    ours, theirs = seeded(1), seeded(1)
    for _ in range(20):
        one, info = kernel.step(one, potential, ours)
        torch.rand(200, 12, dtype=torch.float64, generator=theirs)  # those that chose the batch
        other, same_info = plain.step(other, density, theirs)
        assert torch.equal(info.is_accepted, same_info.is_accepted)
        torch.testing.assert_close(one.params, other.params)
    assert kernel.approximation(fixed_data=False) == []


def test_large_data_are_hardly_ever_moved() -> None:
    """As the docstring warns: the proposed batch has another size than the one at rest, and Y sums that over the data."""
    rates = []
    for n in (12, 48, 192):
        potential = Location(DATA.repeat(n // 12))
        kernel, g = kernels.corrected_mala(0.15 * 12 / n, 0.2), seeded(6)
        _, infos = walk(exact_pairs(potential, kernel, 2000, g), potential, kernel, 20, g)
        rates.append(float(torch.stack([info.acceptance_rate for info in infos]).mean()))
    assert rates[0] > 0.05
    assert rates[0] > 3 * rates[1] > 9 * rates[2]
    assert rates[2] < 0.003


def test_it_says_what_it_samples() -> None:
    said = kernels.corrected_mala(0.1, 0.25).approximation(fixed_data=False)
    assert "prod_i (exp(-1.75 lambda loss_i) + 1 - rho), rho = 0.25" in said[0]
    said = kernels.corrected_mala(0.1, 0.25, zeta=0.0, compensate=False).approximation(fixed_data=True)
    assert "prod_i (rho^1 exp(-lambda loss_i) + 1 - rho)" in said[0]


@pytest.mark.parametrize(("rho", "zeta"), [(0.0, 1.0), (1.1, 1.0), (math.nan, 1.0), (0.5, math.inf)])
def test_bad_arguments_are_refused_by_name(rho: float, zeta: float) -> None:
    with pytest.raises(ValueError, match="`rho` must lie in" if zeta == 1 else "`zeta` must be finite"):
        kernels.corrected_mala(0.1, rho, zeta=zeta)


def test_a_density_has_no_examples() -> None:
    kernel = kernels.corrected_mala(0.1, 0.5)
    with pytest.raises(PerExampleLossRequired, match="batches of its own"):
        adammcmc.sample_density(lambda x: -x.square().sum(1), torch.zeros(3, 1), kernel, num_steps=2)


# --- the other APIs ------------------------------------------------------------------------------------------------


def examples_of(model: nn.Module, rows: int = 12) -> TensorExamples:
    dtype = next(model.parameters()).dtype
    return TensorExamples(lambda x, y: F.cross_entropy(model(x.to(dtype)), y, reduction="none"), X[:rows], Y[:rows])


def optimizer(model: nn.Module, **options) -> CorrectedMALA:  # type: ignore[no-untyped-def]
    settings = {"step_size": 0.02, "rho": 0.5, "num_data": 12, "prior": Gaussian(), "generator": seeded()}
    return CorrectedMALA(model.parameters(), **(settings | {"examples": examples_of(model)} | options))


def test_a_data_density_makes_the_same_chain() -> None:
    """The functional API: many chains, each with a batch of its own."""
    target = DataDensity(lambda p, x: torch.log(torch.cosh(p - x)), DATA, prior=Gaussian(2.0), batch_size=1)
    kernel, potential = kernels.corrected_mala(0.15, 0.4), Location(DATA)
    start = torch.linspace(-1, 1, 30, dtype=torch.float64)[:, None]
    (one, other), g, h = (kernel.init(start, target), kernel.init(start, potential)), seeded(), seeded()
    for _ in range(30):
        one, info = kernel.step(one, target, g)
        other, same_info = kernel.step(other, potential, h)
        torch.testing.assert_close(one.params, other.params)
        assert torch.equal(info.is_accepted, same_info.is_accepted)
    draws, info = adammcmc.sample_density(target, start, kernel, num_steps=20, progress=False)
    assert draws.shape == (30, 20, 1)
    assert 0 < int(info.is_accepted.sum()) < 600


def test_the_optimizer_makes_the_same_chain() -> None:
    p = nn.Parameter(torch.full((1,), 0.3, dtype=torch.float64))
    examples = TensorExamples(lambda x: torch.log(torch.cosh(p - x)), DATA)
    sampler = CorrectedMALA([p], 0.15, rho=0.4, num_data=12, prior=Gaussian(2.0), examples=examples, generator=seeded())
    kernel, potential = kernels.corrected_mala(0.15, 0.4), Location(DATA)
    state, g = kernel.init(torch.full((1, 1), 0.3, dtype=torch.float64), potential), seeded()
    accepted = 0
    for _ in range(60):
        sampler.step()
        state, info = kernel.step(state, potential, g)
        torch.testing.assert_close(p.detach(), state.params[0])
        assert bool(sampler.info.is_accepted) == bool(info.is_accepted)
        torch.testing.assert_close(sampler.info.loss, info.loss[0], equal_nan=True)
        accepted += int(info.is_accepted)
    assert 0 < accepted < 60


def test_a_run_is_resumed_bit_for_bit_with_its_batch() -> None:
    model, other = network(), network()
    sampler = optimizer(model)
    for _ in range(20):
        sampler.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "sampler": sampler.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = optimizer(other, generator=seeded(99))
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["sampler"])
    for _ in range(20):
        sampler.step()
        resumed.step()
        assert torch.equal(sampler.info.log_ratio, resumed.info.log_ratio)
    assert same(weights(model), weights(other))


def test_weights_that_someone_moved_are_evaluated_again() -> None:
    """On the carried batch: the loss of the old place is void."""
    model = network()
    sampler = optimizer(model)
    for _ in range(5):
        sampler.step()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    mask = sampler.chains.memory.mask[0].clone()
    losses = examples_of(model).losses(slice(None)).detach()
    returned = sampler.step()
    torch.testing.assert_close(float(returned), float(losses[mask].mean()))


def test_it_says_what_it_is_and_what_it_cannot_do() -> None:
    model = network()
    sampler = optimizer(model)
    said = sampler.describe()
    assert "corrected stochastic MALA" in said
    assert "approximate: it samples prior * prod_i (exp(-1.5 lambda loss_i) + 1 - rho), rho = 0.5" in said
    norm = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(PerExampleLossRequired, match="uses the statistics of its batch"):
        optimizer(norm).step()
    optimizer(norm.eval()).step()
    with pytest.raises(ValueError, match="`num_data` is 12, but `examples` holds 64"):
        optimizer(model, examples=examples_of(model, 64))
    with pytest.raises(PerExampleLossRequired, match="batches of its own"):
        optimizer(model, examples=None).step()


def test_chains_of_a_stack_have_their_own_batches_and_are_those_of_a_run_one_after_the_other() -> None:
    runs = []
    for stacked in (False, True):
        posterior = adammcmc.sample(
            network(torch.float64),
            (X[:12].double(), Y[:12]),
            F.cross_entropy,
            sampler=partial(CorrectedMALA, step_size=0.02, rho=0.5, prior=Gaussian()),
            batch_size=6,
            num_chains=3,
            stacked=stacked,
            burn_in=5,
            gap=2,
            num_draws=15,
            progress=False,
        )
        assert "corrected stochastic MALA" in posterior.target
        runs.append(posterior)
    for column in ("is_accepted", "num_accepted"):
        assert [r[column] for r in runs[0].index] == [r[column] for r in runs[1].index]
    for one, other in zip(*runs, strict=True):
        for key in one:
            torch.testing.assert_close(one[key], other[key], rtol=1e-7, atol=1e-7)
    accepted = [sum(r["num_accepted"] for r in runs[0].chain(c).index) for c in range(3)]
    assert 0 < sum(accepted) < 3 * 30


@pytest.mark.parametrize(
    ("layer", "error", "words"),
    [
        (nn.BatchNorm1d(8), PerExampleLossRequired, "uses the statistics of its batch"),
        (nn.Dropout(0.5), StochasticClosure, "draws random numbers"),
    ],
    ids=["batch statistics", "dropout"],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_losses_that_are_no_function_of_the_weights_are_refused_in_both_ways_of_running(
    layer: nn.Module, error: type[Exception], words: str, stacked: bool
) -> None:
    model = nn.Sequential(nn.Linear(5, 8), layer, nn.Tanh(), nn.Linear(8, 3)).train()
    make = partial(CorrectedMALA, step_size=1e-3, rho=0.5, prior=Gaussian())
    data = torch.randn(40, 5), torch.randint(3, (40,))
    with pytest.raises(error, match=words):
        adammcmc.sample(
            model,
            data,
            F.cross_entropy,
            sampler=make,
            num_chains=2,
            num_draws=2,
            gap=1,
            burn_in=1,
            stacked=stacked,
            progress=False,
        )
