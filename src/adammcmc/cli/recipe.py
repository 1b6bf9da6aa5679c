"""A configuration as the objects that `sample` takes: the network, the data, the loss, the sampler."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from adammcmc.cli.config import Choice, Config, named_things, read_config, read_text
from adammcmc.cli.options import nearest
from adammcmc.cli.tasks import TASKS, Task
from adammcmc.errors import StoreCorrupt, StoreMismatch, warn
from adammcmc.posterior.posterior import Posterior
from adammcmc.posterior.store.archives import check_fits, read_npz
from adammcmc.posterior.store.folder import read_manifest
from adammcmc.runs.callbacks import Callback, Event
from adammcmc.runs.factory import SCANNED
from adammcmc.runs.run import sample
from adammcmc.samplers.adaptation import BurnIn
from adammcmc.samplers.progress import track
from adammcmc.target.data import as_data, to_device
from adammcmc.target.likelihood import GaussianNLL, Likelihood, Loss, as_likelihood, likelihood_of
from adammcmc.target.priors import Prior

__all__ = ["Announcement", "Recipe", "Source", "check_trusted", "code_of", "find", "load_data", "prepare"]

_LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": F.cross_entropy,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "binary_cross_entropy": F.binary_cross_entropy,
    "nll_loss": F.nll_loss,
    "GaussianNLL": GaussianNLL,
}
_PAIRS = (("inputs", "targets"), ("x", "y"), ("X", "y"), ("X", "Y"))
_ARRAYS = (".npy", ".npz")


class Source(NamedTuple):
    """A configuration's text, and where it lies: its paths are relative to that folder, and its modules are found there."""

    text: str
    changes: tuple[str, ...]
    """What was set on the command line."""
    folder: Path
    file: str
    """Its name in that folder."""

    @classmethod
    def of_file(cls, path: Path, changes: Sequence[str] = ()) -> Source:
        """A file, with changes on top."""
        return cls(read_text(path), tuple(changes), path.absolute().parent, path.name)

    @classmethod
    def of_run(cls, path: Path) -> Source:
        """What a run folder remembers."""
        remembered = read_manifest(path).get("config")
        words = ("text", "file", "folder", "from_run")
        if remembered is not None and not (
            isinstance(remembered, dict)
            and all(isinstance(remembered.get(word), str) for word in words)
            and isinstance(remembered.get("changes"), list)
            and all(isinstance(change, str) for change in remembered["changes"])
        ):
            raise StoreCorrupt(
                f"'{path / 'run.json'}' is damaged: its `config` is not what `adammcmc sample` writes. Give --config, the TOML "
                "file that made the run."
            )
        if remembered is None:
            raise StoreMismatch(
                f"the run in '{path}' was not made by `adammcmc sample`: it does not say how to make its network. Give "
                "--config, a TOML file that names it, or use adammcmc.Posterior.open(path, model) in Python."
            )
        # as seen from the run, which may have moved with it; through links or not; where it was
        places = [
            Path(os.path.normpath(path.absolute() / remembered["from_run"])),
            (path / remembered["from_run"]).resolve(),
            Path(remembered["folder"]),
        ]
        folder = next((place for place in places if (place / remembered["file"]).is_file()), places[-1])
        return cls(remembered["text"], tuple(remembered["changes"]), folder, remembered["file"])

    def as_json(self, path: Path) -> dict[str, Any]:
        """For `of_run`, as the run in this folder keeps it."""
        return {
            "text": self.text,
            "changes": list(self.changes),
            "file": self.file,
            "folder": str(self.folder),
            "from_run": os.path.relpath(self.folder, path),
        }


