"""One chain over the live parameters of a model: its loss is a closure, evaluated at whatever weights the model holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adammcmc.samplers.chains import Network
from adammcmc.samplers.closure import Closure, ClosurePotential
from adammcmc.samplers.layers import GraphNumbers, Layers
from adammcmc.samplers.packing import Packing
from adammcmc.target.batches import Parts, to_device
from adammcmc.target.data import Examples
from adammcmc.target.leaves import Leaves

if TYPE_CHECKING:
    from adammcmc.samplers.sampler import Sampler

__all__ = ["LiveNetwork", "closures_of"]


def closures_of(loss: Callable[[Any], Tensor], batch: Any, device: torch.device) -> list[Closure]:
    """One for each part of a batch; parts that are elsewhere come to the device when they are evaluated."""
    if not isinstance(batch, Parts):
        return [functools.partial(loss, batch)]
    return [functools.partial(_evaluated, loss, part, device) for part in batch]


def _evaluated(loss: Callable[[Any], Tensor], part: Any, device: torch.device) -> Tensor:
    return loss(to_device(part, device))


class LiveNetwork(Network):
    """The model's own parameters, as one chain.

    Args:
        holder: of the parameters.
        layers: dropout, BatchNorm and other layers with state.
        examples: the data as per-example losses.
    """

    num_chains = 1

    def __init__(self, holder: Sampler, layers: Layers, examples: Examples | None, device: torch.device) -> None:
        self._holder, self.layers, self.examples, self.device = holder, layers, examples, device
        self.closures: Sequence[Closure] = ()
        """Of the last step, for draws. Minibatches are not kept."""
        self._left: Leaves | None = None
        self._fingerprint: tuple[Any, ...] = ()

    def layout(self) -> Packing:
        return self._holder.layout()

    @property
    def has_rough_forces(self) -> bool:
        return self._holder.forces != "float32"

    @property
    def names(self) -> list[str]:
        return [self._holder.name(i) for i in range(len(self.layout().params))]

    def potential(self, loss: Any, batch: Any, precision: list[float] | None) -> ClosurePotential:
        holder = self._holder
        return ClosurePotential(
            loss if batch is None else closures_of(loss, batch, self.device),
            holder.layout(),
            weights=batch.weights if isinstance(batch, Parts) else None,
            forces=holder.forces,
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
        packing, prior = self.layout(), self._holder.target.prior
        if prior is None or not packing.is_live:
            return None
        return prior.quadratic([p.detach() for p in packing.params])

    def take(self) -> Leaves:
        packing = self.layout()
        return packing.pack(packing.params, packing.current)

    @contextmanager
    def attempt(self, potential: ClosurePotential, params: Leaves) -> Iterator[None]:
        potential.held = params
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
        packing = self.layout()
        current = packing.pack([p.detach() for p in packing.params], packing.new())
        potential.held = current
        self.layers.begin()
        try:
            yield current
        finally:
            potential.place(current)
            self.layers.abort()
            if self._fingerprint:
                self._fingerprint = self._now(packing)

    def remember(self, params: Leaves) -> None:
        packing = self.layout()
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
        packing = self.layout()
        if self._left is None or self._now(packing) != self._fingerprint or not self.layers.are_buffers_as_left():
            return False
        if self.device.type != "cpu":
            return True
        # writes to p.data leave no trace but the values, and comparing them is cheap on the CPU
        now = packing.sampled([p.detach() for p in packing.params])
        return all(torch.equal(p, left) for p, left in zip(now, packing.views(self._left), strict=True))

    def by_parameter(self, leaves: Leaves) -> Sequence[Tensor]:
        return [x[None] for x in self.layout().views(leaves)]

    def approximations(self, *, fixed_data: bool) -> list[str]:
        return self.layers.approximations(fixed_data=fixed_data, num_micro_batches=len(self.closures))

    def graph_numbers(self, graph: torch.cuda.CUDAGraph, num_evaluations: int) -> GraphNumbers:
        return self.layers.graph_numbers(graph)  # as many as the last step evaluated
