"""Suggestions for Algorithm 1 from short pilot runs, and the paper's recipe for sigma. Heuristics, and called so."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adammcmc.samplers.adam import AdamMCMC
from adammcmc.samplers.adaptation import BurnIn
from adammcmc.samplers.progress import track
from adammcmc.target.priors import Prior

__all__ = ["Calibration", "CalibrationRow", "Suggestion", "calibrate_sigma", "suggest"]

_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


@dataclass(frozen=True)
class Suggestion:
    """Settings for `AdamMCMC`, with the reasons. `AdamMCMC(model.parameters(), num_data=n, **suggestion.options)`."""

    lr: float
    sigma: float
    sigma_along: float
    inverse_temperature: float
    acceptance: float
    """What the pilot reached with them."""
    reasons: dict[str, str]

    @property
    def options(self) -> dict[str, float]:
        """As arguments."""
        names = ("lr", "sigma", "sigma_along", "inverse_temperature")
        return {name: getattr(self, name) for name in names}

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
    """Propose lr, sigma, sigma_along and lambda for `AdamMCMC` from a short pilot on a copy of the model.

    The rate is the largest that keeps Adam's loss near the best of a small grid; sigma and sigma_along are adapted to the
    target acceptance; if the step itself is what is rejected, the rate is halved until it is not. lambda is 1, Bayes. A good
    acceptance says nothing about the bias of Algorithm 1.

    Args:
        model: trained, or on its way; it is not changed.
        data: tensors (inputs, targets) of the training set.
        loss: a function of outputs and targets, such as `F.cross_entropy`.
        batch_size: of the batches that will be sampled with.
        prior: as in `AdamMCMC`.
        target_acceptance: what the settings shall reach.
        num_steps: of each pilot run.
        seed: of the batches and the noise.
        progress: show a bar if standard error is a terminal.
    """
    inputs, targets = data
    n = len(inputs)
    if n == 0:
        raise ValueError("`data` is empty.")
    size = min(batch_size, n)
    generator = torch.Generator().manual_seed(seed)
    each = _per_example(loss)

    def closure(copied: nn.Module) -> Callable[[], Tensor]:
        rows = torch.randperm(n, generator=generator)[:size].to(inputs.device)
        return lambda: each(copied(inputs[rows]), targets[rows])

    rates = {lr: _adam_loss(copy.deepcopy(model), closure, lr) for lr in track(_RATES, "learning rates", show=progress)}
    best = min(rates.values())
    if not math.isfinite(best):
        raise ValueError("the loss is not finite at any learning rate: look at the model and the data.")
    lr = max(rate for rate, value in rates.items() if value <= best + 0.05 * abs(best))
    reason = f"the largest of {', '.join(f'{r:g}' for r in _RATES)} whose loss after 50 Adam steps is within 5% of the best"
    halvings = 0
    while True:
        copied = copy.deepcopy(model)
        sampler = AdamMCMC(
            copied.parameters(),
            lr=lr,
            num_data=n,
            sigma=lr / 3,
            sigma_along=2.0,
            prior=prior,
            burn_in=BurnIn(
                num_steps=num_steps, target_acceptance=target_acceptance, proposal_acceptance=_above(target_acceptance)
            ),
            generator=torch.Generator(inputs.device).manual_seed(seed),
        )
        reached = _pilot(sampler, copied, closure, num_steps, progress)
        if abs(reached - target_acceptance) < 0.06 or halvings == 8:
            break
        lr, halvings = lr / 2, halvings + 1
    if halvings:
        reason += f", halved {halvings} times because the step itself was rejected"
    group = sampler.param_groups[0]
    floor = _above(target_acceptance)
    return Suggestion(
        lr,
        float(group["sigma"]),
        float(group["sigma_along"]),
        1.0,
        reached,
        {
            "lr": reason,
            "sigma": f"adapted to an acceptance of {target_acceptance:.2f}; the pilot then had {reached:.2f}",
            "sigma_along": f"so that the proposal alone is accepted at {floor:.2f}, at the length that Adam's steps had"
            if group["sigma_along"] > 0
            else f"Adam's steps are shorter than the noise, so that the proposal alone is accepted above {floor:.2f} anyway",
            "inverse_temperature": "1 is Bayes, if the loss is a negative log likelihood; lower is hotter, a choice to report",
        },
    )


def _above(target: float) -> float:
    """The acceptance of the proposal alone: half of what remains above the target."""
    return (1 + target) / 2


def _adam_loss(model: nn.Module, closure: Callable[[nn.Module], Callable[[], Tensor]], lr: float, num_steps: int = 50) -> float:
    """Mean loss over the last ten of a few steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.99, 0.99))
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        value = closure(model)().mean()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(value.detach()))
    late = sum(losses[-10:]) / len(losses[-10:])
    return late if math.isfinite(late) else math.inf


def _pilot(
    sampler: AdamMCMC,
    model: nn.Module,
    closure: Callable[[nn.Module], Callable[[], Tensor]],
    num_steps: int,
    progress: bool,
) -> float:
    """Adapt, then measure the acceptance with the settings frozen."""
    rates = []

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what burn-in warns of is what is looked for here
        for _ in track(range(num_steps + num_steps // 2), "pilot", show=progress):
            sampler.step(closure(model))
            if not sampler.is_adapting:
                rates.append(sampler.info.acceptance_rate)
    return float(torch.stack(rates).mean())


def _per_example(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss with reduction="none", where it has that."""
    each: Callable[..., Tensor] = loss
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        each = copy.deepcopy(loss)
        setattr(each, "reduction", "none")  # noqa: B010  (a module's attributes are tensors to a type checker)
    elif "reduction" in _parameters(loss):
        each = functools.partial(loss, reduction="none")

    def flat(outputs: Tensor, targets: Tensor) -> Tensor:
        value = each(outputs, targets)
        return value if value.dim() < 2 else value.flatten(1).mean(1)

    return flat


def _parameters(function: Callable[..., Any]) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function that does not tell
        return []


class CalibrationRow(NamedTuple):
    """Held-out predictions at one sigma."""

    sigma: float
    accuracy: float
    confidence: float
    """Mean probability of the predicted class."""
    nll: float


@dataclass(frozen=True)
class Calibration:
    """The outcome of `calibrate_sigma`: a heuristic, tuned on held-out data."""

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
    """The paper's recipe: start with a low sigma, and raise it until the predictions are calibrated on held-out data.

    **A heuristic.** It matches one average on these data by way of added noise; it does not make the draws those of the
    posterior, and the held-out data are then used up for judging calibration. The first sigma at which the mean confidence is
    no higher than the accuracy is chosen.

    Args:
        draw: runs a chain with the given sigma (from the same start each time) and returns class probabilities on held-out
            data, (draws, examples, classes).
        targets: the held-out classes, (examples,).
        sigmas: what to try, ascending.
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
