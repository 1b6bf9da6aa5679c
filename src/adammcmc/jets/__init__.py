"""Top tagging: jets made and read, ParticleNet, and what a tagger's posterior says."""

from adammcmc.jets.data import KINDS, Jets, jets_from_p4
from adammcmc.jets.features import JetData, cloud_of, features, padded_inputs
from adammcmc.jets.files import JetFileError, bundled, read_jets, stream_jets, write_jets
from adammcmc.jets.particlenet import Cloud, ParticleNet, ParticleNetLite
from adammcmc.jets.streaming import StreamedJets

__all__ = [
    "KINDS",
    "Cloud",
    "JetData",
    "JetFileError",
    "Jets",
    "ParticleNet",
    "ParticleNetLite",
    "StreamedJets",
    "bundled",
    "cloud_of",
    "features",
    "jets_from_p4",
    "padded_inputs",
    "read_jets",
    "stream_jets",
    "write_jets",
]
