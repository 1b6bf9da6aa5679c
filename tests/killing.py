"""Runs that are killed at random instants and resumed: what they leave must be what an uninterrupted run leaves."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import adammcmc
from adammcmc.posterior.store.encoding import encode
from adammcmc.posterior.store.folder import FolderStore

X = torch.randn(96, 5, generator=torch.Generator().manual_seed(1))
Y = torch.randint(3, (96,), generator=torch.Generator().manual_seed(2))


class Augmented(Dataset[Any]):
    """A data set that draws from all three sources of random numbers."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = 0.1 * torch.randn(5) + 0.01 * float(np.random.rand()) + 0.01 * random.random()  # noqa: NPY002
        return X[i] + noise, Y[i]


def network(*, plain: bool) -> nn.Sequential:
    torch.manual_seed(0)
    if plain:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def cosine(sampler: Any) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(sampler, 20, eta_min=1e-4)


ALGORITHM_1 = partial(adammcmc.AdamMCMC, lr=1e-3, sigma=1e-3, sigma_along=2.0, prior=adammcmc.Gaussian())
SCENARIOS: dict[str, Any] = {
    # BatchNorm, dropout, a scheduler, two chains, batches
    "algorithm 1": lambda: {
        "model": network(plain=False),
        "train": (X, Y),
        "sampler": ALGORITHM_1,
        "scheduler": cosine,
        "batch_size": 16,
        "num_chains": 2,
        "num_draws": 25,
        "gap": 3,
    },
    # adaptation of step size and preconditioner, exact, all data
    "underdamped": lambda: {"model": network(plain=True), "train": (X, Y), "num_draws": 40, "gap": 2, "burn_in": 150},
    # batches without a test; burn-in learns scales, and compares two step sizes
    "minibatch langevin": lambda: {
        "model": network(plain=True),
        "train": (X, Y),
        "sampler": adammcmc.MinibatchLangevin,
        "batch_size": 16,
        "num_draws": 40,
        "gap": 2,
        "burn_in": adammcmc.BurnIn(num_steps=100, window=10),
    },
    # a step for each chain from its energy error, without a test, stacked
    "microcanonical, no test": lambda: {
        "model": network(plain=True),
        "train": (X, Y),
        "sampler": partial(adammcmc.Microcanonical, acceptance=adammcmc.AlwaysAccept()),
        "num_chains": 3,
        "stacked": True,
        "num_draws": 40,
        "gap": 2,
        "burn_in": 120,
    },
    # batches for the gradient, all data for the test, only the last three draws and the moments
    "full data, last 3": lambda: {
        "model": network(plain=True),
        "train": (X, Y),
        "batch_size": 32,
        "num_draws": 40,
        "gap": 2,
        "burn_in": 60,
        "keep": 3,
    },
    # a data set with random augmentation, no draws kept
    "augmented, moments": lambda: {
        "model": network(plain=True),
        "train": DataLoader(Augmented(), batch_size=16),
        "sampler": partial(adammcmc.MALA, step_size=1e-4, prior=adammcmc.Gaussian()),
        "num_draws": 40,
        "gap": 2,
        "burn_in": 30,
        "keep": "moments",
    },
    "theorem 1": lambda: {
        "model": network(plain=True),
        "train": (X, Y),
        "sampler": partial(adammcmc.ExactAdamMCMC, lr=1e-3, sigma=3e-2, sigma_along=1.0, prior=adammcmc.Gaussian()),
        "num_draws": 30,
        "gap": 3,
        "burn_in": adammcmc.BurnIn(num_steps=60),
    },
    # all chains at once: BatchNorm, dropout, batches, noise and temperature of each chain
    "stacked scan": lambda: {
        "model": network(plain=False),
        "train": (X, Y),
        "sampler": partial(
            ALGORITHM_1, sigma=torch.tensor([1e-3, 2e-3, 5e-4]), inverse_temperature=torch.tensor([1.0, 0.5, 0.1])
        ),
        "batch_size": 16,
        "num_chains": 3,
        "stacked": True,
        "num_draws": 25,
        "gap": 3,
    },
    # a member trained for each chain before its first step: a kill may come in the training too
    "members": lambda: {
        "model": network(plain=False),
        "train": (X, Y),
        "sampler": ALGORITHM_1,
        "batch_size": 16,
        "num_chains": 2,
        "initial": adammcmc.TrainMembers(max_steps=150, stacked=False),
        "num_draws": 25,
        "gap": 3,
    },
    # all chains at once: adaptation pooled over them, all data for the test, only the last two draws and the moments
    "stacked, adapting, last 2": lambda: {
        "model": network(plain=True),
        "train": (X, Y),
        "batch_size": 32,
        "num_chains": 2,
        "stacked": True,
        "num_draws": 30,
        "gap": 2,
        "burn_in": 60,
        "keep": 2,
    },
}


