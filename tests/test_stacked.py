"""Many chains in one evaluation: each is the chain that it would be alone, whatever the others do."""

from __future__ import annotations

import copy
import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

from adammcmc import (
    MALA,
    AdamMCMC,
    AlwaysAccept,
    AsReleased,
    Barker,
    BurnIn,
    Callback,
    Confidence,
    Event,
    ExactAdamMCMC,
    FullData,
    Gaussian,
    GaussianNLL,
    Info,
    Microcanonical,
    Minibatch,
    NonFiniteLoss,
    OptimizerMCMC,
    Penalty,
    PerExampleLossRequired,
    Posterior,
    Prior,
    Sequential,
    StochasticClosure,
    StoreMismatch,
    TensorBoard,
    TensorExamples,
    Tuna,
    Underdamped,
    UniformBall,
    UniformBox,
    sample,
)
from adammcmc.acceptance import ClampedLoss
from adammcmc.backends.streams import streams
from adammcmc.jets import ParticleNetLite
from adammcmc.runs.session import prefers_stack
from adammcmc.samplers.closure import ClosurePotential
from adammcmc.samplers.stacked import CannotStack, StackedChains, StackedPotential, setup_of
from adammcmc.samplers.stacked import stack as stack_chains
from adammcmc.target.likelihood import Loss

X = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(96) % 3
ALGORITHM_1 = partial(AdamMCMC, lr=1e-3, sigma=1e-2, sigma_along=2.0, prior=Gaussian())
SHORT: dict[str, Any] = {"num_draws": 6, "gap": 4, "burn_in": 5, "progress": False}


