"""What the page of the replication says is what the kept results hold."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from adammcmc.replication.results import FIGURES, read_result

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


@pytest.mark.parametrize("setting", [RELEASED, *PRINTED.values()], ids=["released", *PRINTED])
def test_spreads(setting: dict[str, Any]) -> None:
    for sigma in (0.2, 10.0):
        assert _said(_row("fig3", "scan", sigma=sigma, **setting)["mean_spread"], 3) in PAGE
    largest = _row("lambda", "scan", lam=1e3, **setting)["mean_spread"]
    assert _said(largest, 3) in PAGE


def test_exact_chains() -> None:
    for lam in (0.01, 0.1, 1.0):
        row = _row("lambda", "exact", lam=lam)
        assert _said(row["mean_spread"], 3) in PAGE
        assert f"{row['rhat']:.2f}" in PAGE
        assert row["rhat"] > 1.05, "not converged, as the page says"
    for target in (0.6, 0.85, 0.95):
        assert _said(_row("fig3", "exact", target_acceptance=target)["mean_spread"], 3) in PAGE


@pytest.mark.parametrize(("part", "wanted"), [
    ("yardsticks", {"method": "adam"}), ("yardsticks", {"method": "dropout"}),
    ("yardsticks", {"method": "ensemble", "steps": 320}), ("yardsticks", {"method": "ensemble", "steps": 1200}),
    ("scan", {**RELEASED, "sigma": 0.2}),
    ("scan", {**PRINTED["data sum"], "sigma": 0.2}), ("scan", {**PRINTED["data sum"], "sigma": 10.0}),
])  # fmt: skip
def test_the_table_of_calibration(part: str, wanted: dict[str, Any]) -> None:
    row = _row("fig3", part, **wanted)
    assert f"{row['accuracy'][0]:.3f}" in PAGE
    assert f"{_said(row['nll'], 3)}" in PAGE
    assert f"{_said(row['ece'], 3)}" in PAGE
    if row["coverage"] is not None:
        assert f"{_said(row['coverage'], 2)}" in PAGE


def test_tests_of_figure_4() -> None:
    for row in _result("fig4")["tests"]:
        digits = 3 if row["setting"]["test"] == "penalty" else 2
        assert f"{_said(row['acceptance'], digits)}" in PAGE
        assert f"{row['examples_per_step'][0] / _result('fig4')['num_data']:.0%}" in PAGE


def test_the_theorems() -> None:
    curves = _result("theorems")["curves"]
    for curve in curves:
        if curve["chain"] != "exact":
            assert f"{curve['tv'][-1]:.3f}" in PAGE
