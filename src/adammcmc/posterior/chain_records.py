"""What is read back from the checkpoints of a run about its chains: health, moments and tuned settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adammcmc.errors import StoreCorrupt
from adammcmc.posterior.store.folder import Store
from adammcmc.samplers.health import Health, read_health
from adammcmc.samplers.packing import Packing, padding_rows
from adammcmc.samplers.running_sums import RunningSums

__all__ = ["ChainRecord", "chain_records", "chain_settings"]


class ChainRecord(NamedTuple):
    """The part of a checkpoint that describes the past of one chain."""

    number: int
    """Of the chain among those of the checkpoint."""
    sums: RunningSums
    context: dict[str, Any]
    moments: dict[str, Any] | None
    """State of `Moments`; None if the run kept none."""

    @property
    def has_potential(self) -> bool:
        """Whether U was computed on all data, not estimated on batches."""
        return bool(self.context["knows_potential"])

    def health(self) -> Health:
        """The self-tests since burn-in."""
        return read_health(self.sums, self.number, **self.context)


def chain_records(store: Store, chains: Sequence[int]) -> dict[int, ChainRecord]:
    """By chain; a chain without a checkpoint is missing. Chains that ran as one stack share a checkpoint."""
    try:
        return _read_records(store, chains)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise StoreCorrupt(f"a checkpoint does not belong to this run ({type(error).__name__}: {error}).") from error


def _read_records(store: Store, chains: Sequence[int]) -> dict[int, ChainRecord]:
    if (whole := store.saved(None)) is not None:
        number = whole["sampler"]["num_chains"]
        if number != store.manifest["configuration"]["num_chains"]:
            raise StoreCorrupt(f"a checkpoint holds {number} chains, and run.json has another number.")
        states = _of_checkpoint(whole, whole["sampler"]["health"], number)
        return {c: states[c] for c in chains}
    saved = {chain: store.saved(chain) for chain in chains}
    return {
        chain: _of_checkpoint(state, state["sampler"]["adammcmc"]["health"], 1)[0]
        for chain, state in saved.items()
        if state is not None
    }


def _of_checkpoint(state: dict[str, Any], health: dict[str, Any] | None, num_chains: int) -> list[ChainRecord]:
    about, moments = state["health"], state["moments"] or [None] * num_chains
    sums = RunningSums(torch.device("cpu"), about["layers"], about["sizes"], num_chains)
    if health is not None:
        sums.load_state_dict(health)
    return [ChainRecord(c, sums, about["context"], moments[c]) for c in range(num_chains)]


def chain_settings(store: Store, chain: int, model: nn.Module) -> dict[str, Any]:
    """The settings of one chain, as arguments of its sampler, with the values that burn-in tuned."""
    chains = store.manifest.get("chains")
    if chains is None:
        raise ValueError("this run was made by an older version that did not record the settings of its chains.")
    given = dict(chains[chain])
    if (whole := store.saved(None)) is not None:
        found = _stacked_settings(whole["sampler"], chain, model)
    elif (saved := store.saved(chain)) is not None:
        found = _single_settings(saved["sampler"])
    else:
        return given
    size = "lr" if "lr" in given else "step_size"
    tuned = {(size if key in ("lr", "step_size") else key): value for key, value in found.items()}
    names = [key for key in ("sigma", "sigma_along") if key in given]
    return given | {key: tuned[key] for key in (*names, size, "preconditioner", "momentum_spread") if key in tuned}


def _single_settings(sampler: dict[str, Any]) -> dict[str, Any]:
    """Tuned settings in the state of a single chain; empty if nothing was tuned."""
    found: dict[str, Any] = {}
    group = sampler["param_groups"][0]
    if sampler["adammcmc"].get("adaptation") is not None:
        names = ("lr", "sigma", "sigma_along")
        found = {key: float(group[key]) for key in names if isinstance(group.get(key), int | float | Tensor)}
    states = [sampler["state"].get(i, {}) for group in sampler["param_groups"] for i in group["params"]]
    if any("left" in state or "right" in state for state in states):  # a basis is learnt again, and the step with it
        found["preconditioner"] = "kron"
        found.pop("lr", None)
    elif diagonal := [state["preconditioner"] for state in states if "preconditioner" in state]:
        found["preconditioner"] = [a.detach().cpu() for a in diagonal]
    if sampler["adammcmc"].get("momentum_spread") is not None:
        found["momentum_spread"] = tuple(sampler["adammcmc"]["momentum_spread"])
    return found


def _stacked_settings(sampler: dict[str, Any], chain: int, model: nn.Module) -> dict[str, Any]:
    """Tuned settings of one chain in the state of a stack, which holds the settings of a kernel by leaf."""
    found: dict[str, Any] = {}

    def gather(state: dict[str, Any]) -> None:
        for key, value in state.items():
            if isinstance(value, dict):
                gather(value)
                continue
            first = value[0] if isinstance(value, list | tuple) else value
            found[key] = float(first[chain] if isinstance(first, Tensor) and first.dim() == 1 else first)

    if sampler["adaptation"] is not None:
        gather(sampler["settings"])
    metric = sampler["preconditioner"]
    if metric is not None and metric["kind"] != "diagonal":  # a basis is learnt again, and the step with it
        found["preconditioner"] = metric["kind"]
        found.pop("step_size", None)
    elif metric is not None:
        trainable = [p for p in model.parameters() if p.requires_grad]
        padding = padding_rows(model.modules())
        held = {i: tuple(sorted(padding[id(p)])) for i, p in enumerate(trainable) if id(p) in padding}
        leaves = tuple(a.detach().cpu()[None] for a in metric["leaves"])
        packing = Packing(trainable, [0] * len(trainable), held)
        if [x.numel() for x in packing.new()] == [x.numel() for x in leaves]:
            found["preconditioner"] = [a.clone() for a in packing.whole(leaves, 1.0)]
        else:  # parameter groups have separate leaves; without its preconditioner a step size is meaningless
            found.pop("step_size", None)
    return found
