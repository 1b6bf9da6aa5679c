"""Unlabelled data: a normalising flow learns the density of two moons, and its posterior gives the density an uncertainty.

    python examples/two_moons_flow.py --output two_moons.png

Adam trains the flow to its most probable weights. `adammcmc.sample` draws weights from the posterior, with a loss that is a
function of model and batch, and `posterior.predict` turns the draws into a band of densities. The data are synthetic, so the
true density is known: the printed numbers and the figure compare the band with it. The script takes about a minute on two
cores and needs scikit-learn and matplotlib: `pip install '.[demo]' scikit-learn`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from torch import Tensor, nn

import adammcmc

NUM_DATA, NOISE = 1000, 0.2
REACH = 2.8  # half the side of the plotted plane, in standard deviations of the data
PLACES = {"on a moon": (0.0, 1.2), "between the moons": (0.0, 0.0), "far away": (2.5, 2.5)}
BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe-Ito: safe for colour blindness


# --- the data -------------------------------------------------------------------------------------------------------------


class Moons(NamedTuple):
    """Points of two moons, standardised by `mean` and `scale`."""

    points: Tensor
    mean: Tensor
    scale: Tensor

    def more(self, num_points: int, seed: int) -> Tensor:
        """New points, standardised like the training points."""
        return ((_moons(num_points, NOISE, seed) - self.mean) / self.scale).float()

    def density(self, x: Tensor) -> Tensor:
        """The true density at standardised points (examples, 2): two arcs, blurred by Gaussian noise."""
        arcs = _moons(NUM_DATA, 0.0, 0)
        distances = torch.cdist(x * self.scale + self.mean, arcs)
        blurred = torch.exp(-0.5 * (distances / NOISE).square()).mean(1) / (2 * math.pi * NOISE**2)
        return blurred * self.scale.prod()


def moons() -> Moons:
    """The training data; always the same."""
    points = _moons(NUM_DATA, NOISE, seed=0)
    mean, scale = points.mean(0), points.std(0)
    return Moons(((points - mean) / scale).float(), mean, scale)


def _moons(num_points: int, noise: float, seed: int) -> Tensor:
    return torch.from_numpy(make_moons(num_points, noise=noise, random_state=seed)[0])


# --- the flow -------------------------------------------------------------------------------------------------------------


class Coupling(nn.Module):
    """Move one coordinate by a function of the other: moved <- exp(log_scale(kept)) moved + shift(kept).

    Log scale and shift are sums of Gaussian bumps with learnt heights. Where the kept coordinate is far beyond `reach` there
    are no bumps, and nothing is moved.
    """

    centres: Tensor

    def __init__(self, num_bumps: int = 12, reach: float = 3.0) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(-reach, reach, num_bumps))
        # narrower bumps leave ripples; wider ones can replace each other, and such redundant weights mix slowly
        self.width = 0.6 * 2 * reach / (num_bumps - 1)
        self.heights = nn.Linear(num_bumps, 2, bias=False)

    def forward(self, kept: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        """The moved coordinate and the log scale, (examples, 1) each."""
        bumps = torch.exp(-0.5 * ((kept - self.centres) / self.width).square())
        log_scale, shift = self.heights(bumps).chunk(2, 1)
        return moved * log_scale.exp() + shift, log_scale


class Flow(nn.Module):
    """RealNVP in the plane: alternating couplings map the data to a standard normal distribution."""

    def __init__(self, num_couplings: int = 4) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling() for _ in range(num_couplings))

    def to_normal(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The image of each point (examples, 2), and the log determinant of the Jacobian there."""
        kept, moved = x.chunk(2, 1)
        log_det = torch.zeros_like(kept)
        for coupling in self.couplings:
            moved, log_scale = coupling(kept, moved)
            log_det = log_det + log_scale
            kept, moved = moved, kept
        return torch.cat([kept, moved], 1), log_det[:, 0]

    def log_prob(self, x: Tensor) -> Tensor:
        """The log density of each point."""
        z, log_det = self.to_normal(x)
        return log_det - 0.5 * z.square().sum(1) - math.log(2 * math.pi)

    def forward(self, x: Tensor) -> Tensor:
        return self.log_prob(x)


