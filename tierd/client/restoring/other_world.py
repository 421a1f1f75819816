"""Restore a checkpoint that another number of ranks saved: which part a rank reads, and which entries it gets.

Invariant: every rank decides by the same parts, so all of them load the checkpoint, or all refuse it alike. Entries
that are the same on all ranks go to every rank. Of the others each rank gets its own, if there is one. What then is
left over, on one side or the other, was named by the caller, or the restore is refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from tierd.client.restoring.ranged_reader import PartFiles
from tierd.client.restoring.saved_entries import parse_entries, read_tree, referenced_tensors
from tierd.client.restoring.tensor_locations import read_layout
from tierd.core.errors import StateMismatch
from tierd.core.ids import PartId
from tierd.state.single_values import path_part_text


def choose_part(
    files: PartFiles,
    rank: int,
    world: int,
    fresh: Collection[str],
    replicated: Collection[str] = (),
    only: Collection[str] | None = None,
) -> tuple[PartId, list[str], frozenset[str]]:
    """Choose what a rank of `world` restores of a checkpoint that `files.world` ranks saved.

    Args:
        fresh: entries that begin anew on ranks for which none was saved, and of which some are dropped if fewer ranks
            restore than saved.
        replicated: entries that are the same on all ranks of this launch. What a single rank saved of them goes to all.
        only: the entries that are restored; None for all.

    Returns:
        The part to read, the entries to load of it, and those that keep the state's present value.

    Raises:
        StateMismatch: entries differ from rank to rank, and are not in `fresh`.
        CorruptChunk, …: as `PartRanges.fill`.
    """
    part = files.part(rank if rank < files.world else 0)
    first = parse_entries(read_tree(files, files.part(0)), str(files.part(0)))
    saved = first if part.rank == 0 else parse_entries(read_tree(files, part), str(part))
    alike = set(read_layout(files, files.part(0)).replicated)
    if files.world == 1:
        alike.update(replicated)
    own = [name for name in {**first, **saved} if name not in alike and (only is None or name in only)]
    if own and (rank >= files.world or set(own) - set(fresh)):
        equal = _entries_alike(files, first)
        own = [name for name in own if name not in equal]
    if rest := [name for name in own if name not in fresh]:
        text = ", ".join(map(path_part_text, rest))
        raise StateMismatch(
            f"{files.checkpoint} was saved by {files.world} ranks, and this launch has {world}; each rank has its own "
            f"{text}: launch {files.world} ranks; or restore(state, fresh={rest!r}), by which a rank for which none "
            "was saved goes on with what it has; or name what is the same on all ranks before it is saved: "
            "Checkpointer(replicated=…); or tierd.dcp.load(state, checkpointer), which loads "
            "DTensors onto any number of ranks; or, to read one rank's part in one process: "
            f"tierd.open(url, {files.checkpoint.run!r}).restore(state, rank=0)"
        )
    kept = set(fresh) - saved.keys()
    if rank >= files.world:
        kept.update(own)
    names = saved if only is None else only
    return part, [name for name in names if name not in kept], frozenset(kept)


def _entries_alike(files: PartFiles, first: dict[str, object]) -> set[str]:
    """Return the entries without tensors that are equal in the trees of all ranks."""
    alike = {name: json.dumps(value) for name, value in first.items()}
    alike = {name: text for name, text in alike.items() if not referenced_tensors(text)}
    for rank in range(1, files.world):
        part = files.part(rank)
        saved = parse_entries(read_tree(files, part), str(part))
        # Compared as text, because 1, 1.0 and true are different values.
        alike = {name: text for name, text in alike.items() if name in saved and json.dumps(saved[name]) == text}
    return set(alike)
