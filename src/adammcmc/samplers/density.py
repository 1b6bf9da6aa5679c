"""Many transitions: burn-in, gap, draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adammcmc.errors import NonFiniteLoss, StochasticClosure
from adammcmc.kernels.arguments import placed
from adammcmc.kernels.kernel import ChainState, Info, Kernel
from adammcmc.samplers.adaptation import Adaptation, BurnIn, changed, check_common, check_tunable, target_rate
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
    """Draw from any differentiable density, with as many chains as `initial` has rows, in one batched evaluation a step.

    Args:
        log_density: maps (chains, dim), or a pytree of tensors (chains, ...), to (chains,); -inf outside the support. It need
            not be normalised. Chains must not influence each other. Or a `DataDensity`, a sum of losses over data.
        initial: starting points, on the device where the chains shall run.
        kernel: from `adammcmc.kernels`. Where a setting is a tensor (chains,), each chain has its own: a scan is one run.
        num_steps: transitions in all, burn-in included.
        burn_in: transitions before the first draw is kept.
        gap: one draw is kept every `gap` transitions. A rejected proposal repeats the current point, and counts.
        tune: adapt the kernel's scale (and preconditioner) in burn-in, pooled over the chains, then freeze it.
        seed: fixes every random number; the same seed on the same device gives the same draws. A generator is used as it is,
            and so are `randomness.Generators`, one for each chain.
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
    if tune is not None and (burn_in < 1 or (tune.num_steps or 1) > burn_in):
        raise ValueError(
            f"`tune` would still change the kernel while draws are kept: burn_in is {burn_in}, num_steps of the BurnIn "
            f"{tune.num_steps}. What is drawn while adapting has no invariant distribution; make burn_in longer."
        )
    kernel, potential, state, generator, structure = _begin(log_density, initial, kernel, seed)
    leaves = flatten(state.params)[0]
    adaptation = None if tune is None else _adaptation(kernel, replace(tune, num_steps=tune.num_steps or burn_in), leaves)
    num_draws = (num_steps - burn_in) // gap
    draws = [x.new_empty(x.shape[0], num_draws, *x.shape[1:]) for x in leaves]
    infos: list[Info] = []
    for step in track(range(1, num_steps + 1), "sampling", show=progress):
        now = potential.next_batch(flatten(state.params)[0], generator)
        state, info = kernel.step(state, now, generator)
        if adaptation is not None and not adaptation.is_done:
            kernel = _adapted(kernel, adaptation, now, state, info)
        draw, rest = divmod(step - burn_in, gap)
        if step > burn_in and rest == 0:
            for kept, leaf in zip(draws, flatten(state.params)[0], strict=True):
                kept[:, draw - 1] = leaf
            infos.append(info)
    result = unflatten(tuple(draws), structure), Info(*(torch.stack(field, 1) for field in zip(*infos, strict=True)))
    _check_not_frozen(state, result)
    if adaptation is not None:
        adaptation.warn_of_frozen()
    return result


def _check_not_frozen(state: ChainState, result: Any) -> None:
    if not bool((state.frozen_at >= 0).any()):
        return
    chain = int((state.frozen_at >= 0).nonzero()[0])
    error = NonFiniteLoss(
        f"{int((state.frozen_at >= 0).sum())} chains met a NaN or infinite density or gradient at their own position and "
        f"stopped there; the first is chain {chain}, at step {int(state.frozen_at[chain])}. What there is so far is in the "
        "exception's `result`."
    )
    error.result = result
    raise error


def _check_deterministic(potential: Density | DataDensity, state: ChainState) -> None:
    """A log density that gives another value when asked again is no density."""
    if state.here is None:  # other data at each step
        return
    again = potential.evaluate(flatten(state.params)[0], with_grad=False).losses
    if not agree(again, state.here.losses, potential.scale):
        raise StochasticClosure(
            "`log_density` gave two different values at the same point: it must be a function of the parameters. Does it draw "
            "random numbers (dropout in training mode?) or take a new minibatch at each call?"
        )


