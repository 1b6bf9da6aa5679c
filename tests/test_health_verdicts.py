"""Verdicts on whole runs: sick runs that once passed are found, healthy ones are never called sick."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adammcmc import (
    MALA,
    AdamMCMC,
    AlwaysAccept,
    BurnIn,
    ExactAdamMCMC,
    FullData,
    Gaussian,
    Health,
    Sampler,
    TensorExamples,
    Underdamped,
    UniformBox,
    sample,
)
from adammcmc.posterior.report import write_report
from tests.optimizers import X, Y, network, seeded
from tests.test_health import free, kinds, per_example, run

GENERATOR = torch.Generator().manual_seed(0)
CLASSES = torch.randint(10, (60,), generator=GENERATOR)
IMAGES = torch.randn(10, 1, 8, 8, generator=GENERATOR)[CLASSES] + 0.7 * torch.randn(60, 1, 8, 8, generator=GENERATOR)
UNCORRECTED: dict[str, Any] = {"num_data": 60, "prior": Gaussian(), "acceptance": AlwaysAccept()}


def image_network(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    if kind == "convolution":
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def image_loss(model: nn.Module, rows: Tensor | slice = slice(None)) -> Callable[[], Tensor]:
    return lambda: F.cross_entropy(model(IMAGES[rows]), CLASSES[rows], reduction="none")


# --- sick -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step_size", "num_steps"), [(0.2, 64), (0.2, 250), (1.0, 100)])
@pytest.mark.parametrize("kind", ["convolution", "perceptron"])
def test_an_uncorrected_chain_with_long_steps_has_diverged(kind: str, step_size: float, num_steps: int) -> None:
    """Also where the weights have reached 1e17 and most proposals are not finite: overflowing sums are a finding."""
    model = image_network(kind)
    sampler = Underdamped(model.parameters(), step_size, fixed_data=True, generator=seeded(), **UNCORRECTED)
    health = run(sampler, image_loss(model), num_steps)
    largest = max(float(p.detach().abs().max()) for p in model.parameters())
    assert step_size < 1 or (largest > 1e15 and "proposals are not finite" in health.verdict)
    assert kinds(health) == ["diverged"], health.verdict
    assert health.grade == "sick"
    assert "configurational temperature" in health.verdict
    assert step_size == 1 or "above its start" in health.verdict
    assert "shorten it" in health.verdict


def test_divergence_on_batches_is_seen_in_u_alone() -> None:
    model = image_network("perceptron")
    sampler = Underdamped(model.parameters(), 0.06, generator=seeded(), **UNCORRECTED)
    rows = torch.Generator().manual_seed(0)
    for _ in range(130):
        sampler.step(image_loss(model, torch.randint(60, (20,), generator=rows)))
    assert "above its start" in sampler.health().verdict
    sampler.reset_health()
    for _ in range(130):  # the level at which the chain started outlives the end of burn-in
        sampler.step(image_loss(model, torch.randint(60, (20,), generator=rows)))
    assert kinds(sampler.health()) == ["diverged"]


@pytest.mark.parametrize("step_size", [0.005, 0.02])
def test_a_runaway_downhill_has_diverged(step_size: float) -> None:
    """The sign of the loss is wrong: U falls without end until it overflows, and theta . grad U is far below zero."""
    torch.manual_seed(0)
    x = torch.randn(200, 5)
    y = torch.sin(x[:, :1])
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    options: dict[str, Any] = {"num_data": 200, "prior": Gaussian(), "fixed_data": True, "acceptance": AlwaysAccept()}
    sampler = Underdamped(model.parameters(), step_size, generator=seeded(), **options)
    health = run(sampler, lambda: -(model(x) - y).square()[:, 0], 400)
    assert health.temperature < -1e6
    assert kinds(health) == ["diverged"], health.verdict
    assert "below zero the weights run away downhill" in health.verdict
    sampler.reset_health()
    health = run(sampler, lambda: -(model(x) - y).square()[:, 0], 200)
    assert health.rejected_not_finite == 1
    assert kinds(health) == ["diverged"], health.verdict  # it stands still, because U overflows wherever it goes


@pytest.mark.parametrize("acceptance", [None, AlwaysAccept()])
def test_a_slow_descent_with_a_temperature_below_zero_has_not_diverged(acceptance: Any) -> None:
    """Many data, few weights that are too small, short steps: theta . grad U / P is near -10,000, and U falls all along."""
    p = nn.Parameter(torch.full((10,), 0.1))
    options: dict[str, Any] = {"num_data": 100_000, "prior": Gaussian(), "fixed_data": True, "generator": seeded()}
    sampler = MALA([p], 1e-9, **options, **({} if acceptance is None else {"acceptance": acceptance}))
    health = run(sampler, lambda: 0.5 * (p - 1).square().sum(), 400)
    assert health.temperature < -1000
    assert "diverged" not in kinds(health), health.verdict
    assert "U is still falling" in health.verdict


def test_a_chain_that_stays_far_too_hot_has_diverged() -> None:
    """Unadjusted Langevin on a Gaussian has the temperature 1 / (1 - h / 2): 50, and nothing runs away."""
    p = free(50, 7.0)
    sampler = MALA([p], 1.96, num_data=1, prior=Gaussian(), fixed_data=True, acceptance=AlwaysAccept(), generator=seeded())
    health = run(sampler, lambda: 0.0 * p.sum(), 400)
    assert kinds(health) == ["diverged"]
    assert "configurational temperature" in health.verdict


def test_u_that_is_not_finite_is_a_finding() -> None:
    """After `unfreeze` the sums hold a NaN."""
    p = free(5)
    sampler = MALA([p], 0.3, num_data=1, prior=Gaussian(), fixed_data=True, generator=seeded())
    run(sampler, lambda: 0.0 * p.sum(), 20)
    assert sampler.chains.monitor is not None
    sampler.chains.monitor.steps.sums[0] = torch.nan
    sampler.chains.monitor.trace.sums[0] = torch.nan
    assert not run(sampler, lambda: 0.0 * p.sum(), 300).is_healthy


def test_a_descending_chain_has_not_diverged_and_its_trend_is_reported() -> None:
    """Temperature 64, but it comes down: from a bad start."""
    p = nn.Parameter(torch.full((300,), 8.0))
    health = run(MALA([p], 2e-4, num_data=1, prior=Gaussian(), fixed_data=True), lambda: 0.0 * p.sum(), 500)
    assert "diverged" not in kinds(health)
    assert "U is still falling: by" in health.verdict
    assert "standard deviations) from the first third" in health.verdict
    assert health.effective_draws < 4


def test_a_climb_from_the_optimum_is_no_divergence() -> None:
    """The typical set lies P / 2 above, also for an approximate kernel."""
    p = nn.Parameter(torch.zeros(1000))
    sampler = MALA([p], 0.01, num_data=1, prior=Gaussian(), fixed_data=True, acceptance=AlwaysAccept(), generator=seeded())
    health = run(sampler, lambda: 0.5 * p.square().sum(), 200)
    assert health.grade != "sick", health.verdict
    assert "U is still rising: by" in health.verdict


def diverged_run() -> Any:
    sampler = partial(Underdamped, step_size=0.2, prior=Gaussian(), acceptance=AlwaysAccept())
    options: dict[str, Any] = {"num_draws": 12, "gap": 5, "burn_in": 60, "seed": 0, "progress": False}
    return sample(image_network("perceptron"), (IMAGES, CLASSES), F.cross_entropy, sampler=sampler, **options)


def test_divergence_reaches_posterior_summary_and_report(tmp_path: Any) -> None:
    posterior = diverged_run()
    assert [health.grade for health in posterior.health()] == ["sick"]
    assert "diverged:" in str(posterior)
    summary = posterior.summary()
    assert summary.grade == "sick"
    assert summary.findings[0].kind in ("not finite", "diverged")
    assert "Do not trust these draws" in write_report(posterior, tmp_path / "page.html", progress=False).read_text("utf-8")


class Slow:
    """A loss whose scale grows a little with every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return (1 + self.calls / 2000) * (outputs - targets).square().sum(1)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_loss_that_changes_during_the_run_is_not_fixed(stacked: bool) -> None:
    """Two calls in a row agree to a hundredth of a nat."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    options: dict[str, Any] = {
        "num_draws": 20,
        "gap": 10,
        "burn_in": 50,
        "progress": False,
        "stacked": stacked,
        "num_chains": 2,
    }
    sampler = partial(MALA, step_size=1e-3, prior=Gaussian())
    changing = sample(model, (INPUTS, 0.1 * VALUES), Slow(), sampler=sampler, **options).summary()
    assert changing.findings[0].kind == "not fixed"
    assert "the loss has changed during the run, by up to" in changing.verdict
    assert changing.grade == "sick"
    fixed = sample(model, (INPUTS, VALUES), squares, sampler=sampler, **options)
    assert all("not fixed" not in kinds(health) for health in fixed.health())


@pytest.mark.slow  # that of densities, in test_draws.py, is not
def test_chains_that_start_close_together_prove_little() -> None:
    """At almost the same weights, not at the same."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    near = [{name: x + 1e-3 * torch.randn_like(x) for name, x in model.state_dict().items()} for _ in range(4)]
    apart = [{name: torch.randn_like(x) for name, x in model.state_dict().items()} for _ in range(4)]
    options: dict[str, Any] = {"num_draws": 500, "gap": 10, "burn_in": 600, "progress": False, "stacked": True, "num_chains": 4}
    found = {}
    for name, initial in (("near", near), ("apart", apart)):
        posterior = sample(model, (INPUTS, VALUES), squares, prior=Gaussian(), initial=initial, **options)
        found[name] = posterior.summary(INPUTS)
    assert found["apart"].grade == "sound", found["apart"].verdict
    assert [finding.kind for finding in found["near"].findings] == ["one start"]
    assert "started close together (the spread of their weights was 0.0" in found["near"].verdict


