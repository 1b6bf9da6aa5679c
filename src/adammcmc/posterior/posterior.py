"""The draws of one run: a sequence of state dictionaries that predicts, scores, diagnoses and reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from adammcmc.errors import StoreMismatch
from adammcmc.posterior.calibration import ClassScores, ValueScores, score
from adammcmc.posterior.chain_records import chain_records, chain_settings, warm_ups
from adammcmc.posterior.diagnosis import Compared, Diagnosis, by_chain, compare
from adammcmc.posterior.export import save_run, to_arviz
from adammcmc.posterior.moments import Moments
from adammcmc.posterior.predictive import Forward, Prediction, predict
from adammcmc.posterior.store.folder import FolderStore, MemoryStore, Record, Store
from adammcmc.posterior.summary import Summary
from adammcmc.samplers.health import Health
from adammcmc.samplers.terminal import printable
from adammcmc.samplers.warmup import WarmUp
from adammcmc.target.batches import Batch, num_rows, part_of
from adammcmc.target.data import Data, IterableData, as_data
from adammcmc.target.likelihood import Likelihood, as_likelihood

__all__ = ["Posterior"]

_MOST_OUTPUTS = 200  # numbers by which chains are compared


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
        >>> posterior.summary(torch.randn(7, 2)).grade
        'undecided'
    """

    def __init__(
        self, store: Store, model: nn.Module, records: Sequence[Record] | None = None, chains: Sequence[int] | None = None
    ) -> None:
        self.store = store
        self.model = bare(model)
        self._records = list(store.kept() if records is None else records)
        self._chains = list(range(store.manifest["configuration"]["num_chains"]) if chains is None else chains)
        self.is_slice = records is not None and chains is None
        """Whether these are some of the draws, chosen one by one."""

    @classmethod
    def open(cls, path: str | Path, model: nn.Module) -> Posterior:
        """The posterior of a run in a folder, also while the run is still writing.

        Args:
            path: the folder.
            model: the architecture that was sampled; its weights do not matter.
        """
        store = FolderStore(path)
        check_model(store.manifest["model"]["tensors"], bare(model), f"the run in '{path}'")
        return cls(store, model)

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, draw: int) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, draw: slice) -> Posterior: ...
    def __getitem__(self, draw: int | slice) -> dict[str, Tensor] | Posterior:
        if isinstance(draw, slice):
            return Posterior(self.store, self.model, self._records[draw])
        return self._load(self._records[draw])

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(self._load, self._records)

    def _load(self, record: Record) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.store.load(record).items()}

    @property
    def index(self) -> list[Record]:
        """The record of each draw: chain, draw, step, loss, potential, acceptance_rate, ..."""
        return [dict(record) for record in self._records]

    @property
    def made(self) -> list[Record]:
        """As `index`, including draws whose weights were not kept."""
        return list(self._records) if self.is_slice else [r for r in self.store.index if r["chain"] in self._chains]

    @property
    def num_chains(self) -> int:
        return len(self._chains)

    @property
    def chain_numbers(self) -> list[int]:
        """The chains of the run that these draws belong to."""
        return list(self._chains)

    def chain(self, chain: int) -> Posterior:
        """The draws of one chain."""
        self._check_chain(chain)
        return Posterior(self.store, self.model, [r for r in self._records if r["chain"] == chain], [chain])

    def _check_chain(self, chain: int) -> None:
        if chain not in self._chains:
            raise ValueError(f"`chain` must be one of {', '.join(map(str, self._chains))}, got {chain}.")

    @property
    def starts(self) -> Posterior:
        """The weights that the chains started from, as one draw of each: their score is the baseline of the draws'.

        Only of runs with `initial`, such as trained members.
        """
        if (states := self.store.starts()) is None:
            raise ValueError("all chains of this run started at the weights of the model: `initial` was not given.")
        store = MemoryStore({**self.store.manifest, "keep": "draws", "dtype": None})
        for chain in self._chains:
            store.append({"chain": chain, "draw": 0, "step": 0}, states[chain])
        return Posterior(store, self.model, store.index, self._chains)

    def trace(self, name: str) -> Tensor:
        """A column of the index, such as "loss" or "potential", (chains, draws), float64, cut to the shortest chain.

        It includes draws whose weights were not kept (keep="moments" or k).
        """
        made = self.made
        for record in made:
            if name not in record or not isinstance(record[name], int | float | None):
                known = sorted(key for key, value in record.items() if isinstance(value, int | float))
                raise ValueError(f"there is no trace of '{name}'. Known: {', '.join(known)}.")
        rows = by_chain(made)
        length = min(map(len, rows.values()), default=0)
        return Compared(list(rows), [own[:length] for own in rows.values()], []).column(name)

    def moments(self) -> Moments:
        """Mean and variance of each weight over all draws, including those that were not kept (keep="moments" or k)."""
        moments = Moments()
        if self.store.manifest["keep"] == "draws" or self.is_slice:
            for draw in self:
                moments.add(draw)
            return moments
        for state in chain_records(self.store, self._chains).values():
            if state.moments is not None:
                moments.merge(Moments(state.moments))
        return moments

    @property
    def target(self) -> str:
        """The realised target in one line, ending in "exact" or "approximate: why"."""
        return printable(str(self.store.manifest["target"]))

    def health(self) -> list[Health]:
        """The self-tests of each chain since its burn-in ended."""
        return list(Diagnosis(self).health().values())

    @property
    def warm_up(self) -> list[WarmUp | None]:
        """The record of each chain's burn-in: what was tuned, how long it took, why it ended. None where nothing was tuned.

        The chains of a stack share theirs. `sample(..., warm_up=posterior.warm_up)` starts with these settings.
        """
        return warm_ups(self.store, self._chains, self.model)

    def settings(self, chain: int) -> dict[str, Any]:
        """The settings of one chain as arguments of its sampler: a second run can use them without tuning.

        lr (or step_size), sigma, sigma_along and inverse_temperature, as far as the sampler has them: the values after
        burn-in, of the first parameter group. `preconditioner` is a list with one tensor per trainable parameter; of "kron"
        with three. In a scan, chains differ.

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
        self._check_chain(chain)
        return chain_settings(self.store, chain, self.model)

    def save(self, path: str | Path) -> Path:
        """Write the run to a folder for `Posterior.open`; `sample(..., path=path, resume=True)` continues it.

        A run that is already in a folder is copied.

        Args:
            path: the folder; it must not hold a run yet.

        Returns:
            The folder.
        """
        if self.is_slice or self.num_chains < self.store.manifest["configuration"]["num_chains"]:
            raise ValueError("only a whole run can be saved: save the posterior that this slice was taken from.")
        return save_run(self.store, Path(path).expanduser())

    def __str__(self) -> str:
        made = sum(record["chain"] in self._chains for record in self.store.index)
        kept = f"{made} draws, moments only" if self.store.manifest["keep"] == "moments" else f"{len(self)} draws"
        diagnosis = Diagnosis(self)
        first = f"posterior: {kept} of {self._chains_in_words}{diagnosis.effective_draws()}"
        burn_in = [f"burn-in: {line}"] if (line := diagnosis.burn_in_in_a_line()) else []
        return "\n  ".join([first, f"target: {self.target}", *burn_in, *diagnosis.verdicts()])

    def __repr__(self) -> str:
        return f"<Posterior: {len(self)} draws of {self._chains_in_words}, {type(self.model).__name__}>"

    @property
    def _chains_in_words(self) -> str:
        return f"{self.num_chains} chain{'s' * (self.num_chains != 1)}"

    def verdicts(self) -> list[str]:
        """A line for each chain, and one on their agreement: what `print` shows below the target."""
        return Diagnosis(self).verdicts()

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
        """The predictions of the draws: mean, spread, quantiles, entropies; streamed, in bounded memory.

        Args:
            data: inputs as a tensor, (inputs, targets), a Dataset or a DataLoader (in the order of the data set).
            forward: a function of model and batch that returns the outputs; None: `model(inputs)`.
            likelihood: the meaning of the outputs; None: that of the loss of the run. See `Likelihood`.
            quantiles: computed besides 0.25, 0.5 and 0.75; others take another pass later.
            raw: also keep the predictions of every draw.
            has_targets: whether the last part of a batch is the targets, which the model does not take. None: if the
                loss of the run took targets and the batch has as many parts as those of the run.
            batch_size: examples times draws in one forward; None: by the size of the network.
            progress: show a bar if standard error is a terminal.
        """
        if batch_size is not None and not (isinstance(batch_size, int) and batch_size >= 1):
            raise ValueError(f"`batch_size` must be a positive integer, got {batch_size!r}.")
        manifest = self.store.manifest
        if manifest["keep"] == "moments":
            raise ValueError(
                "this run kept the mean and variance of the weights only (keep='moments'): there are no draws to predict with."
            )

        def split(batch: Batch) -> tuple[list[Any], Any]:
            if not isinstance(batch, tuple | list):
                return [batch], None
            last_is_targets = has_targets
            if last_is_targets is None:
                last_is_targets = bool(manifest["has_targets"]) and len(batch) == int(manifest["num_parts"])
                if forward is None and len(batch) > 1 and not manifest["has_targets"]:
                    raise ValueError(
                        "the loss of the run was a function of model and batch: it is unknown which parts of a batch "
                        "the model takes. Pass the inputs alone, `has_targets`, or a `forward` of model and batch."
                    )
            return (list(batch[:-1]), batch[-1]) if last_is_targets else (list(batch), None)

        def call(model: nn.Module, batch: Batch) -> Tensor:
            return model(*split(batch)[0])  # type: ignore[no-any-return]

        if likelihood is None:
            likelihood = Likelihood(**manifest["likelihood"]) if forward is None else Likelihood("values")
        return predict(
            self.model,
            [partial(self.store.load, record) for record in self._records],
            as_data(data, must_know_length=False),
            likelihood=as_likelihood(likelihood),
            forward=forward or call,
            targets_of=lambda batch: split(batch)[1],
            batch_size=batch_size,
            quantiles=quantiles,
            raw=raw,
            progress=progress,
        )

    def score(self, data: Any, *, num_bins: int = 15, **options: Any) -> ClassScores | ValueScores:
        """Scores of the predictions: accuracy, log likelihood, calibration, coverage; see `adammcmc.score`.

        Args:
            data: with targets.
            num_bins: bins of the reliability curve.
            options: of `predict`. With raw=True, intervals in regression are those of the mixture of the draws.
        """
        return score(self.predict(data, **options), num_bins=num_bins)

    def summary(self, inputs: Any = None, **options: Any) -> Summary:
        """R-hat and effective draws of loss, U, predictions and layers, with verdicts in words.

        Args:
            inputs: held-out data in any form that `predict` takes, to compare the predictions of the chains: up to 200
                numbers, of examples evenly spread over the data.
            options: of `predict`.
        """
        return Diagnosis(self).summary(
            None if inputs is None else lambda chains: self._function_values(chains, inputs, **options)
        )

    def function_values(self, inputs: Any, **options: Any) -> Tensor:
        """Predictions of each draw for some inputs, up to 200 numbers, (chains, draws, numbers), float64.

        Chains are cut to one length; those shorter than half of the longest are left out. Arguments as in `summary`.
        """
        return self._function_values(self._chains, inputs, **options)

    def _function_values(self, chains: Sequence[int], inputs: Any, **options: Any) -> Tensor:
        data = as_data(inputs, must_know_length=False)
        options = {"progress": False, **options, "raw": True}
        compared = compare(self._records, chains)
        draws = Posterior(self.store, self.model, compared.records)
        per_example = draws[:1].predict(_some(data, 1), **options).mean[0].numel()
        raw = draws.predict(_some(data, max(1, _MOST_OUTPUTS // max(1, per_example))), **options).raw
        assert raw is not None
        values = raw.flatten(1)[:, :: -(-raw[0].numel() // _MOST_OUTPUTS)]
        return values.reshape(len(compared.chains), -1, values.shape[1]).double()

    def to_arviz(self, inputs: Any = None, *, weights: bool = False, **options: Any) -> Any:
        """The run as ArviZ's `InferenceData`.

        `sample_stats` has ArviZ's names. `posterior` has `layer_norm` (chain, draw, layer), and with `inputs`
        `prediction` (chain, draw, number).

        Args:
            inputs: as in `summary`.
            weights: also all weights, by name; many, for a large network.
            options: of `predict`.
        """
        return to_arviz(self, inputs, options, weights=weights)

    def report(self, path: str | Path = "report.html", data: Any = None, **options: Any) -> Path:
        """Write the report: one self-contained HTML page, the verdict first; see `posterior.report.write_report`.

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


