"""Adapts one `Sampler` to the `Chains` protocol of the loop, and builds the stack of all chains, which follows it as it is."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adammcmc.backends.streams import streams
from adammcmc.errors import warn
from adammcmc.samplers.sampler import Sampler
from adammcmc.samplers.stacked import CannotStack, Setup, StackedChains, setup_of, stack
from adammcmc.samplers.view import ChainView
from adammcmc.target.data import derive_seed
from adammcmc.target.likelihood import DataExamples

if TYPE_CHECKING:
    from adammcmc.runs.session import Session

__all__ = ["OneChain", "View", "model_tensors", "prefers_stack", "stack_chains", "write_tensors"]


View = ChainView
"""A chain as callbacks see it."""


class OneChain:
    """One chain: a `Sampler`, whose weights are the model's."""

    num_chains = 1

    def __init__(self, sampler: Sampler, session: Session) -> None:
        chains = sampler.chains
        self.sampler, self._model, self._chains = sampler, session.model, chains
        self._loss = functools.partial(session.loss, session.plan.model)  # one object: a captured step holds on to it
        self.targets = [sampler.target]
        self.check, self.reset_health, self.health_sums = chains.check, chains.reset_health, chains.health_sums
        self.health_state, self.describe, self.present_loss = chains.health_state, chains.describe, chains.present_loss

    num_steps = property(lambda self: self._chains.num_steps)
    is_adapting = property(lambda self: self._chains.is_adapting)
    info = property(lambda self: self._chains.info)
    mean_acceptance_rate = property(lambda self: self._chains.mean_acceptance_rate)
    beta_eff = property(lambda self: self._chains.beta_eff)

    def step(self, batch: Any) -> None:
        self.sampler.step(self._loss, batch)

    @torch.no_grad()
    def log_prior(self) -> Tensor:
        prior = self.sampler.target.prior
        value = 0.0 if prior is None else prior.log_density([p.detach() for p in self.sampler.parameters.trainable])
        return torch.as_tensor(value, dtype=torch.float64, device=self.sampler.device).reshape(1)

    def draws(self) -> dict[str, Tensor]:
        return {name: x[None] for name, x in self.sampler.draw(self._model).items()}

    def place(self, chain: int) -> None:
        """Nothing to do: the weights are in the model."""

    def view(self, chain: int) -> Sampler:
        return self.sampler

    def state_dict(self) -> dict[str, Any]:
        return {**self.sampler.state_dict(), "model": {name: x.detach() for name, x in model_tensors(self._model)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        write_tensors(self._model, state["model"])
        self.sampler.load_state_dict({key: value for key, value in state.items() if key != "model"})


def prefers_stack(device: torch.device, model: nn.Module) -> bool:
    """Whether stacked chains are much faster: where kernel launches, not arithmetic, bound the time of a step.

    A layer with kernels of its own that vmap cannot use opts out by `is_fast_alone`.
    """
    return device.type == "cuda" and not any(getattr(module, "is_fast_alone", False) for module in model.modules())


def stack_chains(session: Session, *, is_required: bool) -> StackedChains | None:
    """All chains at once; where that is impossible, an error if it is required, otherwise a warning and None."""
    try:
        chains = _new_stack(session)
        chains.try_out(session.first_batch)
    except CannotStack as why:
        if is_required:
            raise CannotStack(
                f"the chains cannot be run at once: {why}. Pass stacked=False to run one after the other."
            ) from why
        warn(f"the chains run one after the other, since they cannot be run at once: {why}.")
        return None
    return chains


def _new_stack(session: Session) -> StackedChains:
    plan = session.plan
    if plan.scheduler is not None:
        raise CannotStack("a `scheduler` sets the learning rate of one chain at a time")
    prototype = session.new_sampler(0)
    setups: list[Setup] = [setup_of(prototype, session.model, None)]
    for chain in range(1, plan.num_chains):
        is_like_first = not session.scan and plan.initial is None
        setups.append(setups[0] if is_like_first else setup_of(session.new_sampler(chain), session.model, setups[0]))
    examples = prototype.network.examples
    if isinstance(examples, DataExamples):  # vmap needs the uncompiled model
        examples = DataExamples(session.model, session.data, session.loss, session.device)
    generator = streams([derive_seed(plan.seed, chain, 0) for chain in range(plan.num_chains)], session.device)
    chains = stack(prototype, session.model, session.loss, setups, generator, examples)
    chains.place(0)
    session.restart(0)
    return chains


def model_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers, each once, including those that the state dictionary leaves out."""
    return [*model.named_parameters(), *model.named_buffers()]


@torch.no_grad()
def write_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write all parameters and buffers."""
    for name, x in model_tensors(model):
        if name not in values:
            continue  # a buffer that a forward pass created
        if x.is_contiguous() or isinstance(x, nn.Parameter):
            x.copy_(values[name])
            continue
        owner, _, last = name.rpartition(".")  # a view that cannot be written to, such as an expanded number
        model.get_submodule(owner)._buffers[last] = values[name].to(x.device).clone()
