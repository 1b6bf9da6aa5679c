"""The inverse temperature lambda: spread, acceptance and accuracy over the paper's range, and in our units."""

from __future__ import annotations

from typing import Any

from adammcmc.replication.fig1 import WIDE
from adammcmc.replication.rows import VERSIONS, exact_settings, rows, version
from adammcmc.replication.settings import Preset
from adammcmc.replication.work import Work

__all__ = ["EXACT_LAMS", "TITLE", "run"]

TITLE = "The inverse temperature lambda"
LAMS = (1e-4, 1e-2, 1.0, 1e2, 1e3)
EXACT_LAMS = (0.01, 0.1, 1.0)


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """The paper's range in each version, and exact chains at some temperatures."""
    lams = preset.points(LAMS, at_least=(1.0,))
    scan = [version(preset, name, lam=lam, sigma=0.2, sigma_delta=WIDE) for name in VERSIONS for lam in lams]
    anchors = [
        version(preset, "released", lam=lam, sigma=0.2, sigma_delta=WIDE, network="particlenet") for lam in (1e-4, 1.0, 1e3)
    ]
    return {
        "scan": rows(work, scan),
        "exact": rows(work, exact_settings(preset, lams=EXACT_LAMS, targets=(0.85,)), preset.exact_chains),
        "anchors": rows(work, anchors, 1) if preset.anchors else [],
    }
