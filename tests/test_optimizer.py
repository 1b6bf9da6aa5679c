"""The optimizer's door: torch's contract, and the same chain as the functional door, bit for bit."""

from __future__ import annotations

import copy
import io
import logging
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from adammcmc import (
    MALA,
    AdamMCMC,
    AlwaysAccept,
    FullData,
    Gaussian,
    NonFiniteLoss,
    OptimizerMCMC,
    PerExampleLossRequired,
    Sampler,
    StochasticClosure,
    Target,
    TensorExamples,
    UniformBox,
    kernels,
    sample_density,
)

X = torch.randn(64, 5, generator=torch.Generator().manual_seed(1))
Y = torch.randint(3, (64,), generator=torch.Generator().manual_seed(2))


def network(dtype: torch.dtype = torch.float32, width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)


def closure(model: nn.Module, rows: slice = slice(None)):  # type: ignore[no-untyped-def]
    dtype = next(model.parameters()).dtype
    return lambda: F.cross_entropy(model(X[rows].to(dtype)).float(), Y[rows])


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def adam_mcmc(model: nn.Module, **options) -> AdamMCMC:  # type: ignore[no-untyped-def]
    settings = {"lr": 1e-2, "num_data": 64, "sigma": 1e-2, "sigma_along": 1.0, "generator": seeded()}
    return AdamMCMC(model.parameters(), **(settings | options))


def mala(model: nn.Module, **options) -> MALA:  # type: ignore[no-untyped-def]
    settings = {"step_size": 1e-3, "num_data": 64, "prior": Gaussian(), "generator": seeded()}
    return MALA(model.parameters(), **(settings | options))


def sgd_mcmc(model: nn.Module, **options) -> OptimizerMCMC:  # type: ignore[no-untyped-def]
    settings = {"lr": 1e-2, "momentum": 0.9, "num_data": 64, "sigma": 1e-2, "generator": seeded()}
    return OptimizerMCMC(model.parameters(), torch.optim.SGD, **(settings | options))


DOORS = {"AdamMCMC": adam_mcmc, "MALA": mala, "OptimizerMCMC": sgd_mcmc}


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- one mathematics behind two doors -------------------------------------------------------------------------------


def skewed(x: torch.Tensor) -> torch.Tensor:
    return (2 * x - x.exp()).sum(1)


@pytest.mark.parametrize("dim", [3, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("door", ["AdamMCMC", "MALA", "OptimizerMCMC"])
def test_the_two_doors_agree_bit_for_bit(door: str, dtype: torch.dtype, dim: int) -> None:
    """Also where the optimizer's door works in place and block by block (dim is more than a block, and no multiple of 16)."""
    scale = 1 / math.sqrt(dim)
    options = {"sigma": 0.5 * scale, "sigma_along": 1.5}
    p = nn.Parameter(torch.full((dim,), 0.1, dtype=dtype))
    common = {"num_data": 1, "generator": seeded(), "fixed_data": True}
    if door == "AdamMCMC":
        sampler: Sampler = AdamMCMC([p], lr=0.1 * scale, **options, **common)
        kernel = kernels.adam_mcmc(0.1 * scale, **options)
    elif door == "MALA":
        step_size = 3 * scale ** (2 / 3)
        sampler = MALA([p], step_size, prior=UniformBox(-1e9, 1e9), sigma_along=0.5, **common)
        kernel = kernels.mala(step_size, sigma_along=0.5)
    else:
        sampler = OptimizerMCMC([p], torch.optim.SGD, lr=0.1 * scale, momentum=0.5, **options, **common)
        kernel = kernels.optimizer_mcmc(lambda ps: torch.optim.SGD(ps, lr=0.1 * scale, momentum=0.5), **options)
    path, ratios = [], []
    for _ in range(30):
        sampler.step(lambda: -skewed(p[None])[0])
        path.append(p.detach().clone())
        ratios.append(sampler.info.log_ratio)
    draws, info = sample_density(skewed, torch.full((1, dim), 0.1, dtype=dtype), kernel, num_steps=30, seed=seeded())
    assert torch.equal(torch.stack(path), draws[0])
    assert torch.equal(torch.stack(ratios), info.log_ratio[0])
    assert 0 < int(info.is_accepted.sum()) < 30


@pytest.mark.parametrize("door", DOORS)
def test_split_is_unsplit_bit_for_bit(door: str) -> None:
    """Save to bytes, load into a fresh model and sampler, go on: the same weights, state and random numbers."""

    def run(model: nn.Module, sampler: Sampler, steps: range) -> None:
        for k in steps:
            sampler.step(closure(model, slice(k % 4 * 16, k % 4 * 16 + 16)))

    model = network()
    sampler = DOORS[door](model)
    run(model, sampler, range(10))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "sampler": sampler.state_dict()}, file)
    run(model, sampler, range(10, 25))

    other = network()
    resumed = DOORS[door](other, generator=seeded(999))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["sampler"])
    run(other, resumed, range(10, 25))
    assert same(weights(model), weights(other))
    assert torch.equal(sampler.generator.get_state(), resumed.generator.get_state())
    assert sampler.num_steps == resumed.num_steps == 25
    assert torch.equal(sampler.mean_acceptance_rate, resumed.mean_acceptance_rate)
    torch.testing.assert_close(sampler.state_dict()["state"], resumed.state_dict()["state"], rtol=0, atol=0)


