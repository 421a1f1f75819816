"""`tierd://`: runs on tiers as a read-only file system of fsspec, for `torch.load`, safetensors and others.

Paths are `RUN/CHECKPOINT/PART/FILE`. CHECKPOINT is a directory's name as `ls` lists it, a step, or `latest`; the last
two are the checkpoints that a restore would take. PART is `00000-of-00001` for rank 0 of 1.

Invariant: every byte that is handed out was verified on this read. Nothing is written to a tier.

Source: fsspec's `AbstractFileSystem` and `AbstractBufferedFile`, whose `_fetch_range` returns the bytes of a range, and
its entry points `fsspec.specs`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from threading import RLock
from typing import Any

from tierd.core.errors import importing_extras

with importing_extras("tierd://", "torch,daemon,fsspec"):
    from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

    from tierd.exporting.streamed_tensors import ChunkReader
    from tierd.reading.reader_opening import open as open_run
    from tierd.reading.run_on_tiers import TierFiles, error_if_pruned
    from tierd.reading.run_reader import Reader

from tierd.core.errors import ConfigError, CorruptChunk, ManifestError, ObjectNotFound
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import File
from tierd.core.timeline.restore_order import Candidate
from tierd.reading.checkpoint_deliveries import ListedCheckpoint, listed_id

LATEST = "latest"
_LISTINGS = 3  # for `latest`, because a checkpoint may be pruned between a listing and the reading


class _Pruned(FileNotFoundError):
    """The checkpoint was deleted while it was read."""


class TierdFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The complete checkpoints of the runs on some tiers, as directories.

    Args:
        tiers: a tier's URL, or several in order of preference. `fsspec.url_to_fs` and `get_mapper` have an argument
            `url` of their own, so an option of that name cannot be passed through them.
        key_file: the file with the key that encrypts the tiers.
        url: the older name of `tiers`.

    Raises:
        ConfigError: no URL was given, or one is invalid.
        FileNotFoundError (each method): the path names nothing, or its checkpoint was pruned meanwhile. `latest` is
            then looked up again.
        CorruptChunk (reads): the bytes are proven corrupt on every tier.
        StoreUnavailable (each method): a tier that may hold the bytes did not answer.
    """

    protocol = "tierd"
    root_marker = ""

    def __init__(
        self,
        tiers: str | Sequence[str] = (),
        key_file: str | None = None,
        *,
        url: str | Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        tiers = tiers or url
        self._urls = [tiers] if isinstance(tiers, str) else list(tiers)
        if not self._urls:
            raise ConfigError(
                "tierd://: name the tier, fsspec.open('tierd://RUN/latest/…', tiers='s3://bucket/prefix')"
            )
        self._key_file = key_file
        self._lock = RLock()  # of the readers, which several threads of a caller share
        self._pid = -1
        self._readers: dict[str, Reader] = {}
        self._files: dict[CheckpointId, tuple[TierFiles, ChunkReader]] = {}

    # -- what fsspec calls ------------------------------------------------------------------------------------------

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List a directory: runs, complete checkpoints oldest first, parts, or files."""
        with self._lock:
            entries = list(self._entries(self._strip_protocol(path)))
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if not path:
            return _directory("")
        with self._lock:
            if path.count("/") < 3:
                next(self._entries(path), None)
                return _directory(path)
            try:
                return {"name": path, "size": self._file(path)[2].size, "type": "file"}
            except FileNotFoundError:
                if not list(self._entries(path)):
                    raise
                return _directory(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Return the bytes of a file from `start` to before `end`; negative numbers count from the file's end."""
        with self._lock:
            for tries_left in reversed(range(_LISTINGS)):
                reader, part, file = self._file(self._strip_protocol(path))
                first, last, _ = slice(start, end).indices(file.size)
                try:
                    return self._read(reader, part, file, first, last)
                except _Pruned:
                    if not tries_left or not self._is_latest(path):
                        raise
            raise AssertionError

    def read_range(self, path: str, first: int, last: int) -> bytes:
        """Return verified bytes of a file."""
        with self._lock:
            reader, part, file = self._file(self._strip_protocol(path))
            return self._read(reader, part, file, first, min(last, file.size))

    def ukey(self, path: str) -> str:
        """Return the path with the checkpoint's own name, because the file of `latest` changes; its size may not."""
        return self._resolve_latest(self._strip_protocol(path))

    def get(self, rpath: Any, lpath: Any, recursive: bool = False, **kwargs: Any) -> Any:
        """Copy files or directories to this machine. `latest` is looked up once, so that all are of one checkpoint."""
        if isinstance(rpath, str):
            rpath = self._resolve_latest(self._strip_protocol(rpath))
        return super().get(rpath, lpath, recursive=recursive, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> TierdFile:
        if mode != "rb":
            raise ConfigError(f"tierd://{path}: opened with {mode!r}; the file system is read-only")
        # A name such as `latest` is resolved once, so that all bytes are of one checkpoint.
        with self._lock:
            _, part, file = self._file(path)
        name = f"{part.checkpoint.run}/{part.checkpoint.name}/{part.name}/{file.path}"
        # `blockcache::` passes the size that it has looked up before, perhaps of an older `latest`.
        return TierdFile(self, name, mode, **{"cache_type": "readahead", **kwargs, "size": file.size})

    # ---------------------------------------------------------------------------------------------------------------

    def _reader(self, run: str) -> Reader:
        if self._pid != os.getpid():  # a forked process has no thread of the readers
            self._pid, self._readers, self._files = os.getpid(), {}, {}
        if run not in self._readers:
            try:
                self._readers[run] = open_run(self._urls, run, self._key_file)
            except ConfigError as error:
                if not str(error).startswith("run "):
                    raise
                raise FileNotFoundError(f"tierd://{run}: {error}") from error
        return self._readers[run]

    def _list_complete(self, run: str) -> list[ListedCheckpoint]:
        """List the complete checkpoints: first the timeline's, then all others, each newest first."""
        return [listed for listed in self._reader(run).checkpoints() if listed.complete]

    def _checkpoint(self, run: str, name: str) -> tuple[TierFiles, ChunkReader]:
        exact = CheckpointId.parse(run, name)
        self._reader(run)
        if exact is None or exact not in self._files:
            for listed in self._list_complete(run):
                checkpoint = listed_id(run, listed)
                if name in (LATEST, checkpoint.name) or (
                    name.isascii() and name.isdigit() and int(name) == checkpoint.step
                ):
                    break
            else:
                raise FileNotFoundError(f"tierd://{run}/{name}: no complete checkpoint of this name")
            exact = checkpoint
            if checkpoint not in self._files:
                files = TierFiles(self._reader(run).tiers, checkpoint, listed.world_size)
                self._files[checkpoint] = files, ChunkReader(files)
        return self._files[exact]

    def _is_latest(self, path: str) -> bool:
        return str(self._strip_protocol(path)).split("/")[1:2] == [LATEST]

    def _resolve_latest(self, path: str) -> str:
        """Return a path with the newest checkpoint's name in place of `latest`."""
        if not self._is_latest(path):
            return path
        with self._lock:
            run, name, *deeper = path.split("/")
            return "/".join([run, self._checkpoint(run, name)[0].checkpoint.name, *deeper])

    def _read(self, reader: ChunkReader, part: PartId, file: File, first: int, last: int) -> bytes:
        try:
            return bytes(reader.read(part, file.path, first, last - first)) if first < last else b""
        except (CorruptChunk, ManifestError) as error:
            run = part.checkpoint.run
            reason = error_if_pruned(self._reader(run).tiers, Candidate(part.checkpoint, part.world), error)
            if not isinstance(reason, ObjectNotFound):
                raise reason from None
            self._files.pop(part.checkpoint, None)
            raise _Pruned(f"tierd://{run}/{part.checkpoint.name}: {reason}") from None

    def _part(self, run: str, name: str, part_name: str) -> tuple[ChunkReader, PartId, tuple[File, ...]]:
        for tries_left in reversed(range(_LISTINGS if name == LATEST else 1)):
            files, reader = self._checkpoint(run, name)
            part = PartId.parse(run, files.checkpoint.name, part_name)
            if part is None or part.world != files.world or part.rank >= part.world:
                raise FileNotFoundError(f"tierd://{run}/{name}/{part_name}: parts are named like {files.part(0).name}")
            try:
                return reader, part, files.manifest(part).files
            except ObjectNotFound as error:
                self._files.pop(files.checkpoint, None)
                if not tries_left:
                    raise FileNotFoundError(f"tierd://{run}/{name}/{part_name}: {error}") from error
        raise AssertionError

    def _file(self, path: str) -> tuple[ChunkReader, PartId, File]:
        run, name, part_name, file_path = (*path.split("/", 3), "", "", "")[:4]
        if file_path:
            reader, part, files = self._part(run, name, part_name)
            for file in files:
                if file.path == file_path:
                    return reader, part, file
        raise FileNotFoundError(f"tierd://{path}: no such file; paths are RUN/CHECKPOINT/PART/FILE")

    def _entries(self, path: str) -> Iterator[dict[str, Any]]:
        run, name, part_name, file_path = (*path.split("/", 3), "", "", "", "")[:4]
        if not run:
            yield from (_directory(run_name) for run_name in self._reader("tierd").tiers.runs())
        elif not name:
            complete = sorted(self._list_complete(run), key=lambda listed: listed_id(run, listed))
            if not complete and run not in self._reader(run).tiers.runs():
                raise FileNotFoundError(f"tierd://{run}: no such run")
            yield from (_directory(f"{run}/{listed_id(run, listed).name}") for listed in complete)
        elif not part_name:
            files, _ = self._checkpoint(run, name)
            yield from (_directory(f"{run}/{name}/{files.part(rank).name}") for rank in range(files.world))
        else:
            yield from self._list_below(f"{run}/{name}/{part_name}", file_path, self._part(run, name, part_name)[2])

    def _list_below(self, home: str, file_path: str, files: tuple[File, ...]) -> Iterator[dict[str, Any]]:
        prefix = f"{file_path.rstrip('/')}/" if file_path else ""
        names: set[str] = set()
        for file in files:
            if file.path == file_path:
                yield {"name": f"{home}/{file.path}", "size": file.size, "type": "file"}
                return
            if file.path.startswith(prefix):
                head, deeper, _ = file.path.removeprefix(prefix).partition("/")
                if head not in names:
                    names.add(head)
                    name = f"{home}/{prefix}{head}"
                    yield _directory(name) if deeper else {"name": name, "size": file.size, "type": "file"}
        if file_path and not names:
            raise FileNotFoundError(f"tierd://{home}/{file_path}: no such file or directory")


class TierdFile(AbstractBufferedFile):  # type: ignore[misc]
    """An open file of `TierdFileSystem`."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.read_range(self.path, start, end)
        return data


def _directory(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}