class Announcement(Callback):
    """Says what is sampled, when the first chain begins."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def on_start(self, event: Event) -> None:
        if event.chain == 0:
            self._say(event.sampler.describe())


@dataclass(frozen=True)
class Recipe:
    """What a configuration stands for."""

    config: Config
    source: Source
    model: nn.Module
    loss: Callable[..., Any]
    task: Task | None
    training_steps: int

    @functools.cached_property
    def train(self) -> Any:
        """The training data, read when they are asked for: who only predicts need not have them."""
        if self.task is not None:
            return self.task.train
        assert self.config.data.train is not None
        return self._load("[data] `train`", self.config.data.train, self.config.data.arguments)

    @functools.cached_property
    def test(self) -> Any:
        """Held-out data; None where there are none."""
        if self.config.data.test is not None:
            return self._load("[data] `test`", self.config.data.test, {})
        return None if self.task is None else self.task.test

    def _load(self, place: str, what: str | list[str], arguments: dict[str, Any]) -> Any:
        keys, likelihood = self.config.data.keys, self.likelihood
        return load_data(
            what, self.source.folder, self.model, place=place, keys=keys, arguments=arguments, likelihood=likelihood
        )

    @property
    def likelihood(self) -> Likelihood:
        """What the outputs mean, and so what the targets are: class labels, or numbers."""
        given = self.config.loss.likelihood
        return likelihood_of(self.loss) if given is None else as_likelihood(given)

    def sample(self, path: Path | None, **changes: Any) -> Posterior:
        """Draw, as the configuration says; `changes` are arguments of `adammcmc.sample`."""
        run, loss = self.config.run, self.config.loss
        options: dict[str, Any] = {
            "sampler": self.sampler(),
            "prior": self._prior(),
            "batch_size": run.batch_size,
            "num_draws": run.num_draws,
            "gap": run.gap,
            "burn_in": self.burn_in,
            "num_chains": run.num_chains,
            "stacked": run.stacked,
            "seed": run.seed,
            "keep": run.keep,
            "dtype": None if run.dtype is None else getattr(torch, run.dtype),
            "likelihood": loss.likelihood,
            "num_data": self.config.data.num_data,
            "path": path,
        }
        if path is not None:
            options["config"] = self.source.as_json(path)
        return sample(self.model, self.train, self.loss, **(options | changes))

    @property
    def path(self) -> Path:
        """Where the configuration wants its draws, relative to the working directory if it is inside."""
        given = self.config.run.path
        path = self.source.folder / (Path("runs", Path(self.source.file).stem) if given is None else Path(given).expanduser())
        return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path

    @property
    def burn_in(self) -> int | BurnIn | None:
        """As `adammcmc.sample` takes it."""
        if self.config.burn_in is None:
            return self.config.run.burn_in
        with _at("[burn_in]"):
            return BurnIn(**self.config.burn_in.options)

    def train_first(self, *, progress: bool = True) -> float | None:
        """Try the loss out, and train by Adam if the configuration asks for it. Returns the last loss, or None."""
        _ = self.test  # what is wrong with it is said before the work
        torch.manual_seed(self.config.run.seed)
        data = as_data(self.train, self.config.run.batch_size, self.config.data.num_data)
        data.restart(self.config.run.seed)
        device, loss = next(self.model.parameters()).device, Loss(self.loss)
        last = [loss.try_out(self.model, to_device(next(data), device)).mean()]
        if not bool(last[0].isfinite()):
            raise ValueError(f"the loss of the first batch is {float(last[0])}: look at the data, the weights and the loss.")
        optimizer = torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad], self.config.training.lr)
        steps = range(self.training_steps)
        for _ in track(steps, "training", show=progress, status=lambda: f"loss {float(last[0]):.3g}"):
            optimizer.zero_grad()
            value = loss(self.model, to_device(next(data), device)).mean()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            last[0] = value.detach()
        data.restart(0)  # lets go of workers
        return float(last[0]) if self.training_steps else None

    def _prior(self) -> Prior | None:
        choice = self.config.prior
        if choice is None:
            return None
        make = named_things("prior")[choice.name]
        with _at("[prior]"):
            takes_model = choice.name in ("Gaussian.fan_in", "Gaussian.per_layer")
            return make(self.model, **choice.options) if takes_model else make(**choice.options)  # type: ignore[no-any-return]

    def sampler(self) -> Callable[..., Any] | None:
        """What makes the sampler, as `adammcmc.sample` takes it."""
        choice, test = self.config.sampler, self.config.acceptance
        if choice is None and test is None:
            return None
        if choice is None:
            choice = Choice(next(iter(named_things("sampler"))), {})
        is_own = ":" in choice.name
        make = find("[sampler] `name`", choice.name, self.source.folder) if is_own else named_things("sampler")[choice.name]
        if not callable(make):
            raise ValueError(f"[sampler] `name`: {choice.name} must make a sampler, got {type(make).__name__}.")
        options = {name: _scan(value) if name in SCANNED else value for name, value in choice.options.items()}
        if test is not None:
            with _at("[acceptance]"):
                options["acceptance"] = named_things("acceptance")[test.name](**test.options)
        return functools.partial(make, **options)


def prepare(source: Source) -> Recipe:
    """Read a configuration and make what it names."""
    config, folder = read_config(source.text, source.changes), source.folder
    torch.manual_seed(config.run.seed)  # the first weights
    task = None if config.task is None else TASKS[config.task]()
    model = _placed(_model(config, folder) if task is None else task.model, config)
    if config.model.weights is not None:
        _load_weights(model, folder / config.model.weights)
    if config.model.mode is not None:
        model.train(config.model.mode == "train")
    steps = config.training.steps
    if steps is None:
        steps = 0 if task is None or config.model.weights is not None else task.training_steps
    return Recipe(config, source, model, _loss(config, folder) if task is None else task.loss, task, steps)


# --- what a configuration names -------------------------------------------------------------------------------------------


def find(place: str, name: str, folder: Path) -> Any:
    """The object `module:attribute`; modules are looked for in the configuration's folder and the working directory first."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ValueError(f"{place} must look like module:attribute, got '{name}'.")
    try:
        thing: Any = _module(place, module_name, [str(folder), os.getcwd()])
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise ValueError(f"{place}: importing '{module_name}' failed: {error}.") from error
        raise ValueError(
            f"{place}: there is no module '{error.name}' in '{folder}', in '{os.getcwd()}', or among what is installed."
        ) from error
    except _NameTaken:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"{place}: importing '{module_name}' failed: {type(error).__name__}: {error}.") from error
    for part in attribute.split("."):
        if not hasattr(thing, part):
            names = [n for n in vars(thing) if not n.startswith("_")] if hasattr(thing, "__dict__") else []
            raise ValueError(f"{place}: '{module_name}' has no '{attribute}': {nearest(part, names)}")
        thing = getattr(thing, part)
    return thing


