"""This library at its defaults, NUTS and MAMS on every target: effective draws per gradient, and whether they are right."""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import adammcmc
from adammcmc.samplers.diagnostics import rhat_by_chance
from benchmarks.posteriors.reference import Estimates, Reference, effective_spread, load, slowest, worst_rhat, worst_z
from benchmarks.posteriors.rivals import Run, mams_program, nuts
from benchmarks.posteriors.table import TARGETS, target
from benchmarks.posteriors.target import Target

__all__ = [
    "AGREES",
    "LEAST_DRAWS",
    "NOT_CONVERGED",
    "NUTS_DENSE",
    "OURS",
    "RESULTS",
    "SAMPLERS",
    "Ours",
    "compare",
    "judged",
    "ours",
    "verdict",
]

RESULTS = Path(__file__).parent.parent / "results" / "nuts_cpu.json"
OURS = "ours"
NUTS_DENSE = "nuts_dense"
RIVAL_CHAINS = 8
CHAINS = 64
RHAT_LIMIT = 1.01
LEAST_DRAWS = 10
"""Effective draws of a chain, on average, below which a run is too short to be judged."""
Z_LIMIT = 4.5
"""In standard errors, for the worst of three moments of up to 100 coordinates."""
AGREES, NOT_CONVERGED, DIFFERS = "agrees", "not converged", "differs"
"""Verdicts. The effective draws of a run that has not converged are an upper bound."""
TRAJECTORIES = (2, 8)
"""Average steps of a trajectory of MAMS; 2 is the default of blackjax."""
MAMS_DRAWS = 4000


class Ours(NamedTuple):
    """A run of this library."""

    draws: Tensor
    """(chains, draws, dim)"""
    gradients: float
    """For the draws of one chain."""
    adaptation: float
    """For the warm-up of one chain."""
    warnings: list[str]
    grade: str
    """The library's own verdict on the draws, in a word."""
    frozen: int
    """Chains that do not move, by their draws, and that neither warning nor verdict names."""


