"""All data in parts: the same target and the same steps, whatever the size of a part; gradients in reduced precision."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adammcmc import MALA, BurnIn, FullData, Gaussian, Posterior, Underdamped, sample
from adammcmc.runs import chunks
from adammcmc.runs.chunks import in_parts, rows_at_once
from adammcmc.samplers.forces import arithmetic, checked_forces
from adammcmc.target.batches import Parts
from adammcmc.target.data import as_data
from adammcmc.target.likelihood import Loss

pytestmark = pytest.mark.filterwarnings("ignore:burn-in reached")  # so short a burn-in says so

N = 90
CPU = torch.device("cpu")


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def losses(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y, target, reduction="none")


def run(data: Any, **options: Any) -> Posterior:
    usual: dict[str, Any] = {"burn_in": BurnIn(60), "num_draws": 5, "gap": 4, "seed": 1, "progress": False}
    return sample(network(), data, options.pop("loss", F.cross_entropy), **usual | options)


def same(a: Posterior, b: Posterior, tolerance: float = 1e-9) -> bool:
    return all(
        torch.allclose(x[name], y[name], rtol=0, atol=tolerance) for x, y in zip(a, b, strict=True) for name in x
    )  # rounding grows along a chain


# --- parts ----------------------------------------------------------------------------------------------------------------


def test_the_weights_of_parts_are_those_of_the_mean_over_all_rows() -> None:
    x = torch.arange(10.0)
    parts = Parts([x[:4], x[4:8], x[8:]])
    assert parts.weights == pytest.approx([1.2, 1.2, 0.6])
    mean = sum(part.mean() * w for part, w in zip(parts, parts.weights, strict=True)) / len(parts)
    assert float(mean) == pytest.approx(float(x.mean()))


@pytest.mark.parametrize("loss", [F.cross_entropy, losses], ids=["mean", "per example"])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_chain_on_parts_is_the_chain_on_all_data(data: Any, stacked: bool, loss: Any) -> None:
    options: dict[str, Any] = {"loss": loss, "num_chains": 2, "stacked": stacked}
    whole, parts = run(data, **options), run(data, chunk_size=40, **options)  # 40, 40 and 10 rows
    assert same(whole, parts, 1e-7)
    assert parts.target.endswith("| exact")
    index, other = whole.index, parts.index
    assert [row["num_accepted"] for row in index] == [row["num_accepted"] for row in other]
    assert [row["potential"] for row in index] == pytest.approx([row["potential"] for row in other])


def test_a_chunk_as_large_as_the_data_changes_nothing(data: Any) -> None:
    assert same(run(data), run(data, chunk_size=N), 0.0)


def test_every_sampler_of_fixed_data_takes_parts(data: Any) -> None:
    whole, parts = (run(data, sampler=MALA, chunk_size=size) for size in (None, 31))
    assert same(whole, parts, 1e-7)


def test_a_run_in_parts_is_resumed_in_parts(data: Any, tmp_path: Path) -> None:
    whole = run(data, chunk_size=40)
    run(data, chunk_size=40, num_draws=2, path=tmp_path)
    assert same(whole, run(data, num_draws=5, path=tmp_path, resume=True), 0.0)  # `chunk_size` is that of the folder


def test_a_run_on_all_data_at_once_is_resumed_so_where_memory_is_short(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(data)
    run(data, num_draws=2, path=tmp_path)
    monkeypatch.setattr("adammcmc.runs.session.rows_at_once", lambda *_: 30)
    assert same(whole, run(data, num_draws=5, path=tmp_path, resume=True), 0.0)
    with pytest.raises(ValueError, match="chunk_size"):  # nor is it changed by hand
        run(data, num_draws=6, path=tmp_path, resume=True, chunk_size=30)


def test_a_loss_that_is_no_mean_over_examples_is_not_divided(data: Any) -> None:
    def by_scale(y: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(y / y.std(), target) * (1 + y.detach().var(0).mean())

    assert run(data, loss=by_scale).target.endswith("| exact")
    with pytest.raises(ValueError, match="mean of those of its halves"):
        run(data, loss=lambda y, t: by_scale(y, t) + len(t) / N, chunk_size=40)


def test_chunk_size_is_for_steps_that_use_all_data(data: Any) -> None:
    with pytest.raises(ValueError, match="chunk_size"):
        run(data, chunk_size=20, batch_size=30, sampler=partial(Underdamped, acceptance=FullData()))


def test_batch_statistics_are_not_taken_of_parts(data: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    with pytest.raises(ValueError, match=r"BatchNorm in training mode.*model\.eval"):
        sample(model, data, F.cross_entropy, chunk_size=40, burn_in=BurnIn(20), num_draws=1, gap=1, progress=False)


# --- how many rows at a time ----------------------------------------------------------------------------------------------


def test_rows_at_a_time_follow_from_what_autograd_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss = nn.Sequential(nn.Linear(4, 100), nn.Tanh(), nn.Linear(100, 2)), Loss(F.cross_entropy)
    rows = 10_000
    everything = as_data((torch.randn(rows, 4), torch.zeros(rows, dtype=torch.long)), None, None)
    assert rows_at_once(model, loss, everything, CPU, 1) is None
    each = 4 * (4 + 100 + 2) + 8  # inputs, tanh, log-probabilities in float32, and the label
    monkeypatch.setattr("adammcmc.runs.chunks._memory", lambda _: 5 * each * 2_600)
    assert rows_at_once(model, loss, everything, CPU, 1) == 2_500
    assert rows_at_once(model, loss, everything, CPU, 4) == 625
    assert rows_at_once(model, loss, everything, CPU, 1000) == 256
    model.append(nn.BatchNorm1d(2))
    assert rows_at_once(model, loss, everything, CPU, 1) is None  # batch statistics cannot be divided
    assert rows_at_once(model.eval(), loss, everything, CPU, 1) is not None


def test_rows_at_a_time_fit_into_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has less than its machine."""
    monkeypatch.setattr("adammcmc.runs.chunks.free_memory", lambda: 1000)
    assert chunks._memory(CPU) == 2000
    monkeypatch.setattr("adammcmc.runs.chunks.free_memory", lambda: None)
    assert chunks._memory(CPU) > 10**8


