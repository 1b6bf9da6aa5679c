r"""Many chains of one network in one evaluation: the weights of all chains stacked, the model run under `torch.func.vmap`.

    theta: leaves (chains, ...),    U_c(theta_c) = lambda_c * n * mean loss(theta_c; batch) - log prior(theta_c)

Chains share the batch and nothing else. Each has its own noise, its own settings (learning rate, noise, step size, lambda),
its own BatchNorm statistics and running buffers, which move on acceptance only, and its own dropout mask, the same on both
sides of a step. The transition is the pure kernel's: one chain alone would make the same moves, up to rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from adammcmc.backends.one_pass import has_one_pass, one_pass
from adammcmc.backends.streams import Counters
from adammcmc.errors import StochasticClosure
from adammcmc.kernels.adam import AdamMCMCKernel
from adammcmc.kernels.arguments import SETTINGS, settings_by_name
from adammcmc.kernels.kernel import ChainState, Kernel
from adammcmc.kernels.scaling import Scaling, restored, stored
from adammcmc.samplers.adaptation import Change, changed, check_common
from adammcmc.samplers.chains import Network, NetworkPotential, Owner
from adammcmc.samplers.packing import Packing
from adammcmc.samplers.replay import ReplayedChains
from adammcmc.samplers.sampler import Sampler
from adammcmc.samplers.tuned import tuned_by_burn_in, tuned_of_stack
from adammcmc.samplers.view import ChainView
from adammcmc.samplers.vmapped import StackedPrior, VmappedModel
from adammcmc.target.batches import Batch, Parts, to_device
from adammcmc.target.data import Examples
from adammcmc.target.leaves import Leaves, Setting, by_chain, spread_settings
from adammcmc.target.potential import Evaluation, Target, potential_difference
from adammcmc.target.randomness import Randomness

__all__ = ["CannotStack", "Setup", "StackedChains", "StackedNetwork", "StackedPotential", "setup_of", "stack"]

Loss = Callable[[nn.Module, Any], Tensor]
"""model, batch -> the per-example losses, (batch,), or their mean, ()."""


class CannotStack(ValueError):
    """The chains of a network cannot be run as one stack, for the reason given."""


# --- the target -----------------------------------------------------------------------------------------------------------


class StackedPotential(NetworkPotential):
    """The target of all chains on one batch.

    Args:
        stack: whose model, prior, buffers and layers it uses.
        batch: of this step, the same for all chains.
        has_prior: False if a backend adds the prior.
    """

    def __init__(self, stack: StackedNetwork, batch: Batch, *, has_prior: bool = True) -> None:
        owner, prior = stack.owner, stack.owner.targets[0].prior
        super().__init__(owner.scale, owner.inverse_temperature, prior, fixed=owner.fixed_data, examples=stack.examples)
        self._stack, self._batch = stack, batch
        self._prior = stack.prior if has_prior else StackedPrior(None, stack.model.params, stack.params)
        self._numbers: list[Tensor] = []
        self.moved: Leaves | None = None
        """The buffers as the last evaluation left them, had it been taken; None before the first."""

    def evaluate(self, params: Leaves, *, with_grad: bool) -> Evaluation:
        log_prior = self._prior.log_density(params)
        losses, grad = self._evaluate_loss(params, with_grad=with_grad)
        self.losses = losses if self.losses is None else self.losses
        if grad is None:
            return Evaluation(losses, log_prior, None)
        self.num_gradients += 1
        grad = self._with_prior(grad, params)
        if self.known is None:
            self.known = params, grad
        return Evaluation(losses, log_prior, grad)

    def evaluate_some(self, params: Leaves, chains: Tensor) -> Evaluation:
        if not self._stack.can_split:
            return self.evaluate(params, with_grad=True)
        rows = chains.nonzero().flatten()
        self.num_gradients += len(rows) / len(chains)
        some, slopes = self._evaluate_loss(tuple(x[rows] for x in params), with_grad=True)
        assert slopes is not None
        losses = some.new_full((len(chains), *some.shape[1:]), torch.nan).index_copy(0, rows, some)
        grad = tuple(torch.zeros_like(x).index_copy(0, rows, g) for x, g in zip(params, slopes, strict=True))
        return Evaluation(losses, self._prior.log_density(params), self._with_prior(grad, params))

    @property
    def num_parts(self) -> int:
        return len(self._batch) if isinstance(self._batch, Parts) else 1

    def force_of(self, params: Leaves, part: int) -> Leaves:
        if self.num_parts == 1:
            return self.force(params)
        weight = self._batch.weights[part]
        self.num_gradients += weight / self.num_parts
        _, grad = self._evaluate_batch(params, to_device(self._batch[part], self._stack.device), with_grad=True)
        assert grad is not None
        return self._with_prior(tuple(g * weight for g in grad), params)

    def _evaluate_loss(self, params: Leaves, *, with_grad: bool) -> tuple[Tensor, Leaves | None]:
        """The losses, and the gradient of their mean without the prior."""
        if not isinstance(self._batch, Parts):
            return self._evaluate_batch(params, self._batch, with_grad=with_grad)
        found, total = [], None
        weights = [weight / len(self._batch) for weight in self._batch.weights]
        for part, weight in zip(self._batch, weights, strict=True):
            losses, grad = self._evaluate_batch(params, to_device(part, self._stack.device), with_grad=with_grad)
            found.append(losses if losses.dim() > 1 else losses * weight)
            if grad is not None:
                shares = tuple(g * weight for g in grad)
                total = shares if total is None else tuple(torch._foreach_add(total, shares))
        return torch.cat(found, 1) if found[0].dim() > 1 else torch.stack(found).sum(0), total

    def _evaluate_batch(self, params: Leaves, batch: Batch, *, with_grad: bool) -> tuple[Tensor, Leaves | None]:
        stack = self._stack
        with torch.set_grad_enabled(with_grad):
            leaves = tuple(x.detach().requires_grad_(with_grad) for x in params)
            with stack.layers.modes(), stack.layers.same_numbers(self._numbers):
                losses, self.moved = stack.model.call(stack.loss, leaves, stack.buffers, batch)
            _check(losses)
            if not with_grad:
                return losses, None
            # chains do not meet in the sum, so that its gradient is that of each chain's own mean
            means = losses if losses.dim() == 1 else losses.mean(1)
            if not means.requires_grad:
                raise ValueError("the loss does not depend on the weights by autograd: there is nothing to sample.")
            return losses.detach(), torch.autograd.grad(means.sum(), leaves, allow_unused=True, materialize_grads=True)

    def evaluate_weighted(self, params: Leaves, weights: Tensor) -> Evaluation:
        stack, examples = self._stack, self._stack.examples
        assert examples is not None
        self.num_gradients += 1
        total = torch.zeros(len(weights), dtype=torch.float64, device=weights.device)
        leaves = tuple(x.detach().requires_grad_() for x in params)
        grad: Leaves = tuple(torch.zeros_like(x) for x in params)
        rows = (weights != 0).any(0).nonzero().flatten()  # of all chains together: under vmap each has as many examples
        if len(rows) > 0:
            with torch.enable_grad(), stack.layers.modes():
                losses, _ = stack.model.call(lambda _, rows: examples.losses(rows), leaves, stack.buffers, rows)
                own = weights[:, rows]
                losses = torch.where(own != 0, losses, 0.0)  # those of other chains' batches may be anything
                total = (losses.double() * own).sum(1) / len(examples)
                grad = torch.autograd.grad(total.sum(), leaves, allow_unused=True, materialize_grads=True)
        return Evaluation(total.detach(), self.log_prior(params), self._with_prior(grad, params))

    def _with_prior(self, grad: Leaves, params: Leaves) -> Leaves:
        """The gradient of V: the loss's part and the prior's."""
        if (prior_grad := self._prior.grad(params)) is None:
            return grad
        return tuple(g - q * by_chain(1 / self.scale, q) for g, q in zip(grad, prior_grad, strict=True))

    def prior_part(self, params: Leaves) -> Leaves | None:
        prior_grad = self._prior.grad(params)
        return None if prior_grad is None else tuple(q * by_chain(-1 / self.scale, q) for q in prior_grad)

    def compare(self, current: Evaluation, proposed: Evaluation) -> Tensor:
        return potential_difference(self.scale, current, proposed)

    def log_prior(self, params: Leaves) -> Tensor:
        return self._prior.log_density(params)

    def example_losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        stack = self._stack
        examples: Any = stack.examples
        losses, batch, is_own = examples.losses, indices, False
        if isinstance(indices, Tensor) and indices.dim() > 1:
            is_own = True
            if hasattr(examples, "rows"):  # fetched outside of vmap, where any data set can be indexed
                shape, flat = indices.shape, examples.rows(indices.reshape(-1))
                batch = _pytree.tree_map_only(Tensor, lambda x: x.reshape(*shape, *x.shape[1:]), flat)
                losses = examples.losses_of
        with torch.no_grad(), stack.layers.modes():
            return stack.model.call(lambda _, rows: losses(rows), params, stack.buffers, batch, is_own=is_own)[0]


def _check(losses: Tensor) -> None:
    if not losses.is_floating_point() or losses.dtype in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"the loss is in {losses.dtype}: its rounding, times num_data, would swamp the acceptance ratio. Compute it in "
            "float32, for example F.cross_entropy(model(x).float(), y)."
        )


# --- what the chains bring ----------------------------------------------------------------------------------------------


class Setup(NamedTuple):
    """What one chain brings into a stack."""

    kernel: Kernel
    target: Target
    memory: Any
    params: Leaves
    """Of one chain, (1, ...)."""
    tensors: dict[str, Tensor]
    """Buffers, and weights that are not sampled (or not all of them), by name."""


def setup_of(sampler: Sampler, model: nn.Module, like: Setup | None = None) -> Setup:
    """The chain that this sampler would run from the model's present weights; what it shares with another is not copied."""
    sampler.parameters.allows_live = False  # the weights of the stack are elsewhere
    packing = sampler.layout()
    sampler.check_settings()
    if (reason := sampler.why_not_stacked()) is not None:
        raise CannotStack(reason)
    kernel, memory = sampler.pure_kernel()
    if memory is not None:
        memory = _pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), memory)
    trained = {id(p) for i, p in enumerate(packing.params) if i not in packing.held}
    rest = [(name, x) for name, x in [*model.named_parameters(), *model.named_buffers()] if id(x) not in trained]
    params = packing.pack([p.detach() for p in packing.params], packing.new())
    known = {} if like is None else like.tensors
    tensors = {name: known[name] if name in known and _equal(known[name], x) else x.detach().clone() for name, x in rest}
    return Setup(kernel, sampler.target, memory, params, tensors)


