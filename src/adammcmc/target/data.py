"""Serves the training data: batches in an order fixed by seed and epoch, and selected examples.

The library defines the order, so that a resumed run continues with the very next batch:

    batch k of epoch e  =  rows k b ... (k + 1) b - 1 of a permutation that depends on seed and e alone

In the order "palindrome" every second epoch serves the batches of the one before it backwards, and examples that would be left
over are shared out among the batches, so that the gradients of each epoch sum to that of all data:

    b_1 ... b_m b_m ... b_1, then a new permutation;   b_k = rows floor(k n / m) ... floor((k + 1) n / m) - 1, m = floor(n/b)

In the order "independent" each batch is drawn anew from all examples, with replacement, whatever came before.

Tensors are served from their own device: data on an accelerator never pass through the host.
"""

from __future__ import annotations

import copy
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import length_hint
from pathlib import Path
from typing import Any, Literal, Protocol, Self, cast, get_args

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
    TensorDataset,
    default_collate,
)

from adammcmc.errors import warn
from adammcmc.target.batches import Batch, num_rows, regrouped
from adammcmc.target.fingerprints import digest, fingerprint, held_arrays, select_rows

__all__ = ["Data", "Examples", "Indexed", "IterableData", "Order", "TensorExamples", "as_data", "derive_seed"]

Order = Literal["shuffled", "palindrome", "independent"]
"""Of the batches: a new permutation for each epoch; each permutation forward and then backward; or drawn with replacement."""

_Job = tuple[int, list[int]]
"""A batch to load: the seed of its random numbers, and its examples."""


class Data(ABC):
    """A data set that serves batches without end: epoch follows epoch.

    `state_dict` records which batch comes next, and `load_state_dict` continues there.
    """

    num_data: int
    batch_size: int | None
    """Examples in a batch; None if the source decides."""
    why_not_resumable: str | None = None
    """Why a run on these data cannot be resumed; None if it can."""
    _num_fingerprinted: int = 64

    @abstractmethod
    def __next__(self) -> Batch: ...

    def __iter__(self) -> Iterator[Batch]:
        return self

    @abstractmethod
    def fetch(self, indices: slice | Tensor) -> Batch:
        """The selected examples as one batch."""

    @abstractmethod
    def in_order(self, size: int) -> Iterator[Batch]:
        """All examples once, in their own order, about `size` at a time."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Which batch comes next."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with that batch."""

    @abstractmethod
    def restart(self, seed: int) -> None:
        """Start again, in the order given by this seed."""

    def in_the_order(self, order: Order) -> Data:
        """The same data with their batches in this order."""
        if order == "shuffled":
            return self
        raise ValueError(
            f"the batches must come in the order {order!r}, but {type(self).__name__} has an order of its own. Give tensors, "
            "or a Dataset with numbered examples."
        )

    def undivided(self) -> Data:
        """The same data, all examples in one batch."""
        raise ValueError(
            f"all examples are needed at once, and {type(self).__name__} can only be iterated. Give tensors, or a Dataset with "
            "numbered examples."
        )

    def as_tensors(self) -> Data:
        """The same examples, from tensors where a data set holds no more than these: much faster to select from."""
        return self

    def all_rows(self) -> str | None:
        """A digest of every value that is cheap to read; None if there are none."""
        return None

    def fingerprint(self) -> str:
        """Hexadecimal digits that identify the data set: length, structure, and the values of some examples."""
        count = min(self._num_fingerprinted, self.num_data)
        rows = torch.from_numpy(np.linspace(0, self.num_data - 1, count).round().astype(np.int64))
        return fingerprint(self.num_data, self.fetch(rows))