def test_no_noise_and_always_accept_is_torch_adam() -> None:
    model, reference = network(torch.float64), network(torch.float64)
    sampler = adam_mcmc(model, sigma=0.0, sigma_along=0.0, betas=(0.9, 0.99), acceptance=AlwaysAccept())
    optimizer = torch.optim.Adam(reference.parameters(), lr=1e-2, betas=(0.9, 0.99))
    for _ in range(100):
        sampler.step(lambda: F.cross_entropy(model(X.double()), Y))
        optimizer.zero_grad()
        F.cross_entropy(reference(X.double()), Y).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_a_step_calls_the_closure_as_often_as_it_says() -> None:
    """Algorithm 1: current and proposed. Fixed data: proposed only (the first step pays for its start, and for a check)."""
    for door, options, calls in (
        (adam_mcmc, {}, 20),
        (adam_mcmc, {"fixed_data": True}, 12),
        (adam_mcmc, {"acceptance": AlwaysAccept()}, 10),
        (mala, {}, 20),
        (mala, {"fixed_data": True}, 12),
    ):
        model = network()
        sampler = door(model, **options)
        count = 0

        def counted() -> torch.Tensor:
            nonlocal count
            count += 1
            return closure(model)()  # noqa: B023

        for _ in range(10):
            sampler.step(counted)
        assert count == calls, (door, options)


# --- the target's units ---------------------------------------------------------------------------------------------


def test_the_log_ratio_is_in_units_of_the_data_sum() -> None:
    """lambda * n * (mean loss difference), plus the prior's and the proposal's part."""
    model = network(torch.float64)
    sampler = adam_mcmc(model, inverse_temperature=0.5, num_data=640, prior=Gaussian(0.7))
    before = weights(model)
    seen = []

    def recording() -> torch.Tensor:
        loss = F.cross_entropy(model(X.double()), Y)
        seen.append((weights(model), loss.item()))
        return loss

    returned = sampler.step(recording)
    (_, loss), (proposed, proposed_loss) = seen
    prior = -0.5 / 0.7**2 * sum(float((q**2).sum() - (p**2).sum()) for p, q in zip(before, proposed, strict=True))
    expected = -0.5 * 640 * (proposed_loss - loss) + prior + float(sampler.info.log_q_ratio)
    assert float(returned) == pytest.approx(loss)
    assert float(sampler.info.log_ratio) == pytest.approx(expected, rel=1e-9)
    assert float(sampler.info.proposed_loss) == pytest.approx(proposed_loss)


def test_mean_and_per_example_closures_are_the_same_target() -> None:
    ratios = []
    for reduction in ("mean", "none"):
        model = network(torch.float64)
        sampler = mala(model)
        sampler.step(lambda: F.cross_entropy(model(X.double()), Y, reduction=reduction))  # noqa: B023
        ratios.append(float(sampler.info.log_ratio))
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-9)
    assert float(sampler.info.num_examples) == 64


def test_the_bounded_prior_is_never_left() -> None:
    model = network()
    limit = max(float(p.detach().abs().max()) for p in model.parameters()) + 0.02
    for acceptance in (None, AlwaysAccept()):
        sampler = adam_mcmc(model, sigma=2e-3, prior=UniformBox(-limit, limit), acceptance=acceptance)
        outside = 0
        for _ in range(60):
            sampler.step(closure(model))
            outside += not bool(sampler.info.is_finite)
            assert max(float(p.detach().abs().max()) for p in model.parameters()) <= limit
        assert outside > 0


def test_bayesian_linear_regression_has_its_closed_form() -> None:
    """The whole road with an exact sampler: posterior mean and covariance of the weights, n = 64, P = 5."""
    x = X.double()
    y = x @ torch.tensor([1.0, -0.5, 0.2, 0.0, 2.0], dtype=torch.float64) + 0.3 * torch.randn(64, generator=seeded()).double()
    precision = x.T @ x / 0.3**2 + torch.eye(5).double() / 4
    mean = torch.linalg.solve(precision, x.T @ y / 0.3**2)
    model = nn.Linear(5, 1, bias=False).double()
    sampler = MALA(
        model.parameters(),
        0.5e-3,
        num_data=64,
        prior=Gaussian(2.0),
        fixed_data=True,
        preconditioner=[torch.linspace(0.8, 1.2, 5)[None]],
        generator=seeded(),
    )
    assert sampler.approximations() == []
    draws = []
    for k in range(12_000):
        sampler.step(lambda: 0.5 * ((model(x)[:, 0] - y) / 0.3).square())
        if k >= 1000:
            draws.append(model.weight.detach().clone()[0])
    assert 0.4 < float(sampler.mean_acceptance_rate) < 0.95
    sample = torch.stack(draws)
    batches = sample.reshape(50, -1, 5)
    for power, truth in ((1, mean), (2, torch.linalg.inv(precision).diagonal() + mean**2)):
        means = batches.pow(power).mean(1)
        error = means.std(0) / math.sqrt(len(means))
        assert float(((means.mean(0) - truth) / error).abs().max()) < 4.5


