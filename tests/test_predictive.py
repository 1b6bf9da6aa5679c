"""Prediction: equal to plain numpy on the raw draws, however it is cut; in evaluation mode; in bounded memory."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import adammcmc
from adammcmc import GaussianNLL, Likelihood, Posterior
from adammcmc.posterior import predictive, uncertainty
from adammcmc.posterior.store.folder import MemoryStore
from adammcmc.target.likelihood import Loss

X = torch.randn(37, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(37) % 3


def posterior(model: nn.Module, num_draws: int = 9, likelihood: Likelihood | None = None) -> Posterior:
    """Draws around a model's weights, with buffers of their own."""
    manifest: dict[str, Any] = {
        "keep": "draws",
        "dtype": None,
        "has_targets": True,
        "num_parts": 2,
        "target": "a test",
        "likelihood": (likelihood or Likelihood("categorical"))._asdict(),
        "configuration": {"num_chains": 1, "batch_size": 8},
    }
    store = MemoryStore(manifest)
    generator = torch.Generator().manual_seed(1)
    for i in range(num_draws):
        draw = {
            name: x + torch.rand(x.shape, generator=generator) if x.is_floating_point() else x + i
            for name, x in model.state_dict().items()
        }
        store.append({"draw": i, "chain": 0, "step": i, "loss": 0.0}, draw)
    return Posterior(store, model)


def network(*, batch_norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    norm: nn.Module = nn.BatchNorm1d(6) if batch_norm else nn.Identity()
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3))


def by_hand(p: Posterior) -> np.ndarray:
    """Softmax of each draw, one at a time, by loading it."""
    model, rows = network(batch_norm=len(p[0]) > 4), []
    model.eval()
    for draw in p:
        model.load_state_dict(draw)
        with torch.no_grad():
            rows.append(model(X).softmax(1).double().numpy())
    return np.stack(rows)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_everything_equals_numpy_on_the_raw_draws(batch_norm: bool) -> None:
    p = posterior(network(batch_norm=batch_norm))
    prediction, raw = p.predict(X, raw=True), by_hand(p)
    close = {"atol": 2e-6, "rtol": 1e-5}
    assert prediction.raw is not None
    np.testing.assert_allclose(prediction.raw, raw, **close)
    np.testing.assert_allclose(prediction.mean, raw.mean(0), **close)
    np.testing.assert_allclose(prediction.variance, raw.var(0), **close)
    np.testing.assert_allclose(prediction.std, raw.std(0), **close)
    for q in (0.0, 0.1, 0.25, 0.5, 0.75, 0.99):
        np.testing.assert_allclose(prediction.quantile(q), np.quantile(raw, q, axis=0), **close)
    np.testing.assert_allclose(prediction.spread, np.quantile(raw, 0.75, axis=0) - np.quantile(raw, 0.25, axis=0), **close)
    entropy = -(raw.mean(0) * np.log(raw.mean(0))).sum(1)
    expected = -(raw * np.log(raw)).sum(2).mean(0)
    np.testing.assert_allclose(prediction.entropy, entropy, **close)
    np.testing.assert_allclose(prediction.expected_entropy, expected, **close)
    np.testing.assert_allclose(prediction.mutual_information, entropy - expected, **close)
    np.testing.assert_array_equal(prediction.labels, raw.mean(0).argmax(1))
    assert torch.equal(prediction.epistemic, prediction.mutual_information)
    assert torch.equal(prediction.aleatoric, prediction.expected_entropy)
    assert len(prediction) == 37


def test_it_does_not_matter_how_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    p = posterior(network(batch_norm=True))
    whole = p.predict((X, Y), quantiles=[0.9])
    for chunk, group, cache, size in ((1, 1, 0, 1), (2000, 1, 0, 5), (500, 300, 10**6, 8), (10**6, 10**6, 10**6, 1000)):
        monkeypatch.setattr(predictive, "_CHUNK_BYTES", chunk)
        monkeypatch.setattr(predictive, "_GROUP_BYTES", group)
        monkeypatch.setattr(predictive, "_CACHE_BYTES", cache)
        part = p.predict(DataLoader(TensorDataset(X, Y), batch_size=7), batch_size=size)
        for name in ("mean", "spread", "variance", "entropy", "mutual_information", "targets"):
            torch.testing.assert_close(getattr(part, name), getattr(whole, name))
        torch.testing.assert_close(part.quantile(0.9), whole.quantile(0.9))
        assert torch.equal(part.targets, Y)


