"""Tests on subsamples: each keeps the promise it makes, and where there is no noise decides as the full data do.

The contract table has one row for each test: what it promises of P(accept), at several log ratios and levels of noise.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

from adammcmc.acceptance import (
    Barker,
    ClampedLoss,
    Comparison,
    Confidence,
    DerivativeBound,
    FullData,
    Minibatch,
    Penalty,
    Sequential,
    Tuna,
    Verdict,
    beta_eff,
    logistic_bound,
)
from adammcmc.acceptance.barker import ATOMS, acceptance, correction
from adammcmc.acceptance.growing import student_quantile
from adammcmc.acceptance.subsample import estimate, look_sizes
from adammcmc.errors import PerExampleLossRequired
from adammcmc.kernels import adam_mcmc
from adammcmc.samplers.functional import sample_density
from adammcmc.target.control import ControlVariate
from adammcmc.target.data_density import DataDensity
from adammcmc.target.leaves import Leaves
from adammcmc.target.potential import Evaluation
from adammcmc.target.randomness import Generators, Randomness
from tests.correction import solve

NUM_CHAINS = 2500
NUM_DATA = 400
SCORES = torch.special.ndtri((torch.arange(NUM_DATA, dtype=torch.float64) + 0.5) / NUM_DATA)
SCORES = SCORES / SCORES.std()


class Prescribed:
    """l_i(theta) = theta D_i with given D_i: from theta = 0 to 1 the losses change by D_i. All chains are alike."""

    fixed = is_bounded = False
    can_narrow = True
    control = None

    def __init__(self, changes: Tensor, lam: float = 1.0) -> None:
        self.changes, self.inverse_temperature, self.scale = changes, lam, lam * len(changes)
        self.num_examples = len(changes)
        self.num_asked = 0

    def evaluate(self, params: Leaves, *, with_grad: bool) -> Evaluation:
        return Evaluation(params[0] * self.changes[:2], self.log_prior(params), None)

    def compare(self, current: Evaluation, proposed: Evaluation) -> Tensor:
        return self.scale * (proposed.losses - current.losses).mean(1)

    def log_prior(self, params: Leaves) -> Tensor:
        return torch.zeros(len(params[0]), dtype=torch.float64)

    def example_losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        values = self.changes[indices]
        self.num_asked += len(params[0]) * values.shape[-1]
        return params[0] * values


def move(
    log_ratio: float, spread: float, num_chains: int = NUM_CHAINS, lam: float = 0.5, scores: Tensor = SCORES
) -> tuple[Comparison, Prescribed]:
    """A move with Y = `log_ratio`, half of it from the proposal; lambda n sd(D) = `spread`: s = spread sqrt((1 - b/n) / b)."""
    n, known = len(scores), log_ratio / 2
    potential = Prescribed((-(log_ratio - known) + spread * scores) / (lam * n), lam)
    here, there = (torch.full((num_chains, 1), at, dtype=torch.float64) for at in (0.0, 1.0))
    comparison = Comparison(
        potential,
        (here,),
        (there,),
        potential.evaluate((here,), with_grad=False),
        lambda: potential.evaluate((there,), with_grad=False),
        lambda: torch.full((num_chains,), known, dtype=torch.float64),
        torch.ones(num_chains, dtype=torch.bool),
    )
    return comparison, potential


def decide(test: Any, log_ratio: float, spread: float, seed: int = 0, **options: Any) -> Verdict:
    return test(move(log_ratio, spread, **options)[0], None, torch.Generator().manual_seed(seed))[0]


def phi(x: float) -> float:
    return float(stats.norm.cdf(x))


def plain_law(y: float, s: float) -> float:
    """E min(1, e^Yhat), Yhat ~ N(y, s^2)."""
    return phi(y / s) + math.exp(y + s**2 / 2) * phi(-s - y / s)


def penalty_law(y: float, s: float) -> float:
    """E min(1, e^(Yhat - s^2 / 2))."""
    return phi(y / s - s / 2) + math.exp(y) * phi(-y / s - s / 2)


def barker_law(y: float, s: float) -> float:
    return 1 / (1 + math.exp(-y))


def full_law(y: float, s: float) -> float:
    return min(1.0, math.exp(y))


BOUND = DerivativeBound(torch.full((NUM_DATA,), 1.0, dtype=torch.float64))  # c_i M = 1, and D_i is about 0.01


class Row(NamedTuple):
    """A test, and what it promises."""

    test: Any
    law: Callable[[float, float], float]
    """P(accept) at Y with noise s of the first look."""
    size: int
    """Examples of the first look."""
    slack: float = 0.0
    """What the promise itself allows for, beside the error of counting."""


# The contract: a new test gets a row.
CONTRACT = {
    "minibatch": Row(Minibatch(100), plain_law, 100),
    "penalty": Row(Penalty(100), penalty_law, 100),
    "barker": Row(Barker(100), barker_law, 100),
    "barker, doubling": Row(Barker(100, growth=2.0), barker_law, 100),
    "barker, little noise": Row(Barker(100, max_noise=0.5), barker_law, 100),
    "sequential": Row(Sequential(1e-4, 100), full_law, 100, slack=3 * 1e-4),
    "confidence": Row(Confidence(0.01, None, 100), full_law, 100, slack=0.01),
    "confidence, bounded": Row(Confidence(0.01, ClampedLoss(0.05), 100), full_law, 100, slack=0.01),
    "full data": Row(FullData(), full_law, NUM_DATA),
}


def check_promise(row: Row, log_ratio: float, spread: float, num_chains: int) -> None:
    s = max(spread * math.sqrt((1 - row.size / NUM_DATA) / row.size), 1e-9)
    promised = row.law(log_ratio, s)
    verdict = decide(row.test, log_ratio, spread, seed=3, num_chains=num_chains)
    error = math.sqrt(promised * (1 - promised) / num_chains)
    accepted = float(verdict.is_accepted.double().mean())
    assert abs(accepted - promised) <= 4.5 * error + row.slack
    # what is reported as a rate has the same mean as the decision
    difference = verdict.acceptance_rate - verdict.is_accepted.double()
    assert abs(float(difference.mean())) <= 4.5 * float(difference.std()) / math.sqrt(num_chains) + 1e-12


@pytest.mark.parametrize("spread", [2.0, 12.0])
@pytest.mark.parametrize("log_ratio", [-1.5, 0.0, 0.7])
@pytest.mark.parametrize("name", CONTRACT)
def test_every_test_accepts_as_it_promises(name: str, log_ratio: float, spread: float) -> None:
    check_promise(CONTRACT[name], log_ratio, spread, NUM_CHAINS)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [6.0, 20.0])
@pytest.mark.parametrize("log_ratio", [-2.0, -0.3, 0.5])
@pytest.mark.parametrize("name", CONTRACT)
def test_every_test_accepts_as_it_promises_to_a_percent(name: str, log_ratio: float, spread: float) -> None:
    check_promise(CONTRACT[name], log_ratio, spread, 20_000)


def equal_changes(y: float, chi: float) -> tuple[Tuna, Tensor, float]:
    """All D_i alike: the kept examples are a Poisson number K, and P(accept) is a sum. Returns the test, D_i, P(accept)."""
    n, lam, cm = NUM_DATA, 0.5, 0.02
    change = -y / (lam * n)
    ratio, rate = change / cm, lam * n * cm
    kept = rate * (chi * rate + (1 + ratio) / 2)
    k = torch.arange(2000, dtype=torch.float64)
    weights = torch.from_numpy(stats.poisson.pmf(k.numpy(), kept))
    log_ratio = 2 * k * math.atanh(-ratio / (1 + 2 * chi * rate)) - 0.3  # what the proposal adds
    bound = DerivativeBound(torch.full((n,), cm, dtype=torch.float64))  # |tau - theta| = 1
    return (
        Tuna(bound, chi),
        torch.full((n,), change, dtype=torch.float64),
        float((weights * log_ratio.clamp(max=0).exp()).sum()),
    )


@pytest.mark.parametrize("chi", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("log_ratio", [-2.0, -0.5, 0.0, 1.0])
def test_tuna_accepts_with_the_probability_of_its_poisson_sum(log_ratio: float, chi: float) -> None:
    test, changes, promised = equal_changes(log_ratio, chi)
    comparison, potential = move(-0.6, 1.0)
    potential.changes = changes
    verdict, _ = test(comparison, None, torch.Generator().manual_seed(1))
    accepted = float(verdict.is_accepted.double().mean())
    assert abs(accepted - promised) <= 4.5 * math.sqrt(promised * (1 - promised) / NUM_CHAINS) + 1e-12
    expected = 0.5 * NUM_DATA * 0.02
    expected += chi * expected**2
    error = math.sqrt(expected / NUM_CHAINS)
    assert abs(float(verdict.num_examples.mean()) - expected) < 4.5 * error


@pytest.mark.parametrize("name", ["tuna", "penalty"])
@pytest.mark.parametrize("spread", [2.0, 20.0])
def test_detailed_balance_on_average(name: str, spread: float) -> None:
    """a(Y) / a(-Y) = e^Y, which is all that an exact test needs."""
    bound = DerivativeBound((spread * SCORES.abs() + 1.0) / (0.5 * NUM_DATA))
    test = {"tuna": Tuna(bound, 0.5), "penalty": Penalty(100)}[name]
    for y in (0.5, 2.0):
        there, back = (decide(test, sign * y, spread, seed=7).acceptance_rate for sign in (1, -1))
        assert float(there.mean()) > 0.05
        error = sum(float(a.var() / a.mean() ** 2) / NUM_CHAINS for a in (there, back)) ** 0.5
        assert abs(math.log(float(there.mean() / back.mean())) - y) < 4.5 * error


# --- where there is no noise ------------------------------------------------------------------------------------------

LIMITS = {
    "minibatch, b = n": (Minibatch(NUM_DATA), 20.0),
    "minibatch, equal losses": (Minibatch(50), 0.0),
    "penalty, b = n": (Penalty(NUM_DATA), 20.0),
    "penalty, equal losses": (Penalty(50), 0.0),
    "sequential, eps -> 0": (Sequential(1e-300, 100), 20.0),
    "sequential, b = n": (Sequential(0.1, NUM_DATA), 20.0),
    "sequential, equal losses": (Sequential(0.1, 50), 0.0),
    "confidence, delta -> 0": (Confidence(1e-300, None, 100), 20.0),
    "confidence, equal losses": (Confidence(0.1, None, 50), 0.0),
    "confidence, b = n": (Confidence(0.1, None, NUM_DATA), 20.0),
    "tuna, more than all": (Tuna(BOUND, 100.0), 20.0),
}


@pytest.mark.parametrize("name", LIMITS)
def test_without_noise_every_decision_is_that_of_the_full_data(name: str) -> None:
    test, spread = LIMITS[name]
    for log_ratio in (-1.0, -0.1):
        verdict = decide(test, log_ratio, spread, seed=11, num_chains=1000)
        full = decide(FullData(), log_ratio, spread, seed=11, num_chains=1000)
        assert torch.equal(verdict.is_accepted, full.is_accepted)
        assert 0 < int(full.is_accepted.sum()) < 1000
        torch.testing.assert_close(verdict.log_ratio, full.log_ratio, rtol=1e-9, atol=1e-9)


def test_barker_on_all_data_is_barkers_own_test() -> None:
    for test, spread in ((Barker(NUM_DATA), 20.0), (Barker(50), 0.0)):
        comparison, _ = move(-0.7, spread, 4000)
        verdict, _ = test(comparison, None, torch.Generator().manual_seed(2))
        generator = torch.Generator().manual_seed(2)
        torch.randn(4000, dtype=torch.float64, generator=generator)
        u = torch.rand(4000, dtype=torch.float64, generator=generator)
        assert torch.equal(verdict.is_accepted, u > 1 / (1 + math.exp(-0.7)))
        torch.testing.assert_close(verdict.acceptance_rate, torch.full_like(u, 1 / (1 + math.exp(0.7))))


# --- errors of decisions ------------------------------------------------------------------------------------------------


def wrong(test: Any, log_ratio: float, spread: float) -> float:
    """The share of decisions that differ from those of the full data, with the same uniform numbers."""
    verdict, full = (decide(t, log_ratio, spread, seed=5) for t in (test, FullData()))
    return float((verdict.is_accepted != full.is_accepted).double().mean())


@pytest.mark.parametrize("spread", [10.0, 40.0])
@pytest.mark.parametrize("bound", [None, ClampedLoss(0.5)])
def test_confidence_is_wrong_less_often_than_delta(bound: Any, spread: float) -> None:
    for log_ratio in (-1.0, 0.5):
        assert wrong(Confidence(0.1, bound, 50), log_ratio, spread) < 0.1


@pytest.mark.parametrize("spread", [10.0, 40.0])
def test_sequential_is_wrong_at_most_once_a_look_and_eps(spread: float) -> None:
    """7 looks of 50 more each (then all data). One look alone is wrong with eps at worst, at Y = log u."""
    for eps in (0.01, 0.05):
        share = wrong(Sequential(eps, 50), -0.5, spread)
        assert 0 < share < 7 * eps
    assert wrong(Sequential(0.001, 50), -0.5, spread) < wrong(Sequential(0.05, 50), -0.5, spread)


def test_repeated_looks_inflate_the_error_of_the_sequential_test() -> None:
    """Looks at 200 and at all examples are wrong less often than looks at 50, 100, 150, 200, ..."""
    once, often = Sequential(0.05, 200), Sequential(0.05, 50)
    assert wrong(often, -0.5, 40.0) > 1.5 * wrong(once, -0.5, 40.0)


def test_student_quantiles() -> None:
    for eps in (0.001, 0.005, 0.01, 0.05, 0.2):
        for dof in (29, 49, 99, 1000):
            assert student_quantile(eps, dof) == pytest.approx(stats.t.isf(eps, dof), rel=2e-5)


# --- Barker's correction ------------------------------------------------------------------------------------------------


def test_the_table_is_what_least_squares_gives() -> None:
    solved = solve()
    assert [a for a, _ in solved] == pytest.approx([a for a, _ in ATOMS])
    assert [w for _, w in solved] == pytest.approx([w for _, w in ATOMS], rel=1e-3, abs=1e-9)


def test_a_normal_variable_and_the_correction_are_logistic() -> None:
    y = torch.linspace(-25, 25, 10_001, dtype=torch.float64)
    assert float((acceptance(y, torch.zeros_like(y)) - torch.sigmoid(y)).abs().max()) < 7.4e-8
    x, p = torch.tensor(ATOMS, dtype=torch.float64).unbind(1)
    assert float((p * x.square()).sum()) == pytest.approx(math.pi**2 / 3 - 1, rel=1e-4)
    u = torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = torch.randn(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert stats.kstest((correction(u) + z).numpy(), "logistic").pvalue > 1e-5


def test_barker_goes_on_while_the_sum_is_skewed() -> None:
    scores = torch.zeros(NUM_DATA, dtype=torch.float64)
    scores[:10] = 10.0  # one in a hundred
    scores = (scores - scores.mean()) / scores.std()
    loose, strict = (Barker(50, max_skewness=limit) for limit in (math.inf, 0.1))
    sizes = [float(decide(test, 0.0, 7.0, scores=scores, num_chains=500).num_examples.mean()) for test in (loose, strict)]
    assert sizes[1] > 1.5 * sizes[0]


def test_barker_is_tuned_to_what_it_can_reach() -> None:
    generator = torch.Generator().manual_seed(0)
    for rate in (0.25, 0.57, 0.85):
        root = -2 * stats.norm.ppf(rate / 2)
        y = root * torch.randn(1_000_000, dtype=torch.float64, generator=generator) - root**2 / 2
        assert float(y.clamp(max=0).exp().mean()) == pytest.approx(rate, abs=2e-3)
        assert float(torch.sigmoid(y).mean()) == pytest.approx(Barker().rate_like(rate), abs=2e-3)


# --- noise --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("test", [Minibatch(100), Penalty(100)])
def test_the_reported_noise_is_the_spread_of_the_log_ratio(test: Any) -> None:
    verdict = decide(test, 0.0, 20.0)
    spread, s = float(verdict.log_ratio.std()), float(verdict.log_ratio_noise.square().mean().sqrt())
    assert s == pytest.approx(20 * math.sqrt(0.75 / 100), rel=0.01)
    assert spread == pytest.approx(s, rel=4.5 / math.sqrt(2 * NUM_CHAINS) + 0.005)
    assert abs(float(verdict.log_ratio.mean())) < 4.5 * spread / math.sqrt(NUM_CHAINS)


def test_beta_eff() -> None:
    s = torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0, 10.0, 100.0, 500.0], dtype=torch.float64)
    w = torch.tensor([math.exp(x**2 / 2 + float(stats.norm.logsf(x))) for x in s.tolist()], dtype=torch.float64)
    torch.testing.assert_close(beta_eff(s), 2 * w / (0.5 + w), rtol=1e-9, atol=0)


def test_the_recipe_for_a_new_test_keeps_its_promise() -> None:
    """What docs/acceptance.md shows runs as it stands, in under 60 lines."""
    text = (Path(__file__).parent.parent / "docs" / "acceptance.md").read_text()
    code = next(block for part in text.split("```python\n")[1:] if "class Quiet" in (block := part.split("```")[0]))
    assert len(code.splitlines()) < 60
    names: dict[str, Any] = {"__name__": __name__}
    exec(code, names)
    test: Any = names["Quiet"]
    for log_ratio in (-1.0, 0.5):
        check_promise(Row(test(0.1), full_law, 100, slack=0.02), log_ratio, 2.0, NUM_CHAINS)
    assert 100 < float(decide(test(0.1), 0.0, 2.0, num_chains=10).num_examples.mean()) < NUM_DATA


# --- company, memory, errors --------------------------------------------------------------------------------------------

EVERY = {
    "minibatch": Minibatch(50),
    "penalty": Penalty(50),
    "barker": Barker(30),
    "sequential": Sequential(0.05, 30),
    "confidence": Confidence(0.5, None, 30),
    "tuna": Tuna(DerivativeBound(torch.full((NUM_DATA,), 0.3, dtype=torch.float64)), 0.01),
}
SPREAD = dict.fromkeys(EVERY, 15.0) | {"confidence": 0.3}


@pytest.mark.parametrize("name", EVERY)
def test_a_decision_does_not_depend_on_the_company(name: str) -> None:
    def streams(*seeds: int) -> Randomness:
        return Generators([torch.Generator().manual_seed(seed) for seed in seeds])

    test, together, company = EVERY[name], streams(*range(8)), move(-0.3, SPREAD[name], 8)[0]
    alone, by_itself = streams(5), move(-0.3, SPREAD[name], 1)[0]
    sizes = set()
    for _ in range(20):
        many, one = test(company, None, together)[0], test(by_itself, None, alone)[0]
        sizes |= set(many.num_examples.tolist())
        for a, b in zip(many, one, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a[5:6].double(), b.double(), rtol=1e-12, equal_nan=True)
    assert len(sizes) > 1 or name in ("minibatch", "penalty")


@pytest.mark.parametrize("name", EVERY)
def test_chains_see_examples_of_their_own(name: str) -> None:
    assert len(set(decide(EVERY[name], -0.3, SPREAD[name], num_chains=50, seed=1).log_ratio.tolist())) > 20


@pytest.mark.parametrize("name", EVERY)
def test_examples_that_are_counted_were_asked_for(name: str) -> None:
    comparison, potential = move(-0.3, SPREAD[name], 300)
    verdict, _ = EVERY[name](comparison, None, torch.Generator().manual_seed(0))
    # at theta and at tau; Poisson batches are filled up to the longest
    asked = potential.num_asked / 2
    assert asked == float(verdict.num_examples.sum()) or (name == "tuna" and asked >= float(verdict.num_examples.sum()))


@pytest.mark.parametrize("name", EVERY)
def test_a_loss_that_is_not_finite_is_no_place_to_go_and_freezes_at_home(name: str) -> None:
    comparison, potential = move(5.0, 1.0, 200)
    potential.changes = potential.changes.clone().fill_(math.nan)
    verdict, _ = EVERY[name](comparison, None, torch.Generator().manual_seed(0))
    assert not bool(verdict.is_accepted.any())
    assert float(verdict.acceptance_rate.sum()) == 0
    # 0 * NaN is NaN: at the current point as well
    looked = verdict.num_examples > 0
    assert bool(looked.any())
    assert not bool(verdict.is_current_finite[looked].any())


@pytest.mark.parametrize("name", EVERY)
def test_without_examples_it_says_what_is_missing(name: str) -> None:
    comparison, potential = move(0.0, 1.0, 2)
    potential.num_examples = None  # type: ignore[assignment]
    with pytest.raises(PerExampleLossRequired, match="TensorExamples"):
        EVERY[name](comparison, None, torch.Generator())


@pytest.mark.parametrize("name", [name for name in EVERY if name != "tuna"])
def test_a_batch_larger_than_the_data_is_refused(name: str) -> None:
    comparison, _ = move(0.0, 1.0, 2, scores=SCORES[:20])
    with pytest.raises(ValueError, match="must not exceed the number of examples, 20, got"):
        EVERY[name](comparison, None, torch.Generator())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Minibatch(1), "`batch_size` must be a whole number, at least 2, got 1"),
        (lambda: Minibatch(2.5), "`batch_size` must be a whole number"),
        (lambda: Penalty(0), "`batch_size` must be a whole number"),
        (lambda: Barker(10), "at least 30, got 10"),
        (lambda: Barker(max_noise=1.2), r"`max_noise` must lie in \(0, 1\], got 1.2"),
        (lambda: Barker(max_skewness=0.0), "`max_skewness` must be positive"),
        (lambda: Barker(growth=0.5), "`growth` must be at least 1, got 0.5"),
        (lambda: Sequential(0.0), "`eps` must lie between 0 and 0.5, got 0.0"),
        (lambda: Sequential(0.6), "`eps` must lie between 0 and 0.5"),
        (lambda: Confidence(1.0), "`delta` must lie between 0 and 1"),
        (lambda: Tuna(BOUND, -1.0), "`chi` must not be negative"),
        (lambda: ClampedLoss(0.0), "`maximum` must be positive"),
        (lambda: DerivativeBound(torch.tensor([1.0, -1.0])), "must be positive and finite"),
        (lambda: DerivativeBound(torch.zeros(3)), "must be positive and finite"),
        (lambda: DerivativeBound(torch.tensor([1.0, math.inf])), "must be positive and finite"),
        (lambda: DerivativeBound(torch.ones(3), order=3), "`order` must be that of the control variate, 1 or 2, or 0"),
        (lambda: logistic_bound(torch.ones(3, 2), order=-1), "`order` must be that of the control variate, 1 or 2, or 0"),
    ],
)
def test_bad_settings_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_tuna_wants_a_bound() -> None:
    with pytest.raises(TypeError, match="`bound` must be one of acceptance"):
        Tuna(1.0)  # type: ignore[arg-type]
    comparison, _ = move(0.0, 1.0, 2)
    with pytest.raises(ValueError, match="3 constants for 400 examples"):
        Tuna(DerivativeBound(torch.ones(3)))(comparison, None, torch.Generator())


def test_a_broken_bound_is_noticed_and_the_full_data_decide() -> None:
    """c_i M = 0.04, and some D_i are larger: chains that meet one look at all data, and say so."""
    tight = Tuna(DerivativeBound(torch.full((NUM_DATA,), 0.04, dtype=torch.float64)), 0.0)
    comparison, _ = move(-0.5, 4.0, 4000)  # sd(D) = 0.02
    with pytest.warns(UserWarning, match="more than the bound of Tuna allows"):
        verdict, violations = tight(comparison, None, torch.Generator().manual_seed(3))
    broke = violations > 0
    assert 0 < int(broke.sum()) < 4000
    assert torch.equal(broke, verdict.num_examples >= NUM_DATA)
    torch.testing.assert_close(verdict.log_ratio[broke], torch.full_like(verdict.log_ratio[broke], -0.5))
    _, again = tight(comparison, violations, torch.Generator().manual_seed(4))  # warned once
    assert int(again.sum()) > int(violations.sum())


def test_a_bound_that_is_met_is_no_loss_that_is_not_finite() -> None:
    """With chi = 0 the way back of a kept example with D_i = c_i M is impossible: Y = -inf, of losses that are finite."""
    comparison, potential = move(0.0, 1.0, 300)
    potential.changes = torch.full((NUM_DATA,), 0.02, dtype=torch.float64)
    test = Tuna(DerivativeBound(potential.changes), 0.0)
    verdict, violations = test(comparison, None, torch.Generator().manual_seed(0))
    assert bool((verdict.log_ratio == -math.inf).any())
    assert bool(verdict.is_finite.all())
    assert not bool(verdict.is_accepted[verdict.log_ratio == -math.inf].any())
    assert int(violations.sum()) == 0
    potential.changes = torch.full((NUM_DATA,), math.inf, dtype=torch.float64)
    verdict, _ = test(comparison, None, torch.Generator().manual_seed(0))
    assert not bool(verdict.is_finite[verdict.num_examples > 0].any())


class Coarse(Prescribed):
    """Losses near 10,000 in float32, which go by steps of 2^-10."""

    def example_losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        return (1e4 + super().example_losses(params, indices)).float()


def test_rounding_beyond_the_bound_keeps_detailed_balance() -> None:
    """D_i is +- 2^-10 by rounding, and the bound 2^-12: what is taken for D_i must be the same there and back."""
    lam, largest = 40.0, 2.0**-12
    changes = torch.where(torch.arange(NUM_DATA) < 150, 2.0**-10, -(2.0**-10)).double()
    test = Tuna(DerivativeBound(torch.full((NUM_DATA,), largest, dtype=torch.float64)), 0.3)
    comparison, _ = move(0.0, 0.0, 20_000, lam)
    rates = []
    for way in (changes, -changes):
        verdict, violations = test(replace(comparison, potential=Coarse(way, lam)), None, torch.Generator().manual_seed(5))
        assert int(violations.sum()) == 0
        rates.append(verdict.acceptance_rate)
    error = sum(float(a.var() / a.mean() ** 2) / len(a) for a in rates) ** 0.5
    assert abs(math.log(float(rates[0].mean() / rates[1].mean())) - lam * largest * (250 - 150)) < 4.5 * error
    assert error < 0.02


def test_no_step_asks_for_the_constants_of_all_examples_again() -> None:
    asked = []

    class Counting(ClampedLoss):
        def weights(self, num_examples: int, device: torch.device) -> Tensor:
            asked.append(num_examples)
            return super().weights(num_examples, device)

    comparison, _ = move(0.0, 1.0, 3)
    for test in (Tuna(Counting(0.1)), Confidence(0.5, Counting(0.1), 30)):
        first = [test(comparison, None, torch.Generator().manual_seed(k))[0].log_ratio for k in range(5)]
        assert asked == [NUM_DATA]
        asked.clear()
        fresh = replace(test)
        assert all(
            torch.equal(fresh(comparison, None, torch.Generator().manual_seed(k))[0].log_ratio, y) for k, y in enumerate(first)
        )
        copy.deepcopy(test)(comparison, None, torch.Generator())
        assert asked == [NUM_DATA] * 2  # each copy for itself
        asked.clear()


@pytest.mark.parametrize("test", [Barker(), Sequential(), Confidence()], ids=str)
def test_the_number_of_looks_grows_as_the_logarithm_of_the_data(test: Any) -> None:
    small, large = (len(list(look_sizes(test.batch_size, test.growth, n))) for n in (10_000, 10_000_000))
    assert large - small <= math.ceil(math.log(1000) / math.log(1.5)) + 1


def test_an_estimate_outside_of_the_support_looks_at_nothing() -> None:
    comparison, potential = move(0.0, 5.0, 4)
    potential.log_prior = lambda params: torch.full((4,), -math.inf, dtype=torch.float64)  # type: ignore[method-assign]
    found = estimate(comparison, torch.Generator(), 50)
    assert potential.num_asked == 0
    assert bool((found.log_ratio == -math.inf).all())


SPARSE = torch.zeros(20_000, dtype=torch.float64)
SPARSE[::100] = 100.0  # one in a hundred carries all of it
SPARSE -= SPARSE.mean()


@pytest.mark.parametrize("kind", ["normal", "sparse"])
def test_confidence_stops_early_and_is_wrong_less_often_than_delta(kind: str) -> None:
    """Where it does stop: log u near Y, many examples, a bound that is true and tight."""
    scores = SPARSE if kind == "sparse" else torch.randn(20_000, generator=torch.Generator().manual_seed(0)).double()
    scores = scores / scores.std()
    spread, delta = 4.0, 0.2
    lam, n = 0.5, len(scores)
    largest = float((spread * scores - 0.1).abs().max()) / (lam * n)
    test = Confidence(delta, DerivativeBound(torch.full((n,), largest, dtype=torch.float64)), 200)
    comparison, _ = move(0.2, spread, 400, lam, scores)
    generator = torch.Generator().manual_seed(1)
    near = torch.empty(400, dtype=torch.float64).uniform_(-2.5, 2.0, generator=generator)
    verdict, _ = test(replace(comparison, log_uniform=near), None, generator)
    early = verdict.num_examples < n
    assert float(early.double().mean()) > 0.2, verdict.num_examples.mean()
    right = near < 0.2
    assert float((verdict.is_accepted != right)[early].double().mean()) <= delta


def half_width(test: Confidence, comparison: Comparison, seed: int = 1) -> Tensor:
    """Examples that each of these decisions takes: what changes with every term of the bound."""
    verdict, _ = test(comparison, None, torch.Generator().manual_seed(seed))
    return verdict.num_examples


def test_confidence_looks_as_far_as_its_formula_says() -> None:
    scores = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).double()
    spread, lam, n, delta = 4.0, 0.5, 20_000, 0.2
    largest = float((spread * scores - 0.1).abs().max()) / (lam * n)
    comparison, _ = move(0.2, spread, 300, lam, scores)
    near = torch.linspace(-2.5, 2.0, 300, dtype=torch.float64)
    comparison = replace(comparison, log_uniform=near)
    test = Confidence(delta, DerivativeBound(torch.full((n,), largest, dtype=torch.float64)), 200)
    looked = half_width(test, comparison)
    for size, look in ((200, 1), (400, 2), (800, 3), (1600, 4), (3200, 5), (6400, 6), (12800, 7)):
        level = math.log(5 * 2 * look**2 / delta)
        rho = 1 - (size - 1) / n if size <= n / 2 else (1 - size / n) * (1 + 1 / size)
        span = 2 * n * lam * largest
        width = spread * math.sqrt(2 * rho * level / size) + (7 / 3 + 3 / math.sqrt(2)) * span * level / size
        gap = (near - 0.2).abs()
        noise = spread / math.sqrt(size)
        assert bool((looked[gap > width + 5 * noise] <= size).all()), size  # surely enough
        assert bool((looked[gap < width - 5 * noise] > size).all()), size  # surely not


def test_examples_that_all_say_the_same_do_not_end_a_decision() -> None:
    scores = torch.zeros(2_000, dtype=torch.float64)
    scores[::200] = 1.0  # ten examples carry Y; a first look at 50 sees none of them in 77 of 100 cases
    scores = scores - scores.mean()
    for test in (Barker(50), Sequential(0.01, 50), Confidence(0.05, None, 50)):
        comparison, _ = move(-20.0, 4000.0, 200, 0.5, scores)
        verdict, _ = test(comparison, None, torch.Generator().manual_seed(0))
        assert not bool(((verdict.log_ratio_noise == 0) & (verdict.num_examples < 2_000)).any()), test


def test_a_bound_that_is_met_is_not_broken_by_rounding() -> None:
    """|x| has slope 1 everywhere: the bound holds with equality, and float32 has its own idea of equal."""
    x = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 30
    density = DataDensity(lambda theta, x: (theta - x).abs().sum(-1), x[:, None], batch_size=20)
    test = Tuna(DerivativeBound(torch.ones(500)), 0.1)
    kernel = adam_mcmc(0.0, sigma=0.01, acceptance=test)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, info = sample_density(density, torch.zeros(20, 1), kernel, num_steps=50, seed=0, progress=False)
    assert bool((info.num_examples < 500).all())


def test_a_bound_and_a_control_variate_must_belong_together() -> None:
    x = torch.randn(50, 2)
    y = 2.0 * (x[:, 0] > 0) - 1
    reference = torch.zeros(2)

    def loss(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.softplus(-y * (x @ theta))

    cases = [
        (logistic_bound(x), ControlVariate(reference, 2)),
        (logistic_bound(x, 2), None),
        (logistic_bound(x, 1), ControlVariate(reference, 2)),
    ]
    for bound, control in cases:
        density = DataDensity(loss, x, y, control_variate=control, batch_size=20)
        for test in (Tuna(bound), Confidence(0.1, bound, 30)):
            kernel = adam_mcmc(0.0, sigma=0.1, acceptance=test)
            with pytest.raises(ValueError, match="the bound is for a control variate of order"):
                sample_density(density, torch.zeros(2, 2), kernel, num_steps=1, seed=0, progress=False)
