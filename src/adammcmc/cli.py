"""The command line: each command reads its options, calls the library, and shows the result."""

from pathlib import Path
from typing import Annotated

import typer

import adammcmc

__all__ = ["app"]

app = typer.Typer(
    name="adammcmc",
    help="Draw a neural network's weights from its posterior by Metropolis-Hastings around Adam steps, "
    "and be told what was sampled.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"adammcmc {adammcmc.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options of the program itself; the help text is the app's."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Where the picture goes (.png, .pdf or .svg).")] = Path("demo.png"),
    steps: Annotated[int, typer.Option(min=500, help="Steps of each sampler; the first fifth is burn-in.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Fixes every random number.")] = 0,
) -> None:
    """Sample a small network on Fisher's irises, with AdamMCMC and with the exact Underdamped.

    Prints what is sampled, the acceptance, and a table of predictions with spreads; draws a picture. Takes about a minute.
    """
    try:
        from adammcmc.demo import run_demo

        run_demo(output, steps=steps, seed=seed)
    except ImportError as error:
        raise typer.BadParameter(f"the demo needs {error.name}. Run: pip install 'adammcmc[demo]'") from error
