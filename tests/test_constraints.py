"""Constrained parameters: log determinants, known laws, starting points."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributions import Beta, Dirichlet, Gamma, LKJCholesky, Wishart, constraints

from adammcmc import BurnIn, kernels, sample_density, warm_up
from adammcmc.target.constraints import Unconstrained, ordered, transform_of


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def free_entries(y: Tensor, constraint: Any) -> Tensor:
    """The numbers of y that its density is one of."""
    if constraint is constraints.simplex:
        return y[:-1]
    if y.dim() == 2:
        d = len(y)
        rows, columns = torch.tril_indices(d, d, offset=-1 if constraint is constraints.corr_cholesky else 0)
        return y[rows, columns]
    return y


@pytest.mark.parametrize(
    ("constraint", "size"),
    [
        (constraints.positive, 3),
        (constraints.nonnegative, 2),
        (constraints.greater_than(1.5), 3),
        (constraints.less_than(-1.0), 2),
        (constraints.interval(-2.0, 3.0), 3),
        (constraints.unit_interval, 2),
        (constraints.independent(constraints.positive, 1), 3),
        (constraints.simplex, 3),
        (ordered, 4),
        (constraints.lower_cholesky, 6),
        (constraints.corr_cholesky, 6),
        (constraints.positive_definite, 6),
    ],
    ids=str,
)
def test_the_log_determinant_is_that_of_the_jacobian(constraint: Any, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for _ in range(3):
        x = torch.randn(size, dtype=torch.float64, generator=generator)
        transform = transform_of(constraint)
        y = transform(x)
        assert bool(constraint.check(y).all())
        jacobian = torch.autograd.functional.jacobian(lambda z, t=transform: free_entries(t(z), constraint), x)
        assert jacobian.shape == (size, size)
        expected = torch.linalg.slogdet(jacobian).logabsdet
        wrapped = Unconstrained(lambda y: torch.zeros(1, dtype=torch.float64), y[None], constraint)
        torch.testing.assert_close(wrapped(x[None])[0], expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(wrapped.start[0], x, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(wrapped.constrained(x[None])[0], y)


class Law(NamedTuple):
    constraint: Any
    log_density: Callable[[Tensor], Tensor]
    start: Callable[[int], Tensor]
    statistic: Callable[[Tensor], Tensor]
    truth: Tensor


def bartlett(factor: Tensor) -> Tensor:
    """The law of the Cholesky factor of a Wishart(6, I) matrix: chi in the diagonal, normal below."""
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    powers = double(5, 4, 3)
    return (diagonal.log() * powers).sum(-1) - factor.square().sum((-2, -1)) / 2


SCALE = torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=torch.float64)
LAWS = {
    "Gamma": Law(
        constraints.positive,
        lambda y: Gamma(double(0.8), double(2.0)).log_prob(y).sum(1),
        lambda n: torch.full((n, 1), 0.4, dtype=torch.float64),
        lambda y: torch.stack([y[:, 0], y[:, 0].square()], 1),
        double(0.4, 0.2 + 0.16),
    ),
    "Beta": Law(
        constraints.unit_interval,
        lambda y: Beta(double(0.7), double(1.5)).log_prob(y).sum(1),
        lambda n: torch.full((n, 1), 0.3, dtype=torch.float64),
        lambda y: torch.stack([y[:, 0], y[:, 0].square()], 1),
        double(0.7 / 2.2, 0.7 * 1.7 / (2.2 * 3.2)),
    ),
    "exponential above 2": Law(
        constraints.greater_than(2.0),
        lambda y: -3 * y.sum(1),
        lambda n: torch.full((n, 1), 2.3, dtype=torch.float64),
        lambda y: torch.stack([y[:, 0] - 2, (y[:, 0] - 2).square()], 1),
        double(1 / 3, 2 / 9),
    ),
    "uniform": Law(
        constraints.interval(-1.0, 3.0),
        lambda y: 0 * y.sum(1),
        lambda n: torch.full((n, 1), 0.5, dtype=torch.float64),
        lambda y: torch.stack([y[:, 0], y[:, 0].square()], 1),
        double(1.0, 1 + 16 / 12),
    ),
    "Dirichlet": Law(
        constraints.simplex,
        lambda y: Dirichlet(double(0.9, 2.0, 4.0)).log_prob(y),
        lambda n: double(0.2, 0.3, 0.5).repeat(n, 1),
        lambda y: torch.cat([y, y.square()], 1),
        torch.cat([double(0.9, 2, 4) / 6.9, double(0.9 * 1.9, 2 * 3, 4 * 5) / (6.9 * 7.9)]),
    ),
    "order statistics": Law(
        ordered,
        lambda y: -y.square().sum(1) / 2,
        lambda n: double(-1.0, 0.1, 1.0).repeat(n, 1),
        lambda y: torch.cat([y, y.square().sum(1, keepdim=True)], 1),
        double(-1.5 / math.sqrt(math.pi), 0.0, 1.5 / math.sqrt(math.pi), 3.0),
    ),
    "LKJ": Law(
        constraints.corr_cholesky,
        lambda y: LKJCholesky(3, double(1.5)[0]).log_prob(y),
        lambda n: torch.eye(3, dtype=torch.float64).repeat(n, 1, 1),
        lambda y: torch.stack([(y @ y.mT)[:, i, j].square() for i, j in ((1, 0), (2, 0), (2, 1))], 1),
        torch.full((3,), 1 / (2 * 1.5 + 2), dtype=torch.float64),
    ),
    "Wishart": Law(
        constraints.positive_definite,
        lambda y: Wishart(double(5.0)[0], SCALE, validate_args=False).log_prob(y),
        lambda n: (5 * SCALE).repeat(n, 1, 1),
        lambda y: torch.stack([y[:, 0, 0], y[:, 0, 1], y[:, 1, 1]], 1),
        5 * double(2.0, 0.6, 1.0),
    ),
    "Bartlett": Law(
        constraints.lower_cholesky,
        bartlett,
        lambda n: 2 * torch.eye(3, dtype=torch.float64).repeat(n, 1, 1),
        lambda y: torch.cat([y.diagonal(dim1=1, dim2=2).square(), y[:, 2, :2].square()], 1),
        double(6, 5, 4, 1, 1),
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_moments_of_known_laws(name: str) -> None:
    law = LAWS[name]
    num_chains = 400
    draws, info = sample_density(
        law.log_density, law.start(num_chains), kernels.hmc(0.35, 4), num_steps=230, burn_in=30, constraints=law.constraint
    )
    assert draws.shape[:2] == (num_chains, 200)
    assert bool(law.constraint.check(draws).double().mean() > 0.999)
    assert 0.5 < float(info.acceptance_rate.mean()) < 1
    chains = torch.stack([law.statistic(draws[:, i]) for i in range(200)], 1).mean(1)
    errors = chains.std(0) / math.sqrt(num_chains)
    assert float(((chains.mean(0) - law.truth) / errors).abs().max()) < 4.5


def test_named_leaves_warm_up_and_draws_in_constrained_space() -> None:
    """A pytree: one leaf constrained, one free, one nested; the settings of the kernel are those of free numbers."""

    def log_density(p: dict) -> Tensor:
        return (
            Gamma(double(3.0), double(1.0)).log_prob(p["tau"])
            - p["mu"].square().sum(1) / 2
            + Dirichlet(double(2, 2, 2)).log_prob(p["more"][0])
        )

    n = 64
    start = {
        "tau": torch.ones(n).double(),
        "mu": torch.zeros(n, 2).double(),
        "more": (torch.full((n, 3), 1 / 3).double(),),
    }
    wanted = {"tau": constraints.positive, "more": [constraints.simplex]}
    kernel, params = warm_up(
        log_density, start, kernels.underdamped(0.1), tune=BurnIn(num_steps=300), constraints=wanted, progress=False
    )
    assert [tuple(shape) for shape in kernel.preconditioner.shapes] == [(), (2,), (2,)]  # of the dense metric
    assert bool((params["tau"] > 0).all())
    torch.testing.assert_close(params["more"][0].sum(1), torch.ones(n).double())
    result = sample_density(log_density, params, kernel, num_steps=600, constraints=wanted, progress=False)
    assert result.draws["more"][0].shape == (n, 600, 3)
    for name, values, truth in (("tau", result.draws["tau"], 3.0), ("simplex", result.draws["more"][0][..., 0], 1 / 3)):
        chains = values.mean(1)
        assert abs(float(chains.mean()) - truth) < 4.5 * float(chains.std()) / math.sqrt(n), name
    assert "5 coordinates" not in result.describe()
    assert "6 coordinates in tau, mu (2), more.0 (3) | tau: positive, more.0: Simplex | underdamped" in result.describe()


def test_without_constraints_nothing_changes() -> None:
    def log_density(x: Tensor) -> Tensor:
        return -x.square().sum(1) / 2

    plain, _ = sample_density(log_density, torch.zeros(3, 2), kernels.mala(0.3), num_steps=20)
    same, _ = sample_density(log_density, torch.zeros(3, 2), kernels.mala(0.3), num_steps=20, constraints=constraints.real)
    assert torch.equal(plain, same)


def normal(p: Any) -> Tensor:
    return -p["tau"].square() / 2


@pytest.mark.parametrize(
    ("start", "wanted", "error", "message"),
    [
        (
            [1.0, -0.5],
            constraints.positive,
            ValueError,
            r"'tau' must be positive, .* in 1 of 2 chains .*\[1\].* -0.5",
        ),
        ([1.0, 0.0], constraints.nonnegative, ValueError, "lies on the edge"),
        ([0.5, 1.0], constraints.unit_interval, ValueError, "'tau' must be unit_interval"),
        ([1.0, 2.0], constraints.greater_than(1.0), ValueError, r"'tau' must be GreaterThan\(lower_bound=1.0\)"),
        ([1.0, 2.0], constraints.simplex, ValueError, "chains on its first axis and then 1 or more for Simplex"),
        ([1.0, 2.0], constraints.positive_integer, ValueError, "has no smooth transform. There are: real, positive"),
        ([1.0, 2.0], "positive", TypeError, r"`constraints\['tau'\]` must be a constraint, as in .* got 'positive'"),
        ([1, 2], constraints.positive, TypeError, "`initial` of 'tau' must be floating point, got torch.int64"),
        ([1.0, math.nan], constraints.positive, ValueError, "`initial` of 'tau' is NaN or infinite in 1 of 2 chains"),
    ],
)
def test_bad_starting_points_and_constraints_are_named(start: list, wanted: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        sample_density(normal, {"tau": torch.tensor(start)}, kernels.mala(0.1), num_steps=5, constraints={"tau": wanted})


def test_constraints_must_fit_the_parameters() -> None:
    start = {"tau": torch.ones(3)}
    with pytest.raises(ValueError, match=r"`constraints` has the keys \['sigma'\], which are not in `initial`: .*\['tau'\]"):
        sample_density(normal, start, kernels.mala(0.1), num_steps=5, constraints={"sigma": constraints.positive})
    with pytest.raises(TypeError, match="must be a dict with some of the keys"):
        sample_density(normal, start, kernels.mala(0.1), num_steps=5, constraints=constraints.positive)
    with pytest.raises(TypeError, match="must hold 1 constraints"):
        sample_density(lambda p: -p[0], (torch.ones(3),), kernels.mala(0.1), num_steps=5, constraints=[None, None])
    with pytest.raises(ValueError, match=r"one number for each chain, shape \(3,\), got \(3, 3\)"):
        sample_density(lambda x: -x, torch.ones(3, 3), kernels.mala(0.1), num_steps=5, constraints=constraints.positive)
    on_edge = torch.tensor([[0.2, 0.8], [0.0, 1.0]])
    with pytest.raises(ValueError, match="'x' must be Simplex, and it is not, or lies on the edge, in 1 of 2 chains"):
        sample_density(lambda x: x[:, 0], on_edge, kernels.mala(0.1), num_steps=5, constraints=constraints.simplex)


def test_a_distribution_that_refuses_a_proposal_gets_a_hint() -> None:
    # (torch.compile turns the default of `validate_args` off in its process)
    gamma = Gamma(2.0, 1.0, validate_args=True)
    with pytest.raises(ValueError, match="within the support") as caught:
        sample_density(gamma.log_prob, torch.full((50,), 0.1), kernels.mala(0.5), num_steps=50)
    assert "validate_args=False" in caught.value.__notes__[0]
