r"""The paper's headline, tested where the truth is known: does the spread follow sigma or lambda?

The predictive spread of a converged kernel that leaves the target invariant does not depend on the width of its
proposals, and does depend on lambda. The paper reports the opposite. Here every sampler runs on one small posterior
whose spread is known: the Bayesian last layer of a tagger,

    p(w) ~ exp(-lambda sum_i log(1 + exp(-y_i w.x_i)) - |w|^2 / 2)

with x the twelve jet observables, as principal components of variance 1, and a constant. Every step uses all jets, so
that minibatches play no role. Widths are in units of s, the posterior's standard deviation (root mean square over the
weights).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from adammcmc import diagnostics, kernels
from adammcmc.jets.data import Jets
from adammcmc.jets.observables import OBSERVABLES, observables
from adammcmc.kernels.kernel import Info, Kernel
from adammcmc.posterior import uncertainty
from adammcmc.samplers.adaptation import momentum_spread
from adammcmc.samplers.functional import sample_density
from adammcmc.target.data import derive_seed
from adammcmc.target.density import Density
from replication.drawing import COLOURS, LABELS, MARKERS, canvas, legend, points
from replication.sets import read_sets
from replication.settings import Preset
from replication.work import Work

TITLE = "The headline: does the spread follow sigma, or lambda?"
SAMPLERS = ("released", "released, data sum", "printed, data sum", "exact, Theorem 1", "exact, MALA", "exact, underdamped")
"""The released script has lambda times the MEAN loss and no prior; "data sum" is its kernel on the others' target."""
WIDTHS = (0.1, 0.2, 0.4, 0.7, 1.0)
"""In units of s: sigma of the AdamMCMC samplers, sqrt(2 step_size) of MALA, step_size of the underdamped sampler."""
LAMS = (0.01, 0.1, 1.0, 10.0, 100.0)
WIDTH_OF_LAMS = {"exact": 0.4, "paper": 0.1}
"""The widths at which lambda is varied: in units of s at that lambda (exact), or at lambda = 1 (the paper's)."""
LR, ALONG = 0.15, 3.0
"""lr in units of s; WIDTHS are then 0.7 to 7 times lr (0.3 to 16 in the paper). sigma_along has no unit."""
_HELD_OUT = 200
_PROBES = 25
_GROUPS = 16  # of independent draws
_LEAST_ESS = 100


@dataclass(frozen=True)
class _Size:
    jets: int
    chains: int
    steps: int
    draws: int
    """Kept from each chain, evenly spaced after a quarter of the steps."""
    truth: int
    """Importance draws."""


_SIZES = {
    "smoke": _Size(200, 8, 1_500, 75, 8_000),
    "small": _Size(500, 16, 20_000, 200, 100_000),
    "h200": _Size(1_000, 32, 24_000, 200, 400_000),
}
_SIZES["paper"] = _SIZES["h200"]  # the posterior does not depend on the network


def run(preset: Preset, work: Work) -> dict[str, Any]:
    """Each sampler over the widths at lambda = 1, and over the lambdas at one width; on the bundled jets."""
    size = _SIZES[preset.name]
    jets = read_sets(replace(preset, num_train=size.jets, num_test=_HELD_OUT, num_others=1))
    layer = LastLayer(jets.train, jets.test, work.device)
    name = f"{size.jets}-{size.chains}-{size.steps}-{jets.train.digest()}"
    functions = {f"headline-{_slug(sampler)}-{name}": partial(_rows, layer, sampler, size) for sampler in SAMPLERS}
    *rows, truth = work.all_kept(functions | {f"headline-truth-{name}": partial(_truth, layer, size)}, "headline").values()
    return {
        "num_jets": len(layer.signed),
        "num_held_out": len(layer.held_out),
        "num_weights": layer.signed.shape[1],
        "num_chains": size.chains,
        "num_steps": size.steps,
        "lr": LR,
        "sigma_along": ALONG,
        "width_of_lams": WIDTH_OF_LAMS,
        "truth": truth,
        "rows": dict(zip(SAMPLERS, rows, strict=True)),
    }