def network(*, batch_norm: bool = False, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    middle: list[nn.Module] = [nn.BatchNorm1d(8)] if batch_norm else []
    middle += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def run(model: nn.Module, sampler: Any, **options: Any) -> Posterior:
    settings = {"num_chains": 3, "stacked": True, **SHORT, **options}
    data = X.to(next(model.parameters()).dtype), Y
    return sample(model, data, F.cross_entropy, sampler=sampler, **settings)


def largest_difference(a: Posterior, b: Posterior) -> float:
    assert len(a) == len(b) > 0
    pairs = [(x[key].double(), y[key].double()) for x, y in zip(a, b, strict=True) for key in x]
    return max(float((x - y).abs().max()) for x, y in pairs)


def stack_of(model: nn.Module, sampler: Any, num_chains: int = 3, **options: Any) -> StackedChains:
    """Chains whose weights differ."""
    made = sampler(list(model.named_parameters()), num_data=96, **options)
    setups = []
    for _ in range(num_chains):
        setups.append(setup_of(made, model))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    return stack_chains(made, model, Loss(F.cross_entropy), setups, streams(range(num_chains), torch.device("cpu")))


# --- a chain of a stack is the chain alone --------------------------------------------------------------------------------


SAMPLERS: dict[str, Any] = {
    "AdamMCMC": ALGORITHM_1,
    "MALA": partial(MALA, step_size=1e-2, prior=Gaussian()),
    "MALA, directional": partial(MALA, step_size=1e-2, sigma_along=1.0, prior=Gaussian()),
    "Underdamped": partial(Underdamped, step_size=0.15, prior=Gaussian()),
    "Microcanonical": partial(Microcanonical, step_size=0.15, prior=Gaussian()),
    "unadjusted": partial(Underdamped, step_size=1e-2, prior=Gaussian(), acceptance=AlwaysAccept()),
    "AsReleased": partial(AsReleased, lr=1e-3, sigma=1e-2, sigma_along=2.0, prior=Gaussian()),
    "bounded": partial(AdamMCMC, lr=1e-3, sigma=1e-2, sigma_along=2.0, prior=UniformBox(-0.52, 0.52)),
    "no prior": partial(AdamMCMC, lr=1e-3, sigma=1e-2, sigma_along=2.0),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_stacked_chains_on_all_data_are_those_of_a_run_one_after_the_other(name: str) -> None:
    """With the noise of the same seeds: to rounding, in every chain, with the same decisions."""
    stacked = run(network(dtype=torch.float64), SAMPLERS[name])
    alone = run(network(dtype=torch.float64), SAMPLERS[name], stacked=False)
    assert largest_difference(stacked, alone) < 1e-7
    assert [r["is_accepted"] for r in stacked.index] == [r["is_accepted"] for r in alone.index]
    assert [r["num_accepted"] for r in stacked.index] == [r["num_accepted"] for r in alone.index]
    for column in ("loss", "potential", "acceptance_rate"):
        torch.testing.assert_close(stacked.trace(column), alone.trace(column), rtol=1e-6, atol=1e-6)
    assert largest_difference(stacked.chain(1), stacked.chain(2)) > 1e-3
    if "unadjusted" not in name:
        assert 0 < sum(r["num_accepted"] for r in stacked.index) < 3 * 6 * 4


TESTS: dict[str, Any] = {
    "minibatch": {},
    "full data": {"acceptance": FullData(chunk_size=40)},
    "full data, early rejection": {"acceptance": FullData(chunk_size=40, early_rejection=True)},
    "minibatch of its own": {"acceptance": Minibatch(40)},
    "barker": {"acceptance": Barker(30)},
    "sequential": {"acceptance": Sequential(0.1, 30)},
    "confidence": {"acceptance": Confidence(0.5, None, 30)},
    "penalty": {"acceptance": Penalty(40)},
    "tuna": {"acceptance": Tuna(ClampedLoss(2.0), 0.0), "inverse_temperature": 0.3},
}


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("name", ["AdamMCMC", "MALA", "Underdamped"])
def test_on_batches_a_stack_of_one_is_the_chain_alone_and_others_change_nothing(name: str, test: str) -> None:
    sampler = partial(SAMPLERS[name], **TESTS[test])
    model = network(dtype=torch.float64)
    alone = run(model, sampler, num_chains=1, stacked=False, batch_size=32)
    one = run(model, sampler, num_chains=1, batch_size=32)
    many = run(model, sampler, num_chains=4, batch_size=32)
    assert largest_difference(one, alone) < 1e-7
    assert largest_difference(many.chain(0), one) < 1e-7
    assert many.target == alone.target


@pytest.mark.parametrize("name", ["AdamMCMC", "MALA", "unadjusted"])
@pytest.mark.parametrize("batch_size", [None, 32])
def test_every_chain_has_its_own_batch_statistics(name: str, batch_size: int | None) -> None:
    """Weights, running statistics and counts of BatchNorm, which move on acceptance only."""
    model = network(batch_norm=True, dtype=torch.float64)
    alone = run(model, SAMPLERS[name], num_chains=1, stacked=False, batch_size=batch_size)
    many = run(model, SAMPLERS[name], batch_size=batch_size)
    assert largest_difference(many.chain(0), alone) < 1e-7
    last = [many.chain(c)[-1] for c in range(3)]
    assert not torch.equal(last[0]["1.running_mean"], last[1]["1.running_mean"])
    if name != "unadjusted":
        assert len({int(draw["1.num_batches_tracked"]) for draw in last}) > 1, "counts go by acceptance"
    assert "BatchNorm: batch statistics" in many.target


@pytest.mark.parametrize("batch_norm", [False, True])
def test_chains_that_try_on_are_those_of_a_run_one_after_the_other(batch_norm: bool) -> None:
    """With refused trajectories of some chains followed, and buffers of the point where each chain stays."""
    model = network(batch_norm=batch_norm, dtype=torch.float64)
    sampler = partial(Underdamped, step_size=0.25, prior=Gaussian(), num_chances=6)
    many, alone = run(model, sampler), run(model, sampler, stacked=False)
    assert largest_difference(many, alone) < 1e-6
    assert [r["num_accepted"] for r in many.index] == [r["num_accepted"] for r in alone.index]
    last = [[posterior.chain(c)[-1] for c in range(3)] for posterior in (many, alone)]
    gradients = [posterior.summary().num_gradients for posterior in (many, alone)]
    if batch_norm:
        assert all(int(a["1.num_batches_tracked"]) == int(b["1.num_batches_tracked"]) for a, b in zip(*last, strict=True))
        assert gradients[0] > gradients[1] > 3 * 6 * 4, "a stack with buffers evaluates all chains again"
    else:
        assert gradients[0] == pytest.approx(gradients[1], rel=1e-6)
        sums = [r["health"] for r in many.index]
        assert sum(s["accepted"] for s in sums) > 1.05 * sum(s["rate"] for s in sums)  # some are accepted later


def test_by_default_only_chains_that_can_be_evaluated_apart_try_on() -> None:
    sampler = partial(Underdamped, step_size=0.25, prior=Gaussian(), fixed_data=True)
    assert stack_of(network(), sampler).kernel().num_chances > 1
    assert stack_of(network(batch_norm=True), sampler).kernel().num_chances == 1
    assert stack_of(network(batch_norm=True), partial(sampler, num_chances=3)).kernel().num_chances == 3


def test_buffers_are_put_back_on_rejection_chain_by_chain() -> None:
    model = network(batch_norm=True)
    stack = stack_of(model, ALGORITHM_1)
    seen = set()
    for i in range(20):
        before = {name: x.clone() for name, x in stack.draws().items()}
        stack.step((X[i : i + 32], Y[i : i + 32]))
        after = stack.draws()
        for c in range(3):
            is_accepted = bool(stack.info.is_accepted[c])
            seen.add(is_accepted)
            same = [torch.equal(before[name][c], after[name][c]) for name in before]
            assert not any(same) if is_accepted else all(same)
    assert seen == {True, False}


def test_frozen_statistics_stay_as_they_are() -> None:
    model = network(batch_norm=True, dtype=torch.float64)
    model(X.double())
    sampler = partial(ALGORITHM_1, batch_norm="frozen")
    many = run(model, sampler, batch_size=32)
    alone = run(model, sampler, num_chains=1, stacked=False, batch_size=32)
    assert largest_difference(many.chain(0), alone) < 1e-7
    assert all(torch.equal(draw["1.running_mean"], model[1].running_mean) for draw in many)
    full = partial(sampler, acceptance=FullData())
    assert (
        largest_difference(
            run(model, full, batch_size=32).chain(0), run(model, full, num_chains=1, stacked=False, batch_size=32)
        )
        < 1e-7
    )


def test_dropout_has_one_mask_for_both_sides_and_another_for_each_chain() -> None:
    """With steps of length zero, the loss of a chain is the same at both ends of a step, and differs between equal chains."""
    model = network(dropout=0.5)
    made = AdamMCMC(model.named_parameters(), lr=0.0, sigma=1e-30, num_data=96)
    made.parameters.check_noise = lambda sigmas, name: None  # type: ignore[method-assign]
    stack = stack_chains(
        made, model, Loss(F.cross_entropy), [setup_of(made, model)] * 3, streams(range(3), torch.device("cpu"))
    )
    stack.try_out((X, Y))
    losses = []
    for _ in range(5):
        stack.step((X, Y))
        assert torch.equal(stack.info.loss, stack.info.proposed_loss)
        losses.extend(stack.info.loss.tolist())
    assert len(set(losses)) == 15, "a new mask for each step and chain"


def test_dropout_alone_is_dropout_in_a_stack_of_one() -> None:
    model = network(dropout=0.3, dtype=torch.float64)
    alone = run(model, ALGORITHM_1, num_chains=1, stacked=False, batch_size=32)
    assert largest_difference(run(model, ALGORITHM_1, num_chains=1, batch_size=32), alone) < 1e-7


def test_theorem_1_with_a_given_spread() -> None:
    sampler = partial(ExactAdamMCMC, lr=1e-3, sigma=1e-2, sigma_along=1.0, momentum_spread=(0.1, 0.01), prior=Gaussian())
    model = network(dtype=torch.float64)
    assert largest_difference(run(model, sampler), run(model, sampler, stacked=False)) < 1e-7


def test_a_user_written_loss_examples_ties_and_frozen_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
            self.second.weight = self.first.weight
            self.last.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))

    model = Tied().double()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])  # a mean

    starts = []
    for shift in range(2):
        start = copy.deepcopy(model)
        with torch.no_grad():
            start.last.bias += shift
        starts.append(start.state_dict())
    options: dict[str, Any] = {"sampler": ALGORITHM_1, "num_chains": 2, "initial": starts, **SHORT}
    stacked = sample(model, (X.double(), Y), loss, stacked=True, **options)
    alone = sample(model, (X.double(), Y), loss, stacked=False, **options)
    assert largest_difference(stacked, alone) < 1e-7
    assert torch.equal(stacked.chain(1)[0]["last.bias"], starts[1]["last.bias"])
    assert torch.equal(stacked[3]["second.weight"], stacked[3]["first.weight"])

    plain = network(dtype=torch.float64)
    examples = TensorExamples(lambda x, y: F.cross_entropy(plain(x), y, reduction="none"), X.double(), Y)
    own = partial(ALGORITHM_1, acceptance=FullData(), examples=examples)
    built_in = partial(ALGORITHM_1, acceptance=FullData())
    assert largest_difference(run(plain, own, batch_size=32), run(plain, built_in, batch_size=32)) == 0


