"""The exact kernels as torch optimizers: `Underdamped` (recommended), `Microcanonical`, `MALA`, `ExactAdamMCMC` (Theorem 1).

sampler = Underdamped(model.parameters(), num_data=len(inputs), prior=Gaussian.fan_in(model), fixed_data=True)
while sampler.is_adapting:
    sampler.step(lambda: F.cross_entropy(model(inputs), targets))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Unpack, cast

import torch
from torch import Tensor

from adammcmc import kernels
from adammcmc.backends.one_pass import one_pass
from adammcmc.kernels.approach import FRICTION
from adammcmc.kernels.exact_adam import NoisyMoments
from adammcmc.kernels.hamiltonian import Momentum
from adammcmc.kernels.kernel import ChainState, Kernel
from adammcmc.kernels.proposal import Prolate
from adammcmc.kernels.scaling import Block, Kronecker, Scaling
from adammcmc.samplers.adaptation import Adaptation, BurnIn, Change, mean_of, momentum_spread
from adammcmc.samplers.forces import Forces, checked_forces
from adammcmc.samplers.packing import Packing
from adammcmc.samplers.sampler import Common, Params, Sampler
from adammcmc.samplers.tuned import Turned
from adammcmc.samplers.unadjusted import Unadjusted
from adammcmc.target.leaves import Leaves, widen
from adammcmc.target.potential import Evaluation
from adammcmc.target.priors import Prior

__all__ = ["MALA", "ExactAdamMCMC", "Microcanonical", "Underdamped"]

_CHANCES = 8  # docs/exact.md has what was measured

Metric = Sequence[Tensor] | Sequence[Turned]
"""A for each trainable parameter: a diagonal, or a diagonal with the bases of rows and columns that it is in."""


class _Preconditioned(Sampler):
    """An exact sampler with a step size and a diagonal A, which lives in `self.state`, by parameter."""

    _first_step_size: ClassVar[float]
    """Where burn-in starts."""
    _tunes_lr = True
    _needs_prior = True

    def __init__(
        self,
        params: Params,
        step_size: float | None,
        defaults: dict[str, Any],
        *,
        preconditioner: Literal["diagonal", "kron"] | Metric | None,
        **options: Any,
    ) -> None:
        if isinstance(preconditioner, str):
            self._scaling, preconditioner = self._checked_scaling(preconditioner), None
        if step_size is None and options.get("burn_in") is None:
            options["burn_in"] = BurnIn()
        self._diagonal: tuple[Any, Leaves | Scaling | None, list[float]] | None = (
            None  # what it is made of, A, smallest A^1/2 by leaf
        )
        self._learns_preconditioner = preconditioner is None
        super().__init__(params, {"lr": self._first_step_size if step_size is None else step_size, **defaults}, **options)
        if preconditioner is not None:
            self._take(list(preconditioner))

    def _take(self, metric: list[Tensor | Turned]) -> None:
        """Use this A, which is not learnt."""
        trainable, is_turned = self.parameters.trainable, any(isinstance(a, tuple) for a in metric)
        parts: list[Any] = [a if isinstance(a, tuple) else (a, None, None) for a in metric]
        if not all(isinstance(a, Tensor) for a, *_ in parts) or [a.shape for a, *_ in parts] != [p.shape for p in trainable]:
            raise ValueError("`preconditioner` must have one tensor of the same shape for each trainable parameter.")
        if not all(bool(((a > 0) & a.isfinite()).all()) for a, *_ in parts):
            raise ValueError("`preconditioner` must be positive and finite everywhere.")
        if is_turned and not self._has_velocity:
            raise ValueError("a turned `preconditioner` needs a velocity: `Underdamped` or `Microcanonical`.")
        for p, (a, left, right) in zip(trainable, parts, strict=True):
            columns = p[0].numel() if p.dim() > 1 else 0
            for basis, most in ((left, len(p) if p.dim() > 1 else 0), (right, columns)):
                if basis is not None and not (basis.dim() == 2 and len(basis) == basis.shape[1] <= most):
                    raise ValueError(f"`preconditioner` has a basis {tuple(basis.shape)} for a parameter {tuple(p.shape)}.")
            own = {"preconditioner": a, "left": left, "right": right}
            self.state[p] |= {k: x.detach().to(p.device, p.dtype, copy=True) for k, x in own.items() if x is not None}
        self._diagonal = None

    def _checked_scaling(self, name: str) -> Literal["diagonal", "kron"]:
        if name == "diagonal" or (name == "kron" and self._has_velocity):
            return cast(Literal["diagonal", "kron"], name)
        names = "'diagonal', 'kron'" if self._has_velocity else "'diagonal'"
        raise ValueError(f"`preconditioner` must be {names}, one tensor per trainable parameter, or None, got {name!r}.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "step_size" in param_group:
            param_group = {("lr" if key == "step_size" else key): value for key, value in param_group.items()}
        super().add_param_group(param_group)

    def _preconditioner(self, packing: Packing) -> Leaves | Scaling | None:
        parts = [self.state[p].get("preconditioner") for p in packing.params]
        bases = [(self.state[p].get("left"), self.state[p].get("right")) for p in packing.params]
        known = [a for a in parts if a is not None]
        key = (packing, *((id(a), a._version) for a in [*known, *itertools.chain(*bases)] if a is not None))
        if self._diagonal is None or self._diagonal[0] != key:
            packed: Leaves | Scaling | None = None
            roots = [1.0] * len(packing.members)
            if len(known) == len(parts) and any(b is not None for pair in bases for b in pair):
                packed = _kronecker(packing, known, bases)
                roots = packed.smallest()
            elif known:
                # parameters that came later take the mean of the others
                mean = mean_of(known)
                full = [torch.full_like(p, mean) if a is None else a for p, a in zip(packing.params, parts, strict=True)]
                packed = diagonal = tuple(leaf[0] for leaf in packing.pack(full, packing.new()))
                roots = [math.sqrt(float(a.min())) for a in diagonal]
            self._diagonal = key, packed, roots
        return self._diagonal[1]

    def _parts(self, packing: Packing) -> tuple[Any, ...]:
        return packing, self._preconditioner(packing)

    def _set_preconditioner(self, packing: Packing, metric: Leaves | Scaling) -> None:
        for p in packing.params:
            for key in ("left", "right"):
                self.state[p].pop(key, None)
        if isinstance(metric, Kronecker):
            squares = [torch.cat([block.root.flatten().square() for block in row]) for row in metric.blocks]
            leaves = tuple(a.view_as(leaf) for a, leaf in zip(squares, packing.current, strict=True))
            for members, row in zip(packing.members, metric.blocks, strict=True):
                for i, block in zip(members, row, strict=True):
                    bases = {"left": block.left, "right": block.right}
                    self.state[packing.params[i]].update({key: b for key, b in bases.items() if b is not None})
        elif isinstance(metric, Scaling):
            raise ValueError("a network's weights cannot have a dense metric: `scaling` is 'diagonal' or 'kron'.")
        else:
            leaves = tuple(a[None].to(leaf.dtype) for a, leaf in zip(metric, packing.current, strict=True))
        for p, view in zip(packing.params, packing.whole(leaves, 1.0), strict=True):
            self.state[p]["preconditioner"] = view.clone()
        self._diagonal = None


def _kronecker(packing: Packing, squares: Sequence[Tensor], bases: Sequence[tuple[Tensor | None, Tensor | None]]) -> Kronecker:
    """The metric from what `state` has of each parameter: D^2 in the parameter's shape, L and R."""
    roots = [a.sqrt() for a in packing.sampled(squares)]

    def block(i: int) -> Block:
        left, right = bases[i]
        root = roots[i] if left is None and right is None else roots[i].reshape(len(roots[i]), -1)
        return Block(root.flatten() if root.dim() < 2 else root, left, right)

    return Kronecker([[block(i) for i in members] for members in packing.members])


