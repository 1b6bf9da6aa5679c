r"""Whether chains agree, and how many draws they are worth: R-hat and effective sample sizes.

Plain functions of values (chains, draws, ...), with one result for each of the remaining axes. The definitions are
those of Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), the numbers those of ArviZ. Each chain is split in two
halves.

    z       values replaced by normal scores of their ranks in all chains, Phi^-1((rank - 3/8) / (S + 1/4))
    R-hat   sqrt(1 + (B / W - 1) / N), between- and within-chain variance of z, or of z of |value - median| if larger
    ESS     S / tau, tau = -1 + 2 sum rho_t over Geyer's initial monotone sequence; bulk: of z, tail: of the indicators
            of the 5% and 95% quantiles, the smaller one

NaN where nothing is known: fewer than 4 draws, a NaN among the values, and for R-hat a single chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["ess_bulk", "ess_tail", "mcse_mean", "rhat", "rhat_by_chance"]

_LEAST_DRAWS = 4
_TAILS = (0.05, 0.95)


def rhat(values: Tensor) -> Tensor:
    """Rank-normalised split R-hat of values (chains, draws, ...): 1 where chains, and their halves, agree.

    Above 1.01 they have not mixed. NaN for one chain, and where no value differs; infinite where each chain is constant
    at its own value (ArviZ may return NaN there, which would hide the disagreement).

    Example:
        >>> normal = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
        >>> agreeing, apart = rhat(normal), rhat(normal + torch.arange(4)[:, None])
        >>> bool(agreeing < 1.01), bool(apart > 1.5)
        (True, True)
    """

    def measure(x: Tensor) -> Tensor:
        halves = _halves(x)
        # (half chains at one distance from the median have no spread about it, which means nothing)
        spread = _rhat(_normal_scores((halves - _median(halves)).abs()))
        return torch.fmax(_rhat(_normal_scores(halves)), torch.where(spread.isinf(), torch.nan, spread))

    return _measured(values, measure, least_chains=2)


def ess_bulk(values: Tensor) -> Tensor:
    """Effective sample size for means and medians of values (chains, draws, ...).

    Values that never change count as independent draws, as in ArviZ: whether they should have changed is not known
    here.
    """
    return _measured(values, lambda x: _ess(_normal_scores(_halves(x))))


def ess_tail(values: Tensor) -> Tensor:
    """Effective sample size for the 5% or the 95% quantile of values (chains, draws, ...), whichever is smaller."""
    return _measured(values, lambda x: torch.minimum(*(_ess(_halves((x <= _quantile(x, p)).double())) for p in _TAILS)))


def mcse_mean(values: Tensor) -> Tensor:
    """Monte Carlo standard error of the mean of values (chains, draws, ...)."""
    return _measured(values, lambda x: x.flatten(0, 1).std(0) / _ess(_halves(x)).sqrt())


def rhat_by_chance(ess: Tensor, num_chains: int, count: int = 1, *, num_draws: int | None = None) -> Tensor:
    """The value that R-hat stays below in 95% of cases for chains that agree, given their effective sample size.

    The means of 2 C half chains scatter: their variance over that of the draws is about (2 C / ess) chi^2 / (2 C - 1)
    with 2 C - 1 degrees of freedom, and R-hat^2 is 1 + that - 1 / N, N the draws in half a chain. R-hat is the larger
    of two numbers, and `count` of them are compared: the 5% are shared among all (Bonferroni).

    `num_draws`: of each chain; None assumes independent draws, as many as are effective.

    Example:
        >>> rhat_by_chance(torch.tensor([100.0, 400.0, 10_000.0]), num_chains=4).round(decimals=3)
        tensor([1.0500, 1.0130, 1.0010])
    """
    half_chains = 2 * num_chains
    degrees = half_chains - 1
    z = torch.special.ndtri(torch.tensor(1 - 0.05 / (2 * count), dtype=torch.float64))
    # Wilson and Hilferty's quantile of chi^2 / degrees
    ratio = (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3
    scatter = half_chains / ess
    limit: Tensor = (1 + ratio * scatter - (scatter if num_draws is None else 2 / num_draws)).sqrt()
    return limit


# --- the parts, on (chains, draws, quantities), float64 -------------------------------------------------------------


def _rhat(x: Tensor) -> Tensor:
    n = x.shape[1]
    ratio = n * x.mean(1).var(0) / x.var(1).mean(0)
    return ((ratio + n - 1) / n).sqrt()


def _ess(x: Tensor) -> Tensor:
    chains, n, _ = x.shape
    total = chains * n
    covariance = _autocovariance(x).mean(0)  # (lags, quantities)
    within = covariance[0] * n / (n - 1)
    variance = covariance[0] + (x.mean(1).var(0) if chains > 1 else 0.0)
    rho = 1 - (within - covariance) / variance
    rho[0] = 1
    # Geyer: in a reversible chain, pairs of neighbouring lags have a positive sum; after the first other pair is noise
    last = max(0, -(-(n - 4) // 2))
    even, odd = rho[0 : 2 * last + 1 : 2], rho[1 : 2 * last + 2 : 2]
    pairs = even + odd
    is_noise = pairs <= 0
    is_noise[last] = True  # the last pair
    end = is_noise.int().argmax(0)
    before = torch.arange(last + 1)[:, None] < end
    falling = torch.where(before, pairs.cummin(0).values, 0.0).sum(0)
    at_end, pair_at_end = even.gather(0, end[None])[0], pairs.gather(0, end[None])[0]
    rest = torch.where((at_end > 0) | (pair_at_end >= 0), at_end, 0.0)
    tau = (-1 + 2 * falling + rest).clamp_min(1 / math.log10(total))  # never much better than independent draws
    ess = torch.where(rho.isnan().any(0), torch.nan, total / tau)
    is_constant = x.amax((0, 1)) - x.amin((0, 1)) < 1e-15
    return torch.where(is_constant, float(total), ess)


def _autocovariance(x: Tensor) -> Tensor:
    n = x.shape[1]
    transformed = torch.fft.rfft(x - x.mean(1, keepdim=True), 2 * n, dim=1)
    covariance: Tensor = torch.fft.irfft(transformed * transformed.conj(), 2 * n, dim=1)[:, :n] / n
    return covariance


def _halves(x: Tensor) -> Tensor:
    """Each chain as two; the middle one of an odd number of draws is left out."""
    half = x.shape[1] // 2
    return torch.cat([x[:, :half], x[:, -half:]])


def _normal_scores(x: Tensor) -> Tensor:
    flat = x.flatten(0, 1).T.contiguous()  # (quantities, draws of all chains)
    ascending = flat.sort(1).values
    # equal values share the mean of their ranks
    ranks = (torch.searchsorted(ascending, flat) + torch.searchsorted(ascending, flat, right=True) + 1).double() / 2
    scores: Tensor = torch.special.ndtri((ranks - 3 / 8) / (flat.shape[1] + 1 / 4))
    return scores.T.reshape(x.shape)


def _median(x: Tensor) -> Tensor:
    ascending = x.flatten(0, 1).sort(0).values
    n = len(ascending)
    return (ascending[(n - 1) // 2] + ascending[n // 2]) / 2


def _quantile(x: Tensor, p: float) -> Tensor:
    ascending = x.flatten(0, 1).sort(0).values
    n = len(ascending)
    place = n * p + (1 - p)  # ArviZ's order of operations: rounding must not move a value across the quantile
    below = int(min(max(place, 1), n - 1))
    share = min(max(place - below, 0.0), 1.0)
    return (1 - share) * ascending[below - 1] + share * ascending[below]


def _measured(values: Tensor, measure: Callable[[Tensor], Tensor], least_chains: int = 1) -> Tensor:
    """The measure of (chains, draws, quantities) in float64; NaN for too few values, or a NaN among them."""
    x = torch.as_tensor(values).detach().cpu()
    if x.dim() < 2:
        raise ValueError(f"values must be (chains, draws, ...), got shape {tuple(x.shape)}; for one chain pass x[None].")
    if x.is_complex():
        raise TypeError(f"values must be real, got {x.dtype}.")
    shape = x.shape[2:]
    x = x.double().reshape(*x.shape[:2], shape.numel())
    if len(x) < least_chains or x.shape[1] < _LEAST_DRAWS or x.numel() == 0:
        return torch.full(shape, math.nan, dtype=torch.float64)
    return torch.where(x.isnan().any(0).any(0), torch.nan, measure(x)).reshape(shape)