def draw(result: dict[str, Any]) -> Figure:
    """Left: the spread against the width, in units of the truth. Right: against lambda, with the truth."""
    truth = {row["lam"]: row["mean_spread"] for row in result["truth"]}
    with canvas(height=4.8) as (figure, (left, right)):
        for name, rows in result["rows"].items():
            for axes, chosen, x, unit in (
                (left, by_width(rows), "width", truth[1.0][0]),
                (right, by_lam(rows, result["width_of_lams"][_kind(name)]), "lam", 1.0),
            ):
                at, values = [row[x] for row in chosen], [[v / unit for v in row["mean_spread"]] for row in chosen]
                points(axes, at, values, name, markersize=7, capsize=0)
                for row, place, value in zip(chosen, at, values, strict=True):
                    if not row["is_converged"]:  # hollow
                        style: dict[str, Any] = {
                            "color": COLOURS[name],
                            "markerfacecolor": "white",
                            "markersize": 7,
                            "zorder": 4,
                        }
                        axes.plot(place, value[0], MARKERS[name], **style)
        left.axhline(1.0, color="black", linewidth=1.2, linestyle="--", label="the truth", zorder=5)
        right.plot(list(truth), [value[0] for value in truth.values()], color="black", linewidth=1.4, linestyle="--", zorder=5)
        for axes in (left, right):
            axes.set(xscale="log", yscale="log")
        left.set(xlabel="width of the proposal / posterior's width s", ylabel="spread of the prediction / the truth's")
        left.set_yticks([0.5, 0.7, 1, 1.5, 2, 3], ["0.5", "0.7", "1", "1.5", "2", "3"])
        left.set_xticks(WIDTHS, [str(x) for x in WIDTHS])
        left.minorticks_off()
        right.set(xlabel="inverse temperature lambda", ylabel="spread of the prediction (75% - 25%)")
        left.set_title("lambda = 1: the truth does not depend on the width")
        right.set_title("one width: the truth falls with lambda")
        right.plot([], [], "o", color="grey", markerfacecolor="white", label="not converged")
        legend(figure, (left, right))
    return figure


def section(result: dict[str, Any]) -> str:
    """One row per sampler, and the conclusion."""
    common = common_lams(result)
    fall = _factor([row["mean_spread"] for row in result["truth"] if row["lam"] in common])[0]
    ends = f"{common[0]:g} / {common[-1]:g}"
    table = [
        f"| sampler | spread / truth, narrow to wide | widest / narrowest | lambda {ends} (truth: {fall:.3g}) | acceptance | "
        "R-hat | verdict |",
        "|---|---|---|---|---|---|---|",
        "| published | – | rises with sigma | no strong effect | – | – | – |",
    ]
    findings = {name: finding(result, name) for name in result["rows"]}
    for name, found in findings.items():
        table.append(
            f"| {LABELS[name]} | {', '.join(found['ratios'])} | {found['over_widths']} | {found['over_lams']} | "
            f"{found['acceptance']} | {found['rhat']} | {found['verdict']} |"
        )
    right = [LABELS[name] for name, found in findings.items() if found["is_right"]]
    wrong = [LABELS[name] for name, found in findings.items() if found["is_right"] is False]
    text = [
        f"Logistic regression with {result['num_weights']} weights on the observables of {result['num_jets']:,} jets, all of "
        f"them in each step; {result['num_chains']} chains of {result['num_steps']:,} steps at each setting, which start from "
        f"exact draws; the spread is the mean over {result['num_held_out']} held-out jets. (n): not converged: fewer than 100 "
        "effective draws, or an R-hat above what chance gives that many (1.01 to 1.05). A sampler *holds* if each converged "
        "spread, at any width and lambda, is within four errors, or 3%, of the truth. Lambdas are compared where all samplers "
        "have converged.",
        "",
        f"Widths are {' to '.join(f'{w:g}' for w in (WIDTHS[0], WIDTHS[-1]))} posterior standard deviations s, lr is "
        f"{result['lr']:g} s and sigma_along {result['sigma_along']:g}. Where lambda is varied, the paper's samplers keep "
        f"sigma ({result['width_of_lams']['paper']:g} s at lambda = 1) and lr, as in the paper; the steps of exact ones keep "
        f"their ratio ({result['width_of_lams']['exact']:g}) to the posterior's width, as burn-in would set them. *As "
        "released* has the script's scale: lambda times the mean loss, and no prior, which is another and wider target than "
        "the truth that all rows are divided by; with a *summed loss* its proposals run on the target of the others.",
        "",
        *table,
        "",
    ]
    if right:
        text.append(f"The spread is the target's, whatever the width, and follows lambda: {', '.join(right)}.")
    if wrong:
        text.append(f"The spread depends on the width, and is not the target's: {', '.join(wrong)}.")
    released = findings["released"]
    text.append(
        f"As released, the spread changes by a factor {released['over_widths']} from the narrowest proposal to the widest, "
        f"and by 1 / ({released['over_lams']}) from lambda {common[0]:g} to {common[-1]:g}; the truth's by 1 / {fall:.3g}."
    )
    return "\n".join(text) + "\n"


