"""Theorems 1 and 2: the measure is right, the bound is a bound, and the smallest preset shows what the figure
claims."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from replication import convergence, theorems
from replication.convergence import NUM_BINS, Bound, Settings, bounds, distance, floor, inner_edges, log_density
from replication.settings import PRESETS
from replication.work import Work

SMOKE = PRESETS["smoke"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return Work(SMOKE, tmp_path_factory.mktemp("theorems"), progress=False)


@pytest.fixture(scope="module")
def result(work: Work) -> dict[str, Any]:
    return theorems.run(SMOKE, work)


def last(result: dict[str, Any], chain: str, beta: float) -> float:
    """TV at the last k above the floor, in standard deviations of the floor."""
    (curve,) = [c for c in result["curves"] if c["chain"] == chain and c["beta"] == beta]
    return float((curve["tv"][-1] - result["floor"]) / result["floor_error"])


# --- the measure ----------------------------------------------------------------------------------------------------


def test_bins_have_equal_probability() -> None:
    """By integrating the density on a fine grid, which knows nothing of its cumulative function."""
    x = torch.linspace(-1.5, 2, 700_001, dtype=torch.float64)
    middle = (x[1:] + x[:-1]) / 2
    p = log_density(middle[:, None]).exp()
    counts = torch.zeros(NUM_BINS, dtype=torch.float64)
    counts.index_add_(0, torch.bucketize(middle, torch.tensor(inner_edges(), dtype=torch.float64)), p / p.sum())
    torch.testing.assert_close(counts, torch.full_like(counts, 1 / NUM_BINS), rtol=1e-4, atol=0)
    assert float(p.sum() * (x[1] - x[0])) == pytest.approx(convergence._Z, rel=1e-8)


def test_exact_draws_are_at_the_floor() -> None:
    """Draws by the inverse of the cumulative function, tabulated: mean and spread of their TV are those of `floor`."""
    generator = torch.Generator().manual_seed(1)
    x = torch.linspace(-1.5, 2, 200_001, dtype=torch.float64)
    cumulative = log_density(x[:, None]).exp().cumsum(0)
    cumulative /= cumulative[-1].clone()
    num_chains, repeats = 1_000, 1_000
    uniform = torch.rand(repeats, num_chains, dtype=torch.float64, generator=generator)
    draws = x[torch.searchsorted(cumulative, uniform)]
    found = torch.tensor([distance(row[:, None])[0] for row in draws])
    level, spread = floor(num_chains)
    assert abs(float(found.mean()) - level) < 4.5 * spread / math.sqrt(repeats)
    assert float(found.std()) == pytest.approx(spread, rel=4.5 / math.sqrt(2 * repeats))


def test_the_error_of_a_distance_is_its_spread() -> None:
    """Far above the floor: chains uniform on [0.5, 1.5], many times."""
    generator = torch.Generator().manual_seed(2)
    rows = [distance(0.5 + torch.rand(1_000, 1, dtype=torch.float64, generator=generator)) for _ in range(1_000)]
    values, errors = torch.tensor(rows).T
    assert float(values.std()) == pytest.approx(float(errors.mean()), rel=0.15)


# --- Theorem 2 ------------------------------------------------------------------------------------------------------


def test_doeblin_constant_of_a_random_walk() -> None:
    """lr = 0 and momenta so wide that they say nothing: a = inf N(y - x, sigma^2) min(1 / p(x), 1 / p(y))."""
    x = torch.linspace(-1.5, 2, 15, dtype=torch.float64)
    p = log_density(x[:, None]).exp() / convergence._Z
    step = torch.exp(-0.5 * ((x[:, None] - x) / 1.5) ** 2) / (math.sqrt(2 * math.pi) * 1.5)
    by_hand = float((step / torch.maximum(p[:, None], p)).min())
    found = bounds(Settings(lr=0.0, sigma=1.5, sigma_along=0.0, momentum_spread=(1e3, 1e4)), [0.0])[0]
    assert found.doeblin == pytest.approx(by_hand, rel=0.01)
    assert found.remainder == 0


@pytest.mark.parametrize("beta", [1e-3, 1e-2])
def test_little_memory_is_proportional_to_beta(beta: float) -> None:
    """To first order K = beta E|z1 z1' + z2 z2'| = beta: that sum has Laplace's law."""
    assert convergence._memory(beta) == pytest.approx(beta, rel=0.02)


