"""A tagger: it learns, goes on where it stopped to the last bit, is sampled, and says what is wrong with files and jets."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from adammcmc import Posterior
from adammcmc.jets import Jets, bundled, cloud_of, read_jets
from adammcmc.jets.metrics import accuracy
from adammcmc.jets.particlenet import restated
from adammcmc.jets.tagger import Sampling, Tagger, Training
from adammcmc.posterior.store import encoding
from adammcmc.posterior.store.atomic import write_parts
from adammcmc.posterior.store.encoding import encode

JETS = read_jets(bundled("jets"), max_jets=2500)
FEW = JETS[:96]
QUICK: dict[str, Any] = {"network": "lite", "batch_size": 32}
SHORT: dict[str, Any] = {"burn_in": 2, "gap": 2, "num_draws": 3, "num_chains": 1, "progress": False}
# so short a chain says that it has not arrived
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def trained(epochs: int = 1, **settings: Any) -> Tagger:
    tagger = Tagger(Training(**QUICK | {"epochs": epochs} | settings), device="cpu")
    tagger.train(FEW, progress=False)
    return tagger


@pytest.fixture(scope="module")
def tagger() -> Tagger:
    return trained()


def weights(tagger: Tagger) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tagger.net.state_dict().items()}


def assert_same_state(a: Tagger, b: Tagger) -> None:
    """Weights, running statistics and Adam's moments, to the last bit."""
    for name, tensor in a.net.state_dict().items():
        assert torch.equal(tensor, b.net.state_dict()[name]), name
    ours, theirs = a.adam.state_dict()["state"], b.adam.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for number, state in ours.items():
        assert {"exp_avg", "exp_avg_sq", "step"} <= state.keys()
        for key, tensor in state.items():
            assert torch.equal(tensor, theirs[number][key]), (number, key)
    assert (a.steps, a.epochs) == (b.steps, b.epochs)


# --- training -------------------------------------------------------------------------------------------------------------


def test_it_learns_to_tell_top_jets() -> None:
    losses: list[float] = []
    tagger = Tagger(Training("lite", epochs=2, batch_size=64), device="cpu")
    tagger.train(JETS[:1500], after_epoch=lambda _, loss: losses.append(loss), progress=False)
    assert losses[1] < losses[0] < 0.69
    assert (tagger.epochs, tagger.steps) == (2, 2 * (1500 // 64))
    held_out = JETS[1500:]
    found = accuracy(tagger.scores(held_out), held_out.kind)
    assert found.value - 2 * found.error > 0.80


def test_training_is_fixed_by_its_seed_alone() -> None:
    torch.manual_seed(5)
    first = trained()
    torch.manual_seed(6)
    before = torch.get_rng_state()
    second = trained()
    assert torch.equal(torch.get_rng_state(), before)  # the world's random numbers are left alone
    assert_same_state(first, second)
    assert not torch.equal(first.net.fc[1].weight, trained(seed=1).net.fc[1].weight)


def test_the_learning_rate_is_constant_and_then_falls_to_a_hundredth() -> None:
    training = Training(flat=0.5)
    factors = [training.factor(step, 100) for step in range(101)]
    assert factors[:51] == [1.0] * 51
    assert all(a > b for a, b in pairwise(factors[50:]))
    assert factors[75] == pytest.approx(0.1)
    assert factors[100] == pytest.approx(0.01)
    assert [Training(flat=1.0).factor(step, 10) for step in (0, 9)] == [1.0, 1.0]


def test_scores_are_the_networks_probability_in_evaluation_mode(tagger: Tagger) -> None:
    tagger.net.train()
    scores = tagger.scores(FEW, batch_size=7)
    tagger.net.eval()
    with torch.no_grad():
        expected = tagger.net(cloud_of(FEW)).softmax(1)[:, 1]
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-5)


def test_bfloat16_is_close() -> None:
    full = trained()
    half = Tagger(full.training, device="cpu", precision="bfloat16")
    half.net.load_state_dict(full.net.state_dict())
    scores = half.scores(FEW)
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, full.scores(FEW))
    torch.testing.assert_close(scores, full.scores(FEW), atol=0.05, rtol=0)


