"""The training set as per-example losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

__all__ = ["Examples", "TensorExamples"]


class Examples(Protocol):
    """The training set as per-example losses at the model's current weights."""

    def __len__(self) -> int: ...

    def losses(self, indices: slice | Tensor) -> Tensor:
        """Losses of the selected examples, (len(indices),). Called without gradient, except by `CorrectedMALA`."""
        ...


class TensorExamples:
    """Examples held in tensors: `loss(*batch)` gives the losses, one per example of the batch.

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
        return self.losses_of(self.rows(indices))

    def rows(self, indices: slice | Tensor) -> list[Tensor]:
        """The selected examples."""
        return [t[indices] for t in self._tensors]

    def losses_of(self, batch: list[Tensor]) -> Tensor:
        """Losses of these examples."""
        losses = self._loss(*batch)
        if losses.shape != (len(batch[0]),):
            raise ValueError(
                f"`loss` must return one loss for each example, shape ({len(batch[0])},), got {tuple(losses.shape)}. "
                'Most losses do with reduction="none".'
            )
        return losses