class Indexed(Data):
    """Data with numbered examples, in an order defined here."""

    def __init__(self, num_data: int, batch_size: int | None) -> None:
        if num_data == 0:
            raise ValueError("the data set is empty.")
        _check_batch_size(batch_size)
        self.num_data = num_data
        self.batch_size: int = num_data if batch_size is None else min(batch_size, num_data)
        self.order: Order = "shuffled"
        self.restart(0)

    @property
    def num_batches(self) -> int:
        """Batches in an epoch. Examples that fill no batch are left to later epochs, or shared out ("palindrome")."""
        return self.num_data // self.batch_size

    def in_the_order(self, order: Order) -> Self:
        if order not in get_args(Order):
            raise ValueError(f"`order` must be one of {', '.join(get_args(Order))}, got {order!r}.")
        other = copy.copy(self)
        other.order = order
        other.restart(self._seed)
        return other

    def undivided(self) -> Self:
        other = copy.copy(self)
        other.batch_size = self.num_data
        other.restart(self._seed)
        return other

    def _rows(self, epoch: int, position: int) -> slice | Tensor:
        """The rows of a batch in the permutation of its epoch."""
        if self.order == "shuffled":
            return slice(position * self.batch_size, (position + 1) * self.batch_size)
        if self.order == "independent":
            generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch, position, 1))
            return torch.randint(self.num_data, (self.batch_size,), generator=generator)
        k = self.num_batches - 1 - position if epoch % 2 else position
        return slice(k * self.num_data // self.num_batches, (k + 1) * self.num_data // self.num_batches)

    def restart(self, seed: int) -> None:
        self._seed, self._epoch, self._position = seed, 0, 0
        self._order: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        where = {"seed": self._seed, "epoch": self._epoch, "position": self._position, "batch_size": self.batch_size}
        return where if self.order == "shuffled" else {**where, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["batch_size"] != self.batch_size:
            raise ValueError(f"the run had batches of {state['batch_size']}, but these data have batches of {self.batch_size}.")
        if (order := state.get("order", "shuffled")) != self.order:
            raise ValueError(f"the run had its batches in the order {order!r}, but these data have the order {self.order!r}.")
        self.restart(state["seed"])
        self._epoch, self._position = state["epoch"], state["position"]

    def _advance(self) -> None:
        self._position += 1
        if self._position == self.num_batches:
            self._epoch, self._position, self._order = self._epoch + 1, 0, None

    def _permutation(self, epoch: int) -> Tensor:
        epoch -= epoch % 2 if self.order == "palindrome" else 0
        generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch))
        return torch.randperm(self.num_data, generator=generator)


