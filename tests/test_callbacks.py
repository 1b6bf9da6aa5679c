"""Callbacks: scalars for TensorBoard, read back as TensorBoard reads them."""

from __future__ import annotations

import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adammcmc import AdamMCMC, Callback, Event, Gaussian, TensorBoard, sample
from adammcmc.acceptance import beta_eff

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(30) % 3
SAMPLER = partial(AdamMCMC, lr=1e-3, sigma=1e-2, sigma_along=1.0, prior=Gaussian())


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = events.EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_its_scalars(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "board", every=5)
    options = {"num_draws": 4, "gap": 5, "burn_in": 10, "path": tmp_path / "run", "callbacks": [board]}
    sample(nn.Linear(4, 3), (X, Y), F.cross_entropy, sampler=SAMPLER, num_chains=2, **options)  # type: ignore[arg-type]
    for chain in range(2):
        seen = scalars(tmp_path / "board" / f"chain-{chain}")
        assert [step for step, _ in seen["loss"]] == [5, 10, 15, 20, 25, 30]
        assert all(0 <= rate <= 1 for _, rate in seen["acceptance_rate"])
        assert all(value == pytest.approx(1e-2) for _, value in seen["settings/sigma"])
        assert [value for _, value in seen["draws"]] == [1, 2, 3, 4]
        assert {value for _, value in seen["beta_eff"]} == {1.0}, "all data: no noise"
        assert {value for _, value in seen["log_ratio_noise"]} == {0.0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_the_heat_of_a_plain_minibatch_live(tmp_path: Path) -> None:
    options = {"num_draws": 4, "gap": 5, "burn_in": 10, "batch_size": 10, "callbacks": [TensorBoard(tmp_path, every=5)]}
    sample(nn.Linear(4, 3), (X, Y), F.cross_entropy, sampler=SAMPLER, num_chains=1, **options)  # type: ignore[arg-type]
    seen = scalars(tmp_path / "chain-0")
    for (_, noise), (_, beta) in zip(seen["log_ratio_noise"], seen["beta_eff"], strict=True):
        assert noise > 0
        assert beta == pytest.approx(float(beta_eff(torch.tensor(noise))), rel=1e-5)


class Draws(Callback):
    """Draws from torch's global random numbers whenever it can."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.numbers: list[float] = []
        self.stop_at = stop_at

    def on_start(self, event: Event) -> None:
        self.numbers.append(float(torch.randn(())))

    def on_step(self, event: Event) -> None:
        self.on_start(event)
        if event.step == self.stop_at:
            raise KeyboardInterrupt

    def on_draw(self, event: Event, record: dict[str, object]) -> None:
        self.on_start(event)

    def on_end(self, event: Event) -> None:
        torch.manual_seed(0)


@pytest.mark.parametrize("stacked", [False, True])
def test_random_numbers_of_a_callback_are_its_own(stacked: bool, tmp_path: Path) -> None:
    """The chain, whose dropout draws from the same generator, is the same with and without, and after a stop."""
    options = {"num_draws": 4, "gap": 3, "burn_in": 5, "num_chains": 2, "stacked": stacked, "progress": False}

    def go(path: Path | None, *callbacks: Callback) -> list[dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 3))
        run = partial(sample, model, (X, Y), F.cross_entropy, sampler=SAMPLER, batch_size=10)
        return list(run(path=path, resume=path is not None, callbacks=callbacks, **options))

    plain, noisy = go(None), Draws()
    for one, other in zip(plain, go(None, noisy), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(set(noisy.numbers)) > 0.45 * len(noisy.numbers), "not the same numbers at each call"
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, Draws(stop_at=10))
    for one, other in zip(plain, go(tmp_path, Draws()), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


class Sums(Callback):
    """Adds up the losses of each chain, and is interrupted at one step."""

    def __init__(self, stops_at: int | None = None) -> None:
        self.stops_at = stops_at
        self.sums: dict[int, float] = {}
        self.steps: dict[int, int] = {}
        self.samplers: dict[int, Any] = {}

    def state_dict(self, chain: int) -> dict[str, Any]:
        if chain in self.samplers:
            self.add(chain)
        return {"sum": self.sums.get(chain, 0.0), "steps": self.steps.get(chain, 0)}

    def load_state_dict(self, chain: int, state: dict[str, Any]) -> None:
        self.sums[chain], self.steps[chain] = state["sum"], state["steps"]

    def on_start(self, event: Event) -> None:
        self.samplers[event.chain] = event.sampler

    def on_step(self, event: Event) -> None:
        self.add(event.chain)
        if event.step == self.stops_at and event.chain == 1:
            signal.raise_signal(signal.SIGINT)

    def add(self, chain: int) -> None:
        sampler = self.samplers[chain]
        if sampler.num_steps > self.steps.get(chain, 0):
            self.sums[chain] = self.sums.get(chain, 0.0) + float(sampler.info.loss)
            self.steps[chain] = sampler.num_steps


@pytest.mark.parametrize("stacked", [False, True])
def test_the_state_of_a_callback_is_part_of_the_checkpoint(stacked: bool, tmp_path: Path) -> None:
    """Of each chain; a callback of another class at its place starts afresh."""
    options = {"num_draws": 4, "gap": 3, "burn_in": 5, "num_chains": 2, "stacked": stacked, "progress": False}
    run = partial(sample, sampler=SAMPLER, batch_size=10, **options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    whole, killed, resumed = Sums(), Sums(stops_at=11), Sums()
    run(model, (X, Y), F.cross_entropy, callbacks=[whole])
    with pytest.raises(KeyboardInterrupt):
        run(model, (X, Y), F.cross_entropy, callbacks=[killed], path=tmp_path)
    run(model, (X, Y), F.cross_entropy, callbacks=[resumed, Sums()], path=tmp_path, resume=True)
    assert resumed.sums == whole.sums
    assert resumed.steps == whole.steps == {0: 17, 1: 17}
    run(model, (X, Y), F.cross_entropy, callbacks=[Draws()], path=tmp_path, resume=True)


def test_a_missing_package_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        TensorBoard(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="`every` must be at least 1"):
        TensorBoard(tmp_path, every=0)
