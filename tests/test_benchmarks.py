"""The benchmarks of a step run, at their smallest, and say what the docs quote of them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import acceptance, airfoil, amortised, growth, rivals, step_cost, verdicts
from benchmarks.timing import medians

CPU = torch.device("cpu")
OF = {"posteriors": "posteriors", "torch-uncertainty": "torch_uncertainty", "blackjax": "blackjax"}


@pytest.fixture(autouse=True)
def _stay_unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests of this process keep their cores."""
    for benchmark in (rivals, growth):
        monkeypatch.setattr(benchmark, "bind", lambda cores: None)


def test_rivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rivals.json"
    rivals.main(f"--device cpu --widths 8 --batch 16 --repeats 1 --output {output}".split())
    printed = capsys.readouterr().out
    found = json.loads(output.read_text())
    rows = found["8"]
    assert found["about"]["batch"] == 16
    assert rows["Adam"]["ratio_to_adam"] == 1
    assert rows["AdamMCMC"]["corrected"] is True
    assert rows["AdamMCMC"]["forwards"] == 1
    assert rows["Underdamped, no test"]["corrected"] is False
    assert all(row["milliseconds"] > 0 and row["version"] for row in rows.values())
    for name, module in OF.items():
        is_here = importlib.util.find_spec(module) is not None
        assert is_here == any(row.startswith(name) for row in rows)
        assert is_here != (f"{name}: not installed" in printed)
    assert all(f"| {name} |" in printed for name in rows)


def test_amortised(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A small regression; and what was published is what the page says."""
    amortised.main(["--from", str(amortised.RESULTS), "--figure", str(tmp_path / "a.png")])
    page = (Path(__file__).parent.parent / "docs" / "exact.md").read_text()
    rows = capsys.readouterr().out.splitlines()
    for count in amortised.COUNTS:
        row = next(line for line in rows if line.startswith(f"| n/b {count}, L {count} |"))
        assert " | ".join(row.split(" | ")[-3:]) in page
    assert (tmp_path / "a.png").stat().st_size > 10_000
    monkeypatch.setattr(amortised, "SIZES", (4,))
    series, output = next(iter(amortised.SERIES)), tmp_path / "a.json"
    amortised.main(
        ["--names", "--series", series, "--passes", "60", "--output", str(output), "--figure", str(tmp_path / "b.png")]
    )
    found = json.loads(output.read_text())["regressions"][series]
    assert found["P 4, 1 chance"]["passes_per_step"] == pytest.approx(1.0, abs=0.1)
    assert found["P 4, n/b 10, L 10"]["passes_per_step"] == pytest.approx(7 / 3, abs=0.3)
    assert found["P 4, n/b 10, L 10"]["ess"] > 0


def test_airfoil(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On made-up rows of the same form."""
    rows = torch.randn(80, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    np.savetxt(data := tmp_path / "airfoil.data", torch.cat([rows, 100 + 5 * rows[:, :1]], 1).numpy())
    monkeypatch.setenv(airfoil.VARIABLE, str(data))
    output = tmp_path / "airfoil.json"
    words = f"--seeds 0 1 --members 2 --gradients 400 --draws 4 --every 100 --output {output}"
    with pytest.warns(UserWarning, match="burn-in ended"):
        airfoil.main(words.split())
    assert "mean of 2 seeds: {'rmse': " in capsys.readouterr().out
    found = json.loads(output.read_text())["default"]["seeds"]["0"]
    assert found["burn_in"] < 400
    assert found["burn_in"] + 200 <= found["gradients"]
    assert found["members"]["rmse"] > 0
    assert list(found["curve"])[:2] == ["100", "200"]
    last = found["curve"][max(found["curve"], key=int)]
    assert last["rmse"] == pytest.approx(found["draws"]["rmse"], rel=0.5)  # the same quantity, of fewer draws
    with pytest.warns(UserWarning, match="burn-in ended"):
        airfoil.main(f"--sampler unadjusted {words.replace('0 1', '0')}".split())
    found = json.loads(output.read_text())["unadjusted"]["seeds"]["0"]
    assert (found["burn_in"], found["gradients"]) == (200, 400)
    assert "no Metropolis correction" in found["target"]
    monkeypatch.delenv(airfoil.VARIABLE)
    with pytest.raises(SystemExit, match="no data file was given: pass --data, or set ADAMMCMC_AIRFOIL"):
        airfoil.main([])


def test_scores_of_a_mixture_of_normals() -> None:
    """Against torch.distributions."""
    means, variances = torch.randn(3, 7, 1), torch.rand(3, 7, 1) + 0.1
    targets = torch.randn(7, 1)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.ones(7, 1, 3)),
        torch.distributions.Normal(means.movedim(0, -1), variances.sqrt().movedim(0, -1)),
    )
    found = airfoil.scores(means, variances, targets)
    assert found["nll_mixture"] == pytest.approx(-float(mixture.log_prob(targets).mean()), abs=2e-4)
    normal = torch.distributions.Normal(mixture.mean, mixture.variance.sqrt())
    assert found["nll_normal"] == pytest.approx(-float(normal.log_prob(targets).mean()), abs=2e-4)


