"""How the chains of a posterior did: their health, effective draws and verdicts, and the series of the summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from adammcmc.posterior.checkpoints import chain_states
from adammcmc.posterior.draws import Compared, Draws
from adammcmc.posterior.summary import ONE_START, Series, Summary, layers_of, probe_layers, summarize
from adammcmc.samplers.diagnostics import ess_bulk
from adammcmc.samplers.health import Health

__all__ = ["Diagnosis", "Values", "layer_series"]

_ENOUGH_DRAWS = 30.0  # effective, of predictions: a chain with fewer is not called healthy
_PROBE = "predictions at training inputs"

Values = Callable[[Sequence[int]], Tensor]
"""Chains -> predictions of their draws for some inputs, (chains, draws, numbers)."""


class Diagnosis:
    """The state of the chains behind some draws, from the index and the checkpoints as they are now."""

    def __init__(self, draws: Draws) -> None:
        self._draws, self._manifest = draws, draws.store.manifest
        self._states = chain_states(draws.store, draws.chains)

    @property
    def _has_potential(self) -> bool:
        return all(state.has_potential for state in self._states.values())

    def health(self) -> dict[int, Health]:
        """The self-tests of each chain since burn-in; a chain whose checkpoints are lost has none."""
        return {chain: state.health() for chain, state in self._states.items()}

    def verdicts(self) -> list[str]:
        """A line for each chain, and one if all chains started at the same weights."""
        rows = self._draws.by_chain()
        together = self._one_target()  # draws of one target count together
        lines, health = [], self.health()
        for chain in self._draws.chains:
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
        if len(self._draws.chains) > 1 and together and self._has_one_start(self._draws.chains):
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
        compared = self._draws.compared(self._draws.made)
        return compared if len(compared.chains) == 1 or (compared.chains and not self._draws.scanned) else None

    def _has_one_start(self, chains: Sequence[int]) -> bool:
        """Whether these chains began at the same weights, or an older version did not record it."""
        starts = self._manifest.get("starts")
        return starts is None or len({starts[c] for c in chains}) == 1

    def summary(self, target: str, model: nn.Module, predict: Values | None) -> Summary:
        """The summary of the chains, with the layers of `model` and the predictions to compare (None: no inputs)."""
        draws, made = self._draws, self._draws.made
        compared = draws.compared(made)
        chains, notes = compared.chains, compared.notes
        why_not = "" if self._has_potential else "estimated on batches: mostly noise"
        columns = {"loss": "loss", "U": "potential"} if chains else {}
        series = [Series(name, "loss", compared.column(column), why_not) for name, column in columns.items()]
        probes = compared.probes()
        is_cut = 2 * len(draws.records) < len(made)  # keep=k: the weights of the last draws only
        if probes is not None and (predict is None or is_cut):
            series.append(Series(_PROBE, "outputs", probes))
        if draws.records:
            if predict is not None:
                why_not = "the last draws only" if probes is not None and is_cut else ""
                series.append(Series("predictions", "outputs", predict(chains), why_not))
            series += layer_series(draws, model, chains)
        if not draws.records:
            notes.append("no draws were kept to predict with")
        elif predict is None:
            notes.append(f"pass `inputs` to compare the chains' predictions{'' if probes is None else ' elsewhere'}")
        settings = self._manifest.get("chains") or []
        differ_in = draws.scanned if len(chains) > 1 else []
        seconds, num_gradients = self._costs(chains)
        share = len(chains) if differ_in else 1  # the chains of a scan are judged one by one, and so is their cost
        return summarize(
            target,
            chains,
            series,
            self.health(),
            temperatures={c: settings[c]["inverse_temperature"] for c in draws.chains if c < len(settings)},
            num_data=self._manifest["data"]["num_data"],
            seconds=seconds / share,
            num_gradients=num_gradients / share,
            differ_in=differ_in,
            one_start=self._has_one_start(chains),
            notes=notes,
        )

    def _costs(self, chains: Sequence[int]) -> tuple[float, float]:
        """Seconds and gradients of these chains since burn-in; NaN for a slice, and if they were not recorded."""
        if self._draws.is_slice:
            return math.nan, math.nan
        rows = self._draws.by_chain()
        by_chain = [sum(r.get("seconds", math.nan) for r in rows[c]) for c in chains]
        is_stacked = self._manifest["configuration"].get("stacked", False)
        seconds = max(by_chain, default=math.nan) if is_stacked else sum(by_chain)
        steps = sum(max(r["health"]["num_steps"] for r in rows[c]) for c in chains)
        return seconds, steps * self._manifest.get("gradients_per_step", math.nan)


def layer_series(draws: Draws, model: nn.Module, chains: Sequence[int]) -> list[Series]:
    """Length and projection of each layer at the draws of these chains."""
    compared = draws.compared(draws.records, chains)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    values = probe_layers(map(draws.store.load, compared.records), names).reshape(len(chains), len(compared.rows[0]), -1, 2)
    layers = enumerate(layers_of(names))
    return [Series(f"layer {name}", "layer", values[:, :, i], "weights: not judged") for i, name in layers]


def _least_ess(values: Tensor | None) -> float:
    """The smallest number of effective draws over all numbers that ever change; NaN if there are none."""
    if values is None:
        return math.nan
    found = torch.where((values == values[0, 0]).all(0).all(0), torch.nan, ess_bulk(values))
    return float(found.nan_to_num(nan=math.inf).min()) if not bool(found.isnan().all()) else math.nan
