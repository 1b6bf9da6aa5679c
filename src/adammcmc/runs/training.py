"""Training members of an ensemble by Adam: all at once under `torch.func.vmap`, or one alone.

Each member has its own initial weights, its own split of the data and its own order of batches. The validation loss is
computed after every epoch, and the weights where it was smallest are kept. Both ways take the same steps, up to rounding.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from adammcmc.errors import NonFiniteLoss, warn
from adammcmc.samplers.modules import model_tensors, random_state, write_tensors
from adammcmc.samplers.packing import Packing
from adammcmc.samplers.progress import Bar
from adammcmc.samplers.stacked import CannotStack
from adammcmc.samplers.vmapped import VmappedModel
from adammcmc.target.batches import Batch, to_device
from adammcmc.target.data import Data
from adammcmc.target.likelihood import Loss

__all__ = ["Alone", "Fitted", "Splits", "Together", "Trainer", "check_initialisable", "fit", "initialise"]

State = dict[str, Tensor]

_SHORTEST_EPOCH = 10  # steps: a validation loss after every single step of full-batch training would cost as much as the step
_VALIDATION_ROWS = 4096  # in one evaluation


def check_initialisable(model: nn.Module) -> None:
    """Warn of modules whose trainable weights cannot be initialised anew; refuse a model that has no others."""
    owners = [(name, m) for name, m in model.named_modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    lacking = [f"'{name}' ({type(m).__name__})" if name else type(m).__name__ for name, m in owners if _reset_of(m) is None]
    if not lacking:
        return
    if len(lacking) == len(owners):
        raise ValueError(
            f"no module with trainable weights has a `reset_parameters` method ({', '.join(lacking)}): all members would start "
            "from the same weights. Add the method, or train the networks yourself and pass their state dictionaries as "
            "`initial` of `sample`."
        )
    warn(
        f"every member starts from the model's own weights in modules without a `reset_parameters` method: "
        f"{', '.join(lacking)}. Add the method, so that members start apart in these weights too."
    )


def initialise(model: nn.Module, seed: int) -> None:
    """Initialise all modules anew by their `reset_parameters`, submodules first. Weights without a gradient stay."""
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    frozen = _frozen(model)
    torch.manual_seed(seed)
    for module in reversed(list(model.modules())):
        if module not in frozen and (reset := _reset_of(module)) is not None:
            with torch.no_grad():
                reset()
    write_tensors(model, kept)


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """The method that initialises a module; torch's attention layers have a private one."""
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(module, name, None)):
            return reset  # type: ignore[no-any-return]
    return None


def _frozen(model: nn.Module) -> set[nn.Module]:
    """The modules all of whose weights are frozen, with all modules inside them."""
    found: set[nn.Module] = set()
    for module in model.modules():
        params = list(module.parameters())
        if params and not any(p.requires_grad for p in params):
            found |= set(module.modules())
    return found


