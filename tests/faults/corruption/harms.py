"""What befalls bytes, and where: the harms of `faults.corruption`. Each answers whether it changed anything."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable

from faults.corruption.places import TIERS, Places
from support.by_hand import SEAL_BYTES, seal, sealed

from tierd.core.ids import PartId

LOCAL = "local"
MANIFEST = "manifest.json"
# Lies with an intact seal. What they say of raw bytes shows only where another manifest, or the bytes, are asked; of
# the spool's own nobody can tell, whose word counts.
FORGED_NAMES = ("rank", "world_size", "step", "attempt", "run")
FORGED_FORMS = ("size", "xxh3_128", "key", "absent", "codec", "home", "torn raw")
FORGED_DEEP = ("raw",)


def spoil(data: bytes, noise: random.Random, kind: str = "") -> bytes | None:
    """Other bytes in the place of `data`; None: nothing at all."""
    changed = bytearray(data)
    at = noise.randrange(len(data)) if data else 0
    end = min(len(data), at + 1 + int(noise.expovariate(0.02)))
    kinds = ["bit", "bit", "bit", "run", "truncate", "extend", "zero", "empty", "remove"]
    match kind or noise.choice(kinds):
        case "bit" if data:
            changed[at] ^= 1 << noise.randrange(8)
        case "run":
            changed[at:end] = noise.randbytes(end - at)
        case "truncate":
            del changed[at:]
        case "extend":
            changed += noise.choice([data[:100], noise.randbytes(noise.randrange(1, 5000)), bytes(1)])
        case "zero":
            changed[at:end] = bytes(end - at)
        case "empty":
            changed.clear()
        case "remove":
            return None
    return bytes(changed)


class Harms:
    """Harms to one world, drawn from `noise`, most of them to `focus` and there to one chunk.

    Attributes:
        done: what changed something, by name.
    """

    def __init__(self, places: Places, focus: PartId, noise: random.Random, *, deep: bool) -> None:
        self._places, self._noise, self._deep = places, noise, deep
        self._focus, self._chunk = focus, noise.random()
        self.done: list[str] = []

    def inflict(self, number: int, places: Iterable[str] = (LOCAL, *TIERS), everywhere: float = 0.1) -> list[str]:
        """So many harms, less those that would change nothing; and with this probability, one in every place."""
        chosen = list(places)
        for _ in range(number):
            part = self._focus if self._noise.random() < 0.8 else self._noise.choice(self._places.parts)
            place = self._noise.choice(chosen)
            if place == LOCAL and part in self._places.gone:
                place = self._noise.choice(TIERS)
            one = self._local if place == LOCAL else self._tier
            what = one(part) if place == LOCAL else self._tier(part, place)
            if what:
                self.done.append(f"{'tier' if place in TIERS else LOCAL}: {what}")
        if self._noise.random() < everywhere:  # the same chunk or manifest everywhere
            self.done += self._everywhere(chosen)
        return self.done

    def _index(self, count: int) -> int:
        return int(self._chunk * count) if self._noise.random() < 0.6 else self._noise.randrange(count)

    # -- tiers --------------------------------------------------------------------------------------------------------

    def _tier(self, part: PartId, tier: str) -> str | None:
        keys = self._keys(part, tier)
        kind = self._noise.choices(
            ["chunk", "swap", "foreign", "twin", "manifest", "other manifest", "forged"], [10, 2, 2, 1, 3, 3, 4]
        )[0]
        match kind:
            case "chunk" | "manifest":
                key = part.manifest_key if kind == "manifest" else keys[self._index(len(keys))]
                return kind if self._set_raw(tier, key, self._spoiled(self._places.raw(tier, key))) else None
            case "swap":
                one, other = keys[self._index(len(keys))], self._noise.choice(keys)
                first, second = self._places.raw(tier, one), self._places.raw(tier, other)
                return kind if self._set_raw(tier, one, second) | self._set_raw(tier, other, first) else None
            case "foreign":  # another checkpoint's, rank's, run's or tier's object under this key
                other = self._noise.choice(self._all_keys())
                if self._noise.random() < 0.3:
                    raw = self._places.raw(tier, other)
                    key = keys[self._index(len(keys))]
                    return kind if raw is not None and self._set_raw(tier, key, raw) else None
                data = self._places.pristine[self._noise.choice(TIERS)].get(other)
                return kind if data is not None and self._set(tier, keys[self._index(len(keys))], data) else None
            case "twin":  # a right object once more, under another checkpoint's, rank's or run's name
                key = keys[self._index(len(keys))]
                other = self._noise.choice(self._all_keys()).rpartition("/")[0] + "/" + key.rpartition("/")[2]
                data = self._places.get(tier, key)
                if data is None or self._places.get(tier, other) is not None:
                    return None
                return kind if self._set(tier, other, data) else None
            case "other manifest":  # another part's, or this part's from another place
                if self._noise.random() < 0.3:  # the bytes that lie there
                    raw = self._places.raw(tier, self._noise.choice(self._places.parts).manifest_key)
                    return kind if raw is not None and self._set_raw(tier, part.manifest_key, raw) else None
                data = self._manifest_of_another(part)
                return kind if data is not None and self._set(tier, part.manifest_key, data) else None
        forged = self._forged(self._places.pristine[tier][part.manifest_key], stored=True)
        return kind if self._set(tier, part.manifest_key, forged) else None

    def _set(self, tier: str, key: str, data: bytes | None) -> bool:
        if self._places.get(tier, key) == data:
            return False
        self._places.put(tier, key, data)
        return True

    def _set_raw(self, tier: str, key: str, data: bytes | None) -> bool:
        if self._places.raw(tier, key) == data:
            return False
        self._places.put_raw(tier, key, data)
        return True

    def _spoiled(self, data: bytes | None) -> bytes | None:
        return spoil(data, self._noise) if data is not None else None

    def _keys(self, part: PartId, tier: str) -> list[str]:
        """The chunks of a part, as its right manifest names them."""
        reported = sealed(self._places.pristine[tier][part.manifest_key]) or {}
        return [f"{reported['run']}/{chunk['stored']['key']}" for file in reported["files"] for chunk in file["chunks"]]

    def _all_keys(self) -> list[str]:
        return [key for key in self._places.pristine["near"] if "/chunks/" in key]

    def _manifest_of_another(self, part: PartId) -> bytes | None:
        other = self._noise.choice([part, *self._places.parts])
        place = self._noise.choice([LOCAL, *TIERS])
        if place == LOCAL:
            return self._places.files[f"{other.path}/{MANIFEST}"]
        return self._places.pristine[place][other.manifest_key]

    def _forged(self, data: bytes, *, stored: bool) -> bytes:
        """A right manifest that was made to say something else, with a seal of its own."""
        reported = json.loads(data[:-SEAL_BYTES] + b"}")
        chunks = [chunk for file in reported["files"] for chunk in file["chunks"]]
        deep = FORGED_DEEP if self._deep and stored else ()
        way = self._noise.choice([*FORGED_NAMES, *(FORGED_FORMS if stored else ()), *deep])
        self._forge(reported, chunks[self._index(len(chunks))], way)
        return seal(json.dumps(reported, separators=(",", ":")).encode())

    def _forge(self, reported: dict, chunk: dict, way: str) -> None:
        other = self._noise.choice(self._all_keys())
        match way:
            case "rank":
                reported["rank"] = 1 - reported["rank"]
            case "world_size":
                reported["world_size"] += 1
            case "step":
                reported["step"] += 1
            case "attempt":
                reported["attempt"] = f"{int(reported['attempt'][:12], 16) + 1:012x}{reported['attempt'][12:]}"
            case "run":
                reported["run"] = "another"
            case "size":
                chunk["stored"]["size"] += self._noise.choice([-1, 1])
            case "xxh3_128":
                chunk["stored"]["xxh3_128"] = f"{self._noise.getrandbits(128):032x}"
            case "key":  # another chunk's
                chunk["stored"]["key"] = other.partition("/")[2]
            case "home":  # under another checkpoint's name, where it may lie or not
                pieces = chunk["stored"]["key"].split("/")
                pieces[-3] = other.split("/")[-3]
                chunk["stored"]["key"] = "/".join(pieces)
            case "absent":
                del chunk["stored"]
            case "raw" | "torn raw":
                chunk["xxh3_128"] = f"{self._noise.getrandbits(128):032x}"
                if "stored" in chunk and way == "raw":
                    home, _, name = chunk["stored"]["key"].rpartition("/")
                    chunk["stored"]["key"] = f"{home}/{chunk['xxh3_128']}.{name.rpartition('.')[2]}"
            case "codec":
                stored = chunk["stored"]
                stored["codec"] = self._noise.choice(sorted({"raw", "zst", "planes"} - {stored["codec"]}))
                stored["key"] = f"{stored['key'].rpartition('.')[0]}.{stored['codec']}"

    # -- the spool ----------------------------------------------------------------------------------------------------

    def _local(self, part: PartId) -> str | None:
        files = sorted(self._places.held[part])
        path = f"{part.path}/{files[self._index(len(files))]}"
        kinds: dict[str, Callable[[], str | None]] = {
            "file": lambda: self._write(path, self._spoiled(self._places.read(path))),
            "manifest": lambda: self._write(
                f"{part.path}/{MANIFEST}", self._spoiled(self._places.read(f"{part.path}/{MANIFEST}"))
            ),
            "swap": lambda: self._swap_ranges(path),
            "foreign": lambda: self._write(path, self._noise.choice(list(self._places.files.values()))),
            "other manifest": lambda: self._write(f"{part.path}/{MANIFEST}", self._manifest_of_another(part)),
            "forged": lambda: self._forge_local(f"{part.path}/{MANIFEST}"),
        }
        kind = self._noise.choices(list(kinds), [10, 3, 2, 2, 2, 2])[0]
        return kind if kinds[kind]() else None

    def _write(self, path: str, data: bytes | None) -> str | None:
        if self._places.read(path) == data:
            return None
        self._places.write(path, data)
        return path

    def _swap_ranges(self, path: str) -> str | None:
        data = self._places.read(path)
        if data is None or len(data) < 64:
            return None
        size = min(4096, len(data) // 2)
        return self._write(path, data[-size:] + data[size:-size] + data[:size])

    def _forge_local(self, path: str) -> str | None:
        return self._write(path, self._forged(self._places.files[path], stored=False))

    def _everywhere(self, places: list[str]) -> list[str]:
        part, done = self._focus, []
        keep = self._noise.choice([None, *places])  # one place may be spared
        which = self._noise.choice(["manifest", "chunk"])
        for place in places:
            if place == keep or (place == LOCAL and part in self._places.gone):
                continue
            if place == LOCAL:
                files = [path for path, data in sorted(self._places.held[part].items()) if data]
                name = MANIFEST if which == "manifest" else files[int(self._chunk * len(files))]
                path = f"{part.path}/{name}"
                if (data := self._places.read(path)) is not None:
                    self._places.write(path, spoil(data, self._noise, "bit"))
                    done.append(f"everywhere: {which}")
            else:
                keys = self._keys(part, place)
                key = part.manifest_key if which == "manifest" else keys[int(self._chunk * len(keys))]
                if (data := self._places.raw(place, key)) is not None:
                    self._places.put_raw(place, key, spoil(data, self._noise, "bit"))
                    done.append(f"everywhere: {which}")
        return done
