"""Figures and sections are made of numbers: invented ones here, with a known answer, at the number of points of a full
run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from adammcmc.jets import Jets
from replication import drawing, epochs, fig1, fig2a, fig2b, fig3, fig4, ood, published, temperature
from replication.measures import judge, rounded
from replication.rows import VERSIONS
from replication.sections import Line, name_of, of_test_jets, shown, table, verdict
from replication.sets import JetSets, read_sets
from replication.settings import PRESETS, Preset
from replication.trials import Trial

FIGURES: dict[str, tuple[ModuleType, int]] = {
    "fig1": (fig1, 3), "fig2a": (fig2a, 8), "fig2b": (fig2b, 6), "fig3": (fig3, 16), "epochs": (epochs, 8),
    "fig4": (fig4, 6), "ood": (ood, 8),
    "temperature": (temperature, 3),
}  # fmt: skip
"""With the number of axes."""


class Invented:
    """A work whose records are invented: acceptances as published for Algorithm 1 on the batch sum, far off for the
    others."""

    def __init__(self) -> None:
        self.preset = replace(PRESETS["smoke"], thin=1, seeds=2, anchors=True, exact_chains=3)  # (the points of h200)
        self.jets: JetSets = read_sets(PRESETS["smoke"])

    def records(self, trials: Sequence[Trial]) -> list[dict[str, Any]]:
        return [self.record(trial) for trial in trials]

    def record(self, trial: Trial) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(trial.seed)
        centre = self.jets.test.kind * 4.0 - 2
        others = torch.zeros(len(self.jets.others))
        number = 1 if trial.method in ("adam", "sgd") else 8
        draws, elsewhere = (
            torch.sigmoid(
                at + torch.randn(len(at), generator=generator) + 0.3 * torch.randn(number, len(at), generator=generator)
            )
            for at in (centre, others)
        )
        found: dict[str, Any] = {
            "trial": asdict(trial),
            "loss": {"every": 1, "values": [0.7, 0.4, 0.3, 0.2 + 0.001 * trial.seed]},
            "accuracy": {"steps": [1, 2, 3], "values": [0.5, 0.9 + 0.001 * trial.seed, 0.8]},
            "draws": judge(draws, elsewhere, self.jets.test, self.jets.others),
            "seconds": 1.0,
        }
        if trial.method in ("released", "printed", "exact"):
            accepted = published.FIG2B_ACCEPTANCE["with" if trial.sigma_delta else "without"].get(trial.sigma, 0.3)
            shift = 0.001 * trial.seed if trial.scale == "batch_sum" else 0.15
            found |= {
                "acceptance": accepted + shift,
                "kappa": 0.5,
                "verdict": "something is wrong",
                "is_healthy": trial.seed == 0,
            }
        rounding: dict[str, Any] = rounded(found)
        return rounding


@pytest.fixture(scope="module")
def work() -> Invented:
    return Invented()


@pytest.fixture(scope="module")
def results(work: Invented) -> dict[str, dict[str, Any]]:
    made = {name: rounded(figure.run(work.preset, work)) for name, (figure, _) in FIGURES.items()}
    return {name: json.loads(json.dumps(result, allow_nan=False)) for name, result in made.items()}


@pytest.mark.parametrize("name", FIGURES)
def test_a_result_is_a_small_file(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert len(json.dumps(results[name])) < 300_000


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_from_json(name: str, results: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    module, num_axes = FIGURES[name]
    figure = module.draw(results[name])
    assert len(figure.axes) == num_axes
    assert all(axes.has_data() for axes in figure.axes)
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 20_000
    if name not in ("fig4", "fig1", "temperature", "epochs"):
        crosses = [
            line for axes in figure.axes for line in axes.lines if line.get_marker() == "x" and line.get_color() == "black"
        ]
        assert crosses


@pytest.mark.parametrize("name", FIGURES)
def test_a_section_is_a_table_and_sentences_without_gaps(name: str, results: dict[str, dict[str, Any]]) -> None:
    text = FIGURES[name][0].section(results[name])
    assert "None" not in text
    assert "nan" not in text
    assert text.splitlines()[0].startswith("|  | published |")
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1, rows[:3]
    assert "something is wrong" in text  # the verdict of a sampler
    for version in {name_of(row) for row in _rows(results[name])} & set(VERSIONS):
        assert f"- {drawing.LABELS[version]}: " in text


def _rows(result: Any) -> list[dict[str, Any]]:
    if isinstance(result, dict):
        return [result] if "verdicts" in result else [row for value in result.values() for row in _rows(value)]
    return [row for value in result for row in _rows(value)] if isinstance(result, list) else []


def test_who_has_the_published_acceptance_is_found(results: dict[str, dict[str, Any]]) -> None:
    text = fig2b.section(results["fig2b"])
    lines = [line for line in text.splitlines() if line.startswith("| acceptance")]
    assert len(lines) == 2 * len(fig2b.SIGMAS) + len(fig2b.LATE_SIGMAS)
    for line in lines:
        assert line.endswith("| same: as printed, batch sum |"), line


def test_half_of_the_chains_were_healthy(results: dict[str, dict[str, Any]]) -> None:
    chains = 2 * (len(fig2b.SIGMAS) + len(fig2b.LATE_SIGMAS))
    assert f"as released: {chains // 2} of {chains} chains healthy" in fig2b.section(results["fig2b"])


@pytest.mark.parametrize(
    ("ours", "published_value", "read_to", "seeds", "test_error", "expected"),
    [
        ([0.50, 0.01], 0.543, 0.0, 3, 0.0, True),  # 4.303 errors
        ([0.50, 0.01], 0.5431, 0.0, 3, 0.0, False),
        ([0.50, 0.01], 0.5277, 0.0, 5, 0.0, True),  # 2.776
        ([0.50, 0.01], 0.5278, 0.0, 5, 0.0, False),
        ([0.50, 0.003], 0.515, 0.0, 3, 0.004, True),  # with twice the test jets': 0.01518
        ([0.50, 0.003], 0.5153, 0.0, 3, 0.004, False),
        ([0.50, 0.001], 0.52, 0.02, 3, 0.0, True),  # as near as it can be read
        ([0.50, 0.001], 0.521, 0.02, 3, 0.0, False),
        ([0.50, None], 0.51, 0.02, 1, 0.0, True),  # of one seed the reading counts, and the test jets
        ([0.50, None], 0.51, 0.0, 1, 0.0, False),
        ([0.50, None], 0.51, 0.0, 1, 0.005, True),
        (None, 0.5, 1.0, 3, 0.0, False),
    ],
)
def test_the_rule(ours: Any, published_value: float, read_to: float, seeds: int, test_error: float, expected: bool) -> None:
    for error in (test_error, {"released": test_error, "exact": 9.0}):
        line = Line("", published_value, {"released": ours}, read_to, seeds=seeds, test_error=error)
        assert line.is_same("released") is expected
    assert of_test_jets(0.936, [{"num_test": 6000}, {"num_test": 9000}]) == pytest.approx(0.00316, abs=1e-5)


def test_students_interval_holds_nineteen_times_of_twenty() -> None:
    """Of means over so many normal numbers: by simulation."""
    for seeds in (2, 3, 5, 10):
        numbers = torch.randn(20_000, seeds, generator=torch.Generator().manual_seed(seeds), dtype=torch.float64)
        mean, error = numbers.mean(1), numbers.std(1) / seeds**0.5
        line = Line("", 0.0, {"x": [0.0, 1.0]}, seeds=seeds)
        assert float((mean.abs() <= line.half_width("x") * error).double().mean()) == pytest.approx(0.95, abs=0.006)


@pytest.mark.parametrize("name", ["fig1", "fig2a", "fig2b", "fig3", "fig4", "ood"])
def test_the_interval_is_that_of_as_many_seeds_as_were_run(name: str, results: dict[str, dict[str, Any]]) -> None:
    for line in FIGURES[name][0].lines(results[name]):
        for sampler, value in line.ours.items():
            if value is not None and value[1]:
                seeds = 5 if name == "fig1" else 3 if sampler == "exact" else 2
                alone = replace(line, test_error=0.0)
                wanted = {2: 12.706, 3: 4.303, 5: 2.776}[seeds]
                assert alone.half_width(sampler) == pytest.approx(wanted * value[1]), line.what


def test_verdicts_in_words() -> None:
    columns = ("released", "printed, batch sum")
    near, far = [0.5, 0.001], [0.7, 0.001]
    assert verdict(Line("", 0.5, {"released": near, "printed, batch sum": near}), columns) == "same"
    assert verdict(Line("", 0.5, {"released": far, "printed, batch sum": near}), columns) == "same: as printed, batch sum"
    assert verdict(Line("", 0.5, {"released": far}), columns) == "differs"
    vague = [0.6, 0.2]  # in an interval of more than half of what is published
    assert verdict(Line("", 0.5, {"released": vague}), columns) == "cannot tell"
    assert verdict(Line("", 0.5, {"released": [0.6, 0.059]}), columns) == "cannot tell"  # 0.254 on either side
    assert verdict(Line("", 0.5, {"released": [0.6, 0.058]}), columns) == "same"  # 0.2496
    assert verdict(Line("", 0.5, {"released": vague, "printed, batch sum": far}), columns) == (
        "differs (cannot tell: as released)"
    )
    assert verdict(Line("", 0.5, {"released": vague, "printed, batch sum": near}), columns) == (
        "same: as printed, batch sum (cannot tell: as released)"
    )
    assert verdict(Line("", 0.5, {"released": [0.5, 0.2]}, 0.02), columns) == "cannot tell"  # near, but by chance
    assert verdict(Line("", 0.02, {"released": [0.02, 0.003]}, 0.02), columns) == "same"  # it could not be read better
    assert verdict(Line("", 0.05, {"released": [0.7, 0.02]}), columns) == "differs"
    assert verdict(Line("", "in words", {"released": near}), columns) == "–"
    assert verdict(Line("", 0.5, {"released": None}), columns) == "–"
    rows = table([Line("what", 0.5, {"released": near})], columns).splitlines()
    assert rows[-1] == "| what | 0.500 | 0.500 ± 0.001 | – | same |"
    assert shown([0.12345, None], 2) == "0.12"


class Asked(Invented):
    """Notes what it is asked for; numbers are those of one trial of each method, but the accuracy: 0.9 at a rate of
    0.01."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.preset = preset
        self.asked: list[Trial] = []
        self._made: dict[str, dict[str, Any]] = {}

    def record(self, trial: Trial) -> dict[str, Any]:
        self.asked.append(trial)
        if trial.method not in self._made:
            self._made[trial.method] = super().record(trial)
        last = 0.9 if trial.lr == 0.01 else 0.8
        accuracy = {"steps": [1, 2], "values": [0.95, last]}
        return {**self._made[trial.method], "trial": asdict(trial), "accuracy": accuracy}


