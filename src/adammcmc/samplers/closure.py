"""A training loop's closure as a potential: the loss of a batch at whatever weights the model holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adammcmc.errors import StochasticClosure, warn
from adammcmc.samplers.chains import NetworkPotential
from adammcmc.samplers.forces import Forces, arithmetic
from adammcmc.samplers.layers import Layers
from adammcmc.samplers.packing import Packing, RowsToHold
from adammcmc.target.control import check_order
from adammcmc.target.data import Examples
from adammcmc.target.leaves import Leaves, inner
from adammcmc.target.potential import Evaluation, Target, potential_difference
from adammcmc.target.resolution import agree

__all__ = ["Closure", "ClosurePotential", "Reference", "check_mean", "expand"]

_CHUNK = 1024  # examples whose gradient is taken at once

Closure = Callable[[], Tensor | float]
"""Returns the mean loss of a batch, shape (), or the losses of its examples, shape (batch,), at the model's weights.

It may call `backward` itself (after `zero_grad`), of the mean, as closures for LBFGS do; it then pays a backward each time.
"""


class Reference(NamedTuple):
    """A point, and the sums of the losses' derivatives there, in float64."""

    params: list[Tensor]
    grad: list[Tensor]
    """In the parameters' shapes."""
    hessian: Tensor | None = None
    """(P, P), the parameters one after the other; None for a control variate of first order."""


def expand(losses: Callable[[slice], Tensor], params: Sequence[Tensor], num_examples: int, order: int) -> Reference:
    """Where the weights are, as a reference: one pass over the data, for order 2 with a backward for each parameter."""
    sizes = [p.numel() for p in params]
    check_order(order, sum(sizes))
    total = torch.zeros(sum(sizes), dtype=torch.float64, device=params[0].device)
    hessian = total.new_zeros(sum(sizes), sum(sizes)) if order == 2 else None
    for i in range(0, num_examples, _CHUNK):
        with torch.enable_grad():
            total_loss = losses(slice(i, min(i + _CHUNK, num_examples))).sum()
            slope = _slope(total_loss, params, create_graph=order == 2)
            total += slope.detach().double()
            if hessian is not None and slope.requires_grad:  # a loss that is linear in its weights has none
                for row, along in zip(hessian, slope, strict=True):
                    row += _slope(along, params).double()
    grads = [g.view(p.shape) for g, p in zip(torch.split(total, sizes), params, strict=True)]
    return Reference([p.detach().clone() for p in params], grads, hessian)


