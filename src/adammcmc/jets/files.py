"""Jet files: the field's formats and our own, read in chunks.

    .h5, .hdf5   the Top Quark Tagging Reference Dataset: a pandas table with E_0, PX_0, PY_0, PZ_0, ..., is_signal_new
    .root        JetClass: a tree with part_px, part_py, part_pz, part_energy and label_*
    .npz         energyflow's quark and gluon jets (X, y); or our own compact encoding
    .parquet     our own compact encoding, one row per jet

`FORMATS`, at the end of this file, lists them. To add a format, write a reader and add a line to that table.

Our compact encoding is that of `Jets.encode`: about 0.25 kB per jet on disk. A folder stands for all its files, sorted by name.
"bundled:jets" and "bundled:others" are the samples that come with the library.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from adammcmc.jets.data import KINDS, Jets, jets_from_p4
from adammcmc.jets.hdf5 import TableError, open_table
from adammcmc.posterior.store.archives import check_fits, read_npz
from adammcmc.posterior.store.atomic import whole

__all__ = ["FORMATS", "Format", "JetFileError", "bundled", "jet_files", "read_jets", "stream_jets", "write_jets"]

_CHUNK = 20_000


class JetFileError(ValueError):
    """A file without jets, with the wrong columns, or with less data than it declares."""


def read_jets(paths: str | Path | Sequence[str | Path], max_jets: int | None = None) -> Jets:
    """Read all jets of these files or folders: about 0.9 kB per jet in memory. `max_jets` is shared equally by the files.

    Example:
        >>> jets = read_jets(bundled("jets"), max_jets=100)
        >>> len(jets)
        100
    """
    files = jet_files(paths)
    if max_jets is None:
        return Jets.cat(_fitting(stream_jets(files)))
    if max_jets < 1:
        raise ValueError(f"`max_jets` must be positive, got {max_jets}.")
    whole, rest = divmod(max_jets, len(files))
    shares = [whole + (i < rest) for i in range(len(files))]
    parts = (part for path, share in zip(files, shares, strict=True) if share for part in _first(path, share))
    return Jets.cat(_fitting(parts))


def _fitting(parts: Iterable[Jets]) -> Iterator[Jets]:
    """The same parts, while memory suffices to join them: a small file may expand to any number of jets."""
    held = 0
    for part in parts:
        held += sum(x.nbytes for x in (part.counts, part.particles, part.jet, part.kind))
        check_fits(held, "the jets read so far")  # joining needs this much again, beside the parts
        yield part


def _first(path: Path, number: int) -> Iterator[Jets]:
    """The first jets of one file."""
    for part in stream_jets(path):
        yield part[:number]
        number -= len(part)
        if number <= 0:
            return


def stream_jets(paths: str | Path | Sequence[str | Path], chunk: int = _CHUNK) -> Iterator[Jets]:
    """The jets of these files or folders, about `chunk` at a time (our .npz: one file at a time)."""
    if chunk < 1:
        raise ValueError(f"`chunk` must be positive, got {chunk}.")
    for path in jet_files(paths):
        first = 0
        with _explained(path):
            for part in FORMATS[path.suffix].read(path, chunk):
                yield _checked(path, part, first)
                first += len(part)
            if first == 0:
                raise JetFileError(f"'{path}' holds no jets.")


def write_jets(path: str | Path, jets: Jets) -> None:
    """Write our own format, .npz or .parquet, atomically."""
    path = Path(path)
    format = FORMATS.get(path.suffix)
    if format is None or format.write is None:
        raise ValueError(f"jets are written to .npz or .parquet, got '{path.name}'.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder '{path.parent}' does not exist.")
    with whole(path) as file:
        format.write(file, jets)


def bundled(name: str) -> Path:
    """A bundled sample: 'jets' (top and QCD in the reference window) or 'others' (all kinds, 0.5 to 1 TeV)."""
    if name not in ("jets", "others"):
        raise FileNotFoundError(f"there is no bundled sample '{name}': there are 'jets' and 'others'.")
    return Path(__file__).parent / "bundled" / f"{name}.npz"


def jet_files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files behind these paths: a folder stands for all its jet files, `bundled:...` for a bundled sample."""
    given = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    found: list[Path] = []
    for path in given:
        if str(path).startswith("bundled:"):
            path = bundled(str(path).removeprefix("bundled:"))
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix in FORMATS and not p.name.startswith("."))
            if not inside:
                raise FileNotFoundError(f"the folder '{path}' holds no jet files ({', '.join(FORMATS)}).")
            found += inside
        elif not path.exists():
            raise FileNotFoundError(f"there is no file '{path}'.")
        elif path.suffix not in FORMATS:
            raise JetFileError(f"'{path}' has none of the known formats: {', '.join(FORMATS)}.")
        else:
            found.append(path)
    if not found:
        raise FileNotFoundError("no jet file was given.")
    for path in found:
        if not path.is_file():
            raise JetFileError(f"'{path}' is a pipe, a device or a folder, not a regular file.")
    return found


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Put the name of the file in front of a reader's error."""
    try:
        yield
    except (JetFileError, ImportError, MemoryError):
        raise
    except TableError as error:
        raise JetFileError(f"'{path}' {error}") from error
    except Exception as error:  # each library raises exceptions of its own for damaged files
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]  # HDF5 puts a page before the last
        raise JetFileError(f"'{path}' cannot be read ({type(error).__name__}: {lines[-1]}). Is it complete?") from error


