"""A tagger: a network, what it was trained with, and the folder where both are kept.

    <folder>/tagger.safetensors    weights, Adam's state, where the training stands
    <folder>/posterior/            the chain, as `adammcmc.sample` keeps it

Training stops and goes on at the end of an epoch, bit for bit on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from adammcmc.jets.data import Jets
from adammcmc.jets.features import JetData, cloud_bytes
from adammcmc.jets.particlenet import ParticleNet, ParticleNetLite
from adammcmc.jets.streaming import StreamedJets
from adammcmc.posterior.posterior import Posterior
from adammcmc.posterior.predictive import Prediction
from adammcmc.posterior.store.encoding import read_state, write_state
from adammcmc.runs.factory import Factory
from adammcmc.runs.run import sample
from adammcmc.samplers.exact import Underdamped
from adammcmc.samplers.optimizer import AdamMCMC, AsReleased
from adammcmc.samplers.progress import Bar, show_bar
from adammcmc.target.data import to_device
from adammcmc.target.priors import Gaussian

__all__ = ["NETWORKS", "Tagger", "Training", "best_device"]

NETWORKS: dict[str, type[ParticleNet]] = {"particlenet": ParticleNet, "lite": ParticleNetLite}
Precision = Literal["float32", "bfloat16"]
SamplerName = Literal["adam-mcmc", "as-released", "underdamped"]
_FILE = "tagger.safetensors"


@dataclass(frozen=True)
class Training:
    """How a tagger is trained: Adam, its learning rate constant at first and then falling to a hundredth.

    Args:
        network: "particlenet" (366,160 parameters) or "lite" (26,416).
        epochs: over the training jets.
        batch_size: jets in a step.
        lr: Adam's.
        betas: Adam's; the paper's are (0.99, 0.99).
        flat: share of the steps at full learning rate.
        seed: of weights, dropout and the order of the jets.
        held_out: share of the jets that `split` sets aside.
    """

    network: str = "particlenet"
    epochs: int = 10
    batch_size: int = 512
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.99)
    flat: float = 0.5
    seed: int = 0
    held_out: float = 0.0

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise ValueError(f"there is no network '{self.network}'. Known: {', '.join(NETWORKS)}.")
        if self.epochs < 1 or self.batch_size < 2:
            raise ValueError(f"`epochs` must be positive and `batch_size` at least 2, got {self.epochs} and {self.batch_size}.")
        if not 0 < self.lr < float("inf") or not 0 <= self.flat <= 1:
            raise ValueError(f"`lr` must be positive and `flat` between 0 and 1, got {self.lr} and {self.flat}.")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"`held_out` must be at least 0 and less than 1, got {self.held_out}.")

    def split(self, jets: Jets) -> tuple[Jets, Jets]:
        """Jets to train on and the held-out ones: always the same of the same jets."""
        train, test = self.split_rows(len(jets))
        return jets[train], jets[test]

    def split_files(self, files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
        """Files to train on and held-out ones, where jets are streamed: about the share of the files, at least one."""
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(20_190_221)).tolist()
        number = max(1, round(self.held_out * len(files))) if self.held_out > 0 else 0
        if number >= len(files):
            raise ValueError(f"of {len(files)} files none is left to train on: write the jets in shards, or hold out none.")
        cut = len(files) - number
        return [files[i] for i in sorted(order[:cut])], [files[i] for i in sorted(order[cut:])]

    def split_rows(self, number: int) -> tuple[Tensor, Tensor]:
        """The numbers of the jets to train on, and of the held-out ones, of so many."""
        mixed = torch.randperm(number, generator=torch.Generator().manual_seed(20_190_221))
        cut = number - round(self.held_out * number)
        return mixed[:cut], mixed[cut:]

    def factor(self, step: int, total: int) -> float:
        """Of the learning rate, at this step of so many."""
        left = (total - step) / max(1.0, total * (1 - self.flat))
        return 1.0 if left >= 1 else float(0.01 ** (1 - left))


class Tagger:
    """A network that tells top jets from QCD jets.

    Args:
        training: how it is, or was, trained.
        device: where it lives; None is the GPU if there is one.
        precision: "bfloat16" runs the network under autocast.
        compiled: run it through torch.compile: slow to start, fast afterwards.

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
            raise ValueError("there is no CUDA device here: leave `device` out, or 'cpu'.")
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(self.training.seed)
            self.net = NETWORKS[self.training.network]()
        self.net.to(self.device)
        self.net.autocast = torch.bfloat16 if precision == "bfloat16" else None
        self.adam = torch.optim.Adam(self.net.parameters(), lr=self.training.lr, betas=self.training.betas)
        self.steps = self.epochs = 0
        self.trained_on = ""
        """Tells the jets of the training, with the held-out ones, from others; see `Jets.digest`."""
        self._random: dict[str, Any] | None = None
        self._next_batch: dict[str, Any] | None = None
        # what is called in training and sampling; prediction takes the network itself, whose weights are exchanged
        self._called: torch.nn.Module = torch.compile(self.net) if compiled else self.net  # type: ignore[assignment]

    def data(self, jets: Jets | StreamedJets, batch_size: int | None = None) -> JetData | StreamedJets:
        """These jets for this network: on its device if they fit there, on the host otherwise. Streams stay what they are."""
        if isinstance(jets, StreamedJets):
            return jets
        k = self.net.num_neighbours
        device = self.device if _fits(cloud_bytes(jets, k), self.device) else torch.device("cpu")
        # on a GPU one shape for all batches, so that steps can be captured
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
        """Train on top (1) and QCD (0) jets, from where it stands to `training.epochs`.

        `after_epoch` is given the tagger and the mean loss of the epoch: the place to save it, or to look at other jets.
        """
        training = self.training
        check_two_classes(jets)
        if _number(jets) < training.batch_size:
            raise ValueError(f"{_number(jets)} jets do not fill a batch of {training.batch_size}.")
        data = self.data(jets, training.batch_size)
        if data.batch_size != training.batch_size:
            raise ValueError(f"the jets come in batches of {data.batch_size}, the training has {training.batch_size}.")
        data.restart(training.seed)
        if self._next_batch is not None:
            data.load_state_dict(self._next_batch)
        total = training.epochs * data.num_batches
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            self._start_random()
            while self.epochs < training.epochs:
                self.net.train()
                with show_bar(f"epoch {self.epochs + 1}/{training.epochs}", show=progress) as bar:
                    mean = self._epoch(data, total, bar)
                self.epochs += 1
                if not mean < float("inf"):
                    raise FloatingPointError(f"the training loss of epoch {self.epochs} is {mean}: lower `lr`.")
                self._random, self._next_batch = self._present_random(), data.state_dict()
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

    def _start_random(self) -> None:
        if self._random is None:
            torch.manual_seed(self.training.seed)
            return
        torch.set_rng_state(self._random["cpu"])
        if self.device.type == "cuda" and "cuda" in self._random:
            torch.cuda.set_rng_state(self._random["cuda"], self.device)

    def _present_random(self) -> dict[str, Any]:
        state = {"cpu": torch.get_rng_state()}
        return state | ({"cuda": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {})

    # --- the folder -------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Write `tagger.safetensors`, whole or not at all."""
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
        """A tagger as it was saved. `epochs` is how long its training shall be, if it goes on."""
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
                raise TypeError("`steps` and `epochs` must be integers, and `trained_on` a text")
        except (OSError, SafetensorError, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"'{path}' cannot be read ({error}): is it a tagger of this library, and whole?") from error
        return tagger

    # --- sampling ---------------------------------------------------------------------------------------------------------

    def sample(
        self,
        jets: Jets | StreamedJets,
        *,
        sampler: SamplerName = "adam-mcmc",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.99, 0.99),
        sigma: float = 3e-4,
        sigma_along: float = 2.0,
        inverse_temperature: float = 1.0,
        prior_gain: float | None = 2.0,
        batch_size: int | None = 512,
        burn_in: int | None = None,
        gap: int = 100,
        num_draws: int = 10,
        num_chains: int = 1,
        in_training_mode: bool = False,
        seed: int = 0,
        path: str | Path | None = None,
        resume: bool = False,
        progress: bool = True,
    ) -> Posterior:
        """Draw the network's weights, starting from the trained ones.

        The network runs in evaluation mode: BatchNorm with the statistics of the training, no dropout, so that the loss is one
        function of the weights. `in_training_mode=True` is what the paper did: batch statistics, dropout.

        Args:
            jets: those that the tagger was trained on.
            sampler: "adam-mcmc" is Algorithm 1 of the paper, approximate; "as-released" the published code's variant;
                "underdamped" is exact, and uses all jets in each step (leave `lr`, `sigma` and `batch_size`).
            lr: of the Adam step.
            betas: of its moments, which start from those of the training.
            sigma: noise on one weight.
            sigma_along: noise along the step, in steps.
            inverse_temperature: lambda; 1 is Bayes.
            prior_gain: of a Gaussian prior, `Gaussian.fan_in`: sd gain / sqrt(fan_in) for weights, 1 for biases and BatchNorm.
                None is flat (the paper's, on a large ball): then there is no posterior unless the loss bounds it.
            batch_size: jets in a step.
            burn_in: steps before the first draw; None is the library's choice.
            gap: steps between draws.
            num_draws: of each chain.
            num_chains: one after the other.
            in_training_mode: see above.
            seed: of the chain.
            path: a folder to keep it in; None is memory.
            resume: go on with the run in `path`.
            progress: show a bar.
        """
        check_two_classes(jets)
        common: dict[str, Any] = {"inverse_temperature": inverse_temperature}
        makers: dict[str, Factory] = {
            "adam-mcmc": partial(AdamMCMC, lr=lr, betas=betas, sigma=sigma, sigma_along=sigma_along, **common),
            "as-released": partial(AsReleased, lr=lr, betas=betas, sigma=sigma, sigma_along=sigma_along, **common),
            "underdamped": partial(Underdamped, **common),
        }
        if sampler not in makers:
            raise ValueError(f"there is no sampler '{sampler}'. Known: {', '.join(makers)}.")
        is_exact = sampler == "underdamped"
        if is_exact and isinstance(jets, StreamedJets):
            raise ValueError("'underdamped' looks at all jets in each step: they must fit in memory.")
        self.net.train(in_training_mode)
        return sample(
            self._called,
            self.data(jets, None if is_exact or batch_size is None else min(batch_size, _number(jets))),
            F.cross_entropy,
            sampler=makers[sampler],
            prior=None if prior_gain is None else Gaussian.fan_in(self.net, prior_gain),
            warm_start=None if is_exact else self.adam,
            burn_in=burn_in,
            gap=gap,
            num_draws=num_draws,
            num_chains=num_chains,
            seed=seed,
            path=path,
            resume=resume,
            progress=progress,
        )

    def posterior(self, folder: str | Path) -> Posterior:
        """The chain that was kept in this folder."""
        return Posterior.open(folder, self.net)

    def predict(
        self, posterior: Posterior, jets: Jets | StreamedJets, *, batch_size: int | None = None, progress: bool = True
    ) -> Prediction:
        """What the draws say about these jets."""
        if batch_size is None and self.device.type == "cuda":
            batch_size = 2048
        return posterior.predict(self.data(jets), batch_size=batch_size, progress=progress)

    @torch.no_grad()
    def scores(self, jets: Jets | StreamedJets, batch_size: int = 512) -> Tensor:
        """The trained network's own probability of the signal, without a posterior."""
        self.net.eval()
        parts = (to_device(cloud, self.device) for cloud, _ in self.data(jets).in_order(batch_size))
        scores = torch.cat([self.net(cloud).float().softmax(1)[:, 1] for cloud in parts]).cpu()
        if not bool(scores.isfinite().all()):
            raise FloatingPointError("the network's answers are not finite: its training ran away; lower `lr`.")
        return scores


def best_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _fits(size: int, device: torch.device) -> bool:
    """Whether so many bytes may lie on this device and leave room to work."""
    return device.type != "cuda" or size < 0.5 * torch.cuda.mem_get_info(device)[0]


def _number(jets: Jets | StreamedJets) -> int:
    return len(jets) if isinstance(jets, Jets) else jets.num_data


def check_two_classes(jets: Jets | StreamedJets) -> None:
    """Both top and QCD jets, and no others."""
    jets = jets if isinstance(jets, Jets) else jets.heads
    found = set(jets.kind.tolist())
    if found != {0, 1}:
        raise ValueError(
            f"a tagger needs top and QCD jets, got {jets!r}. Choose them with jets.of_kind('qcd', 'top'), of files with both."
        )
