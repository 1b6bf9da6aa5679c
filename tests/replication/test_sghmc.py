"""The baseline: its equations, step by step, and its stationary variance."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from adammcmc import AlwaysAccept, Gaussian, OptimizerMCMC
from replication.sghmc import ScaleAdaptedSGHMC, noiseless_share

N, H = 50, 4.0  # data, curvature of U


def weights(num: int = 3000, start: float = 0.3) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((num,), start, dtype=torch.float64))


def walk(sampler: ScaleAdaptedSGHMC, p: Tensor, num_steps: int, noise: float = 0.0, seed: int = 1) -> Tensor:
    """Mean of theta^2 of each chain over the second half: the mean loss is H theta^2 / (2 N), its gradient may be
    noisy."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros_like(p)
    for step in range(num_steps):
        p.grad = H * p.detach() / N
        if noise:
            p.grad += math.sqrt(noise) / N * torch.randn(p.shape, dtype=p.dtype, generator=generator)
        sampler.step()
        if step >= num_steps // 2:
            total += p.detach().square()
    return total / (num_steps - num_steps // 2)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def predicted(sampler: ScaleAdaptedSGHMC, p: Tensor, noise: float = 0.0) -> Tensor:
    """(6) of the docstring, times H."""
    lr, mdecay = sampler.param_groups[0]["lr"], sampler.param_groups[0]["mdecay"]
    v = sampler.state[p]["square"]
    return (1 - (1 - noise / v) * lr**2 * v.sqrt() / (2 * mdecay)) / (1 - lr**2 * H / v.sqrt() / (4 - 2 * mdecay))


def test_three_steps_are_the_equations() -> None:
    """Two steps of burn-in and one after it, weight by weight, in plain numbers."""
    p = torch.nn.Parameter(torch.tensor([0.5, -2.0], dtype=torch.float64))
    lr, mdecay = 0.1, 0.2
    sampler = ScaleAdaptedSGHMC([p], lr, mdecay, num_data=10, burn_in=2, generator=seeded(3))
    generator = seeded(3)
    rows = [(0.5, 1.0, 1.0, 1.0, 0.0), (-2.0, 1.0, 1.0, 1.0, 0.0)]
    for step in range(3):
        grads = [0.3 * theta**2 + 0.1 * step for theta, *_ in rows]
        p.grad = torch.tensor(grads, dtype=torch.float64)
        sampler.step()
        noise = torch.randn(2, dtype=torch.float64, generator=generator).tolist()
        for i, (theta, tau, mean, square, v) in enumerate(rows):
            g = 10 * grads[i]
            if step < 2:
                tau, mean, square = (
                    tau + 1 - tau * mean**2 / square,
                    mean + (g - mean) / (tau + 1),
                    square + (g * g - square) / (tau + 1),
                )
            variance = max(0.0, 2 * lr**2 * mdecay / math.sqrt(square) - lr**4)
            v = v - lr**2 / math.sqrt(square) * g - mdecay * v + math.sqrt(variance) * noise[i]
            rows[i] = (theta + v, tau, mean, square, v)
    state = sampler.state[p]
    found = torch.stack([p.detach(), state["tau"], state["mean"], state["square"], state["velocity"]], 1)
    torch.testing.assert_close(found, torch.tensor(rows, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("lr", "noise"), [(0.05, 0.0), (0.02, 0.0), (0.05, 20.0)])
def test_the_variance_is_that_of_the_target(lr: float, noise: float) -> None:
    """It is (6) within Monte Carlo error, and the target's up to the O(lr^2) that (6) says."""
    p = weights()
    sampler = ScaleAdaptedSGHMC([p], lr, num_data=N, burn_in=500, generator=seeded())
    walk(sampler, p, 1000, noise)
    found = walk(sampler, p, 3000, noise, seed=2) * H
    law = predicted(sampler, p, noise)
    ratio = found / law
    assert abs(float(ratio.mean()) - 1) < 4.5 * float(ratio.std()) / math.sqrt(len(ratio))
    assert abs(float(found.mean()) - 1) < 4.5 * float(found.std()) / math.sqrt(len(found)) + 30 * lr**2


def test_with_the_mean_in_place_of_the_sum_it_is_n_times_as_hot() -> None:
    p = weights(1000)
    sampler = ScaleAdaptedSGHMC([p], 0.05, num_data=1, burn_in=500, generator=seeded())
    walk(sampler, p, 2000)
    found = float(walk(sampler, p, 6000).mean()) * H
    assert 0.8 * N < found < 1.2 * N


def test_the_scale_is_frozen_after_burn_in() -> None:
    p = weights(20)
    sampler = ScaleAdaptedSGHMC([p], 0.05, num_data=N, burn_in=30, generator=seeded())
    walk(sampler, p, 29, noise=1.0)
    before = copy.deepcopy(sampler.state[p])
    walk(sampler, p, 1, noise=1.0)
    adapted = copy.deepcopy(sampler.state[p])
    walk(sampler, p, 20, noise=1.0)
    for key in ("tau", "mean", "square"):
        assert bool((before[key] != adapted[key]).all())
        assert torch.equal(adapted[key], sampler.state[p][key])
    assert float(sampler.state[p]["step"]) == 50


def test_tau_leaves_its_start() -> None:
    """A window of one step would make V the last squared gradient."""
    p = weights(200)
    sampler = ScaleAdaptedSGHMC([p], 0.02, num_data=N, burn_in=400, generator=seeded())
    walk(sampler, p, 400, noise=100.0)
    assert float(sampler.state[p]["tau"].median()) > 10
    assert float(sampler.state[p]["square"].mean()) == pytest.approx(100 + H, rel=0.1)


def test_large_gradients_silence_the_noise() -> None:
    """V^(1/2) = 1e6 is far above 2 mdecay / lr^2 = 1,000: two seeds make one trajectory."""
    ends = []
    for seed in (1, 2):
        p = weights(5)
        sampler = ScaleAdaptedSGHMC([p], num_data=1_000_000, burn_in=10, generator=seeded(seed))
        for _ in range(20):
            p.grad = torch.ones_like(p)
            sampler.step()
        assert noiseless_share(sampler.state.values(), 1e-2) == 1
        ends.append(p.detach().clone())
    assert torch.equal(*ends)
    loud = weights(5)
    sampler = ScaleAdaptedSGHMC([loud], num_data=N, burn_in=10, generator=seeded())
    walk(sampler, loud, 20)
    assert noiseless_share(sampler.state.values(), 1e-2) == 0


def test_a_prior_of_the_sampler_is_part_of_the_gradient() -> None:
    """Through `OptimizerMCMC`, at lambda = 1: n times the gradient of the mean loss, and theta / s^2."""
    p = weights(10)
    optimizer = partial(ScaleAdaptedSGHMC, num_data=N, burn_in=5)
    noisy = partial(optimizer, generator=seeded())
    sampler = OptimizerMCMC([p], noisy, num_data=N, sigma=0.0, acceptance=AlwaysAccept(), prior=Gaussian(0.5))
    for _ in range(10):
        sampler.step(lambda: H * p.square().sum() / (2 * N))
    q = weights(10)
    plain = optimizer([q], generator=seeded())
    for _ in range(10):
        q.grad = (H + 4.0) * q.detach() / N
        plain.step()
    torch.testing.assert_close(p, q, rtol=1e-12, atol=0)


def test_weights_without_gradient() -> None:
    """None: it stays. Zeros: it diffuses, and remains finite."""
    still, free = weights(3), weights(3)
    sampler = ScaleAdaptedSGHMC([still, free], num_data=N, burn_in=50, generator=seeded())
    for _ in range(100):
        free.grad = torch.zeros_like(free)
        sampler.step()
    assert torch.equal(still, weights(3))
    assert bool(free.isfinite().all())
    assert bool((free != 0.3).all())


def test_a_saved_state_continues() -> None:
    p = weights(10)
    sampler = ScaleAdaptedSGHMC([p], num_data=N, burn_in=15, generator=seeded())
    walk(sampler, p, 10)
    q = torch.nn.Parameter(p.detach().clone())
    other = ScaleAdaptedSGHMC([q], lr=1.0, num_data=N, burn_in=1, generator=seeded())
    other.load_state_dict(copy.deepcopy(sampler.state_dict()))
    other.generator = copy.deepcopy(sampler.generator)
    walk(sampler, p, 10)
    walk(other, q, 10)
    assert torch.equal(p, q)


def test_a_closure_is_called_with_gradients() -> None:
    p = weights(4)
    sampler = ScaleAdaptedSGHMC([p], num_data=N, burn_in=1, generator=seeded())

    def closure() -> float:
        sampler.zero_grad()
        loss = H * p.square().sum() / (2 * N)
        loss.backward()
        return loss.item()

    assert sampler.step(closure) == pytest.approx(H * 4 * 0.09 / (2 * N))
    assert bool((p != 0.3).all())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"lr": 0.0}, "`lr` must be positive"),
        ({"mdecay": 1.0}, "`mdecay` must be between"),
        ({"num_data": 0}, "`num_data` must be at least 1"),
        ({"burn_in": -1}, "`burn_in` must not be negative"),
    ],
)
def test_arguments_are_checked(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScaleAdaptedSGHMC([weights(1)], **{"num_data": N, "burn_in": 1, **wrong})  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # the first use in a process says so
def test_a_graph_makes_the_same_steps_without_waiting() -> None:
    """Captured steps adapt, stop to adapt, and end where eager ones end; nothing is read back."""
    ends, states = [], []
    for is_captured in (False, True):
        torch.cuda.manual_seed(7)
        p = torch.nn.Parameter(torch.full((64,), 0.3, device="cuda"))
        p.grad = torch.zeros_like(p)
        sampler = ScaleAdaptedSGHMC([p], num_data=N, burn_in=5)

        def step(p: Tensor = p, sampler: ScaleAdaptedSGHMC = sampler) -> None:
            assert p.grad is not None
            p.grad.copy_(p.detach() * H / N)
            sampler.step()

        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
            if is_captured:
                graph = torch.cuda.CUDAGraph()
                torch.cuda.set_sync_debug_mode(mode)  # the capture itself waits
                with torch.cuda.graph(graph):
                    step()
                torch.cuda.set_sync_debug_mode("error")
            for _ in range(9):
                graph.replay() if is_captured else step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        ends.append(p.detach().cpu())
        states.append({key: value.cpu() for key, value in sampler.state[p].items()})
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
    for key in states[0]:
        torch.testing.assert_close(states[0][key], states[1][key], rtol=1e-5, atol=1e-6)
