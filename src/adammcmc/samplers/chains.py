"""The engine: C >= 1 chains of a network, one transition of all of them at a time.

A step evaluates the loss where the chains stand (`Network`), calls the pure kernel, and puts the result back:

    potential = network.potential(loss, batch);  state, info = kernel.step(state, potential, generator);  network.commit(...)

The same code serves one chain over the live parameters of a model (`Sampler`, by `one_chain.LiveNetwork`) and many chains in
one evaluation (`stacked.StackedNetwork`). Freezing, warm-up, health, the resolution of U and checkpoints are here; CUDA graphs
in `replay`.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree

from adammcmc.acceptance import effective_beta
from adammcmc.errors import NonFiniteLoss, warn
from adammcmc.kernels.approach import approaching
from adammcmc.kernels.kernel import ChainState, Info
from adammcmc.samplers.adaptation import Adaptation, Change
from adammcmc.samplers.health import Health, read_health, warn_off_target
from adammcmc.samplers.layers import GraphNumbers, Layers
from adammcmc.samplers.packing import Packing
from adammcmc.samplers.processes import check_one_process
from adammcmc.samplers.running_sums import Row, RunningSums
from adammcmc.target.control import Control
from adammcmc.target.data import Examples
from adammcmc.target.leaves import Leaves, Setting, by_chain, flatten
from adammcmc.target.potential import Evaluation, Potential, Target
from adammcmc.target.priors import Prior
from adammcmc.target.resolution import Resolution, measure

__all__ = ["Chains", "Network", "NetworkPotential", "Owner"]

_logger = logging.getLogger("adammcmc")
# steps at which fixed data are checked again; on an accelerator the first only, since the check waits for it
_RECHECKS = [10**k for k in range(9)]
_LOOKS = [1024 * 8**k for k in range(8)]  # steps since burn-in at which the acceptance is compared with its target


class NetworkPotential(Potential, ABC):
    """What the targets of one step, on one batch, have in common (`target.Potential`).

    Args:
        scale: lambda * n.
        inverse_temperature: lambda.
        prior: of the weights; None is flat.
        fixed: whether every step sees the same data.
        examples: the data as per-example losses.
    """

    scale: Setting = 1.0
    inverse_temperature: Setting = 1.0
    num_examples: int | None = None
    control: Control | None = None
    can_narrow = False
    can_be_rough = False
    """Whether losses are cheaper where they may be rough."""

    def __init__(
        self, scale: Setting, inverse_temperature: Setting, prior: Prior | None, *, fixed: bool, examples: Examples | None
    ) -> None:
        self.scale, self.inverse_temperature, self.fixed = scale, inverse_temperature, fixed
        self.is_bounded = prior is not None and prior.is_bounded
        self.num_examples = None if examples is None else len(examples)
        self.is_rough = False
        """Whether nothing depends on energies to a nat, so that losses may come out as gradients are computed (`forces`)."""
        self.losses: Tensor | None = None
        """Those of the first evaluation, (chains,) or (chains, batch)."""
        self.known: tuple[Leaves, Leaves] | None = None
        """The first point of this step with a gradient, and the gradient of V there."""
        self.num_gradients = 0.0
        """Evaluations with a gradient, on average over the chains."""

    @abstractmethod
    def evaluate(self, params: Leaves, *, with_grad: bool) -> Evaluation:
        """See `Potential`."""

    def check_same(self, known: Evaluation) -> None:
        """Raise if this step's loss is not that of the last step, `known`, at the same weights."""
        return


