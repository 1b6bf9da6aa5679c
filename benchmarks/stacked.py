"""Chains at once against one after the other: transitions a second, summed over the chains. make bench-stacked

Both ways take the same steps of Algorithm 1 through `sample`, on batches.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from adammcmc import AdamMCMC, Gaussian, sample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def transitions_per_second(width: int, num_chains: int, num_steps: int, *, stacked: bool) -> float:
    """Of all chains together, on an MLP of two hidden layers; the start of the run is taken out by a shorter one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)).to(DEVICE)
    data = torch.randn(4096, 16, device=DEVICE), torch.randint(4, (4096,), device=DEVICE)
    sampler = partial(AdamMCMC, lr=1e-4, sigma=1e-4, sigma_along=2.0, prior=Gaussian())

    def seconds(steps: int) -> float:
        began = time.perf_counter()
        options: dict[str, Any] = {"num_draws": 1, "gap": steps, "burn_in": 0, "batch_size": 128, "progress": False}
        sample(model, data, F.cross_entropy, sampler=sampler, num_chains=num_chains, stacked=stacked, **options)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    few = max(1, num_steps // 10)
    seconds(few)
    return num_chains * (num_steps - few) / (seconds(num_steps) - seconds(few))


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 4, 16, 64] if DEVICE == "cpu" else [1, 16, 64, 256])
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__} on {DEVICE}, {torch.get_num_threads()} thread(s): transitions a second")
    print("| width | chains | one after the other | at once | ratio |\n|---|---|---|---|---|")
    for width in arguments.widths:
        for num_chains in arguments.chains:
            alone = transitions_per_second(width, min(num_chains, 4), arguments.steps, stacked=False)
            many = transitions_per_second(width, num_chains, arguments.steps, stacked=True)
            print(f"| {width} | {num_chains} | {alone:,.0f} | {many:,.0f} | {many / alone:.1f} |", flush=True)


if __name__ == "__main__":
    main()
