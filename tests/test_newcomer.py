"""The newcomer's path: a fresh clone, the demo, its report, the loop of the README, a spread."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_from_a_fresh_clone_to_a_spread(tmp_path: Path) -> None:
    """With the environment of this checkout, so that nothing is installed twice (CI installs it on a new machine)."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a clone")
    clone = tmp_path / "adammcmc"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    (clone / ".venv").symlink_to((ROOT / ".venv").resolve())
    environment = os.environ | {"PYTHONPATH": str(clone / "src"), "COLUMNS": "200"}
    made = subprocess.run(
        ["make", "--old-file=.venv/installed", "demo"],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    [page] = re.findall(r"Report: file://(\S+\.html)", made.stdout)
    text = Path(page).read_text()
    assert "No problems found: you can use these draws" in text
    assert "What was sampled" in text
    assert (clone / "demo.png").exists()

    # the loop of the README: the lines of the diff that are added, around what a reader has
    added = re.findall(r"^\+ (.*)$", (clone / "README.md").read_text(), re.MULTILINE)
    assert len(added) == 5
    setup, step, condition, collect, health = added
    program = f"""
import torch, torch.nn.functional as F, adammcmc
torch.manual_seed(0)
x = torch.randn(80, 3); y = x.argmax(1)
model = torch.nn.Linear(3, 3)
draws = []
{setup}
for step in range(6000):
    {step}
    {condition}
    {collect}
    if len(draws) == 20:
        break
{health}
answers = []
for draw in draws:
    model.load_state_dict(draw)
    answers.append(model(x).softmax(1))
print("spread", float(torch.stack(answers).std(0).mean()))
"""
    found = subprocess.run(
        [str(clone / ".venv/bin/python"), "-c", program], cwd=clone, env=environment, capture_output=True, text=True, check=True
    )
    [spread] = re.findall(r"^spread ([\d.]+)$", found.stdout, re.MULTILINE)
    assert 0 < float(spread) < 1
