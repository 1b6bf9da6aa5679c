"""Torch's contract around a chain: arguments, parameter groups, state, pickling."""

from __future__ import annotations

import copy
import difflib
import inspect
import numbers
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from typing import Any, ClassVar, TypedDict, Unpack, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree

from adammcmc.acceptance import AcceptanceTest, Minibatch
from adammcmc.errors import warn
from adammcmc.kernels.kernel import Kernel
from adammcmc.samplers.adaptation import Adaptation, BurnIn, check_tunable
from adammcmc.samplers.closure import Reference
from adammcmc.samplers.layers import BatchNormPolicy
from adammcmc.samplers.metric import Kind
from adammcmc.samplers.one_chain import LiveNetwork
from adammcmc.samplers.packing import HeldRows, Layout, Packing
from adammcmc.samplers.processes import check_one_process, check_parameters
from adammcmc.samplers.tuned import tuned_by_burn_in, tuned_of_chain
from adammcmc.samplers.view import ChainView
from adammcmc.target.data import Examples
from adammcmc.target.leaves import Leaves
from adammcmc.target.potential import Target
from adammcmc.target.priors import Prior

__all__ = ["Common", "Params", "Shell"]

_KEY = "adammcmc"  # of our part of a checkpoint: what torch would cast or drop
_CACHES = ("step", "chains", "network", "parameters", "_kernels", "_backend")
"""Attributes that are made again; a scheduler wraps `step`."""
_TORCH_KEYS = {"params", "param_names", "initial_lr", "name"}

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


