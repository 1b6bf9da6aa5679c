"""`python -m adammcmc`, and the entry point of the command `adammcmc`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say what is missing for it."""
    try:
        from adammcmc.cli import app
    except ImportError as error:
        sys.exit(f"The command line needs {error.name}. Run: pip install 'adammcmc[shell]'")
    app()


if __name__ == "__main__":
    main()
