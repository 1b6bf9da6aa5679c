"""`sample_density`: seeds, pytrees, burn-in, gap, and settings of each chain."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from adammcmc import AlwaysAccept, BurnIn, Density, NonFiniteLoss, kernels, sample_density
from adammcmc.backends.streams import streams
from tests.targets import TARGETS


def gaussian(x: torch.Tensor) -> torch.Tensor:
    return -0.5 * x.square().sum(1)


def test_a_seed_fixes_every_draw() -> None:
    initial = torch.zeros(10, 3)
    first, _ = sample_density(gaussian, initial, kernels.mala(0.3), num_steps=20, seed=4)
    again, _ = sample_density(gaussian, initial, kernels.mala(0.3), num_steps=20, seed=4)
    other, _ = sample_density(gaussian, initial, kernels.mala(0.3), num_steps=20, seed=5)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_resumed_chain_continues_bit_for_bit_with_its_generator() -> None:
    """The state and the generator are all that a chain remembers."""
    for kernel in (kernels.adam_mcmc(0.05, sigma=0.3, sigma_along=1.0), kernels.mala(0.2, sigma_along=0.5)):
        potential = Density(gaussian)
        generator = torch.Generator().manual_seed(1)
        state = kernel.init(torch.ones(7, 3), potential)
        for _ in range(10):
            state, _ = kernel.step(state, potential, generator)
        saved_state, saved_generator = state, generator.get_state()
        for _ in range(10):
            state, info = kernel.step(state, potential, generator)
        resumed = torch.Generator()
        resumed.set_state(saved_generator)
        for _ in range(10):
            saved_state, resumed_info = kernel.step(saved_state, Density(gaussian), resumed)
        assert torch.equal(state.params, saved_state.params)
        torch.testing.assert_close(info, resumed_info, rtol=0, atol=0, equal_nan=True)


def test_pytrees_are_the_same_target_as_their_concatenation() -> None:
    initial = {"a": torch.zeros(400, 2).double(), "b": (torch.zeros(400, 1, 3).double(),)}

    def log_density(tree: dict) -> torch.Tensor:
        return gaussian(tree["a"]) + gaussian(tree["b"][0].flatten(1)) * 4

    draws, info = sample_density(log_density, initial, kernels.mala(0.2), num_steps=400, burn_in=100, seed=2)
    assert draws["a"].shape == (400, 300, 2)
    assert draws["b"][0].shape == (400, 300, 1, 3)
    assert info.acceptance_rate.shape == (400, 300)
    for sample, variance in ((draws["a"], 1.0), (draws["b"][0].flatten(2), 0.25)):
        chains = sample.square().mean((1, 2))
        assert abs(float(chains.mean()) - variance) < 4.5 * float(chains.std()) / math.sqrt(400)


def test_leaves_may_be_one_number_for_each_chain() -> None:
    draws, _ = sample_density(lambda x: -x.square() / 2, torch.zeros(3000), kernels.mala(0.5), num_steps=60, burn_in=40)
    assert draws.shape == (3000, 20)
    chains = draws.double().square().mean(1)
    assert abs(float(chains.mean()) - 1) < 4.5 * float(chains.std()) / math.sqrt(3000)


def test_a_flat_density_is_sampled_uniformly() -> None:
    """It has no gradient that autograd could find: that gradient is zero."""

    def log_density(x: torch.Tensor) -> torch.Tensor:
        return torch.where((x.abs() < 1).all(1), 0.0, -math.inf)

    draws, info = sample_density(log_density, torch.zeros(4000, 2), kernels.mala(0.3), num_steps=80, burn_in=79)
    chains = draws[:, 0].double().square().mean(1)
    assert abs(float(chains.mean()) - 1 / 3) < 4.5 * float(chains.std()) / math.sqrt(4000)
    assert not info.is_finite.all()


def test_an_unadjusted_chain_stays_inside_and_reports_how_often_it_did_not_move() -> None:
    draws, info = sample_density(
        lambda x: torch.where(x[:, 0].abs() < 1, x[:, 0], -math.inf),
        torch.zeros(500, 1),
        kernels.mala(0.5, acceptance=AlwaysAccept()),
        num_steps=50,
    )
    assert draws.abs().max() < 1
    assert torch.equal(info.is_accepted, info.is_finite)
    assert torch.equal(info.is_accepted.double(), info.acceptance_rate)
    assert 0.2 < float(info.acceptance_rate.mean()) < 0.9


def test_a_preconditioner_with_its_keys_in_another_order_is_refused() -> None:
    initial = {"b": torch.zeros(4, 2), "a": torch.zeros(4, 2)}
    kernel = kernels.mala(0.1, preconditioner={"a": torch.ones(2), "b": 3 * torch.ones(2)})
    with pytest.raises(ValueError, match="keys in the same order"):
        sample_density(lambda x: gaussian(x["a"]) + gaussian(x["b"]), initial, kernel, num_steps=3)


def test_burn_in_and_gap_keep_the_steps_they_say() -> None:
    initial = torch.zeros(3, 2)
    every, info = sample_density(gaussian, initial, kernels.mala(0.3), num_steps=23, seed=0)
    some, some_info = sample_density(gaussian, initial, kernels.mala(0.3), num_steps=23, burn_in=5, gap=4, seed=0)
    assert torch.equal(some, every[:, 8::4])  # steps 9, 13, 17, 21 (counted from 1)
    assert torch.equal(some_info.loss, info.loss[:, 8::4])


def test_thousands_of_chains_in_one_evaluation() -> None:
    calls = []

    def log_density(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return gaussian(x)

    sample_density(log_density, torch.zeros(5000, 4), kernels.mala(0.3), num_steps=10)
    # two at the start and one at the end (is it the same function?), and one a step: the gradient is cached
    assert calls == [(5000, 4)] * 13


def test_initial_is_left_alone_and_draws_do_not_alias() -> None:
    initial = torch.zeros(4, 2)
    draws, _ = sample_density(gaussian, initial, kernels.mala(0.5), num_steps=5)
    assert not initial.any()
    before = draws.clone()
    initial += 1
    assert torch.equal(before, draws)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"log_density": lambda x: -x.square()}, ValueError, "one number for each chain, shape .4,., got .4, 2."),
        ({"initial": torch.full((4, 2), math.nan)}, ValueError, "`initial` is NaN or infinite in 4 of 4 chains"),
        ({"initial": torch.zeros(4, 2, dtype=torch.long)}, TypeError, "floating point"),
        ({"log_density": lambda x: 1.0}, TypeError, "must return a tensor, got float"),
        ({"kernel": kernels.mala(0.1, preconditioner=torch.ones(3))}, ValueError, "`preconditioner` must have the structure"),
        ({"kernel": kernels.mala(0.1, preconditioner=-torch.ones(2))}, ValueError, "positive and finite everywhere"),
        ({"initial": {"a": 1.0}}, TypeError, "must be tensors"),
        ({"initial": {}}, ValueError, "holds no tensor"),
        ({"initial": (torch.zeros(4, 2), torch.zeros(5, 2))}, ValueError, "chains on their first axis"),
        ({"num_steps": 5, "burn_in": 5}, ValueError, "`num_steps` must exceed `burn_in`"),
        ({"gap": 0}, ValueError, "`gap` must be between 1 and"),
        ({"gap": 99}, ValueError, "`gap` must be between 1 and num_steps - burn_in = 10"),
    ],
)
def test_bad_input_is_refused_by_name(change: dict, error: type[Exception], message: str) -> None:
    arguments = {"log_density": gaussian, "initial": torch.zeros(4, 2), "kernel": kernels.mala(0.1), "num_steps": 10}
    with pytest.raises(error, match=message):
        sample_density(**(arguments | change))


def test_chains_that_froze_raise_and_lose_nothing() -> None:
    calls = 0

    def log_density(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return gaussian(x) + (_NanGradient.apply(x) if calls > 5 else 0.0)

    with pytest.raises(NonFiniteLoss, match=r"3 chains .* step \d") as caught:
        sample_density(log_density, torch.zeros(3, 2), kernels.adam_mcmc(0.1, sigma=0.3, sigma_along=1.0), num_steps=20)
    draws, _ = caught.value.result
    assert draws.shape == (3, 20, 2)
    assert draws.isfinite().all()


class _NanGradient(torch.autograd.Function):
    """Zero, with a gradient that is not a number."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return torch.zeros(x.shape[0])

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return torch.full((len(grad), 2), math.nan)


