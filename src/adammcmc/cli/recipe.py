"""Turn a configuration into the objects that `sample` takes: network, data, loss, sampler and prior."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
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

from adammcmc.cli.config import ARRAYS, Choice, Config, named_things, read_config, read_text
from adammcmc.cli.options import nearest
from adammcmc.cli.tasks import TASKS, Task
from adammcmc.errors import StoreCorrupt, StoreMismatch, warn
from adammcmc.posterior.store.archives import check_fits, read_npz
from adammcmc.posterior.store.folder import read_manifest
from adammcmc.runs.callbacks import Callback, Event
from adammcmc.runs.factory import SCANNED
from adammcmc.runs.plan import Plan
from adammcmc.samplers.adaptation import BurnIn
from adammcmc.samplers.progress import track
from adammcmc.samplers.terminal import say
from adammcmc.target.batches import to_device
from adammcmc.target.data import as_data
from adammcmc.target.likelihood import GaussianNLL, Likelihood, Loss, as_likelihood, likelihood_of

__all__ = ["Announcement", "Recipe", "Source", "find", "load_data", "prepare"]

_LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": F.cross_entropy,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "binary_cross_entropy": F.binary_cross_entropy,
    "nll_loss": F.nll_loss,
    "GaussianNLL": GaussianNLL,
}
_PAIRS = (("inputs", "targets"), ("x", "y"), ("X", "y"), ("X", "Y"))


class Source(NamedTuple):
    """The text of a configuration and its folder, where its relative paths begin and its modules are found."""

    text: str
    changes: tuple[str, ...]
    """Values that `--set` changed."""
    folder: Path
    file: str
    """Name of the file in that folder."""

    @classmethod
    def of_file(cls, path: Path, changes: Sequence[str] = ()) -> Source:
        """A file, with changes on top."""
        return cls(read_text(path), tuple(changes), path.absolute().parent, path.name)

    @classmethod
    def of_run(cls, path: Path) -> Source:
        """The configuration that a run folder stores."""
        stored = read_manifest(path).get("config")
        if stored is None:
            raise StoreMismatch(
                f"the run in '{path}' was not made by `adammcmc sample`, so that it does not name its network. Give --config, "
                "a TOML file that names it, or use adammcmc.Posterior.open(path, model) in Python."
            )
        table: dict[str, Any] = stored if isinstance(stored, dict) else {}
        texts: list[Any] = [table.get(name) for name in ("text", "file", "folder", "from_run")]
        changes = table.get("changes")
        if not isinstance(changes, list) or not all(isinstance(text, str) for text in (*texts, *changes)):
            raise StoreCorrupt(
                f"'{path / 'run.json'}' is damaged: its `config` was not written by `adammcmc sample`. Give --config, the TOML "
                "file that made the run."
            )
        text, file, folder, from_run = texts
        # relative to the run, which may have moved together with its project, with or without links; then the old place
        places = [Path(os.path.normpath(path.absolute() / from_run)), (path / from_run).resolve(), Path(folder)]
        return cls(text, tuple(changes), next((p for p in places if (p / file).is_file()), places[-1]), file)

    def as_json(self, path: Path) -> dict[str, Any]:
        """What the run in this folder stores, for `of_run`."""
        return {
            "text": self.text,
            "changes": list(self.changes),
            "file": self.file,
            "folder": str(self.folder),
            "from_run": os.path.relpath(self.folder, path),
        }


class Announcement(Callback):
    """Prints the target when the first chain starts."""

    def on_start(self, event: Event) -> None:
        if event.chain == 0:
            say(f"samples {event.sampler.describe()}")


@dataclass(frozen=True)
class Recipe:
    """Everything that a configuration names, loaded."""

    config: Config
    source: Source
    model: nn.Module
    loss: Callable[..., Any]
    task: Task | None
    training_steps: int

    @functools.cached_property
    def train(self) -> Any:
        """The training data. They are read on first use: prediction does not need them."""
        if self.task is not None:
            return self.task.train
        data = self.config.data
        return self.load(data.train, self.source.folder, place="[data] `train`", arguments=data.arguments)

    @functools.cached_property
    def test(self) -> Any:
        """Held-out data, or None."""
        if self.config.data.test is None:
            return None if self.task is None else self.task.test
        return self.load(self.config.data.test, self.source.folder, place="[data] `test`")

    def load(self, what: str | list[str] | None, folder: Path, **options: Any) -> Any:
        """Data for this network and loss, by `load_data`."""
        assert what is not None  # `config` checks it
        return load_data(what, folder, self.model, keys=self.config.data.keys, likelihood=self.likelihood, **options)

    @property
    def likelihood(self) -> Likelihood:
        """How to interpret the outputs, and so whether targets are class labels or numbers."""
        given = self.config.loss.likelihood
        return likelihood_of(self.loss) if given is None else as_likelihood(given)

    def plan(self, path: Path | None, **changes: Any) -> Plan:
        """The run, validated; `changes` replaces arguments of `adammcmc.sample`."""
        dtype = self.config.run.dtype
        options: dict[str, Any] = {
            **vars(self.config.run),
            "sampler": self.sampler(),
            "prior": self._made("prior"),
            "burn_in": self.burn_in,
            "initial": self._made("members"),
            "dtype": None if dtype is None else getattr(torch, dtype),
            "likelihood": self.config.loss.likelihood,
            "num_data": self.config.data.num_data,
            "path": path,
            "config": None if path is None else self.source.as_json(path),
        }
        train = self.train
        with _at("[run]"):
            return Plan(self.model, train, self.loss, **(options | changes))

    @property
    def path(self) -> Path:
        """The folder for the draws, relative to the working directory if it lies inside."""
        given = self.config.run.path
        path = self.source.folder / (Path("runs", Path(self.source.file).stem) if given is None else Path(given).expanduser())
        return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path

    @property
    def burn_in(self) -> int | BurnIn | None:
        """The burn-in, for `adammcmc.sample`."""
        steps: int | None = self.config.run.burn_in
        return steps if self.config.burn_in is None else self._made("burn_in")

    def _made(self, section: str) -> Any:
        """The object that a section names, with its options; None without the section."""
        choice: Choice | None = getattr(self.config, section)
        if choice is None:
            return None
        make = named_things(section)[choice.name]
        with _at(f"[{section}]"):
            takes_model = "model" in inspect.signature(make).parameters
            return make(self.model, **choice.options) if takes_model else make(**choice.options)

    def train_first(self) -> float | None:
        """Check the loss on one batch, then train by Adam if the configuration requests it. Returns the last loss, or None."""
        _ = self.test  # errors in held-out data are reported before the work
        torch.manual_seed(self.config.run.seed)
        data = as_data(self.train, self.config.run.batch_size, self.config.data.num_data)
        data.restart(self.config.run.seed)
        device, loss = next(self.model.parameters()).device, Loss(self.loss)
        last = [loss.try_out(self.model, to_device(next(data), device)).mean()]
        if not bool(last[0].isfinite()):
            raise ValueError(f"the loss of the first batch is {float(last[0])}: check the data, the weights and the loss.")
        optimizer = torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad], self.config.training.lr)
        for _ in track(range(self.training_steps), "training", status=lambda: f"loss {float(last[0]):.3g}"):
            optimizer.zero_grad()
            value = loss(self.model, to_device(next(data), device)).mean()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            last[0] = value.detach()
        data.restart(0)  # releases workers
        return float(last[0]) if self.training_steps else None

    def sampler(self) -> Callable[..., Any] | None:
        """The factory of the sampler, for `adammcmc.sample`."""
        choice, test = self.config.sampler, self.config.acceptance
        if choice is None and test is None:
            return None
        choice = choice or Choice(next(iter(named_things("sampler"))), {})
        is_own = ":" in choice.name
        make = find("[sampler] `name`", choice.name, self.source.folder) if is_own else named_things("sampler")[choice.name]
        if not callable(make):
            raise ValueError(f"[sampler] `name`: {choice.name} must make a sampler, got {type(make).__name__}.")
        options = {
            name: torch.tensor(value, dtype=torch.float64) if name in SCANNED and isinstance(value, list) else value
            for name, value in choice.options.items()
        }
        if test is not None:
            options["acceptance"] = self._made("acceptance")
        return functools.partial(make, **options)


def prepare(source: Source) -> Recipe:
    """Read a configuration and load the network and the loss that it names."""
    config, folder = read_config(source.text, source.changes), source.folder
    torch.manual_seed(config.run.seed)  # the initial weights
    task = None if config.task is None else TASKS[config.task]()
    model = _on_device(_model(config, folder) if task is None else task.model, config.model.device)
    if config.model.weights is not None:
        _load_weights(model, folder / config.model.weights)
    if config.model.mode is not None:
        model.train(config.model.mode == "train")
    steps = config.training.steps
    if steps is None:
        is_trained = config.model.weights is not None or config.members is not None
        steps = 0 if task is None or is_trained else task.training_steps
    return Recipe(config, source, model, _loss(config, folder) if task is None else task.loss, task, steps)


# --- modules --------------------------------------------------------------------------------------------------------------


def find(place: str, name: str, folder: Path) -> Any:
    """Import `module:attribute`, from the folder of the configuration or the working directory before installed modules."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ValueError(f"{place} must look like module:attribute, got '{name}'.")
    try:
        thing: Any = _module(place, module_name, [str(folder), os.getcwd()])
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise ValueError(f"{place}: importing '{module_name}' failed: {error}.") from error
        raise ValueError(
            f"{place}: there is no module '{error.name}' in '{folder}', in '{os.getcwd()}', or installed."
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
    """The name of a module is already in use."""


def _module(place: str, name: str, folders: list[str]) -> ModuleType:
    """A module in these folders, or an installed one.

    The named module is loaded from its file, and so takes precedence over an installed one. The folders themselves come last
    on `sys.path`, for its own imports: a file such as html.py beside it must not replace a module that others need.
    """
    sys.path += [folder for folder in folders if folder not in sys.path]
    importlib.invalidate_caches()
    first = name.partition(".")[0]
    spec = PathFinder.find_spec(first, folders)
    if spec is None or spec.origin is None or spec.loader is None:  # none, or only a folder of that name
        return importlib.import_module(name)
    known = sys.modules.get(first)
    where = getattr(known, "__file__", None)
    if first in sys.stdlib_module_names:
        raise _NameTaken(f"{place}: '{spec.origin}' has the name of a module of Python's standard library: rename it.")
    if known is not None and (where is None or os.path.realpath(where) != os.path.realpath(spec.origin)):
        raise _NameTaken(f"{place}: '{spec.origin}' has the name of an imported module, '{where}': rename it.")
    if known is None:
        module = sys.modules[first] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[first]
            raise
    return importlib.import_module(name)


def _called(place: str, thing: Callable[..., Any], arguments: dict[str, Any] | None) -> Any:
    arguments = arguments or {}
    try:
        return thing(**arguments)
    except Exception as error:
        call = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        name = getattr(thing, "__name__", type(thing).__name__)
        raise ValueError(f"{place}: {name}({call}) failed: {type(error).__name__}: {error}") from error


# --- network and loss -----------------------------------------------------------------------------------------------------


def _model(config: Config, folder: Path) -> nn.Module:
    place, name = "[model] `name`", config.model.name
    assert name is not None
    thing = find(place, name, folder)
    if isinstance(thing, nn.Module) and config.model.arguments:
        raise ValueError(f"[model] `arguments`: {name} is a network already, and takes none.")
    if not isinstance(thing, nn.Module):
        if not callable(thing):
            raise ValueError(f"{place}: {name} must be a network or make one, got {type(thing).__name__}.")
        torch.manual_seed(config.run.seed)  # again: the weights must not depend on whether the module was imported just now
        thing = _called(place, thing, config.model.arguments)
    if not isinstance(thing, nn.Module):
        raise ValueError(f"{place}: {name} must make a torch.nn.Module, got {type(thing).__name__}.")
    if not any(p.requires_grad for p in thing.parameters()):
        raise ValueError(f"{place}: no parameter of {name} requires a gradient: there is nothing to sample.")
    return thing


def _on_device(model: nn.Module, device: str | None) -> nn.Module:
    try:
        return model if device is None else model.to(torch.device(device))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(f"[model] `device`: the network cannot be moved to '{device}': {error}") from error


def _load_weights(model: nn.Module, file: Path) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"[model] `weights`: there is no file '{file}'.")
    try:
        state = load_file(file) if file.suffix == ".safetensors" else torch.load(file, map_location="cpu", weights_only=True)
        model.load_state_dict(state)
    except (SafetensorError, OSError, RuntimeError, TypeError, ValueError, KeyError, AttributeError, EOFError) as error:
        raise ValueError(f"[model] `weights`: '{file}' cannot be loaded: {error}") from error
    except Exception as error:  # exceptions of pickle
        raise ValueError(f"[model] `weights`: '{file}' is not a state dictionary: {type(error).__name__}.") from error


