"""Everything in tierd that reads what others wrote, each with a maker of hostile input: for `faults.hostile`.

A reader is called with a seeded `Random`, makes one input and has tierd read it. It raises `Lost` where tierd answers
otherwise than by what it documents, or takes what no honest writer says.
"""

from __future__ import annotations

import base64
import functools
import json
import pickle
import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
import zstandard
from faults.hostile.mutation import NUMBERS, dumped, mutated, spoiled, text
from faults.rounds import Lost
from support import dcp_pickles
from support.by_hand import digest, seal
from support.state_files import plan_layout
from support.world import attempt, part
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tierd.codec import block_patches, byte_planes, chunk_codec, element_deltas
from tierd.core import ids
from tierd.core.config import from_toml
from tierd.core.errors import (
    ConfigError,
    CorruptChunk,
    DaemonUnavailable,
    FormatTooNew,
    ManifestError,
    StateMismatch,
    StateRefused,
    StepRefused,
    TierdError,
)
from tierd.core.manifest import Chunk, StoredChunk
from tierd.core.manifest_codec import decode
from tierd.core.retention.policy import decode_policy as decode_retention
from tierd.core.retention.policy import parse_duration, parse_rate
from tierd.core.timeline.run_view import RunView
from tierd.core.urls import parse_url
from tierd.dcp.metadata import read_metadata
from tierd.ipc import message_codec
from tierd.ipc.message_codec import read_member
from tierd.ipc.protocol import PROTOCOL
from tierd.state.tensor_file import tensor_view
from tierd.state.tensor_header import parse_layout
from tierd.state.tree_parser import parse_tree
from tierd.stores.base import is_key

PART = part(7, 2, 1, 2)
RAW = np.random.default_rng(7).normal(size=4096).astype("<f4").tobytes()
Reader = Callable[[random.Random], None]


def only(call: Callable[[], Any], *allowed: type[BaseException]) -> Any:
    """What a call gives, or None where it refuses as documented; that no memory was left is no reason to refuse."""
    try:
        return call()
    except allowed as error:
        why: BaseException | None = error
        while why is not None:
            if isinstance(why, MemoryError) or "MemoryError" in str(why):
                raise Lost(f"it asked for more memory than there is, and refused: {error}") from error
            why = why.__cause__ or why.__context__
        return None


# -- manifests ------------------------------------------------------------------------------------------------------


def _chunk(number: int) -> dict[str, Any]:
    name = f"{number:032x}"
    key = ids.chunk_key(PART, name, "zst")
    return {"size": 10, "xxh3_128": name, "stored": {"codec": "zst", "size": 9, "xxh3_128": name, "key": key}}


MANIFEST: dict[str, Any] = {
    "version": 4,
    "run": PART.checkpoint.run,
    "step": PART.checkpoint.step,
    "attempt": PART.checkpoint.attempt,
    "resumed_from": {"step": 5, "attempt": attempt(1)},
    "rank": PART.rank,
    "world_size": PART.world,
    "created": "2026-01-01T00:00:00+00:00",
    "writer": "test",
    "metrics": {"loss": 0.5, "bad": "nan"},
    "files": [
        {"path": "a/b.bin", "size": 20, "chunks": [_chunk(1), _chunk(2)]},
        {"path": "state.json", "size": 10, "chunks": [_chunk(3)]},
        {"path": "empty", "size": 0, "chunks": []},
    ],
}


def _patched() -> dict[str, Any]:
    """A manifest one of whose chunks is a patch of a patch."""
    tree: dict[str, Any] = json.loads(json.dumps(MANIFEST)) | {"version": 3}
    entry = tree["files"][0]["chunks"][0]
    for number in (1, 4):
        stored = entry["stored"]
        stored["codec"] = f"patch{number:011}"
        stored["key"] = f"{stored['key'].rpartition('.')[0]}.{stored['codec']}"
        stored["base"] = entry = _chunk(number + 3)
    return tree


PATCHED = _patched()
MOST = 32 << 20  # bytes that a manifest has at most, FORMAT.md