class TensorData(Indexed):
    """Tensors (on any device) or arrays (in memory or mapped from a file), in tuples, lists or dictionaries."""

    def __init__(self, content: Any, batch_size: int | None = None) -> None:
        content = _pytree.tree_map(_opened, content, is_leaf=lambda x: not isinstance(x, tuple | list | dict))
        self._leaves, self._structure = _pytree.tree_flatten(content)
        lengths = {len(x) if x.ndim > 0 else -1 for x in self._leaves}
        if -1 in lengths:
            raise ValueError("the data hold a number where a tensor with one row for each example is required.")
        if len(lengths) > 1:
            sizes = ", ".join(str(len(x)) for x in self._leaves)
            raise ValueError(f"the tensors of the data must have one length, one row for each example, got {sizes}.")
        super().__init__(lengths.pop(), batch_size)
        # all examples of a small data set, as many of a large one as can be read quickly
        size = sum(x.nbytes for x in self._leaves) // self.num_data
        self._num_fingerprinted = max(64, (16 << 20) // max(1, size))
        devices = {x.device for x in self._leaves if isinstance(x, Tensor)}
        self._device = devices.pop() if len(devices) == 1 else torch.device("cpu")

    def __next__(self) -> Batch:
        if self.batch_size == self.num_data:
            self._advance()
            return self.fetch(slice(None))
        if self._order is None:
            self._order = self._permutation(self._epoch).to(self._device, non_blocking=True)
        rows = self._order[self._rows(self._epoch, self._position)]
        self._advance()
        return self.fetch(rows)

    def all_rows(self) -> str | None:
        return digest("tensors", self._leaves)

    def fetch(self, indices: slice | Tensor) -> Batch:
        return _pytree.tree_unflatten([select_rows(x, indices) for x in self._leaves], self._structure)

    def in_order(self, size: int) -> Iterator[Batch]:
        for first in range(0, self.num_data, size):
            yield self.fetch(slice(first, first + size))


class DatasetData(Indexed):
    """A map-style `Dataset`, read with the options of a `DataLoader`.

    Random numbers drawn by the data set (augmentation) are fixed by seed, epoch and batch, for any number of workers.
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
        return digest("tensors" if isinstance(dataset, TensorDataset) else "held", held_arrays(dataset))

    def as_tensors(self) -> Data:
        dataset = self._source._dataset
        is_plain = type(dataset) is TensorDataset and self._source._collate is default_collate
        if not is_plain:
            return self
        return TensorData(list(dataset.tensors), self.batch_size).in_the_order(self.order)  # type: ignore[attr-defined]

    def restart(self, seed: int) -> None:
        super().restart(seed)
        self._running = None

    def __next__(self) -> Batch:
        if self._running is None:
            self._running = self._load(self._jobs(self._epoch, self._position))
        batch = next(self._running)
        self._advance()
        return batch

    def _load(self, jobs: Iterable[_Job]) -> Iterator[Batch]:
        loader = DataLoader(self._source, batch_size=None, sampler=jobs, generator=torch.Generator(), **self._options)
        return iter(loader)

    def _jobs(self, epoch: int, position: int) -> Iterator[_Job]:
        """The batches from here on, without end."""
        size = self.batch_size
        while True:
            order = self._permutation(epoch) if size < self.num_data else torch.arange(self.num_data)
            for k in range(position, self.num_batches):
                yield derive_seed(self._seed, epoch, k), order[self._rows(epoch, k)].tolist()
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
    """Batches from an iterable, in its own order; a run on it can be resumed if it has a `state_dict`."""

    def __init__(self, batches: Iterable[Batch], num_data: int | None, stateful: Any) -> None:
        self.num_data, self.batch_size = num_data or 0, None
        self._batches, self._stateful = batches, stateful
        if stateful is None:
            self.why_not_resumable = (
                f"{type(batches).__name__} has no `state_dict` and `load_state_dict`, so the next batch is unknown. "
                "Give a Dataset with numbered examples, or one with these two methods (in a DataLoader: without "
                "workers, or a stateful loader)"
            )
        self._running: Iterator[Batch] | None = None
        self._is_resumed = False  # the pass begins somewhere in the data
        self._num_seen: int | None = None  # examples of this pass; None if its beginning was not seen
        self._num_last = 0  # of the last batch
        self._first = self.state_dict()

    def restart(self, seed: int) -> None:
        self._running = None
        if self._stateful is not None:
            self.load_state_dict(copy.deepcopy(self._first))
        self._is_resumed = False

    def __next__(self) -> Batch:
        for _ in range(2):
            if self._running is None:
                self._running = iter(self._batches)
                self._num_seen, self._is_resumed = (None if self._is_resumed else 0), False
            for batch in self._running:
                self._count(batch)
                return batch
            self._check_pass()
            self._running = None
        raise ValueError(
            f"{type(self._batches).__name__} is exhausted and gives nothing when iterated again: it must be a loader "
            "or a data set, not a generator."
        )

    def _count(self, batch: Batch) -> None:
        try:
            self._num_last = num_rows(batch)
        except ValueError:  # no tensors: only the loss knows what an example is
            self._num_seen = None
        if self._num_seen is not None:
            self._num_seen += self._num_last

    def _check_pass(self) -> None:
        """At the end of a pass: whether it had `num_data` examples. The last batch may have been dropped."""
        seen, n = self._num_seen, self.num_data
        if not seen or not n or n - self._num_last < seen <= n:
            return
        raise ValueError(
            f"a pass over {type(self._batches).__name__} had {seen:,} examples, but `num_data` is {n:,}, and the loss counts "
            f"{n / seen:.3g} times as much as it should. Pass the number of different examples; if each pass serves another "
            "part of them, make the iterable endless."
        )

    def fetch(self, indices: slice | Tensor) -> Batch:
        raise ValueError(
            f"the acceptance test selects examples, but {type(self._batches).__name__} can only be iterated. Give a "
            "Dataset with numbered examples, or tensors."
        )

    def in_order(self, size: int) -> Iterator[Batch]:
        return regrouped(iter(self._batches), size)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._stateful is None else {"iterable": copy.deepcopy(self._stateful.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._running, self._is_resumed = None, True
        self._stateful.load_state_dict(state["iterable"])

    def fingerprint(self) -> str:
        return f"iterable, {self.num_data}"


def as_data(
    source: Any,
    batch_size: int | None = None,
    num_data: int | None = None,
    *,
    must_know_length: bool = True,
    order: Order = "shuffled",
) -> Data:
    """A user's data as a `Data`.

    Args:
        source: tensors or arrays with one row for each example, alone or in a tuple, list or dictionary; paths of .npy
            files in their place, which are memory-mapped; a map-style `Dataset`; a `DataLoader`, whose data set, batch
            size, collation and workers are used (but not its order); an `IterableDataset` or any iterable of batches.
        batch_size: None is the DataLoader's, or else all data in one batch.
        num_data: required for iterables without a length.
        must_know_length: whether to refuse an iterable of unknown length.
        order: of the batches; "independent" is what `MinibatchLangevin` needs.
    """
    if order != "shuffled":
        return as_data(source, batch_size, num_data, must_know_length=must_know_length).in_the_order(order)
    if isinstance(source, Data):
        if batch_size is not None and batch_size != source.batch_size:
            raise ValueError(f"`batch_size` is {batch_size}, but the data make batches of {source.batch_size}: set it there.")
        return source
    _check_batch_size(batch_size)
    if isinstance(source, DataLoader):
        data = _from_loader(source, batch_size, num_data)
    elif isinstance(source, IterableDataset):
        if batch_size is None:
            raise ValueError("`batch_size` is needed with an IterableDataset: it cannot be fetched as one batch.")
        data = IterableData(DataLoader(source, batch_size), num_data or length_hint(source), _stateful(source))
    elif isinstance(source, Dataset) or _has_numbered_examples(source):
        data = DatasetData(source, batch_size)
    elif isinstance(source, Tensor | np.ndarray | str | Path | tuple | list | dict):
        data = TensorData(source, batch_size)
    elif isinstance(source, Iterable):
        data = IterableData(source, num_data, _stateful(source))
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
        stateful = _stateful(loader)
        if stateful is None and loader.num_workers == 0:
            stateful = _stateful(dataset)
        return IterableData(loader, num_data or length_hint(dataset), stateful)
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            f"the DataLoader's {type(loader.batch_sampler).__name__} cannot be taken over, since the library defines "
            "the order of batches. Pass the data set and a `batch_size`."
        )
    size = batch_size or loader.batch_size
    if loader.batch_sampler is None or size is None:
        raise ValueError("the DataLoader has batch_size=None: pass its data set and a `batch_size` instead.")
    total = len(dataset)  # type: ignore[arg-type]
    chosen = length_hint(loader.sampler, total)
    if chosen != total:
        raise ValueError(
            f"the DataLoader's {type(loader.sampler).__name__} chooses {chosen} of {total} examples, but the library "
            "serves the whole data set. Choose them with torch.utils.data.Subset."
        )
    if not isinstance(loader.sampler, RandomSampler | SequentialSampler) or getattr(loader.sampler, "replacement", False):
        warn(
            f"the library defines the order of batches, a permutation of all examples: the DataLoader's "
            f"{type(loader.sampler).__name__} is not used.",
        )
    options = {key: getattr(loader, key) for key in ("num_workers", "pin_memory", "timeout", "worker_init_fn")}
    if loader.num_workers > 0:
        options |= {"prefetch_factor": loader.prefetch_factor, "multiprocessing_context": loader.multiprocessing_context}
    return DatasetData(dataset, size, collate=loader.collate_fn, **options)


def derive_seed(*numbers: int) -> int:
    """A seed from numbers such as (seed, chain, epoch); different numbers give unrelated seeds.

    Example:
        >>> derive_seed(0, 1) == derive_seed(0, 1), derive_seed(0, 1) == derive_seed(1, 0)
        (True, False)
    """
    # numpy's SeedSequence gives (1,) and (1, 0) the same seed
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Examples(Protocol):
    """The training set as per-example losses at the model's current weights."""

    def __len__(self) -> int: ...

    def losses(self, indices: slice | Tensor) -> Tensor:
        """Losses of the selected examples, (len(indices),). Called without gradient, except by `CorrectedMALA`."""


class TensorExamples:
    """Examples held in tensors: `loss(*batch)` gives the losses, one per example of the batch.

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
        """The selected examples."""
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


class _Batches(Dataset[Any]):
    """A data set of whole batches, each identified by a `_Job`."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Batch]) -> None:
        self._dataset, self._collate = dataset, collate

    def __getattr__(self, name: str) -> Any:
        """Attributes of the data set, for a `worker_init_fn`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, job: _Job) -> Batch:
        seed, rows = job
        with _global_seed(seed):
            many = getattr(self._dataset, "__getitems__", None)
            examples = many(rows) if many is not None else [self._dataset[i] for i in rows]
            return self._collate(examples)


@contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python inside, and restore them afterwards."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (which a data set may use)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


def _opened(leaf: Any) -> Tensor | np.ndarray[Any, Any]:
    if isinstance(leaf, str | Path):
        if not str(leaf).endswith(".npy"):
            raise ValueError(f"a data file must be an .npy file (it is memory-mapped), got '{leaf}'.")
        # not np.load, which also opens archives, whatever the name
        return cast(np.ndarray[Any, Any], np.lib.format.open_memmap(leaf, mode="r"))
    if isinstance(leaf, np.ndarray):
        if leaf.dtype == object:
            raise TypeError("an array of the data has dtype object: its rows must be numbers, and equally long.")
        return leaf
    if not isinstance(leaf, Tensor):
        raise TypeError(
            "the data must be tensors or arrays with one row for each example, such as (inputs, targets), got "
            f"{type(leaf).__name__}."
        )
    return leaf.detach()


def _check_batch_size(size: Any) -> None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"`batch_size` must be a positive integer, got {size!r}.")


def _stateful(x: Any) -> Any:
    """The argument if its position can be saved and restored, else None."""
    return x if hasattr(x, "state_dict") and hasattr(x, "load_state_dict") else None


def _has_numbered_examples(x: Any) -> bool:
    """Whether it is a sequence of examples, and not a container of tensors."""
    if isinstance(x, list):
        return len(x) > 0 and isinstance(x[0], tuple | dict)
    is_container = isinstance(x, Tensor | np.ndarray | str | bytes | tuple | Mapping)
    return not is_container and hasattr(x, "__getitem__") and hasattr(x, "__len__")
