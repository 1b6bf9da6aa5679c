"""The bundled demo: top tagging with draws that can be used.

Chains that start from different trained networks sample all weights of a small network on twelve jet observables, exactly. The
draws measure its uncertainty, also on kinds of jets that it was not trained on. The paper's Algorithm 1 samples the same
target, and a table shows how far it is from the exact draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adammcmc.jets.data import Jets
from adammcmc.jets.figures import LABELS, draw, panel_groups, panel_information, panel_roc
from adammcmc.jets.files import bundled, read_jets
from adammcmc.jets.metrics import Band, accuracy, compare_kinds, evaluate, scores_of
from adammcmc.jets.observables import OBSERVABLES, observables
from adammcmc.posterior.calibration import nll
from adammcmc.posterior.posterior import Posterior
from adammcmc.posterior.predictive import Prediction
from adammcmc.runs.factory import Factory
from adammcmc.runs.members import train_members
from adammcmc.runs.plan import sample
from adammcmc.samplers.adam import AdamMCMC
from adammcmc.samplers.exact import Underdamped
from adammcmc.target.priors import Gaussian

__all__ = ["run_demo", "standardised"]

NUM_TEST = 9600  # with more than the other 2,400 to train on, chains take longer to mix
BATCH_SIZE = 256  # of Adam and of Algorithm 1


def run_demo(output: Path, *, num_chains: int = 4, num_draws: int = 300, gap: int = 60, seed: int = 0) -> Posterior:
    """Train, sample, print tables, and write the figure and the report. Returns the exact draws."""
    import jinja2  # noqa: F401  (report a missing package before the work)
    import matplotlib  # noqa: F401
    from rich.console import Console

    if output.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"the figure must be a .png, .pdf or .svg file, got '{output}'.")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"the folder '{output.parent}' for the figure does not exist.")
    console, began = Console(), time.monotonic()
    say = partial(console.print, soft_wrap=True, highlight=False)

    jets, others = read_jets(bundled("jets")), read_jets(bundled("others"))
    train, test = jets[:-NUM_TEST], jets[-NUM_TEST:]
    known, held_out, unseen = standardised(train, test, others)
    say(f"[bold]1. Adam[/] trains {num_chains} networks on twelve observables of {train!r}.")
    chains = _chains(known, num_chains=num_chains, num_draws=num_draws, gap=gap, seed=seed)
    say("[bold]2. Underdamped[/], which is exact, samples all weights from each of these starts, for a minute or two.")
    posterior = chains(partial(Underdamped, preconditioner="kron"), None)
    say(str(posterior.summary(held_out)), markup=False)
    say(f"[bold]3. AdamMCMC[/], the paper's Algorithm 1, samples the same target from these starts, {BATCH_SIZE} jets a step.")
    paper = chains(partial(AdamMCMC, lr=1e-3, sigma=3e-4, sigma_along=2.0), BATCH_SIZE)
    runs = {"Underdamped": posterior, "Underdamped, one chain": posterior.chain(0), "AdamMCMC": paper}
    predictions = {name: draws.predict(held_out) for name, draws in runs.items()}
    verdict = paper.summary(held_out)
    say(f"{verdict.grade}: {verdict.verdict}.", markup=False)
    console.print(_truth_table(predictions, test.kind))
    say(f"[bold]4. The exact draws[/] predict {len(test):,} held-out jets and {len(others):,} out-of-distribution jets.")
    prediction, elsewhere = predictions["Underdamped"], posterior.predict(unseen)
    numbers = evaluate(prediction, test.kind)
    say(
        f"   accuracy {numbers.accuracy}, AUC {numbers.auc}, background rejection {numbers.rejection_30} at 30% and "
        f"{numbers.rejection_50} at 50% signal efficiency"
    )
    console.print(_groups_table(numbers.groups))
    console.print(_information_table((test, prediction), (others, elsewhere)))
    with draw(output, 3) as (left, middle, right):
        panel_roc(left, prediction, test.kind)
        panel_groups(middle, prediction, test.kind, ("AdamMCMC", predictions["AdamMCMC"]))
        panel_information(right, (test, prediction), (others, elsewhere))
    page = posterior.report(
        output.with_suffix(".html"),
        held_out,
        names=[f"{LABELS['top' if kind else 'qcd']} jet {i}" for i, kind in enumerate(test.kind.tolist())],
        title="Top tagging: all weights of a network on twelve jet observables",
    )
    say(f"Figure: {output}, after {time.monotonic() - began:.0f} s. Next: `adammcmc jets --help`, docs/jets.md.")
    say(f"[bold]Report[/]: {page.resolve().as_uri()}")
    return posterior


def standardised(train: Jets, *more: Jets) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of each sample: the observables, in standard deviations of the training jets from their mean."""
    tables = [torch.stack([*observables(jets).values()], 1) for jets in (train, *more)]
    mean, std = tables[0].mean(0), tables[0].std(0)
    return [((x - mean) / std, jets.kind.long()) for x, jets in zip(tables, (train, *more), strict=True)]


