r"""The curvature of the data where chains stand, from the gradients of batches: a metric for chains that are not at rest yet.

    F = (lambda n)^2 / lambda * (b / n) Var_B (grad lbar_B),      A = 1 / (F + q)

over 64 batches B of b examples, one pass over the data; q: the precision of the prior. F is the diagonal of the empirical
Fisher information, lambda sum_i (grad l_i)^2, but for the square of the mean gradient. The gradient of all data along a
chain (`samplers.metric`) has the same second moment once the chain is at rest. Before that it reflects how far away
the chain is, along a few stiff directions to which every weight contributes. All steps then become too short, and weights that
the data do not determine take thousands of steps to spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from adammcmc.target.batches import Batch, Parts, joined_batches, num_rows, part_of, to_device
from adammcmc.target.leaves import Leaves, by_chain, widen

__all__ = ["BatchMetric", "fisher_metric"]

LARGE = 10_000
"""Weights from which on burn-in takes its metric from batches: few directions are stiff, and steps are expensive."""
_BATCHES = 64
_STRETCHES = 16


class BatchMetric:
    """The metric of batches during a burn-in, averaged over the places where it was taken.

    Args:
        precision: of the prior, in the shapes of the leaves.
    """

    def __init__(self, precision: Leaves) -> None:
        self._precision = precision
        self.value: Leaves | None = None
        """None until it is known."""
        self.is_possible = True
        """Whether the data can be divided, as far as that is known."""

    @classmethod
    def of(cls, precision: Leaves | None, num_params: int) -> BatchMetric | None:
        """For networks of this size with this prior; None where the metric is learnt along the chains."""
        if precision is None or num_params < LARGE or not all(bool((q > 0).all()) for q in precision):
            return None
        return cls(precision)

    def update(self, network: Any, loss: Any, batch: Batch) -> float:
        """Update it at the chains' present weights. Returns the decrease of the logarithm of its unit, A^1/2.

        One position does not represent the whole target: the metric is a geometric mean over positions, in which the weights
        of the earlier ones halve at each update. The first update replaces the metric of the prior.
        """
        found = fisher_metric(network, loss, batch, self._precision) if self.is_possible else None
        if found is None:
            self.is_possible = self.value is not None
            return 0.0
        before = tuple(1 / q for q in self._precision) if self.value is None else self.value
        self.value = found if self.value is None else tuple((a * b).sqrt() for a, b in zip(found, before, strict=True))
        old, new = (sum(float(a.double().sum()) for a in metric) for metric in (before, self.value))
        return 0.5 * math.log(old / new)

    def like(self, params: Leaves) -> Leaves | None:
        """In the dtypes of a velocity of these weights."""
        return None if self.value is None else tuple(a.to(widen(x).dtype) for a, x in zip(self.value, params, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """As lists, tensors and numbers."""
        return {"value": None if self.value is None else list(self.value), "is_possible": self.is_possible}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.value, self.is_possible = None if state["value"] is None else tuple(state["value"]), state["is_possible"]


def fisher_metric(network: Any, loss: Any, batch: Batch, precision: Leaves) -> Leaves | None:
    """A at the chains' present weights, its median over them; None where the batch cannot be divided.

    Args:
        network: the chains'.
        loss: of a batch.
        batch: all data; None where the loss has no batch.
        precision: of the prior, in the shapes of the leaves.
    """
    batches = None if batch is None else _divided(batch)
    if batches is None:
        return None
    whole = network.potential(loss, batch, None)
    sums: list[list[Tensor]] | None = None
    count = 0
    devices = [network.device] if network.device.type == "cuda" else []
    with network.trial(whole) as params, torch.random.fork_rng(devices):
        for part in batches:
            potential = network.potential(loss, to_device(part, network.device), None)
            potential.fixed, potential.is_rough = False, potential.can_be_rough  # one batch of many, and no test
            grad = [g.double() for g in potential.force(params)]
            if sums is None:
                first, sums = grad, [[torch.zeros_like(g) for g in grad] for _ in range(2)]
            grad = [g - start for g, start in zip(grad, first, strict=True)]
            torch._foreach_add_(sums[0], grad)
            torch._foreach_addcmul_(sums[1], grad, grad)
            count += 1
    assert sums is not None
    found = []
    for total, squares, q in zip(*sums, precision, strict=True):
        variance = (squares - total.square() / count).clamp_min(0) / (count - 1)
        # (b / n) (lambda n)^2 / lambda, with b = n / count
        unit = torch.as_tensor(whole.scale, dtype=torch.float64, device=total.device).square() / count
        unit = unit / torch.as_tensor(whole.inverse_temperature, dtype=torch.float64, device=total.device)
        curvature = (variance * by_chain(unit, variance)).median(0).values if len(variance) > 1 else variance[0] * unit
        found.append((1 / (curvature + q)).to(total.dtype))
    if not all(bool(a.isfinite().all()) for a in found):
        return None
    return tuple(found)


def _divided(batch: Batch) -> Iterator[Batch] | None:
    """64 batches of one size; what is left over is not used.

    Each takes a few rows from each of many stretches of the data: where data are sorted by class, consecutive rows would differ
    from one batch to the next by their class, and the variance would be up to b times too large.
    """
    wholes = list(batch) if isinstance(batch, Parts) else [batch]
    try:
        rows = list(map(num_rows, wholes))
        part_of(wholes[0], slice(0, 1))
    except Exception:  # rows that cannot be told apart
        return None
    stretches: list[tuple[Batch, int, int]] = []  # of which part, from which row on, how many rows for each batch
    for whole, count in zip(wholes, rows, strict=True):
        number = max(1, min(-(-_STRETCHES // len(wholes)), count // _BATCHES))
        length = count // number
        stretches += [(whole, i * length, length // _BATCHES) for i in range(number) if length >= _BATCHES]
    if not stretches:
        return None
    return (
        joined_batches([part_of(whole, slice(start + i * size, start + (i + 1) * size)) for whole, start, size in stretches])
        for i in range(_BATCHES)
    )
