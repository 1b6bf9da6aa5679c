"""Algorithm 1 as printed, with another optimizer's step, and as the released code has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from adammcmc.acceptance import AcceptanceTest, Minibatch
from adammcmc.kernels.arguments import check_betas, check_noise, check_not_negative, checked, checked_one, times
from adammcmc.kernels.backend import Backend
from adammcmc.kernels.direction import Adam, AdamMemory, Direction, OptimizerStep
from adammcmc.kernels.kernel import ChainState, Info, Kernel, Once, settle
from adammcmc.kernels.proposal import Elementwise, Move, Prolate
from adammcmc.target.leaves import Leaves, PerLeaf, Setting, Settings, flatten
from adammcmc.target.potential import Evaluation, Potential
from adammcmc.target.randomness import Randomness

__all__ = ["AdamMCMCKernel", "adam_mcmc", "as_released", "optimizer_mcmc"]


class ProlateKernel(Kernel):
    """A kernel with Algorithm 1's proposal."""

    proposal: Prolate

    def __post_init__(self) -> None:
        check_noise(self.proposal.sigma, self.acceptance)

    def scaled(self, factor: float) -> Self:
        """The same kernel with `factor` times the noise."""
        return self._with(sigma=times(self.proposal.sigma, factor))

    def with_sigma_along(self, sigma_along: Setting) -> Self:
        """The same kernel with this noise along the step."""
        return self._with(sigma_along=sigma_along)

    def _with(self, **changes: Any) -> Self:
        return replace(self, proposal=replace(self.proposal, **changes))  # type: ignore[type-var]


@dataclass(frozen=True)
class AdamMCMCKernel(ProlateKernel):
    """Algorithm 1: one update u for both directions, from a direction with memory. See `adam_mcmc`."""

    direction: Direction
    proposal: Prolate
    acceptance: AcceptanceTest
    name: str = "AdamMCMC (Algorithm 1)"
    backend: Backend | None = None
    """A faster way to compute the proposal; None: as written here."""
    target_acceptance: ClassVar[float] = 0.6
    is_capturable: ClassVar[bool] = False  # type: ignore[misc]
    why_not_capturable: ClassVar[str] = (  # type: ignore[misc]
        "counts its steps on the host unless the step is fused, which needs Triton and contiguous float32 parameters"
    )

    def first_memory(self, params: Leaves) -> Any:
        return self.direction.init(params)

    def joined(self, memories: Sequence[Any]) -> Any:
        first = memories[0]
        if first is None:
            return None
        if any(memory.step != first.step for memory in memories):
            raise ValueError("Adam's step counts differ between the chains")
        averages, squares = (tuple(torch.cat(rows) for rows in zip(*(m[i] for m in memories), strict=True)) for i in (0, 1))
        return AdamMemory(averages, squares, first.step)

    def counted(self, memory: AdamMemory) -> AdamMemory:
        return memory._replace(step=tuple(k + 1 for k in memory.step))

    def restored(self, fields: tuple[Any, ...]) -> AdamMemory:
        """The memory from its fields, as a checkpoint has them."""
        return AdamMemory(tuple(fields[0]), tuple(fields[1]), tuple(int(k) for k in fields[2]))

    def step(self, state: ChainState, potential: Potential, generator: Randomness) -> tuple[ChainState, Info]:
        with nullcontext() if self.backend is None else self.backend.ahead(generator):
            params, _ = flatten(state.params)
            here = state.here or potential.evaluate(params, with_grad=True)
            move, memory = self._propose(params, here, state, generator)
            there = Once(lambda: potential.evaluate(move.proposed, with_grad=potential.fixed))
            ratio = Once(lambda: self.proposal.log_q_ratio(move))
            return settle(  # the Metropolis-Hastings correction, the second half of Algorithm 1
                state, potential, generator, self.acceptance, here, move, there, ratio, memory=memory, keep=self.direction.keep
            )

    def _propose(self, params: Leaves, here: Evaluation, state: ChainState, generator: Randomness) -> tuple[Move, Any]:
        """m <- ..., u(m), tau ~ N(theta - u, Sigma(u)): the first half of Algorithm 1."""
        assert here.grad is not None
        if self.backend is not None:
            return self.backend.propose(self, params, here, state.memory, generator, state.frozen_at)
        update, memory = self.direction(here.grad, state.memory, params)
        return self.proposal.propose(params, update, generator), memory

    def details(self) -> list[str]:
        betas = getattr(self.direction, "betas", None)
        return [*super().details(), *([] if betas is None else [f"betas {betas}"])]

    def approximation(self, *, fixed_data: bool) -> list[str]:
        reasons = ["momentum without its correction C (Theorem 1)", *super().approximation(fixed_data=fixed_data)]
        if isinstance(self.proposal, Elementwise):
            reasons.insert(0, "noise drawn weight by weight, tested as if along one direction (as released)")
        return reasons


