"""Exact chains with forces from batches: `AmortisedLangevin`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Unpack

from adammcmc import kernels
from adammcmc.kernels.kernel import ChainState, Kernel
from adammcmc.samplers.exact import Metric, Underdamped
from adammcmc.samplers.forces import Forces
from adammcmc.samplers.packing import Packing
from adammcmc.samplers.sampler import Common, Params
from adammcmc.target.priors import Prior

__all__ = ["AmortisedLangevin"]


class AmortisedLangevin(Underdamped):
    r"""Langevin dynamics with forces from batches, and one test on all data for a trajectory of many. **Exact.**

        for B = b_1, ..., b_L, b_L, ..., b_1:   theta <- theta + (h/2) v,  v <- v - h A g_B(theta),  theta <- theta + (h/2) v
        from (theta, v) to (tau, v2): accept with min(1, exp(Y)), otherwise (theta, -v), after v <- c v + sqrt(1 - c^2) A^1/2 xi

    See `adammcmc.kernels.amortised_langevin`. One step costs 2 L gradients of a batch and one forward of all data. Whether that
    is worth it depends on the noise of the batches: on the networks of `docs/exact.md` it is not, and `Underdamped` is better.

    The data are fixed, and come in batches that stay the same. `sample(..., sampler=AmortisedLangevin, batch_size=500)` cuts
    them at random, once; in a loop of your own pass a list of closures, one for each batch, the same at each step.

    In burn-in, by default, it leaves the optimum by steps on all data without a test, as `Underdamped` does; then it adapts h
    to an acceptance of 0.85 and learns A from gradients of all data where trajectories end. Start it from a trained network.

    Args:
        params: as for any optimizer. Groups may differ in step_size.
        step_size: h, for one batch: a trajectory is 2 L h long. None finds it in burn-in. Kept under torch's name "lr" in the
            parameter groups.
        friction: how fast the velocity is forgotten; None is 0.4 in units of A^1/2.
        num_data: the number of training examples n.
        prior: required, and proper.
        num_batches: L, the number of batches that a trajectory visits, there and back: a new random subset at each step. None
            uses all of them.
        forces: the arithmetic of the batches' gradients, as for `Underdamped`; the losses in the test are computed as usual.
        persistent_uniform: as for `Underdamped`.
        preconditioner: A, as for `Underdamped`.
        **common: see `Sampler`; there is no `acceptance`, and there are no `fixed_data` and no `examples`.
    """

    divides_data: ClassVar[bool] = True
    """Whether `sample` makes its batches from data that stay the same."""
    _not_taken = frozenset(("acceptance", "fixed_data", "examples"))
    _always_fixed = True
    _target_acceptance = kernels.AmortisedKernel.target_acceptance
    _dynamics: ClassVar[Callable[..., Kernel]] = staticmethod(kernels.amortised_langevin)

    def __init__(
        self,
        params: Params,
        step_size: float | None = None,
        friction: float | None = None,
        *,
        num_data: int,
        prior: Prior,
        num_batches: int | None = None,
        forces: Forces | None = None,
        persistent_uniform: bool | None = None,
        preconditioner: Literal["diagonal", "kron"] | Metric | None = None,
        **common: Unpack[Common],
    ) -> None:
        self.num_batches = num_batches
        options: dict[str, Any] = {"persistent_uniform": persistent_uniform, "preconditioner": preconditioner, "forces": forces}
        super().__init__(params, step_size, friction, num_data=num_data, prior=prior, **options, **common)

    def _kernel(self, packing: Packing) -> kernels.AmortisedKernel:
        return kernels.amortised_langevin(
            [float(lr) for lr in self._options("lr")],
            self.friction,
            num_batches=self.num_batches,
            persistent_uniform=self.persistent_uniform,
            preconditioner=self._preconditioner(packing),
            acceptance=self.acceptance,
        )

    def prepare(self, potential: Any, state: ChainState) -> ChainState:
        self._kernel(self.layout()).check_parts(potential)  # also while burn-in takes steps on all data
        return super().prepare(potential, state)

    def _chances(self) -> int:
        return 1

    def _why_not_fused(self) -> str | None:
        return "there is no fused step for it"
