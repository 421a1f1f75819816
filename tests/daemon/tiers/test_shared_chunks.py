"""What a tier's manifests borrow takes little memory, has a limit, and is forgotten with them."""

from __future__ import annotations

import gc

import pytest
from core.planning.test_sharing import manifest
from support.world import part

from tierd.daemon.tiers.shared_chunks import (
    NO_SHARED_CHUNKS,
    NamedChunks,
    SharedChunkTable,
    chunks_named_by,
    key_digest,
)

OLD = part(0)


def test_shared_chunks_are_only_those_that_other_checkpoints_wrote():
    one = part(1)
    shared = chunks_named_by(manifest(one, (5, OLD), (6, one), (7, OLD)))
    assert shared.owners == {OLD.checkpoint}
    everything = chunks_named_by(manifest(one, (5, OLD), (6, one)), include_own=True)
    assert everything.owners == {OLD.checkpoint, one.checkpoint}
    (key,) = [chunk.stored.key for chunk in manifest(one, (5, OLD)).chunks()]
    assert chunks_named_by(manifest(one, (5, OLD))).chunks[OLD.checkpoint].tolist() == [key_digest(key)]


def test_equal_sets_are_kept_once_and_dropped_with_the_last_that_names_them():
    memory = SharedChunkTable(limit_bytes=80)
    chunks = [(5, OLD)] * 10
    kept = [memory.deduplicate(chunks_named_by(manifest(part(step), *chunks))) for step in range(1, 9)]
    assert all(one is kept[0] for one in kept) and kept[0].chunks is not None
    full = memory.deduplicate(chunks_named_by(manifest(part(9), (5, part(1)))))
    assert full.chunks is None and full.owners == {part(1).checkpoint}, "there is no room; who lends is known"
    kept.clear()
    gc.collect()
    memory.count()
    assert memory.deduplicate(chunks_named_by(manifest(part(9), (5, part(1))))).chunks is not None


def test_who_borrows_nothing_takes_no_room():
    assert SharedChunkTable(0).deduplicate(chunks_named_by(manifest(part(1), (5, part(1))))) is NO_SHARED_CHUNKS


@pytest.mark.parametrize("others", [0, 1, 3])
def test_named_chunks_lists_the_chunks_under_an_owner(others):
    named = NamedChunks([OLD.checkpoint])
    for step in range(1, others + 1):
        named.add(chunks_named_by(manifest(part(step), *[(5, OLD)] * step, (6, part(100)))))
    assert len(named.of_owner(OLD.checkpoint)) == others
    assert named.of_owner(part(100).checkpoint) == frozenset(), "nobody asked"
