"""A small detector in the style of the Delphes ATLAS card: tracks, towers, and energy flow.

1. Charged particles start at the centre and bend in a solenoid field; soft ones curl up and never reach the calorimeter.
2. A charged particle becomes a track with some efficiency; its pT is smeared.
3. Particles that reach the calorimeter deposit their energy in towers, 0.1 in eta and 10 degrees in phi, of an
   electromagnetic and a hadronic layer with the same segmentation. The energy of a tower is smeared.
4. Energy flow: all tracks, and a neutral particle for each tower whose energy exceeds that of its tracks by more than
   `min_significance` standard deviations and a minimum energy. In other towers the tracks take the weighted mean of the two
   measurements.

Everything is vectorized over events: flat arrays of particles, and the event of each particle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Detector", "Flow", "Particles"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Particles(NamedTuple):
    """Stable particles of many events."""

    event: Integers
    pdg: Integers
    charge: Floats
    pt: Floats
    eta: Floats
    phi: Floats
    mass: Floats


class Flow(NamedTuple):
    """Massless energy-flow objects of many events."""

    event: Integers
    pt: Floats
    eta: Floats
    phi: Floats


@dataclass(frozen=True)
class Detector:
    """The detector card; `generate` uses `Detector()`.

    Args:
        field: of the solenoid, Tesla.
        radius: of the calorimeter's barrel, metres.
        half_length: from the centre to the endcaps, metres.
        tower_eta: width of a tower.
        tower_phi: width of a tower, degrees.
        min_ecal: minimum energy of an electromagnetic excess, GeV.
        min_hcal: minimum energy of a hadronic excess, GeV.
        min_significance: of an excess, in standard deviations of the tower and its tracks.
    """

    field: float = 2.0
    radius: float = 1.15
    half_length: float = 3.51
    tower_eta: float = 0.1
    tower_phi: float = 10.0
    min_ecal: float = 0.5
    min_hcal: float = 1.0
    min_significance: float = 2.0

    def __post_init__(self) -> None:
        if not 0.01 <= self.tower_eta <= 1 or not 1 <= self.tower_phi <= 90 or (360 / self.tower_phi) % 1:
            raise ValueError(
                "towers must be 0.01 to 1 wide in eta and 1 to 90 degrees wide in phi, a divisor of 360, "
                f"got {self.tower_eta} and {self.tower_phi}."
            )

    @property
    def _phi_bins(self) -> int:
        return round(360 / self.tower_phi)

    @property
    def _towers_of_event(self) -> int:
        return (int(2 * _ETA_EDGE / self.tower_eta) + 1) * self._phi_bins

    def __call__(self, seen: Particles, random: np.random.Generator) -> Flow:
        """Energy flow of these events."""
        visible = (np.abs(seen.eta) < 4.9) & ~np.isin(np.abs(seen.pdg), _INVISIBLE)
        seen = Particles._make(column[visible] for column in seen)
        efficiency, sigma = _tracking(seen)
        is_track = (seen.charge != 0) & (random.random(len(seen.pt)) < efficiency)
        track_pt = np.where(is_track, _lognormal(seen.pt, seen.pt * sigma, random), 0.0)
        track_energy = track_pt * np.cosh(seen.eta)
        tower, reaches = self._towers(seen)
        per_event = self._towers_of_event
        flow_pt, neutral = track_pt.copy(), []
        energy = np.hypot(seen.pt * np.cosh(seen.eta), seen.mass)
        is_muon = np.abs(seen.pdg) == 13
        is_electromagnetic = np.isin(np.abs(seen.pdg), (11, 22))
        for stops_here, resolution, minimum in (
            (is_electromagnetic, _ecal_resolution, self.min_ecal),
            (~is_electromagnetic & ~is_muon, _hcal_resolution, self.min_hcal),
        ):
            hit = reaches & stops_here
            if not hit.any():
                continue
            numbers, place = np.unique(tower[hit], return_inverse=True)
            eta = (numbers % per_event // self._phi_bins) * self.tower_eta - _ETA_EDGE  # lower edges
            phi = (numbers % self._phi_bins) * np.deg2rad(self.tower_phi) - np.pi
            centre = np.asarray(eta + 0.5 * self.tower_eta, np.float64)
            deposit = _sums(place, energy[hit], len(numbers))
            measured = _lognormal(deposit, resolution(deposit, centre), random)
            error = resolution(measured, centre)
            tracked = _sums(place, track_energy[hit], len(numbers))
            track_variance = _sums(place, ((track_energy * sigma) ** 2)[hit], len(numbers))
            excess = measured - tracked
            is_excess = (excess > minimum) & (excess > self.min_significance * np.sqrt(error**2 + track_variance))
            # no excess: the best estimate of the track energy is the weighted mean of both measurements
            weight = track_variance / np.maximum(track_variance + error**2, 1e-12)
            best = np.where(is_excess | (tracked <= 0), 1.0, 1 + weight * (excess / np.where(tracked > 0, tracked, 1.0)))
            flow_pt[hit] *= best[place]
            where = np.flatnonzero(is_excess)
            # uniform positions within the tower
            tower_eta = eta[where] + self.tower_eta * random.random(len(where))
            tower_phi = phi[where] + np.deg2rad(self.tower_phi) * random.random(len(where))
            neutral.append((numbers[where] // per_event, excess[where] / np.cosh(tower_eta), tower_eta, tower_phi))
        kept = is_track & (flow_pt > 0)
        tracks = (seen.event[kept], flow_pt[kept], seen.eta[kept], seen.phi[kept])
        event, *rest = (np.concatenate(parts) for parts in zip(tracks, *neutral, strict=True))
        order = np.argsort(event, kind="stable")
        return Flow(event[order], *(column[order] for column in rest))

    def _towers(self, seen: Particles) -> tuple[Integers, NDArray[np.bool_]]:
        """The tower that each particle hits, and whether it reaches the calorimeter."""
        sinh = np.sinh(seen.eta)
        # after an arc 2 rho a (rho = pT / 0.3 q B) a helix is 2 rho sin(a) from the beam, turned by a, at z = 2 rho a sinh(eta)
        ratio = 0.15 * np.abs(seen.charge) * self.field * self.radius / np.maximum(seen.pt, 1e-9)  # radius / 2 rho
        to_barrel = np.where(ratio < 1, np.arcsin(np.minimum(ratio, 1.0)), np.inf)
        to_endcap = ratio * (self.half_length / self.radius) / np.maximum(np.abs(sinh), 1e-9)
        turn = np.minimum(to_barrel, to_endcap)
        reaches = turn <= np.pi / 2  # particles that would have to turn back curl up inside
        turn = np.where(reaches, turn, 0.0)
        eta = np.arcsinh(sinh / np.sinc(turn / np.pi))  # sinc: sin(a) / a
        reaches &= np.abs(eta) < _ETA_EDGE
        phi = np.remainder(seen.phi - np.sign(seen.charge) * turn + np.pi, 2 * np.pi)
        eta_bin = np.floor((np.clip(eta, -4.89, 4.89) + _ETA_EDGE) / self.tower_eta).astype(np.int64)
        phi_bin = np.minimum((phi / np.deg2rad(self.tower_phi)).astype(np.int64), self._phi_bins - 1)
        return seen.event * self._towers_of_event + eta_bin * self._phi_bins + phi_bin, reaches


_INVISIBLE = (12, 14, 16)
_ETA_EDGE = 4.9


def _sums(place: Integers, values: Floats, number: int) -> Floats:
    """Sum of the values at each index."""
    return np.bincount(place, values, number).astype(np.float64)


# rows: hadrons, electrons, muons
_EFFICIENCY = np.array(  # |eta| up to 1.5, to 2.5, and above; pT up to 0.1, to 1, to 100 GeV, and above
    [
        [[0.0, 0.70, 0.95, 0.95], [0.0, 0.60, 0.85, 0.85], [0.0, 0.0, 0.0, 0.0]],
        [[0.0, 0.73, 0.95, 0.99], [0.0, 0.50, 0.83, 0.90], [0.0, 0.0, 0.0, 0.0]],
        [[0.0, 0.75, 0.99, 0.99], [0.0, 0.70, 0.98, 0.98], [0.0, 0.0, 0.0, 0.0]],
    ]
)
# sigma(pT) / pT for |eta| up to 0.5, to 1.5, and above: a constant, and a term that grows with pT
_CONSTANT = np.array([[0.06, 0.10, 0.25], [0.03, 0.05, 0.15], [0.01, 0.015, 0.025]])
_SLOPE = np.array([[1.3e-3, 1.7e-3, 3.1e-3], [1.3e-3, 1.7e-3, 3.1e-3], [1.0e-4, 1.5e-4, 3.5e-4]])


def _tracking(seen: Particles) -> tuple[Floats, Floats]:
    """Track efficiency and relative resolution, by species, pT and eta."""
    eta, pdg = np.abs(seen.eta), np.abs(seen.pdg)
    species = np.select([pdg == 11, pdg == 13], [1, 2], 0)
    efficiency = _EFFICIENCY[species, np.searchsorted((1.5, 2.5), eta), np.searchsorted((0.1, 1.0, 100.0), seen.pt)]
    region = np.searchsorted((0.5, 1.5), eta)
    return efficiency, np.hypot(_CONSTANT[species, region], seen.pt * _SLOPE[species, region])


def _ecal_resolution(energy: Floats, eta: Floats) -> Floats:
    central = np.hypot(0.0017 * energy, 0.101 * np.sqrt(energy))
    forward = np.hypot(0.035 * energy, 0.285 * np.sqrt(energy))
    return np.where(np.abs(eta) <= 3.2, central, forward)


def _hcal_resolution(energy: Floats, eta: Floats) -> Floats:
    barrel = np.sqrt((0.0302 * energy) ** 2 + 0.5205**2 * energy + 1.59**2)
    endcap = np.hypot(0.05 * energy, 0.706 * np.sqrt(energy))
    forward = np.hypot(0.0942 * energy, 1.0 * np.sqrt(energy))
    return np.select([np.abs(eta) <= 1.7, np.abs(eta) <= 3.2], [barrel, endcap], forward)


def _lognormal(mean: Floats, sigma: Floats, random: np.random.Generator) -> Floats:
    """Positive random numbers with this mean and standard deviation."""
    positive = mean > 0
    square = np.log1p((sigma / np.where(positive, mean, 1.0)) ** 2)
    drawn: Any = np.where(positive, mean, 0.0) * np.exp(np.sqrt(square) * random.standard_normal(len(mean)) - 0.5 * square)
    return np.asarray(drawn, np.float64)
