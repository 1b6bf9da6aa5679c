"""Jets from elsewhere: mutual information by kind, pT and sigma, and how well it finds them."""

from __future__ import annotations

from typing import Any

from adammcmc.replication.fig1 import WIDE
from adammcmc.replication.fig3 import yardsticks
from adammcmc.replication.rows import VERSIONS, exact_settings, rows, version
from adammcmc.replication.settings import Preset
from adammcmc.replication.work import Work

__all__ = ["TITLE", "run"]

TITLE = "Jets from elsewhere: mutual information and detection"
SIGMAS = (0.01, 0.1, 0.2, 0.5, 2.0)


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """The paper's widths in each version, exact chains, and what an ensemble and dropout find."""
    sigmas = preset.points(SIGMAS, at_least=(0.2,))
    scan = [version(preset, name, sigma=sigma, sigma_delta=WIDE) for name in VERSIONS for sigma in sigmas]
    anchors = [version(preset, "released", sigma=sigma, sigma_delta=WIDE, network="particlenet") for sigma in (0.01, 0.2, 2.0)]
    return {
        "scan": rows(work, scan),
        "exact": rows(work, exact_settings(preset, targets=(0.85,)), preset.exact_chains),
        "yardsticks": rows(work, yardsticks(preset)),
        "anchors": rows(work, anchors, 1) if preset.anchors else [],
    }