@pytest.fixture(scope="module")
def asked() -> dict[str, list[Trial]]:
    """The trials of each figure at the size of h200."""
    found = {}
    for name, (figure, _) in FIGURES.items():
        work = Asked(PRESETS["h200"])
        figure.run(work.preset, work)
        found[name] = work.asked
    return found


LONG = {"steps": 3900, "burn_in": 1950}


def _of(trials: Sequence[Trial], **settings: Any) -> list[Trial]:
    return [trial for trial in trials if all(getattr(trial, key) == value for key, value in settings.items())]


def test_figure_1_asks_for_100_epochs_at_the_best_rates(asked: dict[str, list[Trial]]) -> None:
    longer = _of(asked["fig1"], **LONG, looks=20, network="lite")
    assert {trial.burn_in for trial in _of(asked["fig1"], steps=3900)} == {1950}
    for method, rate in (("adam", 3e-4), ("sgd", 1e-2), ("sghmc", 1e-2)):  # (all of Adam's are alike: the first)
        assert [(trial.lr, trial.seed) for trial in _of(longer, method=method)] == [(rate, seed) for seed in range(5)]
        assert [trial.lr for trial in _of(asked["fig1"], method=method, steps=1200, looks=20)] == list(fig1.GRIDS[method])
    assert {(t.method, t.scale, t.sigma) for t in longer if t.method in ("released", "printed")} == {
        ("released", "mean", 0.2), ("released", "mean", 2.0), ("printed", "batch_sum", 0.2), ("printed", "batch_sum", 2.0),
    }  # fmt: skip
    assert len(longer) == 5 * 7
    anchors = _of(asked["fig1"], network="particlenet", **LONG)
    assert [(trial.method, trial.scale) for trial in anchors] == [
        ("released", "mean"), ("printed", "batch_sum"), ("printed", "data_sum"), ("snapshots", "batch_sum"),
    ]  # fmt: skip