# --- torch's contract -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", DOORS)
def test_rejection_restores_the_weights_bit_for_bit(door: str) -> None:
    model = network()
    sampler = DOORS[door](model, sigma=0.05)
    rejected = accepted = 0
    for _ in range(30):
        before = weights(model)
        sampler.step(closure(model))
        if sampler.info.is_accepted:
            accepted += 1
            assert not same(before, weights(model))
        else:
            rejected += 1
            assert same(before, weights(model))
    assert rejected > 0, (accepted, rejected)


def test_a_running_adam_is_taken_over() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    for _ in range(20):
        optimizer.zero_grad()
        closure(model)().backward()
        optimizer.step()
    sampler = adam_mcmc(model, sigma=1e-3)
    sampler.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p in model.parameters():
        assert torch.equal(sampler.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])
    assert sampler.param_groups[0]["lr"] == 1e-2, "the sampler's own settings stay"
    sampler.step(closure(model))
    assert {float(s["step"]) for s in sampler.state.values()} == {21.0}
    # and back: a sampler's state serves Adam
    fresh = torch.optim.Adam(model.parameters())
    fresh.load_state_dict({"state": sampler.state_dict()["state"], "param_groups": fresh.state_dict()["param_groups"]})
    closure(model)().backward()
    fresh.step()
    assert {float(s["step"]) for s in fresh.state.values()} == {22.0}


def test_taking_over_weight_decay_names_the_prior_it_was() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.01)
    closure(model)().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match=r"prior=Gaussian\(1.25\)"):
        adam_mcmc(model).load_state_dict(optimizer.state_dict())


def test_foreign_states_are_refused() -> None:
    model = network()
    with pytest.raises(ValueError, match="not a state of MALA"):
        mala(model).load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    with pytest.raises(ValueError, match="state of MALA, not of AdamMCMC"):
        adam_mcmc(model).load_state_dict(mala(model).state_dict())
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    closure(model)().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"neither a state of AdamMCMC nor of torch"):
        adam_mcmc(model).load_state_dict(optimizer.state_dict())
    smaller = torch.optim.Adam(list(model.parameters())[:2])
    with pytest.raises(ValueError, match="parameter groups differ"):
        adam_mcmc(model).load_state_dict(smaller.state_dict())


def test_groups_have_their_own_lr_and_sigma() -> None:
    model = network(torch.float64)
    first, second = list(model[0].parameters()), list(model[2].parameters())
    sampler = AdamMCMC(
        [{"params": first, "lr": 0.0, "sigma": 1e-6}, {"params": second, "sigma": 0.01}],
        lr=1e-3,
        num_data=64,
        sigma=0.1,
        generator=seeded(),
        acceptance=AlwaysAccept(),
    )
    start = weights(model)
    for _ in range(10):
        sampler.step(closure(model))
    moved = [float((a - b).abs().mean()) for a, b in zip(start, weights(model), strict=True)]
    assert max(moved[:2]) < 1e-5
    assert min(moved[2:]) > 1e-3


def test_the_ratio_with_groups_is_that_of_one_gaussian() -> None:
    """Two groups with different sigma: log_q_ratio against dense linear algebra on all parameters together."""
    p, q = nn.Parameter(torch.zeros(3).double()), nn.Parameter(torch.zeros(2).double())
    sampler = AdamMCMC(
        [{"params": [p], "sigma": 0.1, "lr": 0.05}, {"params": [q], "sigma": 0.3, "lr": 0.2}],
        num_data=1,
        sigma=1.0,
        sigma_along=1.2,
        generator=seeded(),
    )
    seen = []

    def loss() -> torch.Tensor:
        seen.append(torch.cat([p.detach(), q.detach()]).clone())
        return (p * torch.tensor([1.0, -2.0, 3.0])).sum() + (q * torch.tensor([-1.0, 4.0])).sum()

    sampler.step(loss)
    here, there = seen
    step = torch.tensor([0.05, -0.05, 0.05, -0.2, 0.2], dtype=torch.float64)  # Adam's first step is lr * sign
    covariance = torch.tensor([0.01] * 3 + [0.09] * 2).double().diag() + 1.44 * torch.outer(step, step)
    normal = torch.distributions.MultivariateNormal
    expected = normal(there - step, covariance).log_prob(here) - normal(here - step, covariance).log_prob(there)
    assert float(sampler.info.log_q_ratio) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("door", DOORS)
def test_learning_rate_schedulers_drive_the_sampler(door: str) -> None:
    model = network()
    sampler = DOORS[door](model)
    scheduler = CosineAnnealingLR(sampler, T_max=10)
    rate = sampler.param_groups[0]["lr"]
    for _ in range(5):
        sampler.step(closure(model))
        scheduler.step()
    assert sampler.param_groups[0]["lr"] == pytest.approx(rate / 2)


