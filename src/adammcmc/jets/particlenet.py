"""ParticleNet (Qu and Gouskos 2019) and ParticleNet-Lite, in plain PyTorch.

A jet is a cloud of particles. A block connects each particle i with its k nearest neighbours j, first in (eta, phi), later in
feature space, and

    x_i  <-  relu( shortcut(x_i) + mean_j h([x_i, x_j - x_i]) ),    h: three layers of (linear, BatchNorm, relu)

Both forms of input run through the same code, on rows (particles) and the rows of their neighbours:

- *padded*, the arguments of weaver-core's model: `net(points, features, mask)`, each (jets, channels, particles). In training
  mode padding contributes to BatchNorm's statistics, as in weaver-core.
- *packed*: `net(cloud)`, with real particles only; BatchNorm's statistics cover the edges of real particles. In evaluation mode
  both are the same function. Rows after the last particle (`Cloud.padded`) have no effect. On a GPU the kernels of
  `adammcmc.jets.edges` compute the same, in float32 or under autocast in bfloat16.

The first layer of h needs one product per particle, not per edge: W [x_i, x_j - x_i] = (W1 - W2) x_i + W2 x_j.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adammcmc.jets.data import Rows

if TYPE_CHECKING:
    from adammcmc.jets.edges import Layout

__all__ = ["NOBODY", "Cloud", "ParticleNet", "ParticleNetLite", "nearest", "restated"]

NOBODY = 255
"""In `Cloud.neighbours`: the jet has too few particles for another neighbour. It counts as a neighbour with zero features."""

_KERNEL_DEVICES = {"cuda"} if find_spec("triton") is not None else set()


class Cloud(NamedTuple):
    """A batch of packed jets: the particles of the first jet, then those of the second, and so on.

    Concatenating the rows of each field concatenates batches.
    """

    counts: Tensor
    """(jets,) particles of each jet."""
    points: Tensor
    """(particles, 2): delta eta, delta phi."""
    features: Tensor
    """(particles, features)."""
    neighbours: Tensor
    """(particles, k): the nearest in (eta, phi), by index in the jet; uint8, `NOBODY` where there is none."""

    def part(self, rows: slice) -> Cloud:
        """Consecutive jets."""
        start, stop, step = rows.indices(len(self.counts))
        if step != 1:
            raise ValueError("a part of a cloud has consecutive jets: the step of the slice must be 1.")
        first, last = self.counts[:start].sum(), self.counts[:stop].sum()
        inside = slice(int(first), int(last))
        return Cloud(self.counts[rows], self.points[inside], self.features[inside], self.neighbours[inside])

    def padded(self, capacity: int) -> Cloud:
        """The same jets in `capacity` rows, with zeros after the last particle: batches of one shape, for CUDA graphs.

        The output of the network is the same. Such clouds cannot be concatenated.
        """
        more = capacity - len(self.points)
        if more < 0:
            raise ValueError(f"a cloud with {len(self.points)} rows does not fit in {capacity}.")
        points, features = (F.pad(x, (0, 0, 0, more)) for x in (self.points, self.features))
        return Cloud(self.counts, points, features, F.pad(self.neighbours, (0, 0, 0, more), value=NOBODY))


class EdgeConv(nn.Module):
    """One block. Its weights have the names and shapes of weaver-core."""

    is_fast_alone = True
    """Its kernels serve one chain. Under vmap plain operations replace them, which is slower than one chain after another."""

    def __init__(self, in_channels: int, channels: Sequence[int]) -> None:
        super().__init__()
        sizes = [2 * in_channels, *channels]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 1, bias=False) for a, b in pairwise(sizes))
        # over (rows, channels): two to three times faster than over an image of single points, on any device
        self.bns = nn.ModuleList(nn.BatchNorm1d(b) for b in channels)
        self.sc: nn.Module | None = None
        if in_channels != channels[-1]:
            self.sc = nn.Conv1d(in_channels, channels[-1], 1, bias=False)
            self.sc_bn = nn.BatchNorm1d(channels[-1])

    def forward(self, x: Tensor, neighbours: Tensor, real: Tensor | None = None, *, layout: Layout | None = None) -> Tensor:
        """Features (rows, channels) and neighbours (rows, k); row `len(x)` stands for no neighbour, with zero features.

        Args:
            x: the features.
            neighbours: rows; with `layout`, indices in the jet.
            real: (rows, 1), the rows that count in BatchNorm's statistics; None: all.
            layout: of the jets, for the kernels of `edges`.
        """
        if layout is not None:
            from adammcmc.jets import edges as kernels

            shortcut_layers = None if self.sc is None else (self.sc, self.sc_bn)
            return kernels.edge_block(x, neighbours, layout, _compute_dtype(x), [*self.convs], [*self.bns], shortcut_layers)
        rows, k = neighbours.shape
        real_edges = None if real is None else real.expand(rows, k).reshape(-1, 1)
        own, other = _weight(self.convs[0]).chunk(2, 1)
        here, there = F.linear(x, own - other), F.linear(x, other)
        there = torch.cat([there, there.new_zeros(1, there.shape[1])])
        edges = here.unsqueeze(1) + there.index_select(0, neighbours.reshape(-1)).view(rows, k, -1)
        edges = edges.view(rows * k, -1)
        for i, bn in enumerate(self.bns):
            if i > 0:
                edges = F.linear(edges, _weight(self.convs[i]))
            edges = F.relu(_norm(bn, edges, real_edges))
        message = edges.view(rows, k, -1).mean(1)
        shortcut = x if self.sc is None else _norm(self.sc_bn, F.linear(x, _weight(self.sc)), real)
        return F.relu(shortcut + message)


class ParticleNet(nn.Module):
    """The paper's network: seven features, two classes, 366,160 parameters. Loads state dictionaries of weaver-core's model.

    Args:
        num_features: per particle.
        num_classes: of jets.
        blocks: for each block, the number of neighbours and the channels of its three layers.
        hidden: units of the fully connected layer.
        dropout: after that layer.
        max_particles: the most that a packed jet may have.

    Example:
        >>> net = ParticleNet()
        >>> sum(p.numel() for p in net.parameters())
        366160
        >>> net(torch.randn(4, 2, 30), torch.randn(4, 7, 30), torch.ones(4, 1, 30)).shape
        torch.Size([4, 2])
    """

    def __init__(
        self,
        num_features: int = 7,
        num_classes: int = 2,
        blocks: Sequence[tuple[int, Sequence[int]]] = ((16, (64, 64, 64)), (16, (128, 128, 128)), (16, (256, 256, 256))),
        hidden: int = 256,
        dropout: float = 0.1,
        max_particles: int = 128,
    ) -> None:
        super().__init__()
        most = max(k for k, _ in blocks)
        if not most < max_particles <= NOBODY:
            raise ValueError(
                f"`max_particles` must be more than {most}, the neighbours, and at most {NOBODY}, got {max_particles}."
            )
        self.max_particles = max_particles
        self._neighbours = [k for k, _ in blocks]
        self.num_neighbours = self._neighbours[0]
        """Of the first graph, which comes with the cloud."""
        self.autocast: torch.dtype | None = None
        """Run under autocast in this dtype (torch.bfloat16), with outputs in full precision. A setting, not a weight."""
        self.bn_fts = nn.BatchNorm1d(num_features)
        sizes = [num_features, *(channels[-1] for _, channels in blocks)]
        self.edge_convs = nn.ModuleList(EdgeConv(size, channels) for size, (_, channels) in zip(sizes, blocks, strict=False))
        first = nn.Sequential(nn.Linear(sizes[-1], hidden), nn.ReLU(), nn.Dropout(dropout))
        self.fc = nn.Sequential(first, nn.Linear(hidden, num_classes))

    def forward(self, points: Tensor | Cloud, features: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits (jets, classes) of a `Cloud`, or of padded points, features and mask.

        Args:
            points: a `Cloud`; or (jets, 2, particles).
            features: (jets, features, particles), zero at padding.
            mask: (jets, 1, particles), true for real particles; None: all are.
        """
        device = (points.features if isinstance(points, Cloud) else points).device.type
        # the caller's own autocast stays in effect
        with nullcontext() if self.autocast is None else torch.autocast(device, self.autocast):
            if isinstance(points, Cloud):
                return self._forward_packed(points)
            if features is None:
                raise TypeError("ParticleNet takes a Cloud, or padded (points, features, mask).")
            return self._forward_padded(points, features, mask)

    def _forward_packed(self, cloud: Cloud) -> Tensor:
        # (not on a GPU: the check would wait for it)
        if cloud.counts.device.type == "cpu" and not torch.compiler.is_compiling() and len(cloud.counts):
            most = int(cloud.counts.max())
            if most > self.max_particles:
                raise ValueError(f"a jet has {most} particles, the network takes {self.max_particles}: use jets.leading(...).")
        if cloud.neighbours.shape[1] < self.num_neighbours:
            raise ValueError(
                f"the cloud has {cloud.neighbours.shape[1]} neighbours for each particle, the network needs "
                f"{self.num_neighbours}: make it with num_neighbours={self.num_neighbours}."
            )
        if self._has_kernels(cloud):
            from adammcmc.jets import edges as kernels

            return self._head(kernels.outside_of_graphs(self._jets_by_kernels, cloud))
        return self._head(self._jets(cloud))

    def _has_kernels(self, cloud: Cloud) -> bool:
        """Whether the kernels of `edges` apply: outside of vmap and similar transforms, with unmodified BatchNorm layers."""
        if cloud.features.device.type not in _KERNEL_DEVICES or not (len(cloud.features) and len(cloud.counts)):
            return False
        dtypes = {cloud.features.dtype, self.bn_fts.weight.dtype}
        if dtypes != {torch.float32} or _compute_dtype(cloud.features) not in (torch.float32, torch.bfloat16):
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        norms = [m for m in self.modules() if isinstance(m, nn.BatchNorm1d)]
        return all(m.affine and m.track_running_stats and (m.momentum is not None or not m.training) for m in norms)

    def _jets_by_kernels(self, cloud: Cloud) -> Tensor:
        from adammcmc.jets import edges as kernels

        layout = kernels.Layout.of(cloud.counts, len(cloud.features), self.max_particles)
        x = kernels.norm_rows(cloud.features, self.bn_fts, layout)
        for i, (k, block) in enumerate(zip(self._neighbours, self.edge_convs, strict=True)):
            neighbours = kernels.nearest_places(x, layout, k) if i > 0 else cloud.neighbours[:, :k]
            x = block(x, neighbours, layout=layout)
        return kernels.mean_of_jets(x, layout)

    def _jets(self, cloud: Cloud) -> Tensor:
        """The mean features of each jet after the last block."""
        real = None
        # a GPU is not queried for padding rows: BatchNorm always masks its rows there
        if cloud.counts.device.type == "cpu" and not torch.compiler.is_compiling():
            rows = int(cloud.counts.sum())
            cloud = Cloud(cloud.counts, cloud.points[:rows], cloud.features[:rows], cloud.neighbours[:rows])
            where = Rows.of(cloud.counts, rows)
        else:
            where = Rows.of(cloud.counts, len(cloud.points))
            real = where.real.unsqueeze(1)
        x = _norm(self.bn_fts, cloud.features, real)
        for i, (k, block) in enumerate(zip(self._neighbours, self.edge_convs, strict=True)):
            neighbours = nearest(x, where, k, self.max_particles) if i > 0 else cloud.neighbours[:, :k]
            x = block(x, _as_rows(neighbours, where, len(x)), real)
        if real is not None:
            x = x.masked_fill(~real, 0)
        # the mean in full precision: bfloat16 would lose digits in a sum over a hundred particles
        total = torch.zeros(len(where.counts), x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        total = total.index_add(0, where.owner, x.to(total.dtype))
        return total / where.counts.clamp_min(1).unsqueeze(1)

    def _forward_padded(self, points: Tensor, features: Tensor, mask: Tensor | None) -> Tensor:
        jets, _, width = points.shape
        most = max(self._neighbours)
        if width <= most:
            raise ValueError(f"padded jets need at least {most + 1} slots for particles (zeros are fine), got {width}.")
        real = torch.ones_like(points[:, :1]) if mask is None else mask
        real = real.bool().transpose(1, 2)  # (jets, particles, 1)
        padding = ~real.reshape(-1, 1)
        first = torch.arange(jets, device=points.device).view(-1, 1, 1) * width
        x = self.bn_fts(features.transpose(1, 2).reshape(jets * width, -1)).masked_fill(padding, 0)
        place = points.transpose(1, 2)
        for i, (k, block) in enumerate(zip(self._neighbours, self.edge_convs, strict=True)):
            if i > 0:
                place = x.view(jets, width, -1)
            neighbours = _nearest_padded(place, real, k)
            x = block(x, (neighbours + first).view(jets * width, -1)).masked_fill(padding, 0)
        total = x.view(jets, width, -1).to(torch.promote_types(x.dtype, torch.float32)).sum(1)
        return self._head(total / real.sum(1).clamp_min(1))

    def _head(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out if self.autocast is None else out.float()


class ParticleNetLite(ParticleNet):
    """The authors' smaller network, 26 thousand parameters: two blocks, seven neighbours.

    Example:
        >>> sum(p.numel() for p in ParticleNetLite().parameters())
        26416
    """

    def __init__(self, num_features: int = 7, num_classes: int = 2, *, dropout: float = 0.1, max_particles: int = 128) -> None:
        blocks = ((7, (32, 32, 32)), (7, (64, 64, 64)))
        super().__init__(num_features, num_classes, blocks, hidden=128, dropout=dropout, max_particles=max_particles)


def restated(net: nn.Module, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a network with the BatchNorm statistics of another; in evaluation mode it is the same function as before.

        w (x - m) / s + b = w' (x - m') / s' + b',      w' = w s' / s,      b' = b + w (m' - m) / s

    Args:
        net: the network, whose layers have the names of the other's.
        like: the state of the other, with the statistics m' and s'^2.
    """
    state = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    for name, bn in net.named_modules():
        if not isinstance(bn, nn.BatchNorm1d):
            continue
        mean, var = like[f"{name}.running_mean"], like[f"{name}.running_var"]
        old_mean, old_var = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        weight = state[f"{name}.weight"]
        state[f"{name}.bias"] += weight * (mean - old_mean) * (old_var + bn.eps).rsqrt()
        state[f"{name}.weight"] = weight * ((var + bn.eps) / (old_var + bn.eps)).sqrt()
        for buffer in ("running_mean", "running_var", "num_batches_tracked"):
            state[f"{name}.{buffer}"] = like[f"{name}.{buffer}"].clone()
    return state


_FAR = 1e9  # where weaver-core puts padding


def _weight(conv: nn.Module) -> Tensor:
    """The matrix of a convolution over single points."""
    weight = conv.weight
    assert isinstance(weight, Tensor)
    return weight.flatten(1)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _norm(bn: nn.Module, x: Tensor, real: Tensor | None) -> Tensor:
    """BatchNorm of (rows, channels), with the statistics of the `real` rows, (rows, 1)."""
    assert isinstance(bn, nn.BatchNorm1d)
    if real is None or not bn.training or bn.momentum is None or bn.running_mean is None or bn.running_var is None:
        out: Tensor = bn(x)
        return out
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    number = real.sum().to(wide.dtype)
    mean = wide.masked_fill(~real, 0).sum(0) / number
    off = wide - mean
    var = off.masked_fill(~real, 0).square().sum(0) / number
    with torch.no_grad():
        assert bn.num_batches_tracked is not None
        bn.num_batches_tracked.add_(1)
        unbiased, kept = var * (number / (number - 1)), 1 - bn.momentum  # (vmap does not support lerp_)
        bn.running_mean.mul_(kept).add_(mean.to(bn.running_mean.dtype), alpha=bn.momentum)
        bn.running_var.mul_(kept).add_(unbiased.to(bn.running_var.dtype), alpha=bn.momentum)
    return (off * (var + bn.eps).rsqrt() * bn.weight + bn.bias).to(x.dtype)


def _as_rows(neighbours: Tensor, where: Rows, nobody: int) -> Tensor:
    """Convert indices in a jet to rows of the batch."""
    rows = neighbours.long() + where.first[where.owner].unsqueeze(1)
    return torch.where(neighbours == NOBODY, nobody, rows)


@torch.no_grad()
def nearest(x: Tensor, where: Rows, k: int, width: int) -> Tensor:
    """The k nearest other particles of the same jet, by index in the jet: (rows, k), `NOBODY` where there are fewer.

    Args:
        x: (rows, channels), the particles' positions.
        where: the jets they belong to.
        k: number of neighbours.
        width: the most particles that a jet has.
    """
    places = torch.arange(width, device=x.device)
    rows = (where.first.unsqueeze(1) + places).clamp_max(len(x) - 1)
    is_real = (places < where.counts.unsqueeze(1)).unsqueeze(2)
    # only real particles have neighbours: less than half of the slots
    counts = where.counts[where.owner]
    neighbours = _first_but_one(_distances(x[rows], is_real)[where.owner, where.rank.clamp_max(width - 1)], k)
    counts = counts.masked_fill(where.rank >= counts, 0)  # padding rows have no neighbours
    return neighbours.masked_fill(neighbours >= counts.unsqueeze(1), NOBODY).to(torch.uint8)


@torch.no_grad()
def _nearest_padded(points: Tensor, is_real: Tensor, k: int) -> Tensor:
    """The same for (jets, slots, channels), as weaver-core selects them: (jets, slots, k)."""
    return _first_but_one(_distances(points, is_real), k)


def _first_but_one(distances: Tensor, k: int) -> Tensor:
    """Of the k + 1 nearest, the first is nearly always the particle itself, and is dropped. (Two particles at the same position
    may be exchanged: packed, padded and in weaver-core alike.)"""
    return distances.topk(k + 1, dim=-1, largest=False, sorted=True).indices[..., 1:]


def _distances(points: Tensor, is_real: Tensor) -> Tensor:
    """Squared distances, (jets, slots, channels) -> (jets, slots, slots); padding is far away."""
    with torch.autocast(points.device.type, enabled=False):  # distances need full precision
        x = points.to(torch.promote_types(points.dtype, torch.float32)).masked_fill(~is_real, _FAR)
        square = x.square().sum(2, keepdim=True)
        return (square - 2 * (x @ x.transpose(1, 2)) + square.transpose(1, 2)).clamp_min(0)
