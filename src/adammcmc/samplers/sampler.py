"""The optimizer classes' common shell: torch's contract (parameter groups, closures, state) around one chain of `Chains`."""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, ClassVar, TypedDict, Unpack, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from adammcmc.acceptance import AcceptanceTest, Minibatch
from adammcmc.backends.graphs import tensors_of
from adammcmc.backends.streams import why_no_triton
from adammcmc.errors import PerExampleLossRequired
from adammcmc.kernels.kernel import ChainState, Info, Kernel
from adammcmc.samplers import checkpoint
from adammcmc.samplers.adaptation import Adaptation, BurnIn, Change, check_tunable, target_rate
from adammcmc.samplers.chains import Chains
from adammcmc.samplers.closure import Closure, Reference, expand
from adammcmc.samplers.health import Health
from adammcmc.samplers.layers import BatchNormPolicy, Layers
from adammcmc.samplers.layout import Layout, plain
from adammcmc.samplers.live import LiveNetwork
from adammcmc.samplers.packing import Packing, RowsToHold, padding_rows
from adammcmc.samplers.processes import check_one_process, check_parameters
from adammcmc.target.data import Examples
from adammcmc.target.leaves import Leaves, same
from adammcmc.target.likelihood import grows as loss_grows
from adammcmc.target.potential import Target
from adammcmc.target.priors import Prior
from adammcmc.target.resolution import Resolution

__all__ = ["Common", "Params", "Sampler"]

_NOT_SETTINGS = frozenset(("params", "param_names"))  # of a parameter group
_TORCH_KEYS = {"params", "param_names", "initial_lr", "name"}
_MOST_KERNELS = 16  # that are kept, by their settings

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Common(TypedDict, total=False):
    """Keyword arguments of every sampler; `Sampler` documents them."""

    inverse_temperature: float
    acceptance: AcceptanceTest | None
    examples: Examples | None
    fixed_data: bool
    batch_norm: BatchNormPolicy
    burn_in: BurnIn | int | None
    generator: torch.Generator | None


_DEFAULTS = Common(
    inverse_temperature=1.0,
    acceptance=None,
    examples=None,
    fixed_data=False,
    batch_norm="batch",
    burn_in=None,
    generator=None,
)


