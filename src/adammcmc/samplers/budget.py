"""The wall time of burn-in, and its limit."""

from __future__ import annotations

import math
from time import monotonic

__all__ = ["Budget"]

_LATE = 0.85  # of the limit: the rest is for the last window


class Budget:
    """How long burn-in has taken, from its first step to its last.

    Args:
        limit: in seconds; None is none.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self._spent, self._began = 0.0, math.nan  # seconds before the clock was started, and when that was

    def begin(self) -> None:
        """Start the clock, unless it runs already."""
        if math.isnan(self._began):
            self._began = monotonic()

    def stop(self) -> None:
        """Stop the clock: burn-in is over."""
        self._spent, self._began = self.seconds, math.nan

    @property
    def seconds(self) -> float:
        """So far; NaN if a part of it was not recorded."""
        return self._spent + (0.0 if math.isnan(self._began) else monotonic() - self._began)

    @property
    def is_late(self) -> bool:
        """Whether the last window must begin."""
        return self.limit is not None and self.seconds > _LATE * self.limit

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.limit is not None and self.seconds >= self.limit

    def steps(self, taken: int, most: int) -> int:
        """How many more steps fit into the limit at the speed of those `taken`: at least one, and at most so many."""
        if self.limit is None or taken < 1 or not self.seconds > 0:
            return most
        return max(1, min(most, int(taken * (self.limit - self.seconds) / self.seconds)))

    def state(self) -> float:
        """What a checkpoint stores: wall time is no part of a chain, unless it ends the burn-in."""
        return 0.0 if self.limit is None else self.seconds

    def restore(self, seconds: float, *, is_new: bool) -> None:
        """Continue from what was saved; `is_new`: before the first step."""
        self._spent, self._began = seconds if is_new or self.limit is not None else math.nan, math.nan
