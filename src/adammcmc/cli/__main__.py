"""`python -m adammcmc.cli`, and the entry point of the command `adammcmc`: one-line errors, and exit codes.

0    success
1    error: configuration, data, network or run folder; the line on standard error names the cause
     (`check`: the run is damaged; the lines on standard output list the problems)
2    invalid command line
130  stopped by Ctrl-C; 143 by SIGTERM, 129 by SIGHUP
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from adammcmc.samplers.terminal import printable

__all__ = ["main", "run"]

_SILENT = logging.NullHandler()  # the commands report a stopped run themselves, in place of the library's log
_SELF_EXPLANATORY = (ValueError, TypeError, OSError, RuntimeError, MemoryError, ImportError, Warning)


def main() -> None:
    """Run the command line."""
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Run a command and return its exit code. An error prints one line; with `--debug` it is raised."""
    try:
        from adammcmc.cli.commands import app
    except ImportError as error:
        return _fail(f"the command line needs {error.name}. Run: pip install 'adammcmc[shell]'", 1)
    end = words.index("--") if "--" in words else len(words)
    wants_traceback = "--debug" in words[:end]
    words = [word for i, word in enumerate(words) if word != "--debug" or i > end]
    logging.getLogger("adammcmc").addHandler(_SILENT)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _print(f"warning: {message}")
            code = app(words, prog_name="adammcmc", standalone_mode=False)
    except Exception as error:
        if wants_traceback and not hasattr(error, "format_message"):  # (typer's own errors have no useful traceback)
            raise
        return _report(error)
    return code if isinstance(code, int) else 0


def _report(error: Any) -> int:
    """Print an error in one line, and return its exit code."""
    if type(error).__name__ == "Abort":  # older versions of typer turn Ctrl-C into this
        return 130
    if not hasattr(error, "format_message"):
        kind = "" if isinstance(error, _SELF_EXPLANATORY) and str(error) else f"{type(error).__name__}: "
        return _fail(f"{kind}{error}".removesuffix(": ") + " (--debug shows where)", 1)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return int(error.exit_code)
    command = getattr(getattr(error, "ctx", None), "command_path", "adammcmc")
    return _fail(f"{error.format_message()} ({command} --help)", int(error.exit_code))


def _fail(words: str, code: int) -> int:
    _print(words)
    return code


def _print(words: str) -> None:
    print(f"adammcmc: {printable(' '.join(words.split()))}", file=sys.stderr)


if __name__ == "__main__":
    main()
