"""Find the names in a user's code whose values go into nothing but logs.

Sums for a log are lost at many resumes, and change nothing, so that a capture leaves them out.

Invariant: code is read and never run. A name counts as used in any doubt; equal names in different scopes are one.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from types import ModuleType

from tierd.check.places import read_source, users_files, users_modules

_LOG_CALLS = frozenset({"print", "log", "log_dict", "log_metrics", "info", "debug", "warning", "write", "observe"})
_MORE_LOG_CALLS = frozenset({"set_postfix", "set_description", "add_scalar", "add_scalars", "writerow"})
COLLECT = frozenset({"append", "appendleft", "extend", "add", "update", "clear"})
# Functions and methods that give a value made of their arguments, and do nothing else.
_PURE_FUNCTIONS = frozenset(
    {"sum", "len", "min", "max", "float", "int", "str", "round", "abs", "sorted", "list", "tuple", "mean", "item"}
    | {"detach", "cpu", "tolist", "numpy", "clone", "sqrt", "exp", "format", "join", "stack", "tensor"}
)


class _NameUses(ast.NodeVisitor):
    """Records which names are used, and into which other names the values of names go."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.into: defaultdict[str, set[str]] = defaultdict(set)
        self.assigned: set[str] = set()
        self.set_elsewhere: set[str] = set()
        self._targets: set[str] | None = None  # of the values that are visited; None: they are used

    def _record_name(self, name: str) -> None:
        if self._targets is None:
            self.used.add(name)
        else:
            self.into[name] |= self._targets

    def _visit_values(self, nodes: Iterable[ast.AST], targets: set[str] | None) -> None:
        before, self._targets = self._targets, targets
        for node in nodes:
            self.visit(node)
        self._targets = before

    def visit_Name(self, node: ast.Name) -> None:
        self._record_name(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._record_name(node.attr)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        arguments = [*node.args, *node.keywords]
        if _target_name(node.func) in _PURE_FUNCTIONS:
            inside = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            for part in (*inside, *arguments):
                self.visit(part)
        else:
            self._visit_values([node.func, *arguments], None)

    def visit_If(self, node: ast.If) -> None:
        if all(map(_is_log, [*node.body, *node.orelse])):  # what decides when to log is in no more than a log
            self._visit_values([node.test], set())
            self._visit_values([*node.body, *node.orelse], self._targets)
        else:
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Call) and _is_log(node):
            self._visit_values([*call.args, *call.keywords], set())
        elif isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in COLLECT:
            name = _target_name(call.func.value)
            self.assigned.add(name)
            self._visit_values([*call.args, *call.keywords], {name} if name else None)
        else:
            self._visit_values([call], None)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._record_assignment(node.targets, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._record_assignment([node.target], node.value)
        self.into[_target_name(node.target)] |= set()  # read, too

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._record_assignment([node.target], node.value)

    def _record_assignment(self, targets: list[ast.expr], value: ast.expr | None) -> None:
        flat = [part for target in targets for part in _split_target(target)]
        names = {_target_name(target) for target in flat if _is_local_target(target)}
        self.assigned |= names
        self.set_elsewhere |= {
            part.attr for part in flat if isinstance(part, ast.Attribute) and not _is_local_target(part)
        }
        if value is not None:  # another object's attribute may be read by a library
            self._visit_values([value], names if all(map(_is_local_target, flat)) else None)
        for target in flat:
            while isinstance(target, ast.Subscript | ast.Attribute):  # which item, and of which object
                self._visit_values([target.slice] if isinstance(target, ast.Subscript) else [], None)
                target = target.value


def _is_log(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and _target_name(call.func) in _LOG_CALLS | _MORE_LOG_CALLS


def _split_target(target: ast.expr) -> list[ast.expr]:
    return target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def _is_local_target(target: ast.AST) -> bool:
    """Return whether a target is a variable, an attribute of `self`, or an item of one of them."""
    while isinstance(target, ast.Subscript):
        target = target.value
    if isinstance(target, ast.Attribute):
        return isinstance(target.value, ast.Name) and target.value.id == "self"
    return isinstance(target, ast.Name)


def _target_name(node: ast.AST) -> str:
    """Return the name of a variable or an attribute, of which an item may be meant; empty if it has none."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@lru_cache(maxsize=256)
def _name_uses(file: str) -> _NameUses:
    return read_source(file, _visit_code, _NameUses())  # without a source nothing is known to be unused


def _visit_code(code: ast.Module) -> _NameUses:
    reads = _NameUses()
    reads.visit(code)
    return reads


def set_elsewhere() -> frozenset[str]:
    """Return the attributes that the user's modules set of objects other than `self`."""
    return _set_elsewhere(users_modules())


def only_logged() -> frozenset[str]:
    """Return the names of variables and attributes that the user's modules set, and of which nothing but a log has."""
    return _only_logged(users_files())


@lru_cache(maxsize=1)  # because a capture asks for each object
def _set_elsewhere(modules: tuple[ModuleType, ...]) -> frozenset[str]:
    return frozenset(name for module in modules for name in _name_uses(str(module.__file__)).set_elsewhere)


@lru_cache(maxsize=16)
def _only_logged(files: frozenset[str]) -> frozenset[str]:
    all_reads = [_name_uses(file) for file in files]
    used = {name for reads in all_reads for name in reads.used}
    into: defaultdict[str, set[str]] = defaultdict(set)
    for reads in all_reads:
        for name, targets in reads.into.items():
            into[name] |= targets - {name}
    rising = True
    while rising:
        added = {name for name, targets in into.items() if name not in used and targets & used}
        used |= added
        rising = bool(added)
    # A name that no code reads is not of a log: a library may read it.
    return frozenset({name for reads in all_reads for name in reads.assigned} & into.keys() - used - {""})
