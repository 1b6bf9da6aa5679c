"""The one-call door: a model, data and a loss become draws that one can keep, interrupt and use.

posterior = sample(model, (inputs, targets), F.cross_entropy, num_draws=200, path="runs/a")
prediction = posterior.predict(test_inputs)

A run is a list of chains, one after the other, or all of them in one stack (`stacked.py`). Each starts from a checkpoint (a new
one from that of step 0), so that going on after a stop is what every run does.
"""

from __future__ import annotations

import functools
import json
import logging
import platform
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy
import safetensors
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.lr_scheduler import LRScheduler

from adammcmc.errors import NonFiniteLoss, StoreCorrupt, StoreMismatch, warn
from adammcmc.posterior.moments import Moments
from adammcmc.posterior.posterior import Posterior, bare, check_model, describe_tensors
from adammcmc.posterior.predictive import Probe
from adammcmc.posterior.store.encoding import can_store, plain_json
from adammcmc.posterior.store.folder import FolderStore, MemoryStore, Store, check_space, format_bytes, read_manifest
from adammcmc.posterior.store.memory import free_memory
from adammcmc.runs.callbacks import Callback, Event, OwnNumbers, callback_states, load_callback_states
from adammcmc.runs.factory import (
    Factory,
    as_factory,
    build,
    build_scheduler,
    chain_factory,
    describe_prior,
    finds_settings,
    given_options,
    innermost,
    prior_difference,
    scanned,
    settings_of,
    told,
)
from adammcmc.runs.interrupts import Interrupt, deferred_interrupt
from adammcmc.samplers.adaptation import BurnIn
from adammcmc.samplers.corrected import CorrectedMALA
from adammcmc.samplers.processes import check_not_distributed
from adammcmc.samplers.progress import Bar, show_bar
from adammcmc.samplers.sampler import Sampler
from adammcmc.samplers.stacked import CannotStack, Setup, StackedSampler, setup_of
from adammcmc.target.data import Data, as_data, derive_seed, to_device
from adammcmc.target.likelihood import DataExamples, Likelihood, Loss, as_likelihood, likelihood_of
from adammcmc.target.randomness import streams
from adammcmc.target.target import Prior

__all__ = ["forecast_size", "sample"]

_logger = logging.getLogger("adammcmc")
_CHECKPOINT_SECONDS = 60.0  # between draws that are far apart


