"""Airfoil self-noise by a small Bayesian network from ten trained starts, in the protocol of scikit-learn-contrib/bde.

    python -m benchmarks.airfoil --data airfoil.data --seeds 0 1 2 3 4

80% of the rows train (scikit-learn's split of seed 0), standardised by the training part; 5-16-16-16-16-2 with relu, which
returns mean and log standard deviation; prior N(0, 1) on every weight. Ten members are trained (lr 1e-3, weight decay 1e-4,
15% validation, patience 20), and a chain starts from each. Printed are the root mean squared error and the negative log
likelihood of the standardised test targets under a normal with the mean and variance of the mixture of all draws ("normal"),
and under that mixture itself, for the members and for the draws, and the same for the chains' present weights along the way.

The data are not part of the repository: UCI Machine Learning Repository, Airfoil Self-Noise, 1,503 rows of 6 numbers.
`--time` measures instead how much faster stacked chains are than sequential ones on this network.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

import adammcmc
from adammcmc import BurnIn, Callback, Event, Gaussian, GaussianNLL, Members, Posterior
from benchmarks.timing import machine

VARIABLE = "ADAMMCMC_AIRFOIL"
RESULTS = Path(__file__).parent / "results" / "airfoil.json"
SAMPLERS: dict[str, Any] = {
    "default": None,
    "underdamped": adammcmc.Underdamped,
    "microcanonical": adammcmc.Microcanonical,
    "unadjusted": partial(adammcmc.Microcanonical, acceptance=adammcmc.AlwaysAccept()),
}
GAP = 50


class Data(NamedTuple):
    """Standardised, (examples, 5) and (examples, 1)."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


class LogVariances(nn.Module):
    """Means and log standard deviations, (batch, 2), to the means and log variances that `GaussianNLL()` reads."""

    def forward(self, outputs: Tensor) -> Tensor:
        return torch.cat([outputs[:, :1], 2 * outputs[:, 1:].clamp(-10, 10)], 1)


def load(path: str | None) -> Data:
    """The file, or the one that the environment names."""
    path = path or os.environ.get(VARIABLE)
    if path is None or not Path(path).is_file():
        sys.exit(
            f"{'no data file was given' if path is None else f'there is no file {path!r}'}: pass --data, or set {VARIABLE}."
        )
    table = np.loadtxt(path)
    parts = train_test_split(table[:, :-1], table[:, -1:], test_size=0.2, random_state=0)
    scalers = [StandardScaler().fit(parts[0])] * 2 + [StandardScaler().fit(parts[2])] * 2
    x, x_test, y, y_test = (
        torch.tensor(scaler.transform(part), dtype=torch.float32) for scaler, part in zip(scalers, parts, strict=True)
    )
    return Data((x, y), (x_test, y_test))


def network() -> nn.Sequential:
    """5-16-16-16-16-2, 946 weights."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (5, 16, 16, 16):
        layers += [nn.Linear(width, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16, 2), LogVariances())


def scores(means: Tensor, variances: Tensor, targets: Tensor) -> dict[str, float]:
    """Of a mixture of normals, (draws, examples, 1)."""
    mean, variance = means.mean(0), variances.mean(0) + means.var(0, correction=0)
    each = -0.5 * ((targets - means) ** 2 / variances + torch.log(2 * math.pi * variances))
    normal = -0.5 * ((targets - mean) ** 2 / variance + torch.log(2 * math.pi * variance))
    found = {
        "rmse": (targets - mean).square().mean().sqrt(),
        "nll_normal": -normal.mean(),
        "nll_mixture": math.log(len(means)) - torch.logsumexp(each, 0).mean(),
    }
    return {name: round(float(value), 4) for name, value in found.items()}


@torch.no_grad()
def of_members(model: nn.Module, states: Members, test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Scores of the trained members as a deep ensemble."""
    outputs = torch.stack([torch.func.functional_call(model, state, (test[0],)) for state in states])
    return scores(outputs[..., :1], outputs[..., 1:].exp(), test[1])


