"""State trees that nobody saved, each of at most 20 MiB, built to cost a reader memory or time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import torch
from support.state_files import copy_into, plan_layout

_SIZE = 20 << 20  # bytes
_PRIME = 2**61 - 1  # ints that differ by a multiple of it have the same hash
_TENSOR = {
    "t": torch.zeros(1 << 18),
    "n": torch.zeros(1 << 16, dtype=torch.int64),
    "b": torch.zeros(1 << 16, dtype=torch.uint8),
}
_LAYOUT = plan_layout(_TENSOR)
FILE = bytearray(_LAYOUT.size)
copy_into(_LAYOUT, _TENSOR, FILE)


def _many(one: str) -> bytes:
    return ('{"a":[' + ",".join([one] * (_SIZE // (len(one) + 1))) + "]}").encode()


def _members() -> bytes:
    return ('{"a":{' + ",".join(f'"{number:x}":1' for number in range(_SIZE // 10)) + "}}").encode()


def _keyed(keys: list[str], form: str = '{"a":{"$dict":[%s]}}') -> bytes:
    return (form % ",".join(f"[{key},1]" for key in keys)).encode()


def _map(keys: list[str]) -> bytes:
    return f'{{"a":{{"$map":[[{",".join(keys)}],[{",".join(["1"] * len(keys))}]]}}}}'.encode()


def _big(count: int) -> list[str]:
    return [json.dumps({"$int": hex(1 + number * _PRIME)}) for number in range(1, count)]


def _tuples(count: int) -> list[str]:
    pairs = itertools.islice(itertools.product(("-1", "-2"), repeat=17), count)  # hash(-1) == hash(-2)
    return ['{"$tuple":[' + ",".join(parts) + "]}" for parts in pairs]


_SHARD = (
    '{"$dtensor":[{"$tensor":"t"},{"shape":[],"stride":[],"mesh":[],"names":null,"placements":[],"coordinate":[]}]}'
)
TREES: dict[str, Callable[[], bytes]] = {
    "lists": lambda: _many("[]"),
    "deques": lambda: _many('{"$deque":[null,[]]}'),
    "sets": lambda: _many('{"$set":[1,2,3,4,5]}'),
    "small dicts": lambda: _many('{"a":1}'),
    "ordered dicts": lambda: _many('{"$odict":[{"a":1}]}'),
    "counters": lambda: _many('{"$counter":{"a":1}}'),
    "one dict": _members,
    "values": lambda: ('{"a":[' + "1," * ((1 << 24) + 1) + "1]}").encode(),
    "brackets in strings beside lists": lambda: b'{"a":["' + b'[\\"' * 99 + b'",' + _many("[]")[5:],
    "colliding ints": lambda: _keyed(_big(100_000)),
    "colliding tuples": lambda: _keyed(_tuples(100_000)),
    "colliding members": lambda: ('{"a":{"$set":[' + ",".join(_big(100_000)) + "]}}").encode(),
    "colliding counts": lambda: _keyed(_big(100_000), '{"a":{"$counter":{"$dict":[%s]}}}'),
    "colliding names": lambda: _keyed(_big(100_000), '{"$dict":[%s]}'),
    "one tensor as many arrays": lambda: _many('{"$array":["t","<f4",[262144]]}'),
    "one tensor as many runs": lambda: _many('{"$values":["n","int",65536]}'),
    "one tensor as many texts": lambda: _many('{"$values":["b","str",65536]}'),
    "colliding keys of a map": lambda: _map(_big(100_000)),
    "shards": lambda: _many(_SHARD),
    "nested lists": lambda: b'{"a":' + b"[" * 10_000_000 + b"]" * 10_000_000 + b"}",
    "nested keys": lambda: _keyed(['{"$tuple":[' * 500_000 + "1" + "]}" * 500_000]),
    "quotes": lambda: b'{"a":"' + b'\\"' * (10 << 20),
    "open quotes": lambda: b'{"a":[' + b"[]," * (3 << 20) + b'"' + b"[{:,\\\\" * (1 << 20),
}