def _fits(leaves: Leaves, packing: Packing) -> bool:
    """Whether these are leaves of this layout, in the dtype that is computed in."""
    wanted = [widen(x) for x in packing.current]
    return [(x.shape, x.dtype) for x in leaves] == [(x.shape, x.dtype) for x in wanted]


class Underdamped(_Preconditioned):
    r"""Metropolised underdamped Langevin with a learnt metric: **the recommended exact sampler**. It tunes itself.

        v <- c v + sqrt(1 - c^2) A^1/2 xi;   v1 = v - (h/2) A g(theta),  tau = theta + h v1,  v2 = v1 - (h/2) A g(tau)
        accept with min(1, exp(Y)):  (tau, v2);  otherwise  (theta, -v);      g = grad U, h = step_size

    **Exact** with `fixed_data=True` or `acceptance=FullData()`; approximate with `Minibatch()` on changing batches, and with
    `AlwaysAccept()`, which is the unadjusted sampler with one gradient of any batch a step. See `adammcmc.kernels.underdamped`.
    One step costs one forward and backward with `AlwaysAccept()`, otherwise two; with `fixed_data=True` one for each move that
    it tries (`num_chances`): about 1.4 at the default.

    In burn-in, by default, it first leaves the optimum by constant-speed steps without a test, then adapts h to an acceptance
    of 0.85 and learns A = 1 / (mean (grad U)^2 + prior precision), until U is flat; then both are frozen and `is_adapting`
    is False. Start it from a trained network.

    Args:
        params: as for any optimizer. Groups may differ in step_size.
        step_size: h; None finds it in burn-in. Kept under torch's name "lr" in the parameter groups.
        friction: how fast the velocity is forgotten; None is 0.4 in units of A^1/2.
        num_data: the number of training examples n.
        prior: required, and proper.
        num_leapfrog: gradients between two refreshes and tests; with friction=math.inf that is HMC.
        num_chances: how many moves in a row may be tried before the velocity is flipped (`adammcmc.kernels.underdamped`): more
            gradients per step, but more effective draws per gradient. None is 8 on the CPU with `fixed_data=True`, and 1
            elsewhere, because the number of moves cannot vary in a CUDA graph. (It is also 1 for stacked chains of a network
            with buffers, where all chains would be evaluated until the last of them is done.)
        forces: the arithmetic of gradients, "tf32" or "bfloat16"; None is that of the model. The chain stays exact, because the
            losses in the test are computed as usual, in one extra forward per test (so use several leapfrog steps per test,
            `num_leapfrog`).
        persistent_uniform: shift the uniform number of the test instead of drawing a new one (Neal 2020): fewer reversals. None
            does so where the test allows it.
        preconditioner: A. None or "diagonal" learns a diagonal in burn-in; "kron" also turns each weight matrix into the basis
            in which its gradients vary independently, which costs four small matrix products per layer and step; or one
            positive tensor for each trainable parameter, such as an earlier burn-in learnt (`WarmUp.settings`, where that of
            "kron" has three tensors for each).
        **common: see `Sampler`. Without a `step_size`, `burn_in` is `BurnIn()` by default; with one, there is none.
    """

    _target_acceptance = kernels.UnderdampedKernel.target_acceptance
    _has_velocity = True
    _dynamics: ClassVar[Callable[..., Kernel]] = staticmethod(kernels.underdamped)
    _first_step_size = 1e-3
    _noise_name = "step_size * A^1/2"

    def __init__(
        self,
        params: Params,
        step_size: float | None = None,
        friction: float | None = None,
        *,
        num_data: int,
        prior: Prior,
        num_leapfrog: int = 1,
        persistent_uniform: bool | None = None,
        num_chances: int | None = None,
        forces: Forces | None = None,
        preconditioner: Literal["diagonal", "kron"] | Metric | None = None,
        **common: Unpack[Common],
    ) -> None:
        self.friction, self.num_leapfrog, self.persistent_uniform = friction, num_leapfrog, persistent_uniform
        self.num_chances, self.forces = num_chances, checked_forces(forces)
        super().__init__(params, step_size, {}, num_data=num_data, prior=prior, preconditioner=preconditioner, **common)

    def _kernel(self, packing: Packing) -> Kernel:
        return self._dynamics(
            [float(lr) for lr in self._options("lr")],
            self.friction,
            num_leapfrog=self.num_leapfrog,
            persistent_uniform=self.persistent_uniform,
            preconditioner=self._preconditioner(packing),
            acceptance=self.acceptance,
            num_chances=self._chances(),
        )

    def _chances(self) -> int:
        if self.num_chances is not None:
            return self.num_chances
        return _CHANCES if self.fixed_data and self.device.type == "cpu" else 1

    def _sigmas(self) -> list[float]:
        """The length of a drift, as far as rounding is concerned."""
        if 0.0 in self._options("lr"):
            raise ValueError("`step_size` must be positive (did a scheduler bring it to 0?): the chain would not move.")
        self._preconditioner(self.layout())
        assert self._diagonal is not None
        return [float(lr) * root for lr, root in zip(self._options("lr"), self._diagonal[2], strict=True)]

    def _rescale(self, factor: float) -> None:
        for group in self.param_groups:
            group["lr"] *= factor

    def _gather(self, packing: Packing, memory: Momentum | None) -> Momentum | None:
        # with other parameters than before, a new velocity is as good
        return memory if memory is not None and _fits(memory.momentum, packing) else None

    def _why_not_fused(self) -> str | None:
        if self.num_leapfrog != 1 or self._chances() != 1 or not self.acceptance.needs_noise or self._will_adapt:
            return "only a step with one leapfrog step, one chance, a test and settled settings is fused"
        return self._why_not_triton()

    def _new_backend(self, packing: Packing) -> Any:
        return one_pass(self._kernel(packing), packing.current, packing.proposed, None) if packing.is_live else None


