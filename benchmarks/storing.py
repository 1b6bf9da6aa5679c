"""What keeping the draws costs: share of a run's time at a gap of 100 steps, size on disk, and memory. make bench-store

The share is the time between the last step before a draw and the first step after it, over the time of the whole run after
burn-in, in one and the same run.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from adammcmc import AdamMCMC, Callback, Gaussian, Posterior, Underdamped, sample
from adammcmc.posterior.store.archives import format_bytes
from adammcmc.runs.loop import Loop

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def mlp(inputs: int, width: int, depth: int, outputs: int = 10) -> nn.Sequential:
    """A network of dense layers."""
    sizes = [inputs, *[width] * depth]
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Clock(Callback):
    """Time in draws and in all."""

    def __init__(self) -> None:
        self.drawing = self.began = self.total = 0.0
        self.num_draws = 0

    def on_step(self, event: Any) -> None:
        if self.began == 0.0 and not event.is_burning_in:
            self.began = time.perf_counter()

    def on_end(self, event: Any) -> None:
        _wait()
        self.total = time.perf_counter() - self.began
        self.num_draws = event.num_draws


def measure(name: str, model: nn.Module, sampler: Any, batch_size: int, num_draws: int) -> None:
    """One run: what share of it went into keeping its draws."""
    x, y = torch.randn(2000, 64, device=DEVICE), torch.randint(10, (2000,), device=DEVICE)
    model.to(DEVICE)
    clock = Clock()
    plain = Loop._draw

    def timed(self: Loop, store: Any) -> None:
        _wait()
        began = time.perf_counter()
        plain(self, store)
        clock.drawing += time.perf_counter() - began

    Loop._draw = timed  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            options: dict[str, Any] = {"sampler": sampler, "num_draws": num_draws, "gap": 100, "burn_in": 20, "path": path}
            sample(model, (x, y), F.cross_entropy, batch_size=batch_size, callbacks=[clock], **options)
            size = sum(p.stat().st_size for p in path.rglob("*"))
            count = len(Posterior.open(path, model))
    finally:
        Loop._draw = plain  # type: ignore[method-assign]
    params = sum(p.numel() for p in model.parameters())
    share = clock.drawing / clock.total
    print(
        f"{name:44} {params:>9,} weights  {1e3 * clock.total / count / 100:6.2f} ms a step  "
        f"{1e3 * clock.drawing / count:6.2f} ms a draw  {share:6.2%} of the run  {format_bytes(size)} on disk"
    )


def main() -> None:
    """The table."""
    torch.manual_seed(0)
    algorithm_1 = partial(AdamMCMC, lr=1e-4, sigma=1e-4, sigma_along=2.0, prior=Gaussian())
    underdamped = partial(Underdamped, step_size=1e-4, prior=Gaussian())
    measure("AdamMCMC, MLP, batch 128", mlp(64, 950, 2), algorithm_1, 128, 10)
    measure("AdamMCMC, MLP, batch 512", mlp(64, 950, 2), algorithm_1, 512, 5)
    measure("Underdamped, MLP, batch 128", mlp(64, 950, 2), underdamped, 128, 10)
    measure("AdamMCMC, small MLP, batch 128", mlp(64, 100, 2), algorithm_1, 128, 30)
    measure("AdamMCMC, smallest MLP, batch 32", mlp(64, 8, 1), algorithm_1, 32, 60)
    if DEVICE == "cuda":
        measure("AdamMCMC, large MLP, batch 512", mlp(64, 3000, 3), algorithm_1, 512, 10)


if __name__ == "__main__":
    main()
