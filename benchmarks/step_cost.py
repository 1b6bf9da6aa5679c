"""The cost of a step on the CPU, as ratios measured in one run: Adam, the ideal, ours.

    python -m benchmarks.step_cost [--threads 1] [--repeats 100] [--processes 5]

The ideal is an Adam step plus one forward of the same batch: what Algorithm 1 must at least evaluate. The network is an MLP
64-w-w-10 with cross entropy on batches of 512. The versions take turns within a process, so that they meet the same machine;
fixed data are measured in a second round, with Adam again. Where a process finds its memory moves all its ratios by a few
percent, so several processes measure, one after the other: each number is a median over processes of ratios of medians over
steps, and the range over processes is given for the one that matters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
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


def measure(repeats: int) -> dict[str, list[float]]:
    """For each number of parameters: Adam in ms, then the ratios of the table."""
    rows = {}
    for width in WIDTHS:
        num_params, functions = contenders(width)
        t = medians({name: functions[name] for name in ("Adam", "ideal", "AdamMCMC")}, repeats)
        fixed = medians({name: functions[name] for name in ("Adam", *FIXED)}, repeats)
        rows[f"{num_params:,}"] = [
            1e3 * t["Adam"],
            t["ideal"] / t["Adam"],
            t["AdamMCMC"] / t["Adam"],
            t["AdamMCMC"] / t["ideal"],
            *(fixed[name] / fixed["Adam"] for name in FIXED),
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="measure in this process and print numbers")
    arguments = parser.parse_args()
    if arguments.json:
        torch.set_num_threads(arguments.threads)
        print(json.dumps(measure(arguments.repeats)))
        return
    options = ["--json", "--threads", str(arguments.threads), "--repeats", str(arguments.repeats)]
    command = [sys.executable, "-m", "benchmarks.step_cost", *options]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(arguments.processes)
    ]
    print(
        f"torch {torch.__version__}, {arguments.threads} thread(s), batch {BATCH}, medians of {arguments.repeats} steps and "
        f"{arguments.processes} processes\n"
    )
    names = "ideal / Adam | AdamMCMC / Adam | AdamMCMC / ideal | fixed data / Adam | MALA, fixed data / Adam"
    print(f"| P | Adam, ms | {names} |")
    print("|---|---|---|---|---|---|---|")
    for num_params in runs[0]:
        columns = list(zip(*(run[num_params] for run in runs), strict=True))
        cells = [f"{statistics.median(column):.2f}" for column in columns]
        cells[3] += f" ({min(columns[3]):.2f} to {max(columns[3]):.2f})"
        print(f"| {num_params} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
