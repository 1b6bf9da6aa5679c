"""One process for one chain: what runs in several processes at once is refused, with the reason.

Ranks that share a chain would each draw their own noise and decide on their own part of the data, so that their
weights drift apart while every rank reports a healthy chain. (Measured with two ranks: weights differ by .2 after 300
steps of `AdamMCMC`, by 2.6 after 300 of `Underdamped`.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed
from torch import Tensor, nn

from adammcmc.errors import ManyProcesses

__all__ = ["check_module", "check_not_distributed", "check_one_process", "check_parameters"]

_WHY = (
    "Each rank would draw its own noise and accept or reject on its own data, so that the weights of the ranks drift apart. "
    "Run one chain in each process, without torch.distributed.init_process_group"
)


def check_one_process() -> None:
    """Raise `ManyProcesses` in a process group of two or more. Costs less than a microsecond, for every step."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    if (size := torch.distributed.get_world_size()) > 1:
        raise ManyProcesses(f"this process is one of {size} in a process group (torch.distributed). {_WHY}.")


def check_module(module: nn.Module) -> None:
    """Raise `ManyProcesses` if this very module is spread over processes (those inside of it are not looked at)."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        kind, remedy = "DistributedDataParallel", " and pass the module inside, model.module"
    elif isinstance(module, _classes("torch.distributed.fsdp", "FullyShardedDataParallel", "FSDPModule")):
        kind, remedy = "FSDP", " and pass a module that is not sharded"
    else:
        return
    raise ManyProcesses(
        f"the model is, contains or is called through a {kind} module ({type(module).__name__}). {_WHY},{remedy}."
    )


def check_parameters(params: Iterable[Tensor]) -> None:
    """Raise `ManyProcesses` if a parameter is a DTensor, of which each process holds a part."""
    if not (sharded := _classes("torch.distributed.tensor", "DTensor")):
        return
    for p in params:
        if isinstance(p, sharded):
            raise ManyProcesses(
                f"a parameter of shape {tuple(p.shape)} is a DTensor, of which each process holds a part. {_WHY}, and pass a "
                "module with plain tensors."
            )


def check_not_distributed(model: nn.Module) -> None:
    """All of the above, for a model with everything inside of it."""
    check_one_process()
    for module in model.modules():
        check_module(module)
    check_parameters(model.parameters())


def _classes(room: str, *names: str) -> tuple[type[Any], ...]:
    """The classes of these names; none before torch has imported them: then nothing can be an instance."""
    module = sys.modules.get(room)
    return tuple(kind for name in names if isinstance(kind := getattr(module, name, None), type))
