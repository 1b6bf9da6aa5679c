"""Where random numbers come from: a chain's own do not depend on the others."""

from __future__ import annotations

import pytest
import torch

from adammcmc.randomness import Generators, normal, streams, uniform

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
    with pytest.raises(ValueError, match="for 1 chains, and 2 ask"):
        Generators([torch.Generator()]).normal((2, 3), torch.float32, CPU)