class Shell(torch.optim.Optimizer, ChainView, ABC):
    """An optimizer whose parameters are one chain. `Sampler` documents the arguments."""

    network: LiveNetwork

    _target_acceptance: ClassVar[float]
    """What burn-in tunes to by default."""
    _tunes_sigma_along: ClassVar[bool] = False
    _tunes_lr: ClassVar[bool] = False
    """Whether burn-in finds the learning rate, which is the step size then."""
    _noise_name: ClassVar[str] = "sigma"
    _needs_prior: ClassVar[bool] = False
    _always_fixed: ClassVar[bool] = False
    """Whether its data are fixed without being declared so."""
    _learns_preconditioner: bool = False
    _has_velocity: ClassVar[bool] = False
    """Whether it takes any `Scaling`, and can approach its bulk without a test."""
    _scaling: Kind = "diagonal"
    """What is learnt by default."""
    _not_taken: ClassVar[frozenset[str]] = frozenset()
    """Common arguments that the sampler does not have."""
    num_chains: ClassVar[int] = 1

    def __init_subclass__(cls, **options: Any) -> None:
        """Common arguments are declared once, in `Common`: the signature shows them all the same."""
        super().__init_subclass__(**options)
        if "__init__" not in vars(cls):
            return
        own = inspect.signature(cls.__init__)
        listed = [p for p in own.parameters.values() if p.name not in ("self", "common")]
        if "common" in own.parameters:
            taken = {p.name for p in listed} | cls._not_taken
            kinds = Common.__annotations__
            listed += [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=kinds[name])
                for name, value in _DEFAULTS.items()
                if name not in taken
            ]
        cls.__signature__ = own.replace(parameters=listed)  # type: ignore[attr-defined]

    def __init__(
        self, params: Params, defaults: dict[str, Any], *, num_data: int, prior: Prior | None, **common: Unpack[Common]
    ) -> None:
        if prior is None and self._needs_prior:
            raise ValueError(
                f"{type(self).__name__} needs a proper `prior`: without one the posterior of a network has no finite mass. "
                "Gaussian.fan_in(model) is a common choice."
            )
        for key in common:
            if key not in _DEFAULTS or key in self._not_taken:
                near = difflib.get_close_matches(key, inspect.signature(type(self)).parameters, n=1)
                hint = f" Did you mean '{near[0]}'?" if near and near[0] != key else ""
                raise TypeError(f"{type(self).__name__} has no argument '{key}'.{hint}")
        given = cast(Common, {**_DEFAULTS, **common})
        check_one_process()
        self.target = Target(num_data, given["inverse_temperature"], prior)
        self.acceptance: AcceptanceTest = given["acceptance"] or self._usual_test()
        _check_types(self.target, given["acceptance"], given["examples"], given["generator"])
        self.fixed_data = given["fixed_data"] or self._always_fixed
        self.reference: Reference | None = None
        """Of a control variate."""
        self._kernels: list[tuple[Any, Kernel]] = []
        self._backend: tuple[tuple[Any, ...], Any] | None = None
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

    def _usual_test(self) -> AcceptanceTest:
        """The acceptance test where none is given."""
        return Minibatch()

    @abstractmethod
    def _start(self, examples: Examples | None) -> None:
        """Make `network` and `chains`: the chain at its first step."""

    @abstractmethod
    def kernel(self) -> Kernel:
        """The kernel with the present settings."""

    def _new_layout(self, held: HeldRows | None = None) -> Layout:
        """The layout of the present groups, whose list torch replaces when a state is loaded."""
        return Layout(self.param_groups, self._label, lambda: self._why_not_fused() is None, self._relayed, held or {})

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

    def _label(self, p: Parameter, group: int) -> Hashable | None:
        """Parameters with equal labels share a leaf (`Packing`)."""
        return group

    def _why_not_fused(self) -> str | None:
        """Why the step is not computed in place on a GPU; None if it is."""
        return "there is no fused step for it"

    @property
    def _has_started(self) -> bool:
        return "chains" in vars(self)

    @property
    def _will_adapt(self) -> bool:
        """As `is_adapting`, and before the adaptation of this sampler is made."""
        if not self._has_started or self.chains.adaptation is None:
            return self.burn_in is not None
        return self.chains.is_adapting

    def new_adaptation(self) -> Adaptation | None:
        """The adaptation of burn-in at its first step."""
        if self.burn_in is None:
            return None
        check_tunable(self.acceptance)
        packing = self.layout()
        return Adaptation(
            self.burn_in,
            target=self.acceptance.rate_like(self._target_acceptance),
            num_params=sum(packing.sizes),
            tunes_sigma_along=self._tunes_sigma_along,
            precision=self._precision_of(packing),
            learns=self._learns_preconditioner,
            velocity=self._has_velocity,
            approaches=self.fixed_data and self.acceptance.is_metropolis and self.acceptance.uses_batch_only,
            shapes=[[packing.shapes[i] for i in members] for members in packing.members],
            scaling=self._scaling,
            step_size=float(self.param_groups[0]["lr"]) if self._has_velocity else None,
        )

    def _precision_of(self, packing: Packing) -> Leaves | None:
        """Of the prior, in the shapes of the leaves; None where it has none."""
        prior = self.target.prior
        if prior is None or (values := prior.precision(packing.params)) is None:
            return None
        pairs = zip(packing.params, values, strict=True)
        full = [torch.full(p.shape, value, dtype=torch.float64, device=p.device) for p, value in pairs]
        return tuple(leaf[0] for leaf in packing.join(full))

    def layout(self) -> Packing:
        """The trainable parameters in leaves."""
        return self.parameters.packing()

    def name(self, index: int) -> str:
        """Of a trainable parameter, for messages."""
        return self.parameters.name(index)

    def check_schedulable(self) -> None:
        """Refuse a scheduler while burn-in finds the step size."""
        if self.is_adapting and self._tunes_lr:
            raise ValueError(
                "a scheduler would overwrite the step size that burn-in finds. Give the sampler a `step_size`, or leave out "
                "the scheduler; in your own loop, create it once `sampler.is_adapting` is False."
            )

    def _tuned(self) -> dict[str, Any]:
        state = {**super().state_dict(), _KEY: {"adaptation": True, "extra": self.extra_state()}}
        return tuned_by_burn_in(tuned_of_chain(state), finds_step=self._tunes_lr)

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint stores of the sampler besides torch's state and the chain's."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore it."""

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

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's state, and under one key of its own the generator and the counters: enough to continue bit for bit."""
        state = super().state_dict()
        state[_KEY] = {
            "sampler": type(self).__name__,
            "target": str(self.target),
            "held_rows": {i: list(rows) for i, rows in self.parameters.held.items()},
            "reference": None if self.reference is None else copy.deepcopy(tuple(self.reference)),
            "extra": self.extra_state(),
            **self.chains.state_dict(),
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this sampler, to continue bit for bit (or, for AdamMCMC, the moments of a torch.optim.Adam)."""
        if _KEY not in state_dict:
            self._load_foreign(state_dict)
            return
        own = state_dict[_KEY]
        if own["sampler"] != type(self).__name__:
            raise ValueError(f"this is a state of {own['sampler']}, not of {type(self).__name__}.")
        if own["generator"].shape != self.generator.get_state().shape:
            raise ValueError("the state was saved on another kind of device: its random numbers cannot be continued here.")
        if own["target"] != str(self.target):
            warn(f"the state is of another target: {own['target']}; this sampler's is {self.target}.")
        self.parameters.held = {int(i): tuple(rows) for i, rows in own["held_rows"].items()}
        self.load_torch_state(state_dict)
        self._keep_dtypes(state_dict)
        self.load_extra_state(own["extra"])
        # an adaptation continues as saved, whatever this sampler was given
        self.burn_in = None if own["adaptation"] is None else BurnIn(**own["adaptation"]["settings"])
        self.chains.adaptation = self.new_adaptation()
        if self.chains.adaptation is not None:
            self.chains.adaptation.is_done = bool(own["adaptation"].get("is_done"))
        self.chains.load_state_dict(own)
        reference = _pytree.tree_map_only(Tensor, lambda x: x.to(self.device, copy=True), own["reference"])
        self.reference = None if reference is None else Reference(*reference)

    def _keep_dtypes(self, state_dict: dict[str, Any]) -> None:
        """Undo torch's cast of all state to the dtype of its parameter, which would not continue bit for bit."""
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, p in zip(numbers, self.parameters.all, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, Tensor) and self.state[p][key].dtype != value.dtype:
                    self.state[p][key] = value.to(self.state[p][key].device, copy=True)

    def _load_foreign(self, state_dict: dict[str, Any]) -> None:
        raise ValueError(f"this is not a state of {type(self).__name__}: it has no entry '{_KEY}'.")

    def load_torch_state(self, state_dict: dict[str, Any]) -> None:
        """torch's part of a state."""
        super().load_state_dict({key: value for key, value in state_dict.items() if key != _KEY})
        self.parameters = self._new_layout(self.parameters.held)
        self.chains.here = self.chains.carry = None
        for state in self.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].cpu()  # where reading it costs nothing

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: everything but caches; the chain as its state."""
        state = {key: value for key, value in vars(self).items() if key not in _CACHES and "hooks" not in key}
        own = {**self.chains.state_dict(), "held_rows": dict(self.parameters.held)}
        return {**state, "generator": (str(self.device), self.generator.get_state()), _KEY: (own, self.network.examples)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "generator" not in state:  # torch's load_state_dict sets only its own part
            super().__setstate__(state)
            return
        own, examples = state[_KEY]
        device, numbers_to_come = state["generator"]
        generator = torch.Generator(device)
        generator.set_state(numbers_to_come)
        super().__setstate__({**{key: value for key, value in state.items() if key != _KEY}, "generator": generator})
        self._kernels, self._backend = [], None
        self.parameters = self._new_layout(own["held_rows"])
        self._start(examples)
        if own["adaptation"] is not None:
            self.chains.adaptation = self.new_adaptation()
        self.chains.load_state_dict(own)

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
