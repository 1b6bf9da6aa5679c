"""Rows from records: one setting averaged over its seeds, each number with its standard error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from adammcmc import diagnostics
from replication.measures import over_seeds
from replication.settings import Preset
from replication.trials import Trial
from replication.work import Work

VERSIONS = {
    "released": {"method": "released", "scale": "mean"},
    "printed, batch sum": {"method": "printed", "scale": "batch_sum"},
    "printed, data sum": {"method": "printed", "scale": "data_sum"},
}
"""The three versions that are replicated: the released script, and Algorithm 1 at two scales of lambda."""

Setting = Trial
"""A trial of seed 0, representing all seeds."""

_REPORTED = (
    "acceptance",
    "kappa",
    "noise",
    "beta_eff",
    "loss_influence",
    "temperature",
    "examples",
    "step_size",
    "silent",
    "seconds",
)
_MEASURED = ("accuracy", "auc", "nll", "brier")
_BULKY = ("groups", "reliability", "information", "others", "by_pt", "spread_by_pt")
_PLAIN = ("ece", "ece_by_chance", "coverage", "mean_spread", "sd_of_logit")


def version(preset: Preset, name: str, **options: Any) -> Setting:
    """One of `VERSIONS`, with the paper's values for all other settings unless given."""
    chosen: dict[str, Any] = {**VERSIONS[name], **options}
    return Trial.of(preset, chosen.pop("method"), **chosen)


def seeds_of(settings: Sequence[Setting], number: int) -> list[Trial]:
    """Each setting with this number of seeds, seed by seed: an interrupted scan is complete for its first seeds."""
    return [Trial(**{**vars(setting), "seed": seed}) for seed in range(number) for setting in settings]


def rows(work: Work, settings: Sequence[Setting], seeds: int | None = None) -> list[dict[str, Any]]:
    """One row per setting; missing trials are run."""
    number = work.preset.seeds if seeds is None else seeds
    records = work.records(seeds_of(settings, number))
    return [row(records[i :: len(settings)]) for i in range(len(settings))]


def lean(table: Sequence[dict[str, Any]], *keep: str) -> list[dict[str, Any]]:
    """Rows without the bulky numbers on groups of jets, except those in `keep`: result files should be small."""
    return [{name: value for name, value in found.items() if name in keep or name not in _BULKY} for found in table]


