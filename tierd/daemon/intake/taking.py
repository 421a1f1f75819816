"""One unit's files into a stage: linked or copied, digested, and compared with the listing before and after.

Invariant: each file is opened once, and what was opened is what is staged. If its size, its time of modification,
its inode or its name differ from the listing before or after, nothing of the unit is kept.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from msgspec import UNSET

from tierd.core.errors import ManifestError
from tierd.core.manifest import File, check_path
from tierd.spool.adopt import How, adopt, is_open_for_writing
from tierd.spool.file_io import make_private, write_file
from tierd.spool.stage import Stage
from tierd.watching.files import Tree
from tierd.watching.inspect import ChangedFile
from tierd.watching.listing import ListedEntry
from tierd.watching.pointers import Pointer
from tierd.watching.unit import Unit
from tierd.watching.unit_file import UNIT_NAME, UnitFile


class Busy(Exception):
    """A process has a file of the unit open for writing, so the unit is not finished whatever its times say."""


@dataclass(frozen=True, slots=True)
class StagedUnit:
    """A unit in a stage.

    Attributes:
        files: the descriptions for the manifest, `unit.json` included.
        how: how many files were cloned, linked and copied.
    """

    files: tuple[File, ...]
    how: Mapping[How, int]


def check_closed(tree: Tree, unit: Unit, entries: Mapping[str, ListedEntry]) -> None:
    """Check, before much is read, that no process has a file open for writing; arguments and errors as `stage_unit`."""
    for path in unit.files:
        with tree.opened(path, entries[path]) as source:
            _check_closed(source.descriptor, path)


def _check_closed(descriptor: int, path: str) -> None:
    if is_open_for_writing(descriptor):
        raise Busy(f"{path}: a process has it open for writing")


def _check_own(tree: Tree, descriptor: int, path: str) -> None:
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
    tree: Tree,
    unit: Unit,
    entries: Mapping[str, ListedEntry],
    ranks: int,
    pointers: Iterable[Pointer],
    stage: Stage,
    going: Callable[[], None],
) -> StagedUnit:
    """Bring a unit's files into a stage.

    Args:
        tree: the watched directory.
        unit: the unit.
        entries: its files as listed.
        ranks: how many ranks wrote it.
        pointers: what beside the unit names it.
        stage: the part's stage.
        going: called before each chunk; what it raises ends the work.

    Raises:
        Busy, Changed: the program still writes to the unit, or deletes it.
        ManifestError: a file's name cannot stand in a manifest, or a file may be somebody else's by a hard link.
        CorruptChunk, OSError: as `adopt` raises them.
    """
    described, hows = [], Counter[How]()
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
    described.append(write_file(stage.path / UNIT_NAME, UNIT_NAME, about(unit, entries, ranks, pointers).encode()))
    return StagedUnit(tuple(sorted(described, key=lambda file: file.path)), hows)


def about(unit: Unit, entries: Mapping[str, ListedEntry], ranks: int, pointers: Iterable[Pointer] = ()) -> UnitFile:
    """Describe a unit for its `unit.json`; arguments as for `stage_unit`."""
    modified_ns = {path: max(0, entries[path].mtime_ns) for path in unit.files}
    return UnitFile(
        path=unit.path,
        program=unit.layout.program,
        ranks=ranks,
        modified_ns=modified_ns,
        pointers=tuple(pointers) or UNSET,
    )
