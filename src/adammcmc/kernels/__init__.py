"""The named kernels. Each docstring says: the equation, what is sampled, exact or not, and what a step costs.

U is the potential of the target, V = U / (lambda n) what is differentiated (`adammcmc.target`); for a density U = V = -log p.
"""

from adammcmc.kernels.adam import AdamMCMCKernel, adam_mcmc, as_released, optimizer_mcmc
from adammcmc.kernels.corrected import CarriedBatch, CorrectedMALAKernel, corrected_mala
from adammcmc.kernels.exact_adam import ExactAdamMCMCKernel, exact_adam_mcmc
from adammcmc.kernels.hamiltonian import UnderdampedKernel, hmc, underdamped
from adammcmc.kernels.langevin import MALAKernel, mala

__all__ = [
    "AdamMCMCKernel",
    "CarriedBatch",
    "CorrectedMALAKernel",
    "ExactAdamMCMCKernel",
    "MALAKernel",
    "UnderdampedKernel",
    "adam_mcmc",
    "as_released",
    "corrected_mala",
    "exact_adam_mcmc",
    "hmc",
    "mala",
    "optimizer_mcmc",
    "underdamped",
]
