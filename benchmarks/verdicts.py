"""How often is the verdict right? Runs that are healthy, and runs with known faults, judged by what the library prints.

python -m benchmarks.verdicts          run what is missing, one after another (about ten minutes on one core)
python -m benchmarks.verdicts table    write the table of docs/health.md

Truth comes from the construction of a run, never from its verdict. Where the posterior is known in closed form, the draws of
a healthy run are compared with it: `z` is the largest distance of a mean or a mean square, in Monte Carlo standard errors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Dirichlet, Gamma, constraints

import adammcmc
from adammcmc import (
    MALA,
    AdamMCMC,
    AlwaysAccept,
    AsReleased,
    BurnIn,
    DataDensity,
    ExactAdamMCMC,
    Gaussian,
    GaussianNLL,
    Microcanonical,
    NonFiniteLoss,
    StochasticClosure,
    TrainMembers,
    Underdamped,
    diagnostics,
    kernels,
    sample_density,
)

__all__ = ["CASES", "RESULTS", "Case", "outcome", "page_with", "run", "table"]

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "verdicts.json"
PAGE = ROOT / "docs" / "health.md"
COMMAND = "python -m benchmarks.verdicts"
Z_LIMIT = 4.5
REFUSALS = (ValueError, TypeError, StochasticClosure, NonFiniteLoss)
HEALTHY = ("healthy density", "healthy network")
RIGHT, UNDECIDED, CALM, ALARM, INVISIBLE = "right", "undecided", "false calm", "false alarm", "invisible"


class Found(NamedTuple):
    """What the library says of a run."""

    grade: str
    verdict: str
    kinds: list[str]
    z: float = math.nan
    """Of a run whose posterior is known."""


@dataclass(frozen=True)
class Case:
    """A run."""

    name: str
    group: str
    """The kind of fault, or of health: a row of the table."""
    fault: str | None
    """What is wrong with it; None: nothing."""
    make: Callable[[], Found]
    invisible: str = ""
    """Why nothing that the library is given shows the fault. Such cases are listed apart."""


def outcome(fault: str | None, grade: str) -> str:
    """Whether a grade ("refused": by a named error) is right."""
    if grade == "undecided":
        return UNDECIDED
    if fault is None:
        return RIGHT if grade == "sound" else ALARM
    return CALM if grade == "sound" else RIGHT


# --- densities ----------------------------------------------------------------------------------------------------------

Moments = Callable[[Any], tuple[Tensor, Tensor, Tensor]]
"""Draws -> the coordinates (chains, draws, dim), and their exact means and mean squares."""


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _start(chains: int = 8, dim: int = 3, spread: float = 2.0, seed: int = 1) -> Tensor:
    return spread * torch.randn(chains, dim, dtype=torch.float64, generator=_seeded(seed))


def _normal(x: Tensor) -> Tensor:
    return -0.5 * x.square().sum(1)


def _skewed(x: Tensor) -> Tensor:
    """The logarithms of Gamma(2) variables."""
    return (2 * x - x.exp()).sum(1)


def _student(x: Tensor) -> Tensor:
    """With 7 degrees of freedom."""
    return -4 * torch.log1p(x.square() / 7).sum(1)


_AXES, _ = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=_seeded(3)))
_CURVATURE = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)


def _stretched(x: Tensor) -> Tensor:
    return -0.5 * ((x @ _AXES).square() * _CURVATURE).sum(1)


def _modes(x: Tensor, at: float) -> Tensor:
    return torch.logsumexp(torch.stack([-(x - c).square().sum(1) / 2 for c in (-at, at)]), 0)


def _half(x: Tensor) -> Tensor:
    return torch.where(x[:, 0] > 0, _normal(x), -math.inf)


def _neal(x: Tensor) -> Tensor:
    scale = x[:, 0]
    return -scale.square() / 18 - 0.5 * x[:, 1:].square().sum(1) * torch.exp(-scale) - (x.shape[1] - 1) / 2 * scale


def _not_centred(x: Tensor) -> Tensor:
    return -x[:, 0].square() / 18 - 0.5 * x[:, 1:].square().sum(1)


def _exact(mean: Any, square: Any) -> Moments:
    return lambda draws: (draws, torch.as_tensor(mean).double(), torch.as_tensor(square).double())


def _worst_z(x: Tensor, mean: Tensor, square: Tensor) -> float:
    """The largest distance of the means of x and x^2 from the truth, in Monte Carlo standard errors; x (chains, draws, dim)."""
    centre = mean.expand(x.shape[2])
    about = (x - centre).square()  # better known than x^2 itself
    errors = torch.stack([diagnostics.mcse_mean(x), diagnostics.mcse_mean(about)])
    distances = torch.stack([x.mean((0, 1)) - centre, about.mean((0, 1)) - (square - mean**2).expand(x.shape[2])])
    return float((distances.abs() / errors).max())


def _density(
    log_density: Any, start: Any, kernel: Any = None, *, exact: Moments | None = None, **options: Any
) -> Callable[[], Found]:
    """A run of `sample_density`."""

    def make() -> Found:
        given = {"num_steps": 4000, "progress": False, **options}
        # a density may keep a state, so that each run makes its own
        function = log_density() if isinstance(log_density, type) else log_density
        result = sample_density(function, start, kernel, **given)
        verdict = result.verdict
        z = math.nan if exact is None else _worst_z(*exact(result.draws))
        return Found(verdict.grade, str(verdict), [finding.kind for finding in verdict.findings], z)

    return make


class _Schedule:
    """The width shrinks with every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (0.1 + self.calls / 40_000) * _normal(x)


