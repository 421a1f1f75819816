"""Read the source of the user's code: names that carry values between steps, and names that only logs use.

The values that a method returns go to the names that read it, unless a library may call it.

A variable is carried if the body of a loop reads it before it sets it; an attribute, or a variable of another scope, if
a function does. What is set before each read follows from other values, and so is no state. Sums for a log are lost at
many resumes, and change nothing, so that a capture leaves them out.

Invariant: code is read and never run. A name counts as used in any doubt; equal names in different scopes are one.
Branches count in the order of the text.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from types import ModuleType

from tierd.check.user_code import read_source, user_files, user_modules

_LOG_CALLS = frozenset({"print", "log", "log_dict", "log_metrics", "info", "debug", "warning", "write", "observe"})
_MORE_LOG_CALLS = frozenset({"set_postfix", "set_description", "add_scalar", "add_scalars", "writerow"})
COLLECTING_METHODS = frozenset({"append", "appendleft", "extend", "add", "update", "clear", "zero_"})
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
        self.returning: set[str] = set()  # methods into whose names the values go that they return
        self._targets: set[str] | None = None  # of the values that are visited; None: they are used
        self._is_plain_class = False
        self._method: str | None = None  # the method that is visited; None if a library may call it

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
            self._visit_values(arguments, None)
            if isinstance(node.func, ast.Attribute):
                self._record_name(node.func.attr)
                self._visit_values([node.func.value], None)
            else:
                self._visit_values([node.func], None)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = self._is_plain_class
        self._is_plain_class = not (node.bases or node.keywords or node.decorator_list)
        self.generic_visit(node)
        self._is_plain_class = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before = self._method
        is_read = self._is_plain_class and all(_target_name(one) == "property" for one in node.decorator_list)
        self._method = node.name if is_read and not node.name.startswith("__") else None
        self.generic_visit(node)
        self._method = before

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 (ast names it)

    def visit_Return(self, node: ast.Return) -> None:
        self.returning |= {self._method} if self._method else set()
        self._visit_values(filter(None, [node.value]), {self._method} if self._method else None)

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
        elif (
            isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in COLLECTING_METHODS
        ):
            name = _target_name(call.func.value)
            self.assigned.add(name)
            self._visit_values([*call.args, *call.keywords], {name} if name else None)
            self._visit_place(call.func.value)
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
            self._visit_place(target)

    def _visit_place(self, target: ast.expr) -> None:
        """Visit what decides which item is set, and of which object."""
        while isinstance(target, ast.Subscript | ast.Attribute):
            self._visit_values([target.slice] if isinstance(target, ast.Subscript) else [], None)
            target = target.value
        if not isinstance(target, ast.Name):
            self._visit_values([target], None)


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


def attributes_set_on_others() -> frozenset[str]:
    """Return the attributes that the user's modules set of objects other than `self`."""
    return _set_elsewhere(user_modules())


def log_only_names() -> frozenset[str]:
    """Return the names of variables and attributes that the user's modules set, and of which nothing but a log has."""
    return _only_logged(user_files())


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
    used |= {name for reads in all_reads for name in reads.returning} - into.keys()  # a library may call it
    rising = True
    while rising:
        added = {name for name, targets in into.items() if name not in used and targets & used}
        used |= added
        rising = bool(added)
    # A name that no code reads is not of a log: a library may read it.
    return frozenset({name for reads in all_reads for name in reads.assigned} & into.keys() - used - {""})


_MUTATORS = COLLECTING_METHODS | {"pop", "popleft", "insert", "remove"}
# Methods of tensors that make the new value of the old one, as `+=` does; `copy_` and `zero_` do not.
_ACCUMULATING_METHODS = frozenset({"add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "index_add_"})


def loop_carried_names() -> list[str]:
    """Return the names of variables and attributes in the user's modules that carry values between steps."""
    return list(_carried_names(user_files()))


def variable_of_path(path: str) -> str:
    """Return the variable or the attribute in which the value at `path` is."""
    return path.split("[")[0].replace(" ", ".").rsplit(".", 1)[-1]


@lru_cache(maxsize=16)
def _carried_names(files: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted({name for file in files for name in _names_in_file(file)}))


@lru_cache(maxsize=256)
def _names_in_file(file: str) -> frozenset[str]:
    return read_source(file, loop_carried_names_in, frozenset())  # without a source nothing is known to be carried


def loop_carried_names_in(code: ast.Module) -> frozenset[str]:
    """Return the names that carry values between steps in code."""
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
            self._record_change(node.func.value, also_sets=node.func.attr in _ACCUMULATING_METHODS)
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
