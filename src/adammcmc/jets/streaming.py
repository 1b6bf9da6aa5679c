"""Jets that do not fit in memory: files are read group by group, shuffled within a group, and served as batches.

    epoch e:   the files in an order fixed by (seed, e), in groups of at most `chunk_size` jets
    group g:   its jets in memory (on the device, if they fit), in an order fixed by (seed, e, g)

Jets at the end of a group that do not fill a batch are skipped in that epoch. Shuffling is as good as the groups are large
and the files are mixed: shards of one kind each need groups of many files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from adammcmc.jets.data import Jets
from adammcmc.jets.features import JetData
from adammcmc.jets.files import jet_files, stream_jets
from adammcmc.target.batches import Batch
from adammcmc.target.data import Data, derive_seed

__all__ = ["StreamedJets"]


class StreamedJets(Data):
    """Training data for `sample` and `Tagger`, in bounded memory.

    Args:
        paths: files or folders. They are read once here (to count the jets), then once an epoch. Our .npz and .parquet are
            the fastest, in shards of less than `chunk_size` jets.
        batch_size: jets in a batch.
        chunk_size: jets in memory at a time.
        kinds: the kinds to use; None uses all.
        device: of the batches.
        num_neighbours: of the first graph; the network's k.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        batch_size: int = 512,
        *,
        chunk_size: int = 500_000,
        kinds: Sequence[str] | None = ("qcd", "top"),
        device: str | torch.device = "cpu",
        num_neighbours: int = 16,
    ) -> None:
        if not 1 <= batch_size <= chunk_size:
            raise ValueError(f"`batch_size` must be positive and at most `chunk_size`, got {batch_size} and {chunk_size}.")
        self.files = jet_files(paths)
        self.batch_size: int = batch_size
        self._chunk_size, self._kinds, self._device, self._k = chunk_size, kinds, device, num_neighbours
        self._capacity: int | None = None
        heads = [Jets.cat([Jets.empty(), *(part.heads for part in self._read(file))]) for file in self.files]
        self._counts = [len(part) for part in heads]
        self.heads = Jets.cat(heads)
        """The jets without their particles, in the order of the files."""
        self.num_data = len(self.heads)
        for file, count in zip(self.files, self._counts, strict=True):
            if count > chunk_size:
                raise ValueError(
                    f"'{file}' holds {count:,} jets, more than `chunk_size` = {chunk_size:,}: write it in shards, or raise it."
                )
        self.restart(0)

    def restart(self, seed: int) -> None:
        # the next batch: its epoch, the number of its group in the epoch, its position in the group
        self._seed, self._epoch, self._number, self._position = seed, 0, 0, 0
        self._group: JetData | None = None

    def __len__(self) -> int:
        return self.num_data

    @property
    def kind(self) -> Tensor:
        """The kind of each jet."""
        return self.heads.kind

    def __repr__(self) -> str:
        tops = int((self.kind == 1).sum())
        return f"<StreamedJets: {self.num_data:,} ({tops:,} top) in {len(self.files)} files, {self._chunk_size:,} in memory>"

    def _read(self, file: Path) -> Iterator[Jets]:
        for part in stream_jets(file):
            yield part if self._kinds is None else part.of_kind(*self._kinds)

    def _groups(self, epoch: int) -> list[list[int]]:
        """The files of each group of this epoch. A group that does not fill a batch is skipped."""
        generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch))
        groups: list[list[int]] = [[]]
        for file in torch.randperm(len(self.files), generator=generator).tolist():
            if groups[-1] and sum(self._counts[i] for i in groups[-1]) + self._counts[file] > self._chunk_size:
                groups.append([])
            groups[-1].append(file)
        return [group for group in groups if sum(self._counts[i] for i in group) >= self.batch_size]

    def _load(self, files: Sequence[int]) -> JetData:
        jets = Jets.cat(part for i in files for part in self._read(self.files[i]))
        # on a GPU all batches have the shape chosen for the first group, so that steps can be captured in CUDA graphs
        is_gpu = torch.device(self._device).type == "cuda"
        capacity: int | Literal["auto"] | None = (self._capacity or "auto") if is_gpu else None
        data = JetData(jets, self.batch_size, device=self._device, num_neighbours=self._k, capacity=capacity)
        self._capacity = data.capacity
        return data

    def __next__(self) -> Batch:
        if self._group is None:
            groups = self._groups(self._epoch)
            if not groups:
                raise ValueError(f"{self.num_data} jets do not fill a batch of {self.batch_size}.")
            if self._number == len(groups):
                self._epoch, self._number = self._epoch + 1, 0
                return next(self)
            self._group = self._load(groups[self._number])
            seed = derive_seed(self._seed, self._epoch, self._number)
            state = {"seed": seed, "epoch": 0, "position": self._position, "batch_size": self.batch_size}
            self._group.load_state_dict(state)
        batch = next(self._group)
        self._position += 1
        if self._position == self._group.num_batches:
            self._group, self._number, self._position = None, self._number + 1, 0
        return batch

    @property
    def num_batches(self) -> int:
        """Of the first epoch. Other epochs may differ slightly, by jets that do not fill a batch."""
        return sum(sum(self._counts[i] for i in group) // self.batch_size for group in self._groups(0))

    def in_order(self, size: int) -> Iterator[Batch]:
        for file in self.files:
            for part in self._read(file):
                if len(part):
                    yield from JetData(part, device=self._device, num_neighbours=self._k).in_order(size)

    def fetch(self, indices: slice | Tensor) -> Batch:
        """Selected jets. This reads their files, so that full-data acceptance tests (`FullData`) are slow."""
        wanted = torch.arange(self.num_data)[indices] if isinstance(indices, slice) else indices.cpu()
        ends = torch.tensor(self._counts).cumsum(0)
        owner = torch.searchsorted(ends, wanted, right=True)
        parts, order = [], []
        for file in sorted(set(owner.tolist())):
            chosen = (owner == file).nonzero().squeeze(1)
            jets = Jets.cat(self._read(self.files[file]))
            parts.append(jets[wanted[chosen] - (ends[file] - self._counts[file])])
            order.append(chosen)
        jets = Jets.cat(parts)[torch.cat(order).argsort()]
        return JetData(jets, device=self._device, num_neighbours=self._k).fetch(slice(None))

    def state_dict(self) -> dict[str, Any]:
        # ("at_once" is the name of the chunk size in stored runs)
        where = {"seed": self._seed, "epoch": self._epoch, "group": self._number, "position": self._position}
        return {**where, "batch_size": self.batch_size, "at_once": self._chunk_size, "capacity": self._capacity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sizes = ("batch_size", state["batch_size"], self.batch_size), ("chunk_size", state["at_once"], self._chunk_size)
        for name, stored, here in sizes:
            if stored != here:
                raise ValueError(f"the run had {name} = {stored}, these data have {here}.")
        self.restart(state["seed"])
        self._epoch, self._number, self._position = state["epoch"], state["group"], state["position"]
        self._capacity = state.get("capacity")
