"""Pythia jets in the phase space of the Top Quark Tagging Reference Dataset.

Pythia 8 makes proton-proton events at 14 TeV without multi-parton interactions, `detector` makes energy flow of them, FastJet
clusters it: anti-kT, R = 0.8, the two leading jets of an event, 550 < pT < 650 GeV, |eta| < 2. A jet from a heavy particle must
hold it: the particle and all its quarks lie within 0.8 of the jet's axis.

A shard is a file of some thousand jets of one kind; its random numbers depend on its name and the seed alone, so that any
number of workers makes the same files, and a run that stopped goes on with the missing ones.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from adammcmc.data import derive_seed
from adammcmc.jets.data import KINDS, Jets, kind_number, wrapped
from adammcmc.jets.detector import Detector, Flow, Particles
from adammcmc.jets.files import JetFileError, read_jets, write_jets
from adammcmc.progress import show_bar

__all__ = ["Settings", "Window", "generate", "jets_of_events"]

PROCEDURE = 2
"""Rises when the same settings give other jets. 1 had no endcaps, and hadrons' resolution for the tracks of leptons."""

_HADRONIC_W = ("24:onMode = off", "24:onIfAny = 1 2 3 4 5")
_HIGGS = ("HiggsSM:gg2Hg(l:t) = on", "HiggsSM:qg2Hq(l:t) = on", "HiggsSM:qqbar2Hg(l:t) = on", "25:onMode = off")


class Process(NamedTuple):
    """What Pythia is told, and what a jet must hold: the particle, and into how many quarks it falls apart."""

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
    """Jets with a pT between these, in GeV, and |eta| below `max_eta`."""

    low: float = 550.0
    high: float = 650.0
    max_eta: float = 2.0


@dataclass(frozen=True)
class Settings:
    """Everything that decides the jets of a folder, but for how many there are.

    Args:
        seed: of all random numbers.
        window: of the jets' pT and eta.
        radius: of the jets.
        max_particles: the hardest are kept.
        shard_size: jets in a file.
        flat: make hard events more often, so that the spectrum of pT, which falls like pT^-6, is nearly flat in the window.
        detector: its numbers.
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


def generate(
    folder: str | Path,
    wanted: dict[str, int],
    settings: Settings | None = None,
    *,
    workers: int | None = None,
    progress: bool = True,
) -> list[Path]:
    """Make so many jets of each kind, in shards under `folder`. Goes on where an earlier call stopped; returns the files.

    Args:
        folder: one file `<kind>-<number>.npz` a shard, and `generator.json` with the settings.
        wanted: kind -> number of jets; kinds are those of `KINDS`.
        settings: the phase space, the detector, the seed; those of the reference set if None.
        workers: processes; None is one for each core.
        progress: whether to show a bar (in a terminal).
    """
    settings = settings or Settings()
    for kind, number in wanted.items():
        kind_number(kind)
        if number < 1:
            raise ValueError(f"the number of {kind} jets must be positive, got {number}.")
    _check_installed()
    folder = Path(folder)
    _claim(folder, settings)
    names = [(kind, i, size) for kind, number in wanted.items() for i, size in _shards(number, settings.shard_size)]
    names.sort(key=lambda name: (name[1], name[0]))  # kinds side by side: a run that is cut short has some of each
    paths = [folder / f"{kind}-{i:05d}.npz" for kind, i, _ in names]
    missing = [(path, *name) for path, name in zip(paths, names, strict=True) if not _is_made(path, name[2])]
    total, done = sum(size for *_, size in missing), 0
    with show_bar("generating", show=progress, unit="jets") as bar:
        bar.update(0, total)
        for size in _made(missing, settings, min(workers or _cores(), max(1, len(missing)))):
            done += size
            bar.update(done, total)
    return paths


def _shards(number: int, size: int) -> Iterator[tuple[int, int]]:
    for i in range(-(-number // size)):
        yield i, min(size, number - i * size)


def _made(jobs: list[tuple[Path, str, int, int]], settings: Settings, workers: int) -> Iterator[int]:
    """Make the shards, side by side; yields the size of each when its file is there."""
    if workers == 1 or len(jobs) == 1:
        for job in jobs:
            yield _make_shard(job, settings)
        return
    others = set(active_children())
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
    try:
        for done in as_completed([pool.submit(_make_shard, job, settings) for job in jobs]):
            yield done.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in set(active_children()) - others:
            worker.terminate()
        raise
    pool.shutdown()


def _start_worker() -> None:
    """An interrupt is for the first process, which ends the others; if it was killed and could not, they end themselves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _make_shard(job: tuple[Path, str, int, int], settings: Settings) -> int:
    path, kind, number, size = job
    seed = derive_seed(settings.seed, kind_number(kind), number)
    parts, have = [], 0
    events = _Events(kind, settings, seed)
    random = np.random.default_rng(seed)
    while have < size:
        jets = jets_of_events(events.batch(200), kind, settings, random)
        parts.append(jets)
        have += len(jets)
        if events.made >= 20_000 and have * 2_000 < events.made:
            raise RuntimeError(
                f"{events.made} events gave {have} {kind} jets between {settings.window.low:g} and {settings.window.high:g} "
                "GeV: there are hardly any in this window."
            )
    write_jets(path, Jets.cat(parts)[:size])
    return size