class Network(ABC):
    """Where the weights of the chains are kept, and how their loss is evaluated.

    The defaults are those of weights to which nobody else has access.
    """

    num_chains: int
    device: torch.device
    layers: Layers
    examples: Examples | None
    """The data as per-example losses; None if they are not available."""

    @property
    def has_rough_forces(self) -> bool:
        """Whether gradients are computed in lower precision than losses."""
        return False

    @abstractmethod
    def layout(self) -> Packing:
        """How the parameters of one chain lie in leaves."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Of the parameters, for messages."""

    @property
    def sizes(self) -> list[int]:
        """How many weights of each parameter are sampled."""
        return self.layout().sizes

    @abstractmethod
    def potential(self, loss: Any, batch: Any, precision: list[float] | None) -> NetworkPotential:
        """The target on this batch, without a quadratic prior if its precision is given."""

    @abstractmethod
    def quadratic_prior(self) -> list[float] | None:
        """The precision of each leaf if the prior is quadratic, else None."""

    @abstractmethod
    def take(self) -> Leaves:
        """The weights of the chains, (chains, ...)."""

    def attempt(self, potential: Any, params: Leaves) -> AbstractContextManager[None]:
        """A context for evaluations from these weights: an error leaves them, and the layers, as they were."""
        return nullcontext()  # nothing is written before the step is complete

    @abstractmethod
    def commit(self, potential: Any, params: Leaves, is_accepted: Tensor) -> None:
        """Keep these weights, and the buffers of the chains that moved."""

    def remember(self, params: Leaves) -> None:
        """Note what weights, buffers and modes are now."""
        return

    def is_unchanged(self) -> bool:
        """Whether weights, buffers and modes are those that the last step left."""
        return True

    @abstractmethod
    def by_parameter(self, leaves: Leaves) -> Sequence[Tensor]:
        """The part of the leaves that belongs to each parameter, (chains, ...)."""

    def trial(self, potential: Any) -> AbstractContextManager[Leaves]:
        """A context for evaluations at and near the present weights, which it gives; nothing of them stays."""
        return nullcontext(self.take())

    def scaled_away(self) -> list[str]:
        """Names of parameters whose scale the loss does not depend on."""
        known = self.layers.scaled_away()
        return [name for name, p in zip(self.names, self.layout().params, strict=True) if id(p) in known]

    def approximations(self, *, fixed_data: bool) -> list[str]:
        """Why the layers make the chains inexact, in a few words each."""
        return self.layers.approximations(fixed_data=fixed_data)

    def describe(self, *, fixed_data: bool) -> list[str]:
        """The layers with state, and rows that are held, in a few words each."""
        held = ", ".join(self.names[i] for i in self.layout().held)
        return [*self.layers.describe(fixed_data=fixed_data), *([f"padding rows held: {held}"] if held else [])]

    def graph_numbers(self, graph: torch.cuda.CUDAGraph, num_evaluations: int) -> GraphNumbers:
        """The random numbers of the loss in a graph whose step evaluates it so many times at most."""
        return self.layers.graph_numbers(graph, num_evaluations)

    def graph_state(self) -> Any:
        """Tensors that a graph overwrites, beside those of the chains: a pytree."""
        return ()  # the parameters themselves are written to

    def set_graph_state(self, state: Any) -> None:
        """Use these tensors from now on."""
        return


class Owner(Protocol):
    """Whose settings the chains follow: a torch optimizer's parameter groups, or a kernel of its own."""

    fixed_data: bool
    generator: Any

    @property
    def targets(self) -> Sequence[Target]:
        """Of each chain."""

    @property
    def scale(self) -> Setting:
        """lambda * n: one number, or one per chain."""

    def kernel(self) -> Any:
        """The kernel with its present settings; the same object while they do not change."""

    def check_settings(self) -> None:
        """Raise if the settings cannot be used, before a step."""
        return

    def prepare(self, potential: Any, state: ChainState) -> ChainState:
        """The state with what the owner keeps of it, before a step."""
        return state

    def keep(self, memory: Any) -> Any:
        """The kernel's memory as the chains shall remember it, after a step."""
        return memory

    def counted(self) -> None:
        """A step was replayed: advance what is counted on the host."""

    def apply(self, change: Change, potential: Any, state: ChainState) -> None:
        """Change the settings as the adaptation requires."""

    def layout(self) -> Any:
        """An object that is replaced when the parameters are."""
        return None

    def same_layout(self) -> AbstractContextManager[Any]:
        """A context in which nobody touches the parameters."""
        return nullcontext()

    def token(self) -> Any:
        """Everything of which a change must be examined before the next replay; cheap to compare."""
        return None


