"""p(y | x) over draws: streams over examples and draws in bounded memory, many draws in one forward where they fit.

Outer loop: chunks of examples, so that all draws of a chunk are in memory together (quantiles need them). Inner loop: draws.
The model is in evaluation mode, with each draw's own buffers; its own weights and modes are not touched.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree

from adammcmc.posterior import uncertainty
from adammcmc.samplers.progress import track
from adammcmc.target.data import (
    Batch,
    Data,
    IterableData,
    describe_batch,
    joined_batches,
    num_rows,
    part_of,
    regrouped,
    to_device,
)
from adammcmc.target.likelihood import Likelihood, Loss

__all__ = ["Prediction", "Probe", "log_mixture", "predict"]

_QUANTILES = (0.25, 0.5, 0.75)
_CHUNK_BYTES = 64 << 20  # predictions of all draws for one chunk of examples
_GROUP_BYTES = 64 << 20  # weights of the draws in one forward
_FORWARD_BYTES = 64 << 20  # what the layers of one forward return
_MOST_ROWS = 1 << 16
_PROBED = 16  # examples, and numbers
_CACHE_BYTES = 256 << 20  # weights of all draws, if they are to stay in memory between chunks

_LOCK = threading.RLock()  # a draw's weights stand in the model while it is asked: one thread at a time

Forward = Callable[..., Tensor]
"""model, batch -> the model's answer, (examples, ...)"""


