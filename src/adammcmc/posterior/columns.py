"""Columns of the tables in summaries and reports: key numbers, agreement, burn-in, self-tests. To add one, add a line.

Each has a heading and a function that gives the plain text of a cell. (Tables of settings and of the most uncertain examples
are in `report/page.py`.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adammcmc.posterior.summary import Row, Summary
    from adammcmc.samplers.health import Health
    from adammcmc.samplers.warmup import WarmUp

__all__ = ["AGREEMENT", "BURN_IN", "KEY_NUMBERS", "SELF_TESTS"]


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def _mean_acceptance(summary: Summary) -> float:
    known = [h.acceptance for h in summary.health if not math.isnan(h.acceptance)]
    return sum(known) / len(known) if known else math.nan


KEY_NUMBERS: dict[str, Callable[[Summary], str]] = {
    "chains": lambda s: f"{s.num_chains:,}",
    "draws per chain": lambda s: f"{s.num_draws:,}",
    "effective draws": lambda s: _number(s.ess, ",.0f"),
    "largest R-hat": lambda s: _number(s.rhat, ".3f"),
    "acceptance": lambda s: _number(_mean_acceptance(s), ".2f"),
    "seconds": lambda s: _number(s.seconds, ",.0f"),
    "effective draws per second": lambda s: _number(s.ess_per_second, ".3g"),
    "effective draws per 1,000 gradients": lambda s: _number(1000 * s.ess_per_gradient, ".3g"),
}
"""The cost of the run and its result."""

AGREEMENT: dict[str, Callable[[Row], str]] = {
    "": lambda row: row.name if row.count == 1 else f"{row.name} (worst of {row.count})",
    "mean": lambda row: "-" if math.isnan(row.mean) else f"{row.mean:.4g} +- {row.mean_error:.1g}",
    "R-hat": lambda row: _number(row.rhat, ".3f"),
    "bulk ESS": lambda row: _number(row.ess_bulk, ",.0f"),
    "tail ESS": lambda row: _number(row.ess_tail, ",.0f"),
    "verdict": lambda row: row.verdict,
}
"""Whether the chains agree, one row for each quantity."""

BURN_IN: dict[str, Callable[[WarmUp], str]] = {
    "steps": lambda w: f"{w.num_steps:,}",
    "without a test": lambda w: f"{w.num_approach:,}",
    "U by window": lambda w: w.levels,
    "acceptance": lambda w: f"{_number(w.acceptance, '.2f')} (target {w.target_acceptance:.2f})",
    "step size": lambda w: _number(w.step_size, ".3g"),
    "metric": lambda w: w.scaling,
    "ended because": lambda w: w.reason,
}
"""What burn-in did, one row for each chain, or one for all chains of a stack."""

SELF_TESTS: dict[str, Callable[[Health], str]] = {
    "steps": lambda h: f"{h.num_steps:,}",
    "acceptance": lambda h: _number(h.acceptance, ".3f"),
    "2 P(Y > 0)": lambda h: _number(h.twice_rises, ".3f"),
    "temperature": lambda h: _number(h.temperature, ".3g"),
    "loss influence": lambda h: _number(h.loss_influence, ".3g"),
    "noise of Y": lambda h: _number(h.noise, ".3g"),
    "beta_eff": lambda h: _number(h.beta_eff, ".2f"),
    "effective draws of U": lambda h: _number(h.effective_draws, ".0f"),
    "verdict": lambda h: h.verdict,
}
"""The self-tests, one row for each chain."""
