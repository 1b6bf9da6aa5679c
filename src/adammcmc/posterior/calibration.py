r"""Whether predictions are right, with labels: plain functions of tensors, and `score`, which has all of them.

Class probabilities are (examples, classes, ...) with labels (examples, ...), or, where each number is the probability of one
class of two, of the shape of their labels. Every number comes with its standard error from the finite number of examples.
Where an example has several outputs (targets of a regression, pixels), these may go wrong together: errors are from the spread
between examples, which are independent, and never from that between outputs.

torchmetrics and scikit-learn have most of these numbers, without errors; here they are a few lines each, in float64, so that
they need neither. The tests hold them equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adammcmc.posterior.predictive import Prediction, log_mixture

__all__ = [
    "ClassScores",
    "Coverage",
    "Detection",
    "ExpectedError",
    "Measured",
    "OutOfDistribution",
    "Reliability",
    "RiskCurve",
    "ValueScores",
    "accuracy",
    "auroc",
    "average_precision",
    "brier",
    "compare_ood",
    "detection",
    "ece",
    "fpr_at_tpr",
    "nll",
    "reliability",
    "score",
    "selective_risk",
]

_REPLICAS = 200
_CHUNK = 1 << 22  # numbers that are held at once where something is done many times over
_LEVELS = (0.5, 0.68, 0.9, 0.95)


class Measured(NamedTuple):
    """A number and its standard error, from the finite number of examples; NaN where that is not known.

    It is said to two digits of its error.

    Example:
        >>> print(Measured(0.93124, 0.00411), "|", Measured(812.3, 34.6), "|", Measured(0.93124, math.nan))
        0.9312 +- 0.0041 | 812 +- 35 | 0.9312 (error unknown)
    """

    value: float
    error: float

    def __str__(self) -> str:
        return self._said("")

    @property
    def with_sign(self) -> str:
        """The same, of a difference: + or - comes first."""
        return self._said("+")

    def _said(self, sign: str) -> str:
        if not (math.isfinite(self.value) and math.isfinite(self.error)):
            return f"{self.value:{sign}.4g}" + " (error unknown)" * math.isfinite(self.value)
        if self.error == 0:
            return f"{self.value:{sign}.4g} +- 0"
        digits = max(0, 1 - int(f"{self.error:.1e}".partition("e")[2]))
        return f"{self.value:{sign}.{digits}f} +- {self.error:.{digits}f}"


# --- classes --------------------------------------------------------------------------------------------------------------


def accuracy(probabilities: Tensor, targets: Tensor) -> Measured:
    """Share of examples whose most probable class is theirs.

    Example:
        >>> print(accuracy(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), torch.tensor([0, 1, 1])))
        0.67 +- 0.28
    """
    p, labels = _checked_classes(probabilities, targets)
    return _share(_hits(p, labels))


def nll(probabilities: Tensor, targets: Tensor) -> Measured:
    """Mean of -log p(target), in nats; infinite if a class that came true had probability 0."""
    p, labels = _checked_classes(probabilities, targets)
    return _mean(-_of_targets(p, labels).log())


def brier(probabilities: Tensor, targets: Tensor) -> Measured:
    """Mean squared distance between probabilities and what came true.

    Summed over the classes, 0 to 2; for probabilities of one class of two it is of that class, 0 to 1.
    """
    p, labels = _checked_classes(probabilities, targets)
    if p.shape == labels.shape:
        return _mean((p - labels).square())
    truth = torch.nn.functional.one_hot(labels, p.shape[1]).movedim(-1, 1)
    return _mean((p - truth).square().sum(1))


class Reliability(NamedTuple):
    """The reliability curve: how often those came true that were said to be so probable. Tensors (bins,)."""

    edges: Tensor
    """(bins + 1,)"""
    counts: Tensor
    confidence: Tensor
    """Mean probability in the bin; NaN in an empty one, and so below."""
    frequency: Tensor
    """Share that came true."""
    error: Tensor
    """Standard error of `frequency`: binomial, with half a success and half a failure added, so that it is never 0; for as many
    independent outputs as the spread between examples is worth."""


def reliability(probabilities: Tensor, targets: Tensor, num_bins: int = 15) -> Reliability:
    """The reliability curve, in bins of equal width; a bin has its lower edge, the last one also 1.

    Of the most probable class and whether it is right; where probabilities are of one class of two, of that class.

    Example:
        >>> curve = reliability(torch.tensor([0.1, 0.15, 0.9, 0.95]), torch.tensor([0, 1, 1, 1]), num_bins=2)
        >>> curve.counts.tolist(), curve.frequency.tolist()
        ([2, 2], [0.5, 1.0])
    """
    confidence, hits, bins = _binned(probabilities, targets, num_bins)
    counts, right = (_by_bin(x, bins, num_bins) for x in (torch.ones_like(hits), hits))
    total = counts.sum(0)
    frequency = right.sum(0) / total
    return Reliability(
        torch.linspace(0, 1, num_bins + 1, dtype=torch.float64),
        total.long(),
        _by_bin(confidence, bins, num_bins).sum(0) / total,
        frequency,
        _binomial_error(frequency, _independent(right, counts)),
    )


class ExpectedError(NamedTuple):
    """Expected calibration error, and what it would be by chance: it is never 0, also not for true probabilities."""

    value: float
    error: float
    by_chance: float
    """Its mean, if every probability were the true one, and as many examples were seen."""
    limit: float
    """Which it would then exceed once in twenty times."""

    @property
    def is_by_chance(self) -> bool:
        """Whether it is no larger than chance makes it."""
        return self.value <= self.limit

    def __str__(self) -> str:
        return f"{Measured(self.value, self.error)} (by chance {self.by_chance:.4f}, 95% below {self.limit:.4f})"


def ece(probabilities: Tensor, targets: Tensor, num_bins: int = 15) -> ExpectedError:
    """Expected calibration error: the mean of |confidence - frequency| over bins of equal width, by number of examples.

    With signs s_b of the bins fixed it is a mean over examples, of s_b (confidence - hit): its standard error is that of this
    mean. What chance would make of it is found from 200 replicas, in which classes come true with the probabilities given;
    where an example has several outputs, as much together as they do in the data.
    """
    confidence, hits, bins = _binned(probabilities, targets, num_bins)
    gaps = _by_bin(confidence - hits, bins, num_bins)
    signed = torch.where(gaps.sum(0) < 0, -1.0, 1.0)[bins] * (confidence - hits)
    value, error = _mean(signed)
    if hits.numel() == len(hits):
        chance = _by_chance(confidence.flatten(), bins.flatten(), num_bins)
    else:
        chance = _by_chance_together(confidence, hits, bins, gaps)
    return ExpectedError(value, error, float(chance.mean()), float(chance.quantile(0.95)))


def _by_chance_together(confidence: Tensor, hits: Tensor, bins: Tensor, gaps: Tensor) -> Tensor:
    """The same where outputs of one example may come true together; how much so, only the data say.

    Whole examples are counted with random signs. The sum in a bin then has the mean 0 and the variance sum_i gap_i^2, and all
    that outputs of an example share is kept. The scale makes it what it is for true probabilities, sum p (1 - p) where outputs
    are independent: among sure answers few are wrong or none, and their own squares would say too little.
    """
    num_bins = gaps.shape[1]
    said = _by_bin(confidence * (1 - confidence), bins, num_bins).sum(0)
    seen = _by_bin((confidence - hits).square(), bins, num_bins).sum(0)
    scaled = gaps * torch.where(seen > 0, said / seen, 0.0).sqrt()
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in _portions(len(gaps)):
        signs = 2 * torch.randint(2, (number, len(gaps)), generator=generator).double() - 1
        found.append((signs @ scaled).abs().sum(1) / hits.numel())
    return torch.cat(found)


def _by_chance(confidence: Tensor, bins: Tensor, num_bins: int) -> Tensor:
    """Calibration errors of replicas whose probabilities are true; of independent outputs, (outputs,)."""
    generator = torch.Generator().manual_seed(0)
    n, found = len(confidence), []
    for number in _portions(n):
        hits = torch.rand(number, n, generator=generator, dtype=torch.float64) < confidence
        gaps = torch.zeros(number, num_bins, dtype=torch.float64).index_add_(1, bins, confidence - hits.double())
        found.append(gaps.abs().sum(1) / n)
    return torch.cat(found)


def _binned(probabilities: Tensor, targets: Tensor, num_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Confidence, whether it came true, and the bin, (examples, ...)."""
    if isinstance(num_bins, bool) or not isinstance(num_bins, int) or num_bins < 1:
        raise ValueError(f"`num_bins` must be a positive integer, got {num_bins!r}.")
    p, labels = _checked_classes(probabilities, targets)
    is_binary = p.shape == labels.shape
    confidence = p if is_binary else p.amax(1)
    hits = labels.double() if is_binary else _hits(p, labels)
    inner = torch.linspace(0, 1, num_bins + 1, dtype=torch.float64)[1:-1]
    return confidence, hits, torch.bucketize(confidence, inner, right=True)


