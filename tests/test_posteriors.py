"""The certified targets: the same density in torch and JAX, finite starts, right references, and our sampler against them."""

from __future__ import annotations

import importlib.util
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate

from benchmarks.posteriors import compare, reference
from benchmarks.posteriors.arrays import recurrence, torch_arrays
from benchmarks.posteriors.table import TARGETS, target

ROOT = Path(__file__).parent.parent
QUICK = {"change_point": 1000, "simplex": 600, "negative_binomial": 1200}
"""Targets of the fast check, and our steps."""
GRADIENTS = ("two_rates", "simplex")
"""Targets whose gradients are compared in the fast tests: each takes JAX a second to compile."""
FUNNELS = ("eight_schools_centred",)
"""Targets that no fixed step gets right: our own verdict must not be sound."""

needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None or importlib.util.find_spec("blackjax") is None, reason="needs the extra `rivals`"
)


@pytest.mark.parametrize("name", TARGETS)
def test_starts_are_finite_and_chains_independent(name: str) -> None:
    t = target(name)
    log_density = t.log_density()
    x = torch.tensor(t.starts(), requires_grad=True)
    value = log_density(x)
    assert value.shape == (64,)
    assert value.isfinite().all()
    assert torch.autograd.grad(value.sum(), x)[0].isfinite().all()
    torch.testing.assert_close(log_density(x.detach()[5:8]), value.detach()[5:8], rtol=1e-9, atol=1e-9)
    assert t.name == name
    assert len(set(t.names)) == t.dim == x.shape[1]


def _in_both(name: str, transform: Callable[[Any], Any]) -> tuple[torch.Tensor, Any]:
    """Values near the posterior, where all digits count, in torch; and what JAX gives for a transform of the density."""
    import jax

    t = target(name)
    points = t.starts(3, seed=7) * 0.25
    x = torch.tensor(points, requires_grad=True)
    value = t.log_density()(x)
    np.testing.assert_array_less(-np.inf, value.detach().numpy())
    return torch.stack([value, *torch.autograd.grad(value.sum(), x)[0].T], 1).detach(), jax.vmap(
        transform(t.jax_log_density())
    )(points)


@needs_jax
@pytest.mark.parametrize("name", TARGETS)
def test_torch_and_jax_agree(name: str) -> None:
    found, values = _in_both(name, lambda log_density: log_density)
    np.testing.assert_allclose(found[:, 0], np.asarray(values), rtol=1e-9)


@needs_jax
@pytest.mark.parametrize("name", [n if n in GRADIENTS else pytest.param(n, marks=pytest.mark.slow) for n in TARGETS])
def test_torch_and_jax_agree_on_the_gradient(name: str) -> None:
    import jax

    found, gradients = _in_both(name, jax.grad)
    scale = float(found[:, 1:].abs().max())
    np.testing.assert_allclose(found[:, 1:], np.asarray(gradients), rtol=1e-6, atol=1e-7 * scale)


def test_the_recurrence_is_that_of_a_loop() -> None:
    inputs = torch.randn(3, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    factor = torch.tensor([[0.9], [-0.5], [1.0]], dtype=torch.float64)
    looped, state = [], torch.zeros(3, 1, dtype=torch.float64)
    for t in range(37):
        state = factor * state + inputs[:, t : t + 1]
        looped.append(state)
    torch.testing.assert_close(recurrence(torch_arrays(), inputs, factor), torch.cat(looped, 1))


def test_every_target_has_a_reference() -> None:
    references = reference.load()
    assert list(references) == list(TARGETS)
    for name, (estimates, facts) in references.items():
        assert len(estimates.mean) == target(name).dim
        assert all(np.isfinite(field).all() for field in estimates)
        assert facts["rhat"] < 1.005, name
        assert facts["effective_draws"] > 5_000, name


@pytest.mark.parametrize("name", [name for name in TARGETS if target(name).exact])
def test_references_have_the_moments_of_calculus(name: str) -> None:
    exact = target(name).exact
    assert exact is not None
    estimates = reference.load()[name].estimates
    mean, sd = exact()
    z = np.concatenate([(estimates.mean - mean) / estimates.mean_error, (estimates.sd - sd) / estimates.sd_error])
    assert np.abs(z).max() < 4.5


def test_a_reference_has_the_moments_of_quadrature() -> None:
    """The change point has two coordinates: a grid gives its moments."""
    axis = torch.linspace(-1.0, 2.0, 401, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    level = target("change_point").log_density()(grid)
    weights = (level - level.max()).exp().reshape(401, 401).numpy()
    points = axis.numpy()

    def integral(f: np.ndarray) -> float:
        return float(integrate.trapezoid(integrate.trapezoid(f * weights, points, axis=1), points))

    total = integral(np.ones((401, 401)))
    early, late = np.meshgrid(points, points, indexing="ij")
    estimates = reference.load()["change_point"].estimates
    for i, x in enumerate((early, late)):
        assert abs(integral(x) / total - estimates.mean[i]) < 4.5 * estimates.mean_error[i]
        assert abs(integral(x * x) / total - estimates.square[i]) < 4.5 * estimates.square_error[i]


def test_a_wrong_spread_is_noticed() -> None:
    """z of draws whose standard deviation is 10% off exceeds the limit; that of exact draws does not."""
    exact = target("gaussian_rotated").exact
    assert exact is not None
    mean, sd = exact()
    truth = reference.load()["gaussian_rotated"]
    draws = mean + sd * np.random.default_rng(0).normal(size=(8, 500, 50))
    row = {"gradients": 1.0, "adaptation": 0.0}
    for factor, verdict in ((1.0, "agrees"), (1.1, "differs")):
        run = compare.Run(mean + factor * (draws - mean), row["gradients"], row["adaptation"], 0)
        assert compare.judged(run, truth)["verdict"] == verdict


def _judged(name: str, steps: int) -> dict[str, Any]:
    t = target(name)
    torch.set_num_threads(1)
    found = compare.ours(t.log_density(), torch.tensor(t.starts()), 11, steps)
    run = compare.Run(found.draws.numpy(), found.gradients, found.adaptation, 0, found.grade, found.frozen)
    return compare.judged(run, reference.load()[name])


@pytest.mark.parametrize(("name", "steps"), QUICK.items())
def test_our_defaults_agree_with_the_reference(name: str, steps: int) -> None:
    row = _judged(name, steps)
    assert row["z"] < compare.Z_LIMIT, row
    assert row["rhat"] < 1.05, row


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_our_defaults_on_every_target(name: str) -> None:
    """Converged and within 4.5 standard errors, or our own verdict says that it is not; no chain is frozen unnamed."""
    row = _judged(name, 6000)
    assert row["frozen_unnamed"] == 0
    if name in FUNNELS:
        assert row["grade"] != "sound", row
    else:
        assert row["verdict"] == "agrees" or (row["verdict"] == compare.NOT_CONVERGED and row["grade"] != "sound"), row


def test_the_page_is_that_of_the_results() -> None:
    """If this fails: python -m docs.certified"""
    made = runpy.run_path(str(ROOT / "docs" / "certified.py"))["page"]()
    assert (ROOT / "docs" / "certified.md").read_text() == made
    rows = json.loads(compare.RESULTS.read_text())["targets"]
    assert list(rows) == list(TARGETS)
    for entry in rows.values():
        for row in entry["samplers"].values():
            assert "effective_spread" not in row or row["verdict"] == compare.verdict(row, entry["dim"])
