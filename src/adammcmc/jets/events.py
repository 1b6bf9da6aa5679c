"""Events of one kind and their jets: Pythia, the detector, FastJet, and the selection of jets.

Proton-proton collisions at 14 TeV without multi-parton interactions; energy flow of `detector`; anti-kT, R = 0.8, the two
leading jets of an event, 550 < pT < 650 GeV, |eta| < 2. A jet of a heavy particle must contain it: the particle and all its
quarks lie within 0.8 of the jet axis. Everything is vectorized over events.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from adammcmc.jets.data import KINDS, Jets, wrapped
from adammcmc.jets.detector import Detector, Flow, Particles

__all__ = ["PROCEDURE", "PROCESSES", "Events", "Process", "Record", "Settings", "Window", "jets_of_events"]

PROCEDURE = 2
"""Increases when the same settings give different jets. 1 had no endcaps, and hadron resolution for lepton tracks."""

_HADRONIC_W = ("24:onMode = off", "24:onIfAny = 1 2 3 4 5")
_HIGGS = ("HiggsSM:gg2Hg(l:t) = on", "HiggsSM:qg2Hq(l:t) = on", "HiggsSM:qqbar2Hg(l:t) = on", "25:onMode = off")


class Process(NamedTuple):
    """Settings of Pythia, the heavy particle that a jet must contain, and the number of quarks that it decays into."""

    settings: tuple[str, ...]
    heavy: int = 0
    quarks: int = 0


PROCESSES = {
    "qcd": Process(("HardQCD:all = on",)),
    "top": Process(("Top:gg2ttbar = on", "Top:qqbar2ttbar = on", *_HADRONIC_W), 6, 3),
    "w": Process(("WeakBosonAndParton:qqbar2Wg = on", "WeakBosonAndParton:qg2Wq = on", *_HADRONIC_W), 24, 2),
    "z": Process(
        (
            "WeakBosonAndParton:qqbar2gmZg = on",
            "WeakBosonAndParton:qg2gmZq = on",
            "WeakZ0:gmZmode = 2",
            "23:onMode = off",
            "23:onIfAny = 1 2 3 4 5",
        ),
        23,
        2,
    ),
    "h_bb": Process((*_HIGGS, "25:onIfAny = 5"), 25, 2),
    "h_ww": Process((*_HIGGS, "25:onIfMatch = 24 -24", *_HADRONIC_W), 25, 4),
    "quark": Process(("HardQCD:gg2qqbar = on", "HardQCD:qqbar2qqbarNew = on", "HardQCD:qq2qq = on")),
    "gluon": Process(("HardQCD:gg2gg = on", "HardQCD:qqbar2gg = on")),
}


class Window(NamedTuple):
    """Range of the jets' pT, in GeV, and upper limit of |eta|."""

    low: float = 550.0
    high: float = 650.0
    max_eta: float = 2.0


@dataclass(frozen=True)
class Settings:
    """Everything that determines the jets of a folder, except their number.

    Args:
        seed: fixes all random numbers.
        window: range of the jets' pT and eta.
        radius: of the jets.
        max_particles: of a jet; the hardest are kept.
        shard_size: jets in a file.
        flat: oversample hard events, so that the pT spectrum, which falls like pT^-6, is nearly flat in the window.
        detector: the detector card.
    """

    seed: int = 0
    window: Window = field(default_factory=Window)
    radius: float = 0.8
    max_particles: int = 200
    shard_size: int = 2000
    flat: bool = False
    detector: Detector = field(default_factory=Detector)

    def __post_init__(self) -> None:
        low, high, max_eta = self.window
        if not 20 <= low < high <= 3000:
            raise ValueError(f"the window of pT must be 20 <= low < high <= 3000 GeV, got {low:g} to {high:g}.")
        for name, value in (("shard_size", self.shard_size), ("max_particles", self.max_particles), ("radius", self.radius)):
            if not value > 0:
                raise ValueError(f"`{name}` must be positive, got {value}.")
        if not 0 < max_eta <= 4:
            raise ValueError(f"`max_eta` must be between 0 and 4, got {max_eta}.")