def sample(
    model: nn.Module,
    train: Any,
    loss: Callable[..., Tensor],
    *,
    sampler: Factory | None = None,
    batch_size: int | None = None,
    prior: Prior | None = None,
    num_draws: int = 200,
    gap: int = 50,
    burn_in: int | BurnIn | None = None,
    num_chains: int = 1,
    stacked: bool | None = None,
    seed: int = 0,
    path: str | Path | None = None,
    resume: bool = False,
    keep: Literal["draws", "moments"] | int = "draws",
    dtype: torch.dtype | None = None,
    initial: Sequence[Mapping[str, Tensor]] | None = None,
    warm_start: torch.optim.Optimizer | Mapping[str, Any] | None = None,
    scheduler: Callable[[Sampler], LRScheduler] | None = None,
    callbacks: Sequence[Callback] = (),
    likelihood: str | Likelihood | None = None,
    num_data: int | None = None,
    config: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Posterior:
    """Draw a network's weights from its posterior.

    The model's weights, buffers and modes are as before when this returns; it is sampled in the modes it is in (`train` or
    `eval`). `posterior.target` says what was sampled.

    Args:
        model: trained, best; the chains start from its weights.
        train: tensors (inputs, targets), on any device; arrays or paths of .npy files, which are mapped; a Dataset; a
            DataLoader, whose data set, batch size, collation and workers are taken over. See `as_data`.
        loss: of outputs and targets, such as `F.cross_entropy`, or of model and batch (call its first argument `model`).
            Regression: `GaussianNLL(noise)`.
        sampler: makes the sampler from parameters, such as `partial(AdamMCMC, lr=1e-3, sigma=3e-4, sigma_along=2.0)`; num_data,
            generator, and whether the data are fixed are filled in. None is `Underdamped`, exact: on all data at once, or with
            `FullData()` on batches. lr, sigma, sigma_along, step_size and inverse_temperature may be tensors with one number
            for each chain: a scan in one run (`posterior.settings(chain)` says which is which).
        batch_size: None is the DataLoader's; otherwise all data at once.
        prior: given to the sampler. None: a sampler that needs one and was given none gets `Gaussian.fan_in(model, 2.0)`.
        num_draws: of each chain.
        gap: steps between two draws.
        burn_in: steps before the chain counts; the first draw comes `gap` steps later. A sampler that finds its settings itself
            does so in them (0 is then an error). A `BurnIn` makes any sampler adapt. None: until the sampler's own adaptation
            ends; without one, a quarter of the steps that follow.
        num_chains: how many, each with its own random numbers.
        stacked: True runs all chains at once, their weights stacked, the model under `torch.func.vmap`. They then share the
            batches (not the noise), adapt to their mean acceptance, and stop and go on together. False: one after the other,
            each with an order of the data of its own. None stacks on an accelerator, where it can be done (not
            a ParticleNet, which is faster alone).
        seed: fixes every random number: noise, order of the data, dropout.
        path: a folder for the draws; None keeps them in memory.
        resume: go on with the run in `path`, bit for bit, or start it if there is none. Everything must be as it was, but
            `num_draws` may grow. (Bit for bit with the same versions, device and number of threads; others are warned of.)
        keep: "draws", or "moments" (mean and variance of the weights only), or a number: moments and the last k draws.
        dtype: of the stored draws; None is that of the weights.
        initial: one state dictionary for each chain to start from, such as the members of an ensemble.
        warm_start: an optimizer (or its state) whose moments `AdamMCMC` takes over.
        scheduler: makes a scheduler from the sampler; stepped after each step.
        callbacks: see `Callback`; `TensorBoard(folder)` writes scalars.
        likelihood: what the outputs mean, for prediction; None is what the loss says. See `Likelihood`.
        num_data: needed for iterable data without a length only.
        config: what made the model and the data, as JSON: kept in the run's `run.json`, where the command line finds it.
        progress: show a bar if standard error is a terminal.

    Returns:
        The posterior. Any exception has what was drawn before in its `result`: `NonFiniteLoss`, a lack of memory, Ctrl-C, and
        the `SystemExit` that SIGTERM and SIGHUP become at the end of their step.
    """
    _check_arguments(model, num_draws, gap, burn_in, num_chains, seed, keep, dtype, path, resume, initial, callbacks)
    num_draws, gap, num_chains, seed = int(num_draws), int(gap), int(num_chains), int(seed)  # numpy's are no JSON
    burn_in = burn_in if burn_in is None or isinstance(burn_in, BurnIn) else int(burn_in)
    keep = keep if isinstance(keep, str) else int(keep)
    path = None if path is None else Path(path).expanduser()
    compiled, model = model, bare(model)
    data = as_data(train, batch_size, num_data)
    if path is not None and data.why_not_resumable is not None:
        warn(f"this run cannot be resumed if it is interrupted: {data.why_not_resumable}.")
    device = next(model.parameters()).device
    whole = data.batch_size == data.num_data
    factory = as_factory(sampler, prior, model, whole)
    if stacked is None and resume and path is not None and (path / "run.json").exists():
        stacked = bool(read_manifest(path)["configuration"].get("stacked", False))  # as it began
    with _left_as_it_was(model, device):
        run = _Run(
            model=model,
            called=compiled,
            data=data,
            batch=to_device(data.fetch(slice(None)), device) if whole else None,
            loss=Loss(loss),
            device=device,
            factory=factory,
            scan=scanned(factory, num_chains),
            burn_in=burn_in,
            gap=gap,
            num_draws=num_draws,
            num_chains=num_chains,
            seed=seed,
            keep=keep,
            initial=initial,
            warm_start=warm_start,
            scheduler=scheduler,
            callbacks=list(callbacks),
        )
        try:
            first = run.batch if whole else to_device(next(data), device)
            run.loss.try_out(compiled, first)
            meaning = likelihood_of(loss) if likelihood is None else as_likelihood(likelihood)
            run.probe = Probe.make(model, first, run.loss, meaning)
        finally:
            data.restart(0)  # lets go of workers
        if stacked or (stacked is None and num_chains > 1 and _prefers_stacks(device, model)):
            run.stack = _stack(run, first, is_asked=stacked is True)
        chain = run.new_chain(0) if run.stack is None else run.stack
        one = chain.sampler if isinstance(chain.sampler, Sampler) else chain.sampler.prototype
        manifest = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "target": run.describe_fully(one),
            "target_at_first": run.describe(one),
            "gradients_per_step": one.gradients_per_step,
            "chains": [told(one, factory, run.scan, c) for c in range(num_chains)],
            "starts": [_checksum(state) for state in initial] if initial else [_checksum(model.state_dict())] * num_chains,
            "keep": keep,
            "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
            "has_targets": not run.loss.takes_model(first),
            "num_parts": len(first) if isinstance(first, tuple | list) else 1,
            "likelihood": meaning._asdict(),
            "configuration": {
                "sampler": type(one).__name__,
                "loss": run.loss.description,
                "prior": [str(one.target.prior), plain_json(getattr(one.target.prior, "scale", None))],
                "scheduler": type(chain.scheduler).__name__ if isinstance(chain, _Chain) and chain.scheduler else None,
                "modes (train or eval)": _modes(model),
                "num_draws": num_draws,
                "gap": gap,
                "burn_in": plain_json(burn_in),
                "num_chains": num_chains,
                "seed": seed,
                "batch_size": data.batch_size,
                "settings": settings_of(one),
                **({"stacked": True} if run.stack is not None else {}),
                **({"scan": run.scan} if run.scan else {}),
            },
            "prior": describe_prior(one.target.prior, one),
            "data": {"num_data": data.num_data, "fingerprint": data.fingerprint(), "all_rows": data.all_rows()},
            "why_not_resumable": data.why_not_resumable,
            "model": {
                "class": type(model).__name__,
                "num_params": sum(p.numel() for p in model.parameters() if p.requires_grad),
                "tensors": describe_tensors(model),
            },
            "versions": _versions(),
            "machine": _machine(device),
            **({} if config is None else {"config": json.loads(json.dumps(dict(config), allow_nan=False))}),
        }
        store = _open_store(path, manifest, run, resume)
        try:
            run.go(store, progress)
        finally:
            store.close()
            data.restart(0)  # lets go of workers
    return Posterior(store, model)


