"""Members trained apart, and chains that start from them."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import adammcmc
from adammcmc import GaussianNLL, Members, NonFiniteLoss, Plan, StoreCorrupt, StoreMismatch, TrainMembers, sample, train_members
from adammcmc.runs.training import Splits
from adammcmc.samplers.stacked import CannotStack
from adammcmc.target.data import IterableData, derive_seed

X = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
SHORT: dict[str, Any] = {"num_draws": 4, "gap": 2, "burn_in": 150, "progress": False}
TRAINING = TrainMembers(lr=1e-2, max_steps=40)


def network(*, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [] if bias else [nn.BatchNorm1d(6)]
    return nn.Sequential(nn.Linear(4, 6, bias=bias), *middle, nn.Tanh(), nn.Linear(6, 3))


def train(model: nn.Module | None = None, data: Any = (X, Y), number: int = 3, **options: Any) -> Members:
    options = {"lr": 1e-2, "max_steps": 300, "patience": 3, "progress": False, **options}
    return train_members(model or network(), data, F.cross_entropy, number, **options)


def same(a: Any, b: Any, **tolerance: float) -> bool:
    def close(x: Tensor, y: Tensor) -> bool:
        return torch.allclose(x.double(), y.double(), **tolerance) if tolerance else torch.equal(x, y)

    pairs = list(zip(a, b, strict=True))
    return len(pairs) > 0 and all(x.keys() == y.keys() and all(close(x[key], y[key]) for key in x) for x, y in pairs)


# --- training -------------------------------------------------------------------------------------------------------------


def test_members_learn_differ_and_are_fixed_by_the_seed() -> None:
    members, again, other = train(), train(), train(seed=1)
    assert same(members, again)
    assert not same(members, other)
    assert not torch.equal(members[0]["0.weight"], members[1]["0.weight"])
    assert max(members.losses) < 0.5  # 1.1 at the start
    assert members.num_training == 102
    assert members.num_validation == 18
    model = network()
    model.load_state_dict(members[2])
    lines = str(members).splitlines()
    assert lines[0].startswith("3 members trained at once in ")
    assert lines[-1].split()[:2] == ["2", str(members.steps[2])]


@pytest.mark.parametrize("batch_size", [None, 32])
@pytest.mark.parametrize("bias", [True, False])  # False: with BatchNorm
def test_stacked_members_are_those_trained_one_after_another(bias: bool, batch_size: int | None) -> None:
    """To rounding, and with the same decisions."""
    many, single = (
        train(network(bias=bias), batch_size=batch_size, stacked=stacked, lr=0.05, weight_decay=0.1)
        for stacked in (True, False)
    )
    assert many.is_stacked
    assert not single.is_stacked
    assert len(set(many.steps)) > 1  # members stop at different steps
    assert many.steps == single.steps
    assert many.losses == pytest.approx(single.losses, abs=1e-5)
    assert same(many, single, atol=1e-4)


@pytest.mark.parametrize("stacked", [True, False])
def test_the_best_weights_are_kept(stacked: bool) -> None:
    """The loss that is reported is that of the validation part, at the state that is returned, and not the last."""
    members = train(stacked=stacked, lr=0.1, patience=5, weight_decay=0.0)
    assert any(members.has_stopped)
    assert min(members.steps) < 100
    model = network()
    for i, state in enumerate(members):
        rows = Splits(120, [derive_seed(0, i, 5)], 0.15, 128).validation[0]
        model.load_state_dict(state)
        assert float(F.cross_entropy(model(X[rows]), Y[rows]).detach()) == pytest.approx(members.losses[i], rel=1e-4)


def test_the_parts_of_the_data_are_disjoint_and_each_epoch_has_every_example_once() -> None:
    splits = Splits(100, [1, 2], 0.2, 16)
    assert splits.num_batches == 5
    parts = splits.batches()
    for _ in range(2):
        epoch = torch.cat([next(parts) for _ in range(5)], 1)
        for member in range(2):
            seen, held_out = set(epoch[member].tolist()), set(splits.validation[member].tolist())
            assert len(seen) == 80
            assert seen | held_out == set(range(100))
    assert not torch.equal(splits.validation[0], splits.validation[1])
    with pytest.raises(ValueError, match="leaves no training example of 2"):
        Splits(2, [0], 0.9, 16)


def test_every_source_gives_the_same_members() -> None:
    sources = [(X, Y), (X.numpy(), Y.numpy()), TensorDataset(X, Y), DataLoader(TensorDataset(X, Y), batch_size=16)]
    found = [train(data=source, batch_size=16, max_steps=30) for source in sources]
    assert all(same(members, found[0]) for members in found[1:])
    loader = train(data=sources[3], max_steps=30)
    assert same(loader, found[0])  # it takes the loader's batch size
    with pytest.raises(
        ValueError, match="members are trained on random parts of the data, but these data can only be iterated"
    ):
        run(train=IterableData([(X, Y)], 120, None), batch_size=None)


def test_regression_without_validation() -> None:
    y = X[:, :1] * 2 + 0.1 * torch.randn(120, 1, generator=torch.Generator().manual_seed(1))
    members = train_members(nn.Linear(4, 2), (X, y), GaussianNLL(), 2, lr=0.05, max_steps=400, validation=0, progress=False)
    assert members.steps == (400, 400)
    assert members.num_validation == 0
    assert max(members.losses) < 0
    assert float(members[1]["weight"][0, 0]) == pytest.approx(2, abs=0.1)
    assert "training loss" in str(members)


def test_members_predict_and_score_as_a_deep_ensemble() -> None:
    members, model = train(max_steps=30), network()
    outputs = torch.stack([torch.func.functional_call(model, state, (X,)).softmax(1) for state in members])
    torch.testing.assert_close(members.predict((X, Y)).mean, outputs.mean(0))
    torch.testing.assert_close(members.predict(X, raw=True).raw, outputs)
    scores = members.score((X, Y))
    assert isinstance(scores, adammcmc.ClassScores)
    assert scores.nll.value == pytest.approx(float(F.nll_loss(outputs.mean(0).log(), Y)), rel=1e-5)
    by_model = train_members(network(), X, lambda model, x: model(x).square().sum(1), 2, max_steps=2, progress=False)
    with pytest.raises(ValueError, match="a function of model and batch"):
        by_model.predict(X)


@pytest.mark.parametrize("stacked", [True, False])
def test_the_model_and_random_numbers_are_left_alone(stacked: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    model[2].eval()
    model[0].weight.grad = torch.ones(6, 4)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    members = train(model, stacked=stacked, max_steps=20)
    assert torch.equal(torch.rand(3), wanted)
    assert same([model.state_dict()], [before])
    assert torch.equal(model[0].weight.grad, torch.ones(6, 4))
    assert [m.training for m in model] == [True, True, False, True]
    assert all(int(state["1.num_batches_tracked"]) == 20 for state in members)


@pytest.mark.parametrize("stacked", [True, False])
def test_frozen_weights_stay_those_of_the_model(stacked: bool) -> None:
    base = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).requires_grad_(False)
    model = nn.Sequential(base, nn.Tanh(), nn.Linear(6, 3))
    base[1].running_mean.fill_(0.3)
    before = copy.deepcopy(model.state_dict())
    for state in train(model, stacked=stacked, max_steps=20):
        for name, x in state.items():
            assert torch.equal(x, before[name]) == name.startswith("0."), name
    model[2].bias.requires_grad_(False)  # part of a module
    state = train(model, stacked=stacked, max_steps=20)[1]
    assert torch.equal(state["2.bias"], before["2.bias"])
    assert not torch.equal(state["2.weight"], before["2.weight"])


class Scaled(nn.Module):
    """A weight that nothing initialises anew."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 1.25))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_modules_without_a_reset_are_named() -> None:
    model = nn.Sequential(network(), Scaled())
    with pytest.warns(UserWarning, match=r"without a `reset_parameters` method: '1' \(Scaled\)") as found:
        train(model, max_steps=1, lr=1e-9)
    assert len(found) == 1
    with pytest.raises(ValueError, match=r"no module with trainable weights has a `reset_parameters` method \(Scaled\)"):
        train(Scaled(), (X[:, :3], Y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # attention has a private one
        members = train_members(
            nn.MultiheadAttention(4, 2), X, lambda model, x: model(x, x, x)[0].square().sum(1), 2, max_steps=1
        )
    assert not torch.equal(members[0]["in_proj_weight"], members[1]["in_proj_weight"])


@pytest.mark.parametrize("stacked", [True, False])
def test_a_loss_that_is_not_a_number_names_the_member(stacked: bool) -> None:
    rows = Splits(120, [derive_seed(0, 1, 5)], 0.15, 128).validation[0]
    bad = X.clone()
    bad[rows[0]] = torch.nan  # in the validation part of member 1, and in the training part of member 0
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NonFiniteLoss, match=r"the loss of member 0 was nan at training step 10.*make `lr`"):
        train(model, (bad, Y), number=2, stacked=stacked)
    assert same([model.state_dict()], [before])


class Branching(nn.Module):
    """Control flow that depends on values, which vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return out if out.sum() > 0 else 2 * out


def test_what_cannot_be_stacked_is_trained_one_after_another() -> None:
    members = train(Branching(), max_steps=20)
    assert not members.is_stacked
    assert "one after another (the model cannot be run under torch.func.vmap" in str(members)
    with pytest.raises(CannotStack, match=r"the members cannot be stacked: .*Leave out `stacked`"):
        train(Branching(), max_steps=20, stacked=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0}, "`lr` must be a positive learning rate, got 0"),
        ({"lr": float("nan")}, "`lr` must be a positive"),
        ({"weight_decay": -1.0}, "`weight_decay` must be a number of at least 0, got -1.0"),
        ({"validation": 1}, "`validation` must be a share"),
        ({"batch_size": 0}, "`batch_size` must be an integer of at least 1, got 0"),
        ({"max_steps": 2.5}, "`max_steps` must be an integer"),
        ({"patience": True}, "`patience` must be an integer"),
        ({"stacked": 1}, "`stacked` must be True, False or None"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainMembers(**options)
    with pytest.raises(ValueError, match=words):
        train(**options)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="`num_members` must be an integer of at least 1, got 0"):
        train(number=0)
    with pytest.raises(TypeError, match=r"`model` must be a torch.nn.Module, got str"):
        train("a model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is nothing to train"):
        train(network().requires_grad_(False))
    assert TrainMembers(max_steps=np.int64(3)).settings()["max_steps"] == 3


# --- chains ---------------------------------------------------------------------------------------------------------------


def run(path: Path | None = None, model: nn.Module | None = None, **options: Any) -> adammcmc.Posterior:
    options = {"num_chains": 3, "initial": TRAINING, "path": path, "stacked": True, **SHORT, **options}
    return sample(model or network(), **{"train": (X, Y), "loss": F.cross_entropy, **options})


@pytest.mark.parametrize("stacked", [True, False])
def test_one_call_is_the_two_calls(stacked: bool) -> None:
    options = TRAINING.settings()
    members = train_members(network(), (X, Y), F.cross_entropy, 3, **options, seed=5)
    once, twice = run(stacked=stacked, seed=5), run(stacked=stacked, seed=5, initial=members)
    assert same(once, twice)
    manifest = once.store.manifest
    assert manifest["starts"] == twice.store.manifest["starts"]
    assert len(set(manifest["starts"])) == 3
    assert manifest["configuration"]["members"] == options
    assert manifest["members"]["losses"] == list(members.losses)
    assert "one start" not in {finding.kind for finding in once.summary().findings}  # they are dispersed
    assert "one start" in {finding.kind for finding in run(initial=None).summary().findings}
    still = partial(adammcmc.MALA, step_size=1e-12)
    near = run(stacked=stacked, seed=5, sampler=still, burn_in=0, num_draws=1)
    assert same(near, members, atol=1e-3)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_run_keeps_its_starts(tmp_path: Path, stacked: bool) -> None:
    members = train_members(network(), (X, Y), F.cross_entropy, 3, **TRAINING.settings())
    for path, keep in ((tmp_path / "run", "moments"), (None, "draws")):
        posterior = run(path, stacked=stacked, keep=keep, dtype=torch.bfloat16)
        assert same(posterior.starts, members)
        assert posterior.starts.score((X, Y)).nll == members.score((X, Y)).nll
    opened = adammcmc.Posterior.open(tmp_path / "run", network())
    assert same(opened.chain(2).starts, members[2:])
    copied = adammcmc.Posterior.open(posterior.save(tmp_path / "copy"), network())
    assert same(copied.starts, members)
    with pytest.raises(ValueError, match="`initial` was not given"):
        _ = run(initial=None).starts


def test_damaged_starts_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "run")
    run(tmp_path / "other", seed=1)
    file, other = tmp_path / "run" / "starts.safetensors", tmp_path / "other" / "starts.safetensors"
    assert adammcmc.check_run(tmp_path / "run").is_sound
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    for wrong, words in ((bytes(content), "does not match its checksum"), (other.read_bytes(), "it is not of this run")):
        file.write_bytes(wrong)
        posterior = adammcmc.Posterior.open(tmp_path / "run", network())
        assert len(posterior) == 12  # the draws are not affected
        with pytest.raises(StoreCorrupt, match=words):
            _ = posterior.starts
        found = adammcmc.check_run(tmp_path / "run")
        assert not found.is_sound
        assert words in str(found)


def test_starts_of_a_run_that_never_began_are_removed(tmp_path: Path) -> None:
    run(tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    for folder in (tmp_path / "run").glob("chain-*"):
        for file in folder.glob("*"):
            file.unlink()
    run(tmp_path / "run", initial=None, resume=True)
    assert not (tmp_path / "run" / "starts.safetensors").exists()


class Interrupt(adammcmc.Callback):
    """Stops a run as Ctrl-C would."""

    def on_step(self, event: adammcmc.Event) -> None:
        if (event.chain, event.step) == (1, 153):
            raise KeyboardInterrupt


@pytest.mark.parametrize("stacked", [True, False])
def test_a_resumed_run_does_not_train_again(tmp_path: Path, stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = run(tmp_path / "whole", stacked=stacked)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", stacked=stacked, callbacks=[Interrupt()])

    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("it trained again")

    monkeypatch.setattr(TrainMembers, "train", fail)
    model = network()
    with torch.no_grad():
        model[0].weight.add_(3)  # the model's own weights do not matter
    resumed = run(tmp_path / "run", model, stacked=stacked, resume=True)
    assert same(resumed, reference)
    assert resumed.store.manifest["starts"] == reference.store.manifest["starts"]
    assert len(run(tmp_path / "run", stacked=stacked, resume=True, num_draws=5)) == 15


def test_training_that_is_stopped_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Splits.batches

    def stop(self: Splits) -> Any:
        for i, rows in enumerate(real(self)):
            if i == 7:
                raise KeyboardInterrupt
            yield rows

    with monkeypatch.context() as patched:
        patched.setattr(Splits, "batches", stop)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert same(run(tmp_path / "run", resume=True), run())


@pytest.mark.parametrize(
    "initial", [None, dataclasses.replace(TRAINING, lr=2e-2), dataclasses.replace(TRAINING, validation=0.2)]
)
def test_a_run_with_another_start_is_not_resumed(tmp_path: Path, initial: TrainMembers | None) -> None:
    run(tmp_path / "run")
    with pytest.raises(StoreMismatch, match=r"has members = .*To resume, all arguments except `num_draws`"):
        run(tmp_path / "run", initial=initial, resume=True)


def test_a_plan_checks_and_prints_its_start() -> None:
    def plan(initial: Any, **options: Any) -> Plan:
        return Plan(network(), (X, Y), F.cross_entropy, **{"num_chains": 3, **options}, initial=initial)

    members = train(max_steps=10)
    for words in (
        "starts   a member trained for each chain: Adam, lr 0.01,",
        "at most 40 steps, validation on 15%, patience 20",
    ):
        assert words in str(plan(TRAINING))
    assert "starts   a given state dictionary for each chain" in str(plan(members))
    assert "starts" not in str(plan(None))
    assert plan(list(members)).initial == list(members)
    with pytest.raises(ValueError, match=r"each of 2 chains, got 3. Set num_chains=3"):
        plan(members, num_chains=2)
    with pytest.raises(TypeError, match="got one state dictionary"):
        plan(members[0])
    with pytest.raises(TypeError, match=r"or TrainMembers\(\), got int"):
        plan(10)
    manifest = plan(TRAINING, **SHORT).manifest()  # takes no step
    assert manifest["configuration"]["members"]["lr"] == 1e-2
    assert "members" not in manifest
