"""`adammcmc jets ...`: generate jets, convert files, train a tagger, sample its posterior, evaluate it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adammcmc.cli.parameters import option, options_from, settings_from, stopping
from adammcmc.jets.settings import Precision, Sampling, Training
from adammcmc.posterior.store.atomic import write_whole
from adammcmc.samplers.terminal import say

if TYPE_CHECKING:
    from adammcmc.jets.tagger import Tagger

__all__ = ["app"]

app = typer.Typer(
    help="Top tagging: generate jets, read the field's file formats, train ParticleNet, sample its posterior.",
    epilog="Use the commands in this order: generate (or your own files), train, sample, evaluate. Bundled samples: "
    "bundled:jets and bundled:others. Try: adammcmc jets train bundled:jets --run runs/a --network lite --batch-size 256. "
    "More in docs/jets.md.",
    no_args_is_help=True,
)

Files = Annotated[list[Path], typer.Argument(help="Files or folders of jets: .h5, .root, .npz, .parquet; or bundled:jets.")]
MaxJets = Annotated[int | None, option("Read at most this many jets.", min=1)]
ChunkSize = Annotated[int | None, option("Stream the files, this many jets in memory at a time.", min=1)]
Device = Annotated[str | None, option("cpu or cuda; by default the GPU if there is one.")]
Resume = Annotated[bool, option("Continue after a stop: repeat the command with this flag.", "--resume")]
Precise = Annotated[Precision, option("bfloat16 is faster on a GPU.")]
Compile = Annotated[bool, option("Use torch.compile: a minute to start, then faster steps.", "--compile")]
RunFolder = Annotated[Path, option("Folder of the tagger; draws are stored in RUN/posterior.", "--run", "-r")]
_DRAWS = "posterior"


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="Folder for the shards. Repeat a stopped command to continue it.")],
    jets: Annotated[int, option("Jets of each kind.", min=1)] = 10_000,
    kinds: Annotated[str, option("From qcd,top,w,z,h_bb,h_ww,quark,gluon, separated by commas; or all.")] = "top,qcd",
    pt: Annotated[tuple[float, float], option("Range of the jets' pT, GeV.")] = (550.0, 650.0),
    flat: Annotated[bool, option("Make the pT spectrum nearly flat in this range.", "--flat")] = False,
    shard_size: Annotated[int, option("Jets in a file.", min=1)] = 2000,
    workers: Annotated[int | None, option("Processes; by default one for each core.", min=1)] = None,
    seed: Annotated[int, option("Fixes every random number.", min=0)] = 0,
) -> None:
    """Generate jets with Pythia 8, a small detector simulation and FastJet.

    The jets lie in the phase space of the Top Quark Tagging Reference Dataset: 14 TeV, no multi-parton interactions, anti-kT
    R = 0.8, 550 < pT < 650 GeV, |eta| < 2. About 60 to 110 jets per second and core.
    """
    from adammcmc.jets.data import KINDS
    from adammcmc.jets.events import Settings, Window
    from adammcmc.jets.generate import generate

    names = KINDS if kinds == "all" else [name.strip() for name in kinds.split(",") if name.strip()]
    if not names:
        raise typer.BadParameter("--kinds names no kind of jets.")
    settings = Settings(seed=seed, window=Window(*pt), flat=flat, shard_size=shard_size)
    with stopping(lambda: f"stopped; {folder} keeps the complete shards. Repeat the command to continue."):
        paths = generate(folder, dict.fromkeys(names, jets), settings, workers=workers)
    say(f"{jets:,} jets each of {', '.join(names)}: {len(paths)} files in {folder}")
    say("Please cite Pythia (arXiv:2203.11601) and FastJet (arXiv:1111.6097) in publications.")


@app.command()
def convert(
    files: Files,
    output: Annotated[Path, option("The new file, in our compact format: .npz or .parquet.", "--output", "-o")],
    max_jets: MaxJets = None,
    shuffle: Annotated[int | None, option("Shuffle the jets with this seed.")] = None,
) -> None:
    """Convert jets of any known format into one compact file, about 0.25 kB per jet."""
    from adammcmc.jets.files import read_jets, write_jets

    jets = read_jets(files, max_jets)
    write_jets(output, jets if shuffle is None else jets.shuffled(shuffle))
    say(f"{output}: {jets!r}, {output.stat().st_size / len(jets):.0f} bytes per jet")


@app.command()
@options_from(Training, held_out=0.1)
def train(
    files: Files,
    run: RunFolder,
    max_jets: MaxJets = None,
    chunk_size: ChunkSize = None,
    resume: Resume = False,
    device: Device = None,
    precision: Precise = "float32",
    compile: Compile = False,
    **given: Any,
) -> None:
    """Train ParticleNet on top and QCD jets with Adam.

    With --resume, the same command continues after the last complete epoch; more --epochs raise the learning rate again.
    """
    settings: Training = settings_from(Training, given)
    from adammcmc.jets.metrics import accuracy, auc
    from adammcmc.jets.selection import Selection
    from adammcmc.jets.tagger import Tagger, best_device

    if run.exists() and not run.is_dir():
        raise typer.BadParameter(f"'{run}' is a file: --run must be a folder.")
    is_there = (run / "tagger.safetensors").exists()
    if is_there and not resume:
        raise typer.BadParameter(f"'{run}' already holds a tagger: choose another folder, or --resume.")
    jets = Selection(files, max_jets, chunk_size, device or best_device())
    train, test = jets.split(settings)
    settings = replace(settings, batch_size=min(settings.batch_size, len(train)))
    if is_there:
        tagger = Tagger.load(run, device=device, precision=precision, compiled=compile, epochs=settings.epochs)
        _check_resumable(tagger, settings, jets.mark, run)
    else:
        tagger = Tagger(settings, device=device, precision=precision, compiled=compile)
        tagger.trained_on = jets.mark
    steps = settings.epochs * (len(train) // settings.batch_size)
    say(f"training on {train!r}, {steps:,} steps of {settings.batch_size} jets, on {tagger.device}")
    if steps < 100:
        say("so few steps hardly train the network: use more --epochs, or a smaller --batch-size.", err=True)

    def after(tagger: Tagger, loss: float) -> None:
        tagger.save(run)
        line = f"epoch {tagger.epochs}: mean loss {loss:.4f}"
        if set(test.kind.tolist()) == {0, 1}:
            scores, kind = tagger.scores(test), test.kind
            line += f", on {len(test):,} held-out jets: accuracy {accuracy(scores, kind)}, AUC {auc(scores, kind)}"
        say(line)

    with stopping(lambda: f"stopped; {run} keeps the last complete epoch. Repeat the command with --resume to continue."):
        tagger.train(train, after_epoch=after)
    say(f"{run}: next, `adammcmc jets sample {' '.join(str(f) for f in files)} --run {run}`")


@app.command()
@options_from(Sampling)
def sample(
    files: Files,
    run: RunFolder,
    max_jets: MaxJets = None,
    chunk_size: ChunkSize = None,
    resume: Resume = False,
    device: Device = None,
    precision: Precise = "float32",
    compile: Compile = False,
    **given: Any,
) -> None:
    """Sample the weights of a trained tagger from their posterior, and report what was sampled."""
    settings: Sampling = settings_from(Sampling, given)
    from adammcmc.jets.selection import Selection
    from adammcmc.jets.tagger import Tagger

    tagger = Tagger.load(run, device=device, precision=precision, compiled=compile)
    jets = Selection(files, max_jets, chunk_size, tagger.device)
    _check_same(tagger, jets.mark, run)
    train, _ = jets.split(tagger.training, settings.batch_size)
    folder = run / _DRAWS
    if (folder / "run.json").exists() and not resume:
        raise typer.BadParameter(f"'{run}' already holds draws: --resume continues them; for others copy the tagger.")
    with stopping(lambda: f"stopped; {folder} keeps the draws so far. Repeat the command with --resume to continue."):
        posterior = tagger.sample(train, settings, path=folder, resume=resume)
    say(str(posterior))


@app.command()
def evaluate(
    files: Files,
    run: RunFolder,
    held_out: Annotated[bool, option("FILES are the training files: use their held-out jets only.", "--held-out")] = False,
    others: Annotated[list[Path] | None, option("Out-of-distribution jets, for the figure against pT.")] = None,
    output: Annotated[Path | None, option("Folder for the results; by default RUN.", "--output", "-o")] = None,
    max_jets: MaxJets = None,
    chunk_size: ChunkSize = None,
    device: Device = None,
    precision: Precise = "float32",
) -> None:
    """Accuracy, AUC, rejection; mean and spread by class and correctness; mutual information against pT.

    Writes scores.csv (one line per jet), tagging.png and tagging.json and, with --others, others.csv and others.png.
    """
    from adammcmc.jets.figures import draw_others, draw_tagging
    from adammcmc.jets.files import read_jets
    from adammcmc.jets.metrics import accuracy, as_json, auc, compare_kinds, evaluate, write_scores
    from adammcmc.jets.selection import Selection
    from adammcmc.jets.tagger import Tagger

    tagger = Tagger.load(run, device=device, precision=precision)
    if not (run / _DRAWS).is_dir():
        raise typer.BadParameter(f"'{run}' has no posterior yet: run `adammcmc jets sample ... --run {run}` first.")
    folder = run if output is None else output
    folder.mkdir(parents=True, exist_ok=True)
    unseen = read_jets(others, max_jets) if others else None
    if held_out and tagger.training.held_out == 0:
        raise ValueError(f"the tagger in '{run}' was trained on all jets: there are no held-out jets.")
    source = Selection(files, None if chunk_size else max_jets, chunk_size, tagger.device)
    if held_out:
        _check_same(tagger, source.mark, run)
    elif source.mark == tagger.trained_on:
        raise ValueError(f"the tagger in '{run}' was trained on these jets: use --held-out, or other files.")
    data, rows = source.test(tagger.training, held_out=held_out)
    jets = data.heads
    posterior = tagger.posterior(run / _DRAWS)
    say(str(posterior))
    trained, prediction = tagger.scores(data), tagger.predict(posterior, data)
    numbers = evaluate(prediction, jets.kind)
    say(f"trained network alone: accuracy {accuracy(trained, jets.kind)}, AUC {auc(trained, jets.kind)}")
    say(f"mean over {len(posterior)} draws, {numbers}")
    write_scores(folder / "scores.csv", jets, prediction, rows=rows, trained=trained)
    write_whole(folder / "tagging.json", as_json(numbers))
    draw_tagging(folder / "tagging.png", prediction, jets)
    written = ["scores.csv", "tagging.json", "tagging.png"]
    if unseen is not None:
        answers, alone = tagger.predict(posterior, unseen), tagger.scores(unseen)
        for kind in compare_kinds(prediction, unseen, answers):
            say(str(kind))
        write_scores(folder / "others.csv", unseen, answers, trained=alone)
        draw_others(folder / "others.png", (jets, prediction), (unseen, answers))
        written += ["others.csv", "others.png"]
    say(f"{folder}: {', '.join(written)}")


def _check_same(tagger: Tagger, mark: str, run: Path) -> None:
    """Which jets are held out depends on the jets and their order: other files would mix in training jets."""
    if mark != tagger.trained_on:
        raise ValueError(
            f"these are not the jets that the tagger in '{run}' was trained on: give the same files in the same order, and the "
            "same --max-jets or --chunk-size."
        )


def _check_resumable(tagger: Tagger, settings: Training, mark: str, run: Path) -> None:
    """The same settings and jets, and no draws that further training would invalidate."""
    for name, value in asdict(tagger.training).items():
        if value != getattr(settings, name):
            raise typer.BadParameter(f"the tagger in '{run}' was trained with {name} = {value}: resume with the same value.")
    _check_same(tagger, mark, run)
    if (run / _DRAWS).exists() and tagger.epochs < settings.epochs:
        raise typer.BadParameter(f"'{run}' holds draws, which more training would invalidate: use another folder.")
