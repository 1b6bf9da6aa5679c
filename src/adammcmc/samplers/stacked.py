r"""Many chains of one network in one evaluation: the weights of all chains stacked, the model run under `torch.func.vmap`.

    theta: leaves (chains, ...),    U_c(theta_c) = lambda_c * n * mean loss(theta_c; batch) - log prior(theta_c)

Chains share the batch and nothing else. Each has its own noise, its own settings (learning rate, noise, step size, lambda), its
own BatchNorm statistics and running buffers, which move on acceptance only, and its own dropout mask, the same on both sides of
a step. The transition is the pure kernel's: one chain alone would make the same moves, to the rounding of the network.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree

from adammcmc.acceptance import AcceptanceTest, FullData, effective_beta
from adammcmc.backends.fused import InPlaceAdamMCMC
from adammcmc.backends.graphs import Captures, Ring
from adammcmc.errors import NonFiniteLoss, StochasticClosure
from adammcmc.kernels import AdamMCMCKernel, CorrectedMALAKernel
from adammcmc.kernels.arguments import SETTINGS, chain_settings, settings_by_name
from adammcmc.kernels.corrected import CarriedBatch
from adammcmc.kernels.direction import Adam, AdamMemory
from adammcmc.kernels.exact_adam import NoisyMoments
from adammcmc.kernels.hamiltonian import Momentum
from adammcmc.kernels.kernel import ChainState, Info, Kernel
from adammcmc.samplers.adaptation import Adaptation, BurnIn, changed, check_common
from adammcmc.samplers.exact import ExactAdamMCMC
from adammcmc.samplers.health import Health, Monitor
from adammcmc.samplers.layers import GraphNumbers
from adammcmc.samplers.packing import Packing
from adammcmc.samplers.processes import check_one_process
from adammcmc.samplers.sampler import Sampler
from adammcmc.target.data import Batch, Examples
from adammcmc.target.leaves import Leaves, Setting, blocks, by_chain, same, spread_settings
from adammcmc.target.randomness import Counters, Randomness, Streams
from adammcmc.target.resolution import Resolution, measure
from adammcmc.target.target import Evaluation, Gaussian, Prior, Target, potential_difference

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CannotStack", "Setup", "StackedChain", "StackedPotential", "StackedSampler", "setup_of"]

_logger = logging.getLogger("adammcmc")
_ON_DEVICE = ("params", "held", "buffers", "memory", "preconditioner", "adaptation")  # of a saved state

Loss = Callable[[nn.Module, Any], Tensor]
"""model, batch -> the losses of the examples, (batch,), or their mean, ()."""


class CannotStack(ValueError):
    """The chains of a network cannot be run as one stack, for the reason that it gives."""


# --- how the tensors of many chains lie in leaves -----------------------------------------------------------------------


class Layout:
    """Named tensors of many chains in leaves (chains, ...): those that share a leaf lie end to end in it.

    Args:
        shapes: of what is sampled of the tensors of one chain, by name.
        members: for each leaf the indices of its tensors.
        free: the rows that are sampled, of tensors that have others.
    """

    def __init__(
        self, shapes: dict[str, torch.Size], members: Sequence[Sequence[int]], free: dict[str, Tensor] | None = None
    ) -> None:
        self.shapes = shapes
        self._members = members
        self._free = free or {}
        self.held: dict[str, Tensor] = {}
        """Whole tensors (chains, ...) by name, for their rows that are not sampled."""

    def whole(self, leaves: Leaves) -> dict[str, Tensor]:
        """As `views`, in the shapes of the tensors themselves: where rows are held, a copy with their values."""
        parts = self.views(leaves)
        return parts | {name: self.held[name].index_copy(1, rows, parts[name]) for name, rows in self._free.items()}

    def views(self, leaves: Leaves) -> dict[str, Tensor]:
        """The part of the leaves that belongs to each tensor, (chains, ...), without a copy; of held rows none."""
        shapes = list(self.shapes.values())
        parts: dict[int, Tensor] = {}
        for leaf, members in zip(leaves, self._members, strict=True):
            row = leaf.reshape(leaf.shape[0], -1)
            pieces = torch.split_with_sizes(row, [shapes[i].numel() for i in members], 1)
            parts.update({i: x.view(leaf.shape[0], *shapes[i]) for i, x in zip(members, pieces, strict=True)})
        return {name: parts[i] for i, name in enumerate(self.shapes)}

    def join(self, tensors: dict[str, Tensor]) -> Leaves:
        """Whole tensors (chains, ...) as leaves."""
        sampled = [x[:, self._free[name]] if name in self._free else x for name, x in tensors.items()]
        rows = [x.reshape(x.shape[0], -1) for x in sampled]
        return tuple(torch.cat([rows[i] for i in members], 1) for members in self._members)


class Buffers:
    """The buffers of many chains, all of a dtype in one flat tensor, each (chains, ...) in one piece of it.

    In one piece, because BatchNorm under vmap moves its running statistics in place, which a view with gaps would not see; in
    one tensor, because copying and choosing many small ones costs more in calls than in arithmetic.

    Args:
        like: buffers of one chain, by name.
        num_chains: how many chains.
    """

    def __init__(self, like: dict[str, Tensor], num_chains: int) -> None:
        self._num_chains = num_chains
        self._shapes = {name: x.shape for name, x in like.items()}
        self._names = {
            kind: [name for name, x in like.items() if x.dtype == kind]
            for kind in dict.fromkeys(x.dtype for x in like.values())
        }
        device = next(iter(like.values())).device if like else torch.device("cpu")
        chains = torch.arange(num_chains, device=device)
        self._owners = [
            torch.cat([chains.repeat_interleave(self._shapes[name].numel()) for name in names])
            for names in self._names.values()
        ]
        """The chain that each number belongs to."""

    def views(self, flat: Leaves) -> dict[str, Tensor]:
        """Each buffer, (chains, ...), without a copy."""
        parts: dict[str, Tensor] = {}
        for tensor, names in zip(flat, self._names.values(), strict=True):
            shapes = [(self._num_chains, *self._shapes[name]) for name in names]
            pieces = torch.split_with_sizes(tensor, [math.prod(shape) for shape in shapes])
            parts.update({name: x.view(shape) for name, x, shape in zip(names, pieces, shapes, strict=True)})
        return {name: parts[name] for name in self._shapes}

    def join(self, tensors: dict[str, Tensor]) -> Leaves:
        """Buffers (chains, ...) as flat tensors."""
        return tuple(torch.cat([tensors[name].reshape(-1) for name in names]) for names in self._names.values())

    def select(self, mask: Tensor, yes: Leaves, no: Leaves) -> Leaves:
        """For each chain `yes` where `mask`, else `no`."""
        return tuple(torch.where(mask[owner], y, n) for owner, y, n in zip(self._owners, yes, no, strict=True))


class _Call(nn.Module):
    """A function of model and batch as a module, so that the model's tensors can be replaced in a call."""

    def __init__(self, model: nn.Module, function: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._function = function

    def forward(self, batch: Any) -> Tensor:
        return self._function(self.model, batch)


class _Network:
    """A model whose tensors are replaced, chain by chain under vmap, by those that lie in leaves."""

    def __init__(self, model: nn.Module, packing: Packing, frozen: dict[str, Tensor], num_chains: int) -> None:
        self.model = model
        self._frozen = {f"model.{name}": x for name, x in frozen.items()}
        """Weights that are not sampled, (chains, ...), where chains differ in them."""
        names = {id(p): f"model.{name}" for name, p in model.named_parameters()}
        owned = [names[id(p)] for p in packing.params]
        shapes = dict(zip(owned, packing.shapes, strict=True))
        self.params = Layout(shapes, packing.members, {owned[i]: rows for i, rows in packing.free.items()})
        self.buffers = Buffers({f"model.{name}": b for name, b in model.named_buffers()}, num_chains)

    def call(
        self, function: Callable[[nn.Module, Any], Tensor], params: Leaves, buffers: Leaves, batch: Any, *, is_own: bool = False
    ) -> tuple[Tensor, Leaves]:
        """function(model, batch) of each chain, and the buffers as it left them. `is_own`: the batch has a row for each."""
        call = _Call(self.model, function)
        before = tuple(b.clone() for b in buffers)
        views = self.buffers.views(before)

        def one(weights: dict[str, Tensor], own: dict[str, Tensor], frozen: dict[str, Tensor], batch: Any) -> Any:
            tensors = {**frozen, **weights, **own}
            answer = functional_call(call, tensors, (batch,))
            return answer, {name: tensors[name] for name in own}  # what a forward put in the place of a buffer is here

        in_dims = (0, 0, 0, 0 if is_own else None)
        answer, after = vmap(one, in_dims, randomness="different")(self.params.whole(params), views, self._frozen, batch)
        for name, view in views.items():
            if after[name].data_ptr() != view.data_ptr():
                view.copy_(after[name].detach())
        return answer, before

    def draw(self, params: Leaves, buffers: Leaves) -> dict[str, Tensor]:
        """All that `model.state_dict()` holds, (chains, ...), by its names."""
        known = {**self.params.whole(params), **self.buffers.views(buffers), **self._frozen}
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        by_tensor = {id(x): known.get(f"model.{name}") for name, x in own.items()}  # tied tensors have several names
        chains = params[0].shape[0]
        state = {}
        for name, x in self.model.state_dict(keep_vars=True).items():
            if isinstance(x, Tensor):
                stacked = by_tensor.get(id(x))
                state[name] = x.detach().expand(chains, *x.shape) if stacked is None else stacked.detach()
        return state

    @torch.no_grad()
    def place(self, params: Leaves, buffers: Leaves, chain: int) -> None:
        """Write one chain's tensors into the model."""
        values = {**self.params.whole(params), **self.buffers.views(buffers), **self._frozen}
        for name, x in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if (stacked := values.get(f"model.{name}")) is None:
                continue
            if x.is_contiguous() or isinstance(x, nn.Parameter):
                x.copy_(stacked[chain])
            else:  # a view that cannot be written to, an expanded number for example
                owner, _, last = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[last] = stacked[chain].clone()


# --- the target ---------------------------------------------------------------------------------------------------------


class _Prior:
    """A prior on the weights of each chain: by its formula where it is Gaussian, otherwise under vmap."""

    def __init__(self, prior: Prior | None, layout: Layout, like: Leaves) -> None:
        self._prior, self._layout = prior, layout
        self._precisions: list[Tensor] | None = None
        self._has_grad = False
        if prior is None:
            return
        views = layout.whole(like)
        first = [x[0] for x in views.values()]
        if type(prior) is Gaussian:  # a subclass may be anything
            full = {
                name: torch.full_like(x[:1], q, dtype=torch.float64)
                for (name, x), q in zip(views.items(), prior.precision(first), strict=True)
            }
            self._precisions = [leaf[0] for leaf in layout.join(full)]
        self._has_grad = prior.grad(first) is not None

    def log_density(self, params: Leaves) -> Tensor:
        """(chains,), float64."""
        if self._prior is None:
            return torch.zeros(params[0].shape[0], dtype=torch.float64, device=params[0].device)
        if self._precisions is not None:
            return -0.5 * torch.stack([_weighted(x, q) for x, q in zip(params, self._precisions, strict=True)]).sum(0)
        prior = self._prior
        values: Tensor = vmap(lambda views: prior.log_density(list(views.values())))(self._layout.whole(params))
        return values.detach().double()

    def grad(self, params: Leaves) -> Leaves | None:
        """Of `log_density`, chain by chain; None says that it is zero."""
        if self._prior is None or not self._has_grad:
            return None
        if self._precisions is not None:
            pairs = zip(params, self._precisions, strict=True)
            return tuple(x * -q.to(x.dtype).reshape(x.shape[1:]) for x, q in pairs)
        prior = self._prior
        if type(prior).grad is not Prior.grad:
            views = self._layout.whole(params)
            grads = vmap(lambda views: tuple(prior.grad(list(views.values())) or ()))(views)
            return self._layout.join(dict(zip(views, grads, strict=True)))
        with torch.enable_grad():
            leaves = tuple(x.detach().requires_grad_() for x in params)
            values = vmap(lambda views: prior.log_density(list(views.values())))(self._layout.whole(leaves))
            return torch.autograd.grad(values.sum(), leaves, materialize_grads=True)


def _weighted(leaf: Tensor, weights: Tensor) -> Tensor:
    """sum_i weights_i x_i^2 of each chain, in float64 (block by block, to spare memory)."""
    rows, weights = leaf.reshape(leaf.shape[0], -1), weights.reshape(-1)
    parts = [(rows[:, s].double().square() * weights[s]).sum(1) for s in blocks(rows.shape[1])]
    return torch.stack(parts).sum(0)


class StackedPotential:
    """The target of all chains on one batch (`target.Potential`).

    Args:
        stack: whose model, prior, buffers and layers it uses.
        batch: of this step, the same for all chains.
    """

    can_narrow = False
    control = None

    def __init__(self, stack: StackedSampler, batch: Batch) -> None:
        self.scale: Setting = stack.scale
        self.inverse_temperature: Setting = stack.inverse_temperature
        self.fixed = stack.fixed_data
        self.is_bounded = stack.targets[0].prior is not None and stack.targets[0].prior.is_bounded
        self._stack, self._batch = stack, batch
        self._numbers: list[Tensor] = []
        self.moved: Leaves | None = None
        """The buffers as the last evaluation left them, had it been taken; None before the first."""
        self.known: tuple[Leaves, Leaves] | None = None
        """The first point of this step with a gradient, and the gradient of V there."""
        self.losses: Tensor | None = None
        """Those of the first evaluation."""

    @property
    def num_examples(self) -> int | None:
        examples = self._stack.examples
        return None if examples is None else len(examples)

    def evaluate(self, params: Leaves, *, with_grad: bool) -> Evaluation:
        stack = self._stack
        log_prior = stack.prior.log_density(params)
        with torch.set_grad_enabled(with_grad):
            leaves = tuple(x.detach().requires_grad_(with_grad) for x in params)
            with stack.layers.modes(), stack.layers.same_numbers(self._numbers):
                losses, self.moved = stack.network.call(stack.loss, leaves, stack.buffers, self._batch)
            _check(losses)
            self.losses = losses.detach() if self.losses is None else self.losses
            if not with_grad:
                return Evaluation(losses, log_prior, None)
            # chains do not meet in the sum, so that its gradient is that of each chain's own mean
            means = losses if losses.dim() == 1 else losses.mean(1)
            if not means.requires_grad:
                raise ValueError("the loss does not depend on the weights by autograd: there is nothing to sample.")
            grad = torch.autograd.grad(means.sum(), leaves, allow_unused=True, materialize_grads=True)
        grad = self._with_prior(grad, params)
        if self.known is None:
            self.known = params, grad
        return Evaluation(losses.detach(), log_prior, grad)

    def evaluate_weighted(self, params: Leaves, weights: Tensor) -> Evaluation:
        stack, examples = self._stack, self._stack.examples
        assert examples is not None
        total = torch.zeros(len(weights), dtype=torch.float64, device=weights.device)
        leaves = tuple(x.detach().requires_grad_() for x in params)
        grad: Leaves = tuple(torch.zeros_like(x) for x in params)
        rows = (weights != 0).any(0).nonzero().flatten()  # of all chains together: vmap wants one number of examples
        if len(rows) > 0:
            with torch.enable_grad(), stack.layers.modes():
                losses, _ = stack.network.call(lambda _, rows: examples.losses(rows), leaves, stack.buffers, rows)
                own = weights[:, rows]
                losses = torch.where(own != 0, losses, 0.0)  # those of other chains' batches may be anything
                total = (losses.double() * own).sum(1) / len(examples)
                grad = torch.autograd.grad(total.sum(), leaves, allow_unused=True, materialize_grads=True)
        return Evaluation(total.detach(), self.log_prior(params), self._with_prior(grad, params))

    def _with_prior(self, grad: Leaves, params: Leaves) -> Leaves:
        """The gradient of V: the loss's part and the prior's."""
        if (prior_grad := self._stack.prior.grad(params)) is None:
            return grad
        return tuple(g - q * by_chain(1 / self.scale, q) for g, q in zip(grad, prior_grad, strict=True))

    def compare(self, current: Evaluation, proposed: Evaluation) -> Tensor:
        return potential_difference(self.scale, current, proposed)

    def log_prior(self, params: Leaves) -> Tensor:
        return self._stack.prior.log_density(params)

    def example_losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        stack = self._stack
        examples: Any = stack.examples
        is_own = isinstance(indices, Tensor) and indices.dim() > 1
        # fetched outside of vmap, where any data set can be asked
        is_fetched = is_own and hasattr(examples, "rows")
        batch: Any = indices
        if is_fetched:
            shape = cast(Tensor, indices).shape
            flat = examples.rows(cast(Tensor, indices).reshape(-1))
            batch = _pytree.tree_map_only(Tensor, lambda x: x.reshape(*shape, *x.shape[1:]), flat)

        def losses(_: nn.Module, rows: Any) -> Tensor:
            return cast(Tensor, examples.losses_of(rows) if is_fetched else examples.losses(rows))

        with torch.no_grad(), stack.layers.modes():
            return stack.network.call(losses, params, stack.buffers, batch, is_own=is_own)[0]


def _check(losses: Tensor) -> None:
    if not losses.is_floating_point() or losses.dtype in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"the loss is in {losses.dtype}: its rounding, times num_data, would swamp the acceptance ratio. Compute it in "
            "float32, for example F.cross_entropy(model(x).float(), y)."
        )


