"""A run on disk: append draws, read them, resume.

    run.json                                 what was run: target, configuration, versions, fingerprints of data, model
    lock                                     held by the process that writes
    chain-0/index.jsonl                      one line per draw: draw, chain, step, loss, ..., file, bytes, checksums
    chain-0/draw-000000.safetensors          parameters and buffers of one draw, under the names of `model.state_dict()`
    chain-0/checkpoint.safetensors           everything needed to resume the chain; its metadata entry "state" is JSON
    chain-0/checkpoint.previous.safetensors  the one before, in case the newest is damaged
    starts.safetensors                       the weights that the chains started from, where they were given
    checkpoint.safetensors                   of chains that run at once: one for all of them, instead of one per chain

A file appears under its name only when it is complete, and a draw exists once its line in the index is complete. Each
is synced to disk before the next is begun: draw, index line, checkpoint. A run that was killed, even by power loss,
therefore resumes from its checkpoint and repeats, bit for bit, whatever came after it.

Every file has a checksum. Nothing that is read is trusted: file names follow from numbers, links and pipes are refused,
and JSON is checked (`records.py`). There is no pickle.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from adammcmc.errors import StoreCorrupt, StoreMismatch, warn
from adammcmc.posterior.store import atomic
from adammcmc.posterior.store.atomic import checksum, make_folder
from adammcmc.posterior.store.base import MemoryStore, Record, Store
from adammcmc.posterior.store.checkpoint_files import CHECKPOINT, PREVIOUS, Checkpoints
from adammcmc.posterior.store.encoding import HostCopies, Tensors, safetensors_parts, strict_json
from adammcmc.posterior.store.lock import LOCK, Lock
from adammcmc.posterior.store.records import MANIFEST, Lines, draw_name, line_of, manifest_text, read_lines, read_manifest
from adammcmc.posterior.store.starts_file import STARTS, read_starts, write_starts

__all__ = ["FolderStore", "MemoryStore", "Record", "Store", "read_manifest"]

_INDEX = "index.jsonl"


class FolderStore(Store):
    """A run in a folder, laid out as above.

    Args:
        path: the folder.
        manifest: of a new run, which exists once `write_manifest` was called; None opens an existing run.
        writes: open the run for writing: take the lock, and remove the temporary files of interrupted writes.
    """

    def __init__(self, path: str | Path, manifest: dict[str, Any] | None = None, *, writes: bool = False) -> None:
        self.path: Path = Path(path).expanduser().absolute()  # the process may change its working directory
        self._lock: Lock | None = None
        self._verified: set[str] = set()
        self._folders: dict[int, Path] = {}
        self._left_out: dict[tuple[int, int], str] = {}  # draws whose files cannot be used, and why
        self._num_saved: dict[int, int] = {}  # draws of a chain at its last checkpoint
        self._num_dropped: dict[int, int] = {}
        self._host = HostCopies()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adammcmc-store")  # starts with its first task
        self._pending: Future[None] | None = None
        try:
            if manifest is not None:
                self._begin(manifest)
                return
            found = read_manifest(self.path)  # a folder that holds no run is not touched
            if writes:
                self._lock = Lock(self.path)
                found = read_manifest(self.path)
            super().__init__(found)
            self._read_index(writes)
        except BaseException:
            self.close()
            raise

    def _begin(self, manifest: dict[str, Any]) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise StoreMismatch(f"'{self.path}' is a file: `path` must be a folder for the run.")
        make_folder(self.path)
        self._lock = Lock(self.path)
        if (self.path / MANIFEST).exists():
            raise StoreMismatch(f"'{self.path}' holds a run already. Pass resume=True to continue it, or choose another path.")
        # a run that was killed before it began has left at most its first checkpoints
        found = [p.relative_to(self.path) for p in self.path.rglob("*") if p.is_file() and p.suffix != ".tmp"]
        if foreign := [str(p) for p in sorted(found) if p.name not in (LOCK, CHECKPOINT, PREVIOUS, STARTS)]:
            raise StoreMismatch(f"'{self.path}' is not empty and holds no run (it has '{foreign[0]}'). Choose another path.")
        super().__init__(manifest)
        (self.path / STARTS).unlink(missing_ok=True)  # of a run that was killed before it began
        chains = self._chain_folders()
        for folder in (self.path, *chains.values()):
            atomic.remove_leftovers(folder)
            for name in (CHECKPOINT, PREVIOUS):  # perhaps of another run: this one must never fall back on them
                (folder / name).unlink(missing_ok=True)
        for folder in chains.values():
            with suppress(OSError):
                folder.rmdir()

    def write_manifest(self) -> None:
        atomic.replace_file(self.path / MANIFEST, [manifest_text(self.manifest)])

    def flush(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._writer.shutdown()
            if self._lock is not None:
                self._lock.release()

    # --- draws --------------------------------------------------------------------------------------------------

    def kept(self) -> list[Record]:
        return [r for r in super().kept() if "file" in r and (r["chain"], r["draw"]) not in self._left_out]

    def append(self, record: Record, tensors: Tensors) -> None:
        chain, draw = record["chain"], record["draw"]
        folder, record = self._folder(chain), strict_json(record)
        if self.manifest["keep"] != "moments":
            # a lost index can be rebuilt from the draws; the time that one took is not part of it
            text = json.dumps({key: value for key, value in record.items() if key != "seconds"}, allow_nan=False)
            parts = safetensors_parts(tensors, {"record": text}, dtype=self.manifest["dtype"])
            size, crc = atomic.replace_file(folder / draw_name(draw), parts)
            record = {**record, "file": draw_name(draw), "bytes": size, "crc32": crc}
        atomic.append_line(folder / _INDEX, line_of(record))
        self._index.setdefault(chain, []).append(record)

    def commit(self, records: Sequence[Record], tensors: Tensors, state: dict[str, Any] | None) -> None:
        """As in `Store`. Data on an accelerator are copied at once, and written while the chains continue.

        One commit at a time: the next one waits for this one, and raises its error.
        """
        self.flush()
        if self._is_on_host(tensors):
            super().commit(records, tensors, state)
        else:
            self._pending = self._writer.submit(super().commit, records, *self._host((dict(tensors), state)))

    @staticmethod
    def _is_on_host(tensors: Tensors) -> bool:
        return all(x.device.type == "cpu" for x in tensors.values())

    def load(self, record: Record) -> dict[str, Tensor]:
        file = self._file(record)
        remedy = f"`adammcmc check {self.path} --repair` sets it aside, and the other draws stay usable"
        try:
            if str(file) not in self._verified:
                computed, written = checksum(file)
                if not written == computed == record["crc32"]:
                    raise StoreCorrupt(f"'{file}' is damaged: its checksum is not the one in the index. {remedy}.")
            self._verified.add(str(file))
            with safe_open(file, framework="pt") as content:
                names = list(content.keys())
                shapes = {name: list(content.get_slice(name).get_shape()) for name in names}
                right = {name: list(shape) for name, (_, shape) in self.manifest["model"]["tensors"].items()}
                if right and shapes != right:  # before any tensor is read: a file may claim any size
                    raise StoreCorrupt(f"'{file}' is not of this network: run.json names other tensors. {remedy}.")
                return {name: content.get_tensor(name) for name in names}
        except StoreCorrupt:
            raise
        except (OSError, SafetensorError, RuntimeError) as error:  # torch maps the file again, with its own errors
            if isinstance(self.manifest["keep"], int) and not os.path.lexists(file):
                raise StoreMismatch(f"draw {record['draw']} has been deleted by its run: open the posterior again.") from error
            raise StoreCorrupt(f"'{file}' cannot be read: {error}. {remedy}.") from error

    def problem_of(self, record: Record) -> str | None:
        """What is wrong with a draw's file, without reading it."""
        if "file" not in record:
            return None
        file = self._file(record)
        try:
            found = file.lstat()
        except FileNotFoundError:
            return f"'{file}' is missing"
        if not stat.S_ISREG(found.st_mode):
            return f"'{file}' is not a plain file"
        size, right = found.st_size, record["bytes"]
        return None if size == right else f"'{file}' has {size} bytes, the index says {right}"

    def _drop_old(self, chain: int) -> None:
        """Delete the draws that neither the last two checkpoints nor readers need, if only the last draws are kept."""
        records, keep = self._index.get(chain, []), self.manifest["keep"]
        before, self._num_saved[chain] = self._num_saved.get(chain, 0), len(records)
        if not isinstance(keep, int):
            return
        for record in records[self._num_dropped.get(chain, 0) : max(0, before - keep)]:
            self._file(record).unlink(missing_ok=True)
            self._num_dropped[chain] = record["draw"] + 1

    # --- checkpoints --------------------------------------------------------------------------------------------

    def checkpoints(self, key: int | None) -> Checkpoints:
        """Of a chain, or (None) of all chains at once."""
        return Checkpoints(self.path, key, self.manifest)

    def save(self, key: int | None, state: dict[str, Any]) -> None:
        if key is not None:
            self._folder(key)
        self.checkpoints(key).write(state)
        for chain in self._index if key is None else [key]:
            self._drop_old(chain)  # only now: the replaced checkpoint needed them

    def saved(self, key: int | None) -> dict[str, Any] | None:
        """The newest checkpoint or, with a warning, the previous one if the newest is damaged."""
        if (key is None) != self.is_stacked:
            return None
        chains = sorted(self._index) if key is None else [key]
        most = max(map(self.num_draws, chains), default=0)
        state, problems, is_damaged = self.checkpoints(key).find()
        if state is None:
            if is_damaged:
                raise StoreCorrupt(problems[0])
            if most > 0:
                warn(f"{problems[0]} Health and moments are unknown.")
        elif problems:
            warn(f"{problems[0]} The previous one is used.")
        elif most > state["num_draws"]:
            warn(f"a checkpoint in '{self.path}' dates from draw {state['num_draws']} of {most}, as do health and moments.")
        return state

    def save_starts(self, states: Sequence[Tensors]) -> None:
        write_starts(self.path, self.manifest, states)

    def starts(self) -> list[dict[str, Tensor]] | None:
        return read_starts(self.path, self.manifest)

    def restore(self, key: int | None, chains: Sequence[int]) -> dict[str, Any] | None:
        """The newest checkpoint that is intact and whose draws are all in the index; warns if it is the previous one."""
        pair = self.checkpoints(key)
        state, problems, is_damaged = pair.find(partial(self.check_draws, chains))
        if state is None:
            if is_damaged:
                raise StoreCorrupt(f"{problems[0]} `adammcmc check {self.path} --repair` recovers what it can.")
            return None
        if problems:
            warn(f"{problems[0]} The run resumes from the previous checkpoint.")
            pair.use_previous()
        for chain in chains:
            self.rewind(chain, state["num_draws"])
        return state

    def check_draws(self, chains: Sequence[int], state: dict[str, Any]) -> None:
        """Refuse a checkpoint with more draws than the index has."""
        for chain in chains:
            if self.num_draws(chain) < state["num_draws"]:
                raise StoreCorrupt(self._missing_lines(chain, state["num_draws"]))

    def _missing_lines(self, chain: int, counted: int) -> str:
        return (
            f"the index of chain {chain} in '{self.path}' has {self.num_draws(chain)} draws, its checkpoint {counted}: lines "
            "are missing."
        )

    # --- the index ----------------------------------------------------------------------------------------------

    def rewind(self, chain: int, num_draws: int) -> None:
        """Remove the draws after the checkpoint: the chain makes them again."""
        records = self._index.get(chain, [])
        self._num_saved[chain] = num_draws
        if len(records) == num_draws:
            return
        self.write_index(chain, records[:num_draws])
        for record in records[num_draws:]:
            self._file(record).unlink(missing_ok=True)

    def write_index(self, chain: int, records: list[Record]) -> None:
        """Replace the index of a chain."""
        atomic.replace_file(self._folder(chain) / _INDEX, [line_of(record) for record in records])
        self._index[chain] = records

    def read_chain(self, chain: int) -> Lines:
        """The index of a chain as it is on disk, up to its first bad line."""
        file = self.path / f"chain-{chain}" / _INDEX
        with atomic.plain_files_only():
            return read_lines(file, chain, has_files=self.manifest["keep"] != "moments")

    def _read_index(self, writes: bool) -> None:
        """Read the index; again if its run, which keeps only the last draws, has dropped some in the meantime."""
        for _ in range(5):
            counts = {} if writes else self._counted_draws()  # before the index, which is never behind them
            self._read_lines(writes)
            self._left_out = {(r["chain"], r["draw"]): problem for r in super().kept() if (problem := self.problem_of(r))}
            is_dropping = isinstance(self.manifest["keep"], int) and not writes
            if not (is_dropping and any(problem.endswith("is missing") for problem in self._left_out.values())):
                break
        if not writes and (missing := self.missing_chains()):
            warn(f"{', '.join(missing[:3])}{' ...' * (len(missing) > 3)} missing in '{self.path}': the other chains are used.")
        for chain, count in counts.items():
            if self.num_draws(chain) < count:
                remedy = f"`adammcmc check {self.path} --repair` rebuilds the index from the draws."
                warn(f"{self._missing_lines(chain, count)} {remedy}")
        if self._left_out:
            problems = list(self._left_out.values())
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            warn(
                f"{'; '.join(problems[:3])}{more}: left out, the other draws are used. "
                f"`adammcmc check {self.path} --repair` sets aside what is damaged.",
            )

    def _counted_draws(self) -> dict[int, int]:
        """The number of draws of each chain by the header of its newest checkpoint."""
        return {chain: self.checkpoints(None if self.is_stacked else chain).num_draws() for chain in self._chain_folders()}

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
            atomic.remove_leftovers(folder)
        for chain, lines in found.items():
            index = folders[chain] / _INDEX
            # a file with two names also belongs to another folder (a copy made of hard links): do not write to it
            if lines.problem is not None or lines.is_unfinished or (index.exists() and index.stat().st_nlink > 1):
                self.write_index(chain, lines.records)

    def _check_that_no_checkpoint_needs_it(self, chain: int, problem: str) -> None:
        """A bad line after the draws of a checkpoint is an interrupted write: its draw is made again on resume."""
        key, chains = (None, sorted(self._index)) if self.is_stacked else (chain, [chain])
        if self.checkpoints(key).find(partial(self.check_draws, chains)).state is not None:
            warn(f"{problem}: draws from there on are left out, and made again on resume.")
            return
        raise StoreCorrupt(f"{problem}. `adammcmc check {self.path} --repair` rebuilds the index from the draws.")

    def missing_chains(self) -> list[str]:
        """The folders of chains that should exist. Those of chains that run at once come with their first draw, one after
        the other: they are complete once a checkpoint counts that draw."""
        number = self.manifest["configuration"]["num_chains"]
        missing = [f"chain-{chain}" for chain in range(number) if chain not in self._index]
        if missing and self.is_stacked:
            with suppress(StoreCorrupt):
                states = map((pair := self.checkpoints(None)).read, pair.files)
                if not any(state["num_draws"] for state in states if state is not None):
                    return []
        return missing

    # --- files --------------------------------------------------------------------------------------------------

    def _folder(self, chain: int) -> Path:
        """The folder of a chain, to write to."""
        if chain not in self._folders:
            folder = self.path / f"chain-{chain}"
            if not os.path.lexists(folder):
                make_folder(folder)
            self._folders[chain] = atomic.checked_folder(folder)
        return self._folders[chain]

    def _chain_folders(self) -> dict[int, Path]:
        """The existing folders of chains, by number."""
        names = sorted(entry.name for entry in os.scandir(self.path))
        chains = {int(match[1]): self.path / match[0] for name in names if (match := re.fullmatch(r"chain-(0|[1-9]\d*)", name))}
        return {chain: atomic.checked_folder(folder) for chain, folder in sorted(chains.items())}

    def _file(self, record: Record) -> Path:
        return self.path / f"chain-{record['chain']}" / draw_name(record["draw"])
