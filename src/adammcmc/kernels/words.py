"""The settings of a kernel in words, for `Kernel.describe`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from adammcmc.acceptance import AcceptanceTest
from adammcmc.target.leaves import Leaves, Settings

__all__ = ["acceptance_in_words", "exactness", "number", "preconditioner_in_words", "setting"]

_FEW = 4  # values that are written out


def number(value: float) -> str:
    """Four digits."""
    return f"{float(value):.4g}"


def setting(name: str, value: Settings) -> str:
    """A setting: one number, one per leaf, or the range over the chains.

    Example:
        >>> import torch
        >>> setting("step size", 0.1), setting("sigma", [0.1, 0.2]), setting("lr", torch.tensor([0.1, 0.3]))
        ('step size 0.1', 'sigma [0.1, 0.2] by leaf', 'lr 0.1 to 0.3 by chain')
    """
    if isinstance(value, list) and (len(value) == 1 or all(not isinstance(v, Tensor) and v == value[0] for v in value)):
        value = value[0]
    if not isinstance(value, list):
        return f"{name} {_one(value)}"
    if len(value) <= _FEW:
        return f"{name} [{', '.join(_one(v).removesuffix(' by chain') for v in value)}] by leaf"
    low, high = (f([float(f(v)) if isinstance(v, Tensor) else v for v in value]) for f in (min, max))
    return f"{name} {number(low)} to {number(high)} by leaf"


def _one(value: float | Tensor) -> str:
    if isinstance(value, Tensor) and value.dim() == 1:
        return f"{number(float(value.min()))} to {number(float(value.max()))} by chain"
    return number(float(value))


def preconditioner_in_words(diagonal: Leaves | Any | None) -> str:
    """The kind of the preconditioner; the range of the entries of a diagonal."""
    if diagonal is None:
        return "no preconditioner"
    if not isinstance(diagonal, tuple):  # an object of another kind is called by its class
        return f"{type(diagonal).__name__.lower()} preconditioner"
    low, high = min(float(a.min()) for a in diagonal), max(float(a.max()) for a in diagonal)
    return f"diagonal preconditioner ({low:.2g} to {high:.2g})"


def acceptance_in_words(acceptance: AcceptanceTest, *, fixed_data: bool | None) -> str:
    """The acceptance test; on fixed data, or a density, every test on the batch is plain Metropolis."""
    is_plain = acceptance.is_metropolis and acceptance.uses_batch_only and acceptance.needs_noise
    return "Metropolis" if fixed_data and is_plain else str(acceptance)


def exactness(fixed: Sequence[str], batches: Sequence[str], *, fixed_data: bool | None) -> str:
    """*exact*, or *approximate: why*; both cases if it is open whether the data are fixed.

    `fixed` and `batches`: the reasons for a density or fixed data, and for minibatches.
    """

    def words(reasons: Sequence[str]) -> str:
        return f"approximate: {'; '.join(reasons)}" if reasons else "exact"

    if fixed_data is not None or list(fixed) == list(batches):
        return words(fixed if fixed_data in (True, None) else batches)
    more = [reason for reason in batches if reason not in fixed]
    return f"{words(fixed)} (on minibatches {'also: ' + '; '.join(more) if fixed else words(more)})"
