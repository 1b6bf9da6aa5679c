"""Metropolis with a penalty for the noise of the ratio."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from adammcmc.acceptance.comparison import AcceptanceTest, Comparison, Verdict
from adammcmc.acceptance.metropolis import decisive, metropolis
from adammcmc.acceptance.subsample import Estimate, check_batch_size, estimate
from adammcmc.errors import PerExampleLossRequired
from adammcmc.target.randomness import Randomness

__all__ = ["Penalty"]


@dataclass(frozen=True)
class Penalty(AcceptanceTest):
    r"""Metropolis with a penalty for noise (Ceperley and Dewing 1999; Kawasaki and Holzmann 2022).

        accept with  min(1, exp(Yhat - s^2 / 2))

    For normal Yhat ~ N(Y, s^2) with known s detailed balance holds exactly on average: E a(Y) / E a(-Y) = e^Y, with
    E a(Y) = Phi(Y/s - s/2) + e^Y Phi(-Y/s - s/2). s is estimated from the losses of the batch, so that it is approximate:
    good for batches of 200 or more and s up to about 2. It rejects the more the larger s is (acceptance 2 Phi(-s/2) at Y = 0);
    take batches so large that s is about 1. Data: the batch.

    Args:
        batch_size: None decides on the batch that the step's gradient was taken on, whose closure must return the losses of
            the examples; the move then depends on the noise of its own test (for Langevin kernels). A number draws so many
            examples for the decision alone, which needs `examples`.
    """

    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            check_batch_size(self.batch_size)

    @property
    def needs_examples(self) -> bool:
        return self.batch_size is not None

    reads_device = needs_examples

    def __call__(self, comparison: Comparison, carry: None, generator: Randomness) -> tuple[Verdict, None]:
        log_uniform = decisive(comparison, generator)
        found = self._on_batch(comparison) if self.batch_size is None else estimate(comparison, generator, self.batch_size)
        y, s = found.log_ratio, found.noise
        verdict = metropolis(comparison, y - s.square() / 2, log_uniform, found.num_examples)
        return verdict._replace(log_ratio=y, is_current_finite=found.is_current_finite, log_ratio_noise=s), None

    def _on_batch(self, comparison: Comparison) -> Estimate:
        y, s, size = comparison.batch_log_ratio(), comparison.batch_noise(), comparison.batch_size
        if s is None and (size is None or size < 2):
            raise PerExampleLossRequired(
                "Penalty() needs the noise of the log ratio, and the closure returned only the mean loss of the batch. Return "
                'the losses of the examples (reduction="none").'
            )
        # (outside of the prior nothing was estimated)
        return Estimate(y, torch.zeros_like(y) if s is None else s, torch.full_like(y, size or torch.nan), None)

    def approximation(self, *, fixed_data: bool) -> str | None:
        return None if fixed_data else "the noise of the log ratio is taken for normal, of the measured size (penalty)"

    def __str__(self) -> str:
        return "Metropolis with penalty on " + ("the batch" if self.batch_size is None else f"{self.batch_size} examples")
