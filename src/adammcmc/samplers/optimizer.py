"""The optimizer's door: samplers that are `torch.optim.Optimizer`s, so that the training loop stays the user's.

sampler = AdamMCMC(model.parameters(), lr=1e-3, num_data=len(train), sigma=3e-4, sigma_along=2.0)
for x, y in loader:
    loss = sampler.step(lambda: F.cross_entropy(model(x), y))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from adammcmc import kernels
from adammcmc.acceptance import AcceptanceTest, AlwaysAccept, Minibatch
from adammcmc.backends.fused import InPlaceAdamMCMC, Settings, Workspace, read_row
from adammcmc.backends.graphs import Ring
from adammcmc.errors import warn
from adammcmc.kernels.direction import AdamMemory
from adammcmc.samplers.adaptation import BurnIn
from adammcmc.samplers.closure import Closure, ClosurePotential
from adammcmc.samplers.layers import BatchNormPolicy, GraphNumbers
from adammcmc.samplers.packing import Packing
from adammcmc.samplers.sampler import GraphBody, Outcome, Params, Sampler, plain
from adammcmc.target.data import Examples
from adammcmc.target.leaves import same
from adammcmc.target.randomness import why_no_triton
from adammcmc.target.target import Evaluation, Gaussian, Prior, Target

if TYPE_CHECKING:
    from adammcmc.backends.onepass import OnePass

__all__ = ["AdamMCMC", "AsReleased", "OptimizerMCMC"]

_LARGE = 1 << 18  # a tensor that one program of a kernel would be too slow for


class _Passes(NamedTuple):
    """The kernels of `onepass`, and for which parameters, moments and flags they were made."""

    key: tuple[Any, ...]
    one: OnePass | None
    cache: list[Tensor]
    """The gradient at the present weights, for fixed data."""
    table: Tensor | None
    """Its addresses."""


def _backend(is_cpu: bool) -> type[OnePass]:
    """Imported where it is used: Triton and a compiler are not everywhere."""
    if is_cpu:
        from adammcmc.backends.compiled import CompiledOnePass

        return cast("type[OnePass]", CompiledOnePass)
    from adammcmc.backends.onepass import OnePass

    return OnePass


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
        acceptance: `Minibatch()` (default), `FullData()`, `AlwaysAccept()`, one of `adammcmc.acceptance`, or your own.
        examples: the data set as losses of single examples, for tests that choose examples (`FullData`, `Barker`, ...).
        fixed_data: the closure's loss is the same function of the weights at every step (full batch). Then the gradient found
            at an accepted proposal serves the next step, and a step costs one forward and backward.
        batch_norm: what BatchNorm in training mode does: "batch" (statistics of the batch; buffers move on acceptance only) or
            "frozen" (running statistics, which stay as they are). Dropout has the same mask on both sides of a step.
        burn_in: a `BurnIn` (or a number of steps) of adaptation: sigma to an acceptance of 0.6, sigma_along to 0.8 of the
            proposal alone. Nothing should be collected before `is_adapting` is False. None: no adaptation.
        fused: make the step in one pass over memory, with counter-based noise. None does so on a GPU where it can (float32,
            `Minibatch` or `AlwaysAccept`, Triton); True also on the CPU, by a C compiler, or raises; False never. The chains
            are the same in law, but with other random numbers.
        generator: the source of all randomness; by default a new one, seeded from torch's global seed. The closure must not
            draw from it.
    """

    _own_caches = ("_bound", "_built", "_steps", "_passes", "_told", "_graph_table")
    _one_pass_devices: tuple[str, ...] = ("cuda",)
    _is_elementwise = False
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
        acceptance: AcceptanceTest | None = None,
        examples: Examples | None = None,
        fixed_data: bool = False,
        batch_norm: BatchNormPolicy = "batch",
        burn_in: BurnIn | int | None = None,
        fused: bool | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.fused = fused
        self._bound: tuple[Packing, list[Tensor], AdamMemory] | None = None
        self._built: tuple[Packing, Any, InPlaceAdamMCMC] | None = None
        self._passes: _Passes | None = None
        self._told: tuple[Any, ...] | None = None
        self._graph_table: Tensor | None = None
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
        workspace = None if self._built is None or self._built[0] is not packing else self._built[2].workspace
        if workspace is None and self.device.type == "cpu":
            workspace = Workspace((packing.current, packing.proposed))
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
        squares = packing.views(exp_avg_sq)
        before = [
            packing.sampled([s.get(key, x) for s, x in zip(states, new, strict=True)])
            for key, new in (("exp_avg", views), ("exp_avg_sq", squares))
        ]
        for s, m1, m2, old1, old2, step in zip(states, views, squares, *before, self._steps.unbind(), strict=True):
            if s:
                m1.copy_(old1)
                m2.copy_(old2)
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

    # --- in one pass, on a GPU --------------------------------------------------------------------------------------

    def _one_pass(self, packing: Packing) -> OnePass | None:
        """The kernels of `onepass` on these parameters; None where they do not apply and the pure kernel runs."""
        looks_at_batch = (isinstance(self.acceptance, Minibatch) and self.acceptance.batch_size is None) or (
            isinstance(self.acceptance, AlwaysAccept) and not self.fixed_data
        )
        is_cpu = self.device.type == "cpu" and self.fused is True
        if self.fused is False or not (is_cpu or self.device.type in self._one_pass_devices):
            self._passes = None  # their counts would not move on with the pure kernel's
            return None
        if not looks_at_batch:
            self._passes = None
            self._not_fused(f"the test must look at the batch, not {self.acceptance}")
            return None
        if is_cpu and self._is_elementwise:
            self._passes = None
            self._not_fused("the released code's noise is made so on a GPU only")
            return None
        memory = self._gather(packing)
        key = (packing, memory.exp_avg, self._frozen_at, self._sum_acceptance, self.fixed_data)
        if self._passes is None or not same(self._passes.key, key):
            one, cache, table = None, [], None
            fits = all(p.dtype == torch.float32 and p.is_contiguous() for p in packing.params)
            if packing.held:
                self._not_fused("padding rows of an embedding are held, which the pass over memory cannot leave out")
            elif not fits:
                self._not_fused("parameters must be float32 and contiguous")
            elif not is_cpu and (reason := why_no_triton(self.device)) is not None:
                self._not_fused(reason)
            else:
                one = _backend(is_cpu)(
                    [p.detach() for p in packing.params],
                    packing.views(memory.exp_avg),
                    packing.views(memory.exp_avg_sq),
                    packing.views(packing.current),
                    counts=[int(k) for k in self._steps],
                    num_steps=self.num_steps,
                    frozen_at=self._frozen_at,
                    sum_rates=self._sum_acceptance,
                    fixed=self.fixed_data,
                    **({"elementwise": True} if self._is_elementwise else {}),
                )
                self._here = None
                if self.fixed_data:
                    cache = packing.views(packing.new())
                    table = one.point_at(cache)
            self._passes = _Passes(key, one, cache, table)
        return self._passes.one

    def _not_fused(self, reason: str) -> None:
        if self.fused:
            raise ValueError(f"fused=True is not possible here: {reason}. Leave it out.")

    def _transition(self, packing: Packing, closures: Sequence[Closure]) -> Outcome:
        one = self._one_pass(packing)
        if one is None:
            return super()._transition(packing, closures)
        potential = self._potential(packing, closures)
        self._layers.begin()
        self._tell(one, packing)
        rows = torch.empty(1, 11, dtype=torch.float64, device=self.device)
        flags = torch.empty(2, 1, dtype=torch.uint8, device=self.device)
        self._is_proposed = False
        try:
            if self._must_recheck():
                potential.check_same(self._here)
            losses, grads, _, table = self._pass(one, packing, potential, rows, one.first_row, flags)
        except BaseException:
            if self._is_proposed:
                one.put_back()
            self._layers.abort()
            self._fingerprint = ()
            raise
        info = read_row(rows[0][:, None], flags)
        self._layers.end(info.is_accepted)
        self._count(packing)
        self._frozen_at_host.copy_(self._frozen_at, non_blocking=True)
        if self._here is not None:
            # on the CPU values are compared; elsewhere only whether there was a step
            left = packing.pack(packing.params, packing.proposed) if self.device.type == "cpu" else packing.current
            self._left, self._fingerprint = left, self._now(packing)
        return Outcome(
            info, lambda: self._theta_times_grad(one, packing, grads, table), None, potential, loss_dtype=losses.dtype
        )

    def _tell(self, one: OnePass, packing: Packing) -> None:
        """The present settings, one for each parameter."""
        keys = ("lr", "betas", "eps", "sigma", "sigma_along")
        told = (one, self.target, *(plain(group[key]) for group in self.param_groups for key in keys))
        if told == self._told:
            return
        self._told = told
        owners = [0] * len(packing.params)
        for leaf, members in enumerate(packing.members):
            for i in members:
                owners[i] = leaf
        columns = {key: self._options(key) for key in ("lr", "betas", "eps", "sigma")}
        lr, betas, eps, sigma = ([columns[key][leaf] for leaf in owners] for key in columns)
        prior = self.target.prior
        precision = list(prior.precision(packing.params)) if type(prior) is Gaussian else [0.0] * len(owners)
        one.tell(Settings(self._sigma_along(), [float(x) for x in lr], betas, eps, [float(x) for x in sigma], precision))

    def _pass(
        self, one: OnePass, packing: Packing, potential: ClosurePotential, rows: Tensor, slot: Tensor, flags: Tensor,
        tables: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:  # fmt: skip
        """Algorithm 1 on the device.

        Returns the losses at theta, the gradients there and (fixed data) at tau, and the table of the former's addresses.
        `tables`: where the addresses will be, in a graph.
        """
        assert self._passes is not None
        scale, prior = self.target.scale, self.target.prior
        is_explicit = prior is not None and type(prior) is not Gaussian  # the kernels know a Gaussian themselves
        here = self._here
        if here is None:
            losses, found = potential.evaluate_live(with_grad=True)
            assert found is not None
            grads = self._with_prior(found, packing)
            log_prior = potential.log_prior_live() if is_explicit else one.no_prior
            if self.fixed_data:
                cache = self._passes.cache
                torch._foreach_copy_(cache, grads)
                grads = cache
                here = self._here = Evaluation(losses.clone(), log_prior.clone(), tuple(cache))
                losses, log_prior = here.losses, here.log_prior
        else:
            losses, log_prior, grads = here.losses, here.log_prior, list(here.grad)
        table = self._passes.table
        if table is None:
            table = one.point_at(grads) if tables is None else tables[0]
        key = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=self.device, generator=self.generator)
        one.propose(key, scale, table, losses)
        self._is_proposed = True
        there, fresh = None, []
        if isinstance(self.acceptance, Minibatch):
            there, found = potential.evaluate_live(with_grad=self.fixed_data)
            fresh = [] if found is None else self._with_prior(found, packing)
            if there.shape != losses.shape:
                potential.compare(Evaluation(losses, log_prior, None), Evaluation(there, log_prior, None))  # says what is wrong
        fresh_table = None if not fresh else one.point_at(fresh) if tables is None else tables[1]
        size, share = losses.shape[-1], self.target.num_data
        noise_scale = math.nan
        if self.fixed_data:
            noise_scale = 0.0
        elif losses.dim() > 1 and size > 1:
            noise_scale = scale * math.sqrt(max(0.0, 1 - size / share) / size)
        one.decide(
            losses,
            there,
            (log_prior, potential.log_prior_live()) if is_explicit else None,
            scale=scale,
            noise_scale=noise_scale,
            gradients=table,
            fresh=fresh_table,
            rows=rows,
            slot=slot,
            flags=flags,
        )
        return losses, grads, fresh, table

    def _with_prior(self, grads: list[Tensor], packing: Packing) -> list[Tensor]:
        """The gradient of V, contiguous; a Gaussian's part is added by the kernels."""
        prior = self.target.prior
        if prior is not None and type(prior) is not Gaussian:
            extra = prior.grad([p.detach() for p in packing.params])
            if extra is not None:
                grads = [g.sub(q, alpha=1 / self.target.scale) for g, q in zip(grads, extra, strict=True)]
        # contiguous, and where 16 bytes can be read at once: autograd may return slices of a larger tensor
        return [
            g if g.is_contiguous() and g.data_ptr() % 16 == 0 else g.clone(memory_format=torch.contiguous_format) for g in grads
        ]

    def _theta_times_grad(self, one: OnePass, packing: Packing, grads: Sequence[Tensor], table: Tensor) -> Tensor:
        """For fixed data at the present weights, whose gradient is kept; otherwise at those that the step started from."""
        if one.largest < _LARGE:
            return one.products(table, self.target.scale)
        params = packing.params if self.fixed_data else one.backup
        flat = [p.detach().reshape(-1) for p in params]
        products = torch.stack([torch.dot(p, g.reshape(-1)) for p, g in zip(flat, grads, strict=True)])
        if type(self.target.prior) is not Gaussian:
            return products
        precision = self.target.prior.precision(packing.params)
        squares = torch.stack([torch.dot(p, p) * (s / self.target.scale) for p, s in zip(flat, precision, strict=True)])
        return products + squares

    def _count(self, packing: Packing) -> None:
        """One more step of Adam, on the host as well."""
        assert self._bound is not None
        _, views, own = self._bound
        self._bound = packing, views, own._replace(step=tuple(k + 1 for k in own.step))
        self._steps.add_(1)

    def _why_not_captured(self) -> str | None:
        if self._one_pass(self._layout()) is None:
            return (
                "Adam's step counts are on the host unless its step is fused, which needs Triton, contiguous float32 "
                f"parameters and a test that looks at the batch (here: {self.acceptance})"
            )
        return super()._why_not_captured()

    def _before_next_replay(self, body: GraphBody) -> None:
        assert self._packing is not None
        self._count(self._packing)

    def _graph_key(self) -> Hashable:
        # lr, betas, eps, sigma and sigma_along are read from the device at each replay
        one = self._one_pass(self._layout())
        if one is None:
            return super()._graph_key()
        modes, has_noise = self._layers.graph_key(), 0.0 not in self._sigmas()
        return self._layout(), one, id(self.generator), self.target, self.acceptance, self.fixed_data, modes, has_noise

    def _graph_state(self) -> Any:
        return self._here if self._here is None else (self._here.losses, self._here.log_prior)

    def _set_graph_state(self, state: Any) -> None:
        losses, log_prior = state
        self._here = self._here._replace(losses=losses, log_prior=log_prior)

    def _before_capture(self) -> None:
        super()._before_capture()
        # outside of the graph: what it allocates itself it may fill (torch does so in deterministic mode)
        packing = self._layout()
        self._graph_table = torch.zeros(len(packing.params), dtype=torch.int64, device=self.device)
        one = self._one_pass(packing)
        assert one is not None
        self._tell(one, packing)  # whether there is a prior is written into the graph

    def _in_graph(self, closure: Closure, ring: Ring, numbers: GraphNumbers | None) -> GraphBody:
        packing = self._layout()
        one = self._one_pass(packing)
        assert one is not None
        potential = self._potential(packing, [closure])
        flags = torch.empty(2, 1, dtype=torch.uint8, device=self.device)
        table, self._graph_table = self._graph_table, None
        assert table is not None
        with self._layers.captured(numbers):
            self._layers.begin()
            losses, grads, fresh, known = self._pass(one, packing, potential, ring.rows, ring.slot, flags, (table, table))
            self._layers.end(flags.view(torch.bool)[0])
        self._frozen_at_host.copy_(self._frozen_at, non_blocking=True)
        kept = [] if self._here is None else [self._here.losses, self._here.log_prior]
        addresses = ((table, fresh if self.fixed_data else grads),)
        return GraphBody(kept, losses.dtype, lambda: self._theta_times_grad(one, packing, grads, known), addresses)

    def _before_replay(self, body: GraphBody) -> None:
        super()._before_replay(body)
        packing = self._layout()
        one = self._one_pass(packing)
        assert one is not None
        self._tell(one, packing)
        self._count(packing)

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

    _is_elementwise = True

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
        acceptance: AcceptanceTest | None = None,
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
