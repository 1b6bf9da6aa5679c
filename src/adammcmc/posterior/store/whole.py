"""Files that are written atomically, and survive a power failure.

Data are safe once their file is synced, a name once its folder is synced; `put` and `make_folder` do the latter.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["NotPlain", "clear", "make_folder", "open_new", "open_plain", "put", "sync_folder", "whole", "write_whole"]

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
