"""On a CUDA device: the same chains, no waiting for the device, and the errors still reach the user."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adammcmc import (
    MALA,
    AdamMCMC,
    AlwaysAccept,
    AsReleased,
    Barker,
    Callback,
    Confidence,
    ControlVariate,
    DataDensity,
    Event,
    ExactAdamMCMC,
    FullData,
    Gaussian,
    GaussianNLL,
    Minibatch,
    NonFiniteLoss,
    OptimizerMCMC,
    Penalty,
    Posterior,
    Sampler,
    Sequential,
    TensorExamples,
    Tuna,
    Underdamped,
    UniformBox,
    kernels,
    sample,
    sample_density,
)
from adammcmc.acceptance import ClampedLoss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


def problem(width: int = 32) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 4)).cuda()
    return model, torch.randn(256, 10).cuda(), torch.randint(4, (256,)).cuda()


def samplers(model: nn.Module) -> list[Sampler]:
    def generator() -> torch.Generator:
        return torch.Generator("cuda").manual_seed(3)

    return [
        AdamMCMC(model.parameters(), num_data=256, sigma=1e-3, sigma_along=2.0, generator=generator()),
        AdamMCMC(
            model.parameters(),
            num_data=256,
            sigma=1e-3,
            sigma_along=2.0,
            prior=UniformBox(-3, 3),
            fixed_data=True,
            generator=generator(),
        ),
        AdamMCMC(model.parameters(), num_data=256, sigma=1e-3, acceptance=AlwaysAccept(), generator=generator()),
        MALA(model.parameters(), 1e-5, num_data=256, prior=Gaussian(), sigma_along=0.5, generator=generator()),
        Underdamped(model.parameters(), 1e-3, num_data=256, prior=Gaussian(), fixed_data=True, generator=generator()),
        Underdamped(model.parameters(), 1e-3, num_data=256, prior=Gaussian(), acceptance=AlwaysAccept(), generator=generator()),
        ExactAdamMCMC(
            model.parameters(),
            1e-4,
            num_data=256,
            prior=Gaussian(),
            sigma=1e-3,
            momentum_spread=(1e-2, 1e-3),
            fixed_data=True,
            generator=generator(),
        ),
        AsReleased(model.parameters(), num_data=256, sigma=1e-3, sigma_along=6.0, generator=generator()),
    ]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("which", range(8))
def test_a_step_does_not_wait_for_the_device(which: int) -> None:
    model, x, y = problem()
    sampler = samplers(model)[which]
    for _ in range(3):  # the first step looks at the weights once, to check sigma
        sampler.step(lambda: F.cross_entropy(model(x), y))
    with waiting_is_an_error():
        for _ in range(40):  # more than a block of the health's running sums
            sampler.step(lambda: F.cross_entropy(model(x), y))
            _ = sampler.info.acceptance_rate, sampler.mean_acceptance_rate
    assert 0 < float(sampler.mean_acceptance_rate) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_two_apis_agree_bit_for_bit(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.full((5000,), 0.1, dtype=dtype, device="cuda"))

    def log_density(x: torch.Tensor) -> torch.Tensor:
        return (2 * x - x.exp()).sum(1)

    options = {"sigma": 0.007, "sigma_along": 1.5}
    sampler = AdamMCMC(
        [p], 1e-3, num_data=1, fixed_data=True, generator=torch.Generator("cuda").manual_seed(1), fused=False, **options
    )
    path = []
    for _ in range(30):
        sampler.step(lambda: -log_density(p[None])[0])
        path.append(p.detach().clone())
    draws, info = sample_density(
        log_density,
        torch.full((1, 5000), 0.1, dtype=dtype, device="cuda"),
        kernels.adam_mcmc(1e-3, **options),
        num_steps=30,
        seed=1,
    )
    assert torch.equal(torch.stack(path), draws[0])
    assert 0 < int(info.is_accepted.sum()) < 30


def test_split_is_unsplit_bit_for_bit() -> None:
    def run(model: nn.Module, sampler: Sampler, steps: int) -> None:
        for _ in range(steps):
            sampler.step(lambda: F.cross_entropy(model(x), y))

    for which in (0, 1, 3):
        model, x, y = problem()
        sampler = samplers(model)[which]
        run(model, sampler, 10)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "sampler": sampler.state_dict()}, file)
        run(model, sampler, 10)
        other, _, _ = problem()
        resumed = samplers(other)[which]
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        other.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["sampler"])
        run(other, resumed, 10)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)), which


def test_adam_on_the_device_is_taken_over() -> None:
    model, x, y = problem()
    for options in ({}, {"fused": True}, {"capturable": True}):
        optimizer = torch.optim.Adam(model.parameters(), **options)
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        sampler = samplers(model)[0]
        sampler.load_state_dict(optimizer.state_dict())
        sampler.step(lambda: F.cross_entropy(model(x), y))
        assert {float(s["step"]) for s in sampler.state.values()} == {6.0}


def test_thousands_of_chains_sample_the_right_density() -> None:
    draws, _ = sample_density(
        lambda x: -0.5 * x.square().sum(1), torch.zeros(5000, 3, device="cuda"), kernels.mala(0.5), num_steps=120, burn_in=60
    )
    chains = draws.double().square().mean((1, 2))
    assert draws.is_cuda
    assert abs(float(chains.mean()) - 1) < 4.5 * float(chains.std()) / math.sqrt(5000)


def test_a_nan_loss_freezes_and_is_reported() -> None:
    model, x, y = problem()
    sampler = samplers(model)[0]
    sampler.step(lambda: F.cross_entropy(model(x), y))
    before = [p.detach().clone() for p in model.parameters()]
    sampler.step(lambda: F.cross_entropy(model(x), y) * math.nan)
    torch.cuda.synchronize()
    with pytest.raises(NonFiniteLoss, match="at step 1"):
        sampler.step(lambda: F.cross_entropy(model(x), y))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(s["exp_avg"].isfinite().all() for s in sampler.state.values())
    sampler.unfreeze()
    sampler.step(lambda: F.cross_entropy(model(x), y))


def test_full_data_early_rejection_and_other_optimizers() -> None:
    model, x, y = problem()
    examples = TensorExamples(lambda a, b: F.cross_entropy(model(a), b, reduction="none"), x, y)
    for early in (False, True):
        sampler = MALA(
            model.parameters(),
            1e-3,
            num_data=256,
            prior=Gaussian(),
            acceptance=FullData(chunk_size=64, early_rejection=early),
            examples=examples,
        )
        for _ in range(5):
            sampler.step(lambda: F.cross_entropy(model(x[:64]), y[:64]))
    other = OptimizerMCMC(model.parameters(), torch.optim.SGD, lr=0.01, num_data=256, sigma=1e-3)
    other.step(lambda: F.cross_entropy(model(x), y))


@pytest.mark.parametrize(
    "test",
    [
        Minibatch(50),
        Penalty(50),
        Barker(50),
        Sequential(0.05, 50),
        Confidence(0.5, None, 50),
        Tuna(ClampedLoss(5.0), 0.0),
    ],
    ids=str,
)
def test_tests_that_choose_their_examples(test: Any) -> None:
    """Where the data are; a density and a network; no graph holds them, and the reason is said."""
    x = torch.randn(400, 3, device="cuda", dtype=torch.float64)
    reference = torch.zeros(3, device="cuda", dtype=torch.float64)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(x @ w)

    has_control = not isinstance(test, Tuna)  # whose bound is of the losses themselves
    control = ControlVariate(reference) if has_control else None
    target = DataDensity(loss, x, prior=Gaussian(), batch_size=10, inverse_temperature=0.1, control_variate=control)
    kernel = kernels.mala(0.01, acceptance=test)
    draws, info = sample_density(target, reference.expand(20, 3).clone(), kernel, num_steps=10)
    assert draws.is_cuda
    assert bool(info.is_accepted.any())
    assert bool((info.num_examples > 0).all())
    model, inputs, targets = problem()
    examples = TensorExamples(lambda a, b: F.cross_entropy(model(a), b, reduction="none"), inputs, targets)
    sampler = MALA(
        model.parameters(), 1e-3, num_data=256, prior=Gaussian(), acceptance=test, examples=examples, inverse_temperature=0.1
    )
    if has_control:
        sampler.use_control_variate()
    for _ in range(5):
        sampler.step(lambda: F.cross_entropy(model(inputs[:64]), targets[:64]))
    assert "reads partial sums on the host" in (sampler.chains.why_not_captured() or "")


def test_bfloat16_weights_and_autocast() -> None:
    model, x, y = problem()

    def mixed() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return F.cross_entropy(model(x), y)

    sampler = samplers(model)[0]
    for _ in range(5):
        sampler.step(mixed)
    low = model.to(torch.bfloat16)
    sampler = AdamMCMC(low.parameters(), num_data=256, sigma=0.05)
    for _ in range(5):
        sampler.step(lambda: F.cross_entropy(low(x.bfloat16()).float(), y))
    with pytest.raises(ValueError, match="below the spacing"):
        AdamMCMC(low.parameters(), num_data=256, sigma=1e-5).step(lambda: F.cross_entropy(low(x.bfloat16()).float(), y))


def stateful() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.4), nn.Linear(32, 4)]
    return nn.Sequential(*layers).cuda().train(), torch.randn(256, 10).cuda(), torch.randint(4, (256,)).cuda()


def test_dropout_and_batch_norm_on_the_device() -> None:
    """The same mask on both sides, buffers put back on rejection, and no waiting."""
    model, x, y = stateful()
    sampler = AdamMCMC(model.parameters(), lr=1e-3, num_data=256, sigma=3e-3, sigma_along=2.0)
    masks: list[torch.Tensor] = []
    model[3].register_forward_hook(lambda module, inputs, output: masks.append(output == 0))
    for _ in range(3):
        sampler.step(lambda: F.cross_entropy(model(x), y))
    with waiting_is_an_error():
        for _ in range(20):
            sampler.step(lambda: F.cross_entropy(model(x), y))
    counts = {True: 0, False: 0}
    for _ in range(30):
        masks.clear()
        before = [b.clone() for b in model.state_dict().values()]
        sampler.step(lambda: F.cross_entropy(model(x), y))
        zeros = [m.sum() for m in masks]
        assert len(zeros) == 2
        accepted = bool(sampler.info.is_accepted)
        counts[accepted] += 1
        same = all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
        assert same != accepted
    assert min(counts.values()) > 0, counts


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ["AdamMCMC", "Underdamped"])
def test_a_draw_is_the_function_that_was_sampled_and_leaves_captured_steps_alone(name: str, stacked: bool) -> None:
    """BatchNorm on all data: the statistics of a draw are those at its weights; a run with more draws has the same chain."""
    model, x, y = stateful()
    model[3] = nn.Identity()
    options: dict[str, Any] = {"num_chains": 3, "stacked": stacked, "burn_in": 10, "progress": False}
    if name == "AdamMCMC":
        options["sampler"] = partial(AdamMCMC, lr=1e-3, sigma=3e-3, sigma_along=2.0, prior=Gaussian())
    else:
        options["sampler"] = partial(Underdamped, step_size=1e-2, prior=Gaussian())
    few, many = (sample(model, (x, y), F.cross_entropy, num_draws=24 // gap, gap=gap, **options) for gap in (12, 2))
    twin = copy.deepcopy(model).eval()
    for draw, record in zip(many, many.index, strict=True):
        twin.load_state_dict(draw)
        with torch.no_grad():
            assert float(F.cross_entropy(twin(x), y)) == pytest.approx(record["loss"], rel=1e-4)
    assert "recomputed for each draw" in many.target
    for chain in range(3):
        for a, b in zip(few.chain(chain), many.chain(chain)[5::6], strict=True):
            for key in a:
                torch.testing.assert_close(a[key], b[key], rtol=1e-3, atol=1e-4)


def test_two_evaluations_at_one_point_agree_on_the_device() -> None:
    model, x, y = stateful()
    sampler = AdamMCMC(model.parameters(), lr=0.0, num_data=256, sigma=1e-30)
    sampler.parameters.check_noise = lambda sigmas, name: None  # type: ignore[method-assign]
    with torch.backends.cudnn.flags(deterministic=True):
        for _ in range(5):
            sampler.step(lambda: F.cross_entropy(model(x), y))
            assert float(sampler.info.proposed_loss) == float(sampler.info.loss)


def test_burn_in_and_health_on_the_device() -> None:
    model, x, y = problem()
    sampler = Underdamped(model.parameters(), num_data=256, prior=Gaussian(), fixed_data=True)
    while sampler.is_adapting:
        sampler.step(lambda: F.cross_entropy(model(x), y, reduction="none"))
    for _ in range(2):  # the first steps after burn-in check the settings and lay the weights out anew
        sampler.step(lambda: F.cross_entropy(model(x), y, reduction="none"))
    with waiting_is_an_error():
        for _ in range(1000):
            sampler.step(lambda: F.cross_entropy(model(x), y, reduction="none"))
    health = sampler.health()
    assert abs(health.acceptance - 0.85) < 0.06
    assert abs(health.acceptance - health.twice_rises) < 0.08
    assert health.noise == 0


@pytest.mark.parametrize("num_chains", [1, 3])
def test_a_run_that_stopped_in_burn_in_goes_on(num_chains: int, tmp_path: Path) -> None:
    """The sums of its adaptation come back from a file, to the device."""

    class Stop(Callback):
        def on_step(self, event: Event) -> None:
            if event.step == 45:
                raise KeyboardInterrupt

    model, x, y = problem()
    options: dict[str, Any] = {"burn_in": 90, "num_draws": 2, "gap": 5, "num_chains": num_chains, "path": tmp_path / "run"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adammcmc.runs.loop._CHECKPOINT_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            sample(model, (x, y), F.cross_entropy, callbacks=[Stop()], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so short a burn-in may not reach its goal
        posterior = sample(model, (x, y), F.cross_entropy, resume=True, **options)
    assert len(posterior) == 2 * num_chains


# --- the one-call API ----------------------------------------------------------------------------------------------------


class Interrupt(Callback):
    """Stops a run after some draws."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_draw(self, event: Event, record: dict[str, Any]) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class NoWaiting(Callback):
    """Between draws nothing may wait for the device: neither a step nor the data."""

    def __init__(self, burn_in: int, gap: int) -> None:
        self.burn_in, self.gap, self.watched = burn_in, gap, 0

    def on_step(self, event: Event) -> None:
        after = event.step + 1 - self.burn_in
        is_free = after > 1 and after % self.gap != 0  # the next step ends neither burn-in nor a gap
        self.watched += is_free
        torch.cuda.set_sync_debug_mode("error" if is_free else "default")

    def on_end(self, event: Event) -> None:
        torch.cuda.set_sync_debug_mode("default")