def merged(kernels: Sequence[Any], device: torch.device) -> Any:
    """One kernel of all chains: a setting in which they differ becomes a tensor with one number for each."""
    first = kernels[0]
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(first):
        values = [getattr(kernel, field.name) for kernel in kernels]
        if all(dataclasses.is_dataclass(v) and type(v) is type(values[0]) for v in values):
            changes[field.name] = merged(values, device)
        elif all(_equal(v, values[0]) for v in values[1:]):
            continue
        elif field.name in SETTINGS and all(isinstance(v, list) and all(isinstance(x, float | int) for x in v) for v in values):
            changes[field.name] = [_joined(column, device) for column in zip(*values, strict=True)]
        elif field.name in SETTINGS and all(isinstance(v, float | int) for v in values):
            changes[field.name] = _joined(values, device)
        else:
            raise CannotStack(f"`{field.name}` differs between the chains")
    return dataclasses.replace(first, **changes)


def _joined(values: Sequence[float], device: torch.device) -> Setting:
    if all(v == values[0] for v in values):
        return values[0]
    return torch.tensor(values, dtype=torch.float64, device=device)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, Scaling) and isinstance(b, Scaling):
        return _equal(*(_pytree.tree_leaves(stored(x)) for x in (a, b)))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return a is b or bool(a == b)


