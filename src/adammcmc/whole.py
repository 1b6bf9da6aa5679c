"""Files that appear whole or not at all."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["clear", "whole", "write_whole"]


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name to write to. What is written there is at `path` when the block ends; if the block fails, nothing has changed.

    Example:
        >>> with whole(Path("/tmp/numbers.txt")) as file:
        ...     _ = file.write_text("1 2 3")
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # or a crash of the machine may leave the new name with nothing behind it
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def clear(path: Path) -> None:
    """Remove what killed processes left of their writing of `path`. Only where nobody else can be at it now."""
    for left in path.parent.glob(glob.escape(f".{path.name}.") + f"[0-9]*{path.suffix}"):
        left.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text, whole or not at all."""
    with whole(path) as file:
        file.write_text(text, encoding="utf-8")
