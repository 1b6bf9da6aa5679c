r"""The target of a network, and the potential U by which a kernel sees any target.

    p(theta) ~ exp(-U(theta)),    U(theta) = lambda * sum_i l_i(theta) - log prior(theta)

`inverse_temperature` = lambda multiplies the SUM of the losses over the data set of `num_data` = n examples; 1 is
Bayes. A batch estimates U by lambda * n * (mean loss) - log prior. Gradients are taken of V = U / (lambda n), the mean
loss minus log prior / (lambda n), so that Adam's moments have their usual units. In a `Density`, lambda = n = 1 and
V = U.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from adammcmc.target.control import Control
from adammcmc.target.leaves import Leaves, Setting
from adammcmc.target.priors import Prior
from adammcmc.target.sums import sums

__all__ = ["Evaluation", "Potential", "Target", "potential_difference"]


@dataclass(frozen=True)
class Target:
    """exp(-lambda * sum of losses) * prior: the tempered (Gibbs) posterior, eq. (1) of the paper, in our units.

    Args:
        num_data: n, the number of examples in the training set (not in the batch).
        inverse_temperature: lambda, the factor of the sum of the losses. 1 is Bayes if the loss is a negative log
            likelihood.
        prior: None is flat and improper.
    """

    num_data: int
    inverse_temperature: float = 1.0
    prior: Prior | None = None

    def __post_init__(self) -> None:
        if type(self.num_data) is bool or not hasattr(self.num_data, "__index__") or self.num_data < 1:
            raise ValueError(f"`num_data` must be the number of training examples, at least 1, got {self.num_data!r}.")
        if not (self.inverse_temperature > 0 and math.isfinite(self.inverse_temperature)):
            raise ValueError(f"`inverse_temperature` must be positive and finite, got {self.inverse_temperature}.")

    @property
    def scale(self) -> float:
        """lambda * n, which turns V (a mean) into U (a sum)."""
        return self.inverse_temperature * self.num_data

    def __str__(self) -> str:
        prior = "flat, improper" if self.prior is None else str(self.prior)
        return (
            f"p(theta) ~ exp(-lambda * sum_i loss_i) * prior | lambda = {self.inverse_temperature:.4g} "
            f"(T = {1 / self.inverse_temperature:.4g}), n = {self.num_data} | prior: {prior}"
        )


class Evaluation(NamedTuple):
    """The target at one point."""

    losses: Tensor
    """(chains,) for a mean loss, or (chains, batch) for per-example losses."""
    log_prior: Tensor
    """(chains,), float64, up to a constant."""
    grad: Leaves | None
    """Gradient of V; None if it was not requested."""


class Potential(Protocol):
    """The target as a kernel sees it."""

    @property
    def scale(self) -> Setting:
        """lambda * n: U = scale * V. One number, or one per chain."""

    @property
    def inverse_temperature(self) -> Setting:
        """lambda: one number, or one per chain."""

    fixed: bool
    """Whether every evaluation uses the same data, so that values can be reused at the next step."""
    is_bounded: bool
    """Whether the prior is zero somewhere, so that it pays to check it before evaluating the loss."""
    can_narrow: bool
    """Whether `example_losses` accepts the parameters of a subset of the chains."""

    @property
    def num_examples(self) -> int | None:
        """How many examples `example_losses` can evaluate; None if it cannot."""

    @property
    def control(self) -> Control | None:
        """The control variate of the per-example losses, if there is one."""

    def evaluate(self, params: Leaves, *, with_grad: bool) -> Evaluation:
        """The losses, the log prior and, if requested, the gradient of V at `params`."""

    def force(self, params: Leaves) -> Leaves:
        """The gradient of V alone: all that the points inside of a trajectory need."""
        grad = self.evaluate(params, with_grad=True).grad
        assert grad is not None
        return grad

    @property
    def num_parts(self) -> int:
        """How many parts the data come in, each of which gives an estimate of the force (`force_of`)."""
        return 1

    def force_of(self, params: Leaves, part: int) -> Leaves:
        """The gradient of V as this part of the data estimates it, the prior's included. The mean over the parts is `force`."""
        return self.force(params)

    def evaluate_some(self, params: Leaves, chains: Tensor) -> Evaluation:
        """The same, with its gradient, of the chains in this mask, (chains,); the numbers of the others mean nothing."""
        return self.evaluate(params, with_grad=True)

    def evaluate_weighted(self, params: Leaves, weights: Tensor) -> Evaluation:
        """The same with (1/n) sum_i w_i l_i, (chains,), float64, in place of the mean loss, always with its gradient.

        `weights`: (chains, num_examples). Only examples with a nonzero weight in some chain are evaluated.
        """

    def compare(self, current: Evaluation, proposed: Evaluation) -> Tensor:
        """U(proposed) - U(current), (chains,), float64."""
        return potential_difference(self.scale, current, proposed)

    def log_prior(self, params: Leaves) -> Tensor:
        """log prior, (chains,), float64, without evaluating the loss."""

    def prior_part(self, params: Leaves) -> Leaves | None:
        """The prior's part of the gradient of V; None where there is none that could be told from the data's."""
        return None

    def example_losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        """Losses of selected examples, (chains, examples), without gradient; `indices` may have one row per chain."""


def potential_difference(scale: Setting, current: Evaluation, proposed: Evaluation) -> Tensor:
    """scale * mean_i (l_i(tau) - l_i(theta)) - (log prior(tau) - log prior(theta)), (chains,), in float64.

    Losses are subtracted one by one before they are averaged and scaled: with n = 1e6, the difference of two scaled
    float32 means would magnify their rounding error a million times.
    """
    difference = proposed.losses.double() - current.losses.double()
    mean = difference if difference.dim() == 1 else sums.mean_over_examples(difference)
    if proposed.log_prior is current.log_prior:  # a flat prior's zero
        return scale * mean
    return scale * mean - (proposed.log_prior - current.log_prior)