# --- where the chains live ----------------------------------------------------------------------------------------------


class StackedNetwork(Network):
    """The weights and buffers of many chains, and the model that is run on them.

    Args:
        model: whose forward is called, with the weights of all chains in the place of its own.
        loss: of model and batch.
        like: the network of a single chain.
        owner: of the chains' settings.
        setups: what each chain starts from.
        examples: the data set as per-example losses at the model's weights.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        like: Network,
        owner: StackOwner,
        setups: Sequence[Setup],
        examples: Examples | None,
    ) -> None:
        self.num_chains, self.device, self.layers = len(setups), like.device, like.layers
        self.loss, self.owner, self.examples = loss, owner, examples
        self._packing, self._names = like.layout(), like.names
        packing = self._packing
        self.params: Leaves = tuple(torch.cat(rows) for rows in zip(*(setup.params for setup in setups), strict=True))
        own = dict(model.named_buffers()).keys()
        each = {name: [setup.tensors[name] for setup in setups] for name in setups[0].tensors}
        trained = {id(p) for p in packing.params}
        held = [name for name, p in model.named_parameters() if name in each and id(p) in trained]
        frozen = {
            name: torch.stack(xs)
            for name, xs in each.items()
            if name not in own and name not in held and not all(x is xs[0] for x in xs)
        }
        self.model = VmappedModel(model, packing, frozen, self.num_chains)
        self.model.params.held = {name: torch.stack(each[name]) for name in held}
        self.can_split = not (frozen or held or own)
        """Whether some of the chains can be evaluated without the others."""
        self.buffers = self.model.buffers.join({name: torch.stack(each[name]) for name in own})
        self.prior = StackedPrior(setups[0].target.prior, self.model.params, self.params)
        self._precision = self.prior.precision_of_leaves()
        self.batch: Batch | None = None
        """Of the last step, for draws; None on minibatches, which are not kept."""

    def layout(self) -> Packing:
        return self._packing

    @property
    def names(self) -> list[str]:
        return self._names

    def potential(self, loss: Any, batch: Any, precision: list[float] | None) -> StackedPotential:
        return StackedPotential(self, batch, has_prior=precision is None)

    def quadratic_prior(self) -> list[float] | None:
        return self._precision

    def take(self) -> Leaves:
        return self.params

    def commit(self, potential: StackedPotential, params: Leaves, is_accepted: Tensor) -> None:
        self.params = params
        if potential.moved is not None and self.buffers:
            self.buffers = self.model.buffers.select(is_accepted, potential.moved, self.buffers)

    def by_parameter(self, leaves: Leaves) -> Sequence[Tensor]:
        return list(self.model.params.views(leaves).values())

    def graph_state(self) -> Any:
        return self.params, self.buffers

    def set_graph_state(self, state: Any) -> None:
        self.params, self.buffers = state

    # --- draws ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fresh_buffers(self) -> Leaves:
        """The buffers of draws: the chains' own, with BatchNorm statistics of the draws' own weights (`Sampler.draw`)."""
        if self.batch is None or not self.layers.has_statistics:
            return self.buffers
        names = {id(b): name for name, b in self.model.module.named_buffers()}

        def view(flat: Leaves, norm: nn.Module, name: str) -> Tensor:
            return self.model.buffers.views(flat)[names[id(getattr(norm, name))]]

        emptied, fresh = (tuple(b.clone() for b in self.buffers) for _ in range(2))
        with self.layers.statistics() as found:
            for key in found.keys:
                view(emptied, *key).zero_()
            _, moved = self.model.call(self.loss, self.params, emptied, self.batch)
            found.add(functools.partial(view, moved))
        for key, value in found.values().items():
            view(fresh, *key).copy_(value)
        return fresh


class StackOwner(Owner):
    """The settings of a stack: one kernel for all chains. They were checked when the chains were joined."""

    targets: Sequence[Target] = ()
    scale: Setting = 1.0

    def __init__(self, prototype: Sampler, kernel: Any, targets: Sequence[Target], generator: Randomness) -> None:
        self._kernel, self.targets, self.generator, self.fixed_data = kernel, targets, generator, prototype.fixed_data
        self.inverse_temperature = _joined([target.inverse_temperature for target in targets], prototype.device)
        self.scale = _joined([target.scale for target in targets], prototype.device)
        self.chains: StackedChains

    def kernel(self) -> Any:
        return self._kernel

    def use_one_chance(self) -> None:
        """Where all chains would be evaluated again for the few that are refused, by default."""
        self._kernel = dataclasses.replace(self._kernel, num_chances=1)

    def use(self, kernel: Any) -> None:
        """Use this kernel from now on, with a backend where there is one."""
        params = self.chains.stack.params
        fits = isinstance(self.generator, Counters) and all(x.dtype == torch.float32 for x in params)
        is_settled = not self.chains.is_adapting or isinstance(kernel, AdamMCMCKernel)
        if fits and is_settled and kernel.backend is None and has_one_pass(kernel):
            copy = tuple(torch.empty_like(x) for x in params)
            kernel = dataclasses.replace(kernel, backend=one_pass(kernel, params, copy, self.chains.memory))
        self._kernel = kernel

    def counted(self) -> None:
        """Counts of steps follow those on the device."""
        self.chains.memory = self._kernel.counted(self.chains.memory)

    def apply(self, change: Change, potential: Any, state: ChainState) -> None:
        if isinstance(change.preconditioner, tuple):
            diagonal = tuple(a.to(x.dtype) for a, x in zip(change.preconditioner, state.params, strict=True))
            change = change._replace(preconditioner=diagonal)
        self.use(changed(self._kernel, change))
        if not self.chains.is_adapting:
            self._check_noise()

    def token(self) -> Any:
        return self.chains.number(self._kernel)  # kernels of equal settings may have different backends

    def _check_noise(self) -> None:
        """Refuse settings that burn-in made so small that the weights' own numbers lose them (`Layout.check_noise`)."""
        kernel, params = self._kernel, self.chains.stack.params
        lengths = kernel.proposal.sigma if hasattr(kernel, "proposal") else kernel.step_size
        metric = _metric(kernel)
        roots = metric.smallest() if isinstance(metric, Scaling) else [math.sqrt(float(a.min())) for a in metric or ()]
        for i, (leaf, length) in enumerate(zip(params, spread_settings(lengths, len(params)), strict=True)):
            smallest = float(torch.as_tensor(length).min()) * (roots[i] if roots else 1.0)
            largest = float(leaf.abs().max())
            if 0 < smallest < torch.finfo(leaf.dtype).eps * 2.0 ** math.floor(math.log2(max(largest, 1e-30))):
                raise ValueError(
                    f"burn-in tuned the moves to {smallest:.3g}, below the spacing of {leaf.dtype} numbers near the largest "
                    f"weight {largest:.3g}: rounding would lose them. Keep the weights in float32, or change the settings."
                )


