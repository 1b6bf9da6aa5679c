"""The interface of a store of draws, and the store in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils import _pytree

from adammcmc.posterior.store.encoding import Tensors, stored_dtype, strict_json
from adammcmc.posterior.store.records import Record

__all__ = ["MemoryStore", "Record", "Store"]


class Store(ABC):
    """The draws and checkpoints of a run. The key of a checkpoint is the number of a chain, or None for all chains.

    Args:
        manifest: what was run, as JSON.
    """

    path: Path | None = None
    """The folder of the run; None in memory."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        self.manifest = manifest
        self._index: dict[int, list[Record]] = {}

    @property
    def is_durable(self) -> bool:
        """Whether committed draws outlive the process."""
        return self.path is not None

    @property
    def is_stacked(self) -> bool:
        """Whether all chains share one checkpoint."""
        return bool(self.manifest["configuration"].get("stacked", False))

    @property
    def index(self) -> list[Record]:
        """The records of all draws, chain after chain."""
        return [record for chain in sorted(self._index) for record in self._index[chain]]

    def num_draws(self, chain: int) -> int:
        """How many draws this chain has made, with or without stored weights."""
        return len(self._index.get(chain, []))

    def kept(self) -> list[Record]:
        """The draws whose weights are stored."""
        keep = self.manifest["keep"]
        if keep == "moments":
            return []
        chains = [self._index[chain] for chain in sorted(self._index)]
        return [record for chain in chains for record in (chain if keep == "draws" else chain[-keep:])]

    @abstractmethod
    def append(self, record: Record, tensors: Tensors) -> None:
        """Add a draw of chain `record["chain"]`."""

    @abstractmethod
    def load(self, record: Record) -> dict[str, Tensor]:
        """The weights of a draw, on the host."""

    @abstractmethod
    def save(self, key: int | None, state: dict[str, Any]) -> None:
        """Replace the checkpoint."""

    @abstractmethod
    def saved(self, key: int | None) -> dict[str, Any] | None:
        """The newest checkpoint; None if there is none."""

    @abstractmethod
    def save_starts(self, states: Sequence[Tensors]) -> None:
        """Keep what the chains start from, a state dictionary for each."""

    @abstractmethod
    def starts(self) -> list[dict[str, Tensor]] | None:
        """What the chains started from; None if that was the model."""

    def commit(self, records: Sequence[Record], tensors: Tensors, state: dict[str, Any] | None) -> None:
        """Add a draw of one or all chains, tensors (chains, ...), and the checkpoint after it (None: no checkpoint)."""
        host = {name: x.detach().cpu() for name, x in tensors.items()}
        for row, record in enumerate(records):
            self.append(record, {name: x[row] for name, x in host.items()})
        if state is not None:  # last: a draw counts once its checkpoint exists
            self.save(None if self.is_stacked else records[0]["chain"], state)

    def restore(self, key: int | None, chains: Sequence[int]) -> dict[str, Any] | None:
        """The checkpoint to resume `chains` from. Draws after it are removed."""
        return self.saved(key)

    def write_manifest(self) -> None:  # noqa: B027  (nothing to do in memory)
        """Write the manifest to disk."""

    def flush(self) -> None:  # noqa: B027  (nothing to do in memory)
        """Wait until everything committed is stored, and raise any error of it."""

    def close(self) -> None:  # noqa: B027  (nothing to do in memory)
        """End writing."""


class MemoryStore(Store):
    """Draws in memory, for runs without a path."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        super().__init__(manifest)
        self._tensors: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._saved: dict[int | None, dict[str, Any]] = {}
        self._starts: list[dict[str, Tensor]] | None = None

    def append(self, record: Record, tensors: Tensors) -> None:
        chain, draw, keep = record["chain"], record["draw"], self.manifest["keep"]
        if keep != "moments":
            self._tensors[chain, draw] = _on_host(tensors, self.manifest["dtype"])  # first: memory may run out here
        self._index.setdefault(chain, []).append(strict_json(record))
        if isinstance(keep, int):
            self._tensors.pop((chain, draw - keep), None)

    def load(self, record: Record) -> dict[str, Tensor]:
        return self._tensors[record["chain"], record["draw"]]

    def save(self, key: int | None, state: dict[str, Any]) -> None:
        self._saved[key] = _pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), state)

    def saved(self, key: int | None) -> dict[str, Any] | None:
        return self._saved.get(key)

    def save_starts(self, states: Sequence[Tensors]) -> None:
        self._starts = [_on_host(state, None) for state in states]

    def starts(self) -> list[dict[str, Tensor]] | None:
        return self._starts


def _on_host(tensors: Tensors, dtype: str | None) -> dict[str, Tensor]:
    """Copies on the host that share no memory, floating-point ones in the given dtype."""
    return {name: x.detach().to("cpu", stored_dtype(x, dtype), copy=True).contiguous() for name, x in tensors.items()}
