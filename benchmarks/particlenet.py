"""Jets a second in training: weaver-core's ParticleNet and ours, padded and packed, eager and compiled, in one run.

    python -m benchmarks.particlenet [--output particlenet.json]

Batches of 512 bundled jets (44 particles on average), forward, backward and Adam; medians. weaver-core is measured where it is
installed, as it comes (it trims a batch to its longest jets) and without its trimming. It needs a GPU to be of interest.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from adammcmc.jets import JetData, ParticleNet, bundled, padded_inputs, read_jets

BATCH = 512
STEPS = 12
BLOCKS = [(16, (64, 64, 64)), (16, (128, 128, 128)), (16, (256, 256, 256))]


class _Autocast(nn.Module):
    """A model under autocast in bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        with torch.autocast(inputs[0].device.type, torch.bfloat16):
            return self.model(*inputs).float()


def weaver(trim: bool, precision: torch.dtype | None = None) -> nn.Module | None:
    """The model that the paper ran."""
    try:
        from weaver.nn.model.ParticleNet import ParticleNet as Theirs
    except ImportError:
        return None
    model: nn.Module = Theirs(7, 2, BLOCKS, [(256, 0.1)], use_fusion=False, trim=trim)
    return model if precision is None else _Autocast(model)


def ours(precision: torch.dtype | None = None, compiled: bool = False) -> nn.Module:
    net = ParticleNet()
    net.autocast = precision
    return torch.compile(net) if compiled else net  # type: ignore[return-value]


def milliseconds(net: nn.Module, batches: Sequence[tuple[Any, ...]], device: torch.device, repeats: int) -> float:
    """Of a step, in a run of steps that nothing waits between: median of the runs. The last part of a batch is the labels."""
    net = net.to(device).train()
    adam = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)

    def step(batch: tuple[Any, ...]) -> None:
        adam.zero_grad()
        F.cross_entropy(net(*batch[:-1]), batch[-1]).backward()
        adam.step()

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for i in range(8):
        step(batches[i % len(batches)])
    times = []
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        for i in range(STEPS):
            step(batches[i % len(batches)])
        wait()
        times.append(1e3 * (time.perf_counter() - began) / STEPS)
    return statistics.median(times)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a JSON file for the numbers")
    parser.add_argument("--repeats", type=int, default=5, help="runs of 12 steps")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # float32 means float32
    jets = read_jets(bundled("jets"), max_jets=6 * BATCH)
    data = JetData(jets, BATCH, device=device)
    packed = [next(data) for _ in range(6)]
    parts = [jets[i : i + BATCH] for i in range(0, 6 * BATCH, BATCH)]
    padded = [(*(x.to(device) for x in padded_inputs(part)), part.kind.to(device)) for part in parts]
    half = torch.bfloat16
    rows: list[tuple[str, Callable[[], nn.Module | None], Sequence[tuple[Any, ...]]]] = [
        ("weaver-core, eager, float32", lambda: weaver(True), padded),
        ("weaver-core, eager, bfloat16", lambda: weaver(True, half), padded),
        ("weaver-core without trimming, eager, float32", lambda: weaver(False), padded),
        ("padded, eager, float32", ours, padded),
        ("padded, eager, bfloat16", lambda: ours(half), padded),
        ("padded, compiled, bfloat16", lambda: ours(half, True), padded),
        ("packed, eager, float32", ours, packed),
        ("packed, eager, bfloat16", lambda: ours(half), packed),
        ("packed, compiled, float32", lambda: ours(None, True), packed),
        ("packed, compiled, bfloat16", lambda: ours(half, True), packed),
    ]
    found: dict[str, float] = {}
    first: float | None = None
    print(f"{'':46} {'ms/step':>8} {'jets/s':>8} {'over weaver-core':>17}")
    for name, make, batches in rows:
        net = make()
        if net is None:
            print(f"{name:46} not installed")
            continue
        torch._dynamo.reset()
        found[name] = milliseconds(net, batches, device, options.repeats)
        first = first if first is not None or "weaver" not in name else found[name]
        ratio = f"{first / found[name]:.2f}" if first is not None else ""
        print(f"{name:46} {found[name]:8.2f} {1e3 * BATCH / found[name]:8.0f} {ratio:>17}", flush=True)
        del net
    where = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    result = {"machine": where, "torch": torch.__version__, "batch": BATCH, "milliseconds": found}
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