def warm_up(
    log_density: Callable[[Any], Tensor] | DataDensity,
    initial: Any,
    kernel: Kernel,
    *,
    tune: BurnIn | None = None,
    seed: int | Randomness = 0,
    progress: bool = True,
) -> tuple[Kernel, Any]:
    """Adapt a kernel to a density, pooled over the chains: the kernel with its settings frozen, and where the chains are.

    Args:
        log_density: as in `sample_density`.
        initial: as in `sample_density`.
        kernel: with a first guess of its scale.
        tune: how to adapt; by default until U is flat.
        seed: as in `sample_density`.
        progress: as in `sample_density`.

    Example:
        >>> import adammcmc
        >>> normal = lambda x: -x.square().sum(1) / 2
        >>> kernel, params = warm_up(normal, torch.zeros(100, 5), adammcmc.kernels.underdamped(0.01), progress=False)
        >>> draws, info = sample_density(normal, params, kernel, num_steps=200)
        >>> abs(float(info.acceptance_rate.mean()) - 0.85) < 0.05
        True
    """
    tune = tune or BurnIn()
    kernel, potential, state, generator, _ = _begin(log_density, initial, kernel, seed)
    adaptation = _adaptation(kernel, tune, flatten(state.params)[0])
    for _ in track(range(tune.num_steps or tune.max_steps), "adapting", show=progress):
        now = potential.next_batch(flatten(state.params)[0], generator)
        state, info = kernel.step(state, now, generator)
        kernel = _adapted(kernel, adaptation, now, state, info)
        if adaptation.is_done:
            break
    _check_not_frozen(state, (kernel, state.params))
    adaptation.warn()
    return kernel, state.params


def _begin(
    log_density: Callable[[Any], Tensor] | DataDensity, initial: Any, kernel: Kernel, seed: int | Randomness
) -> tuple[Kernel, Density | DataDensity, ChainState, Randomness, Any]:
    check_one_process()
    leaves, structure = flatten(initial)
    if not leaves:
        raise ValueError("`initial` holds no tensor.")
    generator = seed
    if not isinstance(generator, Randomness):
        generator = torch.Generator(leaves[0].device).manual_seed(int(generator))
    kernel = placed(kernel, leaves[0].device)
    potential = log_density if isinstance(log_density, DataDensity) else Density(log_density, like=initial)
    state = kernel.init(unflatten(tuple(x.detach().clone() for x in leaves), structure), potential)
    _check_deterministic(potential, state)
    return kernel, potential, state, generator, structure


def _adapted(kernel: Any, adaptation: Adaptation, potential: Density | DataDensity, state: ChainState, info: Info) -> Any:
    leaves, structure = flatten(state.params)
    known = None if potential.known is None else potential.known[1]
    grad = known if state.here is None else state.here.grad
    change = adaptation.observe(info.acceptance_rate, info.potential, info.step_to_noise, grad, potential.scale)
    if change.preconditioner is not None:
        diagonal = tuple(a.to(x.dtype) for a, x in zip(change.preconditioner, leaves, strict=True))
        change = change._replace(preconditioner=diagonal)
    return changed(kernel, change, structure)


def _adaptation(kernel: Any, tune: BurnIn, leaves: Leaves) -> Adaptation:
    if not hasattr(kernel, "scaled"):
        raise TypeError(f"{type(kernel).__name__} has nothing to tune.")
    check_tunable(kernel.acceptance)
    check_common(kernel, tune)
    return Adaptation(
        tune,
        target=target_rate(kernel.acceptance, kernel.target_acceptance),
        num_params=sum(x[0].numel() for x in leaves),
        tunes_sigma_along=hasattr(kernel, "with_sigma_along"),
        learns=hasattr(kernel, "with_preconditioner"),
    )