class _NameTaken(ValueError):
    """A module's name belongs to another."""


def _module(place: str, name: str, folders: list[str]) -> ModuleType:
    """A module of these folders, or an installed one.

    The named module alone takes precedence over what is installed: it is loaded from its file. The folders themselves come last
    on `sys.path`, for what it imports, so that a file such as html.py beside it does not replace a module that others need.
    """
    sys.path += [folder for folder in folders if folder not in sys.path]
    importlib.invalidate_caches()
    first = name.partition(".")[0]
    spec = PathFinder.find_spec(first, folders)
    if spec is None or spec.origin is None or spec.loader is None:  # not there, or only a folder of that name
        return importlib.import_module(name)
    known = sys.modules.get(first)
    where = getattr(known, "__file__", None)
    if first in sys.stdlib_module_names:
        raise _NameTaken(f"{place}: '{spec.origin}' has the name of a module of Python itself: rename it.")
    if known is not None and (where is None or os.path.realpath(where) != os.path.realpath(spec.origin)):
        raise _NameTaken(f"{place}: '{spec.origin}' has the name of a module that is in use, '{where}': rename it.")
    if known is None:
        module = sys.modules[first] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[first]
            raise
    return importlib.import_module(name)


def code_of(config: Config) -> list[str]:
    """What a configuration imports: each `module:attribute` that it names."""
    files = [
        what for given in (config.data.train, config.data.test) for what in ([given] if isinstance(given, str) else given or ())
    ]
    sampler = None if config.sampler is None else config.sampler.name
    named = [config.model.name, config.loss.name, sampler, *(name for name in files if not name.endswith(_ARRAYS))]
    return list(dict.fromkeys(name for name in named if name is not None and ":" in name))


