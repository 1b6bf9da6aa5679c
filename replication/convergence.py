r"""A known target, the distance of many chains from it, and the bound of Theorem 2 for it.

The target is the logarithm of a Gamma(2) variable, cut to [-1.5, 2]:

    p(theta) = exp(2 theta - e^theta) / Z,    P(theta <= t) = (G(e^t) - G(e^-1.5)) / Z,    G(y) = 1 - (1 + y) e^-y

It is skewed, its probabilities are known exactly, and the loss and its gradient are bounded, as Theorem 2 requires.
Chains start uniform on [1, 1.5]: a bounded density, as Theorem 2 requires, and far from the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOW, HIGH = -1.5, 2.0
START = (1.0, 1.5)
NUM_BINS = 20


@dataclass(frozen=True)
class Settings:
    """Settings of both chains, and the momentum spread of the exact one."""

    lr: float
    sigma: float
    sigma_along: float
    momentum_spread: tuple[float, float]


def log_density(theta: Tensor) -> Tensor:
    """log p up to a constant, (chains, 1) -> (chains,)."""
    x = theta[:, 0]
    return torch.where((x >= LOW) & (x <= HIGH), 2 * x - x.exp(), -math.inf)


def _gamma_cdf(y: float) -> float:
    return 1 - (1 + y) * math.exp(-y)


_Z = _gamma_cdf(math.exp(HIGH)) - _gamma_cdf(math.exp(LOW))


def inner_edges() -> list[float]:
    """The inner edges of `NUM_BINS` bins of equal probability."""
    return [_quantile(i / NUM_BINS) for i in range(1, NUM_BINS)]


def _quantile(probability: float) -> float:
    low, high = LOW, HIGH
    for _ in range(60):  # bisection, to the last bit
        middle = (low + high) / 2
        below = (_gamma_cdf(math.exp(middle)) - _gamma_cdf(math.exp(LOW))) / _Z < probability
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


def starts(num_chains: int, generator: torch.Generator) -> Tensor:
    """Starting points, (chains, 1)."""
    uniform = torch.rand(num_chains, 1, dtype=torch.float64, generator=generator, device=generator.device)
    return START[0] + (START[1] - START[0]) * uniform


def distance(theta: Tensor) -> tuple[float, float]:
    """Total variation between the histogram of chains (chains, 1) and the target's, and its standard error.

        TV = 1/2 sum_b |p_b - 1/B|,    error = 1/2 sqrt((1 - (sum_b s_b p_b)^2) / N),    s_b = sign(p_b - 1/B)

    The error holds for a TV far above the floor; at the floor it is smaller (see `floor`).
    """
    edges = torch.tensor(inner_edges(), dtype=torch.float64, device=theta.device)
    counts = torch.bincount(torch.bucketize(theta[:, 0].contiguous(), edges), minlength=NUM_BINS).double().cpu()
    p = counts / len(theta)
    excess = p - 1 / NUM_BINS
    error = 0.5 * math.sqrt(max(0.0, 1 - float((excess.sign() * p).sum()) ** 2) / len(theta))
    return 0.5 * float(excess.abs().sum()), error


def floor(num_chains: int) -> tuple[float, float]:
    """The mean of `distance` for exact draws, and its standard deviation.

    The mean is exact: De Moivre's E|X - Np| = 2 m C(N, m) p^m q^(N - m + 1), m = floor(Np) + 1, for each bin. The
    standard deviation is that of normal counts with variance pq/N and correlation -1/(B - 1).
    """
    p = 1 / NUM_BINS
    q = 1 - p
    m = math.floor(num_chains * p) + 1
    log_choose = math.lgamma(num_chains + 1) - math.lgamma(m + 1) - math.lgamma(num_chains - m + 1)
    deviation = 2 * m * math.exp(log_choose + m * math.log(p) + (num_chains - m + 1) * math.log(q))
    r = -1 / (NUM_BINS - 1)
    shared = (2 / math.pi) * (math.sqrt(1 - r * r) + r * math.asin(r) - 1)
    variance = NUM_BINS * (1 - 2 / math.pi + (NUM_BINS - 1) * shared) * p * q / num_chains
    return 0.5 * NUM_BINS * deviation / num_chains, 0.5 * math.sqrt(variance)


# --- Theorem 2 ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    r"""Theorem 2 with the constants of its proof, in numbers.

        TV_k <= 1/2 |F0| [ (1 - a)^k + c(beta) (1 - (1 - a)^k) / a ]

    |F0| is the largest relative error of the starting density, a the constant of the Doeblin condition (Step 3 of the
    proof) and c(beta) the remainder for each step (Step 4), the theorem's b beta.
    """

    start: float
    doeblin: float
    remainder: float

    def at(self, k: int) -> float:
        """The bound on the total variation after k steps; above 1 it is vacuous."""
        forgotten = -math.expm1(k * math.log1p(-self.doeblin))  # 1 - (1 - a)^k, accurate for a tiny a
        grown = forgotten / self.doeblin if self.doeblin > 0 else k
        return 0.5 * self.start * (1 - forgotten + self.remainder * grown)

    @property
    def limit(self) -> float | None:
        """The bound for k to infinity; None if it is infinite."""
        if self.remainder == 0:
            return 0.0
        return 0.5 * self.start * self.remainder / self.doeblin if self.doeblin > 0 else None


def bounds(settings: Settings, betas: Sequence[float]) -> list[Bound]:
    """Theorem 2 for the target of this file, at each beta1 = beta2 = beta."""
    grid = torch.linspace(LOW, HIGH, 15, dtype=torch.float64)
    p = log_density(grid[:, None]).exp() / _Z
    inside = torch.linspace(*START, 101, dtype=torch.float64)
    ratio = 1 / (START[1] - START[0]) / (log_density(inside[:, None]).exp() / _Z)
    start = max(1.0, float(ratio.max()) - 1)  # 1 outside of the starting interval
    doeblin = _doeblin(settings, grid, p)
    # Step 4: 2 K + K sup q / inf p; no proposal has a density above 1 / (sqrt(2 pi) sigma)
    share = 2 + 1 / (math.sqrt(2 * math.pi) * settings.sigma * float(p.min()))
    return [Bound(start, doeblin, _memory(beta) * share) for beta in betas]


def _memory(beta: float, num_draws: int = 1 << 18) -> float:
    """K = int int f(m) |q2(m'|m) - f(m')| dm dm' for both momenta: their memory of one step before, at most 2.

    In units of their spread, (m, m') are normal with correlation beta instead of independent, for any theta. This is a
    mean over a quarter of a million independent pairs, with a standard error below 0.4%.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, num_draws, 2, dtype=torch.float64, generator=generator)
    log_ratio = -0.5 * math.log1p(-(beta**2)) - (beta**2 * (x * x + y * y) - 2 * beta * x * y) / (2 * (1 - beta**2))
    return 2 * float((-torch.expm1(log_ratio.sum(1))).clamp(min=0).mean())


