r"""Self-tests of a run, and a verdict in words.

Each self-test applies only under its own conditions.

- *In equilibrium, a Metropolis chain accepts with 2 P(Y > 0).* Applies where Y is exact (fixed data, `FullData`), and
  not to `Barker`.
- *Configurational temperature*: E[theta . grad U] / P = 1. Applies to a proper prior whose edge is not met. Layers
  whose length a BatchNorm cancels are left out.
- *Noise of the log ratio*: a plain minibatch test with noise s samples at about beta_eff(s) times the inverse
  temperature, beta_eff = 2 w / (1/2 + w), w = exp(s^2 / 2) Phi(-s).
- *Acceptance* is near what burn-in tuned it to (`samplers.aim`). Applies to settings that were tuned.
- *Loss influence*: the standard deviation of lambda * (change of the loss) is not far below 1.
- *Divergence*: a temperature above 10 or below -10 (100 for an exact chain) that does not recover, or, for an
  approximate kernel, U above its start by more than 5 P + 50; a chain that leaves an optimum climbs by P / 2. Below
  zero the weights run away downhill: U has no lower bound. This test needs no effective draws, and it precedes all
  others.

Standard errors come from batch means: the run in up to 64 batches of equal length. A number whose batches are still
correlated has not settled and is not judged. Effective draws of U agree with `diagnostics.ess_bulk`, from the means of
up to 512 batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from adammcmc.acceptance import beta_eff
from adammcmc.errors import warn
from adammcmc.samplers.aim import ENOUGH_STEPS, off_target
from adammcmc.samplers.diagnostics import ess_bulk
from adammcmc.samplers.running_sums import BLOCK, PENDING, SERIES, RunningSums

__all__ = [
    "GRAVITY",
    "PENDING",
    "Finding",
    "Grade",
    "Health",
    "beta_eff",
    "grade_of",
    "read_health",
    "warn_off_target",
]

Grade = Literal["sound", "undecided", "sick"]
_SICK = (
    *("not finite", "not fixed", "diverged", "no posterior", "stuck", "no influence", "too hot", "chains disagree"),
    *("biased", "not at rest", "temperature", "funnel"),
)
_UNDECIDED = (
    *("adapting", "burn-in", "adapted acceptance", "not mixed", "unknown noise", "few draws", "cannot tell"),
    *("one chain", "one start", "undefined", "approximate", "untested"),
)
GRAVITY = {kind: place for place, kind in enumerate((*_SICK, *_UNDECIDED))}
"""The kinds of findings, of a chain here and of a whole run in `summary`, the gravest first."""

_ENOUGH_STEPS = 200
_FEW_UNDEFINED = 0.01  # of the proposals
_ENOUGH_DRAWS = 30  # effective ones, of U
_FAR_TOO_HOT = 10.0  # configurational temperature; ten times that for an exact chain, which may still be descending
_NAMED = 10  # chains in a warning
_TOO_WIDE = 0.05  # of the spread of the draws
_ABSURD = 1e6  # below zero, no merely bad start reaches this


class Finding(NamedTuple):
    """The result of one self-test."""

    kind: str
    """A short name: "diverged", "no posterior", "adapting", "burn-in", "adapted acceptance", "stuck", "no influence",
    "too hot", "unknown noise", "not at rest", "biased", "temperature", "approximate", "untested", "undefined",
    "not fixed", "cannot tell". Draws from a density also have "not finite", "chains disagree", "not mixed", "few draws",
    "one chain", "one start", "funnel"."""
    says: str


def grade_of(findings: Sequence[Finding]) -> Grade:
    """The grade in a word: "sick" if something is wrong, "undecided" if something is open, else "sound"."""
    if any(finding.kind in _SICK for finding in findings):
        return "sick"
    return "undecided" if findings else "sound"


@dataclass(frozen=True)
class Health:
    """The self-tests of a run. `print` it for the verdict in words."""

    num_steps: int
    acceptance: float
    """Mean of min(1, exp(Y))."""
    twice_rises: float
    """2 P(Y > 0), which equals `acceptance` in an exact chain in equilibrium; NaN where Y is unknown."""
    temperature: float
    """Configurational temperature over all weights; NaN where it does not apply or is not known yet."""
    temperatures: dict[str, float]
    """The same by layer."""
    loss_influence: float
    """Standard deviation of lambda times the change of the summed loss over a proposal; NaN if never evaluated."""
    noise: float
    """Root mean square noise s of the log ratio; 0 where it is exact, NaN where it is unknown."""
    beta_eff: float
    """The factor of that noise in the inverse temperature, 1 for none; NaN for a test that allows for noise."""
    effective_draws: float
    """Effective draws of U, as `diagnostics.ess_bulk` of its trace; NaN where U was only estimated on batches."""
    rejected_not_finite: float
    """Fraction of proposals where U was not finite (NaN, or outside the prior)."""
    findings: tuple[Finding, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    @property
    def grade(self) -> Grade:
        """The grade in a word: "sick" if something is wrong, "undecided" if something is open, else "sound"."""
        return grade_of(self.findings)

    @property
    def verdict(self) -> str:
        """The findings in words."""
        if self.findings:
            return "; ".join(finding.says for finding in self.findings)
        acceptance = f"acceptance {self.acceptance:.2f}"
        if math.isnan(self.effective_draws):
            why = "U was only estimated, so convergence was not judged"
            return f"no complaint, as far as can be judged: {acceptance}, {self.num_steps} steps; {why}"
        draws = f"about {self.effective_draws:.0f} effective draws of U in {self.num_steps} steps"
        return f"no complaint: {acceptance}, {draws}"

    def __str__(self) -> str:
        return f"health: {self.verdict}."


@dataclass(frozen=True)
class Context:
    """The facts that decide which self-tests apply."""

    is_exact: bool  # whether the kernel claims to be exact, which decides how a failed self-test is worded
    knows_potential: bool  # whether U was evaluated on all data; otherwise it is mostly batch noise
    has_proper_prior: bool  # whether there is a posterior at all
    has_edge: bool  # whether the prior is zero somewhere
    is_adapting: bool = False  # whether the settings are still changing
    left_out: Sequence[str] = ()  # layers whose temperature is not defined
    is_metropolis: bool = True  # whether the test is log uniform < Y; other tests allow for the noise of Y
    complaints: Sequence[str] = ()  # from the acceptance test itself
    burn_in: str | None = None  # what burn-in did not reach
    target_acceptance: float | None = None  # what it tuned to; None without it, and for a test that accepts everything
    coarse: str | None = None  # the resolution of U in nats, where it is poor
    bias: Sequence[float] | None = None  # of the draws' spread, as a fraction, and its standard error; None: not estimated


def read_health(sums: RunningSums, chain: int = 0, **context: Any) -> Health:
    """The verdict on the steps of one chain so far. `context`: the fields of `Context`. Waits for the device."""
    run = _Run(sums, chain, Context(**context))
    return Health(
        num_steps=sums.num_steps,
        acceptance=run.mean["rate"],
        twice_rises=2 * run.mean["rise"] if run.is_known and run.context.is_metropolis else math.nan,
        temperature=run.temperature.value,
        temperatures={name: t.value for name, t in run.temperatures.items() if name},
        loss_influence=run.influence,
        noise=run.noise,
        beta_eff=run.beta,
        effective_draws=run.draws if run.context.knows_potential else math.nan,
        rejected_not_finite=run.lost,
        findings=_judge(run),
    )


# --- the numbers ----------------------------------------------------------------------------------------------------


class _Mean(NamedTuple):
    """A mean over the run, with its standard error from batch means."""

    value: float = math.nan
    error: float = math.nan
    is_settled: bool = False
    """Whether the batches are nearly independent, so that the error can be trusted."""


def _mean(batches: Tensor) -> _Mean:
    """Mean and standard error over batches; correlated neighbours are merged until they no longer are."""
    while True:
        n = len(batches)
        centred = batches - batches.mean()
        variance = float(centred.square().mean())
        if n < 2 or not variance > 0:
            return _Mean(float(batches.mean()), 0.0 if n >= 2 and variance == 0 else math.nan)
        correlation = float((centred[1:] * centred[:-1]).sum() / centred.square().sum())
        if correlation < 0.2 or n < 32:
            return _Mean(float(batches.mean()), math.sqrt(variance / (n - 1)), n >= 16 and correlation < 0.4)
        batches = batches[n % 2 :].view(-1, 2).mean(1)


def _halves(batches: Tensor) -> tuple[_Mean, _Mean]:
    half = len(batches) // 2
    return _mean(batches[:half]), _mean(batches[half:])


def _effective_draws(trace: Tensor, length: int, variance: float) -> float:
    """`diagnostics.ess_bulk` of a series of this variance, from its means over batches of this length.

    The mean of the run has the variance (variance of the batches) / ess(batches). Batches longer than the memory of the
    chain fluctuate less than the series, and each is worth several draws.
    """
    between = float(trace.var(correction=0)) if len(trace) >= 4 else 0.0
    if not 0 < between < math.inf:
        return 0.0
    worth = min(max(1.0, variance / between), float(length))
    return min(float(ess_bulk(trace[None])), len(trace)) * worth


class _Run:
    """The numbers of one chain that the self-tests compare."""

    def __init__(self, sums: RunningSums, chain: int, context: Context) -> None:
        self.sums, self.chain, self.context = sums, chain, context
        sums.settle()
        batches = (
            sums.steps.means(chain) if sums.steps.num_blocks else torch.full((1, len(SERIES)), math.nan, dtype=torch.float64)
        )
        self.column = dict(zip(SERIES, batches.unbind(1), strict=True))
        self.mean = mean = {name: float(values.mean()) for name, values in self.column.items()}
        self.is_known = mean["known"] == 1
        """Whether every step reported Y."""
        self.lost = 1 - mean["finite"]
        """Fraction of proposals where U was not finite."""
        self.influence = math.nan
        if (evaluated := mean["change_known"]) > 0:
            self.influence = math.sqrt(max(0.0, mean["change_square"] / evaluated - (mean["change"] / evaluated) ** 2))
        # where a proposal fell outside the prior, nothing was estimated
        self.noise = math.sqrt(mean["noise"] / mean["noise_known"]) if mean["noise_known"] > 0.5 else math.nan
        # at the root mean square, which predicts the temperature better than the mean over the steps
        self.beta = float(beta_eff(torch.tensor(self.noise, dtype=torch.float64))) if context.is_metropolis else math.nan
        self.is_still = len(self.column["accepted"]) >= 4 and mean["accepted"] == 0
        self.is_stuck = mean["accepted"] < 0.01 and (sums.num_steps >= _ENOUGH_STEPS or self.is_still)
        self._set_trend()
        self._set_temperatures()

    def _set_trend(self) -> None:
        """The change of U from the first third of the run to the last.

        It is real beyond 4 standard errors and half a standard deviation of U, or sqrt(P / 2) where U is only
        estimated. With few effective draws a standard error means little: then 1.5 standard deviations are required.
        """
        trace, length = self.sums.trace.means(self.chain), self.sums.trace.per_batch * BLOCK
        third = len(trace) // 3
        variance = max(0.0, self.mean["square"] - self.mean["potential"] ** 2)
        self.spread, self.draws = math.sqrt(variance), _effective_draws(trace, length, variance)
        self.change = float(trace[-third:].mean() - trace[:third].mean()) if third else 0.0
        bar = 4 * math.sqrt(6 / self.draws) if self.draws >= _ENOUGH_DRAWS else 1.5
        matters = self.spread if self.context.knows_potential else math.sqrt(sum(self.sums.sizes) / 2)
        self.is_moving = third >= 4 and abs(self.change) > max(bar * self.spread, 0.5 * matters)
        """Whether the change is more than chance explains, and large enough to matter."""

    @property
    def trend(self) -> str:
        """The change of U in words."""
        size = f"{abs(self.change):.3g}"
        if self.context.knows_potential:
            size += f" ({abs(self.change) / self.spread:.1f} standard deviations)"
        word = "falling" if self.change < 0 else "rising"
        return f"U is still {word}: by {size} from the first third of the run to the last"

    def _set_temperatures(self) -> None:
        """theta . grad U / P, of each layer where it is valid and, under the empty name, of all of them."""
        names, sizes, batches = self.sums.layers, self.sums.sizes, self.sums.products.means(self.chain)
        is_valid = self.context.has_proper_prior and not (self.context.has_edge and self.lost > 0)
        self.kept = [i for i, name in enumerate(names) if is_valid and name not in self.context.left_out]
        self.series: dict[str, Tensor] = {}
        if self.kept and len(batches):
            self.series = {"": batches[:, self.kept].sum(1) / sum(sizes[i] for i in self.kept)}
            self.series |= {names[i]: batches[:, i] / sizes[i] for i in self.kept}
        self.temperatures = {name: _mean(x) if len(x) > 1 else _Mean() for name, x in self.series.items()}
        self.temperature = self.temperatures.get("", _Mean())

    @cached_property
    def runaway(self) -> float:
        """The temperature over the second half of a run that is far off throughout and does not recover; otherwise 0.

        theta . grad U on a batch is noisy, so it must be off at many points. An exact chain must be off in every layer.
        """
        products, is_exact = self.sums.products.means(self.chain), self.context.is_exact
        if len(products) < 4 and (few := self.sums.pending_products):  # point by point
            products = torch.cat([products, torch.stack(few)[:, self.chain].cpu()])
        half = len(products) // 2
        if not self.kept or half < 1 or self.sums.num_steps < 3 * BLOCK:
            return 0.0
        sizes = torch.tensor([self.sums.sizes[i] for i in self.kept], dtype=torch.float64)
        parts = products[:, self.kept] / sizes if is_exact else products[:, self.kept].sum(1, keepdim=True) / sizes.sum()
        if not bool(parts[half:].isfinite().any()):
            return math.inf
        is_falling = self.change < (0 if self.is_moving else -1.5 * self.spread)  # possibly by chance, in a short run
        for sign in (1, -1):
            mildest = (sign * parts).nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf).amin(1)
            before, now = float(mildest[:half].median()), float(mildest[half:].median())
            if sign > 0:
                is_recovering = is_falling and (is_exact or now < 0.7 * before)
            else:  # U falls in a runaway too; a descent that will end does not accelerate
                is_recovering = now < 0.7 * before or (is_falling and now < max(2 * before, 100.0) and now < _ABSURD)
            is_long = half >= (2 if self.context.knows_potential else 8)
            if is_long and not is_recovering and bool(mildest[half:].min() > 3):
                return sign * now
        return 0.0

    @cached_property
    def divergence(self) -> str | None:
        """The evidence of a runaway, in words. It needs no effective draws and no finite sums.

        A chain that is still descending in U from a bad start has not diverged. Noise of the test explains part of a
        high temperature and of a high U.
        """
        potential = self.column["potential"]
        late = potential[-max(1, len(potential) // 4) :]
        if len(potential) > 1 and not bool(late.isfinite().all()):
            return "U is not finite"
        heat = 1 / self.beta if self.beta > 0 else 1.0
        bar = _FAR_TOO_HOT * (10 if self.context.is_exact else 1)
        found = []
        if self.runaway > bar * heat:
            found.append(_temperature_of(self.runaway))
        elif self.runaway < -bar:  # noise heats, and explains nothing of this
            found.append(_temperature_of(self.runaway, _DOWNHILL))
        size, start = sum(self.sums.sizes), self.sums.start
        if start is not None and size > 0 and not self.context.is_exact and len(potential) > 1:
            level, square = (start[self.chain].cpu() / BLOCK).tolist()
            rise, noise = float(late.mean()) - level, math.sqrt(max(0.0, square - level**2))
            if rise > (5 * size + 50) * heat + 2 * noise:
                explained = f"of which its {size:,} weights explain about {size / 2:.3g}"
                found.append(f"U is {rise:.3g} above its start, {explained}")
        return " and ".join(found) or None


# --- the findings ---------------------------------------------------------------------------------------------------


def _judge(run: _Run) -> tuple[Finding, ...]:
    """All findings, in order. To add one, add it here; a new kind also needs its place in `_SICK` or `_UNDECIDED`."""
    context = run.context
    found = [
        Finding("no posterior", _NO_POSTERIOR) if not context.has_proper_prior else None,
        *(Finding("biased", f"not exact: {complaint}") for complaint in context.complaints),
        Finding("adapting", _ADAPTING) if context.is_adapting else None,
        Finding("not fixed", _NOT_FIXED.format(run.sums.change)) if run.sums.change != 0 else None,
    ]
    if (decisive := _diverged(run) or _stuck(run)) is not None:
        found.append(decisive)
    elif run.sums.num_steps < _ENOUGH_STEPS:
        found.append(_cannot_tell(f"{run.sums.num_steps} of at least {_ENOUGH_STEPS} steps"))
    else:
        found += [_no_influence(run), _too_hot(run), _biased_spread(run), _not_at_rest(run), _undefined(run), _convergence(run)]
        if not any(found):
            is_far_off = abs(run.temperature.value) > _FAR_TOO_HOT
            found.append(_not_mixed(run.temperature.value) if is_far_off else _untested(run))
        if context.coarse is not None:  # the self-tests compare values of U, and detect no bias below its resolution
            found.append(Finding("untested", f"untested: {context.coarse}"))
    is_settled = context.knows_potential and run.draws >= _ENOUGH_DRAWS and not run.is_moving and run.divergence is None
    if context.burn_in is not None and not context.is_adapting and not is_settled:
        found.append(Finding("burn-in", context.burn_in))
    if decisive is None and not context.is_adapting:
        found.append(_off_target(run))
    return tuple(finding for finding in found if finding is not None)


_NO_POSTERIOR = "the prior is flat and improper, so there is no posterior to sample: set `prior`"
_NOT_FIXED = (
    "not fixed: the loss has changed during the run, by up to {:.3g} nats of U at the first draw. It must be a function of "
    "weights and data alone: no state, no schedule, no random numbers"
)
_APPROXIMATE = (
    "approximate: no self-test has found a bias, but the kernel has one, which may be too small to be seen in this run; "
    "compare with an exact kernel"
)
_ADAPTING = "the settings are still adapting: these are not draws yet"
_DOWNHILL = "; below zero the weights run away downhill, as when a loss with the wrong sign has no lower bound"


def _temperature_of(value: float | str, note: str = "") -> str:
    words = value if isinstance(value, str) else f"{value:.3g}"
    return f"configurational temperature {words} (1 in equilibrium{note})"


def _cannot_tell(why: str) -> Finding:
    return Finding("cannot tell", f"cannot tell yet: {why}")


def _not_mixed(value: float | str) -> Finding:
    return _cannot_tell(f"the weights have not mixed, {_temperature_of(value)}")


def _diverged(run: _Run) -> Finding | None:
    overflows = run.lost > 0.9 and not run.context.has_edge
    is_held = run.is_stuck and (run.context.is_exact or run.is_still) and not overflows  # by its acceptance test
    if run.divergence is None or is_held:
        return None
    remedy = "shorten the step, or use larger batches or FullData()"
    if run.context.is_exact:
        remedy = "start from trained weights, and check the prior and the scale of the loss"
    elif run.mean["known"] == 0:
        remedy = "the step is too long for an unadjusted sampler: shorten it, or use a Metropolis test"
    lost = f", {run.lost:.0%} of the proposals are not finite" if run.lost > 0.1 and not run.context.has_edge else ""
    return Finding("diverged", f"diverged: {run.divergence}{lost}; {remedy}")


def _stuck(run: _Run) -> Finding | None:
    if not run.is_stuck:
        return None
    why = "reduce the noise (or the step)"
    if run.lost > 0.9:
        has_edge = run.context.has_edge
        why = "nearly all proposals fell outside the prior" if has_edge else "U is not finite for nearly all proposals"
    return Finding("stuck", f"stuck: {run.mean['accepted']:.1%} of the proposals were accepted; {why}")


def _off_target(run: _Run) -> Finding | None:
    says = _far_off(run.column["rate"], run.sums.num_steps, run.context.target_acceptance)
    return None if says is None else Finding("adapted acceptance", says)


def _far_off(rates: Tensor, num_steps: int, target: float | None) -> str | None:
    """`off_target` of a chain's acceptance, which must be as far off in both halves of its steps."""
    if num_steps < ENOUGH_STEPS:
        return None
    whole, halves = _mean(rates), _halves(rates)
    if any(off_target(half.value, 0.0, target) is None for half in halves):
        return None
    return off_target(whole.value, whole.error if whole.is_settled else 2 * whole.error, target)


