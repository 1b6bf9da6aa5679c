"""Whole steps as CUDA graphs: captured once for each shape of the batch, then replayed without any Python in between.

A graph runs on memory that stays where it is: the batch is copied into it, and all that a step leaves for the next (weights,
moments, cached losses, buffers, counters) is overwritten in place. Random numbers move on as they do without a graph: the
generators' offsets are set before each replay, and dropout has the same mask in all evaluations of a step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from adammcmc.errors import warn
from adammcmc.kernels.kernel import Info
from adammcmc.samplers.health import PENDING
from adammcmc.samplers.layers import GraphNumbers

__all__ = ["Captures", "Ring"]

_WARM_UP = 3  # steps as usual before a graph is captured: layers, caches and compiled code must have settled
_MOST = 16  # shapes of batches, or settings that a graph has written into it; with more than that nothing is captured any more


class Ring:
    """The last steps in numbers, on the device: a graph writes one row at each replay, and the host knows which."""

    def __init__(self, device: torch.device, num_chains: int) -> None:
        self.rows = torch.zeros(PENDING, len(Info._fields), num_chains, dtype=torch.float64, device=device)
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.last = PENDING - 1
        """The row of the last step."""
        self._losses = list(self.rows[:, 0].unbind())

    def write(self, info: Info) -> None:
        """The row of this step (inside a graph)."""
        row = torch.stack([field.double() for field in info])
        self.rows.index_copy_(0, self.slot, row[None])
        self.slot.add_(1).remainder_(PENDING)

    def moved_on(self) -> None:
        """A graph was replayed."""
        self.last = (self.last + 1) % PENDING

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

    def __init__(self, sampler: Any, loss: Callable[[Any], Tensor], batch: Any, ring: Ring) -> None:
        static = _pytree.tree_map_only(Tensor, torch.clone, batch)
        self.loss = loss
        self._static: list[Any] = []
        _flatten(static, self._static)
        self._last: list[tuple[Any, int]] = []
        self._trusts_identity = bool(sampler.fixed_data)  # fixed data are the user's promise
        self.graph = torch.cuda.CUDAGraph()
        generators = [torch.cuda.default_generators[sampler.device.index or 0]]
        if isinstance(sampler.generator, torch.Generator):
            self.graph.register_generator_state(sampler.generator)
            generators.append(sampler.generator)
        self.numbers: GraphNumbers | None = sampler._layers.graph_numbers(self.graph, sampler._num_evaluations())
        before = [generator.get_state() for generator in generators]
        try:
            stream = torch.cuda.Stream(sampler.device)  # type: ignore[no-untyped-call]
            with _no_collection(), torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.body = sampler._in_graph(lambda: loss(static), ring, self.numbers)
        except BaseException:
            for generator, state in zip(generators, before, strict=True):
                # a capture that failed leaves its generators in the middle of it: they get a new inside
                fresh = torch.Generator(generator.device)
                fresh.set_state(state)
                generator.graphsafe_set_state(fresh)
            raise
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        sampler._after_capture(self.body)

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
        """What must be copied: of fixed data not a tensor that was copied before, and that nobody has written to since."""
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
    """No garbage collection: the graph of a sampler that is gone, destroyed during a capture, would spoil it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Captures:
    """The graphs of a sampler, and why there are none where there are none."""

    def __init__(self) -> None:
        self._graphs: dict[Any, _Graph] = {}
        self._seen: dict[Any, int] = {}
        self._functions: set[Callable[..., Any]] = set()
        self._reason: str | None = None
        self._ring: Ring | None = None
        self._layout: Any = None
        self._again: tuple[Any, ...] | None = None
        """The last replay: the function, the shape of its batch, what the sampler had to say of itself, and the graph."""

    def step(self, sampler: Any, loss: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """One step of the sampler on this batch, replayed if it can be."""
        if sampler.device.type != "cuda" or self._reason is not None or sampler.is_adapting:
            return self._usual(sampler, loss, batch)
        leaves: list[Any] = []
        shape = _flatten(batch, leaves)
        if self._again is not None and self._again[:3] == (loss, shape, sampler._token()):
            # as at the last step: nothing else need be looked at
            with sampler._on_device():
                sampler.check()
                sampler._before_next_replay(self._again[3].body)
                return self._replayed(sampler, self._again[3], leaves)
        with sampler._on_device(), sampler._same_layout():
            if (layout := getattr(sampler, "_packing", None)) is not self._layout:
                self._graphs.clear()  # of other parameters, or of a state that was replaced
                self._seen.clear()
                self._layout = layout
            return self._step(sampler, loss, batch, shape, leaves)

    def _step(
        self, sampler: Any, loss: Callable[[Any], Tensor], batch: Any, shape: Any, leaves: list[Any]
    ) -> Tensor:  # fmt: skip
        self._again = None
        if (reason := _why_not_batch(leaves)) is not None:
            self._give_up(reason)
            return self._usual(sampler, loss, batch)
        key = (loss, shape, sampler._graph_key())  # two bound methods of one object are equal
        graph = self._graphs.get(key)
        if graph is None:
            if (reason := self._why_not(sampler, key, loss)) is not None:
                self._give_up(reason)
                return self._usual(sampler, loss, batch)
            if self._seen.setdefault(key, 0) < _WARM_UP or sampler.num_steps < _WARM_UP:
                self._seen[key] += 1
                return self._usual(sampler, loss, batch)
            sampler._before_step()
            if not sampler._is_replayable():
                return self._usual(sampler, loss, batch)
            sampler._before_capture()
            if self._ring is None:
                self._ring = Ring(sampler.device, sampler.num_chains)
            try:
                graph = self._graphs[key] = _Graph(sampler, loss, batch, self._ring)
            except Exception as error:
                first: BaseException = error
                while first.__context__ is not None:  # what comes last is only that the capture has failed
                    first = first.__context__
                self._give_up(f"{type(first).__name__}: {next(iter(str(first).strip().splitlines()), '')}")
                return self._usual(sampler, loss, batch)
        assert self._ring is not None
        sampler._before_step()
        if not sampler._is_replayable():
            return self._usual(sampler, loss, batch)
        sampler._before_replay(graph.body)
        self._again = (loss, shape, sampler._token(), graph)
        return self._replayed(sampler, graph, leaves)

    def _replayed(self, sampler: Any, graph: _Graph, leaves: list[Any]) -> Tensor:
        assert self._ring is not None
        graph.replay(leaves)
        self._ring.moved_on()
        return sampler._after_replay(graph.body, self._ring)  # type: ignore[no-any-return]

    def _usual(self, sampler: Any, loss: Callable[[Any], Tensor], batch: Any) -> Tensor:
        result: Tensor = sampler._usual_step([lambda: loss(batch)])
        return result

    def _why_not(self, sampler: Any, key: Any, loss: Callable[[Any], Tensor]) -> str | None:
        if (reason := sampler._why_not_captured()) is not None:
            return str(reason)
        code = getattr(loss, "__code__", None)
        alike = [f for f in self._functions if f != loss and code is not None and getattr(f, "__code__", None) is code]
        if len(alike) >= 2:
            return "each call brings a new function; define the loss once, outside of the loop"
        self._functions.add(loss)
        if key not in self._seen and len(self._seen) >= _MOST:
            return f"there are more than {_MOST} shapes of batches or settings; make batches alike, and leave the settings"
        return None

    def _give_up(self, reason: str) -> None:
        self._reason, self._again = reason, None
        self._graphs.clear()
        warn(f"steps are not captured in a CUDA graph: {reason.rstrip('.')}. They run as usual, only slower.")


def _flatten(x: Any, leaves: list[Any]) -> Any:
    """Adds the leaves of tuples, lists and dictionaries to the list; returns all that is not in the tensors' values."""
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
    """A graph reads its batch from the device; what is not there would be written into it once and for all."""
    for x in leaves:
        if isinstance(x, Tensor):
            if x.device.type != "cuda":
                return "the batch has tensors on the host: move them to the device first"
        elif not isinstance(x, int | float | bool | str | None):
            return f"the batch holds a {type(x).__name__}: pass tensors, in tuples, lists, dictionaries or named tuples"
    return None