def run(scenario: str, path: str) -> None:
    torch.set_num_threads(1)
    adammcmc.sample(loss=F.cross_entropy, path=path, resume=True, progress=False, **SCENARIOS[scenario]())


def content(path: Path) -> Any:
    """Everything that a finished run left, to the bit; but for how long it took."""
    store = FolderStore(path)
    chains = range(store.manifest["configuration"]["num_chains"])
    checkpoints = [encode(store.saved(chain)) for chain in (*chains, None)]
    draws = [store.load(record) for record in store.kept()]
    files = sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())
    target = store.manifest["target"]
    index = [{key: value for key, value in record.items() if key != "seconds"} for record in store.index]
    return target, index, draws, [text for text, _ in checkpoints], [tensors for _, tensors in checkpoints], files


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.killing"])


def start(function: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """A process that has this module imported already. A function of another one makes it import that one too."""
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


class StopHere(adammcmc.Callback):
    """Announces a step, and stays there until a signal had the time to come."""

    def __init__(self, step: int, reached: Any) -> None:
        self.step, self.reached = step, reached

    def on_step(self, event: adammcmc.Event) -> None:
        if event.step == self.step:
            self.reached.set()
            time.sleep(0.3)


def run_and_stop(path: str, step: int, reached: Any) -> None:
    """A short run that waits for a signal at a step, as in the foreground of a shell."""
    foreground()
    torch.set_num_threads(1)
    adammcmc.sample(path=path, resume=True, callbacks=[StopHere(step, reached)], **short())


def short() -> dict[str, Any]:
    return SCENARIOS["underdamped"]() | {"loss": F.cross_entropy, "num_draws": 5, "burn_in": 40, "progress": False}


def foreground() -> None:
    """Signals as a shell sets them in the foreground: in the background it ignores SIGINT, nohup ignores SIGHUP."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Limit(adammcmc.Callback):
    """Takes the memory away after the second draw."""

    def on_draw(self, event: adammcmc.Event, record: dict[str, Any]) -> None:
        if event.num_draws == 2:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + 1_000_000, resource.RLIM_INFINITY))


def run_out_of_memory() -> None:
    """Draws of 4 MB in memory, of which some more than two fit; those that did are in the error."""
    try:
        model, options = nn.Linear(5, 200_000), {"num_draws": 20, "gap": 1, "burn_in": 1, "progress": False}
        data = (X[:2], Y[:2])
        adammcmc.sample(model, data, lambda o, y: o.mean(), sampler=ALGORITHM_1, callbacks=[Limit()], **options)
    except (RuntimeError, MemoryError) as error:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # to read them
        draws = list(error.result)  # type: ignore[union-attr]
    if not (2 <= len(draws) < 20 and all(len(draw) == 2 for draw in draws)):
        raise AssertionError(f"{len(draws)} draws are left")


def kill_and_resume(scenario: str, path: Path, seed: int, duration: float) -> int:
    """Run to the end through up to four kills; how many hit a live process is returned."""
    dice = random.Random(seed)
    hits = 0
    for _ in range(dice.randint(1, 4)):
        process = start(run, scenario, str(path))
        time.sleep(dice.uniform(0, duration))
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
            hits += 1
        process.join()
        if (path / "run.json").exists():
            FolderStore(path)  # readable at any time
    process = start(run, scenario, str(path))
    process.join()
    assert process.exitcode == 0
    return hits
