"""Acceptance tests: small frozen objects with one signature (`AcceptanceTest`)."""

from adammcmc.acceptance.barker import Barker
from adammcmc.acceptance.bounds import Bound, ClampedLoss, DerivativeBound, last_layer_bound, logistic_bound
from adammcmc.acceptance.growing import Confidence, Sequential
from adammcmc.acceptance.metropolis import AlwaysAccept, FullData, Minibatch, Penalty, beta_eff, effective_beta
from adammcmc.acceptance.protocol import AcceptanceTest, Comparison, Verdict
from adammcmc.acceptance.tuna import Tuna

__all__ = [
    "AcceptanceTest",
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
    "Tuna",
    "Verdict",
    "beta_eff",
    "effective_beta",
    "last_layer_bound",
    "logistic_bound",
]