class _Noisy:
    """A density that draws numbers."""

    def __init__(self) -> None:
        self.generator = _seeded(0)

    def __call__(self, x: Tensor) -> Tensor:
        return _normal(x) * (1 + 0.3 * torch.randn(len(x), generator=self.generator).double())


_EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]).double()
_ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]).double()


def _schools(x: Tensor, *, centred: bool, flat: bool = False) -> Tensor:
    """mu, log tau and the effects of eight schools; `flat`: log tau has a flat prior, and the posterior is improper."""
    mu, log_tau, rest = x[:, 0], x[:, 1], x[:, 2:]
    tau = log_tau.exp()
    prior = -0.5 * (mu / 5).square() + (0 if flat else log_tau - torch.log1p((tau / 5).square()))
    theta = rest if centred else mu[:, None] + tau[:, None] * rest
    own = -0.5 * (rest if not centred else (rest - mu[:, None]) / tau[:, None]).square().sum(1)
    return prior + own - (8 * log_tau if centred else 0) - 0.5 * ((theta - _EFFECTS) / _ERRORS).square().sum(1)


def _spike(x: Tensor) -> Tensor:
    return torch.logaddexp(_normal(x), 30 - 1e8 * (x - 9).square().sum(1) / 2)


def _needle(x: Tensor) -> Tensor:
    """Half of the mass is a Gaussian of width .001 inside one of width 1."""
    near = (x - 0.7).square().sum(1) / 1e-6
    return torch.logaddexp(_normal(x), 3 * math.log(1e3) - 0.5 * near)


def _moved(start: Tensor, chain: int, by: float) -> Tensor:
    """The starting points, one of them elsewhere."""
    start = start.clone()
    start[chain] = by
    return start


_ROWS = torch.randn(40, 2, dtype=torch.float64, generator=_seeded(5))


def _data(batch_size: int | None) -> DataDensity:
    return DataDensity(lambda w, x: 0.5 * (x - w).square().sum(-1), _ROWS, prior=Gaussian(), batch_size=batch_size)


_TRIGAMMA = math.pi**2 / 6 - 1
_LOG_GAMMA = 1 - 0.5772156649015329
_COVARIANCE = (_AXES / _CURVATURE) @ _AXES.T
_TUNED = BurnIn(num_steps=600)

