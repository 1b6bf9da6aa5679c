r"""Theorems 1 and 2, running: does the law of the chain go to the target, with the correction C and without?

Thousands of chains start far from a target in one dimension whose law is known (`convergence.py`). After k steps their
histogram is compared with the target: the chain of Theorem 1 goes down to the noise of so many chains, Algorithm 1 (C = 1)
stops above it. Beside it the bound of Theorem 2, in numbers, and the energy at which Algorithm 1 rests on a Gaussian in P
dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adammcmc import kernels
from adammcmc.kernels.kernel import Info, Kernel
from adammcmc.target.density import Density
from replication.convergence import NUM_BINS, Settings, bounds, distance, floor, log_density, starts
from replication.drawing import COLOURS
from replication.settings import Preset
from replication.work import Work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["TITLE", "draw", "run", "section"]

TITLE = "Theorems 1 and 2: convergence with the correction C, and the bias without it"

BETAS = (0.0, 0.5, 0.9, 0.99)
SHORT = Settings(lr=0.1, sigma=0.1, sigma_along=3.0, momentum_spread=(2.0, 6.0))
"""Steps that are short beside the target: what one does in many dimensions, and where C = 1 shows."""
WIDE = Settings(lr=1.0, sigma=1.5, sigma_along=1.0, momentum_spread=(6.0, 40.0))
"""Steps that cross the target at once: where the constant a of Theorem 2 is not tiny."""
BOUND_BETAS = (0.0, 0.0001, 0.001, 0.01, 0.5, 0.9, 0.99)
ALONG = 3.0
"""sigma_along of the Gaussian in P dimensions."""
SEED = 1
ERRORS = 4.5
"""Standard errors that make a difference."""
NEGLIGIBLE = 0.05
"""A total variation that a bound should get below."""


@dataclass(frozen=True)
class _Size:
    chains: int
    """Of a histogram."""
    last: int
    """k at the end."""
    dimensions: tuple[int, ...]
    bias_chains: int
    bias_steps: int
    """Of which the first half is dropped: the memory of 100 steps at beta = 0.99 makes a transient of about 500."""


_LARGE = _Size(100_000, 1_000, (1, 5, 20, 100, 400), 400, 2_000)
_SIZES = {
    "smoke": _Size(5_000, 600, (1, 20, 100), 100, 1_200),
    "small": _Size(40_000, 1_000, (1, 5, 20, 100, 400), 200, 2_000),
    "h200": _LARGE,
    "paper": _LARGE,
}


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """Curves of the total variation, the bound of Theorem 2, and the bias of C = 1; what is finished is kept."""
    size, device = _SIZES[preset.name], torch.device(preset.where)

    parts: dict[str, Callable[[], Any]] = {
        "wide": partial(_curve, _exact(WIDE, 0.0), size.chains, 100, device),
        "bounds": _bounds,
    }
    for beta in BETAS:
        for chain, make in (("exact", _exact), ("C = 1", _printed)):
            parts[_curve_name(chain, beta)] = partial(_curve, make(SHORT, beta), size.chains, size.last, device)
        for dim in size.dimensions:
            parts[f"bias-{dim}-{beta}"] = partial(_energy, dim, beta, size.bias_chains, size.bias_steps, device)
    prefix = f"theorems-{preset.name}-"
    kept = work.all_kept({prefix + name: function for name, function in parts.items()}, "theorems")
    found = {name.removeprefix(prefix): value for name, value in kept.items()}
    curves = [
        {"chain": chain, "beta": beta, **found[_curve_name(chain, beta)]} for beta in BETAS for chain in ("exact", "C = 1")
    ]
    bias = [{"dimensions": dim, "beta": beta, **found[f"bias-{dim}-{beta}"]} for dim in size.dimensions for beta in BETAS]
    level, spread = floor(size.chains)
    return {
        "chains": size.chains,
        "floor": level,
        "floor_error": spread,
        "short": {**asdict(SHORT), "momentum_spread": list(SHORT.momentum_spread)},
        "wide": {**asdict(WIDE), "momentum_spread": list(WIDE.momentum_spread)},
        "curves": curves,
        "wide_curve": found["wide"],
        "bounds": found["bounds"],
        "bias_chains": size.bias_chains,
        "bias_steps": size.bias_steps,
        "bias": bias,
    }


def _curve_name(chain: str, beta: float) -> str:
    return f"{chain.replace(' ', '')}-{beta}"


def _exact(settings: Settings, beta: float) -> Kernel:
    return kernels.exact_adam_mcmc(
        settings.lr,
        (beta, beta),
        sigma=settings.sigma,
        sigma_along=settings.sigma_along,
        momentum_spread=settings.momentum_spread,
    )


def _printed(settings: Settings, beta: float) -> Kernel:
    return kernels.adam_mcmc(settings.lr, (beta, beta), sigma=settings.sigma, sigma_along=settings.sigma_along)


def _steps(
    kernel: Kernel, density: Callable[[Tensor], Tensor], start: Tensor, num_steps: int, generator: torch.Generator
) -> Iterator[tuple[int, Tensor, Info]]:
    """k, where the chains are after k steps, and what the step said: `sample_density` that keeps nothing."""
    potential = Density(density)
    state = kernel.init(start, potential)
    for k in range(1, num_steps + 1):
        state, info = kernel.step(state, potential, generator)
        yield k, state.params, info


def _marks(last: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... and the last."""
    marks = [m * 10**e for e in range(7) for m in (1, 2, 5)]
    return [k for k in marks if k < last] + [last]


