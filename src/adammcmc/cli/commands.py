"""The command line: each command reads its options, calls the library, and prints the result.

Nothing heavy is imported before a command needs it, so that `--version` and `--help` are instant.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import adammcmc
from adammcmc.cli.jets import app as jets_app
from adammcmc.cli.parameters import check_output, option, stopping
from adammcmc.posterior.store.atomic import write_whole
from adammcmc.samplers.terminal import say

if TYPE_CHECKING:
    from adammcmc.cli.recipe import Recipe, Source
    from adammcmc.posterior.posterior import Posterior

__all__ = ["app"]

app = typer.Typer(
    name="adammcmc",
    help="Sample the weights of a neural network from their posterior by Metropolis-Hastings around Adam steps, and report "
    "what was sampled.",
    epilog="Use the commands in this order: schema (prints a configuration to start from), sample, diagnose, report, predict. "
    "Exit codes: 0 success, 1 error, 2 invalid command line, 130 stopped by Ctrl-C (143 by SIGTERM, 129 by SIGHUP). "
    "--debug, anywhere, shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Run = Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)]
Config = Annotated[Path | None, option("A TOML file that names the network: for runs made in Python, or moved.")]
Data = Annotated[
    str | None, typer.Argument(help="A .npz or .npy file, or module:attribute; by default the held-out data of the run.")
]
Trust = Annotated[
    bool,
    option(
        "Import the modules that the run names (network, loss, data). Only for runs from people you trust.",
        "--trust-code",
        envvar="ADAMMCMC_TRUST_CODE",
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"adammcmc {adammcmc.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, option("Print the version.", "--version", callback=_show_version, is_eager=True)] = False,
    debug: Annotated[bool, option("Show the traceback of an error.", "--debug")] = False,
) -> None:
    """Options of the program itself; the help text is the app's."""


@app.command()
def demo(
    output: Annotated[Path, option("File for the figure (.png, .pdf or .svg).", "--output", "-o")] = Path("demo.png"),
    num_chains: Annotated[int, option("Chains, each from a network trained for it.", min=2)] = 4,
    gap: Annotated[int, option("Steps between two draws.", min=1)] = 60,
    num_draws: Annotated[int, option("Draws of each chain.", min=2)] = 300,
    seed: Annotated[int, option("Fixes every random number.", min=0)] = 0,
) -> None:
    """Top tagging on a small scale: exact chains of a network on twelve observables of bundled jets, and AdamMCMC beside them.

    Prints the verdict, what AdamMCMC costs in truth, accuracy, AUC and background rejection, the posterior spread of right and
    wrong tags, and the mutual information of out-of-distribution jets. Writes a figure and a report. Takes two to four minutes
    on two cores.
    """
    try:
        from adammcmc.cli.demo import run_demo
    except ImportError as error:
        raise typer.BadParameter(f"the demo needs {error.name}. Run: pip install 'adammcmc[demo]'") from error
    run_demo(output, num_chains=num_chains, gap=gap, num_draws=num_draws, seed=seed)


@app.command()
def sample(
    config: Annotated[Path, typer.Argument(help="A TOML file; `adammcmc schema` prints one.", show_default=False)],
    changes: Annotated[list[str] | None, option("section.key=value: change a value of the file. Repeatable.", "--set")] = None,
    output: Annotated[Path | None, option("Folder for the draws, instead of the file's.", "--output", "-o")] = None,
    dry_run: Annotated[bool, option("Only show the target, the size and the time. Writes nothing.", "--dry-run")] = False,
) -> None:
    """Sample as a configuration file describes.

    The configuration names a network, data, a loss and a sampler. Ctrl-C stops the run; `adammcmc resume RUN` continues it,
    bit for bit.

    A configuration imports the modules that it names: treat a file from someone else as you would treat a script.
    """
    with stopping(lambda: _after_stop(None)):
        from adammcmc.cli.recipe import Announcement, Source, prepare

        recipe = prepare(Source.of_file(config, changes or []))
    path = output or recipe.path
    if (path / "run.json").exists():
        raise ValueError(
            f"'{path}' already holds a run: `adammcmc resume {path}{_flag(recipe)}` continues it; or use another --output."
        )
    if path.exists() and not path.is_dir():
        raise ValueError(f"'{path}' is a file: the draws need a folder.")
    plan = recipe.plan(path, callbacks=[Announcement()])
    if dry_run:
        from adammcmc.cli.forecast import forecast

        training = f"training {recipe.training_steps:,} steps of Adam first\n" if recipe.training_steps else ""
        say(f"{forecast(recipe)}\n{training}{plan}\nNothing was written: this was a dry run.")
        return
    with stopping(lambda: _after_stop(path, _flag(recipe))):
        if (loss := recipe.train_first()) is not None:
            say(f"trained: {recipe.training_steps:,} steps of Adam, last loss {loss:.4g}")
        posterior = plan.run()
    if (members := posterior.store.manifest.get("members")) is not None:
        losses = members["losses"]
        kind = "validation loss" if members["num_validation"] else "training loss"
        say(f"trained {len(losses)} members in {members['seconds']:.0f} s, {kind} {min(losses):.4g} to {max(losses):.4g}")
    _show_result(posterior, path, _flag(recipe))


