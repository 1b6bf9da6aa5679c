"""Draws the pictures of the documentation: python docs/pictures.py (the idea), adammcmc demo --output docs/assets/demo.png."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from adammcmc.proposal import Prolate

ASSETS = Path(__file__).parent / "assets"


def log_density(x: Tensor) -> Tensor:
    """A curved valley."""
    return -0.5 * ((x[:, 0] / 1.6) ** 2 + ((x[:, 1] - 0.35 * x[:, 0] ** 2 + 0.6) / 0.45) ** 2)


def draw_idea() -> None:
    """One step from theta, many times: noise of one size all around, and noise stretched along the step."""
    theta, update = torch.tensor([[-1.9, 1.75]]).double(), torch.tensor([[-0.85, 0.75]]).double()
    n = 400
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    x, y = torch.linspace(-3.2, 2.2, 200).double(), torch.linspace(-1.6, 3.2, 200).double()
    level = log_density(torch.cartesian_prod(x, y)).reshape(200, 200).T
    titles = {0.0: "Noise all around", 1.2: "Noise stretched along the step (prolate)"}
    for panel, (sigma_along, title) in zip(panels, titles.items(), strict=True):
        proposal = Prolate(0.16, sigma_along)
        move = proposal.propose((theta.expand(n, 2),), (update.expand(n, 2),), torch.Generator().manual_seed(2))
        tau = move.proposed[0]
        log_q = proposal.log_q_ratio(move)
        log_ratio = log_density(tau) - log_density(theta) + log_q
        rate = log_ratio.clamp(max=0).exp()
        accepted = torch.rand(n, generator=torch.Generator().manual_seed(3)).double().log() < log_ratio
        back = math.exp(float(log_q.median()))
        panel.contourf(x, y, level, levels=[-40, -20, -10, -5, -3, -2, -1, -0.5, 0], cmap="Blues", alpha=0.55)
        panel.scatter(*tau[~accepted].T, s=10, color="#9a9a9a", label="rejected")
        panel.scatter(*tau[accepted].T, s=14, color="#D55E00", label="accepted")
        arrow = {"arrowstyle": "-|>", "lw": 2.2, "color": "black", "shrinkA": 0, "shrinkB": 0}
        panel.annotate("", xy=(theta - update)[0].tolist(), xytext=theta[0].tolist(), arrowprops=arrow)
        panel.plot(*theta.T, "o", color="black", markersize=7)
        panel.text(-2.1, 1.95, r"$\theta$", fontsize=15, ha="right")
        panel.text(-1.05, 1.3, r"$-u$ (Adam)", fontsize=11)
        panel.set_title(f"{title}\nq(back) / q(there) = {back:.2g} (median), accepted {float(rate.mean()):.0%}", fontsize=11)
        panel.set(aspect="equal", xlim=(-3.2, 2.2), ylim=(-1.6, 3.2))
        panel.set_xticks([])
        panel.set_yticks([])
    panels[1].legend(loc="upper right")
    figure.savefig(ASSETS / "idea.png", dpi=120)


if __name__ == "__main__":
    ASSETS.mkdir(exist_ok=True)
    draw_idea()