def check_trusted(source: Source, run: Path) -> None:
    """A run whose configuration imports nothing; for another the caller must have been told to."""
    if names := code_of(read_config(source.text, source.changes)):
        raise ValueError(
            f"the run in '{run}' imports code: {', '.join(names)}, from '{source.folder}' or what is installed. Add "
            "--trust-code if you trust who made it, or --config with a TOML file of yours."
        )


def _called(place: str, thing: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return thing(**arguments)
    except Exception as error:
        said = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        name = getattr(thing, "__name__", type(thing).__name__)
        raise ValueError(f"{place}: {name}({said}) failed: {type(error).__name__}: {error}") from error


def _model(config: Config, folder: Path) -> nn.Module:
    place = "[model] `name`"
    assert config.model.name is not None
    thing = find(place, config.model.name, folder)
    if not isinstance(thing, nn.Module):
        if not callable(thing):
            raise ValueError(f"{place}: {config.model.name} must be a network or make one, got {type(thing).__name__}.")
        torch.manual_seed(config.run.seed)  # again: whether the module was imported just now must not matter
        thing = _called(place, thing, config.model.arguments)
    elif config.model.arguments:
        raise ValueError(f"[model] `arguments`: {config.model.name} is a network already, and takes none.")
    if not isinstance(thing, nn.Module):
        raise ValueError(f"{place}: {config.model.name} must make a torch.nn.Module, got {type(thing).__name__}.")
    if not any(p.requires_grad for p in thing.parameters()):
        raise ValueError(f"{place}: no parameter of {config.model.name} requires a gradient: there is nothing to sample.")
    return thing


def _placed(model: nn.Module, config: Config) -> nn.Module:
    if config.model.device is None:
        return model
    try:
        return model.to(torch.device(config.model.device))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(f"[model] `device`: the network cannot go to '{config.model.device}': {error}") from error


def _load_weights(model: nn.Module, file: Path) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"[model] `weights`: there is no file '{file}'.")
    try:
        state = load_file(file) if file.suffix == ".safetensors" else torch.load(file, map_location="cpu", weights_only=True)
        model.load_state_dict(state)
    except (SafetensorError, OSError, RuntimeError, TypeError, ValueError, KeyError, AttributeError, EOFError) as error:
        raise ValueError(f"[model] `weights`: '{file}' cannot be loaded: {error}") from error
    except Exception as error:  # pickle's own kinds
        raise ValueError(f"[model] `weights`: '{file}' is no state dictionary: {type(error).__name__}.") from error


def _loss(config: Config, folder: Path) -> Callable[..., Any]:
    place, name, arguments = "[loss] `name`", config.loss.name, config.loss.arguments
    assert name is not None
    if ":" not in name and name not in _LOSSES:
        raise ValueError(f"[loss] there is no '{name}': {nearest(name, _LOSSES)} Your own is named as module:attribute.")
    thing = find(place, name, folder) if ":" in name else _LOSSES[name]
    if isinstance(thing, type):
        thing = _called(place, thing, arguments)
    elif arguments and callable(thing):
        thing = functools.partial(thing, **arguments)
    if not callable(thing):
        raise ValueError(f"{place}: {name} must be a function, got {type(thing).__name__}.")
    return thing


