r"""What the one-pass kernels share (Triton): where the weights of 1..C chains lie, the decision, and its consequences.

A pass overwrites the current point theta by the proposal tau and keeps a copy of theta. After the loss at tau is known,
`_decide` tests every chain in one launch (the formula of `kernels.kernel.settle` with a test on the batch), and `_keep`
copies theta back for the chains that were rejected. Nothing waits for the host.

The noise is counter-based: eps of weight e is a function of (key, draw, e), Philox-4x32-10 and Box-Muller, where e counts
the weights of all leaves one after the other. How the kernels are launched has no influence on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from adammcmc.acceptance import AcceptanceTest
from adammcmc.backends.streams import Counters
from adammcmc.kernels.kernel import ChainState, Info
from adammcmc.kernels.proposal import Move
from adammcmc.target.leaves import Leaves, Setting
from adammcmc.target.potential import Evaluation, Potential
from adammcmc.target.randomness import Randomness

__all__ = [
    "BLOCK",
    "WARPS",
    "InPlaceMove",
    "Keys",
    "Launch",
    "OnePass",
    "Places",
    "by_leaf_and_chain",
    "contiguous",
    "is_same",
    "total",
]

BLOCK = 1024  # weights that a program works on at once
WARPS = 4
_TABLES = 4  # of gradients in a step, at most
_LOSSES = 1024  # losses that are read at once
_WAVES = 8  # programs for each multiprocessor
_LARGE = 1 << 18  # weights of a leaf; from there on a product takes more than one program
_SMALL = 1 << 20  # weights of a chain; below, one launch is faster than two with aligned loads in the first


# --- the kernels ------------------------------------------------------------------------------------------------------------


@triton.jit
def total(sums, num_sums, SIZE: tl.constexpr):
    """The sum of a row of partial sums."""
    found = tl.zeros([SIZE], tl.float64)
    for start in range(0, num_sums, SIZE):
        i = start + tl.arange(0, SIZE)
        found += tl.load(sums + i, mask=i < num_sums, other=0.0)
    return tl.sum(found)


@triton.jit
def _decide(
    here, there, num_losses, log_prior_here, log_prior_there, log_q_ratio, log_uniform, squares, step_to_noise, scales,
    noise_scales, frozen_at, step_at, rows, accepted_at, num_examples, HAS_TEST: tl.constexpr, HAS_RATIO: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """One chain: Metropolis on its batch, or no test, and the rows of `Info`."""
    chain, num_chains = tl.program_id(0), tl.num_programs(0)
    here, there = here + chain.to(tl.int64) * num_losses, there + chain.to(tl.int64) * num_losses
    nan = float("nan")
    current = tl.zeros([SIZE], tl.float64)
    moved = tl.zeros([SIZE], tl.float64)
    for start in range(0, num_losses, SIZE):
        i = start + tl.arange(0, SIZE)
        old = tl.load(here + i, mask=i < num_losses, other=0.0).to(tl.float64)
        current += old
        if HAS_TEST:
            # the losses are subtracted one by one: see `potential.potential_difference`
            moved += tl.load(there + i, mask=i < num_losses, other=0.0).to(tl.float64) - old
    loss = tl.sum(current) / num_losses
    scale = tl.load(scales + chain)
    prior_here, prior_there = tl.load(log_prior_here + chain), tl.load(log_prior_there + chain)
    was_free = tl.load(frozen_at + chain) < 0
    level = loss + prior_here + tl.load(squares + chain)
    healthy = (tl.abs(level) < float("inf")) & was_free
    if HAS_TEST:
        mean = tl.sum(moved) / num_losses
        log_q = tl.load(log_q_ratio + chain)
        log_ratio = log_q - (scale * mean - (prior_there - prior_here))
        finite = tl.abs(log_ratio) < float("inf")
        accepted = (tl.load(log_uniform + chain) < log_ratio) & finite & healthy
        rate = tl.where(healthy & finite, tl.exp(tl.minimum(log_ratio, 0.0)), 0.0)
        spread = tl.zeros([SIZE], tl.float64)
        for start in range(0, num_losses, SIZE):
            i = start + tl.arange(0, SIZE)
            old = tl.load(here + i, mask=i < num_losses, other=0.0).to(tl.float64)
            off = tl.load(there + i, mask=i < num_losses, other=0.0).to(tl.float64) - old - mean
            spread += tl.where(i < num_losses, off * off, 0.0)
        # zero for fixed data; NaN where only a mean is known, by a noise scale of NaN
        noise_scale = tl.load(noise_scales + chain)
        noise = tl.sqrt(tl.sum(spread) / tl.maximum(num_losses - 1, 1)) * noise_scale
        noise = tl.where(noise_scale == 0.0, 0.0, noise)
        proposed_loss = loss + mean
    else:
        finite = tl.abs(prior_there - prior_here) < float("inf")
        accepted = finite & healthy
        rate = accepted.to(tl.float64)
        log_q, log_ratio, noise, proposed_loss = nan * loss, nan * loss, nan * loss, nan * loss
    tl.store(frozen_at + chain, tl.where(was_free & (healthy == 0), tl.load(step_at), tl.load(frozen_at + chain)))
    tl.store(accepted_at + chain, accepted.to(tl.uint8))
    tl.store(accepted_at + num_chains + chain, finite.to(tl.uint8))
    row = rows + chain
    tl.store(row, loss)
    tl.store(row + num_chains, proposed_loss)
    tl.store(row + 2 * num_chains, log_q)
    tl.store(row + 3 * num_chains, log_ratio)
    tl.store(row + 4 * num_chains, rate)
    tl.store(row + 5 * num_chains, accepted.to(tl.float64))
    tl.store(row + 6 * num_chains, finite.to(tl.float64))
    tl.store(row + 7 * num_chains, num_examples)
    tl.store(row + 8 * num_chains, scale * loss - prior_here)
    if HAS_RATIO:
        tl.store(row + 9 * num_chains, tl.load(step_to_noise + chain))
    else:
        tl.store(row + 9 * num_chains, nan * loss)
    tl.store(row + 10 * num_chains, noise)


@triton.jit
def _keep(
    targets, sources, kept, fresh, sizes, chunks, num_chunks, accepted_at, moved_at, HAS_GRAD: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """After the decision: theta back to its place (rejected), or the new gradient to the place of the old one (accepted)."""
    chain = tl.program_id(1)
    accepted = tl.load(accepted_at + chain) > 0
    last = tl.where(accepted, 0, num_chunks)
    if HAS_GRAD:
        last = num_chunks + last * 0
    last = tl.where(tl.load(moved_at + chain) > 0, last, 0)  # a frozen chain was not touched
    for chunk in range(tl.program_id(0), last, tl.num_programs(0)):
        t = tl.load(chunks + 2 * chunk)
        size = tl.load(sizes + t)
        e = tl.load(chunks + 2 * chunk + 1).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        at = chain.to(tl.int64) * size + e
        source, target = tl.load(sources + t), tl.load(targets + t)
        if HAS_GRAD:
            source = tl.where(accepted, tl.load(fresh + t), source)
            target = tl.where(accepted, tl.load(kept + t), target)
        values = tl.load(source.to(tl.pointer_type(tl.float32)) + at, mask=e < size)
        tl.store(target.to(tl.pointer_type(tl.float32)) + at, values, mask=e < size)


@triton.jit
def _products(places, gradients, sizes, pulls, out, SIZE: tl.constexpr):
    """theta . grad V of one leaf and chain, (chains, leaves); a Gaussian prior's part included."""
    t, chain = tl.program_id(0), tl.program_id(1)
    size = tl.load(sizes + t)
    p_at = tl.load(places + t).to(tl.pointer_type(tl.float32)) + chain.to(tl.int64) * size
    g_at = tl.load(gradients + t).to(tl.pointer_type(tl.float32)) + chain.to(tl.int64) * size
    pull = tl.load(pulls + t)
    found = tl.zeros([SIZE], tl.float64)
    for start in range(0, size, SIZE):
        e = start + tl.arange(0, SIZE)
        p = tl.load(p_at + e, mask=e < size, other=0.0).to(tl.float64)
        found += p * (tl.load(g_at + e, mask=e < size, other=0.0).to(tl.float64) + pull * p)
    tl.store(out + chain * tl.num_programs(0) + t, tl.sum(found))


