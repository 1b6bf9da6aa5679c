"""The store: whole files or none, one writer, refusals with their reason, and nothing that needs this library to be read."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import adammcmc.posterior.store.folder as store_module
from adammcmc import StoreCorrupt, StoreFull, StoreLocked, StoreMismatch
from adammcmc.posterior.moments import Moments
from adammcmc.posterior.store.archives import check_space, format_bytes
from adammcmc.posterior.store.encoding import decode, encode, read_state, safetensors_parts, write_state
from adammcmc.posterior.store.folder import FolderStore, MemoryStore, Store
from adammcmc.posterior.store.records import FORMAT, read_lines

MANIFEST: dict[str, Any] = {
    "keep": "draws",
    "dtype": None,
    "has_targets": True,
    "num_parts": 2,
    "target": "a test",
    "target_at_first": "a test",
    "configuration": {"num_chains": 1, "num_draws": 3},
    "data": {"num_data": 10, "fingerprint": "0"},
    "model": {"tensors": {}},
    "created": "2026-01-01T00:00:00",
    "likelihood": {"name": "values", "noise": None},
    "versions": {"adammcmc": "0"},
}


def record(draw: int, chain: int = 0, **more: Any) -> dict[str, Any]:
    return {"draw": draw, "chain": chain, "step": 10 * draw, "loss": 0.5, "health": {"num_steps": 10 * draw}, **more}


def draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 4, generator=generator)
    # two names for parts of one storage, an integer, a number
    return {"weight": weight, "row": weight[1], "tied": weight, "count": torch.tensor(seed), "scale": torch.tensor(0.5)}


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A draw of one chain, as `commit` takes it: (chains, ...)."""
    return {name: x[None] for name, x in tensors.items()}


def filled(path: Path, num_draws: int = 3, **changes: Any) -> FolderStore:
    store = FolderStore(path, {**MANIFEST, **changes})
    store.save(0, {"num_draws": 0})
    store.write_manifest()
    for i in range(num_draws):
        store.append(record(i), draw(i))
        store.save(0, {"num_draws": i + 1})
    return store


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    filled(tmp_path / "run").close()
    store = FolderStore(tmp_path / "run")
    assert [r["step"] for r in store.index] == [0, 10, 20]
    assert all(same(store.load(r), draw(i)) for i, r in enumerate(store.kept()))
    assert store.saved(0) == {"num_draws": 3}
    assert store.saved(1) is None
    assert store.manifest["target"] == "a test"


def test_every_dtype_is_read_back_by_the_package_itself(tmp_path: Path) -> None:
    floats = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    whole = [
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
    ]
    tensors = {str(kind): torch.arange(6).reshape(2, 3).t().to(kind) for kind in [*floats, *whole, torch.complex64]}
    tensors |= {"empty": torch.zeros(0, 3), "number": torch.tensor(3.0), "odd": torch.ones(3, dtype=torch.int8)}
    file = tmp_path / "all.safetensors"
    file.write_bytes(b"".join(safetensors_parts(tensors, {"a": 'with "quotes"'})))
    back = load_file(file)
    assert back.keys() == tensors.keys()
    for name, x in tensors.items():
        assert back[name].dtype == x.dtype
        assert back[name].shape == x.shape
        assert back[name].reshape(-1).view(torch.uint8).tolist() == x.contiguous().reshape(-1).view(torch.uint8).tolist(), name
    with safe_open(file, framework="pt") as content:
        assert content.metadata() == {"crc32": "0" * 8, "format": "2", "a": 'with "quotes"'}


