"""Edits of one function's syntax tree, which name calls, conditions and exceptions, but no line and no layout.

Invariant: an edit changes exactly as many places as it says (one, if it says nothing). If the code has more or fewer,
then the edit raises `Misfit`, because a fence that removes less or more than its promise proves nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

Function = ast.FunctionDef | ast.AsyncFunctionDef
_SIMPLE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete, ast.Raise, ast.Return)


class Misfit(Exception):
    """An edit that does not fit its function."""


class Edit(Protocol):
    def apply(self, function: Function) -> None:
        """Change the function in place.

        Raises:
            Misfit: another number of places than the edit's fits.
        """


@dataclass(frozen=True)
class LeaveOut:
    """Leave out each simple statement that mentions all of `names`, such as the call of a function.

    `times`: how many statements that are.
    """

    names: str
    times: int = 1

    def apply(self, function: Function) -> None:
        places = _statements(function, self.names)
        _check(self, len(places), self.times)
        for block, number in places:
            block[number] = ast.Pass()


@dataclass(frozen=True)
class Replace:
    """Put other statements in the place of the simple statement that mentions all of `names`; `...` is that one."""

    names: str
    statements: str

    def apply(self, function: Function) -> None:
        places = _statements(function, self.names)
        _check(self, len(places), 1)
        block, number = places[0]
        own = block[number]
        block[number : number + 1] = [
            own if ast.unparse(other) == "..." else other for other in ast.parse(self.statements).body
        ]


@dataclass(frozen=True)
class Both:
    """Two edits, one after the other."""

    first: Edit
    second: Edit

    def apply(self, function: Function) -> None:
        self.first.apply(function)
        self.second.apply(function)


@dataclass(frozen=True)
class Returns:
    """Return this expression, and do nothing else."""

    expression: str

    def apply(self, function: Function) -> None:
        function.body = ast.parse(f"return {self.expression}").body


@dataclass(frozen=True)
class Assume:
    """Take the smallest condition that mentions all of `names` as true or false, without evaluating it."""

    value: bool
    names: str
    times: int = 1

    def apply(self, function: Function) -> None:
        named = {id(node) for node in _conditions(function) if _mentions(node, self.names)}
        smallest = {
            number
            for number in named
            if not any(id(inner) in named for inner in _below(function, number) if id(inner) != number)
        }
        _check(self, len(smallest), self.times)
        _Replacer(lambda node: self._constant(node) if id(node) in smallest else None).visit(function)

    def _constant(self, condition: ast.AST) -> ast.expr:
        """The value; if the condition binds a name, then bound to that, because later code would not be a program."""
        value = ast.Constant(self.value)
        bound = next((node.target for node in ast.walk(condition) if isinstance(node, ast.NamedExpr)), None)
        return ast.NamedExpr(bound, value) if bound else value


@dataclass(frozen=True)
class Uncaught:
    """Drop the except clause of one exception."""

    exception: str

    def apply(self, function: Function) -> None:
        handlers = [node for node in ast.walk(function) if isinstance(node, ast.ExceptHandler)]
        places = [handler for handler in handlers if handler.type and _name(handler.type) == self.exception]
        _check(self, len(places), 1)
        places[0].type = ast.Tuple([], ast.Load())  # catches nothing; without a clause it would be no try statement


@dataclass(frozen=True)
class Rename:
    """Use another name: of an exception, a flag, a function, or of the variable of a clause."""

    name: str
    other: str
    times: int = 1

    def apply(self, function: Function) -> None:
        places = [node for node in ast.walk(function) if _name(node) == self.name and not _is_stored(node)]
        _check(self, len(places), self.times)
        other = ast.parse(self.other, mode="eval").body
        _Replacer(lambda node: other if node in places else None).visit(function)


@dataclass(frozen=True)
class Answer:
    """Take an expression as the answer of a call, without making the call."""

    call: str
    expression: str
    times: int = 1

    def apply(self, function: Function) -> None:
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _name(node.func) == self.call]
        awaited = [node for node in ast.walk(function) if isinstance(node, ast.Await) and node.value in calls]
        _check(self, len(calls), self.times)
        answer = ast.parse(self.expression, mode="eval").body
        _Replacer(lambda node: answer if node in awaited or node in calls else None).visit(function)


@dataclass(frozen=True)
class Unwrap:
    """Take a call's first argument as its answer, such as a text that is not escaped."""

    call: str
    times: int = 1

    def apply(self, function: Function) -> None:
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _name(node.func) == self.call]
        _check(self, len(calls), self.times)
        _Replacer(lambda node: node.args[0] if isinstance(node, ast.Call) and node in calls else None).visit(function)


class _Replacer(ast.NodeTransformer):
    """Puts another node in a node's place, if `of` gives one."""

    def __init__(self, of: Callable[[ast.AST], ast.AST | None]) -> None:
        self._of = of

    def visit(self, node: ast.AST) -> ast.AST:
        other = self._of(node)
        return self.generic_visit(node) if other is None else other


def _check(edit: Edit, places: int, times: int) -> None:
    if places != times:
        raise Misfit(f"{edit} fits {places} places, not {times}")


def _name(node: ast.AST) -> str | None:
    """The last component of a name or of an attribute."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _is_stored(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)


def _mentions(node: ast.AST, names: str) -> bool:
    """Whether a tree contains each of the names, which spaces separate."""
    own = {_name(inner) for inner in ast.walk(node)}
    own |= {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.keyword)}
    return own.issuperset(names.split())


def _statements(function: Function, names: str) -> list[tuple[list[ast.stmt], int]]:
    """The simple statements that mention all of the names, each as its block and its place there."""
    return [
        (block, number)
        for block in _blocks(function)
        for number, statement in enumerate(block)
        if isinstance(statement, _SIMPLE) and _mentions(statement, names)
    ]


def _blocks(function: Function) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):  # the body of a lambda or a conditional expression is none
                yield block


def _conditions(function: Function) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.BoolOp):
            yield from node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.operand
        elif isinstance(node, ast.Compare):
            yield node


def _below(function: Function, number: int) -> Iterator[ast.AST]:
    return ast.walk(next(node for node in ast.walk(function) if id(node) == number))
