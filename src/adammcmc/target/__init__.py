"""What is sampled: losses, priors, temperature, the potential U, and what it is computed on."""

from adammcmc.target.target import (
    Density,
    Evaluation,
    Gaussian,
    PaperSettings,
    Potential,
    Prior,
    Target,
    UniformBall,
    UniformBox,
    from_paper,
)

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
]
