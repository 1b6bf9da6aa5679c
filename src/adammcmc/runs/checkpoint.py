"""What a checkpoint stores: everything that a run needs to resume bit for bit.

The part under "sampler" is the engine's: `samplers/torch_optimizer.py` (one chain) or `samplers/stacked.py` (many), with
`samplers/chains.py` in both. `posterior/chain_records.py` reads health, moments, settings and the record of burn-in back;
`posterior/store/` writes the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from adammcmc.posterior.moments import Moments
from adammcmc.runs.callbacks import callback_states, load_callback_states

if TYPE_CHECKING:
    from adammcmc.runs.loop import Loop

__all__ = ["load_state", "state_of"]


def state_of(loop: Loop) -> dict[str, Any]:
    """Everything that is needed to resume bit for bit."""
    device, adaptation = loop.session.device, loop.chains.adaptation
    return {
        "sampler": loop.engine.state_dict(),
        "scheduler": None if loop.scheduler is None else _plain_state(loop.scheduler),
        "data": loop.session.data.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "burn_in": loop.burn_in,
        "burned_in_at": loop.burned_in_at,
        "num_draws": loop.num_draws,
        "sums": loop.sums,
        "moments": None if loop.moments is None else [moments.state_dict() for moments in loop.moments],
        "health": loop.chains.health_state(),
        "warm_up": None if adaptation is None else adaptation.record(loop.chains.kernel()).state(),
        "callbacks": callback_states(loop.plan.callbacks, loop.numbers),
    }


def load_state(loop: Loop, state: dict[str, Any]) -> None:
    """Restore what `state_of` returned. ("health" and "warm_up" are for readers of the run: the sampler keeps its own sums.)"""
    device = loop.session.device
    loop.engine.load_state_dict(state["sampler"])
    if loop.scheduler is not None and state["scheduler"] is not None:
        loop.scheduler.load_state_dict(state["scheduler"])
    if state["data"]:
        loop.session.data.load_state_dict(state["data"])
    torch.set_rng_state(state["random"])
    if state["random_cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["random_cuda"], device)
    loop.burn_in, loop.burned_in_at, loop.num_draws = state["burn_in"], state["burned_in_at"], state["num_draws"]
    loop.sums = [dict(sums) for sums in state["sums"]]
    loop.moments = None if state["moments"] is None else [Moments(moments) for moments in state["moments"]]
    load_callback_states(loop.plan.callbacks, loop.numbers, state.get("callbacks", []))


def _plain_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Without functions, such as those of LambdaLR."""
    return {key: value for key, value in scheduler.state_dict().items() if not callable(value)}