def test_step_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cost, "WIDTHS", (8,))
    rows = step_cost.measure(repeats=1)
    assert list(rows) == ["682"]
    assert len(rows["682"]) == 6
    assert all(number > 0 for number in rows["682"])


def test_growth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, figure = tmp_path / "growth.json", tmp_path / "growth.png"
    growth.main(f"--device cpu --widths 8 16 --batches 16 --data 32 --repeats 1 --output {output} --figure {figure}".split())
    assert "| 682 |" in capsys.readouterr().out  # 64 * 8 + 8 + 8 * 8 + 8 + 8 * 10 + 10
    found = json.loads(output.read_text())
    assert set(found) == {"about", "parameters", "batch", "data"}
    assert {point["Adam"]["ratio_to_adam"] for curve in ("parameters", "batch", "data") for point in found[curve].values()} == {
        1
    }
    assert set(found["data"]["32"]) == {"Adam", "Adam, all data", "AdamMCMC, FullData", "AdamMCMC, fixed data"}
    assert figure.stat().st_size > 10_000


def test_growth_takes_stacked_chains() -> None:
    """The interface: a function from a number of chains to a function that takes one step of them."""
    counts: list[int] = []

    def stacked_step(num_chains: int) -> growth.Step:
        return lambda: counts.append(num_chains)

    curves = growth.measure("cpu", widths=(), batches=(), data=(), chains=(1, 3), stacked_step=stacked_step, repeats=1)
    assert list(curves["chains"]) == ["1", "3"]
    assert set(counts) == {1, 3}


