"""Write one checkpoint in another format into a directory that appears when it is whole."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tierd.client.restoring.ranged_reader import PartRanges
from tierd.core.errors import ConfigError, SpoolFull, StateMismatch, printable
from tierd.core.ids import PartId
from tierd.exporting.contents import Contents, read_contents
from tierd.exporting.format_writers import FORMATS, WITH_VALUES, ExportJob
from tierd.exporting.streamed_tensors import ChunkReader
from tierd.exporting.watched_contents import is_watched, read_watched
from tierd.spool.file_io import remove, sync_directory
from tierd.spool.spool_access import is_disk_full, space_remedy
from tierd.state.tensor_file import METADATA

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What is exported, and how.

    Raises:
        ConfigError: an unknown format or dtype, or a prefix that the format cannot be stripped of.
    """

    format: str  # `safetensors`, `hf`, `torch` or `dcp`
    only: str | None = None  # one entry of the state; None for all
    dtype: str | None = None  # `fp32`, `fp16` or `bf16`, for floating-point tensors; None keeps each one's own
    strip: str = ""  # a prefix that is removed from each name that begins with it
    # the rank whose value is exported where ranks saved different ones under one name; None refuses these
    rank: int | None = None
    # called with the bytes of tensors that were read, and with those in all
    on_progress: Callable[[int, int], None] = lambda done_bytes, total: None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"format {self.format!r}: one of {', '.join(FORMATS)}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r}: one of {', '.join(DTYPES)}")


@dataclass(frozen=True, slots=True)
class ExportedFiles:
    """What an export wrote."""

    file_sizes: dict[str, int]  # the files by name, with their sizes in bytes
    tensors: int  # their number
    left_out: tuple[str, ...]  # the names of values that were left out
    converted: tuple[str, ...]  # the names of values that have another type in the files, each with its type before
    stripped: int  # how many names lost the prefix
    overflowed: tuple[str, ...]  # the names of tensors in which another dtype made finite values infinite


def export(files: PartRanges, first: PartId, target: Path, options: ExportOptions) -> ExportedFiles:
    """Write a checkpoint into `target`, which appears by a rename when every file is whole and durable.

    Raises `StateMismatch` and `StateRefused`, which name the place, if the checkpoint or the entry does not fit the
    format; `SpoolFull`; `ConfigError` if `target` is not usable; and as `PartRanges.fill`. Nothing is at `target` then.
    """
    if options.rank is not None and not 0 <= options.rank < first.world:
        raise ConfigError(f"rank={options.rank}: {first.checkpoint} has ranks 0..{first.world - 1}")
    if is_watched(files, first):
        contents = read_watched(files, first, options.only)
    else:
        contents = read_contents(files, first, options.only, options.rank, values=options.format in WITH_VALUES)
    stripped = 0
    if options.strip:
        stripped = sum(name.startswith(options.strip) for name in (*contents.tensors, *contents.values))
        contents = strip_prefix(contents, options.strip)
    if not contents.tensors and options.format not in WITH_VALUES:
        raise StateMismatch(f"{first.checkpoint}: no tensor in {options.only or 'the state'!r}; format torch takes it")
    total, done_bytes = sum(tensor.nbytes for tensor in contents.tensors.values()), 0

    def count(size: int) -> None:
        nonlocal done_bytes
        done_bytes += size
        options.on_progress(done_bytes, total)

    target.parent.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        work = ExportJob(contents, ChunkReader(files), DTYPES.get(options.dtype or ""), home, count)
        FORMATS[options.format](work)
        options.on_progress(total, total)  # tied tensors may have been read once
        sync_directory(home)
        mask = os.umask(0o077)
        os.umask(mask)
        home.chmod(0o777 & ~mask)
        home.rename(target)  # fails if the target has become anything but an empty directory
        sync_directory(target.parent)
    except OSError as error:
        if way_out := space_remedy(error, "there", target.parent):
            kind = SpoolFull if is_disk_full(error) else ConfigError
            raise kind(f"{target}: {error.strerror}{way_out}. Nothing was left there") from error
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise ConfigError(f"{target}: somebody made it meanwhile; nothing was touched") from error
        raise
    finally:
        if home.exists():
            remove(home)
    left_out, converted = _omissions(work, options.format), tuple(work.converted)
    return ExportedFiles(work.file_sizes, len(contents.tensors), left_out, converted, stripped, tuple(work.overflowed))


def _omissions(work: ExportJob, format: str) -> tuple[str, ...]:
    contents = work.contents
    if format not in WITH_VALUES:
        differing = (f"{METADATA}.{key}, which differs" for key in contents.contradicting)
        return (*contents.values, *contents.unreadable, *differing)
    names = [
        name
        for name in contents.unreadable
        if not any(f"{omitted}.".startswith(f"{name}.") for omitted in work.left_out)
    ]
    metadata = (METADATA,) if contents.metadata.keys() - {"format"} or contents.contradicting else ()
    return (*work.left_out, *names, *metadata)


def strip_prefix(contents: Contents, prefix: str) -> Contents:
    """Remove a prefix from names; in the nested state, from the keys of mappings."""

    def new(name: str) -> str:
        return name.removeprefix(prefix)

    names = [new(name) for name in (*contents.tensors, *contents.values)]
    if len(set(names)) < len(names) or "" in names:
        clash = next(name for name in names if not name or names.count(name) > 1)
        raise StateMismatch(f"without {prefix!r}, two tensors have the name {printable(clash)!r}, or one has none")
    paths = {new(name): (new(str(path[0])), *path[1:]) for name, path in contents.paths.items()}
    tensors = {new(name): replace(tensor, name=new(name)) for name, tensor in contents.tensors.items()}

    def tree() -> tuple[object, dict[int, str]]:
        state, names_by_id = contents.tree()
        if isinstance(state, dict):
            state = {new(key) if isinstance(key, str) else key: value for key, value in state.items()}
        return state, {tensor_id: new(name) for tensor_id, name in names_by_id.items()}

    values = {new(name): value for name, value in contents.values.items()}
    unreadable = tuple(map(new, contents.unreadable))
    return replace(contents, tensors=tensors, values=values, unreadable=unreadable, paths=paths, tree=tree)
