"""Which draws of a run a posterior holds, and which of them can be compared across chains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adammcmc.posterior.store.folder import Record, Store

__all__ = ["Compared", "Draws", "by_chain"]


def by_chain(records: Iterable[Record]) -> dict[int, list[Record]]:
    """Records by chain, in the order of their first draws."""
    rows: dict[int, list[Record]] = {}
    for record in records:
        rows.setdefault(record["chain"], []).append(record)
    return rows


class Compared(NamedTuple):
    """Draws of several chains, the same number of each."""

    chains: list[int]
    rows: list[list[Record]]
    """The records of each chain."""
    notes: list[str]
    """What was left out."""

    @property
    def records(self) -> list[Record]:
        """Chain after chain."""
        return [record for row in self.rows for record in row]

    def column(self, name: str) -> Tensor:
        """A column of the index, (chains, draws), NaN where there is no number."""
        values = [[math.nan if record.get(name) is None else float(record[name]) for record in row] for row in self.rows]
        return torch.tensor(values, dtype=torch.float64)

    def probes(self) -> Tensor | None:
        """The draws' predictions at training inputs, (chains, draws, numbers); None unless all draws recorded them."""
        rows: list[list[float | None]] = [record.get("probe") or [] for record in self.records]
        if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
            return None
        values = [[math.nan if value is None else value for value in row] for row in rows]
        return torch.tensor(values, dtype=torch.float64).reshape(len(self.chains), -1, len(rows[0]))


class Draws:
    """A selection of the draws of a run: all whose weights were kept, those of one chain, or a slice of `records`."""

    def __init__(self, store: Store, records: Sequence[Record] | None, chains: Sequence[int] | None) -> None:
        self.store = store
        self.records = list(store.kept() if records is None else records)
        self.chains = list(range(store.manifest["configuration"]["num_chains"]) if chains is None else chains)
        self.is_slice = records is not None and chains is None

    @property
    def is_whole(self) -> bool:
        """Whether these are all draws of the run."""
        return not self.is_slice and len(self.chains) == self.store.manifest["configuration"]["num_chains"]

    @property
    def made(self) -> list[Record]:
        """The records of all draws, including those whose weights were not kept."""
        return list(self.records) if self.is_slice else [r for r in self.store.index if r["chain"] in self.chains]

    def by_chain(self) -> dict[int, list[Record]]:
        """`made`, by chain."""
        return by_chain(self.made)

    def check_chain(self, chain: int) -> None:
        """Refuse a chain that is not among these."""
        if chain not in self.chains:
            raise ValueError(f"`chain` must be one of {', '.join(map(str, self.chains))}, got {chain}.")

    def compared(self, records: Sequence[Record], chains: Sequence[int] | None = None) -> Compared:
        """The draws of chains at least half as long as the longest, cut to one length."""
        chains = self.chains if chains is None else chains
        rows = by_chain(records)
        longest = max((len(rows.get(chain, [])) for chain in chains), default=0)
        long = {chain: rows[chain] for chain in chains if chain in rows and 2 * len(rows[chain]) >= longest}
        left_out = [chain for chain in chains if chain not in long]
        notes = [f"left out, with too few draws: chain {', '.join(map(str, left_out))}"] if left_out else []
        length = min(map(len, long.values()), default=0)
        if length < longest:
            notes.append(f"chains are compared by the first {length} draws of each")
        return Compared(list(long), [own[:length] for own in long.values()], notes)

    def trace(self, name: str) -> Tensor:
        """A column of the index of `made`, (chains, draws), cut to the length of the shortest chain."""
        rows = self.by_chain()
        for record in self.made:
            if name not in record or not isinstance(record[name], int | float | None):
                known = sorted(key for key, value in record.items() if isinstance(value, int | float))
                raise ValueError(f"there is no trace of '{name}'. Known: {', '.join(known)}.")
        length = min(map(len, rows.values()), default=0)
        return Compared(list(rows), [own[:length] for own in rows.values()], []).column(name)

    def load(self, record: Record) -> dict[str, Tensor]:
        """A copy of the weights of a draw, on the host."""
        return {name: x.clone() for name, x in self.store.load(record).items()}

    @property
    def scanned(self) -> list[str]:
        """Settings that differ between the chains of a scan, which then have targets of their own."""
        scan: dict[str, Any] = self.store.manifest["configuration"].get("scan", {})
        return list(scan)