# --- what the chains bring ------------------------------------------------------------------------------------------------


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
    packing = sampler._layout()
    sampler._check_resolution(packing)
    kernel: Any = sampler._kernel(packing)
    if isinstance(kernel, InPlaceAdamMCMC):
        kernel = AdamMCMCKernel(kernel.direction, kernel.proposal, kernel.acceptance, kernel.name)
    if not dataclasses.is_dataclass(kernel) or (isinstance(kernel, AdamMCMCKernel) and not isinstance(kernel.direction, Adam)):
        raise CannotStack(f"the step of {type(sampler).__name__} is computed for one chain at a time")
    if isinstance(sampler, ExactAdamMCMC) and sampler.momentum_spread is None:
        raise CannotStack("ExactAdamMCMC measures its `momentum_spread` for one chain at a time: give it")
    if sampler._reference is not None:
        raise CannotStack("a control variate is expanded for one chain at a time")
    memory = sampler._gather(packing)
    if memory is not None:
        memory = _pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), memory)
    trained = {id(p) for i, p in enumerate(packing.params) if i not in packing.held}
    rest = [(name, x) for name, x in [*model.named_parameters(), *model.named_buffers()] if id(x) not in trained]
    params = packing.pack([p.detach() for p in packing.params], packing.new())
    known = {} if like is None else like.tensors
    tensors = {name: known[name] if name in known and _equal(known[name], x) else x.detach().clone() for name, x in rest}
    return Setup(cast(Kernel, kernel), sampler.target, memory, params, tensors)