@dataclass
class _Run:
    """What all chains of a run share."""

    model: nn.Module
    called: nn.Module
    """The same, as it is called: maybe compiled."""
    data: Data
    batch: Any
    """All data, where they are one batch; None where batches change."""
    loss: Loss
    device: torch.device
    factory: Factory
    scan: dict[str, list[float]]
    """Options of the sampler that have one value for each chain."""
    burn_in: int | BurnIn | None
    gap: int
    num_draws: int
    num_chains: int
    seed: int
    keep: str | int
    initial: Sequence[Mapping[str, Tensor]] | None
    warm_start: torch.optim.Optimizer | Mapping[str, Any] | None
    scheduler: Callable[[Sampler], LRScheduler] | None
    callbacks: list[Callback]
    stack: _Stack | None = None
    """All chains at once; None where they run one after the other."""
    probe: Probe | None = None
    """Predictions that are written down with each draw."""

    def describe(self, sampler: Sampler) -> str:
        """What is sampled; of a scan, what the first chain samples, and in what the others differ."""
        others = f" | chain 0 of {self.num_chains}, which differ in {', '.join(self.scan)}" if self.scan else ""
        return sampler.describe() + others

    def describe_fully(self, sampler: Sampler) -> str:
        """The same, and how an example's losses are taken together: what a user reads, and an older run did not say."""
        return self.describe(sampler) + self.loss.averaging

    def new_chain(self, chain: int) -> _Chain:
        """A chain at its first step, with its starting weights in the model."""
        sampler = self._new_sampler(chain)
        self._restart(chain)
        return _Chain(self, chain, sampler)

    def new_stack(self) -> _Stack:
        """All chains at their first step."""
        if self.scheduler is not None:
            raise CannotStack("a `scheduler` sets the learning rate of one chain at a time")
        setups: list[Setup] = []
        prototype: Sampler | None = None
        for chain in range(self.num_chains):
            if prototype is not None and not self.scan and self.initial is None:
                setups.append(setups[0])
                continue
            sampler = self._new_sampler(chain)
            prototype = prototype or sampler
            setups.append(setup_of(sampler, self.model, setups[0] if setups else None))
        assert prototype is not None
        examples = prototype._examples
        if isinstance(examples, DataExamples):  # a compiled model is called as it is
            examples = DataExamples(self.model, self.data, self.loss, self.device)
        generator = streams([derive_seed(self.seed, chain, 0) for chain in range(self.num_chains)], self.device)
        stack = StackedSampler(prototype, self.model, self.loss, setups, generator, examples)
        stack.place(0)
        self._restart(0)
        return _Stack(self, stack)

    def _restart(self, chain: int) -> None:
        """Random numbers and the order of the data as at the first step."""
        self.data.restart(derive_seed(self.seed, chain, 1))
        torch.manual_seed(derive_seed(self.seed, chain, 2))

    def _new_sampler(self, chain: int) -> Sampler:
        if self.initial is not None:
            self.model.load_state_dict(self.initial[chain])
        factory = chain_factory(self.factory, self.scan, chain)
        generator = torch.Generator(self.device).manual_seed(derive_seed(self.seed, chain, 0))
        fill: dict[str, Any] = {"num_data": self.data.num_data, "generator": generator}
        if self.batch is not None:
            fill["fixed_data"] = True
        elif getattr(given_options(factory).get("acceptance"), "needs_examples", False) or not isinstance(
            innermost(factory), type
        ):
            fill["examples"] = DataExamples(self.called, self.data, self.loss, self.device)
        if isinstance(of := innermost(factory), type) and issubclass(of, CorrectedMALA):  # whose batches are its own
            fill["examples"] = DataExamples(self.called, self.data, self.loss, self.device)
        if isinstance(self.burn_in, BurnIn) or (self.burn_in and finds_settings(factory)):
            fill["burn_in"] = self.burn_in
        sampler = build(factory, self.model, fill)
        sampler.hold_padding(self.model)
        if sampler.target.num_data != self.data.num_data:
            raise ValueError(
                f"the sampler has num_data={sampler.target.num_data}, the data hold {self.data.num_data}: leave it out."
            )
        if sampler.fixed_data and self.batch is None:
            raise ValueError(
                f"the sampler has fixed_data=True, but batches of {self.data.batch_size} of {self.data.num_data} examples "
                "change from step to step. Leave out batch_size (all data at once), or fixed_data."
            )
        sampler.generator = generator
        if self.warm_start is not None:
            start = self.warm_start
            state = start.state_dict() if isinstance(start, torch.optim.Optimizer) else dict(start)
            state.pop("adammcmc", None)  # of a sampler only the moments: its random numbers and counts are not this chain's
            sampler.load_state_dict(state)
        return sampler

    def go(self, store: Store, progress: bool) -> None:
        """All chains to their last draw, one after the other or all at once."""
        for number in range(self.num_chains if self.stack is None else 1):
            chain = self.new_chain(number) if self.stack is None else self.stack
            with show_bar(chain.name, show=progress) as bar:
                try:
                    with deferred_interrupt() as interrupt:
                        chain.go(store, bar, interrupt)
                except BaseException as error:
                    self._add_what_is_left(error, chain, store)
                    raise

    def _add_what_is_left(self, error: BaseException, chain: _Loop, store: Store) -> None:
        """Nothing is lost: the exception says where it is, or has it."""
        error.result = Posterior(store, self.model)  # type: ignore[attr-defined]  # first: what follows may fail as well
        if isinstance(error, NonFiniteLoss):
            error.remedy = (
                "Check the data, the loss and the prior (at step 0: whether the weights lie inside its support); where they "
                "are right, take shorter steps (step_size, lr, sigma). Draws made before are kept."
            )
        with suppress(Exception):  # the error that is under way says more
            if isinstance(store, FolderStore):
                store.flush()
                error.result = Posterior(store, self.model)  # type: ignore[attr-defined]  # with what was being written
                how = "it cannot be resumed" if self.data.why_not_resumable else "the same call with resume=True continues it"
                note = f"'{store.path}' keeps {len(store.index)} draws; {how}."
            else:
                note = f"the {len(store.index)} draws so far are in the exception's `result`."
            error.add_note(note)
            if isinstance(error, SystemExit):  # whose notes nobody prints
                _logger.warning("; ".join(error.__notes__))
            if not isinstance(store, FolderStore):
                store.save(chain.key, chain.state())