_DENSITIES = [
    Case(name, "healthy density", None, make)
    for name, make in {
        "Gaussian, MALA": _density(_normal, _start(), kernels.mala(0.5), exact=_exact(0.0, 1.0)),
        "Gaussian, defaults": _density(_normal, _start(), exact=_exact(0.0, 1.0)),
        "Gaussian, 64 chains": _density(_normal, _start(64), kernels.mala(0.5), num_steps=500, exact=_exact(0.0, 1.0)),
        "Gaussian, 50 dimensions": _density(_normal, _start(16, 50), num_steps=2000, exact=_exact(0.0, 1.0)),
        "Gaussian, another seed": _density(_normal, _start(seed=2), kernels.mala(0.8), seed=2, exact=_exact(0.0, 1.0)),
        "skewed, MALA": _density(_skewed, _start(spread=0.7), kernels.mala(0.3), burn_in=500, num_steps=5000,
                                 exact=_exact(_LOG_GAMMA, _TRIGAMMA + _LOG_GAMMA**2)),
        "skewed, microcanonical": _density(_skewed, _start(), exact=_exact(_LOG_GAMMA, _TRIGAMMA + _LOG_GAMMA**2)),
        "stretched, defaults": _density(_stretched, _start(dim=4), exact=_exact(0.0, _COVARIANCE.diag())),
        "stretched, HMC": _density(_stretched, _start(dim=4), kernels.hmc(0.02, 8), tune=_TUNED, burn_in=600,
                                   exact=_exact(0.0, _COVARIANCE.diag())),
        "two modes that mix": _density(partial(_modes, at=1.5), _start(dim=1), kernels.underdamped(0.5), num_steps=8000,
                                       exact=_exact(0.0, 1 + 1.5**2)),
        "Student t": _density(_student, _start(), num_steps=8000, exact=_exact(0.0, 7 / 5)),
        "half a Gaussian (-inf outside)": _density(_half, _start().abs(), kernels.mala(0.3), num_steps=8000,
                                                   exact=_exact([math.sqrt(2 / math.pi), 0.0, 0.0], 1.0)),
        "funnel, non-centred": _density(_not_centred, _start(dim=10), exact=_exact(0.0, [9.0] + 9 * [1.0])),
        "Gamma, positive": _density(lambda y: Gamma(3.0, 1.0).log_prob(y).sum(1), _start().exp(), num_steps=6000,
                                    constraints=constraints.positive, exact=_exact(3.0, 12.0)),
        "Dirichlet, simplex": _density(
            lambda p: Dirichlet(torch.tensor([4.0, 6.0, 13.0]).double(), validate_args=False).log_prob(p),
            _start(seed=4).softmax(1),
            constraints=constraints.simplex,
            exact=_exact([4 / 23, 6 / 23, 13 / 23], [20 / 552, 42 / 552, 182 / 552]),
        ),
        "eight schools, non-centred": _density(
            partial(_schools, centred=False), _start(dim=10), num_steps=10_000, tune=BurnIn(num_steps=2000)),
        "regression on all data": _density(_data(None), _start(dim=2), kernels.mala(0.02),
                                           exact=_exact(_ROWS.sum(0) / 41, 1 / 41 + (_ROWS.sum(0) / 41).square())),
    }.items()
]  # fmt: skip

_far_modes = partial(_modes, at=6.0)  # no chain crosses