# --- the potential --------------------------------------------------------------------------------------------------------


class Laplace(Prior):
    """A prior of a user: the gradient by autograd."""

    def log_density(self, params: Any) -> Tensor:
        return -2 * torch.stack([p.abs().sum(dtype=torch.float64) for p in params]).sum()


class Shifted(Gaussian):
    """One that knows its gradient."""

    def log_density(self, params: Any) -> Tensor:
        return super().log_density([p - 1 for p in params])

    def grad(self, params: Any) -> Any:
        return super().grad([p - 1 for p in params])


PRIORS: list[Prior] = [
    Gaussian(0.7),
    Gaussian((0.5, 1.0, 2.0, 0.1)),
    UniformBox(-0.6, 0.6),
    UniformBall(2.3),
    Laplace(),
    Shifted(0.5),
]


@pytest.mark.parametrize("prior", PRIORS, ids=str)
def test_the_target_of_each_chain_is_that_of_a_closure(prior: Prior) -> None:
    model = network(dtype=torch.float64)
    stack = stack_of(model, partial(ALGORITHM_1, prior=prior, inverse_temperature=0.3))
    potential = StackedPotential(stack.stack, (X.double(), Y))
    found = potential.evaluate(stack.stack.params, with_grad=True)
    assert found.grad is not None
    inside = []
    for c in range(3):
        stack.place(c)
        made = partial(ALGORITHM_1, prior=prior, inverse_temperature=0.3)(list(model.named_parameters()), num_data=96)
        packing = made.layout()
        leaves = packing.pack([p.detach() for p in packing.params], packing.new())
        alone = ClosurePotential(
            [lambda: F.cross_entropy(model(X.double()), Y, reduction="none")],
            packing,
            target=made.target,
            examples=None,
            layers=made.network.layers,
            fixed=False,
            name=made.name,
        ).evaluate(leaves, with_grad=True)
        assert alone.grad is not None
        torch.testing.assert_close(found.losses[c], alone.losses[0])
        torch.testing.assert_close(found.log_prior[c], alone.log_prior[0])
        inside.append(bool(alone.log_prior.isfinite()))
        for many, one in zip(found.grad, alone.grad, strict=True):
            torch.testing.assert_close(many[c], one[0])
    assert True in inside
    if prior.is_bounded:
        assert False in inside, "chains on both sides of the edge"


