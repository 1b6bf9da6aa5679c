"""Uncertainties of the predictions of many draws: plain functions of a tensor (draws, examples, ...).

For classes, with p_d the probabilities of draw d and H the entropy in nats:

    entropy              H(mean_d p_d)         total uncertainty about the class
    expected entropy     mean_d H(p_d)         of the classes themselves (aleatoric)
    mutual information   their difference      of the weights (epistemic), which more data would reduce
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["entropy", "expected_entropy", "mutual_information", "quantile", "quantile_of_sorted", "spread", "variance"]


def entropy(predictions: Tensor, *, is_binary: bool = False) -> Tensor:
    """H(mean over draws), (examples, ...), of class probabilities (draws, examples, classes, ...), in nats.

    With `is_binary`, each number is the probability of one class out of two, and has its own entropy.

    Example:
        >>> entropy(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        tensor([0.6931])
    """
    return _entropy(predictions.double().mean(0), is_binary).to(predictions.dtype)


def expected_entropy(predictions: Tensor, *, is_binary: bool = False) -> Tensor:
    """Mean over draws of H, (examples, ...).

    Example:
        >>> expected_entropy(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        tensor([0.])
    """
    total = torch.zeros((), dtype=torch.float64, device=predictions.device)
    for draw in predictions:  # one at a time, to keep float64 copies small
        total = total + _entropy(draw.double(), is_binary)
    return (total / len(predictions)).to(predictions.dtype)


def mutual_information(predictions: Tensor, *, is_binary: bool = False) -> Tensor:
    """Between the class and the weights: entropy - expected entropy, never negative.

    Example:
        >>> mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        tensor([0.6931])
    """
    whole = entropy(predictions.double(), is_binary=is_binary)
    return (whole - expected_entropy(predictions.double(), is_binary=is_binary)).clamp_min(0).to(predictions.dtype)


def _entropy(p: Tensor, is_binary: bool) -> Tensor:
    if is_binary:
        return -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))
    return -torch.xlogy(p, p).sum(1)


def variance(predictions: Tensor) -> Tensor:
    """Over the draws (divided by their number), (examples, ...)."""
    mean = predictions.double().mean(0)
    total = torch.zeros_like(mean)
    for draw in predictions:
        total += (draw.double() - mean).square()
    return (total / len(predictions)).to(predictions.dtype)


def quantile(predictions: Tensor, q: float) -> Tensor:
    """Over the draws, with linear interpolation between them (numpy's default), (examples, ...).

    Example:
        >>> quantile(torch.tensor([[1.0], [2.0], [4.0]]), 0.75)
        tensor([3.])
    """
    return quantile_of_sorted(predictions.sort(0).values, q)


def quantile_of_sorted(ascending: Tensor, q: float) -> Tensor:
    """`quantile` of predictions whose draws are already sorted, value by value."""
    if not 0 <= q <= 1:
        raise ValueError(f"`q` must lie between 0 and 1, got {q}.")
    place = q * (len(ascending) - 1)
    below = int(place)
    low, high = ascending[below], ascending[below if place == below else below + 1]
    between = torch.where(low == high, low, torch.lerp(low, high, place - below))  # also between two infinities
    return torch.where(ascending[-1].isnan(), torch.nan, between)  # a NaN is sorted last


def spread(predictions: Tensor) -> Tensor:
    """The paper's measure of uncertainty: 75% quantile - 25% quantile over the draws, (examples, ...)."""
    ascending = predictions.sort(0).values
    return quantile_of_sorted(ascending, 0.75) - quantile_of_sorted(ascending, 0.25)
