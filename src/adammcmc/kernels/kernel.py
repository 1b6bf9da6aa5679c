"""One transition of the chains, as a pure function: what a state is, what is reported, and how a step is settled.

A new kernel is a file beside this one (`langevin.py` is the shortest), exported in `kernels/__init__.py`. Its optimizer is a
class in `samplers/`, as in `samplers/exact.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from adammcmc.acceptance import AcceptanceTest, Comparison, Verdict
from adammcmc.kernels.arguments import check_chains, settings_by_field
from adammcmc.kernels.proposal import Move
from adammcmc.kernels.words import acceptance_in_words, exactness, setting
from adammcmc.target.leaves import Leaves, flatten, is_finite, select, unflatten
from adammcmc.target.potential import Evaluation, Potential
from adammcmc.target.randomness import Randomness

__all__ = ["ChainState", "Info", "Kernel", "mean_loss"]

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
    step: Any
    """Transitions taken."""
    frozen_at: Tensor
    """(chains,): the step at which the chain met a non-finite loss or gradient and stopped moving; -1 while healthy."""


class Info(NamedTuple):
    """What is reported about a step, one number per chain, on the chains' device."""

    loss: Tensor
    """Mean loss of the batch at the point the step started from (U for a density)."""
    proposed_loss: Tensor
    """The same at the proposed point; NaN if the test did not need it."""
    log_q_ratio: Tensor
    """log q(theta|tau) - log q(tau|theta); NaN if the test did not need it."""
    log_ratio: Tensor
    """Y, the log of the Metropolis-Hastings ratio."""
    acceptance_rate: Tensor
    """min(1, exp(Y)), or the equivalent for a test other than Metropolis."""
    is_accepted: Tensor
    is_finite: Tensor
    """Whether U was finite at the proposed point; False (NaN, infinite, outside the support) is a rejection."""
    num_examples: Tensor
    """Examples of the data that the decision used."""
    potential: Tensor
    """U at the point the step started from; an estimate where only a batch was evaluated. float64."""
    step_to_noise: Tensor
    """|u| / sigma of Algorithm 1's proposal; NaN for other kernels."""
    log_ratio_noise: Tensor
    """Standard deviation of Y as an estimate on this batch; 0 where Y is exact, NaN where it is not known."""


class Kernel(Protocol):
    """A Markov kernel. `step` reads nothing but its arguments and changes none of them (except the generator).

    A kernel with a backend may keep its state in memory of the backend, which `step` overwrites.
    """

    name: str
    acceptance: AcceptanceTest
    """The test."""
    backend: Any = None
    """A faster way to compute the proposal (`kernels.backend`); None: as the kernel is written."""
    num_evaluations: int = 2
    """Of the loss in a step, at most."""
    needs_examples: bool = False
    """Whether the kernel itself chooses examples of the data."""
    is_capturable: bool = True
    """Whether a CUDA graph can hold a step without a backend."""
    why_not_capturable: str = ""

    def init(self, params: Any, potential: Potential) -> ChainState:
        """The state of chains that start at `params`, evaluated there if the data are fixed."""
        check_chains(self, params)
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
        return ChainState(params, self.first_memory(leaves), here, None, 0, frozen_at)

    def step(self, state: ChainState, potential: Potential, generator: Randomness) -> tuple[ChainState, Info]:
        """One transition of every chain."""

    def restored(self, fields: tuple[Any, ...]) -> Any:
        """The memory from its fields, as a checkpoint has them."""
        return None

    def first_memory(self, params: Leaves) -> Any:
        """The memory before the first step, for leaves (chains, ...); None if the first step makes it."""
        return None

    def joined(self, memories: Sequence[Any]) -> Any:
        """The memories of several chains as one; None to start afresh."""
        return None

    def learning(self) -> Kernel:
        """The kernel as it steps while its settings are tuned, from the gradients of its states too."""
        return self

    def counted(self, memory: Any) -> Any:
        """The memory after a step was replayed on the device: with what is counted on the host advanced."""
        return memory

    def approximation(self, *, fixed_data: bool) -> list[str]:
        """Why the kernel does not leave the target invariant, in a few words each; empty if it is exact."""
        reason = self.acceptance.approximation(fixed_data=fixed_data)
        return [] if reason is None else [reason]

    def details(self) -> list[str]:
        """The settings that matter, in a few words each."""
        return [setting(name.replace("_", " "), value) for name, value in settings_by_field(self)]

    def describe(self, *, fixed_data: bool | None = None) -> str:
        """The kernel in one line: name, settings, acceptance test, exact or approximate: why.

        `fixed_data`: whether the target is a density, or every gradient uses all data; None gives both answers.
        """
        reasons = (self.approximation(fixed_data=fixed) for fixed in (True, False))
        test = acceptance_in_words(self.acceptance, fixed_data=fixed_data)
        return f"{self.name}: {', '.join(self.details())} | {test} | {exactness(*reasons, fixed_data=fixed_data)}"

    def __str__(self) -> str:
        return self.describe()


class Once(Generic[_T]):
    """A computation that is done at its first call, and not again."""

    def __init__(self, compute: Callable[[], _T]) -> None:
        self.compute = compute
        self.value: _T | None = None

    def __call__(self) -> _T:
        if self.value is None:
            self.value = self.compute()
        return self.value


