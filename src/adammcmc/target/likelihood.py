"""What a loss makes of a network's outputs: losses of single examples, and what the outputs mean.

The likelihood of an example is exp(-loss). Cross entropy says that outputs are logits of classes, squared error that they are
values; prediction needs to know.
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

from adammcmc.target.data import Batch, Data, describe_batch, num_rows, part_of, to_device

__all__ = ["LIKELIHOODS", "DataExamples", "GaussianNLL", "Likelihood", "Loss", "as_likelihood", "grows", "likelihood_of"]


class Likelihood(NamedTuple):
    """What the outputs of a network mean.

    `name` is "categorical" (logits of classes, along axis 1), "log_categorical" (their log probabilities), "bernoulli" (one
    logit for each output), "bernoulli_probabilities", "gaussian" (mean values with known noise, or means and log variances),
    or "values" (nothing is known).
    """

    name: str
    noise: float | None = None
    """Standard deviation of Gaussian noise; None where the network predicts it (or there is none)."""

    @property
    def has_classes(self) -> bool:
        """Whether predictions are probabilities of classes."""
        return self.name in _TO_PROBABILITIES

    def predictions(self, outputs: Tensor) -> Tensor:
        """Class probabilities, or mean values, of outputs (examples, ...)."""
        if self.has_classes:
            return _TO_PROBABILITIES[self.name](outputs)
        return self._halves(outputs)[0] if self.predicts_noise else outputs

    def variances(self, outputs: Tensor) -> Tensor | None:
        """Of the noise around the predictions; None where there is none to speak of."""
        if self.name != "gaussian":
            return None
        if self.predicts_noise:
            return self._halves(outputs)[1].exp()
        assert self.noise is not None
        return torch.full_like(outputs, self.noise**2)

    @property
    def predicts_noise(self) -> bool:
        """Whether the network returns a variance of its own beside each mean."""
        return self.name == "gaussian" and self.noise is None

    @staticmethod
    def _halves(outputs: Tensor) -> tuple[Tensor, Tensor]:
        if outputs.dim() < 2 or outputs.shape[1] % 2:
            raise ValueError(
                f"a network that predicts its noise must return means and log variances side by side, shape (batch, 2 k), got "
                f"{tuple(outputs.shape)}. For a network that returns means alone, give the noise: GaussianNLL(0.1)."
            )
        first, second = outputs.chunk(2, 1)
        return first, second


_TO_PROBABILITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "categorical": lambda outputs: outputs.softmax(1),
    "log_categorical": lambda outputs: outputs.exp(),
    "bernoulli": lambda outputs: outputs.sigmoid(),
    "bernoulli_probabilities": lambda outputs: outputs,
}
LIKELIHOODS = (*_TO_PROBABILITIES, "gaussian", "values")
_KNOWN: dict[Any, str] = {
    F.cross_entropy: "categorical",
    nn.CrossEntropyLoss: "categorical",
    F.nll_loss: "log_categorical",
    nn.NLLLoss: "log_categorical",
    F.binary_cross_entropy_with_logits: "bernoulli",
    nn.BCEWithLogitsLoss: "bernoulli",
    F.binary_cross_entropy: "bernoulli_probabilities",
    nn.BCELoss: "bernoulli_probabilities",
}


@dataclass(frozen=True)
class GaussianNLL:
    """The loss of regression: -log N(y; f(x), noise^2), for each example summed over its outputs.

        l_i = sum_k (y_ik - f_ik)^2 / (2 noise^2) + log noise + log(2 pi) / 2

    Args:
        noise: standard deviation of the noise on a target. None, the default: the network predicts it, and returns means and
            log variances side by side, (batch, 2 k) for k targets.
    """

    noise: float | None = None

    def __post_init__(self) -> None:
        if self.noise is not None and not (math.isfinite(self.noise) and self.noise > 0):
            raise ValueError(f"`noise` must be a positive standard deviation, or None, got {self.noise}.")

    @property
    def likelihood(self) -> Likelihood:
        """What it says about outputs."""
        return Likelihood("gaussian", self.noise)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean = self.likelihood.predictions(outputs)
        if mean.shape != targets.shape:
            hint = "For one target, targets[:, None] has the shape (batch, 1)."
            if self.noise is None and outputs.shape == targets.shape:
                hint = "For a network that returns means alone, give the noise: GaussianNLL(0.1)."
            raise ValueError(
                f"the network predicts means of shape {tuple(mean.shape)}, the targets have shape {tuple(targets.shape)}: they "
                f"must be equal. {hint}"
            )
        variance = self.likelihood.variances(outputs)
        assert variance is not None
        losses = (targets - mean).square() / (2 * variance) + 0.5 * torch.log(2 * math.pi * variance)
        return losses.reshape(len(losses), -1).sum(1)


def as_likelihood(given: str | Likelihood) -> Likelihood:
    """What a user calls a likelihood, checked."""
    if isinstance(given, Likelihood):
        return given
    if given not in LIKELIHOODS:
        raise ValueError(f"`likelihood` must be one of {', '.join(LIKELIHOODS)}, got {given!r}.")
    return Likelihood(given)


def likelihood_of(loss: Callable[..., Any]) -> Likelihood:
    """What a loss says about the outputs; "values" for a loss that is not known.

    Example:
        >>> likelihood_of(functools.partial(F.cross_entropy, label_smoothing=0.1)).name
        'categorical'
    """
    while isinstance(loss, functools.partial):
        loss = loss.func
    if isinstance(known := getattr(loss, "likelihood", None), Likelihood):
        return known
    for key, name in _KNOWN.items():
        if loss is key or (isinstance(key, type) and isinstance(loss, key)):
            return Likelihood(name)
    return Likelihood("values")


class Loss:
    """A user's loss as losses of single examples (or, if it gives no more, the mean) of a model and a batch.

    Args:
        function: of outputs and targets, such as `F.cross_entropy` (called with reduction="none" where it takes it): a batch is
            then (inputs, targets) or (input, input, ..., targets). Or of model and batch: its first argument is called
            "model", or is annotated as a module, or there are no targets.

    An example with several losses, (batch, k), has their mean, as reduction="mean" has.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        if not callable(function):
            raise TypeError(f"`loss` must be a function, such as torch.nn.functional.cross_entropy, got {function!r}.")
        self.name = _name(function)
        _refuse(function, self.name)
        self.num_averaged = 1
        """How many losses an example had at the last call, of which it has the mean."""
        self.description = _description(function)
        """Tells it from other losses, as far as can be seen."""
        if isinstance(function, nn.Module) and isinstance(getattr(function, "reduction", None), str):
            function = copy.copy(function)
            function.reduction = "none"  # type: ignore[assignment]
        self._function = function
        names, self._annotation = _parameters(function)
        self._first = names[0] if names else ""
        self._options = {"reduction": "none"} if "reduction" in names and not isinstance(function, nn.Module) else {}

    def takes_model(self, batch: Batch) -> bool:
        """Whether it is a function of model and batch, not of outputs and targets."""
        if self._first in ("model", "module", "net", "network") or self._is_module(self._annotation):
            return True
        return not isinstance(batch, tuple | list) or len(batch) < 2

    @staticmethod
    def _is_module(annotation: Any) -> bool:
        return (isinstance(annotation, type) and issubclass(annotation, nn.Module)) or (
            isinstance(annotation, str) and annotation.split(".")[-1] == "Module"
        )

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.takes_model(batch):
            return self._by_example(self._function(model, batch, **self._options), batch)
        *inputs, targets = batch
        outputs = model(*inputs)
        losses = self._function(outputs, targets, **self._options)
        if isinstance(losses, Tensor) and isinstance(outputs, Tensor) and isinstance(targets, Tensor):
            self._check_broadcast(losses, outputs, targets)
        return self._by_example(losses, batch)

    def _check_broadcast(self, losses: Tensor, outputs: Tensor, targets: Tensor) -> None:
        if outputs.shape != targets.shape and losses.numel() > max(outputs.numel(), targets.numel()):
            raise ValueError(
                f"`{self.name}` compared every output with every target: outputs {tuple(outputs.shape)} and targets "
                f"{tuple(targets.shape)} were broadcast to {tuple(losses.shape)}. Give the targets the shape of the outputs, "
                "for example targets[:, None]."
            )

    def _by_example(self, losses: Any, batch: Batch) -> Tensor:
        if not isinstance(losses, Tensor):
            raise TypeError(f"`{self.name}` must return a tensor, got {type(losses).__name__}.")
        self.num_averaged = 1 if losses.dim() < 2 else losses[0].numel()
        result: Tensor = losses if losses.dim() < 2 else losses.reshape(len(losses), -1).mean(1)
        if result.dim() == 1 and len(result) != num_rows(batch):
            raise ValueError(
                f"`{self.name}` returned {len(result)} losses for a batch of {num_rows(batch)} examples: it must return one "
                "for each example, or their mean."
            )
        return result

    @property
    def averaging(self) -> str:
        """What the line of the target says of an example that has several losses; empty where it has one."""
        if self.num_averaged == 1:
            return ""
        return f" | loss of an example: the mean of its {self.num_averaged} (a loss that sums them weighs all)"

    def try_out(self, model: nn.Module, batch: Batch) -> Tensor:
        """The losses of one batch; what goes wrong is said with the batch that it went wrong on. Leaves no trace."""
        buffers = [(b, b.detach().clone()) for b in model.buffers() if b.is_contiguous()]
        devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
        self._check_targets(batch)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices), warnings.catch_warnings(record=True) as said_by_torch:
                warnings.simplefilter("always")
                losses = self(model, batch)
                self._check_outputs(model, batch, losses, [str(w.message) for w in said_by_torch])
                is_sum = losses.dim() == 0 and grows(lambda part: self(model, part), batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            form = "loss(model, batch)" if self.takes_model(batch) else "loss(model(*inputs), targets)"
            hint = ""
            said = str(error)
            if "target" in said and ("Long" in said or "Byte" in said):
                hint = " Class labels must be int64, for example targets.long(). (Or are inputs and targets swapped?)"
            elif "Target size" in said:
                hint = " For one output, targets[:, None] has the shape (batch, 1)."
            elif "between 0 and 1" in said and likelihood_of(self._function).name == "bernoulli_probabilities":
                hint = " For logits, use F.binary_cross_entropy_with_logits."
            elif "required positional argument" in said:
                hint = " A loss is called as loss(outputs, targets): wrap it in a function of these two."
            elif "dtype" in said or "scalar type" in said or "Input type" in said:
                hint = " Convert the data to the dtype of the weights, for example x.float()."
            elif self.takes_model(batch) and self._first not in ("model", "module", "net", "network"):
                hint = " For a loss of outputs and targets, the data must be (inputs, targets)."
            if not self.takes_model(batch) and ("not callable" in said or "has no attribute" in said):
                hint = " If the loss is a function of model and batch, call its first argument `model`."
            raise ValueError(
                f"the loss of a batch could not be computed as {form}: {said.rstrip('.')}.{hint} "
                f"The batch: {describe_batch(batch)}."
            ) from error
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
        if is_sum:
            raise ValueError(
                f"`{self.name}` returns one number that grows with the size of the batch: it looks like a sum, and would be "
                "taken as the mean loss. Return the mean, or the losses of the examples."
            )
        return losses

    def _check_outputs(self, model: nn.Module, batch: Batch, losses: Tensor, said: Sequence[str]) -> None:
        """Refuse what gives a number that means something else: values that were broadcast, logits as log probabilities."""
        if broadcast := next((words for words in said if "Using a target size" in words), None):
            shapes = re.findall(r"\[[^]]*\]", broadcast)[:2]
            sizes = ["(" + shape.strip("[]") + ")" for shape in shapes]
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
                    f"`{self.name}` needs log probabilities, and the probabilities of an example sum to "
                    f"{float(total.flatten()[0]):.3g}. For logits use F.cross_entropy, or end the network with nn.LogSoftmax(1)"
                )

    def _check_targets(self, batch: Batch) -> None:
        """Those of yes and no must be floating; torch says so only when it differentiates, and in other words."""
        if self.takes_model(batch) or not likelihood_of(self._function).name.startswith("bernoulli"):
            return
        targets = batch[-1]
        if isinstance(targets, Tensor) and not targets.is_floating_point():
            raise ValueError(
                f"`{self.name}` needs floating-point targets, for example targets.float(), got {targets.dtype}. "
                f"The batch: {describe_batch(batch)}."
            )


