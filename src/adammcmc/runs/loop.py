"""The loop of a run: steps, draws, checkpoints and callbacks, for one chain or for many that run at once."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from adammcmc.errors import StoreCorrupt, StoreMismatch
from adammcmc.posterior.moments import Moments
from adammcmc.posterior.store.folder import Record, Store
from adammcmc.runs.callbacks import Event, OwnNumbers
from adammcmc.runs.checkpoint import load_state, state_of
from adammcmc.runs.interrupts import Interrupt
from adammcmc.samplers.adaptation import BurnIn
from adammcmc.samplers.chains import Chains
from adammcmc.samplers.modules import model_tensors, write_tensors
from adammcmc.samplers.progress import Bar
from adammcmc.samplers.sampler import Sampler
from adammcmc.samplers.second_look import Mark, change_since, mark
from adammcmc.samplers.stacked import StackedChains
from adammcmc.target.data import derive_seed

if TYPE_CHECKING:
    from adammcmc.runs.session import Session

__all__ = ["Loop", "OneChain"]

_COLUMNS = 78  # of a status below the bar
_CHECKPOINT_SECONDS = 60.0  # between checkpoints, where draws are far apart


class OneChain:
    """One chain: a `Sampler`, whose weights are the model's, with those methods of `StackedChains` that the loop calls."""

    def __init__(self, sampler: Sampler, session: Session) -> None:
        self.sampler, self._model = sampler, session.model
        self.loss = functools.partial(session.loss, session.plan.model)  # one object: a captured step holds on to it

    def step(self, batch: Any) -> None:
        self.sampler.step(self.loss, batch)

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