def warn_off_target(sums: RunningSums, num_chains: int, target: float | None) -> bool:
    """Warn of chains whose acceptance is far from what was tuned to; whether there are any. Waits for the device."""
    if target is None:
        return False
    sums.settle()
    column = SERIES.index("rate")
    found = {c: _far_off(sums.steps.means(c)[:, column], sums.num_steps, target) for c in range(num_chains)}
    off = {chain: says for chain, says in found.items() if says is not None}
    if off:
        more = f" and {len(off) - _NAMED} more" if len(off) > _NAMED else ""
        which = f"chain{'s' * (len(off) > 1)} {', '.join(map(str, list(off)[:_NAMED]))}{more}: " if num_chains > 1 else ""
        warn(f"{which}{next(iter(off.values()))}.")
    return bool(off)


def _no_influence(run: _Run) -> Finding | None:
    if not run.influence < 0.05:  # also NaN: a test that never evaluates the loss
        return None
    hint = "the steps may be far too short (acceptance is nearly 1), or check " if run.mean["rate"] > 0.97 else "check "
    return Finding(
        "no influence",
        "the loss has no influence: lambda times its change over a proposal has a standard deviation of "
        f"{run.influence:.2g}; {hint}num_data, inverse_temperature, and whether the loss is a mean",
    )


