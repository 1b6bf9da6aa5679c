"""Builds a sampler from a factory: a class, a partial, a function, or the default."""

from __future__ import annotations

import functools
import inspect
import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from adammcmc.acceptance import FullData
from adammcmc.posterior.store.encoding import plain_json
from adammcmc.samplers.adaptation import BurnIn
from adammcmc.samplers.exact import Underdamped
from adammcmc.samplers.sampler import Sampler
from adammcmc.target.target import Gaussian, Prior

__all__ = [
    "SCANNED",
    "Factory",
    "as_factory",
    "build",
    "build_scheduler",
    "chain_factory",
    "chain_options",
    "describe_prior",
    "finds_settings",
    "given_options",
    "innermost",
    "prior_difference",
    "scanned",
    "settings_of",
]

Factory = Callable[..., Sampler]
"""parameters, options -> sampler"""
SCANNED = ("lr", "sigma", "sigma_along", "step_size", "inverse_temperature")


def scanned(factory: Any, num_chains: int) -> dict[str, list[float]]:
    """The options with one value per chain, as numbers."""
    values: dict[str, list[float]] = {}
    for name, value in given_options(factory).items():
        if name not in SCANNED or not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if value.dim() > 1:
            raise ValueError(
                f"`{name}` must be a number, or a tensor with one for each chain, (chains,), got shape {tuple(value.shape)}."
            )
        if len(value) != num_chains:
            raise ValueError(f"`{name}` has {len(value)} values, and `num_chains` is {num_chains}: give one for each chain.")
        # a float32 0.02 means 0.02, not 0.0199999996
        values[name] = [float(str(v)) for v in value.detach().cpu().numpy()]
    return values


def chain_factory(factory: Factory, scan: dict[str, list[float]], chain: int) -> Factory:
    """The factory of one chain of a scan."""
    return functools.partial(factory, **{name: values[chain] for name, values in scan.items()}) if scan else factory


def as_factory(sampler: Any, prior: Prior | None, model: nn.Module, whole: bool) -> Factory:
    """The factory of the sampler, with the prior that was given to `sample`."""
    if sampler is None:
        sampler = Underdamped if whole else functools.partial(Underdamped, acceptance=FullData())
    if isinstance(sampler, torch.optim.Optimizer) or not callable(sampler):
        kind = type(sampler).__name__
        got = f"an existing {kind}" if hasattr(sampler, "param_groups") else kind
        raise TypeError(
            "`sampler` must make a sampler from parameters, such as partial(AdamMCMC, lr=1e-3, sigma=1e-3, sigma_along=2.0), "
            f"got {got}."
        )
    _check_options(sampler)
    parameter = inspect.signature(sampler).parameters.get("prior")
    if prior is None and parameter is not None and parameter.default is parameter.empty:
        prior = Gaussian.fan_in(model, gain=2.0)
    if prior is None:
        factory: Factory = sampler
        return factory
    if "prior" in given_options(sampler):
        raise ValueError("`prior` was given both to sample and to the sampler: leave one out.")
    if "prior" not in _accepted(sampler):
        raise ValueError("`prior` was given, but `sampler` is a function that takes none: give the prior there.")
    return functools.partial(sampler, prior=prior)


def _check_options(factory: Any) -> None:
    """Refuse a partial with options that its function does not accept."""
    try:
        inspect.signature(factory)
    except ValueError:
        made_by = innermost(factory)
        name, takes = getattr(made_by, "__name__", type(made_by).__name__), list(inspect.signature(made_by).parameters)
        wrong = [option for option in given_options(factory) if option not in takes]
        what = f"has no option `{wrong[0]}`" if wrong else "was given too many arguments"
        raise TypeError(f"{name} {what}; its options are {', '.join(takes[1:])}.") from None


def build_scheduler(make: Callable[[Sampler], LRScheduler], sampler: Sampler) -> LRScheduler:
    """The user's scheduler, if it suits this sampler."""
    sampler.check_schedulable()
    scheduler = make(sampler)
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise TypeError(
            "`scheduler` must make a scheduler that depends on the number of steps, such as CosineAnnealingLR, got "
            f"{type(scheduler).__name__}."
        )
    return scheduler


def chain_options(sampler: Sampler, factory: Factory, scan: dict[str, list[float]], chain: int) -> dict[str, float]:
    """The numerical options of a chain, by name. `sampler` is that of the first chain."""
    group = sampler.param_groups[0]
    has_size = "step_size" in inspect.signature(innermost(factory)).parameters
    settings = {("step_size" if has_size and key == "lr" else key): group.get(key) for key in ("lr", "sigma", "sigma_along")}
    if finds_settings(factory):
        settings.pop("step_size", None)  # burn-in finds it
    settings["inverse_temperature"] = sampler.target.inverse_temperature
    settings |= {name: values[chain] for name, values in scan.items()}
    return {key: float(value) for key, value in settings.items() if isinstance(value, int | float)}


