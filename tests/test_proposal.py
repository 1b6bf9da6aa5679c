"""Proposals: the density that is evaluated is the density that is sampled."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from adammcmc import kernels, sample_density
from adammcmc.kernels.proposal import Elementwise, Langevin, Move, Prolate


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense_log_density(at: Tensor, mean: Tensor, step: Tensor, covariance: Tensor, sigma_along: float) -> Tensor:
    full = covariance + sigma_along**2 * torch.outer(step, step)
    return MultivariateNormal(mean, full).log_prob(at)


@pytest.mark.parametrize("sigma_along", [0.0, 0.5, 3.0])
def test_prolate_ratio_is_the_difference_of_two_dense_gaussians(sigma_along: float) -> None:
    """Two leaves with their own sigma, against 40-dimensional linear algebra."""
    draw = generator(0)
    for _ in range(20):
        theta = [torch.randn(1, n, dtype=torch.float64, generator=draw) for n in (25, 15)]
        update = tuple(0.1 * torch.randn(1, n, dtype=torch.float64, generator=draw) for n in (25, 15))
        proposal = Prolate([0.05, 0.2], sigma_along)
        move = proposal.propose(tuple(theta), update, draw)
        here, there, u = (torch.cat(x, 1)[0] for x in (theta, move.proposed, update))
        covariance = torch.tensor([0.05**2] * 25 + [0.2**2] * 15, dtype=torch.float64).diag()
        dense = dense_log_density(here, there - u, u, covariance, sigma_along) - dense_log_density(
            there, here - u, u, covariance, sigma_along
        )
        torch.testing.assert_close(proposal.log_q_ratio(move)[0], dense, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("sigma_along", [0.0, 0.5, 3.0])
def test_langevin_ratio_is_the_difference_of_two_dense_gaussians(sigma_along: float, preconditioned: bool) -> None:
    """The reverse move has its own step, and so its own covariance and determinant."""
    draw = generator(1)
    for _ in range(20):
        theta, u, v = (torch.randn(1, 30, dtype=torch.float64, generator=draw) for _ in range(3))
        u, v = 0.1 * u, 0.1 * v
        diagonal = torch.rand(30, dtype=torch.float64, generator=draw) + 0.5 if preconditioned else None
        proposal = Langevin(0.1, sigma_along, None if diagonal is None else (diagonal,))
        move = proposal.propose((theta,), (u,), draw)
        covariance = 0.01 * (torch.ones(30, dtype=torch.float64) if diagonal is None else diagonal).diag()
        tau = move.proposed[0][0]
        dense = dense_log_density(theta[0], tau - v[0], v[0], covariance, sigma_along) - dense_log_density(
            tau, theta[0] - u[0], u[0], covariance, sigma_along
        )
        torch.testing.assert_close(proposal.log_q_ratio(move, (v,))[0], dense, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("proposal", [Prolate(0.3, 2.0), Langevin(0.3, 2.0)])
def test_sampled_covariance_is_the_one_that_the_density_assumes(proposal: Prolate | Langevin) -> None:
    """sigma^2 I + sigma_along^2 u u': off-diagonal too, which noise drawn weight by weight would miss."""
    n = 200_000
    u = torch.tensor([0.4, -0.2, 0.1], dtype=torch.float64)
    move = proposal.propose((torch.zeros(n, 3, dtype=torch.float64),), (u.expand(n, 3),), generator(2))
    residual = move.proposed[0] + u
    expected = 0.09 * torch.eye(3, dtype=torch.float64) + 4 * torch.outer(u, u)
    products = residual[:, :, None] * residual[:, None, :]
    error = products.std(0) / math.sqrt(n)
    assert (((products.mean(0) - expected) / error).abs() < 4.5).all()
    assert ((residual.mean(0) / (expected.diagonal() / n).sqrt()).abs() < 4.5).all()