def loss(model: Flow, batch: Tensor) -> Tensor:
    """Per-example losses. There are no targets: the loss is a function of model and batch."""
    return -model.log_prob(batch)


def density(model: Flow, batch: Tensor) -> Tensor:
    """The predicted density."""
    return model.log_prob(batch).exp()


def train(points: Tensor, seed: int, num_steps: int = 1500) -> tuple[Flow, adammcmc.Gaussian]:
    """A flow trained by Adam to its most probable weights, and the prior that enters them."""
    torch.manual_seed(seed)
    flow = Flow()
    prior = adammcmc.Gaussian.fan_in(flow, 2.0)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for _ in range(num_steps):
        optimizer.zero_grad()
        # start the chain at the mode of its target, which includes the prior
        potential = loss(flow, points).sum() - prior.log_density(list(flow.parameters()))
        (potential / len(points)).backward()
        optimizer.step()
        scheduler.step()
    return flow, prior


# --- results --------------------------------------------------------------------------------------------------------------


def report(data: Moons, flow: Flow, posterior: adammcmc.Posterior) -> None:
    """Print the density at three places, with its band, and the mean loss on new points."""
    places = torch.tensor(list(PLACES.values()))
    predicted, truth = posterior.predict(places, forward=density), data.density(places)
    low, high = predicted.quantile(0.25), predicted.quantile(0.75)
    print("\ndensity                  mean   25% to 75%          truth")
    for i, place in enumerate(PLACES):
        print(f"  {place:18} {predicted.mean[i]:8.2g}   {low[i]:7.2g} to {high[i]:7.2g}   {truth[i]:7.2g}")
    new = data.more(5000, seed=1)
    with torch.no_grad():
        losses = {"trained flow": loss(flow, new)}
    losses["mean density of the draws"] = -posterior.predict(new, forward=density).mean.log()
    losses["truth"] = -data.density(new).log()
    print("mean loss of 5000 new points: " + ", ".join(f"{name} {values.mean():.3f}" for name, values in losses.items()))


def plane() -> tuple[Tensor, Tensor]:
    """The ticks of one axis, and all points of the plane, with x2 varying fastest."""
    ticks = torch.linspace(-REACH, REACH, 141)
    return ticks, torch.cartesian_prod(ticks, ticks)


def coverage(truth: Tensor, predicted: adammcmc.Prediction, low: float, high: float) -> float:
    """The fraction of points with the truth in the band, among those where it is more than 1% of its maximum."""
    inside = (predicted.quantile(low) <= truth) & (truth <= predicted.quantile(high))
    return float(inside[truth > 0.01 * truth.max()].double().mean())


