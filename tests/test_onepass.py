"""One pass over memory is the pure kernel, given the same noise. On the CPU the kernels run under Triton's interpreter."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton")

from scipy import stats

from adammcmc import AdamMCMC, AsReleased, FullData, Prior, TensorExamples, UniformBox
from adammcmc.acceptance import AlwaysAccept, Minibatch
from adammcmc.backends import onepass
from adammcmc.backends.compiled import CannotCompile, CompiledOnePass, library
from adammcmc.backends.fused import Settings, read_row
from adammcmc.backends.onepass import OnePass
from adammcmc.kernels import AdamMCMCKernel, proposal
from adammcmc.kernels.direction import Adam, AdamMemory
from adammcmc.kernels.kernel import ChainState, Info
from adammcmc.kernels.proposal import Elementwise, Prolate
from adammcmc.target.target import Evaluation, Gaussian, potential_difference
from tests import philox

# the interpreter computes on numpy, which warns of 0 / 0 in places that are masked
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(5,), (3, 7), (2050,), (64, 65)]
KEY = -0x1234_5678_9ABC_DEF0


def needs_c() -> None:
    if DEVICE.type != "cpu":
        pytest.skip("for the CPU")
    try:
        library()
    except CannotCompile as error:
        pytest.skip(str(error))


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in SHAPES]


class Fixed:
    """A potential whose values are given: the loss is whatever is said of it at theta and at tau."""

    inverse_temperature, is_bounded, num_examples = 1.0, False, None

    def __init__(self, here: Evaluation, there: torch.Tensor, there_grad: list[torch.Tensor], prior: Gaussian | None) -> None:
        self.here, self.there, self.there_grad, self.prior = here, there, there_grad, prior
        self.scale, self.fixed = 1000.0, False

    def evaluate(self, params: tuple[torch.Tensor, ...], *, with_grad: bool) -> Evaluation:
        if params is self.theta:
            return self.here
        return Evaluation(self.there, self.log_prior(params), tuple(g[None] for g in self.there_grad))

    def compare(self, current: Evaluation, proposed: Evaluation) -> torch.Tensor:
        return potential_difference(self.scale, current, proposed)

    def log_prior(self, params: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if self.prior is None:
            return torch.zeros(1, dtype=torch.float64, device=DEVICE)
        return self.prior.log_density([p[0] for p in params]).reshape(1)


def noise_of(key: int, draw: int = 0) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """z and eps as the oracle has them; of the second draw, the zeta of the released code."""
    key %= 1 << 64
    base, noise = 0, []
    for shape in SHAPES:
        size = math.prod(shape)
        noise.append(philox.normals(key, base, size, draw).view(1, *shape).float().to(DEVICE))
        base += -(-size // 4)
    return torch.tensor([philox.along_and_uniform(key)[0]], dtype=torch.float64, device=DEVICE), tuple(noise)


def pure_step(
    kernel: AdamMCMCKernel, state: ChainState, potential: Fixed, monkeypatch: pytest.MonkeyPatch
) -> tuple[ChainState, Info]:
    along, noise = noise_of(KEY)
    monkeypatch.setattr(proposal, "draw_along", lambda params, generator: along)
    draws = itertools.chain([noise, noise_of(KEY, 1)[1]])
    monkeypatch.setattr(proposal, "standard_normal", lambda like, generator: next(draws))
    log_uniform = torch.tensor([philox.along_and_uniform(KEY % (1 << 64))[1]], dtype=torch.float64, device=DEVICE)
    monkeypatch.setattr("adammcmc.acceptance.metropolis.decisive", lambda comparison, generator: log_uniform)
    return kernel.step(state, potential, torch.Generator(DEVICE))  # type: ignore[arg-type]


CASES = {
    "accepted": {},
    "refused": {"rise": 0.5},
    "a mean": {"batch": None},
    "a mean, fixed": {"batch": None, "fixed": True},
    "prior": {"prior": Gaussian((0.5, 1.0, 2.0, 3.0))},
    "prior, refused": {"prior": Gaussian(0.7), "rise": 0.5},
    "fixed": {"fixed": True},
    "fixed, refused": {"fixed": True, "rise": 0.5},
    "fixed, prior": {"fixed": True, "prior": Gaussian(0.7)},
    "always": {"acceptance": AlwaysAccept()},
    "always, no noise": {"acceptance": AlwaysAccept(), "sigma": 0.0},
    "two chunks of losses": {"batch": 1500},
    "nan at tau": {"rise": math.nan},
    "nan at theta": {"loss": math.nan},
    "bad gradient": {"bad": math.inf},
    "frozen": {"frozen": 4},
    "as released": {"elementwise": True},
    "as released, refused": {"elementwise": True, "rise": 0.5},
    "as released, prior": {"elementwise": True, "prior": Gaussian((0.5, 1.0, 2.0, 3.0))},
}


BACKENDS = {"triton": OnePass, "c": CompiledOnePass}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_one_pass_equals_the_pure_kernel(case: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "c":
        needs_c()
        if "elementwise" in CASES[case]:
            pytest.skip("on a GPU only")
    options = {"rise": -1e-4, "batch": 40, "prior": None, "fixed": False, "acceptance": Minibatch(), "sigma": 0.01} | CASES[
        case
    ]
    acceptance = options["acceptance"]
    params, grads, m1, fresh_grads = (tensors(seed) for seed in range(4))
    m2 = [x.square() for x in tensors(9)]
    if "bad" in options:
        grads[1][2, 3] = options["bad"]
    batch, prior = options["batch"], options["prior"]
    wobble = torch.linspace(0, 0.01, batch or 1, device=DEVICE)
    losses = (1 + wobble if batch else torch.ones((), device=DEVICE))[None] * options.get("loss", 1.0)
    there = losses + options["rise"] + 0.3 * wobble[: batch or 1].reshape(losses.shape)
    n = len(SHAPES)
    lr, betas, eps = [0.01, 0.02, 0.03, 0.04], [(0.9, 0.99), (0.0, 0.9), (0.99, 0.999), (0.5, 0.5)], [1e-8, 1e-3, 1e-8, 0.0]
    sigma = [options["sigma"] * (i + 1) for i in range(n)]
    counts = (0, 3, 3, 1000)

    full = [g if prior is None else g - q / 1000.0 for g, q in zip(grads, prior.grad(params) if prior else grads, strict=True)]
    theta = tuple(p[None].clone() for p in params)
    potential = Fixed(Evaluation(losses.clone(), torch.zeros(1), tuple(g[None] for g in full)), there, fresh_grads, prior)
    potential.theta, potential.fixed = theta, bool(options["fixed"])
    potential.here = potential.here._replace(log_prior=potential.log_prior(theta))
    frozen_at = torch.full((1,), options.get("frozen", -1), dtype=torch.int64, device=DEVICE)
    memory = AdamMemory(tuple(x[None].clone() for x in m1), tuple(x[None].clone() for x in m2), counts)
    state = ChainState(theta, memory, potential.here if options["fixed"] else None, None, 7, frozen_at)
    law = Elementwise if "elementwise" in options else Prolate
    kernel = AdamMCMCKernel(Adam(lr, list(betas), eps), law(sigma, 1.5), acceptance)
    expected, info = pure_step(kernel, state, potential, monkeypatch)

    before = [p.clone() for p in params]
    flag, rates = frozen_at.clone(), torch.full((1,), 0.25, dtype=torch.float64, device=DEVICE)
    backup = [torch.full_like(p, torch.nan) for p in params]
    more = {"elementwise": True} if "elementwise" in options else {}
    one = BACKENDS[backend](
        params,
        m1,
        m2,
        backup,
        counts=counts,
        num_steps=7,
        frozen_at=flag,
        sum_rates=rates,
        fixed=bool(options["fixed"]),
        **more,
    )
    one.tell(Settings(1.5, lr, betas, eps, sigma, [0.0] * n if prior is None else list(prior.precision(params))))
    table, fresh = one.point_at(grads), one.point_at(fresh_grads)
    one.propose(torch.tensor([KEY], device=DEVICE), 1000.0, table, losses)
    at = 5 if backend == "triton" else 0
    rows = torch.full((at + 11, 11), torch.nan, dtype=torch.float64, device=DEVICE)
    flags = torch.zeros(2, 1, dtype=torch.uint8, device=DEVICE)
    slot = torch.full((1,), at, dtype=torch.int64, device=DEVICE)
    noise_scale = (
        0.0 if options["fixed"] else 1000 * math.sqrt((1 - batch / 1000) / batch) if batch and batch < 1000 else math.nan
    )
    if batch == 1500:
        noise_scale = 0.0
    one.decide(
        losses,
        None if isinstance(acceptance, AlwaysAccept) else there,
        None,
        scale=1000.0,
        noise_scale=noise_scale,
        gradients=table,
        fresh=fresh,
        rows=rows,
        slot=slot,
        flags=flags,
    )
    found = read_row(rows[at][:, None], flags)
    assert int(slot) == at + (backend == "triton")
    for name, mine, theirs in zip(Info._fields, found, info, strict=True):
        if case in ("frozen", "nan at theta") and not name.startswith(("is_acc", "acc", "loss")):
            continue  # what such a chain would do is not computed
        torch.testing.assert_close(
            mine.double(), theirs.double(), rtol=2e-5, atol=1e-7, equal_nan=True, msg=f"{name}: {mine}, {theirs}"
        )
    assert found.is_accepted.dtype == torch.bool
    for mine, theirs in zip(params, expected.params, strict=True):
        torch.testing.assert_close(mine, theirs[0], rtol=1e-5, atol=1e-6)
    if not bool(info.is_accepted):
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True)), "bit for bit"
    assert int(flag) == int(expected.frozen_at)
    assert int(one.clock) == 8, "the step that is next"
    if case != "bad gradient":  # there all sound gradients are taken in, and the chain stops
        for mine, theirs in ((m1, expected.memory.exp_avg), (m2, expected.memory.exp_avg_sq)):
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b[0], rtol=1e-5, atol=1e-6)
    assert all(bool(x.isfinite().all()) for x in (*m1, *m2))
    assert float(rates) == pytest.approx(0.25 + float(info.acceptance_rate), rel=1e-5)
    if options["fixed"]:
        torch.testing.assert_close(losses, expected.here.losses)
        wanted = fresh_grads if bool(info.is_accepted) else [g.clone() for g in tensors(1)]
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


def test_the_noise_is_philox_and_normal() -> None:
    """theta = 0, no step: what is proposed is the noise itself."""
    sizes = [10_001, 3, 50_000]
    params, zeros, m1, m2 = ([torch.zeros(n, device=DEVICE) for n in sizes] for _ in range(4))
    flag = torch.full((1,), -1, dtype=torch.int64, device=DEVICE)
    one = OnePass(
        params, m1, m2, [x.clone() for x in params], counts=[0] * 3, num_steps=0, frozen_at=flag,
        sum_rates=torch.zeros(1, dtype=torch.float64, device=DEVICE), fixed=False,
    )  # fmt: skip
    one.tell(Settings(0.0, [0.0] * 3, [(0.9, 0.9)] * 3, [1e-8] * 3, [1.0] * 3, [0.0] * 3))
    one.propose(torch.tensor([KEY], device=DEVICE), 1.0, one.point_at(zeros), torch.zeros(1, device=DEVICE))
    key, base = KEY % (1 << 64), 0
    for p, size in zip(params, sizes, strict=True):
        few = min(size, 600)
        torch.testing.assert_close(p[:few].double().cpu(), philox.normals(key, base, few), rtol=1e-5, atol=2e-6)
        base += -(-size // 4)
    values = torch.cat(params).double().cpu()
    assert stats.kstest(values.numpy(), "norm").pvalue > 1e-5
    for lag in (1, 2, 3, 4, 2048):
        correlation = float((values[lag:] * values[:-lag]).mean()) * math.sqrt(len(values) - lag)
        assert abs(correlation) < 4.5


@pytest.mark.parametrize("block", [1024, 4096])
def test_the_noise_does_not_depend_on_the_launch(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def proposed() -> list[torch.Tensor]:
        params, grads, m1 = (tensors(seed) for seed in range(3))
        flag = torch.full((1,), -1, dtype=torch.int64, device=DEVICE)
        one = OnePass(
            params, m1, [x.square() for x in m1], [x.clone() for x in params], counts=[3] * 4, num_steps=0, frozen_at=flag,
            sum_rates=torch.zeros(1, dtype=torch.float64, device=DEVICE), fixed=False,
        )  # fmt: skip
        one.tell(Settings(1.0, [0.1] * 4, [(0.9, 0.9)] * 4, [1e-8] * 4, [1.0] * 4, [0.0] * 4))
        one.propose(torch.tensor([KEY], device=DEVICE), 1.0, one.point_at(grads), torch.zeros(1, device=DEVICE))
        return params

    usual = proposed()
    monkeypatch.setattr(onepass, "_BLOCK", block)
    monkeypatch.setattr(onepass, "_SMALL", 0)
    for a, b in zip(usual, proposed(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# --- through the optimizer's door -------------------------------------------------------------------------------------------


@pytest.fixture(params=["triton", "c"])
def one_pass_everywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "triton":
        monkeypatch.setattr(AdamMCMC, "_one_pass_devices", ("cuda", "cpu"))
        return
    needs_c()
    original = AdamMCMC.__init__
    monkeypatch.setattr(AdamMCMC, "__init__", lambda self, *args, **options: original(self, *args, fused=True, **options))


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).to(DEVICE)
    return model, torch.randn(32, 5).to(DEVICE), torch.randint(3, (32,)).to(DEVICE)


def sampler_of(model: nn.Module, **options: object) -> AdamMCMC:
    generator = torch.Generator(DEVICE).manual_seed(2)
    settings: dict[str, object] = {"num_data": 32, "sigma": 0.02, "sigma_along": 1.0, "generator": generator} | options
    return AdamMCMC(model.parameters(), 3e-3, **settings)  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_pass_everywhere")
def test_without_noise_it_is_adam() -> None:
    model, x, y = problem()
    twin = copy.deepcopy(model)
    adam = torch.optim.Adam(twin.parameters(), 3e-3, (0.99, 0.99))
    sampler = sampler_of(model, sigma=0.0, sigma_along=0.0, acceptance=AlwaysAccept())
    for _ in range(10):
        sampler.step(lambda: F.cross_entropy(model(x), y))
        adam.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        adam.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert float(sampler.state[p]["step"]) == float(adam.state[q]["step"]) == 10
        torch.testing.assert_close(sampler.state[p]["exp_avg_sq"], adam.state[q]["exp_avg_sq"], rtol=1e-4, atol=1e-9)


@pytest.mark.usefixtures("one_pass_everywhere")
@pytest.mark.parametrize("prior", [None, Gaussian(0.8), UniformBox(-0.5, 0.5)], ids=str)
def test_fixed_data_are_the_same_chain(prior: Prior | None) -> None:
    """The gradient that was kept is the one that would be found again; a refused proposal leaves no trace."""
    paths = []
    for fixed in (False, True):
        model, x, y = problem()
        sampler = sampler_of(model, fixed_data=fixed, prior=prior)
        path = []
        for _ in range(25):
            before = [p.detach().clone() for p in model.parameters()]
            sampler.step(lambda: F.cross_entropy(model(x), y, reduction="none"))  # noqa: B023
            if not bool(sampler.info.is_accepted):
                assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            path.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        assert 0 < float(sampler.mean_acceptance_rate) < 1
        paths.append(torch.stack(path))
        for p, g in zip(model.parameters(), [None] * 4, strict=True):
            assert p.grad is g
    torch.testing.assert_close(paths[0], paths[1], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("one_pass_everywhere")
@pytest.mark.parametrize("fixed", [False, True])
def test_the_temperature_is_that_of_the_pure_kernel(fixed: bool) -> None:
    """theta . grad V by tensor, from the kernel, from dot products, and from autograd."""
    model, x, y = problem()
    sampler = sampler_of(model, fixed_data=fixed, prior=Gaussian(0.8))
    for _ in range(3):
        sampler.step(lambda: F.cross_entropy(model(x), y))
    at = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        outcome = sampler._transition(sampler._layout(), [lambda: F.cross_entropy(model(x), y)])
    assert outcome.products is not None
    if fixed:
        at = [p.detach().clone() for p in model.parameters()]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p, value in zip(twin.parameters(), at, strict=True):
            p.copy_(value)
    grads = torch.autograd.grad(F.cross_entropy(twin(x), y), list(twin.parameters()))
    wanted = [float((p * (g + p / 0.64 / 32)).sum()) for p, g in zip(at, grads, strict=True)]
    torch.testing.assert_close(outcome.products().cpu(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("one_pass_everywhere")
def test_an_error_in_the_closure_leaves_the_weights() -> None:
    model, x, y = problem()
    sampler = sampler_of(model)
    calls = itertools.count()

    def closure() -> torch.Tensor:
        if next(calls) == 5:  # at the proposal of the third step
            raise KeyboardInterrupt
        return F.cross_entropy(model(x), y)

    sampler.step(closure)
    sampler.step(closure)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        sampler.step(closure)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.usefixtures("one_pass_everywhere")
@pytest.mark.parametrize("fixed", [False, True])
def test_it_goes_on_bit_for_bit(fixed: bool) -> None:
    model, x, y = problem()
    sampler = sampler_of(model, fixed_data=fixed)

    def steps(count: int) -> list[torch.Tensor]:
        for _ in range(count):
            sampler.step(lambda: F.cross_entropy(model(x), y))
        return [p.detach().clone() for p in model.parameters()]

    steps(4)
    saved, weights = copy.deepcopy(sampler.state_dict()), copy.deepcopy(model.state_dict())
    first = steps(4)
    model.load_state_dict(weights)
    sampler = sampler_of(model, fixed_data=fixed)
    sampler.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(first, steps(4), strict=True))


@pytest.mark.usefixtures("one_pass_everywhere")
def test_what_the_kernels_do_not_know_runs_as_before() -> None:
    model, x, y = problem()
    sampler = sampler_of(model.double())
    if sampler.fused:
        with pytest.raises(ValueError, match="float32 and contiguous"):
            sampler.step(lambda: F.cross_entropy(model(x.double()), y))
        return
    sampler.step(lambda: F.cross_entropy(model(x.double()), y))
    assert sampler._one_pass(sampler._layout()) is None


def test_fused_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem()
    examples = TensorExamples(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y)
    sampler = sampler_of(model, fused=True, acceptance=FullData(), examples=examples)
    with pytest.raises(ValueError, match="must look at the batch"):
        sampler.step(lambda: F.cross_entropy(model(x), y))
    if DEVICE.type == "cpu":
        library.cache_clear()
        monkeypatch.setenv("CC", "no-such-compiler")
        with pytest.raises(CannotCompile, match="no-such-compiler"):
            sampler_of(model, fused=True).step(lambda: F.cross_entropy(model(x), y))
        library.cache_clear()


def test_the_compiled_library_is_no_file_that_others_could_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded from a folder that is gone by then: no home is needed, and no cache is trusted."""
    needs_c()
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    library.cache_clear()
    try:
        assert callable(library())
        assert not list(home.iterdir())
        assert not list(temporary.iterdir())
        monkeypatch.setenv("HOME", "/nonexistent")
        monkeypatch.delenv("XDG_CACHE_HOME")
        library.cache_clear()
        assert callable(library())
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
        library.cache_clear()
        with pytest.raises(CannotCompile, match="cannot be run, or its result cannot be loaded"):
            library()
    finally:
        library.cache_clear()


