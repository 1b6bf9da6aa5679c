"""What the sections of the page share: the table of published and measured numbers, its verdicts, and the health lines.

The rule of a verdict: "same" if |ours - published| is at most two standard errors over the seeds, or as much as the published
figure can be read to; else it differs. A number of a single seed has no error: for it the reading alone counts. Where two
errors are more than half of the published number (and more than the reading), agreement means nothing, and is not told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from adammcmc.replication.drawing import LABELS, Value
from adammcmc.replication.rows import VERSIONS

__all__ = [
    "RULE",
    "Line",
    "at",
    "error_of",
    "exact_data",
    "health",
    "is_same",
    "name_of",
    "of_anchors",
    "select",
    "shown",
    "table",
    "verdict",
    "where",
]

RULE = (
    "Ours: mean ± standard error over the seeds. *Same*: within two errors of the published number, or as near as the "
    "published figure can be read ({read_to}). *Cannot tell*: within errors that are more than half of the published number."
)


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Args:
        what: in words.
        published: a number, or what was said in words, or None.
        ours: [mean, error] by sampler.
        read_to: how exactly the published number is known.
        digits: after the point.
    """

    what: str
    published: float | str | None
    ours: dict[str, Value]
    read_to: float = 0.0
    digits: int = 3


def table(lines: Sequence[Line], columns: Sequence[str]) -> str:
    """Markdown: what, published, one column for each sampler, verdict."""
    head = ["", "published", *(LABELS.get(name, name) for name in columns), "verdict"]
    rows = [head, ["---"] * len(head)]
    for line in lines:
        published = f"{line.published:.{line.digits}f}" if isinstance(line.published, float) else line.published or "–"
        ours = [shown(line.ours.get(name), line.digits) for name in columns]
        rows.append([line.what, published, *ours, verdict(line, columns)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def verdict(line: Line, columns: Sequence[str]) -> str:
    """Which samplers have the published number."""
    if not isinstance(line.published, float):
        return "–"
    known = [(name, value) for name in columns if (value := line.ours.get(name)) is not None and value[0] is not None]
    if not known:
        return "–"
    known = [(name, value) for name, value in known if not _is_vague(value, line.published, line.read_to)]
    if not known:
        return "cannot tell"
    agreeing = [LABELS.get(name, name) for name, value in known if is_same(value, line.published, line.read_to)]
    if len(agreeing) == len(known):
        return "same"
    return f"same: {'; '.join(agreeing)}" if agreeing else "differs"


def is_same(ours: Value, published: float, read_to: float) -> bool:
    """The rule above."""
    if ours is None or ours[0] is None:
        return False
    allowed = max(2 * (ours[1] or 0.0), read_to)
    return abs(ours[0] - published) <= allowed * (1 + 1e-9)


def _is_vague(ours: Value, published: float, read_to: float) -> bool:
    """Whether it agrees only because its error is large."""
    return (
        ours is not None
        and is_same(ours, published, read_to)
        and not is_same([ours[0], None], published, read_to)
        and 2 * (ours[1] or 0.0) > abs(published) / 2
    )


def shown(value: Value, digits: int = 3) -> str:
    """0.602 ± 0.004, with one digit more for small errors; a dash where there is nothing."""
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
    """One number at these settings, by sampler."""
    found: dict[str, Value] = {}
    for row in rows:
        if all(row["setting"][key] == value for key, value in settings.items()):
            found[name_of(row)] = row[what]
    return found


def error_of(value: Value) -> Value:
    """1 - accuracy, of an accuracy."""
    return None if value is None or value[0] is None else [1 - value[0], value[1]]


def health(rows: Iterable[dict[str, Any]]) -> str:
    """For each sampler: how many of its chains called themselves healthy, and what the first of its middle setting said."""
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
    """A sentence: exact chains have fewer jets than the others, which alone makes them wider and worse."""
    if not exact or not others:
        return ""
    few, many = exact[0]["setting"], others[0]["setting"]
    return (
        f"Exact chains have {few['num_jets']:,} jets, all in each step; the others {many['num_jets']:,}, in batches of "
        f"{many['batch_size']:,}."
    )


def of_anchors(rows: Sequence[dict[str, Any]]) -> str:
    """What was run on the paper's network, a line for each setting."""
    lines = ["", "On the paper's network:", ""]
    for row in rows:
        accepted = "" if row["acceptance"] is None else f"acceptance {shown(row['acceptance'])}, "
        lines.append(
            f"- {LABELS.get(name_of(row), name_of(row))}, {where(row)}: {accepted}accuracy {shown(row['accuracy'])}, "
            f"mean spread {shown(row['mean_spread'])} ({row['seeds']} run{'s' if row['seeds'] > 1 else ''})."
        )
    return "\n".join(lines) + "\n" if rows else ""


def where(row: dict[str, Any]) -> str:
    """A setting in words."""
    setting = row["setting"]
    if setting["method"] == "exact":
        return f"lambda {setting['lam']:g}, target acceptance {setting['target_acceptance']}"
    if setting["method"] not in ("released", "printed"):
        return f"learning rate {setting['lr']:g}"
    return f"sigma {setting['sigma']:g}, sigma_Delta {setting['sigma_delta']:g}, lambda {setting['lam']:g}"
