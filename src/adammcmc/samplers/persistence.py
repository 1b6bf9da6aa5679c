r"""How long a velocity is kept: groups of chains try different frictions in burn-in, and the best is frozen.

    cost of a friction = log(N / ESS), the median over the chains that try it, the mean over the slowest functions

ESS is that of N draws of one chain: a chain in a bad place shall not decide for all. The functions are U, coordinates, and
the distances of both from their medians; the slowest quarter counts. Each window has three groups, with the friction of the
last window, and the same divided and multiplied by 2.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adammcmc.samplers.diagnostics import ess_bulk

__all__ = ["Persistence"]

_FACTORS = (0.4, 1.0, 2.5)
_LEAST_CHAINS = 5  # of a group
_LEAST_VALUES = 100  # of each function and chain in a window
_RANGE = (0.03, 3.0)  # in units of 1 / A^1/2: nearly straight flights, nearly fresh velocities
_GAIN = 0.1  # in log cost, below which the friction stays


class Persistence:
    """The friction of every chain.

    Args:
        friction: to begin with.
    """

    def __init__(self, friction: float) -> None:
        self.friction = friction

    @staticmethod
    def can_tell(num_chains: int) -> bool:
        """Whether there are chains enough for groups."""
        return num_chains >= _LEAST_CHAINS * len(_FACTORS)

    def of_chains(self, num_chains: int) -> Tensor:
        """The friction that each chain tries, (chains,)."""
        factors = torch.tensor(_FACTORS, dtype=torch.float64)[torch.arange(num_chains) % len(_FACTORS)]
        return (self.friction * factors).clamp(*_RANGE)

    def learn(self, watched: Tensor) -> None:
        """Take the best of the frictions that were tried on functions (chains, draws, functions)."""
        if watched.shape[1] < _LEAST_VALUES:
            return
        functions = torch.cat([watched, (watched - watched.flatten(0, 1).median(0).values).abs()], 2)
        num_chains, num_draws, _ = functions.shape
        alone = functions.transpose(0, 1).flatten(1)[None]  # (1, draws, chains * functions)
        each = (num_draws / ess_bulk(alone)).log().view(num_chains, -1)
        times = torch.stack([each[i :: len(_FACTORS)].median(0).values for i in range(len(_FACTORS))])  # (groups, functions)
        times = times[:, times.isfinite().all(0)]
        if times.shape[1] == 0:
            return
        slowest = times.mean(0).topk(max(1, times.shape[1] // 4)).indices
        costs = times[:, slowest].mean(1)
        best = int(costs.argmin())
        if float(costs[_FACTORS.index(1.0)] - costs[best]) > _GAIN:
            self.friction = float(self.of_chains(len(_FACTORS))[best])
