"""A small reader of PromQL: whether an expression is well formed, and which metrics, labels and functions it names.

It knows what this project's rules and dashboard use. It reads by the grammar of Prometheus' documentation, and refuses
everything else, so a rule that uses more needs more here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<text>\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<range>\[\d+(?:ms|[smhdwy])\])|(?P<op>==|!=|<=|>=|=~|!~|[-+*/%^<>=(){},]))"
)
FUNCTIONS = {"rate", "increase", "deriv", "vector"}  # of those of Prometheus
_OVER_A_RANGE = {"rate", "increase", "deriv"}
_AGGREGATIONS = {"sum", "min", "max", "count", "avg"}
_BINARY = {"==", "!=", "<=", ">=", "<", ">", "+", "-", "*", "/", "%", "^", "and", "or", "unless"}
_KEYWORDS = {"by", "without", "on", "ignoring", "and", "or", "unless"}


@dataclass
class Expression:
    """What an expression names: its metrics, each with the labels of its selectors and whether over a range."""

    metrics: list[tuple[str, tuple[str, ...], str]] = field(default_factory=list)  # name, labels, function around it
    grouped: set[str] = field(default_factory=set)  # labels of `by` and `on`


class Reader:
    """Reads one expression. Raises `ValueError` where it is not well formed."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at, text = 0, text.strip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ValueError(f"not PromQL at {text[at : at + 20]!r}")
            self._tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
            at = match.end()
        self._at = 0
        self.found = Expression()

    def read(self) -> Expression:
        self._expression("")
        if self._at != len(self._tokens):
            raise ValueError(f"{self._peek()!r} follows the end")
        return self.found

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _kind(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _take(self, wanted: str = "") -> str:
        token = self._peek()
        if not token or (wanted and token != wanted):
            raise ValueError(f"{wanted or 'more'} is missing before {token!r}")
        self._at += 1
        return token

    def _expression(self, function: str) -> None:
        self._operand(function)
        while self._peek() in _BINARY:
            self._take()
            if self._peek() in ("on", "ignoring"):
                self._take()
                self._labels()
            self._operand(function)

    def _labels(self) -> None:
        self._take("(")
        while self._peek() != ")":
            if self._kind() != "name":
                raise ValueError(f"{self._peek()!r} is no label")
            self.found.grouped.add(self._take())
            if self._peek() != ")":
                self._take(",")
        self._take(")")

    def _operand(self, function: str) -> None:
        if self._peek() == "(":
            self._take()
            self._expression(function)
            self._take(")")
        elif self._kind() == "number":
            self._take()
        elif self._kind() != "name" or self._peek() in _KEYWORDS:
            raise ValueError(f"an operand is missing before {self._peek()!r}")
        else:
            self._named(function)

    def _named(self, function: str) -> None:
        name = self._take()
        if name in _AGGREGATIONS:
            if self._peek() in ("by", "without"):
                self._take()
                self._labels()
            self._call(function)
        elif self._peek() == "(":
            if name not in FUNCTIONS:
                raise ValueError(f"unknown function {name}")
            self._call(name)
        else:
            self._selector(name, function)

    def _call(self, function: str) -> None:
        self._take("(")
        self._expression(function)
        self._take(")")

    def _selector(self, name: str, function: str) -> None:
        labels = []
        if self._peek() == "{":
            self._take()
            while self._peek() != "}":
                labels.append(self._take())
                if self._take() not in ("=", "!=", "=~", "!~"):
                    raise ValueError(f"{name}: no matcher")
                if self._kind() != "text":
                    raise ValueError(f"{name}: {labels[-1]} is compared with no text")
                self._take()
                if self._peek() != "}":
                    self._take(",")
            self._take("}")
        ranged = self._kind() == "range"
        if ranged:
            self._take()
        if ranged != (function in _OVER_A_RANGE):
            raise ValueError(f"{name}: {'a range for no function' if ranged else f'{function} needs a range'}")
        self.found.metrics.append((name, tuple(labels), function))


def read(text: str) -> Expression:
    return Reader(text).read()
