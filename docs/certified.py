"""Writes docs/certified.md from benchmarks/results/nuts_cpu.json and the references: python -m docs.certified"""

# ruff: noqa: E501  (paragraphs of Markdown)
from __future__ import annotations

import inspect
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from benchmarks.posteriors.compare import (
    AGREES,
    CHAINS,
    LEAST_DRAWS,
    MAMS_DRAWS,
    NOT_CONVERGED,
    NUTS_DENSE,
    OURS,
    RESULTS,
    RHAT_LIMIT,
    RIVAL_CHAINS,
    TRAJECTORIES,
    Z_LIMIT,
)
from benchmarks.posteriors.reference import FILE
from benchmarks.posteriors.table import TARGETS

PAGE = Path(__file__).parent / "certified.md"
MAMS = f"mams_{TRAJECTORIES[0]}"

BEGIN = f"""\
# Certified targets

{len(TARGETS)} posteriors of the kinds that statisticians use, each with a reference from a long independent run of NUTS. This library at its untouched defaults runs beside NUTS and MAMS (Metropolis-adjusted microcanonical sampling) of blackjax. (This page is generated: `make bench-nuts`, then `python -m docs.certified`.)

## How it was measured

- **Targets.** [`benchmarks/posteriors`](#the-densities) defines each density once, against a few array operations that torch and JAX both have, in float64. A test compares values and gradients of the two. Data are generated from fixed seeds or ship with scikit-learn. Scales are sampled as logarithms, and other constrained parameters by maps whose Jacobians are in the density.
- **Starts.** Every chain starts from N(0, s^2) in each unconstrained coordinate, s = 2 (0.7 and 0.5 on two targets whose density would overflow). On most targets these points are dozens to thousands of posterior standard deviations away.
- **Ours.** `adammcmc.warm_up` and `sample_density` with no argument but the density and {CHAINS} starts; the frozen kernel then draws, 2,000 times per chain (8,000 times on targets that had not converged, `--steps 8000`: {{slow}}). All chains learn one dense metric, so that badly scaled and correlated targets cost little more than others. NUTS and MAMS as their package sets them up adapt each chain by itself, and a diagonal: much of the difference is that choice.
- **NUTS.** `blackjax.window_adaptation` (1,000 steps, diagonal mass matrix, target 0.8) and `blackjax.nuts`: {RIVAL_CHAINS} chains, each with its own adaptation, 1,000 draws each. A dense mass matrix, which blackjax leaves to the user, would help it where coordinates are correlated (`--samplers nuts_dense`; not run for this page).
- **MAMS.** `blackjax.adjusted_mclmc_find_L_and_step_size` (3,000 transitions, diagonal preconditioner, target 0.9) and `blackjax.adjusted_mclmc_dynamic`: {RIVAL_CHAINS} chains, {MAMS_DRAWS:,} draws each. blackjax 1.7 fixes the average trajectory at {TRAJECTORIES[0]} steps. We cap a trajectory at 100 steps: without a cap the adaptation takes up to 100,000 at once on badly scaled targets. *Best* is the best of trajectories of {", ".join(map(str, TRAJECTORIES))} steps, chosen in hindsight with its adaptation not charged: a bound on what tuning the length could give.
- **Efficiency.** Effective draws of the slowest coordinate, of x and of x^2, per 1,000 gradients. A gradient is one evaluation for one chain, so the number of chains cancels. Our gradients are counted; those of NUTS are its leapfrog steps; a step of MAMS (McLachlan's integrator) takes two. Adaptation is not in it, and is given in gradients per chain. Our warm-up pools {CHAINS} chains, so its total is {CHAINS} times the number, and that of the rivals {RIVAL_CHAINS} times.
- **Agreement.** R-hat is the worst over x and x^2. *z* is the largest distance between a run and the reference over the means, standard deviations and mean squares of all coordinates, in standard errors of both. A run has *not converged* if its R-hat exceeds {RHAT_LIMIT}, and what chance gives chains that agree ({CHAINS} short chains need some 6,000 effective draws to have 1.01), or if its slowest coordinate, or distance of one from its median, has fewer than {LEAST_DRAWS} effective draws a chain. Its effective draws are then an upper bound, marked ≤. The others *agree* if z is at most {Z_LIMIT}, and *differ* otherwise.

"""


def page() -> str:
    """The text."""
    found = json.loads(RESULTS.read_text())
    rows = {name: found["targets"][name] for name in TARGETS if name in found["targets"]}
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    slow = ", ".join(f"`{name}`" for name, row in rows.items() if row["samplers"][OURS].get("draws", 0) > 2000)
    parts = [
        BEGIN.format(slow=slow or "none"),
        "## Effective draws per gradient\n\n",
        _summary(rows),
        _efficiency(rows),
        "\n## Agreement with the references\n\n",
    ]
    parts += [_agreement(rows), f"\n`{found['command']}`, on a CPU: {versions}.\n", "\n## The references\n\n", _references()]
    parts += ["\n## The densities\n\nIn `benchmarks/posteriors/`.\n\n", *_densities()]
    return "".join(parts)


def _summary(rows: dict[str, Any]) -> str:
    agreeing = {
        sampler: sum(row["samplers"].get(sampler, {}).get("verdict") == AGREES for row in rows.values())
        for sampler in (OURS, "nuts", NUTS_DENSE, MAMS)
    }
    text = f"Of {len(rows)} targets, {agreeing[OURS]} converge and agree under our defaults, {agreeing['nuts']} under NUTS, "
    if any(NUTS_DENSE in row["samplers"] for row in rows.values()):
        text += f"{agreeing[NUTS_DENSE]} under NUTS with a dense mass matrix, "
    text += f"{agreeing[MAMS]} under MAMS. "
    return text + "".join(_against(rows, *rival) for rival in (("nuts", "NUTS"), (NUTS_DENSE, "dense NUTS"))) + "\n\n"


