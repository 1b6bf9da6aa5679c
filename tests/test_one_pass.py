"""One pass over memory makes the moves of the pure kernel. On the CPU the kernels run under Triton's interpreter."""

from __future__ import annotations

import copy
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton")

from scipy import stats

from adammcmc import AdamMCMC, AsReleased, BurnIn, FullData, Prior, Sampler, TensorExamples, Underdamped, UniformBox
from adammcmc.acceptance import AlwaysAccept, Minibatch
from adammcmc.backends import triton_passes
from adammcmc.backends.one_pass import has_one_pass, one_pass
from adammcmc.backends.streams import Counters
from adammcmc.backends.triton_adam import OnePassAdam
from adammcmc.backends.triton_underdamped import OnePassUnderdamped
from adammcmc.kernels import adam_mcmc, as_released, hmc, mala, underdamped
from adammcmc.kernels.kernel import ChainState, Info
from adammcmc.samplers import sampler as shell
from adammcmc.samplers.running_sums import RunningSums
from adammcmc.target import Evaluation, Gaussian
from adammcmc.target.leaves import standard_normal
from adammcmc.target.potential import potential_difference
from tests import philox

# the interpreter computes on numpy, which warns of 0 / 0 in places that are masked
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHAINS = 3
SHAPES = [(1030,), (7, 3)]  # of sizes that no block divides


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samplers on the CPU use the one-pass kernels, as they do on a GPU."""
    monkeypatch.setattr(shell, "FUSED_DEVICES", {"cuda", "cpu"})


def on_chains(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)


def leaves(seed: int, chains: int = CHAINS) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(chains, *shape, generator=generator).to(DEVICE) for shape in SHAPES)


class Given:
    """A potential on a batch of losses, with a quadratic loss, a prior, and whatever goes wrong at a step."""

    inverse_temperature, is_bounded, num_examples, can_narrow, control = 1.0, False, None, False, None

    def __init__(
        self, prior: Gaussian | None = None, *, fixed: bool = False, batch: int | None = 40, folded: bool = False
    ) -> None:
        self.prior, self.fixed, self.batch, self.folded = prior, fixed, batch, folded
        self.scale = 300.0
        self.rise: float = 0.0
        """Added to every loss that is not at the start of the step."""
        self.at: list[torch.Tensor] = []
        self.bad: float | None = None

    def evaluate(self, params: tuple[torch.Tensor, ...], *, with_grad: bool) -> Evaluation:
        level = sum(x.double().square().flatten(1).sum(1) for x in params) / 4000
        # (a step whose point is overwritten in place is told by its values)
        is_start = not self.at or all(torch.equal(a, x) for a, x in zip(self.at, params, strict=True))
        self.at = self.at or [x.clone() for x in params]
        level = level + (0.0 if is_start else self.rise)
        spread = torch.linspace(-1, 1, self.batch or 1, device=DEVICE, dtype=torch.float64)
        losses = level[:, None] * (1 + 0.3 * spread * params[0].double().flatten(1).mean(1)[:, None])
        losses = losses.float() if self.batch else losses[:, 0].float()
        grad = tuple(x / 2000 for x in params)
        if self.bad is not None:
            grad[0][1, 4] = self.bad
        if self.prior is not None and not self.folded:
            precisions = self.precision()
            grad = tuple(g + q / self.scale * x for g, q, x in zip(grad, precisions, params, strict=True))
        return Evaluation(losses, self.log_prior(params), grad if with_grad else None)

    def precision(self) -> list[float]:
        assert self.prior is not None
        return list(self.prior.quadratic([torch.zeros(s) for s in SHAPES]))

    def log_prior(self, params: tuple[torch.Tensor, ...]) -> torch.Tensor:
        zero = torch.zeros(params[0].shape[0], dtype=torch.float64, device=DEVICE)
        if self.prior is None or self.folded:
            return zero
        sums = [q * x.double().square().flatten(1).sum(1) for x, q in zip(params, self.precision(), strict=True)]
        return -0.5 * sum(sums, zero)

    def compare(self, current: Evaluation, proposed: Evaluation) -> torch.Tensor:
        return potential_difference(self.scale, current, proposed)


def run(kernel, target: Given, steps: int, rises: dict[int, float], frozen: bool = False) -> tuple[ChainState, list[Info]]:
    """Steps from one start with counted noise; in step k the losses at the proposal rise by rises[k]."""
    generator, infos = Counters([3, 5, 8], DEVICE), []
    params = leaves(0)
    state = ChainState(params, kernel.first_memory(params), None, None, 0, torch.full((CHAINS,), -1, device=DEVICE))
    if frozen:
        state.frozen_at[2] = 4
    if kernel.backend is not None:
        place = tuple(x.clone() for x in params)
        backend = one_pass(kernel, place, tuple(torch.zeros_like(x) for x in params), state.memory)
        kernel = replace(kernel, backend=backend)
        target.folded = target.prior is not None
        backend.upload(kernel, target.scale, target.precision() if target.folded else None)
        state = state._replace(params=place)
    for i in range(steps):
        target.at, target.rise = [], rises.get(i, 0.0)
        target.at = [x.clone() for x in state.params]
        state, info = kernel.step(state, target, generator)
        infos.append(info)
    return state, infos


KERNELS = {
    "Adam": adam_mcmc(0.02, sigma=0.05, sigma_along=1.5),
    "Adam, one for each chain": adam_mcmc(
        on_chains(0.02, 0.1, 0.0), sigma=on_chains(0.05, 0.2, 0.1), sigma_along=on_chains(0.0, 1.0, 3.0)
    ),
    "Adam, one for each leaf": adam_mcmc(
        [0.002, 0.03], sigma=[0.05, on_chains(0.1, 0.2, 0.3)], sigma_along=3.0, betas=[(0.9, 0.99), (0.0, 0.5)]
    ),
    "no test": adam_mcmc(0.02, sigma=0.05, sigma_along=1.5, acceptance=AlwaysAccept()),
    "Adam itself": adam_mcmc(0.02, sigma=0.0, acceptance=AlwaysAccept()),
    "as released": as_released(0.02, sigma=0.05, sigma_along=1.5),
    "underdamped": underdamped(0.02),
    "underdamped, friction": underdamped([0.02, 0.03], 3.0),
    "underdamped, one for each chain": underdamped(on_chains(0.01, 0.02, 0.05), persistent_uniform=False),
    "underdamped, preconditioned": underdamped(
        0.02, preconditioner=tuple(torch.rand(s, generator=torch.Generator().manual_seed(1)).to(DEVICE) + 0.5 for s in SHAPES)
    ),
}
TARGETS = {
    "batch": {},
    "means": {"batch": None},
    "fixed": {"fixed": True},
    "prior": {"prior": Gaussian((0.5, 2.0))},
    "fixed, prior": {"fixed": True, "prior": Gaussian(0.7)},
}


class _Marker:
    """In the place of a backend: make one."""


@pytest.mark.parametrize("options", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_it_makes_the_moves_of_the_pure_kernel(name: str, options: dict) -> None:
    kernel = KERNELS[name]
    if not kernel.acceptance.needs_noise and options.get("fixed"):
        pytest.skip("without a test nothing is reused")
    rises = {1: 5.0, 3: math.nan}  # refused in the second step, and in the fourth
    slow, said = run(kernel, Given(**options), 6, rises)
    fast, says = run(replace(kernel, backend=_Marker()), Given(**options), 6, rises)
    for i, (a, b) in enumerate(zip(said, says, strict=True)):
        assert torch.equal(a.is_accepted, b.is_accepted), i
        for field in Info._fields:
            x, y = getattr(a, field).double(), getattr(b, field).double()
            torch.testing.assert_close(y, x, rtol=2e-4, atol=2e-4, equal_nan=True, msg=lambda m, f=field, i=i: f"{i} {f}: {m}")
    if kernel.acceptance.needs_noise:
        assert not said[1].is_accepted.any()
    for x, y in zip(slow.params, fast.params, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-5)
    memories = [
        [x for x in state.memory if not isinstance(x, tuple) or isinstance(x[0], torch.Tensor)] for state in (slow, fast)
    ]
    torch.testing.assert_close(memories[1], memories[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["Adam", "underdamped"])
def test_a_bad_gradient_freezes_its_chain_and_no_other(name: str, bad: float) -> None:
    target = Given()
    target.bad = bad
    state, infos = run(replace(KERNELS[name], backend=_Marker()), target, 2, {})
    assert state.frozen_at.tolist() == [-1, 0, -1]
    assert torch.equal(state.params[0][1], leaves(0)[0][1])
    assert not infos[0].is_accepted[1]
    assert all(torch.isfinite(x).all() for leaf in (*state.memory[0],) for x in leaf)


@pytest.mark.parametrize("name", ["Adam", "underdamped"])
def test_a_frozen_chain_stays_where_it_is(name: str) -> None:
    state, _ = run(replace(KERNELS[name], backend=_Marker()), Given(), 3, {}, frozen=True)
    assert torch.equal(state.params[0][2], leaves(0)[0][2])
    assert not torch.equal(state.params[0][0], leaves(0)[0][0])


def test_which_kernels_have_one() -> None:
    assert has_one_pass(adam_mcmc(0.1, sigma=0.1))
    assert has_one_pass(underdamped(0.1))
    assert not has_one_pass(mala(0.1))
    assert not has_one_pass(hmc(0.1))
    assert not has_one_pass(underdamped(0.1, acceptance=AlwaysAccept()))


# --- the noise --------------------------------------------------------------------------------------------------------------


def test_the_noise_is_philox_and_normal() -> None:
    """Counted noise: a function of the key, the draw, and the coordinate among all weights of a chain."""
    counters = Counters([7], DEVICE)
    key = int(counters._keys[0]) % (1 << 64)
    first = standard_normal(leaves(0, 1), counters)
    second = standard_normal(leaves(0, 1), counters)
    base = 0
    for leaf in first:
        expected = philox.normals(key, base, leaf.numel(), 1).float()
        torch.testing.assert_close(leaf.cpu().flatten(), expected, rtol=1e-5, atol=1e-5)
        base += -(-leaf.numel() // 4)
    assert not torch.equal(first[0], second[0])
    many = Counters([9], DEVICE).normal((1, 20_000), torch.float32, DEVICE).flatten().double().cpu()
    assert stats.kstest(many.numpy(), "norm").pvalue > 1e-5


@pytest.mark.parametrize("block", [256, 2048])
def test_the_noise_does_not_depend_on_the_launch(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, _ = run(replace(KERNELS["Adam"], backend=_Marker()), Given(), 1, {})
    for module in ("triton_passes", "triton_adam"):
        monkeypatch.setattr(f"adammcmc.backends.{module}.BLOCK", block)
    after, _ = run(replace(KERNELS["Adam"], backend=_Marker()), Given(), 1, {})
    assert torch.equal(before.params[0], after.params[0])


def test_a_chain_does_not_depend_on_its_company() -> None:
    kernel = replace(KERNELS["Adam"], backend=_Marker())
    whole, _ = run(kernel, Given(), 2, {})
    alone = tuple(x[1:2].clone() for x in leaves(0))
    memory = kernel.first_memory(alone)
    kernel = replace(kernel, backend=one_pass(kernel, alone, tuple(torch.zeros_like(x) for x in alone), memory))
    target, generator = Given(), Counters([5], DEVICE)
    kernel.backend.upload(kernel, target.scale, None)
    state = ChainState(alone, memory, None, None, 0, torch.full((1,), -1, device=DEVICE))
    for _ in range(2):
        state, _ = kernel.step(state, target, generator)
    torch.testing.assert_close(state.params[0][0], whole.params[0][1])


@pytest.mark.parametrize("chains", [1, 3])
def test_whole_blocks_make_the_same_moves(chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large leaves are passed over in two launches: whole blocks with aligned loads, then the rest."""

    def moved() -> tuple[list[torch.Tensor], list[bool]]:
        generator = torch.Generator().manual_seed(0)
        params = tuple(torch.randn(chains, size, generator=generator).to(DEVICE) for size in (2052, 1024, 7))
        kernel = KERNELS["Adam"]
        memory = kernel.first_memory(params)
        copy_ = tuple(torch.zeros_like(x) for x in params)
        kernel = replace(kernel, backend=one_pass(kernel, params, copy_, memory))
        kernel.backend.upload(kernel, 300.0, None)
        state = ChainState(params, memory, None, None, 0, torch.full((chains,), -1, device=DEVICE))
        for _ in range(2):
            state, _ = kernel.step(state, Given(), Counters(range(chains), DEVICE))
        launches = kernel.backend.places.launches
        return [x.clone() for x in state.params], [launch.is_full for launch in launches]

    masked, launches = moved()
    assert launches == [False]
    monkeypatch.setattr(triton_passes, "_SMALL", 0)
    whole, launches = moved()
    assert launches == [True, False]
    assert all(torch.equal(a, b) for a, b in zip(masked, whole, strict=True))


_COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from adammcmc.backends.triton_adam import _propose

constants = dict(HAS_PRIOR=True, ELEMENTWISE=False, UNIFORM=1, FULL=True, SIZE=1024)
types = dict(chunks="*i32", num_chunks="i32", num_sums="i32", first="i32", num_leaves="i32")
types |= dict.fromkeys(("coefficients", "numbers", "sums", "inverse_scales", "settings"), "*fp64")
names = _propose.arg_names
source = ASTSource(
    fn=_propose,
    signature={name: "constexpr" if name in constants else types.get(name, "*i64") for name in names},
    constexprs={(names.index(name),): value for name, value in constants.items()},
    attrs={},
)
print(compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"])
"""


def test_whole_blocks_are_read_and_written_16_bytes_at_a_time() -> None:
    """What is compiled for a GPU: theta, g, m1, m2 are read, and theta, its copy, m1, m2 written, four numbers at once."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", _COMPILED], env=environment, capture_output=True, text=True, check=False)
    if "ptxas" in done.stderr or "Cannot find" in done.stderr:
        pytest.skip("Triton has no compiler for CUDA here")
    assert done.returncode == 0, done.stderr
    reads, writes = (re.findall(rf"\b{kind}\.global\.v4\.b32", done.stdout) for kind in ("ld", "st"))
    assert len(reads) >= 4 * 2, "1024 numbers for 128 threads are two reads of four numbers each"
    assert len(writes) >= 4 * 2


