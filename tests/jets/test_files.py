"""Files of jets: what is written is read, the field's formats too, and a broken file is named with what is wrong in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import uproot

from adammcmc.jets import KINDS, JetFileError, Jets, bundled, files, jets_from_p4, read_jets, stream_jets, write_jets

JETS = read_jets(bundled("jets"), max_jets=25)
OTHERS = read_jets(bundled("others"), max_jets=25)

JETCLASS = {"qcd": "QCD", "top": "Tbqq", "w": "Wqq", "z": "Zqq", "h_bb": "Hbb", "h_ww": "H4q"}
UNKNOWN = ("Hcc", "Hgg", "Hqql", "Tbl")


def equal(a: Jets, b: Jets) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("counts", "particles", "jet", "kind"))


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- the field's formats, as others write them ------------------------------------------------------------------------


def reference_frame(jets: Jets, width: int = 200) -> pd.DataFrame:
    """The layout of the Top Quark Tagging Reference Dataset."""
    momenta = jets.p4(width).numpy().astype(np.float32).reshape(len(jets), -1)
    names = [f"{name}_{i}" for i in range(width) for name in ("E", "PX", "PY", "PZ")]
    truth = np.full((len(jets), 4), 100.0, np.float32)
    labels = pd.DataFrame({"ttv": np.zeros(len(jets), np.int64), "is_signal_new": jets.kind.numpy()})
    parts = [pd.DataFrame(momenta, columns=names), pd.DataFrame(truth, columns=["truthE", "truthPX", "truthPY", "truthPZ"])]
    return pd.concat([*parts, labels], axis=1)


def write_reference(path: Path, frame: pd.DataFrame, key: str = "table", form: str = "table") -> Path:
    frame.to_hdf(path, key=key, format=form)
    return path


def jetclass_columns(jets: Jets, labels: list[str], integers: bool = False) -> dict[str, Any]:
    mask = ak.Array(jets.padded()[1].numpy())
    momenta = jets.p4().numpy().astype(np.float32)
    columns: dict[str, Any] = {}
    for i, name in enumerate(("energy", "px", "py", "pz")):
        columns[f"part_{name}"] = ak.drop_none(ak.mask(ak.Array(momenta[..., i]), mask))
    for label in (*JETCLASS.values(), *UNKNOWN):
        truth = np.array([chosen == label for chosen in labels])
        columns[f"label_{label}"] = truth.astype(np.int32) if integers else truth
    return columns


def write_jetclass(path: Path, columns: dict[str, Any], tree: str = "tree") -> Path:
    kinds = {name: "var * float32" if name.startswith("part_") else column.dtype for name, column in columns.items()}
    with uproot.recreate(path) as file:
        # a tree, as JetClass has it: assigning a dictionary would make one of ROOT's new n-tuples
        file.mktree(tree, kinds).extend(columns)
    return path


def write_energyflow(path: Path, jets: Jets, labels: np.ndarray) -> Path:
    """pT, y, phi between 0 and 2 pi, and the code of a particle; zero padded."""
    particles, mask = jets.padded()
    eta, phi = particles[..., 1] + jets.jet[:, 1:2], torch.remainder(particles[..., 2] + jets.jet[:, 2:3], 2 * torch.pi)
    columns = [particles[..., 0], eta, phi, torch.full_like(eta, 22.0)]
    np.savez(path, X=(torch.stack(columns, -1) * mask[..., None]).double().numpy(), y=labels)
    return path


def made(folder: Path, suffix: str, jets: Jets = JETS) -> Path:
    """A good file of each format."""
    path = folder / f"good{suffix}"
    if suffix in (".h5", ".hdf5"):
        return write_reference(path, reference_frame(jets))
    if suffix == ".root":
        return write_jetclass(path, jetclass_columns(jets, [JETCLASS[KINDS[k]] for k in jets.kind.tolist()]))
    if suffix == ".energyflow.npz":
        return write_energyflow(path, jets, jets.kind.numpy().astype(np.float64))
    write_jets(path, jets)
    return path


FORMATS = [".h5", ".hdf5", ".root", ".energyflow.npz", ".npz", ".parquet"]


# --- whole files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_what_is_written_is_read(tmp_path: Path, suffix: str) -> None:
    for jets in (JETS, OTHERS, JETS[:1]):
        write_jets(tmp_path / f"a{suffix}", jets)
        assert equal(read_jets(tmp_path / f"a{suffix}"), jets)
        assert equal(read_jets(str(tmp_path / f"a{suffix}")), jets)
    assert files_in(tmp_path) == [f"a{suffix}"]


def test_the_same_jets_are_the_same_bytes(tmp_path: Path) -> None:
    for name, jets in (("a", JETS), ("b", JETS[list(range(25))]), ("c", JETS[:-1])):
        write_jets(tmp_path / f"{name}.npz", jets)
    a, b, c = ((tmp_path / f"{name}.npz").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_our_code_can_be_read_without_this_library(tmp_path: Path) -> None:
    write_jets(tmp_path / "a.npz", JETS)
    with np.load(tmp_path / "a.npz") as file:
        assert file["n"].tolist() == JETS.counts.tolist()
        assert np.exp(file["log_pt"] / file["scale"][0]) == pytest.approx(JETS.particles[:, 0].numpy(), rel=1e-6)
    write_jets(tmp_path / "a.parquet", JETS)
    row = pq.read_table(tmp_path / "a.parquet").slice(3, 1).to_pylist()[0]
    assert len(row["dphi"]) == int(JETS.counts[3])
    assert row["jet"] == JETS.jet[3].tolist()
    assert KINDS[row["kind"]] == KINDS[int(JETS.kind[3])]


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_particles_that_went_in(tmp_path: Path, suffix: str) -> None:
    jets = read_jets(made(tmp_path, suffix))
    assert torch.equal(jets.counts, JETS.counts)
    # energyflow's labels are 1 for quarks and 0 for gluons, the others' 1 for top and 0 for QCD
    names = {1: "quark", 0: "gluon"} if "energyflow" in suffix else {1: "top", 0: "qcd"}
    assert [KINDS[k] for k in jets.kind.tolist()] == [names[k] for k in JETS.kind.tolist()]
    assert torch.allclose(jets.p4(), JETS.p4(), rtol=1e-4, atol=2e-3)
    assert torch.allclose(jets.particles, JETS.particles, rtol=1e-3, atol=1e-3)
    assert torch.allclose(jets.jet[:, :3], JETS.jet[:, :3], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("chunk", [1, 10, 25])
def test_chunks_put_together_are_the_file(tmp_path: Path, suffix: str, chunk: int) -> None:
    path = made(tmp_path, suffix)
    parts = list(stream_jets(path, chunk=chunk))
    if suffix != ".npz":  # ours is read a file at a time
        assert [len(part) for part in parts] == [chunk] * (25 // chunk) + [25 % chunk] * (25 % chunk > 0)
    whole = read_jets(path)
    both = Jets.cat(parts)
    assert torch.equal(both.counts, whole.counts)
    assert torch.equal(both.kind, whole.kind)
    # a sum over a wider rectangle of zeros may round otherwise
    assert torch.allclose(both.particles, whole.particles, rtol=1e-5, atol=1e-5)
    assert torch.allclose(both.jet, whole.jet, rtol=1e-5, atol=1e-2)


def test_the_jet_of_the_reference_set_is_the_sum_of_its_particles(tmp_path: Path) -> None:
    jets = read_jets(made(tmp_path, ".h5"))
    energy, px, py, _ = JETS.p4().sum(1).T
    assert jets.jet[:, 4].numpy() == pytest.approx(energy.numpy(), rel=1e-5)
    assert jets.jet[:, 0].numpy() == pytest.approx(torch.hypot(px, py).numpy(), rel=1e-5)


def test_narrower_tables_are_read_too(tmp_path: Path) -> None:
    jets = read_jets(write_reference(tmp_path / "a.h5", reference_frame(JETS, width=12)))
    assert torch.equal(jets.counts, JETS.counts.clamp_max(12))


@pytest.mark.parametrize("integers", [False, True])
def test_every_label_of_jetclass_has_its_kind(tmp_path: Path, integers: bool) -> None:
    labels = [*JETCLASS.values(), *UNKNOWN]
    path = write_jetclass(tmp_path / "a.root", jetclass_columns(JETS[: len(labels)], labels, integers))
    assert read_jets(path).kind.tolist() == [*(KINDS.index(kind) for kind in JETCLASS), -1, -1, -1, -1]


@pytest.mark.parametrize("kind", [np.float64, np.int64, np.float32])
def test_labels_of_energyflow_are_quark_and_gluon_in_any_type(tmp_path: Path, kind: type) -> None:
    path = write_energyflow(tmp_path / "a.npz", JETS[:3], np.array([1, 0, 1], kind))
    assert [KINDS[k] for k in read_jets(path).kind.tolist()] == ["quark", "gluon", "quark"]


def test_folders_and_lists_are_their_files_one_after_another(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_jets(tmp_path / "in" / "b.parquet", JETS[10:15])
    write_jets(tmp_path / "in" / "a.npz", JETS[:10])
    write_jets(tmp_path / "in" / "c.npz", JETS[15:20])
    write_jets(tmp_path / "d.npz", JETS[20:])
    (tmp_path / "in" / "generator.json").write_text("{}")  # nobody's jets
    (tmp_path / "in" / ".c.npz.17.npz").write_bytes(b"half")  # what a writer that was killed left
    assert equal(read_jets(tmp_path / "in"), JETS[:20])
    assert equal(read_jets([tmp_path / "in", str(tmp_path / "d.npz")]), JETS)
    assert equal(read_jets([tmp_path / "d.npz", tmp_path / "in"]), Jets.cat([JETS[20:], JETS[:20]]))
    assert [len(part) for part in stream_jets(tmp_path / "in", chunk=2)] == [10, 2, 2, 1, 5]


@pytest.mark.parametrize("max_jets", [1, 3, 4, 5, 7, 15])
def test_max_jets_takes_equally_many_of_each_file(tmp_path: Path, max_jets: int) -> None:
    for i in range(3):
        part = OTHERS[8 * i : 8 * i + 8]
        write_jets(tmp_path / f"{i}.npz", Jets(part.counts, part.particles, part.jet, torch.full((8,), i)))
    jets = read_jets(tmp_path, max_jets=max_jets)
    assert len(jets) == max_jets
    each = torch.bincount(jets.kind, minlength=3)
    assert each.max() - each.min() <= 1
    for i, number in enumerate(each.tolist()):
        assert torch.equal(jets.jet[jets.kind == i], OTHERS.jet[8 * i : 8 * i + number])


def test_max_jets_reads_no_more_than_it_needs(tmp_path: Path) -> None:
    frame = reference_frame(OTHERS.of_kind("qcd", "top")[:4])
    assert len(read_jets(write_reference(tmp_path / "a.h5", frame), max_jets=3)) == 3
    assert len(read_jets(tmp_path / "a.h5", max_jets=1000)) == len(frame)


@pytest.mark.parametrize("max_jets", [0, -3])
def test_no_jets_cannot_be_asked_for(max_jets: int) -> None:
    with pytest.raises(ValueError, match="`max_jets` must be positive"):
        read_jets(bundled("others"), max_jets=max_jets)


@pytest.mark.parametrize("chunk", [0, -3])
def test_chunks_of_nothing_cannot_be_asked_for(tmp_path: Path, chunk: int) -> None:
    with pytest.raises(ValueError, match="`chunk` must be positive"):
        list(stream_jets(made(tmp_path, ".h5"), chunk=chunk))


@pytest.mark.parametrize("name", ["jets", "others"])
def test_the_bundled_samples_are_there(name: str) -> None:
    jets = read_jets(bundled(name))
    counts = torch.bincount(jets.kind, minlength=len(KINDS))
    assert (counts > 0).sum() == (2 if name == "jets" else len(KINDS))
    assert counts.max() == counts[counts > 0].min()
    assert (jets.jet[:, 1].abs() < 2).all()


# --- what is wrong, said with the file's name -------------------------------------------------------------------------


def arrays(jets: Jets = JETS, **changes: Any) -> dict[str, Any]:
    """Our code with something else in it; None leaves a part out."""
    code = {**jets.encode(), **changes}
    return {name: array for name, array in code.items() if array is not None}


def our_npz(path: Path, **changes: Any) -> None:
    np.savez(path, **arrays(**changes))


def our_parquet(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    write_jets(path, JETS)
    pq.write_table(change(pq.read_table(path)), path)


def without_particles(jets: Jets, event: int) -> Jets:
    parts = [jets[:event], Jets(torch.zeros(1, dtype=torch.int64), torch.zeros(0, 4), jets.jet[:1], jets.kind[:1])]
    return Jets.cat([*parts, jets[event + 1 :]])


def with_number(jets: Jets, event: int, number: float, column: int) -> Jets:
    changed = jets[:]
    changed.particles[int(changed.offsets[event]) + 1, column] = number
    return changed


def energyflow(path: Path, event: int, values: Any) -> None:
    write_energyflow(path, JETS, JETS.kind.numpy())
    with np.load(path) as file:
        momenta, labels = file["X"], file["y"]
    momenta[event] = values
    np.savez(path, X=momenta, y=labels)


def jetclass(path: Path, *, drop: str = "", tree: str = "tree", number: int = 25) -> None:
    columns = jetclass_columns(JETS, [JETCLASS[KINDS[k]] for k in JETS.kind.tolist()])
    write_jetclass(path, {name: column[:number] for name, column in columns.items() if name != drop}, tree)


def jetclass_ragged(path: Path) -> None:
    """A particle of event 11 has no py."""
    columns = jetclass_columns(JETS, ["QCD"] * 25)
    lists = columns["part_py"].to_list()
    lists[11].pop()
    write_jetclass(path, {**columns, "part_py": ak.Array(lists)})


def jetclass_histogram(path: Path) -> None:
    with uproot.recreate(path) as file:
        file["tree"] = np.histogram(np.arange(10.0))


def reference(path: Path, drop: str = "", **where: str) -> None:
    frame = reference_frame(JETS)
    write_reference(path, frame.drop(columns=[drop] if drop else []), **where)


def reference_emptied(path: Path) -> None:
    reference(path)
    with pd.HDFStore(path, "a") as store:  # pandas writes no table without rows
        store.get_storer("table").table.remove_rows(0, 25)


def with_nan(frame: pd.DataFrame, event: int, column: str) -> pd.DataFrame:
    frame.loc[event, column] = np.nan
    return frame


def array_named_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.ones(3))


def many_bytes(path: Path) -> None:
    path.write_bytes(b"these are no jets " * 200)


BAD: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    # the reference data set
    "h5: an energy missing": ("a.h5", lambda p: reference(p, "E_3"), "no column 'E_3'"),
    "h5: the last energy missing": ("a.h5", lambda p: reference(p, "E_199"), "no column 'E_199'"),
    "h5: a momentum missing": ("a.h5", lambda p: reference(p, "PX_0"), "no column 'PX_0'"),
    "h5: the label missing": ("a.h5", lambda p: reference(p, "is_signal_new"), "no column 'is_signal_new'"),
    "h5: other columns": ("a.h5", lambda p: write_reference(p, pd.DataFrame({"a": [1.0]})), "no column 'E_0'.*begin: a"),
    "h5: another key": ("a.h5", lambda p: reference(p, key="jets"), "no table 'table'. It holds: /jets"),
    "h5: the fixed format": ("a.h5", lambda p: reference(p, form="fixed"), "not in pandas' table format"),
    "h5: a series": ("a.h5", lambda p: write_reference(p, pd.Series([1.0, 2.0])), "'.*a.h5'"),
    "h5: no rows": ("a.h5", reference_emptied, "holds no jets"),
    "h5: nothing": ("a.h5", lambda p: pd.HDFStore(p, "w").close(), "no table 'table'. It holds: nothing"),
    "h5: no particles": (
        "a.h5",
        lambda p: write_reference(p, reference_frame(without_particles(JETS, 13))),
        "event 13 has no particles",
    ),
    "h5: no number": (
        "a.h5",
        lambda p: write_reference(p, with_nan(reference_frame(JETS), 17, "PY_2")),
        "event 17 has a number",
    ),
    "h5: no energy": (
        "a.h5",
        lambda p: write_reference(p, with_nan(reference_frame(JETS), 17, "E_2")),
        "event 17 has a number",
    ),
    "h5: infinite": ("a.h5", lambda p: write_reference(p, reference_frame(with_number(JETS, 21, np.inf, 3))), "event 21 has"),
    "h5: no label": (
        "a.h5",
        lambda p: write_reference(p, with_nan(reference_frame(JETS).astype({"is_signal_new": float}), 17, "is_signal_new")),
        "a.h5'",
    ),
    "h5: other bytes": ("a.h5", many_bytes, "cannot be read"),
    # JetClass
    "root: a label missing": ("a.root", lambda p: jetclass(p, drop="label_QCD"), "no column 'label_QCD'"),
    "root: a momentum missing": ("a.root", lambda p: jetclass(p, drop="part_px"), "no column 'part_px'"),
    "root: another tree": ("a.root", lambda p: jetclass(p, tree="events"), "no tree 'tree'. It holds: events"),
    "root: no tree but a histogram": ("a.root", jetclass_histogram, "a.root'"),
    "root: fewer of one momentum": ("a.root", jetclass_ragged, "a.root'"),
    "root: no rows": ("a.root", lambda p: jetclass(p, number=0), "holds no jets"),
    "root: no particles": (
        "a.root",
        lambda p: write_jetclass(p, jetclass_columns(without_particles(JETS, 19), ["QCD"] * 25)),
        "event 19 has no particles",
    ),
    "root: no number": (
        "a.root",
        lambda p: write_jetclass(p, jetclass_columns(with_number(JETS, 12, np.nan, 0), ["QCD"] * 25)),
        "event 12 has a number",
    ),
    "root: other bytes": ("a.root", many_bytes, "cannot be read"),
    # energyflow
    "energyflow: no labels": ("a.npz", lambda p: np.savez(p, X=np.ones((3, 2, 4))), "no column 'y'"),
    "energyflow: a flat X": ("a.npz", lambda p: np.savez(p, X=np.ones((3, 4)), y=np.ones(3)), r"X must be.*\(3, 4\)"),
    "energyflow: too few columns": ("a.npz", lambda p: np.savez(p, X=np.ones((3, 2, 2)), y=np.ones(3)), r"\(3, 2, 2\)"),
    "energyflow: fewer labels": ("a.npz", lambda p: np.savez(p, X=np.ones((3, 2, 4)), y=np.ones(2)), r"\(3, 2, 4\), \(2,\)"),
    "energyflow: no rows": ("a.npz", lambda p: np.savez(p, X=np.ones((0, 2, 4)), y=np.ones(0)), "holds no jets"),
    "energyflow: no particles": ("a.npz", lambda p: energyflow(p, 14, 0.0), "event 14 has no particles"),
    "energyflow: no number": ("a.npz", lambda p: energyflow(p, 14, [np.nan, 1.0, 1.0, 1.0]), "event 14 has"),
    # ours
    "npz: no scale": ("a.npz", lambda p: our_npz(p, scale=None), "no column 'scale'"),
    "npz: no counts": ("a.npz", lambda p: our_npz(p, n=None), "no column 'n'"),
    "npz: fewer particles": ("a.npz", lambda p: our_npz(p, dphi=np.ones(7, np.int16)), "column 'dphi' has 7"),
    "npz: fewer jets": ("a.npz", lambda p: our_npz(p, kind=np.ones(7, np.int8)), "has 25 jets, column 'kind' has 7"),
    "npz: narrow jets": ("a.npz", lambda p: our_npz(p, jet=np.ones((25, 4), np.float32)), r"a.npz'.*\(25, 4\)"),
    "npz: another scale": ("a.npz", lambda p: our_npz(p, scale=np.ones(3)), "a.npz'.*"),
    "npz: an unknown kind": ("a.npz", lambda p: our_npz(p, kind=np.full(25, 99, np.int8)), "a.npz'.*kind"),
    "npz: no rows": ("a.npz", lambda p: write_jets(p, JETS[:0]), "holds no jets"),
    "npz: no particles": ("a.npz", lambda p: write_jets(p, without_particles(JETS, 6)), "event 6 has no particles"),
    "npz: no number": (
        "a.npz",
        lambda p: our_npz(p, jet=np.where(np.arange(25)[:, None] == 9, np.nan, JETS.jet.numpy())),
        "event 9 has",
    ),
    "npz: an array": ("a.npz", array_named_npz, "a.npz'"),
    "npz: objects": ("a.npz", lambda p: our_npz(p, kind=np.array([None] * 25)), "cannot be read"),
    "npz: other bytes": ("a.npz", many_bytes, "cannot be read"),
    "npz: no bytes": ("a.npz", lambda p: p.write_bytes(b""), "cannot be read"),
    "parquet: no metadata": ("a.parquet", lambda p: our_parquet(p, lambda t: t.replace_schema_metadata({})), "have no 'scale'"),
    "parquet: a column missing": ("a.parquet", lambda p: our_parquet(p, lambda t: t.drop_columns("deta")), "no column 'deta'"),
    "parquet: numbers for lists": (
        "a.parquet",
        lambda p: our_parquet(p, lambda t: t.set_column(0, "log_pt", pa.array(np.ones(25)))),
        "a.parquet'",
    ),
    "parquet: shorter lists": (
        "a.parquet",
        lambda p: our_parquet(p, lambda t: t.set_column(1, "deta", pa.array([[1]] * 25, pa.list_(pa.int16())))),
        r"column 'deta' has \d\d\.",
    ),
    "parquet: no rows": ("a.parquet", lambda p: write_jets(p, JETS[:0]), "holds no jets"),
    "parquet: no particles": ("a.parquet", lambda p: write_jets(p, without_particles(JETS, 23)), "event 23 has no particles"),
    "parquet: other bytes": ("a.parquet", many_bytes, "cannot be read"),
    # any
    "an unknown suffix": ("a.csv", many_bytes, "has none of the known formats: .h5"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, case: str) -> None:
    name, write, message = BAD[case]
    write(tmp_path / name)
    # in chunks of ten, so that an event's number must count those before its chunk
    with pytest.raises(JetFileError, match=message) as caught:
        list(stream_jets(tmp_path / name, chunk=10))
    assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(JetFileError, match=message):
        read_jets([tmp_path / name])


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.9, 0.99])
def test_a_truncated_file_of_any_format_is_named(tmp_path: Path, suffix: str, share: float) -> None:
    path = made(tmp_path, suffix)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(JetFileError, match=f"(?s){path.name}' cannot be read.*Is it complete"):
        read_jets(path)


@pytest.mark.parametrize("suffix", [".npz", ".energyflow.npz"])
def test_a_byte_that_changed_is_noticed(tmp_path: Path, suffix: str) -> None:
    path = made(tmp_path, suffix)
    whole = bytearray(path.read_bytes())
    for place in (len(whole) // 3, len(whole) // 2):
        whole[place] ^= 0xFF
    path.write_bytes(bytes(whole))
    with pytest.raises(JetFileError, match=path.name):
        read_jets(path)


def test_an_archive_packed_in_an_unknown_way_is_named(tmp_path: Path) -> None:
    path = made(tmp_path, ".npz")
    whole = bytearray(path.read_bytes())
    whole[whole.find(b"PK\x01\x02") + 10] = 77  # the method of compression in the archive's directory
    path.write_bytes(bytes(whole))
    with pytest.raises(JetFileError, match=path.name):
        read_jets(path)


def test_missing_files_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file '.*nowhere\.npz'"):
        read_jets(tmp_path / "nowhere.npz")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("none")
    with pytest.raises(FileNotFoundError, match=r"folder '.*empty' holds no jet files \(\.h5"):
        read_jets(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="no jet file was given"):
        read_jets([])
    write_jets(tmp_path / "a.npz", JETS)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.h5"):
        list(stream_jets([tmp_path / "a.npz", tmp_path / "nowhere.h5"]))


def test_the_event_of_the_second_file_counts_from_its_own_first(tmp_path: Path) -> None:
    write_jets(tmp_path / "a.npz", JETS)
    write_jets(tmp_path / "b.npz", without_particles(JETS, 6))
    with pytest.raises(JetFileError, match=r"b\.npz': event 6 has no particles"):
        read_jets(tmp_path)


def test_one_jet_of_many_particles_does_not_take_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of jets of uneven length a rectangle is made on the way, as wide as the longest."""
    for suffix in (".root", ".energyflow.npz"):
        path = made(tmp_path, suffix)
        widest = int(JETS.counts.max())
        monkeypatch.setattr("adammcmc.posterior.store.archives.free_memory", lambda widest=widest: 25 * 200 * widest - 1)
        with pytest.raises(MemoryError, match=rf"25 jets with {widest} slots for particles would take"):
            list(stream_jets(path))
        monkeypatch.setattr("adammcmc.posterior.store.archives.free_memory", lambda widest=widest: 25 * 200 * widest)
        assert len(list(stream_jets(path))) == 1


