r"""The resolution of U in nats, which limits every Metropolis decision: the rounding of the losses, times lambda * n.

Two things are measured. The *spacing* of floating-point losses, lambda * n * ulp(mean loss): with n = 20,000 and a
float32 mean loss of 1,000 it is 1.2 nats, and the weights came out with .2 to .7 of their spread. And, if the loss is
computed in reduced precision (autocast to bfloat16, TF32), the *roughness* of U along a short line: differences of
order k of a smooth function vanish as the points come closer, while those of noise with standard deviation s are s *
sqrt((2k choose k)) (Hamming's difference table; More and Wild 2011, "Estimating computational noise").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adammcmc.target.leaves import Leaves, Setting, per_chain
from adammcmc.target.potential import Potential
from adammcmc.target.sums import sums

__all__ = ["Resolution", "agree", "measure", "roughness", "spacing"]

_COARSE = 0.1  # nats: a coarser resolution is reported
_SAME = 0.05  # nats: a harmless difference between two evaluations at one point
_POINTS = 9
_STEP = 2.0**-9  # of the weights' size: half the spacing of bfloat16, below which a rounded weight does not change


def spacing(losses: Tensor, scale: Setting) -> Tensor:
    """The resolution of U, (chains,), due to the dtype of the losses, (chains,) or per example, (chains, batch)."""
    size = losses.detach().abs()
    ulp = (torch.nextafter(size, torch.full_like(size, torch.inf)) - size).double()
    if losses.dim() == 1:
        return scale * ulp
    # the rounding errors of the examples are independent, and uniform within half a spacing
    return scale * ulp.square().mean(1).sqrt() / math.sqrt(12 * losses.shape[1])


def roughness(energy: Callable[[Leaves], Tensor], params: Leaves) -> Tensor:
    """The standard deviation of the noise of U, (chains,), float64, between points that bfloat16 barely resolves.

    The larger of two lines, as rounding may have little effect along one of them. Costs eighteen evaluations. `energy`
    gives U up to a constant, (chains,), float64.
    """
    return torch.stack([_roughness_along(_direction(params, seed), energy, params) for seed in range(2)]).amax(0)


def _direction(params: Leaves, seed: int) -> Leaves:
    """Random, one step long. The fixed seed keeps a run independent of whether this is measured."""
    generator = torch.Generator(params[0].device).manual_seed(seed)
    directions = []
    for leaf in params:
        size = leaf.detach().double().flatten(1).square().mean(1).sqrt().to(leaf.dtype)
        noise = torch.randn(leaf.shape, dtype=leaf.dtype, device=leaf.device, generator=generator)
        directions.append(noise * (_STEP * per_chain(size, leaf)))
    return tuple(directions)


def _roughness_along(direction: Leaves, energy: Callable[[Leaves], Tensor], params: Leaves) -> Tensor:
    shifts = [k - (_POINTS - 1) / 2 for k in range(_POINTS)]
    values = [energy(tuple(x + shift * d for x, d in zip(params, direction, strict=True))) for shift in shifts]
    table = torch.stack(values)
    found = []
    for order in range(1, 7):
        table = table.diff(dim=0)
        if order > 2:  # the smooth part has nearly vanished by then
            found.append(table.square().mean(0).sqrt() / math.sqrt(math.comb(2 * order, order)))
    return torch.stack(found).median(0).values  # the smallest varies by a factor of ten


class Resolution(NamedTuple):
    """The resolution of U in nats, and its cause."""

    nats: float
    reason: str

    @property
    def is_coarse(self) -> bool:
        """Whether to report it."""
        return self.nats > _COARSE

    @property
    def approximation(self) -> str:
        """In the words of `Sampler.approximations`."""
        return f"U is known to about {self.nats:.2g} nats only ({self.reason})"

    @property
    def warning(self) -> str:
        """With a remedy."""
        remedy = (
            "Compute the loss in float32: without autocast, with weights in float32, and on a GPU with "
            "torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False."
            if "arithmetic" in self.reason
            else 'Return the per-example losses, shape (batch,) (reduction="none"): they are summed in float64.'
        )
        return f"{self.approximation}: acceptance depends on differences of about a nat, so this error matters. {remedy}"


def measure(
    potential: Potential, params: Leaves, losses: Tensor, *, reduced: Sequence[str], chunk_size: int | None
) -> Resolution:
    """The resolution of U in the acceptance test of the worst chain.

    Args:
        potential: of this step.
        params: the current weights.
        losses: of this step, as in `Evaluation.losses`.
        reduced: kinds of arithmetic below float32 in the loss. If there are any, U is evaluated eighteen times.
        chunk_size: examples per forward pass of a full-data test; None for a test on the batch.
    """
    if not reduced:
        nats = spacing(losses, potential.scale) if chunk_size is None else torch.zeros(1)
        return Resolution(float(nats.max()), f"spacing of {str(losses.dtype).removeprefix('torch.')} mean losses")
    reference = None

    def energy(point: Leaves) -> Tensor:
        nonlocal reference
        if chunk_size is not None:
            n = potential.num_examples or 0
            chunks = (slice(i, min(i + chunk_size, n)) for i in range(0, n, chunk_size))
            parts = [potential.example_losses(point, chunk).double().sum(1) for chunk in chunks]
            return potential.inverse_temperature * sums.over_examples(torch.stack(parts).sum(0))
        there = potential.evaluate(point, with_grad=False)
        reference = there if reference is None else reference
        return potential.compare(reference, there)

    return Resolution(float(roughness(energy, params).max()), f"{' and '.join(reduced)} arithmetic in the loss")


def agree(again: Tensor, losses: Tensor, scale: Setting, *, exactly: bool = False, slack: float = 0.0) -> bool:
    """Whether two evaluations at one point, (chains,) or (chains, batch), may come from one function of the weights.

    They may differ by the rounding of reordered sums, by a small fraction of a nat, and by `slack`, a fraction of the
    mean loss. With `exactly`, they must be equal on the CPU, and equal up to that rounding on an accelerator.
    """
    if again.shape != losses.shape:
        return False
    a, b = again.double(), losses.double()
    if not bool((a.isfinite() & b.isfinite()).all()):
        return torch.allclose(a, b, rtol=1e-4, equal_nan=True)
    difference, size = (x.flatten(1).mean(1) if x.dim() > 1 else x for x in (a - b, b.abs()))
    allowed = scale * max(8 * torch.finfo(losses.dtype).eps, slack) * size
    if not exactly:
        allowed = allowed.clamp(min=_SAME)
    elif losses.device.type == "cpu":
        allowed = torch.zeros_like(size)
    return bool((scale * difference.abs() <= allowed).all())