class StackedChains(ReplayedChains):
    """All chains of a network, one transition of each at a time.

    Args:
        prototype: the sampler of the first chain. It makes no step.
        network: of all chains.
        owner: of their settings.
        memory: of the kernel, at the first step.
    """

    def __init__(self, prototype: Sampler, network: StackedNetwork, owner: StackOwner, memory: Any) -> None:
        super().__init__(network, owner, prototype.chains.adaptation)
        self.stack, self._owner, self.sampler_name = network, owner, type(prototype).__name__
        owner.chains = self
        if self.adaptation is not None:
            self._check_adaptable()
        self.memory, self.tuned_to = memory, prototype.chains.tuned_to
        owner.use(owner.kernel())

    def _check_adaptable(self) -> None:
        assert self.adaptation is not None
        try:
            check_common(self._owner.kernel(), self.adaptation.settings)
        except ValueError as error:
            raise CannotStack(str(error).rstrip(".")) from error
        if isinstance(self._owner.inverse_temperature, Tensor):
            raise CannotStack(
                "`inverse_temperature` differs between the chains, and burn-in would find one step size for all of them: give "
                "the settings, or adapt chains of one temperature"
            )

    @torch.no_grad()
    def step(self, batch: Any) -> Tensor:  # type: ignore[override]
        """One transition of every chain. Returns the batch's mean loss of each, (chains,), before the step.

        If the loss raises, the chains stay where they are, and the error propagates.
        """
        self.stack.batch = batch if self.fixed_data else None
        return super().step(None, batch)

    def draws(self) -> dict[str, Tensor]:
        """All that `model.state_dict()` holds, of every chain, (chains, ...). Views: copy what is to stay.

        The statistics of BatchNorm are those of the draws' own weights, as in `Sampler.draw`.
        """
        with self.on_device():
            return self.stack.model.draw(self.stack.params, self.stack.fresh_buffers())

    def place(self, chain: int) -> None:
        """Write one chain's weights and buffers into the model."""
        self.stack.model.place(self.stack.params, self.stack.buffers, chain)

    def log_prior(self) -> Tensor:
        """Of each chain's present weights, (chains,), float64."""
        return self.stack.prior.log_density(self.stack.params)

    def view(self, chain: int) -> StackedChainView:
        """One chain, as a callback sees it."""
        return StackedChainView(self, chain)

    def state_dict(self) -> dict[str, Any]:
        """All that the chains need to continue bit for bit."""
        kernel = self._owner.kernel()
        return {
            "sampler": self.sampler_name,
            "num_chains": self.num_chains,
            "params": list(self.stack.params),
            "held": {f"model.{name}": x for name, x in self.stack.model.params.held.items()},
            "buffers": list(self.stack.buffers),
            "settings": _settings_state(kernel),
            "preconditioner": stored(_metric(kernel)),
            **super().state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another stack of the same chains stood."""
        if (state["sampler"], state["num_chains"]) != (self.sampler_name, self.num_chains):
            raise ValueError(
                f"this is a state of {state['num_chains']} chains of {state['sampler']}, not of {self.num_chains} of "
                f"{self.sampler_name}."
            )
        super().load_state_dict(state)
        own = {key: state[key] for key in ("params", "held", "buffers", "settings", "preconditioner")}
        there = _pytree.tree_map_only(Tensor, lambda x: x.detach().to(self.device, copy=True), own)
        self.stack.params, self.stack.buffers = tuple(there["params"]), tuple(there["buffers"])
        self.stack.model.params.held |= {name.removeprefix("model."): x for name, x in there["held"].items()}
        kernel = _with_settings(self._owner.kernel(), there["settings"])
        if there["preconditioner"] is not None:
            kernel = kernel.with_preconditioner(restored(there["preconditioner"]))
        self._owner.use(kernel)

    def try_out(self, batch: Batch) -> None:
        """Evaluate the stack once, and raise `CannotStack` with the reason if that fails. Nothing of it stays."""
        module, stack, layers = self.stack.model.module, self.stack, self.stack.layers
        known = {name for name, _ in module.named_buffers()}

        def alone() -> tuple[Tensor, dict[str, Tensor]]:
            losses = stack.loss(module, batch).detach()
            return losses, {name: b.clone() for name, b in module.named_buffers()}

        self.place(0)
        with torch.no_grad():
            losses, buffers = layers.look(alone)
        if self.fixed_data and layers.seen.draws_numbers:
            raise StochasticClosure(
                "fixed data mean that the loss is the same function of the weights at every step, but it draws random "
                f"numbers. The cause: {layers.at_fault()}. Use model.eval(), or batches."
            )
        examples = stack.examples if self.kernel().acceptance.needs_examples or self.kernel().needs_examples else None
        rows = slice(0, 0 if examples is None else min(len(examples), 64))
        if examples is not None:
            with torch.no_grad():
                layers.example_losses(examples.losses, rows)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            try:
                stacked, moved = self._evaluated(batch, rows)
            except torch.OutOfMemoryError as error:
                raise CannotStack("they do not fit into the memory of the device together") from error
            except Exception as error:
                raise CannotStack(f"the model cannot be run under torch.func.vmap: {_first_line(error)}") from error
            finally:
                made = {name for name, _ in module.named_buffers()} - known
                for name in made:  # they hold tensors of the inside of vmap
                    owner, _, last = name.rpartition(".")
                    module.get_submodule(owner)._buffers[last] = None
        if made:
            raise CannotStack(f"the model creates buffers in its forward pass: {', '.join(sorted(made))}")
        if stacked.dim() > 1 and losses.dim() > 0:  # on average: a single loss may be far off in bfloat16
            stacked, losses = stacked.mean(1), losses.mean()
        pairs = [(stacked, losses), *((moved[name], b) for name, b in buffers.items())]
        if not layers.seen.draws_numbers and not all(_is_close(many, one) for many, one in pairs):
            raise CannotStack(
                "under torch.func.vmap the model gives different losses or buffers (does it keep state that is not a buffer?)"
            )

    def _evaluated(self, batch: Batch, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        """The losses of a batch and the buffers afterwards; of examples, those that a test may choose are evaluated."""
        stack, acceptance = self.stack, self.kernel().acceptance
        potential = StackedPotential(stack, batch)
        losses = potential.evaluate(stack.params, with_grad=True).losses
        moved = {} if potential.moved is None else stack.model.buffers.views(potential.moved)
        if rows.stop > 0:
            potential.example_losses(stack.params, rows)
            if not acceptance.uses_all_data:  # each chain chooses its own
                each = torch.arange(rows.stop, device=self.device).expand(self.num_chains, -1)
                potential.example_losses(stack.params, each)
        return losses, moved


def stack(
    prototype: Sampler,
    model: nn.Module,
    loss: Loss,
    setups: Sequence[Setup],
    generator: Randomness,
    examples: Examples | None = None,
) -> StackedChains:
    """All chains of a network as one.

    Args:
        prototype: the sampler of the first chain, which has names, layers and the adaptation. It makes no step.
        model: whose forward is called, with the weights of all chains in the place of its own.
        loss: of model and batch.
        setups: what each chain starts from (`setup_of`).
        generator: the chains' random numbers (`backends.streams.streams`).
        examples: the data set as per-example losses at the model's weights, for `FullData`.
    """
    targets = [setup.target for setup in setups]
    if not all(_equal(target.prior, targets[0].prior) for target in targets):
        raise CannotStack("`prior` differs between the chains")
    kernel = merged([setup.kernel for setup in setups], prototype.device)
    owner = StackOwner(prototype, kernel, targets, generator)
    network = StackedNetwork(model, loss, prototype.network, owner, setups, examples)
    if not network.can_split and getattr(prototype, "num_chances", 0) is None:
        owner.use_one_chance()
    try:
        memory = kernel.joined([setup.memory for setup in setups]) or kernel.first_memory(network.params)
    except ValueError as error:
        raise CannotStack(str(error)) from error
    return StackedChains(prototype, network, owner, memory)


class StackedChainView(ChainView):
    """One chain of a stack, with what callbacks read from a `Sampler`."""

    chains: StackedChains

    def __init__(self, chains: StackedChains, number: int) -> None:
        self.chains, self.number = chains, number
        self.target: Target = chains.targets[number]
        self.acceptance = chains.kernel().acceptance
        self.fixed_data = chains.fixed_data

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The chain's present settings (of its first leaf), under the names that a sampler's groups have. Waits."""
        group = {}
        for name, value in settings_by_name(self.chains.kernel()).items():
            own = value[self.number] if isinstance(value, Tensor) and value.dim() == 1 else value
            group["lr" if name == "step_size" else name] = float(own)
        return [group]

    @property
    def _name(self) -> str:
        return self.chains.sampler_name

    def _tuned(self) -> dict[str, Any]:
        kernel, model = self.chains.kernel(), self.chains.stack.model.module
        state = {"adaptation": True, "settings": _settings_state(kernel), "preconditioner": stored(_metric(kernel))}
        found = tuned_of_stack(state, self.number, model)
        return tuned_by_burn_in(found, finds_step="lr" not in found)


# --- settings -------------------------------------------------------------------------------------------------------------


def _settings_state(kernel: Any) -> dict[str, Any]:
    """The settings of a kernel, nested as it is."""
    state: dict[str, Any] = {}
    for field in dataclasses.fields(kernel):
        value = getattr(kernel, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            state[field.name] = _settings_state(value)
        elif field.name in SETTINGS:
            state[field.name] = value
    return state


def _with_settings(kernel: Any, state: dict[str, Any]) -> Any:
    """The same kernel with these settings, and without its backend."""
    changes = {
        name: _with_settings(getattr(kernel, name), value) if isinstance(value, dict) else value
        for name, value in state.items()
    }
    if getattr(kernel, "backend", None) is not None:
        changes["backend"] = None
    return dataclasses.replace(kernel, **changes)


def _metric(kernel: Any) -> Leaves | Scaling | None:
    found: Leaves | Scaling | None = getattr(kernel, "preconditioner", None)
    if found is None:
        found = getattr(getattr(kernel, "proposal", None), "preconditioner", None)
    return found


def _is_close(many: Tensor, one: Tensor) -> bool:
    """Whether the first chain of a stack agrees with the chain alone, to the rounding of low precision."""
    if many.shape[1:] != one.shape:
        return False
    return torch.allclose(many[0].double(), one.double(), rtol=0.05, atol=0.02, equal_nan=True)


def _first_line(error: BaseException) -> str:
    words = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
