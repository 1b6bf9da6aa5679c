r"""The verdict on draws from a density. *No complaint* means that every check was possible and passed.

- **The kernel** must be exact. The bias of an approximate one is not measured here.
- **Chains** must move, and several must agree: rank-normalised split R-hat of each coordinate and of U at most 1.01.
  Above 1.1, and above what chance explains (`diagnostics.rhat_by_chance`), they disagree.
- **Effective draws**, bulk and tail, of each coordinate and of U: at least 400 over all chains. With fewer, R-hat and the
  standard errors themselves are unreliable (Vehtari et al. 2021).
- **Starting points** must lie apart: their spread over the chains, in units of that of the draws, at least .2 in the
  median over the coordinates, and, for 4 chains or more, .02 in each. Chains from one place agree in missing a mode.
- **The density** must be the same function at the end of the run as at its start, not be NaN at proposals, and be known to
  a tenth of a nat.
- **Acceptance = 2 P(Y > 0) + P(Y = 0)** in equilibrium, within 4.5 standard errors and .01.
- **Acceptance** is near what burn-in tuned it to (`samplers.aim`).
- **No region where moves fail** (a funnel). The draws are sorted along each coordinate and cut into 20 bins. Acceptance
  a is put on the scale of the energy error, kappa with a = 2 Phi(-kappa), which grows with the step measured by the local
  width of the density. A bin whose acceptance is below .7 must not have 6 times the kappa of all draws, or 4 times if the
  energy hardly moves from step to step as well (Betancourt 2016):

      E-BFMI = mean (U_{t+1} - U_t)^2 / mean (U_t - mean U)^2 < .2

  A step size that fits most of the density is too long in such a region: chains seldom enter it, and then stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adammcmc.kernels.kernel import Info
from adammcmc.samplers.aim import ENOUGH_STEPS, off_target
from adammcmc.samplers.diagnostics import ess_bulk, ess_tail, mcse_mean, rhat, rhat_by_chance
from adammcmc.samplers.draws_table import Coordinate, coordinates, series, summarize_draws
from adammcmc.samplers.health import GRAVITY, Finding, Grade, grade_of
from adammcmc.samplers.second_look import NOTHING, SecondLook

__all__ = ["DensityVerdict", "Facts", "acceptance_off_target", "judge"]

_LEAST_DRAWS = 4
_MIXED, _APART, _FAR_APART = 1.01, 1.1, 1.5
_FEW_DRAWS = 20.0  # effective ones of a chain, below which R-hat varies widely even if chains agree
_ENOUGH_DRAWS = 400.0  # effective ones
_STUCK, _ENOUGH_STEPS = 0.01, 50
_NAMED = 10  # chains in a message
_BINS, _LEAST_IN_BIN, _LEAST_POINTS, _MOST_POINTS = 20, 50, 5, 200_000
_STIFF, _STIFF_IF_SLOW, _SLOW_ENERGY, _LOW_RATE = 6.0, 4.0, 0.2, 0.7
_LARGE_ERROR = 10.0  # nats
_CLOSE, _CLOSE_IN_ONE, _ENOUGH_STARTS = 0.2, 0.02, 4  # spread of the starting points over that of the draws
_FEW_UNDEFINED = 0.001  # of the proposals: an overlong step may overflow


@dataclass(frozen=True)
class Facts:
    """What the checks need beside the draws."""

    kernel: Any
    info: Info
    fixed_data: bool
    jump: float = math.nan
    start: dict[str, Tensor] = field(default_factory=dict)
    second_look: SecondLook = NOTHING
    target_acceptance: float | None = None
    frozen: tuple[int, ...] = ()
    is_constrained: bool = False

    @property
    def knows_potential(self) -> bool:
        """Whether U was evaluated on all data."""
        return self.fixed_data or bool(self.kernel.acceptance.uses_all_data)

    @property
    def has_test(self) -> bool:
        """Whether proposals can be rejected for their energy."""
        return bool(self.kernel.acceptance.needs_noise)


class _Region(NamedTuple):
    """Where along a coordinate acceptance is lowest."""

    name: str
    rate: float
    bin: int
    low: float
    high: float


@dataclass(frozen=True)
class DensityVerdict:
    """The checks of draws from a density. `print` it for the verdict in words."""

    findings: tuple[Finding, ...]
    """Everything that is wrong or undecided, the gravest first."""
    num_chains: int
    num_draws: int
    """Per chain."""
    rhat: float
    """The largest, of all coordinates and U; NaN if unknown."""
    ess_bulk: float
    """The smallest, of all coordinates and U."""
    ess_tail: float
    acceptance: float
    """Mean over all draws."""
    worst_chain: int
    """The chain with the lowest acceptance."""
    worst_acceptance: float
    rejected_not_finite: float
    """Fraction of proposals at which the density was zero or undefined."""
    energy: float
    """E-BFMI, see above; NaN where U is not known."""
    rows: tuple[Coordinate, ...] = field(repr=False, default=())
    """Of all coordinates, as in `DensitySummary`."""

    @property
    def is_healthy(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    @property
    def grade(self) -> Grade:
        """In a word: "sick" if something is wrong, "undecided" if something is open, else "sound"."""
        return grade_of(self.findings)

    def __str__(self) -> str:
        if self.findings:
            return "; ".join(finding.says for finding in self.findings)
        return (
            f"no complaint: {self.num_chains} chains agree (R-hat at most {self.rhat:.3f}), at least {self.ess_bulk:,.0f} "
            f"effective draws (bulk) and {self.ess_tail:,.0f} (tail), and no region where moves fail"
        )


def judge(leaves: dict[str, Tensor], facts: Facts) -> DensityVerdict:
    """All checks of draws (chains, draws, ...), by name of their leaf."""
    info, rates = facts.info, facts.info.acceptance_rate.double().cpu()
    num_chains, num_draws = rates.shape
    judged = dict(leaves)
    if facts.knows_potential:
        judged["U"] = info.potential
    rows = summarize_draws(judged).rows
    moving = [row for row in rows if not math.isnan(row.ess_bulk)]
    energy = _energy(facts)
    of_chains = rates.mean(1)
    reasons = facts.kernel.approximation(fixed_data=facts.fixed_data)
    found = [Finding("approximate", _approximate(reasons)) if reasons else None]
    is_still = _still_chains(leaves, rates, facts)
    found += [_frozen(facts), _stuck(is_still, rates), _not_fixed(facts), _undefined(facts)]
    if len(rates) > 1:
        found.append(_one_start(leaves, facts.start))
    if facts.second_look.coarse:
        found.append(Finding("untested", f"untested: {facts.second_look.coarse}; moves are decided by differences of U"))
    if num_draws < _LEAST_DRAWS:
        found.append(Finding("cannot tell", f"cannot tell: {num_draws} draws per chain, of at least {_LEAST_DRAWS}"))
    else:
        found += [_still(rows, facts), *_agreement(judged, moving, facts), _few(moving), _not_at_rest(facts)]
        moved = {name: x[~is_still.to(x.device)] for name, x in leaves.items()}  # copies of one point show no region
        found += [_region(moved, rates[~is_still], facts, energy), _off_target(rates[~is_still], facts)]
    if not facts.knows_potential:
        found.append(Finding("untested", "untested: U was only estimated on batches, and its mixing was not checked"))
    ordered = sorted((f for f in found if f is not None), key=lambda finding: GRAVITY.get(finding.kind, len(GRAVITY)))
    return DensityVerdict(
        findings=tuple(ordered),
        num_chains=num_chains,
        num_draws=num_draws,
        rhat=max((row.rhat for row in moving if not math.isnan(row.rhat)), default=math.nan),
        ess_bulk=min((row.ess_bulk for row in moving), default=math.nan),
        ess_tail=min((row.ess_tail for row in moving), default=math.nan),
        acceptance=float(rates.mean()),
        worst_chain=int(of_chains.argmin()),
        worst_acceptance=float(of_chains.min()),
        rejected_not_finite=1 - float(info.is_finite.double().mean()),
        energy=energy,
        rows=rows,
    )


# --- the checks -----------------------------------------------------------------------------------------------------


def _approximate(reasons: Sequence[str]) -> str:
    return f"approximate: {'; '.join(reasons)}: the draws are from another density, and how far off it is was not measured"


def _numbered(chains: Sequence[int], number: int) -> str:
    if len(chains) == number and number > 1:
        return f"all {number} chains"
    more = f" and {len(chains) - _NAMED} more" if len(chains) > _NAMED else ""
    return f"chain{'s' * (len(chains) > 1)} {', '.join(map(str, chains[:_NAMED]))}{more}"


def _frozen(facts: Facts) -> Finding | None:
    if not facts.frozen:
        return None
    where = _numbered(facts.frozen, len(facts.info.is_finite))
    return Finding("not finite", f"{where} met a NaN or infinite density or gradient and stopped there")


def _still_chains(leaves: dict[str, Tensor], rates: Tensor, facts: Facts) -> Tensor:
    """The chains whose draws are all the same, or that accept far less than the others, (chains,)."""
    stays = [(x == x[:, :1]).reshape(len(x), -1).all(1).cpu() for x in leaves.values()]
    is_still, means = torch.stack(stays).all(0) & (rates.shape[1] >= _LEAST_DRAWS), rates.mean(1)
    if facts.has_test and rates.shape[1] >= _ENOUGH_STEPS:
        is_still |= means < max(_STUCK, 0.1 * float(means.median()))
    return is_still


def _stuck(is_still: Tensor, rates: Tensor) -> Finding | None:
    chains, means = is_still.nonzero().flatten().tolist(), rates.mean(1)
    if not chains:
        return None
    says = f"frozen: {_numbered(chains, len(rates))} hardly move (acceptance {float(means[chains].mean()):.2g}; "
    says += f"median of all chains {float(means.median()):.2g}): their draws are copies of a few points. "
    return Finding("stuck", says + "Shorten the step, or start these chains nearer to the bulk")


def _still(rows: Sequence[Coordinate], facts: Facts) -> Finding | None:
    still = [row.name for row in rows if math.isnan(row.ess_bulk) and row.name != "U"]
    if not still or facts.is_constrained:  # a constraint fixes some numbers, such as zeros of a Cholesky factor
        return None
    return Finding("stuck", f"{len(still)} of {len(rows)} coordinates never change, such as {still[0]}")


def _few(moving: Sequence[Coordinate]) -> Finding | None:
    few = [row for row in moving if not min(row.ess_bulk, row.ess_tail) >= _ENOUGH_DRAWS]
    if not few:
        return None
    row = min(few, key=lambda row: min(row.ess_bulk, row.ess_tail))
    kind = "bulk" if row.ess_bulk <= row.ess_tail else "tail"
    least = f"{min(row.ess_bulk, row.ess_tail):,.0f} of at least {_ENOUGH_DRAWS:.0f} effective draws ({kind}) of {row.name}"
    others = f", and too few of {len(few) - 1} more" if len(few) > 1 else ""
    return Finding("few draws", f"few draws: {least}{others}; run longer")


def _not_fixed(facts: Facts) -> Finding | None:
    """Whether the density has become another one during the run."""
    change = facts.second_look.change
    if change == 0:
        return None
    says = f"not fixed: log_density has changed during the run, by up to {change:.3g} where the chains started"
    return Finding(
        "not fixed", f"{says}. It must be a function of the parameters alone: no state, no schedule, no random numbers"
    )


def _undefined(facts: Facts) -> Finding | None:
    """Proposals where the density is NaN: either outside of its support, where -inf is meant, or a part that is missing."""
    is_undefined = facts.info.proposed_loss.isnan() & ~facts.info.is_finite.bool()
    fraction = float(is_undefined.double().mean())
    if not facts.has_test or fraction < _FEW_UNDEFINED:
        return None
    says = f"log_density is NaN at {fraction:.2g} of the proposals, which were rejected: what it should be there is unknown"
    return Finding("undefined", f"{says}. Return -inf outside of the support, and a number inside")


def _one_start(leaves: dict[str, Tensor], start: dict[str, Tensor]) -> Finding | None:
    """Whether the chains started closer together than the draws are wide: then their agreement proves little."""
    if not start:
        return None
    points = {name: x.detach()[:, None] for name, x in start.items()}
    if all(bool((x == x[:1]).all()) for x in points.values()):
        says = "all chains started at one point: their agreement cannot reveal another mode; spread the starting points"
        return Finding("one start", says)
    pairs = zip(series(points, 1000), series(leaves, 1000), strict=True)
    ratios = torch.cat([x[:, 0].std(0) / draws.flatten(0, 1).std(0) for x, draws in pairs])  # NaN where nothing moves
    middle, least = float(ratios.nanmedian()), int(ratios.nan_to_num(nan=math.inf).argmin())
    close = ""
    if middle < _CLOSE:
        close = f"the spread of their starting points is {middle:.2g} of that of the draws (median over the coordinates)"
    elif len(next(iter(start.values()))) >= _ENOUGH_STARTS and float(ratios[least]) < _CLOSE_IN_ONE:
        name = list(coordinates(leaves))[least]
        close = f"in {name}, the spread of their starting points is {float(ratios[least]):.1g} of that of the draws"
    if not close:
        return None
    says = f"the chains started close together: {close}. Their agreement cannot reveal another mode; spread the starting points"
    return Finding("one start", says)


def _agreement(judged: dict[str, Tensor], moving: Sequence[Coordinate], facts: Facts) -> list[Finding | None]:
    num_chains = len(facts.info.is_finite)
    if num_chains == 1:
        return [
            Finding("one chain", "one chain: whether another would agree is unknown; run at least 4, from different starts")
        ]
    known = [row for row in moving if not math.isnan(row.rhat)]
    worst = max(known, key=lambda row: row.rhat, default=None)
    if worst is None or not worst.rhat > _MIXED:
        return []
    values = _named(judged, worst.name)
    own = _own_draws(values)
    chance = float(rhat_by_chance(own.nansum(), num_chains, len(known), num_draws=values.shape[1]))
    is_sure = float(own.nan_to_num(nan=0.0).min()) >= _FEW_DRAWS
    is_sure |= worst.rhat > _FAR_APART and values.shape[1] >= _FEW_DRAWS
    above = sum(row.rhat > _MIXED for row in known)
    of = f"R-hat of {worst.name} is {worst.rhat:.3f}" + (f", and above {_MIXED} for {above - 1} more" if above > 1 else "")
    if is_sure and worst.rhat > max(_APART, chance):
        says = f"chains disagree: {of}{_odd(values, worst.rhat)}. They have not mixed, and may never mix"
        return [Finding("chains disagree", says)]
    by_chance = f" (chance alone explains up to {chance:.3f})" if worst.rhat <= chance else ""
    return [Finding("not mixed", f"not mixed yet: {of}; it should be at most {_MIXED}{by_chance}: run longer")]


def _own_draws(values: Tensor) -> Tensor:
    """Effective draws of each chain alone, of values (chains, draws), for what R-hat compares: levels, tails and spread."""
    alone = values.T[None]
    spread = (alone - alone.median()).abs()
    return torch.stack([ess_bulk(alone), ess_tail(alone), ess_bulk(spread)]).amin(0)


def _named(judged: dict[str, Tensor], name: str) -> Tensor:
    """The values of one coordinate, (chains, draws)."""
    place = list(coordinates(judged)).index(name)
    for chunk in series(judged):
        if place < chunk.shape[2]:
            return chunk[:, :, place]
        place -= chunk.shape[2]
    raise KeyError(name)


def _odd(values: Tensor, ratio: float) -> str:
    """The chain without which the others agree, if there is one."""
    if not 2 < len(values) <= 20:
        return ""
    without = [float(rhat(torch.cat([values[:i], values[i + 1 :]]))) for i in range(len(values))]
    chain = min(range(len(values)), key=without.__getitem__)
    return f"; chain {chain} differs from all others" if without[chain] - 1 < (ratio - 1) / 3 else ""


def _not_at_rest(facts: Facts) -> Finding | None:
    """acceptance = 2 P(Y > 0) + P(Y = 0), where Y is exact and the test is Metropolis."""
    info, test = facts.info, facts.kernel.acceptance
    if not (facts.knows_potential and facts.has_test and test.is_metropolis) or bool((info.log_ratio_noise != 0).any()):
        return None
    y = info.log_ratio.double()
    gain = 2 * (y > 0).double() + (y == 0).double()
    difference = info.acceptance_rate.double() - gain * info.is_finite
    mean, error = float(difference.mean()), float(mcse_mean(difference))
    if not abs(mean) > max(0.01, 4.5 * error):
        return None
    numbers = (
        f"acceptance {float(info.acceptance_rate.mean()):.3f} is not 2 P(Y > 0) = {float((gain * info.is_finite).mean()):.3f}"
    )
    if facts.kernel.approximation(fixed_data=facts.fixed_data):
        return Finding("biased", f"{numbers}: the chains sample a density other than the target")
    return Finding("not at rest", f"{numbers}: the chains are not in equilibrium; allow more burn-in")


def acceptance_off_target(rates: Tensor, target: float | None) -> str | None:
    """What is wrong with the acceptance of moving chains, (chains, draws), in words; see `samplers.aim`."""
    if target is None or rates.numel() < ENOUGH_STEPS or rates.shape[1] < _ENOUGH_STEPS:
        return None
    known = rates.double().cpu()
    known = known[known.mean(1) >= 0.1 * known.mean(1).median()]
    return off_target(float(known.mean()), float(mcse_mean(known)), target)


def _off_target(rates: Tensor, facts: Facts) -> Finding | None:
    says = acceptance_off_target(rates, facts.target_acceptance) if facts.has_test else None
    return None if says is None else Finding("adapted acceptance", says)


def _energy(facts: Facts) -> float:
    u = facts.info.potential.double()
    if not facts.knows_potential or u.shape[1] < _LEAST_DRAWS:
        return math.nan
    spread = float((u - u.mean(1, keepdim=True)).square().mean())
    return facts.jump / spread if spread > 0 else math.nan


def _stiffness(rate: float) -> float:
    """kappa with rate = 2 Phi(-kappa)."""
    return -float(torch.special.ndtri(torch.tensor(min(max(rate, 1e-12), 1 - 1e-6) / 2, dtype=torch.float64)))


def _region(leaves: dict[str, Tensor], rates: Tensor, facts: Facts, energy: float) -> Finding | None:
    """Whether moves fail in one region only."""
    if not facts.has_test:
        return None  # said already: approximate
    if rates.numel() < _BINS * _LEAST_IN_BIN:
        says = f"cannot tell whether moves fail in one region: {rates.numel():,} draws of at least {_BINS * _LEAST_IN_BIN:,}"
        return Finding("cannot tell", says)
    worst = _worst_region(leaves, rates)
    mean, bar = float(rates.mean()), _STIFF_IF_SLOW if energy < _SLOW_ENERGY else _STIFF
    if worst is None or worst.rate > _LOW_RATE or _stiffness(worst.rate) < bar * _stiffness(mean):
        return None
    place = f"between {worst.low:.3g} and {worst.high:.3g}"
    if worst.bin in (0, _BINS - 1):
        place = f"below {worst.high:.3g}" if worst.bin == 0 else f"above {worst.low:.3g}"
    large = float((facts.info.log_ratio.nan_to_num(nan=0.0) < -_LARGE_ERROR).double().mean())
    seen = [f"acceptance {worst.rate:.2f} where {worst.name} is {place}, {mean:.2f} overall"]
    seen += [f"E-BFMI {energy:.2g}"] if energy < _SLOW_ENERGY else []
    seen += [f"{large:.1%} of the proposals miss by more than {_LARGE_ERROR:.0f} nats"] if large >= 0.001 else []
    remedy = "Reparameterise (a hierarchical model: non-centred), or shorten the step"
    says = f"funnel: moves fail in one region ({'; '.join(seen)}), which is visited too seldom. {remedy}"
    return Finding("funnel", says)


def _worst_region(leaves: dict[str, Tensor], rates: Tensor) -> _Region | None:
    """The bin of any coordinate with the lowest acceptance; bins hold equal numbers of draws, and several points."""
    stride = -(-rates.numel() // _MOST_POINTS)
    kept = rates.flatten()[::stride]
    found: list[_Region] = []
    names = coordinates(leaves)
    for chunk in series(leaves):
        values, order = chunk.flatten(0, 1)[::stride].sort(0)
        sorted_rates = kept[order]
        for column in range(values.shape[1]):
            name = next(names)
            bins, own = (t[:, column].tensor_split(_BINS) for t in (values, sorted_rates))
            for i, (x, rate) in enumerate(zip(bins, own, strict=True)):
                level = float(rate.mean())
                is_lower = level < min((region.rate for region in found), default=math.inf)
                if is_lower and x[0] < x[-1] and int((x.diff() != 0).sum()) + 1 >= _LEAST_POINTS:
                    found = [_Region(name, level, i, float(x[0]), float(x[-1]))]
    return found[0] if found else None
