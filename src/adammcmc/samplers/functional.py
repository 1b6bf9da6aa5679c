"""Sampling from a density: burn-in, gap, draws."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adammcmc.errors import NonFiniteLoss, StochasticClosure, warn
from adammcmc.kernels.approach import approaching
from adammcmc.kernels.arguments import placed
from adammcmc.kernels.hamiltonian import UnderdampedKernel, underdamped
from adammcmc.kernels.kernel import Info, Kernel
from adammcmc.kernels.microcanonical import microcanonical
from adammcmc.samplers.adaptation import Adaptation, BurnIn, changed, check_common, check_tunable
from adammcmc.samplers.descent import descend
from adammcmc.samplers.draws import DensityDraws
from adammcmc.samplers.draws_verdict import acceptance_off_target
from adammcmc.samplers.metric import Kind, largest_dense
from adammcmc.samplers.persistence import Persistence
from adammcmc.samplers.processes import check_one_process
from adammcmc.samplers.progress import show_bar, track
from adammcmc.samplers.second_look import NOTHING, SecondLook, second_look
from adammcmc.samplers.warmup import WarmUp
from adammcmc.target.constraints import Unconstrained
from adammcmc.target.data_density import DataDensity
from adammcmc.target.density import Density
from adammcmc.target.leaves import Leaves, flatten, leaf_names, unflatten
from adammcmc.target.randomness import Randomness
from adammcmc.target.resolution import agree

__all__ = ["default_kernel", "sample_density", "warm_up"]

_SECOND_LOOK = 50  # steps
_JITTER = 0.25  # of the default kernel (docs/exact.md has what was measured)


def sample_density(
    log_density: Callable[[Any], Tensor] | DataDensity,
    initial: Any,
    kernel: Kernel | None = None,
    *,
    num_steps: int,
    burn_in: int = 0,
    gap: int = 1,
    tune: BurnIn | None = None,
    constraints: Any = None,
    seed: int | Randomness = 0,
    progress: bool = True,
) -> DensityDraws:
    """Draw from any differentiable density, with one chain per row of `initial`, in one batched evaluation per step.

    Args:
        log_density: maps (chains, dim), or a pytree of tensors (chains, ...), to (chains,); -inf outside the support.
            It need not be normalised. Chains must not influence each other. Or a `DataDensity`, a sum of losses over
            data.
        initial: starting points, on the device of the run. With `constraints`, in constrained space.
        kernel: from `adammcmc.kernels`. A setting as a tensor (chains,) has one value per chain: a scan is one run. None
            is `default_kernel`, after a `warm_up` (whose steps `num_steps` does not count) that adapts it.
        num_steps: transitions in total, including burn-in.
        burn_in: transitions before the first draw is kept.
        gap: one draw is kept every `gap` transitions. A rejected proposal repeats the current point, and counts.
        tune: adapt the kernel's scale (and preconditioner) in burn-in, pooled over the chains, then freeze it.
        constraints: one of `torch.distributions.constraints` or `target.constraints.ordered` for a single tensor; for a
            pytree, the constraints of some of its keys. The density is then one of constrained parameters; the kernel
            moves unconstrained ones, and log |det| of the transform is added (`target.constraints`).
        seed: fixes every random number; the same seed on the same device gives the same draws. A generator, or
            `randomness.Generators` with one per chain, is used as given.
        progress: show a bar if standard error is a terminal (needs `rich`).

    Returns:
        `DensityDraws`: print it for the verdict. It unpacks as `draws, info`: the draws, (chains, draws, dim) or a pytree
        of such, and an `Info` whose fields are (chains, draws).

    Example:
        >>> import adammcmc
        >>> kernel = adammcmc.kernels.mala(step_size=0.5)
        >>> draws, info = sample_density(lambda x: -x.square().sum(1) / 2, torch.zeros(1000, 2), kernel, num_steps=50)
        >>> draws.shape, info.is_accepted.shape
        (torch.Size([1000, 50, 2]), torch.Size([1000, 50]))
    """
    _check_steps(num_steps, burn_in, gap)
    start, warmed = initial, None
    if kernel is None:
        seed = _generator(seed, _checked_leaves(initial))
        given: dict[str, Any] = {"tune": tune, "constraints": constraints, "seed": seed, "progress": progress}
        warmed = warm_up(log_density, initial, **given)
        kernel, initial, tune = warmed.kernel, warmed.params, None
    tune = _checked_tune(tune, burn_in)
    run = _Run(log_density, initial, kernel, seed, tune, constraints)
    draws = [x.new_empty(x.shape[0], (num_steps - burn_in) // gap, *x.shape[1:]) for x in run.leaves]
    infos: list[Info] = []
    jumps = _Jumps()
    for step in track(range(1, num_steps + 1), "sampling", show=progress):
        info = run.step()
        draw, rest = divmod(step - burn_in, gap)
        if step > burn_in:
            jumps.add(info.potential)
        if step > burn_in and rest == 0:
            for kept, leaf in zip(draws, run.leaves, strict=True):
                kept[:, draw - 1] = leaf
            infos.append(info)
    result = run.result(tuple(draws), infos, jumps.mean, start)
    return run.checked(
        result if warmed is None else replace(result, warm_up=warmed, target_acceptance=warmed.target_acceptance)
    )


def default_kernel(leaves: Leaves) -> Kernel:
    """The kernel of `sample_density` where none is given, for parameters of these shapes; `warm_up` adapts it."""
    dim = sum(x[0].numel() for x in leaves)
    return microcanonical(step_size=0.1, jitter=_JITTER) if dim > 1 else underdamped(step_size=0.1, jitter=_JITTER)


def _check_steps(num_steps: int, burn_in: int, gap: int) -> None:
    if not num_steps > burn_in >= 0:
        raise ValueError(f"`num_steps` must exceed `burn_in` >= 0, got {num_steps} and {burn_in}.")
    if not 1 <= gap <= num_steps - burn_in:
        raise ValueError(f"`gap` must be between 1 and num_steps - burn_in = {num_steps - burn_in}, got {gap}.")


def _checked_tune(tune: BurnIn | None, burn_in: int) -> BurnIn | None:
    if tune is None:
        return None
    if burn_in < 1 or (tune.num_steps or 1) > burn_in:
        raise ValueError(
            f"`tune` would still change the kernel while draws are kept: burn_in is {burn_in}, num_steps of the "
            f"BurnIn {tune.num_steps}. States visited while adapting are not draws; make burn_in longer."
        )
    return replace(tune, num_steps=tune.num_steps or burn_in)


def _checked_leaves(initial: Any) -> Leaves:
    """The starting points, if they are finite floating-point numbers with the chains on the first axis."""
    leaves, _ = flatten(initial)
    if not leaves:
        raise ValueError("`initial` holds no tensor.")
    for name, leaf in zip(leaf_names(initial), leaves, strict=True):
        where = "`initial`" if isinstance(initial, Tensor) else f"`initial` of '{name}'"
        if not leaf.is_floating_point():
            raise TypeError(f"{where} must be floating point, got {leaf.dtype}: write {name}.double().")
        if leaf.dim() == 0 or len(leaf) == 0:
            raise ValueError(f"{where} must have the chains on its first axis, got shape {tuple(leaf.shape)}.")
        if bad := (~leaf.reshape(len(leaf), -1).isfinite().all(1)).nonzero().flatten().tolist():
            raise ValueError(f"{where} is NaN or infinite in {len(bad)} of {len(leaf)} chains (first: {bad[:5]}).")
    if len({len(leaf) for leaf in leaves}) > 1:
        shapes = {name: tuple(leaf.shape) for name, leaf in zip(leaf_names(initial), leaves, strict=True)}
        raise ValueError(f"all leaves of `initial` must have the chains on their first axis, got the shapes {shapes}.")
    return leaves


def _generator(seed: int | Randomness, leaves: Leaves) -> Randomness:
    return seed if isinstance(seed, Randomness) else torch.Generator(leaves[0].device).manual_seed(int(seed))


def warm_up(
    log_density: Callable[[Any], Tensor] | DataDensity,
    initial: Any,
    kernel: Kernel | None = None,
    *,
    tune: BurnIn | None = None,
    constraints: Any = None,
    seed: int | Randomness = 0,
    progress: bool = True,
) -> WarmUp:
    """Adapt a kernel to a density, pooled over the chains. The record unpacks as kernel and positions of the chains.

    Chains may start anywhere: those far from the bulk are brought in by a descent, then all take steps without a test, each
    of its own length, until U falls no further; then the metric and the step size of the kernel are tuned, until chains and
    their halves agree.

    Args:
        log_density, initial, constraints, seed, progress: as in `sample_density`; with constraints, the positions
            returned are constrained too.
        kernel: None is `default_kernel`. A step size is a first guess.
        tune: how to adapt, and the limits on steps and seconds.

    Example:
        >>> import adammcmc
        >>> normal = lambda x: -x.square().sum(1) / 2
        >>> kernel, params = warm_up(normal, torch.zeros(100, 5), progress=False)
        >>> draws, info = sample_density(normal, params, kernel, num_steps=200)
        >>> abs(float(info.acceptance_rate.mean()) - 0.85) < 0.05
        True
    """
    tune = tune or BurnIn()
    if kernel is None:
        kernel = default_kernel(_checked_leaves(initial))
    began = time.monotonic()
    run = _Run(log_density, initial, kernel, seed, tune, constraints)
    assert run.adaptation is not None
    with show_bar("burn-in", show=progress) as bar:
        while not run.adaptation.is_done:
            run.step()
            bar.update(run.adaptation.num_steps, run.adaptation.most_steps, run.adaptation.status)
    run.check_not_frozen((run.kernel, run.params))
    run.adaptation.warn()
    record = run.adaptation.record(run.kernel)
    return replace(record, params=run.params, num_descent=run.num_descent, seconds=time.monotonic() - began)


class _Jumps:
    """The mean squared change of U from step to step, whatever the gap between draws."""

    def __init__(self) -> None:
        self._last: Tensor | None = None
        self._sum: Tensor | float = 0.0
        self._count = 0

    def add(self, potential: Tensor) -> None:
        if self._last is not None:
            self._sum = self._sum + (potential - self._last).square()
            self._count += 1
        self._last = potential

    @property
    def mean(self) -> float:
        return float(torch.as_tensor(self._sum).mean()) / self._count if self._count else math.nan


class _Run:
    """Chains on a density, whose kernel adapts where `tune` is given."""

    def __init__(
        self,
        log_density: Any,
        initial: Any,
        kernel: Any,
        seed: int | Randomness,
        tune: BurnIn | None,
        constraints: Any = None,
    ) -> None:
        check_one_process()
        leaves = _checked_leaves(initial)
        self.unconstrained: Unconstrained | None = None
        if constraints is not None:
            if isinstance(log_density, DataDensity):
                raise TypeError(
                    "`constraints` need a plain log density, got a DataDensity: sum the losses and the log prior in a "
                    "function, or write the transform and its log determinant into the loss and the prior."
                )
            log_density = self.unconstrained = Unconstrained(log_density, initial, constraints)
            initial = self.unconstrained.start
            leaves = flatten(initial)[0]
        self.structure = flatten(initial)[1]
        self.generator = _generator(seed, leaves)
        self.kernel: Any = placed(kernel, leaves[0].device)
        self.potential = log_density if isinstance(log_density, DataDensity) else Density(log_density, like=initial)
        self.state = self.kernel.init(unflatten(tuple(x.detach().clone() for x in leaves), self.structure), self.potential)
        self._first = None if self.state.here is None else (self.leaves, self.state.here.losses)
        self._num_steps = 0
        self._check_deterministic()
        self._check_independent()
        self._check_gradient()
        self.adaptation = None if tune is None else self._adaptation(tune)
        self.num_descent = 0
        if self.adaptation is not None:
            self.adaptation.budget.begin()
        if self.adaptation is not None and self.adaptation.approach is not None:
            moved, self.num_descent = descend(self.potential, self.leaves)
            self.state = self.kernel.init(unflatten(moved, self.structure), self.potential)

    @property
    def leaves(self) -> Leaves:
        return flatten(self.state.params)[0]

    @property
    def params(self) -> Any:
        """The positions, as the user's density takes them."""
        return self.state.params if self.unconstrained is None else self.unconstrained.constrained(self.state.params)

    def result(self, draws: Leaves, infos: list[Info], jump: float, start: Any) -> DensityDraws:
        """What was drawn, with the facts that its verdict needs; `start`: where the chains started."""
        tree = unflatten(draws, self.structure)
        return DensityDraws(
            draws=tree if self.unconstrained is None else self.unconstrained.constrained(tree),
            info=Info(*(torch.stack(field, 1) for field in zip(*infos, strict=True))),
            kernel=self.kernel,
            density=str(self.potential),
            constraints=str(self.unconstrained or ""),
            jump=jump,
            fixed_data=self.potential.fixed,
            start=start,
            second_look=self._second_look(),
            target_acceptance=None if self.adaptation is None else self.adaptation.target,
            frozen=tuple((self.state.frozen_at >= 0).nonzero().flatten().tolist()),
        )

    def _second_look(self) -> SecondLook:
        if self._first is None or self.state.here is None:  # other data at each step
            return NOTHING
        return second_look(self.potential, *self._first, self.state.here.losses)

    def _check_deterministic(self) -> None:
        if self.state.here is None:  # other data at each step
            return
        again = self.potential.evaluate(self.leaves, with_grad=False).losses
        if not agree(again, self.state.here.losses, self.potential.scale):
            raise StochasticClosure(
                "`log_density` gave two different values at the same point: it must be a function of the parameters. "
                "Does it draw random numbers (dropout in training mode?) or use a new minibatch at each call?"
            )

    def _check_independent(self) -> None:
        """Move every other chain to where the first one is: the values of the rest must not change.

        (The number of chains stays the same, as a density may have data of its own for each chain.)
        """
        here = self.state.here
        if here is None or isinstance(self.potential, DataDensity) or len(here.losses) < 2:
            return
        moved = tuple(x.clone() for x in self.leaves)
        for x in moved:
            x[1::2] = x[0]
        if all(torch.equal(x, y) for x, y in zip(moved, self.leaves, strict=True)):
            return
        again = self.potential.evaluate(moved, with_grad=False).losses
        if not agree(again[::2], here.losses[::2], self.potential.scale):
            change = (again - here.losses)[::2].abs().nan_to_num(nan=torch.inf)
            raise ValueError(
                f"`log_density` lets chains influence each other: that of chain {2 * int(change.argmax())} changed by "
                f"{float(change.max()):.3g} when other chains moved, and it had not moved itself. Each value "
                "must depend on one row of the parameters: keep the first axis out of sums, means, softmax and "
                "batch statistics."
            )

    def _check_gradient(self) -> None:
        here = self.state.here
        if here is None or here.grad is None or any(bool(g.any()) for g in here.grad):
            return
        if bool((here.losses != here.losses[0]).any()):
            warn(
                "the gradient of `log_density` is zero in all chains, although its values differ between them: moves will "
                "be blind. If it is not flat in pieces, compute it with torch operations only (no .detach(), .item(), numpy)."
            )

    def _adaptation(self, tune: BurnIn) -> Adaptation:
        if not hasattr(self.kernel, "scaled"):
            raise TypeError(f"{type(self.kernel).__name__} has nothing to tune.")
        check_tunable(self.kernel.acceptance)
        check_common(self.kernel, tune)
        dim = sum(x[0].numel() for x in self.leaves)
        scaling: Kind = "dense" if dim <= largest_dense and len(self.leaves[0]) >= 4 else "diagonal"
        return Adaptation(
            tune,
            target=self.kernel.acceptance.rate_like(self.kernel.target_acceptance),
            num_params=dim,
            tunes_sigma_along=hasattr(self.kernel, "with_sigma_along"),
            learns=hasattr(self.kernel, "with_preconditioner"),
            velocity=isinstance(self.kernel, UnderdampedKernel),
            approaches=self.potential.fixed and self.kernel.num_leapfrog == 1
            if isinstance(self.kernel, UnderdampedKernel)
            else False,
            shapes=[[x.shape[1:]] for x in self.leaves],
            scaling=scaling,
            watches=True,
            friction=self._first_friction(tune, scaling),
        )

    def _first_friction(self, tune: BurnIn, scaling: Kind) -> float | None:
        """None where it is given, or cannot be tuned: by too few chains, or with a velocity that is not kept."""
        kernel = self.kernel
        if not isinstance(kernel, UnderdampedKernel) or kernel.friction is not None or not tune.learn_preconditioner:
            return None
        return kernel.usual_friction if Persistence.can_tell(len(self.leaves[0])) else None

    def step(self) -> Info:
        """One transition of all chains, and of the adaptation until it is done."""
        now = self.potential.next_batch(self.leaves, self.generator)
        info: Info
        self.state, info = self._moving().step(self.state, now, self.generator)
        self._num_steps += 1
        if self._num_steps == _SECOND_LOOK:  # chains that all start at one point show their influence only later
            self._check_independent()
        if self.adaptation is not None and not self.adaptation.is_done:
            known = None if now.known is None else now.known[1]
            grad = known if self.state.here is None else self.state.here.grad
            numbers = info.acceptance_rate, info.potential, info.step_to_noise
            change = self.adaptation.observe(*numbers, grad, now.scale, info.log_ratio, self.leaves)
            if isinstance(diagonal := change.preconditioner, tuple):
                diagonal = tuple(a.to(x.dtype) for a, x in zip(diagonal, self.leaves, strict=True))
                change = change._replace(preconditioner=diagonal)
            self.kernel = changed(self.kernel, change, self.structure)
        return info

    def _moving(self) -> Any:
        """The kernel of this step: while the chains approach their bulk, one without a test."""
        approach = None if self.adaptation is None else self.adaptation.approach
        if approach is None:
            is_adapting = self.adaptation is not None and not self.adaptation.is_done
            return self.kernel.learning() if is_adapting else self.kernel
        return approaching(self.kernel, approach.steps(self.state.frozen_at, len(self.leaves[0])), self.kernel.preconditioner)

    def checked(self, result: DensityDraws) -> DensityDraws:
        """The result, with a warning of chains that do not move and of an acceptance that has left its target."""
        self.check_not_frozen(result)
        if self.adaptation is not None:
            self.adaptation.warn_of_frozen()
        if (says := acceptance_off_target(result.info.acceptance_rate, result.target_acceptance)) is not None:
            warn(f"{says}.")
        return result

    def check_not_frozen(self, result: Any) -> None:
        """Raise `NonFiniteLoss`, with what was drawn so far, if a chain has stopped."""
        is_frozen = self.state.frozen_at >= 0
        if not bool(is_frozen.any()):
            return
        chain = int(is_frozen.nonzero()[0])
        error = NonFiniteLoss(
            f"{int(is_frozen.sum())} chains met a NaN or infinite density or gradient at their current position and "
            f"stopped there; the first is chain {chain}, at step {int(self.state.frozen_at[chain])}. The draws so far "
            "are in the exception's `result`."
        )
        error.result = result
        raise error
