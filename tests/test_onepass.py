"""One pass over memory is the pure kernel, given the same noise. On the CPU the kernels run under Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from scipy import stats

from adammcmc import onepass, proposal
from adammcmc.acceptance import AlwaysAccept, Minibatch
from adammcmc.direction import Adam, AdamMemory
from adammcmc.kernel import ChainState, Info
from adammcmc.kernels import AdamMCMCKernel
from adammcmc.onepass import OnePass, Settings, read_row
from adammcmc.proposal import Prolate
from adammcmc.target import Evaluation, Gaussian, potential_difference
from tests import philox

# the interpreter computes on numpy, which warns of 0 / 0 in places that are masked
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(5,), (3, 7), (2050,), (64, 65)]
KEY = -0x1234_5678_9ABC_DEF0


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


def noise_of(key: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """z and eps as the oracle has them."""
    key %= 1 << 64
    base, noise = 0, []
    for shape in SHAPES:
        size = math.prod(shape)
        noise.append(philox.normals(key, base, size).view(1, *shape).float().to(DEVICE))
        base += -(-size // 4)
    return torch.tensor([philox.along_and_uniform(key)[0]], dtype=torch.float64, device=DEVICE), tuple(noise)


def pure_step(
    kernel: AdamMCMCKernel, state: ChainState, potential: Fixed, monkeypatch: pytest.MonkeyPatch
) -> tuple[ChainState, Info]:
    along, noise = noise_of(KEY)
    monkeypatch.setattr(proposal, "draw_along", lambda params, generator: along)
    monkeypatch.setattr(proposal, "standard_normal", lambda like, generator: noise)
    log_uniform = torch.tensor([philox.along_and_uniform(KEY % (1 << 64))[1]], dtype=torch.float64, device=DEVICE)
    monkeypatch.setattr("adammcmc.acceptance.metropolis._log_uniform", lambda comparison, generator: log_uniform)
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
}


@pytest.mark.parametrize("case", CASES)
def test_one_pass_equals_the_pure_kernel(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    kernel = AdamMCMCKernel(Adam(lr, list(betas), eps), Prolate(sigma, 1.5), acceptance)
    expected, info = pure_step(kernel, state, potential, monkeypatch)

    before = [p.clone() for p in params]
    flag, rates = frozen_at.clone(), torch.full((1,), 0.25, dtype=torch.float64, device=DEVICE)
    backup = [torch.full_like(p, torch.nan) for p in params]
    one = OnePass(
        params, m1, m2, backup, counts=counts, num_steps=7, frozen_at=flag, sum_rates=rates, fixed=bool(options["fixed"])
    )
    one.tell(Settings(1.5, lr, betas, eps, sigma, [0.0] * n if prior is None else list(prior.precision(params))))
    table, fresh = one.point_at(grads), one.point_at(fresh_grads)
    one.propose(torch.tensor([KEY], device=DEVICE), 1000.0, table)
    rows = torch.full((16, 11), torch.nan, dtype=torch.float64, device=DEVICE)
    flags = torch.zeros(2, 1, dtype=torch.uint8, device=DEVICE)
    slot = torch.full((1,), 5, dtype=torch.int64, device=DEVICE)
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
    found = read_row(rows[5][:, None], flags)
    assert int(slot) == 6
    for name, mine, theirs in zip(Info._fields, found, info, strict=True):
        if case == "frozen" and not name.startswith(("is_acc", "acc")):
            continue  # what a frozen chain would do is not computed
        torch.testing.assert_close(
            mine.double(), theirs.double(), rtol=2e-5, atol=1e-7, equal_nan=True, msg=f"{name}: {mine}, {theirs}"
        )
    assert found.is_accepted.dtype == torch.bool
    for mine, theirs in zip(params, expected.params, strict=True):
        torch.testing.assert_close(mine, theirs[0], rtol=1e-5, atol=1e-6)
    if not bool(info.is_accepted):
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True)), "bit for bit"
    assert int(flag) == int(expected.frozen_at)
    assert int(one.clock) == 8
    if case not in ("bad gradient", "nan at theta"):  # there all sound gradients are taken in, and the chain stops
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
    one.propose(torch.tensor([KEY], device=DEVICE), 1.0, one.point_at(zeros))
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
        one.propose(torch.tensor([KEY], device=DEVICE), 1.0, one.point_at(grads))
        return params

    usual = proposed()
    monkeypatch.setattr(onepass, "_BLOCK", block)
    monkeypatch.setattr(onepass, "_SMALL", 0)
    for a, b in zip(usual, proposed(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