def test_an_approximate_kernel_is_never_called_healthy() -> None:
    """A small bias passes every self-test of a short run."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    options: dict[str, Any] = {"num_data": 80, "prior": Gaussian(), "fixed_data": True, "generator": seeded()}
    sampler = AdamMCMC(model.parameters(), lr=1e-3, sigma=0.06, sigma_along=0.0, **options)
    health = run(sampler, lambda: squares(model(INPUTS), VALUES), 2500)
    assert kinds(health) == ["approximate"], health.verdict
    assert health.grade == "undecided"


def test_a_loss_that_is_nan_in_places_is_undefined() -> None:
    p = free(5, 0.5)
    sampler = MALA([p], 0.1, num_data=1, prior=Gaussian(), fixed_data=True, generator=seeded())
    health = run(sampler, lambda: p.square().sum() + 0 * (p[0] + 0.8).log(), 2500)
    assert kinds(health) == ["undefined"]
    assert "U is not finite at 0.0" in health.verdict
    assert health.grade == "undecided"


def test_a_loss_that_compares_all_examples_with_all_is_refused() -> None:
    """Outputs and targets have the same shape, (80, 1), and the loss drops the last axis of one of them."""
    options: dict[str, Any] = {"num_draws": 2, "gap": 1, "burn_in": 0, "progress": False}
    sampler = partial(MALA, step_size=1e-3, prior=Gaussian())
    losses = [
        lambda outputs, targets: (outputs - targets[:, 0]).square(),
        lambda model, batch: (model(batch[0]) - batch[1][:, 0]).square(),
    ]
    for loss in losses:
        with pytest.raises(
            ValueError, match=r"losses of shape \(80, 80\) for a batch of 80 examples: it compared every output"
        ):
            sample(nn.Linear(4, 1), (INPUTS, VALUES), loss, sampler=sampler, **options)
    several = partial(sample, nn.Linear(4, 1), (INPUTS, VALUES), sampler=sampler, **options)
    several(lambda outputs, targets: (outputs - targets - torch.linspace(-1, 1, 7)).square())  # seven losses of each example


def test_a_batch_larger_than_the_data_set_is_refused() -> None:
    """The number of batches was passed as `num_data`."""
    model = nn.Linear(4, 1)
    sampler = AdamMCMC(model.parameters(), lr=1e-3, sigma=1e-2, num_data=8)
    with pytest.raises(ValueError, match="a batch has 10 examples, but `num_data` is 8: it must be the number of examples"):
        sampler.step(lambda: squares(model(INPUTS[:10]), VALUES[:10]))


# --- burn-in --------------------------------------------------------------------------------------------------------


def test_a_failed_burn_in_is_not_forgotten() -> None:
    model = network()
    options: dict[str, Any] = {"num_data": 64, "prior": Gaussian(), "fixed_data": True, "generator": seeded()}
    sampler = Underdamped(model.parameters(), 1e-5, burn_in=BurnIn(max_steps=40, window=10), **options)
    with pytest.warns(UserWarning, match="while U was still moving"):
        run(sampler, per_example(model), 100)
    health = sampler.health()
    assert "burn-in" in kinds(health)
    assert "not from the target yet" in health.verdict
    assert health.grade == "undecided"
    again = Underdamped(model.parameters(), 1e-5, burn_in=BurnIn(), **options)
    again.load_state_dict(sampler.state_dict())
    assert kinds(again.health()) == kinds(health)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_failed_burn_in_is_in_the_posterior_and_its_summary(stacked: bool) -> None:
    options: dict[str, Any] = {"num_draws": 5, "gap": 4, "progress": False, "num_chains": 2, "stacked": stacked}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        burn_in = BurnIn(max_steps=40, window=10)
        posterior = sample(
            network(), (X, Y), F.cross_entropy, sampler=partial(Underdamped, step_size=1e-5), burn_in=burn_in, **options
        )
    assert all("burn-in" in kinds(health) for health in posterior.health())
    assert any(finding.kind == "burn-in" for finding in posterior.summary().findings)


@pytest.mark.filterwarnings("ignore:U is known")  # of the frozen chain, whose loss is 2e10
def test_a_frozen_chain_of_a_stack_is_stuck() -> None:
    """One of twelve chains starts where every proposal is rejected."""

    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return (0.0 * x[:, 0] + 1) * self.w.pow(4).sum()

    starts = [{"w": torch.full((3,), at)} for at in (*[0.5] * 5, 300.0, *[-0.5] * 6)]
    options: dict[str, Any] = {"num_draws": 10, "gap": 10, "progress": False, "stacked": True, "num_chains": 12}
    data = torch.zeros(4, 1), torch.zeros(4)
    with pytest.warns(UserWarning, match=r"1 of 12 chains do not move at the end of burn-in: 5\. Their acceptance is below"):
        posterior = sample(
            Steep(), data, lambda out, _: out, sampler=partial(Underdamped, step_size=0.01, prior=Gaussian()),
            burn_in=BurnIn(num_steps=200), initial=starts, **options,
        )  # fmt: skip
    assert [health.grade == "sick" for health in posterior.health()] == [chain == 5 for chain in range(12)]
    assert kinds(posterior.health()[5]) == ["stuck"]


@pytest.mark.parametrize("prior", [Gaussian(), UniformBox(-5.0, 5.0)])
def test_non_finite_proposals_are_distinguished_from_the_edge_of_the_prior(prior: Any) -> None:
    """A Gaussian has no edge."""
    p = free(20)
    sampler = MALA([p], 1.0, num_data=1, prior=prior, fixed_data=True, generator=seeded())
    start = p.detach().clone()
    health = run(sampler, lambda: torch.where((p == start).all(), 0.0 * p.sum(), torch.inf), 220)
    assert kinds(health) == ["stuck"]
    assert ("outside the prior" in health.verdict) == (not isinstance(prior, Gaussian))
    assert ("U is not finite for nearly all proposals" in health.verdict) == isinstance(prior, Gaussian)


@pytest.mark.parametrize("stacked", [True, False])
def test_reduced_precision_has_no_temperature_and_a_coarse_u_is_reported(stacked: bool) -> None:
    """Gradients are noisy there, and decisions are wrong by the rounding of U."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(batch[0])
        return F.cross_entropy(outputs.float(), batch[1])

    options: dict[str, Any] = {"num_draws": 34, "gap": 10, "progress": False, "num_chains": 2, "stacked": stacked, "burn_in": 0}
    sampler = partial(Underdamped, step_size=1e-4, prior=Gaussian(), inverse_temperature=1000.0)
    with pytest.warns(UserWarning, match="U is known to about"):
        posterior = sample(network(), (X, Y), loss, sampler=sampler, **options)
    for health in posterior.health():
        assert torch.tensor(health.temperature).isnan()
        assert "diverged" not in kinds(health)
        assert "untested: U is known to about" in health.verdict
        assert "(bfloat16 arithmetic in the loss)" in health.verdict