def of_posterior(posterior: Posterior, test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Scores of all draws."""
    prediction = posterior.predict(test, raw=True, progress=False)
    assert prediction.raw is not None
    assert prediction.raw_variances is not None
    return scores(prediction.raw, prediction.raw_variances, test[1])


class Curve(Callback):
    """Test predictions of each chain's present weights, every so many steps."""

    def __init__(self, inputs: Tensor, every: int) -> None:
        self._inputs, self._every, self._calls = inputs, every, 0
        self.points: dict[int, list[Tensor]] = {}

    def overrides(self, method: str) -> bool:
        """Only at steps that are due: for stacked chains a call copies all weights."""
        self._calls += method == "on_step"
        return method == "on_step" and self._calls % self._every == 0

    @torch.no_grad()
    def on_step(self, event: Event) -> None:
        self.points.setdefault(event.step, []).append(event.model(self._inputs))

    def scores(self, targets: Tensor) -> dict[int, dict[str, float]]:
        """By step, of all chains' present weights."""
        outputs = {step: torch.stack(own) for step, own in self.points.items()}
        return {step: scores(x[..., :1], x[..., 1:].exp(), targets) for step, x in outputs.items()}


def run(data: Data, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One seed: members, chains, scores."""
    model, loss, draws = network(), GaussianNLL(), arguments.draws
    members = adammcmc.train_members(model, data.train, loss, arguments.members, patience=20, seed=seed)
    print(f"seed {seed}: members {of_members(model, members, data.test)}, {members.seconds:.0f} s", flush=True)
    curve, began = Curve(data.test[0], arguments.every), time.perf_counter()
    most: float = arguments.gradients - draws * GAP
    if arguments.sampler != "unadjusted":
        # exact steps, which begin after 85% of burn-in at the latest, take up to 1.8 gradients: they follow refused proposals
        most = (arguments.gradients - 1.8 * draws * GAP) / (0.85 + 0.15 * 1.8)
    posterior = adammcmc.sample(
        model,
        data.train,
        loss,
        sampler=SAMPLERS[arguments.sampler],
        prior=Gaussian(1.0),
        num_draws=draws,
        gap=GAP,
        burn_in=BurnIn(max_steps=max(1, int(most))),
        num_chains=arguments.members,
        stacked=not arguments.sequential,
        initial=members,
        callbacks=[curve],
        seed=seed,
    )
    seconds = time.perf_counter() - began
    summary = posterior.summary(data.test)
    burn_in = max(record.num_gradients or 0 for record in posterior.warm_up)
    found = {
        "members": of_members(model, members, data.test) | {"seconds": round(members.seconds, 1), "steps": members.steps},
        "draws": of_posterior(posterior, data.test),
        "gradients": round(burn_in + posterior.index[-1]["health"]["num_gradients"]),
        "burn_in": burn_in,
        "seconds": round(seconds, 1),
        "rhat": round(next((row.rhat for row in summary.rows if row.name.startswith("predictions")), math.nan), 3),
        "grade": summary.grade,
        "verdict": summary.verdict,
        "target": posterior.target,
        "curve": curve.scores(data.test[1]),
    }
    for step, point in found["curve"].items():
        print(f"  {step:6,} gradients, present weights: {point}")
    print(
        f"  {found['gradients']:,} gradients ({found['burn_in']:,} of burn-in), draws: {found['draws']}, {seconds:.0f} s\n"
        f"  R-hat of predictions {found['rhat']}; {found['grade']}: {found['verdict']}",
        flush=True,
    )
    return found


def seconds_per_step(data: Data, num_chains: int, *, stacked: bool) -> float:
    """CPU time of all chains, which does not depend on what else runs; the start of a run is taken out by a shorter one."""
    model = network()

    def seconds(steps: int) -> float:
        began = time.process_time()
        adammcmc.sample(
            model,
            data.train,
            GaussianNLL(),
            sampler=lambda params, **options: adammcmc.Underdamped(params, step_size=1e-3, prior=Gaussian(1.0), **options),
            num_draws=1,
            gap=steps,
            burn_in=0,
            num_chains=num_chains,
            stacked=stacked,
            progress=False,
        )
        return time.process_time() - began

    seconds(20)
    return (seconds(320) - seconds(20)) / 300


def compare_stacked(data: Data) -> None:
    """A table: milliseconds in which every chain takes one step; then the time to train ten members."""
    print("| chains | sequential, ms | stacked, ms | ratio |\n|---|---|---|---|")
    for num_chains in (1, 2, 4, 10, 20):
        alone, many = (1e3 * seconds_per_step(data, num_chains, stacked=stacked) for stacked in (False, True))
        print(f"| {num_chains} | {alone:.2f} | {many:.2f} | {alone / many:.1f} |", flush=True)
    for stacked in (False, True):
        began = time.process_time()
        adammcmc.train_members(network(), data.train, GaussianNLL(), 10, stacked=stacked, progress=False)
        how = "at once" if stacked else "one after another"
        print(f"ten members trained {how}: {time.process_time() - began:.1f} s", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """All seeds, and their mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help=f"the file airfoil.data; without it, the environment's {VARIABLE}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--sampler", choices=list(SAMPLERS), default="default")
    parser.add_argument("--gradients", type=int, default=51_000, help="of each chain, at most")
    parser.add_argument("--draws", type=int, default=200, help=f"of each chain, {GAP} steps apart")
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--every", type=int, default=2500, help="steps between two points of the curve")
    parser.add_argument("--sequential", action="store_true", help="chains one after another")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--time", action="store_true", help="only compare stacked with sequential chains")
    arguments = parser.parse_args(words)
    torch.set_num_threads(arguments.threads)
    data = load(arguments.data)
    if arguments.time:
        compare_stacked(data)
        return
    about = machine(torch.device("cpu")) | {
        name: getattr(arguments, name) for name in ("sampler", "gradients", "draws", "members")
    }
    runs = {str(seed): run(data, seed, arguments) for seed in arguments.seeds}
    means = {
        name: round(float(np.mean([found["draws"][name] for found in runs.values()])), 4)
        for name in ("rmse", "nll_normal", "nll_mixture")
    }
    print(f"mean of {len(runs)} seeds: {means}")
    known = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    known[arguments.sampler] = {"about": about, "mean": means, "seeds": runs}
    arguments.output.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
