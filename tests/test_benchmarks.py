"""The benchmarks of a step run, at their smallest, and say what the docs quote of them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from benchmarks import growth, rivals
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