def test_one_cycle_moves_the_betas_too() -> None:
    model = network()
    sampler = adam_mcmc(model)
    scheduler = OneCycleLR(sampler, max_lr=0.1, total_steps=20)
    for _ in range(10):
        sampler.step(closure(model))
        scheduler.step()
    assert sampler.param_groups[0]["betas"][0] != 0.99


def test_a_group_can_be_added_and_a_layer_unfrozen_on_the_way() -> None:
    model = network()
    model[2].bias.requires_grad_(False)
    sampler = AdamMCMC(model[2].parameters(), num_data=64, sigma=1e-3, sigma_along=3.0, generator=seeded())
    frozen = weights(model)
    sampler.step(closure(model))
    assert torch.equal(model[2].bias, frozen[3])
    model[2].bias.requires_grad_()
    sampler.add_param_group({"params": model[0].parameters(), "sigma": 5e-3})
    for _ in range(10):
        sampler.step(closure(model))
    assert [float(sampler.state[p]["step"]) for p in model.parameters()] == [10, 10, 11, 10]
    assert not any(torch.equal(a, b) for a, b in zip(frozen, weights(model), strict=True))


def test_a_parameter_that_the_loss_does_not_reach_is_sampled_from_its_prior() -> None:
    model = network()
    unused = nn.Parameter(torch.zeros(50))
    sampler = AdamMCMC([*model.parameters(), unused], num_data=64, sigma=0.05, prior=Gaussian(0.1), generator=seeded())
    for _ in range(50):
        sampler.step(closure(model))
    assert unused.detach().abs().max() > 0


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_of_every_precision(door: str, dtype: torch.dtype) -> None:
    model = network(dtype)
    sampler = DOORS[door](model, sigma=0.02)
    for _ in range(20):
        sampler.step(closure(model))
    assert all(p.dtype == dtype for p in model.parameters())
    assert all(p.isfinite().all() for p in model.parameters())
    assert float(sampler.mean_acceptance_rate) > 0


def test_bfloat16_autocast_in_the_closure() -> None:
    model = network()

    def mixed() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(X), Y)

    sampler = adam_mcmc(model, sigma=1e-3)
    for _ in range(20):
        loss = sampler.step(mixed)
    assert loss.dtype == torch.float32
    assert float(sampler.mean_acceptance_rate) > 0


def test_noise_below_the_spacing_of_the_weights_is_refused() -> None:
    model = network(torch.bfloat16)
    sampler = AdamMCMC(model.named_parameters(), num_data=64, sigma=1e-4)
    before = weights(model)
    with pytest.raises(ValueError, match=r"`sigma` = 0.0001 is below the spacing .*bfloat16 .* '0.weight'.*float32"):
        sampler.step(closure(model))
    assert same(before, weights(model))
    sampler.param_groups[0]["sigma"] = 0.02
    sampler.step(closure(model))
    sampler.param_groups[0]["sigma"] = 1e-4  # a schedule may shrink it later
    with pytest.raises(ValueError, match="below the spacing"):
        sampler.step(closure(model))


