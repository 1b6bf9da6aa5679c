"""The few array operations that the densities are written with, in torch and in JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["Arrays", "jax_arrays", "recurrence", "torch_arrays"]

Array = Any
"""A tensor of torch or an array of JAX."""


class Arrays:
    """An array library, by the names that the densities use. Every operation acts on the last axis.

    Args:
        array: turns data of NumPy into constants of the library.
        functions: the operations by name; see `torch_arrays` for the list.
    """

    def __init__(self, array: Callable[[Any], Array], **functions: Callable[..., Array]) -> None:
        self.array = array
        self._functions = functions

    def __getattr__(self, name: str) -> Callable[..., Array]:
        try:
            return self.__dict__["_functions"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"{name} is not among the operations of benchmarks.posteriors.arrays.") from None

    def log_of(self, x: Any) -> Any:
        """log x, where x is a number, data or a parameter."""
        if isinstance(x, int | float):
            return math.log(x)
        return self.array(np.log(x)) if isinstance(x, np.ndarray) else self.log(x)


def torch_arrays() -> Arrays:
    """The operations in torch."""
    return Arrays(
        lambda x: torch.as_tensor(np.asarray(x, dtype=np.float64)),
        exp=torch.exp,
        log=torch.log,
        log1p=torch.log1p,
        sqrt=torch.sqrt,
        tanh=torch.tanh,
        sigmoid=torch.sigmoid,
        softplus=lambda x: torch.logaddexp(x, torch.zeros_like(x)),
        lgamma=torch.lgamma,
        log_ndtr=torch.special.log_ndtr,
        sum=lambda x: x.sum(-1),
        cumsum=lambda x: x.cumsum(-1),
        logsumexp=lambda x: torch.logsumexp(x, -1),
        concat=lambda parts: torch.cat(list(parts), -1),
        stack=lambda parts: torch.stack(list(parts), -1),
        zeros_like=torch.zeros_like,
        cholesky=_torch_cholesky,
        solve_lower=lambda lower, b: torch.linalg.solve_triangular(lower, b[..., None], upper=False)[..., 0],
        apply=lambda matrix, x: (matrix @ x[..., None])[..., 0],
        diagonal=lambda x: x.diagonal(dim1=-2, dim2=-1),
        iterate=_python_loop,
    )


def jax_arrays() -> Arrays:
    """The operations in JAX, float64."""
    import jax
    import jax.numpy as jnp
    from jax.scipy.linalg import solve_triangular
    from jax.scipy.special import gammaln, log_ndtr, logsumexp

    jax.config.update("jax_enable_x64", True)

    def iterate(step: Callable[[Sequence[Array]], Sequence[Array]], state: Sequence[Array], count: int) -> list[Array]:
        _, states = jax.lax.scan(lambda now, _: (new := tuple(step(now)), new), tuple(state), None, length=count)
        return [jnp.moveaxis(x[..., 0], 0, -1) for x in states]

    return Arrays(
        lambda x: jnp.asarray(x, dtype=jnp.float64),
        exp=jnp.exp,
        log=jnp.log,
        log1p=jnp.log1p,
        sqrt=jnp.sqrt,
        tanh=jnp.tanh,
        sigmoid=jax.nn.sigmoid,
        softplus=jax.nn.softplus,
        lgamma=gammaln,
        log_ndtr=log_ndtr,
        sum=lambda x: x.sum(-1),
        cumsum=lambda x: x.cumsum(-1),
        logsumexp=lambda x: logsumexp(x, -1),
        concat=lambda parts: jnp.concatenate(list(parts), -1),
        stack=lambda parts: jnp.stack(list(parts), -1),
        zeros_like=jnp.zeros_like,
        cholesky=jnp.linalg.cholesky,
        solve_lower=lambda lower, b: solve_triangular(lower, b, lower=True),
        apply=lambda matrix, x: matrix @ x,
        diagonal=lambda x: jnp.diagonal(x, axis1=-2, axis2=-1),
        iterate=iterate,
    )


def recurrence(xp: Arrays, inputs: Array, factor: Array) -> Array:
    """s_t = factor s_(t-1) + inputs_t from s_0 = inputs_0, in log2(T) passes: each doubles the reach of the sum."""
    length, reach, result = inputs.shape[-1], 1, inputs
    while reach < length:
        shifted = xp.concat([xp.zeros_like(result[..., :reach]), result[..., :-reach]])
        result = result + factor * shifted
        factor, reach = factor * factor, 2 * reach
    return result


def _torch_cholesky(matrix: torch.Tensor) -> torch.Tensor:
    """NaN where the matrix is not positive definite, as in JAX, and not an exception."""
    lower, info = torch.linalg.cholesky_ex(matrix)
    return torch.where((info == 0)[..., None, None], lower, torch.nan)


def _python_loop(step: Callable[[Sequence[Array]], Sequence[Array]], state: Sequence[Array], count: int) -> list[Array]:
    """The states (..., 1) after 1, ..., `count` steps, side by side: one (..., count) for each part of the state."""
    states = []
    for _ in range(count):
        state = step(state)
        states.append(state)
    return [torch.cat(parts, -1) for parts in zip(*states, strict=True)]
