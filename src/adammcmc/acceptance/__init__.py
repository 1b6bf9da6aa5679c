"""Whether to go: acceptance tests, small frozen objects with one signature (see `comparison.Test`)."""

from adammcmc.acceptance.barker import Barker
from adammcmc.acceptance.bounds import Bound, ClampedLoss, DerivativeBound, last_layer_bound, logistic_bound
from adammcmc.acceptance.comparison import Comparison, Test, Verdict
from adammcmc.acceptance.confidence import Confidence
from adammcmc.acceptance.metropolis import AlwaysAccept, FullData, Minibatch, beta_eff, heat_of
from adammcmc.acceptance.penalty import Penalty
from adammcmc.acceptance.sequential import Sequential
from adammcmc.acceptance.tuna import Tuna

__all__ = [
    "AlwaysAccept",
    "Barker",
    "Bound",
    "ClampedLoss",
    "Comparison",
    "Confidence",
    "DerivativeBound",
    "FullData",
    "Minibatch",
    "Penalty",
    "Sequential",
    "Test",
    "Tuna",
    "Verdict",
    "beta_eff",
    "heat_of",
    "last_layer_bound",
    "logistic_bound",
]
