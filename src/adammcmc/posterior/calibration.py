r"""Scores of predictions against labels: plain functions of tensors, and `score`, which returns all of them.

Class probabilities have shape (examples, classes, ...) and their labels (examples, ...). Binary probabilities, each of
one class out of two, have the shape of their labels. Every value has a standard error from the finite number of
examples. The outputs of one example may be correlated, so that errors use the spread between examples only.

The scores need neither scikit-learn nor torchmetrics; the tests compare with both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from adammcmc.posterior.predictive import Prediction, log_mixture

__all__ = [
    "ClassScores", "Coverage", "Detection", "ExpectedError", "Measured", "OutOfDistribution", "Reliability", "RiskCurve",
    "ValueScores", "accuracy", "auroc", "average_precision", "brier", "compare_ood", "detection", "ece", "fpr_at_tpr", "nll",
    "reliability", "score", "selective_risk",
]  # fmt: skip

_REPLICAS = 200
_CHUNK = 1 << 22  # numbers held in memory at once
_LEVELS = (0.5, 0.68, 0.9, 0.95)


class Measured(NamedTuple):
    """A value and its standard error (NaN if unknown), printed to two digits of the error.

    Example:
        >>> print(Measured(0.93124, 0.00411), "|", Measured(812.3, 34.6), "|", Measured(0.93124, math.nan))
        0.9312 +- 0.0041 | 812 +- 35 | 0.9312 (error unknown)
    """

    value: float
    error: float

    def __str__(self) -> str:
        if not (math.isfinite(self.value) and math.isfinite(self.error)):
            return f"{self.value:.4g}" + " (error unknown)" * math.isfinite(self.value)
        if self.error == 0:
            return f"{self.value:.4g} +- 0"
        digits = max(0, 1 - int(f"{self.error:.1e}".partition("e")[2]))
        return f"{self.value:.{digits}f} +- {self.error:.{digits}f}"

    @property
    def with_sign(self) -> str:
        """As `str`, with a leading + or -."""
        return str(self) if str(self).startswith("-") else f"+{self}"


def _by_row(values: Tensor) -> Tensor:
    """The mean over the outputs of each example, (examples,)."""
    return values.double().flatten(1).mean(1) if values.dim() > 1 else values.double()


def _mean(values: Tensor) -> Measured:
    """The mean of contributions (examples, ...)."""
    rows = _by_row(values)
    return Measured(float(rows.mean()), _variance_of_mean(rows) ** 0.5)


def _variance_of_mean(x: Tensor) -> float:
    return float(x.var() / len(x)) if len(x) > 1 else math.nan


def _share(values: Tensor) -> Measured:
    """The share of ones among zeros and ones, (examples, ...)."""
    hits = values.reshape(len(values), -1).sum(1)
    share = values.mean()
    return Measured(float(share), float(_binomial_error(share, _independent(hits, torch.full_like(hits, values[0].numel())))))


def _independent(hits: Tensor, counts: Tensor) -> Tensor:
    """The effective number of independent outputs, given the hits among the outputs of each example, (examples, ...).

    From the number of outputs, if those of an example are independent, to the number of examples, if they are right or
    wrong together; this is assumed where the data do not show it: all right, all wrong, or one example.
    """
    total = counts.sum(0)
    share = hits.sum(0) / total
    between = (hits - share * counts).square().sum(0)
    is_known = (share > 0) & (share < 1) & ((counts > 0).sum(0) > 1)
    found = torch.minimum(share * (1 - share) * total.square() / between, total)
    return torch.where(is_known, found, total.square() / counts.square().sum(0))


def _binomial_error(share: Tensor, n: Tensor) -> Tensor:
    """With half a success and half a failure added, so that it is never 0."""
    smooth = (share * n + 0.5) / (n + 1)
    return (smooth * (1 - smooth) / n).sqrt()


class _Classes:
    """Checked probabilities and labels, in float64 on the host."""

    def __init__(self, probabilities: Tensor, targets: Tensor) -> None:
        p, labels = probabilities.detach().cpu().double(), targets.detach().cpu()
        self.is_binary = p.shape == labels.shape
        if p.dim() == 0 or len(p) == 0:
            raise ValueError("there are no examples.")
        if not self.is_binary and (p.dim() < 2 or (len(p), *p.shape[2:]) != tuple(labels.shape)):
            raise ValueError(
                f"probabilities (examples, classes, ...) need labels (examples, ...), got {tuple(p.shape)} and "
                f"{tuple(labels.shape)}; binary probabilities need labels of their own shape."
            )
        if not bool(p.isfinite().all()):
            raise ValueError("a probability is not finite.")
        if bool(((p < -1e-6) | (p > 1 + 1e-6)).any()):
            raise ValueError(
                f"probabilities must lie between 0 and 1, got {float(p.min()):.4g} to {float(p.max()):.4g}: are they logits?"
            )
        if not self.is_binary and bool(((p.sum(1) - 1).abs() > 0.02).any()):
            raise ValueError("the class probabilities of an example must sum to 1 (along axis 1).")
        number = 2 if self.is_binary else p.shape[1]
        if bool(((labels < 0) | (labels >= number) | (labels != labels.long())).any()):
            raise ValueError(f"labels must be 0 to {number - 1}, got {float(labels.min()):g} to {float(labels.max()):g}.")
        self.p, self.labels = p.clamp(0, 1), labels.long()
        chosen = (self.p > 0.5).long() if self.is_binary else self.p.argmax(1)
        self.hits = (chosen == self.labels).double()
        """1 where the most probable class is the label, else 0."""


def accuracy(probabilities: Tensor, targets: Tensor) -> Measured:
    """Share of examples whose most probable class is the label.

    Example:
        >>> print(accuracy(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), torch.tensor([0, 1, 1])))
        0.67 +- 0.28
    """
    return _share(_Classes(probabilities, targets).hits)


def nll(probabilities: Tensor, targets: Tensor) -> Measured:
    """Mean of -log p(target), in nats; infinite if a label had probability 0."""
    given = _Classes(probabilities, targets)
    p, labels = given.p, given.labels
    of_label = torch.where(labels == 1, p, 1 - p) if given.is_binary else p.gather(1, labels.unsqueeze(1)).squeeze(1)
    return _mean(-of_label.log())


def brier(probabilities: Tensor, targets: Tensor) -> Measured:
    """Mean squared distance between probabilities and labels, summed over classes: 0 to 2; if binary, 0 to 1."""
    given = _Classes(probabilities, targets)
    if given.is_binary:
        return _mean((given.p - given.labels).square())
    truth = torch.nn.functional.one_hot(given.labels, given.p.shape[1]).movedim(-1, 1)
    return _mean((given.p - truth).square().sum(1))


class Reliability(NamedTuple):
    """The reliability curve: observed frequency against predicted probability. Tensors (bins,)."""

    edges: Tensor
    """(bins + 1,)"""
    counts: Tensor
    confidence: Tensor
    """Mean probability in the bin; NaN in an empty bin, as are the next two."""
    frequency: Tensor
    """Observed frequency."""
    error: Tensor
    """Standard error of `frequency`: binomial, with half a success and half a failure added so that it is never 0,
    using the effective number of independent outputs."""


class _Binned:
    """Confidences and hits, (examples, ...), in bins of equal width.

    They are those of the most probable class; of binary probabilities, those of class 1.
    """

    def __init__(self, probabilities: Tensor, targets: Tensor, num_bins: int) -> None:
        if isinstance(num_bins, bool) or not isinstance(num_bins, int) or num_bins < 1:
            raise ValueError(f"`num_bins` must be a positive integer, got {num_bins!r}.")
        given = _Classes(probabilities, targets)
        self.confidence = given.p if given.is_binary else given.p.amax(1)
        self.hits = given.labels.double() if given.is_binary else given.hits
        self.edges = torch.linspace(0, 1, num_bins + 1, dtype=torch.float64)
        self.bins = torch.bucketize(self.confidence, self.edges[1:-1], right=True)

    def sums(self, values: Tensor) -> Tensor:
        """Sums of values (examples, ...) over the outputs of each example in each bin, (examples, bins)."""
        num_bins, bins = len(self.edges) - 1, self.bins
        place = bins.reshape(len(bins), -1) + num_bins * torch.arange(len(bins))[:, None]
        return torch.bincount(place.flatten(), values.flatten(), num_bins * len(bins)).reshape(-1, num_bins)


def reliability(probabilities: Tensor, targets: Tensor, num_bins: int = 15) -> Reliability:
    """The reliability curve in bins of equal width, each with its lower edge; the last one also includes 1.

    It is the curve of the most probable class; of binary probabilities, that of class 1.

    Example:
        >>> curve = reliability(torch.tensor([0.1, 0.15, 0.9, 0.95]), torch.tensor([0, 1, 1, 1]), num_bins=2)
        >>> curve.counts.tolist(), curve.frequency.tolist()
        ([2, 2], [0.5, 1.0])
    """
    given = _Binned(probabilities, targets, num_bins)
    counts, right = given.sums(torch.ones_like(given.hits)), given.sums(given.hits)
    total = counts.sum(0)
    frequency = right.sum(0) / total
    error = _binomial_error(frequency, _independent(right, counts))
    return Reliability(given.edges, total.long(), given.sums(given.confidence).sum(0) / total, frequency, error)


class ExpectedError(NamedTuple):
    """Expected calibration error, and its size by chance: even for true probabilities it is never 0."""

    value: float
    error: float
    by_chance: float
    """Its mean over data sets of this size if every probability were true."""
    limit: float
    """Its 95% quantile in that case."""

    @property
    def is_by_chance(self) -> bool:
        """Whether chance explains it."""
        return self.value <= self.limit

    def __str__(self) -> str:
        return f"{Measured(self.value, self.error)} (by chance {self.by_chance:.4f}, 95% below {self.limit:.4f})"


def ece(probabilities: Tensor, targets: Tensor, num_bins: int = 15) -> ExpectedError:
    """Expected calibration error: the mean of |confidence - frequency| over bins of equal width, weighted by count.

    With the sign s_b of each bin fixed it is the mean over examples of s_b (confidence - hit), which gives its standard
    error. Its size by chance comes from 200 replicas, in which classes come true with the given probabilities. If an
    example has several outputs, the replicas keep their correlation.
    """
    given = _Binned(probabilities, targets, num_bins)
    confidence, hits = given.confidence, given.hits
    gaps = given.sums(confidence - hits)
    value, error = _mean(torch.where(gaps.sum(0) < 0, -1.0, 1.0)[given.bins] * (confidence - hits))
    chance = _by_chance(given, gaps)
    return ExpectedError(value, error, float(chance.mean()), float(chance.quantile(0.95)))


def _by_chance(given: _Binned, gaps: Tensor) -> Tensor:
    """Calibration errors of replicas, (replicas,), if every probability were true.

    Only the data show how the outputs of an example are correlated: with several outputs, the replicas are the gaps of
    the data with random signs for whole examples. The sum in a bin then has mean 0 and variance sum_i gap_i^2. It is
    scaled to the variance of true probabilities, sum p (1 - p) for independent outputs: confident predictions are
    rarely or never wrong, and their observed squares alone would be too small.
    """
    confidence, hits, bins = given.confidence, given.hits, given.bins
    expected = given.sums(confidence * (1 - confidence)).sum(0)
    observed = given.sums((confidence - hits).square()).sum(0)
    scaled = gaps * torch.where(observed > 0, expected / observed, 0.0).sqrt()
    generator = torch.Generator().manual_seed(0)
    size = max(1, min(_REPLICAS, _CHUNK // len(hits)))
    found = []
    for made in range(0, _REPLICAS, size):
        number = min(size, _REPLICAS - made)
        if hits.numel() == len(hits):
            p = confidence.flatten()
            came_true = torch.rand(number, len(p), generator=generator, dtype=torch.float64) < p
            sums = torch.zeros(number, gaps.shape[1], dtype=torch.float64)
            sums.index_add_(1, bins.flatten(), p - came_true.double())
        else:
            sums = (2 * torch.randint(2, (number, len(gaps)), generator=generator).double() - 1) @ scaled
        found.append(sums.abs().sum(1) / hits.numel())
    return torch.cat(found)


class RiskCurve(NamedTuple):
    """The risk if only the most certain examples are answered."""

    coverage: Tensor
    """Share of examples answered, 1/n to 1."""
    risk: Tensor
    """Their mean loss, averaged over all orders of equal uncertainties."""
    area: float
    """Area under the curve (AURC): the mean risk over all coverages."""
    area_at_random: float
    """The area if the uncertainty carried no information: the mean loss."""
    area_at_best: float
    """The area if the uncertainty ranked the losses perfectly."""

    def at(self, coverage: float) -> float:
        """The risk at this coverage."""
        if not 0 < coverage <= 1:
            raise ValueError(f"`coverage` must lie between 0 and 1, got {coverage}.")
        return float(self.risk[max(0, math.ceil(coverage * len(self.risk) - 1e-9) - 1)])


def selective_risk(uncertainty: Tensor, losses: Tensor) -> RiskCurve:
    """The risk of answering only where the uncertainty is low.

    Args:
        uncertainty: (examples,), such as `prediction.mutual_information` or `prediction.entropy`.
        losses: (examples,): 1 for a wrong class and 0 for a right one, or any other loss.

    Example:
        >>> curve = selective_risk(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
        >>> curve.at(0.5), curve.at(1.0)
        (0.0, 0.5)
    """
    u, loss = _numbers("uncertainty", uncertainty), _numbers("losses", losses)
    if len(u) != len(loss):
        raise ValueError(f"{len(u)} uncertainties need as many losses, got {len(loss)}.")
    _, group = torch.unique(u, return_inverse=True)
    counts = torch.bincount(group)
    within = torch.bincount(group, loss) / counts  # mean loss of equal uncertainties
    number = torch.arange(1, len(u) + 1, dtype=torch.float64)
    risk = within.repeat_interleave(counts).cumsum(0) / number
    best = loss.sort().values.cumsum(0) / number
    return RiskCurve(number / len(u), risk, float(risk.mean()), float(loss.mean()), float(best.mean()))


def auroc(scores: Tensor, labels: Tensor) -> Measured:
    """Area under the ROC curve: the probability that label 1 scores higher than label 0; ties count one half.

    The error is DeLong's (1988), from the spread of the share of the other label that each example beats.

    Example:
        >>> auroc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1])).value
        0.75
    """
    scores, is_one = _checked_labels(scores, labels)
    ones, zeros = scores[is_one].sort().values, scores[~is_one].sort().values

    def beaten(of: Tensor, others: Tensor) -> Tensor:
        below = torch.searchsorted(others, of, right=False) + torch.searchsorted(others, of, right=True)
        return below.double() / (2 * len(others))

    of_ones, of_zeros = beaten(ones, zeros), 1 - beaten(zeros, ones)
    variance = _variance_of_mean(of_ones) + _variance_of_mean(of_zeros)
    return Measured(float(of_ones.mean()), variance**0.5)


def average_precision(scores: Tensor, labels: Tensor) -> Measured:
    """Area under the precision-recall curve (AUPR): the mean, over label 1, of the precision at their score.

    The error is from the influence of each example: the change of the area if the example had slightly more weight.

    Example:
        >>> round(average_precision(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1])).value, 4)
        0.8333
    """
    ones, zeros = _counts(scores, labels)
    true, false = ones.cumsum(0), zeros.cumsum(0)
    total, number = true + false, true[-1]
    precision = true / total
    value = (ones * precision).sum() / number
    # an example enters the precision at its own score and at all lower ones
    below = [(ones * x / total.square()).flip(0).cumsum(0).flip(0) for x in (false, true)]
    of_ones, of_zeros = (precision - value + below[0]) / number, -below[1] / number

    def squares(influence: Tensor, counts: Tensor) -> float:
        mean = (counts * influence).sum() / counts.sum()
        return float((counts * (influence - mean).square()).sum())

    return Measured(float(value), (squares(of_ones, ones) + squares(of_zeros, zeros)) ** 0.5)


def fpr_at_tpr(scores: Tensor, labels: Tensor, tpr: float = 0.95) -> Measured:
    """False-positive rate at the highest cut whose true-positive rate is at least `tpr` (cuts include their score).

    The error adds two parts in quadrature: the number of label 0 above the cut, and the cut itself, which label 1
    determines within +- sqrt(tpr (1 - tpr) / N) of `tpr`.
    """
    if not 0 < tpr <= 1:
        raise ValueError(f"`tpr` must lie between 0 and 1, got {tpr}.")
    true, false = (counts.cumsum(0) for counts in _counts(scores, labels))

    def passed(share: float) -> float:
        first = int((true < share * true[-1] * (1 - 1e-12)).sum())
        return float(false[min(first, len(false) - 1)] / false[-1])

    wobble = math.sqrt(tpr * (1 - tpr) / float(true[-1]))
    from_cut = (passed(min(1.0, tpr + wobble)) - passed(tpr - wobble)) / 2
    value = passed(tpr)
    return Measured(value, math.hypot(float(_binomial_error(false.new_tensor(value), false[-1])), from_cut))


class Detection(NamedTuple):
    """How well a score separates out-of-distribution examples (label 1) from in-distribution ones."""

    auroc: Measured
    aupr: Measured
    """Random guessing gives the share of out-of-distribution examples, not 1/2."""
    fpr95: Measured
    """Share of in-distribution examples that are flagged at the cut that flags 95% of the others."""

    def __str__(self) -> str:
        return f"AUROC {self.auroc}, AUPR {self.aupr}, FPR95 {self.fpr95}"


def detection(inside: Tensor, outside: Tensor) -> Detection:
    """How well a score, (examples,), higher out of distribution, separates `outside` from `inside`."""
    inside, outside = _numbers("inside", inside), _numbers("outside", outside)
    scores = torch.cat([inside, outside])
    is_outside = torch.arange(len(scores)) >= len(inside)
    return Detection(*(measure(scores, is_outside) for measure in (auroc, average_precision, fpr_at_tpr)))


def _counts(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of label 1 and label 0 at each different score, the highest first, (scores,)."""
    scores, is_one = _checked_labels(scores, labels)
    _, place = torch.unique(-scores, return_inverse=True)
    return torch.bincount(place, is_one.double()), torch.bincount(place, (~is_one).double())