def _doeblin(settings: Settings, grid: Tensor, p: Tensor) -> float:
    """a = inf Q(x, y) / p(y), Q(x, y) = int min(q1(y|x, m) f(m|x), q1(x|y, m) f(m|y) p(y) / p(x)) dm, on grids of x, y
    and m.

    It does not depend on beta: the momenta have their stationary distribution.
    """
    s1, s2 = settings.momentum_spread
    g = grid.exp() - 2
    m1 = torch.linspace(float(g.min()) - 6 * s1, float(g.max()) + 6 * s1, 121, dtype=torch.float64)[:, None]
    m2 = torch.linspace(-6 * s2, float(g.square().max()) + 6 * s2, 121, dtype=torch.float64)
    cell = float((m1[1] - m1[0]) * (m2[1] - m2[0]))
    u = settings.lr * m1 / (m2.abs() + s2).sqrt()
    variance = settings.sigma**2 + (settings.sigma_along * u) ** 2

    def log_normal(deviation: Tensor, v: Tensor | float) -> Tensor:
        return -0.5 * (deviation**2 / v + torch.as_tensor(2 * math.pi * v).log())

    momenta = [log_normal(m1 - a, s1**2) + log_normal(m2 - a * a, s2**2) for a in g.tolist()]
    least = math.inf
    for i, x in enumerate(grid.tolist()):
        for j, y in enumerate(grid.tolist()):
            there = log_normal(y - x + u, variance) + momenta[i]
            back = log_normal(x - y + u, variance) + momenta[j] + (p[j] / p[i]).log()
            least = min(least, float(torch.minimum(there, back).exp().sum()) * cell / float(p[j]))
    return least
