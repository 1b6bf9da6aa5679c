"""The bundled demo: its draws can be used, it says so, and it draws a figure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import adammcmc
from adammcmc.cli import demo
from adammcmc.cli.commands import app
from adammcmc.jets import bundled, read_jets


def test_the_version_is_printed() -> None:
    result = subprocess.run([sys.executable, "-m", "adammcmc.cli", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"adammcmc {adammcmc.__version__}\n"


def test_help_teaches() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"])
    assert result.exit_code == 0
    for word in ("observables", "AdamMCMC", "--output", "--num-chains", "--num-draws", "--seed"):
        assert word in result.output


def _fewer_jets(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 training jets: a step is faster."""
    monkeypatch.setattr(demo, "NUM_TEST", 300)
    monkeypatch.setattr(demo, "read_jets", lambda path: read_jets(path, max_jets=500))


def test_the_demo_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fewer_jets(monkeypatch)
    picture = tmp_path / "picture.png"
    command = ["demo", "--gap", "20", "--num-draws", "200", "--output", str(picture)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    # the first line of the summary: the exact chains are called sound, and Algorithm 1 is not
    assert "sound: no complaint: 4 chains agree in loss, U, predictions" in result.output
    assert result.output.count("no complaint") == 1
    for word in (
        "lambda = 1 (T = 1), n = 200",
        "| exact",
        "What Algorithm 1 costs in truth",
        "accuracy 0.",
        "signal efficiency",
        "top, wrong",
        "H → WW",
        "AUROC",
    ):
        assert word in result.output
    assert picture.stat().st_size > 20_000
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = tmp_path / "picture.html"
    assert "".join(result.output.split()).endswith("Report:" + page.as_uri())  # a terminal may break the line
    text = page.read_text()
    assert "No problems found: you can use these draws" in text
    assert "The examples with the largest mutual information" in text


def test_chains_that_are_too_short_are_not_called_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fewer_jets(monkeypatch)
    posterior = demo.run_demo(tmp_path / "picture.png", num_draws=6, gap=1)
    assert posterior.summary().grade != "sound"
    assert "you can use these draws" not in (tmp_path / "picture.html").read_text()


@pytest.mark.slow
def test_the_calm_verdict_of_the_demo_is_true(tmp_path: Path) -> None:
    """The whole demo, judged by ArviZ on all held-out jets; the report compares a hundred of them."""
    arviz = pytest.importorskip("arviz")
    posterior = demo.run_demo(tmp_path / "demo.png")
    assert "No problems found: you can use these draws" in (tmp_path / "demo.html").read_text()
    jets = read_jets(bundled("jets"))
    _, held_out = demo.standardised(jets[: -demo.NUM_TEST], jets[-demo.NUM_TEST :])
    scores = posterior.predict(held_out, raw=True).raw
    assert scores is not None
    chains = scores[..., 1].double().reshape(posterior.num_chains, -1, demo.NUM_TEST).numpy()
    rhat, ess = (f(arviz.convert_to_dataset(chains)).x.to_numpy() for f in (arviz.rhat, arviz.ess))
    assert float(rhat.max()) < 1.02
    assert float(ess.min()) > 100


def test_a_missing_folder_is_said_before_the_work() -> None:
    with pytest.raises(FileNotFoundError, match="the folder 'nowhere' for the figure does not exist"):
        demo.run_demo(Path("nowhere/picture.png"))
