"""How much memory the process can still take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

__all__ = ["free_memory"]


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes: the least of what the system, the process's cgroups and its own limits leave; None where nothing says.

    File cache counts as free, since the system gives it up. `root` is where /proc and /sys are.
    """
    return min((*_of_system(root), *_of_cgroups(root), *_of_limits(root)), default=None)


def _of_system(root: Path) -> Iterator[int]:
    with suppress(OSError, KeyError, ValueError):
        yield _table(root / "proc/meminfo")["MemAvailable"] * 1024


def _of_cgroups(root: Path) -> Iterator[int]:
    """Of each group that the process is in, up to the outermost: a container's limit may stand at any of them."""
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
    for group in (inner, *inner.parents):  # (in a container some of them cannot be seen)
        for limit in limits:
            with suppress(OSError, KeyError, ValueError):  # "max" is no number: no limit
                most = int((folder / group / limit).read_text())
                statistics = _table(folder / group / "memory.stat")
                cache = statistics[f"{prefix}active_file"] + statistics[f"{prefix}inactive_file"]
                yield max(0, most - int((folder / group / usage).read_text()) + cache)


def _of_limits(root: Path) -> Iterator[int]:
    """What `ulimit` sets."""
    with suppress(ImportError, OSError, KeyError, ValueError):
        import resource

        status = _table(root / "proc/self/status")
        for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            most = resource.getrlimit(limit)[0]
            if most != resource.RLIM_INFINITY:
                yield max(0, most - status[used] * 1024)


def _table(file: Path) -> dict[str, int]:
    """Lines of a name and a number; others are left out."""
    words = (line.replace(":", " ").split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in words if len(row) > 1 and row[1].isdigit()}