def row(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One setting: the trial's settings, and [mean, standard error] over the records of its seeds."""
    trial = dict(records[0]["trial"])
    trial.pop("seed")
    found: dict[str, Any] = {"setting": trial, "seeds": len(records), "num_test": records[0]["draws"]["num_test"]}
    found |= {name: over_seeds([r.get(name) for r in records]) for name in _REPORTED}
    draws = [r["draws"] for r in records]
    found |= {name: over_seeds([d[name][0] for d in draws]) for name in _MEASURED}
    found |= {name: over_seeds([d.get(name) for d in draws]) for name in _PLAIN}
    if "loss" in records[0]:
        ends = [r["loss"]["values"][-max(1, len(r["loss"]["values"]) // 10) :] for r in records]
        found["final_loss"] = over_seeds([_mean(end) for end in ends])
        curves = [r["accuracy"]["values"] for r in records if r["accuracy"]["values"]]
        found["best_accuracy"] = over_seeds([max(values) for values in curves])
        found["last_accuracy"] = over_seeds([values[-1] for values in curves])
    found["groups"] = {name: _group([d["groups"][name] for d in draws]) for name in draws[0]["groups"]}
    found["reliability"] = _pooled([d["reliability"] for d in draws])
    for name in ("information", "others", "by_pt", "spread_by_pt"):
        if name in draws[0]:
            found[name] = _averaged([d[name] for d in draws])
    found["verdicts"] = [r["verdict"] for r in records if "verdict" in r]
    found["healthy"] = sum(r.get("is_healthy", False) for r in records)
    if len(records) > 1 and len(draws[0]["probes"]) >= 8:
        found |= _agreement(draws)
    return found


def bands(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Lowest, mean and highest over the seeds, of the loss curve and of the accuracy."""
    losses = list(zip(*(r["loss"]["values"] for r in records), strict=True))
    accuracies = list(zip(*(r["accuracy"]["values"] for r in records), strict=True))
    every = records[0]["loss"]["every"]
    return {
        "loss": {"steps": [every * (i + 1) for i in range(len(losses))], **_band(losses)},
        "accuracy": {"steps": records[0]["accuracy"]["steps"], **_band(accuracies)},
    }


def exact_settings(preset: Preset, lams: Sequence[float] = (1.0,), targets: Sequence[float | None] = (None,)) -> list[Setting]:
    """Exact chains at these inverse temperatures and target acceptances (which determine their step size)."""
    return [Trial.exact(preset, lam=lam, target_acceptance=target) for lam in lams for target in targets]


def _agreement(draws: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """R-hat over chains of the logits of some test jets, median and worst, and the median effective sample size."""
    length = min(len(d["probes"]) for d in draws)
    values = torch.tensor([d["probes"][:length] for d in draws], dtype=torch.float64)  # (chains, draws, jets)
    rhat, ess = diagnostics.rhat(values), diagnostics.ess_bulk(values)
    known = rhat[rhat.isfinite()]
    if not len(known):
        return {}
    return {"rhat": float(known.median()), "worst_rhat": float(known.max()), "ess": float(ess[ess.isfinite()].median())}


def _pooled(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The reliability curve of all seeds: bins are weighted by their jets; empty ones are dropped."""
    found: dict[str, Any] = {"confidence": [], "accuracy": [], "count": []}
    for number in range(len(parts[0]["count"])):
        counts = [p["count"][number] for p in parts]
        if sum(counts):
            for name in ("confidence", "accuracy"):
                weighted = [count * (p[name][number] or 0.0) for count, p in zip(counts, parts, strict=True)]
                found[name].append(sum(weighted) / sum(counts))
            found["count"].append(sum(counts) / len(parts))
    return found


def _group(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of a group of jets over the seeds, and the error from the test jets, which all seeds share."""
    found: dict[str, Any] = {"jets": _mean([p["jets"] for p in parts])}
    for what in ("mean", "spread"):
        found[what] = over_seeds([p[what][1] for p in parts])
        found[f"{what}, test error"] = _mean([_error_of_median(p, what) for p in parts])
    return found


def _error_of_median(group: dict[str, Any], what: str) -> float:
    """Standard error of the median of normal values: 1.2533 sd / sqrt(n), with the sd from the quartiles."""
    low, _, high = group[what]
    return float(1.2533 * (high - low) / 1.349 / math.sqrt(group["jets"])) if group["jets"] else 0.0


def _band(columns: Sequence[Sequence[float | None]]) -> dict[str, list[float | None]]:
    known = [[value for value in column if value is not None] for column in columns]
    return {
        "low": [min(c, default=None) for c in known],
        "mean": [_mean(c) for c in known],
        "high": [max(c, default=None) for c in known],
    }


def _averaged(parts: Sequence[Any]) -> Any:
    """Corresponding numbers of several objects, as [mean, standard error]; a [value, error] pair contributes its
    value."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: _averaged([p[key] for p in parts if key in p]) for key in first}
    if isinstance(first, list) and first and isinstance(first[0], list):  # bins of pT: low, high, jets, value, error
        return [
            [*bins[0][:3], over_seeds([b[3] for b in bins]), _mean([b[4] or 0.0 for b in bins])]
            for bins in zip(*parts, strict=True)
        ]
    if isinstance(first, list) and len(first) == 2:
        return over_seeds([p[0] for p in parts])
    return over_seeds(list(parts))


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of the known values: a loss that was not finite is None in a record."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