def _by_bin(values: Tensor, bins: Tensor, num_bins: int) -> Tensor:
    """Sums of values (examples, ...) over the outputs of each example in each bin, (examples, bins)."""
    place = bins.reshape(len(bins), -1) + num_bins * torch.arange(len(bins))[:, None]
    return torch.bincount(place.flatten(), values.flatten(), num_bins * len(bins)).reshape(-1, num_bins)


# --- which to answer ------------------------------------------------------------------------------------------------------


class RiskCurve(NamedTuple):
    """What is risked if only the more certain examples are answered."""

    coverage: Tensor
    """Share that is answered, 1/n to 1."""
    risk: Tensor
    """Mean loss of those. Equal uncertainties are answered in any order, and the risk is the mean over the orders."""
    area: float
    """Under the curve (AURC): the mean risk over all coverages."""
    area_at_random: float
    """If uncertainty said nothing: the mean loss."""
    area_at_best: float
    """If it knew the losses."""

    def at(self, coverage: float) -> float:
        """The risk if this share is answered."""
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
    n = len(u)
    _, group = torch.unique(u, return_inverse=True)
    counts = torch.bincount(group)
    within = torch.bincount(group, loss) / counts  # the mean loss of equal uncertainties
    number = torch.arange(1, n + 1, dtype=torch.float64)
    risk = within.repeat_interleave(counts).cumsum(0) / number
    best = loss.sort().values.cumsum(0) / number
    return RiskCurve(number / n, risk, float(risk.mean()), float(loss.mean()), float(best.mean()))


