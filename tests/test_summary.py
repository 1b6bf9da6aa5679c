"""What a run is worth: sound runs are called so, and each kind of sick run by its name."""

from __future__ import annotations

import json
import math
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adammcmc
from adammcmc import Posterior, Summary, diagnostics
from adammcmc.posterior.summary import Series, layers_of, probe_layers, summarize
from adammcmc.samplers.closure import ClosurePotential
from adammcmc.samplers.health import Finding, Health

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import arviz

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(120, 2, generator=GENERATOR)
Y = (X[:, 0] + 0.5 * torch.randn(120, generator=GENERATOR) > 0).long()
HELD_OUT = torch.randn(50, 2, generator=GENERATOR)
PRIOR = adammcmc.Gaussian(1.0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))


def sample(model: nn.Module, **options: Any) -> Posterior:
    defaults = {"num_draws": 50, "gap": 10, "burn_in": 50, "num_chains": 4, "prior": PRIOR, "progress": False}
    return adammcmc.sample(model, (X, Y), F.cross_entropy, **{**defaults, **options})


def kinds(summary: Summary) -> list[str]:
    return [finding.kind for finding in summary.findings]


# --- runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound() -> Posterior:
    torch.manual_seed(0)
    mala = partial(adammcmc.MALA, step_size=0.03)
    starts = [nn.Linear(2, 2).state_dict() for _ in range(4)]
    return sample(nn.Linear(2, 2), sampler=mala, initial=starts, num_draws=250, gap=6, burn_in=150, stacked=True)


def test_a_sound_run(sound: Posterior) -> None:
    summary = sound.summary(HELD_OUT)
    assert summary.grade == "sound", str(summary)
    assert summary.is_healthy
    assert summary.verdict.startswith("no complaint: 4 chains agree in loss, U, predictions (R-hat 1.0")
    assert [row.name for row in summary.rows] == ["loss", "U", "predictions", "layer weight", "layer bias"]
    assert [row.verdict for row in summary.rows[:3]] == ["mixed"] * 3
    assert summary.rows[2].count == 100
    assert 100 < summary.ess <= 1500
    text = str(summary)
    assert text.startswith("sound: no complaint")
    assert sound.target in text
    assert "predictions (worst of 100)" in text
    assert json.loads(json.dumps(summary.to_dict(), allow_nan=False))["grade"] == "sound"


def test_rows_are_the_worst_of_what_arviz_says(sound: Posterior) -> None:
    data = sound.to_arviz(HELD_OUT)
    rows = {row.name: row for row in sound.summary(HELD_OUT).rows}
    for name, values in (("predictions", data.posterior.prediction), ("U", -data.sample_stats.lp)):
        assert rows[name].rhat == pytest.approx(float(arviz.rhat(values).to_array().max()), rel=1e-9)
        assert rows[name].ess_bulk == pytest.approx(float(arviz.ess(values, method="bulk").to_array().min()), rel=1e-9)
        assert rows[name].ess_tail == pytest.approx(float(arviz.ess(values, method="tail").to_array().min()), rel=1e-9)
    assert rows["U"].mean == pytest.approx(float(sound.trace("potential").mean()))


def test_arviz_gets_its_own_names(sound: Posterior) -> None:
    data = sound.to_arviz(HELD_OUT, weights=True)
    assert data.posterior.layer_norm.dims == ("chain", "draw", "layer")
    assert data.posterior.layer.to_numpy().tolist() == ["weight", "bias"]
    assert data.posterior.prediction.shape == (4, 250, 100)
    assert data.posterior["weight"].shape == (4, 250, 2, 2)
    assert {"lp", "acceptance_rate", "loss", "num_accepted"} <= set(data.sample_stats)
    assert data.posterior.attrs["target"] == sound.target
    torch.testing.assert_close(torch.tensor(data.posterior["weight"].to_numpy()[1, 3]), sound.chain(1)[3]["weight"])
    norm = sound.chain(2)[7]["bias"].double().norm()
    assert float(data.posterior.layer_norm[2, 7, 1]) == pytest.approx(float(norm))
    assert "prediction" not in sound.to_arviz().posterior
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sound[::83].to_arviz(weights=True).posterior.sizes["chain"] == 4  # more of them than draws: ArviZ wonders


