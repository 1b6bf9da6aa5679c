"""Configurations become what they name: networks, data from files, losses, samplers."""

from __future__ import annotations

import html
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import adammcmc
from adammcmc.cli.config import read_config
from adammcmc.cli.recipe import Recipe, Source, find, load_data, prepare
from adammcmc.cli.tasks import TASKS
from adammcmc.runs.factory import given_options, innermost
from tests.shell import GOOD, furnish, modules_forgotten


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    furnish(tmp_path)
    with modules_forgotten():
        yield tmp_path


def made(home: Path, *changes: str, text: str = GOOD) -> Recipe:
    return prepare(Source(text, changes, home, "good.toml"))


def test_the_first_weights_depend_on_the_seed_alone(home: Path) -> None:
    """Also when the module, which draws random numbers, was imported before."""
    first, again, other = made(home), made(home), made(home, "run.seed=1")
    assert all(map(torch.equal, first.model.parameters(), again.model.parameters()))
    assert not any(map(torch.equal, first.model.parameters(), other.model.parameters()))


def test_weights_are_loaded(home: Path) -> None:
    state = torch.load(home / "fits.pt")
    assert all(torch.equal(p, state[name]) for name, p in made(home, "model.weights=fits.pt").model.named_parameters())


def test_modes(home: Path) -> None:
    assert made(home).model.training
    assert not made(home, "model.mode=eval").model.training


def test_files_are_brought_to_the_precision_of_the_weights(home: Path) -> None:
    model = nn.Linear(2, 2)
    inputs, targets = load_data("train.npz", home, model)
    assert (inputs.dtype, targets.dtype) == (np.float32, np.int64)  # of float64 and uint8
    np.testing.assert_allclose(inputs, np.load(home / "train.npz")["inputs"], rtol=1e-6)
    assert load_data("train.npz", home, model.double())[0].dtype == np.float64
    assert load_data("train.npz", home, model.bfloat16())[0].dtype == torch.bfloat16
    alone = load_data("x.npy", home, nn.Linear(2, 2))
    assert isinstance(alone, np.memmap)  # right already: mapped, not read
    pair = load_data(["x.npy", "y.npy"], home, nn.Linear(2, 2))
    assert [part.shape for part in pair] == [(40, 2), (40,)]


def test_arrays_are_taken_in_the_order_of_their_names(tmp_path: Path) -> None:
    """Not in that of the file."""
    x, y = np.zeros((3, 2), np.float32), np.ones(3, np.int64)
    model = nn.Linear(2, 2)
    np.savez(tmp_path / "a.npz", targets=y, inputs=x)
    np.savez(tmp_path / "b.npz", y=y, X=x)
    np.savez(tmp_path / "c.npz", x, y)
    np.savez(tmp_path / "d.npz", label=y, image=x, weight=y)
    for name in "abc":
        assert [part.shape for part in load_data(f"{name}.npz", tmp_path, model)] == [(3, 2), (3,)]
    parts = load_data("d.npz", tmp_path, model, keys=["image", "label"])
    assert [part.shape for part in parts] == [(3, 2), (3,)]
    np.savez(tmp_path / "e.npz", image=x)
    assert load_data("e.npz", tmp_path, model, keys=["image", "label"], needs_targets=False).shape == (3, 2)
    with pytest.raises(ValueError, match="there is no array 'label'"):
        load_data("e.npz", tmp_path, model, keys=["image", "label"])


def test_data_of_a_module(home: Path) -> None:
    assert len(made(home, "data.train=shell_things:data", "data.arguments.number=7").train[0]) == 7
    (home / "shell_sets.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "train = TensorDataset(torch.zeros(5, 2), torch.zeros(5, dtype=torch.long))"
    )
    assert isinstance(made(home, "data.train=shell_sets:train").train, TensorDataset)


def test_losses(home: Path) -> None:
    assert made(home).loss is F.cross_entropy
    smooth = made(home, "loss.arguments.label_smoothing=0.1").loss
    outputs, targets = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])
    assert torch.equal(smooth(outputs, targets), F.cross_entropy(outputs, targets, label_smoothing=0.1))
    assert made(home, "loss.name=GaussianNLL", "loss.arguments.noise=0.5").loss == adammcmc.GaussianNLL(0.5)
    assert made(home, "loss.name=GaussianNLL").loss == adammcmc.GaussianNLL(None)
    assert isinstance(made(home, "loss.name=torch.nn:CrossEntropyLoss").loss, nn.CrossEntropyLoss)


