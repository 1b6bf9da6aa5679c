"""R-hat and effective draws of a run in one table, and the verdict in words.

The rows are the loss, U, function values at inputs of the user's choice, and each layer: its length, and its weights
along a fixed random direction. Single weights have no row: chains may agree in all predictions while their neurons are
permuted. Function values decide the verdict; layers are shown but never judged.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from adammcmc.posterior.columns import AGREEMENT
from adammcmc.posterior.store.encoding import strict_json
from adammcmc.samplers.diagnostics import ess_bulk, ess_tail, mcse_mean, rhat, rhat_by_chance
from adammcmc.samplers.health import GRAVITY, Finding, Grade, Health, grade_of
from adammcmc.target.data import derive_seed

__all__ = [
    "NEAR_STARTS",
    "ONE_START",
    "Row",
    "Series",
    "Summary",
    "layers_of",
    "least",
    "of_moving",
    "probe_layers",
    "summarize",
]

_MIXED, _NEARLY_MIXED, _APART, _FAR_APART = 1.01, 1.05, 1.1, 1.5
_FEW_DRAWS = 20.0  # per chain: with fewer, R-hat varies widely even for chains that agree
_ENOUGH_DRAWS = 100.0  # effective: a mean is then known to a tenth of the standard deviation
_LEAST_DRAWS = 4
_FEW_EXAMPLES = 5.0
_MOST_LAYERS = 12  # that are printed

ONE_START = (
    "all chains started at the same weights: agreement of chains from one start cannot reveal another mode; start them "
    "from different trained networks (`initial=TrainMembers()` of `sample`)"
)


NEAR_STARTS = (
    "the chains started close together (the spread of their weights was {:.2g} of that of the draws): their agreement cannot "
    "reveal another mode; start them from different trained networks (`initial=TrainMembers()` of `sample`)"
)


@dataclass(frozen=True)
class Series:
    """Related numbers along the chains."""

    name: str
    kind: Literal["loss", "outputs", "layer"]
    values: Tensor
    """(chains, draws) or (chains, draws, numbers)"""
    why_not: str = ""
    """Why it does not enter the verdict; empty: it does."""

    @property
    def is_judged(self) -> bool:
        return not self.why_not


@dataclass(frozen=True)
class Row:
    """A row of the table: the worst of its numbers."""

    name: str
    kind: str
    count: int
    """How many numbers it stands for."""
    mean: float
    """Over all draws; NaN for several numbers."""
    mean_error: float
    """Monte Carlo standard error of `mean`."""
    spread: float
    """Standard deviation over all draws; NaN for several numbers."""
    rhat: float
    """The largest; NaN for one chain, or if nothing moves."""
    rhat_limit: float
    """R-hat above which chains have not mixed: 1.01, or what chance explains (`rhat_by_chance`), but at most 1.05."""
    ess_bulk: float
    """The smallest."""
    ess_tail: float
    """The smallest."""
    is_judged: bool
    verdict: str
    """In a few words."""


@dataclass(frozen=True)
class Summary:
    """R-hat, effective draws and findings of a run. `print` shows the table."""

    target: str
    num_chains: int
    """Chains that are compared."""
    num_draws: int
    """Draws per chain."""
    rows: tuple[Row, ...]
    health: tuple[Health, ...]
    """The self-tests of each chain."""
    findings: tuple[Finding, ...]
    """Everything that is wrong or undecided, of single chains and of their comparison; the gravest first."""
    seconds: float
    """Wall time of the draws without burn-in (in a scan: per chain); NaN if unknown."""
    num_gradients: float
    """Batch gradients of all chains without burn-in (in a scan: per chain); NaN if unknown."""
    notes: tuple[str, ...] = ()
    """What was left out, and what would show more."""
    burn_in: str = ""
    """What burn-in did, in one line; empty where nothing was tuned."""

    @property
    def ess(self) -> float:
        """The smallest bulk ESS of the judged rows; NaN without any."""
        return min((row.ess_bulk for row in self.rows if row.is_judged and not math.isnan(row.ess_bulk)), default=math.nan)

    @property
    def ess_per_second(self) -> float:
        return self.ess / self.seconds if self.seconds > 0 else math.nan

    @property
    def ess_per_gradient(self) -> float:
        return self.ess / self.num_gradients if self.num_gradients > 0 else math.nan

    @property
    def rhat(self) -> float:
        """The largest R-hat of the judged rows; NaN without any."""
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
        """In words, the gravest finding first."""
        return "; ".join(finding.says for finding in self.findings) or f"no complaint: {self.agreement}"

    @property
    def agreement(self) -> str:
        """What the chains of a healthy run agree in."""
        draws = f"{self.ess:,.0f} effective of {self.num_chains * self.num_draws:,} draws"
        judged = ", ".join(row.name for row in self.rows if row.is_judged)
        return f"{self.num_chains} chains agree in {judged} (R-hat {self.rhat:.3f}), with {draws}"

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON; a number that does not exist is None."""
        names = ("grade", "verdict", "rhat", "ess", "ess_per_second", "ess_per_gradient", "target", "num_chains", "num_draws",
                 "seconds", "num_gradients", "notes", "burn_in")  # fmt: skip
        parts: dict[str, Any] = {name: getattr(self, name) for name in names}
        parts["findings"] = [finding._asdict() for finding in self.findings]
        parts["rows"] = [asdict(row) for row in self.rows]
        parts["health"] = [{**asdict(h), "findings": [f._asdict() for f in h.findings]} for h in self.health]
        plain: dict[str, Any] = strict_json(parts)
        return plain

    def __str__(self) -> str:
        costs = {
            f"{self.num_chains} chain{'s' * (self.num_chains != 1)}": 0.0,
            f"{self.num_draws:,} draws{' each' * (self.num_chains != 1)}": 0.0,
            f"{self.ess:,.0f} effective": self.ess,
            f"{self.ess_per_second:.3g} per second": self.ess_per_second,
            f"{1000 * self.ess_per_gradient:.3g} per 1,000 gradients": self.ess_per_gradient,
        }
        known = ", ".join(words for words, number in costs.items() if not math.isnan(number))
        lines = [f"{self.grade}: {self.verdict}.", f"target: {self.target}", known, *_table(self.rows)]
        lines[2:2] = [f"burn-in: {self.burn_in}"] if self.burn_in else []
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _table(rows: Sequence[Row]) -> list[str]:
    layers = sorted((row for row in rows if row.kind == "layer"), key=lambda row: row.ess_bulk)
    hidden = {row.name for row in layers[_MOST_LAYERS:]}
    cells = [list(AGREEMENT), *([cell(row) for cell in AGREEMENT.values()] for row in rows if row.name not in hidden)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def aligned(line: Sequence[str]) -> str:
        numbers = (text.rjust(width) for text, width in zip(line[1:-1], widths[1:-1], strict=True))
        return "  ".join([line[0].ljust(widths[0]), *numbers, line[-1]])

    more = [f"and {len(hidden)} layers with more effective draws"] if hidden else []
    return [*map(aligned, cells if rows else []), *more]


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
    one_start: str = "",
    burn_in: str = "",
    notes: Sequence[str] = (),
) -> Summary:
    """Rows and findings of the `chains` whose numbers are in `series`; see `Summary`.

    `temperatures` are inverse ones. With `differ_in`, the settings in which the chains of a scan differ, each chain is
    judged alone. `one_start`: what is wrong with the starts of the chains, if anything.
    """
    num_draws = max((s.values.shape[1] for s in series), default=0)  # some series may have fewer
    rows = tuple(_row(s, alone=bool(differ_in)) for s in series)
    findings = [*_of_chains(health), *_of_temperatures(temperatures, num_data)]
    findings += _of_series(chains, num_draws, series, rows, differ_in)
    if one_start and len(chains) > 1 and not differ_in:
        findings.append(Finding("one start", one_start))
    # a stuck chain is reported once, by its self-test or by its draws
    once = [f for i, f in enumerate(findings) if f.kind != "stuck" or all(g.kind != "stuck" for g in findings[:i])]
    ordered = sorted(once, key=lambda finding: GRAVITY.get(finding.kind, len(GRAVITY)))
    own = tuple(health.values())
    return Summary(target, len(chains), num_draws, rows, own, tuple(ordered), seconds, num_gradients, tuple(notes), burn_in)


