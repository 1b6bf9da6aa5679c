"""Draw figures of the documentation: python docs/pictures.py (the idea and the two decision diagrams).

The others: adammcmc demo --output docs/assets/top_tagging.png, python examples/irises.py --output docs/assets/irises.png,
python -m benchmarks.networks two-sided, and python -m benchmarks.jets_real. The first screen of
demo.html, 1000 x 760, is report.png.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from adammcmc.kernels.proposal import Prolate

ASSETS = Path(__file__).parent / "assets"


def log_density(x: Tensor) -> Tensor:
    """A curved valley."""
    return -0.5 * ((x[:, 0] / 1.6) ** 2 + ((x[:, 1] - 0.35 * x[:, 0] ** 2 + 0.6) / 0.45) ** 2)


def draw_idea() -> None:
    """Proposals of one step from theta: isotropic noise, and noise stretched along the step."""
    theta, update = torch.tensor([[-1.9, 1.75]]).double(), torch.tensor([[-0.85, 0.75]]).double()
    n = 400
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    x, y = torch.linspace(-3.2, 2.2, 200).double(), torch.linspace(-1.6, 3.2, 200).double()
    level = log_density(torch.cartesian_prod(x, y)).reshape(200, 200).T
    titles = {0.0: "Isotropic noise", 1.2: "Noise stretched along the step (prolate)"}
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
        numbers = f"q(reverse) / q(forward) = {back:.2g} (median), accepted {float(rate.mean()):.0%}"
        panel.set_title(f"{title}\n{numbers}", fontsize=11)
        panel.set(aspect="equal", xlim=(-3.2, 2.2), ylim=(-1.6, 3.2))
        panel.set_xticks([])
        panel.set_yticks([])
    panels[1].legend(loc="upper right")
    figure.savefig(ASSETS / "idea.png", dpi=120)


def diagram(width: float, height: float) -> tuple[Figure, Callable[..., None], Callable[..., None]]:
    """An empty figure with coordinates of 100 by 56, and functions that draw a box and an arrow on it."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 100), ylim=(0, 56))
    axes.axis("off")

    def box(x: float, y: float, text: str, colour: str) -> None:
        style = {"boxstyle": "round,pad=0.5", "facecolor": colour, "edgecolor": "#444444"}
        axes.text(x, y, text, ha="center", va="center", fontsize=10.5, bbox=style, wrap=False)

    def arrow(start: tuple[float, float], end: tuple[float, float], text: str) -> None:
        axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "lw": 1.6, "color": "#444444"})
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        label = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(*middle, text, ha="center", va="center", fontsize=9.5, bbox=label)

    return figure, box, arrow


def draw_choice() -> None:
    """Choosing a sampler."""
    figure, box, arrow = diagram(11.5, 5.6)
    question, exact, approximate, released = "#EAF2FB", "#CDEBD8", "#FBE6C8", "#EEDDDD"
    box(50, 51, "Do you need exact draws from the posterior,\nor is a fast approximation enough?", question)
    box(26, 37, "Can you afford a full-data\ngradient at each step?", question)
    box(78, 37, "For what purpose?", question)
    box(14, 20, "Underdamped(fixed_data=True)\nexact, self-tuning, 1 gradient\n(recommended)", exact)
    box(40, 20, "Underdamped(acceptance=FullData(),\nexamples=...)\nexact, minibatch gradients,\n1 forward of all data", exact)
    box(66, 20, "Underdamped(\nacceptance=AlwaysAccept())\nunadjusted: any batch, 1 gradient", approximate)
    box(89, 20, "AdamMCMC\nAlgorithm 1 as printed:\nfollows Adam, too cold", approximate)
    box(27, 5, "MALA: also exact, 4 to 8 times slower on networks\nExactAdamMCMC: Theorem 1, for study", "#F4F4F4")
    box(78, 5, "AsReleased: only to replicate\nthe published figures", released)
    arrow((42, 48), (28, 41), "exact")
    arrow((58, 48), (76, 40), "approximate")
    arrow((22, 33.3), (15, 24.6), "yes")
    arrow((30, 33.3), (39, 25.5), "no")
    arrow((75, 35), (67, 24.6), "error bars")
    arrow((81, 35), (88, 24.6), "the paper's algorithm")
    arrow((88, 15.8), (82, 8), "its released code")
    figure.savefig(ASSETS / "choosing.png", dpi=120)


def draw_tests() -> None:
    """Choosing an acceptance test."""
    figure, box, arrow = diagram(12.5, 6.6)
    question, exact, near, rough = "#EAF2FB", "#CDEBD8", "#E6F2D5", "#FBE6C8"
    box(50, 52, "Can you afford a full pass over the data at each step?", question)
    box(15, 41, "FullData()\nexact", exact)
    box(61, 41, "Do the chains stay near one point,\nabout which the losses can be expanded?", question)
    box(36, 27, "Use control_variate=ControlVariate(reference).\nIs a derivative of the loss bounded?", question)
    box(85, 27, "Is the noise s of the log ratio\nabout 1 on an affordable batch?", question)
    box(15, 10, "Tuna(bound)\nexact, a handful of examples\n(logistic regression,\nlast layer of a network)", exact)
    box(
        43,
        10,
        "Penalty(batch_size)\nfixed cost, keep s below 1\nBarker(), Sequential(0.01)\nthe batch grows if needed",
        near,
    )
    box(69, 10, "Penalty(batch_size)\nBarker()\nrejects more, sd within\na few percent", near)
    box(90, 10, "shorter steps, a larger batch,\nor a smaller lambda;\nMinibatch() is too wide\nby beta_eff(s)^-1/2", rough)
    arrow((42, 49.6), (19, 43.6), "yes")
    arrow((52, 49.6), (60, 44.6), "no")
    arrow((56, 37.6), (40, 30.6), "yes")
    arrow((67, 37.6), (82, 30.6), "no")
    arrow((30, 23.6), (17, 16.2), "yes")
    arrow((39, 23.6), (43, 16.2), "no, or unknown")
    arrow((81, 23.6), (70, 16.2), "yes")
    arrow((87, 23.6), (90, 16.2), "no")
    figure.savefig(ASSETS / "acceptance.png", dpi=120)


if __name__ == "__main__":
    ASSETS.mkdir(exist_ok=True)
    draw_idea()
    draw_choice()
    draw_tests()
