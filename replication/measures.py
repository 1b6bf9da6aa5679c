"""Measures of the draws' predictions that fit into a small file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adammcmc.jets.data import KINDS, Jets
from adammcmc.jets.metrics import accuracy, auc, groups, mean_by_pt
from adammcmc.posterior import uncertainty
from adammcmc.posterior.calibration import auroc, brier, ece, nll, reliability

PT_EDGES = (500.0, 550.0, 600.0, 650.0, 700.0, 800.0, 900.0, 1000.0)
_PROBES = 24
"""Test jets whose score is kept for every draw, for R-hat."""
_BINS = 20


def judge(draws: Tensor, others: Tensor, test_jets: Jets, other_jets: Jets) -> dict[str, Any]:
    """All measures of one trial.

    Args:
        draws: (draws, jets), the top probability of the test jets.
        others: (draws, jets), that of the out-of-distribution jets.
        test_jets: the test jets.
        other_jets: the out-of-distribution jets.
    """
    labels = test_jets.kind
    mean, spread = draws.double().mean(0), uncertainty.spread(draws.double())
    both = torch.stack([1 - mean, mean], 1)
    error = ece(both, labels)
    curve = reliability(mean, labels, 10)
    found: dict[str, Any] = {
        "num_draws": len(draws),
        "num_test": len(labels),
        "accuracy": list(accuracy(mean, labels)),
        "auc": list(auc(mean, labels)),
        "nll": list(nll(mean.clamp(1e-7, 1 - 1e-7), labels)),
        "brier": list(brier(mean, labels)),
        "ece": float(error.value),
        "ece_by_chance": float(error.by_chance),
        "reliability": {
            "confidence": curve.confidence.tolist(),
            "accuracy": curve.frequency.tolist(),
            "count": curve.counts.tolist(),
        },
        "coverage": coverage(draws, labels),
        "groups": {
            name: {"jets": b.jets, "mean": b.mean, "spread": b.spread} for name, b in groups(mean, spread, labels).items()
        },
        "mean_spread": float(spread.mean()),
        "sd_of_logit": float(_logit(draws).std(0).median()) if len(draws) > 1 else None,
        "probes": _logit(draws[:, :: max(1, draws.shape[1] // _PROBES)][:, :_PROBES]).tolist(),
    }
    if len(draws) > 1:
        found |= _out_of_distribution(draws, others, test_jets, other_jets)
    return found


def coverage(draws: Tensor, labels: Tensor, level: float = 0.9) -> float | None:
    """How often the draws' interval contains the truth, as far as the data can tell.

    Jets are sorted by their mean score into 20 bins of equal size. In each, the draws' mean scores have a central
    interval of this level, which is widened by the binomial error of the observed fraction of tops. Returns the
    fraction of bins whose observed fraction lies inside. Calibrated scores reach about `level` without any spread (one
    draw): more than that is due to the spread, less to a lack of calibration.
    """
    if 1 < len(draws) < 4:
        return None
    order = draws.mean(0).argsort()
    size = max(1, len(order) // _BINS)
    inside = []
    for i in range(0, size * min(_BINS, len(order) // size), size):
        chosen = order[i : i + size]
        found = float((labels[chosen] == 1).double().mean())
        means = draws[:, chosen].double().mean(1)
        middle = float(means.mean())
        width = math.sqrt((float(means.var()) if len(means) > 1 else 0.0) + middle * (1 - middle) / size)
        inside.append(abs(found - middle) <= 1.645 * width)
    return sum(inside) / len(inside)


def _out_of_distribution(draws: Tensor, others: Tensor, test_jets: Jets, other_jets: Jets) -> dict[str, Any]:
    """Out-of-distribution jets: mutual information by kind and pT, and how well it separates them from the test
    jets."""
    known = uncertainty.mutual_information(draws.double(), is_binary=True)
    found: dict[str, Any] = {
        "information": {
            name: float(known[test_jets.kind == number].mean()) for number, name in enumerate(KINDS[:2])
        }
    }  # fmt: skip
    if not len(other_jets):
        return found
    unseen = uncertainty.mutual_information(others.double(), is_binary=True)
    spread = {"test": uncertainty.spread(draws.double()), "others": uncertainty.spread(others.double())}
    for title, values in (("by_pt", unseen), ("spread_by_pt", spread["others"])):
        found[title] = {
            name: [[b.low, b.high, b.jets, *b.mean] for b in bins]
            for name, bins in mean_by_pt(values, other_jets, PT_EDGES).items()
        }
    found["others"] = {}
    for number, name in enumerate(KINDS):
        chosen = other_jets.kind == number
        if not bool(chosen.any()):
            continue
        is_other = torch.cat([torch.zeros(len(known)), torch.ones(int(chosen.sum()))])
        found["others"][name] = {
            "information": float(unseen[chosen].mean()),
            "spread": float(spread["others"][chosen].median()),
            "auroc_information": list(auroc(torch.cat([known, unseen[chosen]]), is_other)),
            "auroc_spread": list(auroc(torch.cat([spread["test"], spread["others"][chosen]]), is_other)),
        }
    return found


def _logit(scores: Tensor) -> Tensor:
    return torch.logit(scores.double(), 1e-6)


def over_seeds(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Mean over seeds and its standard error; None without any number. A single seed has no error: NaN."""
    known = [x for x in values if x is not None and math.isfinite(x)]
    if not known:
        return None
    mean = sum(known) / len(known)
    if len(known) == 1:
        return mean, math.nan
    return mean, math.sqrt(sum((x - mean) ** 2 for x in known) / (len(known) - 1) / len(known))


def rounded(value: Any) -> Any:
    """JSON with six digits; None for what is not finite."""
    if isinstance(value, dict):
        return {key: rounded(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(x) for x in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
