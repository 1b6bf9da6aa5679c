"""The one-call API: a known answer through the whole road, every sampler and source, and errors that say what to do."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

import adammcmc
from adammcmc import (
    MALA,
    AdamMCMC,
    AlwaysAccept,
    AsReleased,
    Barker,
    BurnIn,
    Callback,
    ExactAdamMCMC,
    FullData,
    Gaussian,
    GaussianNLL,
    NonFiniteLoss,
    OptimizerMCMC,
    Penalty,
    Posterior,
    StoreFull,
    StoreLocked,
    StoreMismatch,
    Underdamped,
    sample,
)
from adammcmc.posterior.store.records import manifest_text
from tests import killing

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(60) % 3
ALGORITHM_1 = partial(AdamMCMC, lr=1e-3, sigma=1e-2, sigma_along=2.0, prior=Gaussian())
SHORT: dict[str, Any] = {"num_draws": 6, "gap": 3, "burn_in": 4, "progress": False}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def equal(a: Posterior, b: Posterior) -> bool:
    return len(a) == len(b) > 0 and all(
        x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x) for x, y in zip(a, b, strict=True)
    )


# --- a known answer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through_disk", [False, True])
def test_bayesian_linear_regression_has_its_closed_form(tmp_path: Path, through_disk: bool) -> None:
    """n = 500, noise 0.5, prior N(0, 1): predictive mean and sd of a one-layer network within Monte Carlo error."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(500, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.3
    y += 0.5 * torch.randn(500, 1, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=torch.float64)
    chains, num_draws = 4, 200
    posterior = sample(
        model,
        TensorDataset(x, y) if through_disk else (x, y),
        GaussianNLL(0.5),
        prior=Gaussian(1.0),
        num_draws=num_draws,
        gap=10,
        burn_in=500,
        num_chains=chains,
        path=tmp_path / "run" if through_disk else None,
        seed=1,
    )
    if through_disk:
        posterior = Posterior.open(tmp_path / "run", nn.Linear(3, 1, dtype=torch.float64))
    assert posterior.target.endswith("| exact")
    asked = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    prediction = posterior.predict(asked, raw=True)

    design = torch.cat([x, torch.ones(500, 1, dtype=torch.float64)], 1)
    covariance = torch.linalg.inv(design.T @ design / 0.25 + torch.eye(4, dtype=torch.float64))
    mean = covariance @ design.T @ y / 0.25
    rows = torch.cat([asked, torch.ones(20, 1, dtype=torch.float64)], 1)
    sd = (rows @ covariance * rows).sum(1, keepdim=True).sqrt()

    assert prediction.raw is not None
    z = (prediction.raw - rows @ mean) / sd  # standard normal, if all is right
    blocks = z.reshape(chains * 10, num_draws // 10, 20, 1)  # blocks of 200 steps, nearly independent
    for statistic, wanted in ((blocks.mean(1), 0.0), (blocks.square().mean(1), 1.0)):
        error = statistic.std(0) / math.sqrt(len(statistic))
        assert ((statistic.mean(0) - wanted).abs() < 4.5 * error).all()
        assert (error < 0.15).all()
    torch.testing.assert_close(prediction.mean, rows @ mean, atol=float(sd.max()) * 0.2, rtol=0)
    torch.testing.assert_close(prediction.aleatoric, torch.full_like(sd, 0.25))
    torch.testing.assert_close(prediction.total_variance, prediction.variance + 0.25)
    assert {finding.kind for health in posterior.health() for finding in health.findings} <= {"cannot tell"}


# --- every sampler, every source ------------------------------------------------------------------------------------------

SAMPLERS: dict[str, Any] = {
    "default": None,
    "AdamMCMC": ALGORITHM_1,
    "AsReleased": partial(AsReleased, lr=1e-3, sigma=1e-2, sigma_along=2.0, prior=Gaussian()),
    "OptimizerMCMC": partial(OptimizerMCMC, optimizer=torch.optim.SGD, lr=1e-2, sigma=1e-2),
    "Underdamped": partial(Underdamped, step_size=1e-2, prior=Gaussian()),
    "unadjusted": partial(Underdamped, step_size=1e-3, prior=Gaussian(), acceptance=AlwaysAccept()),
    "MALA": partial(MALA, step_size=1e-4, prior=Gaussian()),
    "MALA, full data": partial(MALA, step_size=1e-4, prior=Gaussian(), acceptance=FullData(chunk_size=16)),
    "MALA, Barker": partial(MALA, step_size=1e-4, prior=Gaussian(), acceptance=Barker(30)),
    "Underdamped, penalty": partial(Underdamped, step_size=1e-2, prior=Gaussian(), acceptance=Penalty()),
    "ExactAdamMCMC": partial(ExactAdamMCMC, lr=1e-3, sigma=3e-2, sigma_along=1.0, prior=Gaussian()),
    "a function": lambda params: AdamMCMC([{"params": params, "lr": 1e-3}], sigma=1e-2, num_data=60),
}


@pytest.mark.parametrize(
    ("name", "batch_size"),  # the chain of Theorem 1 needs all data at once
    [*((name, None) for name in SAMPLERS), *((name, 16) for name in SAMPLERS if name != "ExactAdamMCMC")],
)
def test_every_sampler_runs_and_is_fixed_by_its_seed(name: str, batch_size: int | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # four steps of burn-in reach nothing
        runs = [
            sample(network(), (X, Y), F.cross_entropy, sampler=SAMPLERS[name], batch_size=batch_size, seed=seed, **SHORT)
            for seed in (1, 1, 2)
        ]
    assert equal(runs[0], runs[1])
    assert not equal(runs[0], runs[2])
    assert len(runs[0]) == 6
    assert [record["step"] for record in runs[0].index] == [7, 10, 13, 16, 19, 22]
    assert runs[0].trace("loss").isfinite().all()
    assert runs[0].trace("potential").isfinite().all()
    assert runs[0].predict(X).mean.shape == (60, 3)
    assert ("exact" in runs[0].target) or ("approximate: " in runs[0].target)


def test_every_source_gives_the_same_draws() -> None:
    sources = [(X, Y), TensorDataset(X, Y), DataLoader(TensorDataset(X, Y), batch_size=16), (X.numpy(), Y.numpy())]
    runs = [sample(network(), s, F.cross_entropy, sampler=ALGORITHM_1, batch_size=16, **SHORT) for s in sources]
    assert all(equal(run, runs[0]) for run in runs)


def test_the_door_is_the_training_loop() -> None:
    """sample = the optimizer API by hand, bit for bit."""
    model = network()
    posterior = sample(model, (X, Y), F.cross_entropy, sampler=ALGORITHM_1, **SHORT)
    from adammcmc.target.data import derive_seed

    generator = torch.Generator().manual_seed(derive_seed(0, 0, 0))
    sampler = ALGORITHM_1(model.parameters(), num_data=60, fixed_data=True, generator=generator)
    draws = []
    for step in range(1, 4 + 18 + 1):
        sampler.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
        if step > 4 and (step - 4) % 3 == 0:
            draws.append(sampler.draw(model))
    assert all(torch.equal(a[key], b[key]) for a, b in zip(posterior, draws, strict=True) for key in a)


def test_chains_differ_and_each_is_what_it_is_alone() -> None:
    runs = sample(network(), (X, Y), F.cross_entropy, sampler=ALGORITHM_1, num_chains=3, **SHORT)
    assert len(runs) == 18
    assert [r["chain"] for r in runs.index] == [0] * 6 + [1] * 6 + [2] * 6
    assert not equal(runs.chain(0), runs.chain(1))
    assert equal(runs.chain(0), sample(network(), (X, Y), F.cross_entropy, sampler=ALGORITHM_1, **SHORT))
    assert runs.trace("loss").shape == (3, 6)
    assert len(runs[::2]) == 9
    assert len(runs.health()) == 3


def test_the_users_model_and_random_numbers_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    model[2].eval()
    before = copy.deepcopy(model.state_dict())
    model[0].weight.grad = torch.ones_like(model[0].weight)
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    posterior = sample(model, (X, Y), F.cross_entropy, sampler=ALGORITHM_1, batch_size=16, **SHORT)
    assert torch.equal(torch.rand(3), wanted)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(6, 4))
    assert [m.training for m in model] == [True, True, False, True]
    assert int(posterior[-1]["1.num_batches_tracked"]) > 0
    assert not torch.equal(posterior[0]["1.running_mean"], posterior[-1]["1.running_mean"])


def test_warm_starts() -> None:
    model = network()
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(5):
        adam.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        adam.step()
    plain = sample(model, (X, Y), F.cross_entropy, sampler=ALGORITHM_1, **SHORT)
    warm = sample(model, (X, Y), F.cross_entropy, sampler=ALGORITHM_1, warm_start=adam, **SHORT)
    again = sample(model, (X, Y), F.cross_entropy, sampler=ALGORITHM_1, warm_start=adam.state_dict(), **SHORT)
    assert equal(warm, again)
    assert not equal(warm, plain)
    states = [copy.deepcopy(network().state_dict()), {key: value + 1 for key, value in network().state_dict().items()}]
    ensemble = sample(model, (X, Y), F.cross_entropy, sampler=ALGORITHM_1, initial=states, num_chains=2, **SHORT)
    assert (ensemble[6]["0.weight"] - ensemble[0]["0.weight"]).mean() == pytest.approx(1, abs=0.1)


def test_burn_in_tunes_and_is_not_counted() -> None:
    tuned = sample(network(), (X, Y), F.cross_entropy, sampler=ALGORITHM_1, burn_in=BurnIn(num_steps=300), num_draws=4, gap=5)
    assert [r["step"] for r in tuned.index] == [305, 310, 315, 320]
    assert tuned.health()[0].num_steps == 20
    own = sample(network(), (X, Y), F.cross_entropy, prior=Gaussian(0.3), num_draws=4, gap=5)  # until U is flat
    first = own.index[0]["step"]
    assert first > 200
    assert own.health()[0].num_steps == 20
    assert "adapt" not in own.health()[0].verdict


def test_the_index_says_how_it_went() -> None:
    posterior = sample(network(), (X, Y), F.cross_entropy, sampler=ALGORITHM_1, **SHORT)
    model = network()
    for record, draw in zip(posterior.index, posterior, strict=True):
        model.load_state_dict(draw)
        loss = float(F.cross_entropy(model(X), Y).detach())
        assert record["loss"] == pytest.approx(loss, rel=1e-5)
        log_prior = float(Gaussian().log_density([p.detach() for p in model.parameters()]))
        assert record["potential"] == pytest.approx(60 * loss - log_prior, rel=1e-5)
        assert 0 <= record["acceptance_rate"] <= 1
        assert 0 <= record["num_accepted"] <= 3
    assert posterior.index[-1]["health"]["num_steps"] == 18
    assert sum(r["num_accepted"] for r in posterior.index) == posterior.index[-1]["health"]["accepted"]


def test_moments_equal_those_of_the_draws() -> None:
    runs = [
        sample(network(), (X, Y), F.cross_entropy, sampler=ALGORITHM_1, num_chains=2, keep=keep, **SHORT)  # type: ignore[arg-type]
        for keep in ("draws", "moments", 2)
    ]
    values = np.stack([draw["0.weight"].double().numpy() for draw in runs[0]])
    for run in runs:
        assert run.moments().count == 12
        np.testing.assert_allclose(run.moments().mean["0.weight"], values.mean(0), rtol=1e-10)
        np.testing.assert_allclose(run.moments().variance["0.weight"], values.var(0), rtol=1e-8)
    assert [len(run) for run in runs] == [12, 0, 4]
    assert all(torch.equal(runs[2][i][key], runs[0][j][key]) for i, j in ((0, 4), (3, 11)) for key in runs[2][i])
    assert "12 draws, moments only" in str(runs[1])
    with pytest.raises(ValueError, match="kept the mean and variance of the weights only"):
        runs[1].predict(X)


def test_unlabelled_data() -> None:
    class Normal(nn.Module):
        """A density: -log p(x) is its loss."""

        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return -(x - self.mean).square().sum(1) / 2

    posterior = sample(Normal(), X, lambda model, batch: -model(batch), prior=Gaussian(10.0), num_draws=400, gap=5, burn_in=300)
    precision = 60 + 0.01
    draws = torch.stack([draw["mean"] for draw in posterior])
    blocks = draws.reshape(20, 20, 4).mean(1)
    assert ((draws.mean(0) - X.sum(0) / precision).abs() < 4.5 * blocks.std(0) / math.sqrt(20)).all()
    torch.testing.assert_close(draws.std(0), torch.full((4,), precision**-0.5), rtol=0.35, atol=0)
    band = posterior.predict(X, forward=lambda model, x: model(x).exp())
    assert band.mean.shape == (60,)
    assert band.targets is None
    assert (band.quantile(0.05) <= band.quantile(0.95)).all()


def test_batches_as_dictionaries() -> None:
    data = {"x": X, "y": Y}
    posterior = sample(
        network(),
        data,
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"], reduction="none"),
        sampler=ALGORITHM_1,
        likelihood="categorical",
        **SHORT,
    )
    assert posterior.predict(data, forward=lambda model, batch: model(batch["x"]), likelihood="categorical").entropy.shape == (
        60,
    )


# --- the store, from outside ----------------------------------------------------------------------------------------------


def run(path: Path, **changes: Any) -> Posterior:
    options: dict[str, Any] = {"model": network(), "train": (X, Y), "loss": F.cross_entropy, "sampler": ALGORITHM_1, **SHORT}
    return sample(path=path, **{**options, **changes})


def test_a_posterior_from_disk_is_the_one_from_memory(tmp_path: Path) -> None:
    memory = run(None)  # type: ignore[arg-type]
    disk = run(tmp_path / "run")
    opened = Posterior.open(tmp_path / "run", network())
    assert equal(memory, disk)
    assert equal(memory, opened)
    assert opened.index == disk.index
    assert opened.target == memory.target
    assert str(opened) == str(memory)
    assert torch.equal(opened.predict(X).spread, memory.predict(X).spread)


def test_more_draws_can_be_asked_for_later(tmp_path: Path) -> None:
    whole = run(None, num_draws=9)  # type: ignore[arg-type]
    run(tmp_path / "run", num_draws=4)
    grown = run(tmp_path / "run", num_draws=9, resume=True)
    assert equal(grown, whole)
    assert equal(run(tmp_path / "run", num_draws=9, resume=True), whole)  # nothing left to do
    other = network()
    with torch.no_grad():
        other[0].weight.add_(1)  # the weights of the model do not matter: the checkpoint has them
    run(tmp_path / "other", num_draws=4)
    assert equal(run(tmp_path / "other", num_draws=9, resume=True, model=other), whole)


def test_resume_starts_a_run_that_is_not_there(tmp_path: Path) -> None:
    assert len(run(tmp_path / "run", resume=True)) == 6


class Interrupt(Callback):
    """Stops a run after some draws, as Ctrl-C would."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_draw(self, event: Any, record: dict[str, Any]) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        run(tmp_path / "run", callbacks=[Interrupt(3)], num_chains=2)
    assert "keeps 3 draws; the same call with resume=True continues it" in caught.value.__notes__[0]
    whole = run(None, num_chains=2)  # type: ignore[arg-type]
    assert equal(run(tmp_path / "run", resume=True, num_chains=2), whole)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(None, callbacks=[Interrupt(3)])  # type: ignore[arg-type]
    assert len(caught.value.result) == 3  # type: ignore[attr-defined]


def test_an_opened_posterior_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    lengths = []

    class Reader(Callback):
        def on_draw(self, event: Any, record: dict[str, Any]) -> None:
            lengths.append(len(Posterior.open(tmp_path / "run", network()).predict(X[:2]).mean) * event.num_draws)
            with pytest.raises(StoreLocked):
                run(tmp_path / "run", resume=True)

    run(tmp_path / "run", callbacks=[Reader()])
    assert lengths == [2, 4, 6, 8, 10, 12]


def test_a_loss_that_is_not_finite_keeps_what_there_is(tmp_path: Path) -> None:
    class Sick(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(x) * (math.nan if self.calls > 30 else 1.0)

    with pytest.raises(NonFiniteLoss) as caught:
        sample(Sick(), (X, Y), F.cross_entropy, sampler=ALGORITHM_1, batch_size=16, path=tmp_path / "run", **SHORT)
    assert "unfreeze" not in str(caught.value), "there is no sampler at hand"
    assert "Check the data, the loss and the prior" in str(caught.value)
    assert isinstance(caught.value.result, Posterior)
    assert 0 < len(caught.value.result) < 6
    assert all(value.isfinite().all() for draw in caught.value.result for value in draw.values())


@pytest.mark.filterwarnings("ignore:this run cannot be resumed")
def test_what_cannot_be_resumed_is_said_at_the_start_and_not_promised_at_the_end(tmp_path: Path) -> None:
    options = {"train": DataLoader(Stateless(), 16), "num_data": 60}
    with pytest.raises(KeyboardInterrupt) as caught:
        run(tmp_path / "run", callbacks=[Interrupt(2)], **options)
    assert "keeps 2 draws; it cannot be resumed" in caught.value.__notes__[0]
    with pytest.warns(UserWarning, match="cannot be resumed if it is interrupted: DataLoader has no `state_dict`"):
        run(tmp_path / "other", **options)


def test_any_error_keeps_what_there_is() -> None:
    class Bug(Callback):
        def on_draw(self, event: Any, record: dict[str, Any]) -> None:
            if event.num_draws == 4:
                raise RuntimeError("a bug of the user's")

    with pytest.raises(RuntimeError) as caught:
        run(None, callbacks=[Bug()])  # type: ignore[arg-type]
    assert len(caught.value.result) == 4  # type: ignore[attr-defined]
    assert "are in the exception's `result`" in caught.value.__notes__[0]


@pytest.mark.parametrize("where", ["save", "_on_host"])
def test_out_of_memory_keeps_the_draws(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is none left for the copy of a draw, nor for a last checkpoint."""

    class Fill(Callback):
        def on_draw(self, event: Any, record: dict[str, Any]) -> None:
            if event.num_draws == 3:
                monkeypatch.setattr("adammcmc.posterior.store.base.MemoryStore.save", fail)
                monkeypatch.setattr("adammcmc.posterior.store.base._on_host", fail)
                if where == "save":
                    fail()

    def fail(*_: object) -> None:
        raise MemoryError

    with pytest.raises(MemoryError) as caught:
        run(None, callbacks=[Fill()])  # type: ignore[arg-type]
    monkeypatch.undo()
    assert len(caught.value.result) == 3  # type: ignore[attr-defined]
    assert equal(caught.value.result, run(None)[:3])  # type: ignore[attr-defined, arg-type]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_a_process_at_its_limit_of_memory_keeps_the_draws() -> None:
    process = killing.start(killing.run_out_of_memory)
    process.join()
    assert process.exitcode == 0


def test_a_warm_start_from_a_sampler_takes_its_moments_only() -> None:
    model = network()
    sampler = ALGORITHM_1(model.parameters(), num_data=60, fixed_data=True, generator=torch.Generator().manual_seed(0))
    for _ in range(30):
        sampler.step(lambda: F.cross_entropy(model(X), Y))
    runs = [run(None, warm_start=sampler, num_chains=2, seed=seed) for seed in (0, 1)]  # type: ignore[arg-type]
    assert not equal(runs[0].chain(0), runs[0].chain(1))
    assert not equal(runs[0], runs[1])
    assert runs[0].index[0]["step"] == 7


@pytest.mark.parametrize(("burn_in", "first"), [(0, 3), (1, 4), (4, 7)])
def test_the_first_draw_comes_a_gap_after_burn_in(burn_in: int, first: int) -> None:
    posterior = run(None, burn_in=burn_in)  # type: ignore[arg-type]
    assert posterior.index[0]["step"] == first
    assert posterior.health()[0].num_steps == 18


@pytest.mark.parametrize("burn_in", [0, 4])
def test_the_target_tells_of_the_layers_that_were_met(burn_in: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    sampler = partial(MALA, step_size=1e-4, prior=Gaussian())
    run(tmp_path / "run", model=model, sampler=sampler, batch_size=16, burn_in=burn_in)
    for word in ("BatchNorm: batch statistics", "dropout draws a new mask at each step"):
        assert word in Posterior.open(tmp_path / "run", model).target


def test_numbers_of_numpy_and_paths_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    home = Path("~/run")
    posterior = run(home, burn_in=np.int64(4), num_draws=np.int64(4), keep=np.int64(2))
    assert posterior.trace("step").tolist() == [[7, 10, 13, 16]]
    assert len(run(home, resume=True, num_draws=6, keep=2)) == 2
    assert (tmp_path / "run" / "run.json").exists()


def test_functions_as_samplers_get_what_they_take() -> None:
    makers = [
        lambda params, **options: AdamMCMC(params, lr=1e-3, sigma=1e-2, **options),
        lambda params, num_data, examples: MALA(
            params, 1e-4, num_data=num_data, examples=examples, prior=Gaussian(), acceptance=FullData()
        ),
    ]
    for maker in makers:
        assert len(run(None, sampler=maker, batch_size=16)) == 6  # type: ignore[arg-type]


def test_chains_and_traces_of_runs_that_keep_few_draws() -> None:
    whole = run(None, num_chains=2)  # type: ignore[arg-type]
    few = run(None, num_chains=2, keep=2)  # type: ignore[arg-type]
    none = run(None, num_chains=2, keep="moments")  # type: ignore[arg-type]
    for posterior in (few, none):
        assert torch.equal(posterior.trace("loss"), whole.trace("loss"))
        assert posterior.chain(1).moments().count == 6
        assert posterior.chain(1).num_chains == 1
        assert torch.equal(posterior.chain(1).trace("loss"), whole.trace("loss")[1:])
    torch.testing.assert_close(few.chain(1).moments().mean["0.weight"], whole.chain(1).moments().mean["0.weight"])
    assert "chain 1:" in str(few.chain(1))
    assert "chain 0:" not in str(few.chain(1))


def test_a_sum_in_place_of_a_mean_is_noticed() -> None:
    with pytest.raises(ValueError, match="it looks like a sum, but would be taken as the mean loss"):
        run(None, loss=lambda o, y: F.cross_entropy(o, y, reduction="sum"))  # type: ignore[arg-type]


def test_a_run_may_change_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    class Leave(Callback):
        def on_draw(self, event: Any, record: dict[str, Any]) -> None:
            monkeypatch.chdir(tmp_path / "elsewhere")

    posterior = run(Path("run"), callbacks=[Leave()])
    assert len(posterior.predict(X)) == 60


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_model_has_the_names_of_its_own(tmp_path: Path) -> None:
    compiled = torch.compile(network(), backend="eager")
    posterior = run(tmp_path / "run", model=compiled)
    assert equal(posterior, run(None))  # type: ignore[arg-type]
    assert equal(Posterior.open(tmp_path / "run", network()), posterior)
    assert torch.equal(posterior.predict(X).mean, Posterior.open(tmp_path / "run", network()).predict(X).mean)


def test_buffers_that_cannot_be_written_to_or_come_up_later() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()
            self.register_buffer("expanded", torch.ones(1).expand(3))
            self.register_buffer("later", None)

        def forward(self, x: Tensor) -> Tensor:
            self.later = x.mean()
            return self.inner(x) * self.expanded

    model = Odd()
    assert len(run(None, model=model)) == 6  # type: ignore[arg-type]
    assert model.later is None
    assert torch.equal(model.expanded, torch.ones(3))


# --- bad input ------------------------------------------------------------------------------------------------------------


class Stateless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


def dead() -> nn.Module:
    model = network()
    for p in model.parameters():
        p.requires_grad_(False)
    return model


def with_nan() -> Tensor:
    x = X.clone()
    x[3, 2] = math.nan
    return x


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    # data
    "no data": ({"train": (X[:0], Y[:0])}, ValueError, "the data set is empty"),
    "lengths": ({"train": (X, Y[:-1])}, ValueError, "must have one length, one row for each example, got 60, 59"),
    "not data": ({"train": 7}, TypeError, "must be tensors .* got int"),
    "strings": ({"train": (X, "labels.csv")}, ValueError, r"must be an \.npy file"),
    "missing file": ({"train": ("nowhere.npy", Y)}, FileNotFoundError, r"nowhere\.npy"),
    "objects": ({"train": (np.array([[1], [1, 2]], dtype=object), Y)}, TypeError, "dtype object"),
    "a number": ({"train": (X, torch.tensor(3))}, ValueError, "a number where a tensor"),
    "dtype": ({"train": (X.double(), Y)}, ValueError, r"for example x\.float\(\).*float64 \(60, 4\)"),
    "labels": ({"train": (X, Y.int())}, ValueError, r"Class labels must be int64, for example targets\.long\(\)"),
    "forgotten targets": ({"train": X}, ValueError, r"the data must be \(inputs, targets\)"),
    "NaN": ({"train": (with_nan(), Y)}, NonFiniteLoss, "at step 0"),
    "num_data": ({"num_data": 61}, ValueError, "`num_data` is 61, but the data set holds 60"),
    "no length": ({"train": DataLoader(Stateless(), 16)}, ValueError, "is not known from DataLoader: pass `num_data`"),
    "a generator": ({"train": (b for b in [(X, Y)]), "num_data": 60}, ValueError, "not a generator"),
    "no examples": (
        {
            "train": DataLoader(Stateless(), 16),
            "num_data": 60,
            "sampler": partial(MALA, prior=Gaussian(), acceptance=FullData()),
        },
        ValueError,
        "can only be iterated",
    ),
    "batch size": ({"batch_size": 0}, ValueError, "`batch_size` must be a positive integer, got 0"),
    "no batching": ({"train": DataLoader(TensorDataset(X, Y), batch_size=None)}, ValueError, "has batch_size=None"),
    # model
    "no model": ({"model": X}, TypeError, "must be a torch.nn.Module, got Tensor"),
    "frozen": ({"model": dead()}, ValueError, "no parameter of the model requires a gradient"),
    "shapes": (
        {"model": nn.Linear(5, 3)},
        ValueError,
        r"could not be computed as loss\(model\(\*inputs\), targets\).*float32 \(60, 4\)",
    ),
    # loss
    "no loss": ({"loss": "cross entropy"}, TypeError, "`loss` must be a function"),
    "not a tensor": ({"loss": lambda o, y: 0.5}, ValueError, "must return a tensor, got float"),
    "too many": ({"loss": lambda o, y: torch.ones(7)}, ValueError, "returned 7 losses for a batch of 60"),
    "broadcast": (
        {"model": nn.Linear(4, 1), "train": (X, Y.float()), "loss": F.mse_loss},
        ValueError,
        r"compared every output with every target: outputs \(60, 1\) and targets \(60,\)",
    ),
    "regression shapes": (
        {"model": nn.Linear(4, 1), "train": (X, Y.float()), "loss": GaussianNLL(1.0)},
        ValueError,
        r"means of shape \(60, 1\), the targets have shape \(60,\)",
    ),
    "model, batch": (
        {"loss": lambda m, b: F.cross_entropy(m(b[0]), b[1])},
        ValueError,
        "call its first argument `model`",
    ),
    "detached": ({"loss": lambda o, y: F.cross_entropy(o.detach(), y)}, ValueError, "does not depend on the parameters"),
    "means only": (
        {
            "loss": lambda o, y: F.cross_entropy(o, y),
            "batch_size": 16,
            "sampler": partial(MALA, prior=Gaussian(), acceptance=FullData()),
        },
        ValueError,
        "needs one loss for each example, and `loss` returns their mean",
    ),
    "noise": ({"loss": partial(GaussianNLL, -1.0)}, ValueError, "loss of a batch could not be computed"),
    # arguments
    "num_draws": ({"num_draws": 0}, ValueError, "`num_draws` must be an integer of at least 1, got 0"),
    "gap": ({"gap": 2.5}, ValueError, r"`gap` must be an integer of at least 1, got 2\.5"),
    "burn_in": ({"burn_in": -1}, ValueError, "`burn_in` must be an integer of at least 0, got -1"),
    "no burn-in, no step size": (
        {"burn_in": 0, "sampler": None},
        ValueError,
        "`burn_in` is 0, and the sampler finds its step size in burn-in",
    ),
    "no burn-in, no step size, stacked": (
        {"burn_in": 0, "sampler": None, "num_chains": 2, "stacked": True},
        ValueError,
        "`burn_in` is 0, and the sampler finds its step size in burn-in",
    ),
    "an option that it has not": (
        {"sampler": partial(ExactAdamMCMC, lr=1e-3, sigma=1e-3, acceptance=Penalty())},
        TypeError,
        "^ExactAdamMCMC has no option `acceptance`; its options are lr, betas",
    ),
    "num_chains": ({"num_chains": True}, ValueError, "`num_chains` must be an integer of at least 1, got True"),
    "seed": ({"seed": -3}, ValueError, "`seed` must be an integer of at least 0"),
    "keep": ({"keep": "everything"}, ValueError, "`keep` must be 'draws', 'moments' or a number"),
    "dtype of draws": ({"dtype": torch.int8}, ValueError, "`dtype` must be a floating torch.dtype"),
    "resume nothing": ({"resume": True}, ValueError, "resume=True needs `path`"),
    "initial": ({"initial": [{}], "num_chains": 2}, ValueError, "for each of 2 chains, got 1"),
    "one callback": ({"callbacks": Callback()}, TypeError, r"`callbacks` must be a list of callbacks"),
    "callbacks": ({"callbacks": [print]}, TypeError, "must hold instances of adammcmc.Callback"),
    "likelihood": ({"likelihood": "poisson"}, ValueError, "`likelihood` must be one of categorical"),
    "a sampler": (
        {"sampler": AdamMCMC(network().parameters(), num_data=60, sigma=1e-3)},
        TypeError,
        r"must make a sampler from parameters, such as partial\(AdamMCMC.* got an existing AdamMCMC",
    ),
    "no sigma": ({"sampler": AdamMCMC}, TypeError, r"is missing an argument.*'sigma'.*partial\(AdamMCMC, sigma=...\)"),
    "an optimizer": ({"sampler": torch.optim.Adam}, TypeError, "must make a sampler of adammcmc, such as AdamMCMC, got Adam"),
    "two priors": ({"prior": Gaussian()}, ValueError, "`prior` was given both to sample and to the sampler"),
    "two burn-ins": (
        {"burn_in": BurnIn(), "sampler": partial(ALGORITHM_1, burn_in=10)},
        ValueError,
        "`burn_in` was given both to sample and to the sampler",
    ),
    "fixed data": (
        {"batch_size": 16, "sampler": partial(ALGORITHM_1, fixed_data=True)},
        ValueError,
        "batches of 16 of 60 examples change from step to step",
    ),
    "its own num_data": (
        {"sampler": partial(ALGORITHM_1, num_data=61)},
        ValueError,
        "the sampler has num_data=61, the data set holds 60",
    ),
    "foreign moments": (
        {"warm_start": torch.optim.SGD(network().parameters(), lr=0.1)},
        ValueError,
        r"neither a state of AdamMCMC nor of torch\.optim\.Adam",
    ),
    "another order": (
        {"train": DataLoader(TensorDataset(X, Y), batch_sampler=[[0, 1], [2, 3]])},
        ValueError,
        "list cannot be taken over.*Pass the data set",
    ),
    "a subset": (
        {"train": DataLoader(TensorDataset(X, Y), 16, sampler=SubsetRandomSampler(range(9)))},
        ValueError,
        r"chooses 9 of 60 examples.*torch\.utils\.data\.Subset",
    ),
    "no batch size": ({"train": Stateless(), "num_data": 60}, ValueError, "`batch_size` is needed with an IterableDataset"),
    "two batch sizes": (
        {"train": DataLoader(Stateless(), 16), "batch_size": 8, "num_data": 60},
        ValueError,
        "the DataLoader makes batches of 16: leave it out",
    ),
    "broadcast images": (
        {"model": nn.Conv2d(1, 1, 1), "train": (torch.randn(6, 1, 4, 4), torch.randn(6, 4, 4)), "loss": F.mse_loss},
        ValueError,
        r"compared every output with every target: outputs \(6, 1, 4, 4\) and targets \(6, 4, 4\)",
    ),
    "plateau": ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, TypeError, "depends on the number of steps"),
    "scheduler and tuning": (
        {"sampler": None, "scheduler": lambda s: torch.optim.lr_scheduler.ExponentialLR(s, 0.9)},
        ValueError,
        "would overwrite the step size that burn-in finds",
    ),
    "lazy": ({"model": nn.Sequential(nn.LazyLinear(3))}, ValueError, "call it on one batch first"),
    "odd dtype": ({"dtype": torch.float8_e5m2fnuz}, ValueError, "`dtype` must be a floating torch.dtype"),
    "dropout": (
        {"model": nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))},
        adammcmc.StochasticClosure,
        r"At fault: '1' \(Dropout\).*model\.eval\(\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case: str) -> None:
    changes, error, words = BAD[case]
    options: dict[str, Any] = {"model": network(), "train": (X, Y), "loss": F.cross_entropy, "sampler": ALGORITHM_1, **SHORT}
    with pytest.raises(error, match=f"(?s){words}"):
        sample(**{**options, **changes})