@functools.cache
def huge() -> list[bytes]:
    """Manifests with one file, metric and byte more than any reader takes, and the largest that must be taken."""
    files = MANIFEST | {"files": [{"path": f"f{n}", "size": 0, "chunks": []} for n in range(100_001)]}
    metrics = MANIFEST | {"metrics": {f"m{n}": 0.0 for n in range(1001)}}
    found = [seal(json.dumps(one, separators=(",", ":")).encode()) for one in (files, metrics)]
    body = json.dumps(MANIFEST, separators=(",", ":")).encode()
    for size in (MOST + 1, MOST):
        found.append(seal(body[:-1] + b" " * (size - 45 - len(body)) + b"}"))
        assert len(found[-1]) == size
    return found


def _aimed(noise: random.Random) -> dict[str, Any]:
    """A manifest that is right but for one path or one key, which lead where nobody may."""
    tree: dict[str, Any] = json.loads(json.dumps(MANIFEST))
    file = tree["files"][noise.randrange(2)]
    if noise.random() < 0.5:
        file["path"] = text(noise)
    else:
        stored = noise.choice(file["chunks"])["stored"]
        pieces = stored["key"].split("/")
        pieces[noise.randrange(len(pieces))] = noise.choice(
            [text(noise), "00000", f"{9:032x}.zst", f"{1:032x}.raw", "..", ""]
        )
        stored["key"] = "/".join(pieces)
    return tree


def manifest(noise: random.Random) -> None:
    kind = noise.random()
    if kind < 0.003:
        data = noise.choice(huge())
    else:
        whole = PATCHED if 0.5 < kind < 0.6 else MANIFEST
        tree = mutated(whole, noise, noise.randrange(1, 4)) if kind < 0.7 else _aimed(noise)
        data = seal(dumped(tree, noise))
    if 0.1 < kind < 0.3:
        data = spoiled(data, noise)
    expected = noise.choice([PART, PART, None])
    found = only(lambda: decode(data, expected), ManifestError, FormatTooNew)
    if found is None:
        if kind < 0.003 and len(data) == MOST:
            raise Lost("the largest manifest that there may be was refused")
        return
    if len(data) > MOST:
        raise Lost(f"a manifest of {len(data)} bytes was taken")
    if len(found.files) > 100_000 or len(found.metrics) > 1000 or (expected and found.part != expected):
        raise Lost(f"taken: {found.part} with {len(found.files)} files")
    paths = [file.path for file in found.files]
    for file in found.files:
        pieces = file.path.split("/")
        if {"", ".", ".."} & set(pieces) or "\x00" in file.path or len(file.path) > 1024:
            raise Lost(f"an unsafe path was taken: {file.path!r}")
        if pieces[0] in ("manifest.json", "manifest.json.new") or paths.count(file.path) > 1:
            raise Lost(f"a path was taken that shadows another: {file.path!r}")
        if sum(chunk.size for chunk in file.chunks) != file.size or any(c.size > 256 << 20 for c in file.chunks):
            raise Lost(f"sizes were taken that do not fit: {file}")
        for chunk in (one for first in file.chunks for one in first.chain()):
            one = chunk.stored
            if one and (chunk.size != one.base.size if one.base else one.codec.startswith(("patch", "delta"))):
                raise Lost(f"a patch was taken without a base that fits: {one}")
            if one and (
                ".." in one.key
                or (one.key.count("/") == 3 and one.key.split("/")[-2] != f"{found.rank:05}")
                or one.key.split("/")[-1] != f"{chunk.xxh3_128}.{one.codec}"
                or not is_key(f"{found.run}/{one.key}")
                or one.size > 272 << 20
            ):
                raise Lost(f"an entry was taken that leads elsewhere: {one}")
    found.numbers, found.created_at, found.origin, found.owners, found.size, found.stored_size  # noqa: B018
    if json.dumps(found.resumed_from.attempt if found.resumed_from else "") >= json.dumps(found.attempt):
        raise Lost("it resumes from a later attempt")


