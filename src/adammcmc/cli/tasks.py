"""Small bundled tasks to try a sampler on: a network, data and a loss under one name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adammcmc.target.likelihood import GaussianNLL

__all__ = ["TASKS", "Task"]


class Task(NamedTuple):
    """A network, training and held-out data, and a loss."""

    model: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    loss: Callable[..., Tensor]
    training_steps: int
    """Steps of Adam on all data that train the network."""


def two_moons() -> Task:
    """Two classes in the plane, interleaved half circles with noise, 200 points; a network of 2-16-16-2 (354 weights)."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(1200) % 2
    angle = math.pi * torch.rand(1200, generator=generator)
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    inputs = torch.where(targets[:, None] == 0, upper, lower) + 0.2 * torch.randn(1200, 2, generator=generator)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    train, test = (inputs[:200], targets[:200]), (inputs[200:], targets[200:])
    return Task(model, train, test, nn.functional.cross_entropy, 300)


def sine() -> Task:
    """A sine with noise 0.1 at 60 points in two intervals with a gap between them; a network of 1-20-20-1 (481 weights)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 1, generator=generator)
    x = torch.where(x < 0.5, -2 + 2.4 * x, 0.8 + 2.4 * (x - 0.5))  # [-2, -0.8] and [0.8, 2]
    y = torch.sin(3 * x) + 0.1 * torch.randn(60, 1, generator=generator)
    grid = torch.linspace(-2.5, 2.5, 201)[:, None]
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    return Task(model, (x, y), (grid, torch.sin(3 * grid)), GaussianNLL(0.1), 1000)


TASKS: dict[str, Callable[[], Task]] = {"two-moons": two_moons, "sine": sine}
"""By the name in a configuration."""