def finding(result: dict[str, Any], name: str) -> dict[str, Any]:
    """The summary of one sampler's rows."""
    truth = {row["lam"]: row["mean_spread"] for row in result["truth"]}
    rows = result["rows"][name]
    widths = by_width(rows)
    lams = [row for row in by_lam(rows, result["width_of_lams"][_kind(name)]) if row["lam"] in common_lams(result)]
    rhats = [row["rhat"] for row in rows]
    known = [x for x in rhats if x is not None]
    converged = [row for row in rows if row["is_converged"]]
    off = [row for row in converged if not _agrees(row["mean_spread"], truth[row["lam"]])]
    ratios = [
        f"{row['mean_spread'][0] / truth[1.0][0]:.2f} ± {row['mean_spread'][1] / truth[1.0][0]:.2f}"
        + ("" if row["is_converged"] else " (n)")
        for row in widths
    ]
    return {
        "ratios": ratios,
        "over_widths": "{:.2f} ± {:.2f}".format(*_factor([row["mean_spread"] for row in reversed(widths)])) + _mark(widths),
        "over_lams": "{:.3g} ± {:.1g}".format(*_factor([row["mean_spread"] for row in lams])) + _mark(lams),
        "acceptance": f"{min(r['acceptance'][0] for r in rows):.2f} to {max(r['acceptance'][0] for r in rows):.2f}",
        "rhat": f"{min(known):.3f} to {max(known):.3f}" if known else "none: no chain moved",
        "is_right": None if not converged else not off,
        "verdict": "not converged at any setting"
        if not converged
        else f"{'does not hold' if off else 'holds'} ({len(converged) - len(off)} of {len(converged)} converged settings)",
    }


def common_lams(result: dict[str, Any]) -> list[float]:
    """The lambdas at which all samplers have converged; all lambdas if fewer than two."""
    every = [row["lam"] for row in result["truth"]]
    stuck = {
        row["lam"]
        for name, rows in result["rows"].items()
        for row in by_lam(rows, result["width_of_lams"][_kind(name)])
        if not row["is_converged"]
    }
    common = [lam for lam in every if lam not in stuck]
    return common if len(common) > 1 else every


def _mark(rows: list[dict[str, Any]]) -> str:
    """Marks a ratio whose ends have not both converged."""
    return "" if rows[0]["is_converged"] and rows[-1]["is_converged"] else " (n)"


