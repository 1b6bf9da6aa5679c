"""Draws and checkpoints on disk (or in memory): append, read, resume.

    run.json                         what was run: target, configuration, versions, data fingerprint, tensors of the model
    lock                             held by the process that writes
    chain-0/index.jsonl              one line a draw: draw, chain, step, loss, acceptance_rate, ..., file, bytes, crc32
    chain-0/draw-000000.safetensors  parameters and buffers of one draw, under the names of `model.state_dict()`
    chain-0/checkpoint.safetensors   all that the chain needs to go on; its metadata entry "state" is JSON
    checkpoint.safetensors           of chains that run as one stack: all that they need, in place of a file for each

A file appears under its name only when it is whole, and a draw exists when its line in the index is whole. The checkpoint is
written last: a run that was killed goes on from it, and makes again, bit for bit, what came after.
No pickle anywhere.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils import _pytree

from adammcmc.encoding import HostCopies, Tensors, encode, read_state, safetensors_parts, strict_json
from adammcmc.errors import StoreCorrupt, StoreFull, StoreLocked, StoreMismatch

__all__ = [
    "FORMAT",
    "FolderStore",
    "MemoryStore",
    "Record",
    "Store",
    "check_manifest",
    "check_space",
    "format_bytes",
    "read_manifest",
]

FORMAT = 1
Record = dict[str, Any]
"""One line of the index."""
_PARTS: dict[str, tuple[str, ...]] = {
    "": ("keep", "dtype", "has_targets", "num_parts", "target", "target_at_first"),
    "configuration": ("num_chains", "num_draws"),
    "data": ("num_data", "fingerprint"),
    "model": ("tensors",),
    "likelihood": ("name",),
    "versions": ("adammcmc",),
}
"""What the manifest of every run has: of itself, and of its parts."""
_MANIFEST, _LOCK, _INDEX, _CHECKPOINT = "run.json", "lock", "index.jsonl", "checkpoint.safetensors"


class Store(ABC):
    """Where the draws of a run are kept.

    Args:
        manifest: what was run, as JSON.
    """

    def __init__(self, manifest: dict[str, Any]) -> None:
        self.manifest = manifest
        self._index: dict[int, list[Record]] = {}

    @property
    def index(self) -> list[Record]:
        """Of all chains, one after the other."""
        return [record for chain in sorted(self._index) for record in self._index[chain]]

    def num_draws(self, chain: int) -> int:
        """How many draws this chain has made, whether their weights were kept or not."""
        return len(self._index.get(chain, []))

    def kept(self) -> list[Record]:
        """The draws whose weights are here."""
        keep = self.manifest["keep"]
        if keep == "moments":
            return []
        chains = [self._index[chain] for chain in sorted(self._index)]
        return [record for chain in chains for record in (chain if keep == "draws" else chain[-keep:])]

    @abstractmethod
    def append(self, record: Record, tensors: Tensors) -> None:
        """One more draw of chain `record["chain"]`."""

    @abstractmethod
    def load(self, record: Record) -> dict[str, Tensor]:
        """The weights of a draw, on the host."""

    @abstractmethod
    def save(self, chain: int | None, state: dict[str, Any]) -> None:
        """All that a chain needs to go on, in place of what was saved before; None: that a stack of all chains needs."""

    def commit(self, record: Record, tensors: Tensors, state: dict[str, Any]) -> None:
        """A draw, and the state of its chain after it."""
        self.append(record, tensors)
        self.save(record["chain"], state)

    def commit_all(self, records: list[Record], tensors: Tensors, state: dict[str, Any] | None) -> None:
        """A draw of every chain of a stack, its tensors (chains, ...), and the state of the stack after it (None: not now)."""
        host = {name: x.detach().cpu() for name, x in tensors.items()}
        for row, record in enumerate(records):
            self.append(record, {name: x[row] for name, x in host.items()})
        if state is not None:
            self.save(None, state)  # last: before it is there, none of these draws counts

    @abstractmethod
    def saved(self, chain: int | None) -> dict[str, Any] | None:
        """What was saved last; None before the first time."""

    def flush(self) -> None:  # noqa: B027  (memory has nothing to wait for)
        """Wait until all that was committed is kept; raise what went wrong with it."""

    def close(self) -> None:  # noqa: B027  (memory has nothing to close)
        """No more writing."""


class MemoryStore(Store):
    """In memory, for runs without a path."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        super().__init__(manifest)
        self._tensors: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._saved: dict[int | None, dict[str, Any]] = {}

    def append(self, record: Record, tensors: Tensors) -> None:
        chain, draw, keep = record["chain"], record["draw"], self.manifest["keep"]
        if keep != "moments":
            self._tensors[chain, draw] = _on_host(tensors, self.manifest["dtype"])  # first: there may be no memory for it
        self._index.setdefault(chain, []).append(strict_json(record))
        if isinstance(keep, int):
            self._tensors.pop((chain, draw - keep), None)

    def load(self, record: Record) -> dict[str, Tensor]:
        return self._tensors[record["chain"], record["draw"]]

    def save(self, chain: int | None, state: dict[str, Any]) -> None:
        self._saved[chain] = _pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), state)

    def saved(self, chain: int | None) -> dict[str, Any] | None:
        return self._saved.get(chain)


