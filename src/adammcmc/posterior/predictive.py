"""p(y | x) over draws, streamed in bounded memory, with many draws in one forward where they fit.

Outer loop: chunks of examples, with all draws of a chunk in memory together (quantiles need them). Inner loop: draws.
The model runs in evaluation mode, with each draw's own buffers. Its own weights and modes are left untouched.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree

from adammcmc.posterior import uncertainty
from adammcmc.samplers.progress import track
from adammcmc.target.batches import Batch, describe_batch, joined_batches, num_rows, part_of, regrouped, to_device
from adammcmc.target.data import Data, IterableData
from adammcmc.target.likelihood import Likelihood, Loss

__all__ = ["Prediction", "Probe", "log_mixture", "predict"]

_QUANTILES = (0.25, 0.5, 0.75)
_CHUNK_BYTES = 64 << 20  # predictions of all draws for one chunk of examples
_GROUP_BYTES = 64 << 20  # weights of the draws in one forward
_FORWARD_BYTES = 64 << 20  # outputs of all layers in one forward
_MOST_ROWS = 1 << 16
_PROBED = 16  # examples, and numbers
_CACHE_BYTES = 256 << 20  # largest total size of the draws for which they stay in memory between chunks

_LOCK = threading.RLock()  # the model holds a draw's weights during a forward: one thread at a time

Forward = Callable[..., Tensor]
"""model, batch -> the model's outputs, (examples, ...)"""
Loader = Callable[[], dict[str, Tensor]]
"""Loads the tensors of one draw, by name."""


@dataclass(frozen=True, repr=False)
class Prediction:
    """Predictions of the draws of a posterior. Tensors are on the host, with the examples along axis 0.

    The *prediction* of one draw is its class probabilities, or its mean values in regression.
    """

    likelihood: Likelihood
    num_draws: int
    mean: Tensor
    """Mean prediction over the draws."""
    variance: Tensor
    """Variance of the predictions over the draws (divided by their number): the uncertainty about the weights."""
    targets: Any
    """Targets of the data; None if it has none."""
    raw: Tensor | None
    """(draws, examples, ...), chain after chain, with raw=True."""
    raw_variances: Tensor | None
    """Variance of each draw's own noise, shaped as `raw`, with raw=True and known noise."""
    _columns: dict[Any, Tensor]
    """Quantiles by their q, "noise", "entropy", "expected_entropy" and "log_density", as far as they exist."""
    _compute_quantile: Callable[[float], Tensor]

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        return f"<Prediction: {self.num_draws} draws x {tuple(self.mean.shape)}, {self.likelihood.name}>"

    def quantile(self, q: float) -> Tensor:
        """Quantile of the predictions over the draws; in regression, of the mean values without target noise.

        Other q than 0.25, 0.5, 0.75 and those requested before take another pass.
        """
        if not isinstance(q, int | float) or not 0 <= q <= 1:
            raise ValueError(f"`q` must be one number between 0 and 1, got {q}.")
        if float(q) not in self._columns:
            self._columns[float(q)] = self._compute_quantile(q)
        return self._columns[float(q)]

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
        """The most probable class of the mean prediction."""
        self._check_classes("labels")
        return (self.mean > 0.5).long() if self.is_binary else self.mean.argmax(1)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the mean class probabilities, in nats: the total uncertainty about the class."""
        self._check_classes("entropy")
        return self._columns["entropy"]

    @property
    def expected_entropy(self) -> Tensor:
        """Mean entropy of the draws' class probabilities: what would remain if the weights were known (aleatoric)."""
        self._check_classes("expected_entropy")
        return self._columns["expected_entropy"]

    @property
    def mutual_information(self) -> Tensor:
        """entropy - expected_entropy: the uncertainty about the weights (epistemic)."""
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
        if "noise" not in self._columns:
            raise ValueError(
                "the noise of the targets is unknown: sample with the loss GaussianNLL(noise), or let the network "
                "predict it with GaussianNLL(None)."
            )
        return self._columns["noise"]

    @property
    def total_variance(self) -> Tensor:
        """Variance of a new target, aleatoric + epistemic (regression)."""
        if self.likelihood.has_classes:
            raise ValueError("`total_variance` is for regression; for classes use `entropy`.")
        return self.aleatoric + self.epistemic

    def log_density(self, targets: Tensor | None = None) -> Tensor:
        """log p(targets), (examples,), float64, of the mixture of the draws: log mean_d N(targets; mean_d, variance_d).

        For regression with known noise; the outputs of an example are taken together. Targets other than those of the
        data need raw=True.
        """
        targets = self.targets if targets is None else targets
        if "log_density" in self._columns and self.came_with(targets):
            return self._columns["log_density"]
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
        """Whether each prediction is the probability of one class out of two."""
        return self.likelihood.name.startswith("bernoulli")

    def _check_classes(self, name: str) -> None:
        if not self.likelihood.has_classes:
            raise ValueError(
                f"`{name}` needs class probabilities, but the outputs are interpreted as '{self.likelihood.name}'. If "
                "they are logits, pass likelihood='categorical' (or 'bernoulli') to predict."
            )


