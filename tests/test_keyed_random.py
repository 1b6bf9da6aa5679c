"""Numbers from a key: uniform, the same in any company, and orders that are permutations."""

from __future__ import annotations

import torch
from scipy import stats

from adammcmc.target.keyed_random import keys, numbers, order, poisson
from adammcmc.target.randomness import Generators


def some_keys(count: int, seed: int = 0) -> torch.Tensor:
    return keys(count, torch.device("cpu"), torch.Generator().manual_seed(seed))


def test_the_numbers_are_those_of_splitmix64() -> None:
    """Against the definition, in Python's whole numbers."""
    mask = (1 << 64) - 1
    key = some_keys(3)
    for seed, row in zip(key.tolist(), numbers(key, 5), strict=True):
        state = seed & mask
        for number in row.tolist():
            state = (state + 0x9E3779B97F4A7C15) & mask
            x = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
            assert number == ((x ^ (x >> 31)) >> 11) * 2.0**-53


def test_numbers_are_uniform_within_and_between_keys_and_streams() -> None:
    key = some_keys(500)
    for values in (numbers(key, 200), numbers(key, 200, stream=1), numbers(key, 2)[:, :1]):
        assert stats.kstest(values.flatten().numpy(), "uniform").pvalue > 1e-5
    pairs = torch.stack([numbers(key, 200).flatten(), numbers(key, 200, stream=1).flatten()])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 4.5 / 100_000**0.5


def test_an_order_is_a_uniform_permutation() -> None:
    """All ordered pairs of the first two of five are equally likely, and so are all last ones of a whole order."""
    orders = order(some_keys(40_000), 5, 5)
    assert torch.equal(orders.sort(1).values, torch.arange(5).expand(40_000, 5))
    pairs = torch.bincount(orders[:, 0] * 5 + orders[:, 1], minlength=25)
    off_diagonal = [int(pairs[5 * i + j]) for i in range(5) for j in range(5) if i != j]
    assert sum(off_diagonal) == 40_000
    assert stats.chisquare(off_diagonal).pvalue > 1e-5
    assert stats.chisquare(torch.bincount(orders[:, 4], minlength=5).numpy()).pvalue > 1e-5


def test_a_longer_order_begins_with_a_shorter_one() -> None:
    key = some_keys(20)
    longest = order(key, 1000, 900)
    for count in (1, 10, 333):
        assert torch.equal(order(key, 1000, count), longest[:, :count])


def test_the_key_of_a_chain_does_not_depend_on_its_company() -> None:
    def streams(*seeds: int) -> Generators:
        return Generators([torch.Generator().manual_seed(seed) for seed in seeds])

    together = keys(3, torch.device("cpu"), streams(4, 5, 6))
    assert torch.equal(together[2:], keys(1, torch.device("cpu"), streams(6)))


def test_poisson_variables_have_their_distribution() -> None:
    for rate in (0.0, 0.3, 4.0, 77.7, 12_345.0):
        number = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        drawn = poisson(torch.full((20_000,), rate, dtype=torch.float64), number)
        expected = stats.poisson.ppf(number.numpy(), rate)
        # (scipy's inverse has its own rounding at ties)
        assert float((drawn != torch.from_numpy(expected)).double().mean()) < 1e-3, rate
        assert abs(float(drawn.double().mean()) - rate) <= 4.5 * (rate / 20_000) ** 0.5
