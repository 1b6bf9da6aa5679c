"""The command line: each command reads its options, calls the library, and shows the result.

Nothing heavy is imported before a command needs it: `--version` and `--help` come at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import adammcmc
from adammcmc.cli.jets import app as jets_app
from adammcmc.cli.jets import exit_after_stop
from adammcmc.posterior.store.whole import write_whole
from adammcmc.samplers.terminal import say

if TYPE_CHECKING:
    from adammcmc.cli.recipe import Recipe, Source
    from adammcmc.posterior.posterior import Posterior

__all__ = ["app"]

app = typer.Typer(
    name="adammcmc",
    help="Draw a neural network's weights from its posterior by Metropolis-Hastings around Adam steps, "
    "and see what was sampled.",
    epilog="In this order: schema (a configuration to start from), sample, diagnose, report, predict. Exit codes: 0 done, 1 an "
    "error, 2 the command line was not understood, 130 stopped by Ctrl-C (143 by SIGTERM, 129 by SIGHUP). --debug, anywhere, "
    "shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Run = Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)]
Again = Annotated[
    Path | None,
    typer.Option(
        "--config", help="A TOML file that names the network, for runs made in Python or moved since.", show_default=False
    ),
]
Data = Annotated[
    str | None,
    typer.Argument(
        help="A file .npz or .npy, or module:attribute; the held-out data of the run if not given.", show_default=False
    ),
]

Trust = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        envvar="ADAMMCMC_TRUST_CODE",
        help="Import the modules that the run names (network, loss, data). Use it only for runs from people you trust.",
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"adammcmc {adammcmc.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of the program itself; the help text is the app's."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Where the picture goes (.png, .pdf or .svg).")] = Path("demo.png"),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of Adam before the chain starts.")] = 8,
    gap: Annotated[int, typer.Option(min=1, help="Steps between draws; burn-in is five times as long.")] = 20,
    draws: Annotated[int, typer.Option(min=2, help="Number of draws to predict with.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Fixes every random number.")] = 0,
) -> None:
    """Top tagging in small: ParticleNet-Lite on bundled jets, Adam, then AdamMCMC.

    Prints what is sampled, accuracy, AUC and rejection, the spread for right and wrong tags, and the mutual information on
    kinds of jets that the network never saw; draws a picture. Takes two to four minutes on two cores.
    """
    try:
        from adammcmc.cli.demo import run_demo
    except ImportError as error:
        raise typer.BadParameter(f"the demo needs {error.name}. Run: pip install 'adammcmc[demo]'") from error
    run_demo(output, epochs=epochs, gap=gap, num_draws=draws, seed=seed)


@app.command()
def sample(
    config: Annotated[Path, typer.Argument(help="A TOML file; `adammcmc schema` prints one.", show_default=False)],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value: change one value of the file; as often as needed.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A folder for the draws, in place of the file's own.", show_default=False),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be sampled, and what it would take. Writes nothing.")
    ] = False,
) -> None:
    """Draw weights, as a configuration says.

    The configuration names a network, data, a loss and a sampler. Ctrl-C stops the run; `adammcmc resume RUN` goes on with it,
    bit for bit.

    A configuration imports the modules that it names: treat one from elsewhere as you would a script.
    """
    with _stopping(None):
        from adammcmc.cli.recipe import Announcement, Source, prepare

        recipe = prepare(Source.of_file(config, changes or []))
    path = output or recipe.path
    if (path / "run.json").exists():
        raise ValueError(
            f"'{path}' holds a run already: `adammcmc resume {path}{_flag(recipe)}` continues it, "
            "--output takes another folder."
        )
    if path.exists() and not path.is_dir():
        raise ValueError(f"'{path}' is a file: the draws need a folder.")
    if dry_run:
        _show_forecast(recipe, path)
        return
    with _stopping(path, _flag(recipe)):
        if (loss := recipe.train_first()) is not None:
            say(f"trained: {recipe.training_steps:,} steps of Adam, last loss {loss:.4g}")
        posterior = recipe.sample(path, callbacks=[Announcement(_announce)])
    _tell_what_came(posterior, path, _flag(recipe))


@app.command()
def resume(
    run: Run,
    draws: Annotated[
        int | None,
        typer.Option(min=1, help="Draws of each chain in the end; more than were asked for before.", show_default=False),
    ] = None,
    config: Again = None,
    trust_code: Trust = False,
) -> None:
    """Go on with a run that was stopped, or make more draws."""
    with _stopping(run, " --trust-code" if trust_code else ""):
        from adammcmc.cli.recipe import Announcement, prepare
        from adammcmc.posterior.store.folder import FolderStore, read_manifest

        asked = read_manifest(run)["configuration"]["num_draws"]
        recipe = prepare(_source(run, config, trust_code))
        had = len(FolderStore(run).index)
        posterior = recipe.sample(
            run, resume=True, num_draws=asked if draws is None else draws, callbacks=[Announcement(_announce)]
        )
    if len(posterior.store.index) == had:
        say(f"it had all its draws: `adammcmc resume {run} --draws N` makes more.")
    _tell_what_came(posterior, run, _flag(recipe))


@app.command()
def check(
    run: Run,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Rebuild the index from the draws, rename damaged files, fall back to the previous checkpoint.",
        ),
    ] = False,
) -> None:
    """Verify every file of a run: one line for each problem, then the verdict.

    Needs neither the network nor the data, and imports nothing that the run names. Nothing is ever deleted. The exit code is 0
    if the run is sound, or was repaired, and 1 if something is wrong with it.
    """
    from adammcmc.posterior.store.checking import check_run

    found = check_run(run, repair=repair)
    say(str(found))
    if not found.is_sound:
        raise typer.Exit(1)


@app.command()
def predict(
    run: Run,
    data: Data = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file for all predictions: .npz or .csv.", show_default=False)
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="How many of the most uncertain examples to show.")] = 10,
    config: Again = None,
    trust_code: Trust = False,
) -> None:
    """Predict with all draws: mean, spread, entropy, mutual information.

    Shows the examples of which the draws are least sure; --output writes all of them.
    """
    from adammcmc.cli.tables import prediction_table, summary_line, write_prediction

    if output is not None:
        _check_output(output, ".npz", ".csv")
    recipe, posterior = _opened(run, config, trust_code)
    examples = _examples(recipe, data)
    if examples is None:
        raise typer.BadParameter("the configuration of the run has no held-out data ([data] `test`): give DATA.")
    prediction = posterior.predict(examples)
    if output is not None:
        write_prediction(output, prediction)
    say(summary_line(prediction))
    if rows:
        _print(prediction_table(prediction, rows))
    if output is not None:
        say(f"all {len(prediction):,} predictions: {output}")


@app.command()
def diagnose(
    run: Run,
    data: Data = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the results to this .json file.", show_default=False)
    ] = None,
    config: Again = None,
    trust_code: Trust = False,
) -> None:
    """Say what was sampled, and whether to trust it.

    The verdict first, then R-hat and effective draws of the loss, of predictions for held-out inputs, and of the layers; then,
    if there are targets, how right the predictions are.
    """
    if output is not None:
        _check_output(output, ".json")
    recipe, posterior = _opened(run, config, trust_code)
    examples = _examples(recipe, data)
    failure = None
    try:
        summary = posterior.summary(examples)
    except (ValueError, TypeError, RuntimeError) as error:  # a network that is not called with inputs alone, for example
        if examples is None or data is not None:
            raise
        summary, examples, failure = posterior.summary(), None, error
    if output is not None:
        write_whole(output, json.dumps(summary.to_dict(), indent=2) + "\n")
    say(str(summary))
    if failure is not None:
        say(f"note: the held-out data cannot be predicted: {' '.join(str(failure).split())}")
    if examples is not None and len(posterior) > 0:
        prediction = posterior.predict(examples)
        if prediction.targets is not None:
            try:
                say(f"\n{adammcmc.score(prediction)}")
            except (ValueError, TypeError) as error:  # targets of another form than predictions can be held against
                say(f"note: not scored: {' '.join(str(error).split())}")


@app.command()
def report(
    run: Run,
    data: Data = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page, .html; its figures go to a folder beside it.", show_default=False),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.", show_default=False)] = None,
    config: Again = None,
    trust_code: Trust = False,
) -> None:
    """Write the report: one HTML page that needs no network, the verdict first.

    Then traces, acceptance, self-tests, R-hat and effective draws; with held-out data the reliability, the spread and the most
    uncertain examples. Without --output it goes into the folder of the run.
    """
    if output is not None:
        _check_output(output, ".html")
    recipe, posterior = _opened(run, config, trust_code)
    page = run / "report.html" if output is None else output
    examples = _examples(recipe, data) if len(posterior) else None
    try:
        written = posterior.report(page, examples, title=title)
    except (ValueError, TypeError, RuntimeError) as error:  # a network that is not called with inputs alone, for example
        if examples is None or data is not None:
            raise
        written = posterior.report(page, title=title)
        say(f"note: the held-out data cannot be predicted: {' '.join(str(error).split())}")
    say(f"report: {written.resolve().as_uri()}")


@app.command()
def schema() -> None:
    """Print a configuration with every key there is, and what it means: a file to start from.

    It runs as it is (a small bundled task): adammcmc schema > my.toml && adammcmc sample my.toml
    """
    from adammcmc.cli.tables import schema_as_toml

    say(schema_as_toml())


@app.command()
def cite() -> None:
    """Print BibTeX: the paper, and this software."""
    from adammcmc.cli.citation import bibtex

    say(bibtex())


app.add_typer(jets_app, name="jets")


# --- what commands share --------------------------------------------------------------------------------------------------


def _source(run: Path, config: Path | None, trust_code: bool) -> Source:
    """What the run remembers, which may come from anybody; or a file that the user names, which says what to import."""
    from adammcmc.cli.recipe import Source, check_trusted

    if config is not None:
        return Source.of_file(config)
    source = Source.of_run(run)
    if not trust_code:
        check_trusted(source, run)
    return source


def _flag(recipe: Recipe) -> str:
    """What the next command needs to open this run."""
    from adammcmc.cli.recipe import code_of

    return " --trust-code" if code_of(recipe.config) else ""


def _opened(run: Path, config: Path | None, trust_code: bool) -> tuple[Recipe, Posterior]:
    """What a run was made from, and its draws."""
    from adammcmc.cli.recipe import prepare
    from adammcmc.posterior.posterior import Posterior

    recipe = prepare(_source(run, config, trust_code))
    posterior = Posterior.open(run, recipe.model)
    if not posterior.store.index:
        raise ValueError(f"the run in '{run}' has no draws yet: `adammcmc resume {run}` goes on with it.")
    return recipe, posterior


def _examples(recipe: Recipe, data: str | None) -> Any:
    """The data that a command names, or those that the run held out; None where there are none."""
    from adammcmc.cli.recipe import load_data

    if data is None:
        return recipe.test
    keys, likelihood = recipe.config.data.keys, recipe.likelihood
    return load_data(data, Path.cwd(), recipe.model, keys=keys, needs_targets=False, likelihood=likelihood)


def _check_output(output: Path, *endings: str) -> None:
    """Before the work, not after it."""
    if output.suffix.lower() not in endings:
        raise typer.BadParameter(f"--output must end in {' or '.join(endings)}, got '{output}'.")
    if not output.parent.is_dir():
        raise typer.BadParameter(f"the folder '{output.parent}' for --output does not exist.")


@contextmanager
def _stopping(path: Path | None, flag: str = "") -> Iterator[None]:
    """After Ctrl-C or another signal: what is kept in this folder, and how to continue. None: there is none yet."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if path is not None and (path / "run.json").exists():
            number = "what it had"
            with suppress(Exception):  # a count is not worth an error
                from adammcmc.posterior.store.folder import FolderStore

                number = f"{len(FolderStore(path).index)} draws"
            words = f"stopped; {path} keeps {number}. Go on with: adammcmc resume {path}{flag}"
        else:
            words = "stopped before the first step; nothing is kept."
        raise exit_after_stop(error, words) from None


def _announce(target: str) -> None:
    say(f"samples {target}")


def _tell_what_came(posterior: Posterior, path: Path, flag: str) -> None:
    chains = f"{posterior.num_chains} chain{'s' * (posterior.num_chains > 1)}"
    say(f"{len(posterior.store.index):,} draws of {chains}")
    for line in posterior.verdicts():
        say(line)
    following = ", ".join(f"adammcmc {command} {path}{flag}" for command in ("diagnose", "report", "predict"))
    say(f"draws: {path}. Next: {following}")


def _show_forecast(recipe: Recipe, path: Path) -> None:
    from adammcmc.cli.forecast import forecast
    from adammcmc.cli.tables import forecast_lines

    for line in forecast_lines(forecast(recipe), recipe, path):
        say(line)


def _print(table: object) -> None:
    from rich.console import Console

    Console().print(table)