class Microcanonical(Underdamped):
    r"""Microcanonical Langevin dynamics as an optimizer: a velocity of constant length, which forces and noise turn. **Exact**
    under the conditions of `Underdamped`, whose arguments, cost and burn-in it has.

        u: a direction, |u| = 1, refreshed by noise;  a half turn towards -A^1/2 g(theta),  tau = theta + h sqrt(P) A^1/2 u,
        a half turn towards -A^1/2 g(tau);  accept with min(1, exp(U(theta) - U(tau) - K)), otherwise reverse u

    See `adammcmc.kernels.microcanonical` for the turns and K. U mixes several times faster than under `Underdamped`, whose
    energy changes by the refresh alone. With `AlwaysAccept()` it is the unadjusted sampler, approximate, whose speed does not
    depend on the slope: it leaves steep places without heating up. On fixed data burn-in then finds a step for each chain from
    its energy error (`BurnIn`: num_steps, max_steps, max_seconds), `describe()` says how large that is, and friction=None is 1.
    """

    _target_acceptance = kernels.MicrocanonicalKernel.target_acceptance
    _dynamics = staticmethod(kernels.microcanonical)

    def _kernel(self, packing: Packing) -> Kernel:
        if sum(packing.sizes) < 2:
            raise ValueError("microcanonical dynamics needs at least two weights: on a line, a force cannot turn anything.")
        kernel = super()._kernel(packing)
        has_scale = self.burn_in is not None or self._preconditioner(packing) is not None
        if self.friction is None and self._goes_without_test and has_scale:
            return replace(cast(kernels.MicrocanonicalKernel, kernel), friction=FRICTION)
        return kernel

    @property
    def _goes_without_test(self) -> bool:
        """Whether chains go on after burn-in as they began, without a test on fixed data."""
        return self.fixed_data and not self.acceptance.needs_noise and self.num_leapfrog == 1

    def _why_not_fused(self) -> str | None:
        return "there is no fused step for it"

    def new_adaptation(self) -> Adaptation | None:
        if self.burn_in is None or not self._goes_without_test:
            return super().new_adaptation()
        packing = self.layout()
        return Unadjusted(
            self.burn_in,
            step_size=float(self.param_groups[0]["lr"]),
            num_params=sum(packing.sizes),
            precision=self._precision_of(packing),
            learns=self._learns_preconditioner,
            shapes=[[packing.shapes[i] for i in members] for members in packing.members],
            scaling=self._scaling,
        )


