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

from tierd.cli import command_runtime
from tierd.cli.options import JsonOption
from tierd.cli.output import complain, print_answer, print_json
from tierd.cli.tables import Table
from tierd.core.errors import CheckpointNotFound, ConfigError, TierdError
from tierd.core.units import format_size
from tierd.watching.loose_units import lone_file_unit
from tierd.watching.named_directory import FollowingTree, NamedPath, resolve_named_path, units_without_twins
from tierd.watching.unit import ListedEntry, Listing, Unit
from tierd.watching.unit_detection import units, units_of
from tierd.watching.unit_inspection import InspectedUnit, Opener, UnitProblem, UnitStatus, inspect_unit

_EXIT_CODES: tuple[tuple[UnitStatus, int], ...] = (
    ("damaged", 5),
    ("unreadable", 6),
    *((status, 4) for status in ("changing", "incomplete", "unknown")),
)


class InspectReport(msgspec.Struct, frozen=True):
    """The answer of `tierd inspect`."""

    units: tuple[InspectedUnit, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """A path from the command line, and how its units are shown."""

    path_text: str
    location: NamedPath

    @property
    def name(self) -> str | None:
        return self.location.name

    def display_path(self, path: str) -> str:
        if self.name is None:
            return str(Path(self.path_text) / path)
        if path == self.name or path.startswith(self.name + "/"):
            return self.path_text + path[len(self.name) :]
        return str(Path(self.path_text).parent / path)


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
            places.append(_Place(str(path), resolve_named_path(path)))
        except (CheckpointNotFound, ConfigError) as error:
            absent.append(error)
    results = tuple(result for place in places for result in _inspect(place))
    if json:
        print_json(InspectReport(results))
    elif results:
        _show(results)
    code = next((code for status, code in _EXIT_CODES if any(result.status == status for result in results)), 0)
    for absence in absent[1:]:
        complain(absence)
    if absent and code not in (5, 6):
        raise absent[0]
    if absent:
        complain(absent[0])
    if code:
        raise typer.Exit(code)


def _inspect(place: _Place) -> Iterator[InspectedUnit]:
    with place.location.tree() as tree:
        listing, chosen_units = _choose_units(tree, place)
        results = [_check_unit(tree, listing, unit) for unit in chosen_units]
        if any(result.status == "damaged" for result in results):
            time.sleep(command_runtime.current_timings().recheck_delay_s)
            second_listing = _list(tree, place)
            results = [
                _mark_if_changed(unit, result, listing, second_listing)
                for unit, result in zip(chosen_units, results, strict=True)
            ]
        twin_results = [
            _inspect_twins(tree, listing, unit, result) for unit, result in zip(chosen_units, results, strict=True)
        ]
    strays = tree.unclaimed_links(chosen_units)
    for path, (status, reason) in strays.items():
        yield _with_shown_paths(
            InspectedUnit(path, None, None, status, 0, 0, (UnitProblem(path, None, status, reason),), ()), place
        )
    if not results and not strays:
        reason = "no checkpoint of a program that is known lies there"
        unknown = UnitProblem(place.path_text, None, "unknown", reason)
        yield InspectedUnit(place.path_text, None, None, "unknown", 0, 0, (unknown,), ())
    for twin_result in chain.from_iterable(twin_results):
        yield _with_shown_paths(twin_result, place)


def _inspect_twins(
    tree: FollowingTree, listing: Listing, unit: Unit, whole_result: InspectedUnit
) -> list[InspectedUnit]:
    """Return the results of a unit's twins, each without the others, if one is sound; else that of the whole unit."""
    if whole_result.status in ("sound", "changing"):
        return [whole_result]
    twin_results = [_check_unit(tree, listing, alone) for _, alone in units_without_twins(unit, listing)]
    return twin_results if any(result.status == "sound" for result in twin_results) else [whole_result]


def _list(tree: FollowingTree, place: _Place) -> Listing:
    if place.name is None or place.location.path.is_dir():
        return tree.listing(place.name)
    return tree.list_top_files()


def _choose_units(tree: FollowingTree, place: _Place) -> tuple[Listing, list[Unit]]:
    """Return the units at the place. A file is checked with the other files of its unit."""
    listing = _list(tree, place)
    entry = listing.entries.get(place.name or "", ListedEntry("directory"))
    if entry.kind == "file" and place.name is not None:
        return listing, units_of(listing, place.name)
    return listing, units(listing)


def _check_unit(tree: FollowingTree, listing: Listing, unit: Unit) -> InspectedUnit:
    sizes: Mapping[str, int] = {path: listing.entries[path].size for path in unit.files}
    opener: Opener = lambda path: tree.opened(path, listing.entries[path])  # noqa: E731
    return inspect_unit(unit, sizes, opener, tree.unfollowed)


def _mark_if_changed(unit: Unit, result: InspectedUnit, before: Listing, after: Listing) -> InspectedUnit:
    """Return the result, or `changing` if the unit was written to since, because damage then proves nothing."""
    if result.status != "damaged":
        return result
    unit_now = next((candidate for candidate in units(after) if candidate.path == unit.path), lone_file_unit(unit.path))
    same = all(before.entries[path] == after.entries.get(path) for path in unit.files)
    if same and unit_now.files == unit.files:
        return result
    finding = UnitProblem(unit.path, None, "changing", "still being written")
    return msgspec.structs.replace(result, status="changing", findings=(finding, *result.findings))


def _with_shown_paths(result: InspectedUnit, place: _Place) -> InspectedUnit:
    findings = tuple(
        msgspec.structs.replace(finding, file=place.display_path(finding.file)) for finding in result.findings
    )
    uncovered = tuple(msgspec.structs.replace(gap, file=place.display_path(gap.file)) for gap in result.uncovered)
    notes = tuple(msgspec.structs.replace(note, file=place.display_path(note.file)) for note in result.notes)
    path = place.display_path(result.path)
    return msgspec.structs.replace(result, path=path, findings=findings, uncovered=uncovered, notes=notes)


def _show(results: tuple[InspectedUnit, ...]) -> None:
    columns = ("PATH", "PROGRAM", "STEP", "FILES", "BYTES", "STATUS")
    print_answer(Table(columns, [_row(unit) for unit in results]))
    for result in results:
        for finding in result.findings:
            where = finding.file if finding.offset is None else f"{finding.file}: byte {finding.offset}"
            print_answer(f"{where}: {finding.status}: {finding.reason}", wrap=False)
        for note in result.notes:
            print_answer(f"{note.file}: {note.note}", wrap=False)


def _row(result: InspectedUnit) -> tuple[str, ...]:
    step = "" if result.step is None else str(result.step)
    return result.path, result.program or "", step, str(result.files), format_size(result.bytes), result.status
