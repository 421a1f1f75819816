"""Tell the user's own code from libraries, call back when a module is imported, and record where objects are created.

Invariant: a loop that never imports a module has no cost of waiting for it.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import active_children
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar


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


def call_on_import(then: dict[str, Callable[[ModuleType], None]]) -> None:
    """Call `then[name]` with the module as soon as it is imported; at once if it is already imported."""
    missing = {}
    for name, call in then.items():
        if (module := sys.modules.get(name)) is not None:
            call(module)
        else:
            missing[name] = call
    if missing:
        sys.meta_path.insert(0, _ImportHook(missing))


_T = TypeVar("_T")
_TIERD_DIRECTORY = str(Path(__file__).parent.parent)
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_HOOKED_CLASSES = {
    "torch.nn.modules.module": "Module",
    "torch.optim.optimizer": "Optimizer",
    "torch.optim.lr_scheduler": "LRScheduler",
    "torch.amp.grad_scaler": "GradScaler",
    "torch.utils.data.dataloader": "_BaseDataLoaderIter",
}


@cache  # the files of a process are bounded, and frameworks have thousands
def is_user_code(file: str) -> bool:
    """Return whether code is neither in Python's library, nor in an installed package, nor in tierd.

    Packages are also installed outside of this interpreter's directories: for the user, for the system, or in the
    environment below a virtual one. They all lie in a directory of one of two names.
    """
    return not file.startswith(_library_prefixes()) and _PACKAGES.isdisjoint(Path(file).parts)


def depends_on_steps_alone(value: object) -> bool:
    """Return whether the position of `value` depends on the steps alone.

    It does if `value` is of the user's own code, and no thread or process reads ahead.
    """
    module = sys.modules.get(type(value).__module__)
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    foreign_threads = [thread for thread in threads if not _is_tierds(thread)]
    return (
        is_user_code(getattr(module, "__file__", None) or "<builtin>") and not foreign_threads and not active_children()
    )


def _is_tierds(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    names = (type(thread).__module__, getattr(target, "__module__", None) or "", thread.name)
    return any(name.startswith("tierd") for name in names)


def user_modules() -> tuple[ModuleType, ...]:
    """Return the modules of the user's own code that are imported."""
    return _users_modules(frozenset(sys.modules))


def user_files() -> frozenset[str]:
    """Return the files of these modules."""
    return frozenset(str(module.__file__) for module in user_modules())


def read_source(file: str, read: Callable[[ast.Module], _T], otherwise: _T) -> _T:
    """Return what `read` makes of the code of a file; `otherwise` if it has no source that can be read."""
    try:
        return read(ast.parse(Path(file).read_text()))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return otherwise


@lru_cache(maxsize=1)  # because a framework has thousands, and each capture asks
def _users_modules(_names: frozenset[str]) -> tuple[ModuleType, ...]:
    return tuple(
        module for module in list(sys.modules.values()) if is_user_code(getattr(module, "__file__", None) or "<")
    )


@cache
def _library_prefixes() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return ("<", _TIERD_DIRECTORY, *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")))


class CreationSites:
    """Records where objects were created, for classes whose constructors can be wrapped."""

    def __init__(self) -> None:
        # By id, because a class may have a hash that fails before its constructor has ended.
        self._creations: dict[int, tuple[int, str]] = {}
        self._count = 0

    def record_creations(self) -> None:
        """Begin to record where modules, optimizers, schedulers and scalers are created."""

        def wrap(name: str) -> Callable[[ModuleType], None]:
            return lambda module: self._wrap(getattr(module, name))

        call_on_import({module: wrap(name) for module, name in _HOOKED_CLASSES.items()})

    def _wrap(self, kind: Any) -> None:
        init: Callable[..., None] = kind.__init__

        @wraps(init)
        def making(instance: Any, *args: Any, **kwargs: Any) -> None:
            init(instance, *args, **kwargs)
            try:
                weakref.finalize(instance, self._creations.pop, id(instance), None).atexit = False
            except TypeError:  # the object cannot be weakly referenced
                return
            self._count += 1
            self._creations[id(instance)] = self._count, _users_caller(sys._getframe(1), instance)

        kind.__init__ = making

    def creation_of(self, instance: object) -> tuple[int, str]:
        """Return the object's number in order of creation, and `file:line`; (0, "") if neither was recorded."""
        return self._creations.get(id(instance), (0, ""))


def user_frames(limit: int = sys.maxsize) -> Iterator[FrameType]:
    """Yield the calls of the user's own functions among the `limit` innermost that are under way, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(limit):
        if frame is None:
            return
        if is_user_code(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _users_caller(frame: FrameType | None, instance: object) -> str:
    while frame is not None:
        if is_user_code(frame.f_code.co_filename) and not any(value is instance for value in frame.f_locals.values()):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