@app.command()
def resume(
    run: Run,
    num_draws: Annotated[int | None, option("Total draws of each chain; more than the run was started with.", min=1)] = None,
    config: Config = None,
    trust_code: Trust = False,
) -> None:
    """Continue a run that was stopped, or add draws."""
    with stopping(lambda: _after_stop(run, " --trust-code" if trust_code else "")):
        from adammcmc.cli.recipe import Announcement, prepare
        from adammcmc.posterior.store.folder import FolderStore, read_manifest

        wanted = num_draws or read_manifest(run)["configuration"]["num_draws"]
        recipe = prepare(_source(run, config, trust_code))
        before = len(FolderStore(run).index)
        posterior = recipe.plan(run, resume=True, num_draws=wanted, callbacks=[Announcement()]).run()
    if len(posterior.store.index) == before:
        say(f"the run was complete: `adammcmc resume {run} --num-draws N` adds draws.")
    _show_result(posterior, run, _flag(recipe))


@app.command()
def check(
    run: Run,
    repair: Annotated[
        bool, option("Rebuild the index from the draws, rename damaged files, use the previous checkpoint.", "--repair")
    ] = False,
) -> None:
    """Verify every file of a run: one line for each problem, then the verdict.

    Needs neither the network nor the data, and imports nothing that the run names. Nothing is ever deleted. The exit code is 0
    if the run is intact or was repaired, and 1 otherwise.
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
    output: Annotated[Path | None, option("File for all predictions: .npz or .csv.", "--output", "-o")] = None,
    rows: Annotated[int, option("Number of the most uncertain examples to show.", min=0)] = 10,
    config: Config = None,
    trust_code: Trust = False,
) -> None:
    """Predict with all draws: mean, spread, entropy, mutual information.

    Shows the examples with the largest uncertainty; --output writes all of them.
    """
    from rich.console import Console

    from adammcmc.cli.tables import prediction_table, summary_line, write_prediction

    check_output(output, ".npz", ".csv")
    recipe, posterior = _opened(run, config, trust_code)
    examples = _examples(recipe, data)
    if examples is None:
        raise typer.BadParameter("the configuration of the run has no held-out data ([data] `test`): give DATA.")
    prediction = posterior.predict(examples)
    if output is not None:
        write_prediction(output, prediction)
    say(summary_line(prediction))
    if rows:
        Console().print(prediction_table(prediction, rows))
    if output is not None:
        say(f"all {len(prediction):,} predictions: {output}")


@app.command()
def diagnose(
    run: Run,
    data: Data = None,
    output: Annotated[Path | None, option("Also write the results to this .json file.", "--output", "-o")] = None,
    config: Config = None,
    trust_code: Trust = False,
) -> None:
    """Report what was sampled, and whether to trust it.

    Prints the verdict first; then R-hat and effective sample size of the loss, of predictions for held-out inputs, and of the
    layers; then, if there are targets, the accuracy and calibration of the predictions.
    """
    check_output(output, ".json")
    recipe, posterior = _opened(run, config, trust_code)
    examples = _examples(recipe, data)
    summary, failure = _with_held_out(posterior.summary, examples, is_required=data is not None)
    if output is not None:
        write_whole(output, json.dumps(summary.to_dict(), indent=2) + "\n")
    say(str(summary))
    if failure:
        say(failure)
    elif examples is not None and len(posterior) > 0:
        prediction = posterior.predict(examples)
        if prediction.targets is not None:
            try:
                say(f"\n{adammcmc.score(prediction)}")
            except (ValueError, TypeError) as error:  # targets that predictions cannot be compared with
                say(f"note: not scored: {' '.join(str(error).split())}")


@app.command()
def report(
    run: Run,
    data: Data = None,
    output: Annotated[Path | None, option("The .html page; its figures go to a folder beside it.", "--output", "-o")] = None,
    title: Annotated[str | None, option("Title of the page.")] = None,
    config: Config = None,
    trust_code: Trust = False,
) -> None:
    """Write the report: one HTML page that works offline, with the verdict first.

    Shows traces, acceptance, self-tests, R-hat and effective sample size; with held-out data also reliability, spread and the
    most uncertain examples. By default the page is written to the run folder.
    """
    check_output(output, ".html")
    recipe, posterior = _opened(run, config, trust_code)
    page = run / "report.html" if output is None else output
    examples = _examples(recipe, data) if len(posterior) else None
    write = partial(posterior.report, page, title=title)
    written, failure = _with_held_out(write, examples, is_required=data is not None)
    if failure:
        say(failure)
    say(f"report: {written.resolve().as_uri()}")


@app.command()
def schema() -> None:
    """Print a configuration with every key and its description: a file to start from.

    It runs as printed (a small bundled task): adammcmc schema > my.toml && adammcmc sample my.toml
    """
    from adammcmc.cli.config import schema_as_toml

    say(schema_as_toml())


_BIBTEX = """\
@article{bieringer2023adammcmc,
  title = {{AdamMCMC}: Combining Metropolis Adjusted Langevin with Momentum-based Optimization},
  author = {Bieringer, Sebastian and Kasieczka, Gregor and Steffen, Maximilian F. and Trabs, Mathias},
  journal = {arXiv preprint arXiv:2312.14027},
  year = {2023},
}

