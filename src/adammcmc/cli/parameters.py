"""Command-line parameters in one line each, options made from settings dataclasses, and the exit after a signal."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from adammcmc.cli.options import Option, options_of
from adammcmc.samplers.terminal import say

__all__ = ["check_output", "option", "options_from", "settings_from", "stopping"]

Command = TypeVar("Command", bound=Callable[..., None])


def option(help: str, *names: str, **more: Any) -> Any:
    """An option of a command."""
    return typer.Option(*names, help=help, **more)


def options_from(kind: type, **defaults: Any) -> Callable[[Command], Command]:
    """Give a command an option for each field of a settings dataclass; it receives their values as **keywords.

    Names, types, help and defaults are those of the fields; `defaults` replaces some. `settings_from` makes the dataclass.
    """

    def decorate(command: Command) -> Command:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        added = [_parameter(o._replace(default=defaults.get(o.name, o.default))) for o in options_of(kind)]
        parameters = sorted([*added, *own], key=lambda p: p.default is not p.empty)  # required ones first
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(field: Option) -> inspect.Parameter:
    shown = option(field.help, "--" + field.name.replace("_", "-"))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(field.name, kind, default=field.default, annotation=Annotated[field.kind, shown])


def settings_from(kind: type, given: dict[str, Any]) -> Any:
    """A settings dataclass from the values of options. A value that it rejects is an error of the command line."""
    try:
        return kind(**given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def check_output(output: Path | None, *endings: str) -> None:
    """Check the name of an output file before the work."""
    if output is None:
        return
    if output.suffix.lower() not in endings:
        raise typer.BadParameter(f"--output must end in {' or '.join(endings)}, got '{output}'.")
    if not output.parent.is_dir():
        raise typer.BadParameter(f"the folder '{output.parent}' for --output does not exist.")


@contextmanager
def stopping(message: Callable[[], str]) -> Iterator[None]:
    """After Ctrl-C or another signal, print a message and exit with the code of the signal."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        with suppress(OSError):  # the terminal may be gone
            say(message(), err=True)
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 130
        raise typer.Exit(code) from None
