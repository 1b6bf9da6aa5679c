"""What the optimizers share: torch's contract, and one step of a chain over the parameters of a model.

Each step gathers the state from torch's own places (`param_groups`, `state`), calls the pure kernel, and puts the result back.
"""

from __future__ import annotations

import copy
import difflib
import functools
import logging
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree

from adammcmc.acceptance import AcceptanceTest, FullData, Minibatch, effective_beta
from adammcmc.backends.graphs import Captures, Ring
from adammcmc.errors import NonFiniteLoss, PerExampleLossRequired, warn
from adammcmc.kernels.kernel import ChainState, Info, Kernel
from adammcmc.samplers.adaptation import Adaptation, BurnIn, check_tunable, target_rate
from adammcmc.samplers.closure import Closure, ClosurePotential, Reference, expand
from adammcmc.samplers.health import Health, Monitor
from adammcmc.samplers.layers import BatchNormPolicy, GraphNumbers, Layers
from adammcmc.samplers.packing import Packing, RowsToHold, padding_rows
from adammcmc.samplers.processes import check_one_process, check_parameters
from adammcmc.target.data import Examples
from adammcmc.target.leaves import Leaves, same
from adammcmc.target.likelihood import grows as loss_grows
from adammcmc.target.resolution import Resolution, measure
from adammcmc.target.target import Prior, Target

__all__ = ["Params", "Sampler", "plain"]

_logger = logging.getLogger("adammcmc")
_OWN_KEY = "adammcmc"  # of state_dict: what torch would cast or drop if it lay in `state` (generator, counters)
# steps at which fixed data are asked again whether they are; on an accelerator the first only, since asking waits for it
_RECHECKS = [10**k for k in range(9)]
_NOT_SETTINGS = frozenset(("params", "param_names"))  # of a parameter group
_TORCH_KEYS = {"params", "param_names", "initial_lr", "name"}

Products = Callable[[], Tensor]
"""theta . grad V of each parameter tensor, where a gradient is known."""


class Outcome(NamedTuple):
    """What a step leaves to be looked at."""

    info: Info
    products: Products | None
    grad: Leaves | None
    """The gradient of V that the step found."""
    potential: ClosurePotential | None = None
    state: ChainState | None = None
    """Those of the pure kernel."""
    loss_dtype: torch.dtype | None = None
    """In which the loss is returned, if not in that of `info`."""