def _checked(path: Path, jets: Jets, first: int) -> Jets:
    """Require particles in every jet, and finite numbers."""
    if bool((jets.counts == 0).any()):
        raise JetFileError(f"'{path}': event {first + int(jets.counts.argmin())} has no particles.")
    bad = (~jets.jet.isfinite()).any(1)
    bad[jets.owner[(~jets.particles.isfinite()).any(1)]] = True
    if bool(bad.any()):
        raise JetFileError(f"'{path}': event {first + int(bad.int().argmax())} has a number that is not finite.")
    return jets


def _need(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"this file needs {error.name}. Run: pip install 'adammcmc[physics]'", name=error.name) from error


def _require(path: Path, wanted: Iterable[str], present: Iterable[str]) -> None:
    there = set(present)
    for name in wanted:
        if name not in there:
            known = ", ".join(sorted(there)[:8])
            raise JetFileError(f"'{path}' has no column '{name}'. Its columns begin: {known}.")


# --- readers: path, chunk -> parts ----------------------------------------------------------------------------------------


def _read_reference(path: Path, chunk: int) -> Iterator[Jets]:
    with open_table(path, _need) as table:
        width = max((int(name[3:]) + 1 for name in table.columns if name[:3] in ("PX_", "PY_", "PZ_")), default=1)
        width = max(1, min(width, len(table.columns)))  # a name may claim any number
        columns = [f"{name}_{i}" for i in range(width) for name in ("E", "PX", "PY", "PZ")]
        _require(path, [*columns, "is_signal_new"], table.columns)
        start = 0
        for rows in table.rows(chunk):
            p4 = torch.from_numpy(table.values(rows, columns, np.float32).reshape(len(rows), -1, 4))
            label = table.values(rows, ["is_signal_new"], np.float64)[:, 0]
            if not np.isin(label, (0, 1)).all():
                event = start + int(np.argmin(np.isin(label, (0, 1))))
                raise JetFileError(f"'{path}': is_signal_new of event {event} is neither 0 nor 1.")
            start += len(rows)
            yield jets_from_p4(p4, torch.from_numpy(label.astype(np.int64)))


_JETCLASS = {
    "label_QCD": "qcd",
    "label_Tbqq": "top",
    "label_Wqq": "w",
    "label_Zqq": "z",
    "label_Hbb": "h_bb",
    "label_H4q": "h_ww",
    "label_Hcc": None,
    "label_Hgg": None,
    "label_Hqql": None,
    "label_Tbl": None,
}


def _read_jetclass(path: Path, chunk: int) -> Iterator[Jets]:
    uproot, ak = _need("uproot"), _need("awkward")
    momenta = ["part_energy", "part_px", "part_py", "part_pz"]
    with uproot.open(path) as file:
        if "tree" not in file:
            raise JetFileError(f"'{path}' has no tree 'tree'. It holds: {', '.join(file.keys()) or 'nothing'}.")
        tree = file["tree"]
        _require(path, [*momenta, *_JETCLASS], tree.keys())
        start = 0
        # a file may carry aliases, which are expressions that uproot would evaluate
        for part in tree.iterate([*momenta, *_JETCLASS], step_size=chunk, aliases={}):
            numbers = [np.asarray(ak.num(part[name])) for name in momenta]
            uneven = np.any([n != numbers[0] for n in numbers], 0)
            if uneven.any():
                event = start + int(uneven.argmax())
                raise JetFileError(f"'{path}': event {event} has unequal numbers of {', '.join(momenta)}.")
            start += len(part)
            width = int(numbers[0].max(initial=1))
            _check_rectangle(path, len(part), width)
            columns = [ak.to_numpy(ak.fill_none(ak.pad_none(part[name], width), 0.0)) for name in momenta]
            p4 = torch.from_numpy(np.stack(columns, -1).astype(np.float32))
            kind = torch.full((len(p4),), -1)
            for label, name in _JETCLASS.items():
                if name is not None:
                    kind[torch.from_numpy(np.asarray(part[label]).astype(bool))] = KINDS.index(name)
            yield jets_from_p4(p4, kind)


def _check_rectangle(path: Path, jets: int, width: int) -> None:
    """The largest jet sets the width of its chunk: about 200 bytes for each slot, while reading."""
    check_fits(200 * jets * width, f"'{path}': {jets:,} jets with {width:,} slots for particles")


_OURS = ("n", "log_pt", "deta", "dphi", "jet", "kind", "scale")
_GROWTH = 16.0  # a particle takes 6 bytes in our encoding, 16 in `Jets`, and about 90 while decoding