_SICK_DENSITIES = [
    Case("Gaussian, MALA", "too long a step", "the step is 60 widths", _density(_normal, _start(), kernels.mala(60.0))),
    Case("stretched, MALA", "too long a step", "too long for the narrow axes",
         _density(_stretched, _start(dim=4), kernels.mala(0.05))),
    Case("far start, short steps", "unfinished burn-in", "still on the way after the last draw",
         _density(_normal, _start() + 300, kernels.mala(0.01), num_steps=400)),
    Case("stretched, short steps", "unfinished burn-in", "the long axis is not explored",
         _density(_stretched, _start(dim=4), kernels.mala(5e-4), num_steps=2000)),
    Case("one chain in a spike", "frozen chains", "one of 8 chains never moves",
         _density(_spike, _moved(_start(), 1, 9.0), kernels.mala(0.5))),
    Case("starts in a steep tail", "frozen chains", "two of 8 chains never move, as every step overshoots",
         _density(_skewed, _start(), kernels.mala(0.3), burn_in=500, num_steps=5000)),
    Case("a far mode, separate starts", "stuck in a mode", "no chain crosses; starts in both modes",
         _density(_far_modes, _start(spread=8.0), kernels.mala(0.5))),
    Case("a far mode, one start", "stuck in a mode", "all chains at one point of one mode",
         _density(_far_modes, torch.full((8, 3), -6.0).double(), kernels.mala(0.5))),
    Case("a far mode, a ball of starts", "stuck in a mode", "all chains in a ball of radius .01 in one mode",
         _density(_far_modes, -6 + _start(spread=0.01), kernels.mala(0.5))),
    Case("a far mode, a ball, defaults", "stuck in a mode", "the same, after a warm-up",
         _density(_far_modes, -6 + _start(spread=0.01))),
    Case("a far mode, one chain of 8", "stuck in a mode", "seven chains in one mode, one in the other",
         _density(_far_modes, _moved(-6 + _start(spread=1.0), 2, 6.0), kernels.mala(0.5))),
    Case("a far mode, one chain", "stuck in a mode", "one chain, one mode",
         _density(_far_modes, -6 + _start(1), kernels.mala(0.5))),
    Case("batches of 5", "minibatch heat", "the test sees batches of 5 of 40", _density(_data(5), _start(dim=2),
                                                                                   kernels.mala(0.02))),
    Case("Algorithm 1, long steps", "Algorithm 1", "biased", _density(_normal, _start(16, 20),
                                                                     kernels.adam_mcmc(0.05, sigma=0.3, sigma_along=1.0))),
    Case("Algorithm 1, short steps", "Algorithm 1", "biased", _density(_normal, _start(16, 2),
                                                                      kernels.adam_mcmc(0.01, sigma=0.5))),
    Case("as released", "Algorithm 1", "biased", _density(_normal, _start(16, 20), kernels.as_released(0.05, sigma=0.3))),
    Case("unadjusted Langevin", "no Metropolis test", "a quarter too wide",
         _density(_normal, _start(), kernels.mala(0.8, acceptance=AlwaysAccept()))),
    Case("Neal's funnel, defaults", "funnel", "the neck is not visited",
         _density(_neal, _start(dim=10, spread=0.5), num_steps=3000, tune=BurnIn(num_steps=2000))),
    Case("Neal's funnel, underdamped", "funnel", "the neck is not visited",
         _density(_neal, _start(dim=10, spread=0.5), kernels.underdamped(0.1), tune=_TUNED, burn_in=600)),
    Case("Neal's funnel, HMC", "funnel", "the neck is not visited",
         _density(_neal, _start(dim=10, spread=0.5), kernels.hmc(0.1, 5), tune=_TUNED, burn_in=600, num_steps=2600)),
    Case("eight schools, centred", "funnel", "small tau is missing",
         _density(partial(_schools, centred=True), _start(dim=10), num_steps=5000, tune=BurnIn(num_steps=2000))),
    Case("random numbers in the density", "not a fixed function", "two calls differ", _density(_Noisy, _start(),
                                                                                            kernels.mala(0.5))),
    Case("a schedule in the density", "not a fixed function", "the width shrinks with each call",
         _density(_Schedule, _start(), kernels.mala(0.5))),
    Case("batch statistics in the density", "not a fixed function", "chains influence each other",
         _density(lambda x: _normal((x - x.mean(0)) / (x.std(0) + 0.1)), _start(), kernels.mala(0.5))),
    Case("60 steps", "too few draws", "60 draws of 4 chains", _density(_normal, _start(4), kernels.mala(0.1), num_steps=60)),
    Case("a flat direction", "improper", "no posterior: the density does not depend on two coordinates",
         _density(lambda x: -0.5 * x[:, 0].square(), _start(), kernels.mala(0.5))),
    Case("eight schools, flat log tau", "improper", "no posterior: log tau can fall without end",
         _density(partial(_schools, centred=False, flat=True), _start(dim=10), tune=BurnIn(num_steps=2000))),
    Case("float32 near 1e8", "low precision", "values of U are 8 apart",
         _density(lambda x: _normal(x) - 1e8, _start().float(), kernels.mala(0.5))),
    Case("bfloat16", "low precision", "U is rounded to 2 nats",
         _density(lambda x: (-0.5 * x.bfloat16().square().sum(1) - 300).float(), _start().float(), kernels.mala(0.5))),
    Case("NaN in the density", "NaN in places", "a sixth of the mass is NaN",
         _density(lambda x: _normal(x) + 0 * (x[:, 0] + 1).log(), _start().abs(), kernels.mala(0.3))),
    Case("a far mode, wide starts in the other", "stuck in a mode", "all starts in the basin of one mode",
         _density(_far_modes, -6 + _start(spread=1.0), kernels.mala(0.5)),
         "every chain starts in the basin of one mode, as widely as the mode itself: no evaluation of the density comes near "
         "the other"),
    Case("a needle", "stuck in a mode", "half of the mass is within .001 of a point that no chain meets",
         _density(_needle, _start(), kernels.mala(0.5)), "no evaluation of the density comes near the needle"),
]  # fmt: skip


# --- networks -----------------------------------------------------------------------------------------------------------

INPUTS = torch.randn(80, 4, generator=_seeded(0))
VALUES = INPUTS[:, :1] + 0.5 * torch.randn(80, 1, generator=_seeded(2))
LABELS = (INPUTS[:, 0] + 0.5 * torch.randn(80, generator=_seeded(3)) > 0).long()
TEST = torch.randn(50, 4, generator=_seeded(4))
NOISE = 0.5
_NLL = GaussianNLL(NOISE)


def _linear(outputs: int = 1) -> nn.Module:
    return nn.Linear(4, outputs)


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


