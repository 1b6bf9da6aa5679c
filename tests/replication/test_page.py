"""What the page of the replication says is what the kept results hold."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest

from replication.results import FIGURES, figure_module, read_result
from replication.rows import VERSIONS
from replication.sections import agreement

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "replication.md").read_text()


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = read_result(ROOT / "replication" / "results" / "h200" / f"{name}.json")["result"]
    return found


def _row(name: str, part: str, **wanted: Any) -> dict[str, Any]:
    found = [r for r in _result(name)[part] if all(r["setting"][key] == value for key, value in wanted.items())]
    assert len(found) == 1, (name, part, wanted)
    return dict(found[0])


def _said(value: list[float], digits: int) -> str:
    return f"{value[0]:.{digits}f} ± {value[1]:.{digits}f}"


def test_the_page_of_all_numbers_is_made_of_the_results() -> None:
    """If this fails: python docs/replication_tables.py"""
    tables = runpy.run_path(str(ROOT / "docs" / "replication_tables.py"))
    assert tables["PAGE"].read_text() == tables["page"]()
    assert all((tables["PICTURES"] / f"{name}.png").exists() for name in FIGURES)


PRINTED = {"batch sum": {"method": "printed", "scale": "batch_sum"}, "data sum": {"method": "printed", "scale": "data_sum"}}
RELEASED = {"method": "released"}


def test_exact_chains() -> None:
    for lam in (0.01, 0.1, 1.0):
        row = _row("lambda", "exact", lam=lam)
        assert _said(row["mean_spread"], 3) in PAGE
        assert f"{row['rhat']:.2f}" in PAGE
        assert row["rhat"] > 1.05, "not converged, as the page says"
    for target in (0.6, 0.85, 0.95):
        assert _said(_row("fig3", "exact", target_acceptance=target)["mean_spread"], 3) in PAGE


def _cells(first: str) -> list[str]:
    """Of the one row of a table of the page that begins so."""
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("| ").split("|")]


CALIBRATION = {
    "ten points of Adam's path": ("yardsticks", {"method": "snapshots"}),
    "deep ensemble, 5 of 320 steps": ("yardsticks", {"method": "ensemble", "steps": 320}),
    "deep ensemble, 5 of 1,200 steps": ("yardsticks", {"method": "ensemble", "steps": 1200}),
    "as released, sigma 0.2": ("scan", {**RELEASED, "sigma": 0.2}),
    "as printed, data sum, sigma 0.2": ("scan", {**PRINTED["data sum"], "sigma": 0.2}),
    "Adam, long": ("epochs yardsticks", {"method": "adam"}),
    "ten points of Adam's path, long": ("epochs yardsticks", {"method": "snapshots"}),
    "deep ensemble, 5 of 1,040 steps": ("epochs yardsticks", {"method": "ensemble", "steps": 1040}),
    "deep ensemble, 5 of 3,900 steps": ("epochs yardsticks", {"method": "ensemble", "steps": 3900}),
    "as released, sigma 0.2, long": ("epochs scan", {**RELEASED, "sigma": 0.2}),
    "as released, sigma 2, long": ("epochs scan", {**RELEASED, "sigma": 2.0}),
    "as printed, batch sum, sigma 2, long": ("epochs scan", {**PRINTED["batch sum"], "sigma": 2.0}),
    "as printed, data sum, sigma 4, long": ("epochs scan", {**PRINTED["data sum"], "sigma": 4.0}),
}


@pytest.mark.parametrize("name", CALIBRATION)
def test_the_table_of_calibration(name: str) -> None:
    part, wanted = CALIBRATION[name]
    figure, _, part = part.rpartition(" ")
    row = _row(figure or "fig3", part, **wanted)
    coverage = "–" if row["coverage"] is None else _said(row["coverage"], 2)
    numbers = [f"{row['accuracy'][0]:.3f}", _said(row["nll"], 3), _said(row["ece"], 3), coverage]
    assert _cells(name)[1:5] == numbers


def test_the_table_of_spreads() -> None:
    for name, setting in {"as released": RELEASED, **{f"as printed, {k}": v for k, v in PRINTED.items()}}.items():
        narrow, wide = (_row("fig3", "scan", sigma=sigma, **setting)["mean_spread"] for sigma in (0.2, 10.0))
        [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {name} | 0.")]
        cells = [cell.strip(" *") for cell in line.split("|")]
        assert cells[2] == f"{_said(narrow, 3)} to {_said(wide, 3)}"
        assert cells[3] == _ratio(wide, narrow)
        narrow, wide = (_row("epochs", "scan", sigma=sigma, **setting)["mean_spread"] for sigma in (0.2, 10.0))
        assert cells[4] == _ratio(wide, narrow)


def _ratio(a: list[float], b: list[float], digits: int = 1) -> str:
    ratio = a[0] / b[0]
    return f"{ratio:.{digits}f} ± {ratio * math.hypot(a[1] / a[0], b[1] / b[0]):.{digits}f}"


def test_tests_of_figure_4() -> None:
    for row in _result("fig4")["tests"]:
        name = {"sequential": "Sequential(0.05)", "confidence": "Confidence(0.1)", "full": "FullData"}.get(
            row["setting"]["test"], row["setting"]["test"].capitalize()
        )
        cells = _cells(f"`{name}`")
        assert cells[1] == _said(row["acceptance"], 3 if name == "Penalty" else 2)
        assert cells[2] == f"{row['examples'][0] / row['setting']['num_jets']:.0%}"
    assert _said(_row("fig4", "tests", test="minibatch")["beta_eff"], 3) in _cells("`Minibatch`")[4]


def test_figure_1() -> None:
    rows = _result("fig1")["rows"]
    section = PAGE[PAGE.index("## Optimisation") : PAGE.index("## The theorems")]
    for name in ("adam", "released, sigma 0.2", "printed, batch sum, sigma 0.2", "released, sigma 2.0", "sgd", "sghmc"):
        assert _said(rows[name]["final_loss"], 3) in section, name
    for name in ("adam", "released, sigma 2.0", "printed, batch sum, sigma 2.0"):
        assert _said(rows[name]["last_accuracy"], 3) in section, name
    assert f"{rows['adam']['best_accuracy'][0]:.3f}" in section


def test_spreads_of_100_epochs() -> None:
    narrow, middle = (_row("epochs", "scan", sigma=sigma, **RELEASED)["mean_spread"] for sigma in (0.2, 2.0))
    assert _ratio(middle, narrow, 2) in PAGE


def test_the_first_table() -> None:
    rows = _result("fig1")["rows"]
    lost = {name: row["best_accuracy"][0] - row["last_accuracy"][0] for name, row in rows.items()}
    [first] = [line for line in PAGE.splitlines() if line.startswith("| Fig. 1: Adam and sigma = 0.2 overfit")]
    for name in ("adam", "released, sigma 0.2", "released, sigma 2.0", "printed, batch sum, sigma 2.0"):
        assert f"{lost[name]:.3f}" in first
    lines = figure_module("epochs").lines(_result("epochs"))
    counts = [agreement(lines, name) for name in VERSIONS]
    released, batch, data = (same for same, _, _ in counts)
    assert f"({batch} of {counts[0][1]}; as released {released}, data sum {data})" in PAGE
    for test, said in (("full", "0.040 ± 0.017"), ("minibatch", "0.158 ± 0.029")):
        assert _said(_result("fig4")["rows"][f"printed, batch sum | after burn-in | {test}"]["acceptance"], 3) == said
        assert said in PAGE


def test_without_noise_along_the_step() -> None:
    for sigma in (4.0, 10.0):
        row = _row("fig2b", "without, after Adam", sigma=sigma, **PRINTED["data sum"])
        assert _said(row["acceptance"], 3) in PAGE
    for start, part in (("41 times", "without"), ("21 times", "without, after Adam")):
        row = _row("fig2b", part, sigma=2.0, **RELEASED)
        assert start.split()[0] == f"{row['kappa'][0]:.0f}"
    errors = [1 - _row("fig2b", "with", sigma=sigma, **RELEASED)["accuracy"][0] for sigma in (0.2, 2.0, 4.0, 6.0, 10.0)]
    said = [f"{error:.3f}" for error in errors]
    assert f"{', '.join(said[:-1])} and {said[-1]}" in PAGE


def test_mutual_information_of_100_epochs() -> None:
    values = [_row("ood", "long", sigma=sigma, **RELEASED)["information"]["top"][0] for sigma in (0.01, 0.2, 0.5)]
    said = [f"{value:.3f}" for value in values]
    assert f"{', '.join(said[:-1])} and {said[-1]}" in PAGE


def test_the_headline() -> None:
    rows = _result("headline")["rows"]
    truth = {row["lam"]: row["mean_spread"][0] for row in _result("headline")["truth"]}
    first_cells = {
        "released": "as released: mean loss, no prior (a different target than the truth's)",
        "printed, data sum": "as printed (C = 1)",
        "exact, underdamped": "exact: underdamped",
    }
    for name, first in first_cells.items():
        widths = [row for row in rows[name] if row["lam"] == 1.0]
        said = [f"{r['mean_spread'][0] / truth[1.0]:.2f}" + ("" if r["is_converged"] else " (n)") for r in widths]
        assert _cells(first)[1] == ", ".join(said[: len(_cells(first)[1].split(","))])
    exact = [row for name in rows if name.startswith("exact") for row in rows[name] if row["is_converged"]]
    assert f"{len(exact)} of {len(exact)}" in PAGE


def test_the_theorems() -> None:
    curves = _result("theorems")["curves"]
    for curve in curves:
        if curve["chain"] != "exact":
            assert f"{curve['tv'][-1]:.3f}" in PAGE
