"""`tierd inspect`: whether other programs' checkpoints are complete and sound.

Invariant: nothing is loaded, and nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tierd.cli import timings
from tierd.cli.options import JsonOption
from tierd.cli.tables import complain, console, print_json, size, table
from tierd.core.errors import CheckpointNotFound, ConfigError, TierdError
from tierd.watching.followed import FollowingTree, NamedPlace, named_place
from tierd.watching.inspect import Finding, Inspected, Opener, Status, inspect_unit
from tierd.watching.layouts import units, units_of
from tierd.watching.listing import ListedEntry, Listing
from tierd.watching.loose_files import lone_file
from tierd.watching.twins import without_twins
from tierd.watching.unit import Unit

_EXIT_CODES: tuple[tuple[Status, int], ...] = (
    ("damaged", 5),
    ("unreadable", 6),
    *((status, 4) for status in ("changing", "incomplete", "unknown")),
)


class Inspections(msgspec.Struct, frozen=True):
    """The answer of `tierd inspect`."""

    units: tuple[Inspected, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """A path from the command line, and how its units are shown."""

    given: str
    named: NamedPlace

    @property
    def name(self) -> str | None:
        return self.named.name

    def shown(self, path: str) -> str:
        if self.name is None:
            return str(Path(self.given) / path)
        if path == self.name or path.startswith(self.name + "/"):
            return self.given + path[len(self.name) :]
        return str(Path(self.given).parent / path)


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("inspect")(inspect)


def inspect(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Checkpoints, or directories of them.")],
    json: JsonOption = False,
) -> None:
    """Check the structure of checkpoints of other programs, without loading or unpickling anything."""
    places, absent = list[_Place](), list[TierdError]()
    for path in paths:
        try:
            places.append(_Place(str(path), named_place(path)))
        except (CheckpointNotFound, ConfigError) as error:
            absent.append(error)
    found = tuple(one for place in places for one in _inspect(place))
    if json:
        print_json(Inspections(found))
    elif found:
        _show(found)
    code = next((code for status, code in _EXIT_CODES if any(one.status == status for one in found)), 0)
    for one in absent[1:]:
        complain(one)
    if absent and code not in (5, 6):
        raise absent[0]
    if absent:
        complain(absent[0])
    if code:
        raise typer.Exit(code)


def _inspect(place: _Place) -> Iterator[Inspected]:
    with place.named.tree() as tree:
        listing, chosen = _units(tree, place)
        found = [_checked(tree, listing, unit) for unit in chosen]
        if any(one.status == "damaged" for one in found):
            time.sleep(timings.given().damaged_s)
            again = _list(tree, place)
            found = [_unless_changed(unit, one, listing, again) for unit, one in zip(chosen, found, strict=True)]
        apart = [_twins(tree, listing, unit, one) for unit, one in zip(chosen, found, strict=True)]
    strays = tree.stray(chosen)
    for path, (status, reason) in strays.items():
        yield _named(Inspected(path, None, None, status, 0, 0, (Finding(path, None, status, reason),), ()), place)
    if not found and not strays:
        reason = "no checkpoint of a program that is known lies there"
        unknown = Finding(place.given, None, "unknown", reason)
        yield Inspected(place.given, None, None, "unknown", 0, 0, (unknown,), ())
    for one in chain.from_iterable(apart):
        yield _named(one, place)


def _twins(tree: FollowingTree, listing: Listing, unit: Unit, whole: Inspected) -> list[Inspected]:
    """Return the results of a unit's twins, each without the others, if one is sound; else that of the whole unit."""
    if whole.status in ("sound", "changing"):
        return [whole]
    apart = [_checked(tree, listing, alone) for _, alone in without_twins(unit, listing)]
    return apart if any(one.status == "sound" for one in apart) else [whole]


def _list(tree: FollowingTree, place: _Place) -> Listing:
    if place.name is None or place.named.path.is_dir():
        return tree.listing(place.name)
    return tree.files()


def _units(tree: FollowingTree, place: _Place) -> tuple[Listing, list[Unit]]:
    """Return the units at the place. A file is checked with the other files of its unit."""
    listing = _list(tree, place)
    entry = listing.entries.get(place.name or "", ListedEntry("directory"))
    if entry.kind == "file" and place.name is not None:
        return listing, units_of(listing, place.name)
    return listing, units(listing)


def _checked(tree: FollowingTree, listing: Listing, unit: Unit) -> Inspected:
    sizes: Mapping[str, int] = {path: listing.entries[path].size for path in unit.files}
    opener: Opener = lambda path: tree.opened(path, listing.entries[path])  # noqa: E731
    return inspect_unit(unit, sizes, opener, tree.unfollowed)


def _unless_changed(unit: Unit, found: Inspected, before: Listing, after: Listing) -> Inspected:
    """Return the result, or `changing` if the unit was written to since, because damage then proves nothing."""
    if found.status != "damaged":
        return found
    again = next((one for one in units(after) if one.path == unit.path), lone_file(unit.path))
    same = all(before.entries[path] == after.entries.get(path) for path in unit.files)
    if same and again.files == unit.files:
        return found
    written = Finding(unit.path, None, "changing", "still being written")
    return msgspec.structs.replace(found, status="changing", findings=(written, *found.findings))


def _named(found: Inspected, place: _Place) -> Inspected:
    findings = tuple(msgspec.structs.replace(one, file=place.shown(one.file)) for one in found.findings)
    uncovered = tuple(msgspec.structs.replace(one, file=place.shown(one.file)) for one in found.uncovered)
    notes = tuple(msgspec.structs.replace(one, file=place.shown(one.file)) for one in found.notes)
    shown = place.shown(found.path)
    return msgspec.structs.replace(found, path=shown, findings=findings, uncovered=uncovered, notes=notes)


def _show(found: tuple[Inspected, ...]) -> None:
    columns = ("PATH", "PROGRAM", "STEP", "FILES", "BYTES", "STATUS")
    out = console()
    out.print(table(None, columns, [_row(one) for one in found]))
    for one in found:
        for finding in one.findings:
            where = finding.file if finding.offset is None else f"{finding.file}: byte {finding.offset}"
            out.print(f"{where}: {finding.status}: {finding.reason}", soft_wrap=True)
        for note in one.notes:
            out.print(f"{note.file}: {note.note}", soft_wrap=True)


def _row(one: Inspected) -> tuple[str, ...]:
    step = "" if one.step is None else str(one.step)
    return one.path, one.program or "", step, str(one.files), size(one.bytes), one.status