def test_chains_without_noise_along_the_step_also_start_from_trained_weights(asked: dict[str, list[Trial]]) -> None:
    late = _of(asked["fig2b"], start=600, network="lite")
    assert len(late) == 3 * len(VERSIONS) * len(fig2b.LATE_SIGMAS)
    assert {trial.sigma_delta for trial in late} == {0.0}
    assert {trial.sigma for trial in late} == set(fig2b.LATE_SIGMAS)
    assert {trial.start for trial in asked["fig2b"]} == {0, 600}


def test_scans_of_both_lengths_have_their_yardsticks(asked: dict[str, list[Trial]]) -> None:
    for name, steps in (("fig3", 1200), ("epochs", 3900)):
        lite = _of(asked[name], network="lite", seed=0)
        own = _of(lite, steps=steps, burn_in=steps // 2)
        assert [(t.method, t.num_draws) for t in own if t.method not in ("released", "printed")] == [
            ("adam", 10), ("snapshots", 10), ("dropout", 10), ("ensemble", 5),
        ]  # fmt: skip
        assert _of(lite, method="ensemble", steps=steps * 4 // 15, num_draws=5), "at the compute of a chain: 4/3 over 5"
    assert len(_of(lite, **LONG)) == 4 + len(VERSIONS) * len(epochs.SIGMAS)
    shared = _of(asked["fig1"], method="released", seed=0, network="lite", **LONG)
    assert set(shared) <= set(lite), "figures share their trials"


def test_figure_4_asks_for_both_starts_on_the_papers_network(asked: dict[str, list[Trial]]) -> None:
    anchors = _of(asked["fig4"], network="particlenet")
    assert [(t.start, t.test) for t in anchors] == [(5, "minibatch"), (5, "full"), (300, "minibatch"), (300, "full")]
    assert {trial.in_training_mode for trial in anchors} == {False}


def test_jets_from_elsewhere_are_also_scored_by_chains_of_100_epochs(asked: dict[str, list[Trial]]) -> None:
    longer = _of(asked["ood"], **LONG)
    assert len(longer) == 3 * 2 * len(ood.LONG_SIGMAS)
    assert {trial.scale for trial in longer} == {"mean", "batch_sum"}
    shared = [t for t in asked["fig1"] if t in longer]
    assert len(shared) == 3 * 4, "both versions at both sigmas of Figure 1"


@pytest.mark.parametrize(("name", "num_axes"), [("epochs", 8), ("ood", 8)])
def test_presets_without_long_runs(name: str, num_axes: int) -> None:
    assert [PRESETS[preset].long_steps for preset in ("small", "paper")] == [0, 0]
    assert PRESETS["small"].long == {"steps": 240, "burn_in": 120}
    work = Asked(replace(PRESETS["smoke"], thin=1, long_steps=0))
    result = json.loads(json.dumps(rounded(FIGURES[name][0].run(work.preset, work))))
    if name == "epochs":  # then all runs are as long as the paper's: those of Figure 3
        shorter = Asked(work.preset)
        fig3.run(shorter.preset, shorter)
        assert set(work.asked) <= set(shorter.asked)
    else:
        assert result["long"] == []
    assert {trial.steps for trial in work.asked if trial.method in ("released", "printed")} == {8}
    assert len(FIGURES[name][0].draw(result).axes) == num_axes
    assert FIGURES[name][0].section(result)


@pytest.mark.parametrize("kinds", [("w", "quark"), ()])
def test_there_may_be_no_tops_elsewhere(kinds: tuple[str, ...]) -> None:
    work = Asked(PRESETS["smoke"])
    work.jets = JetSets(work.jets.train, work.jets.test, work.jets.others.of_kind(*kinds) if kinds else Jets.empty())
    result = json.loads(json.dumps(rounded(ood.run(work.preset, work))))
    text = ood.section(result)
    assert "training tops, sigma 0.2" in text or not kinds
    assert "elsewhere, sigma 0.2" not in text
    assert "None" not in text
    assert len(ood.draw(result).axes) == 8


def test_every_sampler_has_a_colour_and_a_name() -> None:
    assert set(drawing.COLOURS) == set(drawing.LABELS)
    assert len(set(drawing.COLOURS.values())) == len(drawing.COLOURS)
    assert set(VERSIONS) < set(drawing.COLOURS)
    assert set(drawing.MARKERS) < set(drawing.COLOURS)


def test_2_phi_of_minus_kappa() -> None:
    normal = torch.distributions.Normal(torch.zeros(()), torch.ones(()))
    for kappa in (0.0, 0.5, 2.0):
        assert fig2a.flat_acceptance(kappa) == pytest.approx(float(2 * normal.cdf(torch.tensor(-kappa))), abs=1e-6)


def test_published_points_are_points_of_the_scans() -> None:
    """Of each published curve at least five points are run, or as many as there are."""
    preset: Preset = PRESETS["h200"]
    assert len(set(preset.points(fig2b.SIGMAS)) & set(published.FIG2B_ACCEPTANCE["with"])) >= 5
    assert len(set(fig2a.SIGMA_DELTAS) & set(published.FIG2A_DELTA_ACCEPTANCE[0.2])) >= 5
    assert set(fig2a.ONE_MINUS_BETAS) == set(published.FIG2A_BETA_ACCEPTANCE[2.0])
    assert len(set(ood.SIGMAS) & set(published.OOD_BY_SIGMA["training tops"])) >= 4
    assert all(set(curve) >= {1.0} for curve in published.FIG3_SPREAD.values())
