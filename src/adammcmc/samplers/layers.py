"""Layers with state, under several evaluations of one loss: dropout, BatchNorm, and any buffer that moves.

A Metropolis step evaluates one loss at two points. Both must be the same function of the weights, so

- *dropout* (any use of torch's random numbers) gets the same numbers in all evaluations of a step, hence the same mask;
- *BatchNorm* in training mode follows a stated policy. `"batch"`: statistics of the batch; its running buffers, like any
  buffer that a forward moves, move once on acceptance and are put back bit for bit on rejection. `"frozen"`: the layer runs on
  its running statistics, which stay as they are.

Running averages lag behind the weights. With fixed data a draw does not take them: its buffers are the statistics of the data
at the draw's own weights (`Layers.statistics`), so that in evaluation mode it is the function that was sampled. On minibatches
it keeps them: they average over many batches, which is worth more than the lag costs.

Which layers there are is seen by watching the modules that the closure calls; no model has to be handed over.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from adammcmc.errors import PerExampleLossRequired, StochasticClosure
from adammcmc.samplers.packing import padding_rows
from adammcmc.samplers.processes import check_module

__all__ = ["BatchNormPolicy", "ClosureReport", "GraphNumbers", "Layers", "Statistics", "check_closure"]

BatchNormPolicy = Literal["batch", "frozen"]
_T = TypeVar("_T")
_STATISTICS = ("running_mean", "running_var")
_LOW = (torch.bfloat16, torch.float16)
_FEW = 1 << 20  # numbers in buffers that are cheap to keep a copy of


@dataclass
class _Seen:
    """The modules that were called and all inside of them, with their buffers as they were before the call."""

    modules: dict[nn.Module, bool] = field(default_factory=dict)
    """Whether each was in training mode."""
    buffers: dict[tuple[nn.Module, str], Tensor] = field(default_factory=dict)
    calls: dict[nn.Module, int] = field(default_factory=dict)
    """How often each was called itself; of a compiled model only the outermost."""
    frozen: list[nn.Module] = field(default_factory=list)
    draws_numbers: bool = False
    """Whether torch's random numbers were used."""
    draws_on_host: bool = False
    """Whether those of the CPU were."""
    reduced: dict[str, None] = field(default_factory=dict)
    """Kinds of arithmetic below float32."""

    def name(self, module: nn.Module) -> str:
        """As the outermost module calls it."""
        for root in self.modules:
            for name, part in root.named_modules():
                if part is module:
                    name = name.removeprefix("_orig_mod.")
                    return f"'{name}' ({_kind(module)})" if name else _kind(module)
        return _kind(module)

    def moved(self) -> list[tuple[nn.Module, str]]:
        """The buffers that are not what they were."""
        # looks at values (and waits for the device), because BatchNorm leaves no trace in version counters
        return [key for key, before in self.buffers.items() if not _equal(_buffer(key), before)]

    def put_back(self) -> None:
        """All buffers as they were."""
        for key, before in self.buffers.items():
            _buffer(key).data.copy_(before)  # leaves no trace: who differentiates afterwards has saved the same values

    def dropouts(self) -> list[nn.Module]:
        """The dropout layers that are at work."""
        return [m for m, training in self.modules.items() if training and "Dropout" in _kind(m) and getattr(m, "p", 1) > 0]

    def batch_norms(self) -> list[nn.Module]:
        """The BatchNorm layers that use statistics of the batch: in training mode, or without running ones."""
        norms = [m for m in self.modules if _is_batch_norm(m) and m not in self.frozen]
        return [m for m in norms if self.modules[m] or getattr(m, "running_mean", None) is None]

    def kept_norms(self) -> list[_BatchNorm]:
        """Those of them that evaluation mode can reproduce: torch's own, with running statistics."""
        return [m for m in self.batch_norms() if isinstance(m, _BatchNorm) and m.running_mean is not None]

    def lost_norms(self, num_micro_batches: int) -> list[nn.Module]:
        """The layers that normalise otherwise in evaluation mode, whatever their buffers hold."""
        kept = {m for m in self.kept_norms() if self.calls.get(m, 0) <= num_micro_batches}  # one call, one pair of statistics
        instances = [m for m, training in self.modules.items() if training and isinstance(m, _InstanceNorm)]
        return [m for m in self.batch_norms() if m not in kept] + [m for m in instances if m.running_mean is not None]


