"""To how many nats U is known, and what is said where that is too few."""

from __future__ import annotations

import copy
import itertools
import warnings
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adammcmc
from adammcmc import AlwaysAccept, FullData, Gaussian, StochasticClosure, TensorExamples, Underdamped
from adammcmc.target.resolution import agree, roughness, spacing
from tests.optimizers import OPTIMIZERS, X, Y, adam_mcmc, closure, network, seeded, underdamped


@pytest.mark.parametrize("noise", [0.0, 0.01, 1.0, 30.0])
def test_noise_is_told_from_a_function_that_is_only_steep(noise: float) -> None:
    numbers = numpy.random.default_rng(0)
    params = (torch.linspace(1.0, 2.0, 50, dtype=torch.float64).expand(2, 50).clone(),)
    steep = lambda x: 1e4 * (x[0].sin().sum(1) + 0.1 * x[0].pow(3).sum(1))  # noqa: E731
    found = [roughness(lambda x: steep(x) + noise * torch.from_numpy(numbers.normal(size=2)), params) for _ in range(20)]
    if noise == 0:
        assert float(torch.stack(found).max()) < 1e-3  # it moves by nats between two points
    else:
        assert 0.6 * noise < float(torch.stack(found).mean()) < 1.3 * noise
        assert float(torch.stack(found).quantile(0.1)) > 0.4 * noise  # a single line must not understate it


def test_the_spacing_of_means_and_of_single_losses() -> None:
    mean = torch.tensor([1000.0])
    assert float(spacing(mean, 2e4)) == pytest.approx(2e4 * 2.0**-14)  # 1.2 nats
    assert float(spacing(mean.double(), 2e4)) < 1e-8
    single = torch.full((1, 20000), 1000.0)
    assert float(spacing(single, 2e4)) == pytest.approx(2e4 * 2.0**-14 / (12 * 20000) ** 0.5)


LARGE = torch.tensor(1000.0)


def shifted(model: nn.Module, kind: str = "mean") -> Any:
    """A loss near 1,000, as a Gaussian with a small noise has it."""

    def loss() -> Tensor:
        losses = F.cross_entropy(model(X), Y, reduction="none") + LARGE
        return losses.mean() if kind == "mean" else losses.double().mean() if kind == "double" else losses

    return loss


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_float32_mean_with_too_few_digits_is_warned_of(name: str) -> None:
    model = network()
    options: dict[str, Any] = {"fixed_data": True, "num_data": 20_000}
    sampler = OPTIMIZERS[name](model, **options)
    with pytest.warns(UserWarning, match="U is known to about 1.2 nats only") as caught:
        sampler.step(shifted(model))
    assert caught[0].filename == __file__
    assert "U is known to about 1.2 nats only (spacing of float32 mean losses)" in sampler.describe()
    sampler.step(shifted(model))  # said once
    other = OPTIMIZERS[name](copy.deepcopy(model), **options)
    other.load_state_dict(sampler.state_dict())
    assert "U is known to about 1.2 nats only" in other.describe()


def test_on_batches_the_line_says_so_without_a_warning() -> None:
    """The noise of a batch is larger by far."""
    model = network()
    sampler = underdamped(model, num_data=20_000)
    sampler.step(shifted(model))
    assert "U is known to about 1.2 nats only" in sampler.describe()


@pytest.mark.parametrize("kind", ["none", "double"])
def test_losses_of_the_examples_and_doubles_have_the_digits(kind: str) -> None:
    model = network()
    sampler = underdamped(model, fixed_data=True, num_data=64, inverse_temperature=20_000 / 64)
    sampler.step(shifted(model, kind))
    assert sampler.describe().endswith("| exact")
    unadjusted = underdamped(model, fixed_data=True, num_data=20_000, acceptance=AlwaysAccept())
    unadjusted.step(shifted(model))  # nobody looks at U
    assert unadjusted.resolution is None


def test_sample_says_so_in_both_ways_of_running() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + LARGE

    for stacked in (True, False):
        sampler = partial(Underdamped, step_size=1e-3, prior=Gaussian(), inverse_temperature=20_000 / 64)
        with pytest.warns(UserWarning, match="U is known to about 1.2 nats only"):
            posterior = adammcmc.sample(
                network(), (X, Y), loss, sampler=sampler, num_draws=1, gap=1, num_chains=2, stacked=stacked, progress=False
            )
        assert "approximate: U is known to about 1.2 nats only" in posterior.target


