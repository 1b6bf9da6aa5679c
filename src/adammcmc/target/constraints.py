r"""Constrained parameters: positive, on a simplex, ordered, Cholesky factors, ...; kernels see unconstrained ones.

A constraint is one of `torch.distributions.constraints`, or `ordered` from here. With T the transform that maps
unconstrained x to the constrained parameter y (`torch.distributions.biject_to`), the kernel samples

    log q(x) = log p(T(x)) + log |det dT/dx|

so that y = T(x) has the density p. Where y has more numbers than freedom (simplex, Cholesky factors, covariances), p is
the density of its free entries, as `torch.distributions` has it: all but the last of a simplex, the lower triangle
(without the diagonal for a correlation). The transforms of this file, with x in row order in the lower triangle:

    ordered            y_1 = x_1,  y_k = y_{k-1} + exp(x_k)             log |det| = sum_{k>1} x_k
    lower_cholesky     L_ii = exp(x_ii),  L_ij = x_ij                   log |det| = sum_i x_ii
    positive_definite  Y = L L^T                                        log |det| = d log 2 + sum_i (d - i + 2) x_ii
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to
from torch.distributions import constraints as torch_constraints
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import Transform
from torch.utils import _pytree

from adammcmc.target.density import checked_density
from adammcmc.target.leaves import flatten, leaf_names, unflatten

__all__ = ["Unconstrained", "ordered", "transform_of"]

_SUPPORTED = (
    "real, positive, nonnegative, greater_than, greater_than_eq, less_than, interval, unit_interval, simplex, "
    "lower_cholesky, corr_cholesky and positive_definite of torch.distributions.constraints, and `ordered` of "
    "adammcmc.target.constraints"
)


class _Ordered(Constraint):
    """Vectors whose entries increase: y_1 < y_2 < ..."""

    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        return (value.diff(dim=-1) > 0).all(-1)


ordered = _Ordered()
"""Vectors whose entries increase, y_1 < y_2 < ...: for cut points, or to tell the components of a mixture apart."""


class _OrderedTransform(Transform):
    """y_1 = x_1, y_k = y_{k-1} + exp(x_k)."""

    domain = torch_constraints.real_vector
    codomain = ordered
    bijective = True

    def _call(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., :1], x[..., 1:].exp()], -1).cumsum(-1)

    def _inverse(self, y: Tensor) -> Tensor:
        return torch.cat([y[..., :1], y.diff(dim=-1).log()], -1)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return x[..., 1:].sum(-1)


class _LowerCholeskyTransform(Transform):
    """A vector of d (d + 1) / 2 numbers in the lower triangle, row by row; exp of the diagonal."""

    domain = torch_constraints.real_vector
    codomain = torch_constraints.lower_cholesky
    bijective = True

    def _call(self, x: Tensor) -> Tensor:
        d = math.isqrt(2 * x.shape[-1])
        rows, columns = torch.tril_indices(d, d, device=x.device)
        values = torch.where(rows == columns, x.exp(), x)
        flat = x.new_zeros(*x.shape[:-1], d * d).index_copy(-1, rows * d + columns, values)
        return flat.reshape(*x.shape[:-1], d, d)

    def _inverse(self, y: Tensor) -> Tensor:
        rows, columns = torch.tril_indices(y.shape[-1], y.shape[-1], device=y.device)
        values = y[..., rows, columns]
        return torch.where(rows == columns, values.abs().log(), values)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return y.diagonal(dim1=-2, dim2=-1).log().sum(-1)


class _PositiveDefiniteTransform(Transform):
    """Y = L L^T with the factor of `_LowerCholeskyTransform`."""

    domain = torch_constraints.real_vector
    codomain = torch_constraints.positive_definite
    bijective = True

    def _call(self, x: Tensor) -> Tensor:
        factor = _LowerCholeskyTransform()._call(x)
        return factor @ factor.mT

    def _inverse(self, y: Tensor) -> Tensor:
        return _LowerCholeskyTransform()._inverse(torch.linalg.cholesky(y))

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        d = y.shape[-1]
        diagonal = x[..., [i * (i + 3) // 2 for i in range(d)]]
        powers = torch.arange(d + 1, 1, -1, dtype=x.dtype, device=x.device)
        return (diagonal * powers).sum(-1) + d * math.log(2)


_OWN: dict[type, type[Transform]] = {
    _Ordered: _OrderedTransform,
    type(torch_constraints.lower_cholesky): _LowerCholeskyTransform,  # torch's keeps the upper triangle as free numbers
    type(torch_constraints.positive_definite): _PositiveDefiniteTransform,  # likewise
}


def transform_of(constraint: Constraint) -> Transform:
    """The transform from unconstrained numbers, with a log determinant.

    Example:
        >>> from torch.distributions import constraints
        >>> transform_of(constraints.simplex).forward_shape((100, 2)), transform_of(ordered)(torch.zeros(3))
        ((100, 3), tensor([0., 1., 2.]))
    """
    while isinstance(constraint, torch_constraints.independent):  # all log determinants of a chain are summed
        constraint = constraint.base_constraint
    if type(constraint) in _OWN:
        return _OWN[type(constraint)]()
    try:
        found: Transform = biject_to(constraint)
        return found
    except NotImplementedError as error:
        raise ValueError(f"the constraint {constraint} has no smooth transform. There are: {_SUPPORTED}.") from error


class Unconstrained:
    """A log density of constrained parameters as one of unconstrained parameters: log p(T(x)) + log |det dT/dx|.

    A plain function of parameters with a chain axis, like the density it wraps.

    Args:
        log_density: of the constrained parameters.
        initial: constrained starting points, a tensor or a pytree of tensors (chains, ...).
        constraints: of a single tensor, or in the structure of `initial`; a key left out, or None, is unconstrained.

    Example:
        >>> from torch.distributions import constraints
        >>> wrapped = Unconstrained(lambda y: -y, torch.ones(3), constraints.positive)  # the exponential distribution
        >>> wrapped.start, wrapped(torch.zeros(3)), wrapped.constrained(torch.zeros(3))
        (tensor([0., 0., 0.]), tensor([-1., -1., -1.]), tensor([1., 1., 1.]))
    """

    def __init__(self, log_density: Callable[[Any], Tensor], initial: Any, constraints: Any) -> None:
        leaves, self._structure = flatten(initial)
        found = _matched(initial, constraints, "")
        wanted = (found,) if isinstance(initial, Tensor) else _flat(found)
        self._log_density = log_density
        self.constraints: dict[str, Constraint] = {}
        """Of each leaf that has one, by name."""
        self._transforms: list[Transform | None] = []
        start = []
        for name, leaf, constraint in zip(leaf_names(initial), leaves, wanted, strict=True):
            if _is_real(constraint):
                self._transforms.append(None)
                start.append(leaf)
                continue
            self.constraints[name] = constraint
            self._transforms.append(transform := transform_of(constraint))
            start.append(_inverse(name, leaf, constraint, transform))
        self.start = unflatten(tuple(start), self._structure)
        """`initial`, unconstrained."""

    def __call__(self, params: Any) -> Tensor:
        leaves = flatten(params)[0]
        constrained, log_det = [], None
        for x, transform in zip(leaves, self._transforms, strict=True):
            constrained.append(x if transform is None else transform(x))
            if transform is not None:
                own: Tensor = transform.log_abs_det_jacobian(x, constrained[-1])  # type: ignore[no-untyped-call]
                own = own.reshape(len(x), -1).sum(1)
                log_det = own if log_det is None else log_det + own
        value = checked_density(self._log_density(unflatten(tuple(constrained), self._structure)), len(leaves[0]))
        return value if log_det is None else value + log_det

    def constrained(self, params: Any) -> Any:
        """The constrained parameters of unconstrained ones, (chains, ...) or (chains, draws, ...)."""
        leaves = flatten(params)[0]
        with torch.no_grad():
            changed = (x if t is None else t(x) for x, t in zip(leaves, self._transforms, strict=True))
            return unflatten(tuple(changed), self._structure)

    def __str__(self) -> str:
        return ", ".join(f"{name}: {_in_words(constraint)}" for name, constraint in self.constraints.items())


def _flat(tree: Any) -> Sequence[Constraint]:
    """The constraints of a pytree, in the order of its leaves."""
    return _pytree.tree_flatten(tree)[0]


def _is_real(constraint: Constraint) -> bool:
    while isinstance(constraint, torch_constraints.independent):
        constraint = constraint.base_constraint
    return constraint is torch_constraints.real


def _in_words(constraint: Constraint) -> str:
    named = {id(getattr(torch_constraints, name)): name for name in ("positive", "nonnegative", "unit_interval")}
    return named.get(id(constraint), str(constraint).removesuffix("()").removeprefix("_"))


def _matched(tree: Any, wanted: Any, name: str) -> Any:
    """The constraints in the structure of `tree`, `real` where none is given."""
    at = f"`constraints[{name!r}]`" if name else "`constraints`"
    if isinstance(tree, Tensor):
        if wanted is not None and not isinstance(wanted, Constraint):
            raise TypeError(
                f"{at} must be a constraint, as in torch.distributions.constraints.positive or "
                f"constraints.greater_than(1.0), got {wanted!r}."
            )
        return torch_constraints.real if wanted is None else wanted
    if isinstance(tree, dict):
        wanted = {} if wanted is None else wanted
        if not isinstance(wanted, Mapping):
            raise TypeError(f"{at} must be a dict with some of the keys of `initial`, {list(tree)}, got {wanted!r}.")
        if unknown := [key for key in wanted if key not in tree]:
            raise ValueError(f"{at} has the keys {unknown}, which are not in `initial`: its keys are {list(tree)}.")
        return {key: _matched(value, wanted.get(key), f"{name}.{key}".lstrip(".")) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        wanted = [None] * len(tree) if wanted is None else wanted
        if not isinstance(wanted, list | tuple) or len(wanted) != len(tree):
            raise TypeError(f"{at} must hold {len(tree)} constraints (or None), one per part of `initial`, got {wanted!r}.")
        pairs = enumerate(zip(tree, wanted, strict=True))
        return [_matched(value, own, f"{name}.{i}".lstrip(".")) for i, (value, own) in pairs]
    kind = type(tree).__name__
    raise TypeError(f"with `constraints`, `initial` must be a tensor or nested dicts, lists and tuples, got {kind}.")


def _inverse(name: str, leaf: Tensor, constraint: Constraint, transform: Transform) -> Tensor:
    """The unconstrained starting points, checked."""
    least = 1 + transform.codomain.event_dim
    if leaf.dim() < least:
        raise ValueError(
            f"`initial` of '{name}' must have the chains on its first axis and then {least - 1} or more for "
            f"{_in_words(constraint)}, got shape {tuple(leaf.shape)}."
        )
    if bad := _outside(leaf, constraint):
        raise ValueError(
            f"`initial` violates its constraint: '{name}' must be {_in_words(constraint)}, and it is not, or lies on the "
            f"edge, in {len(bad)} of {len(leaf)} chains (first: {bad[:5]}; chain {bad[0]} has "
            f"{_shown(leaf[bad[0]])}). Start strictly inside; `initial` is given in constrained space."
        )
    x: Tensor = transform.inv(leaf).detach()
    if not bool(x.isfinite().all()):
        raise ValueError(f"`initial` of '{name}' is too close to the edge of {_in_words(constraint)}: start further inside.")
    return x


def _outside(leaf: Tensor, constraint: Constraint) -> list[int]:
    """Chains that start outside, or on the edge, which is infinitely far away for unconstrained numbers."""
    while isinstance(constraint, torch_constraints.independent):
        constraint = constraint.base_constraint
    if isinstance(constraint, type(torch_constraints.simplex)):  # torch's tolerance is too narrow for long ones in float32
        total = (leaf.sum(-1) - 1).abs() < 1e-6 + 4 * torch.finfo(leaf.dtype).eps * leaf.shape[-1]
        inside = total & (leaf > 0).all(-1)
    else:
        inside = constraint.check(leaf)  # type: ignore[no-untyped-call]
    for bound, sign in (("lower_bound", 1), ("upper_bound", -1)):
        if (edge := getattr(constraint, bound, None)) is not None:
            inside = inside & (sign * (leaf - edge) > 0)
    return [int(c) for c in (~inside.reshape(len(leaf), -1).all(1)).nonzero().flatten()]


def _shown(value: Tensor) -> str:
    few = [f"{float(v):.4g}" for v in value.flatten()[:4]]
    return ", ".join(few) + (", ..." if value.numel() > 4 else "")