def test_samplers(home: Path) -> None:
    factory = made(home, "acceptance.name=FullData", "acceptance.chunk_size=7").sampler()
    assert innermost(factory) is adammcmc.AdamMCMC
    assert given_options(factory) == {
        "lr": 0.01,
        "sigma": 0.01,
        "sigma_along": 1.0,
        "acceptance": adammcmc.FullData(chunk_size=7),
    }
    scan = given_options(made(home, "sampler.sigma=[0.1, 0.2]").sampler())["sigma"]
    assert torch.equal(scan, torch.tensor([0.1, 0.2], dtype=torch.float64))
    assert prepare(Source('task = "sine"', (), home, "a.toml")).sampler() is None
    by_default = prepare(Source('task = "sine"\n[acceptance]\nname = "FullData"', (), home, "a.toml")).sampler()
    assert innermost(by_default) is adammcmc.Underdamped


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_sampler_runs(home: Path) -> None:
    settings: dict[str, list[str]] = {
        "Underdamped": ["sampler.step_size=0.01"],
        "Microcanonical": ["sampler.step_size=0.01"],
        "MALA": ["sampler.step_size=1e-4"],
        "AdamMCMC": ["sampler.sigma=0.01", "sampler.fused=false"],
        "AsReleased": ["sampler.sigma=0.01"],
        "AmortisedLangevin": ["sampler.step_size=0.01", "run.batch_size=8"],
        "ExactAdamMCMC": ["sampler.sigma=0.01", "sampler.betas=[0.9, 0.9]"],
    }
    for name, changes in settings.items():
        text = GOOD[: GOOD.index("[sampler]")] + GOOD[GOOD.index("[prior]") :]
        recipe = made(home, f"sampler.name={name}", *changes, text=text)
        posterior = recipe.plan(None, progress=False).run()
        assert len(posterior) == 6
        assert posterior.store.manifest["configuration"]["sampler"] == name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["prior={name='Gaussian', scale=[1, 2, 3, 4]}"], "s = 1..4 by tensor"),
        (["prior={name='Gaussian.fan_in', gain=2, bias_scale=0.5}"], "s = 0.5..1.41 by tensor"),
        (["prior={name='Gaussian.per_layer', scales={'0' = 0.5, '2' = 3}}"], "s = 0.5..3 by tensor"),
        (["prior={name='UniformBox', low=-3, high=3}"], "uniform on [-3, 3]^P"),
        (["prior={name='UniformBall', radius=9}"], "uniform on the ball |theta| <= 9"),
    ],
)
def test_priors(home: Path, changes: list[str], words: str) -> None:
    posterior = made(home, *changes).plan(None, num_draws=1, gap=1, burn_in=0, progress=False).run()
    assert words in posterior.target


def test_training_lowers_the_loss(home: Path) -> None:
    recipe = made(home, "training.steps=200", "run.batch_size=20")
    x, y = (torch.from_numpy(np.asarray(a)) for a in recipe.train)
    before = float(F.cross_entropy(recipe.model(x), y).detach())
    last = recipe.train_first()
    assert last is not None
    assert float(F.cross_entropy(recipe.model(x), y).detach()) < 0.5 * before
    assert made(home).train_first() is None


def test_members_are_trained_for_the_chains(home: Path) -> None:
    """The section alone requests it; its keys are those of `TrainMembers`."""
    assert made(home).plan(None).initial is None
    assert made(home, "members={}").plan(None).initial == adammcmc.TrainMembers()
    recipe = made(home, "members={lr=0.05, max_steps=30, validation=0.25}", "run.num_chains=2")
    plan = recipe.plan(None, num_draws=1, gap=1, burn_in=0, progress=False)
    assert plan.initial == adammcmc.TrainMembers(lr=0.05, max_steps=30, validation=0.25)
    manifest = plan.run().store.manifest
    assert manifest["members"]["num_validation"] == 10
    assert len(set(manifest["starts"])) == 2
    task = prepare(Source('task = "two-moons"\n[members]', (), home, "task.toml"))
    assert task.training_steps == 0  # the task's own training would be in vain
    for changes, words in (
        (["members={rate=1}"], r"\[members\] `rate` is unknown to TrainMembers"),
        (["members={patience=0}"], r"\[members\] `patience` must be an integer of at least 1, got 0"),
        (["members={}", "training.steps=5"], r"\[training\] `steps` and \[members\] both train"),
    ):
        with pytest.raises(ValueError, match=words):
            made(home, *changes).plan(None)