class _Sine(nn.Module):
    """A sine whose frequency the data know up to multiples of the sampling frequency: separate modes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w[0] * torch.sin(self.w[1] * x[:, :1])


_GRID = 0.75 * torch.arange(-6.0, 6.0)[:, None]
_WAVE = torch.sin(2 * _GRID) + 0.2 * torch.randn(12, 1, generator=_seeded(7))


def _starts(make: Callable[[], nn.Module], chains: int = 4, spread: float = 0.5) -> list[dict[str, Tensor]]:
    """Weights of every chain from N(0, spread^2)."""
    generator = _seeded(100)
    states = make().state_dict()
    return [{name: spread * torch.randn(x.shape, generator=generator) for name, x in states.items()} for _ in range(chains)]


def _known(predictions: Tensor) -> float:
    """`z` of the predictions of a linear model, whose posterior is Gaussian: (chains, draws, examples)."""
    rows, at = (torch.cat([x, torch.ones(len(x), 1)], 1).double() for x in (INPUTS, TEST))
    precision = rows.T @ rows / NOISE**2 + torch.eye(5).double()
    mean = (at @ torch.linalg.solve(precision, rows.T @ VALUES.double() / NOISE**2))[:, 0]
    variance = (at @ torch.linalg.inv(precision) * at).sum(1)
    return _worst_z(predictions.double(), mean, variance + mean**2)


def _network(
    make: Callable[[], nn.Module] = _linear,
    train: Any = (INPUTS, VALUES),
    loss: Callable[..., Tensor] = _NLL,
    test: Tensor = TEST,
    *,
    is_known: bool = False,
    **options: Any,
) -> Callable[[], Found]:
    """A run of `sample`, four chains from different starts unless the options say otherwise."""

    def run() -> Found:
        torch.manual_seed(0)
        model = make()
        prior = {} if "prior" in options else {"prior": Gaussian(1.0)}
        given = {"num_draws": 250, "gap": 10, "burn_in": 800, "num_chains": 4, "stacked": True, "progress": False}
        given |= {"initial": _starts(make)} | prior | options
        function = loss() if isinstance(loss, type) else loss
        posterior = adammcmc.sample(model, train, function, **given)
        summary = posterior.summary(test)
        z = math.nan
        if is_known:
            values = posterior.function_values(test)
            z = _known(values.reshape(*values.shape[:2], -1))
        return Found(summary.grade, summary.verdict, [finding.kind for finding in summary.findings], z)

    return run


_HEALTHY_NETWORK = partial(_network, is_known=True)
_CLASSES: dict[str, Any] = {"make": partial(_linear, 2), "train": (INPUTS, LABELS), "loss": F.cross_entropy}
_NETWORKS = [
    Case(name, "healthy network", None, make)
    for name, make in {
        "linear, defaults": _HEALTHY_NETWORK(),
        "linear, seed 1": _HEALTHY_NETWORK(seed=1),
        "linear, seed 2": _HEALTHY_NETWORK(seed=2),
        "linear, 8 chains": _HEALTHY_NETWORK(num_chains=8, initial=_starts(_linear, 8)),
        "linear, microcanonical": _HEALTHY_NETWORK(sampler=Microcanonical, gap=20),
        "linear, MALA": _HEALTHY_NETWORK(sampler=partial(MALA, step_size=3e-3), gap=20),
        "linear, exact Adam": _HEALTHY_NETWORK(
            sampler=partial(ExactAdamMCMC, lr=1e-2, sigma=3e-2, sigma_along=1.0), gap=20, stacked=False),
        "linear, full data in batches": _HEALTHY_NETWORK(batch_size=20, gap=15, burn_in=1500),
        "linear, Kronecker metric": _HEALTHY_NETWORK(sampler=partial(Underdamped, preconditioner="kron"), gap=20),
        "linear, sequential": _HEALTHY_NETWORK(stacked=False, num_draws=150, num_chains=3, initial=_starts(_linear, 3)),
        "linear, trained members": _HEALTHY_NETWORK(initial=TrainMembers(), gap=20),
        "classes, defaults": _network(**_CLASSES, initial=_starts(_CLASSES["make"]), gap=20),
        "classes, microcanonical": _network(
            **_CLASSES, initial=_starts(_CLASSES["make"]), sampler=Microcanonical, gap=20, seed=3),
        "perceptron, defaults": _network(_perceptron, gap=50, burn_in=1500),
        "perceptron, trained members": _network(_perceptron, gap=50, burn_in=1500, initial=TrainMembers(), seed=1),
    }.items()
]  # fmt: skip


class _Quartic(nn.Module):
    """Its loss is so steep far out that a step of any useful length overshoots."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (0.0 * x[:, 0] + 1) * self.w.pow(4).sum()


class _SlowLoss:
    """Its scale grows with every call."""

    __name__ = "slow"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return (1 + self.calls / 5000) * (outputs - targets).square()[:, 0] / (2 * NOISE**2)


class _Batches:
    """Four batches of 20 a pass."""

    def __iter__(self) -> Any:
        return iter([(INPUTS[i : i + 20], VALUES[i : i + 20]) for i in range(0, 80, 20)])