class Chains:
    """C >= 1 chains of a network.

    Args:
        network: where their weights are kept, and how their loss is evaluated.
        owner: of their settings.
        adaptation: of their settings, in burn-in.
    """

    def __init__(self, network: Network, owner: Owner, adaptation: Adaptation | None = None) -> None:
        self.network, self.owner, self.adaptation = network, owner, adaptation
        self.num_chains, self.device = network.num_chains, network.device
        self.num_steps = 0
        self.memory: Any = None
        """What the kernel remembers between steps."""
        self.here: Evaluation | None = None
        """The target where the chains stand, for fixed data."""
        self.carry: Any = None
        """What the acceptance test remembers."""
        self.resolution: Resolution | None = None
        """How precisely U is known; None before the first step, and for a test that does not use U."""
        self.monitor: RunningSums | None = None
        self.last_info: Info | Callable[[], Info] | None = None
        self.tuned_to: float | None = None
        """The acceptance that settings of an earlier burn-in were tuned to."""
        self._was_rough = False  # whether the last step took losses as they came
        self._has_warned = False  # of acceptance far from its target
        self._kernel: Any = None
        self._precision: list[float] | None = None
        self.sum_acceptance = torch.zeros(self.num_chains, dtype=torch.float64, device=self.device)
        self.frozen_at = torch.full((self.num_chains,), -1, dtype=torch.int64, device=self.device)
        self.frozen_on_host = torch.full((self.num_chains,), -1, device="cpu", pin_memory=self.frozen_at.is_cuda)
        """The same, where it can be read without waiting for the device."""

    # --- one step -----------------------------------------------------------------------------------------------

    def ordinary_step(self, loss: Any, batch: Any) -> Tensor:
        """One transition of every chain, without a graph. Returns the batch's mean loss of each, (chains,)."""
        with self.on_device(), self.owner.same_layout():
            self.before_step()
            had_none = self.here is None  # filling an empty cache, as after a resume, is not a cost of this step
            potential, state, info = self.transition(loss, batch, self.num_steps)
            self.network.commit(potential, state.params, info.is_accepted)
            self.memory, self.here, self.carry = self.owner.keep(state.memory), state.here, state.carry
            if state.frozen_at is not self.frozen_at or self._kernel.backend is not None:
                self.frozen_at = state.frozen_at
                self.frozen_on_host.copy_(self.frozen_at, non_blocking=True)
            if self.here is not None or self.carry is not None:
                self.network.remember(state.params)
            self.sum_acceptance += info.acceptance_rate
            self.last_info = info
            self._after_step(potential, state, info, potential.num_gradients - bool(had_none and self.here and self.here.grad))
            if self.adaptation is not None and self.is_adapting:
                self.adaptation.look(self.network, loss, batch)
            losses = potential.losses
            return info.loss if losses is None else info.loss.to(losses.dtype)

    def before_step(self) -> None:
        """The host's checks before every step: a frozen chain, other processes, weights or a target that were changed."""
        self.check()
        self.owner.check_settings()
        if (self.here is not None or self.carry is not None) and not self.network.is_unchanged():
            self.forget()

    def forget(self) -> None:
        """Drop what is cached of the present weights. (A count over the whole run is no cache.)"""
        self.here = None
        self.carry = self.carry if self.owner.kernel().acceptance.carries_count else None

    def kernel(self) -> Any:
        """The kernel with its present settings, and its backend with them."""
        kernel = self.owner.kernel()
        if kernel is not self._kernel:
            if self._kernel is not None and kernel.backend is not self._kernel.backend:
                self.here = None  # the gradients of one backend may lack the prior's part
            self._kernel = kernel
        return kernel

    def transition(self, loss: Any, batch: Any, step: Any) -> tuple[Any, ChainState, Info]:
        kernel, network = self.kernel(), self.network
        if not self.is_capturing:
            self._upload(kernel)
        potential = network.potential(loss, batch, self._precision)
        potential.is_rough = potential.can_be_rough and _needs_no_energies(self, kernel)
        if potential.is_rough != self._was_rough:
            self.here, self._was_rough = None, potential.is_rough
        params = network.take()
        state = ChainState(params, self.memory, self.here, self.carry, step, self.frozen_at)
        with network.attempt(potential, params):
            is_due = self.num_steps in _RECHECKS[: None if self.device.type == "cpu" else 1]
            if self.here is not None and is_due and not potential.is_rough:
                potential.check_same(self.here)
            state, moving = self.owner.prepare(potential, state), _moving(self, kernel, params)
            state, info = moving.step(state, potential, self.owner.generator)
        return potential, state, info

    def _upload(self, kernel: Any) -> None:
        """Send settings that have changed to the kernel's backend."""
        self._precision = None
        if kernel.backend is not None:
            if kernel.backend.folds_prior and kernel.acceptance.uses_batch_only:
                self._precision = self.network.quadratic_prior()
            kernel.backend.upload(kernel, self.owner.scale, self._precision)

    def _after_step(self, potential: Any, state: ChainState, info: Info, num_gradients: float) -> None:
        if self.num_steps == 0:
            self._measure_resolution(potential)
            _logger.info(self.describe())  # after the step, when the layers are known
        self.num_steps += 1
        if self.adaptation is not None and not self.adaptation.is_done:
            self.adaptation.num_gradients += num_gradients
            grad = (None if potential.known is None else potential.known[1]) if state.here is None else state.here.grad
            numbers = info.acceptance_rate, info.potential, info.step_to_noise
            change = self.adaptation.observe(*numbers, grad, self.owner.scale, info.log_ratio, flatten(state.params)[0])
            self.owner.apply(change, potential, state)
            if not self.is_adapting:
                self.adaptation.warn()
                self._measure_resolution(potential)  # at weights that are worth it
            return
        known = potential.known
        if state.here is not None:
            known = None if state.here.grad is None else (state.params, state.here.grad)
        self.watch((info, self.owner.scale), known, num_gradients)

    @property
    def generator(self) -> Any:
        """The source of the chains' random numbers."""
        return self.owner.generator

    @property
    def fixed_data(self) -> bool:
        """Whether every batch is the same."""
        return self.owner.fixed_data

    @property
    def is_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def on_device(self) -> AbstractContextManager[Any]:
        """Triton and CUDA graphs use the current device, which need not be that of the parameters."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    # --- burn-in and health -------------------------------------------------------------------------------------

    @property
    def is_adapting(self) -> bool:
        """Whether the settings still change, so that nothing should be collected."""
        return self.adaptation is not None and not self.adaptation.is_done

    def watch(self, step: Row, known: tuple[Leaves, Leaves] | None, num_gradients: float) -> None:
        """Running sums; the temperature only at every tenth step, because it takes a pass over the weights.

        `known`: a point of the step, the present one if the target is kept there, and the gradient of V.
        """
        if self.monitor is None:
            self.monitor = self.new_monitor()
        self.monitor.add(step)
        self.monitor.num_gradients += num_gradients
        if self.monitor.num_steps in _LOOKS and not self._has_warned:
            self._has_warned = warn_off_target(self.monitor, self.num_chains, self._aim())
        if self.monitor.num_steps % 10 == 1 and known is not None:
            products = self._products(*known, is_current=self.here is not None)
            self.monitor.add_products(products * by_chain(self.owner.scale, products))

    def _products(self, params: Leaves, grad: Leaves, *, is_current: bool) -> Tensor:
        """theta . grad V of each parameter, (chains, parameters)."""
        backend = self._kernel.backend
        if backend is not None and backend.copy is not None:
            if len(backend.copy) == len(self.network.sizes):
                found: Tensor = backend.products(grad, at_copy=not is_current)
                return found
            params = params if is_current else backend.copy
        pairs = zip(self.network.by_parameter(params), self.network.by_parameter(grad), strict=True)
        products = torch.stack([(x * g).flatten(1).sum(1).double() for x, g in pairs], 1)
        if self._precision is None:
            return products
        pulls = self.network.by_parameter(tuple(torch.full_like(x, q) for x, q in zip(params, self._precision, strict=True)))
        pairs = zip(self.network.by_parameter(params), pulls, strict=True)
        own = torch.stack([(x.square() * q).flatten(1).sum(1).double() for x, q in pairs], 1)
        return products + own / by_chain(self.owner.scale, own)

    def new_monitor(self) -> RunningSums:
        """Sums of no steps."""
        return RunningSums(self.device, self.network.names, self.network.sizes, self.num_chains)

    def health(self) -> list[Health]:
        """What each chain's record says since burn-in ended. Waits for the device."""
        monitor, context = self.monitor or self.new_monitor(), self._health_context()
        return [read_health(monitor, chain, **context) for chain in range(self.num_chains)]

    def health_sums(self) -> list[dict[str, float]]:
        """Running sums behind `health`, of each chain. Waits for the device."""
        return (self.monitor or self.new_monitor()).totals()

    def health_state(self) -> dict[str, Any]:
        """What `health` is read from, besides its sums (which `state_dict` has)."""
        return {"layers": self.network.names, "sizes": self.network.sizes, "context": self._health_context()}

    def reset_health(self) -> None:
        """Forget the steps so far: burn-in is over."""
        self.monitor = None if self.monitor is None else self.monitor.restarted()

    def _health_context(self) -> dict[str, Any]:
        """What decides which self-tests are valid."""
        return _health_context(self, self._complaints(), self._aim())

    def _aim(self) -> float | None:
        """The acceptance that the settings were tuned to; None where they were not, or the test accepts everything."""
        target = self.tuned_to if self.adaptation is None else self.adaptation.target
        return target if self.kernel().acceptance.needs_noise else None

    def _measure_resolution(self, potential: Any) -> None:
        """How precisely U is known; nothing of the evaluations stays."""
        acceptance = self.kernel().acceptance
        if potential.losses is None or not acceptance.needs_noise:
            return
        chunk_size = acceptance.chunk_size if self.network.examples is not None else None
        with (
            self.network.trial(potential) as params,
            torch.random.fork_rng([self.device] if self.device.type == "cuda" else []),
        ):
            reduced = self.network.layers.reduced
            found = measure(potential, params, potential.losses, reduced=reduced, chunk_size=chunk_size)
        if not math.isfinite(found.nats):  # a chain is about to freeze, or stands at the edge of its prior
            return
        # a start may be anywhere, and U is measured again when burn-in ends; on batches their noise is larger by far
        if found.is_coarse and not self.is_adapting and (self.fixed_data or acceptance.uses_all_data):
            warn(found.warning)
        self.resolution = found

    # --- what the chains report ----------------------------------------------------------------------------------

    @property
    def info(self) -> Info:
        """The last step in numbers, one for each chain, on the device; reading it does not wait for the device."""
        if self.last_info is None:
            raise RuntimeError("no step was taken yet: there is nothing to report.")
        return self.last_info() if callable(self.last_info) else self.last_info

    @property
    def mean_acceptance_rate(self) -> Tensor:
        """Mean of min(1, exp(Y)) over all steps, (chains,), on the device."""
        return self.sum_acceptance / max(1, self.num_steps)

    @property
    def beta_eff(self) -> Tensor:
        """By what factor the noise of the last log ratio lowers the inverse temperature, (chains,)."""
        return effective_beta(self.kernel().acceptance, self.info.log_ratio_noise)

    @property
    def targets(self) -> Sequence[Target]:
        """Of each chain."""
        return self.owner.targets

    def present_loss(self) -> Tensor:
        """The mean loss at the present weights as far as the last step found it, (chains,), without evaluating anything.

        Of all data under `FullData` and fixed data, otherwise of the last batch; under `AlwaysAccept`, which does not
        evaluate the proposal, that of the weights before the step.
        """
        losses: Tensor | None = self.kernel().acceptance.carried_losses(self.carry)
        if losses is not None:
            return losses.mean(1)
        info = self.info
        return torch.where(info.is_accepted & info.proposed_loss.isfinite(), info.proposed_loss, info.loss)

    def check(self) -> None:
        """Raise `NonFiniteLoss` if a chain froze (on an accelerator perhaps a few steps late), or `ManyProcesses`."""
        check_one_process()
        flags = self.frozen_on_host
        if int(flags if self.num_chains == 1 else flags.max()) < 0:
            return
        chains = (self.frozen_on_host >= 0).nonzero().flatten().tolist()
        step = int(self.frozen_on_host[chains[0]])
        which = f" of {len(chains)} of {self.num_chains} chains; the first is chain {chains[0]}" if self.num_chains > 1 else ""
        raise NonFiniteLoss(
            f"the loss, its gradient or the log prior was NaN or infinite at the current weights{which}, at step {step}. The "
            "chain has not moved since; its weights are those of the last healthy step.",
            "Check that batch (or, at step 0, whether the weights lie inside the prior's support), then call unfreeze() to "
            "continue.",
        )

    def unfreeze(self) -> None:
        """Let chains that froze on a non-finite loss continue from where they stand."""
        self.here = self.carry = None
        self.frozen_at.fill_(-1)
        self.frozen_on_host.copy_(self.frozen_at)  # waits: copies of the old flag may be under way

    def approximations(self) -> list[str]:
        """Why the chains are not exact, in a few words each; empty if they are."""
        found: list[str] = self.kernel().approximation(fixed_data=self.fixed_data)
        found += [] if self.adaptation is None or self.adaptation.approximation is None else [self.adaptation.approximation]
        coarse = [self.resolution.approximation] if self.resolution is not None and self.resolution.is_coarse else []
        return found + self.network.approximations(fixed_data=self.fixed_data) + coarse + self._complaints()

    def _complaints(self) -> list[str]:
        """What the acceptance test has against the steps so far. Waits for the device."""
        complaint = self.kernel().acceptance.complaint(self.carry)
        return [] if complaint is None else [complaint]

    def describe(self) -> str:
        """The realised target (of the first chain) in one line: density, temperature, data, prior, kernel, test, exact or
        approximate."""
        kernel, reasons = self.kernel(), self.approximations()
        layers = "".join(f" | {words}" for words in self.network.describe(fixed_data=self.fixed_data))
        return (
            f"{self.owner.targets[0]}, P = {sum(self.network.sizes)} | {kernel.name}, {kernel.acceptance}"
            f"{' (all data)' if self.fixed_data else ''}{layers} | "
            + (f"approximate: {'; '.join(reasons)}" if reasons else "exact")
        )

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the chains need to continue bit for bit, but their weights and settings."""
        has_count = self.kernel().acceptance.carries_count and self.carry is not None
        return {
            "generator": self.generator.get_state(),
            "num_steps": self.num_steps,
            "sum_acceptance": self.sum_acceptance.clone(),
            "frozen_at": self.frozen_at.clone(),
            "memory": None if self.memory is None else copy.deepcopy(tuple(self.memory)),
            "adaptation": None if self.adaptation is None else copy.deepcopy(self.adaptation.state_dict()),
            "health": None if self.monitor is None else self.monitor.state_dict(),
            "resolution": None if self.resolution is None else list(self.resolution),
            "count": self.carry.clone() if has_count else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where other chains stood. (An adaptation must have been made anew, by its saved settings.)"""
        if state["generator"].shape != self.generator.get_state().shape:
            raise ValueError("the state was saved on another kind of device: its random numbers cannot be continued here.")
        state = _pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), state)
        there = _pytree.tree_map_only(Tensor, lambda x: x.to(self.device), {key: state[key] for key in _ON_DEVICE})
        kernel = self.kernel()  # first: packing the parameters anew drops what is cached
        self.generator.set_state(state["generator"].cpu())
        self.num_steps, self.here, self.carry, self.last_info = state["num_steps"], None, there["count"], None
        self.sum_acceptance, self.frozen_at = there["sum_acceptance"], there["frozen_at"]
        self.frozen_on_host.copy_(self.frozen_at)
        self.memory = None if there["memory"] is None else kernel.restored(there["memory"])
        self.resolution = Resolution(*state["resolution"]) if state["resolution"] else None
        if state["adaptation"] is not None:
            assert self.adaptation is not None
            self.adaptation.load_state_dict(there["adaptation"])
        self.monitor = None if state["health"] is None else self.new_monitor()
        if self.monitor is not None:
            self.monitor.load_state_dict(state["health"])


