"""A tagger's numbers: scikit-learn's values, errors that cover, and groups by slow loops."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, roc_auc_score, roc_curve
from torch import Tensor

from adammcmc import Likelihood
from adammcmc.jets import KINDS, Jets, bundled, read_jets
from adammcmc.jets.figures import EDGES, draw_others, draw_tagging
from adammcmc.jets.metrics import (
    Measured,
    accuracy,
    as_json,
    at_equal_score,
    auc,
    evaluate,
    groups,
    mean_by_pt,
    read_scores,
    rejection,
    roc,
    write_scores,
)
from adammcmc.posterior.predictive import Prediction

JETS = read_jets(bundled("jets"), max_jets=200)
OTHERS = read_jets(bundled("others"), max_jets=300)


def scored(jets: int = 400, *, ties: bool = True, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores of a middling tagger, and the truth; with ties some hundred jets share each of 21 values."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(jets, generator=generator) < 0.4).long()
    scores = (torch.randn(jets, generator=generator) + 1.2 * labels).sigmoid()
    return (scores * 20).round() / 20 if ties else scores, labels


def prediction(raw: Tensor) -> Prediction:
    """What draws (draws, jets) of the signal's probability say."""
    both = torch.stack([1 - raw, raw], -1)
    columns: dict[Any, Tensor] = {q: both.quantile(q, 0) for q in (0.25, 0.5, 0.75)}
    mean = both.mean(0)
    entropy, expected = -(mean * mean.log()).sum(-1), -(both * both.log()).sum(-1).mean(0)
    again = partial(both.quantile, dim=0)
    variance = both.var(0, correction=0)
    columns |= {"entropy": entropy, "expected_entropy": expected}
    return Prediction(Likelihood("categorical"), len(raw), mean, variance, None, both, None, columns, again)


def predicted(jets: Jets, seed: int = 0) -> Prediction:
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(len(jets), generator=generator) + 1.5 * (jets.kind == 1)
    return prediction((centre + 0.5 * torch.randn(8, len(jets), generator=generator)).sigmoid())


# --- scikit-learn's -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [True, False])
def test_accuracy_and_auc_are_scikit_learns(ties: bool) -> None:
    scores, labels = scored(ties=ties)
    found = accuracy(scores, labels)
    assert found.value == pytest.approx(accuracy_score(labels, scores > 0.5))
    assert found.error == pytest.approx(math.sqrt(found.value * (1 - found.value) / 400))
    assert auc(scores, labels).value == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


@pytest.mark.parametrize("ties", [True, False])
def test_the_curve_is_scikit_learns(ties: bool) -> None:
    scores, labels = scored(ties=ties)
    false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
    signal, background = roc(scores, labels)
    # scikit-learn begins at (0, 0), above all scores
    np.testing.assert_allclose(signal, true[1:], atol=1e-12)
    np.testing.assert_allclose(background, false[1:], atol=1e-12)


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("efficiency", [0.1, 0.3, 0.5, 0.9])
def test_the_rejection_lies_on_scikit_learns_curve(ties: bool, efficiency: float) -> None:
    scores, labels = scored(ties=ties)
    false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
    found = 1 / rejection(scores, labels, efficiency).value
    # the point of the curve whose cut the wanted signal jet sets: the first that reaches it, ties taken together
    wanted = round(efficiency * int(labels.sum())) / int(labels.sum())
    assert found == pytest.approx(false[np.flatnonzero(true >= wanted - 1e-12)[0]], abs=1e-12)


def test_scores_turned_around_give_the_rest_of_the_area() -> None:
    scores, labels = scored()
    a, b = auc(scores, labels), auc(1 - scores, labels)
    assert a.value + b.value == pytest.approx(1)
    assert a.error == pytest.approx(b.error)


def test_a_perfect_tagger_rejects_everything() -> None:
    labels = torch.tensor([0] * 20 + [1] * 20)
    scores = labels.double() * 0.8 + 0.1
    assert accuracy(scores, labels) == (1, 0)
    assert auc(scores, labels) == (1, 0)
    found = rejection(scores, labels, 0.5)
    assert found.value == math.inf
    assert math.isnan(found.error)