def merged(kernels: Sequence[Any], device: torch.device) -> Any:
    """One kernel of all chains: a setting in which they differ becomes a tensor with one number for each."""
    first = kernels[0]
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(first):
        values = [getattr(kernel, field.name) for kernel in kernels]
        if all(dataclasses.is_dataclass(v) and type(v) is type(values[0]) for v in values):
            changes[field.name] = merged(values, device)
        elif all(isinstance(v, list) and v and all(isinstance(x, float | int) for x in v) for v in values):
            changes[field.name] = [_joined(column, device) for column in zip(*values, strict=True)]
        elif all(isinstance(v, float | int) for v in values):
            changes[field.name] = _joined(values, device)
        elif not all(_equal(v, values[0]) for v in values[1:]):
            raise CannotStack(f"`{field.name}` differs between the chains")
    result = dataclasses.replace(first, **changes)
    known = {name for name, _ in chain_settings(result)}
    for field in dataclasses.fields(first):
        value = changes.get(field.name)
        parts = value if isinstance(value, list) else [value]
        if field.name not in known and any(isinstance(part, Tensor) for part in parts):
            raise CannotStack(f"`{field.name}` differs between the chains")
    return result


def _joined(values: Sequence[float], device: torch.device) -> Setting:
    if all(v == values[0] for v in values):
        return values[0]
    return torch.tensor(values, dtype=torch.float64, device=device)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return a is b or bool(a == b)


