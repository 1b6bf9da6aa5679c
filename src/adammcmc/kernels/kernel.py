"""One transition of the chains, as a pure function: what a state is, what is reported, and how a step is settled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from adammcmc.acceptance import AcceptanceTest, Comparison
from adammcmc.kernels.proposal import Move
from adammcmc.target.leaves import Leaves, flatten, is_finite, select, unflatten
from adammcmc.target.randomness import Randomness
from adammcmc.target.target import Evaluation, Potential

__all__ = ["ChainState", "Info", "Kernel"]

_T = TypeVar("_T")


class ChainState(NamedTuple):
    """What the next step needs. Every tensor has the chains along its first axis."""

    params: Any
    """theta, a tensor or a pytree of tensors."""
    memory: Any
    """What the kernel remembers: Adam's moments (kept on rejection), a velocity; None where the first step makes it."""
    here: Evaluation | None
    """The target at `params`; None where each step brings its own batch."""
    carry: Any
    """What the acceptance test remembers."""
    step: int
    """Transitions taken."""
    frozen_at: Tensor
    """(chains,): the step at which the chain met a non-finite loss or gradient and stopped moving; -1 while healthy."""


class Info(NamedTuple):
    """What one may plot of a step, one number for each chain, on the chains' device."""

    loss: Tensor
    """Mean loss of the batch at the point the step started from (U for a density)."""
    proposed_loss: Tensor
    """The same at the proposed point; NaN if the test did not ask for it."""
    log_q_ratio: Tensor
    """log q(theta|tau) - log q(tau|theta); NaN if the test did not ask for it."""
    log_ratio: Tensor
    """Y, the log of the Metropolis-Hastings ratio."""
    acceptance_rate: Tensor
    """min(1, exp(Y)), or what another test than Metropolis has in its place."""
    is_accepted: Tensor
    is_finite: Tensor
    """Whether U was finite at the proposed point; False (NaN, infinite, outside the support) is a rejection."""
    num_examples: Tensor
    """Examples of the data that the decision looked at."""
    potential: Tensor
    """U at the point the step started from; an estimate where only a batch was looked at. float64."""
    step_to_noise: Tensor
    """|u| / sigma of Algorithm 1's proposal; NaN for other kernels."""
    log_ratio_noise: Tensor
    """Standard deviation of Y as an estimate on this batch; 0 where Y is exact, NaN where it is not known."""


class Kernel(Protocol):
    """A Markov kernel. `step` reads nothing but its arguments and changes none of them (except the generator)."""

    @property
    def acceptance(self) -> AcceptanceTest:
        """The test."""
        ...

    def init(self, params: Any, potential: Potential) -> ChainState:
        """The state of chains that start at `params`."""
        ...

    def step(self, state: ChainState, potential: Potential, generator: Randomness) -> tuple[ChainState, Info]:
        """One transition of every chain."""
        ...

    def approximation(self, *, fixed_data: bool) -> list[str]:
        """Why the kernel does not leave the target invariant, in a few words each; empty if it is exact."""
        ...


class Once(Generic[_T]):
    """A computation that is done when it is first asked for, and not again."""

    def __init__(self, compute: Callable[[], _T]) -> None:
        self.compute = compute
        self.value: _T | None = None

    def __call__(self) -> _T:
        if self.value is None:
            self.value = self.compute()
        return self.value


def start(params: Any, potential: Potential, remember: Callable[[Leaves], Any] = lambda leaves: None) -> ChainState:
    """The state at `params`, evaluated there if the data are fixed (refused if the target is zero or undefined)."""
    leaves, _ = flatten(params)
    num_chains = leaves[0].shape[0]
    if any(x.shape[:1] != (num_chains,) for x in leaves):
        raise ValueError(f"all leaves must have the chains on their first axis, got {[tuple(x.shape) for x in leaves]}.")
    if any(not x.is_floating_point() for x in leaves):
        raise TypeError(f"parameters must be floating point, got {[str(x.dtype) for x in leaves]}.")
    here = None
    if potential.fixed:
        here = potential.evaluate(leaves, with_grad=True)
        if bad := torch.nonzero(~is_finite(_level(here))).flatten().tolist():
            raise ValueError(
                f"the target is zero or undefined at the starting point of {len(bad)} of {num_chains} chains "
                f"(first: {bad[:5]}). Start inside the support."
            )
    frozen_at = torch.full((num_chains,), -1, dtype=torch.int64, device=leaves[0].device)
    return ChainState(params, remember(leaves), here, None, 0, frozen_at)


