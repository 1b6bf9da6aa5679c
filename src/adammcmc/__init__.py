"""AdamMCMC: draw a network's weights from its tempered posterior, and report what was sampled."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adammcmc import acceptance as acceptance
    from adammcmc import kernels as kernels
    from adammcmc import target as target
    from adammcmc.acceptance import AlwaysAccept as AlwaysAccept
    from adammcmc.acceptance import Barker as Barker
    from adammcmc.acceptance import Confidence as Confidence
    from adammcmc.acceptance import FullData as FullData
    from adammcmc.acceptance import Minibatch as Minibatch
    from adammcmc.acceptance import Penalty as Penalty
    from adammcmc.acceptance import Sequential as Sequential
    from adammcmc.acceptance import Tuna as Tuna
    from adammcmc.errors import ManyProcesses as ManyProcesses
    from adammcmc.errors import NonFiniteLoss as NonFiniteLoss
    from adammcmc.errors import PerExampleLossRequired as PerExampleLossRequired
    from adammcmc.errors import StochasticClosure as StochasticClosure
    from adammcmc.errors import StoreCorrupt as StoreCorrupt
    from adammcmc.errors import StoreFull as StoreFull
    from adammcmc.errors import StoreLocked as StoreLocked
    from adammcmc.errors import StoreMismatch as StoreMismatch
    from adammcmc.kernels.kernel import ChainState as ChainState
    from adammcmc.kernels.kernel import Info as Info
    from adammcmc.kernels.kernel import Kernel as Kernel
    from adammcmc.posterior import calibration as calibration
    from adammcmc.posterior.calibration import ClassScores as ClassScores
    from adammcmc.posterior.calibration import Detection as Detection
    from adammcmc.posterior.calibration import Measured as Measured
    from adammcmc.posterior.calibration import OutOfDistribution as OutOfDistribution
    from adammcmc.posterior.calibration import Reliability as Reliability
    from adammcmc.posterior.calibration import RiskCurve as RiskCurve
    from adammcmc.posterior.calibration import ValueScores as ValueScores
    from adammcmc.posterior.calibration import compare_ood as compare_ood
    from adammcmc.posterior.calibration import score as score
    from adammcmc.posterior.posterior import Posterior as Posterior
    from adammcmc.posterior.predictive import Prediction as Prediction
    from adammcmc.posterior.store.checking import Check as Check
    from adammcmc.posterior.store.checking import check_run as check_run
    from adammcmc.posterior.summary import Row as Row
    from adammcmc.posterior.summary import Summary as Summary
    from adammcmc.runs.advice import Calibration as Calibration
    from adammcmc.runs.advice import Suggestion as Suggestion
    from adammcmc.runs.advice import calibrate_sigma as calibrate_sigma
    from adammcmc.runs.advice import suggest as suggest
    from adammcmc.runs.callbacks import Callback as Callback
    from adammcmc.runs.callbacks import Event as Event
    from adammcmc.runs.callbacks import TensorBoard as TensorBoard
    from adammcmc.runs.members import Members as Members
    from adammcmc.runs.members import TrainMembers as TrainMembers
    from adammcmc.runs.members import train_members as train_members
    from adammcmc.runs.plan import Plan as Plan
    from adammcmc.runs.plan import sample as sample
    from adammcmc.samplers import diagnostics as diagnostics
    from adammcmc.samplers.adam import AdamMCMC as AdamMCMC
    from adammcmc.samplers.adam import AsReleased as AsReleased
    from adammcmc.samplers.adam import OptimizerMCMC as OptimizerMCMC
    from adammcmc.samplers.adaptation import BurnIn as BurnIn
    from adammcmc.samplers.amortised import AmortisedLangevin as AmortisedLangevin
    from adammcmc.samplers.corrected import CorrectedMALA as CorrectedMALA
    from adammcmc.samplers.draws import DensityDraws as DensityDraws
    from adammcmc.samplers.draws_table import DensitySummary as DensitySummary
    from adammcmc.samplers.draws_verdict import DensityVerdict as DensityVerdict
    from adammcmc.samplers.exact import MALA as MALA
    from adammcmc.samplers.exact import ExactAdamMCMC as ExactAdamMCMC
    from adammcmc.samplers.exact import Microcanonical as Microcanonical
    from adammcmc.samplers.exact import Underdamped as Underdamped
    from adammcmc.samplers.functional import sample_density as sample_density
    from adammcmc.samplers.functional import warm_up as warm_up
    from adammcmc.samplers.health import Finding as Finding
    from adammcmc.samplers.health import Health as Health
    from adammcmc.samplers.minibatch import MinibatchLangevin as MinibatchLangevin
    from adammcmc.samplers.modules import ClosureReport as ClosureReport
    from adammcmc.samplers.modules import check_closure as check_closure
    from adammcmc.samplers.sampler import Sampler as Sampler
    from adammcmc.samplers.two_sided import TwoSided as TwoSided
    from adammcmc.samplers.two_sided import two_sided as two_sided
    from adammcmc.samplers.warmup import WarmUp as WarmUp
    from adammcmc.target.control import ControlVariate as ControlVariate
    from adammcmc.target.data import Examples as Examples
    from adammcmc.target.data import TensorExamples as TensorExamples
    from adammcmc.target.data import as_data as as_data
    from adammcmc.target.data_density import DataDensity as DataDensity
    from adammcmc.target.density import Density as Density
    from adammcmc.target.likelihood import GaussianNLL as GaussianNLL
    from adammcmc.target.likelihood import Likelihood as Likelihood
    from adammcmc.target.paper_units import from_paper as from_paper
    from adammcmc.target.potential import Target as Target
    from adammcmc.target.priors import Gaussian as Gaussian
    from adammcmc.target.priors import Prior as Prior
    from adammcmc.target.priors import UniformBall as UniformBall
    from adammcmc.target.priors import UniformBox as UniformBox

__version__ = "0.1.0"

_MODULES = {
    "acceptance": "acceptance",
    "calibration": "posterior.calibration",
    "diagnostics": "samplers.diagnostics",
    "kernels": "kernels",
    "target": "target",
}
_HOMES = {
    "errors": "ManyProcesses NonFiniteLoss PerExampleLossRequired StochasticClosure StoreCorrupt StoreFull StoreLocked "
    "StoreMismatch",
    "target.control": "ControlVariate",
    "target.data": "Examples TensorExamples as_data",
    "target.data_density": "DataDensity",
    "target.likelihood": "GaussianNLL Likelihood",
    "target.density": "Density",
    "target.potential": "Target",
    "target.priors": "Gaussian Prior UniformBall UniformBox",
    "target.paper_units": "from_paper",
    "acceptance": "AlwaysAccept Barker Confidence FullData Minibatch Penalty Sequential Tuna",
    "kernels.kernel": "ChainState Info Kernel",
    "samplers.adaptation": "BurnIn",
    "samplers.amortised": "AmortisedLangevin",
    "samplers.corrected": "CorrectedMALA",
    "samplers.draws": "DensityDraws",
    "samplers.draws_table": "DensitySummary",
    "samplers.draws_verdict": "DensityVerdict",
    "samplers.functional": "sample_density warm_up",
    "samplers.exact": "MALA ExactAdamMCMC Microcanonical Underdamped",
    "samplers.health": "Finding Health",
    "samplers.minibatch": "MinibatchLangevin",
    "samplers.modules": "ClosureReport check_closure",
    "samplers.adam": "AdamMCMC AsReleased OptimizerMCMC",
    "samplers.sampler": "Sampler",
    "samplers.two_sided": "TwoSided two_sided",
    "samplers.warmup": "WarmUp",
    "posterior.calibration": "ClassScores Detection Measured OutOfDistribution Reliability RiskCurve ValueScores "
    "compare_ood score",
    "posterior.posterior": "Posterior",
    "posterior.predictive": "Prediction",
    "posterior.store.checking": "Check check_run",
    "posterior.summary": "Row Summary",
    "runs.advice": "Calibration Suggestion calibrate_sigma suggest",
    "runs.callbacks": "Callback Event TensorBoard",
    "runs.members": "Members TrainMembers train_members",
    "runs.plan": "Plan sample",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted([*_MODULES, *_HOME])


def __getattr__(name: str) -> Any:
    """A public name, imported on first use: `adammcmc --version` does not wait for torch."""
    if name in _MODULES:
        value: Any = import_module(f"{__name__}.{_MODULES[name]}")
    elif name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
