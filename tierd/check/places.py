"""Record where a loop creates its objects, and tell the user's own code from libraries."""

from __future__ import annotations

import ast
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, wraps
from multiprocessing import active_children
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

from tierd.check.imported import once_imported

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
def is_users(file: str) -> bool:
    """Return whether code is neither in Python's library, nor in an installed package, nor in tierd.

    Packages are also installed outside of this interpreter's directories: for the user, for the system, or in the
    environment below a virtual one. They all lie in a directory of one of two names.
    """
    return not file.startswith(_library_prefixes()) and _PACKAGES.isdisjoint(Path(file).parts)


def is_alone(value: object) -> bool:
    """Return whether the position of `value` depends on the steps alone.

    It does if `value` is of the user's own code, and no thread or process reads ahead.
    """
    module = sys.modules.get(type(value).__module__)
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    foreign_threads = [thread for thread in threads if not _is_tierds(thread)]
    return is_users(getattr(module, "__file__", None) or "<builtin>") and not foreign_threads and not active_children()


def _is_tierds(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    names = (type(thread).__module__, getattr(target, "__module__", None) or "", thread.name)
    return any(name.startswith("tierd") for name in names)


def users_modules() -> tuple[ModuleType, ...]:
    """Return the modules of the user's own code that are imported."""
    return _users_modules(frozenset(sys.modules))


def users_files() -> frozenset[str]:
    """Return the files of these modules."""
    return frozenset(str(module.__file__) for module in users_modules())


def read_source(file: str, read: Callable[[ast.Module], _T], otherwise: _T) -> _T:
    """Return what `read` makes of the code of a file; `otherwise` if it has no source that can be read."""
    try:
        return read(ast.parse(Path(file).read_text()))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return otherwise


@lru_cache(maxsize=1)  # because a framework has thousands, and each capture asks
def _users_modules(_names: frozenset[str]) -> tuple[ModuleType, ...]:
    return tuple(module for module in list(sys.modules.values()) if is_users(getattr(module, "__file__", None) or "<"))


@cache
def _library_prefixes() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return ("<", _TIERD_DIRECTORY, *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")))


class ObjectPlaces:
    """Records where objects were created, for classes whose constructors can be wrapped."""

    def __init__(self) -> None:
        # By id, because a class may have a hash that fails before its constructor has ended.
        self._creations: dict[int, tuple[int, str]] = {}
        self._count = 0

    def hook(self) -> None:
        """Begin to record where modules, optimizers, schedulers and scalers are created."""

        def wrap(name: str) -> Callable[[ModuleType], None]:
            return lambda module: self._wrap(getattr(module, name))

        once_imported({module: wrap(name) for module, name in _HOOKED_CLASSES.items()})

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

    def of(self, instance: object) -> tuple[int, str]:
        """Return the object's number in order of creation, and `file:line`; (0, "") if neither was recorded."""
        return self._creations.get(id(instance), (0, ""))


def users_frames(limit: int = sys.maxsize) -> Iterator[FrameType]:
    """Yield the calls of the user's own functions among the `limit` innermost that are under way, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(limit):
        if frame is None:
            return
        if is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _users_caller(frame: FrameType | None, instance: object) -> str:
    while frame is not None:
        if is_users(frame.f_code.co_filename) and not any(value is instance for value in frame.f_locals.values()):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