def _row(series: Series, *, alone: bool) -> Row:
    values = series.values.double()
    values = values.reshape(*values.shape[:2], -1)
    count = values.shape[2]
    single = [values[i : i + 1] for i in range(len(values))]
    parts = single if alone else [values]
    # each (parts, numbers)
    ratios, bulk, tail = (torch.stack([of_moving(f, part) for part in parts]) for f in (rhat, ess_bulk, ess_tail))
    # effective draws of each chain by itself, which disagreement between chains does not reduce
    own_ess = torch.stack([torch.minimum(ess_bulk(chain), ess_tail(chain)) for chain in single])
    chance = rhat_by_chance(own_ess.sum(0), len(values), count, num_draws=values.shape[1])
    limits = chance.clamp(_MIXED, _NEARLY_MIXED)
    worst = int(ratios.nan_to_num(nan=0.0).amax(0).argmax())
    ess = least(bulk), least(tail)
    verdict = series.why_not
    if series.is_judged:
        # "chains disagree" needs enough effective draws of each chain; far apart, that many draws suffice
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
        rhat=-least(-ratios),
        rhat_limit=float(limits[worst]),
        ess_bulk=ess[0],
        ess_tail=ess[1],
        is_judged=series.is_judged,
        verdict=verdict,
    )


def _verdict(values: Tensor, is_apart: bool, is_mixed: bool, ess: float) -> str:
    verdicts = {
        "not finite": not bool(values.isfinite().all()),
        "too few draws": values.shape[1] < _LEAST_DRAWS,
        "does not move": bool((values == values[:, :1]).all()),
        "chains disagree": is_apart,
        "not mixed": not is_mixed,
        "few draws": not ess >= _ENOUGH_DRAWS,
        "one chain": len(values) == 1,
    }
    return next((words for words, is_so in verdicts.items() if is_so), "mixed")


