"""Checkpoints of other programs in a bucket: listed as a directory is, described by range, and brought one at a time.

Invariant: the bucket is only read. A name becomes a path only if it is a safe relative path, and only below a directory
of this command's own. The bytes of a file are those of one listed object: each request names the object's ETag.

Memory is bounded by `_MAX_REQUESTS` pieces, and disk space by the largest checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from bisect import bisect_left
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from os.path import commonprefix
from pathlib import Path
from typing import ClassVar

import xxhash

from tierd.core.errors import CheckpointNotFound, ConfigError, ManifestError, ObjectNotFound, SpoolFull
from tierd.core.manifest import check_path
from tierd.core.urls import StoreUrl
from tierd.daemon.concurrency import for_each_limited, thread_uncancelled
from tierd.daemon.intake.unit_files import ListedEntries
from tierd.formats.byte_source import ByteSource
from tierd.stores.base import ObjectInfo
from tierd.stores.retry import ForeignStore
from tierd.watching.directory_tree import MAX_NAMES, TIERD_PREFIX, DirectoryTree
from tierd.watching.missing_files import unfinished_marker
from tierd.watching.unit import MARKERS, MAX_MARKER, ListedEntry, Listing, Unit, join_path
from tierd.watching.unit_detection import units
from tierd.watching.unit_inspection import ChangedFile, UnitStatus

_PIECE, _MAX_REQUESTS = 8 << 20, 8  # bytes of one request, and requests at a time
_AFTER_ALL_NAMES = "\U0010ffff"  # sorts after each character of a name


def split_url(url: StoreUrl) -> tuple[StoreUrl, str | None]:
    """Return the URL that is listed, and the name there of what `url` names; None for the whole bucket."""
    parent, _, name = url.prefix.rpartition("/")
    return replace(url, prefix=parent), name or None


class BucketImportSource:
    """The objects at a URL and below it; see `ImportSource`.

    `store` is of the listed URL, and `name` is the name there (see `split_url`); None for everything. `scratch` is a
    private directory that does not exist yet; unlike the names, this node's user chose it.
    """

    is_downloaded: ClassVar[bool] = True

    def __init__(self, display_url: str, store: ForeignStore, name: str | None, scratch: Path) -> None:
        self.display_name, self.name = display_url, name
        self._store, self._scratch = store, scratch
        self._base = ""  # of the names that are listed
        self._is_object = False
        self._listed_objects: dict[str, ObjectInfo] = {}  # of the one listing, by path
        self._paths: list[str] = []  # sorted
        self._listing: Listing | None = None
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def at(cls, display_url: str, store: ForeignStore, name: str | None, scratch: Path) -> BucketImportSource:
        """Find whether a name is an object, a checkpoint's prefix, or that of several. Raises `CheckpointNotFound`."""
        origin = cls(display_url, store, name, scratch)
        if name is not None and await origin._first_object(f"{name}/") is None:
            if (await origin._find_object(name)) is None:
                raise CheckpointNotFound(f"{display_url}: no object lies there")
            origin._is_object = True
        elif name is not None and all(unit.path != name for unit in units(await origin.listing())):
            origin._rebase(f"{name}/")
        return origin

    async def listing(self) -> Listing:
        """List everything once: the whole place may have a million objects, and checkpoints are taken one by one."""
        if self._listing is None:
            objects = await self._objects()
            texts = {
                path: await self._read_text(info)
                for path, info in objects.items()
                if (path.rpartition("/")[2] in MARKERS and info.size <= MAX_MARKER)
            }
            self._take(objects, texts)
        assert self._listing is not None
        return self._listing

    def _take(self, objects: dict[str, ObjectInfo], texts: Mapping[str, str]) -> None:
        self._listed_objects, self._paths = objects, sorted(objects)
        self._listing = Listing(bucket_entries(objects), texts)

    def _rebase(self, base: str) -> None:
        """Take the listed objects below a prefix for the place, because no checkpoint has that prefix itself."""
        texts = self._listing.texts if self._listing else {}
        self.name, self._base = None, base
        self._take(
            {path.removeprefix(base): info for path, info in self._listed_objects.items() if path.startswith(base)},
            {path.removeprefix(base): text for path, text in texts.items() if path.startswith(base)},
        )

    def stray(self, units: Iterable[Unit]) -> Mapping[str, tuple[UnitStatus, str]]:
        return {}  # a bucket has no links

    async def relist(self, unit: Unit) -> Listing | None:
        """List the objects whose names begin as the unit's do; of all others, the first listing counts.

        Markers outside of the unit say nothing of its bytes, so they are not read again.
        """
        prefix = _common(unit)
        now = {info.key[len(self._base) :]: info async for info in self._store.names(self._base + prefix)}
        before = self._paths[bisect_left(self._paths, prefix) : bisect_left(self._paths, prefix + _AFTER_ALL_NAMES)]
        if now == {path: self._listed_objects[path] for path in before}:
            return None
        others = {path: self._listed_objects[path] for path in self._listed_objects.keys() - before}
        return Listing(bucket_entries(others | now), self._listing.texts if self._listing else {})

    async def _objects(self) -> dict[str, ObjectInfo]:
        objects: dict[str, ObjectInfo] = {}
        prefix = self._base if self.name is None else "" if self._is_object else f"{self.name}/"
        async with aclosing(self._list_direct_children() if self._is_object else self._store.names(prefix)) as names:
            async for info in names:
                if len(objects) == MAX_NAMES:
                    raise ConfigError(
                        f"{self.display_name}: more than {MAX_NAMES} objects lie below it; name one checkpoint"
                    )
                objects[info.key[len(self._base) :]] = info
        if self.name is not None and not self._is_object:
            for marker_name in (*MARKERS, unfinished_marker(self.name)):
                if (marker := await self._find_object(marker_name)) is not None:
                    objects[marker_name] = marker
        return objects

    async def _list_direct_children(self) -> AsyncGenerator[ObjectInfo, None]:
        """List the objects directly below the listed URL, with one request for each prefix that is passed."""
        after: str | None = ""
        while after is not None:
            start, after = after, None
            async with aclosing(self._store.names("", start)) as names:
                async for info in names:
                    directory, slash, _ = info.key.partition("/")
                    if slash:
                        after = f"{directory}/{_AFTER_ALL_NAMES}"
                        break
                    yield info

    async def _first_object(self, prefix: str) -> ObjectInfo | None:
        async with aclosing(self._store.names(prefix)) as names:
            async for info in names:
                return info
        return None

    async def _find_object(self, name: str) -> ObjectInfo | None:
        info = await self._first_object(name)  # of all names with this prefix it is the first
        return info if info is not None and info.key == name else None

    async def _read_text(self, info: ObjectInfo) -> str:
        data = bytearray(info.size)
        try:
            if data:
                await self._store.get_range(info, 0, memoryview(data))
        except ObjectNotFound:
            return ""
        return data.decode("utf-8", "replace")

    def _same(self, path: str, listed: ListedEntry) -> ObjectInfo:
        info = self._listed_objects.get(path)
        if info is None or _entry(info) != listed:
            raise ChangedFile("it was deleted or replaced meanwhile")
        return info

    @contextmanager
    def opened(self, path: str, listed: ListedEntry) -> Iterator[ByteSource]:
        yield _RangedObject(self._store, self._same(path, listed), self._loop)

    @asynccontextmanager
    async def downloaded(
        self, unit: Unit, entries: ListedEntries
    ) -> AsyncGenerator[tuple[DirectoryTree, ListedEntries], None]:
        if unit.special_files:
            raise ManifestError(f"{unit.special_files[0][:200]!a}: an object's name that cannot be a file's")
        for path in unit.files:
            check_path(path, self.display_name)
        await thread_uncancelled(self._make_room, sum(entries[path].size for path in unit.files))
        try:
            await self._download({path: self._same(path, entries[path]) for path in unit.files})
            with DirectoryTree(self._scratch) as tree:
                downloaded = (await thread_uncancelled(tree.listing)).entries
                yield tree, {path: downloaded[path] for path in unit.files}
        finally:
            await thread_uncancelled(shutil.rmtree, self._scratch, ignore_errors=True)

    def _make_room(self, size: int) -> None:
        self._scratch.mkdir(mode=0o700)
        free = shutil.disk_usage(self._scratch).free
        if size > free:
            raise SpoolFull(
                f"{self.display_name}: a checkpoint of {size} bytes is to be checked, and {self._scratch.parent} has "
                f"{free} free: set TMPDIR to a directory with room for the largest one"
            )

    async def _download(self, files: Mapping[str, ObjectInfo]) -> None:
        for path, info in files.items():
            await thread_uncancelled(_make, self._scratch / path, info.size)

        async def bring(piece: tuple[str, int, int]) -> None:
            path, offset, length = piece
            data = bytearray(length)
            try:
                await self._store.get_range(files[path], offset, memoryview(data))
            except ObjectNotFound:
                raise ChangedFile(f"{path}: it was deleted or replaced meanwhile") from None
            await thread_uncancelled(_write, self._scratch / path, data, offset)

        await for_each_limited(_MAX_REQUESTS, bring, _pieces(files))
        for path, info in files.items():
            os.utime(self._scratch / path, ns=(info.modified_ns, info.modified_ns))


