"""Making jets: in the window they are asked for, the same from the same seed however they are made, and gone on with."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adammcmc.jets import KINDS, Jets, bundled, read_jets, write_jets
from adammcmc.jets.detector import Detector
from adammcmc.jets.events import PROCESSES, Settings, Window
from adammcmc.jets.generate import generate

SETTINGS = Settings(shard_size=10)
WANTED = {"top": 20, "qcd": 20}
NAMES = ["qcd-00000.npz", "qcd-00001.npz", "top-00000.npz", "top-00001.npz"]


def make(folder: Path, wanted: dict[str, int] = WANTED, settings: Settings = SETTINGS, workers: int = 1) -> list[Path]:
    return generate(folder, wanted, settings, workers=workers, progress=False)


def marks(folder: Path) -> dict[str, str]:
    """A checksum of every shard, and of nothing that should not be there."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.name != "generator.json"
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty jets of top and of QCD in two shards each; nobody may change them."""
    folder = tmp_path_factory.mktemp("made") / "new" / "jets"
    make(folder)
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copied"))


# --- what is made -----------------------------------------------------------------------------------------------------


def test_files_and_their_order(made: Path, copied: Path) -> None:
    assert sorted(marks(made)) == NAMES
    # kinds side by side, so that a run that is cut short has some of each
    assert [path.name for path in make(copied)] == [NAMES[0], NAMES[2], NAMES[1], NAMES[3]]


def test_jets_are_in_the_window_and_of_their_kind(made: Path) -> None:
    for name in NAMES:
        jets = read_jets(made / name)
        assert len(jets) == 10
        assert {KINDS[k] for k in jets.kind.tolist()} == {name[:3]}
        pt, eta, _, mass, energy = jets.jet.unbind(1)
        assert ((pt > 550) & (pt < 650)).all()
        assert (eta.abs() < 2).all()
        assert (energy > pt).all()
        assert (mass > 0).all()
        assert ((jets.counts > 0) & (jets.counts <= 200)).all()
        assert (jets.particles[:, 1:3].norm(dim=1) < 1.6).all()
    assert 150 < float(read_jets([made / NAMES[2], made / NAMES[3]]).jet[:, 3].median()) < 200


def test_the_particles_are_the_jet(made: Path) -> None:
    jets = read_jets(made)
    energy, px, py, pz = jets.p4().sum(1).T
    pt, eta, phi, _, wanted = jets.jet.double().unbind(1)
    for found, true in ((energy, wanted), (px, pt * phi.cos()), (py, pt * phi.sin()), (pz, pt * eta.sinh())):
        assert ((found - true).abs() / wanted).max() < 1e-3


def test_shards_are_of_different_events(made: Path) -> None:
    pt = read_jets(made).jet[:, 0]
    assert len(pt.unique()) == 40


def test_only_the_hardest_particles_are_kept_and_the_jet_is_whole(tmp_path: Path, made: Path) -> None:
    make(tmp_path, {"top": 10}, Settings(shard_size=10, max_particles=12))
    few, all_of_them = read_jets(tmp_path), read_jets(made / "top-00000.npz")
    assert torch.equal(few.counts, all_of_them.counts.clamp_max(12))
    assert torch.equal(few.particles, all_of_them.leading(12).particles)
    assert torch.equal(few.jet, all_of_them.jet)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_made_with_the_mass_of_its_particle(tmp_path: Path, kind: str) -> None:
    number = 40 if PROCESSES[kind].heavy else 5
    jets = read_jets(make(tmp_path, {kind: number}, Settings(shard_size=number, seed=1)))
    assert len(jets) == number
    assert (jets.kind == KINDS.index(kind)).all()
    masses = {"top": 173.0, "w": 80.4, "z": 91.2, "h_bb": 125.0, "h_ww": 125.0}
    if kind in masses:
        assert float(jets.jet[:, 3].median()) == pytest.approx(masses[kind], abs=15)
        # most of them hold the particle: without the match it is hardly more than half
        assert ((jets.jet[:, 3] - masses[kind]).abs() < 20).float().mean() > 0.7


def test_flat_fills_the_upper_end_of_the_window(tmp_path: Path) -> None:
    medians = {}
    for flat in (False, True):
        settings = Settings(shard_size=60, window=Window(500, 1000), flat=flat)
        pt = read_jets(make(tmp_path / str(flat), {"qcd": 60}, settings)).jet[:, 0]
        assert pt.min() > 500
        assert pt.max() < 1000
        medians[flat] = float(pt.median())
    assert medians[False] < 620 < medians[True]


# --- the same jets ----------------------------------------------------------------------------------------------------


def test_the_seed_decides_the_bytes(made: Path, tmp_path: Path) -> None:
    make(tmp_path / "same", {"top": 10, "qcd": 10})
    same = marks(tmp_path / "same")
    assert same == {name: mark for name, mark in marks(made).items() if "00000" in name}
    make(tmp_path / "other", {"top": 10, "qcd": 10}, Settings(shard_size=10, seed=1))
    other = marks(tmp_path / "other")
    assert other.keys() == same.keys()
    assert not set(other.values()) & set(same.values())


def test_any_number_of_workers_makes_the_same_and_prints_nothing(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # workers are new processes, in each of which FastJet would greet
    make(tmp_path, workers=2)
    assert marks(tmp_path) == marks(made)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_the_banner_of_fastjet_is_not_printed_and_what_follows_is(tmp_path: Path) -> None:
    # a process of its own, since FastJet greets once
    greeting = "import fastjet; fastjet.ClusterSequence([fastjet.PseudoJet(1, 0, 0, 1)], fastjet.JetDefinition(0, 0.4))"
    script = (
        "from adammcmc.jets.events import Settings\n"
        "from adammcmc.jets.generate import generate\n"
        f"generate({str(tmp_path / 'a')!r}, {{'qcd': 1}}, Settings(shard_size=1), workers=1, progress=False)\n"
        "print('afterwards')\n"
    )
    said = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
        for code in (greeting, script)
    ]
    assert "FastJet" in said[0]
    assert said[1] == "afterwards\n"


# --- going on ---------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def shortened(path: Path) -> None:
    write_jets(path, read_jets(path)[:4])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


HARM: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "cut": cut,
    "of another size": shortened,
    "empty": emptied,
}


@pytest.mark.parametrize("harm", HARM)
def test_a_shard_that_is_missing_or_broken_is_made_again(made: Path, copied: Path, harm: str) -> None:
    HARM[harm](copied / NAMES[3])
    untouched = (copied / NAMES[0]).stat().st_mtime_ns
    make(copied)
    assert marks(copied) == marks(made)
    assert (copied / NAMES[0]).stat().st_mtime_ns == untouched


def test_what_a_writer_that_was_killed_left_does_no_harm(made: Path, copied: Path) -> None:
    (copied / NAMES[1]).rename(copied / f".{NAMES[1]}.17.npz")
    cut(copied / f".{NAMES[1]}.17.npz")
    make(copied)
    assert {name: mark for name, mark in marks(copied).items() if not name.startswith(".")} == marks(made)


def test_asking_for_more_keeps_what_is_there(made: Path, copied: Path) -> None:
    times = {name: (copied / name).stat().st_mtime_ns for name in NAMES}
    paths = make(copied, {"qcd": 25, "top": 20, "w": 3})
    assert len(paths) == 6
    assert {name: (copied / name).stat().st_mtime_ns for name in NAMES} == times
    assert [len(read_jets(copied / name)) for name in ("qcd-00002.npz", "w-00000.npz")] == [5, 3]
    # the shard that was not full is filled: its first jets are the same
    part = read_jets(copied / "qcd-00002.npz")
    make(copied, {"qcd": 28})
    full = read_jets(copied / "qcd-00002.npz")
    assert len(full) == 8
    assert torch.equal(full[:5].particles, part.particles)
    assert {name: mark for name, mark in marks(copied).items() if name in NAMES} == marks(made)


def test_asking_for_fewer_destroys_no_jets(made: Path, copied: Path) -> None:
    fewer = read_jets(make(copied, {"qcd": 15}))
    assert torch.equal(fewer.jet, read_jets([made / NAMES[0], made / NAMES[1]]).jet)


OTHER: dict[str, tuple[Settings, str]] = {
    "seed": (Settings(shard_size=10, seed=1), "holds jets with seed = 0, not 1"),
    "window": (Settings(shard_size=10, window=Window(550, 700)), "holds jets with window = .*650.*700"),
    "eta": (Settings(shard_size=10, window=Window(max_eta=1.0)), "holds jets with window"),
    "size": (Settings(shard_size=20), "holds jets with shard_size = 10, not 20"),
    "radius": (Settings(shard_size=10, radius=1.0), "holds jets with radius"),
    "flat": (Settings(shard_size=10, flat=True), "holds jets with flat"),
    "detector": (Settings(shard_size=10, detector=Detector(min_ecal=0.1)), "holds jets with detector"),
}


@pytest.mark.parametrize("what", OTHER)
def test_a_folder_made_with_other_settings_is_refused(made: Path, copied: Path, what: str) -> None:
    settings, message = OTHER[what]
    with pytest.raises(ValueError, match=message):
        make(copied, {"w": 1}, settings)
    assert marks(copied) == marks(made)
    make(copied)  # with the same settings it goes on


def test_a_folder_with_jets_of_others_is_refused(tmp_path: Path) -> None:
    write_jets(tmp_path / "qcd-00000.npz", read_jets(bundled("jets"), max_jets=10))
    with pytest.raises(ValueError, match=r"holds \.npz files and no generator\.json"):
        make(tmp_path, {"qcd": 10})
    assert [path.name for path in tmp_path.iterdir()] == ["qcd-00000.npz"]


def test_a_broken_manifest_is_named(copied: Path) -> None:
    (copied / "generator.json").write_text('{"what": "Pythia')
    with pytest.raises(ValueError, match=r"generator\.json"):
        make(copied)


# --- wrong arguments --------------------------------------------------------------------------------------------------

WANTED_WRONGLY: dict[str, tuple[dict[str, int], str]] = {
    "kind": ({"qcd": 1, "tau": 1}, "no kind of jet 'tau'. Known: qcd"),
    "no jets": ({"qcd": 0}, "number of qcd jets must be positive, got 0"),
    "fewer than none": ({"qcd": 1, "top": -1}, "number of top jets must be positive, got -1"),
}


@pytest.mark.parametrize("case", WANTED_WRONGLY)
def test_a_wrong_wish_is_told_before_anything_is_made(tmp_path: Path, case: str) -> None:
    wanted, message = WANTED_WRONGLY[case]
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "new", wanted)
    assert not (tmp_path / "new").exists()


SET_WRONGLY: dict[str, tuple[dict[str, Any], str]] = {
    "window upside down": ({"window": Window(650, 550)}, "20 <= low < high <= 3000 GeV, got 650 to 550"),
    "window of nothing": ({"window": Window(550, 550)}, "got 550 to 550"),
    "window too low": ({"window": Window(5, 550)}, "got 5 to 550"),
    "window too high": ({"window": Window(500, 5000)}, "got 500 to 5000"),
    "window without end": ({"window": Window(500, float("nan"))}, "got 500 to nan"),
    "window without eta": ({"window": Window(max_eta=0.0)}, "max_eta"),
    "shards of nothing": ({"shard_size": 0}, "`shard_size` must be positive, got 0"),
    "jets of nothing": ({"max_particles": 0}, "`max_particles` must be positive, got 0"),
    "jets without radius": ({"radius": 0.0}, "`radius` must be positive, got 0"),
}


@pytest.mark.parametrize("case", SET_WRONGLY)
def test_wrong_settings_are_told(case: str) -> None:
    settings, message = SET_WRONGLY[case]
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


@pytest.mark.slow  # it gives up after 20,000 events, half a minute
def test_a_window_with_hardly_any_jets_ends(tmp_path: Path) -> None:
    # no boson of this pT has its quarks within so small a jet
    settings = Settings(shard_size=10, window=Window(100, 110), radius=0.05)
    with pytest.raises(RuntimeError, match=r"events gave \d+ h_bb jets between 100 and 110 GeV"):
        make(tmp_path, {"h_bb": 10}, settings)
    assert not list(tmp_path.glob("*.npz"))


def test_the_random_numbers_of_others_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0), np.random.seed(0)  # noqa: NPY002
    wanted = torch.rand(2).tolist(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(0), np.random.seed(0)  # noqa: NPY002
    make(tmp_path, {"quark": 1}, Settings(shard_size=1))
    assert (torch.rand(2).tolist(), np.random.rand()) == wanted  # noqa: NPY002


def test_a_jet_is_what_anti_kt_makes_of_its_particles(made: Path) -> None:
    # clustered again, each jet's particles are one jet
    import fastjet

    jets: Jets = read_jets(made)
    for p4, count, whole in zip(jets.p4(), jets.counts.tolist(), jets.jet, strict=True):
        pseudo = [fastjet.PseudoJet(px, py, pz, e) for e, px, py, pz in p4[:count].tolist()]
        sequence = fastjet.ClusterSequence(pseudo, fastjet.JetDefinition(fastjet.antikt_algorithm, 0.8))
        hardest = max(sequence.inclusive_jets(), key=lambda jet: jet.pt())
        # the code's steps may push a soft particle over the edge
        assert hardest.pt() == pytest.approx(float(whole[0]), rel=5e-3)