# -- configuration and names ------------------------------------------------------------------------------------------

CONFIG = """
spool = "/nvme/tierd"
rescan = "30s"
drain = "1m"
min_free_percent = 5.0
scrub = "30d"
scrub_rate = "20MB/s"

[retention]
keep_last = 3

[[tier]]
name = "s3"
url = "s3://bucket/prefix?region=eu-central-1&endpoint=http://127.0.0.1:7480"
limit_up = "200MB/s"

[tier.retention]
keep_last = 10
keep_every = 1000
keep_within = "7d"

[[tier]]
name = "nfs"
url = "file:///mnt/tier"
"""


RETENTION: dict[str, Any] = {
    "format": 1,
    "run": "run",
    "by": "0123abcd",
    "host": "node-7",
    "written": "2026-01-01T00:00:00+00:00",
    "given": "configuration",
    "retention": {
        "keep_last": 10,
        "keep_every_steps": [10, 15],
        "keep_within": "2h",
        "keep_every": "7d",
        "keep_best": {"metric": "loss", "mode": "min", "count": 2},
    },
}


def _retention(noise: random.Random) -> None:
    """A run's policy, as it lies on a tier."""
    data = dumped(mutated(RETENTION, noise, noise.randrange(1, 4)), noise)
    if noise.random() < 0.3:
        data = spoiled(data, noise)
    read = only(lambda: decode_retention(data, "run", "0123abcd", "configuration"), ManifestError, FormatTooNew)
    policy = read and read.retention
    if policy and (policy.keep_last < 1 or min(policy.every_steps, default=1) < 1 or len(policy.bests) > 16):
        raise Lost(f"taken: {policy}")


def config(noise: random.Random) -> None:
    given = CONFIG
    for _ in range(noise.randrange(1, 4)):
        lines = given.split("\n")
        at = noise.randrange(len(lines))
        name = lines[at].partition("=")[0]
        match noise.randrange(6):
            case 0:
                lines[at] = f"{name}= {json.dumps(text(noise), ensure_ascii=False)}"
            case 1:
                lines[at] = f"{name}= {noise.choice([*NUMBERS, '9' * 5000, 'inf', '-nan', '0x' + 'f' * 3000])}"
            case 2:
                depth = noise.choice([5, 200, 2000, 50_000])
                lines[at] = noise.choice(
                    [
                        f"x = {'[' * depth}{']' * depth}",
                        f"{'a.' * min(depth, 200)}a = 1",
                        f"x = {'{a=' * depth}1{'}' * depth}",
                    ]
                )
            case 3:
                lines[at:at] = lines[at : at + 3] * noise.choice([1, 2, 100])
            case 4:
                lines[at] = f'{name}= "{noise.choice(["1e9d", "9" * 400 + "d", "0s", "9" * 20 + "h", "0.0000001s"])}"'
            case 5:
                lines[at] = spoiled(lines[at].encode("utf-8", "surrogatepass"), noise).decode("utf-8", "replace")
        given = "\n".join(lines)
    found = only(lambda: from_toml(given, "x.toml"), ConfigError)
    _retention(noise)
    if found is None:
        return
    if not found.spool.startswith("/") or "\x00" in found.spool:
        raise Lost(f"a spool was taken that is no path: {found.spool!r}")
    for duration in (found.rescan, found.drain, found.scrub):
        if not 0 <= parse_duration(duration) < 1e12:
            raise Lost(f"a duration was taken that no clock can count: {duration[:40]}")
    for tier in found.tier:
        if parse_url(str(parse_url(tier.url))) != parse_url(tier.url):
            raise Lost(f"a URL that means two places: {tier.url!r}")