@pytest.mark.usefixtures("fused")
def test_products_of_large_leaves_are_those_of_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    params, grad = leaves(0), leaves(1)
    kernel = underdamped(0.1)
    backend = one_pass(kernel, params, tuple(torch.zeros_like(x) for x in params), None)
    backend.upload(kernel, 10.0, [0.3, 0.7])
    small = backend.products(grad, at_copy=False)
    monkeypatch.setattr(triton_passes, "_LARGE", 1)
    torch.testing.assert_close(backend.products(grad, at_copy=False), small, rtol=1e-5, atol=1e-4)


# --- in a sampler -----------------------------------------------------------------------------------------------------------

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(3)).to(DEVICE)
Y = (X.sum(1) > 0).long()


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(DEVICE)


def losses(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(X), Y, reduction="none")


def adam(model: nn.Module, **options) -> AdamMCMC:
    generator = torch.Generator(DEVICE).manual_seed(5)
    return AdamMCMC(
        model.parameters(), **({"num_data": 60, "sigma": 0.02, "sigma_along": 2.0, "generator": generator} | options)
    )


def exact(model: nn.Module, **options) -> Underdamped:
    generator = torch.Generator(DEVICE).manual_seed(5)
    own = {"num_data": 60, "step_size": 0.05, "prior": Gaussian(1.0), "fixed_data": True, "generator": generator}
    return Underdamped(model.parameters(), **(own | options))