@pytest.mark.parametrize(("r", "sigma_along"), [(0.1, 0.0), (0.5, 0.0), (1.0, 1.0), (2.0, 2.0), (20.0, 2.0), (130.0, 6.05)])
def test_flat_loss_acceptance_is_two_phi_of_minus_kappa(r: float, sigma_along: float) -> None:
    """F1: Q ~ N(-2 kappa^2, 4 kappa^2), so proposals alone are accepted at 2 Phi(-kappa)."""
    n, dim = 100_000, 4
    update = torch.full((n, dim), r / math.sqrt(dim), dtype=torch.float64)
    proposal = Prolate(1.0, sigma_along)
    ratio = proposal.log_q_ratio(proposal.propose((torch.zeros(n, dim, dtype=torch.float64),), (update,), generator(3)))
    rate = ratio.clamp(max=0).exp()
    kappa = r / math.sqrt(1 + (sigma_along * r) ** 2)
    expected = math.erfc(kappa / math.sqrt(2))
    assert abs(float(rate.mean()) - expected) < 4.5 * float(rate.std()) / math.sqrt(n) + 1e-12
    assert abs(float(ratio.mean()) + 2 * kappa**2) < 4.5 * 2 * kappa / math.sqrt(n)


def test_flat_loss_acceptance_through_a_whole_kernel() -> None:
    """lr > 0 on a constant density: the momenta stay zero, so a slope is given by hand to make u = lr."""
    draws, info = sample_density(
        lambda x: 1e-9 * x.sum(1),  # flat, but Adam normalises the gradient: u = -lr on every coordinate
        torch.zeros(20_000, 5, dtype=torch.float64),
        kernels.adam_mcmc(0.2, (0.0, 0.0), 1e-30, sigma=0.5, sigma_along=1.0),
        num_steps=20,
        seed=4,
    )
    r = 0.2 * math.sqrt(5) / 0.5
    expected = math.erfc(r / math.sqrt(1 + r**2) / math.sqrt(2))
    rate = info.acceptance_rate
    assert abs(float(rate.mean()) - expected) < 4.5 * float(rate.std()) / math.sqrt(rate.numel())
    drift = draws[:, -1].mean(1)  # a correct step on a flat loss goes nowhere on average
    assert abs(float(drift.mean())) < 4.5 * float(drift.std()) / math.sqrt(len(drift))


@pytest.mark.parametrize(("nominal_sigma", "nominal_along"), [(0.2, 1e4), (2.0, 1e3), (0.2, 3661.6)])
def test_a_million_parameters_in_float32_agree_with_float64(nominal_sigma: float, nominal_along: float) -> None:
    n = 1_000_000
    update = 7e-5 * torch.randn(1, n, dtype=torch.float64, generator=generator(5))
    theta = 0.05 * torch.randn(1, n, dtype=torch.float64, generator=generator(6))
    proposal = Prolate(nominal_sigma / math.sqrt(n), nominal_along / math.sqrt(n))
    single = proposal.propose((theta.float(),), (update.float(),), generator(7))
    double = single._replace(update=(update,), noise=(single.noise[0].double(),), squares=(update.square().sum()[None],))
    assert abs(float(proposal.log_q_ratio(single) - proposal.log_q_ratio(double))) < 1e-4
    langevin = Langevin(proposal.sigma, proposal.sigma_along)
    reverse = 0.9 * update + 7e-6
    exact = Move((theta,), (), (update,), (single.noise[0].double(),), single.along)
    ratios = langevin.log_q_ratio(single, (reverse.float(),)), langevin.log_q_ratio(exact, (reverse,))
    torch.testing.assert_close(*ratios, rtol=1e-6, atol=1e-4)


def test_one_scalar_stretches_all_leaves() -> None:
    """z is shared by all tensors of a step: the noise along u is one number, not one for each tensor."""
    u = torch.ones(5000, 1, dtype=torch.float64)
    move = Prolate(1e-6, 1.0).propose((0 * u, 0 * u), (u, u), generator(8))
    torch.testing.assert_close(move.proposed[0], move.proposed[1], atol=1e-4, rtol=0)