# torch's own, as its compiler is imported
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_tagger_is_the_same_tagger(tagger: Tagger, tmp_path: Path) -> None:
    """All but the compiler, which test_particlenet.py runs: the names of the weights, the modes, the draws."""
    with torch.compiler.set_stance("force_eager"):
        compiled = Tagger(tagger.training, device="cpu", compiled=True)
        compiled.train(FEW, progress=False)
        posterior = compiled.sample(FEW, batch_size=32, path=tmp_path, **SHORT)
    assert_same_state(compiled, trained())
    plain = trained().sample(FEW, batch_size=32, **SHORT)
    assert equal(posterior, plain)
    assert equal(tagger.posterior(tmp_path), plain)


# --- the folder -----------------------------------------------------------------------------------------------------------


def test_training_that_stopped_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    whole = trained(3)

    class Stopped(Exception):
        pass

    def stop(tagger: Tagger, _: float) -> None:
        tagger.save(tmp_path)
        tagger.scores(FEW[:5])  # looking at it, in evaluation mode, changes nothing
        if tagger.epochs == 2:
            raise Stopped

    first = Tagger(Training(**QUICK, epochs=3), device="cpu")
    with pytest.raises(Stopped):
        first.train(FEW, after_epoch=stop, progress=False)
    torch.manual_seed(99)
    second = Tagger.load(tmp_path, device="cpu")
    assert (second.epochs, second.steps) == (2, 6)
    assert_same_state(second, first)
    second.train(FEW, progress=False)
    assert_same_state(second, whole)


def test_a_loaded_tagger_can_train_longer(tmp_path: Path) -> None:
    trained(1).save(tmp_path)
    longer = Tagger.load(tmp_path, device="cpu", epochs=2)
    longer.train(FEW, progress=False)
    assert (longer.epochs, longer.steps, longer.training.epochs) == (2, 6, 2)


def test_settings_are_kept(tmp_path: Path) -> None:
    training = Training("lite", epochs=1, batch_size=24, lr=5e-4, betas=(0.99, 0.98), flat=0.2, seed=4)
    tagger = Tagger(training, device="cpu")
    path = tagger.save(tmp_path / "a" / "b")
    assert path == tmp_path / "a" / "b" / "tagger.safetensors"
    assert Tagger.load(path.parent, device="cpu").training == training
    assert [p.name for p in path.parent.iterdir()] == ["tagger.safetensors"]  # nothing temporary stays


def test_a_truncated_tagger_is_told_of(tagger: Tagger, tmp_path: Path) -> None:
    path = tagger.save(tmp_path)
    content = path.read_bytes()
    for size in (0, 5, 1000, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(
            ValueError, match=r"tagger\.safetensors' cannot be read .*is it a complete tagger file of this library"
        ):
            Tagger.load(tmp_path)


def test_a_flipped_bit_is_noticed_wherever_it_is(tagger: Tagger, tmp_path: Path) -> None:
    """In the weights too, where any bits are numbers."""
    path = tagger.save(tmp_path)
    content = path.read_bytes()
    places = torch.randint(8 * len(content), (40,), generator=torch.Generator().manual_seed(0)).tolist()
    for place in [*range(8 * 8, 8 * 48, 7), *places]:  # the head begins with the checksum itself
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"tagger\.safetensors' cannot be read"):
            Tagger.load(tmp_path, device="cpu")


@pytest.mark.parametrize("key", ["adam", "net", "steps", "epochs", "training", "trained_on"])
@pytest.mark.parametrize("value", [1.5, "x", torch.zeros(3), [[1]], {"state": 1.5, "param_groups": []}])
def test_a_state_of_other_types_is_told_of(tagger: Tagger, tmp_path: Path, key: str, value: Any) -> None:
    path = tagger.save(tmp_path)
    if key == "trained_on" and value == "x":
        value = 3
    encoding.write_state(path, encoding.read_state(path) | {key: value}, "a tagger of adammcmc")
    with pytest.raises(ValueError, match=r"(?s)cannot be read .*is it a complete tagger file of this library"):
        Tagger.load(tmp_path, device="cpu")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"state": encode({"other": 1})[0]}])
def test_a_foreign_file_is_told_of(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "tagger.safetensors", metadata)
    words = r"cannot be read \(it has no checksum\): is it a complete tagger file of this library"
    with pytest.raises(ValueError, match=words):
        Tagger.load(tmp_path, device="cpu")


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"state": "no json"},
        {"state": json.dumps({"other": 1})},
        {"state": json.dumps([1, 2])},
        {"state": encode({"other": 1})[0]},
        {"state": encode({"training": {"network": "lite", "of_a_later_version": 1}})[0]},
    ],
)
def test_a_checksum_does_not_make_a_tagger(metadata: dict[str, str], tmp_path: Path) -> None:
    with open(tmp_path / "tagger.safetensors", "wb", buffering=0) as file:
        write_parts(file, encoding.safetensors_parts({"weight": torch.zeros(3)}, metadata))
    words = r"cannot be read \((?!it has no checksum).*is it a complete tagger file of this library"
    with pytest.raises(ValueError, match=words):
        Tagger.load(tmp_path, device="cpu")


