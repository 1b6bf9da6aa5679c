r"""The first part of burn-in: steps without a test, each chain with a step of its own, until U falls no further.

The dynamics has constant speed (`kernels.approach`). The energy error of a step, Y, is its measure of length:

    log h <- log h - gain clip(log(Y^2 / (v d)), -2, 2) / 6,    gain from 1 to 1/25,    d numbers of a chain

so that Y^2, which grows as h^6, is about v d. (Many tiny errors must not outweigh a large one: hence the clip.) v is 0.5
until U is level, then falls to 0.1 over a last stretch, which leaves less of the bias of long steps. Windows grow by half
until the change of U from one to the next (the median over the chains) is small compared with the natural spread of U,
sqrt(d / 2), and no chain far above the others is still falling.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from adammcmc.kernels.approach import first_step

__all__ = ["Approach"]

_VARIANCES = 0.5, 0.1
_GAINS = 1.0, 0.04
_CLIP = 2.0
_PATIENCE = 3
_FAR = 10.0  # natural spreads of U above the median: a chain in a bad place


class Approach:
    """The steps of the chains, and when the approach ends.

    Args:
        num_params: d.
        max_steps: at most so many steps, the last half of which shorten the steps.
        window: steps of the first window.
    """

    def __init__(self, num_params: int, max_steps: int, window: int = 50) -> None:
        self.variances = _VARIANCES
        """v until U is level, and at the end."""
        self.max_steps, self.step, self.is_done, self.is_level = max_steps, 0, False, False
        self._dim, self._natural = num_params, math.sqrt(num_params / 2)
        self._length, self._in_window = min(window, max(1, max_steps // 4)), 0
        self._log_steps: Tensor | None = None  # (chains,), of h
        self._sum: Tensor | None = None
        self._means: Tensor | None = None  # of U in the last window, (chains,)
        self._level_at: int | None = None  # the step from which on most chains are level
        self._last_stretch: tuple[int, int] | None = None  # its first step, and the one after its last
        self.trend: list[tuple[int, float]] = []
        """(step, median over the chains of U), window by window."""
        self.has_new_window = False

    def steps(self, like: Tensor, num_chains: int) -> Tensor:
        """h of each chain, on the device of `like`."""
        if self._log_steps is None:
            self._log_steps = torch.full((num_chains,), math.log(first_step(self._dim)), dtype=torch.float64)
        return self._log_steps.exp().to(like.device)

    @property
    def step_size(self) -> float:
        """h, its geometric mean over the chains."""
        assert self._log_steps is not None
        return math.exp(float(self._log_steps.mean()))

    @property
    def num_left(self) -> int:
        """Steps until the end, as far as it is known."""
        return self.max_steps if self._last_stretch is None else self._last_stretch[1] - self.step

    def rescale(self, log_factor: float) -> None:
        """The unit of the steps has changed."""
        assert self._log_steps is not None
        self._log_steps += log_factor

    @property
    def is_in_last_stretch(self) -> bool:
        """Whether U is level, or the steps are running out."""
        return self._last_stretch is not None

    @property
    def _variance(self) -> float:
        high, low = self.variances
        if self._last_stretch is None:
            return high
        first, end = self._last_stretch
        return high + (low - high) * min(1.0, (self.step - first) / max(1, end - first))

    def observe(self, log_ratio: Tensor, potential: Tensor) -> None:
        """Take in the energy error and U of each chain after a step."""
        assert self._log_steps is not None
        error = log_ratio.double().cpu().nan_to_num(nan=1e3, posinf=1e3, neginf=-1e3)
        self.step, self._in_window = self.step + 1, self._in_window + 1
        largest, smallest = _GAINS
        gain = max(smallest, largest / (1 + self.step / 5))
        excess = (error.square() / (self._variance * self._dim)).clamp(1e-9, 1e9).log()
        self._log_steps = self._log_steps - gain * excess.clamp(-_CLIP, _CLIP) / 6
        now = potential.double().cpu()
        self._sum = now if self._sum is None else self._sum + now
        self.has_new_window = self._in_window >= self._length
        if self.has_new_window:
            self._end_of_window()
        if self._last_stretch is None and self.step >= self.max_steps // 2:
            self._last_stretch = self.step, self.max_steps
        self.is_done = self._last_stretch is not None and self.step >= self._last_stretch[1]

    def _end_of_window(self) -> None:
        assert self._sum is not None
        means = self._sum / self._in_window
        self.trend.append((self.step, float(means.nanmedian())))
        if self._means is not None and self._last_stretch is None:
            change = means - self._means
            is_far = means > means.nanmedian() + _FAR * self._natural
            still_falls = bool((is_far & (change < -self._natural)).any())
            # the median over many chains is known well, U of one or two fluctuates by itself
            allowed = (0.5 if len(means) > 3 else 1.0) * self._natural
            if float(change.nanmedian().abs()) >= allowed:
                self._level_at = None
            elif self._level_at is None:
                self._level_at = self.step
            # chains that are far away are given three times as long as most chains took
            self.is_level = self._level_at is not None and (not still_falls or self.step >= _PATIENCE * self._level_at)
            if self.is_level:
                self._last_stretch = self.step, min(self.max_steps, self.step + max(50, self.step // 2))
        self._means, self._sum, self._in_window = means, None, 0
        self._length = math.ceil(1.5 * self._length)

    def state_dict(self) -> dict[str, Any]:
        """The state as numbers, lists and tensors."""
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        tensors = {key: value.cpu() for key, value in state.items() if isinstance(value, Tensor)}
        stretch = state["_last_stretch"]
        lists = {"variances": tuple(state["variances"]), "trend": [tuple(x) for x in state["trend"]]}
        self.__dict__.update({**state, **tensors, **lists, "_last_stretch": None if stretch is None else tuple(stretch)})