def test_it_is_deterministic() -> None:
    p = posterior(network())
    torch.manual_seed(0)
    first = p.predict(X)
    torch.manual_seed(1)
    second = p.predict(X)
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(first.quantile(0.33), second.quantile(0.33))


def test_the_model_is_left_as_it_was() -> None:
    model = network(batch_norm=True)
    model[3].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    posterior(model).predict(X)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [module.training for module in model] == [True, True, True, False, True]


class Steered(nn.Module):
    """A model whose values steer its course: no stacking of draws."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if float(self.inner.weight.sum()) > 0 else -self.inner(x)


def test_a_model_that_cannot_be_stacked_is_asked_draw_by_draw() -> None:
    p = posterior(Steered())
    raw = p.predict(X, raw=True).raw
    assert raw is not None
    for draw, row in zip(p, raw, strict=True):
        w, b = draw["inner.weight"], draw["inner.bias"]
        torch.testing.assert_close(row, F.linear(X, w, b).mul(1 if float(w.sum()) > 0 else -1).softmax(1))


class Tied(nn.Module):
    """One tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_tied_weights() -> None:
    model = Tied()
    x, y = X, Y
    p = adammcmc.sample(model, (x, y), F.cross_entropy, num_draws=3, gap=2, burn_in=200)
    raw = p.predict(x, raw=True).raw
    assert raw is not None
    again = Tied()
    again.load_state_dict(p[1])
    torch.testing.assert_close(raw[1], again(x).softmax(1).detach())