@contextmanager
def _watch(policy: BatchNormPolicy, device: torch.device) -> Iterator[_Seen]:
    """Record the modules that are called inside."""
    seen = _Seen()

    def before(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # a compiled model is seen from outside
        if torch.is_autocast_enabled(device.type):  # (a module may switch it on inside)
            seen.reduced[str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")] = None
        if torch._C._current_graph_task_id() == -1:  # not recomputed in a backward pass (checkpointing)
            seen.calls[module] = seen.calls.get(module, 0) + 1
        if module in seen.modules:
            return
        for part in module.modules():
            if part in seen.modules:
                continue
            check_module(part)
            seen.reduced |= dict.fromkeys(_reduced(part, device))
            seen.modules[part] = part.training
            for key, value in part.named_buffers(recurse=False):
                seen.buffers[part, key] = value.detach().clone()
            if policy == "frozen" and _is_batch_norm(part) and part.training:
                part.training = False
                seen.frozen.append(part)

    hook = register_module_forward_pre_hook(before)
    numbers = _random_state(device)
    try:
        with warnings.catch_warnings():
            # torch's word on compiled modules: the hook fires once more. It does not mind
            warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
            yield seen
    finally:
        hook.remove()
        moved = [not torch.equal(a, b) for a, b in zip(numbers, _random_state(device), strict=True)]
        seen.draws_numbers, seen.draws_on_host = any(moved), moved[0]
        for module in seen.frozen:
            module.training = True


def _reduced(module: nn.Module, device: torch.device) -> list[str]:
    """Kinds of arithmetic below float32 that this very module computes in, as far as it shows."""
    low = [str(p.dtype).removeprefix("torch.") for p in module._parameters.values() if p is not None and p.dtype in _LOW]
    if isinstance(module, _ConvNd) and device.type == "cuda" and torch.backends.cudnn.allow_tf32:
        low.append("TF32")
    if isinstance(module, nn.Linear) and torch.get_float32_matmul_precision() != "highest":
        low.append("TF32" if device.type == "cuda" else "reduced float32")
    return low


def _kind(module: nn.Module) -> str:
    return str(getattr(module, "original_name", type(module).__name__))  # a scripted module hides its class


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) or "BatchNorm" in _kind(module)


class GraphNumbers:
    """torch's random numbers in the evaluations of a captured step: the same in all of them, others at each replay.

    Each evaluation has a generator of its own, a copy of the device's, and all are set to where that one is before a replay.

    Args:
        graph: in which they will be captured.
        device: of the numbers.
        count: evaluations in a step.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device, count: int) -> None:
        self._default = torch.cuda.default_generators[device.index or 0]
        self._copies = [self._default.clone_state() for _ in range(count)]
        self.have_moved = True
        """Whether the last replay drew any."""
        for copy in self._copies:
            graph.register_generator_state(copy)

    @contextmanager
    def evaluation(self, number: int) -> Iterator[None]:
        """Inside a capture: the numbers of this evaluation."""
        usual = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self._copies[number])
        try:
            yield
        finally:
            self._default.graphsafe_set_state(usual)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Around a replay."""
        now = self._default.get_state()
        for copy in self._copies:
            copy.set_state(now)
        before = self._copies[0].get_offset()
        yield
        after = self._copies[0].get_offset()
        self.have_moved = after != before
        self._default.set_offset(after)


class Statistics:
    """Mean and variance of each BatchNorm layer's input at one point, pooled over the batches that are evaluated inside.

    With momentum 1 a forward leaves the statistics of its own batch in the running buffers, also under vmap. torch divides the
    variance there by n - 1, where the forward itself divides by n: the number n of values in a channel is seen by a hook.

    Args:
        norms: the layers.
    """

    def __init__(self, norms: Sequence[_BatchNorm]) -> None:
        self.norms = norms
        self.keys: list[tuple[nn.Module, str]] = [(norm, name) for norm in norms for name in _STATISTICS]
        self._counts: dict[nn.Module, tuple[int, int]] = {}
        """Values in a channel, and calls, of the batch under way."""
        self._pooled: dict[nn.Module, tuple[int, Tensor, Tensor]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, forwards leave the statistics of their own batch."""
        momenta = [norm.momentum for norm in self.norms]
        hooks = [norm.register_forward_pre_hook(self._count, with_kwargs=True) for norm in self.norms]
        try:
            for norm in self.norms:
                norm.momentum = 1.0
            yield
        finally:
            for norm, momentum, hook in zip(self.norms, momenta, hooks, strict=True):
                norm.momentum = momentum
                hook.remove()

    def _count(self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        count = x.numel() // x.shape[1]
        total, calls = self._counts.get(norm, (0, 0))
        self._counts[norm] = total + count, calls + 1
        norm.momentum = count / (total + count)  # a layer that is called twice: the mean of both calls

    def add(self, read: Callable[[nn.Module, str], Tensor]) -> None:
        """Take in the batch that was just evaluated; `read` finds the buffers, which were zero before it."""
        for norm in self.norms:
            mean, var = (read(norm, name).detach().to(torch.float64, copy=True) for name in _STATISTICS)
            n, calls = self._counts.pop(norm, (0, 0))
            norm.momentum = 1.0
            if n > 0:
                var = var * ((n - calls) / n) if n > calls else torch.zeros_like(var)
            elif not bool(mean.any() | var.any()):
                continue  # not called with this batch
            n = max(n, 1)  # a network that normalises by a kernel of its own: many values, equal batches
            before, m, v = self._pooled.get(norm, (0, torch.zeros_like(mean), torch.zeros_like(var)))
            share, off = n / (before + n), mean - m
            self._pooled[norm] = before + n, m + off * share, v + (var - v) * share + off.square() * (share * (1 - share))

    def values(self) -> dict[tuple[nn.Module, str], Tensor]:
        """What the running buffers of a draw must hold."""
        found = [(norm, *pair) for norm, (_, *both) in self._pooled.items() for pair in zip(_STATISTICS, both, strict=True)]
        return {(norm, name): x.to(_buffer((norm, name)).dtype) for norm, name, x in found}


class Layers:
    """The stateful layers of a sampler's closure, through its steps.

    Args:
        policy: what BatchNorm in training mode does.
        device: where the model is, whose random numbers count as well.
    """

    def __init__(self, policy: BatchNormPolicy, device: torch.device) -> None:
        if policy not in ("batch", "frozen"):
            raise ValueError(f"`batch_norm` must be 'batch' or 'frozen', got {policy!r}.")
        self.policy = policy
        self._device = device
        self._seen: _Seen | None = None
        self._moving: list[tuple[nn.Module, str]] = []
        self._left: list[Tensor] = []
        self._must_check_examples = True
        self._backup: list[Tensor] = []
        self._numbers: list[Tensor] = []
        self._num_evaluations = 0
        self._is_captured = False
        self._graph_numbers: GraphNumbers | None = None
        self._called: dict[nn.Module, None] = {}
        self.padding: dict[int, frozenset[int]] = {}
        """By the identity of a weight, its padding rows, as far as modules were seen (`packing.padding_rows`)."""

    @property
    def reduced(self) -> list[str]:
        """Kinds of arithmetic below float32 in the loss, such as "bfloat16", as far as modules show them."""
        return [] if self._seen is None else list(self._seen.reduced)

    def _meet(self, modules: Iterable[nn.Module]) -> None:
        """Modules that the loss calls."""
        if fresh := dict.fromkeys(module for module in modules if module not in self._called):
            self._called |= fresh
            self.padding = padding_rows(self._called)

    @property
    def draws_on_host(self) -> bool:
        """Whether the loss uses random numbers of the CPU, which no graph can replay."""
        return self._seen is not None and self._seen.draws_on_host

    def graph_numbers(self, graph: torch.cuda.CUDAGraph, most: int = 0) -> GraphNumbers:
        """The random numbers of a step like the last one, for capture. `most`: evaluations at least."""
        return GraphNumbers(graph, self._device, max(self._num_evaluations, most))

    @contextmanager
    def captured(self, numbers: GraphNumbers | None) -> Iterator[None]:
        """The evaluations inside are captured: nothing may look at a value."""
        self._is_captured, self._graph_numbers = True, numbers
        try:
            yield
        finally:
            self._is_captured, self._graph_numbers = False, None

    def begin(self) -> None:
        """A new step: what is there now is what a rejection returns to."""
        self._num_evaluations = 0
        if not self.are_modes_as_left():
            self._seen = None  # someone called train() or eval(): look again
        self._backup = [_buffer(key).detach().clone() for key in self._moving]

    @contextmanager
    def evaluation(self, *, same_numbers: bool = True) -> Iterator[None]:
        """One evaluation of the closure: with the random numbers and the buffers of the step's first one."""
        if self._num_evaluations > 0:
            self._put_back()
        self._num_evaluations += 1
        if self._is_captured:
            numbers = self._graph_numbers
            with nullcontext() if numbers is None else numbers.evaluation(self._num_evaluations - 1), self._modes():
                yield
            return
        if self._num_evaluations == 1 or not same_numbers:
            self._numbers = self._numbers if not same_numbers else _random_state(self._device)
            with self._modes():
                yield
            return
        later = _random_state(self._device)
        _set_random_state(self._numbers, self._device)
        try:
            with self._modes():
                yield
        finally:
            _set_random_state(later, self._device)

    def look(self, evaluate: Callable[[], _T]) -> _T:
        """Learn which layers there are from one evaluation, of which nothing stays: no buffer, no random number."""
        before = _random_state(self._device)
        self.begin()
        try:
            with self.evaluation():
                return evaluate()
        finally:
            self.abort()
            _set_random_state(before, self._device)

    @property
    def draws_numbers(self) -> bool:
        """Whether the loss uses torch's random numbers, as far as it was looked at."""
        return self._seen is not None and self._seen.draws_numbers

    def modes(self) -> AbstractContextManager[None]:
        """The modes of an evaluation, without its buffers and random numbers: BatchNorm that is frozen runs as such inside."""
        return self._modes()

    @contextmanager
    def same_numbers(self, numbers: list[Tensor]) -> Iterator[None]:
        """The same random numbers in all evaluations that share this list, which is empty before the first."""
        if not self.draws_numbers and not self._is_captured:
            yield
            return
        if self._is_captured:
            assert self._graph_numbers is not None
            number = len(numbers)
            numbers.append(torch.empty(0))  # one more evaluation
            with self._graph_numbers.evaluation(number):
                yield
            return
        if not numbers:
            numbers.extend(_random_state(self._device))
            yield
            return
        later = _random_state(self._device)
        _set_random_state(numbers, self._device)
        try:
            yield
        finally:
            _set_random_state(later, self._device)

    @contextmanager
    def _modes(self) -> Iterator[None]:
        torch.clear_autocast_cache()  # under a caller's autocast it would hand out the weights of the last evaluation
        if self._seen is None:
            with _watch(self.policy, self._device) as seen:
                try:
                    yield
                except BaseException:
                    seen.put_back()
                    raise
            self._learn(seen)
            return
        for module in self._seen.frozen:
            module.training = False
        try:
            yield
        finally:
            for module in self._seen.frozen:
                module.training = True

    def _learn(self, seen: _Seen) -> None:
        for module in seen.frozen:
            _check_has_statistics(module, seen)
        self._seen = seen
        self._meet(seen.modules)
        if sum(b.numel() for b in seen.buffers.values()) <= _FEW:
            self._moving = list(seen.buffers)  # also what rests now and may move later
        else:
            moving = {module for module, _ in seen.moved()} | set(seen.batch_norms())
            self._moving = [key for key in seen.buffers if key[0] in moving]
        self._backup = [seen.buffers[key] for key in self._moving]
        seen.buffers.clear()

    def graph_key(self) -> tuple[Any, ...]:
        """What of the layers is written into a CUDA graph: their modes, a caller's autocast, and where their buffers are."""
        if self._seen is None:
            return ()
        modes = tuple(module.training for module in self._seen.modules)
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return modes, autocast, tuple(_buffer(key).data_ptr() for key in self._moving)

    def are_modes_as_left(self) -> bool:
        """Whether all modules are in the mode, training or not, in which they were first seen."""
        return self._seen is None or all(module.training == training for module, training in self._seen.modules.items())

    def are_buffers_as_left(self) -> bool:
        """Whether nobody moved the buffers since the last step (looked at on the CPU only)."""
        if self._device.type != "cpu" or len(self._left) != len(self._moving):
            return True
        return all(_equal(_buffer(key), left) for key, left in zip(self._moving, self._left, strict=True))

    def _put_back(self) -> None:
        for key, before in zip(self._moving, self._backup, strict=True):
            _buffer(key).copy_(before)

    def end(self, is_accepted: Tensor) -> None:
        """Buffers stay as the last evaluation left them if it was accepted, and else return to what they were."""
        if not self._moving:
            return
        if is_accepted.device.type == "cpu":
            if not bool(is_accepted):
                self._put_back()
            self._left = [_buffer(key).detach().clone() for key in self._moving]
            return
        for key, before in zip(self._moving, self._backup, strict=True):
            now = _buffer(key)
            now.copy_(torch.where(is_accepted.reshape(()), now, before))

    def abort(self) -> None:
        """An error: nothing of this step stays."""
        self._put_back()

    # --- what belongs to a draw -------------------------------------------------------------------------------------

    @property
    def has_statistics(self) -> bool:
        """Whether there are layers whose statistics are taken anew at a draw."""
        return self._seen is not None and bool(self._seen.kept_norms())

    @contextmanager
    def statistics(self) -> Iterator[Statistics]:
        """Evaluations inside find the statistics of a draw. Modes are those of the chain; no random number is used up."""
        assert self._seen is not None
        found = Statistics(self._seen.kept_norms())
        modes = [(module, module.training) for module in self._seen.modules]
        numbers = _random_state(self._device)
        try:
            for module, training in self._seen.modules.items():
                module.training = training  # a validation in between may have left evaluation mode
            with self._modes(), found.watched(), _not_compiled():
                yield found
        finally:
            for module, training in modes:
                module.training = training
            _set_random_state(numbers, self._device)

    def fresh_statistics(self, evaluations: Sequence[Callable[[], object]]) -> dict[int, Tensor]:
        """What a draw at the present weights has in the place of running buffers, by the identity of the buffer.

        The buffers themselves, which belong to the chain, stay as they are.
        """
        if not self.has_statistics:
            return {}
        before = [_buffer(key).detach().clone() for key in self._moving]
        with self.statistics() as found:
            for evaluate in evaluations:
                try:
                    for key in found.keys:
                        _buffer(key).zero_()
                    evaluate()
                    found.add(lambda norm, name: _buffer((norm, name)))
                finally:
                    for moving, value in zip(self._moving, before, strict=True):
                        _buffer(moving).copy_(value)
        return {id(_buffer(key)): value for key, value in found.values().items()}

    # --- what is said of them ---------------------------------------------------------------------------------------

    def at_fault(self) -> str:
        """The layers that make two calls differ, by name; empty if there are none."""
        seen = self._seen
        if seen is None:
            return ""
        layers = ", ".join(seen.name(m) for m in seen.dropouts())
        return layers or ("the loss draws random numbers" if seen.draws_numbers else "")

    def describe(self, *, fixed_data: bool) -> list[str]:
        """What stateful layers do, in a few words each; known after the first step."""
        if self._seen is None:
            return []
        words = []
        if self._seen.batch_norms():
            how = ", recomputed for each draw" if fixed_data else ", running averages in the draws"
            words.append(f"BatchNorm: batch statistics{how if self._seen.kept_norms() else ''}")
        if self._seen.frozen:
            words.append("BatchNorm: frozen statistics")
        if self._seen.dropouts():
            words.append("dropout: one mask for both sides of a step")
        elif self._seen.draws_numbers:
            words.append("random numbers in the loss: the same on both sides of a step")
        return words

    def approximations(self, *, fixed_data: bool, num_micro_batches: int = 1) -> list[str]:
        """Why the loss is not a fixed sum over the examples, or why evaluation mode is another function."""
        if self._seen is None:
            return []
        reasons = []
        if not fixed_data:
            reasons = ["dropout draws a new mask at each step"] if self._seen.dropouts() else []
            if self._seen.draws_numbers and not reasons:
                reasons = ["the loss draws new random numbers at each step"]
        if self._seen.batch_norms() and (not fixed_data or num_micro_batches > 1):
            batch = "batch" if not fixed_data else "micro-batch"
            reasons.append(f"batch statistics tie the loss of an example to its {batch}")
        if lost := [self._seen.name(m) for m in self._seen.lost_norms(max(1, num_micro_batches))]:
            reasons.append(f"predictions use other statistics than the chain in {', '.join(lost)}")
        return reasons

    def scaled_away(self) -> set[int]:
        """Identities of the weights right before a BatchNorm with batch statistics, whose length has no influence."""
        modules = list(self._seen.modules) if self._seen is not None else []
        norms = set(self._seen.batch_norms()) if self._seen is not None else set()
        pairs = itertools.pairwise(modules)
        return {id(p) for module, after in pairs if after in norms for p in module._parameters.values() if p is not None}

    def example_losses(self, evaluate: Callable[[slice | Tensor], Tensor], indices: slice | Tensor) -> Tensor:
        """Losses of single examples: they exist only if no layer looks at the batch or draws random numbers."""
        if self._is_captured:  # all was looked at in the steps before
            with self._modes():
                return evaluate(indices)
        with _watch(self.policy, self._device) as seen:
            losses = evaluate(indices)
            halves = self._halves(evaluate, indices, len(losses))
        seen.put_back()
        self._meet(seen.modules)
        if layers := [seen.name(m) for m in seen.batch_norms()]:
            raise PerExampleLossRequired(
                f"the loss of a single example does not exist: {', '.join(layers)} uses the statistics of its batch. Set "
                "batch_norm='frozen' in the sampler, or call model.eval(). In `sample` you can also leave out the batch size: "
                "on all data, batch statistics are exact."
            )
        if seen.dropouts() or seen.draws_numbers:
            layers = [seen.name(m) for m in seen.dropouts()]
            raise StochasticClosure(
                "the acceptance test stores per-example losses, so they must be a function of the weights alone, but the "
                f"loss draws random numbers{': ' + ', '.join(layers) if layers else ''}. Call model.eval()."
            )
        if halves is not None and not torch.allclose(losses, halves, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise PerExampleLossRequired(
                "the loss of an example depends on the examples that it is evaluated with (statistics of the batch?): the "
                "losses of a chunk differ from those of its halves."
            )
        return losses

    def _halves(self, evaluate: Callable[[slice | Tensor], Tensor], indices: slice | Tensor, count: int) -> Tensor | None:
        """The same losses, evaluated in two parts, once in a run; None later."""
        if not self._must_check_examples or count < 2:
            return None
        self._must_check_examples = False
        if isinstance(indices, Tensor):
            return torch.cat([evaluate(part) for part in indices.tensor_split(2)])
        first = indices.start or 0
        middle = first + count // 2
        return torch.cat([evaluate(slice(first, middle)), evaluate(slice(middle, first + count))])


class ClosureReport(NamedTuple):
    """What two calls of a closure at the same weights gave."""

    losses: tuple[float, float]
    """Mean loss of each call."""
    is_deterministic: bool
    """Whether the two calls agreed bit for bit."""
    random_layers: list[str]
    """Dropout layers at work."""
    batch_layers: list[str]
    """BatchNorm layers that use the statistics of the batch."""
    moved_buffers: list[str]
    """Buffers that a call changes."""

    def __str__(self) -> str:
        lines = [
            "two calls at the same weights agree bit for bit"
            if self.is_deterministic
            else f"two calls at the same weights differ: {self.losses[0]:.8g} and {self.losses[1]:.8g}"
        ]
        for words, names in (
            ("random at each call", self.random_layers),
            ("use statistics of the batch", self.batch_layers),
            ("moved by a call", self.moved_buffers),
        ):
            if names:
                lines.append(f"{words}: {', '.join(names)}")
        return "; ".join(lines)


def check_closure(closure: Callable[[], Tensor] | Sequence[Callable[[], Tensor]]) -> ClosureReport:
    """Call the closure (or the list of them) twice at the same weights, and name the layers that make a difference.

    Buffers are put back; a closure that calls `backward` itself leaves its gradients.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        >>> x = torch.randn(8, 3)
        >>> report = check_closure(lambda: model(x).square().mean())
        >>> report.is_deterministic, report.random_layers
        (False, ["'1' (Dropout)"])
    """
    with _watch("batch", torch.device("cuda" if torch.cuda.is_available() else "cpu")) as seen:
        closures = [closure] if callable(closure) else list(closure)
        first, second = (torch.cat([c().detach().clone().reshape(-1) for c in closures]) for _ in range(2))
    moved = seen.moved()
    seen.put_back()
    return ClosureReport(
        (float(first.double().mean()), float(second.double().mean())),
        first.shape == second.shape and bool(torch.equal(first, second)),
        [seen.name(m) for m in seen.dropouts()],
        [seen.name(m) for m in seen.batch_norms()],
        [f"{seen.name(module)}.{key}" for module, key in moved],
    )


def _buffer(key: tuple[nn.Module, str]) -> Tensor:
    value = getattr(key[0], key[1])
    assert isinstance(value, Tensor)
    return value


def _not_compiled() -> AbstractContextManager[Any]:
    """Compiled models run as they were written inside: hooks on their layers are not called otherwise."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.device == b.device and bool(torch.equal(a.detach(), b))


def _check_has_statistics(module: nn.Module, seen: _Seen) -> None:
    count = getattr(module, "num_batches_tracked", None)
    if count is None or int(count) == 0:
        raise ValueError(
            f"batch_norm='frozen', but {seen.name(module)} has no running statistics yet. Train first (or run some batches in "
            "training mode), or take batch_norm='batch'."
        )


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
