"""Where random numbers come from: a chain's own do not depend on the others."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from adammcmc.backends.streams import Counters, streams
from adammcmc.target.randomness import Generators, normal, uniform

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(), (3,), (50,), (7, 11)])
@pytest.mark.parametrize("draw", [normal, uniform])
def test_a_chain_draws_what_it_would_draw_alone(shape: tuple[int, ...], draw) -> None:  # type: ignore[no-untyped-def]
    seeds = [5, 8, 13]
    many, few = streams(seeds, CPU), streams(seeds[1:], CPU)
    for _ in range(3):
        together = draw((3, *shape), torch.float64, CPU, many)
        assert torch.equal(together[1:], draw((2, *shape), torch.float64, CPU, few))
        assert not torch.equal(together[0], together[1])
    alone = torch.Generator().manual_seed(13)
    again = [draw((1, *shape), torch.float64, CPU, alone) for _ in range(3)][-1]
    assert torch.equal(together[2:], again)


def test_the_state_brings_the_numbers_back() -> None:
    numbers = streams([1, 2], CPU)
    numbers.normal((2, 5), torch.float32, CPU)  # type: ignore[union-attr]
    state = numbers.get_state()
    first = normal((2, 5), torch.float32, CPU, numbers)
    other = streams([7, 8], CPU)
    other.set_state(state)
    assert torch.equal(normal((2, 5), torch.float32, CPU, other), first)


def test_numbers_for_too_few_chains_are_refused() -> None:
    with pytest.raises(ValueError, match="for 1 chains, but 2 rows"):
        Generators([torch.Generator()]).normal((2, 3), torch.float32, CPU)


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU the kernels run in Triton's interpreter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,), (1500,), (7, 11)])
@pytest.mark.parametrize("draw", [normal, uniform])
def test_counters_belong_to_their_chain(shape: tuple[int, ...], draw, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("triton")
    many, few = Counters([5, 8, 13], DEVICE), Counters([8, 13], DEVICE)
    seen = []
    for _ in range(3):
        together = draw((3, *shape), dtype, DEVICE, many)
        assert torch.equal(together[1:], draw((2, *shape), dtype, DEVICE, few))
        seen.append(together)
    values = torch.stack(seen).reshape(9, -1)
    assert len({row[0].item() for row in values}) == 9, "each chain and each call has numbers of its own"
    state = many.get_state()
    later = draw((3, *shape), dtype, DEVICE, many)
    again = Counters([1, 2, 3], DEVICE)
    again.set_state(state)
    assert torch.equal(draw((3, *shape), dtype, DEVICE, again), later)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counters_are_normal_and_uniform(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    source = Counters(range(20), DEVICE)
    values = normal((20, 1000), dtype, DEVICE, source).double().cpu()
    assert stats.kstest(values.reshape(-1).numpy(), "norm").pvalue > 1e-5
    values = uniform((20, 1000), dtype, DEVICE, source).double().cpu()
    assert float(values.min()) >= 0
    assert float(values.max()) < 1
    assert stats.kstest(values.reshape(-1).numpy(), "uniform").pvalue > 1e-5
    between = torch.corrcoef(values).fill_diagonal_(0)
    assert float(between.abs().max()) * 1000**0.5 < 5.5
