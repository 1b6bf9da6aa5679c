"""Files that are written atomically, and survive a power failure; those of a run folder also have checksums.

Data are safe once their file is synced, a name once its folder is synced; `put` and `make_folder` do the latter.

A sealed file is a safetensors file that holds its own checksum: the first entry of its metadata, "crc32", has the eight
hexadecimal digits of the crc32 of the whole file, computed with zeros in place of these digits.
"""

from __future__ import annotations

import errno
import glob
import itertools
import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path

from adammcmc.errors import StoreCorrupt, StoreFull

__all__ = [
    "NotPlain", "append_line", "checked_folder", "checksum", "clear", "keep_as", "make_folder", "open_new", "open_plain",
    "plain_files_only", "put", "remove_leftovers", "replace_file", "set_aside", "sync_folder", "whole", "write_parts",
    "write_whole",
]  # fmt: skip

_CAREFULLY = 0
for _flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):  # as far as the system supports them
    _CAREFULLY |= getattr(os, _flag, 0)


class NotPlain(OSError):
    """A symbolic link, a pipe, a device or a folder in the place of a plain file."""


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary file to write to, renamed to `path` when the block ends; if the block fails, nothing changes.

    Example:
        >>> with whole(Path("/tmp/numbers.txt")) as file:
        ...     _ = file.write_text("1 2 3")
    """
    # an unpredictable name and a new file: nothing that is already there is written through
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{path.suffix}")
    os.close(open_new(temporary))
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # or a crash may leave the new name without content
        put(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def put(temporary: Path, path: Path) -> None:
    """Rename a synced file so that a power failure does not undo it."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder safe, if the system or network drive supports it."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, unless they exist."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def open_plain(path: Path, flags: int = os.O_RDONLY, *, may_be_link: bool = False) -> int:
    """A descriptor of a plain file. Anything else raises `NotPlain` without blocking; so does a link unless allowed."""
    if may_be_link:
        path = path.resolve()
    try:
        descriptor = os.open(path, flags | _CAREFULLY, 0o666)
    except OSError as error:
        _refuse_other_kinds(path, error)
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        _refuse_other_kinds(path)
        raise NotPlain(errno.EINVAL, f"'{path}' is not a plain file")
    return descriptor


def open_new(path: Path) -> int:
    """A descriptor of a new file to write to; an existing file of that name is unlinked, not written to."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _refuse_other_kinds(path, error)
        raise
    return open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def _refuse_other_kinds(path: Path, error: OSError | None = None) -> None:
    """Raise a `NotPlain` that names the kind of file, unless it is a plain one."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    kinds = {stat.S_ISREG: "", stat.S_ISLNK: "a symbolic link", stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe"}
    if kind := next((words for test, words in kinds.items() if test(mode)), "a device or socket"):
        number = errno.EINVAL if error is None else error.errno
        raise NotPlain(number, f"'{path}' is {kind}, and must be a plain file") from error


def clear(path: Path) -> None:
    """Remove temporary files of `path` that killed processes left. Only if no other process can be writing it now."""
    for left in path.parent.glob(glob.escape(f".{path.name}.") + f"[0-9]*{path.suffix}"):
        left.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text atomically."""
    with whole(path) as file:
        file.write_text(text, encoding="utf-8")


# --- the files of a run folder --------------------------------------------------------------------------------


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


# --- checksums ------------------------------------------------------------------------------------------------

_SEAL = b'{"__metadata__": {"crc32": "'  # how the header of a sealed file begins; the digits follow
_DIGITS = slice(8 + len(_SEAL), 16 + len(_SEAL))


def write_parts(file: RawIOBase, parts: Iterable[bytes | memoryview]) -> tuple[int, int]:
    """Write the parts of a file, and the digits of its seal if it has one. Returns its size, and its `checksum`."""
    size = crc = 0
    is_sealed = False
    for part in _gathered(parts):
        is_sealed = is_sealed or (size == 0 and bytes(part[8 : _DIGITS.start]) == _SEAL)
        _write_all(file, part)
        size, crc = size + len(part), zlib.crc32(part, crc)
    if is_sealed:
        file.seek(_DIGITS.start)
        _write_all(file, b"%08x" % crc)
    return size, crc


def checksum(path: Path, *, may_be_link: bool = False) -> tuple[int, int | None]:
    """The crc32 of a file with zeros in place of the digits of its seal, and the crc32 in the seal (None: no seal)."""
    with open(open_plain(path, may_be_link=may_be_link), "rb") as file:
        head, written = bytearray(file.read(_DIGITS.stop)), None
        if head[8 : _DIGITS.start] == _SEAL:
            written = int(head[_DIGITS], 16) if re.fullmatch(rb"[0-9a-f]{8}", head[_DIGITS]) else -1
            head[_DIGITS] = b"0" * 8
        crc = zlib.crc32(head)
        while part := file.read(1 << 22):
            crc = zlib.crc32(part, crc)
    return crc, written


def _gathered(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes with small parts joined, for fewer system calls."""
    for are_small, group in itertools.groupby(parts, lambda part: len(part) < 1 << 16):
        if are_small:
            yield b"".join(group)
        else:
            yield from group


def _write_all(file: RawIOBase, content: bytes | memoryview) -> None:
    """A system call may write only a part of the bytes; it writes none if the disk is full."""
    rest = memoryview(content)
    while len(rest) > 0:
        taken = file.write(rest)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[taken:]