def _too_hot(run: _Run) -> Finding | None:
    if run.beta < 0.9:
        why = f"the log ratio, estimated on minibatches, has noise s = {run.noise:.3g}"
        says = f"too hot, by a factor of about {1 / run.beta:.3g} in temperature: {why}. "
        return Finding("too hot", f"{says}Use larger batches, FullData(), or a smaller step")
    if math.isnan(run.beta) and run.is_known and run.context.is_metropolis:
        says = "the noise of the minibatch test is unknown, and the chain is likely too hot: return per-example losses "
        return Finding("unknown noise", f'{says}(reduction="none") to measure it')
    return None


def _biased_spread(run: _Run) -> Finding | None:
    """What burn-in found from two step sizes (`samplers.side_by_side`)."""
    if run.context.bias is None or not all(map(math.isfinite, run.context.bias)):
        return None
    bias, error = run.context.bias
    numbers = f"{bias:+.1%} +- {error:.1%}, from two step sizes in burn-in"
    if bias - 2 * error > _TOO_WIDE:
        says = f"too hot, by a factor of about {(1 + bias) ** 2:.2g} in temperature: the draws spread too widely ({numbers}). "
        return Finding("too hot", f"{says}Use larger batches, a smaller step, or a longer burn-in")
    if bias + 2 * error < -_TOO_WIDE:
        return _cannot_tell(f"in burn-in the draws spread more at shorter steps ({numbers}): it was too short")
    most = max(abs(bias - 2 * error), abs(bias + 2 * error))
    return Finding("approximate", f"approximate: within {most:.1%} of the posterior's spread ({numbers})")


