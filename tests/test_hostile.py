"""Run folders made by an attacker: nothing outside of them is read, written or deleted, nothing hangs, memory stays bounded.

Each is opened, checked, repaired and resumed. What comes of it is one of the library's own errors, or a run that is as it was.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import adammcmc
from adammcmc import StoreCorrupt, StoreMismatch, check_run
from adammcmc.posterior.store.atomic import write_parts
from adammcmc.posterior.store.encoding import encode, read_state, safetensors_parts
from adammcmc.posterior.store.records import line_of, manifest_text
from tests import damage

SECRET = b"precious\n"
DRAW = "chain-0/draw-000002.safetensors"
CHECKPOINTS = ("chain-0/checkpoint.safetensors", "chain-0/checkpoint.previous.safetensors")
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    damage.run(folder / "run", num_draws=3, keep=1)
    return folder / "run"


def manifest(**changes: Any) -> Callable[[Path], None]:
    """With a valid checksum; a key with a dot is that of a part, and a value of `...` removes it."""

    def change(run: Path) -> None:
        content = json.loads((run / "run.json").read_text())
        for key, value in changes.items():
            part, _, name = key.rpartition("__")
            table = content[part] if part else content
            if value is ...:
                del table[name]
            else:
                table[name] = value
        (run / "run.json").write_bytes(manifest_text(content))

    return change


def records(**changes: Any) -> Callable[[Path], None]:
    """All lines of the index changed, with valid checksums."""

    def change(run: Path) -> None:
        index = run / "chain-0" / "index.jsonl"
        lines = [json.loads(line) for line in index.read_text().splitlines()]
        for line in lines:
            line.pop("line_crc32", None)
            line.update({k: v for k, v in changes.items() if v is not ...})
            for key in [k for k, v in changes.items() if v is ...]:
                line.pop(key)
        index.write_bytes(b"".join(map(line_of, lines)))

    return change


def raw_line(line: str) -> Callable[[Path], None]:
    """An index of one line, with a valid checksum."""
    sealed = f'{line[:-1]}, "line_crc32": "{zlib.crc32(line.encode()):08x}"}}\n'
    return lambda run: (run / "chain-0" / "index.jsonl").write_text(sealed) and None


def state(content: Any) -> Callable[[Path], None]:
    """Both checkpoints hold this, with valid checksums and, unless it is a list, the name of their run and chain."""

    def change(run: Path) -> None:
        owner = read_state(run / CHECKPOINTS[0])["of"]
        text, tensors = encode({**content, "of": owner} if isinstance(content, dict) else content)
        for name in CHECKPOINTS:
            with open(run / name, "wb", buffering=0) as file:
                write_parts(file, safetensors_parts(tensors, {"state": text}))

    return change


def raw_state(text: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        for name in CHECKPOINTS:
            with open(run / name, "wb", buffering=0) as file:
                write_parts(file, safetensors_parts({"a": torch.ones(1)}, {"state": text}))

    return change


def link(name: str, target: str = "../victim") -> Callable[[Path], None]:
    def change(run: Path) -> None:
        file = run / name
        file.unlink(missing_ok=True)
        file.symlink_to(run.parent / target.removeprefix("../"))

    return change


def hard_link(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.link(run.parent / "victim", run / name)

    return change


def linked_index(run: Path) -> None:
    """The index is a hard link to a file outside that is a good index."""
    index = run / "chain-0" / "index.jsonl"
    (run.parent / "victim").write_bytes(index.read_bytes())
    index.unlink()
    os.link(run.parent / "victim", index)


def pipe(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return change


def folder(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()

    return change


def linked_chain(run: Path) -> None:
    shutil.move(run / "chain-0", run.parent / "elsewhere")
    (run / "chain-0").symlink_to(run.parent / "elsewhere")


def huge(name: str) -> Callable[[Path], None]:
    return lambda run: os.truncate(run / name, 1 << 36)


def bare_manifest(name: str) -> Callable[[Path], None]:
    """Without this entry, which `manifest` always writes."""

    def change(run: Path) -> None:
        content = json.loads((run / "run.json").read_text())
        del content[name]
        (run / "run.json").write_text(json.dumps(content))

    return change


def bare_index(run: Path) -> None:
    """Without the checksums of its lines."""
    index = run / "chain-0" / "index.jsonl"
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    index.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "line_crc32"}) + "\n" for line in lines))


def bare(*names: str) -> Callable[[Path], None]:
    """The same tensors and metadata without their checksum; the index knows the new size and crc32 of a draw."""

    def change(run: Path) -> None:
        for name in names:
            with safe_open(run / name, framework="pt") as content:
                tensors = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118
                metadata = {key: value for key, value in content.metadata().items() if key != "crc32"}
            save_file(tensors, run / name, metadata)
        if DRAW in names:
            text, index = (run / DRAW).read_bytes(), run / "chain-0" / "index.jsonl"
            lines = [json.loads(line) for line in index.read_text().splitlines()]
            lines[-1] |= {"bytes": len(text), "crc32": zlib.crc32(text)}
            index.write_bytes(b"".join(line_of({k: v for k, v in line.items() if k != "line_crc32"}) for line in lines))

    return change


def other_draw(run: Path) -> None:
    """Of another network, with valid checksums; what it claims must not be read."""
    index = run / "chain-0" / "index.jsonl"
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    for line in lines:
        line.pop("line_crc32", None)
        with suppress(FileNotFoundError), open(run / "chain-0" / line["file"], "r+b", buffering=0) as file:
            file.truncate(0)
            size, crc = write_parts(file, safetensors_parts({"weight": torch.zeros(900)}, {}))
            line.update({"bytes": size, "crc32": crc})
    index.write_bytes(b"".join(map(line_of, lines)))


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "file: absolute": records(file="/tmp/victim"),
    "file: above": records(file="../../victim"),
    "file: of another draw": records(file="draw-000000.safetensors"),
    "file: a number": records(file=7),
    "run.json is a link": link("run.json", "../good.json"),
    "run.json is a pipe": pipe("run.json"),
    "run.json is a folder": folder("run.json"),
    "run.json.tmp is a link": link("run.json.tmp"),
    "run.json.tmp is a hard link": hard_link("run.json.tmp"),
    "run.json.tmp is a folder": folder("run.json.tmp"),
    "lock is a link": link("lock"),
    "lock is a dangling link": link("lock", "../new"),
    "lock is a pipe": pipe("lock"),
    "index is a link": link("chain-0/index.jsonl"),
    "index is a hard link": linked_index,
    "index is a pipe": pipe("chain-0/index.jsonl"),
    "index.tmp is a link": link("chain-0/index.jsonl.tmp"),
    "checkpoint is a link": link("chain-0/checkpoint.safetensors"),
    "checkpoint is a pipe": pipe("chain-0/checkpoint.safetensors"),
    "checkpoint.tmp is a link": link("chain-0/checkpoint.safetensors.tmp"),
    "both checkpoints are links": lambda p: [link(f"chain-0/checkpoint{x}.safetensors")(p) for x in ("", ".previous")],
    "draw is a link": link(DRAW),
    "draw is a pipe": pipe(DRAW),
    "the next draw is a link": link("chain-0/draw-000003.safetensors"),
    "the next draw is a folder": folder("chain-0/draw-000003.safetensors"),
    "draw.tmp is a link": link("chain-0/draw-000003.safetensors.tmp"),
    "the chain is a link": linked_chain,
    "many chains": manifest(configuration__num_chains=1_000_000_000),
    "many chains, no settings": lambda p: [manifest(chains=...)(p), manifest(configuration__num_chains=1_000_000_000)(p)],
    "minus one chain": manifest(configuration__num_chains=-1),
    "keep: -1": manifest(keep=-1),
    "keep: 0": manifest(keep=0),
    "keep: true": manifest(keep=True),
    "keep: a list": manifest(keep=["draws"]),
    "format: text": lambda p: (p / "run.json").write_text('{"format": "2", "keep": 1}'),
    "format: 0": manifest(format=0),
    "format: 1": manifest(format=1),
    "no format": bare_manifest("format"),
    "manifest without a checksum": bare_manifest("crc32"),
    "index without checksums": bare_index,
    "draw without a checksum": bare(DRAW),
    "checkpoints without checksums": bare(*CHECKPOINTS),
    "dtype: a function": manifest(dtype="manual_seed"),
    "configuration: a list": manifest(configuration=[]),
    "versions: a list": manifest(versions=["0.1"]),
    "tensors: a list": manifest(model__tensors=[1]),
    "tensors: odd": manifest(model__tensors={"weight": "float32"}),
    "likelihood: a text": manifest(likelihood="values"),
    "chains: numbers": manifest(chains=[1]),
    "manifest nested deeply": lambda p: (p / "run.json").write_text(DEEP),
    "manifest of 64 GiB": huge("run.json"),
    "manifest: NaN": lambda p: (p / "run.json").write_text('{"format": NaN, "keep": 1}'),
    "index nested deeply": raw_line('{"draw": ' + DEEP + "}"),
    "index of 64 GiB": huge("chain-0/index.jsonl"),
    "index: not JSON": raw_line("[]}"),
    "index: a list": lambda p: (p / "chain-0" / "index.jsonl").write_text("[]\n"),
    "index: no step": records(step=...),
    "index: no health": records(health=...),
    "index: step is text": records(step="1"),
    "index: loss is a list": records(loss=[1]),
    "index: health is a number": records(health=3),
    "index: bytes is text": records(bytes="3"),
    "index: another chain": records(chain=5),
    "index: chain is true": records(chain=False),
    "index: draw is text": records(draw="0"),
    "checkpoint: a list": state([1, 2]),
    "checkpoint: empty": state({}),
    "checkpoint: minus one draw": state({"num_draws": -1}),
    "checkpoint: text for a number": state({"num_draws": "3"}),
    "checkpoint: nothing else": state({"num_draws": 3}),
    "checkpoint: other types": state({"num_draws": 3, "model": 1, "sampler": [], "moments": 3, "health": None}),
    "checkpoint: nested deeply": raw_state(DEEP),
    "checkpoint: two kinds": raw_state('{"tensor": "a", "float": "1"}'),
    "checkpoint: an unknown kind": raw_state('{"set": [[1, 2]]}'),
    "checkpoint: no such tensor": raw_state('{"tensor": "b"}'),
    "checkpoint: unhashable": raw_state('{"dict": [[[], 1]]}'),
    "a chain too many": lambda p: shutil.copytree(p / "chain-0", p / "chain-1"),
    "a draw of another size": other_draw,
    "a loss beyond all numbers": records(loss=10**400),
    "steps beyond all counts": records(step=10**400),
    "no date": manifest(created=...),
    "a date that is a number": manifest(created=7),
    "a run.json of many megabytes": manifest(padding=[[]] * (3 << 20)),
    "an index of zeros without an end": lambda p: os.truncate(p / "chain-0" / "index.jsonl", 1 << 31),
}
UNSEEN = ("index is a hard link", "the next draw is a link")
"""Not followed, and replaced by a plain file: nobody needs to hear of it. So it is with temporary files."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused_or_harmless(name: str, good: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(SECRET)
    run = tmp_path / "run"
    shutil.copytree(good, run)
    shutil.copy(run / "run.json", tmp_path / "good.json")
    HOSTILE[name](run)
    outside = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and run not in p.parents}

    def use() -> int:
        """How many things went wrong."""
        errors = 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                posterior = adammcmc.Posterior.open(run, nn.Linear(3, 2))
                str(posterior), list(posterior), posterior.moments(), posterior.trace("loss")
            except (StoreCorrupt, StoreMismatch):
                errors += 1
            try:
                damage.run(run, num_draws=4, keep=1)
            except (StoreCorrupt, StoreMismatch):
                errors += 1
        return errors + len(caught)

    assert use() or ".tmp" in name or name in UNSEEN
    with suppress(StoreCorrupt, StoreMismatch):
        check_run(run, repair=True)
    use()
    now = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and run not in p.parents}
    assert now == outside
