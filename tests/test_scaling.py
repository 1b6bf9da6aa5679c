"""Metrics of kernels with a velocity: linear maps with their transposes, exact under both kernels, and how they are learnt."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from adammcmc import kernels, sample_density
from adammcmc.kernels.scaling import Block, Dense, Kronecker, Scaling, restored, stored
from adammcmc.samplers.metric import MetricSums

DOUBLE = {"dtype": torch.float64}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rotation(n: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, **DOUBLE, generator=generator(seed)))[0]


def turned() -> Kronecker:
    """Of a leaf with a matrix (2, 3) and a bias (2,), and of a leaf that is a matrix (3, 2)."""
    roots = [0.5 + torch.rand(shape, **DOUBLE, generator=generator(i)) for i, shape in enumerate([(2, 3), (2,), (3, 2)])]
    return Kronecker(
        [
            [Block(roots[0], rotation(2, 1), rotation(3, 2)), Block(roots[1])],
            [Block(roots[2], None, rotation(2, 3))],
        ]
    )


SHAPES = [torch.Size((8,)), torch.Size((3, 2))]
METRICS: dict[str, Scaling] = {
    "turned": turned(),
    "dense": Dense(torch.randn(14, 14, **DOUBLE, generator=generator(4)), SHAPES),
}


def leaves(seed: int, chains: int = 5) -> tuple[Tensor, ...]:
    g = generator(seed)
    return tuple(torch.randn(chains, *shape, **DOUBLE, generator=g) for shape in SHAPES)


@pytest.mark.parametrize("name", METRICS)
def test_a_force_enters_by_the_transpose_of_the_map_of_a_move(name: str) -> None:
    """<S p, g> = <p, S' g>, and both are linear."""
    metric, p, g = METRICS[name], leaves(0), leaves(1)
    moved, pulled = metric.forward(p), metric.transposed(g)
    left = sum((a * b).flatten(1).sum(1) for a, b in zip(moved, g, strict=True))
    right = sum((a * b).flatten(1).sum(1) for a, b in zip(p, pulled, strict=True))
    torch.testing.assert_close(left, right)
    assert [x.shape for x in moved] == [x.shape for x in p]
    assert metric.fits(SHAPES)
    assert not metric.fits([torch.Size((9,)), torch.Size((3, 2))])


@pytest.mark.parametrize("name", METRICS)
def test_a_stored_metric_is_the_same_metric(name: str) -> None:
    again = restored(stored(METRICS[name]))
    assert isinstance(again, Scaling)
    for a, b in zip(again.forward(leaves(2)), METRICS[name].forward(leaves(2)), strict=True):
        assert torch.equal(a, b)
    assert (again.mean(), again.smallest()) == (METRICS[name].mean(), METRICS[name].smallest())
    assert restored(stored(None)) is None
    diagonal = (torch.ones(2), torch.ones(3))
    found = restored(stored(diagonal))
    assert isinstance(found, tuple)
    assert all(torch.equal(a, b) for a, b in zip(found, diagonal, strict=True))


def test_the_mean_of_a_turned_metric_is_that_of_its_matrix() -> None:
    metric = METRICS["turned"]
    eye = torch.eye(14, **DOUBLE)
    columns = metric.forward((eye[:, :8], eye[:, 8:].view(-1, 3, 2)))
    root = torch.cat([x.flatten(1) for x in columns], 1).T
    assert math.isclose(metric.mean(), float((root @ root.T).diagonal().mean()), rel_tol=1e-12)


@pytest.mark.parametrize("kernel", [kernels.underdamped, kernels.microcanonical], ids=lambda k: k.__name__)
@pytest.mark.parametrize("name", METRICS)
def test_exact_draws_stay_exact(name: str, kernel) -> None:  # type: ignore[no-untyped-def]
    """log of Gamma(2) variables in every weight: skewed, so that a missing transpose moves them."""
    metric = METRICS[name]
    scale = metric.mean() ** -0.5

    def log_density(tree: tuple[Tensor, ...]) -> Tensor:
        return sum((2 * x - x.exp()).flatten(1).sum(1) for x in tree)  # type: ignore[return-value]

    def draw(count: int, seed: int) -> tuple[Tensor, ...]:
        g = generator(seed)
        return tuple((-torch.rand(count, *shape, 2, **DOUBLE, generator=g).log().sum(-1)).log() for shape in SHAPES)

    made = kernel(0.35 * scale, preconditioner=metric)
    draws, info = sample_density(log_density, draw(8000, 5), made, num_steps=50, burn_in=49, seed=6)
    assert 0.3 < float(info.acceptance_rate.mean()) < 0.99
    fresh = draw(40_000, 7)
    for now, exact in zip(draws, fresh, strict=True):
        pairs = zip(now.flatten(1).T, exact.flatten(1).T, strict=True)
        assert min(float(stats.ks_2samp(a, b).pvalue) for a, b in pairs) > 1e-5


