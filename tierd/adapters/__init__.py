"""tierd under other people's training loops: `lightning`, `transformers`, `keras`, `dali`.

Law: none of these frameworks is a dependency. Each module imports its own when it is imported itself, and only then;
nothing else of tierd imports these modules.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from tierd.core.errors import ConfigError


def framework(module: str, package: str) -> ModuleType:
    """The framework's module.

    Raises:
        ConfigError: it cannot be imported; says which package provides it, and why not.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{module} cannot be imported ({error}): pip install {package}") from error