def test_two_densities_subtracted_in_float32_would_be_wrong() -> None:
    """Why the ratio is computed from dot products: the textbook way is off by more than 1 at P = 1e6."""
    n, sigma, along = 1_000_000, 0.2e-3, 10.0
    update = (7e-5 * torch.randn(1, n, generator=generator(5)),)
    theta = 0.05 * torch.randn(1, n, generator=generator(6))
    proposal = Prolate(sigma, along)
    errors = []
    for seed in range(5):
        move = proposal.propose((theta,), update, generator(seed))
        u, tau = update[0][0], move.proposed[0][0]

        def log_q(at: Tensor, centre: Tensor, u: Tensor = u) -> Tensor:
            r = at - centre
            rank_one = along**2 * (u @ r) ** 2 / (sigma**2 * (sigma**2 + along**2 * (u * u).sum()))
            return -0.5 * ((r * r).sum() / sigma**2 - rank_one)

        textbook = log_q(theta[0], tau - u) - log_q(tau, theta[0] - u)
        errors.append(abs(float(textbook - proposal.log_q_ratio(move))))
    assert max(errors) > 1


# --- the released code ------------------------------------------------------------------------------------------------


def test_the_released_proposal_does_not_draw_what_its_density_says() -> None:
    """Drawn: sigma^2 + sigma_along^2 u_i^2 (diagonal). Assumed: sigma^2 I + sigma_along^2 u u'. Only the diagonals agree."""
    draw = generator(0)
    u = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64)
    sigma, along, n = 0.1, 2.0, 400_000
    move = Elementwise(sigma, along).propose((torch.zeros(n, 4).double(),), (u.expand(n, 4),), draw)
    empirical = torch.cov(move.proposed[0].T)
    drawn = torch.diag(sigma**2 + along**2 * u**2)
    assumed = sigma**2 * torch.eye(4, dtype=torch.float64) + along**2 * torch.outer(u, u)
    scale = drawn.diagonal().sqrt()
    error = torch.outer(scale, scale) * math.sqrt(2 / n)
    assert float(((empirical - drawn) / error).abs().max()) < 4.5
    assert float(((empirical - assumed) / error).abs().max()) > 100
    # how far: the density that is evaluated gives a draw a log density lower by this much than the density it came from
    difference = MultivariateNormal(-u, drawn).log_prob(move.proposed[0]) - (
        MultivariateNormal(-u, assumed).log_prob(move.proposed[0])
    )
    assert float(difference.mean()) > 10


@pytest.mark.parametrize("sigma_along", [3.0, 6.05])
def test_the_released_ratio_is_a_constant_in_many_dimensions(sigma_along: float) -> None:
    """About -2 / sigma_along^2 whatever is drawn (0.947 accepted at the paper's 6.05); the right ratio is thousands below."""
    draw = generator(1)
    num_params, sigma = 100_000, 1e-3
    u = sigma * torch.randn(1, num_params, dtype=torch.float64, generator=draw)
    proposal = Elementwise(sigma, sigma_along)
    ratios, right, drift = [], [], []
    for _ in range(50):
        move = proposal.propose((torch.zeros(1, num_params).double(),), (u,), draw)
        ratios.append(float(proposal.log_q_ratio(move)))
        right.append(float((2 * u * move.proposed[0] / (sigma**2 + sigma_along**2 * u**2)).sum()))
        drift.append(float((u * move.proposed[0]).sum() / u.square().sum()))
    ratio = torch.tensor(ratios)
    assert abs(float(ratio.mean()) + 2 / sigma_along**2) < 0.02
    assert float(ratio.std()) < 0.02
    assert max(right) < -1000
    accepted = float(ratio.exp().clamp(max=1).mean())
    assert abs(accepted - math.exp(-2 / sigma_along**2)) < 0.02
    assert abs(sum(drift) / len(drift) + 1) < 0.1, "the drawn move is Adam's own step, plus noise"


def test_the_released_ratio_is_the_rank_one_formula_at_the_drawn_displacement() -> None:
    draw = generator(2)
    u = tuple(torch.randn(5, n, dtype=torch.float64, generator=draw) for n in (7, 3))
    proposal = Elementwise([0.3, 0.7], 1.5)
    move = proposal.propose(tuple(torch.zeros_like(x) for x in u), u, draw)
    a = sum((x.square().sum(1) / s**2 for x, s in zip(u, (0.3, 0.7), strict=True)))
    product = sum(((x * d).sum(1) / s**2 for x, d, s in zip(u, move.proposed, (0.3, 0.7), strict=True)))
    torch.testing.assert_close(proposal.log_q_ratio(move), 2 * product / (1 + 1.5**2 * a))
