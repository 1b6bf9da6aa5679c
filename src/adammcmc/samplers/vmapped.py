"""A model run under `torch.func.vmap`: its weights and buffers replaced, chain by chain, by those that lie in leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from adammcmc.samplers.modules import model_tensors, write_tensors
from adammcmc.samplers.packing import Packing
from adammcmc.target.leaves import Leaves, blocks
from adammcmc.target.priors import Prior

__all__ = ["Buffers", "StackedPrior", "VmappedModel"]


class _Layout:
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
        shapes = {name: torch.Size((num_chains, *x.shape)) for name, x in like.items()}
        kinds = dict.fromkeys(x.dtype for x in like.values())
        members = [[i for i, x in enumerate(like.values()) if x.dtype == kind] for kind in kinds]
        self._layout = _Layout(shapes, members)  # with all chains as one
        number = {name: torch.arange(num_chains, device=x.device) for name, x in like.items()}
        self._owners = self.join({name: number[name].repeat_interleave(x.numel()) for name, x in like.items()})
        """The chain that each number belongs to."""

    def views(self, flat: Leaves) -> dict[str, Tensor]:
        """Each buffer, (chains, ...), without a copy."""
        return {name: x[0] for name, x in self._layout.views(tuple(b[None] for b in flat)).items()}

    def join(self, tensors: dict[str, Tensor]) -> Leaves:
        """Buffers (chains, ...) as flat tensors."""
        return tuple(leaf[0] for leaf in self._layout.join({name: x[None] for name, x in tensors.items()}))

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


class VmappedModel:
    """A model whose tensors are replaced, chain by chain under vmap, by those that lie in leaves."""

    def __init__(self, model: nn.Module, packing: Packing, frozen: dict[str, Tensor], num_chains: int) -> None:
        self.module = model
        self._frozen = frozen
        """Weights that are not sampled, (chains, ...), where chains differ in them."""
        names = {id(p): name for name, p in model.named_parameters()}
        owned = [names[id(p)] for p in packing.params]
        shapes = dict(zip(owned, packing.shapes, strict=True))
        self.params = _Layout(shapes, packing.members, {owned[i]: rows for i, rows in packing.free.items()})
        self.buffers = Buffers(dict(model.named_buffers()), num_chains)

    def call(
        self, function: Callable[[nn.Module, Any], Tensor], params: Leaves, buffers: Leaves, batch: Any, *, is_own: bool = False
    ) -> tuple[Tensor, Leaves]:
        """function(model, batch) of each chain, and the buffers as it left them. `is_own`: the batch has a row for each."""
        call = _Call(self.module, function)
        before = tuple(b.clone() for b in buffers)
        views = self.buffers.views(before)

        def one(weights: dict[str, Tensor], own: dict[str, Tensor], frozen: dict[str, Tensor], batch: Any) -> Any:
            tensors = {f"model.{name}": x for name, x in (frozen | weights | own).items()}
            answer = functional_call(call, tensors, (batch,))
            return answer, {name: tensors[f"model.{name}"] for name in own}  # what a forward put in the place of a buffer

        in_dims = (0, 0, 0, 0 if is_own else None)
        answer, after = vmap(one, in_dims, randomness="different")(self.params.whole(params), views, self._frozen, batch)
        for name, view in views.items():
            if after[name].data_ptr() != view.data_ptr():
                view.copy_(after[name].detach())
        return answer, before

    def _known(self, params: Leaves, buffers: Leaves) -> dict[str, Tensor]:
        """The tensors of which each chain has its own, (chains, ...)."""
        return self.params.whole(params) | self.buffers.views(buffers) | self._frozen

    def draw(self, params: Leaves, buffers: Leaves) -> dict[str, Tensor]:
        """All that `model.state_dict()` holds, (chains, ...), by its names."""
        known = self._known(params, buffers)
        by_tensor = {id(x): known.get(name) for name, x in model_tensors(self.module)}  # tied tensors have several names
        chains = params[0].shape[0]
        state = {}
        for name, x in self.module.state_dict(keep_vars=True).items():
            if isinstance(x, Tensor):
                stacked = by_tensor.get(id(x))
                state[name] = x.detach().expand(chains, *x.shape) if stacked is None else stacked.detach()
        return state

    def place(self, params: Leaves, buffers: Leaves, chain: int) -> None:
        """Write one chain's tensors into the model."""
        write_tensors(self.module, {name: x[chain] for name, x in self._known(params, buffers).items()})


class StackedPrior:
    """A prior on the weights of each chain: by its formula where it is Gaussian, otherwise under vmap."""

    def __init__(self, prior: Prior | None, layout: _Layout, like: Leaves) -> None:
        self._prior, self._layout = prior, layout
        self._precisions: list[Tensor] | None = None
        self._has_grad = False
        if prior is None:
            return
        self._log_density = vmap(lambda views: prior.log_density(list(views.values())))
        views = layout.whole(like)
        first = [x[0] for x in views.values()]
        if (values := prior.quadratic(first)) is not None:
            full = {
                name: torch.full_like(x[:1], q, dtype=torch.float64) for (name, x), q in zip(views.items(), values, strict=True)
            }
            self._precisions = [leaf[0] for leaf in layout.join(full)]
        self._has_grad = prior.grad(first) is not None

    def precision_of_leaves(self) -> list[float] | None:
        """Of each leaf, if the prior is quadratic with one precision in each; else None."""
        if self._precisions is None or any(bool((q != q.reshape(-1)[0]).any()) for q in self._precisions):
            return None
        return [float(q.reshape(-1)[0]) for q in self._precisions]

    def log_density(self, params: Leaves) -> Tensor:
        """(chains,), float64."""
        if self._prior is None:
            return torch.zeros(params[0].shape[0], dtype=torch.float64, device=params[0].device)
        if self._precisions is not None:
            return -0.5 * torch.stack([_weighted(x, q) for x, q in zip(params, self._precisions, strict=True)]).sum(0)
        values: Tensor = self._log_density(self._layout.whole(params))
        return values.detach().double()

    def grad(self, params: Leaves) -> Leaves | None:
        """Of `log_density`, chain by chain; None says that it is zero."""
        if self._prior is None or not self._has_grad:
            return None
        if self._precisions is not None:
            pairs = zip(params, self._precisions, strict=True)
            return tuple(x * -q.to(x.dtype).reshape(x.shape[1:]) for x, q in pairs)
        prior = self._prior
        if prior.has_own_grad:
            views = self._layout.whole(params)
            grads = vmap(lambda views: tuple(prior.grad(list(views.values())) or ()))(views)
            return self._layout.join(dict(zip(views, grads, strict=True)))
        with torch.enable_grad():
            leaves = tuple(x.detach().requires_grad_() for x in params)
            return torch.autograd.grad(self._log_density(self._layout.whole(leaves)).sum(), leaves, materialize_grads=True)


def _weighted(leaf: Tensor, weights: Tensor) -> Tensor:
    """sum_i weights_i x_i^2 of each chain, in float64 (block by block, to spare memory)."""
    rows, weights = leaf.reshape(leaf.shape[0], -1), weights.reshape(-1)
    parts = [(rows[:, s].double().square() * weights[s]).sum(1) for s in blocks(rows.shape[1])]
    return torch.stack(parts).sum(0)