def _some(data: Data, number: int) -> Data:
    """So many examples, evenly spread over the data; the first ones if the data can only be iterated."""
    if isinstance(data, IterableData):
        batch = part_of(next(data.in_order(number)), slice(number))
    else:
        batch = data.fetch(torch.linspace(0, data.num_data - 1, min(number, data.num_data)).round().long())
    return IterableData([batch], num_rows(batch), None)


def bare(model: nn.Module) -> nn.Module:
    """The model inside a wrapper of torch.compile, whose tensors have their own names; any other model as it is."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def check_model(tensors: dict[str, Any], model: nn.Module, what: str) -> None:
    """Refuse a model of another architecture."""
    own, name_of_model = describe_tensors(model), type(model).__name__
    for name in tensors:
        if name not in own:
            raise StoreMismatch(f"{what} is of another model: it has '{name}', which this {name_of_model} does not have.")
    for name, (dtype, shape) in own.items():
        if name not in tensors:
            raise StoreMismatch(f"{what} is of another model: it has no '{name}', which this {name_of_model} has.")
        if [dtype, shape] != list(tensors[name]):
            raise StoreMismatch(
                f"{what} is of another model: its '{name}' is {tensors[name][0]} {tuple(tensors[name][1])}, "
                f"this model's is {dtype} {tuple(shape)}."
            )


def describe_tensors(model: nn.Module) -> dict[str, tuple[str, list[int]]]:
    """dtype and shape of every tensor of a draw, by name."""
    state = {name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    return {name: (str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in state.items()}
