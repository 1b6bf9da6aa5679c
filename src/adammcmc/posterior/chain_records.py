"""What is read back from the checkpoints of a run about its chains: health, moments, tuned settings and their burn-in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from adammcmc.errors import StoreCorrupt
from adammcmc.posterior.store.folder import Store
from adammcmc.samplers.health import Health, read_health
from adammcmc.samplers.running_sums import RunningSums
from adammcmc.samplers.tuned import tuned_by_burn_in, tuned_of_chain, tuned_of_stack
from adammcmc.samplers.warmup import WarmUp

__all__ = ["ChainRecord", "chain_records", "chain_settings", "warm_ups"]


class ChainRecord(NamedTuple):
    """The part of a checkpoint that describes the past of one chain."""

    number: int
    """Of the chain among those of the checkpoint."""
    sums: RunningSums
    context: dict[str, Any]
    moments: dict[str, Any] | None
    """State of `Moments`; None if the run kept none."""
    burn_in: WarmUp | None
    """Without settings."""

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
    burn_in = None if state.get("warm_up") is None else WarmUp.restored(state["warm_up"], "", {})
    return [ChainRecord(c, sums, about["context"], moments[c], burn_in) for c in range(num_chains)]


def chain_settings(store: Store, chain: int, model: nn.Module) -> dict[str, Any]:
    """The settings of one chain, as arguments of its sampler, with the values that burn-in tuned."""
    whole = store.saved(None)
    return _settings(store, store.saved(chain) if whole is None else whole, chain, model)


def _settings(store: Store, state: dict[str, Any] | None, chain: int, model: nn.Module) -> dict[str, Any]:
    chains = store.manifest.get("chains")
    if chains is None:
        raise ValueError("this run was made by an older version that did not record the settings of its chains.")
    given = dict(chains[chain])
    if state is None:
        return given
    is_whole = "num_chains" in state["sampler"]
    found = tuned_of_stack(state["sampler"], chain, model) if is_whole else tuned_of_chain(state["sampler"])
    tuned = tuned_by_burn_in(found, finds_step="lr" not in given)
    own = {key: value for key, value in tuned.items() if key in given or key not in ("sigma", "sigma_along")}
    return given | own | ({"lr": found["lr"]} if "lr" in given and "lr" in found else {})


def warm_ups(store: Store, chains: Sequence[int], model: nn.Module) -> list[WarmUp | None]:
    """The record of the burn-in of each chain; None where nothing was tuned, or its checkpoint is missing."""
    whole = store.saved(None)
    found: list[WarmUp | None] = []
    for chain in chains:
        state = store.saved(chain) if whole is None else whole
        if state is None or state.get("warm_up") is None:
            found.append(None)
            continue
        settings = _settings(store, state, chain, model)
        tuned = {key: value for key, value in settings.items() if key not in ("lr", "inverse_temperature")}
        found.append(WarmUp.restored(state["warm_up"], store.manifest["configuration"]["sampler"], tuned))
    return found
