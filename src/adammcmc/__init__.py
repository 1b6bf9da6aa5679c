"""AdamMCMC: draw a network's weights from its tempered posterior, and be told what was sampled."""

from adammcmc import acceptance, kernels, target
from adammcmc.acceptance import AlwaysAccept, FullData, Minibatch
from adammcmc.advice import Calibration, Suggestion, calibrate_sigma, suggest
from adammcmc.chain import sample_density, warm_up
from adammcmc.data import Examples, TensorExamples
from adammcmc.diagnostics import TwoSided, two_sided
from adammcmc.errors import NonFiniteLoss, PerExampleLossRequired, StochasticClosure
from adammcmc.exact import MALA, ExactAdamMCMC, Underdamped
from adammcmc.health import Finding, Health
from adammcmc.kernel import ChainState, Info, Kernel
from adammcmc.optimizer import AdamMCMC, AsReleased, OptimizerMCMC
from adammcmc.sampler import Sampler
from adammcmc.stateful import ClosureReport, check_closure
from adammcmc.target import Density, Gaussian, Prior, Target, UniformBall, UniformBox, from_paper
from adammcmc.tuning import BurnIn

__version__ = "0.1.0"

__all__ = [
    "MALA",
    "AdamMCMC",
    "AlwaysAccept",
    "AsReleased",
    "BurnIn",
    "Calibration",
    "ChainState",
    "ClosureReport",
    "Density",
    "ExactAdamMCMC",
    "Examples",
    "Finding",
    "FullData",
    "Gaussian",
    "Health",
    "Info",
    "Kernel",
    "Minibatch",
    "NonFiniteLoss",
    "OptimizerMCMC",
    "PerExampleLossRequired",
    "Prior",
    "Sampler",
    "StochasticClosure",
    "Suggestion",
    "Target",
    "TensorExamples",
    "TwoSided",
    "Underdamped",
    "UniformBall",
    "UniformBox",
    "acceptance",
    "calibrate_sigma",
    "check_closure",
    "from_paper",
    "kernels",
    "sample_density",
    "suggest",
    "target",
    "two_sided",
    "warm_up",
]
