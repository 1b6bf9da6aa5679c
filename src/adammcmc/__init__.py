"""AdamMCMC: draw a network's weights from its tempered posterior, and be told what was sampled."""

from adammcmc import acceptance, kernels, target
from adammcmc.acceptance import AlwaysAccept, Barker, Confidence, FullData, Minibatch, Penalty, Sequential, Tuna
from adammcmc.advice import Calibration, Suggestion, calibrate_sigma, suggest
from adammcmc.callbacks import Callback, Event, TensorBoard
from adammcmc.chain import sample_density, warm_up
from adammcmc.control import ControlVariate
from adammcmc.corrected import CorrectedMALA
from adammcmc.data import Examples, TensorExamples
from adammcmc.data_density import DataDensity
from adammcmc.diagnostics import TwoSided, two_sided
from adammcmc.errors import (
    NonFiniteLoss,
    PerExampleLossRequired,
    StochasticClosure,
    StoreCorrupt,
    StoreFull,
    StoreLocked,
    StoreMismatch,
)
from adammcmc.exact import MALA, ExactAdamMCMC, Underdamped
from adammcmc.health import Finding, Health
from adammcmc.kernel import ChainState, Info, Kernel
from adammcmc.likelihood import GaussianNLL, Likelihood
from adammcmc.optimizer import AdamMCMC, AsReleased, OptimizerMCMC
from adammcmc.posterior import Posterior
from adammcmc.predictive import Prediction
from adammcmc.run import sample
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
    "Barker",
    "BurnIn",
    "Calibration",
    "Callback",
    "ChainState",
    "ClosureReport",
    "Confidence",
    "ControlVariate",
    "CorrectedMALA",
    "DataDensity",
    "Density",
    "Event",
    "ExactAdamMCMC",
    "Examples",
    "Finding",
    "FullData",
    "Gaussian",
    "GaussianNLL",
    "Health",
    "Info",
    "Kernel",
    "Likelihood",
    "Minibatch",
    "NonFiniteLoss",
    "OptimizerMCMC",
    "Penalty",
    "PerExampleLossRequired",
    "Posterior",
    "Prediction",
    "Prior",
    "Sampler",
    "Sequential",
    "StochasticClosure",
    "StoreCorrupt",
    "StoreFull",
    "StoreLocked",
    "StoreMismatch",
    "Suggestion",
    "Target",
    "TensorBoard",
    "TensorExamples",
    "Tuna",
    "TwoSided",
    "Underdamped",
    "UniformBall",
    "UniformBox",
    "acceptance",
    "calibrate_sigma",
    "check_closure",
    "from_paper",
    "kernels",
    "sample",
    "sample_density",
    "suggest",
    "target",
    "two_sided",
    "warm_up",
]