def names(noise: random.Random) -> None:
    run, checkpoint = PART.checkpoint.run, PART.checkpoint.name
    honest = [run, checkpoint, PART.name, PART.manifest_key, PART.quarantine_key, PART.checkpoint.attempt]
    honest += ["s3://bucket/a/b?endpoint=https://[::1]:80&addressing=path", "file:///mnt/%41", "20MB/s", "7d"]
    name = noise.choice(honest)
    if noise.random() < 0.8:
        name = noise.choice(
            [
                text(noise),
                name + text(noise),
                spoiled(name.encode(), noise).decode("utf-8", "surrogateescape"),
                name.replace("/", noise.choice(["//", "/../", "/./", "\\", "\x00"])),
                name.translate({ord("0"): "\u0660", ord("7"): "\u0667"}),
                name + "\n",
            ]
        )
    for found in (
        ids.PartId.parse_key(name),
        ids.PartId.parse(run, checkpoint, name),
        ids.PartId.parse(run, name, PART.name),
        ids.PartId.parse(name, checkpoint, PART.name),
    ):
        if found and not (is_key(found.manifest_key) and found.path.count("/") == 2 and found.path.isascii()):
            raise Lost(f"{name!r} was taken for {found!r}")
    owner = ids.chunk_owner(run, name)
    if owner and not is_key(f"{run}/chunks/{owner.name}"):
        raise Lost(f"{name!r} was taken for a chunk of {owner!r}")
    if only(lambda: ids.check_run(name), ConfigError) and ("/" in name or name.startswith(".") or "\n" in name):
        raise Lost(f"{name!r} was taken for a run")
    only(lambda: ids.check_attempt(name), ConfigError)
    only(lambda: ids.check_step(noise.choice([*NUMBERS, name, None, True, [1]])), StepRefused)
    only(lambda: ids.check_rank(noise.choice([*NUMBERS, name]), noise.choice(NUMBERS)), ConfigError)
    only(lambda: parse_rate(name), ValueError)
    only(lambda: parse_duration(name), ValueError)
    url = only(lambda: parse_url(name), ConfigError)
    if url is not None and (".." in url.path.split("/") or ".." in url.prefix.split("/") or "\x00" in str(url)):
        raise Lost(f"{name!r} was taken for {url}")


# -- states ---------------------------------------------------------------------------------------------------------

TENSORS = {
    "w": torch.arange(64, dtype=torch.float32),
    "b": torch.ones(3),
    "n": torch.zeros((0, 4)),
    "i": torch.tensor(3),
}
LAYOUT = plan_layout(TENSORS)
HEADER = json.loads(LAYOUT.header[8:])
ELSEWHERE = {"0": ["x", "optimizer/y"], "7": ["z"]}  # tensors in other ranks' files