class Loop:
    """Takes chains from their last checkpoint to their last draw.

    Args:
        session: the plan, the model and the data.
        engine: what to run.
        key: the number of the chain, or None for all chains of the run at once. Checkpoints are stored under it.
        scheduler: stepped after each step.
    """

    def __init__(
        self, session: Session, engine: OneChain | StackedChains, key: int | None, scheduler: LRScheduler | None = None
    ) -> None:
        self.session, self.plan, self.engine, self.key, self.scheduler = session, session.plan, engine, key, scheduler
        self.chains: Chains = engine.sampler.chains if isinstance(engine, OneChain) else engine
        self.numbers = range(key or 0, (key or 0) + self.chains.num_chains)  # of the chains in the run
        self.burned_in_at: int | None = None  # the step at which burn-in ended; None during burn-in
        self.num_draws = 0  # of each chain so far
        self.burn_in = self._planned_burn_in()
        self.moments = None if self.plan.keep == "draws" else [Moments() for _ in self.numbers]
        self.sums: list[dict[str, float]] = [{} for _ in self.numbers]  # of health, at the last draw
        self._draw_began = self._saved_at = 0.0
        self._mark: Mark | None = None  # at the first draw of this process

    def _planned_burn_in(self) -> int | None:
        """Number of steps; None: as long as the sampler adapts."""
        burn_in = self.plan.burn_in
        if burn_in == 0 and self.chains.is_adapting:
            raise ValueError(
                "`burn_in` is 0, and the sampler finds its step size in burn-in. Give the sampler a `step_size`, or leave "
                "out `burn_in`."
            )
        if isinstance(burn_in, int):
            return burn_in
        if isinstance(burn_in, BurnIn) or self.chains.is_adapting:
            return None
        return self.plan.num_draws * self.plan.gap // 4

    @property
    def name(self) -> str:
        """For the progress bar and for errors."""
        total = self.plan.num_chains
        if self.key is None:
            return f"{total} chain{'s' * (total > 1)} at once"
        return f"chain {self.key + 1}/{total}" if total > 1 else type(self.engine.view(0)).__name__

    def run(self, store: Store, bar: Bar, interrupt: Interrupt) -> None:
        """Run to the last draw, or to the end of the step in which a signal arrived; the state is then saved."""
        self._restore(store)
        plan, chains = self.plan, self.chains
        if self.num_draws >= plan.num_draws:
            return
        if self._ends_burn_in():
            self.burned_in_at = chains.num_steps  # there is no burn-in
        seed = derive_seed(plan.seed, self.numbers[0], 3, chains.num_steps)
        self._callback_numbers = OwnNumbers(seed, self.session.device)
        self._saved_at = time.monotonic()
        self._notify("on_start")
        self._draw_began = time.perf_counter()
        while self.num_draws < plan.num_draws:
            self._step(store)
            try:
                self._notify("on_step")
                bar.update(chains.num_steps, self._num_steps(), self._status)
            finally:  # also when a callback fails, or the bar cannot write to a closed terminal
                if interrupt.is_set:
                    self._save(store)
                    raise interrupt.exception()
        store.flush()
        self._notify("on_end")

    def _step(self, store: Store) -> None:
        """One transition, then whatever is due: the end of burn-in, a draw, a checkpoint."""
        chains = self.chains
        self.engine.step(self.session.next_batch())
        if self.scheduler is not None:
            self.scheduler.step()
        if chains.num_steps == 1 and not self.key:  # the layers are known now; the first chain describes them for all
            store.manifest["target"] = self.session.describe(chains)
            store.write_manifest()
        if self._ends_burn_in():
            self.burned_in_at = chains.num_steps
            self.sums = [{} for _ in self.numbers]
            chains.reset_health()
            self._draw_began = time.perf_counter()
        elif self.burned_in_at is not None and (chains.num_steps - self.burned_in_at) % self.plan.gap == 0:
            self._draw(store)
        elif store.is_durable and time.monotonic() - self._saved_at > _CHECKPOINT_SECONDS:
            self._save(store)

    def _ends_burn_in(self) -> bool:
        is_over = not self.chains.is_adapting and self.chains.num_steps >= (self.burn_in or 0)
        return self.burned_in_at is None and is_over

    def _draw(self, store: Store) -> None:
        """Store the present weights."""
        chains = self.chains
        columns = chains.present_loss().double(), self.engine.log_prior(), chains.info.is_accepted.double()
        numbers = torch.stack(columns, 1).tolist()
        chains.check()  # the device is synchronised: a frozen chain is visible now
        sums, began = chains.health_sums(), self._draw_began
        self._draw_began = time.perf_counter()
        seconds = round(self._draw_began - began, 6)
        records = [self._record(i, row, sums[i], seconds) for i, row in enumerate(numbers)]
        tensors = self.engine.draws()
        for record, values in zip(records, self.session.probed(tensors), strict=False):
            record["probe"] = values
        if self.moments is not None:
            host = {name: x.cpu() for name, x in tensors.items()}
            for i, moments in enumerate(self.moments):
                moments.add({name: x[i] for name, x in host.items()})
        self.num_draws += 1
        self.sums = sums
        self._look_again()
        is_saved = store.is_durable or self.num_draws == self.plan.num_draws
        store.commit(records, tensors, state_of(self) if is_saved else None)
        self._saved_at = time.monotonic()
        self._notify("on_draw", records)

    def _look_again(self) -> None:
        """At the last draw: whether the loss still has the values that it had at the first one of this process."""
        chains, monitor = self.chains, self.chains.monitor
        if not self.session.has_fixed_data or monitor is None:
            return
        if self._mark is None:
            self._mark = mark(chains)
        elif self.num_draws == self.plan.num_draws:
            loss = self.engine.loss if isinstance(self.engine, OneChain) else None
            monitor.change = max(monitor.change, change_since(self._mark, chains, loss, self.session.whole))

    def _record(self, i: int, numbers: Sequence[float], sums: dict[str, float], seconds: float) -> Record:
        """A draw's line in the index."""
        loss, log_prior, is_accepted = numbers
        since = {key: value - self.sums[i].get(key, 0.0) for key, value in sums.items()}
        return {
            "draw": self.num_draws,
            "chain": self.numbers[i],
            "step": self.chains.num_steps,
            "loss": loss,
            "potential": self.chains.targets[i].scale * loss - log_prior,
            "acceptance_rate": since["rate"] / max(1.0, since["num_steps"]),
            "num_accepted": round(since["accepted"]),
            "is_accepted": bool(is_accepted),
            "seconds": seconds,
            "health": sums,
        }

    def _notify(self, method: str, records: Sequence[Record] | None = None) -> None:
        """Call a method of all callbacks that override it, for each chain."""
        callbacks = [callback for callback in self.plan.callbacks if callback.overrides(method)]
        if not callbacks:
            return
        with self._callback_numbers:
            for i, chain in enumerate(self.numbers):
                self.engine.place(i)
                is_burning_in = self.burned_in_at is None
                view, model = self.engine.view(i), self.session.model
                event = Event(chain, self.chains.num_steps, self.num_draws, is_burning_in, view, model)
                for callback in callbacks:
                    getattr(callback, method)(event, *([] if records is None else [records[i]]))

    def _num_steps(self) -> int:
        """Of the whole run; while the length of burn-in is unknown, with its limit."""
        start = self.burn_in if self.burned_in_at is None else self.burned_in_at
        if self.chains.is_adapting:
            assert self.chains.adaptation is not None
            start = max(start or 0, self.chains.adaptation.most_steps)
        return (start or 0) + self.plan.num_draws * self.plan.gap

    def _passes(self) -> float:
        """Gradients so far, in passes over the data; a step of a burn-in that tunes nothing counts as one."""
        chains, data = self.chains, self.session.data
        count = 0.0 if chains.monitor is None else chains.monitor.num_gradients
        if chains.adaptation is not None:
            count += chains.adaptation.num_gradients
        elif self.burned_in_at is not None:
            count += self.burned_in_at
        return count if self.session.has_fixed_data else count * (data.batch_size or data.num_data) / data.num_data

    def _status(self) -> str:
        chains, passes = self.chains, f", {self._passes():,.0f} passes"
        if chains.is_adapting:
            assert chains.adaptation is not None
            status = chains.adaptation.status()
            return status + passes if len(status) + len(passes) <= _COLUMNS else status
        loss, rate, beta = (float(x.mean()) for x in (chains.info.loss, chains.mean_acceptance_rate, chains.beta_eff))
        hot = f", beta_eff {beta:.2f}" if beta < 0.995 else ""  # (False for NaN: unknown, or irrelevant)
        burn_in = f"burn-in until step {self.burn_in:,}: " if self.burned_in_at is None else ""
        return f"{burn_in}loss {loss:.3g}, acceptance {rate:.2f}{hot}{passes}"

    # --- the checkpoint -----------------------------------------------------------------------------------------

    def _save(self, store: Store) -> None:
        store.flush()
        store.save(self.key, state_of(self))
        self._saved_at = time.monotonic()

    def _restore(self, store: Store) -> None:
        if (saved := store.restore(self.key, self.numbers)) is None:
            raise StoreMismatch(f"{self.name} has no checkpoint.")
        try:
            load_state(self, saved)
        except (KeyError, IndexError, TypeError, AttributeError) as error:  # intact, but not written by this version
            raise StoreCorrupt(
                f"the checkpoint of {self.name} is not one of this run ({type(error).__name__}: {error})."
            ) from error
