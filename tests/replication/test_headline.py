"""The decisive test: what is exact has a spread that follows lambda and not sigma; what the paper does has not."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from replication import headline
from replication.sets import read_sets
from replication.settings import PRESETS
from replication.work import Work

EXACT = [name for name in headline.SAMPLERS if name.startswith("exact")]
Result = dict[str, Any]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    work = Work(PRESETS["smoke"], tmp_path_factory.mktemp("headline"), progress=False)
    text = json.dumps(headline.run(PRESETS["smoke"], work), allow_nan=False)
    assert len(text) < 300_000
    found: Result = json.loads(text)
    assert headline.run(PRESETS["smoke"], work) == found  # it is kept
    return found


def ratios(result: Result, name: str, rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Spread over the truth's at the same lambda, and its error."""
    truth = {row["lam"]: row["mean_spread"] for row in result["truth"]}
    value = torch.tensor([row["mean_spread"][0] / truth[row["lam"]][0] for row in rows])
    error = torch.tensor([math.hypot(row["mean_spread"][1], truth[row["lam"]][1]) / truth[row["lam"]][0] for row in rows])
    return value, error


def over_widths(result: Result, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return ratios(result, name, headline.by_width(result["rows"][name]))


def over_lams(result: Result, name: str) -> list[dict[str, Any]]:
    return headline.by_lam(result["rows"][name], result["width_of_lams"]["exact" if name in EXACT else "paper"])


@pytest.mark.parametrize("name", EXACT)
def test_exact_samplers_have_the_spread_of_the_target_at_every_width_and_lambda(result: Result, name: str) -> None:
    value, error = ratios(result, name, result["rows"][name])
    assert len(value) == 9
    assert bool(((value - 1).abs() < 4 * error + 0.01).all()), (value, error)
    weights = error.clamp_min(0.01) ** -2  # all nine together
    assert abs(float((weights * value).sum() / weights.sum()) - 1) < 0.03


@pytest.mark.parametrize("name", EXACT)
def test_exact_samplers_do_not_follow_the_width(result: Result, name: str) -> None:
    value, error = over_widths(result, name)
    assert abs(float(value[-1] - value[0])) < 4 * math.hypot(float(error[-1]), float(error[0]))
    assert float(value.max() / value.min()) < 1.15


@pytest.mark.parametrize("name", EXACT)
def test_exact_samplers_follow_lambda(result: Result, name: str) -> None:
    spreads = [row["mean_spread"][0] for row in over_lams(result, name)]
    assert all(later < 0.5 * earlier for earlier, later in itertools.pairwise(spreads))
    assert spreads[0] / spreads[-1] > 100


@pytest.mark.parametrize("name", ["printed, data sum", "released, data sum"])
def test_without_its_correction_the_spread_follows_the_width(result: Result, name: str) -> None:
    value, error = over_widths(result, name)
    assert float(value[2] - value[0]) > 6 * math.hypot(float(error[2]), float(error[0]))
    assert float(value[0]) < 0.8  # too narrow: momentum that knows where the chain is
    assert headline.finding(result, name)["is_right"] is False


def test_the_released_script_has_it_the_other_way_round(result: Result) -> None:
    value, _ = over_widths(result, "released")
    assert float(value[-1] / value[0]) > 2.5
    assert bool((value.diff() > 0).all())
    spreads = [row["mean_spread"][0] for row in over_lams(result, "released")]
    assert spreads[0] / spreads[-1] < 3  # where the target's falls by more than 100


def test_the_chains_that_should_converge_do_and_the_page_says_which_do_not(result: Result) -> None:
    assert all(row["is_converged"] for row in result["rows"]["exact, underdamped"])
    text = headline.section(result)
    assert "exact: underdamped" in text.split("whatever the width, and follows lambda: ")[1].split("\n")[0]
    assert text.count("(n)") > 1
    stuck = [row for row in result["rows"]["released, data sum"] if row["acceptance"][0] < 1e-3]
    assert stuck  # nothing moves at the largest lambda: not to be taken for agreement
    assert not any(row["is_converged"] for row in stuck)


@pytest.mark.parametrize("apart", [0.0, 0.3])
def test_correlated_chains_that_agree_have_converged_and_others_have_not(apart: float) -> None:
    """Autoregressive chains at rest, whose R-hat is above 1.01 only because their means scatter; then every other one
    moved."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(16, 1000, 25, generator=generator, dtype=torch.float64)
    x = noise.clone()
    for t in range(1, x.shape[1]):
        x[:, t] = 0.9 * x[:, t - 1] + math.sqrt(1 - 0.81) * noise[:, t]
    x[::2] += apart
    judged = headline._judged(torch.sigmoid(x))
    assert judged["rhat"] > 1.01
    assert judged["ess"] > 100
    assert judged["is_converged"] is (apart == 0.0)


def test_the_figure_is_made_of_the_result_alone(result: Result, tmp_path: Path) -> None:
    figure = headline.draw(result)
    assert len(figure.axes) == 2
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_draws_of_the_last_layer_are_those_of_its_posterior() -> None:
    sets = read_sets(replace(PRESETS["smoke"], num_train=150))
    layer = headline.LastLayer(sets.train, sets.test)
    mode, covariance = layer.laplace(1.0)
    at = mode.clone().requires_grad_()
    (slope,) = torch.autograd.grad(layer.log_density(1.0, at[None]).sum(), at)
    assert float(slope.abs().max()) < 1e-8
    curvature = torch.autograd.functional.hessian(lambda w: layer.log_density(1.0, w[None]).sum(), mode)
    assert torch.allclose(-curvature @ covariance, torch.eye(len(mode)).double(), atol=1e-8)
    # E[w . grad U] is the number of weights, under the posterior and under nothing wider or narrower
    draws, effective = layer.draw(1.0, 40_000, 20_000, seed=0)
    leaf = draws.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(-layer.log_density(1.0, leaf).sum(), leaf)
    values = (draws * slopes).sum(1)
    assert effective > 5_000
    assert abs(float(values.mean()) - len(mode)) < 5 * float(values.std()) / math.sqrt(effective)
