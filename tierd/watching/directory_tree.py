"""List a directory tree and read ranges of its files; only this module, `named_directory` and the functions of `unit`
that describe an open directory's entries touch the file system.

The module never writes. It opens the directory once, and every path below it one component at a time without following
links. A link planted meanwhile thus cannot redirect it. It opens regular files only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Self

from tierd.core.errors import ConfigError, StoreRefused
from tierd.watching.loose_units import POINTER_NAMES, UserLayout
from tierd.watching.unit import (
    MARKERS,
    MAX_MARKER,
    DescribeEntry,
    ListedEntry,
    Listing,
    Unit,
    entry_by_kind,
    entry_by_status,
    entry_of,
    join_path,
    printable_name,
)
from tierd.watching.unit_detection import names_of_units
from tierd.watching.unit_file import Pointer
from tierd.watching.unit_inspection import ChangedFile, UnitStatus

_POINTERS = tuple(POINTER_NAMES)
MAX_NAMES = 1_000_000  # names below one directory, at most
TIERD_PREFIX = ".tierd-"  # of what `restore --into` and `prepare` make; it is listed only if it is named itself
_FSCK_DIRECTORY = "lost+found"  # at the top of ext4, readable by root only, and no program's
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# A name is gone, or another kind of file is there.
_REPLACED_ERRORS = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ESTALE)


class DirectoryTree:
    """A directory whose files are listed and read. Use it as a context manager.

    Args:
        skip: list a directory below it that may not be read as one special file, instead of raising, and skip names
            that are not UTF-8, because no manifest can have them.
        going: called before each name is listed and before each read; what it raises ends the work.

    Attributes:
        unnamed: the names that it skipped because they are not UTF-8, as paths in which other bytes are escaped.
        unfollowed: links that may be a checkpoint's files and are not followed, each with a status and the reason.

    Raises:
        OSError: the directory cannot be opened.
    """

    def __init__(
        self,
        directory: Path,
        *,
        skip: bool = False,
        user_layout: UserLayout | None = None,
        going: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory, self._skip, self._rules, self._going = directory, skip, user_layout, going
        self._passes_over = skip  # a directory that may not be read
        self.unreadable: list[str] = []
        self.unnamed: list[str] = []
        self.unfollowed: dict[str, tuple[UnitStatus, str]] = {}
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._root)

    def listing(self, name: str | None = None) -> Listing:
        """List everything below the directory, or only an entry, its content, and the top directory's markers.

        Raises `ConfigError` for more than `MAX_NAMES` names, and `StoreRefused` if a directory cannot be listed.
        """
        entries: dict[str, ListedEntry] = {}
        self.unreadable, self.unnamed = [], []
        if name is None:
            self._list_below("", entries, entry_by_status)
        else:
            entries[name] = entry_by_status(name, self._root)
            if entries[name].kind == "directory":
                self._list_below(name, entries, entry_by_status)
            self._list_beside(entries)
        return self._with_texts(entries)

    def list_names(self) -> Listing:
        """List everything below the directory by name and kind, with the sizes and times of the units' files only.

        Other files are not asked for their sizes, because there may be very many of them, on a network file system.
        Raises as `listing`.
        """
        entries: dict[str, ListedEntry] = {}
        self.unreadable, self.unnamed = [], []
        self._list_below("", entries, entry_by_kind)
        pointers: dict[str, set[str]] = {}  # the size tells a text from a file of weights with such a name
        for path in filter(lambda path: path.endswith(_POINTERS), entries):
            directory, _, name = path.rpartition("/")
            if name in POINTER_NAMES and entries[path].kind == "file":
                pointers.setdefault(directory, set()).add(name)
        for directory, names in pointers.items():
            self._add_status(directory, names, entries)
        listing = self._with_texts(entries)
        for directory, names in names_of_units(listing).items():
            self._add_status(directory, names, entries)
        return listing

    def relist(self, unit: Unit) -> Listing:
        """List the files of a unit again, and all that its directory holds now. Raises as `listing`."""
        entries: dict[str, ListedEntry] = {}
        self.unreadable, self.unnamed = [], []
        if unit.is_directory:
            self._list_below(unit.path, entries, entry_by_status)
        names_by_directory: dict[str, list[str]] = {}
        for path in (*unit.files, *unit.special_files):
            if not path.startswith(f"{unit.path}/"):
                directory, _, name = path.rpartition("/")
                names_by_directory.setdefault(directory, []).append(name)
        for directory, names in names_by_directory.items():
            self._add_status(directory, names, entries)
        return Listing(entries)

    def list_top_files(self) -> Listing:
        """List the directory's own files and links, without its subdirectories."""
        entries: dict[str, ListedEntry] = {}
        self._list("", entries, entry_by_status)
        return Listing({name: entry for name, entry in entries.items() if entry.kind != "directory"})

    def pointers(self, paths: Iterable[str], listing: Listing) -> Iterator[Pointer]:
        """Yield the small texts and the links among these listed entries, as possible pointers."""
        for path in paths:
            if listing.entries[path].kind == "link":
                directory, _, name = path.rpartition("/")
                with suppress(OSError), self._open_path(directory, DIRECTORY_FLAGS) as descriptor:
                    yield Pointer(path, self._relative_target(path, os.readlink(name, dir_fd=descriptor)), link=True)
            elif "\ufffd" not in (text := self._read_marker(path, listing.entries) or "\ufffd"):
                yield Pointer(path, text)

    def _relative_target(self, path: str, target: str) -> str:
        """Return a link's target from the link's own directory, if it lies in this one."""
        root = str(self._directory.resolve())
        inside = target.startswith("/") and f"{target}/".startswith(f"{root}/")
        return os.path.relpath(target, Path(root, path).parent) if inside else target

    def owner(self, path: str) -> int:
        with self._open_path(path, DIRECTORY_FLAGS) as descriptor:
            return os.fstat(descriptor).st_uid

    def links_leading_out(self, links: Iterable[str]) -> dict[str, str]:
        """Return the targets of these listed links that lead out of the directory.

        A link's text alone decides, because a target on a file system that does not answer would stop this process.
        """
        roots = (str(self._directory.absolute()), str(self._directory.resolve()))
        outside = {}
        for path in links:
            with suppress(OSError):
                text = str((self._directory / path).readlink())
                targets = [os.path.normpath(Path(root, path).parent / text) for root in roots]
                if not any(f"{target}/".startswith(f"{root}/") for target in targets for root in roots):
                    outside[path] = targets[0]
        return outside

    def _list_below(self, path: str, entries: dict[str, ListedEntry], describe: DescribeEntry) -> None:
        pending = [path]
        while pending:
            pending += self._list(pending.pop(), entries, describe)

    def _list(self, path: str, entries: dict[str, ListedEntry], describe: DescribeEntry) -> list[str]:
        try:
            return self._add(path, entries, describe)
        except OSError as error:
            if path and error.errno in _REPLACED_ERRORS:
                return []  # since the parent was listed
            if isinstance(error, PermissionError) and path and (self._passes_over or path == _FSCK_DIRECTORY):
                self._pass_over(path, entries)
                return []
            raise StoreRefused(f"{self._directory / path}: it cannot be listed: {error.strerror}") from error

    def _pass_over(self, path: str, entries: dict[str, ListedEntry]) -> None:
        """List a directory that may not be read as one special file."""
        entries[path] = ListedEntry("other")
        self.unreadable += [path] if path != _FSCK_DIRECTORY else []

    def _add(self, path: str, entries: dict[str, ListedEntry], describe: DescribeEntry) -> list[str]:
        directories = []
        with self._open_path(path, DIRECTORY_FLAGS) as descriptor, os.scandir(descriptor) as scan:
            for listed in scan:
                self._going()
                name = listed.name
                if name.startswith(TIERD_PREFIX):
                    continue
                if self._skip and not name.isascii() and (escaped := printable_name(name)) != name:
                    self.unnamed.append(join_path(path, escaped))
                    continue
                try:
                    entry = describe(listed, descriptor)
                except FileNotFoundError:
                    continue  # deleted since the directory was read
                if len(entries) == MAX_NAMES:
                    why = f"more than {MAX_NAMES} names lie below it; name one checkpoint"
                    raise ConfigError(f"{self._directory}: {why}")
                entries[inner := f"{path}/{name}" if path else name] = entry
                if entry.kind == "directory":
                    directories.append(inner)
        return directories

    def _add_status(self, directory: str, names: Iterable[str], entries: dict[str, ListedEntry]) -> None:
        """Add the sizes and times of files in a directory; those that were deleted meanwhile are taken out."""
        paths = {path: name for name in names if (path := join_path(directory, name)) not in self.unreadable}
        try:
            with self._open_path(directory, DIRECTORY_FLAGS) as descriptor:
                for path, name in list(paths.items()):
                    self._going()
                    with suppress(FileNotFoundError):
                        entries[path] = entry_by_status(name, descriptor)
                        del paths[path]
        except PermissionError as error:  # its names may be read, and its files may not
            if not directory or not self._passes_over:
                raise StoreRefused(f"{self._directory / directory}: it cannot be listed: {error.strerror}") from error
            paths = {path: path for path in entries if path.startswith(f"{directory}/")}
            self._pass_over(directory, entries)
        except OSError as error:
            if error.errno not in _REPLACED_ERRORS:
                raise StoreRefused(f"{self._directory / directory}: it cannot be listed: {error.strerror}") from error
        for path in paths:
            entries.pop(path, None)

    def _list_beside(self, entries: dict[str, ListedEntry]) -> None:
        try:
            with os.scandir(self._root) as scan:
                names = [entry.name for entry in scan]
        except PermissionError:
            return
        for name in names:
            if name in MARKERS or name.endswith("-unfinished"):
                with suppress(FileNotFoundError):
                    entries[name] = entry_by_status(name, self._root)

    def _with_texts(self, entries: dict[str, ListedEntry]) -> Listing:
        marked = (path for path in entries if path.endswith(MARKERS) and path.rpartition("/")[2] in MARKERS)
        texts = {path: text for path in marked if (text := self._read_marker(path, entries)) is not None}
        return Listing(entries, texts, self._rules)

    def _read_marker(self, path: str, entries: Mapping[str, ListedEntry]) -> str | None:
        if entries[path].kind != "file":
            return None
        try:
            with self._open_path(path, _FILE) as descriptor:
                text = os.read(descriptor, MAX_MARKER + 1)
                return text.decode("utf-8", "replace") if len(text) <= MAX_MARKER else None
        except OSError:
            return None

    def is_followed(self, path: str) -> bool:
        return False

    def _placed(self, path: str) -> tuple[int, str]:
        """Return an open directory, and the path below it at which a listed path is opened."""
        return self._root, path

    def _open_path(self, path: str, flags: int) -> AbstractContextManager[int]:
        return opened_below(*self._placed(path), flags)

    @contextmanager
    def opened(self, path: str, listed: ListedEntry) -> Iterator[OpenFile]:
        """Open a listed file for reading.

        Raises `ChangedFile` if the file is not the listed one, or changed before the block ended; an error from the
        block is then meaningless. Raises `OSError` if the file cannot be read.
        """
        try:
            with self._open_path(path, _FILE) as descriptor:
                _check_unchanged(listed, descriptor)
                try:
                    yield OpenFile(descriptor, listed.size, self._going)
                finally:
                    _check_unchanged(listed, descriptor)
                    self._check_name(path, listed)
        except OSError as error:
            if error.errno in _REPLACED_ERRORS:
                raise ChangedFile("it was deleted or replaced meanwhile") from None
            raise

    def _check_name(self, path: str, listed: ListedEntry) -> None:
        root, path = self._placed(path)
        directory, _, name = path.rpartition("/")
        with opened_below(root, directory, DIRECTORY_FLAGS) as descriptor:
            if entry_by_status(name, descriptor) != listed:
                raise ChangedFile("another file is there by its name")