@dataclass(frozen=True, slots=True)
class _RangedObject:
    """A listed object as a source; read in a thread, while the event loop runs."""

    store: ForeignStore
    info: ObjectInfo
    loop: asyncio.AbstractEventLoop

    @property
    def size(self) -> int:
        return self.info.size

    def read(self, offset: int, length: int) -> bytes:
        data = bytearray(length)
        if data:
            reading = self.store.get_range(self.info, offset, memoryview(data))
            try:
                asyncio.run_coroutine_threadsafe(reading, self.loop).result()
            except ObjectNotFound:
                raise ChangedFile("it was deleted or replaced meanwhile") from None
        return bytes(data)


def _common(unit: Unit) -> str:
    """Return the prefix that the names of a unit's objects have, and few others."""
    if all(path.startswith(f"{unit.path}/") for path in unit.files):
        return f"{unit.path}/"
    return commonprefix(unit.files)  # noqa: RUF071  # by characters: few other names begin so


def bucket_entries(objects: Mapping[str, ObjectInfo]) -> dict[str, ListedEntry]:
    """Return the entries of a directory tree with these objects as its files.

    An object whose name cannot be a path, or is also a directory's, becomes a special file, which nothing opens. So the
    checkpoint in which it lies is not taken without it. An empty object whose name ends in '/' is a directory.
    """
    entries: dict[str, ListedEntry] = {}
    for name, info in objects.items():
        path = name.removesuffix("/") if info.size == 0 else name
        if any(step.startswith(TIERD_PREFIX) for step in path.split("/")):
            continue
        safe = _safe(path)
        for at, character in enumerate(safe):
            if character == "/":
                _add(entries, safe[:at], ListedEntry("directory"))
        if safe != path:
            _add(entries, join_path(safe, ascii(path[len(safe) :])[:200].replace("/", "|")), ListedEntry("other"))
            _add(entries, safe, ListedEntry("directory"))
        else:
            _add(entries, path, ListedEntry("directory") if path != name else _entry(info))
    entries.pop("", None)
    return entries


def _add(entries: dict[str, ListedEntry], path: str, entry: ListedEntry) -> None:
    existing = entries.setdefault(path, entry)
    if existing.kind != entry.kind:
        entries[path] = ListedEntry("other")


def _safe(path: str) -> str:
    """Return the longest beginning of a path, in whole components, that is a safe relative path."""
    while path:
        try:
            check_path(path, "")
            return path
        except ManifestError:
            path = path.rpartition("/")[0]
    return path


def _entry(info: ObjectInfo) -> ListedEntry:
    return ListedEntry("file", info.size, info.modified_ns, (0, xxhash.xxh3_64_intdigest(info.token.encode())))


def _pieces(files: Mapping[str, ObjectInfo]) -> Iterator[tuple[str, int, int]]:
    for path, info in files.items():
        for offset in range(0, info.size, _PIECE):
            yield path, offset, min(_PIECE, info.size - offset)


def _make(path: Path, size: int) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def _write(path: Path, data: bytearray, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