class Sampler(torch.optim.Optimizer, ABC):
    """What `AdamMCMC`, `Underdamped`, `MALA` and the others share: one chain over the parameters of a model.

    A parameter with `requires_grad=False` is not sampled. One that the loss does not depend on has gradient zero and is
    sampled: its posterior is its prior. Padding rows of embeddings (`padding_idx`) stay as they are.

    Args:
        params: parameters, named parameters or groups, as for any optimizer.
        num_data: the number of training examples n (not of batches, not of examples in a batch).
        prior: a `Prior`; None is flat and improper. There is no weight decay: that is a `Gaussian` prior.
        inverse_temperature: lambda, multiplies the SUM of the losses; 1 is Bayes.
        acceptance: `Minibatch()` (default), `FullData()`, `AlwaysAccept()`, one of `adammcmc.acceptance`, or your own.
        examples: the data set as per-example losses, for tests that choose examples (`FullData`, `Barker`, ...).
        fixed_data: the closure's loss is the same function of the weights at every step (full batch). Then the gradient
            found at an accepted proposal serves the next step, and a step costs one forward and backward.
        batch_norm: what BatchNorm in training mode does: "batch" (statistics of the batch; buffers move on acceptance
            only) or "frozen" (running statistics, which stay as they are). Dropout has the same mask on both sides of a
            step.
        burn_in: a `BurnIn`, or a number of steps, of adaptation. Nothing should be collected before `is_adapting` is
            False. None: no adaptation.
        generator: the source of all randomness; by default a new one, seeded from torch's global seed. The closure must
            not draw from it.
    """

    _target_acceptance: ClassVar[float]
    """What burn-in tunes to by default."""
    _tunes_sigma_along: ClassVar[bool] = False
    _tunes_lr: ClassVar[bool] = False
    """Whether burn-in finds the learning rate, which is the step size then."""
    _noise_name: ClassVar[str] = "sigma"
    _learns_preconditioner: bool = False
    _not_taken: ClassVar[frozenset[str]] = frozenset()
    """Common arguments that the sampler does not have."""
    num_chains: ClassVar[int] = 1
    chains: Chains

    def __init_subclass__(cls, **options: Any) -> None:
        """Common arguments are declared once, in `Common`: the signature shows them all the same."""
        super().__init_subclass__(**options)
        if "__init__" not in vars(cls):
            return
        own = inspect.signature(cls.__init__)
        listed = [p for p in own.parameters.values() if p.name != "self" and p.name != "common"]
        if "common" in own.parameters:
            taken = {p.name for p in listed} | cls._not_taken
            kinds = Common.__annotations__
            rest = [p for p in listed if p.kind is p.VAR_KEYWORD]
            listed = [p for p in listed if p.kind is not p.VAR_KEYWORD]
            listed += [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=kinds[name])
                for name, value in _DEFAULTS.items()
                if name not in taken
            ]
            listed += rest
        cls.__signature__ = own.replace(parameters=listed)  # type: ignore[attr-defined]

    def __init__(
        self, params: Params, defaults: dict[str, Any], *, num_data: int, prior: Prior | None, **common: Unpack[Common]
    ) -> None:
        for key in common:
            if key not in _DEFAULTS or key in self._not_taken:
                near = difflib.get_close_matches(key, inspect.signature(type(self)).parameters, n=1)
                hint = f" Did you mean '{near[0]}'?" if near and near[0] != key else ""
                raise TypeError(f"{type(self).__name__} has no argument '{key}'.{hint}")
        given = cast(Common, {**_DEFAULTS, **common})
        check_one_process()
        self.target = Target(num_data, given["inverse_temperature"], prior)
        self.acceptance: AcceptanceTest = given["acceptance"] or Minibatch()
        _check_types(self.target, given["acceptance"], given["examples"], given["generator"])
        self.fixed_data = given["fixed_data"]
        self.reference: Reference | None = None
        """Of a control variate."""
        self._kernels: list[tuple[Any, Kernel]] = []
        self._backend: tuple[tuple[Any, ...], Any] | None = None
        self._paired: dict[int, tuple[Kernel, Kernel]] = {}
        super().__init__(params, defaults)
        examples, generator = given["examples"], given["generator"]
        if examples is not None and len(examples) != num_data:
            raise ValueError(f"`num_data` is {num_data}, but `examples` holds {len(examples)}.")
        devices = {p.device for p in self.parameters.all}
        if len(devices) > 1:
            raise ValueError(f"all parameters must be on one device, got {sorted(map(str, devices))}.")
        self.device = devices.pop()
        if generator is None:
            # drawn from torch's default generator, so that torch.manual_seed fixes the run
            generator = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, ())))
        self.generator = generator
        self.batch_norm: BatchNormPolicy = given["batch_norm"]
        self.burn_in = _burn_in(given["burn_in"])
        self._start(examples)
        self.kernel()  # checks the hyper-parameters
        self.chains.adaptation = self.new_adaptation()

    def _start(self, examples: Examples | None) -> None:
        """The chain at its first step."""
        self.network = LiveNetwork(self, Layers(self.batch_norm, self.device), examples, self.device)
        self.chains = Chains(self.network, self)

    def _new_layout(self) -> Layout:
        return Layout(self.param_groups, self._label, lambda: self._why_not_fused() is None, self._relayed)

    def _relayed(self, are_same: bool) -> None:
        """The parameters were packed anew: in other memory, or others altogether."""
        if self.target.prior is not None:
            self.target.prior.check(self.parameters.trainable)
        if not self._has_started:
            return
        self.chains.here = self.chains.carry = None
        self.network.forget()
        if not are_same:
            self.chains.monitor, self.reference = None, None
            if self.is_adapting:
                self.chains.adaptation = self.new_adaptation()

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

    def _version(self) -> Any:
        """Changes with whatever `_kernel` reads besides the groups, the acceptance test and plain public options."""
        return None

    def _gather(self, packing: Packing, memory: Any) -> Any:
        """The kernel's memory in the layout of these leaves; None makes it start afresh."""
        return memory

    def _new_backend(self, packing: Packing) -> Any:
        """A faster way to compute the proposal on these leaves; None if there is none."""
        return None

    def _backend_key(self, packing: Packing) -> tuple[Any, ...]:
        """The backend is made anew when one of these objects is replaced."""
        return (packing,)

    def _set_preconditioner(self, packing: Packing, diagonal: Leaves) -> None:
        """Use this A (only called on a sampler that learns one)."""

    def _why_not_fused(self) -> str | None:
        """Why the step is not computed in place on a GPU; None if it is."""
        return "there is no fused step for it"

    def _why_not_triton(self) -> str | None:
        """Why the kernels of `backends` cannot move these parameters; None if they can."""
        if self.device.type not in FUSED_DEVICES:
            return f"the parameters are on {self.device.type}"
        if not self.acceptance.uses_batch_only:
            return f"the test must use the losses of the batch only, not {self.acceptance}"  # others evaluate both points
        if self.parameters.held:
            return "padding rows of an embedding are held, which a pass over memory cannot leave out"
        if not all(p.dtype == torch.float32 and p.is_contiguous() for p in self.parameters.trainable):
            return "parameters must be float32 and contiguous"
        return why_no_triton(self.device)

    def why_not_stacked(self) -> str | None:
        """Why the chain cannot be one of a stack (`stacked`)."""
        return None if self.reference is None else "a control variate is expanded for one chain at a time"

    def pure_kernel(self) -> tuple[Any, Any]:
        """The kernel without a backend, and its memory, for a stack."""
        packing = self.layout()
        return self._kernel(packing), self._gather(packing, self.chains.memory)

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint stores of the sampler besides torch's state and the chain's."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore it."""

    # --- the owner of the chain's settings (`chains.Owner`) -------------------------------------------------------

    @property
    def targets(self) -> Sequence[Target]:
        return [self.target]

    @property
    def scale(self) -> float:
        return self.target.scale

    def kernel(self) -> Kernel:
        """The kernel with the present settings; the same object while they do not change."""
        packing = self.layout()
        settings = [
            [(key, plain(value)) for key, value in group.items() if key not in _NOT_SETTINGS] for group in self.param_groups
        ]
        key = [packing, settings, self.acceptance, self._simple_options(), self._version()]
        for known, kernel in self._kernels:
            if known == key:
                return self._with_backend(packing, kernel)
        made = self._kernel(packing)
        self._kernels = [*self._kernels[1 - _MOST_KERNELS :], (key, made)]
        return self._with_backend(packing, made)

    def _with_backend(self, packing: Packing, kernel: Any) -> Kernel:
        """The same kernel with its backend, as one object for each pair of them."""
        parts = self._backend_key(packing)
        if self._backend is None or not same(self._backend[0], parts):
            self._backend, self._paired = (parts, self._new_backend(packing)), {}
        if (backend := self._backend[1]) is None:
            return cast(Kernel, kernel)
        if id(kernel) not in self._paired:
            self._paired[id(kernel)] = kernel, replace(kernel, backend=backend)
        return self._paired[id(kernel)][1]

    def check_settings(self) -> None:
        if any("initial_lr" in group for group in self.param_groups):
            self.check_schedulable()
        self.layout()  # settings are those of its leaves
        self.parameters.check_noise(self._sigmas(), self._noise_name)

    def prepare(self, potential: Any, state: ChainState) -> ChainState:
        return state._replace(memory=self._gather(self.layout(), state.memory))

    def keep(self, memory: Any) -> Any:
        return memory

    def counted(self) -> None:
        """Nothing is counted on the host."""

    def apply(self, change: Change, potential: Any, state: ChainState) -> None:
        self._rescale(change.factor)
        if change.sigma_along is not None:
            for group in self.param_groups:
                group["sigma_along"] = change.sigma_along
        if change.preconditioner is not None:
            self._set_preconditioner(self.layout(), change.preconditioner)

    def is_cached(self) -> bool:
        return self.chains.here is not None

    def token(self) -> Any:
        params, state = self.parameters.all, self.state
        return (
            (self.parameters.current, self.generator, self.target, self.acceptance),
            self._simple_options(),
            [(p.data_ptr(), p._version, p.requires_grad) for p in params],
            # what belongs to a parameter, exchanged or written to; `step` is counted by ourselves
            [(id(x), x._version) for p in params for key, x in state[p].items() if key != "step" and isinstance(x, Tensor)],
            [plain(group[key]) for group in self.param_groups for key in group if key not in _NOT_SETTINGS],
        )

    def _simple_options(self) -> list[Any]:
        """Public options that are plain values: friction, fused, ..."""
        return [
            (key, value)
            for key, value in vars(self).items()
            if key[0] != "_" and isinstance(value, bool | int | float | tuple | None)
        ]

    def layout(self) -> Packing:
        """The trainable parameters in leaves."""
        return self.parameters.packing()

    def same_layout(self) -> AbstractContextManager[None]:
        return self.parameters.settled()

    def name(self, index: int) -> str:
        """Of a trainable parameter, for messages."""
        return self.parameters.name(index)

    # --- one step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure | Sequence[Closure] | Callable[[Any], Tensor] | None = None, batch: Any = None
    ) -> Tensor:
        """One transition: propose, test, move or stay. Returns the batch's mean loss at the weights before the step.

        Args:
            closure: returns the loss of this step's batch at the model's present weights: the mean, shape (), or (better,
                it loses fewer digits) the per-example losses, shape (batch,). It is called at the current and at the
                proposed weights, and must use the same batch both times. A list of closures is a batch in micro-batches,
                whose gradients are accumulated: means of equally many examples each, or per-example losses.
            batch: a tensor, or a nested container of tensors. Then `closure` is a function of it, the same object at each
                step:

                    def loss(batch):
                        x, y = batch
                        return F.cross_entropy(model(x), y)

                    sampler.step(loss, (x, y))

                On a GPU the whole step becomes one CUDA graph, captured once per batch shape and replayed, which for small
                networks is many times faster. What cannot be captured runs without one, after one warning with the reason.

        If the closure raises, the weights are restored and the error propagates; the moments may have taken in this
        gradient.
        """
        if batch is not None:
            if not callable(closure):
                raise TypeError(f"step(loss, batch) needs a function of the batch, got {type(closure).__name__}.")
            loss = cast(Callable[[Any], Tensor], closure)
            self._check_mean(loss, batch)
            self.network.closures = [functools.partial(loss, batch)] if self.fixed_data else ()
            return self._transition(lambda: self.chains.step(loss, batch))
        closures: Any = [closure] if callable(closure) else closure
        if not isinstance(closures, list | tuple) or not closures or not all(map(callable, closures)):
            raise TypeError(
                f"{type(self).__name__}.step needs a closure (a function) that returns the loss of the batch, got "
                f"{type(closure).__name__}. Write sampler.step(lambda: F.cross_entropy(model(x), y)). GradScaler passes "
                "none: for mixed precision use torch.autocast with bfloat16 inside the closure, without a scaler."
            )
        self.network.closures = closures if self.fixed_data else ()
        return self._transition(lambda: self.chains.ordinary_step(closures, None))

    def _transition(self, step: Callable[[], Tensor]) -> Tensor:
        try:
            return step()[0]
        except RowsToHold:  # the closure's modules are known now
            self.parameters.hold(self.network.layers.padding)
            return step()[0]

    def _check_mean(self, loss: Callable[[Any], Tensor], batch: Any) -> None:
        """At the first step: if a batch's loss is the sum of its halves' losses, it is no mean."""
        if self.num_steps > 0 or self.target.num_data == 1:
            return
        if len({len(x) if x.dim() > 0 else 0 for x in tensors_of(batch)}) != 1:
            return  # without one row per example it cannot be halved
        with self._grads_restored(), torch.enable_grad():  # a loss may call backward itself
            is_sum = self.network.layers.look(lambda: loss_grows(loss, batch))
        if is_sum:
            raise ValueError(
                "the loss of a batch is the sum of the losses of its halves: it looks like a sum, and would be taken as the "
                f"mean loss and multiplied by num_data = {self.target.num_data}. Return the mean, or the per-example "
                "losses, shape (batch,)."
            )

    @contextmanager
    def _grads_restored(self) -> Iterator[None]:
        grads = [(p, p.grad) for p in self.parameters.all]
        try:
            yield
        finally:
            for p, grad in grads:
                p.grad = grad

    def hold_padding(self, model: torch.nn.Module) -> None:
        """Hold the padding rows (`padding_idx`) of the model's embeddings from now on.

        `step` does so by itself at the first step, when it has seen the modules that the closure calls.
        """
        self.parameters.hold(padding_rows(model.modules()))

    def use_control_variate(self, order: int = 1) -> None:
        """Use the present weights as the reference of a control variate (`adammcmc.target.control`).

        Tests that choose their own examples (`Barker`, `Tuna`, ...) then estimate only what the derivatives at the reference
        do not predict, which is little while the chain stays near. Call it once, at the end of burn-in. (`sample`, which
        makes its samplers itself, and stacked chains have none.)

        Args:
            order: 1 costs a pass over the data with gradients, and about three more forwards per example that a test
                evaluates; the loss must be twice differentiable. 2 keeps the Hessian of the sum as well: for 2,000
                parameters at most, a backward over the data for each of them, and a loss that autograd can differentiate
                four times.
        """
        test = self.acceptance
        if self.fixed_data or test.uses_all_data or not test.needs_examples:
            raise ValueError(
                f"a control variate would do nothing here ({'fixed data' if self.fixed_data else test}): it is for tests that "
                "choose their own examples, such as Barker(), Tuna(bound) or Penalty(batch_size)."
            )
        if (examples := self.network.examples) is None:
            raise PerExampleLossRequired(
                "a control variate needs per-example losses: pass `examples=TensorExamples(loss, inputs, targets)`."
            )
        layers = self.network.layers

        def losses(rows: slice) -> Tensor:
            return layers.example_losses(examples.losses, rows)

        self.reference = expand(losses, self.parameters.trainable, len(examples), order)

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
        fresh: dict[int, Tensor] = {}
        if self.network.layers.has_statistics:
            with self._grads_restored(), self.chains.on_device(), torch.enable_grad():  # a closure may call `backward`
                for p in self.parameters.all:
                    p.grad = None
                fresh = self.network.layers.fresh_statistics(self.network.closures)
        state = model.state_dict(keep_vars=True)
        return {name: fresh.get(id(x), x).detach().clone() for name, x in state.items() if isinstance(x, Tensor)}

    # --- burn-in and reports (`Chains` has them) --------------------------------------------------------------------

    @property
    def _has_started(self) -> bool:
        return "chains" in vars(self)

    @property
    def num_steps(self) -> int:
        """Transitions taken."""
        return self.chains.num_steps if self._has_started else 0

    @property
    def is_adapting(self) -> bool:
        """Whether the settings still change, so that nothing should be collected."""
        return self._has_started and self.chains.is_adapting

    def new_adaptation(self) -> Adaptation | None:
        """The adaptation of burn-in at its first step."""
        if self.burn_in is None:
            return None
        check_tunable(self.acceptance)
        packing = self.layout()
        prior, precision = self.target.prior, None
        if prior is not None and (values := prior.precision(packing.params)) is not None:
            pairs = zip(packing.params, values, strict=True)
            full = [torch.full(p.shape, value, dtype=torch.float64, device=p.device) for p, value in pairs]
            precision = tuple(leaf[0] for leaf in packing.join(full))
        return Adaptation(
            self.burn_in,
            target=target_rate(self.acceptance, self._target_acceptance),
            num_params=sum(packing.sizes),
            tunes_sigma_along=self._tunes_sigma_along,
            precision=precision,
            learns=self._learns_preconditioner,
        )

    @property
    def info(self) -> Info:
        """The last step in numbers, 0-d tensors on the parameters' device; reading it does not wait for the device."""
        return Info(*(field[0] for field in self.chains.info))

    @property
    def mean_acceptance_rate(self) -> Tensor:
        """Mean of min(1, exp(Y)) over all steps of this sampler, on the device."""
        return self.chains.mean_acceptance_rate[0]

    @property
    def beta_eff(self) -> Tensor:
        """By what factor the noise of the last step's log ratio lowers the inverse temperature (`acceptance.beta_eff`).

        1 is right. NaN where the noise is not known, and for tests that allow for it. Reading it does not wait.
        """
        return self.chains.beta_eff[0]

    @property
    def resolution(self) -> Resolution | None:
        """How precisely U is known; None before the first step, and for a test that does not use U."""
        return self.chains.resolution

    def present_loss(self) -> Tensor:
        """The mean loss at the present weights as far as the last step found it (`Chains.present_loss`)."""
        return self.chains.present_loss()[0]

    def health(self) -> Health:
        """What the record of the run says since burn-in ended: numbers, and a verdict. Waits for the device."""
        return self.chains.health()[0]

    def health_state(self) -> dict[str, Any]:
        """What `health` is read from, besides its sums (which `state_dict` has): see `health.read_health`."""
        return self.chains.health_state()

    def health_sums(self) -> dict[str, float]:
        """Running sums behind `health`, by name, and the number of steps in them. Waits for the device."""
        return self.chains.health_sums()[0]

    def reset_health(self) -> None:
        """Forget the steps so far: burn-in is over."""
        self.chains.reset_health()

    def check(self) -> None:
        """Raise `NonFiniteLoss` if the chain froze, `ManyProcesses` if the process shares its model with others.

        `step` calls it; on an accelerator it may notice a frozen chain a few steps late.
        """
        self.chains.check()

    def unfreeze(self) -> None:
        """Let a chain that froze on a non-finite loss continue from where it stands."""
        self.chains.unfreeze()

    def approximations(self) -> list[str]:
        """Why the chain is not exact, in a few words each; empty if it is."""
        return self.chains.approximations()

    def describe(self) -> str:
        """The realised target in one line: density, temperature, data, prior, kernel, test, exact or approximate."""
        return self.chains.describe()

    @property
    def gradients_per_step(self) -> int:
        """Backward passes of the loss in one step."""
        return 1

    def check_schedulable(self) -> None:
        """Refuse a scheduler while burn-in finds the step size."""
        if self.is_adapting and self._tunes_lr:
            raise ValueError(
                "a scheduler would overwrite the step size that burn-in finds. Give the sampler a `step_size`, or leave out "
                "the scheduler; in your own loop, create it once `sampler.is_adapting` is False."
            )

    # --- torch's contract -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for key in set(param_group) - set(self.defaults) - _TORCH_KEYS:
            near = difflib.get_close_matches(key, self.defaults, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else f" Known: {sorted(self.defaults)}."
            if key == "weight_decay":
                hint = " Weight decay is a prior here: prior=Gaussian(scale)."
            raise ValueError(f"unknown option '{key}' in a parameter group.{hint}")
        if not hasattr(self, "parameters"):
            self.parameters = self._new_layout()
        listed = param_group["params"]
        listed = [listed] if isinstance(listed, Tensor) else list(listed)
        tensors = [x[1] if isinstance(x, tuple) else x for x in listed] + self.parameters.all
        if len(set(map(id, tensors))) < len(tensors):
            raise ValueError("a parameter is listed twice: it would be two coordinates of the chain.")
        check_parameters(tensors)
        super().add_param_group({**param_group, "params": listed})
        self.parameters.drop()
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
        """torch's state, and under one key of its own the generator and the counters: enough to continue bit for bit."""
        return checkpoint.save(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this sampler, to continue bit for bit (or, for AdamMCMC, the moments of a torch.optim.Adam)."""
        if checkpoint.KEY in state_dict:
            checkpoint.load(self, state_dict)
        else:
            self._load_foreign(state_dict)

    def _load_foreign(self, state_dict: dict[str, Any]) -> None:
        raise ValueError(f"this is not a state of {type(self).__name__}: it has no entry '{checkpoint.KEY}'.")

    def load_torch_state(self, state_dict: dict[str, Any]) -> None:
        """torch's part of a state."""
        super().load_state_dict({key: value for key, value in state_dict.items() if key != checkpoint.KEY})
        self.parameters = self._with_groups(self.parameters)
        self.chains.here = self.chains.carry = None
        for state in self.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].cpu()  # where reading it costs nothing

    def _with_groups(self, old: Layout) -> Layout:
        """The layout of the present groups: torch replaces their list when a state is loaded."""
        layout = self._new_layout()
        layout.held = old.held
        return layout

    def __getstate__(self) -> dict[str, Any]:
        return checkpoint.pickled(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "generator" not in state:  # torch's load_state_dict sets only its own part
            super().__setstate__(state)
            return
        own, examples = state[checkpoint.KEY]
        super().__setstate__(checkpoint.unpickled(self, state))
        self._kernels, self._backend, self._paired = [], None, {}
        self.parameters = self._new_layout()
        self.parameters.held = own["held_rows"]
        self._start(examples)
        if own["adaptation"] is not None:
            self.chains.adaptation = self.new_adaptation()
        self.chains.load_state_dict(own)

    # --- settings ---------------------------------------------------------------------------------------------------

    def _options(self, key: str) -> list[Any]:
        """A hyper-parameter of each leaf."""
        return self.parameters.options(key)

    def _sigma_along(self) -> float:
        values = {float(group["sigma_along"]) for group in self.param_groups}
        if len(values) > 1:
            raise ValueError("`sigma_along` must be the same in all groups: there is one z for all parameters.")
        return values.pop()

    def _sigmas(self) -> list[float]:
        return [float(s) for s in self._options("sigma")]


FUSED_DEVICES = {"cuda"}
"""Where steps are computed in place by Triton; tests add "cpu", for its interpreter."""


def _burn_in(value: BurnIn | int | None) -> BurnIn | None:
    if value is None or isinstance(value, BurnIn):
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 0:
        raise ValueError(f"`burn_in` must be a number of steps, a BurnIn, or None, got {value!r}.")
    return BurnIn(num_steps=int(value)) if value > 0 else None


def _check_types(
    target: Target, acceptance: AcceptanceTest | None, examples: Examples | None, generator: torch.Generator | None
) -> None:
    if not isinstance(target.prior, Prior | None):
        raise TypeError(f"`prior` must be a Prior, such as Gaussian(1.0), or None, got {target.prior!r}.")
    if acceptance is not None and (isinstance(acceptance, type) or not isinstance(acceptance, AcceptanceTest)):
        raise TypeError(f"`acceptance` must be an acceptance test, such as Minibatch() or FullData(), got {acceptance!r}.")
    if examples is not None and not hasattr(examples, "losses"):
        raise TypeError(
            f"`examples` must have a method `losses` (adammcmc.Examples), got {type(examples).__name__}. "
            "For tensors: TensorExamples(loss, inputs, targets)."
        )
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"`generator` must be a torch.Generator, got {generator!r}. Write torch.Generator().manual_seed(0).")
