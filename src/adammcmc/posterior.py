"""The draws of one run, and what they are for: joins store and prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from adammcmc.data import Batch, as_data
from adammcmc.errors import StoreMismatch
from adammcmc.health import Health, read_health, split_sums
from adammcmc.likelihood import Likelihood, as_likelihood
from adammcmc.moments import Moments
from adammcmc.predictive import Forward, Prediction, predict
from adammcmc.store import FolderStore, Record, Store

__all__ = ["Posterior"]


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
    def num_chains(self) -> int:
        return len(self._chains)

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
        for saved in self._saved():
            if saved["moments"] is not None:
                moments.merge(Moments(saved["moments"]))
        return moments

    def _saved(self) -> list[dict[str, Any]]:
        """What the checkpoints of the chains hold of moments and health; chains that ran as one stack have one for all."""
        if (whole := self.store.saved(None)) is not None:
            sums = split_sums(whole["health"], whole["sampler"]["health"], whole["sampler"]["num_chains"])
            moments = whole["moments"] or [None] * len(sums)
            return [{"health": whole["health"], "sums": sums[c], "moments": moments[c]} for c in self._chains]
        states = [self.store.saved(chain) for chain in self._chains]
        return [
            {"health": state["health"], "sums": state["sampler"]["adammcmc"]["health"], "moments": state["moments"]}
            for state in states
            if state is not None
        ]

    # --- what was sampled, and how it went ----------------------------------------------------------------------

    @property
    def target(self) -> str:
        """The realised target in one line, ending in "exact" or "approximate: why"."""
        return str(self.store.manifest["target"])

    def health(self) -> list[Health]:
        """What each chain says about itself since its burn-in ended."""
        return [read_health(saved["health"], saved["sums"]) for saved in self._saved()]

    def settings(self, chain: int) -> dict[str, float]:
        """What one chain was told: lr (or step_size), sigma, sigma_along and inverse_temperature, as far as it has them.

        In a scan, chains differ in them. (Burn-in may have changed them since; what is said here is what they started with.)
        """
        if chain not in self._chains:
            raise ValueError(f"`chain` must be one of {', '.join(map(str, self._chains))}, got {chain}.")
        chains = self.store.manifest.get("chains")
        if chains is None:
            raise ValueError("this run was made by an older version, that did not write down the settings of its chains.")
        return dict(chains[chain])

    def __str__(self) -> str:
        made = sum(record["chain"] in self._chains for record in self.store.index)
        kept = f"{made} draws, moments only" if self.store.manifest["keep"] == "moments" else f"{len(self)} draws"
        lines = [f"posterior: {kept} of {self.num_chains} chain{'s' * (self.num_chains != 1)}", f"  target: {self.target}"]
        lines += [f"  chain {chain}: {health.verdict}" for chain, health in zip(self._chains, self.health(), strict=False)]
        return "\n".join(lines)

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

    def _likelihood(self, given: str | Likelihood | None, forward: Forward | None) -> Likelihood:
        if given is not None:
            return as_likelihood(given)
        return Likelihood("values") if forward is not None else Likelihood(**self.store.manifest["likelihood"])


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
