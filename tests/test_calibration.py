"""Whether predictions are right: against scikit-learn, torchmetrics, and what must come out by construction."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
import torch.nn.functional as F
import torchmetrics.functional as TM
from torch import Tensor, nn

import adammcmc
from adammcmc import calibration
from adammcmc.cli.tables import summary_line
from adammcmc.posterior.calibration import ClassScores, ValueScores
from adammcmc.posterior.predictive import Prediction, predict
from adammcmc.target.data import as_data
from adammcmc.target.likelihood import GaussianNLL, Likelihood

N = 400


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classes(n: int = N, number: int = 5, sharpness: float = 2.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Probabilities, and labels that follow them: calibrated by construction."""
    g = generator(seed)
    p = (sharpness * torch.randn(n, number, generator=g, dtype=torch.float64)).softmax(1)
    return p, torch.multinomial(p, 1, generator=g)[:, 0]


def binary(n: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = generator(seed)
    p = torch.rand(n, generator=g, dtype=torch.float64)
    return p, (torch.rand(n, generator=g, dtype=torch.float64) < p).long()


def tied() -> tuple[Tensor, Tensor]:
    """Of few values: confidences that are equal, and examples with two most probable classes."""
    p, y = classes(seed=3)
    coarse = (4 * p).round() + 0.01
    return coarse / coarse.sum(1, keepdim=True), y


SETS = {
    "classes": classes(),
    "classes in float32": (classes()[0].float(), classes()[1]),
    "two classes": classes(number=2, seed=1),
    "a class is missing": (classes(seed=2)[0], classes(seed=2)[1].clamp(max=3)),
    "ties": tied(),
    "sure": (0.0005 + 0.9985 * F.one_hot(torch.arange(60) % 3, 3).double(), torch.arange(60) % 3),
}


@pytest.mark.parametrize("name", SETS)
def test_class_numbers_equal_scikit_learn_and_torchmetrics(name: str) -> None:
    p, y = SETS[name]
    number = p.shape[1]
    rows, labels = p.double().numpy(), y.numpy()
    assert calibration.accuracy(p, y).value == pytest.approx(sklearn.metrics.accuracy_score(labels, rows.argmax(1)))
    rows = rows / rows.sum(1, keepdims=True)
    log_loss = sklearn.metrics.log_loss(labels, rows, labels=range(number))
    assert calibration.nll(p, y).value == pytest.approx(log_loss, rel=1e-6)
    squares = ((rows - np.eye(number)[labels]) ** 2).sum(1).mean()
    assert calibration.brier(p, y).value == pytest.approx(squares, rel=1e-6)
    for bins in (1, 10, 15):
        theirs = TM.classification.multiclass_calibration_error(p.double(), y, number, n_bins=bins)
        assert calibration.ece(p, y, bins).value == pytest.approx(float(theirs), rel=1e-5, abs=1e-6)  # theirs is in float32


def test_binary_numbers_equal_scikit_learn_and_torchmetrics() -> None:
    p, y = binary()
    rows, labels = p.numpy(), y.numpy()
    assert calibration.accuracy(p, y).value == pytest.approx(sklearn.metrics.accuracy_score(labels, rows > 0.5))
    assert calibration.nll(p, y).value == pytest.approx(sklearn.metrics.log_loss(labels, rows))
    assert calibration.brier(p, y).value == pytest.approx(sklearn.metrics.brier_score_loss(labels, rows))
    for bins in (1, 10, 15):
        theirs = TM.classification.binary_calibration_error(p, y, n_bins=bins)
        assert calibration.ece(p, y, bins).value == pytest.approx(float(theirs), rel=1e-5)
    frequency, confidence = sklearn.calibration.calibration_curve(labels, rows, n_bins=10)
    curve = calibration.reliability(p, y, 10)
    np.testing.assert_allclose(curve.frequency, frequency)
    np.testing.assert_allclose(curve.confidence, confidence)
    assert int(curve.counts.sum()) == N


SCORES = {
    "smooth": lambda g: torch.randn(300, generator=g),
    "tied": lambda g: torch.randint(4, (300,), generator=g).float(),
    "all equal": lambda g: torch.zeros(300),
    "infinite": lambda g: torch.where(torch.rand(300, generator=g) < 0.1, torch.inf, torch.randn(300, generator=g)),
    "in half precision": lambda g: torch.randn(300, generator=g).half(),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("share", [0.5, 0.05])
def test_detection_equals_scikit_learn_and_torchmetrics(name: str, share: float) -> None:
    g = generator(1)
    scores: Tensor = SCORES[name](g)
    y = (torch.rand(300, generator=g) < share).long()
    finite = scores.nan_to_num(posinf=1e3).double().numpy()  # scikit-learn takes no infinities
    auroc = calibration.auroc(scores, y).value
    assert auroc == pytest.approx(sklearn.metrics.roc_auc_score(y.numpy(), finite))
    ap = calibration.average_precision(scores, y).value
    assert ap == pytest.approx(sklearn.metrics.average_precision_score(y.numpy(), finite))
    fpr, tpr, _ = sklearn.metrics.roc_curve(y.numpy(), finite, drop_intermediate=False)
    assert calibration.fpr_at_tpr(scores, y).value == pytest.approx(fpr[tpr >= 0.95 - 1e-12].min())
    probabilities = torch.tensor(finite).argsort().argsort() if name == "smooth" else None
    if probabilities is not None:  # torchmetrics wants probabilities: the ranks will do
        ranks = probabilities.double() / 300
        assert auroc == pytest.approx(float(TM.classification.binary_auroc(ranks, y)), rel=1e-5)
        assert ap == pytest.approx(float(TM.classification.binary_average_precision(ranks, y)), rel=1e-5)
    found = calibration.detection(scores[y == 0].double(), scores[y == 1].double())
    assert (found.auroc.value, found.aupr.value) == pytest.approx((auroc, ap))
    assert found.fpr95 == pytest.approx(calibration.fpr_at_tpr(scores, y))


# --- the errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "measure",
    [
        lambda p, y: calibration.accuracy(p, y),
        lambda p, y: calibration.nll(p, y),
        lambda p, y: calibration.brier(p, y),
        lambda p, y: calibration.ece((2 * p.log()).softmax(1), y)[:2],  # far from calibrated, so that no bin changes its sign
        lambda p, y: calibration.auroc(p[:, 0], y == 0),
        lambda p, y: calibration.detection(p[y != 0, 0], p[y == 0, 0]).aupr,
        lambda p, y: calibration.detection(p[y != 0, 0], p[y == 0, 0]).fpr95,
    ],
    ids=["accuracy", "nll", "brier", "ece", "auroc", "aupr", "fpr95"],
)
def test_errors_are_the_spread_over_fresh_data(measure: Callable[[Tensor, Tensor], Any]) -> None:
    """Of 60 sets of examples: a standard deviation of 60 numbers is known to a part in sqrt(118)."""
    found = torch.tensor([measure(*classes(300, 3, seed=s)) for s in range(60)], dtype=torch.float64)
    ratio = float(found[:, 1].mean() / found[:, 0].std())
    assert abs(math.log(ratio)) < 4.5 / math.sqrt(118)


@pytest.mark.parametrize("measure", [calibration.auroc, calibration.average_precision])
def test_errors_equal_the_jackknife(measure: Callable[[Tensor, Tensor], calibration.Measured]) -> None:
    """Without one example at a time, label by label; equal but for terms of the order of 1 / n."""
    p, labels = classes(600, 3)
    scores, y = p[:, 0], (labels == 0).long()
    others = [torch.arange(600) != i for i in range(600)]
    without = torch.tensor([measure(scores[rest], y[rest]).value for rest in others])
    parts = [without[y == label].double() for label in (0, 1)]
    variance = sum(float((x - x.mean()).square().sum()) * (len(x) - 1) / len(x) for x in parts)
    assert measure(scores, y).error == pytest.approx(math.sqrt(variance), rel=0.02)


def test_outputs_of_one_example_are_not_counted_as_several() -> None:
    """Every example ten times over: the same numbers, and the same errors."""
    p, y = classes()
    many, labels = p[:, :, None].expand(-1, -1, 10), y[:, None].expand(-1, 10)
    for name in ("accuracy", "nll", "brier"):
        f = getattr(calibration, name)
        assert f(many, labels) == pytest.approx(f(p, y))
    assert calibration.ece(many, labels)[:2] == pytest.approx(calibration.ece(p, y)[:2])


def together(n: int = 200, outputs: int = 10, share: float = 0.6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities (n, 3, outputs), labels that follow them, and normal numbers (n, outputs); an example's go together."""
    g = generator(seed)

    def normal(*shape: int) -> Tensor:
        common, own = (torch.randn(n, *shape, k, generator=g, dtype=torch.float64) for k in (1, outputs))
        return share**0.5 * common + (1 - share) ** 0.5 * own

    p, z = (2 * normal(3)).softmax(1), normal()
    return p, (torch.special.ndtr(z)[:, None] > p.cumsum(1)[:, :-1]).sum(1), z


def inside(z: Tensor) -> calibration.Measured:
    """The coverage of intervals that are a little too wide."""
    found = calibration.score(prediction(torch.zeros(1, *z.shape), Likelihood("gaussian", 1.2)), z, levels=[0.5])
    assert isinstance(found, ValueScores)
    return calibration.Measured(*found.coverage[0][1:])


def rmse(z: Tensor) -> calibration.Measured:
    found = calibration.score(prediction(torch.zeros(1, *z.shape), Likelihood("values")), z, levels=[0.5])
    assert isinstance(found, ValueScores)
    return found.rmse


def frequency(p: Tensor, y: Tensor) -> calibration.Measured:
    curve = calibration.reliability(p[:, 0], y == 0, num_bins=4)
    return calibration.Measured(float(curve.frequency[1]), float(curve.error[1]))


TOGETHER: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "accuracy": lambda p, y, z: calibration.accuracy(p, y),
    "nll": lambda p, y, z: calibration.nll(p, y),
    "brier": lambda p, y, z: calibration.brier(p[:, 0], y == 0),
    "ece": lambda p, y, z: calibration.ece((2 * p[:, 0].logit()).sigmoid(), y == 0)[:2],  # no bin changes its sign
    "reliability": lambda p, y, z: frequency(p, y),
    "coverage": lambda p, y, z: inside(z),
    "rmse": lambda p, y, z: rmse(z),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_errors_of_outputs_that_go_together_are_those_of_a_bootstrap_over_examples(name: str) -> None:
    """Of 200 resamples: their standard deviation is known to a part in sqrt(398). That of single outputs is another."""
    measure, sets, g = TOGETHER[name], together(), generator(5)
    again = [measure(*(x[rows] for x in sets)) for rows in torch.randint(200, (200, 200), generator=g)]
    spread = float(torch.tensor([float(found[0]) for found in again], dtype=torch.float64).std())
    tolerance = 4.5 / math.sqrt(398)
    assert abs(math.log(measure(*sets)[1] / spread)) < tolerance
    p, y, z = sets  # the same with every output as an example
    naive = measure(p.movedim(1, 2).reshape(-1, 3), y.flatten(), z.flatten())[1]
    assert math.log(spread / naive) > tolerance


def test_independent_outputs_are_worth_as_much_as_examples() -> None:
    p, y, _ = together(share=0.0)
    found, alone = calibration.accuracy(p, y), calibration.accuracy(p.movedim(1, 2).reshape(-1, 3), y.flatten())
    assert abs(math.log(found.error / alone.error)) < 4.5 / math.sqrt(2 * 200)
    right = torch.ones(30, 5, dtype=torch.long)
    assert calibration.accuracy(right.double(), right) == calibration.accuracy(right[:, 0].double(), right[:, 0])


@pytest.mark.parametrize("share", [0.0, 0.7])
def test_true_probabilities_of_outputs_that_go_together_are_called_calibrated(share: float) -> None:
    found, alone = [], []
    for seed in range(60):
        p, y, _ = together(200, 10, share, seed)
        found.append(calibration.ece(p[:, 0], y == 0))
        alone.append(calibration.ece(p[:, 0].flatten(), (y == 0).flatten()))
    assert sum(not one.is_by_chance for one in found) <= 11  # 5% of 60 are 3; 12 and more have a probability of 6e-5
    error = float(torch.tensor([one.value - one.by_chance for one in found]).std()) / 60**0.5
    assert abs(np.mean([one.value - one.by_chance for one in found])) < 4.5 * error
    if share > 0:
        assert sum(not one.is_by_chance for one in alone) > 11


def test_sure_answers_that_are_all_right_are_called_calibrated() -> None:
    """1,000 outputs of each of 50 examples, 1 in 1,000 wrong: none is seen, if an example is right or wrong as a whole."""
    p, y = torch.full((50, 1000), 0.999), torch.ones(50, 1000)
    assert calibration.ece(p, y).is_by_chance


def test_true_probabilities_are_called_calibrated_and_others_not() -> None:
    found = [calibration.ece(*classes(300, seed=s)) for s in range(60)]
    above = sum(not one.is_by_chance for one in found)
    assert above <= 11  # 5% of 60 are 3; 12 and more have a probability of 6e-5
    error = torch.tensor([one.value for one in found]).std() / 60**0.5
    assert abs(np.mean([one.value - one.by_chance for one in found])) < 4.5 * float(error)
    p, y = classes(1000)
    assert not calibration.ece((3 * p.log()).softmax(1), y).is_by_chance
    assert not calibration.ece((p.log() / 3).softmax(1), y).is_by_chance


def test_the_reliability_curve() -> None:
    p = torch.tensor([0.0, 0.25, 0.25, 0.6, 1.0], dtype=torch.float64)
    curve = calibration.reliability(p, torch.tensor([0, 0, 1, 1, 1]), num_bins=4)
    assert curve.counts.tolist() == [1, 2, 1, 1]  # a bin has its lower edge, the last one also 1
    np.testing.assert_allclose(curve.frequency, [0, 0.5, 1, 1])
    np.testing.assert_allclose(curve.confidence, [0, 0.25, 0.6, 1])
    assert calibration.reliability(p[:1], torch.tensor([0]), num_bins=2).frequency[1].isnan()
    assert (curve.error[curve.counts > 0] > 0).all()
    assert curve.error[1] == pytest.approx((0.5 * 0.5 / 2) ** 0.5)


def test_an_impossible_class_has_infinite_loss() -> None:
    assert calibration.nll(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([1, 0])).value == math.inf


# --- which to answer -------------------------------------------------------------------------------------------------------


def test_selective_risk_is_the_mean_over_all_orders_of_equal_uncertainties() -> None:
    g = generator()
    u, losses = torch.randint(3, (40,), generator=g).double(), torch.rand(40, generator=g).double()
    curve = calibration.selective_risk(u, losses)
    found = torch.zeros(40, dtype=torch.float64)
    squares = torch.zeros(40, dtype=torch.float64)
    for _ in range(4000):
        shuffled = torch.randperm(40, generator=g)
        order = shuffled[u[shuffled].argsort(stable=True)]
        risk = losses[order].cumsum(0) / torch.arange(1, 41)
        found += risk / 4000
        squares += risk.square() / 4000
    error = ((squares - found.square()).clamp_min(0) / 4000).sqrt() + 1e-12
    assert ((curve.risk - found).abs() < 4.5 * error).all()
    assert curve.area == pytest.approx(float(curve.risk.mean()))
    assert curve.area_at_random == pytest.approx(float(losses.mean()))
    assert calibration.selective_risk(losses, losses).area == pytest.approx(curve.area_at_best)
    assert calibration.selective_risk(torch.zeros(40), losses).area == pytest.approx(curve.area_at_random)
    assert curve.at(1.0) == pytest.approx(curve.area_at_random)
    assert curve.at(0.5) == float(curve.risk[19])
    with pytest.raises(ValueError, match="between 0 and 1, got 0"):
        curve.at(0.0)


# --- predictions -----------------------------------------------------------------------------------------------------------


class Outputs(nn.Module):
    """Gives out its own weights, whatever it is asked."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.outputs = nn.Parameter(outputs)

    def forward(self, rows: Tensor) -> Tensor:
        return self.outputs[rows]


def prediction(outputs: Tensor, likelihood: Likelihood, targets: Tensor | None = None, *, raw: bool = False) -> Prediction:
    """Of outputs (draws, examples, ...)."""
    rows = torch.arange(outputs.shape[1])
    return predict(
        Outputs(outputs[0]),
        [lambda x=x: {"outputs": x} for x in outputs],  # type: ignore[misc]
        as_data(rows if targets is None else (rows, targets)),
        likelihood=likelihood,
        forward=lambda model, batch: model(batch if isinstance(batch, Tensor) else batch[0]),
        targets_of=lambda batch: None if isinstance(batch, Tensor) else batch[1],
        raw=raw,
        progress=False,
    )


def test_scores_of_classes() -> None:
    p, y = classes()
    logits = p.log() + 0.3 * torch.randn(7, *p.shape, generator=generator(9), dtype=torch.float64)
    found = adammcmc.score(prediction(logits, Likelihood("categorical"), y))
    assert isinstance(found, ClassScores)
    mean = logits.softmax(2).mean(0)
    assert found.accuracy == calibration.accuracy(mean, y)
    assert found.ece == pytest.approx(calibration.ece(mean, y))
    assert found.overconfidence.value == pytest.approx(float(mean.amax(1).mean()) - found.accuracy.value)
    assert found.selective["entropy"].at(1.0) == pytest.approx(1 - found.accuracy.value)
    assert found.selective["mutual information"].area > found.selective["entropy"].area_at_best
    assert "400 examples: " in str(found)
    assert "by chance" in str(found)


def test_verdicts_on_classes() -> None:
    p, y = classes(2000)

    def verdict(power: float) -> str:
        found = adammcmc.score(prediction(power * p.log()[None], Likelihood("categorical"), y))
        return found.verdict

    assert verdict(1.0) == "calibrated, as far as 2,000 examples can tell"
    assert verdict(3.0).startswith("overconfident: probabilities are too high by 0.")
    assert verdict(0.3).startswith("underconfident: probabilities are too low by 0.")


def test_scores_of_binary_outputs() -> None:
    p, y = binary()
    both = torch.stack([p, 1 - p], 1).logit()[None]
    targets = torch.stack([y, 1 - y], 1).double()
    found = adammcmc.score(prediction(both, Likelihood("bernoulli"), targets))
    assert isinstance(found, ClassScores)
    assert found.num_examples == N
    assert found.nll == pytest.approx(calibration.nll(p, y))
    assert found.brier == pytest.approx(calibration.brier(p, y))


def regression(n: int = 600, draws: int = 50, outputs: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, float]:
    """Means of the draws and targets from their own predictive distribution: calibrated by construction."""
    g, noise = generator(seed), 0.7
    centre = torch.randn(n, outputs, generator=g, dtype=torch.float64)
    means = centre + 0.5 * torch.randn(draws, n, outputs, generator=g, dtype=torch.float64)
    truth = centre + 0.5 * torch.randn(n, 1, generator=g, dtype=torch.float64)
    return means, truth + noise * torch.randn(n, outputs, generator=g, dtype=torch.float64), noise


@pytest.mark.parametrize("raw", [True, False])
def test_scores_of_values_with_noise(raw: bool) -> None:
    means, y, noise = regression()
    found = adammcmc.score(prediction(means, Likelihood("gaussian", noise), y, raw=raw), levels=(0.3, 0.5, 0.9, 0.99))
    assert isinstance(found, ValueScores)
    assert found.includes_noise
    assert found.intervals.endswith("noise included: mixture of the draws") == raw
    for one in found.coverage:
        assert abs(one.share - one.level) < 4.5 * one.error
    assert "interval coverage is right" in found.verdict
    assert found.rmse.value == pytest.approx(float((means.mean(0) - y).square().mean().sqrt()))
    mixture = torch.distributions.Normal(means, noise).log_prob(y).sum(2).logsumexp(0) - math.log(50)
    moments = torch.distributions.Normal(means.mean(0), (noise**2 + means.var(0, correction=0)).sqrt()).log_prob(y).sum(1)
    assert found.nll_mixture is not None
    assert found.nll_gaussian is not None
    assert found.nll_mixture.value == pytest.approx(-float(mixture.mean()))
    assert found.nll_mixture.error == pytest.approx(float(mixture.std() / len(y) ** 0.5))
    assert found.nll_gaussian.value == pytest.approx(-float(moments.mean()))
    assert found.nll_gaussian.error == pytest.approx(float(moments.std() / len(y) ** 0.5))
    assert found.nll == (found.nll_mixture if raw else found.nll_gaussian)
    assert f"negative log likelihood (nats)  {found.nll_mixture}" in str(found)
    assert f"the same for one Gaussian       {found.nll_gaussian}" in str(found)


def test_verdicts_on_values() -> None:
    means, y, noise = regression(outputs=1)

    def verdict(sigma: float) -> str:
        return adammcmc.score(prediction(means, Likelihood("gaussian", sigma), y)).verdict

    assert verdict(noise).startswith("interval coverage is right")
    assert verdict(noise / 5).startswith("intervals are too narrow: ")
    assert verdict(noise * 5).startswith("intervals are too wide: ")
    without = adammcmc.score(prediction(means, Likelihood("values"), y))
    assert isinstance(without, ValueScores)
    assert not without.includes_noise
    assert without.nll is without.nll_mixture is without.nll_gaussian is None
    assert without.coverage[2].share < 0.8
    assert "without target noise" in str(without)


def test_noise_that_the_network_predicts() -> None:
    means, y, noise = regression(outputs=1)
    outputs = torch.cat([means, torch.full_like(means, 2 * math.log(noise))], 2)
    known = adammcmc.score(prediction(means, Likelihood("gaussian", noise), y))
    found = adammcmc.score(prediction(outputs, GaussianNLL(None).likelihood, y))
    assert found == known


def two_draws(n: int = 4000) -> tuple[Tensor, Tensor]:
    """Outputs of a sharp and a wide draw that predict their own noise, and targets from their mixture."""
    g = generator(5)
    mean = torch.randn(2, n, 1, generator=g, dtype=torch.float64)
    deviation = torch.tensor([0.1, 2.0], dtype=torch.float64)[:, None, None].expand_as(mean)
    which = torch.randint(2, (n,), generator=g)
    rows = torch.arange(n)
    y = mean[which, rows] + deviation[which, rows] * torch.randn(n, 1, generator=g, dtype=torch.float64)
    return torch.cat([mean, 2 * deviation.log()], 2), y


@pytest.mark.parametrize("raw", [True, False])
def test_every_draw_has_its_own_noise_in_the_mixture(raw: bool) -> None:
    outputs, y = two_draws()
    given = prediction(outputs, GaussianNLL(None).likelihood, y, raw=raw)
    found = adammcmc.score(given)
    means, deviations = outputs[..., :1], (0.5 * outputs[..., 1:]).exp()
    mixture = torch.distributions.Normal(means, deviations).log_prob(y).sum(2).logsumexp(0) - math.log(2)
    torch.testing.assert_close(given.log_density(), mixture, rtol=1e-12, atol=1e-12)
    assert isinstance(found, ValueScores)
    assert found.nll_mixture is not None
    assert found.nll_mixture.value == pytest.approx(-float(mixture.mean()), abs=1e-12)
    assert found.nll_gaussian is not None
    assert found.nll_gaussian.value > found.nll_mixture.value + 0.3
    both = f"negative log likelihood {found.nll_mixture}, negative log likelihood of a Gaussian {found.nll_gaussian}"
    assert summary_line(given).endswith(both)
    if raw:
        torch.testing.assert_close(given.raw_variances, deviations.square())
        assert all(abs(one.share - one.level) < 4.5 * one.error for one in found.coverage)
        below = torch.distributions.Normal(means, deviations).cdf(y).mean(0)
        inside = ((2 * below - 1).abs() <= 0.5).double().mean()
        assert found.coverage[0].share == pytest.approx(float(inside))
    else:
        assert given.raw_variances is None


def test_other_targets_than_those_of_the_data() -> None:
    outputs, y = two_draws(200)
    likelihood = GaussianNLL(None).likelihood
    whole = adammcmc.score(prediction(outputs, likelihood, y, raw=True))
    assert adammcmc.score(prediction(outputs, likelihood, raw=True), y) == whole
    streamed = prediction(outputs, likelihood, y)
    later = adammcmc.score(streamed, y + 1)
    assert isinstance(later, ValueScores)
    assert later.nll_mixture is None
    assert later.nll_gaussian is not None
    with pytest.raises(ValueError, match="raw=True"):
        streamed.log_density(y + 1)


def test_data_from_outside() -> None:
    g = generator()
    inside = torch.randn(9, 300, 4, generator=g) + 6 * F.one_hot(torch.arange(300) % 4, 4)
    outside = 3 * torch.randn(9, 200, 4, generator=g)
    known, other = (prediction(x, Likelihood("categorical")) for x in (inside, outside))
    found = adammcmc.compare_ood(known, other)
    assert list(found.by) == ["mutual information", "entropy", "spread"]
    assert all(one.auroc.value > 0.8 for one in found.by.values())
    expected = calibration.detection(known.mutual_information, other.mutual_information)
    assert found.by["mutual information"] == expected
    assert "200 examples out of distribution, 300 in distribution" in str(found)
    same = adammcmc.compare_ood(known, known)
    assert same.by["entropy"].auroc.value == pytest.approx(0.5)
    values = [prediction(x, Likelihood("values")) for x in (inside, outside)]
    assert list(adammcmc.compare_ood(*values).by) == ["spread"]
    with pytest.raises(ValueError, match="of one kind, got categorical and values"):
        adammcmc.compare_ood(known, values[1])


# --- what is refused -------------------------------------------------------------------------------------------------------

P, Y = classes(6, 3)
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "no examples": (lambda: calibration.accuracy(P[:0], Y[:0]), "there are no examples"),
    "NaN": (lambda: calibration.nll(P * torch.nan, Y), "a probability is not finite"),
    "logits": (lambda: calibration.brier(4 * P, Y), "are they logits"),
    "sums": (lambda: calibration.brier(P / 2, Y), "must sum to 1"),
    "lengths": (lambda: calibration.accuracy(P, Y[:4]), r"got \(6, 3\) and \(4,\)"),
    "a label too high": (lambda: calibration.accuracy(P, Y + 3), "labels must be 0 to 2, got"),
    "a label that is ignored": (lambda: calibration.accuracy(P, torch.full((6,), -100)), "must be 0 to 2, got -100 to -100"),
    "half a label": (lambda: calibration.nll(P[:, 0], torch.full((6,), 0.5)), "must be 0 to 1, got 0.5 to 0.5"),
    "no bins": (lambda: calibration.ece(P, Y, 0), "`num_bins` must be a positive integer, got 0"),
    "one label only": (lambda: calibration.auroc(P[:, 0], torch.zeros(6)), "examples of both labels"),
    "three labels": (lambda: calibration.average_precision(P[:, 0], torch.arange(6) % 3), "labels must be 0 or 1"),
    "scores with NaN": (lambda: calibration.fpr_at_tpr(torch.tensor([0.1, torch.nan]), torch.tensor([0, 1])), "has a NaN"),
    "tpr": (lambda: calibration.fpr_at_tpr(P[:, 0], Y > 0, 1.5), "`tpr` must lie between 0 and 1, got 1.5"),
    "nothing outside": (lambda: calibration.detection(P[:, 0], P[:0, 0]), r"`outside` must have one number .* \(0,\)"),
    "risk of others": (lambda: calibration.selective_risk(P[:, 0], P[:4, 0]), "6 uncertainties need as many losses, got 4"),
    "no targets": (lambda: adammcmc.score(prediction(P[None], Likelihood("values"))), "there are no targets"),
    "targets of another shape": (
        lambda: adammcmc.score(prediction(P[None], Likelihood("values")), P[:, 0]),
        r"predictions \(6, 3\) need targets of the same shape",
    ),
    "one-hot targets": (lambda: adammcmc.score(prediction(P[None], Likelihood("categorical")), P), "argmax"),
    "labels of one class of two": (
        lambda: adammcmc.score(prediction(P[None], Likelihood("bernoulli")), Y),
        "need labels of the same shape",
    ),
    "a target that is not finite": (
        lambda: adammcmc.score(prediction(P[None], Likelihood("values")), P / 0),
        "a target is not finite",
    ),
    "a level": (lambda: adammcmc.score(prediction(P[None], Likelihood("values")), P, levels=[90]), "`levels` must lie"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_makes_no_sense_is_refused(name: str) -> None:
    call, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(("said", "true", "word"), [(0.01, 0.05, "overconfident"), (0.05, 0.01, "underconfident")])
def test_one_probability_of_two_classes_is_sure_of_either(said: float, true: float, word: str) -> None:
    """Said 1% and 5% come true: 99% was claimed of the other class, and 95% came."""
    n = 20_000
    logits = torch.full((2, n), math.log(said / (1 - said)))
    y = (torch.rand(n, generator=generator()) < true).long()
    assert word in calibration.score(prediction(logits, Likelihood("bernoulli")), y).verdict
