"""Packed jets in memory: the particles of the first jet, then those of the second, and so on, without padding.

The particles of a jet are sorted by pT, hardest first, and their angles are relative to the jet axis:

    counts     (jets,)          particles of each jet
    particles  (all, 4)         pT, delta eta, delta phi, E        GeV and radians
    jet        (jets, 5)        pT, eta, phi, mass, E of the whole jet
    kind       (jets,)          an index into `KINDS`; -1 if unknown
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["KINDS", "Jets", "Rows", "jets_from_p4", "wrapped"]

KINDS = ("qcd", "top", "w", "z", "h_bb", "h_ww", "quark", "gluon")
"""Background and signal of top tagging come first, so that the labels of a tagger are kinds."""

# the compact encoding of a particle: three 16-bit integers
LOG_PT_SCALE = 3000.0  # log(pT / GeV): 1.8e-5 to 5.5e4 GeV, in steps of 0.03%
ANGLE_SCALE = 10000.0  # up to 3.27 from the axis (soft protons have a large eta), in steps of 1e-4


class Rows(NamedTuple):
    """Positions of the particles of packed jets: converts between rows and jets."""

    owner: Tensor
    """(rows,): the jet of each particle."""
    rank: Tensor
    """(rows,): its index in that jet."""
    first: Tensor
    """(jets,): the first row of each jet."""
    counts: Tensor
    """(jets,): particles of each jet."""

    @staticmethod
    def of(counts: Tensor, total: int) -> Rows:
        """From the number of particles in each jet, and in total (an argument, so that the device is not synchronized).

        `total` may be larger: the extra rows are assigned to the last jet, at indices that it does not have (see `real`).
        """
        ends = counts.cumsum(0)
        first, rows = ends - counts, torch.arange(total, device=counts.device)
        owner = torch.searchsorted(ends, rows, right=True).clamp_max(len(counts) - 1)
        return Rows(owner, rows - first[owner], first, counts)

    @property
    def real(self) -> Tensor:
        """(rows,): whether the row holds a particle."""
        return self.rank < self.counts[self.owner]


@dataclass(frozen=True, repr=False, eq=False)
class Jets:
    """A set of packed jets; the top of this file describes the four tensors.

    Example:
        >>> one = jets_from_p4(torch.tensor([[[100.0, 100.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]]), torch.tensor([1]))
        >>> one
        <Jets: 1 (1 top), 1.0 particles on average>
        >>> one.particles[0].tolist()
        [100.0, 0.0, 0.0, 100.0]
    """

    counts: Tensor
    particles: Tensor
    jet: Tensor
    kind: Tensor

    def __post_init__(self) -> None:
        jets = len(self.counts)
        if self.particles.shape != (int(self.counts.sum()), 4) or self.jet.shape != (jets, 5) or self.kind.shape != (jets,):
            raise ValueError(
                f"{jets} jets with {int(self.counts.sum())} particles need `particles` of shape "
                f"({int(self.counts.sum())}, 4), `jet` of ({jets}, 5) and `kind` of ({jets},), got "
                f"{tuple(self.particles.shape)}, {tuple(self.jet.shape)} and {tuple(self.kind.shape)}."
            )
        if jets and not -1 <= int(self.kind.min()) <= int(self.kind.max()) < len(KINDS):
            raise ValueError(
                f"a kind is an integer from -1 (unknown) to {len(KINDS) - 1}, got {sorted(set(self.kind.tolist()))}."
            )

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        found = [(name, int((self.kind == i).sum())) for i, name in enumerate(KINDS)]
        found.append(("unknown", int((self.kind < 0).sum())))
        kinds = ", ".join(f"{count:,} {name}" for name, count in found if count)
        mean = len(self.particles) / max(1, len(self))
        return f"<Jets: {len(self):,} ({kinds}), {mean:.1f} particles on average>"

    @property
    def offsets(self) -> Tensor:
        """The first row of each jet, and the number of rows: (jets + 1,)."""
        return torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])

    @property
    def heads(self) -> Jets:
        """The jets without their particles."""
        return Jets(torch.zeros_like(self.counts), self.particles[:0], self.jet, self.kind)

    @property
    def rows(self) -> Rows:
        """Positions of the particles."""
        return Rows.of(self.counts, len(self.particles))

    @property
    def owner(self) -> Tensor:
        """The jet of each particle: (all,)."""
        return self.rows.owner

    @property
    def rank(self) -> Tensor:
        """The index of each particle in its jet, 0 for the hardest: (all,)."""
        return self.rows.rank

    def __getitem__(self, chosen: slice | Tensor | Sequence[int]) -> Jets:
        """A selection of the jets, by a slice, indices or a mask."""
        try:
            numbers = torch.arange(len(self))[chosen if isinstance(chosen, slice) or len(chosen) else []]
        except IndexError as error:
            raise IndexError(f"{chosen!r} does not select from {len(self)} jets: {error}.") from error
        if numbers.dim() != 1:
            raise IndexError(f"select jets by a slice, a mask or a list of indices, got {chosen!r}; one jet is jets[[i]].")
        counts = self.counts[numbers]
        where = Rows.of(counts, int(counts.sum()))
        rows = self.offsets[numbers][where.owner] + where.rank
        return Jets(counts, self.particles[rows], self.jet[numbers], self.kind[numbers])

    def leading(self, num_particles: int) -> Jets:
        """The same jets with their hardest particles only, at most this many. The jet momentum is unchanged."""
        if num_particles < 1:
            raise ValueError(f"`num_particles` must be positive, got {num_particles}.")
        if not len(self) or int(self.counts.max()) <= num_particles:
            return self
        kept = self.rank < num_particles
        return Jets(self.counts.clamp_max(num_particles), self.particles[kept], self.jet, self.kind)

    def of_kind(self, *names: str) -> Jets:
        """The jets of these kinds."""
        return self[torch.isin(self.kind, torch.tensor([kind_number(name) for name in names], dtype=self.kind.dtype))]

    def padded(self, num_particles: int | None = None) -> tuple[Tensor, Tensor]:
        """Zero-padded particles, (jets, num_particles, 4), and the mask of real ones."""
        width = max(self.counts.tolist(), default=0) if num_particles is None else num_particles
        jets = self.leading(max(1, width))
        return jets.pad(jets.particles, width), jets.pad(torch.ones(len(jets.particles), dtype=torch.bool), width)

    def pad(self, values: Tensor, width: int) -> Tensor:
        """Numbers of the particles, (all, ...), in zero-padded slots: (jets, width, ...)."""
        where = self.rows
        full = values.new_zeros(len(self), width, *values.shape[1:])
        full[where.owner, where.rank] = values
        return full

    def p4(self, num_particles: int | None = None) -> Tensor:
        """Zero-padded E, px, py, pz of the particles: (jets, num_particles, 4)."""
        particles, mask = self.padded(num_particles)
        pt, deta, dphi, energy = particles.double().unbind(-1)
        eta, phi = deta + self.jet[:, 1:2].double(), dphi + self.jet[:, 2:3].double()
        return torch.stack([energy, pt * phi.cos(), pt * phi.sin(), pt * eta.sinh()], -1) * mask[..., None]

    @staticmethod
    def empty() -> Jets:
        """No jets."""
        none = torch.zeros(0, dtype=torch.long)
        return Jets(none, torch.zeros(0, 4), torch.zeros(0, 5), none)

    @staticmethod
    def cat(parts: Iterable[Jets]) -> Jets:
        """Concatenate sets of jets."""
        parts = list(parts)
        if not parts:
            raise ValueError("there are no jets to concatenate.")
        return Jets(*(torch.cat([getattr(part, name) for part in parts]) for name in ("counts", "particles", "jet", "kind")))

    def shuffled(self, seed: int) -> Jets:
        """The same jets in a random order fixed by the seed."""
        return self[torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))]

    def digest(self) -> str:
        """Sixteen hexadecimal digits that identify these jets in this order."""
        return hashlib.blake2b(self.jet.numpy().tobytes(), digest_size=8).hexdigest()

    # --- the compact encoding -------------------------------------------------------------------------------------------------

    def encode(self) -> dict[str, np.ndarray[Any, Any]]:
        """About 0.3 kB per jet before compression: a particle is three 16-bit integers, assumed massless."""
        pt, deta, dphi, _ = self.particles.double().unbind(1)
        fits = pt.log().mul(LOG_PT_SCALE).abs() <= 32767
        if not bool(fits.all()):
            raise ValueError(f"a particle has pT {float(pt[~fits][0]):g} GeV; the encoding covers 1.8e-5 to 5.5e4.")
        for name, angle in (("delta eta", deta), ("delta phi", dphi)):
            if bool((angle.abs() * ANGLE_SCALE > 32767).any()):
                raise ValueError(f"a particle is {angle.abs().max():.2f} from its jet axis in {name}; the limit is 3.27.")
        codes = {"log_pt": pt.log() * LOG_PT_SCALE, "deta": deta * ANGLE_SCALE, "dphi": dphi * ANGLE_SCALE}
        counts = self.counts.numpy()
        return {
            "n": counts.astype(np.uint8 if not len(counts) or counts.max() < 256 else np.uint16),
            **{name: code.round().to(torch.int16).numpy() for name, code in codes.items()},
            "jet": self.jet.numpy().astype(np.float32),
            "kind": self.kind.numpy().astype(np.int8),
            "scale": np.array([LOG_PT_SCALE, ANGLE_SCALE]),
        }

    @staticmethod
    def decode(code: dict[str, np.ndarray[Any, Any]]) -> Jets:
        """The inverse of `encode`."""
        log_pt_scale, angle_scale = code["scale"]
        counts = torch.from_numpy(code["n"].astype(np.int64))
        jet = torch.from_numpy(np.array(code["jet"], np.float32))
        pt = torch.from_numpy(np.exp(code["log_pt"].astype(np.float64) / log_pt_scale))
        deta, dphi = (torch.from_numpy(code[name].astype(np.float64) / angle_scale) for name in ("deta", "dphi"))
        eta = deta + torch.repeat_interleave(jet[:, 1].double(), counts)
        particles = torch.stack([pt, deta, dphi, pt * eta.cosh()], 1).float()
        return Jets(counts, particles, jet, torch.from_numpy(code["kind"].astype(np.int64)))


def kind_number(name: str) -> int:
    """The index of a kind in `KINDS`."""
    if name not in KINDS:
        raise ValueError(f"there is no kind of jet '{name}'. Known: {', '.join(KINDS)}.")
    return KINDS.index(name)


def wrapped(angle: Tensor) -> Tensor:
    """Wrap an angle into [-pi, pi)."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


def jets_from_p4(p4: Tensor, kind: Tensor, jet: Tensor | None = None) -> Jets:
    """Jets from zero-padded E, px, py, pz of the particles, in any order.

    Args:
        p4: (jets, particles, 4); rows of zeros are padding.
        kind: (jets,), indices into `KINDS`.
        jet: (jets, 4), E, px, py, pz of the jets; None: the sum of the particles.
    """
    if p4.dim() != 3 or p4.shape[2] != 4 or len(kind) != len(p4):
        raise ValueError(
            f"`p4` must be (jets, particles, 4) and `kind` (jets,), got {tuple(p4.shape)} and {tuple(kind.shape)}."
        )
    p4 = p4.double()
    total = p4.sum(1) if jet is None else jet.double()
    pt = p4[..., 1].hypot(p4[..., 2])
    order = pt.argsort(dim=1, descending=True, stable=True)
    p4, pt = p4.gather(1, order[..., None].expand_as(p4)), pt.gather(1, order)
    real = pt > 0
    jet_pt = total[:, 1].hypot(total[:, 2])
    jet_eta, jet_phi = (total[:, 3] / jet_pt).asinh(), torch.atan2(total[:, 2], total[:, 1])
    mass = (total[:, 0] ** 2 - (total[:, 1:] ** 2).sum(1)).clamp_min(0).sqrt()
    deta = (p4[..., 3] / torch.where(real, pt, 1.0)).asinh() - jet_eta[:, None]
    dphi = wrapped(torch.atan2(p4[..., 2], p4[..., 1]) - jet_phi[:, None])
    particles = torch.stack([pt, deta, dphi, p4[..., 0]], -1)[real].float()
    return Jets(real.sum(1), particles, torch.stack([jet_pt, jet_eta, jet_phi, mass, total[:, 0]], 1).float(), kind.long())
