"""One wrong read of any object on a tier changes nothing: it is read again before something is decided by it."""

from __future__ import annotations

import shutil

import pytest
from support.bad_readers import BadNetwork
from support.doubles import Double, flip, is_chunk, is_manifest
from support.world import RUN, commit, converge, part, reconciler

from tierd.codec.chunk_codec import RAW
from tierd.core.ids import IDENTITY_KEY, heads_prefix, retention_prefix
from tierd.core.planning.background_schedule import ScrubbedCopy
from tierd.core.urls import parse_url
from tierd.daemon.tiers.tier_identity import TiersOverlap, check_identities, read_identity
from tierd.daemon.tiers.tier_objects import put_manifest, read_manifest, reread_manifest
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.spool.verified_reads import read_chunk
from tierd.stores.memory_store import MemoryStore

PART = part(1)


@pytest.mark.parametrize("of", [is_chunk, is_manifest])
async def test_a_flush_whose_confirmation_is_misread_once_is_not_repeated(spool, of):
    commit(spool, PART)
    tier = Double()
    daemon = await converge(spool, {"tier": BadNetwork(tier, of, 2)})
    assert not daemon.journal.counters["errors"] and daemon.journal.counters["flushed"] == 1
    assert len(tier.puts(is_chunk)) == len(set(tier.puts(is_chunk)))
    assert await read_manifest(tier, PART)


async def test_chunk_on_a_tier_that_is_misread_once_is_not_sent_again(spool):
    commit(spool, PART)
    tier = Double()
    await converge(spool, {"tier": tier})
    await tier.delete([PART.manifest_key])
    tier.calls.clear()
    await converge(spool, {"tier": BadNetwork(tier, is_chunk, 1)})
    assert not tier.puts(is_chunk) and await read_manifest(tier, PART)


async def test_a_chunk_of_which_the_last_right_object_is_misread_once_is_repaired(spool):
    """The object that the manifest names is wrong; another encoding of the chunk beside it is right."""
    commit(spool, PART)
    tier = Double()
    await converge(spool, {"tier": tier})
    file = spool.manifest(PART).files[-1]
    manifest = await read_manifest(tier, PART)
    stored = next(one for one in manifest.files if one.path == file.path).chunks[-1].stored
    assert stored.codec != RAW
    key = f"{RUN}/{stored.key}"
    beside = f"{key.rpartition('.')[0]}.{RAW}"
    await tier.put(beside, bytes(read_chunk(spool.path(PART) / file.path, file, len(file.chunks) - 1)))
    shutil.rmtree(spool.path(PART).parent)
    await flip(tier, key)
    network = BadNetwork(tier, lambda asked: asked == beside, 1)
    daemon = reconciler(spool, {"tier": network}, scrub="30d")
    await daemon.observe("tier")
    await daemon.scrubber.scrub(ScrubbedCopy("tier", PART))
    assert not daemon.journal.counters["quarantined"] and daemon.journal.counters["repaired_chunks"] == 1
    assert not network.left and await read_manifest(tier, PART)


async def test_a_manifest_that_is_misread_once_is_not_judged_corrupt(spool):
    commit(spool, PART)
    tier = MemoryStore()
    await converge(spool, {"tier": tier})
    data, manifest = await reread_manifest(BadNetwork(tier, is_manifest, 1), PART)
    assert manifest is not None and data == bytes(await tier.get(PART.manifest_key))
    await put_manifest(BadNetwork(tier, is_manifest, 1), PART.manifest_key, data, reread=True)


async def test_two_names_of_a_place_are_recognised_although_its_record_is_misread_once(spool):
    commit(spool, PART)
    place = MemoryStore()
    await converge(spool, {"tier": place})
    own = await read_identity(place)
    assert own and await read_identity(BadNetwork(place, lambda key: key == IDENTITY_KEY, 1)) == own
    names = {"a": BadNetwork(place, lambda key: key == IDENTITY_KEY, 1), "b": place}
    urls = {name: parse_url(f"s3://bucket/p?endpoint=http://{name}") for name in names}
    with pytest.raises(TiersOverlap):
        await check_identities(urls, names)
    assert own != await read_identity(place)  # compared by a new record


@pytest.mark.parametrize("prefix", [retention_prefix(RUN), heads_prefix(RUN)])
async def test_a_record_that_is_misread_once_is_read_again(spool, prefix):
    commit(spool, PART)
    tier = MemoryStore()
    await converge(spool, {"tier": tier})
    network = BadNetwork(tier, lambda key: key.startswith(prefix), 1)
    place = await TierObserver(network).observe({RUN}, chunks=False)
    assert not network.left
    assert place.heads[RUN] and all(one.retention for one in place.policies[RUN])


async def test_a_relay_copies_the_bytes_of_a_chunk_that_is_misread_once(spool):
    data = commit(spool, PART)
    source, target = MemoryStore(), MemoryStore()
    await converge(spool, {"a": source})
    shutil.rmtree(spool.path(PART).parent)
    daemon = await converge(spool, {"a": BadNetwork(source, is_chunk, 1), "b": target})
    assert not daemon.journal.counters["errors"] and not daemon.journal.counters["corruptions"]
    manifests = [await read_manifest(store, PART) for store in (source, target)]
    digests = [[chunk.stored.xxh3_128 for chunk in one.chunks()] for one in manifests]
    assert digests[0] == digests[1] and data and not spool.quarantined()
