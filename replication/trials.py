"""One trial: one method with one setting on one network, from initialisation to numbers on held-out jets.

Every method runs through `adammcmc.sample`, which keeps the draws and the checkpoints. Optimizers are samplers without
noise whose moves are always accepted. What is kept of a trial is a record, a small JSON object: training losses,
accuracies, acceptance, the chain's health, and measures of its draws on the test jets and on the out-of-distribution
jets.
"""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adammcmc
from adammcmc import Callback, Event, Posterior
from adammcmc.acceptance import AcceptanceTest
from adammcmc.errors import warn
from adammcmc.jets.features import JetData
from adammcmc.jets.particlenet import ParticleNet
from adammcmc.jets.tagger import Tagger, Training
from adammcmc.target.data import derive_seed
from replication.measures import judge
from replication.sets import JetSets
from replication.settings import PAPER_PARAMS, Preset, along
from replication.sghmc import MDECAY, ScaleAdaptedSGHMC, noiseless_share

METHODS = ("adam", "snapshots", "sgd", "sghmc", "released", "printed", "exact", "ensemble", "dropout")
CHAINS = ("released", "printed", "exact")
TESTS: dict[str, Callable[[int], AcceptanceTest]] = {
    "minibatch": lambda size: adammcmc.Minibatch(),
    "full": lambda size: adammcmc.FullData(chunk_size=2048),
    "barker": lambda size: adammcmc.Barker(max(30, size)),
    "sequential": lambda size: adammcmc.Sequential(0.05, max(30, size)),
    "confidence": lambda size: adammcmc.Confidence(0.1, None, size),
    "penalty": lambda size: adammcmc.Penalty(size),
}
"""Acceptance tests by name, as functions of the batch size."""

_LARGEST = 10.0  # the paper's prior is uniform on a bounded set of unknown size; no weight comes near this bound
_WINDOWS = 400  # points of a loss curve


