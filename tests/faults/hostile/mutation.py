"""Bytes and JSON made hostile, from a seed: what honest writers say, changed where readers are likely to trust it."""

from __future__ import annotations

import json
import random
from typing import Any

NUMBERS = (0, 1, -1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**12, 10**30, -(2**63), 1.5, 1e308, 5e-324)
TEXTS = (
    *("", ".", "..", "../../escape", "/etc/passwd", "a/../../b", "a//b", "a/"),
    *("nul\x00byte", "line\nbreak", "\x7f\x1b[2J", "\u202egnp.exe", "x" * 300, "d/" * 600 + "f"),
    *("manifest.json", "manifest.json.new", "$tensor", "__class__", "\U0001f4a3", "\ud800"),
    *("nan", "-inf", "1e999", "2026-01-01T00:00:00+00:00", "9999-12-31T23:59:59-14:00"),
    *("raw", "O", "file:///", "%2e%2e/"),
)


def text(noise: random.Random) -> str:
    return noise.choice([*TEXTS, "".join(chr(noise.randrange(1, 0x2FF)) for _ in range(noise.randrange(12)))])


def deep(noise: random.Random) -> Any:
    """Something nested far, in one of two ways; not through `json`, which would not write it."""
    found: Any = 0
    for _ in range(noise.choice([50, 101, 150])):
        found = [found] if noise.random() < 0.5 else {"a": found}
    return found


def value(noise: random.Random) -> Any:
    match noise.randrange(8):
        case 0 | 1:
            return noise.choice(NUMBERS)
        case 2 | 3:
            return text(noise)
        case 4:
            return noise.choice([None, True, False, [], {}])
        case 5:
            return deep(noise)
        case 6:
            return [noise.choice(NUMBERS)] * noise.choice([1, 2, 65, 1000])
        case _:
            return {text(noise): noise.choice(NUMBERS) for _ in range(3)}


def mutated(tree: Any, noise: random.Random, times: int = 1) -> Any:
    """A JSON value with some of it changed, removed, doubled, renamed or moved."""
    tree = json.loads(json.dumps(tree))
    for _ in range(times):
        spots = list(_spots(tree))
        if not spots:
            return value(noise)
        holder, at = noise.choice(spots)
        match noise.randrange(6):
            case 0 | 1:
                holder[at] = value(noise)
            case 2:
                del holder[at]
            case 3:
                other, there = noise.choice(spots)
                try:
                    holder[at] = json.loads(json.dumps(other[there]))
                except (KeyError, IndexError):
                    continue
            case 4 if isinstance(holder, dict):
                holder[text(noise)] = holder.pop(at)
            case _ if isinstance(holder, list):
                holder[at:at] = [holder[at]] * noise.choice([1, 2, 50])
    return tree


def _spots(tree: Any) -> Any:
    for at in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, at
        yield from _spots(tree[at])


def dumped(tree: Any, noise: random.Random) -> bytes:
    """JSON, with what no tree can say: a name twice, NaN, depth, long numbers, lone surrogates, other encodings."""
    found = json.dumps(tree, separators=(",", ":"), ensure_ascii=noise.random() < 0.5)
    match noise.randrange(12):
        case 0 if found.startswith("{") and len(found) > 2:
            cut = found.find(",")
            found = found[:cut] + "," + found[1:] if cut > 0 else found
        case 1:
            found = found.replace("0", noise.choice(["NaN", "Infinity", "-0", "1e400", "9" * 5000, "0x1"]), 1)
        case 2:
            depth = noise.choice([200, 1500, 20_000])
            found = found.replace("[]", "[" * depth + "]" * depth, 1).replace(
                "null", noise.choice(['{"a":' * depth + "1" + "}" * depth, "[" * depth]), 1
            )
        case 3:
            found = noise.choice(["\ufeff", " " * 50, ""]) + found + noise.choice(["", " ", "\n{}", "\x00"])
    data = found.encode("utf-8", "surrogatepass")
    return spoiled(data, noise) if noise.random() < 0.2 else data


def spoiled(data: bytes, noise: random.Random, times: int = 0) -> bytes:
    """Bytes with some flipped, cut, doubled, moved or replaced by what means something to somebody."""
    changed = bytearray(data)
    for _ in range(times or noise.choice([1, 1, 2, 4, 16])):
        at = noise.randrange(len(changed) + 1)
        end = min(len(changed), at + noise.choice([1, 2, 4, 8, 64]))
        match noise.randrange(7):
            case 0 | 1 if at < len(changed):
                changed[at] ^= 1 << noise.randrange(8)
            case 2:
                del changed[at:end]
            case 3:
                changed[at:at] = changed[at:end] * noise.choice([1, 2, 100])
            case 4:
                size = noise.choice([1, 2, 4, 8])
                number = noise.choice([0, 1, (1 << 8 * size) - 1, 1 << (8 * size - 1), len(changed)])
                changed[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, noise.choice(["little", "big"]))
            case 5:
                del changed[at:]
            case 6:
                changed[at:end] = noise.randbytes(end - at)
    return bytes(changed)
