r"""Control variates: the part of the losses given by a Taylor polynomial need not be estimated.

    T_i(theta) = l_i + g_i . e + e' H_i e / 2,    e = theta - reference;  l_i, g_i, H_i at the reference
    T_i(tau) - T_i(theta) = g_i . d + d' H_i (tau + theta - 2 reference) / 2,    d = tau - theta

The sum over all i is known exactly from G = sum g_i and H = sum H_i, kept in float64 after one pass over the data. A
test then estimates only the sum of the remainders D_i - (T_i(tau) - T_i(theta)), which are small near the reference.
This works with any test, since `Comparison` subtracts and adds it. No choice of reference biases an unbiased estimate.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from adammcmc.target.leaves import Leaves

__all__ = ["Control", "ControlVariate", "Taylor", "check_order"]

_CHUNK = 1024
_COLUMNS = 64  # of the Hessian at once: this many times the memory of a forward pass
_MOST_PARAMS = 2000  # for a Hessian, P x P in float64


class Control(Protocol):
    """The known part of the change of the losses."""

    order: int
    """Order of the polynomial."""
    reference: Leaves
    """The expansion point, with a chain axis of length 1."""

    def total(self, params: Leaves, proposed: Leaves) -> Tensor:
        """sum_i of T_i(tau) - T_i(theta) over all examples, (chains,), float64."""

    def differences(self, params: Leaves, proposed: Leaves, indices: slice | Tensor) -> Tensor:
        """T_i(tau) - T_i(theta) of selected examples, (chains, examples), float64."""


@dataclass(frozen=True, eq=False)
class ControlVariate:
    """A Taylor polynomial of each loss at a reference, near which the chains run.

    Args:
        reference: in the structure of the parameters, without a chain axis; ideally the mode, or a point near the mean.
        order: 1 (gradients: any number of parameters) or 2 (Hessians too: up to 2000).
    """

    reference: Any
    order: int = 2

    def __post_init__(self) -> None:
        check_order(self.order)


def check_order(order: int, num_params: int = 0) -> None:
    """The summed Hessian is stored: Hessian-vector products would need a pass over all data at each step."""
    if type(order) is not int or order not in (1, 2):
        raise ValueError(f"`order` must be 1 or 2, got {order!r}.")
    if order == 2 and num_params > _MOST_PARAMS:
        raise ValueError(
            f"a control variate of order 2 stores the Hessian of {num_params} parameters; the limit is {_MOST_PARAMS}. "
            "Use order=1."
        )


class Taylor:
    """A control variate for a loss of one chain's parameters and some rows of the data.

    Args:
        losses: (leaves of one chain, rows of the tensors) -> (rows,).
        tensors: the data.
        reference: leaves, without a chain axis.
        order: 1 or 2.
    """

    def __init__(
        self, losses: Callable[[Leaves, list[Tensor]], Tensor], tensors: Sequence[Tensor], reference: Leaves, order: int
    ) -> None:
        _load_forward_mode()
        self._losses, self._tensors, self.order = losses, tensors, order
        self._reference = tuple(x.detach().clone() for x in reference)
        self.reference = tuple(x[None] for x in self._reference)
        size = sum(x.numel() for x in reference)
        check_order(order, size)
        shapes = [x.shape for x in reference]
        flat = torch.cat([x.reshape(-1).double() for x in self._reference])

        def total(point: Tensor, rows: list[Tensor]) -> Tensor:
            parts = torch.split(point, [math.prod(shape) for shape in shapes])
            return losses(tuple(p.view(shape) for p, shape in zip(parts, shapes, strict=True)), rows).sum()

        self._grad, self._hessian = torch.zeros_like(flat), flat.new_zeros(size if order == 2 else 0, size)
        axes = torch.split(torch.eye(size if order == 2 else 0, size, dtype=flat.dtype, device=flat.device), _COLUMNS)
        for i in range(0, len(tensors[0]), _CHUNK):
            rows = [t[i : i + _CHUNK] for t in tensors]
            rows = [t.double() if t.is_floating_point() else t for t in rows]
            slope = functools.partial(grad(total), rows=rows)
            self._grad += slope(flat)
            if order == 2:
                self._hessian += torch.cat([vmap(lambda axis, f=slope: jvp(f, (flat,), (axis,))[1])(some) for some in axes])

    def total(self, params: Leaves, proposed: Leaves) -> Tensor:
        # (moves in the dtype used by `differences`, so that what is added here is what is subtracted there)
        step, middle = (_flat(x) for x in self._moves(params, proposed))
        known = step @ self._grad
        return known if self.order == 1 else known + 0.5 * ((step @ self._hessian) * middle).sum(1)

    def differences(self, params: Leaves, proposed: Leaves, indices: slice | Tensor) -> Tensor:
        rows = [t[indices] for t in self._tensors]
        own = 0 if isinstance(indices, Tensor) and indices.dim() > 1 else None

        def one(step: Leaves, middle: Leaves, rows: list[Tensor]) -> Tensor:
            def slope(*at: Tensor) -> Tensor:
                change: Tensor = jvp(lambda *point: self._losses(point, rows), at, step)[1]
                return change

            if self.order == 1:
                return slope(*self._reference).double()
            changes: tuple[Tensor, ...] = jvp(slope, self._reference, middle)
            return changes[0].double() + 0.5 * changes[1].double()

        with torch.no_grad():
            known: Tensor = vmap(one, in_dims=(0, 0, own))(*self._moves(params, proposed), rows)
        return known

    def _moves(self, params: Leaves, proposed: Leaves) -> tuple[Leaves, Leaves]:
        """d = tau - theta, and tau + theta - 2 reference."""
        pairs = list(zip(params, proposed, self._reference, strict=True))
        return tuple(y - x for x, y, _ in pairs), tuple((x - r) + (y - r) for x, y, r in pairs)


@functools.cache
def _load_forward_mode() -> None:
    """On its first use of forward mode, torch warns about scripts of its own; a user can do nothing about that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def _flat(leaves: Leaves) -> Tensor:
    """(chains, P), float64."""
    return torch.cat([x.reshape(x.shape[0], -1).double() for x in leaves], 1)