# --- the sampler ----------------------------------------------------------------------------------------------------------


class GraphBody(NamedTuple):
    """What a captured step works on."""

    kept: list[Tensor]
    loss_dtype: torch.dtype
    known: tuple[Leaves, Leaves] | None


class StackedSampler:
    """All chains of a network, one transition of each at a time. What `Sampler` is to one chain.

    Args:
        prototype: the sampler of the first chain, that knows names, layers and how to adapt. It makes no step.
        model: whose forward is called, with the weights of all chains in the place of its own.
        loss: of model and batch.
        setups: what each chain starts from and goes by.
        generator: the chains' random numbers.
        examples: the data set as losses of single examples at the model's weights, for `FullData`.
    """

    def __init__(
        self,
        prototype: Sampler,
        model: nn.Module,
        loss: Loss,
        setups: Sequence[Setup],
        generator: Randomness,
        examples: Examples | None = None,
    ) -> None:
        self.prototype, self.model, self.loss, self.generator, self.examples = prototype, model, loss, generator, examples
        self.device, self.layers = prototype.device, prototype._layers
        self._layers = self.layers
        self.num_chains = len(setups)
        self.targets = [setup.target for setup in setups]
        if not all(_equal(target.prior, self.targets[0].prior) for target in self.targets):
            raise CannotStack("`prior` differs between the chains")
        self.inverse_temperature = _joined([target.inverse_temperature for target in self.targets], self.device)
        self.scale = _joined([target.scale for target in self.targets], self.device)
        self.fixed_data = prototype.fixed_data
        self.kernel = merged([setup.kernel for setup in setups], self.device)
        self._adaptation: Adaptation | None = prototype._adaptation
        if self._adaptation is not None:
            self._check_adaptable(self._adaptation.settings)
        self.params: Leaves = tuple(torch.cat(rows) for rows in zip(*(setup.params for setup in setups), strict=True))
        own = dict(model.named_buffers()).keys()
        each = {name: [setup.tensors[name] for setup in setups] for name in setups[0].tensors}
        packing = prototype._layout()
        trained = {id(p) for p in packing.params}
        held = [name for name, p in model.named_parameters() if name in each and id(p) in trained]
        frozen = {
            name: torch.stack(xs)
            for name, xs in each.items()
            if name not in own and name not in held and not all(x is xs[0] for x in xs)
        }
        self.network = _Network(model, packing, frozen, self.num_chains)
        self.network.params.held = {f"model.{name}": torch.stack(each[name]) for name in held}
        self.buffers = self.network.buffers.join({f"model.{name}": torch.stack(each[name]) for name in own})
        self.prior = _Prior(self.targets[0].prior, self.network.params, self.params)
        if isinstance(generator, Counters):  # there is Triton
            from adammcmc.backends.chainpass import in_one_pass

            self.kernel = in_one_pass(self.kernel, self.params, generator)
        self.memory = _joined_memory([setup.memory for setup in setups], self.params)
        if self.memory is None and isinstance(self.kernel, AdamMCMCKernel):
            self.memory = self.kernel.direction.init(self.params)
        self.num_steps = 0
        self.here: Evaluation | None = None
        self.carry: Any = None
        self._info: Info | Callable[[], Info] | None = None
        self._captures = Captures()
        self._batch: Batch | None = None
        """Of the last step, for `draws`; None on minibatches, which are not kept."""
        self._clock: Tensor | None = None
        self._clock_at = -1
        self._kernel_of_graphs: Any = None
        self._kernel_number = 0
        self._monitor: Monitor | None = None
        self._sum_acceptance = torch.zeros(self.num_chains, dtype=torch.float64, device=self.device)
        self._frozen_at = torch.full((self.num_chains,), -1, dtype=torch.int64, device=self.device)
        self._frozen_at_host = torch.full(
            (self.num_chains,), -1, dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda"
        )

    def _check_adaptable(self, settings: BurnIn) -> None:
        try:
            check_common(self.kernel, settings)
        except ValueError as error:
            raise CannotStack(str(error).rstrip(".")) from error
        if isinstance(self.inverse_temperature, Tensor):
            raise CannotStack(
                "`inverse_temperature` differs between the chains, and burn-in would find one step size for all of them: give "
                "the settings, or adapt chains of one temperature"
            )

    def try_out(self, batch: Batch) -> None:
        """Evaluate the stack once, and say in a `CannotStack` why it cannot be done. Nothing of it stays."""
        known = {name for name, _ in self.model.named_buffers()}

        def alone() -> tuple[Tensor, dict[str, Tensor]]:
            losses = self.loss(self.model, batch).detach()
            return losses, {f"model.{name}": b.clone() for name, b in self.model.named_buffers()}

        self.place(0)
        with torch.no_grad():
            losses, buffers = self.layers.look(alone)
        if self.fixed_data and self.layers.draws_numbers:
            raise StochasticClosure(
                "fixed data say that the loss is the same function of the weights at every step, but it draws random numbers. "
                f"At fault: {self.layers.at_fault()}. Use model.eval(), or batches."
            )
        needs_examples = getattr(self.acceptance, "needs_examples", False) or getattr(self.kernel, "has_ragged_batches", False)
        examples = self.examples if needs_examples else None
        rows = slice(0, 0 if examples is None else min(len(examples), 64))
        if examples is not None:
            with torch.no_grad():
                self.layers.example_losses(examples.losses, rows)
        potential = StackedPotential(self, batch)
        made: set[str] = set()
        with _unchanged_numbers(self.device):
            try:
                stacked = potential.evaluate(self.params, with_grad=True).losses
                moved = {} if potential.moved is None else self.network.buffers.views(potential.moved)
                if examples is not None:
                    potential.example_losses(self.params, rows)
                    if not isinstance(self.acceptance, FullData):  # each chain chooses its own
                        each = torch.arange(rows.stop, device=self.device).expand(self.num_chains, -1)
                        potential.example_losses(self.params, each)
            except torch.OutOfMemoryError as error:
                raise CannotStack("they do not fit into the memory of the device together") from error
            except Exception as error:
                raise CannotStack(f"the model cannot be run under torch.func.vmap: {_first_line(error)}") from error
            finally:
                made = {name for name, _ in self.model.named_buffers()} - known
                for name in made:  # they hold tensors of the inside of vmap
                    owner, _, last = name.rpartition(".")
                    self.model.get_submodule(owner)._buffers[last] = None
        if made:
            raise CannotStack(f"the model makes buffers in its forward: {', '.join(sorted(made))}")
        if stacked.dim() > 1 and losses.dim() > 0:  # on average: a single loss may be far off in bfloat16
            stacked, losses = stacked.mean(1), losses.mean()
        pairs = [(stacked, losses), *((moved[name], b) for name, b in buffers.items())]
        if not self.layers.draws_numbers and not all(_is_close(many, one) for many, one in pairs):
            raise CannotStack(
                "under torch.func.vmap the model gives other losses or buffers than alone (does it keep a state that is no "
                "buffer?)"
            )

    # --- one step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, batch: Batch) -> Tensor:
        """One transition of every chain. Returns the batch's mean loss of each, (chains,), before the step.

        If the loss raises, the chains stay where they are, and the error goes on.
        """
        self._batch = batch if self.fixed_data else None
        return self._captures.step(self, _itself, batch)

    def _usual_step(self, closures: Sequence[Callable[[], Batch]]) -> Tensor:
        self.check()
        potential, state, info, buffers = self._transition(closures[0](), self.num_steps)
        self.buffers = buffers
        self.params, self.memory, self.here, self.carry = state.params, state.memory, state.here, state.carry
        if state.frozen_at is not self._frozen_at:
            self._frozen_at = state.frozen_at
            self._frozen_at_host.copy_(self._frozen_at, non_blocking=True)
        self._sum_acceptance += info.acceptance_rate
        self._info = info
        if self.num_steps == 0:
            self._measure_resolution(potential)
            _logger.info(f"{self.num_chains} chains at once: {self.describe()}")
        self.num_steps += 1
        if self.is_adapting:
            self._adapt(potential, state, info)
            if self._adaptation is not None and self._adaptation.is_done:
                self._measure_resolution(potential)
        else:
            known = potential.known
            if state.here is not None and state.here.grad is not None:
                known = (state.params, state.here.grad)
            self._watch_health(lambda monitor: monitor.add(info, self.scale), known)
        return info.loss

    def _measure_resolution(self, potential: StackedPotential) -> None:
        """As `Sampler` does, of the worst chain."""
        if potential.losses is None or not self.acceptance.needs_noise:
            return
        chunk_size, reduced = self.prototype._chunk_size(), self.layers.reduced
        with _unchanged_numbers(self.device):
            found = measure(potential, self.params, potential.losses, reduced=reduced, chunk_size=chunk_size)
        self.prototype._report(found, is_adapting=self.is_adapting)

    def _transition(self, batch: Batch, step: Any) -> tuple[StackedPotential, ChainState, Info, Leaves]:
        """One step of the pure kernel: what was evaluated, the new state, what is reported, and the new buffers."""
        potential = StackedPotential(self, batch)
        state = ChainState(self.params, self.memory, self.here, self.carry, step, self._frozen_at)
        state, info = self.kernel.step(state, potential, self.generator)
        buffers = self.buffers
        if potential.moved is not None and self.buffers:
            buffers = self.network.buffers.select(info.is_accepted, potential.moved, self.buffers)
        return potential, state, info, buffers

    # --- the same as a CUDA graph, asked by `capture.Captures` --------------------------------------------------

    _same_layout = nullcontext

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _before_step(self) -> None:
        self.check()

    def _why_not_captured(self) -> str | None:
        if getattr(self.acceptance, "reads_device", False):
            return f"the test looks at sums on the way ({self.acceptance})"
        if self.layers.draws_on_host:
            return "the loss draws random numbers on the host"
        if not isinstance(self.generator, Streams):
            return "its noise needs Triton"
        if getattr(self.kernel, "has_ragged_batches", False):
            return "its batches have another size at each step"
        return None

    def _num_evaluations(self) -> int:
        return 1 + int(getattr(self.kernel, "num_leapfrog", 1))

    def _graph_key(self) -> Any:
        if self._kernel_of_graphs is not self.kernel:  # numbers, since identities are given to others in time
            self._kernel_of_graphs, self._kernel_number = self.kernel, self._kernel_number + 1
        return self._kernel_number, self.layers.graph_key()

    def _token(self) -> tuple[Any, ...]:
        # the last step was a replay, which leaves all where it is
        is_settled = self._clock_at == self.num_steps and self.kernel is self._kernel_of_graphs
        return is_settled, self.generator, self.layers.graph_key()

    def _before_next_replay(self, body: GraphBody) -> None:
        """Nothing has happened since the last one."""

    def _before_capture(self) -> None:
        if self._clock is None:
            self._clock = torch.zeros(1, dtype=torch.int64, device=self.device)
        if isinstance(self.memory, AdamMemory) and isinstance(self.memory.step[0], int):
            # bias correction must move on with the replays
            steps = tuple(torch.full((), float(k), dtype=torch.float64, device=self.device) for k in self.memory.step)
            self.memory = self.memory._replace(step=steps)

    def _in_graph(self, closure: Callable[[], Batch], ring: Ring, numbers: GraphNumbers | None) -> GraphBody:
        """`_transition` on memory that stays where it is."""
        assert self._clock is not None
        before = _tensors(self._graph_state())
        with self.layers.captured(numbers):
            potential, state, info, buffers = self._transition(closure(), self._clock)
        fresh = _tensors((state.params, state.memory, state.here, state.carry, buffers, state.frozen_at))
        known = potential.known
        if known is not None and state.here is None:
            known = (tuple(x.clone() for x in known[0]), known[1])  # where the gradient is of, before the chains move on
        torch._foreach_copy_(before, fresh)
        self._clock.add_(1)
        self._sum_acceptance += info.acceptance_rate
        self._frozen_at_host.copy_(self._frozen_at, non_blocking=True)
        ring.write(info)
        return GraphBody(before, info.loss.dtype, known)

    def _graph_state(self) -> Any:
        return self.params, self.memory, self.here, self.carry, self.buffers, self._frozen_at

    def _is_replayable(self) -> bool:
        needs_here = self.fixed_data and self.here is None
        return not needs_here and not (isinstance(self.acceptance, FullData) and self.examples and self.carry is None)

    def _after_capture(self, body: GraphBody) -> None:
        pass

    def _before_replay(self, body: GraphBody) -> None:
        """What usual steps in between left elsewhere goes to the places that the graph knows."""
        self._before_capture()
        state = self._graph_state()
        now = _tensors(state)
        if not same(now, body.kept):
            torch._foreach_copy_(body.kept, now)
            places = iter(body.kept)
            state = _pytree.tree_map_only(Tensor, lambda _: next(places), state)
            self.params, self.memory, self.here, self.carry, self.buffers, self._frozen_at = state
        if self._clock_at != self.num_steps:
            assert self._clock is not None
            self._clock.fill_(self.num_steps)

    def _after_replay(self, body: GraphBody, ring: Ring) -> Tensor:
        self._info = ring.info
        self.num_steps += 1
        self._clock_at = self.num_steps
        known = body.known
        if self.here is not None and self.here.grad is not None:
            known = (self.params, self.here.grad)
        self._watch_health(lambda monitor: monitor.add_row(ring.rows, ring.last, self.scale), known)
        return ring.loss(body.loss_dtype)

    @property
    def info(self) -> Info:
        """The last step in numbers, one for each chain."""
        if self._info is None:
            raise RuntimeError("no step was taken yet: there is nothing to report.")
        return self._info() if callable(self._info) else self._info

    @property
    def acceptance(self) -> AcceptanceTest:
        return cast(AcceptanceTest, self.kernel.acceptance)

    @property
    def mean_acceptance_rate(self) -> Tensor:
        """Of each chain over all steps, (chains,), on the device."""
        return self._sum_acceptance / max(1, self.num_steps)

    @property
    def beta_eff(self) -> Tensor:
        """Of each chain's last step, (chains,) (`Sampler.beta_eff`)."""
        return effective_beta(self.acceptance, self.info.log_ratio_noise)

    def check(self) -> None:
        """Raise `NonFiniteLoss` if a chain froze (on an accelerator maybe a few steps late), or `ManyProcesses`."""
        check_one_process()
        if not bool((self._frozen_at_host >= 0).any()):
            return
        chains = (self._frozen_at_host >= 0).nonzero().flatten().tolist()
        raise NonFiniteLoss(
            f"the loss, its gradient or the log prior was NaN or infinite at the current weights of {len(chains)} of "
            f"{self.num_chains} chains; the first is chain {chains[0]}, at step {int(self._frozen_at_host[chains[0]])}. Such a "
            "chain has not moved since; its weights are those of the last healthy step."
        )

    def present_loss(self) -> Tensor:
        """The mean loss of each chain at its present weights, as far as the last step knew it (`Sampler.present_loss`)."""
        if isinstance(self.acceptance, FullData) and isinstance(self.carry, Tensor):
            return self.carry.mean(1)
        info = self.info
        return torch.where(info.is_accepted & info.proposed_loss.isfinite(), info.proposed_loss, info.loss)

    def draws(self) -> dict[str, Tensor]:
        """All that `model.state_dict()` holds, of every chain, (chains, ...). Views: copy what is to stay.

        The statistics of BatchNorm are those of the draws' own weights, as in `Sampler.draw`.
        """
        return self.network.draw(self.params, self._fresh_buffers())

    @torch.no_grad()
    def _fresh_buffers(self) -> Leaves:
        """The buffers of draws: the chains' own, with fresh statistics in the place of running ones."""
        if self._batch is None or not self.layers.has_statistics:
            return self.buffers
        names = {id(b): f"model.{name}" for name, b in self.model.named_buffers()}

        def view(flat: Leaves, norm: nn.Module, name: str) -> Tensor:
            return self.network.buffers.views(flat)[names[id(getattr(norm, name))]]

        emptied, fresh = (tuple(b.clone() for b in self.buffers) for _ in range(2))
        with self._on_device(), self.layers.statistics() as found:
            for key in found.keys:
                view(emptied, *key).zero_()
            _, moved = self.network.call(self.loss, self.params, emptied, self._batch)
            found.add(functools.partial(view, moved))
        for key, value in found.values().items():
            view(fresh, *key).copy_(value)
        return fresh

    def draw(self, chain: int) -> dict[str, Tensor]:
        """The state dictionary of one chain, a copy."""
        if self.is_adapting:
            raise RuntimeError("the sampler still adapts its settings: what it visits has no fixed distribution.")
        return {name: x[chain].clone() for name, x in self.draws().items()}

    def place(self, chain: int) -> None:
        """Write one chain's weights and buffers into the model."""
        self.network.place(self.params, self.buffers, chain)

    def log_prior(self) -> Tensor:
        """Of each chain's present weights, (chains,), float64."""
        return self.prior.log_density(self.params)

    def chain(self, chain: int) -> StackedChain:
        """One chain, as a callback sees it."""
        return StackedChain(self, chain)

    # --- burn-in and health -------------------------------------------------------------------------------------

    @property
    def is_adapting(self) -> bool:
        """Whether the settings still change, so that nothing should be collected."""
        return self._adaptation is not None and not self._adaptation.is_done

    def _adapt(self, potential: StackedPotential, state: ChainState, info: Info) -> None:
        """As in `Sampler`, with the means over the chains."""
        assert self._adaptation is not None
        grad = (None if potential.known is None else potential.known[1]) if state.here is None else state.here.grad
        change = self._adaptation.observe(info.acceptance_rate, info.potential, info.step_to_noise, grad, self.scale)
        if change.preconditioner is not None:
            diagonal = tuple(a.to(x.dtype) for a, x in zip(change.preconditioner, self.params, strict=True))
            change = change._replace(preconditioner=diagonal)
        self.kernel = changed(self.kernel, change)
        if self._adaptation.is_done:
            self._check_resolution()
            self._adaptation.warn()

    def _check_resolution(self) -> None:
        """Refuse settings that burn-in made so small that the weights' own numbers lose them (`Sampler._check_resolution`)."""
        lengths = self.kernel.proposal.sigma if hasattr(self.kernel, "proposal") else self.kernel.step_size
        diagonal = _diagonal(self.kernel)
        for i, (leaf, length) in enumerate(zip(self.params, spread_settings(lengths, len(self.params)), strict=True)):
            smallest = float(torch.as_tensor(length).min()) * (1.0 if diagonal is None else float(diagonal[i].min()) ** 0.5)
            largest = float(leaf.abs().max())
            if 0 < smallest < torch.finfo(leaf.dtype).eps * 2.0 ** math.floor(math.log2(max(largest, 1e-30))):
                raise ValueError(
                    f"burn-in came to moves of {smallest:.3g}, below the spacing of {leaf.dtype} numbers near the largest "
                    f"weight {largest:.3g}: rounding would lose them. Keep the weights in float32, or change the settings."
                )

    def _new_monitor(self) -> Monitor:
        state = self.prototype.health_state()
        return Monitor(self.device, state["layers"], state["sizes"], self.num_chains)

    def _watch_health(self, add: Callable[[Monitor], None], known: tuple[Leaves, Leaves] | None) -> None:
        if self._monitor is None:
            self._monitor = self._new_monitor()
        add(self._monitor)
        if self._monitor.num_steps % 10 == 1 and known is not None:
            params, grad = (self.network.params.views(leaves) for leaves in known)
            products = torch.stack([(params[name] * grad[name]).flatten(1).sum(1).double() for name in params], 1)
            self._monitor.add_products(products * by_chain(self.scale, products))

    def reset_health(self) -> None:
        """Forget the steps so far: burn-in is over."""
        self._monitor = None if self._monitor is None else self._monitor.restarted()

    def health_sums(self) -> list[dict[str, float]]:
        """Running sums behind `health`, of each chain. Waits for the device."""
        return (self._monitor or self._new_monitor()).totals_by_chain()

    def health(self) -> list[Health]:
        """What each chain says about itself since burn-in ended. Waits for the device."""
        context = self.prototype._health_context()
        return [monitor.read(**context) for monitor in (self._monitor or self._new_monitor()).chains()]

    def health_states(self) -> list[dict[str, Any] | None]:
        """The sums of each chain, as `adammcmc.samplers.health.read_health` takes them."""
        return [None] * self.num_chains if self._monitor is None else [m.state_dict() for m in self._monitor.chains()]

    # --- what it samples ----------------------------------------------------------------------------------------

    def describe(self) -> str:
        """The realised target of the first chain in one line, as `Sampler.describe`."""
        return self.prototype.describe()

    def settings(self, chain: int) -> dict[str, float]:
        """The present settings of one chain (of its first leaf). Waits for the device."""
        values = settings_by_name(self.kernel)
        return {name: float(v[chain]) if isinstance(v, Tensor) and v.dim() == 1 else float(v) for name, v in values.items()}

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the chains need to go on bit for bit."""
        return {
            "sampler": type(self.prototype).__name__,
            "num_chains": self.num_chains,
            "params": list(self.params),
            "held": self.network.params.held,
            "buffers": list(self.buffers),
            "memory": None if self.memory is None else _plain(self.memory),
            "settings": _settings_state(self.kernel),
            "preconditioner": _diagonal(self.kernel),
            "generator": self.generator.get_state(),
            "num_steps": self.num_steps,
            "resolution": None if self.prototype.resolution is None else list(self.prototype.resolution),
            "sum_acceptance": self._sum_acceptance,
            "frozen_at": self._frozen_at,
            "adaptation": None if self._adaptation is None else copy.deepcopy(self._adaptation.state_dict()),
            "health": None if self._monitor is None else self._monitor.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another stack of the same chains stood."""
        if (state["sampler"], state["num_chains"]) != (type(self.prototype).__name__, self.num_chains):
            raise ValueError(
                f"this is a state of {state['num_chains']} chains of {state['sampler']}, not of {self.num_chains} of "
                f"{type(self.prototype).__name__}."
            )
        if state["generator"].shape != self.generator.get_state().shape:
            raise ValueError("the state was saved on another kind of device: its random numbers cannot go on here.")
        state = _pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), {"held": {}, **state})
        there = _pytree.tree_map_only(Tensor, lambda x: x.to(self.device), {key: state[key] for key in _ON_DEVICE})
        self.params, self.buffers = tuple(there["params"]), tuple(there["buffers"])
        self.network.params.held |= there["held"]
        self.memory = None if there["memory"] is None else _remembered(self.kernel, there["memory"])
        self.kernel = _with_settings(self.kernel, state["settings"], self.device)
        if there["preconditioner"] is not None:
            self.kernel = self.kernel.with_preconditioner(tuple(there["preconditioner"]))
        self.generator.set_state(state["generator"].cpu())
        self.num_steps, self.here, self.carry, self._info = state["num_steps"], None, None, None
        self.prototype._resolution = Resolution(*state["resolution"]) if state.get("resolution") else None
        self._sum_acceptance = state["sum_acceptance"].to(self.device)
        self._frozen_at = state["frozen_at"].to(self.device)
        self._frozen_at_host.copy_(self._frozen_at)
        if state["adaptation"] is not None:
            assert self._adaptation is not None
            self._adaptation.load_state_dict(there["adaptation"])
        self._monitor = None
        if state["health"] is not None:
            self._monitor = self._new_monitor()
            self._monitor.load_state_dict(state["health"])