def test_counting_leaves_buffers_and_random_numbers_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(), nn.Linear(8, 2))
    everything = as_data((torch.randn(2_000, 2), torch.zeros(2_000, dtype=torch.long)), None, None)
    before = torch.get_rng_state()
    rows_at_once(model, Loss(F.cross_entropy), everything, CPU, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_parts_hold_every_row_once_and_in_order() -> None:
    x = torch.arange(10.0)[:, None]
    parts = in_parts(as_data((x, x), None, None), 4, CPU)
    assert [len(part[0]) for part in parts] == [4, 4, 2]
    assert torch.equal(torch.cat([part[0] for part in parts]), x)


# --- gradients in reduced precision ---------------------------------------------------------------------------------------


def test_only_known_arithmetic_is_taken() -> None:
    assert (checked_forces(None), checked_forces("tf32")) == ("float32", "tf32")
    with pytest.raises(ValueError, match="bfloat16"):
        checked_forces("float16")
    with arithmetic("bfloat16", CPU):
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def single(data: Any, forces: Any, steps: int, **options: Any) -> tuple[Underdamped, list[float]]:
    """Losses that a chain in float32 reports, from the same start and numbers."""
    model, (x, y) = network().float(), data
    x = x.float()
    sampler = Underdamped(
        model.parameters(),
        0.02,
        num_data=N,
        prior=Gaussian(1.0),
        fixed_data=True,
        num_chances=1,
        forces=forces,
        generator=torch.Generator().manual_seed(1),
        **options,
    )
    found = []
    for _ in range(steps):
        found.append(float(sampler.step(lambda: F.cross_entropy(model(x), y))))
        true = float(F.cross_entropy(model(x), y).detach())
        assert float(sampler.chains.present_loss()) == pytest.approx(true, rel=1e-6)  # the energy is in full precision
    return sampler, found


@pytest.mark.parametrize("num_leapfrog", [1, 3])
def test_energies_stay_in_full_precision(data: Any, num_leapfrog: int) -> None:
    exact, plain = single(data, None, 40, num_leapfrog=num_leapfrog)
    rough, reduced = single(data, "bfloat16", 40, num_leapfrog=num_leapfrog)
    assert plain[0] == reduced[0]
    assert plain[5] != reduced[5]  # the gradients differ
    assert plain[5] == pytest.approx(reduced[5], rel=1e-2)
    assert rough.describe() == exact.describe()
    assert rough.describe().endswith("| exact")


def test_no_temperature_is_read_from_rough_gradients(data: Any) -> None:
    (rough, _), (plain, _) = single(data, "bfloat16", 1), single(data, None, 1)
    assert rough.chains.health_state()["context"]["left_out"] == rough.network.names
    assert not plain.chains.health_state()["context"]["left_out"]


def test_a_trajectory_in_reduced_precision_walks_back(data: Any) -> None:
    """With the velocity turned round, bfloat16 forces lead back to the start: what exactness needs of them."""
    sampler, _ = single(data, "bfloat16", 1, num_leapfrog=5, friction=0.0)
    model, (x, y) = network().double(), data
    del sampler
    start = [p.detach().clone() for p in model.parameters()]
    there = Underdamped(
        model.parameters(),
        0.02,
        0.0,
        num_data=N,
        prior=Gaussian(1.0),
        fixed_data=True,
        num_chances=1,
        num_leapfrog=5,
        forces="bfloat16",
        generator=torch.Generator().manual_seed(1),
    )

    def loss() -> Tensor:
        return F.cross_entropy(model(x), y)

    there.step(loss)
    assert bool(there.chains.info.is_accepted)
    moved = [p.detach().clone() for p in model.parameters()]
    memory = there.chains.memory
    there.chains.memory = memory._replace(momentum=tuple(-p for p in memory.momentum))
    there.step(loss)
    assert bool(there.chains.info.is_accepted)
    distance = max(float((a - b).abs().max()) for a, b in zip(start, moved, strict=True))
    back = max(float((a - p.detach()).abs().max()) for a, p in zip(start, model.parameters(), strict=True))
    assert back < 1e-12 < 1e-4 < distance


def test_reduced_precision_is_for_one_chain_at_a_time(data: Any) -> None:
    with pytest.raises(Exception, match="forces"):
        run(data, sampler=partial(Underdamped, forces="bfloat16"), num_chains=2, stacked=True)
