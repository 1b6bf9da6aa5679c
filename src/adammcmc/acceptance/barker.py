"""Barker's test on a growing batch, with the batch noise as part of the test's own randomness."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from adammcmc.acceptance.protocol import AcceptanceTest, Comparison, Verdict
from adammcmc.acceptance.subsample import Sample, check_batches, estimate
from adammcmc.target.leaves import is_finite
from adammcmc.target.randomness import Randomness, normal, uniform

__all__ = ["ATOMS", "Barker", "acceptance", "correction"]


@dataclass(frozen=True)
class Barker(AcceptanceTest):
    r"""Barker's test with the noise of the batch as part of it (Seita et al. 2018).

        accept iff  Yhat + N(0, 1 - s^2) + X > 0,    N(0, 1) + X ~ logistic,    so that  P(accept) = 1 / (1 + e^-Y)

    Examples are added until s <= `max_noise`; at b = n there is no noise, and the test is Barker's own. Exact up to the
    normal approximation of Yhat, the estimate of s, and an error of 7.3e-8 in the law of X; exact at b = n. It rejects
    more than Metropolis, half of the moves at Y = 0. Data: about n^2 lambda^2 var(D) / max_noise^2.

    Args:
        batch_size: size of the first batch, and the least that it grows by.
        growth: factor by which the batch grows, so that the number of batches grows as log n.
        max_noise: at most 1. Less is safer and costs more data.
        max_skewness: add examples also while s^3 |skewness of the x_i| / sqrt(b) exceeds this: the skewness that Yhat
            gives to the sum N(0, 1 - s^2) + Yhat, its leading deviation from a normal law.
    """

    batch_size: int = 100
    growth: float = 1.5
    max_noise: float = 1.0
    max_skewness: float = 0.1
    needs_examples = True
    reads_device = True

    def __post_init__(self) -> None:
        check_batches(self.batch_size, self.growth, smallest=30)
        if not 0 < self.max_noise <= 1:
            raise ValueError(f"`max_noise` must lie in (0, 1], got {self.max_noise}: the correction is for noise 1.")
        if not self.max_skewness > 0:
            raise ValueError(f"`max_skewness` must be positive, got {self.max_skewness}; math.inf skips the check.")

    def _is_enough(self, sample: Sample) -> Tensor:
        noise = sample.noise
        if math.isinf(self.max_skewness):
            return noise <= self.max_noise
        centred = sample.x - sample.x.mean(1, keepdim=True)
        skewness = centred.pow(3).mean(1) / centred.square().mean(1).pow(1.5)  # NaN if all are equal: no noise at all
        return (noise <= self.max_noise) & ~(noise.pow(3) * skewness.abs() > self.max_skewness * math.sqrt(sample.size))

    def __call__(self, comparison: Comparison, carry: None, generator: Randomness) -> tuple[Verdict, None]:
        shape, device = (comparison.num_chains,), comparison.device
        z = normal(shape, torch.float64, device, generator)
        u = uniform(shape, torch.float64, device, generator)
        found = estimate(comparison, generator, self.batch_size, self.growth, self._is_enough)
        y, s = found.log_ratio, found.noise
        assert s is not None
        exact = s == 0
        value = torch.where(exact, y + torch.logit(u), y + (1 - s.square()).clamp_min(0).sqrt() * z + correction(u))
        rate = torch.where(exact, torch.sigmoid(y), acceptance(y, s)).nan_to_num(nan=0.0)
        is_accepted = (value > 0) & is_finite(y) & comparison.may_move
        return Verdict(
            is_accepted, rate * (y < torch.inf), y, is_finite(y), found.num_examples, found.is_current_finite, s
        ), None

    def rate_like(self, metropolis: float) -> float:
        """Barker's acceptance rate of moves that Metropolis accepts at this rate, for Y ~ N(-v / 2, v)."""
        root = -2 * statistics.NormalDist().inv_cdf(metropolis / 2)
        z = torch.linspace(-8, 8, 1601, dtype=torch.float64)
        weights = torch.exp(-z.square() / 2)
        return float((torch.sigmoid(root * z - root**2 / 2) * weights).sum() / weights.sum())

    def approximation(self, *, fixed_data: bool) -> str | None:
        return None if fixed_data else "the noise of the log ratio is assumed normal (Barker's test on a growing batch)"

    def __str__(self) -> str:
        return f"Barker on a growing batch, noise up to {self.max_noise:g}"


# --- the correction X -------------------------------------------------------------------------------------------------
# N(0, 1) + X ~ logistic, that is sum_j p_j Phi(y - x_j) = 1 / (1 + e^-y), has no exact solution (the characteristic
# function of X would grow). Non-negative least squares for the weights of atoms on a grid of 401 points in [-20, 20]
# leaves 47 atoms, and an error of the distribution function of 7.3e-8 at most. `python -m tests.correction` prints
# them.

# fmt: off
ATOMS = (  # x_j >= 0, and the weight of x_j and -x_j together
    (0.0, 0.41979796842), (1.1, 0.150248410799), (1.2, 0.23963592973), (2.3, 0.0408449897519),
    (2.4, 0.0928026437824), (3.6, 0.0314694762999), (3.7, 0.00937409623752), (4.9, 0.00864272054555),
    (5.0, 0.00301572162086), (6.2, 0.000491921585363), (6.3, 0.00264225916737), (7.7, 0.000756411709242),
    (7.8, 3.79048547897e-05), (9.1, 5.46497348189e-06), (9.2, 0.000182911394632), (10.7, 9.46237951836e-06),
    (10.8, 3.18584069822e-05), (12.4, 2.54920353787e-06), (12.5, 5.63253766837e-06), (14.3, 1.42658766169e-06),
    (16.3, 1.93208064953e-07), (16.4, 1.90921716291e-08), (18.5, 2.35750186475e-08), (20.0, 4.13729006233e-09),
)
# fmt: on


def _table(device: torch.device) -> tuple[Tensor, Tensor]:
    """All atoms and their weights, float64."""
    x, p = torch.tensor(ATOMS, dtype=torch.float64, device=device).unbind(1)
    return torch.cat([-x, x]), torch.cat([p, p]) / (2 * p.sum())


def correction(uniform: Tensor) -> Tensor:
    """X from uniform numbers, by inverting its distribution function."""
    x, p = _table(uniform.device)
    x, places = x.sort()
    steps = p[places].cumsum(0)
    return x[torch.searchsorted(steps, uniform * steps[-1], right=True).clamp_max(len(x) - 1)]


def acceptance(log_ratio: Tensor, noise: Tensor) -> Tensor:
    """P(Yhat + N(0, 1 - s^2) + X > 0) given Yhat and s <= 1, (chains,)."""
    x, p = _table(log_ratio.device)
    rest = (1 - noise.square()).clamp_min(1e-30).sqrt()
    below: Tensor = torch.special.ndtr((log_ratio[:, None] + x) / rest[:, None])
    return below @ p
