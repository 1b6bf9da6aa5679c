"""The steps of `Chains` as CUDA graphs: what a graph takes for granted, which memory it uses, and what the host does."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from adammcmc.backends.graphs import Body, Captured, Ring, tensors_of
from adammcmc.samplers.adaptation import Adaptation
from adammcmc.samplers.chains import Chains, Network, Owner
from adammcmc.samplers.layers import GraphNumbers
from adammcmc.samplers.running_sums import PENDING
from adammcmc.target.leaves import same

__all__ = ["ReplayedChains"]


class ReplayedChains(Chains):
    """Chains whose steps are CUDA graphs where that is possible (`backends.graphs.Replayable`)."""

    def __init__(self, network: Network, owner: Owner, adaptation: Adaptation | None = None) -> None:
        super().__init__(network, owner, adaptation)
        self.graphs = Captured(PENDING)
        self._numbers: dict[int, tuple[Any, int]] = {}
        self._clock: Tensor | None = None
        self.clock_at = -1
        """The number of steps at the last replay."""

    def step(self, loss: Any, batch: Any) -> Tensor:
        """One transition of every chain, as a CUDA graph if possible. Returns the batch's mean loss of each, (chains,)."""
        return self.graphs.step(self, loss, batch)

    def upload(self) -> None:
        """Send settings that have changed to the device."""
        self._upload(self.kernel())

    def same_layout(self) -> AbstractContextManager[Any]:
        """A context in which nobody touches the parameters."""
        return self.owner.same_layout()

    def layout(self) -> Any:
        """An object that is replaced when the parameters are."""
        return self.owner.layout()

    def token(self) -> tuple[Any, ...]:
        """Everything of which a change must be examined before the next replay; cheap to compare."""
        is_settled = self.clock_at == self.num_steps  # the last step was a replay, which leaves everything in place
        return is_settled, self.here is None, self.carry is None, self.network.layers.graph_key(), self.owner.token()

    def graph_key(self) -> Hashable:
        """What is compiled into a graph. A backend reads its settings from the device at each replay."""
        kernel = self.kernel()
        self._upload(kernel)
        own = None if kernel.backend is None else kernel.backend.key()
        key = (self.number(kernel),) if own is None else (own, self.number(kernel.acceptance))
        return key, self.network.layers.graph_key(), self.fixed_data, tuple(self.owner.targets), id(self.generator)

    def number(self, thing: Any) -> int:
        """A number per object: identities of objects that are gone would be given to others."""
        return self._numbers.setdefault(id(thing), (thing, len(self._numbers)))[1]

    def why_not_captured(self) -> str | None:
        """Why these chains cannot be captured."""
        kernel = self.kernel()
        if kernel.acceptance.reads_device:
            return f"the test reads partial sums on the host ({kernel.acceptance})"
        if self.network.layers.seen.draws_on_host:
            return "the loss draws random numbers on the host"
        if not kernel.is_capturable and (kernel.backend is None or kernel.backend.key() is None):
            return f"{kernel.name} {kernel.why_not_capturable}"
        if self.num_chains > 1 and isinstance(self.generator, torch.Generator):
            return "the noise of several chains needs Triton"
        return None

    def is_replayable(self) -> bool:
        """Whether everything a graph takes for granted is known; if not, an ordinary step must come first."""
        needs_losses = self.kernel().acceptance.uses_all_data and self.network.examples is not None
        return not (self.fixed_data and self.here is None) and not (needs_losses and self.carry is None)

    def graph_numbers(self, graph: torch.cuda.CUDAGraph) -> GraphNumbers:
        """The random numbers of the loss in this graph."""
        return self.network.graph_numbers(graph, self.kernel().num_evaluations)

    def before_capture(self) -> None:
        """Allocate what must not lie in the graph's own memory."""
        if self._clock is None:
            self._clock = torch.zeros(1, dtype=torch.int64, device=self.device)
        if (backend := self.kernel().backend) is not None:
            backend.reserve()

    def in_graph(self, loss: Any, batch: Any, ring: Ring, numbers: Any) -> Body:
        """One step on memory that stays where it is. Nothing in it may read a value."""
        assert self._clock is not None
        before = self._graph_state()
        with self.network.layers.captured(numbers):
            potential, state, info = self.transition(loss, batch, self._clock)
            known = potential.known if state.here is None else None
            if known is not None and self.kernel().backend is None:  # before the chains move on
                overwritten = set(map(id, tensors_of(before)))
                known = (tuple(x.clone() if id(x) in overwritten else x for x in known[0]), known[1])
            self.network.commit(potential, state.params, info.is_accepted)
        memory = self.owner.keep(state.memory)
        fresh = memory, state.here, state.carry, state.frozen_at, self.network.graph_state()
        kept = tensors_of(before)
        pairs = [(old, new) for old, new in zip(kept, tensors_of(fresh), strict=True) if old is not new]
        if pairs:
            torch._foreach_copy_([old for old, _ in pairs], [new for _, new in pairs])
        self._set_graph_state(before)
        ring.write(info, self.sum_acceptance, self._clock)
        self.frozen_on_host.copy_(self.frozen_at, non_blocking=True)
        dtype = info.loss.dtype if potential.losses is None else potential.losses.dtype
        return Body(kept, dtype, known, potential.num_gradients)

    def after_capture(self, body: Body) -> Body:
        """Complete what could not be done during the capture."""
        if self.here is not None or self.carry is not None:
            self.network.remember(self.network.take())  # a capture writes to nothing, but counts as if it did
        return body if self.kernel().backend is None else body._replace(alive=self.kernel().backend.resolve())

    def _graph_state(self) -> Any:
        return self.memory, self.here, self.carry, self.frozen_at, self.network.graph_state()

    def _set_graph_state(self, state: Any) -> None:
        self.memory, self.here, self.carry, self.frozen_at, own = state
        self.network.set_graph_state(own)

    def before_replay(self, body: Body) -> None:
        """Move what ordinary steps left elsewhere to the places that the graph uses."""
        state = self._graph_state()
        now = tensors_of(state)
        if not same(now, body.kept):
            torch._foreach_copy_(body.kept, now)
            places = iter(body.kept)
            self._set_graph_state(_pytree.tree_map_only(Tensor, lambda _: next(places), state))
        if self._clock is not None and self.clock_at != self.num_steps:
            self._clock.fill_(self.num_steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.clock_at = -1  # a graph must be told of everything again, even at the same number of steps

    def after_replay(self, body: Body, ring: Ring) -> Tensor:
        """Count the step and watch its health. Returns its mean loss, (chains,)."""
        self.last_info = ring.info
        self.num_steps += 1
        self.clock_at = self.num_steps
        self.owner.counted()
        known = body.known
        if self.here is not None:
            known = None if self.here.grad is None else (self.network.take(), self.here.grad)
        self.watch((ring.rows, ring.last, self.owner.scale), known, body.num_gradients)
        return ring.loss(body.loss_dtype)
