"""Which kernels have a backend that moves the weights in place (Triton), and that backend."""

from __future__ import annotations

from typing import Any

import torch

from adammcmc.kernels.adam import AdamMCMCKernel
from adammcmc.kernels.direction import Adam
from adammcmc.kernels.hamiltonian import UnderdampedKernel
from adammcmc.kernels.proposal import Elementwise, Prolate
from adammcmc.kernels.scaling import Scaling
from adammcmc.target.leaves import Leaves

__all__ = ["has_one_pass", "one_pass"]


def has_one_pass(kernel: Any) -> bool:
    """Whether there is one for this kernel."""
    if isinstance(kernel, AdamMCMCKernel):  # of these very types: a subclass may draw other noise
        return type(kernel.direction) is Adam and type(kernel.proposal) in (Prolate, Elementwise)
    is_plain = type(kernel) is UnderdampedKernel and kernel.num_leapfrog == 1 and kernel.num_chances == 1
    return is_plain and kernel.acceptance.needs_noise and not isinstance(kernel.preconditioner, Scaling)


def one_pass(kernel: Any, params: Leaves, copy: Leaves, memory: Any) -> Any:
    """The backend of a kernel for these leaves, (chains, ...), contiguous float32. Needs Triton.

    Args:
        kernel: for which `has_one_pass`.
        params: where the chains are; overwritten by proposals.
        copy: memory for the current point.
        memory: of Adam's moments, which are overwritten from now on; not used by other kernels.
    """
    if isinstance(kernel, AdamMCMCKernel):
        from adammcmc.backends.triton_adam import OnePassAdam

        return OnePassAdam(params, copy, memory, elementwise=isinstance(kernel.proposal, Elementwise))
    from adammcmc.backends.triton_underdamped import OnePassUnderdamped

    return OnePassUnderdamped(params, copy, tuple(torch.zeros_like(x) for x in params), kernel.preconditioner)
