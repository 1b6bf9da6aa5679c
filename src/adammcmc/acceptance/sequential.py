"""Metropolis by a sequence of t-tests on a growing batch."""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from adammcmc.acceptance.comparison import AcceptanceTest, Comparison, Verdict
from adammcmc.acceptance.metropolis import decisive, metropolis
from adammcmc.acceptance.subsample import Sample, check_batch_size, check_growth, estimate
from adammcmc.target.randomness import Randomness

__all__ = ["Sequential"]


@dataclass(frozen=True)
class Sequential(AcceptanceTest):
    r"""Metropolis on as many examples as a t-test asks for (Korattikara, Chen and Welling 2014). Approximate.

        stop when  1 - T_{b-1}(|Yhat - log u| / s) < eps;    accept iff Yhat > log u

    T is Student's distribution function, s has the finite-population factor sqrt(1 - b / n). At b = n the decision is that of
    the full data, and with eps -> 0 every one is. eps is the error of ONE look: the more looks, the more decisions are wrong,
    near log u = Y up to half of them. There is no bound on the bias in general; measured, it widens the posterior.
    Data: what the t-test asks for; all of them where log u is near Y.

    Args:
        eps: of one look, below 1/2.
        batch_size: examples of the first look; each further look adds as many, at least.
        growth: each look has at least this many times the examples of the last, so that the number of looks grows as log n.
    """

    eps: float = 0.01
    batch_size: int = 100
    growth: float = 1.5
    needs_examples: ClassVar[bool] = True
    reads_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.eps < 0.5:
            raise ValueError(f"`eps` must lie between 0 and 0.5, got {self.eps}.")
        check_batch_size(self.batch_size, 30)
        check_growth(self.growth)

    def __call__(self, comparison: Comparison, carry: None, generator: Randomness) -> tuple[Verdict, None]:
        log_uniform = decisive(comparison, generator)

        def is_enough(sample: Sample) -> Tensor:
            gap = (sample.log_ratio - log_uniform[sample.chains]).abs()
            return gap > student_quantile(self.eps, sample.size - 1) * sample.noise

        found = estimate(comparison, generator, self.batch_size, self.growth, is_enough)
        verdict = metropolis(comparison, found.log_ratio, log_uniform, found.num_examples)
        # how far was looked depends on u, so that the mean of min(1, e^Yhat) would be biased
        verdict = verdict._replace(acceptance_rate=verdict.is_accepted.double())
        return verdict._replace(is_current_finite=found.is_current_finite, log_ratio_noise=found.noise), None

    def approximation(self, *, fixed_data: bool) -> str | None:
        return None if fixed_data else f"a decision stops at an error of {self.eps:g} for each look at a growing batch"

    def __str__(self) -> str:
        return f"Metropolis by t-tests on a growing batch, eps = {self.eps:g}"


@functools.cache
def student_quantile(eps: float, dof: int) -> float:
    """t with 1 - T_dof(t) = eps, for 29 degrees of freedom or more, by the expansion of Cornish and Fisher.

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
