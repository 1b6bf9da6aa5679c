"""Observables: known values on jets made by hand, and the same ones however the jet lies."""

from __future__ import annotations

import math

import pytest
import torch

from adammcmc.jets import Jets, bundled, jets_from_p4, read_jets
from adammcmc.jets.observables import OBSERVABLES, observables


def jet_of(*particles: tuple[float, float, float]) -> Jets:
    """One jet with these pT, delta eta and delta phi, the hardest first."""
    pt, deta, dphi = torch.tensor(sorted(particles, reverse=True)).T
    return Jets(
        torch.tensor([len(particles)]),
        torch.stack([pt, deta, dphi, pt * deta.cosh()], 1),
        torch.tensor([[float(pt.sum()), -0.7, 2.0, 80.0, 2 * float(pt.sum())]]),
        torch.tensor([1]),
    )


def prongs(number: int, spread: float = 0.0) -> Jets:
    """Ten particles around each of so many corners, 0.6 from the axis."""
    generator = torch.Generator().manual_seed(number)
    particles = []
    for k in range(number):
        angle = 2 * math.pi * k / number + 0.3
        for i in range(10):
            deta, dphi = (spread * torch.randn(2, generator=generator)).tolist()
            particles.append((30.0 - i, 0.6 * math.cos(angle) + deta, 0.6 * math.sin(angle) + dphi))
    return jet_of(*particles)


def values(jets: Jets) -> dict[str, float]:
    return {name: float(value[0]) for name, value in observables(jets).items()}


def test_all_twelve_are_there_one_a_jet() -> None:
    jets = read_jets(bundled("others"), max_jets=50)
    found = observables(jets)
    assert tuple(found) == OBSERVABLES
    assert len(OBSERVABLES) == 12
    assert all(value.shape == (50,) and value.isfinite().all() for value in found.values())


def test_known_values() -> None:
    found = values(jet_of((60.0, 0.0, 0.05), (30.0, 0.3, 0.4), (8.5, -0.05, 0.0), (1.5, 0.0, -1.0)))
    assert found.pop("tau21") >= 0
    assert found.pop("tau32") >= 0
    assert found == pytest.approx(
        {
            "particles": 4,
            "mass": 80.0,
            "pt": 100.0,
            "abs_eta": 0.7,
            "width": 0.6 * 0.05 + 0.3 * 0.5 + 0.085 * 0.05 + 0.015,
            "dispersion": math.sqrt(0.36 + 0.09 + 0.085**2 + 0.015**2),
            "leading_1": 0.6,
            "leading_5": 1.0,
            "soft": 0.015,
            "core": 0.685,
        },
        rel=1e-5,
    )


def test_five_leading_of_many() -> None:
    found = values(jet_of(*((float(pt), 0.1, 0.1) for pt in range(3, 11))))
    assert found["leading_5"] == pytest.approx((10 + 9 + 8 + 7 + 6) / 52)


def test_two_prongs_are_fitted_by_two_axes_and_three_by_three() -> None:
    one, two, three = (values(prongs(n, spread=0.01)) for n in (1, 2, 3))
    assert two["tau21"] < 0.05
    assert three["tau32"] < 0.05
    # and are not by one fewer
    assert three["tau21"] > 0.3
    assert two["tau32"] > 0.3
    assert one["tau21"] > 0.3


def test_the_axes_are_centres_and_tau_the_distance_to_them() -> None:
    # two pairs, each 0.1 apart: two axes lie in the middle of each, one in the middle of all
    found = values(jet_of((10.0, 0.45, 0.0), (10.0, 0.55, 0.0), (10.0, -0.45, 0.0), (10.0, -0.55, 0.0)))
    assert found["tau21"] == pytest.approx(0.05 / 0.5, rel=1e-4)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_few_particles_give_finite_numbers(number: int) -> None:
    found = values(jet_of(*((10.0 - i, 0.1 * i, -0.2 * i) for i in range(number))))
    assert all(math.isfinite(value) for value in found.values())
    assert found["particles"] == number
    if number == 1:
        assert (found["leading_1"], found["dispersion"], found["tau21"], found["tau32"]) == (1, 1, 0, 0)
    if number == 2:
        assert found["tau21"] == pytest.approx(0, abs=1e-3)


def test_nothing_depends_on_phi() -> None:
    jets = read_jets(bundled("others"), max_jets=40)
    turned = jets.p4()
    angle = 2.5
    px, py = turned[..., 1].clone(), turned[..., 2].clone()
    turned[..., 1], turned[..., 2] = px * math.cos(angle) - py * math.sin(angle), px * math.sin(angle) + py * math.cos(angle)
    a, b = (observables(jets_from_p4(p4, jets.kind)) for p4 in (jets.p4(), turned))
    for name in OBSERVABLES:
        assert torch.allclose(a[name], b[name], rtol=1e-2, atol=2e-3), name


def test_padding_and_company_do_not_matter() -> None:
    jets = read_jets(bundled("jets"), max_jets=30)
    together = observables(jets)
    for i in range(0, 30, 5):
        alone = observables(jets[i : i + 1])
        for name in OBSERVABLES:
            assert float(together[name][i]) == pytest.approx(float(alone[name][0]), rel=1e-3, abs=1e-3), name


def test_more_jets_than_one_part() -> None:
    jets = Jets.cat([prongs(2, 0.01)] * 4100)
    found = observables(jets)
    assert all(len(value) == 4100 for value in found.values())
    assert torch.allclose(found["tau21"], found["tau21"][:1].expand(4100), atol=1e-3)


def test_no_jets_have_no_observables() -> None:
    assert all(len(value) == 0 for value in observables(prongs(2)[:0]).values())


def test_tops_have_three_prongs_and_more_mass_than_qcd() -> None:
    jets = read_jets(bundled("jets"), max_jets=600)
    top, qcd = (observables(jets.of_kind(kind)) for kind in ("top", "qcd"))
    assert top["mass"].median() > qcd["mass"].median() + 30
    assert top["tau32"].median() < qcd["tau32"].median()
    assert top["particles"].median() > qcd["particles"].median()
