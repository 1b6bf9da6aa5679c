r"""What a run says about itself: running sums on the device, and a verdict in words.

Each self-test has conditions under which it is valid, and only valid ones speak.

- *At rest, a Metropolis chain accepts with 2 P(Y > 0).* Valid where Y is exact (fixed data, `FullData`), not for `Barker`.
- *Configurational temperature*: E[theta . grad U] / P = 1. Valid for a proper prior whose edge is not met; by layer, those
  whose length a BatchNorm cancels left out.
- *Noise of the log ratio*: a plain minibatch test with noise s samples at about beta_eff(s) times the inverse temperature,
  beta_eff = 2 w / (1/2 + w), w = exp(s^2 / 2) Phi(-s).
- The loss has a say: the standard deviation of lambda * (change of the loss) is not far below 1.
- *Divergence*: a temperature above 10 or below -10 (of an exact chain 100) that does not recover, or, for an approximate
  kernel, U above its start by more than 5 P + 50; a chain that leaves an optimum climbs by P / 2. Below zero the weights run
  away downhill: U has no lower bound. This needs no effective draws, and speaks before everything else.

Errors come from batch means: the run in up to 64 stretches of equal length. A number whose stretches are still correlated has
not settled, and is not judged. Effective draws of U are those of `diagnostics.ess_bulk`, from the means of up to 512 stretches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from adammcmc.acceptance import beta_eff
from adammcmc.kernels.kernel import Info
from adammcmc.samplers.diagnostics import ess_bulk
from adammcmc.target.leaves import Setting

__all__ = [
    "GRAVITY",
    "PENDING",
    "Finding",
    "Grade",
    "Health",
    "Monitor",
    "beta_eff",
    "grade_of",
    "read_health",
    "split_sums",
]

Grade = Literal["sound", "undecided", "sick"]
_SICK = (
    *("not finite", "diverged", "no posterior", "stuck", "no influence", "too hot", "chains disagree"),
    *("biased", "not at rest", "temperature"),
)
_UNDECIDED = (
    "adapting",
    "burn-in",
    "not mixed",
    "unknown noise",
    "few draws",
    "cannot tell",
    "one chain",
    "one start",
    "untested",
)
GRAVITY = {kind: place for place, kind in enumerate((*_SICK, *_UNDECIDED))}
"""The kinds of findings, the gravest first."""

_BLOCK = 16  # steps that are summed at once
PENDING = 4 * _BLOCK  # steps that wait before they are: many small operations for many steps cost what they cost for one
_BATCHES = 64
_STRETCHES = 512  # of the trace of U
_ENOUGH_STEPS = 200
_ENOUGH_DRAWS = 30  # effective ones, of U
_FAR_TOO_HOT = 10.0  # configurational temperature; ten times that for an exact chain, which may be on its way
_ABSURD = 1e6  # below zero, no start that is merely bad has so much
_SERIES = (
    "accepted",
    "rate",
    "rise",
    "known",
    "potential",
    "square",
    "change",
    "change_square",
    "change_known",
    "noise",
    "noise_known",
    "finite",
)
_POTENTIAL, _SQUARE = _SERIES.index("potential"), _SERIES.index("square")


def read_health(state: dict[str, Any], sums: dict[str, Any] | None) -> Health:
    """The verdict from what `Sampler.health_state` and `Monitor.state_dict` saved."""
    monitor = Monitor(torch.device("cpu"), state["layers"], state["sizes"])
    if sums is not None:
        monitor.load_state_dict(sums)
    return monitor.read(**state["context"])


def split_sums(state: dict[str, Any], sums: dict[str, Any] | None, num_chains: int) -> list[dict[str, Any] | None]:
    """The sums of each chain, as `read_health` takes them, from those of a monitor that keeps so many apart."""
    if sums is None:
        return [None] * num_chains
    monitor = Monitor(torch.device("cpu"), state["layers"], state["sizes"], num_chains)
    monitor.load_state_dict(sums)
    return [one.state_dict() for one in monitor.chains()]


class Finding(NamedTuple):
    """One thing that a self-test says."""

    kind: str
    """A short name: "diverged", "no posterior", "adapting", "burn-in", "stuck", "no influence", "too hot", "unknown noise",
    "not at rest", "biased", "temperature", "untested", "cannot tell"."""
    says: str


def grade_of(findings: Sequence[Finding]) -> Grade:
    """In a word: "sick" if something is wrong, "undecided" if something cannot be told, else "sound"."""
    if any(finding.kind in _SICK for finding in findings):
        return "sick"
    return "undecided" if findings else "sound"


class Mean(NamedTuple):
    """A mean over the run, with its standard error from batch means."""

    value: float
    error: float
    is_settled: bool
    """Whether the batches are nearly independent, so that the error can be trusted."""


@dataclass(frozen=True)
class Health:
    """What a run says about itself. `print` it for the verdict in words."""

    num_steps: int
    acceptance: float
    """Mean of min(1, exp(Y))."""
    twice_rises: float
    """2 P(Y > 0), which equals `acceptance` in an exact chain at rest; NaN where Y is not known."""
    temperature: float
    """Configurational temperature over all weights; NaN where it is not valid, or not known yet."""
    temperatures: dict[str, float]
    """The same by layer."""
    loss_influence: float
    """Standard deviation of lambda times the change of the summed loss over a proposal; NaN where no test looks at it."""
    noise: float
    """Root mean square noise s of the log ratio; 0 where it is exact, NaN where it is not known."""
    beta_eff: float
    """What that noise does to the inverse temperature: 1 is nothing; NaN for a test that allows for noise."""
    effective_draws: float
    """Of U, as `diagnostics.ess_bulk` of its trace has them; NaN where U was only estimated on batches."""
    rejected_not_finite: float
    """Share of proposals where U was not finite (NaN, or outside of the prior)."""
    findings: tuple[Finding, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether no self-test complained."""
        return not self.findings

    @property
    def grade(self) -> Grade:
        """In a word: "sick" if something is wrong, "undecided" if something cannot be told, else "sound"."""
        return grade_of(self.findings)

    @property
    def verdict(self) -> str:
        """In words."""
        if self.is_healthy:
            if math.isnan(self.effective_draws):
                known = f"acceptance {self.acceptance:.2f}, {self.num_steps} steps"
                return f"no complaint in what can be judged: {known}; U was only estimated, so convergence was not judged"
            draws = f"about {self.effective_draws:.0f} effective draws of U in {self.num_steps} steps"
            return f"no complaint: acceptance {self.acceptance:.2f}, {draws}"
        return "; ".join(finding.says for finding in self.findings)

    def __str__(self) -> str:
        return f"health: {self.verdict}."


