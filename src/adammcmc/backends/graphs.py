"""Whole steps as CUDA graphs: captured once per batch shape, then replayed without any Python in between.

A graph runs on memory that stays where it is: the batch is copied into it, and everything a step leaves for the next
(weights, moments, cached losses, buffers, counters) is overwritten in place. Random numbers advance as they do without a
graph: the generators' offsets are set before each replay, and dropout has the same mask in all evaluations of a step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree

from adammcmc.backends.streams import why_no_triton
from adammcmc.errors import warn
from adammcmc.kernels.kernel import Info
from adammcmc.target.leaves import Leaves

__all__ = ["Body", "Captured", "GraphNumbers", "Replayable", "Ring", "tensors_of"]

_WARM_UP = 3  # ordinary steps before a capture: layers, caches and compiled code must have settled
_MOST = 16  # batch shapes, or settings that are compiled into a graph; with more, capturing is given up


class GraphNumbers(Protocol):
    """The random numbers of the loss in a captured step."""

    have_moved: bool

    def replayed(self) -> AbstractContextManager[None]:
        """A context for one replay."""


class Body(NamedTuple):
    """What a captured step works on."""

    kept: list[Tensor]
    """The chains' memory, caches and flags: read and overwritten by each replay."""
    loss_dtype: torch.dtype
    known: tuple[Leaves, Leaves] | None
    """A point of the step and the gradient of V there."""
    num_gradients: float
    """Of the step."""
    alive: Any = None
    """What must live as long as the graph."""


