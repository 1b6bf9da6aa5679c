"""The table of targets."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.posteriors import hierarchies, regressions, series, shapes
from benchmarks.posteriors.target import Target

__all__ = ["TARGETS", "target"]

TARGETS: dict[str, Callable[[], Target]] = {
    "linear_uncentred": regressions.linear_uncentred,
    "linear_diabetes": regressions.linear_diabetes,
    "logistic_cancer": regressions.logistic_cancer,
    "logistic_credit": regressions.logistic_credit,
    "poisson_offset": regressions.poisson_offset,
    "negative_binomial": regressions.negative_binomial_counts,
    "student_t": regressions.student_t_regression,
    "horseshoe": regressions.horseshoe,
    "weibull_censored": regressions.weibull_censored,
    "eight_schools_noncentred": hierarchies.eight_schools_noncentred,
    "eight_schools_centred": hierarchies.eight_schools_centred,
    "varying_intercepts": hierarchies.varying_intercepts,
    "varying_slopes": hierarchies.varying_slopes,
    "item_response": hierarchies.item_response,
    "garch": series.garch,
    "stochastic_volatility": series.stochastic_volatility,
    "random_walk": series.random_walk,
    "change_point": series.change_point,
    "two_rates": series.two_rates,
    "lotka_volterra": series.lotka_volterra,
    "gp_regression": shapes.gp_regression,
    "gp_probit": shapes.gp_probit,
    "mixture": shapes.mixture,
    "simplex": shapes.simplex,
    "banana": shapes.banana,
    "funnel_noncentred": shapes.funnel_noncentred,
    "gaussian_rotated": shapes.gaussian_rotated,
}


def target(name: str) -> Target:
    """A target by its name."""
    if name not in TARGETS:
        raise ValueError(f"Unknown target {name!r}; one of {', '.join(TARGETS)}.")
    return TARGETS[name]()
