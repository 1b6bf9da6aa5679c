"""A hostile .h5 file does nothing: no pickle runs, no other file is opened, no memory is taken for what it only claims."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
import torch

from adammcmc.jets import JetFileError, bundled, read_jets, stream_jets
from adammcmc.jets.hdf5 import strings_of_pickle
from tests.jets.test_files import JETS, reference_frame, write_reference

WIDTH = 3
NAMES = [f"{name}_{i}" for i in range(WIDTH) for name in ("E", "PX", "PY", "PZ")]
ROW = np.dtype([("index", "<i8"), ("values_block_0", "<f4", (len(NAMES),)), ("values_block_1", "<i8", (1,))])


class Marks:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def rows(number: int = 4) -> np.ndarray:
    made = np.zeros(number, ROW)
    made["values_block_0"] = np.tile([5.0, 3.0, 4.0, 0.0], WIDTH)
    made["values_block_1"][:, 0] = np.arange(number) % 2
    return made


def named(dataset: Any, first: bytes = pickle.dumps(NAMES, 0)) -> None:
    dataset.attrs["values_block_0_kind"] = np.bytes_(first)
    dataset.attrs["values_block_1_kind"] = np.bytes_(pickle.dumps(["is_signal_new"], 0))


def write(path: Path, **options: Any) -> Path:
    """The reference layout by hand, so that each part of it can be another."""
    with h5py.File(path, "w") as file:
        named(file.create_dataset("table/table", data=rows(), **options))
    return path


# --- pickles --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_names_are_read_from_pickles_of_every_protocol(protocol: int) -> None:
    for names in ([], ["a"], NAMES, [f"{i}é" for i in range(2000)]):
        assert strings_of_pickle(pickle.dumps(names, protocol)) == names
    assert strings_of_pickle(b"(lp1\nS'E_0'\np2\naS'PX_0'\np3\na.") == ["E_0", "PX_0"]  # as Python 2 wrote them


def test_nothing_but_a_list_of_strings_is_read(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for thing in (Marks(marker), [Marks(marker)], [*NAMES, Marks(marker)], 3, {"a": "b"}, [["a"], "b"], "a", None):
            with pytest.raises(ValueError, match="list"):
                strings_of_pickle(pickle.dumps(thing, protocol))
    for damaged in (b"", b"(lp0\nVE_0\n", b"cos\nsystem\n(S'touch marker'\ntR.", b"nonsense"):
        with pytest.raises(ValueError):  # noqa: PT011  (the parser's own words)
            strings_of_pickle(damaged)
    assert not marker.exists()


@pytest.mark.parametrize("place", ["/", "table", "table/table"])
@pytest.mark.parametrize("name", ["values_block_0_kind", "non_index_axes", "info", "TITLE", "CLASS", "pandas_type"])
def test_a_pickle_in_an_attribute_never_runs(tmp_path: Path, place: str, name: str) -> None:
    path, marker = write_reference(tmp_path / "a.h5", reference_frame(JETS, WIDTH)), tmp_path / "marker"
    with h5py.File(path, "r+") as file:
        file[place].attrs[name] = np.bytes_(pickle.dumps([Marks(marker)], 0))
    if (place, name) == ("table/table", "values_block_0_kind"):
        with pytest.raises(JetFileError, match=r"'values_block_0_kind' that is not a list of names: .*opcode GLOBAL"):
            read_jets(path)
    else:  # nobody reads it
        assert len(read_jets(path)) == len(JETS)
    assert not marker.exists()


# --- what pandas writes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [None, "zlib", "bzip2", "blosc", "blosc:lz4", "blosc2", "blosc2:zstd"])
@pytest.mark.parametrize("label", ["block", "column of its own"])
def test_tables_are_read_as_pandas_packs_them(tmp_path: Path, packed: str | None, label: str) -> None:
    frame = reference_frame(JETS, WIDTH)
    columns = [] if label == "block" else ["is_signal_new"]
    options: dict[str, Any] = {} if packed is None else {"complib": packed, "complevel": 5}
    frame.to_hdf(tmp_path / "a.h5", key="table", format="table", data_columns=columns, **options)
    jets = read_jets(tmp_path / "a.h5")
    assert torch.equal(jets.kind, JETS.kind)
    assert torch.equal(jets.counts, JETS.counts.clamp_max(WIDTH))


def test_a_packed_table_without_the_plugin_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.h5", chunks=(2,), **hdf5plugin.Blosc())
    assert len(read_jets(path)) == 4
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    with pytest.raises(ImportError, match=r"needs hdf5plugin. Run: pip install 'adammcmc\[physics\]'"):
        read_jets(path)


# --- what leads out of the file -------------------------------------------------------------------------------------------


def linked(path: Path, link: Any) -> None:
    with h5py.File(path, "w") as file:
        file["real/table"] = rows()
        named(file["real/table"])
        file["table"] = link


def linked_inside(path: Path, link: Any) -> None:
    with h5py.File(path, "w") as file:
        file["real"] = rows()
        named(file["real"])
        file["table/table"] = link


def stored_outside(path: Path) -> None:
    secret = path.with_name("secret.bin")
    secret.write_bytes(rows().tobytes())
    with h5py.File(path, "w") as file:
        outside = [(str(secret), 0, h5py.h5f.UNLIMITED)]
        named(file.create_dataset("table/table", (4,), ROW, external=outside))


def virtual(path: Path) -> None:
    layout = h5py.VirtualLayout((4,), ROW)
    layout[:] = h5py.VirtualSource(write(path.with_name("other.h5")), "table/table", (4,), ROW)
    with h5py.File(path, "w") as file:
        named(file.require_group("table").create_virtual_dataset("table", layout))


def claims(path: Path, number: int = 10**12, chunk: int = 1000, dtype: np.dtype = ROW) -> None:
    """So many rows, none of them written: HDF5 would give the fill value for each."""
    with h5py.File(path, "w") as file:
        fill = np.zeros(1, dtype)[0] if dtype is ROW else None
        named(file.create_dataset("table/table", (number,), dtype, chunks=(chunk,), maxshape=(None,), fillvalue=fill))


def wide(path: Path) -> None:
    claims(path, 1, 1, np.dtype([("values_block_0", "<f4", (1 << 28,)), ("values_block_1", "<i8", (1,))]))


def contiguous(path: Path) -> None:
    with h5py.File(path, "w") as file:
        named(file.create_dataset("table/table", (10**12,), ROW))


def objects(path: Path) -> None:
    claims(path, 1, 1, np.dtype([("values_block_0", h5py.string_dtype()), ("values_block_1", "<i8", (1,))]))


def misnamed(path: Path, names: bytes) -> None:
    with h5py.File(write(path), "r+") as file:
        named(file["table/table"], names)


def unnamed(path: Path) -> None:
    with h5py.File(write(path), "r+") as file:
        del file["table/table"].attrs["values_block_0_kind"]


def claiming_particle(path: Path) -> None:
    misnamed(path, pickle.dumps([*NAMES[:-1], "PZ_999999999999999"], 0))


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an external link": (lambda p: linked(p, h5py.ExternalLink(write(p.with_name("o.h5")), "table")), "ExternalLink where"),
    "a soft link": (lambda p: linked(p, h5py.SoftLink("/real")), "SoftLink where 'table'"),
    "an external link inside": (
        lambda p: linked_inside(p, h5py.ExternalLink(write(p.with_name("o.h5")), "table/table")),
        "ExternalLink where",
    ),
    "a soft link inside": (lambda p: linked_inside(p, h5py.SoftLink("/real")), "links are not followed"),
    "storage outside": (stored_outside, "outside the file"),
    "a virtual table": (virtual, "outside the file"),
    "rows that are not there": (claims, "declares 1,000,000,000,000 rows in 1,000,000,000 chunks, and holds 0 chunks"),
    "rows in one piece that are not there": (contiguous, "rows, which the file does not hold"),
    "a chunk of a terabyte": (lambda p: claims(p, chunk=1 << 25), "has chunks of 2,[0-9,]* bytes"),
    "a row of a gigabyte": (wide, "has rows of 1,073,741,832 bytes"),
    "strings of any length": (objects, "variable length"),
    "an unknown filter": (lambda p: write(p, chunks=(2,), **hdf5plugin.LZ4()), "HDF5 filter 32004, which is not read"),
    "no names": (unnamed, "no attribute 'values_block_0_kind'"),
    "too few names": (lambda p: misnamed(p, pickle.dumps(["E_0"], 0)), "has 1 names for the 12 columns"),
    "a name that claims a number": (claiming_particle, "no column 'PZ_2'"),
    "the table itself is a number": (lambda p: h5py.File(p, "w").create_dataset("table", data=3.0), "has no table 'table'"),
    "a matrix for a table": (
        lambda p: h5py.File(p, "w").create_dataset("table/table", data=np.ones((3, 3))),
        "not in pandas' table format",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_with_its_reason(tmp_path: Path, case: str) -> None:
    make, message = HOSTILE[case]
    made = make(tmp_path / "a.h5")
    if hasattr(made, "file"):
        made.file.close()
    with pytest.raises(JetFileError, match=message) as caught:
        list(stream_jets(tmp_path / "a.h5"))
    assert str(tmp_path / "a.h5") in str(caught.value)


def test_a_plain_file_by_hand_is_read(tmp_path: Path) -> None:
    """The cases above differ from this one."""
    assert read_jets(write(tmp_path / "a.h5")).kind.tolist() == [0, 1, 0, 1]
    assert [len(part) for part in stream_jets(write(tmp_path / "b.h5", chunks=(2,)), chunk=3)] == [3, 1]


def test_more_jets_than_memory_are_refused_before_they_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adammcmc.posterior.store.archives.free_memory", lambda: 10_000)
    with pytest.raises(MemoryError, match=r"jets.npz' would take .* of memory, and 10 kB are free"):
        read_jets(bundled("jets"))


def test_jets_that_grow_beyond_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.h5")
    monkeypatch.setattr("adammcmc.posterior.store.archives.free_memory", lambda: 100)
    with pytest.raises(MemoryError, match="the jets read so far would take"):
        read_jets(path)