def test_it_can_be_read_without_this_library(tmp_path: Path) -> None:
    filled(tmp_path / "run").close()
    lines = (tmp_path / "run" / "chain-0" / "index.jsonl").read_text().splitlines()
    first = json.loads(lines[1])
    assert same(load_file(tmp_path / "run" / "chain-0" / first["file"]), draw(1))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["format"] == FORMAT


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    store = filled(tmp_path / "run", 0)
    store.append(record(0, loss=math.nan, health={"num_steps": 0, "rate": math.inf}), draw(0))
    text = (tmp_path / "run" / "chain-0" / "index.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert store.index[0]["loss"] is None
    assert store.index[0]["health"]["rate"] is None


def test_the_dtype_of_draws_can_be_chosen(tmp_path: Path) -> None:
    stores: list[Store] = [filled(tmp_path / "run", 1, dtype="bfloat16"), MemoryStore({**MANIFEST, "dtype": "bfloat16"})]
    stores[1].append(record(0), draw(0))
    for store in stores:
        loaded = store.load(store.kept()[0])
        assert loaded["weight"].dtype == torch.bfloat16
        assert loaded["count"].dtype == torch.int64
        assert torch.equal(loaded["weight"], draw(0)["weight"].bfloat16())


def test_a_draw_in_memory_is_a_copy() -> None:
    store, tensors = MemoryStore(MANIFEST), draw(0)
    store.append(record(0), tensors)
    store.save(0, {"a": tensors["weight"]})
    tensors["weight"].zero_()
    assert same(store.load(store.index[0]), draw(0))
    saved = store.saved(0)
    assert saved is not None
    assert torch.equal(saved["a"], draw(0)["weight"])


@pytest.mark.parametrize("keep", [1, 3])
def test_the_last_draws_are_kept(tmp_path: Path, keep: int) -> None:
    store: Store
    for store in (filled(tmp_path / "run", 6, keep=keep), MemoryStore({**MANIFEST, "keep": keep})):
        if isinstance(store, MemoryStore):
            for i in range(6):
                store.append(record(i), draw(i))
        else:
            # and the one more that the checkpoint before the last needs
            assert len(list((tmp_path / "run" / "chain-0").glob("draw-*"))) == keep + 1
        assert [r["draw"] for r in store.kept()] == list(range(6 - keep, 6))
        assert all(same(store.load(r), draw(r["draw"])) for r in store.kept())
        assert len(store.index) == 6


def test_moments_only(tmp_path: Path) -> None:
    store = filled(tmp_path / "run", 4, keep="moments")
    assert store.kept() == []
    assert store.num_draws(0) == 4
    assert not list((tmp_path / "run" / "chain-0").glob("draw-*"))


def test_moments_equal_numpy() -> None:
    draws = [draw(i) for i in range(7)]
    parts = [Moments(), Moments()]
    for i, d in enumerate(draws):
        parts[i % 2].add(d)
    parts[0] = Moments(parts[0].state_dict())
    parts[0].merge(parts[1])
    parts[0].merge(Moments())
    values = np.stack([d["weight"].double().numpy() for d in draws])
    np.testing.assert_allclose(parts[0].mean["weight"].numpy(), values.mean(0), rtol=1e-12)
    np.testing.assert_allclose(parts[0].variance["weight"].numpy(), values.var(0), rtol=1e-10)
    assert parts[0].count == 7
    assert "count" not in parts[0].mean  # no mean of integers


class Elsewhere:
    """Pretends that tensors are not on the host, so that commits go through the writing thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FolderStore, "_is_on_host", staticmethod(lambda tensors: False))


def test_what_is_written_in_the_background_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Elsewhere(monkeypatch)
    store = FolderStore(tmp_path / "run", MANIFEST)
    store.write_manifest()
    for i in range(5):
        tensors = draw(i)
        store.commit([record(i)], stacked(tensors), {"num_draws": i + 1, "weight": tensors["weight"]})
        tensors["weight"].zero_()  # the chain goes on while it is written
    store.close()
    again = FolderStore(tmp_path / "run")
    assert all(same(again.load(r), draw(i)) for i, r in enumerate(again.kept()))
    saved = again.saved(0)
    assert saved is not None
    assert saved["num_draws"] == 5
    assert torch.equal(saved["weight"], draw(4)["weight"])


def test_a_failure_in_the_background_is_raised_at_the_next_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "run")
    Elsewhere(monkeypatch)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    store.commit([record(3)], stacked(draw(3)), {"num_draws": 4})
    with pytest.raises(StoreFull):
        store.commit([record(4)], stacked(draw(4)), {"num_draws": 5})
    monkeypatch.undo()
    store.close()
    again = FolderStore(tmp_path / "run", writes=True)
    assert len(again.index) == 3
    assert again.saved(0) == {"num_draws": 3}
    again.close()


# --- interruptions --------------------------------------------------------------------------------------------------------


def test_half_a_line_does_not_count_and_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    filled(tmp_path / "run").close()
    index = tmp_path / "run" / "chain-0" / "index.jsonl"
    whole = index.read_bytes()
    index.write_bytes(whole + b'{"draw": 3, "chai')
    (tmp_path / "run" / "chain-0" / "draw-000003.safetensors.tmp").write_bytes(b"half")
    assert len(FolderStore(tmp_path / "run").index) == 3
    assert index.read_bytes() != whole  # a reader touches nothing
    FolderStore(tmp_path / "run", writes=True).close()
    assert index.read_bytes() == whole
    assert not list((tmp_path / "run" / "chain-0").glob("*.tmp"))


def test_draws_after_the_checkpoint_are_forgotten_on_resume(tmp_path: Path) -> None:
    filled(tmp_path / "run", 5).close()
    store = FolderStore(tmp_path / "run", writes=True)
    store.rewind(0, 3)
    assert [r["draw"] for r in store.index] == [0, 1, 2]
    assert len(list((tmp_path / "run" / "chain-0").glob("draw-*"))) == 3
    store.append(record(3), draw(3))
    store.save(0, {"num_draws": 4})
    store.close()
    assert [r["draw"] for r in FolderStore(tmp_path / "run").index] == [0, 1, 2, 3]


def test_a_checkpoint_that_is_ahead_of_the_index_is_not_used(tmp_path: Path) -> None:
    store = filled(tmp_path / "run")
    store.save(0, {"num_draws": 9})
    with pytest.warns(UserWarning, match="has 3 draws, its checkpoint 9: lines are missing.*from the previous checkpoint"):
        assert store.restore(0, [0]) == {"num_draws": 3}
    assert store.saved(0) == {"num_draws": 3}
    store.save(0, {"num_draws": 8})
    store.save(0, {"num_draws": 9})
    with pytest.raises(StoreCorrupt, match="has 3 draws, its checkpoint 9"):
        store.restore(0, [0])
    store.close()


def test_a_run_that_was_killed_before_it_began_can_begin(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "run", MANIFEST)
    store.save(0, {"num_draws": 0})
    store.close()
    with pytest.raises(StoreMismatch, match="holds no run"):
        FolderStore(tmp_path / "run")
    FolderStore(tmp_path / "run", MANIFEST).close()


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    store = filled(tmp_path / "run")
    with pytest.raises(StoreLocked, match="another process writes to"):
        FolderStore(tmp_path / "run", writes=True)
    code = "import sys, adammcmc.posterior.store.folder as s; s.FolderStore(sys.argv[1], writes=True)"
    other = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert "StoreLocked" in other.stderr
    assert len(FolderStore(tmp_path / "run").index) == 3
    store.close()
    FolderStore(tmp_path / "run", writes=True).close()


def test_a_forked_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    """Workers that load data outlive a parent that was killed."""
    code = """
import os, sys, time
from pathlib import Path
from tests.test_store import filled
store = filled(Path(sys.argv[1]))
hear, say = os.pipe()
if os.fork() == 0:
    os.write(say, b"x")
    time.sleep(20)
    os._exit(0)
os.read(hear, 1)  # the child is there, and has done what a fork does first
print("ready", flush=True)
os.kill(os.getpid(), 9)
"""
    root = Path(__file__).parents[1]
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.wait()
        FolderStore(tmp_path / "run", writes=True).close()
        process.stdout.close()


def test_a_reader_of_the_last_draws_reads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "run", 4, keep=1)
    reader = FolderStore(tmp_path / "run")
    plain, dropped = FolderStore._read_lines, []

    def drop_meanwhile(self: FolderStore, writes: bool) -> None:
        plain(self, writes)
        if not dropped:
            dropped.append(True)
            for i in (4, 5):  # a draw stays for as long as the checkpoint before the last needs it
                store.append(record(i), draw(i))
                store.save(0, {"num_draws": i + 1})

    monkeypatch.setattr(FolderStore, "_read_lines", drop_meanwhile)
    assert [r["draw"] for r in FolderStore(tmp_path / "run").kept()] == [5]
    with pytest.raises(StoreMismatch, match="draw 3 has been deleted by its run: open the posterior again"):
        reader.load(reader.kept()[0])


@pytest.mark.parametrize("after", ["checksum", "safe_open"])
def test_a_draw_that_is_dropped_while_it_is_read(after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is opened, or inside of `safe_open`, where torch opens it once more."""
    filled(tmp_path / "run", 4, keep=3).close()
    reader = FolderStore(tmp_path / "run")
    plain = getattr(store_module, after)

    def drop_after(file: Path, **options: Any) -> Any:
        found = plain(file, **options)
        file.unlink()
        if after == "safe_open":
            raise RuntimeError(f"unable to open file <{file}> in read-only mode: No such file or directory (2)")
        return found

    monkeypatch.setattr(store_module, after, drop_after)
    with pytest.raises(StoreMismatch, match="draw 1 has been deleted by its run"):
        reader.load(reader.kept()[0])


def test_a_copied_chain_is_not_a_chain(tmp_path: Path) -> None:
    filled(tmp_path / "run").close()
    (tmp_path / "run" / "chain-0 (copy)").mkdir()
    assert len(FolderStore(tmp_path / "run").index) == 3


class TestAFullDisk:
    """What was kept before stays, and a later writer goes on."""

    def check(self, store: FolderStore, write: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(StoreFull, match="All earlier draws are kept"):
            write()
        monkeypatch.undo()
        store.close()
        assert not list(store.path.rglob("*.tmp"))
        again = FolderStore(store.path, writes=True)
        assert len(again.index) == 3
        assert again.saved(0) == {"num_draws": 3}
        assert all(same(again.load(r), draw(i)) for i, r in enumerate(again.kept()))
        again.append(record(3), draw(3))
        again.close()

    def test_while_a_draw_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = filled(tmp_path / "run")

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        self.check(store, lambda: store.append(record(3), draw(3)), monkeypatch)

    def test_while_a_checkpoint_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = filled(tmp_path / "run")

        def full(*_: Any) -> None:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

        monkeypatch.setattr(os, "fsync", full)
        self.check(store, lambda: store.save(0, {"num_draws": 4}), monkeypatch)

    def test_for_real(self, tmp_path: Path) -> None:
        """The system itself refuses to write more than so many bytes to a file."""
        code = """
import resource, signal, sys, torch
from adammcmc import StoreFull
from tests.test_store import filled, record
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = filled(__import__("pathlib").Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
for write in (lambda: store.append(record(3), {"w": torch.zeros(100_000)}), lambda: store.save(0, {"w": torch.zeros(100_000)})):
    try:
        write()
    except StoreFull as error:
        print("full:", error)
"""
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "run")],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[1],
        )
        assert done.stdout.count("full: [Errno") == 2, done.stdout + done.stderr
        store = FolderStore(tmp_path / "run", writes=True)
        assert len(store.index) == 3
        assert store.saved(0) == {"num_draws": 3}
        assert not list((tmp_path / "run").rglob("*.tmp"))

    def test_half_a_line_is_taken_back(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = filled(tmp_path / "run")
        index = tmp_path / "run" / "chain-0" / "index.jsonl"
        before = index.read_bytes()
        import builtins

        real = builtins.open

        class Short:
            """A file on a disk that takes ten bytes more."""

            def __init__(self, file: Any) -> None:
                self.file, self.taken = file, 0

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                self.file.close()

            def write(self, content: bytes) -> int:
                self.taken += 1
                return int(self.file.write(content[:10])) if self.taken == 1 else 0

            def __getattr__(self, name: str) -> Any:
                return getattr(self.file, name)

        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            result = real(file, mode, *args, **options)
            return Short(result) if "ab" in mode else result

        monkeypatch.setattr(builtins, "open", opened)
        with pytest.raises(StoreFull):
            store.append(record(3), draw(3))
        monkeypatch.undo()
        assert index.read_bytes() == before
        store.close()


def test_a_disk_that_is_too_small_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(StoreFull, match=r"would write 1e\+03 PB.*keep=k for the last k"):
        check_space(tmp_path / "not" / "there" / "yet", 10**18)
    check_space(tmp_path / "run", 1000)
    assert [format_bytes(n) for n in (17, 1500, 2_340_000, 5 * 10**9)] == ["17 bytes", "1.5 kB", "2.34 MB", "5 GB"]


# --- refusals -------------------------------------------------------------------------------------------------------------


def _cut(path: Path, by: int = 10) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def _flip(path: Path, near: bytes = b"") -> None:
    content = bytearray(path.read_bytes())
    content[content.index(near) if near else -5] ^= 1
    path.write_bytes(bytes(content))


def _manifest(folder: Path, **changes: Any) -> None:
    file = folder / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda p: (p / "run.json").unlink(), StoreMismatch, "holds no run of adammcmc"),
        (lambda p: (p / "run.json").write_text("{"), StoreCorrupt, "is not JSON"),
        (lambda p: (p / "run.json").write_text("[]"), StoreMismatch, "of some other program"),
        (lambda p: (p / "run.json").write_text('{"name": "x"}'), StoreMismatch, "of some other program"),
        (lambda p: _manifest(p, format=FORMAT + 1), StoreMismatch, "newer version of adammcmc"),
        (lambda p: (p / "chain-0" / "draw-000001.safetensors").unlink(), UserWarning, "draw-000001.safetensors' is missing"),
        (lambda p: _cut(p / "chain-0" / "draw-000001.safetensors"), UserWarning, "bytes, the index says"),
        (lambda p: _flip(p / "chain-0" / "draw-000001.safetensors"), StoreCorrupt, "is damaged: its checksum"),
        (lambda p: _flip(p / "run.json", b"a test"), StoreCorrupt, "does not match its checksum"),
        (lambda p: _cut(p / "chain-0" / "checkpoint.safetensors"), UserWarning, "not affected. The previous one is used"),
        (lambda p: [_cut(file) for file in (p / "chain-0").glob("checkpoint*")], StoreCorrupt, "The draws are not affected"),
        (lambda p: (p / "chain-0" / "checkpoint.safetensors").write_bytes(b"hello"), UserWarning, "cannot be read"),
        (lambda p: (p / "chain-0" / "index.jsonl").write_text("nonsense\n"), StoreCorrupt, "line 1 has no checksum. `adammcmc"),
        (lambda p: _flip(p / "chain-0" / "index.jsonl", b"0.5"), StoreCorrupt, "line 1 does not match its checksum"),
        (
            lambda p: (p / "chain-0" / "index.jsonl").write_text((p / "chain-0" / "index.jsonl").read_text().split("\n", 1)[1]),
            StoreCorrupt,
            "line 1 should be draw 0 of chain 0: lines are missing",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], words: str) -> None:
    filled(tmp_path / "run").close()
    damage(tmp_path / "run")

    def read() -> None:
        warnings.simplefilter("error")
        store = FolderStore(tmp_path / "run")
        for r in store.kept():
            store.load(r)
        store.saved(0)

    with warnings.catch_warnings(), pytest.raises(error, match=words):
        read()


