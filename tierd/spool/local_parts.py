"""A spool's committed parts and quarantined parts: list and read them. Nothing here changes the spool."""

from __future__ import annotations

import errno
import itertools
import logging
import operator
import os
import stat
from collections.abc import Collection, Container
from pathlib import Path

from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, SpoolUnusable, TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import MANIFEST_NAME, Manifest
from tierd.core.manifest_codec import MAX_MANIFEST_SIZE, decode
from tierd.core.storage_faults import read_until_proven
from tierd.spool.file_io import digest, exists, names_in, open_plain
from tierd.spool.run_records import saved_at
from tierd.spool.spool_access import check_own_directory, check_run_link
from tierd.spool.spool_directory import (
    directories_in,
    is_plain_directory,
    links_in,
    odd_entries_in,
    parts_below,
    parts_of_run,
)

log = logging.getLogger("tierd")


class LocalParts:
    """The reading half of `Spool`.

    `made` says whether the spool's own directories have been created, so that a missing one was unmounted.
    """

    def __init__(self, root: Path, *, made: bool) -> None:
        self.root, self.control, self._made = root, root / ".tierd", made
        self._ignored: set[str] = set()

    def path(self, part: PartId) -> Path:
        return self.root / part.path

    def _room(self, name: str) -> Path:
        """Return a subdirectory of `.tierd/`. Raises `SpoolUnusable` if a symbolic link has replaced it."""
        path = self.control / name
        check_own_directory(path)
        return path

    def parts(self, run: str | None = None) -> list[PartId]:
        """List every committed part, of one run or of all runs, in order. Raises OSError.

        A symbolic link in place of a run's directory is followed if `check_run_link` allows it. No other link is
        followed.
        """
        runs = [name for name in self.runs() if run in (None, name)]
        parts = [part for name in runs for names in parts_of_run(self.root, name) if (part := PartId.parse(*names))]
        self.check_mounted()
        return sorted(parts)

    def newest(self, run: str, count: int) -> list[CheckpointId]:
        """List the `count` newest checkpoints of a run that have anything in their place here, newest first.

        Only names are compared, because thousands of checkpoints must cost a single directory listing. Raises OSError
        if the run's directory cannot be listed, or the disk does not say what one of these is.
        """
        home = self.root / run
        names = sorted(sorted(names_in(home), reverse=True), key=_attempt, reverse=True)  # by attempt, then step
        checkpoints = (checkpoint for name in names if (checkpoint := CheckpointId.parse(run, name)))
        existing = (checkpoint for checkpoint in checkpoints if exists(home / checkpoint.name))  # else pruned since
        newest = list(itertools.islice(existing, count))
        self.check_mounted()
        return newest

    def names(self, run: str, known_names: Container[str] = ()) -> list[str]:
        """List the directories in a run's directory, by name. Raises OSError if the run cannot be listed.

        Those in `known_names` were listed before, and are not asked again whether they are directories.
        """
        return directories_in(self.root / run, known_names)

    def parts_of(self, checkpoint: CheckpointId) -> list[PartId]:
        """List the committed parts of one checkpoint, in order. Raises OSError if the checkpoint cannot be listed."""
        return self.list_parts(checkpoint)[0]

    def list_parts(self, checkpoint: CheckpointId) -> tuple[list[PartId], bool]:
        """List the committed parts of one checkpoint, in order, and say whether its directory exists and is empty.

        Raises OSError if the directory cannot be listed.
        """
        try:
            with os.scandir(f"{self.root}/{checkpoint.run}/{checkpoint.name}") as entries:
                inside = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return [], False
        pairs = (PartId.parse_name(f"{entry.name}.json") for entry in inside if entry.is_dir(follow_symlinks=False))
        return sorted(PartId(checkpoint, *pair) for pair in pairs if pair), not inside

    def directory_path(self, run: str, name: str = "") -> str:
        """Return the path of a run's directory, or of the checkpoint `name` in it."""
        return f"{self.root}/{run}/{name}"

    def stamp(self, path: str) -> int:
        """Return when an entry was last added to, or removed from, a directory: nanoseconds since 1970, 0 if it does
        not exist.

        Raises OSError if its status cannot be read.
        """
        try:
            return os.stat(path).st_mtime_ns  # noqa: PTH116  # thousands of times per listing
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def check_mounted(self) -> None:
        """Raise OSError if the spool's file system was unmounted, because a listing then shows an empty mount point."""
        if self._made and not self.control.exists():
            raise FileNotFoundError(errno.ENOENT, "it has vanished: is its file system still mounted?", str(self.root))

    def odd_places(self, run: str, only: Collection[CheckpointId] | None = None) -> dict[CheckpointId, str]:
        """Find the checkpoints of which something other than a directory lies in a checkpoint's or a part's place.

        No such thing is opened or followed: what is behind it counts as absent from the spool. The result has by
        checkpoint, of all or of `only` these, the path, what is there, and the remedy. Raises OSError.
        """
        home = self.root / run
        names = (CheckpointId.parse(run, name) for name in names_in(home)) if only is None else only
        odd: dict[CheckpointId, str] = {}
        for checkpoint in names:
            if checkpoint is None:
                continue
            place = home / checkpoint.name
            if is_plain_directory(place):
                odd_paths = [place / name for name in odd_entries_in(place) if PartId.parse_name(f"{name}.json")]
            else:
                odd_paths = [place]
            for path in odd_paths:
                if described := _described(path):
                    odd[checkpoint] = described
        return odd

    def runs(self) -> list[str]:
        """List the directories that may belong to runs, and the links to such directories that are followed.

        Every other link is logged once per `Spool`, because a daemon lists the runs repeatedly.
        """
        names = directories_in(self.root)
        for name in links_in(self.root):
            try:
                check_run_link(self.root / name)
                names.append(name)
            except SpoolUnusable as error:
                if str(error) not in self._ignored:
                    self._ignored.add(str(error))
                    log.warning("%s", error)
        return names

    def check_run_directory(self, run: str) -> None:
        """Raise `SpoolUnusable` if a run's directory is a symbolic link that tierd does not follow."""
        if (home := self.root / run).is_symlink():
            check_run_link(home)

    def has(self, part: PartId) -> bool:
        """Whether the part was committed. Also False if the disk gives an error, because `stage` checks again."""
        try:
            return self.holds(part)
        except OSError:
            return False

    def holds(self, part: PartId) -> bool:
        """Whether the part's directory is here, behind no link. Raises OSError if the disk does not say."""
        home = self.path(part)
        return is_plain_directory(home.parent) and is_plain_directory(home)

    def attempts(self, run: str) -> set[str]:
        """List every attempt of `run` that left a checkpoint or a quarantined checkpoint here. Only names are read."""
        homes = [self.root / run] if run in self.runs() else []
        names = {_attempt(name) for home in (*homes, self._room("quarantine") / run) for name in names_in(home)}
        self.check_mounted()
        return {name for name in names if CheckpointId.parse(run, f"{0:012}.{name}")}

    def manifest(self, part: PartId) -> Manifest:
        """Read the manifest of a committed part.

        Raises:
            ObjectNotFound: the part is not here.
            ManifestError: the part is here, and its manifest is missing, damaged or unsafe.
            FormatTooNew: a newer tierd wrote the manifest.
        """
        if not self.holds(part):  # a link in its place is not followed, because anything may be behind it
            raise ObjectNotFound(f"{part} is not in the spool")
        return self._read_manifest(self.path(part), part)

    def manifest_stamp(self, part: PartId) -> int:
        """Return a number that changes when a part's manifest is replaced, as by a repair; 0 if it is missing."""
        try:
            return (self.path(part) / MANIFEST_NAME).lstat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def saved_stamp(self, run: str, attempt: str) -> int:
        """Return a number that changes with every save of a launch on this node; 0 if the launch saved nothing here."""
        return saved_at(self.control, run, attempt)

    def _read_manifest(self, home: Path, part: PartId) -> Manifest:
        path = home / MANIFEST_NAME
        return read_until_proven(lambda: self._read_manifest_once(home, part), str(path))

    def _read_manifest_once(self, home: Path, part: PartId) -> Manifest:
        try:
            fd = open_plain(home / MANIFEST_NAME)
        except CorruptChunk as error:
            if not home.is_dir():
                raise ObjectNotFound(f"{part} is not in the spool") from error
            raise ManifestError(f"manifest of {part}: {error}") from error
        with os.fdopen(fd, "rb") as file:  # bounded by the file's size, because `read` allocates its argument at once
            data = file.read(min(os.fstat(fd).st_size, MAX_MANIFEST_SIZE) + 1)
            try:
                return decode(data, part)
            except ManifestError as error:
                error.read_digest = digest(data)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # so that the next read comes from the disk
                raise

    def quarantined(self) -> dict[PartId, Manifest | None]:
        """Return the quarantined parts with their manifests; None for a manifest that cannot be read."""
        quarantined: dict[PartId, Manifest | None] = {}
        base = self._room("quarantine")
        for run, checkpoint, name in parts_below(base):
            part = PartId.parse(run, checkpoint, name)
            if part:
                try:
                    quarantined[part] = self._read_manifest(base / part.path, part)
                except (TierdError, OSError):
                    quarantined[part] = None
        return quarantined


_attempt = operator.itemgetter(slice(13, None))  # the attempt in the name of a checkpoint's directory


def _described(path: Path) -> str:
    """Say what lies at a path that should be a directory, and the remedy; empty if it was removed meanwhile."""
    try:
        mode = path.lstat().st_mode
        kind = f"a symbolic link to {path.readlink()}" if stat.S_ISLNK(mode) else "not a directory"
    except FileNotFoundError:
        return ""
    except OSError:  # replaced meanwhile
        kind = "not a directory"
    return (
        f"{path}: {kind}; below a run's directory nothing but directories is used, and no link is followed. Put the "
        "directory itself there, and this copy counts again"
    )
