"""The record of burn-in: kept with a run, used by the next one, shown while it runs, ended in time, and checked afterwards."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adammcmc
from adammcmc import (
    AdamMCMC,
    BurnIn,
    Gaussian,
    Microcanonical,
    Plan,
    Posterior,
    Underdamped,
    WarmUp,
    kernels,
    sample_density,
    warm_up,
)
from adammcmc.cli.recipe import Source, prepare
from adammcmc.samplers.adaptation import Adaptation
from adammcmc.samplers.aim import limits
from adammcmc.samplers.progress import Bar, show_bar
from adammcmc.samplers.warmup import in_a_line
from tests.optimizers import OPTIMIZERS, X, Y, closure, network, seeded, underdamped

FAST = BurnIn(num_steps=120, window=20)
METRICS = {"diagonal": Underdamped, "kron": partial(Underdamped, preconditioner="kron")}


def run(path: Path | None = None, **options: Any) -> Posterior:
    own = {"num_draws": 4, "gap": 2, "num_chains": 2, "prior": Gaussian(), "progress": False}
    if "warm_up" not in options:
        own["burn_in"] = FAST
    return adammcmc.sample(network(), (X, Y), F.cross_entropy, path=path, **(own | options))


def tensors(settings: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(settings) if isinstance(x, Tensor)]


# --- kept ---------------------------------------------------------------------------------------------------------------


class Remember(adammcmc.Callback):
    """The last record that each chain itself reports."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.records: dict[int, WarmUp] = {}
        self.stop_at = stop_at

    def on_step(self, event: adammcmc.Event) -> None:
        record = event.sampler.warm_up
        assert record is not None
        self.records[event.chain] = record
        if event.step == self.stop_at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("metric", METRICS)
