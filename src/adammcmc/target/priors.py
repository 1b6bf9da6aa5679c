"""Priors on the weights. A new one is a class here, exported in `target/__init__.py`, and a line in `named_things` of
`cli/config.py` for configurations."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from adammcmc.target.sums import sums

__all__ = ["Gaussian", "Prior", "UniformBall", "UniformBox"]


class Prior(ABC):
    """A prior on the weights. A subclass defines `log_density`; the gradient is by autograd unless it defines `grad`.

    Example:
        >>> class Laplace(Prior):
        ...     def log_density(self, params):
        ...         return -sum(p.abs().sum(dtype=torch.float64) for p in params)
    """

    is_bounded: ClassVar[bool] = False
    """Whether the prior is zero outside a region, where the loss is then not evaluated (on the CPU)."""

    @abstractmethod
    def log_density(self, params: Sequence[Tensor]) -> Tensor:
        """log prior up to a constant: a scalar, preferably float64, -inf outside the support.

        `params` are the trainable tensors in the order of the sampler's parameter groups, in their own shapes.
        """

    def grad(self, params: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Gradient of `log_density`; None if it is zero everywhere."""
        with torch.enable_grad():
            leaves = [p.detach().requires_grad_() for p in params]
            value = self.log_density(leaves)
            if not value.requires_grad:
                return None
            return torch.autograd.grad(value, leaves, materialize_grads=True)

    def precision(self, params: Sequence[Tensor]) -> Sequence[float] | None:
        """Minus the second derivative of `log_density`, one number per tensor; None if it is zero or not constant."""
        return None

    def quadratic(self, params: Sequence[Tensor]) -> list[float] | None:
        """The precision of each tensor if log_density is -1/2 sum precision * theta^2 (up to a constant), else None.

        A sampler may then compute density and gradient from these numbers, without calling `log_density` and `grad`.
        """
        return None

    @property
    def has_own_grad(self) -> bool:
        """Whether `grad` is a formula, which runs under `torch.func.vmap`; the default, by autograd, does not."""
        return type(self).grad is not Prior.grad

    def check(self, params: Sequence[Tensor]) -> None:  # noqa: B027  (optional)
        """Raise ValueError if the prior does not fit these parameters."""

    def __str__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class Gaussian(Prior):
    """Independent N(0, scale^2) on every weight; `scale` is one number, or one per parameter tensor.

    `Gaussian.per_layer` and `Gaussian.fan_in` build the second form from a module.
    """

    scale: float | tuple[float, ...] = 1.0
    made_for: tuple[tuple[int, torch.Size], ...] | None = None
    """Identity and shape of the tensors that the scales belong to, if they were built from a model."""

    def __post_init__(self) -> None:
        many = isinstance(self.scale, tuple | list)
        scales = tuple(float(s) for s in self.scale) if many else (float(self.scale),)  # type: ignore[union-attr, arg-type]
        for scale in scales:
            if not (scale > 0 and math.isfinite(scale)):
                raise ValueError(f"`scale` must be positive and finite, got {scale}.")
        object.__setattr__(self, "scale", scales if many else scales[0])

    @classmethod
    def per_layer(cls, model: nn.Module, scales: Mapping[str, float]) -> Gaussian:
        """One scale per layer: keys are prefixes of parameter names, "" is the rest; the longest match wins.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
            >>> Gaussian.per_layer(model, {"0": 0.5, "2": 1.0, "2.bias": 3.0}).scale
            (0.5, 0.5, 1.0, 3.0)
        """
        keys = []
        for name in _trainable(model):
            matches = [k for k in scales if k == "" or name == k or name.startswith(k + ".")]
            if not matches:
                raise ValueError(f"no scale for parameter '{name}'. Add its layer, or '' for all the rest.")
            keys.append(max(matches, key=len))
        if unused := set(scales) - {*keys, ""}:
            raise ValueError(f"`scales` names no trainable parameter with {sorted(unused)}.")
        return cls._for_model(model, [scales[key] for key in keys])

    @classmethod
    def fan_in(cls, model: nn.Module, gain: float = 1.0, bias_scale: float = 1.0) -> Gaussian:
        """Scale gain / sqrt(fan-in) for tensors of two or more axes, `bias_scale` for vectors and scalars.

        An empty tensor, such as the weight of `nn.Linear(0, 3)`, gets the scale `gain`, which has no effect.

        Example:
            >>> Gaussian.fan_in(nn.Linear(4, 8), gain=2.0).scale
            (1.0, 1.0)
        """
        fans = [math.prod(p.shape[1:]) if p.dim() > 1 else None for p in _trainable(model).values()]
        return cls._for_model(model, [bias_scale if fan is None else gain / math.sqrt(max(1, fan)) for fan in fans])

    @classmethod
    def _for_model(cls, model: nn.Module, scales: Sequence[float]) -> Gaussian:
        return cls(tuple(scales), tuple((id(p), p.shape) for p in _trainable(model).values()))

    def _scales(self, num_tensors: int) -> tuple[float, ...]:
        return self.scale if isinstance(self.scale, tuple) else (self.scale,) * num_tensors

    def check(self, params: Sequence[Tensor]) -> None:
        if len(scales := self._scales(len(params))) != len(params):
            raise ValueError(f"the Gaussian prior has {len(scales)} scales for {len(params)} trainable tensors.")
        if self.made_for is None:
            return
        identities, shapes = zip(*self.made_for, strict=True)
        is_reordered = set(identities) == {id(p) for p in params} and identities != tuple(id(p) for p in params)
        if is_reordered or shapes != tuple(p.shape for p in params):
            raise ValueError(
                "the Gaussian prior was built for the trainable tensors of a model, in the model's order; the sampler has "
                "other tensors or another order. Give the scales as a tuple in the order of the sampler's groups."
            )

    def log_density(self, params: Sequence[Tensor]) -> Tensor:
        norms = (torch.linalg.vector_norm(p, dtype=torch.float64) for p in params)
        terms = [(n / s) ** 2 for n, s in zip(norms, self._scales(len(params)), strict=True)]
        return -0.5 * sums.over_parameters(torch.stack(terms).sum())

    def grad(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        return [p.detach() * (-1.0 / s**2) for p, s in zip(params, self._scales(len(params)), strict=True)]

    def precision(self, params: Sequence[Tensor]) -> Sequence[float]:
        return [s**-2 for s in self._scales(len(params))]

    def quadratic(self, params: Sequence[Tensor]) -> list[float] | None:
        kind = type(self)  # a subclass with a density or gradient of its own is no longer quadratic
        is_own = kind.log_density is Gaussian.log_density and kind.grad is Gaussian.grad
        return [s**-2 for s in self._scales(len(params))] if is_own else None

    def __str__(self) -> str:
        if isinstance(self.scale, tuple):
            return f"N(0, s^2), s = {min(self.scale):.3g}..{max(self.scale):.3g} by tensor"
        return f"N(0, {self.scale:g}^2)"


@dataclass(frozen=True)
class UniformBox(Prior):
    """Uniform on low <= theta_i <= high for every weight: a bounded Omega of the paper."""

    low: float
    high: float
    is_bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"`low` must be below `high`, got {self.low} and {self.high}.")

    def log_density(self, params: Sequence[Tensor]) -> Tensor:
        return _zero_inside(torch.stack([((p >= self.low) & (p <= self.high)).all() for p in params]).all())

    def grad(self, params: Sequence[Tensor]) -> None:
        return None

    def __str__(self) -> str:
        return f"uniform on [{self.low:g}, {self.high:g}]^P"


@dataclass(frozen=True)
class UniformBall(Prior):
    """Uniform on |theta| <= radius, with the norm over all weights together: a bounded Omega of the paper."""

    radius: float
    is_bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.radius > 0:
            raise ValueError(f"`radius` must be positive, got {self.radius}.")

    def log_density(self, params: Sequence[Tensor]) -> Tensor:
        norms = torch.stack([torch.linalg.vector_norm(p, dtype=torch.float64) for p in params])
        return _zero_inside(sums.over_parameters(norms.square().sum()) <= self.radius**2)

    def grad(self, params: Sequence[Tensor]) -> None:
        return None

    def __str__(self) -> str:
        return f"uniform on the ball |theta| <= {self.radius:g}"


def _zero_inside(inside: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64, device=inside.device)
    return torch.where(inside, zero, -math.inf)


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
