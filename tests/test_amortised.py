"""Exact chains with forces from batches: the map is reversible and keeps volume, and the chain is that of its target."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import adammcmc
from adammcmc import AlwaysAccept, AmortisedLangevin, BurnIn, DataDensity, Gaussian, kernels, sample_density, warm_up
from adammcmc.kernels.hamiltonian import Momentum
from adammcmc.samplers.closure import ClosurePotential
from adammcmc.samplers.stacked import StackedPotential
from adammcmc.target.batches import Parts
from tests.optimizers import X as inputs
from tests.optimizers import Y as labels
from tests.optimizers import network, same, seeded, weights

PARTS = 7
MADE = torch.Generator().manual_seed(4)
X = torch.randn(50, 3, dtype=torch.float64, generator=MADE) * torch.tensor([0.5, 1.0, 2.0])
Y = X @ torch.tensor([1.0, -1.0, 0.5]).double() + 0.5 * torch.randn(50, dtype=torch.float64, generator=MADE)
LABELS = (Y > 0).long()
"""50 examples in seven parts: of eight and of seven."""


def squares(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (x @ w - y) ** 2 / 0.25


def logistic(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.softplus(-y.sign() * (x @ w))


REGRESSION = DataDensity(squares, X, Y, prior=Gaussian(1.0), num_parts=PARTS)
"""Its posterior is N(MEAN, COVARIANCE)."""
LOGISTIC = DataDensity(logistic, X, Y, prior=Gaussian(1.0), num_parts=PARTS)
COVARIANCE = torch.linalg.inv(X.T @ X / 0.25 + torch.eye(3, dtype=torch.float64))
MEAN = COVARIANCE @ X.T @ Y / 0.25


def points(num_chains: int) -> tuple[Tensor, Tensor]:
    """Positions and momenta."""
    generator = torch.Generator().manual_seed(5)
    x, p = torch.randn(2, num_chains, 3, dtype=torch.float64, generator=generator)
    return x, p


class Fixed(kernels.AmortisedKernel):
    """Always the same batches, and a velocity that is kept as it is."""

    def _order(self, *_: Any) -> list[int]:
        return [4, 0, 2, 5]

    def _refreshed(self, momentum: Any, generator: Any) -> Any:
        return momentum

    def _moved(self, last: Tensor, generator: Any) -> Tensor:
        return torch.full_like(last, 1e-300)  # accepts everything


def fixed(h: float, **options: Any) -> Fixed:
    made = kernels.amortised_langevin(h, 0.0, **options)
    names = [field.name for field in fields(made)]
    return Fixed(**{name: getattr(made, name) for name in names})


# --- the map ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preconditioner", [None, torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)])
def test_a_trajectory_walks_back_to_where_it_came_from(preconditioner: Tensor | None) -> None:
    """With its velocity flipped, over the same palindrome: to rounding."""
    kernel, (x, p) = fixed(0.05, preconditioner=preconditioner), points(20)
    start = kernel.init(x, LOGISTIC)
    start = start._replace(memory=Momentum((p,), torch.zeros(20, dtype=torch.float64)))
    there, info = kernel.step(start, LOGISTIC, seeded())
    assert bool(info.is_accepted.all())
    assert float((there.params - x).norm(dim=1).min()) > 0.1
    flipped = there.memory._replace(momentum=(-there.memory.momentum[0],))
    back, again = kernel.step(there._replace(memory=flipped), LOGISTIC, seeded())
    assert torch.allclose(back.params, x, rtol=0, atol=1e-12)
    assert torch.allclose(back.memory.momentum[0], -p, rtol=0, atol=1e-12)
    assert torch.allclose(again.log_ratio, -info.log_ratio, rtol=0, atol=1e-11)


def test_a_trajectory_keeps_volume() -> None:
    """The determinant of its derivative, from central differences in all six directions."""
    kernel, (x, p), step = fixed(0.1), points(1), 1e-5
    order = [4, 0, 2, 2, 0, 4]
    columns = []
    for i in range(6):
        ends = []
        for sign in (1, -1):
            moved = torch.cat([x, p], 1)
            moved[0, i] += sign * step
            end, after = kernel._trajectory((moved[:, :3],), (moved[:, 3:],), order, LOGISTIC)
            ends.append(torch.cat([end[0], after[0]], 1)[0])
        columns.append((ends[0] - ends[1]) / (2 * step))
    jacobian = torch.stack(columns, 1)
    assert abs(float(torch.linalg.det(jacobian)) - 1) < 1e-8
    assert float((jacobian - torch.eye(6)).abs().max()) > 0.1, "it is not the identity"


def test_energies_are_conserved_ever_better_by_shorter_steps() -> None:
    """The kicks of all batches are the force of all data: Y vanishes as the third power of the step."""
    (x, p), largest = points(50), []
    for h in (4e-3, 2e-3):
        kernel = kernels.amortised_langevin(h, 0.0)
        state = kernel.init(x, LOGISTIC)._replace(memory=Momentum((p,), torch.zeros(50).double()))
        _, info = kernel.step(state, LOGISTIC, seeded())
        largest.append(float(info.log_ratio.square().mean().sqrt()))
    assert 6.0 < largest[0] / largest[1] < 10.0
    assert largest[0] < 0.05


# --- the force of a part ------------------------------------------------------------------------------------------------


class Network:
    """One linear unit, its data in unequal parts, and its potentials."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 1, bias=False).double()
        with torch.no_grad():
            self.model.weight.copy_(points(1)[0])
        self.rows = torch.arange(50).split([20, 5, 25])

    def loss(self, batch: tuple[Tensor, Tensor], *, mean: bool = False) -> Tensor:
        losses = 0.5 * (self.model(batch[0])[:, 0] - batch[1]) ** 2 / 0.25
        return losses.mean() if mean else losses

    def sampler(self, **options: Any) -> AmortisedLangevin:
        settings = {"num_data": 50, "prior": Gaussian(1.0), "step_size": 0.012, "friction": 1.0, "generator": seeded()}
        return AmortisedLangevin(self.model.parameters(), **(settings | options))

    def parts(self) -> Parts:
        return Parts([(X[rows], Y[rows]) for rows in self.rows])


