"""Top tagging: generate and read jets, ParticleNet, and the posterior of a tagger. Names are imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adammcmc.jets.data import KINDS as KINDS
    from adammcmc.jets.data import Jets as Jets
    from adammcmc.jets.data import jets_from_p4 as jets_from_p4
    from adammcmc.jets.features import JetData as JetData
    from adammcmc.jets.features import cloud_of as cloud_of
    from adammcmc.jets.features import padded_inputs as padded_inputs
    from adammcmc.jets.files import JetFileError as JetFileError
    from adammcmc.jets.files import bundled as bundled
    from adammcmc.jets.files import read_jets as read_jets
    from adammcmc.jets.files import stream_jets as stream_jets
    from adammcmc.jets.files import write_jets as write_jets
    from adammcmc.jets.particlenet import Cloud as Cloud
    from adammcmc.jets.particlenet import ParticleNet as ParticleNet
    from adammcmc.jets.particlenet import ParticleNetLite as ParticleNetLite
    from adammcmc.jets.streaming import StreamedJets as StreamedJets

_HOMES = {
    "data": "KINDS Jets jets_from_p4",
    "features": "JetData cloud_of padded_inputs",
    "files": "JetFileError bundled read_jets stream_jets write_jets",
    "particlenet": "Cloud ParticleNet ParticleNetLite",
    "streaming": "StreamedJets",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