class Replayable(Protocol):
    """Chains whose steps can be captured."""

    device: torch.device
    num_chains: int

    @property
    def num_steps(self) -> int: ...

    @property
    def generator(self) -> Any: ...

    @property
    def fixed_data(self) -> bool:
        """Whether every batch is the same."""

    @property
    def is_adapting(self) -> bool: ...

    def on_device(self) -> AbstractContextManager[Any]:
        """A context in which the chains' device is the current one."""

    def same_layout(self) -> AbstractContextManager[Any]:
        """A context in which nobody touches the parameters."""

    def layout(self) -> Any:
        """An object that is replaced when the parameters are."""

    def token(self) -> tuple[Any, ...]:
        """Everything of which a change must be examined before the next replay; cheap to compare."""

    def graph_key(self) -> Hashable:
        """What is compiled into a graph, so that another value requires another graph."""

    def why_not_captured(self) -> str | None:
        """Why these chains cannot be captured."""

    def is_replayable(self) -> bool:
        """Whether everything a graph takes for granted is known; if not, an ordinary step must come first."""

    def check(self) -> None:
        """Raise if a chain froze."""

    def before_step(self) -> None:
        """The host's checks before every step."""

    def ordinary_step(self, loss: Any, batch: Any) -> Tensor:
        """One step without a graph."""

    def graph_numbers(self, graph: torch.cuda.CUDAGraph) -> GraphNumbers | None:
        """The random numbers of the loss in this graph."""

    def before_capture(self) -> None:
        """Allocate what must not lie in the graph's own memory."""

    def in_graph(self, loss: Any, batch: Any, ring: Ring, numbers: GraphNumbers | None) -> Body:
        """One step on memory that stays where it is. Nothing in it may read a value."""

    def after_capture(self, body: Body) -> Body:
        """Complete what could not be done during the capture."""

    def before_replay(self, body: Body) -> None:
        """Move what ordinary steps left elsewhere to the places that the graph uses."""

    def upload(self) -> None:
        """Send settings that have changed to the device."""

    def after_replay(self, body: Body, ring: Ring) -> Tensor:
        """Count the step and watch its health. Returns its mean loss, (chains,)."""


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a pytree."""
    return [x for x in _pytree.tree_leaves(tree) if isinstance(x, Tensor)]


class Ring:
    """The last steps in numbers, on the device: a graph writes one row per replay, and the host tracks which."""

    def __init__(self, length: int, device: torch.device, num_chains: int) -> None:
        self._length = length
        self.rows = torch.zeros(length, len(Info._fields), num_chains, dtype=torch.float64, device=device)
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.last = length - 1
        """The row of the last step."""
        self._losses = list(self.rows[:, 0].unbind())
        self._record_step: Callable[..., None] | None = None
        if why_no_triton(device) is None:  # without Triton: a few more launches
            from adammcmc.backends.triton_records import record_step

            self._record_step = record_step

    def write(self, info: Info, sum_rates: Tensor, clock: Tensor) -> None:
        """Record this step: its row, the sum of the acceptance rates, the count of steps (inside a graph)."""
        row = info.loss._base  # a one-pass decision has made the row already
        if row is None or row.shape != self.rows.shape[1:] or row.dtype != torch.float64:
            row = torch.stack([field.double() for field in info])
        if self._record_step is not None:
            self._record_step(self.rows, self.slot, row, sum_rates, clock)
            return
        self.rows.index_copy_(0, self.slot, row[None])
        self.slot.add_(1).remainder_(self._length)
        sum_rates += info.acceptance_rate
        clock.add_(1)

    def advance(self) -> None:
        """A graph was replayed."""
        self.last = (self.last + 1) % self._length

    def loss(self, dtype: torch.dtype) -> Tensor:
        """That of the last step, (chains,), copied."""
        return self._losses[self.last].to(dtype, copy=True)

    def info(self) -> Info:
        """The last step, copied."""
        fields = list(self.rows[self.last].clone().unbind())
        fields[5], fields[6] = fields[5].bool(), fields[6].bool()
        return Info(*fields)


class _Graph:
    """One captured step."""

    def __init__(self, chains: Replayable, loss: Any, batch: Any, ring: Ring) -> None:
        static = _pytree.tree_map_only(Tensor, torch.clone, batch)
        self.loss = loss
        self._static: list[Any] = []
        _flatten(static, self._static)
        self._last: list[tuple[Any, int]] = []
        self._trusts_identity = chains.fixed_data  # fixed data are the user's promise
        self.graph = torch.cuda.CUDAGraph()
        generators = [torch.cuda.default_generators[chains.device.index or 0]]
        if isinstance(chains.generator, torch.Generator):
            self.graph.register_generator_state(chains.generator)
            generators.append(chains.generator)
        self.numbers = chains.graph_numbers(self.graph)
        before = [generator.get_state() for generator in generators]
        try:
            stream = torch.cuda.Stream(chains.device)  # type: ignore[no-untyped-call]
            with _no_collection(), torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                body = chains.in_graph(loss, static, ring, self.numbers)
        except BaseException:
            for generator, state in zip(generators, before, strict=True):
                # a failed capture leaves its generators in an unusable state: replace their inside
                fresh = torch.Generator(generator.device)
                fresh.set_state(state)
                generator.graphsafe_set_state(fresh)
            raise
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        self.body = chains.after_capture(body)

    def replay(self, leaves: list[Any]) -> None:
        for static, x in zip(self._static, self._fresh(leaves), strict=True):
            if x is not None:
                static.copy_(x, non_blocking=True)
        if self.numbers is None:
            self.graph.replay()
            return
        with self.numbers.replayed():
            self.graph.replay()
        if not self.numbers.have_moved:  # the loss draws none
            self.numbers = None

    def _fresh(self, leaves: list[Any]) -> list[Tensor | None]:
        """What must be copied. A tensor of fixed data need not be, if it was copied before and not written to since."""
        if not self._trusts_identity:
            return [x if isinstance(x, Tensor) else None for x in leaves]
        known = [(x, x._version) if isinstance(x, Tensor) else (x, 0) for x in leaves]
        old = self._last if self._last else [(None, 0)] * len(known)
        self._last = known
        return [
            x if isinstance(x, Tensor) and not (x is y and version == w) else None
            for (x, version), (y, w) in zip(known, old, strict=True)
        ]


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: destroying another graph during a capture would spoil it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Captured:
    """The graphs of some chains, and the reason if there are none.

    Args:
        length: how many of the last steps are kept in numbers.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._graphs: dict[Any, _Graph] = {}
        self._seen: dict[Any, int] = {}
        self._functions: set[Callable[..., Any]] = set()
        self._reason: str | None = None
        self._ring: Ring | None = None
        self._layout: Any = None
        self._again: tuple[Any, ...] | None = None
        """The last replay: the function, the shape of its batch, the token of the chains, and the graph."""

    def step(self, chains: Replayable, loss: Any, batch: Any) -> Tensor:
        """One step of the chains on this batch, replayed if possible."""
        if chains.device.type != "cuda" or self._reason is not None or chains.is_adapting:
            return chains.ordinary_step(loss, batch)
        leaves: list[Any] = []
        shape = _flatten(batch, leaves)
        if self._again is not None and self._again[:3] == (loss, shape, chains.token()):
            # nothing has changed since the last step, settings included
            with chains.on_device():
                chains.check()
                return self._replayed(chains, self._again[3], leaves)
        with chains.on_device(), chains.same_layout():
            if (layout := chains.layout()) is not self._layout:
                self._graphs.clear()  # of other parameters, or of a state that was replaced
                self._seen.clear()
                self._layout = layout
            return self._step(chains, loss, batch, shape, leaves)

    def _step(self, chains: Replayable, loss: Any, batch: Any, shape: Any, leaves: list[Any]) -> Tensor:
        self._again = None
        if (reason := _why_not_batch(leaves)) is not None:
            self._give_up(reason)
            return chains.ordinary_step(loss, batch)
        key = (loss, shape, chains.graph_key())  # two bound methods of one object are equal
        graph = self._graphs.get(key)
        if graph is None:
            if (reason := self._why_not(chains, key, loss)) is not None:
                self._give_up(reason)
                return chains.ordinary_step(loss, batch)
            if self._seen.setdefault(key, 0) < _WARM_UP or chains.num_steps < _WARM_UP:
                self._seen[key] += 1
                return chains.ordinary_step(loss, batch)
            chains.before_step()
            if not chains.is_replayable():
                return chains.ordinary_step(loss, batch)
            chains.before_capture()
            if self._ring is None:
                self._ring = Ring(self._length, chains.device, chains.num_chains)
            try:
                graph = self._graphs[key] = _Graph(chains, loss, batch, self._ring)
            except Exception as error:
                first: BaseException = error
                while first.__context__ is not None:  # the last one only reports that the capture has failed
                    first = first.__context__
                self._give_up(f"{type(first).__name__}: {next(iter(str(first).strip().splitlines()), '')}")
                return chains.ordinary_step(loss, batch)
        chains.before_step()
        if not chains.is_replayable():
            return chains.ordinary_step(loss, batch)
        chains.before_replay(graph.body)
        chains.upload()
        self._again = (loss, shape, chains.token(), graph)
        return self._replayed(chains, graph, leaves)

    def _replayed(self, chains: Replayable, graph: _Graph, leaves: list[Any]) -> Tensor:
        assert self._ring is not None
        graph.replay(leaves)
        self._ring.advance()
        return chains.after_replay(graph.body, self._ring)

    def _why_not(self, chains: Replayable, key: Any, loss: Any) -> str | None:
        if (reason := chains.why_not_captured()) is not None:
            return reason
        code = getattr(loss, "__code__", None)
        alike = [f for f in self._functions if f != loss and code is not None and getattr(f, "__code__", None) is code]
        if len(alike) >= 2:
            return "each call brings a new function; define the loss once, outside the loop"
        self._functions.add(loss)
        if key not in self._seen and len(self._seen) >= _MOST:
            return f"there are more than {_MOST} batch shapes or settings; use batches of one shape and constant settings"
        return None

    def _give_up(self, reason: str) -> None:
        self._reason, self._again = reason, None
        self._graphs.clear()
        warn(f"steps are not captured in a CUDA graph: {reason.rstrip('.')}. They run without one, more slowly.")


def _flatten(x: Any, leaves: list[Any]) -> Any:
    """Adds the leaves of tuples, lists and dictionaries to the list; returns everything but the tensors' values."""
    if isinstance(x, Tensor):
        leaves.append(x)
        return x.shape, x.dtype, x.stride(), x.device
    if isinstance(x, tuple | list):
        return (type(x), *(_flatten(part, leaves) for part in x))
    if type(x) is dict:
        return (dict, *((key, _flatten(part, leaves)) for key, part in x.items()))
    leaves.append(x)
    return type(x), x if isinstance(x, int | float | bool | str | None) else id(x)


def _why_not_batch(leaves: list[Any]) -> str | None:
    """A graph reads its batch from the device; anything else would be compiled into it."""
    for x in leaves:
        if isinstance(x, Tensor):
            if x.device.type != "cuda":
                return "the batch has tensors on the host: move them to the device first"
        elif not isinstance(x, int | float | bool | str | None):
            return f"the batch holds a {type(x).__name__}: pass tensors, in tuples, lists, dictionaries or named tuples"
    return None
