"""NUTS and MAMS of blackjax, adapted as blackjax does by default."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Run", "mams_program", "nuts", "nuts_blocks"]

MCLACHLAN_GRADIENTS = 2
"""Gradients in one step of blackjax's default integrator of MAMS."""

LONGEST = 100
"""Steps of a trajectory of MAMS, at most. Without a cap its adaptation may take 10^5 steps at once."""


class Run(NamedTuple):
    """Draws of one sampler, and what they cost."""

    draws: np.ndarray
    """(chains, draws, dim)"""
    gradients: float
    """For the draws of one chain: the mean over the chains."""
    adaptation: float
    """The same, before the draws."""
    divergent: int
    """Transitions that left the region where the integrator is stable."""
    grade: str = ""
    """The sampler's own verdict, where it has one."""
    frozen: int = 0
    """Chains that do not move and that nothing it says names."""


def nuts(
    log_density: Callable[[Any], Any],
    starts: np.ndarray,
    *,
    seed: int,
    num_draws: int,
    num_warmup: int = 1000,
    is_diagonal: bool = True,
) -> Run:
    """blackjax.nuts after blackjax.window_adaptation, both with their defaults: a diagonal mass matrix, target 0.8."""
    make = {"seed": seed, "block": num_draws, "num_warmup": num_warmup, "is_diagonal": is_diagonal}
    block, adaptation = nuts_blocks(log_density, starts, **make)
    draws, gradients, divergent = block()
    return Run(draws, gradients, adaptation, divergent)


def nuts_blocks(
    log_density: Callable[[Any], Any],
    starts: np.ndarray,
    *,
    seed: int,
    block: int,
    num_warmup: int,
    is_diagonal: bool = True,
    target: float = 0.8,
) -> tuple[Callable[[], tuple[np.ndarray, float, int]], float]:
    """Adapted chains as a function that gives the next `block` draws, and the gradients of the adaptation."""
    import blackjax
    import jax

    key, tune_key = jax.random.split(jax.random.key(seed))
    warmup = blackjax.window_adaptation(
        blackjax.nuts,
        log_density,
        is_mass_matrix_diagonal=is_diagonal,
        target_acceptance_rate=target,
        adaptation_info_fn=lambda state, info, adaptation: info.num_integration_steps,
    )

    @jax.jit
    @jax.vmap
    def adapt(key: Any, start: Any) -> Any:
        result, steps = warmup.run(key, start, num_steps=num_warmup)
        return result.state, result.parameters["step_size"], result.parameters["inverse_mass_matrix"], steps.sum()

    kernel = blackjax.nuts.build_kernel()

    @jax.jit
    @jax.vmap
    def draw(key: Any, state: Any, step_size: Any, inverse_mass: Any) -> Any:
        def one(state: Any, key: Any) -> Any:
            state, info = kernel(key, state, log_density, step_size, inverse_mass)
            return state, (state.position, info.num_integration_steps, info.is_divergent)

        return jax.lax.scan(one, state, jax.random.split(key, block))

    state, step_size, inverse_mass, steps = adapt(jax.random.split(tune_key, len(starts)), np.asarray(starts))

    def next_block() -> tuple[np.ndarray, float, int]:
        nonlocal state, key
        key, now = jax.random.split(key)
        state, (x, steps, divergent) = draw(jax.random.split(now, len(starts)), state, step_size, inverse_mass)
        return np.array(x), float(steps.sum(1).mean()), int(divergent.sum())

    return next_block, float(steps.mean())


def mams_program(
    log_density: Callable[[Any], Any], *, num_draws: int, num_warmup: int = 10_000, target: float = 0.9
) -> Callable[[np.ndarray, int, float], Run]:
    """(starts, seed, trajectory) -> Run of MAMS: adjusted_mclmc_dynamic after adjusted_mclmc_find_L_and_step_size.

    A trajectory has `trajectory` steps on average, and at most `LONGEST`. The adaptation takes three tenths of
    `num_warmup` transitions; the acceptance target is that of the paper (arXiv 2503.01707).
    """
    import blackjax
    import jax
    from blackjax.mcmc import adjusted_mclmc_dynamic as dynamic

    length = dynamic.make_random_trajectory_length_fn(True)

    def capped(key: Any, average: Any) -> Any:
        return jax.numpy.minimum(length(key, average), LONGEST)

    kernel = dynamic.build_kernel(integration_steps_fn=capped)
    find = partial(
        blackjax.adjusted_mclmc_find_L_and_step_size,
        mclmc_kernel=kernel,
        logdensity_fn=log_density,
        num_steps=num_warmup,
        target=target,
    )

    @jax.jit
    @partial(jax.vmap, in_axes=(0, 0, None))
    def chain(key: Any, start: Any, trajectory: Any) -> Any:
        init_key, tune_key, key = jax.random.split(key, 3)
        state = dynamic.init(start, log_density, init_key)
        state, params, tuning = find(state=state, rng_key=tune_key, target_num_integration_steps=trajectory)

        def one(state: Any, key: Any) -> Any:
            state, info = kernel(
                key,
                state,
                log_density,
                params.step_size,
                inverse_mass_matrix=params.inverse_mass_matrix,
                integration_steps_params=(params.L / params.step_size,),
            )
            return state, (state.position, info.num_integration_steps, info.is_divergent)

        _, (x, steps, divergent) = jax.lax.scan(one, state, jax.random.split(key, num_draws))
        return x, steps.sum(), tuning, divergent.sum()

    def run(starts: np.ndarray, seed: int, trajectory: float) -> Run:
        keys = jax.random.split(jax.random.key(seed), len(starts))
        x, steps, tuning, divergent = chain(keys, np.asarray(starts), trajectory)
        price = MCLACHLAN_GRADIENTS
        return Run(np.array(x), price * float(steps.mean()), price * float(tuning.mean()), int(divergent.sum()))

    return run