@contextmanager
def opened_below(root: int, path: str, flags: int) -> Iterator[int]:
    """Open a path below an open directory, one component at a time, without following a link. Raises `OSError`."""
    *directories, last = path.split("/") if path else ["."]
    descriptor = os.dup(root)
    try:
        for part in directories:
            inner = os.open(part, DIRECTORY_FLAGS, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        opened = os.open(last, flags, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    try:
        yield opened
    finally:
        os.close(opened)


def _check_unchanged(listed: ListedEntry, descriptor: int) -> None:
    current = entry_of(os.fstat(descriptor))
    if current.kind != "file" or current.inode != listed.inode:
        raise ChangedFile("another file is there by its name")
    if current.size != listed.size:
        raise ChangedFile(f"it had {listed.size} bytes, and has {current.size}")
    if current != listed:
        raise ChangedFile("it was written to meanwhile")


class OpenFile:
    """An open file as a source of a fixed size; see `CachedSource`."""

    def __init__(self, descriptor: int, size: int, going: Callable[[], None]) -> None:
        self.descriptor, self.size, self._going = descriptor, size, going

    def drop_cached(self) -> None:
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, offset: int, length: int) -> bytes:
        self._going()
        data = os.pread(self.descriptor, length, offset)
        while len(data) < length:
            tail = os.pread(self.descriptor, length - len(data), offset + len(data))
            if not tail:
                raise ChangedFile(f"it had {self.size} bytes, and ends at {offset + len(data)}")
            data += tail
        return data
