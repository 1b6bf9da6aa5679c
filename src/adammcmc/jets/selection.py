"""The jets of a tagger: top and QCD jets from files, in memory or streamed, split into training and held-out jets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from adammcmc.jets.data import Jets
from adammcmc.jets.files import jet_files, read_jets
from adammcmc.jets.settings import Training
from adammcmc.jets.streaming import StreamedJets

__all__ = ["Selection", "check_two_classes"]


class Selection:
    """Top and QCD jets from files, which a tagger is trained, sampled and evaluated on.

    Args:
        paths: files or folders, in a fixed order: it determines which jets are held out.
        max_jets: read at most this many.
        chunk_size: stream the files, with this many jets in memory; None reads them all.
        device: of streamed batches.

    Example:
        >>> jets = Selection("bundled:jets", max_jets=100)
        >>> train, test = jets.split(Training(held_out=0.2))
        >>> len(train), len(test)
        (80, 20)
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        max_jets: int | None = None,
        chunk_size: int | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        if max_jets is not None and chunk_size is not None:
            raise ValueError("`max_jets` is for jets in memory, `chunk_size` for streams: choose one.")
        self.files = jet_files(paths)
        self._chunk_size, self._device = chunk_size, device
        self._jets: Jets | None = None
        if chunk_size is None:
            everything = read_jets(self.files, max_jets)
            self._jets = everything.of_kind("qcd", "top")
            check_two_classes(self._jets if len(self._jets) else everything)

    @property
    def mark(self) -> str:
        """Identifies the jets and their order; streamed ones by the names and sizes of their files."""
        if self._jets is not None:
            return self._jets.digest()
        text = "".join(f"{file.name} {file.stat().st_size} " for file in self.files)
        return f"files {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"

    def split(self, training: Training, batch_size: int | None = None) -> tuple[Jets | StreamedJets, Jets | StreamedJets]:
        """Training jets and held-out jets. From streams, whole files are held out."""
        if self._jets is not None:
            return training.split(self._jets)
        train, test = training.split_files(self.files)
        size = batch_size or training.batch_size
        return self._streamed(train, size), self._streamed(test, size) if test else Jets.empty()

    def test(self, training: Training, *, held_out: bool) -> tuple[Jets | StreamedJets, Tensor]:
        """The held-out jets, or all of them, and their rows in the files."""
        if self._jets is not None:
            rows = training.split_rows(len(self._jets))[1] if held_out else torch.arange(len(self._jets))
            return self._jets[rows], rows
        files = training.split_files(self.files)[1] if held_out else self.files
        stream = self._streamed(files, training.batch_size)
        return stream, torch.arange(len(stream))

    def _streamed(self, files: list[Path], batch_size: int) -> StreamedJets:
        assert self._chunk_size is not None
        return StreamedJets(files, batch_size, chunk_size=self._chunk_size, device=self._device)


def check_two_classes(jets: Jets | StreamedJets) -> None:
    """Require both top and QCD jets, and no others."""
    if set(jets.kind.tolist()) != {0, 1}:
        raise ValueError(
            f"a tagger needs top and QCD jets, got {jets!r}. Select them with jets.of_kind('qcd', 'top'), from files with both."
        )