class StackedChain:
    """One chain of a stack, with what callbacks look at in a `Sampler`."""

    def __init__(self, stack: StackedSampler, chain: int) -> None:
        self._stack, self._chain = stack, chain
        self.target: Target = stack.targets[chain]
        self.acceptance = stack.acceptance
        self.fixed_data = stack.fixed_data

    @property
    def num_steps(self) -> int:
        return self._stack.num_steps

    @property
    def is_adapting(self) -> bool:
        """Whether the settings still change."""
        return self._stack.is_adapting

    @property
    def info(self) -> Info:
        """The last step in numbers, 0-d tensors on the device."""
        return Info(*(field[self._chain] for field in self._stack.info))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The chain's present settings, under the names that a sampler's groups have. Waits for the device."""
        settings = self._stack.settings(self._chain)
        return [{("lr" if name == "step_size" else name): value for name, value in settings.items()}]

    @property
    def mean_acceptance_rate(self) -> Tensor:
        return self._stack.mean_acceptance_rate[self._chain]

    @property
    def beta_eff(self) -> Tensor:
        return self._stack.beta_eff[self._chain]

    def health(self) -> Health:
        """What the chain says about itself since burn-in ended. Waits for the device."""
        return self._stack.health()[self._chain]

    def health_sums(self) -> dict[str, float]:
        """Running sums behind `health`, by name. Waits for the device."""
        return self._stack.health_sums()[self._chain]

    def describe(self) -> str:
        """The realised target of the first chain in one line."""
        return self._stack.describe()


# --- small things ---------------------------------------------------------------------------------------------------------


def _joined_memory(memories: Sequence[Any], params: Leaves) -> Any:
    """What the kernels of single chains remember, as one memory of all; None where none does."""
    first = memories[0]
    if first is None:
        return None
    if not isinstance(first, AdamMemory):
        return None  # a velocity is as good as any other
    if any(memory.step != first.step for memory in memories):
        raise CannotStack("the moments of Adam have another age in some chains")
    exp_avg, exp_avg_sq = (tuple(torch.cat([memory[i][k] for memory in memories]) for k in range(len(params))) for i in (0, 1))
    return AdamMemory(exp_avg, exp_avg_sq, first.step)


def _plain(memory: Any) -> tuple[Any, ...]:
    """The fields of a memory; counts that a graph moves on, on the device, as numbers."""
    if isinstance(memory, AdamMemory):
        memory = memory._replace(step=tuple(int(k) for k in memory.step))
    return tuple(memory)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in _pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _itself(batch: Batch) -> Batch:
    return batch


def _remembered(kernel: Any, fields: Sequence[Any]) -> Any:
    """The kernel's memory from its fields, as a saved state has them."""
    if isinstance(kernel, AdamMCMCKernel):
        return AdamMemory(tuple(fields[0]), tuple(fields[1]), tuple(fields[2]))
    if isinstance(kernel, CorrectedMALAKernel):
        return CarriedBatch(*fields)
    if len(fields) == 2 and isinstance(fields[1], Tensor):
        return Momentum(tuple(fields[0]), fields[1])
    return NoisyMoments(*(tuple(leaves) for leaves in fields))


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


def _with_settings(kernel: Any, state: dict[str, Any], device: torch.device) -> Any:
    changes = {
        name: _with_settings(getattr(kernel, name), value, device)
        if isinstance(value, dict)
        else _pytree.tree_map_only(Tensor, lambda x: x.to(device), value)
        for name, value in state.items()
    }
    return dataclasses.replace(kernel, **changes)


def _diagonal(kernel: Any) -> list[Tensor] | None:
    diagonal = getattr(kernel, "preconditioner", None) or getattr(getattr(kernel, "proposal", None), "preconditioner", None)
    return None if diagonal is None else list(diagonal)


@contextmanager
def _unchanged_numbers(device: torch.device) -> Iterator[None]:
    """torch's global random numbers are after it what they were before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def _is_close(many: Tensor, one: Tensor) -> bool:
    """Whether the first chain of a stack is what it is alone, to the rounding of low precision."""
    if many.shape[1:] != one.shape:
        return False
    return torch.allclose(many[0].double(), one.double(), rtol=0.05, atol=0.02, equal_nan=True)


def _first_line(error: BaseException) -> str:
    said = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