class _BatchSums:
    """Sums of several series in stretches of equal length, on the device; lengths are known to the host."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, most: int = _BATCHES) -> None:
        self.sums = torch.zeros(most, *shape, dtype=torch.float64, device=device)
        self.per_batch = 1
        """Blocks in one batch."""
        self.num_blocks = 0

    def add(self, block: Tensor) -> None:
        """The sums over one more block."""
        if self.num_blocks == len(self.sums) * self.per_batch:
            half = self.sums[0::2] + self.sums[1::2]
            self.sums.zero_()
            self.sums[: len(half)] = half
            self.per_batch *= 2
        self.sums[self.num_blocks // self.per_batch] += block
        self.num_blocks += 1

    def means(self) -> Tensor:
        """(full batches, series), on the host."""
        return self.sums[: self.num_blocks // self.per_batch].cpu() / (self.per_batch * _BLOCK)


def _scales(scales: Sequence[Setting], like: Tensor) -> Setting:
    """One for all steps, or (steps, 1 or chains) where the temperature changed between them."""
    first = scales[0]
    if all(s is first or (not isinstance(s, Tensor) and not isinstance(first, Tensor) and s == first) for s in scales):
        return first
    rows = [torch.as_tensor(s, dtype=torch.float64).to(like.device).reshape(-1) for s in scales]
    return torch.stack([row.expand(max(len(r) for r in rows)) for row in rows])


def _series(infos: Info, scale: Setting, *, by_chain: bool = False) -> Tensor:
    """(steps, series) from fields of shape (steps, chains), means over the chains; or (steps, chains, series)."""
    change = scale * (infos.proposed_loss - infos.loss)
    # a test that looks at other examples than the step's batch knows the change of U, and not that of the batch
    change = torch.where(change.isnan(), infos.log_q_ratio - infos.log_ratio, change)
    known = infos.log_ratio.isnan().logical_not().double()
    columns = {
        "accepted": infos.is_accepted,
        "rate": infos.acceptance_rate,
        "rise": (infos.log_ratio > 0).double(),
        "known": known,
        "potential": infos.potential,
        "square": infos.potential.square(),
        "change": torch.where(change.isfinite(), change, 0.0),
        "change_square": torch.where(change.isfinite(), change.square(), 0.0),
        "change_known": change.isfinite().double(),
        "noise": infos.log_ratio_noise.square().nan_to_num(nan=0.0),
        "noise_known": infos.log_ratio_noise.isnan().logical_not().double(),
        "finite": infos.is_finite,
    }
    return torch.stack([columns[name] if by_chain else columns[name].mean(1) for name in _SERIES], -1)


_Row = Tensor | tuple[Info, Setting] | tuple[Tensor, int, Setting]
"""The numbers of one step: as they are summed, as a step left them, or where they are in a ring."""


class Monitor:
    """Running sums of a sampler's steps. `add` waits for nothing; `read` does.

    Args:
        device: of the chains.
        layers: names of the layers whose temperature is taken.
        sizes: the number of weights in each.
        num_chains: keep the sums of each of so many chains apart (`chains` has them); None: means over the chains.
    """

    def __init__(
        self,
        device: torch.device,
        layers: Sequence[str] = (),
        sizes: Sequence[int] = (),
        num_chains: int | None = None,
    ) -> None:
        self.device = device
        self.layers, self.sizes = list(layers), list(sizes)
        self.num_steps = 0
        self._chains = () if num_chains is None else (num_chains,)
        self._steps = _BatchSums((*self._chains, len(_SERIES)), device)
        self._products = _BatchSums((*self._chains, len(self.layers)), device)
        self._trace = _BatchSums(self._chains, device, _STRETCHES)
        """U alone, in finer stretches."""
        self._start: Tensor | None = None
        """Sums of U and U^2 over the first steps that were ever seen."""
        self._pending: list[_Row] = []
        self._pending_products: list[Tensor] = []

    def add(self, info: Info, scale: Setting) -> None:
        """One more step, of a target with U = scale * mean loss - log prior."""
        self.num_steps += 1
        self._wait((info, scale))

    def add_row(self, ring: Tensor, row: int, scale: Setting) -> None:
        """One more step, whose numbers are in a row of a ring of `PENDING`, to be read before it comes round again."""
        self.num_steps += 1
        self._wait((ring, row, scale))

    def add_products(self, products: Tensor) -> None:
        """theta . grad U of each layer, at one point of the chain: (layers,), or (chains, layers)."""
        self._pending_products.append(products.double())
        if len(self._pending_products) == _BLOCK:
            self._products.add(torch.stack(self._pending_products).sum(0))
            self._pending_products = []

    def _wait(self, row: _Row) -> None:
        self._pending.append(row)
        if len(self._pending) >= PENDING:
            self._settle()

    def _settle(self) -> None:
        """Sum up what is pending, block by block; what is left of the last waits on."""
        whole = len(self._pending) // _BLOCK * _BLOCK
        if whole == 0:
            return
        rows = self._rows()
        for start in range(0, whole, _BLOCK):
            block = rows[start : start + _BLOCK].sum(0)
            self._steps.add(block)
            self._trace.add(block[..., _POTENTIAL])
            if self._start is None:
                # (a list as an index would wait for the device)
                self._start = torch.stack([block[..., _POTENTIAL], block[..., _SQUARE]], -1)
        self._pending = list(rows[whole:].unbind())

    def _rows(self) -> Tensor:
        """(pending steps, series), means over the chains; or (pending steps, chains, series). In the order of the steps."""
        parts = []
        for kind, group in itertools.groupby(self._pending, key=lambda row: 0 if isinstance(row, Tensor) else len(row)):
            rows: list[Any] = list(group)
            if kind == 0:
                parts.append(torch.stack(rows))
                continue
            if kind == 2:
                columns = zip(*(info for info, _ in rows), strict=True)
                infos = Info(*(torch.stack([x.double() for x in column]) for column in columns))
            else:
                infos = Info(*torch.stack([ring[row] for ring, row, _ in rows]).unbind(1))
            parts.append(_series(infos, _scales([row[-1] for row in rows], infos.loss), by_chain=bool(self._chains)))
        return torch.cat(parts)

    def restarted(self) -> Monitor:
        """Without the steps so far, but with the level at which the chain started."""
        monitor = Monitor(self.device, self.layers, self.sizes, *self._chains)
        self._settle()
        monitor._start = self._start
        return monitor

    def totals(self) -> dict[str, float]:
        """The sum of each series over all steps, and `num_steps`."""
        return self._named(self._sums().tolist())

    def totals_by_chain(self) -> list[dict[str, float]]:
        """The same for each chain, where they are kept apart."""
        return [self._named(sums) for sums in self._sums().tolist()]

    def _sums(self) -> Tensor:
        self._settle()
        sums = self._steps.sums.sum(0)
        return sums + self._rows().sum(0) if self._pending else sums

    def _named(self, sums: Sequence[float]) -> dict[str, float]:
        return {"num_steps": self.num_steps, **dict(zip(_SERIES, sums, strict=True))}

    def chains(self) -> list[Monitor]:
        """A monitor for each chain, where they are kept apart."""
        state = self.state_dict()
        monitors = []
        for c in range(*self._chains):
            monitors.append(Monitor(self.device, self.layers, self.sizes))
            one = {key: None if state[key] is None else state[key][:, c] for key in ("pending", "pending_products")}
            sums = {key: (state[key][0][:, c], *state[key][1:]) for key in ("steps", "products", "trace")}
            start = None if state["start"] is None else state["start"][c]
            monitors[-1].load_state_dict({"num_steps": self.num_steps, "start": start, **sums, **one})
        return monitors

    def state_dict(self) -> dict[str, Any]:
        """All sums, as numbers and tensors."""
        self._settle()
        return {
            "num_steps": self.num_steps,
            "steps": (self._steps.sums.clone(), self._steps.per_batch, self._steps.num_blocks),
            "products": (self._products.sums.clone(), self._products.per_batch, self._products.num_blocks),
            "trace": (self._trace.sums.clone(), self._trace.per_batch, self._trace.num_blocks),
            "start": self._start,
            "pending": self._rows() if self._pending else None,
            "pending_products": torch.stack(self._pending_products) if self._pending_products else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with these sums."""
        self.num_steps = state["num_steps"]
        saved = [(self._steps, state["steps"]), (self._products, state["products"])]
        if "trace" in state:
            saved.append((self._trace, state["trace"]))
        else:  # of an older version: U in coarser stretches
            values, *lengths = state["steps"]
            coarse = torch.zeros_like(self._trace.sums)
            coarse[: len(values)] = values[..., _POTENTIAL]
            saved.append((self._trace, (coarse, *lengths)))
        start = state.get("start")
        self._start = None if start is None else start.to(self.device, copy=True)
        for sums, (values, per_batch, num_blocks) in saved:
            sums.sums = values.to(self.device, copy=True)
            sums.per_batch, sums.num_blocks = per_batch, num_blocks
        self._pending = [] if state["pending"] is None else list(state["pending"].to(self.device).unbind())
        products = state["pending_products"]
        self._pending_products = [] if products is None else list(products.to(self.device).unbind())

    # --- the verdict --------------------------------------------------------------------------------------------

    def read(
        self,
        *,
        is_exact: bool,
        knows_potential: bool,
        has_proper_prior: bool,
        has_edge: bool,
        is_adapting: bool = False,
        left_out: Sequence[str] = (),
        is_metropolis: bool = True,
        complaints: Sequence[str] = (),
        burn_in: str | None = None,
        coarse: str | None = None,
    ) -> Health:
        """The numbers and what they mean.

        Args:
            is_exact: whether the kernel claims to be exact, which decides how a failed self-test is put.
            knows_potential: whether U was evaluated on all data; else it is mostly noise of the batch, and tells nothing.
            has_proper_prior: whether there is a posterior at all.
            has_edge: whether the prior is zero somewhere.
            is_adapting: whether the settings still change.
            left_out: layers whose temperature is not defined.
            is_metropolis: whether the test is log uniform < Y; others allow for the noise of Y.
            complaints: of the acceptance test itself.
            burn_in: what burn-in did not reach.
            coarse: to how many nats U is known, where those are many.
        """
        self._settle()
        batches = self._steps.means()
        if len(batches) == 0:
            batches = torch.full((1, len(_SERIES)), math.nan, dtype=torch.float64)
        column = {name: batches[:, i] for i, name in enumerate(_SERIES)}
        mean = {name: float(values.mean()) for name, values in column.items()}
        is_known = mean["known"] == 1
        gap = _mean(column["rate"] - 2 * column["rise"])
        variance = max(0.0, mean["square"] - mean["potential"] ** 2)
        trace = self._trace.means()
        draws = _effective_draws(trace, self._trace.per_batch * _BLOCK, variance)
        natural = math.sqrt(sum(self.sizes) / 2)
        trend = _trend(trace, draws, math.sqrt(variance), None if knows_potential else natural)
        influence = math.nan
        if (looked := mean["change_known"]) > 0:
            influence = math.sqrt(max(0.0, mean["change_square"] / looked - (mean["change"] / looked) ** 2))
        # where a proposal fell outside of the prior nothing was estimated
        noise = math.sqrt(mean["noise"] / mean["noise_known"]) if mean["noise_known"] > 0.5 else math.nan
        # at the root mean square, which forecasts the temperature better than the mean over the steps does
        beta = float(beta_eff(torch.tensor(noise, dtype=torch.float64))) if is_metropolis else math.nan
        share = 1 - mean["finite"]
        kept = [i for i, name in enumerate(self.layers) if name not in left_out]
        if not has_proper_prior or (has_edge and share > 0):
            kept = []
        layers, total = self._temperatures(kept)
        findings = []

        def find(kind: str, says: str) -> None:
            findings.append(Finding(kind, says))

        if not has_proper_prior:
            find("no posterior", "the prior is flat and improper, so that there is no posterior to sample: give a `prior`")
        for complaint in complaints:
            find("biased", f"not exact: {complaint}")
        if is_adapting:
            find("adapting", "the settings still adapt: these are not draws yet")
        is_still = len(batches) >= 4 and mean["accepted"] == 0
        is_stuck = mean["accepted"] < 0.01 and (self.num_steps >= _ENOUGH_STEPS or is_still)
        overflows = share > 0.9 and not has_edge
        heat = 1 / beta if beta > 0 else 1.0
        diverged = self._divergence(column["potential"], kept, trend, heat, is_exact, knows_potential)
        if diverged is not None and not (is_stuck and (is_exact or is_still) and not overflows):  # (held by its test)
            remedy = "shorten the step, or take larger batches or FullData()"
            if is_exact:
                remedy = "start from trained weights, and check the prior and the scale of the loss"
            elif mean["known"] == 0:
                remedy = "the step is too long for an unadjusted sampler: shorten it, or use a Metropolis test"
            lost = f", {share:.0%} of the proposals are not finite" if share > 0.1 and not has_edge else ""
            find("diverged", f"diverged: {diverged}{lost}; {remedy}")
        elif is_stuck:
            why = "lower the noise (or the step)"
            if share > 0.9:
                why = (
                    "nearly all proposals fell outside of the prior" if has_edge else "U of nearly all proposals is not finite"
                )
            find("stuck", f"stuck: {mean['accepted']:.1%} of the proposals were accepted; {why}")
        elif self.num_steps < _ENOUGH_STEPS:
            find("cannot tell", f"cannot tell yet: {self.num_steps} steps of at least {_ENOUGH_STEPS}")
        else:
            if influence < 0.05:  # False for NaN: a test that never looks at the loss
                hint = "the steps may be far too short (acceptance is nearly 1), or check " if mean["rate"] > 0.97 else "check "
                find(
                    "no influence",
                    f"the loss has no influence: lambda times its change has a standard deviation of {influence:.2g}; {hint}"
                    "num_data, inverse_temperature, and whether the loss is a mean",
                )
            if beta < 0.9:
                find(
                    "too hot",
                    f"too hot, by about {1 / beta:.3g} times in temperature: the log ratio, estimated on minibatches, "
                    f"has noise s = {noise:.3g}. Use larger batches, FullData(), or a smaller step",
                )
            elif math.isnan(beta) and is_known and is_metropolis:
                find(
                    "unknown noise",
                    "the noise of the minibatch test is unknown, and likely too hot: return the losses of the examples "
                    '(reduction="none") to have it measured',
                )
            self._judge_rest(find, column, gap, is_known and noise == 0 and is_metropolis, is_exact)
            if not bool(column["potential"].isfinite().all()):
                find("cannot tell", "cannot tell: U was not finite in a part of the run")
            elif knows_potential and not draws >= _ENOUGH_DRAWS:
                few = f"about {draws:.0f} of at least {_ENOUGH_DRAWS} effective draws of U"
                find("cannot tell", f"cannot tell yet: {few}" + (f"; {trend.says}" if trend.is_real else ""))
            elif trend.is_real:
                find("cannot tell", f"cannot tell yet: {trend.says}")
            elif is_exact and abs(hot := self._runaway_heat(kept, trend, is_exact, knows_potential)) > 3:
                find(
                    "cannot tell",
                    f"cannot tell yet: the weights have not mixed, configurational temperature {hot:.3g} (1 at rest)",
                )
            elif not knows_potential and not (total.is_settled if kept else self.num_steps >= 5 * _ENOUGH_STEPS):
                find("cannot tell", f"cannot tell yet: U was only estimated, and {self.num_steps} steps are few to judge by")
            else:
                self._judge_temperature(find, kept, total, layers, is_exact)
            if not findings and abs(total.value) > _FAR_TOO_HOT:
                off = f"configurational temperature {total.value:.3g} (1 at rest)"
                find("cannot tell", f"cannot tell yet: the weights have not mixed, {off}")
            if not findings and not is_exact and not (is_known and noise == 0):
                known = f"acceptance {mean['rate']:.2f}"
                if math.isfinite(total.error):
                    known += f", configurational temperature {total.value:.2f} +- {total.error:.2f}, 1 at rest"
                find(
                    "untested",
                    "untested: the kernel is approximate, and its bias cannot be tested where the ratio is only estimated "
                    f"({known})",
                )
            if coarse is not None:  # the self-tests compare values of U, and see no bias below that
                find("untested", f"untested: {coarse}")
        is_at_rest = knows_potential and draws >= _ENOUGH_DRAWS and not trend.is_real and diverged is None
        if burn_in is not None and not is_adapting and not is_at_rest:
            find("burn-in", burn_in)
        return Health(
            num_steps=self.num_steps,
            acceptance=mean["rate"],
            twice_rises=2 * mean["rise"] if is_known and is_metropolis else math.nan,
            temperature=total.value,
            temperatures={name: t.value for name, t in layers.items()},
            loss_influence=influence,
            noise=noise,
            beta_eff=beta,
            effective_draws=draws if knows_potential else math.nan,
            rejected_not_finite=share,
            findings=tuple(findings),
        )

    def _divergence(
        self, potential: Tensor, kept: list[int], trend: _Trend, heat: float, is_exact: bool, knows_potential: bool
    ) -> str | None:
        """What says that the chain ran away, in words. It needs no effective draws, and no finite sums.

        A chain that is still on its way from a bad start, down in U, has not diverged. `heat` is what the noise of the test
        explains of a high temperature, and of a high U.
        """
        late = potential[-max(1, len(potential) // 4) :]
        if len(potential) > 1 and not bool(late.isfinite().all()):
            return "U is not finite"
        found = []
        hot = self._runaway_heat(kept, trend, is_exact, knows_potential)
        bar = _FAR_TOO_HOT * (10 if is_exact else 1)
        if hot > bar * heat:
            found.append(f"configurational temperature {hot:.3g} (1 at rest)")
        elif hot < -bar:  # noise heats, and explains nothing of this
            why = "below zero the weights run away downhill, as where a loss of the wrong sign has no lower bound"
            found.append(f"configurational temperature {hot:.3g} (1 at rest; {why})")
        size = sum(self.sizes)
        if self._start is not None and size > 0 and not is_exact and len(potential) > 1:
            level, square = (self._start.cpu() / _BLOCK).tolist()
            noise = math.sqrt(max(0.0, square - level**2))
            rise = float(late.mean()) - level
            if rise > (5 * size + 50) * heat + 2 * noise:
                found.append(f"U is {rise:.3g} above its start, where its {size:,} weights explain about {size / 2:.3g}")
        return " and ".join(found) or None

    def _runaway_heat(self, kept: list[int], trend: _Trend, is_exact: bool, knows_potential: bool) -> float:
        """The temperature over the second half of the run where it is far off, one way, all along and does not recover; else 0.

        theta . grad U of a batch is noisy: it must be off at many points. An exact chain must be off in every layer.
        """
        products = self._products.means()
        if len(products) < 4 and self._pending_products:  # few steps: one by one
            products = torch.cat([products, torch.stack(self._pending_products).cpu()])
        half = len(products) // 2
        if not kept or half < 1 or self._trace.num_blocks < 3:
            return 0.0
        sizes = torch.tensor([self.sizes[i] for i in kept], dtype=torch.float64)
        parts = products[:, kept] / sizes if is_exact else products[:, kept].sum(1, keepdim=True) / sizes.sum()
        if not bool(parts[half:].isfinite().any()):
            return math.inf
        for sign in (1, -1):
            mildest = (sign * parts).nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf).amin(1)
            early, late = mildest[:half], mildest[half:]
            before, now = float(early.median()), float(late.median())
            if sign > 0:
                is_recovering = trend.is_falling and (is_exact or now < 0.7 * before)
            else:  # U falls in a runaway too; a descent that will end does not gather pace
                is_recovering = now < 0.7 * before or (trend.is_falling and now < max(2 * before, 100.0) and now < _ABSURD)
            if half >= (2 if knows_potential else 8) and not is_recovering and bool(late.min() > 3):
                return sign * now
        return 0.0

    def _judge_rest(self, find: Any, column: dict[str, Tensor], gap: Mean, is_valid: bool, is_exact: bool) -> None:
        """acceptance = 2 P(Y > 0), in both halves of the run."""
        size = len(column["rate"]) // 2
        if not is_valid or size < 8:
            return
        difference = column["rate"] - 2 * column["rise"]
        halves = [_mean(difference[:size]), _mean(difference[size:])]
        if abs(gap.value) < 4 * gap.error or abs(gap.value) < 0.01:
            return
        both = all(abs(half.value) > 2.5 * half.error for half in halves)
        agree = abs(halves[0].value - halves[1].value) < 4 * math.hypot(halves[0].error, halves[1].error)
        numbers = f"acceptance {float(column['rate'].mean()):.3f} is not 2 P(Y > 0) = {2 * float(column['rise'].mean()):.3f}"
        if both and agree and not is_exact:
            find("biased", f"{numbers}: it samples another distribution than its target")
        else:
            find("not at rest", f"{numbers}: the chain is still moving, or its closure is not what it claims")

    def _judge_temperature(self, find: Any, kept: list[int], total: Mean, layers: dict[str, Mean], is_exact: bool) -> None:
        """Off by a tenth and by 5 standard errors (6 for a layer), in both halves of the run and the same way.

        theta . grad U is the slowest of the series. An exact chain that fails here has not mixed yet.
        """
        batches = self._products.means()
        size = len(batches) // 2

        def is_off(t: Mean, series: Tensor, bar: float) -> bool:
            if not t.is_settled or not abs(t.value - 1) > max(bar * t.error, 0.1):
                return False
            halves = [_mean(series[:size]), _mean(series[size:])]
            return all(abs(h.value - 1) > 3 * h.error and (h.value > 1) == (t.value > 1) for h in halves)

        off = {}
        if len(kept) and is_off(total, batches[:, kept].sum(1) / sum(self.sizes[i] for i in kept), 5):
            off = {"": total}
        elif len(kept):
            names = {self.layers[i]: i for i in kept}
            off = {n: t for n, t in layers.items() if is_off(t, batches[:, names[n]] / self.sizes[names[n]], 6)}
        if not off:
            return
        words = ", ".join(f"{name} {t.value:.2f} +- {t.error:.2f}".strip() for name, t in off.items())
        if is_exact:
            find("cannot tell", f"cannot tell yet: the weights have not mixed, configurational temperature {words} (1 at rest)")
        elif "" in off:
            word = "colder" if total.value < 1 else "hotter"
            find("temperature", f"{word} than the target: configurational temperature {words}")
        else:
            find("temperature", f"layers at another temperature than the target: {words}")

    def _temperatures(self, kept: list[int]) -> tuple[dict[str, Mean], Mean]:
        """Of each layer and of all; NaN while there are too few points for an error."""
        batches = self._products.means()
        nothing = Mean(math.nan, math.nan, False)
        if not kept or len(batches) == 0:
            return {}, nothing
        if len(batches) < 2:
            return {self.layers[i]: nothing for i in kept}, nothing
        layers = {self.layers[i]: _mean(batches[:, i] / self.sizes[i]) for i in kept}
        return layers, _mean(batches[:, kept].sum(1) / sum(self.sizes[i] for i in kept))


def _effective_draws(trace: Tensor, length: int, variance: float) -> float:
    """Of a series of this variance, from its means over stretches of this length: `diagnostics.ess_bulk` of the series.

    The mean of the run has the variance (variance of the stretches) / ess(stretches). Where stretches are longer than the
    memory of the chain they fluctuate less than the series, and each is worth several draws.
    """
    between = float(trace.var(correction=0)) if len(trace) >= 4 else 0.0
    if not 0 < between < math.inf:
        return 0.0
    worth = min(max(1.0, variance / between), float(length))
    return min(float(ess_bulk(trace[None])), len(trace)) * worth


class _Trend(NamedTuple):
    """How U changed from the first third of the run to the last."""

    change: float
    spread: float
    is_real: bool
    """Whether it is more than chance explains, and matters."""
    is_estimated: bool

    @property
    def is_falling(self) -> bool:
        """Whether it fell, which may be by chance in a short run."""
        return self.change < (-1.5 * self.spread if not self.is_real else 0)

    @property
    def says(self) -> str:
        word = "falls" if self.change < 0 else "rises"
        size = f"{abs(self.change):.3g}"
        if not self.is_estimated:
            size += f" ({abs(self.change) / self.spread:.1f} of its standard deviations)"
        return f"U still {word}: by {size} from the first third to the last"


def _trend(trace: Tensor, draws: float, spread: float, natural: float | None) -> _Trend:
    """By 4 standard errors and half a standard deviation of U; `natural` stands for that where U is only estimated.

    With few effective draws a standard error means little: then by 1.5 standard deviations.
    """
    size = len(trace) // 3
    if size < 1:
        return _Trend(0.0, spread, False, natural is not None)
    change = float(trace[-size:].mean() - trace[:size].mean())
    bar = 4 * math.sqrt(6 / draws) if draws >= _ENOUGH_DRAWS else 1.5
    matters = spread if natural is None else natural
    is_real = size >= 4 and abs(change) > max(bar * spread, 0.5 * matters)
    return _Trend(change, spread, is_real, natural is not None)


def _mean(batches: Tensor) -> Mean:
    """Mean and standard error over batches; neighbours that resemble each other are joined until they do not."""
    while True:
        n = len(batches)
        centred = batches - batches.mean()
        variance = float(centred.square().mean())
        if n < 2 or not variance > 0:
            return Mean(float(batches.mean()), 0.0 if n >= 2 and variance == 0 else math.nan, False)
        correlation = float((centred[1:] * centred[:-1]).sum() / centred.square().sum())
        if correlation < 0.2 or n < 32:
            return Mean(float(batches.mean()), math.sqrt(variance / (n - 1)), n >= 16 and correlation < 0.4)
        batches = batches[n % 2 :].view(-1, 2).mean(1)
