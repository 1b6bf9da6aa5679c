"""What predictions say, against plain numpy on the raw draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adammcmc.posterior import uncertainty

GENERATOR = torch.Generator().manual_seed(0)
P = torch.rand(9, 50, 4, generator=GENERATOR, dtype=torch.float64).softmax(2)
P[:, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0])  # certain: 0 log 0 is 0
Q = torch.rand(9, 50, generator=GENERATOR, dtype=torch.float64)


def entropy(p: np.ndarray) -> np.ndarray:
    return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0).sum(-1)


def test_entropies_equal_numpy() -> None:
    p = P.numpy()
    np.testing.assert_allclose(uncertainty.entropy(P), entropy(p.mean(0)), atol=1e-14)
    np.testing.assert_allclose(uncertainty.expected_entropy(P), entropy(p).mean(0), atol=1e-14)
    np.testing.assert_allclose(uncertainty.mutual_information(P), entropy(p.mean(0)) - entropy(p).mean(0), atol=1e-14)
    assert (uncertainty.mutual_information(P) >= 0).all()
    assert float(uncertainty.entropy(P)[0]) == 0


def test_a_binary_entropy_is_that_of_two_classes() -> None:
    two = torch.stack([Q, 1 - Q], 2)
    for name in ("entropy", "expected_entropy", "mutual_information"):
        f = getattr(uncertainty, name)
        torch.testing.assert_close(f(Q, is_binary=True), f(two))


@pytest.mark.parametrize("q", [0.0, 0.05, 0.25, 0.5, 0.731, 1.0])
def test_quantiles_equal_numpy(q: float) -> None:
    np.testing.assert_allclose(uncertainty.quantile(P, q), np.quantile(P.numpy(), q, axis=0), atol=1e-14)


def test_spread_and_variance_equal_numpy() -> None:
    p = P.numpy()
    np.testing.assert_allclose(uncertainty.spread(P), np.quantile(p, 0.75, axis=0) - np.quantile(p, 0.25, axis=0), atol=1e-14)
    np.testing.assert_allclose(uncertainty.variance(P), p.var(0), atol=1e-14)


def test_infinities_and_nan() -> None:
    values = torch.tensor([[-torch.inf, 1.0, 1.0], [-torch.inf, torch.nan, 2.0], [-torch.inf, 3.0, torch.inf]])
    for q in (0.1, 0.5, 1.0):
        np.testing.assert_array_equal(uncertainty.quantile(values, q)[:2], [-np.inf, np.nan])
    assert uncertainty.quantile(values, 0.5)[2] == 2


def test_one_draw_has_no_spread() -> None:
    assert not uncertainty.spread(P[:1]).any()
    assert not uncertainty.variance(P[:1]).any()


def test_a_quantile_outside_of_zero_and_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`q` must lie between 0 and 1, got 1.5"):
        uncertainty.quantile(P, 1.5)