# --- healthy --------------------------------------------------------------------------------------------------------

INPUTS = torch.randn(80, 4, generator=GENERATOR)
LABELS = (INPUTS[:, 0] + 0.5 * torch.randn(80, generator=GENERATOR) > 0).long()
VALUES = INPUTS[:, :1] + 0.5 * torch.randn(80, 1, generator=GENERATOR)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return 2 * (outputs - targets).square().sum(1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, Callable[[Tensor, Tensor], Tensor]]] = {
    "logistic": (lambda: nn.Linear(4, 2), LABELS, partial(F.cross_entropy, reduction="none")),
    "linear": (lambda: nn.Linear(4, 1), VALUES, squares),
    "network": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), VALUES, squares),
}


def _exact_adam(params: Any, *, examples: Any, **options: Any) -> Sampler:
    return ExactAdamMCMC(params, **options)


KERNELS: dict[str, Callable[..., Sampler]] = {
    "underdamped": partial(Underdamped, step_size=0.03, fixed_data=True),
    "mala": partial(MALA, step_size=5e-4, fixed_data=True),
    "exact adam": partial(_exact_adam, lr=1e-2, sigma=3e-2, sigma_along=1.0, fixed_data=True),
    "full data": partial(Underdamped, step_size=0.03, acceptance=FullData()),
    "early rejection": partial(MALA, step_size=5e-4, acceptance=FullData(early_rejection=True)),
    "early rejection in chunks": partial(MALA, step_size=5e-4, acceptance=FullData(20, early_rejection=True)),
}


