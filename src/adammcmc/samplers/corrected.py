"""The optimizer's door to corrected stochastic MALA, which draws its batches itself and carries them along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adammcmc import kernels
from adammcmc.kernels.corrected import CarriedBatch
from adammcmc.kernels.kernel import Kernel
from adammcmc.samplers.adaptation import BurnIn
from adammcmc.samplers.closure import Closure
from adammcmc.samplers.exact import MALA
from adammcmc.samplers.layers import BatchNormPolicy
from adammcmc.samplers.packing import Packing
from adammcmc.samplers.sampler import Params
from adammcmc.target.data import Examples
from adammcmc.target.target import Prior

__all__ = ["CorrectedMALA"]


class CorrectedMALA(MALA):
    r"""Corrected stochastic MALA (Bieringer et al. 2023) as an optimizer, on pairs of weights and batch. **Approximate.**

        B' ~ Bernoulli(rho) for each example,  tau from a Langevin step on B,  accept (tau, B') by U(theta, B) - U(tau, B')
        p(theta) ~ prior(theta) * prod_i ( exp(-a l_i(theta)) + 1 - rho ),    a = lambda (2 - rho)

    The second line is what it samples, exactly; the posterior it is only where lambda * loss is small, or rho = 1. See
    `adammcmc.kernels.corrected_mala`, also for why it hardly moves on large data. The batches are its own: `step` takes no
    closure, or one that it does not call. One step costs one forward and backward of about rho n examples.

    Args:
        params: as for any optimizer. Groups may differ in step_size and sigma.
        step_size: h; None finds it in burn-in.
        rho: the probability of an example to be in a batch, in (0, 1].
        num_data: the number of training examples n.
        prior: required, and proper.
        examples: the training set as losses of single examples, for example `TensorExamples(loss, inputs, targets)`.
        zeta: 1 is the theory's correction for the size of the batch, 0 none.
        compensate: whether a = lambda (2 - rho), or lambda.
        sigma: as in `MALA`, and so are `sigma_along`, `preconditioner`, `inverse_temperature`, `batch_norm`, `burn_in` and
            `generator`.
    """

    def __init__(
        self,
        params: Params,
        step_size: float | None = None,
        *,
        rho: float,
        num_data: int,
        prior: Prior,
        examples: Examples,
        zeta: float = 1.0,
        compensate: bool = True,
        sigma: float | None = None,
        sigma_along: float = 0.0,
        preconditioner: Sequence[Tensor] | None = None,
        inverse_temperature: float = 1.0,
        batch_norm: BatchNormPolicy = "batch",
        burn_in: BurnIn | int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.rho, self.zeta, self.compensate = rho, zeta, compensate
        super().__init__(
            params,
            step_size,
            num_data=num_data,
            prior=prior,
            sigma=sigma,
            sigma_along=sigma_along,
            preconditioner=preconditioner,
            inverse_temperature=inverse_temperature,
            examples=examples,
            batch_norm=batch_norm,
            burn_in=burn_in,
            generator=generator,
        )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure | Sequence[Closure] | Callable[[Any], Tensor] | None = None, batch: Any = None
    ) -> Tensor:
        """One transition. Returns the mean loss of the carried batch at the weights before it (NaN if it is empty).

        What a training loop passes is not called: the batches come from `examples`.
        """
        return self._usual_step([])

    def _kernel(self, packing: Packing) -> Kernel:
        return kernels.corrected_mala(
            [float(lr) for lr in self._options("lr")],
            self.rho,
            zeta=self.zeta,
            compensate=self.compensate,
            sigma=list(self._sigmas()),
            sigma_along=self._sigma_along(),
            preconditioner=self._preconditioner(packing),
        )

    def _must_recheck(self) -> bool:
        return False  # there is no closure to ask

    def _remember(self, fields: tuple[Any, ...]) -> CarriedBatch:
        return CarriedBatch(*fields)
