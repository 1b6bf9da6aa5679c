"""Heuristics for the settings of Algorithm 1: suggestions from short pilot runs, and the paper's recipe for sigma."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adammcmc.samplers.adam import AdamMCMC
from adammcmc.samplers.adaptation import BurnIn
from adammcmc.samplers.progress import track
from adammcmc.target.likelihood import Loss
from adammcmc.target.priors import Prior

__all__ = ["Calibration", "CalibrationRow", "Suggestion", "calibrate_sigma", "suggest"]

_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
_MOST_HALVINGS = 8
_TOLERANCE = 0.06  # of the acceptance that a pilot reaches

_Closures = Callable[[nn.Module], Callable[[], Tensor]]  # model -> the per-example losses of a random batch, as a function


@dataclass(frozen=True)
class Suggestion:
    """Settings for `AdamMCMC`, with the reasons. `AdamMCMC(model.parameters(), num_data=n, **suggestion.options)`."""

    lr: float
    sigma: float
    sigma_along: float
    inverse_temperature: float
    acceptance: float
    """The acceptance rate of the pilot run with these settings."""
    reasons: dict[str, str]

    @property
    def options(self) -> dict[str, float]:
        """The settings as keyword arguments."""
        return {name: getattr(self, name) for name in ("lr", "sigma", "sigma_along", "inverse_temperature")}

    def __str__(self) -> str:
        return "\n".join(f"{name} = {value:.4g}: {self.reasons[name]}" for name, value in self.options.items())


def suggest(
    model: nn.Module,
    data: Sequence[Tensor],
    loss: Callable[..., Tensor],
    *,
    batch_size: int = 512,
    prior: Prior | None = None,
    target_acceptance: float = 0.6,
    num_steps: int = 600,
    seed: int = 0,
    progress: bool = True,
) -> Suggestion:
    """Propose lr, sigma, sigma_along and lambda for `AdamMCMC` from a short pilot run on a copy of the model.

    The learning rate is the largest that keeps Adam's loss near the best of a small grid. sigma and sigma_along are
    adapted to the target acceptance. If the step itself is rejected, the learning rate is halved until it is not.
    lambda is 1, Bayes. A good acceptance rate says nothing about the bias of Algorithm 1.

    Args:
        model: trained, or in training; it is not changed.
        data: tensors (inputs, targets) of the training set.
        loss: a function of outputs and targets, such as `F.cross_entropy`.
        batch_size: of the run that the settings are for.
        prior: as in `AdamMCMC`.
        target_acceptance: the acceptance rate to reach.
        num_steps: of each pilot run.
        seed: of the batches and the noise.
        progress: show a bar if standard error is a terminal.
    """
    inputs, targets = data
    n = len(inputs)
    if n == 0:
        raise ValueError("`data` is empty.")
    generator, losses = torch.Generator().manual_seed(seed), Loss(loss)

    def closure(copied: nn.Module) -> Callable[[], Tensor]:
        rows = torch.randperm(n, generator=generator)[: min(batch_size, n)].to(inputs.device)
        return partial(losses, copied, (inputs[rows], targets[rows]))

    lr = _largest_rate(model, closure, progress)
    reason = f"the largest of {', '.join(f'{r:g}' for r in _RATES)} whose loss after 50 Adam steps is within 5% of the best"
    floor = (1 + target_acceptance) / 2  # the acceptance of the proposal alone: halfway between the target and 1
    burn_in = BurnIn(num_steps=num_steps, target_acceptance=target_acceptance, proposal_acceptance=floor)
    for halvings in range(_MOST_HALVINGS + 1):
        copied, noise = copy.deepcopy(model), torch.Generator(inputs.device).manual_seed(seed)
        options = {"sigma": lr / 3, "sigma_along": 2.0, "prior": prior, "burn_in": burn_in, "generator": noise}
        sampler = AdamMCMC(copied.parameters(), lr=lr, num_data=n, **options)  # type: ignore[arg-type]
        reached = _pilot(sampler, partial(closure, copied), num_steps, progress)
        if abs(reached - target_acceptance) < _TOLERANCE or halvings == _MOST_HALVINGS:
            break
        lr /= 2
    if halvings:
        reason += f", halved {halvings} times because the step itself was rejected"
    sigma, sigma_along = (float(sampler.param_groups[0][name]) for name in ("sigma", "sigma_along"))
    along = f"the proposal alone is then accepted at {floor:.2f}, for the length of Adam's steps in the pilot run"
    if sigma_along == 0:
        along = f"Adam's steps are shorter than the noise: the proposal alone is accepted above {floor:.2f} without it"
    reasons = {
        "lr": reason,
        "sigma": f"adapted to an acceptance of {target_acceptance:.2f}; the pilot run then reached {reached:.2f}",
        "sigma_along": along,
        "inverse_temperature": "1 is Bayes, if the loss is a negative log likelihood; report any lower (hotter) choice",
    }
    return Suggestion(lr, sigma, sigma_along, 1.0, reached, reasons)


def _largest_rate(model: nn.Module, closure: _Closures, progress: bool) -> float:
    """The largest learning rate whose loss after a few steps of Adam is within 5% of the best."""
    rates = {lr: _adam_loss(copy.deepcopy(model), closure, lr) for lr in track(_RATES, "learning rates", show=progress)}
    best = min(rates.values())
    if not math.isfinite(best):
        raise ValueError("the loss is not finite at any learning rate: check the model and the data.")
    return max(rate for rate, value in rates.items() if value <= best + 0.05 * abs(best))


def _adam_loss(model: nn.Module, closure: _Closures, lr: float) -> float:
    """Mean loss over the last ten of 50 steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.99, 0.99))
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        value = closure(model)().mean()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(value.detach()))
    late = sum(losses[-10:]) / 10
    return late if math.isfinite(late) else math.inf


