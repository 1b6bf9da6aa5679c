"""A plan while it is carried out: its model, data, loss and samplers, and the store of its draws.

Chains run one after another, or all at once. Each starts from a checkpoint (a new one from that of step 0), so that
every run takes the path of a resumed one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from adammcmc.backends.streams import streams
from adammcmc.errors import NonFiniteLoss, warn
from adammcmc.posterior.posterior import Posterior, bare
from adammcmc.posterior.predictive import Probe
from adammcmc.posterior.store.archives import check_fits, check_space, format_bytes
from adammcmc.posterior.store.encoding import stored_dtype
from adammcmc.posterior.store.folder import FolderStore, MemoryStore, Store, read_manifest
from adammcmc.posterior.store.records import MANIFEST
from adammcmc.runs.checkpoint import state_of
from adammcmc.runs.chunks import in_parts, is_mean, rows_at_once
from adammcmc.runs.factory import as_factory, build, check_tuned, finds_settings, given_options, innermost, scanned
from adammcmc.runs.interrupts import deferred_interrupt
from adammcmc.runs.loop import Loop, OneChain
from adammcmc.runs.manifest import check_same_run, new_manifest, note_environment
from adammcmc.runs.members import Members, TrainMembers
from adammcmc.samplers.adaptation import BurnIn
from adammcmc.samplers.chains import Chains
from adammcmc.samplers.corrected import CorrectedMALA
from adammcmc.samplers.modules import is_batch_norm, restored
from adammcmc.samplers.progress import show_bar
from adammcmc.samplers.sampler import Sampler
from adammcmc.samplers.stacked import CannotStack, Setup, StackedChains, setup_of, stack
from adammcmc.target.batches import Batch, Parts, to_device
from adammcmc.target.data import Order, as_data, derive_seed
from adammcmc.target.likelihood import DataExamples, Loss, as_likelihood, likelihood_of

if TYPE_CHECKING:
    from adammcmc.runs.plan import Plan

__all__ = ["Session", "forecast_size", "prefers_stack"]

_logger = logging.getLogger("adammcmc")


class Session:
    """What all chains of a run share. Use it inside `prepared`.

    Args:
        plan: what to run. `plan.model` is what is called, and may be compiled; `model` is the bare module.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.model = plan, bare(plan.model)
        self.device = next(self.model.parameters()).device
        self.data = as_data(plan.train, plan.batch_size, plan.num_data)
        if plan.path is not None and self.data.why_not_resumable is not None:
            warn(f"this run cannot be resumed if it is interrupted: {self.data.why_not_resumable}.")
        self._is_resumed = plan.resume and (plan.folder / MANIFEST).exists()
        self._divided = getattr(innermost(plan.sampler), "divides_data", False)  # into batches which are a sampler's own
        self._part_size = plan.chunk_size
        if self._divided and self.data.batch_size != self.data.num_data:
            if plan.chunk_size is not None:
                raise ValueError("the batches are evaluated one at a time: give `batch_size` or `chunk_size`, not both.")
            self._part_size, self.data = self.data.batch_size, self.data.undivided()
        self.has_fixed_data = self.data.batch_size == self.data.num_data  # every batch is the whole data set
        if plan.chunk_size is not None and not self.has_fixed_data:
            raise ValueError(
                f"`chunk_size` is for steps that use all data, but these use batches of {self.data.batch_size} of "
                f"{self.data.num_data} examples: leave out one of the two. (`FullData` has a `chunk_size` of its own.)"
            )
        self.factory = as_factory(plan.sampler, plan.prior, self.model, self.has_fixed_data)
        order: Order = getattr(innermost(self.factory), "batch_order", "shuffled")
        if order != "shuffled" and not self.has_fixed_data:
            self.data = self.data.in_the_order(order)
        self.scan = scanned(self.factory, plan.num_chains)  # sampler options with one value per chain
        check_tuned(self.factory, plan.records, self.scan)
        self.loss = Loss(plan.loss)
        self.likelihood = likelihood_of(plan.loss) if plan.likelihood is None else as_likelihood(plan.likelihood)
        self.prototype: Sampler  # the newest of chain 0
        self.first_batch: Any = None  # or a part of it
        self.whole: Any = None  # all data, of a step that uses them all
        self.chunk_size: int | None = None  # examples in a part of them
        starts = plan.initial
        self.initial = None if isinstance(starts, TrainMembers) else starts  # a state dictionary of each chain, once trained
        if isinstance(starts, TrainMembers):
            starts.check(self.data)
        self.members: Members | None = None  # trained by this session
        self.probe: Probe | None = None  # predictions that are stored with each draw
        self.stack: StackedChains | None = None  # all chains at once; None where they run one after another

    @contextmanager
    def prepared(self) -> Iterator[Session]:
        """Evaluates the loss once and decides whether to stack. At the end the model and the data are as before."""
        with restored(self.model, self.device):
            try:
                if self.has_fixed_data:
                    self.whole = self._all_data()
                    self.first_batch = to_device(self.whole[0], self.device) if isinstance(self.whole, Parts) else self.whole
                else:
                    self.first_batch = to_device(next(self.data), self.device)
                self.loss.try_out(self.plan.model, self.first_batch)
                self.probe = Probe.make(self.model, self.first_batch, self.loss, self.likelihood)
                self.data.restart(0)
                self.stack = self._new_stack()
                yield self
            finally:
                self.data.restart(0)  # ends its workers

    def _all_data(self) -> Batch:
        """The whole data set: on the model's device, if it fits there, and in parts, if not all can be evaluated at once."""
        plan, data, size = self.plan, self.data, self._part_size
        if size is None and self._is_resumed:  # as the run was started
            size = read_manifest(plan.folder)["configuration"].get("chunk_size", data.num_data)
        if size is None:
            together = plan.num_chains if plan.stacked or (plan.stacked is None and self._prefers_stack) else 1
            size = rows_at_once(plan.model, self.loss, data, self.device, together)
        if size is None or size >= data.num_data:
            if self._divided:
                raise ValueError(
                    f"{innermost(plan.sampler).__name__} takes its forces from batches: set `batch_size`, below the "
                    f"{data.num_data} examples that there are."
                )
            return to_device(data.fetch(slice(None)), self.device)
        if any(is_batch_norm(m) and m.training for m in self.model.modules()):
            raise ValueError(
                "`chunk_size` would change the target: BatchNorm in training mode takes its statistics from what is evaluated "
                "at a time. Leave it out, or call model.eval()."
            )
        if not is_mean(plan.model, self.loss, data, self.device):
            raise ValueError(
                f"the {data.num_data} examples are evaluated {size} at a time, and the loss of a batch is not the mean "
                "of those of its halves: the target would depend on the chunks. Use a loss that is a mean over examples, or "
                f"set chunk_size={data.num_data} to evaluate all at once, if there is memory for it."
            )
        self.chunk_size = size
        generator = torch.Generator().manual_seed(derive_seed(plan.seed, -1)) if self._divided else None
        return in_parts(data, size, self.device, generator)

    def _new_stack(self) -> StackedChains | None:
        """All chains at once, if required or preferred; None, with a warning, if preferred and impossible."""
        is_required = self.plan.stacked
        if is_required is None and self._is_resumed:  # as the run was started
            is_required = bool(read_manifest(self.plan.folder)["configuration"].get("stacked", False))
        if not (self._prefers_stack if is_required is None else is_required):
            return None
        try:
            chains = self._join_chains()
            chains.try_out(self.first_batch)
        except CannotStack as why:
            if is_required:
                raise CannotStack(f"the chains cannot be stacked: {why}. Pass stacked=False to run them sequentially.") from why
            warn(f"the chains run sequentially, because they cannot be stacked: {why}.")
            return None
        return chains

    @property
    def _prefers_stack(self) -> bool:
        return self.plan.num_chains > 1 and prefers_stack(self.device, self.model)

    def _join_chains(self) -> StackedChains:
        plan = self.plan
        if plan.scheduler is not None:
            raise CannotStack("a `scheduler` sets the learning rate of one chain at a time")
        prototype = self.new_sampler(0)
        setups: list[Setup] = [setup_of(prototype, self.model, None)]
        for chain in range(1, plan.num_chains):
            is_like_first = not self.scan and self.initial is None and len(self.plan.records) < 2
            setups.append(setups[0] if is_like_first else setup_of(self.new_sampler(chain), self.model, setups[0]))
        examples = prototype.network.examples
        if isinstance(examples, DataExamples):  # vmap needs the uncompiled model
            examples = DataExamples(self.model, self.data, self.loss, self.device)
        generator = streams([derive_seed(plan.seed, chain, 0) for chain in range(plan.num_chains)], self.device)
        chains = stack(prototype, self.model, self.loss, setups, generator, examples)
        chains.place(0)
        self.restart(0)
        return chains

    def next_batch(self) -> Any:
        """On the model's device."""
        return self.whole if self.has_fixed_data else to_device(next(self.data), self.device)

    def probed(self, tensors: dict[str, Tensor]) -> list[list[float]]:
        """The predictions of a draw of each chain, tensors (chains, ...); empty without a probe."""
        if self.probe is None:
            return []
        is_one = len(next(iter(tensors.values()))) == 1
        return [self.probe({name: x[0] for name, x in tensors.items()})] if is_one else self.probe.stacked(tensors)

    def describe(self, chains: Chains, *, is_full: bool = True) -> str:
        """The realised target, of a scan that of its first chain. `is_full` adds how an example's losses are averaged."""
        scan = f" | chain 0 of {self.plan.num_chains}, which differ in {', '.join(self.scan)}" if self.scan else ""
        return chains.describe() + scan + (self.loss.averaging if is_full else "")

    # --- the chains ---------------------------------------------------------------------------------------------

    @property
    def keys(self) -> list[int | None]:
        """Of the loops of this run: one per chain, or one for all."""
        return list(range(self.plan.num_chains)) if self.stack is None else [None]

    def new_loop(self, key: int | None) -> Loop:
        """The chain of this number at its first step, with its weights in the model; None: all chains at once."""
        if key is None:
            assert self.stack is not None
            return Loop(self, self.stack, None)
        sampler = self.new_sampler(key)
        self.restart(key)
        scheduler = None if self.plan.scheduler is None else _build_scheduler(self.plan.scheduler, sampler)
        return Loop(self, OneChain(sampler, self), key, scheduler)

    def restart(self, chain: int) -> None:
        """Reset the data order and torch's global random numbers to those of the chain's first step."""
        self.data.restart(derive_seed(self.plan.seed, chain, 1))
        torch.manual_seed(derive_seed(self.plan.seed, chain, 2))

    def options(self, chain: int) -> dict[str, Any]:
        """The options of the sampler that belong to one chain: of a scan, or of an earlier burn-in."""
        return {name: values[chain] for name, values in self.scan.items()} | self.plan.tuned(chain)

    def new_sampler(self, chain: int) -> Sampler:
        """The sampler of a chain, with its starting weights in the model."""
        plan, data = self.plan, self.data
        if self.initial is not None:
            self.model.load_state_dict(self.initial[chain])
        factory = functools.partial(self.factory, **self.options(chain))
        generator = torch.Generator(self.device).manual_seed(derive_seed(plan.seed, chain, 0))
        options: dict[str, Any] = {"num_data": data.num_data, "generator": generator}
        made_by, acceptance = innermost(factory), given_options(factory).get("acceptance")
        is_function = not isinstance(made_by, type)
        needs_examples = is_function or (acceptance is not None and acceptance.needs_examples)
        if self.has_fixed_data:
            options["fixed_data"] = True
        if hasattr(made_by, "batch_order"):
            options["batch_size"] = data.batch_size
        if (needs_examples and not self.has_fixed_data) or (not is_function and issubclass(made_by, CorrectedMALA)):
            options["examples"] = DataExamples(plan.model, data, self.loss, self.device)
        if isinstance(plan.burn_in, BurnIn) or (plan.burn_in and finds_settings(factory)):
            options["burn_in"] = plan.burn_in
        sampler = build(factory, self.model, options)
        sampler.hold_padding(self.model)
        if sampler.target.num_data != data.num_data:
            raise ValueError(
                f"the sampler has num_data={sampler.target.num_data}, the data set holds {data.num_data} examples: leave out "
                "`num_data`."
            )
        if sampler.fixed_data and not self.has_fixed_data:
            raise ValueError(
                f"the sampler has fixed_data=True, but batches of {data.batch_size} of {data.num_data} examples change from "
                "step to step. Leave out batch_size (all data at once), or fixed_data."
            )
        sampler.generator = generator
        sampler.chains.tuned_to = plan.tuned_to(chain)
        self.prototype = sampler if chain == 0 else self.prototype
        if plan.warm_start is not None:
            start = plan.warm_start
            state = start.state_dict() if isinstance(start, torch.optim.Optimizer) else dict(start)
            state.pop("adammcmc", None)  # of a sampler only the moments, not its random numbers and counters
            sampler.load_state_dict(state)
        return sampler

    def run(self) -> Store:
        """Run all chains to their last draw, from their start or from the checkpoints of the run to resume."""
        self._train_members()
        manifest = self.manifest()
        with closing(self._open_store(manifest)) as store:
            self._prepare_store(store, manifest)
            for key in self.keys:
                loop = self.new_loop(key)
                with show_bar(loop.name, show=self.plan.progress) as bar:
                    try:
                        with deferred_interrupt() as interrupt:
                            loop.run(store, bar, interrupt)
                    except BaseException as error:
                        self._attach_draws(error, loop, store)
                        raise
        return store

    def _train_members(self) -> None:
        """Train what the chains start from, if the plan says so. A resumed run has its starts, or what became of them.

        Nothing is written before: a run that is stopped here leaves no folder.
        """
        plan = self.plan
        if not isinstance(plan.initial, TrainMembers) or self._is_resumed:
            return
        options: dict[str, Any] = {"seed": plan.seed, "progress": plan.progress}
        members = plan.initial.train(self.model, self.data, self.loss, self.likelihood, plan.num_chains, **options)
        _logger.info(str(members))
        self.initial = self.members = members
        if self.stack is not None:
            self.stack = self._join_chains()

    def _attach_draws(self, error: BaseException, loop: Loop, store: Store) -> None:
        """Make the completed draws available from the exception, and note where they are."""
        error.result = Posterior(store, self.model)  # type: ignore[attr-defined]  # first: the rest may fail too
        if isinstance(error, NonFiniteLoss):
            error.remedy = (
                "Check the data, the loss and the prior (at step 0: whether the weights lie inside its support). If they are "
                "right, take shorter steps (step_size, lr, sigma). Earlier draws are kept."
            )
        with suppress(Exception):  # the original error matters more
            store.flush()
            error.result = Posterior(store, self.model)  # type: ignore[attr-defined]  # with what was being written
            how = "it cannot be resumed" if self.data.why_not_resumable else "the same call with resume=True continues it"
            count = len(store.index)
            error.add_note(
                f"'{store.path}' keeps {count} draws; {how}."
                if store.is_durable
                else f"the {count} draws so far are in the exception's `result`."
            )
            if isinstance(error, SystemExit):  # Python does not print its notes
                _logger.warning("; ".join(error.__notes__))
            if not store.is_durable:
                store.save(loop.key, state_of(loop))

    # --- the store ----------------------------------------------------------------------------------------------

    def manifest(self) -> dict[str, Any]:
        """What `run.json` stores."""
        return new_manifest(self, self.new_loop(self.keys[0]))

    def _open_store(self, manifest: dict[str, Any]) -> Store:
        plan = self.plan
        if self._is_resumed:
            return FolderStore(plan.folder, writes=True)
        size = forecast_size(
            self.model, num_draws=plan.num_draws, num_chains=plan.num_chains, keep=plan.keep, dtype=manifest["dtype"]
        )
        if plan.path is None:
            fewer = "keep fewer (`num_draws`, keep=k, keep='moments', dtype=torch.bfloat16)"
            check_fits(size, "the draws", f" Pass `path` to keep them on disk, or {fewer}.")
            return MemoryStore(manifest)
        check_space(plan.folder, size)
        _logger.info(f"writing about {format_bytes(size)} to '{plan.path}'")
        return FolderStore(plan.folder, manifest)

    def _prepare_store(self, store: Store, manifest: dict[str, Any]) -> None:
        """Write the first checkpoint of every chain, or refuse to resume another run than this one."""
        if self._is_resumed:
            check_same_run(store.manifest, manifest, self)
            note_environment(store.manifest, manifest, store.path)
            store.manifest["configuration"]["num_draws"] = self.plan.num_draws
            store.manifest |= {key: manifest[key] for key in ("config",) if key in manifest}
        else:
            if self.initial is not None:
                store.save_starts(self.initial)
            for key in self.keys:
                store.save(key, state_of(self.new_loop(key)))
        store.write_manifest()  # last: from now on the folder holds a run