def test_every_chain_has_its_own_temperature_and_settings() -> None:
    """A scan over four options in one stack is the separate runs."""
    model = network(dtype=torch.float64)
    scan = {
        "lr": torch.tensor([1e-3, 3e-3, 0.0]),
        "sigma": torch.tensor([1e-2, 5e-3, 2e-2]),
        "sigma_along": torch.tensor([2.0, 1.0, 0.5]),
        "inverse_temperature": torch.tensor([1.0, 0.3, 0.05]),
    }
    stacked = run(model, partial(ALGORITHM_1, **scan))
    alone = run(model, partial(ALGORITHM_1, **scan), stacked=False)
    assert largest_difference(stacked, alone) < 1e-7
    for posterior in (stacked, alone):
        assert posterior.settings(1) == {"lr": 3e-3, "sigma": 5e-3, "sigma_along": 1.0, "inverse_temperature": 0.3}
        assert posterior.chain(2).settings(2)["sigma"] == 2e-2
        assert "which differ in lr, sigma, sigma_along, inverse_temperature" in posterior.target
    assert stacked.target == alone.target
    one = {name: float(values[1]) for name, values in scan.items()}
    separate = run(model, partial(ALGORITHM_1, **one), num_chains=2, stacked=False)
    torch.testing.assert_close(stacked.chain(1).trace("potential"), separate.chain(1).trace("potential"), rtol=1e-5, atol=1e-5)
    step_sizes = partial(Underdamped, step_size=torch.tensor([1e-2, 2e-2, 3e-2]), prior=Gaussian())
    assert run(model, step_sizes).settings(2) == {"step_size": 3e-2, "inverse_temperature": 1.0}


