"""What burn-in tuned, as arguments of a sampler: from the state of one chain, or of a stack."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from adammcmc.kernels.scaling import Kronecker, restored
from adammcmc.samplers.packing import Packing, padding_rows

__all__ = ["Turned", "tuned_by_burn_in", "tuned_of_chain", "tuned_of_stack"]

Turned = tuple[Tensor, Tensor | None, Tensor | None]
"""A of one parameter in the bases L and R of its rows and columns (None: not turned)."""


def tuned_of_chain(state: dict[str, Any]) -> dict[str, Any]:
    """Settings in the state of a `Sampler`, by their names in its groups; without a burn-in only those that were given."""
    found: dict[str, Any] = {}
    group, own = state["param_groups"][0], state["adammcmc"]
    if own.get("adaptation") is not None:
        names = ("lr", "sigma", "sigma_along")
        found = {key: float(group[key]) for key in names if isinstance(group.get(key), int | float | Tensor)}
    states = [state["state"].get(i, {}) for group in state["param_groups"] for i in group["params"]]
    known = [one for one in states if "preconditioner" in one]
    if any("left" in one or "right" in one for one in known):
        found["preconditioner"] = [tuple(map(_copied, map(one.get, ("preconditioner", "left", "right")))) for one in known]
    elif known:
        found["preconditioner"] = [_copied(one["preconditioner"]) for one in known]
    if (spread := own.get("extra", {}).get("momentum_spread")) is not None:
        found["momentum_spread"] = tuple(spread)
    return found


def tuned_of_stack(state: dict[str, Any], chain: int, model: nn.Module) -> dict[str, Any]:
    """Settings of one chain in the state of a stack, which has those of a kernel, by leaf."""
    found: dict[str, Any] = {}

    def gather(state: dict[str, Any]) -> None:
        for key, value in state.items():
            if isinstance(value, dict):
                gather(value)
                continue
            first = value[0] if isinstance(value, list | tuple) else value
            found[key] = float(first[chain] if isinstance(first, Tensor) and first.dim() == 1 else first)

    if state["adaptation"] is not None:
        gather(state["settings"])
    if state["preconditioner"] is not None:
        metric = _by_parameter(state["preconditioner"], model)
        if metric is not None:
            found["preconditioner"] = metric
        else:  # parameter groups have separate leaves; without its preconditioner a step size is meaningless
            found.pop("step_size", None)
    return found


def tuned_by_burn_in(found: dict[str, Any], *, finds_step: bool) -> dict[str, Any]:
    """Those of the settings that burn-in tunes, as arguments of the sampler; `finds_step`: the step size is one of them."""
    names = {"lr": "step_size", "step_size": "step_size"} if finds_step else {}
    names |= {name: name for name in ("sigma", "sigma_along", "preconditioner", "momentum_spread")}
    return {names[key]: value for key, value in found.items() if key in names}


def _by_parameter(state: dict[str, Any], model: nn.Module) -> list[Tensor] | list[Turned] | None:
    """The metric of a stack for each trainable parameter; None if its leaves are not those of one parameter group."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    padding = padding_rows(model.modules())
    held = {i: tuple(sorted(padding[id(p)])) for i, p in enumerate(trainable) if id(p) in padding}
    packing, metric = Packing(trainable, [0] * len(trainable), held), restored(state)
    if isinstance(metric, Kronecker):
        diagonal = tuple(torch.cat([block.root.flatten().square() for block in row]) for row in metric.blocks)
    else:
        assert isinstance(metric, tuple)
        diagonal = metric
    if [x.numel() for x in packing.new()] != [x.numel() for x in diagonal]:
        return None
    whole = [a.clone() for a in packing.whole(tuple(a.detach().cpu()[None] for a in diagonal), 1.0)]
    if not isinstance(metric, Kronecker):
        return whole
    bases = dict(zip(itertools.chain(*packing.members), itertools.chain(*metric.blocks), strict=True))
    return [(a, _copied(bases[i].left), _copied(bases[i].right)) for i, a in enumerate(whole)]


def _copied(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().to("cpu", copy=True)