def _not_at_rest(run: _Run) -> Finding | None:
    """acceptance = 2 P(Y > 0), in both halves of the run."""
    difference = run.column["rate"] - 2 * run.column["rise"]
    if not (run.is_known and run.noise == 0 and run.context.is_metropolis) or len(difference) < 16:
        return None
    gap, (first, second) = _mean(difference), _halves(difference)
    if abs(gap.value) < max(0.01, 4 * gap.error):
        return None
    is_lasting = all(abs(half.value) > 2.5 * half.error for half in (first, second))
    is_steady = abs(first.value - second.value) < 4 * math.hypot(first.error, second.error)
    numbers = f"acceptance {run.mean['rate']:.3f} is not 2 P(Y > 0) = {2 * run.mean['rise']:.3f}"
    if is_lasting and is_steady and not run.context.is_exact:
        return Finding("biased", f"{numbers}: the chain samples a distribution other than its target")
    return Finding("not at rest", f"{numbers}: the chain is not in equilibrium, or its closure is not a fixed function")


def _convergence(run: _Run) -> Finding | None:
    """Whether there is enough to judge the temperature by; then the temperature."""
    knows, steps = run.context.knows_potential, run.sums.num_steps
    if not bool(run.column["potential"].isfinite().all()):
        return Finding("cannot tell", "cannot tell: U was not finite in part of the run")
    if knows and not run.draws >= _ENOUGH_DRAWS:
        few = f"about {run.draws:.0f} of at least {_ENOUGH_DRAWS} effective draws of U"
        return _cannot_tell(f"{few}; {run.trend}" if run.is_moving else few)
    if run.is_moving:
        return _cannot_tell(run.trend)
    if run.context.is_exact and abs(run.runaway) > 3:
        return _not_mixed(run.runaway)
    if not knows and not (run.temperature.is_settled if run.kept else steps >= 5 * _ENOUGH_STEPS):
        return _cannot_tell(f"U was only estimated, and {steps} steps are too few to judge by")
    return _temperature(run)


