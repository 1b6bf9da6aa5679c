"""`python -m adammcmc`, and the entry point of the command `adammcmc`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say what is missing for it. An error is one line; `--debug` first shows where it came from."""
    try:
        from adammcmc.cli import app
    except ImportError as error:
        sys.exit(f"The command line needs {error.name}. Run: pip install 'adammcmc[shell]'")
    wants_traceback = sys.argv[1:2] == ["--debug"]
    try:
        app()
    except Exception as error:
        if wants_traceback:
            raise
        sys.exit(f"adammcmc: {error or type(error).__name__} (adammcmc --debug ... shows where)")


if __name__ == "__main__":
    main()
