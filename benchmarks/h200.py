"""The speed of a step on a GPU, against what it cannot be below: one run, one table, one file.

    python -m benchmarks.h200 [--output benchmarks/results/h200.json]

- *update*: all of a step but the loss, P = 1e8, over torch's fused Adam on the same tensor; accepted, and rejected.
- *memory*: the peak of a step beyond that of Adam's, in copies of the parameters, P = 1e8.
- *MLP*: 64-128-128-10 (26,122 parameters), batch 512, `step(loss, batch)` over Adam captured by hand (the faster of its forms).
- *full batch*: the same network on 65,536 fixed examples, over captured Adam.
- *chains*: 256 chains of the MLP at once over one, both stacked and captured; also with TF32 (10 bits in products of matrices).
- *ParticleNet*: 366,160 parameters, batches of 512 bundled jets (44 particles on average), bfloat16, over Adam plus a
  forward, all three captured.

Medians; the versions of a comparison take turns (`benchmarks.timing`).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

from adammcmc import MALA, AdamMCMC, ChainState, Gaussian, Info, Underdamped, kernels
from adammcmc.backends.streams import streams
from adammcmc.backends.triton_adam import OnePassAdam
from adammcmc.jets import JetData, ParticleNet, ParticleNetLite, bundled, read_jets
from adammcmc.kernels.direction import AdamMemory
from adammcmc.samplers.stacked import StackedChains, setup_of
from adammcmc.samplers.stacked import stack as stack_chains
from adammcmc.target import Evaluation
from benchmarks.step_cost import network
from benchmarks.timing import Step, captured, machine, medians

SETTINGS = {"sigma": 3e-4, "sigma_along": 2.0}
LARGE = 100_000_000
JETS = 512


def update(device: torch.device, repeats: int) -> dict[str, float]:
    """The proposal, the decision and their consequence against fused Adam, on a tensor of 1e8 weights with its gradient."""
    p = nn.Parameter(torch.randn(LARGE, device=device))
    p.grad = torch.randn_like(p)
    adam = torch.optim.Adam([p], lr=1e-3, fused=True)
    adam.step()
    params, copy, first, second = ((x.detach()[None],) for x in (p, *(torch.zeros_like(p) for _ in range(3))))
    memory = AdamMemory(first, second, (0,))
    kernel = kernels.adam_mcmc(1e-3, **SETTINGS)
    backend = OnePassAdam(params, copy, memory)
    backend.upload(kernel, 1e5, None)
    generator = torch.Generator(device).manual_seed(0)
    zero = torch.zeros(1, dtype=torch.float64, device=device)
    frozen_at = torch.full((1,), -1, device=device)
    here, low, high = (
        Evaluation(torch.full((1,), x, device=device), zero, (p.grad[None],)) for x in (1.0, -1e6, 1e6)
    )  # fmt: skip
    target = SimpleNamespace(scale=1e5, inverse_temperature=1.0, fixed=False, is_bounded=False)
    state = ChainState(params, memory, None, None, torch.zeros(1, dtype=torch.int64, device=device), frozen_at)

    def ours(there: Evaluation) -> Info:
        move, _ = backend.propose(kernel, params, here, memory, generator, frozen_at)
        assert move.in_place is not None
        ratio = move.log_q_ratio
        info: Info = move.in_place.decide(kernel.acceptance, target, here, lambda: there, lambda: ratio, move, state)
        move.in_place.keep(info.is_accepted, None, None)
        return info

    def is_accepted(there: Evaluation) -> bool:
        return bool(ours(there).is_accepted)

    if not (is_accepted(low) and not is_accepted(high)):
        raise RuntimeError("the update was to be accepted, then rejected")
    other = torch.empty_like(p)
    steps = {"Adam": adam.step, "accepted": partial(ours, low), "rejected": partial(ours, high)}
    times = medians(steps | {"copy": partial(other.copy_, p.detach())}, device, repeats)
    return {
        "copy_terabytes_per_second": 8e-9 * LARGE / times["copy"],
        "update_adam_ms": times["Adam"],
        "update_ms": times["accepted"],
        "update_ratio_1e8": times["accepted"] / times["Adam"],
        "update_ratio_1e8_rejected": times["rejected"] / times["Adam"],
    }


def memory(device: torch.device) -> dict[str, float]:
    """Peaks of a step of each, on a tensor of 1e8 weights."""

    def peak(make: Callable[[nn.Parameter], Step]) -> float:
        gc.collect()  # graphs of other parts may still be held by cycles
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        p = nn.Parameter(torch.randn(LARGE, device=device))
        step = make(p)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / (4 * LARGE)

    def loss(p: Tensor) -> Tensor:
        return p.view(-1, 100).mean(1).square().mean()

    def adam(p: nn.Parameter) -> Step:
        optimizer = torch.optim.Adam([p], fused=True)

        def step() -> None:
            optimizer.zero_grad()
            loss(p).backward()
            optimizer.step()

        return step

    def ours(p: nn.Parameter) -> Step:
        sampler = AdamMCMC([p], num_data=1000, **SETTINGS)
        return lambda: sampler.step(lambda: loss(p))

    theirs = peak(adam)
    return {"memory_adam_copies": theirs, "extra_memory_copies": peak(ours) - theirs}


def graph_of_adam(model: nn.Module, loss: Callable[[Any], Tensor], batch: Any, **options: bool) -> Step:
    """A step of Adam on a batch that stays where it is, captured by hand."""
    adam = torch.optim.Adam(model.parameters(), capturable=True, **options)

    def step() -> None:
        loss(batch).backward()
        adam.step()

    return captured(step, (), (), model.parameters())


def mlp(device: torch.device, repeats: int, batch_size: int, fixed: bool) -> dict[str, float]:
    """Milliseconds: Adam eager and captured, a captured forward, and ours."""
    x, y = torch.randn(batch_size, 64, device=device), torch.randint(10, (batch_size,), device=device)
    steps: dict[str, Step] = {}

    def loss_of(model: nn.Module) -> Callable[[Any], Tensor]:
        return lambda batch: F.cross_entropy(model(batch[0]), batch[1])

    for name, options in {"captured, foreach": {"foreach": True}, "captured, fused": {"fused": True}}.items():
        model = network(128).to(device)
        steps[f"Adam, {name}"] = graph_of_adam(model, loss_of(model), (x, y), **options)
    model = network(128).to(device)
    adam = torch.optim.Adam(model.parameters(), fused=True)

    def eager(model: nn.Module = model) -> None:
        adam.zero_grad()
        F.cross_entropy(model(x), y).backward()
        adam.step()

    @torch.no_grad()
    def forward(model: nn.Module = model) -> None:
        F.cross_entropy(model(x), y)

    steps["Adam, fused"] = eager
    steps["forward, captured"] = captured(forward, (), (), ())
    kinds: dict[str, Any] = {"AdamMCMC": partial(AdamMCMC, lr=1e-3, num_data=65_536, **SETTINGS)}
    if fixed:
        options: dict[str, Any] = {"num_data": batch_size, "fixed_data": True}
        kinds = {
            "AdamMCMC": partial(AdamMCMC, lr=1e-3, **SETTINGS, **options),
            "Underdamped": partial(Underdamped, step_size=1e-4, prior=Gaussian(), **options),
            "MALA": partial(MALA, step_size=1e-8, prior=Gaussian(), **options),
        }
    for name, make in kinds.items():
        model = network(128).to(device)
        sampler = make(model.parameters())
        steps[name] = partial(sampler.step, loss_of(model), (x, y))
    model = network(128).to(device)
    sampler = kinds["AdamMCMC"](model.parameters())
    loss = loss_of(model)
    for _ in range(8):
        sampler.step(loss, (x, y))
    # the device's share of a step: the host's books are not kept, so this chain is of no further use
    steps["AdamMCMC, graph alone"] = next(iter(sampler.chains.graphs._graphs.values())).graph.replay
    return medians(steps, device, repeats)


def stack(model: nn.Module, count: int, device: torch.device, loss: Callable[..., Tensor], num_data: int) -> StackedChains:
    """Chains of Algorithm 1 that differ in sigma: a scan."""
    samplers = [
        AdamMCMC(model.parameters(), lr=1e-3, num_data=num_data, sigma=3e-4 * (1 + i / 256), sigma_along=2.0)
        for i in range(count)
    ]
    return stack_chains(
        samplers[0], model, loss, [setup_of(sampler, model) for sampler in samplers], streams(list(range(count)), device)
    )


def chains(device: torch.device, repeats: int, counts: Sequence[int] = (1, 4, 16, 64, 256)) -> dict[str, float]:
    """Milliseconds of one step of all chains of the MLP, by their number."""
    batch = torch.randn(512, 64, device=device), torch.randint(10, (512,), device=device)
    steps: dict[str, Step] = {}
    for count in counts:
        stacked = stack(network(128).to(device), count, device, lambda model, b: F.cross_entropy(model(b[0]), b[1]), 65_536)
        stacked.try_out(batch)
        steps[str(count)] = partial(stacked.step, batch)
    return medians(steps, device, repeats)


def particlenet(device: torch.device, repeats: int) -> dict[str, float]:
    """Milliseconds on ParticleNet: Adam, a forward, ours, each captured, on batches that differ."""
    jets = read_jets(bundled("jets"), max_jets=6 * JETS)
    data = JetData(jets, JETS, device=device, capacity="auto")
    batches = [next(data) for _ in range(6)]

    def net() -> nn.Module:
        torch.manual_seed(0)
        model = ParticleNet()
        model.autocast = torch.bfloat16
        return model.to(device).train()

    def rotating(replay: Callable[[Any], Any]) -> Step:
        turn = itertools.cycle(batches)
        return lambda: replay(next(turn))

    def into(place: Any, step: Step) -> Callable[[Any], None]:
        def replay(batch: Any) -> None:
            for a, b in zip((*place[0], place[1]), (*batch[0], batch[1]), strict=True):
                a.copy_(b)
            step()

        return replay

    def place() -> Any:
        return type(batches[0][0])(*(x.clone() for x in batches[0][0])), batches[0][1].clone()

    model, other, mine = net(), net(), net()
    there, elsewhere = place(), place()

    def loss(batch: Any, model: nn.Module = mine) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    @torch.no_grad()
    def forward() -> None:
        loss(elsewhere, other)

    sampler = AdamMCMC(mine.parameters(), lr=1e-3, num_data=len(jets), **SETTINGS)
    steps = {
        "Adam": rotating(into(there, graph_of_adam(model, partial(loss, model=model), there, fused=True))),
        "forward": rotating(into(elsewhere, captured(forward, (), (), ()))),
        "AdamMCMC": rotating(partial(sampler.step, loss)),
    }
    times = medians(steps, device, repeats)
    return times | {"acceptance": float(sampler.mean_acceptance_rate)}


def lite(device: torch.device, repeats: int, counts: Sequence[int] = (1, 8, 32)) -> dict[str, float]:
    """Milliseconds of a step of stacked chains of ParticleNet-Lite, by their number, and of one chain by itself."""
    data = JetData(read_jets(bundled("jets"), max_jets=JETS), JETS // 2, device=device, num_neighbours=7, capacity="auto")
    batch = next(data)
    steps: dict[str, Step] = {}
    for count in counts:
        model = ParticleNetLite(dropout=0.0).to(device).train()
        stacked = stack(model, count, device, lambda model, b: F.cross_entropy(model(b[0]), b[1]), 20_000)
        stacked.try_out(batch)
        steps[f"chains{count}"] = partial(stacked.step, batch)
    for name, kind in (("alone", None), ("alone_bfloat16", torch.bfloat16)):
        model = ParticleNetLite(dropout=0.0).to(device).train()
        model.autocast = kind
        sampler = AdamMCMC(model.parameters(), lr=1e-3, num_data=20_000, **SETTINGS)
        steps[name] = partial(sampler.step, partial(_loss, model), batch)
    return medians(steps, device, repeats)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def small_part(device: torch.device, repeats: int) -> dict[str, float]:
    times = mlp(device, repeats, 512, fixed=False)
    adam = min(times["Adam, captured, foreach"], times["Adam, captured, fused"])
    return {"captured_ratio_mlp26k": times["AdamMCMC"] / adam, **{f"mlp26k_{_key(name)}_ms": t for name, t in times.items()}}


def full_part(device: torch.device, repeats: int) -> dict[str, float]:
    times = mlp(device, repeats, 65_536, fixed=True)
    adam = min(times["Adam, captured, foreach"], times["Adam, captured, fused"])
    return {
        "fullbatch_ratio": times["AdamMCMC"] / adam,
        "fullbatch_ratio_underdamped": times["Underdamped"] / adam,
        "fullbatch_ratio_mala": times["MALA"] / adam,
        **{f"fullbatch_{_key(name)}_ms": t for name, t in times.items()},
    }


def jets_part(device: torch.device, repeats: int) -> dict[str, float]:
    times = particlenet(device, repeats)
    return {
        "particlenet_ms": times["AdamMCMC"],
        "particlenet_ratio_to_ideal": times["AdamMCMC"] / (times["Adam"] + times["forward"]),
        "particlenet_adam_ms": times["Adam"],
        "particlenet_forward_ms": times["forward"],
        "particlenet_acceptance": times["acceptance"],
    }


def chains_part(device: torch.device, repeats: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for ending, is_short in (("", False), ("_tf32", True)):  # products of float32 matrices in full, and as TF32
        torch.backends.cuda.matmul.allow_tf32 = is_short
        times = chains(device, repeats)
        found["chains256_ratio" + ending] = times["256"] / times["1"]
        found |= {f"chains{count}{ending}_ms": t for count, t in times.items()}
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def lite_part(device: torch.device, repeats: int) -> dict[str, float]:
    return {f"lite_{name}_ms": t for name, t in lite(device, repeats).items()}


PARTS: dict[str, Callable[[torch.device, int], dict[str, float]]] = {
    "mlp": small_part,
    "full": full_part,
    "particlenet": jets_part,
    "chains": chains_part,
    "update": update,
    "memory": lambda device, repeats: memory(device),
    "lite": lite_part,
}


def _key(name: str) -> str:
    return name.lower().replace(", ", "_").replace(" ", "_")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a JSON file for the numbers")
    parser.add_argument("--repeats", type=int, default=15, help="rounds of 20 steps")
    parser.add_argument("--only", choices=list(PARTS), help="one part; the others stay as they are in the file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.h200 needs a CUDA device.")
    device = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # float32 means float32
    found: dict[str, Any] = {}
    if options.only is not None and options.output is not None and options.output.exists():
        found = json.loads(options.output.read_text())
    found |= machine(device) | {"triton": triton.__version__}
    for name, part in PARTS.items():
        if options.only not in (None, name):
            continue
        numbers = part(device, options.repeats)
        for key, value in numbers.items():
            print(f"{key:36} {value:10.4f}", flush=True)
        found |= numbers
        if options.output is not None:  # at once: nothing is lost if a later part fails
            options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