class _Loop(ABC):
    """One chain, or a stack of them, and where it stands."""

    sampler: Sampler | StackedSampler
    key: int | None
    """Under which it is saved: the number of its chain, None for a stack."""

    def __init__(self, run: _Run, name: str) -> None:
        self.run, self.name = run, name
        self.burned_in_at: int | None = None
        """The step at which burn-in ended; None while it lasts."""
        self.num_draws = 0
        self._since = time.perf_counter()
        """When the draw before was made, or burn-in ended, or the run was taken up again."""
        self._burn_in = self._planned_burn_in()

    def _planned_burn_in(self) -> int | None:
        """Steps; None: as long as the sampler adapts."""
        burn_in = self.run.burn_in
        if burn_in == 0 and self.sampler.is_adapting:
            raise ValueError(
                "`burn_in` is 0, and the sampler finds its step size in burn-in. Give "
                "the sampler a `step_size`, or leave out `burn_in`."
            )
        if isinstance(burn_in, int):
            return burn_in
        if isinstance(burn_in, BurnIn) or self.sampler.is_adapting:
            return None
        return self.run.num_draws * self.run.gap // 4

    @property
    @abstractmethod
    def chains(self) -> Sequence[int]:
        """Their numbers."""

    @abstractmethod
    def _step(self, batch: Any) -> None:
        """One transition."""

    @abstractmethod
    def _draw(self, store: Store) -> None:
        """Keep the present weights."""

    @abstractmethod
    def _call(self, callbacks: Sequence[Callback], what: str, *arguments: Any) -> None:
        """Call one method of these callbacks."""

    @abstractmethod
    def _forget_burn_in(self) -> None:
        """From here on the chain counts."""

    @abstractmethod
    def _describe(self) -> str:
        """What is sampled."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that is needed to go on bit for bit."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Go to where a checkpoint stood."""

    # --- the loop -----------------------------------------------------------------------------------------------

    def go(self, store: Store, bar: Bar, interrupt: Interrupt) -> None:
        """To the last draw, or to the end of the step in which an interrupt came: then all of it is saved."""
        if (saved := store.restore(self.key, self.chains)) is None:
            raise StoreMismatch(f"{self.name} has no checkpoint.")
        try:
            self.load(saved)
        except (KeyError, IndexError, TypeError, AttributeError) as error:  # it is whole, but not what this version writes
            raise StoreCorrupt(
                f"the checkpoint of {self.name} is not one of this run ({type(error).__name__}: {error})."
            ) from error
        run, sampler, last_saved = self.run, self.sampler, time.monotonic()
        if self.num_draws >= run.num_draws:
            return
        if self.burned_in_at is None and self._is_burned_in():
            self.burned_in_at = sampler.num_steps  # there is no burn-in
        seed = derive_seed(run.seed, self.chains[0], 3, sampler.num_steps)
        self._numbers = OwnNumbers(seed, run.device)
        self._tell("on_start")
        self._since = time.perf_counter()
        while self.num_draws < run.num_draws:
            self._step(run.batch if run.batch is not None else to_device(next(run.data), run.device))
            if sampler.num_steps == 1:
                self._write_target(store)
            if self.burned_in_at is None and self._is_burned_in():
                self.burned_in_at = sampler.num_steps
                self._forget_burn_in()
                self._since = time.perf_counter()
            elif self.burned_in_at is not None and (sampler.num_steps - self.burned_in_at) % run.gap == 0:
                self._draw(store)
                last_saved = time.monotonic()
            elif time.monotonic() - last_saved > _CHECKPOINT_SECONDS and isinstance(store, FolderStore):
                store.flush()
                store.save(self.key, self.state())
                last_saved = time.monotonic()
            try:
                self._tell("on_step")
                bar.update(sampler.num_steps, self._num_steps(), self._status)
            finally:  # also where a callback or the bar fails to write to a terminal that was closed
                if interrupt.is_asked:
                    store.flush()
                    store.save(self.key, self.state())
                    raise interrupt.exception()
        store.flush()
        self._tell("on_end")

    def _tell(self, what: str, *arguments: Any) -> None:
        """Call the callbacks that have this method."""
        if callbacks := [callback for callback in self.run.callbacks if callback.overrides(what)]:
            with self._numbers:
                self._call(callbacks, what, *arguments)

    def _is_burned_in(self) -> bool:
        return not self.sampler.is_adapting and self.sampler.num_steps >= (self._burn_in or 0)

    def _num_steps(self) -> int | None:
        """In all; None while nobody knows how long burn-in takes."""
        start = self._burn_in if self.burned_in_at is None else self.burned_in_at
        return None if start is None else start + self.run.num_draws * self.run.gap

    def _status(self) -> str:
        loss, rate = float(self.sampler.info.loss.mean()), float(self.sampler.mean_acceptance_rate.mean())
        beta = float(self.sampler.beta_eff.mean())
        hot = f" beta_eff {beta:.2f}" if beta < 0.995 else ""  # (False for NaN: unknown, or no matter)
        return f"loss {loss:.3g} acceptance {rate:.2f}{hot}{' burn-in' if self.burned_in_at is None else ''}"

    def _write_target(self, store: Store) -> None:
        """The line that says what is sampled, now that the layers are known."""
        if self.key:
            return  # the first chain has said it
        store.manifest["target"] = self._describe()
        if isinstance(store, FolderStore):
            store.write_manifest()

    def _seconds(self) -> float:
        """Since the draw before; the device has been waited for."""
        since, self._since = self._since, time.perf_counter()
        return self._since - since

    # --- what both save -----------------------------------------------------------------------------------------

    def _shared_state(self) -> dict[str, Any]:
        """The order of the data, torch's global random numbers, and how far the run is."""
        run = self.run
        return {
            "data": run.data.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(run.device) if run.device.type == "cuda" else None,
            "burn_in": self._burn_in,
            "burned_in_at": self.burned_in_at,
            "num_draws": self.num_draws,
            "callbacks": callback_states(run.callbacks, self.chains),
        }

    def _load_shared(self, state: dict[str, Any]) -> None:
        run = self.run
        if state["data"]:
            run.data.load_state_dict(state["data"])
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None and run.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"], run.device)
        self._burn_in, self.burned_in_at, self.num_draws = state["burn_in"], state["burned_in_at"], state["num_draws"]
        load_callback_states(run.callbacks, self.chains, state.get("callbacks", []))


