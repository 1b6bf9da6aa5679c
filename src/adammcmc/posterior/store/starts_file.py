"""The weights that the chains of a run started from, where they were given: one file for all chains."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from adammcmc.errors import StoreCorrupt
from adammcmc.posterior.store.atomic import replace_file
from adammcmc.posterior.store.encoding import encode, read_state, safetensors_parts

__all__ = ["STARTS", "read_starts", "write_starts"]

STARTS = "starts.safetensors"


def write_starts(folder: Path, manifest: dict[str, Any], states: Sequence[Mapping[str, Tensor]]) -> None:
    """Write a state dictionary for each chain, with the checksums that the manifest has of them."""
    plain = [{name: x for name, x in state.items() if isinstance(x, Tensor)} for state in states]
    text, tensors = encode({"states": plain, "of": manifest["starts"]})
    replace_file(folder / STARTS, safetensors_parts(tensors, {"state": text}))


def read_starts(folder: Path, manifest: dict[str, Any]) -> list[dict[str, Tensor]] | None:
    """The state dictionary of each chain; None if the run has no such file. One of another run is refused."""
    file = folder / STARTS
    if not os.path.lexists(file):
        return None
    try:
        found = read_state(file, may_be_link=False)
        if not isinstance(found, dict) or found.get("of") is None or found["of"] != manifest.get("starts"):
            raise ValueError("it is not of this run")
        states: list[dict[str, Tensor]] = found["states"] if isinstance(found.get("states"), list) else []
        names = set(manifest["model"]["tensors"])
        is_whole = len(states) == manifest["configuration"]["num_chains"]
        if not is_whole or not all(isinstance(state, dict) and set(state) == names for state in states):
            raise ValueError("it does not hold the weights of every chain")
    except (OSError, ValueError) as error:
        raise StoreCorrupt(f"the starts '{file}' cannot be read: {error}. The draws are not affected.") from error
    return states
