"""The bundled example: a small network on Fisher's irises, sampled twice, with what it knows and what it does not.

Algorithm 1 (approximate) and `Underdamped` (exact) sample the same posterior of the same network, so the picture shows two
things: where the network is unsure, and how far the approximate sampler is from the truth.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adammcmc.exact import Underdamped
from adammcmc.health import Health
from adammcmc.optimizer import AdamMCMC
from adammcmc.progress import track
from adammcmc.sampler import Sampler
from adammcmc.target import Gaussian, Prior

__all__ = ["Irises", "Run", "draw_picture", "irises", "run_demo", "sample", "train"]

CLASSES = ("setosa", "versicolor", "virginica")
_COLOURS = ("#0072B2", "#E69F00", "#009E73")  # Okabe-Ito: told apart by everyone


class Irises(NamedTuple):
    """Petal length and width in cm, standardised by `mean` and `scale` where a network sees them."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    mean: Tensor
    scale: Tensor

    def standardise(self, petals: Tensor) -> Tensor:
        return (petals - self.mean) / self.scale


class Run(NamedTuple):
    """One sampler's run: what it sampled, how it went, and its predictions."""

    line: str
    health: Health
    potential: float
    """Mean of U over the draws."""
    predictions: Tensor
    """(draws, inputs, classes)"""

    @property
    def mean(self) -> Tensor:
        return self.predictions.mean(0)

    def quantile(self, q: float) -> Tensor:
        return self.predictions.quantile(q, 0)

    @property
    def spread(self) -> Tensor:
        """75% - 25%, (inputs, classes)."""
        return self.quantile(0.75) - self.quantile(0.25)


def irises(seed: int = 0) -> Irises:
    """The data set that ships with scikit-learn: 120 flowers to learn from, 30 to test."""
    from sklearn.datasets import load_iris

    data = load_iris()
    petals, kind = torch.tensor(data.data[:, 2:], dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(kind), generator=torch.Generator().manual_seed(seed))
    train, test = order[:120], order[120:]
    return Irises((petals[train], kind[train]), (petals[test], kind[test]), petals.mean(0), petals.std(0))


def train(data: Irises, seed: int = 0) -> tuple[nn.Sequential, torch.optim.Adam]:
    """A network trained as everyone trains one."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs, targets = data.standardise(data.train[0]), data.train[1]
    for _ in range(500):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model, optimizer


def sample(
    sampler: Sampler, model: nn.Module, data: Irises, petals: Tensor, *, name: str, num_steps: int, num_draws: int = 200
) -> Run:
    """Run the sampler over full batches; drop the first fifth; predict for `petals` with `num_draws` evenly spaced draws."""
    inputs, targets = data.standardise(data.train[0]), data.train[1]
    asked = data.standardise(petals)
    prior = sampler.target.prior
    assert isinstance(prior, Prior)
    burn_in = num_steps // 5
    gap = max(1, (num_steps - burn_in) // num_draws)
    predictions, potentials = [], []

    def status() -> str:
        return f"loss {float(sampler.info.loss):.3f}  acceptance {float(sampler.mean_acceptance_rate):.2f}"

    for step in track(range(1, num_steps + 1), f"{name:12}", status=status):
        sampler.step(lambda: F.cross_entropy(model(inputs), targets, reduction="none"))
        if step > burn_in and (step - burn_in) % gap == 0:
            with torch.no_grad():
                predictions.append(model(asked).softmax(1))
                log_prior = prior.log_density(list(model.parameters()))
                potentials.append(float(sampler.target.scale * F.cross_entropy(model(inputs), targets) - log_prior))
    return Run(
        sampler.describe(),
        sampler.health(),
        sum(potentials) / len(potentials),
        torch.stack(predictions),
    )


def run_demo(output: Path, *, steps: int, seed: int) -> None:
    """Train, sample twice, print a table, draw the picture."""
    from matplotlib.figure import Figure  # noqa: F401  (missing? then say so before the work, not after it)
    from rich.console import Console
    from rich.table import Table

    if not output.parent.is_dir():
        raise FileNotFoundError(f"the folder '{output.parent}' for the picture does not exist.")
    console = Console()
    data = irises(seed)
    model, optimizer = train(data, seed)
    trained = copy.deepcopy(model.state_dict())
    prior = Gaussian.fan_in(model, gain=2.0)
    grid, axes = _grid(data)
    shown = _flowers(data)
    petals = torch.cat([shown, data.test[0], grid])
    common: dict[str, Any] = {"num_data": len(data.train[0]), "prior": prior, "fixed_data": True}

    runs: dict[str, Run] = {}
    generator = torch.Generator().manual_seed(seed)
    approximate = AdamMCMC(model.parameters(), lr=3e-3, sigma=3e-2, sigma_along=1.5, generator=generator, **common)
    approximate.load_state_dict(optimizer.state_dict())  # train with Adam, then sample
    console.print(f"[bold]AdamMCMC[/] samples {approximate.describe()}", soft_wrap=True, highlight=False)
    runs["AdamMCMC"] = sample(approximate, model, data, petals, name="AdamMCMC", num_steps=steps)

    model.load_state_dict(trained)
    exact = Underdamped(model.parameters(), burn_in=steps // 5, generator=generator, **common)
    console.print(f"[bold]Underdamped[/] samples {exact.describe()}", soft_wrap=True, highlight=False)
    runs["Underdamped"] = sample(exact, model, data, petals, name="Underdamped", num_steps=steps)

    for name, run in runs.items():
        console.print(f"[bold]{name}[/]: mean of U over the draws {run.potential:.0f}", highlight=False)
        console.print(f"  {run.health}", soft_wrap=True, highlight=False)
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
        f"{right:.0%} of the test flowers right. AdamMCMC's spread is {ratio:.2f} of the exact one: approximate, as it says.",
        soft_wrap=True,
        highlight=False,
    )
    draw_picture(output, data, runs, slice(len(shown) + len(data.test[0]), None), axes)
    console.print(f"Picture: {output}", highlight=False)


def _flowers(data: Irises) -> Tensor:
    """The first test flowers, and one that nobody saw."""
    return torch.cat([data.test[0][:6], torch.tensor([[2.0, 3.0]])])


def _grid(data: Irises) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    x, y = torch.linspace(0.0, 8.5, 110), torch.linspace(0.0, 3.5, 110)
    return torch.cartesian_prod(x, y), (x, y)


def draw_picture(output: Path, data: Irises, runs: dict[str, Run], rows: slice, axes: tuple[Tensor, Tensor]) -> None:
    """Three maps over the petals: the mean prediction, and the spread of either sampler on one colour scale."""
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 4.6), layout="constrained")
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    x, y = axes
    extent = (float(x[0]), float(x[-1]), float(y[0]), float(y[-1]))
    size = (len(x), len(y))
    colours = torch.tensor([to_rgb(c) for c in _COLOURS])
    mean = (runs["Underdamped"].mean[rows] @ colours).reshape(*size, 3).transpose(0, 1)
    panels[0].imshow(mean.clamp(0, 1).numpy(), origin="lower", extent=extent, aspect="auto", alpha=0.75)
    panels[0].set_title("What the network predicts\n(mean over exact draws)")
    spreads = {name: run.spread[rows].amax(1).reshape(size).T for name, run in runs.items()}
    top = max(float(s.max()) for s in spreads.values())
    titles = {
        "AdamMCMC": "How unsure it is, by AdamMCMC\n(Algorithm 1: approximate)",
        "Underdamped": "How unsure it is, by Underdamped\n(exact)",
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
