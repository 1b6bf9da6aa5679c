"""Whether acceptance has stayed near what burn-in tuned it to.

A chain far off its target is still exact, but its settings do not suit the place where it is: burn-in ended too early, or the
chain has moved on since. The acceptance of a healthy chain fluctuates for hundreds of steps, so that its mean must be beyond

    low = max(a - 0.2, a / 2)   or   high = 1 - 0.3 (1 - a),   a the target,

by three standard errors (six where these are not settled). At the targets of the kernels, low is an energy error 1.3 to 2.4
times as large as intended (1.6 for a = 0.6, 2.4 for a = 0.85), high one of about a third.
"""

from __future__ import annotations

import math

__all__ = ["ENOUGH_STEPS", "limits", "off_target"]

ENOUGH_STEPS = 1000
"""Of all chains that are averaged over; fewer are not judged."""
_ERRORS = 3.0


def limits(target: float) -> tuple[float, float]:
    """The acceptance between which nothing is said.

    Example:
        >>> [round(x, 3) for x in (*limits(0.85), *limits(0.25))]
        [0.65, 0.955, 0.125, 0.775]
    """
    return max(target - 0.2, target / 2), 1 - 0.3 * (1 - target)


def off_target(mean: float, error: float, target: float | None) -> str | None:
    """What is wrong with this acceptance, and what to do, in words; None if it may be near its target."""
    if target is None or not math.isfinite(error):
        return None
    low, high = limits(target)
    says = f"acceptance is {mean:.2f} since burn-in, which tuned it to {target:.2f}: "
    if mean + _ERRORS * error < low:
        return says + (
            "the steps are too long where the chains are now. Repeat burn-in from there (start at the last draws), make it "
            "longer, or shorten the step"
        )
    if mean - _ERRORS * error > high:
        return says + (
            "the steps are shorter than necessary where the chains are now. Repeat burn-in from there (start at the last "
            "draws), or make it longer"
        )
    return None