def _checked_labels(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    scores, labels = _numbers("scores", scores), labels.detach().cpu()
    if labels.shape != scores.shape:
        raise ValueError(f"{len(scores)} scores need as many labels, got {tuple(labels.shape)}.")
    is_one = labels == 1
    if bool(((labels != 0) & ~is_one).any()):
        raise ValueError("labels must be 0 or 1.")
    if not 0 < int(is_one.sum()) < len(labels):
        raise ValueError("there must be examples of both labels, 0 and 1.")
    return scores, is_one


def _numbers(name: str, values: Tensor) -> Tensor:
    x = values.detach().cpu().double()
    if x.dim() != 1 or len(x) == 0:
        raise ValueError(f"`{name}` must have one number for each example, got the shape {tuple(x.shape)}.")
    if bool(x.isnan().any()):
        raise ValueError(f"`{name}` has a NaN.")
    return x


def _table(title: str, rows: Mapping[str, object]) -> str:
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())])


def plural(count: int, noun: str) -> str:
    """The count and the noun, as in "2 examples"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


@dataclass(frozen=True)
class ClassScores:
    """Scores of class probabilities. `print` shows a table."""

    num_examples: int
    accuracy: Measured
    nll: Measured
    brier: Measured
    ece: ExpectedError
    overconfidence: Measured
    """Mean probability of the chosen class minus the accuracy: positive if overconfident."""
    reliability: Reliability
    selective: dict[str, RiskCurve]
    """Error rate if only the most certain examples are answered; by "entropy" and by "mutual information"."""

    @property
    def verdict(self) -> str:
        """One line."""
        if self.ece.is_by_chance:
            return f"calibrated, as far as {plural(self.num_examples, 'example')} can tell"
        gap, error = self.overconfidence
        if abs(gap) < 2 * error:
            return "not calibrated: some probabilities are too high, others too low; see the reliability curve"
        over, high = ("over", "high") if gap > 0 else ("under", "low")
        return f"{over}confident: probabilities are too {high} by {abs(gap):.3f}"

    @property
    def numbers(self) -> dict[str, str]:
        """The rows of the table, by name."""
        rows = {
            "accuracy": str(self.accuracy),
            "negative log likelihood (nats)": str(self.nll),
            "Brier score": str(self.brier),
            "calibration error": str(self.ece),
            "confidence - accuracy": self.overconfidence.with_sign,
        }
        half = "{:.4f} in the more certain half, {:.4f} overall"
        return rows | {f"errors, by {name}": half.format(c.at(0.5), c.at(1.0)) for name, c in self.selective.items()}

    def __str__(self) -> str:
        return _table(f"{plural(self.num_examples, 'example')}: {self.verdict}", self.numbers)


class Coverage(NamedTuple):
    """The coverage of central intervals of one level."""

    level: float
    share: float
    """Share of the targets inside."""
    error: float
    """Binomial, using the effective number of independent targets."""


@dataclass(frozen=True)
class ValueScores:
    """Scores of a regression. `print` shows a table."""

    num_examples: int
    rmse: Measured
    nll_mixture: Measured | None
    """-log p(target) of an example, all outputs together, under the mixture of the draws, mean_d N(mean_d, variance_d).
    None if the noise is unknown, or if the targets came neither with the data nor with raw=True."""
    nll_gaussian: Measured | None
    """The same under one Gaussian with the mean and total variance of the prediction. None if the noise is unknown."""
    coverage: tuple[Coverage, ...]
    includes_noise: bool
    """Whether the intervals are for new targets. Intervals for the mean values alone contain fewer targets."""
    intervals: str
    """The distribution behind the intervals, in words."""
    is_mixture: bool = False
    """Whether that is the mixture of the draws (raw=True)."""

    @property
    def nll(self) -> Measured | None:
        """Under the distribution of the intervals: `nll_mixture` with raw=True, otherwise `nll_gaussian`."""
        return self.nll_mixture if self.is_mixture else self.nll_gaussian

    @property
    def verdict(self) -> str:
        """One line."""
        if not self.includes_noise:
            return "intervals for the mean values, without target noise: they contain fewer targets than their level"
        off = [c for c in self.coverage if abs(c.share - c.level) > 2.5 * c.error]
        if not off:
            return f"interval coverage is right, as far as {plural(self.num_examples, 'example')} can tell"
        worst = max(off, key=lambda c: abs(c.share - c.level) / c.error)
        word = "narrow" if worst.share < worst.level else "wide"
        return f"intervals are too {word}: {worst.level:.0%} intervals contain {worst.share:.1%} of the targets"

    @property
    def numbers(self) -> dict[str, str]:
        """The rows of the table, by name."""
        rows = {
            "root mean square error": self.rmse,
            "negative log likelihood (nats)": self.nll_mixture,
            "the same for one Gaussian": self.nll_gaussian,
            **{f"coverage at {c.level:.0%}": Measured(c.share, c.error) for c in self.coverage},
        }
        return {name: str(value) for name, value in rows.items() if value is not None}

    def __str__(self) -> str:
        return _table(f"{plural(self.num_examples, 'example')}: {self.verdict}", self.numbers | {"intervals": self.intervals})


def score(
    prediction: Prediction, targets: Tensor | None = None, *, num_bins: int = 15, levels: Sequence[float] = _LEVELS
) -> ClassScores | ValueScores:
    """All scores of a prediction: `ClassScores` or `ValueScores`, depending on its likelihood.

    In regression with known noise (`GaussianNLL`), intervals are for new targets, noise included: of the mixture of the
    draws with raw=True, otherwise of a Gaussian with the predictive mean and total variance. With unknown noise they
    are for the mean values. Log likelihoods are reported for both distributions; compare models by that of the mixture.

    Args:
        prediction: from `posterior.predict`.
        targets: None: those that came with the data. For others, the log likelihood of the mixture needs raw=True.
        num_bins: bins of the reliability curve.
        levels: levels of the central intervals.
    """
    targets = prediction.targets if targets is None else targets
    if targets is None:
        raise ValueError("there are no targets to compare with: predict for (inputs, targets), or pass `targets`.")
    if not isinstance(targets, Tensor):
        raise TypeError(f"`targets` must be a tensor, got {type(targets).__name__}.")
    if prediction.likelihood.has_classes:
        return _score_classes(prediction, targets, num_bins)
    return _score_values(prediction, targets, levels)


def _score_classes(prediction: Prediction, targets: Tensor, num_bins: int) -> ClassScores:
    p = prediction.mean
    if prediction.is_binary:
        if targets.shape != p.shape:
            raise ValueError(f"probabilities {tuple(p.shape)} need labels of the same shape, got {tuple(targets.shape)}.")
    elif targets.shape == p.shape:
        raise ValueError(
            f"labels must be class numbers of shape {(len(p), *p.shape[2:])}, got {tuple(targets.shape)}: for one-hot "
            "targets, pass targets.argmax(1)."
        )
    given = _Classes(p, targets)
    confidence = torch.maximum(given.p, 1 - given.p) if given.is_binary else given.p.amax(1)  # of the chosen class
    wrong = (1 - given.hits).flatten()
    return ClassScores(
        len(p),
        accuracy(p, targets),
        nll(p, targets),
        brier(p, targets),
        ece(p, targets, num_bins),
        _mean(confidence - given.hits),
        reliability(p, targets, num_bins),
        {
            "entropy": selective_risk(prediction.entropy.flatten(), wrong),
            "mutual information": selective_risk(prediction.mutual_information.flatten(), wrong),
        },
    )


def _score_values(prediction: Prediction, targets: Tensor, levels: Sequence[float]) -> ValueScores:
    for level in levels:
        if not 0 < level < 1:
            raise ValueError(f"`levels` must lie between 0 and 1, got {level}.")
    mean = prediction.mean.double()
    if targets.shape != mean.shape:
        raise ValueError(
            f"predictions {tuple(mean.shape)} need targets of the same shape, got {tuple(targets.shape)}. For one "
            "target, targets[:, None] has the shape (examples, 1)."
        )
    y = targets.detach().cpu().double()
    for name, x in (("prediction", mean), ("target", y)):
        if not bool(x.isfinite().all()):
            raise ValueError(f"a {name} is not finite.")
    if len(y) == 0:
        raise ValueError("there are no examples.")
    square = _mean((mean - y).square())
    rmse = Measured(square.value**0.5, square.error / (2 * square.value**0.5) if square.value > 0 else 0.0)
    if prediction.likelihood.name != "gaussian":
        bounds = [(prediction.quantile((1 - level) / 2), prediction.quantile((1 + level) / 2)) for level in levels]
        inside = [((y >= low) & (y <= high)).double() for low, high in bounds]
        coverage = tuple(Coverage(level, *_share(x)) for level, x in zip(levels, inside, strict=True))
        how = "mean values over the draws, without target noise (unknown)"
        return ValueScores(len(y), rmse, None, None, coverage, False, how)
    is_mixture = prediction.raw_variances is not None
    place = _place(prediction, y)
    return ValueScores(
        len(y),
        rmse,
        _mean(-prediction.log_density(targets)) if is_mixture or prediction.came_with(targets) else None,
        _mean(-log_mixture(mean[None], prediction.total_variance.double()[None], y)),
        tuple(Coverage(level, *_share(((2 * place - 1).abs() <= level).double())) for level in levels),
        True,
        "new targets, noise included: "
        + ("mixture of the draws" if is_mixture else "Gaussian with the predictive mean and variance (mixture: raw=True)"),
        is_mixture,
    )


def _place(prediction: Prediction, y: Tensor) -> Tensor:
    """P(new target < y), (examples, ...), under the mixture of the draws with raw=True, otherwise one Gaussian."""
    means, variances = prediction.raw, prediction.raw_variances
    if means is None or variances is None:
        means, variances = prediction.mean[None], prediction.total_variance[None]
    size = max(1, _CHUNK // max(1, len(means) * y[0].numel()))
    parts = zip(torch.split(y, size), torch.split(means, size, 1), torch.split(variances, size, 1), strict=True)
    return torch.cat([torch.special.ndtr((own - m.double()) / v.double().sqrt()).mean(0) for own, m, v in parts])


@dataclass(frozen=True)
class OutOfDistribution:
    """How well each uncertainty of a prediction separates out-of-distribution examples from in-distribution ones."""

    num_inside: int
    num_outside: int
    by: dict[str, Detection]
    """By "mutual information", "entropy" and "spread"; in regression by "spread"."""

    def __str__(self) -> str:
        title = f"{plural(self.num_outside, 'example')} out of distribution, {self.num_inside:,} in distribution"
        return _table(title, {f"by {name}": found for name, found in self.by.items()})


def compare_ood(inside: Prediction, outside: Prediction) -> OutOfDistribution:
    """How well the uncertainties detect out-of-distribution data, given predictions for both kinds of data.

    The spread is that of the most probable class, averaged over several outputs.
    """
    first, second = uncertainties(inside), uncertainties(outside)
    if first.keys() != second.keys():
        raise ValueError(f"both must be predictions of one kind, got {inside.likelihood.name} and {outside.likelihood.name}.")
    return OutOfDistribution(len(inside), len(outside), {name: detection(first[name], second[name]) for name in first})


def uncertainties(prediction: Prediction) -> dict[str, Tensor]:
    """One number for each example, (examples,), by name: the scores of `compare_ood`."""
    spread = prediction.spread
    if not prediction.likelihood.has_classes:
        return {"spread": _by_row(spread)}
    if not prediction.is_binary:
        spread = spread.gather(1, prediction.labels.unsqueeze(1)).squeeze(1)
    columns = {"mutual information": prediction.mutual_information, "entropy": prediction.entropy, "spread": spread}
    return {name: _by_row(x) for name, x in columns.items()}