# --- telling two sets apart -----------------------------------------------------------------------------------------------


def auroc(scores: Tensor, labels: Tensor) -> Measured:
    """Area under the ROC curve: the probability that one of label 1 scores higher than one of label 0, ties count half.

    The error is DeLong's (1988): from the spread of each example's own share of the others that it beats.

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

    The error is from the influence of each example: how the area would change if it counted a little more.

    Example:
        >>> round(average_precision(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1])).value, 4)
        0.8333
    """
    true, false = _counts(*_checked_labels(scores, labels))
    ones, zeros = torch.diff(true, prepend=true.new_zeros(1)), torch.diff(false, prepend=false.new_zeros(1))
    total, number = true + false, true[-1]
    precision = true / total
    value = (ones * precision).sum() / number
    # an example counts in the precision at its own score and at all lower ones
    below = _sums_from_below(ones * false / total.square()), _sums_from_below(ones * true / total.square())
    of_ones, of_zeros = (precision - value + below[0]) / number, -below[1] / number
    variance = _weighted_squares(of_ones, ones) + _weighted_squares(of_zeros, zeros)
    return Measured(float(value), variance**0.5)


def fpr_at_tpr(scores: Tensor, labels: Tensor, tpr: float = 0.95) -> Measured:
    """Share of label 0 above the highest cut that has at least this share of label 1 above it (or on it).

    The error has two parts, added in quadrature: the number of label 0 above the cut, and the cut itself, which label 1 places
    within +- sqrt(tpr (1 - tpr) / N) of the wanted share.
    """
    if not 0 < tpr <= 1:
        raise ValueError(f"`tpr` must lie between 0 and 1, got {tpr}.")
    true, false = _counts(*_checked_labels(scores, labels))

    def passed(share: float) -> float:
        first = int((true < share * true[-1] * (1 - 1e-12)).sum())
        return float(false[min(first, len(false) - 1)] / false[-1])

    wobble = math.sqrt(tpr * (1 - tpr) / float(true[-1]))
    from_cut = (passed(min(1.0, tpr + wobble)) - passed(tpr - wobble)) / 2
    value = passed(tpr)
    return Measured(value, math.hypot(float(_binomial_error(false.new_tensor(value), false[-1])), from_cut))