def test_a_folder_of_something_else_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    with pytest.raises(StoreMismatch, match=r"is not empty and holds no run \(it has 'chapter.tex'\)"):
        FolderStore(tmp_path / "thesis", MANIFEST)
    with pytest.raises(StoreMismatch, match="is a file"):
        FolderStore(tmp_path / "thesis" / "chapter.tex", MANIFEST)
    with pytest.raises(StoreMismatch, match="does not exist"):
        FolderStore(tmp_path / "nowhere")
    filled(tmp_path / "run").close()
    with pytest.raises(StoreMismatch, match=r"holds a run already\. Pass resume=True"):
        FolderStore(tmp_path / "run", MANIFEST)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "precious"


def test_every_flipped_bit_of_a_state_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    state = {"w": torch.arange(3.0), "n": 3}
    write_state(file, state, "a test")
    right = file.read_bytes()
    assert same({"w": read_state(file)["w"]}, {"w": state["w"]})
    for bit in range(8 * len(right)):
        content = bytearray(right)
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        with pytest.raises(ValueError):  # noqa: PT011  (whatever is wrong, it is named in words of its own)
            read_state(file)


@pytest.mark.parametrize("format", ["1", "2"])
def test_a_state_without_a_checksum_is_refused(tmp_path: Path, format: str) -> None:
    file = tmp_path / "state.safetensors"
    text, tensors = encode({"w": torch.ones(2)})
    save_file(tensors, file, {"format": format, "state": text})
    with pytest.raises(ValueError, match="it has no checksum"):
        read_state(file)


