"""Settings of a tagger: how it is trained, how it is sampled. The command line makes its options from these fields.

A new setting is one field, with its line under "Args". This module does not import torch, so that `--help` is instant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

    from adammcmc.jets.data import Jets

__all__ = ["ForcesName", "NetworkName", "Precision", "SamplerName", "Sampling", "Training"]

NetworkName = Literal["particlenet", "lite"]
Precision = Literal["float32", "bfloat16"]
SamplerName = Literal["adam-mcmc", "as-released", "underdamped", "microcanonical"]
ForcesName = Literal["float32", "tf32", "bfloat16"]


@dataclass(frozen=True)
class Training:
    """How a tagger is trained: by Adam, at a constant learning rate first, which then decays to a hundredth.

    Args:
        network: "particlenet" (366,160 parameters) or "lite" (26,416).
        epochs: passes over the training jets.
        batch_size: jets in a step.
        lr: learning rate of Adam.
        betas: of Adam; the paper's are 0.99 and 0.99.
        flat: fraction of the steps at full learning rate.
        seed: fixes the initial weights, dropout and the order of the jets.
        held_out: fraction of the jets to test on, not to train on.
    """

    network: NetworkName = "particlenet"
    epochs: int = 10
    batch_size: int = 512
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.99)
    flat: float = 0.5
    seed: int = 0
    held_out: float = 0.0

    def __post_init__(self) -> None:
        if self.network not in get_args(NetworkName):
            raise ValueError(f"there is no network '{self.network}'. Known: {', '.join(get_args(NetworkName))}.")
        if self.epochs < 1 or self.batch_size < 2:
            raise ValueError(f"`epochs` must be positive and `batch_size` at least 2, got {self.epochs} and {self.batch_size}.")
        if not 0 < self.lr < float("inf") or not 0 <= self.flat <= 1:
            raise ValueError(f"`lr` must be positive and `flat` between 0 and 1, got {self.lr} and {self.flat}.")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"`held_out` must be at least 0 and less than 1, got {self.held_out}.")

    def split(self, jets: Jets) -> tuple[Jets, Jets]:
        """Training jets and held-out jets. The same jets are always split in the same way."""
        train, test = self.split_rows(len(jets))
        return jets[train], jets[test]

    def split_rows(self, number: int) -> tuple[Tensor, Tensor]:
        """Indices of the training jets and of the held-out jets, out of this many."""
        mixed = _permutation(number)
        cut = number - round(self.held_out * number)
        return mixed[:cut], mixed[cut:]

    def split_files(self, files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
        """Training files and held-out files, for streamed jets: about that fraction of the files, at least one."""
        order = _permutation(len(files)).tolist()
        number = max(1, round(self.held_out * len(files))) if self.held_out > 0 else 0
        if number >= len(files):
            raise ValueError(f"of {len(files)} files none is left to train on: write the jets in shards, or hold out none.")
        cut = len(files) - number
        return [files[i] for i in sorted(order[:cut])], [files[i] for i in sorted(order[cut:])]

    def factor(self, step: int, total: int) -> float:
        """Factor of the learning rate at this step."""
        left = (total - step) / max(1.0, total * (1 - self.flat))
        return 1.0 if left >= 1 else float(0.01 ** (1 - left))


@dataclass(frozen=True)
class Sampling:
    """How the weights of a trained tagger are sampled.

    Args:
        sampler: "adam-mcmc" is Algorithm 1 of the paper, approximate; "as-released" is the variant in the published code;
            "underdamped" is exact; "microcanonical" has no test, and moves where exact chains of ParticleNet hardly do. These
            two tune themselves and use all jets in each step (they ignore `lr`, `sigma` and `batch_size`). Each of their chains
            starts from its own network, trained like the tagger but from another seed.
        lr: learning rate of the Adam step.
        betas: of its moments, which start from those of the training.
        sigma: standard deviation of the noise on one weight; larger values are rejected more often.
        sigma_along: standard deviation of the noise along the Adam step, in steps; at 0 nearly every move is rejected.
        inverse_temperature: lambda, the factor of the sum of all losses; 1 is the Bayesian posterior.
        prior_gain: of a Gaussian prior, `Gaussian.fan_in`: sd gain / sqrt(fan_in) for weights, 1 for biases and BatchNorm.
            0 is flat (the paper's, on a large ball): there is then no posterior unless the loss bounds it.
        batch_size: jets in a step.
        burn_in: steps to discard at the start; by default a quarter of the steps that follow, or until the sampler has adapted.
        gap: steps between two draws; by default 100, with all jets in each step 10.
        num_draws: draws of each chain; by default 10, with all jets in each step 100.
        num_chains: chains, one after the other; by default 1, with all jets in each step 4.
        forces: the arithmetic of gradients of all jets; "underdamped" stays exact in any. By default bfloat16 on a GPU.
        num_leapfrog: gradients of "underdamped" for each test; by default 4 on a GPU and 1 on a CPU.
        in_training_mode: BatchNorm on batch statistics, and dropout, as in the paper. By default the network runs in
            evaluation mode, so that the loss is one function of the weights.
        seed: fixes every random number of the chains.
    """

    sampler: SamplerName = "adam-mcmc"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.99, 0.99)
    sigma: float = 3e-4
    sigma_along: float = 2.0
    inverse_temperature: float = 1.0
    prior_gain: float | None = 2.0
    batch_size: int | None = 512
    burn_in: int | None = None
    gap: int | None = None
    num_draws: int | None = None
    num_chains: int | None = None
    forces: ForcesName | None = None
    num_leapfrog: int | None = None
    in_training_mode: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampler not in get_args(SamplerName):
            raise ValueError(f"there is no sampler '{self.sampler}'. Known: {', '.join(get_args(SamplerName))}.")
        if self.forces is not None and not self.uses_all_jets:
            raise ValueError("`forces` is a setting of the samplers that use all jets, 'underdamped' and 'microcanonical'.")
        if self.num_leapfrog is not None and self.sampler != "underdamped":
            raise ValueError("`num_leapfrog` is a setting of the sampler 'underdamped'.")

    @property
    def uses_all_jets(self) -> bool:
        """Whether each step of the sampler uses all jets."""
        return self.sampler in ("underdamped", "microcanonical")

    def complete(self, *, on_gpu: bool) -> Sampling:
        """The same settings with the defaults of this sampler for those that are None."""
        usual: dict[str, Any] = {"gap": 100, "num_draws": 10, "num_chains": 1}
        if self.uses_all_jets:
            usual = {"gap": 10, "num_draws": 100, "num_chains": 4, "forces": "bfloat16" if on_gpu else "float32"}
        if self.sampler == "underdamped":
            usual["num_leapfrog"] = 4 if on_gpu else 1
        return replace(self, **{name: value for name, value in usual.items() if getattr(self, name) is None})


def _permutation(number: int) -> Tensor:
    import torch

    return torch.randperm(number, generator=torch.Generator().manual_seed(20_190_221))
