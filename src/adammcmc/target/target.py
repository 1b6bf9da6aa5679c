"""The former place of the target's names, until every module imports them from where they are."""

from adammcmc.target.density import Density
from adammcmc.target.potential import Evaluation, Potential, Target, potential_difference
from adammcmc.target.priors import Gaussian, Prior, UniformBall, UniformBox
from adammcmc.target.units import PaperSettings, from_paper

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