class MALA(_Preconditioned):
    r"""The Metropolis-adjusted Langevin algorithm as an optimizer, plain, directional and preconditioned.

        tau = theta - h A g + sigma A^1/2 eps + sigma_along z h A g,    g = grad U = lambda n grad(mean loss) - grad log prior

    **Exact** with `fixed_data=True` (each closure sees the whole data set) or with `acceptance=FullData()`; approximate with
    `Minibatch()` on changing batches. See `adammcmc.kernels.mala`. One step costs two forwards and backwards, with
    `fixed_data=True` one.

    Args:
        params: as for any optimizer. Groups may differ in step_size and sigma.
        step_size: h; None finds it in burn-in. Kept under torch's name "lr" in the groups, so that schedulers find it.
        num_data: the number of training examples n.
        prior: required, and proper: an exact chain on an improper posterior has nothing to converge to.
        sigma: None is sqrt(2 h).
        sigma_along: noise along the step in units of the step. (The paper's sigma_nabla multiplies grad L_n: it is
            h * lambda * sigma_along with the lambda of the paper.)
        preconditioner: diagonal A, one positive tensor for each trainable parameter; fixed while sampling.
        **common: see `Sampler`. `burn_in` tunes h to an acceptance of 0.57, and learns the preconditioner
            (`BurnIn(learn_preconditioner=False)`: only h).
    """

    _target_acceptance = kernels.MALAKernel.target_acceptance
    _first_step_size = 1e-6

    def __init__(
        self,
        params: Params,
        step_size: float | None = None,
        *,
        num_data: int,
        prior: Prior,
        sigma: float | None = None,
        sigma_along: float = 0.0,
        preconditioner: Literal["diagonal", "kron"] | Metric | None = None,
        **common: Unpack[Common],
    ) -> None:
        noise = {"sigma": sigma, "sigma_along": sigma_along}
        super().__init__(params, step_size, noise, num_data=num_data, prior=prior, preconditioner=preconditioner, **common)

    def _kernel(self, packing: Packing) -> Kernel:
        return kernels.mala(
            [float(lr) for lr in self._options("lr")],
            sigma=self._sigmas(),
            sigma_along=self._sigma_along(),
            preconditioner=self._preconditioner(packing),
            acceptance=self.acceptance,
        )

    def _sigmas(self) -> list[float]:
        if 0.0 in self._options("lr") and None in self._options("sigma"):
            raise ValueError("`step_size` is 0 (did a scheduler bring it there?): MALA would not move.")
        pairs = zip(self._options("sigma"), self._options("lr"), strict=True)
        return [math.sqrt(2 * float(lr)) if sigma is None else float(sigma) for sigma, lr in pairs]

    def _rescale(self, factor: float) -> None:
        for group in self.param_groups:
            group["lr"] *= factor**2
            group["sigma"] = None if group["sigma"] is None else group["sigma"] * factor