@dataclass(frozen=True, repr=False)
class Prediction:
    """What the draws of a posterior predict for some examples. Tensors are on the host, with the examples along axis 0.

    A *prediction* is the vector of class probabilities of one draw, or its mean values in regression.
    """

    likelihood: Likelihood
    num_draws: int
    mean: Tensor
    """Mean prediction over the draws."""
    variance: Tensor
    """Of the predictions over the draws: what the weights do not know (divided by the number of draws)."""
    targets: Any
    """Those of the data, if they had any; None otherwise."""
    raw: Tensor | None
    """(draws, examples, ...), chain after chain, if it was asked for."""
    _quantiles: dict[float, Tensor] = field(repr=False)
    _again: Callable[[float], Tensor] = field(repr=False)
    _noise: Tensor | None = field(repr=False)
    _entropy: Tensor | None = field(repr=False)
    _expected_entropy: Tensor | None = field(repr=False)
    raw_variances: Tensor | None = None
    """Variance of each draw's own noise, of the shape of `raw`, where `raw` is kept and the noise is known."""
    _log_density: Tensor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        return f"<Prediction: {self.num_draws} draws x {tuple(self.mean.shape)}, {self.likelihood.name}>"

    def quantile(self, q: float) -> Tensor:
        """Of the predictions over the draws. Other q than 0.25, 0.5, 0.75 (and those asked for) take another pass.

        In regression this is the quantile of the mean values: the noise of the targets is not in it.
        """
        if not isinstance(q, int | float) or not 0 <= q <= 1:
            raise ValueError(f"`q` must be one number between 0 and 1, got {q}.")
        if q not in self._quantiles:
            self._quantiles[q] = self._again(q)
        return self._quantiles[q]

    @property
    def median(self) -> Tensor:
        return self.quantile(0.5)

    @property
    def spread(self) -> Tensor:
        """75% - 25% quantile of the predictions: the paper's measure of uncertainty."""
        return self.quantile(0.75) - self.quantile(0.25)

    @property
    def std(self) -> Tensor:
        """Square root of `variance`."""
        return self.variance.sqrt()

    @property
    def labels(self) -> Tensor:
        """The most probable class by the mean prediction."""
        self._check_classes("labels")
        return (self.mean > 0.5).long() if self.is_binary else self.mean.argmax(1)

    @property
    def entropy(self) -> Tensor:
        """Of the mean class probabilities, in nats: all uncertainty about the class."""
        self._check_classes("entropy")
        assert self._entropy is not None
        return self._entropy

    @property
    def expected_entropy(self) -> Tensor:
        """Mean entropy of the draws' class probabilities: what is left if the weights were known (aleatoric)."""
        self._check_classes("expected_entropy")
        assert self._expected_entropy is not None
        return self._expected_entropy

    @property
    def mutual_information(self) -> Tensor:
        """entropy - expected_entropy: what the weights do not know (epistemic)."""
        return (self.entropy - self.expected_entropy).clamp_min(0)

    @property
    def epistemic(self) -> Tensor:
        """Regression: the variance of the mean values over the draws. Classes: the mutual information."""
        return self.mutual_information if self.likelihood.has_classes else self.variance

    @property
    def aleatoric(self) -> Tensor:
        """Regression: the mean variance of the noise. Classes: the expected entropy."""
        if self.likelihood.has_classes:
            return self.expected_entropy
        if self._noise is None:
            raise ValueError(
                "the noise of the targets is not known: sample with the loss GaussianNLL(noise), or let the network predict it "
                "with GaussianNLL(None)."
            )
        return self._noise

    @property
    def total_variance(self) -> Tensor:
        """Of a new target: aleatoric + epistemic (regression)."""
        if self.likelihood.has_classes:
            raise ValueError("`total_variance` is of regression; for classes take `entropy`.")
        return self.aleatoric + self.epistemic

    def log_density(self, targets: Tensor | None = None) -> Tensor:
        """log p(targets), (examples,), float64, of the mixture of the draws: log mean_d N(targets; mean_d, variance_d).

        The outputs of an example are taken together, in regression with known noise. For other targets than those of the data,
        predict with raw=True.
        """
        targets = self.targets if targets is None else targets
        if self._log_density is not None and self.came_with(targets):
            return self._log_density
        if self.likelihood.has_classes or not isinstance(targets, Tensor):
            raise ValueError("`log_density` needs a regression model and its targets: predict((inputs, targets)).")
        if self.raw is None or self.raw_variances is None:
            raise ValueError(
                "`log_density` needs the noise of the targets (the loss GaussianNLL) and the targets with the data, as "
                "predict((inputs, targets)), or the predictions of every draw, as predict(inputs, raw=True)."
            )
        return log_mixture(self.raw, self.raw_variances, targets.cpu())

    def came_with(self, targets: Any) -> bool:
        """Whether these are the targets of the data."""
        own = self.targets
        if not isinstance(own, Tensor) or not isinstance(targets, Tensor):
            return False
        return targets is own or (targets.dtype == own.dtype and torch.equal(targets.cpu(), own))

    @property
    def is_binary(self) -> bool:
        return self.likelihood.name.startswith("bernoulli")

    def _check_classes(self, name: str) -> None:
        if not self.likelihood.has_classes:
            raise ValueError(
                f"`{name}` needs class probabilities, and the outputs are taken as '{self.likelihood.name}'. If they are "
                "logits, pass likelihood='categorical' (or 'bernoulli') to predict."
            )


class Weights:
    """The weights of the draws, as they come: loaded for each chunk, or kept if they are few.

    Args:
        loaders: one function for each draw, that returns its tensors by name.
        like: names, dtypes and places that the model wants.
        buffers: which of them are buffers, that a forward might write to.
        others: buffers that no draw has.
    """

    def __init__(
        self,
        loaders: Sequence[Callable[[], dict[str, Tensor]]],
        like: dict[str, Tensor],
        buffers: set[str],
        others: dict[str, Tensor],
    ) -> None:
        self._loaders, self._like, self._buffers, self._others = loaders, like, buffers, others
        self.size = sum(x.numel() * x.element_size() for x in like.values())
        self._cache: dict[int, dict[str, Tensor]] | None = {} if self.size * len(loaders) <= _CACHE_BYTES else None

    def __len__(self) -> int:
        return len(self._loaders)

    def __getitem__(self, draw: int) -> dict[str, Tensor]:
        if self._cache is not None and draw in self._cache:
            return self._cache[draw]
        stored = self._loaders[draw]()
        tensors = {name: stored[name].to(x.device, x.dtype, non_blocking=True) for name, x in self._like.items()}
        if self._cache is not None:
            self._cache[draw] = tensors
        return tensors

    def stacked(self, draws: range) -> dict[str, Tensor]:
        """Several draws along a new first axis."""
        parts = [self[i] for i in draws]
        return {name: torch.stack([part[name] for part in parts]) for name in self._like}

    def for_one_forward(self, weights: dict[str, Tensor], num_stacked: int | None = None) -> dict[str, Tensor]:
        """With buffers of its own, so that what a forward writes to them stays there."""
        own = {name: weights[name].clone() for name in self._buffers}
        others = {
            name: x.clone() if num_stacked is None else x.expand(num_stacked, *x.shape).clone()
            for name, x in self._others.items()
        }
        return {**weights, **own, **others}


