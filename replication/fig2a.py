"""Figure 2a: acceptance, and accuracy of the posterior mean, against sigma_Delta and against beta."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.figure import Figure

from replication import published
from replication.drawing import LABELS, canvas, crosses, legend, line, points
from replication.fig1 import WIDE
from replication.rows import VERSIONS, lean, rows, version
from replication.sections import RULE, Line, error_of, health, of_acceptance, of_anchors, select, table
from replication.settings import Preset
from replication.work import Work

TITLE = "Figure 2a: acceptance and accuracy against sigma_Delta and beta"
SIGMAS = (0.2, 2.0)
SIGMA_DELTAS = (0.0, 3.7, 37.0, 370.0, WIDE, 37_000.0, 370_000.0)
ONE_MINUS_BETAS = (0.001, 0.01, 0.1, 0.5, 0.9)


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """Both scans at two sigmas in each version; three settings on the paper's network."""
    deltas, betas = preset.points(SIGMA_DELTAS, at_least=(WIDE,)), preset.points(ONE_MINUS_BETAS, at_least=(0.01,))
    by_delta = [
        version(preset, name, sigma=sigma, sigma_delta=delta) for name in VERSIONS for sigma in SIGMAS for delta in deltas
    ]
    by_beta = [
        version(preset, name, sigma=sigma, sigma_delta=WIDE, beta=1 - rest)
        for name in VERSIONS
        for sigma in SIGMAS
        for rest in betas
    ]
    anchors = [
        version(preset, "released", sigma=2.0, sigma_delta=0.0, network="particlenet"),
        version(preset, "released", sigma=2.0, sigma_delta=WIDE, network="particlenet"),
        version(preset, "printed, batch sum", sigma=2.0, sigma_delta=WIDE, network="particlenet"),
    ]
    return {
        "by_delta": lean(rows(work, by_delta)),
        "by_beta": lean(rows(work, by_beta)),
        "anchors": lean(rows(work, anchors, 1)) if preset.anchors else [],
    }


def flat_acceptance(kappa: float) -> float:
    """2 Phi(-kappa): the acceptance of Algorithm 1's proposals on a flat loss."""
    return math.erfc(kappa / math.sqrt(2))


def draw(result: dict[str, Any]) -> Figure:
    """Acceptance and 1 - accuracy against sigma_Delta (left half) and 1 - beta (right half), at both sigmas."""
    with canvas(2, 4, width=12.5, height=7.0) as (figure, axes):
        for column in range(4):
            is_delta, sigma = column < 2, SIGMAS[column % 2]
            rows, (accepted, errors) = _of(result, is_delta=is_delta)
            above, below = axes[column], axes[4 + column]
            for name in VERSIONS:
                own = select(rows, name, sigma=sigma)
                x = [_x(row, is_delta=is_delta) for row in own]
                points(above, x, [row["acceptance"] for row in own], name)
                points(below, x, [error_of(row["accuracy"]) for row in own], name)
                if name != "released":  # whose proposals have another distribution
                    flat = [None if row["kappa"] is None else flat_acceptance(row["kappa"][0]) for row in own]
                    line(above, x, flat, name, label="2 Phi(-kappa): a flat loss" if name.endswith("data sum") else None)
            crosses(above, accepted[sigma])
            crosses(below, errors[sigma])
            above.set_title(f"sigma {sigma:g}")
            above.set_ylim(-0.03, 1.03)
            below.set_ylim(*((0.0, 0.55) if is_delta else (0.05, 0.12)))
            for one in (above, below):
                if is_delta:
                    one.set_xscale("symlog", linthresh=1.0)
                    one.set_xlim(-0.3, 1e7)
                    one.set_xticks([0, 1e2, 1e4, 1e6])
                else:
                    one.set_xscale("log")
                if column in (1, 3):
                    one.tick_params(labelleft=False)
            below.set_xlabel("sigma_Delta (nominal)" if is_delta else "1 - beta")
        axes[0].set_ylabel("acceptance")
        axes[4].set_ylabel("1 - accuracy of the posterior mean")
        legend(figure, axes, columns=5)
    return figure


COLUMNS = list(VERSIONS)


def lines(result: dict[str, Any]) -> list[Line]:
    """Acceptance and error at each point of both scans."""
    found: list[Line] = []
    for is_delta in (True, False):
        rows, (accepted, errors) = _of(result, is_delta=is_delta)
        for sigma in SIGMAS:
            for x in sorted({_x(row, is_delta=is_delta) for row in rows}):
                here = [row for row in rows if _x(row, is_delta=is_delta) == x and row["setting"]["sigma"] == sigma]
                words = f"sigma {sigma:g}, {'sigma_Delta' if is_delta else '1 - beta'} {x:g}"
                found += of_acceptance(words, here, accepted[sigma].get(x), errors[sigma].get(x))
    return found


def section(result: dict[str, Any]) -> str:
    """Published and measured values at each point of both scans."""
    text = [table(lines(result), COLUMNS), RULE.format(read_to="0.02 in acceptance, 0.002 in accuracy"), ""]
    for name in COLUMNS:
        own = [row for row in select(result["by_delta"], name) if row["acceptance"] is not None and row["kappa"] is not None]
        gaps = [row["acceptance"][0] - flat_acceptance(row["kappa"][0]) for row in own]
        if gaps:
            text.append(
                f"{LABELS[name].capitalize()}: acceptance less 2 Phi(-kappa), that of a flat loss, lies "
                f"between {min(gaps):+.3f} and {max(gaps):+.3f} over the scan of sigma_Delta."
            )
    return "\n".join([*text, of_anchors(result["anchors"]), health(result["by_delta"])])


def _of(result: dict[str, Any], *, is_delta: bool) -> tuple[list[dict[str, Any]], tuple[Any, Any]]:
    """The rows of one scan, and its published values."""
    if is_delta:
        return result["by_delta"], (published.FIG2A_DELTA_ACCEPTANCE, published.FIG2A_DELTA_ERROR)
    return result["by_beta"], (published.FIG2A_BETA_ACCEPTANCE, published.FIG2A_BETA_ERROR)


def _x(row: dict[str, Any], *, is_delta: bool) -> float:
    return float(row["setting"]["sigma_delta"]) if is_delta else round(1 - row["setting"]["beta"], 6)