# --- writing: whole or not at all -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_jets_that_cannot_be_written_leave_nothing_and_harm_nothing(tmp_path: Path, suffix: str) -> None:
    wide = with_number(JETS, 3, 4.0, 1)
    with pytest.raises(ValueError, match=r"4\.00 from its jet axis in delta eta"):
        write_jets(tmp_path / f"a{suffix}", wide)
    assert files_in(tmp_path) == []
    write_jets(tmp_path / f"a{suffix}", JETS)
    before = (tmp_path / f"a{suffix}").read_bytes()
    with pytest.raises(ValueError, match="delta eta"):
        write_jets(tmp_path / f"a{suffix}", wide)
    assert files_in(tmp_path) == [f"a{suffix}"]
    assert (tmp_path / f"a{suffix}").read_bytes() == before


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_places_that_cannot_be_written(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(FileNotFoundError):
        write_jets(tmp_path / "nowhere" / f"a{suffix}", JETS)
    (tmp_path / f"folder{suffix}").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_jets(tmp_path / f"folder{suffix}", JETS)
    assert files_in(tmp_path) == [f"folder{suffix}"]


def test_only_our_formats_are_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"written to \.npz or \.parquet, got 'a\.h5'"):
        write_jets(tmp_path / "a.h5", JETS)
    assert files_in(tmp_path) == []