def predict(
    model: nn.Module,
    loaders: Sequence[Callable[[], dict[str, Tensor]]],
    data: Data,
    *,
    likelihood: Likelihood,
    forward: Forward,
    targets_of: Callable[[Batch], Any],
    batch_size: int | None = None,
    quantiles: Sequence[float] = (),
    raw: bool = False,
    progress: bool = True,
) -> Prediction:
    """Predictions of all draws for all examples, summarised.

    Args:
        model: whose weights are replaced by the draws', by name.
        loaders: one function for each draw.
        data: what to predict for.
        likelihood: what the outputs mean.
        forward: the model's outputs for a batch.
        targets_of: the targets of a batch, to go with the predictions; None where there are none.
        batch_size: examples times draws in one forward; None goes by how much the layers return for one example.
        quantiles: besides 0.25, 0.5 and 0.75.
        raw: also keep all predictions, (draws, examples, ...).
        progress: show a bar if standard error is a terminal.
    """
    if not loaders:
        raise ValueError("there are no draws to predict with.")
    wanted = sorted({*_QUANTILES, *(_checked_q(q) for q in quantiles)})
    engine = _Engine(model, loaders, data, likelihood, forward, batch_size)
    columns: dict[Any, list[Tensor]] = {}
    targets: list[Any] = []
    for predictions, variances, batch in engine.chunks(progress):
        parts = _summary(predictions, likelihood, wanted)
        own = targets_of(batch)
        if raw:
            parts["raw"] = predictions
        if variances is not None:
            parts["noise"] = _mean(variances)
            if raw and likelihood.predicts_noise:
                parts["raw_variances"] = variances
            if isinstance(own, Tensor) and own.shape == predictions.shape[1:]:
                parts["log_density"] = log_mixture(predictions, variances, own.to(predictions.device))
        for key, part in parts.items():
            columns.setdefault(key, []).append(part.cpu())
        targets.append(to_device(own, torch.device("cpu")))
    joined = {key: torch.cat(parts, 1 if key in ("raw", "raw_variances") else 0) for key, parts in columns.items()}

    def again(q: float) -> Tensor:
        if "raw" in joined:
            return uncertainty.quantile(joined["raw"], q)
        chunks = engine.chunks(progress)
        return torch.cat([uncertainty.quantile(predictions, q).cpu() for predictions, _, _ in chunks])

    return Prediction(
        likelihood,
        len(loaders),
        joined["mean"],
        joined["variance"],
        None if targets[0] is None else joined_batches(targets),
        joined.get("raw"),
        {q: joined[q] for q in wanted},
        again,
        joined.get("noise"),
        joined.get("entropy"),
        joined.get("expected_entropy"),
        joined.get("raw_variances", _known_variances(likelihood, joined["raw"]) if raw else None),
        joined.get("log_density"),
    )


def log_mixture(means: Tensor, variances: Tensor, targets: Tensor) -> Tensor:
    """log mean_d prod_k N(y_k; mean_dk, variance_dk) of the outputs k of each example, (examples,), float64.

    Args:
        means: (draws, examples, ...).
        variances: the same, each draw's own.
        targets: y, (examples, ...).

    Example:
        >>> log_mixture(torch.tensor([[[0.0]], [[2.0]]]), torch.ones(2, 1, 1), torch.tensor([[1.0]])).tolist()
        [-1.4189385332046727]
    """
    y, rows = targets.double(), []
    for mean, variance in zip(means, variances, strict=True):  # in float64 one draw at a time
        losses = (y - mean.double()).square() / variance.double() + torch.log(2 * math.pi * variance.double())
        rows.append(-0.5 * losses.reshape(len(y), -1).sum(1))
    return torch.stack(rows).logsumexp(0) - math.log(len(rows))


