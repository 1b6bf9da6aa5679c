"""Metropolis on as many examples as a concentration bound asks for."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adammcmc.acceptance.bounds import Bound, Tables, distance
from adammcmc.acceptance.comparison import AcceptanceTest, Comparison, Verdict
from adammcmc.acceptance.metropolis import decisive, metropolis
from adammcmc.acceptance.subsample import Sample, check_batch_size, check_growth, estimate
from adammcmc.target.randomness import Randomness

__all__ = ["Confidence"]

_K = 7 / 3 + 3 / math.sqrt(2)


@dataclass(frozen=True)
class Confidence(AcceptanceTest):
    r"""Metropolis on as many examples as a concentration bound asks for (Bardenet, Doucet and Holmes 2014). Approximate.

        stop when  |Yhat - log u| > sd sqrt(2 rho_b L / b) + (7/3 + 3/sqrt 2) R L / b,    L = log(5 / delta_j)
        accept iff  Yhat > log u;    delta_j = delta / (2 j^2) at look j,
        rho_b = 1 - (b - 1) / n  up to b = n / 2, then  (1 - b / n) (1 + 1 / b)

    sd (with 1 / b) and the range R are of the x_i = c - lambda n D_i (empirical Bernstein-Serfling bound; one side of it is
    enough, since only one can make the decision wrong). With a true R the decision is that of the full data with probability
    1 - delta at least, whatever the losses are like; at b = n it is the same. Without a bound R is the range of the x_i seen so
    far, a heuristic, and nothing is guaranteed. Data: nearly all, unless a control variate makes R small.

    Args:
        delta: the probability of a wrong decision.
        bound: on the losses, from `acceptance.bounds`: R = 2 n lambda M max_i c_i. None is the heuristic.
        batch_size: examples of the first look.
        growth: each look has this many times the examples of the last.
    """

    delta: float = 0.05
    bound: Bound | None = None
    batch_size: int = 100
    growth: float = 2.0
    needs_examples: ClassVar[bool] = True
    reads_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise ValueError(f"`delta` must lie between 0 and 1, got {self.delta}.")
        if self.bound is not None and not hasattr(self.bound, "weights"):
            raise TypeError(
                f"`bound` must be one of acceptance.bounds, got {self.bound!r}; None takes the range that was seen."
            )
        check_batch_size(self.batch_size)
        check_growth(self.growth)

    @functools.cached_property
    def _tables(self) -> Tables | None:
        return None if self.bound is None else Tables(self.bound)

    def _range(self, comparison: Comparison) -> Tensor | None:
        if self.bound is None or self._tables is None or comparison.potential.fixed:
            return None
        n, m = comparison.num_examples, distance(self.bound, comparison)
        return 2 * n * comparison.inverse_temperature() * self._tables(n, comparison.device).largest * m

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
        verdict = metropolis(comparison, found.log_ratio, log_uniform, found.num_examples)
        # how far was looked depends on u, so that the mean of min(1, e^Yhat) would be biased
        verdict = verdict._replace(acceptance_rate=verdict.is_accepted.double())
        return verdict._replace(is_current_finite=found.is_current_finite, log_ratio_noise=found.noise), None

    def approximation(self, *, fixed_data: bool) -> str | None:
        if fixed_data:
            return None
        if self.bound is None:
            return "decisions on a growing batch, by a heuristic range of the losses"
        return f"a decision differs from that of the full data with probability up to {self.delta:g}"

    def __str__(self) -> str:
        kind = "heuristic" if self.bound is None else "bounded"
        return f"Metropolis by concentration on a growing batch ({kind} range), delta = {self.delta:g}"
