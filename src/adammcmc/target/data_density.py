"""A sum of losses over data, of many chains at once, as a target."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from adammcmc.errors import PerExampleLossRequired
from adammcmc.target.control import Control, ControlVariate, Taylor
from adammcmc.target.keyed_random import keys, order
from adammcmc.target.leaves import Leaves, flatten, unflatten
from adammcmc.target.potential import Evaluation, Potential
from adammcmc.target.priors import Prior
from adammcmc.target.randomness import Randomness
from adammcmc.target.sums import sums

__all__ = ["DataDensity"]

_CHECKS = 4  # points at which the independence of the examples is checked: at the first all losses may be equal
_FEW = 16  # examples in such a check


class DataDensity(Potential):
    r"""exp(-U) with U(theta) = lambda * sum_i l_i(theta) - log prior(theta), for `sample_density`, many chains at once.

    With `batch_size`, each chain takes its gradients on a batch of its own, a new one at each step and the same at both
    ends of the step; the acceptance test may use other examples. The data stay on their device.

    Args:
        loss: loss(params, *rows) of ONE chain, with its parameters without a chain axis and some rows of the tensors:
            one number per row, shape (rows,), independent of the other rows. It is called under `torch.func.vmap`.
        *tensors: the data, one row per example.
        prior: on the parameters; None is flat.
        inverse_temperature: lambda; 1 is Bayes.
        batch_size: examples per gradient; None is all of them, and every test is then exact.
        num_parts: batches that all data come in, of which `kernels.amortised_langevin` takes one at a time: every
            `num_parts`-th row, from each of the first rows on.
        like: parameters with the structure that `loss` takes, if they are not one tensor.
        control_variate: for tests that select examples. It costs one pass over the data here, and a few more forward
            passes of each selected example. Of no use if `batch_size` is None.

    Example:
        >>> import adammcmc, torch.nn.functional as F
        >>> x, y = torch.randn(1000, 3), torch.randint(2, (1000,)) * 2.0 - 1
        >>> losses = lambda w, x, y: F.softplus(-y * (x @ w))
        >>> target = DataDensity(losses, x, y, prior=adammcmc.Gaussian(), batch_size=10)
        >>> kernel = adammcmc.kernels.adam_mcmc(0.0, sigma=0.03, acceptance=adammcmc.acceptance.Barker())
        >>> draws, info = adammcmc.sample_density(target, torch.zeros(20, 3), kernel, num_steps=10)
        >>> draws.shape, info.num_examples.shape
        (torch.Size([20, 10, 3]), torch.Size([20, 10]))
    """

    scale = 1.0
    inverse_temperature = 1.0
    num_examples = 1
    num_parts = 1
    control: Control | None = None
    can_narrow = True

    def __init__(
        self,
        loss: Callable[..., Tensor],
        *tensors: Tensor,
        prior: Prior | None = None,
        inverse_temperature: float = 1.0,
        batch_size: int | None = None,
        num_parts: int = 1,
        like: Any = None,
        control_variate: ControlVariate | None = None,
    ) -> None:
        if not tensors or len({len(t) for t in tensors}) > 1 or len(tensors[0]) == 0:
            raise ValueError(f"the data must be tensors of one length, at least 1, got lengths {[len(t) for t in tensors]}.")
        if not 0 < inverse_temperature < float("inf"):
            raise ValueError(f"`inverse_temperature` must be positive and finite, got {inverse_temperature}.")
        self.num_examples = n = len(tensors[0])
        if batch_size is not None and (type(batch_size) is not int or not 1 <= batch_size <= n):
            raise ValueError(
                f"`batch_size` must be a whole number between 1 and the number of examples, {n}, got {batch_size!r}."
            )
        if type(num_parts) is not int or not 1 <= num_parts <= n or (num_parts > 1 and batch_size is not None):
            raise ValueError(
                f"`num_parts` must be a whole number between 1 and the number of examples, {n}, without `batch_size`, got "
                f"{num_parts!r}."
            )
        self.num_parts = num_parts
        self.inverse_temperature = inverse_temperature
        self.scale = inverse_temperature * self.num_examples
        self.fixed = batch_size is None
        self.is_bounded = prior is not None and prior.is_bounded
        self.batch_size = batch_size
        self._loss, self._tensors, self._prior = loss, tensors, prior
        self._structure = flatten(torch.empty(0) if like is None else like)[1]
        self._rows: slice | Tensor = slice(None)
        self._checks = iter(range(_CHECKS))  # shared by the potentials of all steps
        self.control: Control | None = None
        if control_variate is not None:
            reference, structure = flatten(control_variate.reference)
            if structure != self._structure:
                raise ValueError("the reference of the control variate must have the structure of the parameters (`like`).")
            self._check_independence(tuple(x[None] for x in reference))
            self.control = Taylor(self._one, tensors, reference, control_variate.order)
        self.known: tuple[Leaves, Leaves] | None = None
        """The first point of this step with a gradient, and the gradient of V there."""

    def __str__(self) -> str:
        batch = "all examples" if self.batch_size is None else f"batches of {self.batch_size}"
        prior = "flat, improper" if self._prior is None else str(self._prior)
        lam = f"lambda = {self.inverse_temperature:.4g}, n = {self.num_examples:,}, {batch}"
        return f"p ~ exp(-lambda * sum_i loss_i) * prior, {lam}, prior: {prior}"

    def next_batch(self, params: Leaves, generator: Randomness) -> DataDensity:
        """The potential of one step: itself for full-data gradients, otherwise with a new batch per chain."""
        if self.batch_size is None:
            return self
        step = copy.copy(self)
        step._rows = order(keys(params[0].shape[0], params[0].device, generator), self.num_examples, self.batch_size)
        step.known = None
        return step

    def evaluate(self, params: Leaves, *, with_grad: bool) -> Evaluation:
        found = self._evaluate(params, self._rows, with_grad=with_grad)
        if self.known is None and not self.fixed and found.grad is not None:
            self.known = params, found.grad
        return found

    def _evaluate(self, params: Leaves, rows: slice | Tensor, *, with_grad: bool, weight: float = 1.0) -> Evaluation:
        """On these rows; `weight`: of their mean loss in the gradient."""
        with torch.set_grad_enabled(with_grad):
            leaves = tuple(x.detach().requires_grad_(with_grad) for x in params)
            losses = self._losses(leaves, rows)
            log_prior = self._log_prior(leaves)
            if not with_grad:
                return Evaluation(losses, log_prior, None)
            # the chains are independent terms of the sum, so its gradient holds that of each chain
            total = weight * sums.mean_over_examples(losses).sum()
            if log_prior.requires_grad:
                total = total - log_prior.sum() / self.scale
            grad = torch.autograd.grad(total, leaves, materialize_grads=True)
        return Evaluation(losses.detach(), log_prior.detach(), grad)

    def force_of(self, params: Leaves, part: int) -> Leaves:
        """See `Potential`."""
        n, count = self.num_examples, self.num_parts
        weight = len(range(part, n, count)) * count / n
        grad = self._evaluate(params, slice(part, None, count), with_grad=True, weight=weight).grad
        assert grad is not None
        return grad

    def evaluate_weighted(self, params: Leaves, weights: Tensor) -> Evaluation:
        rows = (weights != 0).any(0).nonzero().flatten()  # for any chain
        with torch.enable_grad():
            leaves = tuple(x.detach().requires_grad_() for x in params)
            own = weights[:, rows]
            losses = torch.where(own != 0, self._losses(leaves, rows), 0.0)  # losses in other chains' batches may be anything
            total = sums.over_examples((losses.double() * own).sum(1)) / self.num_examples
            log_prior = self._log_prior(leaves)
            grad = torch.autograd.grad((total - log_prior / self.scale).sum(), leaves, materialize_grads=True)
        return Evaluation(total.detach(), log_prior.detach(), grad)

    def log_prior(self, params: Leaves) -> Tensor:
        return self._log_prior(params).detach()

    def prior_part(self, params: Leaves) -> Leaves | None:
        if self._prior is None:
            return None
        with torch.enable_grad():
            leaves = tuple(x.detach().requires_grad_() for x in params)
            log_prior = self._log_prior(leaves)
            if not log_prior.requires_grad:
                return None
            return torch.autograd.grad(-log_prior.sum() / self.scale, leaves, materialize_grads=True)

    def example_losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        with torch.no_grad():
            return self._losses(params, indices)

    def _log_prior(self, params: Leaves) -> Tensor:
        if self._prior is None:
            return torch.zeros(params[0].shape[0], dtype=torch.float64, device=params[0].device)
        log_density = self._prior.log_density
        return vmap(lambda *leaves: log_density(leaves))(*params).double()

    def _one(self, leaves: Leaves, rows: list[Tensor]) -> Tensor:
        return self._loss(unflatten(leaves, self._structure), *rows)

    def _check_independence(self, params: Leaves) -> None:
        """Compare the losses of some examples of the first chain, evaluated together and in two halves."""
        few = torch.linspace(0, self.num_examples - 1, min(_FEW, self.num_examples)).long()
        rows = [t[few.to(t.device)] for t in self._tensors]
        first = tuple(x[:1].detach() for x in params)

        def losses(part: slice) -> Tensor:
            return vmap(self._one, in_dims=(0, None))(first, [t[part] for t in rows])

        middle = len(few) // 2
        with torch.no_grad():
            together = losses(slice(None))
            if middle == 0 or together.shape != (1, len(few)):  # nothing to compare, or an error for another check
                return
            parts = torch.cat([losses(slice(0, middle)), losses(slice(middle, None))], 1)
        if not torch.allclose(together, parts, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise PerExampleLossRequired(
                "the loss of an example depends on the examples that it is evaluated with (a mean over them, batch "
                f"statistics?): {len(few)} losses differ from those of the halves by up to "
                f"{float((together - parts).abs().max()):.3g}. Pass a density of all data together to "
                "`sample_density` as a plain function."
            )

    def _losses(self, params: Leaves, indices: slice | Tensor) -> Tensor:
        if next(self._checks, None) is not None:
            self._check_independence(params)
        rows = [t[indices] for t in self._tensors]
        own = 0 if isinstance(indices, Tensor) and indices.dim() > 1 else None
        shape = params[0].shape[0], rows[0].shape[0 if own is None else 1]
        losses = vmap(self._one, in_dims=(0, own))(params, rows)
        if losses.shape != shape:
            raise ValueError(
                f"`loss` must return one loss for each example, shape {shape[1:]}, got {tuple(losses.shape[1:])}. Most "
                'losses do with reduction="none".'
            )
        return losses
