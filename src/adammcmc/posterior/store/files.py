"""Writing the files of a run folder: each appears complete or not at all, and is synced before the next."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from adammcmc.errors import StoreCorrupt, StoreFull
from adammcmc.posterior.store.encoding import write_parts
from adammcmc.posterior.store.whole import NotPlain, open_new, open_plain, put, sync_folder

__all__ = [
    "append_line",
    "check_space",
    "checked_folder",
    "format_bytes",
    "keep_as",
    "plain_files_only",
    "remove_leftovers",
    "replace_file",
    "set_aside",
]


def replace_file(file: Path, parts: Iterable[bytes | memoryview], *, previous: Path | None = None) -> tuple[int, int]:
    """Write a file under a temporary name, then rename it. Returns its size and checksum.

    `previous` is the new name of the file that is replaced.
    """
    temporary = file.with_name(file.name + ".tmp")
    with _full_disk_named(file), plain_files_only():
        try:
            with open(open_new(temporary), "wb", buffering=0) as written:
                size, crc = write_parts(written, parts)
                os.fsync(written.fileno())
            if previous is not None:
                keep_as(file, previous)
            put(temporary, file)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    return size, crc


def append_line(file: Path, line: bytes) -> None:
    """Append a whole line, or nothing."""
    with _full_disk_named(file), plain_files_only():
        is_new = not file.exists()
        with open(open_plain(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0) as index:
            size = index.seek(0, os.SEEK_END)
            try:
                write_parts(index, [line])
                os.fsync(index.fileno())  # before the checkpoint that counts on it
            except BaseException:
                with suppress(OSError):
                    index.truncate(size)
                raise
        if is_new:
            sync_folder(file.parent)


def keep_as(file: Path, name: Path) -> None:
    """Give a file a second name, replacing any file of that name. Without hard links it is renamed."""
    if not os.path.lexists(file):
        return
    name.unlink(missing_ok=True)
    try:
        os.link(file, name, follow_symlinks=False)
    except OSError:
        os.replace(file, name)


def set_aside(file: Path) -> Path:
    """Rename a damaged file: nothing is deleted, and its name becomes free."""
    aside = file.with_name(f"{file.name}.damaged")
    number = 1
    while os.path.lexists(aside):
        number += 1
        aside = file.with_name(f"{file.name}.damaged-{number}")
    file.rename(aside)
    sync_folder(file.parent)
    return aside


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of interrupted writes."""
    for file in folder.glob("*.tmp"):
        if re.fullmatch(r"(run\.json|index\.jsonl|(checkpoint|draw-\d+)\.safetensors)\.tmp", file.name):
            with suppress(OSError):  # a folder of that name is not ours
                file.unlink()


def checked_folder(folder: Path) -> Path:
    """Refuse a link in place of a chain's folder: writes must stay inside the run."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise StoreCorrupt(f"'{folder}' is a symbolic link or a file, and must be a folder.")
    return folder


@contextmanager
def plain_files_only() -> Iterator[None]:
    """Turns links, pipes and folders in place of files into `StoreCorrupt`."""
    try:
        yield
    except (NotPlain, IsADirectoryError) as error:
        raise StoreCorrupt(f"{error.strerror or error}.") from error


@contextmanager
def _full_disk_named(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreFull(
                errno.ENOSPC,
                f"the disk is full: '{file}' could not be written. All earlier draws are kept. Free some space and pass "
                "resume=True to continue",
            ) from error
        raise


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