def _against(rows: dict[str, Any], rival: str, title: str) -> str:
    """Where both agree with the reference."""
    both = {
        name: row["samplers"][OURS]["effective_per_1000"] / row["samplers"][rival]["effective_per_1000"]
        for name, row in rows.items()
        if all(row["samplers"].get(sampler, {}).get("verdict") == AGREES for sampler in (OURS, rival))
    }
    if not both:
        return ""
    median, least, most = statistics.median(both.values()), min(both, key=both.__getitem__), max(both, key=both.__getitem__)
    text = f"Where both {title} and ours do ({len(both)} targets), ours has {median:.2g} times the effective draws per gradient of {title} in the median, "
    text += f"from {both[least]:.2g} (`{least}`) to {both[most]:.4g} (`{most}`): more on {sum(ratio > 1 for ratio in both.values())}, "
    return text + f"at least twice as many on {sum(ratio >= 2 for ratio in both.values())}. "


def _efficiency(rows: dict[str, Any]) -> str:
    is_dense = any(NUTS_DENSE in row["samplers"] for row in rows.values())  # (a run that the page can do without)
    rivals = [OURS, "nuts", *([NUTS_DENSE] if is_dense else []), MAMS]
    dense = ["NUTS, dense", "ours / that"] if is_dense else []
    head = ["target", "dim", "ours", "NUTS", "ours / NUTS", *dense, "MAMS", "MAMS, best", "adaptation: ours", "NUTS"]
    head += [*dense[:1], "MAMS"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, row in rows.items():
        samplers = row["samplers"]
        cells = [_effective(samplers.get(sampler)) for sampler in (OURS, "nuts")] + [_ratio(samplers)]
        cells += [_effective(samplers.get(NUTS_DENSE)), _ratio(samplers, NUTS_DENSE)] if is_dense else []
        cells += [_effective(samplers.get(MAMS)), _effective(_best(samplers))]
        cells += [_adaptation(samplers.get(sampler)) for sampler in rivals]
        lines.append(f"| `{name}` | {row['dim']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _is_run(row: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    return row is not None and "rhat" in row


def _effective(row: dict[str, Any] | None) -> str:
    if not _is_run(row):
        return "failed" if row else "–"
    return ("≤ " if row["verdict"] == NOT_CONVERGED else "") + _number(row["effective_per_1000"])


def _ratio(samplers: dict[str, Any], rival: str = "nuts") -> str:
    a, b = samplers.get(OURS), samplers.get(rival)
    if not (_is_run(a) and _is_run(b)):
        return "–"
    bounds = [row["verdict"] == NOT_CONVERGED for row in (a, b)]
    if all(bounds):
        return "–"
    return ("≤ " if bounds[0] else "≥ " if bounds[1] else "") + _number(a["effective_per_1000"] / b["effective_per_1000"])


def _best(samplers: dict[str, Any]) -> dict[str, Any] | None:
    """Of the converged runs of MAMS that with the most effective draws; of all of them, where none has converged."""
    runs = [row for key, row in samplers.items() if key.startswith("mams_") and _is_run(row)]
    good = [row for row in runs if row["verdict"] != NOT_CONVERGED] or runs
    return max(good, key=lambda row: row["effective_per_1000"], default=None)


def _adaptation(row: dict[str, Any] | None) -> str:
    return f"{row['adaptation']:,}" if _is_run(row) else "–"


def _agreement(rows: dict[str, Any]) -> str:
    lines = ["| target | ours: R-hat | z | | NUTS: R-hat | z | | MAMS: R-hat | z | |", "|---" * 10 + "|"]
    for name, row in rows.items():
        cells = []
        for sampler in (OURS, "nuts", MAMS):
            found = row["samplers"].get(sampler)
            shown = [f"{found['rhat']:.3f}", f"{found['z']:.1f}"] if _is_run(found) else ["–", "–"]
            cells += [*shown, _verdict(found)]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _verdict(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    verdict: str = row["verdict"]
    verdict = verdict if verdict == AGREES else f"**{verdict}**"
    return verdict + (f", {row['divergent']} divergent" if row.get("divergent") else "")


def _references() -> str:
    stored = json.loads(FILE.read_text())
    text = f"`{stored['command']}`: {stored['what']}. `benchmarks/posteriors/reference.json` contains the mean, the standard deviation and the mean square of each coordinate with their Monte Carlo errors.\n\n"
    lines = [
        "| target | | drawn as | mass matrix | draws | effective | R-hat | divergent |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in stored["targets"].items():
        cells = [
            TARGETS[name]().title,
            f"`{row['drawn_as']}`",
            row["mass_matrix"],
            f"{row['draws']:,}",
            f"{row['effective_draws']:,}",
        ]
        lines.append(f"| `{name}` | " + " | ".join([*cells, f"{row['rhat']:.4f}", str(row["divergent"])]) + " |")
    return text + "\n".join(lines) + "\n"


def _densities() -> Iterator[str]:
    for name, make in TARGETS.items():
        text = " ".join((inspect.getdoc(make) or "").split())
        yield f"**`{name}`** ({make.__module__.rsplit('.', 1)[-1]}.py). {_escaped(text)}\n\n"


def _escaped(text: str) -> str:
    for mark in "|*_<[":
        text = text.replace(mark, "\\" + mark if mark != "<" else "&lt;")
    return text


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    PAGE.write_text(page())
