"""Trajectories whose forces come from batches, and whose test uses all data: one test for many batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from adammcmc.acceptance import AcceptanceTest
from adammcmc.kernels.hamiltonian import Momentum, UnderdampedKernel, raised, underdamped
from adammcmc.kernels.kernel import ChainState, Info, Once, settle
from adammcmc.kernels.proposal import Move
from adammcmc.kernels.words import preconditioner_in_words, setting
from adammcmc.target import keyed_random
from adammcmc.target.leaves import Leaves, Settings, flatten, inner, select
from adammcmc.target.potential import Potential
from adammcmc.target.randomness import Randomness

__all__ = ["AmortisedKernel", "amortised_langevin"]


@dataclass(frozen=True)
class AmortisedKernel(UnderdampedKernel):
    """`UnderdampedKernel` with a palindrome of batches in the place of a leapfrog step. See `amortised_langevin`."""

    name: str = "amortised Langevin"
    num_batches: int | None = None
    """L, the different batches of a trajectory; None is all."""
    has_gradient: bool = False
    """Whether the gradient of all data is computed where a trajectory ends, for a metric to be learnt from."""

    num_evaluations = 2

    def init(self, params: Any, potential: Potential) -> ChainState:
        self.check_parts(potential)
        return super().init(params, potential)

    def check_parts(self, potential: Potential) -> None:
        """Refuse data that do not stay, or that do not come in batches."""
        count = potential.num_parts
        if not potential.fixed or count < 2:
            raise ValueError(
                "amortised Langevin needs all data, in two batches or more: set `batch_size` in `sample`; in a loop of your "
                "own pass a list of closures, one for each batch, always the same ones; for a `DataDensity` set `num_parts`."
            )
        if self.num_batches is not None and self.num_batches > count:
            raise ValueError(f"`num_batches` is {self.num_batches}, and the data come in {count} batches: leave it out.")

    def step(self, state: ChainState, potential: Potential, generator: Randomness) -> tuple[ChainState, Info]:
        self.check_parts(potential)
        params, _ = flatten(state.params)
        memory = state.memory or self._fresh(params, generator)
        parts = self._order(params, potential, generator)
        before = self._lasting(len(parts))._refreshed(memory.momentum, generator)
        proposed, after = self._trajectory(params, before, [*parts, *reversed(parts)], potential)
        here = state.here or potential.evaluate(params, with_grad=self.has_gradient)
        there = Once(lambda: potential.evaluate(proposed, with_grad=self.has_gradient))
        gained = torch.stack([inner(b, b) - inner(a, a) for b, a in zip(before, after, strict=True)]).sum(0)
        decides = self._moved(memory.uniform, generator)
        move = Move(proposed, (), log_uniform=decides.abs().log())
        state, info = settle(state, potential, generator, self.acceptance, here, move, there, Once(lambda: 0.5 * gained))
        momentum = select(info.is_accepted, after, tuple(-p for p in before))  # the flip: see `UnderdampedKernel`
        return state._replace(memory=Momentum(momentum, raised(decides, info.is_accepted, info.log_ratio))), info

    def _order(self, params: Leaves, potential: Potential, generator: Randomness) -> list[int]:
        """The batches of the way there, whatever the state: by a key of the first chain, so that others change nothing."""
        key = keyed_random.keys(len(params[0]), params[0].device, generator)[:1]
        count = potential.num_parts if self.num_batches is None else self.num_batches
        found: list[int] = keyed_random.order(key, potential.num_parts, count)[0].tolist()
        return found

    def _trajectory(
        self, params: Leaves, momentum: Leaves, parts: Sequence[int], potential: Potential
    ) -> tuple[Leaves, Leaves]:
        """Half a drift, then kick after kick with a drift between them, and half a drift."""
        params = self._drift(params, momentum, 0.5)
        for i, part in enumerate(parts):
            momentum = self._kick(momentum, potential.force_of(params, part), potential.scale)
            params = self._drift(params, momentum, 1.0 if i + 1 < len(parts) else 0.5)
        return params, momentum

    def _lasting(self, num_batches: int) -> UnderdampedKernel:
        """With the friction of a whole trajectory, 2 L h long, in each step."""
        if self.friction is None and self.preconditioner is None:
            return self
        return self.with_friction(2 * num_batches * (self.usual_friction if self.friction is None else self.friction))

    def learning(self) -> AmortisedKernel:
        return replace(self, has_gradient=True)

    @property
    def is_capturable(self) -> bool:  # type: ignore[override]
        return False

    why_not_capturable = "draws the order of the batches on the host"

    def approximation(self, *, fixed_data: bool) -> list[str]:
        return super().approximation(fixed_data=True)

    def describe(self, *, fixed_data: bool | None = None) -> str:
        return super().describe(fixed_data=True)

    def details(self) -> list[str]:
        is_plain = self.friction is None and self.preconditioner is None
        friction = self.usual_friction if self.friction is None else self.friction
        which = "all batches" if self.num_batches is None else f"{self.num_batches} of the batches"
        return [
            setting("step size", self.step_size),
            "momentum kept 0.97" if is_plain else setting("friction", friction),
            f"{which}, forth and back",
            preconditioner_in_words(self.preconditioner),
        ]


def amortised_langevin(
    step_size: Settings,
    friction: float | None = None,
    *,
    num_batches: int | None = None,
    persistent_uniform: bool | None = None,
    preconditioner: Any = None,
    acceptance: AcceptanceTest | None = None,
) -> AmortisedKernel:
    r"""Langevin dynamics with forces from batches, and one test for a trajectory of them. **Exact.**

        v <- c v + sqrt(1 - c^2) A^1/2 xi,      c = exp(-2 L h friction),  v ~ N(0, A) at rest
        for B = b_1, ..., b_L, b_L, ..., b_1:   theta <- theta + (h/2) v,  v <- v - h A g_B(theta),  theta <- theta + (h/2) v
        tau = theta and v2 = v at the end;      Y = U(theta) - U(tau) + (v' A^-1 v - v2' A^-1 v2) / 2
        accept: (tau, v2);  reject: (theta, -v)

    g_B is the gradient of U as batch B estimates it, with the prior's part. The order of the batches is random and independent
    of theta. Each drift and each kick preserves volume. The reverse trajectory visits the same batches in the same order, since
    the order is a palindrome: flip v2, run the trajectory again, and it ends in (theta, -v). So the test makes it exact,
    however noisy g_B is: the noise changes Y, hence how often moves are accepted (AMAGOLD, arXiv 2003.00193, is a relative).

    Target: p ~ exp(-U), **exactly**. Cost: 2 L gradients of a batch, and one forward of all data; two passes and a forward
    where every batch is used. `docs/exact.md` has what it is worth beside `underdamped` with gradients of all data.

    Args:
        step_size: h, for one batch; a trajectory is 2 L h long. (A tensor (chains,) gives one value to each chain, a
            list one to each leaf.)
        friction: as for `underdamped`, per unit of time. None without an A keeps 0.97 of the velocity at each trajectory.
        num_batches: L; None is all. Fewer are a random subset, a new one for each trajectory.
        persistent_uniform, preconditioner, acceptance: as for `underdamped`.
    """
    if num_batches is not None and (type(num_batches) is not int or num_batches < 1):
        raise ValueError(f"`num_batches` must be a whole number, at least 1, or None, got {num_batches!r}.")
    like = underdamped(
        step_size, friction, persistent_uniform=persistent_uniform, preconditioner=preconditioner, acceptance=acceptance
    )
    if not like.acceptance.needs_noise:
        raise ValueError(f"the test of a trajectory is what makes it exact, and '{like.acceptance}' tests nothing.")
    shared = {field.name: getattr(like, field.name) for field in fields(like) if field.name != "name"}
    return AmortisedKernel(**shared, num_batches=num_batches)
