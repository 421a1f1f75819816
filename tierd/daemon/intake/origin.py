"""Where an import reads: a directory here, or a bucket (`bucket`), with the same names for the same checkpoints."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import ClassVar, Protocol

from tierd.daemon.transfer.concurrency import to_the_end
from tierd.formats.byte_source import ByteSource
from tierd.watching.files import Tree
from tierd.watching.followed import FollowingTree, NamedPlace, named_place
from tierd.watching.inspect import Status
from tierd.watching.layouts import units
from tierd.watching.listing import ListedEntry, Listing
from tierd.watching.unit import Unit

Entries = Mapping[str, ListedEntry]


class ImportSource(Protocol):
    """The checkpoint, or the checkpoints, that an import is given.

    Attributes:
        shown: how the user named it.
        name: the path of the only unit, or of a file of it; None for all units that are listed.
        is_brought: whether `brought` gives copies of this process's own.
    """

    is_brought: ClassVar[bool]

    @property
    def shown(self) -> str: ...

    @property
    def name(self) -> str | None: ...

    async def listing(self) -> Listing:
        """List what is there now."""
        ...

    def stray(self, units: Iterable[Unit]) -> Mapping[str, tuple[Status, str]]:
        """Return the listed names of weights that are no unit's and cannot be read, each with a status and a reason."""
        ...

    async def again(self, unit: Unit) -> Listing | None:
        """List again after a unit was read, at least what may be the unit's; None if nothing of that has changed."""
        ...

    def opened(self, path: str, listed: ListedEntry) -> AbstractContextManager[ByteSource]:
        """Open a listed file, in a thread; raises as `Tree.opened`."""
        ...

    def brought(self, unit: Unit, entries: Entries) -> AbstractAsyncContextManager[tuple[Tree, Entries]]:
        """Give a directory of this node with a unit's files, and its own entries of them.

        Raises:
            ChangedFile: a file is not the listed one.
            ManifestError: a name cannot be a file's.
        """
        ...


class DirectoryOrigin:
    """A checkpoint's file or directory on this node, or a directory of checkpoints."""

    is_brought: ClassVar[bool] = False

    def __init__(self, display_name: str, tree: FollowingTree, directory: Path, name: str | None) -> None:
        self.shown, self.name = display_name, name
        self._tree, self._directory = tree, directory

    def stray(self, units: Iterable[Unit]) -> Mapping[str, tuple[Status, str]]:
        return self._tree.stray(units)

    async def listing(self) -> Listing:
        return await to_the_end(self._listed)

    async def again(self, unit: Unit) -> Listing | None:
        return await self.listing()

    def _listed(self) -> Listing:
        alone = self.name is None or (self._directory / self.name).is_dir()
        return self._tree.listing(self.name) if alone else self._tree.files()

    def opened(self, path: str, listed: ListedEntry) -> AbstractContextManager[ByteSource]:
        return self._tree.opened(path, listed)

    @asynccontextmanager
    async def brought(self, unit: Unit, entries: Entries) -> AsyncGenerator[tuple[Tree, Entries], None]:
        yield self._tree, entries


@contextmanager
def directory_origin(path: Path) -> Iterator[DirectoryOrigin]:
    """Open the checkpoint at a path, or all below it.

    Raises:
        CheckpointNotFound, ConfigError: as `named_place` raises them.
        OSError: the path cannot be opened.
    """
    place = named_place(path)
    alone = not place.path.is_dir() or _is_unit(place)
    with place.tree() if alone else place.whole_tree() as tree:
        directory, name = (place.directory, place.name) if alone else (place.path, None)
        yield DirectoryOrigin(str(path), tree, directory, name)


def _is_unit(place: NamedPlace) -> bool:
    if place.name is None:
        return False  # the root of the file system
    with place.tree() as tree:
        return any(unit.path == place.name for unit in units(tree.listing(place.name)))
