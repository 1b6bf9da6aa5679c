"""Metropolis on a Poisson minibatch, exact under a bound."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from adammcmc.acceptance.bounds import Bound, Table, Tables, distance
from adammcmc.acceptance.comparison import AcceptanceTest, Comparison, Verdict
from adammcmc.acceptance.metropolis import decisive, metropolis
from adammcmc.acceptance.subsample import full_data
from adammcmc.errors import warn
from adammcmc.target.keyed import keys, numbers, poisson
from adammcmc.target.leaves import is_finite
from adammcmc.target.randomness import Randomness

__all__ = ["Tuna"]


class _Said(NamedTuple):
    """What a Poisson minibatch says, (chains,) each."""

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

    The kept examples are an auxiliary variable whose rates at theta and tau differ by the sign of D_i; the sums of the rates
    give exp(-lambda sum D_i). Where L + chi L^2 exceeds n (the same from both sides) the full data decide. Where an example
    breaks the bound, |r_i| > 1, the full data decide as well: noticed, warned of once, and counted in the test's memory, but no
    longer exact. Data: L + chi L^2 on average, and a random acceptance that is lower than that of the full data. The work of a
    step grows with these, and with n by the logarithm only.

    Args:
        bound: on the losses, from `acceptance.bounds`. For the last layer of a network the library knows one.
        chi: more examples (chi L^2 of them) for a higher acceptance; the noise of the log ratio has a variance of at most
            about 1 / chi.
    """

    bound: Bound
    chi: float = 0.1
    needs_examples: ClassVar[bool] = True
    reads_device: ClassVar[bool] = True
    carries_count: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.chi < float("inf"):
            raise ValueError(f"`chi` must not be negative, and must be finite, got {self.chi}.")
        if not hasattr(self.bound, "weights"):
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
            y = comparison.batch_log_ratio()
            return metropolis(comparison, y, log_uniform, comparison.batch_size or float("nan")), violations
        n, m, known, lam = (
            comparison.num_examples,
            distance(self.bound, comparison),
            comparison.known(),
            comparison.inverse_temperature(),
        )
        table = self._tables(n, comparison.device)
        rate = lam * m * table.steps[-1]
        is_cheap = rate + self.chi * rate.square() <= n
        y, num, is_current_finite = known.clone(), torch.zeros_like(known), torch.ones_like(is_cheap)
        is_asked, is_broken = is_finite(known) & comparison.may_move, torch.zeros_like(is_cheap)
        is_proposed_finite = is_finite(known)
        if len(chains := (is_asked & is_cheap).nonzero().flatten()) > 0:
            said = self._poisson(comparison, chains, key[chains], table, m[chains], rate[chains])
            y[chains] += said.log_ratio
            num[chains], is_broken[chains] = said.num_examples, said.is_broken
            is_current_finite[chains], is_proposed_finite[chains] = said.is_current_finite, said.is_finite
        if len(chains := (is_asked & (is_broken | ~is_cheap)).nonzero().flatten()) > 0:
            difference, is_current_finite[chains] = full_data(comparison, chains)
            y[chains], num[chains] = known[chains] - lam[chains] * difference.sum(1), num[chains] + n
            is_proposed_finite[chains] = is_finite(y[chains])
        if bool(is_broken.any()) and not bool(violations.any()):
            warn(
                "a loss changed by more than the bound of Tuna allows: the full data decided that step, and the chain is no "
                "longer exact. Give a bound that holds.",
            )
        verdict = metropolis(comparison, y, log_uniform, num)
        # (with chi = 0 an example that meets its bound says -inf: no way back, but a loss that is finite)
        return verdict._replace(is_finite=is_proposed_finite, is_current_finite=is_current_finite), violations + is_broken

    def _poisson(self, comparison: Comparison, chains: Tensor, key: Tensor, table: Table, m: Tensor, rate: Tensor) -> _Said:
        extra = self.chi * rate[:, None]
        sizes = poisson(rate + self.chi * rate.square(), numbers(key, 1, stream=1)[:, 0])
        most = max(1, int(sizes.max()))
        c, steps = table.weights, table.steps
        chosen = torch.searchsorted(steps, numbers(key, most, stream=2) * steps[-1], right=True).clamp_max(len(c) - 1)
        is_seen = torch.arange(most, device=key.device) < sizes[:, None]
        chosen = torch.where(is_seen, chosen, chosen[:, :1])  # what is not seen must not be asked
        difference, is_current_finite, rounding = comparison.differences(chosen, chains)
        is_current_finite = is_current_finite | (sizes == 0)
        most_allowed = c[chosen] * m[:, None]
        # where rounding is larger than the bound, the same D_i must go into the rate of this way and of the way back
        ratio = torch.where(is_seen, difference / most_allowed, 0.0).clamp(-1, 1)
        is_broken = (is_seen & (difference.abs() > most_allowed + rounding)).any(1)
        is_kept = is_seen & (numbers(key, most, stream=3) < (extra + (1 + ratio) / 2) / (extra + 1))
        said = 2 * torch.atanh(-ratio / (1 + 2 * extra))
        said = torch.where(is_kept | ratio.isnan(), said, 0.0).sum(1)  # a NaN is an answer, too
        is_proposed_finite = (is_finite(difference) | ~is_seen).all(1)
        return _Said(said, sizes.double(), is_broken, is_current_finite, is_proposed_finite)

    def complaint(self, carry: Tensor | None) -> str | None:
        """Why the chain is not exact after all."""
        count = 0 if carry is None else int(carry.sum())
        return f"the bound of Tuna was broken {count} time{'s' * (count != 1)}" if count else None

    def approximation(self, *, fixed_data: bool) -> str | None:
        return None

    def __str__(self) -> str:
        return f"Metropolis on a Poisson minibatch (exact under its bound), chi = {self.chi:g}"
