"""Momentum done exactly: metropolised underdamped Langevin dynamics, with HMC as its full refresh."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from adammcmc.acceptance import AcceptanceTest, Minibatch
from adammcmc.kernels.arguments import check_preconditioner, checked, times
from adammcmc.kernels.backend import UnderdampedBackend
from adammcmc.kernels.kernel import ChainState, Info, Kernel, Once, mean_loss, settle
from adammcmc.kernels.proposal import Move
from adammcmc.kernels.scaling import Dense, Scaling, forces, moves
from adammcmc.kernels.words import preconditioner_in_words, setting
from adammcmc.target.leaves import (
    Leaves,
    Setting,
    Settings,
    by_chain,
    flatten,
    inner,
    is_finite,
    same,
    select,
    spread_settings,
    standard_normal,
    unflatten,
    widen,
)
from adammcmc.target.potential import Evaluation, Potential
from adammcmc.target.randomness import Randomness, uniform

__all__ = ["Momentum", "UnderdampedKernel", "hmc", "raised", "underdamped"]

_KEPT = 0.97  # of the momentum at each step, where neither friction nor A is given
# in units of A^1/2, where A is given: a dense one leaves no direction long, others do (docs/exact.md has what was measured)
_FRICTION, _FRICTION_DENSE = 0.4, 0.7
_SHIFT = 0.05  # of the persistent uniform at each step


class _Reached(NamedTuple):
    """The last point of a trajectory whose points so far were refused."""

    params: Leaves
    here: Evaluation
    momentum: Leaves
    log_ratio: Tensor
    """Y of this point, against that from which the trajectory started."""


class Momentum(NamedTuple):
    """What the kernel remembers between steps."""

    momentum: Leaves
    """p = A^-1/2 v, N(0, I) at rest: the velocity in whitened units, so that a new A does not touch it."""
    uniform: Tensor
    """(chains,), float64, uniform on (-1, 1) at rest; its absolute value decides."""


def raised(decides: Tensor, is_accepted: Tensor, log_ratio: Tensor) -> Tensor:
    """What is accepted keeps its height |uniform| * density, so that the number is uniform again (Neal 2020)."""
    return torch.where(is_accepted, decides * torch.exp(-log_ratio.nan_to_num(nan=0.0)), decides)


def _chosen(mask: Tensor, yes: Evaluation, no: Evaluation) -> Evaluation:
    assert yes.grad is not None
    assert no.grad is not None
    losses, log_prior = select(mask, (yes.losses, yes.log_prior), (no.losses, no.log_prior))
    return Evaluation(losses, log_prior, select(mask, yes.grad, no.grad))


@dataclass(frozen=True)
class UnderdampedKernel(Kernel):
    """A partial refresh of the momentum, then leapfrog steps and a test. See `underdamped`."""

    step_size: Settings
    friction: Setting | None
    acceptance: AcceptanceTest
    num_leapfrog: int = 1
    persistent_uniform: bool = True
    preconditioner: Leaves | Scaling | None = None
    structure: Any = None
    name: str = "underdamped Langevin"
    backend: UnderdampedBackend | None = None
    """A faster way to compute a step with one leapfrog step and a test; None: as written here."""
    jitter: float = 0.0
    """Each chain's step is h (1 + jitter (2 u - 1)), u uniform and new at each step."""
    num_chances: int = 1
    """Leapfrog moves that may be tried in a row before the momentum is flipped."""
    target_acceptance: ClassVar[float] = 0.85

    def init(self, params: Any, potential: Potential) -> ChainState:
        check_preconditioner(params, self.preconditioner, self.structure)
        return super().init(params, potential)

    def step(self, state: ChainState, potential: Potential, generator: Randomness) -> tuple[ChainState, Info]:
        params, _ = flatten(state.params)
        if self.jitter:
            u = uniform(params[0].shape[:1], torch.float64, params[0].device, generator)
            still = replace(self.scaled(1 + self.jitter * (2 * u - 1)), jitter=0.0)
            return still.step(state, potential, generator)
        here = state.here or potential.evaluate(params, with_grad=True)
        memory = state.memory or self._fresh(params, generator)
        backend = None if self._is_unadjusted else self.backend
        before: Leaves = ()
        there = Once(lambda: potential.evaluate(move.proposed, with_grad=True))
        if self._is_unadjusted:
            move, before, after = self._baoa(params, here, memory.momentum, potential.scale, generator)
            finish = Once(lambda: (torch.zeros_like(memory.uniform), after))
        elif backend is not None:  # which moves weights and momentum where they lie
            if not same(memory.momentum, backend.momentum):
                torch._foreach_copy_(list(backend.momentum), list(memory.momentum))
            departure = backend.depart(here, generator)
            move, finish = departure.move, Once(lambda: (departure.arrive(there()), backend.momentum))
        else:
            before = self._refreshed(memory.momentum, generator)
            move, half_way = self._leapfrog(params, here, before, potential)
            finish = Once(lambda: self._arrive(before, half_way, there(), potential.scale))
        decides = self._moved(memory.uniform, generator)
        move = move._replace(log_uniform=decides.abs().log())
        log_q_ratio = Once(lambda: finish()[0])
        state, info = settle(state, potential, generator, self.acceptance, here, move, there, log_q_ratio)
        if backend is not None:
            momentum = backend.momentum
        else:
            flipped = tuple(-p for p in before)  # on rejection: without it momentum is created from nothing
            is_refused = finish.value is None and self.acceptance.needs_noise  # before p' was known
            momentum = flipped if is_refused else select(info.is_accepted, finish()[1], flipped)
        log_ratio = info.log_ratio
        if self._has_more_chances(potential) and finish.value is not None:
            reached = _Reached(move.proposed, there(), finish()[1], log_ratio)
            state, info, momentum, log_ratio = self._try_on(state, info, momentum, reached, decides, potential)
        return state._replace(memory=Momentum(momentum, raised(decides, info.is_accepted, log_ratio))), info

    def _has_more_chances(self, potential: Potential) -> bool:
        """Whether a refused proposal is followed by another: where Y is exact, and compared with one uniform number."""
        test = self.acceptance
        return self.num_chances > 1 and potential.fixed and test.is_metropolis and test.uses_batch_only

    def _try_on(
        self, state: ChainState, info: Info, momentum: Leaves, reached: _Reached, decides: Tensor, potential: Potential
    ) -> tuple[ChainState, Info, Leaves, Tensor]:
        """Follow the trajectories of refused proposals until a point of each is accepted, or `num_chances` are used up.

        Returns state, info and momentum with what was accepted, and Y of each chain's accepted point.
        """
        params, structure = flatten(state.params)
        here, loss, log_ratio, height = state.here, info.proposed_loss, info.log_ratio, decides.abs().log()
        assert here is not None
        is_moving = ~info.is_accepted & (state.frozen_at < 0) & is_finite(log_ratio)
        is_accepted = info.is_accepted
        for _ in range(self.num_chances - 1):
            if not bool(is_moving.any()):
                break
            move, half_way = self._leapfrog(reached.params, reached.here, reached.momentum, potential)
            # chains that are settled stay where they are: their layers' buffers must be those of that point
            proposed = select(is_moving, move.proposed, params)
            there = potential.evaluate_some(proposed, is_moving)
            gained, after = self._arrive(reached.momentum, half_way, there, potential.scale)
            y = reached.log_ratio + gained - potential.compare(reached.here, there)
            reached = _Reached(proposed, there, after, y)
            is_found = is_moving & (height < y)
            params, momentum = select(is_found, proposed, params), select(is_found, after, momentum)
            here = _chosen(is_found, there, here)
            loss, log_ratio = select(is_found, (mean_loss(there), y), (loss, log_ratio))
            is_accepted, is_moving = is_accepted | is_found, is_moving & ~is_found & is_finite(y)
        state = state._replace(params=unflatten(params, structure), here=here)
        return state, info._replace(is_accepted=is_accepted, proposed_loss=loss), momentum, log_ratio

    def restored(self, fields: tuple[Any, ...]) -> Momentum:
        """The memory from its fields, as a checkpoint has them."""
        return Momentum(tuple(fields[0]), fields[1])

    @property
    def num_evaluations(self) -> int:  # type: ignore[override]
        """Of the loss in a step."""
        return 1 + self.num_leapfrog * self.num_chances

    @property
    def is_capturable(self) -> bool:  # type: ignore[override]
        """Not if the host decides how often a trajectory is followed."""
        return self.num_chances == 1

    why_not_capturable = "looks after each move whether another chance is needed (`num_chances`)"

    @property
    def _is_unadjusted(self) -> bool:
        """No ratio is needed, so one gradient of any batch suffices."""
        return not self.acceptance.needs_noise and self.num_leapfrog == 1

    def _fresh(self, params: Leaves, generator: Randomness) -> Momentum:
        like = tuple(widen(p) for p in params)
        first = uniform(params[0].shape[:1], torch.float64, params[0].device, generator)
        return Momentum(standard_normal(like, generator), 2 * first - 1)

    def kept(self, num_leaves: int) -> list[tuple[Setting, Setting]]:
        """c = exp(-friction h), and sqrt(1 - c^2)"""
        if self.friction is None and self.preconditioner is None:
            return [(_KEPT, math.sqrt(1 - _KEPT**2))] * num_leaves
        friction = self.usual_friction if self.friction is None else self.friction
        kept: list[tuple[Setting, Setting]] = []
        for h in spread_settings(self.step_size, num_leaves):
            if isinstance(h, Tensor) or isinstance(friction, Tensor):
                own = h if isinstance(h, Tensor) else friction
                assert isinstance(own, Tensor)
                size = torch.as_tensor(h, dtype=torch.float64, device=own.device)
                each = torch.where(size > 0, torch.exp(-friction * size), 1.0)
                kept.append((each, (1 - each**2).sqrt()))
            else:
                c = math.exp(-friction * h) if h > 0 else 1.0
                kept.append((c, math.sqrt(1 - c**2)))
        return kept

    def _refreshed(self, momentum: Leaves, generator: Randomness) -> Leaves:
        """p <- c p + sqrt(1 - c^2) xi"""
        noise = standard_normal(momentum, generator)
        return tuple(
            by_chain(c, p) * p + by_chain(s, p) * xi
            for (c, s), p, xi in zip(self.kept(len(momentum)), momentum, noise, strict=True)
        )

    def _moved(self, last: Tensor, generator: Randomness) -> Tensor:
        """The number that decides: the last one moved on by a fixed amount, or a new one."""
        if self.persistent_uniform:
            return torch.remainder(last + _SHIFT + 1, 2) - 1
        return 2 * uniform(last.shape, last.dtype, last.device, generator) - 1

    def _kick(self, momentum: Leaves, grad: Leaves | None, scale: Setting) -> Leaves:
        """p - scale h S' g"""
        assert grad is not None
        pulls = forces(self.step_size, self.preconditioner, grad)
        return tuple(p - f * by_chain(scale, p) for p, f in zip(momentum, pulls, strict=True))

    def _drift(self, params: Leaves, momentum: Leaves, fraction: float = 1.0) -> Leaves:
        """theta + h S p"""
        steps = moves(self.step_size, self.preconditioner, momentum)
        moved = (widen(x) + step * fraction for x, step in zip(params, steps, strict=True))
        return tuple(y.to(x.dtype) for y, x in zip(moved, params, strict=True))

    def _leapfrog(self, params: Leaves, here: Evaluation, momentum: Leaves, potential: Potential) -> tuple[Move, Any]:
        """All but the last half kick: the proposed point, and the momentum with which it was reached."""
        half_way = self._kick(momentum, here.grad, potential.scale / 2)
        squares = tuple(inner(p, p) for p in half_way)  # of the first kick: whether the chain is healthy where it stands
        proposed = self._drift(params, half_way)
        for _ in range(self.num_leapfrog - 1):
            half_way = self._kick(half_way, potential.force(proposed), potential.scale)
            proposed = self._drift(proposed, half_way)
        return Move(proposed, squares), half_way

    def _arrive(self, before: Leaves, half_way: Any, there: Evaluation, scale: Setting) -> tuple[Tensor, Leaves]:
        """The last half kick: (|p|^2 - |p'|^2) / 2, and p'."""
        after = self._kick(half_way, there.grad, scale / 2)
        gained = [inner(b, b) - inner(a, a) for b, a in zip(before, after, strict=True)]
        return 0.5 * torch.stack(gained).sum(0), after

    def _baoa(
        self, params: Leaves, here: Evaluation, momentum: Leaves, scale: Setting, generator: Randomness
    ) -> tuple[Move, Leaves, Leaves]:
        """Kick, half drift, refresh, half drift: one gradient a step, at whatever batch this step has."""
        kicked = self._kick(momentum, here.grad, scale)
        after = self._refreshed(kicked, generator)
        proposed = self._drift(self._drift(params, kicked, 0.5), after, 0.5)
        squares = tuple(inner(p, p) for p in kicked)
        return Move(proposed, squares), momentum, after

    def scaled(self, factor: Setting) -> UnderdampedKernel:
        """The same kernel with its step `factor` times as long."""
        return replace(self, step_size=times(self.step_size, factor))

    def with_preconditioner(self, scaling: Leaves | Scaling, structure: Any = None) -> UnderdampedKernel:
        """The same kernel with this A: a diagonal, or a `Scaling`."""
        return replace(self, preconditioner=scaling, structure=structure)

    def with_friction(self, friction: Setting) -> UnderdampedKernel:
        """The same kernel with another friction, of all chains or of each."""
        return replace(self, friction=friction)

    @property
    def usual_friction(self) -> float:
        """Where none is given, with an A."""
        return _FRICTION_DENSE if isinstance(self.preconditioner, Dense) else _FRICTION

    def details(self) -> list[str]:
        count = len(self.step_size) if isinstance(self.step_size, list) else 1
        kept: list[Setting] = [c for c, _ in self.kept(count)]
        memory = "new momentum at each step" if self.friction == math.inf else setting("momentum kept", kept)
        return [
            setting("step size", self.step_size) + (f" +- {self.jitter:.0%}" if self.jitter else ""),
            memory,
            f"{self.num_leapfrog} leapfrog step{'s' * (self.num_leapfrog > 1)}"
            + (f", up to {self.num_chances} times" if self.num_chances > 1 else ""),
            preconditioner_in_words(self.preconditioner),
        ]


