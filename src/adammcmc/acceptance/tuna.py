"""Metropolis on a Poisson minibatch, exact under a bound."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from adammcmc.acceptance.bounds import Bound, Table, Tables
from adammcmc.acceptance.metropolis import decisive, metropolis
from adammcmc.acceptance.protocol import AcceptanceTest, Comparison, Verdict
from adammcmc.acceptance.subsample import Estimate, full_data, on_batch
from adammcmc.errors import warn
from adammcmc.target.keyed_random import keys, numbers, poisson
from adammcmc.target.leaves import is_finite
from adammcmc.target.randomness import Randomness
from adammcmc.target.sums import sums

__all__ = ["Tuna"]


class _Poisson(NamedTuple):
    """The result of a Poisson minibatch, (chains,) each."""

    log_ratio: Tensor
    num_examples: Tensor
    is_broken: Tensor
    is_current_finite: Tensor
    is_finite: Tensor


@dataclass(frozen=True)
class Tuna(AcceptanceTest):
    r"""Metropolis on a Poisson minibatch (Zhang, Cooper and De Sa 2020, TunaMH). Exact, if the bound is true.

        L = lambda M sum_i c_i,    B ~ Poisson(L + chi L^2),    B examples i with probability c_i / sum c,
        keep each with probability (chi L + (1 + r_i) / 2) / (chi L + 1),    r_i = D_i / (c_i M) in [-1, 1],
        accept with  min(1, exp(c + 2 sum_kept artanh(-r_i / (1 + 2 chi L))))

    The kept examples are an auxiliary variable whose rates at theta and tau differ by the sign of D_i; the sums of the
    rates give exp(-lambda sum D_i). If L + chi L^2 exceeds n (the same from both sides), the full data are used. If an
    example violates the bound, |r_i| > 1, they are used as well; this is detected, warned about once and counted,
    but the chain is no longer exact. Data: L + chi L^2 on average, at an acceptance below that of the full data. The
    work of a step grows with these, and with n only logarithmically.

    Args:
        bound: on the losses, from `acceptance.bounds`, such as `last_layer_bound(features)` for the last layer of a
            network.
        chi: more examples (chi L^2 of them) for a higher acceptance; the variance of the log ratio is about 1 / chi at
            most.
    """

    bound: Bound
    chi: float = 0.1
    needs_examples = True
    reads_device = True
    carries_count = True

    def __post_init__(self) -> None:
        if not 0 <= self.chi < float("inf"):
            raise ValueError(f"`chi` must not be negative, and must be finite, got {self.chi}.")
        if not isinstance(self.bound, Bound):
            raise TypeError(
                f"`bound` must be one of acceptance.bounds, such as last_layer_bound(features), got {self.bound!r}."
            )

    @functools.cached_property
    def _tables(self) -> Tables:
        return Tables(self.bound)

    def __call__(self, comparison: Comparison, carry: Tensor | None, generator: Randomness) -> tuple[Verdict, Tensor]:
        log_uniform, key = decisive(comparison, generator), keys(comparison.num_chains, comparison.device, generator)
        violations = torch.zeros_like(key) if carry is None else carry
        if comparison.potential.fixed:  # this step's batch is all data
            return metropolis(comparison, on_batch(comparison)._replace(noise=None), log_uniform), violations
        n, (table, m) = comparison.num_examples, self._tables(comparison)
        known, lam = comparison.known(), comparison.inverse_temperature()
        rate = lam * m * table.steps[-1]
        is_cheap = rate + self.chi * rate.square() <= n
        y, num, is_current_finite = known.clone(), torch.zeros_like(known), torch.ones_like(is_cheap)
        is_open, is_broken = is_finite(known) & comparison.may_move, torch.zeros_like(is_cheap)
        is_proposed_finite = is_finite(known)
        if len(chains := (is_open & is_cheap).nonzero().flatten()) > 0:
            found = self._poisson(comparison, chains, key[chains], table, m[chains], rate[chains])
            y[chains] += found.log_ratio
            num[chains], is_broken[chains] = found.num_examples, found.is_broken
            is_current_finite[chains], is_proposed_finite[chains] = found.is_current_finite, found.is_finite
        if len(chains := (is_open & (is_broken | ~is_cheap)).nonzero().flatten()) > 0:
            difference, is_current_finite[chains] = full_data(comparison, chains)
            y[chains] = known[chains] - lam[chains] * sums.over_examples(difference.sum(1))
            num[chains] += n
            is_proposed_finite[chains] = is_finite(y[chains])
        if bool(is_broken.any()) and not bool(violations.any()):
            warn(
                "a loss changed by more than the bound of Tuna allows: that step was decided on the full data, and the chain "
                "is no longer exact. Pass a valid bound.",
            )
        verdict = metropolis(comparison, Estimate(y, num, is_current_finite=is_current_finite), log_uniform)
        # (with chi = 0, an example at its bound gives -inf: no way back, although the loss is finite)
        return verdict._replace(is_finite=is_proposed_finite), violations + is_broken

    def _poisson(self, comparison: Comparison, chains: Tensor, key: Tensor, table: Table, m: Tensor, rate: Tensor) -> _Poisson:
        extra = self.chi * rate[:, None]
        sizes = poisson(rate + self.chi * rate.square(), numbers(key, 1, stream=1)[:, 0])
        most = max(1, int(sizes.max()))
        c, steps = table.weights, table.steps
        chosen = torch.searchsorted(steps, numbers(key, most, stream=2) * steps[-1], right=True).clamp_max(len(c) - 1)
        is_seen = torch.arange(most, device=key.device) < sizes[:, None]
        chosen = torch.where(is_seen, chosen, chosen[:, :1])  # the rest is padding
        difference, is_current_finite, rounding = comparison.differences(chosen, chains)
        is_current_finite = is_current_finite | (sizes == 0)
        most_allowed = c[chosen] * m[:, None]
        # where rounding exceeds the bound, the same D_i must enter the rates of both directions
        ratio = torch.where(is_seen, difference / most_allowed, 0.0).clamp(-1, 1)
        is_broken = (is_seen & (difference.abs() > most_allowed + rounding)).any(1)
        is_kept = is_seen & (numbers(key, most, stream=3) < (extra + (1 + ratio) / 2) / (extra + 1))
        terms = 2 * torch.atanh(-ratio / (1 + 2 * extra))
        log_ratio = torch.where(is_kept | ratio.isnan(), terms, 0.0).sum(1)  # a NaN must reach the verdict
        is_proposed_finite = (is_finite(difference) | ~is_seen).all(1)
        return _Poisson(log_ratio, sizes.double(), is_broken, is_current_finite, is_proposed_finite)

    def complaint(self, carry: Tensor | None) -> str | None:
        count = 0 if carry is None else int(carry.sum())
        return f"the bound of Tuna was broken {count} time{'s' * (count != 1)}" if count else None

    def approximation(self, *, fixed_data: bool) -> str | None:
        return None

    def __str__(self) -> str:
        return f"Metropolis on a Poisson minibatch (exact under its bound), chi = {self.chi:g}"
