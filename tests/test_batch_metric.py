"""The metric of batches: right where the curvature is known, the same for stacks and parts, and what burn-in does with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adammcmc import BurnIn, Gaussian, Underdamped, sample
from adammcmc.samplers import batch_metric
from adammcmc.samplers.batch_metric import fisher_metric
from adammcmc.target.batches import Parts

N, SD = 64 * 40, 3.0


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    """A linear model with unit noise, whose columns have very different scales."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64) * torch.tensor([0.1, 1.0, 10.0])
    return x, (x.sum(1) + torch.randn(N, generator=generator, dtype=torch.float64))[:, None]


def half_square(y: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (y - target).square().sum(1)


def sampler_of(model: nn.Module, **options: Any) -> Underdamped:
    return Underdamped(model.parameters(), 1e-3, num_data=N, prior=Gaussian(SD), fixed_data=True, **options)


def metric(model: nn.Module, batch: Any, **options: Any) -> Any:
    return metric_of(sampler_of(model, **options), model, batch)


def metric_of(sampler: Underdamped, model: nn.Module, batch: Any) -> Any:
    with torch.no_grad():
        precision = tuple(torch.full_like(x[0], SD**-2) for x in sampler.network.take())
        return fisher_metric(sampler.network, lambda batch: half_square(model(batch[0]), batch[1]), batch, precision)


def linear(weight: float = 1.0) -> nn.Linear:
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.constant_(model.weight, weight)
    return model


def test_at_the_truth_it_is_the_inverse_curvature(data: Any) -> None:
    """The gradient of an example is x times unit noise: F = sum x^2."""
    (found,) = metric(linear(), data)
    expected = 1 / (data[0].square().sum(0) + SD**-2)
    # a variance over 64 batches has a standard error of sqrt(2 / 63)
    torch.testing.assert_close((found.flatten() / expected).log(), torch.zeros(3).double(), atol=4 * 0.18, rtol=0)


def test_the_temperature_scales_it(data: Any) -> None:
    (one,), (tenth,) = metric(linear(), data), metric(linear(), data, inverse_temperature=0.1)
    torch.testing.assert_close(1 / tenth - SD**-2, 0.1 * (1 / one - SD**-2))


def test_it_leaves_weights_and_random_numbers_alone(data: Any) -> None:
    model = nn.Sequential(linear(0.3), nn.Dropout(0.5))
    sampler = sampler_of(model)
    before = torch.get_rng_state()
    metric_of(sampler, model, data)
    assert bool((model[0].weight == 0.3).all())
    assert torch.equal(torch.get_rng_state(), before)


def test_parts_have_the_metric_of_the_whole(data: Any) -> None:
    x, y = data
    (whole,), (parts,) = metric(linear(), data), metric(linear(), Parts([(x[:1600], y[:1600]), (x[1600:], y[1600:])]))
    torch.testing.assert_close((whole / parts).log(), torch.zeros(3).double(), atol=5 * 0.18, rtol=0)  # other batches


def test_sorted_data_have_the_metric_of_shuffled_data(data: Any) -> None:
    """Far from the truth, residuals depend on x: batches of consecutive rows would differ by their places in the order."""
    x, y = data
    order = x[:, 2].argsort()
    (shuffled,), (ordered,) = metric(linear(0.0), data), metric(linear(0.0), (x[order], y[order]))
    torch.testing.assert_close((shuffled / ordered).log(), torch.zeros(3).double(), atol=1.5, rtol=0)


@pytest.mark.parametrize("batch", [None, 0], ids=["no batch", "few examples"])
def test_without_batches_there_is_none(data: Any, batch: int | None) -> None:
    assert metric(linear(), None if batch is None else tuple(x[:50] for x in data)) is None


# --- burn-in --------------------------------------------------------------------------------------------------------------


def classify() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(640, 8, generator=generator)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)), (x, (x[:, 0] * x[:, 1] > 0).long())


@pytest.mark.parametrize("stacked", [False, True])
def test_burn_in_of_a_large_network_uses_it(stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken after the first step, in the approach, and before windows end; small networks do without."""
    calls: list[int] = []

    def counted(*arguments: Any) -> Any:
        found = fisher_metric(*arguments)
        calls.append(1)
        return found

    monkeypatch.setattr(batch_metric, "fisher_metric", counted)
    options: dict[str, Any] = {
        "burn_in": BurnIn(num_steps=700),
        "num_draws": 2,
        "gap": 5,
        "num_chains": 2,
        "stacked": stacked,
        "progress": False,
    }
    model, data = classify()
    sample(model, data, F.cross_entropy, **options)
    assert not calls
    monkeypatch.setattr(batch_metric, "LARGE", 100)
    posterior = sample(model, data, F.cross_entropy, **options)
    assert len(calls) >= 5
    for record in posterior.warm_up:
        assert record.num_approach > 0
        assert 0.6 < record.acceptance < 0.98


class Stairs(nn.Module):
    """Rounds to one of so many steps of a unit, and passes the gradient on as if it did not."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        return x + ((x * self.steps).round() / self.steps - x).detach() if self.steps else x


@pytest.mark.parametrize("steps", [0, 3])
def test_steps_that_jumps_of_u_make_short_are_reported(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_metric, "LARGE", 100)
    monkeypatch.setattr("adammcmc.samplers.adaptation.warn", lambda message: None)
    model, data = classify()
    model = nn.Sequential(*model[:2], Stairs(steps), model[2])
    posterior = sample(model, data, F.cross_entropy, burn_in=BurnIn(num_steps=700), num_draws=1, gap=1, progress=False)
    assert ("times shorter than they were without it" in posterior.warm_up[0].reason) == (steps > 0)


@pytest.mark.filterwarnings("ignore:burn-in")
def test_a_run_that_is_killed_in_burn_in_continues_bit_for_bit(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_metric, "LARGE", 100)
    options: dict[str, Any] = {"burn_in": BurnIn(num_steps=300), "num_draws": 3, "gap": 2, "progress": False}
    model, data = classify()
    whole = sample(model, data, F.cross_entropy, **options)

    class Stopped(Exception):
        pass

    from adammcmc import Callback

    class Stop(Callback):
        def __init__(self, step: int) -> None:
            self.step = step

        def on_step(self, event: Any) -> None:
            if event.step == self.step:
                signal.raise_signal(signal.SIGINT)

    import signal

    model, data = classify()
    for step in (40, 90, 170, 250):
        with pytest.raises(KeyboardInterrupt):
            sample(model, data, F.cross_entropy, path=tmp_path, resume=True, callbacks=[Stop(step)], **options)
    again = sample(model, data, F.cross_entropy, path=tmp_path, resume=True, **options)
    for ours, theirs in zip(whole, again, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