def test_a_run_keeps_the_record_of_its_burn_in(stacked: bool, metric: str, tmp_path: Path) -> None:
    """What the chains themselves report, in memory and from a folder, without wall time; also of a run that was stopped."""
    seen, options = Remember(), {"stacked": stacked, "sampler": METRICS[metric]}
    here = run(callbacks=[seen], **options)
    with contextlib.suppress(KeyboardInterrupt):
        run(tmp_path / "run", callbacks=[Remember(stop_at=50)], **options)
    partly = Posterior.open(tmp_path / "run", network()).warm_up[0]
    assert partly is not None
    assert partly.num_steps in (0, 50)
    assert partly.reason.startswith("not over yet: ")
    assert not partly.is_settled
    run(tmp_path / "run", resume=True, callbacks=[Remember()], **options)
    for posterior in (here, Posterior.open(tmp_path / "run", network())):
        assert len(posterior.warm_up) == 2
        for chain, record in enumerate(posterior.warm_up):
            told = seen.records[chain]
            assert record is not None
            assert math.isnan(record.seconds)
            assert told.seconds > 0
            assert replace(record, seconds=0.0) == replace(told, seconds=0.0)
            assert record.settings.keys() == told.settings.keys() == {"step_size", "preconditioner"}
            assert record.settings["step_size"] == told.settings["step_size"]
            pairs = zip(tensors(record.settings), tensors(told.settings), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
        assert [record.trend for record in posterior.chain(1).warm_up] == [posterior.warm_up[1].trend]  # type: ignore[union-attr]
        with pytest.raises(TypeError, match="no kernel to unpack"):
            list(posterior.warm_up[0])  # type: ignore[arg-type]
    assert here.warm_up[0].num_steps == 120  # type: ignore[union-attr]


def test_the_record_is_printed_and_reported(tmp_path: Path) -> None:
    for stacked in (False, True):
        posterior = run(stacked=stacked)
        (line,) = (line for line in str(posterior).splitlines() if line.startswith("  burn-in: "))
        assert line.removeprefix("  burn-in: ") == posterior.summary().burn_in
        assert f"burn-in: {posterior.summary().burn_in}" in str(posterior.summary())
        assert posterior.summary().to_dict()["burn_in"]
        for words in ("120 steps", "acceptance 0.", "step size 0.", "diagonal preconditioner", "120 steps were asked for"):
            assert words in line, line
        assert ("U " in line) == stacked  # the chains of a stack share theirs
        page = posterior.report(tmp_path / "report.html", progress=False).read_text()
        section = page[page.index('<h2 id="burn-in">') :].partition("</section>")[0]
        assert section.count('<th scope="row">') == (1 if stacked else 2)
        record = posterior.warm_up[0]
        assert record is not None
        for words in (record.levels, record.reason, record.scaling, "<svg", f"{record.acceptance:.2f} (target 0.85)"):
            assert words in section, words
    plain = run(sampler=partial(Underdamped, step_size=0.05), burn_in=10)
    assert plain.warm_up == [None, None]
    assert "burn-in:" not in str(plain)
    assert 'id="burn-in"' not in plain.report(tmp_path / "plain.html", progress=False).read_text()


def test_chains_of_a_run_share_a_line() -> None:
    one = replace(RECORD, num_steps=1200, acceptance=0.83, step_size=0.1, trend=((9, 5.0), (99, 7.0)), reason="U is level")
    assert in_a_line([one]) == "1,200 steps, U 5 -> 7, acceptance 0.83, step size 0.1, kronecker preconditioner; U is level"
    both = in_a_line([one, replace(one, num_steps=900, step_size=0.2, trend=(), reason="late")])
    assert both == ("900 to 1,200 steps, acceptance 0.83, step size 0.1 to 0.2, kronecker preconditioner; U is level; late")


RECORD = WarmUp(
    kernel=None,
    params=None,
    num_steps=500,
    num_gradients=620,
    num_descent=0,
    num_approach=100,
    step_size=0.1,
    scaling="kronecker preconditioner",
    acceptance=0.8,
    target_acceptance=0.85,
    acceptance_by_chain=(),
    agreement=None,
    frozen=(),
    trend=(),
    is_settled=True,
    reason="",
    seconds=1.0,
    sampler="Underdamped",
    settings={"step_size": 0.1},
)


# --- used by the next run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("metric", METRICS)
def test_a_run_starts_with_the_burn_in_of_another(stacked: bool, metric: str, tmp_path: Path) -> None:
    run(tmp_path / "first", stacked=stacked, sampler=METRICS[metric])
    first = Posterior.open(tmp_path / "first", network())
    records = first.warm_up
    for given in (records[1], [records[1]], records):
        if given is records and metric == "kron" and stacked:
            continue
        again = run(tmp_path / str(id(given)), warm_up=given, burn_in=6, stacked=stacked)
        assert again.index[0]["step"] == 8  # plain steps, then a gap
        assert again.warm_up == [None, None]
        for chain in range(2):
            source = first.settings(chain if given is records else 1)
            now = Posterior.open(again.store.path, network()).settings(chain)  # type: ignore[arg-type]
            assert now["step_size"] == source["step_size"]
            assert len(tensors(now)) == (8 if metric == "kron" and not stacked else len(tensors(source)))
            for a, b in zip(tensors(now), tensors(source), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    options: dict[str, Any] = {"warm_up": records[1], "stacked": stacked}
    assert run(**options).index[0]["step"] == 2 + 2  # a quarter of the 8 steps that follow is burn-in
    with contextlib.suppress(KeyboardInterrupt):
        run(tmp_path / "parts", callbacks=[Stop(3)], **options)
    other = replace(records[1], settings={**records[1].settings, "step_size": 0.01})  # type: ignore[union-attr]
    with pytest.raises(adammcmc.StoreMismatch, match="warm_up"):
        run(tmp_path / "parts", resume=True, **(options | {"warm_up": other}))
    whole, parts = run(**options), run(tmp_path / "parts", resume=True, **options)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(whole, parts, strict=True) for name in a)


def test_chains_of_a_stack_may_have_records_of_their_own() -> None:
    record = run(stacked=True).warm_up[0]
    assert record is not None
    slow = replace(record, settings={**record.settings, "step_size": 0.01})
    posterior = run(warm_up=[record, slow], stacked=True)
    wanted = [record.settings["step_size"], 0.01]
    assert [posterior.settings(c)["step_size"] for c in range(2)] == wanted
    used = posterior.store.saved(None)["sampler"]["settings"]["step_size"]  # type: ignore[index]
    assert (used[0] if isinstance(used, list) else used).tolist() == wanted


class Stop(adammcmc.Callback):
    """As Ctrl-C would, at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, event: adammcmc.Event) -> None:
        if event.step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["Underdamped", "kron", "Microcanonical", "MALA", "AdamMCMC", "ExactAdamMCMC"])
def test_a_sampler_takes_the_settings_of_a_record(name: str) -> None:
    """From the same point with the same numbers it moves as the sampler that tuned them, bit for bit."""
    model = network()
    options = {"preconditioner": "kron"} if name == "kron" else {}
    make = OPTIMIZERS["Underdamped" if name == "kron" else name]
    first = make(model, fixed_data=True, burn_in=FAST, **options)
    while first.is_adapting:
        first.step(closure(model))
    record = first.warm_up
    assert record is not None
    assert record.sampler == type(first).__name__
    weights = copy.deepcopy(model.state_dict())
    again = network()
    again.load_state_dict(weights)
    settings = dict(record.settings)
    second = make(again, fixed_data=True, **settings)
    assert not second.is_adapting
    if name in ("AdamMCMC", "ExactAdamMCMC"):
        assert "lr" not in settings  # not tuned
        assert second.param_groups[0]["sigma"] == first.param_groups[0]["sigma"] != 1e-2
        assert ("momentum_spread" in settings) == (name == "ExactAdamMCMC")
    first.chains.memory = second.chains.memory = None
    first.chains.forget()
    for p in model.parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            first.state[p].pop(key, None)
    second.generator.set_state(first.generator.get_state())
    for _ in range(5):
        first.step(closure(model))
        second.step(closure(again))
    assert any(not torch.equal(p, weights[key]) for key, p in model.state_dict().items())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_a_density_continues_with_the_kernel_of_a_record() -> None:
    start = torch.randn(8, 3, dtype=torch.float64, generator=seeded())
    first = sample_density(normal, start, num_steps=50, tune=BurnIn(num_steps=200), progress=False)
    kernel, params = first.warm_up
    again = sample_density(normal, params, kernel, num_steps=50, seed=3, progress=False)
    assert again.kernel.step_size == first.kernel.step_size  # type: ignore[attr-defined]
    assert 0.7 < float(again.info.acceptance_rate.mean()) < 0.97


def normal(x: Tensor) -> Tensor:
    return -x.square().sum(1) / 2


def test_records_that_do_not_fit_are_refused() -> None:
    def plan(**options: Any) -> Plan:
        return Plan(network(), (X, Y), F.cross_entropy, **({"warm_up": RECORD, "prior": Gaussian()} | options))

    assert "with the settings of an earlier burn-in" in str(plan())
    for options, message in (
        ({"warm_up": [None]}, "got NoneType"),
        ({"warm_up": replace(RECORD, settings={})}, "got one without settings"),
        ({"warm_up": [RECORD] * 3, "num_chains": 2}, "3 records for 2 chains"),
        ({"burn_in": BurnIn()}, "`burn_in` must be a number of steps"),
        ({"sampler": Microcanonical}, "record of Underdamped, and the sampler is Microcanonical"),
        ({"sampler": partial(Underdamped, burn_in=BurnIn())}, "leave out the sampler's `burn_in`"),
        ({"sampler": partial(Underdamped, step_size=torch.tensor([0.1, 0.2])), "num_chains": 2}, "has a value for each chain"),
        ({"sampler": lambda params, num_data: 0, "prior": None}, "which `sampler` does not take"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            plan(**options).manifest()
    with pytest.warns(UserWarning, match="did not settle: U was still moving"):
        plan(warm_up=replace(RECORD, is_settled=False, reason="U was still moving"))
    bad = [(torch.ones(16, 5), torch.eye(20), None), *(torch.ones(p.shape) for p in list(network().parameters())[1:])]
    with pytest.raises(ValueError, match=r"a basis \(20, 20\) for a parameter \(16, 5\)"):
        underdamped(network(), preconditioner=bad)
    with pytest.raises(ValueError, match="needs a velocity"):
        OPTIMIZERS["MALA"](network(), preconditioner=[(torch.ones(16, 5), None, None), *bad[1:]])


def test_the_approach_of_one_chain_keeps_its_direction() -> None:
    """A metric in another dtype than the weights would draw a new direction at each step."""
    model = network()
    sampler = underdamped(model, step_size=None, fixed_data=True)
    for _ in range(3):
        sampler.step(closure(model))
        assert sampler.chains.adaptation.approach is not None  # type: ignore[union-attr]
        memory = sampler.chains.memory
        assert sampler._gather(sampler.layout(), memory) is memory


# --- shown --------------------------------------------------------------------------------------------------------------


def feed(adaptation: Adaptation, level: Callable[[int], float], apart: float = 0.0) -> Iterator[str]:
    """What the bar shows, step by step: four chains of U at a level, whose positions differ by `apart`."""
    g, step = seeded(), 0
    while not adaptation.is_done:
        u = level(step) + math.sqrt(5) * torch.randn(4, generator=g).double()
        x = torch.randn(4, 10, generator=g).double() + apart * torch.arange(4)[:, None] * (step < 3000)
        rate = torch.full((4,), 0.85).double()
        adaptation.observe(rate, u, torch.full((4,), 0.1), (x,), 1.0, 0.7 * torch.randn(4, generator=g).double(), (x,))
        yield adaptation.status()
        step += 1


def test_the_bar_shows_the_phase_u_and_what_it_waits_for() -> None:
    made: dict[str, Any] = {"target": 0.85, "num_params": 10, "velocity": True, "watches": True, "shapes": [[torch.Size([10])]]}
    adaptation = Adaptation(BurnIn(), approaches=True, **made)
    adaptation.approach.steps(torch.zeros(1), 4)  # type: ignore[union-attr]
    shown = list(dict.fromkeys(feed(adaptation, lambda step: 2e6 * math.exp(-step / 20), apart=5.0)))
    kinds = list(dict.fromkeys(text.partition(":")[0].partition(" (R-hat")[0] for text in shown))
    assert kinds == [
        "approach until U settles",
        "approach with shorter and shorter steps",
        "tuning until U settles",
        "tuning until chains agree",
        "tuning in the last window",
    ]
    assert max(map(len, shown)) <= 78
    before, now = ((f"{u:.5g}", u) for _, u in adaptation.trend[:2])
    assert f": U {before[0]}" in shown[1] or f": U {before[0]}" in shown[2]
    assert any(f": U {now[0]} ({now[1] - before[1]:+.2g})" in text for text in shown)
    assert any("agree (R-hat" in text and text.endswith(", acceptance 0.85") for text in shown)
    fixed = Adaptation(BurnIn(num_steps=300, approach=False), **made)
    assert next(feed(fixed, lambda step: 5.0)) == "tuning until step 300: acceptance 0.85"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_and_its_status_fit_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("adammcmc.samplers.progress.time.monotonic", iter(range(1, 10**6)).__next__)
    status = "tuning until chains agree (R-hat 1.08): U -1.2346e+06 (-3.1e+05), acceptance 0.84"
    with show_bar("chain 12/16") as bar:
        for done in range(12_000, 12_005):
            bar.update(done, 51_000, lambda: status)
    lines = [line for line in terminal.getvalue().replace("\r", "\n").splitlines() if "tuning" in line]
    assert lines
    text = terminal.getvalue()
    assert "12004/51000" in text
    assert "tuning until chains agree (R-hat 1.08): U -1.2346e+06 (-3.1e+05)" in text
    printed = [line for line in strip(text).replace("\r", "\n").splitlines() if line.strip()]
    assert max(map(len, printed)) <= 80


def strip(text: str) -> str:
    """Without the sequences that colour text and move the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("burn_in", [None, 30, FAST, BurnIn(max_steps=200, max_seconds=1000)], ids=str)
def test_the_bar_has_an_upper_end_always(burn_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, Any, str]] = []
    monkeypatch.setattr(Bar, "update", lambda self, done, total, status: seen.append((done, total, status())))
    with warnings.catch_warnings(action="ignore"):
        run(burn_in=burn_in or BurnIn(max_steps=200), num_chains=1)
    assert all(isinstance(total, int) and total >= done for done, total, _ in seen)
    assert seen[0][1] == {30: 38, FAST: 128}.get(burn_in, 208)
    assert seen[-1][:2] == (seen[-1][1], seen[-1][1])
    assert "tuning" in seen[0][2] or "approach" in seen[0][2]
    assert seen[-1][2].startswith("loss ")


