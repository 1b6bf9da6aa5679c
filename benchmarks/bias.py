"""What Algorithm 1 really samples: its bias on an isotropic Gaussian, beside an exact kernel in the same harness.

    python -m benchmarks.bias [--chains 200] [--steps 20000]

Target: U = |theta|^2 / 2 in P dimensions, so 2 E[U] / P = 1. Algorithm 1: beta1 = beta2 = 0.99, sigma = 1.3 / sqrt(P),
lr = 0.35 sigma, full gradients. Chains start from exact draws; the first half of the run is dropped. The standard error comes
from the spread between the chains.
"""

from __future__ import annotations

import argparse
import math

import torch

from adammcmc import Kernel, kernels, sample_density

DIMENSIONS = (5, 20, 100, 400)


def log_density(theta: torch.Tensor) -> torch.Tensor:
    return -0.5 * theta.square().sum(1)


def algorithm_1(num_params: int, sigma_along: float, beta: float = 0.99) -> Kernel:
    sigma = 1.3 / math.sqrt(num_params)
    return kernels.adam_mcmc(0.35 * sigma, (beta, beta), sigma=sigma, sigma_along=sigma_along)


def exact_mala(num_params: int) -> Kernel:
    return kernels.mala(step_size=1.2 * num_params ** (-1 / 3))


def energy(kernel: Kernel, num_params: int, num_chains: int, num_steps: int, seed: int = 1) -> tuple[float, float, float]:
    """2 E[U] / P, its standard error, and the acceptance rate."""
    generator = torch.Generator().manual_seed(seed)
    initial = torch.randn(num_chains, num_params, dtype=torch.float64, generator=generator)
    draws, info = sample_density(
        log_density, initial, kernel, num_steps=num_steps, burn_in=num_steps // 2, gap=10, seed=generator
    )
    per_chain = draws.square().mean((1, 2))
    error = per_chain.std() / math.sqrt(num_chains)
    return float(per_chain.mean()), float(error), float(info.acceptance_rate.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20_000)
    arguments = parser.parse_args()
    print("| P | Algorithm 1, sigma_along = 1 | acceptance | sigma_along = 3 | acceptance | exact: `mala` | acceptance |")
    print("|---|---|---|---|---|---|---|")
    for num_params in DIMENSIONS:
        rows = [algorithm_1(num_params, 1.0), algorithm_1(num_params, 3.0), exact_mala(num_params)]
        cells = [energy(kernel, num_params, arguments.chains, arguments.steps) for kernel in rows]
        print(f"| {num_params} | " + " | ".join(f"{m:.3f} +- {e:.3f} | {a:.2f}" for m, e, a in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
