"""Trials: the same settings give the same record, and a folder keeps it, whoever dies on the way."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from adammcmc.jets import Jets
from adammcmc.jets.particlenet import ParticleNetLite
from adammcmc.samplers.sampler import Sampler
from adammcmc.target.data import derive_seed
from replication.checkpoint import Checkpoint
from replication.measures import coverage, judge, over_seeds, rounded
from replication.rows import rows, seeds_of
from replication.sets import JetSets, read_sets
from replication.settings import PAPER_PARAMS, PRESETS, preset
from replication.trials import METHODS, TESTS, Trial, _Run, _Sampling, run_trial
from replication.work import Work

TINY = replace(PRESETS["smoke"], num_train=48, num_test=30, num_others=1, batch_size=12, steps=6, num_draws=3, exact_data=16)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def jets() -> JetSets:
    return read_sets(TINY)


@pytest.fixture(autouse=True)
def _short_burn_in() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "burn-in reached")  # of the exact chains, which are far too short here
        yield


def run(trial: Trial, jets: JetSets) -> dict[str, Any]:
    record: dict[str, Any] = rounded(run_trial(trial, jets, CPU, lambda done, total: None))
    record.pop("seconds")
    return record


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_a_record_twice_the_same(method: str, jets: JetSets) -> None:
    trial = Trial.exact(TINY, steps=9, burn_in=3, num_draws=3) if method == "exact" else Trial.of(TINY, method)
    if method in ("released", "printed"):
        trial = replace(trial, sigma=2.0, sigma_delta=3661.6)
    record = run(trial, jets)
    assert json.loads(json.dumps(record, allow_nan=False)) == run(trial, jets)
    assert run(replace(trial, seed=1), jets)["draws"]["nll"] != record["draws"]["nll"]
    assert record["draws"]["num_draws"] == (1 if method in ("adam", "sgd") else 3)
    assert ("acceptance" in record) == (method in ("released", "printed", "exact"))
    assert (record["draws"]["mean_spread"] > 0) == (method not in ("adam", "sgd")), "draws that differ"


def test_adam_is_torchs_adam(jets: JetSets) -> None:
    """The baseline takes the steps of torch.optim.Adam, on the same batches (without dropout, whose masks are others)."""
    trial = Trial.of(TINY, "adam", steps=4, in_training_mode=False)
    torch.manual_seed(trial.seed)
    net = ParticleNetLite().eval()
    data = jets.data("train", net, trial.num_jets, trial.batch_size)
    data.restart(derive_seed(trial.seed, 2))
    adam, losses = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.99, 0.99)), []
    for _ in range(4):
        cloud, labels = next(data)
        adam.zero_grad()
        loss = F.cross_entropy(net(cloud), labels)
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    assert run(trial, jets)["loss"]["values"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("test", TESTS)
def test_every_test_runs_in_evaluation_mode(test: str, jets: JetSets) -> None:
    trial = Trial.of(
        TINY, "printed", sigma=0.2, sigma_delta=1000.0, scale="data_sum", test=test, start=2, in_training_mode=False
    )
    record = run(trial, jets)
    assert math.isfinite(record["acceptance"])
    assert trial.batch_size <= record["examples"] <= trial.num_jets
    assert (record["examples"] == trial.num_jets) == (test == "full")


@pytest.mark.parametrize(("scale", "wanted"), [("mean", 1.0), ("batch_sum", 12.0), ("data_sum", 48.0)])
def test_the_papers_settings_reach_the_sampler(scale: str, wanted: float, jets: JetSets) -> None:
    """sigma and sigma_Delta divided by the root of its network's size; lambda times what the loss is; both betas."""
    trial = Trial.of(TINY, "printed", sigma=2.0, sigma_delta=3661.6, scale=scale, lam=3.0, beta=0.5)
    run = _Run(trial, jets, CPU)
    method = run._method(jets.data("train", run.net, trial.num_jets, trial.batch_size))
    assert isinstance(method, _Sampling)
    group = method.sampler.param_groups[0]
    assert group["sigma"] == pytest.approx(2 / math.sqrt(PAPER_PARAMS))
    assert group["sigma_along"] == pytest.approx(6.051, abs=1e-3)
    assert group["betas"] == (0.5, 0.5)
    assert method.sampler.target.scale == pytest.approx(3.0 * wanted)


