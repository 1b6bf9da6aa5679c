"""Defines what is sampled: losses, priors, temperature, the potential U, and the data it is computed on."""

from adammcmc.target.density import Density
from adammcmc.target.paper_units import PaperSettings, from_paper
from adammcmc.target.potential import Evaluation, Potential, Target, potential_difference
from adammcmc.target.priors import Gaussian, Prior, UniformBall, UniformBox

__all__ = [
    "Density",
    "Evaluation",
    "Gaussian",
    "PaperSettings",
    "Potential",
    "Prior",
    "Target",
    "UniformBall",
    "UniformBox",
    "from_paper",
    "potential_difference",
]