def _temperature(run: _Run) -> Finding | None:
    """Off by a tenth and by 5 standard errors (6 for a layer), in both halves of the run and in the same direction.

    theta . grad U is the slowest of the series. An exact chain that fails here has not mixed yet.
    """

    def is_off(name: str, t: _Mean) -> bool:
        if not t.is_settled or not abs(t.value - 1) > max((6 if name else 5) * t.error, 0.1):
            return False
        return all(abs(h.value - 1) > 3 * h.error and (h.value > 1) == (t.value > 1) for h in _halves(run.series[name]))

    off = {name: t for name, t in run.temperatures.items() if is_off(name, t)}
    if "" in off:
        off = {"": run.temperature}
    if not off:
        return None
    words = ", ".join(f"{name} {t.value:.2f} +- {t.error:.2f}".strip() for name, t in off.items())
    if run.context.is_exact:
        return _not_mixed(words)
    if "" not in off:
        return Finding("temperature", f"layers at a temperature other than the target's: {words}")
    word = "colder" if run.temperature.value < 1 else "hotter"
    return Finding("temperature", f"{word} than the target: configurational temperature {words}")


def _undefined(run: _Run) -> Finding | None:
    """Proposals at which U is not finite, under a prior without an edge: a part of the posterior may be missing."""
    if run.context.has_edge or run.lost < _FEW_UNDEFINED:
        return None
    says = f"U is not finite at {run.lost:.2g} of the proposals, which were rejected: is the loss NaN or infinite in places?"
    return Finding("undefined", says)


def _untested(run: _Run) -> Finding | None:
    if run.context.is_exact:
        return None
    if run.is_known and run.noise == 0:
        return Finding("approximate", _APPROXIMATE)
    known, t = f"acceptance {run.mean['rate']:.2f}", run.temperature
    if math.isfinite(t.error):
        known += f", configurational temperature {t.value:.2f} +- {t.error:.2f}, 1 in equilibrium"
    why = "the kernel is approximate, and its bias cannot be tested where the ratio is only estimated"
    return Finding("untested", f"untested: {why} ({known})")