OTHER_RUNS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "seed": ({"seed": 5}, StoreMismatch, "has seed = 0, this call has 5"),
    "gap": ({"gap": 4}, StoreMismatch, "has gap = 3, this call has 4"),
    "batches": ({"batch_size": 20}, StoreMismatch, "has batch_size = 60, this call has 20"),
    "chains": ({"num_chains": 2}, StoreMismatch, "has num_chains = 1, this call has 2"),
    "keep": ({"keep": 3}, StoreMismatch, "has keep = draws, this call has 3"),
    "dtype": ({"dtype": torch.bfloat16}, StoreMismatch, "has dtype = None, this call has bfloat16"),
    "settings": ({"sampler": partial(ALGORITHM_1, sigma=2e-2)}, StoreMismatch, "has settings ="),
    "sampler": ({"sampler": partial(MALA, step_size=1e-4, prior=Gaussian())}, StoreMismatch, "has sampler = AdamMCMC"),
    "prior": ({"sampler": partial(ALGORITHM_1, prior=Gaussian(2.0))}, StoreMismatch, "has prior ="),
    "temperature": ({"sampler": partial(ALGORITHM_1, inverse_temperature=0.5)}, StoreMismatch, "has target ="),
    "data": ({"train": (X + 1, Y)}, StoreMismatch, "was made with other data"),
    "more data": ({"train": (torch.cat([X, X]), torch.cat([Y, Y])), "batch_size": 60}, StoreMismatch, "has"),
    "architecture": ({"model": nn.Linear(4, 3)}, StoreMismatch, "is of another model: it has '0.weight'"),
    "width": (
        {"model": nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))},
        StoreMismatch,
        r"its '0.weight' is float32 \(6, 4\), this model's is float32 \(7, 4\)",
    ),
    "loss": ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, StoreMismatch, "has loss = cross_entropy"),
    "noise": ({"likelihood": "values"}, StoreMismatch, "has likelihood ="),
    "modes": ({"model": network().eval()}, StoreMismatch, r"has modes \(train or eval\) = train, this call has eval"),
    "policy": ({"sampler": partial(ALGORITHM_1, batch_norm="frozen")}, StoreMismatch, "'batch_norm': 'batch'"),
    "scheduler": (
        {"scheduler": lambda s: torch.optim.lr_scheduler.ExponentialLR(s, 0.9)},
        StoreMismatch,
        "has (scheduler|settings) =",
    ),
    "one value of many": (
        {"train": (torch.cat([X[:31], X[31:32] + 1e-3, X[32:]]), Y)},
        StoreMismatch,
        "was made with other data",
    ),
    "fewer draws": ({"num_draws": 3}, StoreMismatch, "has num_draws = 6, this call has 3: the number may grow"),
    "not resumed": ({"resume": False}, StoreMismatch, r"holds a run already\. Pass resume=True"),
    "stateless data": (
        {"train": DataLoader(Stateless(), 16), "num_data": 60},
        StoreMismatch,
        "cannot be resumed: DataLoader has no `state_dict`",
    ),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    run(path)
    return path


