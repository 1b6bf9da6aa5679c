"""Corrected stochastic MALA as a torch optimizer: it draws its batches itself and carries them along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from adammcmc import kernels
from adammcmc.errors import PerExampleLossRequired
from adammcmc.kernels.kernel import Kernel
from adammcmc.samplers.closure import Closure
from adammcmc.samplers.exact import MALA
from adammcmc.samplers.packing import Packing
from adammcmc.samplers.sampler import Common, Params
from adammcmc.target.priors import Prior

__all__ = ["CorrectedMALA"]


class CorrectedMALA(MALA):
    r"""Corrected stochastic MALA (Bieringer et al. 2023) as an optimizer, on pairs of weights and batch. **Approximate.**

        B' ~ Bernoulli(rho) for each example,  tau from a Langevin step on B,  accept (tau, B') by U(theta, B) - U(tau, B')
        p(theta) ~ prior(theta) * prod_i ( exp(-a l_i(theta)) + 1 - rho ),    a = lambda (2 - rho)

    It samples the second line exactly. That is the posterior only if lambda * loss is small or rho = 1. See
    `adammcmc.kernels.corrected_mala`, also for why it hardly moves on large data. It draws its own batches: `step` takes no
    closure, and ignores one that is passed. One step costs one forward and backward of about rho n examples.

    Args:
        params: as for any optimizer. Groups may differ in step_size and sigma.
        step_size: h; None finds it in burn-in.
        rho: the probability that an example is in the batch, in (0, 1].
        num_data: the number of training examples n.
        prior: required, and proper.
        examples: the training set as per-example losses, for example `TensorExamples(loss, inputs, targets)`.
        zeta: 1 is the theory's correction for the size of the batch, 0 none.
        compensate: whether a = lambda (2 - rho), or lambda.
        sigma: as in `MALA`, and so are `sigma_along` and `preconditioner`.
        **common: see `Sampler`; there is no `acceptance` and no `fixed_data`.
    """

    _not_taken = frozenset(("acceptance", "fixed_data"))

    def __init__(
        self,
        params: Params,
        step_size: float | None = None,
        *,
        rho: float,
        num_data: int,
        prior: Prior,
        zeta: float = 1.0,
        compensate: bool = True,
        sigma: float | None = None,
        sigma_along: float = 0.0,
        preconditioner: Sequence[Tensor] | None = None,
        **common: Unpack[Common],
    ) -> None:
        if common.get("examples") is None:
            raise PerExampleLossRequired(
                "CorrectedMALA draws batches of its own: pass `examples=TensorExamples(loss, inputs, targets)`."
            )
        self.rho, self.zeta, self.compensate = rho, zeta, compensate
        super().__init__(
            params,
            step_size,
            num_data=num_data,
            prior=prior,
            sigma=sigma,
            sigma_along=sigma_along,
            preconditioner=preconditioner,
            **common,
        )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure | Sequence[Closure] | Callable[[Any], Tensor] | None = None, batch: Any = None
    ) -> Tensor:
        """One transition. Returns the mean loss of the carried batch at the weights before it (NaN if it is empty).

        What a training loop passes is not called: the batches come from `examples`.
        """
        return self._transition(lambda: self.chains.ordinary_step([], None))

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
