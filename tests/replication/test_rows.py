"""From scores to records to rows: small numbers that can be counted by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from adammcmc.jets.data import KINDS
from adammcmc.posterior import uncertainty
from replication import fig1, quality
from replication.measures import PT_EDGES, judge, rounded
from replication.rows import bands, lean, row
from replication.sets import JetSets, read_sets
from replication.settings import PRESETS
from replication.trials import Trial


@pytest.fixture(scope="module")
def jets() -> JetSets:
    return read_sets(PRESETS["smoke"])


def record(jets: JetSets, seed: int, **options: Any) -> dict[str, Any]:
    """With random scores of the test jets."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(4, len(jets.test), generator=generator)
    others = torch.rand(4, len(jets.others), generator=generator)
    found = {
        "trial": {**vars(Trial("printed")), "seed": seed},
        "loss": {"every": 1, "values": [0.5, 0.3]},
        "accuracy": {"steps": [1, 2, 3], "values": [0.5, 0.9, 0.8]},
        "draws": judge(scores, others, jets.test, jets.others),
        **options,
    }
    made: dict[str, Any] = rounded(found)
    return made


def test_the_jets_to_score_on_are_not_those_of_the_training(jets: JetSets) -> None:
    preset = PRESETS["smoke"]
    assert (len(jets.train), len(jets.test)) == (preset.num_train, preset.num_test)
    assert not {tuple(jet) for jet in jets.train.jet.tolist()} & {tuple(jet) for jet in jets.test.jet.tolist()}
    assert {int((jets.others.kind == number).sum()) for number in range(len(KINDS))} == {preset.num_others}


def test_information_and_spread_by_pt(jets: JetSets) -> None:
    scores = torch.rand(5, len(jets.others), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    test = torch.rand(5, len(jets.test), generator=torch.Generator().manual_seed(1))
    found = judge(test, scores, jets.test, jets.others)
    values = {"by_pt": uncertainty.mutual_information(scores, is_binary=True), "spread_by_pt": uncertainty.spread(scores)}
    for title, wanted in values.items():
        bins = [(kind, *b) for kind, own in found[title].items() for b in own]
        assert len(bins) > len(KINDS)
        assert sum(number for _, _, _, number, _, _ in bins) == len(jets.others)
        for kind, low, high, number, value, _ in bins:
            assert (low, high) in pairwise(PT_EDGES)
            pt = jets.others.jet[:, 0]
            inside = (jets.others.kind == KINDS.index(kind)) & (pt >= low) & (pt < high)
            assert int(inside.sum()) == number
            assert value == pytest.approx(float(wanted[inside].mean()))
    assert found["num_test"] == len(jets.test)


def test_a_reliability_curve_is_that_of_all_seeds_by_their_jets(jets: JetSets) -> None:
    first, second = record(jets, 0), record(jets, 1)
    first["draws"]["reliability"] = {"confidence": [0.1, None, None], "accuracy": [0.2, None, None], "count": [3, 0, 0]}
    second["draws"]["reliability"] = {"confidence": [0.3, 0.5, None], "accuracy": [0.6, 0.4, None], "count": [1, 2, 0]}
    found = row([first, second])["reliability"]
    assert found["confidence"] == pytest.approx([0.15, 0.5])
    assert found["accuracy"] == pytest.approx([0.3, 0.4])
    assert found["count"] == [2, 1]


def test_a_group_has_its_median_and_the_error_of_its_jets(jets: JetSets) -> None:
    first, second = record(jets, 0), record(jets, 1)
    first["draws"]["groups"]["top, wrong"] = {"jets": 16, "mean": [0.1, 0.2, 0.37], "spread": [0.0, 0.1, 0.1349]}
    second["draws"]["groups"]["top, wrong"] = {"jets": 0, "mean": [None] * 3, "spread": [None] * 3}
    alone = row([first])["groups"]["top, wrong"]
    assert (alone["jets"], alone["mean"][0], alone["spread"][0]) == (16, 0.2, 0.1)
    assert alone["spread, test error"] == pytest.approx(0.1 * 1.2533 / 4)
    assert alone["mean, test error"] == pytest.approx(0.27 / 1.349 * 1.2533 / 4)
    both = row([first, second])["groups"]["top, wrong"]
    assert (both["jets"], both["mean"][0], both["spread"][0]) == (8, 0.2, 0.1)
    normal = torch.randn(400, 225, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = [{"jets": 225, "mean": normal[0].quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()}]
    first["draws"]["groups"]["top, wrong"] |= found[0]
    said = row([first])["groups"]["top, wrong"]["mean, test error"]
    assert said == pytest.approx(float(normal.quantile(0.5, dim=1).std()), rel=0.2), "medians of normal numbers scatter so"


def test_what_a_row_says_of_the_way(jets: JetSets) -> None:
    other = record(jets, 1, accuracy={"steps": [1, 2, 3], "values": [0.7, 0.6, 0.6]})
    found = row([record(jets, 0), other])
    assert found["best_accuracy"][0] == pytest.approx(0.8)
    assert found["last_accuracy"][0] == pytest.approx(0.7)
    assert found["num_test"] == len(jets.test)
    assert found["seeds"] == 2
    without = row([record(jets, 0, accuracy={"steps": [], "values": []})])
    assert (without["best_accuracy"], without["last_accuracy"]) == (None, None)
    assert lean([found], "groups")[0].keys() == found.keys() - {"reliability", "information", "others", "by_pt", "spread_by_pt"}


def test_losses_that_are_not_finite_are_left_out(jets: JetSets) -> None:
    """In a record they are None."""
    whole = record(jets, 0, loss={"every": 5, "values": [0.7, 0.5, 0.3, 0.1]})
    torn = record(jets, 1, loss={"every": 5, "values": [math.inf, 0.9, 0.5, math.nan]})
    assert row([whole, torn])["final_loss"][0] == pytest.approx(0.1)
    assert row([torn])["final_loss"] is None
    found = bands([whole, torn])["loss"]
    assert found["steps"] == [5, 10, 15, 20]
    assert found["low"] == [0.7, 0.5, 0.3, 0.1]
    assert found["mean"] == pytest.approx([0.7, 0.7, 0.4, 0.1])
    assert found["high"] == [0.7, 0.9, 0.5, 0.1]
    assert bands([torn])["loss"]["mean"] == [None, 0.9, 0.5, None]
    assert fig1._smooth([1.0, 2.0, 4.0, None, 3.0], 2) == [1.5, 3.0, None, None]


def test_the_loss_after_500_steps() -> None:
    steps = list(range(10, 1010, 10))
    near = [step**2 for step in range(450, 560, 10)]
    assert fig1._early({"steps": steps, "mean": [float(step**2) for step in steps]}) == [sum(near) / 11, None]
    assert fig1._early({"steps": [10, 300], "mean": [1.0, 2.0]}) is None
    assert fig1._early({"steps": [490, 510], "mean": [1.0, None]}) == [1.0, None]


def test_of_two_ensembles_the_cheaper_one_is_a_level() -> None:
    trials = quality.yardsticks(PRESETS["h200"])
    found = quality._single([{"setting": vars(trial)} for trial in trials])
    assert [(r["setting"]["method"], r["setting"]["steps"]) for r in found] == [
        ("adam", 1200), ("snapshots", 1200), ("dropout", 1200), ("ensemble", 320),
    ]  # fmt: skip