def _read_npz(path: Path, chunk: int) -> Iterator[Jets]:
    def choose(names: list[str]) -> tuple[str, ...]:
        wanted = ("X", "y") if "X" in names else _OURS
        _require(path, wanted, names)
        return wanted

    arrays = dict(read_npz(path, choose))
    if "X" in arrays:
        yield from _read_energyflow(path, arrays, chunk)
        return
    check_fits(int(_GROWTH * sum(array.nbytes for array in arrays.values())), f"'{path}'")
    yield _decoded(path, arrays)


def _read_energyflow(path: Path, arrays: dict[str, np.ndarray[Any, Any]], chunk: int) -> Iterator[Jets]:
    """pT, rapidity, phi and a code of each particle, zero padded; y is 1 for quarks, 0 for gluons. Assumed massless."""
    momenta, labels = arrays["X"], arrays["y"]
    if momenta.ndim != 3 or momenta.shape[2] < 3 or len(labels) != len(momenta):
        raise JetFileError(
            f"'{path}': X must be (jets, particles, 3 or more) and y (jets,), got {momenta.shape}, {labels.shape}."
        )
    _check_rectangle(path, min(chunk, len(momenta)), momenta.shape[1])
    for start in range(0, len(momenta), chunk):
        pt, eta, phi = torch.from_numpy(momenta[start : start + chunk, :, :3].astype(np.float64)).unbind(-1)
        p4 = torch.stack([pt * eta.cosh(), pt * phi.cos(), pt * phi.sin(), pt * eta.sinh()], -1)
        is_quark = torch.from_numpy(labels[start : start + chunk].astype(np.int64)) == 1
        yield jets_from_p4(p4, torch.where(is_quark, KINDS.index("quark"), KINDS.index("gluon")))


def _read_parquet(path: Path, chunk: int) -> Iterator[Jets]:
    parquet = _need("pyarrow.parquet")
    with parquet.ParquetFile(path) as file:
        _require(path, ("log_pt", "deta", "dphi", "jet", "kind"), file.schema_arrow.names)
        scale = (file.schema_arrow.metadata or {}).get(b"scale")
        if scale is None:
            raise JetFileError(f"'{path}' is not in our format: its metadata have no 'scale'.")
        for batch in file.iter_batches(batch_size=chunk):
            check_fits(int(_GROWTH * batch.nbytes), f"'{path}'")
            lists = {name: batch.column(name) for name in ("log_pt", "deta", "dphi", "jet")}
            code = {name: column.flatten().to_numpy() for name, column in lists.items()}
            code["n"] = np.diff(lists["log_pt"].offsets.to_numpy())
            code["jet"] = code["jet"].reshape(-1, 5)
            code["kind"] = batch.column("kind").to_numpy()
            code["scale"] = np.array([float(x) for x in scale.split()])
            yield _decoded(path, code)


def _decoded(path: Path, code: dict[str, np.ndarray[Any, Any]]) -> Jets:
    total = int(code["n"].astype(np.int64).sum())
    for name in ("log_pt", "deta", "dphi"):
        if len(code[name]) != total:
            raise JetFileError(f"'{path}': the jets have {total} particles, column '{name}' has {len(code[name])}.")
    for name in ("jet", "kind"):
        if len(code[name]) != len(code["n"]):
            raise JetFileError(f"'{path}' has {len(code['n'])} jets, column '{name}' has {len(code[name])}.")
    return Jets.decode(code)


# --- writers --------------------------------------------------------------------------------------------------------------


def _write_npz(path: Path, jets: Jets) -> None:
    # a fixed date: the same jets give the same bytes, so that checksums can be compared
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in jets.encode().items():
            entry = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(entry, "w") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def _write_parquet(path: Path, jets: Jets) -> None:
    arrow, parquet = _need("pyarrow"), _need("pyarrow.parquet")
    code = jets.encode()
    offsets = arrow.array(jets.offsets.numpy().astype(np.int32))
    columns = {name: arrow.ListArray.from_arrays(offsets, code[name]) for name in ("log_pt", "deta", "dphi")}
    columns["jet"] = arrow.FixedSizeListArray.from_arrays(code["jet"].reshape(-1), 5)
    columns["kind"] = arrow.array(code["kind"])
    metadata = {"scale": " ".join(str(x) for x in code["scale"].tolist()), "kinds": " ".join(KINDS)}
    table = arrow.table(columns).replace_schema_metadata(metadata)
    parquet.write_table(table, path, compression="zstd", row_group_size=_CHUNK)


# --- the table of formats -------------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """How a kind of file is read, and written if it can be."""

    read: Callable[[Path, int], Iterator[Jets]]
    """(path, chunk) -> the jets, about `chunk` at a time. Its errors reach users as a `JetFileError`."""
    write: Callable[[Path, Jets], None] | None = None


FORMATS = {
    ".h5": Format(_read_reference),
    ".hdf5": Format(_read_reference),
    ".root": Format(_read_jetclass),
    ".npz": Format(_read_npz, _write_npz),
    ".parquet": Format(_read_parquet, _write_parquet),
}
"""By the ending of the file."""
