"""Trials: the same settings give the same record, and a folder keeps it, even if processes are killed."""

from __future__ import annotations

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

from adammcmc import Event
from adammcmc.jets import Jets
from adammcmc.jets.particlenet import ParticleNetLite
from adammcmc.target.data import derive_seed
from replication import trials
from replication.measures import coverage, judge, over_seeds, rounded
from replication.rows import rows, seeds_of
from replication.sets import JetSets, read_sets
from replication.settings import PAPER_PARAMS, PRESETS, preset
from replication.trials import METHODS, TESTS, Trial, run_trial
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


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Event, dict[str, float]]]:
    """Each step of the runs, with its numbers."""
    seen: list[tuple[Event, dict[str, float]]] = []
    on_step = trials._Notes.on_step

    def noted(self: trials._Notes, event: Event) -> None:
        on_step(self, event)
        info = event.sampler.info
        seen.append((event, {name: float(getattr(info, name)) for name in ("acceptance_rate", "step_to_noise", "loss")}))

    monkeypatch.setattr(trials._Notes, "on_step", noted)
    return seen


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
    assert ("loss" in record) == (method != "ensemble")
    assert ("silent" in record) == (method == "sghmc")
    assert (record["draws"]["mean_spread"] > 0) == (method not in ("adam", "sgd")), "draws that differ"


@pytest.mark.parametrize("method", ["adam", "sgd"])
def test_a_baseline_is_torchs_optimizer(method: str, jets: JetSets) -> None:
    """The same steps on the same batches (without dropout, whose masks differ)."""
    trial = Trial.of(TINY, method, lr=1e-2, steps=4, in_training_mode=False)
    torch.manual_seed(trial.seed)
    net = ParticleNetLite().eval()
    data = jets.data("train", net, trial.num_jets, trial.batch_size)
    data.restart(derive_seed(trial.seed, 0, 1))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    if method == "adam":
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.99, 0.99))
    losses = []
    for _ in range(4):
        cloud, labels = next(data)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(cloud), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert run(trial, jets)["loss"]["values"] == pytest.approx(losses, rel=1e-5)


def test_sghmc_takes_the_steps_of_its_equations(jets: JetSets) -> None:
    """Through `sample`: the gradient is that of the mean loss, which the optimizer multiplies by the number of jets."""
    trial = Trial.of(TINY, "sghmc", lr=1e-3, steps=4, burn_in=2, num_draws=2, in_training_mode=False)
    torch.manual_seed(trial.seed)
    net = ParticleNetLite().eval()
    data = jets.data("train", net, trial.num_jets, trial.batch_size)
    data.restart(derive_seed(trial.seed, 0, 1))
    torch.manual_seed(derive_seed(trial.seed, 0, 2))
    optimizer = trials.ScaleAdaptedSGHMC(net.parameters(), 1e-3, num_data=48, burn_in=2)
    losses = []
    for _ in range(4):
        cloud, labels = next(data)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(cloud), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    record = run(trial, jets)
    assert record["loss"]["values"] == pytest.approx(losses, rel=1e-5)
    assert record["silent"] == trials.noiseless_share(optimizer.state.values(), 1e-3)


@pytest.mark.parametrize("test", TESTS)
def test_every_acceptance_test_runs_in_evaluation_mode(test: str, jets: JetSets) -> None:
    trial = Trial.of(
        TINY, "printed", sigma=0.2, sigma_delta=1000.0, scale="data_sum", test=test, start=2, in_training_mode=False
    )
    record = run(trial, jets)
    assert math.isfinite(record["acceptance"])
    assert trial.batch_size <= record["examples"] <= trial.num_jets
    assert (record["examples"] == trial.num_jets) == (test == "full")