def test_versions_take_turns() -> None:
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = medians(steps, CPU, repeats=4, warm_up=2)
    assert list(times) == list("abc")
    assert calls[:6] == list("aabbcc")
    rounds = [calls[i : i + 3] for i in range(6, len(calls), 3)]
    assert len(rounds) == 4
    assert all(sorted(names) == list("abc") for names in rounds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_the_captured_adam_is_adam(options: dict[str, bool]) -> None:
    """A graph that does not learn would be a fast one: it must go where the eager one goes."""
    x, y = growth.examples(64, torch.device("cuda"))
    eager, graph = (growth.net(16, x.device) for _ in range(2))
    step = rivals.adam_step(eager, x, y, 0, **options)
    replay = rivals.adam_step(graph, x, y, 1, capturable=True, **options)  # five steps before the capture, which takes none
    for _ in range(15):
        step()
    for _ in range(10):
        replay()
    for p, q in zip(eager.parameters(), graph.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0.0, atol=2e-4)  # of a way of some 1e-2


def test_acceptance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, page = tmp_path / "acceptance.json", tmp_path / "acceptance.md"
    page.write_text((acceptance.RESULTS.parent.parent.parent / "docs" / "acceptance.md").read_text())
    acceptance.main(f"--length 0.001 --chains 0.05 --cores 1 --rows 1200 3000 --output {output} --page {page}".split())
    printed = capsys.readouterr().out
    found = json.loads(output.read_text())
    assert len(found["tests"]) == sum(
        len(acceptance.rows(p)) for p in (acceptance.heavy_tails(1200), acceptance.logistic(3000))
    )
    for row in found["tests"]:
        assert 0.3 < row["sd_ratio"] < 3
        assert 0 <= row["data"] <= 1.5
    assert all(row["gain"] == 1 and row["data"] == 1 for row in found["tests"] if row["test"] == "`FullData()`")
    assert acceptance.table(found["tests"][:3]).splitlines()[-1] in printed
    assert all(text in page.read_text() for text in acceptance.tables(found).values())
    assert "`Minibatch(5000)`" not in page.read_text()


def test_the_truth_of_the_logistic_problem_is_that_of_quadrature() -> None:
    """In two dimensions a grid knows better than importance sampling."""
    problem = acceptance.logistic(2000, num_features=1)
    inputs, offset = problem.data
    axis = torch.linspace(-6, 6, 81, dtype=torch.float64)
    z = torch.cartesian_prod(axis, axis)
    assert problem.prior is not None
    level = torch.stack([problem.prior.log_density([p]) - acceptance.shifted_logistic(p, inputs, offset).sum() for p in z])
    weight = torch.softmax(level, 0)[:, None]
    mean = (weight * z).sum(0)
    sd = (weight * (z - mean).square()).sum(0).sqrt()
    assert ((problem.sd - sd).abs() < 4.5 * problem.truth_error * sd).all()
    assert problem.truth_error < 0.02
    assert ((problem.mean - mean).abs() < 0.05).all()


def test_the_docs_have_the_tables_of_the_results() -> None:
    """Every row of docs/acceptance.md is what `make bench-acceptance` wrote, and every row that it wrote is there."""
    page = (acceptance.RESULTS.parent.parent.parent / "docs" / "acceptance.md").read_text()
    found = json.loads(acceptance.RESULTS.read_text())
    lines = [line for text in acceptance.tables(found).values() for line in text.splitlines()]
    assert [line for line in lines if line not in page] == []


def test_a_test_meets_the_promise_of_the_docs() -> None:
    """sd within 5% of the truth, at twice the effective draws of the full data's chain for each datum looked at."""
    found = json.loads(acceptance.RESULTS.read_text())
    large = [row for row in found["tests"] if row["problem"] == "logistic"]
    good = [r for r in large if abs(r["sd_ratio"] - 1) + 2 * r["sd_ratio_error"] < 0.05 and r["gain"] > 2]
    assert {"`Tuna(bound, chi=0.1)`", "`Penalty(50)`"} <= {row["test"] for row in good}
    assert all(row["control_variate"] > 0 for row in good)


# --- verdicts -----------------------------------------------------------------------------------------------------------


def test_the_verdict_is_never_calm_about_a_sick_run_and_seldom_alarmed_by_a_healthy_one() -> None:
    """All runs of `benchmarks/verdicts.py`, as stored: if one is missing, or the library has changed, run them again."""
    runs = json.loads(verdicts.RESULTS.read_text())["runs"]
    assert list(runs) == [f"{case.group}: {case.name}" for case in verdicts.CASES]
    visible = [row for row in runs.values() if not row["invisible"]]
    healthy, sick = ([row for row in visible if (row["fault"] is None) == is_healthy] for is_healthy in (True, False))
    assert len(healthy) >= 18
    assert len(sick) >= 25
    assert len({row["group"] for row in sick}) >= 10
    assert [row for row in sick if row["outcome"] == verdicts.CALM] == []
    assert 20 * sum(row["outcome"] == verdicts.ALARM for row in healthy) <= len(healthy)
    assert all(row["outcome"] == verdicts.outcome(row["fault"], row["grade"]) for row in visible)
    known = [row["z"] for row in healthy if row["z"] is not None]
    assert len(known) >= 18
    assert max(known) < verdicts.Z_LIMIT  # healthy runs are healthy


def test_the_page_on_health_has_the_table_of_the_runs() -> None:
    """If this fails: python -m benchmarks.verdicts table"""
    page = verdicts.PAGE.read_text()
    assert verdicts.page_with(page, json.loads(verdicts.RESULTS.read_text())) == page
    assert "| **all healthy** |" in page


FAST = [
    "healthy density: Gaussian, 64 chains",
    "unfinished burn-in: far start, short steps",
    "wrong num_data: num_data of sample",
    "too few draws: 60 steps",
]


def test_runs_are_stored_one_by_one_and_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fast ones have the outcome that is stored."""
    output = tmp_path / "verdicts.json"
    for name in FAST * 2:
        verdicts.main(["--only", name, "--output", str(output)])
    assert len(capsys.readouterr().out.splitlines()) == len(FAST)
    found, stored = (json.loads(path.read_text())["runs"] for path in (output, verdicts.RESULTS))
    assert set(found) == set(FAST)
    assert {name: row["grade"] for name, row in found.items()} == {name: stored[name]["grade"] for name in FAST}
