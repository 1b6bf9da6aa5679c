"""`python -m adammcmc`, and the entry point of the command `adammcmc`: errors of one line, and exit codes.

0    done
1    it could not be done: bad configuration, data, network or run folder; the line on standard error says what and where
     (`check`: the run is damaged; the lines on standard output say how)
2    the command line itself was not understood
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

_SILENT = logging.NullHandler()  # what the library logs when a run stops, the command says in its own words
_SPEAK_FOR_THEMSELVES = (ValueError, TypeError, OSError, RuntimeError, MemoryError, ImportError, Warning)


def main() -> None:
    """Run the command line."""
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Run the command that these words are, and return its exit code. An error is one line; `--debug` lets it through."""
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
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            code = app(words, prog_name="adammcmc", standalone_mode=False)
    except Exception as error:
        if wants_traceback and not hasattr(error, "format_message"):  # (a command line that was not understood has no line)
            raise
        return _tell(error)
    return code if isinstance(code, int) else 0


def _tell(error: Any) -> int:
    """One line about an error, and the exit code it has."""
    if type(error).__name__ == "Abort":  # what older versions of typer make of Ctrl-C
        return 130
    if not hasattr(error, "format_message"):
        kind = "" if isinstance(error, _SPEAK_FOR_THEMSELVES) and str(error) else f"{type(error).__name__}: "
        return _fail(f"{kind}{error}".removesuffix(": ") + " (--debug shows where)", 1)
    command = getattr(getattr(error, "ctx", None), "command_path", "adammcmc")
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return int(error.exit_code)
    return _fail(f"{error.format_message()} ({command} --help)", int(error.exit_code))


def _fail(words: str, code: int) -> int:
    print(f"adammcmc: {printable(' '.join(words.split()))}", file=sys.stderr)
    return code


def _show_warning(message: Warning | str, *_: Any) -> None:
    print(f"adammcmc: warning: {printable(' '.join(str(message).split()))}", file=sys.stderr)


if __name__ == "__main__":
    main()
