"""Sampling from a density: burn-in, gap, draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adammcmc.errors import NonFiniteLoss, StochasticClosure
from adammcmc.kernels.approach import approaching
from adammcmc.kernels.arguments import placed
from adammcmc.kernels.hamiltonian import UnderdampedKernel
from adammcmc.kernels.kernel import Info, Kernel
from adammcmc.samplers.adaptation import Adaptation, BurnIn, changed, check_common, check_tunable
from adammcmc.samplers.metric import largest_dense
from adammcmc.samplers.processes import check_one_process
from adammcmc.samplers.progress import track
from adammcmc.target.data_density import DataDensity
from adammcmc.target.density import Density
from adammcmc.target.leaves import Leaves, flatten, unflatten
from adammcmc.target.randomness import Randomness
from adammcmc.target.resolution import agree

__all__ = ["sample_density", "warm_up"]


def sample_density(
    log_density: Callable[[Any], Tensor] | DataDensity,
    initial: Any,
    kernel: Kernel,
    *,
    num_steps: int,
    burn_in: int = 0,
    gap: int = 1,
    tune: BurnIn | None = None,
    seed: int | Randomness = 0,
    progress: bool = True,
) -> tuple[Any, Info]:
    """Draw from any differentiable density, with one chain per row of `initial`, in one batched evaluation per step.

    Args:
        log_density: maps (chains, dim), or a pytree of tensors (chains, ...), to (chains,); -inf outside the support.
            It need not be normalised. Chains must not influence each other. Or a `DataDensity`, a sum of losses over
            data.
        initial: starting points, on the device of the run.
        kernel: from `adammcmc.kernels`. A setting as a tensor (chains,) has one value per chain: a scan is one run.
        num_steps: transitions in total, including burn-in.
        burn_in: transitions before the first draw is kept.
        gap: one draw is kept every `gap` transitions. A rejected proposal repeats the current point, and counts.
        tune: adapt the kernel's scale (and preconditioner) in burn-in, pooled over the chains, then freeze it.
        seed: fixes every random number; the same seed on the same device gives the same draws. A generator, or
            `randomness.Generators` with one per chain, is used as given.
        progress: show a bar if standard error is a terminal (needs `rich`).

    Returns:
        The draws, (chains, draws, dim) or a pytree of such, and an `Info` whose fields are (chains, draws).

    Example:
        >>> import adammcmc
        >>> kernel = adammcmc.kernels.mala(step_size=0.5)
        >>> draws, info = sample_density(lambda x: -x.square().sum(1) / 2, torch.zeros(1000, 2), kernel, num_steps=50)
        >>> draws.shape, info.is_accepted.shape
        (torch.Size([1000, 50, 2]), torch.Size([1000, 50]))
    """
    if not num_steps > burn_in >= 0:
        raise ValueError(f"`num_steps` must exceed `burn_in` >= 0, got {num_steps} and {burn_in}.")
    if not 1 <= gap <= num_steps - burn_in:
        raise ValueError(f"`gap` must be between 1 and num_steps - burn_in = {num_steps - burn_in}, got {gap}.")
    if tune is not None:
        if burn_in < 1 or (tune.num_steps or 1) > burn_in:
            raise ValueError(
                f"`tune` would still change the kernel while draws are kept: burn_in is {burn_in}, num_steps of the "
                f"BurnIn {tune.num_steps}. States visited while adapting are not draws; make burn_in longer."
            )
        tune = replace(tune, num_steps=tune.num_steps or burn_in)
    run = _Run(log_density, initial, kernel, seed, tune)
    draws = [x.new_empty(x.shape[0], (num_steps - burn_in) // gap, *x.shape[1:]) for x in run.leaves]
    infos: list[Info] = []
    for step in track(range(1, num_steps + 1), "sampling", show=progress):
        info = run.step()
        draw, rest = divmod(step - burn_in, gap)
        if step > burn_in and rest == 0:
            for kept, leaf in zip(draws, run.leaves, strict=True):
                kept[:, draw - 1] = leaf
            infos.append(info)
    result = unflatten(tuple(draws), run.structure), Info(*(torch.stack(field, 1) for field in zip(*infos, strict=True)))
    run.check_not_frozen(result)
    if run.adaptation is not None:
        run.adaptation.warn_of_frozen()
    return result


def warm_up(
    log_density: Callable[[Any], Tensor] | DataDensity,
    initial: Any,
    kernel: Kernel,
    *,
    tune: BurnIn | None = None,
    seed: int | Randomness = 0,
    progress: bool = True,
) -> tuple[Kernel, Any]:
    """Adapt a kernel to a density, pooled over the chains: the kernel with frozen settings, and the chains' positions.

    Args:
        log_density, initial, seed, progress: as in `sample_density`.
        kernel: with a first guess of its scale.
        tune: how to adapt; by default until U is flat.

    Example:
        >>> import adammcmc
        >>> normal = lambda x: -x.square().sum(1) / 2
        >>> kernel, params = warm_up(normal, torch.zeros(100, 5), adammcmc.kernels.underdamped(0.01), progress=False)
        >>> draws, info = sample_density(normal, params, kernel, num_steps=200)
        >>> abs(float(info.acceptance_rate.mean()) - 0.85) < 0.05
        True
    """
    tune = tune or BurnIn()
    run = _Run(log_density, initial, kernel, seed, tune)
    assert run.adaptation is not None
    for _ in track(range(tune.num_steps or tune.max_steps), "adapting", show=progress):
        run.step()
        if run.adaptation.is_done:
            break
    run.check_not_frozen((run.kernel, run.state.params))
    run.adaptation.warn()
    return run.kernel, run.state.params


class _Run:
    """Chains on a density, whose kernel adapts where `tune` is given."""

    def __init__(self, log_density: Any, initial: Any, kernel: Any, seed: int | Randomness, tune: BurnIn | None) -> None:
        check_one_process()
        leaves, self.structure = flatten(initial)
        if not leaves:
            raise ValueError("`initial` holds no tensor.")
        self.generator = seed if isinstance(seed, Randomness) else torch.Generator(leaves[0].device).manual_seed(int(seed))
        self.kernel: Any = placed(kernel, leaves[0].device)
        self.potential = log_density if isinstance(log_density, DataDensity) else Density(log_density, like=initial)
        self.state = self.kernel.init(unflatten(tuple(x.detach().clone() for x in leaves), self.structure), self.potential)
        self._check_deterministic()
        self.adaptation = None if tune is None else self._adaptation(tune)

    @property
    def leaves(self) -> Leaves:
        return flatten(self.state.params)[0]

    def _check_deterministic(self) -> None:
        if self.state.here is None:  # other data at each step
            return
        again = self.potential.evaluate(self.leaves, with_grad=False).losses
        if not agree(again, self.state.here.losses, self.potential.scale):
            raise StochasticClosure(
                "`log_density` gave two different values at the same point: it must be a function of the parameters. "
                "Does it draw random numbers (dropout in training mode?) or use a new minibatch at each call?"
            )

    def _adaptation(self, tune: BurnIn) -> Adaptation:
        if not hasattr(self.kernel, "scaled"):
            raise TypeError(f"{type(self.kernel).__name__} has nothing to tune.")
        check_tunable(self.kernel.acceptance)
        check_common(self.kernel, tune)
        return Adaptation(
            tune,
            target=self.kernel.acceptance.rate_like(self.kernel.target_acceptance),
            num_params=(dim := sum(x[0].numel() for x in self.leaves)),
            tunes_sigma_along=hasattr(self.kernel, "with_sigma_along"),
            learns=hasattr(self.kernel, "with_preconditioner"),
            velocity=isinstance(self.kernel, UnderdampedKernel),
            approaches=self.potential.fixed and self.kernel.num_leapfrog == 1
            if isinstance(self.kernel, UnderdampedKernel)
            else False,
            shapes=[[x.shape[1:]] for x in self.leaves],
            scaling="dense" if dim <= largest_dense and len(self.leaves[0]) >= 4 else "diagonal",
            watches=True,
        )

    def step(self) -> Info:
        """One transition of all chains, and of the adaptation until it is done."""
        now = self.potential.next_batch(self.leaves, self.generator)
        info: Info
        self.state, info = self._moving().step(self.state, now, self.generator)
        if self.adaptation is not None and not self.adaptation.is_done:
            known = None if now.known is None else now.known[1]
            grad = known if self.state.here is None else self.state.here.grad
            numbers = info.acceptance_rate, info.potential, info.step_to_noise
            change = self.adaptation.observe(*numbers, grad, now.scale, info.log_ratio, self.leaves)
            if isinstance(diagonal := change.preconditioner, tuple):
                diagonal = tuple(a.to(x.dtype) for a, x in zip(diagonal, self.leaves, strict=True))
                change = change._replace(preconditioner=diagonal)
            self.kernel = changed(self.kernel, change, self.structure)
        return info

    def _moving(self) -> Any:
        """The kernel of this step: while the chains approach their bulk, one without a test."""
        approach = None if self.adaptation is None else self.adaptation.approach
        if approach is None:
            return self.kernel
        return approaching(self.kernel, approach.steps(self.state.frozen_at, len(self.leaves[0])), self.kernel.preconditioner)

    def check_not_frozen(self, result: Any) -> None:
        """Raise `NonFiniteLoss`, with what was drawn so far, if a chain has stopped."""
        is_frozen = self.state.frozen_at >= 0
        if not bool(is_frozen.any()):
            return
        chain = int(is_frozen.nonzero()[0])
        error = NonFiniteLoss(
            f"{int(is_frozen.sum())} chains met a NaN or infinite density or gradient at their current position and "
            f"stopped there; the first is chain {chain}, at step {int(self.state.frozen_at[chain])}. The draws so far "
            "are in the exception's `result`."
        )
        error.result = result
        raise error
