"""The tests on subsamples in the optimizer API: closures, examples, control variates, what is refused."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adammcmc import (
    MALA,
    AdamMCMC,
    Barker,
    Confidence,
    FullData,
    Gaussian,
    Minibatch,
    Penalty,
    PerExampleLossRequired,
    Sequential,
    StochasticClosure,
    TensorExamples,
    Tuna,
    Underdamped,
    sample,
)
from adammcmc.acceptance import ClampedLoss, DerivativeBound, beta_eff, last_layer_bound, logistic_bound
from tests.optimizers import OPTIMIZERS, X, Y, closure, mala, network, same, seeded, weights


def examples(model: nn.Module) -> TensorExamples:
    dtype = next(model.parameters()).dtype
    return TensorExamples(lambda x, y: F.cross_entropy(model(x.to(dtype)), y, reduction="none"), X, Y)


def losses(model: nn.Module, rows: slice = slice(None)) -> Any:
    dtype = next(model.parameters()).dtype
    return lambda: F.cross_entropy(model(X[rows].to(dtype)), Y[rows], reduction="none")


CHOOSY: dict[str, Any] = {
    "minibatch": Minibatch(20),
    "penalty": Penalty(20),
    "barker": Barker(30),
    "sequential": Sequential(0.1, 30),
    "confidence": Confidence(0.5, None, 10),
    "tuna": Tuna(ClampedLoss(3.0), 0.0),
}


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "ExactAdamMCMC"])
@pytest.mark.parametrize("name", CHOOSY)
def test_every_test_runs_with_every_optimizer(name: str, optimizer: str) -> None:
    model = network(torch.float64)
    options = {"inverse_temperature": 0.5, "acceptance": CHOOSY[name], "examples": examples(model)}
    if name == "tuna":  # no loss moves by as much as 3, and L must be small
        options["inverse_temperature"] = 0.05
    sampler = OPTIMIZERS[optimizer](model, **options)
    before, used = weights(model), []
    for k in range(12):
        rows = slice(k % 4 * 16, k % 4 * 16 + 16)
        sampler.step(closure(model, rows))
        used.append(float(sampler.info.num_examples))
        assert math.isfinite(float(sampler.info.log_ratio))
    assert not same(before, weights(model))
    assert all(0 <= u <= 2 * 64 for u in used)
    assert max(used) > 0
    described = sampler.describe()
    assert str(CHOOSY[name]) in described
    if name != "tuna":
        assert "approximate: " in described


def test_beta_eff_is_told_live_by_plain_tests_only() -> None:
    model = network(torch.float64)
    for test in (Minibatch(), Minibatch(20), Penalty(), Barker(30)):
        sampler = mala(model, acceptance=test, examples=examples(model))
        sampler.step(losses(model, slice(0, 32)))
        s = sampler.info.log_ratio_noise
        if isinstance(test, Minibatch):
            assert 0 < float(sampler.beta_eff) < 1
            assert float(sampler.beta_eff) == float(beta_eff(s))
        else:
            assert math.isnan(float(sampler.beta_eff))


def test_penalty_takes_the_losses_of_the_closure() -> None:
    model = network(torch.float64)
    sampler = mala(model, acceptance=Penalty())
    sampler.step(losses(model, slice(0, 32)))
    s = float(sampler.info.log_ratio_noise)
    assert s > 0
    assert float(sampler.info.num_examples) == 32
    assert float(sampler.info.acceptance_rate) == pytest.approx(min(1.0, math.exp(float(sampler.info.log_ratio) - s**2 / 2)))
    with pytest.raises(PerExampleLossRequired, match="returned only the mean loss"):
        sampler.step(closure(model, slice(0, 32)))


def test_without_examples_a_door_says_what_is_missing_and_keeps_the_weights() -> None:
    model = network(torch.float64)
    for test in CHOOSY.values():
        sampler = mala(model, acceptance=test)
        before = weights(model)
        with pytest.raises(PerExampleLossRequired, match="TensorExamples"):
            sampler.step(closure(model, slice(0, 16)))
        assert same(before, weights(model))


def test_all_data_need_no_examples() -> None:
    for test in (*CHOOSY.values(), Barker()):
        model = network(torch.float64)
        sampler = mala(model, acceptance=test, fixed_data=True)
        for _ in range(3):
            sampler.step(losses(model))
        assert "exact" in sampler.describe()
        assert "approximate" not in sampler.describe()
        assert float(sampler.info.num_examples) == 64


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (nn.BatchNorm1d(16), PerExampleLossRequired, "uses the statistics of its batch"),
        (nn.Dropout(0.5), StochasticClosure, "draws random numbers"),
    ],
)
def test_layers_that_tie_examples_together_are_refused(layer: nn.Module, error: type[Exception], message: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), layer, nn.Tanh(), nn.Linear(16, 3)).double()
    sampler = mala(model, acceptance=Barker(30), examples=examples(model))
    before = weights(model)
    with pytest.raises(error, match=message):
        sampler.step(closure(model, slice(0, 32)))
    assert same(before, weights(model))
    model.eval()
    sampler.step(closure(model, slice(0, 32)))


def test_a_loss_that_looks_at_its_company_is_refused() -> None:
    model = network(torch.float64)

    def centred(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        values = F.cross_entropy(model(x.double()), y, reduction="none")
        return values - 0.5 * values.mean()

    sampler = mala(model, acceptance=Barker(30), examples=TensorExamples(centred, X, Y))
    with pytest.raises(PerExampleLossRequired, match="depends on the examples that it is evaluated with"):
        sampler.step(closure(model, slice(0, 32)))


def test_burn_in_with_barker_reaches_a_rate_that_barker_has() -> None:
    model = network(torch.float64)
    sampler = Underdamped(
        model.parameters(), num_data=64, prior=Gaussian(), acceptance=Barker(30), examples=examples(model), burn_in=150,
        generator=seeded(),
    )  # fmt: skip
    for k in range(150):
        sampler.step(closure(model, slice(k % 2 * 32, k % 2 * 32 + 32)))
    assert not sampler.is_adapting
    assert sampler.chains.adaptation is not None
    assert sampler.chains.adaptation.target == pytest.approx(Barker().rate_like(0.85))


def test_health_does_not_take_corrected_noise_for_heat() -> None:
    model = network(torch.float64)
    kinds = {}
    for name, test in {"plain": Minibatch(16), "penalty": Penalty(16), "barker": Barker(30)}.items():
        sampler = mala(model, step_size=2e-2, acceptance=test, examples=examples(model))
        for k in range(220):
            sampler.step(closure(model, slice(k % 2 * 32, k % 2 * 32 + 32)))
        health = sampler.health()
        kinds[name] = {finding.kind for finding in health.findings}
        assert health.noise > 0.3 or name == "barker"  # of so few examples it takes all
        assert math.isnan(health.beta_eff) == (name != "plain")
    assert "too hot" in kinds["plain"]
    assert not {"too hot", "unknown noise", "not at rest", "biased"} & (kinds["penalty"] | kinds["barker"])


# --- the last layer, exactly ---------------------------------------------------------------------------------------------


def test_the_last_layer_with_tuna_takes_few_examples_and_never_breaks_its_bound() -> None:
    """It accepts about as often as the full data do, from fewer examples. (That Tuna is exact: tests of DataDensity.)"""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(5, 16), nn.Tanh()).double(), nn.Linear(16, 3).double()
    with torch.no_grad():
        features = body(X.double())
    bound = last_layer_bound(features)

    def run(test: Any, seed: int) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        head.reset_parameters()
        known = TensorExamples(lambda h, y: F.cross_entropy(head(h), y, reduction="none"), features, Y)
        sampler = MALA(
            head.parameters(), 1e-4, sigma=6e-3, num_data=64, prior=Gaussian(0.3), acceptance=test, examples=known,
            inverse_temperature=0.5, generator=seeded(seed),
        )  # fmt: skip
        used, accepted = [], []
        for k in range(300):
            rows = slice(k % 4 * 16, k % 4 * 16 + 16)
            sampler.step(lambda rows=rows: F.cross_entropy(head(features[rows]), Y[rows]))
            used.append(float(sampler.info.num_examples))
            accepted.append(float(sampler.info.is_accepted))
        return used, accepted

    used, accepted = run(Tuna(bound, 0.1), 1)  # a broken bound would warn, and a warning is an error here
    assert sum(used) < 0.5 * 64 * len(used)
    _, full = run(FullData(), 2)
    assert 0.8 * sum(full) < sum(accepted) < 1.1 * sum(full)


# --- control variates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2])
def test_the_control_variate_of_a_network_has_its_derivatives_at_the_reference(order: int) -> None:
    model = network(torch.float64)
    sampler = mala(model, acceptance=Minibatch(10), examples=examples(model))
    sampler.use_control_variate(order)
    reference = copy.deepcopy(model)
    packing = sampler.layout()
    potential = sampler.network.potential([closure(model)], None, None)
    generator = torch.Generator().manual_seed(0)
    moves = [[p.detach() + 0.1 * torch.randn(p.shape, generator=generator) for p in model.parameters()] for _ in range(2)]
    here, there = (packing.join(move) for move in moves)
    rows = torch.tensor([[3, 60, 0, 17]])
    assert potential.control is not None
    known = potential.control.differences(here, there, rows)
    for i, row in enumerate(rows[0].tolist()):
        loss = F.cross_entropy(reference(X[row : row + 1].double()), Y[row : row + 1])
        points = list(reference.parameters())
        grads = torch.autograd.grad(loss, points, create_graph=True)
        slope = sum((g * (b - a)).sum() for g, a, b in zip(grads, *moves, strict=True))
        expected = float(slope.detach())
        if order == 2:
            bends = torch.autograd.grad(slope, points)
            expected += 0.5 * sum(
                float((h * (a + b - 2 * r.detach())).sum()) for h, a, b, r in zip(bends, *moves, points, strict=True)
            )
        assert float(known[0, i]) == pytest.approx(expected, rel=1e-9)
    everything = potential.control.differences(here, there, slice(0, 64)).sum()
    assert float(potential.control.total(here, there)) == pytest.approx(float(everything), rel=1e-9)


def test_near_its_reference_a_network_needs_fewer_examples() -> None:
    noise = []
    for uses in (False, True):
        model = network(torch.float64)
        sampler = mala(model, step_size=1e-5, acceptance=Minibatch(20), examples=examples(model))
        if uses:
            sampler.use_control_variate()
        before = weights(model)
        for k in range(10):
            sampler.step(closure(model, slice(k % 2 * 32, k % 2 * 32 + 32)))
        assert not same(before, weights(model))
        noise.append(float(sampler.info.log_ratio_noise))
    assert noise[1] < 0.3 * noise[0]


@pytest.mark.parametrize("order", [1, 2])
def test_a_saved_sampler_goes_on_bit_for_bit_with_its_control_variate(order: int) -> None:
    def steps(sampler: MALA, model: nn.Module, count: int) -> None:
        for k in range(count):
            sampler.step(closure(model, slice(k % 2 * 32, k % 2 * 32 + 32)))

    def new() -> tuple[MALA, nn.Module]:
        model = network(torch.float64)
        return mala(model, acceptance=Barker(30), examples=examples(model)), model

    first, model = new()
    steps(first, model, 4)
    first.use_control_variate(order)
    steps(first, model, 4)
    file = io.BytesIO()
    torch.save((first.state_dict(), model.state_dict()), file)
    steps(first, model, 6)
    file.seek(0)
    second, other = new()
    state, parameters = torch.load(file)
    other.load_state_dict(parameters)
    second.load_state_dict(state)
    steps(second, other, 6)
    assert same(weights(model), weights(other))


def test_a_control_variate_without_examples_is_refused() -> None:
    with pytest.raises(PerExampleLossRequired, match="needs per-example losses"):
        mala(network(), acceptance=Barker(30)).use_control_variate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acceptance": Minibatch()}, r"would do nothing here \(Metropolis on the batch\): it is for tests that choose"),
        ({"acceptance": Penalty()}, "would do nothing"),
        ({"acceptance": FullData()}, "would do nothing"),
        ({"acceptance": Barker(30), "fixed_data": True}, r"would do nothing here \(fixed data\)"),
    ],
    ids=str,
)
def test_a_control_variate_that_nothing_would_use_is_refused(options: dict[str, Any], message: str) -> None:
    model = network()
    with pytest.raises(ValueError, match=message):
        mala(model, examples=examples(model), **options).use_control_variate()


def test_the_hessian_of_a_large_network_is_refused() -> None:
    model = network(width=300)
    sampler = mala(model, acceptance=Barker(30), examples=examples(model))
    with pytest.raises(ValueError, match=r"stores the Hessian of 2703 parameters; the limit is 2000\. Use order=1"):
        sampler.use_control_variate(2)
    with pytest.raises(ValueError, match="`order` must be 1 or 2, got 3"):
        sampler.use_control_variate(3)


class Line:
    """A logistic regression with one weight, the truth by quadrature, and its sampler: a random walk with a bound."""

    def __init__(self, bound_order: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(200, 1, dtype=torch.float64, generator=generator)
        self.y = torch.where(torch.rand(200, generator=generator) < torch.sigmoid(1.5 * self.x[:, 0]), 1.0, -1.0).double()
        grid = torch.linspace(-1, 5, 3001, dtype=torch.float64)
        level = -F.softplus(-self.y * self.x[:, 0] * grid[:, None]).sum(1) - grid.square() / 2
        weight = torch.softmax(level, 0)
        self.mean = float((weight * grid).sum())
        self.sd = float((weight * (grid - self.mean).square()).sum().sqrt())
        self.model = nn.Linear(1, 1, bias=False).double()
        nn.init.constant_(self.model.weight, self.mean + 0.5 * self.sd)  # not the mode, on purpose
        self.sampler = AdamMCMC(
            self.model.parameters(),
            lr=0.0,
            sigma=2.4 * self.sd,
            num_data=200,
            prior=Gaussian(),
            acceptance=Tuna(logistic_bound(self.x, bound_order)),
            examples=TensorExamples(self.losses, self.x, self.y),
            generator=seeded(),
        )

    def losses(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.softplus(-y * self.model(x)[:, 0])

    def step(self) -> float:
        self.sampler.step(lambda: self.losses(self.x[:1], self.y[:1]))
        return float(self.model.weight.detach())


@pytest.mark.parametrize("order", [1, 2])
def test_tuna_with_a_control_variate_has_the_exact_law_in_the_optimizer_s_door(order: int) -> None:
    """Mean and variance against quadrature, with errors from batch means; an example breaks no bound, or it would warn."""
    line = Line(order)
    line.sampler.use_control_variate(order)
    draws, used = [], []
    for _ in range(1600):
        draws.append(line.step())
        used.append(float(line.sampler.info.num_examples))
    z = (torch.tensor(draws, dtype=torch.float64) - line.mean) / line.sd
    for values, truth in ((z, 0.0), (z.square(), 1.0)):
        means = values.view(40, -1).mean(1)
        assert abs(float(means.mean()) - truth) < 4.5 * float(means.std()) / math.sqrt(40)
        assert float(means.std()) / math.sqrt(40) < 0.1
    assert sum(used) / len(used) < {1: 60, 2: 10}[order]
    assert len(line.sampler.approximations()) == 1  # (that of Adam's moments, which do nothing at lr = 0)


@pytest.mark.parametrize(("bound_order", "order"), [(2, 1), (1, 2), (0, 1), (1, None)])
def test_a_bound_for_another_control_variate_is_refused(bound_order: int, order: int | None) -> None:
    line = Line(bound_order)
    if order is not None:
        line.sampler.use_control_variate(order)
    before = weights(line.model)
    with pytest.raises(ValueError, match=f"the bound is for a control variate of order {bound_order}"):
        line.step()
    assert same(before, weights(line.model))


def test_sample_takes_the_control_variate_of_a_factory(tmp_path: Path) -> None:
    """Expanded where the model came in, for each chain; a run that stopped goes on bit for bit; a stack has none."""
    made: list[MALA] = []

    def near(params: Any, num_data: int, generator: torch.Generator, examples: Any) -> MALA:
        sampler = MALA(
            params, 1e-4, num_data=num_data, prior=Gaussian(), acceptance=Barker(30), examples=examples, generator=generator
        )
        sampler.use_control_variate()
        made.append(sampler)
        return sampler

    def run(num_draws: int, **options: Any) -> Any:
        settings = {"batch_size": 16, "burn_in": 2, "gap": 2, "num_chains": 2, "progress": False, "stacked": False}
        return sample(network(), (X, Y), F.cross_entropy, sampler=near, num_draws=num_draws, **(settings | options))

    whole = run(6)
    start = list(network().parameters())
    used = [sampler.reference for sampler in made if sampler.num_steps > 0]
    assert len(used) == 2
    for reference in used:
        assert reference is not None
        assert all(torch.equal(a, b) for a, b in zip(reference.params, start, strict=True))
    run(3, path=tmp_path)
    again = run(6, path=tmp_path, resume=True)
    for a, b in zip(whole, again, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(ValueError, match=r"a control variate is expanded for one chain at a time\. Pass stacked=False"):
        run(2, stacked=True)


def test_sample_gives_the_examples_to_the_tests_that_choose_them() -> None:
    import functools

    for test in (Barker(30), Sequential(0.1, 30)):
        sampler = functools.partial(MALA, step_size=1e-3, prior=Gaussian(), acceptance=test)
        posterior = sample(
            network(), (X, Y), F.cross_entropy, sampler=sampler, batch_size=16, num_draws=4, burn_in=2, gap=2, num_chains=2,
            progress=False,
        )  # fmt: skip
        assert len(posterior) == 8
        assert str(test) in posterior.target


def test_a_control_variate_of_a_network_with_running_statistics() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(120, 3), torch.randint(2, (120,))
    model(x)
    model.eval()

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    sampler = MALA(
        model.parameters(),
        1e-4,
        num_data=120,
        prior=Gaussian(),
        acceptance=Penalty(60),
        examples=TensorExamples(losses, x, y),
    )
    statistics = model[1].running_mean.clone()
    sampler.use_control_variate()
    noises = []
    for _ in range(20):
        sampler.step(lambda: losses(x[:30], y[:30]))
        noises.append(float(sampler.info.log_ratio_noise))
    assert torch.equal(model[1].running_mean, statistics)
    assert max(noises) < 0.15


@pytest.mark.parametrize("test", [FullData(), Barker(30), Penalty(30)], ids=str)
def test_losses_of_examples_in_low_precision_are_refused(test: Any) -> None:
    model = nn.Linear(3, 2)
    x, y = torch.randn(60, 3), torch.randint(2, (60,))
    examples = TensorExamples(lambda x, y: F.cross_entropy(model(x), y, reduction="none").bfloat16(), x, y)
    sampler = MALA(model.parameters(), 1e-3, num_data=60, prior=Gaussian(), acceptance=test, examples=examples)
    with pytest.raises(TypeError, match="would swamp the acceptance ratio"):
        sampler.step(lambda: F.cross_entropy(model(x), y))


def _steps(sampler: MALA, closure: Any) -> None:
    for _ in range(30):
        sampler.step(closure)


def test_a_broken_bound_is_said_wherever_one_looks_and_stays_so() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(16, 3), torch.randn(64, 16), torch.randint(3, (64,))

    def sampler(model: nn.Module) -> MALA:
        examples = TensorExamples(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y)
        bound = DerivativeBound(torch.full((64,), 0.05))  # far too small
        return MALA(model.parameters(), 1e-3, num_data=64, prior=Gaussian(), acceptance=Tuna(bound, 0.1), examples=examples)

    first = sampler(model)
    assert first.describe().endswith("| exact")
    with pytest.warns(UserWarning, match="the chain is no longer exact"):
        _steps(first, lambda: F.cross_entropy(model(x), y))
    assert "the bound of Tuna was broken" in first.describe()
    assert any(finding.kind == "biased" and "broken" in finding.says for finding in first.health().findings)
    second = sampler(model)
    second.load_state_dict(first.state_dict())
    assert second.approximations() == first.approximations() != []
    with torch.no_grad():
        model.weight.mul_(1.01)  # someone else writes the weights
    second.step(lambda: F.cross_entropy(model(x), y))
    assert "the bound of Tuna was broken" in second.describe()