def test_a_chain_counts_from_its_burn_in_and_goes_on_with_adams_moments(jets: JetSets, monkeypatch: pytest.MonkeyPatch) -> None:
    rates, drawn, samplers = [], [], []
    step, draw = _Sampling.step, _Run._draw

    def noted(self: _Sampling, batch: Any) -> torch.Tensor:
        loss = step(self, batch)
        rates.append(float(self.sampler.info.acceptance_rate))
        samplers.append(self.sampler)
        return loss

    def at(self: _Run, held: Any) -> None:
        drawn.append(len(self.curve))
        draw(self, held)

    monkeypatch.setattr(_Sampling, "step", noted)
    monkeypatch.setattr(_Run, "_draw", at)
    record = run(Trial.of(TINY, "printed", sigma=2.0, sigma_delta=3661.6, start=2, steps=10, burn_in=4, num_draws=3), jets)
    assert drawn == [6, 8, 10]
    assert record["acceptance"] == pytest.approx(sum(rates[-6:]) / 6, rel=1e-5)
    assert len(set(rates)) > 1
    assert {float(state["step"]) for state in samplers[-1].state.values()} == {12.0}


def test_kappa_and_health_are_those_after_burn_in(jets: JetSets, monkeypatch: pytest.MonkeyPatch) -> None:
    """kappa = r / sqrt(1 + (sigma_along r)^2), with r = |u| / sigma, of every tenth step."""
    ratios, resets = [], []
    step, reset = _Sampling.step, Sampler.reset_health

    def noted(self: _Sampling, batch: Any) -> torch.Tensor:
        loss = step(self, batch)
        ratios.append(float(self.sampler.info.step_to_noise))
        return loss

    def note(self: Sampler) -> None:
        resets.append(len(ratios))
        reset(self)

    monkeypatch.setattr(_Sampling, "step", noted)
    monkeypatch.setattr(Sampler, "reset_health", note)
    trial = Trial.of(TINY, "printed", sigma=2.0, sigma_delta=100.0, steps=30, burn_in=10, num_draws=2)
    record = run(trial, jets)
    along = 100.0 / math.sqrt(PAPER_PARAMS)
    kappas = [r / math.sqrt(1 + (along * r) ** 2) for r in ratios]
    assert record["kappa"] == pytest.approx((kappas[19] + kappas[29]) / 2, rel=1e-5)
    assert record["kappa"] < 0.9 * (ratios[19] + ratios[29]) / 2, "the noise along the step counts"
    assert resets == [10]


def test_snapshots_are_points_of_adams_path(jets: JetSets) -> None:
    """The same steps, at the same rate; the last of them is what Adam ends with."""
    adam, snapshots = (run(Trial.of(TINY, method, lr=1e-2, looks=3), jets) for method in ("adam", "snapshots"))
    assert snapshots["loss"] == adam["loss"]
    assert snapshots["accuracy"] == adam["accuracy"]
    assert snapshots["draws"]["probes"][-1] == adam["draws"]["probes"][-1]
    assert len(snapshots["draws"]["probes"]) == 3
    assert snapshots["loss"] != run(Trial.of(TINY, "snapshots"), jets)["loss"]


def test_exact_chains_have_one_start_and_one_target(jets: JetSets) -> None:
    """Weights and BatchNorm statistics: the latter are part of the function that is sampled."""
    states = []
    for seed in (0, 1):
        chain = _Run(replace(Trial.exact(TINY), seed=seed, start=3), jets, CPU)
        chain._start(lambda done, total: None, Checkpoint(), None)
        states.append(chain.net.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))
    assert run(replace(Trial.exact(TINY, steps=9, burn_in=3, num_draws=3), start=2), jets)["examples"] == TINY.exact_data


class Killed(Exception):
    """Stands for SIGKILL after a state was written."""


class Deadly(Checkpoint):
    """Kills after so many states."""

    def __init__(self, path: Path, lives: list[int]) -> None:
        super().__init__(path, every=0.0)
        self.lives = lives

    def save(self, state: dict[str, Any]) -> None:
        super().save(state)
        self.lives[0] -= 1
        if self.lives[0] == 0:
            raise Killed

    def part(self, number: int) -> Deadly:
        return Deadly(super().part(number).path or Path(), self.lives)


