"""The inputs of the network: the seven features of the paper's configuration, and the first neighbours.

    log pT             (- 1.7) x 0.7        log E             (- 2.0) x 0.7
    log pT / pT_jet    (+ 4.7) x 0.7        log E / E_jet     (+ 4.7) x 0.7
    dR                 (- 0.2) x 4          delta eta, delta phi

Each is clipped to +-5. The 128 hardest particles are used. The first graph connects neighbours in (delta eta, delta phi).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from adammcmc.jets.data import Jets, Rows
from adammcmc.jets.particlenet import NOBODY, Cloud, nearest
from adammcmc.target.data import Indexed

__all__ = ["FEATURES", "JetData", "cloud_of", "features", "padded_inputs"]

FEATURES = ("log_pt", "log_e", "log_pt_rel", "log_e_rel", "dr", "deta", "dphi")
MAX_PARTICLES = 128


def features(particles: Tensor, jet: Tensor) -> Tensor:
    """The seven features, (rows, 7).

    Args:
        particles: (rows, 4): pT, delta eta, delta phi, E.
        jet: (rows, 5): pT, eta, phi, mass, E of each particle's jet.
    """
    pt, deta, dphi, energy = particles.unbind(1)
    log_pt, log_e = pt.log(), energy.log()
    columns = (
        (log_pt - 1.7) * 0.7,
        (log_e - 2.0) * 0.7,
        (log_pt - jet[:, 0].log() + 4.7) * 0.7,
        (log_e - jet[:, 4].log() + 4.7) * 0.7,
        (torch.hypot(deta, dphi) - 0.2) * 4.0,
        deta,
        dphi,
    )
    return torch.stack(columns, 1).clamp(-5.0, 5.0)


def cloud_of(jets: Jets, *, num_neighbours: int = 16, max_particles: int = MAX_PARTICLES) -> Cloud:
    """The jets as one packed batch, with the first graph."""
    if not num_neighbours < max_particles <= NOBODY:
        raise ValueError(
            f"`max_particles` must be more than the {num_neighbours} neighbours and at most {NOBODY}, got {max_particles}."
        )
    if not len(jets):
        raise ValueError("there are no jets.")
    jets = jets.leading(max_particles)
    neighbours = [_first_graph(jets[i : i + 512], num_neighbours) for i in range(0, len(jets), 512)]
    return Cloud(jets.counts, jets.particles[:, 1:3], features(jets.particles, jets.jet[jets.owner]), torch.cat(neighbours))


def _first_graph(jets: Jets, k: int) -> Tensor:
    return nearest(jets.particles[:, 1:3].double(), jets.rows, k, max(k + 1, int(jets.counts.max())))


def cloud_bytes(jets: Jets, num_neighbours: int = 16) -> int:
    """Memory of `cloud_of(jets)`, in bytes."""
    return len(jets.particles) * (4 * (2 + len(FEATURES)) + num_neighbours) + 16 * len(jets)


def padded_inputs(jets: Jets, max_particles: int = MAX_PARTICLES) -> tuple[Tensor, Tensor, Tensor]:
    """Padded inputs, also for weaver-core's model: points, features, mask, each (jets, channels, particles)."""
    jets = jets.leading(max_particles)
    seen = torch.cat([jets.particles[:, 1:3], features(jets.particles, jets.jet[jets.owner])], 1)
    full, mask = (jets.pad(x, max_particles).transpose(1, 2) for x in (seen, torch.ones(len(seen), 1)))
    return full[:, :2].contiguous(), full[:, 2:].contiguous(), mask.contiguous()


