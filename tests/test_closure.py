"""A closure as a potential: what is evaluated, and where."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adammcmc import AdamMCMC, Gaussian, Prior, Target, TensorExamples, UniformBox
from adammcmc.samplers.closure import ClosurePotential
from adammcmc.samplers.layers import Layers
from adammcmc.samplers.packing import Packing

X = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(20, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def potential(prior: Prior | None, reduction: str = "mean") -> tuple[ClosurePotential, Packing, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    packing = Packing(list(model.parameters()), ["a"] * 4)
    held = packing.pack([p.detach() for p in model.parameters()], packing.current)

    def loss(x: torch.Tensor = X, y: torch.Tensor = Y, reduction: str = reduction) -> torch.Tensor:
        losses = F.mse_loss(model(x), y, reduction="none")[:, 0]
        return losses.mean() if reduction == "mean" else losses

    examples = TensorExamples(lambda x, y: loss(x, y, "none"), X, Y)
    target = Target(200, 0.5, prior)
    layers = Layers("batch", torch.device("cpu"))
    closure = ClosurePotential([loss], packing, target=target, examples=examples, layers=layers, fixed=False, name=str)
    closure.held = held
    return closure, packing, model


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("prior", [None, Gaussian(0.3), UniformBox(-9, 9)])
def test_the_gradient_is_that_of_v(prior: Prior | None, reduction: str) -> None:
    """V = mean loss - log prior / (lambda n), with lambda n = 0.5 * 200."""
    target, packing, model = potential(prior, reduction)
    evaluation = target.evaluate(packing.current, with_grad=True)
    params = list(model.parameters())
    v = F.mse_loss(model(X), Y)
    if isinstance(prior, Gaussian):
        v = v - prior.log_density(params) / 100
    for ours, expected in zip(packing.views(evaluation.grad), torch.autograd.grad(v, params), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(ours, expected)
    assert evaluation.losses.shape == ((1,) if reduction == "mean" else (1, 20))
    torch.testing.assert_close(evaluation.losses.mean(), F.mse_loss(model(X), Y).detach())


def test_evaluating_elsewhere_writes_there_and_differences_are_of_u() -> None:
    target, packing, model = potential(Gaussian(0.3))
    here = target.evaluate(packing.current, with_grad=False)
    elsewhere = tuple(x + 0.1 for x in packing.current)
    there = target.evaluate(elsewhere, with_grad=False)
    for p, moved in zip(model.parameters(), packing.views(elsewhere), strict=True):
        assert torch.equal(p.detach(), moved)
    u = [100 * float(e.losses) - float(e.log_prior) for e in (here, there)]
    assert float(target.compare(here, there)) == pytest.approx(u[1] - u[0], rel=1e-12)


def test_losses_of_chosen_examples_are_those_at_the_asked_point() -> None:
    target, packing, model = potential(None)
    elsewhere = tuple(x + 0.1 for x in packing.current)
    chosen = target.example_losses(elsewhere, torch.tensor([3, 1]))
    expected = F.mse_loss(model(X), Y, reduction="none")[[3, 1], 0]  # the model holds the asked point now
    torch.testing.assert_close(chosen, expected[None].detach())
    assert not chosen.requires_grad
    assert target.num_examples == 20


# --- a sum in the place of the mean ------------------------------------------------------------------------------------

MODEL = nn.Linear(3, 4)
INPUTS = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))
CLASSES = torch.arange(6) % 4
TARGETS = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: F.cross_entropy(out, CLASSES, reduction="sum"),
        lambda out: nn.CrossEntropyLoss(reduction="sum")(out, CLASSES).double(),
        lambda out: F.mse_loss(out, TARGETS, reduction="sum"),
        lambda out: F.cross_entropy(out, CLASSES, reduction="none").sum(),
    ],
)
def test_a_sum_of_known_losses_is_refused(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    sampler = AdamMCMC(MODEL.parameters(), num_data=100, sigma=1e-3)
    with pytest.raises(ValueError, match="multiplied by num_data = 100"):
        sampler.step(lambda: loss(MODEL(INPUTS)))


def test_another_sum_is_warned_of_at_the_callers_line() -> None:
    sampler = AdamMCMC(MODEL.parameters(), num_data=100, sigma=1e-3)
    with pytest.warns(UserWarning, match="ends in a sum over") as caught:
        sampler.step(lambda: -MODEL(INPUTS).log_softmax(1)[:, 0].sum())
    assert caught[0].filename == __file__
    sampler.step(lambda: -MODEL(INPUTS).log_softmax(1)[:, 0].sum())  # once


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: F.cross_entropy(out, CLASSES),
        lambda out: F.mse_loss(out, TARGETS),
        lambda out: F.cross_entropy(out, CLASSES, reduction="none"),
        lambda out: F.cross_entropy(out, CLASSES, reduction="sum") / 6,
        lambda out: F.cross_entropy(out[:1], CLASSES[:1], reduction="sum"),
        lambda out: F.cross_entropy(out, CLASSES) + 1e-3 * out.square().sum(),
    ],
)
def test_means_pass(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    AdamMCMC(MODEL.parameters(), num_data=100, sigma=1e-3).step(lambda: loss(MODEL(INPUTS)))


def test_the_sum_of_a_single_datum_is_its_loss() -> None:
    """A density of the weights, written as a loss."""
    AdamMCMC(MODEL.parameters(), num_data=1, sigma=1e-3).step(lambda: MODEL(INPUTS).square().sum())


@pytest.mark.parametrize("rows", [2, 3, 6])
def test_a_sum_shows_in_the_halves_of_a_batch(rows: int) -> None:
    sampler = AdamMCMC(MODEL.parameters(), num_data=100, sigma=1e-3)
    before = [p.detach().clone() for p in MODEL.parameters()]

    def total(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return 0.5 * F.cross_entropy(MODEL(batch[0]), batch[1], reduction="sum")

    with pytest.raises(ValueError, match="it looks like a sum"):
        sampler.step(total, (INPUTS[:rows], CLASSES[:rows]))
    assert all(torch.equal(a, b) for a, b in zip(before, MODEL.parameters(), strict=True))
    sampler.step(lambda batch: total(batch) / len(batch[0]), (INPUTS[:rows], CLASSES[:rows]))
