"""Losses: per-example losses of a network's outputs, and the meaning of these outputs.

The likelihood of an example is exp(-loss). Cross entropy implies that outputs are class logits, squared error that they
are values; prediction depends on it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import re
import typing
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from adammcmc.target.batches import Batch, describe_batch, num_rows, part_of, to_device
from adammcmc.target.data import Data

__all__ = ["LIKELIHOODS", "DataExamples", "GaussianNLL", "Likelihood", "Loss", "as_likelihood", "grows", "likelihood_of"]


class Likelihood(NamedTuple):
    """The meaning of a network's outputs.

    `name` is "categorical" (class logits, along axis 1), "log_categorical" (log probabilities), "bernoulli" (one logit
    per output), "bernoulli_probabilities", "gaussian" (mean values with known noise, or means and log variances), or
    "values" (unknown).
    """

    name: str
    noise: float | None = None
    """Standard deviation of Gaussian noise; None if the network predicts it (or there is none)."""

    @property
    def has_classes(self) -> bool:
        """Whether predictions are class probabilities."""
        return self.name in _TO_PROBABILITIES

    def predictions(self, outputs: Tensor) -> Tensor:
        """Class probabilities, or mean values, of outputs (examples, ...)."""
        if self.has_classes:
            return _TO_PROBABILITIES[self.name](outputs)
        return self._halves(outputs)[0] if self.predicts_noise else outputs

    def variances(self, outputs: Tensor) -> Tensor | None:
        """Variances of the noise around the predictions; None if the likelihood has no noise model."""
        if self.name != "gaussian":
            return None
        if self.predicts_noise:
            return self._halves(outputs)[1].exp()
        assert self.noise is not None
        return torch.full_like(outputs, self.noise**2)

    @property
    def predicts_noise(self) -> bool:
        """Whether the network returns a variance with each mean."""
        return self.name == "gaussian" and self.noise is None

    @staticmethod
    def _halves(outputs: Tensor) -> tuple[Tensor, ...]:
        if outputs.dim() < 2 or outputs.shape[1] % 2:
            raise ValueError(
                f"a network that predicts its noise must return means and log variances side by side, shape (batch, 2 "
                f"k), got {tuple(outputs.shape)}. For a network that returns means alone, give the noise: GaussianNLL(0.1)."
            )
        return outputs.chunk(2, 1)


_TO_PROBABILITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "categorical": lambda outputs: outputs.softmax(1),
    "log_categorical": lambda outputs: outputs.exp(),
    "bernoulli": lambda outputs: outputs.sigmoid(),
    "bernoulli_probabilities": lambda outputs: outputs,
}
LIKELIHOODS = (*_TO_PROBABILITIES, "gaussian", "values")
_MODEL_NAMES = ("model", "module", "net", "network")
_KNOWN: dict[str, tuple[Any, type[nn.Module]]] = {
    "categorical": (F.cross_entropy, nn.CrossEntropyLoss),
    "log_categorical": (F.nll_loss, nn.NLLLoss),
    "bernoulli": (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss),
    "bernoulli_probabilities": (F.binary_cross_entropy, nn.BCELoss),
}


@dataclass(frozen=True)
class GaussianNLL:
    """The regression loss -log N(y; f(x), noise^2), summed over the outputs of an example.

        l_i = sum_k (y_ik - f_ik)^2 / (2 noise^2) + log noise + log(2 pi) / 2

    Args:
        noise: standard deviation of the noise on a target. With None, the default, the network predicts it: it returns
            means and log variances side by side, (batch, 2 k) for k targets.
    """

    noise: float | None = None

    def __post_init__(self) -> None:
        if self.noise is not None and not (math.isfinite(self.noise) and self.noise > 0):
            raise ValueError(f"`noise` must be a positive standard deviation, or None, got {self.noise}.")

    @property
    def likelihood(self) -> Likelihood:
        """The meaning of the outputs."""
        return Likelihood("gaussian", self.noise)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean = self.likelihood.predictions(outputs)
        if mean.shape != targets.shape:
            hint = "For one target, targets[:, None] has the shape (batch, 1)."
            if self.noise is None and outputs.shape == targets.shape:
                hint = "For a network that returns means alone, give the noise: GaussianNLL(0.1)."
            raise ValueError(
                f"the network predicts means of shape {tuple(mean.shape)}, the targets have shape "
                f"{tuple(targets.shape)}: they must be equal. {hint}"
            )
        variance = self.likelihood.variances(outputs)
        assert variance is not None
        losses = (targets - mean).square() / (2 * variance) + 0.5 * torch.log(2 * math.pi * variance)
        return losses.reshape(len(losses), -1).sum(1)


def as_likelihood(given: str | Likelihood) -> Likelihood:
    """A likelihood given by name, or as such."""
    if isinstance(given, Likelihood):
        return given
    if given not in LIKELIHOODS:
        raise ValueError(f"`likelihood` must be one of {', '.join(LIKELIHOODS)}, got {given!r}.")
    return Likelihood(given)


def likelihood_of(loss: Callable[..., Any]) -> Likelihood:
    """The likelihood that a loss implies; "values" for an unknown loss.

    Example:
        >>> likelihood_of(functools.partial(F.cross_entropy, label_smoothing=0.1)).name
        'categorical'
    """
    loss = _unwrapped(loss)
    if isinstance(known := getattr(loss, "likelihood", None), Likelihood):
        return known
    for name, (function, module) in _KNOWN.items():
        if loss in (function, module) or isinstance(loss, module):
            return Likelihood(name)
    return Likelihood("values")


class Loss:
    """A user's loss as per-example losses of a model and a batch (or as their mean, if the loss returns no more).

    Args:
        function: of outputs and targets, such as `F.cross_entropy` (called with reduction="none" if it takes that): a
            batch is then (inputs, targets) or (input, input, ..., targets). Or of model and batch, if its first
            argument is called "model" or annotated as a module, or if there are no targets.

    If an example has several losses, (batch, k), they are averaged, as with reduction="mean".
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        if not callable(function):
            raise TypeError(f"`loss` must be a function, such as torch.nn.functional.cross_entropy, got {function!r}.")
        self.name = _name(function)
        _refuse(function, self.name)
        self.num_averaged = 1
        """How many losses of an example were averaged at the last call."""
        self.description = _description(function)
        """Text that distinguishes it from other losses, as far as possible."""
        if isinstance(function, nn.Module) and isinstance(getattr(function, "reduction", None), str):
            function = copy.copy(function)
            function.reduction = "none"  # type: ignore[assignment]
        self._function = function
        names, self._annotation = _parameters(function)
        self._first = names[0] if names else ""
        self._options = {"reduction": "none"} if "reduction" in names and not isinstance(function, nn.Module) else {}

    def takes_model(self, batch: Batch) -> bool:
        """Whether it is a function of model and batch, not of outputs and targets."""
        kind = self._annotation
        is_module = issubclass(kind, nn.Module) if isinstance(kind, type) else str(kind).split(".")[-1] == "Module"
        return self._first in _MODEL_NAMES or is_module or not isinstance(batch, tuple | list) or len(batch) < 2

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.takes_model(batch):
            losses = self._function(model, batch, **self._options)
            if isinstance(losses, Tensor) and isinstance(batch, tuple | list) and isinstance(batch[-1], Tensor):
                self._check_square(losses, batch[-1].numel(), batch)
            return self._by_example(losses, batch)
        *inputs, targets = batch
        outputs = model(*inputs)
        losses = self._function(outputs, targets, **self._options)
        if isinstance(losses, Tensor) and isinstance(outputs, Tensor) and isinstance(targets, Tensor):
            self._check_broadcast(losses, outputs, targets)
            self._check_square(losses, max(outputs.numel(), targets.numel()), batch)
        return self._by_example(losses, batch)

    def _check_broadcast(self, losses: Tensor, outputs: Tensor, targets: Tensor) -> None:
        if outputs.shape != targets.shape and losses.numel() > max(outputs.numel(), targets.numel()):
            raise ValueError(
                f"`{self.name}` compared every output with every target: outputs {tuple(outputs.shape)} and targets "
                f"{tuple(targets.shape)} were broadcast to {tuple(losses.shape)}. Give the targets the shape of the "
                "outputs, for example targets[:, None]."
            )

    def _check_square(self, losses: Tensor, num_numbers: int, batch: Batch) -> None:
        """Refuse a matrix of all examples by all examples that neither outputs nor targets have the size of."""
        if losses.dim() < 2 or losses.numel() <= num_numbers:
            return
        n = num_rows(batch)
        if tuple(losses.shape[:2]) == (n, n):
            raise ValueError(
                f"`{self.name}` returned losses of shape {tuple(losses.shape)} for a batch of {n} examples: it compared every "
                "output with every target. Give both the same shape inside of the loss, for example outputs[:, 0]."
            )

    def _by_example(self, losses: Any, batch: Batch) -> Tensor:
        if not isinstance(losses, Tensor):
            raise TypeError(f"`{self.name}` must return a tensor, got {type(losses).__name__}.")
        self.num_averaged = 1 if losses.dim() < 2 else losses[0].numel()
        result: Tensor = losses if losses.dim() < 2 else losses.reshape(len(losses), -1).mean(1)
        if result.dim() == 1 and len(result) != num_rows(batch):
            raise ValueError(
                f"`{self.name}` returned {len(result)} losses for a batch of {num_rows(batch)} examples: it must "
                "return one for each example, or their mean."
            )
        return result

    @property
    def averaging(self) -> str:
        """A note on averaged losses for the one-line target; empty if an example has one loss."""
        if self.num_averaged == 1:
            return ""
        return f" | loss of an example: the mean of its {self.num_averaged} (a loss that sums them weighs all)"

    def try_out(self, model: nn.Module, batch: Batch) -> Tensor:
        """The losses of one batch, with errors that describe the batch. Leaves no trace in the model or generators."""
        buffers = [(b, b.detach().clone()) for b in model.buffers() if b.is_contiguous()]
        devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
        self._check_targets(batch)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices), warnings.catch_warnings(record=True) as from_torch:
                warnings.simplefilter("always")
                losses = self(model, batch)
                self._check_outputs(model, batch, losses, [str(w.message) for w in from_torch])
                is_sum = losses.dim() == 0 and grows(lambda part: self(model, part), batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            form = "loss(model, batch)" if self.takes_model(batch) else "loss(model(*inputs), targets)"
            message = str(error)
            raise ValueError(
                f"the loss of a batch could not be computed as {form}: {message.rstrip('.')}."
                f"{self._hint(message, batch)} The batch: {describe_batch(batch)}."
            ) from error
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
        if is_sum:
            raise ValueError(
                f"`{self.name}` returns one number that grows with the batch size: it looks like a sum, but would be "
                "taken as the mean loss. Return the mean, or the per-example losses."
            )
        return losses

    def _hint(self, message: str, batch: Batch) -> str:
        """What to do about an error of torch."""
        takes_model = self.takes_model(batch)
        if not takes_model and ("not callable" in message or "has no attribute" in message):
            return " If the loss is a function of model and batch, call its first argument `model`."
        if "target" in message and ("Long" in message or "Byte" in message):
            return " Class labels must be int64, for example targets.long(). (Or are inputs and targets swapped?)"
        if "Target size" in message:
            return " For one output, targets[:, None] has the shape (batch, 1)."
        if "between 0 and 1" in message and likelihood_of(self._function).name == "bernoulli_probabilities":
            return " For logits, use F.binary_cross_entropy_with_logits."
        if "required positional argument" in message:
            return " A loss is called as loss(outputs, targets): wrap it in a function of these two."
        if "dtype" in message or "scalar type" in message or "Input type" in message:
            return " Convert the data to the dtype of the weights, for example x.float()."
        if takes_model and self._first not in _MODEL_NAMES:
            return " For a loss of outputs and targets, the data must be (inputs, targets)."
        return ""

    def _check_outputs(self, model: nn.Module, batch: Batch, losses: Tensor, warned: Sequence[str]) -> None:
        """Refuse losses with an unintended meaning: broadcast values, or logits in place of log probabilities."""
        if broadcast := next((words for words in warned if "Using a target size" in words), None):
            sizes = ["(" + shape.strip("[]") + ")" for shape in re.findall(r"\[[^]]*\]", broadcast)[:2]]
            raise ValueError(
                f"`{self.name}` compared outputs and targets of different shapes"
                + (f", {sizes[1]} and {sizes[0]}" if len(sizes) == 2 else "")
                + ": a target would count for several outputs. Give both the same shape, for example targets[:, None] for "
                "one output, or as many outputs as there are targets"
            )
        is_log = likelihood_of(self._function).name == "log_categorical"
        if self.takes_model(batch) or not isinstance(targets := batch[-1], Tensor) or not (is_log or losses.dim() == 0):
            return
        if not isinstance(outputs := model(*batch[:-1]), Tensor):
            return
        if losses.dim() == 0 and outputs.shape != targets.shape:
            with _Pairings(outputs.shape, targets.shape) as pairings:
                self._function(outputs, targets, **self._options)
            if pairings.found is not None:
                self._check_broadcast(pairings.found, outputs, targets)
        if is_log and outputs.dim() > 1:
            total = outputs.double().exp().sum(1)
            if bool(total.isfinite().all()) and bool(((total - 1).abs() > 0.05).any()):
                raise ValueError(
                    f"`{self.name}` needs log probabilities, but the probabilities of an example sum to "
                    f"{float(total.flatten()[0]):.3g}. For logits use F.cross_entropy, or end the network with "
                    "nn.LogSoftmax(1)"
                )

    def _check_targets(self, batch: Batch) -> None:
        """Binary targets must be floating point; torch reports it only in the backward pass, and less clearly."""
        if self.takes_model(batch) or not likelihood_of(self._function).name.startswith("bernoulli"):
            return
        targets = batch[-1]
        if isinstance(targets, Tensor) and not targets.is_floating_point():
            raise ValueError(
                f"`{self.name}` needs floating-point targets, for example targets.float(), got {targets.dtype}. "
                f"The batch: {describe_batch(batch)}."
            )


class _Pairings(TorchFunctionMode):
    """Finds an operation that paired every output with every target: its result is larger than either."""

    def __init__(self, outputs: torch.Size, targets: torch.Size) -> None:
        super().__init__()
        self._shapes = sorted([outputs, targets])
        self._most = max(outputs.numel(), targets.numel())
        self.found: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        shapes = [x.shape for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if isinstance(result, Tensor) and sorted(shapes) == self._shapes and result.numel() > self._most:
            self.found = result
        return result


def _refuse(function: Any, name: str) -> None:
    """Refuse losses that cannot be called with outputs and targets alone, and suggest an alternative."""
    if isinstance(function, type):
        raise TypeError(f"`loss` must be a function of outputs and targets, got the class {name}: pass {name}(...).")
    inner = _unwrapped(function)
    if inner is F.gaussian_nll_loss or isinstance(inner, nn.GaussianNLLLoss):
        raise TypeError(
            f"`{name}` takes variances besides outputs and targets. Use adammcmc.GaussianNLL(): the network then "
            "returns means and log variances side by side, (batch, 2 k) for k targets. For known noise, use GaussianNLL(0.1)."
        )


class DataExamples:
    """The training set as per-example losses (`adammcmc.Examples`), at the model's current weights."""

    def __init__(self, model: nn.Module, data: Data, loss: Loss, device: torch.device) -> None:
        self._model, self._data, self._loss, self._device = model, data, loss, device

    def __len__(self) -> int:
        return self._data.num_data

    def losses(self, indices: slice | Tensor) -> Tensor:
        return self.losses_of(self.rows(indices))

    def rows(self, indices: slice | Tensor) -> Batch:
        """The selected examples, on the model's device."""
        return to_device(self._data.fetch(indices), self._device)

    def losses_of(self, batch: Batch) -> Tensor:
        """Losses of these examples."""
        losses = self._loss(self._model, batch)
        if losses.dim() == 0:
            raise ValueError(
                f"the acceptance test needs one loss for each example, and `{self._loss.name}` returns their mean. Let it "
                'take reduction="none", or return the per-example losses.'
            )
        return losses


def grows(loss: Callable[[Batch], Tensor], batch: Batch) -> bool:
    """Whether the loss of a batch is closer to the sum than to the mean of the losses of its halves."""
    rows = num_rows(batch) // 2 * 2  # equal halves, so that the mean of their means is the mean
    if rows < 2:
        return False
    cuts = slice(rows // 2), slice(rows // 2, rows), slice(rows)
    try:
        first, second, whole = (float(torch.as_tensor(loss(part_of(batch, cut))).detach()) for cut in cuts)
    except (ValueError, RuntimeError, TypeError, IndexError):
        return False  # BatchNorm refuses a single row, for example
    total = first + second
    if rows < 8:  # small-batch statistics can change a mean by any factor, so a sum must match to rounding
        return abs(whole - total) <= 1e-3 * abs(total) < abs(whole - total / 2)
    return abs(whole - total) < abs(whole - total / 2)


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _name(function: Any) -> str:
    function = _unwrapped(function)
    return str(getattr(function, "__name__", type(function).__name__)).replace("<lambda>", "loss")


def _description(function: Any) -> str:
    if isinstance(function, functools.partial):
        return f"{_description(function.func)} with {function.args}, {sorted(function.keywords.items())}"
    if inspect.isfunction(function) or inspect.isbuiltin(function):
        return str(function.__qualname__)  # a script has another module name when imported
    text = repr(function)
    return type(function).__qualname__ if " at 0x" in text else text


def _parameters(function: Any) -> tuple[list[str], Any]:
    """Names of the parameters, and the annotation of the first."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return [], None
    parameters = list(signature.parameters.values())
    annotation = parameters[0].annotation if parameters else None
    if isinstance(annotation, str):
        with contextlib.suppress(Exception):  # an unresolvable name is kept as a string
            annotation = typing.get_type_hints(function)[parameters[0].name]
    return [p.name for p in parameters], annotation
