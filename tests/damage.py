"""Run folders that something happened to: power loss, flipped bits, cuts. `python -m tests.damage` counts what goes unnoticed.

A power loss is imagined as the worst that a file system may do: of a file only what was synced is there (the rest is lost, or
zeros), of a folder only the names that it had when it was synced, or those that it has now.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import adammcmc
from tests import killing

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
Y = torch.randint(2, (24,), generator=torch.Generator().manual_seed(2))
KINDS: dict[str, dict[str, Any]] = {
    "draws": {"num_chains": 1},
    "last 1": {"num_chains": 1, "keep": 1},
    "two chains": {"num_chains": 2, "num_draws": 3},
    "stacked": {"num_chains": 2, "num_draws": 3, "stacked": True},
}
Images = dict[str, bytes]
"""A folder: its files by name."""


def run(path: Path, kind: str = "draws", **changes: Any) -> adammcmc.Posterior:
    """A small run, resumed if it is there."""
    torch.manual_seed(0)
    sampler = partial(adammcmc.AdamMCMC, lr=1e-3, sigma=1e-3, sigma_along=2.0, prior=adammcmc.Gaussian())
    options = {"num_draws": 4, "gap": 1, "burn_in": 1, "batch_size": 8, "sampler": sampler, **KINDS[kind], **changes}
    options = {"path": path, "resume": True, "progress": False, **options}
    return adammcmc.sample(nn.Linear(3, 2), (X, Y), F.cross_entropy, **options)


def content(path: Path) -> Any:
    """What a run left, to the bit, but for how long it took and what was set aside."""
    target, index, draws, texts, tensors, _ = killing.content(path)
    return target, index, draws, texts, tensors


# --- power loss -----------------------------------------------------------------------------------------------------------


class PowerLoss:
    """Follows what is synced under a folder, and makes images of what a power loss would leave."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images: dict[int, tuple[str, Images]] = {}
        self._content: dict[int, bytes] = {}
        self._names: dict[Path, dict[str, int]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Before and after every sync, and after every rename, there is a cut."""
        real = {name: getattr(os, name) for name in ("fsync", "replace", "link")}

        def fsync(descriptor: int) -> None:
            self._cut("before a sync")
            self._synced(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
            self._cut("after a sync")

        def named(name: str, *places: Any, **options: Any) -> None:
            real[name](*places, **options)
            self._cut(f"after a {name}")

        try:
            os.fsync, os.replace, os.link = fsync, partial(named, "replace"), partial(named, "link")  # type: ignore[assignment]
            yield
        finally:
            for name, function in real.items():
                setattr(os, name, function)

    def _synced(self, path: Path) -> None:
        if path.is_dir():
            self._names[path] = {p.name: p.stat().st_ino for p in path.iterdir()}
        elif path.exists():
            self._content[path.stat().st_ino] = path.read_bytes()

    def _cut(self, when: str) -> None:
        now = {p.stat().st_ino: p for p in self.root.rglob("*")}
        safe = self._content
        for inode in set(safe) - set(now) - {i for names in self._names.values() for i in names.values()}:
            del safe[inode]  # its number may be another file's next
        files = {inode: p.read_bytes() for inode, p in now.items() if p.is_file()}
        zeros = {i: safe.get(i, b"") + b"\0" * (len(b) - len(safe.get(i, b""))) for i, b in files.items()}
        half = {i: b[: (len(safe.get(i, b"")) + len(b) + 1) // 2] for i, b in files.items()}
        for names in ("synced", "present"):
            for name, bytes_of in (("synced", safe), ("zeros", zeros), ("half", half), ("present", files)):
                image = self._image(self.root, Path(), names, bytes_of)
                key = hash(tuple(sorted((n, b) for n, b in image.items() if not n.endswith(("lock", ".tmp")))))
                self.images.setdefault(key, (f"{when}, names {names}, content {name}", image))

    def _image(self, folder: Path, under: Path, names: str, bytes_of: dict[int, bytes]) -> Images:
        present = {p.name: p.stat().st_ino for p in folder.iterdir()} if folder.is_dir() else {}
        image: Images = {}
        for name, inode in (present if names == "present" else self._names.get(folder, {})).items():
            if (folder / name).is_dir():
                image[f"{under / name}/"] = b""
                image |= self._image(folder / name, under / name, names, bytes_of)
            else:
                image[str(under / name)] = bytes_of.get(inode, self._content.get(inode, b""))
        return image


def write_image(image: Images, path: Path) -> None:
    """The folder of an image."""
    path.mkdir(parents=True)
    for name, text in sorted(image.items()):
        if name.endswith("/"):
            (path / name).mkdir(exist_ok=True)
        else:
            (path / name).write_bytes(text)


def images_of(kind: str, path: Path) -> list[tuple[str, Images]]:
    """Of a run at `path`, and of the folder when it is done."""
    path.mkdir(parents=True)
    power = PowerLoss(path)
    with power.watching():
        run(path, kind)
    return list(power.images.values())


def survives(image: Images, kind: str, right: Any, path: Path) -> bool:
    """Whether a run goes on from an image, and ends as the one that nothing happened to."""
    write_image(image, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(path, kind)
        return killing.same(content(path), right)


# --- damaged files --------------------------------------------------------------------------------------------------------


def damage(file: Path, dice: random.Random) -> str:
    """Change a file at random; what was done is returned."""
    content = bytearray(file.read_bytes())
    how = dice.choice(["flip", "flip", "flip", "cut", "delete", "swap" if file.suffix == ".jsonl" else "flip", "zeros"])
    at = dice.randrange(len(content))
    if how == "flip":
        content[at] ^= 1 << dice.randrange(8)
    elif how == "cut":
        del content[at:]
    elif how == "delete":
        del content[at : at + dice.choice([1, 1, 3, 16])]
    elif how == "zeros":
        content[at : at + 16] = b"\0" * len(content[at : at + 16])
    else:
        lines = bytes(content).splitlines(keepends=True)
        i, j = dice.sample(range(len(lines)), 2)
        lines[i], lines[j] = lines[j], lines[i]
        content = bytearray(b"".join(lines))
    file.write_bytes(bytes(content))
    return f"{how} at {at} of {file.name}"


def reading(path: Path) -> Any:
    """All that a reader sees of a run."""
    posterior = adammcmc.Posterior.open(path, nn.Linear(3, 2))
    moments = posterior.moments()
    return str(posterior), posterior.index, posterior.made, list(posterior), moments.mean, moments.variance


def outcome(path: Path, kind: str, half: Any, right: Any, num_draws: int) -> str:
    """What comes of a damaged folder: "noticed" (an error or a warning), "harmless", or "silent", which must not be.

    It is opened and all of it is read; then it is resumed to the end.
    """
    noticed, is_same = False, True
    for attempt in ("read", "resume"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                if attempt == "read":
                    is_same = killing.same(reading(path), half)
                else:
                    run(path, kind, num_draws=num_draws)
                    is_same = killing.same(content(path), right)
            except (adammcmc.StoreCorrupt, adammcmc.StoreMismatch):
                return "noticed"
        noticed = noticed or bool(caught)
        if not (noticed or is_same):
            return "silent"
    return "noticed" if noticed else "harmless"


def damaged_folders(folder: Path, kind: str, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """So many copies of a run that is half done, each with one damaged file: what was done, and what came of it."""
    dice = random.Random(seed)
    total = KINDS[kind].get("num_draws", 4)
    run(folder / "right", kind)
    right = content(folder / "right")
    run(folder / "half", kind, num_draws=total - 1)
    half = reading(folder / "half")
    files = [p.relative_to(folder / "half") for p in sorted((folder / "half").rglob("*")) if p.is_file() and p.name != "lock"]
    for number in range(count):
        copy = folder / f"copy-{number}"
        shutil.copytree(folder / "half", copy)
        done = damage(copy / files[number % len(files)], dice)
        yield done, outcome(copy, kind, half, right, total)
        shutil.rmtree(copy)


def main(count: int) -> None:
    """Count outcomes over all kinds of runs and files, and images of power loss."""
    os.fsync = lambda descriptor: None  # nothing is lost here but by intention
    table: dict[str, dict[str, int]] = {}
    for seed, kind in enumerate(KINDS):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for done, came in damaged_folders(folder, kind, count // len(KINDS), seed):
                row = table.setdefault(done.split()[-1].partition("-0")[0], {"noticed": 0, "harmless": 0, "silent": 0})
                row[came] += 1
                if came == "silent":
                    print("SILENT", kind, done, flush=True)
            right = content(folder / "right")
            images = images_of(kind, folder / "power")
            good = sum(survives(image, kind, right, folder / f"image-{i}") for i, (_, image) in enumerate(images))
            print(f"{kind}: {good} of {len(images)} images of power loss resumed to the same draws", flush=True)
    for file, row in sorted(table.items()):
        print(f"{file:<36}", ", ".join(f"{number} {came}" for came, number in row.items()))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 600)
