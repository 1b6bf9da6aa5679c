"""The paper's settings in the units of this library."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["PaperSettings", "from_paper"]


class PaperSettings(NamedTuple):
    """The paper's nominal settings in our units; pass them to `AdamMCMC` by these names."""

    inverse_temperature: float
    sigma: float
    sigma_along: float


def from_paper(
    lam: float,
    sigma: float,
    sigma_delta: float,
    *,
    num_params: int,
    num_data: int,
    loss: str,
    batch_size: int | None = None,
) -> PaperSettings:
    """Convert the paper's nominal lambda, sigma and sigma_Delta into our units.

    The code released with the paper divides sigma and sigma_Delta by sqrt(P). The meaning of its lambda depends on the
    loss it multiplies: `loss="mean"` (the released code: mean over the batch) gives lambda / n, `loss="batch_sum"`
    gives lambda * batch_size / n, and `loss="data_sum"` gives lambda itself.

    Example:
        >>> s = from_paper(1.0, 0.2, 3661.6, num_params=366_160, num_data=1_200_000, loss="mean")
        >>> f"{s.inverse_temperature:.3g} {s.sigma:.3g} {s.sigma_along:.3g}"
        '8.33e-07 0.000331 6.05'
    """
    if loss == "batch_sum" and batch_size is None:
        raise ValueError('`batch_size` is needed with loss="batch_sum".')
    per_example = {"mean": 1 / num_data, "batch_sum": (batch_size or 0) / num_data, "data_sum": 1.0}
    if loss not in per_example:
        raise ValueError(f"`loss` must be one of {sorted(per_example)}, got {loss!r}.")
    root = math.sqrt(num_params)
    return PaperSettings(lam * per_example[loss], sigma / root, sigma_delta / root)