def test_every_flipped_bit_of_an_index_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path / "run", 2).close()
    index = tmp_path / "run" / "chain-0" / "index.jsonl"
    right = index.read_bytes()
    for bit in range(8 * len(right)):
        content = bytearray(right)
        content[bit // 8] ^= 1 << bit % 8
        index.write_bytes(content)
        lines = read_lines(index, 0, has_files=True)
        assert len(lines.records) < 2, bit
        assert lines.problem or lines.is_unfinished


def test_a_reader_misses_the_last_line(tmp_path: Path) -> None:
    filled(tmp_path / "run", 3).close()
    _cut(tmp_path / "run" / "chain-0" / "index.jsonl", 1)  # its end: a reader takes it for a line that is being written
    with pytest.warns(UserWarning, match=r"has 2 draws, its checkpoint 3: lines are missing\. `adammcmc check"):
        assert len(FolderStore(tmp_path / "run").kept()) == 2


# --- states without pickle ------------------------------------------------------------------------------------------------


def test_a_state_comes_back_as_it_was() -> None:
    weight = torch.randn(4, 3)
    state = {
        "numbers": [1, -2.5, True, None, math.inf, -math.inf, 10**20],
        3: {"tuple": (1, (2, [3]))},
        "views": [weight[0], weight[1], weight.t()],
        "kinds": [
            torch.tensor(1),
            torch.zeros(0),
            torch.ones(2).bool(),
            torch.ones(2).bfloat16(),
            torch.ones(2, dtype=torch.uint8),
        ],
        "numpy": [np.float64(0.1), np.int32(7), np.arange(3)],
        "bytes": b"\x00\xff",
        "text": 'quotes " and \n lines',
        (1, "pair"): {},
    }
    back = decode(*encode(state))
    assert back["numbers"] == state["numbers"]
    assert back[3] == state[3]
    assert all(torch.equal(a, b) for a, b in zip(back["views"], state["views"], strict=True))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(back["kinds"], state["kinds"], strict=True))
    assert back["numpy"][:2] == [0.1, 7]
    assert (back["numpy"][2] == np.arange(3)).all()
    assert back["bytes"] == b"\x00\xff"
    assert back["text"] == state["text"]
    assert back[1, "pair"] == {}
    alike = decode(*encode({1: torch.ones(1), "1": torch.zeros(1)}))
    assert (float(alike[1]), float(alike["1"])) == (1, 0)
    assert math.isnan(decode(*encode({"x": math.nan}))["x"])
    with pytest.raises(TypeError, match="'/a/0' is a object, which cannot be saved without pickle"):
        encode({"a": [object()]})