def predict(
    model: nn.Module,
    loaders: Sequence[Loader],
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
    """Predictions of all draws for all examples, summarised; see `Posterior.predict`.

    `loaders` has one function for each draw, and `targets_of` returns the targets of a batch, or None.
    """
    if not loaders:
        raise ValueError("there are no draws to predict with.")
    for q in quantiles:
        if not 0 <= q <= 1:
            raise ValueError(f"`quantiles` must lie between 0 and 1, got {q}.")
    wanted = sorted({*_QUANTILES, *map(float, quantiles)})
    engine = _Engine(_Evaluator(model, forward), loaders, data, likelihood, batch_size)
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
    predictions_of_draws = joined.get("raw")

    def compute_quantile(q: float) -> Tensor:
        if predictions_of_draws is not None:
            return uncertainty.quantile(predictions_of_draws, q)
        chunks = engine.chunks(progress)
        return torch.cat([uncertainty.quantile(predictions, q).cpu() for predictions, _, _ in chunks])

    return Prediction(
        likelihood,
        len(loaders),
        joined.pop("mean"),
        joined.pop("variance"),
        None if targets[0] is None else joined_batches(targets),
        joined.pop("raw", None),
        joined.pop("raw_variances", _known_variances(likelihood, predictions_of_draws)),
        joined,
        compute_quantile,
    )


def log_mixture(means: Tensor, variances: Tensor, targets: Tensor) -> Tensor:
    """log mean_d prod_k N(y_k; mean_dk, variance_dk) over the outputs k of each example, (examples,), float64.

    Args:
        means: (draws, examples, ...).
        variances: the same, each draw's own.
        targets: y, (examples, ...).

    Example:
        >>> log_mixture(torch.tensor([[[0.0]], [[2.0]]]), torch.ones(2, 1, 1), torch.tensor([[1.0]])).tolist()
        [-1.4189385332046727]
    """
    y, rows = targets.double(), []
    for mean, variance in zip(means, variances, strict=True):  # one draw at a time in float64
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
        total += draw  # one draw at a time in float64
    return (total / len(predictions)).to(predictions.dtype)


def _known_variances(likelihood: Likelihood, predictions: Tensor | None) -> Tensor | None:
    """Shaped as the predictions, in the memory of one number; None if the noise is unknown."""
    if predictions is None or likelihood.name != "gaussian" or likelihood.noise is None:
        return None
    return predictions.new_full((), likelihood.noise**2).expand_as(predictions)


class _Evaluator(nn.Module):
    """A function of model and batch, evaluated with the tensors of draws in place of the model's own.

    The model's tensors stay untouched. Buffers are copied, so that what a forward writes to them is discarded.
    """

    def __init__(self, model: nn.Module, function: Forward) -> None:
        super().__init__()
        self.model, self._function, self.can_stack = model, function, True

    def forward(self, batch: Batch) -> Tensor:
        return self._function(self.model, batch)

    def one(self, tensors: Mapping[str, Tensor], batch: Batch) -> Any:
        """Outputs of one draw."""
        return functional_call(self, self._own(tensors), (batch,))

    def each(self, stacked: Mapping[str, Tensor], batch: Batch) -> Iterable[Any]:
        """Outputs of several draws, tensors (draws, ...), in one forward if the model allows it, else one by one."""
        number = len(next(iter(stacked.values())))
        if self.can_stack:
            try:
                outputs: Tensor = vmap(lambda own: functional_call(self, own, (batch,)))(self._own(stacked, number))
                return outputs
            except (RuntimeError, ValueError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                self.can_stack = False  # data-dependent control flow, in-place operations or random numbers
        return [self.one({name: x[i] for name, x in stacked.items()}, batch) for i in range(number)]

    def _own(self, tensors: Mapping[str, Tensor], number: int | None = None) -> dict[str, Tensor]:
        """Each tensor once, also if tied, under its name in this module; the model's buffers where a draw has none."""
        own = {name: tensors[name] for name, _ in self.model.named_parameters() if name in tensors}
        for name, buffer in self.model.named_buffers():
            kept = tensors.get(name)
            if kept is None:
                kept = buffer if number is None else buffer.expand(number, *buffer.shape)
            own[name] = kept.clone()
        return {f"model.{name}": x.detach() for name, x in own.items()}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """In evaluation mode and without gradients inside; each module in its own mode afterwards."""
        with _LOCK, torch.no_grad():
            modes = [(module, module.training) for module in self.model.modules()]
            self.model.eval()
            try:
                yield
            finally:
                for module, training in modes:
                    module.training = training


class Probe:
    """Up to 16 predictions at training examples, recorded with each draw: the ESS of U alone overstates theirs.

    They are those of `predict` if the loss takes outputs and targets, otherwise the per-example losses. Weights,
    buffers, modes and random-number generators are left unchanged.
    """

    def __init__(self, model: nn.Module, batch: Batch, examples: slice, loss: Loss, likelihood: Likelihood) -> None:
        self._batch = part_of(batch, examples)
        takes_model = loss.takes_model(batch)
        rows = num_rows(self._batch)

        def values(model: nn.Module, batch: Batch) -> Tensor:
            found = loss(model, batch) if takes_model else likelihood.predictions(model(*batch[:-1]))
            if found.dim() == 0 or len(found) != rows:
                raise ValueError("there is no number for each example.")
            flat = found.flatten()
            number = min(len(flat), _PROBED)
            return flat[torch.linspace(0, len(flat) - 1, number, device=flat.device).round().long()]

        self._evaluator = _Evaluator(model, values)

    @classmethod
    def make(cls, model: nn.Module, batch: Batch, loss: Loss, likelihood: Likelihood) -> Probe | None:
        """None if the predictions of the model cannot be computed in this way: a run must not depend on it."""
        step = max(1, num_rows(batch) // _PROBED)
        # spread over the batch; nested batches (jets of different lengths) only allow contiguous slices
        for examples in (slice(0, step * _PROBED, step), slice(_PROBED)):
            with suppress(Exception):
                probe = cls(model, batch, examples, loss, likelihood)
                probe({name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)})
                return probe
        return None

    def __call__(self, tensors: Mapping[str, Tensor]) -> list[float]:
        """For one draw, by the names of `model.state_dict()`; six digits of each number."""
        with self._undisturbed():
            return _rounded(self._evaluator.one(tensors, self._batch))

    def stacked(self, tensors: Mapping[str, Tensor]) -> list[list[float]]:
        """For one draw of every chain, tensors (chains, ...)."""
        with self._undisturbed():
            values = torch.stack(list(self._evaluator.each(tensors, self._batch)))
            return [_rounded(row) for row in values.cpu()]

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        device = next(self._evaluator.model.parameters()).device
        # a forward may be random in evaluation mode as well
        with torch.random.fork_rng([device] if device.type == "cuda" else []), self._evaluator.evaluating():
            yield


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


class _Engine:
    """Predictions of all draws, chunk by chunk."""

    def __init__(
        self, evaluator: _Evaluator, loaders: Sequence[Loader], data: Data, likelihood: Likelihood, batch_size: int | None
    ) -> None:
        self._evaluator, self._data, self._likelihood, self._batch_size = evaluator, data, likelihood, batch_size
        self._num_draws = len(loaders)
        model = evaluator.model
        kept = model.state_dict().keys()
        named = itertools.chain(model.named_parameters(), model.named_buffers())  # each once, also if tied
        like = {name: x.detach() for name, x in named if name in kept}

        def load(draw: int) -> dict[str, Tensor]:
            """The tensors of a draw, with the names, dtypes and devices of the model's."""
            stored = loaders[draw]()
            return {name: stored[name].to(x.device, x.dtype, non_blocking=True) for name, x in like.items()}

        self._draw_bytes = _bytes(like)
        fits = self._draw_bytes * len(loaders) <= _CACHE_BYTES
        self._load: Callable[[int], dict[str, Tensor]] = functools.cache(load) if fits else load
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def chunks(self, progress: bool) -> Iterator[tuple[Tensor, Tensor | None, Batch]]:
        """Predictions (draws, examples, ...), the variances of their noise (None: unknown), and the examples."""
        batches = self._data.in_order(1)
        first = next(batches, None)
        if first is None:
            raise ValueError("there are no examples to predict for: was a one-time iterator already consumed?")
        size = self._chunk_size(first)
        # data that can be iterated only once must not lose the batch that sized the chunks
        is_iterated = isinstance(self._data, IterableData)
        chunks = regrouped(itertools.chain([first], batches), size) if is_iterated else self._data.in_order(size)
        num_chunks = -(-self._data.num_data // size) if self._data.num_data else None
        for batch in track(chunks, "predicting", total=num_chunks, show=progress and num_chunks != 1):
            with self._evaluator.evaluating():
                predictions, variances = self._predictions(to_device(batch, self._device))
            yield predictions, variances, batch

    def _chunk_size(self, first: Batch) -> int:
        """How many examples fit with the predictions of all draws, found from one draw and one example."""
        one = part_of(to_device(first, self._device), slice(1))
        with self._evaluator.evaluating(), _returned_bytes(self._evaluator.model) as returned:
            try:
                outputs = _checked(self._evaluator.one(self._load(0), one), 1)
            except (RuntimeError, IndexError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise ValueError(
                    f"the model could not be evaluated: {str(error).rstrip('.')}. Its input was {describe_batch(one)}, "
                    "the first example. Examples must have the format of those of the run, one per row (for one: x[None])."
                ) from error
        if self._batch_size is None:
            self._batch_size = max(1, min(_MOST_ROWS, _FORWARD_BYTES // max(1, sum(returned))))
        all_draws = _bytes(outputs) * self._num_draws  # means, and variances if the network predicts them
        return max(1, min(_CHUNK_BYTES // all_draws, 4 * _CHUNK_BYTES // max(1, _bytes(one))))

    def _predictions(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        n, number = num_rows(batch), self._num_draws
        assert self._batch_size is not None
        rows = min(n, self._batch_size)
        # with few examples, many draws fit in one forward
        group = max(1, min(number, self._batch_size // rows, _GROUP_BYTES // max(1, self._draw_bytes)))
        predictions: Tensor | None = None
        variances: Tensor | None = None
        for first in range(0, number, group):
            draws = range(first, min(first + group, number))
            stack = self._stacked(draws) if group > 1 and self._evaluator.can_stack else None
            for start in range(0, n, rows):
                part = part_of(batch, slice(start, start + rows))
                one_by_one = (self._evaluator.one(self._load(d), part) for d in draws)
                outputs = one_by_one if stack is None else self._evaluator.each(stack, part)
                for d, output in zip(draws, outputs, strict=True):
                    found = _checked(output, num_rows(part))
                    values = self._likelihood.predictions(found)
                    if predictions is None:
                        predictions = values.new_empty(number, n, *values.shape[1:])
                    predictions[d, start : start + len(values)] = values
                    if self._likelihood.predicts_noise:
                        variances = torch.empty_like(predictions) if variances is None else variances
                        own = self._likelihood.variances(found)
                        assert own is not None
                        variances[d, start : start + len(own)] = own
        assert predictions is not None
        return predictions, variances if variances is not None else _known_variances(self._likelihood, predictions)

    def _stacked(self, draws: range) -> dict[str, Tensor]:
        """Several draws along a new first axis."""
        parts = [self._load(draw) for draw in draws]
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def _checked(outputs: Any, rows: int) -> Tensor:
    if not isinstance(outputs, Tensor) or outputs.dim() == 0 or len(outputs) != rows:
        what = f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise TypeError(
            f"the model must return one tensor with one row for each of the {rows} examples, got {what}. Pass "
            "`forward`, a function of model and batch that returns the outputs."
        )
    return outputs if outputs.is_floating_point() else outputs.float()


def _bytes(tensors: Any) -> int:
    """Of all tensors in a structure."""
    return sum(x.numel() * x.element_size() for x in _pytree.tree_leaves(tensors) if isinstance(x, Tensor))


@contextmanager
def _returned_bytes(model: nn.Module) -> Iterator[list[int]]:
    """Collects the size of what each layer returns, in bytes."""
    sizes: list[int] = []

    def after(module: nn.Module, args: Any, outputs: Any) -> None:
        sizes.append(_bytes(outputs))

    hooks = [module.register_forward_hook(after) for module in model.modules()]
    try:
        yield sizes
    finally:
        for hook in hooks:
            hook.remove()