@pytest.mark.parametrize(
    "sampler",
    [
        partial(MALA, sigma_along=0.7, step_size=1.5e-2),
        partial(Underdamped, step_size=0.15),
        partial(MALA, step_size=1.5e-2, acceptance=FullData()),
    ],
    ids=["MALA", "Underdamped", "FullData"],
)
def test_exact_draws_stay_exact_at_every_temperature(sampler: Any) -> None:
    """Start exact, step, compare: conjugate linear regression, 400 chains at each of three temperatures, in one stack."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 2, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 0.4]).double()
    y = x @ torch.tensor([[1.0], [-0.5]]).double() + 0.7 * torch.randn(40, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    temperatures = [1.0, 0.3, 0.05]
    starts, roots, means = [], [], []
    for inverse_temperature in temperatures:
        precision = inverse_temperature * x.T @ x / 0.7**2 + torch.eye(2, dtype=torch.float64) / 1.5**2
        mean = torch.linalg.solve(precision, inverse_temperature * x.T @ y / 0.7**2).flatten()
        root = torch.linalg.cholesky(precision)
        noise = torch.randn(400, 2, generator=generator, dtype=torch.float64)
        starts += [mean + torch.linalg.solve_triangular(root.T, e[:, None], upper=True).flatten() for e in noise]
        roots.append(root)
        means.append(mean)
    posterior = sample(
        model,
        (x, y),
        GaussianNLL(0.7),
        sampler=partial(sampler, inverse_temperature=torch.tensor(temperatures).repeat_interleave(400)),
        prior=Gaussian(1.5),
        batch_size=20 if "acceptance" in sampler.keywords else None,
        num_chains=1200,
        initial=[{"weight": start[None]} for start in starts],
        num_draws=1,
        gap=40,
        burn_in=0,
        stacked=True,
        progress=False,
    )
    rate = posterior.trace("acceptance_rate").mean()
    assert 0.3 < rate < 0.99
    moved = torch.stack([draw["weight"][0] for draw in posterior])
    assert float((moved - torch.stack(starts)).abs().mean()) > 0.05
    for group, root, mean in zip(moved.view(3, 400, 2), roots, means, strict=True):
        whitened = (group - mean) @ root
        assert min(stats.kstest(whitened[:, i], "norm").pvalue for i in range(2)) > 1e-5


# --- burn-in, health, callbacks, checkpoints --------------------------------------------------------------------------------


def test_burn_in_is_pooled_over_the_chains() -> None:
    posterior = run(network(), None, burn_in=600, num_draws=30, gap=10, num_chains=4)
    assert abs(float(posterior.trace("acceptance_rate").mean()) - 0.85) < 0.08
    adam = run(network(), ALGORITHM_1, burn_in=BurnIn(num_steps=400), num_draws=30, gap=10)
    assert abs(float(adam.trace("acceptance_rate").mean()) - 0.6) < 0.15


def test_health_is_told_chain_by_chain(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_draws": 10, "gap": 40, "burn_in": 100}
    sampler = partial(SAMPLERS["Underdamped"], num_chances=1)  # undisturbed motion magnifies rounding in 500 steps
    stacked = run(network(dtype=torch.float64), sampler, path=tmp_path / "a", **options)
    alone = run(network(dtype=torch.float64), sampler, stacked=False, **options)
    for opened in (stacked, Posterior.open(tmp_path / "a", network(dtype=torch.float64))):
        for many, one in zip(opened.health(), alone.health(), strict=True):
            assert many.num_steps == one.num_steps == 400
            assert many.verdict == one.verdict
            assert many.acceptance == pytest.approx(one.acceptance, abs=1e-6)
            assert many.temperature == pytest.approx(one.temperature, rel=1e-4)
            assert many.temperatures.keys() == one.temperatures.keys()
    assert len({health.acceptance for health in stacked.health()}) == 3
    assert len(stacked.chain(1).health()) == 1


def test_the_noise_of_the_minibatch_test_is_that_of_each_chains_temperature() -> None:
    scan = partial(ALGORITHM_1, inverse_temperature=torch.tensor([1.0, 0.1]))
    options: dict[str, Any] = {"num_chains": 2, "batch_size": 32, "num_draws": 10, "gap": 40}
    hot = run(network(dtype=torch.float64), scan, **options).health()
    alone = run(network(dtype=torch.float64), scan, stacked=False, **options).health()
    assert hot[0].noise == pytest.approx(alone[0].noise, rel=1e-6)
    assert hot[1].noise == pytest.approx(alone[1].noise, rel=0.5), "other batches, the same size"
    assert hot[1].noise < 0.5 * hot[0].noise
    assert hot[0].loss_influence == pytest.approx(alone[0].loss_influence, rel=1e-6)


class Recorder(Callback):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def on_start(self, event: Event) -> None:
        self.told.append(("start", event.chain, event.step))

    def on_step(self, event: Event) -> None:
        assert isinstance(event.sampler.info, Info)
        assert event.sampler.info.loss.shape == ()
        assert event.sampler.num_steps == event.step
        assert 0 <= float(event.sampler.mean_acceptance_rate) <= 1
        weights = dict(event.model.named_parameters())
        assert all(w.isfinite().all() for w in weights.values())
        self.told.append(("step", event.chain, event.step))

    def on_draw(self, event: Event, record: dict[str, Any]) -> None:
        assert record["chain"] == event.chain
        self.first = {name: x.clone() for name, x in event.model.state_dict().items()}
        self.told.append(("draw", event.chain, event.num_draws))

    def on_end(self, event: Event) -> None:
        assert event.sampler.health().num_steps == 24
        assert event.sampler.health_sums()["num_steps"] == 24
        assert event.sampler.describe().endswith("exact")
        self.told.append(("end", event.chain, event.step))


def test_callbacks_see_each_chain_with_its_weights() -> None:
    recorder = Recorder()
    posterior = run(network(), SAMPLERS["Underdamped"], callbacks=[recorder], num_chains=2)
    assert recorder.told[:4] == [("start", 0, 0), ("start", 1, 0), ("step", 0, 1), ("step", 1, 1)]
    assert recorder.told[-2:] == [("end", 0, 29), ("end", 1, 29)]
    assert [t for t in recorder.told if t[0] == "draw"][-1] == ("draw", 1, 6)
    assert all(torch.equal(x, posterior[-1][name]) for name, x in recorder.first.items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_writes_one_run_for_each_chain(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sigmas = torch.tensor([1e-2, 2e-2])
    board = TensorBoard(tmp_path, every=5)
    run(network(), partial(ALGORITHM_1, sigma=sigmas), callbacks=[board], num_chains=2)
    for chain in range(2):
        reader = events.EventAccumulator(str(tmp_path / f"chain-{chain}"))
        reader.Reload()
        assert [event.value for event in reader.Scalars("settings/sigma")] == pytest.approx([float(sigmas[chain])] * 5)


def test_the_store_is_that_of_any_run(tmp_path: Path) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    posterior = run(model, ALGORITHM_1, path=tmp_path / "run")
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items()), "the model is left as it was"
    names = {p.name for p in (tmp_path / "run").iterdir()}
    checkpoints = {"checkpoint.safetensors", "checkpoint.previous.safetensors"}
    assert names == {"chain-0", "chain-1", "chain-2", "lock", "run.json", *checkpoints}
    opened = Posterior.open(tmp_path / "run", network())
    assert largest_difference(opened, posterior) == 0
    assert opened.trace("loss").shape == (3, 6)
    prediction = opened.predict(X)
    assert prediction.mean.shape == (96, 3)
    model.load_state_dict(opened.chain(2)[0])


@pytest.mark.parametrize("keep", ["moments", 2])
def test_moments_are_kept_for_each_chain(keep: Any, tmp_path: Path) -> None:
    everything = run(network(), ALGORITHM_1)
    few = run(network(), ALGORITHM_1, keep=keep, path=tmp_path / "run")
    for part, whole in ((few, everything), (few.chain(1), everything.chain(1))):
        for name, mean in whole.moments().mean.items():
            torch.testing.assert_close(part.moments().mean[name], mean)
    assert len(few) == (0 if keep == "moments" else 6)


def test_a_longer_run_goes_on_where_the_shorter_ended(tmp_path: Path) -> None:
    model = network(batch_norm=True, dropout=0.2)
    whole = run(model, ALGORITHM_1, batch_size=32, num_draws=10)
    run(model, ALGORITHM_1, batch_size=32, num_draws=4, path=tmp_path / "run")
    resumed = run(model, ALGORITHM_1, batch_size=32, num_draws=10, path=tmp_path / "run", resume=True, stacked=None)
    assert largest_difference(whole, resumed) == 0
    with pytest.raises(StoreMismatch, match="has stacked = True, this call has None"):
        run(model, ALGORITHM_1, batch_size=32, num_draws=10, path=tmp_path / "run", resume=True, stacked=False)
    scan = partial(ALGORITHM_1, sigma=torch.tensor([1e-2, 2e-2, 3e-2]))
    with pytest.raises(StoreMismatch, match="has scan = None"):
        run(model, scan, batch_size=32, num_draws=10, path=tmp_path / "run", resume=True)


@pytest.mark.parametrize("rates", [(1e-4, 1e-4, 1e-4), (1e-4, 2e-4, 3e-4)], ids=["common", "of each chain"])
def test_a_loaded_state_is_not_taken_for_the_last_replay(rates: tuple[float, ...]) -> None:
    """At the same number of steps and with equal settings: a graph would step on the old weights."""
    model = network()

    def chains() -> StackedChains:
        samplers = [MALA(model.parameters(), rate, num_data=len(X), prior=Gaussian()) for rate in rates]
        generator = streams([1, 2, 3], torch.device("cpu"))
        return stack_chains(samplers[0], model, losses, [setup_of(s, model) for s in samplers], generator)

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    ours, other = chains(), chains()
    for stack in (ours, other):
        stack.step((X, Y))
    ours.clock_at = ours.num_steps  # as after a replay
    before = ours.token()
    assert before == ours.token()
    ours.load_state_dict(other.state_dict())
    assert before != ours.token()


def test_adam_is_taken_over_by_every_chain() -> None:
    model = network(dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(X.double()), Y).backward()
        optimizer.step()
    stacked = run(model, ALGORITHM_1, warm_start=optimizer)
    alone = run(model, ALGORITHM_1, warm_start=optimizer, stacked=False)
    assert largest_difference(stacked, alone) < 1e-7


def test_a_chain_that_meets_nan_stops_the_run_and_keeps_what_there_is() -> None:
    class Trap(Callback):
        def on_draw(self, event: Event, record: dict[str, Any]) -> None:
            if record["draw"] == 2 and event.chain == 1:
                x[:] = math.nan

    x = X.clone()
    options: dict[str, Any] = {"num_chains": 3, "stacked": True, "batch_size": 32, "callbacks": [Trap()], **SHORT}
    with pytest.raises(NonFiniteLoss, match="of 3 of 3 chains; the first is chain 0, at step") as caught:
        sample(network(), (x, Y), F.cross_entropy, sampler=ALGORITHM_1, **options)
    assert isinstance(caught.value.result, Posterior)
    assert len(caught.value.result) == 9


def test_one_bad_chain_does_not_touch_the_others() -> None:
    stack = stack_of(network(), ALGORITHM_1)
    stack.stack.params[0][1] = math.inf
    stack.step((X, Y))
    assert stack.frozen_at.tolist() == [-1, 0, -1]
    assert all(bool(leaf[0].isfinite().all()) and bool(leaf[2].isfinite().all()) for leaf in stack.stack.params)
    with pytest.raises(NonFiniteLoss, match="1 of 3 chains; the first is chain 1, at step 0"):
        stack.step((X, Y))


# --- what cannot be stacked -------------------------------------------------------------------------------------------------


class Steered(nn.Module):
    """Looks at values to decide what to do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out if float(out.detach().sum()) > 0 else out + 0


