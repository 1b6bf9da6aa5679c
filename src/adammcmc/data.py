"""Serves the losses of chosen examples, for acceptance tests that look at more than this step's batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

__all__ = ["Examples", "TensorExamples"]


class Examples(Protocol):
    """The training set as losses of single examples at the weights that the model holds at the moment."""

    def __len__(self) -> int: ...

    def losses(self, indices: slice | Tensor) -> Tensor:
        """Losses of the chosen examples, shape (len(indices),). Called without gradient."""
        ...


class TensorExamples:
    """Examples held in tensors: `loss(*batch)` gives the losses, one for each example of the batch.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(8, 3), torch.zeros(8, dtype=torch.long)
        >>> examples = TensorExamples(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y)
        >>> examples.losses(slice(0, 4)).shape
        torch.Size([4])
    """

    def __init__(self, loss: Callable[..., Tensor], *tensors: Tensor) -> None:
        if not tensors:
            raise ValueError("`tensors` must hold the data set, for example TensorExamples(loss, inputs, targets).")
        if len({len(t) for t in tensors}) > 1:
            raise ValueError(f"the tensors must have one length, got {[len(t) for t in tensors]}.")
        if len(tensors[0]) == 0:
            raise ValueError("the data set is empty.")
        self._loss = loss
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def losses(self, indices: slice | Tensor) -> Tensor:
        batch = [t[indices] for t in self._tensors]
        losses = self._loss(*batch)
        if losses.shape != (len(batch[0]),):
            raise ValueError(
                f"`loss` must return one loss for each example, shape ({len(batch[0])},), got {tuple(losses.shape)}. "
                'Most losses do with reduction="none".'
            )
        return losses
