"""The named kernels. Each docstring gives the equation, the sampled distribution, whether it is exact, and the cost.

U is the potential of the target, V = U / (lambda n) the function whose gradient is taken (`adammcmc.target`); for a
density U = V = -log p.
"""

from adammcmc.kernels.adam import AdamMCMCKernel, adam_mcmc, as_released, optimizer_mcmc
from adammcmc.kernels.amortised import AmortisedKernel, amortised_langevin
from adammcmc.kernels.corrected import CarriedBatch, CorrectedMALAKernel, corrected_mala
from adammcmc.kernels.exact_adam import ExactAdamMCMCKernel, exact_adam_mcmc
from adammcmc.kernels.hamiltonian import UnderdampedKernel, hmc, underdamped
from adammcmc.kernels.langevin import MALAKernel, mala
from adammcmc.kernels.microcanonical import MicrocanonicalKernel, microcanonical
from adammcmc.kernels.minibatch import MinibatchKernel, minibatch_langevin

__all__ = [
    "AdamMCMCKernel",
    "AmortisedKernel",
    "CarriedBatch",
    "CorrectedMALAKernel",
    "ExactAdamMCMCKernel",
    "MALAKernel",
    "MicrocanonicalKernel",
    "MinibatchKernel",
    "UnderdampedKernel",
    "adam_mcmc",
    "amortised_langevin",
    "as_released",
    "corrected_mala",
    "exact_adam_mcmc",
    "hmc",
    "mala",
    "microcanonical",
    "minibatch_langevin",
    "optimizer_mcmc",
    "underdamped",
]
