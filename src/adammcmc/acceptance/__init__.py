"""Whether to go: acceptance tests, small frozen objects with one signature (see `comparison.Test`)."""

from adammcmc.acceptance.comparison import Comparison, Test, Verdict
from adammcmc.acceptance.metropolis import AlwaysAccept, FullData, Minibatch

__all__ = ["AlwaysAccept", "Comparison", "FullData", "Minibatch", "Test", "Verdict"]
