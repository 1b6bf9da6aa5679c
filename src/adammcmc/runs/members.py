"""Members of an ensemble: networks trained apart, for chains to start from.

members = train_members(model, (inputs, targets), F.cross_entropy, num_members=10)
posterior = sample(model, (inputs, targets), F.cross_entropy, num_chains=10, initial=members)

`sample(..., num_chains=10, initial=TrainMembers())` is both in one call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn

from adammcmc.posterior.calibration import ClassScores, ValueScores, score
from adammcmc.posterior.posterior import bare
from adammcmc.posterior.predictive import Prediction, predict
from adammcmc.runs.training import Alone, Fitted, Splits, Together, check_initialisable, fit, initialise
from adammcmc.samplers.modules import model_tensors, restored, write_tensors
from adammcmc.samplers.progress import show_bar
from adammcmc.samplers.stacked import CannotStack
from adammcmc.target.batches import Batch, to_device
from adammcmc.target.data import Data, IterableData, as_data, derive_seed
from adammcmc.target.likelihood import Likelihood, Loss, likelihood_of

__all__ = ["Members", "TrainMembers", "train_members"]

_BATCH_SIZE = 128  # for data that come without one
_SMALL = 100_000  # weights, up to which stacked members are faster on a CPU


@dataclass(frozen=True, eq=False, repr=False)
class Members(Sequence[Mapping[str, Tensor]]):
    """Trained networks: a sequence of state dictionaries, for `initial=` of `sample`. `print` shows a table."""

    states: tuple[dict[str, Tensor], ...]
    """The weights and buffers of each member, for `model.load_state_dict`."""
    losses: tuple[float, ...]
    """The validation loss of each; without validation, the mean training loss of the last epoch."""
    steps: tuple[int, ...]
    """The training step at which the weights of each were kept."""
    has_stopped: tuple[bool, ...]
    """Whether each stopped early, and not at the largest number of steps."""
    num_training: int
    """Training examples of each."""
    num_validation: int
    """Validation examples of each."""
    is_stacked: bool
    """Whether all were trained in one evaluation per step."""
    why_not_stacked: str
    """Why they were not, if they were meant to be."""
    seconds: float
    """Wall time of the training."""
    model: nn.Module
    """The architecture. Its weights do not matter."""
    likelihood: Likelihood
    """The meaning of the outputs."""
    has_targets: bool
    """Whether the last part of a batch is the targets, which the model does not take."""

    @overload
    def __getitem__(self, member: int) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, member: slice) -> tuple[dict[str, Tensor], ...]: ...
    def __getitem__(self, member: int | slice) -> dict[str, Tensor] | tuple[dict[str, Tensor], ...]:
        return self.states[member]

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.states)

    def predict(self, data: Any, *, raw: bool = False, progress: bool = True) -> Prediction:
        """The prediction of all members together, as a deep ensemble; see `Posterior.predict`.

        Args:
            data: inputs as a tensor, or (inputs, targets), a Dataset or a DataLoader as in training.
            raw: also keep the prediction of every member.
            progress: show a bar if standard error is a terminal.
        """
        if not self.has_targets:
            raise ValueError(
                "the loss of the members is a function of model and batch, which does not say what the model takes: load a "
                "state dictionary into the model and call it."
            )

        def split(batch: Batch) -> tuple[Sequence[Any], Any]:
            is_pair = isinstance(batch, tuple | list) and len(batch) > 1
            return (batch[:-1], batch[-1]) if is_pair else ([batch], None)

        return predict(
            self.model,
            [partial(_on_host, state) for state in self.states],
            as_data(data, must_know_length=False),
            likelihood=self.likelihood,
            forward=lambda model, batch: model(*split(batch)[0]),
            targets_of=lambda batch: split(batch)[1],
            raw=raw,
            progress=progress,
        )

    def score(self, data: Any, *, num_bins: int = 15, **options: Any) -> ClassScores | ValueScores:
        """Scores of all members together, as a deep ensemble: what the draws of chains from them should improve on.

        Args:
            data: with targets.
            num_bins: bins of the reliability curve.
            options: of `predict`.
        """
        return score(self.predict(data, **options), num_bins=num_bins)

    def record(self) -> dict[str, Any]:
        """What `run.json` stores of the training, as JSON."""
        names = ("losses", "steps", "has_stopped", "num_training", "num_validation", "is_stacked", "seconds")
        return {name: list(x) if isinstance(x := getattr(self, name), tuple) else x for name in names}

    def __str__(self) -> str:
        how = "at once" if self.is_stacked else "one after another"
        if self.why_not_stacked:
            how += f" ({self.why_not_stacked})"
        examples = f"{self.num_training:,} training and {self.num_validation:,} validation examples each"
        kind = "validation loss" if self.num_validation else "training loss"
        lines = [
            f"{len(self)} member{'s' * (len(self) != 1)} trained {how} in {self.seconds:.1f} s, {examples}",
            f"member   steps  {kind}",
        ]
        for i, (loss, step, has_stopped) in enumerate(zip(self.losses, self.steps, self.has_stopped, strict=True)):
            note = "" if has_stopped or not self.num_validation else "  not stopped early: `max_steps` reached"
            lines.append(f"{i:6}  {step:6,}  {loss:{len(kind)}.4f}{note}")
        return "\n".join(lines)


@dataclass(frozen=True)
class TrainMembers:
    """Trains a network for each chain before the run begins; the chains start there. For `initial=` of `sample`.

    Each member is initialised anew (`reset_parameters` of every module), trained by Adam with decoupled weight decay on its
    own random part of the data, and stopped when the loss of the other part has not improved for `patience` epochs; the
    weights with the smallest validation loss are kept. Weights without a gradient keep the model's values in all members.
    The members depend on the seed of the run and on these settings. A resumed run does not train again.

    Args:
        lr: learning rate.
        weight_decay: strength of the decay of the weights, decoupled from the gradient as in AdamW.
        batch_size: examples in a step of the training; None is the batch size of the run, or 128 where that is all data.
        max_steps: the most training steps of a member.
        validation: share of the examples that is held out of the training of each member; 0 trains on all examples, for
            `max_steps` steps.
        patience: epochs (of at least 10 steps) without improvement before a member stops.
        stacked: True trains all members in one evaluation per step, under `torch.func.vmap`; False trains one after
            another; None stacks small networks where it is possible.

    Example:
        >>> import adammcmc, torch.nn.functional as F
        >>> x = torch.randn(60, 2)
        >>> train = (x, x.argmax(1))
        >>> start = TrainMembers(max_steps=50)
        >>> posterior = adammcmc.sample(
        ...     nn.Linear(2, 2), train, F.cross_entropy, num_chains=4, initial=start, num_draws=5, gap=2, burn_in=200
        ... )
        >>> posterior.num_chains
        4
    """

    lr: float = 1e-3
    weight_decay: float = 1e-4
    batch_size: int | None = None
    max_steps: int = 10_000
    validation: float = 0.15
    patience: int = 20
    stacked: bool | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.lr) and 0 < self.lr < math.inf):
            raise ValueError(f"`lr` must be a positive learning rate, got {self.lr!r}.")
        if not (_is_number(self.weight_decay) and 0 <= self.weight_decay < math.inf):
            raise ValueError(f"`weight_decay` must be a number of at least 0, got {self.weight_decay!r}.")
        if not (_is_number(self.validation) and 0 <= self.validation < 1):
            raise ValueError(f"`validation` must be a share of the examples, at least 0 and below 1, got {self.validation!r}.")
        for name in ("batch_size", "max_steps", "patience"):
            value = getattr(self, name)
            if value is None and name == "batch_size":
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
                raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}.")
            object.__setattr__(self, name, int(value))  # JSON has no NumPy integers
        if self.stacked is not None and not isinstance(self.stacked, bool):
            raise ValueError(f"`stacked` must be True, False or None, got {self.stacked!r}.")

    def __str__(self) -> str:
        size = "" if self.batch_size is None else f", batches of {self.batch_size}"
        stop = f"validation on {100 * self.validation:.3g}%, patience {self.patience}" if self.validation else "no validation"
        return f"Adam, lr {self.lr:g}, weight decay {self.weight_decay:g}{size}, at most {self.max_steps:,} steps, {stop}"

    def settings(self) -> dict[str, Any]:
        """What the members depend on besides the seed, as JSON."""
        return {name: value for name, value in asdict(self).items() if name != "stacked"}

    def check(self, data: Data) -> None:
        """Refuse data that cannot be split."""
        if isinstance(data, IterableData):
            raise ValueError(
                "members are trained on random parts of the data, but these data can only be iterated. Give tensors or a "
                "Dataset with numbered examples, or pass state dictionaries of networks that you trained as `initial`."
            )

    def train(
        self,
        model: nn.Module,
        data: Data,
        loss: Loss,
        likelihood: Likelihood,
        num_members: int,
        *,
        seed: int = 0,
        progress: bool = True,
    ) -> Members:
        """The trained members. The model, its modes and torch's random numbers are as before at the end."""
        self.check(data)
        began, why_not, data = time.perf_counter(), "", data.as_tensors()
        device = next(model.parameters()).device
        with restored(model, device), torch.enable_grad():
            data.restart(0)
            first = self._first(model, num_members, seed)
            fitted: list[Fitted] | None = None
            if self._is_stacked(model, device, num_members):
                try:
                    fitted = self._together(model, data, loss, first, seed, progress)
                except CannotStack as why:
                    if self.stacked:
                        raise CannotStack(f"the members cannot be stacked: {why}. Leave out `stacked`.") from why
                    why_not = str(why)
            is_stacked = fitted is not None
            if fitted is None:
                fitted = [self._alone(model, data, loss, first, seed, i, progress) for i in range(num_members)]
        states, losses, steps, stopped = zip(*fitted, strict=True)
        sizes = self._splits(data, [0])
        return Members(
            states,
            losses,
            steps,
            stopped,
            num_training=sizes.training.shape[1],
            num_validation=sizes.validation.shape[1],
            is_stacked=is_stacked,
            why_not_stacked=why_not,
            seconds=time.perf_counter() - began,
            model=model,
            likelihood=likelihood,
            has_targets=not loss.takes_model(data.fetch(torch.arange(1))),
        )

    def _first(self, model: nn.Module, num_members: int, seed: int) -> list[dict[str, Tensor]]:
        """All tensors of each member at its start."""
        before = {name: x.detach().clone() for name, x in model_tensors(model)}
        check_initialisable(model)
        first = []
        for member in range(num_members):
            write_tensors(model, before)
            initialise(model, derive_seed(seed, member, 4))
            first.append({name: x.detach().clone() for name, x in model_tensors(model)})
        return first

    def _is_stacked(self, model: nn.Module, device: torch.device, num_members: int) -> bool:
        if self.stacked is not None:
            return self.stacked
        is_small = device.type == "cuda" or sum(p.numel() for p in model.parameters()) <= _SMALL
        return num_members > 1 and is_small and not any(getattr(module, "is_fast_alone", False) for module in model.modules())

    def _splits(self, data: Data, seeds: Sequence[int]) -> Splits:
        own = data.batch_size if data.batch_size is not None and data.batch_size < data.num_data else _BATCH_SIZE
        return Splits(data.num_data, seeds, self.validation, self.batch_size or own)

    def _together(
        self, model: nn.Module, data: Data, loss: Loss, first: list[dict[str, Tensor]], seed: int, progress: bool
    ) -> list[Fitted]:
        numbers = range(len(first))
        splits = self._splits(data, [derive_seed(seed, member, 5) for member in numbers])
        trainer = Together(model, loss, data, self.lr, self.weight_decay, first)
        trainer.try_out(splits.training[:, : splits.batch_size], first[0])
        torch.manual_seed(derive_seed(seed, 0, 6))
        with show_bar(f"training {len(first)} members at once", show=progress) as bar:
            return fit(trainer, splits, self.max_steps, self.patience, bar, numbers)

    def _alone(
        self, model: nn.Module, data: Data, loss: Loss, first: list[dict[str, Tensor]], seed: int, member: int, progress: bool
    ) -> Fitted:
        write_tensors(model, first[member])
        splits = self._splits(data, [derive_seed(seed, member, 5)])
        trainer = Alone(model, loss, data, self.lr, self.weight_decay)
        torch.manual_seed(derive_seed(seed, member, 6))
        with show_bar(f"training member {member + 1}/{len(first)}", show=progress) as bar:
            return fit(trainer, splits, self.max_steps, self.patience, bar, [member])[0]


