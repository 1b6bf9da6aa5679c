"""Verifies a run folder file by file, and repairs what can be repaired. It needs no network."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from adammcmc.errors import StoreCorrupt, StoreMismatch
from adammcmc.posterior.store.atomic import checksum, set_aside
from adammcmc.posterior.store.checkpoint_files import Checkpoints
from adammcmc.posterior.store.folder import FolderStore
from adammcmc.posterior.store.records import Lines, Record, check_record, draw_name, load_json, read_good_lines

__all__ = ["Check", "check_run"]


@dataclass(frozen=True)
class Check:
    """The result of `check_run`. `print` shows the problems and the verdict."""

    path: Path
    problems: tuple[str, ...]
    """What was wrong, one line each."""
    repairs: tuple[str, ...]
    """What was repaired."""
    left: tuple[str, ...]
    """What is still wrong."""
    num_draws: int
    """Draws in the index."""
    num_usable: int
    """Draws with intact weights."""
    is_readable: bool = True
    """Whether `run.json` can be read: without it, the other files are not checked and nothing can be repaired."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong with the run, if necessary after repair."""
        return not self.left

    @property
    def verdict(self) -> str:
        """One line."""
        if not self.is_readable:
            return "damaged: run.json cannot be read or repaired. Restore it from a copy; the draws were not checked"
        draws = f"{self.num_draws} draws in the index, weights of {self.num_usable}"
        if not self.problems:
            return f"sound: {draws}"
        count = f"{len(self.problems)} problem{'s' * (len(self.problems) > 1)}"
        if not self.repairs and not self.is_sound:
            return f"damaged: {count}; {draws}. `adammcmc check {self.path} --repair` recovers what it can"
        return f"repaired: {draws}" if self.is_sound else f"repaired in part: {'; '.join(self.left)}; {draws}"

    def __str__(self) -> str:
        return "\n".join([*self.problems, *(f"repaired: {words}" for words in self.repairs), self.verdict])


def check_run(path: str | Path, *, repair: bool = False) -> Check:
    """Verify every file of a run: `run.json`, each line of the index, each draw, each checkpoint.

    Args:
        path: the folder of the run.
        repair: rebuild the index from its good lines and from the draws; rename damaged draws and checkpoints (nothing
            is deleted); fall back on the previous checkpoint. Takes the lock: no process may be writing to the run.

    Raises:
        StoreMismatch: the folder holds no run, or one in another format than this version's.
        StoreLocked: `repair`, and another process writes to the run.
    """
    path = Path(path)
    try:
        folder = _Folder(path, writes=repair)
    except StoreCorrupt as error:  # without run.json the other files have no meaning
        return Check(path, (str(error),), (), (str(error),), 0, 0, is_readable=False)
    try:
        folder.inspect()
        problems, repairs = folder.problems, []
        if repair and problems:
            repairs = folder.repair()
            folder.inspect()
        return Check(path, tuple(problems), tuple(repairs), tuple(folder.problems), len(folder.index), folder.num_usable)
    finally:
        folder.close()