class Counting(nn.Module):
    """A forward that writes to its buffers, in any mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.hidden += 1
        return self.inner(x) + self.count + self.hidden * torch.arange(3)


def test_what_a_forward_writes_to_buffers_is_gone_after_it() -> None:
    model = Counting()
    p = posterior(model)
    before = [float(draw["count"]) for draw in p]
    first, second = p.predict(X), p.predict(X)
    assert torch.equal(first.mean, second.mean)
    assert [float(draw["count"]) for draw in p] == before
    assert float(model.hidden) == 0
    p[0]["inner.weight"].zero_()  # a copy
    assert torch.equal(p.predict(X).mean, first.mean)


def test_threads_do_not_disturb_each_other() -> None:
    model = network()
    p = posterior(model, 30)
    wanted = p.predict(X, batch_size=37).mean
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: p.predict(X, batch_size=37).mean, range(12)))
    assert all(torch.equal(result, wanted) for result in results)
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    assert model.training


def test_data_that_can_be_iterated_once() -> None:
    p = posterior(network())
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 37, 8)]
    once = p.predict(batch for batch in batches)
    torch.testing.assert_close(once.mean, p.predict(X).mean)
    assert torch.equal(once.targets, Y)
    with pytest.raises(ValueError, match="was a one-time iterator already consumed"):
        once.quantile(0.9)


def test_whole_numbers_and_names() -> None:
    p = posterior(network())
    votes = p.predict(X, forward=lambda model, x: model(x).argmax(1))
    assert votes.mean.dtype == torch.float32
    named = list(zip(X, [f"event {i}" for i in range(37)], strict=True))
    prediction = p.predict(named)
    assert prediction.targets == [f"event {i}" for i in range(37)]
    torch.testing.assert_close(prediction.mean, p.predict(X).mean)


def test_a_binary_classifier() -> None:
    model = nn.Linear(4, 1)
    p = posterior(model, likelihood=Likelihood("bernoulli"))
    prediction = p.predict(X, raw=True)
    assert prediction.raw is not None
    assert prediction.entropy.shape == (37, 1)
    torch.testing.assert_close(prediction.mutual_information, uncertainty.mutual_information(prediction.raw, is_binary=True))
    assert torch.equal(prediction.labels, (prediction.mean > 0.5).long())


def test_regression_has_an_aleatoric_and_an_epistemic_part() -> None:
    known = posterior(nn.Linear(4, 2), likelihood=GaussianNLL(0.3).likelihood).predict(X)
    torch.testing.assert_close(known.aleatoric, torch.full((37, 2), 0.09))
    assert torch.equal(known.epistemic, known.variance)
    torch.testing.assert_close(known.total_variance, known.variance + 0.09)
    p = posterior(nn.Linear(4, 4), likelihood=GaussianNLL(None).likelihood)
    learned = p.predict(X)
    outputs = torch.stack([F.linear(X, d["weight"], d["bias"]) for d in p])
    torch.testing.assert_close(learned.mean, outputs[:, :, :2].mean(0))
    torch.testing.assert_close(learned.aleatoric, outputs[:, :, 2:].exp().mean(0))
    torch.testing.assert_close(learned.epistemic, outputs[:, :, :2].var(0, unbiased=False))


def test_anything_of_the_model_can_be_predicted() -> None:
    p = posterior(network())
    values = p.predict(X, forward=lambda model, x: model(x).square().sum(1))
    assert values.mean.shape == (37,)
    assert values.likelihood.name == "values"
    with pytest.raises(ValueError, match="`entropy` needs class probabilities, but the outputs are interpreted as 'values'"):
        _ = values.entropy
    with pytest.raises(ValueError, match="`labels` needs class probabilities"):
        _ = values.labels
    with pytest.raises(ValueError, match="the noise of the targets is unknown"):
        _ = values.aleatoric
    with pytest.raises(ValueError, match="for classes use `entropy`"):
        _ = p.predict(X).total_variance


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda p: p.predict(X, quantiles=[2]), ValueError, "must lie between 0 and 1, got 2"),
        (lambda p: p.predict(X).quantile(-0.1), ValueError, r"must be one number between 0 and 1, got -0\.1"),
        (lambda p: p.predict(X).quantile([0.1, 0.9]), ValueError, "must be one number between 0 and 1"),
        (lambda p: p.predict(X.double()), ValueError, r"could not be evaluated: .* Its input was float64 \(1, 4\)"),
        (lambda p: p.predict(X[0]), ValueError, r"for one: x\[None\]"),
        (lambda p: p.predict(X, likelihood="poisson"), ValueError, "must be one of categorical"),
        (lambda p: p.predict(X[:0]), ValueError, "the data set is empty"),
        (lambda p: p[:0].predict(X), ValueError, "there are no draws to predict with"),
        (lambda p: p.predict(X, forward=lambda m, x: m(x).sum()), TypeError, "one row for each of the 1 examples"),
        (lambda p: p.predict(X, forward=lambda m, x: {"y": m(x)}), TypeError, "got dict. Pass `forward`"),
        (lambda p: p.predict(X, forward=lambda m, x: m(x), likelihood="gaussian"), ValueError, r"shape \(batch, 2 k\)"),
        (lambda p: p.predict(object()), TypeError, "got object"),
    ],
)
def test_bad_use_is_named(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(posterior(network()))


MEMORY = """
import resource, sys, torch
from pathlib import Path
sys.path.insert(0, str(Path.cwd()))
import adammcmc
from adammcmc import Posterior
from adammcmc.posterior.store.folder import FolderStore
from torch import nn