def _of_chains(health: Mapping[int, Health]) -> list[Finding]:
    """The findings of single chains, equal kinds together."""
    by_kind: dict[str, list[tuple[int, str]]] = {}
    for chain, one in health.items():
        for finding in one.findings:
            by_kind.setdefault(finding.kind, []).append((chain, finding.says))
    return [Finding(kind, _prefix([c for c, _ in said], len(health)) + said[0][1]) for kind, said in by_kind.items()]


def _of_temperatures(temperatures: Mapping[int, float], num_data: int) -> list[Finding]:
    low = {chain: value for chain, value in temperatures.items() if value < 1 and value * num_data < _FEW_EXAMPLES}
    if not low:
        return []
    value = min(low.values())
    says = (
        f"{_prefix(list(low), len(temperatures))}the data have almost no influence: with lambda = {value:.3g}, all "
        f"{num_data:,} examples together weigh as much as {value * num_data:.2g} in Bayes' rule (lambda multiplies the "
        "sum over the data; 1 is Bayes)"
    )
    return [Finding("no influence", says)]


def _of_series(
    chains: Sequence[int], num_draws: int, series: Sequence[Series], rows: Sequence[Row], differ_in: Sequence[str]
) -> list[Finding]:
    found: list[Finding] = []
    if num_draws < _LEAST_DRAWS:
        made = f"{num_draws} draw{'s' * (num_draws != 1)}"
        return [Finding("cannot tell", f"cannot tell yet: {made} per chain, and at least {_LEAST_DRAWS} are needed")]
    still = [c for i, c in enumerate(chains) if all(_is_still(s.values[i]) for s in series)]
    if still and series:
        found.append(Finding("stuck", f"stuck: all draws of {_numbered(still, len(chains))} are the same"))
    judged = [(s, row) for s, row in zip(series, rows, strict=True) if row.is_judged]
    if broken := [row.name for _, row in judged if row.verdict == "not finite"]:
        found.append(Finding("not finite", f"numbers that are not finite in {', '.join(broken)}"))
    moving = [(s, row) for s, row in judged if not math.isnan(row.ess_bulk)]
    if not moving and not still:
        says = "cannot tell about convergence: U was estimated on batches; pass `inputs` to compare predictions"
        found.append(Finding("cannot tell", says))
    if short := [row.name for _, row in judged if row.verdict == "too few draws"]:
        found.append(Finding("cannot tell", f"cannot tell yet for {', '.join(short)}: too few draws were kept"))
    if len(chains) == 1:
        found.append(Finding("one chain", "one chain only: whether another would agree is unknown"))
    elif differ_in:
        says = f"chains differ in {', '.join(differ_in)}: each was judged alone, and their agreement was not tested"
        found.append(Finding("one chain", says))
    elif apart := [(s, row) for s, row in moving if row.verdict in ("chains disagree", "not mixed")]:
        found.append(_disagreement(chains, *max(apart, key=lambda pair: (pair[1].verdict == "chains disagree", pair[1].rhat))))
    if few := [row for _, row in moving if not min(row.ess_bulk, row.ess_tail) >= _ENOUGH_DRAWS]:
        row = min(few, key=lambda row: min(row.ess_bulk, row.ess_tail))
        least = f"{min(row.ess_bulk, row.ess_tail):.0f} of at least {_ENOUGH_DRAWS:.0f}"
        found.append(Finding("few draws", f"few draws: {least} effective draws of {row.name}; continue the run"))
    return found


