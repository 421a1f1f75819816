"""FORMAT.md's own program as a judge: it reads with nothing of tierd's, and exits at what is wrong."""

from __future__ import annotations

import functools
import json
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

_MANIFEST = re.compile(r"([^/]+)/manifests/(\d{12})\.([0-9a-f-]{21})/(\d{5})-of-(\d{5})\.json")
_FORMAT = Path(__file__).parents[2] / "tierd" / "FORMAT.md"


def values(tree: bytes, file: bytes, others: Mapping[int, bytes] | None = None) -> Any:
    """A state of plain values alone, by FORMAT.md's tables. Lists stand for deques, too; dicts for `OrderedDict`.
    `others` are the tensor files of other ranks, in which some of the values lie."""
    import numpy as np

    places = _places(file, others or {})
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
        tensor, data = places[name]
        whole = np.frombuffer(data, dtypes[tensor["dtype"]])
        assert tensor["shape"] == [len(whole)] and not whole[size:].any()
        found = whole[:size]
        if kind in ("float", "int", "bool"):
            assert tensor["dtype"] == {"float": "F64", "int": "I64", "bool": "BOOL"}[kind]
            return found.tolist()
        assert tensor["dtype"] == "U8"
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
    apply = getattr(program(), f"apply_{stored['codec'][:5]}")  # a patch or a delta
    return bytes(apply(data, raw(stored["base"], get)))


# -- what lies in places -----------------------------------------------------------------------------------------------

SEAL_BYTES = 46
Files = dict[str, bytes]


class Damaged(AssertionError):
    """What lies in a place is not what a manifest says."""


def seal(text: bytes) -> bytes:
    """A manifest or a head of this text, which ends in '}', with a seal that is right."""
    return text[:-1] + b',"digest":"%s"}\n' % digest(text[:-1]).encode()


@functools.lru_cache(maxsize=4096)
def sealed(data: bytes) -> dict[str, Any] | None:
    """What a manifest or a head says; None if its seal is broken."""
    text = data[:-SEAL_BYTES] + b"}"
    if seal(text) != data:
        return None
    found: Any = json.loads(text)
    return found if isinstance(found, dict) else None


def entries(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What a manifest on a tier says of each object that it names; nothing if it is a head."""
    for file in manifest.get("files", ()):
        for chunk in file["chunks"]:
            yield from (link["stored"] for link in chain(chunk))


def keys(manifest: Mapping[str, Any]) -> set[str]:
    """The keys below its run of the objects that a manifest names."""
    return {stored["key"] for stored in entries(manifest)}


def on_tier(path: Path) -> tuple[dict[str, Any], Files]:
    """What the manifest at this path of a directory tier says, and the files that it describes, verified."""
    judge, home = program(), path.parents[2]
    try:
        manifest = judge.read_sealed(path)
        return manifest, {
            file["path"]: b"".join(judge.read_chunk(home, chunk) for chunk in file["chunks"])
            for file in manifest["files"]
        }
    except (judge.Damaged, SystemExit, OSError) as error:
        raise Damaged(f"{path}: what lies there cannot be read: {error}") from error


def in_spool(home: Path) -> tuple[dict[str, Any], Files]:
    """What the manifest of a part's directory in a spool says, and the files that it describes, verified."""
    judge = program()
    try:
        manifest = judge.read_sealed(home / "manifest.json")
        files = {file["path"]: (home / file["path"]).read_bytes() for file in manifest["files"]}
    except (judge.Damaged, SystemExit, OSError) as error:
        raise Damaged(f"{home}: what lies there cannot be read: {error}") from error
    for file in manifest["files"]:
        at = 0
        for chunk in file["chunks"]:
            if digest(files[file["path"]][at : at + chunk["size"]]) != chunk["xxh3_128"]:
                raise Damaged(f"{home}: {file['path']} differs at {at}")
            at += chunk["size"]
        if not at == file["size"] == len(files[file["path"]]):
            raise Damaged(f"{home}: {file['path']} has not the {file['size']} bytes of which its manifest tells")
    return manifest, files


def tensors(file: bytes) -> Files:
    """The bytes of each tensor in a file of safetensors."""
    begin = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:begin])
    header.pop("__metadata__", None)
    ranges = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: file[begin + first : begin + last] for name, (first, last) in ranges.items()}


def tensors_named(files: Mapping[int, bytes], rank: int) -> Files:
    """The bytes of each tensor that a rank's tree may name; `files` are the ranks' tensor files of one checkpoint."""
    others = {other: file for other, file in files.items() if other != rank}
    return {name: data for name, (_, data) in _places(files[rank], others).items()}


def _places(file: bytes, others: Mapping[int, bytes]) -> dict[str, tuple[dict[str, Any], bytes]]:
    """What is said of each tensor that is in the file or, by its header, in another rank's; and its bytes."""

    def entries(file: bytes) -> tuple[dict[str, Any], Files]:
        header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
        return header, tensors(file)

    header, data = entries(file)
    places = {name: (header[name], data[name]) for name in data}
    for rank, names in json.loads(header.get("__metadata__", {}).get("tierd.elsewhere", "{}")).items():
        if int(rank) not in others:
            raise Damaged(f"tensors are said to lie in the part of rank {rank}")
        theirs, their_data = entries(others[int(rank)])
        for name in names:
            if name in places or name not in their_data:
                raise Damaged(f"{name!r} is not in the part of rank {rank}, or in two places")
            places[name] = theirs[name], their_data[name]
    return places


def unfinished(spool: Path, run: str, *more: str) -> list[str]:
    """What a spool holds beside committed parts of a run: stages, graves, quarantined parts, and halves of parts.

    Args:
        more: further directories of `.tierd` that are to be empty.
    """
    rooms = ("stage", "fetch", "trash", "quarantine", *more)
    found = [path for room in rooms for path in (spool / ".tierd" / room).glob("*")]
    found += [home for home in (spool / run).glob("*.*") if not files_below(home)]
    found += [home for home in (spool / run).glob("*.*/*") if not (home / "manifest.json").exists()]
    return [str(path) for path in found]


def files_below(path: Path) -> list[Path]:
    """All files; what is deleted meanwhile is left out."""
    return [Path(directory, name) for directory, _, names in os.walk(path) for name in names]
