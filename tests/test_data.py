"""Data: the same batches whatever they come from, in an order that seed and epoch fix, and that can be gone on with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

from adammcmc.target.data import Data, Order, as_data, derive_seed

X = torch.arange(40.0).reshape(20, 2)
Y = torch.arange(20)


class Squares(Dataset[Any]):
    """Examples as a user writes them, drawing from all three sources of random numbers."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(()) + float(np.random.rand()) + random.random()  # noqa: NPY002
        return X[i] + noise, Y[i]


class Counter(IterableDataset[Any]):
    """Counts, and knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 20:
            self.at += 1
            yield torch.tensor([float(self.at)])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def sources(tmp_path: Path) -> dict[str, Any]:
    np.save(tmp_path / "x.npy", X.numpy())
    np.save(tmp_path / "y.npy", Y.numpy())
    return {
        "tensors": (X, Y),
        "list": [X, Y],
        "arrays": (X.numpy(), Y.numpy()),
        "mapped": (np.load(tmp_path / "x.npy", mmap_mode="r"), np.load(tmp_path / "y.npy", mmap_mode="r")),
        "paths": (tmp_path / "x.npy", str(tmp_path / "y.npy")),
        "dataset": TensorDataset(X, Y),
        "loader": DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True),
        "pairs": list(zip(X, Y, strict=True)),
    }


def take(data: Data, count: int) -> list[Any]:
    return [next(data) for _ in range(count)]


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_all_sources_serve_the_same_batches(tmp_path: Path) -> None:
    streams = {}
    for name, source in sources(tmp_path).items():
        data = as_data(source, 6)
        data.restart(3)
        streams[name] = take(data, 7)
        assert data.num_data == 20
        assert data.fingerprint() == as_data((X, Y)).fingerprint()
    for name, batches in streams.items():
        assert all(equal(a, b) for a, b in zip(batches, streams["tensors"], strict=True)), name
        assert all(torch.equal(x[:, 0], 2.0 * y) for x, y in batches), name  # rows stay together


def test_an_epoch_is_a_permutation_and_the_next_one_another() -> None:
    data = as_data((X, Y), 5)
    data.restart(0)
    first, second = (torch.cat([y for _, y in take(data, 4)]) for _ in range(2))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(20))
    assert first.tolist() != second.tolist()


def test_a_palindrome_goes_through_the_data_forward_and_then_backward() -> None:
    data = as_data((X, Y), 6, order="palindrome")
    data.restart(3)
    epochs = [[next(data)[1].tolist() for _ in range(3)] for _ in range(4)]
    for forward, backward in (epochs[:2], epochs[2:]):
        assert forward == backward[::-1]
        assert sorted(row for batch in forward for row in batch) == list(range(20)), "none is left over"
    assert epochs[0] != epochs[2]
    assert [len(batch) for batch in epochs[0]] == [6, 7, 7]


def test_independent_batches_are_drawn_anew_with_replacement() -> None:
    """Each example has the same chance in each batch, whatever the batches before: counts are multinomial."""
    data = as_data((X, Y), 5, order="independent")
    data.restart(3)
    batches = torch.stack([next(data)[1] for _ in range(4000)])
    counts = batches.flatten().bincount(minlength=20).double()
    assert float(((counts - 1000).square() / 1000).sum()) < 43.8, "chi-square with 19 degrees of freedom, p = 0.001"
    # of neighbours, within an epoch of four batches and across its end: 25 pairs of examples, equal with probability 1/20
    equal = (batches[1:, :, None] == batches[:-1, None, :]).double().sum((1, 2))
    assert abs(float(equal.mean()) - 1.25) < 4.5 * float(equal.std()) / 3999**0.5
    within = (batches[:, :, None] == batches[:, None, :]).double().sum((1, 2)) - 5
    assert abs(float(within.mean()) - 1.0) < 4.5 * float(within.std()) / 4000**0.5


@pytest.mark.parametrize("order", ["palindrome", "independent"])
@pytest.mark.parametrize("kind", ["tensors", "dataset"])
def test_every_order_goes_on_bit_for_bit(order: Order, kind: str) -> None:
    def fresh() -> Data:
        data = as_data((X, Y) if kind == "tensors" else TensorDataset(X, Y), 6, order=order)
        data.restart(5)
        return data

    data = fresh()
    batches = [next(data)[1].tolist() for _ in range(14)]
    for stop in range(14):
        first, second = fresh(), fresh()
        for _ in range(stop):
            next(first)
        second.load_state_dict(first.state_dict())
        assert [next(second)[1].tolist() for _ in range(14 - stop)] == batches[stop:], stop
    with pytest.raises(ValueError, match="order"):
        as_data((X, Y), 6).load_state_dict(data.state_dict())
    with pytest.raises(ValueError, match="order of its own"):
        as_data(iter([X]), num_data=20, order=order)


@pytest.mark.parametrize("workers", [0, 2])
def test_going_on_is_bit_for_bit_with_augmentation_and_any_number_of_workers(workers: int) -> None:
    plain = as_data(Squares(), 6)
    plain.restart(1)
    wanted = take(plain, 8)
    for stop in (2, 5):
        data = as_data(DataLoader(Squares(), batch_size=6, num_workers=workers))
        data.restart(1)
        got = take(data, stop)
        state = data.state_dict()
        data.restart(9)
        again = as_data(DataLoader(Squares(), batch_size=6, num_workers=workers))
        again.load_state_dict(state)
        got += take(again, 8 - stop)
        assert all(equal(a, b) for a, b in zip(got, wanted, strict=True))
        data.restart(0)
        again.restart(0)


def test_fetching_leaves_the_global_random_numbers_alone() -> None:
    data = as_data(Squares(), 6)
    torch.manual_seed(0), np.random.seed(0), random.seed(0)  # noqa: NPY002
    wanted = torch.rand(3), np.random.rand(), random.random()  # noqa: NPY002
    torch.manual_seed(0), np.random.seed(0), random.seed(0)  # noqa: NPY002
    next(data)
    assert torch.equal(torch.rand(3), wanted[0])
    assert (np.random.rand(), random.random()) == wanted[1:]  # noqa: NPY002


def test_an_iterable_with_a_state_goes_on_and_one_without_says_why_not() -> None:
    data = as_data(DataLoader(Counter(), batch_size=4), num_data=20)
    assert data.why_not_resumable is None
    first = take(data, 2)
    state = data.state_dict()
    wanted = take(data, 5)  # over the end of the epoch
    again = as_data(DataLoader(Counter(), batch_size=4), num_data=20)
    again.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(take(again, 5), wanted, strict=True))
    again.restart(0)
    assert torch.equal(next(again), first[0])

    class Stateless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(X)

    reason = as_data(DataLoader(Stateless(), batch_size=4), num_data=20).why_not_resumable
    assert reason is not None
    assert "no `state_dict`" in reason
    with pytest.raises(ValueError, match="gives nothing when iterated again"):
        take(as_data((b for b in [X]), num_data=20), 3)


def test_in_order_serves_every_example_once(tmp_path: Path) -> None:
    for name, source in sources(tmp_path).items():
        for size in (1, 7, 100):
            parts = list(as_data(source, 6).in_order(size))
            assert torch.equal(torch.cat([y for _, y in parts]), Y), name
    counted = list(as_data(DataLoader(Counter(), batch_size=4), num_data=20).in_order(8))
    assert [len(part) for part in counted] == [8, 8, 4]


def test_chosen_examples(tmp_path: Path) -> None:
    for source in sources(tmp_path).values():
        x, y = as_data(source, 6).fetch(torch.tensor([3, 1]))
        assert torch.equal(y, torch.tensor([3, 1]))
        assert torch.equal(x, X[[3, 1]])
        assert torch.equal(as_data(source, 6).fetch(slice(2, 5))[1], Y[2:5])


def test_the_fingerprint_sees_values_and_lengths() -> None:
    other = X.clone()
    other[0, 0] += 1e-3
    marks = {
        as_data(d).fingerprint() for d in ((X, Y), (other, Y), (X.double(), Y), (X[:-1], Y[:-1]), X, (Y, X), {"x": X, "y": Y})
    }
    assert len(marks) == 7


class Held(Dataset[Any]):
    """Keeps its labels where torchvision does."""

    def __init__(self, targets: Any) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.ones(2), int(self.targets[i])


@pytest.mark.parametrize("kind", ["tensors", "TensorDataset", "Subset", "targets", "array", "list", "loader"])
def test_one_changed_label_of_many_is_seen(kind: str) -> None:
    """A fingerprint reads some examples; what lies in memory is read whole."""
    x = torch.zeros(200_000, 3)

    def made(changed: int | None) -> Any:
        y = torch.arange(200_000) % 10
        if changed is not None:
            y[changed] += 1
        wholes = {
            "tensors": (x, y),
            "TensorDataset": TensorDataset(x, y),
            "Subset": Subset(TensorDataset(x, y), range(100_000, 200_000)),
            "targets": Held(y),
            "array": Held(y.numpy()),
            "list": Held(y.tolist()),
            "loader": DataLoader(TensorDataset(x, y), batch_size=8),
        }
        return as_data(wholes[kind]).all_rows()

    assert made(None) == made(None)
    assert made(None) is not None
    assert made(123_456) != made(None)


def test_a_loader_with_an_order_of_its_own_is_told_that_it_is_not_used() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, sampler=WeightedRandomSampler([1.0] * 20, 20))
    with pytest.warns(UserWarning, match="WeightedRandomSampler is not used"):
        as_data(loader)


def test_seeds_are_unrelated() -> None:
    seeds = {derive_seed(a, b, c) for a in range(10) for b in range(10) for c in range(3)}
    assert len(seeds) == 300
    assert all(0 <= s < 2**63 for s in seeds)


def test_seeds_do_not_collide() -> None:
    assert derive_seed(5, 3) != derive_seed(5, 3, 0)
    assert derive_seed(7, 1, 0) != derive_seed(7 + 2**32, 0, 0)


def test_a_worker_finds_its_data_set() -> None:
    class Opened(Squares):
        offset = 0

        def open(self) -> None:
            self.offset = 100

        def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
            return X[i] + self.offset, Y[i]

    data = as_data(DataLoader(Opened(), 5, num_workers=1, worker_init_fn=_open))
    x, y = next(data)
    assert torch.equal(x, X[y] + 100)
    data.restart(0)


def _open(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.open()  # type: ignore[attr-defined]


def test_big_endian_files(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.numpy().astype(">f4"))
    assert torch.equal(as_data((tmp_path / "x.npy",)).fetch(slice(None))[0], X)


def test_structures_stay(tmp_path: Path) -> None:
    batch = next(as_data({"a": X, "b": (Y, X)}, 4))
    assert batch["a"].shape == (4, 2)
    assert batch["b"][0].shape == (4,)
    assert next(as_data(X, 4)).shape == (4, 2)


@pytest.mark.parametrize(("num_data", "passes"), [(10, True), (11, True), (13, False), (100, False), (8, False)])
def test_the_examples_of_a_pass_are_counted(num_data: int, passes: bool) -> None:
    """A batch as large as the last one may have been dropped."""

    class Batches:
        def __iter__(self) -> Any:
            return iter([(torch.zeros(n, 2), torch.zeros(n)) for n in (4, 4, 2)])

    served = as_data(Batches(), num_data=num_data)
    for _ in range(3):
        next(served)
    if passes:
        next(served)
        return
    with pytest.raises(ValueError, match=r"a pass over Batches had 10 examples, but `num_data` is"):
        next(served)