def _optimizer(kind: str) -> Callable[[], Found]:
    """A training loop of one's own, with a wrong `num_data` or a sum: the verdict is that of the sampler."""
    wrong = {"mean": 800, "per example": 800, "batches": 4, "sum": 80}[kind]

    def run() -> Found:
        torch.manual_seed(0)
        model = _linear()
        is_fixed = kind != "batches"
        rows = slice(None) if is_fixed else slice(0, 20)
        given: dict[str, Any] = {"num_data": wrong, "prior": Gaussian(), "fixed_data": is_fixed}
        sampler = MALA(model.parameters(), 2e-4, generator=_seeded(0), **given)
        reduction = {"mean": "mean", "sum": "sum"}.get(kind, "none")

        def closure() -> Tensor:
            losses = F.mse_loss(model(INPUTS[rows]), VALUES[rows], reduction=reduction)
            return losses if losses.dim() == 0 else losses[:, 0]

        for _ in range(1000):
            sampler.step(closure)
        sampler.reset_health()
        for _ in range(6000):
            sampler.step(closure)
        health = sampler.health()
        return Found(health.grade, health.verdict, [finding.kind for finding in health.findings])

    return run


def _nan_loss(model: nn.Module, batch: Any) -> Tensor:
    """NaN where a weight is small."""
    inputs, targets = batch
    losses = (model(inputs) - targets).square()[:, 0] / (2 * NOISE**2)
    return losses + 0 * torch.log(model.weight[0, 1] + 0.05)


def _noisy_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()[:, 0] * (1 + 0.1 * torch.randn(()))


def _summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return -torch.distributions.Normal(outputs, NOISE).log_prob(targets).sum()


def _wrong_sign(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(outputs - targets).square()[:, 0]


def _autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(batch[0])
    return 50 * (outputs.float() - batch[1]).square()[:, 0]


def _crossed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets[:, 0]).square()


def _frequencies(*values: float) -> dict[str, Any]:
    """Options of runs on the sine, whose chains start at these frequencies."""
    initial = [{"w": torch.tensor([1.0, value])} for value in values] or None
    return {"make": _Sine, "train": (_GRID, _WAVE), "loss": GaussianNLL(0.2), "prior": Gaussian(10.0), "initial": initial,
            "test": torch.linspace(-4, 4, 50)[:, None]}  # fmt: skip


