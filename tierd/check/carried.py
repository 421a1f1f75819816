"""Find the names by which a user's code carries a value from one step to the next.

A variable is carried if the body of a loop reads it before it sets it; an attribute, or a variable of another scope, if
a function does. What is set before each read follows from other values, and so is no state.

Invariant: code is read and never run. Branches count in the order of the text, and equal names of different scopes are
one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import lru_cache

from tierd.check.places import read_source, users_files
from tierd.check.usage import COLLECT

_MUTATORS = COLLECT | {"pop", "popleft", "insert", "remove"}


def carried() -> list[str]:
    """Return the names of variables and attributes in the user's modules that carry values between steps."""
    return list(_carried_names(users_files()))


def name_of(path: str) -> str:
    """Return the variable or the attribute in which the value at `path` is."""
    return path.split("[")[0].replace(" ", ".").rsplit(".", 1)[-1]


@lru_cache(maxsize=16)
def _carried_names(files: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted({name for file in files for name in _names_in_file(file)}))


@lru_cache(maxsize=256)
def _names_in_file(file: str) -> frozenset[str]:
    return read_source(file, _names_in_code, frozenset())  # without a source nothing is known to be carried


def carried_in(source: str) -> frozenset[str]:
    """Return the names that carry values between steps in a source text."""
    return _names_in_code(ast.parse(source))


def _names_in_code(code: ast.Module) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(code):
        if isinstance(node, ast.While):
            names |= _AccessOrder(node.test, *node.body).carried
        elif isinstance(node, ast.For | ast.AsyncFor):
            names |= _AccessOrder(node.target, *node.body).carried
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            scopes = [inner for inner in ast.walk(node) if isinstance(inner, ast.Global | ast.Nonlocal)]
            outer = {name for scope in scopes for name in scope.names}
            names |= {name for name in _AccessOrder(*node.body).carried if name in outer or name[0] == "."}
    return frozenset(name.removeprefix(".") for name in names)


class _AccessOrder(ast.NodeVisitor):
    """Records whether each name is read or set first, as the code is run; attributes begin with a point."""

    def __init__(self, *nodes: ast.AST) -> None:
        self._first_access: dict[str, str] = {}
        self._assigned: set[str] = set()
        self._mutated: set[str] = set()  # in part
        self._read: set[str] = set()
        self._visit_all(nodes)

    @property
    def carried(self) -> set[str]:
        read_first = {name for name, how in self._first_access.items() if how == "read"}
        return read_first & (self._assigned | (self._mutated & self._read))

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _record_name(self, name: str, context: ast.expr_context) -> None:
        self._first_access.setdefault(name, "read" if isinstance(context, ast.Load) else "set")
        (self._read if isinstance(context, ast.Load) else self._assigned).add(name)

    def visit_Name(self, node: ast.Name) -> None:
        self._record_name(node.id, node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        self._record_name(f".{node.attr}", node.ctx)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.slice)
        if isinstance(node.ctx, ast.Load):
            self.visit(node.value)
        else:
            self._record_change(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and (node.func.attr in _MUTATORS or node.func.attr[-1:] == "_"):
            self._record_change(node.func.value)
        else:
            self.visit(node.func)
        self._visit_all([*node.args, *node.keywords])

    def _record_change(self, node: ast.expr, also_sets: bool = False) -> None:
        """Visit what is changed in part, so that its rest stays from the step before, or by its own value."""
        while isinstance(node, ast.Subscript):
            self.visit(node.slice)
            node = node.value
        if isinstance(node, ast.Attribute):
            self.visit(node.value)
        elif not isinstance(node, ast.Name):
            self.visit(node)
            return
        name = f".{node.attr}" if isinstance(node, ast.Attribute) else node.id
        self._first_access.setdefault(name, "read")
        self._mutated.add(name)
        if also_sets:
            self._assigned.add(name)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._visit_all([node.value, *node.targets])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_all([*filter(None, (node.value, node.target))])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self._record_change(node.target, also_sets=True)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._visit_all([node.iter, node.target, *node.body, *node.orelse])

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self._visit_all([*node.generators, node.elt])

    visit_AsyncFor = visit_For  # noqa: N815 (ast names it)
    visit_SetComp = visit_GeneratorExp = visit_ListComp  # noqa: N815

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._visit_all([*node.generators, node.key, node.value])

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._visit_all([node.iter, node.target, *node.ifs])