@pytest.mark.filterwarnings("ignore:this run cannot be resumed")
@pytest.mark.parametrize("case", OTHER_RUNS)
def test_another_run_is_refused_and_the_stored_one_stays(finished: Path, case: str) -> None:
    changes, error, words = OTHER_RUNS[case]
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    with pytest.raises(error, match=words):
        run(finished, **{"resume": True, "num_draws": 8, **changes})
    assert {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()} == before


class Laplace(adammcmc.Prior):
    """A prior of a user's: its scale is nowhere to be seen."""

    def __init__(self, scale: float) -> None:
        self._density = lambda p: -p.abs().sum(dtype=torch.float64) / scale

    def log_density(self, params: Any) -> Tensor:
        return torch.as_tensor(sum(self._density(p) for p in params))


class Box(adammcmc.Prior):
    """One whose density is the same inside."""

    def __init__(self, edge: float) -> None:
        self.edge = edge

    def log_density(self, params: Any) -> Tensor:
        largest = torch.stack([p.abs().max() for p in params]).max()
        return torch.where(largest <= self.edge, 0.0, -math.inf).double()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            Laplace(1.0),
            Laplace(0.001),
            r"another prior: its log density at weights of up to 0\.01 was -0\.\d+, now it is -\d\d",
        ),
        (Box(5.0), Box(6.0), r"another prior: its `edge` was 5\.0, now it is 6\.0"),
        (Box(5.0), Box(5.0), None),
        (Laplace(1.0), Laplace(1.0), None),
        (Gaussian.fan_in(network(), 2.0), Gaussian.fan_in(network(), 2.0), None),
    ],
)
def test_another_prior_of_the_same_name_is_refused(old: Any, new: Any, words: str | None, tmp_path: Path) -> None:
    sampler = partial(AdamMCMC, lr=1e-3, sigma=1e-2, sigma_along=2.0)
    run(tmp_path / "run", sampler=sampler, prior=old, num_draws=1)
    if words is None:
        assert len(run(tmp_path / "run", sampler=sampler, prior=new, num_draws=2, resume=True)) == 2
        return
    with pytest.raises(StoreMismatch, match=words):
        run(tmp_path / "run", sampler=sampler, prior=new, num_draws=2, resume=True)


