"""Read and verify one rank's part of a checkpoint of `Checkpointer.save`, or the part that all ranks share."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tierd.client.restoring.entries import check_written_by_save, read_entries
from tierd.core.errors import ConfigError, CorruptChunk, StateMismatch
from tierd.core.ids import PartId
from tierd.core.manifest import Manifest
from tierd.reading.shared import differing
from tierd.reading.tiers import TierFiles
from tierd.spool.direct_io import memory_for, settle
from tierd.state.values import show_part


def read_part(
    files: TierFiles, names: Collection[str] | None, rank: int | None
) -> tuple[Manifest, Mapping[str, memoryview]]:
    """Read the rank's part, or the part that all ranks share.

    If tiers contradict each other, the content whose bytes verify is used.
    """
    while True:
        try:
            return _read(files, _part(files, names, rank), names)
        except CorruptChunk:
            if not files.try_next():
                raise


def _part(files: TierFiles, names: Collection[str] | None, rank: int | None) -> PartId:
    """Return the part to read from.

    Raises:
        ConfigError: the checkpoint has no such rank.
        StateMismatch: no rank was given, and the requested entries differ between ranks.
    """
    if rank is not None:
        if type(rank) is not int or not 0 <= rank < files.world:
            raise ConfigError(f"rank={rank!r}: {files.checkpoint} has ranks 0..{files.world - 1}")
        return files.part(rank)
    entries = differing(files, names)
    if entries:
        entry_texts = ", ".join(map(show_part, entries))
        raise StateMismatch(
            f"{files.checkpoint} was saved by {files.world} ranks, and {entry_texts} differ{'s' * (len(entries) == 1)} "
            f"between them: say whose is wanted, restore(state, rank=0), or load others alone, restore(state, only=…)"
        )
    return files.part(0)


def _read(files: TierFiles, part: PartId, names: Collection[str] | None) -> tuple[Manifest, Mapping[str, memoryview]]:
    manifest = files.manifest(part)
    check_written_by_save(part, [file.path for file in manifest.files])
    if names is not None:
        return read_entries(files, part, names)
    contents = {}
    for file in manifest.files:
        memory = memory_for(file.size)
        if file.size:
            files.fill(memory, [files.span(part, file.path)])
        contents[file.path] = settle(memory, file.size)
    return manifest, contents