class Splits:
    """The examples of each member: a random part for validation, and batches of the others, in random order.

    Args:
        num_data: examples.
        seeds: of each member.
        validation: share of the examples that is held out; 0 holds out none.
        batch_size: of one member, at most all of its training examples.
    """

    def __init__(self, num_data: int, seeds: Sequence[int], validation: float, batch_size: int) -> None:
        held_out = max(1, round(validation * num_data)) if validation > 0 else 0
        if held_out >= num_data:
            raise ValueError(
                f"`validation` is {validation}, which leaves no training example of {num_data}: make it smaller, or 0."
            )
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        rows = torch.stack([torch.randperm(num_data, generator=generator) for generator in self._generators])
        self.validation, self.training = rows[:, :held_out].sort(1).values, rows[:, held_out:]
        """Numbers of examples, (members, examples)."""
        self.batch_size = min(batch_size, num_data - held_out)
        self.num_batches = self.training.shape[1] // self.batch_size
        """In an epoch; the remaining examples are left to later epochs."""

    def batches(self) -> Iterator[Tensor]:
        """Rows (members, batch), without end."""
        while True:
            size = self.training.shape[1]
            if self.num_batches == 1 and self.batch_size == size:
                yield self.training
                continue
            orders = torch.stack([torch.randperm(size, generator=generator) for generator in self._generators])
            mixed = self.training.gather(1, orders)
            for first in range(0, self.num_batches * self.batch_size, self.batch_size):
                yield mixed[:, first : first + self.batch_size]

    def validation_parts(self) -> list[Tensor]:
        """The validation rows in parts of a few thousand."""
        members, each = self.validation.shape
        size = max(1, _VALIDATION_ROWS // members)
        return [self.validation[:, first : first + size] for first in range(0, each, size)]


class Trainer(ABC):
    """Weights of one or many members, with an Adam that moves them."""

    num_members: int
    optimizer: torch.optim.Optimizer

    def __init__(self, model: nn.Module, loss: Loss, data: Data) -> None:
        self.model, self.loss, self.data = model, loss, data
        self.device = next(model.parameters()).device
        self._held: list[Batch] | None = None  # validation data that fit in one batch

    def load(self, rows: Iterator[Tensor]) -> Iterator[Batch]:
        """Batches of these examples, (members, examples) each, on the device. The same rows twice are loaded once."""
        known: Tensor | None = None
        batch: Batch = None
        for own in rows:
            if own is not known:
                known, batch = own, self.shaped(to_device(self.data.fetch(own.reshape(-1)), self.device), own)
            yield batch

    @abstractmethod
    def shaped(self, batch: Batch, rows: Tensor) -> Batch:
        """The batch with an axis of members, where there is one."""

    @abstractmethod
    def losses(self, batch: Batch) -> Tensor:
        """Mean loss of each member on its batch, (members,)."""

    @abstractmethod
    def keep(self, is_better: Tensor) -> None:
        """Remember the present weights of these members."""

    @abstractmethod
    def kept(self) -> list[State]:
        """A state dictionary of each member, as it was last remembered."""

    def train(self) -> None:
        """Training mode, except where all weights are frozen: statistics of a pretrained part stay as they are."""
        self.model.train()
        for module in _frozen(self.model):
            module.training = False

    @torch.no_grad()
    def validation_losses(self, parts: Sequence[Tensor]) -> Tensor:
        """Mean loss of each member over these rows, in evaluation mode, (members,)."""
        if len(parts) == 1 and self._held is None:
            self._held = list(self.load(iter(parts)))
        self.model.eval()
        total = torch.zeros(self.num_members, dtype=torch.float64, device=self.device)
        for rows, batch in zip(parts, self._held or self.load(iter(parts)), strict=True):
            total += self.losses(batch).double() * rows.shape[1]
        self.train()
        return total / sum(rows.shape[1] for rows in parts)


class Alone(Trainer):
    """One member, whose weights are the model's."""

    num_members = 1

    def __init__(self, model: nn.Module, loss: Loss, data: Data, lr: float, weight_decay: float) -> None:
        super().__init__(model, loss, data)
        params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(params, lr, weight_decay=weight_decay)
        self._best: State = {}

    def shaped(self, batch: Batch, rows: Tensor) -> Batch:
        return batch

    def losses(self, batch: Batch) -> Tensor:
        return self.loss(self.model, batch).mean()[None]

    def keep(self, is_better: Tensor) -> None:
        if bool(is_better[0]):
            self._best = {name: x.detach().clone() for name, x in model_tensors(self.model)}

    def kept(self) -> list[State]:
        return [state_with(self.model, self._best)]


class Together(Trainer):
    """Many members in one evaluation: their weights stacked, the model under `torch.func.vmap`.

    Args:
        first: all tensors of each member at its start, by name.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, data: Data, lr: float, weight_decay: float, first: Sequence[Mapping[str, Tensor]]
    ) -> None:
        super().__init__(model, loss, data)
        self.num_members = len(first)
        params = [p for p in model.parameters() if p.requires_grad]
        self._vmapped = VmappedModel(model, Packing(params, [0] * len(params)), {}, self.num_members)
        many = {name: torch.stack([state[name] for state in first]) for name in first[0]}
        names = list(self._vmapped.params.shapes)
        self._params = tuple(x.requires_grad_() for x in self._vmapped.params.join({name: many[name] for name in names}))
        self._buffers = self._vmapped.buffers.join({name: many[name] for name, _ in model.named_buffers()})
        self._best = tuple(x.detach().clone() for x in self._params), self._buffers
        self.optimizer = torch.optim.AdamW(self._params, lr, weight_decay=weight_decay)

    def shaped(self, batch: Batch, rows: Tensor) -> Batch:
        members, each = rows.shape

        def split(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.dim() == 0 or len(x) != members * each:
                raise CannotStack("the batches hold more than tensors with one row for each example")
            return x.reshape(members, each, *x.shape[1:])

        return _pytree.tree_map(split, batch)

    def losses(self, batch: Batch) -> Tensor:
        losses, moved = self._vmapped.call(self.loss, self._params, self._buffers, batch, is_own=True)
        if self.model.training:
            self._buffers = moved
        return losses if losses.dim() == 1 else losses.mean(1)

    def keep(self, is_better: Tensor) -> None:
        params, buffers = self._best
        own = [is_better.reshape(-1, *[1] * (x.dim() - 1)) for x in params]
        chosen = tuple(torch.where(m, x.detach(), b) for m, x, b in zip(own, self._params, params, strict=True))
        self._best = chosen, self._vmapped.buffers.select(is_better, self._buffers, buffers)

    def kept(self) -> list[State]:
        many = self._vmapped.draw(*self._best)
        return [{name: x[i].clone() for name, x in many.items()} for i in range(self.num_members)]

    def try_out(self, rows: Tensor, first: Mapping[str, Tensor]) -> None:
        """Evaluate all members once, and raise `CannotStack` if that fails or differs from the first member alone."""
        [batch] = self.load(iter([rows]))
        names = {name for name, _ in self.model.named_buffers()}
        self.model.eval()
        write_tensors(self.model, first)
        numbers = random_state(self.device)
        with torch.no_grad():
            alone = self.loss(self.model, _pytree.tree_map(lambda x: x[0], batch)).mean()
        if {name for name, _ in self.model.named_buffers()} != names:
            raise CannotStack("the model creates buffers in its forward pass")
        is_random = not all(map(torch.equal, numbers, random_state(self.device)))
        try:
            losses = self.losses(batch)
            torch.autograd.grad(losses.sum(), self._params, allow_unused=True)
        except torch.OutOfMemoryError as error:
            raise CannotStack("they do not fit into the memory of the device together") from error
        except Exception as error:
            words = str(error).strip().split("\n")[0].rstrip(".")
            raise CannotStack(f"the model cannot be run under torch.func.vmap: {type(error).__name__}: {words}") from error
        if not is_random and not torch.allclose(losses[0], alone, rtol=0.01, atol=1e-3, equal_nan=True):
            raise CannotStack("under torch.func.vmap the model has another loss (does it keep state that is not a buffer?)")


def state_with(model: nn.Module, tensors: Mapping[str, Tensor]) -> State:
    """`model.state_dict()` with these values; tied tensors have several names."""
    names = {id(x): name for name, x in model_tensors(model)}
    state = model.state_dict(keep_vars=True)
    return {name: tensors[names[id(x)]].clone() for name, x in state.items() if isinstance(x, Tensor)}


class Fitted(NamedTuple):
    """What training left of one member."""

    state: State
    loss: float
    """Of the validation data, or of the last epoch without them."""
    step: int
    """Of the weights that were kept."""
    has_stopped: bool
    """Whether it stopped early, and not at the largest number of steps."""


def fit(trainer: Trainer, splits: Splits, max_steps: int, patience: int, bar: Bar, numbers: Sequence[int]) -> list[Fitted]:
    """Train until no member has improved for `patience` epochs. `numbers` are those of the members, for messages."""
    epoch, device = max(splits.num_batches, _SHORTEST_EPOCH), trainer.device
    held_out = splits.validation_parts()
    best = torch.full((trainer.num_members,), math.inf, dtype=torch.float64)
    steps, waited = torch.zeros(len(best), dtype=torch.long), torch.zeros(len(best), dtype=torch.long)
    is_active = torch.ones(len(best), dtype=torch.bool)
    total, since = torch.zeros(len(best), dtype=torch.float64, device=device), 0
    batches = trainer.load(splits.batches())
    trainer.train()
    for step in range(1, max_steps + 1):
        trainer.optimizer.zero_grad()
        losses = trainer.losses(next(batches))
        losses.sum().backward()  # type: ignore[no-untyped-call]
        trainer.optimizer.step()
        total, since = total + losses.detach(), since + 1
        if since < epoch and step < max_steps:
            continue
        mean = (total / since).cpu()
        _check_finite(mean, is_active, step, numbers)
        total, since = torch.zeros_like(total), 0
        found = trainer.validation_losses(held_out).cpu() if held_out else mean
        is_better = is_active & (found < best if held_out else torch.ones_like(is_active))
        trainer.keep(is_better.to(device))
        best, steps = torch.where(is_better, found, best), torch.where(is_better, step, steps)
        waited = torch.where(is_better, 0, waited + 1)
        if held_out:
            is_active &= waited < patience
        bar.update(step, max_steps, functools.partial("loss {:.3g}".format, float(best.mean())))
        if not bool(is_active.any()):
            break
    _check_finite(best, torch.ones_like(is_active), step, numbers)
    rows = zip(trainer.kept(), best.tolist(), steps.tolist(), is_active.tolist(), strict=True)
    return [Fitted(state, loss, at, not active) for state, loss, at, active in rows]


def _check_finite(losses: Tensor, is_active: Tensor, step: int, numbers: Sequence[int]) -> None:
    broken = [i for i in range(len(losses)) if bool(is_active[i]) and not math.isfinite(losses[i])]
    if broken:
        raise NonFiniteLoss(
            f"the loss of member {numbers[broken[0]]} was {float(losses[broken[0]])} at training step {step}.",
            "Check the data and the loss; if they are right, make `lr` of the training smaller.",
        )