def adam_mcmc(
    lr: Settings,
    betas: PerLeaf[tuple[float, float]] = (0.99, 0.99),
    eps: PerLeaf[float] = 1e-8,
    *,
    sigma: Settings,
    sigma_along: Setting = 0.0,
    acceptance: AcceptanceTest | None = None,
) -> AdamMCMCKernel:
    r"""Algorithm 1 of the paper, as printed.

        m1 <- beta1 m1 + (1 - beta1) grad V,    m2 <- beta2 m2 + (1 - beta2) (grad V)^2
        u = lr * m1hat / (sqrt(m2hat) + eps)
        tau = theta - u + sigma eps + sigma_along z u                    (z: one number for each step)
        accept with min(1, exp(Y)),  Y = U(theta) - U(tau) + log q(theta|tau, m) - log q(tau|theta, m)

    The momenta are kept on rejection. Target: p ~ exp(-U), **approximately**: the correction C of Theorem 1 is set to 1, as in
    the paper. The bias is small only if the momentum carries little information on theta (see the docs, "What Algorithm 1
    really samples"); `mala` is exact. lr = 0 is random walk Metropolis, and exact.

    Cost: one forward and backward at theta and one forward at tau; for a density or fixed data one forward and backward in
    all, at tau.

    Args:
        lr: Adam's learning rate. (A tensor (chains,) gives one value to each chain, a list one to each leaf; likewise sigma.)
        betas: Adam's decay rates.
        eps: Adam's, the paper's delta.
        sigma: standard deviation of the noise on one weight. 0 only with `AlwaysAccept`, where it gives Adam itself.
        sigma_along: noise along the update in units of the update, the paper's sigma_Delta. Proposals alone are accepted
            at a rate of at least 2 Phi(-1/sigma_along), however small sigma is.
        acceptance: the test; `Minibatch()` by default.
    """
    check_betas(betas)
    check_not_negative("eps", eps)
    lr, sigma, sigma_along = checked("lr", lr), checked("sigma", sigma), checked_one("sigma_along", sigma_along)
    return AdamMCMCKernel(Adam(lr, betas, eps), Prolate(sigma, sigma_along), acceptance or Minibatch())


def as_released(
    lr: Settings,
    betas: PerLeaf[tuple[float, float]] = (0.99, 0.99),
    eps: PerLeaf[float] = 1e-8,
    *,
    sigma: Settings,
    sigma_along: Setting = 0.0,
    acceptance: AcceptanceTest | None = None,
) -> AdamMCMCKernel:
    r"""What the code released with the paper does in place of Algorithm 1. **For replication only: no detailed balance.**

        tau = theta - u + sigma eps + sigma_along zeta * u               (zeta: one number for each WEIGHT)

    with the density ratio of ONE scalar z (`proposal.Elementwise`). Target: none that could be named; neither exp(-U) nor a
    tempered version of it is left invariant. With many weights the proposal's ratio tends to exp(-2 / sigma_along^2) whatever
    was drawn, so that it is **approximately** Adam with added noise. Arguments are those of `adam_mcmc`; the released code also
    uses the batch's mean loss with lambda = 1, see `adammcmc.from_paper(..., loss="mean")`.

    Cost: as `adam_mcmc`.
    """
    kernel = adam_mcmc(lr, betas, eps, sigma=sigma, sigma_along=sigma_along, acceptance=acceptance)
    proposal = Elementwise(kernel.proposal.sigma, kernel.proposal.sigma_along)
    return replace(kernel, proposal=proposal, name="AdamMCMC as released (not Algorithm 1)")


def optimizer_mcmc(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    *,
    sigma: Settings,
    sigma_along: Setting = 0.0,
    acceptance: AcceptanceTest | None = None,
) -> AdamMCMCKernel:
    """Algorithm 1 with the step of any `torch.optim` optimizer in place of Adam's: SGD, NAdam, RMSprop, ...

        u = theta - (theta after the optimizer's step)

    and the rest as in `adam_mcmc`. Target: p ~ exp(-U), **approximately**, for the same reason; weight decay makes u depend on
    theta too. Cost: as `adam_mcmc`, and a copy of the optimizer's state.

    Args:
        make: builds the optimizer from a list of parameters, such as `functools.partial(torch.optim.SGD, lr=0.1)`.
        sigma: as in `adam_mcmc`.
        sigma_along: as in `adam_mcmc`.
        acceptance: as in `adam_mcmc`.
    """
    sigma, sigma_along = checked("sigma", sigma), checked_one("sigma_along", sigma_along)
    name = "Algorithm 1 with a torch optimizer's step"
    return AdamMCMCKernel(OptimizerStep(make), Prolate(sigma, sigma_along), acceptance or Minibatch(), name)