@software{adammcmc,
  title = {adammcmc: Metropolis-Hastings around Adam steps for neural networks, and exact samplers beside it},
  author = {{The adammcmc developers}},
  version = {VERSION},
  license = {Apache-2.0},
}"""


@app.command()
def cite() -> None:
    """Print BibTeX entries for the paper and for this software."""
    say(_BIBTEX.replace("VERSION", adammcmc.__version__))  # CITATION.cff holds the same entries


app.add_typer(jets_app, name="jets")


# --- shared by the commands -----------------------------------------------------------------------------------------------


def _source(run: Path, config: Path | None, trust_code: bool) -> Source:
    """The configuration that a run stores, which may come from anybody; or a file that the user trusts by naming it."""
    from adammcmc.cli.config import read_config
    from adammcmc.cli.recipe import Source

    if config is not None:
        return Source.of_file(config)
    source = Source.of_run(run)
    if not trust_code and (names := read_config(source.text, source.changes).code):
        raise ValueError(
            f"the run in '{run}' imports code: {', '.join(names)}, from '{source.folder}' or an installed package. Add "
            "--trust-code if you trust the author of the run, or --config with a TOML file of yours."
        )
    return source


def _flag(recipe: Recipe) -> str:
    """The flag that the next command needs to open this run."""
    return " --trust-code" if recipe.config.code else ""


def _opened(run: Path, config: Path | None, trust_code: bool) -> tuple[Recipe, Posterior]:
    """The configuration of a run, loaded, and its draws."""
    from adammcmc.cli.recipe import prepare
    from adammcmc.posterior.posterior import Posterior

    recipe = prepare(_source(run, config, trust_code))
    posterior = Posterior.open(run, recipe.model)
    if not posterior.store.index:
        raise ValueError(f"the run in '{run}' has no draws yet: `adammcmc resume {run}` continues it.")
    return recipe, posterior


def _examples(recipe: Recipe, data: str | None) -> Any:
    """The data that the user names, or the held-out data of the run, or None."""
    return recipe.test if data is None else recipe.load(data, Path.cwd(), needs_targets=False)


def _with_held_out(function: Callable[..., Any], examples: Any, *, is_required: bool) -> tuple[Any, str]:
    """The function of the examples. If the run's own held-out data fail, the function without them, and a note."""
    try:
        return function(examples), ""
    except (ValueError, TypeError, RuntimeError) as error:  # such as a network that takes more than inputs
        if examples is None or is_required:
            raise
        return function(), f"note: cannot predict the held-out data: {' '.join(str(error).split())}"


def _after_stop(path: Path | None, flag: str = "") -> str:
    """What a stopped run leaves, and how to continue. None: there is no folder yet."""
    if path is None or not (path / "run.json").exists():
        return "stopped before the first step; nothing was written."
    number = "its draws"
    with suppress(Exception):  # a count is not worth an error
        from adammcmc.posterior.store.folder import FolderStore

        number = f"{len(FolderStore(path).index)} draws"
    return f"stopped; {path} keeps {number}. Continue with: adammcmc resume {path}{flag}"


def _show_result(posterior: Posterior, path: Path, flag: str) -> None:
    chains = f"{posterior.num_chains} chain{'s' * (posterior.num_chains > 1)}"
    say("\n".join([f"{len(posterior.store.index):,} draws of {chains}", *posterior.verdicts()]))
    following = ", ".join(f"adammcmc {command} {path}{flag}" for command in ("diagnose", "report", "predict"))
    say(f"draws: {path}. Next: {following}")