def test_gradients_accumulate_over_micro_batches() -> None:
    """One list of closures, one closure that calls backward itself, one big batch: the same step."""
    results = []
    for kind in ("whole", "list", "backward"):
        model = network(torch.float64)
        sampler = adam_mcmc(model, sigma=1e-3)
        parts = [slice(0, 32), slice(32, 64)]

        def loss(rows: slice, model: nn.Module = model) -> torch.Tensor:
            return F.cross_entropy(model(X[rows].double()), Y[rows])

        def accumulate(model: nn.Module = model, loss=loss, parts=parts) -> float:  # type: ignore[no-untyped-def]
            model.zero_grad()
            total = 0.0
            for rows in parts:
                part = loss(rows) / 2
                part.backward()
                total += part.item()
            return total

        for _ in range(5):
            if kind == "whole":
                sampler.step(lambda: loss(slice(None)))
            elif kind == "list":
                sampler.step([lambda rows=rows: loss(rows) for rows in parts])  # type: ignore[misc]
            else:
                sampler.step(accumulate)
        results.append(torch.cat([w.flatten() for w in weights(model)]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(results[0], results[2], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("door", DOORS)
def test_closures_that_call_backward_are_seen_and_their_gradient_stays(door: str) -> None:
    model = network()
    sampler = DOORS[door](model)

    def lbfgs_style() -> torch.Tensor:
        sampler.zero_grad()
        loss = closure(model)()
        loss.backward()
        return loss

    expected = torch.autograd.grad(closure(model)(), list(model.parameters()))
    sampler.step(lbfgs_style)
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)
    plain_model = network()
    plain = DOORS[door](plain_model)
    plain.step(closure(plain_model))
    assert same(weights(model), weights(plain_model))


def test_grad_of_the_user_is_left_alone() -> None:
    model = network()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    adam_mcmc(model).step(closure(model))
    assert all((p.grad == 7.0).all() for p in model.parameters())


def test_draws_do_not_alias_the_model() -> None:
    model = network()
    sampler = adam_mcmc(model, acceptance=AlwaysAccept())
    sampler.step(closure(model))
    info = sampler.info
    loss = float(info.loss)
    pointers = [p.data_ptr() for p in model.parameters()]
    sampler.step(closure(model))
    assert float(info.loss) == loss
    assert pointers == [p.data_ptr() for p in model.parameters()], "parameters are written in place, never re-pointed"


# --- full data ------------------------------------------------------------------------------------------------------


def full_data(model: nn.Module, **options) -> dict:  # type: ignore[no-untyped-def]
    examples = TensorExamples(lambda x, y: F.cross_entropy(model(x.double()), y, reduction="none"), X, Y)
    return {"acceptance": FullData(**options), "examples": examples}


def test_full_data_decides_on_all_examples_whatever_the_batch() -> None:
    model = network(torch.float64)
    sampler = mala(model, **full_data(model, chunk_size=10))
    assert sampler.approximations() == []
    for k in range(10):
        seen = []

        def batch(k: int = k, seen: list = seen) -> torch.Tensor:
            seen.append(F.cross_entropy(model(X.double()), Y, reduction="sum").item())
            rows = slice(k % 4 * 16, k % 4 * 16 + 16)
            return F.cross_entropy(model(X[rows].double()), Y[rows])

        before = weights(model)
        sampler.step(batch)
        info = sampler.info
        assert float(info.num_examples) == 64
        if bool(info.is_accepted):
            prior = -0.5 * sum(float((q**2).sum() - (p**2).sum()) for p, q in zip(before, weights(model), strict=True))
            assert float(info.log_ratio) == pytest.approx(seen[0] - seen[1] + prior + float(info.log_q_ratio), rel=1e-6)
    assert 0 < float(sampler.mean_acceptance_rate) <= 1


@pytest.mark.parametrize("door", ["AdamMCMC", "MALA"])
def test_early_rejection_is_the_same_chain(door: str) -> None:
    """Same decisions, fewer examples."""
    paths, used = [], []
    for early in (False, True):
        model = network(torch.float64)
        size = {"sigma": 0.3, "inverse_temperature": 0.3} if door == "AdamMCMC" else {"step_size": 2e-2}
        sampler = DOORS[door](model, **size, **full_data(model, chunk_size=4, early_rejection=early))
        path = []
        for k in range(60):
            sampler.step(closure(model, slice(k % 4 * 16, k % 4 * 16 + 16)))
            path.append(torch.cat([w.flatten() for w in weights(model)]))
            used.append(float(sampler.info.num_examples))
        paths.append(torch.stack(path))
    assert torch.equal(*paths)
    assert sum(used[60:]) < 0.9 * sum(used[:60])
    assert 1 < len(paths[0].unique(dim=0)) < 60


def test_early_rejection_refuses_negative_losses() -> None:
    model = network(torch.float64)
    examples = TensorExamples(lambda x, y: F.cross_entropy(model(x.double()), y, reduction="none") - 5, X, Y)
    sampler = mala(model, acceptance=FullData(early_rejection=True), examples=examples)
    before = weights(model)
    with pytest.raises(ValueError, match="negative loss"):
        sampler.step(closure(model))
    assert same(before, weights(model))


def test_weights_written_by_others_void_the_caches() -> None:
    model = network(torch.float64)
    sampler = mala(model, fixed_data=True, **full_data(model))
    sampler.step(closure(model))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    sampler.step(closure(model))
    assert float(sampler.info.loss) != pytest.approx(closure(network(torch.float64))().item())
    halved = weights(model)
    loss = closure(model)().item()
    sampler.param_groups[0]["lr"] = 1e-30
    sampler.step(closure(model))
    assert float(sampler.info.loss) == pytest.approx(loss)
    torch.testing.assert_close(halved, weights(model))


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda m: adam_mcmc(m, sigma=-1.0), ValueError, "`sigma` must not be negative"),
        (lambda m: adam_mcmc(m, sigma=0.0), ValueError, "AlwaysAccept"),
        (lambda m: adam_mcmc(m, num_data=0), ValueError, "`num_data` must be the number of training examples"),
        (lambda m: adam_mcmc(m, inverse_temperature=0.0), ValueError, "`inverse_temperature` must be positive"),
        (lambda m: adam_mcmc(m, prior=Gaussian((1.0, 2.0))), ValueError, "2 scales for 4 trainable tensors"),
        (lambda m: mala(m, prior=None), ValueError, "needs a proper `prior`"),
        (lambda m: mala(m, preconditioner=[torch.ones(3)]), ValueError, "one tensor of the same shape"),
        (lambda m: mala(m, preconditioner=[0 * p for p in m.parameters()]), ValueError, "positive everywhere"),
        (lambda m: mala(m, examples=TensorExamples(len, X[:10])), ValueError, "`num_data` is 64, but `examples` holds 10"),
        (lambda m: AdamMCMC([nn.Parameter(torch.zeros(2, dtype=torch.cfloat))], num_data=1, sigma=1), ValueError, "complex"),
        (
            lambda m: AdamMCMC([{"params": m.parameters(), "sigmma": 1.0}], num_data=1, sigma=1.0),
            ValueError,
            "unknown option 'sigmma'.*'sigma'",
        ),
        (
            lambda m: AdamMCMC(
                [{"params": m[0].parameters()}, {"params": m[2].parameters(), "sigma_along": 1.0}], num_data=1, sigma=1.0
            ),
            ValueError,
            "`sigma_along` must be the same in all groups",
        ),
        (lambda m: sgd_mcmc(m, momentun=0.9), TypeError, "momentun"),
        (lambda m: AdamMCMC([*m.parameters(), m[0].weight], num_data=1, sigma=1.0), ValueError, "listed twice"),
        (
            lambda m: AdamMCMC([{"params": m.parameters(), "weight_decay": 0.1}], num_data=1, sigma=1.0),
            ValueError,
            "prior=Gauss",
        ),
        (lambda m: adam_mcmc(m, generator=0), TypeError, "manual_seed"),
        (lambda m: adam_mcmc(m, prior=1.0), TypeError, "`prior` must be a Prior"),
        (lambda m: adam_mcmc(m, acceptance=FullData), TypeError, "such as Minibatch"),
        (lambda m: adam_mcmc(m, examples=[1, 2]), TypeError, "method `losses`"),
        (lambda m: adam_mcmc(m, num_data=64.0), ValueError, "`num_data` must be the number"),
        (lambda m: adam_mcmc(m).load_state_dict(m.state_dict()), ValueError, "neither a state of"),
        (
            lambda m: AdamMCMC([*list(m.parameters())[::-1]], num_data=1, sigma=1.0, prior=Gaussian.fan_in(m)),
            ValueError,
            "another order",
        ),
        (
            lambda m: AdamMCMC([m[0].bias, m[0].weight, *m[2].parameters()], num_data=1, sigma=1.0, prior=Gaussian.fan_in(m)),
            ValueError,
            "another order",
        ),
        (lambda m: AdamMCMC([], num_data=1, sigma=1.0), ValueError, "empty parameter list"),
    ],
)
def test_bad_settings_are_refused_by_name(build, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        build(network())


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (None, TypeError, "needs a closure.*GradScaler"),
        (lambda: 0.5, ValueError, "does not depend on the parameters"),
        (lambda: "loss", TypeError, "as a tensor, got str"),
        (lambda: torch.zeros(3, 2), ValueError, r"shape \(3, 2\)"),
        (lambda: torch.zeros(0), ValueError, "the batch is empty"),
        (lambda: torch.zeros((), dtype=torch.bfloat16), TypeError, "in float32"),
        (lambda: torch.zeros((), dtype=torch.long), TypeError, "torch.int64"),
        (lambda: torch.zeros(()), ValueError, "does not depend on the parameters"),
    ],
)
def test_bad_closures_are_refused_by_name(bad, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    model = network()
    before = weights(model)
    with pytest.raises(error, match=message):
        adam_mcmc(model).step(bad)
    assert same(before, weights(model))


def test_changing_batches_inside_a_step_are_refused() -> None:
    model = network()
    sizes = iter([8, 9])
    with pytest.raises(ValueError, match="must be of the same batch"):
        adam_mcmc(model).step(lambda: F.cross_entropy(model(X[: (n := next(sizes))]), Y[:n], reduction="none"))


def test_a_loss_that_was_computed_outside_is_refused() -> None:
    model = network()
    loss = closure(model)()
    with pytest.raises(ValueError, match=r"same tensor twice.*Put the forward pass inside"):
        adam_mcmc(model).step(lambda: loss)


@pytest.mark.parametrize("bad", [torch.zeros(()), torch.zeros(3), [], [None], 3.0])
def test_what_is_no_closure_is_refused(bad: object) -> None:
    with pytest.raises(TypeError, match=r"needs a closure \(a function\)"):
        adam_mcmc(network()).step(bad)  # type: ignore[arg-type]


def test_fixed_data_that_are_not_fixed_are_refused() -> None:
    """Dropout, shuffled batches, a batch in place of all data: no chain may call itself exact on these."""
    model = nn.Sequential(nn.Linear(5, 30), nn.Dropout(0.5), nn.Linear(30, 3))
    with pytest.raises(StochasticClosure, match="Dropout in training mode"):
        mala(model, fixed_data=True).step(lambda: F.cross_entropy(model(X), Y))
    batches = iter([slice(0, 32), slice(32, 64)])
    with pytest.raises(StochasticClosure):
        mala(model.eval(), fixed_data=True).step(lambda: closure(model, next(batches))())
    with pytest.raises(ValueError, match="returned 16 losses and `num_data` is 64"):
        mala(model, fixed_data=True).step(lambda: F.cross_entropy(model(X[:16]), Y[:16], reduction="none"))


@pytest.mark.parametrize("door", DOORS)
def test_copies_and_pickles_go_on_like_the_original(door: str) -> None:
    model = network()
    sampler = DOORS[door](model, sigma=1e-3, sigma_along=3.0)
    CosineAnnealingLR(sampler, T_max=100)  # wraps sampler.step
    for _ in range(3):
        sampler.step(closure(model))
    for duplicate in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        other_model, other = duplicate((model, sampler))
        twin_model, twin = copy.deepcopy((model, sampler))
        for _ in range(5):
            other.step(closure(other_model))
            twin.step(closure(twin_model))
        assert same(weights(other_model), weights(twin_model))
        assert not same(weights(other_model), weights(model))
        assert other.num_steps == 8
        assert repr(other).startswith(door)


def test_a_dtype_changed_on_the_way_is_followed() -> None:
    model = network()
    sampler = adam_mcmc(model, sigma_along=3.0)
    sampler.step(closure(model))
    model.double()
    sampler.step(closure(model))
    assert all(s["exp_avg"].dtype == torch.float64 for s in sampler.state.values())


def test_writes_past_autograd_are_seen() -> None:
    model = network()
    sampler = adam_mcmc(model, sigma=1.0, sigma_along=0.0)  # far too bold: rejected
    sampler.step(closure(model))
    model[0].weight.data.zero_()
    sampler.step(closure(model))
    assert not bool(sampler.info.is_accepted)
    assert not model[0].weight.any()


def test_a_state_of_another_target_is_named() -> None:
    model = network()
    state = adam_mcmc(model).state_dict()
    with pytest.warns(UserWarning, match="another target.*n = 64.*n = 128"):
        adam_mcmc(model, num_data=128).load_state_dict(state)


def test_numbers_of_numpy_make_a_state_that_loads_safely() -> None:
    model = network()
    sampler = adam_mcmc(model, lr=np.float64(1e-2), sigma=np.float32(0.01))
    sampler.step(closure(model))
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    torch.load(file, weights_only=True)


def test_mala_takes_its_step_size_by_group() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "step_size": 1e-4}, {"params": model[2].parameters(), "name": "head"}]
    sampler = MALA(groups, 1e-3, num_data=64, prior=Gaussian())
    assert [group["lr"] for group in sampler.param_groups] == [1e-4, 1e-3]
    sampler.step(closure(model))
    sampler.param_groups[0]["lr"] = 0.0
    with pytest.raises(ValueError, match=r"`step_size` is 0 \(did a scheduler"):
        sampler.step(closure(model))


