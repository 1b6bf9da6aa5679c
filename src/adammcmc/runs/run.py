"""Sampling in one call: a model, data and a loss give draws that can be stored, interrupted and resumed.

posterior = sample(model, (inputs, targets), F.cross_entropy, num_draws=200, path="runs/a")
prediction = posterior.predict(test_inputs)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from adammcmc.posterior.posterior import Posterior
from adammcmc.runs.callbacks import Callback
from adammcmc.runs.factory import Factory
from adammcmc.runs.plan import Plan
from adammcmc.runs.session import forecast_size
from adammcmc.samplers.adaptation import BurnIn
from adammcmc.samplers.sampler import Sampler
from adammcmc.target.likelihood import Likelihood
from adammcmc.target.priors import Prior

__all__ = ["forecast_size", "sample"]


def sample(
    model: nn.Module,
    train: Any,
    loss: Callable[..., Tensor],
    *,
    sampler: Factory | None = None,
    batch_size: int | None = None,
    prior: Prior | None = None,
    num_draws: int = 200,
    gap: int = 50,
    burn_in: int | BurnIn | None = None,
    num_chains: int = 1,
    stacked: bool | None = None,
    seed: int = 0,
    path: str | Path | None = None,
    resume: bool = False,
    keep: Literal["draws", "moments"] | int = "draws",
    dtype: torch.dtype | None = None,
    initial: Sequence[Mapping[str, Tensor]] | None = None,
    warm_start: torch.optim.Optimizer | Mapping[str, Any] | None = None,
    scheduler: Callable[[Sampler], LRScheduler] | None = None,
    callbacks: Sequence[Callback] = (),
    likelihood: str | Likelihood | None = None,
    num_data: int | None = None,
    config: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Posterior:
    """Draw a network's weights from its posterior. The same as `Plan(...).run()`.

    The model is sampled in its current modes (`train` or `eval`), and restored before this returns.

    Args:
        model: preferably trained; the chains start from its weights.
        train: tensors (inputs, targets) on any device; arrays, or paths of .npy files, which are memory-mapped; a
            Dataset; or a DataLoader. See `as_data`.
        loss: a function of outputs and targets, such as `F.cross_entropy`, or of model and batch (name its first
            argument `model`). For regression, use `GaussianNLL(noise)`.
        sampler: makes the sampler from parameters, such as `partial(AdamMCMC, lr=1e-3, sigma=3e-4, sigma_along=2.0)`;
            `num_data`, `generator` and `fixed_data` are filled in. None is `Underdamped`, which is exact: on all data
            at once, or with `FullData()` on minibatches. lr, sigma, sigma_along, step_size and inverse_temperature may
            be tensors with one value per chain: a scan in one run.
        batch_size: None uses the DataLoader's, or all data at once.
        prior: passed to the sampler. None: a sampler that requires a prior gets `Gaussian.fan_in(model, 2.0)`.
        num_draws: draws per chain.
        gap: steps between two draws.
        burn_in: steps to discard, in which a sampler may tune its settings. A `BurnIn` makes any sampler adapt. None:
            until the sampler's own adaptation ends; without one, a quarter of the steps that follow.
        num_chains: number of chains, each with its own random numbers.
        stacked: True runs all chains at once, with stacked weights under `torch.func.vmap`. They then share batches
            (not noise), adapt to their mean acceptance rate, and stop and resume together. False runs one after
            another, each with its own data order. None stacks on an accelerator where it is possible and faster.
        seed: fixes all random numbers: noise, data order, dropout.
        path: a folder for the draws; None keeps them in memory.
        resume: continue the run in `path` bit for bit, or start it if there is none. All other arguments must be the
            same, except that `num_draws` may grow. (Other versions, devices or numbers of threads raise a warning.)
        keep: "draws"; "moments" (mean and variance of the weights); or a number k: moments and the last k draws.
        dtype: of the stored draws; None is the dtype of the weights.
        initial: one state dictionary per chain to start from.
        warm_start: an optimizer (or its state) whose moments `AdamMCMC` starts from.
        scheduler: makes a scheduler from the sampler; stepped after each step.
        callbacks: see `Callback`; `TensorBoard(folder)` writes scalars.
        likelihood: the meaning of the outputs, for prediction; None is inferred from the loss. See `Likelihood`.
        num_data: required only for iterable data without a length.
        config: how the model and the data were made, as JSON: stored in `run.json` for the command line.
        progress: show a bar if standard error is a terminal.

    Returns:
        The posterior. Every exception carries the completed draws in its `result`, Ctrl-C and SIGTERM included.
    """
    return Plan(**locals()).run()