# --- settings of each chain -----------------------------------------------------------------------------------------------


SIZES = torch.tensor([0.05, 0.2, 0.6], dtype=torch.float64)
SCANS = {
    "mala": lambda h: kernels.mala(h),
    "mala, directional": lambda h: kernels.mala(h, sigma=1.2 * h**0.5, sigma_along=2 * h),
    "mala, preconditioned": lambda h: kernels.mala(h, preconditioner=torch.tensor([0.5, 1.0, 2.0]).double()),
    "underdamped": lambda h: kernels.underdamped(h),
    "underdamped, friction": lambda h: kernels.underdamped(h, 0.7, num_leapfrog=2),
    "underdamped, always accept": lambda h: kernels.underdamped(h, acceptance=AlwaysAccept()),
    "hmc": lambda h: kernels.hmc(h, 3),
    "adam_mcmc": lambda h: kernels.adam_mcmc(0.1 * h, sigma=h, sigma_along=3 * h),
    "as_released": lambda h: kernels.as_released(0.1 * h, sigma=h, sigma_along=3 * h),
    "exact_adam_mcmc": lambda h: kernels.exact_adam_mcmc(0.1 * h, sigma=h, sigma_along=h, momentum_spread=(1.0, 1.0)),
}


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_equals_separate_runs(name: str) -> None:
    """The same noise gives the same chains: a setting for each chain is what it says."""

    def skewed(x: torch.Tensor) -> torch.Tensor:
        return (2 * x - x.exp()).sum(1)

    initial = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3)
    together, info = sample_density(
        skewed, initial, SCANS[name](SIZES), num_steps=60, seed=streams([4, 5, 6], torch.device("cpu"))
    )
    for c, seed in enumerate((4, 5, 6)):
        alone, own = sample_density(skewed, initial[c : c + 1], SCANS[name](float(SIZES[c])), num_steps=60, seed=seed)
        torch.testing.assert_close(together[c], alone[0], rtol=1e-10, atol=1e-10)
        assert torch.equal(info.is_accepted[c], own.is_accepted[0])
    if "always" not in name:
        assert len(set(info.acceptance_rate.mean(1).tolist())) == 3