def healthy_run(name: str, kernel: str, start: str, seed: int, lengths: tuple[int, ...]) -> list[Health]:
    """The health of an exact run, from an optimum or from the prior, after these numbers of steps."""
    make, targets, loss = MODELS[name]
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 1)
    if start == "optimum":
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        for _ in range(60):
            optimizer.zero_grad()
            loss(model(INPUTS), targets).mean().backward()
            optimizer.step()
    examples = TensorExamples(lambda x, y: loss(model(x), y), INPUTS, targets)
    sampler = KERNELS[kernel](model.parameters(), num_data=80, prior=Gaussian(), examples=examples, generator=seeded(seed))
    rows = torch.Generator().manual_seed(seed)
    found = []
    for step in range(1, max(lengths) + 1):
        chosen = slice(None) if sampler.fixed_data else torch.randint(80, (30,), generator=rows)
        sampler.step(lambda: loss(model(INPUTS[chosen]), targets[chosen]))  # noqa: B023
        if step in lengths:
            found.append(sampler.health())
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_exact_run_is_never_called_sick(kernel: str, name: str) -> None:
    start = "optimum" if (list(KERNELS).index(kernel) + list(MODELS).index(name)) % 2 else "prior"
    for health in healthy_run(name, kernel, start, 0, (48, 210)):
        assert health.grade != "sick", health.verdict
        assert "unknown noise" not in kinds(health)
        assert health.is_healthy or health.num_steps < 200 or "cannot tell" in kinds(health)


def test_few_steps_on_batches_are_not_called_healthy() -> None:
    """U was only estimated, the kernel is approximate, and no temperature is known yet: none is printed."""
    model = network()
    sampler = AdamMCMC(
        model.parameters(), lr=1e-4, num_data=64, sigma=1e-3, sigma_along=2.0, prior=Gaussian(), generator=seeded()
    )
    rows = torch.Generator().manual_seed(0)
    for _ in range(225):
        sampler.step(per_example(model, torch.randperm(64, generator=rows)[:60]))
    health = sampler.health()
    assert "no complaint" not in health.verdict
    assert "temperature 0.00" not in health.verdict
    assert "cannot tell" in kinds(health), health.verdict


def test_stacked_chains_learn_a_kronecker_metric() -> None:
    options: dict[str, Any] = {"num_draws": 4, "gap": 2, "burn_in": 300, "progress": False, "num_chains": 2, "stacked": True}
    sampler = partial(Underdamped, preconditioner="kron", prior=Gaussian())
    posterior = sample(network(), (X, Y), F.cross_entropy, sampler=sampler, **options)
    assert 0.5 < float(posterior.trace("acceptance_rate").mean()) < 1
