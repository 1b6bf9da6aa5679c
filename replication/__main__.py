"""The command: python -m replication fig1"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_FIGURES = {
    "headline": "does the spread follow sigma or lambda? On a posterior whose truth is known",
    "fig1": "training loss and test accuracy of Adam, SGD, sgHMC and AdamMCMC",
    "fig2a": "acceptance and accuracy against sigma_Delta and beta",
    "fig2b": "acceptance and accuracy against sigma, with and without noise along the step",
    "fig3": "mean prediction and spread against sigma, and their calibration",
    "epochs": "Figures 2b and 3 at the paper's number of epochs",
    "fig4": "full-data and minibatch acceptance tests",
    "ood": "mutual information of out-of-distribution jets",
    "lambda": "the inverse temperature",
    "theorems": "convergence with the correction C, and the bias without it",
}
_PRESETS = {
    "smoke": "about a minute per figure, tests the code",
    "small": "the bundled jets; up to an hour per figure on a CPU",
    "h200": "20,000 jets; minutes on a GPU, needs --jets",
    "paper": "the paper's 1.2 million jets and 240,000 steps, needs --jets",
}
_DESCRIPTION = """\
Replicate the figures of the AdamMCMC paper (arXiv:2312.14027): as released, as printed, and exact.

Run it from a clone of the repository. A figure is made of trials: one sampler with one setting and one seed.
Every finished trial is kept in OUTPUT/trials, and figures share them. A command that was stopped or killed
continues with the missing trials, and inside a trial from its last checkpoint: run the same command again.
It writes FIGURE.json (all numbers), FIGURE.png and FIGURE.md. Our results are in docs/replication.md.
"""
_EXAMPLES = """\
examples:
  python -m replication fig1                          smallest size, a minute on a CPU
  python -m replication fig3 fig4 --preset small      the bundled jets
  python -m replication all --preset h200 --jets JETS --workers 11
"""


def _table(rows: dict[str, str]) -> str:
    return "\n".join(f"  {name:<10} {words}" for name, words in rows.items())


def _parser() -> argparse.ArgumentParser:
    lists = f"figures:\n{_table(_FIGURES)}\n\npresets:\n{_table(_PRESETS)}\n\n{_EXAMPLES}"
    parser = argparse.ArgumentParser(
        "python -m replication", description=_DESCRIPTION, epilog=lists, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="one or more of the figures below, or all")
    parser.add_argument("--list", action="store_true", help="list the figures and presets, and stop")
    parser.add_argument("--preset", default="smoke", help="how large: smoke (default), small, h200 or paper")
    parser.add_argument("--jets", type=Path, help="a folder with `train` and `others`; default: the bundled jets")
    parser.add_argument("--output", "-o", type=Path, help="a folder; default: replication/results/PRESET")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the trials (default: 1)")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = _parser()
    given = parser.parse_args(words)
    if given.list:
        print(f"figures:\n{_table(_FIGURES)}\n\npresets:\n{_table(_PRESETS)}")
        return 0
    if not given.figures:
        parser.error("name a figure, such as fig1, or all (--list shows them)")
    if given.workers < 1:
        parser.error(f"--workers must be at least 1, got {given.workers}")
    folder = given.output or Path(__file__).parent / "results" / given.preset
    try:
        from replication.results import FIGURES, figure_module, replicate
        from replication.settings import preset

        size, names = preset(given.preset), list(FIGURES) if "all" in given.figures else given.figures
        for name in names:  # before the first of them runs
            figure_module(name)
        for name in names:
            document = replicate(name, size, folder, jets=given.jets, workers=given.workers)
            print(f"{document['title']}: {folder / name}.png ({document['command_seconds']:.0f} s)")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stopped; {folder} keeps the finished trials. Run the same command again to continue.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
