"""The bundled example runs, says what it sampled, and draws a figure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import adammcmc
from adammcmc.cli import demo
from adammcmc.cli.commands import app
from adammcmc.jets import read_jets


def test_the_version_is_printed() -> None:
    result = subprocess.run([sys.executable, "-m", "adammcmc.cli", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"adammcmc {adammcmc.__version__}\n"


def test_help_teaches() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"])
    assert result.exit_code == 0
    for word in ("ParticleNet-Lite", "AdamMCMC", "--output", "--epochs", "--num-draws", "--seed"):
        assert word in result.output


def test_the_demo_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the same job on fewer jets
    monkeypatch.setattr(demo, "NUM_TEST", 300)
    monkeypatch.setattr(demo, "read_jets", lambda path: read_jets(path, max_jets=900))
    picture = tmp_path / "picture.png"
    command = ["demo", "--epochs", "2", "--gap", "1", "--num-draws", "3", "--output", str(picture)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    for word in (
        "lambda = 1 (T = 1), n = 600",
        "approximate: momentum",
        "health: ",
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
    assert "The examples with the largest mutual information" in page.read_text()


def test_a_missing_folder_is_said_before_the_work() -> None:
    with pytest.raises(FileNotFoundError, match="the folder 'nowhere' for the figure does not exist"):
        demo.run_demo(Path("nowhere/picture.png"))
