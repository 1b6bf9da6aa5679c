"""Text for a terminal: text from a file may hold sequences that move the cursor, hide words or set links."""

from __future__ import annotations

import re

__all__ = ["printable", "say"]

# control characters except tab and line feed; direction overrides; line separators; halves of surrogate pairs
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with each character that a terminal would interpret written as its escape.

    Example:
        >>> print(printable("p(theta)\x1b[2J\x1b]8;;http://a\x07 | \u202etxet"))
        p(theta)\x1b[2J\x1b]8;;http://a\x07 | \u202etxet
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(words: str, *, err: bool = False) -> None:
    """Print a line on standard output or standard error, with control characters escaped."""
    import typer

    typer.echo(printable(words), err=err)
