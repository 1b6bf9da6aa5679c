"""On real network posteriors, against long HMC references: what the docs say of the kernels holds."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from adammcmc import BurnIn, Density, kernels, sample_density, two_sided, warm_up
from adammcmc.kernels.proposal import Prolate
from adammcmc.samplers.adaptation import momentum_spread
from benchmarks import networks


@pytest.mark.parametrize("name", networks.NAMES)
def test_the_references_are_of_these_problems(name: str) -> None:
    """Files and problems belong together: the kept draws have the reference's level of U, and its predictions."""
    p, reference = networks.problem(name), networks.load_reference(name)
    assert reference.draws.shape == (16, p.num_params)
    potential = -p.log_density(reference.draws)
    assert abs(float(potential.mean()) - reference.potential) < 4.5 * reference.potential_sd / 4
    assert float(reference.facts["r_hat_max"]) < 1.01
    deviation = (p.predict(reference.draws).mean(0) - reference.mean) / (reference.sd / 4)
    assert float(deviation.square().mean().sqrt()) < 2
    # the modules and the batched density are the same function
    model = p.model()
    torch.nn.utils.vector_to_parameters(reference.draws[0], model.parameters())
    log_prior = p.prior(model).log_density(list(model.parameters()))
    u = float(p.losses(model(p.inputs)).sum().detach() - log_prior.detach())
    assert math.isclose(u, float(potential[0]), rel_tol=1e-5)


def test_underdamped_at_its_defaults_is_right_on_digits() -> None:
    found = networks.run_defaults(networks.problem("digits"), 4000)
    assert abs(found["sd"] - 1) < 0.15
    assert found["W2"] < 0.25
    assert abs(found["acceptance"] - 0.85) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", networks.NAMES)
def test_underdamped_at_its_defaults_is_right_and_efficient(name: str) -> None:
    """Within 15% of the reference's predictive sd, nothing tuned by hand, and three times MALA's draws per gradient."""
    p = networks.problem(name)
    found = networks.run_defaults(p, 10_000)
    assert abs(found["sd"] - 1) < 0.15
    assert found["healthy"] == 1
    initial = p.trained(8)
    for tune in (BurnIn(num_steps=3000), BurnIn(num_steps=3000, learn_preconditioner=False)):
        mala, start = warm_up(p.log_density, initial, kernels.mala(1e-5), tune=tune, progress=False)
        assert found["ess"] > 3 * networks.measure(p, mala, start, 5000)["ess"]


@pytest.mark.slow
@pytest.mark.parametrize("name", networks.NAMES)
@pytest.mark.parametrize("kernel", ["underdamped", "hmc", "mala"])
def test_exact_kernels_have_the_reference_s_mean_and_spread(name: str, kernel: str) -> None:
    """Started from the reference's own draws; the error is what so many effective draws leave, and not more."""
    p, reference = networks.problem(name), networks.load_reference(name)
    first = {"underdamped": kernels.underdamped(1e-3), "hmc": kernels.hmc(1e-3, 10), "mala": kernels.mala(1e-5)}[kernel]
    steps = 600 if kernel == "hmc" else 4000
    tuned, _ = warm_up(p.log_density, reference.draws, first, tune=BurnIn(num_steps=steps // 2), progress=False)
    draws, _ = sample_density(p.log_density, reference.draws, tuned, num_steps=steps, gap=2, progress=False)
    values = torch.stack([p.predict(draws[:, i]) for i in range(draws.shape[1])], 1)
    ess = networks.effective_size(values)
    flat = values.flatten(0, 1)
    z = (flat.mean(0) - reference.mean) / (reference.sd / ess.sqrt())
    assert float(z.square().mean().sqrt()) < 2
    relative = (flat.std(0) / reference.sd - 1) * (2 * ess).sqrt()
    assert float(relative.median().abs()) < 3
    assert abs(float(flat.std(0).mean() / reference.sd.mean()) - 1) < 0.1


def test_the_two_sided_test_tells_exact_from_biased() -> None:
    """From draws of the target U stays under exact kernels, the chain of Theorem 1 among them; not under Algorithm 1."""
    p, reference = networks.problem("diabetes"), networks.load_reference("diabetes")
    optimum = p.trained(16, num_steps=600)
    tuned, at_rest = warm_up(
        p.log_density, reference.draws, kernels.underdamped(1e-3), tune=BurnIn(num_steps=600), progress=False
    )
    exact = two_sided(p.log_density, tuned, reference.draws, optimum, num_steps=1500, progress=False)
    assert exact.stays
    assert exact.meets
    assert exact.verdict.startswith("agrees")

    density = Density(p.log_density)
    here = density.evaluate((at_rest,), with_grad=True)
    generator = torch.Generator().manual_seed(0)
    spread = momentum_spread(density, (at_rest,), here, Prolate(2e-3, 3.0), 1e-3, generator)
    theorem = kernels.exact_adam_mcmc(1e-3, sigma=2e-3, sigma_along=3.0, momentum_spread=spread)
    slow = two_sided(p.log_density, theorem, reference.draws, optimum, num_steps=1500, progress=False)
    assert slow.stays
    assert slow.verdict.startswith("not mixed"), "exact, and far slower"

    algorithm_1 = kernels.adam_mcmc(1e-3, sigma=2e-3, sigma_along=3.0)
    biased = two_sided(p.log_density, algorithm_1, reference.draws, optimum, num_steps=1500, progress=False)
    assert not biased.stays
    assert biased.drift < -10
    assert "samples another distribution" in biased.verdict


def test_a_reference_of_few_draws_is_refused() -> None:
    with pytest.raises(ValueError, match="`reference` must hold at least 8 starting points"):
        two_sided(lambda x: -x.square().sum(1), kernels.mala(0.1), torch.zeros(3, 2), torch.zeros(3, 2), num_steps=5)


def test_two_sides_that_start_at_one_level_decide_nothing() -> None:
    normal = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    test = two_sided(lambda x: -x.square().sum(1) / 2, kernels.mala(1e-9), normal, normal, num_steps=20, progress=False)
    assert test.verdict.startswith("undecided")


def test_effective_size_of_an_autoregression_is_the_formula() -> None:
    """IAT (1 + rho) / (1 - rho)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(16, 8000, 1, dtype=torch.float64)
    noise = torch.randn(16, 8000, 1, dtype=torch.float64, generator=generator)
    for t in range(1, 8000):
        x[:, t] = 0.8 * x[:, t - 1] + 0.6 * noise[:, t]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ess = float(networks.effective_size(x))
    assert abs(ess / (16 * 8000 / 9) - 1) < 0.1