def test_a_new_file_replaces_the_old_and_its_reader_keeps_the_old(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_jets(path, JETS)
    parts = stream_jets(path, chunk=10)
    first = next(parts)
    write_jets(path, OTHERS)
    assert equal(Jets.cat([first, *parts]), JETS)
    assert equal(read_jets(path), OTHERS)
    shutil.rmtree(tmp_path)


def test_particles_of_a_file_are_ordered_by_pt(tmp_path: Path) -> None:
    frame = reference_frame(JETS)
    order = np.random.default_rng(0).permutation(200)
    momenta = frame.iloc[:, :800].to_numpy().reshape(25, 200, 4)[:, order].reshape(25, 800)
    mixed = pd.concat([pd.DataFrame(momenta, columns=frame.columns[:800]), frame.iloc[:, 800:]], axis=1)
    jets = read_jets(write_reference(tmp_path / "a.h5", mixed))
    wanted = jets_from_p4(JETS.p4().float(), JETS.kind)
    assert torch.equal(jets.counts, wanted.counts)
    assert torch.allclose(jets.particles[:, 0], wanted.particles[:, 0])


def test_a_pipe_is_no_file_of_jets(tmp_path: Path) -> None:
    """Opening it would wait for ever."""
    os.mkfifo(tmp_path / "jets.h5")
    for path in (tmp_path / "jets.h5", tmp_path):
        with pytest.raises(JetFileError, match=r"jets\.h5' is a pipe, a device or a folder"):
            read_jets(path)


def test_a_format_is_one_line_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader and a line in FORMATS are all that a new format needs."""
    jets = read_jets(bundled("jets"), max_jets=5)
    monkeypatch.setitem(files.FORMATS, ".txt", files.Format(lambda path, chunk: iter([jets])))
    (tmp_path / "a.txt").write_text("jets of a new format")
    assert torch.equal(read_jets(tmp_path).jet, jets.jet)
    with pytest.raises(ValueError, match=r"written to \.npz or \.parquet, got 'b\.txt'"):
        write_jets(tmp_path / "b.txt", jets)
