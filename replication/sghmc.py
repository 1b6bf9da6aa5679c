"""Scale-adapted stochastic gradient Hamiltonian Monte Carlo: the baseline of the paper's Figure 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

from adammcmc.target.priors import Prior

__all__ = ["ScaleAdaptedSGHMC"]


class ScaleAdaptedSGHMC(torch.optim.Optimizer):
    r"""SGHMC (Chen, Fox and Guestrin 2014) that adapts its scale in burn-in (Springenberg et al. 2016). **Approximate.**

        g = n * grad(mean loss) - grad log prior                             (1)  the gradient of U: the SUM over the data
        tau' = tau + 1 - tau gbar^2 / V                                      (2)  in burn-in only, for each weight
        gbar' = gbar + (g - gbar) / (tau + 1),   V' = V + (g^2 - V) / (tau + 1)                  (3)
        v' = v - lr^2 V^(-1/2) g - mdecay v + N(0, max(0, 2 lr^2 mdecay V^(-1/2) - lr^4))        (4)
        theta' = theta + v'                                                  (5)

    (2) and (3) are equations (8) and (9) of Springenberg et al., (4) and (5) their (10). All of tau, gbar and V start at 1. The
    paper has 1 / tau in (3), with which this start would stay at tau = 1 and V = g^2 for ever.

    `backward()` of the MEAN loss of a batch leaves its gradient in `p.grad`, as for any optimizer, and `step` multiplies it
    by `num_data`: who takes the mean for the sum samples at n times the temperature. There is no Metropolis test. lr is the
    step epsilon as it stands in the equations (some implementations divide it by sqrt(n)), `mdecay` the part of the velocity
    that is lost in a step (epsilon V^(-1/2) C in the paper). lr^4 is subtracted because gradients bring noise of their own:
    that much if V is all noise. On a Gaussian of curvature h, with V frozen and gradients of noise variance W,

        Var(theta) = (1/h) [1 - (1 - W / V) lr^2 V^(1/2) / (2 mdecay)] / [1 - lr^2 h V^(-1/2) / (4 - 2 mdecay)]     (6)

    exactly, which is 1/h as lr -> 0. Where V^(1/2) > 2 mdecay / lr^2 (1,000 at the defaults) no noise is added at all.
    Gradients of the sum over a large data set are easily that large; the chain is then SGD with momentum. `silent` says
    for how many weights.

    The code released with the AdamMCMC paper differs: its burn-in lasts as long as the run, so that V follows the gradients for
    ever and nothing says what is sampled; its prior is N(0, 0.1^2) on every weight (`prior=Gaussian(0.1)` here).

    Nothing is read back from the device, and `step` may be captured in a CUDA graph, after one step that makes the state: with
    the default generator, or with one that was registered with the graph (`graph.register_generator_state`).

    Args:
        params: parameters or groups, as for any optimizer. A parameter without a gradient stays where it is.
        lr: the step epsilon.
        mdecay: the part of the velocity that is lost in a step.
        num_data: the number of training examples n.
        burn_in: steps in which V is adapted; it is frozen afterwards.
        prior: a `Prior`; None is flat.
        generator: the source of the noise; by default torch's own.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-2,
        mdecay: float = 0.05,
        *,
        num_data: int,
        burn_in: int,
        prior: Prior | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if not lr > 0:
            raise ValueError(f"`lr` must be positive, got {lr}.")
        if not 0 < mdecay < 1:
            raise ValueError(f"`mdecay` must be between 0 and 1, got {mdecay}.")
        if num_data < 1:
            raise ValueError(f"`num_data` must be at least 1, got {num_data}.")
        if burn_in < 0:
            raise ValueError(f"`burn_in` must not be negative, got {burn_in}.")
        if prior is not None and prior.is_bounded:
            raise ValueError(f"`prior` must be positive everywhere, got {prior}: no test is made that could keep its bounds.")
        self.num_data, self.prior, self.generator = num_data, prior, generator
        # capturable: torch's `load_state_dict` then brings the step counter to the parameter's device
        super().__init__(params, {"lr": lr, "mdecay": mdecay, "burn_in": burn_in, "capturable": True})
        if prior is not None:
            prior.check([p for group in self.param_groups for p in group["params"]])

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step from the gradients in `p.grad`; with a closure, from those that it leaves there."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        slopes = None if self.prior is None else self.prior.grad(params)
        of_prior = {} if slopes is None else dict(zip(params, slopes, strict=True))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    grad = p.grad * self.num_data
                    self._move(p, grad - of_prior[p] if p in of_prior else grad, group)
        return loss

    def _move(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """(2) to (5) for one tensor."""
        lr, mdecay, state = group["lr"], group["mdecay"], self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["tau"], state["mean"], state["square"] = (torch.ones_like(p) for _ in range(3))
            state["velocity"] = torch.zeros_like(p)
        tau, mean, square, velocity = (state[key] for key in ("tau", "mean", "square", "velocity"))
        is_adapting = state["step"] < group["burn_in"]  # on the device: a graph goes on to adapt, and stops, by itself
        state["step"] += 1
        rate = torch.where(is_adapting, 1 / (tau + 1), 0.0)
        tau.add_(torch.where(is_adapting, 1 - tau * mean.square() / square, 0.0))
        mean.lerp_(grad, rate)
        square.lerp_(grad.square(), rate)
        scale = lr**2 * square.rsqrt()
        variance = (2 * mdecay * scale - lr**4).clamp_(min=0)
        noise = torch.empty_like(p).normal_(generator=self.generator)
        velocity.mul_(1 - mdecay).addcmul_(scale, grad, value=-1).addcmul_(variance.sqrt(), noise)
        p.add_(velocity)

    def silent(self) -> Tensor:
        """The part of the weights to which no noise is added, because V^(1/2) > 2 mdecay / lr^2: a number on the device."""
        flags = [
            (self.state[p]["square"].sqrt() > 2 * group["mdecay"] / group["lr"] ** 2).flatten()
            for group in self.param_groups
            for p in group["params"]
            if p in self.state
        ]
        return torch.cat(flags).double().mean()