@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_learnt_and_say_their_size(name: str) -> None:
    task = TASKS[name]()
    number = sum(p.numel() for p in task.model.parameters())
    assert f"({number} weights)" in (TASKS[name].__doc__ or "")
    recipe = prepare(Source(f'task = "{name}"', (), Path(), f"{name}.toml"))
    assert recipe.train_first() is not None
    x, y = recipe.train
    outputs = recipe.model(x).detach()
    if name == "two-moons":
        assert len(x) == 200
        assert (outputs.argmax(1) == y).float().mean() > 0.95
        assert (recipe.model(recipe.test[0]).argmax(1) == recipe.test[1]).float().mean() > 0.93
    else:
        assert len(x) == 60
        assert ((x.abs() >= 0.8) & (x.abs() <= 2)).all()
        assert float((outputs - y).square().mean().sqrt()) < 0.2


def test_where_a_run_goes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(home).path == home / "runs" / "good"
    assert made(home, "run.path=elsewhere").path == home / "elsewhere"
    assert made(home, "run.path=/tmp/a").path == Path("/tmp/a")
    monkeypatch.chdir(home)
    assert made(home).path == Path("runs/good")


def test_a_project_that_moved_is_found(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The run folder knows where its configuration lies from itself."""
    path = home / "runs" / "a"
    with modules_forgotten():
        made(home).plan(path, progress=False).run()
    moved = tmp_path_factory.mktemp("moved") / "project"
    home.rename(moved)
    source = Source.of_run(moved / "runs" / "a")
    assert source.folder == moved
    assert prepare(source).train[0].shape == (40, 2)
    # a run that moved alone, or that lies behind a link
    (moved / "runs" / "a").rename(moved.parent / "a")
    (moved / "runs").rmdir()
    (moved / "runs").symlink_to(moved.parent)
    assert Source.of_run(moved / "runs" / "a").folder == moved
    moved.rename(home)
    assert Source.of_run(moved.parent / "a").folder == home


# --- modules --------------------------------------------------------------------------------------------------------------


def test_folders_of_configurations_come_last_on_the_path(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's html.py must not be imported by the libraries that need Python's."""
    before = list(sys.path)
    (home / "html.py").write_text("raise SystemExit('the wrong html')")
    made(home)
    added = [entry for entry in sys.path if entry not in before]
    assert str(home) in added
    assert sys.path == before + added
    where = html.__file__
    monkeypatch.delitem(sys.modules, "html")
    assert importlib.import_module("html").__file__ == where


def test_the_named_module_is_the_one_beside_the_configuration(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of that name is installed; a module that it imports is found beside it."""
    installed = home / "installed"
    installed.mkdir()
    (installed / "shell_both.py").write_text("where = 'installed'")
    monkeypatch.syspath_prepend(installed)
    project = home / "project"
    (project / "shell_package").mkdir(parents=True)
    (project / "shell_both.py").write_text("from shell_sibling import name as where")
    (project / "shell_sibling.py").write_text("name = 'beside'")
    (project / "shell_package" / "__init__.py").write_text("")
    (project / "shell_package" / "part.py").write_text("from . import other\nnumber = other.number")
    (project / "shell_package" / "other.py").write_text("number = 7")
    assert find("here", "shell_both:where", project) == "beside"
    assert find("here", "shell_both:where", project) == "beside"  # known by now
    assert find("here", "shell_package.part:number", project) == 7
    assert find("here", "collections.abc:Mapping.get", project) is Mapping.get


def test_a_module_with_a_name_that_is_taken_is_refused(home: Path) -> None:
    for name in ("html", "sys", "wave"):
        (home / f"{name}.py").write_text("thing = 1")
        with pytest.raises(ValueError, match=rf"here: '.*{name}.py' has the name of a module of Python's standard library"):
            find("here", f"{name}:thing", home)
    (home / "torch.py").write_text("thing = 1")
    with pytest.raises(ValueError, match=r"torch.py' has the name of an imported module, '.*torch/__init__.py': rename"):
        find("here", "torch:thing", home)


def test_a_module_that_failed_is_tried_again(home: Path) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="importing 'shell_broken' failed: ZeroDivisionError"):
            find("here", "shell_broken:thing", home)
    (home / "shell_broken.py").write_text("thing = 'mended by now'")
    assert find("here", "shell_broken:thing", home) == "mended by now"


NAMES_CODE = {
    "model.name": "a:b",
    "loss.name": "a:b",
    "sampler.name": "a:b",
    "data.train": "a:b",
    "data.test": '["a:b"]',
}


@pytest.mark.parametrize("key", NAMES_CODE)
def test_every_place_that_imports_is_asked_about(home: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """What `code` lists is what `find` is called with."""
    text = GOOD.replace("shell_things:make", "torch.nn:Linear").replace("width = 3", "in_features = 2, out_features = 2")
    changes = ["sampler={}", f"{key}={NAMES_CODE[key]}"]
    names = read_config(text, changes).code
    assert names == list(dict.fromkeys(["a:b"] if key == "model.name" else ["torch.nn:Linear", "a:b"]))
    found: list[str] = []

    def record(place: str, name: str, folder: Path) -> Any:
        found.append(name)
        return (
            torch.nn.Linear(2, 2) if name == "a:b" and "model" in place else torch.nn.Linear if "model" in place else F.mse_loss
        )

    monkeypatch.setattr("adammcmc.cli.recipe.find", record)
    with suppress(ValueError):  # what is found is not what belongs there
        recipe = prepare(Source(text, tuple(changes), home, "good.toml"))
        recipe.sampler()
        for what in ("train", "test"):
            with suppress(ValueError, TypeError):
                getattr(recipe, what)
    assert set(found) == set(names)


def test_what_config_holds_must_be_json(home: Path) -> None:
    recipe = made(home)
    bad: Any = {"a": object()}
    with pytest.raises(TypeError, match="not JSON serializable"):
        recipe.plan(home / "new", config=bad).run()
    assert not (home / "new").exists()


BINARY = """
[model]
name = "torch.nn:Linear"
arguments = { in_features = 4, out_features = 1 }
[data]
train = "bits.npz"
[loss]
name = "LOSS"
[run]
num_draws = 2
gap = 1
burn_in = 200
"""


@pytest.fixture
def bits(tmp_path: Path) -> Path:
    """Bytes of 2 x 2 pixels, and whole labels of the shape of the outputs: as files are."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, size=(30, 4), dtype=np.uint8)
    np.savez(tmp_path / "bits.npz", inputs=x, targets=(x[:, :1] > 127).astype(np.int64))
    return tmp_path


@pytest.mark.parametrize(
    "loss", ["binary_cross_entropy_with_logits", "torch.nn:BCEWithLogitsLoss", "GaussianNLL", "torch.nn.functional:mse_loss"]
)
def test_whole_numbers_in_files_become_what_the_loss_and_the_network_take(bits: Path, loss: str) -> None:
    recipe = prepare(
        Source(BINARY.replace("LOSS", loss), ("loss.arguments={noise=1}",) * (loss == "GaussianNLL"), bits, "a.toml")
    )
    with pytest.warns(
        UserWarning, match=r"\[data\] `train`: inputs of uint8 \(\d+ to 2\d\d\) are converted to floating point without scaling"
    ):
        inputs, targets = recipe.train
    assert inputs.dtype == np.float32
    assert inputs.max() > 200
    assert targets.dtype == (np.int64 if "mse" in loss else np.float32)  # of an unknown likelihood they may be labels
    assert len(recipe.plan(None, progress=False).run()) == 2
    assert recipe.likelihood.name in ("bernoulli", "gaussian", "values")


def test_what_the_configuration_says_of_the_outputs_decides(bits: Path) -> None:
    source = Source(
        BINARY.replace("LOSS", "torch.nn.functional:soft_margin_loss"), ("loss.likelihood=bernoulli",), bits, "a.toml"
    )
    with pytest.warns(UserWarning, match="without scaling"):
        assert prepare(source).train[1].dtype == np.float32


def test_inputs_of_an_embedding_stay_whole(bits: Path) -> None:
    inputs, targets = load_data("bits.npz", bits, nn.Sequential(nn.Embedding(256, 3), nn.Linear(3, 2)))
    assert (inputs.dtype, targets.dtype) == (np.int64, np.int64)


def test_whole_targets_of_yes_and_no_are_refused_in_python() -> None:
    x, y = torch.randn(8, 2), torch.arange(8) % 2
    for loss in (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss(), F.binary_cross_entropy):
        with pytest.raises(ValueError, match=r"needs floating-point targets, for example targets\.float\(\), got torch\.int64"):
            adammcmc.sample(nn.Linear(2, 1), (x, y[:, None]), loss, num_draws=1)
    with pytest.raises(ValueError, match=r"For one output, targets\[:, None\] has the shape"):
        adammcmc.sample(nn.Linear(2, 1), (x, y.float()), F.binary_cross_entropy_with_logits, num_draws=1)
