"""How much memory the process can still take: the system's, its cgroups' and its own limits."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from adammcmc.posterior.store.archives import free_memory

GB = 10**9


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


SYSTEM = {"proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\nHugePages_Total: 0\n"}
STAT = "anon 5\nactive_file 100\ninactive_file 200\n"
V2 = SYSTEM | {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/step/memory.high": "max\n",
    "sys/fs/cgroup/job/step/memory.current": "5\n",
    "sys/fs/cgroup/job/step/memory.stat": STAT,
    "sys/fs/cgroup/job/memory.max": f"{8 * GB}\n",
    "sys/fs/cgroup/job/memory.high": "max\n",
    "sys/fs/cgroup/job/memory.current": f"{6 * GB}\n",
    "sys/fs/cgroup/job/memory.stat": STAT,
}
V1 = SYSTEM | {
    "proc/self/cgroup": "12:cpu,cpuacct:/x\n9:memory:/seen/from/outside\n1:name=systemd:/x\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GB}\n",
    "sys/fs/cgroup/memory/memory.stat": "active_file 1\ninactive_file 1\ntotal_active_file 10\ntotal_inactive_file 20\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        (SYSTEM, 32_768_000_000),
        (V2, 2 * GB + 300),  # of the outer group, with what is only cache
        (V2 | {"sys/fs/cgroup/job/step/memory.high": "1000\n"}, 1295),
        (V2 | {"sys/fs/cgroup/job/memory.max": "7\n"}, 0),  # more than it may have already
        (V1, 3 * GB + 30),  # a container sees its own group as the outermost
        (SYSTEM | {"proc/self/cgroup": "nonsense\n"}, 32_768_000_000),
    ],
)
def test_the_least_of_all_limits_counts(files: dict[str, str], free: int | None, tmp_path: Path) -> None:
    write(tmp_path, files)
    assert free_memory(tmp_path) == free


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_a_limit_of_the_process_counts(limit: int, tmp_path: Path) -> None:
    write(tmp_path, SYSTEM | {"proc/self/status": "Name:\tpython\nVmSize:\t 2000 kB\nVmData:\t 1000 kB\n"})
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (10**13, before[1]))
    try:
        assert free_memory(tmp_path) == 32_768_000_000
        write(tmp_path, {"proc/meminfo": f"MemAvailable: {10**12} kB\n"})
        assert free_memory(tmp_path) == 10**13 - (2_048_000 if limit == resource.RLIMIT_AS else 1_024_000)
    finally:
        resource.setrlimit(limit, before)


def test_this_machine_says_something() -> None:
    assert (free_memory() or 0) > 0
