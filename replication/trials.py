"""One trial: one method with one setting on one network, from its first step to numbers on held-out jets.

What is kept of a trial is a record, a small object of JSON: losses and accuracies on the way, acceptance, the sampler's own
verdict, and what its draws say about the test jets and about jets from elsewhere.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adammcmc
from adammcmc.acceptance import AcceptanceTest, AlwaysAccept, Barker, Confidence, FullData, Minibatch, Penalty, Sequential
from adammcmc.jets.features import JetData
from adammcmc.jets.particlenet import ParticleNet
from adammcmc.jets.tagger import NETWORKS
from adammcmc.samplers.adaptation import BurnIn
from adammcmc.samplers.exact import Underdamped
from adammcmc.samplers.optimizer import AdamMCMC, AsReleased
from adammcmc.samplers.sampler import Sampler
from adammcmc.target.data import derive_seed
from adammcmc.target.likelihood import DataExamples, Loss
from adammcmc.target.priors import Gaussian, UniformBox
from adammcmc.target.units import from_paper
from replication.checkpoint import Checkpoint
from replication.measures import judge
from replication.sets import JetSets
from replication.settings import PAPER_PARAMS, Preset, along
from replication.sghmc import ScaleAdaptedSGHMC
from replication.training import Training

__all__ = ["METHODS", "TESTS", "Trial", "device_name", "run_trial"]

METHODS = ("adam", "snapshots", "sgd", "sghmc", "released", "printed", "exact", "ensemble", "dropout")
TESTS: dict[str, Callable[[int], AcceptanceTest]] = {
    "minibatch": lambda size: Minibatch(),
    "full": lambda size: FullData(chunk_size=2048),
    "barker": lambda size: Barker(max(30, size)),
    "sequential": lambda size: Sequential(0.05, max(30, size)),
    "confidence": lambda size: Confidence(0.1, None, size),
    "penalty": lambda size: Penalty(size),
}
"""By name, for batches of so many jets."""


_LARGEST = 10.0  # the paper's prior is uniform on a bounded set, which it does not give; no weight comes near this bound


@dataclass(frozen=True)
class Trial:
    """What one trial is: everything that its record depends on, besides the jets.

    Args:
        method: adam, sgd, sghmc; snapshots (of Adam's own path, at the steps of a chain's draws); released (`AsReleased`),
            printed (`AdamMCMC`: Algorithm 1), exact (`Underdamped` on all jets at once); ensemble (members trained by Adam one
            after the other), dropout (Adam, then draws of the masks).
        sigma: the paper's nominal one.
        sigma_delta: the paper's nominal one.
        scale: what lambda multiplies: "mean" (of the batch: the released script), "batch_sum", or "data_sum" (Bayes).
        lam: the paper's lambda.
        beta: both of Adam's.
        lr: learning rate, of sgHMC its epsilon.
        test: a name of `TESTS`.
        target_acceptance: what an exact chain's step size is tuned to.
        start: steps of Adam before the chain, in training mode.
        in_training_mode: BatchNorm and dropout as in the paper; False is one function of the weights.
        network: lite or particlenet.
        num_jets: to train on.
        batch_size: jets in a step.
        steps: of the chain.
        burn_in: steps before the first draw.
        num_draws: or members of an ensemble.
        looks: how often the accuracy on the test jets is looked at on the way.
        precision: of the network.
        seed: of weights, order, noise.
        start_seed: of the weights and of the steps of Adam before the chain; None is `seed`.
    """

    method: str
    sigma: float = 0.0
    sigma_delta: float = 0.0
    scale: str = "batch_sum"
    lam: float = 1.0
    beta: float = 0.99
    lr: float = 1e-3
    test: str = "minibatch"
    target_acceptance: float | None = None
    start: int = 0
    in_training_mode: bool = True
    network: str = "lite"
    num_jets: int = 20_000
    batch_size: int = 512
    steps: int = 2_000
    burn_in: int = 1_000
    num_draws: int = 10
    looks: int = 0
    precision: str = "bfloat16"
    seed: int = 0
    start_seed: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"there is no method '{self.method}'. Known: {', '.join(METHODS)}.")
        if self.test not in TESTS:
            raise ValueError(f"there is no test '{self.test}'. Known: {', '.join(TESTS)}.")
        if self.method != "ensemble" and self.burn_in >= self.steps:  # (members of an ensemble have no burn-in)
            raise ValueError(f"a burn-in of {self.burn_in:,} steps leaves no draws in {self.steps:,} steps.")

    @staticmethod
    def of(preset: Preset, method: str, **options: Any) -> Trial:
        """A trial at this preset's sizes."""
        sizes: dict[str, Any] = {
            "network": preset.network,
            "num_jets": preset.num_train,
            "batch_size": preset.batch_size,
            "steps": preset.steps,
            "burn_in": preset.burn_in,
            "num_draws": preset.num_draws,
            "precision": preset.precision,
        }
        return Trial(method, **{**sizes, **options})

    @staticmethod
    def exact(preset: Preset, **options: Any) -> Trial:
        """An exact chain at this preset's sizes: few jets, all at once, in evaluation mode and full precision.

        All chains start from one training: its BatchNorm statistics are part of the function, and so of the target.
        """
        sizes: dict[str, Any] = {
            "scale": "data_sum",
            "start": preset.steps // 2,
            "start_seed": 0,
            "in_training_mode": False,
            "network": "lite",
            "num_jets": preset.exact_data,
            "steps": preset.exact_steps,
            "burn_in": preset.exact_steps // 3,
            "num_draws": 4 * preset.num_draws,
            "precision": "float32",
        }
        return Trial.of(preset, "exact", **{**sizes, **options})

    @property
    def gap(self) -> int:
        """Steps between draws."""
        return max(1, (self.steps - self.burn_in) // self.num_draws)


class _Method(Protocol):
    """What a trial steps: a sampler, or an optimizer."""

    def step(self, batch: Any) -> Tensor: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def run_trial(
    trial: Trial,
    jets: JetSets,
    device: torch.device,
    tell: Callable[[int, int], None],
    checkpoint: Checkpoint | None = None,
) -> dict[str, Any]:
    """Its record. `tell` is given the steps done and to do; from a `checkpoint` it goes on where it was."""
    checkpoint = checkpoint or Checkpoint()
    watch = _Watch()
    record: dict[str, Any] = {"trial": asdict(trial), "device": device_name(device), "torch": torch.__version__}
    if trial.method == "ensemble":
        record |= _run_ensemble(trial, jets, device, tell, checkpoint, watch)
    else:
        record |= _Run(trial, jets, device, watch).go(tell, checkpoint)
    record["seconds"] = watch.seconds
    return record


def device_name(device: torch.device) -> str:
    """What it is, in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _made_by(device: torch.device) -> dict[str, str]:
    """What a state depends on besides its trial."""
    versions = {"torch": f"torch {torch.__version__}", "adammcmc": f"adammcmc {adammcmc.__version__}"}
    return {"device": device_name(device), **versions, "state": f"state {_STATE}"}


class _Watch:
    """Seconds that a trial took, of all processes that were at it as far as their states tell."""

    def __init__(self) -> None:
        self._began, self.before = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self._began


_STATE = 1
"""Of what a state holds. Raise it when that changes: trials under way then begin again."""
_KEPT = ("step", "accepted", "sums", "counts", "curve", "accuracies", "draws")


class _Run:
    """A chain, or a training, under way."""

    def __init__(self, trial: Trial, jets: JetSets, device: torch.device, watch: _Watch | None = None) -> None:
        self.trial, self.jets, self.device, self.watch = trial, jets, device, watch or _Watch()
        self._start_seed = trial.seed if trial.start_seed is None else trial.start_seed
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(self._start_seed)
            self.net: ParticleNet = NETWORKS[trial.network]()
        self.net.to(device)
        self.net.autocast = torch.bfloat16 if trial.precision == "bfloat16" else None
        self.curve: list[Tensor] = []
        self.accuracies: list[tuple[int, float]] = []
        self.draws: dict[str, list[Tensor]] = {"test": [], "others": []}
        self.step, self.accepted = 0, 0.0
        names = ("loss", "kappa", "examples")
        self.sums = {name: torch.zeros((), device=device, dtype=torch.float64) for name in names}
        self.counts = dict.fromkeys(names, 0)

    def losses(self, batch: Any) -> Tensor:
        """Cross entropy of each jet: their spread says how noisy a minibatch test is."""
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")

    def loss(self, batch: Any) -> Tensor:
        """Mean cross entropy of a batch."""
        return self.losses(batch).mean()

    def go(self, tell: Callable[[int, int], None], checkpoint: Checkpoint) -> dict[str, Any]:
        """To the end; what is found."""
        trial = self.trial
        saved = checkpoint.load(_made_by(self.device))
        moments = None
        if saved is None or saved["phase"] == "start":
            moments, saved = self._start(tell, checkpoint, saved), None
        self.net.train(trial.in_training_mode)
        whole = trial.method == "exact"
        data = self.jets.data("train", self.net, trial.num_jets, None if whole else trial.batch_size)
        data.restart(derive_seed(trial.seed, 2))
        torch.manual_seed(derive_seed(trial.seed, 1))
        method = self._method(data)
        sampler = method.sampler if isinstance(method, _Sampling) else None
        if moments is not None and isinstance(sampler, AdamMCMC):
            sampler.load_state_dict(moments)
        if saved is not None:
            self._load(saved, method, data)
        total, window = trial.start + trial.steps, max(1, trial.steps // 400)
        held = {name: self.jets.data(name, self.net) for name in ("test", "others")}
        batch = next(data) if whole else None
        looks_at_chosen = sampler is not None and getattr(sampler.acceptance, "needs_examples", False)
        for step in range(self.step + 1, trial.steps + 1):
            self.sums["loss"] += method.step(batch if whole else next(data)).detach()
            if step % window == 0:
                self.curve.append(self.sums["loss"] / window)
                self.sums["loss"] = torch.zeros((), device=self.device, dtype=torch.float64)
            if sampler is not None and step > trial.burn_in:
                if step % 10 == 0 and not whole:
                    self._add("kappa", _kappa(sampler.info.step_to_noise.double(), trial))
                if looks_at_chosen:
                    self._add("examples", sampler.info.num_examples.double())
            if step == trial.burn_in and sampler is not None:
                sampler.reset_health()
                self.accepted = float(sampler.mean_acceptance_rate * step)
            if trial.looks and step % max(1, trial.steps // trial.looks) == 0:
                self.accuracies.append((step, self._accuracy(held["test"])))
            is_draw = step > trial.burn_in and (step - trial.burn_in) % trial.gap == 0
            if is_draw and len(self.draws["test"]) < trial.num_draws and trial.method != "dropout":
                self._draw(held)
            self.step = step
            if step % 50 == 0:
                tell(trial.start + step, total)
            if checkpoint.is_due:
                checkpoint.save(self._state("chain", method, data))
        if trial.method == "dropout":  # its draws are masks, at the last weights
            for _ in range(trial.num_draws):
                self._draw(held)
        if trial.method in ("adam", "sgd"):  # a point estimate: its last weights
            self.draws = {name: values[-1:] for name, values in self.draws.items()}
        found = self._found(window)
        if isinstance(method, Training) and isinstance(method.optimizer, ScaleAdaptedSGHMC):
            found["silent"] = float(method.optimizer.silent())
        if sampler is not None and not isinstance(sampler.acceptance, AlwaysAccept):
            chain = float(sampler.mean_acceptance_rate * trial.steps - self.accepted) / (trial.steps - trial.burn_in)
            found |= _told(sampler, chain, self._mean("kappa"))
            examples = self._mean("examples")
            found["examples"] = float(data.num_data if whole else trial.batch_size) if examples is None else examples
        return found

    def _start(
        self, tell: Callable[[int, int], None], checkpoint: Checkpoint, saved: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """Adam before the chain; returns its state."""
        trial = self.trial
        if not trial.start:
            return None
        self.net.train()
        torch.manual_seed(derive_seed(self._start_seed, 0))
        data = self.jets.data("train", self.net, trial.num_jets, min(trial.batch_size, trial.num_jets))
        data.restart(derive_seed(self._start_seed, 3))
        adam = _Sampling(_adam(self.net, trial), self.losses)
        if saved is not None:
            self._load(saved, adam, data)
        for step in range(self.step + 1, trial.start + 1):
            adam.step(next(data))
            self.step = step
            if step % 100 == 0:
                tell(step, trial.start + trial.steps)
            if checkpoint.is_due:
                checkpoint.save(self._state("start", adam, data))
        self.step = 0
        state = adam.state_dict()
        state.pop("adammcmc")  # of Adam only the moments: the chain has its own random numbers and counts
        return state

    # --- what goes on after a kill --------------------------------------------------------------------------------------------

    def _state(self, phase: str, method: _Method, data: JetData) -> dict[str, Any]:
        is_cuda = self.device.type == "cuda"
        return {
            "made_by": _made_by(self.device),
            "seconds": self.watch.seconds,
            "phase": phase,
            "net": dict(self.net.state_dict()),
            "method": method.state_dict(),
            "data": data.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.device) if is_cuda else None,
            **{name: getattr(self, name) for name in _KEPT},
        }

    def _load(self, state: dict[str, Any], method: _Method, data: JetData) -> None:
        self.net.load_state_dict(state["net"])
        method.load_state_dict(state["method"])
        data.load_state_dict(state["data"])
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"], self.device)
        self.watch.before += state["seconds"]
        for name in _KEPT:
            setattr(self, name, state[name])
        self.sums = {name: value.to(self.device) for name, value in self.sums.items()}
        self.curve = [value.to(self.device) for value in self.curve]

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] += value
        self.counts[name] += 1

    def _mean(self, name: str) -> float | None:
        return float(self.sums[name]) / self.counts[name] if self.counts[name] else None

    def _method(self, data: JetData) -> _Method:
        trial, net, num_data = self.trial, self.net, data.num_data
        if trial.method in ("adam", "snapshots", "dropout"):
            return _Sampling(_adam(net, trial), self.losses)
        if trial.method == "sgd":
            return Training(torch.optim.SGD(net.parameters(), lr=trial.lr), self.loss, self.device)
        if trial.method == "sghmc":
            sghmc = ScaleAdaptedSGHMC(net.parameters(), lr=trial.lr, num_data=num_data, burn_in=trial.burn_in)
            return Training(sghmc, self.loss, self.device)
        paper = from_paper(
            trial.lam,
            trial.sigma,
            trial.sigma_delta,
            num_params=PAPER_PARAMS,
            num_data=num_data,
            loss=trial.scale,
            batch_size=trial.batch_size,
        )
        generator = torch.Generator(self.device).manual_seed(derive_seed(trial.seed, 4))
        common: dict[str, Any] = {
            "num_data": num_data,
            "inverse_temperature": paper.inverse_temperature,
            "generator": generator,
            "prior": UniformBox(-_LARGEST, _LARGEST) if trial.method == "printed" else None,
        }
        if trial.method == "exact":
            burn_in = BurnIn(num_steps=trial.burn_in, target_acceptance=trial.target_acceptance)
            common["prior"] = Gaussian.fan_in(net, 2.0)
            return _Sampling(Underdamped(net.named_parameters(), burn_in=burn_in, fixed_data=True, **common), self.losses)
        test = TESTS[trial.test](trial.batch_size)
        if getattr(test, "needs_examples", False):
            common["examples"] = DataExamples(net, data, Loss(F.cross_entropy), self.device)
        made = {"released": AsReleased, "printed": AdamMCMC}[trial.method](
            net.named_parameters(),
            lr=trial.lr,
            betas=(trial.beta, trial.beta),
            sigma=paper.sigma,
            sigma_along=paper.sigma_along,
            acceptance=test,
            **common,
        )
        return _Sampling(made, self.losses)

    # --- what is looked at ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _scores(self, data: JetData) -> Tensor:
        """The probability of a top jet, of all these jets, at the present weights: (jets,), on the host."""
        modes = [(module, module.training) for module in self.net.modules()]
        self.net.eval()
        if self.trial.method == "dropout":
            for module in self.net.modules():
                if isinstance(module, nn.Dropout):
                    module.train()
        try:
            parts = [self.net(cloud).float().softmax(1)[:, 1] for cloud, _ in data.in_order(2048)]
        finally:
            for module, training in modes:
                module.training = training
        return torch.cat(parts).cpu() if parts else torch.zeros(0)

    def _accuracy(self, data: JetData) -> float:
        return float(((self._scores(data) > 0.5) == (self.jets.test.kind == 1)).double().mean())

    def _draw(self, held: dict[str, JetData]) -> None:
        for name, data in held.items():
            scores = self._scores(data)
            if not bool(scores.isfinite().all()):
                said = f"{self.trial.method} with learning rate {self.trial.lr:g}, sigma {self.trial.sigma:g}"
                raise ValueError(f"{said}, seed {self.trial.seed}: its scores are not finite, the weights have run away.")
            self.draws[name].append(scores)

    def _found(self, window: int) -> dict[str, Any]:
        return {
            "loss": {"every": window, "values": torch.stack(self.curve).cpu().tolist()},
            "accuracy": {"steps": [s for s, _ in self.accuracies], "values": [a for _, a in self.accuracies]},
            "draws": judge(
                torch.stack(self.draws["test"]), torch.stack(self.draws["others"]), self.jets.test, self.jets.others
            ),
        }


def _kappa(r: Tensor, trial: Trial) -> Tensor:
    """Of the proposal, from r = |u| / sigma: on a flat loss the acceptance would be 2 Phi(-kappa)."""
    return r / (1 + (along(trial.sigma_delta) * r) ** 2).sqrt()


def _told(sampler: Sampler, acceptance: float, kappa: float | None) -> dict[str, Any]:
    """What the sampler says about itself, since burn-in."""
    health = sampler.health()
    return {
        "target": sampler.describe(),
        "verdict": health.verdict,
        "is_healthy": health.is_healthy,
        "acceptance": acceptance,
        "kappa": kappa,
        "loss_influence": health.loss_influence,
        "noise": health.noise,
        "beta_eff": health.beta_eff,
        "temperature": health.temperature,
        "step_size": sampler.param_groups[0]["lr"] if isinstance(sampler, Underdamped) else None,
    }


def _adam(net: nn.Module, trial: Trial) -> AdamMCMC:
    """torch's Adam, bit for bit, whose steps are captured on a GPU."""
    lr = trial.lr if trial.method in ("adam", "snapshots", "dropout", "ensemble") else 1e-3
    return AdamMCMC(
        net.named_parameters(),
        lr=lr,
        betas=(0.99, 0.99),
        sigma=0.0,
        num_data=trial.num_jets,  # (of no influence)
        acceptance=AlwaysAccept(),
    )


class _Sampling:
    """Steps of a sampler."""

    def __init__(self, sampler: Sampler, loss: Callable[[Any], Tensor]) -> None:
        self.sampler, self._loss = sampler, loss

    def step(self, batch: Any) -> Tensor:
        return self.sampler.step(self._loss, batch)

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)