class _Pairings(TorchFunctionMode):
    """Finds a result in which every output met every target: of tensors of these shapes, larger than either."""

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
    """Those that cannot be called with outputs and targets alone, with what to take instead."""
    if isinstance(function, type):
        raise TypeError(f"`loss` must be a function of outputs and targets, got the class {name}: pass {name}(...).")
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    if inner is F.gaussian_nll_loss or isinstance(inner, nn.GaussianNLLLoss):
        raise TypeError(
            f"`{name}` takes variances beside outputs and targets. Use adammcmc.GaussianNLL(): the network then returns means "
            "and log variances side by side, (batch, 2 k) for k targets. For known noise, use GaussianNLL(0.1)."
        )


class DataExamples:
    """The training set as losses of single examples (`adammcmc.Examples`), at the model's present weights."""

    def __init__(self, model: nn.Module, data: Data, loss: Loss, device: torch.device) -> None:
        self._model, self._data, self._loss, self._device = model, data, loss, device

    def __len__(self) -> int:
        return self._data.num_data

    def losses(self, indices: slice | Tensor) -> Tensor:
        return self.losses_of(self.rows(indices))

    def rows(self, indices: slice | Tensor) -> Batch:
        """The chosen examples, on the model's device."""
        return to_device(self._data.fetch(indices), self._device)

    def losses_of(self, batch: Batch) -> Tensor:
        """Losses of these examples."""
        losses = self._loss(self._model, batch)
        if losses.dim() == 0:
            raise ValueError(
                f"the acceptance test needs one loss for each example, and `{self._loss.name}` returns their mean. Let it take "
                'reduction="none", or return the losses themselves.'
            )
        return losses


