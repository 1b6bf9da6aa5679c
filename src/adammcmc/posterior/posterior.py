"""The draws of one run, and what they are for: joins store, prediction, calibration and diagnostics."""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from adammcmc.errors import StoreCorrupt, StoreMismatch
from adammcmc.posterior.calibration import ClassScores, ValueScores, score
from adammcmc.posterior.moments import Moments
from adammcmc.posterior.predictive import Forward, Prediction, predict
from adammcmc.posterior.store.folder import FolderStore, Record, Store
from adammcmc.posterior.summary import ONE_START, Series, Summary, layers_of, probe_layers, summarize
from adammcmc.samplers.diagnostics import ess_bulk
from adammcmc.samplers.health import Health, read_health, split_sums
from adammcmc.samplers.packing import Packing, padding_rows
from adammcmc.samplers.terminal import printable
from adammcmc.target.data import Batch, Data, IterableData, as_data, num_rows, part_of
from adammcmc.target.likelihood import Likelihood, as_likelihood

__all__ = ["Posterior"]

_MOST_OUTPUTS = 200  # function values that chains are compared by
_ENOUGH_DRAWS = 30.0  # effective, of predictions: with fewer nothing is said in a chain's favour
_PROBE = "predictions at training inputs"


class Posterior:
    """Draws of a network's weights: a sequence of state dictionaries, chain after chain.

    `posterior[3]` is a state dictionary for `model.load_state_dict`, `posterior[::10]` a posterior of every tenth draw.

    Example:
        >>> import adammcmc, torch.nn.functional as F
        >>> _ = torch.manual_seed(0)
        >>> model, x = nn.Linear(2, 3), torch.randn(60, 2)
        >>> posterior = adammcmc.sample(model, (x, x.argmax(1)), F.cross_entropy, num_draws=20, gap=5, burn_in=200)
        >>> prediction = posterior.predict(torch.randn(7, 2))
        >>> prediction.mean.shape, prediction.spread.shape, prediction.mutual_information.shape
        (torch.Size([7, 3]), torch.Size([7, 3]), torch.Size([7]))
    """

    def __init__(
        self,
        store: Store,
        model: nn.Module,
        records: Sequence[Record] | None = None,
        chains: Sequence[int] | None = None,
    ) -> None:
        self.store = store
        self.model = bare(model)
        self._records = list(store.kept() if records is None else records)
        self._chains = list(range(store.manifest["configuration"]["num_chains"]) if chains is None else chains)
        self._is_part = records is not None and chains is None

    @classmethod
    def open(cls, path: str | Path, model: nn.Module) -> Posterior:
        """The posterior that a run left in a folder (or is still writing to).

        Args:
            path: the folder.
            model: of the architecture that was sampled; its weights do not matter.
        """
        store = FolderStore(path)
        check_model(store.manifest["model"]["tensors"], bare(model), f"the run in '{path}'")
        return cls(store, model)

    # --- the draws ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, draw: int) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, draw: slice) -> Posterior: ...
    def __getitem__(self, draw: int | slice) -> dict[str, Tensor] | Posterior:
        if isinstance(draw, slice):
            return Posterior(self.store, self.model, self._records[draw])
        return _copied(self.store.load(self._records[draw]))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (_copied(self.store.load(record)) for record in self._records)

    @property
    def index(self) -> list[Record]:
        """What is known of each draw: chain, draw, step, loss, potential, acceptance_rate, ..."""
        return [dict(record) for record in self._records]

    @property
    def made(self) -> list[Record]:
        """As `index`, of all draws that were made, also where their weights were not kept."""
        return list(self._records if self._is_part else [r for r in self.store.index if r["chain"] in self._chains])

    @property
    def num_chains(self) -> int:
        return len(self._chains)

    @property
    def chain_numbers(self) -> list[int]:
        """Which chains of the run these draws are of."""
        return list(self._chains)

    def chain(self, chain: int) -> Posterior:
        """The draws of one chain."""
        if chain not in self._chains:
            raise ValueError(f"`chain` must be one of {', '.join(map(str, self._chains))}, got {chain}.")
        return Posterior(self.store, self.model, [r for r in self._records if r["chain"] == chain], [chain])

    def trace(self, name: str) -> Tensor:
        """A column of the index, such as "loss" or "potential", (chains, draws), float64; of the draws all chains have.

        Of all draws that were made, also where their weights were not kept (keep="moments" or k).
        """
        chains: dict[int, list[float]] = {}
        made = [record for record in self.store.index if record["chain"] in self._chains]
        for record in self._records if self._is_part else made:
            if not isinstance(record.get(name), int | float | None) or name not in record:
                known = sorted(key for key, value in record.items() if isinstance(value, int | float))
                raise ValueError(f"there is no trace of '{name}'. Known: {', '.join(known)}.")
            value = record[name]
            chains.setdefault(record["chain"], []).append(float("nan") if value is None else float(value))
        length = min(map(len, chains.values()), default=0)
        return torch.tensor([values[:length] for values in chains.values()], dtype=torch.float64)

    def moments(self) -> Moments:
        """Mean and variance of each weight over the draws, also where only these were kept (keep="moments" or k)."""
        moments = Moments()
        if self.store.manifest["keep"] == "draws" or self._is_part:
            for draw in self:
                moments.add(draw)
            return moments
        for saved in self._saved().values():
            if saved["moments"] is not None:
                moments.merge(Moments(saved["moments"]))
        return moments

    def _saved(self) -> dict[int, dict[str, Any]]:
        """What the checkpoints hold of moments and health, by chain; chains that ran as one stack have one for all."""
        try:
            return self._read_saved()
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise StoreCorrupt(f"a checkpoint is not one of this run ({type(error).__name__}: {error}).") from error

    def _read_saved(self) -> dict[int, dict[str, Any]]:
        if (whole := self.store.saved(None)) is not None:
            if whole["sampler"]["num_chains"] != self.store.manifest["configuration"]["num_chains"]:
                raise StoreCorrupt(f"a checkpoint holds {whole['sampler']['num_chains']} chains, and run.json another number.")
            sums = split_sums(whole["health"], whole["sampler"]["health"], whole["sampler"]["num_chains"])
            moments = whole["moments"] or [None] * len(sums)
            return {c: {"health": whole["health"], "sums": sums[c], "moments": moments[c]} for c in self._chains}
        states = {chain: self.store.saved(chain) for chain in self._chains}
        return {
            chain: {
                "health": state["health"],
                "sums": state["sampler"]["adammcmc"]["health"],
                "moments": (state["moments"] or [None])[0],
            }
            for chain, state in states.items()
            if state is not None
        }

    # --- what was sampled, and how it went ----------------------------------------------------------------------

    @property
    def target(self) -> str:
        """The realised target in one line, ending in "exact" or "approximate: why"."""
        return printable(str(self.store.manifest["target"]))

    def health(self) -> list[Health]:
        """What each chain says about itself since its burn-in ended."""
        return list(self._health().values())

    def _health(self) -> dict[int, Health]:
        """By chain; a chain whose checkpoints are lost has none."""
        return {chain: read_health(saved["health"], saved["sums"]) for chain, saved in self._saved().items()}

    def settings(self, chain: int) -> dict[str, Any]:
        """What one chain goes by, as arguments of its sampler: a second run can take them and needs no tuning.

        lr (or step_size), sigma, sigma_along and inverse_temperature, as far as it has them: as burn-in left them, of the first
        parameter group. `preconditioner` is a list of tensors, one for each trainable parameter. In a scan, chains differ.

        Example:
            >>> import adammcmc, functools, torch.nn.functional as F
            >>> _ = torch.manual_seed(0)
            >>> model, x = nn.Linear(2, 3), torch.randn(60, 2)
            >>> first = adammcmc.sample(model, (x, x.argmax(1)), F.cross_entropy, num_draws=3, gap=5, burn_in=200)
            >>> tuned = functools.partial(adammcmc.Underdamped, **first.settings(0))
            >>> again = adammcmc.sample(model, (x, x.argmax(1)), F.cross_entropy, sampler=tuned, num_draws=3, gap=5, burn_in=0)
            >>> sorted(again.settings(0))
            ['inverse_temperature', 'preconditioner', 'step_size']
        """
        if chain not in self._chains:
            raise ValueError(f"`chain` must be one of {', '.join(map(str, self._chains))}, got {chain}.")
        chains = self.store.manifest.get("chains")
        if chains is None:
            raise ValueError("this run was made by an older version, that did not write down the settings of its chains.")
        told = dict(chains[chain])
        if (whole := self.store.saved(None)) is not None:
            found = _stacked_settings(whole["sampler"], chain, self.model)
        elif (saved := self.store.saved(chain)) is not None:
            found = _chain_settings(saved["sampler"])
        else:
            return told
        size = "lr" if "lr" in told else "step_size"
        tuned = {(size if key in ("lr", "step_size") else key): value for key, value in found.items()}
        kept = {key: tuned[key] for key in ("sigma", "sigma_along") if key in told and key in tuned}
        return {**told, **kept, **{key: tuned[key] for key in (size, "preconditioner", "momentum_spread") if key in tuned}}

    def save(self, path: str | Path) -> Path:
        """Write the run to a folder that `Posterior.open` reads, and that `sample(..., path=path, resume=True)` goes on with.

        For a run that was kept in memory; one that is in a folder is copied.

        Args:
            path: the folder; one that holds a run already is refused.

        Returns:
            The folder.
        """
        if self._is_part or len(self._chains) != self.store.manifest["configuration"]["num_chains"]:
            raise ValueError(
                "only a whole run can be saved, not a slice of one: save the posterior that this slice was taken from."
            )
        path = Path(path).expanduser()
        if (path / "run.json").exists():
            raise StoreMismatch(f"'{path}' holds a run already: choose another path.")
        is_new = not path.exists()
        manifest = {key: value for key, value in self.store.manifest.items() if key not in ("what", "format")}
        whole = self.store.saved(None)
        states: dict[int | None, dict[str, Any] | None] = {None: whole}
        if whole is None:
            states = {chain: self.store.saved(chain) for chain in self._chains}
        has_weights = {(record["chain"], record["draw"]) for record in self.store.kept()}
        copy = FolderStore(path, manifest)
        try:
            for number, record in enumerate(self.store.index):
                chain, keep = record["chain"], manifest["keep"]
                copy.append(record, self.store.load(record) if (chain, record["draw"]) in has_weights else {})
                if isinstance(keep, int) and number % (keep + 1) == keep:  # a checkpoint drops the weights that are not kept
                    key = None if whole is not None else chain
                    copy.save(key, states[key] or {})
            for key, state in states.items():
                if state is not None:
                    copy.save(key, state)
            copy.flush()
            copy.write_manifest()  # last: from here on the folder holds a run
        except BaseException:
            copy.close()
            if is_new:
                shutil.rmtree(path, ignore_errors=True)
            raise
        copy.close()
        return path

    def __str__(self) -> str:
        made = sum(record["chain"] in self._chains for record in self.store.index)
        kept = f"{made} draws, moments only" if self.store.manifest["keep"] == "moments" else f"{len(self)} draws"
        chains = f"{self.num_chains} chain{'s' * (self.num_chains != 1)}"
        lines = [f"posterior: {kept} of {chains}{self._worth()}", f"  target: {self.target}"]
        return "\n".join([*lines, *(f"  {line}" for line in self.verdicts())])

    def verdicts(self) -> list[str]:
        """A line for each chain, and one on what their agreement is worth: what `print` shows below the target."""
        by_chain: dict[int, list[Record]] = {chain: [] for chain in self._chains}
        for record in self.made:
            by_chain[record["chain"]].append(record)
        rows = self._compared_records()
        together = _worth_of(_probed(rows)) if rows else math.nan  # draws of one target count together
        lines = []
        known = self._health()
        for chain in self._chains:
            if (health := known.get(chain)) is None:
                lines.append(f"chain {chain}: cannot tell: its checkpoint is missing")
                continue
            verdict = health.verdict
            worth = together if rows else _worth_of(_probed([by_chain[chain]]))
            if health.is_healthy and worth < _ENOUGH_DRAWS:
                least = f"about {_independent(worth)}, of at least {_ENOUGH_DRAWS:.0f}"
                verdict = f"cannot tell yet: {'the' if len(rows) > 1 else 'its'} {_PROBE} are worth {least}"
            lines.append(f"chain {chain}: {verdict}")
        if len(self._chains) > 1 and rows and self._has_one_start(self._chains):
            lines.append(f"chains: {ONE_START}")
        return lines

    def _has_one_start(self, chains: Sequence[int]) -> bool:
        """Whether these chains began at the same weights, or an older version did not write it down."""
        starts = self.store.manifest.get("starts")
        return starts is None or len({starts[c] for c in chains}) == 1

    def _compared_records(self) -> list[list[Record]]:
        """The draws of the chains that can be compared; none where chains of a scan have targets of their own."""
        made = self.made
        chains, places, _ = _compared(made, self._chains)
        if self.store.manifest["configuration"].get("scan") and len(chains) > 1:
            return []
        return [[made[i] for i in own] for own in places]

    def _worth(self) -> str:
        """The smallest number of effective draws, of U where it is known and of the predictions, in words."""
        rows = self._compared_records()
        if not rows:
            return ""
        worth = {_PROBE: _worth_of(_probed(rows))}
        if self._knows_potential():
            worth["U"] = _worth_of(_column([record for row in rows for record in row], "potential", len(rows)))
        known = {name: ess for name, ess in worth.items() if not math.isnan(ess)}
        if not known:
            return ""
        name = min(known, key=known.__getitem__)
        return f", worth about {_independent(known[name])} ({name})"

    def _knows_potential(self) -> bool:
        return all(saved["health"]["context"]["knows_potential"] for saved in self._saved().values())

    def __repr__(self) -> str:
        chains = f"{self.num_chains} chain{'s' * (self.num_chains != 1)}"
        return f"<Posterior: {len(self)} draws of {chains}, {type(self.model).__name__}>"

    # --- prediction ---------------------------------------------------------------------------------------------

    def predict(
        self,
        data: Any,
        *,
        forward: Forward | None = None,
        likelihood: str | Likelihood | None = None,
        quantiles: Sequence[float] = (),
        raw: bool = False,
        has_targets: bool | None = None,
        batch_size: int | None = None,
        progress: bool = True,
    ) -> Prediction:
        """What the draws predict: mean, spread, quantiles, entropies; streamed, in bounded memory.

        Args:
            data: inputs as a tensor, (inputs, targets), a Dataset or a DataLoader (always in the order of the data set).
            forward: a function of model and batch, if something else than `model(inputs)` is predicted.
            likelihood: what the outputs mean; None is what the loss of the run said. See `Likelihood`.
            quantiles: which to compute besides 0.25, 0.5 and 0.75; others can be asked for later, at the price of a pass.
            raw: also keep the predictions of every draw.
            has_targets: whether the last part of a batch is the targets, which the model does not see. None: if the loss of the
                run took targets, and a batch has as many parts as those of the run had.
            batch_size: examples times draws in one forward; None goes by the size of the network.
            progress: show a bar if standard error is a terminal.
        """
        if batch_size is not None and not (isinstance(batch_size, int) and batch_size >= 1):
            raise ValueError(f"`batch_size` must be a positive integer, got {batch_size!r}.")
        if self.store.manifest["keep"] == "moments":
            raise ValueError(
                "this run kept the mean and variance of the weights only (keep='moments'): there are no draws to predict with."
            )
        num_parts = int(self.store.manifest["num_parts"])

        def split(batch: Batch) -> tuple[list[Any], Any]:
            if not isinstance(batch, tuple | list):
                return [batch], None
            known = has_targets
            if known is None:
                known = bool(self.store.manifest["has_targets"]) and len(batch) == num_parts
                if forward is None and len(batch) > 1 and not self.store.manifest["has_targets"]:
                    raise ValueError(
                        "the loss of the run was a function of model and batch, so that nobody knows which parts of a batch "
                        "the model takes. Pass the inputs alone, or has_targets, or `forward`, a function of model and batch."
                    )
            return (list(batch[:-1]), batch[-1]) if known else (list(batch), None)

        def call(model: nn.Module, batch: Batch) -> Tensor:
            return model(*split(batch)[0])  # type: ignore[no-any-return]

        return predict(
            self.model,
            [_loader(self.store, record) for record in self._records],
            as_data(data, must_know_length=False),
            likelihood=self._likelihood(likelihood, forward),
            forward=forward or call,
            targets_of=lambda batch: split(batch)[1],
            batch_size=batch_size,
            quantiles=quantiles,
            raw=raw,
            progress=progress,
        )

    def score(self, data: Any, *, num_bins: int = 15, **options: Any) -> ClassScores | ValueScores:
        """How right the predictions are: accuracy, log likelihood, calibration, coverage; see `adammcmc.score`.

        Args:
            data: with targets.
            num_bins: of the reliability curve.
            options: of `predict`. raw=True judges intervals in regression by the mixture of the draws.
        """
        return score(self.predict(data, **options), num_bins=num_bins)

    # --- whether the chains agree -------------------------------------------------------------------------------

    def summary(self, inputs: Any = None, **options: Any) -> Summary:
        """What the run is worth: R-hat and effective draws of loss, U, predictions and layers, with verdicts in words.

        Args:
            inputs: for which the chains' predictions are compared: held-out data in any form that `predict` takes. Up to 200
                numbers are looked at, of examples evenly spread over the data.
            options: of `predict`.

        Example:
            >>> import adammcmc, torch.nn.functional as F
            >>> _ = torch.manual_seed(0)
            >>> model, x = nn.Linear(2, 3), torch.randn(60, 2)
            >>> posterior = adammcmc.sample(model, (x, x.argmax(1)), F.cross_entropy, num_draws=3, gap=5, burn_in=200)
            >>> posterior.summary(torch.randn(7, 2)).grade
            'undecided'
        """
        health = self._health()
        knows_potential = self._knows_potential()
        made = self.made
        chains, places, notes = _compared(made, self._chains)
        why = "" if knows_potential else "of batches: mostly their noise"
        series = [
            Series(name, "loss", _column([made[i] for row in places for i in row], column, len(chains)), knows_potential, why)
            for name, column in (("loss", "loss"), ("U", "potential"))
            if chains
        ]
        probe = _probed([[made[i] for i in own] for own in places])
        is_cut = 2 * len(self) < len(made)  # keep=k: the weights of the last draws only
        if probe is not None and (inputs is None or is_cut):
            series.append(Series(_PROBE, "outputs", probe))
        if len(self) > 0:
            if inputs is not None:
                values = self._function_values(chains, inputs, **options)
                why = "of the last draws only" if probe is not None and is_cut else ""
                series.append(Series("predictions", "outputs", values, not why, why))
            series += self._layers(chains)
        if len(self) == 0:
            notes.append("no draws were kept to predict with")
        elif inputs is None:
            notes.append(f"give `inputs` to compare what the chains predict{'' if probe is None else ' elsewhere'}")
        manifest = self.store.manifest
        told = manifest.get("chains") or []
        seconds, num_gradients = (math.nan, math.nan) if self._is_part else self._costs(chains)
        differ_in = list(manifest["configuration"].get("scan", {})) if len(chains) > 1 else []
        if differ_in:  # each chain is looked at alone, and so is its price
            seconds, num_gradients = seconds / len(chains), num_gradients / len(chains)
        return summarize(
            self.target,
            chains,
            series,
            health,
            temperatures={c: told[c]["inverse_temperature"] for c in self._chains if c < len(told)},
            num_data=manifest["data"]["num_data"],
            seconds=seconds,
            num_gradients=num_gradients,
            differ_in=differ_in,
            one_start=self._has_one_start(chains),
            notes=notes,
        )

    def function_values(self, inputs: Any, **options: Any) -> Tensor:
        """Predictions of each draw for some inputs, up to 200 numbers, (chains, draws, numbers), float64.

        Chains are cut to one length, and those shorter than half of the longest are left out. Arguments as in `summary`.
        """
        return self._function_values(_compared(self._records, self._chains)[0], inputs, **options)

    def _function_values(self, chains: Sequence[int], inputs: Any, **options: Any) -> Tensor:
        data = as_data(inputs, must_know_length=False)
        options = {"progress": False, **options, "raw": True}
        per_example = self[:1].predict(_some(data, 1), **options).mean[0].numel()
        raw = self.predict(_some(data, max(1, _MOST_OUTPUTS // max(1, per_example))), **options).raw
        assert raw is not None
        values = raw.flatten(1)[:, :: -(-raw[0].numel() // _MOST_OUTPUTS)]
        return values[torch.tensor(_compared(self._records, chains)[1])].double()

    def _layers(self, chains: Sequence[int]) -> list[Series]:
        places = _compared(self._records, chains)[1]
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        draws = (self.store.load(self._records[i]) for row in places for i in row)
        values = probe_layers(draws, names).reshape(len(chains), len(places[0]), -1, 2)
        why = "weights: not judged"
        return [Series(f"layer {name}", "layer", values[:, :, i], False, why) for i, name in enumerate(layers_of(names))]

    def _costs(self, chains: Sequence[int]) -> tuple[float, float]:
        """Seconds and gradients since burn-in ended, of these chains; NaN where an older version did not write them down."""
        records = [r for r in self.store.index if r["chain"] in chains]
        by_chain = [sum(r.get("seconds", math.nan) for r in records if r["chain"] == c) for c in chains]
        is_stacked = self.store.manifest["configuration"].get("stacked", False)
        seconds = max(by_chain, default=math.nan) if is_stacked else sum(by_chain)
        steps = sum(max(r["health"]["num_steps"] for r in records if r["chain"] == c) for c in chains)
        return seconds, steps * self.store.manifest.get("gradients_per_step", math.nan)

    def to_arviz(self, inputs: Any = None, *, weights: bool = False, **options: Any) -> Any:
        """The run as ArviZ's `InferenceData`: `sample_stats` under ArviZ's names, and functions of the weights as `posterior`.

        The posterior has `layer_norm` (chain, draw, layer), and `prediction` (chain, draw, number) if `inputs` are given.

        Args:
            inputs: as in `summary`.
            weights: also all weights, by name. Of a large network they are many.
            options: of `predict`.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # its own, about its next version
            try:
                import arviz
            except ImportError as error:
                raise ImportError("`to_arviz` needs ArviZ. Run: pip install 'adammcmc[diagnostics]'") from error
        if len(self) == 0:
            raise ValueError("this run kept no draws of the weights (keep='moments'): there is no posterior to convert.")
        chains, places, _ = _compared(self._records, self._chains)
        records = [self._records[i] for row in places for i in row]
        layers = self._layers(chains)
        variables = {"layer_norm": torch.stack([s.values[:, :, 0] for s in layers], 2).numpy()}
        coords: dict[str, Any] = {"layer": [s.name.removeprefix("layer ") for s in layers], "chain": chains}
        dims = {"layer_norm": ["layer"]}
        if inputs is not None:
            variables["prediction"] = self._function_values(chains, inputs, **options).numpy()
            dims["prediction"] = ["number"]
        if weights:
            draws = [self.store.load(record) for record in records]
            for name, p in self.model.named_parameters():
                stacked = torch.stack([draw[name].float() for draw in draws])
                variables[name] = stacked.reshape(len(chains), -1, *p.shape).numpy()
        names = {"acceptance_rate": "acceptance_rate", "loss": "loss", "potential": "potential", "num_accepted": "num_accepted"}
        stats = {name: _column(records, column, len(chains)).numpy() for name, column in names.items()}
        stats["lp"] = -stats["potential"]
        attributes = {"target": self.target, "inference_library": "adammcmc"}
        with warnings.catch_warnings():
            # said again for every variable; here the first axis is that of the chains, however few draws there are
            warnings.filterwarnings("ignore", "More chains", UserWarning)
            return arviz.from_dict(
                posterior=variables, sample_stats=stats, coords=coords, dims=dims, posterior_attrs=attributes
            )

    def report(self, path: str | Path = "report.html", data: Any = None, **options: Any) -> Path:
        """Write the report: one HTML page that needs no network, the verdict first; see `posterior.report.write_report`.

        Args:
            path: of the page.
            data: held-out inputs, or better (inputs, targets).
            options: `names` of the examples, `title`, `progress`.
        """
        try:
            from adammcmc.posterior.report import write_report

            return write_report(self, path, data=data, **options)
        except ModuleNotFoundError as error:
            if error.name not in ("jinja2", "markupsafe", "matplotlib"):
                raise
            raise ImportError(f"a report needs {error.name}. Run: pip install 'adammcmc[report]'") from error

    def _likelihood(self, given: str | Likelihood | None, forward: Forward | None) -> Likelihood:
        if given is not None:
            return as_likelihood(given)
        return Likelihood("values") if forward is not None else Likelihood(**self.store.manifest["likelihood"])


def _chain_settings(sampler: dict[str, Any]) -> dict[str, Any]:
    """What a chain's sampler was tuned to, from its checkpoint; empty where nothing was."""
    found: dict[str, Any] = {}
    group = sampler["param_groups"][0]
    if sampler["adammcmc"].get("adaptation") is not None:
        names = ("lr", "sigma", "sigma_along")
        found = {key: float(group[key]) for key in names if isinstance(group.get(key), int | float | Tensor)}
    states = [sampler["state"].get(i, {}) for group in sampler["param_groups"] for i in group["params"]]
    if diagonal := [state["preconditioner"] for state in states if "preconditioner" in state]:
        found["preconditioner"] = [a.detach().cpu() for a in diagonal]
    if sampler["adammcmc"].get("momentum_spread") is not None:
        found["momentum_spread"] = tuple(sampler["adammcmc"]["momentum_spread"])
    return found


def _stacked_settings(sampler: dict[str, Any], chain: int, model: nn.Module) -> dict[str, Any]:
    """The same of one chain of a stack, whose checkpoint has the settings of a kernel, by leaf."""
    found: dict[str, Any] = {}

    def gather(state: dict[str, Any]) -> None:
        for key, value in state.items():
            if isinstance(value, dict):
                gather(value)
                continue
            first = value[0] if isinstance(value, list | tuple) else value
            found[key] = float(first[chain] if isinstance(first, Tensor) and first.dim() == 1 else first)

    if sampler["adaptation"] is not None:
        gather(sampler["settings"])
    if sampler["preconditioner"] is not None:
        trainable = [p for p in model.parameters() if p.requires_grad]
        padding = padding_rows(model.modules())
        held = {i: tuple(sorted(padding[id(p)])) for i, p in enumerate(trainable) if id(p) in padding}
        leaves = tuple(a.detach().cpu()[None] for a in sampler["preconditioner"])
        packing = Packing(trainable, [0] * len(trainable), held)
        if [x.numel() for x in packing.new()] == [x.numel() for x in leaves]:
            found["preconditioner"] = [a.clone() for a in packing.whole(leaves, 1.0)]
        else:  # parameter groups have leaves of their own; a step size is worth nothing without its preconditioner
            found.pop("step_size", None)
    return found


def _compared(records: Sequence[Record], chains: Sequence[int]) -> tuple[list[int], list[list[int]], list[str]]:
    """Which chains can be compared, the places of their draws (all of one length), and what was left out.

    A run that stopped in the middle has chains of other lengths: those shorter than half of the longest are left out.
    """
    places = {chain: [i for i, record in enumerate(records) if record["chain"] == chain] for chain in chains}
    longest = max(map(len, places.values()), default=0)
    long = {chain: own for chain, own in places.items() if own and 2 * len(own) >= longest}
    left_out = [chain for chain in chains if chain not in long]
    notes = [f"left out, since they have few draws or none: chain {', '.join(map(str, left_out))}"] if left_out else []
    length = min(map(len, long.values()), default=0)
    if length < longest:
        notes.append(f"chains are compared by the first {length} draws of each")
    return list(long), [own[:length] for own in long.values()], notes


def _column(records: Sequence[Record], name: str, num_chains: int) -> Tensor:
    """(chains, draws), NaN where there is no number."""
    values = [math.nan if record.get(name) is None else float(record[name]) for record in records]
    return torch.tensor(values, dtype=torch.float64).reshape(num_chains, -1)


def _probed(chains: Sequence[Sequence[Record]]) -> Tensor | None:
    """What draws predicted at training examples, (chains, draws, numbers); None where it was not written down for all."""
    rows: list[list[float | None]] = [record.get("probe") or [] for chain in chains for record in chain]
    if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
        return None
    values = [[math.nan if value is None else value for value in row] for row in rows]
    return torch.tensor(values, dtype=torch.float64).reshape(len(chains), -1, len(rows[0]))


def _independent(number: float) -> str:
    return f"{number:,.0f} independent draw{'s' * (round(number) != 1)}"


def _worth_of(values: Tensor | None) -> float:
    """The smallest number of effective draws; numbers that never change are left out. NaN where there is none."""
    if values is None:
        return math.nan
    found = torch.where((values == values[0, 0]).all(0).all(0), torch.nan, ess_bulk(values))
    return float(found.nan_to_num(nan=math.inf).min()) if not bool(found.isnan().all()) else math.nan


def _some(data: Data, number: int) -> Data:
    """So many examples, evenly spread over the data; the first ones where they can only be iterated."""
    if isinstance(data, IterableData):
        batch = part_of(next(data.in_order(number)), slice(number))
    else:
        batch = data.fetch(torch.linspace(0, data.num_data - 1, min(number, data.num_data)).round().long())
    return IterableData([batch], num_rows(batch), None)


def bare(model: nn.Module) -> nn.Module:
    """The model itself, where it was wrapped by torch.compile: the names of its tensors are then its own."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def _copied(draw: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in draw.items()}


def check_model(tensors: dict[str, Any], model: nn.Module, what: str) -> None:
    """Refuse a model of another architecture."""
    own = describe_tensors(model)
    for name in tensors:
        if name not in own:
            raise StoreMismatch(f"{what} is of another model: it has '{name}', which this {type(model).__name__} has not.")
    for name, (dtype, shape) in own.items():
        if name not in tensors:
            raise StoreMismatch(f"{what} is of another model: it has no '{name}', which this {type(model).__name__} has.")
        if [dtype, shape] != list(tensors[name]):
            raise StoreMismatch(
                f"{what} is of another model: its '{name}' is {tensors[name][0]} {tuple(tensors[name][1])}, this model's is "
                f"{dtype} {tuple(shape)}."
            )


def describe_tensors(model: nn.Module) -> dict[str, tuple[str, list[int]]]:
    """dtype and shape of everything that a draw holds, by name."""
    state = {name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    return {name: (str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in state.items()}


def _loader(store: Store, record: Record) -> Callable[[], dict[str, Tensor]]:
    return lambda: store.load(record)
