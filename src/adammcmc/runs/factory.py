"""Builds a sampler from a factory: a class, a partial, a function, or the default."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from adammcmc.acceptance import FullData
from adammcmc.samplers.exact import Underdamped
from adammcmc.samplers.sampler import Sampler
from adammcmc.samplers.warmup import WarmUp
from adammcmc.target.priors import Gaussian, Prior

__all__ = [
    "SCANNED",
    "Factory",
    "as_factory",
    "build",
    "check_tuned",
    "finds_settings",
    "given_options",
    "innermost",
    "scanned",
]

Factory = Callable[..., Sampler]  # parameters, options -> sampler
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


def as_factory(sampler: Any, prior: Prior | None, model: nn.Module, has_fixed_data: bool) -> Factory:
    """The factory of the sampler, with the prior that was given to `sample`."""
    if sampler is None:
        sampler = Underdamped if has_fixed_data else functools.partial(Underdamped, acceptance=FullData())
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
        return cast(Factory, sampler)
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


def check_tuned(factory: Factory, records: Sequence[WarmUp], scan: Mapping[str, Any]) -> None:
    """Refuse records of a burn-in that are of another sampler, or whose settings have another source."""
    name = getattr(innermost(factory), "__name__", "sampler")
    for record in records:
        if isinstance(innermost(factory), type) and record.sampler != name:
            raise ValueError(f"`warm_up` is the record of {record.sampler}, and the sampler is {name}.")
        if unknown := [key for key in record.settings if key not in _accepted(factory)]:
            raise ValueError(f"`warm_up` has a {unknown[0]}, which `sampler` does not take.")
        if twice := [key for key in record.settings if key in scan]:
            raise ValueError(f"`{twice[0]}` has a value for each chain, and `warm_up` has one: leave one of them out.")
        if given_options(factory).get("burn_in"):
            raise ValueError("`warm_up` brings settings, so that nothing adapts: leave out the sampler's `burn_in`.")


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
