"""Draws and checkpoints on disk (or in memory): append, read, resume.

    run.json                                 what was run: target, configuration, versions, data fingerprint, model tensors
    lock                                     held by the process that writes
    chain-0/index.jsonl                      one line a draw: draw, chain, step, loss, ..., file, bytes, crc32, line_crc32
    chain-0/draw-000000.safetensors          parameters and buffers of one draw, under the names of `model.state_dict()`
    chain-0/checkpoint.safetensors           all that the chain needs to go on; its metadata entry "state" is JSON
    chain-0/checkpoint.previous.safetensors  the one before, in case the newest is damaged
    checkpoint.safetensors                   of chains that run as one stack: all that they need, in place of a file for each

A file appears under its name only when it is whole, and a draw exists when its line in the index is whole. Each is synced to
the disk before the next is begun: draw, line of the index, checkpoint. So a run that was killed, by power loss too, goes on
from its checkpoint, and makes again, bit for bit, what came after.

Every file has a checksum (format 1 had them for draws only; a run of format 1 stays one). What is read is not trusted: names of
files follow from numbers, links and pipes are refused, and JSON is checked (`records.py`). No pickle anywhere.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils import _pytree

from adammcmc.errors import StoreCorrupt, StoreFull, StoreLocked, StoreMismatch, warn
from adammcmc.posterior.store.encoding import (
    HostCopies,
    Tensors,
    checksum,
    encode,
    read_state,
    safetensors_parts,
    strict_json,
    write_parts,
)
from adammcmc.posterior.store.records import (
    FORMAT,
    MANIFEST,
    Lines,
    Record,
    check_manifest,
    draw_name,
    line_of,
    manifest_text,
    read_lines,
    read_manifest,
)
from adammcmc.posterior.store.whole import NotPlain, make_folder, open_new, open_plain, put, sync_folder

__all__ = [
    "CHECKPOINT",
    "FORMAT",
    "PREVIOUS",
    "FolderStore",
    "MemoryStore",
    "Record",
    "Store",
    "check_manifest",
    "check_space",
    "format_bytes",
    "read_manifest",
]

CHECKPOINT, PREVIOUS = "checkpoint.safetensors", "checkpoint.previous.safetensors"
_LOCK, _INDEX = "lock", "index.jsonl"


class Store(ABC):
    """Where the draws of a run are kept.

    Args:
        manifest: what was run, as JSON.
    """

    path: Path | None = None
    """The folder of the draws; None in memory."""

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

    def commit(self, records: Sequence[Record], tensors: Tensors, state: dict[str, Any] | None) -> None:
        """A draw of one chain or of all, its tensors (chains, ...), and the state after it (None: it is not saved now)."""
        host = {name: x.detach().cpu() for name, x in tensors.items()}
        for row, record in enumerate(records):
            self.append(record, {name: x[row] for name, x in host.items()})
        if state is not None:  # last: without it, none of these draws counts
            self.save(self._key_of(records), state)

    @abstractmethod
    def saved(self, chain: int | None) -> dict[str, Any] | None:
        """What was saved last; None before the first time."""

    def restore(self, key: int | None, chains: Sequence[int]) -> dict[str, Any] | None:
        """The state to go on from, of one chain or of a stack of all `chains`; draws that came after it are forgotten."""
        return self.saved(key)

    @property
    def is_stacked(self) -> bool:
        """Whether all chains have one checkpoint."""
        return bool(self.manifest["configuration"].get("stacked", False))

    def _key_of(self, records: Sequence[Record]) -> int | None:
        return None if self.is_stacked else records[0]["chain"]

    @property
    def is_durable(self) -> bool:
        """Whether what is committed outlives the process."""
        return self.path is not None

    def write_manifest(self) -> None:  # noqa: B027  (memory has nothing to write)
        """Store the manifest, in place of what was stored."""

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
        self.path: Path = Path(path).expanduser().absolute()  # a run may change its folder
        self._unlock: Callable[[], Any] = _nothing
        self._verified: set[str] = set()
        self._folders: dict[int, Path] = {}
        self._left_out: dict[tuple[int, int], str] = {}
        """Draws whose files cannot be used, and why."""
        self._num_saved: dict[int, int] = {}
        """How many draws a chain had at its last checkpoint."""
        self._num_dropped: dict[int, int] = {}
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
        make_folder(self.path)
        self._take_lock()
        try:
            if (self.path / MANIFEST).exists():
                raise StoreMismatch(
                    f"'{self.path}' holds a run already. Pass resume=True to go on with it, or choose another path."
                )
            # a run that was killed before it began has left first checkpoints at most
            files = [p.relative_to(self.path) for p in self.path.rglob("*") if p.is_file() and p.suffix != ".tmp"]
            if foreign := [str(p) for p in sorted(files) if p.name not in (_LOCK, CHECKPOINT, PREVIOUS)]:
                raise StoreMismatch(
                    f"'{self.path}' is not empty and holds no run (it has '{foreign[0]}'). Choose another path."
                )
            super().__init__(manifest)
            chains = self._chain_folders()
            for folder in (self.path, *chains.values()):
                _remove_leftovers(folder)
                for name in (CHECKPOINT, PREVIOUS):  # of another run, maybe: this one must never fall back on them
                    (folder / name).unlink(missing_ok=True)
            for folder in chains.values():
                with suppress(OSError):
                    folder.rmdir()
        except BaseException:
            self.close()
            raise

    @property
    def is_sealed(self) -> bool:
        """Whether all files of this run have checksums: since format 2. A run of format 1 goes on as one."""
        return bool(self.manifest.get("format", FORMAT) > 1)

    def write_manifest(self) -> None:
        """Write down what was run, anew."""
        self._write_whole(self.path / MANIFEST, [manifest_text(self.manifest)])

    def kept(self) -> list[Record]:
        return [r for r in super().kept() if "file" in r and (r["chain"], r["draw"]) not in self._left_out]

    def append(self, record: Record, tensors: Tensors) -> None:
        chain, draw, keep = record["chain"], record["draw"], self.manifest["keep"]
        folder, record = self._folder(chain), strict_json(record)
        if keep != "moments":
            # an index that is lost can be made again from the draws; how long they took is not a part of what they are
            text = json.dumps({key: value for key, value in record.items() if key != "seconds"}, allow_nan=False)
            parts = safetensors_parts(
                tensors,
                {"record": text} if self.is_sealed else None,
                dtype=self.manifest["dtype"],
                is_sealed=self.is_sealed,
            )
            size, crc = self._write_whole(folder / draw_name(draw), parts)
            record = {**record, "file": draw_name(draw), "bytes": size, "crc32": crc}
        self._append_line(folder / _INDEX, line_of(record, is_sealed=self.is_sealed))
        self._index.setdefault(chain, []).append(record)

    def commit(self, records: Sequence[Record], tensors: Tensors, state: dict[str, Any] | None) -> None:
        """As append and save. From an accelerator everything is copied at once, and written while the chains continue.

        One commit at a time: the next one waits for this one, and raises its error.
        """
        self.flush()
        if self._is_on_host(tensors):
            super().commit(records, tensors, state)
            return
        copies, saved = self._host((dict(tensors), state))
        self._writer = self._writer or ThreadPoolExecutor(max_workers=1, thread_name_prefix="adammcmc-store")
        self._pending = self._writer.submit(super().commit, records, copies, saved)

    @staticmethod
    def _is_on_host(tensors: Tensors) -> bool:
        return all(x.device.type == "cpu" for x in tensors.values())

    def flush(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def load(self, record: Record) -> dict[str, Tensor]:
        file = self._file(record)
        remedy = f"`adammcmc check {self.path} --repair` sets it aside, and the other draws stay usable"
        try:
            if str(file) not in self._verified:
                computed, written = checksum(file)
                if computed != record["crc32"] or (written is None and self.is_sealed) or written not in (None, computed):
                    raise StoreCorrupt(f"'{file}' is damaged: its checksum is not the one in the index. {remedy}.")
            self._verified.add(str(file))
            with safe_open(file, framework="pt") as content:
                names = list(content.keys())
                shapes = {name: list(content.get_slice(name).get_shape()) for name in names}
                right = {name: list(shape) for name, (_, shape) in self.manifest["model"]["tensors"].items()}
                if right and shapes != right:  # before anything is read: a file may claim tensors of any size
                    raise StoreCorrupt(f"'{file}' is not of this network: run.json names other tensors. {remedy}.")
                return {name: content.get_tensor(name) for name in names}
        except StoreCorrupt:
            raise
        except (OSError, SafetensorError, RuntimeError) as error:  # torch maps the file once more, and has errors of its own
            if isinstance(self.manifest["keep"], int) and not os.path.lexists(file):
                words = f"draw {record['draw']} was dropped by its run since: open the posterior again."
                raise StoreMismatch(words) from error
            raise StoreCorrupt(f"'{file}' cannot be read: {error}. {remedy}.") from error

    # --- the checkpoints ----------------------------------------------------------------------------------------

    def save(self, chain: int | None, state: dict[str, Any]) -> None:
        folder = self.path if chain is None else self._folder(chain)
        text, tensors = encode({**state, "of": self._owner(folder)} if self.is_sealed else state)
        # how many draws it counts on stands by itself too, so that a reader need not read all of it to know
        own = {"num_draws": str(state.get("num_draws", 0)), "state": text}
        metadata = own if self.is_sealed else {"format": "1", "state": text}
        parts = safetensors_parts(tensors, metadata, is_sealed=self.is_sealed)
        self._write_whole(folder / CHECKPOINT, parts, keep_as=folder / PREVIOUS)
        for one in self._index if chain is None else [chain]:
            self._drop_old(one)  # only now: the checkpoint that is gone needed them

    def saved(self, chain: int | None) -> dict[str, Any] | None:
        """What was saved last, or, with a warning, what was saved before it, if it is damaged."""
        if (chain is None) != self.is_stacked:
            return None
        chains = sorted(self._index) if chain is None else [chain]
        problems, is_damaged = [], False
        for file in self._checkpoints(chain):
            try:
                state = self.read_checkpoint(file)
            except StoreCorrupt as error:
                problems.append(str(error))
                is_damaged = True
                continue
            if state is None:
                problems.append(f"the checkpoint '{file}' is missing.")
                continue
            if problems:
                warn(f"{problems[0]} The one before it is used.")
            elif (most := max(map(self.num_draws, chains), default=0)) > state["num_draws"]:
                warn(f"the checkpoint '{file}' is of draw {state['num_draws']} of {most}: so are health and moments.")
            return state
        if is_damaged:
            raise StoreCorrupt(problems[0])
        if any(map(self.num_draws, chains)):
            warn(f"{problems[0]} Health and moments are unknown.")
        return None

    def restore(self, key: int | None, chains: Sequence[int]) -> dict[str, Any] | None:
        """From the newest checkpoint that is whole and whose draws the index has; if it is the one before, with a warning."""
        newest, previous = self._checkpoints(key)
        problems = []
        for file in (newest, previous):
            try:
                state = self._usable(file, chains)
            except StoreCorrupt as error:
                problems.append(str(error))
                continue
            if state is None:
                continue
            if file == previous:
                why = problems[0] if problems else f"'{newest}' is missing."
                warn(f"{why} The run goes on from the checkpoint before it.")
                if os.path.lexists(newest):
                    set_aside(newest)
                self._keep_as(previous, newest)
                sync_folder(newest.parent)
            for chain in chains:
                self.rewind(chain, state["num_draws"])
            return state
        if problems:
            raise StoreCorrupt(f"{problems[0]} `adammcmc check {self.path} --repair` recovers what it can.")
        return None

    def _owner(self, folder: Path) -> str:
        """Which run and which chain a checkpoint in this folder is of: a file of another must not pass for it."""
        configuration = {key: value for key, value in self.manifest["configuration"].items() if key != "num_draws"}
        made_from = [configuration, self.manifest["data"]["fingerprint"], self.manifest.get("starts")]
        identity = zlib.crc32(json.dumps(made_from, sort_keys=True).encode())
        return f"run {identity:08x}, {'all chains' if folder == self.path else folder.name}"

    def _checkpoints(self, key: int | None) -> tuple[Path, Path]:
        """The newest and the one before."""
        folder = self.path if key is None else self.path / f"chain-{key}"
        return folder / CHECKPOINT, folder / PREVIOUS

    def read_checkpoint(self, file: Path) -> dict[str, Any] | None:
        """What a checkpoint holds; None if it is not there."""
        if not os.path.lexists(file):
            return None
        try:
            state = read_state(file, must_be_sealed=self.is_sealed, may_be_link=False)
            if not isinstance(state, dict):
                raise ValueError("it holds no state of a chain")
            if not (isinstance(count := state.get("num_draws"), int) and count >= 0):
                raise ValueError(f"it has num_draws = {count!r}")
            if (owner := state.pop("of", None)) != self._owner(file.parent) and self.is_sealed:
                raise ValueError(f"it is of {str(owner)[:80]}, and not of this chain of this run")
        except (OSError, ValueError) as error:
            raise StoreCorrupt(f"the checkpoint '{file}' cannot be read: {error}. The draws are not affected.") from error
        return state

    def _usable(self, file: Path, chains: Sequence[int]) -> dict[str, Any] | None:
        """A checkpoint from which a run can go on: with as many draws as the index has, or fewer."""
        if (state := self.read_checkpoint(file)) is None:
            return None
        for chain in chains:
            if self.num_draws(chain) < state["num_draws"]:
                raise StoreCorrupt(
                    f"the index of chain {chain} in '{self.path}' has {self.num_draws(chain)} draws, its checkpoint "
                    f"{state['num_draws']}: lines are missing."
                )
        return state

    def rewind(self, chain: int, num_draws: int) -> None:
        """Forget the draws that came after the checkpoint: the chain makes them again."""
        records = self._index.get(chain, [])
        self._num_saved[chain] = num_draws
        if len(records) == num_draws:
            return
        self.write_index(chain, records[:num_draws])
        for record in records[num_draws:]:
            self._file(record).unlink(missing_ok=True)

    def write_index(self, chain: int, records: list[Record]) -> None:
        """All of the index of a chain, anew."""
        lines = [line_of(record, is_sealed=self.is_sealed) for record in records]
        self._write_whole(self._folder(chain) / _INDEX, lines)
        self._index[chain] = records

    def close(self) -> None:
        try:
            self.flush()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None
            self._unlock()

    # --- the files ----------------------------------------------------------------------------------------------

    def _folder(self, chain: int) -> Path:
        """Of a chain, to write to."""
        if chain not in self._folders:
            folder = self.path / f"chain-{chain}"
            if not os.path.lexists(folder):
                make_folder(folder)
            self._folders[chain] = _checked_folder(folder)
        return self._folders[chain]

    def _chain_folders(self) -> dict[int, Path]:
        """Those that are there, by number."""
        names = sorted(entry.name for entry in os.scandir(self.path))
        chains = {int(match[1]): self.path / match[0] for name in names if (match := re.fullmatch(r"chain-(0|[1-9]\d*)", name))}
        return {chain: _checked_folder(folder) for chain, folder in sorted(chains.items())}

    def _file(self, record: Record) -> Path:
        return self.path / f"chain-{record['chain']}" / draw_name(record["draw"])

    def _take_lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            return
        with _refusing():
            lock = open_plain(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
        _locks.add(lock)
        self._unlock = weakref.finalize(self, _let_go, lock)  # the lock goes with its file, whatever ends the process
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise StoreLocked(f"another process writes to '{self.path}'. Wait for it, or choose another path.") from error

    def _read_index(self, writes: bool) -> None:
        """The index as it is; read again if its run, which keeps the last draws only, has dropped some since."""
        for _ in range(5):
            counts = {} if writes else self._counted_draws()  # before the index, which is never behind them
            self._read_lines(writes)
            self._left_out = {(r["chain"], r["draw"]): words for r in super().kept() if (words := self.problem_of(r))}
            is_dropping = isinstance(self.manifest["keep"], int) and not writes
            if not (is_dropping and any(words.endswith("is missing") for words in self._left_out.values())):
                break
        if not writes and (missing := self.missing_chains()):
            warn(f"{', '.join(missing[:3])}{' ...' * (len(missing) > 3)} missing in '{self.path}': the other chains are used.")
        for chain, count in counts.items():
            if self.num_draws(chain) < count:
                warn(
                    f"the index of chain {chain} in '{self.path}' has {self.num_draws(chain)} draws, its checkpoint {count}: "
                    f"lines are missing. `adammcmc check {self.path} --repair` makes the index again from the draws.",
                )
        if self._left_out:
            problems = list(self._left_out.values())
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            warn(
                f"{'; '.join(problems[:3])}{more}: left out, the other draws are used. "
                f"`adammcmc check {self.path} --repair` sets aside what is damaged.",
            )

    def missing_chains(self) -> list[str]:
        """Folders of chains that should be there. (Those of a stack come with its first draw.)"""
        number = self.manifest["configuration"]["num_chains"]
        if self.is_stacked and not self._index:
            with suppress(StoreCorrupt):
                states = [self.read_checkpoint(file) for file in self._checkpoints(None)]
                if not any(state["num_draws"] for state in states if state is not None):
                    return []
        return [f"chain-{chain}" for chain in range(number) if chain not in self._index]

    def _counted_draws(self) -> dict[int, int]:
        """How many draws the newest checkpoint of each chain counts on, by its header; 0 where that says nothing."""
        counts = {}
        for chain in self._chain_folders():
            with suppress(OSError, SafetensorError, RuntimeError, KeyError, TypeError, ValueError):
                file = self._checkpoints(None if self.is_stacked else chain)[0]
                os.close(open_plain(file))
                with safe_open(file, framework="pt") as content:
                    counts[chain] = int(content.metadata()["num_draws"])
        return counts

    def problem_of(self, record: Record) -> str | None:
        """What can be seen of a draw's file without reading it."""
        if "file" not in record:
            return None
        file = self._file(record)
        try:
            found = file.lstat()
        except FileNotFoundError:
            return f"'{file}' is missing"
        if not stat.S_ISREG(found.st_mode):
            return f"'{file}' is no plain file"
        size, right = found.st_size, record["bytes"]
        return None if size == right else f"'{file}' has {size} bytes, the index says {right}"

    def read_chain(self, chain: int) -> Lines:
        """The index of a chain as the disk has it, up to its first bad line."""
        file = self.path / f"chain-{chain}" / _INDEX
        with _refusing():
            return read_lines(file, chain, is_sealed=self.is_sealed, has_files=self.manifest["keep"] != "moments")

    def _read_lines(self, writes: bool) -> None:
        folders, number = self._chain_folders(), self.manifest["configuration"]["num_chains"]
        if folders and max(folders) >= number:
            raise StoreCorrupt(f"'{self.path}' has a folder chain-{max(folders)}, and run.json says num_chains = {number}.")
        found = {chain: self.read_chain(chain) for chain in folders}
        self._index = {chain: lines.records for chain, lines in found.items()}
        for chain, lines in found.items():
            if lines.problem is not None:
                self._check_that_no_checkpoint_needs_it(chain, lines.problem)
        if not writes:
            return
        for folder in (self.path, *folders.values()):
            _remove_leftovers(folder)
        for chain, lines in found.items():
            index = folders[chain] / _INDEX
            # a file with two names is another folder's too (a copy made of hard links), and is not written to
            if lines.problem is not None or lines.is_unfinished or (index.exists() and index.stat().st_nlink > 1):
                self.write_index(chain, lines.records)

    def _check_that_no_checkpoint_needs_it(self, chain: int, problem: str) -> None:
        """A bad line after the last draw of a checkpoint is a write that was interrupted: it is made again on resume."""
        key, chains = (None, sorted(self._index)) if self.is_stacked else (chain, [chain])
        for file in self._checkpoints(key):
            with suppress(StoreCorrupt):
                if self._usable(file, chains) is not None:
                    warn(f"{problem}: draws from there on are left out, and made again on resume.")
                    return
        raise StoreCorrupt(f"{problem}. `adammcmc check {self.path} --repair` makes the index again from the draws.")

    def _write_whole(self, file: Path, parts: Iterable[bytes | memoryview], *, keep_as: Path | None = None) -> tuple[int, int]:
        """All of a file or nothing: written under another name, then renamed. Returns its size and its checksum.

        `keep_as` is the name that the file has from then on which had this name before.
        """
        temporary = file.with_name(file.name + ".tmp")
        with self._watching_space(file), _refusing():
            try:
                with open(open_new(temporary), "wb", buffering=0) as written:
                    size, crc = write_parts(written, parts)
                    os.fsync(written.fileno())
                if keep_as is not None:
                    self._keep_as(file, keep_as)
                put(temporary, file)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
        return size, crc

    @staticmethod
    def _keep_as(file: Path, name: Path) -> None:
        """Give a file a second name, in place of what has it; where the system cannot, its only one."""
        if not os.path.lexists(file):
            return
        name.unlink(missing_ok=True)
        try:
            os.link(file, name, follow_symlinks=False)
        except OSError:
            os.replace(file, name)

    def _append_line(self, file: Path, line: bytes) -> None:
        with self._watching_space(file), _refusing():
            is_new = not file.exists()
            with open(open_plain(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0) as index:
                size = index.seek(0, os.SEEK_END)
                try:
                    write_parts(index, [line])
                    os.fsync(index.fileno())  # before the checkpoint that counts on it
                except BaseException:
                    with suppress(OSError):
                        index.truncate(size)
                    raise
            if is_new:
                sync_folder(file.parent)

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
        """Of a run that keeps the last draws, those that neither its last two checkpoints nor its readers need."""
        records, keep = self._index.get(chain, []), self.manifest["keep"]
        before, self._num_saved[chain] = self._num_saved.get(chain, 0), len(records)
        if not isinstance(keep, int):
            return
        for record in records[self._num_dropped.get(chain, 0) : max(0, before - keep)]:
            self._file(record).unlink(missing_ok=True)
            self._num_dropped[chain] = record["draw"] + 1


def set_aside(file: Path) -> Path:
    """Rename what is damaged: nothing is deleted, and its name is free."""
    number = next(n for n in range(1, 1_000_000) if not os.path.lexists(_aside(file, n)))
    file.rename(_aside(file, number))
    sync_folder(file.parent)
    return _aside(file, number)


def _aside(file: Path, number: int) -> Path:
    return file.with_name(f"{file.name}.damaged{f'-{number}' if number > 1 else ''}")


def _remove_leftovers(folder: Path) -> None:
    """What writers that were interrupted left."""
    for file in folder.glob("*.tmp"):
        if re.fullmatch(r"(run\.json|index\.jsonl|(checkpoint|draw-\d+)\.safetensors)\.tmp", file.name):
            with suppress(OSError):  # a folder of that name is not ours
                file.unlink()


def _checked_folder(folder: Path) -> Path:
    """Refuse a link in the place of a chain's folder: what is written there must stay in the run."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise StoreCorrupt(f"'{folder}' is a symbolic link or a file, and must be a folder.")
    return folder


@contextmanager
def _refusing() -> Iterator[None]:
    """Links, pipes and folders in the place of files, with the reason."""
    try:
        yield
    except (NotPlain, IsADirectoryError) as error:
        raise StoreCorrupt(f"{error.strerror or error}.") from error


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


def _on_host(tensors: Tensors, dtype: str | None) -> dict[str, Tensor]:
    """Copies that share nothing, floating ones in the dtype that was asked for."""
    kind = None if dtype is None else getattr(torch, dtype)
    return {
        name: x.detach().to("cpu", kind if kind is not None and x.is_floating_point() else x.dtype, copy=True).contiguous()
        for name, x in tensors.items()
    }
