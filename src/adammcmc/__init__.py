"""AdamMCMC: draw a network's weights from its tempered posterior, and be told what was sampled."""

from adammcmc import acceptance, kernels, target
from adammcmc.acceptance import AlwaysAccept, FullData, Minibatch
from adammcmc.chain import sample_density
from adammcmc.data import Examples, TensorExamples
from adammcmc.errors import NonFiniteLoss, PerExampleLossRequired, StochasticClosure
from adammcmc.kernel import ChainState, Info, Kernel
from adammcmc.optimizer import MALA, AdamMCMC, OptimizerMCMC
from adammcmc.sampler import Sampler
from adammcmc.target import Density, Gaussian, Prior, Target, UniformBall, UniformBox, from_paper

__version__ = "0.1.0"

__all__ = [
    "MALA",
    "AdamMCMC",
    "AlwaysAccept",
    "ChainState",
    "Density",
    "Examples",
    "FullData",
    "Gaussian",
    "Info",
    "Kernel",
    "Minibatch",
    "NonFiniteLoss",
    "OptimizerMCMC",
    "PerExampleLossRequired",
    "Prior",
    "Sampler",
    "StochasticClosure",
    "Target",
    "TensorExamples",
    "UniformBall",
    "UniformBox",
    "acceptance",
    "from_paper",
    "kernels",
    "sample_density",
    "target",
]
