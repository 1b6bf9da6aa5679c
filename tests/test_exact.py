"""The exact samplers of the optimizer API: the same chains as the functional API, resumed bit for bit, on closed forms."""

from __future__ import annotations

import io
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adammcmc import (
    MALA,
    AlwaysAccept,
    BurnIn,
    ExactAdamMCMC,
    FullData,
    Gaussian,
    Microcanonical,
    StochasticClosure,
    TensorExamples,
    Underdamped,
    UniformBox,
    kernels,
    sample_density,
)
from tests.optimizers import X, Y, adam_mcmc, closure, exact_adam, mala, network, same, seeded, underdamped, weights

WIDE = UniformBox(-1e9, 1e9)


def skewed(x: torch.Tensor) -> torch.Tensor:
    return (2 * x - x.exp()).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [{}, {"friction": 1.0}, {"num_leapfrog": 3}, {"persistent_uniform": False}, {"acceptance": AlwaysAccept()}],
    ids=str,
)
def test_underdamped_is_the_same_chain_in_both_apis(options: dict, dtype: torch.dtype) -> None:  # type: ignore[type-arg]
    p = nn.Parameter(torch.full((7,), 0.1, dtype=dtype))
    sampler = Underdamped([p], 0.6, num_data=1, prior=WIDE, fixed_data=True, generator=seeded(), **options)
    path, ratios = [], []
    for _ in range(40):
        sampler.step(lambda: -skewed(p[None])[0])
        path.append(p.detach().clone())
        ratios.append(sampler.info.log_ratio)
    kernel = kernels.underdamped(0.6, num_chances=8, **options)  # the optimizer's default
    draws, info = sample_density(skewed, torch.full((1, 7), 0.1, dtype=dtype), kernel, num_steps=40, seed=seeded())
    assert torch.equal(torch.stack(path), draws[0])
    assert torch.equal(torch.stack(ratios).nan_to_num(), info.log_ratio[0].nan_to_num())
    if "acceptance" not in options:
        assert int(info.is_accepted.sum()) > 0
        assert float(info.acceptance_rate.mean()) < 0.99  # of the first moves


def test_exact_adam_is_the_same_chain_in_both_apis() -> None:
    p = nn.Parameter(torch.full((7,), 0.1, dtype=torch.float64))
    options = {"sigma": 0.3, "sigma_along": 1.0, "momentum_spread": (1.5, 3.0)}
    sampler = ExactAdamMCMC([p], 0.2, num_data=1, prior=WIDE, fixed_data=True, generator=seeded(), **options)
    path = []
    for _ in range(40):
        sampler.step(lambda: -skewed(p[None])[0])
        path.append(p.detach().clone())
    draws, info = sample_density(
        skewed,
        torch.full((1, 7), 0.1, dtype=torch.float64),
        kernels.exact_adam_mcmc(0.2, **options),
        num_steps=40,
        seed=seeded(),
    )
    assert torch.equal(torch.stack(path), draws[0])
    assert 0 < int(info.is_accepted.sum()) < 40


@pytest.mark.parametrize("make", [underdamped, exact_adam, mala])
def test_a_burn_in_is_resumed_bit_for_bit(make) -> None:  # type: ignore[no-untyped-def]
    """Saved in the middle of adapting: settings, preconditioner, momenta, generator, health, all go on."""
    options = {"fixed_data": True, "burn_in": BurnIn(num_steps=60, window=15)}
    model = network()
    sampler = make(model, **options)
    for _ in range(35):
        sampler.step(closure(model))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "sampler": sampler.state_dict()}, file)
    other = network()
    resumed = make(other, **(options | {"generator": seeded(999)}))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["sampler"])
    for _ in range(100):
        sampler.step(closure(model))
        resumed.step(closure(other))
    assert not sampler.is_adapting
    assert same(weights(model), weights(other))
    assert [g["lr"] for g in sampler.param_groups] == [g["lr"] for g in resumed.param_groups]
    assert sampler.health() == resumed.health() or str(sampler.health()) == str(resumed.health())
    assert torch.equal(sampler.generator.get_state(), resumed.generator.get_state())


