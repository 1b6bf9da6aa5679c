"""One posterior, two samplers: a small network on Fisher's irises, with Algorithm 1 and with an exact kernel.

    python examples/irises.py --output irises.png

`AdamMCMC` (approximate) and `Underdamped` (exact) sample the same posterior of the same network. The figure shows where the
network is uncertain, and how far the approximate sampler is from the truth. The script takes about a minute and needs
scikit-learn, matplotlib and rich: `pip install '.[demo]' scikit-learn`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_iris
from torch import Tensor, nn

from adammcmc import AdamMCMC, Gaussian, Prediction, sample

CLASSES = ("setosa", "versicolor", "virginica")
_COLOURS = ("#0072B2", "#E69F00", "#009E73")  # Okabe-Ito: safe for colour blindness


class Irises(NamedTuple):
    """Petal length and width in cm; `standardise` scales them for the network by `mean` and `scale`."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    mean: Tensor
    scale: Tensor

    def standardise(self, petals: Tensor) -> Tensor:
        return (petals - self.mean) / self.scale


def irises(seed: int = 0) -> Irises:
    """The data set that ships with scikit-learn: 120 flowers for training, 30 for testing."""
    data = load_iris()
    petals, kind = torch.tensor(data.data[:, 2:], dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(kind), generator=torch.Generator().manual_seed(seed))
    train, test = order[:120], order[120:]
    return Irises((petals[train], kind[train]), (petals[test], kind[test]), petals.mean(0), petals.std(0))


def train(data: Irises, seed: int = 0) -> tuple[nn.Sequential, torch.optim.Adam]:
    """A network trained with Adam, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs, targets = data.standardise(data.train[0]), data.train[1]
    for _ in range(500):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model, optimizer


def main(argv: Sequence[str] | None = None) -> None:
    """Train, sample twice, print a table, draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("irises.png"), help="file of the figure")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of each sampler; the first fifth is burn-in")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    options = parser.parse_args(argv)
    _run(options.output, options.steps, options.seed)


def _run(output: Path, steps: int, seed: int) -> None:
    console = Console()
    data = irises(seed)
    model, optimizer = train(data, seed)
    flowers = data.standardise(data.train[0]), data.train[1]
    shown = _flowers(data)
    grid, axes = _grid(data)
    burn_in = steps // 5
    common: dict[str, Any] = {
        "prior": Gaussian.fan_in(model, gain=2.0),
        "burn_in": burn_in,
        "gap": max(1, (steps - burn_in) // 200),
        "num_draws": 200,
        "seed": seed,
    }
    algorithm_1 = partial(AdamMCMC, lr=3e-3, sigma=3e-2, sigma_along=1.5)
    posteriors = {
        "AdamMCMC": sample(model, flowers, F.cross_entropy, sampler=algorithm_1, warm_start=optimizer, **common),
        "Underdamped": sample(model, flowers, F.cross_entropy, **common),
    }
    runs = {
        name: posterior.predict(data.standardise(torch.cat([shown, data.test[0], grid])))
        for name, posterior in posteriors.items()
    }

    for name, posterior in posteriors.items():
        console.print(f"[bold]{name}[/] samples {posterior.target}", soft_wrap=True, highlight=False)
        mean = float(posterior.trace("potential").mean())
        console.print(f"  mean of U over the draws {mean:.0f}; {posterior.health()[0]}", soft_wrap=True, highlight=False)
    table = Table(title="Predictions: mean and 25%-75% spread over the draws")
    for heading in ("petal, cm", "true", "predicted", *runs):
        table.add_column(heading, justify="left")
    for i, petal in enumerate(shown):
        exact_mean = runs["Underdamped"].mean[i]
        k = int(exact_mean.argmax())
        truth = CLASSES[int(data.test[1][i])] if i < len(shown) - 1 else "unseen"
        cells = [
            f"{float(r.mean[i, k]):.2f} [{float(r.quantile(0.25)[i, k]):.2f}, {float(r.quantile(0.75)[i, k]):.2f}]"
            for r in runs.values()
        ]
        table.add_row(f"{float(petal[0]):.1f} x {float(petal[1]):.1f}", truth, CLASSES[k], *cells)
    console.print(table)
    test = slice(len(shown), len(shown) + len(data.test[0]))
    right = float((runs["Underdamped"].mean[test].argmax(1) == data.test[1]).float().mean())
    ratio = float(runs["AdamMCMC"].spread.mean() / runs["Underdamped"].spread.mean())
    console.print(
        f"Test accuracy {right:.0%}. The spread under AdamMCMC, which is approximate, is {ratio:.2f} of the exact one.",
        soft_wrap=True,
        highlight=False,
    )
    draw_picture(output, data, runs, slice(len(shown) + len(data.test[0]), None), axes)
    console.print(f"Figure: {output}", highlight=False)


def _flowers(data: Irises) -> Tensor:
    """The first test flowers, and one unlike any flower in the data."""
    return torch.cat([data.test[0][:6], torch.tensor([[2.0, 3.0]])])


def _grid(data: Irises) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    x, y = torch.linspace(0.0, 8.5, 110), torch.linspace(0.0, 3.5, 110)
    return torch.cartesian_prod(x, y), (x, y)


def draw_picture(output: Path, data: Irises, runs: dict[str, Prediction], rows: slice, axes: tuple[Tensor, Tensor]) -> None:
    """Three maps over the petals: the mean prediction, and the spread of both samplers on one colour scale."""
    figure = Figure(figsize=(13.5, 4.6), layout="constrained")
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    x, y = axes
    extent = (float(x[0]), float(x[-1]), float(y[0]), float(y[-1]))
    size = (len(x), len(y))
    colours = torch.tensor([to_rgb(c) for c in _COLOURS])
    mean = (runs["Underdamped"].mean[rows] @ colours).reshape(*size, 3).transpose(0, 1)
    panels[0].imshow(mean.clamp(0, 1).numpy(), origin="lower", extent=extent, aspect="auto", alpha=0.75)
    panels[0].set_title("Prediction of the network\n(mean over exact draws)")
    spreads = {name: run.spread[rows].amax(1).reshape(size).T for name, run in runs.items()}
    top = max(float(s.max()) for s in spreads.values())
    titles = {
        "AdamMCMC": "Uncertainty by AdamMCMC\n(Algorithm 1: approximate)",
        "Underdamped": "Uncertainty by Underdamped\n(exact)",
    }
    for panel, (name, spread) in zip(panels[1:], spreads.items(), strict=True):
        image = panel.imshow(spread.numpy(), origin="lower", extent=extent, aspect="auto", cmap="magma", vmin=0, vmax=top)
        panel.set_title(titles[name])
    figure.colorbar(image, ax=panels[1:], label="spread of the class probability, 75% - 25%", shrink=0.9)
    for panel in panels:
        for k, (kind, colour) in enumerate(zip(CLASSES, _COLOURS, strict=True)):
            flowers = data.train[0][data.train[1] == k]
            panel.scatter(*flowers.T.numpy(), s=16, color=colour, edgecolor="white", linewidth=0.5, label=kind)
        panel.set_xlabel("petal length, cm")
    panels[0].set_ylabel("petal width, cm")
    panels[0].legend(loc="upper left", framealpha=0.9)
    figure.savefig(output, dpi=140)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a network this small gains nothing from more, and is slower if cores are shared
    main()