def _chains(
    train: tuple[Tensor, Tensor], *, num_chains: int, num_draws: int, gap: int, seed: int
) -> Callable[[Factory, int | None], Posterior]:
    """Train a network for each chain, and return a function that samples from these starts."""
    net = nn.Sequential(nn.Linear(len(OBSERVABLES), 16), nn.Tanh(), nn.Linear(16, 2))
    start = train_members(net, train, F.cross_entropy, num_chains, lr=4e-3, batch_size=BATCH_SIZE, max_steps=1000, seed=seed)

    def run(sampler: Factory, batch_size: int | None) -> Posterior:
        return sample(
            net,
            train,
            F.cross_entropy,
            sampler=sampler,
            batch_size=batch_size,
            prior=Gaussian.fan_in(net),
            num_chains=num_chains,
            initial=start,
            num_draws=num_draws,
            gap=gap,
            stacked=True,
            seed=seed,
        )

    return run


def _truth_table(predictions: dict[str, Prediction], labels: Tensor) -> Any:
    """Predictions of several runs for held-out jets beside those of the first, which is exact."""
    exact, *_ = predictions.values()
    rows: list[tuple[str, ...]] = []
    for name, found in predictions.items():
        spread = float(found.spread[:, 1].mean() / exact.spread[:, 1].mean())
        distance = float((scores_of(found) - scores_of(exact)).abs().mean())
        quality = accuracy(scores_of(found), labels), nll(found.mean, labels)
        rows.append((name, *map(str, quality), f"{spread:.2f}", f"{distance:.4f}"))
    return _table(
        ("draws of", "accuracy", "NLL, nats", "spread / exact", "distance"),
        rows,
        title="What Algorithm 1 costs in truth, on held-out jets",
        caption="spread: the mean over the jets. distance: |score - exact score|, the mean over the jets.",
    )


def _groups_table(groups: dict[str, Band]) -> Any:
    """Mean and spread by class and correctness."""
    rows: list[tuple[str, ...]] = []
    for name, band in groups.items():
        mean, spread = (f"{m:.3f} [{a:.3f}, {b:.3f}]" for a, m, b in (band.mean, band.spread))
        rows.append((name, f"{band.jets:,}", mean, spread))
    headings = ("jets", "number", "mean prediction", "spread (75%-25% over draws)")
    return _table(headings, rows, title="Held-out jets: median over the jets, [25%, 75%]")


def _information_table(seen: tuple[Jets, Prediction], others: tuple[Jets, Prediction]) -> Any:
    """Mutual information of each kind, beside that of held-out jets."""
    test, prediction = seen
    rows: list[tuple[str, ...]] = []
    for number, name in enumerate(("qcd", "top")):
        values, scores = (x[test.kind == number] for x in (prediction.mutual_information, scores_of(prediction)))
        window, tagged = "{:.0f}-{:.0f}".format(*test.jet[:, 0].aminmax()), f"{float((scores > 0.5).float().mean()):.0%}"
        rows.append((f"{LABELS[name]} held out", window, tagged, f"{float(values.mean()):.4f}"))
    for kind in compare_kinds(prediction, *others):
        information, auroc = kind.information, kind.auroc
        rows.append(
            (
                LABELS[kind.name],
                "{:.0f}-{:.0f}".format(*kind.pt),
                f"{kind.tagged:.0%}",
                f"{information.value:.4f}±{information.error:.4f}",
                f"{kind.at_equal_score:.4f}",
                f"{auroc.value:.2f}±{auroc.error:.2f}",
            )
        )
    return _table(
        ("jets", "pT, GeV", "tagged as top", "information", "equal score", "AUROC"),
        rows,
        title="Mutual information, in nats: uncertainty about the weights",
        caption="equal score: held-out jets with the same scores. AUROC: separation from held-out jets by mutual information.",
    )


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]], title: str, caption: str | None = None) -> Any:
    from rich.table import Table

    table = Table(*headings, title=title, caption=caption)
    for row in rows:
        table.add_row(*row)
    return table