class _Chain(_Loop):
    """One chain: its sampler, and where it stands."""

    sampler: Sampler

    def __init__(self, run: _Run, chain: int, sampler: Sampler) -> None:
        self.key = self.chain = chain
        self.sampler = sampler
        super().__init__(run, f"chain {chain + 1}/{run.num_chains}" if run.num_chains > 1 else type(sampler).__name__)
        self.scheduler = None if run.scheduler is None else build_scheduler(run.scheduler, sampler)
        self._loss = functools.partial(run.loss, run.called)  # one object, so that a captured step knows it again
        self.moments = None if run.keep == "draws" else Moments()
        self._sums: dict[str, float] = {}

    @property
    def chains(self) -> Sequence[int]:
        return [self.chain]

    def _step(self, batch: Any) -> None:
        self.sampler.step(self._loss, batch)
        if self.scheduler is not None:
            self.scheduler.step()

    def _forget_burn_in(self) -> None:
        self._sums = {}
        self.sampler.reset_health()

    def _draw(self, store: Store) -> None:
        sampler = self.sampler
        loss = float(sampler.present_loss())
        sampler.check()  # the device has been waited for: a frozen chain is known by now
        prior = sampler.target.prior
        trainable = [p.detach() for group in sampler.param_groups for p in group["params"] if p.requires_grad]
        log_prior = 0.0 if prior is None else float(prior.log_density(trainable))
        sums = sampler.health_sums()
        record = _record(
            self.chain,
            self.num_draws,
            sampler.num_steps,
            loss,
            sampler.target.scale * loss - log_prior,
            bool(sampler.info.is_accepted),
            sums,
            self._sums,
            self._seconds(),
        )
        tensors = sampler.draw(self.run.model)
        if self.run.probe is not None:
            record["probe"] = self.run.probe(tensors)
        if self.moments is not None:
            self.moments.add(tensors)
        self.num_draws += 1
        self._sums = sums
        if isinstance(store, FolderStore) or self.num_draws == self.run.num_draws:
            store.commit(record, tensors, self.state())
        else:
            store.append(record, tensors)
        self._tell("on_draw", record)

    def _describe(self) -> str:
        return self.run.describe_fully(self.sampler)

    def _call(self, callbacks: Sequence[Callback], what: str, *arguments: Any) -> None:
        sampler = self.sampler
        event = Event(self.chain, sampler.num_steps, self.num_draws, self.burned_in_at is None, sampler, self.run.model)
        for callback in callbacks:
            getattr(callback, what)(event, *arguments)

    # --- the checkpoint -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "model": {name: x.detach() for name, x in _tensors(self.run.model)},
            "sampler": self.sampler.state_dict(),
            "scheduler": None if self.scheduler is None else _plain_state(self.scheduler),
            **self._shared_state(),
            "sums": self._sums,
            "moments": None if self.moments is None else self.moments.state_dict(),
            "health": self.sampler.health_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        _put(self.run.model, state["model"])
        self.sampler.load_state_dict(state["sampler"])
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self._load_shared(state)
        self._sums = dict(state["sums"])
        self.moments = None if state["moments"] is None else Moments(state["moments"])