def in_bfloat16(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(x)
    return F.cross_entropy(outputs.float(), y, reduction=reduction)


@pytest.mark.parametrize(("num_data", "is_coarse"), [(64, False), (50_000, True)])
def test_bfloat16_is_exact_on_few_data_and_not_on_many(num_data: int, is_coarse: bool) -> None:
    """Roughness grows with lambda n, here through num_data alone."""
    model = network()
    sampler = underdamped(model, fixed_data=True, num_data=num_data)
    before = [p.detach().clone() for p in model.parameters()]
    random_numbers = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler.step(lambda: in_bfloat16(model, X, Y))
    assert bool(caught) == is_coarse
    assert sampler.describe().endswith("(bfloat16 arithmetic in the loss)" if is_coarse else "| exact")
    assert sampler.resolution is not None
    assert 1e-5 < sampler.resolution.nats / num_data < 1e-3
    assert torch.equal(random_numbers, torch.get_rng_state())
    if not bool(sampler.info.is_accepted):
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_measuring_changes_no_chain_and_full_data_are_measured_on_all_examples() -> None:
    chains = []
    for threshold in (True, False):
        model = network()
        examples = TensorExamples(lambda x, y, model=model: in_bfloat16(model, x, y, "none"), X, Y)
        sampler = underdamped(model, num_data=64, acceptance=FullData(chunk_size=30), examples=examples)
        if not threshold:
            sampler.chains._measure_resolution = lambda potential: None  # type: ignore[method-assign]
        for i in range(4):
            rows = slice(16 * i, 16 * i + 16)
            sampler.step(lambda rows=rows, model=model: in_bfloat16(model, X[rows], Y[rows]))
        chains.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        if threshold:
            assert sampler.resolution is not None
            assert 0 < sampler.resolution.nats < 0.1
    assert torch.equal(*chains)


# --- random numbers under fixed data ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-4, 1e-6])
def test_random_numbers_under_fixed_data_are_refused_however_small(size: float) -> None:
    for optimizer in ("Underdamped", "ExactAdamMCMC"):
        model = network()
        loss = closure(model)
        with pytest.raises(StochasticClosure, match="the loss draws random numbers"):
            OPTIMIZERS[optimizer](model, fixed_data=True).step(lambda loss=loss: loss() + size * torch.randn(()))


def test_noise_that_is_none_of_torchs_is_judged_in_nats() -> None:
    """A relative 1e-5 of the mean passes where it is a small part of a nat, and not where n makes it one."""
    model, calls = network(), itertools.count()
    loss = closure(model)

    def noisy() -> Tensor:
        return loss() + 1e-5 * (next(calls) % 2)

    adam_mcmc(model, fixed_data=True, num_data=64).step(noisy)
    with pytest.raises(StochasticClosure, match="multiplied by 100000"):
        adam_mcmc(model, fixed_data=True, num_data=100_000).step(noisy)


def test_numbers_that_change_nothing_do_no_harm() -> None:
    """A DataLoader draws a seed whenever it is iterated."""
    model = network()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=64)

    def loss() -> Tensor:
        ((x, y),) = loader
        return F.cross_entropy(model(x), y)

    sampler = underdamped(model, fixed_data=True, generator=seeded())
    for _ in range(3):
        sampler.step(loss)
    assert sampler.describe().endswith("exact")


def test_a_density_with_noise_of_a_nat_is_refused() -> None:
    noise = numpy.random.default_rng(0)
    with pytest.raises(StochasticClosure):
        adammcmc.sample_density(
            lambda x: -x.square().sum(1) - 2e4 - torch.from_numpy(noise.normal(size=4)),
            torch.zeros(4, 1, dtype=torch.float64),
            adammcmc.kernels.mala(0.1),
            num_steps=2,
        )


def test_two_evaluations_agree() -> None:
    a = torch.tensor([[1.0, 2.0, 3.0]])
    assert agree(a, a * (1 + 2e-7), 1e6)  # rounding
    assert not agree(a, a * (1 + 2e-7), 1e6, exactly=True)
    assert not agree(a, a + 1e-5, 1e4)  # a tenth of a nat
    assert agree(a, a + 1e-5, 1e3)
    assert not agree(a, a + 1e-5, 1e3, exactly=True)
    assert agree(a, a + 1e-5, 1e4, slack=1e-4)
    assert agree(a * torch.nan, a * torch.nan, 1.0)
    assert not agree(a, a[:, :2], 1.0)
