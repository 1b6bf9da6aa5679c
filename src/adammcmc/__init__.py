"""AdamMCMC: draw a network's weights from its tempered posterior, and be told what was sampled."""

from typing import TYPE_CHECKING

from adammcmc.lazy import lazy_names

if TYPE_CHECKING:
    from adammcmc import acceptance, calibration, diagnostics, kernels, target
    from adammcmc.acceptance import AlwaysAccept, Barker, Confidence, FullData, Minibatch, Penalty, Sequential, Tuna
    from adammcmc.advice import Calibration, Suggestion, calibrate_sigma, suggest
    from adammcmc.calibration import (
        ClassScores,
        Detection,
        Measured,
        OutOfDistribution,
        Reliability,
        RiskCurve,
        ValueScores,
        compare_ood,
        score,
    )
    from adammcmc.callbacks import Callback, Event, TensorBoard
    from adammcmc.chain import sample_density, warm_up
    from adammcmc.checking import Check, check_run
    from adammcmc.control import ControlVariate
    from adammcmc.corrected import CorrectedMALA
    from adammcmc.data import Examples, TensorExamples
    from adammcmc.data_density import DataDensity
    from adammcmc.errors import (
        ManyProcesses,
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
    from adammcmc.summary import Row, Summary
    from adammcmc.target import Density, Gaussian, Prior, Target, UniformBall, UniformBox, from_paper
    from adammcmc.tuning import BurnIn
    from adammcmc.twosided import TwoSided, two_sided

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
    "Check",
    "ClassScores",
    "ClosureReport",
    "Confidence",
    "ControlVariate",
    "CorrectedMALA",
    "DataDensity",
    "Density",
    "Detection",
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
    "ManyProcesses",
    "Measured",
    "Minibatch",
    "NonFiniteLoss",
    "OptimizerMCMC",
    "OutOfDistribution",
    "Penalty",
    "PerExampleLossRequired",
    "Posterior",
    "Prediction",
    "Prior",
    "Reliability",
    "RiskCurve",
    "Row",
    "Sampler",
    "Sequential",
    "StochasticClosure",
    "StoreCorrupt",
    "StoreFull",
    "StoreLocked",
    "StoreMismatch",
    "Suggestion",
    "Summary",
    "Target",
    "TensorBoard",
    "TensorExamples",
    "Tuna",
    "TwoSided",
    "Underdamped",
    "UniformBall",
    "UniformBox",
    "ValueScores",
    "acceptance",
    "calibrate_sigma",
    "calibration",
    "check_closure",
    "check_run",
    "compare_ood",
    "diagnostics",
    "from_paper",
    "kernels",
    "sample",
    "sample_density",
    "score",
    "suggest",
    "target",
    "two_sided",
    "warm_up",
]

__getattr__ = lazy_names(
    globals(),
    __all__,
    (
        "acceptance",
        "advice",
        "calibration",
        "callbacks",
        "chain",
        "checking",
        "control",
        "corrected",
        "data",
        "data_density",
        "diagnostics",
        "errors",
        "exact",
        "health",
        "kernel",
        "kernels",
        "likelihood",
        "optimizer",
        "posterior",
        "predictive",
        "run",
        "sampler",
        "stateful",
        "summary",
        "target",
        "tuning",
        "twosided",
    ),
)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
