"""The cost of a step on the CPU, as ratios measured in one run: Adam, the ideal, ours.

    python -m benchmarks.step_cost [--threads 1] [--repeats 100]

The ideal is an Adam step plus one forward of the same batch: what Algorithm 1 must at least evaluate. The network is an MLP
64-w-w-10 with cross entropy on batches of 512. The versions take turns within the run, so that they meet the same machine;
each number is a median. Fixed data are measured in a second round, with Adam again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from adammcmc import MALA, AdamMCMC, Gaussian

WIDTHS = (128, 512, 1024)  # 26k, 301k and 1.1M parameters
BATCH = 512
FIXED = ("AdamMCMC, fixed data", "MALA, fixed data")


def network(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def contenders(width: int) -> tuple[int, dict[str, Callable[[], object]]]:
    """The number of parameters, and one function for each version, that takes one step."""
    inputs, targets = torch.randn(BATCH, 64), torch.randint(10, (BATCH,))
    adam_model, our_model, fixed_model, mala_model = (network(width) for _ in range(4))
    adam = torch.optim.Adam(adam_model.parameters())
    options = {"num_data": 100_000, "sigma": 3e-4, "sigma_along": 2.0}
    ours = AdamMCMC(our_model.parameters(), lr=1e-3, **options)
    fixed = AdamMCMC(fixed_model.parameters(), lr=1e-3, fixed_data=True, **options)
    mala = MALA(mala_model.parameters(), 1e-9, num_data=100_000, prior=Gaussian(), fixed_data=True)

    def adam_step() -> None:
        adam.zero_grad()
        F.cross_entropy(adam_model(inputs), targets).backward()
        adam.step()

    def ideal() -> None:
        adam_step()
        with torch.no_grad():
            F.cross_entropy(adam_model(inputs), targets)

    return sum(p.numel() for p in adam_model.parameters()), {
        "Adam": adam_step,
        "ideal": ideal,
        "AdamMCMC": lambda: ours.step(lambda: F.cross_entropy(our_model(inputs), targets)),
        "AdamMCMC, fixed data": lambda: fixed.step(lambda: F.cross_entropy(fixed_model(inputs), targets)),
        "MALA, fixed data": lambda: mala.step(lambda: F.cross_entropy(mala_model(inputs), targets)),
    }


def medians(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each function; they take turns."""
    for function in functions.values():
        for _ in range(5):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), batch {BATCH}, medians of {arguments.repeats}\n")
    print("| P | Adam, ms | ideal / Adam | AdamMCMC / Adam | AdamMCMC / ideal | fixed data / Adam | MALA, fixed data / Adam |")
    print("|---|---|---|---|---|---|---|")
    for width in WIDTHS:
        num_params, functions = contenders(width)
        t = medians({name: functions[name] for name in ("Adam", "ideal", "AdamMCMC")}, arguments.repeats)
        fixed = medians({name: functions[name] for name in ("Adam", *FIXED)}, arguments.repeats)
        cells = [
            t["ideal"] / t["Adam"],
            t["AdamMCMC"] / t["Adam"],
            t["AdamMCMC"] / t["ideal"],
            *(fixed[name] / fixed["Adam"] for name in FIXED),
        ]
        print(f"| {num_params:,} | {1e3 * t['Adam']:.2f} | " + " | ".join(f"{x:.2f}" for x in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