def _is_made(path: Path, size: int) -> bool:
    """Whether this shard is there, whole: it has the right number of jets (another number was asked for before?)."""
    try:
        return path.exists() and len(read_jets(path)) >= size  # a longer one begins with the same jets
    except JetFileError:
        return False  # a broken one is made again


def _claim(folder: Path, settings: Settings) -> None:
    """Write the settings into the folder, or see that those in it are the same."""
    made_by = {"pythia": version("pythia8mc"), "fastjet": version("fastjet"), "procedure": PROCEDURE}
    what = "Pythia jets in the phase space of the reference set"
    text = json.dumps({"what": what, "made_by": made_by, **asdict(settings)}, indent=1)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "generator.json"
    if manifest.exists():
        try:
            theirs, ours = json.loads(manifest.read_text()), json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"'{manifest}' is broken ({error}): choose a new folder, or remove it if the jets are yours."
            ) from error
        other = [key for key in ours if theirs.get(key) != ours[key]]
        if other:
            raise ValueError(
                f"'{folder}' holds jets made with another {other[0]}: {theirs.get(other[0])}, now {ours[other[0]]}. "
                "Choose a new folder, or the same settings to go on."
            )
        return
    if any(folder.glob("*.npz")):
        raise ValueError(f"'{folder}' holds .npz files and no generator.json: choose a new folder.")
    temporary = folder / f".generator.{os.getpid()}.json"
    temporary.write_text(text)
    os.replace(temporary, manifest)


def _check_installed() -> None:
    try:
        import awkward  # noqa: F401
        import fastjet  # noqa: F401
        import pythia8mc  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"making jets needs {error.name}. Run: pip install --only-binary :all: 'adammcmc[jets]'", name=error.name
        ) from error


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- events ---------------------------------------------------------------------------------------------------------------


class _Events:
    """Pythia, set up for one kind of jet."""

    def __init__(self, kind: str, settings: Settings, seed: int) -> None:
        import pythia8mc

        self._pythia = pythia8mc.Pythia("", False)
        low, high, _ = settings.window
        for line in (
            "Print:quiet = on",
            "Beams:eCM = 14000",
            "PartonLevel:MPI = off",
            # 400 to 800 GeV for the reference window; a tenth of its jets come from softer events, and are not made
            f"PhaseSpace:pTHatMin = {0.73 * low:g}",
            f"PhaseSpace:pTHatMax = {1.23 * high:g}",
            "Random:setSeed = on",
            f"Random:seed = {seed % 900_000_000 + 1}",
            *(("PhaseSpace:bias2Selection = on", "PhaseSpace:bias2SelectionPow = 5") if settings.flat else ()),
            *PROCESSES[kind].settings,
        ):
            if not self._pythia.readString(line):
                raise RuntimeError(f"Pythia does not know the setting '{line}'.")
        if not self._pythia.init():
            raise RuntimeError(f"Pythia could not start the process '{kind}' (is PYTHIA8DATA set to another version's data?)")
        self.made = 0
        self._charges: dict[int, float] = {}

    def batch(self, number: int) -> Record:
        """So many events, with a charge for every particle."""
        import awkward as ak

        events = self._pythia.nextBatch(number).prt
        self.made += number
        flat = ak.flatten(events)
        pdg = np.asarray(flat.id, np.int64)
        for code in np.unique(pdg).tolist():
            if code not in self._charges:
                self._charges[code] = float(self._pythia.particleData.charge(code))
        codes = np.array(sorted(self._charges))
        charges = np.array([self._charges[code] for code in codes.tolist()])
        return Record(
            counts=np.asarray(ak.num(events), np.int64),
            pdg=pdg,
            status=np.asarray(flat.status, np.int64),
            mother=np.asarray(flat.mother1, np.int64),
            charge=charges[np.searchsorted(codes, pdg)],
            p4=np.stack([np.asarray(flat.p[name], np.float64) for name in ("e", "px", "py", "pz")], 1),
        )