class _Counted:
    """A log density that counts its evaluations with a gradient, over all chains."""

    def __init__(self, log_density: Callable[[Tensor], Tensor]) -> None:
        self.log_density = log_density
        self.gradients = 0

    def __call__(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            self.gradients += len(x)
        return self.log_density(x)


def ours(
    log_density: Callable[[Tensor], Tensor], initial: Tensor, seed: int, steps: int, kernel: adammcmc.Kernel | None = None
) -> Ours:
    """Warm up at the defaults, or from another kernel, freeze, and take `steps` steps with every chain."""
    counted = _Counted(log_density)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel, params = adammcmc.warm_up(counted, initial, kernel, seed=seed, progress=False)
        adaptation = counted.gradients / len(initial)
        result = adammcmc.sample_density(counted, params, kernel, num_steps=steps, seed=seed + 1, progress=False)
    gradients = counted.gradients / len(initial) - adaptation
    told = [str(w.message) for w in caught]
    says = " ".join([*told, str(result.verdict)])
    frozen = sum(bool((x == x[:1]).all()) for x in result.draws)
    unnamed = frozen if frozen and "move" not in says else 0
    return Ours(result.draws, gradients, adaptation, told, str(result.verdict.grade), unnamed)


def _ours(t: Target, seed: int, steps: int, kernel: adammcmc.Kernel | None = None) -> Run:
    found = ours(t.log_density(), torch.tensor(t.starts(CHAINS)), seed, steps, kernel)
    for text in found.warnings:
        print(f"    {text}", flush=True)
    return Run(found.draws.numpy(), found.gradients, found.adaptation, 0, found.grade, found.frozen)


def _nuts(is_diagonal: bool, t: Target, seed: int, steps: int) -> Run:
    return nuts(t.jax_log_density(), t.starts(RIVAL_CHAINS), seed=seed, num_draws=1000, is_diagonal=is_diagonal)


@lru_cache(maxsize=1)
def _mams_program(name: str) -> Callable[[np.ndarray, int, float], Run]:
    return mams_program(target(name).jax_log_density(), num_draws=MAMS_DRAWS)


def _mams(trajectory: int, t: Target, seed: int, steps: int) -> Run:
    return _mams_program(t.name)(t.starts(RIVAL_CHAINS), seed, float(trajectory))


SAMPLERS: dict[str, Callable[[Target, int, int], Run]] = {
    OURS: _ours,
    "nuts": partial(_nuts, True),
    NUTS_DENSE: partial(_nuts, False),
    **{f"mams_{trajectory}": partial(_mams, trajectory) for trajectory in TRAJECTORIES},
}


def judged(run: Run, reference: Reference) -> dict[str, Any]:
    """The numbers of one run."""
    if not np.isfinite(run.draws).all():
        return {"verdict": "failed: draws are not finite"}
    effective = slowest(run.draws)
    row = {
        "effective_per_1000": _short(1e3 * effective / (run.gradients * len(run.draws))),
        "adaptation": round(run.adaptation),
        "gradients": round(run.gradients),
        "chains": len(run.draws),
        "draws": run.draws.shape[1],
        "effective_draws": round(effective, 1),
        "effective_spread": round(effective_spread(run.draws), 1),
        "rhat": _short(worst_rhat(run.draws), 5),
        "z": _short(worst_z(Estimates.of(run.draws), reference.estimates)),
        "divergent": run.divergent,
    }
    if run.grade:
        row |= {"grade": run.grade, "frozen_unnamed": run.frozen}
    return row | {"verdict": verdict(row, run.draws.shape[2])}


def verdict(row: dict[str, Any], dim: int) -> str:
    """`agrees`; `not converged`, with too few draws or chains that disagree; or `differs`, from the reference.

    The chains may disagree as much as chance allows: many short chains that have converged have R-hat above 1.01.
    """
    effective = min(row["effective_draws"], row["effective_spread"])
    at_most = rhat_by_chance(torch.tensor(effective).double(), row["chains"], 2 * dim, num_draws=row["draws"])
    if effective < LEAST_DRAWS * row["chains"] or not row["rhat"] <= max(RHAT_LIMIT, float(at_most)):
        return NOT_CONVERGED
    return AGREES if row["z"] <= Z_LIMIT else DIFFERS


def compare(
    names: Iterable[str],
    samplers: Iterable[str],
    *,
    steps: int,
    seed: int = 0,
    output: Path = RESULTS,
    kernel: adammcmc.Kernel | None = None,
) -> None:
    """Run the samplers on the targets, and write each result into `output` when it is there; `kernel` replaces our default."""
    references, samplers = load(), list(samplers)
    runs = {**SAMPLERS, OURS: partial(_ours, kernel=kernel)}
    for name in names:
        t = target(name)
        for sampler in samplers:
            began = time.time()
            try:
                row = judged(runs[sampler](t, seed, steps), references[name])
            except RuntimeError as error:
                row = {"verdict": f"failed: {type(error).__name__}"}
            row["seconds"] = round(time.time() - began, 1)
            _store(output, name, t, sampler, row)
            print(name, sampler, row, flush=True)


def _store(output: Path, name: str, t: Target, sampler: str, row: dict[str, Any]) -> None:
    document = json.loads(output.read_text()) if output.exists() else {"targets": {}}
    entry = document["targets"].setdefault(name, {"title": t.title, "dim": t.dim, "samplers": {}})
    entry["samplers"][sampler] = row
    document["targets"] = {key: document["targets"][key] for key in TARGETS if key in document["targets"]}
    document["command"] = "python -m benchmarks.posteriors nuts"
    document["versions"] = {
        **{package: version(package) for package in ("torch", "jax", "blackjax")},
        "adammcmc": adammcmc.__version__,
        "python": platform.python_version(),
    }
    output.write_text(json.dumps(document, indent=1) + "\n")


def _short(value: float, digits: int = 3) -> float:
    return float(f"{value:.{digits}g}")