def test_other_software_or_hardware_is_said_once_and_recorded(tmp_path: Path) -> None:
    """And is no hindrance; nor is a run of a version that recorded neither machine nor prior."""
    run(tmp_path / "run", num_draws=1)
    file = tmp_path / "run" / "run.json"
    manifest = json.loads(file.read_text())
    assert manifest["machine"]["threads"] == torch.get_num_threads()
    old = {key: value for key, value in manifest.items() if key not in ("machine", "prior")}
    file.write_bytes(manifest_text(old))
    run(tmp_path / "run", num_draws=2, resume=True)
    changed = {"machine": manifest["machine"] | {"threads": 99}, "versions": manifest["versions"] | {"torch": "1.0"}}
    file.write_bytes(manifest_text(manifest | changed))
    here = rf"torch 1\.0 -> {torch.__version__.replace('+', '.')}, threads 99 -> {torch.get_num_threads()}"
    with pytest.warns(UserWarning, match=rf"another environment \({here}\): .* valid, but not bit for bit") as caught:
        run(tmp_path / "run", num_draws=3, resume=True)
    assert len(caught) == 1
    assert len(run(tmp_path / "run", num_draws=4, resume=True)) == 4  # the same again: nothing to say
    assert len(json.loads(file.read_text())["resumed"]) == 1