@pytest.mark.parametrize("kind", ["losses", "means", "closures"])
def test_the_mean_of_the_parts_forces_is_the_force(kind: str) -> None:
    problem = Network()
    sampler = problem.sampler()
    if kind == "closures":
        made = [partial(problem.loss, part) for part in problem.parts()]
        potential = sampler.network.potential(made, None, None)
    else:
        potential = sampler.network.potential(partial(problem.loss, mean=kind == "means"), problem.parts(), None)
    assert isinstance(potential, ClosurePotential)
    with sampler.network.trial(potential) as params:
        whole = potential.force(params)[0]
        each = torch.stack([potential.force_of(params, i)[0] for i in range(potential.num_parts)])
    assert torch.allclose(each.mean(0), whole, rtol=1e-12)
    assert float((each - whole).abs().max()) > 0.01
    assert potential.num_gradients == pytest.approx(2.0), "one for all data, one for their parts"
    w = problem.model.weight.detach()[0]
    exact = X[:20].T @ (X[:20] @ w - Y[:20]) / 0.25 / 20 * (20 * 3 / 50) + w / 50
    assert torch.allclose(each[0].flatten(), exact, rtol=1e-12), "weighted by the rows, the prior in full"


def test_the_mean_of_the_parts_forces_is_the_force_of_densities_and_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    start = points(4)[0]
    each = [LOGISTIC.force_of((start,), i)[0] for i in range(PARTS)]
    assert torch.allclose(torch.stack(each).mean(0), LOGISTIC.force((start,))[0], rtol=1e-12)
    checked = []
    original = StackedPotential.force_of

    def compared(self: StackedPotential, params: Any, part: int) -> Any:
        if not checked:
            parts = [torch.cat([x.flatten(1) for x in original(self, params, i)], 1) for i in range(self.num_parts)]
            whole = torch.cat([x.flatten(1) for x in self.force(params)], 1)
            checked.append((torch.stack(parts).mean(0) - whole).abs().max())
            assert len(parts) == 4
        return original(self, params, part)

    monkeypatch.setattr(StackedPotential, "force_of", compared)
    run(num_draws=1, num_chains=2, stacked=True, chunk_size=13, batch_size=None)
    assert float(checked[0]) < 1e-12


