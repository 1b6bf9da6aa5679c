"""Algorithm 1 as torch optimizers, so that the training loop stays the user's.

sampler = AdamMCMC(model.parameters(), lr=1e-3, num_data=len(train), sigma=3e-4, sigma_along=2.0)
for x, y in loader:
    loss = sampler.step(lambda: F.cross_entropy(model(x), y))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import Parameter

from adammcmc import kernels
from adammcmc.backends.one_pass import one_pass
from adammcmc.backends.workspace import Workspace
from adammcmc.errors import warn
from adammcmc.kernels.direction import AdamMemory
from adammcmc.samplers.packing import Packing
from adammcmc.samplers.sampler import Common, Params, Sampler
from adammcmc.target.leaves import same
from adammcmc.target.priors import Prior

__all__ = ["AdamMCMC", "AsReleased", "OptimizerMCMC"]


class AdamMCMC(Sampler):
    r"""Algorithm 1 of the paper as an optimizer: Adam's step, prolate noise, Metropolis-Hastings. **Approximate.**

        u = lr * m1hat / (sqrt(m2hat) + eps),    tau = theta - u + sigma eps + sigma_along z u
        accept with min(1, exp(U(theta) - U(tau) + log_q_ratio)),    U = lambda * n * mean loss - log prior

    See `adammcmc.kernels.adam_mcmc` for what it samples, and how far from exact it is. One step costs a forward and
    backward at the current weights and a forward at the proposed ones.

    Args:
        params: parameters, named parameters or groups, as for any optimizer. Groups may differ in lr, betas, eps and sigma.
        lr: Adam's learning rate.
        betas: Adam's decay rates; the paper's 0.99 for both by default.
        eps: Adam's, the paper's delta.
        num_data: the number of training examples n (not of batches, not of examples in a batch).
        sigma: standard deviation of the noise on one weight; 0 only with `AlwaysAccept()`.
        sigma_along: noise along the step, in units of the step (the paper's sigma_Delta, without its division by sqrt(P)).
            With 0 nearly nothing is accepted unless the step is shorter than the noise; 1 to 4 is a good start.
        prior: a `Prior`; None is flat and improper. There is no weight decay: that is a `Gaussian` prior.
        fused: on a GPU, compute the step in one pass over memory, with counter-based noise. None does so where possible
            (contiguous float32 parameters, Triton); True raises an error if not; False never does. The chains have the same
            distribution, but different random numbers.
        **common: see `Sampler`. `burn_in` tunes sigma to an acceptance of 0.6, and sigma_along to 0.8 of the proposal
            alone.
    """

    _target_acceptance = kernels.AdamMCMCKernel.target_acceptance
    _tunes_sigma_along = True
    _is_elementwise = False

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.99, 0.99),
        eps: float = 1e-8,
        *,
        num_data: int,
        sigma: float,
        sigma_along: float = 0.0,
        prior: Prior | None = None,
        fused: bool | None = None,
        **common: Unpack[Common],
    ) -> None:
        self.fused = fused
        self._bound: tuple[Packing, list[Tensor], AdamMemory] | None = None
        defaults = {"lr": lr, "betas": betas, "eps": eps, "sigma": sigma, "sigma_along": sigma_along}
        super().__init__(params, defaults, num_data=num_data, prior=prior, **common)

    def _label(self, p: Parameter, group: int) -> Hashable:
        return group, float(self.state[p].get("step", 0.0))  # bias correction depends on the count

    def _kernel(self, packing: Packing) -> kernels.AdamMCMCKernel:
        make = kernels.as_released if self._is_elementwise else kernels.adam_mcmc
        return make(
            [float(lr) for lr in self._options("lr")],
            self._options("betas"),
            self._options("eps"),
            sigma=self._sigmas(),
            sigma_along=self._sigma_along(),
            acceptance=self.acceptance,
        )

    def _why_not_fused(self) -> str | None:
        if self.fused is False:
            return "fused=False"
        reason = self._why_not_triton()
        if reason is not None and self.fused:
            raise ValueError(f"fused=True is not possible here: {reason}. Leave it out.")
        return reason

    def _parts(self, packing: Packing) -> tuple[Any, ...]:
        return packing, self._gather(packing, None).exp_avg

    def _new_backend(self, packing: Packing) -> Any:
        if packing.is_live:
            return one_pass(self._kernel(packing), packing.current, packing.proposed, self._gather(packing, None))
        is_usable = Workspace.fits(packing.current) and not self._is_elementwise
        return Workspace(packing.proposed) if is_usable else None

    def _gather(self, packing: Packing, memory: Any) -> AdamMemory:
        """The moments live in leaves; `self.state` holds views of them, under torch's names."""
        states = [self.state[p] for p in packing.params]
        if self._bound is not None:
            bound_to, views, bound = self._bound
            if bound_to is packing and same(views, [s.get("exp_avg") for s in states]):
                return bound
        exp_avg, exp_avg_sq = packing.new(), packing.new()
        views, squares = packing.views(exp_avg), packing.views(exp_avg_sq)
        self._steps = torch.tensor([float(s.get("step", 0.0)) for s in states], device="cpu")
        packing.pack([s.get("exp_avg", x) for s, x in zip(states, views, strict=True)], exp_avg)
        packing.pack([s.get("exp_avg_sq", x) for s, x in zip(states, squares, strict=True)], exp_avg_sq)
        for s, m1, m2, step in zip(states, views, squares, self._steps.unbind(), strict=True):
            s.update(step=step, exp_avg=m1, exp_avg_sq=m2)
        counts = tuple(int(states[members[0]]["step"]) for members in packing.members)
        bound = AdamMemory(exp_avg, exp_avg_sq, counts)
        self._bound = packing, views, bound
        return bound

    def keep(self, memory: AdamMemory) -> None:
        """The moments into the memory that `self.state` shows; the chain itself remembers nothing."""
        assert self._bound is not None
        own = self._bound[2]
        for old, new in ((own.exp_avg, memory.exp_avg), (own.exp_avg_sq, memory.exp_avg_sq)):
            if not same(old, new):
                torch._foreach_copy_(old, new)
        if memory.step != own.step and not self.chains.is_capturing:
            self.counted()

    def counted(self) -> None:
        """One more step of Adam."""
        assert self._bound is not None
        packing, views, own = self._bound
        self._bound = packing, views, own._replace(step=tuple(k + 1 for k in own.step))
        self._steps += 1

    def _load_foreign(self, state_dict: dict[str, Any]) -> None:
        """The moments and counts of a torch.optim.Adam; the hyper-parameters stay the sampler's own."""
        keys = ("step", "exp_avg", "exp_avg_sq")
        if "state" not in state_dict or not all("betas" in group for group in state_dict["param_groups"]):
            raise ValueError("this is neither a state of AdamMCMC nor of torch.optim.Adam.")
        for index, state in state_dict["state"].items():
            if not all(key in state for key in keys):
                raise ValueError(f"parameter {index} has no moments of Adam: this is not a state of torch.optim.Adam.")
        if decay := max((g.get("weight_decay", 0.0) for g in state_dict["param_groups"]), default=0.0):
            scale = 1 / math.sqrt(decay * self.target.scale)
            warn(
                f"the optimizer had weight_decay={decay:g}, the sampler has none. For Adam (not AdamW) the same pull on the "
                f"weights is prior=Gaussian({scale:.3g}) at this inverse temperature and data size.",
            )
        moments = {i: {key: state[key] for key in keys} for i, state in state_dict["state"].items()}
        groups = torch.optim.Optimizer.state_dict(self)["param_groups"]
        for own, other in zip(groups, state_dict["param_groups"], strict=False):
            if len(own["params"]) != len(other["params"]):
                raise ValueError("the parameter groups differ from those of the optimizer whose state is loaded.")
        if len(groups) != len(state_dict["param_groups"]):
            raise ValueError(f"the state has {len(state_dict['param_groups'])} parameter groups, the sampler {len(groups)}.")
        self.load_torch_state({"state": moments, "param_groups": groups})


class AsReleased(AdamMCMC):
    """What the code released with the paper does in place of Algorithm 1. **For replication only: no detailed balance.**

    Its noise along the step is drawn weight by weight, but tested as if it were one number: see
    `adammcmc.kernels.as_released` and the page "The released code". Arguments as for `AdamMCMC`;
    `adammcmc.from_paper(..., loss="mean")` gives the released units.
    """

    _is_elementwise = True


class OptimizerMCMC(Sampler):
    """Algorithm 1 with the step of any `torch.optim` optimizer in place of Adam's. **Approximate.**

    Example:
        >>> sampler = OptimizerMCMC(
        ...     torch.nn.Linear(3, 1).parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, num_data=100, sigma=1e-3
        ... )

    Args:
        params: as for any optimizer. Groups may hold any option of that optimizer, and sigma.
        optimizer: the optimizer's class. Weight decay is allowed, and makes the step depend on the weights (approximate
            too).
        num_data: the number of training examples n.
        sigma: as in `AdamMCMC`, and so are `sigma_along` and `prior`.
        **options: the optimizer's own, such as lr, and the common ones (see `Sampler`).
    """

    _target_acceptance = kernels.AdamMCMCKernel.target_acceptance
    _tunes_sigma_along = True

    def __init__(
        self,
        params: Params,
        optimizer: Callable[..., torch.optim.Optimizer],
        *,
        num_data: int,
        sigma: float,
        sigma_along: float = 0.0,
        prior: Prior | None = None,
        **options: Any,
    ) -> None:
        common = {key: options.pop(key) for key in Common.__annotations__ if key in options}
        self._optimizer = optimizer
        own = optimizer([Parameter(torch.zeros(1))], **options).defaults
        self._inner_keys = set(own)
        defaults = {**own, "sigma": sigma, "sigma_along": sigma_along}
        super().__init__(params, defaults, num_data=num_data, prior=prior, **common)

    def _label(self, p: Parameter, group: int) -> None:
        return None  # an optimizer may depend on shapes: each parameter keeps its own

    def _kernel(self, packing: Packing) -> kernels.AdamMCMCKernel:
        columns = {key: self._options(key) for key in self._inner_keys}
        options = [{key: values[i] for key, values in columns.items()} for i in range(len(packing.members))]

        def make(scratch: list[Parameter]) -> torch.optim.Optimizer:
            return self._optimizer([{"params": [p], **o} for p, o in zip(scratch, options, strict=True)])

        return kernels.optimizer_mcmc(
            make,
            sigma=self._sigmas(),
            sigma_along=self._sigma_along(),
            acceptance=self.acceptance,
        )

    def why_not_stacked(self) -> str:
        return "the step of OptimizerMCMC is computed for one chain at a time"

    def _gather(self, packing: Packing, memory: Any) -> dict[int, Any] | None:
        return {i: self.state[p] for i, p in enumerate(packing.params) if self.state[p]} or None

    def keep(self, memory: dict[int, Any] | None) -> None:
        """The inner optimizer's state is torch's own."""
        for i, p in enumerate(self.layout().params):
            self.state[p] = (memory or {}).get(i, {})