def _loss(config: Config, folder: Path) -> Callable[..., Any]:
    place, name, arguments = "[loss] `name`", config.loss.name, config.loss.arguments
    assert name is not None
    if ":" not in name and name not in _LOSSES:
        raise ValueError(f"[loss] there is no '{name}': {nearest(name, _LOSSES)} Name your own as module:attribute.")
    thing = find(place, name, folder) if ":" in name else _LOSSES[name]
    if isinstance(thing, type):
        thing = _called(place, thing, arguments)
    elif arguments and callable(thing):
        thing = functools.partial(thing, **arguments)
    if not callable(thing):
        raise ValueError(f"{place}: {name} must be a function, got {type(thing).__name__}.")
    return thing


# --- data -----------------------------------------------------------------------------------------------------------------


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
    """Data by name: a .npz file, one or several .npy files, or `module:attribute`.

    Numbers from files are converted to the dtype of the weights; integer inputs (the bytes of an image) raise a warning that
    they are not scaled. Integers stay int64 in the last of several arrays if they may be class labels (not with a binary or
    Gaussian likelihood), and as inputs of a network that has an embedding. A .npy file of the right dtype is memory-mapped.
    """
    files = [what] if isinstance(what, str) else what
    if not files:
        raise ValueError(f"{place} names no file.")
    if len(files) == 1 and ":" in files[0] and not files[0].endswith(ARRAYS):
        thing = find(place, files[0], folder)
        if callable(thing) and not isinstance(thing, Tensor):
            return _called(place, thing, arguments)
        if arguments:
            raise ValueError(f"{place}: {files[0]} is not a class or function, and takes no `arguments`.")
        return thing
    if arguments:
        raise ValueError(f"{place}: `arguments` are for a class or function of a module, not for files.")
    arrays = [array for name in files for array in _arrays(folder / name, place, keys, needs_targets)]
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    has_labels = likelihood is None or likelihood.name in ("categorical", "log_categorical", "values")
    has_indices = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())
    parts = []
    for i, array in enumerate(arrays):
        is_target = i > 0 and i == len(arrays) - 1
        if not is_target and not has_indices and array.dtype.kind in "iub" and array.size:
            extent = f"{int(array.min())} to {int(array.max())}"
            warn(f"{place}: inputs of {array.dtype} ({extent}) are converted to floating point without scaling.")
        parts.append(_converted(array, dtype, keeps_integers=has_labels if is_target else has_indices))
    return parts[0] if len(parts) == 1 else tuple(parts)


