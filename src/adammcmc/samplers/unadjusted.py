"""Burn-in of constant-speed dynamics without a test, on fixed data: the steps that the approach finds are those that stay.

The approach (`samplers.approach`) gives each chain a step at which Y^2, Y the energy error of a move, has a geometric mean of
about v d, for d weights; v falls from 0.5 to 0.1 once U is level, or in the second half of the steps. There is no second part:
the chains keep these steps and the metric of the approach, and the root mean square of Y is reported. It is not small: a
test would reject nearly every second move, those that raise the energy.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from adammcmc.samplers.adaptation import Adaptation, BurnIn, Change
from adammcmc.samplers.approach import Approach
from adammcmc.samplers.metric import MetricSums
from adammcmc.samplers.warmup import WarmUp
from adammcmc.target.leaves import Leaves, Setting

__all__ = ["Unadjusted"]

_FEWEST = 100
_LARGEST = 1000.0  # energy error that is counted; longer moves are not made
_MEMORY = 0.99  # of its mean square


class Unadjusted(Adaptation):
    """See the module.

    Args:
        settings: the options; acceptances have no meaning here.
        step_size: before the first step.
        learns: whether the kernel takes the metric of the approach (it was given none).
        num_params, precision, shapes, scaling: as for `Adaptation`.
    """

    def __init__(self, settings: BurnIn, *, step_size: float, learns: bool, **options: Any) -> None:
        super().__init__(settings, target=1.0, learns=learns, velocity=True, approaches=True, **options)
        if self.approach is None:
            raise ValueError(
                f"the steps of a sampler without a test are found by burn-in's approach, in at least {_FEWEST} steps: leave "
                "`approach` as it is and allow more, or give the step size and no `burn_in`."
            )
        self.target = self.reached = 1.0
        self._first, self._takes_metric = step_size, learns
        self._square: Tensor | None = None  # of the energy error, (chains,)

    def _new_approach(self, num_params: int) -> Approach | None:
        most = self.settings.num_steps or self.settings.max_steps
        return None if self.settings.approach is False or most < _FEWEST else Approach(num_params, most)

    @property
    def approximation(self) -> str | None:  # type: ignore[override]
        """The energy error of a step at the end of burn-in."""
        if self._square is None or not self.is_done:
            return None
        return f"energy error of a step {math.sqrt(float(self._square.median())):.2g}"

    def record(self, kernel: Any) -> WarmUp:
        record = super().record(kernel)
        return record if self.approximation is None else replace(record, reason=f"{record.reason}; {self.approximation}")

    def observe(
        self,
        acceptance: Tensor,
        potential: Tensor,
        step_to_noise: Tensor,
        grad: Leaves | None,
        scale: Setting,
        log_ratio: Tensor | None = None,
        params: Leaves | None = None,
    ) -> Change:
        assert self.approach is not None
        assert log_ratio is not None
        assert params is not None
        self.budget.begin()
        self._step, self._num_chains = self._step + 1, len(potential)
        approach, is_learning = self.approach, self._learns and self._precision is None
        if is_learning and grad is not None:
            self._sums.add(grad, scale, params)
        approach.observe(log_ratio, potential)
        self._note(log_ratio)
        self.trend, self.has_new_window = approach.trend, approach.has_new_window
        if (approach.is_done and self._step >= (self.settings.num_steps or 0)) or self.budget.is_over:
            return self._freeze(approach, potential, params)
        if not (is_learning and approach.has_new_window) or approach.is_in_last_stretch:
            return Change(1.0, None, None)
        metric = self._sums.learn(self._metric_in_use)
        self._sums = MetricSums(self._kind, self._precision, self._shapes)
        if metric is not None:
            approach.rescale(self._rescale(metric))
        return Change(1.0, None, metric)

    def _note(self, log_ratio: Tensor) -> None:
        """The mean square of the energy error over about the last hundred steps."""
        now = log_ratio.double().cpu().nan_to_num(nan=_LARGEST).clamp(-_LARGEST, _LARGEST).square()
        self._square = now if self._square is None else _MEMORY * self._square.cpu() + (1 - _MEMORY) * now

    def _freeze(self, approach: Approach, potential: Tensor, params: Leaves) -> Change:
        """The chains keep the steps and the metric that they have."""
        self.is_done, self.is_flat, self.has_new_window = True, approach.is_level, True
        self.approach, self._num_approach = None, self._step
        self.budget.stop()
        metric = self.approach_metric(None, params) if self._takes_metric and self._metric_in_use is None else None
        self._metric_in_use = self._metric_in_use if metric is None else metric
        factor = approach.steps(potential, len(potential)) / self._first
        return Change(factor if len(factor) > 1 else float(factor), None, metric)
