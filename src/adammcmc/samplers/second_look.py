"""What is checked of a target at the end of a run: whether it is still the same function, and how precise its values are.

A log density with a state of its own (a schedule, a running average, random numbers that set in late) gives equal values
in two calls at the start. Its value at the starting points, now and then, shows the change of a whole run.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adammcmc.target.leaves import Leaves, Setting
from adammcmc.target.resolution import Resolution, agree, spacing

if TYPE_CHECKING:
    from adammcmc.samplers.chains import Chains

__all__ = ["NOTHING", "Mark", "SecondLook", "change_since", "mark", "second_look"]

_REDUCED = (torch.bfloat16, torch.float16)


class SecondLook(NamedTuple):
    """The result."""

    change: float = 0.0
    """The largest change of U at a starting point since the first step, in nats; 0 within rounding."""
    coarse: str = ""
    """The resolution of U in nats, where it is poor, with the reason."""


NOTHING = SecondLook()
"""Nothing was found."""


def second_look(potential: Any, start: Leaves, first: Tensor, losses: Tensor) -> SecondLook:
    """Look at a density of fixed data again.

    Args:
        potential: the density.
        start: where the chains started.
        first: the losses there before the first step, (chains,).
        losses: those where the chains are now.
    """
    with _Dtypes() as seen:
        again = potential.evaluate(start, with_grad=False).losses
    change = _change(again, first, potential.scale)
    if reduced := [_name(kind) for kind in _REDUCED if kind in seen.dtypes]:
        return SecondLook(change, f"log_density is computed in {' and '.join(reduced)} in part")
    found = Resolution(float(spacing(losses, potential.scale).max()), f"spacing of {_name(losses.dtype)} log densities")
    return SecondLook(change, found.approximation if found.is_coarse and math.isfinite(found.nats) else "")


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


class Mark(NamedTuple):
    """A point of the chains of a network, and their losses there."""

    params: Leaves
    losses: Tensor


@torch.no_grad()
def mark(chains: Chains) -> Mark | None:
    """Where the chains are now; None unless their data are fixed."""
    if chains.here is None:
        return None
    return Mark(tuple(x.detach().clone() for x in chains.network.take()), chains.here.losses.clone())


@torch.no_grad()
def change_since(then: Mark, chains: Chains, loss: Any, batch: Any) -> float:
    """How much U has changed at the marked point, in nats; 0 within rounding. Nothing of the evaluation stays."""
    network, scale = chains.network, chains.owner.scale
    with chains.on_device(), torch.random.fork_rng([chains.device] if chains.device.type == "cuda" else []):
        potential: Any = network.potential(loss, batch, None)
        with network.trial(potential):
            again = potential.evaluate(then.params, with_grad=False).losses
    return _change(again, then.losses, scale, slack=1e-4 if network.layers.reduced else 0.0)


def _change(again: Tensor, known: Tensor, scale: Setting, slack: float = 0.0) -> float:
    if agree(again, known, scale, slack=slack):
        return 0.0
    difference = again.double() - known.double()
    difference = difference.mean(1) if difference.dim() > 1 else difference
    return float((scale * difference.abs()).nan_to_num(nan=math.inf).max())


class _Dtypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the dtypes of all results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, Tensor):
                self.dtypes.add(part.dtype)
        return result