class GraphBody(NamedTuple):
    """What a captured step works on, besides the parameters."""

    kept: list[Tensor]
    """The chain's memory, caches and flags: read and overwritten by each replay."""
    loss_dtype: torch.dtype
    products: Products | None
    gradients: tuple[tuple[Tensor, list[Tensor]], ...] = ()
    """Tables of addresses, to be filled in after the capture."""


Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Sampler(torch.optim.Optimizer, ABC):
    """What `AdamMCMC`, `MALA` and `OptimizerMCMC` share: one chain over the parameters of a model.

    A parameter with `requires_grad=False` is not sampled. One that the loss does not reach has gradient zero and is sampled:
    its posterior is its prior. Padding rows of embeddings (`padding_idx`) stay as they are.
    """

    _target_acceptance: ClassVar[float]
    """What burn-in tunes to, unless it is told otherwise."""
    _tunes_sigma_along: ClassVar[bool] = False
    _tunes_lr: ClassVar[bool] = False
    """Whether burn-in finds the learning rate, which is the step size then."""
    _noise_name: ClassVar[str] = "sigma"
    _learns_preconditioner: bool = False
    num_chains: ClassVar[int] = 1
    _reference: Reference | None = None
    _own_caches: tuple[str, ...] = ()
    """Attributes of a subclass that are rebuilt when they are missing, and are not copied or pickled."""

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        *,
        target: Target,
        acceptance: AcceptanceTest | None,
        examples: Examples | None,
        fixed_data: bool,
        batch_norm: BatchNormPolicy,
        burn_in: BurnIn | int | None,
        generator: torch.Generator | None,
    ) -> None:
        check_one_process()
        self.target = target
        self.acceptance: AcceptanceTest = Minibatch() if acceptance is None else acceptance
        _check_types(target, self.acceptance, examples, generator)
        self.fixed_data = fixed_data
        self.num_steps = 0
        self._examples = examples
        self._packing: Packing | None = None
        self._closures: Sequence[Closure] = ()
        """Of the last step, for `draw`. Minibatches are not kept."""
        self._info: Info | Callable[[], Info] | None = None
        self._captures = Captures()
        self._option_names: list[str] | None = None
        self._clock: Tensor | None = None
        self._is_settled = False
        self._clock_at = -1
        self._here: Any = None
        self._carry: Any = None
        self._fingerprint: tuple[Any, ...] = ()
        self._left: Leaves | None = None
        self._memory: Any = None
        self._adaptation: Adaptation | None = None
        self._monitor: Monitor | None = None
        self._checked_sigmas: tuple[float, ...] = ()
        self._padding: dict[int, tuple[int, ...]] = {}
        self._resolution: Resolution | None = None
        super().__init__(params, defaults)
        if examples is not None and len(examples) != target.num_data:
            raise ValueError(f"`num_data` is {target.num_data}, but `examples` holds {len(examples)}.")
        devices = {p.device for p in self._parameters()}
        if len(devices) > 1:
            raise ValueError(f"all parameters must be on one device, got {sorted(map(str, devices))}.")
        self.device = devices.pop()
        if generator is None:
            # drawn from torch's default generator, so that torch.manual_seed fixes the run
            generator = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, ())))
        self.generator = generator
        self.batch_norm: BatchNormPolicy = batch_norm
        self._layers = Layers(batch_norm, self.device)
        self.burn_in = _burn_in(burn_in)
        self._frozen_at = torch.full((1,), -1, dtype=torch.int64, device=self.device)
        self._frozen_at_host = _host_copy(self._frozen_at)
        self._sum_acceptance = torch.zeros(1, dtype=torch.float64, device=self.device)
        self._kernel(self._layout())  # checks the hyper-parameters
        self._adaptation = self._new_adaptation()

    # --- what a subclass adds -----------------------------------------------------------------------------------

    @abstractmethod
    def _label(self, p: Parameter, group: int) -> Hashable | None:
        """Parameters with equal labels share a leaf (`Packing`)."""

    @abstractmethod
    def _kernel(self, packing: Packing) -> Kernel:
        """The kernel with the present hyper-parameters of the groups, for these leaves."""

    @abstractmethod
    def _rescale(self, factor: float) -> None:
        """Make the moves of all groups `factor` times as long."""

    def _prepare(self, packing: Packing, potential: ClosurePotential, current: Leaves) -> None:
        """What must be done before the step."""

    def _gather(self, packing: Packing) -> Any:
        """The kernel's memory in the layout of these leaves; None makes it start anew."""
        return self._memory

    def _scatter(self, packing: Packing, memory: Any) -> None:
        """Keep the kernel's memory."""
        self._memory = memory

    def _remember(self, fields: tuple[Any, ...]) -> Any:
        """The kernel's memory from its fields, as a saved state has them."""
        return None

    def _set_preconditioner(self, packing: Packing, diagonal: Leaves) -> None:
        """Take this A (asked only of a sampler that learns one)."""

    # --- one step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure | Sequence[Closure] | Callable[[Any], Tensor] | None = None, batch: Any = None
    ) -> Tensor:
        """One transition: propose, test, move or stay. Returns the batch's mean loss at the weights before the step.

        Args:
            closure: returns the loss of this step's batch at the model's present weights: the mean, shape (), or (better, it
                loses fewer digits) the losses of the examples, shape (batch,). It is called at the current and at the
                proposed weights, and must see the same batch both times. A list of closures is a batch in micro-batches,
                whose gradients are accumulated: means of equally many examples each, or losses of single examples.
            batch: a tensor, or a nested container of tensors. Then `closure` is a function of it, the same object at each step:

                    def loss(batch):
                        x, y = batch
                        return F.cross_entropy(model(x), y)

                    sampler.step(loss, (x, y))

                On a GPU the whole step becomes one CUDA graph, captured once for each shape of the batch and replayed, which
                for small networks is many times faster. What cannot be captured runs as usual, after one warning that says why.

        If the closure raises, the weights are put back and the error goes on; the moments may have taken in this gradient.
        """
        if batch is not None:
            if not callable(closure):
                raise TypeError(f"step(loss, batch) needs a function of the batch, got {type(closure).__name__}.")
            loss = cast(Callable[[Any], Tensor], closure)
            self._check_mean(loss, batch)
            self._closures = [functools.partial(loss, batch)] if self.fixed_data else ()
            return self._captures.step(self, loss, batch)
        closures: Any = [closure] if callable(closure) else closure
        if not isinstance(closures, list | tuple) or not closures or not all(map(callable, closures)):
            raise TypeError(
                f"{type(self).__name__}.step needs a closure (a function) that returns the loss of the batch, got "
                f"{type(closure).__name__}. Write sampler.step(lambda: F.cross_entropy(model(x), y)). GradScaler passes none: "
                "for mixed precision use torch.autocast with bfloat16 inside the closure, without a scaler."
            )
        self._closures = closures if self.fixed_data else ()
        return self._usual_step(closures)

    def _check_mean(self, loss: Callable[[Any], Tensor], batch: Any) -> None:
        """At the first step: a loss of a batch that is the sum of the losses of its halves is no mean."""
        if self.num_steps > 0 or self.target.num_data == 1:
            return
        rows = {len(x) if x.dim() > 0 else 0 for x in _tensors(batch)}
        if len(rows) != 1:
            return  # what is not one row an example cannot be halved
        grads = [p.grad for p in self._parameters()]
        with torch.enable_grad():  # for who calls backward in it
            is_sum = self._layers.look(lambda: loss_grows(loss, batch))
        for p, grad in zip(self._parameters(), grads, strict=True):
            p.grad = grad
        if is_sum:
            raise ValueError(
                "the loss of a batch is the sum of the losses of its halves: it looks like a sum, and would be taken as the "
                f"mean loss and multiplied by num_data = {self.target.num_data}. Return the mean, or the losses of the "
                "examples, shape (batch,)."
            )

    def _on_device(self) -> AbstractContextManager[Any]:
        """Triton and CUDA graphs go by the current device, which need not be that of the parameters."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _usual_step(self, closures: Sequence[Closure]) -> Tensor:
        with self._on_device():
            return self._step(closures)

    def _step(self, closures: Sequence[Closure]) -> Tensor:
        self._before_step()
        try:
            outcome = self._transition(self._layout(), closures)
        except RowsToHold:  # the closure's modules are known now
            self._hold(self._layers.padding)
            outcome = self._transition(self._layout(), closures)
        self._info = outcome.info
        self._after_step(outcome)
        return outcome.info.loss[0].to(outcome.loss_dtype)

    def hold_padding(self, model: torch.nn.Module) -> None:
        """Hold the padding rows (`padding_idx`) of the model's embeddings from now on.

        `step` does so by itself at the first step, when it sees the modules that the closure calls.
        """
        self._hold(padding_rows(model.modules()))

    def _hold(self, rows: Mapping[int, frozenset[int]]) -> None:
        found = {i: tuple(sorted(rows[id(p)])) for i, p in enumerate(self._parameters()) if id(p) in rows}
        if (held := self._padding | found) != self._padding:
            self._padding = held
            self._packing = self._here = self._carry = self._left = None
            self._layout()

    def _before_step(self) -> None:
        """What is looked at on the host before every step."""
        self.check()
        if any("initial_lr" in group for group in self.param_groups):
            self.check_schedulable()
        packing = self._layout()
        self._check_resolution(packing)
        if (self._here is not None or self._carry is not None) and not self._is_as_left(packing):
            self._here = None  # someone else wrote the weights, or changed the target: what was known is void
            self._carry = self._carry if hasattr(self.acceptance, "complaint") else None  # (a count is not)

    def _potential(self, packing: Packing, closures: Sequence[Closure]) -> ClosurePotential:
        return ClosurePotential(
            closures,
            packing,
            target=self.target,
            examples=self._examples,
            layers=self._layers,
            fixed=self.fixed_data,
            must_check=self._here is None,
            is_first=self.num_steps == 0,
            reference=self._reference,
            name=self._name,
        )

    def _transition(self, packing: Packing, closures: Sequence[Closure]) -> Outcome:
        """One step of the pure kernel on the model's parameters."""
        kernel = self._kernel(packing)
        potential = self._potential(packing, closures)
        current = packing.pack(packing.params, packing.current)
        potential.hold(current)
        self._layers.begin()
        try:
            if self._must_recheck():
                potential.check_same(self._here)
            self._prepare(packing, potential, current)
            state = ChainState(current, self._gather(packing), self._here, self._carry, self.num_steps, self._frozen_at)
            state, info = kernel.step(state, potential, self.generator)
        except BaseException:
            potential.place(current)  # an error in the closure must not leave the proposal in the model
            self._layers.abort()
            self._fingerprint = ()
            raise
        potential.place(state.params)
        self._layers.end(info.is_accepted)
        self._scatter(packing, state.memory)
        self._here, self._carry = state.here, state.carry
        if state.frozen_at is not self._frozen_at:
            self._frozen_at = state.frozen_at
            self._frozen_at_host.copy_(self._frozen_at, non_blocking=True)
        if self._here is not None or self._carry is not None:
            self._left, self._fingerprint = state.params, self._now(packing)
        self._sum_acceptance += info.acceptance_rate
        known, grad = potential.known, potential.first_grad
        if state.here is not None:
            grad = state.here.grad
            known = None if grad is None else (state.params, grad)
        products = None if known is None else lambda: _products(packing, *known)
        return Outcome(info, products, grad, potential, state)

    def _must_recheck(self) -> bool:
        """Whether it is time to ask fixed data again whether they are."""
        return self._here is not None and self.num_steps in _RECHECKS[: None if self.device.type == "cpu" else 1]

    def _after_step(self, outcome: Outcome) -> None:
        if self.num_steps == 0:
            self._measure_resolution(outcome.potential)
            _logger.info(self.describe())  # after the step, when the layers are known
        self.num_steps += 1
        if self.is_adapting:
            self._adapt(self._layout(), outcome)
            if self._adaptation is not None and self._adaptation.is_done:
                self._measure_resolution(outcome.potential)  # at weights that are worth it
        else:
            self._watch_health(lambda monitor: monitor.add(outcome.info, self.target.scale), outcome.products)

    def _measure_resolution(self, potential: ClosurePotential | None) -> None:
        """To how many nats U is known; nothing of the evaluations stays."""
        if potential is None or potential.losses is None or not self.acceptance.needs_noise:
            return
        packing = self._layout()
        current = packing.pack([p.detach() for p in packing.params], packing.new())
        potential.hold(current)
        self._layers.begin()
        try:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                found = measure(
                    potential, current, potential.losses, reduced=self._layers.reduced, chunk_size=self._chunk_size()
                )
        finally:
            potential.place(current)
            self._layers.abort()
            if self._fingerprint:
                self._fingerprint = self._now(packing)
        self._report(found, is_adapting=self.is_adapting)

    def _chunk_size(self) -> int | None:
        """Of a test on all examples."""
        return self.acceptance.chunk_size if isinstance(self.acceptance, FullData) and self._examples is not None else None

    def _report(self, found: Resolution, *, is_adapting: bool) -> None:
        if not math.isfinite(found.nats):  # the chain is about to freeze, or stands at the edge of its prior
            return
        # a start may be anywhere, and U is measured again when burn-in ends; on batches their noise is larger by far
        if found.is_coarse and not is_adapting and (self.fixed_data or isinstance(self.acceptance, FullData)):
            warn(found.warning)
        self._resolution = found

    @property
    def resolution(self) -> Resolution | None:
        """To how many nats U is known; None before the first step, and where the test does not look at U."""
        return self._resolution

    # --- the same as a CUDA graph -------------------------------------------------------------------------------

    def _why_not_captured(self) -> str | None:
        """What speaks against capturing this sampler's steps."""
        if getattr(self.acceptance, "reads_device", False):
            return f"the test looks at sums on the way ({self.acceptance})"
        if self._layers.draws_on_host:
            return "the loss draws random numbers on the host"
        return None

    def _num_evaluations(self) -> int:
        """In a step, where only the kernel knows; 0: those of the last step."""
        return 0

    def _graph_key(self) -> Hashable:
        """What is written into a graph, so that another value asks for another graph."""
        settings = [
            tuple((key, plain(value)) for key, value in group.items() if key not in _NOT_SETTINGS)
            for group in self.param_groups
        ]
        modes, simple = self._layers.graph_key(), tuple(self._simple_options())
        return self._layout(), id(self.generator), self.target, self.acceptance, modes, tuple(settings), simple

    def _simple_options(self) -> list[Any]:
        """Public options that are plain values: friction, fused, ..."""
        return [
            (key, value)
            for key, value in vars(self).items()
            if key[0] != "_" and key != "num_steps" and isinstance(value, bool | int | float | tuple | None)
        ]

    def _in_graph(self, closure: Closure, ring: Ring, numbers: GraphNumbers | None) -> GraphBody:
        """`_transition` on memory that stays where it is. Nothing here may look at a value."""
        packing = self._layout()
        assert self._clock is not None
        kernel, potential = self._kernel(packing), self._potential(packing, [closure])
        current = packing.pack(packing.params, packing.current)
        potential.hold(current)
        with self._layers.captured(numbers):
            self._layers.begin()
            old = ChainState(current, self._gather(packing), self._here, self._carry, 0, self._frozen_at)
            state, info = kernel.step(old._replace(step=self._clock), potential, self.generator)  # type: ignore[arg-type]
            potential.place(state.params)
            self._layers.end(info.is_accepted)
        kept, fresh = (_tensors((s.memory, s.here, s.carry, s.frozen_at)) for s in (old, state))
        torch._foreach_copy_(kept, fresh)
        self._clock.add_(1)
        self._sum_acceptance += info.acceptance_rate
        self._frozen_at_host.copy_(self._frozen_at, non_blocking=True)
        ring.write(info)
        if old.here is not None and (grad := old.here.grad) is not None:  # by then the gradient at the present weights
            return GraphBody(
                kept, info.loss.dtype, lambda: _products(packing, packing.pack(packing.params, packing.current), grad)
            )
        known = potential.known
        return GraphBody(kept, info.loss.dtype, None if known is None else lambda: _products(packing, *known))

    def _graph_state(self) -> Any:
        """What a graph reads and overwrites, as the sampler has it now: a pytree."""
        return self._gather(self._layout()), self._here, self._carry, self._frozen_at

    def _set_graph_state(self, state: Any) -> None:
        self._memory, self._here, self._carry, self._frozen_at = state

    def _is_replayable(self) -> bool:
        """Whether all that a graph takes for granted is known: after a change from outside a usual step must come first."""
        needs_here = self.fixed_data and self._here is None
        return not needs_here and not (isinstance(self.acceptance, FullData) and self._examples and self._carry is None)

    def _token(self) -> tuple[Any, ...]:
        """All of which a change, from whatever side, must be looked into before the next replay; cheap to compare."""
        params = [p for group in self.param_groups for p in group["params"]]
        state = self.state
        values = vars(self)
        if self._option_names is None:
            self._option_names = [name for name, _ in self._simple_options()]
        return (
            (self._packing, self.generator, self.target, self.acceptance),
            [values[name] for name in self._option_names],
            [(p.data_ptr(), p._version, p.requires_grad) for p in params],
            # what belongs to a parameter, exchanged or written to; `step` counts by itself
            [(id(x), x._version) for p in params for key, x in state[p].items() if key != "step" and isinstance(x, Tensor)],
            [plain(group[key]) for group in self.param_groups for key in group if key not in _NOT_SETTINGS],
            self._layers.graph_key(),
            self._clock_at == self.num_steps,  # whether the last step was a replay, which leaves all where it is
            (self._here is None, self._carry is None),
        )

    def _before_next_replay(self, body: GraphBody) -> None:
        """As `_before_replay`, where nothing has happened since the last one."""

    def _before_capture(self) -> None:
        if self._clock is None:
            self._clock = torch.zeros(1, dtype=torch.int64, device=self.device)

    def _after_capture(self, body: GraphBody) -> None:
        for table, gradients in body.gradients:
            addresses = torch.tensor([g.data_ptr() for g in gradients], dtype=torch.int64)
            table.copy_(addresses)
        if self._fingerprint:
            self._fingerprint = self._now(self._layout())  # a capture writes to nothing, but counts as if it did

    def _before_replay(self, body: GraphBody) -> None:
        """What usual steps in between left elsewhere goes to the places that the graph knows."""
        state = self._graph_state()
        now = _tensors(state)
        if not same(now, body.kept):
            torch._foreach_copy_(body.kept, now)
            places = iter(body.kept)
            self._set_graph_state(_pytree.tree_map_only(Tensor, lambda _: next(places), state))
        if self._clock is not None and self._clock_at != self.num_steps:
            self._clock.fill_(self.num_steps)

    def _after_replay(self, body: GraphBody, ring: Ring) -> Tensor:
        self._info = ring.info
        self.num_steps += 1
        self._clock_at = self.num_steps
        self._watch_health(lambda monitor: monitor.add_row(ring.rows, ring.last, self.target.scale), body.products)
        return ring.loss(body.loss_dtype)[0]

    def use_control_variate(self, order: int = 1) -> None:
        """Take the present weights as the reference of a control variate (`adammcmc.target.control`).

        Tests that choose their own examples (`Barker`, `Tuna`, ...) then estimate only what the derivatives at the reference do
        not foresee, which is little while the chain stays near. Call it once, at the end of burn-in. (`sample`, which makes its
        samplers itself, and stacked chains have none.)

        Args:
            order: 1 costs a pass over the data with gradients, and at each example that a test looks at about three forwards
                more; the loss must be twice differentiable. 2 keeps the Hessian of the sum as well: for 2,000 parameters at
                most, a backward over the data for each of them, and a loss that autograd can differentiate four times.
        """
        if self.fixed_data or isinstance(self.acceptance, FullData) or not getattr(self.acceptance, "needs_examples", True):
            raise ValueError(
                f"a control variate would do nothing here ({'fixed data' if self.fixed_data else self.acceptance}): it is for "
                "tests that choose their own examples, such as Barker(), Tuna(bound) or Penalty(batch_size)."
            )
        if self._examples is None:
            raise PerExampleLossRequired(
                "a control variate needs the losses of single examples: pass `examples=TensorExamples(loss, inputs, targets)`."
            )
        examples, layers = self._examples, self._layers

        def losses(rows: slice) -> Tensor:
            return layers.example_losses(examples.losses, rows)

        self._reference = expand(losses, self._trainable(), len(examples), order)

    def draw(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """A draw: a copy of the model's state, which no later step touches. Refused while the settings still adapt.

        With `fixed_data` and BatchNorm in training mode the last step's closure is called once more, without a trace in the
        chain: the draw's running statistics are those of the data at its own weights, so that in evaluation mode it is the
        function that was sampled. On minibatches they are the running averages.
        """
        if self.is_adapting:
            raise RuntimeError(
                f"the sampler still adapts its settings (step {self.num_steps}): what it visits has no fixed distribution. "
                "Collect draws when `sampler.is_adapting` is False."
            )
        fresh = self._fresh_statistics() if self._layers.has_statistics else {}
        state = model.state_dict(keep_vars=True)
        return {name: fresh.get(id(x), x).detach().clone() for name, x in state.items() if isinstance(x, Tensor)}

    def _fresh_statistics(self) -> dict[int, Tensor]:
        """The BatchNorm statistics of a draw by the identity of their buffers (`Layers.fresh_statistics`)."""
        grads = [(p, p.grad) for p in self._parameters()]
        for p, _ in grads:
            p.grad = None
        try:
            with self._on_device(), torch.enable_grad():  # a closure may call `backward` itself
                return self._layers.fresh_statistics(self._closures)
        finally:
            for p, grad in grads:
                p.grad = grad

    # --- burn-in and health -------------------------------------------------------------------------------------

    @property
    def is_adapting(self) -> bool:
        """Whether the settings still change, so that nothing should be collected."""
        return self._adaptation is not None and not self._adaptation.is_done

    def _new_adaptation(self) -> Adaptation | None:
        if self.burn_in is None:
            return None
        check_tunable(self.acceptance)
        packing = self._layout()
        prior, precision = self.target.prior, None
        if prior is not None and (values := prior.precision(packing.params)) is not None:
            full = [
                torch.full(p.shape, value, dtype=torch.float64, device=p.device)
                for p, value in zip(packing.params, values, strict=True)
            ]
            precision = tuple(leaf[0] for leaf in packing.join(full))
        return Adaptation(
            self.burn_in,
            target=target_rate(self.acceptance, self._target_acceptance),
            num_params=sum(packing.sizes),
            tunes_sigma_along=self._tunes_sigma_along,
            precision=precision,
            learns=self._learns_preconditioner,
        )

    def _adapt(self, packing: Packing, outcome: Outcome) -> None:
        assert self._adaptation is not None
        info = outcome.info
        change = self._adaptation.observe(
            info.acceptance_rate, info.potential, info.step_to_noise, outcome.grad, self.target.scale
        )
        self._rescale(change.factor)
        if change.sigma_along is not None:
            for group in self.param_groups:
                group["sigma_along"] = change.sigma_along
        if change.preconditioner is not None:
            self._set_preconditioner(packing, change.preconditioner)
        if self._adaptation.is_done:
            self._adaptation.warn()

    def _new_monitor(self, packing: Packing) -> Monitor:
        names = [self._name(i) for i in range(len(packing.params))]
        return Monitor(self.device, names, packing.sizes)

    def _watch_health(self, add: Callable[[Monitor], None], products: Products | None) -> None:
        """Running sums; the temperature only at every tenth step, because it takes a pass over the weights."""
        if self._monitor is None:
            self._monitor = self._new_monitor(self._layout())
        add(self._monitor)
        if self._monitor.num_steps % 10 == 1 and products is not None:
            self._monitor.add_products(self.target.scale * products())

    def health(self) -> Health:
        """What the run says about itself since burn-in ended: numbers, and a verdict in words. Waits for the device."""
        return (self._monitor or Monitor(self.device)).read(**self._health_context())

    def health_state(self) -> dict[str, Any]:
        """What `health` goes by besides its sums (which `state_dict` has): `health.read_health` puts them together."""
        params = self._trainable()
        return {
            "layers": [self._name(i) for i in range(len(params))],
            "sizes": self._layout().sizes,
            "context": self._health_context(),
        }

    def _health_context(self) -> dict[str, Any]:
        """What decides which self-tests are valid."""
        prior = self.target.prior
        scaled_away = self._layers.scaled_away()
        trainable = self._trainable()
        coarse = self.resolution.approximation if self.resolution is not None and self.resolution.is_coarse else None
        return {
            "is_exact": all(reason == coarse for reason in self.approximations()),  # of the kernel; rounding is `coarse`
            "knows_potential": self.fixed_data or isinstance(self.acceptance, FullData),
            "has_proper_prior": prior is not None,
            "has_edge": prior is not None and prior.is_bounded,
            "is_adapting": self.is_adapting,
            "is_metropolis": getattr(self.acceptance, "is_metropolis", True),
            "complaints": self._complaints(),
            "burn_in": None if self._adaptation is None else self._adaptation.complaint(),
            "coarse": coarse,
            # a gradient in reduced precision is too noisy for theta . grad U
            "left_out": [self._name(i) for i, p in enumerate(trainable) if self._layers.reduced or id(p) in scaled_away],
        }

    def health_sums(self) -> dict[str, float]:
        """Running sums behind `health`, by name, and the number of steps in them. Waits for the device."""
        return (self._monitor or Monitor(self.device)).totals()

    def reset_health(self) -> None:
        """Forget the steps so far: burn-in is over."""
        self._monitor = None if self._monitor is None else self._monitor.restarted()

    def present_loss(self) -> Tensor:
        """The mean loss at the present weights as far as the last step knew it, without evaluating anything.

        Of all data under `FullData` and `fixed_data`, otherwise of the last batch; under `AlwaysAccept`, which does not look at
        the proposal, that of the weights before the step.
        """
        if isinstance(self.acceptance, FullData) and isinstance(self._carry, Tensor):
            return self._carry.mean()
        info = self.info
        return torch.where(info.is_accepted & info.proposed_loss.isfinite(), info.proposed_loss, info.loss)

    @property
    def info(self) -> Info:
        """The last step in numbers, 0-d tensors on the parameters' device; reading it does not wait for the device."""
        if self._info is None:
            raise RuntimeError("no step was taken yet: there is nothing to report.")
        info = self._info() if callable(self._info) else self._info
        return Info(*(field[0] for field in info))

    @property
    def mean_acceptance_rate(self) -> Tensor:
        """Mean of min(1, exp(Y)) over all steps of this sampler, on the device."""
        return self._sum_acceptance[0] / max(1, self.num_steps)

    @property
    def beta_eff(self) -> Tensor:
        """By what factor the noise of the last step's log ratio lowers the inverse temperature (`acceptance.beta_eff`).

        1 is right. NaN where the noise is not known, and for tests that allow for it. Reading it does not wait for the device.
        """
        return effective_beta(self.acceptance, self.info.log_ratio_noise)

    def check(self) -> None:
        """Raise `NonFiniteLoss` if the chain froze, `ManyProcesses` if the process shares its model with others.

        `step` calls it; on an accelerator it may notice a frozen chain a few steps late.
        """
        check_one_process()
        if (step := int(self._frozen_at_host)) >= 0:
            raise NonFiniteLoss(
                f"the loss, its gradient or the log prior was NaN or infinite at the current weights, at step {step}. The "
                "chain has not moved since; the weights are those of the last healthy step.",
                "Look at that batch (or, at step 0, whether the weights lie inside the prior's support), then call unfreeze() "
                "to go on.",
            )

    def check_schedulable(self) -> None:
        """Refuse a scheduler while burn-in finds the step size."""
        if self.is_adapting and self._tunes_lr:
            raise ValueError(
                "a scheduler would overwrite the step size that burn-in finds. Give the sampler a `step_size`, or leave out "
                "the scheduler; in your own loop, create it once `sampler.is_adapting` is False."
            )

    def unfreeze(self) -> None:
        """Let a chain that froze on a non-finite loss go on from where it stands."""
        self._here = self._carry = None
        self._frozen_at.fill_(-1)
        self._frozen_at_host.copy_(self._frozen_at)  # waits: copies of the old flag may be under way

    # --- what it samples ----------------------------------------------------------------------------------------

    def approximations(self) -> list[str]:
        """Why the chain is not exact, in a few words each; empty if it is."""
        kernel = self._kernel(self._layout())
        layers = self._layers.approximations(fixed_data=self.fixed_data, num_micro_batches=len(self._closures))
        coarse = [self.resolution.approximation] if self.resolution is not None and self.resolution.is_coarse else []
        return kernel.approximation(fixed_data=self.fixed_data) + layers + coarse + self._complaints()

    def _complaints(self) -> list[str]:
        """What the test says against the steps so far. Waits for the device."""
        ask = getattr(self.acceptance, "complaint", None)
        said = None if ask is None else ask(self._carry)
        return [] if said is None else [said]

    @property
    def gradients_per_step(self) -> int:
        """Backward passes of the loss in one step."""
        return 1

    def describe(self) -> str:
        """The realised target in one line: density, temperature, data, prior, kernel, test, exact or approximate."""
        packing = self._layout()
        reasons = self.approximations()
        held = [f"padding rows held: {', '.join(self._name(i) for i in packing.held)}"] if packing.held else []
        layers = "".join(f" | {words}" for words in [*self._layers.describe(fixed_data=self.fixed_data), *held])
        return (
            f"{self.target}, P = {sum(packing.sizes)} | {self._kernel_name(packing)}, {self.acceptance}"
            f"{' (all data)' if self.fixed_data else ''}{layers} | "
            + (f"approximate: {'; '.join(reasons)}" if reasons else "exact")
        )

    def _kernel_name(self, packing: Packing) -> str:
        return str(getattr(self._kernel(packing), "name", type(self).__name__))

    # --- torch's contract ---------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for key in set(param_group) - set(self.defaults) - _TORCH_KEYS:
            near = difflib.get_close_matches(key, self.defaults, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else f" Known: {sorted(self.defaults)}."
            if key == "weight_decay":
                hint = " Weight decay is a prior here: prior=Gaussian(scale)."
            raise ValueError(f"unknown option '{key}' in a parameter group.{hint}")
        listed = param_group["params"]
        listed = [listed] if isinstance(listed, Tensor) else list(listed)
        tensors = [x[1] if isinstance(x, tuple) else x for x in listed] + self._parameters()
        if len(set(map(id, tensors))) < len(tensors):
            raise ValueError("a parameter is listed twice: it would be two coordinates of the chain.")
        check_parameters(tensors)
        super().add_param_group({**param_group, "params": listed})
        self._here = self._carry = self._left = self._packing = None
        group = self.param_groups[-1]
        for key in set(group) & {"lr", "eps", "sigma", "sigma_along"}:
            if isinstance(group[key], numbers.Real):
                group[key] = float(group[key])  # a number of numpy's would keep the state from loading safely
        try:
            if any(p.is_complex() for p in group["params"]):
                raise ValueError("complex parameters cannot be sampled. Use torch.view_as_real and real parameters.")
            if "sigma_along" in self.defaults:
                self._sigma_along()
        except ValueError:
            del self.param_groups[-1]
            raise

    def state_dict(self) -> dict[str, Any]:
        """torch's state, and under one key of its own the generator and the counters: enough to go on bit for bit."""
        own = {
            "sampler": type(self).__name__,
            "target": str(self.target),
            "generator": self.generator.get_state(),
            "num_steps": self.num_steps,
            "sum_acceptance": self._sum_acceptance.clone(),
            "frozen_at": self._frozen_at.clone(),
            "memory": None if self._memory is None else copy.deepcopy(tuple(self._memory)),
            "adaptation": None if self._adaptation is None else copy.deepcopy(self._adaptation.state_dict()),
            "health": None if self._monitor is None else self._monitor.state_dict(),
            "reference": None if self._reference is None else copy.deepcopy(tuple(self._reference)),
            "resolution": None if self.resolution is None else list(self.resolution),
            "held_rows": {i: list(rows) for i, rows in self._padding.items()},
            "count": self._carry.clone() if hasattr(self.acceptance, "complaint") and self._carry is not None else None,
        }
        return {**super().state_dict(), _OWN_KEY: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this sampler, to go on bit for bit (or, for AdamMCMC, the moments of a torch.optim.Adam)."""
        if _OWN_KEY not in state_dict:
            self._load_foreign(state_dict)
            return
        own = state_dict[_OWN_KEY]
        if own["sampler"] != type(self).__name__:
            raise ValueError(f"this is a state of {own['sampler']}, not of {type(self).__name__}.")
        if own["generator"].shape != self.generator.get_state().shape:
            raise ValueError("the state was saved on another kind of device: its random numbers cannot go on here.")
        if own["target"] != str(self.target):
            warn(f"the state is of another target: {own['target']}; this sampler's is {self.target}.")
        self._resolution = Resolution(*own["resolution"]) if own.get("resolution") else None
        self._padding = {int(i): tuple(rows) for i, rows in own.get("held_rows", {}).items()}
        self._load_torch(state_dict)
        self._keep_dtypes(state_dict)
        self.generator.set_state(own["generator"].cpu())
        self.num_steps = own["num_steps"]
        self._sum_acceptance.copy_(own["sum_acceptance"])
        self._frozen_at = own["frozen_at"].to(self.device, copy=True)
        self._frozen_at_host.copy_(self._frozen_at)
        memory = _pytree.tree_map_only(Tensor, lambda x: x.to(self.device, copy=True), own.get("memory"))
        self._memory = None if memory is None else self._remember(memory)
        self._adaptation = None
        if (saved := own.get("adaptation")) is not None:  # what was saved goes on, whatever this sampler was told
            self.burn_in = BurnIn(**saved["settings"])
            adaptation = self._new_adaptation()
            assert adaptation is not None
            # (what is summed on the device comes from a file on the host)
            adaptation.load_state_dict(_pytree.tree_map_only(Tensor, lambda x: x.to(self.device, copy=True), saved))
            self._adaptation = adaptation
        reference = _pytree.tree_map_only(Tensor, lambda x: x.to(self.device, copy=True), own.get("reference"))
        self._reference = None if reference is None else Reference(*reference)
        self._monitor = None
        if own.get("health") is not None:
            self._monitor = self._new_monitor(self._layout())
            self._monitor.load_state_dict(own["health"])
        if own.get("count") is not None:
            self._carry = own["count"].to(self.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: all but caches, and the wrapper that a scheduler puts around `step`."""
        own = ("_packing", "_info", "_here", "_carry", "_left", "_fingerprint", "_frozen_at_host", "_layers", "step")
        caches = (*own, "_closures", "_captures", "_clock", "_clock_at", *self._own_caches)
        kept = {key: value for key, value in self.__dict__.items() if key not in caches and "hooks" not in key}
        return {**kept, "generator": (str(self.device), self.generator.get_state())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "generator" not in state:  # torch's load_state_dict sets only its own part
            super().__setstate__(state)
            return
        device, numbers_to_come = state["generator"]
        state = {"fused": None, **state} if hasattr(type(self), "_one_pass_devices") else state
        generator = torch.Generator(device)
        generator.set_state(numbers_to_come)
        super().__setstate__({**state, "generator": generator})
        self._packing = self._info = self._here = self._carry = self._left = self._clock = None
        self._captures, self._clock_at = Captures(), -1
        self._closures, self._fingerprint = (), ()
        self._layers = Layers(self.batch_norm, self.device)
        self._frozen_at_host = _host_copy(self._frozen_at)
        for cache in self._own_caches:
            setattr(self, cache, None)

    def _load_foreign(self, state_dict: dict[str, Any]) -> None:
        raise ValueError(f"this is not a state of {type(self).__name__}: it has no entry '{_OWN_KEY}'.")

    def _keep_dtypes(self, state_dict: dict[str, Any]) -> None:
        """Undo torch's cast of all state to the dtype of its parameter, which would not go on bit for bit."""
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, p in zip(numbers, self._parameters(), strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, Tensor) and self.state[p][key].dtype != value.dtype:
                    self.state[p][key] = value.to(self.state[p][key].device, copy=True)

    def _load_torch(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != _OWN_KEY})
        self._here = self._carry = self._left = self._packing = None
        self._checked_sigmas = ()
        for state in self.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].cpu()  # where reading it costs nothing

    # --- small things -------------------------------------------------------------------------------------------

    def _parameters(self) -> list[Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _trainable(self) -> list[Parameter]:
        return [p for p in self._parameters() if p.requires_grad]

    @contextmanager
    def _same_layout(self) -> Iterator[None]:
        """Nobody touches the parameters inside: they need not be looked at again and again."""
        self._layout()
        self._is_settled = True
        try:
            yield
        finally:
            self._is_settled = False

    def _layout(self) -> Packing:
        """The trainable parameters in leaves; made anew when they are others than at the last step."""
        if self._is_settled and self._packing is not None:
            return self._packing
        params = self._trainable()
        if not params:
            raise ValueError("no parameter requires a gradient: there is nothing to sample.")
        if self._packing is None or not self._packing.fits(params):
            if self.target.prior is not None:
                self.target.prior.check(params)
            old = self._packing
            moved_only = old is not None and same(old.params, params)
            owners = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
            by_identity = {id(p): self._padding[i] for i, p in enumerate(self._parameters()) if i in self._padding}
            held = {i: by_identity[id(p)] for i, p in enumerate(params) if id(p) in by_identity}
            self._packing = Packing(params, [self._label(p, owners[p]) for p in params], held)
            self._groups = [owners[params[members[0]]] for members in self._packing.members]
            self._here = self._carry = self._left = None
            self._checked_sigmas = ()
            if moved_only:
                return self._packing
            self._monitor = None
            if old is not None:
                self._reference = None  # of other parameters
            if self.is_adapting:
                self._adaptation = self._new_adaptation()  # other parameters than before
        return self._packing

    def _now(self, packing: Packing) -> tuple[Any, ...]:
        """Changes when somebody writes to the weights (by way of autograd), or sets another target."""
        modes = self._layers.are_modes_as_left()
        return self.target, self.acceptance, self.fixed_data, modes, *((p.data_ptr(), p._version) for p in packing.params)

    def _is_as_left(self, packing: Packing) -> bool:
        """Whether weights and target are those that the last step left."""
        if self._left is None or self._now(packing) != self._fingerprint or not self._layers.are_buffers_as_left():
            return False
        if self.device.type != "cpu":
            return True
        # writes to p.data leave no trace but the values, at which looking is free on the CPU
        now = packing.sampled([p.detach() for p in packing.params])
        return all(torch.equal(p, left) for p, left in zip(now, packing.views(self._left), strict=True))

    def _options(self, key: str) -> list[Any]:
        """A hyper-parameter of each leaf."""
        return [self.param_groups[i][key] for i in self._groups]

    def _sigma_along(self) -> float:
        values = {float(group["sigma_along"]) for group in self.param_groups}
        if len(values) > 1:
            raise ValueError("`sigma_along` must be the same in all groups: there is one z for all parameters.")
        return values.pop()

    def _sigmas(self) -> list[float]:
        return [float(s) for s in self._options("sigma")]

    def _name(self, index: int) -> str:
        p = self._trainable()[index]
        for group in self.param_groups:
            for other, name in zip(group["params"], group.get("param_names", []), strict=False):
                if other is p:
                    return f"parameter '{name}'"
        return f"parameter {index}"

    def _check_resolution(self, packing: Packing) -> None:
        """Refuse noise below the spacing of the weights' own numbers, where it would be rounded away.

        Looks at the weights (and waits for the device) at the first step and whenever a sigma shrank, not at every step.
        """
        sigmas = tuple(self._sigmas())
        if self._checked_sigmas and all(s >= c for s, c in zip(sigmas, self._checked_sigmas, strict=True)):
            return
        for sigma, members in zip(sigmas, packing.members, strict=True):
            for i in members:
                p = packing.params[i].detach()
                largest = float(p.abs().max()) if p.numel() else 0.0
                if sigma == 0 or largest == 0 or not math.isfinite(largest):
                    continue
                ulp = torch.finfo(p.dtype).eps * 2.0 ** math.floor(math.log2(largest))
                if sigma < ulp:
                    raise ValueError(
                        f"`{self._noise_name}` = {sigma:.3g} is below the spacing {ulp:.3g} of {p.dtype} numbers near the "
                        f"largest weight {largest:.3g} of {self._name(i)}: the noise would be lost in rounding. Keep the "
                        f"weights in float32 (and use bfloat16 autocast in the closure), or raise {self._noise_name}."
                    )
        self._checked_sigmas = sigmas


def plain(value: Any) -> Any:
    """A setting as a number: torch's schedulers write into tensors, whose identity says nothing."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else tuple(value.tolist())
    return tuple(value) if isinstance(value, list) else value


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in _pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _products(packing: Packing, params: Leaves, grad: Leaves) -> Tensor:
    pairs = zip(packing.views(params), packing.views(grad), strict=True)
    return torch.stack([torch.dot(p.reshape(-1), g.reshape(-1)) for p, g in pairs])


def _burn_in(value: BurnIn | int | None) -> BurnIn | None:
    if value is None or isinstance(value, BurnIn):
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 0:
        raise ValueError(f"`burn_in` must be a number of steps, a BurnIn, or None, got {value!r}.")
    return BurnIn(num_steps=int(value)) if value > 0 else None


def _check_types(
    target: Target, acceptance: AcceptanceTest, examples: Examples | None, generator: torch.Generator | None
) -> None:
    if not isinstance(target.prior, Prior | None):
        raise TypeError(f"`prior` must be a Prior, such as Gaussian(1.0), or None, got {target.prior!r}.")
    if isinstance(acceptance, type) or not hasattr(acceptance, "approximation"):
        raise TypeError(f"`acceptance` must be an acceptance test, such as Minibatch() or FullData(), got {acceptance!r}.")
    if examples is not None and not hasattr(examples, "losses"):
        raise TypeError(
            f"`examples` must have a method `losses` (adammcmc.Examples), got {type(examples).__name__}. "
            "For tensors: TensorExamples(loss, inputs, targets)."
        )
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"`generator` must be a torch.Generator, got {generator!r}. Write torch.Generator().manual_seed(0).")


def _host_copy(flag: Tensor) -> Tensor:
    """Where the flag can be read without waiting for the device."""
    return torch.full(flag.shape, -1, dtype=flag.dtype, device="cpu", pin_memory=flag.is_cuda).copy_(flag)