# --- ended in time ------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that a loss or a density moves: a second for each evaluation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("adammcmc.samplers.budget.monotonic", lambda: self.now)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.now += 1
        return F.cross_entropy(outputs, targets)

    def density(self, x: Tensor) -> Tensor:
        self.now += 1
        return -x.square().sum(1).sqrt() * 1e-9


LIMIT = BurnIn(max_seconds=200, max_steps=10**6)


@pytest.mark.parametrize("kind", ["sequential", "stacked", "TOML", "num_steps", "density", "density, num_steps", "loop"])
def test_burn_in_ends_in_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is one evaluation: at most as many fit as the seconds of the limit. Wall time before the first step is free."""
    clock = Clock(monkeypatch)
    limit = replace(LIMIT, num_steps=5000) if "num_steps" in kind else LIMIT
    if kind == "TOML":
        text = 'task = "sine"\n[burn_in]\nmax_seconds = 200\nmax_steps = 1_000_000\n'
        limit = prepare(Source(text, (), Path(), "a.toml")).burn_in  # type: ignore[assignment]
        assert limit == LIMIT
    with warnings.catch_warnings(action="ignore"):
        if kind.startswith("density"):
            start = 1e6 * torch.randn(8, 3, dtype=torch.float64, generator=seeded())
            record = warm_up(clock.density, start, tune=limit, progress=False)
        elif kind == "loop":
            model = network()
            sampler = underdamped(model, step_size=None, fixed_data=True, burn_in=limit)
            clock.now += 10_000
            while sampler.is_adapting:
                sampler.step(lambda: clock.loss(model(X), Y))
            record = sampler.warm_up
            assert record is not None
            clock.now += 500
            assert sampler.warm_up.seconds == record.seconds <= 202  # type: ignore[union-attr]
        else:
            data, chains = (X, Y), 2 if kind == "stacked" else 1
            posterior = adammcmc.sample(
                network(),
                data,
                clock.loss,
                burn_in=limit,
                num_chains=chains,
                stacked=chains > 1,
                num_draws=1,
                gap=1,
                progress=False,
            )
            (record, *_) = posterior.warm_up
            assert posterior.index[0]["step"] == record.num_steps + 1  # type: ignore[union-attr]
    assert len(record.acceptance_by_chain) == {"stacked": 2}.get(kind, 8 if "density" in kind else 1)  # type: ignore[union-attr]
    assert 150 <= record.num_steps <= 202, record  # type: ignore[union-attr]
    if "num_steps" not in kind:
        assert "no further window fits into max_seconds = 200.0" in record.reason.replace("200:", "200.0:")  # type: ignore[union-attr]
    elif record.is_settled:  # type: ignore[union-attr]
        assert "the time was up, max_seconds = 200; 5000 steps were asked for" in str(record)


def test_steps_that_were_not_counted_do_not_take_time() -> None:
    """A resumed burn-in has what was left of the limit; without one, the time is unknown."""
    model = network()
    for limit in (None, 1000.0):
        one = underdamped(model, step_size=None, fixed_data=True, burn_in=BurnIn(max_seconds=limit))
        one.step(closure(model))
        one.chains.adaptation.budget._spent = 600.0  # type: ignore[union-attr]
        other = underdamped(model, step_size=None, fixed_data=True, burn_in=BurnIn())
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        seconds = other.warm_up.seconds  # type: ignore[union-attr]
        assert math.isnan(seconds) if limit is None else 600 <= seconds < 700


# --- checked afterwards -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "says"), [(1.6, "too long"), (0.3, "shorter than necessary"), (1.0, "")])
def test_acceptance_that_left_its_target_is_reported_once(factor: float, says: str) -> None:
    model = network()
    sampler = underdamped(model, step_size=None, fixed_data=True, burn_in=BurnIn(num_steps=400))
    while sampler.is_adapting:
        sampler.step(closure(model))
    for group in sampler.param_groups:
        group["lr"] *= factor
    with pytest.warns(UserWarning, match=says) if says else contextlib.nullcontext() as caught:
        for _ in range(1100):
            sampler.step(closure(model))
    assert caught is None or len(caught) == 1
    found = {finding.kind: finding.says for finding in sampler.health().findings}
    assert ("adapted acceptance" in found) == bool(says)
    assert says in found.get("adapted acceptance", "")
    low, high = limits(0.85)
    assert (low < sampler.health().acceptance < high) == (not says)
    assert sampler.health().grade != "sick"
    if says:
        row = sampler.chains.info, sampler.target.scale
        for _ in range(7 * 1024):  # the next look
            sampler.chains.watch(row, None, 1)
        assert len(caught) == 1  # type: ignore[arg-type]


def test_settings_of_another_run_are_checked_as_well() -> None:
    """A step size that does not suit the data is noticed, though nothing was tuned; each chain of a stack is named."""
    record = run(burn_in=BurnIn(num_steps=400), num_chains=1, stacked=False).warm_up[0]
    assert record is not None
    wrong = replace(record, settings={**record.settings, "step_size": 2.2 * record.settings["step_size"]})
    with pytest.warns(UserWarning, match="^chains 0, 1: acceptance is 0.* tuned it to 0.85: the steps are too long"):
        posterior = run(warm_up=wrong, burn_in=10, num_draws=11, gap=100, stacked=True)
    assert all("adapted acceptance" in {finding.kind for finding in h.findings} for h in posterior.health())
    assert "adapted acceptance" in {finding.kind for finding in posterior.summary().findings}


def test_draws_whose_acceptance_left_its_target() -> None:
    """Tuned in the flat tails of a density, steps are too long for its bulk."""

    def tails(x: Tensor) -> Tensor:
        return -3 * torch.log1p(x.square().sum(1))

    start = 1e2 * torch.randn(2, 2, dtype=torch.float64, generator=seeded())  # too few chains for steps of their own
    options: dict[str, Any] = {"num_steps": 1060, "burn_in": 60, "tune": BurnIn(num_steps=60), "progress": False}
    with pytest.warns(UserWarning, match="tuned it to 0.85: the steps are too long") as caught:
        bad = sample_density(tails, start, kernels.underdamped(1.0), **options)
    assert len(caught) == 1
    assert "adapted acceptance" in {finding.kind for finding in bad.verdict.findings}
    assert bad.target_acceptance == 0.85
    good = sample_density(normal, start / 1e2, kernels.underdamped(0.3), **options)
    assert "adapted acceptance" not in {finding.kind for finding in good.verdict.findings}
    untuned = sample_density(normal, start / 1e2, kernels.underdamped(0.01), num_steps=1000, progress=False)
    assert untuned.target_acceptance is None
    assert "adapted acceptance" not in {finding.kind for finding in untuned.verdict.findings}
    assert (
        sample_density(normal, start / 1e2, num_steps=100, tune=BurnIn(num_steps=200), progress=False).target_acceptance == 0.85
    )


def test_algorithm_1_is_tuned_in_its_noise_alone() -> None:
    posterior = run(sampler=partial(AdamMCMC, lr=1e-2, sigma=1e-2, sigma_along=2.0))
    settings = posterior.warm_up[0].settings  # type: ignore[union-attr]
    assert settings.keys() == {"sigma", "sigma_along"}
    sampler = partial(AdamMCMC, lr=2e-2, sigma=1e-2, sigma_along=2.0)
    again = run(sampler=sampler, warm_up=posterior.warm_up[0])
    assert again.settings(0) == {"lr": 2e-2, "inverse_temperature": 1.0, **settings}
