"""What the optimizer classes share: one chain over the parameters of a model, one step at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from adammcmc.backends.graphs import tensors_of
from adammcmc.backends.streams import why_no_triton
from adammcmc.errors import PerExampleLossRequired
from adammcmc.kernels.kernel import ChainState, Kernel
from adammcmc.kernels.scaling import Scaling
from adammcmc.samplers.adaptation import Change
from adammcmc.samplers.closure import Closure, expand
from adammcmc.samplers.forces import Forces
from adammcmc.samplers.layers import Layers
from adammcmc.samplers.one_chain import LiveNetwork, closures_of
from adammcmc.samplers.packing import Packing, RowsToHold, padding_rows
from adammcmc.samplers.replay import ReplayedChains
from adammcmc.samplers.torch_optimizer import Common, Params, Shell
from adammcmc.target.batches import Parts
from adammcmc.target.data import Examples
from adammcmc.target.leaves import Leaves, same
from adammcmc.target.likelihood import grows as loss_grows
from adammcmc.target.potential import Target

__all__ = ["Common", "Params", "Sampler"]

_NOT_SETTINGS = frozenset(("params", "param_names"))  # of a parameter group
_PLAIN = (bool, int, float, tuple, type(None))
_MOST_KERNELS = 16  # that are kept, by their settings
FUSED_DEVICES = {"cuda"}
"""Where steps are computed in place by Triton; tests add "cpu", for its interpreter."""


class Sampler(Shell):
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
            computed at an accepted proposal is reused in the next step, and a step costs one forward and backward.
        batch_norm: what BatchNorm in training mode does: "batch" (statistics of the batch; buffers change on acceptance
            only) or "frozen" (running statistics, which do not change). Dropout has the same mask on both sides of a
            step.
        burn_in: a `BurnIn`, or a number of adaptation steps. Do not collect draws before `is_adapting` is
            False. None: no adaptation.
        generator: the source of all randomness; by default a new one, seeded from torch's global seed. The closure must
            not draw from it.
    """

    chains: ReplayedChains
    forces: Forces = "float32"
    """The arithmetic of gradients."""

    def _start(self, examples: Examples | None) -> None:
        """The chain at its first step."""
        self.network = LiveNetwork(self, Layers(self.batch_norm, self.device), examples, self.device)
        self.chains = ReplayedChains(self.network, self)

    @abstractmethod
    def _kernel(self, packing: Packing) -> Kernel:
        """The kernel with the present hyper-parameters of the groups, for these leaves."""

    def _rescale(self, factor: float) -> None:
        """Make the moves of all groups `factor` times as long."""
        for group in self.param_groups:
            group["sigma"] *= factor

    def _gather(self, packing: Packing, memory: Any) -> Any:
        """The kernel's memory in the layout of these leaves; None makes it start afresh."""
        return memory

    def _new_backend(self, packing: Packing) -> Any:
        """A faster way to compute the proposal on these leaves; None if there is none."""
        return None

    def _parts(self, packing: Packing) -> tuple[Any, ...]:
        """Kernel and backend are made anew when one of these objects is replaced, or another setting is changed."""
        return (packing,)

    def _set_preconditioner(self, packing: Packing, metric: Leaves | Scaling) -> None:
        """Use this A (only called on a sampler that learns one)."""

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
        if self.forces != "float32":
            return "`forces` is for one chain at a time"
        return None if self.reference is None else "a control variate is expanded for one chain at a time"

    def pure_kernel(self) -> tuple[Any, Any]:
        """The kernel without a backend, and its memory, for a stack."""
        packing = self.layout()
        return self._kernel(packing), self._gather(packing, self.chains.memory)

    @property
    def targets(self) -> Sequence[Target]:
        return [self.target]

    @property
    def scale(self) -> float:
        return self.target.scale

    def kernel(self) -> Kernel:
        """The kernel with the present settings and its backend; the same object while they do not change."""
        packing = self.layout()
        parts = self._parts(packing)
        if self._backend is None or not same(self._backend[0], parts):
            self._backend, self._kernels = (parts, self._new_backend(packing)), []
        settings = [
            [(key, _plain(value)) for key, value in group.items() if key not in _NOT_SETTINGS] for group in self.param_groups
        ]
        key = [settings, self.acceptance, self._simple_options()]
        for known, kernel in self._kernels:
            if known == key:
                return kernel
        made: Any = self._kernel(packing)
        if (backend := self._backend[1]) is not None:
            made = replace(made, backend=backend)
        self._kernels = [*self._kernels[1 - _MOST_KERNELS :], (key, made)]
        return cast(Kernel, made)

    def check_settings(self) -> None:
        if any("initial_lr" in group for group in self.param_groups):
            self.check_schedulable()
        self.layout()  # settings are those of its leaves
        if not self.chains.is_adapting or self.chains.num_steps == 0:  # burn-in changes them
            self.parameters.check_noise(self._sigmas(), self._noise_name)

    def prepare(self, potential: Any, state: ChainState) -> ChainState:
        return state._replace(memory=self._gather(self.layout(), state.memory))

    def keep(self, memory: Any) -> Any:
        return memory

    def counted(self) -> None:
        """Nothing is counted on the host."""

    def apply(self, change: Change, potential: Any, state: ChainState) -> None:
        self._rescale(float(change.factor))
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
            [_plain(group[key]) for group in self.param_groups for key in group if key not in _NOT_SETTINGS],
        )

    def _simple_options(self) -> list[Any]:
        """Public options that are plain values: friction, fused, ..."""
        return [(key, value) for key, value in vars(self).items() if key[0] != "_" and type(value) in _PLAIN]

    def same_layout(self) -> AbstractContextManager[None]:
        return self.parameters.settled()

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure | Sequence[Closure] | Callable[[Any], Tensor] | None = None, batch: Any = None
    ) -> Tensor:
        """One transition: propose, test, move or stay. Returns the batch's mean loss at the weights before the step.

        Args:
            closure: returns the loss of this step's batch at the model's present weights: the mean, shape (), or (better,
                it loses fewer digits) the per-example losses, shape (batch,). It is called at the current and at the
                proposed weights, and must use the same batch both times. A list of closures is a batch in micro-batches,
                whose gradients are accumulated: each returns the mean of equally many examples, or per-example losses.
            batch: a tensor, or a nested container of tensors. Then `closure` is a function of it, the same object at each
                step:

                    def loss(batch):
                        x, y = batch
                        return F.cross_entropy(model(x), y)

                    sampler.step(loss, (x, y))

                On a GPU the whole step becomes one CUDA graph, captured once per batch shape and replayed, which for small
                networks is many times faster. What cannot be captured runs without one, after one warning with the reason.

        If the closure raises, the weights are restored and the error propagates; the moments may already include this
        gradient.
        """
        if batch is not None:
            if not callable(closure):
                raise TypeError(f"step(loss, batch) needs a function of the batch, got {type(closure).__name__}.")
            loss = cast(Callable[[Any], Tensor], closure)
            self._check_mean(loss, batch[0] if isinstance(batch, Parts) else batch)
            self.network.closures = closures_of(loss, batch, self.device) if self.fixed_data else ()
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

        `step` does so automatically at the first step, once the closure has called its modules.
        """
        self.parameters.hold(padding_rows(model.modules()))

    def use_control_variate(self, order: int = 1) -> None:
        """Use the present weights as the reference of a control variate (`adammcmc.target.control`).

        Tests that choose their own examples (`Barker`, `Tuna`, ...) then estimate only what the derivatives at the reference
        do not predict, which is small while the chain stays nearby. Call it once, at the end of burn-in. (`sample`, which
        builds its own samplers, has no argument for it; stacked chains do not support it.)

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
        """A draw: a copy of the model's state, unaffected by later steps. An error while the settings are adapting.

        With `fixed_data` and BatchNorm in training mode the last step's closure is called once more, without affecting the
        chain: the draw's running statistics are those of the data at its own weights, so that in evaluation mode it is the
        function that was sampled. On minibatches they are the running averages.
        """
        if self.is_adapting:
            raise RuntimeError(
                f"the sampler is still adapting its settings (step {self.num_steps}): its states have no fixed distribution. "
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


def _plain(value: Any) -> Any:
    """A setting as a number: torch's schedulers write into tensors, whose identity means nothing."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else tuple(value.tolist())
    return tuple(value) if isinstance(value, list) else value
