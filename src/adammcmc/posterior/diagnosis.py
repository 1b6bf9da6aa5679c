"""How the chains of a posterior did: draws to compare, health, effective draws, verdicts, and the series of the summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adammcmc.posterior.chain_records import chain_records
from adammcmc.posterior.store.folder import Record
from adammcmc.posterior.summary import (
    NEAR_STARTS,
    ONE_START,
    Series,
    Summary,
    layers_of,
    least,
    of_moving,
    probe_layers,
    summarize,
)
from adammcmc.samplers.diagnostics import ess_bulk
from adammcmc.samplers.health import Health
from adammcmc.samplers.warmup import WarmUp, in_a_line

if TYPE_CHECKING:
    from adammcmc.posterior.posterior import Posterior

__all__ = ["Compared", "Diagnosis", "by_chain", "compare", "layer_series"]

_ENOUGH_DRAWS = 30.0  # effective, of predictions: a chain with fewer is not called healthy
_CLOSE = 0.1  # spread of the starting weights over that of the draws
_PROBE = "predictions at training inputs"

Values = Callable[[Sequence[int]], Tensor]
"""Chains -> predictions of their draws for some inputs, (chains, draws, numbers)."""


def by_chain(records: Iterable[Record]) -> dict[int, list[Record]]:
    """Records by chain, in the order of their first draws."""
    rows: dict[int, list[Record]] = {}
    for record in records:
        rows.setdefault(record["chain"], []).append(record)
    return rows


class Compared(NamedTuple):
    """Draws of several chains, the same number of each."""

    chains: list[int]
    rows: list[list[Record]]
    """The records of each chain."""
    notes: list[str]
    """What was left out."""

    @property
    def records(self) -> list[Record]:
        """Chain after chain."""
        return [record for row in self.rows for record in row]

    def column(self, name: str) -> Tensor:
        """A column of the index, (chains, draws), NaN where there is no number."""
        return torch.from_numpy(np.array([[record.get(name) for record in row] for row in self.rows], dtype=np.float64))

    def probes(self) -> Tensor | None:
        """The draws' predictions at training inputs, (chains, draws, numbers); None unless all draws recorded them."""
        rows = [record.get("probe") or [] for record in self.records]
        if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
            return None
        return torch.from_numpy(np.array(rows, dtype=np.float64)).reshape(len(self.chains), -1, len(rows[0]))


def compare(records: Iterable[Record], chains: Sequence[int]) -> Compared:
    """The draws of chains at least half as long as the longest, cut to one length."""
    rows = by_chain(records)
    longest = max((len(rows.get(chain, [])) for chain in chains), default=0)
    long = {chain: rows[chain] for chain in chains if chain in rows and 2 * len(rows[chain]) >= longest}
    left_out = [chain for chain in chains if chain not in long]
    notes = [f"left out, with too few draws: chain {', '.join(map(str, left_out))}"] if left_out else []
    length = min(map(len, long.values()), default=0)
    if length < longest:
        notes.append(f"chains are compared by the first {length} draws of each")
    return Compared(list(long), [own[:length] for own in long.values()], notes)


