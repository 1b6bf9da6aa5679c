"""Figure 2a: acceptance, and accuracy of the posterior mean, against sigma_Delta and against beta."""

from __future__ import annotations

from typing import Any

from adammcmc.replication.fig1 import WIDE
from adammcmc.replication.rows import VERSIONS, rows, version
from adammcmc.replication.settings import Preset
from adammcmc.replication.work import Work

__all__ = ["TITLE", "run"]

TITLE = "Figure 2a: acceptance and accuracy against sigma_Delta and beta"
SIGMAS = (0.2, 2.0)
SIGMA_DELTAS = (0.0, 3.7, 37.0, 370.0, WIDE, 37_000.0, 370_000.0)
ONE_MINUS_BETAS = (0.001, 0.01, 0.1, 0.5, 0.9)


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """Both scans at two sigmas, of each version; three settings on the paper's network."""
    deltas, betas = preset.points(SIGMA_DELTAS, at_least=(WIDE,)), preset.points(ONE_MINUS_BETAS, at_least=(0.01,))
    by_delta = [
        version(preset, name, sigma=sigma, sigma_delta=delta) for name in VERSIONS for sigma in SIGMAS for delta in deltas
    ]
    by_beta = [
        version(preset, name, sigma=sigma, sigma_delta=WIDE, beta=1 - rest)
        for name in VERSIONS
        for sigma in SIGMAS
        for rest in betas
    ]
    anchors = [
        version(preset, "released", sigma=2.0, sigma_delta=0.0, network="particlenet"),
        version(preset, "released", sigma=2.0, sigma_delta=WIDE, network="particlenet"),
        version(preset, "printed, batch sum", sigma=2.0, sigma_delta=WIDE, network="particlenet"),
    ]
    return {
        "by_delta": rows(work, by_delta),
        "by_beta": rows(work, by_beta),
        "anchors": rows(work, anchors, 1) if preset.anchors else [],
    }