def settings_of(sampler: Sampler) -> dict[str, Any]:
    """The sampler's settings that are numbers or strings."""
    groups = [
        {key: plain_json(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in sampler.param_groups
    ]
    own = {key: value for key, value in vars(sampler).items() if not key.startswith("_") and key != "num_steps"}
    simple = {
        key: plain_json(value) for key, value in own.items() if isinstance(value, bool | int | float | str | tuple | BurnIn)
    }
    return {"groups": groups, **simple}


_PROBES = (0.01, 0.1, 1.0, 10.0)


def describe_prior(prior: Prior | None, sampler: Sampler) -> dict[str, Any] | None:
    """Identifies a prior, as JSON: its public attributes, and its log density at a few weights of these shapes.

    The log density also reveals a constant in a closure or a changed line of code.
    """
    if prior is None:
        return None
    shown = {name: _as_words(value) for name, value in vars(prior).items() if not name.startswith("_")}
    params = [p.detach() for group in sampler.param_groups for p in group["params"] if p.requires_grad]
    return {
        "attributes": {name: words for name, words in shown.items() if words is not None},
        "log_density": [_log_density(prior, params, scale) for scale in _PROBES],
    }


def prior_difference(before: dict[str, Any] | None, now: dict[str, Any] | None) -> str | None:
    """How two descriptions differ, in words; None if they agree, or an older version stored none."""
    if before is None or now is None:
        return None
    old, new = before["attributes"], now["attributes"]
    for name in [*old, *(name for name in new if name not in old)]:
        if old.get(name) != new.get(name):
            return f"its `{name}` was {old.get(name)}, now it is {new.get(name)}"
    for scale, a, b in zip(_PROBES, before["log_density"], now["log_density"], strict=True):
        numbers = isinstance(a, float) and isinstance(b, float)
        if not (math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9) if numbers else a == b):
            return f"its log density at weights of up to {scale:g} was {a}, now it is {b}"
    return None


def _as_words(value: Any) -> str | None:
    """A number, a string, a tensor or a few of them as text; None for anything else, such as an object."""
    if isinstance(value, bool | int | float | str):
        return str(value)
    if isinstance(value, Tensor):
        content = bytes(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return f"{tuple(value.shape)} {zlib.crc32(content):08x}"
    if isinstance(value, tuple | list) and all(isinstance(item, bool | int | float | str) for item in value):
        text = ", ".join(map(str, value))
        return text if len(text) < 200 else f"{len(value)} values {zlib.crc32(text.encode()):08x}"
    return None


def _log_density(prior: Prior, params: list[Tensor], scale: float) -> float | str:
    """At weights spread evenly over (-scale, scale); a string where it is not finite."""
    points = [torch.linspace(-scale, scale, p.numel(), dtype=p.dtype, device=p.device).reshape(p.shape) for p in params]
    try:
        value = float(prior.log_density(points))
    except Exception as error:  # a prior may raise outside its support
        return type(error).__name__
    return value if math.isfinite(value) else str(value)


def build(factory: Factory, model: nn.Module, fill: dict[str, Any]) -> Sampler:
    """The sampler. Options that the factory accepts and does not set are taken from `fill`."""
    given = given_options(factory)
    accepted = _accepted(factory)
    options = {key: value for key, value in fill.items() if key in accepted and key not in given}
    if "burn_in" in fill and "burn_in" in given:
        raise ValueError("`burn_in` was given both to sample and to the sampler: leave one out.")
    is_ours = isinstance(innermost(factory), type)
    params: Any = list(model.named_parameters()) if is_ours else list(model.parameters())
    try:
        inspect.signature(factory).bind(params, **options)
    except TypeError as error:
        name = getattr(innermost(factory), "__name__", "sampler")
        missing = str(error).rsplit("'", 2)[-2] if "'" in str(error) else "..."
        raise TypeError(f"`sampler` is missing an argument: {error}. Pass partial({name}, {missing}=...).") from error
    sampler = factory(params, **options)
    if not isinstance(sampler, Sampler):
        raise TypeError(f"`sampler` must make a sampler of adammcmc, such as AdamMCMC, got {type(sampler).__name__}.")
    return sampler


def innermost(factory: Any) -> Any:
    """The function or class inside nested partials."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    return factory


def given_options(factory: Any) -> dict[str, Any]:
    """The options that partials have set."""
    given: dict[str, Any] = {}
    while isinstance(factory, functools.partial):
        given = {**factory.keywords, **given}
        factory = factory.func
    return given


def _accepted(factory: Factory) -> set[str]:
    parameters = inspect.signature(factory).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return names | ({"num_data", "generator", "fixed_data", "prior"} if takes_any else set())


def finds_settings(factory: Factory) -> bool:
    """Whether the sampler tunes its step size in burn-in, since it was given none."""
    parameter = inspect.signature(innermost(factory)).parameters.get("step_size")
    return parameter is not None and given_options(factory).get("step_size") is None and "burn_in" not in given_options(factory)