class Record(NamedTuple):
    """The particles of many events as Pythia lists them; `mother` counts within its event."""

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
        """Where the event of each particle begins."""
        return np.repeat(np.cumsum(self.counts) - self.counts, self.counts)


def jets_of_events(record: Record, kind: str, settings: Settings, random: np.random.Generator) -> Jets:
    """Detector, clustering, choice and match of a batch of events."""
    flow = settings.detector(_stable(record), random)
    event, jets, members = _clustered(flow, len(record.counts), settings)
    process = PROCESSES[kind]
    chosen = (jets[:, 0] > settings.window.low) & (jets[:, 0] < settings.window.high)
    chosen &= np.abs(jets[:, 1]) < settings.window.max_eta
    if process.heavy:
        chosen &= _holds_heavy(record, process, event, jets, settings.radius)
    counts = members.counts
    kept = np.repeat(chosen, counts)
    rows, jets, counts = members.rows[kept], jets[chosen], counts[chosen]
    owner = np.repeat(np.arange(len(jets)), counts)
    # within a jet the hardest particle first, and no more than fit
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


class _Members(NamedTuple):
    """The energy-flow objects of each jet, jet after jet."""

    counts: NDArray[np.int64]
    rows: NDArray[np.int64]


def _clustered(flow: Flow, num_events: int, settings: Settings) -> tuple[NDArray[np.int64], NDArray[np.float64], _Members]:
    """The two leading jets of each event: their event; pT, eta, phi, mass, E; what they are made of."""
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
    rows = within + np.repeat(starts[event], counts)
    return event, np.stack([pt, np.arcsinh(pz / np.maximum(pt, 1e-9)), np.arctan2(py, px), mass, e], 1), _Members(counts, rows)


@cache
def _silence_banner() -> None:
    """FastJet greets on standard output, once for each process; what it asks to cite is said by the command line instead."""
    import fastjet

    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        fastjet.ClusterSequence([fastjet.PseudoJet(1, 0, 0, 1)], fastjet.JetDefinition(fastjet.antikt_algorithm, 0.4))
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


_RESONANCES = (6, 23, 24, 25)


def _holds_heavy(
    record: Record, process: Process, event: NDArray[np.int64], jets: NDArray[np.float64], radius: float
) -> NDArray[np.bool_]:
    """Whether a jet has a heavy particle and all its quarks within `radius` of its axis."""
    pdg, mother = np.abs(record.pdg), record.mother + record.first
    quarks = np.flatnonzero((pdg <= 5) & np.isin(pdg[mother], _RESONANCES))
    # up the family tree to the heavy particle, at the moment it decays
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
        """(jets, particles): whether this jet is of the same event and that close."""
        dphi = np.remainder(phi[particles] - jets[:, 2:3] + np.pi, 2 * np.pi) - np.pi
        close = np.hypot(eta[particles] - jets[:, 1:2], dphi) < radius
        return np.asarray(close & (event_of[particles] == event[:, None]))

    quarks_inside = near(quarks).astype(np.int64) @ (place[:, None] == np.arange(len(heavies)))
    return np.asarray(((quarks_inside == process.quarks) & (number == process.quarks) & near(heavies)).any(1))
