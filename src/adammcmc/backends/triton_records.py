"""The record of a captured step in one launch (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["record_step"]


@triton.jit
def _record(rows, slot_at, num_rows, row, sum_rates, clock, num_chains, NUM_FIELDS: tl.constexpr, SIZE: tl.constexpr):
    slot = tl.load(slot_at)
    into = rows + slot * NUM_FIELDS * num_chains
    for start in range(0, NUM_FIELDS * num_chains, SIZE):
        i = start + tl.arange(0, SIZE)
        tl.store(into + i, tl.load(row + i, mask=i < NUM_FIELDS * num_chains), mask=i < NUM_FIELDS * num_chains)
    for start in range(0, num_chains, SIZE):
        i = start + tl.arange(0, SIZE)
        rate = tl.load(row + 4 * num_chains + i, mask=i < num_chains, other=0.0)  # the field `acceptance_rate`
        tl.store(sum_rates + i, tl.load(sum_rates + i, mask=i < num_chains, other=0.0) + rate, mask=i < num_chains)
    tl.debug_barrier()  # every thread has read the slot
    tl.store(slot_at, (slot + 1) % num_rows)
    tl.store(clock, tl.load(clock) + 1)


def record_step(rows: Tensor, slot: Tensor, row: Tensor, sum_rates: Tensor, clock: Tensor) -> None:
    """Write `row`, (fields, chains), into the ring; advance its slot, the sum of acceptance rates and the clock."""
    num_rows, num_fields, num_chains = rows.shape
    _record[(1,)](rows, slot, num_rows, row, sum_rates, clock, num_chains, NUM_FIELDS=num_fields, SIZE=1024)