def grows(loss: Callable[[Batch], Tensor], batch: Batch) -> bool:
    """Whether the loss of a batch is more like the sum than like the mean of the losses of its halves."""
    rows = num_rows(batch) // 2 * 2  # halves of one size, so that the mean of their means is the mean
    if rows < 2:
        return False
    cuts = slice(rows // 2), slice(rows // 2, rows), slice(rows)
    try:
        first, second, whole = (float(torch.as_tensor(loss(part_of(batch, cut))).detach()) for cut in cuts)
    except (ValueError, RuntimeError, TypeError, IndexError):
        return False  # BatchNorm refuses a single row, for example
    total = first + second
    if rows < 8:  # statistics of so small a batch can change a mean by any factor: a sum must be one to rounding
        return abs(whole - total) <= 1e-3 * abs(total) < abs(whole - total / 2)
    return abs(whole - total) < abs(whole - total / 2)


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).replace("<lambda>", "loss")


def _description(function: Any) -> str:
    if isinstance(function, functools.partial):
        return f"{_description(function.func)} with {function.args}, {sorted(function.keywords.items())}"
    if inspect.isfunction(function) or inspect.isbuiltin(function):
        return str(function.__qualname__)  # a script's module is another when it is imported
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
        with contextlib.suppress(Exception):  # a name that cannot be found says nothing
            annotation = typing.get_type_hints(function)[parameters[0].name]
    return [p.name for p in parameters], annotation
