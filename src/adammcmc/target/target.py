r"""What is sampled: the loss scale, the temperature, the prior, and the potential U.

    p(theta) ~ exp(-U(theta)),    U(theta) = lambda * sum_i l_i(theta) - log prior(theta)

`inverse_temperature` = lambda multiplies the SUM of the losses over the data set of `num_data` = n examples; 1 is Bayes.
A batch estimates U by lambda * n * (mean loss) - log prior. What is differentiated is V = U / (lambda n), the mean loss
minus log prior / (lambda n), so that Adam's moments have their usual units. In a `Density`, lambda = n = 1 and V = U.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from adammcmc.target.control import Control
from adammcmc.target.leaves import Leaves, Setting, flatten, unflatten

__all__ = [
    "Density",
    "Evaluation",
    "Gaussian",
    "PaperSettings",
    "Potential",
    "Prior",
    "Target",
    "UniformBall",
    "UniformBox",
    "from_paper",
]


class Evaluation(NamedTuple):
    """The target at one point: what a batch says there, and the gradient if it was asked for."""

    losses: Tensor
    """(chains,) for a mean loss, or (chains, batch) for the losses of the examples."""
    log_prior: Tensor
    """(chains,), float64, up to a constant."""
    grad: Leaves | None
    """Gradient of V, or None."""


class Potential(Protocol):
    """The target as a kernel sees it. `evaluate` is the only way by which a kernel learns anything."""

    @property
    def scale(self) -> Setting:
        """lambda * n: U = scale * V. A number, or one for each chain."""
        ...

    @property
    def inverse_temperature(self) -> Setting:
        """lambda: a number, or one for each chain."""
        ...

    fixed: bool
    """Whether every evaluation uses the same data, so that a value found at one step is valid at the next."""
    is_bounded: bool
    """Whether the prior is zero somewhere, so that it is worth asking before the loss is evaluated."""

    def evaluate(self, params: Leaves, *, with_grad: bool) -> Evaluation:
        """The losses, the log prior and (if asked for) the gradient of V at `params`."""
        ...

    def evaluate_weighted(self, params: Leaves, weights: Tensor) -> Evaluation:
        """With (1/n) sum_i w_i l_i, (chains,), float64, in the place of the mean loss, and with its gradient.

        `weights`: (chains, num_examples). Only examples with a weight that is not zero in some chain are looked at.
        """
        ...

    def compare(self, current: Evaluation, proposed: Evaluation) -> Tensor:
        """U(proposed) - U(current), (chains,), from differences of single losses, in float64."""
        ...

    def log_prior(self, params: Leaves) -> Tensor:
        """log prior, (chains,), float64, without evaluating the loss."""
        ...

    def example_losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        """Losses of chosen examples, (chains, examples), without gradient; `indices` may be a row for each chain."""
        ...

    @property
    def control(self) -> Control | None:
        """What is known of the change of the losses without looking; None is nothing."""
        ...

    can_narrow: bool
    """Whether `example_losses` may be asked of the parameters of some chains only."""

    @property
    def num_examples(self) -> int | None:
        """How many examples `example_losses` can be asked for; None if it cannot be asked."""
        ...


def potential_difference(scale: Setting, current: Evaluation, proposed: Evaluation) -> Tensor:
    """scale * mean_i (l_i(tau) - l_i(theta)) - (log prior(tau) - log prior(theta)), (chains,), in float64.

    The losses are subtracted one by one before they are averaged and scaled: with n = 1e6 the difference of two scaled
    float32 means would carry their rounding a million times enlarged.
    """
    difference = proposed.losses.double() - current.losses.double()
    mean = difference if difference.dim() == 1 else difference.mean(1)
    if proposed.log_prior is current.log_prior:  # a flat prior's zero
        return scale * mean
    return scale * mean - (proposed.log_prior - current.log_prior)


class Density:
    """A differentiable log density of many chains at once, as a potential: U = -log_density.

    `log_density` maps a tensor of shape (chains, dim), or a pytree of tensors (chains, ...), to (chains,);
    -inf says "outside the support". It must treat the chains independently.
    """

    scale = 1.0
    inverse_temperature = 1.0
    fixed = True
    is_bounded = False  # of the prior: a density tells by itself
    num_examples = None
    can_narrow = False
    control = None
    known = None

    def __init__(self, log_density: Callable[[Any], Tensor], like: Any = None) -> None:
        """`like`: parameters whose structure `log_density` takes, if they are not one tensor."""
        self._log_density = log_density
        self._structure = flatten(torch.empty(0) if like is None else like)[1]

    def evaluate(self, params: Leaves, *, with_grad: bool) -> Evaluation:
        with torch.set_grad_enabled(with_grad):
            leaves = tuple(x.detach().requires_grad_(with_grad) for x in params)
            value = self._log_density(unflatten(leaves, self._structure))
            if not isinstance(value, Tensor):
                raise TypeError(f"log_density must return a tensor, got {type(value).__name__}.")
            if value.shape != params[0].shape[:1]:
                raise ValueError(
                    f"log_density must return one number for each chain, shape {tuple(params[0].shape[:1])}, "
                    f"got {tuple(value.shape)}. Sum over the coordinates: log_density maps (chains, dim) to (chains,)."
                )
            grad = None
            if with_grad:
                # grad of -log p outside the support may be NaN there; such a point is never accepted, so never used
                flat = not value.requires_grad  # a constant, such as a uniform density
                grad = (
                    tuple(torch.zeros_like(x) for x in params)
                    if flat
                    else torch.autograd.grad(-value.sum(), leaves, materialize_grads=True)
                )
        return Evaluation(-value.detach(), self.log_prior(params), grad)

    def next_batch(self, params: Leaves, generator: Any) -> Density:
        """The potential of one step: always itself."""
        return self

    def log_prior(self, params: Leaves) -> Tensor:
        return torch.zeros(params[0].shape[0], dtype=torch.float64, device=params[0].device)

    def compare(self, current: Evaluation, proposed: Evaluation) -> Tensor:
        return potential_difference(self.scale, current, proposed)

    def example_losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        raise TypeError("a density has no examples: it is the full data already.")

    def evaluate_weighted(self, params: Leaves, weights: Tensor) -> Evaluation:
        raise TypeError("a density has no examples: it is the full data already.")


# --- priors ---------------------------------------------------------------------------------------------------------


class Prior(ABC):
    """A prior on the weights. Write `log_density`; the gradient follows by autograd unless you know a faster one.

    Example:
        >>> class Laplace(Prior):
        ...     def log_density(self, params):
        ...         return -sum(p.abs().sum(dtype=torch.float64) for p in params)
    """

    is_bounded: ClassVar[bool] = False
    """True for a prior that is zero outside a region: the loss is then not evaluated there (on the CPU)."""

    @abstractmethod
    def log_density(self, params: Sequence[Tensor]) -> Tensor:
        """log prior up to a constant, a scalar (float64 is best), -inf outside the support.

        `params` are the trainable tensors in the order of the sampler's parameter groups, in their own shapes.
        """

    def grad(self, params: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Gradient of `log_density`; None says that it is zero."""
        with torch.enable_grad():
            leaves = [p.detach().requires_grad_() for p in params]
            value = self.log_density(leaves)
            if not value.requires_grad:
                return None
            return torch.autograd.grad(value, leaves, materialize_grads=True)

    def precision(self, params: Sequence[Tensor]) -> Sequence[float] | None:
        """-(second derivative of `log_density`) for each tensor, where it is one number; None where it is not, or is zero."""
        return None

    def check(self, params: Sequence[Tensor]) -> None:  # noqa: B027  (a prior without demands on shapes needs none)
        """Raise ValueError if the prior does not fit these parameters."""

    def __str__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class Gaussian(Prior):
    """Independent N(0, scale^2) on every weight; `scale` is one number or one for each parameter tensor.

    `Gaussian.per_layer` and `Gaussian.fan_in` build the second form from a module.
    """

    scale: float | tuple[float, ...] = 1.0
    made_for: tuple[tuple[int, torch.Size], ...] | None = None
    """Identity and shape of the tensors that the scales belong to, where they were made for a model."""

    def __post_init__(self) -> None:
        many = isinstance(self.scale, tuple | list)
        scales = tuple(float(s) for s in self.scale) if many else (float(self.scale),)  # type: ignore[union-attr, arg-type]
        for scale in scales:
            if not (scale > 0 and math.isfinite(scale)):
                raise ValueError(f"`scale` must be positive and finite, got {scale}.")
        object.__setattr__(self, "scale", scales if many else scales[0])

    @classmethod
    def per_layer(cls, model: nn.Module, scales: Mapping[str, float]) -> Gaussian:
        """One scale for each layer: keys are prefixes of parameter names, "" is the rest; the longest match wins.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
            >>> Gaussian.per_layer(model, {"0": 0.5, "2": 1.0, "2.bias": 3.0}).scale
            (0.5, 0.5, 1.0, 3.0)
        """
        chosen, used = [], set()
        for name, _ in _trainable(model):
            matches = [k for k in scales if k == "" or name == k or name.startswith(k + ".")]
            if not matches:
                raise ValueError(f"no scale for parameter '{name}'. Add its layer, or '' for all the rest.")
            used.add(max(matches, key=len))
            chosen.append(scales[max(matches, key=len)])
        if unused := set(scales) - used - {""}:
            raise ValueError(f"`scales` names no trainable parameter with {sorted(unused)}.")
        return cls(tuple(chosen), tuple((id(p), p.shape) for _, p in _trainable(model)))

    @classmethod
    def fan_in(cls, model: nn.Module, gain: float = 1.0, bias_scale: float = 1.0) -> Gaussian:
        """Scale gain / sqrt(fan-in) for tensors of two or more axes, `bias_scale` for vectors and scalars.

        A tensor without weights, such as that of `nn.Linear(0, 3)`, has the scale `gain`, on which nothing depends.

        Example:
            >>> Gaussian.fan_in(nn.Linear(4, 8), gain=2.0).scale
            (1.0, 1.0)
        """
        fans = [math.prod(p.shape[1:]) if p.dim() > 1 else None for _, p in _trainable(model)]
        scales = tuple(bias_scale if fan is None else gain / math.sqrt(max(1, fan)) for fan in fans)
        return cls(scales, tuple((id(p), p.shape) for _, p in _trainable(model)))

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
                "the Gaussian prior was made for the trainable tensors of a model in the model's order; the sampler has "
                "others, or another order. Give the scales as a tuple in the order of the sampler's groups."
            )

    def log_density(self, params: Sequence[Tensor]) -> Tensor:
        norms = (torch.linalg.vector_norm(p, dtype=torch.float64) for p in params)
        terms = [(n / s) ** 2 for n, s in zip(norms, self._scales(len(params)), strict=True)]
        return -0.5 * torch.stack(terms).sum()

    def grad(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        return [p.detach() * (-1.0 / s**2) for p, s in zip(params, self._scales(len(params)), strict=True)]

    def precision(self, params: Sequence[Tensor]) -> Sequence[float]:
        return [s**-2 for s in self._scales(len(params))]

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
        inside = torch.stack([((p >= self.low) & (p <= self.high)).all() for p in params]).all()
        return _zero_inside(inside)

    def grad(self, params: Sequence[Tensor]) -> None:
        return None

    def __str__(self) -> str:
        return f"uniform on [{self.low:g}, {self.high:g}]^P"


@dataclass(frozen=True)
class UniformBall(Prior):
    """Uniform on |theta| <= radius, the norm taken over all weights together: a bounded Omega of the paper."""

    radius: float
    is_bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.radius > 0:
            raise ValueError(f"`radius` must be positive, got {self.radius}.")

    def log_density(self, params: Sequence[Tensor]) -> Tensor:
        norms = torch.stack([torch.linalg.vector_norm(p, dtype=torch.float64) for p in params])
        return _zero_inside(norms.square().sum() <= self.radius**2)

    def grad(self, params: Sequence[Tensor]) -> None:
        return None

    def __str__(self) -> str:
        return f"uniform on the ball |theta| <= {self.radius:g}"


def _zero_inside(inside: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64, device=inside.device)
    return torch.where(inside, zero, -math.inf)


def _trainable(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


# --- the target of a network, and the paper's units -----------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """exp(-lambda * sum of losses) * prior: the tempered (Gibbs) posterior, eq. (1) of the paper, in our units.

    Args:
        num_data: n, the number of examples in the training set (not in the batch).
        inverse_temperature: lambda, multiplies the sum of the losses. 1 is Bayes when the loss is a negative log likelihood.
        prior: None is flat and improper.
    """

    num_data: int
    inverse_temperature: float = 1.0
    prior: Prior | None = None

    def __post_init__(self) -> None:
        if type(self.num_data) is bool or not hasattr(self.num_data, "__index__") or self.num_data < 1:
            raise ValueError(f"`num_data` must be the number of training examples, at least 1, got {self.num_data!r}.")
        if not (self.inverse_temperature > 0 and math.isfinite(self.inverse_temperature)):
            raise ValueError(f"`inverse_temperature` must be positive and finite, got {self.inverse_temperature}.")

    @property
    def scale(self) -> float:
        """lambda * n, which turns V (a mean) into U (a sum)."""
        return self.inverse_temperature * self.num_data

    def __str__(self) -> str:
        prior = "flat, improper" if self.prior is None else str(self.prior)
        return (
            f"p(theta) ~ exp(-lambda * sum_i loss_i) * prior | lambda = {self.inverse_temperature:.4g} "
            f"(T = {1 / self.inverse_temperature:.4g}), n = {self.num_data} | prior: {prior}"
        )


class PaperSettings(NamedTuple):
    """The paper's nominal settings in our units; pass them to `AdamMCMC` by these names."""

    inverse_temperature: float
    sigma: float
    sigma_along: float


def from_paper(
    lam: float,
    sigma: float,
    sigma_delta: float,
    *,
    num_params: int,
    num_data: int,
    loss: str,
    batch_size: int | None = None,
) -> PaperSettings:
    """Convert the paper's nominal lambda, sigma and sigma_Delta into our units.

    The code released with the paper divides sigma and sigma_Delta by sqrt(P). What its lambda means depends on the loss
    that it multiplies: `loss="mean"` (the released code: mean over the batch) gives lambda / n, `loss="batch_sum"`
    gives lambda * batch_size / n, and `loss="data_sum"` gives lambda itself.

    Example:
        >>> s = from_paper(1.0, 0.2, 3661.6, num_params=366_160, num_data=1_200_000, loss="mean")
        >>> f"{s.inverse_temperature:.3g} {s.sigma:.3g} {s.sigma_along:.3g}"
        '8.33e-07 0.000331 6.05'
    """
    if loss == "batch_sum" and batch_size is None:
        raise ValueError('`batch_size` is needed with loss="batch_sum".')
    per_example = {"mean": 1 / num_data, "batch_sum": (batch_size or 0) / num_data, "data_sum": 1.0}
    if loss not in per_example:
        raise ValueError(f"`loss` must be one of {sorted(per_example)}, got {loss!r}.")
    root = math.sqrt(num_params)
    return PaperSettings(lam * per_example[loss], sigma / root, sigma_delta / root)