# --- errors -----------------------------------------------------------------------------------------------------------


def experiments(number: int, jets: int = 1500) -> list[tuple[Tensor, Tensor]]:
    return [scored(jets, ties=False, seed=seed) for seed in range(1, number + 1)]


def coverage(found: list[Measured], truth: float) -> float:
    return sum(abs(m.value - truth) < m.error for m in found) / len(found)


def test_the_error_of_the_area_is_the_spread_over_experiments() -> None:
    found = [auc(*data) for data in experiments(400)]
    spread = np.std([m.value for m in found])
    assert np.mean([m.error for m in found]) == pytest.approx(spread, rel=0.15)
    truth = 0.5 * (1 + math.erf(1.2 / 2))  # two normal distributions, 1.2 apart
    assert np.mean([m.value for m in found]) == pytest.approx(truth, abs=4 * spread / 20)
    assert coverage(found, truth) == pytest.approx(0.683, abs=0.08)


@pytest.mark.parametrize("efficiency", [0.3, 0.5])
def test_the_error_of_the_rejection_covers(efficiency: float) -> None:
    found = [rejection(*data, efficiency) for data in experiments(300)]
    normal = torch.distributions.Normal(0.0, 1.0)
    cut = 1.2 + normal.icdf(torch.tensor(1 - efficiency, dtype=torch.float64))
    truth = float(1 / (1 - normal.cdf(cut)))
    assert np.median([m.value for m in found]) == pytest.approx(truth, rel=0.03)
    assert coverage(found, truth) == pytest.approx(0.683, abs=0.09)  # 0.027 is the Monte Carlo error, three of them


# --- groups -----------------------------------------------------------------------------------------------------------


def test_groups_are_those_of_a_slow_loop() -> None:
    said = predicted(JETS)
    mean, spread = said.mean[:, 1], said.spread[:, 1]
    members: dict[str, list[int]] = {"top, right": [], "top, wrong": [], "qcd, right": [], "qcd, wrong": []}
    for i, (score, label) in enumerate(zip(mean.tolist(), JETS.kind.tolist(), strict=True)):
        is_right = (score > 0.5) == (label == 1)
        members[f"{'top' if label == 1 else 'qcd'}, {'right' if is_right else 'wrong'}"].append(i)
    found = groups(mean, spread, JETS.kind)
    assert list(found) == list(members)
    for name, rows in members.items():
        assert found[name].jets == len(rows) > 0
        np.testing.assert_allclose(found[name].mean, np.quantile(mean[rows].double(), [0.25, 0.5, 0.75]), atol=1e-7)
        np.testing.assert_allclose(found[name].spread, np.quantile(spread[rows].double(), [0.25, 0.5, 0.75]), atol=1e-7)


def test_a_group_without_jets_has_no_numbers() -> None:
    labels = torch.tensor([0, 1, 1])
    empty = groups(labels * 0.8 + 0.1, torch.zeros(3), labels)["top, wrong"]
    assert empty.jets == 0
    assert all(map(math.isnan, empty.mean + empty.spread))


def test_evaluate_gives_all_numbers_and_says_them() -> None:
    said = predicted(JETS)
    found = evaluate(said, JETS.kind)
    mean = said.mean[:, 1]
    assert found.jets == 200
    assert found.accuracy == accuracy(mean, JETS.kind)
    assert found.auc == auc(mean, JETS.kind)
    assert (found.rejection_30, found.rejection_50) == tuple(rejection(mean, JETS.kind, e) for e in (0.3, 0.5))
    assert found.groups == groups(mean, said.spread[:, 1], JETS.kind)
    text = str(found)
    for word in ("200 jets", f"accuracy {found.accuracy},", f"AUC {found.auc},", "top, right", "qcd, wrong"):
        assert word in text


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        (Measured(0.91234, 0.00123), "0.9123 +- 0.0012"),
        (Measured(812.3, 34.6), "812 +- 35"),
        (Measured(math.inf, math.nan), "inf"),
        (Measured(0.9312, math.nan), "0.9312 (error unknown)"),
        (Measured(0.93124, 0.0041), "0.9312 +- 0.0041"),
        (Measured(2.51, 0.0996), "2.51 +- 0.10"),
        (Measured(0.5, 0.0), "0.5 +- 0"),
    ],
)
def test_numbers_are_said_with_their_error(measured: Measured, text: str) -> None:
    assert str(measured) == text