def load_data(
    what: str | list[str],
    folder: Path,
    model: nn.Module,
    *,
    place: str = "DATA",
    keys: list[str] | None = None,
    arguments: dict[str, Any] | None = None,
    needs_targets: bool = True,
    likelihood: Likelihood | None = None,
) -> Any:
    """Data by name: .npz, .npy (one, or a list of them), or `module:attribute`.

    Numbers from files are brought to the dtype of the weights, also whole ones, with a warning that they are not scaled (the
    bytes of an image). Whole numbers stay whole, as int64, in the last of several arrays if they may be labels of classes (not
    with a likelihood of yes and no, or of values with noise), and as inputs of a network that has an embedding. A .npy file
    that has the right dtype already is mapped, not read.
    """
    files = [what] if isinstance(what, str) else what
    if not files:
        raise ValueError(f"{place} names no file.")
    if len(files) == 1 and ":" in files[0] and not files[0].endswith(_ARRAYS):
        thing = find(place, files[0], folder)
        if callable(thing) and not isinstance(thing, Tensor):
            return _called(place, thing, arguments or {})
        if arguments:
            raise ValueError(f"{place}: {files[0]} is no class or function, and takes no `arguments`.")
        return thing
    if arguments:
        raise ValueError(f"{place}: `arguments` are for what a module makes, not for files.")
    arrays: list[Any] = []
    for name in files:
        arrays += _arrays(folder / name, place, keys, needs_targets)
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    has_labels = likelihood is None or likelihood.name in ("categorical", "log_categorical", "values")
    has_indices = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())
    parts = []
    for i, array in enumerate(arrays):
        is_target = i > 0 and i == len(arrays) - 1
        if not is_target and not has_indices and array.dtype.kind in "iub" and array.size:
            extent = f"{int(array.min())} to {int(array.max())}"
            warn(f"{place}: inputs of {array.dtype} ({extent}) become floats as they are, not scaled.")
        parts.append(_converted(array, dtype, stays_whole=has_labels if is_target else has_indices))
    return parts[0] if len(parts) == 1 else tuple(parts)


def _arrays(file: Path, place: str, keys: list[str] | None, needs_targets: bool) -> list[np.ndarray[Any, Any]]:
    if file.suffix not in _ARRAYS:
        raise ValueError(f"{place} must be .npz, .npy or module:attribute, got '{file.name}'.")
    if not file.is_file():
        raise FileNotFoundError(f"{place}: there is no file '{file}'.")
    try:
        arrays: list[np.ndarray[Any, Any]]
        if file.suffix == ".npy":
            arrays = [np.lib.format.open_memmap(file, mode="r")]
        else:
            arrays = [array for _, array in read_npz(file, lambda names: _chosen(names, keys, needs_targets))]
    except (OSError, EOFError, BadZipFile, zlib.error, NotImplementedError, OverflowError) as error:
        raise ValueError(f"{place}: '{file}' cannot be read: {error}.") from error
    except ValueError as error:
        raise ValueError(f"{place}: '{file}': {error}") from error
    for array in arrays:
        if array.dtype.kind not in "fiub":
            raise ValueError(f"{place}: '{file}' holds {array.dtype} where numbers must be.")
        if array.ndim == 0:
            raise ValueError(f"{place}: '{file}' holds one number where an array with a row for each example must be.")
    return arrays


def _chosen(names: list[str], keys: list[str] | None, needs_targets: bool) -> list[str]:
    """Which arrays of a .npz file, in which order."""
    if keys is not None:
        if not needs_targets and len(keys) > 1 and keys[-1] not in names:
            keys = keys[:-1]
        for name in keys:
            if name not in names:
                raise ValueError(f"there is no array '{name}' (`keys`): {nearest(name, names)}")
        return keys
    for pair in _PAIRS:
        if set(names) in (set(pair), {pair[0]}):
            return [name for name in pair if name in names]
    if len(names) == 1 or all(name.startswith("arr_") for name in names):
        if not names:
            raise ValueError("the file is empty.")
        return names
    raise ValueError(f"it has arrays {', '.join(names)}: say which, targets last, with [data] keys = [...].")


def _converted(array: np.ndarray[Any, Any], dtype: torch.dtype, *, stays_whole: bool) -> Any:
    wanted = torch.empty(0, dtype=dtype).numpy().dtype if dtype != torch.bfloat16 else np.dtype(np.float32)
    if stays_whole and array.dtype.kind in "iub":
        wanted = np.dtype(np.int64)
    if array.dtype != wanted:
        check_fits(array.size * wanted.itemsize, f"an array of shape {array.shape} as {wanted}")
        array = array.astype(wanted)
    if dtype == torch.bfloat16 and array.dtype.kind == "f":
        return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
    return array


def _scan(value: Any) -> Any:
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Errors of what a section makes say where it is."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place} {error}") from error
