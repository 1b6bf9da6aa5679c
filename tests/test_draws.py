"""What `sample_density` returns: table, verdict, description; and the checks of its input."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from adammcmc import AlwaysAccept, BurnIn, DataDensity, DensityDraws, Gaussian, diagnostics, kernels, sample_density, warm_up
from adammcmc.samplers.functional import default_kernel


def gaussian(x: Tensor) -> Tensor:
    return -0.5 * x.square().sum(1)


def spread_start(num_chains: int = 4, dim: int = 3) -> Tensor:
    return torch.randn(num_chains, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def kinds(result: DensityDraws) -> list[str]:
    return [finding.kind for finding in result.verdict.findings]


@pytest.fixture(scope="module")
def good() -> DensityDraws:
    return sample_density(gaussian, spread_start(), kernels.mala(0.5), num_steps=4000, progress=False)


# --- the object ---------------------------------------------------------------------------------------------------------


def test_it_unpacks_as_draws_and_info(good: DensityDraws) -> None:
    draws, info = good
    assert draws is good.draws
    assert info is good[1]
    assert good.kernel.step_size == 0.5
    assert good.warm_up is None


def test_every_number_of_the_table(good: DensityDraws) -> None:
    rows = good.summary().rows
    assert [row.name for row in rows] == ["x[0]", "x[1]", "x[2]"]
    values = good.draws[:, :, 1].double()
    row = rows[1]
    assert row.mean == pytest.approx(float(values.mean()))
    assert row.sd == pytest.approx(float(values.std()))
    assert row.q5 == pytest.approx(float(values.flatten().quantile(0.05)))
    assert row.q95 == pytest.approx(float(values.flatten().quantile(0.95)))
    assert row.mcse == pytest.approx(float(diagnostics.mcse_mean(values)))
    assert row.ess_bulk == pytest.approx(float(diagnostics.ess_bulk(values)))
    assert row.ess_tail == pytest.approx(float(diagnostics.ess_tail(values)))
    assert row.rhat == pytest.approx(float(diagnostics.rhat(values)))
    lines = str(good.summary()).splitlines()
    assert lines[0].split() == ["mean", "sd", "5%", "95%", "MCSE", "bulk", "ESS", "tail", "ESS", "R-hat"]
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1


def test_many_coordinates_show_the_worst_and_a_count() -> None:
    start = {"a": torch.zeros(3, 30), "b": torch.zeros(3, 2, 2)}

    def log_density(p: dict) -> Tensor:
        return -p["a"].square().sum(1) - p["b"].square().sum((1, 2))

    result = sample_density(log_density, start, kernels.mala(0.1), num_steps=40)
    table = result.summary(5)
    assert len(table.rows) == 34
    assert {"a[29]", "b[1,0]"} <= {row.name for row in table.rows}
    shown = str(table).splitlines()
    assert len(shown) == 7
    assert shown[-1] == "and 29 of 34 coordinates with more effective draws"
    assert shown[1].split()[0] == table.worst[0].name
    least = [min(row.ess_bulk, row.ess_tail) for row in table.worst]
    assert least == sorted(least)


def test_a_sound_run_has_no_complaint_and_prints_the_verdict_first(good: DensityDraws) -> None:
    assert kinds(good) == []
    assert good.verdict.grade == "sound"
    lines = str(good).splitlines()
    assert lines[0].startswith("sound: no complaint: 4 chains agree (R-hat at most 1.0")
    assert lines[1] == (
        "target: p ~ exp(log_density), 3 coordinates | MALA: step size 0.5, noise 1, no preconditioner | Metropolis | exact"
    )
    assert lines[2].startswith("4 chains, 4,000 draws each, acceptance 0.")
    assert "(chain " in lines[2]
    assert len(lines) == 7
    assert "4 chains" in repr(good)


def test_to_arviz_has_the_draws_and_our_names(good: DensityDraws) -> None:
    pytest.importorskip("arviz")
    data = good.to_arviz()
    assert data.posterior["x"].shape == (4, 4000, 3)
    assert torch.equal(torch.from_numpy(data.sample_stats["lp"].values), -good.info.potential)
    assert set(data.sample_stats) >= {"acceptance_rate", "is_accepted", "is_finite", "log_ratio", "potential", "lp"}
    assert data.posterior.attrs["target"] == good.describe()


# --- no false calm ------------------------------------------------------------------------------------------------------


def run(log_density: Any = gaussian, start: Tensor | None = None, kernel: Any = None, **options: Any) -> DensityDraws:
    start = spread_start() if start is None else start
    return sample_density(log_density, start, kernel or kernels.mala(0.5), **{"num_steps": 2000, "progress": False, **options})


def test_one_chain_one_start_and_few_draws_are_never_calm() -> None:
    assert kinds(run(start=spread_start(1))) == ["one chain"]
    assert kinds(run(start=torch.zeros(4, 2).double())) == ["one start"]
    few = run(num_steps=60)
    assert {"few draws", "cannot tell"} <= set(kinds(few))
    assert few.verdict.grade == "undecided"
    assert "cannot tell" in kinds(run(num_steps=3))


def two_modes(x: Tensor) -> Tensor:
    return torch.logsumexp(torch.stack([-(x - c).square().sum(1) / 2 for c in (-6.0, 6.0)]), 0)


def test_chains_that_start_close_together_prove_little() -> None:
    """All are in one of two modes, agree, and mix well there."""
    nearby = run(two_modes, -6 + 0.01 * spread_start())
    assert kinds(nearby) == ["one start"]
    assert "started close together: the spread of their starting points is 0.00" in str(nearby.verdict)
    assert kinds(run(two_modes, -6 + 0.01 * spread_start(), tune=BurnIn(num_steps=300), burn_in=300)) == ["one start"]
    start = spread_start()
    assert kinds(run(start=start)) == []
    start[:, 1] = 0.5  # in one coordinate
    assert "in x[1], the spread of their starting points is 0 of" in str(run(start=start).verdict)
    apart = {"a": spread_start(), "b": spread_start(4, 1)}
    result = run(lambda p: gaussian(p["a"]) + gaussian(p["b"]), apart)
    assert kinds(result) == []


class Schedule:
    """A density whose width shrinks with every call; two calls in a row agree to a hundredth of a nat."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (0.1 + self.calls / 40_000) * gaussian(x)


