"""Code in README and docs runs as it stands."""

from __future__ import annotations

import hashlib
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import adammcmc
from adammcmc.cli.config import read_config
from adammcmc.jets import bundled

ROOT = Path(__file__).parent.parent


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a reader has: a model, data, an optimizer; `sample` takes fewer steps than it would."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    inputs = torch.randn(600, 4)
    targets = inputs[:, :3].argmax(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(50):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    def sample(*args: Any, **options: Any) -> adammcmc.Posterior:
        return adammcmc.sample(*args, **{**options, "gap": 2, "num_draws": 10, "burn_in": 150})

    fast = SimpleNamespace(**{name: getattr(adammcmc, name) for name in adammcmc.__all__} | {"sample": sample})
    return {
        "adammcmc": fast,
        "F": F,
        "DataLoader": DataLoader,
        "model": model,
        "inputs": inputs,
        "targets": targets,
        "test_inputs": torch.randn(20, 4),
        "train": TensorDataset(inputs, targets),
        "optimizer": optimizer,
    }


def run(code: str, names: dict[str, Any]) -> None:
    own = {"adammcmc": names["adammcmc"]}
    exec(re.sub(r"^import .*adammcmc.*$", "import torch.nn.functional as F", code, flags=re.MULTILINE), names)
    names |= own


def test_the_first_lines_of_the_readme(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run(blocks("README.md")[0], names)
    assert names["p"].mean.shape == (20, 3)
    printed = capsys.readouterr().out
    assert "| exact" in printed
    assert "chain 0:" in printed


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_page_on_posteriors(names: dict[str, Any]) -> None:
    one_call, algorithm_1, _, by_hand, band, tuned, callbacks = blocks("docs/posterior.md")
    run(one_call, names)
    assert names["p"].mutual_information.shape == (20,)
    assert len(names["posterior"]) == 40
    run(by_hand, names)
    assert all(torch.equal(value, names["posterior"][9][key]) for key, value in names["model"].state_dict().items())
    run(tuned, names)
    assert names["again"].settings(0)["step_size"] == names["posterior"].settings(0)["step_size"]
    run(algorithm_1, names)
    assert "AdamMCMC (Algorithm 1)" in names["posterior"].target
    run(band.replace("model.log_prob(x).exp()", "model(x).exp()").replace("grid", "inputs"), names)
    run(callbacks, names)
    assert (names["band"].quantile(0.05) <= names["band"].mean).float().mean() > 0.9


@pytest.mark.filterwarnings("ignore:burn-in")
def test_the_page_on_large_networks(names: dict[str, Any]) -> None:
    (reduced,) = blocks("docs/large.md")
    run(reduced, names)
    assert names["posterior"].target.endswith("| exact")


def test_the_page_on_many_chains(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for code in blocks("docs/many.md"):
        run(code, names)
    assert names["posterior"].num_chains == 16
    assert names["posterior"].store.manifest["configuration"]["stacked"]
    assert [names["scan"].settings(c)["sigma"] for c in range(8)] == names["sigmas"].tolist()
    assert "approximate: no Metropolis correction" in names["ensemble"].target
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 8 + 12  # the scan's settings, and the table of the members
    assert all(torch.equal(a[key], b[key]) for a, b in zip(names["apart"], names["again"], strict=True) for key in a)


def test_the_page_on_jets_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    [code] = blocks("docs/jets.md")
    less = {
        "jets[:9600], jets[9600:]": "jets[:512], jets[512:800]",
        "epochs=8": "epochs=1",
        "burn_in=100, gap=20": "burn_in=1, gap=1",
    }
    for words, fewer in less.items():  # the same code on fewer jets
        assert words in code
        code = code.replace(words, fewer)
    exec(code, {})
    assert "288 jets: accuracy 0." in capsys.readouterr().out


def test_the_tutorial(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From a training loop to a report, with fewer steps."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks("docs/tutorial.md"))
    less = {
        "range(1500)": "range(300)",
        "burn_in=1000": "burn_in=150",
        "len(draws) < 50": "len(draws) < 4",
        "num_draws=150, gap=10, burn_in=1500": "num_draws=10, gap=2, burn_in=150",
    }
    for words, fewer in less.items():
        assert words in code
        code = code.replace(words, fewer)
    names: dict[str, Any] = {}
    exec(code, names)
    printed = capsys.readouterr().out
    for words in ("trained: accuracy 0.", "| exact", "health: ", "1,000 examples: ", "4 chains, 10 draws each"):
        assert words in printed
    assert len(names["draws"]) == 4
    assert names["prediction"].spread.shape == (1000, 2)
    assert "Are the predictions right?" in Path("moons.html").read_text()


def test_the_page_on_the_command_line_is_that_of_the_code() -> None:
    """If this fails: python docs/commands.py"""
    made = runpy.run_path(str(ROOT / "docs" / "commands.py"))["page"]()
    assert (ROOT / "docs" / "cli.md").read_text() == made


def test_the_configuration_that_trains_members_can_be_read() -> None:
    [text] = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "many.md").read_text(), re.DOTALL | re.MULTILINE)
    config = read_config(text)
    assert config.members is not None
    assert config.members.options == {"lr": 1e-2}


def test_the_configuration_on_the_page_can_be_read() -> None:
    [text] = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "cli.md").read_text(), re.DOTALL | re.MULTILINE)
    config = read_config(text)
    assert config.sampler is not None
    assert config.sampler.options["sigma"] == [1e-4, 3e-4, 1e-3, 3e-3]
    assert config.run.num_chains == 4