class ExactAdamMCMC(Sampler):
    r"""The augmented chain of Theorem 1 as an optimizer: Adam's momenta, noisy, as part of the state. **Exact.**

        m_l <- beta_l m_l + (1 - beta_l) (grad V)^l + s_l sqrt(1 - beta_l^2) xi,    u = lr m1 / sqrt(|m2| + floor)
        tau = theta - u + sigma eps + sigma_along z u;   accept with min(1, exp(U(theta) - U(tau) + log_q_ratio + log C))

    See `adammcmc.kernels.exact_adam_mcmc`. It needs `fixed_data=True`: the gradient of all data is part of what is sampled. One
    step costs one forward and backward. It demonstrates the paper's theory; `Underdamped` is far more efficient.

    Args:
        params: as for any optimizer. Groups may differ in lr, betas and sigma.
        lr: Adam's learning rate.
        betas: Adam's decay rates.
        num_data: the number of training examples n.
        prior: required, and proper.
        sigma: as in `AdamMCMC`.
        sigma_along: as in `AdamMCMC`.
        momentum_spread: (s1, s2) in units of grad V and its square; None measures them at the first step by a pilot of 20
            gradients, and again during burn-in.
        floor: None is s2.
        **common: see `Sampler`; `fixed_data` must be True: each closure returns the loss of the whole data set. `burn_in`
            tunes sigma to an acceptance of 0.25.
    """

    _target_acceptance = kernels.ExactAdamMCMCKernel.target_acceptance
    _not_taken = frozenset(("acceptance", "examples"))
    _tunes_sigma_along = True
    _needs_prior = True

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.99, 0.99),
        *,
        num_data: int,
        prior: Prior,
        sigma: float,
        sigma_along: float = 0.0,
        momentum_spread: tuple[float, float] | None = None,
        floor: float | None = None,
        **common: Unpack[Common],
    ) -> None:
        if not common.get("fixed_data"):
            raise ValueError(
                "ExactAdamMCMC needs fixed_data=True: the gradient of all data is part of its target, and would change at "
                "each step with minibatches. For those, use Underdamped or MALA with FullData()."
            )
        self._measures_spread = momentum_spread is None
        self.momentum_spread = momentum_spread
        self.floor = floor
        defaults = {"lr": lr, "betas": betas, "sigma": sigma, "sigma_along": sigma_along}
        super().__init__(params, defaults, num_data=num_data, prior=prior, **common)

    def _kernel(self, packing: Packing) -> Kernel:
        spread = self.momentum_spread or (1.0, 1.0)  # to check the other arguments; `_prepare` measures it before it is used
        return kernels.exact_adam_mcmc(
            [float(lr) for lr in self._options("lr")],
            self._options("betas"),
            sigma=self._sigmas(),
            sigma_along=self._sigma_along(),
            momentum_spread=spread,
            floor=self.floor,
        )

    def prepare(self, potential: Any, state: ChainState) -> ChainState:
        """The pilot, before the first step."""
        state = super().prepare(potential, state)
        if self.momentum_spread is not None:
            return state
        here = state.here
        if here is None:
            here = potential.evaluate(state.params, with_grad=True)
            self.network.layers.abort()
        self._measure(potential, state.params, here)
        return state._replace(here=here, memory=None)

    def _measure(self, potential: Any, params: Leaves, here: Evaluation) -> None:
        lr = max(float(lr) for lr in self._options("lr"))
        proposal = Prolate(self._sigmas(), self._sigma_along())
        self.network.layers.begin()  # the pilot is no step: nothing of it stays
        try:
            self.momentum_spread = momentum_spread(potential, params, here, proposal, lr, self.generator)
        finally:
            potential.place(params)
            self.network.layers.abort()

    def apply(self, change: Change, potential: Any, state: ChainState) -> None:
        super().apply(change, potential, state)
        adaptation = self.chains.adaptation
        if self._measures_spread and adaptation is not None and adaptation.has_new_window:
            assert state.here is not None
            self._measure(potential, state.params, state.here)
            self.chains.memory = None  # the momenta start afresh, from their law given the weights

    def _gather(self, packing: Packing, memory: NoisyMoments | None) -> NoisyMoments | None:
        return memory if memory is not None and _fits(memory.exp_avg, packing) else None

    def why_not_stacked(self) -> str | None:
        if self.momentum_spread is None:
            return "ExactAdamMCMC measures its `momentum_spread` for one chain at a time: give it"
        return super().why_not_stacked()

    def extra_state(self) -> dict[str, Any]:
        return {"momentum_spread": self.momentum_spread}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.momentum_spread = state["momentum_spread"]
