"""One chain over the live parameters of a model: its loss is a closure, evaluated at whatever weights the model holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from adammcmc.samplers.closure import Closure, ClosurePotential, Reference
from adammcmc.samplers.layers import GraphNumbers, Layers
from adammcmc.samplers.packing import Packing
from adammcmc.target.data import Examples
from adammcmc.target.leaves import Leaves
from adammcmc.target.potential import Evaluation, Target

__all__ = ["LiveNetwork"]


class Holder(Protocol):
    """Whose parameters these are: a torch optimizer."""

    target: Target
    acceptance: Any
    fixed_data: bool
    reference: Reference | None

    @property
    def num_steps(self) -> int: ...

    def layout(self) -> Packing:
        """The trainable parameters in leaves."""
        ...

    def name(self, index: int) -> str:
        """Of a trainable parameter, for messages."""
        ...

    def is_cached(self) -> bool:
        """Whether the loss at the present weights is known from the last step."""
        ...


class LiveNetwork:
    """The model's own parameters, as one chain (`chains.Network`).

    Args:
        holder: of the parameters.
        layers: dropout, BatchNorm and other layers with state.
        examples: the data as per-example losses.
    """

    num_chains = 1

    def __init__(self, holder: Holder, layers: Layers, examples: Examples | None, device: torch.device) -> None:
        self._holder, self.layers, self.examples, self.device = holder, layers, examples, device
        self.closures: Sequence[Closure] = ()
        """Of the last step, for draws. Minibatches are not kept."""
        self._left: Leaves | None = None
        self._fingerprint: tuple[Any, ...] = ()

    @property
    def names(self) -> list[str]:
        return [self._holder.name(i) for i in range(len(self._holder.layout().params))]

    @property
    def sizes(self) -> list[int]:
        return self._holder.layout().sizes

    def potential(self, loss: Any, batch: Any, precision: list[float] | None) -> ClosurePotential:
        holder = self._holder
        closures = loss if batch is None else [lambda: loss(batch)]
        return ClosurePotential(
            closures,
            holder.layout(),
            target=holder.target,
            examples=self.examples,
            layers=self.layers,
            fixed=holder.fixed_data,
            must_check=not holder.is_cached(),
            is_first=holder.num_steps == 0,
            reference=holder.reference,
            precision=precision,
            name=holder.name,
        )

    def quadratic_prior(self) -> list[float] | None:
        packing, prior = self._holder.layout(), self._holder.target.prior
        if prior is None or not packing.is_live:
            return None
        return prior.quadratic([p.detach() for p in packing.params])

    def take(self) -> Leaves:
        packing = self._holder.layout()
        return packing.pack(packing.params, packing.current)

    @contextmanager
    def attempt(self, potential: ClosurePotential, params: Leaves) -> Iterator[None]:
        potential.hold(params)
        self.layers.begin()
        try:
            yield
        except BaseException:
            potential.place(params)  # an error in the closure must not leave the proposal in the model
            self.layers.abort()
            self._fingerprint = ()
            raise

    def commit(self, potential: ClosurePotential, params: Leaves, is_accepted: Tensor) -> None:
        potential.place(params)
        self.layers.end(is_accepted)

    @contextmanager
    def trial(self, potential: ClosurePotential) -> Iterator[Leaves]:
        packing = self._holder.layout()
        current = packing.pack([p.detach() for p in packing.params], packing.new())
        potential.hold(current)
        self.layers.begin()
        try:
            yield current
        finally:
            potential.place(current)
            self.layers.abort()
            if self._fingerprint:
                self._fingerprint = self._now(packing)

    def remember(self, params: Leaves) -> None:
        packing = self._holder.layout()
        if packing.is_live and self.device.type == "cpu":  # whose values are compared, so that a copy is needed
            params = packing.pack([p.detach() for p in packing.params], packing.new())
        self._left, self._fingerprint = params, self._now(packing)

    def forget(self) -> None:
        """The parameters are others than before."""
        self._left, self._fingerprint = None, ()

    def _now(self, packing: Packing) -> tuple[Any, ...]:
        """Changes when the weights are written to (by way of autograd), or another target is set."""
        holder, modes = self._holder, self.layers.are_modes_as_left()
        places = ((p.data_ptr(), p._version) for p in packing.params)
        return holder.target, holder.acceptance, holder.fixed_data, modes, *places

    def is_unchanged(self) -> bool:
        packing = self._holder.layout()
        if self._left is None or self._now(packing) != self._fingerprint or not self.layers.are_buffers_as_left():
            return False
        if self.device.type != "cpu":
            return True
        # writes to p.data leave no trace but the values, and comparing them is cheap on the CPU
        now = packing.sampled([p.detach() for p in packing.params])
        return all(torch.equal(p, left) for p, left in zip(now, packing.views(self._left), strict=True))

    def by_parameter(self, leaves: Leaves) -> Sequence[Tensor]:
        return [x[None] for x in self._holder.layout().views(leaves)]

    def check_same(self, potential: ClosurePotential, here: Evaluation) -> None:
        if potential.has_closures:
            potential.check_same(here)

    def scaled_away(self) -> list[str]:
        known = self.layers.scaled_away()
        return [self._holder.name(i) for i, p in enumerate(self._holder.layout().params) if id(p) in known]

    def approximations(self, *, fixed_data: bool) -> list[str]:
        return self.layers.approximations(fixed_data=fixed_data, num_micro_batches=len(self.closures))

    def describe(self, *, fixed_data: bool) -> list[str]:
        held = self._holder.layout().held
        rows = [f"padding rows held: {', '.join(self._holder.name(i) for i in held)}"] if held else []
        return [*self.layers.describe(fixed_data=fixed_data), *rows]

    def graph_numbers(self, graph: torch.cuda.CUDAGraph, num_evaluations: int) -> GraphNumbers | None:
        return self.layers.graph_numbers(graph)  # as many as the last step evaluated

    def graph_state(self) -> Any:
        return ()  # the parameters themselves are written to

    def set_graph_state(self, state: Any) -> None:
        """Nothing is kept here."""
