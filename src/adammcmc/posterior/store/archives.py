"""Free memory and disk space; .npz archives, whose claims are compared with the file and free memory before they are read."""

from __future__ import annotations

import errno
import math
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from adammcmc.errors import StoreFull

__all__ = ["check_fits", "check_space", "format_bytes", "free_memory", "read_npz"]

Array = np.ndarray[Any, Any]


def check_fits(size: int, what: str, remedy: str = "") -> None:
    """Raise a MemoryError before memory is allocated: a system that runs out of memory may kill other programs."""
    free = free_memory()
    if free is not None and size > free:
        raise MemoryError(f"{what} would take {format_bytes(size)} of memory, and {format_bytes(free)} are free.{remedy}")


def read_npz(path: Path, choose: Callable[[list[str]], Sequence[str]]) -> list[tuple[str, Array]]:
    """The arrays of an archive that `choose` selects from all names, each with its name.

    An archive of 2 MB may expand to 2 GiB, and the header of an array may claim any shape: both are read first, and
    must agree.
    """
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        names = list(choose(list(members)))
        for name in names:
            if members[name].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # what numpy writes
                raise ValueError(f"array '{name}' is packed by method {members[name].compress_type}, which is not supported.")
            with archive.open(members[name]) as member:
                shape, dtype = _header(member, name)
                claimed, held = math.prod(shape, start=dtype.itemsize), members[name].file_size - member.tell()
            if claimed != held:
                raise ValueError(f"array '{name}' claims {claimed:,} bytes {shape}, and has {held:,}.")
        check_fits(sum(members[name].file_size for name in names), f"'{path}'")
        found: dict[str, Array] = {}
        for name in dict.fromkeys(names):
            with archive.open(members[name]) as member:
                found[name] = np.lib.format.read_array(member, allow_pickle=False)
                member.read()  # to the end, where the checksum is compared
        return [(name, found[name]) for name in names]


def _header(member: Any, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array, read up to its data. Objects are refused: they are pickles."""
    version = np.lib.format.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"array '{name}' has .npy version {version}, which is not supported.")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(member)
    if dtype.hasobject:
        raise ValueError(f"array '{name}' holds Python objects, which are not read.")
    return shape, dtype


def check_space(path: Path, needed: int) -> None:
    """Refuse a run that does not fit on the disk."""
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise StoreFull(
            errno.ENOSPC,
            f"the run would write {format_bytes(needed)}, and '{path}' has {format_bytes(free)} left. Keep fewer draws "
            "(`num_draws`, keep=k for the last k, keep='moments'), or store them with dtype=torch.bfloat16",
        )


def format_bytes(number: int) -> str:
    """A size with its unit."""
    size, units = float(number), ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.3g} {units[0]}"


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that the system, the process's cgroups and its own limits all allow; None if unknown.

    File cache counts as free, since the system gives it up. `root` is the folder of /proc and /sys.
    """
    return min((*_of_system(root), *_of_cgroups(root), *_of_limits(root)), default=None)


def _of_system(root: Path) -> Iterator[int]:
    with suppress(OSError, KeyError, ValueError):
        yield _table(root / "proc/meminfo")["MemAvailable"] * 1024


def _of_cgroups(root: Path) -> Iterator[int]:
    """For each group of the process up to the outermost: a container's limit may be set at any of them."""
    groups = root / "sys/fs/cgroup"
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers:
                yield from _of_group(groups, name, ("memory.max", "memory.high"), "memory.current", "")
            elif "memory" in controllers.split(","):  # the first version of cgroups
                yield from _of_group(groups / "memory", name, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")


def _of_group(folder: Path, name: str, limits: tuple[str, ...], usage: str, prefix: str) -> Iterator[int]:
    inner = PurePosixPath(name.lstrip("/"))
    for group in (inner, *inner.parents):  # (in a container some of them are invisible)
        for limit in limits:
            with suppress(OSError, KeyError, ValueError):  # "max" is no number: no limit
                most = int((folder / group / limit).read_text())
                statistics = _table(folder / group / "memory.stat")
                cache = statistics[f"{prefix}active_file"] + statistics[f"{prefix}inactive_file"]
                yield max(0, most - int((folder / group / usage).read_text()) + cache)


def _of_limits(root: Path) -> Iterator[int]:
    """The limits that `ulimit` sets."""
    with suppress(ImportError, OSError, KeyError, ValueError):
        import resource

        status = _table(root / "proc/self/status")
        for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            most = resource.getrlimit(limit)[0]
            if most != resource.RLIM_INFINITY:
                yield max(0, most - status[used] * 1024)


def _table(file: Path) -> dict[str, int]:
    """The lines with a name and a number."""
    words = (line.replace(":", " ").split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in words if len(row) > 1 and row[1].isdigit()}