def _slope(value: Tensor, params: Sequence[Tensor], *, create_graph: bool = False) -> Tensor:
    """The gradient by all parameters, one after the other, (P,)."""
    grads = torch.autograd.grad(
        value, list(params), retain_graph=True, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
    return torch.cat([g.reshape(-1) for g in grads])


class ClosurePotential(NetworkPotential):
    """The potential of one step's closures over live parameters (one chain): evaluating at a point writes it there.

    Args:
        closures: the micro-batches of the step, mostly one.
        packing: the model's trainable parameters and how they lie in leaves.
        weights: of the micro-batches' means, with mean 1; None where each has as many examples.
        forces: the arithmetic of gradients.
        layers: dropout, BatchNorm and other layers with state.
        must_check: whether to check, at the first evaluation, that fixed data are fixed.
        is_first: whether to check that a loss is a mean, as far as its graph shows.
        reference: of a control variate.
        precision: of the prior, if it is quadratic and a backend adds it: it is left out here.
        name: what the parameter of this index is called in messages.
    """

    scale: float

    def __init__(
        self,
        closures: Sequence[Closure],
        packing: Packing,
        *,
        weights: Sequence[float] | None = None,
        forces: Forces = "float32",
        target: Target,
        examples: Examples | None,
        layers: Layers,
        fixed: bool,
        must_check: bool = False,
        is_first: bool = False,
        reference: Reference | None = None,
        precision: list[float] | None = None,
        name: Callable[[int], str],
    ) -> None:
        super().__init__(target.scale, target.inverse_temperature, target.prior, fixed=fixed, examples=examples)
        self._must_check = must_check
        self._must_be_mean = is_first and target.num_data > 1
        self._num_data = target.num_data
        self._returned: list[Tensor] = []
        self._prior = target.prior if precision is None else None
        self._closures, self._weights, self._forces = closures, weights, forces
        self.can_be_rough = forces != "float32"
        self._packing = packing
        self._live = packing.params
        self.held: Leaves | None = None
        """The values that the live parameters have."""
        self._examples = examples
        self._layers = layers
        self._name = name
        self.control = None if reference is None else _Expansion(self, reference)
        self._calls_backward: bool | None = None  # unknown before the first call

    def evaluate(self, params: Leaves, *, with_grad: bool) -> Evaluation:
        self.place(params)
        first = self.losses is None
        if not with_grad:
            losses = self._losses()
            self._check_losses(losses, first=first)
            return Evaluation(losses[None], self.log_prior(params), None)
        self.num_gradients += 1
        precise = None
        if self._forces != "float32" and not self.is_rough:
            precise = self._losses()  # first, so that what is seen of the layers is how energies are computed
        losses, grads = self._differentiate(self._closures, self._weights)
        losses = losses if precise is None else precise
        self._check_losses(losses, first=first)
        grad = self._join(grads, params)
        if self.known is None:
            self.known = params, grad
        return Evaluation(losses[None], self.log_prior(params), grad)

    def _check_losses(self, losses: Tensor, *, first: bool) -> None:
        """Of all micro-batches, once the modules are known."""
        self._check_held()
        if losses.dim() > 0 and len(losses) > self._num_data:
            raise ValueError(
                f"a batch has {len(losses)} examples, but `num_data` is {self._num_data}: it must be the number of examples in "
                "the training set, not of batches or of examples in a batch."
            )
        self.losses = losses[None] if self.losses is None else self.losses
        if self.fixed and first and self._must_check:
            self._check_fixed(losses)

    def force(self, params: Leaves) -> Leaves:
        if self._forces == "float32" or self._calls_backward is None:
            return super().force(params)
        self.place(params)
        self.num_gradients += 1
        return self._join(self._differentiate(self._closures, self._weights)[1], params)

    @property
    def num_parts(self) -> int:
        return len(self._closures)

    def force_of(self, params: Leaves, part: int) -> Leaves:
        self.place(params)
        if self._forces != "float32" and not self._layers.seen.is_complete:
            self._losses()  # as in `evaluate`: the layers are seen as they are in energies
        losses, grads = self._differentiate(self._closures[part : part + 1], None)
        share = 1 / self.num_parts
        if self._weights is not None:
            share *= self._weights[part]
        elif losses.dim() > 0:
            share = len(losses) / self._num_data
        self.num_gradients += share
        return self._join([g * (share * self.num_parts) for g in grads], params)

    def _check_held(self) -> None:
        """The modules are known once they were called, and with them the rows that must stay as they are."""
        if self._layers.padding and not all(
            self._layers.padding.get(id(p), frozenset()) <= set(self._packing.held.get(i, ())) for i, p in enumerate(self._live)
        ):
            raise RowsToHold

    def _check_fixed(self, losses: Tensor) -> None:
        """`fixed_data` is a promise: it is checked once, as far as that is possible, at the cost of one more forward."""
        if losses.dim() > 0 and len(losses) != self._num_data:
            raise ValueError(
                f"fixed_data=True says that each closure sees all data, but it returned {len(losses)} losses and `num_data` is "
                f"{self._num_data}."
            )
        again = self._losses(same_numbers=False)
        # numbers that are drawn and change nothing (those of a DataLoader that is iterated, for example) do no harm
        if not self._agree(again[None], losses[None], exactly=self._layers.seen.draws_numbers):
            raise StochasticClosure(
                "fixed_data=True says that the loss is the same function of the weights at every call, but two calls at one "
                f"point gave mean losses {float(losses.mean()):.8g} and {float(again.mean()):.8g}, which are multiplied by "
                f"{self.scale:.6g}. "
                + (f"At fault: {at_fault}." if (at_fault := self._layers.at_fault()) else "Shuffled batches? Random numbers?")
                + " Use model.eval(), return the loss of all data, or set fixed_data=False (in `sample`: "
                "sampler=partial(Underdamped, fixed_data=False), which is approximate)."
            )

    def _agree(self, again: Tensor, losses: Tensor, *, exactly: bool = False) -> bool:
        # reduced precision gives other numbers in another order (or compiled otherwise): `resolution` reports that
        return agree(again, losses, self.scale, exactly=exactly, slack=1e-4 if self._layers.reduced else 0.0)

    def check_same(self, known: Evaluation) -> None:
        """Evaluate fixed data again, at the weights whose losses are known from the last step: do batches change?"""
        if not self._closures:  # the only loss is that of the examples
            return
        again = self._losses(same_numbers=False)[None]
        if not self._agree(again, known.losses):
            raise StochasticClosure(
                "fixed_data=True requires the same data at every step, but this step's closure gives a different loss at the "
                f"weights of the last step: {float(again.mean()):.6g}, not {float(known.losses.mean()):.6g}. Minibatches? Pass "
                "all data, or set fixed_data=False (and acceptance=FullData() to stay exact)."
            )

    def _join(self, grads: Sequence[Tensor], params: Leaves) -> Leaves:
        """The gradient of V as leaves: the loss's part and the prior's."""
        if self._prior is not None and (prior_grad := self._prior.grad(self._packing.whole(params))) is not None:
            grads = [g.sub(q, alpha=1 / self.scale) for g, q in zip(grads, prior_grad, strict=True)]
        return self._packing.join(grads)

    def prior_part(self, params: Leaves) -> Leaves | None:
        if self._prior is None or (prior_grad := self._prior.grad(self._packing.whole(params))) is None:
            return None
        return self._packing.join([q * (-1 / self.scale) for q in prior_grad])

    def compare(self, current: Evaluation, proposed: Evaluation) -> Tensor:
        if current.losses.shape != proposed.losses.shape:
            raise ValueError(
                f"the closure returned losses of shape {tuple(current.losses.shape[1:])} at the current weights and "
                f"{tuple(proposed.losses.shape[1:])} at the proposed ones. Both must be of the same batch: fetch it outside of "
                "the closure, and set fixed_data=True only if every step sees the same data."
            )
        return potential_difference(self.scale, current, proposed)

    def log_prior(self, params: Leaves) -> Tensor:
        if self._prior is None:
            return self._packing.zero
        value = self._prior.log_density(self._packing.whole(params))
        return value.detach().double().reshape(1)

    def example_losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        assert self._examples is not None
        self.place(params)
        with torch.no_grad():
            own = indices[0] if isinstance(indices, Tensor) and indices.dim() > 1 else indices  # there is one chain
            return self._layers.example_losses(self._examples.losses, own)[None]

    def evaluate_weighted(self, params: Leaves, weights: Tensor) -> Evaluation:
        assert self._examples is not None
        self.num_gradients += 1
        self.place(params)
        examples, rows = self._examples, weights[0].nonzero().flatten()
        total = torch.zeros((), dtype=torch.float64, device=weights.device)
        grads = [torch.zeros_like(p) for p in self._live]

        def evaluate(some: slice | Tensor) -> Tensor:
            """Differentiates at once: the layers' buffers are put back afterwards."""
            nonlocal total, grads
            losses = examples.losses(some)
            if some is rows:  # not one of its halves, which are only compared
                total = torch.dot(losses.double(), weights[0, rows]) / len(examples)
                grads = self._add_grad(total, None)
            return losses.detach()

        if len(rows) > 0:  # not every model takes a batch of nothing
            with torch.enable_grad():
                self._layers.example_losses(evaluate, rows)
            self._check_held()
        return Evaluation(total.detach()[None], self.log_prior(params), self._join(grads, params))

    def slopes(self, params: Leaves, directions: Sequence[Sequence[Tensor]], indices: slice | Tensor) -> list[Tensor]:
        """g_i . d at `params` for chosen examples, then d' H_i e for a second direction, and so on, (1, examples) each.

        By differentiating twice, of which once forward: the gradient of sum_i v_i l_i by the weights is linear in v; its
        product with the direction, differentiated by v, has the elements g_i . d.
        """
        assert self._examples is not None
        self.place(params)
        own = indices[0] if isinstance(indices, Tensor) and indices.dim() > 1 else indices
        found: list[Tensor] = []
        with torch.enable_grad():
            values = self._layers.example_losses(self._examples.losses, own)
            for direction in directions:
                more = len(found) + 1 < len(directions)
                values = self._along(values, direction, create_graph=more)
                found.append(values.detach()[None])
        return found

    def _along(self, values: Tensor, direction: Sequence[Tensor], *, create_graph: bool) -> Tensor:
        """The derivative of each value by the weights, along a direction."""
        if not values.requires_grad:
            return torch.zeros_like(values)
        v = torch.zeros_like(values, requires_grad=True)
        grads = torch.autograd.grad(values, self._live, v, create_graph=True, allow_unused=True, materialize_grads=True)
        used = [(g, d) for g, d in zip(grads, direction, strict=True) if g.requires_grad]
        if not used:
            return torch.zeros_like(values)
        return torch.autograd.grad([g for g, _ in used], v, [d for _, d in used], create_graph=create_graph)[0]

    def place(self, params: Leaves) -> None:
        """Write these values into the live parameters, unless they are there already."""
        if params is not self.held:
            self._packing.write(params)
            self.held = params

    def _called(self, closure: Closure) -> Tensor:
        loss = closure()
        if self._forces != "float32" and isinstance(loss, Tensor):  # under autocast, losses may come out in bfloat16
            loss = loss.float() if loss.dtype == torch.bfloat16 and torch.is_autocast_enabled(loss.device.type) else loss
        loss = _checked(loss)
        if any(loss is earlier for earlier in self._returned):
            raise ValueError(
                "the closure returned the same tensor twice: it must compute the loss anew at each call, at the weights that "
                "the model holds then. Put the forward pass inside: sampler.step(lambda: F.cross_entropy(model(x), y))."
            )
        self._returned.append(loss)
        return loss.to(self._live[0].device)  # a closure may return a Python number

    def _losses(self, *, same_numbers: bool = True) -> Tensor:
        """Losses of all micro-batches, without gradient. (A closure may call backward: each `grad` is restored.)"""
        saved = [p.grad for p in self._live]
        try:
            # before the first evaluation it is not known whether the closure calls backward, which needs a graph
            has_graph = self._calls_backward is not False
            with torch.set_grad_enabled(has_graph), self._layers.evaluation(same_numbers=same_numbers):
                # copied at once: a closure may return a buffer that it writes to again
                losses = [self._called(closure).detach().clone() for closure in self._closures]
                return _joined(losses, self._weights)
        finally:
            self._restore(saved)

    def _differentiate(self, closures: Sequence[Closure], weights: Sequence[float] | None) -> tuple[Tensor, list[Tensor]]:
        """The losses of these micro-batches, and the gradient of their mean."""
        first_call = self._calls_backward is None
        saved = [p.grad for p in self._live]
        try:
            with self._layers.evaluation(), arithmetic(self._forces, self._live[0].device):
                losses, grads = self._call_and_differentiate(closures, weights)
        except BaseException:
            self._restore(saved)
            raise
        if not (self._calls_backward and first_call):  # p.grad stays what the user's own first backward left there
            self._restore(saved)
        return losses, grads

    def _restore(self, grads: Sequence[Tensor | None]) -> None:
        for p, g in zip(self._live, grads, strict=True):
            p.grad = g

    def _call_and_differentiate(
        self, closures: Sequence[Closure], weights: Sequence[float] | None
    ) -> tuple[Tensor, list[Tensor]]:
        for p in self._live:
            p.grad = None  # so that a closure that calls backward is seen, and starts from zero
        losses: list[Tensor] = []
        sums: list[Tensor] | None = None
        for i, closure in enumerate(closures):
            with torch.enable_grad():
                loss = self._called(closure)
                if self._must_be_mean and loss.dim() == 0:
                    check_mean(loss, self._num_data)
                called = any(p.grad is not None for p in self._live)
                if not called:
                    # what of one micro-batch is differentiated; sums are divided at the end
                    total = loss if loss.dim() == 0 else loss.mean() if len(closures) == 1 else loss.sum()
                    if loss.dim() == 0 and weights is not None:
                        total = total * weights[i]
                    sums = self._add_grad(total, sums)
            losses.append(loss.detach().clone())
            self._calls_backward = called
        if self._calls_backward:
            if len(closures) > 1:
                raise ValueError("a list of closures must leave `backward` to the sampler; one closure may call it itself.")
            grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self._live]
            self._check(grads)
        else:
            assert sums is not None
            grads = sums
            if len(closures) > 1:
                count = sum(x.numel() for x in losses)
                grads = [g / count for g in grads]  # never in place: autograd may return one tensor for two parameters
        return _joined(losses, weights), grads

    def _add_grad(self, loss: Tensor, sums: list[Tensor] | None) -> list[Tensor]:
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on the parameters by autograd. Return the loss tensor "
                "itself (no .item(), no .detach(), no torch.no_grad()), computed by the model whose parameters are sampled."
            )
        # a parameter that the loss does not reach has gradient zero: it is sampled too, from its prior
        self._packing.last_grads = ()
        grads = torch.autograd.grad(loss, list(self._live), allow_unused=True, materialize_grads=True)
        self._packing.last_grads = grads
        self._check(grads)
        return list(grads) if sums is None else [s + g for s, g in zip(sums, grads, strict=True)]

    def _check(self, grads: Sequence[Tensor]) -> None:
        for i, g in enumerate(grads):
            if g.layout != torch.strided:
                raise ValueError(f"{self._name(i)} has a sparse gradient, which has no density. Use sparse=False in the layer.")


