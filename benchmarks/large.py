"""Burn-in of large networks, the jumps of ParticleNet's U, and the posterior of a tagger.

    python -m benchmarks.large burn-in                     a minute or two on one core
    python -m benchmarks.large chains                      ten minutes on one core
    python -m benchmarks.large jumps                       a minute on one core
    python -m benchmarks.large tagger jets.npz [--sampler microcanonical]     on a GPU

`burn-in`: a network of 23,874 weights on the particles of 5,000 bundled jets. U in the windows of burn-in, with the metric of
batches and with the one that is learnt along the chain.

`chains`: four chains from four trained networks of this kind, exact ones and ones without a test, and their predictions of the
7,000 other bundled jets.

`jumps`: ParticleNet-Lite on 600 bundled jets in float64. Along a line, the change of U is compared with the integral of its
gradient by the trapezoid rule, once with the neighbours of the second block as they are (they follow from the features, hence
from the weights), and once with those of the first point. What one jet contributes is multiplied by sqrt(20,000): the jumps of
different jets are independent, so that this is their sum over 20,000 jets.

`tagger`: ParticleNet-Lite on 20,000 jets, 6,000 to test on: networks trained apart, chains from each, and the scores of their
mean. A run in --path is resumed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adammcmc
from adammcmc import BurnIn, Gaussian
from adammcmc.jets import Jets, ParticleNetLite, bundled, cloud_of, particlenet, read_jets
from adammcmc.jets.tagger import Tagger, Training
from adammcmc.samplers import batch_metric
from adammcmc.samplers.diagnostics import ess_bulk, rhat

STEPS = (1e-4, 4e-4, 1.6e-3, 6.4e-3)


# --- burn-in of a large network ---------------------------------------------------------------------------------------------


def particles(jets: Jets, number: int = 40) -> Tensor:
    """log pT and angles of the leading particles of each jet, standardised, (jets, 3 * number)."""
    rows, mask = jets.padded(number)
    logs = torch.where(mask, rows[..., 0].clamp_min(1e-3).log() - 2, 0.0)
    x = torch.cat([logs, 2 * rows[..., 1], 2 * rows[..., 2]], 1).float()
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


def network() -> nn.Sequential:
    """120-128-64-2, 23,874 weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(120, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2))


def burn_in(arguments: argparse.Namespace) -> None:
    """U by window, and the settings that were found."""
    jets = read_jets(bundled("jets"), max_jets=5000)
    x, y, net = particles(jets), jets.kind, network()
    members = adammcmc.train_members(net, (x, y), F.cross_entropy, 1, patience=10, progress=False)
    for words, least in (("metric of batches", batch_metric.LARGE), ("metric along the chain", math.inf)):
        batch_metric.LARGE = least  # type: ignore[assignment]
        net.load_state_dict(members[0])
        sampler = adammcmc.Underdamped(
            net.parameters(),
            num_data=len(y),
            prior=Gaussian.fan_in(net, 2.0),
            fixed_data=True,
            burn_in=BurnIn(max_steps=3000),
            generator=torch.Generator().manual_seed(arguments.seed),
        )
        levels: list[float] = []
        while sampler.is_adapting:
            sampler.step(lambda batch: F.cross_entropy(net(batch[0]), batch[1]), (x, y))
            levels.append(float(sampler.info.potential))
        every = [sum(levels[i : i + 100]) / 100 for i in range(0, len(levels) - 100, 250)]
        assert sampler.warm_up is not None
        print(f"{words}: {sampler.warm_up.num_steps} steps, {sampler.warm_up.num_approach} of them without a test")
        print(f"  U, means over 100 of every 250 steps: {' '.join(f'{level:.0f}' for level in every)}")
        print(f"  step size {sampler.warm_up.step_size:.3g}, {sampler.warm_up.scaling}, {sampler.warm_up.reason}", flush=True)


