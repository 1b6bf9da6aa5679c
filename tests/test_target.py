"""The target: units, priors, the paper's settings."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Laplace, Normal

from adammcmc import Density, Gaussian, Prior, Target, UniformBall, UniformBox, from_paper, sample
from adammcmc.target.potential import Evaluation, potential_difference


class LaplacePrior(Prior):
    """What a user would write."""

    def log_density(self, params):  # type: ignore[no-untyped-def]
        return -sum(p.abs().sum(dtype=torch.float64) for p in params)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def params() -> list[Tensor]:
    return [p.detach() for p in model().parameters()]


PRIORS = [Gaussian(0.7), Gaussian((0.5, 1.0, 2.0, 0.3)), UniformBox(-2, 3), UniformBall(50.0), LaplacePrior()]


@pytest.mark.parametrize("prior", PRIORS, ids=str)
def test_the_gradient_of_a_prior_is_that_of_its_density(prior: Prior) -> None:
    given = prior.grad(params())
    numeric = Prior.grad(prior, params()) if prior.log_density(_leaves()).requires_grad else None
    if given is None or numeric is None:
        assert given is None
        assert numeric is None
    else:
        for a, b in zip(given, numeric, strict=True):
            torch.testing.assert_close(a, b)


def test_only_a_gaussian_answers_as_quadratic() -> None:
    class Shifted(Gaussian):
        def log_density(self, params):  # type: ignore[no-untyped-def]
            return super().log_density([p - 1 for p in params])

    class Halved(Gaussian):
        def grad(self, params):  # type: ignore[no-untyped-def]
            return [g / 2 for g in super().grad(params)]

    class Named(Gaussian):
        def __str__(self) -> str:
            return "mine"

    assert Gaussian(0.5).quadratic(params()) == Named(0.5).quadratic(params()) == [4.0] * 4
    assert Gaussian((0.5, 1.0, 2.0, 0.5)).quadratic(params()) == [4.0, 1.0, 0.25, 4.0]
    assert all(prior.quadratic(params()) is None for prior in (Shifted(), Halved(), UniformBox(-1, 1), LaplacePrior()))
    assert [prior.has_own_grad for prior in PRIORS] == [True, True, True, True, False]


def _leaves() -> list[Tensor]:
    return [p.requires_grad_() for p in params()]


def test_prior_densities_up_to_a_constant() -> None:
    here, there = params(), [p + 0.1 for p in params()]
    for prior, known in ((Gaussian(0.7), Normal(0, 0.7)), (LaplacePrior(), Laplace(0, 1))):
        expected = sum((known.log_prob(b) - known.log_prob(a)).sum() for a, b in zip(here, there, strict=True))
        torch.testing.assert_close(prior.log_density(there) - prior.log_density(here), expected)


def test_bounded_priors_are_zero_inside_and_minus_infinity_outside() -> None:
    edge = [torch.tensor([1.0, -1.0]), torch.tensor([[0.5]])]
    beyond = [torch.tensor([1.0, -1.0001]), torch.tensor([[0.5]])]
    assert float(UniformBox(-1, 1).log_density(edge)) == 0
    assert float(UniformBox(-1, 1).log_density(beyond)) == -math.inf
    assert float(UniformBall(1.50001).log_density(edge)) == 0  # the norm over all tensors together is 1.5
    assert float(UniformBall(1.50001).log_density(beyond)) == -math.inf


def test_gaussian_scales_by_layer_and_by_fan_in() -> None:
    assert Gaussian.per_layer(model(), {"0": 0.5, "": 2.0, "2.bias": 3.0}).scale == (0.5, 0.5, 2.0, 3.0)
    assert Gaussian.fan_in(model(), gain=2.0, bias_scale=0.1).scale == (1.0, 0.1, pytest.approx(2 / math.sqrt(8)), 0.1)
    convolution = nn.Conv2d(3, 5, kernel_size=2, bias=False)
    assert Gaussian.fan_in(convolution).scale == (pytest.approx(1 / math.sqrt(12)),)
    frozen = model()
    frozen[0].requires_grad_(False)
    assert len(Gaussian.fan_in(frozen).scale) == 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Gaussian(0.0), "`scale` must be positive"),
        (lambda: Gaussian((1.0, -1.0)), "`scale` must be positive"),
        (lambda: Gaussian.per_layer(model(), {"0": 1.0}), "no scale for parameter '2.weight'"),
        (lambda: Gaussian.per_layer(model(), {"": 1.0, "head": 2.0}), "names no trainable parameter with .'head'."),
        (lambda: UniformBox(1, 1), "`low` must be below `high`"),
        (lambda: UniformBall(0), "`radius` must be positive"),
        (lambda: Target(0), "`num_data` must be the number of training examples"),
        (lambda: Target(10, math.nan), "`inverse_temperature` must be positive"),
        (lambda: from_paper(1, 1, 1, num_params=1, num_data=1, loss="sum"), "`loss` must be one of"),
        (lambda: from_paper(1, 1, 1, num_params=1, num_data=1, loss="batch_sum"), "`batch_size` is needed"),
    ],
)
def test_bad_targets_are_refused_by_name(build, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        build()


def test_the_paper_s_settings_in_our_units() -> None:
    sizes = {"num_params": 366_160, "num_data": 1_200_000}
    mean = from_paper(1.0, 2.0, 3661.6, loss="mean", **sizes)
    assert mean.inverse_temperature * 1_200_000 == pytest.approx(1.0)  # lambda_paper = lambda * n
    assert mean.sigma == pytest.approx(3.305e-3, rel=1e-3)
    assert mean.sigma_along == pytest.approx(6.051, rel=1e-3)
    batch = from_paper(1.0, 2.0, 3661.6, loss="batch_sum", batch_size=512, **sizes)
    assert batch.inverse_temperature * 1_200_000 / 512 == pytest.approx(1.0)  # lambda_paper = lambda * n / batch
    assert from_paper(1.0, 2.0, 3661.6, loss="data_sum", **sizes).inverse_temperature == 1.0


def test_differences_of_losses_are_taken_before_they_are_scaled() -> None:
    """n = 1e9: the float32 means differ by one spacing; their difference must come out exact, not rounded by the scaling."""
    here = torch.tensor([1.0], dtype=torch.float32)
    there = torch.tensor([1.0 + 2**-23], dtype=torch.float32)
    none = torch.zeros(1, dtype=torch.float64)
    difference = potential_difference(1e9, Evaluation(here, none, None), Evaluation(there, none, None))
    assert float(difference) == pytest.approx(1e9 * 2**-23, rel=1e-12)
    rows = potential_difference(10.0, Evaluation(here[None], none, None), Evaluation(there[None].expand(1, 4) * 2, none, None))
    assert float(rows) == pytest.approx(10.0, rel=1e-6)


def test_the_line_says_everything() -> None:
    line = str(Target(1000, 0.5, UniformBox(-1, 1)))
    assert line == (
        "p(theta) ~ exp(-lambda * sum_i loss_i) * prior | lambda = 0.5 (T = 2), n = 1000 | prior: uniform on [-1, 1]^P"
    )
    assert "flat, improper" in str(Target(10))


def test_a_density_has_the_gradient_of_minus_its_log() -> None:
    density = Density(lambda tree: -tree["a"].square().sum(1) + 3 * tree["b"].sum(1), like={"a": 0 * X, "b": 0 * X})
    evaluation = density.evaluate((X, X), with_grad=True)
    assert evaluation.grad is not None
    torch.testing.assert_close(evaluation.grad, (2 * X, torch.full_like(X, -3.0)))
    assert density.evaluate((X, X), with_grad=False).grad is None


X = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))


class WithoutInputs(nn.Module):
    """A layer without inputs beside one with them."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.full = nn.Linear(0, 3), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.full(x) + self.empty(x[:, :0])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors", "ignore:burn-in reached")
@pytest.mark.parametrize("num_chains", [1, 2])
def test_tensors_without_weights_are_carried_along(tmp_path: Path, num_chains: int) -> None:
    net = WithoutInputs()
    prior = Gaussian.fan_in(net, gain=2.0, bias_scale=0.5)
    assert prior.scale == (2.0, 0.5, pytest.approx(2 / math.sqrt(2)), 0.5)
    assert Gaussian.fan_in(nn.Linear(3, 0, bias=False)).scale == (pytest.approx(1 / math.sqrt(3)),)
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    posterior = sample(
        net,
        (x, (x[:, 0] > 0).long()),
        nn.functional.cross_entropy,
        prior=prior,
        num_draws=2,
        gap=1,
        burn_in=2,
        num_chains=num_chains,
        stacked=num_chains > 1,
        path=tmp_path / "run",
        progress=False,
    )
    assert "P = 12" in posterior.target
    assert posterior.predict(x, progress=False).mean.shape == (20, 3)
    assert all(draw["empty.weight"].shape == (3, 0) for draw in posterior)
