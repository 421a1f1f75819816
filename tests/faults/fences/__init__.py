"""Fences: one for each promise that tierd keeps by a few lines of code. Each says how to break it, and what finds it.

A fence names a function and an edit of its syntax tree (`edits.py`), so it survives a move of the function and most
changes of its lines. One module holds the fences of one subject.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from faults.fences.edits import Edit, Function, Misfit

_SUBJECTS = ("durability", "verification", "deletion", "resume", "failure", "secrecy", "bounds", "watching")

KINDS = {
    "fsync": "bytes or a directory's entry are not made durable",
    "order": "two steps change places, or one is left out between them",
    "verification": "bytes are used without a comparison with their digest, or their own end",
    "comparison": "two things that must agree are not compared",
    "deletion": "something that a reader or a restore needs is deleted, moved or overwritten",
    "lock": "two writers are let in where one is allowed",
    "error": "an error is taken for an absence, for corruption, or for success",
    "clock": "a decision trusts one wall clock",
    "secret": "a secret, or another user's access, is not kept apart",
    "unpickling": "metadata is executed or trusted",
    "path": "a path or a link leads out of its directory",
    "bound": "input takes as much memory, time or room as it likes",
    "report": "a loss, or a failure, is not reported",
}


@dataclass(frozen=True)
class Fence:
    """One promise, and one way to break it, which `by` must find.

    Attributes:
        name: the fault, in words.
        promise: the page and section that promises it, such as `SECURITY.md#reporting`; an invariant of ARCHITECTURE.md
            has its number, as in `ARCHITECTURE.md#invariants-7`.
        kind: of the fault; a key of `KINDS`.
        function: its qualified name, such as `Stage.commit`; with its package or module before a colon, as in
            `codec:decode`, where several have that name.
        edit: how the function is made wrong.
        by: the arguments of a short run of a kit, or `pytest` and its arguments.
        reported: a part of what a kit says of its loss, or one of several between bars, because nothing else that is
            red may be taken for it.
    """

    name: str
    promise: str
    kind: str
    function: str
    edit: Edit
    by: str
    reported: str = ""


def collect() -> tuple[Fence, ...]:
    """Every fence, by subject."""
    return tuple(fence for subject in _SUBJECTS for fence in importlib.import_module(f"{__name__}.{subject}").FENCES)


def planted(fence: Fence, root: Path) -> tuple[Path, str]:
    """The file below `root` that has the fence's function, and its text with the fence taken down.

    Raises:
        Misfit: no function or several have that name, or the edit does not fit it or changes nothing.
    """
    package, _, name = fence.function.rpartition(":")
    places = [
        (path, tree, function)
        for path in _definitions(root).get(name.rpartition(".")[2], ())
        if package in ("", *_packages(path, root))
        for tree in (ast.parse(path.read_text()),)
        for own, function in _functions(tree)
        if own == name
    ]
    if len(places) != 1:
        raise Misfit(f"fence {fence.name!r}: {len(places)} functions are called {fence.function}")
    path, tree, function = places[0]
    before = ast.unparse(function)
    try:
        fence.edit.apply(function)
    except Misfit as error:
        raise Misfit(f"fence {fence.name!r} of {fence.function}: {error}") from None
    if ast.unparse(function) == before:
        raise Misfit(f"fence {fence.name!r} of {fence.function} changes nothing")
    return path, ast.unparse(ast.fix_missing_locations(tree)) + "\n"


@functools.cache
def _definitions(root: Path) -> dict[str, list[Path]]:
    """The files that define a function, by its name without its scope, because to parse all of them takes seconds."""
    files: dict[str, list[Path]] = defaultdict(list)
    for path in sorted((root / "tierd").rglob("*.py")):
        for name in set(re.findall(r"\bdef (\w+)\(", path.read_text())):
            files[name].append(path)
    return files


def _packages(path: Path, root: Path) -> tuple[str, str]:
    """A file's module and its package, below `tierd`."""
    module = ".".join(path.relative_to(root / "tierd").with_suffix("").parts)
    return module, module.rpartition(".")[0]


def _functions(tree: ast.AST, scope: str = "") -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield scope + node.name, node
        named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _functions(node, f"{scope}{node.name}." if named else scope)