# --- where the weights lie --------------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """One launch over blocks of weights: (leaf, block) pairs, how many, the programs a chain, whether all loads are aligned."""

    chunks: Tensor
    num_chunks: int
    width: int
    is_full: bool


class Places:
    """The addresses of leaves (chains, ...) that stay where they are: contiguous float32 on one device.

    Args:
        groups: sets of leaves in one layout; the first is theta, the second the copy of theta.
    """

    def __init__(self, *groups: Leaves) -> None:
        self.groups = groups
        leaf = groups[0][0]
        self.device, self.num_chains, self.num_leaves = leaf.device, leaf.shape[0], len(groups[0])
        sizes = [x[0].numel() for x in groups[0]]
        self.largest = max(sizes)
        bases, count = [], 0
        for size in sizes:
            bases.append(count)
            count += -(-size // 4)  # four numbers are drawn at once
        if count >= 1 << 32:
            raise ValueError(f"the counter of the noise has room for 2^34 weights, got {sum(sizes)}.")
        addresses = [[x.data_ptr() for x in group] for group in groups]
        rows = [self.num_chains == 1 or size % 4 == 0 for size in sizes]
        aligned = [rows[t] and all(group[t] % 16 == 0 for group in addresses) for t in range(len(sizes))]
        everything = [(t, c) for t, size in enumerate(sizes) for c in range(-(-size // BLOCK))]
        is_small = sum(sizes) < _SMALL
        full = [(t, c) for t, c in everything if aligned[t] and (c + 1) * BLOCK <= sizes[t] and not is_small]
        rest = sorted(set(everything) - set(full)) if full else everything
        self.table = self.put(addresses, torch.int64)
        """(groups, leaves)"""
        self.sizes, self.bases = self.put(sizes, torch.int64), self.put(bases, torch.int64)
        self.launches = [self._launch(chunks, is_full) for chunks, is_full in ((full, True), (rest, False)) if chunks]
        self.everything = self._launch(everything, False)
        self._spare: list[Tensor] = []
        self._tables: list[tuple[Tensor, Leaves]] = []
        self._pointed: dict[tuple[int, ...], Tensor] = {}  # tables of steps outside of graphs, by their contents
        self._held: list[Tensor] = []  # by the graph that is being captured

    def _launch(self, chunks: list[tuple[int, int]], is_full: bool) -> Launch:
        programs = 3  # under the interpreter: a few, so that the loops are exercised
        if self.device.type == "cuda":
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
            programs = -(-processors * _WAVES // self.num_chains)
        return Launch(self.put(chunks, torch.int32), len(chunks), min(len(chunks), programs), is_full)

    def put(self, values: Any, dtype: torch.dtype) -> Tensor:
        """A tensor on the device."""
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)

    def point_at(self, leaves: Leaves) -> Tensor:
        """A table of the addresses of gradients: contiguous float32, alive until the step is done.

        While a CUDA graph is captured the table is one of `reserve`, and is filled in by `resolve`, after the capture.
        """
        if _is_capturing(self.device):
            table = self._spare.pop()
            self._tables.append((table, leaves))
            return table
        addresses = tuple(x.data_ptr() for x in leaves)
        if addresses not in self._pointed:  # memory is reused: a copy from the host at each step would stall it
            if len(self._pointed) == _TABLES:
                self._pointed.clear()
            self._pointed[addresses] = self.put(addresses, torch.int64)
        return self._pointed[addresses]

    def reserve(self) -> None:
        """Allocate the tables of a graph, before its capture: in the graph's own memory every replay would overwrite them."""
        self._tables, self._held = [], []  # of a capture that failed
        self._spare = [torch.zeros(self.num_leaves, dtype=torch.int64, device=self.device) for _ in range(_TABLES)]

    def resolve(self) -> Any:
        """Fill in the tables of a graph that was just captured. What is returned must live as long as the graph."""
        filled, held = self._tables, self._held
        self._tables, self._held = [], []
        for table, leaves in filled:
            table.copy_(torch.tensor([x.data_ptr() for x in leaves], dtype=torch.int64))
        return filled, held

    def numbers(self, value: Setting) -> Tensor:
        """A setting as one number for each chain, (chains,), float64, on the device."""
        if isinstance(value, Tensor) and value.dim() == 1:
            return value.to(torch.float64)
        constant = _constant(float(value), self.num_chains, self.device)
        if _is_capturing(self.device):
            self._held.append(constant)
        return constant

    def products(self, grad: Leaves, pulls: Tensor, *, group: int) -> Tensor:
        """theta . (grad + pull theta) of each leaf, (chains, leaves), float64, at theta or at its copy."""
        if self.largest >= _LARGE:
            points = self.groups[group]
            columns = [_dots(p, g) + pull * _dots(p, p) for p, g, pull in zip(points, grad, pulls, strict=True)]
            return torch.stack(columns, 1)
        out = torch.empty(self.num_chains, self.num_leaves, dtype=torch.float64, device=self.device)
        _products[(self.num_leaves, self.num_chains)](
            self.table[group], self.point_at(contiguous(grad)), self.sizes, pulls, out, SIZE=BLOCK, num_warps=WARPS
        )
        return out

    def keep(self, accepted: Tensor, moved: Tensor, kept: Tensor | None, fresh: Tensor | None) -> None:
        """Rejected chains back to where they were; the new gradient kept where accepted."""
        has_grad = kept is not None
        launch = self.everything
        theta, copy = self.table[0], self.table[1]
        _keep[(launch.width, self.num_chains)](
            theta, copy, theta if kept is None else kept, theta if fresh is None else fresh, self.sizes, launch.chunks,
            launch.num_chunks, accepted, moved, HAS_GRAD=has_grad, SIZE=BLOCK, num_warps=WARPS,
        )  # fmt: skip


class OnePass:
    """What the passes of every kernel offer to the chains (`kernels.backend`)."""

    places: Places
    pulls: Tensor
    """precision / scale of each leaf, as far as the prior is added here."""

    def reserve(self) -> None:
        """Allocate what a graph must not allocate itself, before its capture."""
        self.places.reserve()

    def resolve(self) -> Any:
        """Fill in the addresses of a graph that was just captured."""
        return self.places.resolve()

    def products(self, grad: Leaves, *, at_copy: bool) -> Tensor:
        """theta . grad V of each leaf, (chains, leaves), float64, at the copy of theta or where the chains stand."""
        return self.places.products(grad, self.pulls, group=int(at_copy))


class InPlaceMove:
    """A proposal in the place of theta (`kernels.proposal.InPlace`).

    Args:
        places: of the weights.
        moved: (chains,), float64: whether each chain was touched by the pass.
    """

    def __init__(self, places: Places, moved: Tensor) -> None:
        self._places, self._moved = places, moved
        self.current: Leaves = places.groups[1]

    def decide(
        self,
        acceptance: AcceptanceTest,
        potential: Potential,
        here: Evaluation,
        there: Callable[[], Evaluation],
        log_q_ratio: Callable[[], Tensor],
        move: Move,
        state: ChainState,
    ) -> Info | None:
        has_test = acceptance.needs_noise
        if not acceptance.uses_batch_only or (potential.fixed and not has_test) or here.losses.dtype not in _LOSS_TYPES:
            return None
        after = there() if has_test else here
        if after.losses.shape != here.losses.shape:
            potential.compare(here, after)  # raises the error that names both shapes
        num_chains, places = self._places.num_chains, self._places
        num_losses = here.losses[0].numel()
        per_example = here.losses.dim() > 1
        scales = places.numbers(potential.scale)
        noise = _noise_scales(potential, num_losses if per_example else 0)
        rows = torch.empty(len(Info._fields), num_chains, dtype=torch.float64, device=places.device)
        flags = torch.empty(2, num_chains, dtype=torch.uint8, device=places.device)
        step = state.step  # on the device, in a graph
        if not isinstance(step, Tensor):
            step = torch.full((1,), step, dtype=torch.int64, device=places.device)
        prior_there = after.log_prior if has_test or move.log_prior is None else move.log_prior[1]
        if not has_test and move.log_prior is None and potential.is_bounded:
            prior_there = potential.log_prior(move.proposed)
        squares = move.squares[0] if len(move.squares) == 1 else torch.stack(move.squares).sum(0)
        ratio, log_uniform = (log_q_ratio(), move.log_uniform) if has_test else (squares, squares)
        assert log_uniform is not None
        _decide[(num_chains,)](
            here.losses.contiguous(), after.losses.contiguous(), num_losses, here.log_prior, prior_there, ratio, log_uniform,
            squares, squares if move.step_to_noise is None else move.step_to_noise, scales,
            places.numbers(noise), state.frozen_at, step, rows, flags,
            (float(num_losses) if per_example else math.nan) if has_test else 0.0,
            HAS_TEST=has_test, HAS_RATIO=move.step_to_noise is not None, SIZE=_LOSSES, num_warps=WARPS,
        )  # fmt: skip
        fields = list(rows.unbind())
        fields[5], fields[6] = flags.view(torch.bool).unbind()
        return Info(*fields)

    def keep(self, is_accepted: Tensor, new_grad: Leaves | None, old_grad: Leaves | None) -> Leaves | None:
        kept = fresh = None
        if new_grad is not None and old_grad is not None:
            new_grad, old_grad = contiguous(new_grad), contiguous(old_grad)
            kept, fresh = self._places.point_at(old_grad), self._places.point_at(new_grad)
        self._places.keep(is_accepted.view(torch.uint8), self._moved, kept, fresh)
        return old_grad

    def undo(self) -> None:
        rejected = torch.zeros(self._places.num_chains, dtype=torch.uint8, device=self._places.device)
        self._places.keep(rejected, self._moved, None, None)  # not the chains that were not touched: they have no copy


_LOSS_TYPES = (torch.float32, torch.float64)


def contiguous(leaves: Leaves) -> Leaves:
    """Gradients that can be read 16 bytes at once: autograd may return slices of a larger tensor."""
    return tuple(
        x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format) for x in leaves
    )


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """a . b of each chain, (chains,), float64."""
    rows = zip(a.reshape(len(a), -1), b.reshape(len(b), -1), strict=True)
    return torch.stack([torch.dot(x, y) for x, y in rows]).double()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_constants: dict[tuple[str, int, torch.device], Tensor] = {}


def _constant(value: float, num_chains: int, device: torch.device) -> Tensor:
    """A number for every chain, made once."""
    key = (repr(value), num_chains, device)
    if key in _constants:
        return _constants[key]
    made = torch.full((num_chains,), value, dtype=torch.float64, device=device)
    if _is_capturing(device):
        return made  # it belongs to the graph
    if len(_constants) > 256:
        _constants.clear()
    return _constants.setdefault(key, made)


def _noise_scales(potential: Potential, size: int) -> Setting:
    """What turns the standard deviation of the differences into the noise of Y (`Comparison.batch_noise`)."""
    if potential.fixed:
        return 0.0
    if size < 2:
        return math.nan
    unseen = 1 - size * potential.inverse_temperature / potential.scale
    if isinstance(unseen, Tensor):
        return potential.scale * (unseen.clamp_min(0) / size).sqrt()
    scale: Setting = potential.scale * math.sqrt(max(0.0, unseen) / size)
    return scale


class Keys:
    """Where a pass takes its random numbers from: the keys of the chains, and the number of the last draw.

    `Counters` have lasting keys and number their draws. A torch generator gives a fresh key for every step.
    """

    def __init__(self, places: Places) -> None:
        self._shape, self._device = (places.num_chains,), places.device
        self._last = places.put([8], torch.int64)  # numbers of draws under a fresh key; any will do

    def next(self, generator: Randomness, count: int) -> tuple[Tensor, Tensor]:
        """The keys, (chains,), and the number of the last of `count` draws, (1,): int64, on the device."""
        if isinstance(generator, Counters):
            return generator.next(count)
        assert isinstance(generator, torch.Generator)
        lowest, highest = -(2**63), 2**63 - 1
        keys = torch.randint(lowest, highest, self._shape, dtype=torch.int64, device=self._device, generator=generator)
        return keys, self._last


def by_leaf_and_chain(values: Sequence[Setting], num_chains: int) -> list[list[float]]:
    """Settings of leaves as rows of numbers, one for each chain. Waits for the device where they lie there."""
    return [x.tolist() if isinstance(x, Tensor) and x.dim() == 1 else [float(x)] * num_chains for x in values]


def is_same(before: tuple[Any, ...] | None, now: tuple[Any, ...]) -> bool:
    """Whether settings are those of the last upload. Tensors are compared by identity: their values are on the device."""
    if before is None:
        return False
    try:
        return all(a is b or bool(a == b) for a, b in zip(before, now, strict=True))
    except RuntimeError:  # two tensors
        return False
