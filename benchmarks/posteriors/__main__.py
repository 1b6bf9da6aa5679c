"""See `benchmarks.posteriors`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

# one thread: these arrays are small
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import adammcmc
import benchmarks.posteriors as package
from benchmarks.posteriors import compare, reference
from benchmarks.posteriors.table import TARGETS


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=package.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("reference")
    first.add_argument("--seconds", type=float, default=100.0, help="of sampling, for each target")
    second = commands.add_parser("nuts")
    second.add_argument("--steps", type=int, default=2000, help="of our chains, after warm-up")
    second.add_argument("--samplers", nargs="+", choices=list(compare.SAMPLERS), default=list(compare.SAMPLERS))
    second.add_argument("--seed", type=int, default=0)
    second.add_argument("--jitter", type=float, help="of our kernel's steps, instead of the default")
    second.add_argument("--friction", type=float, help="of our kernel, instead of tuning it")
    second.add_argument("--output", type=Path, default=compare.RESULTS)
    for command in (first, second):
        command.add_argument("--only", nargs="+", choices=list(TARGETS), default=list(TARGETS), metavar="NAME")
    given = parser.parse_args(arguments)
    if given.command == "reference":
        reference.make(given.only, seconds=given.seconds)
    else:
        kernel = None
        if given.jitter is not None or given.friction is not None:
            kernel = adammcmc.kernels.microcanonical(0.1, given.friction, jitter=0.25 if given.jitter is None else given.jitter)
        given.output.parent.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)
        compare.compare(given.only, given.samplers, steps=given.steps, seed=given.seed, output=given.output, kernel=kernel)


if __name__ == "__main__":
    main()
