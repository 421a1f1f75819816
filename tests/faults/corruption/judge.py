"""What a harmed world can still give, worked out byte by byte: for `faults.corruption`.

None of tierd's code is used: a manifest is its JSON, its seal is computed here, and a chunk is right where its bytes
are the ones that were saved, or an encoding of them that the unharmed world had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import zstandard
from faults.corruption.cipher import UNREADABLE
from faults.corruption.places import ORIGIN, RUN, TIERS, WORLD, Places
from support.by_hand import chain, digest, program, raw, sealed

from tierd.core.ids import PartId

Piece = tuple[int, int, str]  # offset, size, digest of the raw bytes


def _is_entry(chunk: Mapping[str, Any]) -> bool:
    """Whether a chunk's key is not that of something else, and only a patch has a base, and always: FORMAT.md."""
    entry = chunk.get("stored")
    if not entry:
        return True
    name = f"{chunk['xxh3_128']}.{entry['codec']}"
    needs_base = entry["codec"].startswith(("patch", "delta"))
    return entry["key"].rpartition("/")[2] == name and ("base" in entry) == needs_base


def said(data: bytes | None, part: PartId) -> dict[str, Any] | None:
    """What a manifest says that is intact and says that it is `part`'s."""
    found = sealed(data) if data is not None else None
    if found is None or found["version"] not in (1, 3, 4):
        return None
    names = (found["run"], found["attempt"], found["step"], found["rank"], found["world_size"])
    entries = (one for file in found["files"] for chunk in file["chunks"] for one in chain(chunk))
    if not all(map(_is_entry, entries)):
        return None
    own = part.checkpoint
    return found if names == (own.run, own.attempt, own.step, part.rank, part.world) else None


@dataclass(frozen=True)
class Truth:
    """What one part holds."""

    files: Mapping[str, bytes]
    pieces: tuple[tuple[str, tuple[Piece, ...]], ...]  # by file, in the manifest's order


