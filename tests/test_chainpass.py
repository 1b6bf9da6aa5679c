"""Many chains in one pass over memory make the moves of the pure kernel. On the CPU under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton")

from adammcmc import AdamMCMC, Gaussian
from adammcmc.backends.chainpass import ManyAdamMCMC, in_one_pass
from adammcmc.kernels import adam_mcmc, as_released, mala
from adammcmc.kernels.kernel import ChainState, Info
from adammcmc.samplers.stacked import StackedSampler, setup_of
from adammcmc.target.randomness import Counters, Generators
from adammcmc.target.target import Density

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHAINS = 3


def on_chains(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)


SETTINGS = {
    "the same for all": {"lr": 0.02, "sigma": 0.05, "sigma_along": 1.5},
    "one for each chain": {
        "lr": on_chains(0.02, 0.1, 0.0),
        "sigma": on_chains(0.05, 0.2, 0.1),
        "sigma_along": on_chains(0.0, 1.0, 3.0),
    },
    "one for each leaf": {
        "lr": [0.002, 0.03],
        "sigma": [0.05, on_chains(0.1, 0.2, 0.3)],
        "sigma_along": 3.0,
        "betas": [(0.9, 0.99), (0.0, 0.5)],
    },
}


def potential():
    """A banana in two leaves, of sizes that no block divides."""

    def log_density(leaves: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        a, b = leaves
        return -0.5 * a.square().sum(1) - 0.5 * (b - 0.3 * a.mean(1)[:, None, None]).square().sum((1, 2))

    return Density(log_density, like=start())


def start(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(CHAINS, *shape, generator=generator).to(DEVICE) for shape in ((1030,), (7, 3)))  # type: ignore[return-value]


def run(kernel, steps: int, freeze: bool = False) -> tuple[ChainState, list[Info]]:
    target, generator, infos = potential(), Counters([3, 5, 8], DEVICE), []
    state = kernel.init(start(), target)
    for i in range(steps):
        if freeze and i == 2:  # the gradient of chain 1 is no number
            state.here.grad[0][1, 4] = float("nan")
        state, info = kernel.step(state, target, generator)
        infos.append(info)
    return state, infos


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_it_makes_the_moves_of_the_pure_kernel(settings: dict) -> None:
    kernel = adam_mcmc(**settings)
    fused = in_one_pass(kernel, start(), Counters([3, 5, 8], DEVICE))
    assert type(fused) is ManyAdamMCMC
    (slow, said), (fast, says) = run(kernel, 6), run(fused, 6)
    for a, b in zip(said, says, strict=True):
        for name, x, y in zip(Info._fields, a, b, strict=True):
            torch.testing.assert_close(x.double(), y.double(), rtol=3e-4, atol=3e-4, equal_nan=True, msg=name)
    assert 0 < sum(int(info.is_accepted.sum()) for info in said) < 6 * CHAINS  # both kinds of decisions were seen
    for x, y in zip(slow.params, fast.params, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    for x, y in zip(slow.memory.exp_avg + slow.memory.exp_avg_sq, fast.memory.exp_avg + fast.memory.exp_avg_sq, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


def test_a_frozen_chain_stays_as_it_is() -> None:
    fused = in_one_pass(adam_mcmc(0.02, sigma=0.05), start(), Counters([3, 5, 8], DEVICE))
    (before, _), (after, _) = run(fused, 2), run(fused, 6, freeze=True)
    assert after.frozen_at.tolist() == [-1, 2, -1]
    for x, y in zip(before.params + before.memory.exp_avg, after.params + after.memory.exp_avg, strict=True):
        assert torch.equal(x[1], y[1])
    assert not torch.equal(before.memory.exp_avg[0][0], after.memory.exp_avg[0][0])  # the others go on


def test_a_chain_does_not_depend_on_its_company() -> None:
    kernel, target = adam_mcmc(0.02, sigma=0.05, sigma_along=1.0), potential()

    def last(rows: list[int], seeds: list[int]) -> torch.Tensor:
        params = tuple(x[rows] for x in start())
        generator = Counters(seeds, DEVICE)
        fused = in_one_pass(kernel, params, generator)
        state = fused.init(params, target)
        for _ in range(4):
            state, _ = fused.step(state, target, generator)
        return state.params[0]

    assert torch.equal(last([0, 1, 2], [3, 5, 8])[2], last([2], [8])[0])


def test_what_it_is_not_made_for_stays_as_it_is() -> None:
    counters = Counters([3, 5, 8], DEVICE)
    algorithm_1 = adam_mcmc(0.02, sigma=0.05)
    released, langevin = as_released(0.02, sigma=0.05, sigma_along=1.0), mala(0.01)
    assert in_one_pass(released, start(), counters) is released
    assert in_one_pass(langevin, start(), counters) is langevin
    double = tuple(x.double() for x in start())
    assert in_one_pass(algorithm_1, double, counters) is algorithm_1
    assert in_one_pass(algorithm_1, start(), Generators([torch.Generator()] * 3)) is algorithm_1


def test_burn_in_changes_its_settings() -> None:
    fused = in_one_pass(adam_mcmc(0.02, sigma=0.05), start(), Counters([3, 5, 8], DEVICE))
    assert float(fused._options[0, -1]) == 0.05
    wider = fused.scaled(2.0)
    assert type(wider) is ManyAdamMCMC
    assert float(wider._options[0, -1]) == 0.1
    assert float(replace(wider, num_chains=1)._options.shape[1]) == 5


def test_a_stack_takes_it_where_the_numbers_are_counted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(DEVICE)
    samplers = [AdamMCMC(model.parameters(), num_data=100, sigma=s, prior=Gaussian()) for s in (1e-3, 1e-2)]
    x, y = torch.randn(20, 4, device=DEVICE), torch.randint(2, (20,), device=DEVICE)

    def stack(generator):
        setups = [setup_of(sampler, model) for sampler in samplers]
        return StackedSampler(samplers[0], model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), setups, generator)

    fast, slow = stack(Counters([1, 2], DEVICE)), stack(Counters([1, 2], DEVICE))
    assert type(fast.kernel) is ManyAdamMCMC
    slow.kernel = adam_mcmc(1e-3, sigma=on_chains(1e-3, 1e-2))
    for _ in range(5):
        torch.testing.assert_close(fast.step((x, y)), slow.step((x, y)), rtol=1e-4, atol=1e-5)
    assert len({tuple(info.tolist()) for info in (fast.info.is_accepted, slow.info.is_accepted)}) == 1
