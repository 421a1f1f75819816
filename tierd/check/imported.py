"""Call a function right after a module was imported, without importing it.

Invariant: a loop that never imports the module has no cost.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _CallbackLoader(Loader):
    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._on_import = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        # Restore the original loader, so that the module shows no trace of this one.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._on_import(module)


class _ImportHook(MetaPathFinder):
    def __init__(self, then: dict[str, Callable[[ModuleType], None]]) -> None:
        self._on_import = then

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        then = self._on_import.pop(name, None)
        if then is None:
            return None
        spec = importlib.util.find_spec(name)  # asks the other finders, because this one has just removed the name
        if spec is not None and spec.loader is not None:
            spec.loader = _CallbackLoader(spec.loader, then)
        return spec


def once_imported(then: dict[str, Callable[[ModuleType], None]]) -> None:
    """Call `then[name]` with the module as soon as it is imported; at once if it is already imported."""
    missing = {}
    for name, call in then.items():
        if (module := sys.modules.get(name)) is not None:
            call(module)
        else:
            missing[name] = call
    if missing:
        sys.meta_path.insert(0, _ImportHook(missing))
