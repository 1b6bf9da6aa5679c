"""Metropolis on a batch that grows until the decision is clear."""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from adammcmc.acceptance.bounds import Bound, Tables
from adammcmc.acceptance.metropolis import decisive, metropolis
from adammcmc.acceptance.protocol import AcceptanceTest, Comparison, Verdict
from adammcmc.acceptance.subsample import Sample, check_batches, estimate
from adammcmc.target.randomness import Randomness

__all__ = ["Confidence", "Sequential", "student_quantile"]

_K = 7 / 3 + 3 / math.sqrt(2)


@dataclass(frozen=True)
class Sequential(AcceptanceTest):
    r"""Metropolis on as many examples as a t-test requires (Korattikara, Chen and Welling 2014). Approximate.

        stop when  1 - T_{b-1}(|Yhat - log u| / s) < eps;    accept iff Yhat > log u

    T is Student's distribution function, and s has the finite-population factor sqrt(1 - b / n). At b = n the decision
    is that of the full data, and with eps -> 0 every decision is. eps is the error of ONE t-test: the more of them, the
    more decisions are wrong, up to half of those with log u near Y. There is no general bound on the bias; measured, it
    widens the posterior. Data: as many as the t-test requires; all of them if log u is near Y.

    Args:
        eps: error of one t-test, below 1/2.
        batch_size: size of the first batch, and the least that it grows by.
        growth: factor by which the batch grows, so that the number of t-tests grows as log n.
    """

    eps: float = 0.01
    batch_size: int = 100
    growth: float = 1.5
    needs_examples = True
    reads_device = True

    def __post_init__(self) -> None:
        if not 0 < self.eps < 0.5:
            raise ValueError(f"`eps` must lie between 0 and 0.5, got {self.eps}.")
        check_batches(self.batch_size, self.growth, smallest=30)

    def __call__(self, comparison: Comparison, carry: None, generator: Randomness) -> tuple[Verdict, None]:
        log_uniform = decisive(comparison, generator)

        def is_enough(sample: Sample) -> Tensor:
            gap = (sample.log_ratio - log_uniform[sample.chains]).abs()
            return gap > student_quantile(self.eps, sample.size - 1) * sample.noise

        found = estimate(comparison, generator, self.batch_size, self.growth, is_enough)
        return metropolis(comparison, found, log_uniform, rate_by_decision=True), None

    def approximation(self, *, fixed_data: bool) -> str | None:
        return None if fixed_data else f"each t-test on the growing batch may err with probability {self.eps:g}"

    def __str__(self) -> str:
        return f"Metropolis by t-tests on a growing batch, eps = {self.eps:g}"


@dataclass(frozen=True)
class Confidence(AcceptanceTest):
    r"""Metropolis on as many examples as a concentration bound requires (Bardenet et al. 2014). Approximate.

        stop when  |Yhat - log u| > sd sqrt(2 rho_b L / b) + (7/3 + 3/sqrt 2) R L / b,    L = log(5 / delta_j)
        accept iff  Yhat > log u;    delta_j = delta / (2 j^2) at batch j,
        rho_b = 1 - (b - 1) / n  up to b = n / 2, then  (1 - b / n) (1 + 1 / b)

    sd (with 1 / b) and the range R are those of x_i = c - lambda n D_i (empirical Bernstein-Serfling bound; one side is
    enough, as only one can make the decision wrong). With a true R, the decision is that of the full data with
    probability 1 - delta at least, whatever the distribution of the losses; at b = n it is the same. Without a bound, R
    is the range of the x_i seen so far, a heuristic without a guarantee. Data: nearly all, unless a control variate
    makes R small.

    Args:
        delta: the probability of a wrong decision.
        bound: on the losses, from `acceptance.bounds`: R = 2 n lambda M max_i c_i. None is the heuristic.
        batch_size: size of the first batch.
        growth: factor by which the batch grows.
    """

    delta: float = 0.05
    bound: Bound | None = None
    batch_size: int = 100
    growth: float = 2.0
    needs_examples = True
    reads_device = True

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise ValueError(f"`delta` must lie between 0 and 1, got {self.delta}.")
        if self.bound is not None and not isinstance(self.bound, Bound):
            raise TypeError(f"`bound` must be one of acceptance.bounds, or None for the range seen, got {self.bound!r}.")
        check_batches(self.batch_size, self.growth)

    @functools.cached_property
    def _tables(self) -> Tables | None:
        return None if self.bound is None else Tables(self.bound)

    def _range(self, comparison: Comparison) -> Tensor | None:
        if self._tables is None or comparison.potential.fixed:
            return None
        table, m = self._tables(comparison)
        return 2 * comparison.num_examples * comparison.inverse_temperature() * table.largest * m

    def __call__(self, comparison: Comparison, carry: None, generator: Randomness) -> tuple[Verdict, None]:
        log_uniform, widest = decisive(comparison, generator), self._range(comparison)

        def is_enough(sample: Sample) -> Tensor:
            b, n, x = sample.size, sample.num_data, sample.x
            level = math.log(5 * 2 * sample.look**2 / self.delta)
            rho = 1 - (b - 1) / n if b <= n / 2 else (1 - b / n) * (1 + 1 / b)
            span = x.amax(1) - x.amin(1) if widest is None else widest[sample.chains]
            half_width = x.std(1, correction=0) * math.sqrt(2 * rho * level / b) + _K * span * level / b
            return torch.abs(sample.log_ratio - log_uniform[sample.chains]) > half_width

        found = estimate(comparison, generator, self.batch_size, self.growth, is_enough)
        return metropolis(comparison, found, log_uniform, rate_by_decision=True), None

    def approximation(self, *, fixed_data: bool) -> str | None:
        if fixed_data:
            return None
        if self.bound is None:
            return "decisions on a growing batch, by a heuristic range of the losses"
        return f"a decision differs from that of the full data with probability up to {self.delta:g}"

    def __str__(self) -> str:
        kind = "heuristic" if self.bound is None else "bounded"
        return f"Metropolis by concentration on a growing batch ({kind} range), delta = {self.delta:g}"


@functools.cache
def student_quantile(eps: float, dof: int) -> float:
    """t with 1 - T_dof(t) = eps, for 29 degrees of freedom or more, by the Cornish-Fisher expansion.

    Example:
        >>> round(student_quantile(0.01, 29), 4)  # tables: 2.4620
        2.462
    """
    z = -statistics.NormalDist().inv_cdf(eps)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / dof**k for k, term in enumerate(terms))
