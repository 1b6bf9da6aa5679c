"""A pandas table in an HDF5 file, read without pickle.

pandas stores the names of the columns as pickled attributes, and PyTables unpickles every attribute that it reads: a file could
run any code. Here a file is only data. Names are parsed from the few pickle opcodes that make up a list of strings; nothing
else is decoded. Links, external storage, unknown filters and sizes that the file does not hold are refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["PandasTable", "TableError", "open_table", "strings_of_pickle"]

Array = np.ndarray[Any, Any]

_LARGEST_ROW = 1 << 20  # bytes; a row of the reference data has 3,240
_LARGEST_READ = 1 << 26  # bytes in one read; 20,000 rows of the reference data
_LARGEST_CHUNK = 1 << 28  # bytes; PyTables writes chunks of about 100 kB
_LARGEST_NAMES = 1 << 20  # bytes of pickled names; the reference data have 10,517
_BUILT_IN = frozenset({1, 2, 3})  # deflate, shuffle, fletcher32
_PLUGINS = {307: "bzip2", 32001: "blosc", 32026: "blosc2"}  # also written by pandas; they need hdf5plugin

_TEXT = frozenset({"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "STRING", "BINSTRING", "SHORT_BINSTRING"})
_STRUCTURE = frozenset({"PROTO", "FRAME", "MARK", "LIST", "EMPTY_LIST", "APPEND", "APPENDS", "STOP"})
_MEMO = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})  # written to the memo, and never read from it


class TableError(ValueError):
    """What is wrong with a file; the message follows the name of the file."""


def strings_of_pickle(data: bytes) -> list[str]:
    """The strings of a pickled flat list of strings. Any other pickle is a ValueError; none is ever executed.

    Example:
        >>> import pickle
        >>> strings_of_pickle(pickle.dumps(["E_0", "PX_0"], 0))
        ['E_0', 'PX_0']
        >>> strings_of_pickle(pickle.dumps(print))
        Traceback (most recent call last):
        ValueError: a pickle of more than a list of strings (opcode STACK_GLOBAL) is not read.
    """
    strings: list[str] = []
    lists = 0
    for opcode, argument, _ in pickletools.genops(data):  # a parser: it cannot execute them
        if opcode.name in _TEXT and isinstance(argument, str):
            strings.append(argument)
        elif opcode.name not in _STRUCTURE | _MEMO:
            raise ValueError(f"a pickle of more than a list of strings (opcode {opcode.name}) is not read.")
        lists += opcode.name in ("LIST", "EMPTY_LIST")
    if lists != 1:
        raise ValueError(f"the pickle of one list of strings was expected, got {lists} lists.")
    return strings


@dataclass(frozen=True)
class PandasTable:
    """An open table, with columns by name and rows by slice."""

    dataset: Any
    columns: dict[str, tuple[str, int]]
    """Name -> the field of a row, and the index in that field."""

    def rows(self, chunk: int) -> Iterator[Array]:
        """All rows, at most `chunk` at a time."""
        size = max(1, min(chunk, _LARGEST_READ // self.dataset.dtype.itemsize))
        for start in range(0, int(self.dataset.shape[0]), size):
            yield self.dataset[start : start + size]

    def values(self, rows: Array, names: list[str], dtype: type[np.floating[Any]]) -> Array:
        """These columns of some rows: (rows, names)."""
        found = np.empty((len(rows), len(names)), dtype)
        places = [self.columns[name] for name in names]
        for field in dict.fromkeys(field for field, _ in places):
            there = [i for i, place in enumerate(places) if place[0] == field]
            here = [places[i][1] for i in there]
            found[:, _as_slice(there)] = rows[field].reshape(len(rows), -1)[:, _as_slice(here)]
        return found


@contextmanager
def open_table(path: Path, need: Callable[[str], Any]) -> Iterator[PandasTable]:
    """The table of a file that `DataFrame.to_hdf(path, key="table", format="table")` wrote; `need` imports a module.

    Raises TableError for any other file.
    """
    h5py = need("h5py")
    with h5py.File(path, "r") as file:
        group = _inside(h5py, file, "table")
        if not isinstance(group, h5py.Group):
            held = ", ".join(f"/{name}" for name, _ in zip(file, range(8), strict=False))  # a file may hold millions
            raise TableError(f"has no table 'table'. It holds: {held or 'nothing'}.")
        dataset = _inside(h5py, group, "table")
        if not isinstance(dataset, h5py.Dataset) or not dataset.dtype.fields or len(dataset.shape) != 1:
            raise TableError("has a 'table' that is not in pandas' table format, so that it cannot be read in chunks.")
        _check_storage(dataset, path)
        _check_filters(dataset, need)
        columns: dict[str, tuple[str, int]] = {}
        for field in dataset.dtype.names:
            if field != "index":
                names = _names(dataset, field)
                columns |= {name: (field, place) for place, name in enumerate(names)}
        yield PandasTable(dataset, columns)


def _inside(h5py: Any, group: Any, name: str) -> Any:
    """A member stored in this file, or None. Soft links are refused too: they may lead to external links."""
    link = group.get(name, getlink=True)
    if link is None:
        return None
    if not isinstance(link, h5py.HardLink):
        raise TableError(f"has a {type(link).__name__} where '{name}' must be part of the file: links are not followed.")
    return group[name]


def _check_storage(dataset: Any, path: Path) -> None:
    """Require that the file itself holds the data, and is large enough for them."""
    dtype, rows, chunks = dataset.dtype, int(dataset.shape[0]), dataset.chunks
    if dataset.is_virtual or dataset.external:
        raise TableError("stores its table outside the file: external storage is not read.")
    if dtype.hasobject:
        raise TableError("has fields of variable length or references in its table: they are not read.")
    if not 0 < dtype.itemsize <= _LARGEST_ROW:
        raise TableError(f"has rows of {dtype.itemsize:,} bytes; at most {_LARGEST_ROW:,} are read.")
    if chunks is None:
        held = dataset.id.get_offset() is not None and rows * dtype.itemsize <= path.stat().st_size
        if rows and not held:
            raise TableError(f"declares {rows:,} rows, which the file does not hold.")
        return
    if chunks[0] * dtype.itemsize > _LARGEST_CHUNK:
        raise TableError(f"has chunks of {chunks[0] * dtype.itemsize:,} bytes; at most {_LARGEST_CHUNK:,} are read.")
    # chunks that were never written would be read as the fill value, endlessly
    if (written := dataset.id.get_num_chunks()) < (wanted := -(-rows // chunks[0])):
        raise TableError(f"declares {rows:,} rows in {wanted:,} chunks, and holds {written:,} chunks.")


def _check_filters(dataset: Any, need: Callable[[str], Any]) -> None:
    """Allow only the filters that pandas writes: HDF5 would load any plugin for other numbers."""
    properties = dataset.id.get_create_plist()
    for code in [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]:
        if code in _PLUGINS:
            need("hdf5plugin")
        elif code not in _BUILT_IN:
            known = ", ".join(["deflate", "shuffle", "fletcher32", *_PLUGINS.values()])
            raise TableError(f"is compressed by HDF5 filter {code}, which is not read; known: {known}.")


def _names(dataset: Any, field: str) -> list[str]:
    """The names of the columns in one field of a row."""
    shape, kind = dataset.dtype[field].shape, f"{field}_kind"
    if kind not in dataset.attrs:
        raise TableError(f"has no attribute '{kind}': pandas' name for the columns in '{field}' is missing.")
    attribute = dataset.attrs.get_id(kind)
    if attribute.shape != () or attribute.dtype.kind != "S" or attribute.dtype.itemsize > _LARGEST_NAMES:
        raise TableError(f"has an attribute '{kind}' that is not a string of at most {_LARGEST_NAMES:,} bytes.")
    try:
        names = strings_of_pickle(bytes(dataset.attrs[kind]))
    except Exception as error:  # the parser raises many kinds of errors
        raise TableError(f"has an attribute '{kind}' that is not a list of names: {error}") from error
    width = int(np.prod(shape, dtype=np.int64))
    if len(names) != width or dataset.dtype[field].base.kind not in "fiubS":
        raise TableError(f"has {len(names)} names for the {width} columns of {dataset.dtype[field].base} in '{field}'.")
    return names


def _as_slice(numbers: list[int]) -> Any:
    """Consecutive indices as a slice, which copies in blocks."""
    first = numbers[0]
    return slice(first, first + len(numbers)) if numbers == list(range(first, first + len(numbers))) else numbers