# --- the chain ----------------------------------------------------------------------------------------------------------

KERNELS = {
    "all batches": partial(kernels.amortised_langevin, 0.008, 1.0),
    "three of the batches": partial(kernels.amortised_langevin, 0.006, 1.0, num_batches=3),
    "one batch, twice": partial(kernels.amortised_langevin, 0.006, 5.0, num_batches=1),
    "fresh uniform": partial(kernels.amortised_langevin, 0.008, 1.0, persistent_uniform=False),
    "preconditioned": partial(kernels.amortised_langevin, 0.008, 0.1, preconditioner=torch.tensor([2.0, 1.0, 0.5]).double()),
}


@pytest.mark.parametrize("name", KERNELS)
def test_exact_draws_stay_exact(name: str) -> None:
    """Of a Gaussian posterior: means and second moments of 12,000 chains after 25 trajectories, in whitened units."""
    num_chains, factor = 12_000, torch.linalg.cholesky(COVARIANCE)
    start = MEAN + torch.randn(num_chains, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6)) @ factor.T
    kernel = KERNELS[name]()
    draws, info = sample_density(REGRESSION, start, kernel, num_steps=25, seed=8, progress=False)
    rate = float(info.acceptance_rate.mean())
    assert 0.3 < rate < 0.85, "the noise of the batches is there, and the test has to deal with it"
    white = torch.linalg.solve_triangular(factor, (draws[:, -1] - MEAN).T, upper=False).T
    products = white[:, :, None] * white[:, None, :] - torch.eye(3)
    rises = (2.0 * info.is_accepted - 4.0 * (info.log_ratio > 0)).mean(1, keepdim=True)  # acceptance is 2 P(Y > 0)
    for values in (white, products.flatten(1), rises):
        off = values.mean(0) / (values.std(0) / math.sqrt(num_chains))
        assert float(off.abs().max()) < 4.5, off


def test_burn_in_finds_step_and_metric_of_a_density() -> None:
    start = MEAN + 0.1 * torch.randn(16, 3, dtype=torch.float64, generator=seeded())
    record = warm_up(REGRESSION, start, kernels.amortised_langevin(1e-3), tune=BurnIn(num_steps=500), progress=False)
    assert record.acceptance == pytest.approx(0.85, abs=0.1)
    assert isinstance(record.kernel, kernels.AmortisedKernel)
    assert not record.kernel.has_gradient
    assert record.kernel.preconditioner is not None
    assert record.kernel.describe().endswith("exact")


# --- the optimizer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_batches", [None, 2])
def test_the_optimizer_makes_the_moves_of_the_kernel(num_batches: int | None) -> None:
    problem = Network()
    sampler = problem.sampler(num_batches=num_batches)
    closures = [partial(problem.loss, (X[i::PARTS], Y[i::PARTS])) for i in range(PARTS)]
    start, generator = problem.model.weight.detach().clone(), seeded()
    kernel = kernels.amortised_langevin(0.012, 1.0, num_batches=num_batches)
    state, is_accepted = kernel.init(start, REGRESSION), []
    for _ in range(40):
        state, info = kernel.step(state, REGRESSION, generator)
        sampler.step(closures)
        assert torch.allclose(problem.model.weight, state.params, rtol=1e-9)
        is_accepted.append(bool(info.is_accepted))
        assert is_accepted[-1] == bool(sampler.info.is_accepted)
    assert 5 < sum(is_accepted) < 40
    assert sampler.describe().endswith("| exact")
    gradients = sampler.chains.health_sums()[0]["num_gradients"]
    share = 2.0 if num_batches is None else 2 * num_batches / PARTS
    assert gradients == pytest.approx(40 * share, rel=0.02), "no gradient of all data"


