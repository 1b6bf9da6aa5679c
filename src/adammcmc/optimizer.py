"""The optimizer's door: samplers that are `torch.optim.Optimizer`s, so that the training loop stays the user's.

sampler = AdamMCMC(model.parameters(), lr=1e-3, num_data=len(train), sigma=3e-4, sigma_along=2.0)
for x, y in loader:
    loss = sampler.step(lambda: F.cross_entropy(model(x), y))
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from adammcmc import kernels
from adammcmc.acceptance import Test
from adammcmc.data import Examples
from adammcmc.direction import AdamMemory
from adammcmc.fused import InPlaceAdamMCMC, Workspace
from adammcmc.leaves import same
from adammcmc.packing import Packing
from adammcmc.sampler import Params, Sampler
from adammcmc.stateful import BatchNormPolicy
from adammcmc.target import Prior, Target
from adammcmc.tuning import BurnIn

__all__ = ["AdamMCMC", "AsReleased", "OptimizerMCMC"]


class AdamMCMC(Sampler):
    r"""Algorithm 1 of the paper as an optimizer: Adam's step, prolate noise, Metropolis-Hastings. **Approximate.**

        u = lr * m1hat / (sqrt(m2hat) + eps),    tau = theta - u + sigma eps + sigma_along z u
        accept with min(1, exp(U(theta) - U(tau) + log_q_ratio)),    U = lambda * n * mean loss - log prior

    See `adammcmc.kernels.adam_mcmc` for what it samples, and how far from exact it is. One step costs a forward and backward
    at the current weights and a forward at the proposed ones.

    Args:
        params: parameters, named parameters or groups, as for any optimizer. Groups may differ in lr, betas, eps and sigma.
        lr: Adam's learning rate.
        betas: Adam's decay rates; the paper's 0.99 for both by default.
        eps: Adam's, the paper's delta.
        num_data: the number of training examples n (not of batches, not of examples in a batch).
        sigma: standard deviation of the noise on one weight; 0 only with `AlwaysAccept()`.
        sigma_along: noise along the step, in units of the step (the paper's sigma_Delta, without its division by sqrt(P)).
            With 0 nearly nothing is accepted unless the step is shorter than the noise; 1 to 4 is a good start.
        inverse_temperature: lambda, multiplies the SUM of the losses; 1 is Bayes.
        prior: a `Prior`; None is flat and improper. There is no weight decay: that is a `Gaussian` prior.
        acceptance: `Minibatch()` (default), `FullData()`, `AlwaysAccept()`, or your own.
        examples: the data set as losses of single examples, for tests that need them (`FullData`).
        fixed_data: the closure's loss is the same function of the weights at every step (full batch). Then the gradient found
            at an accepted proposal serves the next step, and a step costs one forward and backward.
        batch_norm: what BatchNorm in training mode does: "batch" (statistics of the batch; buffers move on acceptance only) or
            "frozen" (running statistics, which stay as they are). Dropout has the same mask on both sides of a step.
        burn_in: a `BurnIn` (or a number of steps) of adaptation: sigma to an acceptance of 0.6, sigma_along to 0.8 of the
            proposal alone. Nothing should be collected before `is_adapting` is False. None: no adaptation.
        generator: the source of all randomness; by default a new one, seeded from torch's global seed. The closure must not
            draw from it.
    """

    _own_caches = ("_bound", "_built", "_steps")
    _target_acceptance = kernels.AdamMCMCKernel.target_acceptance
    _tunes_sigma_along = True

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
        inverse_temperature: float = 1.0,
        prior: Prior | None = None,
        acceptance: Test | None = None,
        examples: Examples | None = None,
        fixed_data: bool = False,
        batch_norm: BatchNormPolicy = "batch",
        burn_in: BurnIn | int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._bound: tuple[Packing, list[Tensor], AdamMemory] | None = None
        self._built: tuple[Packing, Any, InPlaceAdamMCMC] | None = None
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "sigma": sigma, "sigma_along": sigma_along},
            target=Target(num_data, inverse_temperature, prior),
            acceptance=acceptance,
            examples=examples,
            fixed_data=fixed_data,
            batch_norm=batch_norm,
            burn_in=burn_in,
            generator=generator,
        )

    def _rescale(self, factor: float) -> None:
        for group in self.param_groups:
            group["sigma"] *= factor

    def _label(self, p: Parameter, group: int) -> Hashable:
        return group, float(self.state[p].get("step", 0.0))  # bias correction depends on the count

    def _kernel(self, packing: Packing) -> kernels.AdamMCMCKernel:
        lrs = [float(lr) for lr in self._options("lr")]
        settings = lrs, self._options("betas"), self._options("eps"), self._sigmas(), self._sigma_along(), self.acceptance
        if self._built is not None and self._built[0] is packing and self._built[1] == settings:
            return self._built[2]
        *adam, sigma, sigma_along, acceptance = settings
        kernel = kernels.adam_mcmc(*adam, sigma=sigma, sigma_along=sigma_along, acceptance=acceptance)
        workspace = (
            Workspace(packing.memory) if self._built is None or self._built[0] is not packing else self._built[2].workspace
        )
        fast = InPlaceAdamMCMC(kernel.direction, kernel.proposal, kernel.acceptance, kernel.name, workspace)
        self._built = packing, settings, fast
        return fast

    def _gather(self, packing: Packing) -> AdamMemory:
        """The moments live in leaves; `self.state` holds views of them, under torch's names."""
        states = [self.state[p] for p in packing.params]
        if self._bound is not None:
            bound_to, views, memory = self._bound
            if bound_to is packing and same(views, [s.get("exp_avg") for s in states]):
                return memory
        exp_avg, exp_avg_sq = packing.new(), packing.new()
        views = packing.views(exp_avg)
        self._steps = torch.tensor([float(s.get("step", 0.0)) for s in states], device="cpu")
        for s, m1, m2, step in zip(states, views, packing.views(exp_avg_sq), self._steps.unbind(), strict=True):
            if s:
                m1.copy_(s["exp_avg"])
                m2.copy_(s["exp_avg_sq"])
            s.update(step=step, exp_avg=m1, exp_avg_sq=m2)
        memory = AdamMemory(exp_avg, exp_avg_sq, tuple(int(states[members[0]]["step"]) for members in packing.members))
        self._bound = packing, views, memory
        return memory

    def _scatter(self, packing: Packing, memory: AdamMemory) -> None:
        assert self._bound is not None
        _, views, own = self._bound
        for old, new in ((own.exp_avg, memory.exp_avg), (own.exp_avg_sq, memory.exp_avg_sq)):
            if not same(old, new):
                torch._foreach_copy_(old, new)
        if memory.step != own.step:
            self._bound = packing, views, own._replace(step=memory.step)
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
            warnings.warn(
                f"the optimizer had weight_decay={decay:g}, the sampler has none. For Adam (not AdamW) the same pull on the "
                f"weights is prior=Gaussian({scale:.3g}) at this inverse temperature and data size.",
                stacklevel=3,
            )
        moments = {i: {key: state[key] for key in keys} for i, state in state_dict["state"].items()}
        groups = super().state_dict()["param_groups"]
        for own, other in zip(groups, state_dict["param_groups"], strict=False):
            if len(own["params"]) != len(other["params"]):
                raise ValueError("the parameter groups differ from those of the optimizer whose state is loaded.")
        if len(groups) != len(state_dict["param_groups"]):
            raise ValueError(f"the state has {len(state_dict['param_groups'])} parameter groups, the sampler {len(groups)}.")
        self._load_torch({"state": moments, "param_groups": groups})


class AsReleased(AdamMCMC):
    """What the code released with the paper does in place of Algorithm 1. **For replication only: no detailed balance.**

    Its noise along the step is drawn weight by weight, but tested as if it were one number: see `adammcmc.kernels.as_released`
    and the page "The released code". Arguments as for `AdamMCMC`; `adammcmc.from_paper(..., loss="mean")` gives the released
    units.
    """

    def _kernel(self, packing: Packing) -> kernels.AdamMCMCKernel:
        lrs = [float(lr) for lr in self._options("lr")]
        return kernels.as_released(
            lrs,
            self._options("betas"),
            self._options("eps"),
            sigma=self._sigmas(),
            sigma_along=self._sigma_along(),
            acceptance=self.acceptance,
        )


class OptimizerMCMC(Sampler):
    """Algorithm 1 with the step of any `torch.optim` optimizer in place of Adam's. **Approximate.**

    Example:
        >>> sampler = OptimizerMCMC(
        ...     torch.nn.Linear(3, 1).parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, num_data=100, sigma=1e-3
        ... )

    Args:
        params: as for any optimizer. Groups may hold any option of that optimizer, and sigma.
        optimizer: the optimizer's class. Weight decay is allowed, and makes the step depend on the weights (approximate too).
        **options: the optimizer's own, such as lr.
        num_data: as in `AdamMCMC`, and so are all that follow.
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
        inverse_temperature: float = 1.0,
        prior: Prior | None = None,
        acceptance: Test | None = None,
        examples: Examples | None = None,
        fixed_data: bool = False,
        batch_norm: BatchNormPolicy = "batch",
        burn_in: BurnIn | int | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        self._optimizer = optimizer
        self._inner_keys = set(optimizer([Parameter(torch.zeros(1))], **options).defaults)
        super().__init__(
            params,
            {
                **optimizer([Parameter(torch.zeros(1))], **options).defaults,
                "sigma": sigma,
                "sigma_along": sigma_along,
            },
            target=Target(num_data, inverse_temperature, prior),
            acceptance=acceptance,
            examples=examples,
            fixed_data=fixed_data,
            batch_norm=batch_norm,
            burn_in=burn_in,
            generator=generator,
        )

    def _rescale(self, factor: float) -> None:
        for group in self.param_groups:
            group["sigma"] *= factor

    def _label(self, p: Parameter, group: int) -> None:
        return None  # an optimizer may look at shapes: each parameter keeps its own

    def _kernel(self, packing: Packing) -> kernels.AdamMCMCKernel:
        options = [{key: self.param_groups[i][key] for key in self._inner_keys} for i in self._groups]

        def make(scratch: list[Parameter]) -> torch.optim.Optimizer:
            return self._optimizer([{"params": [p], **o} for p, o in zip(scratch, options, strict=True)])

        return kernels.optimizer_mcmc(
            make,
            sigma=self._sigmas(),
            sigma_along=self._sigma_along(),
            acceptance=self.acceptance,
        )

    def _gather(self, packing: Packing) -> dict[int, Any] | None:
        return {i: self.state[p] for i, p in enumerate(packing.params) if self.state[p]} or None

    def _scatter(self, packing: Packing, memory: dict[int, Any] | None) -> None:
        for i, p in enumerate(packing.params):
            self.state[p] = (memory or {}).get(i, {})
