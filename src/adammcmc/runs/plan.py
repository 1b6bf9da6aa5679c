"""Sampling in one call: a model, data and a loss give draws that can be stored, interrupted and resumed.

posterior = sample(model, (inputs, targets), F.cross_entropy, num_draws=200, path="runs/a")
prediction = posterior.predict(test_inputs)

A `Plan` is a run before it starts: the arguments of `sample`, validated once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.lr_scheduler import LRScheduler

from adammcmc.errors import warn
from adammcmc.posterior.posterior import Posterior
from adammcmc.posterior.store.encoding import can_store
from adammcmc.runs.callbacks import Callback
from adammcmc.runs.factory import Factory, given_options, innermost
from adammcmc.runs.members import TrainMembers
from adammcmc.runs.session import Session
from adammcmc.samplers.adaptation import BurnIn
from adammcmc.samplers.processes import check_not_distributed
from adammcmc.samplers.sampler import Sampler
from adammcmc.samplers.warmup import WarmUp
from adammcmc.target.likelihood import Likelihood
from adammcmc.target.priors import Prior

__all__ = ["Plan", "sample"]


@dataclass(frozen=True, eq=False, repr=False)  # its data may be large
class Plan:
    """Everything that `sample` takes, checked, printable, and ready to run. The arguments are those of `sample`.

    Example:
        >>> import torch.nn.functional as F
        >>> x = torch.randn(60, 2)
        >>> plan = Plan(nn.Linear(2, 3), (x, x.argmax(1)), F.cross_entropy, num_draws=20, gap=5, burn_in=200)
        >>> print(plan)
        model    Linear, 9 trainable weights
        sampler  Underdamped (default)
        chains   1, each with 20 draws 5 steps apart after 200 steps of burn-in; seed 0
        storage  draws in memory
        >>> posterior = plan.run()
    """

    model: nn.Module
    train: Any
    loss: Callable[..., Tensor]
    _: KW_ONLY
    sampler: Factory | None = None
    batch_size: int | None = None
    chunk_size: int | None = None
    prior: Prior | None = None
    num_draws: int = 200
    gap: int = 50
    burn_in: int | BurnIn | None = None
    num_chains: int = 1
    stacked: bool | None = None
    seed: int = 0
    path: str | Path | None = None
    resume: bool = False
    keep: Literal["draws", "moments"] | int = "draws"
    dtype: torch.dtype | None = None
    initial: Sequence[Mapping[str, Tensor]] | TrainMembers | None = None
    warm_start: torch.optim.Optimizer | Mapping[str, Any] | None = None
    warm_up: WarmUp | Sequence[WarmUp | None] | None = None
    scheduler: Callable[[Sampler], LRScheduler] | None = None
    callbacks: Sequence[Callback] = ()
    likelihood: str | Likelihood | None = None
    num_data: int | None = None
    config: Mapping[str, Any] | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        self._check_model()
        for name, least in (
            ("num_draws", 1),
            ("gap", 1),
            ("num_chains", 1),
            ("seed", 0),
            ("burn_in", 0),
            ("keep", 1),
            ("chunk_size", 1),
        ):
            value = getattr(self, name)
            if value is None or isinstance(value, BurnIn | str):
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
                raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}.")
            object.__setattr__(self, name, int(value))  # JSON has no NumPy integers
        if isinstance(self.keep, str) and self.keep not in ("draws", "moments"):
            raise ValueError(f"`keep` must be 'draws', 'moments' or a number of last draws, got {self.keep!r}.")
        kind = self.dtype
        if kind is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point and can_store(kind)):
            raise ValueError(f"`dtype` must be a floating torch.dtype, such as torch.bfloat16, got {kind!r}.")
        if self.resume and self.path is None:
            raise ValueError("resume=True needs `path`, the folder of the run.")
        if self.path is not None:
            object.__setattr__(self, "path", Path(self.path).expanduser())
        self._check_initial()
        self._check_warm_up()
        if not isinstance(self.callbacks, list | tuple):
            raise TypeError(f"`callbacks` must be a list of callbacks, got {type(self.callbacks).__name__}.")
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(f"`callbacks` must hold instances of adammcmc.Callback, got {type(callback).__name__}.")

    def _check_initial(self) -> None:
        initial, chains = self.initial, self.num_chains
        if initial is None or isinstance(initial, TrainMembers):
            return
        if isinstance(initial, Mapping) or not hasattr(initial, "__len__") or not hasattr(initial, "__getitem__"):
            raise TypeError(
                "`initial` must be a list of state dictionaries, what `train_members` returned, or TrainMembers(), got "
                f"{'one state dictionary' if isinstance(initial, Mapping) else type(initial).__name__}."
            )
        if len(initial) != chains:
            raise ValueError(
                f"`initial` must have one state dictionary for each of {chains} chain{'s' * (chains != 1)}, got "
                f"{len(initial)}. Set num_chains={len(initial)}."
            )

    def _check_warm_up(self) -> None:
        """Make `warm_up` a tuple: empty, or with one record for all chains or one for each."""
        given = self.warm_up
        records = () if given is None else (given,) if isinstance(given, WarmUp) else tuple(given)
        for record in records:
            if not (isinstance(record, WarmUp) and record.settings):
                raise TypeError(
                    "`warm_up` must be the record of a network's burn-in (`posterior.warm_up[0]`, or `sampler.warm_up`), got "
                    f"{'one without settings' if isinstance(record, WarmUp) else type(record).__name__}."
                )
            if not record.is_settled:
                warn(f"`warm_up` is the record of a burn-in that did not settle: {record.reason}.")
        if len(records) not in (0, 1, self.num_chains):
            raise ValueError(f"`warm_up` has {len(records)} records for {self.num_chains} chains: give one, or one for each.")
        if records and isinstance(self.burn_in, BurnIn):
            raise ValueError("`warm_up` brings settings, so that nothing adapts: `burn_in` must be a number of steps, or None.")
        object.__setattr__(self, "warm_up", records)

    @property
    def records(self) -> tuple[WarmUp, ...]:
        """Of `warm_up`: none, one for all chains, or one for each."""
        return cast(tuple[WarmUp, ...], self.warm_up)

    def tuned(self, chain: int) -> dict[str, Any]:
        """The settings of a chain that `warm_up` brings."""
        return dict(self._record(chain).settings) if self.records else {}

    def tuned_to(self, chain: int) -> float | None:
        """The acceptance that these settings were tuned to."""
        return self._record(chain).target_acceptance if self.records else None

    def _record(self, chain: int) -> WarmUp:
        return self.records[chain if len(self.records) > 1 else 0]

    def _check_model(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"`model` must be a torch.nn.Module, got {type(self.model).__name__}.")
        check_not_distributed(self.model)
        if any(isinstance(p, UninitializedParameter) for p in self.model.parameters()):
            raise ValueError("the model has uninitialized lazy layers: call it on one batch first.")
        if not any(p.requires_grad for p in self.model.parameters()):
            raise ValueError("no parameter of the model requires a gradient: there is nothing to sample.")

    def __str__(self) -> str:
        number = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        made_by = innermost(self.sampler)
        options = ", ".join(f"{name}={value}" for name, value in given_options(self.sampler).items())
        length = self.burn_in.num_steps if isinstance(self.burn_in, BurnIn) else self.burn_in
        burn_in = "burn-in" if length is None else f"{length} steps of burn-in"
        return "\n".join(
            [
                f"model    {type(self.model).__name__}, {number:,} trainable weights",
                f"sampler  {'Underdamped (default)' if made_by is None else getattr(made_by, '__name__', made_by)}"
                + (f"({options})" if options else "")
                + ("" if self.batch_size is None else f", batches of {self.batch_size}")
                + (", with the settings of an earlier burn-in" if self.records else ""),
                f"chains   {self.num_chains}, each with {self.num_draws} draws {self.gap} steps apart after {burn_in}; "
                f"seed {self.seed}",
                *self._starts(),
                f"storage  {f'last {self.keep} draws' if isinstance(self.keep, int) else self.keep} in "
                + ("memory" if self.path is None else f"'{self.path}'"),
            ]
        )

    def _starts(self) -> list[str]:
        """A line on what the chains start from, unless it is the model."""
        if self.initial is None:
            return []
        if not isinstance(self.initial, TrainMembers):
            return ["starts   a given state dictionary for each chain"]
        return [f"starts   a member trained for each chain: {self.initial}"]

    @property
    def folder(self) -> Path:
        """`path`, of a plan that has one."""
        assert self.path is not None
        return Path(self.path)

    def manifest(self) -> dict[str, Any]:
        """What `run.json` stores: target, configuration, versions, fingerprints of data and model. Takes no step."""
        with Session(self).prepared() as session:
            return session.manifest()

    def run(self) -> Posterior:
        """Run all chains to their last draw. See `sample` for what is returned and raised."""
        with Session(self).prepared() as session:
            store = session.run()
        return Posterior(store, session.model)


def sample(
    model: nn.Module,
    train: Any,
    loss: Callable[..., Tensor],
    *,
    sampler: Factory | None = None,
    batch_size: int | None = None,
    chunk_size: int | None = None,
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
    initial: Sequence[Mapping[str, Tensor]] | TrainMembers | None = None,
    warm_start: torch.optim.Optimizer | Mapping[str, Any] | None = None,
    warm_up: WarmUp | Sequence[WarmUp | None] | None = None,
    scheduler: Callable[[Sampler], LRScheduler] | None = None,
    callbacks: Sequence[Callback] = (),
    likelihood: str | Likelihood | None = None,
    num_data: int | None = None,
    config: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Posterior:
    """Draw a network's weights from its posterior. The same as `Plan(...).run()`.

    Args:
        model: preferably trained; the chains start from its weights, or from `initial`. It is sampled in its current modes
            (`train` or `eval`), and restored before this returns.
        train: tensors (inputs, targets); arrays, or .npy files, memory-mapped; a Dataset; or a DataLoader. See `as_data`.
        loss: a function of outputs and targets, such as `F.cross_entropy`, or of model and batch (name its first
            argument `model`). For regression, use `GaussianNLL(noise)`.
        sampler: makes the sampler from parameters, such as `partial(AdamMCMC, lr=1e-3, sigma=3e-4, sigma_along=2.0)`. None
            is `Underdamped`, which is exact: on all data at once, or with `FullData()` on minibatches. lr, sigma, sigma_along,
            step_size and inverse_temperature may be tensors with one value per chain: a scan in one run.
        batch_size: None uses the DataLoader's, or all data at once. `AmortisedLangevin` keeps all data, cut into such batches.
        chunk_size: examples evaluated at a time where a step uses all data; None is all, or as many as a few gigabytes allow.
        prior: passed to the sampler. None: a sampler that requires a prior gets `Gaussian.fan_in(model, 2.0)`.
        num_draws: draws per chain.
        gap: steps between two draws.
        burn_in: steps to discard, in which a sampler may tune its settings. A `BurnIn` makes any sampler adapt. None:
            until the sampler's own adaptation ends; without one, a quarter of the steps that follow.
        num_chains: number of chains, each with its own random numbers.
        stacked: True runs all chains at once, under `torch.func.vmap`: they share batches (not noise), and stop and resume
            together. False runs one after another. None stacks on an accelerator where it is possible and faster.
        seed: fixes all random numbers: noise, data order, dropout.
        path: a folder for the draws; None keeps them in memory.
        resume: continue the run in `path` bit for bit, or start it if there is none. All other arguments must be the
            same, except that `num_draws` may grow. (Other versions, devices or numbers of threads raise a warning.)
        keep: "draws"; "moments" (mean and variance of the weights); or a number k: moments and the last k draws.
        dtype: of the stored draws; None is the dtype of the weights.
        initial: a state dictionary for each chain to start from; or `TrainMembers()`, which trains a network for each.
        warm_start: an optimizer (or its state) whose moments `AdamMCMC` starts from.
        warm_up: `posterior.warm_up` of another run, or one record of it: its settings are used, and nothing adapts.
        scheduler: makes a scheduler from the sampler; stepped after each step.
        callbacks: see `Callback`; `TensorBoard(folder)` writes scalars.
        likelihood: the meaning of the outputs, for prediction; None is inferred from the loss. See `Likelihood`.
        num_data: required only for iterable data without a length.
        config: how model and data were made, as JSON: stored in `run.json` for the command line.
        progress: show a bar if standard error is a terminal.

    Returns:
        The posterior. Every exception carries the completed draws in its `result`, Ctrl-C and SIGTERM included.
    """
    return Plan(**locals()).run()
