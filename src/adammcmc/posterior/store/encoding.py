"""Tensors and nested states as bytes, without pickle: safetensors for tensors, JSON for the rest."""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils import _pytree

from adammcmc.posterior.store.atomic import checksum, whole, write_parts

__all__ = [
    "HostCopies", "Tensors", "can_store", "decode", "encode", "plain_json", "read_state", "safetensors_parts", "stored_dtype",
    "strict_json", "write_state",
]  # fmt: skip

Tensors = Mapping[str, Tensor]


def encode(state: Any) -> tuple[str, dict[str, Tensor]]:
    """A nested state of numbers, strings, lists, tuples, dictionaries and tensors as JSON, with its tensors by name.

    Example:
        >>> text, tensors = encode({"a": (1, None), 7: torch.ones(2)})
        >>> decode(text, tensors)
        {'a': (1, None), 7: tensor([1., 1.])}
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, where: str) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, Tensor):
            name = where.lstrip("/") or "tensor"
            if name in tensors:  # the number 1 and the string "1"
                name = f"{name}#{len(tensors)}"
            tensors[name] = value.detach()
            return {"tensor": name}
        if isinstance(value, list):
            return [walk(item, f"{where}/{i}") for i, item in enumerate(value)]
        if isinstance(value, tuple):
            return {"tuple": [walk(item, f"{where}/{i}") for i, item in enumerate(value)]}
        if isinstance(value, Mapping):
            return {"dict": [[walk(key, where), walk(item, f"{where}/{key}")] for key, item in value.items()]}
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, np.ndarray) and value.dtype != object:
            return {"array": walk(torch.from_numpy(value.copy()), where)}
        raise TypeError(f"'{where}' is a {type(value).__name__}, which cannot be saved without pickle.")

    return json.dumps(walk(state, ""), allow_nan=False), tensors


def decode(text: str, tensors: Tensors) -> Any:
    """The inverse of `encode`."""

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        return readers[kind](content)

    readers: dict[str, Callable[[Any], Any]] = {
        "float": float,
        "tensor": tensors.__getitem__,
        "bytes": base64.b64decode,
        "tuple": lambda items: tuple(map(walk, items)),
        "array": lambda item: walk(item).numpy(),
        "dict": lambda pairs: {walk(key): walk(item) for key, item in pairs},
    }
    return walk(json.loads(text))


def write_state(path: Path, state: Any, what: str) -> None:
    """Write a nested state as one safetensors file with a checksum, atomically; `what` goes into its header."""
    text, tensors = encode(state)
    with whole(path) as file, file.open("wb", buffering=0) as written:
        write_parts(written, safetensors_parts(tensors, {"what": what, "state": text}))


def read_state(path: Path, *, may_be_link: bool = True) -> Any:
    """The inverse of `write_state`. A damaged file, or one without a checksum, raises a ValueError with the reason.

    Args:
        path: the file.
        may_be_link: follow a symbolic link.
    """
    computed, written = checksum(path, may_be_link=may_be_link)
    if written is None:
        raise ValueError("it has no checksum")
    if written != computed:
        raise ValueError("its content does not match its checksum")
    try:
        with safe_open(path, framework="pt") as content:
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
            return decode(content.metadata()["state"], tensors)
    except (SafetensorError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def safetensors_parts(tensors: Tensors, metadata: dict[str, str], *, dtype: str | None = None) -> Iterator[bytes | memoryview]:
    """The parts of a safetensors file, header first: one tensor on the host at a time, without a copy if it is there.

    The package's own writer copies everything twice. At each draw of a large model that costs time, and memory that the
    allocator never returns. `dtype` is for floating-point tensors. The header has space for the file's own checksum, which
    `write_parts` fills in.
    """
    kinds = {name: stored_dtype(x, dtype) for name, x in tensors.items()}
    if (other := next((kind for kind in kinds.values() if kind not in _NAMES), None)) is not None:
        raise TypeError(f"a tensor of {other} cannot be stored.")
    order = sorted(tensors, key=lambda name: (-kinds[name].itemsize, name))  # aligns numbers to their size
    header: dict[str, Any] = {"__metadata__": {"crc32": "0" * 8, "format": "2", **metadata}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].numel() * kinds[name].itemsize
        header[name] = {"dtype": _NAMES[kinds[name]], "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        if tensors[name].numel() > 0:
            host = tensors[name].detach().to("cpu", kinds[name]).contiguous()
            yield memoryview(cast(Any, host.reshape(-1).view(torch.uint8).numpy()))


_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def can_store(dtype: torch.dtype) -> bool:
    """Whether safetensors supports this dtype."""
    return dtype in _NAMES


def stored_dtype(x: Tensor, dtype: str | None) -> torch.dtype:
    """Of a tensor in a draw: the given one (None: its own) if it is a floating-point tensor."""
    kind: torch.dtype = getattr(torch, dtype) if dtype is not None and x.is_floating_point() else x.dtype
    return kind


class HostCopies:
    """Copies of nested tensors on the host, in pinned memory that is allocated once; valid until the next call."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def __call__(self, tree: Any) -> Any:
        """All tensors of the tree, copied, with one synchronization."""
        number, device = itertools.count(), torch.device("cpu")

        def copy(x: Tensor) -> Tensor:
            nonlocal device
            if x.device.type == "cpu":
                return x.detach().clone()
            device = x.device
            return self._buffer(next(number), x).copy_(x.detach(), non_blocking=True)

        copies = _pytree.tree_map_only(Tensor, copy, tree)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _buffer(self, number: int, like: Tensor) -> Tensor:
        if number == len(self._buffers):
            self._buffers.append(torch.empty(0))
        known = self._buffers[number]
        if known.shape != like.shape or known.dtype != like.dtype:
            pin = like.device.type == "cuda"
            self._buffers[number] = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pin)
        return self._buffers[number]


def strict_json(value: Any) -> Any:
    """With None for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [strict_json(item) for item in value]
    return value


def plain_json(value: Any) -> Any:
    """Numbers, strings and lists as JSON returns them; anything else as a string."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [plain_json(item) for item in value]
    return str(value)
