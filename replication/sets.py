"""The jets of a replication: training, test and out-of-distribution."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from adammcmc.jets.data import Jets
from adammcmc.jets.features import JetData
from adammcmc.jets.files import bundled, read_jets
from adammcmc.jets.particlenet import ParticleNet
from replication.settings import Preset


@dataclass(frozen=True)
class JetSets:
    """The data of the trials: training jets, test jets, and out-of-distribution jets (all kinds, wider range of pT)."""

    train: Jets
    test: Jets
    others: Jets
    _served: dict[Any, JetData] = field(default_factory=dict, repr=False, compare=False)

    def data(self, name: str, network: ParticleNet, num_jets: int | None = None, batch_size: int | None = None) -> JetData:
        """Jets as inputs of this network, on its device. Cached for all trials: finding the neighbours is slow."""
        device = next(network.parameters()).device
        key = name, num_jets, batch_size, network.num_neighbours, device
        if key not in self._served:
            # one shape for all batches on a GPU, so that steps can be captured
            capacity: Literal["auto"] | None = "auto" if device.type == "cuda" else None
            jets: Jets = getattr(self, name)[:num_jets]
            k = network.num_neighbours
            self._served[key] = JetData(jets, batch_size, device=device, num_neighbours=k, capacity=capacity)
        return self._served[key]


def read_sets(preset: Preset, folder: str | Path | None = None) -> JetSets:
    """Jets for this preset.

    Args:
        preset: how many.
        folder: contains `train` (top and QCD, split into training and test) and `others` (out-of-distribution kinds),
            each a file or folder that `read_jets` takes; None is the bundled jets.
    """
    if folder is None:
        both, others = read_jets(bundled("jets")), read_jets(bundled("others"))
    else:
        both, others = (_read(Path(folder), name, preset) for name in ("train", "others"))
    both = both.of_kind("qcd", "top").shuffled(0)
    wanted = preset.num_train + preset.num_test
    if len(both) < wanted:
        raise ValueError(
            f"preset '{preset.name}' needs {wanted:,} top and QCD jets, there are {len(both):,}: give more by --jets."
        )
    few = [others[others.kind == kind][: preset.num_others] for kind in sorted(set(others.kind.tolist()))]
    return JetSets(both[: preset.num_train], both[preset.num_train : wanted], Jets.cat(few) if few else Jets.empty())


def _read(folder: Path, name: str, preset: Preset) -> Jets:
    for path in (folder / name, folder / f"{name}.npz"):
        if path.exists():
            return read_jets(path)
    needed = {
        "train": f"--jets {(preset.num_train + preset.num_test) // 2}",
        "others": f"--jets {preset.num_others} --kinds all --pt 500 1000 --flat",
    }
    raise FileNotFoundError(f"'{folder}' has no {name}: make it with `adammcmc jets generate {folder / name} {needed[name]}`.")