@pytest.mark.parametrize("name", ["mala, directional", "underdamped, friction", "exact_adam_mcmc"])
def test_each_chain_of_a_scan_is_exact(name: str) -> None:
    """Start exact, step, compare: 4,000 chains of each setting, in one run."""
    target = TARGETS[0]
    generator = torch.Generator().manual_seed(3)
    sizes = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64).repeat_interleave(4000)
    initial = target.draw(len(sizes), generator)
    draws, _ = sample_density(target.log_density, initial, SCANS[name](sizes), num_steps=40, burn_in=39, seed=generator)
    fresh = target.draw(40_000, generator)
    for group in draws[:, 0].view(3, 4000, 2):
        assert min(stats.ks_2samp(group[:, i], fresh[:, i]).pvalue for i in range(2)) > 1e-5


def test_settings_of_chains_that_do_not_fit_are_named() -> None:
    initial = torch.zeros(4, 2)
    with pytest.raises(ValueError, match="`step_size` has 3 values, and there are 4 chains"):
        sample_density(gaussian, initial, kernels.mala(SIZES), num_steps=2)
    with pytest.raises(ValueError, match="`sigma_along` has 3 values"):
        sample_density(gaussian, initial, kernels.adam_mcmc(0.1, sigma=0.1, sigma_along=SIZES), num_steps=2)
    with pytest.raises(ValueError, match="`lr` must not be negative, and must be finite, got -1"):
        kernels.adam_mcmc(torch.tensor([0.1, -1.0]), sigma=0.1)
    with pytest.raises(ValueError, match="`sigma` must be positive"):
        kernels.adam_mcmc(0.1, sigma=torch.tensor([0.1, 0.0]))
    with pytest.raises(ValueError, match=r"`step_size` must be a number, or a tensor with one .* got shape \(2, 2\)"):
        kernels.underdamped(torch.ones(2, 2))
    with pytest.raises(ValueError, match="`step_size` differs between the chains, and burn-in would adapt it"):
        sample_density(gaussian, initial[:3], kernels.mala(SIZES), num_steps=20, burn_in=10, tune=BurnIn())
    kernel = kernels.adam_mcmc(0.1, sigma=0.1, sigma_along=SIZES)
    with pytest.raises(ValueError, match="`sigma_along` differs between the chains"):
        sample_density(gaussian, initial[:3], kernel, num_steps=20, burn_in=10, tune=BurnIn())


def test_settings_that_burn_in_does_not_adapt_may_differ_between_chains() -> None:
    kernel = kernels.adam_mcmc(SIZES * 1e-2, sigma=0.3, sigma_along=1.0)
    _, info = sample_density(gaussian, torch.zeros(3, 2), kernel, num_steps=300, burn_in=200, tune=BurnIn(num_steps=200))
    assert info.acceptance_rate.mean() > 0.3