def test_function_values_are_predictions(sound: Posterior) -> None:
    values = sound.function_values(HELD_OUT)
    raw = sound.predict(HELD_OUT, raw=True).raw
    assert raw is not None
    torch.testing.assert_close(values, raw.reshape(4, 250, 100).double())
    fewer = sound.function_values(X)  # 240 numbers are too many: 100 of 120 examples
    assert fewer.shape == (4, 250, 200)
    torch.testing.assert_close(fewer[..., -2:], sound.predict(X[-1:], raw=True).raw.reshape(4, 250, 2).double())  # type: ignore[union-attr]
    assert sound.function_values((X, Y)).shape == fewer.shape
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=7)
    torch.testing.assert_close(sound.function_values(batches), fewer)


def test_too_small_a_lambda_is_named() -> None:
    """Adapted by itself it moves through the prior with a fine acceptance, and all looks well but for this."""
    hot = partial(adammcmc.Underdamped, inverse_temperature=1e-6)
    summary = sample(network(), sampler=hot, burn_in=400, num_chains=2, stacked=True).summary(HELD_OUT)
    assert summary.grade == "sick"
    assert summary.findings[0].kind == "no influence"
    assert "all 120 examples together weigh as much as 0.00012 in" in summary.verdict


def test_a_stuck_run_is_named() -> None:
    stuck = sample(network(), sampler=partial(adammcmc.AdamMCMC, lr=1e-3, sigma=30.0), num_chains=2, gap=5)
    summary = stuck.summary(HELD_OUT)
    assert summary.grade == "sick"
    assert summary.findings[0].kind == "stuck"
    assert kinds(summary).count("stuck") == 1
    assert all(row.verdict == "does not move" for row in summary.rows if row.is_judged)
    assert math.isnan(summary.ess)
    assert str(summary).startswith("sick: all chains: stuck: 0.")


def test_a_stuck_run_is_named_before_its_health_can_tell() -> None:
    stuck = sample(network(), sampler=partial(adammcmc.AdamMCMC, lr=1e-3, sigma=30.0), num_draws=6, gap=2, num_chains=2)
    summary = stuck.summary()
    assert summary.findings[0] == Finding("stuck", "stuck: all draws of all chains are the same")


def test_batch_noise_is_named() -> None:
    summary = sample(
        network(), sampler=partial(adammcmc.AdamMCMC, lr=3e-2, sigma=3e-2, sigma_along=2.0), batch_size=4, num_chains=2
    ).summary(HELD_OUT)
    assert summary.grade == "sick"
    assert summary.findings[0].kind == "too hot"
    assert "noise s = " in summary.verdict
    assert [row.verdict for row in summary.rows[:2]] == ["estimated on batches: mostly noise"] * 2
    assert not summary.rows[0].is_judged


def test_chains_that_disagree_are_named() -> None:
    """Three start from one place, one from its mirror image, and none moves far."""
    model = network()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    there = {name: x.clone() for name, x in model.state_dict().items()}
    other = {**there, "2.weight": there["2.weight"].flip(0), "2.bias": there["2.bias"].flip(0)}
    initial = [there, there, other, there]
    posterior = sample(model, sampler=partial(adammcmc.MALA, step_size=1e-3), initial=initial, num_draws=200, gap=6, burn_in=0)
    summary = posterior.summary(HELD_OUT)
    assert summary.grade == "sick"
    assert "chains disagree" in kinds(summary)
    assert summary.rows[2].verdict == "chains disagree"


def test_chains_from_one_start_are_not_called_sound(sound: Posterior) -> None:
    few = {"sampler": partial(adammcmc.MALA, step_size=0.03), "num_chains": 2, "num_draws": 6, "gap": 2, "burn_in": 0}
    together = sample(nn.Linear(2, 2), **few)
    assert "one start" in kinds(together.summary())
    assert "all chains started at the same weights" in together.summary().verdict
    assert "one start" not in kinds(together.chain(1).summary())
    here = nn.Linear(2, 2).state_dict()
    assert "one start" in kinds(sample(nn.Linear(2, 2), initial=[here, here], **few).summary())
    assert "one start" not in kinds(sample(nn.Linear(2, 2), initial=[here, nn.Linear(2, 2).state_dict()], **few).summary())
    manifest = sound.store.manifest
    starts = manifest.pop("starts")  # as an older version left it
    try:
        assert kinds(sound.summary(HELD_OUT)) == ["one start"]
        assert sound.summary(HELD_OUT).grade == "undecided"
    finally:
        manifest["starts"] = starts


