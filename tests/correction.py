"""Solves for Barker's correction variable and prints its table: python -m tests.correction

Symmetric atoms x_j on a grid, weights p_j >= 0 that sum to 1, least squares of sum_j p_j Phi(y - x_j) - logistic(y).
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls
from scipy.special import expit, ndtr


def solve() -> list[tuple[float, float]]:
    """(x_j, weight of x_j and -x_j together) of the atoms that are left."""
    x = np.arange(201) / 10
    design = (ndtr(x[:, None] - x) + ndtr(x[:, None] + x)) / 2  # the points where it is compared are those of the grid
    heavy = 1e3  # on the sum of the weights, which must be 1
    weights, _ = nnls(np.vstack([design, heavy * np.ones((1, len(x)))]), np.append(expit(x), heavy), maxiter=100_000)
    weights /= weights.sum()
    return [(float(a), float(w)) for a, w in zip(x, weights, strict=True) if w > 0]


if __name__ == "__main__":
    for atom, weight in solve():
        print(f"    ({atom:.1f}, {weight:.12g}),")