class _Expansion:
    """The control variate of a closure: the sums at the reference are known, g_i . d of single examples is differentiated."""

    def __init__(self, potential: ClosurePotential, reference: Reference) -> None:
        packing = potential._packing
        self._potential, self._hessian = potential, reference.hessian
        self.order = 1 if reference.hessian is None else 2
        self.reference, self._grad = packing.join(reference.params), packing.join(reference.grad)

    def _step(self, params: Leaves, proposed: Leaves) -> Leaves:
        return tuple(y - x for x, y in zip(params, proposed, strict=True))

    def _middle(self, params: Leaves, proposed: Leaves) -> Leaves:
        return tuple((x - r) + (y - r) for x, y, r in zip(params, proposed, self.reference, strict=True))

    def total(self, params: Leaves, proposed: Leaves) -> Tensor:
        step = self._step(params, proposed)  # rounded as in `differences`: what is added here is what is taken off there
        known = torch.stack([inner(d, g) for d, g in zip(step, self._grad, strict=True)]).sum(0)
        if self._hessian is None:
            return known
        d, e = (self._flat(x) for x in (step, self._middle(params, proposed)))
        return known + 0.5 * torch.dot(d @ self._hessian, e)

    def _flat(self, leaves: Leaves) -> Tensor:
        """(P,), the parameters one after the other, float64."""
        return torch.cat([x.reshape(-1).double() for x in self._potential._packing.whole(leaves, 0.0)])

    def differences(self, params: Leaves, proposed: Leaves, indices: slice | Tensor) -> Tensor:
        whole = self._potential._packing.whole
        directions = [whole(self._step(params, proposed), 0.0)]
        if self._hessian is not None:
            directions.append(whole(self._middle(params, proposed), 0.0))
        first, *second = (x.double() for x in self._potential.slopes(self.reference, directions, indices))
        return first + 0.5 * second[0] if second else first