_OTHER = 2 + 2 * math.pi / 0.75
_SICK_NETWORKS = [
    Case("linear, MALA", "too long a step", "every proposal is rejected", _network(sampler=partial(MALA, step_size=1.0))),
    Case("linear, underdamped", "too long a step", "every proposal is rejected",
         _network(sampler=partial(Underdamped, step_size=0.4), burn_in=200)),
    Case("linear, short steps", "unfinished burn-in", "20 short steps from far away",
         _network(sampler=partial(MALA, step_size=2e-5), burn_in=20, initial=_starts(_linear, 4, 3.0))),
    Case("perceptron, no burn-in", "unfinished burn-in", "weights still drift",
         _network(_perceptron, sampler=partial(Underdamped, step_size=1e-3), burn_in=0)),
    Case("linear, 12 steps of burn-in", "unfinished burn-in", "the step size is not tuned",
         _network(burn_in=BurnIn(num_steps=12), initial=_starts(_linear, 4, 10.0), num_draws=60)),
    Case("one chain far away", "frozen chains", "one of 4 chains starts where every proposal is rejected",
         _network(_Quartic, loss=lambda outputs, _: outputs, sampler=partial(Underdamped, step_size=0.05), burn_in=200,
                  initial=[{"w": torch.full((3,), at)} for at in (0.5, 300.0, -0.5, 0.1)])),
    Case("num_data of sample", "wrong num_data", "num_data is 800, the data have 80 rows", _network(num_data=800)),
    Case("iterable", "wrong num_data", "num_data is 800, a pass has 80 rows",
         _network(train=_Batches(), num_data=800, sampler=partial(AdamMCMC, lr=1e-3, sigma=1e-2), stacked=False,
                  burn_in=100, num_draws=10)),
    Case("per-example losses", "wrong num_data", "num_data is 800, the closure returns 80 losses", _optimizer("per example")),
    Case("number of batches", "wrong num_data", "num_data is the number of batches", _optimizer("batches")),
    Case("sine, separate starts", "stuck in a mode", "no chain crosses; starts in two modes",
         _network(**_frequencies(2, _OTHER, 2, _OTHER))),
    Case("sine, one start", "stuck in a mode", "all chains at the same weights", _network(**_frequencies())),
    Case("sine, near starts", "stuck in a mode", "all chains at nearly the same weights",
         _network(**_frequencies(2, 2.001, 1.999, 2.0005))),
    Case("MALA on batches", "minibatch heat", "the test sees batches of 20 of 80",
         _network(sampler=partial(MALA, step_size=3e-3), batch_size=20)),
    Case("Algorithm 1 on batches", "minibatch heat", "the test sees batches of 20 of 80",
         _network(sampler=partial(AdamMCMC, lr=3e-3, sigma=3e-2, sigma_along=1.0), batch_size=20)),
    Case("underdamped on batches", "minibatch heat", "no test at all, noisy gradients",
         _network(sampler=partial(Underdamped, step_size=0.02, acceptance=AlwaysAccept()), batch_size=20)),
    Case("linear, as printed", "Algorithm 1", "biased",
         _network(sampler=partial(AdamMCMC, lr=1e-2, sigma=3e-2, sigma_along=1.0), gap=20)),
    Case("linear, as printed, short steps", "Algorithm 1", "biased",
         _network(sampler=partial(AdamMCMC, lr=3e-3, sigma=3e-2, sigma_along=1.0), gap=20)),
    Case("linear, as released", "Algorithm 1", "biased",
         _network(sampler=partial(AsReleased, lr=1e-2, sigma=3e-2, sigma_along=1.0), gap=20)),
    Case("linear, long unadjusted steps", "no Metropolis test", "far too hot",
         _network(sampler=partial(Underdamped, step_size=0.1, acceptance=AlwaysAccept()))),
    Case("linear, unadjusted Langevin", "no Metropolis test", "diverges",
         _network(sampler=partial(MALA, step_size=0.02, acceptance=AlwaysAccept()))),
    Case("random numbers in the loss", "not a fixed function", "two calls differ", _network(loss=_noisy_loss)),
    Case("dropout in training mode", "not a fixed function", "two calls differ", _network(_with_dropout)),
    Case("a schedule in the loss", "not a fixed function", "the scale grows with each call", _network(loss=_SlowLoss)),
    Case("a sum of log_prob", "sum instead of mean", "80 times too cold", _network(loss=_summed)),
    Case("reduction='sum'", "sum instead of mean", "80 times too cold", _optimizer("sum")),
    Case("10 draws", "too few draws", "10 draws of 4 chains", _network(num_draws=10)),
    Case("one chain", "too few draws", "one chain of 60 draws", _network(num_chains=1, num_draws=60, initial=None,
                                                                        stacked=False)),
    Case("no prior", "improper", "no posterior: a flat prior",
         _network(sampler=partial(AdamMCMC, lr=1e-3, sigma=3e-2), prior=None)),
    Case("loss with the wrong sign", "improper", "U has no lower bound", _network(loss=_wrong_sign)),
    Case("lambda = 1e-6", "no influence of the data", "the prior alone is sampled",
         _network(sampler=partial(Underdamped, inverse_temperature=1e-6))),
    Case("bfloat16 autocast", "low precision", "U is rounded to several nats", _network(loss=_autocast)),
    Case("NaN in the loss", "NaN in places", "the loss is NaN for a third of the posterior",
         _network(loss=_nan_loss, initial=[{"weight": torch.tensor([[1.0, 0.1 * i, 0.3 * i - 0.5, 0.5 - 0.3 * i]]),
                                            "bias": torch.tensor([0.5 - 0.3 * i])} for i in range(4)])),
    Case("targets of the wrong shape", "targets broadcast", "every output is compared with every target",
         _network(loss=_crossed)),
    Case("mean loss in a closure", "wrong num_data", "num_data is 800, the closure sees 80 rows", _optimizer("mean"),
         "a closure that returns a mean does not show how many examples it saw: the target is consistent, and ten times too "
         "cold. `sample` counts them"),
]  # fmt: skip

CASES = [*_DENSITIES, *_NETWORKS, *_SICK_DENSITIES, *_SICK_NETWORKS]


# --- the runs -----------------------------------------------------------------------------------------------------------


def _key(case: Case) -> str:
    return f"{case.group}: {case.name}"


def run(case: Case) -> dict[str, Any]:
    """One run, as it is stored. Warnings are no verdict."""
    began = time.time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = case.make()
        except REFUSALS as error:
            found = Found("refused", f"{type(error).__name__}: {str(error).splitlines()[0]}", [])
    return {
        "group": case.group,
        "fault": case.fault,
        "invisible": case.invisible,
        "grade": found.grade,
        "outcome": INVISIBLE if case.invisible else outcome(case.fault, found.grade),
        "kinds": found.kinds,
        "verdict": found.verdict[:300],
        "z": None if math.isnan(found.z) else round(found.z, 2),
        "seconds": round(time.time() - began, 1),
    }


