"""Figure 3: mean prediction and spread against sigma, by class and correctness; and whether the spread is right."""

from __future__ import annotations

from typing import Any

from adammcmc.replication.fig1 import WIDE
from adammcmc.replication.fig2b import scan
from adammcmc.replication.rows import exact_settings, rows, version
from adammcmc.replication.settings import Preset
from adammcmc.replication.trials import Trial
from adammcmc.replication.work import Work

__all__ = ["TARGETS", "TITLE", "run", "yardsticks"]

TITLE = "Figure 3: mean prediction and spread against sigma"
TARGETS = (0.6, 0.85, 0.95)
"""Acceptances that the exact chains' steps are tuned to: their sigma, so to say."""


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """The scan of Figure 2b with noise along the step; exact chains with steps of several sizes; ensembles."""
    anchors = [
        version(preset, name, sigma=sigma, sigma_delta=WIDE, network="particlenet")
        for name, sigma in (("released", 0.2), ("released", 2.0), ("released", 10.0))
    ]
    return {
        "scan": rows(work, scan(preset, WIDE)),
        "exact": rows(work, exact_settings(preset, targets=TARGETS), preset.exact_chains),
        "exact, one start": rows(work, [Trial.exact(preset, target_acceptance=0.85, start_seed=0)], preset.exact_chains),
        "yardsticks": rows(work, yardsticks(preset)),
        "anchors": rows(work, anchors, 1) if preset.anchors else [],
    }


def yardsticks(preset: Preset) -> list[Trial]:
    """One network, the same with draws of its dropout masks, five networks at the compute of one chain, and five full ones.

    A step of AdamMCMC has two forwards and one backward, where Adam has one of each: about 4/3 of it.
    """
    return [
        Trial.of(preset, "adam"),
        Trial.of(preset, "dropout"),
        Trial.of(preset, "ensemble", num_draws=5, steps=max(2, preset.steps * 4 // 15)),
        Trial.of(preset, "ensemble", num_draws=5),
    ]