@pytest.mark.parametrize(("scale", "wanted"), [("mean", 1.0), ("batch_sum", 12.0), ("data_sum", 48.0)])
def test_the_papers_settings_reach_the_sampler(scale: str, wanted: float, jets: JetSets, watched: list[Any]) -> None:
    """sigma and sigma_Delta divided by the root of its network's size; lambda times the scale of the loss; both
    betas."""
    run(Trial.of(TINY, "printed", sigma=2.0, sigma_delta=3661.6, scale=scale, lam=3.0, beta=0.5), jets)
    sampler = watched[-1][0].sampler
    group = sampler.param_groups[0]
    assert group["sigma"] == pytest.approx(2 / math.sqrt(PAPER_PARAMS))
    assert group["sigma_along"] == pytest.approx(6.051, abs=1e-3)
    assert group["betas"] == (0.5, 0.5)
    assert sampler.target.scale == pytest.approx(3.0 * wanted)


def test_a_chain_counts_from_its_burn_in_and_continues_with_adams_moments(
    jets: JetSets, watched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(trials._Notes, "on_draw", lambda self, event, record: drawn.append(record["step"]))
    record = run(Trial.of(TINY, "printed", sigma=2.0, sigma_delta=3661.6, start=2, steps=10, burn_in=4, num_draws=3), jets)
    rates = [numbers["acceptance_rate"] for _, numbers in watched]
    assert drawn == [2, 6, 8, 10], "of the steps of Adam, and of the chain"
    assert record["acceptance"] == pytest.approx(sum(rates[-6:]) / 6, rel=1e-5)
    assert len(set(rates)) > 1
    assert {float(state["step"]) for state in watched[-1][0].sampler.state.values()} == {12.0}


def test_kappa_and_the_loss_curve(jets: JetSets, watched: list[Any]) -> None:
    """kappa = r / sqrt(1 + (sigma_along r)^2), with r = |u| / sigma, at every tenth step after burn-in; all losses."""
    record = run(Trial.of(TINY, "printed", sigma=2.0, sigma_delta=100.0, steps=30, burn_in=10, num_draws=2), jets)
    ratios = [numbers["step_to_noise"] for _, numbers in watched]
    along = 100.0 / math.sqrt(PAPER_PARAMS)
    kappas = [r / math.sqrt(1 + (along * r) ** 2) for r in ratios]
    assert record["kappa"] == pytest.approx((kappas[19] + kappas[29]) / 2, rel=1e-5)
    assert record["kappa"] < 0.9 * (ratios[19] + ratios[29]) / 2, "the noise along the step counts"
    assert record["loss"]["values"] == pytest.approx([numbers["loss"] for _, numbers in watched], rel=1e-5)
    assert [event.is_burning_in for event, _ in watched] == [True] * 9 + [False] * 21


def test_a_long_loss_curve_is_averaged_over_windows(jets: JetSets, monkeypatch: pytest.MonkeyPatch) -> None:
    every = run(Trial.of(TINY, "adam"), jets)["loss"]
    monkeypatch.setattr(trials, "_WINDOWS", 3)
    pairs = run(Trial.of(TINY, "adam"), jets)["loss"]
    assert pairs["every"] == 2
    means = [(a + b) / 2 for a, b in zip(every["values"][::2], every["values"][1::2], strict=True)]
    assert pairs["values"] == pytest.approx(means, rel=1e-5)


def test_snapshots_are_points_of_adams_path(jets: JetSets) -> None:
    """The same steps, at the same rate; Adam ends with the last of them."""
    adam, snapshots = (run(Trial.of(TINY, method, lr=1e-2, looks=3), jets) for method in ("adam", "snapshots"))
    assert snapshots["loss"] == adam["loss"]
    assert snapshots["accuracy"] == adam["accuracy"]
    assert snapshots["accuracy"]["steps"] == [2, 4, 6]
    assert snapshots["draws"]["probes"][-1] == pytest.approx(adam["draws"]["probes"][-1], rel=1e-4)
    assert len(snapshots["draws"]["probes"]) == 3
    assert snapshots["accuracy"]["values"][-1] == pytest.approx(adam["draws"]["accuracy"][0], rel=1e-5)
    assert snapshots["loss"] != run(Trial.of(TINY, "snapshots"), jets)["loss"]


def test_exact_chains_have_one_start_and_one_target(jets: JetSets, watched: list[Any]) -> None:
    """Weights and BatchNorm statistics: the latter are part of the function that is sampled."""
    losses: list[list[float]] = []
    for seed in (0, 1):
        trial = replace(Trial.exact(TINY, steps=9, burn_in=3, num_draws=3), seed=seed, start=3)
        assert run(trial, jets)["examples"] == TINY.exact_data
        losses.append([numbers["loss"] for _, numbers in watched])
        watched.clear()
    assert losses[0][:4] == losses[1][:4], "Adam's steps, and the loss where the chain starts"
    assert losses[0][4:] != losses[1][4:]


def test_weights_that_diverge_are_reported_with_the_trial(jets: JetSets) -> None:
    with pytest.raises(ValueError, match=r"sgd with learning rate 1e\+30, sigma 0, seed 4: the weights diverged"):
        run(Trial.of(TINY, "sgd", lr=1e30, seed=4), jets)


# --- killed, and resumed ----------------------------------------------------------------------------------------------


class Killed(Exception):
    """Stands for SIGKILL: nothing more is written."""


def killed(trial: Trial, jets: JetSets, folder: Path, after: int, device: torch.device = CPU) -> dict[str, Any] | None:
    """The record, or None if the process was killed first: without a checkpoint, or (even numbers) with one, by
    Ctrl-C."""
    steps = 0

    def report(done: int, total: int) -> None:
        nonlocal steps
        steps += 1
        if steps == after:
            if after % 2:
                raise Killed
            signal.raise_signal(signal.SIGINT)

    torch.manual_seed(after)  # the process that continues has other random numbers
    try:
        return dict(rounded(run_trial(trial, jets, device, report, folder)))
    except (Killed, KeyboardInterrupt):
        return None


def same(a: dict[str, Any] | None, b: dict[str, Any]) -> bool:
    return {**(a or {}), "seconds": 0} == {**b, "seconds": 0}


@pytest.mark.parametrize("method", [*METHODS, "confidence"])
def test_a_killed_trial_continues_bit_for_bit(method: str, jets: JetSets, tmp_path: Path) -> None:
    """Killed again and again, in Adam's steps before the chain, in burn-in and between draws: the record is the
    same."""
    if method == "exact":
        trial = Trial.exact(TINY, steps=9, burn_in=3, num_draws=3, start=3)
    elif method == "confidence":
        trial = Trial.of(TINY, "printed", sigma=0.2, sigma_delta=1000.0, test=method, start=2, in_training_mode=False, looks=3)
    else:
        trial = Trial.of(TINY, method, sigma=2.0, sigma_delta=3661.6, start=0 if method in ("sgd", "sghmc") else 3, looks=2)
    undisturbed = run(trial, jets)
    attempts = (2, 1, 3, 2, 4, 100)
    records = [killed(trial, jets, tmp_path / "run", after) for after in attempts]
    assert records.count(None) >= 3, "it was killed"
    assert same(records[-1], undisturbed)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:steps are not captured", "ignore:The AccumulateGrad")  # of SGD and sgHMC: they run eagerly
@pytest.mark.parametrize("method", ["adam", "sgd", "sghmc", "released", "printed", "exact", "ensemble"])
def test_a_killed_trial_continues_bit_for_bit_on_a_gpu(method: str, jets: JetSets, tmp_path: Path) -> None:
    """Where steps are graphs: a process that continues takes its first steps without, and has the same numbers."""
    sizes: dict[str, Any] = {"precision": "bfloat16", "steps": 24, "burn_in": 8, "num_draws": 2}
    if method == "exact":
        trial = Trial.exact(TINY, steps=24, burn_in=8, num_draws=4, start=8)
    else:
        trial = Trial.of(TINY, method, sigma=2.0, sigma_delta=3661.6, start=0 if method in ("sgd", "sghmc") else 8, **sizes)
    device = torch.device("cuda")
    undisturbed = rounded(run_trial(trial, jets, device, lambda done, total: None))
    records = [killed(trial, jets, tmp_path / "run", after, device) for after in (6, 12, 13, 1000)]
    assert same(records[-1], undisturbed)


def test_a_finished_start_is_not_run_again(jets: JetSets, tmp_path: Path, watched: list[Any]) -> None:
    trial = Trial.of(TINY, "printed", sigma=2.0, sigma_delta=3661.6, start=3)
    assert killed(trial, jets, tmp_path / "run", 5) is None
    watched.clear()
    killed(trial, jets, tmp_path / "run", 100)
    assert [event.step for event, _ in watched] == [1, 2, 3, 4, 5, 6]


def test_a_damaged_run_starts_again(tmp_path: Path, jets: JetSets) -> None:
    trial = Trial.of(TINY, "adam")
    assert killed(trial, jets, tmp_path / "run", 5) is None
    for path in (tmp_path / "run" / "chain").rglob("*"):
        if path.suffix in (".json", ".safetensors"):
            path.write_bytes(b"torn")
    with pytest.warns(UserWarning, match="cannot be resumed .*starts again"):
        record = killed(trial, jets, tmp_path / "run", 100)
    assert same(record, run(trial, jets))


def test_seconds_are_those_of_all_processes(jets: JetSets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of Adam's steps before the chain; each step takes 100 seconds."""
    began, now = time.perf_counter(), [0.0]
    monkeypatch.setattr(trials.time, "perf_counter", lambda: began + now[0])
    note = trials._Notes._note

    def slow(self: trials._Notes, event: Event) -> None:
        now[0] += 100.0 * (event.sampler.num_steps != self._step)
        note(self, event)

    monkeypatch.setattr(trials._Notes, "_note", slow)
    trial = Trial.of(TINY, "adam", start=3)
    for after in (2, 2, 4):
        assert killed(trial, jets, tmp_path / "run", after) is None
    record = killed(trial, jets, tmp_path / "run", 100)
    assert record is not None
    assert record["seconds"] == pytest.approx(900.0), "three steps of Adam and six of the chain, each once"


# --- the folder -------------------------------------------------------------------------------------------------------


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
    (lambda: Trial("sgld"), "unknown method 'sgld'"),
    (lambda: Trial("printed", test="mini"), "unknown test 'mini'"),
    (lambda: Trial("adam", steps=500), "a burn-in of 1,000 steps leaves no draws in 500 steps"),
    (lambda: preset("large"), "unknown preset 'large'. Known: smoke, small, h200, paper"),
])  # fmt: skip
def test_unknown_names_and_no_draws(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_a_folder_keeps_no_unfinished_runs_of_finished_trials(tmp_path: Path, jets: JetSets) -> None:
    """Also where a process was killed after the record was written, or while it was."""
    work, folder = Work(TINY, tmp_path, jets, progress=False), tmp_path / "trials"
    work.records([Trial.of(TINY, "adam"), Trial.of(TINY, "ensemble", num_draws=2)])
    (folder / ".a.json.99999.json").write_text("{")
    assert work.kept("a", lambda: 1) == 1
    (folder / ".a.run-0" / "chain").mkdir(parents=True)
    assert work.kept("a", lambda: 2) == 1
    assert {path.suffix for path in folder.iterdir()} == {".json", ".lock"}
    assert not list(folder.glob(".a.json*"))


def test_an_unfinished_run_is_kept_until_its_record_is_written(tmp_path: Path) -> None:
    run = tmp_path / "trials" / ".a.run-0"
    run.mkdir(parents=True)

    def fails() -> None:
        assert run.exists()
        raise Killed

    with pytest.raises(Killed):
        Work(TINY, tmp_path, progress=False).kept("a", fails)
    assert run.exists()


def test_a_run_of_another_device_is_not_continued(tmp_path: Path, jets: JetSets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps must not be mixed into a record that names this device."""
    folders = []
    for name in ("this one", "another"):
        monkeypatch.setattr("replication.work.device_name", lambda device, name=name: name)
        folders.append(Work(TINY, tmp_path, jets, progress=False)._unfinished("a"))
    assert folders[0] != folders[1]
    assert all(folder.match(".a.run-*") for folder in folders)


def test_a_trials_own_error_is_not_mistaken_for_a_lock(tmp_path: Path) -> None:
    """Or it would be called again and again."""
    calls: list[str] = []

    def fails() -> None:
        assert not calls
        calls.append("once")
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with pytest.raises(RuntimeError, match="temporarily unavailable"):
        Work(TINY, tmp_path, progress=False).all_kept({"a": fails})


# --- numbers ----------------------------------------------------------------------------------------------------------


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
