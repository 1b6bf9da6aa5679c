"""The command line: each command reads its options, calls the library, and shows the result."""

from pathlib import Path
from typing import Annotated

import typer

import adammcmc
from adammcmc.jets.commands import app as jets_app

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


app.add_typer(jets_app, name="jets")


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of the program itself; the help text is the app's."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Where the picture goes (.png, .pdf or .svg).")] = Path("demo.png"),
    epochs: Annotated[int, typer.Option(min=1, help="Of Adam, before the chain begins.")] = 8,
    gap: Annotated[int, typer.Option(min=1, help="Steps between draws; burn-in is five times as long.")] = 20,
    draws: Annotated[int, typer.Option(min=2, help="To predict with.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Fixes every random number.")] = 0,
) -> None:
    """Top tagging in small: ParticleNet-Lite on bundled jets, Adam, then AdamMCMC.

    Prints what is sampled, accuracy, AUC and rejection, the spread for right and wrong tags, and the mutual information on
    kinds of jets that the network never saw; draws a picture. Takes two to four minutes on two cores.
    """
    try:
        from adammcmc.demo import run_demo
    except ImportError as error:
        raise typer.BadParameter(f"the demo needs {error.name}. Run: pip install 'adammcmc[demo]'") from error
    run_demo(output, epochs=epochs, gap=gap, num_draws=draws, seed=seed)