def by_width(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows at lambda = 1, by width."""
    return sorted((row for row in rows if row["lam"] == 1.0), key=lambda row: float(row["width"]))


def by_lam(rows: list[dict[str, Any]], width: float) -> list[dict[str, Any]]:
    """The rows at this width, by lambda."""
    return sorted((row for row in rows if row["width"] == width), key=lambda row: float(row["lam"]))


def _agrees(value: list[float], truth: list[float]) -> bool:
    difference = abs(value[0] - truth[0])
    return difference <= max(4 * math.hypot(value[1], truth[1]), 0.03 * truth[0])


def _factor(values: list[list[float]]) -> tuple[float, float]:
    """The first over the last, with its error."""
    first, last = values[0], values[-1]
    ratio = first[0] / last[0]
    return ratio, ratio * math.hypot(first[1] / first[0], last[1] / last[0])


class LastLayer:
    """Logistic regression on the observables of jets: its posterior, its Laplace approximation, and exact draws.

    Args:
        train: jets of the posterior, top and QCD.
        held_out: jets to predict.
        device: of the computation, in float64.
    """

    def __init__(self, train: Jets, held_out: Jets, device: torch.device | str = "cpu") -> None:
        x = _numbers(train)
        mean, scale = x.mean(0), x.std(0)
        values, vectors = torch.linalg.eigh(((x - mean) / scale).T.cov())
        to_components = vectors / values.sqrt()

        def inputs(x: Tensor) -> Tensor:
            components = ((x - mean) / scale) @ to_components
            return torch.cat([components, torch.ones(len(x), 1, dtype=x.dtype)], 1).to(device)

        signs = (2 * (train.kind == 1).double() - 1)[:, None].to(device)
        self.signed = signs * inputs(x)
        """y_i x_i, (jets, weights)"""
        self.held_out = inputs(_numbers(held_out))

    def log_density(self, lam: Tensor | float, w: Tensor, *, has_prior: bool = True) -> Tensor:
        """(chains,), from weights (chains, weights); lambda may differ between chains."""
        likelihood = -lam * F.softplus(-w @ self.signed.T).sum(1)
        return likelihood - w.square().sum(1) / 2 if has_prior else likelihood

    def laplace(self, lam: float) -> tuple[Tensor, Tensor]:
        """The mode, by Newton's method, and the covariance at the mode."""
        w = torch.zeros_like(self.signed[0])
        for _ in range(50):
            p = torch.sigmoid(-(self.signed @ w))
            curvature = lam * (self.signed.T * (p * (1 - p))) @ self.signed + torch.eye(len(w)).to(w)
            w = w - torch.linalg.solve(curvature, w - lam * (self.signed.T @ p))
        return w, torch.linalg.inv(curvature)

    def unit(self, lam: float) -> float:
        """s: the Laplace standard deviation, root mean square over the weights."""
        return math.sqrt(float(self.laplace(lam)[1].diagonal().mean()))

    def draw(self, lam: float, proposals: int, number: int, seed: int) -> tuple[Tensor, float]:
        """Draws of the posterior, (number, weights), by importance resampling of Laplace draws; and the effective
        number."""
        mode, covariance = self.laplace(lam)
        generator = torch.Generator(mode.device).manual_seed(seed)
        noise = torch.randn(proposals, len(mode), generator=generator, device=mode.device, dtype=mode.dtype)
        w = mode + 1.1 * noise @ torch.linalg.cholesky(covariance).T  # (a little wider, so that the weights have light tails)
        parts = [self.log_density(lam, part) for part in w.split(10_000)]
        weights = (torch.cat(parts) + noise.square().sum(1) / 2).softmax(0)
        places = torch.rand(number, generator=generator, device=mode.device, dtype=mode.dtype)
        chosen = torch.searchsorted(weights.cumsum(0), places).clamp_max(proposals - 1)
        return w[chosen], 1 / float(weights.square().sum())

    def predict(self, w: Tensor) -> Tensor:
        """The top probability of the held-out jets, (..., jets)."""
        return torch.sigmoid(w @ self.held_out.T)


def _truth(layer: LastLayer, size: _Size) -> list[dict[str, Any]]:
    found = []
    for number, lam in enumerate(LAMS):
        draws, ess = layer.draw(lam, size.truth, size.truth // 4, derive_seed(0, number))
        # (resampled draws: the error is that of their effective number)
        factor = math.sqrt(max(1.0, len(draws) / ess))
        spreads = {name: [value, factor * error] for name, (value, error) in _spreads(layer.predict(draws), _GROUPS).items()}
        found.append({"lam": lam, "s": layer.unit(lam), "ess": ess, **spreads})
    return found


def _rows(layer: LastLayer, sampler: str, size: _Size) -> list[dict[str, Any]]:
    """One sampler at each setting, all chains of all settings at once."""
    fixed = WIDTH_OF_LAMS[_kind(sampler)]
    settings = [(width, 1.0) for width in WIDTHS] + [(fixed, lam) for lam in LAMS if lam != 1.0]
    draws, info = _sample(layer, sampler, settings, size, seed=derive_seed(1, SAMPLERS.index(sampler)))
    rows: list[dict[str, Any]] = []
    for i, (width, lam) in enumerate(settings):
        mine = slice(i * size.chains, (i + 1) * size.chains)
        judged = _judged(layer.predict(draws[mine]))
        rows.append({"width": width, "lam": lam, "acceptance": _mean(info.acceptance_rate[mine]), **judged})
    return rows


def _sample(layer: LastLayer, sampler: str, settings: list[tuple[float, float]], size: _Size, seed: int) -> tuple[Tensor, Info]:
    """Draws (chains, draws, weights), setting by setting.

    Chains start from exact draws and run in the coordinates w / unit. The paper's samplers keep the unit of lambda = 1,
    as the paper keeps sigma and lr when it varies lambda; exact samplers use the unit of their target, as burn-in
    would.
    """
    seeds = [derive_seed(seed, i) for i in range(len(settings))]
    starts = torch.cat([layer.draw(lam, size.truth, size.chains, s)[0] for (_, lam), s in zip(settings, seeds, strict=True)])

    def by_chain(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=starts.dtype, device=starts.device).repeat_interleave(size.chains)

    width, lam = by_chain([width for width, _ in settings]), by_chain([lam for _, lam in settings])
    unit = by_chain([layer.unit(lam if _is_exact(sampler) else 1.0) for _, lam in settings])
    is_mean = sampler == "released"

    def log_density(v: Tensor) -> Tensor:
        scale = lam / len(layer.signed) if is_mean else lam
        return layer.log_density(scale, v * unit[:, None], has_prior=not is_mean)

    start = starts / unit[:, None]
    kernel = _kernel(sampler, width, Density(log_density), start)
    burn_in = size.steps // 4
    gap = (size.steps - burn_in) // size.draws
    draws, info = sample_density(
        log_density, start, kernel, num_steps=size.steps, burn_in=burn_in, gap=gap, seed=seed, progress=False
    )
    return draws * unit[:, None, None], info


def _kernel(sampler: str, width: Tensor, potential: Density, start: Tensor) -> Kernel:
    if sampler.startswith("released"):
        return kernels.as_released(LR, sigma=width, sigma_along=ALONG)
    if sampler.startswith("printed"):
        return kernels.adam_mcmc(LR, sigma=width, sigma_along=ALONG)
    if sampler == "exact, MALA":
        return kernels.mala(width.square() / 2)
    if sampler == "exact, underdamped":
        return kernels.underdamped(width)
    proposal = kernels.adam_mcmc(LR, sigma=width, sigma_along=ALONG).proposal
    here = potential.evaluate((start,), with_grad=True)
    generator = torch.Generator(start.device).manual_seed(0)
    # one pair for all chains: it affects how fast they mix, not what they sample
    spread = momentum_spread(potential, (start,), here, proposal, LR, generator)
    return kernels.exact_adam_mcmc(LR, sigma=width, sigma_along=ALONG, momentum_spread=spread)


def _judged(predictions: Tensor) -> dict[str, Any]:
    """The spread of predictions (chains, draws, jets), and whether the chains have converged.

    They have if the log odds of each jet have an effective sample size of at least 100 and an R-hat of at most 1.01, or
    at most that of chains in agreement with this sample size, up to 1.05.
    """
    logits = torch.logit(predictions[:, :, :: max(1, predictions.shape[2] // _PROBES)], 1e-12)
    # R-hat uses the values and their distances from the median, which have an effective sample size of their own
    folded = (logits - logits.flatten(0, 1).median(0).values).abs()
    rhat, ess = diagnostics.rhat(logits), torch.minimum(diagnostics.ess_bulk(logits), diagnostics.ess_bulk(folded))
    # the sum over single chains: that of all chains falls where they disagree, which would excuse it
    alone = [x.transpose(0, 1).flatten(1)[None] for x in (logits, folded)]
    total = torch.minimum(*(diagnostics.ess_bulk(x) for x in alone)).reshape(len(logits), -1).sum(0)
    chance = diagnostics.rhat_by_chance(total, len(logits), len(rhat), num_draws=logits.shape[1])
    limit = chance.clamp(1.01, 1.05)
    is_converged = bool(((rhat <= limit) & (ess >= _LEAST_ESS)).all())  # (False if no chain ever moved: R-hat is NaN)
    return {
        "rhat": float(rhat.max()),
        "ess": float(ess.min()),
        "is_converged": is_converged,
        **_spreads(predictions.flatten(0, 1), len(predictions)),
    }


def _spreads(predictions: Tensor, num_groups: int) -> dict[str, list[float]]:
    """75% - 25% over draws (draws, jets), mean and median over jets; jackknife errors over groups (chains)."""
    groups = predictions.chunk(num_groups)
    whole = _centres(uncertainty.spread(predictions))
    without = [torch.cat([g for i, g in enumerate(groups) if i != left_out]) for left_out in range(len(groups))]
    parts = torch.stack([_centres(uncertainty.spread(part)) for part in without])
    errors = ((parts - parts.mean(0)).square().sum(0) * (len(groups) - 1) / len(groups)).sqrt()
    return {name: [float(whole[i]), float(errors[i])] for i, name in enumerate(("mean_spread", "median_spread"))}


def _centres(spread: Tensor) -> Tensor:
    return torch.stack([spread.mean(), spread.median()])


def _mean(rates: Tensor) -> list[float]:
    each = rates.double().mean(1)
    return [float(each.mean()), float(each.std()) / math.sqrt(len(each))]


def _is_exact(sampler: str) -> bool:
    return sampler.startswith("exact")


def _kind(sampler: str) -> str:
    return "exact" if _is_exact(sampler) else "paper"


def _slug(sampler: str) -> str:
    return sampler.lower().replace(", ", "-").replace(" ", "-")


def _numbers(jets: Jets) -> Tensor:
    found = observables(jets)
    return torch.stack([found[name] for name in OBSERVABLES], 1).double()
