"""The values that an enumeration allows, added to msgspec's messages, which only repeat the value that it refused."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

_REFUSED = re.compile(r"(Invalid enum value .*)( - at `\$([^`]*)`)", re.DOTALL)
_NAME = re.compile(r"\.(\w+)")  # of a member in a path such as `$.tier[0].verify`


def with_allowed_values(message: str, kind: type) -> str:
    """Return the message of a failed `msgspec.convert` to `kind`; one about an enumeration with the allowed values."""
    match = _REFUSED.fullmatch(message)
    values = _values_at(kind, _NAME.findall(match[3])) if match else []
    if not match or not values:
        return message
    return f"{match[1]}: write {' or '.join(', '.join(values).rsplit(', ', 1))}{match[2]}"


def _values_at(kind: type, names: list[str]) -> list[str]:
    """The values of the member to which `names` leads from `kind`, in the order of its type."""
    leaves: list[Any] = [kind]
    for name in names:
        structs = [leaf for leaf in leaves if isinstance(leaf, type) and issubclass(leaf, msgspec.Struct)]
        hints = [hint for struct in structs if (hint := typing.get_type_hints(struct).get(name))]
        leaves = [leaf for hint in hints for leaf in _leaves(hint)]
    literals = [typing.get_args(leaf) for leaf in leaves if typing.get_origin(leaf) is Literal]
    return list(dict.fromkeys(str(value) for values in literals for value in values))


def _leaves(hint: Any) -> Iterator[Any]:
    """The types that a union or a collection is made of; a `Literal` is one of them."""
    parts = () if typing.get_origin(hint) is Literal else typing.get_args(hint)
    if not parts:
        yield hint
    for part in parts:
        yield from _leaves(part)
