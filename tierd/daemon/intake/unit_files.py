"""The files of a unit: the directory or bucket in which an import lists them, and how they come into a stage.

Invariant: each file is opened once, and what was opened is what is staged. If its size, its time of modification, its
inode or its name differ from the listing before or after, nothing of the unit is kept.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from msgspec import UNSET

from tierd.core.errors import ManifestError
from tierd.core.manifest import UNIT_NAME, File, check_path
from tierd.daemon.concurrency import thread_uncancelled
from tierd.formats.byte_source import ByteSource
from tierd.spool.file_io import make_private, write_file
from tierd.spool.foreign_files import AdoptionMethod, adopt, is_open_for_writing
from tierd.spool.stage import Stage
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.named_directory import FollowingTree, NamedPath, resolve_named_path
from tierd.watching.unit import ListedEntry, Listing, Unit
from tierd.watching.unit_detection import units
from tierd.watching.unit_file import Pointer, UnitFile
from tierd.watching.unit_inspection import ChangedFile, UnitStatus

ListedEntries = Mapping[str, ListedEntry]


class ImportSource(Protocol):
    """The checkpoint, or the checkpoints, that an import is given.

    `name` is the path of the only unit, or of a file of it; None for all units that are listed. `is_downloaded`:
    `downloaded` gives copies of this process's own.
    """

    is_downloaded: ClassVar[bool]

    @property
    def display_name(self) -> str: ...

    @property
    def name(self) -> str | None: ...

    async def listing(self) -> Listing: ...

    def stray(self, units: Iterable[Unit]) -> Mapping[str, tuple[UnitStatus, str]]:
        """Return the listed names of weights that are no unit's and cannot be read, each with a status and a reason."""
        ...

    async def relist(self, unit: Unit) -> Listing | None:
        """List again after a unit was read, at least what may be the unit's; None if nothing of that has changed."""
        ...

    def opened(self, path: str, listed: ListedEntry) -> AbstractContextManager[ByteSource]:
        """Open a listed file, in a thread; raises as `DirectoryTree.opened`."""
        ...

    def downloaded(
        self, unit: Unit, entries: ListedEntries
    ) -> AbstractAsyncContextManager[tuple[DirectoryTree, ListedEntries]]:
        """Give a directory of this node with a unit's files, and its own entries of them.

        Raises `ChangedFile` if a file is not the listed one, and `ManifestError` if a name cannot be a file's.
        """
        ...


class DirectoryImportSource:
    """A checkpoint's file or directory on this node, or a directory of checkpoints."""

    is_downloaded: ClassVar[bool] = False

    def __init__(self, display_name: str, tree: FollowingTree, directory: Path, name: str | None) -> None:
        self.display_name, self.name = display_name, name
        self._tree, self._directory = tree, directory

    def stray(self, units: Iterable[Unit]) -> Mapping[str, tuple[UnitStatus, str]]:
        return self._tree.unclaimed_links(units)

    async def listing(self) -> Listing:
        return await thread_uncancelled(self._listed)

    async def relist(self, unit: Unit) -> Listing | None:
        return await self.listing()

    def _listed(self) -> Listing:
        alone = self.name is None or (self._directory / self.name).is_dir()
        return self._tree.listing(self.name) if alone else self._tree.list_top_files()

    def opened(self, path: str, listed: ListedEntry) -> AbstractContextManager[ByteSource]:
        return self._tree.opened(path, listed)

    @asynccontextmanager
    async def downloaded(
        self, unit: Unit, entries: ListedEntries
    ) -> AsyncGenerator[tuple[DirectoryTree, ListedEntries], None]:
        yield self._tree, entries


@contextmanager
def open_directory_source(path: Path) -> Iterator[DirectoryImportSource]:
    """Open the checkpoint at a path, or all below it. Raises `OSError`, and as `resolve_named_path`."""
    place = resolve_named_path(path)
    alone = not place.path.is_dir() or _is_unit(place)
    with place.tree() if alone else place.whole_tree() as tree:
        directory, name = (place.directory, place.name) if alone else (place.path, None)
        yield DirectoryImportSource(str(path), tree, directory, name)


