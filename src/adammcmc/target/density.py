"""A log density of many chains at once, as a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adammcmc.target.leaves import Leaves, flatten, unflatten
from adammcmc.target.potential import Evaluation, Potential

__all__ = ["Density", "checked_density"]


class Density(Potential):
    """A differentiable log density of many chains at once, as a potential: U = -log_density.

    `log_density` maps a tensor of shape (chains, dim), or a pytree of tensors (chains, ...), to (chains,). It returns
    -inf outside the support, and must treat the chains independently.
    """

    scale = 1.0
    inverse_temperature = 1.0
    fixed = True
    is_bounded = False  # there is no prior: the density itself has the support
    can_narrow = False
    num_examples = None
    control = None
    known = None

    def __init__(self, log_density: Callable[[Any], Tensor], like: Any = None) -> None:
        """`like`: parameters with the structure that `log_density` takes, if they are not one tensor."""
        self._log_density = log_density
        self._structure = flatten(torch.empty(0) if like is None else like)[1]

    def evaluate(self, params: Leaves, *, with_grad: bool) -> Evaluation:
        with torch.set_grad_enabled(with_grad):
            leaves = tuple(x.detach().requires_grad_(with_grad) for x in params)
            try:
                value = checked_density(self._log_density(unflatten(leaves, self._structure)), params[0].shape[0])
            except ValueError as error:
                if "support" in str(error):  # torch.distributions refuses the whole batch for one bad proposal
                    error.add_note(
                        "A proposal may lie outside the support, or at its edge by rounding; it should be rejected, not "
                        "raise. Pass validate_args=False to the distribution."
                    )
                raise
            grad: Leaves | None = None
            if with_grad and value.requires_grad:
                # may be NaN outside the support, but such a point is never accepted
                grad = torch.autograd.grad(-value.sum(), leaves, materialize_grads=True)
            elif with_grad:  # a constant, such as a uniform density
                grad = tuple(torch.zeros_like(x) for x in params)
        return Evaluation(-value.detach(), self.log_prior(params), grad)

    def next_batch(self, params: Leaves, generator: Any) -> Density:
        """The potential of one step: always itself."""
        return self

    def log_prior(self, params: Leaves) -> Tensor:
        return torch.zeros(params[0].shape[0], dtype=torch.float64, device=params[0].device)

    def example_losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        raise TypeError("a density has no examples: it is the full data already.")

    def evaluate_weighted(self, params: Leaves, weights: Tensor) -> Evaluation:
        raise TypeError("a density has no examples: it is the full data already.")

    def __str__(self) -> str:
        return "p ~ exp(log_density)"


def checked_density(value: Any, num_chains: int) -> Tensor:
    """The value of a log density, if it is one real floating-point number per chain."""
    if not isinstance(value, Tensor):
        raise TypeError(f"log_density must return a tensor, got {type(value).__name__}.")
    if value.shape != (num_chains,):
        raise ValueError(
            f"log_density must return one number for each chain, shape {(num_chains,)}, "
            f"got {tuple(value.shape)}. Sum over the coordinates: log_density maps (chains, dim) to (chains,)."
        )
    if value.dtype not in (torch.float32, torch.float64):
        remedy = "compute it in float32 or float64"
        if not value.is_floating_point():
            remedy = "return a log probability, not a count or a truth value"
        raise TypeError(
            f"log_density must return float32 or float64, got {value.dtype}: acceptance depends on differences of about "
            f"one; {remedy}."
        )
    return value