class Detection(NamedTuple):
    """How well a score tells examples from outside (label 1) from those inside."""

    auroc: Measured
    aupr: Measured
    """Guessing has the share of examples from outside, not 1/2."""
    fpr95: Measured
    """Share of the examples inside that are flagged where 95% of those from outside are."""

    def __str__(self) -> str:
        return f"AUROC {self.auroc}, AUPR {self.aupr}, FPR95 {self.fpr95}"


def detection(inside: Tensor, outside: Tensor) -> Detection:
    """How well a score, (examples,), higher outside, tells the two apart."""
    inside, outside = _numbers("inside", inside), _numbers("outside", outside)
    scores = torch.cat([inside, outside])
    is_outside = torch.arange(len(scores)) >= len(inside)
    return Detection(*(measure(scores, is_outside) for measure in (auroc, average_precision, fpr_at_tpr)))


def _counts(scores: Tensor, is_one: Tensor) -> tuple[Tensor, Tensor]:
    """How many of label 1 and of label 0 are above each cut, as it falls over all scores, (cuts,)."""
    order = scores.argsort(descending=True)
    ordered, hits = scores[order], is_one[order].double()
    last_of_ties = torch.cat([ordered[1:] != ordered[:-1], torch.ones(1, dtype=torch.bool)])
    return hits.cumsum(0)[last_of_ties], (1 - hits).cumsum(0)[last_of_ties]


def _sums_from_below(values: Tensor) -> Tensor:
    return values.flip(0).cumsum(0).flip(0)


def _weighted_squares(values: Tensor, counts: Tensor) -> float:
    """Sum of squared distances from the mean, of values that are there so many times."""
    mean = (counts * values).sum() / counts.sum()
    return float((counts * (values - mean).square()).sum())


# --- all of it ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassScores:
    """How right class probabilities are. `print` it for a table."""

    num_examples: int
    accuracy: Measured
    nll: Measured
    brier: Measured
    ece: ExpectedError
    overconfidence: Measured
    """Mean probability of the class that is taken - how often it is right: positive where more is claimed than comes true."""
    reliability: Reliability
    selective: dict[str, RiskCurve]
    """Share of wrong classes if only the more certain examples are answered; by entropy, and by mutual information."""

    @property
    def verdict(self) -> str:
        """In words."""
        if self.ece.is_by_chance:
            return f"calibrated, as far as {_examples(self.num_examples)} can tell"
        gap, error = self.overconfidence
        if abs(gap) < 2 * error:
            return "not calibrated: some probabilities are too high, others too low; see the reliability curve"
        return (
            f"{'over' if gap > 0 else 'under'}confident: probabilities are too {'high' if gap > 0 else 'low'} by {abs(gap):.3f}"
        )

    def __str__(self) -> str:
        rows = {
            "accuracy": str(self.accuracy),
            "negative log likelihood": f"{self.nll} nats",
            "Brier score": str(self.brier),
            "calibration error": str(self.ece),
            "confidence - frequency": self.overconfidence.with_sign,
        }
        for name, curve in self.selective.items():
            rows[f"wrong, by {name}"] = f"{curve.at(0.5):.4f} of the more certain half, {curve.at(1.0):.4f} of all"
        return _table(f"{_examples(self.num_examples)}: {self.verdict}", rows)


class Coverage(NamedTuple):
    """Of central intervals of one level."""

    level: float
    share: float
    """Of the targets that lie inside."""
    error: float
    """Binomial, for as many independent targets as the spread between examples is worth."""