def _build_scheduler(make: Callable[[Sampler], LRScheduler], sampler: Sampler) -> LRScheduler:
    """The user's scheduler, if it suits this sampler."""
    sampler.check_schedulable()
    scheduler = make(sampler)
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise TypeError(
            "`scheduler` must make a scheduler that depends on the number of steps, such as CosineAnnealingLR, got "
            f"{type(scheduler).__name__}."
        )
    return scheduler


def forecast_size(
    model: nn.Module, *, num_draws: int, num_chains: int, keep: str | int = "draws", dtype: str | None = None
) -> int:
    """Bytes of all draws and checkpoints of a run, as `sample` would store it."""
    tensors = [x for x in model.state_dict().values() if isinstance(x, Tensor)]
    one = sum(x.numel() * stored_dtype(x, dtype).itemsize + 128 for x in tensors)
    weights = sum(x.numel() * x.element_size() + 128 for x in tensors)
    kept = min(keep + 2, num_draws) if isinstance(keep, int) else (num_draws if keep == "draws" else 0)
    moments = 0 if keep == "draws" else 16 * sum(x.numel() for x in tensors)
    # a checkpoint holds weights and two moments; the previous one is kept, and a third exists while they are replaced
    return int(num_chains) * (kept * (one + 900) + num_draws * 900 + 3 * (4 * weights + moments + 50_000))


def prefers_stack(device: torch.device, model: nn.Module) -> bool:
    """Whether stacked chains are much faster: where kernel launches, not arithmetic, bound the time of a step.

    A layer with kernels of its own that vmap cannot use opts out by `is_fast_alone`.
    """
    return device.type == "cuda" and not any(getattr(module, "is_fast_alone", False) for module in model.modules())
