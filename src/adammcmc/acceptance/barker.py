"""Barker's test on a growing batch, its noise turned into the test's own randomness."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adammcmc.acceptance.comparison import AcceptanceTest, Comparison, Verdict
from adammcmc.acceptance.correction import acceptance, correction
from adammcmc.acceptance.subsample import Sample, check_batch_size, check_growth, estimate
from adammcmc.target.leaves import is_finite
from adammcmc.target.randomness import Randomness, normal, uniform

__all__ = ["Barker"]


@dataclass(frozen=True)
class Barker(AcceptanceTest):
    r"""Barker's test with the noise of the batch as part of it (Seita et al. 2018).

        accept iff  Yhat + N(0, 1 - s^2) + X > 0,    N(0, 1) + X ~ logistic,    so that  P(accept) = 1 / (1 + e^-Y)

    Examples are added until s <= `max_noise`; at b = n there is no noise, and the test is Barker's own. Exact up to the normal
    approximation of Yhat, to the estimate of s, and to 7.3e-8 of the table of X (`acceptance.correction`); exact at b = n. It
    rejects more than Metropolis does, half of the moves at Y = 0. Data: about n^2 lambda^2 var(D) / max_noise^2.

    Args:
        batch_size: examples of the first look; each further look adds as many, at least.
        growth: each look has at least this many times the examples of the last, so that the number of looks grows as log n.
        max_noise: at most 1. Less is safer, and costs more data.
        max_skewness: go on, too, while s^3 |skewness of the x_i| / sqrt(b) is above this: the skewness that Yhat gives to the
            sum N(0, 1 - s^2) + Yhat, the first term by which it differs from a normal variable.
    """

    batch_size: int = 100
    growth: float = 1.5
    max_noise: float = 1.0
    max_skewness: float = 0.1
    needs_examples: ClassVar[bool] = True
    reads_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size, 30)
        check_growth(self.growth)
        if not 0 < self.max_noise <= 1:
            raise ValueError(f"`max_noise` must lie in (0, 1], got {self.max_noise}: the table of corrections is for noise 1.")
        if not self.max_skewness > 0:
            raise ValueError(f"`max_skewness` must be positive, got {self.max_skewness}; math.inf does not check it.")

    def _is_enough(self, sample: Sample) -> Tensor:
        noise = sample.noise
        if math.isinf(self.max_skewness):
            return noise <= self.max_noise
        centred = sample.x - sample.x.mean(1, keepdim=True)
        skewness = centred.pow(3).mean(1) / centred.square().mean(1).pow(1.5)  # NaN where all are equal: no noise at all
        return (noise <= self.max_noise) & ~(noise.pow(3) * skewness.abs() > self.max_skewness * math.sqrt(sample.size))

    def __call__(self, comparison: Comparison, carry: None, generator: Randomness) -> tuple[Verdict, None]:
        shape, device = (comparison.num_chains,), comparison.device
        z = normal(shape, torch.float64, device, generator)
        u = uniform(shape, torch.float64, device, generator)
        found = estimate(comparison, generator, self.batch_size, self.growth, self._is_enough)
        y, s = found.log_ratio, found.noise
        exact = s == 0
        value = torch.where(exact, y + torch.logit(u), y + (1 - s.square()).clamp_min(0).sqrt() * z + correction(u))
        rate = torch.where(exact, torch.sigmoid(y), acceptance(y, s)).nan_to_num(nan=0.0)
        is_accepted = (value > 0) & is_finite(y) & comparison.may_move
        return Verdict(
            is_accepted, rate * (y < torch.inf), y, is_finite(y), found.num_examples, found.is_current_finite, s
        ), None

    def rate_like(self, metropolis: float) -> float:
        """What Barker's test accepts of moves of which Metropolis accepts this share, for Y ~ N(-v / 2, v)."""
        root = -2 * statistics.NormalDist().inv_cdf(metropolis / 2)
        z = torch.linspace(-8, 8, 1601, dtype=torch.float64)
        weights = torch.exp(-z.square() / 2)
        return float((torch.sigmoid(root * z - root**2 / 2) * weights).sum() / weights.sum())

    def approximation(self, *, fixed_data: bool) -> str | None:
        return None if fixed_data else "the noise of the log ratio is taken for normal (Barker's test on a growing batch)"

    def __str__(self) -> str:
        return f"Barker on a growing batch, noise up to {self.max_noise:g}"
