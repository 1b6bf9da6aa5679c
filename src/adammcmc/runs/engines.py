"""Adapts the samplers to the `Chains` protocol of the loop: one `Sampler`, or a `StackedSampler` of all chains."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adammcmc.errors import warn
from adammcmc.kernels.kernel import Info
from adammcmc.samplers.sampler import Sampler
from adammcmc.samplers.stacked import CannotStack, Setup, StackedChain, StackedSampler, setup_of
from adammcmc.target.data import derive_seed
from adammcmc.target.likelihood import DataExamples
from adammcmc.target.randomness import streams

if TYPE_CHECKING:
    from adammcmc.runs.session import Session

__all__ = ["OneChain", "Stack", "model_tensors", "prefers_stack", "stack_chains", "write_tensors"]


class OneChain:
    """One chain: a `Sampler`, whose weights are the model's."""

    num_chains = 1

    def __init__(self, sampler: Sampler, session: Session) -> None:
        self.prototype, self._model = sampler, session.model
        self._loss = functools.partial(session.loss, session.plan.model)  # one object: a captured step holds on to it
        self.targets = [sampler.target]
        self.check, self.reset_health = sampler.check, sampler.reset_health
        self.health_state, self.describe = sampler.health_state, sampler.describe

    num_steps = property(lambda self: self.prototype.num_steps)
    is_adapting = property(lambda self: self.prototype.is_adapting)
    info = property(lambda self: Info(*(field.reshape(1) for field in self.prototype.info)))
    mean_acceptance_rate = property(lambda self: self.prototype.mean_acceptance_rate.reshape(1))
    beta_eff = property(lambda self: self.prototype.beta_eff.reshape(1))

    def step(self, batch: Any) -> None:
        self.prototype.step(self._loss, batch)

    def present_loss(self) -> Tensor:
        return self.prototype.present_loss().reshape(1)

    @torch.no_grad()
    def log_prior(self) -> Tensor:
        sampler, prior = self.prototype, self.prototype.target.prior
        trainable = [p.detach() for group in sampler.param_groups for p in group["params"] if p.requires_grad]
        value = 0.0 if prior is None else prior.log_density(trainable)
        return torch.as_tensor(value, dtype=torch.float64, device=sampler.device).reshape(1)

    def draws(self) -> dict[str, Tensor]:
        return {name: x[None] for name, x in self.prototype.draw(self._model).items()}

    def health_sums(self) -> list[dict[str, float]]:
        return [self.prototype.health_sums()]

    def place(self, chain: int) -> None:
        """Nothing to do: the weights are in the model."""

    def view(self, chain: int) -> Sampler:
        return self.prototype

    def state_dict(self) -> dict[str, Any]:
        return {**self.prototype.state_dict(), "model": {name: x.detach() for name, x in model_tensors(self._model)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        write_tensors(self._model, state["model"])
        self.prototype.load_state_dict({key: value for key, value in state.items() if key != "model"})


class Stack(StackedSampler):
    """All chains of a run at once."""

    def view(self, chain: int) -> StackedChain:
        return self.chain(chain)

    def health_state(self) -> dict[str, Any]:
        return self.prototype.health_state()


def prefers_stack(device: torch.device, model: nn.Module) -> bool:
    """Whether stacked chains are much faster: where kernel launches, not arithmetic, bound the time of a step.

    A layer with kernels of its own that vmap cannot use opts out by `is_fast_alone`.
    """
    return device.type == "cuda" and not any(getattr(module, "is_fast_alone", False) for module in model.modules())


def stack_chains(session: Session, *, is_required: bool) -> Stack | None:
    """All chains at once; where that is impossible, an error if it is required, otherwise a warning and None."""
    try:
        stack = _new_stack(session)
        stack.try_out(session.first_batch)
    except CannotStack as why:
        if is_required:
            raise CannotStack(
                f"the chains cannot be run at once: {why}. Pass stacked=False to run one after the other."
            ) from why
        warn(f"the chains run one after the other, since they cannot be run at once: {why}.")
        return None
    return stack


def _new_stack(session: Session) -> Stack:
    plan = session.plan
    if plan.scheduler is not None:
        raise CannotStack("a `scheduler` sets the learning rate of one chain at a time")
    prototype = session.new_sampler(0)
    setups: list[Setup] = [setup_of(prototype, session.model, None)]
    for chain in range(1, plan.num_chains):
        is_like_first = not session.scan and plan.initial is None
        setups.append(setups[0] if is_like_first else setup_of(session.new_sampler(chain), session.model, setups[0]))
    examples = prototype._examples
    if isinstance(examples, DataExamples):  # vmap needs the uncompiled model
        examples = DataExamples(session.model, session.data, session.loss, session.device)
    generator = streams([derive_seed(plan.seed, chain, 0) for chain in range(plan.num_chains)], session.device)
    stack = Stack(prototype, session.model, session.loss, setups, generator, examples)
    stack.place(0)
    session.restart(0)
    return stack


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