def _pilot(sampler: AdamMCMC, closure: Callable[[], Callable[[], Tensor]], num_steps: int, progress: bool) -> float:
    """Adapt, then measure the acceptance rate with fixed settings."""
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a bad outcome of burn-in is a result here
        for _ in track(range(num_steps + num_steps // 2), "pilot", show=progress):
            sampler.step(closure())
            if not sampler.is_adapting:
                rates.append(sampler.info.acceptance_rate)
    return float(torch.stack(rates).mean())


class CalibrationRow(NamedTuple):
    """Held-out predictions at one sigma."""

    sigma: float
    accuracy: float
    confidence: float
    """Mean probability of the predicted class."""
    nll: float


@dataclass(frozen=True)
class Calibration:
    """The result of `calibrate_sigma`: a heuristic, tuned on held-out data."""

    sigma: float
    is_bracketed: bool
    """Whether confidence fell to the accuracy within the given sigmas."""
    rows: tuple[CalibrationRow, ...]

    def __str__(self) -> str:
        lines = [
            f"sigma {r.sigma:.3g}: accuracy {r.accuracy:.3f}, confidence {r.confidence:.3f}, NLL {r.nll:.3f}" for r in self.rows
        ]
        note = "" if self.is_bracketed else " (confidence never fell to the accuracy: the last sigma tried)"
        return "\n".join([*lines, f"chosen by the paper's heuristic: {self.sigma:.3g}{note}"])


def calibrate_sigma(draw: Callable[[float], Tensor], targets: Tensor, sigmas: Sequence[float]) -> Calibration:
    """The paper's recipe: start with a low sigma, and raise it until predictions are calibrated on held-out data.

    **A heuristic.** It matches one average on these data by adding noise. It does not make the draws those of the
    posterior, and the held-out data can then no longer be used to judge calibration. It chooses the first sigma at
    which the mean confidence is no higher than the accuracy.

    Args:
        draw: runs a chain with the given sigma (from the same start each time) and returns class probabilities on
            held-out data, (draws, examples, classes).
        targets: the held-out classes, (examples,).
        sigmas: the values to try, ascending.
    """
    sigmas = [float(sigma) for sigma in sigmas]
    if sigmas != sorted(sigmas) or not sigmas:
        raise ValueError(f"`sigmas` must be ascending, and not empty, got {sigmas}.")
    rows: list[CalibrationRow] = []
    for sigma in sigmas:
        probabilities = draw(sigma)
        if probabilities.dim() != 3 or probabilities.shape[1] != len(targets):
            raise ValueError(
                f"`draw` must return probabilities of shape (draws, {len(targets)}, classes), got {tuple(probabilities.shape)}."
            )
        mean = probabilities.mean(0)
        if bool((mean < 0).any()) or not torch.allclose(mean.sum(1), torch.ones_like(mean[:, 0]), atol=1e-3):
            raise ValueError("`draw` must return probabilities that sum to 1 over the classes; apply softmax to logits.")
        confidence, predicted = mean.max(1)
        nll = -mean.gather(1, targets[:, None]).clamp_min(1e-12).log().mean()
        rows.append(CalibrationRow(sigma, float((predicted == targets).float().mean()), float(confidence.mean()), float(nll)))
        if rows[-1].confidence <= rows[-1].accuracy:
            return Calibration(sigma, True, tuple(rows))
    return Calibration(rows[-1].sigma, False, tuple(rows))