def _curve(kernel: Kernel, num_chains: int, last: int, device: torch.device) -> dict[str, Any]:
    """Total variation after k steps, for a few k."""
    generator = torch.Generator(device).manual_seed(SEED)
    marks = _marks(last)
    found: list[tuple[float, float]] = []
    rates = []
    for k, theta, info in _steps(kernel, log_density, starts(num_chains, generator), last, generator):
        rates.append(info.acceptance_rate.mean())
        if k in marks:
            found.append(distance(theta))
    return {
        "k": marks,
        "tv": [value for value, _ in found],
        "error": [error for _, error in found],
        "acceptance": float(torch.stack(rates).mean()),
    }


def _gaussian(theta: Tensor) -> Tensor:
    return -0.5 * theta.square().sum(1)


def _energy(dim: int, beta: float, num_chains: int, num_steps: int, device: torch.device) -> dict[str, float]:
    """2 E[U] / P of Algorithm 1 on N(0, 1) in P dimensions (truth 1), from exact draws; the error is between chains."""
    generator = torch.Generator(device).manual_seed(SEED)
    sigma = 1.3 / math.sqrt(dim)
    kernel = kernels.adam_mcmc(0.35 * sigma, (beta, beta), sigma=sigma, sigma_along=ALONG)
    start = torch.randn(num_chains, dim, dtype=torch.float64, generator=generator, device=device)
    total = torch.zeros(num_chains, dtype=torch.float64, device=device)
    rates = []
    burn_in = num_steps // 2
    for k, theta, info in _steps(kernel, _gaussian, start, num_steps, generator):
        if k > burn_in:
            total += theta.square().mean(1)
            rates.append(info.acceptance_rate.mean())
    mean = total / (num_steps - burn_in)
    return {
        "ratio": float(mean.mean()),
        "error": float(mean.std()) / math.sqrt(num_chains),
        "acceptance": float(torch.stack(rates).mean()),
    }


def _bounds() -> dict[str, Any]:
    """Theorem 2 in numbers, for the wide steps at several beta, and its a for the short ones."""
    wide = bounds(WIDE, BOUND_BETAS)
    none = wide[0]
    return {
        "start": none.start,
        "a": none.doeblin,
        "a_short": bounds(SHORT, BOUND_BETAS[:1])[0].doeblin,
        "k": _marks(100),
        "at_beta_0": [none.at(k) for k in _marks(100)],
        "below_at": next(k for k in range(1, 1_000_000) if none.at(k) < NEGLIGIBLE),
        "limits": [{"beta": beta, "limit": b.limit} for beta, b in zip(BOUND_BETAS, wide, strict=True)],
    }


# --- the figure -----------------------------------------------------------------------------------------------------

_EXACT, _PRINTED, _PAPER = COLOURS["exact"], COLOURS["printed, data sum"], "#000000"
_STYLES: dict[float, Any] = dict(zip(BETAS, ("-", "--", "-.", ":"), strict=True))
_MARKERS = dict(zip(BETAS, "os^D", strict=True))


