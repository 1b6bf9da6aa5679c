"""One process per chain: several processes that share a model are refused.

Ranks that share a chain would each draw their own noise and decide on their own part of the data. Their weights would
drift apart while every rank reports a healthy chain. (Measured with two ranks: weights differ by 0.2 after 300 steps of
`AdamMCMC`, by 2.6 after 300 of `Underdamped`.)
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
    "Each rank would draw its own noise and accept or reject on its own data, so the ranks' weights would drift apart. "
    "Run one chain per process, without torch.distributed.init_process_group"
)


def check_one_process() -> None:
    """Raise `ManyProcesses` in a process group of two or more. It costs less than a microsecond, at every step."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    if (size := torch.distributed.get_world_size()) > 1:
        raise ManyProcesses(f"this process is one of {size} in a process group (torch.distributed). {_WHY}.")


def check_module(module: nn.Module) -> None:
    """Raise `ManyProcesses` if this module itself, apart from those inside it, is spread over processes."""
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
                f"a parameter of shape {tuple(p.shape)} is a DTensor, of which each process holds a part. {_WHY}, and "
                "use a module with plain tensors."
            )


def check_not_distributed(model: nn.Module) -> None:
    """All of these checks, for a model and everything inside it."""
    check_one_process()
    for module in model.modules():
        check_module(module)
    check_parameters(model.parameters())


def _classes(name: str, *names: str) -> tuple[type[Any], ...]:
    """These classes of a module; none before it is imported, when nothing can be an instance."""
    module = sys.modules.get(name)
    return tuple(kind for each in names if isinstance(kind := getattr(module, each, None), type))
