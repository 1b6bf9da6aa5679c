"""Layers with state, under several evaluations of one loss: dropout, BatchNorm, and any buffer that a forward changes.

A Metropolis step evaluates one loss at two points. Both must be the same function of the weights, so

- *dropout* (any use of torch's random numbers) gets the same numbers in all evaluations of a step, hence the same mask;
- *BatchNorm* in training mode follows a stated policy. `"batch"`: batch statistics; its running buffers, like any
  buffer that a forward changes, change once on acceptance and are restored bit for bit on rejection. `"frozen"`: the
  layer uses its running statistics, which do not change.

Running averages lag behind the weights. With fixed data a draw does not use them: its buffers are the statistics of the
data at the draw's own weights (`Layers.statistics`), so that in evaluation mode it is the function that was sampled. On
minibatches it keeps them: they average over many batches, which is worth more than the lag costs.

The layers are found by watching the modules that the closure calls; no model has to be passed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from adammcmc.errors import PerExampleLossRequired, StochasticClosure
from adammcmc.samplers.modules import BatchNormPolicy, BufferKey, Seen, buffer, is_equal, random_state, set_random_state, watch
from adammcmc.samplers.packing import padding_rows

__all__ = ["BatchNormPolicy", "GraphNumbers", "Layers", "Statistics"]

_T = TypeVar("_T")
_STATISTICS = ("running_mean", "running_var")
_FEW = 1 << 20  # numbers in buffers that are cheap to copy


class GraphNumbers:
    """torch's random numbers in the evaluations of a captured step: the same in all of them, new ones at each replay.

    Each of the `count` evaluations has its own generator, a copy of the device's, set to that one's state before a
    replay.
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


@contextmanager
def _same_numbers(states: list[Tensor], device: torch.device) -> Iterator[None]:
    """torch's random numbers from these states; the first evaluation, whose list is empty, fills it."""
    now = random_state(device)
    if not states:
        states.extend(now)
        yield
        return
    set_random_state(states, device)
    try:
        yield
    finally:
        set_random_state(now, device)


class Statistics:
    """Mean and variance of each BatchNorm layer's input at one point, pooled over the batches evaluated inside.

    With momentum 1 a forward leaves the statistics of its own batch in the running buffers, also under vmap. torch
    divides the variance there by n - 1, where the forward itself divides by n: a hook counts the n values in a channel.
    """

    def __init__(self, norms: Sequence[_BatchNorm]) -> None:
        self.norms = norms
        self.keys: list[BufferKey] = [(norm, name) for norm in norms for name in _STATISTICS]
        self._counts: dict[nn.Module, tuple[int, int]] = {}
        """Values in a channel, and calls, of the current batch."""
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
        """Add the batch that was just evaluated; `read` returns a buffer, which was zero before it."""
        for norm in self.norms:
            mean, var = (read(norm, name).detach().to(torch.float64, copy=True) for name in _STATISTICS)
            n, calls = self._counts.pop(norm, (0, 0))
            norm.momentum = 1.0
            if n > 0:
                var = var * ((n - calls) / n) if n > calls else torch.zeros_like(var)
            elif not bool(mean.any() | var.any()):
                continue  # not called with this batch
            n = max(n, 1)  # a network with its own normalisation kernel: many values, equal batches
            before, m, v = self._pooled.get(norm, (0, torch.zeros_like(mean), torch.zeros_like(var)))
            share, off = n / (before + n), mean - m
            self._pooled[norm] = before + n, m + off * share, v + (var - v) * share + off.square() * (share * (1 - share))

    def values(self) -> dict[BufferKey, Tensor]:
        """What the running buffers of a draw must hold."""
        found = [(norm, *pair) for norm, (_, *both) in self._pooled.items() for pair in zip(_STATISTICS, both, strict=True)]
        return {(norm, name): x.to(buffer((norm, name)).dtype) for norm, name, x in found}


