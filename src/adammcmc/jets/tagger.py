"""A tagger: a network, its training, and the folder that stores both.

    <folder>/tagger.safetensors    weights, Adam's state, progress of the training
    <folder>/posterior/            the chains, as `adammcmc.sample` stores them

Training can stop after any epoch, and resumes bit for bit on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from adammcmc.acceptance import AlwaysAccept
from adammcmc.jets.data import Jets
from adammcmc.jets.features import JetData, cloud_bytes
from adammcmc.jets.particlenet import ParticleNet, ParticleNetLite, restated
from adammcmc.jets.selection import check_two_classes
from adammcmc.jets.settings import Precision, Sampling, Training
from adammcmc.jets.streaming import StreamedJets
from adammcmc.posterior.posterior import Posterior
from adammcmc.posterior.predictive import Prediction
from adammcmc.posterior.store.encoding import read_state, write_state
from adammcmc.runs.factory import Factory
from adammcmc.runs.plan import Plan
from adammcmc.samplers.adam import AdamMCMC, AsReleased
from adammcmc.samplers.exact import Microcanonical, Underdamped
from adammcmc.samplers.progress import Bar, show_bar
from adammcmc.target.batches import to_device
from adammcmc.target.data import derive_seed
from adammcmc.target.priors import Gaussian

__all__ = ["NETWORKS", "Sampling", "Tagger", "Training", "best_device"]

NETWORKS: dict[str, type[ParticleNet]] = {"particlenet": ParticleNet, "lite": ParticleNetLite}
SAMPLERS: dict[str, Factory] = {
    "adam-mcmc": AdamMCMC,
    "as-released": AsReleased,
    "underdamped": Underdamped,
    "microcanonical": partial(Microcanonical, acceptance=AlwaysAccept()),
}
_FILE = "tagger.safetensors"


class Tagger:
    """A network that classifies top jets and QCD jets.

    Args:
        training: how it is, or was, trained.
        device: of the network; None is the GPU if there is one.
        precision: "bfloat16" runs the network under autocast.
        compiled: use torch.compile: slow to start, fast afterwards.

    Example:
        >>> from adammcmc.jets import bundled, read_jets
        >>> tagger = Tagger(Training(network="lite", epochs=1, batch_size=16), device="cpu")
        >>> tagger.train(read_jets(bundled("jets"), max_jets=32), progress=False)
        >>> tagger.steps
        2
    """

    def __init__(
        self,
        training: Training | None = None,
        *,
        device: str | torch.device | None = None,
        precision: Precision = "float32",
        compiled: bool = False,
    ) -> None:
        if precision not in ("float32", "bfloat16"):
            raise ValueError(f"`precision` must be 'float32' or 'bfloat16', got {precision!r}.")
        self.training = training or Training()
        try:
            self.device = best_device() if device is None else torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"`device` must be 'cpu' or 'cuda', got {device!r}.") from error
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("there is no CUDA device: leave `device` out, or use 'cpu'.")
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(self.training.seed)
            self.net = NETWORKS[self.training.network]()
        self.net.to(self.device)
        self.net.autocast = torch.bfloat16 if precision == "bfloat16" else None
        self.adam = torch.optim.Adam(self.net.parameters(), lr=self.training.lr, betas=self.training.betas)
        self.steps = self.epochs = 0
        self.trained_on = ""
        """Identifies the training jets together with the held-out ones; see `Jets.digest`."""
        self._random: dict[str, Any] | None = None
        self._next_batch: dict[str, Any] | None = None
        # called in training and sampling; prediction uses the network itself, because it exchanges the weights
        self._called: torch.nn.Module = torch.compile(self.net) if compiled else self.net  # type: ignore[assignment]

    def data(self, jets: Jets | StreamedJets, batch_size: int | None = None) -> JetData | StreamedJets:
        """These jets as data for this network: on its device if they fit there, else on the host. Streams are unchanged."""
        if isinstance(jets, StreamedJets):
            return jets
        k = self.net.num_neighbours
        device = self.device if _fits(cloud_bytes(jets, k), self.device) else torch.device("cpu")
        # on a GPU all batches have one shape, so that steps can be captured in CUDA graphs
        capacity: Literal["auto"] | None = "auto" if device.type == "cuda" else None
        return JetData(jets, batch_size, device=device, num_neighbours=k, capacity=capacity)

    # --- training ---------------------------------------------------------------------------------------------------------

    def train(
        self,
        jets: Jets | StreamedJets,
        *,
        after_epoch: Callable[[Tagger, float], None] | None = None,
        progress: bool = True,
    ) -> None:
        """Train on top (1) and QCD (0) jets, from the present epoch to `training.epochs`.

        `after_epoch` receives the tagger and the mean loss of the epoch, for example to save the tagger.
        """
        training = self.training
        check_two_classes(jets)
        if len(jets) < training.batch_size:
            raise ValueError(f"{len(jets)} jets do not fill a batch of {training.batch_size}.")
        data = self.data(jets, training.batch_size)
        if data.batch_size != training.batch_size:
            raise ValueError(f"the jets come in batches of {data.batch_size}, but the training uses {training.batch_size}.")
        data.restart(training.seed)
        if self._next_batch is not None:
            data.load_state_dict(self._next_batch)
        total = training.epochs * data.num_batches
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            self._restore_random()
            while self.epochs < training.epochs:
                self.net.train()
                with show_bar(f"epoch {self.epochs + 1}/{training.epochs}", show=progress) as bar:
                    mean = self._epoch(data, total, bar)
                self.epochs += 1
                if not mean < float("inf"):
                    raise FloatingPointError(f"the training loss of epoch {self.epochs} is {mean}: lower `lr`.")
                self._random, self._next_batch = self._random_state(), data.state_dict()
                if after_epoch is not None:
                    after_epoch(self, mean)

    def _epoch(self, data: JetData | StreamedJets, total: int, bar: Bar) -> float:
        """One pass over the data; returns the mean loss."""
        losses = torch.zeros((), device=self.device)
        for done in range(1, data.num_batches + 1):
            for group in self.adam.param_groups:
                group["lr"] = self.training.lr * self.training.factor(self.steps, total)
            cloud, labels = to_device(next(data), self.device)
            self.adam.zero_grad()
            loss = F.cross_entropy(self._called(cloud), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self.adam.step()
            losses += loss.detach()
            self.steps += 1
            bar.update(done, data.num_batches, lambda loss=loss: f"loss {float(loss):.3f}")  # type: ignore[misc]
        return float(losses) / data.num_batches

    def _restore_random(self) -> None:
        if self._random is None:
            torch.manual_seed(self.training.seed)
            return
        torch.set_rng_state(self._random["cpu"])
        if self.device.type == "cuda" and "cuda" in self._random:
            torch.cuda.set_rng_state(self._random["cuda"], self.device)

    def _random_state(self) -> dict[str, Any]:
        state = {"cpu": torch.get_rng_state()}
        return state | ({"cuda": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {})

    # --- the folder -------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Write `tagger.safetensors` atomically."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "training": asdict(self.training),
            "net": dict(self.net.state_dict()),
            "adam": self.adam.state_dict(),
            "steps": self.steps,
            "epochs": self.epochs,
            "random": self._random,
            "next_batch": self._next_batch,
            "trained_on": self.trained_on,
        }
        write_state(folder / _FILE, state, "a tagger of adammcmc")
        return folder / _FILE

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device | None = None,
        precision: Precision = "float32",
        compiled: bool = False,
        epochs: int | None = None,
    ) -> Tagger:
        """Load a saved tagger. `epochs` replaces the number of epochs, to continue its training."""
        path = Path(folder) / _FILE
        if not path.exists():
            raise FileNotFoundError(f"there is no tagger in '{folder}' (no {_FILE}): train one with `adammcmc jets train`.")
        try:
            state = read_state(path)
            written = state["training"]
            training = Training(**{**written, "betas": tuple(written["betas"])})
            if epochs is not None:
                training = replace(training, epochs=epochs)
            tagger = cls(training, device=device, precision=precision, compiled=compiled)
            tagger.net.load_state_dict(state["net"])
            tagger.adam.load_state_dict(state["adam"])
            tagger.steps, tagger.epochs, tagger._random = state["steps"], state["epochs"], state["random"]
            tagger.trained_on, tagger._next_batch = state["trained_on"], state["next_batch"]
            if not (isinstance(tagger.steps, int) and isinstance(tagger.epochs, int) and isinstance(tagger.trained_on, str)):
                raise TypeError("`steps` and `epochs` must be integers, and `trained_on` a string")
        except (OSError, SafetensorError, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"'{path}' cannot be read ({error}): is it a complete tagger file of this library?") from error
        return tagger

    # --- sampling ---------------------------------------------------------------------------------------------------------

    def sample(
        self,
        jets: Jets | StreamedJets,
        settings: Sampling | None = None,
        *,
        path: str | Path | None = None,
        resume: bool = False,
        progress: bool = True,
        **changes: Any,
    ) -> Posterior:
        """Sample the weights of the network, starting from the trained ones.

        Args:
            jets: the training jets.
            settings: the sampler, its settings and the number of draws.
            path: a folder to store the draws in; None keeps them in memory.
            resume: continue the run in `path`.
            progress: show a bar.
            changes: fields of `Sampling` to change, such as gap=50.
        """
        check_two_classes(jets)
        settings = replace(settings or Sampling(), **changes).complete(on_gpu=self.device.type == "cuda")
        uses_all, batch_size = settings.uses_all_jets, settings.batch_size
        if isinstance(jets, StreamedJets) and uses_all:
            raise ValueError(f"'{settings.sampler}' uses all jets in each step: they must fit in memory.")
        names = ["forces", "num_leapfrog"] if uses_all else ["lr", "betas", "sigma", "sigma_along"]
        values = {name: getattr(settings, name) for name in ("inverse_temperature", *names)}
        options = {name: value for name, value in values.items() if value is not None}
        self.net.train(settings.in_training_mode)
        assert settings.gap is not None
        assert settings.num_draws is not None
        assert settings.num_chains is not None
        with self._in_full_precision() if uses_all else nullcontext():
            return Plan(
                self._called,
                self.data(jets, None if uses_all or batch_size is None else min(batch_size, len(jets))),
                F.cross_entropy,
                sampler=partial(SAMPLERS[settings.sampler], **options),
                prior=Gaussian.fan_in(self.net, settings.prior_gain) if settings.prior_gain else None,
                warm_start=None if uses_all else self.adam,
                initial=self._starts(jets, settings, path, resume=resume, progress=progress) if uses_all else None,
                burn_in=settings.burn_in,
                gap=settings.gap,
                num_draws=settings.num_draws,
                num_chains=settings.num_chains,
                seed=settings.seed,
                path=path,
                resume=resume,
                progress=progress,
            ).run()

    @contextmanager
    def _in_full_precision(self) -> Iterator[None]:
        """Energies that decide are computed in float32; `forces` says how gradients are."""
        before, self.net.autocast = self.net.autocast, None
        try:
            yield
        finally:
            self.net.autocast = before

    def _starts(
        self, jets: Jets | StreamedJets, settings: Sampling, path: str | Path | None, *, resume: bool, progress: bool
    ) -> list[dict[str, Tensor]] | None:
        """Where chains start apart; None where the folder has their starts already, or where there is one chain."""
        assert settings.num_chains is not None
        if settings.num_chains == 1 or (resume and path is not None and (Path(path) / "run.json").exists()):
            return None
        return self.members(jets, settings.num_chains, progress=progress)

    def members(self, jets: Jets | StreamedJets, number: int, *, progress: bool = True) -> list[dict[str, Tensor]]:
        """Weights for chains to start from: the tagger's own, then those of networks trained likewise from other seeds.

        All are expressed with the BatchNorm statistics of the tagger, which are no weights, so that chains from them have the
        same target. The function of each network is the one that was trained.
        """
        own = {name: tensor.detach().clone() for name, tensor in self.net.state_dict().items()}
        found = [own]
        for i in range(1, number):
            other = Tagger(replace(self.training, seed=derive_seed(self.training.seed, i)), device=self.device)
            other.net.autocast = self.net.autocast
            other.train(jets, progress=progress)
            found.append(restated(other.net, own))
        return found

    def posterior(self, folder: str | Path) -> Posterior:
        """The draws that are stored in this folder."""
        return Posterior.open(folder, self.net)

    def predict(
        self, posterior: Posterior, jets: Jets | StreamedJets, *, batch_size: int | None = None, progress: bool = True
    ) -> Prediction:
        """Predictions of all draws for these jets."""
        if batch_size is None and self.device.type == "cuda":
            batch_size = 2048
        return posterior.predict(self.data(jets), batch_size=batch_size, progress=progress)

    @torch.no_grad()
    def scores(self, jets: Jets | StreamedJets, batch_size: int = 512) -> Tensor:
        """The signal probabilities of the trained network itself, without a posterior."""
        self.net.eval()
        parts = (to_device(cloud, self.device) for cloud, _ in self.data(jets).in_order(batch_size))
        scores = torch.cat([self.net(cloud).float().softmax(1)[:, 1] for cloud in parts]).cpu()
        if not bool(scores.isfinite().all()):
            raise FloatingPointError("the outputs of the network are not finite: its training diverged; lower `lr`.")
        return scores


def best_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _fits(size: int, device: torch.device) -> bool:
    """Whether this many bytes fit on the device, with memory left for the computation."""
    return device.type != "cuda" or size < 0.5 * torch.cuda.mem_get_info(device)[0]
