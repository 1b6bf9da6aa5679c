"""The samplers keep torch's contract, and say what they sample."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from adammcmc import (
    AdamMCMC,
    AlwaysAccept,
    Gaussian,
)
from tests.optimizers import OPTIMIZERS, X, Y, adam_mcmc, closure, mala, network, same, seeded, underdamped, weights

# --- torch's contract -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rejection_restores_the_weights_bit_for_bit(optimizer: str) -> None:
    model = network()
    sampler = OPTIMIZERS[optimizer](model, sigma=0.05)
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_learning_rate_schedulers_drive_the_sampler(optimizer: str) -> None:
    model = network()
    sampler = OPTIMIZERS[optimizer](model)
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


def test_other_parameters_start_the_self_tests_anew() -> None:
    """Sums by layer do not fit them. The same parameters in other memory go on."""
    model = network()
    sampler = adam_mcmc(model)
    for _ in range(3):
        sampler.step(closure(model))
    model[0].weight.data = model[0].weight.data.clone()
    sampler.step(closure(model))
    assert sampler.health().num_steps == 4
    model[2].bias.requires_grad_(False)
    sampler.step(closure(model))
    assert sampler.health().num_steps == 1


def test_a_parameter_that_the_loss_does_not_reach_is_sampled_from_its_prior() -> None:
    model = network()
    unused = nn.Parameter(torch.zeros(50))
    sampler = AdamMCMC([*model.parameters(), unused], num_data=64, sigma=0.05, prior=Gaussian(0.1), generator=seeded())
    for _ in range(50):
        sampler.step(closure(model))
    assert unused.detach().abs().max() > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_of_every_precision(optimizer: str, dtype: torch.dtype) -> None:
    model = network(dtype)
    sampler = OPTIMIZERS[optimizer](model, sigma=0.02)
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_closures_that_call_backward_are_seen_and_their_gradient_stays(optimizer: str) -> None:
    model = network()
    sampler = OPTIMIZERS[optimizer](model)

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
    plain = OPTIMIZERS[optimizer](plain_model)
    plain.step(closure(plain_model))
    assert same(weights(model), weights(plain_model))


def test_on_fixed_data_a_closure_may_call_backward_too() -> None:
    """Fixed data are evaluated again at the second step, before it is known that the closure needs a graph."""
    model, plain_model = network(), network()
    sampler, plain = underdamped(model, fixed_data=True), underdamped(plain_model, fixed_data=True)

    def lbfgs_style() -> torch.Tensor:
        sampler.zero_grad()
        loss = closure(model)()
        loss.backward()
        return loss

    for _ in range(3):
        sampler.step(lbfgs_style)
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
