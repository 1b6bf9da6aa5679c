"""Public names that are imported when they are first asked for: `adammcmc --version` does not wait for torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(namespace: dict[str, Any], names: Sequence[str], rooms: Sequence[str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: the first public name that is asked for brings all of them.

    Args:
        namespace: the package's `globals()`.
        names: what the package offers, its `__all__`.
        rooms: the modules in which they live; one of these that is itself a name comes alone, since rooms import each other.
    """
    package = namespace["__name__"]

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        if name in rooms:
            return import_module(f"{package}.{name}")
        for room in rooms:
            module = import_module(f"{package}.{room}")
            namespace.update({key: getattr(module, key) for key in module.__all__ if key in names})
        return namespace[name]

    return find