@pytest.mark.parametrize(
    "which", ["fixed data", "full data, minibatch gradients", "hmc", "microcanonical", "microcanonical, full data"]
)
def test_linear_regression_has_its_closed_form(which: str) -> None:
    """A posterior that is Gaussian: mean and covariance within Monte Carlo error, from the optimizer API."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(50, 3, dtype=torch.float64, generator=generator)
    targets = inputs @ torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64) + 0.5 * torch.randn(
        50, dtype=torch.float64, generator=generator
    )
    precision = inputs.T @ inputs / 0.25 + torch.eye(3, dtype=torch.float64)
    covariance = torch.linalg.inv(precision)
    mean = covariance @ inputs.T @ targets / 0.25
    w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 0.5 * (x @ w - y) ** 2 / 0.25

    options: dict = {"num_data": 50, "prior": Gaussian(1.0), "generator": seeded(3)}  # type: ignore[type-arg]
    kind = Microcanonical if "microcanonical" in which else Underdamped
    if "full data" in which:  # and gradients of minibatches
        options |= {"acceptance": FullData(), "examples": TensorExamples(losses, inputs, targets)}
        sampler = kind([w], 0.02, **options)
    elif which == "hmc":
        sampler = Underdamped([w], 0.03, math.inf, num_leapfrog=5, fixed_data=True, **options)
    else:
        sampler = kind([w], 0.04, fixed_data=True, **options)
    draws = []
    rows = torch.Generator().manual_seed(8)
    for _ in range(6000):
        chosen = slice(None) if sampler.fixed_data else torch.randint(50, (25,), generator=rows)
        sampler.step(lambda: losses(inputs[chosen], targets[chosen]))  # noqa: B023
        draws.append(w.detach().clone())
    kept = torch.stack(draws[500:]).view(50, 110, 3)  # 50 batches, to judge the error
    assert sampler.approximations() == []
    assert 0.3 < float(sampler.mean_acceptance_rate) < 1
    for values, truth in (
        (kept.mean(1), mean),
        ((kept - mean).square().mean(1), covariance.diagonal()),
        (((kept - mean)[..., 0] * (kept - mean)[..., 1]).mean(1), covariance[0, 1]),
    ):
        deviation = (values.mean(0) - truth) / (values.std(0) / math.sqrt(50))
        assert float(deviation.abs().max()) < 4.5, deviation


def test_the_unadjusted_sampler_takes_minibatches_and_says_so() -> None:
    model = network()
    calls = []

    def counted(rows: slice):  # type: ignore[no-untyped-def]
        inner = closure(model, rows)
        return lambda: (calls.append(1), inner())[1]

    sampler = underdamped(model, step_size=1e-3, acceptance=AlwaysAccept())
    for k in range(20):
        sampler.step(counted(slice(k % 4 * 16, k % 4 * 16 + 16)))
    assert len(calls) == 20, "one gradient a step"
    assert sampler.approximations() == ["no Metropolis correction"]


def test_what_a_step_costs() -> None:
    model = network()
    calls = []
    inner = closure(model)

    def counted() -> torch.Tensor:
        calls.append(1)
        return inner()

    sampler = underdamped(model, fixed_data=True)
    for _ in range(10):
        sampler.step(counted)
    assert len(calls) == 13  # one at the start, one a step, and two to see that the data are fixed
    calls.clear()
    sampler = underdamped(model, fixed_data=True, num_leapfrog=4)
    for _ in range(10):
        sampler.step(counted)
    assert len(calls) == 43
    calls.clear()
    sampler = exact_adam(model, momentum_spread=(1.0, 1.0))
    for _ in range(10):
        sampler.step(counted)
    assert len(calls) == 13


def test_exact_optimizers_refuse_what_would_not_be_exact() -> None:
    model = network()
    with pytest.raises(ValueError, match="ExactAdamMCMC needs fixed_data=True"):
        exact_adam(model, fixed_data=False)
    with pytest.raises(ValueError, match="Underdamped needs a proper `prior`"):
        underdamped(model, prior=None)
    with pytest.raises(ValueError, match="ExactAdamMCMC needs a proper `prior`"):
        exact_adam(model, prior=None)
    with pytest.raises(ValueError, match="`momentum_spread` must be two positive numbers"):
        exact_adam(model, momentum_spread=(1.0, 0.0))
    with pytest.raises(ValueError, match="`num_leapfrog` must be a whole number, at least 1"):
        underdamped(model, num_leapfrog=0)
    with pytest.raises(ValueError, match="`friction` must not be negative"):
        underdamped(model, friction=-1.0)
    kernel = kernels.exact_adam_mcmc(0.1, sigma=0.1, momentum_spread=(1.0, 1.0))

    class Minibatches:
        fixed = False

    with pytest.raises(ValueError, match="needs fixed_data=True: the gradient of all data is part of its target"):
        kernel.init(torch.zeros(1, 2), Minibatches())  # type: ignore[arg-type]


def test_a_pilot_measures_the_momentum_spread() -> None:
    model = network()
    sampler = exact_adam(model)
    sampler.step(closure(model))
    assert sampler.momentum_spread is not None
    assert all(s > 0 for s in sampler.momentum_spread)
    for _ in range(300):
        sampler.step(closure(model))
    assert float(sampler.mean_acceptance_rate) > 0.02


def test_a_preconditioner_given_is_used() -> None:
    """A = a^2 and h are A = 1 and a h."""
    paths = []
    for step_size, diagonal in ((0.02, 4.0), (0.04, 1.0)):
        model = network(torch.float64)
        a = [torch.full_like(p, diagonal) for p in model.parameters()]
        sampler = underdamped(model, step_size=step_size, friction=0.5 / step_size, preconditioner=a, fixed_data=True)
        for _ in range(20):
            sampler.step(closure(model))
        paths.append(weights(model))
    for one, two in zip(*paths, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_schedulers_and_groups_drive_the_step_size() -> None:
    model = network()
    groups = [{"params": list(model[0].parameters()), "step_size": 1e-2}, {"params": list(model[2].parameters())}]
    sampler = Underdamped(groups, 5e-2, num_data=64, prior=Gaussian(), fixed_data=True)
    assert [g["lr"] for g in sampler.param_groups] == [1e-2, 5e-2]
    scheduler = torch.optim.lr_scheduler.StepLR(sampler, 1, 0.5)
    sampler.step(closure(model))
    scheduler.step()
    assert [g["lr"] for g in sampler.param_groups] == [5e-3, 2.5e-2]
    sampler.step(lambda: F.cross_entropy(model(X), Y))


@pytest.mark.parametrize("make", [Underdamped, MALA])
def test_a_scheduler_is_refused_while_burn_in_finds_the_step_size(make: type[Underdamped | MALA]) -> None:
    model = network()
    sampler = make(model.parameters(), num_data=64, prior=Gaussian(), fixed_data=True, burn_in=3)
    torch.optim.lr_scheduler.CosineAnnealingLR(sampler, 100)
    with pytest.raises(ValueError, match="a scheduler would overwrite the step size that burn-in finds"):
        sampler.step(closure(model))
    for group in sampler.param_groups:
        del group["initial_lr"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few steps reach nothing
        while sampler.is_adapting:
            sampler.step(closure(model))
    scheduler = torch.optim.lr_scheduler.StepLR(sampler, 1, 0.5)
    found = sampler.param_groups[0]["lr"]
    sampler.step(closure(model))
    scheduler.step()
    assert sampler.param_groups[0]["lr"] == 0.5 * found
    adam = adam_mcmc(model, burn_in=3)  # whose burn-in leaves the learning rate alone
    torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)
    adam.step(closure(model))


def test_a_preconditioner_given_is_not_learnt_over() -> None:
    model = network()
    given = [torch.full_like(p, 2.0) for p in model.parameters()]
    sampler = underdamped(model, preconditioner=given, fixed_data=True, burn_in=60)
    for _ in range(70):
        sampler.step(closure(model))
    assert all(torch.equal(sampler.state[p]["preconditioner"], a) for p, a in zip(model.parameters(), given, strict=True))
    next(iter(model.parameters()))
    for p in model.parameters():
        sampler.state[p]["preconditioner"].fill_(1e-6)
    before = weights(model)
    sampler.step(closure(model))
    moved = max(float((a - b).abs().max()) for a, b in zip(before, weights(model), strict=True))
    assert moved < 3 * 4 * 1e-3 * sampler.param_groups[0]["lr"], "a preconditioner written by the user is used at once"


@pytest.mark.parametrize("when", ["in burn-in", "after it"])
def test_parameters_that_come_or_go_on_the_way(when: str) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(5, 6), nn.Linear(6, 3)

    def loss() -> torch.Tensor:
        return F.cross_entropy(second(first(X).tanh()), Y)

    sampler = Underdamped(first.parameters(), 1e-2, num_data=64, prior=Gaussian(), fixed_data=True, burn_in=60)
    for _ in range(20 if when == "in burn-in" else 90):
        sampler.step(loss)
    sampler.add_param_group({"params": list(second.parameters())})
    before = weights(second)
    for _ in range(80):
        sampler.step(loss)
    assert not same(before, weights(second))
    first.requires_grad_(False)
    for _ in range(40):
        sampler.step(loss)
    assert sampler.health().num_steps > 0


def test_what_was_saved_decides_whether_it_adapts() -> None:
    model = network()
    adapting = underdamped(model, fixed_data=True, burn_in=60)
    for _ in range(20):
        adapting.step(closure(model))
    plain = underdamped(model, fixed_data=True)
    plain.load_state_dict(adapting.state_dict())
    assert plain.is_adapting
    done = underdamped(model, fixed_data=True)
    done.step(closure(model))
    fresh = underdamped(model, fixed_data=True, step_size=None)
    assert fresh.is_adapting
    fresh.load_state_dict(done.state_dict())
    assert not fresh.is_adapting


def test_weights_that_become_double_go_on() -> None:
    for make in (underdamped, exact_adam):
        model = network()
        sampler = make(model, fixed_data=True)
        sampler.step(closure(model))
        model.double()
        sampler.step(closure(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"burn_in": -5}, "`burn_in` must be a number of steps, a BurnIn, or None, got -5"),
        ({"burn_in": True}, "`burn_in` must be a number of steps"),
        ({"burn_in": 200.0}, "`burn_in` must be a number of steps"),
        ({"step_size": 0.0}, "`step_size` must be positive"),
        ({"num_leapfrog": 2.0}, "`num_leapfrog` must be a whole number"),
        ({"preconditioner": {"a": torch.ones(2)}}, "`preconditioner` must have one tensor of the same shape"),
    ],
)
def test_likely_mistakes_are_named(options: dict, message: str) -> None:  # type: ignore[type-arg]
    model = network()
    with pytest.raises(ValueError, match=message):
        underdamped(model, **options).step(closure(model))


def test_no_burn_in_is_none_and_whole_numbers_of_all_kinds_count() -> None:
    assert underdamped(network(), burn_in=0).burn_in is None
    assert underdamped(network(), burn_in=np.int64(50)).burn_in == BurnIn(num_steps=50)
    assert mala(network(), step_size=None).is_adapting


def test_noise_below_the_spacing_counts_the_preconditioner() -> None:
    model = network()
    tiny = [torch.full_like(p, 1e-16) for p in model.parameters()]
    with pytest.raises(ValueError, match=r"`step_size \* A\^1/2` = .* is below the spacing"):
        underdamped(model, preconditioner=tiny).step(closure(model))


def test_batches_that_change_between_steps_are_not_fixed_data() -> None:
    model = network()
    sampler = underdamped(model, fixed_data=True)
    sampler.step(closure(model, slice(0, 32)))
    with pytest.raises(StochasticClosure, match="Minibatches"):
        sampler.step(closure(model, slice(32, 64)))