def _needs_no_energies(of: Chains, kernel: Any) -> bool:
    """Whether no test depends on energies to a nat. (The first step sees the layers, as they are in energies.)"""
    is_approaching = of.adaptation is not None and of.adaptation.approach is not None
    return of.num_steps > 0 and (is_approaching or not kernel.acceptance.needs_noise)


def _moving(of: Chains, kernel: Any, params: Leaves) -> Any:
    """The kernel of this step: while the chains approach their bulk, one without a test; then, until the last window of
    burn-in, one that does not try on, for which the acceptance that is tuned, that of the first move, is the same."""
    if (adaptation := of.adaptation) is None or adaptation.is_done:
        return kernel
    if adaptation.approach is None:
        kernel = kernel.learning()
        tries_on = getattr(kernel, "num_chances", 1) > 1 and not adaptation.is_in_last_window
        return dataclasses.replace(kernel, num_chances=1) if tries_on else kernel
    steps = adaptation.approach.steps(of.frozen_at, of.num_chains)
    return approaching(kernel, steps, adaptation.approach_metric(kernel.preconditioner, params))


def _health_context(of: Chains, complaints: list[str], target_acceptance: float | None) -> dict[str, Any]:
    prior, acceptance, layers = of.owner.targets[0].prior, of.kernel().acceptance, of.network.layers
    coarse = of.resolution.approximation if of.resolution is not None and of.resolution.is_coarse else None
    return {
        "is_exact": all(reason == coarse for reason in of.approximations()),  # of the kernel; rounding is `coarse`
        "knows_potential": of.fixed_data or acceptance.uses_all_data,
        "has_proper_prior": prior is not None,
        "has_edge": prior is not None and prior.is_bounded,
        "is_adapting": of.is_adapting,
        "is_metropolis": acceptance.is_metropolis,
        "complaints": complaints,
        "burn_in": None if of.adaptation is None else of.adaptation.complaint(),
        "bias": None if of.adaptation is None else of.adaptation.bias,
        "target_acceptance": target_acceptance,
        "coarse": coarse,
        # a gradient in reduced precision is too noisy for theta . grad U
        "left_out": of.network.names if layers.reduced or of.network.has_rough_forces else of.network.scaled_away(),
    }


_ON_DEVICE = ("memory", "adaptation", "sum_acceptance", "frozen_at", "count")  # of a saved state
