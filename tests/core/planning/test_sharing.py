"""What may be shared: how large a chunk has to be, and how many checkpoints may depend on one that wrote it."""

from __future__ import annotations

import pytest
from support.inventories import facts
from support.world import part

from tierd.core.ids import CheckpointId, PartId, chunk_key
from tierd.core.manifest import VERSION, Chunk, File, Manifest, StoredChunk
from tierd.core.planning import flush_order
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.place import Place

MIB = 1 << 20


def manifest(which: PartId, *chunks: tuple[int, PartId]) -> Manifest:
    """A manifest on a tier whose chunks have these sizes, each written by that part's checkpoint."""
    found = []
    for number, (size, owner) in enumerate(chunks):
        digest = f"{number:032x}"
        stored = StoredChunk(codec="raw", size=size, xxh3_128=digest, key=chunk_key(owner, digest, "raw"))
        found.append(Chunk(size=size, xxh3_128=digest, stored=stored))
    file = File(path="w", size=sum(chunk.size for chunk in found), chunks=tuple(found))
    return Manifest(
        version=VERSION,
        run=which.checkpoint.run,
        step=which.checkpoint.step,
        attempt=which.checkpoint.attempt,
        resumed_from=None,
        rank=which.rank,
        world_size=which.world,
        created="2026-01-01T00:00:00+00:00",
        writer="test",
        metrics={},
        files=(file,),
    )


def tier(borrowers: int, *, there: bool = True, rank: int = 0) -> tuple[CheckpointId, Place]:
    """A checkpoint whose chunks so many others name, and a tier that holds those, and it too if it is `there`."""
    first = part(0, rank=rank, world=2)
    parts: dict[PartId, ManifestFacts | None] = {first: facts(0)} if there else {}
    for step in range(1, borrowers + 1):
        parts[part(step, rank=rank, world=2)] = facts(step, bases=[first.checkpoint])
    return first.checkpoint, Place.of(parts)


def test_only_large_chunks_are_offered():
    one = part(1)
    base = manifest(one, (263, one), (MIB - 1, one), (MIB, one), (4 * MIB, one))
    assert [chunk.size for chunk in flush_order.shareable_chunks(base, ())] == [MIB, 4 * MIB], "1 MiB is the smallest"


def test_chunks_of_a_worn_checkpoint_are_not_offered():
    old, one = part(0), part(1)
    base = manifest(one, (2 * MIB, old), (3 * MIB, one))
    assert [chunk.size for chunk in flush_order.shareable_chunks(base, {old.checkpoint})] == [3 * MIB]


@pytest.mark.parametrize("there", [True, False])
def test_sixteen_checkpoints_at_most_name_a_chunk(there):
    """The one that wrote it counts as long as it is there."""
    new = part(99, rank=0, world=2)
    for borrowers in range(20):
        owner, place = tier(borrowers, there=there)
        names = borrowers + there
        assert (owner in flush_order.overshared(place, new)) == (names >= 16), f"{names} checkpoints name chunks of it"


def test_other_ranks_do_not_count_as_they_name_other_chunks():
    _, place = tier(30, rank=1)
    assert flush_order.overshared(place, part(99, rank=0, world=2)) == frozenset()


def test_the_part_itself_does_not_count():
    """It is flushed again; that adds nobody."""
    owner, place = tier(15)
    assert owner in flush_order.overshared(place, part(99, rank=0, world=2))
    assert owner not in flush_order.overshared(place, part(15, rank=0, world=2))