class _Stack(_Loop):
    """All chains at once, and where they stand."""

    sampler: StackedSampler

    def __init__(self, run: _Run, sampler: StackedSampler) -> None:
        self.key, self.sampler = None, sampler
        super().__init__(run, f"{run.num_chains} chain{'s' * (run.num_chains > 1)} at once")
        self.moments = None if run.keep == "draws" else [Moments() for _ in self.chains]
        self._sums: list[dict[str, float]] = [{} for _ in self.chains]

    @property
    def chains(self) -> Sequence[int]:
        return range(self.run.num_chains)

    def _step(self, batch: Any) -> None:
        self.sampler.step(batch)

    def _forget_burn_in(self) -> None:
        self._sums = [{} for _ in self.chains]
        self.sampler.reset_health()

    def _draw(self, store: Store) -> None:
        stack = self.sampler
        numbers = torch.stack([stack.present_loss().double(), stack.log_prior(), stack.info.is_accepted.double()], 1).tolist()
        stack.check()  # the device has been waited for: a frozen chain is known by now
        sums = stack.health_sums()
        records, seconds = [], self._seconds()
        for chain, (loss, log_prior, is_accepted) in enumerate(numbers):
            potential = stack.targets[chain].scale * loss - log_prior
            numbers_of = chain, self.num_draws, stack.num_steps, loss, potential, bool(is_accepted)
            records.append(_record(*numbers_of, sums[chain], self._sums[chain], seconds))
        tensors = stack.draws()
        if self.run.probe is not None:
            for record, values in zip(records, self.run.probe.stacked(tensors), strict=True):
                record["probe"] = values
        if self.moments is not None:
            host = {name: x.cpu() for name, x in tensors.items()}
            for chain, moments in enumerate(self.moments):
                moments.add({name: x[chain] for name, x in host.items()})
        self.num_draws += 1
        self._sums = sums
        is_saved = isinstance(store, FolderStore) or self.num_draws == self.run.num_draws
        store.commit_all(records, tensors, self.state() if is_saved else None)
        self._tell("on_draw", records)

    def _describe(self) -> str:
        return self.run.describe_fully(self.sampler.prototype)

    def _call(self, callbacks: Sequence[Callback], what: str, *arguments: Any) -> None:
        for chain in self.chains:
            self.sampler.place(chain)
            own = [argument[chain] for argument in arguments]
            view, is_burning_in = self.sampler.chain(chain), self.burned_in_at is None
            event = Event(chain, self.sampler.num_steps, self.num_draws, is_burning_in, view, self.run.model)
            for callback in callbacks:
                getattr(callback, what)(event, *own)

    # --- the checkpoint -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "sampler": self.sampler.state_dict(),
            **self._shared_state(),
            "sums": self._sums,
            "moments": None if self.moments is None else [m.state_dict() for m in self.moments],
            "health": self.sampler.prototype.health_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self._load_shared(state)
        self._sums = [dict(sums) for sums in state["sums"]]
        self.moments = None if state["moments"] is None else [Moments(m) for m in state["moments"]]


def _record(
    chain: int,
    draw: int,
    step: int,
    loss: float,
    potential: float,
    is_accepted: bool,
    sums: dict[str, float],
    before: dict[str, float],
    seconds: float,
) -> dict[str, Any]:
    """A draw's line in the index; `sums` are those of the chain's health, now and at the draw before."""
    since = {key: value - before.get(key, 0.0) for key, value in sums.items()}
    return {
        "draw": draw,
        "chain": chain,
        "step": step,
        "loss": loss,
        "potential": potential,
        "acceptance_rate": since["rate"] / max(1.0, since["num_steps"]),
        "num_accepted": round(since["accepted"]),
        "is_accepted": is_accepted,
        "seconds": round(seconds, 6),
        "health": sums,
    }


def _prefers_stacks(device: torch.device, model: nn.Module) -> bool:
    """Whether many chains at once are much faster: where a step is bound by launches, not by arithmetic.

    A layer that has kernels of its own for one chain, which vmap cannot use, says so by `is_fast_alone`.
    """
    return device.type == "cuda" and not any(getattr(module, "is_fast_alone", False) for module in model.modules())


