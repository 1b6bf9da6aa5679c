"""Failures: their messages, and that nothing is lost."""

from __future__ import annotations

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from adammcmc import (
    MALA,
    AdamMCMC,
    AlwaysAccept,
    FullData,
    Gaussian,
    NonFiniteLoss,
    PerExampleLossRequired,
    StochasticClosure,
    Target,
    TensorExamples,
    UniformBox,
)
from tests.optimizers import OPTIMIZERS, X, Y, adam_mcmc, closure, full_data, mala, network, same, seeded, sgd_mcmc, weights

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
        (lambda m: mala(m, preconditioner=[0 * p for p in m.parameters()]), ValueError, "positive and finite everywhere"),
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
    """Dropout, shuffled batches, a batch in place of all data: no chain is exact on these."""
    model = nn.Sequential(nn.Linear(5, 30), nn.Dropout(0.5), nn.Linear(30, 3))
    with pytest.raises(StochasticClosure, match=r"At fault: '1' \(Dropout\)"):
        mala(model, fixed_data=True).step(lambda: F.cross_entropy(model(X), Y))
    batches = iter([slice(0, 32), slice(32, 64)])
    with pytest.raises(StochasticClosure):
        mala(model.eval(), fixed_data=True).step(lambda: closure(model, next(batches))())
    with pytest.raises(ValueError, match="returned 16 losses and `num_data` is 64"):
        mala(model, fixed_data=True).step(lambda: F.cross_entropy(model(X[:16]), Y[:16], reduction="none"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_copies_and_pickles_continue_like_the_original(optimizer: str) -> None:
    model = network()
    sampler = OPTIMIZERS[optimizer](model, sigma=1e-3, sigma_along=3.0)
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
        assert repr(other).startswith(optimizer)


def test_a_dtype_change_between_steps_is_followed() -> None:
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
    """The batch is clean, one example of the data is not: an error, not an endless rejection."""
    model = network(torch.float64)
    data = X.double().clone()
    data[5] = math.nan
    examples = TensorExamples(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), data, Y)
    for early in (False, True):
        sampler = mala(model, acceptance=FullData(early_rejection=early), examples=examples)
        sampler.step(closure(model, slice(10, 20)))
        with pytest.raises(NonFiniteLoss):
            sampler.step(closure(model, slice(10, 20)))


def test_a_repaired_chain_continues_from_its_weights() -> None:
    """After a freeze no cache of the bad step is left, with full data and with fixed data."""
    for options in ({"fixed_data": True}, {}):
        model = network(torch.float64)
        sampler = mala(model, **options, **full_data(model))
        sampler.step(closure(model))
        sampler.chains.here = sampler.chains.carry = None
        sampler.step(lambda: closure(model)() * math.inf)  # noqa: B023
        sampler.unfreeze()
        sampler.step(closure(model))
        sampler.check()
        assert float(sampler.info.loss) == pytest.approx(closure(model)().item(), abs=0.2)


def test_changes_between_steps_drop_the_caches() -> None:
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


def test_nothing_to_sample_is_refused() -> None:
    model = network().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to sample"):
        adam_mcmc(model)


# ExactAdamMCMC has fixed data, and meets none
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "ExactAdamMCMC"])
def test_a_nan_loss_freezes_the_chain_and_names_the_step(optimizer: str) -> None:
    model = network()
    sampler = OPTIMIZERS[optimizer](model)
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
    OPTIMIZERS[optimizer](model).step(lambda: closure(model)() * math.nan)  # at the very first step, too
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
