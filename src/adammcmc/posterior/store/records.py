"""The JSON of a run folder, read without trust: `run.json` and the lines of the index.

Both have checksums: `run.json` in its entry "crc32" (of its text without that entry, keys sorted, no spaces), a line of
the index in its last entry, "line_crc32" (of the line without it). An error is a `StoreCorrupt` or, for a line, a
ValueError with the reason.
"""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adammcmc.errors import StoreCorrupt, StoreMismatch
from adammcmc.posterior.store.atomic import NotPlain, open_plain
from adammcmc.posterior.store.encoding import can_store

__all__ = [
    "FORMAT", "MANIFEST", "Lines", "Record", "check_record", "draw_name", "line_of", "load_json",
    "manifest_text", "read_good_lines", "read_lines", "read_manifest",
]  # fmt: skip

FORMAT = 2
MANIFEST = "run.json"
Record = dict[str, Any]  # one line of the index
_MOST_BYTES = 8 << 20  # of run.json: ten thousand tensors take one million
_LONGEST_LINE = 1 << 20
_MOST_CHAINS = 100_000  # if the manifest has no settings of chains to compare their number with


def load_json(text: bytes | str) -> Any:
    """Strict JSON: anything wrong is a ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


Check = Callable[[Any], bool]


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 63


def _is_positive(value: Any) -> bool:
    return _is_count(value, 1)


def _is_number(value: Any) -> bool:
    """None, or a number; JSON has integers of any size, which may be below infinity and yet exceed every float."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (is_number and abs(value) <= sys.float_info.max)


def _is_dtype(value: Any) -> bool:
    kind = getattr(torch, value, None) if isinstance(value, str) else None
    return value is None or (isinstance(kind, torch.dtype) and kind.is_floating_point and can_store(kind))


def _is_tensor(value: Any) -> bool:
    """A dtype and a shape."""
    if not (isinstance(value, list | tuple) and len(value) == 2):
        return False
    dtype, shape = value
    return isinstance(dtype, str) and isinstance(shape, list | tuple) and all(map(_is_count, shape))


def _is_settings(value: Any) -> bool:
    return isinstance(value, dict) and "inverse_temperature" in value and all(map(_is_number, value.values()))


def _is(kind: type) -> Check:
    return lambda value: isinstance(value, kind)


_PARTS: dict[str, dict[str, Check]] = {
    "": {
        "keep": lambda x: x in ("draws", "moments") or _is_positive(x),
        "dtype": _is_dtype,
        "has_targets": _is(bool),
        "num_parts": _is_positive,
        "created": _is(str),
        "target": _is(str),
        "target_at_first": _is(str),
        "chains": lambda x: isinstance(x, list) and all(map(_is_settings, x)),
    },
    "configuration": {"num_chains": _is_positive, "num_draws": _is_positive, "stacked": _is(bool), "scan": _is(dict)},
    "data": {"num_data": _is_count, "fingerprint": _is(str), "all_rows": lambda x: x is None or isinstance(x, str)},
    "model": {"tensors": lambda x: isinstance(x, dict) and all(map(_is_tensor, x.values()))},
    "likelihood": {"name": _is(str), "noise": _is_number},
    "versions": {"adammcmc": _is(str)},
}
"""The entries of every manifest, by part, and what each must be."""
_OPTIONAL = ("stacked", "scan", "noise", "chains", "all_rows")

_COLUMNS: dict[str, Check] = {
    "step": _is_count,
    "loss": _is_number,
    "potential": _is_number,
    "acceptance_rate": _is_number,
    "num_accepted": _is_count,
    "is_accepted": _is(bool),
    "seconds": lambda x: x is not None and _is_number(x),
    "health": lambda x: isinstance(x, dict) and _is_count(x.get("num_steps")) and all(map(_is_number, x.values())),
    "bytes": _is_count,
    "crc32": lambda x: _is_count(x) and x < 1 << 32,
}
"""The entries of a record, and what each must be."""
_REQUIRED = ("step", "loss", "health")


def _check_entries(found: dict[str, Any], checks: dict[str, Check], required: Collection[str], where: str = "") -> None:
    for name, is_right in checks.items():
        if name in found and not is_right(found[name]):
            raise ValueError(f"has {name} = {str(found[name])[:80]}{where}")
        if name not in found and name in required:
            raise ValueError(f"has no '{name}'{where}")


