"""Control variates: the polynomial is right, its sum is exact, and what is left stays under the bounds."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adammcmc
from adammcmc import ControlVariate, DataDensity, FullData, Gaussian, Minibatch, TensorExamples, kernels, sample_density
from adammcmc.acceptance import last_layer_bound, logistic_bound
from adammcmc.target.control import Taylor

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(300, 4, dtype=torch.float64, generator=GENERATOR)
Y = torch.where(torch.rand(300, generator=GENERATOR) < 0.5, 1.0, -1.0).double()
REFERENCE = torch.tensor([0.5, -0.2, 0.0, 1.0], dtype=torch.float64)


def logistic(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.softplus(-y * (x @ w))


def points(scale: float, count: int = 50) -> tuple[tuple[Tensor], tuple[Tensor]]:
    here, there = (REFERENCE + scale * torch.randn(count, 4, dtype=torch.float64, generator=GENERATOR) for _ in range(2))
    return (here,), (there,)


@pytest.mark.parametrize("order", [1, 2])
def test_the_polynomial_is_taylors(order: int) -> None:
    """Against derivatives written out, for slices and for examples of each chain's own."""
    control = DataDensity(logistic, X, Y, control_variate=ControlVariate(REFERENCE, order)).control
    assert control is not None
    here, there = points(0.3)

    def polynomial(w: Tensor) -> Tensor:
        """Without its constant, (chains, n)."""
        e, p = w - REFERENCE, torch.sigmoid(-Y * (X @ REFERENCE))
        along = e @ X.T
        return -Y * p * along + (0.5 * p * (1 - p) * along.square() if order == 2 else 0.0)

    expected = polynomial(there[0]) - polynomial(here[0])
    torch.testing.assert_close(control.differences(here, there, slice(None)), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(control.total(here, there), expected.sum(1), rtol=1e-10, atol=1e-10)
    own = torch.randint(300, (50, 7), generator=GENERATOR)
    torch.testing.assert_close(control.differences(here, there, own), expected.gather(1, own), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("scale", [0.01, 0.3, 3.0])
def test_what_is_left_stays_under_the_logistic_bound(order: int, scale: float) -> None:
    variate = None if order == 0 else ControlVariate(REFERENCE, order)
    target = DataDensity(logistic, X, Y, control_variate=variate)
    bound, at = logistic_bound(X, order), (REFERENCE[None],)
    here, there = points(scale, 2000)
    left = target.example_losses(there, slice(None)) - target.example_losses(here, slice(None))
    if target.control is not None:
        left = left - target.control.differences(here, there, slice(None))
    limit = bound.weights(300, X.device) * bound.distance(here, there, at)[:, None]
    # (close to the reference the difference of two losses is mostly rounding)
    assert bool((left.abs() <= limit + 1e-14).all())
    assert float((left.abs() / limit).max()) > 0.15, "a bound that is never approached costs too much data"
    torch.testing.assert_close(bound.distance(here, there, at), bound.distance(there, here, at))


def test_the_constants_of_the_logistic_loss_are_those_of_its_derivatives() -> None:
    z = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    p = torch.sigmoid(z)
    first, second, third = p, p * (1 - p), p * (1 - p) * (1 - 2 * p)
    assert float(first.max()) <= 1.0
    assert float(second.max()) == pytest.approx(0.25)
    assert float(third.abs().max()) == pytest.approx(1 / (6 * math.sqrt(3)), rel=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_the_bound_of_a_last_layer_holds_and_is_met(bias: bool) -> None:
    features = torch.randn(100, 6, dtype=torch.float64, generator=GENERATOR)
    labels = torch.randint(3, (100,), generator=GENERATOR)
    bound = last_layer_bound(features, bias=bias)
    largest = 0.0
    for scale in (0.01, 1.0, 10.0):
        w = [scale * torch.randn(400, 3, 6, dtype=torch.float64, generator=GENERATOR) for _ in range(2)]
        b = [scale * bias * torch.randn(400, 3, dtype=torch.float64, generator=GENERATOR) for _ in range(2)]
        logits = [torch.einsum("ckf,nf->cnk", w[i], features) + b[i][:, None] for i in (0, 1)]
        losses = [-z.log_softmax(2)[:, torch.arange(100), labels] for z in logits]
        here, there = ((w[i], b[i]) if bias else (w[i],) for i in (0, 1))
        ratio = (losses[1] - losses[0]).abs() / (bound.weights(100, w[0].device) * bound.distance(here, there, None)[:, None])
        largest = max(largest, float(ratio.max()))
    assert 0.5 < largest <= 1


def test_a_quadratic_loss_has_no_noise_left() -> None:
    """Order 2 is all of a squared error: two examples decide as the full data do, step by step."""

    def squared(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (y - x @ w).square()

    target = DataDensity(squared, X, Y, prior=Gaussian(), batch_size=1, control_variate=ControlVariate(REFERENCE))
    kernel = kernels.adam_mcmc(0.0, sigma=0.05, acceptance=Minibatch(2))
    draws, info = sample_density(target, REFERENCE.expand(20, 4).clone(), kernel, num_steps=50, progress=False)
    assert float(info.log_ratio_noise.max()) < 1e-10
    losses = [torch.stack([squared(w, X, Y).sum() for w in chain]) for chain in draws]
    levels = torch.stack(losses) + draws.square().sum(2) / 2
    moved = info.is_accepted[:, 1:]
    change = -(levels[:, 1:] - levels[:, :-1])[moved]
    torch.testing.assert_close(change, info.log_ratio[:, 1:][moved], rtol=1e-7, atol=1e-7)
    assert 0.2 < float(info.is_accepted.double().mean()) < 0.9


def test_float32_data_keep_their_sums_in_float64() -> None:
    exact = DataDensity(logistic, X, Y, control_variate=ControlVariate(REFERENCE)).control
    rough = DataDensity(logistic, X.float(), Y.float(), control_variate=ControlVariate(REFERENCE.float())).control
    assert exact is not None
    assert rough is not None
    here, there = points(0.1)
    total = rough.total(tuple(x.float() for x in here), tuple(x.float() for x in there))
    assert total.dtype == torch.float64
    torch.testing.assert_close(total, exact.total(here, there), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [1, 2])
def test_a_million_rows_in_float32_are_off_by_less_than_a_thousandth(order: int) -> None:
    """Y of a move of about one posterior sd, in both APIs, against float64: sums over chunks are kept in float64."""
    n = 1_000_000
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    y = torch.where(torch.rand(n, generator=torch.Generator().manual_seed(1)) < torch.sigmoid(x[:, 0]), 1.0, -1.0)
    at, here, there = torch.tensor([[0.9, 0.1], [1.0012, 0.0821], [0.9983, 0.0783]])
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(at)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.softplus(-y * model(x)[:, 0])

    sampler = adammcmc.MALA(
        model.parameters(),
        1e-6,
        num_data=n,
        prior=Gaussian(),
        acceptance=Minibatch(100),
        examples=TensorExamples(losses, x, y),
    )
    sampler.use_control_variate(order)
    optimizer = sampler.network.potential([lambda: losses(x[:1], y[:1])], None, None)
    density = DataDensity(logistic, x, y, batch_size=1, control_variate=ControlVariate(at, order))
    changes = logistic(there.double(), x.double(), y.double()) - logistic(here.double(), x.double(), y.double())
    foreseen = float(taylor(at.double(), here.double(), there.double(), x.double(), y.double(), order))
    for potential in (optimizer, density):
        move = tuple((point.view(1, 2).clone(),) for point in (here, there))
        assert potential.control is not None
        known = float(potential.control.total(*move))
        left = sum(
            float((potential.example_losses(move[1], s).double() - potential.example_losses(move[0], s).double()).sum())
            - float(potential.control.differences(*move, s).sum())
            for s in (slice(i, i + 100_000) for i in range(0, n, 100_000))
        )
        assert abs(known + left - float(changes.sum())) < 1e-3
        assert abs(known - foreseen) < 5e-6


def taylor(at: Tensor, here: Tensor, there: Tensor, x: Tensor, y: Tensor, order: int) -> Tensor:
    """Of the logistic losses, summed: T(there) - T(here)."""
    p = torch.sigmoid(-y * (x @ at))
    first = (-y * p * (x @ (there - here))).sum()
    ends = (p * (1 - p) * ((x @ (there - at)).square() - (x @ (here - at)).square())).sum()
    return first + 0.5 * ends if order == 2 else first


def test_the_hessian_is_taken_in_columns() -> None:
    """More parameters than go at once, not a multiple of them: the sum is that of all."""
    x = torch.randn(40, 150, dtype=torch.float64, generator=GENERATOR)
    y, at = torch.ones(40, dtype=torch.float64), torch.zeros(150, dtype=torch.float64)
    control = DataDensity(logistic, x, y, control_variate=ControlVariate(at)).control
    assert isinstance(control, Taylor)
    torch.testing.assert_close(control._hessian, 0.25 * x.T @ x, rtol=1e-12, atol=1e-12)


def test_full_data_do_not_use_it() -> None:
    results = []
    for variate in (None, ControlVariate(REFERENCE)):
        target = DataDensity(logistic, X, Y, prior=Gaussian(), batch_size=5, control_variate=variate)
        kernel = kernels.mala(1e-3, acceptance=FullData())
        results.append(sample_density(target, torch.zeros(3, 4).double(), kernel, num_steps=20, progress=False)[0])
    assert torch.equal(*results)
