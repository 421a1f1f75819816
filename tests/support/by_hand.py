"""FORMAT.md's own program as a judge: it reads with nothing of tierd's, and exits at what is wrong."""

from __future__ import annotations

import functools
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

_MANIFEST = re.compile(r"([^/]+)/manifests/(\d{12})\.([0-9a-f-]{21})/(\d{5})-of-(\d{5})\.json")
_FORMAT = Path(__file__).parents[2] / "tierd" / "FORMAT.md"


def values(tree: bytes, file: bytes) -> Any:
    """A state of plain values alone, by FORMAT.md's tables. Lists stand for deques, too; dicts for `OrderedDict`."""
    import numpy as np

    begin = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:begin])
    dtypes = {"F64": "<f8", "I64": "<i8", "BOOL": "?", "U8": "u1"}

    def build(node: Any) -> Any:
        if isinstance(node, list):
            return [build(inner) for inner in node]
        if not isinstance(node, dict):
            return node
        (tag, held), *rest = node.items() or [("", None)]
        if not tag.startswith("$"):
            return {key: build(inner) for key, inner in node.items()}
        assert not rest
        if tag == "$map":
            return dict(zip(*map(build, held), strict=True))
        if tag != "$values":
            inner = build(held)
            return {"$tuple": lambda: tuple(inner), "$deque": lambda: inner[1], "$odict": lambda: inner[0]}[tag]()
        name, kind, size = held
        first, last = header[name]["data_offsets"]
        whole = np.frombuffer(file[begin + first : begin + last], dtypes[header[name]["dtype"]])
        assert header[name]["shape"] == [len(whole)] and not whole[size:].any()
        found = whole[:size]
        if kind in ("float", "int", "bool"):
            assert header[name]["dtype"] == {"float": "F64", "int": "I64", "bool": "BOOL"}[kind]
            return found.tolist()
        assert header[name]["dtype"] == "U8"
        data = found.tobytes()
        return {"str": lambda: data.decode().split("\0"), "bytes": lambda: data, "bytearray": lambda: bytearray(data)}[
            kind
        ]()

    return build(json.loads(tree))


@functools.cache
def program() -> Any:
    """Its functions `read_sealed(path)` and `read_chunk(home, chunk)`: an error says what is wrong."""
    restoring = re.findall(r"```python\n(.*?)```", _FORMAT.read_text(), re.DOTALL)[0]
    found: Any = types.ModuleType("by_hand")
    functions, _, work = restoring.partition("\ndef read_origins(")
    assert work, "FORMAT.md's first program is no longer the one that restores"
    exec(functions, found.__dict__)
    return found


def digest(data: bytes) -> str:
    """The digest by which manifests name files, chunks and objects."""
    return str(xxhash.xxh3_128_hexdigest(data))


def parts_on(tier: Path, run: str) -> Iterator[tuple[int, str, int, int]]:
    """Step, attempt, rank and world size of each manifest of a run on a directory tier."""
    names = (path.relative_to(tier).as_posix() for path in tier.glob(f"{run}/manifests/*/*"))
    return parts_named(names, run)


def parts_named(names: Iterable[str], run: str) -> Iterator[tuple[int, str, int, int]]:
    """Step, attempt, rank and world size of each manifest of a run among objects' names."""
    for name in names:
        if (match := _MANIFEST.fullmatch(name)) and match[1] == run:
            yield int(match[2]), match[3], int(match[4]), int(match[5])


def chain(chunk: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A chunk's entry in a manifest, and those of the chunks from which it differs if it is stored as a patch."""
    one: Mapping[str, Any] | None = chunk
    while one:
        yield one
        one = one.get("stored", {}).get("base")


def raw(chunk: Mapping[str, Any], get: Callable[[str], bytes]) -> bytes:
    """A chunk's bytes; `get` returns the object with a key below the run, which is as the manifest says."""
    stored = chunk["stored"]
    data = get(stored["key"])
    match stored["codec"]:
        case "raw":
            return data
        case "zst":
            return bytes(program().expand(data, chunk["size"]))
        case "planes":
            return bytes(program().join_planes(data, chunk["size"]))
    return bytes(program().apply_patch(data, raw(stored["base"], get)))
