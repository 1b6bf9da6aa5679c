"""The bundled demo: the paper's task, scaled down. ParticleNet-Lite learns to separate top jets from QCD jets, AdamMCMC samples
its weights, and the draws measure its uncertainty, also on kinds of jets that it was not trained on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from adammcmc.jets.data import Jets
from adammcmc.jets.figures import LABELS, draw, panel_groups, panel_information, panel_roc
from adammcmc.jets.files import bundled, read_jets
from adammcmc.jets.metrics import Band, compare_kinds, evaluate, scores_of
from adammcmc.jets.tagger import Tagger, Training
from adammcmc.posterior.predictive import Prediction

__all__ = ["run_demo"]

NUM_TEST = 2400


def run_demo(output: Path, *, epochs: int = 8, gap: int = 20, num_draws: int = 10, seed: int = 0) -> None:
    """Train, sample, print tables, and write the figure and the report."""
    import jinja2  # noqa: F401  (report a missing package before the work)
    import matplotlib  # noqa: F401
    from rich.console import Console

    if output.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"the figure must be a .png, .pdf or .svg file, got '{output}'.")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"the folder '{output.parent}' for the figure does not exist.")
    console, began = Console(), time.monotonic()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False)

    jets, others = read_jets(bundled("jets")), read_jets(bundled("others"))
    train, test = jets[:-NUM_TEST], jets[-NUM_TEST:]
    say(f"[bold]1. Adam[/] trains ParticleNet-Lite on {train!r}. The demo takes two to four minutes on two cores.")
    tagger = Tagger(Training("lite", epochs=epochs, batch_size=256, lr=4e-3, seed=seed))
    tagger.train(train)
    say(f"[bold]2. AdamMCMC[/] samples its {sum(p.numel() for p in tagger.net.parameters()):,} weights.")
    posterior = tagger.sample(train, batch_size=256, burn_in=5 * gap, gap=gap, num_draws=num_draws, seed=seed)
    say(f"   target: {posterior.target}")
    say(f"   {posterior.health()[0]}")
    say("   (This is the paper's algorithm, as printed. `Underdamped` is an exact alternative for smaller networks and data.)")
    say(f"[bold]3. {num_draws} draws[/] predict {NUM_TEST:,} held-out jets and {len(others):,} out-of-distribution jets.")
    prediction, unseen = tagger.predict(posterior, test), tagger.predict(posterior, others)
    numbers = evaluate(prediction, test.kind)
    say(
        f"   accuracy {numbers.accuracy}, AUC {numbers.auc}, background rejection {numbers.rejection_30} at 30% and "
        f"{numbers.rejection_50} at 50% signal efficiency"
    )
    console.print(_groups_table(numbers.groups))
    console.print(_information_table((test, prediction), (others, unseen)))
    with draw(output, 3) as (left, middle, right):
        panel_roc(left, prediction, test.kind)
        panel_groups(middle, prediction, test.kind)
        panel_information(right, (test, prediction), (others, unseen))
    page = posterior.report(
        output.with_suffix(".html"),
        tagger.data(test),
        names=[f"{LABELS['top' if kind else 'qcd']} jet {i}" for i, kind in enumerate(test.kind.tolist())],
        title="Top tagging on a small scale: ParticleNet-Lite, AdamMCMC",
    )
    say(f"Figure: {output}, after {time.monotonic() - began:.0f} s. Next: `adammcmc jets --help`, docs/jets.md.")
    say(f"[bold]Report[/]: {page.resolve().as_uri()}")


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