def run_all(words: str = "", output: Path = RESULTS) -> None:
    """Run the cases that are not stored yet and whose name contains the words, and store each as it comes."""
    for case in CASES:
        document = json.loads(output.read_text()) if output.exists() else {"runs": {}}
        if words not in _key(case) or _key(case) in document["runs"]:
            continue
        row = run(case)
        document["command"] = COMMAND
        document["versions"] = {
            "torch": torch.__version__,
            "adammcmc": adammcmc.__version__,
            "python": platform.python_version(),
        }
        known = document["runs"] | {_key(case): row}
        document["runs"] = {key: known[key] for key in map(_key, CASES) if key in known}
        output.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{row['outcome']:11} {row['seconds']:5.1f} s  {_key(case)}: {row['grade']}: {row['verdict'][:100]}", flush=True)


# --- the table ----------------------------------------------------------------------------------------------------------

BEGIN, END = "<!-- the table: python -m benchmarks.verdicts table -->", "<!-- end of the table -->"


def table(document: dict[str, Any]) -> str:
    """The section of docs/health.md, in Markdown."""
    runs = document["runs"]
    visible = {key: row for key, row in runs.items() if not row["invisible"]}
    groups = list(dict.fromkeys(row["group"] for row in visible.values()))
    groups = [*(g for g in HEALTHY if g in groups), *(g for g in groups if g not in HEALTHY)]
    lines = ["| runs | number | right | undecided | wrong |", "|---|---|---|---|---|"]
    rows = list(visible.values())
    lines += [_row(group, [row for row in rows if row["group"] == group]) for group in groups]
    lines.append(_row("**all healthy**", [row for row in rows if row["fault"] is None]))
    lines.append(_row("**all sick**", [row for row in rows if row["fault"] is not None]))
    parts = [_sentence(rows), "\n".join(lines)]
    if wrong := [(key, row) for key, row in visible.items() if row["outcome"] in (CALM, ALARM)]:
        parts.append("\n".join(f"- *{row['outcome']}*: {key}: {row['verdict']}" for key, row in wrong))
    parts.append("Undecided:\n\n" + "\n".join(_undecided(visible)))
    if hidden := [(key, row) for key, row in runs.items() if row["invisible"]]:
        lines = ["| cannot be detected | fault | verdict | why |", "|---|---|---|---|"]
        lines += [f"| {key} | {row['fault']} | {row['grade']} | {row['invisible']} |" for key, row in hidden]
        parts.append("These are not counted above. Nothing that the library is given shows the fault:\n\n" + "\n".join(lines))
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    return "\n\n".join([*parts, f"`{document['command']}` (`make bench-verdicts`), on a CPU: {versions}."]) + "\n"


def _count(rows: Iterable[dict[str, Any]], *outcomes: str) -> int:
    return sum(row["outcome"] in outcomes for row in rows)


def _row(name: str, rows: Sequence[dict[str, Any]]) -> str:
    numbers = [len(rows), _count(rows, RIGHT), _count(rows, UNDECIDED), _count(rows, CALM, ALARM)]
    return f"| {name} | {' | '.join(map(str, numbers))} |"


def _sentence(rows: Sequence[dict[str, Any]]) -> str:
    healthy = [row for row in rows if row["fault"] is None]
    sick = [row for row in rows if row["fault"] is not None]
    z = [row["z"] for row in healthy if row["z"] is not None]
    return (
        f"{len(rows)} runs: {len(healthy)} healthy ones, and {len(sick)} with known faults. False alarms (healthy runs called "
        f"sick): {_count(healthy, ALARM)} of {len(healthy)}. False calm (sick runs called sound): {_count(sick, CALM)} of "
        f"{len(sick)}. A run that is refused by a named error counts as right; a warning is no verdict. The posterior of "
        f"{len(z)} healthy runs is known in closed form: their means and mean squares are within {max(z):.1f} Monte Carlo "
        "standard errors of it."
    )


def _undecided(visible: dict[str, dict[str, Any]]) -> list[str]:
    rows = [(key, row) for key, row in visible.items() if row["outcome"] == UNDECIDED]
    by_group = itertools.groupby(sorted(rows, key=lambda pair: pair[1]["group"]), key=lambda pair: pair[1]["group"])
    lines = []
    for group, pairs in by_group:
        names = "; ".join(f"{key.removeprefix(f'{group}: ')} (`{'`, `'.join(row['kinds'])}`)" for key, row in pairs)
        lines.append(f"- {group}: {names}")
    return lines


def page_with(text: str, document: dict[str, Any]) -> str:
    """A page, with the table between its marks."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{table(document)}\n{END}", text, flags=re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("run", "table"), default="run")
    parser.add_argument("--only", default="", help="runs whose name contains these words")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where results are stored; stored runs are not repeated")
    options = parser.parse_args(arguments)
    if options.what == "run":
        torch.set_num_threads(1)
        run_all(options.only, options.output)
    else:
        PAGE.write_text(page_with(PAGE.read_text(), json.loads(options.output.read_text())))


if __name__ == "__main__":
    main()
