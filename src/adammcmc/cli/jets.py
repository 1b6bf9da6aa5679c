"""`adammcmc jets ...`: make jets, convert files, train a tagger, sample its posterior, see what it says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adammcmc.posterior.store.whole import write_whole
from adammcmc.samplers.terminal import say

if TYPE_CHECKING:
    import torch

    from adammcmc.jets.data import Jets
    from adammcmc.jets.streaming import StreamedJets
    from adammcmc.jets.tagger import Tagger, Training

__all__ = ["app"]

app = typer.Typer(
    help="Top tagging: make jets, read the field's files, train ParticleNet, sample its posterior.",
    epilog="In this order: generate (or your own files), train, sample, evaluate. bundled:jets and bundled:others come along: "
    "adammcmc jets train bundled:jets --run runs/a --network lite --batch-size 256. More in docs/jets.md.",
    no_args_is_help=True,
)


class Network(StrEnum):
    """Which network."""

    particlenet = "particlenet"
    lite = "lite"


class SamplerChoice(StrEnum):
    """Which sampler."""

    adam_mcmc = "adam-mcmc"
    as_released = "as-released"
    underdamped = "underdamped"


class PrecisionChoice(StrEnum):
    """Of the network's arithmetic."""

    float32 = "float32"
    bfloat16 = "bfloat16"


Files = Annotated[list[Path], typer.Argument(help="Files or folders of jets: .h5, .root, .npz, .parquet; or bundled:jets.")]
MaxJets = Annotated[int | None, typer.Option(min=1, help="Read no more than this many jets.")]
AtOnce = Annotated[
    int | None, typer.Option(min=1, help="More jets than fit in memory: stream the files, so many jets at a time.")
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")]
Precise = Annotated[PrecisionChoice, typer.Option(help="bfloat16 is faster on a GPU.")]
Compile = Annotated[bool, typer.Option("--compile", help="Use torch.compile: a minute to start, faster steps.")]
Seed = Annotated[int, typer.Option(min=0, help="Fixes every random number.")]


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="Where the shards go; a call that was stopped goes on.")],
    jets: Annotated[int, typer.Option(min=1, help="Jets of each kind.")] = 10_000,
    kinds: Annotated[str, typer.Option(help="Some of qcd,top,w,z,h_bb,h_ww,quark,gluon, with commas; or all.")] = "top,qcd",
    pt: Annotated[tuple[float, float], typer.Option(help="Window of the jets' pT, GeV.")] = (550.0, 650.0),
    flat: Annotated[bool, typer.Option("--flat", help="A nearly flat spectrum of pT inside the window.")] = False,
    shard_size: Annotated[int, typer.Option(min=1, help="Jets in a file.")] = 2000,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one for each core if not given.")] = None,
    seed: Seed = 0,
) -> None:
    """Make jets with Pythia 8, a small detector and FastJet.

    These are Pythia jets in the phase space of the Top Quark Tagging Reference Dataset: 14 TeV, no multi-parton interactions,
    anti-kT R = 0.8, 550 < pT < 650 GeV, |eta| < 2. About 60 to 110 a second and core.
    """
    from adammcmc.jets.data import KINDS
    from adammcmc.jets.events import Settings, Window
    from adammcmc.jets.generate import generate

    names = KINDS if kinds == "all" else [name.strip() for name in kinds.split(",") if name.strip()]
    if not names:
        raise typer.BadParameter("--kinds names no kind of jets.")
    settings = Settings(seed=seed, window=Window(*pt), flat=flat, shard_size=shard_size)
    with _stopping(f"stopped; whole shards are in {folder}, and the same command goes on with the rest."):
        paths = generate(folder, dict.fromkeys(names, jets), settings, workers=workers)
    say(f"{jets:,} jets each of {', '.join(names)}: {len(paths)} files in {folder}")
    say("Please cite Pythia (arXiv:2203.11601) and FastJet (arXiv:1111.6097) if you publish with them.")


@app.command()
def convert(
    files: Files,
    output: Annotated[Path, typer.Option("--output", "-o", help="The new file: .npz or .parquet, our compact format.")],
    max_jets: MaxJets = None,
    shuffle: Annotated[int | None, typer.Option(help="Mix the jets, with this seed.")] = None,
) -> None:
    """Write jets of any known format into one compact file, about 0.25 kB a jet."""
    from adammcmc.jets.files import write_jets

    jets = _read(files, max_jets)
    write_jets(output, jets if shuffle is None else jets.shuffled(shuffle))
    say(f"{output}: {jets!r}, {output.stat().st_size / len(jets):.0f} bytes a jet")