def test_a_density_that_changes_during_the_run_is_not_fixed() -> None:
    result = run(Schedule())
    assert "not fixed" in kinds(result)
    assert "not fixed: log_density has changed during the run, by up to 0." in str(result.verdict)
    assert result.verdict.grade == "sick"
    assert run().second_look.change == 0
    huge = run(start=spread_start() * 1e6, kernel=kernels.mala(0.01), num_steps=60)
    assert huge.second_look.change == 0


def test_a_density_that_is_nan_in_places_is_undefined() -> None:
    """Where -inf is returned there is no density, and nothing to complain about."""
    start = spread_start().abs()
    result = run(lambda x: gaussian(x) + 0 * (x[:, 0] + 1).log(), start, kernels.mala(0.3), num_steps=4000)
    assert kinds(result) == ["undefined"]
    assert "log_density is NaN at 0.1" in str(result.verdict)
    inside = run(lambda x: torch.where(x[:, 0] > -1, gaussian(x), -math.inf), start, kernels.mala(0.3), num_steps=4000)
    assert kinds(inside) == []
    assert inside.verdict.rejected_not_finite > 0.05


def test_a_density_in_low_precision_is_untested() -> None:
    """float32 numbers near 1e8 are 8 apart; the draws are a quarter too wide."""
    start = spread_start().float()
    result = run(lambda x: gaussian(x) - 1e8, start)
    assert "untested" in kinds(result)
    assert "U is known to about 8 nats only (spacing of float32 log densities)" in str(result.verdict)
    assert "log_density is computed in bfloat16 in part" in str(run(lambda x: gaussian(x.bfloat16()).float(), start).verdict)
    assert kinds(run(lambda x: gaussian(x) - 1e5, start)) == []


def test_approximate_kernels_say_so() -> None:
    unadjusted = run(kernel=kernels.mala(0.1, acceptance=AlwaysAccept()))
    assert "approximate: no Metropolis correction: the draws are from another density" in str(unadjusted.verdict)
    biased = run(start=spread_start(20, 20), kernel=kernels.adam_mcmc(0.05, sigma=0.3, sigma_along=1.0))
    assert {"approximate", "biased"} <= set(kinds(biased))
    assert "momentum without its correction C" in str(biased)
    assert biased.verdict.grade == "sick"


def test_chains_out_of_equilibrium_are_not_at_rest() -> None:
    """Far out, every move goes downhill and is accepted: acceptance 1 is not 2 P(Y > 0) = 2."""
    result = run(start=spread_start() + 300, kernel=kernels.mala(0.01), num_steps=400)
    assert "not at rest" in kinds(result)


