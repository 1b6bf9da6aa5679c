"""Running mean and variance of the weights, for runs that keep few or no draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Moments"]


class Moments:
    """Mean and variance of the weights over draws (Welford's recursion), in float64 on the host.

    Args:
        state: `state_dict` of moments to continue from.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.count = 0 if state is None else int(state["count"])
        self._mean: dict[str, Tensor] = {} if state is None else {k: v.clone() for k, v in state["mean"].items()}
        self._squares: dict[str, Tensor] = {} if state is None else {k: v.clone() for k, v in state["squares"].items()}

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add one draw."""
        self.count += 1
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                continue
            value = tensor.detach().to("cpu", torch.float64)
            if name not in self._mean:
                self._mean[name], self._squares[name] = torch.zeros_like(value), torch.zeros_like(value)
            deviation = value - self._mean[name]
            self._mean[name] += deviation / self.count
            self._squares[name] += deviation * (value - self._mean[name])

    def merge(self, other: Moments) -> None:
        """Include the draws of another chain."""
        if other.count == 0:
            return
        total = self.count + other.count
        for name, mean in other._mean.items():
            own = self._mean.get(name, torch.zeros_like(mean))
            shift = mean - own
            squares = self._squares.get(name, torch.zeros_like(mean)) + other._squares[name]
            self._squares[name] = squares + shift.square() * (self.count * other.count / total)
            self._mean[name] = own + shift * (other.count / total)
        self.count = total

    @property
    def mean(self) -> dict[str, Tensor]:
        return dict(self._mean)

    @property
    def variance(self) -> dict[str, Tensor]:
        """Over the draws, divided by their number."""
        return {name: squares / max(1, self.count) for name, squares in self._squares.items()}

    def state_dict(self) -> dict[str, Any]:
        """count, mean, and squares = count * variance."""
        return {"count": self.count, "mean": self._mean, "squares": self._squares}