def backend_of(sampler: Sampler) -> object:
    return sampler.kernel().backend


@pytest.mark.usefixtures("fused")
def test_without_noise_it_is_adam() -> None:
    one, other = network(), network()
    sampler = adam(one, sigma=0.0, sigma_along=0.0, acceptance=AlwaysAccept(), betas=(0.9, 0.99))
    optimizer = torch.optim.Adam(other.parameters(), lr=1e-3, betas=(0.9, 0.99))
    assert isinstance(backend_of(sampler), OnePassAdam)
    for _ in range(5):
        sampler.step(lambda: losses(one))
        optimizer.zero_grad()
        losses(other).mean().backward()
        optimizer.step()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert float(sampler.state[next(one.parameters())]["step"]) == 5


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("prior", [None, Gaussian(0.5), UniformBox(-5.0, 5.0)], ids=str)
def test_fixed_data_are_the_same_chain(prior: Prior | None) -> None:
    """Reusing the loss and gradient of the last step changes nothing."""
    one, other = network(), network()
    first, second = adam(one, prior=prior, fixed_data=True), adam(other, prior=prior)
    for _ in range(12):
        first.step(lambda: losses(one))
        second.step(lambda: losses(other))
        assert bool(first.info.is_accepted) == bool(second.info.is_accepted)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("make", [adam, exact])