def _arrays(file: Path, place: str, keys: list[str] | None, needs_targets: bool) -> list[np.ndarray[Any, Any]]:
    if file.suffix not in ARRAYS:
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
            raise ValueError(f"{place}: '{file}' holds {array.dtype}, not numbers.")
        if array.ndim == 0:
            raise ValueError(f"{place}: '{file}' holds one number, not an array with a row for each example.")
    return arrays


def _chosen(names: list[str], keys: list[str] | None, needs_targets: bool) -> list[str]:
    """The arrays of a .npz file to read, in order."""
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
    if not names:
        raise ValueError("the file is empty.")
    if len(names) == 1 or all(name.startswith("arr_") for name in names):
        return names
    raise ValueError(f"it has arrays {', '.join(names)}: select them, targets last, with [data] keys = [...].")


def _converted(array: np.ndarray[Any, Any], dtype: torch.dtype, *, keeps_integers: bool) -> Any:
    wanted = torch.empty(0, dtype=dtype).numpy().dtype if dtype != torch.bfloat16 else np.dtype(np.float32)
    if keeps_integers and array.dtype.kind in "iub":
        wanted = np.dtype(np.int64)
    if array.dtype != wanted:
        check_fits(array.size * wanted.itemsize, f"an array of shape {array.shape} as {wanted}")
        array = array.astype(wanted)
    if dtype == torch.bfloat16 and array.dtype.kind == "f":
        return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
    return array


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Put the section in front of an error."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place} {error}") from error