@pytest.mark.parametrize("method", [*METHODS, "confidence"])
def test_a_killed_trial_goes_on_bit_for_bit(method: str, jets: JetSets, tmp_path: Path) -> None:
    """Killed again and again, in Adam's steps before the chain, in burn-in and between draws: the record is the same."""
    if method == "exact":
        trial = Trial.exact(TINY, steps=9, burn_in=3, num_draws=3, start=3)
    elif method == "confidence":
        trial = Trial.of(TINY, "printed", sigma=0.2, sigma_delta=1000.0, test=method, start=2, in_training_mode=False, looks=3)
    else:
        trial = Trial.of(TINY, method, sigma=2.0, sigma_delta=3661.6, start=0 if method in ("sgd", "sghmc") else 3, looks=2)
    undisturbed = run(trial, jets)
    for lives in range(1, 30):
        torch.manual_seed(lives)  # the process that goes on has other random numbers
        checkpoint = Deadly(tmp_path / ".state.safetensors", [lives])
        try:
            record = rounded(run_trial(trial, jets, CPU, lambda done, total: None, checkpoint))
        except Killed:
            continue
        break
    assert lives >= 3, "it was killed"
    record.pop("seconds")
    assert record == undisturbed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["adam", "sgd", "sghmc", "released", "printed", "exact", "ensemble"])
def test_a_killed_trial_goes_on_bit_for_bit_on_a_gpu(method: str, jets: JetSets, tmp_path: Path) -> None:
    """Where steps are graphs: a process that goes on takes its first steps without, and has the same numbers."""
    sizes: dict[str, Any] = {"precision": "bfloat16", "steps": 24, "burn_in": 8, "num_draws": 2}
    if method == "exact":
        trial = Trial.exact(TINY, steps=24, burn_in=8, num_draws=4, start=8)
    else:
        trial = Trial.of(TINY, method, sigma=2.0, sigma_delta=3661.6, start=0 if method in ("sgd", "sghmc") else 8, **sizes)
    device = torch.device("cuda")
    undisturbed = rounded(run_trial(trial, jets, device, lambda done, total: None))
    for lives in (5, 11, 13, 1000):
        torch.manual_seed(lives)
        checkpoint = Deadly(tmp_path / ".state.safetensors", [lives])
        with contextlib.suppress(Killed):
            record = rounded(run_trial(trial, jets, device, lambda done, total: None, checkpoint))
    for one in (record, undisturbed):
        one.pop("seconds")
    assert record == undisturbed


def test_a_state_that_cannot_be_read_is_begun_again(tmp_path: Path, jets: JetSets) -> None:
    path = tmp_path / ".state.safetensors"
    path.write_bytes(b"torn")
    trial = Trial.of(TINY, "adam")
    with pytest.warns(UserWarning, match="cannot be read .*begins again"):
        record = run_trial(trial, jets, CPU, lambda done, total: None, Checkpoint(path))
    assert record["loss"]["values"] == pytest.approx(run(trial, jets)["loss"]["values"], rel=1e-5)