def _summary(predictions: Tensor, likelihood: Likelihood, quantiles: Sequence[float]) -> dict[Any, Tensor]:
    parts: dict[Any, Tensor] = {"mean": _mean(predictions), "variance": uncertainty.variance(predictions)}
    if likelihood.has_classes:
        is_binary = likelihood.name.startswith("bernoulli")
        parts["entropy"] = uncertainty.entropy(predictions, is_binary=is_binary)
        parts["expected_entropy"] = uncertainty.expected_entropy(predictions, is_binary=is_binary)
    ascending = predictions.sort(0).values
    return parts | {q: uncertainty.quantile_of_sorted(ascending, q) for q in quantiles}


def _mean(predictions: Tensor) -> Tensor:
    total = torch.zeros(predictions.shape[1:], dtype=torch.float64, device=predictions.device)
    for draw in predictions:
        total += draw  # in float64 one at a time, not all of them at once
    return (total / len(predictions)).to(predictions.dtype)


def _known_variances(likelihood: Likelihood, predictions: Tensor) -> Tensor | None:
    """Of the shape of the predictions, in the memory of one number; None where the noise is not known."""
    if likelihood.name != "gaussian" or likelihood.noise is None:
        return None
    return predictions.new_full((), likelihood.noise**2).expand_as(predictions)


def _checked_q(q: float) -> float:
    if not 0 <= q <= 1:
        raise ValueError(f"`quantiles` must lie between 0 and 1, got {q}.")
    return float(q)