class Diagnosis:
    """The state of the chains behind some draws, from the index and the checkpoints as they are now."""

    def __init__(self, posterior: Posterior) -> None:
        self._posterior, self._manifest = posterior, posterior.store.manifest
        self._chains, self._made = posterior.chain_numbers, posterior.made
        self._states = chain_records(posterior.store, self._chains)
        self._scanned = list(self._manifest["configuration"].get("scan", {}))
        """Settings that differ between the chains of a scan, which then have targets of their own."""

    @property
    def _has_potential(self) -> bool:
        """Whether U was computed on all data, not estimated on batches."""
        return all(state.has_potential for state in self._states.values())

    def burn_in(self) -> dict[int, WarmUp]:
        """The record of each chain's burn-in, without settings; chains that tuned nothing have none."""
        return {chain: state.burn_in for chain, state in self._states.items() if state.burn_in is not None}

    def burn_in_in_a_line(self) -> str:
        """Of all chains; empty if nothing was tuned."""
        return in_a_line(list(self.burn_in().values()))

    def health(self) -> dict[int, Health]:
        """The self-tests of each chain since burn-in; a chain whose checkpoints are lost has none."""
        return {chain: state.health() for chain, state in self._states.items()}

    def verdicts(self) -> list[str]:
        """A line for each chain, and one if all chains started at the same weights."""
        rows = by_chain(self._made)
        together = self._one_target()  # draws of one target count together
        lines, health = [], self.health()
        for chain in self._chains:
            if chain not in health:
                lines.append(f"chain {chain}: cannot tell: its checkpoint is missing")
                continue
            verdict = health[chain].verdict
            own = together or Compared([chain], [rows.get(chain, [])], [])
            ess = _least_ess(own.probes())
            if health[chain].is_healthy and ess < _ENOUGH_DRAWS:
                few = f"about {ess:,.0f} of at least {_ENOUGH_DRAWS:.0f} effective draws"
                verdict = f"cannot tell yet: {few} of {'the' if len(own.chains) > 1 else 'its'} {_PROBE}"
            lines.append(f"chain {chain}: {verdict}")
        if len(self._chains) > 1 and together and self._has_one_start(self._chains):
            lines.append(f"chains: {ONE_START}")
        return lines

    def effective_draws(self) -> str:
        """The smallest number of effective draws of U, where it is known, and of the predictions, in words."""
        if (compared := self._one_target()) is None:
            return ""
        found = {_PROBE: _least_ess(compared.probes())}
        if self._has_potential:
            found["U"] = _least_ess(compared.column("potential"))
        known = {name: ess for name, ess in found.items() if not math.isnan(ess)}
        if not known:
            return ""
        name = min(known, key=known.__getitem__)
        return f", about {known[name]:,.0f} effective ({name})"

    def _one_target(self) -> Compared | None:
        """The draws to compare; None without draws, and for a scan, whose chains have different targets."""
        compared = compare(self._made, self._chains)
        return compared if len(compared.chains) == 1 or (compared.chains and not self._scanned) else None

    def _has_one_start(self, chains: Sequence[int]) -> bool:
        """Whether these chains began at the same weights, or an older version did not record it."""
        starts = self._manifest.get("starts")
        return starts is None or len({starts[c] for c in chains}) == 1

    def _one_start(self, chains: Sequence[int], layers: Sequence[Series]) -> str:
        """What is wrong with where these chains began: at the same weights, or much closer together than their draws are."""
        if self._has_one_start(chains):
            return ONE_START
        if (states := self._posterior.store.starts()) is None or not layers or len(chains) < 2:
            return ""
        names = [name for name, p in self._posterior.model.named_parameters() if p.requires_grad]
        starts = probe_layers([states[chain] for chain in chains], names)  # (chains, layers, 2)
        draws = torch.stack([layer.values for layer in layers], 2).flatten(0, 1)
        ratio = float((starts.std(0) / draws.std(0)).nanmedian())
        return NEAR_STARTS.format(ratio) if ratio < _CLOSE else ""

    def summary(self, predict: Values | None) -> Summary:
        """The summary of the chains, with the predictions to compare (None: no inputs)."""
        posterior = self._posterior
        compared = compare(self._made, self._chains)
        chains, notes = compared.chains, compared.notes
        why_not = "" if self._has_potential else "estimated on batches: mostly noise"
        columns = {"loss": "loss", "U": "potential"} if chains else {}
        series = [Series(name, "loss", compared.column(column), why_not) for name, column in columns.items()]
        probes = compared.probes()
        is_cut = 2 * len(posterior) < len(self._made)  # keep=k: the weights of the last draws only
        if probes is not None and (predict is None or is_cut):
            series.append(Series(_PROBE, "outputs", probes))
        if len(posterior) == 0:
            notes.append("no draws were kept to predict with")
        elif predict is None:
            notes.append(f"pass `inputs` to compare the chains' predictions{'' if probes is None else ' elsewhere'}")
        else:
            why_not = "the last draws only" if probes is not None and is_cut else ""
            series.append(Series("predictions", "outputs", predict(chains), why_not))
        layers = layer_series(posterior, chains) if len(posterior) > 0 else []
        series += layers
        settings = self._manifest.get("chains") or []
        differ_in = self._scanned if len(chains) > 1 else []
        seconds, num_gradients = self._costs(chains)
        share = len(chains) if differ_in else 1  # the chains of a scan are judged one by one, and so is their cost
        return summarize(
            posterior.target,
            chains,
            series,
            self.health(),
            temperatures={c: settings[c]["inverse_temperature"] for c in self._chains if c < len(settings)},
            num_data=self._manifest["data"]["num_data"],
            seconds=seconds / share,
            num_gradients=num_gradients / share,
            differ_in=differ_in,
            one_start=self._one_start(chains, layers),
            burn_in=self.burn_in_in_a_line(),
            notes=notes,
        )

    def _costs(self, chains: Sequence[int]) -> tuple[float, float]:
        """Seconds and gradients of these chains since burn-in; NaN for a slice, and if they were not recorded."""
        if self._posterior.is_slice:
            return math.nan, math.nan
        rows = by_chain(self._made)
        times = [sum(r.get("seconds", math.nan) for r in rows[c]) for c in chains]
        seconds = max(times, default=math.nan) if self._posterior.store.is_stacked else sum(times)
        return seconds, sum(max(r["health"].get("num_gradients", math.nan) for r in rows[c]) for c in chains)


def layer_series(posterior: Posterior, chains: Sequence[int]) -> list[Series]:
    """Length and projection of each layer at the draws of these chains."""
    compared = compare(posterior.index, chains)
    names = [name for name, p in posterior.model.named_parameters() if p.requires_grad]
    draws = map(posterior.store.load, compared.records)
    values = probe_layers(draws, names).reshape(len(chains), len(compared.rows[0]), -1, 2)
    layers = enumerate(layers_of(names))
    return [Series(f"layer {name}", "layer", values[:, :, i], "weights: not judged") for i, name in layers]


def _least_ess(values: Tensor | None) -> float:
    """The smallest number of effective draws over all numbers that ever change; NaN if there are none."""
    return math.nan if values is None else least(of_moving(ess_bulk, values))
