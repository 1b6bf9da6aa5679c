"""The modules that a loss calls: their modes, buffers and random numbers, found by watching; and `check_closure`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from adammcmc.samplers.processes import check_module

__all__ = ["BatchNormPolicy", "BufferKey", "ClosureReport", "Seen", "buffer", "check_closure", "is_equal", "restored", "watch"]

BatchNormPolicy = Literal["batch", "frozen"]
BufferKey = tuple[nn.Module, str]
_LOW = (torch.bfloat16, torch.float16)


@dataclass
class Seen:
    """The modules that were called and all modules inside them, with their buffers as they were before the call."""

    modules: dict[nn.Module, bool] = field(default_factory=dict)
    """Whether each was in training mode."""
    buffers: dict[BufferKey, Tensor] = field(default_factory=dict)
    calls: dict[nn.Module, int] = field(default_factory=dict)
    """How often each was called itself; of a compiled model only the outermost."""
    frozen: list[nn.Module] = field(default_factory=list)
    """BatchNorm layers in training mode that ran on their running statistics."""
    draws_numbers: bool = False
    """Whether torch's random numbers were used."""
    draws_on_host: bool = False
    """Whether those of the CPU were, which no graph can replay."""
    reduced: dict[str, None] = field(default_factory=dict)
    """Kinds of arithmetic below float32."""
    is_complete: bool = False
    """Whether a whole evaluation was watched."""

    def names(self, modules: Sequence[nn.Module]) -> list[str]:
        """The modules as the outermost one names them, with their class."""
        roots = reversed(self.modules) if modules else ()  # the outermost name is the last to be written
        paths = {part: name.removeprefix("_orig_mod.") for root in roots for name, part in root.named_modules()}
        return [f"'{paths[m]}' ({_kind(m)})" if paths.get(m) else _kind(m) for m in modules]

    def moved(self) -> list[BufferKey]:
        """The buffers that have changed, by their values: BatchNorm leaves version counters alone."""
        return [key for key, before in self.buffers.items() if not is_equal(buffer(key), before)]

    def put_back(self) -> None:
        """Restore all buffers."""
        for key, before in self.buffers.items():
            buffer(key).data.copy_(before)  # past autograd: a graph that is differentiated later saved the same values

    def dropouts(self) -> list[nn.Module]:
        """The active dropout layers."""
        return [m for m, training in self.modules.items() if training and "Dropout" in _kind(m) and getattr(m, "p", 1) > 0]

    def batch_norms(self) -> list[nn.Module]:
        """The BatchNorm layers that use batch statistics: in training mode, or without running statistics."""
        norms = [m for m in self.modules if is_batch_norm(m) and m not in self.frozen]
        return [m for m in norms if self.modules[m] or getattr(m, "running_mean", None) is None]

    def kept_norms(self) -> list[_BatchNorm]:
        """Those that evaluation mode can reproduce: torch's own, with running statistics."""
        return [m for m in self.batch_norms() if isinstance(m, _BatchNorm) and m.running_mean is not None]

    def lost_norms(self, num_micro_batches: int) -> list[nn.Module]:
        """The layers that normalise differently in evaluation mode, whatever their buffers hold."""
        kept = {m for m in self.kept_norms() if self.calls.get(m, 0) <= num_micro_batches}  # one call, one pair
        instances = [m for m, training in self.modules.items() if training and isinstance(m, _InstanceNorm)]
        return [m for m in self.batch_norms() if m not in kept] + [m for m in instances if m.running_mean is not None]