class FolderStore(Store):
    """In a folder; see the top of this file for its layout.

    Args:
        path: the folder.
        manifest: of a new run, which begins to exist with `write_manifest`; None opens the run that is there.
        writes: whether to write: takes the lock, and removes what an interrupted write left.
    """

    def __init__(self, path: str | Path, manifest: dict[str, Any] | None = None, *, writes: bool = False) -> None:
        self.path = Path(path).expanduser().absolute()  # a run may change its folder
        self._unlock: Callable[[], Any] = _nothing
        self._verified: set[str] = set()
        self._folders: dict[int, Path] = {}
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._host = HostCopies()
        if manifest is not None:
            self._begin(manifest)
        else:
            if writes:
                read_manifest(self.path)  # a folder that holds no run is not touched
                self._take_lock()
            try:
                super().__init__(read_manifest(self.path))
                self._read_index(writes)
            except BaseException:
                self.close()
                raise

    def _begin(self, manifest: dict[str, Any]) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise StoreMismatch(f"'{self.path}' is a file: `path` must be a folder for the run.")
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        try:
            if (self.path / _MANIFEST).exists():
                raise StoreMismatch(
                    f"'{self.path}' holds a run already. Pass resume=True to go on with it, or choose another path."
                )
            # a run that was killed before it began has left first checkpoints at most
            files = [p.relative_to(self.path) for p in self.path.rglob("*") if p.is_file() and p.suffix != ".tmp"]
            if foreign := [str(p) for p in sorted(files) if p.name not in (_LOCK, _CHECKPOINT)]:
                raise StoreMismatch(
                    f"'{self.path}' is not empty and holds no run (it has '{foreign[0]}'). Choose another path."
                )
            super().__init__(manifest)
        except BaseException:
            self.close()
            raise

    def write_manifest(self) -> None:
        """Write down what was run, anew."""
        text = json.dumps({"what": "a run of adammcmc", "format": FORMAT, **self.manifest}, indent=2, allow_nan=False)
        self._write_whole(self.path / _MANIFEST, [text.encode() + b"\n"])

    def append(self, record: Record, tensors: Tensors) -> None:
        chain, draw, keep = record["chain"], record["draw"], self.manifest["keep"]
        folder = self._folder(chain)
        if keep != "moments":
            file = folder / _draw_name(draw)
            size, crc = self._write_whole(file, safetensors_parts(tensors, dtype=self.manifest["dtype"]))
            record = {**record, "file": file.name, "bytes": size, "crc32": crc}
        record = strict_json(record)
        self._append_line(folder / _INDEX, json.dumps(record, allow_nan=False))
        self._index.setdefault(chain, []).append(record)

    def commit(self, record: Record, tensors: Tensors, state: dict[str, Any]) -> None:
        """As append and save. From an accelerator it is copied at once and written while the chain goes on.

        One commit at a time: the next one waits for this one, and raises what went wrong with it.
        """
        self.flush()
        if self._is_on_host(tensors):
            super().commit(record, tensors, state)
            return
        copies, saved = self._host((dict(tensors), state))
        self._writer = self._writer or ThreadPoolExecutor(max_workers=1, thread_name_prefix="adammcmc-store")
        self._pending = self._writer.submit(super().commit, record, copies, saved)

    def commit_all(self, records: list[Record], tensors: Tensors, state: dict[str, Any] | None) -> None:
        """As `commit`: from an accelerator it is copied at once and written while the chains go on."""
        self.flush()
        if self._is_on_host(tensors):
            super().commit_all(records, tensors, state)
            return
        copies, saved = self._host((dict(tensors), state))
        self._writer = self._writer or ThreadPoolExecutor(max_workers=1, thread_name_prefix="adammcmc-store")
        self._pending = self._writer.submit(super().commit_all, records, copies, saved)

    @staticmethod
    def _is_on_host(tensors: Tensors) -> bool:
        return all(x.device.type == "cpu" for x in tensors.values())

    def flush(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def load(self, record: Record) -> dict[str, Tensor]:
        file = self._file(record)
        if isinstance(self.manifest["keep"], int) and not file.exists():
            raise StoreMismatch(f"draw {record['draw']} was dropped by its run since: open the posterior again.")
        try:
            if str(file) not in self._verified and _crc(file) != record["crc32"]:
                raise StoreCorrupt(f"'{file}' is damaged: its checksum is not the one in the index.")
            self._verified.add(str(file))
            with safe_open(file, framework="pt") as content:
                return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  (no dictionary)
        except (OSError, SafetensorError) as error:
            raise StoreCorrupt(f"'{file}' cannot be read: {error}.") from error

    def save(self, chain: int | None, state: dict[str, Any]) -> None:
        folder = self.path if chain is None else self._folder(chain)
        text, tensors = encode(state)
        metadata = {"format": str(FORMAT), "state": text}
        self._write_whole(folder / _CHECKPOINT, safetensors_parts(tensors, metadata))
        for one in self._index if chain is None else [chain]:
            self._drop_old(one)  # only now: the checkpoint before this one needed them

    def saved(self, chain: int | None) -> dict[str, Any] | None:
        file = (self.path if chain is None else self.path / f"chain-{chain}") / _CHECKPOINT
        if not file.exists():
            return None
        try:
            return cast(dict[str, Any], read_state(file))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise StoreCorrupt(f"the checkpoint '{file}' cannot be read: {error}. The draws are not affected.") from error

    def rewind(self, chain: int, num_draws: int) -> None:
        """Forget the draws that came after the checkpoint: the chain makes them again."""
        records = self._index.get(chain, [])
        if len(records) < num_draws:
            raise StoreCorrupt(
                f"the index of chain {chain} in '{self.path}' has {len(records)} draws, its checkpoint {num_draws}: lines are "
                "missing."
            )
        if len(records) == num_draws:
            return
        kept = records[:num_draws]
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in kept)
        self._write_whole(self.path / f"chain-{chain}" / _INDEX, [text.encode()])
        self._index[chain] = kept
        for record in records[num_draws:]:
            if "file" in record:
                (self.path / f"chain-{chain}" / record["file"]).unlink(missing_ok=True)

    def close(self) -> None:
        try:
            self.flush()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None
            self._unlock()

    def _folder(self, chain: int) -> Path:
        if chain not in self._folders:
            self._folders[chain] = self.path / f"chain-{chain}"
            self._folders[chain].mkdir(exist_ok=True)
        return self._folders[chain]

    # --- the files ----------------------------------------------------------------------------------------------

    def _take_lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            return
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
        _locks.add(lock)
        self._unlock = weakref.finalize(self, _let_go, lock)  # the lock goes with its file, whatever ends the process
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise StoreLocked(f"another process writes to '{self.path}'. Wait for it, or choose another path.") from error

    def _read_index(self, writes: bool) -> None:
        """The index as it is; read again if its run, which keeps the last draws only, has dropped some since."""
        for attempt in range(5):
            self._read_lines(writes)
            missing = [file for record in self.kept() if not (file := self._file(record)).exists()]
            if not missing:
                break
            if attempt == 4 or writes or not isinstance(self.manifest["keep"], int):
                raise StoreCorrupt(f"'{missing[0]}' is missing, which the index names.")
        for record in self.kept():
            with suppress(FileNotFoundError):
                if (size := self._file(record).stat().st_size) != record["bytes"]:
                    raise StoreCorrupt(f"'{self._file(record)}' has {size} bytes, the index says {record['bytes']}.")

    def _file(self, record: Record) -> Path:
        return self.path / f"chain-{record['chain']}" / str(record["file"])

    def _read_lines(self, writes: bool) -> None:
        chains = {int(match[1]): p for p in self.path.iterdir() if (match := re.fullmatch(r"chain-(\d+)", p.name))}
        for chain, folder in sorted(chains.items()):
            file = folder / _INDEX
            lines = file.read_bytes().split(b"\n") if file.exists() else [b""]
            unfinished = lines.pop()  # without a line's end: its writer was interrupted, and it does not count
            if writes:
                if unfinished:
                    with open(file, "r+b") as index:
                        index.truncate(sum(len(line) + 1 for line in lines))
                for leftover in folder.glob("*.tmp"):
                    leftover.unlink()
            try:
                self._index[chain] = [json.loads(line) for line in lines]
            except ValueError as error:
                raise StoreCorrupt(f"'{file}' has a line that is not JSON: {error}.") from error
            if [r.get("draw") for r in self._index[chain]] != list(range(len(lines))):
                raise StoreCorrupt(f"'{file}' does not count its draws 0, 1, 2, ...: lines are missing or damaged.")

    def _write_whole(self, file: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, int]:
        """All of a file or nothing: written under another name, then renamed. Returns its size and its checksum."""
        temporary = file.with_name(file.name + ".tmp")
        size = checksum = 0
        with self._watching_space(file):
            try:
                with open(temporary, "wb", buffering=0) as written:
                    for part in _gathered(parts):
                        _write_all(written, part)
                        size, checksum = size + len(part), zlib.crc32(part, checksum)
                    os.fsync(written.fileno())
                os.replace(temporary, file)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
        return size, checksum

    def _append_line(self, file: Path, line: str) -> None:
        with self._watching_space(file), open(file, "ab", buffering=0) as index:
            size = index.seek(0, os.SEEK_END)
            try:
                _write_all(index, line.encode() + b"\n")
            except BaseException:
                with suppress(OSError):
                    index.truncate(size)
                raise

    @contextmanager
    def _watching_space(self, file: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StoreFull(
                    errno.ENOSPC,
                    f"the disk is full: '{file}' could not be written. All earlier draws are kept; make room and pass "
                    "resume=True to go on",
                ) from error
            raise

    def _drop_old(self, chain: int) -> None:
        keep = self.manifest["keep"]
        if not isinstance(keep, int):
            return
        for record in self._index.get(chain, [])[-2 * keep - 2 : -keep]:
            (self.path / f"chain-{chain}" / record["file"]).unlink(missing_ok=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """What was run in this folder; refused with the reason if it holds no run that can be read."""
    file = path / _MANIFEST
    if not file.exists():
        what = "does not exist" if not path.exists() else "holds no run of adammcmc (it has no run.json)"
        if (path.parent / _MANIFEST).exists():
            what += f"; the run is '{path.parent}'"
        raise StoreMismatch(f"'{path}' {what}.")
    try:
        manifest = json.loads(file.read_bytes())
    except ValueError as error:
        raise StoreCorrupt(f"'{file}' is not JSON: {error}.") from error
    if not isinstance(manifest, dict) or "format" not in manifest or "keep" not in manifest:
        raise StoreMismatch(f"'{file}' is of some other program: it names no format.")
    if manifest["format"] > FORMAT:
        version = manifest.get("versions", {}).get("adammcmc", "?")
        raise StoreMismatch(
            f"'{path}' has format {manifest['format']} of a newer version of adammcmc ({version}); this one reads up to "
            f"{FORMAT}. Update adammcmc."
        )
    return cast(dict[str, Any], manifest)


def check_manifest(manifest: dict[str, Any], path: str | Path) -> None:
    """Refuse a manifest that is JSON but has lost parts that every run has."""
    for part, names in _PARTS.items():
        if not isinstance(found := manifest.get(part) if part else manifest, dict):
            raise StoreCorrupt(f"'{Path(path) / _MANIFEST}' is damaged: it has no '{part}'.")
        for name in names:
            if name not in found:
                raise StoreCorrupt(f"'{Path(path) / _MANIFEST}' is damaged: it has no '{name}'{f' in {part}' if part else ''}.")


def check_space(path: Path, needed: int) -> None:
    """Refuse a run that the disk has no room for."""
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise StoreFull(
            errno.ENOSPC,
            f"the run would write {format_bytes(needed)}, and '{path}' has {format_bytes(free)} left. Keep fewer draws "
            "(`num_draws`, keep=k for the last k, keep='moments'), or store them with dtype=torch.bfloat16",
        )


def format_bytes(number: int) -> str:
    """For people."""
    size, units = float(number), ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.3g} {units[0]}"


# --- small things ---------------------------------------------------------------------------------------------------------


_locks: set[int] = set()


def _let_go(lock: int) -> None:
    if lock in _locks:
        _locks.discard(lock)
        os.close(lock)


def _forget_locks() -> None:
    """In a forked process (a worker that loads data): it must not hold a lock that its parent, when killed, let go."""
    for lock in _locks:
        with suppress(OSError):
            os.close(lock)
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def _nothing() -> None:
    pass


def _gathered(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes with small parts joined: one call of the system for many of them."""
    small: list[bytes | memoryview] = []
    for part in parts:
        if len(part) < 1 << 16:
            small.append(part)
            continue
        if small:
            yield b"".join(small)
            small = []
        yield part
    if small:
        yield b"".join(small)


def _write_all(file: RawIOBase, content: bytes | memoryview) -> None:
    """A system may take a part at a time, and says that the disk is full by taking none."""
    rest = memoryview(content)
    while len(rest) > 0:
        taken = file.write(rest)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[taken:]


def _draw_name(draw: int) -> str:
    return f"draw-{draw:06d}.safetensors"


def _crc(file: Path) -> int:
    checksum = 0
    with open(file, "rb") as content:
        while part := content.read(1 << 22):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _on_host(tensors: Tensors, dtype: str | None) -> dict[str, Tensor]:
    """Copies that share nothing, floating ones in the dtype that was asked for."""
    kind = None if dtype is None else getattr(torch, dtype)
    return {
        name: x.detach().to("cpu", kind if kind is not None and x.is_floating_point() else x.dtype, copy=True).contiguous()
        for name, x in tensors.items()
    }