def _disagreement(chains: Sequence[int], series: Series, row: Row) -> Finding:
    if row.verdict == "not mixed":
        says = f"not mixed yet: R-hat of {row.name} is {row.rhat:.3f}, above {row.rhat_limit:.3g}; continue the run"
        return Finding("not mixed", says)
    odd = ""
    values = series.values.reshape(*series.values.shape[:2], -1)
    if len(chains) > 2:
        without = {c: -least(-rhat(values[[j for j in range(len(chains)) if j != i]])) for i, c in enumerate(chains)}
        chain, rest = min(without.items(), key=lambda item: item[1])
        odd = f"; chain {chain} differs from all others" if rest - 1 < (row.rhat - 1) / 3 else ""
    says = f"chains disagree: R-hat of {row.name} is {row.rhat:.2f}{odd}. They have not mixed, and may never mix"
    return Finding("chains disagree", says)


def of_moving(measure: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """A measure of values (chains, draws, ...); NaN where they never change, such as a saturated probability."""
    return torch.where((values == values[0, 0]).all(0).all(0), torch.nan, measure(values))


def least(values: Tensor) -> float:
    """The smallest number; NaN without any."""
    known = values[~values.isnan()]
    return float(known.min()) if len(known) else math.nan


def _is_still(values: Tensor) -> bool:
    return len(values) > 1 and bool((values == values[:1]).all())


def _numbered(chains: Sequence[int], number: int) -> str:
    if len(chains) == number and number > 1:
        return "all chains"
    return f"chain{'s' * (len(chains) > 1)} {', '.join(map(str, chains))}"


def _prefix(chains: Sequence[int], number: int) -> str:
    return "" if number == 1 else f"{_numbered(chains, number)}: "


def layers_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of parameters by layer, that is, by module.

    Example:
        >>> layers_of(["0.weight", "0.bias", "head.2.weight", "scale"])
        {'0': ['0.weight', '0.bias'], 'head.2': ['head.2.weight'], 'scale': ['scale']}
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return layers


def probe_layers(draws: Iterable[Mapping[str, Tensor]], names: Sequence[str]) -> Tensor:
    """Length |w| and projection w . r of the weights of each layer, (draws, layers, 2).

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
