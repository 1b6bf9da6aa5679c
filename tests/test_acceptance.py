"""Acceptance tests: a table that every test goes through, then what is particular to one."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from adammcmc import Density, kernels
from adammcmc.acceptance import (
    AcceptanceTest,
    AlwaysAccept,
    Barker,
    Comparison,
    Confidence,
    DerivativeBound,
    FullData,
    Minibatch,
    Penalty,
    Sequential,
    Tuna,
    Verdict,
)
from adammcmc.acceptance.metropolis import metropolis
from adammcmc.acceptance.subsample import Estimate
from adammcmc.target.leaves import Leaves
from adammcmc.target.potential import Evaluation
from adammcmc.target.randomness import Randomness


class Synthetic:
    """n losses of a quadratic model, l_i(theta) = (theta - x_i)^2 / 2, for one chain."""

    scale = inverse_temperature = 1.0
    fixed = is_bounded = can_narrow = False
    control = None

    def __init__(self, data: Tensor, lam: float = 1.0) -> None:
        self.data, self.inverse_temperature, self.scale = data, lam, lam * len(data)
        self.asked: list[slice | Tensor] = []

    @property
    def num_examples(self) -> int:
        return len(self.data)

    def evaluate(self, params: Leaves, *, with_grad: bool) -> Evaluation:
        return Evaluation(self._losses(params, slice(None)), self.log_prior(params), None)

    def compare(self, current: Evaluation, proposed: Evaluation) -> Tensor:
        return self.scale * (proposed.losses - current.losses).mean(1) - (proposed.log_prior - current.log_prior)

    def log_prior(self, params: Leaves) -> Tensor:
        return torch.where(params[0][:, 0].abs() < 5, -0.1 * params[0][:, 0] ** 2, -math.inf)

    def example_losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        self.asked.append(indices)
        return self._losses(params, indices)

    def _losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        return 0.5 * (params[0] - self.data[indices]) ** 2


DATA = torch.randn(37, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def compare(here: float, there: float, log_q: float, lam: float = 1.0) -> tuple[Comparison, Synthetic, float]:
    """A comparison, its potential, and the exact log ratio."""
    potential = Synthetic(DATA, lam)
    current, proposed = ((torch.tensor([[at]], dtype=torch.float64),) for at in (here, there))
    evaluation = potential.evaluate(current, with_grad=False)
    comparison = Comparison(
        potential,
        current,
        proposed,
        evaluation,
        lambda: potential.evaluate(proposed, with_grad=False),
        lambda: torch.tensor([log_q], dtype=torch.float64),
        torch.tensor([True]),
    )
    exact = log_q - lam * float((0.5 * (there - DATA) ** 2 - 0.5 * (here - DATA) ** 2).sum()) - 0.1 * (there**2 - here**2)
    return comparison, potential, exact


CONTRACT = {
    "minibatch": Minibatch(),
    "full data": FullData(chunk_size=10),
    "full data, one chunk": FullData(),
    "full data, early rejection": FullData(chunk_size=10, early_rejection=True),
    "always": AlwaysAccept(),
    "minibatch of its own": Minibatch(20),
    "penalty": Penalty(),
    "penalty on a batch of its own": Penalty(20),
    "barker": Barker(30),
    "sequential": Sequential(0.01, 30),
    "confidence": Confidence(0.1, None, 20),
    "tuna": Tuna(DerivativeBound(torch.full((37,), 12.0, dtype=torch.float64)), 0.1),
}
# the batch of `compare` is the whole data set; what the others promise is in `test_subsample`
EXACT = ["minibatch", "full data", "full data, one chunk", "full data, early rejection"]


@pytest.mark.parametrize("name", CONTRACT)
def test_every_test_is_small_frozen_and_declares_itself(name: str) -> None:
    test = CONTRACT[name]
    with pytest.raises(dataclasses.FrozenInstanceError):
        test.chunk_size = 1  # type: ignore[misc]
    assert isinstance(test.approximation(fixed_data=False), str | None)
    assert isinstance(test, AcceptanceTest)
    for trait in ("needs_noise", "is_metropolis", "needs_examples", "reads_device", "uses_all_data", "carries_count"):
        assert isinstance(getattr(test, trait), bool)
    assert test.uses_batch_only == (test in (Minibatch(), AlwaysAccept()))
    assert test.uses_all_data == isinstance(test, FullData) == (test.chunk_size is not None)
    assert str(test)
    assert (test.__doc__ or "").lower().count("exact") + (test.__doc__ or "").lower().count("approximate") > 0


def test_a_test_of_a_users_own_needs_two_methods() -> None:
    class Greedy(AcceptanceTest):
        def __call__(self, comparison: Comparison, carry: object, generator: Randomness) -> tuple[Verdict, object]:
            y = comparison.batch_log_ratio()
            return metropolis(comparison, Estimate(y, torch.zeros_like(y)), torch.zeros_like(y)), carry

        def approximation(self, *, fixed_data: bool) -> str | None:
            return "downhill only"

    test = Greedy()
    assert test.needs_noise
    assert [test.chunk_size, test.complaint(None), test.carried_losses(None)] == [None] * 3
    off = ("is_metropolis", "needs_examples", "reads_device", "uses_all_data", "uses_batch_only", "carries_count")
    assert not any(getattr(test, trait) for trait in off)
    assert test.rate_like(0.3) == 0.3
    kernel = kernels.mala(0.1, acceptance=test)
    state = kernel.init(torch.zeros(2, 3), density := Density(lambda x: -x.square().sum(1)))
    assert not bool(kernel.step(state, density, torch.Generator().manual_seed(0))[1].is_accepted.any())


@pytest.mark.parametrize("name", CONTRACT)
def test_every_verdict_has_its_shape_and_repeats_with_the_generator(name: str) -> None:
    comparison, _, _ = compare(0.1, 0.2, 0.0)
    verdicts = [CONTRACT[name](comparison, None, torch.Generator().manual_seed(5))[0] for _ in range(2)]
    for field, other in zip(verdicts[0][:5], verdicts[1][:5], strict=True):
        assert field.shape == (1,)
        assert torch.equal(field, other) or bool(field.isnan() & other.isnan())
    assert verdicts[0].is_accepted.dtype == torch.bool


@pytest.mark.parametrize("name", CONTRACT)
def test_no_test_leaves_the_support(name: str) -> None:
    comparison, _, _ = compare(4.9, 5.1, 1e9)
    for seed in range(20):
        verdict, _ = CONTRACT[name](comparison, None, torch.Generator().manual_seed(seed))
        assert not bool(verdict.is_accepted)
        assert float(verdict.acceptance_rate) == 0


@pytest.mark.parametrize("name", CONTRACT)
def test_no_test_moves_a_frozen_chain_or_its_memory(name: str) -> None:
    comparison, potential, _ = compare(0.0, 0.001, 1e9)
    frozen = dataclasses.replace(comparison, may_move=torch.tensor([False]))
    verdict, carry = CONTRACT[name](frozen, None, torch.Generator().manual_seed(0))
    assert not bool(verdict.is_accepted)
    if isinstance(CONTRACT[name], FullData):
        torch.testing.assert_close(carry, potential._losses(comparison.params, slice(None)))


@pytest.mark.parametrize("name", EXACT)
def test_a_loss_of_minus_infinity_is_no_place_to_go(name: str) -> None:
    comparison, potential, _ = compare(0.0, 0.1, 0.0)
    losses = potential._losses

    def bottomless(params: Leaves, indices: slice | Tensor) -> Tensor:
        return losses(params, indices) - (math.inf if float(params[0]) == 0.1 else 0.0)

    potential._losses = bottomless  # type: ignore[method-assign]
    try:
        verdict, _ = CONTRACT[name](comparison, None, torch.Generator().manual_seed(0))
    except ValueError as error:
        assert "negative loss" in str(error)  # noqa: PT017
        return
    assert not bool(verdict.is_accepted)
    assert not bool(verdict.is_finite)


@pytest.mark.parametrize("lam", [1.0, 0.2])
@pytest.mark.parametrize("name", EXACT)
def test_exact_tests_accept_at_the_metropolis_rate(name: str, lam: float) -> None:
    comparison, _, exact = compare(0.0, 0.2, -0.2, lam)
    rate = min(1.0, math.exp(exact))
    generator = torch.Generator().manual_seed(1)
    carry, accepted, n = None, 0, 4000
    for _ in range(n):
        verdict, _ = CONTRACT[name](comparison, carry, generator)
        accepted += int(verdict.is_accepted)
        if verdict.log_ratio.isfinite():
            assert float(verdict.log_ratio) == pytest.approx(exact, rel=1e-9)
        if "early" in name:  # whether Y is known depends on the uniform: only the decision is unbiased
            assert float(verdict.acceptance_rate) == float(verdict.is_accepted)
        else:
            assert float(verdict.acceptance_rate) == pytest.approx(rate, rel=1e-9)
    assert 0.05 < rate < 0.95
    assert abs(accepted / n - rate) < 4.5 * math.sqrt(rate * (1 - rate) / n)


def test_the_noise_of_a_batch_is_that_of_sampling_without_replacement() -> None:
    """s^2 = (lambda n)^2 var / b (1 - b / n): of half of the data much less than with replacement, of all of them nothing."""
    comparison, potential, _ = compare(0.0, 0.3, 0.0)
    noise = comparison.batch_noise()
    assert noise is not None
    assert float(noise) == 0
    generator = torch.Generator().manual_seed(0)
    ratios, forecasts = [], []
    for _ in range(3000):
        rows = torch.randperm(37, generator=generator)[:20]
        here, there = (
            Evaluation(potential._losses(p, rows), potential.log_prior(p), None)
            for p in (comparison.params, comparison.proposed)
        )
        part = dataclasses.replace(comparison, here=here, there=lambda there=there: there)
        noise = part.batch_noise()
        assert noise is not None
        ratios.append(float(part.batch_log_ratio()))
        forecasts.append(float(noise) ** 2)
    measured, forecast = float(torch.tensor(ratios).std()), math.sqrt(sum(forecasts) / 3000)
    assert abs(measured / forecast - 1) < 4.5 / math.sqrt(2 * 3000)


@pytest.mark.parametrize("there", [0.001, 4.0], ids=["seen to the end", "stopped"])
def test_early_rejection_has_no_noise(there: float) -> None:
    """It decides as the whole data would: its Y, where it is known, is exact."""
    comparison, _, _ = compare(0.0, there, 0.0)
    verdict, _ = FullData(chunk_size=5, early_rejection=True)(comparison, None, torch.Generator().manual_seed(0))
    assert verdict.log_ratio_noise is not None
    assert float(verdict.log_ratio_noise) == 0


def test_chunks_do_not_matter() -> None:
    comparison, _, exact = compare(0.3, -0.2, 0.0)
    for size in (1, 7, 36, 37, 1000):
        verdict, carry = FullData(chunk_size=size)(comparison, None, torch.Generator().manual_seed(0))
        assert float(verdict.log_ratio) == pytest.approx(exact, rel=1e-12)
        assert carry is not None
        assert carry.shape == (1, 37)


def test_full_data_remembers_the_losses_of_the_point_it_ends_at() -> None:
    for early in (False, True):
        for there in (0.001, 3.0):  # accepted, rejected
            comparison, potential, _ = compare(0.0, there, 0.0)
            test = FullData(chunk_size=5, early_rejection=early)
            verdict, carry = test(comparison, None, torch.Generator().manual_seed(0))
            assert bool(verdict.is_accepted) == (there == 0.001)
            point = comparison.proposed if bool(verdict.is_accepted) else comparison.params
            torch.testing.assert_close(carry, potential._losses(point, slice(None)))
            potential.asked.clear()
            test(comparison, carry, torch.Generator().manual_seed(0))
            assert len(potential.asked) <= 8, "only the proposed point is evaluated when the current one is known"


def test_early_rejection_stops_and_says_how_far_it_went() -> None:
    comparison, _, _ = compare(0.0, 4.0, 0.0)
    verdict, _ = FullData(chunk_size=5, early_rejection=True)(comparison, None, torch.Generator().manual_seed(0))
    assert not bool(verdict.is_accepted)
    assert float(verdict.num_examples) < 37
    assert bool(verdict.log_ratio.isnan())
    assert float(verdict.acceptance_rate) == 0


def test_a_bad_chunk_size_is_refused() -> None:
    with pytest.raises(ValueError, match="`chunk_size` must be at least 1, got 0"):
        FullData(chunk_size=0)