def test_a_model_of_another_architecture_cannot_be_opened(finished: Path) -> None:
    with pytest.raises(StoreMismatch, match=r"it has no '2\.weight'|another model"):
        Posterior.open(finished, nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"`chain` must be one of 0, got 4"):
        Posterior.open(finished, network()).chain(4)
    with pytest.raises(ValueError, match=r"there is no trace of 'lss'\. Known: .*loss"):
        Posterior.open(finished, network()).trace("lss")


def test_a_run_that_does_not_fit_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": 10_000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(StoreFull, match=r"the run would write .* and .* has 10 kB left"):
        run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("adammcmc.posterior.store.archives.free_memory", lambda: 100)
    with pytest.raises(MemoryError, match="Pass `path` to keep them on disk"):
        run(None)  # type: ignore[arg-type]


def test_the_forecast_is_near_the_truth(tmp_path: Path) -> None:
    from adammcmc.runs.session import forecast_size

    posterior = run(tmp_path / "run", num_draws=40)
    size = sum(p.stat().st_size for p in (tmp_path / "run").rglob("*"))
    assert size < forecast_size(posterior.model, num_draws=len(posterior), num_chains=1) < 10 * size


def run_callback_order() -> list[str]:
    seen: list[str] = []

    class Log(Callback):
        def on_start(self, event: Any) -> None:
            seen.append(f"start {event.chain}")

        def on_step(self, event: Any) -> None:
            seen.append("burn" if event.is_burning_in else "step")

        def on_draw(self, event: Any, record: dict[str, Any]) -> None:
            seen.append(f"draw {record['draw']}")

        def on_end(self, event: Any) -> None:
            seen.append(f"end {event.num_draws}")

    sample(network(), (X, Y), F.cross_entropy, sampler=ALGORITHM_1, num_draws=2, gap=2, burn_in=2, callbacks=[Log()])
    return seen


def test_callbacks_hear_everything() -> None:
    assert run_callback_order() == ["start 0", "burn", "step", "step", "draw 0", "step", "step", "draw 1", "step", "end 2"]


def test_a_second_call_with_the_same_path_in_memory_of_another_thread_is_locked(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    class Second(Callback):
        def on_start(self, event: Any) -> None:
            try:
                run(tmp_path / "run", resume=True)
            except StoreLocked as error:
                errors.append(error)

    run(tmp_path / "run", callbacks=[Second()])
    assert len(errors) == 1


def test_modes_are_said_in_words() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model[1].eval()
    for mode, words in (("as it is", "train; eval: 1"), ("train", "train"), ("eval", "eval")):
        if mode != "as it is":
            model.train(mode == "train")
        posterior = adammcmc.sample(
            model, (X[:, :2], Y % 2), F.cross_entropy, sampler=partial(adammcmc.AdamMCMC, lr=1e-3, sigma=1e-3),
            num_draws=1, gap=1, burn_in=0, progress=False,
        )  # fmt: skip
        assert posterior.store.manifest["configuration"]["modes (train or eval)"] == words