def test_a_folder_without_a_tagger_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no tagger in '.*' \(no tagger.safetensors\): train one with `adammcmc jets train`"
    ):
        Tagger.load(tmp_path)


# --- sampling -------------------------------------------------------------------------------------------------------------


def equal(a: Posterior, b: Posterior) -> bool:
    return len(a) == len(b) > 0 and all(
        x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("sampler", ["adam-mcmc", "as-released", "underdamped"])
def test_every_sampler_runs_and_leaves_the_trained_weights(sampler: Any, tagger: Tagger, tmp_path: Path) -> None:
    before = weights(tagger)
    moments = {n: {k: v.clone() for k, v in s.items()} for n, s in tagger.adam.state_dict()["state"].items()}
    posterior = tagger.sample(FEW, sampler=sampler, batch_size=32, path=tmp_path / "chain", **SHORT)
    assert len(posterior) == 3
    assert "n = 96" in posterior.target
    assert ("exact" in posterior.target) == (sampler == "underdamped")
    for name, tensor in before.items():
        assert torch.equal(tensor, tagger.net.state_dict()[name]), name
    for number, state in tagger.adam.state_dict()["state"].items():
        for key, tensor in state.items():
            assert torch.equal(tensor, moments[number][key])
    if sampler != "underdamped":  # whose first steps may all be refused
        assert not torch.equal(posterior[2]["fc.1.weight"], before["fc.1.weight"])
    # the statistics of the training stay: the loss is one function of the weights
    assert torch.equal(posterior[2]["bn_fts.running_mean"], before["bn_fts.running_mean"])
    again = tagger.posterior(tmp_path / "chain")
    assert equal(again, posterior)


def test_a_network_restated_with_other_statistics_is_the_same_function(tagger: Tagger) -> None:
    other = trained(seed=1)
    before, state = other.scores(FEW), restated(other.net, tagger.net.state_dict())
    other.net.load_state_dict(state)
    torch.testing.assert_close(other.scores(FEW), before, atol=1e-5, rtol=1e-4)
    for name, buffer in tagger.net.named_buffers():
        assert torch.equal(buffer, state[name]), name
    assert not torch.equal(state["bn_fts.weight"], tagger.net.bn_fts.weight)


def test_exact_chains_start_apart_and_have_one_target(tagger: Tagger, tmp_path: Path) -> None:
    options = SHORT | {"sampler": "underdamped", "num_chains": 2, "num_draws": 2, "path": tmp_path}
    posterior = tagger.sample(FEW, **options)
    first, second = posterior[0], posterior[2]
    names = [name for name, _ in tagger.net.named_buffers()]
    assert all(torch.equal(first[name], second[name]) for name in names)
    distance = float((first["fc.0.0.weight"] - second["fc.0.0.weight"]).abs().mean())
    assert distance > 10 * float((first["fc.0.0.weight"] - tagger.net.fc[0][0].weight).abs().mean())
    assert equal(tagger.posterior(tmp_path), posterior)
    tagger.net.autocast = torch.bfloat16
    longer = tagger.sample(FEW, **options | {"num_draws": 3}, resume=True)  # nothing is trained again
    assert tagger.net.autocast is torch.bfloat16
    tagger.net.autocast = None
    assert len(longer) == 6
    assert "bfloat16" not in longer.target  # energies are in full precision whatever the network's own


def test_microcanonical_chains_say_that_they_have_no_test(tagger: Tagger) -> None:
    posterior = tagger.sample(FEW[:16], **SHORT | {"sampler": "microcanonical", "burn_in": 100})
    assert "approximate: no Metropolis correction" in posterior.target
    assert "energy error of a step" in posterior.warm_up[0].reason
    assert posterior.warm_up[0].num_approach == 100


def test_defaults_follow_the_sampler_and_the_device() -> None:
    here, there = (Sampling(sampler="underdamped").complete(on_gpu=on_gpu) for on_gpu in (False, True))
    assert (here.num_chains, here.num_draws, here.gap, here.forces, here.num_leapfrog) == (4, 100, 10, "float32", 1)
    assert (there.forces, there.num_leapfrog) == ("bfloat16", 4)
    assert Sampling(sampler="microcanonical").complete(on_gpu=True).num_leapfrog is None
    plain = Sampling(num_draws=7).complete(on_gpu=True)
    assert (plain.num_chains, plain.num_draws, plain.gap, plain.forces) == (1, 7, 100, None)
    with pytest.raises(ValueError, match="forces"):
        Sampling(forces="tf32")
    with pytest.raises(ValueError, match="num_leapfrog"):
        Sampling(sampler="microcanonical", num_leapfrog=2)


def test_in_training_mode_the_statistics_move(tagger: Tagger) -> None:
    posterior = tagger.sample(FEW, batch_size=32, in_training_mode=True, **SHORT)
    assert not torch.equal(posterior[2]["bn_fts.running_mean"], tagger.net.bn_fts.running_mean)


def test_a_chain_that_stopped_goes_on(tagger: Tagger, tmp_path: Path) -> None:
    whole = tagger.sample(FEW, batch_size=32, **SHORT | {"num_draws": 5})
    tagger.sample(FEW, batch_size=32, path=tmp_path / "chain", **SHORT | {"num_draws": 2})
    longer = tagger.sample(FEW, batch_size=32, path=tmp_path / "chain", resume=True, **SHORT | {"num_draws": 5})
    assert equal(longer, whole)


def test_chains_start_from_adams_moments(tagger: Tagger) -> None:
    """The same weights without Adam's history make other steps; a network that was never trained can be sampled too."""
    bare = Tagger(tagger.training, device="cpu")
    bare.net.load_state_dict(tagger.net.state_dict())
    assert not bare.adam.state_dict()["state"]
    assert not equal(bare.sample(FEW, batch_size=32, **SHORT), tagger.sample(FEW, batch_size=32, **SHORT))
    bare.adam.load_state_dict(tagger.adam.state_dict())
    assert equal(bare.sample(FEW, batch_size=32, **SHORT), tagger.sample(FEW, batch_size=32, **SHORT))


def test_predictions_are_those_of_the_draws(tagger: Tagger) -> None:
    posterior = tagger.sample(FEW, batch_size=32, **SHORT)
    prediction = tagger.predict(posterior, FEW, batch_size=11, progress=False)
    expected = []
    other = Tagger(tagger.training, device="cpu")
    for draw in posterior:
        other.net.load_state_dict(draw)
        expected.append(other.scores(FEW))
    torch.testing.assert_close(prediction.mean[:, 1], torch.stack(expected).mean(0), atol=2e-6, rtol=1e-4)


# --- what is wrong --------------------------------------------------------------------------------------------------------


def others() -> Jets:
    return read_jets(bundled("others"), max_jets=64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Training("resnet"), "there is no network 'resnet'. Known: particlenet, lite"),
        (lambda: Training(epochs=0), "`epochs` must be positive and `batch_size` at least 2, got 0 and 512"),
        (lambda: Training(batch_size=1), "`batch_size` at least 2, got 10 and 1"),
        (lambda: Training(lr=0.0), "`lr` must be positive .*got 0.0"),
        (lambda: Training(lr=float("nan")), "`lr` must be positive .*got nan"),
        (lambda: Training(flat=1.5), "`flat` between 0 and 1, got .* 1.5"),
        (lambda: Tagger(device="cpu", precision="float16"), "`precision` must be 'float32' or 'bfloat16', got 'float16'"),
        (lambda: Tagger(Training("lite"), device="cpu").train(FEW), "96 jets do not fill a batch of 512"),
        (
            lambda: Tagger(Training(**QUICK), device="cpu").train(others()),
            r"needs top and QCD jets, got .*of_kind\('qcd', 'top'\)",
        ),
        (
            lambda: Tagger(Training(**QUICK), device="cpu").train(FEW.of_kind("top")),
            "needs top and QCD jets, got <Jets: .* top",
        ),
        (lambda: Tagger(Training(**QUICK), device="cpu").sample(others()), "needs top and QCD jets"),
        (lambda: Tagger(Training(**QUICK), device="cpu").sample(FEW, sampler="gibbs"), "no sampler 'gibbs'. Known: adam-mcmc"),
    ],
)
def test_wrong_requests_are_told_what_is_wrong(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_loss_that_runs_away_stops_the_training() -> None:
    tagger = Tagger(Training(**QUICK, lr=1e30), device="cpu")
    with pytest.raises(FloatingPointError, match=r"the training loss of epoch 1 is .*: lower `lr`"):
        tagger.train(FEW, progress=False)
