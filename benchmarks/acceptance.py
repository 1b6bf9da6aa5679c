"""What every acceptance test costs, and how far from the posterior it is, with and without a control variate.

    python -m benchmarks.acceptance [--output benchmarks/results/acceptance.json] [--length 1.0] [--cores 2]

Two posteriors whose truth is known. *Heavy tails*: the location of 2,000 Student-t(2) data, loss log cosh(theta - x_i), a flat
prior, the truth by quadrature. *Logistic*: 50,000 rows, 5 features and an intercept, N(0, 1) prior on the weights, the
truth by importance sampling from the Laplace approximation with the full data. All chains start from draws of the truth, take
the same random walk (of about one posterior sd in each direction; for the logistic problem in coordinates where the Laplace
covariance is 1), and the first quarter is dropped.

*sd / truth* is the root mean square distance from the true mean over the true sd, all coordinates together; its error comes
from the spread between the chains. *Data* is the number of examples looked at in a step over n: an example counts once, though
its loss is asked at both points (`FullData` remembers that of the current point), and though a control variate asks for its
Taylor terms. *ESS per datum* is the effective number of draws of the slowest coordinate over all examples looked at, relative
to `FullData`; where chains are short (tests that look at nearly all of 50,000 rows) it is good to a third. What a control
variate costs once (one pass over the data, at a reference that has to be found) is not in it.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adammcmc import (
    Barker,
    Confidence,
    ControlVariate,
    DataDensity,
    FullData,
    Minibatch,
    Penalty,
    Prior,
    Sequential,
    Tuna,
    kernels,
    sample_density,
)
from adammcmc.acceptance import AcceptanceTest, Comparison, beta_eff
from adammcmc.acceptance.bounds import Bound, DerivativeBound, logistic_bound
from adammcmc.acceptance.subsample import look_sizes
from benchmarks.networks import effective_size

ORDERS = {0: "", 1: "first order", 2: "second order"}
RESULTS = Path(__file__).parent / "results" / "acceptance.json"


class Problem(NamedTuple):
    """A posterior whose truth is known."""

    name: str
    losses: Callable[..., Tensor]
    data: tuple[Tensor, ...]
    prior: Prior | None
    mean: Tensor
    """Of the truth, (dim,)."""
    sd: Tensor
    truth_error: float
    """Of the sd, relative."""
    reference: Tensor
    """Where a control variate is expanded: the mode, (dim,)."""
    sigma: float
    """Of the random walk."""
    bound: Callable[[int], Bound]
    """By the order of the control variate, 0 without one."""
    num_chains: int
    num_steps: int

    def target(self, order: int = 0) -> DataDensity:
        control = None if order == 0 else ControlVariate(self.reference, order)
        # the random walk needs no gradient: a batch of one example, which is not counted
        return DataDensity(self.losses, *self.data, prior=self.prior, batch_size=1, control_variate=control)

    def draws(self, count: int, generator: torch.Generator) -> Tensor:
        """Points to start from: of a normal distribution with the mean and sd of the truth."""
        return self.mean + self.sd * torch.randn(count, len(self.mean), dtype=torch.float64, generator=generator)


# --- the two posteriors -------------------------------------------------------------------------------------------------


def log_cosh(theta: Tensor, x: Tensor) -> Tensor:
    return F.softplus(2 * (theta - x)) - (theta - x) - math.log(2)


def heavy_tails(n: int = 2000) -> Problem:
    g = torch.Generator().manual_seed(0)
    normal, halves = torch.randn(n, dtype=torch.float64, generator=g), torch.rand(n, dtype=torch.float64, generator=g)
    x = normal / (-halves.log()).sqrt()  # Student-t with 2 degrees of freedom: chi^2_2 / 2 is exponential
    mode = torch.zeros(1, dtype=torch.float64)
    for _ in range(50):
        u = torch.tanh(mode - x)
        mode = mode - u.sum() / (1 - u.square()).sum()
    width = float((1 - torch.tanh(mode - x).square()).sum()) ** -0.5
    grid = mode + width * torch.linspace(-10, 10, 2001, dtype=torch.float64)
    level = torch.stack([-log_cosh(t, x).sum() for t in grid])
    weight = torch.softmax(level, 0)
    mean = (weight * grid).sum()
    sd = (weight * (grid - mean).square()).sum().sqrt()
    largest = (1.0, 1.0, 4 / (3 * math.sqrt(3)))  # of the first, second and third derivative of log cosh

    def bound(order: int) -> Bound:
        return DerivativeBound(torch.full((n,), largest[order], dtype=torch.float64), order)

    return Problem("heavy tails", log_cosh, (x,), None, mean[None], sd[None], 0.0, mode, 1.0 * width, bound, 200, 1000)


def shifted_logistic(z: Tensor, inputs: Tensor, offset: Tensor) -> Tensor:
    """log(1 + e^-(y x.w)) with y x.w = offset + inputs . z."""
    return F.softplus(-(offset + inputs @ z))


class Shifted(Prior):
    """w ~ N(0, 1) for w = mode + root z."""

    def __init__(self, mode: Tensor, root: Tensor) -> None:
        self._mode, self._root = mode, root

    def log_density(self, params: Sequence[Tensor]) -> Tensor:
        return -0.5 * (self._mode + self._root @ params[0]).square().sum()


def logistic(n: int = 50_000, num_features: int = 5) -> Problem:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, num_features, dtype=torch.float64, generator=g)
    x[:, -1] += 0.8 * x[:, 0]  # some correlation, and one skewed feature
    x[:, 0] = x[:, 0].exp() - 1.6
    x = torch.cat([x, torch.ones(n, 1, dtype=torch.float64)], 1)
    w = torch.tensor([0.5, -0.7, 0.3, 0.0, 1.0, -0.5], dtype=torch.float64)[-x.shape[1] :]
    y = 2 * (torch.rand(n, dtype=torch.float64, generator=g) < torch.sigmoid(x @ w)).double() - 1
    mode = torch.zeros_like(w)
    for _ in range(20):
        p = torch.sigmoid(-y * (x @ mode))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + torch.eye(len(w), dtype=torch.float64)
        mode = mode - torch.linalg.solve(hessian, -(x * (y * p)[:, None]).sum(0) + mode)
    root = torch.linalg.cholesky(torch.linalg.inv(hessian))
    inputs, offset = y[:, None] * (x @ root), y * (x @ mode)
    prior = Shifted(mode, root)
    mean, sd, error = _importance(inputs, offset, prior, g)

    def bound(order: int) -> Bound:
        return logistic_bound(inputs, order)

    sigma = 2.38 / math.sqrt(len(w))
    return Problem(
        "logistic", shifted_logistic, (inputs, offset), prior, mean, sd, error, torch.zeros_like(w), sigma, bound, 32, 1200
    )


def _importance(
    inputs: Tensor, offset: Tensor, prior: Prior, g: torch.Generator, pairs: int = 500
) -> tuple[Tensor, Tensor, float]:
    """Mean and sd of z, where N(0, 1) is its Laplace approximation, by weights of antithetic draws; error of the sd.

    The sd is that of the weighted draws over that of the same draws unweighted: what the weights change, not what chance does.
    """
    half = torch.randn(pairs, inputs.shape[1], dtype=torch.float64, generator=g)
    z = torch.cat([half, -half])
    level = torch.stack([prior.log_density([one]) - shifted_logistic(one, inputs, offset).sum() for one in z])
    weight = torch.softmax(level + 0.5 * z.square().sum(1), 0) * len(z)
    mean = (weight[:, None] * z).mean(0)
    change = (weight[:, None] * z.square()).mean(0) / z.square().mean(0) - mean.square()
    each = ((weight[:, None] - 1) * z.square()).view(2, pairs, -1).mean(0)
    return mean, change.sqrt(), float((each.std(0) / math.sqrt(pairs) / 2).max())


# --- the rows -------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One line of the table: a test, on one problem."""

    label: str
    make: Callable[[Problem], AcceptanceTest]
    length: float = 1.0
    """Steps, over those of the problem: less where a step is expensive."""
    order: int = 0
    """Of the control variate; 0 is none."""
    num_chains: int | None = None
    """None: those of the problem. More where a step costs next to nothing."""