def train_members(
    model: nn.Module,
    train: Any,
    loss: Callable[..., Tensor],
    num_members: int = 10,
    *,
    lr: float = 1e-3,
    weight_decay: float = 1e-4,
    batch_size: int | None = None,
    max_steps: int = 10_000,
    validation: float = 0.15,
    patience: int = 20,
    stacked: bool | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Members:
    """Train networks apart, each from its own initial weights and on its own random part of the data.

    The result is for `initial=` of `sample`. `sample(..., initial=TrainMembers(...))` trains the same members, where seed and
    data are the same, and does not train again when the run is resumed.

    Args:
        model: the architecture. Its weights are not used, except those without a gradient and those of modules that have no
            `reset_parameters`, which a warning names. It is left unchanged.
        train: as in `sample`, with numbered examples: no iterable.
        loss: as in `sample`.
        num_members: how many to train.
        lr: see `TrainMembers`, as for the other settings.
        weight_decay: see `TrainMembers`.
        batch_size: see `TrainMembers`.
        max_steps: see `TrainMembers`.
        validation: see `TrainMembers`.
        patience: see `TrainMembers`.
        stacked: see `TrainMembers`.
        seed: fixes initial weights, splits, orders and dropout.
        progress: show a bar if standard error is a terminal.

    Raises:
        NonFiniteLoss: the loss of a member was NaN or infinite.

    Example:
        >>> import torch.nn.functional as F
        >>> x = torch.randn(60, 2)
        >>> members = train_members(nn.Linear(2, 2), (x, x.argmax(1)), F.cross_entropy, num_members=3, max_steps=50)
        >>> len(members), members.steps
        (3, (50, 50, 50))
    """
    if isinstance(num_members, bool) or not hasattr(num_members, "__index__") or num_members < 1:
        raise ValueError(f"`num_members` must be an integer of at least 1, got {num_members!r}.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}.")
    training = TrainMembers(lr, weight_decay, batch_size, max_steps, validation, patience, stacked)
    module, data, losses = bare(model), as_data(train), Loss(loss)
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("no parameter of the model requires a gradient: there is nothing to train.")
    device = next(module.parameters()).device
    if not isinstance(data, IterableData):
        few = torch.arange(min(data.num_data, training._splits(data, [0]).batch_size))
        losses.try_out(module, to_device(data.fetch(few), device))
    return training.train(module, data, losses, likelihood_of(loss), int(num_members), seed=seed, progress=progress)


def _on_host(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.cpu() for name, x in state.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
