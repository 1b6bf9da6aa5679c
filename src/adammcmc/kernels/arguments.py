"""What the kernels ask of their arguments.

A setting is a number, or a tensor (chains,) with one for each chain; a list has one of these for each leaf.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from adammcmc.acceptance import AcceptanceTest
from adammcmc.target.leaves import Leaves, PerLeaf, Setting, Settings, flatten

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
    "settings_by_name",
    "times",
]

_K = TypeVar("_K")


def times(value: Settings, factor: float) -> Settings:
    """A setting, or each of a list, multiplied."""
    return [v * factor for v in value] if isinstance(value, list) else value * factor


def checked(name: str, values: Settings) -> Settings:
    """A setting, or a list of them: not negative, finite; what is given for each chain in float64."""
    return [checked_one(name, value) for value in values] if isinstance(values, list) else checked_one(name, values)


def checked_one(name: str, value: Setting) -> Setting:
    """A setting: not negative, finite; what is given for each chain in float64."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        check_not_negative(name, value)  # type: ignore[arg-type]
        return value
    if value.dim() > 1 or value.numel() == 0:
        raise ValueError(
            f"`{name}` must be a number, or a tensor with one number for each chain, (chains,), got shape {tuple(value.shape)}."
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
    """sigma = 0 has no density to test."""
    sigmas = sigma if isinstance(sigma, list) else [sigma]
    if acceptance.needs_noise and not all(bool((s > 0).all()) if isinstance(s, Tensor) else s > 0 for s in sigmas):
        raise ValueError(
            f"`sigma` must be positive, got {sigma}: without noise the proposal has no density to test. "
            "sigma = 0 needs `acceptance=AlwaysAccept()`."
        )


def check_preconditioner(params: Any, diagonal: Leaves | None, structure: Any) -> None:
    """A diagonal must have the shapes of the parameters (without the chain axis), and be positive."""
    if diagonal is None:
        return
    leaves, wanted = flatten(params)
    shapes = [tuple(a.shape) for a in diagonal]
    if shapes != [tuple(x.shape[1:]) for x in leaves] or structure != wanted:
        raise ValueError(
            "`preconditioner` must have the structure of the parameters, keys in the same order, without the chain "
            f"axis: shapes {[tuple(x.shape[1:]) for x in leaves]}, got {shapes}."
        )
    if not all(bool(((a > 0) & a.isfinite()).all()) for a in diagonal):
        raise ValueError("`preconditioner` must be positive and finite everywhere.")


# --- settings that differ between chains ----------------------------------------------------------------------------------

SETTINGS = ("lr", "sigma", "sigma_along", "step_size")
"""What may have one value for each chain, by the names of the kernels' fields."""


def chain_settings(kernel: Any) -> Iterator[tuple[str, Tensor]]:
    """The settings of a kernel that have one value for each chain, by name (and leaf by leaf)."""
    for field in dataclasses.fields(kernel):
        value = getattr(kernel, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from chain_settings(value)
        elif field.name in SETTINGS:
            yield from (
                (field.name, v)
                for v in (value if isinstance(value, list) else [value])
                if isinstance(v, Tensor) and v.dim() == 1
            )


def settings_by_name(kernel: Any) -> dict[str, Setting]:
    """The settings of a kernel (of its first leaf), by name."""
    found: dict[str, Setting] = {}
    for field in dataclasses.fields(kernel):
        value = getattr(kernel, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found |= settings_by_name(value)
        elif field.name in SETTINGS:
            found[field.name] = value[0] if isinstance(value, list) else value
    return found


def check_chains(kernel: Any, params: Any) -> None:
    """A setting with one value for each chain must have as many as there are chains, where they are."""
    leaf = flatten(params)[0][0]
    for name, value in chain_settings(kernel):
        if value.shape != leaf.shape[:1]:
            raise ValueError(
                f"`{name}` has {len(value)} values, and there are {leaf.shape[0]} chains: give one number, or one for each."
            )
        if value.device != leaf.device:
            raise ValueError(f"`{name}` lies on {value.device}, the chains on {leaf.device}: put it there.")


def placed(kernel: _K, device: torch.device) -> _K:
    """The same kernel with the settings of its chains on this device."""
    if (
        not dataclasses.is_dataclass(kernel)
        or isinstance(kernel, type)
        or all(v.device == device for _, v in chain_settings(kernel))
    ):
        return kernel
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(kernel):
        value = getattr(kernel, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changes[field.name] = placed(value, device)
        elif field.name in SETTINGS:
            changes[field.name] = [_to(v, device) for v in value] if isinstance(value, list) else _to(value, device)
    return dataclasses.replace(kernel, **changes)


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
