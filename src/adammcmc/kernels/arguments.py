"""What the kernels ask of their arguments."""

from __future__ import annotations

import math
from typing import Any

from adammcmc.acceptance import Test
from adammcmc.leaves import Leaves, PerLeaf, flatten

__all__ = ["check_adam", "check_noise", "check_not_negative", "check_preconditioner", "check_proposal", "times"]


def times(value: PerLeaf[float], factor: float) -> PerLeaf[float]:
    """A number, or each of a list, multiplied."""
    return [v * factor for v in value] if isinstance(value, list) else value * factor


def check_not_negative(name: str, values: PerLeaf[float]) -> None:
    """Refuse negative, infinite and undefined values."""
    for value in values if isinstance(values, list) else [values]:
        if not 0 <= value < math.inf:
            raise ValueError(f"`{name}` must not be negative, and must be finite, got {value}.")


def check_adam(lr: PerLeaf[float], betas: PerLeaf[tuple[float, float]]) -> None:
    """Adam's own: lr >= 0, betas in [0, 1)."""
    check_not_negative("lr", lr)
    for pair in betas if isinstance(betas, list) else [betas]:
        if not all(0 <= beta < 1 for beta in pair):
            raise ValueError(f"`betas` must lie in [0, 1), got {pair}.")


def check_proposal(sigma: PerLeaf[float], sigma_along: float) -> None:
    """The noise of a proposal."""
    check_not_negative("sigma", sigma)
    check_not_negative("sigma_along", sigma_along)


def check_noise(sigma: PerLeaf[float], acceptance: Test) -> None:
    """sigma = 0 has no density to test."""
    if acceptance.needs_noise and not all(s > 0 for s in (sigma if isinstance(sigma, list) else [sigma])):
        raise ValueError(
            f"`sigma` must be positive, got {sigma}: without noise the proposal has no density to test. "
            "sigma = 0 needs `acceptance=AlwaysAccept()`."
        )


def check_preconditioner(params: Any, diagonal: Leaves | None, structure: Any) -> None:
    """A diagonal must have the shapes of the parameters (without the chain axis), and be positive."""
    if diagonal is None:
        return
    leaves, wanted = flatten(params)
    shapes = [tuple(a.shape) for a in diagonal]
    if shapes != [tuple(x.shape[1:]) for x in leaves] or structure != wanted:
        raise ValueError(
            "`preconditioner` must have the structure of the parameters, keys in the same order, without the chain "
            f"axis: shapes {[tuple(x.shape[1:]) for x in leaves]}, got {shapes}."
        )
    if not all(bool(((a > 0) & a.isfinite()).all()) for a in diagonal):
        raise ValueError("`preconditioner` must be positive and finite everywhere.")
