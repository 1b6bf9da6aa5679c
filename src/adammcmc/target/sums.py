"""Where sums over examples and over parameters are completed."""

from __future__ import annotations

from torch import Tensor

__all__ = ["Sums", "sums"]


class Sums:
    """Turns what this process has summed into the total.

    One process holds all examples and all parameters, so every method adds nothing. If either is ever split over devices,
    the reduction belongs here and nowhere else.
    """

    def over_examples(self, partial: Tensor) -> Tensor:
        """The sum over all examples, given the sum over those held here."""
        return partial

    def mean_over_examples(self, values: Tensor) -> Tensor:
        """The mean over all examples, (chains,), given the values of those held here, (chains, examples)."""
        return values.mean(1)

    def over_parameters(self, partial: Tensor) -> Tensor:
        """The sum over all parameters, given the sum over those held here."""
        return partial


sums = Sums()
"""The one in use."""