def test_full_data_that_are_not_finite_freeze_the_chain() -> None:
    """The batch is clean, one example of the data is not: this must be said, not rejected for ever."""
    model = network(torch.float64)
    data = X.double().clone()
    data[5] = math.nan
    examples = TensorExamples(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), data, Y)
    for early in (False, True):
        sampler = mala(model, acceptance=FullData(early_rejection=early), examples=examples)
        sampler.step(closure(model, slice(10, 20)))
        with pytest.raises(NonFiniteLoss):
            sampler.step(closure(model, slice(10, 20)))


def test_a_repaired_chain_goes_on_from_what_is_there() -> None:
    """After a freeze no cache of the bad step is left, with full data and with fixed data."""
    for options in ({"fixed_data": True}, {}):
        model = network(torch.float64)
        sampler = mala(model, **options, **full_data(model))
        sampler.step(closure(model))
        sampler._here = sampler._carry = None
        sampler.step(lambda: closure(model)() * math.inf)  # noqa: B023
        sampler.unfreeze()
        sampler.step(closure(model))
        sampler.check()
        assert float(sampler.info.loss) == pytest.approx(closure(model)().item(), abs=0.2)


def test_what_is_set_on_the_way_voids_the_caches() -> None:
    model = network(torch.float64)
    sampler = mala(model, fixed_data=True)
    for _ in range(3):
        sampler.step(closure(model))
    sampler.target = Target(64, 0.001, Gaussian())
    sampler.step(closure(model))
    assert abs(float(sampler.info.log_ratio)) < 5
    before = closure(model)().item()
    model[0].weight.data.mul_(3)
    sampler.step(closure(model))
    assert float(sampler.info.loss) != pytest.approx(before)