@dataclass(frozen=True)
class ValueScores:
    """How right predicted values are. `print` it for a table."""

    num_examples: int
    rmse: Measured
    nll_mixture: Measured | None
    """-log p(target) of an example, its outputs together, by the mixture of the draws, p = mean_d N(mean_d, variance_d): what
    the posterior predicts. None where the noise of the targets is not known, or the targets came neither with the data nor with
    raw=True."""
    nll_gaussian: Measured | None
    """The same by one Gaussian with the mean and total variance of the prediction. None where the noise is not known."""
    coverage: tuple[Coverage, ...]
    includes_noise: bool
    """Whether the intervals are of new targets. If not they are of the mean values alone, and hold fewer targets."""
    intervals: str
    """Of which distribution they are."""
    is_mixture: bool = False
    """Whether that is the mixture of the draws (raw=True)."""

    @property
    def nll(self) -> Measured | None:
        """That of the distribution of the intervals: `nll_mixture` with raw=True, otherwise `nll_gaussian`."""
        return self.nll_mixture if self.is_mixture else self.nll_gaussian

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.includes_noise:
            return "intervals of the mean values alone, without the noise of the targets: they hold fewer targets than they say"
        off = [c for c in self.coverage if abs(c.share - c.level) > 2.5 * c.error]
        if not off:
            return f"intervals hold what they say, as far as {_examples(self.num_examples)} can tell"
        worst = max(off, key=lambda c: abs(c.share - c.level) / c.error)
        word = "narrow" if worst.share < worst.level else "wide"
        return f"intervals are too {word}: those of {worst.level:.0%} hold {worst.share:.1%} of the targets"

    def __str__(self) -> str:
        rows = {"root mean square error": str(self.rmse)}
        if self.nll_mixture is not None:
            rows["negative log likelihood"] = f"{self.nll_mixture} nats, of the mixture of the draws"
        if self.nll_gaussian is not None:
            rows["of a Gaussian"] = f"{self.nll_gaussian} nats, with the mean and variance of the prediction"
        rows |= {f"inside of {c.level:.0%}": str(Measured(c.share, c.error)) for c in self.coverage}
        return _table(f"{_examples(self.num_examples)}: {self.verdict}", rows | {"intervals": self.intervals})