class Remembering(nn.Module):
    """Keeps a state that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        out: Tensor = self.linear(x) * (1 + self.count)
        return out


class Lazy(nn.Module):
    """Makes a buffer when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        if not hasattr(self, "scale"):
            self.register_buffer("scale", out.detach().std())
        return out


def sgd(sampler: Any) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(sampler, 0.99)


SIGMAS = torch.tensor([1e-2, 2e-2, 3e-2])
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "values": (Steered, ALGORITHM_1, {}, r"under torch.func.vmap: RuntimeError: vmap: It looks like you're calling \.item"),
    "optimizer": (
        network,
        partial(OptimizerMCMC, optimizer=torch.optim.SGD, lr=1e-2, sigma=1e-2),
        {},
        "the step of OptimizerMCMC is computed for one chain at a time",
    ),
    "scheduler": (network, ALGORITHM_1, {"scheduler": sgd}, "a `scheduler` sets the learning rate of one chain"),
    "spread": (network, partial(ExactAdamMCMC, sigma=1e-2, prior=Gaussian()), {}, "measures its `momentum_spread`"),
    "burn-in": (
        network,
        partial(ALGORITHM_1, sigma=SIGMAS),
        {"burn_in": BurnIn(num_steps=30)},
        "`sigma` differs between the chains, and burn-in would adapt it",
    ),
    "temperature": (
        network,
        partial(Underdamped, prior=Gaussian(), inverse_temperature=SIGMAS),
        {"burn_in": 30},
        "`inverse_temperature` differs between the chains, and burn-in would find one step size",
    ),
    "state": (Remembering, ALGORITHM_1, {}, "does it keep state that is not a buffer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stacked_is_refused_with_the_reason(name: str) -> None:
    make, sampler, options, words = REFUSED[name]
    torch.manual_seed(0)
    with pytest.raises(CannotStack, match=words):
        run(make(), sampler, **options)


@pytest.mark.parametrize("name", ["values", "scheduler", "temperature"])
def test_by_default_it_then_runs_one_after_the_other_and_warns_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, sampler, options, _ = REFUSED[name]
    monkeypatch.setattr("adammcmc.runs.session.prefers_stack", lambda device, model: True)  # as on an accelerator
    torch.manual_seed(0)
    model = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = run(model, sampler, stacked=None, **options)
        alone = run(model, sampler, stacked=False, **options)
    told = [str(w.message) for w in caught if "sequentially" in str(w.message)]
    assert len(told) == 1
    assert "cannot be stacked" in told[0]
    assert "stacked" not in posterior.store.manifest["configuration"]
    assert largest_difference(posterior, alone) == 0


def test_on_an_accelerator_chains_are_stacked_unless_the_model_is_faster_alone() -> None:
    gpu = torch.device("cuda")
    assert prefers_stack(gpu, network())
    assert not prefers_stack(torch.device("cpu"), network())
    assert not prefers_stack(gpu, nn.Sequential(ParticleNetLite()))


def test_on_the_host_chains_run_one_after_the_other_unless_asked() -> None:
    assert "stacked" not in run(network(), ALGORITHM_1, stacked=None).store.manifest["configuration"]
    assert run(network(), ALGORITHM_1).store.manifest["configuration"]["stacked"] is True


def test_layers_that_no_test_of_all_data_can_bear_are_named_as_ever() -> None:
    full = partial(ALGORITHM_1, acceptance=FullData())
    with pytest.raises(PerExampleLossRequired, match="uses the statistics of its batch"):
        run(network(batch_norm=True), full, batch_size=32)
    with pytest.raises(StochasticClosure, match="draws random numbers"):
        run(network(dropout=0.3), full, batch_size=32)
    with pytest.raises(StochasticClosure, match="The cause: '1' \\(Dropout\\)"):
        run(network(dropout=0.3), ALGORITHM_1)


def test_a_buffer_that_comes_up_in_a_forward_is_no_reason_to_fail() -> None:
    torch.manual_seed(0)
    model = Lazy()
    model(X)
    assert len(run(model, ALGORITHM_1)) == 18


@pytest.mark.parametrize("stacked", [True, False])
def test_a_scan_that_does_not_fit_is_named(stacked: bool) -> None:
    with pytest.raises(ValueError, match="`sigma` has 2 values, and `num_chains` is 3"):
        run(network(), partial(ALGORITHM_1, sigma=torch.tensor([1e-2, 2e-2])), stacked=stacked)
    with pytest.raises(ValueError, match=r"`lr` must be a number, or a tensor .* got shape \(3, 1\)"):
        run(network(), partial(ALGORITHM_1, lr=torch.ones(3, 1)), stacked=stacked)
    with pytest.raises(ValueError, match="`sigma` must not be negative"):
        run(network(), partial(ALGORITHM_1, sigma=-SIGMAS), stacked=stacked)
    with pytest.raises(ValueError, match="`inverse_temperature` must be positive"):
        run(network(), partial(ALGORITHM_1, inverse_temperature=torch.zeros(3)), stacked=stacked)


def test_chains_may_differ_in_settings_only() -> None:
    model = network()
    params = list(model.named_parameters())
    plain = ALGORITHM_1(params, num_data=96)
    for name, options in {"betas": {"betas": (0.9, 0.99)}, "eps": {"eps": 1e-3}, "prior": {"prior": Gaussian(2.0)}}.items():
        other = ALGORITHM_1(params, num_data=96, **options)
        setups = [setup_of(plain, model), setup_of(other, model)]
        with pytest.raises(CannotStack, match=f"`{name}` differs between the chains"):
            stack_chains(plain, model, Loss(F.cross_entropy), setups, streams([0, 1], torch.device("cpu")))