def test_an_error_is_not_said_to_be_none() -> None:
    """The rejection of a weak tagger: 5.3, give or take 0.4."""
    assert not str(Measured(5.3, 0.4)).endswith("+- 0")


# --- what it does not know ------------------------------------------------------------------------------------------------


def test_mean_by_pt_is_that_of_a_slow_loop() -> None:
    information = predicted(OTHERS).mutual_information
    edges = [400.0, 450.0, *EDGES[1:]]  # nobody in the first range
    found = mean_by_pt(information, OTHERS, edges)
    assert set(found) <= set(KINDS)
    seen = 0
    for kind, name in enumerate(KINDS):
        bins = {(b.low, b.high): b for b in found.get(name, [])}
        for low, high in pairwise(edges):
            values = [
                float(information[i])
                for i in range(len(OTHERS))
                if int(OTHERS.kind[i]) == kind and low <= float(OTHERS.jet[i, 0]) < high
            ]
            if not values:
                assert (low, high) not in bins
                continue
            seen += len(values)
            b = bins[low, high]
            assert b.jets == len(values)
            assert b.mean.value == pytest.approx(np.mean(values))
            if len(values) > 1:
                assert b.mean.error == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)))
            else:
                assert math.isnan(b.mean.error)
    assert seen > 200
    assert all(b.low >= 450 for bins in found.values() for b in bins)


# --- files of scores ------------------------------------------------------------------------------------------------------


def test_scores_are_read_as_they_were_written(tmp_path: Path) -> None:
    jets = Jets(OTHERS.counts, OTHERS.particles, OTHERS.jet, OTHERS.kind.clone())
    jets.kind[3] = -1  # nobody knows
    said = predicted(jets)
    rows, trained = torch.arange(len(jets)) + 7, torch.rand(len(jets))
    write_scores(tmp_path / "scores.csv", jets, said, rows=rows, trained=trained)
    table = read_scores(tmp_path / "scores.csv")
    assert torch.equal(table["kind"], jets.kind)
    expected = {
        "pt": jets.jet[:, 0],
        "eta": jets.jet[:, 1],
        "mass": jets.jet[:, 3],
        "phi": jets.jet[:, 2],
        "row": rows,
        "trained": trained,
        "score": said.mean[:, 1],
        "q25": said.quantile(0.25)[:, 1],
        "q50": said.quantile(0.5)[:, 1],
        "q75": said.quantile(0.75)[:, 1],
        "entropy": said.entropy,
        "mutual_information": said.mutual_information,
    }
    assert table.keys() == {"kind", *expected}
    for name, values in expected.items():
        torch.testing.assert_close(table[name], values.double(), atol=1e-9, rtol=1e-6)


# --- errors that say what is wrong ----------------------------------------------------------------------------------------

SCORES, LABELS = scored(20)


