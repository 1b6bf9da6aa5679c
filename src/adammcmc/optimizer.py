"""The optimizer's door: samplers that are `torch.optim.Optimizer`s, so that the training loop stays the user's.

    sampler = AdamMCMC(model.parameters(), lr=1e-3, num_data=len(train), sigma=3e-4, sigma_along=2.0)
    for x, y in loader:
        loss = sampler.step(lambda: F.cross_entropy(model(x), y))

Each step gathers the state from torch's own places (`param_groups`, `state`), calls the pure kernel, and puts the result back.
"""

from __future__ import annotations

import difflib
import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from adammcmc import kernels
from adammcmc.acceptance import Minibatch, Test
from adammcmc.closure import Closure, ClosurePotential
from adammcmc.data import Examples
from adammcmc.direction import AdamMemory
from adammcmc.errors import NonFiniteLoss
from adammcmc.fused import InPlaceAdamMCMC, Workspace
from adammcmc.kernel import ChainState, Info
from adammcmc.leaves import Leaves
from adammcmc.packing import Packing
from adammcmc.target import Prior, Target

__all__ = ["MALA", "AdamMCMC", "OptimizerMCMC", "Sampler"]

_logger = logging.getLogger("adammcmc")
_OWN_KEY = "adammcmc"  # of state_dict: what torch would cast or drop if it lay in `state` (generator, counters)
_TORCH_KEYS = {"params", "param_names", "initial_lr"}

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Sampler(torch.optim.Optimizer, ABC):
    """What `AdamMCMC`, `MALA` and `OptimizerMCMC` share: one chain over the parameters of a model.

    A parameter with `requires_grad=False` is not sampled. One that the loss does not reach has gradient zero and is sampled:
    its posterior is its prior.
    """

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        *,
        target: Target,
        acceptance: Test | None,
        examples: Examples | None,
        fixed_data: bool,
        generator: torch.Generator | None,
    ) -> None:
        self.target = target
        self.acceptance: Test = acceptance or Minibatch()
        self.fixed_data = fixed_data
        self.num_steps = 0
        self._examples = examples
        self._packing: Packing | None = None
        self._info: Info | None = None
        self._current: Leaves | None = None
        self._here: Any = None
        self._carry: Any = None
        self._fingerprint: tuple[Any, ...] = ()
        self._checked_sigmas: tuple[float, ...] = ()
        super().__init__(params, defaults)
        if examples is not None and len(examples) != target.num_data:
            raise ValueError(f"`num_data` is {target.num_data}, but `examples` holds {len(examples)}.")
        devices = {p.device for p in self._parameters()}
        if len(devices) > 1:
            raise ValueError(f"all parameters must be on one device, got {sorted(map(str, devices))}.")
        self.device = devices.pop()
        if generator is None:
            # drawn from torch's default generator, so that torch.manual_seed fixes the run
            generator = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, ())))
        self.generator = generator
        self._frozen_at = torch.full((1,), -1, dtype=torch.int64, device=self.device)
        on_gpu = self.device.type == "cuda"
        self._frozen_at_host = torch.full((1,), -1, dtype=torch.int64, pin_memory=on_gpu)
        self._sum_acceptance = torch.zeros((), dtype=torch.float64, device=self.device)
        if target.prior is not None:
            target.prior.check(self._trainable())
        self._kernel(self._layout())  # checks the hyper-parameters

    # --- what a subclass adds -----------------------------------------------------------------------------------

    @abstractmethod
    def _label(self, p: Parameter, group: int) -> Hashable | None:
        """Parameters with equal labels share a leaf (`Packing`)."""

    @abstractmethod
    def _kernel(self, packing: Packing) -> kernels.AdamMCMCKernel | kernels.MALAKernel:
        """The kernel with the present hyper-parameters of the groups, for these leaves."""

    @abstractmethod
    def _gather(self, packing: Packing) -> Any:
        """The direction's memory, from `self.state`."""

    @abstractmethod
    def _scatter(self, packing: Packing, memory: Any) -> None:
        """The direction's memory, into `self.state`."""

    # --- one step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Closure | Sequence[Closure] | None = None) -> Tensor:  # type: ignore[override]
        """One transition: propose, test, move or stay. Returns the batch's mean loss at the weights before the step.

        Args:
            closure: returns the loss of this step's batch at the model's present weights: the mean, shape (), or (better, it
                loses fewer digits) the losses of the examples, shape (batch,). It is called at the current and at the
                proposed weights, and must see the same batch both times. A list of closures is a batch in micro-batches,
                whose gradients are accumulated: means of equally many examples each, or losses of single examples.
        """
        if closure is None:
            raise TypeError(
                f"{type(self).__name__}.step needs a closure that returns the loss of the batch: "
                "sampler.step(lambda: F.cross_entropy(model(x), y)). GradScaler passes none: for mixed precision use "
                "torch.autocast with bfloat16 inside the closure, without a scaler."
            )
        self.check()
        packing = self._layout()
        kernel = self._kernel(packing)
        self._check_resolution(packing)
        if self.num_steps == 0:
            _logger.info(self.describe())

        if self._current is None or _fingerprint(packing.params) != self._fingerprint:
            # someone else wrote the weights: what was known of them is void
            self._here = self._carry = None
            self._current = packing.pack([p.detach() for p in packing.params], packing.memory[0])
        current = self._current
        potential = ClosurePotential(
            [closure] if callable(closure) else list(closure),
            packing,
            current,
            target=self.target,
            examples=self._examples,
            fixed=self.fixed_data,
            name=self._name,
        )
        state = ChainState(current, self._gather(packing), self._here, self._carry, self.num_steps, self._frozen_at)
        try:
            state, info = kernel.step(state, potential, self.generator)
        except BaseException:
            potential.place(current)  # an error in the closure must not leave the proposal in the model
            self._fingerprint = ()
            raise
        potential.place(state.params)
        self._scatter(packing, state.memory)
        self._current, self._here, self._carry, self._frozen_at = state.params, state.here, state.carry, state.frozen_at
        self._frozen_at_host.copy_(self._frozen_at, non_blocking=True)
        self._fingerprint = _fingerprint(packing.params)
        self.num_steps += 1
        self._info = info
        self._sum_acceptance += info.acceptance_rate[0]
        return info.loss[0]

    @property
    def info(self) -> Info:
        """The last step in numbers, 0-d tensors on the parameters' device; reading it does not wait for the device."""
        if self._info is None:
            raise RuntimeError("no step was taken yet: there is nothing to report.")
        return Info(*(field[0] for field in self._info))

    @property
    def mean_acceptance_rate(self) -> Tensor:
        """Mean of min(1, exp(Y)) over all steps of this sampler, on the device."""
        return self._sum_acceptance / max(1, self.num_steps)

    def check(self) -> None:
        """Raise `NonFiniteLoss` if the chain froze. `step` calls it; on an accelerator it may notice a few steps late."""
        if (step := int(self._frozen_at_host)) >= 0:
            raise NonFiniteLoss(
                f"the loss or its gradient was NaN or infinite at the current weights, at step {step}; the chain has not moved "
                "since. The weights are those of the last healthy step. Look at that batch, then call unfreeze() to go on."
            )

    def unfreeze(self) -> None:
        """Let a chain that froze on a non-finite loss go on from where it stands."""
        self._frozen_at.fill_(-1)
        self._frozen_at_host.fill_(-1)

    # --- what it samples ----------------------------------------------------------------------------------------

    def approximations(self) -> list[str]:
        """Why the chain is not exact, in a few words each; empty if it is."""
        return self._kernel(self._layout()).approximation(fixed_data=self.fixed_data)

    def describe(self) -> str:
        """The realised target in one line: density, temperature, data, prior, kernel, test, exact or approximate."""
        packing = self._layout()
        reasons = self.approximations()
        return (
            f"{self.target}, P = {sum(p.numel() for p in packing.params)} | {self._kernel(packing).name}, {self.acceptance}"
            f"{' (all data)' if self.fixed_data else ''} | " + (f"approximate: {'; '.join(reasons)}" if reasons else "exact")
        )

    # --- torch's contract ---------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for key in set(param_group) - set(self.defaults) - _TORCH_KEYS:
            near = difflib.get_close_matches(key, self.defaults, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else f" Known: {sorted(self.defaults)}."
            raise ValueError(f"unknown option '{key}' in a parameter group.{hint}")
        super().add_param_group(param_group)
        self._here = self._carry = self._current = self._packing = None
        try:
            group = self.param_groups[-1]
            for p in group["params"]:
                if p.is_complex():
                    raise ValueError("complex parameters cannot be sampled. Use torch.view_as_real and real parameters.")
            if group["sigma_along"] != self.param_groups[0]["sigma_along"]:
                raise ValueError("`sigma_along` must be the same in all groups: there is one z for all parameters.")
        except ValueError:
            del self.param_groups[-1]
            raise

    def state_dict(self) -> dict[str, Any]:
        """torch's state, and under one key of its own the generator and the counters: enough to go on bit for bit."""
        own = {
            "sampler": type(self).__name__,
            "generator": self.generator.get_state(),
            "num_steps": self.num_steps,
            "sum_acceptance": self._sum_acceptance.clone(),
            "frozen_at": self._frozen_at.clone(),
        }
        return {**super().state_dict(), _OWN_KEY: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this sampler, to go on bit for bit (or, for AdamMCMC, the moments of a torch.optim.Adam)."""
        if _OWN_KEY not in state_dict:
            self._load_foreign(state_dict)
            return
        own = state_dict[_OWN_KEY]
        if own["sampler"] != type(self).__name__:
            raise ValueError(f"this is a state of {own['sampler']}, not of {type(self).__name__}.")
        if own["generator"].shape != self.generator.get_state().shape:
            raise ValueError("the state was saved on another kind of device: its random numbers cannot go on here.")
        self._load_torch(state_dict)
        self.generator.set_state(own["generator"].cpu())
        self.num_steps = own["num_steps"]
        self._sum_acceptance.copy_(own["sum_acceptance"])
        self._frozen_at = own["frozen_at"].to(self.device)
        self._frozen_at_host.copy_(self._frozen_at)

    def _load_foreign(self, state_dict: dict[str, Any]) -> None:
        raise ValueError(f"this is not a state of {type(self).__name__}: it has no entry '{_OWN_KEY}'.")

    def _load_torch(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != _OWN_KEY})
        self._here = self._carry = self._current = self._packing = None
        self._checked_sigmas = ()
        for state in self.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].cpu()  # where reading it costs nothing

    # --- small things -------------------------------------------------------------------------------------------

    def _parameters(self) -> list[Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _trainable(self) -> list[Parameter]:
        return [p for p in self._parameters() if p.requires_grad]

    def _layout(self) -> Packing:
        """The trainable parameters in leaves; made anew when they are others than at the last step."""
        params = self._trainable()
        if not params:
            raise ValueError("no parameter requires a gradient: there is nothing to sample.")
        if self._packing is None or not _same(self._packing.params, params):
            owners = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
            self._packing = Packing(params, [self._label(p, owners[p]) for p in params])
            self._groups = [owners[params[members[0]]] for members in self._packing.members]
            self._here = self._carry = self._current = None
            self._checked_sigmas = ()
        return self._packing

    def _options(self, key: str) -> list[Any]:
        """A hyper-parameter of each leaf."""
        return [self.param_groups[i][key] for i in self._groups]

    def _sigmas(self) -> list[float]:
        return [float(s) for s in self._options("sigma")]

    def _name(self, index: int) -> str:
        p = self._trainable()[index]
        for group in self.param_groups:
            for other, name in zip(group["params"], group.get("param_names", []), strict=False):
                if other is p:
                    return f"parameter '{name}'"
        return f"parameter {index}"

    def _check_resolution(self, packing: Packing) -> None:
        """Refuse noise below the spacing of the weights' own numbers, where it would be rounded away.

        Looks at the weights (and waits for the device) at the first step and whenever a sigma changed, not at every step.
        """
        sigmas = tuple(self._sigmas())
        if sigmas == self._checked_sigmas:
            return
        for sigma, members in zip(sigmas, packing.members, strict=True):
            for i in members:
                p = packing.params[i].detach()
                largest = float(p.abs().max()) if p.numel() else 0.0
                if sigma == 0 or largest == 0 or not math.isfinite(largest):
                    continue
                ulp = torch.finfo(p.dtype).eps * 2.0 ** math.floor(math.log2(largest))
                if sigma < ulp:
                    raise ValueError(
                        f"`sigma` = {sigma:.3g} is below the spacing {ulp:.3g} of {p.dtype} numbers near the largest weight "
                        f"{largest:.3g} of {self._name(i)}: the noise would be lost in rounding. Keep the weights in float32 "
                        "(and use torch.autocast with bfloat16 in the closure for speed), or raise sigma."
                    )
        self._checked_sigmas = sigmas


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
        inverse_temperature: lambda, multiplies the SUM of the losses; 1 is Bayes.
        prior: a `Prior`; None is flat and improper. There is no weight decay: that is a `Gaussian` prior.
        acceptance: `Minibatch()` (default), `FullData()`, `AlwaysAccept()`, or your own.
        examples: the data set as losses of single examples, for tests that need them (`FullData`).
        fixed_data: the closure's loss is the same function of the weights at every step (full batch). Then the gradient found
            at an accepted proposal serves the next step, and a step costs one forward and backward.
        generator: the source of all randomness; by default a new one, seeded from torch's global seed.
    """

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
        generator: torch.Generator | None = None,
    ) -> None:
        self._moments: AdamMemory | None = None
        self._bound: list[Tensor] = []
        self._workspace: Workspace | None = None
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "sigma": sigma, "sigma_along": sigma_along},
            target=Target(num_data, inverse_temperature, prior),
            acceptance=acceptance,
            examples=examples,
            fixed_data=fixed_data,
            generator=generator,
        )

    def _label(self, p: Parameter, group: int) -> Hashable:
        return group, float(self.state[p].get("step", 0.0))  # bias correction depends on the count

    def _kernel(self, packing: Packing) -> kernels.AdamMCMCKernel:
        kernel = kernels.adam_mcmc(
            [float(lr) for lr in self._options("lr")],
            self._options("betas"),
            self._options("eps"),
            sigma=self._sigmas(),
            sigma_along=self.param_groups[0]["sigma_along"],
            acceptance=self.acceptance,
        )
        return InPlaceAdamMCMC(kernel.direction, kernel.proposal, kernel.acceptance, kernel.name, self._work(packing))

    def _work(self, packing: Packing) -> Workspace:
        if self._workspace is None or self._workspace.memory is not packing.memory:
            self._workspace = Workspace(packing.memory)
        return self._workspace

    def _gather(self, packing: Packing) -> AdamMemory:
        """The moments live in leaves; `self.state` holds views of them, under torch's names."""
        states = [self.state[p] for p in packing.params]
        if self._moments is not None and _same(self._bound, [s.get("exp_avg") for s in states]):
            return self._moments
        exp_avg, exp_avg_sq = packing.new(), packing.new()
        self._bound = packing.views(exp_avg)
        self._steps = torch.tensor([float(s.get("step", 0.0)) for s in states])
        for s, m1, m2, step in zip(states, self._bound, packing.views(exp_avg_sq), self._steps.unbind(), strict=True):
            if s:
                m1.copy_(s["exp_avg"])
                m2.copy_(s["exp_avg_sq"])
            s.update(step=step, exp_avg=m1, exp_avg_sq=m2)
        counts = tuple(int(states[members[0]]["step"]) for members in packing.members)
        self._moments = AdamMemory(exp_avg, exp_avg_sq, counts)
        return self._moments

    def _scatter(self, packing: Packing, memory: AdamMemory) -> None:
        assert self._moments is not None
        for own, new in ((self._moments.exp_avg, memory.exp_avg), (self._moments.exp_avg_sq, memory.exp_avg_sq)):
            if not _same(own, new):
                torch._foreach_copy_(own, new)
        self._moments = self._moments._replace(step=memory.step)
        self._steps += 1

    def _load_foreign(self, state_dict: dict[str, Any]) -> None:
        """The moments and counts of a torch.optim.Adam; the hyper-parameters stay the sampler's own."""
        keys = ("step", "exp_avg", "exp_avg_sq")
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


