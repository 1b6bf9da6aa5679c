"""References: moments of every coordinate from a long run of NUTS, with their Monte Carlo errors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from adammcmc.samplers.diagnostics import ess_bulk, mcse_mean, rhat
from benchmarks.posteriors.table import TARGETS, target
from benchmarks.posteriors.target import Target

__all__ = ["FILE", "Estimates", "Reference", "effective_spread", "load", "make", "slowest", "worst_z"]

FILE = Path(__file__).parent / "reference.json"
DIAGONAL_FROM = 60
"""Dimension from which the mass matrix of a reference is diagonal."""


ACCEPTANCE = 0.9
CAREFUL = {"banana": 0.98, "horseshoe": 0.99, "stochastic_volatility": 0.99}
"""The acceptance that NUTS is tuned to, and where it is higher, against divergent trajectories."""


class Estimates(NamedTuple):
    """Moments of each coordinate, (dim,), and their Monte Carlo standard errors."""

    mean: np.ndarray
    mean_error: np.ndarray
    sd: np.ndarray
    sd_error: np.ndarray
    square: np.ndarray
    """The mean of x^2."""
    square_error: np.ndarray
    square_sd: np.ndarray
    """The standard deviation of x^2."""

    @classmethod
    def of(cls, draws: np.ndarray) -> Estimates:
        """From draws (chains, draws, dim). The error of sd is that of the variance, over 2 sd."""
        x = torch.as_tensor(draws)
        mean, sd = x.mean((0, 1)), x.flatten(0, 1).std(0)
        squares = x.square()
        parts = (
            mean,
            mcse_mean(x),
            sd,
            mcse_mean((x - mean).square()) / (2 * sd),
            squares.mean((0, 1)),
            mcse_mean(squares),
            squares.flatten(0, 1).std(0),
        )
        return cls(*(part.numpy() for part in parts))


class Reference(NamedTuple):
    """What a long run found."""

    estimates: Estimates
    facts: dict[str, Any]


def slowest(draws: np.ndarray) -> float:
    """Effective draws of the slowest coordinate of x and of x^2."""
    x = torch.as_tensor(draws)
    return float(torch.minimum(ess_bulk(x), ess_bulk(x.square())).min())


def effective_spread(draws: np.ndarray) -> float:
    """Effective draws of the slowest distance from the median, of x and of x^2: half of R-hat is about these."""
    x = torch.as_tensor(draws)
    both = torch.cat([x, x.square()], -1)
    return float(ess_bulk((both - both.flatten(0, 1).median(0).values).abs()).min())


def worst_rhat(draws: np.ndarray) -> float:
    """R-hat of the worst coordinate of x and of x^2."""
    x = torch.as_tensor(draws)
    return float(torch.maximum(rhat(x), rhat(x.square())).max())


def worst_z(found: Estimates, truth: Estimates) -> float:
    """The largest distance of a mean, a mean square or a standard deviation from the reference, in standard errors of both."""
    pairs = (("mean", "mean_error"), ("sd", "sd_error"), ("square", "square_error"))
    z = [
        np.abs(getattr(found, value) - getattr(truth, value)) / np.hypot(getattr(found, error), getattr(truth, error))
        for value, error in pairs
    ]
    return float(np.max(z))


def load() -> dict[str, Reference]:
    """All references by target."""
    stored = json.loads(FILE.read_text())["targets"]
    return {
        name: Reference(
            Estimates(*(np.array([row[field] for row in entry["coordinates"].values()]) for field in Estimates._fields)),
            {key: value for key, value in entry.items() if key != "coordinates"},
        )
        for name, entry in stored.items()
    }


def make(names: Iterable[str], *, seconds: float = 100.0, effective: float = 10_000.0) -> None:
    """Run the references of these targets and write each into the file when it is done."""
    for name in names:
        stored = json.loads(FILE.read_text()) if FILE.exists() else {"targets": {}}
        entry = _entry(target(name), seconds, effective)
        targets = stored["targets"] | {name: entry}
        document = {
            "command": "python -m benchmarks.posteriors reference",
            "what": "NUTS of blackjax, 8 chains of 2,000 steps of window adaptation from overdispersed starts, then "
            "blocks of 1,000 draws until the slowest coordinate of x and x^2 has the effective draws or the time is over",
            "targets": {key: targets[key] for key in TARGETS if key in targets},
        }
        FILE.write_text(_json(document))
        print(name, {k: v for k, v in entry.items() if k != "coordinates"}, flush=True)


def _entry(t: Target, seconds: float, effective: float) -> dict[str, Any]:
    from benchmarks.posteriors.rivals import nuts_blocks

    began = time.time()
    source = target(t.via[0]) if t.via else t
    acceptance = CAREFUL.get(source.name, ACCEPTANCE)
    is_diagonal = source.dim >= DIAGONAL_FROM
    block, adaptation = nuts_blocks(
        source.jax_log_density(),
        source.starts(8, seed=1),
        seed=1,
        block=1000,
        num_warmup=2000,
        is_diagonal=is_diagonal,
        target=acceptance,
    )
    draws: list[np.ndarray] = []
    gradients, divergent = 0.0, 0
    least = 0.0
    adapted = time.time()
    while least < effective and time.time() - adapted < seconds:
        x, steps, diverged = block()
        draws.append(np.stack([t.via[1](chain) for chain in x]) if t.via else x)
        gradients, divergent = gradients + steps, divergent + diverged
        if len(draws) % max(1, len(draws) // 4) == 0:
            least = slowest(np.concatenate(draws, 1))
    x = np.concatenate(draws, 1)
    estimates = Estimates.of(x)
    rows = zip(*(field.tolist() for field in estimates), strict=True)
    return {
        "dim": t.dim,
        "drawn_as": source.name,
        "acceptance_target": acceptance,
        "mass_matrix": "diagonal" if is_diagonal else "dense",
        "draws": x.shape[0] * x.shape[1],
        "effective_draws": round(slowest(x)),
        "rhat": round(worst_rhat(x), 5),
        "divergent": divergent,
        "gradients_per_chain": round(gradients + adaptation),
        "seconds": round(time.time() - began),
        "blackjax": version("blackjax"),
        "coordinates": {
            name: {field: float(f"{v:.7g}") for field, v in zip(Estimates._fields, row, strict=True)}
            for name, row in zip(t.names, rows, strict=True)
        },
    }


def _json(document: dict[str, Any]) -> str:
    """One line for each coordinate."""
    text = json.dumps(document, indent=1)
    lines: list[str] = []
    joining = False
    for line in text.splitlines():
        if joining:
            lines[-1] += (" " if not line.strip().startswith("}") else "") + line.strip()
            joining = not line.strip().startswith("}")
            continue
        lines.append(line)
        joining = line.startswith("    ") and line.endswith("{") and '"coordinates"' not in line
    return "\n".join(lines) + "\n"