def test_modes_that_do_not_mix_and_the_odd_chain_are_named() -> None:
    start = spread_start() - 6
    start[2] += 12
    result = run(two_modes, start)
    assert kinds(result)[0] == "chains disagree"
    assert "chain 2 differs from all others" in str(result)
    assert result.verdict.grade == "sick"


def test_frozen_chains_are_named() -> None:
    def log_density(x: Tensor) -> Tensor:  # a spike that no step of this length can leave or find
        return torch.logaddexp(gaussian(x), 30 - 1e8 * (x - 9).square().sum(1) / 2)

    start = spread_start()
    start[1] = 9
    result = run(log_density, start)
    assert kinds(result)[0] == "stuck"
    assert "frozen: chain 1 hardly move" in str(result)
    assert result.verdict.worst_chain == 1
    assert result.verdict.worst_acceptance < 0.01


def test_u_estimated_on_batches_is_never_calm() -> None:
    x = torch.randn(50, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = DataDensity(lambda w, rows: (rows[:, 0] - w[0]).square() / 2, x, prior=Gaussian(), batch_size=5)
    result = run(target, spread_start(4, 1), kernels.mala(0.01))
    assert {"untested", "approximate"} <= set(kinds(result))
    assert "batches of 5" in result.describe()


# --- funnels ------------------------------------------------------------------------------------------------------------


def neal(x: Tensor) -> Tensor:
    scale = x[:, 0]
    return -scale.square() / 18 - 0.5 * x[:, 1:].square().sum(1) * torch.exp(-scale) - 4.5 * scale


def not_centred(x: Tensor) -> Tensor:
    return -x[:, 0].square() / 18 - 0.5 * x[:, 1:].square().sum(1)


ADAPTING = {"underdamped": kernels.underdamped(0.1), "hmc": kernels.hmc(0.1, 5), "microcanonical": kernels.microcanonical(0.1)}


@pytest.mark.filterwarnings("ignore:burn-in")
@pytest.mark.parametrize(("name", "gap"), [("underdamped", 1), ("underdamped", 3), ("hmc", 1), ("microcanonical", 1)])
def test_a_funnel_is_found_and_its_non_centred_form_is_not(name: str, gap: int) -> None:
    for log_density, expected in ((neal, True), (not_centred, False)):
        start = 0.3 * spread_start(8, 10)
        kernel, params = warm_up(log_density, start, ADAPTING[name], tune=BurnIn(num_steps=600), progress=False)
        result = run(log_density, params, kernel, num_steps=1500, gap=gap)
        found = [f.says for f in result.verdict.findings if f.kind == "funnel"]
        assert bool(found) == expected, str(result)
        if expected:
            assert "where x[0] is " in found[0]
            assert "non-centred" in found[0]
            assert result.verdict.grade == "sick"
            assert result.verdict.energy < 0.2


@pytest.mark.parametrize(
    ("overall", "worst", "jump", "expected"),
    [
        (0.95, 0.55, 0.1, True),  # kappa .6 against .09 (with the region)
        (0.95, 0.55, 0.5, True),
        (0.93, 0.65, 0.1, True),  # 4.5 times as stiff: only if the energy is slow
        (0.93, 0.65, 0.5, False),
        (0.6, 0.2, 0.1, False),  # a third of the rate, and 2.3 times as stiff
        (0.999, 0.75, 0.1, False),  # moves succeed there
    ],
)
def test_regions_are_compared_by_their_energy_error(overall: float, worst: float, jump: float, expected: bool) -> None:
    """One coordinate, uniform; its lowest twentieth has another acceptance; U has variance 1."""
    good = sample_density(gaussian, spread_start(4, 1), kernels.mala(0.5), num_steps=1000, progress=False)
    place = torch.linspace(0, 1, 4000, dtype=torch.float64)[torch.randperm(4000, generator=torch.Generator().manual_seed(0))]
    place = place.view(4, 1000)
    potential = torch.randn(4, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    info = good.info._replace(acceptance_rate=torch.where(place < 0.05, worst, overall).double(), potential=potential)
    result = dataclasses.replace(good, draws=place[..., None], info=info, jump=jump)
    found = [f.says for f in result.verdict.findings if f.kind == "funnel"]
    assert bool(found) == expected
    if expected:
        assert "where x[0] is below 0.04" in found[0]


def test_the_energy_moves_from_step_to_step_whatever_the_gap() -> None:
    every, some = (run(num_steps=2000, gap=gap) for gap in (1, 5))
    assert some.jump == every.jump
    u = every.info.potential
    assert every.jump == pytest.approx(float(u.diff(dim=1).square().mean()))
    assert every.verdict.energy == pytest.approx(some.verdict.energy, rel=0.1)
    assert every.verdict.energy == pytest.approx(every.jump / float(u.var(1, correction=0).mean()))


@pytest.mark.filterwarnings("ignore:burn-in", "ignore:1 of 8 chains do not move")
def test_a_frozen_chain_in_the_neck_of_a_funnel_is_sick_too() -> None:
    """At MALA's acceptance the contrast between regions is small; the chain that it freezes is named."""
    start = 0.3 * spread_start(8, 10)
    kernel, params = warm_up(neal, start, kernels.mala(0.1), tune=BurnIn(num_steps=600), progress=False)
    result = run(neal, params, kernel, num_steps=1500)
    assert result.verdict.grade == "sick"
    assert {"stuck", "funnel"} & set(kinds(result))


@pytest.mark.parametrize("name", ["student", "skewed", "stretched"])
def test_other_shapes_are_not_called_funnels(name: str) -> None:
    shapes = {
        "student": lambda x: -2.5 * torch.log1p(x.square() / 4).sum(1),
        "skewed": lambda x: (2 * x - x.exp()).sum(1),
        "stretched": lambda x: -(x * torch.logspace(-1, 1, x.shape[1])).square().sum(1) / 2,
    }
    kernel, params = warm_up(
        shapes[name], spread_start(8, 4), kernels.underdamped(0.1), tune=BurnIn(num_steps=600), progress=False
    )
    assert "funnel" not in kinds(run(shapes[name], params, kernel))


# --- no kernel, descriptions ----------------------------------------------------------------------------------------------


def test_without_a_kernel_the_default_one_warms_up_first() -> None:
    assert default_kernel((torch.zeros(3, 2),)).step_size == 0.1
    start, tune = spread_start(16), BurnIn(num_steps=400)
    result = sample_density(gaussian, start, num_steps=200, tune=tune, seed=3, progress=False)
    assert result.kernel.step_size != 0.1
    assert 0.7 < float(result.info.acceptance_rate.mean()) < 0.95
    again = sample_density(gaussian, start, num_steps=200, tune=tune, seed=3, progress=False)
    assert torch.equal(result.draws, again.draws)
    positive = sample_density(
        lambda y: -y.sum(1), start.exp(), num_steps=50, tune=BurnIn(num_steps=200), constraints=constraints.positive
    )
    assert bool((positive.draws > 0).all())


PER_CHAIN = torch.tensor([0.1, 0.3])


@pytest.mark.parametrize(
    ("kernel", "line"),
    [
        (
            kernels.underdamped(0.1),
            "underdamped Langevin: step size 0.1, momentum kept 0.97, 1 leapfrog step, no preconditioner | Metropolis | exact",
        ),
        (
            kernels.underdamped(PER_CHAIN, num_leapfrog=2, preconditioner=torch.tensor([1.0, 2.0])),
            "underdamped Langevin: step size 0.1 to 0.3 by chain, momentum kept 0.8869 to 0.9608 by chain, 2 leapfrog steps, "
            "diagonal preconditioner (1 to 2) | Metropolis | exact",
        ),
        (
            kernels.hmc(0.1, 5),
            "HMC: step size 0.1, new momentum at each step, 5 leapfrog steps, no preconditioner | Metropolis | exact",
        ),
        (
            kernels.microcanonical(0.1, acceptance=AlwaysAccept()),
            "microcanonical Langevin: step size 0.1, momentum kept 0.97, 1 leapfrog step, no preconditioner | always accept | "
            "approximate: no Metropolis correction",
        ),
        (
            kernels.mala([0.5, 0.02], sigma_along=0.3),
            "MALA: step size [0.5, 0.02] by leaf, noise [1, 0.2] by leaf, sigma along 0.3, no preconditioner | Metropolis | "
            "exact",
        ),
        (
            kernels.adam_mcmc(0.01, sigma=0.1),
            "AdamMCMC (Algorithm 1): lr 0.01, sigma 0.1, sigma along 0, betas (0.99, 0.99) | Metropolis | "
            "approximate: momentum without its correction C (Theorem 1)",
        ),
        (
            kernels.exact_adam_mcmc(0.1, sigma=0.1, momentum_spread=(1, 2)),
            "AdamMCMC, exact chain of Theorem 1: lr 0.1, sigma 0.1, sigma along 0, betas (0.99, 0.99), momentum spread (1, 2)"
            " | Metropolis | exact",
        ),
        (
            kernels.corrected_mala(0.5, 1.0),
            "corrected stochastic MALA: step size 0.5, noise 1, no preconditioner, rho 1, zeta 1 | Metropolis | exact",
        ),
    ],
)
def test_a_kernel_in_one_line(kernel: Any, line: str) -> None:
    assert kernel.describe(fixed_data=True) == line


def test_printing_a_kernel_makes_no_promise_about_minibatches() -> None:
    kernel = kernels.mala(0.5)
    why = "the ratio is estimated on a minibatch, which heats the target"
    assert str(kernel).endswith(f"| exact (on minibatches approximate: {why})")
    assert "approximate: the ratio" in kernel.describe(fixed_data=False)
    assert str(kernels.as_released(0.1, sigma=0.1)).count("momentum without") == 1


# --- bad input ----------------------------------------------------------------------------------------------------------


INFLUENCES = {
    "centred on the mean": lambda x: -0.5 * (x - 0.5 * x.mean(0)).square().sum(1),
    "batch statistics": lambda x: gaussian((x - x.mean(0)) / (x.std(0) + 0.1)),
    "softmax over chains": lambda x: gaussian(x) + x[:, 0].softmax(0),
    "the neighbour": lambda x: gaussian(x) - 0.1 * (x - x.roll(1, 0)).square().sum(1),
}


@pytest.mark.parametrize("name", INFLUENCES)
def test_chains_that_influence_each_other_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"lets chains influence each other: that of chain \d changed by .* first axis out of"):
        sample_density(INFLUENCES[name], spread_start(6) * 2, kernels.mala(0.1), num_steps=5)


def test_influence_shows_later_if_all_chains_start_at_one_point() -> None:
    coupled = INFLUENCES["centred on the mean"]
    with pytest.raises(ValueError, match="influence each other"):
        sample_density(coupled, torch.zeros(6, 2).double(), kernels.mala(0.3), num_steps=60)


def test_a_density_of_its_own_for_each_chain_is_no_influence() -> None:
    widths = torch.tensor([0.5, 1.0, 2.0, 5.0], dtype=torch.float64)[:, None]
    draws, _ = sample_density(lambda x: gaussian(x / widths), spread_start(), kernels.mala(0.1), num_steps=60)
    assert draws.shape == (4, 60, 3)
    sample_density(lambda x: 1e5 * gaussian(x).float(), spread_start(50).float(), kernels.mala(1e-6), num_steps=60)


def test_a_lost_gradient_is_noticed() -> None:
    with pytest.warns(UserWarning, match=r"gradient of `log_density` is zero in all chains, .*no .detach"):
        sample_density(lambda x: gaussian(x.detach()), spread_start(), kernels.mala(0.1), num_steps=5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"log_density": lambda x: x[:, 0] > 0}, TypeError, "must return float32 or float64, got torch.bool.* log probability"),
        ({"log_density": lambda x: gaussian(x).bfloat16()}, TypeError, "got torch.bfloat16.*in float32 or float64"),
        ({"log_density": lambda x: gaussian(x).sum()}, ValueError, r"one number for each chain, shape \(4,\), got \(\)"),
        ({"log_density": lambda x: gaussian(x) + math.nan}, ValueError, "zero or undefined at the starting point of 4 of 4"),
        ({"initial": torch.zeros(4, 3).long()}, TypeError, "`initial` must be floating point, got torch.int64"),
        ({"initial": torch.zeros(0, 3)}, ValueError, "`initial` must have the chains on its first axis"),
        ({"initial": torch.tensor([[0.0], [math.inf]])}, ValueError, r"is NaN or infinite in 1 of 2 chains \(first: \[1\]\)"),
        ({"initial": {"mu": torch.zeros(4), "tau": torch.zeros(5)}}, ValueError, r"shapes \{'mu': \(4,\), 'tau': \(5,\)\}"),
    ],
)
def test_bad_input_is_named(change: dict, error: type[Exception], message: str) -> None:
    arguments = {"log_density": gaussian, "initial": spread_start(), "kernel": kernels.mala(0.1), "num_steps": 10}
    with pytest.raises(error, match=message):
        sample_density(**(arguments | change))


def test_constraints_of_a_data_density_are_refused() -> None:
    target = DataDensity(lambda w, x: (x - w).square(), torch.ones(5))
    with pytest.raises(TypeError, match="`constraints` need a plain log density"):
        sample_density(target, torch.ones(3), kernels.mala(0.1), num_steps=5, constraints=constraints.positive)
