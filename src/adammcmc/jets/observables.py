"""Twelve standard observables of a jet, computed from its particles.

With z = pT / sum pT of a particle and r its distance from the jet axis:

    particles, mass, pt, abs_eta
    width         sum z r
    dispersion    sqrt(sum z^2), "pTD"
    leading_1     z of the hardest particle               leading_5     z of the five hardest
    soft          sum z of particles below 2 GeV          core          sum z within r < 0.1
    tau21, tau32  tau_N / tau_(N-1), with tau_N = sum z min_k |x - axis_k|
"""

from __future__ import annotations

import torch
from torch import Tensor

from adammcmc.jets.data import Jets

__all__ = ["OBSERVABLES", "observables"]

OBSERVABLES = (
    "particles",
    "mass",
    "pt",
    "abs_eta",
    "width",
    "dispersion",
    "leading_1",
    "leading_5",
    "soft",
    "core",
    "tau21",
    "tau32",
)


def observables(jets: Jets) -> dict[str, Tensor]:
    """The twelve observables of each jet, by name."""
    if not len(jets):
        return {name: torch.zeros(0) for name in OBSERVABLES}
    parts = [_observables(jets[i : i + 4096]) for i in range(0, len(jets), 4096)]
    return {name: torch.cat([part[name] for part in parts]) for name in OBSERVABLES}


def _observables(jets: Jets) -> dict[str, Tensor]:
    particles, _ = jets.padded()
    pt, points = particles[..., 0], particles[..., 1:3]
    share = pt / pt.sum(1, keepdim=True)
    r = points.norm(dim=-1)
    tau = [_subjettiness(points, share, n) for n in (1, 2, 3)]
    return {
        "particles": jets.counts.float(),
        "mass": jets.jet[:, 3],
        "pt": jets.jet[:, 0],
        "abs_eta": jets.jet[:, 1].abs(),
        "width": (share * r).sum(1),
        "dispersion": share.square().sum(1).sqrt(),
        "leading_1": share[:, 0],
        "leading_5": share[:, :5].sum(1),
        "soft": (share * (pt < 2.0)).sum(1),
        "core": (share * (r < 0.1)).sum(1),
        "tau21": tau[1] / tau[0].clamp_min(1e-6),
        "tau32": tau[2] / tau[1].clamp_min(1e-6),
    }


def _subjettiness(points: Tensor, share: Tensor, number: int) -> Tensor:
    """sum z min_k |x - axis_k|, with approximate axes: start from the hardest particle, add the particle with the largest
    z times distance to the axes so far, and refine by k-means."""
    jets = torch.arange(len(points))
    chosen = [points[:, 0]]
    for _ in range(number - 1):
        nearest = torch.cdist(points, torch.stack(chosen, 1)).amin(2)
        chosen.append(points[jets, (share * nearest).argmax(1)])
    axes = torch.stack(chosen, 1)
    for _ in range(8):
        nearest = torch.cdist(points, axes).argmin(2)
        weight = share[..., None] * torch.nn.functional.one_hot(nearest, number)
        total = weight.sum(1)[..., None]
        axes = torch.where(total > 0, weight.transpose(1, 2) @ points / total.clamp_min(1e-9), axes)
    return (share * torch.cdist(points, axes).amin(2)).sum(1)