@app.command()
def train(
    files: Files,
    run: Annotated[Path, typer.Option("--run", "-r", help="A folder for the tagger.")],
    network: Annotated[Network, typer.Option(help="particlenet: 366,160 parameters; lite: 26,416.")] = Network.particlenet,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the jets.")] = 10,
    batch_size: Annotated[int, typer.Option(min=2, help="Jets in a step.")] = 512,
    lr: Annotated[float, typer.Option(help="Adam's learning rate; falls to a hundredth in the second half.")] = 2e-3,
    held_out: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of the jets to test on, not to train on.")] = 0.1,
    max_jets: MaxJets = None,
    at_once: AtOnce = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="The same command goes on after its last epoch; more --epochs raise the learning rate again."
        ),
    ] = False,
    device: Device = None,
    precision: Precise = PrecisionChoice.float32,
    compile: Compile = False,
    seed: Seed = 0,
) -> None:
    """Train ParticleNet on top and QCD jets with Adam."""
    from adammcmc.jets.streaming import StreamedJets
    from adammcmc.jets.tagger import Tagger, Training, best_device
    from adammcmc.jets.tagging import accuracy, auc

    if run.exists() and not run.is_dir():
        raise typer.BadParameter(f"'{run}' is a file: --run is a folder.")
    if (run / "tagger.safetensors").exists() and not resume:
        raise typer.BadParameter(f"'{run}' holds a tagger already: choose another folder, or --resume.")
    settings = Training(network.value, epochs=epochs, batch_size=batch_size, lr=lr, seed=seed, held_out=held_out)
    train, test, mark = _split(files, max_jets, at_once, settings, best_device() if device is None else device)
    number = len(train.heads if isinstance(train, StreamedJets) else train)
    settings = replace(settings, batch_size=min(batch_size, number))
    if resume and (run / "tagger.safetensors").exists():
        tagger = Tagger.load(run, device=device, precision=precision.value, compiled=compile, epochs=epochs)
        for name, value in asdict(tagger.training).items():
            if value != getattr(settings, name):
                raise typer.BadParameter(f"the tagger in '{run}' was trained with {name} = {value}: to go on, say the same.")
        _check_same(tagger, mark, run)
        if (run / "posterior").exists() and tagger.epochs < epochs:
            raise typer.BadParameter(
                f"'{run}' holds draws of this tagger, which would not be its own any more: use another folder."
            )
    else:
        tagger = Tagger(settings, device=device, precision=precision.value, compiled=compile)
        tagger.trained_on = mark
    steps = settings.epochs * (number // settings.batch_size)
    say(f"training on {train!r}, {steps:,} steps of {settings.batch_size} jets, on {tagger.device}")
    if steps < 100:
        say("so few steps train hardly anything: use more --epochs, or a smaller --batch-size.", err=True)

    def after(tagger: Tagger, loss: float) -> None:
        tagger.save(run)
        line = f"epoch {tagger.epochs}: mean loss {loss:.4f}"
        kind = test.heads.kind if isinstance(test, StreamedJets) else test.kind
        if set(kind.tolist()) == {0, 1}:
            scores = tagger.scores(test)
            line += f", on {len(kind):,} held-out jets: accuracy {accuracy(scores, kind)}, AUC {auc(scores, kind)}"
        say(line)

    with _stopping(
        f"stopped; {run} has the tagger of its last whole epoch, if there was one: the same command with --resume goes on."
    ):
        tagger.train(train, after_epoch=after)
    say(f"{run}: next, `adammcmc jets sample {' '.join(str(f) for f in files)} --run {run}`")


@app.command()
def sample(
    files: Files,
    run: Annotated[Path, typer.Option("--run", "-r", help="The folder of the tagger; the draws go to RUN/posterior.")],
    sampler: Annotated[
        SamplerChoice,
        typer.Option(
            help="adam-mcmc: Algorithm 1, approximate; as-released: the published code; underdamped: exact, all jets a step."
        ),
    ] = SamplerChoice.adam_mcmc,
    lr: Annotated[float, typer.Option(help="Of the Adam step (not underdamped).")] = 1e-3,
    sigma: Annotated[
        float, typer.Option(help="Noise on one weight (not underdamped): the larger, the more is rejected.")
    ] = 3e-4,
    sigma_along: Annotated[
        float, typer.Option(help="Noise along the Adam step, in steps (not underdamped); 0 rejects nearly all.")
    ] = 2.0,
    inverse_temperature: Annotated[float, typer.Option(help="lambda; multiplies the sum of all losses, 1 is Bayes.")] = 1.0,
    batch_size: Annotated[int, typer.Option(min=2, help="Jets in a step (underdamped: always all).")] = 512,
    burn_in: Annotated[
        int | None, typer.Option(min=0, help="Steps before the chain counts; if not given, a quarter of those that follow.")
    ] = None,
    gap: Annotated[int, typer.Option(min=1, help="Steps between draws.")] = 100,
    draws: Annotated[int, typer.Option(min=2, help="Copies of the weights to keep, of each chain.")] = 10,
    chains: Annotated[int, typer.Option(min=1, help="Chains, one after the other, from the same start.")] = 1,
    prior_gain: Annotated[
        float, typer.Option(min=0.0, help="Gaussian prior: sd of a weight times sqrt(fan in); 0 is flat, as in the paper.")
    ] = 2.0,
    training_mode: Annotated[
        bool, typer.Option("--training-mode", help="BatchNorm on the batch, and dropout, as in the paper.")
    ] = False,
    max_jets: MaxJets = None,
    at_once: AtOnce = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a chain that was stopped.")] = False,
    device: Device = None,
    precision: Precise = PrecisionChoice.float32,
    compile: Compile = False,
    seed: Seed = 0,
) -> None:
    """Draw the weights of a trained tagger from its posterior, and be told what was sampled."""
    from adammcmc.jets.tagger import Tagger

    tagger = Tagger.load(run, device=device, precision=precision.value, compiled=compile)
    settings = replace(tagger.training, batch_size=batch_size)
    train, _, mark = _split(files, max_jets, at_once, settings, tagger.device)
    _check_same(tagger, mark, run)
    if (run / "posterior" / "run.json").exists() and not resume:
        raise typer.BadParameter(
            f"'{run}' holds draws already: --resume goes on with them; for others copy the tagger elsewhere."
        )
    with _stopping(f"stopped; the draws so far are in {run / 'posterior'}: the same command with --resume goes on."):
        posterior = tagger.sample(
            train,
            sampler=sampler.value,
            lr=lr,
            sigma=sigma,
            sigma_along=sigma_along,
            inverse_temperature=inverse_temperature,
            prior_gain=prior_gain or None,
            batch_size=batch_size,
            burn_in=burn_in,
            gap=gap,
            num_draws=draws,
            num_chains=chains,
            in_training_mode=training_mode,
            seed=seed,
            path=run / "posterior",
            resume=resume,
        )
    say(str(posterior))


@app.command()
def evaluate(
    files: Files,
    run: Annotated[Path, typer.Option("--run", "-r", help="The folder of the tagger and its posterior.")],
    held_out: Annotated[
        bool, typer.Option("--held-out", help="The files are those of the training: look at the held-out jets only.")
    ] = False,
    others: Annotated[list[Path] | None, typer.Option(help="Jets from elsewhere, for the figure over pT.")] = None,
    output: Annotated[Path | None, typer.Option(help="A folder for what is written; RUN if not given.")] = None,
    max_jets: MaxJets = None,
    at_once: AtOnce = None,
    device: Device = None,
    precision: Precise = PrecisionChoice.float32,
) -> None:
    """Accuracy, AUC, rejection; mean and spread by class and correctness; mutual information against pT.

    Writes scores.csv (one line a jet), tagging.png and tagging.json and, with --others, others.csv and others.png.
    """
    import torch

    from adammcmc.jets.data import Jets
    from adammcmc.jets.figures import draw_others, draw_tagging
    from adammcmc.jets.files import jet_files
    from adammcmc.jets.tagger import Tagger
    from adammcmc.jets.tagging import accuracy, as_json, auc, compare_kinds, evaluate, write_scores

    tagger = Tagger.load(run, device=device, precision=precision.value)
    if not (run / "posterior").is_dir():
        raise typer.BadParameter(f"'{run}' has no posterior yet: run `adammcmc jets sample ... --run {run}` first.")
    folder = run if output is None else output
    folder.mkdir(parents=True, exist_ok=True)
    elsewhere = _read(others, max_jets) if others else None
    if held_out and tagger.training.held_out == 0:
        raise ValueError(f"the tagger in '{run}' was trained on all jets: there are no held-out ones.")
    jets = _two_classes(files, max_jets) if at_once is None else Jets.empty()
    mark = _mark(jet_files(files)) if at_once is not None else jets.digest()
    if held_out:
        _check_same(tagger, mark, run)
    elif mark == tagger.trained_on:
        raise ValueError(f"these are the jets that the tagger in '{run}' was trained on: use --held-out, or other files.")
    what: Jets | StreamedJets
    if at_once is None:
        rows = tagger.training.split_rows(len(jets))[1] if held_out else torch.arange(len(jets))
        what = jets = jets[rows]
    else:
        chosen = tagger.training.split_files(jet_files(files))[1] if held_out else files
        what = _streamed(chosen, tagger.training.batch_size, at_once, tagger.device)
        jets, rows = what.heads, torch.arange(what.num_data)
    posterior = tagger.posterior(run / "posterior")
    say(str(posterior))
    trained, prediction = tagger.scores(what), tagger.predict(posterior, what)
    numbers = evaluate(prediction, jets.kind)
    say(f"trained network alone: accuracy {accuracy(trained, jets.kind)}, AUC {auc(trained, jets.kind)}")
    say(f"mean over {len(posterior)} draws, {numbers}")
    write_scores(folder / "scores.csv", jets, prediction, rows=rows, trained=trained)
    write_whole(folder / "tagging.json", as_json(numbers))
    draw_tagging(folder / "tagging.png", prediction, jets)
    written = ["scores.csv", "tagging.json", "tagging.png"]
    if elsewhere is not None:
        unseen = tagger.predict(posterior, elsewhere)
        for kind in compare_kinds(prediction, elsewhere, unseen):
            say(str(kind))
        write_scores(folder / "others.csv", elsewhere, unseen, trained=tagger.scores(elsewhere))
        draw_others(folder / "others.png", (jets, prediction), (elsewhere, unseen))
        written += ["others.csv", "others.png"]
    say(f"{folder}: {', '.join(written)}")


@contextmanager
def _stopping(words: str) -> Iterator[None]:
    """What to say after Ctrl-C or another signal."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        raise exit_after_stop(error, words) from None


def exit_after_stop(error: KeyboardInterrupt | SystemExit, words: str) -> typer.Exit:
    """The exit code of what stopped a command, once these words were said: the terminal may be gone."""
    with suppress(OSError):
        say(words, err=True)
    return typer.Exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 130)


def _split(
    files: list[Path], max_jets: int | None, at_once: int | None, training: Training, device: str | torch.device
) -> tuple[Jets | StreamedJets, Jets | StreamedJets, str]:
    """Jets to train on, held-out ones, and what tells them all from others. Of streams whole files are held out."""
    from adammcmc.jets.data import Jets
    from adammcmc.jets.files import jet_files

    if at_once is None:
        jets = _two_classes(files, max_jets)
        return (*training.split(jets), jets.digest())
    if max_jets is not None:
        raise typer.BadParameter("--max-jets is for jets in memory, --at-once for streams: choose one.")
    everything = jet_files(files)
    train, test = training.split_files(everything)
    held_out: Jets | StreamedJets = _streamed(test, training.batch_size, at_once, device) if test else Jets.empty()
    return _streamed(train, training.batch_size, at_once, device), held_out, _mark(everything)


def _streamed(files: list[Path], batch_size: int, at_once: int, device: str | torch.device) -> StreamedJets:
    from adammcmc.jets.streaming import StreamedJets

    return StreamedJets(files, batch_size, at_once=at_once, device=device)


def _mark(files: list[Path]) -> str:
    """Tells files from others by name and size."""
    text = "".join(f"{file.name} {file.stat().st_size} " for file in files)
    return f"files {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def _check_same(tagger: Tagger, mark: str, run: Path) -> None:
    """What is held out depends on the jets and their order: with others it would be jets of the training."""
    if mark != tagger.trained_on:
        raise ValueError(
            f"these are not the jets that the tagger in '{run}' was trained on: give the same files in the same order, and the "
            "same --max-jets or --at-once."
        )


def _read(files: list[Path], max_jets: int | None) -> Jets:
    from adammcmc.jets.files import read_jets

    return read_jets(files, max_jets)


def _two_classes(files: list[Path], max_jets: int | None) -> Jets:
    from adammcmc.jets.tagger import check_two_classes

    jets = _read(files, max_jets)
    chosen = jets.of_kind("qcd", "top")
    check_two_classes(chosen if len(chosen) else jets)
    return chosen