class JetData(Indexed):
    """Jets as training data: batches (cloud, labels) for `sample`, in an order fixed by the seed.

    Everything is computed once and stays on `device`; a batch is a few gathers there. The host keeps the numbers of particles
    too, so that it never waits for the device.

    Args:
        jets: the jets.
        batch_size: jets in a batch; None: all.
        device: of the data and the batches.
        labels: (jets,) classes; None: the kinds, 0 for QCD, 1 for top.
        num_neighbours: of the first graph; the network's k.
        max_particles: of a jet; the hardest are used.
        capacity: rows of a batch from `next`, see `Cloud.padded`: all batches have one shape, as CUDA graphs require. "auto" is
            5 standard deviations above the mean, enough for nearly any batch. A larger batch comes without padding.

    Example:
        >>> from adammcmc.jets import bundled, read_jets
        >>> data = JetData(read_jets(bundled("jets"), max_jets=1000), batch_size=64)
        >>> cloud, labels = next(data)
        >>> len(cloud.counts), labels.shape
        (64, torch.Size([64]))
    """

    def __init__(
        self,
        jets: Jets,
        batch_size: int | None = None,
        *,
        device: str | torch.device = "cpu",
        labels: Tensor | None = None,
        num_neighbours: int = 16,
        max_particles: int = MAX_PARTICLES,
        capacity: int | Literal["auto"] | None = None,
    ) -> None:
        is_size = isinstance(capacity, int) and not isinstance(capacity, bool) and capacity > 0
        if not (capacity is None or capacity == "auto" or is_size):
            raise ValueError(f"`capacity` must be a positive number of rows, 'auto' or None, got {capacity!r}.")
        cloud = cloud_of(jets, num_neighbours=num_neighbours, max_particles=max_particles)
        labels = jets.kind if labels is None else labels
        if len(labels) != len(jets):
            raise ValueError(f"{len(jets)} jets need as many labels, got {len(labels)}.")
        self._device = torch.device(device)
        self._host_counts = cloud.counts
        self._cloud = Cloud(*(tensor.to(self._device) for tensor in cloud))
        self._first = (cloud.counts.cumsum(0) - cloud.counts).to(self._device)
        self._labels = labels.long().to(self._device)
        super().__init__(len(jets), batch_size)
        self.capacity = _default_capacity(cloud.counts, self.batch_size) if capacity == "auto" else capacity

    def __next__(self) -> tuple[Cloud, Tensor]:
        if self._order is None:
            everything = self.batch_size == self.num_data
            self._order = torch.arange(self.num_data) if everything else self._permutation(self._epoch)
            self._order_there = self._order.to(self._device, non_blocking=True)
        rows = self._rows(self._epoch, self._position)
        total = int(self._host_counts[self._order[rows]].sum())
        chosen = self._order_there[rows]
        self._advance()
        cloud, labels = self._gather(chosen, total)
        return cloud if self.capacity is None or total > self.capacity else cloud.padded(self.capacity), labels

    def fetch(self, indices: slice | Tensor) -> tuple[Cloud, Tensor]:
        numbers = torch.arange(self.num_data)[indices] if isinstance(indices, slice) else indices.cpu()
        return self._gather(numbers.to(self._device), int(self._host_counts[numbers].sum()))

    def in_order(self, size: int) -> Iterator[tuple[Cloud, Tensor]]:
        for start in range(0, self.num_data, size):
            yield self.fetch(slice(start, start + size))

    def _gather(self, chosen: Tensor, total: int) -> tuple[Cloud, Tensor]:
        """These jets, with `total` particles."""
        counts = self._cloud.counts[chosen]
        where = Rows.of(counts, total)
        rows = self._first[chosen][where.owner] + where.rank
        return Cloud(counts, *(tensor.index_select(0, rows) for tensor in self._cloud[1:])), self._labels[chosen]


def _default_capacity(counts: Tensor, batch_size: int) -> int:
    """Rows for a batch: 5 standard deviations above its mean number of particles, but at most that of the largest jets;
    a multiple of 16, for fast matrix products."""
    mean, variance = float(counts.double().mean()), float(counts.double().var(correction=0))
    likely = math.ceil(batch_size * mean + 5 * math.sqrt(batch_size * variance))
    most = int(counts.sort(descending=True).values[:batch_size].sum())
    return -(-max(1, min(likely, most)) // 16) * 16