def draw(result: dict[str, Any]) -> Figure:
    """Total variation against k; the bound of Theorem 2 beside the chain; the energy of C = 1 against P."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 12, "legend.fontsize": 10}):
        figure = Figure(figsize=(15, 5.4), dpi=110, facecolor="white", layout="constrained")
        first, second, third = figure.subplots(1, 3)
        _panel_curves(first, result)
        _panel_bound(second, result)
        _panel_bias(third, result)
    return figure


def _panel_curves(axes: Axes, result: dict[str, Any]) -> None:
    from matplotlib.lines import Line2D

    for curve in result["curves"]:
        beta, is_exact = curve["beta"], curve["chain"] == "exact"
        axes.errorbar(
            curve["k"],
            curve["tv"],
            curve["error"],
            color=_EXACT if is_exact else _PRINTED,
            linestyle=_STYLES[beta],
            marker=_MARKERS[beta],
            markersize=5,
        )
    _floor(axes, result)
    colours = {"exact": _EXACT, "as printed (C = 1)": _PRINTED}
    keys = [Line2D([], [], color=colour, linewidth=3, label=name) for name, colour in colours.items()]
    keys += [Line2D([], [], color="0.3", linestyle=_STYLES[b], marker=_MARKERS[b], label=f"β = {b:g}") for b in BETAS]
    axes.set(xlabel="steps k", ylabel="total variation to the target", title="Chains from elsewhere, short steps")
    axes.set_ylim(top=6)  # room for the legend
    axes.legend(handles=keys, ncols=2, loc="upper right")


def _panel_bound(axes: Axes, result: dict[str, Any]) -> None:
    curve, theory = result["wide_curve"], result["bounds"]
    axes.errorbar(curve["k"], curve["tv"], curve["error"], color=_EXACT, marker="o", markersize=5, label="exact, β = 0")
    axes.plot(theory["k"], theory["at_beta_0"], color=_PAPER, label="bound of Theorem 2, β = 0")
    for row, style in zip(theory["limits"][1:4], ("--", "-.", ":"), strict=True):
        axes.axhline(row["limit"], color=_PAPER, linestyle=style, linewidth=1, label=f"its limit, β = {row['beta']:g}")
    _floor(axes, result)
    axes.axhspan(1, 100, color="0.93", zorder=0, label="a bound here says nothing")
    axes.set(xlabel="steps k", ylabel="total variation to the target", title="Wide steps, and Theorem 2")
    axes.set_ylim(top=100)
    axes.legend(loc="upper right")


def _floor(axes: Axes, result: dict[str, Any]) -> None:
    level, spread = result["floor"], ERRORS * result["floor_error"]
    axes.axhspan(max(level - spread, 0.5 * level), level + spread, color="0.85", zorder=0)
    axes.annotate("so many exact draws", (1, 0.62 * level), va="center", fontsize=10)
    axes.set(xscale="log", yscale="log", ylim=(0.5 * level, None))


def _panel_bias(axes: Axes, result: dict[str, Any]) -> None:
    for beta in BETAS:
        rows = [row for row in result["bias"] if row["beta"] == beta]
        axes.errorbar(
            [row["dimensions"] for row in rows],
            [row["ratio"] for row in rows],
            [row["error"] for row in rows],
            color=_PRINTED,
            linestyle=_STYLES[beta],
            marker=_MARKERS[beta],
            markersize=5,
            label=f"as printed, β = {beta:g}",
        )
    axes.axhline(1, color=_EXACT, linewidth=2, label="truth")
    axes.set(xscale="log", ylim=(0, None), xlabel="dimensions P", ylabel="2 E[U] / P", title="Energy of a Gaussian under C = 1")
    axes.legend()


# --- in words -------------------------------------------------------------------------------------------------------


def section(result: dict[str, Any]) -> str:
    """What the paper says, what was measured, and the tables."""
    intro = (
        f"{result['chains']:,} chains in one dimension start uniform on [1, 1.5]; the target is exp(2θ - e^θ) on [-1.5, 2]. So "
        f"many exact draws have, in {NUM_BINS} bins, a total variation (TV) of {result['floor']:.4f} ± "
        f"{result['floor_error']:.4f}, which is the floor."
    )
    short = result["short"]
    distances = f"TV after k steps and its standard error, σ = {short['sigma']:g}, lr = {short['lr']:g}, σ_along = "
    distances += f"{short['sigma_along']:g}:"
    energies = (
        f"2 E[U] / P under C = 1 on N(0, 1) in P dimensions, truth 1 (σ = 1.3 / √P, lr = 0.35 σ, σ_along = {ALONG:g}; "
        f"{result['bias_chains']:,} chains from exact draws, the second half of {result['bias_steps']:,} steps):"
    )
    parts = [intro, _verdicts(result), distances, _table_of_distances(result), energies, _table_of_energies(result)]
    return "\n\n".join(parts) + "\n"


def _excess(result: dict[str, Any], chain: str) -> dict[float, float]:
    """By beta: TV at the last k above the floor, in standard deviations of the floor."""
    return {
        curve["beta"]: (curve["tv"][-1] - result["floor"]) / result["floor_error"]
        for curve in result["curves"]
        if curve["chain"] == chain
    }


def _verdicts(result: dict[str, Any]) -> str:
    """Claim by claim: published, ours, same or not, why."""
    exact, printed = _excess(result, "exact"), _excess(result, "C = 1")
    off = [f"{beta:g}" for beta, x in printed.items() if x > ERRORS]
    largest = max((row for row in result["bias"] if row["beta"] == BETAS[-1]), key=lambda row: int(row["dimensions"]))
    curve, theory = result["wide_curve"], result["bounds"]
    pairs = list(zip(curve["k"], curve["tv"], curve["error"], theory["at_beta_0"], strict=True))
    holds = all(tv - result["floor"] < bound + ERRORS * error for _, tv, error, bound in pairs)
    arrived = [f"by k = {k}" for k, tv, _, _ in pairs if tv < NEGLIGIBLE] or ["not reached"]
    limits = {row["beta"]: row["limit"] for row in theory["limits"]}
    informative = ", ".join(f"{beta:g}" for beta, limit in limits.items() if limit < 1)
    rows = [
        (
            "Theorem 1: with C the target is invariant",
            f"TV after {result['curves'][0]['k'][-1]:,} steps is within {max(abs(x) for x in exact.values()):.1f} standard "
            "deviations of the floor, β from 0 to 0.99",
            "yes" if all(abs(x) < ERRORS for x in exact.values()) else "NO",
            "`exact_adam_mcmc` has the noise of the momenta and C",
        ),
        (
            "C 'can be well approximated by 1'",
            f"TV stays more than {ERRORS:g} standard deviations above the floor at β = {', '.join(off) or 'none'}; at β = "
            f"{largest['beta']:g} and P = {largest['dimensions']} the energy is {largest['ratio']:.4f} ± "
            f"{largest['error']:.4f} of the truth",
            "no" if off else "yes",
            "the momentum knows where the chain has been",
        ),
        (
            "Theorem 2: TV ≲ (1 - a)^k + b β",
            f"steps as wide as the target: a = {theory['a']:.3f}; at β = 0 the bound is below {NEGLIGIBLE:g} from k = "
            f"{theory['below_at']} (measured: {arrived[0]}). For k to infinity it is below 1 at β = {informative} of those "
            f"tried; at β = 0.99 it is {limits[0.99]:.0f}. Short steps: a = {theory['a_short']:.1e}",
            "yes, and it says nothing at β = 0.99" if holds else "NO",
            "the proof asks the momenta to be forgotten in one step",
        ),
    ]
    return _table(("the paper", "here", "same?", "why"), rows)


def _table_of_distances(result: dict[str, Any]) -> str:
    marks = result["curves"][0]["k"]
    shown = [k for k in marks[:-1] if str(k).strip("0") == "1"] + marks[-1:]  # powers of ten, and the last
    rows = []
    for curve in result["curves"]:
        at = dict(zip(curve["k"], zip(curve["tv"], curve["error"], strict=True), strict=True))
        rows.append(
            (
                f"{curve['beta']:g}",
                "exact" if curve["chain"] == "exact" else "as printed (C = 1)",
                *(f"{at[k][0]:.4f} ± {at[k][1]:.4f}" for k in shown),
                f"{curve['tv'][-1] - result['floor']:+.4f}",
                f"{curve['acceptance']:.2f}",
            )
        )
    return _table(("β", "chain", *(f"k = {k}" for k in shown), "last, above the floor", "acceptance"), rows)


def _table_of_energies(result: dict[str, Any]) -> str:
    dims = sorted({row["dimensions"] for row in result["bias"]})
    rows = [
        (f"{beta:g}", *(f"{row['ratio']:.4f} ± {row['error']:.4f}" for row in result["bias"] if row["beta"] == beta))
        for beta in BETAS
    ]
    return _table(("β", *(f"P = {dim}" for dim in dims)), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
