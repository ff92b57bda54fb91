"""The methods, one file each: a class with a ``name`` in a file of this folder is in ``ALGORITHMS`` by that name."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from ..core import Algorithm
from ..core.errors import nearest


def _methods() -> dict[str, type[Algorithm[Any]]]:
    """The methods of all files by their names, DuDe first."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    kinds = [(kind, module) for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    methods = {
        kind.name: kind
        for kind, module in kinds
        if issubclass(kind, Algorithm) and kind.name and kind.__module__ == module.__name__
    }
    return {name: methods[name] for name in sorted(methods, key=lambda name: (name != "dude", name))}


ALGORITHMS = _methods()
__all__ = ["ALGORITHMS", *sorted(kind.__name__ for kind in ALGORITHMS.values())]


def __getattr__(name: str) -> Any:
    """A method by the name of its class, such as ``dd.algorithms.FedFix``."""
    kinds = {kind.__name__: kind for kind in ALGORITHMS.values()}
    if name not in kinds:
        raise AttributeError(f"there is no method {name!r}; {nearest(name, kinds)}")
    return kinds[name]
