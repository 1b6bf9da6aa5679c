"""What the sections of the page share: the table of published and measured numbers, its verdicts, and the health lines.

A number is the "same" if the published one lies in our 95% interval, or within the precision to which the published
figure can be read. With n seeds of standard error s, and an error e from the test jets, which all seeds share, the
condition is

    |ours - published| <= max(sqrt((t s)^2 + (2 e)^2), reading)

with t the 97.5% point of Student's distribution with n - 1 degrees of freedom.

A single seed has no s. If the half width exceeds half of the published number (and the reading), agreement is
meaningless, and the verdict is "cannot tell".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from replication import published
from replication.drawing import LABELS, Value
from replication.rows import VERSIONS

RULE = (
    "Ours: mean ± standard error over the seeds. *Same*: the published number is in the 95% interval of ours (Student's, with "
    "the error of the test jets), or as near as the published figure can be read ({read_to}). *Cannot tell*: in an interval of "
    "more than half of the published number on either side."
)


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Args:
        what: a description.
        published: a number, a statement in words, or None.
        ours: [mean, error] by sampler.
        read_to: the precision of the published number.
        digits: after the decimal point.
        seeds: the number behind the errors; by sampler, or the same for all.
        test_error: the contribution of the test jets, which all seeds share; by sampler, or the same for all.
    """

    what: str
    published: float | str | None
    ours: dict[str, Value]
    read_to: float = 0.0
    digits: int = 3
    seeds: int | dict[str, int] = 3
    test_error: float | dict[str, float] = 0.0

    def half_width(self, name: str) -> float:
        """Half the width of the 95% interval of this sampler's number."""
        value = self.ours.get(name)
        own = 0.0 if value is None or value[1] is None else value[1]
        error = self.test_error.get(name, 0.0) if isinstance(self.test_error, dict) else self.test_error
        seeds = self.seeds.get(name, 1) if isinstance(self.seeds, dict) else self.seeds
        return math.hypot(_STUDENT.get(seeds - 1, 2.0) * own, 2 * error)

    def is_same(self, name: str) -> bool:
        """Whether this sampler reproduces the published number: the rule above."""
        return self._is_within(name, max(self.half_width(name), self.read_to))

    def is_vague(self, name: str) -> bool:
        """Whether the interval is so wide that agreement is meaningless."""
        if not isinstance(self.published, float):
            return False
        return self.is_same(name) and self.half_width(name) > max(abs(self.published) / 2, self.read_to)

    def _is_within(self, name: str, allowed: float) -> bool:
        value = self.ours.get(name)
        if value is None or value[0] is None or not isinstance(self.published, float):
            return False
        return abs(value[0] - self.published) <= allowed * (1 + 1e-9)


_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""97.5% points of Student's distribution by degrees of freedom; 2 for many."""


def of_test_jets(share: float, rows: Sequence[dict[str, Any]]) -> float:
    """The binomial error of a fraction p of the test jets, such as an accuracy: sqrt(p (1 - p) / n)."""
    number = min((row["num_test"] for row in rows), default=0)
    return math.sqrt(max(0.0, share * (1 - share)) / number) if number else 0.0


def of_acceptance(words: str, rows: Sequence[dict[str, Any]], accepted: float | None, error: float | None) -> list[Line]:
    """Acceptance and, if published, 1 - accuracy at one setting; `rows` has one row per sampler."""
    seeds, wrong = seeds_by(rows), {name: error_of(value) for name, value in at(rows, "accuracy").items()}
    found = [Line(f"acceptance, {words}", accepted, at(rows, "acceptance"), published.ACCEPTANCE_READ_TO, seeds=seeds)]
    if error is not None:
        jets = of_test_jets(error, rows)
        found.append(Line(f"1 - accuracy, {words}", error, wrong, published.ERROR_READ_TO, seeds=seeds, test_error=jets))
    return found


def table(lines: Sequence[Line], columns: Sequence[str]) -> str:
    """Markdown: description, published, one column per sampler, verdict."""
    rows = []
    for line in lines:
        published = f"{line.published:.{line.digits}f}" if isinstance(line.published, float) else line.published or "–"
        ours = [shown(line.ours.get(name), line.digits) for name in columns]
        rows.append([line.what, published, *ours, verdict(line, columns)])
    return markdown(["", "published", *(LABELS.get(name, name) for name in columns), "verdict"], rows) + "\n"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, without a newline at its end."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def verdict(line: Line, columns: Sequence[str]) -> str:
    """Which samplers reproduce the published number."""
    if not isinstance(line.published, float):
        return "–"
    known = [name for name in columns if (value := line.ours.get(name)) is not None and value[0] is not None]
    if not known:
        return "–"
    vague = [LABELS.get(name, name) for name in known if line.is_vague(name)]
    agreeing = [LABELS.get(name, name) for name in known if line.is_same(name) and not line.is_vague(name)]
    if len(vague) == len(known):
        return "cannot tell"
    if len(agreeing) == len(known):
        return "same"
    found = f"same: {'; '.join(agreeing)}" if agreeing else "differs"
    return found + (f" (cannot tell: {'; '.join(vague)})" if vague else "")


