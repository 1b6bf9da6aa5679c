"""The first part of burn-in: constant-speed steps without a test, which leave a bad place faster than any exact kernel.

Nothing here samples the target. A chain far from its bulk, or at an optimum, needs steps that are long compared with those
of a Metropolis test; at constant speed they neither heat it nor stop at a steep slope. `samplers.approach` finds their
lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from adammcmc.acceptance import AcceptanceTest, Comparison, Verdict
from adammcmc.kernels.hamiltonian import UnderdampedKernel
from adammcmc.kernels.microcanonical import MicrocanonicalKernel
from adammcmc.kernels.scaling import Scaling
from adammcmc.target.leaves import Leaves, is_finite
from adammcmc.target.randomness import Randomness

__all__ = ["FRICTION", "NoTest", "approaching"]

FRICTION = 1.0
"""Of the direction, in units of A^1/2."""
_LARGEST_ERROR = 1000.0


@dataclass(frozen=True)
class NoTest(AcceptanceTest):
    """Takes every move whose energy error is finite and not absurd (U - U' - K > -1000), and reports it as Y."""

    def __call__(self, comparison: Comparison, carry: None, generator: Randomness) -> tuple[Verdict, None]:
        y = comparison.log_q_ratio() - comparison.potential.compare(comparison.here, comparison.there())
        is_sane = is_finite(y) & (y > -_LARGEST_ERROR)
        rate = y.clamp(max=0).exp().nan_to_num(nan=0.0)  # of a Metropolis test, for information
        used = torch.zeros_like(y)
        return Verdict(is_sane & comparison.may_move, rate, y, is_finite(y), used), None

    def approximation(self, *, fixed_data: bool) -> str | None:
        return "no test during the first part of burn-in"

    def __str__(self) -> str:
        return "no test (burn-in)"


def approaching(kernel: UnderdampedKernel, steps: Tensor, scaling: Leaves | Scaling | None) -> MicrocanonicalKernel:
    """Constant-speed dynamics with a step for each chain, and a direction that is kept for a length of 1 (1 / h steps).

    Args:
        kernel: whose memory it takes over and leaves.
        steps: h, (chains,), in units of A^1/2.
        scaling: A.
    """
    structure = None if isinstance(scaling, Scaling) else kernel.structure
    return MicrocanonicalKernel(steps, FRICTION, NoTest(), 1, False, scaling, structure)


def first_step(num_params: int) -> float:
    """h before anything is known: a length of 0.02 in all, as in published recipes of this dynamics."""
    return 0.02 / math.sqrt(num_params)
