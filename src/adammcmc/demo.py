"""The bundled example: the paper's job in small. ParticleNet-Lite learns to tell top jets from QCD jets, AdamMCMC draws its
weights, and the draws say how sure it is, also about kinds of jets that it never saw."""

from __future__ import annotations

from pathlib import Path

import torch

from adammcmc.jets.data import KINDS, Jets
from adammcmc.jets.figures import LABELS, panel_groups, panel_information, panel_roc
from adammcmc.jets.files import bundled, read_jets
from adammcmc.jets.tagger import Tagger, Training
from adammcmc.jets.tagging import auc, evaluate, scores_of
from adammcmc.predictive import Prediction

__all__ = ["draw_picture", "run_demo"]

NUM_TEST = 2400


def run_demo(output: Path, *, epochs: int = 8, gap: int = 20, num_draws: int = 10, seed: int = 0) -> None:
    """Train, sample, print tables, draw the picture."""
    from matplotlib.figure import Figure  # noqa: F401  (missing? then say so before the work, not after it)
    from rich.console import Console
    from rich.table import Table

    if not output.parent.is_dir():
        raise FileNotFoundError(f"the folder '{output.parent}' for the picture does not exist.")
    console = Console()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False)

    jets, others = read_jets(bundled("jets")), read_jets(bundled("others"))
    train, test = jets[:-NUM_TEST], jets[-NUM_TEST:]
    say(f"[bold]1. Adam[/] trains ParticleNet-Lite on {train!r}.")
    tagger = Tagger(Training("lite", epochs=epochs, batch_size=256, lr=4e-3, seed=seed))
    tagger.train(train)
    say(f"[bold]2. AdamMCMC[/] draws its {sum(p.numel() for p in tagger.net.parameters()):,} weights.")
    posterior = tagger.sample(train, batch_size=256, burn_in=5 * gap, gap=gap, num_draws=num_draws, seed=seed)
    say(f"   samples {posterior.target}")
    say(f"   {posterior.health()[0]}")
    say(f"[bold]3. {num_draws} draws[/] predict {NUM_TEST:,} jets that were held out, and {len(others):,} of other kinds.")
    prediction, unseen = tagger.predict(posterior, test), tagger.predict(posterior, others)
    numbers = evaluate(prediction, test.kind)
    say(
        f"   accuracy {numbers.accuracy}, AUC {numbers.auc}, background rejection {numbers.rejection_30} at 30% and "
        f"{numbers.rejection_50} at 50% signal efficiency"
    )
    table = Table(title="Held-out jets: median over the jets, [25%, 75%]")
    for heading in ("jets", "number", "mean prediction", "spread (75%-25% over draws)"):
        table.add_column(heading)
    for name, band in numbers.groups.items():
        mean, spread = (f"{m:.3f} [{a:.3f}, {b:.3f}]" for a, m, b in (band.mean, band.spread))
        table.add_row(name, f"{band.jets:,}", mean, spread)
    console.print(table)
    console.print(_information_table(test, prediction, others, unseen))
    draw_picture(output, (test, prediction), (others, unseen))
    say(f"Picture: {output}. Next: `adammcmc jets --help`, docs/jets.md.")


def _information_table(test: Jets, prediction: Prediction, others: Jets, unseen: Prediction) -> object:
    """Mutual information of each kind, and how well it tells the kind from the held-out jets."""
    from rich.table import Table

    table = Table(
        title="Mutual information: what the weights do not know. AUROC: how well it tells these jets from held-out ones"
    )
    for heading in ("jets", "pT, GeV", "as top", "mutual information", "AUROC"):
        table.add_column(heading)
    known = prediction.mutual_information
    for jets, said in ((test, prediction), (others, unseen)):
        for number, name in enumerate(KINDS):
            chosen = jets.kind == number
            if not bool(chosen.any()):
                continue
            information = said.mutual_information[chosen]
            telling = ""
            if jets is others:
                values = torch.cat([known, information])
                value = auc(values, torch.cat([torch.zeros(len(known)), torch.ones(len(information))]))
                telling = f"{value.value:.2f} +- {value.error:.2f}"
            low, high = jets.jet[chosen, 0].aminmax()
            table.add_row(
                LABELS[name] + (", held out" if jets is test else ""),
                f"{float(low):.0f}-{float(high):.0f}",
                f"{float((scores_of(said)[chosen] > 0.5).float().mean()):.0%}",
                f"{float(information.mean()):.4f} +- {float(information.std() / len(information) ** 0.5):.4f}",
                telling,
            )
    return table


def draw_picture(output: Path, seen: tuple[Jets, Prediction], elsewhere: tuple[Jets, Prediction]) -> None:
    """Tagging, spread by class and correctness, mutual information against pT."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    panel_roc(left, seen[1], seen[0].kind)
    panel_groups(middle, seen[1], seen[0].kind)
    panel_information(right, seen, elsewhere)
    figure.savefig(output, dpi=140)