def score(
    prediction: Prediction,
    targets: Tensor | None = None,
    *,
    num_bins: int = 15,
    levels: Sequence[float] = _LEVELS,
) -> ClassScores | ValueScores:
    """How right a prediction is: `ClassScores` or `ValueScores`, by its likelihood.

    Intervals in regression are of new targets, noise included, where it is known (`GaussianNLL`): of the mixture of the draws
    if the prediction has them (raw=True), else of a Gaussian with its mean and total variance. Without noise they are of the
    mean values. The log likelihood is of both; that of the mixture is the one to compare models by.

    Args:
        prediction: from `posterior.predict`.
        targets: None: those that came with the data. With others, the mixture's log likelihood takes raw=True.
        num_bins: of the reliability curve.
        levels: of central intervals.
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
    is_categorical = "categorical" in prediction.likelihood.name
    if is_categorical and targets.shape == p.shape:
        raise ValueError(
            f"labels must be numbers of classes, of shape {(len(p), *p.shape[2:])}, got {tuple(targets.shape)}: of one-hot "
            "targets take targets.argmax(1)."
        )
    if not is_categorical and targets.shape != p.shape:
        raise ValueError(f"probabilities {tuple(p.shape)} need labels of the same shape, got {tuple(targets.shape)}.")
    checked, labels = _checked_classes(p, targets)
    # of the class that is taken; a number that stands for two classes is sure of one of them
    confidence = torch.maximum(checked, 1 - checked) if checked.shape == labels.shape else checked.amax(1)
    hits = _hits(checked, labels)
    wrong = (1 - hits).flatten()
    uncertainties = {"entropy": prediction.entropy, "mutual information": prediction.mutual_information}
    return ClassScores(
        len(p),
        accuracy(p, targets),
        nll(p, targets),
        brier(p, targets),
        ece(p, targets, num_bins),
        _mean(confidence - hits),
        reliability(p, targets, num_bins),
        {name: selective_risk(u.flatten(), wrong) for name, u in uncertainties.items()},
    )


def _score_values(prediction: Prediction, targets: Tensor, levels: Sequence[float]) -> ValueScores:
    for level in levels:
        if not 0 < level < 1:
            raise ValueError(f"`levels` must lie between 0 and 1, got {level}.")
    mean = prediction.mean.double()
    if targets.shape != mean.shape:
        raise ValueError(
            f"predictions {tuple(mean.shape)} need targets of the same shape, got {tuple(targets.shape)}. For one target, "
            "targets[:, None] has the shape (examples, 1)."
        )
    y = targets.detach().cpu().double()
    for name, x in (("prediction", mean), ("target", y)):
        if not bool(x.isfinite().all()):
            raise ValueError(f"a {name} is not finite.")
    if len(y) == 0:
        raise ValueError("there are no examples.")
    square = _mean((mean - y).square())
    rmse = Measured(square.value**0.5, square.error / (2 * square.value**0.5) if square.value > 0 else 0.0)
    is_mixture = prediction.raw is not None and prediction.raw_variances is not None
    of_mixture = of_gaussian = None
    if prediction.likelihood.name == "gaussian":
        total = prediction.total_variance.double()
        of_gaussian = _mean(-log_mixture(mean[None], total[None], y))
        if is_mixture or prediction.came_with(targets):
            of_mixture = _mean(-prediction.log_density(targets))
        place = _place(prediction, y)
        inside = [((2 * place - 1).abs() <= level).double() for level in levels]
        how = "of new targets, noise included: " + (
            "Gaussian with the mean and variance of the prediction (raw=True has the mixture of its draws)"
            if not is_mixture
            else "mixture of the draws"
        )
    else:
        how = "of the mean values over the draws, without the noise of the targets (which is not known)"
        bounds = [(prediction.quantile((1 - level) / 2), prediction.quantile((1 + level) / 2)) for level in levels]
        inside = [((y >= low) & (y <= high)).double() for low, high in bounds]
    coverage = tuple(Coverage(level, *_share(x)) for level, x in zip(levels, inside, strict=True))
    has_noise = prediction.likelihood.name == "gaussian"
    return ValueScores(len(y), rmse, of_mixture, of_gaussian, coverage, has_noise, how, is_mixture and has_noise)


def _place(prediction: Prediction, y: Tensor) -> Tensor:
    """P(new target < y), (examples, ...), by the mixture of the draws, each with its own variance, or by one Gaussian."""
    means, variances = prediction.raw, prediction.raw_variances
    if means is None or variances is None:
        means, variances = prediction.mean[None], prediction.total_variance[None]
    place = []
    size = max(1, _CHUNK // max(1, len(means) * y[0].numel()))
    for part in range(0, len(y), size):
        rows = slice(part, part + size)
        z = (y[rows] - means[:, rows].double()) / variances[:, rows].double().sqrt()
        place.append(torch.special.ndtr(z).mean(0))
    return torch.cat(place)


@dataclass(frozen=True)
class OutOfDistribution:
    """How well the draws tell examples from outside from those inside, by each of their uncertainties."""

    num_inside: int
    num_outside: int
    by: dict[str, Detection]
    """By "mutual information", "entropy" and "spread"; in regression by "spread"."""

    def __str__(self) -> str:
        rows = {f"by {name}": str(found) for name, found in self.by.items()}
        return _table(f"{_examples(self.num_outside)} from outside among {self.num_inside:,} inside", rows)


def compare_ood(inside: Prediction, outside: Prediction) -> OutOfDistribution:
    """Whether the draws know what they do not know: predictions for data as in training, and for data from elsewhere.

    The spread is that of the most probable class; of several outputs, their mean.
    """
    first, second = uncertainties(inside), uncertainties(outside)
    if first.keys() != second.keys():
        raise ValueError(f"both must be predictions of one kind, got {inside.likelihood.name} and {outside.likelihood.name}.")
    return OutOfDistribution(len(inside), len(outside), {name: detection(first[name], second[name]) for name in first})


def uncertainties(prediction: Prediction) -> dict[str, Tensor]:
    """One number for each example, (examples,), by name: what `compare_ood` compares."""
    spread = prediction.spread
    if not prediction.likelihood.has_classes:
        return {"spread": _by_row(spread)}
    if "categorical" in prediction.likelihood.name:
        spread = spread.gather(1, prediction.labels.unsqueeze(1)).squeeze(1)
    columns = {"mutual information": prediction.mutual_information, "entropy": prediction.entropy, "spread": spread}
    return {name: _by_row(x) for name, x in columns.items()}


# --- small things ---------------------------------------------------------------------------------------------------------


def _checked_classes(probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    p, labels = probabilities.detach().cpu().double(), targets.detach().cpu()
    is_binary = p.shape == labels.shape
    if p.dim() == 0 or len(p) == 0:
        raise ValueError("there are no examples.")
    if not is_binary and (p.dim() < 2 or (len(p), *p.shape[2:]) != tuple(labels.shape)):
        raise ValueError(
            f"probabilities (examples, classes, ...) need labels (examples, ...), got {tuple(p.shape)} and "
            f"{tuple(labels.shape)}; probabilities of one class of two need labels of their own shape."
        )
    if not bool(p.isfinite().all()):
        raise ValueError("a probability is not finite.")
    if bool(((p < -1e-6) | (p > 1 + 1e-6)).any()):
        raise ValueError(
            f"probabilities must lie between 0 and 1, got {float(p.min()):.4g} to {float(p.max()):.4g}: are they logits?"
        )
    if not is_binary and bool(((p.sum(1) - 1).abs() > 0.02).any()):
        raise ValueError("the probabilities of the classes of an example must sum to 1 (along axis 1).")
    number = 2 if is_binary else p.shape[1]
    if bool(
        ((labels < 0) | (labels >= number) | (labels != labels.floor() if labels.is_floating_point() else labels < 0)).any()
    ):
        raise ValueError(f"labels must be 0 to {number - 1}, got {float(labels.min()):g} to {float(labels.max()):g}.")
    return p.clamp(0, 1), labels.long()


def _checked_labels(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    scores = _numbers("scores", scores)
    labels = labels.detach().cpu()
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


def _hits(p: Tensor, labels: Tensor) -> Tensor:
    chosen = (p > 0.5).long() if p.shape == labels.shape else p.argmax(1)
    return (chosen == labels).double()


def _of_targets(p: Tensor, labels: Tensor) -> Tensor:
    if p.shape == labels.shape:
        return torch.where(labels == 1, p, 1 - p)
    return p.gather(1, labels.unsqueeze(1)).squeeze(1)


def _portions(n: int) -> list[int]:
    """How many replicas of n examples to make at once, until there are enough."""
    size = max(1, min(_REPLICAS, _CHUNK // n))
    return [min(size, _REPLICAS - made) for made in range(0, _REPLICAS, size)]


def _by_row(values: Tensor) -> Tensor:
    return values.double().flatten(1).mean(1) if values.dim() > 1 else values.double()


def _mean(values: Tensor) -> Measured:
    rows = _by_row(values)
    return Measured(float(rows.mean()), _variance_of_mean(rows) ** 0.5)


def _share(values: Tensor) -> Measured:
    """Of ones among zeros and ones, (examples, ...)."""
    hits = values.reshape(len(values), -1).sum(1)
    share = values.mean()
    return Measured(float(share), float(_binomial_error(share, _independent(hits, torch.full_like(hits, values[0].numel())))))


def _independent(hits: Tensor, counts: Tensor) -> Tensor:
    """How many independent outputs would say as much: of hits among so many outputs of each example, (examples, ...).

    As many as there are if the outputs of an example know nothing of each other; as many as there are examples if all outputs
    of one are right or wrong together, which is assumed where nothing tells: all are right, or all wrong, or of one example.
    """
    total = counts.sum(0)
    share = hits.sum(0) / total
    between = (hits - share * counts).square().sum(0)
    is_known = (share > 0) & (share < 1) & ((counts > 0).sum(0) > 1)
    found = torch.minimum(share * (1 - share) * total.square() / between, total)
    return torch.where(is_known, found, total.square() / counts.square().sum(0))


def _binomial_error(share: Tensor, n: Tensor) -> Tensor:
    """Half a success and half a failure are added, so that it is never 0."""
    smooth = (share * n + 0.5) / (n + 1)
    return (smooth * (1 - smooth) / n).sqrt()


def _variance_of_mean(x: Tensor) -> float:
    return float(x.var() / len(x)) if len(x) > 1 else math.nan


def _examples(number: int) -> str:
    return f"{number:,} example{'s' * (number != 1)}"


def _table(title: str, rows: dict[str, Any]) -> str:
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())])
