"""One chain, as users and callbacks see it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from adammcmc.kernels.kernel import Info
from adammcmc.samplers.chains import Chains
from adammcmc.samplers.health import Health
from adammcmc.samplers.warmup import WarmUp
from adammcmc.target.resolution import Resolution

__all__ = ["ChainView"]


class ChainView:
    """What one chain of several reports. A `Sampler` is the view of its only chain."""

    chains: Chains
    number: int = 0
    """Of the chain."""
    param_groups: Any
    """Its settings, as a torch optimizer has them."""

    @property
    def num_steps(self) -> int:
        """Transitions taken."""
        return self.chains.num_steps

    @property
    def is_adapting(self) -> bool:
        """Whether the settings are still being tuned; do not collect draws yet."""
        return self.chains.is_adapting

    @property
    def warm_up(self) -> WarmUp | None:
        """The record of burn-in so far; None without one. Waits for the device."""
        if (adaptation := self.chains.adaptation) is None:
            return None
        return replace(adaptation.record(self.chains.kernel()), kernel=None, sampler=self._name, settings=self._tuned())

    @property
    def _name(self) -> str:
        """Of the sampler's class."""
        return type(self).__name__

    def _tuned(self) -> dict[str, Any]:
        """What burn-in tunes, as arguments of the sampler."""
        raise NotImplementedError

    @property
    def info(self) -> Info:
        """The last step in numbers, 0-d tensors on the parameters' device; reading it does not wait for the device."""
        return Info(*(field[self.number] for field in self.chains.info))

    @property
    def mean_acceptance_rate(self) -> Tensor:
        """Mean of min(1, exp(Y)) over all steps, on the device."""
        return self.chains.mean_acceptance_rate[self.number]

    @property
    def beta_eff(self) -> Tensor:
        """The factor by which noise in the last step's log ratio lowers the inverse temperature (`acceptance.beta_eff`).

        1 is right. NaN where the noise is not known, and for tests that allow for it. Reading it does not wait.
        """
        return self.chains.beta_eff[self.number]

    @property
    def resolution(self) -> Resolution | None:
        """How precisely U is known; None before the first step, and for a test that does not use U."""
        return self.chains.resolution

    def present_loss(self) -> Tensor:
        """The mean loss at the present weights as far as the last step found it (`Chains.present_loss`)."""
        return self.chains.present_loss()[self.number]

    def health(self) -> Health:
        """The self-tests on all steps since burn-in ended: numbers, and a verdict. Waits for the device."""
        return self.chains.health()[self.number]

    def health_sums(self) -> dict[str, float]:
        """Running sums behind `health`, by name, and the number of steps in them. Waits for the device."""
        return self.chains.health_sums()[self.number]

    def health_state(self) -> dict[str, Any]:
        """What `health` is read from, besides its sums (which `state_dict` has)."""
        return self.chains.health_state()

    def approximations(self) -> list[str]:
        """Why the chain is not exact, in a few words each; empty if it is."""
        return self.chains.approximations()

    def describe(self) -> str:
        """The realised target in one line: density, temperature, data, prior, kernel, test, exact or approximate."""
        return self.chains.describe()