def test_the_threads_of_c_have_no_influence() -> None:
    needs_c()
    ends = []
    for threads in (1, 2):
        torch.manual_seed(0)
        p = [torch.randn(70_001), torch.randn(40_000)]
        m1, m2, old = ([torch.rand_like(x) for x in p] for _ in range(3))
        flag, rates = torch.full((1,), -1), torch.zeros(1, dtype=torch.float64)
        one = CompiledOnePass(p, m1, m2, old, counts=[2, 2], num_steps=0, frozen_at=flag, sum_rates=rates, fixed=False)
        one.tell(Settings(1.0, [0.1] * 2, [(0.9, 0.9)] * 2, [1e-8] * 2, [1.0, 2.0], [0.5, 0.0]))
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            one.propose(torch.tensor([KEY]), 10.0, one.point_at([x.clone() for x in p]), torch.zeros(1))
        finally:
            torch.set_num_threads(before)
        ends.append([*p, *m1, *m2, one._sums[:5].clone()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.usefixtures("one_pass_everywhere")
@pytest.mark.parametrize("fixed", [False, True])
def test_storage_that_is_exchanged_is_followed(fixed: bool) -> None:
    """`p.data = ...` gives a parameter another place: the kernels must write there."""
    model, x, y = problem()
    sampler = sampler_of(model, sigma=1e-3, fixed_data=fixed, acceptance=None)
    for _ in range(3):
        sampler.step(lambda: F.cross_entropy(model(x), y))
    moments = [sampler.state[p]["exp_avg"].clone() for p in model.parameters()]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).detach().clone(), model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    accepted = 0.0
    for _ in range(20):
        sampler.step(lambda: F.cross_entropy(model(x), y))
        accepted += float(sampler.info.is_accepted)
    assert accepted > 0
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not all(torch.equal(a, sampler.state[p]["exp_avg"]) for a, p in zip(moments, model.parameters(), strict=True))
    assert float(sampler.state[next(model.parameters())]["step"]) == 23
    assert sampler.health_sums()["num_steps"] == 23, "what is known of the chain stays"


class Shifted(Gaussian):
    """About 3, not about 0: a subclass may be anything."""

    def log_density(self, params):  # type: ignore[no-untyped-def]
        return -0.5 * torch.stack([(p.double() - 3).square().sum() for p in params]).sum()

    def grad(self, params):  # type: ignore[no-untyped-def]
        return [3 - p.detach() for p in params]


@pytest.mark.usefixtures("one_pass_everywhere")
def test_a_subclass_of_gaussian_is_asked_itself() -> None:
    model, x, y = problem()
    sampler = sampler_of(model, prior=Shifted(1.0))
    at = [p.detach().clone() for p in model.parameters()]
    loss = float(sampler.step(lambda: F.cross_entropy(model(x), y)))
    assert float(sampler.info.potential) == pytest.approx(32 * loss - float(Shifted(1.0).log_density(at)), rel=1e-5)


@pytest.mark.usefixtures("one_pass_everywhere")
def test_counts_go_on_through_steps_of_the_pure_kernel() -> None:
    model, x, y = problem()
    sampler = sampler_of(model)
    fused = sampler.fused
    for value in (fused, False, fused):
        sampler.fused = value
        for _ in range(3):
            sampler.step(lambda: F.cross_entropy(model(x), y))
    counts = sampler._one_pass(sampler._layout())._counts  # type: ignore[union-attr]
    assert [int(k) for k in counts] == [9] * 4


@pytest.mark.usefixtures("one_pass_everywhere")
def test_a_learning_rate_that_is_a_tensor_may_be_written_to() -> None:
    model, x, y = problem()
    sampler = sampler_of(model, acceptance=AlwaysAccept())
    sampler.param_groups[0]["lr"] = torch.tensor(3e-3)
    sampler.step(lambda: F.cross_entropy(model(x), y))
    assert float(sampler.info.step_to_noise) > 0
    sampler.param_groups[0]["lr"].fill_(0.0)
    sampler.step(lambda: F.cross_entropy(model(x), y))
    assert float(sampler.info.step_to_noise) == 0


@pytest.mark.usefixtures("one_pass_everywhere")
def test_fixed_data_cost_one_evaluation_a_step() -> None:
    model, x, y = problem()
    sampler = sampler_of(model, fixed_data=True)
    calls = itertools.count()

    def closure() -> torch.Tensor:
        next(calls)
        return F.cross_entropy(model(x), y)

    for _ in range(30):
        sampler.step(closure)
    assert 0 < float(sampler.mean_acceptance_rate) < 1
    assert next(calls) < 38, "30, and the checks that the data are fixed"


@pytest.mark.usefixtures("one_pass_everywhere")
def test_gradients_that_are_slices_are_taken() -> None:
    """Autograd of `torch.cat` returns parts of one tensor, whose places no vector unit likes."""
    a, b = nn.Parameter(torch.randn(3, device=DEVICE)), nn.Parameter(torch.randn(5000, device=DEVICE))
    sampler = AdamMCMC([a, b], num_data=10, sigma=0.0, acceptance=AlwaysAccept())
    twins = [nn.Parameter(p.detach().clone()) for p in (a, b)]
    adam = torch.optim.Adam(twins, 1e-3, (0.99, 0.99))
    for _ in range(3):
        sampler.step(lambda: torch.cat([a, b]).square().mean())
        adam.zero_grad()
        torch.cat(twins).square().mean().backward()
        adam.step()
    for p, q in zip((a, b), twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_the_released_noise_is_not_made_by_the_compiler_of_c() -> None:
    """fused=True on a CPU knows Algorithm 1's noise only: it must not be taken for the released code's."""
    if DEVICE.type != "cpu":
        pytest.skip("for the CPU")
    model, x, y = problem()
    sampler = AsReleased(model.parameters(), num_data=32, sigma=0.01, sigma_along=6.0, fused=True)
    with pytest.raises(ValueError, match="the released code's noise is made so on a GPU only"):
        sampler.step(lambda: F.cross_entropy(model(x), y))