@dataclass(frozen=True)
class Trial:
    """Everything that a record depends on, besides the jets.

    Args:
        method: adam, sgd, sghmc; snapshots (of Adam's own path, at the steps of a chain's draws); released
            (`AsReleased`), printed (`AdamMCMC`: Algorithm 1), exact (`Underdamped` on all jets at once); ensemble
            (members trained by Adam one after the other), dropout (Adam, then random masks).
        sigma: the paper's nominal one.
        sigma_delta: the paper's nominal one.
        scale: the loss that lambda multiplies: "mean" (of the batch: the released script), "batch_sum", or "data_sum"
            (Bayes).
        lam: the paper's lambda.
        beta: both of Adam's.
        lr: learning rate; epsilon for sgHMC.
        test: a name of `TESTS`.
        target_acceptance: what an exact chain's step size is tuned to.
        start: steps of Adam before the chain, in training mode.
        in_training_mode: BatchNorm and dropout as in the paper; False makes the loss one function of the weights.
        network: lite or particlenet.
        num_jets: training jets.
        batch_size: jets in a step.
        steps: of the chain, burn-in included; what is left over after the last draw is not run.
        burn_in: steps before the draws.
        num_draws: or members of an ensemble.
        looks: how many times the test accuracy is measured during the run.
        precision: of the network.
        seed: of weights, data order and noise.
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
            raise ValueError(f"unknown method '{self.method}'. Known: {', '.join(METHODS)}.")
        if self.test not in TESTS:
            raise ValueError(f"unknown test '{self.test}'. Known: {', '.join(TESTS)}.")
        if self.method != "ensemble" and self.burn_in >= self.steps:  # (members of an ensemble have no burn-in)
            raise ValueError(f"a burn-in of {self.burn_in:,} steps leaves no draws in {self.steps:,} steps.")

    @staticmethod
    def of(preset: Preset, method: str, **options: Any) -> Trial:
        """A trial of this preset's size."""
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
        """An exact chain of this preset's size: few jets, all at once, in evaluation mode and full precision.

        All chains start from the same trained network: its BatchNorm statistics are part of the function, hence of the
        target.
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
    def plan(self) -> dict[str, Any]:
        """Arguments of `sample`: the members of an ensemble are chains with one draw each, after their last step."""
        if self.method == "ensemble":
            return {"num_chains": self.num_draws, "num_draws": 1, "gap": self.start + self.steps, "burn_in": 0}
        burn_in: int | adammcmc.BurnIn = self.burn_in
        if self.method == "exact":
            burn_in = adammcmc.BurnIn(num_steps=self.burn_in, target_acceptance=self.target_acceptance)
        num_draws = min(self.num_draws, self.steps - self.burn_in)
        return {"num_draws": num_draws, "gap": (self.steps - self.burn_in) // num_draws, "burn_in": burn_in}

    @property
    def num_steps(self) -> int:
        """Up to the last draw."""
        plan = self.plan
        return int(plan["num_draws"] * plan["gap"]) + (0 if self.method == "ensemble" else self.burn_in)


def run_trial(
    trial: Trial, jets: JetSets, device: torch.device, report: Callable[[int, int], None], folder: Path | None = None
) -> dict[str, Any]:
    """The record of a trial.

    Args:
        trial: what to run.
        jets: the data.
        device: where to run.
        report: called with the number of steps done and the total.
        folder: keeps the unfinished runs; a call with the same folder resumes them, bit for bit. None: memory.
    """
    began = time.perf_counter()
    try:
        posterior, notes = _resumed(trial, jets, device, report, folder)
    except adammcmc.NonFiniteLoss as error:
        what = f"{trial.method} with learning rate {trial.lr:g}, sigma {trial.sigma:g}, seed {trial.seed}"
        raise ValueError(f"{what}: the weights diverged. {error}") from error
    record: dict[str, Any] = {"trial": asdict(trial), "device": device_name(device), "torch": torch.__version__}
    if trial.method != "ensemble":
        record |= notes[-1].record()
    if trial.method == "sghmc":
        record["silent"] = noiseless_share(_sampler_state(posterior)["state"].values(), trial.lr, MDECAY)
    if trial.method in CHAINS:
        record |= _chain_record(posterior)
    assert isinstance(posterior.model, ParticleNet)
    test, others = (_scores(trial, posterior, jets.data(name, posterior.model)) for name in ("test", "others"))
    record["draws"] = judge(test, others, jets.test, jets.others)
    record["seconds"] = time.perf_counter() - began + sum(note.seconds_before for note in notes)
    return record


def device_name(device: torch.device) -> str:
    """Of the GPU or the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _resumed(
    trial: Trial, jets: JetSets, device: torch.device, report: Callable[[int, int], None], folder: Path | None
) -> tuple[Posterior, list[_Notes]]:
    """`_run_all`; where the folder is damaged or holds another run, from the beginning."""
    try:
        return _run_all(trial, jets, device, report, folder)
    except (adammcmc.StoreCorrupt, adammcmc.StoreMismatch) as error:
        if folder is None or not folder.exists():
            raise
        warn(f"'{folder}' cannot be resumed ({error}): this trial starts again.")
        shutil.rmtree(folder)
    return _run_all(trial, jets, device, report, folder)


def _run_all(
    trial: Trial, jets: JetSets, device: torch.device, report: Callable[[int, int], None], folder: Path | None
) -> tuple[Posterior, list[_Notes]]:
    """The steps of Adam before the chain, if any, and the chain."""
    start_seed = trial.seed if trial.start_seed is None else trial.start_seed
    net = _network(trial, start_seed, device)
    if trial.method == "ensemble":
        seeds = [derive_seed(trial.seed, 5, member) % 2**31 for member in range(trial.num_draws)]
        initial = [_network(trial, seed, device).state_dict() for seed in seeds]
        total = trial.num_draws * trial.num_steps
        posterior, notes = _run(trial, net, jets, lambda done: report(done, total), folder, initial=initial)
        return posterior, [notes]
    total, all_notes, warm_start = trial.start + trial.num_steps, [], None
    if trial.start:
        options: dict[str, Any] = {"steps": trial.start, "burn_in": trial.start - 1, "num_draws": 1, "start": 0, "looks": 0}
        options |= {"method": "adam", "lr": trial.lr if trial.method in _ADAM else 1e-3, "in_training_mode": True}
        adam = replace(trial, seed=derive_seed(start_seed, 0) % 2**31, **options)
        path = None if folder is None else folder / "start"
        before, notes = _run(adam, net, jets, lambda done: report(done, total), path)
        all_notes.append(notes)
        net.load_state_dict(before[-1])
        if trial.method in ("released", "printed", *_ADAM):
            warm_start = _sampler_state(before)
    path = None if folder is None else folder / "chain"
    posterior, notes = _run(trial, net, jets, lambda done: report(trial.start + done, total), path, warm_start=warm_start)
    return posterior, [*all_notes, notes]


