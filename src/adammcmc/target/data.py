"""Serves the training data: batches in an order that seed and epoch fix, and chosen examples.

The order belongs to the library, so that a run that stopped goes on with the very batch that would have come next:

    batch k of epoch e  =  rows k b ... (k + 1) b - 1 of a permutation that depends on seed and e alone

Tensors are served from where they lie: what is on an accelerator never visits the host.
"""

from __future__ import annotations

import copy
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from adammcmc.errors import warn

__all__ = ["Data", "Examples", "TensorExamples", "as_data", "derive_seed", "to_device"]

Batch = Any
"""A tensor, or tensors in tuples, lists and dictionaries, each with one row for each example."""


class Examples(Protocol):
    """The training set as losses of single examples at the weights that the model holds at the moment."""

    def __len__(self) -> int: ...

    def losses(self, indices: slice | Tensor) -> Tensor:
        """Losses of the chosen examples, shape (len(indices),). Called without gradient, except by `CorrectedMALA`."""
        ...


class TensorExamples:
    """Examples held in tensors: `loss(*batch)` gives the losses, one for each example of the batch.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(8, 3), torch.zeros(8, dtype=torch.long)
        >>> examples = TensorExamples(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y)
        >>> examples.losses(slice(0, 4)).shape
        torch.Size([4])
    """

    def __init__(self, loss: Callable[..., Tensor], *tensors: Tensor) -> None:
        if not tensors:
            raise ValueError("`tensors` must hold the data set, for example TensorExamples(loss, inputs, targets).")
        if len({len(t) for t in tensors}) > 1:
            raise ValueError(f"the tensors must have one length, got {[len(t) for t in tensors]}.")
        if len(tensors[0]) == 0:
            raise ValueError("the data set is empty.")
        self._loss = loss
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def losses(self, indices: slice | Tensor) -> Tensor:
        return self.losses_of(self.rows(indices))

    def rows(self, indices: slice | Tensor) -> list[Tensor]:
        """The chosen examples."""
        return [t[indices] for t in self._tensors]

    def losses_of(self, batch: list[Tensor]) -> Tensor:
        """Losses of these examples."""
        losses = self._loss(*batch)
        if losses.shape != (len(batch[0]),):
            raise ValueError(
                f"`loss` must return one loss for each example, shape ({len(batch[0])},), got {tuple(losses.shape)}. "
                'Most losses do with reduction="none".'
            )
        return losses


# --- the sources ----------------------------------------------------------------------------------------------------------


class Data(ABC):
    """A data set that serves batches for as long as they are asked for.

    Iterating never ends: epoch follows epoch. `state_dict` says which batch comes next, `load_state_dict` goes there.
    """

    num_data: int
    batch_size: int | None
    """Examples in a batch; None where the source decides."""
    _num_looked_at: int = 64
    why_not_resumable: str | None = None
    """Why a run over these data cannot go on after a stop; None if it can."""

    @abstractmethod
    def __next__(self) -> Batch: ...

    def __iter__(self) -> Iterator[Batch]:
        return self

    @abstractmethod
    def fetch(self, indices: slice | Tensor) -> Batch:
        """The chosen examples as one batch."""

    @abstractmethod
    def in_order(self, size: int) -> Iterator[Batch]:
        """All examples once, in their own order, about `size` at a time."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Which batch comes next."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that batch."""

    @abstractmethod
    def restart(self, seed: int) -> None:
        """Begin anew, in the order that this seed gives."""

    def all_rows(self) -> str | None:
        """A digest of every value that can be read at little cost; None where there is none. See `_digest`."""
        return None

    def fingerprint(self) -> str:
        """Hexadecimal digits that tell this data set from others: length, structure, and the values of some examples."""
        count = min(self._num_looked_at, self.num_data)
        rows = torch.from_numpy(np.linspace(0, self.num_data - 1, count).round().astype(np.int64))
        mark = _mix(0, [self.num_data])
        for path, leaf in _pytree.tree_flatten_with_path(self.fetch(rows))[0]:  # a path is the same in tuples and lists
            if isinstance(leaf, Tensor):
                words = f"{_pytree.keystr(path)} {leaf.dtype} {tuple(leaf.shape[1:])}"
                mark = _mix(mark, [*words.encode(), _checksum(leaf)])
        return f"{mark:016x}"


