"""Checks of the kernels' arguments.

A setting is a number, or a tensor (chains,) with one number per chain; a list holds one of these per leaf.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from adammcmc.acceptance import AcceptanceTest
from adammcmc.target.leaves import PerLeaf, Setting, Settings, flatten

__all__ = [
    "SETTINGS",
    "chain_settings",
    "check_betas",
    "check_chains",
    "check_noise",
    "check_not_negative",
    "check_preconditioner",
    "checked",
    "checked_one",
    "placed",
    "settings_by_field",
    "settings_by_leaf",
    "settings_by_name",
    "times",
]

_K = TypeVar("_K")


def _each(change: Callable[[Setting], Setting], value: Settings) -> Settings:
    return [change(v) for v in value] if isinstance(value, list) else change(value)


def times(value: Settings, factor: Setting) -> Settings:
    """A setting, or each of a list, multiplied."""
    return _each(lambda v: v * factor, value)


def checked(name: str, values: Settings) -> Settings:
    """`checked_one` of a setting, or of each of a list."""
    return _each(lambda value: checked_one(name, value), values)


def checked_one(name: str, value: Setting) -> Setting:
    """A setting, if it is finite and not negative; per-chain values in float64."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        check_not_negative(name, value)  # type: ignore[arg-type]
        return value
    if value.dim() > 1 or value.numel() == 0:
        raise ValueError(
            f"`{name}` must be a number, or a tensor with one number per chain, (chains,), got shape {tuple(value.shape)}."
        )
    check_not_negative(name, value.tolist())
    return value.detach().double()


def check_not_negative(name: str, values: PerLeaf[float]) -> None:
    """Refuse negative, infinite and undefined values."""
    for value in values if isinstance(values, list) else [values]:
        if not 0 <= value < math.inf:
            raise ValueError(f"`{name}` must not be negative, and must be finite, got {value}.")


def check_betas(betas: PerLeaf[tuple[float, float]]) -> None:
    """Adam's decay rates lie in [0, 1)."""
    for pair in betas if isinstance(betas, list) else [betas]:
        if not all(0 <= beta < 1 for beta in pair):
            raise ValueError(f"`betas` must lie in [0, 1), got {pair}.")


def check_noise(sigma: Settings, acceptance: AcceptanceTest) -> None:
    """A proposal with sigma = 0 has no density to test."""
    sigmas = sigma if isinstance(sigma, list) else [sigma]
    if acceptance.needs_noise and not all(bool((s > 0).all()) if isinstance(s, Tensor) else s > 0 for s in sigmas):
        raise ValueError(
            f"`sigma` must be positive, got {sigma}: without noise the proposal has no density to test. "
            "sigma = 0 needs `acceptance=AlwaysAccept()`."
        )


def check_preconditioner(params: Any, diagonal: Any, structure: Any) -> None:
    """A diagonal must be positive, in the shapes of the parameters (without the chain axis); a `Scaling` must fit them."""
    if diagonal is None:
        return
    leaves, wanted = flatten(params)
    if not isinstance(diagonal, tuple):
        if not diagonal.fits([x.shape[1:] for x in leaves]):
            raise ValueError(
                f"`preconditioner` was made for other parameters than these, of shapes {[tuple(x.shape[1:]) for x in leaves]} "
                "(without the chain axis)."
            )
        return
    shapes = [tuple(a.shape) for a in diagonal]
    if shapes != [tuple(x.shape[1:]) for x in leaves] or structure != wanted:
        raise ValueError(
            "`preconditioner` must have the structure of the parameters, keys in the same order, without the chain "
            f"axis: shapes {[tuple(x.shape[1:]) for x in leaves]}, got {shapes}."
        )
    if not all(bool(((a > 0) & a.isfinite()).all()) for a in diagonal):
        raise ValueError("`preconditioner` must be positive and finite everywhere.")


# --- settings that differ between chains ------------------------------------------------------------------------------

SETTINGS = ("lr", "sigma", "sigma_along", "step_size")
"""The kernels' fields that may have one value per chain."""


def settings_by_field(kernel: Any) -> Iterator[tuple[str, Settings]]:
    """The settings of a kernel and of its parts, by name, as they were given."""
    for field in dataclasses.fields(kernel):
        value = getattr(kernel, field.name)
        if _is_part(value):
            yield from settings_by_field(value)
        elif field.name in SETTINGS:
            yield field.name, value


def settings_by_leaf(kernel: Any) -> Iterator[tuple[str, list[Setting]]]:
    """The settings of a kernel and of its parts, by name: one value per leaf, or one for all."""
    for name, value in settings_by_field(kernel):
        yield name, [*value] if isinstance(value, list) else [value]


def chain_settings(kernel: Any) -> Iterator[tuple[str, Tensor]]:
    """The settings with one value per chain, by name (and leaf by leaf)."""
    for name, values in settings_by_leaf(kernel):
        yield from ((name, v) for v in values if isinstance(v, Tensor) and v.dim() == 1)


def settings_by_name(kernel: Any) -> dict[str, Setting]:
    """The settings of a kernel's first leaf, by name."""
    return {name: values[0] for name, values in settings_by_leaf(kernel)}


def check_chains(kernel: Any, params: Any) -> None:
    """A setting with one value per chain must have as many values as there are chains, on their device."""
    leaf = flatten(params)[0][0]
    for name, value in chain_settings(kernel):
        if value.shape != leaf.shape[:1]:
            raise ValueError(
                f"`{name}` has {len(value)} values, and there are {leaf.shape[0]} chains: give one number, or one each."
            )
        if value.device != leaf.device:
            raise ValueError(f"`{name}` is on {value.device}, but the chains are on {leaf.device}: move it there.")


def placed(kernel: _K, device: torch.device) -> _K:
    """The same kernel with its per-chain settings on this device."""
    if not _is_part(kernel) or all(v.device == device for _, v in chain_settings(kernel)):
        return kernel
    fields = {field.name: getattr(kernel, field.name) for field in dataclasses.fields(kernel)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {name: placed(value, device) for name, value in fields.items() if _is_part(value)}
    for name in fields.keys() & set(SETTINGS):
        changes[name] = _each(lambda v: v.to(device) if isinstance(v, Tensor) else v, fields[name])
    return dataclasses.replace(kernel, **changes)  # type: ignore[type-var]


def _is_part(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
