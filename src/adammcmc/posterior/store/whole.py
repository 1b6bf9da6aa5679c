"""Files that appear whole or not at all, and stay so when the power fails.

Data are safe when their file was synced, a name is safe when its folder was synced: `put` and `make_folder` do the latter.
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
for _flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):  # as far as the system has them
    _CAREFULLY |= getattr(os, _flag, 0)


class NotPlain(OSError):
    """A symbolic link, a pipe, a device or a folder stands where a plain file must be."""


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name to write to. What is written there is at `path` when the block ends; if the block fails, nothing has changed.

    Example:
        >>> with whole(Path("/tmp/numbers.txt")) as file:
        ...     _ = file.write_text("1 2 3")
    """
    # a name that nobody can foresee, and a file of our own: what stands there is not written through
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{path.suffix}")
    os.close(open_new(temporary))
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # or a crash of the machine may leave the new name with nothing behind it
        put(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def put(temporary: Path, path: Path) -> None:
    """Rename a file that was synced, so that a power loss does not undo it."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder safe. (Some systems and network drives cannot, and then do not need or offer it.)"""
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
    """Make a folder, and those above it, unless it is there."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def open_plain(path: Path, flags: int = os.O_RDONLY, *, may_be_link: bool = False) -> int:
    """A descriptor of a plain file. A pipe does not block and raises `NotPlain`, and so does a link, unless it may be one."""
    if may_be_link:
        path = path.resolve()
    try:
        descriptor = os.open(path, flags | _CAREFULLY, 0o666)
    except OSError as error:
        kind = _kind_of(path)
        if kind is None:
            raise
        raise NotPlain(error.errno, f"'{path}' is {kind}, and must be a plain file") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlain(errno.EINVAL, f"'{path}' is {_kind_of(path) or 'something else'}, and must be a plain file")
    return descriptor


def open_new(path: Path) -> int:
    """A descriptor to write to of a file that is new: what had its name before is unlinked, not written to."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        if (kind := _kind_of(path)) is None:
            raise
        raise NotPlain(error.errno, f"'{path}' is {kind}, and must be a plain file") from error
    return open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def _kind_of(path: Path) -> str | None:
    """What is there, in words, if it is no plain file."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return None
    kinds = {stat.S_ISLNK: "a symbolic link", stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe"}
    return next((words for test, words in kinds.items() if test(mode)), None if stat.S_ISREG(mode) else "a device or socket")


def clear(path: Path) -> None:
    """Remove what killed processes left of their writing of `path`. Only where nobody else can be at it now."""
    for left in path.parent.glob(glob.escape(f".{path.name}.") + f"[0-9]*{path.suffix}"):
        left.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text, whole or not at all."""
    with whole(path) as file:
        file.write_text(text, encoding="utf-8")
