"""A run for others: copied to a folder, or as ArviZ's `InferenceData`."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adammcmc.errors import StoreMismatch
from adammcmc.posterior.diagnosis import Values, layer_series
from adammcmc.posterior.draws import Draws
from adammcmc.posterior.store.folder import FolderStore, Store

__all__ = ["save_run", "to_arviz"]


def save_run(store: Store, path: Path) -> None:
    """Copy a run to a new folder, completely or not at all."""
    if (path / "run.json").exists():
        raise StoreMismatch(f"'{path}' holds a run already: choose another path.")
    is_new = not path.exists()
    manifest = {key: value for key, value in store.manifest.items() if key not in ("what", "format")}
    whole = store.saved(None)
    keys: list[int | None] = [None] if whole is not None else list(range(manifest["configuration"]["num_chains"]))
    states = {key: store.saved(key) for key in keys}
    has_weights = {(record["chain"], record["draw"]) for record in store.kept()}
    copy = FolderStore(path, manifest)
    try:
        for number, record in enumerate(store.index):
            chain, keep = record["chain"], manifest["keep"]
            copy.append(record, store.load(record) if (chain, record["draw"]) in has_weights else {})
            if isinstance(keep, int) and number % (keep + 1) == keep:  # a checkpoint drops the weights that are not kept
                key = None if whole is not None else chain
                copy.save(key, states[key] or {})
        for key, state in states.items():
            if state is not None:
                copy.save(key, state)
        copy.flush()
        copy.write_manifest()  # last: from here on the folder holds a run
    except BaseException:
        copy.close()
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        raise
    copy.close()


def to_arviz(draws: Draws, model: nn.Module, target: str, predict: Values | None, *, weights: bool) -> Any:
    """See `Posterior.to_arviz`; `predict` returns the function values of the draws of some chains."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ArviZ's own, about its next version
        try:
            import arviz
        except ImportError as error:
            raise ImportError("`to_arviz` needs ArviZ. Run: pip install 'adammcmc[diagnostics]'") from error
    if not draws.records:
        raise ValueError("this run kept no draws of the weights (keep='moments'): there is no posterior to convert.")
    compared = draws.compared(draws.records)
    chains = compared.chains
    layers = layer_series(draws, model, chains)
    variables = {"layer_norm": torch.stack([s.values[:, :, 0] for s in layers], 2).numpy()}
    coords: dict[str, Any] = {"layer": [s.name.removeprefix("layer ") for s in layers], "chain": chains}
    dims = {"layer_norm": ["layer"]}
    if predict is not None:
        variables["prediction"] = predict(chains).numpy()
        dims["prediction"] = ["number"]
    if weights:
        tensors = [draws.store.load(record) for record in compared.records]
        for name, p in model.named_parameters():
            stacked = torch.stack([draw[name].float() for draw in tensors])
            variables[name] = stacked.reshape(len(chains), -1, *p.shape).numpy()
    stats = {name: compared.column(name).numpy() for name in ("acceptance_rate", "loss", "potential", "num_accepted")}
    stats["lp"] = -stats["potential"]
    attributes = {"target": target, "inference_library": "adammcmc"}
    with warnings.catch_warnings():
        # ArviZ suspects swapped axes if there are more chains than draws
        warnings.filterwarnings("ignore", "More chains", UserWarning)
        return arviz.from_dict(posterior=variables, sample_stats=stats, coords=coords, dims=dims, posterior_attrs=attributes)