RUNS: dict[str, Any] = {
    "AdamMCMC": partial(AdamMCMC, lr=1e-3, sigma=1e-3, sigma_along=2.0, prior=Gaussian()),
    "Underdamped": partial(Underdamped, step_size=1e-3, prior=Gaussian()),
    "FullData": partial(MALA, step_size=1e-5, prior=Gaussian(), acceptance=FullData(chunk_size=100)),
}


@pytest.mark.parametrize("batch_size", [None, 64])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_waits_for_the_device_at_draws_only(name: str, batch_size: int | None) -> None:
    model, x, y = problem()
    watch = NoWaiting(30, 10)
    options: dict[str, Any] = {"sampler": RUNS[name], "batch_size": batch_size, "callbacks": [watch]}
    try:
        posterior = sample(model, (x, y), F.cross_entropy, num_draws=5, gap=10, burn_in=30, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.watched >= 40
    assert len(posterior) == 5
    assert all(value.device.type == "cpu" for value in posterior[0].values())


@pytest.mark.parametrize("batch_size", [None, 64])
@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_goes_on_bit_for_bit(name: str, batch_size: int | None, tmp_path: Path) -> None:
    model, x, y = problem()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        options: dict[str, Any] = {"sampler": RUNS[name], "batch_size": batch_size, "num_draws": 6, "gap": 4, "burn_in": 10}
        whole = sample(model, (x, y), F.cross_entropy, **options)
        with pytest.raises(KeyboardInterrupt):
            sample(model, (x, y), F.cross_entropy, path=tmp_path / "run", callbacks=[Interrupt(3)], **options)
        resumed = sample(model, (x, y), F.cross_entropy, path=tmp_path / "run", resume=True, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(whole, resumed, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_dropout_and_batch_norm_go_on_bit_for_bit(tmp_path: Path) -> None:
    _, x, y = problem()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4)).cuda()
    options: dict[str, Any] = {"sampler": RUNS["AdamMCMC"], "batch_size": 64, "num_draws": 6, "gap": 4, "burn_in": 10}
    whole = sample(model, (x, y), F.cross_entropy, **options)
    with pytest.raises(KeyboardInterrupt):
        sample(model, (x, y), F.cross_entropy, path=tmp_path / "run", callbacks=[Interrupt(2)], **options)
    resumed = sample(model, (x, y), F.cross_entropy, path=tmp_path / "run", resume=True, **options)
    for a, b in zip(whole, resumed, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_predictions_agree_with_the_hosts(tmp_path: Path) -> None:
    model, x, y = problem()
    options: dict[str, Any] = {"sampler": RUNS["AdamMCMC"], "num_draws": 12, "gap": 5, "burn_in": 10}
    posterior = sample(model, (x, y), F.cross_entropy, path=tmp_path / "run", **options)
    there = posterior.predict((x, y), raw=True)
    here = Posterior.open(tmp_path / "run", copy.deepcopy(model).cpu()).predict((x.cpu(), y.cpu()))
    mixed = posterior.predict(x.cpu())
    assert there.mean.device.type == "cpu"
    for name in ("mean", "spread", "variance", "entropy", "mutual_information"):
        torch.testing.assert_close(getattr(there, name), getattr(here, name), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(getattr(there, name), getattr(mixed, name), rtol=1e-3, atol=1e-5)
    assert torch.equal(there.targets, y.cpu())


def test_data_on_the_host_are_brought_to_the_model() -> None:
    model, x, y = problem()
    on_host = sample(model, (x.cpu(), y.cpu()), F.cross_entropy, sampler=RUNS["AdamMCMC"], batch_size=64, num_draws=3, gap=4)
    there = sample(model, (x, y), F.cross_entropy, sampler=RUNS["AdamMCMC"], batch_size=64, num_draws=3, gap=4)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(on_host, there, strict=True) for key in a)
    loader = DataLoader(TensorDataset(x.cpu(), y.cpu()), batch_size=64, pin_memory=True)
    piped = sample(model, loader, F.cross_entropy, sampler=RUNS["AdamMCMC"], num_draws=3, gap=4)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(piped, there, strict=True) for key in a)


# --- many chains at once --------------------------------------------------------------------------------------------------


STACKED: dict[str, Any] = {
    "scan": partial(
        AdamMCMC,
        lr=torch.tensor([1e-3, 2e-3, 3e-3, 0.0]),
        sigma=torch.tensor([1e-3, 2e-3, 5e-4, 3e-3]),
        sigma_along=torch.tensor([2.0, 1.0, 3.0, 0.0]),
        inverse_temperature=torch.tensor([1.0, 0.5, 0.2, 0.1]),
        prior=Gaussian(),
    ),
    "bounded": partial(AdamMCMC, lr=1e-3, sigma=1e-3, sigma_along=2.0, prior=UniformBox(-3, 3)),
    "MALA": partial(MALA, step_size=torch.tensor([1e-5, 2e-5, 1e-4, 1e-3]), sigma_along=0.5, prior=Gaussian()),
    "Underdamped": partial(Underdamped, step_size=torch.tensor([1e-3, 2e-3, 1e-2, 3e-2]), friction=1.0, prior=Gaussian()),
    "FullData": partial(MALA, step_size=1e-4, prior=Gaussian(), acceptance=FullData(chunk_size=100)),
    "AsReleased": partial(AsReleased, lr=1e-3, sigma=1e-3, sigma_along=6.0, prior=Gaussian()),
}


@pytest.mark.parametrize("batch_size", [None, 64])
@pytest.mark.parametrize("name", STACKED)
def test_a_stack_waits_for_the_device_at_draws_only(name: str, batch_size: int | None) -> None:
    model, x, y = problem()
    watch = NoWaiting(30, 10)
    options: dict[str, Any] = {"sampler": STACKED[name], "batch_size": batch_size, "callbacks": [watch], "num_chains": 4}
    try:
        posterior = sample(model, (x, y), F.cross_entropy, num_draws=5, gap=10, burn_in=30, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert posterior.store.manifest["configuration"]["stacked"] is True, "on an accelerator it stacks by itself"
    assert watch.watched >= 4 * 40
    assert len(posterior) == 20
    assert float(posterior.trace("acceptance_rate").mean()) > 0
    assert len({float(draw["0.weight"].double().sum()) for draw in posterior}) > 4


def test_a_stack_with_dropout_and_batch_norm_does_not_wait_either(tmp_path: Path) -> None:
    """And goes on bit for bit."""
    model, x, y = stateful()
    watch = NoWaiting(10, 10)
    options: dict[str, Any] = {"sampler": STACKED["scan"], "batch_size": 64, "num_draws": 6, "gap": 10, "burn_in": 10}
    options |= {"num_chains": 4, "stacked": True}
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        whole = sample(model, (x, y), F.cross_entropy, callbacks=[watch], **options)
        torch.cuda.set_sync_debug_mode("default")
        with pytest.raises(KeyboardInterrupt):
            sample(model, (x, y), F.cross_entropy, path=tmp_path / "run", callbacks=[Interrupt(9)], **options)
        resumed = sample(model, (x, y), F.cross_entropy, path=tmp_path / "run", resume=True, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)
    assert watch.watched >= 4 * 40
    for a, b in zip(whole, resumed, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)
    statistics = {float(whole.chain(c)[-1]["1.running_mean"].sum()) for c in range(4)}
    assert len(statistics) == 4, "of each chain"


def test_stacked_chains_sample_their_own_temperatures() -> None:
    """Start exact, step, compare: conjugate regression, 500 chains at each of two temperatures."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 2, generator=generator).double()
    y = x @ torch.tensor([[1.0], [-0.5]]).double() + 0.7 * torch.randn(40, 1, generator=generator).double()
    temperatures = torch.tensor([1.0, 0.1], dtype=torch.float64)
    starts, roots, means = [], [], []
    for inverse_temperature in temperatures.tolist():
        precision = inverse_temperature * x.T @ x / 0.7**2 + torch.eye(2, dtype=torch.float64)
        root = torch.linalg.cholesky(precision)
        mean = torch.cholesky_solve(inverse_temperature * x.T @ y / 0.7**2, root).flatten()
        noise = torch.randn(500, 2, generator=generator).double()
        starts.append(mean + torch.linalg.solve_triangular(root.T, noise.T, upper=True).T)
        roots.append(root)
        means.append(mean)
    posterior = sample(
        nn.Linear(2, 1, bias=False, dtype=torch.float64).cuda(),
        (x.cuda(), y.cuda()),
        GaussianNLL(0.7),
        sampler=partial(MALA, step_size=1.5e-2, inverse_temperature=temperatures.repeat_interleave(500)),
        prior=Gaussian(1.0),
        num_chains=1000,
        initial=[{"weight": start[None]} for start in torch.cat(starts)],
        num_draws=1,
        gap=40,
        burn_in=0,
        stacked=True,
    )
    draws = torch.stack([draw["weight"][0] for draw in posterior]).view(2, 500, 2)
    for group, root, mean in zip(draws, roots, means, strict=True):
        whitened = (group - mean) @ root
        assert float(whitened.mean().abs()) < 4.5 / math.sqrt(1000)
        assert abs(float(whitened.square().mean()) - 1) < 4.5 * math.sqrt(2 / 1000)


def test_a_density_is_scanned_on_the_device() -> None:
    sizes = torch.tensor([0.1, 0.5]).repeat_interleave(2000)  # on the host: it is brought there
    draws, info = sample_density(
        lambda x: -0.5 * x.square().sum(1), torch.randn(4000, 3, device="cuda"), kernels.mala(sizes), num_steps=60, burn_in=30
    )
    rates = info.acceptance_rate.mean(1).view(2, 2000).mean(1)
    assert float(rates[0]) > float(rates[1])
    for half in draws.double().square().mean((1, 2)).view(2, 2000):
        assert abs(float(half.mean()) - 1) < 4.5 * float(half.std()) / math.sqrt(2000)