@contextmanager
def watch(policy: BatchNormPolicy, device: torch.device) -> Iterator[Seen]:
    """Record the modules that are called inside."""
    seen = Seen()

    def before(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # a compiled model is seen from outside
        if torch.is_autocast_enabled(device.type):  # (a module may enable it inside)
            seen.reduced[str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")] = None
        if torch._C._current_graph_task_id() == -1:  # not recomputed in a backward pass (checkpointing)
            seen.calls[module] = seen.calls.get(module, 0) + 1
        if module in seen.modules:
            return
        for part in module.modules():
            if part in seen.modules:
                continue
            check_module(part)
            seen.reduced |= dict.fromkeys(_reduced(part, device))
            seen.modules[part] = part.training
            for key, value in part.named_buffers(recurse=False):
                seen.buffers[part, key] = value.detach().clone()
            if policy == "frozen" and is_batch_norm(part) and part.training:
                part.training = False
                seen.frozen.append(part)

    hook = register_module_forward_pre_hook(before)
    numbers = random_state(device)
    try:
        with warnings.catch_warnings():
            # torch warns that global hooks of compiled modules may fire twice, which is harmless here
            warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
            yield seen
        seen.is_complete = True
    finally:
        hook.remove()
        moved = [not torch.equal(a, b) for a, b in zip(numbers, random_state(device), strict=True)]
        seen.draws_numbers, seen.draws_on_host = any(moved), moved[0]
        for module in seen.frozen:
            module.training = True


def _reduced(module: nn.Module, device: torch.device) -> list[str]:
    """Kinds of arithmetic below float32 that this module itself computes in, as far as it shows."""
    low = [str(p.dtype).removeprefix("torch.") for p in module._parameters.values() if p is not None and p.dtype in _LOW]
    if isinstance(module, _ConvNd) and device.type == "cuda" and torch.backends.cudnn.allow_tf32:
        low.append("TF32")
    if isinstance(module, nn.Linear) and torch.get_float32_matmul_precision() != "highest":
        low.append("TF32" if device.type == "cuda" else "reduced float32")
    return low


def _kind(module: nn.Module) -> str:
    return str(getattr(module, "original_name", type(module).__name__))  # a scripted module hides its class


def is_batch_norm(module: nn.Module) -> bool:
    """Whether it is a BatchNorm, torch's or one of that name."""
    return isinstance(module, _BatchNorm) or "BatchNorm" in _kind(module)


def buffer(key: BufferKey) -> Tensor:
    """The present value of a buffer."""
    value = getattr(*key)
    assert isinstance(value, Tensor)
    return value


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two buffers agree bit for bit."""
    return a.shape == b.shape and a.device == b.device and bool(torch.equal(a.detach(), b))


def model_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers, each once, including those that the state dictionary leaves out."""
    return [*model.named_parameters(), *model.named_buffers()]


@torch.no_grad()
def write_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write all parameters and buffers."""
    for name, x in model_tensors(model):
        if name not in values:
            continue  # a buffer that a forward pass created
        if x.is_contiguous() or isinstance(x, nn.Parameter):
            x.copy_(values[name])
            continue
        owner, _, last = name.rpartition(".")  # a view that cannot be written to, such as an expanded number
        model.get_submodule(owner)._buffers[last] = values[name].to(x.device).clone()


def random_state(device: torch.device) -> list[Tensor]:
    """The states of torch's generators, of the CPU and of the device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    """Restore them."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


@contextmanager
def restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores weights, buffers, gradients, modes and torch's global random numbers at the end."""
    before = {name: x.detach().clone() for name, x in model_tensors(model)}
    absent = [(module, name) for module in model.modules() for name, x in module._buffers.items() if x is None]
    grads = [(p, p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            for p, grad in grads:
                p.grad = grad
            for module, name in absent:
                module._buffers[name] = None
            write_tensors(model, before)


class ClosureReport(NamedTuple):
    """What two calls of a closure at the same weights returned."""

    losses: tuple[float, float]
    """Mean loss of each call."""
    is_deterministic: bool
    """Whether the two calls agreed bit for bit."""
    random_layers: list[str]
    """Active dropout layers."""
    batch_layers: list[str]
    """BatchNorm layers that use batch statistics."""
    moved_buffers: list[str]
    """Buffers that a call changes."""

    def __str__(self) -> str:
        first, second = self.losses
        calls = "agree bit for bit" if self.is_deterministic else f"differ: {first:.8g} and {second:.8g}"
        named = {
            "random at each call": self.random_layers,
            "use batch statistics": self.batch_layers,
            "changed by a call": self.moved_buffers,
        }
        lines = [f"{words}: {', '.join(names)}" for words, names in named.items() if names]
        return "; ".join([f"two calls at the same weights {calls}", *lines])


def check_closure(closure: Callable[[], Tensor] | Sequence[Callable[[], Tensor]]) -> ClosureReport:
    """Call the closure (or list of closures) twice at the same weights, and name the layers that make a difference.

    Buffers are restored; a closure that calls `backward` itself leaves its gradients.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        >>> x = torch.randn(8, 3)
        >>> report = check_closure(lambda: model(x).square().mean())
        >>> report.is_deterministic, report.random_layers
        (False, ["'1' (Dropout)"])
    """
    with watch("batch", torch.device("cuda" if torch.cuda.is_available() else "cpu")) as seen:
        closures = [closure] if callable(closure) else list(closure)
        first, second = (torch.cat([c().detach().clone().reshape(-1) for c in closures]) for _ in range(2))
    moved = seen.moved()
    seen.put_back()
    return ClosureReport(
        (float(first.double().mean()), float(second.double().mean())),
        first.shape == second.shape and bool(torch.equal(first, second)),
        seen.names(seen.dropouts()),
        seen.names(seen.batch_norms()),
        [f"{name}.{key}" for name, (_, key) in zip(seen.names([module for module, _ in moved]), moved, strict=True)],
    )
