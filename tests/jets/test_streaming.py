"""Jets that are streamed: every jet of an epoch once, in an order that the seed fixes, and no more in memory than was said."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from adammcmc import AdamMCMC, sample
from adammcmc.cli.commands import app
from adammcmc.jets import Cloud, JetData, Jets, ParticleNetLite, bundled, read_jets, write_jets
from adammcmc.jets.streaming import StreamedJets
from adammcmc.jets.tagger import Tagger, Training

JETS = read_jets(bundled("jets"), max_jets=260)
SIZES = (40, 70, 30, 60, 20, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shards of unequal size, 260 jets."""
    folder = tmp_path_factory.mktemp("shards")
    first = 0
    for i, size in enumerate(SIZES):
        write_jets(folder / f"{i}.npz", JETS[first : first + size])
        first += size
    return folder


def numbers(batch: tuple[Cloud, torch.Tensor]) -> list[int]:
    """Which jets these are: no two have the same first particle."""
    cloud, _ = batch
    first = cloud.features[cloud.counts.cumsum(0) - cloud.counts]
    known = JetData(JETS).fetch(slice(None))[0]
    all_first = known.features[known.counts.cumsum(0) - known.counts]
    found = (first[:, None] == all_first[None]).all(2)
    assert bool((found.sum(1) == 1).all())
    return found.int().argmax(1).tolist()


def test_an_epoch_serves_every_jet_once(folder: Path) -> None:
    data = StreamedJets(folder, 10, chunk_size=100)
    data.restart(3)
    assert data.num_data == 260
    assert data.num_batches == 26
    epochs = [[j for _ in range(26) for j in numbers(next(data))] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(260))
    assert epochs[0] != epochs[1]
    again = StreamedJets(folder, 10, chunk_size=100)
    again.restart(3)
    assert numbers(next(again)) == epochs[0][:10]
    again.restart(4)
    assert numbers(next(again)) != epochs[0][:10]


