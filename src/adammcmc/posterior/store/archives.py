"""Arrays in .npz files, whose claims are compared with the file and with free memory before anything is read."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adammcmc.posterior.store.folder import format_bytes
from adammcmc.posterior.store.memory import free_memory

__all__ = ["check_fits", "read_npz"]

Array = np.ndarray[Any, Any]


def check_fits(size: int, what: str) -> None:
    """A MemoryError before so many bytes are taken, not after: a system that runs out of memory may end other programs."""
    free = free_memory()
    if free is not None and size > free:
        raise MemoryError(f"{what} would take {format_bytes(size)} of memory, and {format_bytes(free)} are free.")


def read_npz(path: Path, choose: Callable[[list[str]], Sequence[str]]) -> list[tuple[str, Array]]:
    """The arrays of an archive that `choose` names, given the names of all, each with its name.

    An archive of 2 MB may expand to 2 GiB, and the head of an array may claim any shape: both are read first, and must agree.
    """
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        names = list(choose(list(members)))
        for name in names:
            if members[name].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # what numpy writes
                raise ValueError(f"array '{name}' is packed by method {members[name].compress_type}, which is not read.")
            with archive.open(members[name]) as member:
                shape, dtype = _head(member, name)
                claimed, held = _size(shape, dtype), members[name].file_size - member.tell()
            if claimed != held:
                raise ValueError(f"array '{name}' says that it has {claimed:,} bytes {shape}, and has {held:,}.")
        check_fits(sum(members[name].file_size for name in names), f"'{path}'")
        found: dict[str, Array] = {}
        for name in dict.fromkeys(names):
            with archive.open(members[name]) as member:
                found[name] = np.lib.format.read_array(member, allow_pickle=False)
                member.read()  # to the end, where the checksum is compared
        return [(name, found[name]) for name in names]


def _head(member: Any, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array, and the place in the file behind them. No objects: those are pickles."""
    version = np.lib.format.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"array '{name}' has .npy version {version}, which is not read.")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(member)
    if dtype.hasobject:
        raise ValueError(f"array '{name}' holds Python objects, which are not read.")
    return shape, dtype


def _size(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """In bytes, without overflow."""
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size
