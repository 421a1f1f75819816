"""More than msgspec says of a value that it refused: what an enumeration allows, which member an unknown one resembles,
and the line of a TOML text."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

_REFUSED = re.compile(r"(Invalid enum value .*)( - at `\$([^`]*)`)", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`(?: - at `\$([^`]*)`)?")
_HEADER = re.compile(r"[ \t]*(\[\[?)[ \t]*([A-Za-z0-9_. \t-]+?)[ \t]*\]")
_SETTING = re.compile(r"[ \t]*([A-Za-z0-9_. \t-]+?)[ \t]*=")
_NAME = re.compile(r"\.(\w+)")  # of a member in a path such as `$.tier[0].verify`


def with_allowed_values(message: str, kind: type) -> str:
    """Return the message of a failed `msgspec.convert` to `kind`; one about an enumeration with the allowed values."""
    match = _REFUSED.fullmatch(message)
    values = _values_at(kind, _NAME.findall(match[3])) if match else []
    if not match or not values:
        return message
    return f"{match[1]}: write {' or '.join(', '.join(values).rsplit(', ', 1))}{match[2]}"


def with_similar_member(message: str, kind: type) -> tuple[str, str]:
    """Return the message of a failed `msgspec.convert` to `kind`, and the path of an unknown member; empty for others.

    A message about an unknown member names one of a similar name.
    """
    match = _UNKNOWN.fullmatch(message)
    if not match:
        return message, ""
    name, path = match[1], (match[2] or "").removeprefix(".")
    similar = difflib.get_close_matches(name, _members_at(kind, _NAME.findall(f".{path}")), 1)
    hint = f"; did you mean `{similar[0]}`?" if similar else ""
    where = f" - at `$.{path}`" if path else ""
    return f"Object contains unknown field `{name}`{hint}{where}", f"{path}.{name}".lstrip(".")


def line_of_member(text: str, path: str) -> int | None:
    """Return the line of a TOML text that sets a member, such as ``tier[0].url``, or an inline table that holds it.

    None if no line does, as for a member that is missing.
    """
    table, counts = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _table_path(header[2], counts, is_new=header[1] == "[[")
        elif setting := _SETTING.match(line):
            name = "".join(setting[1].split())
            member = f"{table}.{name}".lstrip(".")
            if path == member or path.startswith((f"{member}.", f"{member}[")):
                return number
    return None


def _table_path(name: str, counts: dict[str, int], *, is_new: bool) -> str:
    """Return a table's path, in which each array of tables has the index of its last table."""
    path = ""
    for word in "".join(name.split()).split("."):
        path = f"{path}.{word}".lstrip(".")
        if is_new and path == name.strip():
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = f"{path}[{counts[path]}]"
    return path


def _values_at(kind: type, names: list[str]) -> list[str]:
    """The values of the member to which `names` leads from `kind`, in the order of its type."""
    literals = [typing.get_args(leaf) for leaf in _leaves_at(kind, names) if typing.get_origin(leaf) is Literal]
    return list(dict.fromkeys(str(value) for values in literals for value in values))


def _members_at(kind: type, names: list[str]) -> list[str]:
    """The members of the structs to which `names` leads from `kind`."""
    structs = [leaf for leaf in _leaves_at(kind, names) if isinstance(leaf, type) and issubclass(leaf, msgspec.Struct)]
    return [name for struct in structs for name in struct.__struct_fields__]


def _leaves_at(kind: type, names: list[str]) -> list[Any]:
    """The types to which `names` leads from `kind`."""
    leaves: list[Any] = [kind]
    for name in names:
        structs = [leaf for leaf in leaves if isinstance(leaf, type) and issubclass(leaf, msgspec.Struct)]
        hints = [hint for struct in structs if (hint := typing.get_type_hints(struct).get(name))]
        leaves = [leaf for hint in hints for leaf in _leaves(hint)]
    return leaves


def _leaves(hint: Any) -> Iterator[Any]:
    """The types that a union or a collection is made of; a `Literal` is one of them."""
    parts = () if typing.get_origin(hint) is Literal else typing.get_args(hint)
    if not parts:
        yield hint
    for part in parts:
        yield from _leaves(part)
