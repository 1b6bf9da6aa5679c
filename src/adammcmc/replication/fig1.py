"""Figure 1: optimisation. Training loss and test accuracy of Adam, SGD, sgHMC and AdamMCMC."""

from __future__ import annotations

from typing import Any

from adammcmc.replication.rows import bands, row, rows, seeds_of, version
from adammcmc.replication.settings import Preset
from adammcmc.replication.trials import Trial
from adammcmc.replication.work import Work

__all__ = ["TITLE", "run"]

TITLE = "Figure 1: training loss and test accuracy"
WIDE = 3661.6
GRIDS = {"adam": (3e-4, 1e-3, 3e-3), "sgd": (1e-2, 1e-1, 1.0), "sghmc": (1e-4, 1e-3, 1e-2)}
"""Learning rates that are tried on one seed each; the one with the highest accuracy at the end goes on."""
_LOOKS = 20


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """Learning rates on one seed, then five seeds of each method."""
    seeds = 5 if preset.seeds > 1 else 1
    grid: dict[str, Any] = {}
    chosen: dict[str, Trial] = {}
    for method, rates in GRIDS.items():
        trials = [Trial.of(preset, method, lr=lr, looks=_LOOKS) for lr in preset.points(rates, at_least=(1e-3, 1e-2))]
        found = work.records(trials)
        ends = [r["accuracy"]["values"][-1] for r in found]
        grid[method] = [
            {"lr": t.lr, "accuracy": end, "final_loss": row([r])["final_loss"]}
            for t, r, end in zip(trials, found, ends, strict=True)
        ]
        chosen[method] = trials[ends.index(max(ends))]
    for name in ("released", "printed, batch sum"):
        for sigma in (0.2, 2.0):
            chosen[f"{name}, sigma {sigma}"] = version(preset, name, sigma=sigma, sigma_delta=WIDE, looks=_LOOKS)
    curves, table = {}, {}
    for name, trial in chosen.items():
        records = work.records(seeds_of([trial], seeds))
        curves[name], table[name] = bands(records), row(records)
    return {"grid": grid, "curves": curves, "rows": table, "anchors": anchors(preset, work)}


def anchors(preset: Preset, work: Work) -> list[dict[str, Any]]:
    """Adam and both versions of AdamMCMC on the paper's network."""
    if not preset.anchors:
        return []
    settings = [Trial.of(preset, "adam", network="particlenet")]
    settings += [version(preset, "released", sigma=0.2, sigma_delta=WIDE, network="particlenet")]
    settings += [
        version(preset, name, sigma=2.0, sigma_delta=WIDE, network="particlenet") for name in ("released", "printed, batch sum")
    ]
    return rows(work, settings, 1)
