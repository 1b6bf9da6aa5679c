"""What a run is worth, in one table: R-hat and effective draws of what one asks a network for, and the verdict in words.

A network has no row for each weight: weights mean nothing one by one, and chains may agree in all they predict while their
weights are those of another permutation of the neurons. So there is a row for the loss, one for U, one for function values at
inputs of the user's choice, and one for each layer, of its length and of its weights along a fixed random direction. Function
values decide; a layer is never judged.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from adammcmc.posterior.store.encoding import strict_json
from adammcmc.samplers.diagnostics import ess_bulk, ess_tail, mcse_mean, rhat, rhat_by_chance
from adammcmc.samplers.health import GRAVITY, Finding, Grade, Health, grade_of
from adammcmc.target.data import derive_seed

__all__ = ["ONE_START", "Row", "Series", "Summary", "layers_of", "probe_layers", "summarize"]

_MIXED, _NEARLY_MIXED, _APART, _FAR_APART = 1.01, 1.05, 1.1, 1.5
_FEW_DRAWS = 20.0  # of a chain: with fewer, R-hat of chains that agree may be anything
_ENOUGH_DRAWS = 100.0  # effective: a mean is then known to a tenth of its spread
_LEAST_DRAWS = 4
_FEW_EXAMPLES = 5.0
_MOST_LAYERS = 12  # that are printed


ONE_START = (
    "all chains started at the same weights: agreement of chains from one start cannot reveal another mode; start them from "
    "different trained networks (`initial=` of `sample`)"
)
"""What makes agreement worth little."""


@dataclass(frozen=True)
class Series:
    """Numbers along the chains that belong together."""

    name: str
    kind: Literal["loss", "outputs", "layer"]
    values: Tensor
    """(chains, draws) or (chains, draws, numbers)"""
    is_judged: bool = True
    """Whether it has a say in the verdict; if not, `why` says why."""
    why: str = ""


@dataclass(frozen=True)
class Row:
    """A line of the table: the worst of the numbers behind it."""

    name: str
    kind: str
    count: int
    """How many numbers there are behind it."""
    mean: float
    """Over all draws, where there is one number; else NaN."""
    mean_error: float
    """Monte Carlo standard error of `mean`."""
    spread: float
    """Standard deviation over all draws, where there is one number; else NaN."""
    rhat: float
    """The largest; NaN for one chain, or where nothing moves."""
    rhat_limit: float
    """Above which chains have not mixed: 1.01, or what chance explains (`rhat_by_chance`), but never more than 1.05."""
    ess_bulk: float
    """The smallest."""
    ess_tail: float
    is_judged: bool
    verdict: str
    """In a few words."""


@dataclass(frozen=True)
class Summary:
    """What a run is worth. `print` it for the table."""

    target: str
    num_chains: int
    """Whose draws are compared."""
    num_draws: int
    """Of each."""
    rows: tuple[Row, ...]
    health: tuple[Health, ...]
    """What each chain says about itself."""
    findings: tuple[Finding, ...]
    """All that is wrong or cannot be told, the gravest first: of the chains' own, and of what they say together."""
    seconds: float
    """That the draws took, burn-in not counted (of a scan: one chain's share); NaN where nobody knows."""
    num_gradients: float
    """Of batches, in all chains, burn-in not counted (of a scan: one chain's share); NaN where nobody knows."""
    notes: tuple[str, ...] = ()
    """What was left out, and what would tell more."""

    @property
    def ess(self) -> float:
        """The smallest bulk ESS of what is judged; NaN where nothing is."""
        judged = [row.ess_bulk for row in self.rows if row.is_judged and not math.isnan(row.ess_bulk)]
        return min(judged, default=math.nan)

    @property
    def ess_per_second(self) -> float:
        return self.ess / self.seconds if self.seconds > 0 else math.nan

    @property
    def ess_per_gradient(self) -> float:
        return self.ess / self.num_gradients if self.num_gradients > 0 else math.nan

    @property
    def rhat(self) -> float:
        """The largest of what is judged; NaN where nothing is."""
        return max((row.rhat for row in self.rows if row.is_judged and not math.isnan(row.rhat)), default=math.nan)

    @property
    def grade(self) -> Grade:
        """In a word: "sick" if something is wrong, "undecided" if something cannot be told, else "sound"."""
        return grade_of(self.findings)

    @property
    def is_healthy(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """In words: the gravest first."""
        if not self.findings:
            draws = f"{self.num_chains * self.num_draws:,} draws are worth {self.ess:,.0f} independent ones"
            judged = ", ".join(row.name for row in self.rows if row.is_judged)
            return f"no complaint: {self.num_chains} chains agree in {judged} (R-hat {self.rhat:.3f}), their {draws}"
        return "; ".join(finding.says for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON takes it: a number that does not exist is None."""
        own = {"grade": self.grade, "verdict": self.verdict, "rhat": self.rhat, "ess": self.ess}
        rates = {"ess_per_second": self.ess_per_second, "ess_per_gradient": self.ess_per_gradient}
        parts: dict[str, Any] = {
            "target": self.target,
            "num_chains": self.num_chains,
            "num_draws": self.num_draws,
            "seconds": self.seconds,
            "num_gradients": self.num_gradients,
            "findings": [finding._asdict() for finding in self.findings],
            "rows": [asdict(row) for row in self.rows],
            "health": [{**asdict(h), "findings": [f._asdict() for f in h.findings]} for h in self.health],
            "notes": list(self.notes),
        }
        plain: dict[str, Any] = strict_json(own | rates | parts)
        return plain

    def __str__(self) -> str:
        chains = f"{self.num_chains} chain{'s' * (self.num_chains != 1)}"
        lines = [f"{self.grade}: {self.verdict}.", f"target: {self.target}"]
        costs = [f"{chains}, {self.num_draws:,} draws{' each' * (self.num_chains != 1)}"]
        if not math.isnan(self.ess):
            costs.append(f"worth {self.ess:,.0f} independent ones")
        if not math.isnan(self.ess_per_second):
            costs.append(f"{self.ess_per_second:.3g} a second")
        if not math.isnan(self.ess_per_gradient):
            costs.append(f"{1000 * self.ess_per_gradient:.3g} for 1,000 gradients")
        lines += [", ".join(costs), *_table(self.rows), *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines)


def _table(rows: Sequence[Row]) -> list[str]:
    layers = sorted((row for row in rows if row.kind == "layer"), key=lambda row: row.ess_bulk)
    hidden = {row.name for row in layers[_MOST_LAYERS:]}
    rows = [row for row in rows if row.name not in hidden]
    head = ("", "mean", "R-hat", "bulk ESS", "tail ESS", "")
    cells = [head]
    for row in rows:
        name = row.name if row.count == 1 else f"{row.name} ({row.count}, the worst)"
        mean = "" if math.isnan(row.mean) else f"{row.mean:.4g} +- {row.mean_error:.1g}"
        numbers = (_number(row.rhat, ".3f"), _number(row.ess_bulk, ",.0f"), _number(row.ess_tail, ",.0f"))
        cells.append((name, mean, *numbers, row.verdict))
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]

    def aligned(line: Sequence[str]) -> str:
        parts = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
        return "  ".join([line[0].ljust(widths[0]), *parts[1:-1], line[-1]]).rstrip()

    more = [f"and {len(hidden)} layers with more effective draws"] if hidden else []
    return [*(aligned(line) for line in (cells if rows else [])), *more]


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


# --- the verdict ----------------------------------------------------------------------------------------------------------


def summarize(
    target: str,
    chains: Sequence[int],
    series: Sequence[Series],
    health: Mapping[int, Health],
    *,
    temperatures: Mapping[int, float],
    num_data: int,
    seconds: float = math.nan,
    num_gradients: float = math.nan,
    differ_in: Sequence[str] = (),
    one_start: bool = False,
    notes: Sequence[str] = (),
) -> Summary:
    """Put rows and findings together.

    Args:
        target: what was sampled, in one line.
        chains: numbers of the chains in `series`.
        series: what is compared.
        health: of each chain.
        temperatures: inverse ones, of each chain, as far as they are known.
        num_data: of the training data.
        seconds: that the draws took.
        num_gradients: that they took.
        differ_in: settings in which the chains of a scan differ: then each is judged alone.
        one_start: whether all chains started at the same weights.
        notes: what else to say.
    """
    num_draws = max((s.values.shape[1] for s in series), default=0)  # of what was kept there may be fewer
    rows = tuple(_row(s, alone=bool(differ_in)) for s in series)
    findings = [*_of_chains(health), *_of_temperatures(temperatures, num_data)]
    findings += _of_series(chains, num_draws, series, rows, differ_in)
    if one_start and len(chains) > 1 and not differ_in:
        findings.append(Finding("one start", ONE_START))
    # a stuck chain says so itself, and its draws need not say it again
    once = [f for i, f in enumerate(findings) if f.kind != "stuck" or all(g.kind != "stuck" for g in findings[:i])]
    ordered = sorted(once, key=lambda finding: GRAVITY.get(finding.kind, len(GRAVITY)))
    own = tuple(health.values())
    return Summary(target, len(chains), num_draws, rows, own, tuple(ordered), seconds, num_gradients, tuple(notes))


def _row(series: Series, *, alone: bool) -> Row:
    values = series.values.double()
    values = values.reshape(*values.shape[:2], -1)
    count = values.shape[2]
    single = [values[i : i + 1] for i in range(len(values))]
    parts = single if alone else [values]

    def of_parts(function: Callable[[Tensor], Tensor]) -> Tensor:
        """(parts, numbers). NaN for a number that never changes: of a saturated probability there is nothing to say."""
        return torch.stack([torch.where((part == part[0, 0]).all(0).all(0), torch.nan, function(part)) for part in parts])

    ratios, bulk, tail = of_parts(rhat), of_parts(ess_bulk), of_parts(ess_tail)
    # draws of each chain by itself: what chains disagree in must not excuse their disagreement
    own_ess = torch.stack([torch.minimum(ess_bulk(chain), ess_tail(chain)) for chain in single])
    chance = rhat_by_chance(own_ess.sum(0), len(values), count, num_draws=values.shape[1])
    limits = chance.clamp(_MIXED, _NEARLY_MIXED)
    worst = int(ratios.nan_to_num(nan=0.0).amax(0).argmax())
    ess = -_largest(-bulk), -_largest(-tail)
    verdict = series.why
    if series.is_judged:
        # a grave word needs enough draws of each chain by itself; far apart, that many draws at all
        is_sure = (own_ess.amin(0) >= _FEW_DRAWS) | ((ratios > _FAR_APART) & (values.shape[1] >= _FEW_DRAWS))
        is_apart = bool((is_sure & (ratios > chance.clamp_min(_APART))).any())
        verdict = _verdict(values, is_apart, not bool((ratios > limits).any()), min(ess))
    return Row(
        name=series.name,
        kind=series.kind,
        count=count,
        mean=float(values.mean()) if count == 1 else math.nan,
        mean_error=float(mcse_mean(values)) if count == 1 else math.nan,
        spread=float(values.std(correction=0)) if count == 1 else math.nan,
        rhat=_largest(ratios),
        rhat_limit=float(limits[worst]),
        ess_bulk=ess[0],
        ess_tail=ess[1],
        is_judged=series.is_judged,
        verdict=verdict,
    )


def _verdict(values: Tensor, is_apart: bool, is_mixed: bool, ess: float) -> str:
    chains, draws, _ = values.shape
    if not bool(values.isfinite().all()):
        return "not finite"
    if draws < _LEAST_DRAWS:
        return "too few draws"
    if bool((values == values[:, :1]).all()):
        return "does not move"
    if is_apart:
        return "chains disagree"
    if not is_mixed:
        return "not mixed"
    if not ess >= _ENOUGH_DRAWS:
        return "few draws"
    return "mixed" if chains > 1 else "one chain"


def _of_chains(health: Mapping[int, Health]) -> list[Finding]:
    """What the chains say about themselves, those that say the same together."""
    by_kind: dict[str, list[tuple[int, str]]] = {}
    for chain, one in health.items():
        for finding in one.findings:
            by_kind.setdefault(finding.kind, []).append((chain, finding.says))
    found = []
    for kind, said in by_kind.items():
        prefix = "" if len(health) == 1 else f"{_numbered([chain for chain, _ in said], len(health))}: "
        found.append(Finding(kind, prefix + said[0][1]))
    return found


def _of_temperatures(temperatures: Mapping[int, float], num_data: int) -> list[Finding]:
    low = {chain: value for chain, value in temperatures.items() if value < 1 and value * num_data < _FEW_EXAMPLES}
    if not low:
        return []
    value = min(low.values())
    prefix = "" if len(temperatures) == 1 else f"{_numbered(list(low), len(temperatures))}: "
    says = (
        f"{prefix}the data have next to no say: with lambda = {value:.3g} all {num_data:,} examples together weigh as much as "
        f"{value * num_data:.2g} would in Bayes' rule (lambda multiplies the sum over the data; 1 is Bayes)"
    )
    return [Finding("no influence", says)]


def _of_series(
    chains: Sequence[int], num_draws: int, series: Sequence[Series], rows: Sequence[Row], differ_in: Sequence[str]
) -> list[Finding]:
    found: list[Finding] = []
    if num_draws < _LEAST_DRAWS:
        made = f"{num_draws} draw{'s' * (num_draws != 1)}"
        return [Finding("cannot tell", f"cannot tell yet: {made} of each chain, and at least {_LEAST_DRAWS} are needed")]
    still = [c for i, c in enumerate(chains) if all(_is_still(s.values[i]) for s in series)]
    if still and series:
        found.append(Finding("stuck", f"stuck: all draws of {_numbered(still, len(chains))} are the same"))
    judged = [(s, row) for s, row in zip(series, rows, strict=True) if row.is_judged]
    if broken := [row.name for _, row in judged if row.verdict == "not finite"]:
        found.append(Finding("not finite", f"numbers that are not finite in {', '.join(broken)}"))
    moving = [(s, row) for s, row in judged if not math.isnan(row.ess_bulk)]
    if not moving and not still:
        says = "cannot tell whether they converged: U was only estimated, on batches; give `inputs` to compare predictions"
        found.append(Finding("cannot tell", says))
    if short := [row.name for _, row in judged if row.verdict == "too few draws"]:
        found.append(Finding("cannot tell", f"cannot tell yet of {', '.join(short)}: too few draws were kept"))
    if len(chains) == 1:
        found.append(Finding("one chain", "one chain only: whether another one would agree cannot be told"))
    elif differ_in:
        says = f"chains differ in {', '.join(differ_in)}: each was judged alone, and agreement between them was not tested"
        found.append(Finding("one chain", says))
    elif apart := [(s, row) for s, row in moving if row.verdict in ("chains disagree", "not mixed")]:
        found.append(_disagreement(chains, *max(apart, key=lambda pair: (pair[1].verdict == "chains disagree", pair[1].rhat))))
    if few := [row for _, row in moving if not min(row.ess_bulk, row.ess_tail) >= _ENOUGH_DRAWS]:
        row = min(few, key=lambda row: min(row.ess_bulk, row.ess_tail))
        least = min(row.ess_bulk, row.ess_tail)
        says = f"few draws: those of {row.name} are worth {least:.0f} independent ones, of at least {_ENOUGH_DRAWS:.0f}; go on"
        found.append(Finding("few draws", says))
    return found


def _disagreement(chains: Sequence[int], series: Series, row: Row) -> Finding:
    if row.verdict == "not mixed":
        says = f"not mixed yet: R-hat of {row.name} is {row.rhat:.3f}, above {row.rhat_limit:.3g}; go on"
        return Finding("not mixed", says)
    odd = ""
    values = series.values.reshape(*series.values.shape[:2], -1)
    if len(chains) > 2:
        without = {c: _largest(rhat(values[[j for j in range(len(chains)) if j != i]])) for i, c in enumerate(chains)}
        chain, rest = min(without.items(), key=lambda item: item[1])
        odd = f"; chain {chain} stands apart from the others" if rest - 1 < (row.rhat - 1) / 3 else ""
    says = f"chains disagree: R-hat of {row.name} is {row.rhat:.2f}{odd}. They have not mixed, and may never mix"
    return Finding("chains disagree", says)


def _largest(values: Tensor) -> float:
    """NaN where there is none."""
    known = values[~values.isnan()]
    return float(known.max()) if len(known) else math.nan


def _is_still(values: Tensor) -> bool:
    return len(values) > 1 and bool((values == values[:1]).all())


def _numbered(chains: Sequence[int], number: int) -> str:
    if len(chains) == number and number > 1:
        return "all chains"
    return f"chain{'s' * (len(chains) > 1)} {', '.join(map(str, chains))}"


# --- layers ---------------------------------------------------------------------------------------------------------------


def layers_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of parameters by layer: those of one module.

    Example:
        >>> layers_of(["0.weight", "0.bias", "head.2.weight", "scale"])
        {'0': ['0.weight', '0.bias'], 'head.2': ['head.2.weight'], 'scale': ['scale']}
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return layers


def probe_layers(draws: Iterable[Mapping[str, Tensor]], names: Sequence[str]) -> Tensor:
    """Length and projection of each layer, (draws, layers, 2): of the weights of a layer, |w| and w . r.

    r is standard normal and depends on the name alone, so that it is the same for all chains and runs.
    """
    layers = layers_of(names)
    directions: dict[str, Tensor] = {}
    found = []
    for draw in draws:
        for name in names:
            if name not in directions:
                generator = torch.Generator().manual_seed(derive_seed(zlib.crc32(name.encode())))
                directions[name] = torch.randn(draw[name].shape, generator=generator)
        squares = {name: float(draw[name].double().square().sum()) for name in names}
        products = {name: float((draw[name].double() * directions[name]).sum()) for name in names}
        found.append([[math.sqrt(sum(squares[n] for n in own)), sum(products[n] for n in own)] for own in layers.values()])
    return torch.tensor(found, dtype=torch.float64).reshape(len(found), len(layers), 2)
