"""R-hat and effective sample sizes equal ArviZ's on the same draws."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adammcmc import diagnostics

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import arviz

PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Any], Any]]] = {
    "rhat": (diagnostics.rhat, arviz.rhat),
    "bulk": (diagnostics.ess_bulk, lambda x: arviz.ess(x, method="bulk")),
    "tail": (diagnostics.ess_tail, lambda x: arviz.ess(x, method="tail")),
    "mcse": (diagnostics.mcse_mean, lambda x: np.std(x, ddof=1) / np.sqrt(arviz.ess(x, method="mean"))),
}


KINDS = ["independent", "slow", "alternating", "apart", "of other width", "drifting", "tied", "two values", "heavy tails"]
KINDS += ["large", "one chain stands still", "constant", "a NaN", "infinite"]


def autoregressive(chains: int, draws: int, rho: float, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(chains, draws))
    for t in range(1, draws):
        x[:, t] = rho * x[:, t - 1] + np.sqrt(1 - rho**2) * x[:, t]
    return x


def series(name: str, chains: int, draws: int, seed: int = 0) -> np.ndarray:
    x = autoregressive(chains, draws, 0.7, seed)
    return {
        "independent": autoregressive(chains, draws, 0.0, seed),
        "slow": autoregressive(chains, draws, 0.99, seed),
        "alternating": autoregressive(chains, draws, -0.9, seed),
        "apart": x + 3.0 * np.arange(chains)[:, None],
        "of other width": x * (1.0 + 4 * np.arange(chains))[:, None],
        "drifting": x + np.linspace(0, 4, draws),
        "tied": np.round(x),
        "two values": (x > 0.5).astype(float),
        "heavy tails": np.tan(1.57 * np.tanh(x)),
        "large": 1e12 + x,
        "one chain stands still": np.where(np.arange(chains)[:, None] == 0, 0.3, x),
        "constant": np.full((chains, draws), 1.7),
        "a NaN": np.where((np.arange(draws) == draws // 2)[None], np.nan, x),
        "infinite": np.where((np.arange(draws) == 1)[None], np.inf, x),
    }[name]


def same(name: str, x: np.ndarray) -> None:
    ours, theirs = PAIRS[name]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = theirs(x)
    found = float(ours(torch.tensor(x)))
    if found == math.inf:  # half chains that stand still at different values: ArviZ has inf, NaN or 1e8, as the rounding goes
        assert name == "rhat"
        assert not float(expected) < 1e6
        return
    np.testing.assert_allclose(found, float(expected), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PAIRS)
def test_equals_arviz(name: str, kind: str) -> None:
    if name == "mcse" and kind in ("infinite", "large"):
        return  # a mean of infinities, and one that has lost its digits
    for chains, draws in ((4, 100), (2, 37), (1, 60), (3, 4), (2, 5), (5, 6), (1, 7), (2, 1), (2, 3), (4, 401)):
        same(name, series(kind, chains, draws))


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(list(PAIRS)),
    chains=st.integers(1, 6),
    draws=st.integers(1, 150),
    rho=st.floats(-0.95, 0.999),
    digits=st.integers(0, 8),
    seed=st.integers(0, 10_000),
)
def test_equals_arviz_everywhere(name: str, chains: int, draws: int, rho: float, digits: int, seed: int) -> None:
    same(name, np.round(autoregressive(chains, draws, rho, seed), digits))


def test_half_chains_at_one_distance_of_the_median_have_no_folded_rhat() -> None:
    """The folded part is something / 0, which must not pass for a disagreement; that of the values themselves may."""
    same("rhat", np.round(autoregressive(3, 7, 0.96875, 1)))
    assert diagnostics.rhat(torch.tensor([0.0, 1.0, 1.0, 0.0])[:, None].expand(4, 6)) == math.inf


def test_many_quantities_are_many_calls() -> None:
    x = torch.stack(
        [torch.tensor(series(kind, 4, 90)) for kind in ("slow", "tied", "constant", "a NaN", "apart", "drifting")], 2
    )
    for ours, _ in PAIRS.values():
        together = ours(x.reshape(4, 90, 2, 3))
        assert together.shape == (2, 3)
        torch.testing.assert_close(together.flatten(), torch.stack([ours(x[..., i]) for i in range(6)]), equal_nan=True)
    assert diagnostics.rhat(torch.zeros(3, 9, 0)).shape == (0,)


def test_the_number_of_effective_draws_is_that_of_theory() -> None:
    """Of an autoregressive chain tau is (1 + rho) / (1 - rho); its own error is found from many replicas."""
    found = torch.stack([diagnostics.ess_bulk(torch.tensor(autoregressive(4, 1000, 0.8, seed))) for seed in range(40)])
    error = float(found.std()) / 40**0.5
    assert abs(float(found.mean()) - 4000 / 9) < 4.5 * error


def test_what_is_no_chain_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(chains, draws, ...\), got shape \(7,\); for one chain pass x\[None\]"):
        diagnostics.rhat(torch.zeros(7))
    with pytest.raises(TypeError, match="real"):
        diagnostics.ess_tail(torch.zeros(2, 7, dtype=torch.complex64))


@pytest.mark.parametrize(("chains", "draws", "memory"), [(4, 400, 0.0), (4, 1000, 0.9), (32, 1000, 0.9), (8, 500, 0.5)])
def test_rhat_by_chance_holds_also_for_correlated_draws(chains: int, draws: int, memory: float) -> None:
    """Stationary AR(1) chains agree: no more than about 5% of them may exceed the limit."""
    generator = torch.Generator().manual_seed(chains)
    noise = torch.randn(chains, draws, 200, dtype=torch.float64, generator=generator)
    x = torch.empty_like(noise)
    x[:, 0] = noise[:, 0]
    for k in range(1, draws):
        x[:, k] = memory * x[:, k - 1] + math.sqrt(1 - memory**2) * noise[:, k]
    each = [torch.minimum(diagnostics.ess_bulk(chain[None]), diagnostics.ess_tail(chain[None])) for chain in x]
    own = torch.stack(each).sum(0)
    exceeded = float((diagnostics.rhat(x) > diagnostics.rhat_by_chance(own, chains, num_draws=draws)).double().mean())
    assert exceeded < 0.05 + 4.5 * math.sqrt(0.05 * 0.95 / 200)