@pytest.mark.parametrize("burn_in", [None, BurnIn(num_steps=30, window=10, approach=False)])
def test_a_saved_state_continues_bit_for_bit(burn_in: BurnIn | None) -> None:
    x, y = X.float(), LABELS

    def steps(sampler: AmortisedLangevin, model: nn.Module, number: int) -> None:
        for _ in range(number):
            sampler.step([lambda i=i: F.cross_entropy(model(x[i::4]), y[i::4], reduction="none") for i in range(4)])

    def fresh() -> tuple[nn.Module, AmortisedLangevin]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        options: dict[str, Any] = {"num_data": 50, "prior": Gaussian(1.0), "generator": seeded(), "burn_in": burn_in}
        return model, AmortisedLangevin(model.parameters(), 0.03, num_batches=3, **options)

    model, sampler = fresh()
    steps(sampler, model, 15)
    saved, at = sampler.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    steps(sampler, model, 25)
    other, again = fresh()
    other.load_state_dict(at)
    again.load_state_dict(saved)
    steps(again, other, 25)
    assert same(weights(model), weights(other))
    assert torch.equal(sampler.chains.memory.momentum[0], again.chains.memory.momentum[0])
    assert not sampler.is_adapting
    assert sampler.chains.here is not None
    assert sampler.chains.here.grad is None, "after burn-in the gradient of all data is not computed"


def test_forces_may_be_rough() -> None:
    """In bfloat16 the trajectory is another one, and energies are those of float32."""
    found = []
    for forces in (None, "bfloat16"):
        model = network(width=8)
        sampler = AmortisedLangevin(
            model.parameters(), 0.02, num_data=64, prior=Gaussian(), forces=forces, generator=seeded(), friction=1.0
        )
        closures = [
            lambda i=i, model=model: F.cross_entropy(model(inputs[i::4]), labels[i::4], reduction="none") for i in range(4)
        ]
        for _ in range(3):
            sampler.step(closures)
        assert sampler.chains.here is not None
        assert sampler.chains.here.losses.dtype == torch.float32
        exact = torch.cat([c() for c in closures])
        assert torch.allclose(sampler.chains.here.losses[0], exact, rtol=1e-6)
        assert sampler.network.layers.reduced == []
        found.append(sampler.info.log_ratio)
        assert sampler.describe().endswith("| exact")
    assert not torch.equal(*found)


# --- in one call --------------------------------------------------------------------------------------------------------