def _stack(run: _Run, first: Any, *, is_asked: bool) -> _Stack | None:
    """All chains at once; where that cannot be done, a warning and None, or an error if it was asked for."""
    try:
        stack = run.new_stack()
        stack.sampler.try_out(first)
    except CannotStack as why:
        if is_asked:
            raise CannotStack(
                f"the chains cannot be run at once: {why}. Pass stacked=False to run one after the other."
            ) from why
        warn(f"the chains run one after the other, since they cannot be run at once: {why}.")
        return None
    return stack


# --- the store ------------------------------------------------------------------------------------------------------------


def _open_store(path: Path | None, manifest: dict[str, Any], run: _Run, resume: bool) -> Store:
    """A new store with every chain's first checkpoint, or the one that is there."""
    size = forecast_size(
        run.model, num_draws=run.num_draws, num_chains=run.num_chains, keep=manifest["keep"], dtype=manifest["dtype"]
    )
    if path is None:
        _check_memory(size)
        store: Store = MemoryStore(manifest)
    elif resume and (path / "run.json").exists():
        return _reopened(path, manifest, run)
    else:
        check_space(path, size)
        _logger.info(f"writing about {format_bytes(size)} to '{path}'")
        store = FolderStore(path, manifest)
    try:
        if run.stack is not None:
            store.save(None, run.stack.state())
        for chain in range(run.num_chains if run.stack is None else 0):
            store.save(chain, run.new_chain(chain).state())
        if isinstance(store, FolderStore):
            store.write_manifest()  # last: from here on the folder holds a run
    except BaseException:
        store.close()
        raise
    return store


def _reopened(path: Path, manifest: dict[str, Any], run: _Run) -> FolderStore:
    store = FolderStore(path, writes=True)
    try:
        _check_same_run(store.manifest, manifest, run, path)
        _note_machine(store.manifest, manifest, path)
        store.manifest["configuration"]["num_draws"] = run.num_draws
        store.manifest |= {key: manifest[key] for key in ("config",) if key in manifest}
        store.write_manifest()
    except BaseException:
        store.close()
        raise
    return store


def _check_same_run(before: dict[str, Any], now: dict[str, Any], run: _Run, folder: Path) -> None:
    what = f"the run in '{folder}'"
    check_model(before["model"]["tensors"], run.model, what)
    if run.data.why_not_resumable is not None:
        raise StoreMismatch(f"{what} cannot go on: {run.data.why_not_resumable}.")
    pairs = {
        **{key: (before["configuration"].get(key), now["configuration"].get(key)) for key in ("stacked", "scan")},
        **{key: (before["configuration"].get(key), value) for key, value in now["configuration"].items()},
        "keep": (before["keep"], now["keep"]),
        "dtype": (before["dtype"], now["dtype"]),
        "likelihood": (before["likelihood"], now["likelihood"]),
        "num_data": (before["data"]["num_data"], now["data"]["num_data"]),
        "target": (before["target_at_first"], now["target_at_first"]),
    }
    for key, (old, new) in pairs.items():
        if key == "num_draws" and new < old:
            raise StoreMismatch(
                f"{what} was to have {old} draws, this call asks for {new}: it may ask for more, not for fewer."
            )
        if key != "num_draws" and old != new:
            raise StoreMismatch(f"{what} has {key} = {old}, this call has {new}. To go on, everything must be as it was.")
    if (difference := prior_difference(before.get("prior"), now["prior"])) is not None:
        raise StoreMismatch(f"{what} was made with another prior: {difference}. To go on, everything must be as it was.")
    rows, new_rows = before["data"].get("all_rows") or "", now["data"]["all_rows"] or ""
    # of other parts of the data (a Dataset then, tensors now) nothing follows
    are_others = rows.partition(":")[0] == new_rows.partition(":")[0] and rows != new_rows
    if before["data"]["fingerprint"] != now["data"]["fingerprint"] or are_others:
        raise StoreMismatch(f"{what} was made with other data: their values differ from those of this call.")


_BITS = ("adammcmc", "torch", "numpy")
"""Versions that a random number or a sum may depend on."""