def status(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) * 1024
torch.set_num_threads(1)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_stays_bounded_for_many_examples(tmp_path: Path) -> None:
    """100 draws x 100,000 examples x 10 classes: under 1 GiB above model and data."""
    code = (
        MEMORY
        + """
from tests.test_predictive import posterior
model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 10))
p = posterior(model, 100)
x = torch.randn(100_000, 20)
p.predict(x[:1000])
before = status("VmRSS")
q = p.predict(x)
print((status("VmHWM") - before) / 2**20, q.mean.shape)
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert "torch.Size([100000, 10])" in done.stdout
    assert float(done.stdout.split()[0]) < 1024
    print(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_stays_flat_for_many_draws_of_a_large_model(tmp_path: Path) -> None:
    """1,000 draws of a 1M-parameter model, written and predicted with: the memory of the last hundred is that of the first."""
    code = (
        MEMORY
        + """
import torch.nn.functional as F
from functools import partial

model = nn.Sequential(nn.Linear(64, 950), nn.ReLU(), nn.Linear(950, 950), nn.ReLU(), nn.Linear(950, 10))
x, y = torch.randn(64, 64), torch.zeros(64, dtype=torch.long)
levels = []
class Watch(adammcmc.Callback):
    def on_draw(self, event, record):
        levels.append(status("VmRSS"))
p = adammcmc.sample(model, (x, y), F.cross_entropy, sampler=partial(adammcmc.AdamMCMC, sigma=1e-4, prior=adammcmc.Gaussian()),
                    num_draws=1000, gap=1, burn_in=0, path=sys.argv[1], callbacks=[Watch()])
before = status("VmRSS")
q = Posterior.open(sys.argv[1], model).predict(x)
print(max(levels[100:200]) / 2**20, max(levels[900:]) / 2**20, (status("VmHWM") - max(levels)) / 2**20, len(p), before / 2**20)
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    early, late, predicting, count = map(float, done.stdout.split()[:4])
    print(done.stdout)
    assert count == 1000
    assert late < early + 30
    assert predicting < 300


# --- what is written down with each draw -------------------------------------------------------------------------------------


class Shaken(nn.Module):
    """Draws random numbers in evaluation mode as well, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.inner(x) + 1e-3 * torch.randn(3)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Tanh(), nn.Linear(5, 3))


def short_run(model: nn.Module, loss: Any = F.cross_entropy, **options: Any) -> Posterior:
    algorithm_1 = partial(adammcmc.AdamMCMC, lr=1e-2, sigma=1e-2, sigma_along=2.0)
    few = {"num_draws": 4, "gap": 3, "burn_in": 0, "batch_size": 16, "progress": False}
    data = (X, Y)
    return adammcmc.sample(model, data, loss, **{**few, "sampler": algorithm_1, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("stacked", [False, True])
def test_a_draw_carries_its_predictions_at_training_inputs(stacked: bool) -> None:
    p = short_run(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).eval(), batch_size=None,
                  num_chains=2, stacked=stacked)  # fmt: skip
    spread = slice(0, len(X) // 16 * 16, len(X) // 16)  # over all of the batch
    raw = p.predict(X[spread], raw=True).raw
    assert raw is not None
    thinned = raw.flatten(1)[:, torch.linspace(0, 47, 16).round().long()]
    torch.testing.assert_close(torch.tensor([r["probe"] for r in p.index]), thinned, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("make", [layers, Shaken])
def test_the_chain_does_not_notice_the_probe(make: Any, stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = make()
    watched = short_run(model, num_chains=2, stacked=stacked)
    assert all(len(record["probe"]) == 16 for record in watched.index)
    monkeypatch.setattr(predictive.Probe, "make", lambda *args: None)
    alone = short_run(model, num_chains=2, stacked=stacked)
    assert all("probe" not in record for record in alone.index)
    for one, other in zip(watched, alone, strict=True):
        assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_a_loss_of_model_and_batch_is_probed_by_its_losses() -> None:
    def of_examples(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    model = nn.Linear(4, 3)
    p = short_run(model, of_examples, batch_size=None)
    model.load_state_dict(p[3])
    spread = slice(0, len(X) // 16 * 16, len(X) // 16)  # over all of the batch
    wanted = of_examples(model, (X[spread], Y[spread])).detach()
    torch.testing.assert_close(torch.tensor(p.index[3]["probe"]), wanted, rtol=2e-5, atol=1e-6)
    means = short_run(nn.Linear(4, 3), lambda model, batch: of_examples(model, batch).mean())
    assert "probe" not in means.index[0]


def test_a_model_that_steers_by_its_values_is_probed_draw_by_draw() -> None:
    model = Steered()
    probe = predictive.Probe.make(model, (X, Y), Loss(F.cross_entropy), Likelihood("categorical"))
    assert probe is not None
    stacked = {name: torch.stack([x, 2 * x]) for name, x in model.state_dict().items()}
    assert probe.stacked(stacked) == [probe({name: x[c] for name, x in stacked.items()}) for c in range(2)]