def test_a_parameter_shared_gradient_accumulates_right() -> None:
    """autograd hands the same tensor to both summands of b1 + b2."""
    b1, b2 = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    sampler = AdamMCMC([b1, b2], num_data=4, sigma=1e-3, acceptance=AlwaysAccept(), generator=seeded())
    targets = torch.arange(12.0).reshape(4, 3)
    sampler.step([lambda rows=rows: ((b1 + b2) - targets[rows]).square().mean() for rows in (slice(0, 2), slice(2, 4))])  # type: ignore[misc]
    expected = -2 * targets.mean(0) / 3
    torch.testing.assert_close(sampler.state[b1]["exp_avg"], 0.01 * expected)
    torch.testing.assert_close(sampler.state[b2]["exp_avg"], 0.01 * expected)


def test_a_loss_in_a_static_buffer_is_read_before_it_is_overwritten() -> None:
    p, buffer = nn.Parameter(torch.zeros(2)), torch.zeros(())
    sampler = AdamMCMC([p], lr=0.1, num_data=10_000, sigma=1.0, generator=seeded(), sigma_along=1.0)

    def loss() -> torch.Tensor:
        value = (p - 3).square().sum()
        sampler.zero_grad()
        if torch.is_grad_enabled():
            value.backward()
        buffer.copy_(value.detach())
        return buffer.detach()

    sampler.step(loss)
    assert float(sampler.info.loss) == 18
    assert float(sampler.info.proposed_loss) != 18


