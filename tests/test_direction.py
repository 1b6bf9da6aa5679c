"""Directions: from gradient to step."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from adammcmc.kernels.direction import Adam, OptimizerStep


def quadratic(leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Gradient of sum (i + 1) x_i^2 / 2."""
    return tuple(x * torch.arange(1, x[0].numel() + 1).reshape(x.shape[1:]) for x in leaves)


def start() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, *shape, dtype=torch.float64, generator=generator) for shape in ((3, 2), (4,)))


def follow_torch(make: partial[torch.optim.Optimizer], num_steps: int) -> list[torch.Tensor]:
    params = [torch.nn.Parameter(x[0].clone()) for x in start()]
    optimizer = make(params)
    for _ in range(num_steps):
        for p, g in zip(params, quadratic(tuple(p.detach()[None] for p in params)), strict=True):
            p.grad = g[0]
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize(
    ("direction", "make"),
    [
        (Adam(0.1, (0.9, 0.99)), partial(torch.optim.Adam, lr=0.1, betas=(0.9, 0.99))),
        (Adam([0.1, 0.1], [(0.9, 0.99)] * 2, [1e-3] * 2), partial(torch.optim.Adam, lr=0.1, betas=(0.9, 0.99), eps=1e-3)),
        (OptimizerStep(partial(torch.optim.SGD, lr=0.01, momentum=0.9)), partial(torch.optim.SGD, lr=0.01, momentum=0.9)),
        (OptimizerStep(partial(torch.optim.NAdam, lr=0.05)), partial(torch.optim.NAdam, lr=0.05)),
        (OptimizerStep(partial(torch.optim.RMSprop, lr=0.05)), partial(torch.optim.RMSprop, lr=0.05)),
    ],
)
def test_following_the_updates_is_the_optimizer(direction: Adam | OptimizerStep, make: partial) -> None:
    params = start()
    memory = direction.init(params)
    for _ in range(50):
        update, memory = direction(quadratic(params), memory, params)
        params = tuple(p - u for p, u in zip(params, update, strict=True))
    for ours, theirs in zip(params, follow_torch(make, 50), strict=True):
        torch.testing.assert_close(ours[0], theirs, rtol=1e-9, atol=1e-12)


def test_directions_are_pure() -> None:
    for direction in (Adam(0.1), OptimizerStep(partial(torch.optim.SGD, lr=0.1, momentum=0.9))):
        params = start()
        memory = direction(quadratic(params), direction.init(params), params)[1]
        first = direction(quadratic(params), memory, params)[0]
        again = direction(quadratic(params), memory, params)[0]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), direction


def test_chains_do_not_mix_in_an_optimizer_step() -> None:
    two = tuple(torch.cat([x, 2 * x]) for x in start())
    direction = OptimizerStep(partial(torch.optim.SGD, lr=0.1))
    update, _ = direction(quadratic(two), None, two)
    one, _ = direction(quadratic(start()), None, start())
    for a, b in zip(update, one, strict=True):
        torch.testing.assert_close(a[:1], b)
        torch.testing.assert_close(a[1:], 2 * b)