def settle(
    state: ChainState,
    potential: Potential,
    generator: Randomness,
    *,
    acceptance: AcceptanceTest,
    here: Evaluation,
    move: Move,
    there: Once[Evaluation],
    log_q_ratio: Once[Tensor],
    memory: Any = None,
    keep: Callable[[Tensor, Any, Any], Any] = lambda mask, new, old: new,
    log_uniform: Tensor | None = None,
) -> tuple[ChainState, Info]:
    """The second half of every Metropolis step: test the move, then keep `move.proposed` or stay.

    `memory` is what the next step shall remember, `keep` what remains of it in a chain that is frozen.

    `there` and `log_q_ratio` are evaluated only if the test (or the cache, for fixed data) asks for them. A chain whose
    current loss or update is not finite is frozen: parameters, memory and cache stay as they are from then on.
    """
    leaves, structure = flatten(state.params)
    was_free = state.frozen_at < 0
    healthy = is_finite(functools.reduce(torch.add, move.squares, _level(here))) & was_free
    comparison = Comparison(potential, leaves, move.proposed, here, there, log_q_ratio, healthy, log_uniform)
    verdict, carry = acceptance(comparison, state.carry, generator)
    if verdict.is_current_finite is not None:
        healthy = healthy & verdict.is_current_finite
    is_accepted, is_known_finite = verdict.is_accepted & healthy, verdict.is_finite
    cache = here if potential.fixed else None
    if potential.fixed and (there.value is not None or is_accepted.device.type != "cpu" or bool(is_accepted.any())):
        new = there()
        is_known_finite = is_known_finite & is_finite(_level(new))
        is_accepted = is_accepted & is_known_finite  # a test that never looks must not leave the support
        assert new.grad is not None
        assert here.grad is not None
        grad = select(is_accepted, new.grad, here.grad)
        losses, log_prior = select(is_accepted, (new.losses, new.log_prior), (here.losses, here.log_prior))
        cache = Evaluation(losses, log_prior, grad)
    frozen_at = state.frozen_at
    if healthy.device.type != "cpu" or not bool(healthy.all()):  # looking is free on the CPU, and saves work
        memory = keep(healthy, memory, state.memory)
        frozen_at = torch.where(was_free & ~healthy, state.step, state.frozen_at)
    new_state = ChainState(
        params=unflatten(select(is_accepted, move.proposed, leaves), structure),
        memory=memory,
        here=cache,
        carry=carry,
        step=state.step + 1,
        frozen_at=frozen_at,
    )
    info = Info(
        loss=_mean_loss(here),
        proposed_loss=_unknown(healthy) if there.value is None else _mean_loss(there.value),
        log_q_ratio=_unknown(healthy) if log_q_ratio.value is None else log_q_ratio.value,
        log_ratio=verdict.log_ratio,
        acceptance_rate=verdict.acceptance_rate * (healthy & is_known_finite),
        is_accepted=is_accepted,
        is_finite=is_known_finite,
        num_examples=verdict.num_examples,
        potential=_potential(potential, here) if verdict.potential is None else verdict.potential,
        step_to_noise=_unknown(healthy) if move.step_to_noise is None else move.step_to_noise,
        log_ratio_noise=_unknown(healthy) if verdict.log_ratio_noise is None else verdict.log_ratio_noise,
    )
    return new_state, info


def _potential(potential: Potential, here: Evaluation) -> Tensor:
    return potential.scale * _mean_loss(here).double() - here.log_prior


def _unknown(like: Tensor) -> Tensor:
    return torch.full_like(like, torch.nan, dtype=torch.float64)


def _mean_loss(evaluation: Evaluation) -> Tensor:
    losses = evaluation.losses
    return losses if losses.dim() == 1 else losses.mean(1)


def _level(evaluation: Evaluation) -> Tensor:
    """A number that is finite if and only if the loss and the log prior are."""
    return _mean_loss(evaluation) + evaluation.log_prior