def draw_picture(output: Path, data: Moons, flow: Flow, predicted: adammcmc.Prediction) -> None:
    """Mean density over the plane, the disagreement of the draws, and their band along the line x1 = 0."""
    ticks, points = plane()
    size, centre = (len(ticks), len(ticks)), len(ticks) // 2
    line = points.reshape(*size, 2)[centre]
    with torch.no_grad():
        trained = density(flow, line).numpy()
    truth = data.density(line).numpy()
    axis, mean = ticks.numpy(), predicted.mean.reshape(size).T.numpy()
    levels = {q: predicted.quantile(q).reshape(size).numpy() for q in (0.05, 0.25, 0.75, 0.95)}
    # of quantiles, since far out a few draws dominate the mean; the smallest ones underflow
    factor = (levels[0.75] / levels[0.25].clip(1e-30)).T

    with matplotlib.rc_context({"font.size": 12, "axes.titlesize": 13}):
        figure = Figure(figsize=(14, 4.9), layout="constrained")
        left, middle, right = figure.subplots(1, 3, sharey=True)
        image = left.pcolormesh(axis, axis, mean, cmap="Blues", vmin=0, shading="gouraud", rasterized=True)
        figure.colorbar(image, ax=left, label="density", shrink=0.85, ticks=[0, 0.05, 0.1, 0.15, 0.2])
        left.plot(*data.points.T.numpy(), ".", color="black", markersize=2.5, alpha=0.6)
        left.axvline(0, color="black", linewidth=1, linestyle=":")
        left.set_title("Mean density of the draws,\nand the data")

        scale = LogNorm(1, 10, clip=True)
        image = middle.pcolormesh(axis, axis, factor, cmap="magma", norm=scale, shading="gouraud", rasterized=True)
        bar = figure.colorbar(image, ax=middle, label="75% quantile / 25% quantile", shrink=0.85, extend="max")
        bar.set_ticks([1, 2, 5, 10], labels=["1", "2", "5", "10"])
        bar.minorticks_off()
        middle.contour(axis, axis, mean, levels=[0.02, 0.1], colors="white", linewidths=1)
        middle.axvline(0, color="white", linewidth=1, linestyle=":")
        middle.set_title("Disagreement of the draws\n(lines: mean density 0.02 and 0.1)")

        for low, high, alpha in ((0.05, 0.95, 0.25), (0.25, 0.75, 0.5)):
            band = (levels[low][centre], levels[high][centre])
            label = f"draws, {low:.0%} to {high:.0%}"
            right.fill_betweenx(axis, *band, color=BLUE, alpha=alpha, linewidth=0, label=label)
        right.plot(trained, axis, color=ORANGE, linewidth=2, label="trained flow")
        right.plot(truth, axis, color="black", linewidth=1.8, linestyle="--", label="truth")
        right.set(title="Density along the dotted line\n($x_1 = 0$)", xlabel="density", xticks=[0, 0.05, 0.1, 0.15, 0.2])
        right.set_xlim(0, 0.25)
        right.legend(fontsize=10, loc="upper right", handlelength=1.5, labelspacing=0.25)
        right.tick_params(labelleft=True)
        for panel in (left, middle):
            panel.set_xlabel("$x_1$, standardised")
        for panel in (left, middle, right):
            panel.set_box_aspect(1)
            panel.set_ylim(-REACH, REACH)
        left.set_ylabel("$x_2$, standardised")
        figure.savefig(output, dpi=150)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, sample, print, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("two_moons.png"), help="file of the figure (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=300, help="number of draws (default: %(default)s)")
    parser.add_argument("--gap", type=int, default=70, help="steps between two draws (default: %(default)s)")
    parser.add_argument("--burn-in", type=int, default=4000, help="steps of burn-in (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the training and of the chain (default: %(default)s)")
    parser.add_argument("--path", type=Path, help="folder for the draws; a second call resumes the run (default: in memory)")
    options = parser.parse_args(argv)

    data = moons()
    flow, prior = train(data.points, options.seed)
    posterior = adammcmc.sample(
        flow,
        data.points,
        loss,
        prior=prior,
        num_draws=options.draws,
        gap=options.gap,
        burn_in=options.burn_in,
        seed=options.seed,
        path=options.path,
        resume=options.path is not None,
    )
    print(posterior)
    report(data, flow, posterior)
    points = plane()[1]
    predicted, truth = posterior.predict(points, forward=density, quantiles=(0.05, 0.95)), data.density(points)
    half, most = coverage(truth, predicted, 0.25, 0.75), coverage(truth, predicted, 0.05, 0.95)
    shares = f"25% to 75% at {half:.0%}, in the band 5% to 95% at {most:.0%}"
    print(f"where it is more than 1% of its maximum, the truth is in the band {shares} of the points")
    draw_picture(options.output, data, flow, predicted)
    print(f"figure: {options.output}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors this small gain nothing from more threads, and are slower if cores are shared
    main()
