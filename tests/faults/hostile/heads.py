"""Names and heads as somebody may plant them on a tier, and what reads them: for `faults.hostile`.

What is a name, and what a head may say, is worked out from FORMAT.md.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import re
from datetime import UTC, datetime
from typing import Any

from faults.hostile.mutation import NUMBERS, dumped, mutated, spoiled, text
from faults.hostile.readers import MANIFEST, Reader, only
from faults.rounds import Lost
from support.by_hand import seal
from support.world import attempt

from tierd.core.errors import FormatTooNew, ManifestError
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.timeline.launch_chain import decode_head, encode_head, order_by_timeline
from tierd.core.timeline.run_view import run_view_of
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.stores.base import is_key
from tierd.stores.memory_store import MemoryStore

BY = "0123abcd"
RUN = "run"
HEAD: dict[str, Any] = {
    "version": 1,
    "run": RUN,
    "by": BY,
    "counter": 3,
    "before": "0123456789abcdef" * 2,
    "written": "2026-11-22T00:00:00+00:00",
    "launches": {
        attempt(1): {"resumed_from": None, "newest": 30},
        attempt(2): {"resumed_from": {"step": 20, "attempt": attempt(1)}, "newest": None},
        attempt(3): {"resumed_from": {"step": 25, "attempt": attempt(2)}, "newest": 40},
    },
}
MOST = 1 << 20  # bytes of a head, FORMAT.md
LAUNCHES = 4096
YEAR_2200_MS = int(datetime(2200, 1, 1, tzinfo=UTC).timestamp()) * 1000
_ATTEMPT = re.compile(r"[0-9a-f]{12}-[0-9a-f]{8}")
_MANIFEST = re.compile(
    r"run/manifests/([0-9]{12})\.([0-9a-f]{12}-[0-9a-f]{8})/([0-9]{5})-of-([0-9]{5})\.json", re.ASCII
)
_TIMES = (0, 1, 0x18_0000_0001, 0x18_0000_0009, YEAR_2200_MS - 1, YEAR_2200_MS, (1 << 48) - 1)


def _is_launch(name: str) -> bool:
    return bool(_ATTEMPT.fullmatch(name)) and int(name[:12], 16) < YEAR_2200_MS


@functools.cache
def huge() -> list[bytes]:
    """A head with one launch and one byte more than any reader takes, and the largest of either that must be taken."""
    some = [{f"{number:012x}-00000000": {"resumed_from": None, "newest": 1} for number in range(LAUNCHES + 1)}]
    some.append(dict(list(some[0].items())[:LAUNCHES]))
    found = [seal(json.dumps(HEAD | {"launches": one}, separators=(",", ":")).encode()) for one in some]
    body = json.dumps(HEAD, separators=(",", ":")).encode()
    for size in (MOST + 1, MOST):
        found.append(seal(body[:-1] + b" " * (size - 45 - len(body)) + b"}"))
        assert len(found[-1]) == size
    return found


def _launch(noise: random.Random) -> str:
    if noise.random() < 0.2:
        return text(noise)
    return f"{noise.choice(_TIMES):012x}-{noise.choice([0, 1, 2, 3, (1 << 32) - 1]):08x}"


def _aimed(noise: random.Random) -> dict[str, Any]:
    """A head that is right but for one launch, which is none, or turns in a circle, or a step."""
    tree: dict[str, Any] = json.loads(json.dumps(HEAD))
    one = {"step": noise.choice([*NUMBERS, 20]), "attempt": _launch(noise)}
    tree["launches"][_launch(noise)] = {
        "resumed_from": noise.choice([None, one]),
        "newest": noise.choice([*NUMBERS, None, 7]),
    }
    return tree


def head(noise: random.Random) -> None:
    kind = noise.random()
    if kind < 0.01:
        data = noise.choice(huge())
    else:
        tree = mutated(HEAD, noise, noise.randrange(1, 4)) if kind < 0.6 else _aimed(noise)
        data = seal(dumped(tree, noise) if kind < 0.8 else json.dumps(tree).encode("utf-8", "surrogatepass"))
    if 0.1 < kind < 0.3:
        data = spoiled(data, noise)
    found = only(lambda: decode_head(data, RUN, BY), ManifestError, FormatTooNew)
    if found is None:
        if kind < 0.01 and data in (huge()[1], huge()[3]):
            raise Lost("the largest head that there may be was refused")
        return
    if len(data) > MOST or len(found.launches) > LAUNCHES:
        raise Lost(f"a head of {len(data)} bytes and {len(found.launches)} launches was taken")
    if (found.version, found.run, found.by) != (1, RUN, BY) or found.counter < 1:
        raise Lost(f"it is not the head that belongs there: {found}")
    for launch, known in found.launches.items():
        origin = known.resumed_from
        if not _is_launch(launch) or (origin and (not _is_launch(origin.attempt) or origin.attempt >= launch)):
            raise Lost(f"nobody can have made launch {launch!r}, from {origin}")
        if not 0 <= (known.newest or 0) < 10**12 or (origin and not 0 <= origin.step < 10**12):
            raise Lost(f"a step that is none: {known}")
    if any(ord(one) < 32 or ord(one) == 127 for one in found.written):
        raise Lost(f"a control character was taken: {found.written!r}")
    if decode_head(encode_head(found), RUN, BY) != found:
        raise Lost(f"written again it is another one: {found}")


def _planted(noise: random.Random) -> tuple[str, bytes]:
    """A key that a listing may show, near what FORMAT.md names, and what lies there."""
    step = noise.choice(["000000000007", "999999999999", "00000000000\u0667", "7", "0000000000007", text(noise)])
    rank, world = (noise.choice(["00000", "00001", "99999", "0000\u0661", "1", text(noise)]) for _ in range(2))
    name = f"{step}.{_launch(noise)}"
    key = noise.choice(
        [
            f"{RUN}/manifests/{name}/{rank}-of-{world}.json",
            f"{RUN}/manifests/{name}/00000-of-0000{noise.randrange(4)}.json",
            f"{RUN}/quarantine/{name}/{rank}-of-{world}.json",
            f"{RUN}/timeline/{noise.choice([BY, BY.upper(), BY[:7], text(noise)])}.json",
            f"{RUN}/timeline/{BY}.json/{noise.choice([BY, text(noise)])}",
            f"{RUN}/{noise.choice(['pins', 'manifests', 'chunks', 'pruning'])}/{name}",
            f"{RUN}/{text(noise)}/{name}",
        ]
    )
    tree = mutated(noise.choice([HEAD, MANIFEST]), noise, 1)
    data = noise.choice([b"", noise.randbytes(40), dumped(tree, noise), seal(dumped(tree, noise)), seal(b"{}")])
    return key, data


def listing(noise: random.Random) -> None:
    """A look at a tier on which names were planted, and what a resume makes of it."""
    planted = [_planted(noise) for _ in range(noise.randrange(1, 12))]
    store = MemoryStore()
    # What no store takes, none lists; `is_key` is what any of them is asked with.
    store.objects = {key: (data, number) for number, (key, data) in enumerate(planted) if is_key(key)}
    store.keys = sorted(store.objects)
    place = asyncio.run(TierObserver(store).observe({RUN}, {RUN: (0,)}, spare_reads=noise.choice([0, 100])))
    names = {key: match for key in store.keys if (match := _MANIFEST.fullmatch(key))}
    right = {
        (int(match[1]), match[2]) for match in names.values() if int(match[3]) < int(match[4]) and _is_launch(match[2])
    }
    if {(one.step, one.attempt) for one in place.checkpoints} != right:
        raise Lost(f"{sorted(store.keys)} were taken for {sorted(place.checkpoints)}")
    for seen in place.copies(RUN):
        line = order_by_timeline({seen.id}, {seen.id}, Inventory(Place(), {"t": place}).origins(RUN))
        if len({*line.path, *line.branches}) != 1:
            raise Lost(f"{seen.id} is on no line: {line}")
    run_view_of(Inventory(Place(), {"t": place}), RUN)


HEADS: dict[str, Reader] = {"head": head, "listing": listing}
