"""Check each file of a unit by its format, and against the unit's own index.

This module reads through an `Opener`, so it touches no file system itself. A file that changes while it is read proves
nothing, because a writer is still at work. Neither does one wrong read: a result other than sound counts only if two
reads of the unit gave the same bytes (`core.storage_faults`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from posixpath import basename, dirname
from typing import Any, Literal, TypeAlias

import msgspec
import xxhash

from tierd.core.storage_faults import Reading, ReadVerdict, judge_readings, unstable_error
from tierd.formats.byte_source import (
    ByteSource,
    DamagedFile,
    DigestedSource,
    SoundFile,
    UncheckedFile,
    UnfinishedFile,
    UnknownFormat,
)
from tierd.formats.file_checks import CUT_JSON, EMPTY_JSON, Extent, check_extents, check_file, read_extents, read_json
from tierd.formats.tensorflow_files import check_bundle_shard, read_bundle_index
from tierd.formats.weight_files import check_safetensors
from tierd.watching.step_in_name import WEIGHT_ENDINGS
from tierd.watching.unit import DIRECTORY_LAYOUT, SAVED_MODEL, TENSORFLOW, USER_LAYOUT, Unit, join_path

UnitStatus: TypeAlias = Literal["sound", "damaged", "incomplete", "changing", "unknown", "unreadable"]
# A unit's status is the first of these among its findings. While files are missing, no file counts as damaged yet.
_STATUS_ORDER: tuple[UnitStatus, ...] = ("changing", "incomplete", "damaged", "unreadable", "unknown", "sound")
_METADATA = re.compile(r"(__\d+)?\.metadata")
_SHARD_INDEX = (".safetensors.index.json", ".bin.index.json")
_STRANGE_REASON = "a link or a special file, which is neither followed nor opened"
_ORBAX_COMMIT = "_CHECKPOINT_METADATA"


class ChangedFile(Exception):
    """The file differs from the listed or opened one; the message says how."""


Opener: TypeAlias = Callable[[str], AbstractContextManager[ByteSource]]
"""Opens a file of the unit by its path. It raises `ChangedFile`, also at its end, and `OSError`."""


class UnitProblem(msgspec.Struct, frozen=True):
    """A reason why a unit is not sound, or why nothing is known about it.

    Attributes:
        file: the file's path from the listing's directory; the unit's own path if the finding is about the whole unit.
        offset: the offset at which it shows; None if it has none.
        status: the unit's status, unless another finding's status comes earlier in the order of `InspectedUnit.status`.
        reason: the description, for people.
    """

    file: str
    offset: int | None
    status: UnitStatus
    reason: str


def describe_problems(problems: Iterable[UnitProblem]) -> str:
    return "; ".join(f"{problem.file}: {problem.reason}" for problem in problems)


class UndigestedContent(msgspec.Struct, frozen=True):
    """A file with content that no digest covers, so that a flipped bit in it cannot be found.

    Attributes:
        file: the file's path from the listing's directory.
        reason: why no digest covers it, for people.
    """

    file: str
    reason: str


class FileNote(msgspec.Struct, frozen=True):
    """A sound file of a format that its user should know about.

    Attributes:
        file: the file's path from the listing's directory.
        note: what the format is and what reads it, for people.
    """

    file: str
    note: str


class InspectedUnit(msgspec.Struct, frozen=True):
    """A unit, and the results of its checks.

    Attributes:
        path: the unit's path.
        program: the program whose layout it has; None if no layout matches.
        step: the step in its name.
        status: the first among its findings in the order changing, incomplete, damaged, unreadable, unknown; else
            sound.
        files: the number of its files.
        bytes: their total size.
    """

    path: str
    program: str | None
    step: int | None
    status: UnitStatus
    files: int
    bytes: int
    findings: tuple[UnitProblem, ...]
    uncovered: tuple[UndigestedContent, ...]
    notes: tuple[FileNote, ...] = ()


def inspect_unit(
    unit: Unit, sizes: Mapping[str, int], opener: Opener, unfollowed: Mapping[str, tuple[UnitStatus, str]] = {}
) -> InspectedUnit:
    """Check a unit. `unfollowed` says why links of it are not followed, by path, each with the status that follows."""
    inspected = _inspect_once(unit, sizes, opener, unfollowed)
    readings: list[Reading] = []
    while inspected.status in ("damaged", "incomplete", "unknown") and not unit.missing_reason:
        verdict = judge_readings(readings)
        if verdict is ReadVerdict.CORRUPT:
            break
        if verdict is ReadVerdict.UNSTABLE:
            finding = UnitProblem(unit.path, None, "unreadable", str(unstable_error(unit.path)))
            return msgspec.structs.replace(inspected, status="unreadable", findings=(finding,))
        digest = xxhash.xxh3_128()
        inspected = _inspect_once(unit, sizes, _digesting_opener(opener, digest), unfollowed)
        readings.append(Reading(digest.hexdigest()))
    return inspected


def _digesting_opener(opener: Opener, digest: xxhash.xxh3_128) -> Opener:
    """Return an opener whose reads come from the device, and are digested."""

    @contextmanager
    def opened(path: str) -> Iterator[ByteSource]:
        with opener(path) as source:
            yield DigestedSource(source, digest)

    return opened


def _inspect_once(
    unit: Unit, sizes: Mapping[str, int], opener: Opener, unfollowed: Mapping[str, tuple[UnitStatus, str]]
) -> InspectedUnit:
    inspection = _Inspection(unit, opener, unfollowed)
    inspection.run()
    if unit.missing_reason:
        inspection.findings.insert(0, UnitProblem(unit.path, None, "incomplete", unit.missing_reason))
    status: UnitStatus = min(
        (finding.status for finding in inspection.findings), key=_STATUS_ORDER.index, default="sound"
    )
    if status == "sound" and not inspection.sound:
        status = "unknown"
    return InspectedUnit(
        path=unit.path,
        program=unit.layout.program,
        step=unit.step,
        status=status,
        files=len(unit.files),
        bytes=sum(sizes[path] for path in unit.files),
        findings=tuple(inspection.findings),
        uncovered=tuple(inspection.uncovered),
        notes=tuple(inspection.notes),
    )


def _check_alone(name: str, source: ByteSource) -> SoundFile:
    try:
        return check_file(name, source)
    except UnknownFormat:
        if not source.size and name.endswith(WEIGHT_ENDINGS):
            raise DamagedFile(0, _EMPTY_WEIGHTS) from None
        raise


_EMPTY_WEIGHTS = "the file is empty, and its format is not known: its writing may have been cut"


class _Inspection:
    def __init__(self, unit: Unit, opener: Opener, unfollowed: Mapping[str, tuple[UnitStatus, str]]) -> None:
        self._unit, self._open, self._unfollowed = unit, opener, unfollowed
        self._unit_files = frozenset(unit.files)
        self._examined: set[str] = set()
        self.findings: list[UnitProblem] = []
        self.uncovered: list[UndigestedContent] = []
        self.notes: list[FileNote] = []
        self.sound = 0  # number of files that were checked and found sound

    def run(self) -> None:
        for path in self._unit.special_files:
            self._add_finding(path, *self._unfollowed.get(path, ("unknown", _STRANGE_REASON)))
        for path in self._unit.files:
            self._check_index(path)
        for path in self._unit.files:
            if path not in self._examined:
                self._examine(path, partial(_check_alone, basename(path)))

    def _check_index(self, path: str) -> None:
        name = basename(path)
        if _METADATA.fullmatch(name):
            self._check_dcp(path)
        elif self._unit.layout in (TENSORFLOW, SAVED_MODEL) and name.endswith(".index"):
            self._check_bundle(path)
        elif name.endswith(_SHARD_INDEX):
            for shard, tensors in sorted(self._shards(path).items()):
                file = join_path(dirname(path), shard)
                if self._check_exists(file, path) and file.endswith(".safetensors"):
                    self._examine(file, partial(check_safetensors, expected=tensors, by=name))
        elif name == _ORBAX_COMMIT:
            metadata = self._examine(path, read_json)
            if isinstance(metadata, dict) and metadata.get("commit_timestamp_nsecs", 0) is None:
                self._add_finding(path, "incomplete", "it does not say when the checkpoint was committed")

    def _check_dcp(self, path: str) -> None:
        files: dict[str, list[Extent]] = self._examine(path, read_extents) or {}
        for name, extents in sorted(files.items()):
            file = join_path(dirname(path), name)
            if self._check_exists(file, path):
                self._examine(file, partial(check_extents, extents=extents))

    def _check_bundle(self, path: str) -> None:
        shards = self._examine(path, read_bundle_index) or {}
        for shard, entries in sorted(shards.items()):
            file = f"{path.removesuffix('.index')}.data-{shard:05d}-of-{len(shards):05d}"
            if self._check_exists(file, path):
                self._examine(file, partial(check_bundle_shard, entries=entries))

    def _shards(self, path: str) -> dict[str, list[str]]:
        """Return the files that a Hugging Face index names, each with the tensors that it places there."""
        index = self._examine(path, read_json)
        weights = index.get("weight_map") if isinstance(index, dict) else None
        if index is not None and not isinstance(weights, dict):
            self._add_finding(path, "unknown", "an index without a weight_map")
        shards: dict[str, list[str]] = {}
        for tensor, shard in weights.items() if isinstance(weights, dict) else ():
            if isinstance(shard, str):
                shards.setdefault(shard, []).append(tensor)
        return shards

    def _check_exists(self, file: str, index_path: str) -> bool:
        if file not in self._unit_files:
            name = file.removeprefix(f"{dirname(index_path)}/")[:200]
            self._add_finding(index_path, "damaged", f"it names {name!a}, which is not there")
        return file in self._unit_files

    def _examine(self, path: str, check: Callable[[ByteSource], Any]) -> Any:
        """Run `check` on a file and return its result; None if it led to a finding."""
        self._examined.add(path)
        try:
            with self._open(path) as source:
                result = check(source)
        except ChangedFile as error:
            self._add_finding(path, "changing", f"still being written: {error}")
        except OSError as error:
            self._add_finding(path, "unreadable", error.strerror or str(error))
        except DamagedFile as error:
            # A JSON file of no known program may be lines of JSON, or a dialect, but not the beginning of a value.
            is_cut = error.reason.startswith(CUT_JSON)
            is_unknown = self._unit.layout in (DIRECTORY_LAYOUT, USER_LAYOUT) and path.endswith(".json")
            is_empty_json = is_unknown and error.reason == EMPTY_JSON  # a program may write it so
            if error.reason == _EMPTY_WEIGHTS or is_empty_json:
                self._add_finding(path, "unknown", error.reason, error.offset)
            elif is_unknown and not is_cut:
                self.uncovered.append(UndigestedContent(path, str(error)))
            else:
                self._add_finding(path, "damaged", error.reason, error.offset)
        except UnfinishedFile as error:
            self._add_finding(path, "incomplete", str(error))
        except UncheckedFile as error:
            if isinstance(error, UnknownFormat) or self._unit.layout in (DIRECTORY_LAYOUT, USER_LAYOUT):
                self.uncovered.append(UndigestedContent(path, str(error)))
            else:
                self._add_finding(path, "unknown", str(error))
        else:
            self.sound += 1
            if isinstance(result, SoundFile) and result.uncovered:
                self.uncovered.append(UndigestedContent(path, result.uncovered))
            if isinstance(result, SoundFile) and result.note:
                self.notes.append(FileNote(path, result.note))
            return result
        return None

    def _add_finding(self, path: str, status: UnitStatus, reason: str, offset: int | None = None) -> None:
        self.findings.append(UnitProblem(path, offset, status, reason))