def _note_machine(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Warn where the run continues on what may round differently, and record it."""
    last = (before.get("resumed") or [before])[-1]
    old, new = ({**{name: x["versions"].get(name) for name in _BITS}, **x.get("machine", now["machine"])} for x in (last, now))
    differences = [f"{name} {old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name]]
    if differences:
        warn(
            f"the run in '{folder}' continues in another environment ({', '.join(differences)}): the draws from here on "
            "are valid, but not bit for bit those of the original environment."
        )
        before.setdefault("resumed", []).append({key: now[key] for key in ("created", "versions", "machine")})


def forecast_size(
    model: nn.Module, *, num_draws: int, num_chains: int, keep: str | int = "draws", dtype: str | None = None
) -> int:
    """Bytes of all draws and checkpoints of a run, as `sample` would store it."""
    kind = None if dtype is None else torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    tensors = [x for x in model.state_dict().values() if isinstance(x, Tensor)]
    one = sum(x.numel() * (kind if kind is not None and x.is_floating_point() else x.element_size()) + 128 for x in tensors)
    weights = sum(x.numel() * x.element_size() + 128 for x in tensors)
    kept = min(keep + 2, num_draws) if isinstance(keep, int) else (num_draws if keep == "draws" else 0)
    moments = 0 if keep == "draws" else 16 * sum(x.numel() for x in tensors)
    # a checkpoint holds weights and two moments; the one before is kept, and there is a third while they are replaced
    return int(num_chains) * (kept * (one + 900) + num_draws * 900 + 3 * (4 * weights + moments + 50_000))


def _check_memory(size: int) -> None:
    free = free_memory()
    if free is not None and size > free:
        raise MemoryError(
            f"the draws would take {format_bytes(size)} of memory, and {format_bytes(free)} are free. Pass `path` to keep them "
            "on disk, or keep fewer (`num_draws`, keep=k, keep='moments', dtype=torch.bfloat16)."
        )


# --- small things ---------------------------------------------------------------------------------------------------------


def _check_arguments(
    model: nn.Module,
    num_draws: int,
    gap: int,
    burn_in: int | BurnIn | None,
    num_chains: int,
    seed: int,
    keep: str | int,
    dtype: torch.dtype | None,
    path: str | Path | None,
    resume: bool,
    initial: Sequence[Mapping[str, Tensor]] | None,
    callbacks: Sequence[Callback],
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}.")
    check_not_distributed(model)
    if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
        raise ValueError("the model has lazy layers that have not met data yet: call it on one batch first.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient: there is nothing to sample.")
    for name, value, least in (
        ("num_draws", num_draws, 1),
        ("gap", gap, 1),
        ("num_chains", num_chains, 1),
        ("seed", seed, 0),
        ("burn_in", burn_in, 0),
        ("keep", keep, 1),
    ):
        if value is None or isinstance(value, BurnIn | str):
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
            raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}.")
    if isinstance(keep, str) and keep not in ("draws", "moments"):
        raise ValueError(f"`keep` must be 'draws', 'moments' or a number of last draws, got {keep!r}.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and can_store(dtype)):
        raise ValueError(f"`dtype` must be a floating torch.dtype, such as torch.bfloat16, got {dtype!r}.")
    if resume and path is None:
        raise ValueError("resume=True needs `path`, the folder of the run.")
    if initial is not None and len(initial) != num_chains:
        raise ValueError(f"`initial` must have one state dictionary for each of {num_chains} chains, got {len(initial)}.")
    if not isinstance(callbacks, list | tuple):
        raise TypeError(f"`callbacks` must be a list of callbacks, got {type(callbacks).__name__}.")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise TypeError(f"`callbacks` must hold instances of adammcmc.Callback, got {type(callback).__name__}.")


def _modes(model: nn.Module) -> str:
    """Of the network, and which of its modules are in the other one."""
    words = {True: "train", False: "eval"}
    others = [name for name, module in model.named_modules() if module.training != model.training]
    return words[model.training] + (f"; {words[not model.training]}: {', '.join(others)}" if others else "")


@contextmanager
def _left_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Weights, buffers, modes and torch's global random numbers are after it what they were before."""
    before = {name: x.detach().clone() for name, x in _tensors(model)}
    absent = [(module, name) for module in model.modules() for name, x in module._buffers.items() if x is None]
    grads = [(p, p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            for p, grad in grads:
                p.grad = grad
            for module, name in absent:
                module._buffers[name] = None
            _put(model, before)


def _put(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write all parameters and buffers."""
    with torch.no_grad():
        for name, x in _tensors(model):
            if name not in values:
                continue  # a buffer that came up in a forward
            if x.is_contiguous() or isinstance(x, nn.Parameter):
                x.copy_(values[name])
                continue
            owner, _, last = name.rpartition(".")  # a view that cannot be written to, an expanded number for example
            model.get_submodule(owner)._buffers[last] = values[name].to(x.device).clone()


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers, each once, those that no state dictionary has included."""
    return [*model.named_parameters(), *model.named_buffers()]


def _checksum(state: Mapping[str, Tensor]) -> int:
    """Tells weights from others."""
    checksum = 0
    for name in sorted(state):
        if isinstance(x := state[name], Tensor):
            checksum = zlib.crc32(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def _plain_state(scheduler: LRScheduler) -> dict[str, Any]:
    return {key: value for key, value in scheduler.state_dict().items() if not callable(value)}


def _machine(device: torch.device) -> dict[str, Any]:
    """What rounding depends on besides versions: in another order of its terms a sum has other last digits."""
    settings = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
    if device.type != "cuda":
        kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else device.type
        return {"device": kind, "threads": torch.get_num_threads(), **settings}
    return {
        "device": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "cudnn deterministic": torch.backends.cudnn.deterministic,
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "cudnn tf32": torch.backends.cudnn.allow_tf32,
        **settings,
    }


def _versions() -> dict[str, str]:
    import adammcmc

    return {
        "adammcmc": adammcmc.__version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