class Indexed(Data):
    """Data whose examples have numbers: an order of our own."""

    def __init__(self, num_data: int, batch_size: int | None) -> None:
        if num_data == 0:
            raise ValueError("the data set is empty.")
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
            raise ValueError(f"`batch_size` must be a positive integer, got {batch_size!r}.")
        self.num_data = num_data
        self.batch_size: int = num_data if batch_size is None else min(batch_size, num_data)
        self.restart(0)

    @property
    def num_batches(self) -> int:
        """In an epoch; what does not fill a batch waits for another epoch's order."""
        return self.num_data // self.batch_size

    def restart(self, seed: int) -> None:
        self._seed, self._epoch, self._position = seed, 0, 0
        self._order: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "epoch": self._epoch, "position": self._position, "batch_size": self.batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["batch_size"] != self.batch_size:
            raise ValueError(f"the run had batches of {state['batch_size']}, these data have batches of {self.batch_size}.")
        self.restart(state["seed"])
        self._epoch, self._position = state["epoch"], state["position"]

    def _advance(self) -> None:
        self._position += 1
        if self._position == self.num_batches:
            self._epoch, self._position, self._order = self._epoch + 1, 0, None

    def _permutation(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch))
        return torch.randperm(self.num_data, generator=generator)


class TensorData(Indexed):
    """Tensors (on any device) or arrays (in memory or mapped from a file), in tuples, lists or dictionaries."""

    def __init__(self, content: Any, batch_size: int | None = None) -> None:
        content = _pytree.tree_map(_opened, content, is_leaf=lambda x: not isinstance(x, tuple | list | dict))
        self._leaves, self._structure = _pytree.tree_flatten(content)
        lengths = {len(x) if x.ndim > 0 else -1 for x in self._leaves}
        if -1 in lengths:
            raise ValueError("the data hold a number where a tensor with one row for each example must be.")
        if len(lengths) > 1:
            sizes = ", ".join(str(len(x)) for x in self._leaves)
            raise ValueError(f"the tensors of the data must have one length, one row for each example, got {sizes}.")
        super().__init__(lengths.pop(), batch_size)
        # all of a small data set; of a large one as many as can be read in no time
        size = sum(x.nbytes for x in self._leaves) // self.num_data
        self._num_looked_at = max(64, (16 << 20) // max(1, size))
        devices = {x.device for x in self._leaves if isinstance(x, Tensor)}
        self._device = devices.pop() if len(devices) == 1 else torch.device("cpu")

    def __next__(self) -> Batch:
        if self.batch_size == self.num_data:
            self._advance()
            return self.fetch(slice(None))
        if self._order is None:
            self._order = self._permutation(self._epoch).to(self._device, non_blocking=True)
        rows = self._order[self._position * self.batch_size : (self._position + 1) * self.batch_size]
        self._advance()
        return self.fetch(rows)

    def all_rows(self) -> str | None:
        return _digest("tensors", self._leaves)

    def fetch(self, indices: slice | Tensor) -> Batch:
        return _pytree.tree_unflatten([_rows(x, indices) for x in self._leaves], self._structure)

    def in_order(self, size: int) -> Iterator[Batch]:
        for first in range(0, self.num_data, size):
            yield self.fetch(slice(first, first + size))


class DatasetData(Indexed):
    """A map-style `Dataset`, and what a `DataLoader` knows of how to read it.

    Random numbers that the data set draws (augmentation) are fixed by seed, epoch and batch, with any number of workers.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        *,
        collate: Callable[[list[Any]], Batch] = default_collate,
        **options: Any,
    ) -> None:
        super().__init__(len(dataset), batch_size)  # type: ignore[arg-type]
        self._source = _Batches(dataset, collate)
        self._options = options
        self._running: Iterator[Batch] | None = None

    def all_rows(self) -> str | None:
        dataset: Any = self._source._dataset
        if isinstance(dataset, TensorDataset):
            return _digest("tensors", dataset.tensors)
        return _digest("held", _held_arrays(dataset))

    def restart(self, seed: int) -> None:
        super().restart(seed)
        self._running = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._running = None

    def __next__(self) -> Batch:
        if self._running is None:
            self._running = self._load(self._jobs(self._epoch, self._position))
        batch = next(self._running)
        self._advance()
        return batch

    def _load(self, jobs: Iterator[tuple[int, list[int]]]) -> Iterator[Batch]:
        loader = DataLoader(self._source, batch_size=None, sampler=_Jobs(jobs), generator=torch.Generator(), **self._options)
        return iter(loader)

    def _jobs(self, epoch: int, position: int) -> Iterator[tuple[int, list[int]]]:
        """What to fetch, from here to eternity: the seed of its random numbers, and its examples."""
        size = self.batch_size
        while True:
            order = self._permutation(epoch) if size < self.num_data else torch.arange(self.num_data)
            for k in range(position, self.num_batches):
                yield derive_seed(self._seed, epoch, k), order[k * size : (k + 1) * size].tolist()
            epoch, position = epoch + 1, 0

    def fetch(self, indices: slice | Tensor) -> Batch:
        rows = list(range(self.num_data)[indices]) if isinstance(indices, slice) else indices.tolist()
        return self._source[derive_seed(self._seed, -1, rows[0]), rows]

    def in_order(self, size: int) -> Iterator[Batch]:
        each = min(size, 256)
        starts = range(0, self.num_data, each)
        rows = ((derive_seed(self._seed, -1, i), list(range(i, min(i + each, self.num_data)))) for i in starts)
        return regrouped(self._load(rows), size)


class IterableData(Data):
    """Batches from something that is iterated: its order is its own, and it can go on after a stop if it has `state_dict`."""

    def __init__(self, batches: Iterable[Batch], num_data: int | None, stateful: Any) -> None:
        self.num_data, self.batch_size = num_data or 0, None
        self._batches, self._stateful = batches, stateful
        if stateful is None:
            self.why_not_resumable = (
                f"{type(batches).__name__} has no `state_dict` and `load_state_dict`, so nobody knows which batch would come "
                "next. Give a Dataset with numbered examples, or one with these two methods (in a DataLoader: without workers, "
                "or a stateful loader)"
            )
        self._running: Iterator[Batch] | None = None
        self._first = self.state_dict()

    def restart(self, seed: int) -> None:
        self._running = None
        if self._stateful is not None:
            self.load_state_dict(copy.deepcopy(self._first))

    def __next__(self) -> Batch:
        for _ in range(2):
            if self._running is None:
                self._running = iter(self._batches)
            for batch in self._running:
                return batch
            self._running = None
        raise ValueError(
            f"{type(self._batches).__name__} came to its end and gives nothing when iterated again: it must be a loader or a "
            "data set, not a generator."
        )

    def fetch(self, indices: slice | Tensor) -> Batch:
        raise ValueError(
            f"an acceptance test asks for chosen examples, and {type(self._batches).__name__} can only be iterated. Give a "
            "Dataset with numbered examples, or tensors."
        )

    def in_order(self, size: int) -> Iterator[Batch]:
        return regrouped(iter(self._batches), size)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._stateful is None else {"iterable": copy.deepcopy(self._stateful.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._running = None
        self._stateful.load_state_dict(state["iterable"])

    def fingerprint(self) -> str:
        return f"iterable, {self.num_data}"


def as_data(source: Any, batch_size: int | None = None, num_data: int | None = None, *, must_know_length: bool = True) -> Data:
    """The data that a user has, as data that this library serves.

    Args:
        source: tensors or arrays with one row for each example, alone or in a tuple, list or dictionary; paths of .npy files
            in their place, which are mapped, not read; a map-style `Dataset`; a `DataLoader`, whose data set, batch size,
            collation and workers are taken over (the order is ours); an `IterableDataset` or any iterable of batches.
        batch_size: None is the DataLoader's, or else all data in one batch.
        num_data: needed for iterables without a length; otherwise known.
        must_know_length: whether to refuse an iterable of unknown length.
    """
    if isinstance(source, Data):
        if batch_size is not None and batch_size != source.batch_size:
            raise ValueError(f"`batch_size` is {batch_size}, but the data make batches of {source.batch_size}: say it there.")
        return source
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"`batch_size` must be a positive integer, got {batch_size!r}.")
    if isinstance(source, DataLoader):
        data = _from_loader(source, batch_size, num_data)
    elif isinstance(source, IterableDataset):
        if batch_size is None:
            raise ValueError("`batch_size` is needed with an IterableDataset: nobody knows how to fetch all of it at once.")
        stateful = source if _is_stateful(source) else None
        data = IterableData(DataLoader(source, batch_size), num_data or _length(source), stateful)
    elif isinstance(source, Dataset) or _looks_like_dataset(source) or _is_list_of_examples(source):
        data = DatasetData(source, batch_size)
    elif isinstance(source, Tensor | np.ndarray | str | Path | tuple | list | dict):
        data = TensorData(source, batch_size)
    elif isinstance(source, Iterable):
        data = IterableData(source, num_data, source if _is_stateful(source) else None)
    else:
        raise TypeError(
            "the data must be tensors (inputs, targets), a Dataset or a DataLoader, got " + type(source).__name__ + "."
        )
    if data.num_data == 0 and must_know_length:
        raise ValueError(f"the number of training examples is not known from {type(source).__name__}: pass `num_data`.")
    if num_data is not None and num_data != data.num_data:
        raise ValueError(f"`num_data` is {num_data}, but the data set holds {data.num_data} examples.")
    return data


def _from_loader(loader: DataLoader[Any], batch_size: int | None, num_data: int | None) -> Data:
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        if batch_size is not None and batch_size != loader.batch_size:
            raise ValueError(
                f"`batch_size` is {batch_size}, but the DataLoader makes batches of {loader.batch_size}: leave it out."
            )
        stateful: Any = loader if _is_stateful(loader) else dataset
        if not _is_stateful(stateful) or (stateful is dataset and loader.num_workers > 0):
            stateful = None
        return IterableData(loader, num_data or _length(dataset), stateful)
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            f"the DataLoader's {type(loader.batch_sampler).__name__} cannot be taken over, since the order of batches is the "
            "library's own. Pass the data set and a `batch_size`."
        )
    size = batch_size or loader.batch_size
    if loader.batch_sampler is None or size is None:
        raise ValueError("the DataLoader has batch_size=None: pass its data set and a `batch_size` instead.")
    chosen, total = _length(loader.sampler), _length(dataset)
    if chosen is not None and chosen != total:
        raise ValueError(
            f"the DataLoader's {type(loader.sampler).__name__} chooses {chosen} of {total} examples, and the library "
            "serves all of a data set. Choose them with torch.utils.data.Subset."
        )
    if not isinstance(loader.sampler, RandomSampler | SequentialSampler) or getattr(loader.sampler, "replacement", False):
        warn(
            f"the order of batches is the library's own, a permutation of all examples: the DataLoader's "
            f"{type(loader.sampler).__name__} is not used.",
        )
    options = {key: getattr(loader, key) for key in ("num_workers", "pin_memory", "timeout", "worker_init_fn")}
    if loader.num_workers > 0:
        options |= {"prefetch_factor": loader.prefetch_factor, "multiprocessing_context": loader.multiprocessing_context}
    return DatasetData(dataset, size, collate=loader.collate_fn, **options)


# --- random numbers -------------------------------------------------------------------------------------------------------


def derive_seed(*numbers: int) -> int:
    """A seed from numbers, such as (seed, chain, epoch); other numbers give an unrelated one.

    Example:
        >>> derive_seed(0, 1) == derive_seed(0, 1), derive_seed(0, 1) == derive_seed(1, 0)
        (True, False)
    """
    # numpy's SeedSequence would take (1,) and (1, 0) for the same
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@contextmanager
def _numbers_from(seed: int) -> Iterator[None]:
    """torch's, numpy's and Python's global random numbers start at this seed inside, and are as they were outside."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (what a data set may use)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


class _Batches(Dataset[Any]):
    """A data set of whole batches; what identifies one is the seed of its random numbers and its examples."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Batch]) -> None:
        self._dataset, self._collate = dataset, collate

    def __getattr__(self, name: str) -> Any:
        """What a `worker_init_fn` looks for in its data set."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, job: tuple[int, list[int]]) -> Batch:
        seed, rows = job
        with _numbers_from(seed):
            many = getattr(self._dataset, "__getitems__", None)
            examples = many(rows) if many is not None else [self._dataset[i] for i in rows]
            return self._collate(examples)


class _Jobs(torch.utils.data.Sampler[tuple[int, list[int]]]):
    """An endless iterator in the place where a DataLoader wants a sampler."""

    def __init__(self, jobs: Iterator[tuple[int, list[int]]]) -> None:
        self._jobs = jobs

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return self._jobs


# --- small things ---------------------------------------------------------------------------------------------------------


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors there; those that are there already are not copied."""
    return _pytree.tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), batch)


def num_rows(batch: Batch) -> int:
    """How many examples a batch holds."""
    for leaf in _pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return len(leaf)
    raise ValueError(f"a batch must hold tensors with one row for each example, got {type(batch).__name__}.")


def part_of(batch: Batch, rows: slice) -> Batch:
    """Some examples of a batch. A container whose tensors are not one row an example says itself how, with `part(rows)`."""
    if isinstance(batch, Tensor):
        return batch[rows] if batch.dim() > 0 else batch
    if hasattr(batch, "part"):
        return batch.part(rows)
    if isinstance(batch, Mapping):
        return {key: part_of(value, rows) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [part_of(value, rows) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def describe_batch(batch: Batch) -> str:
    """Shapes and dtypes, for messages."""
    return str(
        _pytree.tree_map_only(Tensor, lambda x: f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}", batch)
    ).replace("'", "")


def regrouped(batches: Iterator[Batch], size: int) -> Iterator[Batch]:
    """Batches joined until they have `size` rows."""
    waiting: list[Batch] = []
    count = 0
    for batch in batches:
        waiting.append(batch)
        count += num_rows(batch)
        if count >= size:
            yield joined_batches(waiting)
            waiting, count = [], 0
    if waiting:
        yield joined_batches(waiting)


def joined_batches(batches: list[Batch]) -> Batch:
    """One batch of several: tensors row after row, and so are lists of other things (names, for example)."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(batches)
    if isinstance(first, Mapping):
        return {key: joined_batches([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple | list):
        if not any(isinstance(leaf, Tensor) for leaf in _pytree.tree_leaves(first)):
            return [item for batch in batches for item in batch]
        parts = [joined_batches(list(column)) for column in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first


def _opened(leaf: Any) -> Tensor | np.ndarray[Any, Any]:
    if isinstance(leaf, str | Path):
        if not str(leaf).endswith(".npy"):
            raise ValueError(f"a file of data must be an .npy file (it is mapped, not read), got '{leaf}'.")
        # not np.load, which opens archives too, whatever the name
        return cast(np.ndarray[Any, Any], np.lib.format.open_memmap(leaf, mode="r"))
    if isinstance(leaf, np.ndarray):
        if leaf.dtype == object:
            raise TypeError("an array of the data has dtype object: make its rows equally long, and numbers.")
        return leaf
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"the data must be tensors or arrays with one row for each example, such as (inputs, targets), got "
            f"{type(leaf).__name__}."
        )
    return leaf.detach()


def _rows(x: Any, indices: slice | Tensor) -> Tensor:
    if isinstance(x, Tensor):
        return x[indices] if isinstance(indices, slice) else x.index_select(0, indices.to(x.device))
    rows = x[indices] if isinstance(indices, slice) else x[indices.cpu().numpy()]
    rows = np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("="))  # a file may have another order of bytes
    # a mapped file is read only, and torch wants memory that it might write to
    return torch.from_numpy(rows if rows.flags.writeable else rows.copy())


def _checksum(x: Tensor) -> int:
    """Of the bytes; computed where the tensor lies, only the result leaves."""
    if x.numel() == 0:
        return 0
    data = x.detach().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
    weights = torch.arange(1, data.numel() + 1, device=x.device).mul_(2_654_435_761).remainder_(2**31 - 1)
    return int((data * weights).sum())


_MOST_BYTES = 1 << 30  # of one tensor: more would take seconds to read


def _digest(kind: str, leaves: Sequence[Any]) -> str | None:
    """Of every value of the tensors and arrays that are not too large; `kind` says which those are."""
    leaves = [x for x in leaves if x.nbytes <= _MOST_BYTES]
    if not leaves:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for x in leaves:
        some = max(1, (1 << 24) // max(1, x.nbytes // max(1, len(x))))
        digest.update(f"{tuple(x.shape)} {_rows(x, slice(0, 0)).dtype} ".encode())
        for first in range(0, len(x), some):
            rows = _rows(x, slice(first, first + some)).cpu().contiguous()
            digest.update(cast(Any, rows.reshape(-1).view(torch.uint8).numpy()))
    return f"{kind}: {digest.hexdigest()}"


def _held_arrays(dataset: Any) -> list[Any]:
    """What a data set holds in memory under the usual names, one row for each example; of a subset, its rows of that."""
    if isinstance(dataset, Subset):
        whole = dataset.dataset
        held = list(whole.tensors) if isinstance(whole, TensorDataset) else _held_arrays(whole)
        rows = torch.as_tensor(dataset.indices)
        return [_rows(x, rows) for x in held if x.nbytes <= _MOST_BYTES]
    found: list[Any] = []
    for name in ("data", "targets", "labels"):
        x = getattr(dataset, name, None)
        if isinstance(x, list) and x and all(isinstance(value, int | float) for value in x):
            x = np.asarray(x)
        if isinstance(x, Tensor | np.ndarray) and x.dtype != object and x.ndim > 0 and len(x) == len(dataset):
            found.append(x)
    return found


def _mix(start: int, numbers: Sequence[int]) -> int:
    """Fowler, Noll and Vo's hash, 64 bits."""
    mark = start or 0xCBF29CE484222325
    for number in numbers:
        mark = ((mark ^ (number % 2**64)) * 0x100000001B3) % 2**64
    return mark


def _is_stateful(x: Any) -> bool:
    return hasattr(x, "state_dict") and hasattr(x, "load_state_dict")


def _length(x: Any) -> int | None:
    try:
        return len(x)
    except TypeError:
        return None


def _is_list_of_examples(x: Any) -> bool:
    return isinstance(x, list) and len(x) > 0 and isinstance(x[0], tuple | dict)


def _looks_like_dataset(x: Any) -> bool:
    """Has numbered examples and a length, and is no container of tensors."""
    is_container = isinstance(x, Tensor | np.ndarray | str | bytes | tuple | list | Mapping)
    return not is_container and hasattr(x, "__getitem__") and hasattr(x, "__len__")