def rows(problem: Problem) -> list[Row]:
    """The lines of one problem."""
    return _small(problem) if problem.name == "heavy tails" else _large(problem)


def _small(problem: Problem) -> list[Row]:
    n = len(problem.data[0])
    first = n // 40
    found = [
        Row("`FullData()`", lambda p: FullData()),
        *(Row(f"`Minibatch({b})`", lambda p, b=b: Minibatch(b), 0.6) for b in (n // 40, n // 10, 2 * n // 5)),
        *(Row(f"`Penalty({b})`", lambda p, b=b: Penalty(b), 0.6) for b in (n // 10, 2 * n // 5)),
        Row(f"`Barker({first})`", lambda p: Barker(first), 0.3, num_chains=100),
        Row(f"`Sequential(0.1, {first})`", lambda p: Sequential(0.1, first), 0.4, num_chains=100),
        Row(f"`Sequential(0.05, {first})`", lambda p: Sequential(0.05, first), 0.3, num_chains=100),
        Row(f"`Sequential(0.01, {first})`", lambda p: Sequential(0.01, first), 0.25, num_chains=100),
        Row(f"`Sequential(0.1, {first}, growth=1)`", lambda p: Sequential(0.1, first, 1.0), 0.4, num_chains=100),
        Row(f"`Sequential(0.01, {first}, growth=1)`", lambda p: Sequential(0.01, first, 1.0), 0.25, num_chains=100),
        Row(f"`Confidence(0.05, bound, {first})`", lambda p: Confidence(0.05, p.bound(0), first), 0.2, num_chains=100),
        Row("`Tuna(bound, chi=0.1)`", lambda p: Tuna(p.bound(0), 0.1), 0.5, num_chains=100),
        Row("`Tuna(bound, chi=1e-4)`", lambda p: Tuna(p.bound(0), 1e-4), 1.5),
    ]
    for k in (1, 2):
        found += [
            Row("`Minibatch(50)`", lambda p: Minibatch(50), 0.6, order=k),
            Row("`Penalty(50)`", lambda p: Penalty(50), 0.6, order=k),
            Row("`Barker(50)`", lambda p: Barker(50), 0.6, order=k),
            Row("`Sequential(0.01, 50)`", lambda p: Sequential(0.01, 50), 0.4, order=k),
            Row("`Confidence(0.05, bound, 50)`", lambda p, k=k: Confidence(0.05, p.bound(k), 50), 0.3, order=k),
            Row("`Tuna(bound, chi=0.1)`", lambda p, k=k: Tuna(p.bound(k), 0.1), 0.6, order=k),
        ]
    return found


def _large(problem: Problem) -> list[Row]:
    n = len(problem.data[0])
    first = n // 100
    found = [
        Row("`FullData()`", lambda p: FullData()),
        Row(f"`Minibatch({n // 10})`", lambda p: Minibatch(n // 10), 0.4),
        Row(f"`Minibatch({2 * n // 5})`", lambda p: Minibatch(2 * n // 5), 0.2, num_chains=16),
        Row(f"`Penalty({n // 10})`", lambda p: Penalty(n // 10), 0.2),
        Row(f"`Penalty({2 * n // 5})`", lambda p: Penalty(2 * n // 5), 0.2, num_chains=16),
        Row(f"`Barker({first})`", lambda p: Barker(first), 0.15, num_chains=16),
        Row(f"`Sequential(0.1, {first})`", lambda p: Sequential(0.1, first), 0.25, num_chains=16),
        Row(f"`Sequential(0.01, {first})`", lambda p: Sequential(0.01, first), 0.15, num_chains=16),
        Row(f"`Confidence(0.05, bound, {first})`", lambda p: Confidence(0.05, p.bound(0), first), 0.1, num_chains=16),
        Row("`Tuna(bound, chi=0.1)`", lambda p: Tuna(p.bound(0), 0.1), 0.4),
        Row("`Tuna(bound, chi=1e-4)`", lambda p: Tuna(p.bound(0), 1e-4), 0.2, num_chains=16),
        Row("`Confidence(0.05, bound, 50)`", lambda p: Confidence(0.05, p.bound(2), 50), 0.08, 2, 16),
    ]
    for k in (1, 2):
        found += [
            Row("`Minibatch(50)`", lambda p: Minibatch(50), order=k, num_chains=128),
            Row("`Penalty(50)`", lambda p: Penalty(50), order=k, num_chains=128),
            Row("`Barker(50)`", lambda p: Barker(50), order=k, num_chains=64),
            Row("`Sequential(0.01, 50)`", lambda p: Sequential(0.01, 50), 0.6, order=k),
            Row("`Tuna(bound, chi=0.1)`", lambda p, k=k: Tuna(p.bound(k), 0.1), 0.5 * k, k, 32 if k == 1 else 128),
        ]
    return found


def measure(problem: Problem, row: Row, num_steps: int, num_chains: int, seed: int) -> dict[str, Any]:
    """One line of the table."""
    generator = torch.Generator().manual_seed(seed)
    start = problem.draws(num_chains, generator)
    kernel = kernels.adam_mcmc(0.0, sigma=problem.sigma, acceptance=row.make(problem))
    began = time.process_time()
    draws, info = sample_density(
        problem.target(row.order), start, kernel, num_steps=num_steps, burn_in=num_steps // 4, seed=generator, progress=False
    )
    seconds = time.process_time() - began
    n = len(problem.data[0])
    square = ((draws - problem.mean) / problem.sd).square().mean((1, 2))  # of each chain
    ratio = float(square.mean().sqrt())
    error = float(square.std()) / math.sqrt(num_chains) / (2 * ratio)
    data = float(info.num_examples.mean())
    noise = info.log_ratio_noise.square().nanmean().sqrt()  # NaN for a test that has none
    is_metropolis = isinstance(kernel.acceptance, Minibatch)
    return {
        "problem": problem.name,
        "test": row.label,
        "control_variate": row.order,
        "sd_ratio": ratio,
        "sd_ratio_error": math.hypot(error, problem.truth_error),
        "acceptance": float(info.is_accepted.double().mean()),
        "data": data / n,
        "draws_per_step": float(effective_size(draws).min()) / (num_chains * draws.shape[1]),
        "noise": None if noise.isnan() else float(noise),
        "beta_eff": float(beta_eff(noise)) if is_metropolis else None,
        "chains": num_chains,
        "steps": num_steps,
        "seconds": seconds,
    }


def with_gains(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """ESS per example looked at, over that of `FullData` on the same problem."""
    full = {r["problem"]: r["draws_per_step"] / r["data"] for r in found if r["test"] == "`FullData()`"}
    return [r | {"gain": r["draws_per_step"] / r["data"] / full[r["problem"]]} for r in found]


# --- two side questions ---------------------------------------------------------------------------------------------------


def wrong_decisions(problem: Problem, num_moves: int, seed: int = 2) -> list[dict[str, Any]]:
    """How often `Sequential` decides otherwise than the full data would, with the same uniform number."""
    found = []
    generator = torch.Generator().manual_seed(seed)
    start = problem.draws(num_moves, generator)
    target = problem.target().next_batch((start,), generator)
    proposed = start + problem.sigma * torch.randn(start.shape, dtype=torch.float64, generator=generator)
    log_uniform = torch.rand(num_moves, dtype=torch.float64, generator=generator).log()
    comparison = Comparison(
        target,
        (start,),
        (proposed,),
        target.evaluate((start,), with_grad=False),
        lambda: target.evaluate((proposed,), with_grad=False),
        lambda: torch.zeros(num_moves, dtype=torch.float64),
        torch.ones(num_moves, dtype=torch.bool),
        log_uniform,
    )
    truth = FullData()(comparison, None, generator)[0].is_accepted
    n = target.num_examples
    for eps in (0.1, 0.05, 0.01):
        for first, growth in ((n // 40, 1.0), (n // 40, 1.5), (n // 10, 1.5)):
            verdict = Sequential(eps, first, growth)(comparison, None, generator)[0]
            wrong = (verdict.is_accepted != truth).double()
            sizes = torch.tensor(list(look_sizes(first, growth, n)), dtype=torch.float64)
            found.append(
                {
                    "eps": eps,
                    "batch_size": first,
                    "growth": growth,
                    "wrong": float(wrong.mean()),
                    "wrong_error": float(wrong.std()) / math.sqrt(num_moves),
                    "looks": float(torch.searchsorted(sizes, verdict.num_examples).double().mean()) + 1,
                    "data": float(verdict.num_examples.mean()) / n,
                }
            )
    return found


def corrected_mala(small: Problem, large: Problem, num_steps: int, seed: int = 3) -> list[dict[str, Any]]:
    """What `kernels.corrected_mala` would sample on the heavy tails, by quadrature, and whether it moves there and elsewhere.

    The chains start from the law that it has at rest: theta by quadrature (for the logistic problem, where nobody knows that
    law, from the posterior), then each example with its odds given theta.
    """
    (x,) = small.data
    grid = small.mean + small.sd * torch.linspace(-100, 100, 2001, dtype=torch.float64)
    losses = torch.stack([log_cosh(t, x) for t in grid])
    found = []
    for lam in (1.0, 0.1, 0.01):
        truth = _deviation(grid, -lam * losses.sum(1))
        for rho in (0.1, 0.5, 0.9):
            kernel, generator = kernels.corrected_mala(0.5 * truth**2, rho), torch.Generator().manual_seed(seed)
            level = (torch.exp(-lam / kernel.weight * losses) + 1 - rho).log().sum(1)
            start = grid[torch.multinomial(torch.softmax(level, 0), 50, replacement=True, generator=generator)][:, None]
            target = DataDensity(log_cosh, x, inverse_temperature=lam, batch_size=1)
            moved = _moved(kernel, target, start, num_steps, generator)
            found.append(
                {"problem": small.name, "inverse_temperature": lam, "rho": rho, "sd_ratio": _deviation(grid, level) / truth}
                | {"accepted": moved, "moves": 50 * num_steps}
            )
    for rho in (0.1, 0.9):
        kernel, generator = kernels.corrected_mala(0.3, rho), torch.Generator().manual_seed(seed)
        moved = _moved(kernel, large.target(), large.draws(8, generator), num_steps, generator)
        found.append(
            {"problem": large.name, "inverse_temperature": 1.0, "rho": rho, "sd_ratio": None}
            | {"accepted": moved, "moves": 8 * num_steps}
        )
    return found


def _moved(kernel: Any, target: DataDensity, start: Tensor, num_steps: int, generator: torch.Generator) -> int:
    """Accepted moves of chains that start with a batch drawn given theta."""
    losses = target.example_losses((start,), slice(None))
    inside = torch.exp(-target.inverse_temperature / kernel.weight * losses)
    mask = torch.rand(inside.shape, dtype=torch.float64, generator=generator) < inside / (inside + 1 - kernel.rho)
    state = kernel.init(start, target)._replace(memory=kernels.CarriedBatch(mask))
    accepted = 0
    for _ in range(num_steps):
        state, info = kernel.step(state, target, generator)
        accepted += int(info.is_accepted.sum())
    return accepted


def _deviation(grid: Tensor, level: Tensor) -> float:
    weight = torch.softmax(level, 0)
    mean = (weight * grid).sum()
    return float((weight * (grid - mean).square()).sum().sqrt())


# --- the run --------------------------------------------------------------------------------------------------------------


def table(found: list[dict[str, Any]]) -> str:
    """The rows of one problem, as the docs have them."""
    lines = [
        "| test | control variate | sd / truth | acceptance | data | s | ESS per datum |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in found:
        ratio = f"{r['sd_ratio']:.3f} +- {r['sd_ratio_error']:.3f}"
        noise = "" if r["noise"] is None else f"{r['noise']:.2g}"
        # chains that stand still look like many draws to an estimate that knows them for this long only
        gain = f"{float(format(r['gain'], '.2g')):,g}" if r["acceptance"] > 0.03 else "hardly moves"
        cells = [r["test"], ORDERS[r["control_variate"]], ratio, f"{r['acceptance']:.2f}", f"{r['data']:.2g}", noise, gain]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(results: dict[str, Any]) -> dict[str, str]:
    """All tables of the docs, by name."""
    wrong = ["| eps | first look | growth | looks | wrong decisions | data |", "|---|---|---|---|---|---|"]
    for r in results["wrong_decisions"]:
        share = f"{r['wrong']:.3f} +- {r['wrong_error']:.3f}"
        wrong.append(f"| {r['eps']} | {r['batch_size']} | {r['growth']:g} | {r['looks']:.1f} | {share} | {r['data']:.2f} |")
    pairs = ["| problem | lambda | rho | sd / truth of its law | accepted |", "|---|---|---|---|---|"]
    for r in results["corrected_mala"]:
        moves = f"{r['accepted']} of {r['moves']}"
        ratio = "" if r["sd_ratio"] is None else f"{r['sd_ratio']:.2f}"
        pairs.append(f"| {r['problem']} | {r['inverse_temperature']} | {r['rho']} | {ratio} | {moves} |")
    plain = ["| test | control variate | s | beta_eff(s) | beta_eff^-1/2 | sd / truth |", "|---|---|---|---|---|---|"]
    for r in results["tests"]:
        if r["beta_eff"] is not None:
            found = f"{r['noise']:.2g} | {r['beta_eff']:.2f} | {r['beta_eff'] ** -0.5:.2f} | {r['sd_ratio']:.2f}"
            plain.append(f"| {r['problem']}, {r['test']} | {ORDERS[r['control_variate']]} | {found} |")
    names = dict.fromkeys(r["problem"] for r in results["tests"])
    by_problem = {name: table([r for r in results["tests"] if r["problem"] == name]) for name in names}
    return by_problem | {
        name: "\n".join(x) for name, x in (("plain", plain), ("wrong decisions", wrong), ("corrected_mala", pairs))
    }


def write_tables(page: Path, results: dict[str, Any]) -> None:
    """Put the tables in the place of those that the page has, which come in the same order."""
    text = page.read_text()
    at = 0
    for fresh in tables(results).values():
        start = text.index(fresh.splitlines()[0], at)
        end = text.index("\n\n", start)
        text = text[:start] + fresh + text[end:]
        at = start + len(fresh)
    page.write_text(text)


_PROBLEMS: dict[str, Problem] = {}


def _job(job: tuple[str, int, float, float]) -> dict[str, Any]:
    """One row, in a process that has the problems already."""
    torch.set_num_threads(1)
    name, number, length, chains = job
    problem = _PROBLEMS[name]
    row = rows(problem)[number]
    num_steps = max(8, int(length * row.length * problem.num_steps))
    num_chains = max(4, int(chains * (row.num_chains or problem.num_chains)))
    found = measure(problem, row, num_steps, num_chains, seed=number)
    print(f"{name}: {row.label}, order {row.order}: {found['sd_ratio']:.3f}, {found['seconds']:.0f} s", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=float, default=1.0, help="of the chains")
    parser.add_argument("--chains", type=float, default=1.0, help="a share of their number")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs=2, default=(2000, 50_000), help="of the two problems")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, help="a page of the docs whose tables are to be these")
    options = parser.parse_args(argv)
    began = time.perf_counter()
    torch.set_num_threads(1)
    made = [heavy_tails(options.rows[0]), logistic(options.rows[1])]
    _PROBLEMS.update({problem.name: problem for problem in made})
    jobs = [
        (p.name, number, options.length, options.chains) for p in reversed(made) for number in range(len(rows(p)))
    ]  # the long ones first
    if options.cores > 1:
        with multiprocessing.get_context("fork").Pool(options.cores) as pool:
            found = list(pool.imap(_job, jobs))
    else:
        found = [_job(job) for job in jobs]
    found = with_gains(found)
    results = {
        "about": {"torch": torch.__version__, "length": options.length, "chains": options.chains, "rows": list(options.rows)},
        "truth_error": {problem.name: problem.truth_error for problem in made},
        "tests": found,
        "wrong_decisions": wrong_decisions(made[0], max(100, int(4000 * options.length))),
        "corrected_mala": corrected_mala(made[0], made[1], max(2, int(100 * options.length))),
    }
    results["about"]["seconds"] = time.perf_counter() - began
    for name, text in tables(results).items():
        print(f"\n{name}\n\n{text}")
    print(f"\n{results['about']['seconds']:.0f} s")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    if options.page is not None:
        write_tables(options.page, results)


if __name__ == "__main__":
    main()
