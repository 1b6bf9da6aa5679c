"""Running sums of a sampler's steps, on the device: the numbers that `health` judges.

Each series is summed in stretches of equal length, up to 64 of them (512 for the trace of U); when all are full,
neighbours are merged. Memory and the cost of a step do not grow with the run, and adding a step never waits for the
device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adammcmc.kernels.kernel import Info
from adammcmc.target.leaves import Setting

__all__ = ["BLOCK", "PENDING", "SERIES", "BatchSums", "Row", "RunningSums"]

BLOCK = 16
"""Steps that are summed at once."""
PENDING = 4 * BLOCK
"""Steps that wait until they are summed: the operations cost the same for many steps as for one."""
SERIES = (
    *("accepted", "rate", "rise", "known", "potential", "square"),
    *("change", "change_square", "change_known", "noise", "noise_known", "finite"),
)
_POTENTIAL, _SQUARE = SERIES.index("potential"), SERIES.index("square")
Row = Tensor | tuple[Info, Setting] | tuple[Tensor, int, Setting]
"""One step: its series; or its `Info`, or the ring of `PENDING` rows and the row that has it, with the scale of its target."""


class BatchSums:
    """Sums over batches of equal length, on the device; the lengths are on the host."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, most: int = 64) -> None:
        self.sums = torch.zeros(most, *shape, dtype=torch.float64, device=device)
        self.per_batch = 1
        """Blocks in a batch."""
        self.num_blocks = 0

    def add(self, block: Tensor) -> None:
        """Add the sums over one block of steps."""
        if self.num_blocks == len(self.sums) * self.per_batch:
            half = self.sums[0::2] + self.sums[1::2]
            self.sums.zero_()
            self.sums[: len(half)] = half
            self.per_batch *= 2
        self.sums[self.num_blocks // self.per_batch] += block
        self.num_blocks += 1

    def means(self, chain: int) -> Tensor:
        """(full batches, ...) of one chain, on the host."""
        return self.sums[: self.num_blocks // self.per_batch, chain].cpu() / (self.per_batch * BLOCK)


class RunningSums:
    """Running sums of the steps of each chain. `add` never waits for the device.

    Args:
        device: of the chains.
        layers: names of the layers whose temperature is measured.
        sizes: the number of weights in each.
        num_chains: how many chains have sums of their own.
    """

    def __init__(
        self, device: torch.device, layers: Sequence[str] = (), sizes: Sequence[int] = (), num_chains: int = 1
    ) -> None:
        self.device, self.layers, self.sizes = device, list(layers), list(sizes)
        self.num_steps, self.num_gradients = 0, 0.0
        self._num_chains = num_chains
        self.steps = BatchSums((num_chains, len(SERIES)), device)
        self.products = BatchSums((num_chains, len(self.layers)), device)
        self.trace = BatchSums((num_chains,), device, 512)
        """U alone, in shorter batches."""
        self.start: Tensor | None = None
        """Sums of U and U^2 over the chain's first block, which `restarted` keeps."""
        self.change = 0.0
        """How much U has changed at a point, in nats, as far as is known; 0 within rounding."""
        self._pending: list[Row] = []
        self.pending_products: list[Tensor] = []

    def add(self, row: Row) -> None:
        """Add a step on a target with U = scale * mean loss - log prior. A ring is read before its row is overwritten."""
        self.num_steps += 1
        self._pending.append(row)
        if len(self._pending) >= PENDING:
            self.settle()

    def add_products(self, products: Tensor) -> None:
        """Add theta . grad U of each layer at one point of each chain, (chains, layers)."""
        self.pending_products.append(products.double())
        if len(self.pending_products) == BLOCK:
            self.products.add(torch.stack(self.pending_products).sum(0))
            self.pending_products = []

    def settle(self) -> None:
        """Sum the pending steps, block by block; an incomplete last block stays pending."""
        whole = len(self._pending) // BLOCK * BLOCK
        if whole == 0:
            return
        rows = self._rows()
        for start in range(0, whole, BLOCK):
            block = rows[start : start + BLOCK].sum(0)
            self.steps.add(block)
            self.trace.add(block[..., _POTENTIAL])
            if self.start is None:
                # (a list as an index would wait for the device)
                self.start = torch.stack([block[..., _POTENTIAL], block[..., _SQUARE]], -1)
        self._pending = list(rows[whole:].unbind())

    def _rows(self) -> Tensor:
        """The pending steps in order, (steps, chains, series)."""
        parts = []
        for length, group in itertools.groupby(self._pending, key=lambda row: 0 if isinstance(row, Tensor) else len(row)):
            rows: list[Any] = list(group)
            if length == 0:
                parts.append(torch.stack(rows))
                continue
            if length == 2:
                columns = zip(*(info for info, _ in rows), strict=True)
                infos = Info(*(torch.stack([x.double() for x in column]) for column in columns))
            else:
                infos = Info(*torch.stack([ring[row] for ring, row, _ in rows]).unbind(1))
            parts.append(_series(infos, _scales([row[-1] for row in rows], infos.loss.device)))
        return torch.cat(parts)

    def totals(self) -> list[dict[str, float]]:
        """The sum of each series over all steps, `num_steps` and `num_gradients`, of each chain."""
        self.settle()
        sums = self.steps.sums.sum(0)
        sums = sums + self._rows().sum(0) if self._pending else sums
        counts = {"num_steps": self.num_steps, "num_gradients": self.num_gradients}
        return [{**counts, **dict(zip(SERIES, row, strict=True))} for row in sums.tolist()]

    def restarted(self) -> RunningSums:
        """New sums that keep only the level of U at which the chain started."""
        self.settle()
        new = RunningSums(self.device, self.layers, self.sizes, self._num_chains)
        new.start = self.start
        return new

    def state_dict(self) -> dict[str, Any]:
        """All sums, as numbers and tensors."""
        self.settle()
        parts = {"steps": self.steps, "products": self.products, "trace": self.trace}
        return {
            "num_steps": self.num_steps,
            "num_gradients": self.num_gradients,
            **{name: (part.sums.clone(), part.per_batch, part.num_blocks) for name, part in parts.items()},
            "start": self.start,
            "change": self.change,
            "pending": self._rows() if self._pending else None,
            "pending_products": torch.stack(self.pending_products) if self.pending_products else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved sums."""
        if state["steps"][0].shape != self.steps.sums.shape:
            raise IndexError(f"the sums are of {state['steps'][0].shape[1]} chains, not of {self._num_chains}")
        self.num_steps, self.num_gradients = state["num_steps"], state["num_gradients"]
        self.change = state.get("change", 0.0)
        for name, part in (("steps", self.steps), ("products", self.products), ("trace", self.trace)):
            values, part.per_batch, part.num_blocks = state[name]
            part.sums = values.to(self.device, copy=True)
        self.start = None if state["start"] is None else state["start"].to(self.device, copy=True)
        rows, products = (() if state[key] is None else state[key].to(self.device) for key in ("pending", "pending_products"))
        self._pending, self.pending_products = list(rows), list(products)


def _scales(scales: Sequence[Setting], device: torch.device) -> Setting:
    """One scale for all steps, or (steps, 1 or chains) where the temperature changed between them."""
    first = scales[0]
    if all(s is first or (not isinstance(s, Tensor) and not isinstance(first, Tensor) and s == first) for s in scales):
        return first
    rows = [torch.as_tensor(s, dtype=torch.float64).to(device).reshape(-1) for s in scales]
    return torch.stack([row.expand(max(len(r) for r in rows)) for row in rows])


def _series(infos: Info, scale: Setting) -> Tensor:
    """(steps, chains, series) from fields of shape (steps, chains)."""
    change = scale * (infos.proposed_loss - infos.loss)
    # a test on examples other than the step's batch reports the change of U, not that of the batch's loss
    change = torch.where(change.isnan(), infos.log_q_ratio - infos.log_ratio, change)
    columns = {
        "accepted": infos.is_accepted,
        "rate": infos.acceptance_rate,
        "rise": (infos.log_ratio > 0).double(),
        "known": infos.log_ratio.isnan().logical_not().double(),
        "potential": infos.potential,
        "square": infos.potential.square(),
        "change": torch.where(change.isfinite(), change, 0.0),
        "change_square": torch.where(change.isfinite(), change.square(), 0.0),
        "change_known": change.isfinite().double(),
        "noise": infos.log_ratio_noise.square().nan_to_num(nan=0.0),
        "noise_known": infos.log_ratio_noise.isnan().logical_not().double(),
        "finite": infos.is_finite,
    }
    return torch.stack([columns[name] for name in SERIES], -1)
