"""Targets with exact draws. Each says which mistakes it can see."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class KnownTarget(NamedTuple):
    """A density that can be drawn from exactly."""

    name: str
    log_density: Callable[[Tensor], Tensor]
    draw: Callable[[int, torch.Generator], Tensor]
    step_size: float
    """Of a Langevin step with an acceptance between 0.4 and 0.9."""


def _uniform(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(size, dtype=torch.float64, generator=generator)


def _skewed() -> KnownTarget:
    """log of a Gamma(2) variable in two coordinates: no symmetry, so a wrong sign cannot hide."""

    def log_density(x: Tensor) -> Tensor:
        return (2 * x - x.exp()).sum(1)

    def draw(n: int, generator: torch.Generator) -> Tensor:
        return (-_uniform((n, 2, 2), generator).log().sum(2)).log()

    return KnownTarget("skewed", log_density, draw, 0.4)


def _bounded() -> KnownTarget:
    """exp(-1.5 x) on [0, 2] times exp(x) on [-1, 1]: half of the mass sits at a wall; what happens outside matters."""

    def log_density(x: Tensor) -> Tensor:
        inside = (x[:, 0] >= 0) & (x[:, 0] <= 2) & (x[:, 1].abs() <= 1)
        return torch.where(inside, -1.5 * x[:, 0] + x[:, 1], -math.inf)

    def draw(n: int, generator: torch.Generator) -> Tensor:
        u = _uniform((n, 2), generator)
        first = -torch.log1p(-u[:, 0] * -math.expm1(-3.0)) / 1.5
        second = torch.log(math.exp(-1) + u[:, 1] * (math.e - math.exp(-1)))
        return torch.stack([first, second], 1)

    return KnownTarget("bounded", log_density, draw, 0.1)


def _bimodal() -> KnownTarget:
    """A mixture of two unequal Gaussians in two dimensions, its axis at an angle: gradients change sign along the way."""
    means = torch.tensor([[-1.0, -0.6], [1.1, 0.7]], dtype=torch.float64)
    scales = torch.tensor([0.5, 0.8], dtype=torch.float64)
    weights = torch.tensor([0.35, 0.65], dtype=torch.float64)

    def log_density(x: Tensor) -> Tensor:
        square = (x[:, None, :] - means).square().sum(2) / scales**2
        return torch.logsumexp(weights.log() - 2 * scales.log() - 0.5 * square, 1)

    def draw(n: int, generator: torch.Generator) -> Tensor:
        which = (_uniform((n,), generator) > weights[0]).long()
        noise = torch.randn(n, 2, dtype=torch.float64, generator=generator)
        return means[which] + scales[which, None] * noise

    return KnownTarget("bimodal", log_density, draw, 0.25)


def _ill_conditioned() -> KnownTarget:
    """A Gaussian with curvatures 1, 10 and 100 on rotated axes: a step is long in one direction and short in another."""
    rotation, _ = torch.linalg.qr(torch.tensor([[1.0, 2, 0.5], [-0.5, 1, 2], [1, -1, 0.7]], dtype=torch.float64))
    curvature = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)

    def log_density(x: Tensor) -> Tensor:
        return -0.5 * ((x @ rotation).square() * curvature).sum(1)

    def draw(n: int, generator: torch.Generator) -> Tensor:
        noise = torch.randn(n, 3, dtype=torch.float64, generator=generator)
        return (noise / curvature.sqrt()) @ rotation.T

    return KnownTarget("ill-conditioned", log_density, draw, 0.012)


TARGETS = [_skewed(), _bounded(), _bimodal(), _ill_conditioned()]
