"""The detector: what it sees of single particles is what its numbers say, in every one of many events."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from adammcmc.jets.detector import Detector, Flow, Particles

PION, MUON, PHOTON, KLONG, ELECTRON = 211, 13, 22, 130, 11
CHARGE = {PION: 1.0, MUON: -1.0, PHOTON: 0.0, KLONG: 0.0, ELECTRON: -1.0, 12: 0.0, 14: 0.0, -16: 0.0}
MASS = {PION: 0.1396, MUON: 0.1057, PHOTON: 0.0, KLONG: 0.4976, ELECTRON: 0.0005}


def events(
    pdg: int, number: int, *, pt: Any = 10.0, eta: Any = 0.3, phi: Any = 0.5, mass: float = 0.0, first: int = 0
) -> Particles:
    """The same particle in so many events, one in each."""
    full = [np.broadcast_to(np.asarray(value, np.float64), number).copy() for value in (CHARGE[pdg], pt, eta, phi, mass)]
    return Particles(first + np.arange(number), np.full(number, pdg), *full)


def together(*parts: Particles) -> Particles:
    return Particles(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def seen(particles: Particles, seed: int = 0, detector: Detector | None = None) -> Flow:
    return (detector or Detector())(particles, np.random.default_rng(seed))


def energies(flow: Flow, number: int) -> np.ndarray:
    """Of each event."""
    return np.bincount(flow.event, flow.pt * np.cosh(flow.eta), number)


def lognormal(mean: float, sigma: float, number: int, random: np.random.Generator) -> np.ndarray:
    square = math.log1p((sigma / mean) ** 2)
    return mean * np.exp(math.sqrt(square) * random.standard_normal(number) - 0.5 * square)


def hcal(energy: Any) -> Any:
    """Standard deviation of the central hadronic calorimeter."""
    return np.sqrt((0.0302 * energy) ** 2 + 0.5205**2 * energy + 1.59**2)


def close(values: np.ndarray, wanted: float, more: float = 0.0) -> bool:
    """Within 4.5 standard errors (`more`: that of what is wanted)."""
    return bool(abs(values.mean() - wanted) < 4.5 * math.hypot(values.std() / math.sqrt(len(values)), more))


NUMBER = 20_000


@pytest.mark.parametrize(("pdg", "sigma"), [(PHOTON, math.hypot(0.0017 * 50, 0.101 * math.sqrt(50))), (KLONG, float(hcal(50)))])
def test_a_neutral_particle_keeps_its_energy_on_average(pdg: int, sigma: float) -> None:
    # 50 GeV are far above every threshold, so that only the calorimeter's resolution is left
    pt = math.sqrt(50**2 - MASS[pdg] ** 2) / math.cosh(0.3)
    flow = seen(events(pdg, NUMBER, pt=pt, mass=MASS[pdg]))
    assert np.array_equal(flow.event, np.arange(NUMBER))
    energy = energies(flow, NUMBER)
    assert close(energy, 50.0)
    # of a standard deviation's square, from the fourth moment
    assert close((energy - 50.0) ** 2, sigma**2)


def test_a_charged_pion_keeps_the_energy_that_the_formulas_imply() -> None:
    flow = seen(events(PION, NUMBER, pt=50 / math.cosh(0.3)))
    energy = energies(flow, NUMBER)
    # the same by hand, for one tower with one pion, with other random numbers
    random, number = np.random.default_rng(1), 400_000
    share = math.hypot(0.06, 1.3e-3 * 50 / math.cosh(0.3))
    tower, track = (lognormal(50, sigma, number, random) for sigma in (float(hcal(50)), 50 * share))
    excess, variance, error = tower - track, (track * share) ** 2, hcal(tower)
    best = np.where(excess > 2 * np.sqrt(error**2 + variance), tower, track + excess * variance / (variance + error**2))
    wanted = np.where(random.random(number) < 0.95, best, tower)
    assert close(energy, float(wanted.mean()), float(wanted.std()) / math.sqrt(number))
    assert close((energy - 50) ** 2, float(((wanted - 50) ** 2).mean()), float(((wanted - 50) ** 2).std()) / math.sqrt(number))
    assert abs(energy.mean() - 50) < 1  # and that is the pion's
    assert energy.std() < 0.85 * hcal(50)  # better than the calorimeter alone: the track helps


@pytest.mark.parametrize(
    ("pdg", "pt", "eta", "efficiency"),
    [
        (PION, 0.05, 0.3, 0.0),
        (PION, 0.5, 0.3, 0.70),
        (PION, 5.0, 0.3, 0.95),
        (PION, 0.5, -2.0, 0.60),
        (PION, 5.0, 2.0, 0.85),
        (PION, 5.0, -3.0, 0.0),
        (ELECTRON, 0.5, 0.3, 0.73),
        (ELECTRON, 5.0, 2.0, 0.83),
        (ELECTRON, 200.0, 0.3, 0.99),
        (MUON, 0.5, 0.3, 0.75),
        (MUON, 5.0, -2.0, 0.98),
    ],
)
def test_tracks_are_found_as_often_as_the_table_says(pdg: int, pt: float, eta: float, efficiency: float) -> None:
    flow = seen(events(pdg, NUMBER, pt=pt, eta=eta))
    # a track has the particle's own direction to the last bit; a tower never has
    tracks = int(((flow.eta == eta) & (flow.phi == 0.5)).sum())
    error = math.sqrt(efficiency * (1 - efficiency) * NUMBER)
    assert abs(tracks - efficiency * NUMBER) <= 4.5 * error


def test_a_pion_without_track_is_seen_by_its_tower() -> None:
    flow = seen(events(PION, NUMBER, pt=20.0))
    is_track = flow.eta == 0.3
    assert set(flow.event) == set(range(NUMBER))
    assert 0 < (~is_track).sum() < 0.2 * NUMBER
    alone = ~np.isin(flow.event, flow.event[is_track])
    assert close((flow.pt * np.cosh(flow.eta))[alone], 20 * math.cosh(0.3))


def test_tracks_are_smeared_as_the_table_says() -> None:
    # muons have no tower that could help
    flow = seen(events(MUON, NUMBER, pt=40.0, eta=-1.0))
    sigma = 40 * math.hypot(0.015, 40 * 1.5e-4)
    assert close(flow.pt, 40.0)
    assert close((flow.pt - 40) ** 2, sigma**2)


@pytest.mark.parametrize("pdg", [12, 14, -16])
def test_neutrinos_are_not_seen(pdg: int) -> None:
    flow = seen(together(events(pdg, 200, pt=100.0), events(PHOTON, 1, pt=30.0)))
    assert flow.event.tolist() == [0]
    assert flow.pt[0] == pytest.approx(30, rel=0.15)


def test_muons_leave_a_track_and_no_tower() -> None:
    flow = seen(events(MUON, NUMBER, pt=50.0))
    assert (flow.eta == 0.3).all()
    assert len(np.unique(flow.event)) == len(flow.event) < NUMBER
    assert len(seen(events(MUON, 200, pt=50.0, eta=3.0)).event) == 0  # beyond the tracker there is nothing


def test_a_soft_charged_particle_curls_up_before_the_calorimeter() -> None:
    # 0.15 * 2 T * 1.15 m = 0.345 GeV; forward it carries much energy, that no tower may get (the endcap is far away here)
    for pt, reaches in ((0.34, False), (0.35, True)):
        flow = seen(events(PION, 500, pt=pt, eta=2.45), detector=Detector(half_length=100.0))
        towers = flow.eta != 2.45
        assert towers.any() == reaches, pt
    # a neutral one does not bend
    assert len(seen(events(PHOTON, 500, pt=0.34, eta=2.45)).event) > 0
    # without a field all get there
    assert (seen(events(PION, 500, pt=0.34, eta=2.45), detector=Detector(field=1e-9)).eta != 2.45).any()


def test_photons_of_one_tower_are_one_object() -> None:
    # a tower from 0.3 to 0.4 in eta, 20 to 30 degrees in phi
    near = [events(PHOTON, 300, pt=10.0, eta=eta, phi=math.radians(phi)) for eta, phi in ((0.32, 21.0), (0.38, 29.0))]
    flow = seen(together(*near))
    assert np.array_equal(flow.event, np.arange(300))
    assert close(flow.pt * np.cosh(flow.eta), 10 * (math.cosh(0.32) + math.cosh(0.38)))
    far = seen(together(near[0], events(PHOTON, 300, pt=10.0, eta=0.38, phi=math.radians(31.0))))
    assert np.array_equal(far.event, np.repeat(np.arange(300), 2))


def test_a_photon_and_a_hadron_are_two_objects() -> None:
    # of two layers of the same tower
    flow = seen(together(events(PHOTON, 300, pt=20.0), events(KLONG, 300, pt=20.0)))
    assert np.array_equal(flow.event, np.repeat(np.arange(300), 2))


def test_a_particle_is_seen_by_its_own_event_only() -> None:
    # the same tower in neighbouring events
    flow = seen(together(*(events(PHOTON, 1, pt=10.0 * (i + 1), first=i) for i in range(5))))
    assert flow.event.tolist() == [0, 1, 2, 3, 4]
    assert flow.pt == pytest.approx(10.0 * np.arange(1, 6), rel=0.2)


DETECTORS = {
    "default": Detector(),
    "wide towers": Detector(tower_eta=0.2, tower_phi=20.0),
    "narrow in phi": Detector(tower_phi=5.0),
    "narrow in eta": Detector(tower_eta=0.02),
}


@pytest.mark.parametrize("name", DETECTORS)
@pytest.mark.parametrize("first", [0, 100_000])
def test_towers_lie_where_the_particles_point_in_every_event(name: str, first: int) -> None:
    detector, random = DETECTORS[name], np.random.default_rng(5)
    # late events once had their towers at a wrong phi: all of them, with every direction
    eta, phi = random.uniform(-4.8, 4.8, 3000), random.uniform(-math.pi, math.pi, 3000)
    flow = seen(events(PHOTON, 3000, pt=50.0, eta=eta, phi=phi, first=first), detector=detector)
    assert np.array_equal(flow.event, first + np.arange(3000))
    assert np.abs(flow.eta - eta).max() <= detector.tower_eta + 1e-9
    assert np.abs(np.remainder(flow.phi - phi + math.pi, 2 * math.pi) - math.pi).max() <= np.deg2rad(detector.tower_phi) + 1e-9
    assert np.abs(flow.phi).max() <= math.pi + 1e-9


def test_several_towers_of_an_event_lie_where_the_particles_point() -> None:
    directions = [(-2.35, -3.05), (0.05, 0.1), (1.45, 2.2), (4.15, 3.1)]
    flow = seen(together(*(events(PHOTON, 500, pt=30.0, eta=eta, phi=phi) for eta, phi in directions)))
    assert np.array_equal(flow.event, np.repeat(np.arange(500), 4))
    order = np.lexsort((flow.eta, flow.event))
    wanted = np.tile(np.array(directions), (500, 1))
    assert np.abs(flow.eta[order] - wanted[:, 0]).max() <= 0.1
    assert np.abs(flow.phi[order] - wanted[:, 1]).max() <= np.deg2rad(10)


@pytest.mark.parametrize("charge", [1.0, -1.0])
def test_charged_particles_bend_before_their_tower(charge: float) -> None:
    # beyond the tracker only the tower sees them: half the angle of the helix, to the side of the charge
    pions = events(PION, 2000, pt=1.0, eta=2.8, phi=0.0)._replace(charge=np.full(2000, charge))
    flow = seen(pions, detector=Detector(half_length=100.0))
    turn = math.asin(0.345)
    assert len(flow.phi) > 1000
    assert np.abs(flow.phi + charge * turn).max() <= np.deg2rad(10)


def test_nothing_is_seen_beyond_the_calorimeter() -> None:
    assert len(seen(events(PHOTON, 50, pt=10.0, eta=4.95)).event) == 0


def test_the_seed_decides() -> None:
    random = np.random.default_rng(2)
    many = together(
        *(
            events(pdg, 300, pt=random.exponential(5, 300), eta=random.normal(0, 1.5, 300), phi=random.uniform(-3, 3, 300))
            for pdg in MASS
        )
    )
    a, b, c = seen(many, 1), seen(many, 1), seen(many, 2)
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not np.array_equal(a.pt, c.pt)
    assert (np.diff(a.event) >= 0).all()
    assert (a.pt > 0).all()


@pytest.mark.parametrize("pdg", [PHOTON, 12])
def test_no_particles_give_no_objects(pdg: int) -> None:
    flow = seen(events(pdg, 0 if pdg == PHOTON else 5))
    assert [len(column) for column in flow] == [0, 0, 0, 0]


def test_either_side_is_the_same_detector() -> None:
    """The resolution changes at |eta| = 1.7, at the edge of a tower: it is that of the tower's centre."""
    spreads = [energies(seen(events(KLONG, NUMBER, pt=20.0, eta=eta)), NUMBER).std() for eta in (1.65, -1.65)]
    assert spreads[0] == pytest.approx(spreads[1], rel=0.05)


@pytest.mark.parametrize(("eta", "reaches"), [(0.3, False), (2.2, True)])
def test_a_soft_pion_reaches_the_endcap_before_it_turns_back(eta: float, reaches: bool) -> None:
    """0.33 GeV curl with a diameter of 1.1 m: less than the barrel's radius, but the endcap is near for a forward one."""
    soft = events(PION, 1, pt=0.33, eta=eta)
    assert bool(Detector()._towers(soft)[1][0]) == reaches
