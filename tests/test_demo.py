"""The bundled example runs, says what it sampled, and draws a picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import adammcmc
from adammcmc import demo
from adammcmc.cli import app


def test_the_version_is_printed() -> None:
    result = subprocess.run([sys.executable, "-m", "adammcmc", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"adammcmc {adammcmc.__version__}\n"


def test_help_teaches() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"])
    assert result.exit_code == 0
    for word in ("irises", "Underdamped", "--output", "--steps", "--seed"):
        assert word in result.output


def test_the_demo_from_the_shell(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    result = CliRunner().invoke(app, ["demo", "--steps", "600", "--output", str(picture)], catch_exceptions=False)
    assert result.exit_code == 0
    for word in (
        "lambda = 1 (T = 1), n = 120",
        "| exact",
        "approximate: momentum",
        "health: ",
        "Predictions",
        "virginica",
    ):
        assert word in result.output
    assert picture.stat().st_size > 20_000
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_demo_is_fixed_by_its_seed(tmp_path: Path) -> None:
    outputs = [
        CliRunner().invoke(app, ["demo", "--steps", "500", "--output", str(tmp_path / "p.png"), "--seed", seed]).output
        for seed in ("1", "1", "2")
    ]
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_missing_folder_is_said_before_the_work() -> None:
    with pytest.raises(FileNotFoundError, match="the folder 'nowhere' for the picture does not exist"):
        demo.run_demo(Path("nowhere/picture.png"), steps=500, seed=0)
