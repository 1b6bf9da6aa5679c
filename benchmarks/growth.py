"""How the cost of a step grows: with the parameters, the batch, the data, and the number of chains.

    python -m benchmarks.growth [--device cpu|cuda] [--cores 1] [--output growth.json] [--figure growth.png]

MLP 64-w-w-10 with cross entropy, as in `benchmarks.step_cost`; ratios are to Adam in the same mode (eager, or captured as a
CUDA graph) in the same run, versions in turns, medians.

- parameters: width 128 to 4096, batch 512
- batch: 64 to 8192, width 512
- data: n examples, width 128. `FullData` takes its gradient on a batch of 512 and tests on all n; fixed data takes all n as
  its batch. Both over one Adam step on 512 examples.
- chains: many chains of one network in one evaluation, width 128, batch 512, over one Adam step of one network. `measure` takes
  a function for it: `stacked_step(num_chains)` returns a function that takes one step of so many chains.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adammcmc import AdamMCMC, FullData, TensorExamples
from benchmarks.rivals import adam_step, batch_step, closure_step, takes_batch
from benchmarks.step_cost import BATCH, network
from benchmarks.timing import Step, bind, machine, medians

WIDTHS = (128, 256, 512, 1024, 2048, 4096)  # 26k to 17M parameters
BATCHES = (64, 256, 1024, 2048, 8192)
DATA = (1024, 4096, 16384, 65536)
CHAINS = (1, 4, 16, 64, 256)
MODES: dict[str, dict[str, bool]] = {"eager": {}, "captured": {"foreach": True, "capturable": True}}
IDEAL = "the ideal"

Point = dict[str, dict[str, float]]
"""By version: milliseconds and ratio_to_adam."""
Curve = dict[str, Point]
"""By what grows, as text."""
StackedStep = Callable[[int], Step]

algorithm_1 = partial(AdamMCMC, lr=1e-3, sigma=3e-4, sigma_along=2.0)


def examples(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 64).to(device), torch.randint(10, (count,)).to(device)


def net(width: int, device: torch.device) -> nn.Module:
    return network(width).to(device)


def compared(steps: dict[str, Step], device: torch.device, repeats: int) -> Point:
    """Measure the versions in turns; the first is Adam."""
    times = medians(steps, device, repeats)
    return {name: {"milliseconds": ms, "ratio_to_adam": ms / times["Adam"]} for name, ms in times.items()}


def of_size(width: int, batch: int, device: torch.device, repeats: int, mode: str) -> Point:
    """Adam, the ideal and Algorithm 1 on one batch."""
    x, y = examples(batch, device)
    steps: dict[str, Step] = {
        "Adam": adam_step(net(width, device), x, y, 0, **MODES[mode]),
        IDEAL: adam_step(net(width, device), x, y, 1, **MODES[mode]),
    }
    model = net(width, device)
    sampler = algorithm_1(model.parameters(), num_data=100_000)
    if mode == "eager":
        steps["AdamMCMC"] = closure_step(sampler, model, x, y)
    elif takes_batch():
        steps["AdamMCMC"] = batch_step(sampler, model, (x, y))
    return compared(steps, device, repeats)


def of_data(n: int, device: torch.device, repeats: int, width: int = 128) -> Point:
    """Tests that look at all n examples."""
    x, y = examples(n, device)
    batch = min(n, BATCH)
    tested, fixed = net(width, device), net(width, device)
    data = TensorExamples(lambda x, y: F.cross_entropy(tested(x), y, reduction="none"), x, y)
    full_data = algorithm_1(tested.parameters(), num_data=n, acceptance=FullData(), examples=data)
    fixed_data = algorithm_1(fixed.parameters(), num_data=n, fixed_data=True)
    steps = {
        "Adam": adam_step(net(width, device), x[:batch], y[:batch], 0),
        "Adam, all data": adam_step(net(width, device), x, y, 0),
        "AdamMCMC, FullData": closure_step(full_data, tested, x[:batch], y[:batch]),
        "AdamMCMC, fixed data": closure_step(fixed_data, fixed, x, y),
    }
    return compared(steps, device, repeats)


def of_chains(count: int, stacked_step: StackedStep, device: torch.device, repeats: int, width: int = 128) -> Point:
    """One step of so many chains."""
    x, y = examples(BATCH, device)
    return compared({"Adam": adam_step(net(width, device), x, y, 0), "stacked chains": stacked_step(count)}, device, repeats)


def measure(
    device: str | torch.device = "cpu",
    *,
    widths: Sequence[int] = WIDTHS,
    batches: Sequence[int] = BATCHES,
    data: Sequence[int] = DATA,
    chains: Sequence[int] = CHAINS,
    stacked_step: StackedStep | None = None,
    repeats: int = 15,
) -> dict[str, Curve]:
    """By curve, and on it by size: the times of the versions. Prints a table as it goes."""
    device = torch.device(device)
    curves: dict[str, Curve] = {}

    def add(curve: str, size: int, point: Point) -> None:
        curves.setdefault(curve, {})[f"{size}"] = point
        cells = (f"{name} {r['milliseconds']:.3f} ms ({r['ratio_to_adam']:.2f})" for name, r in point.items())
        print(f"{curve + ' ' + format(size, ','):28} " + " | ".join(cells), flush=True)

    for mode in ("eager", "captured") if device.type == "cuda" else ("eager",):
        tail = "" if mode == "eager" else ", captured"
        for width in widths:
            num_params = sum(p.numel() for p in network(width).parameters())
            add("parameters" + tail, num_params, of_size(width, BATCH, device, repeats, mode))
        for batch in batches:
            add("batch" + tail, batch, of_size(512, batch, device, repeats, mode))
    for n in data:
        add("data", n, of_data(n, device, repeats))
    for count in chains if stacked_step is not None else ():
        assert stacked_step is not None
        add("chains", count, of_chains(count, stacked_step, device, repeats))
    return curves


def table(curve: Curve) -> str:
    """One curve in Markdown: Adam in ms, the others as ratios to it."""
    others = [name for name in next(iter(curve.values())) if name != "Adam"]
    lines = ["| | Adam, ms | " + " | ".join(f"{name} / Adam" for name in others) + " |", "|---" * (2 + len(others)) + "|"]
    for size, point in curve.items():
        cells = [f"{int(size):,}", f"{point['Adam']['milliseconds']:.3g}"]
        lines.append("| " + " | ".join(cells + [f"{point[name]['ratio_to_adam']:.2f}" for name in others]) + " |")
    return "\n".join(lines)


STYLE: dict[str, dict[str, Any]] = {
    "Adam": {"color": "#777777", "marker": "o"},
    IDEAL: {"color": "black", "marker": "s", "linestyle": "--"},
    "Adam, all data": {"color": "black", "marker": "s", "linestyle": "--"},
    "AdamMCMC": {"color": "#D55E00", "marker": "o"},
    "AdamMCMC, FullData": {"color": "#0072B2", "marker": "^"},
    "AdamMCMC, fixed data": {"color": "#D55E00", "marker": "v"},
    "stacked chains": {"color": "#009E73", "marker": "o"},
}


def draw(curves: dict[str, Curve], path: Path, title: str = "") -> None:
    """Milliseconds of a step above, ratios to Adam below; one column for each curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(8.0, 4.0 * len(curves)), 6.4), layout="constrained")
    panels = figure.subplots(2, len(curves), sharex="col", squeeze=False, height_ratios=(3, 2))
    for (name, curve), above, below in zip(curves.items(), *panels, strict=True):
        sizes = [int(size) for size in curve]
        for version in next(iter(curve.values())):
            points = [curve[str(size)][version] for size in sizes]
            style = {"markersize": 5, **STYLE.get(version, {})}
            above.loglog(sizes, [p["milliseconds"] for p in points], label=version, **style)
            below.loglog(sizes, [p["ratio_to_adam"] for p in points], **style)
        above.set_title(name)
        above.legend(fontsize=8)
        below.set_xlabel({"data": "examples in the data"}.get(name, name))
        for panel in (above, below):
            panel.grid(alpha=0.3, which="both")
        low, high = below.get_ylim()
        if high / low < 20:  # few ticks of a logarithmic axis would have numbers
            ticks = [t for t in (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15) if low <= t <= high]
            below.set_yticks(ticks, [f"{t:g}" for t in ticks])
            below.minorticks_off()
    panels[0, 0].set_ylabel("ms a step")
    panels[1, 0].set_ylabel("over Adam")
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cores", type=int, default=1, help="on the CPU")
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--data", type=int, nargs="*", default=DATA)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="a JSON file for the numbers")
    parser.add_argument("--figure", type=Path, help="a picture")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cpu":
        bind(options.cores)
    about = machine(device) | {"repeats": options.repeats}
    words = ", ".join(f"{key} {value}" for key, value in about.items())
    print(words)
    sizes = {"widths": options.widths, "batches": options.batches, "data": options.data}
    curves = measure(device, **sizes, repeats=options.repeats)
    for name, curve in curves.items():
        print(f"\n{name}\n\n{table(curve)}")
    if options.output is not None:
        options.output.write_text(json.dumps({"about": about} | curves, indent=1) + "\n")
    if options.figure is not None:
        draw(curves, options.figure, words)


if __name__ == "__main__":
    main()
