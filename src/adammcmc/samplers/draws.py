"""What `sample_density` returns: the draws, with a summary and a verdict."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from adammcmc.kernels.kernel import Info, Kernel
from adammcmc.samplers.draws_table import DensitySummary, summarize_draws
from adammcmc.samplers.draws_verdict import DensityVerdict, Facts, judge
from adammcmc.samplers.second_look import NOTHING, SecondLook
from adammcmc.target.leaves import flatten, leaf_names

__all__ = ["DensityDraws"]

_STATS = ("acceptance_rate", "is_accepted", "is_finite", "log_ratio", "potential", "num_examples")


@dataclass(frozen=True, repr=False)
class DensityDraws:
    """Draws from a density. `print` it: verdict, target, table. It unpacks as `draws, info`."""

    draws: Any
    """(chains, draws, dim), or a pytree of tensors (chains, draws, ...); constrained, if there are constraints."""
    info: Info
    """What was reported about the steps of these draws, each field (chains, draws)."""
    kernel: Kernel
    """With its settings as they were while draws were kept."""
    density: str
    """The target in words."""
    constraints: str = ""
    """The constraints in words."""
    warm_up: Any = None
    """The record of the warm-up that this call ran; None without one."""
    jump: float = math.nan
    """Mean squared change of U in one step."""
    fixed_data: bool = True
    """Whether each gradient used the whole density or all data."""
    start: Any = None
    """Where the chains started, (chains, ...), in the structure of `draws`; None where it is not known."""
    second_look: SecondLook = NOTHING
    """What was found of the density at the end of the run."""
    target_acceptance: float | None = None
    """What this call tuned the kernel to; None if it tuned nothing."""
    frozen: tuple[int, ...] = ()
    """Chains that met a NaN or infinite density or gradient."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.draws, self.info))

    def __getitem__(self, place: int) -> Any:
        return (self.draws, self.info)[place]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The draws by name of their leaf (`x` for a single tensor), each (chains, draws, ...)."""
        return dict(zip(leaf_names(self.draws), flatten(self.draws)[0], strict=True))

    @property
    def num_chains(self) -> int:
        return len(self.info.is_accepted)

    @property
    def num_draws(self) -> int:
        """Per chain."""
        return self.info.is_accepted.shape[1]

    def describe(self) -> str:
        """The target in one line: density, coordinates, constraints, kernel, test, exact or approximate: why."""
        sizes = {name: x[0, 0].numel() for name, x in self.leaves.items()}
        where = f"{sum(sizes.values()):,} coordinates"
        if len(sizes) > 1 or self.constraints:
            few = [f"{name} ({n:,})" if n > 1 else name for name, n in list(sizes.items())[:8]]
            where += f" in {', '.join(few)}{', ...' if len(sizes) > 8 else ''}"
        held = f" | {self.constraints}" if self.constraints else ""
        return f"{self.density}, {where}{held} | {self.kernel.describe(fixed_data=self.fixed_data)}"

    @cached_property
    def verdict(self) -> DensityVerdict:
        """The result of all checks; what they are: `docs/density.md`."""
        facts = Facts(
            kernel=self.kernel,
            info=self.info,
            fixed_data=self.fixed_data,
            jump=self.jump,
            start={} if self.start is None else dict(zip(leaf_names(self.start), flatten(self.start)[0], strict=True)),
            second_look=self.second_look,
            target_acceptance=self.target_acceptance,
            frozen=self.frozen,
            is_constrained=bool(self.constraints),
        )
        return judge(self.leaves, facts)

    def summary(self, num_rows: int = 20) -> DensitySummary:
        """Mean, standard deviation, 5% and 95% quantiles, Monte Carlo error, effective draws and R-hat per coordinate.

        `num_rows`: how many rows are printed, the worst ones if there are more; `.rows` has all of them.
        """
        return summarize_draws(self.leaves, num_rows)

    def __str__(self) -> str:
        verdict = self.verdict
        chains = f"{self.num_chains:,} chain{'s' * (self.num_chains != 1)}"
        counts = [chains, f"{self.num_draws:,} draws{' each' * (self.num_chains != 1)}"]
        worst = f" (chain {verdict.worst_chain}: {verdict.worst_acceptance:.2f})" if self.num_chains > 1 else ""
        counts.append(f"acceptance {verdict.acceptance:.2f}{worst}")
        if verdict.rejected_not_finite > 0.0005:
            counts.append(f"{verdict.rejected_not_finite:.1%} of the proposals outside the support, or not finite")
        rows = tuple(row for row in verdict.rows if row.name != "U" or "U" in self.leaves)
        lines = [f"{verdict.grade}: {verdict}.", f"target: {self.describe()}", ", ".join(counts), str(DensitySummary(rows))]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"<DensityDraws: {self.num_chains:,} chains, {self.num_draws:,} draws each of {', '.join(self.leaves)}; print it>"
        )

    def to_arviz(self) -> Any:
        """The draws as ArviZ's `InferenceData`: `posterior` by leaf, `sample_stats` with the names of `Info`.

        `lp` is -U: for constrained parameters the log density of the unconstrained ones.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # ArviZ's own, about its next version
            try:
                import arviz
            except ImportError as error:
                raise ImportError("`to_arviz` needs ArviZ. Run: pip install 'adammcmc[diagnostics]'") from error
        variables = {name: x.detach().cpu().numpy() for name, x in self.leaves.items()}
        stats = {name: getattr(self.info, name).cpu().numpy() for name in _STATS}
        stats["lp"] = -stats["potential"]
        attributes = {"target": self.describe(), "inference_library": "adammcmc"}
        with warnings.catch_warnings():
            # ArviZ suspects swapped axes if there are more chains than draws
            warnings.filterwarnings("ignore", "More chains", UserWarning)
            return arviz.from_dict(posterior=variables, sample_stats=stats, posterior_attrs=attributes)