class Layers:
    """The layers with state in a sampler's closure, through its steps. `policy`: of BatchNorm in training mode."""

    def __init__(self, policy: BatchNormPolicy, device: torch.device) -> None:
        if policy not in ("batch", "frozen"):
            raise ValueError(f"`batch_norm` must be 'batch' or 'frozen', got {policy!r}.")
        self.policy = policy
        self._device = device
        self.seen = Seen()
        """What the first evaluation showed: modules, their modes, random numbers."""
        self._moving: list[BufferKey] = []
        """The buffers that a step may change."""
        self._backup: list[Tensor] = []
        self._left: list[Tensor] = []
        """As the last step left them (on the CPU only)."""
        self._must_check_examples = True
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
        return list(self.seen.reduced)

    def graph_numbers(self, graph: torch.cuda.CUDAGraph, most: int = 0) -> GraphNumbers:
        """The random numbers of a step like the last one, for capture. `most`: evaluations at least."""
        return GraphNumbers(graph, self._device, max(self._num_evaluations, most))

    @contextmanager
    def captured(self, numbers: GraphNumbers | None) -> Iterator[None]:
        """The evaluations inside are captured: nothing may read a value."""
        self._is_captured, self._graph_numbers = True, numbers
        try:
            yield
        finally:
            self._is_captured, self._graph_numbers = False, None

    def begin(self) -> None:
        """A new step: a rejection restores the present state."""
        self._num_evaluations, self._numbers = 0, []
        if not self.are_modes_as_left():
            self.seen = Seen()  # someone called train() or eval(): watch again
        self._backup = [buffer(key).detach().clone() for key in self._moving]

    @contextmanager
    def evaluation(self, *, same_numbers: bool = True) -> Iterator[None]:
        """One evaluation of the closure, with the random numbers and the buffers of the step's first one."""
        if self._num_evaluations > 0:
            self.abort()
        self._num_evaluations += 1
        numbers: AbstractContextManager[None] = nullcontext()
        if self._is_captured and self._graph_numbers is not None:
            numbers = self._graph_numbers.evaluation(self._num_evaluations - 1)
        elif same_numbers and not self._is_captured:
            numbers = _same_numbers(self._numbers, self._device)
        with numbers, self.modes():
            yield

    def same_numbers(self, numbers: list[Tensor]) -> AbstractContextManager[None]:
        """The same random numbers in all evaluations that share this list, which is empty before the first."""
        if self._is_captured:
            assert self._graph_numbers is not None
            numbers.append(torch.empty(0))  # one more evaluation
            return self._graph_numbers.evaluation(len(numbers) - 1)
        return _same_numbers(numbers, self._device) if self.seen.draws_numbers else nullcontext()

    def look(self, evaluate: Callable[[], _T]) -> _T:
        """Learn the layers from one evaluation that leaves no trace: no buffer, no random number."""
        before = random_state(self._device)
        self.begin()
        try:
            with self.evaluation():
                return evaluate()
        finally:
            self.abort()
            set_random_state(before, self._device)

    @contextmanager
    def modes(self) -> Iterator[None]:
        """The modes of an evaluation, without its buffers and random numbers; the first one is watched."""
        torch.clear_autocast_cache()  # under a caller's autocast it would return the weights of the last evaluation
        if not self.seen.is_complete:
            with watch(self.policy, self._device) as seen:
                try:
                    yield
                except BaseException:
                    seen.put_back()
                    raise
            self._learn(seen)
            return
        for module in self.seen.frozen:
            module.training = False
        try:
            yield
        finally:
            for module in self.seen.frozen:
                module.training = True

    def _learn(self, seen: Seen) -> None:
        for module, name in zip(seen.frozen, seen.names(seen.frozen), strict=True):
            count = getattr(module, "num_batches_tracked", None)
            if count is None or int(count) == 0:
                raise ValueError(
                    f"batch_norm='frozen', but {name} has no running statistics yet. Train first (or run a few batches "
                    "in training mode), or use batch_norm='batch'."
                )
        self.seen = seen
        self._meet(seen.modules)
        self._moving = list(seen.buffers)  # also those that may change later
        if sum(b.numel() for b in seen.buffers.values()) > _FEW:
            moving = {module for module, _ in seen.moved()} | set(seen.batch_norms())
            self._moving = [key for key in seen.buffers if key[0] in moving]
        self._backup = [seen.buffers[key] for key in self._moving]
        seen.buffers.clear()

    def _meet(self, modules: Iterable[nn.Module]) -> None:
        """Add modules that the loss calls."""
        if fresh := dict.fromkeys(module for module in modules if module not in self._called):
            self._called |= fresh
            self.padding = padding_rows(self._called)

    def graph_key(self) -> tuple[Any, ...]:
        """What a CUDA graph holds of the layers: their modes, a caller's autocast, the addresses of their buffers."""
        if not self.seen.is_complete:
            return ()
        modes = tuple(module.training for module in self.seen.modules)
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return modes, autocast, tuple(buffer(key).data_ptr() for key in self._moving)

    def are_modes_as_left(self) -> bool:
        """Whether all modules are in the mode, training or not, in which they were first seen."""
        return all(module.training == training for module, training in self.seen.modules.items())

    def are_buffers_as_left(self) -> bool:
        """Whether the buffers are unchanged since the last step (checked on the CPU only)."""
        if self._device.type != "cpu" or len(self._left) != len(self._moving):
            return True
        return all(is_equal(buffer(key), left) for key, left in zip(self._moving, self._left, strict=True))

    def end(self, is_accepted: Tensor) -> None:
        """Keep the buffers of the last evaluation if it was accepted, otherwise restore them."""
        if not self._moving:
            return
        if is_accepted.device.type == "cpu":
            if not bool(is_accepted):
                self.abort()
            self._left = [buffer(key).detach().clone() for key in self._moving]
            return
        for key, before in zip(self._moving, self._backup, strict=True):
            now = buffer(key)
            now.copy_(torch.where(is_accepted.reshape(()), now, before))

    def abort(self) -> None:
        """Restore the buffers as they were when they were last copied: at the beginning of the step."""
        for key, before in zip(self._moving, self._backup, strict=True):
            buffer(key).copy_(before)

    @property
    def has_statistics(self) -> bool:
        """Whether there are layers whose statistics are recomputed for a draw."""
        return bool(self.seen.kept_norms())

    @contextmanager
    def statistics(self) -> Iterator[Statistics]:
        """Evaluations inside collect the statistics of a draw, in the chain's modes; they consume no random number."""
        found = Statistics(self.seen.kept_norms())
        modes = [(module, module.training) for module in self.seen.modules]
        numbers = random_state(self._device)
        try:
            for module, training in self.seen.modules.items():
                module.training = training  # a validation in between may have left evaluation mode
            with self.modes(), found.watched(), _not_compiled():
                yield found
        finally:
            for module, training in modes:
                module.training = training
            set_random_state(numbers, self._device)

    def fresh_statistics(self, evaluations: Sequence[Callable[[], object]]) -> dict[int, Tensor]:
        """The running buffers of a draw at the present weights, by the identity of the chain's own, which stay."""
        if not self.has_statistics:
            return {}
        self._backup = [buffer(key).detach().clone() for key in self._moving]
        with self.statistics() as found:
            for evaluate in evaluations:
                try:
                    for key in found.keys:
                        buffer(key).zero_()
                    evaluate()
                    found.add(lambda norm, name: buffer((norm, name)))
                finally:
                    self.abort()
        return {id(buffer(key)): value for key, value in found.values().items()}

    def at_fault(self) -> str:
        """The layers that make two calls differ, by name; empty if there are none."""
        layers = ", ".join(self.seen.names(self.seen.dropouts()))
        return layers or ("the loss draws random numbers" if self.seen.draws_numbers else "")

    def describe(self, *, fixed_data: bool) -> list[str]:
        """What each kind of layer with state does, in a few words; known after the first step."""
        words, seen = [], self.seen
        if seen.batch_norms():
            how = ", recomputed for each draw" if fixed_data else ", running averages in the draws"
            words.append(f"BatchNorm: batch statistics{how if seen.kept_norms() else ''}")
        if seen.frozen:
            words.append("BatchNorm: frozen statistics")
        if seen.dropouts():
            words.append("dropout: one mask for both sides of a step")
        elif seen.draws_numbers:
            words.append("random numbers in the loss: the same on both sides of a step")
        return words

    def approximations(self, *, fixed_data: bool, num_micro_batches: int = 1) -> list[str]:
        """Why the loss is not a fixed sum over the examples, or why evaluation mode is another function."""
        reasons, seen = [], self.seen
        if not fixed_data and seen.dropouts():
            reasons.append("dropout draws a new mask at each step")
        elif not fixed_data and seen.draws_numbers:
            reasons.append("the loss draws new random numbers at each step")
        if seen.batch_norms() and (not fixed_data or num_micro_batches > 1):
            batch = "batch" if not fixed_data else "micro-batch"
            reasons.append(f"batch statistics tie the loss of an example to its {batch}")
        if lost := seen.names(seen.lost_norms(max(1, num_micro_batches))):
            reasons.append(f"predictions use other statistics than the chain in {', '.join(lost)}")
        return reasons

    def scaled_away(self) -> set[int]:
        """Identities of the weights right before a BatchNorm with batch statistics, whose length has no influence."""
        norms, pairs = set(self.seen.batch_norms()), itertools.pairwise(self.seen.modules)
        return {id(p) for module, after in pairs if after in norms for p in module._parameters.values() if p is not None}

    def example_losses(self, evaluate: Callable[[slice | Tensor], Tensor], indices: slice | Tensor) -> Tensor:
        """Per-example losses, which exist only if no layer uses the batch or draws random numbers."""
        if self._is_captured:  # checked in the steps before
            with self.modes():
                return evaluate(indices)
        with watch(self.policy, self._device) as seen:
            losses = evaluate(indices)
            halves = self._halves(evaluate, indices, len(losses))
        seen.put_back()
        self._meet(seen.modules)
        if layers := seen.names(seen.batch_norms()):
            raise PerExampleLossRequired(
                f"there are no per-example losses: {', '.join(layers)} uses the statistics of its batch. Set "
                "batch_norm='frozen' in the sampler, or call model.eval(). In `sample` you can also leave out the "
                "batch size: on all data, batch statistics are exact."
            )
        layers = seen.names(seen.dropouts())
        if layers or seen.draws_numbers:
            raise StochasticClosure(
                "the acceptance test stores per-example losses, so they must be a function of the weights alone, but "
                f"the loss draws random numbers{': ' + ', '.join(layers) if layers else ''}. Call model.eval()."
            )
        if halves is not None and not torch.allclose(losses, halves, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise PerExampleLossRequired(
                "the loss of an example depends on the examples that it is evaluated with (batch statistics?): the "
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


def _not_compiled() -> AbstractContextManager[Any]:
    """Run compiled models as they were written: otherwise the hooks on their layers are not called."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
