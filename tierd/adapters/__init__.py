"""Adapters that run tierd inside other training loops: `accelerate`, `lightning`, `transformers`, `torchtitan`,
`keras`, `dali`.

`trainable` needs torch alone.

Invariant: none of these frameworks is a dependency of tierd. Each module imports its framework when it is itself
imported, and no other module of tierd imports these modules.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def framework(module: str, package: str, advice: str = "") -> ModuleType:
    """Import a framework's module. `ImportError` names the package that provides it, the reason, and `advice`."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} cannot be imported ({error}): pip install {package}{advice}") from error
