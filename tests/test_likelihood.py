"""What a loss makes of outputs."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adammcmc
from adammcmc import GaussianNLL, Likelihood
from adammcmc.target.likelihood import Loss, likelihood_of

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3
MODEL = nn.Linear(3, 3)


class Flow(nn.Linear):
    """A module of the user's own."""


def of_a_flow(flow: Flow, batch: Tensor) -> Tensor:
    return flow(batch[0]).sum(1)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (F.cross_entropy, "categorical"),
        (nn.CrossEntropyLoss(), "categorical"),
        (functools.partial(F.cross_entropy, label_smoothing=0.1), "categorical"),
        (F.nll_loss, "log_categorical"),
        (F.binary_cross_entropy_with_logits, "bernoulli"),
        (nn.BCEWithLogitsLoss(), "bernoulli"),
        (nn.BCELoss(), "bernoulli_probabilities"),
        (F.mse_loss, "values"),
        (lambda outputs, targets: outputs.mean(), "values"),
    ],
)
def test_known_losses_say_what_outputs_mean(loss: object, name: str) -> None:
    assert likelihood_of(loss).name == name  # type: ignore[arg-type]


def test_gaussian_losses_carry_their_noise() -> None:
    assert likelihood_of(GaussianNLL(0.3)) == Likelihood("gaussian", 0.3)
    assert likelihood_of(GaussianNLL()) == likelihood_of(GaussianNLL(None)) == Likelihood("gaussian", None)


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        functools.partial(F.cross_entropy, reduction="mean"),
        lambda outputs, targets, reduction="mean": F.cross_entropy(outputs, targets, reduction=reduction),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
    ],
)
def test_losses_of_single_examples(loss: object) -> None:
    wanted = F.cross_entropy(MODEL(X), Y, reduction="none")
    torch.testing.assert_close(Loss(loss)(MODEL, (X, Y)), wanted)  # type: ignore[arg-type]


def test_a_users_module_is_not_changed() -> None:
    module = nn.CrossEntropyLoss()
    Loss(module)(MODEL, (X, Y))
    assert module.reduction == "mean"


def test_a_loss_that_gives_only_the_mean_is_taken() -> None:
    assert Loss(lambda outputs, targets: F.cross_entropy(outputs, targets))(MODEL, (X, Y)).shape == ()


def test_an_example_with_several_losses_has_their_mean() -> None:
    losses = Loss(F.mse_loss)(MODEL, (X, X))
    torch.testing.assert_close(losses.mean(), F.mse_loss(MODEL(X), X))
    assert losses.shape == (12,)


def test_which_losses_take_the_model() -> None:
    def annotated(anything: nn.Module, batch: Tensor) -> Tensor:
        return anything(batch)

    pair, alone = (X, Y), X
    assert Loss(lambda model, batch: model(batch)).takes_model(pair)
    assert Loss(annotated).takes_model(pair)
    assert Loss(of_a_flow).takes_model(pair)
    assert not Loss(F.cross_entropy).takes_model(pair)
    assert not Loss(lambda a, b: a).takes_model(pair)
    assert Loss(lambda a, b: a(b)).takes_model(alone)  # there are no targets to take
    assert Loss(lambda a, b: a).takes_model({"x": X, "y": Y})


def test_several_inputs() -> None:
    model = nn.Bilinear(3, 3, 3)
    losses = Loss(F.cross_entropy)(model, (X, 2 * X, Y))
    torch.testing.assert_close(losses, F.cross_entropy(model(X, 2 * X), Y, reduction="none"))


def test_gaussian_nll_is_the_normal_density() -> None:
    mean, target = torch.randn(5, 2), torch.randn(5, 2)
    wanted = -torch.distributions.Normal(mean, 0.7).log_prob(target).sum(1)
    torch.testing.assert_close(GaussianNLL(0.7)(mean, target), wanted)
    log_variance = torch.randn(5, 2)
    wanted = -torch.distributions.Normal(mean, (0.5 * log_variance).exp()).log_prob(target).sum(1)
    torch.testing.assert_close(GaussianNLL(None)(torch.cat([mean, log_variance], 1), target), wanted)