def test_a_folder_keeps_no_states_of_trials_that_are_done(
    tmp_path: Path, jets: JetSets, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = []

    def note(self: Checkpoint, state: dict[str, Any]) -> None:
        saved.append(self.path)
        write(self, state)

    write = Checkpoint.save
    monkeypatch.setattr(Checkpoint, "is_due", True)
    monkeypatch.setattr(Checkpoint, "save", note)
    trials = [Trial.of(TINY, "adam"), Trial.of(TINY, "ensemble", num_draws=2)]
    Work(TINY, tmp_path, jets, progress=False).records(trials)
    assert len({path.name for path in saved if path}) == 4  # Adam's, the ensemble's, its two members'
    assert {path.suffix for path in (tmp_path / "trials").iterdir()} == {".json", ".lock"}


# --- the folder -------------------------------------------------------------------------------------------------------------


def test_a_trial_is_run_once(tmp_path: Path, jets: JetSets, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(trial: Trial, *args: Any) -> dict[str, Any]:
        calls.append(trial)
        return {"trial": asdict(trial), "value": math.nan, "device": "cpu", "torch": "2", "seconds": 1.0}

    monkeypatch.setattr("replication.work.run_trial", counted)
    trials = [Trial("adam", seed=seed) for seed in (0, 1, 0)]
    first = Work(TINY, tmp_path, jets, progress=False).records(trials)
    again = Work(TINY, tmp_path, jets, progress=False)
    assert again.records(trials) == first
    assert [t.seed for t in calls] == [0, 1]
    assert first[0]["value"] is None, "no NaN in the files"
    used = again.used()
    assert (used["number"], used["seeds"], used["devices"], used["torch"], used["seconds"]) == (2, [0, 1], ["cpu"], ["2"], 2.0)


def test_other_jets_are_other_trials(tmp_path: Path, jets: JetSets, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"trial": {"seed": 0}, "device": "cpu", "torch": "2", "seconds": 1.0}
    monkeypatch.setattr("replication.work.run_trial", lambda *args: record)
    for sets in (jets, JetSets(jets.test, jets.train, jets.others)):
        Work(TINY, tmp_path, sets, progress=False).records([Trial("adam")])
    assert len(list((tmp_path / "trials").glob("*.json"))) == 2


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    work = Work(TINY, tmp_path, progress=False)
    work.kept("a", lambda: 1)
    (tmp_path / "trials" / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json' is damaged .*remove it"):
        work.kept("a", lambda: 1)


def _take_long(folder: Path, started: Any) -> None:
    def wait() -> int:
        started.set()
        time.sleep(60)
        return 1

    Work(TINY, folder, progress=False).kept("a", wait)


def test_what_a_killed_process_was_at_is_done_by_another(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=_take_long, args=(tmp_path, started))
    process.start()
    assert started.wait(60)
    work = Work(TINY, tmp_path, progress=False)
    with pytest.raises(BlockingIOError):
        work.kept("a", lambda: 2)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert work.kept("a", lambda: 2) == 2


def test_jets_that_are_missing_are_said_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no train: make it with `adammcmc jets generate .*train --jets 13000`"):
        read_sets(PRESETS["h200"], tmp_path)
    with pytest.raises(ValueError, match="needs 26,000 top and QCD jets, there are 12,000"):
        read_sets(PRESETS["h200"])


@pytest.mark.parametrize(("call", "words"), [
    (lambda: Trial("sgld"), "no method 'sgld'"),
    (lambda: Trial("printed", test="mini"), "no test 'mini'"),
    (lambda: Trial("adam", steps=500), "a burn-in of 1,000 steps leaves no draws in 500 steps"),
    (lambda: preset("large"), "no preset 'large'. Known: smoke, small, h200, paper"),
])  # fmt: skip
def test_unknown_names_and_no_draws(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


# --- numbers ----------------------------------------------------------------------------------------------------------------


def test_rows_are_means_over_seeds(tmp_path: Path, jets: JetSets) -> None:
    work = Work(TINY, tmp_path, jets, progress=False)
    settings = [Trial.of(TINY, "printed", sigma=sigma, sigma_delta=3661.6) for sigma in (0.2, 2.0)]
    table = rows(work, settings, 3)
    assert [r["setting"]["sigma"] for r in table] == [0.2, 2.0]
    own = [r["acceptance"] for r in work.records([replace(settings[1], seed=seed) for seed in range(3)])]
    mean, error = over_seeds(own) or (0.0, 0.0)
    assert table[1]["acceptance"] == (mean, error)
    assert mean == pytest.approx(sum(own) / 3)
    assert [t.seed for t in seeds_of(settings, 2)] == [0, 0, 1, 1]


def test_coverage_of_draws_that_know_and_of_draws_that_do_not() -> None:
    generator = torch.Generator().manual_seed(0)
    honest, wrong = [], []
    for _ in range(20):
        truth = torch.rand(4000, generator=generator)
        labels = (torch.rand(4000, generator=generator) < truth).long()
        shifts = 0.1 * torch.randn(10, 1, generator=generator)
        honest.append(coverage(torch.sigmoid(torch.logit(truth) + shifts - shifts.mean()), labels))
        wrong.append(coverage(torch.sigmoid(3 * torch.logit(truth) + shifts), labels))
    # 400 bins, a little more than nine tenths: the draws' own spread comes on top of the binomial error
    assert 0.88 <= sum(x or 0 for x in honest) / 20 <= 0.97
    assert sum(x or 0 for x in wrong) / 20 <= 0.5
    assert coverage(torch.rand(2, 4000, generator=generator), labels) is None
    assert 0.7 <= (coverage(truth[None], labels) or 0) <= 1, "calibrated scores need no spread"


def test_the_spread_is_the_range_between_quartiles(jets: JetSets) -> None:
    draws = torch.linspace(0, 1, 5)[:, None].expand(5, len(jets.test))
    found = judge(draws, draws[:, :0], jets.test, Jets.empty())
    assert found["mean_spread"] == pytest.approx(0.5)
    assert found["groups"]["qcd, right"]["spread"][1] == pytest.approx(0.5)


def test_a_judgement_without_others_or_with_one_draw(jets: JetSets) -> None:
    scores = torch.rand(3, len(jets.test), generator=torch.Generator().manual_seed(0))
    alone = judge(scores, scores[:, :0], jets.test, Jets.empty())
    assert "others" not in alone
    assert alone["information"].keys() == {"qcd", "top"}
    assert "information" not in judge(scores[:1], scores[:1, :0], jets.test, Jets.empty())


def test_rounded_is_json() -> None:
    assert rounded({"a": [1.23456789, math.inf, (2, "x")]}) == {"a": [1.23457, None, [2, "x"]]}