def three_classes() -> Prediction:
    said = predicted(JETS)
    return Prediction(said.likelihood, 8, torch.rand(200, 3), said.variance, None, None, None, {}, said._compute_quantile)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: auc(SCORES, torch.ones(20)), "jets of both classes"),
        (lambda: roc(SCORES, torch.zeros(20)), "jets of both classes"),
        (lambda: accuracy(SCORES, LABELS + 1), r"labels must be 0 \(background\) or 1 \(signal\); select .*of_kind"),
        (lambda: groups(SCORES, SCORES, LABELS - 1), "labels must be 0"),
        (lambda: auc(SCORES / 0, LABELS), "a score is not finite"),
        (lambda: accuracy(SCORES * math.nan, LABELS), "a score is not finite"),
        (lambda: auc(SCORES[:19], LABELS), r"one number per jet, got \(19,\) and \(20,\)"),
        (lambda: auc(SCORES.view(1, 20), LABELS.view(1, 20)), r"one number per jet, got \(1, 20\)"),
        (lambda: rejection(SCORES, LABELS, 0), "`efficiency` must be between 0 and 1, got 0"),
        (lambda: rejection(SCORES, LABELS, 1.0), "`efficiency` must be between 0 and 1, got 1"),
        (lambda: rejection(SCORES, LABELS, math.nan), "`efficiency` must be between 0 and 1, got nan"),
        (lambda: mean_by_pt(torch.zeros(3), JETS, EDGES), "200 jets need as many values, got 3"),
        (lambda: mean_by_pt(torch.zeros(200), JETS, [1, 3, 2]), "two or more increasing numbers"),
        (lambda: mean_by_pt(torch.zeros(200), JETS, [500.0]), "two or more increasing numbers"),
        (lambda: evaluate(three_classes(), JETS.kind), r"two classes, background and signal; .* \(200, 3\)"),
        (lambda: write_scores("x.csv", JETS[:3], predicted(JETS)), "3 jets need as many predictions, got 200"),
    ],
)
def test_wrong_arguments_are_told_what_is_wrong(
    call: Callable[[], Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "a,b,c\n1,2,3\n", "kind,pt\n"])
def test_other_files_are_no_files_of_scores(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=r"a.csv' is not a score file: its first line must be row,kind,pt"):
        read_scores(tmp_path / "a.csv")


def test_a_file_of_scores_that_was_cut_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    write_scores(path, JETS, predicted(JETS))
    text = path.read_text()
    path.write_text(text[: text.rindex(",")])  # the last line has a column less
    with pytest.raises(ValueError, match=r"scores\.csv"):
        read_scores(path)


# --- pictures ---------------------------------------------------------------------------------------------------------


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_figures_are_drawn(tmp_path: Path) -> None:
    draw_tagging(tmp_path / "tagging.png", predicted(JETS), JETS)
    draw_others(tmp_path / "others.png", (JETS, predicted(JETS)), (OTHERS, predicted(OTHERS)))
    assert is_picture(tmp_path / "tagging.png")
    assert is_picture(tmp_path / "others.png")


def test_a_perfect_tagger_can_be_drawn(tmp_path: Path) -> None:
    """Infinite rejections, groups without jets: nothing of it may stop the picture, or warn."""
    raw = (JETS.kind * 0.8 + 0.1).repeat(4, 1) + 0.01 * torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    draw_tagging(tmp_path / "tagging.png", prediction(raw), JETS)
    assert is_picture(tmp_path / "tagging.png")


def test_values_at_equal_score_are_means_over_the_nearest() -> None:
    torch.manual_seed(0)
    scores, values, wanted = torch.rand(400), torch.rand(400), torch.rand(30)
    found = at_equal_score(values, scores, wanted, neighbours=10)
    order = scores.argsort()
    for score, value in zip(wanted, found, strict=True):
        place = int((scores < score).sum())
        first = min(max(place - 5, 0), 390)
        assert float(value) == pytest.approx(float(values[order[first : first + 10]].double().mean()), abs=1e-12)
    assert torch.allclose(at_equal_score(values, scores, wanted, neighbours=1000), values.double().mean())


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    numbers = evaluate(predicted(JETS), JETS.kind)
    endless = replace(numbers, rejection_30=Measured(float("inf"), float("nan")))
    written = json.loads(as_json(endless), parse_constant=pytest.fail)
    assert written["rejection_30"] == {"value": None, "error": None}
    assert written["auc"] == {"value": numbers.auc.value, "error": numbers.auc.error}