def _network(trial: Trial, seed: int, device: torch.device) -> ParticleNet:
    network: Any = trial.network
    precision: Any = trial.precision
    return Tagger(Training(network=network, seed=seed), device=device, precision=precision).net


def _run(
    trial: Trial, net: ParticleNet, jets: JetSets, report: Callable[[int], None], path: Path | None, **options: Any
) -> tuple[Posterior, _Notes]:
    batch_size = None if trial.method == "exact" else min(trial.batch_size, trial.num_jets)
    data = jets.data("train", net, trial.num_jets, batch_size)
    net.train(trial.in_training_mode)
    notes = _Notes(trial, jets.data("test", net), jets.test.kind == 1, report)
    posterior = adammcmc.sample(
        net,
        data,
        F.cross_entropy,
        sampler=_sampler(trial, net, data.num_data),
        stacked=False,
        seed=trial.seed,
        path=path,
        resume=path is not None,
        callbacks=[notes],
        progress=False,
        **trial.plan,
        **options,
    )
    return posterior, notes


_ADAM = ("adam", "snapshots", "dropout", "ensemble")


def _sampler(trial: Trial, net: nn.Module, num_data: int) -> Callable[..., adammcmc.Sampler]:
    """Makes the sampler from the parameters."""
    noiseless: dict[str, Any] = {"sigma": 0.0, "acceptance": adammcmc.AlwaysAccept()}
    if trial.method in _ADAM:
        return partial(adammcmc.AdamMCMC, lr=trial.lr, betas=(0.99, 0.99), **noiseless)
    if trial.method == "sgd":
        return partial(adammcmc.OptimizerMCMC, optimizer=partial(torch.optim.SGD, lr=trial.lr), **noiseless)
    if trial.method == "sghmc":
        sghmc = partial(ScaleAdaptedSGHMC, lr=trial.lr, num_data=num_data, burn_in=trial.burn_in)
        return partial(adammcmc.OptimizerMCMC, optimizer=sghmc, **noiseless)
    paper = adammcmc.from_paper(
        trial.lam,
        trial.sigma,
        trial.sigma_delta,
        num_params=PAPER_PARAMS,
        num_data=num_data,
        loss=trial.scale,
        batch_size=trial.batch_size,
    )
    if trial.method == "exact":
        prior = adammcmc.Gaussian.fan_in(net, 2.0)
        return partial(adammcmc.Underdamped, inverse_temperature=paper.inverse_temperature, prior=prior)
    return partial(
        adammcmc.AsReleased if trial.method == "released" else adammcmc.AdamMCMC,
        lr=trial.lr,
        betas=(trial.beta, trial.beta),
        sigma=paper.sigma,
        sigma_along=paper.sigma_along,
        inverse_temperature=paper.inverse_temperature,
        prior=adammcmc.UniformBox(-_LARGEST, _LARGEST) if trial.method == "printed" else None,
        acceptance=TESTS[trial.test](trial.batch_size),
    )


