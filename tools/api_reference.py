"""The Python interface as Markdown: signatures and docstrings, read from the source without running it.

`tools.reference` writes it into docs/reference/api.md, so that the page has it in the source tree as on the site. The
source is parsed, because an adapter cannot be imported where its framework is not installed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "api.md"
_MARK = re.compile(r"<!-- made: api (\S+)((?: [\w.]+)*) -->")
_ENTRY = re.compile(r"((?:\*{0,2}[A-Za-z_]\w*)(?:, \*{0,2}[A-Za-z_]\w*)*): (.*)")
_SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Yields")
_WIDTH = 100  # of a signature on one line
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def section(words: str) -> str:
    """Each public name of a module, or the wanted ones of it; `Class.method` shows that member of the class alone."""
    module, *wanted = words.split()
    chosen: dict[str, list[str]] = {}
    for name in wanted or _public(module):
        owner, _, member = name.partition(".")
        chosen.setdefault(owner, []).extend([member] if member else [])
    return "\n".join(_described(module, name, members) for name, members in chosen.items())


def contents() -> str:
    """A line of links for each heading of the page that has names."""
    lines = []
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]:
        names = [f"{module}.{name}" for module, wanted in _MARK.findall(part) for name in _shown(module, wanted)]
        if names:
            links = ", ".join(f"[`{name}`](#{_anchor(name)})" for name in names)
            lines.append(f"- {part.splitlines()[0]}: {links}\n")
    return "".join(lines)


def _shown(module: str, wanted: str) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in wanted.split() or _public(module)))


@cache
def _public(module: str) -> list[str]:
    """The functions and classes of a module's `__all__`, without errors, which have a table of their own."""
    namespace = importlib.import_module(module)
    values = {name: getattr(namespace, name) for name in namespace.__all__}
    return [name for name, value in values.items() if callable(value) and not _is_error(value)]


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@cache
def _links() -> dict[str, str]:
    """The anchor of each class and function that the page shows, by the names under which docstrings have it."""
    found: dict[str, str] = {}
    for module, wanted in _MARK.findall(PAGE.read_text()):
        for name in _shown(module, wanted):
            short = (name,) if name[0].isupper() else ()  # `open` and `load` are words of other libraries, too
            found |= dict.fromkeys((*short, f"{module}.{name}"), _anchor(f"{module}.{name}"))
            node = _definition(module, name)[1]
            if isinstance(node, ast.ClassDef):
                found |= {f"{name}.{it.name}": _anchor(f"{name}.{it.name}") for it in _members(node, [])}
    return found


