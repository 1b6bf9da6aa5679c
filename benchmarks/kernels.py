"""How much a gradient buys: effective draws per gradient of every exact kernel, on three targets.

    python -m benchmarks.kernels [--chains 64] [--steps 4000]

Targets: an isotropic Gaussian in 100 dimensions; a Gaussian in 50 with curvatures from 1 to 10,000; Bayesian logistic
regression on the breast cancer data (31 weights, N(0, 1) prior). Each kernel adapts its scale (and its preconditioner, where it
says so) over 3,000 steps from zero, is frozen, and runs; the chain of Theorem 1 starts where the underdamped one ended,
because its momentum spread is measured there. IAT is the integrated autocorrelation time of U in steps; the second number is
the effective number of draws per 1,000 gradients of the slowest coordinate. Below 1 it is an upper bound: the run was short.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adammcmc import BurnIn, Density, kernels, sample_density, warm_up
from adammcmc.kernels.proposal import Prolate
from adammcmc.samplers.adaptation import momentum_spread
from benchmarks.networks import effective_size

CURVATURE = torch.logspace(0, 4, 50, dtype=torch.float64)


def isotropic(x: Tensor) -> Tensor:
    return -0.5 * x.square().sum(1)


def stretched(x: Tensor) -> Tensor:
    return -0.5 * (x.square() * CURVATURE).sum(1)


def logistic() -> Callable[[Tensor], Tensor]:
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    inputs, targets = torch.tensor(data.data), torch.tensor(data.target).double()
    inputs = torch.cat([(inputs - inputs.mean(0)) / inputs.std(0), torch.ones(len(inputs), 1, dtype=torch.float64)], 1)

    def log_density(w: Tensor) -> Tensor:
        logits = w @ inputs.T
        losses = F.binary_cross_entropy_with_logits(logits, targets.expand_as(logits), reduction="none")
        return -losses.sum(1) - 0.5 * w.square().sum(1)

    return log_density


TARGETS: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], int]] = {
    "isotropic, 100": (lambda: isotropic, 100),
    "stretched, 50": (lambda: stretched, 50),
    "logistic, 31": (logistic, 31),
}


def contenders(log_density: Callable[[Tensor], Tensor], initial: Tensor) -> dict[str, tuple[Any, Tensor]]:
    """Each kernel, adapted, and where its chains are."""

    def tuned(kernel: Any, start: Tensor = initial, **options: Any) -> tuple[Any, Tensor]:
        return warm_up(log_density, start, kernel, tune=BurnIn(num_steps=3000, **options), progress=False)

    underdamped, at_rest = tuned(kernels.underdamped(1e-2))
    walk, after_walk = tuned(kernels.adam_mcmc(0.0, sigma=1e-2), target_acceptance=0.25, proposal_acceptance=None)
    sigma = walk.proposal.sigma
    density = Density(log_density)
    here = density.evaluate((at_rest,), with_grad=True)
    lr = 0.2 * sigma
    spread = momentum_spread(density, (at_rest,), here, Prolate(sigma), lr, torch.Generator().manual_seed(0))
    exact = kernels.exact_adam_mcmc(lr, sigma=sigma, momentum_spread=spread)
    return {
        "`underdamped`": (underdamped, at_rest),
        "`underdamped`, fresh uniform": (replace(underdamped, persistent_uniform=False), at_rest),
        "`underdamped`, A = 1": tuned(kernels.underdamped(1e-2), learn_preconditioner=False),
        "`microcanonical`": tuned(kernels.microcanonical(1e-2)),
        "`mala`, preconditioned": tuned(kernels.mala(1e-4)),
        "`mala`": tuned(kernels.mala(1e-4), learn_preconditioner=False),
        "`exact_adam_mcmc`": tuned(exact, at_rest),
        "random walk": (walk, after_walk),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4000)
    arguments = parser.parse_args()
    cells: dict[str, list[str]] = {}
    for make, dim in TARGETS.values():
        log_density = make()
        initial = torch.zeros(arguments.chains, dim, dtype=torch.float64)
        for name, (kernel, start) in contenders(log_density, initial).items():
            draws, info = sample_density(log_density, start, kernel, num_steps=arguments.steps, gap=2, seed=1, progress=False)
            total = arguments.chains * arguments.steps
            iat = total / float(effective_size(info.potential[:, :, None]))
            slowest = 1e3 * float(effective_size(draws).min()) / total
            cells.setdefault(name, []).append(f"{iat:.0f} | {slowest:.2f} | {float(info.acceptance_rate.mean()):.2f}")
    print("| kernel | " + " | ".join(f"{name}: IAT of U | ESS per 1,000 gradients | acceptance" for name in TARGETS) + " |")
    print("|---" * (1 + 3 * len(TARGETS)) + "|")
    for name, row in cells.items():
        print(f"| {name} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