def test_predictions_at_training_inputs_are_judged_without_inputs(sound: Posterior) -> None:
    rows = {row.name: row for row in sound.summary().rows}
    row = rows["predictions at training inputs"]
    spread = X[: len(X) // 16 * 16 : len(X) // 16]
    values = sound.predict(spread, raw=True).raw
    assert values is not None
    values = values.flatten(1)[:, torch.linspace(0, values[0].numel() - 1, 16).round().long()].reshape(4, 250, 16).double()
    assert row.is_judged
    assert row.count == 16
    assert row.ess_bulk == pytest.approx(float(diagnostics.ess_bulk(values).min()), rel=0.02)  # six digits were written down
    assert row.rhat == pytest.approx(float(diagnostics.rhat(values).max()), abs=1e-3)
    least = min(row.ess_bulk, float(diagnostics.ess_bulk(sound.trace("potential"))))
    assert f"1000 draws of 4 chains, about {least:.0f} effective (" in str(sound)


def test_a_chain_with_few_effective_predictions_is_not_called_healthy(sound: Posterior) -> None:
    alone = sound.chain(0)
    assert "no complaint" in str(alone)
    records = [record for record in sound.store.index if record["chain"] == 0]
    before = [record["probe"] for record in records]
    walk = torch.randn(250, generator=torch.Generator().manual_seed(0)).cumsum(0).tolist()
    try:
        for record, place in zip(records, walk, strict=True):
            record["probe"] = [place, 0.0]
        assert "no complaint" not in str(alone)
        assert "of at least 30 effective draws of its predictions at training inputs" in str(alone)
        assert "effective (predictions at training inputs)" in str(alone)
        for record in records:
            del record["probe"]  # as an older version left it
        assert "no complaint" in str(alone)
        assert "effective (U)" in str(alone)
        assert "predictions at training inputs" not in [row.name for row in alone.summary().rows]
    finally:
        for record, values in zip(records, before, strict=True):
            record["probe"] = values


def test_what_one_chain_cannot_tell(sound: Posterior) -> None:
    summary = sound.chain(1).summary(HELD_OUT)
    assert "one chain" in kinds(summary)
    assert math.isnan(summary.rhat)
    assert summary.grade == "undecided"
    assert "whether another would agree is unknown" in summary.verdict


def test_what_few_draws_cannot_tell() -> None:
    summary = sample(network(), sampler=partial(adammcmc.MALA, step_size=1e-3), num_draws=3).summary(HELD_OUT)
    assert "cannot tell" in kinds(summary)
    assert "3 draws per chain, and at least 4 are needed" in summary.verdict
    assert math.isnan(summary.ess)
    assert all(math.isnan(row.rhat) for row in summary.rows)
    assert "too few draws" in str(summary)


def test_a_scan_is_not_a_disagreement() -> None:
    scan = sample(network(), sampler=partial(adammcmc.MALA, step_size=torch.tensor([1e-3, 3e-3])), num_chains=2)
    summary = scan.summary(HELD_OUT)
    assert "chains differ in step_size" in summary.verdict
    assert "chains disagree" not in kinds(summary)
    assert math.isnan(summary.rhat)
    alone = [scan.chain(c).summary(HELD_OUT).ess for c in range(2)]
    assert summary.ess == pytest.approx(min(alone))


def test_moments_alone_leave_the_traces() -> None:
    few = {"sampler": partial(adammcmc.MALA, step_size=1e-3), "num_chains": 2, "num_draws": 30, "gap": 2}
    kept = sample(network(), keep="moments", **few)
    summary = kept.summary(HELD_OUT)
    assert [row.name for row in summary.rows] == ["loss", "U", "predictions at training inputs"]
    assert summary.notes == ("no draws were kept to predict with",)
    with pytest.raises(ValueError, match="kept no draws of the weights"):
        kept.to_arviz()
    summary = sample(network(), keep=8, **few).summary(HELD_OUT)
    assert summary.num_draws == 30
    assert summary.rows[2].ess_bulk <= 2 * 8 * math.log10(16)


def test_an_interrupted_run_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    class Stop(adammcmc.Callback):
        def on_draw(self, event: adammcmc.Event, record: dict[str, Any]) -> None:
            if (event.chain, event.num_draws) == (2, 11):
                raise KeyboardInterrupt

    model = network()
    sampler = partial(adammcmc.MALA, step_size=1e-3)
    with pytest.raises(KeyboardInterrupt):
        sample(model, sampler=sampler, path=tmp_path / "run", callbacks=[Stop()], num_draws=20, burn_in=5)
    summary = Posterior.open(tmp_path / "run", model).summary(HELD_OUT)
    assert summary.num_chains == 3
    assert summary.num_draws == 11
    assert summary.notes[0] == "left out, with too few draws: chain 3"
    assert summary.notes[1] == "chains are compared by the first 11 draws of each"
    part = Posterior.open(tmp_path / "run", model)[:20].summary(HELD_OUT)  # of the first chain
    assert part.num_chains == 1
    assert math.isnan(part.seconds)


def test_a_run_of_an_older_version_has_no_clock(sound: Posterior) -> None:
    for record in sound.store.index:
        del record["seconds"]
    assert math.isnan(sound.summary().ess_per_second)
    assert not math.isnan(sound.summary().ess_per_gradient)


# --- what it costs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
def test_seconds_are_those_of_the_draws(stacked: bool) -> None:
    """Each step of a slow loss takes 2 ms at least; stacked chains take theirs together."""

    def slow(outputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(2e-3)
        return F.cross_entropy(outputs, targets, reduction="none")

    began = time.perf_counter()
    sampler = partial(adammcmc.MALA, step_size=1e-3)
    options: dict[str, Any] = {"num_draws": 10, "gap": 3, "burn_in": 5, "num_chains": 2, "stacked": stacked, "progress": False}
    posterior = adammcmc.sample(network(), (X, Y), slow, sampler=sampler, prior=PRIOR, **options)
    elapsed = time.perf_counter() - began
    summary = posterior.summary()
    least = 2e-3 * 30 * (1 if stacked else 2)
    assert least <= summary.seconds < elapsed
    if stacked:
        assert summary.seconds == pytest.approx(sum(r["seconds"] for r in posterior.chain(0).index))
    else:
        assert summary.seconds == pytest.approx(sum(r["seconds"] for r in posterior.index))
    assert summary.num_gradients == 2 * 30
    assert summary.ess_per_second == pytest.approx(summary.ess / summary.seconds)


SAMPLERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "algorithm 1": (partial(adammcmc.AdamMCMC, lr=1e-3, sigma=1e-2), {}),
    "algorithm 1 on batches": (partial(adammcmc.AdamMCMC, lr=1e-3, sigma=1e-2), {"batch_size": 30}),
    "mala": (partial(adammcmc.MALA, step_size=1e-4), {}),
    "mala on batches": (partial(adammcmc.MALA, step_size=1e-4), {"batch_size": 30}),
    "mala, all data asked": (partial(adammcmc.MALA, step_size=1e-4, acceptance=adammcmc.FullData()), {"batch_size": 30}),
    "mala, unadjusted": (partial(adammcmc.MALA, step_size=1e-4, acceptance=adammcmc.AlwaysAccept()), {"batch_size": 30}),
    "underdamped": (partial(adammcmc.Underdamped, step_size=1e-2), {}),
    "underdamped, three leaps": (partial(adammcmc.Underdamped, step_size=1e-2, num_leapfrog=3), {}),
    "underdamped, all data asked": (
        partial(adammcmc.Underdamped, step_size=1e-2, num_leapfrog=3, acceptance=adammcmc.FullData()),
        {"batch_size": 30},
    ),
    "underdamped, unadjusted": (
        partial(adammcmc.Underdamped, step_size=1e-2, acceptance=adammcmc.AlwaysAccept()),
        {"batch_size": 30},
    ),
    "theorem 1": (partial(adammcmc.ExactAdamMCMC, lr=1e-3, sigma=1e-2, momentum_spread=(1e-3, 1e-6)), {}),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_gradients_are_counted_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the summary reports, against evaluations with a gradient in runs of two lengths (the first may need one more)."""
    sampler, options = SAMPLERS[name]
    count = 0
    evaluate = ClosurePotential.evaluate

    def counted(self: ClosurePotential, *args: Any, **more: Any) -> Any:
        nonlocal count
        count += bool(more.get("with_grad"))
        return evaluate(self, *args, **more)

    monkeypatch.setattr(ClosurePotential, "evaluate", counted)
    counts, reported = [], []
    for num_draws in (4, 14):
        count = 0
        posterior = sample(network(), sampler=sampler, num_draws=num_draws, gap=2, burn_in=0, num_chains=1, **options)
        counts.append(count)
        reported.append(posterior.summary().num_gradients)
    assert counts[1] - counts[0] == reported[1] - reported[0] >= 20
    assert reported[1] <= counts[1] <= reported[1] + 2


# --- the parts ------------------------------------------------------------------------------------------------------------


def normal(chains: int = 4, draws: int = 250, numbers: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(chains, draws, numbers, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def summed(*series: Series, **options: Any) -> Summary:
    chains = range(len(series[0].values))
    return summarize("p", list(chains), series, {}, **{"temperatures": {}, "num_data": 100, **options})


def test_draws_from_one_distribution_are_called_mixed() -> None:
    """Also where the worst of 200 numbers is above 1.01 by chance, as it nearly always is."""
    found = [summed(Series("f", "outputs", normal(draws=100, numbers=100, seed=s))) for s in range(30)]
    assert sum(one.rhat > 1.01 for one in found) > 25
    assert sum(one.grade != "sound" for one in found) <= 7  # 5% of 30 are 1.5; 8 and more have a probability of 1e-4


def test_chance_explains_only_so_much() -> None:
    x = normal(numbers=200)
    x[0] += 0.6
    x[0, :, 1:] = normal(numbers=199, seed=5)[0]
    summary = summed(Series("f", "outputs", x))
    assert "f" in summary.verdict
    assert summary.rows[0].verdict in ("not mixed", "chains disagree")
    assert summary.rows[0].rhat_limit <= 1.05


@pytest.mark.parametrize(
    ("values", "verdict", "kind"),
    [
        (normal(), "mixed", None),
        (normal() + 0.25 * torch.arange(4)[:, None, None], "not mixed", "not mixed"),
        (normal() + torch.arange(4)[:, None, None], "chains disagree", "chains disagree"),
        (normal() * torch.tensor([1.0, 1, 1, 6])[:, None, None], "chains disagree", "chains disagree"),
        (normal().cumsum(1), "chains disagree", "chains disagree"),
        (normal(draws=20), "few draws", "few draws"),
        (normal(draws=3), "too few draws", "cannot tell"),
        (normal(chains=1), "one chain", "one chain"),
        (torch.ones(4, 50), "does not move", "stuck"),
        (torch.arange(4.0)[:, None].expand(4, 50), "does not move", "stuck"),
        (torch.where(normal() > 2, torch.nan, normal()), "not finite", "not finite"),
    ],
)
def test_verdicts(values: Tensor, verdict: str, kind: str | None) -> None:
    summary = summed(Series("f", "outputs", values))
    assert summary.rows[0].verdict == verdict
    assert kinds(summary)[:1] == ([] if kind is None else [kind])


def test_the_chain_that_stands_apart_is_named() -> None:
    x = normal(numbers=5)
    x[2, :, 3] += 2
    assert "R-hat of f is 1." in summed(Series("f", "outputs", x)).verdict
    assert "; chain 2 differs from all others." in summed(Series("f", "outputs", x)).verdict
    x[1, :, 3] += 2  # two against two
    assert "differs from" not in summed(Series("f", "outputs", x)).verdict


def test_a_saturated_probability_says_nothing_and_hides_nothing() -> None:
    same = torch.cat([normal(numbers=3), torch.ones(4, 250, 1)], 2)
    assert summed(Series("f", "outputs", same)).rows[0].verdict == "mixed"
    apart = torch.cat([normal(numbers=3), torch.tensor([1.0, 1, 0, 1])[:, None, None].expand(4, 250, 1)], 2)
    assert summed(Series("f", "outputs", apart)).rows[0].verdict == "chains disagree"


def test_weights_are_not_judged() -> None:
    apart = Series("layer 0", "layer", normal() + 9 * torch.arange(4)[:, None, None], "weights: not judged")
    summary = summed(Series("f", "outputs", normal()), apart)
    assert summary.grade == "sound"
    assert summary.rows[1].rhat > 2


def test_of_many_layers_the_worst_are_printed() -> None:
    layers = [Series(f"layer {i}", "layer", normal(draws=20 + i, seed=i), "weights: not judged") for i in range(30)]
    summary = summed(Series("f", "outputs", normal()), *layers)
    assert len(summary.rows) == 31
    text = str(summary)
    assert text.count("layer ") == 12
    assert text.endswith("and 18 layers with more effective draws")
    worst = min(summary.rows[1:], key=lambda row: row.ess_bulk)
    assert f"{worst.name} " in text


def test_one_stuck_chain_is_named() -> None:
    x = normal()
    x[2] = 0.1
    assert summed(Series("f", "outputs", x)).findings[0] == Finding("stuck", "stuck: all draws of chain 2 are the same")


def health(*findings: Finding) -> Health:
    nan = math.nan
    return Health(1000, 0.5, nan, nan, {}, 1.0, 0.0, 1.0, nan, 0.0, findings)


def test_what_chains_say_themselves_comes_in_order_of_gravity() -> None:
    told = {0: health(Finding("untested", "u")), 1: health(Finding("too hot", "h"), Finding("untested", "u")), 2: health()}
    summary = summarize("p", [0, 1, 2], [Series("f", "outputs", normal(3))], told, temperatures={}, num_data=10)
    assert summary.findings == (Finding("too hot", "chain 1: h"), Finding("untested", "chains 0, 1: u"))
    assert summary.grade == "sick"
    both = {0: health(Finding("untested", "u")), 1: health(Finding("untested", "u"))}
    summary = summarize("p", [0, 1], [Series("f", "outputs", normal(2, 500))], both, temperatures={}, num_data=10)
    assert summary.findings == (Finding("untested", "all chains: u"),)
    assert summary.grade == "undecided"


@pytest.mark.parametrize(("temperature", "num_data", "is_named"), [(1.0, 3, False), (0.01, 100, True), (0.1, 100, False)])
def test_data_that_weigh_nothing(temperature: float, num_data: int, is_named: bool) -> None:
    summary = summed(Series("f", "outputs", normal()), temperatures={0: temperature}, num_data=num_data)
    assert ("no influence" in kinds(summary)) == is_named


def test_layers_are_probed_alike_in_all_runs() -> None:
    model = network()
    draws = [{name: x * k for name, x in model.state_dict().items()} for k in (1, 2)]
    names = [name for name, _ in model.named_parameters()]
    found = probe_layers(draws, names)
    assert found.shape == (2, 2, 2)
    torch.testing.assert_close(found[1], 2 * found[0])
    own = torch.cat([model.state_dict()[name].flatten() for name in layers_of(names)["2"]]).double()
    assert float(found[0, 1, 0]) == pytest.approx(float(own.norm()))
    assert torch.equal(found, probe_layers(draws, names))
    assert not torch.equal(found[0, 0, 1], found[0, 1, 1])
    directions = [probe_layers([{"w": torch.eye(50)[i]}], ["w"])[0, 0, 1] for i in range(50)]
    assert abs(float(torch.stack(directions).mean())) < 4.5 / 50**0.5
    assert diagnostics.ess_bulk(found.reshape(1, 2, -1)).isnan().all()  # two draws are too few


@pytest.mark.parametrize(("chains", "draws"), [(2, 4), (4, 4), (4, 8), (2, 10), (4, 10), (2, 20), (4, 100)])
def test_chains_that_agree_are_not_said_to_disagree(chains: int, draws: int) -> None:
    """Independent draws, 200 numbers: whatever their number, the grave word is rare."""
    alarms = 0
    for seed in range(20):
        values = torch.randn(chains, draws, 200, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = summarize(
            "t", range(chains), [Series("predictions", "outputs", values)], {}, temperatures={}, num_data=100
        ).findings
        alarms += any(finding.kind == "chains disagree" for finding in found)
    assert alarms <= 3


def test_chains_far_apart_are_said_to_disagree_however_slow_they_are() -> None:
    noise = torch.randn(4, 60, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slow = torch.zeros_like(noise)
    for t in range(1, 60):
        slow[:, t] = 0.9 * slow[:, t - 1] + noise[:, t]
    apart = slow + 20.0 * torch.arange(4)[:, None, None]
    found = summarize("t", range(4), [Series("predictions", "outputs", apart)], {}, temperatures={}, num_data=100).findings
    assert found[0].kind == "chains disagree"


def test_chains_that_rest_at_two_values_disagree() -> None:
    """Saturated probabilities: no chain ever moves, and they say the opposite."""
    values = torch.tensor([[0.0] * 50, [1.0] * 50, [0.0] * 50, [1.0] * 50], dtype=torch.float64)
    assert bool(diagnostics.rhat(values) > 2)
    assert bool(diagnostics.rhat(torch.ones(4, 50)).isnan())


def test_predictions_of_too_few_draws_are_not_called_sound() -> None:
    good = torch.randn(4, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    apart = torch.arange(4.0).double()[:, None, None].expand(4, 2, 1) * 100
    series = [Series("U", "loss", good), Series("predictions", "outputs", apart)]
    summary = summarize("t", range(4), series, {}, temperatures={}, num_data=100)
    assert summary.grade == "undecided"
    assert any("predictions: too few draws" in finding.says for finding in summary.findings)