class MALA(Sampler):
    r"""The Metropolis-adjusted Langevin algorithm as an optimizer, plain, directional and preconditioned.

        tau = theta - h A g + sigma A^1/2 eps + sigma_along z h A g,    g = grad U = lambda n grad(mean loss) - grad log prior

    **Exact** with `fixed_data=True` (each closure sees the whole data set) or with `acceptance=FullData()`; approximate with
    `Minibatch()` on changing batches. See `adammcmc.kernels.mala`. One step costs two forwards and backwards, with
    `fixed_data=True` one.

    Args:
        params: as for any optimizer. Groups may differ in step_size and sigma.
        step_size: h; kept under torch's name "lr" in the parameter groups, so that schedulers find it.
        num_data: the number of training examples n.
        prior: required, and proper: an exact chain on an improper posterior has nothing to converge to.
        sigma: None is sqrt(2 h).
        sigma_along: noise along the step in units of the step (the paper's sigma_nabla is h * sigma_along).
        preconditioner: diagonal A, one positive tensor for each trainable parameter; fixed while sampling.
        inverse_temperature: as in `AdamMCMC`.
        acceptance: as in `AdamMCMC`.
        examples: as in `AdamMCMC`.
        fixed_data: as in `AdamMCMC`.
        generator: as in `AdamMCMC`.
    """

    def __init__(
        self,
        params: Params,
        step_size: float,
        *,
        num_data: int,
        prior: Prior,
        sigma: float | None = None,
        sigma_along: float = 0.0,
        preconditioner: Sequence[Tensor] | None = None,
        inverse_temperature: float = 1.0,
        acceptance: Test | None = None,
        examples: Examples | None = None,
        fixed_data: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        if prior is None:
            raise ValueError(
                "MALA needs a proper `prior`: without one the posterior of a network has no finite mass. "
                "Gaussian.fan_in(model) is a common choice."
            )
        self._diagonal: tuple[Packing, Leaves | None] | None = None
        super().__init__(
            params,
            {"lr": step_size, "sigma": sigma, "sigma_along": sigma_along},
            target=Target(num_data, inverse_temperature, prior),
            acceptance=acceptance,
            examples=examples,
            fixed_data=fixed_data,
            generator=generator,
        )
        if preconditioner is not None:
            trainable = self._trainable()
            if [a.shape for a in preconditioner] != [p.shape for p in trainable]:
                raise ValueError("`preconditioner` must have one tensor of the same shape for each trainable parameter.")
            for p, a in zip(trainable, preconditioner, strict=True):
                self.state[p]["preconditioner"] = a.detach().to(p.device, p.dtype, copy=True)
            self._packing = None
            if not all(bool((a > 0).all()) for a in preconditioner):
                raise ValueError("`preconditioner` must be positive everywhere.")

    def _label(self, p: Parameter, group: int) -> Hashable:
        return group

    def _kernel(self, packing: Packing) -> kernels.MALAKernel:
        return kernels.mala(
            [float(lr) for lr in self._options("lr")],
            sigma=self._sigmas(),
            sigma_along=self.param_groups[0]["sigma_along"],
            preconditioner=self._preconditioner(packing),
            acceptance=self.acceptance,
        )

    def _preconditioner(self, packing: Packing) -> Leaves | None:
        if self._diagonal is None or self._diagonal[0] is not packing:
            parts = [self.state[p]["preconditioner"] for p in packing.params if "preconditioner" in self.state[p]]
            if parts and len(parts) != len(packing.params):
                raise ValueError("some parameters have a preconditioner and some have none.")
            self._diagonal = packing, packing.pack(parts, packing.new()) if parts else None
        return self._diagonal[1]

    def _sigmas(self) -> list[float]:
        pairs = zip(self._options("sigma"), self._options("lr"), strict=True)
        return [math.sqrt(2 * float(lr)) if sigma is None else float(sigma) for sigma, lr in pairs]

    def _gather(self, packing: Packing) -> None:
        return None

    def _scatter(self, packing: Packing, memory: None) -> None:
        return None


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
            generator=generator,
        )

    def _label(self, p: Parameter, group: int) -> None:
        return None  # an optimizer may look at shapes: each parameter keeps its own

    def _kernel(self, packing: Packing) -> kernels.AdamMCMCKernel:
        options = [{key: self.param_groups[i][key] for key in self._inner_keys} for i in self._groups]

        def make(scratch: list[Parameter]) -> torch.optim.Optimizer:
            return self._optimizer([{"params": [p], **o} for p, o in zip(scratch, options, strict=True)])

        return kernels.optimizer_mcmc(
            make,
            sigma=self._sigmas(),
            sigma_along=self.param_groups[0]["sigma_along"],
            acceptance=self.acceptance,
        )

    def _gather(self, packing: Packing) -> dict[int, Any] | None:
        return {i: self.state[p] for i, p in enumerate(packing.params) if self.state[p]} or None

    def _scatter(self, packing: Packing, memory: dict[int, Any]) -> None:
        for i, p in enumerate(packing.params):
            self.state[p] = memory.get(i, {})


def _fingerprint(params: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Changes when somebody writes to the weights."""
    return tuple((p.data_ptr(), p._version) for p in params)


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
