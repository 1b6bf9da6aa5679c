"""What a run will be and cost, before it begins: the target, the size of its folder, and the time, from a few real steps."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, replace

from adammcmc.cli.recipe import Recipe
from adammcmc.posterior.posterior import Posterior
from adammcmc.runs.factory import finds_settings
from adammcmc.runs.run import forecast_size
from adammcmc.samplers.adaptation import BurnIn

__all__ = ["Forecast", "forecast"]

_ENOUGH_SECONDS = 1.0
_MOST_STEPS = 4096


@dataclass(frozen=True)
class Forecast:
    """Numbers that `adammcmc sample --dry-run` shows."""

    target: str
    """What is sampled, in one line."""
    num_params: int
    num_data: int
    batch_size: int | None
    size: int
    """Bytes on disk."""
    step_seconds: float
    """One step of all chains."""
    num_steps: int
    """After burn-in, of each chain."""
    burn_in: int | None
    """Steps; None where it ends when the sampler has found its settings."""

    @property
    def seconds(self) -> float:
        """Of the whole run, without a burn-in of unknown length."""
        return self.step_seconds * (self.num_steps + (self.burn_in or 0))


def forecast(recipe: Recipe) -> Forecast:
    """Look ahead. Nothing is written.

    Runs of more and more steps are timed, in memory, until one takes a second; the time of the shorter one before it is that of
    the start, and is subtracted.
    """
    run = recipe.config.run
    steps, (before, posterior) = 2, _timed(recipe, 2)
    while True:
        more = 2 * steps
        now, posterior = _timed(recipe, more)
        each = max(now - before, 0.0) / (more - steps)
        if now > _ENOUGH_SECONDS or more >= _MOST_STEPS:
            break
        steps, before = more, now
    manifest = posterior.store.manifest
    return Forecast(
        target=posterior.target,
        num_params=manifest["model"]["num_params"],
        num_data=manifest["data"]["num_data"],
        batch_size=manifest["configuration"]["batch_size"],
        size=forecast_size(recipe.model, num_draws=run.num_draws, num_chains=run.num_chains, keep=run.keep, dtype=run.dtype),
        step_seconds=each,
        num_steps=run.num_draws * run.gap,
        burn_in=_known_burn_in(recipe),
    )


def _timed(recipe: Recipe, steps: int) -> tuple[float, Posterior]:
    """Seconds that so many steps take, and what came of them."""
    burn_in = recipe.burn_in
    shortest = replace(burn_in, num_steps=1) if isinstance(burn_in, BurnIn) else 0 if burn_in == 0 else 1
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one step of burn-in reaches nothing
        posterior = recipe.sample(None, burn_in=shortest, num_draws=1, gap=steps, keep="moments", progress=False)
    return time.perf_counter() - began, posterior


def _known_burn_in(recipe: Recipe) -> int | None:
    """As `adammcmc.sample` decides it."""
    burn_in, run, sampler = recipe.burn_in, recipe.config.run, recipe.sampler()
    if isinstance(burn_in, BurnIn):
        return burn_in.num_steps
    if burn_in is None and (sampler is None or finds_settings(sampler)):
        return None
    return run.num_draws * run.gap // 4 if burn_in is None else burn_in
