"""The size of a replication, and the paper's numbers in this library's units."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from adammcmc.jets.tagger import best_device

PAPER_PARAMS = 366_160
"""Weights of the paper's ParticleNet. Nominal sigma and sigma_Delta are divided by the root of this, on any network."""

Size = Literal["lite", "particlenet"]


@dataclass(frozen=True)
class Preset:
    """Sizes of a replication.

    Args:
        name: smoke, small, h200 or paper.
        network: of the scans.
        num_train: training jets, half top and half QCD.
        num_test: test jets.
        num_others: out-of-distribution jets of each kind, at most.
        batch_size: jets in a step.
        steps: of a chain, burn-in included.
        long_steps: of the chains and trainings of Figure 1, the paper's 100 epochs; 0 is `steps`.
        num_draws: of a chain; the paper's 10.
        seeds: runs of each setting.
        thin: take every `thin`-th point of a scan, and both ends.
        anchors: also run some settings of each figure on the paper's network.
        compared_data: jets of Figure 4, all of which the full-data test reads in each step.
        exact_data: jets of the exact chains.
        exact_steps: of the exact chains, burn-in included.
        exact_chains: of each setting.
        precision: of the network in trials that are not exact.
        device: "" is the GPU if there is one.
    """

    name: str
    network: Size = "lite"
    num_train: int = 20_000
    num_test: int = 6_000
    num_others: int = 800
    batch_size: int = 512
    steps: int = 1_200
    long_steps: int = 0
    num_draws: int = 10
    seeds: int = 3
    thin: int = 1
    anchors: bool = True
    compared_data: int = 5_000
    exact_data: int = 1_000
    exact_steps: int = 4_000
    exact_chains: int = 3
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    device: str = ""

    @property
    def burn_in(self) -> int:
        """The paper's fraction: 48 of 100 epochs, rounded to one half."""
        return self.steps // 2

    @property
    def long(self) -> dict[str, Any]:
        """Steps and burn-in of the long runs, as options of a trial."""
        steps = self.long_steps or self.steps
        return {"steps": steps, "burn_in": steps // 2}

    def points(self, values: tuple[float, ...], at_least: tuple[float, ...] = ()) -> tuple[float, ...]:
        """The points of a scan at this size, including those in `at_least`."""
        kept = set(values[:: self.thin]) | {values[0], values[-1]} | set(at_least)
        return tuple(x for x in values if x in kept)

    @property
    def is_for_gpu(self) -> bool:
        """Whether it would take days on a CPU."""
        return self.num_train * self.steps > 10_000_000

    @property
    def where(self) -> str:
        """The device's name."""
        return self.device or best_device().type


PRESETS = {
    "smoke": Preset(
        "smoke", num_train=128, num_test=80, num_others=4, batch_size=16, steps=8, num_draws=4, seeds=1, thin=99,
        anchors=False, compared_data=64, exact_data=24, exact_steps=24, exact_chains=2, precision="float32", device="cpu",
        long_steps=10,
    ),
    "small": Preset(
        "small", num_train=4_000, num_test=2_000, num_others=200, batch_size=128, steps=240, seeds=2, thin=2,
        anchors=False, compared_data=1_000, exact_data=500, exact_steps=480, exact_chains=2, precision="float32",
    ),
    "h200": Preset("h200", long_steps=3_900),
    "paper": Preset(
        "paper", network="particlenet", num_train=1_200_000, num_test=400_000, num_others=20_000, steps=240_000, seeds=5,
        exact_steps=20_000,
    ),
}  # fmt: skip


def preset(name: str) -> Preset:
    """One of `PRESETS`."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset '{name}'. Known: {', '.join(PRESETS)}.")
    return PRESETS[name]


def along(sigma_delta: float) -> float:
    """The paper's nominal sigma_Delta as this library's `sigma_along`."""
    return sigma_delta / math.sqrt(PAPER_PARAMS)
