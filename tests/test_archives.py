"""What an archive claims is compared with what it holds and with free memory, before it is read."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from adammcmc.cli.recipe import load_data
from adammcmc.posterior.store.archives import read_npz
from adammcmc.target.data import as_data

MODEL = nn.Linear(2, 2)


def npy(array: np.ndarray, shape: tuple[int, ...] | None = None) -> bytes:
    """A .npy file whose head may claim another shape."""
    file = io.BytesIO()
    head = np.lib.format.header_data_from_array_1_0(array) | ({} if shape is None else {"shape": shape})
    np.lib.format.write_array_header_1_0(file, head)
    return file.getvalue() + array.tobytes()


def archive(path: Path, *, method: int = zipfile.ZIP_DEFLATED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


def test_what_numpy_writes_is_read(tmp_path: Path) -> None:
    arrays = {
        "x": np.arange(6.0).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "swapped": np.arange(3, dtype=">i4"),
        "none": np.zeros((0, 4)),
        "one": np.array(3.0),
        "words": np.array(["a", "bc"]),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        found = dict(read_npz(tmp_path / "a.npz", lambda names: [name for name in names if name != "words"]))
        assert list(found) == [name for name in arrays if name != "words"]
        for name, array in found.items():
            np.testing.assert_array_equal(array, arrays[name])
            assert array.dtype == arrays[name].dtype


def test_an_array_may_be_inputs_and_targets(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2), np.float32))
    inputs, targets = load_data("a.npz", tmp_path, MODEL, keys=["x", "x"])
    assert inputs is targets


def test_a_small_archive_of_many_bytes_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "bomb.npz", inputs=npy(np.zeros((2_000_000, 2))), targets=npy(np.zeros(4)))
    assert path.stat().st_size < 100_000  # 32 MB inside
    monkeypatch.setattr("adammcmc.posterior.store.archives.free_memory", lambda: 20_000_000)
    tracemalloc.start()
    with pytest.raises(MemoryError, match=r"bomb.npz' would take 32 MB of memory, and 20 MB are free"):
        load_data("bomb.npz", tmp_path, MODEL)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_room_for_a_copy_in_another_type_is_needed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", np.zeros((1000, 2)))  # mapped, and so without cost; as float32 it has 8,000 bytes
    monkeypatch.setattr("adammcmc.posterior.store.archives.free_memory", lambda: 7_000)
    with pytest.raises(MemoryError, match=r"an array of shape \(1000, 2\) as float32 would take 8 kB"):
        load_data("a.npy", tmp_path, MODEL)
    monkeypatch.setattr("adammcmc.posterior.store.archives.free_memory", lambda: None)  # where the system does not say
    assert load_data("a.npy", tmp_path, MODEL).shape == (1000, 2)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("shape", [(10**12, 2), (2**62, 2**62), (3,), (-4, -2), (2, 2)])
def test_a_head_that_claims_another_size_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    claiming = npy(np.zeros((4, 2)), shape)
    archive(tmp_path / "a.npz", inputs=claiming)
    if shape != (-4, -2):  # which has as many numbers
        with pytest.raises(ValueError, match=r"a.npz': array 'inputs' claims [0-9,]+ bytes"):
            load_data("a.npz", tmp_path, MODEL)
    (tmp_path / "a.npy").write_bytes(claiming)
    if np.prod(shape, dtype=float) > 8:
        with pytest.raises(ValueError, match=r"a.npy"):
            load_data("a.npy", tmp_path, MODEL)


def test_objects_other_methods_and_other_versions_are_not_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([None, 1], object))
    with pytest.raises(ValueError, match="array 'x' holds Python objects, which are not read"):
        read_npz(tmp_path / "a.npz", lambda names: names)
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):  # whose readers expand without a bound
        with pytest.raises(ValueError, match="packed by method"):
            read_npz(archive(tmp_path / "b.npz", method=method, x=npy(np.zeros(3))), lambda names: names)
    with pytest.raises(ValueError, match=r"has .npy version \(9, 0\)"):
        read_npz(archive(tmp_path / "c.npz", x=b"\x93NUMPY\x09\x00"), lambda names: names)


def test_a_file_is_what_its_name_says(tmp_path: Path) -> None:
    """np.load opens an archive under any name, and would give a thing that is no array."""
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(ValueError, match="magic string"):
        as_data((tmp_path / "a.npy",))
    with pytest.raises(ValueError, match=r"a.npy': .*magic string"):
        load_data("a.npy", tmp_path, MODEL)
