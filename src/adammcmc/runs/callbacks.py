"""Callbacks of a run, and one that writes scalars for TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from adammcmc.samplers.view import ChainView

__all__ = ["Callback", "Event", "OwnNumbers", "TensorBoard", "callback_states", "load_callback_states"]


@dataclass(frozen=True)
class Event:
    """The state of a chain when a callback is called."""

    chain: int
    step: int
    """Steps of this chain so far, burn-in included."""
    num_draws: int
    """Draws of this chain so far."""
    is_burning_in: bool
    sampler: ChainView
    """The chain's sampler; of chains that run at once, a view of this one."""
    model: nn.Module
    """At the chain's present weights; must not be changed."""


class Callback:
    """Base class of callbacks. Override the methods you need.

    An exception in a callback stops the run as Ctrl-C does: completed draws are kept, and `resume=True` continues. A
    callback may use torch's global random numbers: it has its own stream, separate from the chain's. A callback that
    accumulates numbers over the steps keeps them across a kill by `state_dict` and `load_state_dict`.

    When chains run at once, a callback is called for each of them in turn, with that chain's weights copied into the
    model. Overriding `on_step` then costs a copy of all weights at each step.
    """

    def overrides(self, name: str) -> bool:
        """Whether this callback implements the method of this name."""
        return getattr(getattr(self, name), "__func__", None) is not getattr(Callback, name)

    def state_dict(self, chain: int) -> dict[str, Any]:
        """What this callback needs to continue with a chain, as tensors, numbers and text: part of each checkpoint.

        A checkpoint is written before `on_step` of its step, which a resumed run does not call again: include that step here.
        """
        return {}

    def load_state_dict(self, chain: int, state: dict[str, Any]) -> None:
        """Called before `on_start` with what `state_dict` returned when the checkpoint was written."""

    def on_start(self, event: Event) -> None:
        """A chain starts or resumes."""

    def on_step(self, event: Event) -> None:
        """After each step. Reading numbers from an accelerator here synchronises it."""

    def on_draw(self, event: Event, record: dict[str, Any]) -> None:
        """After a draw was stored; `record` is its line in the index."""

    def on_end(self, event: Event) -> None:
        """A chain has all its draws."""


def callback_states(callbacks: Sequence[Callback], chains: Sequence[int]) -> list[Any]:
    """The states of callbacks that have one, each with its class: part of a checkpoint."""
    return [[type(c).__name__, [c.state_dict(chain) for chain in chains]] for c in callbacks if c.overrides("state_dict")]


def load_callback_states(callbacks: Sequence[Callback], chains: Sequence[int], states: Sequence[Any]) -> None:
    """Restore each callback whose class had a state at its place; a callback that is new to the run starts afresh."""
    with_state = [callback for callback in callbacks if callback.overrides("state_dict")]
    for callback, (name, own) in zip(with_state, states, strict=False):
        if type(callback).__name__ == name:
            for chain, state in zip(chains, own, strict=True):
                callback.load_state_dict(chain, state)


class OwnNumbers:
    """Gives torch's global random numbers a stream of their own inside the context, and restores them outside.

    Callbacks therefore cannot change the chain, and consecutive calls get different numbers. Nothing here synchronises
    a GPU.

    Args:
        seed: of the stream.
        device: of the chain. On CUDA its generator is exchanged as well as the CPU's.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._global = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._global.append(torch.cuda.default_generators[index])
        self._others = [torch.Generator(g.device).manual_seed(seed).get_state() for g in self._global]

    def _exchange(self, *_: object) -> None:
        states = [generator.get_state() for generator in self._global]
        for generator, state in zip(self._global, self._others, strict=True):
            generator.set_state(state)
        self._others = states

    __enter__ = __exit__ = _exchange


class TensorBoard(Callback):
    """Loss, acceptance and settings as scalars for TensorBoard, one run for each chain.

    Args:
        folder: for the event files.
        every: steps between two points; each synchronises an accelerator once.
    """

    def __init__(self, folder: str | Path, every: int = 50) -> None:
        if every < 1:
            raise ValueError(f"`every` must be at least 1, got {every}.")
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: F401  (if missing, fail before the run)
        except ImportError as error:
            raise ImportError("TensorBoard scalars need the package tensorboard. Run: pip install tensorboard") from error
        self._folder, self._every = Path(folder), every
        self._writers: dict[int, SummaryWriter] = {}

    def on_start(self, event: Event) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # points after the checkpoint are written again on resume
        self._writers[event.chain] = SummaryWriter(str(self._folder / f"chain-{event.chain}"), purge_step=event.step or None)

    def on_step(self, event: Event) -> None:
        if event.step % self._every:
            return
        info = event.sampler.info
        self._write(event, "loss", float(info.loss))
        self._write(event, "acceptance_rate", float(info.acceptance_rate))
        self._write(event, "potential", float(info.potential))
        for name, value in (("log_ratio_noise", info.log_ratio_noise), ("beta_eff", event.sampler.beta_eff)):
            if not math.isnan(number := float(value)):  # NaN: unknown
                self._write(event, name, number)
        for i, group in enumerate(event.sampler.param_groups):
            for key in ("lr", "sigma", "sigma_along"):
                if isinstance(group.get(key), int | float):
                    self._write(event, f"settings/{key}" + (f"/group {i}" if i else ""), float(group[key]))

    def on_draw(self, event: Event, record: dict[str, Any]) -> None:
        self._write(event, "draws", event.num_draws)

    def on_end(self, event: Event) -> None:
        if (writer := self._writers.pop(event.chain, None)) is not None:
            writer.close()

    def _write(self, event: Event, name: str, value: float) -> None:
        self._writers[event.chain].add_scalar(name, value, event.step)