def _is_unit(place: NamedPath) -> bool:
    if place.name is None:
        return False  # the root of the file system
    with place.tree() as tree:
        return any(unit.path == place.name for unit in units(tree.listing(place.name)))


class UnitBusy(Exception):
    """A process has a file of the unit open for writing, so the unit is not finished whatever its times say."""


@dataclass(frozen=True, slots=True)
class StagedUnit:
    """A unit in a stage: its files, `unit.json` included, and how many were cloned, linked and copied."""

    files: tuple[File, ...]
    counts_by_method: Mapping[AdoptionMethod, int]


def check_closed(tree: DirectoryTree, unit: Unit, entries: Mapping[str, ListedEntry]) -> None:
    """Check, before much is read, that no process has a file open for writing; arguments and errors as `stage_unit`."""
    for path in unit.files:
        with tree.opened(path, entries[path]) as source:
            _check_closed(source.descriptor, path)


def _check_closed(descriptor: int, path: str) -> None:
    if is_open_for_writing(descriptor):
        raise UnitBusy(f"{path}: a process has it open for writing")


def _check_own(tree: DirectoryTree, descriptor: int, path: str) -> None:
    """Raise `ManifestError` for a link of a private file that does not belong to its directory's owner.

    Who may write in a directory can link a file there that only its owner and this daemon may read. A copy would
    publish it. A program's own links have their directory's owner, or are readable by all.
    """
    file, owner = os.fstat(descriptor), tree.owner(path.rpartition("/")[0])
    linked = file.st_nlink > 1 or tree.is_followed(path)
    if linked and file.st_uid != owner and not file.st_mode & stat.S_IROTH:
        raise ManifestError(
            f"{path}: a link of a file of uid {file.st_uid} that others may not read, in a directory of uid "
            f"{owner}: it may be another user's file. If it is the program's, let it write a copy there, or give the "
            "directory the same owner"
        )


def stage_unit(
    tree: DirectoryTree,
    unit: Unit,
    entries: Mapping[str, ListedEntry],
    ranks: int,
    pointers: Iterable[Pointer],
    stage: Stage,
    going: Callable[[], None],
) -> StagedUnit:
    """Bring a unit's files into a stage. `going` is called before each chunk; what it raises ends the work.

    Raises `UnitBusy` and `ChangedFile` if the program still writes to the unit, or deletes it; `ManifestError` if a
    name cannot stand in a manifest, or a file may be somebody else's by a hard link; and as `adopt`.
    """
    described, hows = [], Counter[AdoptionMethod]()
    for path in unit.files:
        check_path(path, stage.part.checkpoint.run)
        target = stage.path / path
        make_private(target.parent)
        with tree.opened(path, entries[path]) as source:
            _check_closed(source.descriptor, path)
            _check_own(tree, source.descriptor, path)
            # A name with a step is used for one save. A name without one is written again, and a link would change.
            link = unit.step is not None
            file, how = adopt(source.descriptor, source.size, target, path, link=link, going=going)
            if is_open_for_writing(source.descriptor):
                raise ChangedFile(f"{path}: a process has opened it for writing")
        described.append(file)
        hows[how] += 1
    unit_file = make_unit_file(unit, entries, ranks, pointers)
    described.append(write_file(stage.path / UNIT_NAME, UNIT_NAME, unit_file.encode()))
    return StagedUnit(tuple(sorted(described, key=lambda file: file.path)), hows)


def make_unit_file(
    unit: Unit, entries: Mapping[str, ListedEntry], ranks: int, pointers: Iterable[Pointer] = ()
) -> UnitFile:
    modified_ns = {path: max(0, entries[path].mtime_ns) for path in unit.files}
    recorded = tuple(pointers) or UNSET
    return UnitFile(
        path=unit.path, program=unit.layout.program, ranks=ranks, modified_ns=modified_ns, pointers=recorded
    )
