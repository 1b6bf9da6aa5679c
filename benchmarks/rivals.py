"""What one step costs, ours and what a user can install instead: same network, same data, same machine, one run.

    python -m benchmarks.rivals [--device cpu|cuda] [--cores 1] [--output rivals.json]      (make bench-rivals)

The network and batch of `benchmarks.step_cost`: MLP 64-w-w-10, cross entropy, 512 examples. The versions take turns, medians.
On the CPU the process is bound to `--cores` cores and keeps the memory it has had, for every library alike. On CUDA a number is
the time of a run of 20 steps, by events, over 20. A rival that is not installed is skipped.

A row says what is done for its milliseconds: whether a Metropolis test corrects the step, and how many gradients and further
forwards of the batch it takes. Prices of a step are not prices of a draw: `benchmarks.networks` compares those.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adammcmc
from adammcmc import MALA, AdamMCMC, AlwaysAccept, Gaussian, Sampler, Underdamped
from benchmarks.step_cost import BATCH, WIDTHS, network
from benchmarks.timing import Step, bind, captured, machine, medians

NUM_DATA = 100_000
MALA_STEP = 1e-5
FLAT, FIXED = "posterior, flat prior", "posterior of this batch"
BIASED = "biased (docs/bias.md)"
UNCORRECTED = "biased by step size and batch noise"
Result = dict[str, dict[str, Any]]


@dataclass
class Row:
    """One version: a function that takes one step, and what is to be said of it."""

    step: Step
    weights: Callable[[], Iterable[Any]]
    version: str
    samples: str | None = None
    """What its draws are of; None: it is no sampler."""
    corrected: bool | None = None
    """Whether a Metropolis test decides."""
    gradients: int = 1
    forwards: int = 0
    """Evaluations of the batch without a gradient, besides."""
    mode: str = "eager"
    acceptance: Callable[[], float] | None = None


# --- ours and torch's ---------------------------------------------------------------------------------------------------


def adam_rows(width: int, x: Tensor, y: Tensor) -> Iterator[tuple[str, Row]]:
    """Adam, and the ideal: Adam and one more forward, which is the least that Algorithm 1 must evaluate."""
    modes: dict[str, dict[str, bool]] = {"eager": {}, "fused": {"fused": True}}
    if x.is_cuda:
        modes |= {"captured": {"foreach": True, "capturable": True}, "captured, fused": {"fused": True, "capturable": True}}
    else:
        modes = {"eager": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    for mode, options in modes.items():
        for more in (0, 1):
            if more and mode == "foreach":
                continue
            model = network(width).to(x.device)
            step: Step = adam_step(model, x, y, more, **options)
            name = "Adam" if not more else "the ideal: Adam and a forward"
            yield (
                name if mode == "eager" else f"{name}, {mode}",
                Row(step, model.parameters, torch.__version__, forwards=more, mode=mode),
            )


def adam_step(model: nn.Module, x: Tensor, y: Tensor, forwards: int, **options: bool) -> Step:
    """A step of Adam and so many forwards; with `capturable`, as a CUDA graph into which the batch is copied."""
    adam = torch.optim.Adam(model.parameters(), **options)
    is_graph = options.get("capturable", False)
    places = (x.clone(), y.clone()) if is_graph else (x, y)

    def step() -> None:
        if not is_graph:
            adam.zero_grad()
        F.cross_entropy(model(places[0]), places[1]).backward()
        adam.step()
        for _ in range(forwards):
            with torch.no_grad():
                F.cross_entropy(model(places[0]), places[1])

    return captured(step, places, (x, y), model.parameters()) if is_graph else step


def our_rows(width: int, x: Tensor, y: Tensor) -> Iterator[tuple[str, Row]]:
    """Ours: Algorithm 1 in its forms, the exact MALA, and an uncorrected sampler of the kind that the rivals offer."""
    here = adammcmc.__version__
    algorithm_1 = partial(AdamMCMC, lr=1e-3, sigma=3e-4, sigma_along=2.0)

    def row(make: Callable[..., Sampler], by_batch: bool = False, **facts: Any) -> Row:
        model = network(width).to(x.device)
        sampler = make(model.parameters())
        step = batch_step(sampler, model, (x, y)) if by_batch else closure_step(sampler, model, x, y)
        known = {"corrected": True, "acceptance": lambda: float(sampler.mean_acceptance_rate)}
        return Row(step, model.parameters, here, **known | facts)

    fixed: dict[str, Any] = {"num_data": len(x), "fixed_data": True}
    unadjusted = partial(Underdamped, step_size=1e-5, num_data=NUM_DATA, prior=Gaussian(), acceptance=AlwaysAccept())
    kinds: dict[str, tuple[Callable[..., Sampler], dict[str, Any]]] = {
        "AdamMCMC": (partial(algorithm_1, num_data=NUM_DATA), {"samples": f"{FLAT}, {BIASED}", "forwards": 1}),
        "AdamMCMC, fixed data": (partial(algorithm_1, **fixed), {"samples": f"{FIXED}, flat prior, {BIASED}"}),
        "MALA, fixed data": (
            partial(MALA, step_size=MALA_STEP, prior=Gaussian(), **fixed),
            {"samples": f"{FIXED}, exactly"},
        ),
        "Underdamped, no test": (unadjusted, {"samples": f"posterior, {UNCORRECTED}", "corrected": False, "acceptance": None}),
    }
    for name, (make, facts) in kinds.items():
        yield name, row(make, **facts)
        if takes_batch() and (x.is_cuda or name == "AdamMCMC"):  # on the CPU it is the same step
            yield f"{name}, step(loss, batch)", row(make, True, mode="captured" if x.is_cuda else "eager", **facts)


def takes_batch() -> bool:
    """Whether `sampler.step(loss, batch)` exists: it captures the step on CUDA."""
    return "batch" in inspect.signature(AdamMCMC.step).parameters


def closure_step(sampler: Sampler, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """`sampler.step(closure)`: for every sampler."""
    return lambda: sampler.step(lambda: F.cross_entropy(model(x), y))


def batch_step(sampler: Any, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    """`sampler.step(loss, batch)`: the one place that knows how it is called."""

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return lambda: sampler.step(loss, batch)


# --- the rivals ---------------------------------------------------------------------------------------------------------


def posteriors_rows(width: int, x: Tensor, y: Tensor) -> Iterator[tuple[str, Row]]:
    """posteriors: functions of a state; the log posterior over n, at temperature 1 / n, as its documentation asks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies, at import
        import posteriors

    def row(build: Callable[..., Any], **options: Any) -> Row:
        model = network(width).to(x.device)
        call = posteriors.model_to_function(model)

        def log_posterior(params: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            outputs = call(params, batch[0])
            return -F.cross_entropy(outputs, batch[1]), outputs

        transform = build(log_posterior, temperature=1 / NUM_DATA, **options)
        state = transform.init({name: p.detach().clone() for name, p in model.named_parameters()})

        def step() -> None:
            nonlocal state
            state, _ = transform.update(state, (x, y))

        return Row(step, lambda: state.params.values(), posteriors.__version__, f"{FLAT}, {UNCORRECTED}", corrected=False)

    yield "posteriors SGLD", row(posteriors.sgmcmc.sgld.build, lr=1e-4)
    yield "posteriors SGHMC", row(posteriors.sgmcmc.sghmc.build, lr=1e-2, momenta=0.0)
    yield "posteriors BAOA", row(posteriors.sgmcmc.baoa.build, lr=1e-2, momenta=0.0)


def torch_uncertainty_rows(width: int, x: Tensor, y: Tensor) -> Iterator[tuple[str, Row]]:
    """torch-uncertainty: optimizers. Measured after their burn-in, which costs a little more a step.

    Only the file of each optimizer is loaded: the package as a whole cannot be imported without lightning and torchvision.
    """
    package = importlib.util.find_spec("torch_uncertainty")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("torch_uncertainty")
    folder = Path(package.submodule_search_locations[0]) / "optim"

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(f"torch_uncertainty_{name}", folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name.upper())

    def row(samples: str, make: Callable[..., torch.optim.Optimizer]) -> Row:
        model = network(width).to(x.device)
        optimizer = make(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        return Row(step, model.parameters, version("torch-uncertainty"), samples, corrected=False)

    # its noise is scaled by noise_factor, 0.01 by default: temperature 1e-4 for the loss that it is given
    yield "torch-uncertainty SGLD", row(f"exp(-10,000 mean loss), {UNCORRECTED}", partial(load("sgld"), lr=1e-4))
    # burn_in_steps counts parameter tensors, of which there are six, not steps
    sghmc = partial(load("sghmc"), lr=1e-4, burn_in_steps=18)
    yield "torch-uncertainty SGHMC", row("not stated: noise times 0.01, with a floor", sghmc)


def blackjax_rows(width: int, x: Tensor, y: Tensor) -> Iterator[tuple[str, Row]]:
    """blackjax's MALA under jit on the CPU, in an MLP of plain jax with the same weights, prior and step size as ours."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import blackjax
    import jax
    import jax.numpy as jnp

    inputs, targets = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())
    layers = [layer for layer in network(width) if isinstance(layer, nn.Linear)]
    params = [tuple(jnp.asarray(p.detach().numpy().copy()) for p in (layer.weight.T, layer.bias)) for layer in layers]

    def log_density(params: Any) -> Any:
        h = inputs
        for i, (weight, bias) in enumerate(params):
            h = (jax.nn.relu(h) if i else h) @ weight + bias
        loss = -jnp.take_along_axis(jax.nn.log_softmax(h), targets[:, None], 1).sum()
        return -loss - 0.5 * sum(jnp.sum(p * p) for layer in params for p in layer)

    mala = blackjax.mala(log_density, MALA_STEP)

    @jax.jit
    def transition(key: Any, state: Any) -> Any:
        key, own = jax.random.split(key)
        state, info = mala.step(own, state)
        return key, state, info.acceptance_rate

    key, state = jax.random.PRNGKey(0), mala.init(params)
    rates: list[Any] = []

    def step() -> None:
        nonlocal key, state
        key, state, rate = jax.block_until_ready(transition(key, state))
        rates.append(rate)

    def weights() -> Iterator[Tensor]:
        return (torch.tensor(jax.device_get(p)) for p in jax.tree.leaves(state.position))

    def acceptance() -> float:
        return sum(map(float, rates)) / len(rates)

    facts: dict[str, Any] = {"corrected": True, "mode": "jit", "acceptance": acceptance}
    yield "blackjax MALA, fixed data", Row(step, weights, version("blackjax"), f"{FIXED}, exactly", **facts)


RIVALS: dict[str, Callable[[int, Tensor, Tensor], Iterator[tuple[str, Row]]]] = {
    "posteriors": posteriors_rows,
    "torch-uncertainty": torch_uncertainty_rows,
    "blackjax": blackjax_rows,
}
CPU_ONLY = {"blackjax"}


# --- the run ------------------------------------------------------------------------------------------------------------


def rows_of(width: int, device: torch.device, batch: int = BATCH) -> tuple[dict[str, Row], list[str]]:
    """All rows that can be measured here, and the rivals that are not installed."""
    torch.manual_seed(1)
    x, y = torch.randn(batch, 64).to(device), torch.randint(10, (batch,)).to(device)
    rows = dict(adam_rows(width, x, y)) | dict(our_rows(width, x, y))
    missing = []
    for name, make in RIVALS.items():
        if device.type != "cpu" and name in CPU_ONLY:
            continue
        try:
            rows |= dict(make(width, x, y))
        except (ModuleNotFoundError, PackageNotFoundError):
            missing.append(name)
    return rows, missing


def measure(
    device: str | torch.device = "cpu", widths: Sequence[int] = WIDTHS, repeats: int = 50, batch: int = BATCH
) -> dict[str, Result]:
    """For each width (as text): the numbers of each row, by the row's name. Prints a table as it goes."""
    device = torch.device(device)
    results: dict[str, Result] = {}
    for width in widths:
        rows, missing = rows_of(width, device, batch)
        for name in missing if not results else []:
            print(f"{name}: not installed")
        times = medians({name: row.step for name, row in rows.items()}, device, repeats)
        for name, row in rows.items():  # a step of weights that have gone to infinity proves nothing
            if not all(bool(torch.isfinite(torch.as_tensor(p)).all()) for p in row.weights()):
                raise ArithmeticError(f"{name}: weights are no longer finite")
        results[str(width)] = {
            name: {
                "milliseconds": times[name],
                "ratio_to_adam": times[name] / times["Adam"],
                "ratio_to_adam_same_mode": times[name] / times[_adam(row.mode, times)],
                "corrected": row.corrected,
                "gradients": row.gradients,
                "forwards": row.forwards,
                "samples": row.samples,
                "mode": row.mode,
                "acceptance": None if row.acceptance is None else row.acceptance(),
                "version": row.version,
            }
            for name, row in rows.items()
        }
        num_params = sum(p.numel() for p in network(width).parameters())
        print(f"\n{num_params:,} parameters, batch {batch}\n\n{table(results[str(width)])}", flush=True)
        del rows
    return results


def _adam(mode: str, times: dict[str, float]) -> str:
    """The row of Adam that runs in this mode."""
    same = f"Adam, {mode}"
    return same if same in times else "Adam"


def table(result: Result) -> str:
    """The rows of one width, in Markdown."""
    lines = ["| | ms | / Adam | Metropolis | gradients + forwards | accepted | samples |", "|---|---|---|---|---|---|---|"]
    says = {None: "", True: "yes", False: "no"}
    for name, r in result.items():
        accepted = "" if r["acceptance"] is None else f"{r['acceptance']:.2f}"
        work = f"{r['gradients']}" + (f" + {r['forwards']}" if r["forwards"] else "")
        cells = [name, f"{r['milliseconds']:.3f}", f"{r['ratio_to_adam']:.2f}", says[r["corrected"]], work, accepted]
        lines.append("| " + " | ".join([*cells, r["samples"] or ""]) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cores", type=int, default=1, help="on the CPU")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--output", type=Path, help="a JSON file for the numbers")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cpu":
        bind(options.cores)
    about = machine(device) | {"batch": options.batch, "repeats": options.repeats}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    results = measure(device, options.widths, options.repeats, options.batch)
    if options.output is not None:
        options.output.write_text(json.dumps({"about": about} | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