class _Folder(FolderStore):
    """A run folder that opens with a damaged index."""

    problems: list[str]
    num_usable: int

    def _read_index(self, writes: bool) -> None:
        """Left to `inspect`, which continues where this would raise."""

    def inspect(self) -> None:
        """Read everything and collect the problems."""
        self.problems, self.num_usable, self._verified = [], 0, set()
        folders, number = self._chain_folders(), self.manifest["configuration"]["num_chains"]
        self.problems += [f"'{f}': run.json has num_chains = {number}." for c, f in folders.items() if c >= number]
        chains = [chain for chain in folders if chain < number]
        # before the index: a run that is being written may be ahead of its checkpoint, never behind
        keys = self._keys(chains)
        pairs = {key: self.checkpoints(key) for key in keys}
        counts = {key: [self._try_checkpoint(pair, file) for file in pair.files] for key, pair in pairs.items()}
        self._lines = {chain: self._try_chain(chain) for chain in chains}
        self._index = {chain: lines.records for chain, lines in self._lines.items()}
        self.problems += [f"'{self.path / name}' is missing." for name in self.missing_chains()]
        self.problems += [f"{lines.problem}." for lines in self._lines.values() if lines.problem is not None]
        try:
            self.starts()
        except StoreCorrupt as error:
            self.problems.append(str(error))
        self._bad: dict[tuple[int, int], str] = {}
        for record in self.kept():
            self._try_draw(record)
        self.problems += self._bad.values()
        self.num_usable = len(self.kept()) - len(self._bad)
        for key, chains in keys.items():
            self._compare(key, counts[key], min(map(self.num_draws, chains), default=0))

    def _keys(self, chains: Iterable[int]) -> dict[int | None, list[int]]:
        """The chains of each checkpoint: one for all chains of a stack (None), otherwise one for each."""
        return {None: list(chains)} if self.is_stacked else {chain: [chain] for chain in chains}

    def _compare(self, key: int | None, counts: list[int | None], num_draws: int) -> None:
        """Compare the draws of the two checkpoints (None: missing or damaged) with those of the index."""
        name, (newest, previous) = "the run" if key is None else f"chain {key}", counts
        if newest is None and previous is not None:
            self.problems.append(f"the newest checkpoint of {name} is missing or damaged; the previous one is intact.")
        if newest is not None and newest < num_draws - 1:  # (a run that is being written is one behind)
            self.problems.append(f"the checkpoint of {name} is of draw {newest}, the index has {num_draws}.")
        if newest is not None and newest > num_draws:
            self.problems.append(f"the index of {name} has {num_draws} draws, its checkpoint {newest}.")
        if not any(count is not None and count <= num_draws for count in counts):
            self.problems.append(f"{name} cannot be resumed: it has no intact checkpoint that fits the index.")

    def _try_checkpoint(self, pair: Checkpoints, file: Path) -> int | None:
        """The number of draws of a checkpoint; None if it is missing or damaged."""
        try:
            state = pair.read(file)
        except StoreCorrupt as error:
            self.problems.append(str(error))
            return None
        return None if state is None else int(state["num_draws"])

    def _try_chain(self, chain: int) -> Lines:
        try:
            return self.read_chain(chain)
        except StoreCorrupt as error:  # it is not a plain file
            return Lines([], str(error).removesuffix("."))

    def _try_draw(self, record: Record) -> None:
        """Note what is wrong with a draw."""
        words = self.problem_of(record)
        try:
            if words is None:
                self.load(record)
        except StoreCorrupt as error:
            words = str(error).partition(" `adammcmc")[0].removesuffix(".")
        except StoreMismatch:  # dropped meanwhile by a run that continues
            return
        if words is not None:
            self._bad[record["chain"], record["draw"]] = f"{words}."

    def repair(self) -> list[str]:
        """Repair what can be repaired; returns what was done."""
        done: list[str] = []
        for chain, lines in self._lines.items():
            records = self._rebuilt(chain)
            for record in records:
                if (chain, record["draw"]) in self._bad:
                    done += self._put_aside(record)
            if records != lines.records or lines.problem is not None or lines.is_unfinished:
                if lines.problem is not None and os.path.lexists(index := self._folder(chain) / "index.jsonl"):
                    set_aside(index)
                self.write_index(chain, records)
                done.append(f"the index of chain {chain} has {len(records)} draws.")
        for key, chains in self._keys(self._lines).items():
            done += self._repair_checkpoints(key, chains)
        return done

    def _rebuilt(self, chain: int) -> list[Record]:
        """The records of a chain from the good lines of its index and from its draws, up to the first missing one."""
        folder = self._folder(chain)
        has_files = self.manifest["keep"] != "moments"
        found = read_good_lines(folder / "index.jsonl", chain, has_files=has_files)
        for file in sorted(folder.glob("draw-*.safetensors")):
            match = re.fullmatch(r"draw-(\d{6,})\.safetensors", file.name)
            if match and int(match[1]) not in found and (record := _record_in(file, chain, int(match[1]))) is not None:
                found[record["draw"]] = record
        records: list[Record] = []
        while (record := found.get(len(records))) is not None:
            records.append(record)
        self._index[chain] = records
        for record in self.kept():  # draws missing in the index were not inspected
            if record["chain"] == chain and (chain, record["draw"]) not in self._bad:
                self._try_draw(record)
        return records

    def _put_aside(self, record: Record) -> list[str]:
        """Rename a damaged draw; its line stays, without a file."""
        file, name = self._file(record), f"draw {record['draw']} of chain {record['chain']}"
        for key in ("file", "bytes", "crc32"):
            record.pop(key, None)
        record["is_set_aside"] = True
        if not os.path.lexists(file):
            return [f"{name} is missing: its numbers stay in the index."]
        return [f"{name} is now '{set_aside(file).name}': its numbers stay in the index."]

    def _repair_checkpoints(self, key: int | None, chains: list[int]) -> list[str]:
        pair = self.checkpoints(key)
        done, usable = [], []
        for file in pair.files:
            try:
                if (state := pair.read(file)) is not None:
                    self.check_draws(chains, state)
                    usable.append(file)
            except StoreCorrupt:
                if self._try_checkpoint(pair, file) is None:  # one ahead of the index still has the health of its chain
                    done.append(f"'{file}' is now '{set_aside(file).name}'.")
        if usable == [pair.previous]:
            if (aside := pair.use_previous()) is not None:
                done.append(f"'{pair.newest}' is now '{aside.name}'.")
            done.append(f"'{pair.newest}' is now the previous checkpoint.")
        return done


def _record_in(file: Path, chain: int, draw: int) -> Record | None:
    """The record in the file of a draw, as in the index; None if it is damaged."""
    try:
        computed, written = checksum(file)
        if written != computed:
            return None
        with safe_open(file, framework="pt") as content:
            record = load_json(content.metadata()["record"])
        record = {**record, "file": draw_name(draw), "bytes": file.stat().st_size, "crc32": computed}
        check_record(record, chain, draw, has_files=True)
    except Exception:  # however the file is damaged
        return None
    return dict(record)