def test_memory_is_at_most_complete() -> None:
    values = [convergence._memory(beta) for beta in (0.0, 0.5, 0.9, 0.99, 0.9999)]
    assert values[0] == 0
    assert values == sorted(values)
    assert 1.99 < values[-1] <= 2


def test_the_bound_is_the_recursion_of_the_proof() -> None:
    """Step 5: |F_(k+1)| <= (1 - a) |F_k| + c |F_0|, and TV <= |F| / 2."""
    bound = Bound(start=7.0, doeblin=0.2, remainder=0.01)
    size = 7.0
    for k in range(60):
        assert bound.at(k) == pytest.approx(size / 2, rel=1e-12)
        size = 0.8 * size + 0.01 * 7
    assert bound.at(10_000) == pytest.approx(bound.limit)
    assert Bound(7.0, 0.0, 0.01).at(100) == pytest.approx(3.5 + 3.5)
    assert Bound(7.0, 0.0, 0.01).limit is None


# --- the smallest preset --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", theorems.BETAS)
def test_the_exact_chain_arrives(result: dict[str, Any], beta: float) -> None:
    assert abs(last(result, "exact", beta)) < 4.5
    (curve,) = [c for c in result["curves"] if c["chain"] == "exact" and c["beta"] == beta]
    assert curve["tv"][0] > 0.5


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.99])
def test_algorithm_1_stops_on_the_way(result: dict[str, Any], beta: float) -> None:
    assert last(result, "C = 1", beta) > 4.5


def test_the_bound_is_above_the_chain_and_says_nothing_at_the_papers_beta(result: dict[str, Any]) -> None:
    curve, theory = result["wide_curve"], result["bounds"]
    assert curve["k"] == theory["k"]
    for tv, error, bound in zip(curve["tv"], curve["error"], theory["at_beta_0"], strict=True):
        assert tv - result["floor"] < bound + 4.5 * error
    assert theory["at_beta_0"][-1] < 0.01
    limits = {row["beta"]: row["limit"] for row in theory["limits"]}
    assert limits[0.001] < 1 < limits[0.5] < limits[0.99]


@pytest.mark.parametrize("dim", [20, 100])
def test_the_energy_is_the_documented_one(result: dict[str, Any], dim: int) -> None:
    """At beta = 0.99 the table is that of docs/bias.md, from runs many times as long."""
    page = (Path(__file__).parent.parent.parent / "docs" / "bias.md").read_text()
    match = re.search(rf"^\| {dim} \|[^|]+\|[^|]+\| ([\d.]+) \+- ([\d.]+)", page, re.MULTILINE)
    assert match
    (row,) = [row for row in result["bias"] if row["dimensions"] == dim and row["beta"] == 0.99]
    assert abs(row["ratio"] - float(match[1])) < 4.5 * math.hypot(row["error"], float(match[2])) + 0.0005  # printed digits


def test_less_memory_is_more_bias(result: dict[str, Any]) -> None:
    """In many dimensions: a momentum that is the gradient itself knows theta best."""
    ratios = [row["ratio"] for row in result["bias"] if row["dimensions"] == 100]
    assert max(ratios[:2]) < 0.1 < ratios[-1] < 0.5


def test_what_is_finished_is_kept(result: dict[str, Any], work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_curve", "_energy", "_bounds"):
        monkeypatch.setattr(theorems, name, lambda *args: pytest.fail("it was made again"))
    assert theorems.run(SMOKE, work) == result


def test_the_result_is_json_and_draws(result: dict[str, Any]) -> None:
    text = json.dumps(result, allow_nan=False)
    assert len(text) < 300_000
    again = json.loads(text)
    assert again == result
    figure = theorems.draw(again)
    assert [len(axes.lines) > 3 for axes in figure.axes] == [True] * 3
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert len(file.getvalue()) > 20_000
    words = theorems.section(again)
    assert words == theorems.section(result)
    assert "nan" not in words
    assert "| Theorem 1: with C the target is invariant | TV after 600 steps" in words
    widths = {line.count("|") for line in words.splitlines() if line.startswith("|")}
    assert widths == {5, 9}


def test_the_section_says_no_when_the_chain_does_not_arrive(result: dict[str, Any]) -> None:
    """Its verdicts are read off the numbers."""
    stuck = json.loads(json.dumps(result))
    for curve in stuck["curves"]:
        curve["tv"][-1] = 0.5 if curve["chain"] == "exact" else stuck["floor"]
    words = theorems.section(stuck)
    assert "| NO |" in words
    assert "at β = none" in words
