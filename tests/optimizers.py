"""A small network, its closure, and the optimizers with settings that work: shared by the tests of the optimizer API."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from adammcmc import (
    MALA,
    AdamMCMC,
    AsReleased,
    ExactAdamMCMC,
    FullData,
    Gaussian,
    Microcanonical,
    OptimizerMCMC,
    TensorExamples,
    Underdamped,
)

X = torch.randn(64, 5, generator=torch.Generator().manual_seed(1))
Y = torch.randint(3, (64,), generator=torch.Generator().manual_seed(2))


def network(dtype: torch.dtype = torch.float32, width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)


def closure(model: nn.Module, rows: slice = slice(None)):  # type: ignore[no-untyped-def]
    dtype = next(model.parameters()).dtype
    return lambda: F.cross_entropy(model(X[rows].to(dtype)).float(), Y[rows])


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def adam_mcmc(model: nn.Module, **options) -> AdamMCMC:  # type: ignore[no-untyped-def]
    settings = {"lr": 1e-2, "num_data": 64, "sigma": 1e-2, "sigma_along": 1.0, "generator": seeded()}
    return AdamMCMC(model.parameters(), **(settings | options))


def mala(model: nn.Module, **options) -> MALA:  # type: ignore[no-untyped-def]
    settings = {"step_size": 1e-3, "num_data": 64, "prior": Gaussian(), "generator": seeded()}
    return MALA(model.parameters(), **(settings | options))


def sgd_mcmc(model: nn.Module, **options) -> OptimizerMCMC:  # type: ignore[no-untyped-def]
    settings = {"lr": 1e-2, "momentum": 0.9, "num_data": 64, "sigma": 1e-2, "generator": seeded()}
    return OptimizerMCMC(model.parameters(), torch.optim.SGD, **(settings | options))


def underdamped(model: nn.Module, kind: type[Underdamped] = Underdamped, **options) -> Underdamped:  # type: ignore[no-untyped-def]
    settings = {"step_size": 3e-2, "num_data": 64, "prior": Gaussian(), "generator": seeded()}
    sigma, _ = options.pop("sigma", None), options.pop("sigma_along", None)  # what its step size is to the other samplers
    return kind(model.parameters(), **(settings | ({} if sigma is None else {"step_size": 3 * sigma}) | options))


def exact_adam(model: nn.Module, **options) -> ExactAdamMCMC:  # type: ignore[no-untyped-def]
    settings = {"lr": 1e-2, "sigma": 3e-2, "sigma_along": 1.0, "num_data": 64, "prior": Gaussian(), "fixed_data": True}
    return ExactAdamMCMC(model.parameters(), **(settings | {"generator": seeded()} | options))


def as_released(model: nn.Module, **options) -> AsReleased:  # type: ignore[no-untyped-def]
    settings = {"lr": 1e-2, "num_data": 64, "sigma": 1e-2, "sigma_along": 1.0, "generator": seeded()}
    return AsReleased(model.parameters(), **(settings | options))


OPTIMIZERS = {
    "AdamMCMC": adam_mcmc,
    "MALA": mala,
    "OptimizerMCMC": sgd_mcmc,
    "Underdamped": underdamped,
    "Microcanonical": partial(underdamped, kind=Microcanonical),
    "ExactAdamMCMC": exact_adam,
    "AsReleased": as_released,
}


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def full_data(model: nn.Module, **options) -> dict:  # type: ignore[no-untyped-def]
    examples = TensorExamples(lambda x, y: F.cross_entropy(model(x.double()), y, reduction="none"), X, Y)
    return {"acceptance": FullData(**options), "examples": examples}
