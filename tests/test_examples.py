"""The examples run, say what they sampled, and draw a picture; the flow is a density."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

_EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def two_moons() -> Iterator[ModuleType]:
    yield from _module("two_moons_flow")


@pytest.fixture(scope="module")
def irises() -> Iterator[ModuleType]:
    yield from _module("irises")


def _module(name: str) -> Iterator[ModuleType]:
    """The example as a module: examples/ is no package."""
    spec = importlib.util.spec_from_file_location(name, _EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture
def flow(two_moons: ModuleType) -> torch.nn.Module:
    """A flow that bends the plane, in double precision."""
    torch.manual_seed(3)
    flow = two_moons.Flow().double()
    for p in flow.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return flow


def test_the_two_moons_from_the_shell(two_moons: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, folder = tmp_path / "moons.png", tmp_path / "run"
    options = ["--output", str(picture), "--draws", "6", "--gap", "5", "--burn-in", "60", "--seed", "1", "--path", str(folder)]
    two_moons.main(options)
    first = capsys.readouterr().out
    for words in ("posterior: 6 draws of 1 chain", "n = 1000 | prior: N(0, s^2)", "| exact\n", "chain 0: cannot tell yet"):
        assert words in first
    for words in ("on a moon", "between the moons", "far away", "trained flow", "the truth is in the band"):
        assert words in first
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000
    two_moons.main(options)  # the draws are in the folder: the same numbers again
    assert capsys.readouterr().out == first


def test_the_flow_is_a_normalised_density(two_moons: ModuleType, flow: torch.nn.Module) -> None:
    ticks = torch.linspace(-9, 9, 601, dtype=torch.float64)
    step = float(ticks[1] - ticks[0])
    with torch.no_grad():
        densities = torch.cat([flow.log_prob(rows).exp() for rows in torch.cartesian_prod(ticks, ticks).chunk(20)])
    assert float(densities.sum()) * step**2 == pytest.approx(1, abs=1e-3)


def test_the_log_determinant_is_that_of_the_jacobian(two_moons: ModuleType, flow: torch.nn.Module) -> None:
    x = 1.5 * torch.randn(50, 2, dtype=torch.float64)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda point: flow.to_normal(point[None])[0][0]))(x)
    z, log_det = flow.to_normal(x)
    torch.testing.assert_close(log_det, torch.linalg.slogdet(jacobians).logabsdet)
    assert log_det.std() > 0.3  # or the flow bends nothing, and the test sees nothing
    normal = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(1)
    torch.testing.assert_close(flow(x), normal + log_det)


def test_without_bumps_the_flow_is_the_normal_distribution(two_moons: ModuleType) -> None:
    flow, x = two_moons.Flow(), torch.tensor([[0.0, 0.0], [1.0, -2.0]])
    for p in flow.parameters():
        torch.nn.init.zeros_(p)
    torch.testing.assert_close(flow.log_prob(x), torch.tensor([0.0, -2.5]) - math.log(2 * math.pi))


def test_the_true_density_is_normalised_and_that_of_the_data(two_moons: ModuleType) -> None:
    data = two_moons.moons()
    ticks = torch.linspace(-4, 4, 161, dtype=torch.float64)
    points = torch.cartesian_prod(ticks, ticks)
    density = data.density(points)
    assert float(density.sum()) * 0.05**2 == pytest.approx(1, abs=1e-3)
    # moments of the density against those of 1000 points, whose standard error is 1 / sqrt(1000) or less
    mean = (density[:, None] * points).sum(0) * 0.05**2
    torch.testing.assert_close(mean, torch.zeros(2, dtype=torch.float64), atol=0.1, rtol=0)
    new = data.more(20_000, seed=5)
    torch.testing.assert_close(mean, new.double().mean(0), atol=0.03, rtol=0)


@pytest.mark.parametrize(("low", "high", "share"), [(0.0, 1.0, 1.0), (0.5, 1.0, 0.5)])
def test_coverage_counts_the_places_in_the_band(two_moons: ModuleType, low: float, high: float, share: float) -> None:
    class Draws:
        """Predicts q for the quantile q, everywhere."""

        def quantile(self, q: float) -> torch.Tensor:
            return torch.full((4,), q)

    truth = torch.tensor([0.3, 0.4, 0.6, 0.7])
    assert two_moons.coverage(truth, Draws(), low, high) == share


def test_the_irises_from_the_shell(irises: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.png"
    outputs = []
    for seed in ("1", "1", "2"):
        irises.main(["--steps", "500", "--output", str(picture), "--seed", seed])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    for word in ("lambda = 1 (T = 1), n = 120", "| exact", "approximate: momentum", "health: ", "Predictions", "virginica"):
        assert word in outputs[0]
    assert picture.stat().st_size > 20_000
    assert picture.read_bytes().startswith(b"\x89PNG")
