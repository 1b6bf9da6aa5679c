"""The jets of a tagger: the same files give the same split and the same mark, in memory or streamed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adammcmc.jets import Jets, bundled, read_jets, write_jets
from adammcmc.jets.selection import Selection
from adammcmc.jets.settings import Training

JETS = read_jets(bundled("jets"), max_jets=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of 20 jets."""
    for i in range(3):
        write_jets(tmp_path / f"{i}.npz", JETS[20 * i : 20 * i + 20])
    return tmp_path


def test_jets_in_memory_are_split_as_the_training_says(folder: Path) -> None:
    selection, training = Selection(folder), Training(held_out=0.25)
    train, test = selection.split(training)
    expected = training.split(read_jets(folder))
    assert torch.equal(train.kind, expected[0].kind)
    assert isinstance(test, Jets)
    assert torch.equal(test.jet, expected[1].jet)
    held_out, rows = selection.test(training, held_out=True)
    assert torch.equal(held_out.heads.jet, test.jet)
    assert torch.equal(read_jets(folder).jet[rows], test.jet)
    everything, rows = selection.test(training, held_out=False)
    assert rows.tolist() == list(range(len(everything)))


def test_streams_hold_out_whole_files(folder: Path) -> None:
    selection, training = Selection(folder, chunk_size=40), Training(held_out=0.3, batch_size=10)
    train, test = selection.split(training)
    assert (len(train), len(test)) == (40, 20)
    held_out, _ = selection.test(training, held_out=True)
    assert torch.equal(held_out.kind, test.kind)
    assert len(selection.split(Training(held_out=0.0, batch_size=10))[1]) == 0


def test_a_mark_identifies_the_jets(folder: Path) -> None:
    assert Selection(folder).mark == Selection(sorted(folder.iterdir())).mark == read_jets(folder).digest()
    assert Selection(folder, max_jets=40).mark != Selection(folder).mark
    streamed = Selection(folder, chunk_size=40).mark
    assert streamed.startswith("files ")
    assert streamed != Selection(sorted(folder.iterdir())[:2], chunk_size=40).mark


def test_only_top_and_qcd_jets_are_selected(folder: Path, tmp_path: Path) -> None:
    others = read_jets(bundled("others"))
    write_jets(tmp_path / "3.npz", others.of_kind("w"))
    assert len(Selection(folder).split(Training())[0]) == 60
    with pytest.raises(ValueError, match="needs top and QCD jets"):
        Selection(tmp_path / "3.npz")


def test_memory_and_streams_exclude_each_other(folder: Path) -> None:
    with pytest.raises(ValueError, match="`max_jets` is for jets in memory, `chunk_size` for streams: choose one"):
        Selection(folder, max_jets=10, chunk_size=10)
