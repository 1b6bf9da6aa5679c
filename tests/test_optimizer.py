"""The optimizer's optimizer: the same chain as the functional API, bit for bit, on the right target."""

from __future__ import annotations

import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adammcmc import (
    MALA,
    AdamMCMC,
    AlwaysAccept,
    FullData,
    Gaussian,
    OptimizerMCMC,
    Sampler,
    TensorExamples,
    UniformBox,
    kernels,
    sample_density,
)
from tests.optimizers import OPTIMIZERS, X, Y, adam_mcmc, closure, full_data, mala, network, same, seeded, weights

# --- one mathematics behind two optimizers -------------------------------------------------------------------------------


def skewed(x: torch.Tensor) -> torch.Tensor:
    return (2 * x - x.exp()).sum(1)


@pytest.mark.parametrize("dim", [3, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", ["AdamMCMC", "MALA", "OptimizerMCMC"])
def test_the_two_apis_agree_bit_for_bit(optimizer: str, dtype: torch.dtype, dim: int) -> None:
    """Also where the optimizer API works in place and block by block (dim is more than a block, and no multiple of 16)."""
    scale = 1 / math.sqrt(dim)
    options = {"sigma": 0.5 * scale, "sigma_along": 1.5}
    p = nn.Parameter(torch.full((dim,), 0.1, dtype=dtype))
    common = {"num_data": 1, "generator": seeded(), "fixed_data": True}
    if optimizer == "AdamMCMC":
        sampler: Sampler = AdamMCMC([p], lr=0.1 * scale, **options, **common)
        kernel = kernels.adam_mcmc(0.1 * scale, **options)
    elif optimizer == "MALA":
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_split_is_unsplit_bit_for_bit(optimizer: str) -> None:
    """Save to bytes, load into a fresh model and sampler, go on: the same weights, state and random numbers."""

    def run(model: nn.Module, sampler: Sampler, steps: range) -> None:
        for k in steps:
            sampler.step(closure(model, slice(None) if sampler.fixed_data else slice(k % 4 * 16, k % 4 * 16 + 16)))

    model = network()
    sampler = OPTIMIZERS[optimizer](model)
    run(model, sampler, range(10))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "sampler": sampler.state_dict()}, file)
    run(model, sampler, range(10, 25))

    other = network()
    resumed = OPTIMIZERS[optimizer](other, generator=seeded(999))
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
    """Algorithm 1: current and proposed. Fixed data: proposed only (and three calls for the start and two checks)."""
    for optimizer, options, calls in (
        (adam_mcmc, {}, 20),
        (adam_mcmc, {"fixed_data": True}, 13),
        (adam_mcmc, {"acceptance": AlwaysAccept()}, 10),
        (mala, {}, 20),
        (mala, {"fixed_data": True}, 13),
    ):
        model = network()
        sampler = optimizer(model, **options)
        count = 0

        def counted() -> torch.Tensor:
            nonlocal count
            count += 1
            return closure(model)()  # noqa: B023

        for _ in range(10):
            sampler.step(counted)
        assert count == calls, (optimizer, options)


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


# --- full data ------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("optimizer", ["AdamMCMC", "MALA"])
def test_early_rejection_is_the_same_chain(optimizer: str) -> None:
    """Same decisions, fewer examples."""
    paths, used = [], []
    for early in (False, True):
        model = network(torch.float64)
        size = {"sigma": 0.3, "inverse_temperature": 0.3} if optimizer == "AdamMCMC" else {"step_size": 2e-2}
        sampler = OPTIMIZERS[optimizer](model, **size, **full_data(model, chunk_size=4, early_rejection=early))
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