def test_no_more_is_in_memory_than_was_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []

    class Watched(JetData):
        def __init__(self, jets: Jets, *args: object, **options: object) -> None:
            loaded.append(len(jets))
            super().__init__(jets, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("adammcmc.jets.streaming.JetData", Watched)
    data = StreamedJets(folder, 10, chunk_size=100)
    for _ in range(60):
        next(data)
    assert max(loaded) <= 100
    assert len(loaded) >= 6


@pytest.mark.parametrize("steps", [0, 1, 5, 7, 25, 26, 40])
def test_a_stream_goes_on_where_it_was(folder: Path, steps: int) -> None:
    data, again = (StreamedJets(folder, 10, chunk_size=100) for _ in range(2))
    data.restart(1)
    for _ in range(steps):
        next(data)
    again.load_state_dict(data.state_dict())
    for _ in range(4):
        assert numbers(next(again)) == numbers(next(data))


def test_what_does_not_fill_a_batch_is_left_out(folder: Path) -> None:
    data = StreamedJets(folder, 32, chunk_size=100)
    first = [j for _ in range(data.num_batches) for j in numbers(next(data))]
    assert len(first) == len(set(first))


def test_chosen_jets_and_all_in_order(folder: Path) -> None:
    data = StreamedJets(folder, 10, chunk_size=100)
    chosen = torch.tensor([259, 0, 41, 40, 39, 200, 110])
    assert numbers(data.fetch(chosen)) == chosen.tolist()
    assert [j for batch in data.in_order(32) for j in numbers(batch)] == list(range(260))
    assert torch.equal(data.heads.jet, JETS.jet)
    assert len(data.heads.particles) == 0


def test_only_the_wanted_kinds_are_served(tmp_path: Path) -> None:
    others = read_jets(bundled("others"), max_jets=200)
    write_jets(tmp_path / "a.npz", others)
    data = StreamedJets(tmp_path, 4, kinds=("w", "z"))
    assert set(data.heads.kind.tolist()) == {2, 3}
    assert data.num_data == int(((others.kind == 2) | (others.kind == 3)).sum())


def test_wrong_requests_are_told(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"1\.npz' holds 70 jets, more than `chunk_size` = 50: write it in shards"):
        StreamedJets(folder, 10, chunk_size=50)
    with pytest.raises(ValueError, match="`batch_size` must be positive and at most `chunk_size`, got 10 and 5"):
        StreamedJets(folder, 10, chunk_size=5)
    with pytest.raises(ValueError, match="260 jets do not fill a batch of 300"):
        next(StreamedJets(folder, 300, chunk_size=1000))
    with pytest.raises(ValueError, match="the run had batch_size = 20, these data have 10"):
        StreamedJets(folder, 10).load_state_dict(StreamedJets(folder, 20).state_dict())
    tagger = Tagger(Training("lite", batch_size=10), device="cpu")
    with pytest.raises(ValueError, match="they must fit in memory"):
        tagger.sample(StreamedJets(folder, 10), sampler="underdamped")
    with pytest.raises(ValueError, match="batches of 20, but the training uses 10"):
        tagger.train(StreamedJets(folder, 20))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_chain_over_a_stream_goes_on_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = ParticleNetLite().eval()
    chain = partial(
        sample, net, loss=F.cross_entropy, sampler=partial(AdamMCMC, lr=1e-3, sigma=1e-3, sigma_along=1.0), burn_in=2, gap=3
    )
    whole = chain(StreamedJets(folder, 20, chunk_size=100), num_draws=6)
    chain(StreamedJets(folder, 20, chunk_size=100), num_draws=2, path=tmp_path / "run")
    resumed = chain(StreamedJets(folder, 20, chunk_size=100), num_draws=6, path=tmp_path / "run", resume=True)
    for one, two in zip(whole, resumed, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    streamed = resumed.predict(StreamedJets(folder, 20, chunk_size=100)).mean
    torch.testing.assert_close(streamed, resumed.predict(JetData(JETS)).mean, atol=1e-5, rtol=0)


def test_training_on_a_stream_goes_on_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    settings = Training("lite", epochs=2, batch_size=20)
    whole = Tagger(settings, device="cpu")
    whole.train(StreamedJets(folder, 20, chunk_size=100), progress=False)
    half = Tagger(settings, device="cpu")

    def stop(tagger: Tagger, loss: float) -> None:
        tagger.save(tmp_path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half.train(StreamedJets(folder, 20, chunk_size=100), after_epoch=stop, progress=False)
    resumed = Tagger.load(tmp_path, device="cpu")
    resumed.train(StreamedJets(folder, 20, chunk_size=100), progress=False)
    assert resumed.steps == whole.steps
    for a, b in zip(whole.net.state_dict().values(), resumed.net.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_whole_road_from_the_shell(folder: Path, tmp_path: Path) -> None:
    def run(*words: object) -> str:
        result = CliRunner().invoke(app, ["jets", *map(str, words)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    common = (folder, "--run", tmp_path, "--chunk-size", 100, "--device", "cpu")
    trained = run("train", *common, "--network", "lite", "--epochs", 1, "--batch-size", 20, "--held-out", 0.3)
    assert re.search(r"training on <StreamedJets: \d+ \(\d+ top\) in 4 files", trained)
    held_out = re.search(r"on (\d+) held-out jets: accuracy", trained)
    assert held_out is not None
    sampled = run("sample", *common, "--batch-size", 20, "--burn-in", 1, "--gap", 1, "--num-draws", 2)
    assert f"n = {260 - int(held_out[1])}" in sampled
    assert f"{held_out[1]} jets: accuracy" in run("evaluate", *common, "--held-out")
    with pytest.raises(ValueError, match="not the jets that the tagger"):
        run("evaluate", folder, "--run", tmp_path, "--held-out", "--device", "cpu")
    with pytest.raises(ValueError, match="was trained on these jets: use --held-out"):
        run("evaluate", *common)


def test_few_jets_can_be_looked_at_though_they_fill_no_batch(folder: Path) -> None:
    tagger = Tagger(Training("lite"), device="cpu")
    assert tagger.scores(StreamedJets(folder, 512)).shape == (260,)
