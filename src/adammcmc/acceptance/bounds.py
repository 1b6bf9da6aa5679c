r"""Bounds on how much the loss of one example can change, which `Tuna` and `Confidence` rely on.

    |D_i(theta, tau)| <= c_i M(theta, tau),    M symmetric,    D_i = l_i(tau) - l_i(theta)

(without lambda; with a control variate, D_i is the remainder).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from adammcmc.acceptance.protocol import Comparison
from adammcmc.target.leaves import Leaves, inner

__all__ = ["Bound", "ClampedLoss", "DerivativeBound", "Table", "Tables", "last_layer_bound", "logistic_bound"]


@runtime_checkable
class Bound(Protocol):
    """|D_i| <= c_i M. A bound of your own is a subclass with `weights` and `distance`."""

    order: int = 0
    """The order of the control variate that the bound is for; 0 for none."""

    def weights(self, num_examples: int, device: torch.device) -> Tensor:
        """c_i, (n,), float64, not negative. Called once."""

    def distance(self, params: Leaves, proposed: Leaves, reference: Leaves | None) -> Tensor:
        """M, (chains,), float64, symmetric in the two points.

        `reference`: that of the control variate, with a chain axis of length 1; None without one.
        """


@dataclass(frozen=True, eq=False)
class DerivativeBound(Bound):
    r"""From a bound on a derivative. Exact if the bound is true.

        |d^(k+1) l_i| <= c_i   =>   |D_i| <= c_i |tau - theta| r^k / k!,
        r = max(|theta - reference|, |tau - reference|)

    where D_i is the remainder after the Taylor polynomial of order k at the reference (k = 0: nothing is subtracted,
    and c_i is a Lipschitz constant). The gradient of this remainder is itself a remainder of order k: at most
    c_i |x - reference|^k / k! at a point x, and no point between theta and tau is farther from the reference than the
    farther of the two.

    Args:
        constants: c_i, (n,): bounds of the derivative of order `order` + 1 (its operator norm), one per example.
        order: k, that of the control variate, whose reference is used; 0 without one.
    """

    constants: Tensor
    order: int = 0

    def __post_init__(self) -> None:
        c = self.constants
        if c.dim() != 1 or not bool((c.isfinite() & (c >= 0)).all()) or not bool((c > 0).any()):
            raise ValueError("the constants of a bound must be positive and finite, one per example, shape (n,).")
        _check_order(self.order)

    def weights(self, num_examples: int, device: torch.device) -> Tensor:
        if len(self.constants) != num_examples:
            raise ValueError(f"the bound has {len(self.constants)} constants for {num_examples} examples.")
        return self.constants.to(device, torch.float64)

    def distance(self, params: Leaves, proposed: Leaves, reference: Leaves | None) -> Tensor:
        step = _distance(params, proposed)
        if self.order == 0:
            return step
        assert reference is not None
        far = torch.maximum(_distance(params, reference), _distance(proposed, reference))
        return step * far**self.order / math.factorial(self.order)


@dataclass(frozen=True)
class ClampedLoss(Bound):
    """|D_i| <= maximum, for losses in [0, maximum]. True only if the MODEL clamps its loss: the test does not."""

    maximum: float

    def __post_init__(self) -> None:
        if not 0 < self.maximum < math.inf:
            raise ValueError(f"`maximum` must be positive and finite, got {self.maximum}.")

    def weights(self, num_examples: int, device: torch.device) -> Tensor:
        return torch.full((num_examples,), float(self.maximum), dtype=torch.float64, device=device)

    def distance(self, params: Leaves, proposed: Leaves, reference: Leaves | None) -> Tensor:
        return torch.ones(params[0].shape[0], dtype=torch.float64, device=params[0].device)


def logistic_bound(inputs: Tensor, order: int = 0) -> DerivativeBound:
    r"""For the logistic loss l_i = log(1 + e^(-y_i x_i . theta)), y_i = -1 or 1.

    Its derivatives of order 1, 2, 3 are at most |x_i|, |x_i|^2 / 4, |x_i|^3 / (6 sqrt 3).

    Args:
        inputs: x, (n, P).
        order: of the control variate; 0 without one.
    """
    _check_order(order)
    largest = (1.0, 0.25, 1 / (6 * math.sqrt(3)))[order]
    return DerivativeBound(largest * inputs.double().norm(dim=1) ** (order + 1), order)


def last_layer_bound(features: Tensor, *, bias: bool = True) -> DerivativeBound:
    r"""For cross entropy if only a linear last layer is sampled: |D_i| <= sqrt(2) |(h_i, 1)| |(dW, db)|.

    The gradient of cross entropy with respect to the logits, p - e_y, has norm sqrt(2) at most, and the logits move by
    dW h_i + db.

    Args:
        features: h, (n, width): the fixed inputs of the layer.
        bias: whether the layer has one.
    """
    squares = features.double().square().sum(1) + (1.0 if bias else 0.0)
    return DerivativeBound(squares.mul(2).sqrt())


class Table(NamedTuple):
    """The c_i of a bound in the forms that a step needs."""

    weights: Tensor
    """c_i, (n,), float64."""
    steps: Tensor
    """Their cumulative sums, (n,), to draw examples by weight in O(log n)."""
    largest: Tensor


class Tables:
    """A bound with its tables, computed once per device: no step pays for all n examples."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._made: dict[tuple[int, torch.device], Table] = {}

    def __call__(self, comparison: Comparison) -> tuple[Table, Tensor]:
        """The c_i, and M of this move, (chains,). Refuses a bound for another control variate than the target's."""
        key, control = (comparison.num_examples, comparison.device), comparison.potential.control
        expected = 0 if control is None else control.order
        if self._bound.order != expected:
            what = "there is no control variate" if control is None else f"the control variate is of order {expected}"
            raise ValueError(
                f"the bound is for a control variate of order {self._bound.order} (0: for none), but {what}. A density gets "
                "one by DataDensity(control_variate=...), a sampler by sampler.use_control_variate(order); sample() has none."
            )
        if key not in self._made:
            c = self._bound.weights(*key)
            self._made[key] = Table(c, c.cumsum(0), c.max())
        reference = None if control is None else control.reference
        return self._made[key], self._bound.distance(comparison.params, comparison.proposed, reference)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tables, (self._bound,)  # copies and pickles compute their own


def _check_order(order: int) -> None:
    if order not in (0, 1, 2):
        raise ValueError(f"`order` must be that of the control variate, 1 or 2, or 0 without one, got {order!r}.")


def _distance(a: Leaves, b: Leaves) -> Tensor:
    differences = [(x - y).double() for x, y in zip(a, b, strict=True)]
    return torch.stack([inner(d, d) for d in differences]).sum(0).sqrt()