class Events:
    """Pythia, configured for one kind of jets."""

    def __init__(self, kind: str, settings: Settings, seed: int) -> None:
        import pythia8mc

        self._pythia = pythia8mc.Pythia("", False)
        low, high, _ = settings.window
        for line in (
            "Print:quiet = on",
            "Beams:eCM = 14000",
            "PartonLevel:MPI = off",
            # 400 to 800 GeV for the reference window; a tenth of its jets come from softer events, and are missing
            f"PhaseSpace:pTHatMin = {0.73 * low:g}",
            f"PhaseSpace:pTHatMax = {1.23 * high:g}",
            "Random:setSeed = on",
            f"Random:seed = {seed % 900_000_000 + 1}",
            *(("PhaseSpace:bias2Selection = on", "PhaseSpace:bias2SelectionPow = 5") if settings.flat else ()),
            *PROCESSES[kind].settings,
        ):
            if not self._pythia.readString(line):
                raise RuntimeError(f"Pythia rejects the setting '{line}'.")
        if not self._pythia.init():
            raise RuntimeError(f"Pythia could not start the process '{kind}' (is PYTHIA8DATA of another version?)")
        self.made = 0

    def batch(self, number: int) -> Record:
        """Generate this many events, with a charge for every particle."""
        import awkward as ak

        events = self._pythia.nextBatch(number).prt
        self.made += number
        flat = ak.flatten(events)
        pdg = np.asarray(flat.id, np.int64)
        codes, place = np.unique(pdg, return_inverse=True)
        charges = np.array([float(self._pythia.particleData.charge(code)) for code in codes.tolist()])
        return Record(
            counts=np.asarray(ak.num(events), np.int64),
            pdg=pdg,
            status=np.asarray(flat.status, np.int64),
            mother=np.asarray(flat.mother1, np.int64),
            charge=charges[place],
            p4=np.stack([np.asarray(flat.p[name], np.float64) for name in ("e", "px", "py", "pz")], 1),
        )


