"""Figure 4: the full-data correction beside the stochastic one, at the same temperature; and every minibatch test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from adammcmc.replication.fig1 import WIDE
from adammcmc.replication.rows import bands, row, rows, seeds_of, version
from adammcmc.replication.settings import Preset
from adammcmc.replication.trials import TESTS, Trial
from adammcmc.replication.work import Work

__all__ = ["TITLE", "run"]

TITLE = "Figure 4: full against stochastic correction"
SMALLER = ((10.0, WIDE), (2.0, WIDE), (0.2, WIDE), (0.01, WIDE), (2.0, 370.0), (0.2, 370.0))
"""sigma and sigma_Delta, of other figures' trials: the paper's remedy against noise of minibatches is to make them smaller."""


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """Chains in evaluation mode, where the loss is one function of the weights, from five steps of Adam and from many."""
    few, many = 5, preset.steps // 4
    steps = max(8, preset.steps // 4)
    sizes: dict[str, Any] = {
        "num_jets": preset.compared_data, "in_training_mode": False, "steps": steps, "burn_in": steps // 4, "looks": 0,
        "precision": "float32",
    }  # fmt: skip
    curves, compared = {}, {}
    for scale in ("printed, batch sum", "printed, data sum"):
        for name, start in (("from the start", few), ("after burn-in", many)):
            for test in ("minibatch", "full"):
                trial = version(preset, scale, sigma=2.0, sigma_delta=WIDE, test=test, start=start, **sizes)
                records = work.records(seeds_of([trial], preset.seeds))
                key = f"{scale} | {name} | {test}"
                curves[key], compared[key] = bands(records)["loss"], row(records)
    base: Trial = version(preset, "printed, data sum", sigma=0.2, sigma_delta=1000.0, start=many, **sizes)
    tests = [replace(base, test=test) for test in TESTS]
    smaller = [version(preset, "printed, data sum", sigma=sigma, sigma_delta=delta) for sigma, delta in SMALLER]
    return {
        "curves": curves,
        "rows": compared,
        "tests": rows(work, tests),
        "smaller": rows(work, smaller),
        "num_data": preset.compared_data,
    }
