"""The bundled example: the paper's job in small. ParticleNet-Lite learns to tell top jets from QCD jets, AdamMCMC draws its
weights, and the draws say how sure it is, also about kinds of jets that it never saw."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from adammcmc.jets.data import Jets
from adammcmc.jets.figures import LABELS, panel_groups, panel_information, panel_roc
from adammcmc.jets.files import bundled, read_jets
from adammcmc.jets.tagger import Tagger, Training
from adammcmc.jets.tagging import compare_kinds, evaluate, scores_of
from adammcmc.posterior.predictive import Prediction
from adammcmc.posterior.store.whole import whole

__all__ = ["draw_picture", "run_demo"]

NUM_TEST = 2400


def run_demo(output: Path, *, epochs: int = 8, gap: int = 20, num_draws: int = 10, seed: int = 0) -> None:
    """Train, sample, print tables, draw the picture."""
    import jinja2  # noqa: F401  (missing? then say so before the work, not after it)
    from matplotlib.figure import Figure  # noqa: F401
    from rich.console import Console
    from rich.table import Table

    if output.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"the picture must be a .png, .pdf or .svg file, got '{output}'.")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"the folder '{output.parent}' for the picture does not exist.")
    console, began = Console(), time.monotonic()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False)

    jets, others = read_jets(bundled("jets")), read_jets(bundled("others"))
    train, test = jets[:-NUM_TEST], jets[-NUM_TEST:]
    say(f"[bold]1. Adam[/] trains ParticleNet-Lite on {train!r}. All in all two to four minutes on two cores.")
    tagger = Tagger(Training("lite", epochs=epochs, batch_size=256, lr=4e-3, seed=seed))
    tagger.train(train)
    say(f"[bold]2. AdamMCMC[/] draws its {sum(p.numel() for p in tagger.net.parameters()):,} weights.")
    posterior = tagger.sample(train, batch_size=256, burn_in=5 * gap, gap=gap, num_draws=num_draws, seed=seed)
    say(f"   samples {posterior.target}")
    say(f"   {posterior.health()[0]}")
    say("   (This is the paper's algorithm, as printed. An exact one, for networks and data that bear it: `Underdamped`.)")
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
    page = posterior.report(
        output.with_suffix(".html"),
        tagger.data(test),
        names=[f"{LABELS['top' if kind else 'qcd']} jet {i}" for i, kind in enumerate(test.kind.tolist())],
        title="Top tagging in small: ParticleNet-Lite, AdamMCMC",
    )
    say(f"Picture: {output}, after {time.monotonic() - began:.0f} s. Next: `adammcmc jets --help`, docs/jets.md.")
    say(f"[bold]Report[/]: {page.resolve().as_uri()}")


def _information_table(test: Jets, prediction: Prediction, others: Jets, unseen: Prediction) -> Any:
    """Mutual information of each kind, beside that of held-out jets."""
    from rich.table import Table

    table = Table(
        title="Mutual information, in nats: what the weights do not know",
        caption="equal score: held-out jets of the same scores. AUROC: telling these jets from held-out ones by it.",
    )
    for heading in ("jets", "pT, GeV", "as top", "information", "equal score", "AUROC"):
        table.add_column(heading)
    for number, name in enumerate(("qcd", "top")):
        values, scores = (x[test.kind == number] for x in (prediction.mutual_information, scores_of(prediction)))
        window = "{:.0f}-{:.0f}".format(*test.jet[:, 0].aminmax())
        table.add_row(
            f"{LABELS[name]} held out", window, f"{float((scores > 0.5).float().mean()):.0%}", f"{float(values.mean()):.4f}"
        )
    for kind in compare_kinds(prediction, others, unseen):
        table.add_row(
            LABELS[kind.name],
            "{:.0f}-{:.0f}".format(*kind.pt),
            f"{kind.tagged:.0%}",
            f"{kind.information.value:.4f}±{kind.information.error:.4f}",
            f"{kind.at_equal_score:.4f}",
            f"{kind.telling.value:.2f}±{kind.telling.error:.2f}",
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
    with whole(output) as file:
        figure.savefig(file, dpi=140)