def agreement(lines: Sequence[Line], name: str) -> tuple[int, int, int]:
    """How many published numbers this sampler reproduces, out of how many it measures, and how many are undecided."""
    spoken = [line for line in lines if isinstance(line.published, float) and (line.ours.get(name) or [None])[0] is not None]
    vague = sum(line.is_vague(name) for line in spoken)
    return sum(line.is_same(name) for line in spoken) - vague, len(spoken), vague


def shown(value: Value, digits: int = 3) -> str:
    """0.602 ± 0.004; a dash for a missing value."""
    if value is None or value[0] is None or not math.isfinite(value[0]):
        return "–"
    if value[1] is None:
        return f"{value[0]:.{digits}f}"
    return f"{value[0]:.{digits}f} ± {value[1]:.{digits}f}"


def name_of(row: dict[str, Any]) -> str:
    """The sampler of a row, as in `drawing.COLOURS`."""
    setting = row["setting"]
    for name, options in VERSIONS.items():
        if all(setting[key] == value for key, value in options.items()):
            return name
    return str(setting["method"])


def select(rows: Iterable[dict[str, Any]], name: str, **settings: Any) -> list[dict[str, Any]]:
    """The rows of one sampler, with these settings."""
    return [
        row for row in rows if name_of(row) == name and all(row["setting"][key] == value for key, value in settings.items())
    ]


def at(rows: Iterable[dict[str, Any]], what: str, **settings: Any) -> dict[str, Value]:
    """One column at these settings, by sampler."""
    found: dict[str, Value] = {}
    for row in rows:
        if all(row["setting"][key] == value for key, value in settings.items()):
            found[name_of(row)] = row[what]
    return found


def seeds_by(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """The number of seeds of each sampler."""
    return {name_of(row): row["seeds"] for row in rows}


def error_of(value: Value) -> Value:
    """1 - accuracy."""
    return None if value is None or value[0] is None else [1 - value[0], value[1]]


def health(rows: Iterable[dict[str, Any]]) -> str:
    """For each sampler: how many of its chains are healthy, and the verdict of the first one at its middle setting."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["verdicts"]:
            by_name.setdefault(name_of(row), []).append(row)
    lines = ["Health, as the samplers see it:", ""]
    for name, own in by_name.items():
        middle = own[len(own) // 2]
        chains = sum(len(row["verdicts"]) for row in own)
        lines.append(
            f"- {LABELS.get(name, name)}: {sum(row['healthy'] for row in own)} of {chains} chains healthy. "
            f"At {where(middle)}: {middle['verdicts'][0]}."
        )
    return "\n".join(lines) + "\n" if by_name else ""


def exact_data(exact: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> str:
    """A sentence: exact chains use fewer jets than the others, which alone makes them wider and less accurate."""
    if not exact or not others:
        return ""
    few, many = exact[0]["setting"], others[0]["setting"]
    return (
        f"Exact chains have {few['num_jets']:,} jets, all in each step; the others {many['num_jets']:,}, in batches of "
        f"{many['batch_size']:,}."
    )


def of_anchors(rows: Sequence[dict[str, Any]]) -> str:
    """The runs on the paper's network, one line per setting."""
    lines = ["", "On the paper's network:", ""]
    for row in rows:
        name, steps = name_of(row), f"{row['setting']['steps']:,} steps"
        runs = "1 run" if row["seeds"] == 1 else f"{row['seeds']} runs"
        accepted = "" if row["acceptance"] is None else f"acceptance {shown(row['acceptance'])}, "
        lines.append(
            f"- {LABELS.get(name, name)}, {where(row)}, {steps}: {accepted}accuracy {shown(row['accuracy'])}, NLL "
            f"{shown(row['nll'])}, mean spread {shown(row['mean_spread'])} ({runs})."
        )
    return "\n".join(lines) + "\n" if rows else ""


def where(row: dict[str, Any]) -> str:
    """A setting, described."""
    setting = row["setting"]
    if setting["method"] == "exact":
        return f"lambda {setting['lam']:g}, target acceptance {setting['target_acceptance']}"
    if setting["method"] not in ("released", "printed"):
        return f"learning rate {setting['lr']:g}"
    test = "" if setting["test"] == "minibatch" else f", {setting['test']} correction"
    start = f", after {setting['start']:,} steps of Adam" if setting["start"] else ""
    return f"sigma {setting['sigma']:g}, sigma_Delta {setting['sigma_delta']:g}, lambda {setting['lam']:g}{test}{start}"