def _checked(loss: Tensor | float) -> Tensor:
    if isinstance(loss, float):
        loss = torch.tensor(loss, dtype=torch.float64)
    if not isinstance(loss, Tensor):
        raise TypeError(f"the closure must return the loss as a tensor, got {type(loss).__name__}.")
    if loss.dim() > 1:
        raise ValueError(
            f"the closure must return the mean loss, shape (), or one loss for each example, shape (batch,), "
            f"got shape {tuple(loss.shape)}."
        )
    if loss.numel() == 0:
        raise ValueError("the closure returned no losses: the batch is empty.")
    if not loss.is_floating_point() or loss.dtype in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"the closure returned a loss in {loss.dtype}: its rounding, times num_data, would swamp the acceptance ratio. "
            "Compute the loss in float32, for example F.cross_entropy(model(x).float(), y)."
        )
    return loss


_SAME_VALUE = frozenset(
    f"{name}Backward{i}" for name in ("ToCopy", "Clone", "Alias", "View", "ReshapeAlias", "Squeeze", "Neg") for i in (0, 1)
)
_REDUCTIONS = ("none", "mean", "sum")


def check_mean(loss: Tensor, num_data: int) -> None:
    """Refuse a loss whose graph ends in the sum over a batch: it would be multiplied by n as if it were the mean.

    Certain where one of torch's losses was summed (an error); a plain sum of other numbers may be a mean in disguise,
    such as (losses / n).sum(), and raises a warning. Other operations at the end of the graph are not examined.
    """
    node = _root(loss.grad_fn)
    is_sum = _is_summed(node, "sum")
    if not is_sum and node is not None and node.name() == "SumBackward0" and math.prod(node._saved_self_sym_sizes) > 1:
        is_sum = _is_summed(_root(node.next_functions[0][0]), "none")
        if not is_sum:
            warn(
                f"the closure's loss ends in a sum over {tuple(node._saved_self_sym_sizes)} numbers. It is taken as the MEAN "
                f"loss of an example and multiplied by num_data = {num_data}. If it is the sum over the batch, return "
                "losses.mean(), or the losses of the examples, shape (batch,); if it is a mean, write it as .mean() or "
                ".sum() / n.",
            )
    if is_sum:
        raise ValueError(
            'the closure returned the sum of the losses of its batch (reduction="sum"). It would be taken as the mean loss and '
            f'multiplied by num_data = {num_data}: the target would be far too cold. Use reduction="mean" or, better, '
            'reduction="none", which returns per-example losses, shape (batch,).'
        )


def _root(node: Any) -> Any:
    """The last operation of a graph that is more than a change of sign, dtype or shape."""
    while node is not None and node.name() in _SAME_VALUE:
        node = node.next_functions[0][0]
    return node


def _is_summed(node: Any, how: str) -> bool:
    """Whether this is one of torch's losses of two or more examples, with this reduction."""
    reduction = getattr(node, "_saved_reduction", None)
    if reduction is None or _REDUCTIONS[reduction] != how:
        return False
    try:
        return len(node._saved_target) > 1 if node._saved_target.dim() > 0 else False
    except (AttributeError, RuntimeError):  # this loss keeps none, or the closure has called backward
        return True


def _joined(losses: list[Tensor], weights: Sequence[float] | None) -> Tensor:
    """The losses of all micro-batches: as the closure returned them, or in one row."""
    if len(losses) == 1:
        return losses[0]
    if len({x.dim() for x in losses}) > 1:
        raise ValueError("the closures of one step must all return means, or all return per-example losses.")
    if losses[0].dim() > 0:
        return torch.cat(losses)
    means = losses if weights is None else [x * weight for x, weight in zip(losses, weights, strict=True)]
    return torch.stack(means).mean()