def manifest_text(manifest: dict[str, Any]) -> bytes:
    """The content of `run.json`, with its checksum."""
    content = {"what": "a run of adammcmc", "format": FORMAT, **{k: v for k, v in manifest.items() if k != "crc32"}}
    content["crc32"] = _manifest_crc(content)
    return json.dumps(content, indent=2, allow_nan=False).encode() + b"\n"


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the run in this folder; an error with the reason if there is no run that can be read."""
    file = path / MANIFEST
    if not os.path.lexists(file):
        what = "does not exist" if not path.exists() else "holds no run of adammcmc (it has no run.json)"
        if (path.parent / MANIFEST).exists():
            what += f"; the run is '{path.parent}'"
        raise StoreMismatch(f"'{path}' {what}.")
    try:
        with open(open_plain(file), "rb") as opened:
            text = opened.read(_MOST_BYTES + 1)
    except NotPlain as error:
        raise StoreCorrupt(f"{error.strerror}.") from error
    if len(text) > _MOST_BYTES:
        raise StoreCorrupt(f"'{file}' is damaged: it has more than {_MOST_BYTES:,} bytes.")
    try:
        manifest = load_json(text)
    except ValueError as error:
        raise StoreCorrupt(f"'{file}' is not JSON: {error}.") from error
    if not isinstance(manifest, dict) or "format" not in manifest or "keep" not in manifest:
        raise StoreMismatch(f"'{file}' is a file of some other program: it names no format.")
    number, versions = manifest["format"], manifest.get("versions")
    if not _is_positive(number):
        raise StoreCorrupt(f"'{file}' is damaged: its format is {number!r}, and must be an integer of at least 1.")
    if number != FORMAT:
        version = versions.get("adammcmc", "?") if isinstance(versions, dict) else "?"
        newer, older = ("a newer", "Update adammcmc"), ("an older", "Keep the version that made it, or run again")
        age, remedy = newer if number > FORMAT else older
        raise StoreMismatch(
            f"'{path}' has format {number} of {age} version of adammcmc ({version}); this one reads format {FORMAT}. {remedy}."
        )
    if manifest.get("crc32") != _manifest_crc(manifest):
        raise StoreCorrupt(f"'{file}' is damaged, or was edited by hand: its content does not match its checksum.")
    _check_manifest(manifest, path)
    return manifest


def _check_manifest(manifest: dict[str, Any], path: Path) -> None:
    """Refuse a manifest that lacks entries that every run has, or has values of other kinds in their places."""
    try:
        for part, checks in _PARTS.items():
            if not isinstance(found := manifest.get(part) if part else manifest, dict):
                raise ValueError(f"has no '{part}'")
            required = [name for name in checks if name not in _OPTIONAL]
            _check_entries(found, checks, required, f" in {part}" if part else "")
        number, chains = manifest["configuration"]["num_chains"], manifest.get("chains")
        if chains is not None and len(chains) != number:
            raise ValueError(f"has num_chains = {number}, and the settings of {len(chains)} chains")
        if chains is None and number > _MOST_CHAINS:
            raise ValueError(f"has num_chains = {number}")
    except ValueError as error:
        raise StoreCorrupt(f"'{path / MANIFEST}' is damaged: it {error}.") from error


def _manifest_crc(manifest: dict[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "crc32"}
    return f"{zlib.crc32(json.dumps(content, sort_keys=True, separators=(',', ':')).encode()):08x}"


class Lines(NamedTuple):
    """The intact part of an index."""

    records: list[Record]
    problem: str | None = None  # what is wrong with the line after them; None if there is none
    is_unfinished: bool = False  # whether the last line has no end: its writer was interrupted, and it does not count


def draw_name(draw: int) -> str:
    """The file of a draw, in the folder of its chain."""
    return f"draw-{draw:06d}.safetensors"


def line_of(record: Record) -> bytes:
    """A record as a line of the index, with its checksum and line end."""
    text = json.dumps(record, allow_nan=False)
    return f'{text[:-1]}, "line_crc32": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def read_lines(file: Path, chain: int, *, has_files: bool) -> Lines:
    """The index of a chain up to its first bad line; `has_files` says whether draws have files."""
    records: list[Record] = []
    try:
        descriptor = open_plain(file)
    except FileNotFoundError:
        return Lines(records)
    for line in _lines(descriptor):
        if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
            return Lines(records, is_unfinished=True)
        try:
            record = _read_line(line)
            check_record(record, chain, len(records), has_files)
        except ValueError as error:
            return Lines(records, f"'{file}' is damaged: line {len(records) + 1} {error}")
        records.append(record)
    return Lines(records)


def read_good_lines(file: Path, chain: int, *, has_files: bool) -> dict[int, Record]:
    """The records of all good lines of an index, by draw, wherever they are. Arguments as in `read_lines`."""
    found: dict[int, Record] = {}
    try:
        descriptor = open_plain(file)
    except OSError:
        return found
    for line in _lines(descriptor):
        if not line.endswith(b"\n"):
            break  # unfinished, or not an index
        with suppress(ValueError):
            record = _read_line(line)
            check_record(record, chain, record.get("draw"), has_files)
            found.setdefault(record["draw"], record)
    return found


def _lines(descriptor: int) -> Iterator[bytes]:
    """Lines with their ends, of bounded length."""
    with open(descriptor, "rb") as lines:
        while line := lines.readline(_LONGEST_LINE):
            yield line


_SEAL_LENGTH = len(', "line_crc32": "00000000"}\n')
_LINE_SEAL = re.compile(rb', "line_crc32": "([0-9a-f]{8})"\}\n')


def _read_line(line: bytes) -> Record:
    if (seal := _LINE_SEAL.fullmatch(line, max(0, len(line) - _SEAL_LENGTH))) is None:
        raise ValueError("has no checksum")
    line = line[: seal.start()] + b"}"
    if f"{zlib.crc32(line):08x}".encode() != seal[1]:
        raise ValueError("does not match its checksum")
    try:
        return dict(load_json(line))  # JSON that ends with "}" is an object
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error


def check_record(record: Record, chain: int, draw: Any, has_files: bool) -> None:
    """Refuse, with a ValueError, anything but the record of this draw."""
    if record.get("draw") != draw or record.get("chain") != chain or not _is_count(draw):
        raise ValueError(f"should be draw {draw} of chain {chain}: lines are missing or damaged")
    _check_entries(record, _COLUMNS, _REQUIRED)
    if "file" in record:
        if record["file"] != draw_name(draw) or not {"bytes", "crc32"} <= record.keys():
            raise ValueError(f"must name the file {draw_name(draw)}, its bytes and crc32")
    elif has_files and "is_set_aside" not in record:
        raise ValueError("names no file")