def settle(
    state: ChainState,
    potential: Potential,
    generator: Randomness,
    acceptance: AcceptanceTest,
    here: Evaluation,
    move: Move,
    there: Once[Evaluation],
    log_q_ratio: Once[Tensor],
    *,
    memory: Any = None,
    keep: Callable[[Tensor, Any, Any], Any] = lambda mask, new, old: new,
) -> tuple[ChainState, Info]:
    """The second half of every Metropolis step: test the move, then keep `move.proposed` or stay.

    `there` and `log_q_ratio` are evaluated only if the test, or the cache of fixed data, requires them. A chain whose
    current loss or update is not finite is frozen: parameters, memory and cache stay as they are from then on.

    Args:
        memory: what the next step shall remember.
        keep: `keep(mask, new, old)`, the memory of each chain: the new one in the mask, the old one outside.
    """
    if move.log_prior is not None:  # summed by a backend on its way
        evaluated, (before, after) = there, move.log_prior
        here, there = here._replace(log_prior=before), Once(lambda: evaluated()._replace(log_prior=after))
    leaves, structure = flatten(state.params)
    frozen_at = state.frozen_at
    try:
        fast = None
        if move.in_place is not None:
            fast = move.in_place.decide(acceptance, potential, here, there, log_q_ratio, move, state)
        if fast is not None:  # the same numbers in one launch; frozen chains were not touched
            info, carry = fast, None
        else:
            current = leaves if move.in_place is None else move.in_place.current
            healthy = is_finite(functools.reduce(torch.add, move.squares, _level(here))) & (state.frozen_at < 0)
            comparison = Comparison(potential, current, move.proposed, here, there, log_q_ratio, healthy, move.log_uniform)
            verdict, carry = acceptance(comparison, state.carry, generator)
            info, healthy = _report(comparison, verdict, move, there, log_q_ratio)
            if healthy.device.type != "cpu" or not bool(healthy.all()):  # reading is free on the CPU, and saves work
                memory = memory if move.in_place is not None else keep(healthy, memory, state.memory)
                frozen_at = torch.where((state.frozen_at < 0) & ~healthy, state.step, state.frozen_at)
        new = there.value if potential.fixed else None
    except BaseException:
        if move.in_place is not None:
            move.in_place.undo()
        raise
    cache = here if potential.fixed else None
    if move.in_place is not None:
        grad = move.in_place.keep(info.is_accepted, None if new is None else new.grad, here.grad)
        params = leaves
    else:
        grad = None if new is None or new.grad is None or here.grad is None else select(info.is_accepted, new.grad, here.grad)
        params = select(info.is_accepted, move.proposed, leaves)
    if new is not None:
        losses, log_prior = select(info.is_accepted, (new.losses, new.log_prior), (here.losses, here.log_prior))
        cache = Evaluation(losses, log_prior, grad)
    step = state.step if isinstance(state.step, Tensor) else state.step + 1  # a graph's clock is advanced by its owner
    return ChainState(unflatten(params, structure), memory, cache, carry, step, frozen_at), info


def _report(
    comparison: Comparison, verdict: Verdict, move: Move, there: Once[Evaluation], log_q_ratio: Once[Tensor]
) -> tuple[Info, Tensor]:
    """All that is reported of a test, and whether each chain is healthy."""
    potential, here, healthy = comparison.potential, comparison.here, comparison.may_move
    if verdict.is_current_finite is not None:
        healthy = healthy & verdict.is_current_finite
    is_accepted, is_known_finite = verdict.is_accepted & healthy, verdict.is_finite
    if potential.fixed and (there.value is not None or is_accepted.device.type != "cpu" or bool(is_accepted.any())):
        is_known_finite = is_known_finite & is_finite(_level(there()))
        is_accepted = is_accepted & is_known_finite  # without a test, too, a chain must not leave the support
    loss = mean_loss(here)
    info = Info(
        loss=loss,
        proposed_loss=_unknown(healthy) if there.value is None else mean_loss(there.value),
        log_q_ratio=_unknown(healthy) if log_q_ratio.value is None else log_q_ratio.value,
        log_ratio=verdict.log_ratio,
        acceptance_rate=verdict.acceptance_rate * (healthy & is_known_finite),
        is_accepted=is_accepted,
        is_finite=is_known_finite,
        num_examples=verdict.num_examples,
        potential=potential.scale * loss.double() - here.log_prior if verdict.potential is None else verdict.potential,
        step_to_noise=_unknown(healthy) if move.step_to_noise is None else move.step_to_noise,
        log_ratio_noise=_unknown(healthy) if verdict.log_ratio_noise is None else verdict.log_ratio_noise,
    )
    return info, healthy


def _unknown(like: Tensor) -> Tensor:
    return torch.full_like(like, torch.nan, dtype=torch.float64)


def mean_loss(evaluation: Evaluation) -> Tensor:
    """The mean loss of each chain, (chains,)."""
    losses = evaluation.losses
    return losses if losses.dim() == 1 else losses.mean(1)


def _level(evaluation: Evaluation) -> Tensor:
    """A number that is finite if and only if the loss and the log prior are."""
    return mean_loss(evaluation) + evaluation.log_prior