def underdamped(
    step_size: Settings,
    friction: float | None = None,
    *,
    num_leapfrog: int = 1,
    persistent_uniform: bool | None = None,
    preconditioner: Any = None,
    acceptance: AcceptanceTest | None = None,
    jitter: float = 0.0,
    num_chances: int = 1,
) -> UnderdampedKernel:
    r"""Metropolised underdamped Langevin dynamics (Horowitz 1991): momentum and Metropolis, combined exactly. **Recommended.**

        v <- c v + sqrt(1 - c^2) A^1/2 xi,      c = exp(-friction h),  v ~ N(0, A) at rest
        v1 = v - (h/2) A g(theta),  tau = theta + h v1,  v2 = v1 - (h/2) A g(tau),      g = grad U, h = step_size
        Y = U(theta) - U(tau) + (v' A^-1 v - v2' A^-1 v2) / 2
        accept: (tau, v2);  reject: (theta, -v)
        with `num_chances` = K:  (tau, v2) is followed for up to K - 1 more such moves, and the first point whose Y, from theta
        on, exceeds log |uniform| is accepted; reject if there is none

    Target: p ~ exp(-U), **exactly**, for a density, for fixed data, and with `FullData` for minibatch gradients too. The flip
    of the velocity on rejection is part of it. With `AlwaysAccept` it is the unadjusted sampler (kick, half drift, refresh,
    half drift), **approximate**, one gradient of any batch a step.

    Cost: for a density or fixed data `num_leapfrog` forwards and backwards; otherwise one more. With `AlwaysAccept` one.

    Args:
        step_size: h. Tune it to an acceptance near 0.85. (A tensor (chains,) gives one value to each chain, a
            list one to each leaf.)
        friction: how fast the velocity is forgotten. None is 0.4 in units of A^1/2 (0.7 with a dense A), and without an A
            keeps 0.97 of it at each step; `warm_up` tunes it where there are chains enough. `math.inf` is a full refresh:
            MALA with step h^2 / 2, or HMC if num_leapfrog > 1 (`hmc`).
        num_leapfrog: steps between two refreshes and tests.
        persistent_uniform: decide by a uniform number that moves by a fixed amount at each step instead of a fresh one, so that
            rejections come in clusters and the velocity lives longer in between (Neal 2020). Exact as well, for tests of the
            form log uniform < Y: None does so for these, and draws a fresh one for others (`Barker`, `Tuna`, ...).
        preconditioner: A, fixed while sampling: a diagonal, positive, in the structure of the parameters (without a chain
            axis), or a `Scaling` (`Dense`, `Kronecker`).
        acceptance: the test; `Minibatch()` by default.
        jitter: each chain and step has its own h, uniform between (1 - jitter) h and (1 + jitter) h and independent of where
            the chain is, so that chains do not wait long in places that are too narrow for h. Exact as well. Below 1.
        num_chances: K, how many moves may be tried before the velocity is flipped, all against one uniform number (Campos and
            Sanz-Serna 2015). Exact as well: on the way back the same points are refused. For densities and fixed data with a
            Metropolis test; each further move costs a gradient (`docs/exact.md` has what it is worth).
    """
    step_size = checked("step_size", step_size)
    if not 0 <= jitter < 1:
        raise ValueError(f"`jitter` must be at least 0 and below 1, got {jitter}.")
    if friction is not None and not friction >= 0:
        raise ValueError(f"`friction` must not be negative, got {friction}.")
    for name, number in (("num_leapfrog", num_leapfrog), ("num_chances", num_chances)):
        if type(number) is not int or number < 1:
            raise ValueError(f"`{name}` must be a whole number, at least 1, got {number!r}.")
    test = acceptance or Minibatch()
    is_metropolis = test.is_metropolis
    if persistent_uniform and not is_metropolis:
        raise ValueError(
            f"`persistent_uniform` must be False with this test ({test}): its decision is not log uniform < Y, so the number "
            "would not be uniform at the next step."
        )
    persistent_uniform = is_metropolis if persistent_uniform is None else persistent_uniform
    scaling, structure = preconditioner, None
    if preconditioner is not None and not isinstance(preconditioner, Scaling):
        scaling, structure = flatten(preconditioner)
    kernel = UnderdampedKernel(step_size, friction, test, num_leapfrog, persistent_uniform, scaling, structure)
    return replace(kernel, jitter=float(jitter), num_chances=num_chances)


def hmc(
    step_size: Settings, num_leapfrog: int = 10, *, preconditioner: Any = None, acceptance: AcceptanceTest | None = None
) -> UnderdampedKernel:
    """Hamiltonian Monte Carlo: `underdamped` with a new momentum at each step, and a fresh uniform number.

        v ~ N(0, A);  (tau, v') = num_leapfrog leapfrog steps of size h from (theta, v);  accept with min(1, exp(Y))

    Target: p ~ exp(-U), **exactly**, under the conditions of `underdamped`. Cost: `num_leapfrog` forwards and backwards.
    """
    kernel = underdamped(
        step_size,
        math.inf,
        num_leapfrog=num_leapfrog,
        persistent_uniform=False,
        preconditioner=preconditioner,
        acceptance=acceptance,
    )
    return replace(kernel, name="HMC")