def test_a_metric_of_other_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="`preconditioner` was made for other parameters than these"):
        sample_density(
            lambda x: -x.square().sum(1),
            torch.zeros(3, 5),
            kernels.underdamped(0.1, preconditioner=METRICS["dense"]),
            num_steps=2,
        )


# --- learning ---------------------------------------------------------------------------------------------------------


def test_a_dense_metric_is_the_inverse_curvature_wherever_the_chains_are() -> None:
    """g = H x, with H of condition 1e6 on rotated axes, at points that have nothing to do with the target."""
    dim = 6
    axes, curvature = rotation(dim), torch.logspace(0, 6, dim, **DOUBLE)
    hessian = axes @ curvature.diag() @ axes.T
    centres = 100 * torch.randn(32, dim, **DOUBLE, generator=generator(1))
    steps = torch.randn(100, 32, dim, **DOUBLE, generator=generator(2))
    metric = None
    for _ in range(6):  # each window corrects what shrinkage has left
        sums = MetricSums("dense", None, [[torch.Size((dim,))]])
        for step in steps:
            x = centres + step
            sums.add((x @ hessian,), 1.0, (x,))
        metric = sums.learn(metric)
    assert isinstance(metric, Dense)
    whitened = metric.factor.T @ hessian @ metric.factor
    torch.testing.assert_close(torch.linalg.eigvalsh(whitened), torch.ones(dim, **DOUBLE), rtol=0.3, atol=0)


def test_a_turned_metric_finds_the_axes_of_a_layer() -> None:
    """Gradients with covariance (L diag(a) L') x (R diag(b) R'): in the learnt bases they are independent, of size one."""
    left, right = rotation(4, 1), rotation(3, 2)
    a, b = torch.logspace(0, 2, 4, **DOUBLE), torch.logspace(0, 1, 3, **DOUBLE)
    sums = MetricSums("kron", None, [[torch.Size((4, 3))]])
    noise = torch.randn(128, 40, 4, 3, **DOUBLE, generator=generator(3))
    for e in noise:
        sums.add((left @ (e * (a[:, None] * b).sqrt()) @ right.T,), 1.0, None)
    metric = sums.learn()
    assert isinstance(metric, Kronecker)
    fresh = torch.randn(20_000, 4, 3, **DOUBLE, generator=generator(4))
    (white,) = metric.transposed((left @ (fresh * (a[:, None] * b).sqrt()) @ right.T,))
    covariance = torch.cov(white.flatten(1).T)
    torch.testing.assert_close(covariance, torch.eye(12, **DOUBLE), rtol=0, atol=0.12)


def test_one_chain_in_a_bad_place_does_not_spoil_the_metric_of_all() -> None:
    sums = MetricSums("diagonal", (torch.ones(3, **DOUBLE),), [[torch.Size((3,))]])
    for _ in range(200):
        g = torch.randn(8, 3, **DOUBLE, generator=generator(int(torch.randint(1 << 30, (), generator=generator(sums.count)))))
        g[0] *= 1e6
        sums.add((g,), 1.0, None)
    metric = sums.learn()
    assert isinstance(metric, tuple)
    torch.testing.assert_close(metric[0], torch.full((3,), 0.5, **DOUBLE), rtol=0.2, atol=0)


def test_a_few_gradients_do_not_mislead() -> None:
    """Two of them: every entry is drawn towards the common size."""
    sums = MetricSums("diagonal", None, [[torch.Size((50,))]])
    for seed in (0, 1):
        sums.add((torch.randn(1, 50, **DOUBLE, generator=generator(seed)),), 1.0, None)
    metric = sums.learn()
    assert isinstance(metric, tuple)
    assert float(metric[0].max() / metric[0].min()) < 20  # of the squares themselves: over a thousand


def test_sums_continue_from_their_state() -> None:
    kinds = {kind: MetricSums(kind, None, [[torch.Size((2, 2))]]) for kind in ("diagonal", "dense", "kron")}  # type: ignore[arg-type]
    for sums in kinds.values():
        again = MetricSums(sums.kind, None, [[torch.Size((2, 2))]])
        for step in range(40):
            x = torch.randn(4, 2, 2, **DOUBLE, generator=generator(step))
            if step == 20:
                again.load_state_dict(sums.state_dict())
            sums.add((x,), 2.0, (x,))
            if step >= 20:
                again.add((x,), 2.0, (x,))
        one, other = stored(sums.learn()), stored(again.learn())
        assert str(one) == str(other)
