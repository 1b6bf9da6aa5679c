"""Microcanonical dynamics: the map itself. That its chains are exact is tested with all kernels, in test_kernels.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from adammcmc import AlwaysAccept, BurnIn, Density, kernels, sample_density, warm_up
from adammcmc.kernels.microcanonical import MicrocanonicalKernel

CURVATURE = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)


def quartic(x: Tensor) -> Tensor:
    return -0.5 * (x.square() * CURVATURE).sum(1) - 0.25 * x.pow(4).sum(1)


def start(num_chains: int = 50, dim: int = 3) -> tuple[Tensor, Tensor]:
    """Points, and directions of length sqrt(dim)."""
    generator = torch.Generator().manual_seed(0)
    x, p = torch.randn(2, num_chains, dim, dtype=torch.float64, generator=generator)
    return 0.5 * x, p * math.sqrt(dim) / p.norm(dim=1, keepdim=True)


def trajectory(kernel: MicrocanonicalKernel, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the kernel's deterministic part goes, and its log weight without U."""
    density = Density(quartic)
    here = density.evaluate((x,), with_grad=True)
    move, half_way = kernel._leapfrog((x,), here, (p,), density)
    there = density.evaluate(move.proposed, with_grad=True)
    log_weight, after = kernel._arrive((p,), half_way, there, density.scale)
    return move.proposed[0], after[0], log_weight


KERNELS = {
    "one step": kernels.microcanonical(0.3),
    "five steps": kernels.microcanonical(0.3, num_leapfrog=5),
    "preconditioned": kernels.microcanonical(0.4, num_leapfrog=2, preconditioner=1 / CURVATURE),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_trajectory_can_be_walked_back(name: str) -> None:
    x, p = start()
    there, after, log_weight = trajectory(KERNELS[name], x, p)
    back, before, negative = trajectory(KERNELS[name], there, -after)
    torch.testing.assert_close(back, x)
    torch.testing.assert_close(before, -p)
    torch.testing.assert_close(negative, -log_weight)
    torch.testing.assert_close(after.square().sum(1), torch.full((50,), 3.0, dtype=torch.float64))


@pytest.mark.parametrize("name", KERNELS)
def test_the_weight_is_the_volume_that_the_map_contracts(name: str) -> None:
    """log |det| of the map on points times directions, by finite coordinates of the sphere, is the log weight."""
    x, p = start(8)

    def map_of(flat: Tensor) -> Tensor:
        """Points and angles -> points and angles: the sphere in 3 dimensions has coordinates (z, phi) of uniform measure."""
        point, z, phi = flat[:3], flat[3], flat[4]
        round_ = (1 - z.square()).sqrt()
        direction = math.sqrt(3) * torch.stack([round_ * phi.cos(), round_ * phi.sin(), z])
        there, after, _ = trajectory(KERNELS[name], point[None], direction[None])
        unit = after[0] / math.sqrt(3)
        return torch.cat([there[0], unit[2:], torch.atan2(unit[1], unit[0])[None]])

    for i in range(len(x)):
        unit = p[i] / math.sqrt(3)
        flat = torch.cat([x[i], unit[2:], torch.atan2(unit[1], unit[0])[None]])
        moves = 1e-5 * torch.eye(5, dtype=torch.float64)
        columns = [(map_of(flat + move) - map_of(flat - move)) / 2e-5 for move in moves]
        log_det = torch.stack(columns, 1).det().abs().log()
        torch.testing.assert_close(log_det, trajectory(KERNELS[name], x[i : i + 1], p[i : i + 1])[2][0], rtol=1e-5, atol=1e-6)


def test_a_vanishing_force_turns_nothing_and_a_huge_one_turns_all() -> None:
    x, p = start()
    kernel = kernels.microcanonical(0.1)
    for size in (0.0, 1e-300):
        turned, gained, _ = kernel._turn((p,), (torch.full_like(x, size),), 1.0)
        torch.testing.assert_close(turned[0], p)
        torch.testing.assert_close(gained, torch.zeros(50, dtype=torch.float64))
    turned, gained, _ = kernel._turn((p,), (torch.full_like(x, 1e8),), 1.0)
    torch.testing.assert_close(turned[0], -torch.ones_like(p))
    assert bool(gained.isfinite().all())


def test_weights_stay_in_their_precision() -> None:
    initial = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    draws, info = sample_density(lambda x: -x.square().sum(1) / 2, initial, kernels.microcanonical(0.5), num_steps=20)
    assert draws.dtype == torch.float32
    assert float(info.acceptance_rate.mean()) > 0.5


def test_the_unadjusted_sampler_is_right_for_short_steps_and_says_that_it_is_approximate() -> None:
    kernel = kernels.microcanonical(0.15, 1.0, acceptance=AlwaysAccept())
    initial, _ = start(2000)
    draws, info = sample_density(quartic, initial, kernel, num_steps=400, burn_in=200)
    truth, _ = sample_density(quartic, initial, kernels.hmc(0.2, 3), num_steps=300, burn_in=100)
    assert bool(info.is_accepted.all())
    ratios = draws.square().mean((0, 1)) / truth.square().mean((0, 1))
    assert float((ratios - 1).abs().max()) < 0.04
    assert kernel.approximation(fixed_data=True)
    assert not kernels.microcanonical(0.2).approximation(fixed_data=True)


def test_it_beats_underdamped_dynamics_where_energy_diffuses() -> None:
    """The energy of underdamped dynamics changes by the refresh alone, slowly; at constant speed, by the force."""

    def normal(x: Tensor) -> Tensor:
        return -x.square().sum(1) / 2

    initial = torch.randn(64, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spreads = {}
    for name, kernel in {"ours": kernels.microcanonical(0.1), "underdamped": kernels.underdamped(0.1)}.items():
        tuned, params = warm_up(normal, initial, kernel, tune=BurnIn(num_steps=300), progress=False)
        _, info = sample_density(normal, params, tuned, num_steps=500, seed=1, progress=False)
        spreads[name] = float(info.potential.mean(1).var())  # of the mean over a run: 1 / effective draws
    assert spreads["ours"] < 0.5 * spreads["underdamped"]


def test_one_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two dimensions"):
        sample_density(lambda x: -x.square().sum(1), torch.zeros(3, 1), kernels.microcanonical(0.1), num_steps=2)