def header(noise: random.Random) -> None:
    described = HEADER
    if noise.random() < 0.5:
        text = dumped(mutated(ELSEWHERE, noise, noise.randrange(3)), noise).decode("utf-8", "replace")
        described = {**HEADER, "__metadata__": {**HEADER["__metadata__"], "tierd.elsewhere": text}}
    body = dumped(mutated(described, noise, noise.randrange(1, 4)), noise)
    if noise.random() < 0.5:
        body = body.ljust(-(-(8 + len(body)) // 64) * 64 - 8)
    size = len(body) if noise.random() < 0.9 else noise.choice([0, 1, 2**63, 2**64 - 1, 10**8, len(body) + 1])
    data = size.to_bytes(8, "little") + body + bytes(LAYOUT.size - len(LAYOUT.header))
    if noise.random() < 0.2:
        data = spoiled(data, noise)
    buffer = bytearray(data)
    found = only(lambda: parse_layout(buffer), StateMismatch)
    if found is None:
        return
    if found.elsewhere.keys() & found.entries.keys() or not all(0 <= rank < 10**5 for rank in found.elsewhere.values()):
        raise Lost(f"tensors lie elsewhere and here, or on no rank: {found.elsewhere}")
    end = len(found.header)
    for name, entry in found.entries.items():
        if entry.offset != end or entry.offset + entry.nbytes > len(data):
            raise Lost(f"{name!r} lies at {entry.offset}")
        end += entry.nbytes
        if tensor_view(buffer, entry).numel() * entry.dtype.itemsize != entry.nbytes:
            raise Lost(f"{name!r} is not {entry.nbytes} bytes")
    if end != len(data):
        raise Lost(f"the tensors end at {end} of {len(data)}")


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


TREE: dict[str, Any] = {
    "model": {"w": {"$tensor": "w"}, "z": {"$view": ["pair", "complex64"]}, "a": {"$array": ["i", "<i8", []]}},
    "many": [{"$tuple": [1, 2.5, None]}, {"$set": [1, "a"]}, {"$frozenset": []}, {"$deque": [3, [1, 2]]}],
    "keys": {"$dict": [[1, "x"], [{"$tuple": [1, {"$bytes": _b64(b"k")}]}, []]]},
    "ordered": {"$odict": [{"a": 1}, {"version": 1}]},
    "counted": {"$counter": {"a": 3}},
    "default": {"$defaultdict": ["list", {}]},
    "numbers": [{"$int": "-0x1fffffffffffffffff"}, {"$float": "nan"}, {"$complex": [1.0, {"$float": "inf"}]}],
    "range": [{"$range": [0, 10, 2]}, {"$slice": [None, 5, None]}, {"$size": [2, 3]}],
    "kinds": [{"$dtype": "bfloat16"}, {"$device": "cuda:0"}, {"$npscalar": ["<f4", _b64(bytes(4))]}],
    "text": [{"$npstr": "a"}, {"$npbytes": _b64(b"b")}, {"$str": _b64(b"\xed\xa0\x80")}, {"$bytearray": _b64(b"c")}],
}
STORED = TENSORS | {"pair": torch.zeros((3, 2))}


def tree(noise: random.Random) -> None:
    given = mutated(TREE, noise, noise.randrange(1, 4))
    if noise.random() < 0.3:
        tag = noise.choice([key for found in _tags(TREE) for key in found])
        payload = noise.choice(
            [*NUMBERS, text(noise), [], [1], [[1]], {}, [text(noise)] * 3, [None] * 3, ["w", "O", []]]
        )
        given = {"x": {tag: payload}}
    data = dumped(given, noise)
    only(lambda: parse_tree(data, STORED.__getitem__), StateMismatch, StateRefused)


def _tags(node: Any) -> Any:
    if isinstance(node, dict):
        if any(key.startswith("$") for key in node):
            yield list(node)
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        yield from _tags(inner)


# -- DCP's metadata ---------------------------------------------------------------------------------------------------

_INDEX = dcp.MetadataIndex("w", torch.Size([0]), 0)
_TENSOR = dcp.TensorStorageMetadata(
    dcp.TensorProperties(torch.float32), torch.Size([4]), [dcp.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))]
)
_INFO = _StorageInfo("00000-of-00001/__0_0.distcp", 0, 16)
METADATA = dcp.Metadata({"w": _TENSOR, "x": dcp.BytesStorageMetadata()}, {"w": ("w",)}, {_INDEX: _INFO})
_BEFORE = dcp_pickles.of_process()
_CALLS = (
    ("os", "system"),
    ("posix", "system"),
    ("subprocess", "Popen"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("builtins", "getattr"),
    ("builtins", "__import__"),
    ("builtins", "open"),
    ("torch", "load"),
    ("torch.serialization", "load"),
    ("torch.serialization", "_get_layout.__globals__"),
    ("torch.storage", "_load_from_bytes"),
    ("torch.distributed.checkpoint.metadata", "os"),
    ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
    ("torch.distributed.checkpoint.filesystem", "os.system"),
    ("torch.distributed.checkpoint.filesystem", "FileSystem"),
    ("collections", "namedtuple"),
    ("pathlib", "Path"),
    ("copyreg", "_reconstructor"),
    ("operator", "attrgetter"),
    ("functools", "partial"),
    ("numpy", "load"),
    ("codecs", "decode"),
)


def _gadget(noise: random.Random) -> bytes:
    module, name = noise.choice(_CALLS)
    argument = pickle.dumps(noise.choice(["touch /tmp/tierd-hostile", b"x", "/etc/passwd", 1]), 2)[2:-1]
    form = noise.randrange(4)
    if form == 0:  # GLOBAL, REDUCE
        return b"\x80\x02c" + f"{module}\n{name}\n".encode() + argument + b"\x85R."
    if form == 1:  # STACK_GLOBAL
        pair = b"".join(b"\x8c" + bytes([len(one)]) + one.encode() for one in (module, name))
        return b"\x80\x04" + pair + b"\x93" + argument + b"\x85R."
    if form == 2:  # INST
        return b"(" + argument + b"i" + f"{module}\n{name}\n".encode() + b"."
    return b"\x80\x02(c" + f"{module}\n{name}\n".encode() + argument + b"o."  # OBJ


def _endless(noise: random.Random) -> bytes:
    """Metadata that changes what it names, or has no end for a reader that hashes or follows it."""
    what = dcp_pickles.named("Metadata"), dcp_pickles.named("_get_layout", "torch.serialization")
    member = noise.choice(["__qualname__", "__defaults__", "planted"])
    deep = b")" + noise.choice([b"\x85", b"N\x86", b"2\x86"]) * noise.choice([40, 4000, 400_000])
    match noise.randrange(5):
        case 0:
            return dcp_pickles.changing(noise.choice(what), member, noise.random() < 0.5)
        case 1:
            return dcp_pickles.keyed(noise.choice([deep, dcp_pickles.doubled()]))
        case 2:
            return dcp_pickles.made(noise.choice([deep, dcp_pickles.doubled()]))
        case 3:
            return dcp_pickles.made(noise.choice([b"]q\x00h\x00a", b"]" * 3000 + b"a" * 2999]))
        case _:
            return spoiled(dcp_pickles.keyed(dcp_pickles.doubled(5)), noise)


def metadata(noise: random.Random) -> None:
    match noise.randrange(7):
        case 0:
            data = _gadget(noise)
        case 1:  # memo places and sizes that nobody has
            opcode = noise.choice([b"r", b"q", b"j", b"B", b"X", b"\x8e", b"\x8d", b"\x96", b"\x95", b"\x8b", b"p"])
            number = noise.choice([2**31 - 1, 2**24, 2**32 - 1, 2**20, 2**26, 2**26 + 2**25, 2**27 - 1])
            size = number.to_bytes(8 if opcode in b"\x8e\x8d\x96\x95" else 4, "little")
            data = b"\x80\x04]" + opcode + (f"{number}\n".encode() if opcode == b"p" else size) + b"."
        case 2:
            data = (
                b"\x80\x02"
                + noise.choice([b"(", b"]", b"}", b"\x85", b"2", b")"]) * noise.choice([100, 100, 100, 100_000])
                + b"."
            )
        case 3 | 4:
            data = _endless(noise)
        case _:
            data = spoiled(pickle.dumps(METADATA, noise.choice([2, 3, 4, 5])), noise)
    found = only(lambda: read_metadata(data, "x"), ManifestError, StateRefused)
    if found is not None and type(found) is not dcp.Metadata:
        raise Lost(f"{type(found)} was taken for metadata")
    if pickle.loads(pickle.dumps(METADATA)) != METADATA or dcp_pickles.of_process() != _BEFORE:
        raise Lost("what was read has changed DCP's own classes")


# -- chunks -----------------------------------------------------------------------------------------------------------


def _bomb(size: int, *, named: bool = True) -> bytes:
    """A frame of so many zeros, that says so or not: a ten-thousandth of them, and never all at once."""
    packer = zstandard.ZstdCompressor(level=1, write_content_size=named).compressobj(size=size if named else -1)
    piece = bytes(1 << 20)
    return b"".join([*(packer.compress(piece) for _ in range(size >> 20)), packer.flush()])


PACKED = bytes(byte_planes.pack(RAW) or b"")
DELTA = bytes(element_deltas.make_delta(RAW, RAW) or b"")
FRAME = zstandard.ZstdCompressor(level=1, write_content_size=True).compress(RAW)
NAMELESS = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(RAW)
BOMBS = (_bomb(1 << 20), _bomb(256 << 20), _bomb(1 << 30), _bomb(1 << 30, named=False))


def chunk(noise: random.Random) -> None:
    form = noise.choice(["planes", "planes", "zst", "raw", "bp1"])
    size = noise.choices([len(RAW), 1, 1 << 20, 256 << 20], [40, 6, 6, 1])[0]  # the last takes a second
    if form == "planes":
        data = noise.choice([PACKED, spoiled(PACKED, noise), _head(noise, size), spoiled(_head(noise, size), noise)])
    elif form == "zst":
        frames = [FRAME, NAMELESS, FRAME + FRAME, *BOMBS, FRAME + b"\x00", spoiled(FRAME, noise)]
        data = noise.choice([*frames, struct.pack("<II", 0x184D2A50, 4) + bytes(4) + FRAME, _window(noise, size)])
    else:
        data = spoiled(RAW, noise)
    name = digest(RAW)
    stored = StoredChunk(codec=form, size=len(data), xxh3_128=digest(data), key=f"chunks/x/00000/{name}.{form}")
    entry = Chunk(size=size, xxh3_128=name, stored=stored)
    found = only(lambda: chunk_codec.decode(entry, data, "here"), CorruptChunk, FormatTooNew)
    if found is not None and bytes(found) != RAW:
        raise Lost(f"wrong bytes came out of {form}")
    _patch(random.Random(data))
    if form == "planes":
        whole = only(lambda: byte_planes.unpack(data, size), ValueError)
        if whole is not None and len(whole) != size:
            raise Lost(f"{len(whole)} bytes instead of {size}")


def _patch(noise: random.Random) -> None:
    """A patch or a delta, or what claims to be one, on a base that is right."""
    new = bytearray(RAW)
    new[100:130] = noise.randbytes(30)
    kind, numbers = noise.choice(["patch", "delta"]), (0, 1, 9, 1 << 31)
    make, apply = chunk_codec.PATCHES[kind]
    made = bytes(make(new, RAW) or b"")
    assert made
    heads = [block_patches.HEAD.pack(b"TPC1", size, count) for size in (len(RAW), 1) for count in numbers]
    if kind == "delta":
        blocks = [struct.pack("<BBII", width, 1, count, noise.choice(numbers)) for width in (1, 2) for count in numbers]
        heads = [made[:12] + block + noise.choice([b"", b"\x01" + bytes(4)]) for block in blocks]
    data = noise.choice([made, spoiled(made, noise), noise.choice(heads) + noise.choice([FRAME, NAMELESS, *BOMBS])])
    found = only(lambda: apply(data, RAW), ValueError, zstandard.ZstdError)
    if found is not None and len(found) != len(RAW):
        raise Lost(f"a {kind} made {len(found)} bytes of {len(RAW)}")
    name = digest(bytes(new))
    base = Chunk(size=len(RAW), xxh3_128=digest(RAW))
    stored = StoredChunk(codec=kind + 11 * "0", size=len(data), xxh3_128=digest(data), key="", base=base)
    entry = Chunk(size=len(RAW), xxh3_128=name, stored=stored)
    taken = only(lambda: chunk_codec.decode(entry, data, "here", None, RAW), CorruptChunk, FormatTooNew)
    if taken is not None and bytes(taken) != new:
        raise Lost(f"wrong bytes came out of a {kind}")


def _head(noise: random.Random, size: int) -> bytes:
    head = byte_planes.HEAD.pack(b"TPL1", size % (1 << 32), noise.choice([0, 11, 12, 14, 20, 21, 63, 255]), bytes(3))
    block = byte_planes.BLOCK_HEAD.pack(
        noise.choice([1, 2, 4, 8, 0x82, 0x84, 0x88, 0x81, 3, 0]), noise.choice([0, 1, 7, 200])
    )
    body = noise.choice([b"", BOMBS[0], *BOMBS[2:], bytes(64)])
    length = noise.choice([len(body), len(body), 0, 1, 4, 2**32 - 1, 1 << 20])
    plane = byte_planes.PLANE_HEAD.pack(noise.choice([0, 1, 1, 2, 3]), length) + body
    return (
        head
        + (block + plane) * noise.choice([1, 3, 1000 if len(plane) < 200 else 9])
        + noise.choice([b"", PACKED[12:]])
    )


def _window(noise: random.Random, size: int) -> bytes:
    """A frame's head that asks for a window, and names a size, of its own choice."""
    return b"\x28\xb5\x2f\xfd" + bytes([0xC0, noise.randrange(256)]) + size.to_bytes(8, "little") + noise.randbytes(20)


# -- messages ---------------------------------------------------------------------------------------------------------

_PART = {"checkpoint": {"run": "run", "attempt": attempt(1), "step": 1}, "rank": 0, "world": 1}
REQUESTS: list[dict[str, Any]] = [
    {"op": "attach"},
    {"op": "status"},
    {"op": "report", "run": "run"},
    {"op": "candidates", "run": "run"},
    {"op": "fetch", "part": _PART, "wanted": {"a/b": [[0, 3], [5, 6]]}},
    {"op": "wait", "part": _PART, "tier": "near", "timeout_s": 0.01},
    {"op": "pin", "checkpoint": _PART["checkpoint"], "pinned": True},
    {"op": "pause", "for_s": 0.5},
    {"op": "resume"},
    {"op": "hello", "protocol": str(PROTOCOL), "version": "0.1.0"},
]
HANDED: list[dict[str, Any]] = [
    {"op": "lend", "slot": 0},
    {"op": "persist", "part": _PART, "slot": 0, "tensors": 4096, "manifest": 100, "tree": 10},
    {"op": "recall", "part": _PART},
    {"op": "leave"},
    {"op": "hello", "protocol": str(PROTOCOL), "version": "0.1.0"},
]
REPLIES: list[dict[str, Any]] = [
    {"ok": True, "protocol": str(PROTOCOL), "version": "0.1.0"},
    {"ok": True, "pid": 1, "tiers": {"near": "file:///x"}},
    {"ok": False, "error": "StoreUnavailable", "message": "x"},
    {"ok": False, "error": "TimeoutError", "message": "x"},
    {"ok": True, "sight": {"whole": {"1": {attempt(1): [1, 2]}}, "origins": {attempt(1): None}, "unreached": []}},
    {"working": True, "done": 1, "total": 2, "tiers": ["near"]},
]


def message(noise: random.Random) -> None:
    request = dumped(mutated(noise.choice(REQUESTS), noise, noise.randrange(1, 4)), noise)
    if noise.random() < 0.1:
        request = b'{"x":' + b"[" * noise.choice([500, 30_000]) + b',"op":"status"}'
    only(lambda: message_codec.decode_request(request), msgspec.DecodeError, ValueError)
    handed = dumped(mutated(noise.choice(HANDED), noise, noise.randrange(1, 4)), noise)
    if noise.random() < 0.1:
        handed = b'{"x":' + b"[" * noise.choice([500, 8000]) + b',"op":"leave"}'
    found = only(lambda: message_codec.decode_handoff(handed), msgspec.DecodeError, ValueError)
    if isinstance(found, message_codec.PersistSnapshot) and not is_key(found.part.manifest_key):
        raise Lost(f"{found} was taken")
    reply = mutated(noise.choice(REPLIES), noise, noise.randrange(1, 3))
    if isinstance(reply, dict):
        only(lambda: message_codec.raise_error(reply), TierdError, TimeoutError)
        only(lambda: read_member(reply, "sight", RunView), DaemonUnavailable)
        only(lambda: message_codec.parse_greeting(reply))


READERS: dict[str, Reader] = {
    "manifest": manifest,
    "config": config,
    "names": names,
    "header": header,
    "tree": tree,
    "metadata": metadata,
    "chunk": chunk,
    "message": message,
}
