"""What the checkpoint of a sampler stores, and how it is restored: enough to continue bit for bit.

`state_dict` of a sampler is torch's own (parameter groups, state by parameter) and, under one key, what torch would cast or
drop: the generator, counters, the kernel's memory, adaptation and health (`Chains.state_dict`), held rows, and the reference
of a control variate.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from adammcmc.errors import warn
from adammcmc.samplers.adaptation import BurnIn
from adammcmc.samplers.closure import Reference

__all__ = ["KEY", "load", "pickled", "save", "unpickled"]

KEY = "adammcmc"
"""Of our part of the state."""
_CACHES = ("step", "chains", "network", "parameters", "_kernels", "_backend", "_paired")
"""Attributes that are made again; a scheduler wraps `step`."""


def save(sampler: Any, torch_state: dict[str, Any]) -> dict[str, Any]:
    """torch's state of this sampler, completed."""
    own = {
        "sampler": type(sampler).__name__,
        "target": str(sampler.target),
        "held_rows": {i: list(rows) for i, rows in sampler.parameters.held.items()},
        "reference": None if sampler.reference is None else copy.deepcopy(tuple(sampler.reference)),
        "extra": sampler.extra_state(),
        **sampler.chains.state_dict(),
    }
    return {**torch_state, KEY: own}


def load(sampler: Any, state_dict: dict[str, Any]) -> None:
    """Restore a state of this kind of sampler."""
    own = state_dict[KEY]
    if own["sampler"] != type(sampler).__name__:
        raise ValueError(f"this is a state of {own['sampler']}, not of {type(sampler).__name__}.")
    if own["generator"].shape != sampler.generator.get_state().shape:
        raise ValueError("the state was saved on another kind of device: its random numbers cannot be continued here.")
    if own["target"] != str(sampler.target):
        warn(f"the state is of another target: {own['target']}; this sampler's is {sampler.target}.")
    sampler.parameters.held = {int(i): tuple(rows) for i, rows in own["held_rows"].items()}
    sampler.load_torch_state(state_dict)
    _keep_dtypes(sampler, state_dict)
    sampler.load_extra_state(own["extra"])
    if (saved := own["adaptation"]) is not None:  # it continues as saved, whatever this sampler was given
        sampler.burn_in = BurnIn(**saved["settings"])
        sampler.chains.adaptation = sampler.new_adaptation()
        sampler.chains.adaptation.is_done = bool(saved.get("is_done", sampler.chains.adaptation.is_done))
    else:
        sampler.burn_in = sampler.chains.adaptation = None
    sampler.chains.load_state_dict(own)
    reference = _pytree.tree_map_only(Tensor, lambda x: x.to(sampler.device, copy=True), own["reference"])
    sampler.reference = None if reference is None else Reference(*reference)


def _keep_dtypes(sampler: Any, state_dict: dict[str, Any]) -> None:
    """Undo torch's cast of all state to the dtype of its parameter, which would not continue bit for bit."""
    numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
    for i, p in zip(numbers, sampler.parameters.all, strict=True):
        for key, value in state_dict["state"].get(i, {}).items():
            if isinstance(value, Tensor) and sampler.state[p][key].dtype != value.dtype:
                sampler.state[p][key] = value.to(sampler.state[p][key].device, copy=True)


def pickled(sampler: Any) -> dict[str, Any]:
    """For copy and pickle: everything but caches; the chain as its state."""
    kept = {key: value for key, value in sampler.__dict__.items() if key not in _CACHES and "hooks" not in key}
    own = {**sampler.chains.state_dict(), "held_rows": dict(sampler.parameters.held)}
    return {**kept, "generator": (str(sampler.device), sampler.generator.get_state()), KEY: (own, sampler.network.examples)}


def unpickled(sampler: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The attributes that `pickled` kept, with their generator; `sampler.revive` makes the rest."""
    device, numbers_to_come = state["generator"]
    generator = torch.Generator(device)
    generator.set_state(numbers_to_come)
    return {**{key: value for key, value in state.items() if key != KEY}, "generator": generator}
