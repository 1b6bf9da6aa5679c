"""Figure 2b: acceptance, and accuracy of the posterior mean, against sigma, with and without noise along the step."""

from __future__ import annotations

from typing import Any

from adammcmc.replication.fig1 import WIDE
from adammcmc.replication.rows import VERSIONS, rows, version
from adammcmc.replication.settings import Preset
from adammcmc.replication.trials import Trial
from adammcmc.replication.work import Work

__all__ = ["SIGMAS", "TITLE", "run", "scan"]

TITLE = "Figure 2b: acceptance and accuracy against sigma"
SIGMAS = (0.2, 0.5, 1.0, 2.0, 4.0, 6.0, 10.0)


def scan(preset: Preset, sigma_delta: float) -> list[Trial]:
    """The paper's widths, in each version."""
    return [
        version(preset, name, sigma=sigma, sigma_delta=sigma_delta)
        for name in VERSIONS
        for sigma in preset.points(SIGMAS, at_least=(2.0,))
    ]


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """The scan twice; three settings on the paper's network."""
    anchors = [
        version(preset, "released", sigma=10.0, sigma_delta=WIDE, network="particlenet"),
        version(preset, "printed, batch sum", sigma=0.2, sigma_delta=WIDE, network="particlenet"),
        version(preset, "printed, batch sum", sigma=2.0, sigma_delta=0.0, network="particlenet"),
    ]
    return {
        "with": rows(work, scan(preset, WIDE)),
        "without": rows(work, scan(preset, 0.0)),
        "anchors": rows(work, anchors, 1) if preset.anchors else [],
    }