def test_the_pages_on_calibration_and_diagnostics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, as they are read, with fewer steps."""
    code = "\n".join([*blocks("docs/calibration.md"), *blocks("docs/diagnostics.md")])
    less = {
        "range(3000)": "range(300)",
        "num_draws=200, gap=25, burn_in=2000": "num_draws=10, gap=2, burn_in=100",
        "num_draws=100, gap=25, burn_in=2000": "num_draws=10, gap=2, burn_in=100",
    }
    for words, fewer in less.items():
        assert words in code
        code = code.replace(words, fewer)
    names: dict[str, Any] = {}
    exec(code, names)
    printed = capsys.readouterr().out
    for words in ("trained: 0.", "2,000 examples: ", "by mutual information  AUROC 0.", "4 chains, 10 draws each"):
        assert words in printed
    assert names["data"].posterior["prediction"].shape == (4, 10, 198)
    assert [c.level for c in names["scores"].coverage] == [0.5, 0.68, 0.9, 0.95]


@pytest.mark.parametrize("name", ["jets", "others"])
def test_the_bundled_jets_are_those_of_the_page(name: str) -> None:
    [written] = re.findall(rf"`{name}\.npz` \| (\w+)", (ROOT / "docs" / "jets.md").read_text())
    assert hashlib.sha256(bundled(name).read_bytes()).hexdigest() == written


def test_the_page_on_acceptance_tests(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    functional, in_a_loop, in_sample, _ = blocks("docs/acceptance.md")  # the last: test_subsample.py
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 3, generator=generator).double()
    mode = torch.tensor([1.0, -0.5, 0.2]).double()
    y = 2 * (torch.rand(3000, generator=generator).double() < torch.sigmoid(x @ mode)).double() - 1
    for _ in range(10):
        p = torch.sigmoid(-y * (x @ mode))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + torch.eye(3).double()
        mode = mode + torch.linalg.solve(hessian, (x * (y * p)[:, None]).sum(0) - mode)
    names |= {"torch": torch, "x": x, "y": y, "mode": mode}
    assert "num_steps=1000" in functional
    run(functional.replace("num_steps=1000", "num_steps=100"), names)
    assert 0 < float(names["info"].num_examples.mean()) < 30
    assert 0.2 < float(names["info"].acceptance_rate.mean()) < 0.95
    run(in_a_loop, names)
    assert float(names["sampler"].info.num_examples) == 200
    assert 0 < float(names["sampler"].info.log_ratio_noise) < 10
    run(in_sample, names)
    assert len(names["posterior"]) == 10
    assert "Barker on a growing batch" in names["posterior"].target
    assert "examples a step" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:burn-in")
def test_the_page_on_densities(capsys: pytest.CaptureFixture[str]) -> None:
    """The centred model gets its warning, with fewer steps; the non-centred one does not."""
    model, centred, non_centred, draws, simplex = blocks("docs/density.md")
    pytest.importorskip("arviz")
    less = {
        "num_steps=5000": "num_steps=2000",
        "num_steps=10_000": "num_steps=1500",
        "BurnIn(num_steps=2000)": "BurnIn(num_steps=800)",
    }
    names: dict[str, Any] = {}
    exec(model, names)
    for code, expected in ((centred, True), (non_centred, False)):
        for words, fewer in less.items():
            code = code.replace(words, fewer)
        assert "num_steps=800" in code
        exec(code, names)
        printed = capsys.readouterr().out
        assert ("funnel: moves fail in one region" in printed) == expected
        assert "where tau is below" in printed or not expected
        assert "tau: positive | microcanonical Langevin: step size" in printed
    exec(draws, names)
    assert names["theta"].shape == (8, 1500, 8)
    assert names["data"].posterior["eta"].shape == (8, 1500, 8)
    exec(simplex, names)
    shares = names["shares"].draws
    chains = shares.mean(1)
    truth = names["alpha"] / names["alpha"].sum()
    assert float(((chains.mean(0) - truth).abs() / (chains.std(0) / len(chains) ** 0.5)).max()) < 6  # few chains: Student's t