class _Notes(Callback):
    """What is recorded at each step, beside the draws. It is part of the run's checkpoints.

    Args:
        trial: what is run.
        test: the test jets.
        is_top: their labels.
        report: called with the number of steps done.
    """

    def __init__(self, trial: Trial, test: JetData, is_top: Tensor, report: Callable[[int], None]) -> None:
        self._trial, self._test, self._is_top, self._report = trial, test, is_top, report
        self._window = max(1, trial.steps // _WINDOWS)
        self._numbers = torch.zeros(2 + trial.num_steps // self._window, dtype=torch.float64)
        """Sums of kappa and of the examples that a decision reads, and the loss curve: on the device of the chain."""
        self._num_kappas = 0
        self._accuracies: list[list[float]] = []
        self._event: Event | None = None
        self._step = 0
        self._seconds: dict[int, float] = {}
        self._began = time.perf_counter()

    @property
    def seconds_before(self) -> float:
        """Spent by earlier processes."""
        return sum(self._seconds.values())

    def state_dict(self, chain: int) -> dict[str, Any]:
        is_running = self._event is not None and self._event.chain == chain
        if self._event is not None and is_running:
            self._note(self._event)  # a checkpoint is written before `on_step` of its step
        return {
            "step": self._step if is_running else 0,
            "seconds": self._seconds.get(chain, 0.0) + (time.perf_counter() - self._began if is_running else 0.0),
            "numbers": self._numbers.clone(),
            "num_kappas": self._num_kappas,
            "accuracies": list(self._accuracies),
        }

    def load_state_dict(self, chain: int, state: dict[str, Any]) -> None:
        self._step, self._numbers, self._num_kappas = state["step"], state["numbers"], state["num_kappas"]
        self._accuracies = [list(pair) for pair in state["accuracies"]]
        self._seconds[chain], self._began = state["seconds"], time.perf_counter()

    def on_start(self, event: Event) -> None:
        self._event = event
        self._numbers = self._numbers.to(next(event.model.parameters()).device)

    def on_step(self, event: Event) -> None:
        self._note(event)
        self._report(event.chain * self._trial.num_steps + event.step)

    def _note(self, event: Event) -> None:
        """The step that was just made, once."""
        trial, sampler = self._trial, event.sampler
        step = sampler.num_steps
        if step == self._step:
            return
        self._step = step
        info = sampler.info
        place = 2 + (step - 1) // self._window
        if place < len(self._numbers):
            self._numbers[place] += info.loss / self._window
        if trial.method in CHAINS and step > trial.burn_in:
            self._numbers[1] += info.num_examples
            if step % 10 == 0 and trial.method != "exact":
                self._numbers[0] += _kappa(info.step_to_noise.double(), trial)
                self._num_kappas += 1
        if trial.looks and step % max(1, trial.steps // trial.looks) == 0:
            self._accuracies.append([step, self._accuracy(event.model)])

    @torch.no_grad()
    def _accuracy(self, model: nn.Module) -> float:
        """On the test jets, in evaluation mode."""
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            logits = torch.cat([model(cloud) for cloud, _ in self._test.in_order(2048)])
        finally:
            for module, training in modes:
                module.training = training
        return float(((logits[:, 1] > logits[:, 0]).cpu() == self._is_top).double().mean())

    def record(self) -> dict[str, Any]:
        """The loss curve and the accuracies; of a chain, kappa and the examples a decision reads."""
        trial, (kappa, examples, *losses) = self._trial, self._numbers.tolist()
        found: dict[str, Any] = {
            "loss": {"every": self._window, "values": losses},
            "accuracy": {"steps": [int(s) for s, _ in self._accuracies], "values": [a for _, a in self._accuracies]},
        }
        if trial.method in CHAINS:
            found["kappa"] = kappa / self._num_kappas if self._num_kappas else None
            found["examples"] = examples / (trial.num_steps - trial.burn_in)
        return found


def _kappa(r: Tensor, trial: Trial) -> Tensor:
    """Of the proposal, from r = |u| / sigma: on a flat loss the acceptance would be 2 Phi(-kappa)."""
    return r / (1 + (along(trial.sigma_delta) * r) ** 2).sqrt()


def _chain_record(posterior: Posterior) -> dict[str, Any]:
    """What the chain reports about itself, since burn-in."""
    health = posterior.health()[0]
    names = ("verdict", "is_healthy", "loss_influence", "noise", "beta_eff", "temperature")
    return {
        "target": posterior.target,
        "acceptance": float(posterior.trace("acceptance_rate").mean()),
        "step_size": posterior.settings(0).get("step_size"),
        **{name: getattr(health, name) for name in names},
    }


def _sampler_state(posterior: Posterior) -> dict[str, Any]:
    """Of the first chain at its last draw: the moments of Adam, or sgHMC's scales."""
    saved = posterior.store.saved(0)
    assert saved is not None
    state: dict[str, Any] = saved["sampler"]
    return state


def _scores(trial: Trial, posterior: Posterior, data: JetData) -> Tensor:
    """The top probability of these jets, (draws, jets)."""
    # one draw at a time: a ParticleNet is faster alone than many under vmap
    predict = partial(Posterior.predict, data=data, raw=True, batch_size=min(2048, data.num_data), progress=False)
    if trial.method == "dropout":  # random masks at the last weights
        device = next(posterior.model.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(derive_seed(trial.seed, 6))
            last = posterior[-1:]
            parts = [predict(last, forward=_with_dropout, likelihood="categorical").raw for _ in range(trial.num_draws)]
        return torch.cat([part[..., 1] for part in parts if part is not None])
    raw = predict(posterior[-1:] if trial.method in ("adam", "sgd") else posterior).raw  # an optimizer has one estimate
    assert raw is not None
    return raw[..., 1]


def _with_dropout(model: nn.Module, batch: Any) -> Tensor:
    """The network's outputs with dropout, but with the running statistics of BatchNorm."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    outputs: Tensor = model(batch[0])
    return outputs