def test_the_temperature_is_theta_times_the_gradient(make, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the weights where the gradient was taken, the prior's part included."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(RunningSums, "add_products", lambda self, products: seen.append(products))
    model, other = network(), network()
    sampler = make(model, prior=Gaussian(0.5), fixed_data=fixed)
    sampler.step(lambda: losses(model))
    if fixed:
        other.load_state_dict(model.state_dict())
    params = list(other.parameters())
    value = 60 * losses(other).mean() + sum(p.square().sum() for p in params) / (2 * 0.5**2)
    grads = torch.autograd.grad(value, params)
    expected = torch.stack([(p.detach() * g).sum() for p, g in zip(params, grads, strict=True)]).double()
    torch.testing.assert_close(seen[0].reshape(-1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("make", [adam, exact])
def test_an_error_in_the_closure_leaves_the_weights(make) -> None:
    model = network()
    sampler = make(model, fixed_data=False)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("no more data")
        return losses(model)

    sampler.step(closure)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="no more data"):
        sampler.step(closure)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    sampler.step(closure)


@pytest.mark.usefixtures("fused")
def test_an_error_at_the_proposal_leaves_the_count_and_frozen_chains() -> None:
    model = network()
    sampler = adam(model)
    sampler.step(lambda: losses(model))
    before = copy.deepcopy(model.state_dict())
    for factor in (1.0, math.nan):  # a loss that is no number freezes the chain: its weights were not copied anywhere
        calls = 0

        def closure(factor: float = factor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise RuntimeError("no more data")
            return losses(model) * factor

        with pytest.raises(RuntimeError, match="no more data"):
            sampler.step(closure)
        backend = backend_of(sampler)
        assert isinstance(backend, OnePassAdam)
        assert backend._counts.tolist() == [1] * 4 == [int(state["step"]) for state in sampler.state.values()]
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("make", [adam, exact])
def test_it_continues_bit_for_bit(make, fixed: bool) -> None:
    model = network()
    sampler = make(model, fixed_data=fixed)
    for _ in range(3):
        sampler.step(lambda: losses(model))
    saved = copy.deepcopy((model.state_dict(), sampler.state_dict()))
    for _ in range(4):
        sampler.step(lambda: losses(model))
    again = network(1)
    other = make(again, fixed_data=fixed)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for _ in range(4):
        other.step(lambda: losses(again))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.usefixtures("fused")
@pytest.mark.filterwarnings("ignore:burn-in reached")
def test_it_takes_over_when_burn_in_ends() -> None:
    """Adaptation needs the gradient of the prior as well, and packs small parameters."""
    model = network()
    sampler = exact(model, step_size=None, burn_in=BurnIn(num_steps=12, window=4), num_chances=1)
    for _ in range(12):
        assert backend_of(sampler) is None
        sampler.step(lambda: losses(model))
    assert not sampler.is_adapting
    for _ in range(3):
        sampler.step(lambda: losses(model))
    assert isinstance(backend_of(sampler), OnePassUnderdamped)
    saved = copy.deepcopy((model.state_dict(), sampler.state_dict()))
    sampler.step(lambda: losses(model))
    again = network(1)
    other = exact(again, step_size=None, burn_in=BurnIn(num_steps=12, window=4), num_chances=1)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    other.step(lambda: losses(again))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.usefixtures("fused")
def test_fixed_data_cost_one_evaluation_a_step() -> None:
    model, calls = network(), 0
    sampler = adam(model, fixed_data=True)

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        return losses(model)

    for _ in range(3):
        sampler.step(closure)
    calls = 0
    for _ in range(4):
        sampler.step(closure)
    assert calls == 4


@pytest.mark.usefixtures("fused")
def test_a_test_that_evaluates_both_points_is_not_fused() -> None:
    model = network()
    examples = TensorExamples(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), X, Y)
    sampler = adam(model, acceptance=FullData(), examples=examples)
    assert not isinstance(backend_of(sampler), OnePassAdam)
    for _ in range(10):
        before = [p.detach().clone() for p in model.parameters()]
        sampler.step(lambda: losses(model))
        moved = not all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert moved == bool(sampler.info.is_accepted)


@pytest.mark.usefixtures("fused")
def test_what_cannot_be_fused_is_refused_or_runs_without() -> None:
    model = network().double()
    assert not isinstance(backend_of(adam(model)), OnePassAdam)
    with pytest.raises(ValueError, match="fused=True is not possible here: parameters must be float32"):
        adam(model, fused=True)
    assert not isinstance(backend_of(adam(network(), fused=False)), OnePassAdam)
    assert isinstance(backend_of(AsReleased(network().parameters(), num_data=60, sigma=0.1)), OnePassAdam)


def test_on_the_cpu_fused_is_refused() -> None:
    with pytest.raises(ValueError, match="fused=True is not possible here: the parameters are on cpu"):
        AdamMCMC(nn.Linear(2, 1).parameters(), num_data=10, sigma=0.1, fused=True)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("fixed", [False, True])
def test_storage_that_is_exchanged_is_followed(fixed: bool) -> None:
    model, other = network(), network()
    first, second = adam(model, fixed_data=fixed), adam(other, fixed_data=fixed)
    for i in range(6):
        if i == 3:
            for p in model.parameters():
                p.data = p.data.clone()
        first.step(lambda: losses(model))
        second.step(lambda: losses(other))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.usefixtures("fused")
def test_a_subclass_of_gaussian_is_asked_itself() -> None:
    class Wider(Gaussian):
        def log_density(self, params):
            return 4 * super().log_density(params)

    assert Wider(1.0).quadratic([torch.zeros(2)]) is None
    model = network()
    sampler = adam(model, prior=Wider(1.0))
    sampler.step(lambda: losses(model))
    expected = 60 * float(sampler.info.loss) - float(Wider(1.0).log_density([p.detach() for p in network().parameters()]))
    assert float(sampler.info.potential) == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("fused")
def test_counts_continue_through_steps_of_the_pure_kernel() -> None:
    model = network()
    sampler = adam(model)
    for fused in (None, False, None):
        sampler.fused = fused
        for _ in range(2):
            sampler.step(lambda: losses(model))
    assert {float(state["step"]) for state in sampler.state.values()} == {6.0}
    assert isinstance(backend_of(sampler), OnePassAdam)
    assert backend_of(sampler)._counts.tolist() == [6] * 4


@pytest.mark.usefixtures("fused")
def test_a_learning_rate_that_is_a_tensor_may_be_written_to() -> None:
    model = network()
    rate = torch.tensor(1e-3)
    sampler = adam(model, lr=rate, sigma=0.0, sigma_along=0.0, acceptance=AlwaysAccept())
    sampler.step(lambda: losses(model))
    for group in sampler.param_groups:
        group["lr"] = torch.as_tensor(group["lr"]).clone().fill_(0.0)
    before = [p.detach().clone() for p in model.parameters()]
    sampler.step(lambda: losses(model))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.usefixtures("fused")
def test_gradients_that_are_slices_are_taken() -> None:
    """Autograd may return parts of a larger tensor."""
    joined = nn.Parameter(torch.randn(6, device=DEVICE)), nn.Parameter(torch.randn(3, device=DEVICE))
    generator = torch.Generator(DEVICE).manual_seed(0)
    sampler = AdamMCMC(joined, num_data=10, sigma=0.1, acceptance=AlwaysAccept(), generator=generator)
    sampler.step(lambda: torch.cat(joined).square().mean())
    assert bool(sampler.info.is_accepted)


@pytest.mark.usefixtures("fused")
def test_losses_of_another_shape_are_refused() -> None:
    model, calls = network(), 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        return losses(model)[: 60 - calls]

    with pytest.raises(ValueError, match="Both must be of the same batch"):
        adam(model, acceptance=Minibatch()).step(closure)


def test_blocks_are_divided_among_programs() -> None:
    """Every block of every leaf is in exactly one launch."""
    places = triton_passes.Places(leaves(0), leaves(1))
    blocks = [tuple(pair) for launch in places.launches for pair in launch.chunks.tolist()]
    assert sorted(blocks) == [(0, 0), (0, 1), (1, 0)]