def chains(arguments: argparse.Namespace) -> None:
    """A table: exact chains, chains without a test, and the networks that they start from."""
    jets = read_jets(bundled("jets"))
    x, y, net = particles(jets), jets.kind, network()
    train, test = (x[:5000], y[:5000]), (x[5000:], y[5000:])
    members = adammcmc.train_members(net, train, F.cross_entropy, arguments.chains, patience=10, progress=False)
    print(f"{arguments.chains} trained networks together: {_scores(members.predict(test, progress=False).mean[:, 1], test[1])}")
    samplers = {
        "exact": adammcmc.Underdamped,
        "without a test": partial(adammcmc.Microcanonical, acceptance=adammcmc.AlwaysAccept()),
    }
    for name, sampler in samplers.items():
        began = time.process_time()
        posterior = adammcmc.sample(
            net,
            train,
            F.cross_entropy,
            sampler=sampler,
            prior=Gaussian.fan_in(net, 2.0),
            num_draws=arguments.draws,
            gap=20,
            burn_in=BurnIn(max_steps=3000),
            num_chains=arguments.chains,
            initial=members,
            stacked=False,
            seed=arguments.seed,
        )
        seconds = time.process_time() - began
        prediction = posterior.predict(test, raw=True, progress=False)
        assert prediction.raw is not None
        values = prediction.raw[..., 1].double().view(arguments.chains, arguments.draws, -1)
        loss = sum(row["loss"] for row in posterior.index) / len(posterior.index)
        gradients = [row["health"]["num_gradients"] for row in posterior.index if row["draw"] == arguments.draws - 1]
        used = sum(gradients) + sum(record.num_gradients or 0 for record in posterior.warm_up)
        print(f"{name}: {_scores(prediction.mean[:, 1], test[1])}, spread {float(values.flatten(0, 1).std(0).mean()):.4f}")
        print(f"  mean training loss {loss:.4f}, {used / arguments.chains:,.0f} gradients a chain, {seconds:.0f} s of CPU time")
        _print_convergence(values)
        print(posterior, flush=True)


# --- jumps of ParticleNet's U -------------------------------------------------------------------------------------------------


def jumps(arguments: argparse.Namespace) -> None:
    """A table."""
    jets = read_jets(bundled("jets"), max_jets=600)
    tagger = Tagger(Training("lite", epochs=12, batch_size=60), device="cpu")
    tagger.train(jets, progress=False)
    net = tagger.net.double().eval()
    cloud = cloud_of(jets, num_neighbours=net.num_neighbours)
    cloud = type(cloud)(*(x.double() if x.is_floating_point() else x for x in cloud))
    precision = Gaussian.fan_in(net, 2.0).precision(list(net.parameters()))
    assert precision is not None
    generator = torch.Generator().manual_seed(arguments.seed)
    line = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in net.parameters()]
    line = [0.1 * x / torch.as_tensor(q, dtype=x.dtype).sqrt() for x, q in zip(line, precision, strict=True)]
    print("| step | neighbours | trapezoid error of U, 600 jets | of one jet, times sqrt(20,000) |\n|---|---|---|---|")
    for is_fixed in (True, False):
        losses = _losses_along(net, lambda: F.cross_entropy(net(cloud), jets.kind, reduction="none"), line, is_fixed)
        for step, (differences, slopes) in zip(STEPS, losses, strict=True):
            error = differences - slopes
            words = "as at the start" if is_fixed else "as they are"
            print(
                f"| {step:g} | {words} | {float(error.sum()):+.2g} | {float(error.std()) * math.sqrt(20_000):.2g} |", flush=True
            )


def _losses_along(
    net: ParticleNetLite, losses: Callable[[], Tensor], line: Sequence[Tensor], is_fixed: bool
) -> list[tuple[Tensor, Tensor]]:
    """For each step the change of each jet's loss, and what the gradient says of it."""
    start = [p.detach().clone() for p in net.parameters()]
    own, found = particlenet.nearest, []
    memory: list[Tensor] = []

    def first(*given: Any) -> Tensor:
        if not memory:
            memory.append(own(*given))
        return memory[0]

    def at(step: float) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for p, x, d in zip(net.parameters(), start, line, strict=True):
                p.copy_(x + step * d)
        values = losses()
        v = torch.zeros_like(values, requires_grad=True)  # the derivative along the line, jet by jet: backward twice
        grads = torch.autograd.grad(values, list(net.parameters()), v, create_graph=True)
        slopes = torch.autograd.grad(
            [g for g in grads if g.requires_grad], v, [d for g, d in zip(grads, line, strict=True) if g.requires_grad]
        )
        return values.detach(), slopes[0]

    if is_fixed:
        particlenet.nearest = first  # type: ignore[assignment]
    try:
        here, slope = at(0.0)
        for step in STEPS:
            there, other = at(step)
            found.append((there - here, step * (slope + other) / 2))
    finally:
        particlenet.nearest = own
        with torch.no_grad():
            for p, x in zip(net.parameters(), start, strict=True):
                p.copy_(x)
    return found