def test_outside_a_bounded_prior_the_loss_is_not_evaluated() -> None:
    scale = nn.Parameter(torch.tensor([0.2]))
    options = {"num_data": 4, "prior": UniformBox(0.1, 5.0), "generator": seeded()}
    for sampler in (
        AdamMCMC([scale], lr=0.01, sigma=0.3, sigma_along=1.0, **options),
        MALA([scale], 0.02, fixed_data=True, **options),
        AdamMCMC([scale], lr=0.01, sigma=0.3, acceptance=AlwaysAccept(), **options),
    ):
        for _ in range(50):  # torch's own check of the scale would raise
            sampler.step(lambda: -torch.distributions.Normal(0.0, scale).log_prob(torch.ones(1)).mean())
        assert 0.1 <= float(scale.detach()) <= 5


def test_early_rejection_reports_the_decision() -> None:
    model = network(torch.float64)
    sampler = mala(model, step_size=2e-2, **full_data(model, chunk_size=4, early_rejection=True))
    accepted = 0
    for _ in range(40):
        sampler.step(closure(model))
        accepted += int(sampler.info.is_accepted)
    assert float(sampler.mean_acceptance_rate) == pytest.approx(accepted / 40)


def test_the_user_s_grad_survives_an_error() -> None:
    model = network()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ZeroDivisionError):
        adam_mcmc(model).step(lambda: 1 / 0)
    assert all(p.grad is not None for p in model.parameters())


def test_an_error_at_the_proposal_restores_the_weights() -> None:
    model = network()
    sampler = adam_mcmc(model)
    before = weights(model)
    calls = iter([0, 1, 0, 0])

    def failing() -> torch.Tensor:
        if next(calls):
            raise KeyError("no such file")
        return closure(model)()

    with pytest.raises(KeyError):
        sampler.step(failing)
    assert same(before, weights(model))
    sampler.step(failing)


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    sampler = AdamMCMC(embedding.named_parameters(), num_data=1, sigma=0.1)
    with pytest.raises(ValueError, match=r"'weight' has a sparse gradient.*sparse=False"):
        sampler.step(lambda: embedding(torch.tensor([1])).sum())


def test_full_data_without_examples_says_what_to_pass() -> None:
    model = network()
    with pytest.raises(PerExampleLossRequired, match="examples=TensorExamples"):
        adam_mcmc(model, acceptance=FullData()).step(closure(model))


def test_nothing_to_sample_is_said() -> None:
    model = network().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to sample"):
        adam_mcmc(model)


@pytest.mark.parametrize("door", DOORS)
def test_a_nan_loss_freezes_the_chain_and_names_the_step(door: str) -> None:
    model = network()
    sampler = DOORS[door](model)
    for _ in range(3):
        sampler.step(closure(model))
    before, state = weights(model), copy.deepcopy(sampler.state_dict()["state"])
    for bad in (math.nan, math.inf):
        sampler.step(lambda: closure(model)() * bad)  # noqa: B023
        assert same(before, weights(model))
        with pytest.raises(NonFiniteLoss, match=r"at step \d"):
            sampler.step(closure(model))
        after = sampler.state_dict()["state"]
        for index in state:
            for key in state[index]:
                assert torch.equal(torch.as_tensor(state[index][key]), torch.as_tensor(after[index][key])), "moments stay clean"
        sampler.unfreeze()
    DOORS[door](model).step(lambda: closure(model)() * math.nan)  # at the very first step, too
    sampler.step(closure(model))


def test_a_nan_gradient_freezes_too() -> None:
    model = network()
    sampler = adam_mcmc(model)
    before = weights(model)
    sampler.step(lambda: closure(model)() + (model[0].weight * 0).sum().sqrt())  # 0 with gradient 0 * inf
    assert same(before, weights(model))
    with pytest.raises(NonFiniteLoss):
        sampler.check()


def test_a_nan_proposal_is_a_rejection() -> None:
    model = network()
    sampler = adam_mcmc(model)
    calls = iter([1.0, math.nan, 1.0, 1.0])
    before = weights(model)
    sampler.step(lambda: closure(model)() * next(calls))
    assert same(before, weights(model))
    assert not bool(sampler.info.is_finite)
    sampler.step(lambda: closure(model)() * next(calls))


# --- what it says ---------------------------------------------------------------------------------------------------


def test_the_target_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    sampler = adam_mcmc(model, inverse_temperature=0.25)
    line = sampler.describe()
    for part in ("lambda = 0.25 (T = 4)", "n = 64", "flat, improper", "P = 147", "Algorithm 1", "batch", "approximate"):
        assert part in line
    assert "\n" not in line
    assert mala(model, fixed_data=True).describe().endswith("| exact")
    with caplog.at_level(logging.INFO, "adammcmc"):
        sampler.step(closure(model))
        sampler.step(closure(model))
    assert [record.message for record in caplog.records] == [line]


def test_info_before_the_first_step_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no step was taken"):
        _ = adam_mcmc(network()).info