VALUES = torch.randn(12, generator=torch.Generator().manual_seed(1))
ONE = VALUES[:, None]
REFUSED: dict[str, tuple[object, int, Tensor, type[Exception], str]] = {
    "torch's Gaussian": (nn.GaussianNLLLoss(), 2, ONE, TypeError, r"`GaussianNLLLoss` takes variances.*GaussianNLL\(\)"),
    "a partial of it": (functools.partial(F.gaussian_nll_loss, full=True), 2, ONE, TypeError, r"GaussianNLL\(\)"),
    "a class": (nn.MSELoss, 1, ONE, TypeError, r"the class MSELoss: pass MSELoss\(\.\.\.\)"),
    "two outputs, one target": (F.mse_loss, 2, ONE, ValueError, r"different shapes, \(12, 2\) and \(12, 1\)"),
    "the same, wrapped": (lambda o, y: F.l1_loss(o, y), 2, ONE, ValueError, r"different shapes, \(12, 2\) and"),
    "model and batch": (
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        2,
        ONE,
        ValueError,
        r"different shapes, \(12, 2\)",
    ),
    "every pair": (
        F.huber_loss,
        1,
        VALUES,
        ValueError,
        r"every output with every target: outputs \(12, 1\) and targets \(12,\)",
    ),
    "every pair, mean": (
        lambda o, y: (o - y).square().mean(),
        1,
        VALUES,
        ValueError,
        r"every output with every target: outputs \(12, 1\)",
    ),
    "logits as log probabilities": (F.nll_loss, 3, Y, ValueError, "needs log probabilities.*F.cross_entropy"),
    "logits as probabilities": (F.binary_cross_entropy, 1, ONE.sign().relu(), ValueError, "binary_cross_entropy_with_logits"),
    "more arguments": (F.margin_ranking_loss, 1, ONE, ValueError, "wrap it in a function of these two"),
    "means alone": (GaussianNLL(), 1, ONE, ValueError, r"give the noise: GaussianNLL\(0\.1\)"),
    "two means alone": (GaussianNLL(), 2, torch.stack([VALUES, VALUES], 1), ValueError, r"give the noise: GaussianNLL\(0\.1\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_losses_that_would_mean_something_else_are_refused(case: str) -> None:
    loss, num_outputs, targets, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        Loss(loss).try_out(nn.Linear(3, num_outputs), (X, targets))  # type: ignore[arg-type]


def pinball(outputs: Tensor, targets: Tensor) -> Tensor:
    """Two quantiles of one target: broadcasting is meant."""
    gap = targets - outputs
    return torch.maximum(torch.tensor([0.1, 0.9]) * gap, torch.tensor([-0.9, -0.1]) * gap).mean()


@pytest.mark.parametrize(
    ("loss", "model", "targets"),
    [
        (pinball, nn.Linear(3, 2), VALUES[:, None]),
        (lambda o, y: (o.squeeze(1) - y).square().mean(), nn.Linear(3, 1), VALUES),
        (F.nll_loss, nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(1)), Y),
        (F.poisson_nll_loss, nn.Linear(3, 1), VALUES[:, None].abs().round()),
        (GaussianNLL(), nn.Linear(3, 2), VALUES[:, None]),
    ],
)
def test_losses_that_are_meant_as_they_are_pass(loss: object, model: nn.Module, targets: Tensor) -> None:
    assert Loss(loss).try_out(model, (X, targets)).isfinite().all()  # type: ignore[arg-type]


def test_the_target_says_that_positions_are_averaged() -> None:
    outputs = nn.Sequential(nn.Linear(3, 6), nn.Unflatten(1, (2, 3)))
    options = {"num_draws": 2, "gap": 2, "burn_in": 300, "progress": False}
    several = adammcmc.sample(outputs, (X, torch.stack([Y, Y, Y], 1) % 2), F.cross_entropy, **options)  # type: ignore[arg-type]
    assert several.target.endswith("| exact | loss of an example: the mean of its 3 (a loss that sums them weighs all)")
    one = adammcmc.sample(MODEL, (X, Y), F.cross_entropy, **options)  # type: ignore[arg-type]
    assert one.target.endswith("| exact")


def test_trying_out_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    Loss(F.cross_entropy).try_out(model, (X, Y))
    assert torch.equal(torch.rand(1), wanted)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("rows", [2, 3, 5, 12])
def test_a_sum_is_noticed_on_two_rows(rows: int) -> None:
    batch = (X[:rows], Y[:rows])
    with pytest.raises(ValueError, match="it looks like a sum"):
        Loss(lambda outputs, targets: F.cross_entropy(outputs, targets) * len(targets)).try_out(MODEL, batch)
    Loss(lambda outputs, targets: F.cross_entropy(outputs, targets)).try_out(MODEL, batch)
    normed = nn.Sequential(nn.BatchNorm1d(X.shape[1]), MODEL)  # which refuses halves of one row
    Loss(lambda outputs, targets: F.cross_entropy(outputs, targets)).try_out(normed, batch)