class Record(NamedTuple):
    """The particles of many events in Pythia's order; `mother` is an index within the event."""

    counts: NDArray[np.int64]
    pdg: NDArray[np.int64]
    status: NDArray[np.int64]
    mother: NDArray[np.int64]
    charge: NDArray[np.float64]
    p4: NDArray[np.float64]

    @property
    def event(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def first(self) -> NDArray[np.int64]:
        """The first row of each particle's event."""
        return np.repeat(np.cumsum(self.counts) - self.counts, self.counts)


def jets_of_events(record: Record, kind: str, settings: Settings, random: np.random.Generator) -> Jets:
    """Simulate the detector, cluster, select and match a batch of events."""
    flow = settings.detector(_stable(record), random)
    event, jets, counts, members = _clustered(flow, len(record.counts), settings)
    process = PROCESSES[kind]
    chosen = (jets[:, 0] > settings.window.low) & (jets[:, 0] < settings.window.high)
    chosen &= np.abs(jets[:, 1]) < settings.window.max_eta
    if process.heavy:
        chosen &= _holds_heavy(record, process, event, jets, settings.radius)
    rows, jets, counts = members[np.repeat(chosen, counts)], jets[chosen], counts[chosen]
    owner = np.repeat(np.arange(len(jets)), counts)
    # within a jet, the hardest particles first, at most `max_particles`
    order = np.lexsort((-flow.pt[rows], owner))
    rank = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows, owner = rows[order][rank < settings.max_particles], owner[rank < settings.max_particles]
    energy = flow.pt[rows] * np.cosh(flow.eta[rows])
    columns = (flow.pt[rows], flow.eta[rows] - jets[owner, 1], flow.phi[rows] - jets[owner, 2], energy)
    particles = torch.from_numpy(np.stack(columns, 1))
    particles[:, 2] = wrapped(particles[:, 2])
    counts = np.minimum(counts, settings.max_particles)
    return Jets(
        torch.from_numpy(counts),
        particles.float(),
        torch.from_numpy(jets).float(),
        torch.full((len(jets),), KINDS.index(kind), dtype=torch.int64),
    )


def _stable(record: Record) -> Particles:
    final = record.status > 0
    energy, px, py, pz = record.p4[final].T
    pt = np.hypot(px, py)
    mass = np.sqrt(np.maximum(energy**2 - px**2 - py**2 - pz**2, 0))
    eta = np.arcsinh(pz / np.maximum(pt, 1e-12))
    return Particles(record.event[final], record.pdg[final], record.charge[final], pt, eta, np.arctan2(py, px), mass)


def _clustered(
    flow: Flow, num_events: int, settings: Settings
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The two leading jets of each event: event; pT, eta, phi, mass, E; number of constituents; the constituents of all."""
    import awkward as ak
    import fastjet

    _silence_banner()
    per_event = np.bincount(flow.event, minlength=num_events)
    px, py, pz = flow.pt * np.cos(flow.phi), flow.pt * np.sin(flow.phi), flow.pt * np.sinh(flow.eta)
    columns = {"px": px, "py": py, "pz": pz, "E": flow.pt * np.cosh(flow.eta)}
    objects = ak.unflatten(ak.zip(columns, with_name="Momentum4D"), per_event)
    sequence = fastjet.ClusterSequence(objects, fastjet.JetDefinition(fastjet.antikt_algorithm, settings.radius))
    least = 0.5 * settings.window.low
    found, inside = sequence.inclusive_jets(least), sequence.constituent_index(least)
    leading = ak.argsort(np.hypot(found.px, found.py), ascending=False)[:, :2]
    found, inside = found[leading], inside[leading]
    event = np.repeat(np.arange(num_events), np.asarray(ak.num(found)))
    px, py, pz, e = (np.asarray(ak.flatten(found[name]), np.float64) for name in ("px", "py", "pz", "E"))
    pt = np.hypot(px, py)
    mass = np.sqrt(np.maximum(e**2 - pt**2 - pz**2, 0))
    counts = np.asarray(ak.num(ak.flatten(inside, axis=1)), np.int64)
    within = np.asarray(ak.flatten(inside, axis=None), np.int64)
    starts = np.cumsum(per_event) - per_event
    jets = np.stack([pt, np.arcsinh(pz / np.maximum(pt, 1e-9)), np.arctan2(py, px), mass, e], 1)
    return event, jets, counts, within + np.repeat(starts[event], counts)


@cache
def _silence_banner() -> None:
    """FastJet prints a banner once per process; the command line prints the citation instead."""
    import fastjet

    sys.stdout.flush()
    kept, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        fastjet.ClusterSequence([fastjet.PseudoJet(1, 0, 0, 1)], fastjet.JetDefinition(fastjet.antikt_algorithm, 0.4))
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(null)


_RESONANCES = (6, 23, 24, 25)


def _holds_heavy(
    record: Record, process: Process, event: NDArray[np.int64], jets: NDArray[np.float64], radius: float
) -> NDArray[np.bool_]:
    """Whether a jet has the heavy particle and all its quarks within `radius` of its axis."""
    pdg, mother = np.abs(record.pdg), record.mother + record.first
    quarks = np.flatnonzero((pdg <= 5) & np.isin(pdg[mother], _RESONANCES))
    # climb the decay tree to the last copy of the heavy particle
    parent = mother[quarks]
    for _ in range(100):
        climbing = (pdg[parent] != process.heavy) & (parent != record.first[parent])
        if not climbing.any():
            break
        parent = np.where(climbing, mother[parent], parent)
    quarks, parent = quarks[pdg[parent] == process.heavy], parent[pdg[parent] == process.heavy]
    heavies, place, number = np.unique(parent, return_inverse=True, return_counts=True)
    pt = np.hypot(record.p4[:, 1], record.p4[:, 2])
    eta, phi = np.arcsinh(record.p4[:, 3] / np.maximum(pt, 1e-9)), np.arctan2(record.p4[:, 2], record.p4[:, 1])
    event_of = record.event

    def near(particles: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(jets, particles): whether both belong to the same event and are within `radius`."""
        dphi = np.remainder(phi[particles] - jets[:, 2:3] + np.pi, 2 * np.pi) - np.pi
        close = np.hypot(eta[particles] - jets[:, 1:2], dphi) < radius
        return np.asarray(close & (event_of[particles] == event[:, None]))

    quarks_inside = near(quarks).astype(np.int64) @ (place[:, None] == np.arange(len(heavies)))
    return np.asarray(((quarks_inside == process.quarks) & (number == process.quarks) & near(heavies)).any(1))