def _definition(module: str, name: str) -> tuple[str, ast.ClassDef | _Function]:
    """The module that defines a public name, and the definition."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef | _Function) and node.name == name:
            return module, node
    value = getattr(importlib.import_module(module), name)
    return _definition(value.__module__, value.__name__)


@cache
def _tree(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(source.read_text())


def _described(module: str, name: str, wanted: list[str]) -> str:
    defined_in, node = _definition(module, name)
    parts = [f"### `{module}.{name}`", _signature(f"{module}.{name}", node, defined_in), _prose(node)]
    if isinstance(node, ast.ClassDef):
        for member in _members(node, wanted):
            is_value = _decorators(member) & {"property", "cached_property"}
            shown = f"{name}.{member.name}"
            parts += [f"#### `{shown}`", "" if is_value else _signature(shown, member, defined_in), _prose(member)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _members(node: ast.ClassDef, wanted: list[str]) -> Iterator[_Function]:
    """The public methods and properties that have a docstring."""
    for member in node.body:
        if not isinstance(member, _Function) or member.name.startswith("_") or not ast.get_docstring(member):
            continue
        if not wanted or member.name in wanted:
            yield member


def _decorators(node: ast.ClassDef | _Function) -> set[str]:
    return {re.split(r"[.(]", ast.unparse(it))[-1] for it in node.decorator_list}


# -- signatures -------------------------------------------------------------------------------------------------------


def _signature(shown: str, node: ast.ClassDef | _Function, module: str) -> str:
    if isinstance(node, ast.ClassDef):
        made = next((it for it in node.body if isinstance(it, _Function) and it.name == "__init__"), None)
        arguments = _arguments(made, module) if made else _fields(node, module)
        returned = ""
    else:
        arguments = _arguments(node, module)
        returned = f" -> {_type(node.returns, module)}" if node.returns else ""
    line = f"{shown}({', '.join(arguments)}){returned}"
    if len(line) > _WIDTH:
        line = f"{shown}(\n" + "".join(f"    {it},\n" for it in arguments) + f"){returned}"
    return f"```text\n{line}\n```"


def _arguments(node: _Function, module: str) -> list[str]:
    """The arguments as written, each with its type and its default, without `self`."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    rows = [_argument(it, default, module) for it, default in zip(plain, defaults, strict=True)]
    if plain and plain[0].arg in ("self", "cls"):
        rows = rows[1:]
    if given.vararg:
        rows.append("*" + _argument(given.vararg, None, module))
    elif given.kwonlyargs:
        rows.append("*")
    rows += [_argument(it, default, module) for it, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return rows + (["**" + _argument(given.kwarg, None, module)] if given.kwarg else [])


def _argument(it: ast.arg, default: ast.expr | None, module: str) -> str:
    return _row(it.arg, it.annotation, default, module)


def _fields(node: ast.ClassDef, module: str) -> list[str]:
    """The fields of a dataclass or of a msgspec.Struct, which are the arguments of its constructor."""
    return [
        _row(it.target.id, it.annotation, it.value, module)
        for it in node.body
        if isinstance(it, ast.AnnAssign) and isinstance(it.target, ast.Name) and not it.target.id.startswith("_")
    ]


def _row(name: str, annotation: ast.expr | None, default: ast.expr | None, module: str) -> str:
    shown = f"{name}: {_type(annotation, module)}" if annotation else name
    if default is None:
        return shown
    value = _constant(default, module)
    return f"{shown} = {value}" if annotation else f"{shown}={value}"


def _constant(default: ast.expr, module: str) -> str:
    """A default; the value of a constant that the module names."""
    if isinstance(default, ast.Name):
        return repr(getattr(importlib.import_module(module), default.id))
    return ast.unparse(default).replace("'", '"')


def _type(annotation: ast.expr, module: str) -> str:
    return ast.unparse(_Plain(module).visit(annotation)).replace("'", '"')


class _Plain(ast.NodeTransformer):
    """Leaves out what `Annotated` adds to a type, also behind a name of the module."""

    def __init__(self, module: str) -> None:
        self._module = module

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        if ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
            return self.visit(node.slice.elts[0])
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        for it in _tree(self._module).body:
            if isinstance(it, ast.Assign) and ast.unparse(it.targets[0]) == node.id:
                return self.visit(it.value) if ast.unparse(it.value).startswith("Annotated[") else node
        return node


# -- docstrings -------------------------------------------------------------------------------------------------------


def _prose(node: ast.ClassDef | _Function) -> str:
    """A docstring as Markdown: its sections are lists."""
    text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").replace("``", "`")
    head, *sections = re.split(rf"^({'|'.join(_SECTIONS)}):\n", text, flags=re.M)
    parts = [head.strip()]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        inner, _, rest = body.partition("\n\n")
        parts += [f"*{title}:*", _list(inspect.cleandoc("\n" + inner)), rest.strip()]
    return _linked("\n\n".join(part for part in parts if part))


def _list(body: str) -> str:
    """The entries of a section: `name: text`, or plain text. Further lines of an entry are indented."""
    lines = []
    for line in body.splitlines():
        if line.startswith(" "):
            lines.append(f"  {line.strip()}")
        elif match := _ENTRY.fullmatch(line):
            lines.append(f"- {', '.join(f'`{name}`' for name in match[1].split(', '))}: {match[2]}")
        else:
            lines.append(f"- {line}")
    return "\n".join(lines)


def _linked(text: str) -> str:
    """Code spans that are names of this page, as links."""

    def link(match: re.Match[str]) -> str:
        anchor = _links().get(match[1])
        return f"[{match[0]}](#{anchor})" if anchor else match[0]

    return re.sub(r"(?<!\[)`([\w.]+)`", link, text)
