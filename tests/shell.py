"""A folder with configurations, modules, data and a run, and the command line without a new process: shared by its tests."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from adammcmc.cli.__main__ import run

MODULE = """
import torch
from torch import nn
import torch.nn.functional as F

number = 3
network = nn.Linear(2, 2)
frozen = nn.Linear(2, 2).requires_grad_(False)

def make(width=4, classes=2):
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, classes))

def make_nothing():
    return None

def fail():
    raise RuntimeError("no such luck")

def data(number=40):
    x = torch.randn(number, 2, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()

def empty():
    return torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)

def of_two_lengths():
    return torch.zeros(5, 2), torch.zeros(4, dtype=torch.long)

def not_a_number():
    x, y = data()
    return x * float("nan"), y

def loss(outputs, targets):
    return F.cross_entropy(outputs, targets)

def total(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum")

def no_sampler(params, **options):
    return torch.optim.SGD(params, lr=0.1)
"""
GOOD = """
[model]
name = "shell_things:make"
arguments = { width = 3 }
[data]
train = "train.npz"
test = "test.npz"
[loss]
name = "cross_entropy"
[sampler]
name = "AdamMCMC"
lr = 1e-2
sigma = 1e-2
sigma_along = 1.0
[prior]
name = "Gaussian"
scale = 1.0
[run]
num_draws = 6
gap = 2
burn_in = 4
"""


class Answer(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


def ask(*words: object) -> Answer:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(word) for word in words])
    return Answer(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def modules_forgotten() -> Iterator[None]:
    """What a configuration imports, and where it looked for it, is gone after it."""
    path, known = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - known:
            if name.startswith("shell_"):
                del sys.modules[name]


def furnish(home: Path) -> None:
    """A folder that has everything: good.toml, a module, data, weights."""
    (home / "shell_things.py").write_text(MODULE)
    (home / "shell_broken.py").write_text("1 / 0")
    (home / "shell_needy.py").write_text("import a_module_that_nobody_has")
    (home / "shell_exits.py").write_text("raise SystemExit(3)")
    (home / "good.toml").write_text(GOOD)
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 2))  # float64, and labels of one byte: as files are
    y = (x[:, 0] > 0).astype(np.uint8)
    np.savez(home / "train.npz", inputs=x[:40], targets=y[:40])
    np.savez(home / "test.npz", inputs=x[40:], targets=y[40:])
    np.savez(home / "named.npz", a=x, b=y)
    np.savez(home / "words.npz", x=np.array(["a", "b"]), y=np.array([0, 1]))
    np.savez(home / "objects.npz", x=np.array([None, 1], dtype=object), y=np.array([0, 1]))
    np.savez(home / "empty.npz")
    np.save(home / "x.npy", x[:40].astype(np.float32))
    np.save(home / "y.npy", y[:40])
    np.save(home / "one.npy", np.array(1.0))
    np.save(home / "wide.npy", np.zeros((5, 3), dtype=np.float32))
    (home / "damaged.npz").write_bytes(b"PK no archive")
    (home / "damaged.npy").write_bytes(b"nothing")
    (home / "not.toml").write_text("[run\nnum_draws = ")
    (home / "bytes.toml").write_bytes(b"task = '\xff\xfe'")
    (home / "a_file").write_text("a file")
    (home / "full").mkdir()
    (home / "full" / "notes.txt").write_text("something else")
    torch.manual_seed(0)
    torch.save(nn.Linear(3, 3).state_dict(), home / "other.pt")
    torch.save(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).state_dict(), home / "fits.pt")
    (home / "damaged.pt").write_bytes(b"\x80\x02nothing")
    (home / "damaged.safetensors").write_bytes(b"nothing")
