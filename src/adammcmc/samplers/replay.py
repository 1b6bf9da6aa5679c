"""The steps of `Chains` as CUDA graphs: what a graph takes for granted, which memory it uses, and what the host does."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree

from adammcmc.backends.graphs import Body, Ring, tensors_of
from adammcmc.samplers.layers import GraphNumbers
from adammcmc.target.leaves import same

if TYPE_CHECKING:
    from adammcmc.samplers.chains import Chains

__all__ = ["Replay"]


class Replay:
    """What `backends.graphs` needs of chains (`backends.graphs.Replayable`)."""

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self.device, self.num_chains = chains.device, chains.num_chains
        self._numbers: dict[int, tuple[Any, int]] = {}
        self._clock: Tensor | None = None
        self.clock_at = -1
        """The number of steps at the last replay."""

    @property
    def num_steps(self) -> int:
        return self._chains.num_steps

    @property
    def generator(self) -> Any:
        return self._chains.generator

    @property
    def fixed_data(self) -> bool:
        return self._chains.fixed_data

    @property
    def is_adapting(self) -> bool:
        return self._chains.is_adapting

    def on_device(self) -> AbstractContextManager[Any]:
        return self._chains.on_device()

    def check(self) -> None:
        self._chains.check()

    def before_step(self) -> None:
        self._chains.before_step()

    def ordinary_step(self, loss: Any, batch: Any) -> Tensor:
        return self._chains.ordinary_step(loss, batch)

    def upload(self) -> None:
        self._chains.upload(self._chains.kernel())

    def same_layout(self) -> AbstractContextManager[Any]:
        """A context in which nobody touches the parameters."""
        return self._chains.owner.same_layout()

    def layout(self) -> Any:
        """An object that is replaced when the parameters are."""
        return self._chains.owner.layout()

    def token(self) -> tuple[Any, ...]:
        """Everything of which a change must be examined before the next replay; cheap to compare."""
        is_settled = self.clock_at == self._chains.num_steps  # the last step was a replay, which leaves everything in place
        return (
            is_settled,
            self._chains.here is None,
            self._chains.carry is None,
            self._chains.network.layers.graph_key(),
            self._chains.owner.token(),
        )

    def graph_key(self) -> Hashable:
        """What is compiled into a graph. A backend reads its settings from the device at each replay."""
        chains, kernel = self._chains, self._chains.kernel()
        chains.upload(kernel)
        own = None if kernel.backend is None else kernel.backend.key()
        key = (self._number(kernel),) if own is None else (own, self._number(kernel.acceptance))
        return key, chains.network.layers.graph_key(), chains.fixed_data, tuple(chains.owner.targets), id(chains.generator)

    def _number(self, thing: Any) -> int:
        """A number per object: identities of objects that are gone would be given to others."""
        return self._numbers.setdefault(id(thing), (thing, len(self._numbers)))[1]

    def why_not_captured(self) -> str | None:
        """Why these chains cannot be captured."""
        kernel = self._chains.kernel()
        if kernel.acceptance.reads_device:
            return f"the test reads partial sums on the host ({kernel.acceptance})"
        if self._chains.network.layers.draws_on_host:
            return "the loss draws random numbers on the host"
        if not kernel.is_capturable and (kernel.backend is None or kernel.backend.key() is None):
            return f"{kernel.name} {kernel.why_not_capturable}"
        if self._chains.num_chains > 1 and isinstance(self._chains.generator, torch.Generator):
            return "the noise of several chains needs Triton"
        return None

    def is_replayable(self) -> bool:
        """Whether everything a graph takes for granted is known; if not, an ordinary step must come first."""
        needs_losses = self._chains.kernel().acceptance.uses_all_data and self._chains.network.examples is not None
        return not (self._chains.fixed_data and self._chains.here is None) and not (needs_losses and self._chains.carry is None)

    def graph_numbers(self, graph: torch.cuda.CUDAGraph) -> GraphNumbers | None:
        """The random numbers of the loss in this graph."""
        return self._chains.network.graph_numbers(graph, self._chains.kernel().num_evaluations)

    def before_capture(self) -> None:
        """Allocate what must not lie in the graph's own memory."""
        if self._clock is None:
            self._clock = torch.zeros(1, dtype=torch.int64, device=self._chains.device)
        if (backend := self._chains.kernel().backend) is not None:
            backend.reserve()

    def in_graph(self, loss: Any, batch: Any, ring: Ring, numbers: Any) -> Body:
        """One step on memory that stays where it is. Nothing in it may read a value."""
        assert self._clock is not None
        before = self._graph_state()
        with self._chains.network.layers.captured(numbers):
            potential, state, info = self._chains.transition(loss, batch, self._clock)
            known = potential.known if state.here is None else None
            if known is not None and self._chains.kernel().backend is None:
                known = (tuple(x.clone() for x in known[0]), known[1])  # before the chains move on
            self._chains.network.commit(potential, state.params, info.is_accepted)
        fresh = (
            self._chains.owner.keep(state.memory),
            state.here,
            state.carry,
            state.frozen_at,
            self._chains.network.graph_state(),
        )
        kept = tensors_of(before)
        pairs = [(old, new) for old, new in zip(kept, tensors_of(fresh), strict=True) if old is not new]
        if pairs:
            torch._foreach_copy_([old for old, _ in pairs], [new for _, new in pairs])
        self._set_graph_state(before)
        ring.write(info, self._chains.sum_acceptance, self._clock)
        self._chains.frozen_on_host.copy_(self._chains.frozen_at, non_blocking=True)
        return Body(kept, info.loss.dtype if potential.losses is None else potential.losses.dtype, known)

    def after_capture(self, body: Body) -> Body:
        """Complete what could not be done during the capture."""
        if self._chains.here is not None or self._chains.carry is not None:
            self._chains.network.remember(self._chains.network.take())  # a capture writes to nothing, but counts as if it did
        return body if self._chains.kernel().backend is None else body._replace(alive=self._chains.kernel().backend.resolve())

    def _graph_state(self) -> Any:
        return (
            self._chains.memory,
            self._chains.here,
            self._chains.carry,
            self._chains.frozen_at,
            self._chains.network.graph_state(),
        )

    def _set_graph_state(self, state: Any) -> None:
        self._chains.memory, self._chains.here, self._chains.carry, self._chains.frozen_at, own = state
        self._chains.network.set_graph_state(own)

    def before_replay(self, body: Body) -> None:
        """Move what ordinary steps left elsewhere to the places that the graph uses."""
        state = self._graph_state()
        now = tensors_of(state)
        if not same(now, body.kept):
            torch._foreach_copy_(body.kept, now)
            places = iter(body.kept)
            self._set_graph_state(_pytree.tree_map_only(Tensor, lambda _: next(places), state))
        if self._clock is not None and self.clock_at != self._chains.num_steps:
            self._clock.fill_(self._chains.num_steps)

    def after_replay(self, body: Body, ring: Ring) -> Tensor:
        """Count the step and watch its health. Returns its mean loss, (chains,)."""
        self._chains.last_info = ring.info
        self._chains.num_steps += 1
        self.clock_at = self._chains.num_steps
        self._chains.owner.counted()
        known = body.known
        if self._chains.here is not None:
            known = None if self._chains.here.grad is None else (self._chains.network.take(), self._chains.here.grad)
        add = lambda monitor: monitor.add_row(ring.rows, ring.last, self._chains.owner.scale)  # noqa: E731
        self._chains.watch(add, known, is_current=self._chains.here is not None)
        return ring.loss(body.loss_dtype)
