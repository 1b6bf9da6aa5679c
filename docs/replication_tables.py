"""Writes docs/replication-tables.md and the pictures of docs/replication.md from replication/results/h200: python docs/replication_tables.py"""

# ruff: noqa: E501  (paragraphs of Markdown)
from __future__ import annotations

from pathlib import Path
from typing import Any

from replication.results import FIGURES, figure_module, read_result
from replication.rows import VERSIONS
from replication.sections import Line, agreement

HERE = Path(__file__).parent
RESULTS = HERE.parent / "replication" / "results" / "h200"
PAGE = HERE / "replication-tables.md"
PICTURES = HERE / "assets" / "replication"

BEGIN = """\
# The paper, replicated: all numbers

Every number that was published and that our jets can speak to, beside ours; what it means is in [The paper, replicated](replication.md). (This page is made from `replication/results/h200/*.json`: `python docs/replication_tables.py`.)

The names: *as released* is the published code's proposal with its loss, the mean over a batch (`AsReleased`); *as printed* is Algorithm 1 (`AdamMCMC`) with the loss summed over the batch, or scaled to the sum over all data; *exact* is `Underdamped` on all data at once.
sigma, sigma_Delta and lambda are the paper's nominal ones: [units](target.md). Trials ran in eleven processes at once, and figures share some of them: a figure's wall time is about an eleventh of the minutes given.

How many of the published numbers each version has, of those it speaks to (*same* by the rule below each table; where errors are too large to tell, a number counts as not had, and is given in brackets; points that two scans share count twice, and some published numbers are zeros, which are easily had):

| | as released | as printed, batch sum | as printed, data sum |
|---|---|---|---|
"""


def _counted() -> str:
    """The rows of the first table."""
    found = []
    for name in FIGURES:
        module, result = figure_module(name), read_result(RESULTS / f"{name}.json")["result"]
        if hasattr(module, "lines"):
            found.append(_count(module.TITLE, module.lines(result)))
    return "".join(found)


def _count(title: str, lines: list[Line]) -> str:
    cells = []
    for version in VERSIONS:
        same, spoken, vague = agreement(lines, version)
        cells.append(f"{same} of {spoken}" + (f" ({vague} cannot tell)" if vague else "") if spoken else "–")
    return f"| {title} | {' | '.join(cells)} |\n"


def page() -> str:
    """The text."""
    return BEGIN + _counted() + "".join(_part(read_result(RESULTS / f"{name}.json")) for name in FIGURES)


def _part(document: dict[str, Any]) -> str:
    name, trials = document["figure"], document["trials"]
    section = figure_module(name).section(document["result"]).strip()
    if trials["number"]:
        seeds = f"{len(trials['seeds'])} seeds, {trials['number']} trials on {' and '.join(trials['devices'])}"
        took = f"{seeds}, {trials['seconds'] / 60:.0f} minutes summed over the processes"
    else:
        took = f"{document['command_seconds'] / 60:.0f} minutes on a CPU"
    return f"\n## {document['title']}\n\n`{document['command']}`: {took}.\n\n![{document['title']}](assets/replication/{name}.png)\n\n{section}\n"


def main() -> None:
    """Write the page and the pictures."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in FIGURES:
        document = read_result(RESULTS / f"{name}.json")
        figure_module(name).draw(document["result"]).savefig(PICTURES / f"{name}.png", dpi=100, bbox_inches="tight")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
