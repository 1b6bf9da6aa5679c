"""Steps of an optimizer: the baselines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

__all__ = ["Training"]


class Training:
    """Steps of an optimizer; on a GPU as one CUDA graph for each shape of the batch, after three steps as usual."""

    def __init__(self, optimizer: torch.optim.Optimizer, loss: Callable[[Any], Tensor], device: torch.device) -> None:
        self.optimizer, self._loss, self._is_cuda = optimizer, loss, device.type == "cuda"
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}
        self._steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Of the optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of the optimizer, before its first step."""
        self.optimizer.load_state_dict(state)

    def step(self, batch: Any) -> Tensor:
        """One step; the loss."""
        self._steps += 1
        if not self._is_cuda or self._steps <= 3:
            return self._usual(batch)
        leaves, structure = _pytree.tree_flatten(batch)
        shapes = tuple(x.shape for x in leaves)
        if shapes not in self._graphs:
            if len(self._graphs) >= 4:  # a batch that did not fit its capacity
                return self._usual(batch)
            static = [x.clone() for x in leaves]
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                loss = self._usual(_pytree.tree_unflatten(static, structure))
            self._graphs[shapes] = graph, static, loss
        graph, static, loss = self._graphs[shapes]
        torch._foreach_copy_(static, leaves)
        graph.replay()
        return loss.clone()

    def _usual(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()