def _run_ensemble(
    trial: Trial, jets: JetSets, device: torch.device, tell: Callable[[int, int], None], checkpoint: Checkpoint, watch: _Watch
) -> dict[str, Any]:
    """Members with weights and orders of their own, each of `steps` steps of Adam; their last weights are the draws."""
    saved = checkpoint.load(_made_by(device))
    scores: dict[str, list[Tensor]] = {"test": [], "others": []} if saved is None else saved["scores"]
    watch.before += 0.0 if saved is None else saved["seconds"]
    for member in range(len(scores["test"])):
        checkpoint.part(member).remove()  # if a process was killed after it had saved the scores
    for member in range(len(scores["test"]), trial.num_draws):
        options = asdict(trial) | {
            "method": "adam",
            "num_draws": 1,
            "burn_in": trial.steps - 1,
            "seed": derive_seed(trial.seed, 5, member) % 2**31,
        }
        one, own = _Run(Trial(**options), jets, device), checkpoint.part(member)
        one.go(lambda done, total, member=member: tell(member * total + done, trial.num_draws * total), own)  # type: ignore[misc]
        for name, values in one.draws.items():
            scores[name].append(values[-1])
        watch.before += one.watch.before
        checkpoint.save({"made_by": _made_by(device), "seconds": watch.seconds, "scores": scores})
        own.remove()
    return {"draws": judge(torch.stack(scores["test"]), torch.stack(scores["others"]), jets.test, jets.others)}