class Judge:
    """Answers about a world, from its bytes as they lie there now."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.truth = {part: self._truth(part) for part in places.parts}

    def _truth(self, part: PartId) -> Truth:
        files = self.places.held[part]
        reported = sealed(self.places.files[f"{part.path}/manifest.json"])
        assert reported is not None
        assert sorted(files) == [file["path"] for file in reported["files"]]
        pieces = []
        for file in reported["files"]:
            offset, found = 0, []
            for chunk in file["chunks"]:
                raw = files[file["path"]][offset : offset + chunk["size"]]
                assert len(raw) == chunk["size"] and digest(raw) == chunk["xxh3_128"], "the world is not as it was made"
                found.append((offset, chunk["size"], chunk["xxh3_128"]))
                offset += chunk["size"]
            assert offset == len(files[file["path"]])
            pieces.append((file["path"], tuple(found)))
        return Truth(files, tuple(pieces))

    # -- manifests --------------------------------------------------------------------------------------------------

    def manifest(self, place: str, part: PartId) -> bytes | None:
        if place in TIERS:
            return self.places.get(place, part.manifest_key)
        return self.places.read(f"{part.path}/manifest.json")

    def readable(self, place: str, part: PartId) -> dict[str, Any] | None:
        return said(self.manifest(place, part), part)

    def honest(self, place: str, part: PartId) -> dict[str, Any] | None:
        """What a place's manifest says, if it describes what was saved."""
        reported = self.readable(place, part)
        if reported is None:
            return None
        raw = [
            (file["path"], [(chunk["size"], chunk["xxh3_128"]) for chunk in file["chunks"]])
            for file in reported["files"]
        ]
        right = [(path, [(size, name) for _, size, name in pieces]) for path, pieces in self.truth[part].pieces]
        origin = reported["resumed_from"]
        mine = ORIGIN[part.checkpoint.attempt] if part.checkpoint.run == RUN else None
        return reported if raw == right and (origin and (origin["attempt"], origin["step"])) == mine else None

    # -- bytes ------------------------------------------------------------------------------------------------------

    def local(self, part: PartId, path: str) -> bytes | None:
        return self.places.read(f"{part.path}/{path}")

    def is_form(self, name: str, form: str, data: bytes | None) -> bool:
        """Whether an object is the encoding of a chunk that the unharmed world had, or another if it had a patch."""
        known = self.places.forms[name].get(form)
        if data is None or known is not None or form.startswith(("patch", "delta")):
            return data is not None and known == data
        try:
            stored = {"stored": {"key": "", "codec": form}, "size": self.places.sizes[name]}
            return digest(raw(stored, lambda key: data)) == name
        except Exception:  # of the program: it is no encoding at all
            return False

    def stored(self, tier: str, part: PartId, chunk: Mapping[str, Any]) -> bool:
        """Whether an object is as its manifest's entry says, and holds what was saved; with a patch, its bases too."""
        entry = chunk.get("stored")
        data = self.places.get(tier, f"{part.checkpoint.run}/{entry['key']}") if entry else None
        return (
            data is not None
            and len(data) == entry["size"]
            and digest(data) == entry["xxh3_128"]
            and (
                self.is_form(chunk["xxh3_128"], entry["codec"], data)
                if "base" not in entry
                else self.stored(tier, part, entry["base"])
                and digest(raw(chunk, self._get(tier, part))) == chunk["xxh3_128"]
            )
        )

    def _get(self, tier: str, part: PartId) -> Callable[[str], Any]:
        return lambda key: self.places.get(tier, f"{part.checkpoint.run}/{key}")

    def by_digest(self, tier: str, part: PartId, name: str) -> bool:
        """Whether a tier has a right object of a chunk under any checkpoint's name, at the part's own rank."""
        for form in ("raw", "zst", "planes"):
            end, start = f"/{part.rank:05}/{name}.{form}", f"{part.checkpoint.run}/chunks/"
            if any(
                key.endswith(end) and key.startswith(start) and self.is_form(name, form, data)
                for key, data in self.places.contents(tier)
            ):
                return True
        return False

    def lenient(self, part: PartId) -> bool:
        """Whether some harmed object still expands to what it should hold: formats have bits that mean nothing."""
        for tier in TIERS:
            for key, data in self.places.contents(tier):
                name, _, form = key.rpartition("/")[2].partition(".")
                if (
                    data is not UNREADABLE
                    and name in self.places.forms
                    and form != "raw"
                    and not self.is_form(name, form, data)
                ):
                    if form == "planes":
                        return True  # frames within frames: a reader that got right bytes out of it, got them
                    try:
                        # By reading: a flipped head may name any size, for which room would be made first.
                        raw = zstandard.ZstdDecompressor().stream_reader(data).read(1 << 20)
                    except zstandard.ZstdError:
                        continue
                    if digest(raw) == name:
                        return True
        return False

    # -- answers ----------------------------------------------------------------------------------------------------

    def copy_is_right(self, place: str, part: PartId) -> bool:
        reported = self.honest(place, part)
        if reported is None:
            return False
        if place in TIERS:
            return all(self.stored(place, part, chunk) for file in reported["files"] for chunk in file["chunks"])
        return all(self.local(part, path) == data for path, data in self.truth[part].files.items())

    def is_local(self, part: PartId) -> bool:
        return self.places.spool.path(part).is_dir()

    def exists(self, part: PartId, *, spool: bool = True) -> bool:
        return (spool and self.is_local(part)) or any(self.manifest(tier, part) is not None for tier in TIERS)

    def chunk_on_tiers(self, part: PartId, number: int, index: int) -> bool:
        """Whether any tier has a chunk right, where its manifest says or wherever its digest leads."""
        name = self.truth[part].pieces[number][1][index][2]
        for tier in TIERS:
            reported = self.honest(tier, part)
            if (
                reported
                and self._link(tier, part, reported["files"][number]["chunks"][index], (number, index)) is not None
            ):
                return True
            if self.by_digest(tier, part, name):
                return True
        return False

    def _link(self, tier: str, part: PartId, link: Mapping[str, Any], where: tuple[int, int]) -> bytes | None:
        """The bytes of a chunk, or of a base, whose object one tier has right: a base may come from any tier."""
        entry = link.get("stored")
        data = self._get(tier, part)(entry["key"]) if entry else None
        if data is None or len(data) != entry["size"] or digest(data) != entry["xxh3_128"]:
            return None
        if "base" not in entry:
            right = self.is_form(link["xxh3_128"], entry["codec"], data)
            return raw(link, lambda key: data) if right else None
        for there, base in self._places(tier, part, entry["base"], where):
            below = self._link(there, part, base, where)
            if below is not None:
                found = bytes(getattr(program(), f"apply_{entry['codec'][:5]}")(data, below))
                return found if digest(found) == link["xxh3_128"] else None
        return None

    def _places(
        self, tier: str, part: PartId, link: Mapping[str, Any], where: tuple[int, int]
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Where a base may lie: as the patch's manifest says, as those of other tiers say, or under the same key."""
        yield tier, link
        for other in (one for one in TIERS if one != tier):
            if reported := self.honest(other, part):
                equal = (link["size"], link["xxh3_128"])
                links = chain(reported["files"][where[0]]["chunks"][where[1]])
                yield from ((other, one) for one in links if (one["size"], one["xxh3_128"]) == equal)
            yield other, link

    def chunk_in_spool(self, part: PartId, number: int, index: int, *, whole: bool = False) -> bool:
        """Whether it lies right in its place; `whole`: in a file of the right length."""
        path, pieces = self.truth[part].pieces[number]
        offset, size, _ = pieces[index]
        data, right = self.local(part, path), self.truth[part].files[path]
        if data is None or (whole and len(data) != len(right)):
            return False
        return data[offset : offset + size] == right[offset : offset + size]

    def can_be_had(self, part: PartId, *, spool: bool = True) -> bool:
        spool = spool and self.is_local(part)
        if not any(self.honest(place, part) for place in (*(("local",) if spool else ()), *TIERS)):
            return False
        return all(
            (spool and self.chunk_in_spool(part, number, index)) or self.chunk_on_tiers(part, number, index)
            for number, (_, pieces) in enumerate(self.truth[part].pieces)
            for index in range(len(pieces))
        )

    def can_be_repaired(self, tier: str, part: PartId) -> bool:
        """Whether a tier's copy, whose manifest is right, can be made right by what lies elsewhere, as it lies now."""
        return all(
            self.chunk_in_spool(part, number, index, whole=True)
            or self.chunk_on_tiers(part, number, index)
            or self._lies_elsewhere(tier, part, (number, index))
            for number, (_, pieces) in enumerate(self.truth[part].pieces)
            for index in range(len(pieces))
        )

    def _lies_elsewhere(self, tier: str, part: PartId, where: tuple[int, int]) -> bool:
        """Whether another tier has what a tier's right manifest names for a chunk, whatever its own manifest says."""
        reported = self.honest(tier, part)
        if reported is None:
            return False
        chunk = reported["files"][where[0]]["chunks"][where[1]]
        return any(self._link(other, part, chunk, where) is not None for other in TIERS)

    def line(self, *, spool: bool = True) -> list[list[PartId]]:
        """The complete checkpoints of the run in the order in which they must be tried, as their parts."""
        places = ("local", *TIERS) if spool else TIERS
        known: dict[tuple[str, int], list[PartId]] = {}
        for part in self.places.parts:
            if part.checkpoint.run == RUN and self.exists(part, spool=spool):
                known.setdefault((part.checkpoint.attempt, part.checkpoint.step), []).append(part)
        found: list[list[PartId]] = []
        attempt, limit = max(known)[0] if known else None, 10**12
        while attempt is not None:
            mine = {step: parts for (launch, step), parts in known.items() if launch == attempt}
            for step in sorted(mine, reverse=True):
                if step <= limit and len(mine[step]) == WORLD:
                    found.append(mine[step])
            tells = any(self.readable(place, part) for parts in mine.values() for part in parts for place in places)
            origin = ORIGIN[attempt] if tells else None
            attempt, limit = origin or (None, 0)
        return found
