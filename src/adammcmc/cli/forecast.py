"""The target, size and duration of a run before it starts; the time per step is measured on a few real steps."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import NamedTuple

import torch

from adammcmc.cli.recipe import Recipe
from adammcmc.posterior.posterior import Posterior
from adammcmc.posterior.store.archives import format_bytes
from adammcmc.runs.factory import finds_settings
from adammcmc.runs.session import forecast_size
from adammcmc.samplers.adaptation import BurnIn

__all__ = ["Forecast", "forecast", "format_seconds"]

_ENOUGH_SECONDS = 1.0
_MOST_STEPS = 4096


class Forecast(NamedTuple):
    """What `adammcmc sample --dry-run` shows."""

    target: str
    """One line."""
    num_data: int
    batch_size: int | None
    size: int
    """Bytes on disk."""
    step_seconds: float
    """One step of all chains."""
    num_steps: int
    """Of each chain, after burn-in."""
    burn_in: int | None
    """Steps; None if burn-in ends when the sampler has adapted."""
    device: torch.device

    @property
    def seconds(self) -> float:
        """Wall time of the run, without a burn-in of unknown length."""
        return self.step_seconds * (self.num_steps + (self.burn_in or 0))

    def __str__(self) -> str:
        batch = "the loader's batches" if self.batch_size is None else f"{self.batch_size:,} in a step"
        steps = f"{self.num_steps + (self.burn_in or 0):,} steps at {format_seconds(self.step_seconds)} on {self.device}"
        if self.burn_in is None:
            burn_in = "plus a burn-in that ends when the sampler has adapted (thousands of steps)"
        else:
            burn_in = f"{self.burn_in:,} of them burn-in"
        return (
            f"target   {self.target}\n"
            f"data     {self.num_data:,} example{'s' * (self.num_data != 1)}, {batch}\n"
            f"size     about {format_bytes(self.size)}\n"
            f"time     about {format_seconds(self.seconds)}: {steps}, {burn_in}"
        )


def forecast(recipe: Recipe) -> Forecast:
    """Forecast a run. Nothing is written.

    Runs of doubling length are timed in memory until one takes a second. The difference to the run before removes the
    start-up time.
    """
    run, steps = recipe.config.run, 2
    before, _ = _timed(recipe, steps)
    while True:
        now, posterior = _timed(recipe, 2 * steps)
        each = max(now - before, 0.0) / steps
        steps, before = 2 * steps, now
        if now > _ENOUGH_SECONDS or steps >= _MOST_STEPS:
            break
    manifest = posterior.store.manifest
    return Forecast(
        target=posterior.target,
        num_data=manifest["data"]["num_data"],
        batch_size=manifest["configuration"]["batch_size"],
        size=forecast_size(recipe.model, num_draws=run.num_draws, num_chains=run.num_chains, keep=run.keep, dtype=run.dtype),
        step_seconds=each,
        num_steps=run.num_draws * run.gap,
        burn_in=_known_burn_in(recipe),
        device=next(recipe.model.parameters()).device,
    )


def _timed(recipe: Recipe, steps: int) -> tuple[float, Posterior]:
    """Seconds for this many steps, and the posterior."""
    burn_in = recipe.burn_in
    shortest = replace(burn_in, num_steps=1) if isinstance(burn_in, BurnIn) else 0 if burn_in == 0 else 1
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one step of burn-in adapts nothing
        posterior = recipe.plan(
            None, burn_in=shortest, num_draws=1, gap=steps, keep="moments", initial=None, progress=False
        ).run()
    return time.perf_counter() - began, posterior


def _known_burn_in(recipe: Recipe) -> int | None:
    """The choice that `adammcmc.sample` makes."""
    burn_in, run = recipe.burn_in, recipe.config.run
    if burn_in is None:
        sampler = recipe.sampler()
        return None if sampler is None or finds_settings(sampler) else run.num_draws * run.gap // 4
    return burn_in.num_steps if isinstance(burn_in, BurnIn) else burn_in


def format_seconds(seconds: float) -> str:
    """A duration with a suitable unit.

    Example:
        >>> format_seconds(0.00123), format_seconds(75.0), format_seconds(1e5)
        ('1.2 ms', '75 s', '27.8 h')
    """
    if seconds < 0.095:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