class _Call(nn.Module):
    """A function of model and batch as a module, so that the model's weights can be replaced in a call."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, batch: Batch) -> Tensor:
        return self._forward(self.model, batch)


class Probe:
    """A few predictions at a few training examples, to be written down with each draw: U alone overstates what draws are worth.

    They are what `predict` has for a loss of outputs and targets, otherwise the losses of the examples, up to 16 numbers. It
    evaluates the tensors of a draw, in evaluation mode, and leaves weights, buffers, modes and random numbers as they are.
    """

    def __init__(self, model: nn.Module, batch: Batch, examples: slice, loss: Loss, likelihood: Likelihood) -> None:
        self._model, self._batch = model, part_of(batch, examples)
        takes_model = loss.takes_model(batch)
        rows = num_rows(self._batch)

        def values(model: nn.Module, batch: Batch) -> Tensor:
            found = loss(model, batch) if takes_model else likelihood.predictions(model(*batch[:-1]))
            if found.dim() == 0 or len(found) != rows:
                raise ValueError("there is no number for each example.")
            flat = found.flatten()
            number = min(len(flat), _PROBED)
            return flat[torch.linspace(0, len(flat) - 1, number, device=flat.device).round().long()]

        self._call = _Call(model, values)
        self._can_stack = True

    @classmethod
    def make(cls, model: nn.Module, batch: Batch, loss: Loss, likelihood: Likelihood) -> Probe | None:
        """None for a model whose predictions cannot be had in this way: a run must not depend on it."""
        step = max(1, num_rows(batch) // _PROBED)
        # spread over the batch; jets of different lengths can only be cut in one piece
        for examples in (slice(0, step * _PROBED, step), slice(_PROBED)):
            with suppress(Exception):
                probe = cls(model, batch, examples, loss, likelihood)
                probe({name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)})
                return probe
        return None

    def __call__(self, tensors: Mapping[str, Tensor]) -> list[float]:
        """Of one draw, by the names of `model.state_dict()`; six digits of each number."""
        with self._undisturbed():
            return _short(functional_call(self._call, self._own(tensors), (self._batch,)))

    def stacked(self, tensors: Mapping[str, Tensor]) -> list[list[float]]:
        """Of a draw of every chain, tensors (chains, ...)."""
        chains = len(next(iter(tensors.values())))
        if self._can_stack:
            try:
                with self._undisturbed():
                    call = vmap(lambda own: functional_call(self._call, own, (self._batch,)), randomness="different")
                    return [_short(row) for row in call(self._own(tensors, chains)).cpu()]
            except (RuntimeError, ValueError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                self._can_stack = False  # as in prediction: then one by one
        return [self({name: x[chain] for name, x in tensors.items()}) for chain in range(chains)]

    def _own(self, tensors: Mapping[str, Tensor], chains: int | None = None) -> dict[str, Tensor]:
        """Each tensor once, also if tied; buffers as copies, so that what a forward writes to them is gone."""
        own = {name: tensors[name] for name, _ in self._model.named_parameters() if name in tensors}
        for name, buffer in self._model.named_buffers():
            kept = tensors.get(name)
            if kept is None:  # no draw has it
                kept = buffer if chains is None else buffer.expand(chains, *buffer.shape)
            own[name] = kept.clone()
        return {f"model.{name}": x.detach() for name, x in own.items()}

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        device = next(self._model.parameters()).device
        before = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        try:
            with _LOCK, _evaluating(self._model), torch.no_grad():
                yield
        finally:
            if not torch.equal(torch.get_rng_state(), before[0]):  # a forward that draws them in evaluation mode as well
                torch.set_rng_state(before[0])
            if before[1] is not None and not torch.equal(torch.cuda.get_rng_state(device), before[1]):
                torch.cuda.set_rng_state(before[1], device)


def _short(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


class _Engine:
    """Outputs of all draws, chunk by chunk."""

    def __init__(
        self,
        model: nn.Module,
        loaders: Sequence[Callable[[], dict[str, Tensor]]],
        data: Data,
        likelihood: Likelihood,
        forward: Forward,
        batch_size: int | None,
    ) -> None:
        self._model, self._call = model, _Call(model, forward)
        kept = model.state_dict().keys()
        buffers = {f"model.{name}": x.detach() for name, x in model.named_buffers()}
        named = {f"model.{name}": x.detach() for name, x in model.named_parameters()} | buffers  # each once, also if tied
        like = {name: x for name, x in named.items() if name.removeprefix("model.") in kept}
        others = {name: x for name, x in buffers.items() if name not in like}
        renamed = [_with_prefix(load) for load in loaders]
        self._weights = Weights(renamed, like, set(like) & set(buffers), others)
        self._data, self._likelihood, self._batch_size = data, likelihood, batch_size
        parameter = next(model.parameters(), None)
        self._device = torch.device("cpu") if parameter is None else parameter.device
        self._can_stack = True

    def chunks(self, progress: bool) -> Iterator[tuple[Tensor, Tensor | None, Batch]]:
        """Predictions (draws, examples, ...), the variances of their noise (None: not known), and the examples."""
        batches = self._data.in_order(1)
        first = next(batches, None)
        if first is None:
            raise ValueError("there are no examples to predict for: was an iterable that can be used once used before?")
        size = self._chunk_size(first)
        # what can be iterated only once must not lose its first batch to the question how large a chunk may be
        is_iterated = isinstance(self._data, IterableData)
        chunks = regrouped(itertools.chain([first], batches), size) if is_iterated else self._data.in_order(size)
        num_chunks = -(-self._data.num_data // size) if self._data.num_data else None
        for batch in track(chunks, "predicting", total=num_chunks, show=progress and num_chunks != 1):
            yield (*self._chunk(to_device(batch, self._device)), batch)

    @torch.no_grad()
    def _chunk_size(self, first: Batch) -> int:
        """Examples whose predictions by all draws fit; found by asking one draw about one example."""
        one = part_of(to_device(first, self._device), slice(1))
        with _LOCK, _evaluating(self._model), _returned_bytes(self._model) as returned:
            weights = self._weights.for_one_forward(self._weights[0])
            try:
                outputs = self._checked(functional_call(self._call, weights, (one,)), 1)
            except (RuntimeError, IndexError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                said = str(error).rstrip(".")
                raise ValueError(
                    f"the model could not be asked: {said}. It was given: {describe_batch(one)}, the first of the examples. "
                    "They must look as those of the run did, one row for each (a single one is x[None])."
                ) from error
        if self._batch_size is None:
            self._batch_size = max(1, min(_MOST_ROWS, _FORWARD_BYTES // max(1, sum(returned))))
        per_example = outputs.numel() * outputs.element_size()  # means, and variances where the network predicts them
        inputs = sum(x.numel() * x.element_size() for x in _pytree.tree_leaves(one) if isinstance(x, Tensor))
        fits = min(_CHUNK_BYTES // (per_example * len(self._weights)), 4 * _CHUNK_BYTES // max(1, inputs))
        return max(1, fits)

    @torch.no_grad()
    def _chunk(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        with _LOCK, _evaluating(self._model):
            return self._predictions(batch)

    def _predictions(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        n = num_rows(batch)
        assert self._batch_size is not None
        rows = min(n, self._batch_size)
        # few examples leave room for many draws in one forward
        group = max(1, min(len(self._weights), self._batch_size // rows, _GROUP_BYTES // max(1, self._weights.size)))
        predictions: Tensor | None = None
        variances: Tensor | None = None
        for first in range(0, len(self._weights), group):
            draws = range(first, min(first + group, len(self._weights)))
            weights = self._weights.stacked(draws) if group > 1 and self._can_stack else None
            for start in range(0, n, rows):
                part = part_of(batch, slice(start, start + rows))
                for d, outputs in zip(draws, self._outputs(draws, weights, part), strict=True):
                    values = self._likelihood.predictions(outputs)
                    if predictions is None:
                        predictions = values.new_empty(len(self._weights), n, *values.shape[1:])
                    predictions[d, start : start + len(values)] = values
                    if self._likelihood.predicts_noise:
                        variances = torch.empty_like(predictions) if variances is None else variances
                        own = self._likelihood.variances(outputs)
                        assert own is not None
                        variances[d, start : start + len(own)] = own
        assert predictions is not None
        return predictions, variances if variances is not None else _known_variances(self._likelihood, predictions)

    def _outputs(self, draws: range, weights: dict[str, Tensor] | None, batch: Batch) -> Sequence[Tensor]:
        if weights is not None and self._can_stack:
            try:
                stacked = self._weights.for_one_forward(weights, len(draws))
                outputs = vmap(lambda w: functional_call(self._call, w, (batch,)))(stacked)
                return [self._checked(o, num_rows(batch)) for o in outputs]
            except (RuntimeError, ValueError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                # not every model can be stacked (values that steer control flow, operations in place): then one by one
                self._can_stack = False
        each = (self._weights.for_one_forward(self._weights[d]) for d in draws)
        return [self._checked(functional_call(self._call, weights, (batch,)), num_rows(batch)) for weights in each]

    def _checked(self, outputs: Any, rows: int) -> Tensor:
        if not isinstance(outputs, Tensor) or outputs.dim() == 0 or len(outputs) != rows:
            what = f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
            raise TypeError(
                f"the model must return one tensor with one row for each of the {rows} examples, got {what}. Pass `forward`, a "
                "function of model and batch, to say what is predicted."
            )
        return outputs if outputs.is_floating_point() else outputs.float()


def _with_prefix(load: Callable[[], dict[str, Tensor]]) -> Callable[[], dict[str, Tensor]]:
    return lambda: {f"model.{name}": x for name, x in load().items()}


@contextmanager
def _returned_bytes(model: nn.Module) -> Iterator[list[int]]:
    """What each layer returns inside, in bytes."""
    sizes: list[int] = []

    def after(module: nn.Module, args: Any, outputs: Any) -> None:
        sizes.extend(x.numel() * x.element_size() for x in _pytree.tree_leaves(outputs) if isinstance(x, Tensor))

    hooks = [module.register_forward_hook(after) for module in model.modules()]
    try:
        yield sizes
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode inside, each module in its own mode outside."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
