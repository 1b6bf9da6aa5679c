"""Where amortised exact chains stop paying: effective draws per pass over the data, beside gradients of all data.

    python -m benchmarks.amortised [--output benchmarks/results/amortised.json] [--figure docs/assets/amortised.png]
    python -m benchmarks.amortised --from benchmarks/results/amortised.json      # table and figure again, without a run

`kernels.amortised_langevin` against `kernels.underdamped` with gradients of all data (one chance; eight, as `Underdamped` has
by default; trajectories of two and of four leapfrog steps), all with the friction 0.4, the same metric A, and a step tuned to
an acceptance of 0.85. A pass is the gradient of n examples; a forward counts as a third of it. Every evaluation is counted as
it is made. 16 chains start from draws of the posterior; the effective draws are the median over functions, their error is from
four groups of four chains. Ratios are against the best of the four.

Networks: those of `benchmarks.networks`, whose functions are the outputs at test inputs; A is what `underdamped` learns.
Made-up regressions: y = X w + r xi with P weights and n examples, and a likelihood of noise 1, whose posterior is known. With
r = 1 batches disagree as much as the likelihood says, with r = 0.1 far less. A is the inverse of the precision's diagonal, and
a batch is a tenth of the data. The functions are the weights, and the squares of their distances from the mean: the slower of
the two kinds counts. (Long trajectories on a Gaussian make successive draws of a weight opposite.)
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adammcmc import BurnIn, DataDensity, kernels, sample_density, warm_up
from adammcmc.target.leaves import Leaves
from adammcmc.target.potential import Evaluation
from benchmarks.networks import NAMES, Problem, effective_size, load_reference, outputs, problem

RESULTS = Path(__file__).parent / "results" / "amortised.json"
FIGURE = Path(__file__).parent.parent / "docs" / "assets" / "amortised.png"
COUNTS = 2, 5, 10, 20, 40
FEWER = (10, 5), (10, 2), (40, 10), (40, 1)
SIZES = 10, 30, 100, 300
SERIES = {
    "r = 1, n = 20 P": (1.0, 20),
    "r = 0.1, n = 20 P": (0.1, 20),
    "r = 1, n = 100 P": (1.0, 100),
    "r = 0.1, n = 100 P": (0.1, 100),
}
"""Residuals, and examples for each weight."""
WHOLE: dict[str, dict[str, int]] = {
    "1 chance": {},
    "8 chances": {"num_chances": 8},
    "2 leapfrog steps": {"num_leapfrog": 2},
    "4 leapfrog steps": {"num_leapfrog": 4},
}
"""Options of `underdamped`."""
FRICTION, FORWARD = 0.4, 1 / 3
_FLOATS = 50_000_000  # of the draws that are kept


class Counted(DataDensity):
    """A posterior in parts that counts the passes over its data."""

    def __init__(self, num_data: int, num_parts: int) -> None:
        super().__init__(lambda *_: None, torch.arange(num_data), num_parts=num_parts)  # type: ignore[arg-type]
        self.passes = 0.0

    def evaluate(self, params: Leaves, *, with_grad: bool) -> Evaluation:
        self.passes += 1 if with_grad else FORWARD
        return super().evaluate(params, with_grad=with_grad)

    def evaluate_some(self, params: Leaves, chains: Tensor) -> Evaluation:
        self.passes += float(chains.double().mean()) - 1
        return self.evaluate(params, with_grad=True)

    def force_of(self, params: Leaves, part: int) -> Leaves:
        self.passes += len(range(part, self.num_examples, self.num_parts)) / self.num_examples
        return super().force_of(params, part)

    def effective(self, draws: Tensor) -> float:
        """The effective draws in (chains, draws, P)."""
        raise NotImplementedError


class Network(Counted):
    """The posterior of one of the three networks."""

    def __init__(self, p: Problem, num_parts: int = 1) -> None:
        self.problem = p
        super().__init__(len(p.inputs), num_parts)

    def _losses(self, params: Leaves, indices: Any) -> Tensor:
        p = replace(self.problem, inputs=self.problem.inputs[indices], targets=self.problem.targets[indices])
        return p.losses(p.forward(params[0], p.inputs))

    def _log_prior(self, params: Leaves) -> Tensor:
        return -0.5 * (params[0] / self.problem.scales).square().sum(1).double()

    def effective(self, draws: Tensor) -> float:
        return float(effective_size(outputs(self.problem, draws)).median())


class Regression(Counted):
    """A made-up regression, with what is known of it."""

    def __init__(self, num_params: int, residual: float, rows: int, num_parts: int = 1) -> None:
        made, n = torch.Generator().manual_seed(num_params), rows * num_params
        self.x = torch.randn(n, num_params, generator=made)
        self.y = residual * torch.randn(n, generator=made)
        self.precision = self.x.T @ self.x + torch.eye(num_params)
        self.mean = torch.linalg.solve(self.precision, self.x.T @ self.y)
        super().__init__(n, num_parts)

    def _losses(self, params: Leaves, indices: Any) -> Tensor:
        return 0.5 * (params[0] @ self.x[indices].T - self.y[indices]).square()

    def _log_prior(self, params: Leaves) -> Tensor:
        return -0.5 * params[0].square().sum(1).double()

    def effective(self, draws: Tensor) -> float:
        away = draws - self.mean
        return min(float(effective_size(values).median()) for values in (away, away.square()))

    def draws(self, count: int) -> Tensor:
        white = torch.randn(count, len(self.mean), generator=torch.Generator().manual_seed(1))
        return self.mean + torch.linalg.solve_triangular(torch.linalg.cholesky(self.precision).T, white.T, upper=True).T


def tuned(target: Counted, start: Tensor, kernel: Any, scale: Tensor, num_steps: int) -> Any:
    """The kernel with this metric, and a step that is accepted at 0.85."""
    kernel = kernel.with_preconditioner((scale,), kernels.underdamped(1.0, preconditioner=scale).structure)
    tune = BurnIn(num_steps=num_steps, approach=False, learn_preconditioner=False)
    return warm_up(target, start, kernel, tune=tune, progress=False).kernel


def measure(target: Counted, start: Tensor, kernel: Any, passes: float) -> dict[str, float]:
    """Run chains from `start` for about so many passes each."""
    began, before = time.process_time(), target.passes
    sample_density(target, start, kernel, num_steps=10, progress=False)  # what a step costs
    steps = max(50, round(passes / ((target.passes - before) / 10)))
    before, gap = target.passes, max(1, steps * start.numel() // _FLOATS)
    draws, info = sample_density(target, start, kernel, num_steps=steps, gap=gap, seed=1, progress=False)
    cost = (target.passes - before) / steps
    groups = [target.effective(some) for some in draws.split(len(start) // 4)]
    each = torch.tensor(groups, dtype=torch.float64) / (len(start) // 4 * steps * cost)
    h = float(kernel.step_size)
    is_amortised = isinstance(kernel, kernels.AmortisedKernel)
    num = 2 * (kernel.num_batches or target.num_parts) if is_amortised else kernel.num_leapfrog
    return {
        "ess": float(each.mean()),
        "error": float(each.std()) / math.sqrt(len(each)),
        "ess_potential": float(effective_size(info.potential[:, :, None])) / (len(start) * steps * cost),
        "acceptance": float(info.acceptance_rate.mean()),
        "step_size": h,
        "length": num * h,
        "passes_per_step": cost,
        "steps": steps,
        "seconds": time.process_time() - began,
    }


def full_data(target: Counted, start: Tensor, scale: Tensor, passes: float) -> dict[str, dict[str, float]]:
    """`underdamped` in its variants."""
    made = {label: kernels.underdamped(1e-2, FRICTION, **options) for label, options in WHOLE.items()}
    return {label: measure(target, start, tuned(target, start, kernel, scale, 100), passes) for label, kernel in made.items()}


def network_rows(name: str, passes: float) -> Iterator[tuple[str, dict[str, float]]]:
    """What is measured on a network, with a name for each row."""
    p, start = problem(name), load_reference(name).draws
    known = warm_up(p.log_density, start, kernels.underdamped(1e-3), tune=BurnIn(num_steps=1200), progress=False).kernel
    assert isinstance(known, kernels.UnderdampedKernel)
    scale = known.preconditioner[0]  # type: ignore[index]
    yield from full_data(Network(p), start, scale, 2 * passes).items()
    for count, num in [(count, None) for count in COUNTS] + list(FEWER):
        target = Network(p, count)
        kernel = kernels.amortised_langevin(0.05 / count, FRICTION, num_batches=num)
        kernel = tuned(target, start, kernel, scale, 120)
        yield f"n/b {count}, L {num or count}", measure(target, start, kernel, passes)


def regression_rows(series: str, passes: float) -> Iterator[tuple[str, dict[str, float]]]:
    """The same on the regressions of a series; all batches are used."""
    for size in SIZES:
        whole, target = Regression(size, *SERIES[series]), Regression(size, *SERIES[series], 10)
        start, scale = whole.draws(16), 1 / whole.precision.diagonal()
        for label, row in full_data(whole, start, scale, passes / 2).items():
            yield f"P {size}, {label}", row
        kernel = tuned(target, start, kernels.amortised_langevin(0.05, FRICTION), scale, 120)
        yield f"P {size}, n/b 10, L 10", measure(target, start, kernel, passes / 2)


# --- what is shown --------------------------------------------------------------------------------------------------


def ratio(row: dict[str, float], rows: dict[str, dict[str, float]], prefix: str = "") -> tuple[float, float]:
    """Effective draws per pass, over those with gradients of all data, and its standard error."""
    other = max((rows[f"{prefix}{label}"] for label in WHOLE), key=lambda row: row["ess"])
    value = row["ess"] / other["ess"]
    return value, value * math.hypot(row["error"] / row["ess"], other["error"] / other["ess"])


def table(results: dict[str, Any]) -> Iterator[str]:
    """In Markdown."""
    yield (
        "| | passes a step | length of a step | acceptance | "
        + " | ".join(f"{name}: per 1,000 passes" for name in NAMES)
        + " |"
    )
    yield "|---|---|---|---|" + "---|" * len(NAMES)
    networks = {name: results["networks"][name] for name in NAMES if name in results["networks"]}
    for label in next(iter(networks.values()), {}):
        rows = [found[label] for found in networks.values()]
        cells = [f"{1e3 * row['ess']:.1f} +- {1e3 * row['error']:.1f}" for row in rows]
        lengths, rates = (", ".join(f"{row[key]:.2g}" for row in rows) for key in ("length", "acceptance"))
        costs = sum(row["passes_per_step"] for row in rows) / len(rows)
        yield f"| {label} | {costs:.2f} | {lengths} | {rates} | " + " | ".join(cells) + " |"
    yield ""
    yield "| n/b = 10: ratio | " + " | ".join(f"P = {size}" for size in SIZES) + " |"
    yield "|---|" + "---|" * len(SIZES)
    for series, found in results["regressions"].items():
        cells = []
        for size in SIZES:
            if (key := f"P {size}, n/b 10, L 10") in found:
                value, error = ratio(found[key], found, f"P {size}, ")
                cells.append(f"{value:.2f} +- {error:.2f}")
        yield f"| {series} | " + " | ".join(cells) + " |"


def draw(results: dict[str, Any], path: Path) -> None:
    """Ratios of effective draws per pass: by n/b on the networks, by P on the regressions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for colour, (name, rows) in zip(("#0072B2", "#D55E00", "#009E73"), results["networks"].items(), strict=False):
        values = [ratio(rows[f"n/b {count}, L {count}"], rows) for count in COUNTS]
        left.errorbar(COUNTS, *map(list, zip(*values, strict=True)), color=colour, marker="o", capsize=2, label=name)
        few = [(count, num) for count, num in FEWER if f"n/b {count}, L {num}" in rows]
        heights = [ratio(rows[f"n/b {count}, L {num}"], rows)[0] for count, num in few]
        left.plot([count for count, _ in few], heights, color=colour, marker="x", linestyle="none")
    for colour, (series, rows) in zip(("#CC79A7", "#E69F00", "#56B4E9", "0.2"), results["regressions"].items(), strict=False):
        sizes = [size for size in SIZES if f"P {size}, n/b 10, L 10" in rows]
        values = [ratio(rows[f"P {size}, n/b 10, L 10"], rows, f"P {size}, ") for size in sizes]
        right.errorbar(sizes, *map(list, zip(*values, strict=True)), color=colour, marker="o", capsize=2, label=series)
    left.set(xlabel="n / b, batches in the data", title="Networks; crosses: half of the batches and fewer", xscale="log")
    left.set_xticks(COUNTS, map(str, COUNTS), minor=False)
    left.minorticks_off()
    left.set_ylabel("effective draws per pass, over\nthose of full-data gradients at best")
    right.set(xlabel="P, weights", xscale="log", title="Linear regression, n / b = 10")
    right.set_xticks(SIZES, map(str, SIZES), minor=False)
    right.minorticks_off()
    for panel in (left, right):
        panel.axhline(1, color="0.6", linewidth=1)
        panel.set_ylim(bottom=0)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--series", nargs="*", default=list(SERIES), choices=list(SERIES))
    parser.add_argument("--passes", type=float, default=600.0, help="of each chain and setting")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    parser.add_argument("--from", dest="known", type=Path, help="results to show, without a run")
    options = parser.parse_args(words)
    if options.known is not None:
        results = json.loads(options.known.read_text())
    else:
        torch.set_num_threads(1)
        began = time.process_time()
        results = {"about": {"torch": torch.__version__, "passes": options.passes}, "networks": {}, "regressions": {}}
        for kind, names, make in (
            ("networks", options.names, network_rows),
            ("regressions", options.series, regression_rows),
        ):
            for name in names:
                results[kind][name] = {}
                for label, row in make(name, options.passes):
                    results[kind][name][label] = row
                    print(f"{name}: {label}: {1e3 * row['ess']:.1f} +- {1e3 * row['error']:.1f} per 1,000 passes", flush=True)
        results["about"]["seconds"] = time.process_time() - began
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(table(results)))
    print(f"{results['about']['seconds']:.0f} s of CPU time, torch {results['about']['torch']}")
    draw(results, options.figure)


if __name__ == "__main__":
    main()
