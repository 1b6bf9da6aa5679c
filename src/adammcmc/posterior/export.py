"""A run for others: copied to a folder, or as ArviZ's `InferenceData`."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adammcmc.errors import StoreMismatch
from adammcmc.posterior.diagnosis import compare, layer_series
from adammcmc.posterior.store.folder import FolderStore, Store

if TYPE_CHECKING:
    from adammcmc.posterior.posterior import Posterior

__all__ = ["save_run", "to_arviz"]


def save_run(store: Store, path: Path) -> Path:
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
        if (starts := store.starts()) is not None:
            copy.save_starts(starts)
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
    return path


def to_arviz(posterior: Posterior, inputs: Any, options: dict[str, Any], *, weights: bool) -> Any:
    """See `Posterior.to_arviz`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ArviZ's own, about its next version
        try:
            import arviz
        except ImportError as error:
            raise ImportError("`to_arviz` needs ArviZ. Run: pip install 'adammcmc[diagnostics]'") from error
    if len(posterior) == 0:
        raise ValueError("this run kept no draws of the weights (keep='moments'): there is no posterior to convert.")
    compared = compare(posterior.index, posterior.chain_numbers)
    chains = compared.chains
    layers = layer_series(posterior, chains)
    variables = {"layer_norm": torch.stack([s.values[:, :, 0] for s in layers], 2).numpy()}
    coords: dict[str, Any] = {"layer": [s.name.removeprefix("layer ") for s in layers], "chain": chains}
    dims = {"layer_norm": ["layer"]}
    if inputs is not None:
        variables["prediction"] = posterior.function_values(inputs, **options).numpy()
        dims["prediction"] = ["number"]
    if weights:
        tensors = [posterior.store.load(record) for record in compared.records]
        for name, p in posterior.model.named_parameters():
            stacked = torch.stack([draw[name].float() for draw in tensors])
            variables[name] = stacked.reshape(len(chains), -1, *p.shape).numpy()
    stats = {name: compared.column(name).numpy() for name in ("acceptance_rate", "loss", "potential", "num_accepted")}
    stats["lp"] = -stats["potential"]
    attributes = {"target": posterior.target, "inference_library": "adammcmc"}
    with warnings.catch_warnings():
        # ArviZ suspects swapped axes if there are more chains than draws
        warnings.filterwarnings("ignore", "More chains", UserWarning)
        return arviz.from_dict(posterior=variables, sample_stats=stats, coords=coords, dims=dims, posterior_attrs=attributes)