# --- the posterior of a tagger -----------------------------------------------------------------------------------------------


def tagger(arguments: argparse.Namespace) -> None:
    """Scores of the trained networks, of the chains, and of all draws together."""
    began = time.perf_counter()
    jets = read_jets(arguments.jets, max_jets=26_000)
    train, test = jets[: arguments.train], jets[arguments.train :]
    tagger = Tagger(Training("lite", epochs=arguments.epochs, batch_size=500))
    tagger.train(train, progress=False)
    trained = time.perf_counter()
    posterior = tagger.sample(
        train,
        sampler=arguments.sampler,
        num_chains=arguments.chains,
        num_draws=arguments.draws,
        gap=arguments.gap,
        path=arguments.path,
        resume=arguments.path is not None,
    )
    sampled = time.perf_counter()
    raw = tagger.predict(posterior, test, progress=False)
    print(posterior)
    print(f"{trained - began:.0f} s of reading and training, {sampled - trained:.0f} s of further networks and chains")
    print(f"trained network: {_scores(tagger.scores(test), test.kind)}; all draws: {_scores(raw.mean[:, 1], test.kind)}")
    draws = [tagger.predict(posterior.chain(i), test, progress=False).mean[:, 1] for i in range(arguments.chains)]
    print("chains: " + "; ".join(_scores(one, test.kind) for one in draws))
    values = torch.stack([_predicted(tagger, posterior.chain(i), test) for i in range(arguments.chains)])
    _print_convergence(values)


def _print_convergence(values: Tensor) -> None:
    """Of predictions (chains, draws, jets)."""
    convergence, effective = rhat(values).nan_to_num(nan=math.inf), ess_bulk(values).nan_to_num(nan=0.0)
    shares = torch.tensor([0.5, 0.95, 1.0], dtype=torch.float64)
    print(f"  R-hat of predictions, median, 95% and largest: {[round(x, 3) for x in convergence.quantile(shares).tolist()]}")
    few = effective.quantile(torch.tensor([0.5, 0.05], dtype=torch.float64)).tolist()
    print(f"  effective draws of predictions, median and 5%: {[round(x) for x in few]}")


def _predicted(tagger: Tagger, chain: Any, jets: Jets) -> Tensor:
    """(draws, jets), float64."""
    raw = chain.predict(tagger.data(jets), raw=True, progress=False, batch_size=2048).raw
    return raw[..., 1].double().cpu()


def _scores(p: Tensor, kind: Tensor) -> str:
    p, y = p.double().clamp(1e-9, 1 - 1e-9), kind.double()
    nll = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
    return f"NLL {float(nll):.4f}, accuracy {float(((p > 0.5) == (y > 0.5)).double().mean()):.4f}"


def main(words: Sequence[str] | None = None) -> None:
    """One of the four."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["burn-in", "chains", "jumps", "tagger"])
    parser.add_argument("jets", nargs="?", type=Path, help="26,000 shuffled top and QCD jets, for `tagger`")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sampler", choices=["underdamped", "microcanonical"], default="microcanonical")
    parser.add_argument("--train", type=int, default=20_000, help="jets to train on")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--gap", type=int, default=10)
    parser.add_argument("--path", type=Path)
    arguments = parser.parse_args(words)
    if arguments.what == "tagger" and arguments.jets is None:
        parser.error("`tagger` needs a file of jets")
    torch.set_num_threads(1)
    {"burn-in": burn_in, "chains": chains, "jumps": jumps, "tagger": tagger}[arguments.what](arguments)


if __name__ == "__main__":
    main()
