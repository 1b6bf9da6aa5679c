"""The sampler for data that are too large for a full gradient at each step: `MinibatchLangevin`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal, Unpack

from adammcmc import kernels
from adammcmc.acceptance import AcceptanceTest, AlwaysAccept
from adammcmc.kernels.kernel import Kernel
from adammcmc.samplers.adaptation import Adaptation
from adammcmc.samplers.exact import Metric, Underdamped
from adammcmc.samplers.packing import Packing
from adammcmc.samplers.sampler import Common, Params
from adammcmc.samplers.side_by_side import SideBySide
from adammcmc.target.data import Order
from adammcmc.target.priors import Prior

__all__ = ["MinibatchLangevin"]


class MinibatchLangevin(Underdamped):
    r"""Langevin dynamics with one minibatch gradient a step, its noise balanced by drag. **Approximate, with a known error.**

        d = h A^1/2 (lambda n / b) sum_{i in B} grad l_i;   p <- p - (1 - exp(-|d|^2 / 2)) d (d.p) / |d|^2
        p <- p - h A^1/2 g_B,   p' = c p + sqrt(1 - c^2) xi,   tau = theta + (h/2) A^1/2 (p + p'),   c = exp(-friction h)

    See `adammcmc.kernels.minibatch_langevin`. One step costs one forward and backward of a batch.

    **Batches must be independent**: drawn anew at each step from all data. `sample` does so; in a loop of your own take them
    from `as_data(data, batch_size, order="independent")`. Batches that go through the data epoch by epoch make it too cold.

    In burn-in, by default, it learns A = 1 / (E g^2 b/n + prior precision) from the batches' gradients, and sets h by
    their lengths, E |h A^1/2 g|^2 = 1, until U is flat. Then it runs at h and at h/2: by how much the likelihoods of 64
    training examples spread more at h gives the error of both. h is halved until that is below 3% of the spread (or burn-in
    is over), and `health()` reports it. Start it from a trained network.

    Args:
        params: as for any optimizer. Groups may differ in step_size.
        step_size: h; None finds it in burn-in. Kept under torch's name "lr" in the parameter groups.
        friction: how fast the velocity is forgotten; None is 0.4 in units of A^1/2.
        num_data: the number of training examples n.
        batch_size: the number of examples in a batch, b, much less than n. `sample` fills it in.
        prior: required, and proper.
        preconditioner: A. None or "diagonal" learns a diagonal in burn-in; "kron" also turns each weight matrix; or one
            positive tensor for each trainable parameter.
        **common: see `Sampler`; there is no `acceptance`, and there are no `fixed_data` and no `examples`.
    """

    batch_order: ClassVar[Order] = "independent"
    """Of the batches that `sample` takes."""
    _not_taken = frozenset(("acceptance", "fixed_data", "examples"))
    _dynamics: ClassVar[Callable[..., Kernel]] = staticmethod(kernels.minibatch_langevin)
    _first_step_size = 1e-4

    def __init__(
        self,
        params: Params,
        step_size: float | None = None,
        friction: float | None = None,
        *,
        num_data: int,
        batch_size: int,
        prior: Prior,
        preconditioner: Literal["diagonal", "kron"] | Metric | None = None,
        **common: Unpack[Common],
    ) -> None:
        if type(batch_size) is not int or not 1 <= batch_size <= num_data / 2:
            raise ValueError(
                f"`batch_size` must be a whole number, at most half of `num_data` = {num_data}, got {batch_size!r}. On all "
                "data at once use `Underdamped`, which is exact (in `sample`: set `batch_size`, or leave out `sampler`)."
            )
        self.batch_size = batch_size
        super().__init__(params, step_size, friction, num_data=num_data, prior=prior, preconditioner=preconditioner, **common)

    def _usual_test(self) -> AcceptanceTest:
        return AlwaysAccept()

    def _kernel(self, packing: Packing) -> Kernel:
        return self._dynamics(
            [float(lr) for lr in self._options("lr")],
            self.friction,
            noise_share=1 / (1 + self.batch_size / self.target.num_data),  # examples are drawn with replacement
            preconditioner=self._preconditioner(packing),
        )

    def new_adaptation(self) -> Adaptation | None:
        if self.burn_in is None:
            return None
        packing = self.layout()
        return SideBySide(
            self.burn_in,
            step_size=float(self.param_groups[0]["lr"]),
            batch_share=self.batch_size / self.target.num_data,
            num_params=sum(packing.sizes),
            precision=self._precision_of(packing),
            learns=self._learns_preconditioner,
            shapes=[[packing.shapes[i] for i in members] for members in packing.members],
            scaling=self._scaling,
        )