def run(**options: Any) -> adammcmc.Posterior:
    """Of a small network, at a step size of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    settings: dict[str, Any] = {
        "sampler": partial(AmortisedLangevin, step_size=0.04, friction=1.0),
        "batch_size": 20,
        "num_draws": 12,
        "gap": 2,
        "burn_in": 0,
        "progress": False,
    }
    return adammcmc.sample(model, (X, LABELS), F.cross_entropy, **(settings | options))


def largest_difference(a: Sequence[Any], b: Sequence[Any]) -> float:
    assert len(a) == len(b) > 0
    return max(float((x[key] - y[key]).abs().max()) for x, y in zip(a, b, strict=True) for key in x)


def test_a_stack_has_the_batches_of_its_first_chain() -> None:
    """Which is the chain alone, whatever the number of others; nor do these depend on it."""
    options: dict[str, Any] = {"sampler": partial(AmortisedLangevin, step_size=0.04, friction=1.0, num_batches=1)}
    alone, two, three = run(**options), *(run(num_chains=c, stacked=True, **options) for c in (2, 3))
    assert largest_difference(alone.chain(0), two.chain(0)) < 1e-9
    assert largest_difference(two.chain(1), three.chain(1)) < 1e-9
    assert largest_difference(two.chain(0), two.chain(1)) > 1e-3
    assert [r["is_accepted"] for r in alone.index] == [r["is_accepted"] for r in two.index if r["chain"] == 0]


def test_a_run_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    whole = run(path=tmp_path / "whole")
    run(path=tmp_path / "parts", num_draws=5)
    parts = run(path=tmp_path / "parts", resume=True)
    assert largest_difference(whole, parts) == 0.0
    with pytest.raises(adammcmc.StoreMismatch):
        run(path=tmp_path / "parts", resume=True, batch_size=10)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_run_in_one_call(stacked: bool) -> None:
    burn_in = BurnIn(num_steps=300)
    posterior = run(sampler=AmortisedLangevin, burn_in=burn_in, num_chains=2, stacked=stacked, num_draws=20, batch_size=13)
    assert len(posterior) == 40
    manifest = posterior.store.manifest
    assert manifest["configuration"]["chunk_size"] == 13
    assert manifest["target"].endswith("| exact")
    assert "amortised Langevin" in manifest["target"]
    record = posterior.warm_up[0]
    assert record is not None
    assert record.num_approach > 0
    assert record.acceptance == pytest.approx(0.85, abs=0.2)


def test_the_data_are_cut_at_random_and_once() -> None:
    """They may be sorted; a batch must not be a class."""
    calls: Counter[tuple[int, ...]] = Counter()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls[tuple(batch[1].tolist())] += 1
        return F.cross_entropy(model(batch[0]), LABELS[batch[1]], reduction="none")

    sampler = partial(AmortisedLangevin, step_size=0.04)
    options: dict[str, Any] = {"sampler": sampler, "batch_size": 17, "num_draws": 3, "burn_in": 0, "progress": False}
    adammcmc.sample(nn.Linear(3, 2).double(), (X, torch.arange(50)), loss, **options)
    seen = [part for part, number in calls.items() if number > 20]  # others are to find out what the loss is
    assert sorted(map(len, seen)) == [16, 17, 17]
    assert sorted(i for part in seen for i in part) == list(range(50))
    assert all(max(part) - min(part) > 30 for part in seen)


def test_a_loader_has_the_batch_size() -> None:
    loader = DataLoader(TensorDataset(X, LABELS), batch_size=20, shuffle=True)
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    sampler = partial(AmortisedLangevin, step_size=0.04)
    posterior = adammcmc.sample(model, loader, F.cross_entropy, sampler=sampler, num_draws=3, gap=1, burn_in=0, progress=False)
    assert posterior.store.manifest["configuration"]["chunk_size"] == 20
    assert posterior.store.manifest["configuration"]["batch_size"] == 50


# --- what it refuses ----------------------------------------------------------------------------------------------------


def test_likely_mistakes_are_named() -> None:
    problem = Network()
    whole = partial(problem.loss, (X, Y))
    for burn_in in (None, BurnIn(num_steps=300)):
        with pytest.raises(ValueError, match=r"two batches or more.*list of closures"):
            problem.sampler(burn_in=burn_in).step(whole)
    with pytest.raises(ValueError, match="`num_batches` is 9, and the data come in 3"):
        problem.sampler(num_batches=9).step(problem.loss, problem.parts())
    with pytest.raises(ValueError, match="at least 1"):
        problem.sampler(num_batches=0)
    with pytest.raises(TypeError, match="fixed_data"):
        problem.sampler(fixed_data=True)
    with pytest.raises(ValueError, match="tests nothing"):
        kernels.amortised_langevin(0.1, acceptance=AlwaysAccept())
    for size in (None, 50):
        with pytest.raises(ValueError, match="AmortisedLangevin takes its forces from batches: set `batch_size`"):
            run(batch_size=size)
    with pytest.raises(ValueError, match="not both"):
        run(chunk_size=10)
    for density in (DataDensity(squares, X, Y), DataDensity(squares, X, Y, batch_size=5)):
        with pytest.raises(ValueError, match="set `num_parts`"):
            sample_density(density, torch.zeros(2, 3).double(), kernels.amortised_langevin(0.1), num_steps=2, progress=False)
    with pytest.raises(ValueError, match="`num_parts` must be"):
        DataDensity(squares, X, Y, num_parts=51)
    loader = [(X[:25], LABELS[:25]), (X[25:], LABELS[25:])]
    with pytest.raises(ValueError, match="can only be iterated"):
        adammcmc.sample(
            nn.Linear(3, 2).double(), Iterated(loader), F.cross_entropy, sampler=AmortisedLangevin, num_data=50, progress=False
        )


class Iterated:
    """An iterable of batches without numbered examples."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)
