"""Langevin dynamics on minibatches: how wrong the spread of the draws is, by the order of the batches, with and without drag.

    python -m benchmarks.minibatches [--names digits diabetes cancer] [--time 60]

Three small networks with long HMC references (`benchmarks.networks`). 16 chains start from draws of the reference; A is
1 / (E g^2 b/n + prior precision) there, and h0 = (E |A^1/2 g|^2)^(-1/2) is the step that burn-in of `MinibatchLangevin` would
take. Friction 0.18. Measured: the mean over test inputs and classes of the standard deviation of the predictions, over that of
the reference, less 1, after a fifth of the time. Its Monte Carlo error is about 0.01 (chains, and times of one chain, are few).
Estimated: what `samplers.side_by_side` finds from the likelihoods of 64 training examples at h and h/2, with no reference.

"passes" are passes over the data for one unit of time, b / (n h); those of the exact `underdamped` are 1 / h at the step that
its own burn-in finds.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from adammcmc import AlwaysAccept, BurnIn, Density, kernels, warm_up
from adammcmc.samplers.side_by_side import compare
from adammcmc.target.data import as_data
from adammcmc.target.leaves import Leaves
from benchmarks.networks import NAMES, Problem, Reference, load_reference, problem

BATCHES = {"digits": 10, "diabetes": 10, "cancer": 13}
FRICTION = 0.18


class OnBatch(Density):
    """The posterior with the losses of a batch in the place of all."""

    def __init__(self, p: Problem, rows: tuple[Tensor, Tensor]) -> None:
        inputs, targets = rows
        batch, factor, self._precision = replace(p, inputs=inputs, targets=targets), len(p.inputs) / len(inputs), p.scales**-2

        def log_density(theta: Tensor) -> Tensor:
            losses = batch.losses(batch.forward(theta, inputs)).sum(1)
            return -factor * losses - 0.5 * (theta.square() * self._precision).sum(1)

        super().__init__(log_density)

    def prior_part(self, params: Leaves) -> Leaves | None:
        return tuple(x * self._precision for x in params)


def learnt(p: Problem, at: Tensor, batch_size: int) -> tuple[Tensor, float]:
    """A, and h0."""
    data, share = as_data((p.inputs, p.targets), batch_size, order="independent"), batch_size / len(p.inputs)
    gradients = [OnBatch(p, next(data)).evaluate((at,), with_grad=True).grad for _ in range(200)]
    squares = torch.stack([g[0].square().mean(0) for g in gradients if g is not None]).mean(0)
    scale = 1 / (squares * share + p.scales**-2)
    return scale, float((squares * scale).sum()) ** -0.5


def run(p: Problem, kernel: kernels.UnderdampedKernel, start: Tensor, batches: Iterator[tuple[Tensor, Tensor]], length: float):
    """Predictions at test inputs and likelihoods of 64 training examples, (chains, times, ...), after a fifth of the time."""
    generator, h = torch.Generator().manual_seed(1), float(kernel.step_size)  # type: ignore[arg-type]
    few = replace(p, inputs=p.inputs[:64], targets=p.targets[:64])
    state, num_steps = kernel.init(start, OnBatch(p, next(batches))), round(length / h)
    predictions, likelihoods = [], []
    for step in range(num_steps):
        state, _ = kernel.step(state._replace(here=None), OnBatch(p, next(batches)), generator)
        if step >= num_steps // 5 and step % max(1, num_steps // 200) == 0:
            predictions.append(p.predict(state.params))
            likelihoods.append(torch.exp(-few.losses(few.forward(state.params, few.inputs))))
    return torch.stack(predictions, 1), torch.stack(likelihoods, 1)


def wrong_by(predictions: Tensor, reference: Reference) -> float:
    return float(predictions.flatten(0, 1).std(0).mean() / reference.sd.mean()) - 1


def rows(name: str, length: float) -> Iterator[str]:
    """Of the table."""
    p, reference, size = problem(name), load_reference(name), BATCHES[name]
    n, start = len(p.inputs), reference.draws
    scale, h0 = learnt(p, start, size)
    likelihoods: dict[float, Tensor] = {}
    for factor in (0.5, 1.0, 2.0):
        h, cells = factor * h0, []
        drag = kernels.minibatch_langevin(h, FRICTION, noise_share=1 / (1 + size / n), preconditioner=scale)
        plain = kernels.underdamped(h, FRICTION, preconditioner=scale, acceptance=AlwaysAccept())
        for kernel, order in ((drag, "independent"), (plain, "independent"), (plain, "shuffled"), (plain, "palindrome")):
            found, likely = run(p, kernel, start, as_data((p.inputs, p.targets), size, order=order), length)
            cells.append(f"{wrong_by(found, reference):+.3f}")
            if kernel is drag:
                likelihoods[factor] = likely
        estimate = "-"
        if factor > 0.5:
            excess, error = compare(likelihoods[factor], likelihoods[factor / 2])
            estimate = f"{4 / 3 * excess:+.3f} +- {4 / 3 * error:.3f}"
        yield f"| {name}, n/b = {n // size} | {factor:g} h0 = {h:.2g} | {size / n / h:.1f} | {cells[0]} | {estimate} | " + (
            " | ".join(cells[1:]) + " |"
        )
    tuned, _ = warm_up(p.log_density, start, kernels.underdamped(1e-3), tune=BurnIn(num_steps=1500), progress=False)
    yield f"| {name}, exact | {float(tuned.step_size):.2g} | {1 / float(tuned.step_size):.1f} | | | | | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--time", type=float, default=60.0)
    arguments = parser.parse_args()
    began = time.process_time()
    print("| network | step | passes | drag | estimated | no drag | shuffled, no drag | palindrome, no drag |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.names:
        for row in rows(name, arguments.time):
            print(row, flush=True)
    print(f"{math.ceil(time.process_time() - began)} s of CPU time, torch {torch.__version__}")


if __name__ == "__main__":
    main()
