"""The manifest: what is written is read back; anything else, down to one flipped bit, is refused as what it is."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chunk_keys import old_chunk_key
from support.seeds import examples

from tierd.core.errors import FormatTooNew, ManifestError
from tierd.core.ids import CheckpointId, PartId, chunk_key
from tierd.core.manifest import (
    CHUNK_SIZE,
    FIRST,
    MAX_CHUNK_SIZE,
    MAX_FILES,
    MAX_METRICS,
    MAX_PATCHES,
    PATCHED,
    VERSION,
    WITH_DELTAS,
    Chunk,
    File,
    Manifest,
    Origin,
    StoredChunk,
    check_path,
    chunk_sizes,
    is_metric_name,
    metrics_to_json,
)
from tierd.core.manifest_codec import MAX_MANIFEST_SIZE, decode, encode

ATTEMPT, EARLIER = "0123456789ab-01234567", "0123456789aa-01234567"
PART = PartId(CheckpointId("run", ATTEMPT, 200), 1, 2)
DIGEST = "0123456789abcdef" * 2
KEY = chunk_key(PART, DIGEST, "zst")


def manifest(**changes) -> Manifest:
    chunk = Chunk(size=5, xxh3_128=DIGEST, stored=StoredChunk(codec="zst", size=4, xxh3_128=DIGEST, key=KEY))
    plain = Manifest(
        version=VERSION,
        run="run",
        step=200,
        attempt=ATTEMPT,
        resumed_from=Origin(step=100, attempt=EARLIER),
        rank=1,
        world_size=2,
        created="2025-01-01T00:00:00+00:00",
        writer="tierd 0.1.0",
        metrics={"loss": 0.5},
        files=(File(path="a/b.bin", size=5, chunks=(chunk,)), File(path="empty", size=0, chunks=())),
    )
    return msgspec.structs.replace(plain, **changes)


def seal(members: object) -> bytes:
    """Any JSON object with an intact seal, as a hostile or future writer could make it."""
    body = (members if isinstance(members, bytes) else json.dumps(members).encode())[:-1]
    return body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def members(**changes) -> dict:
    return {**json.loads(msgspec.json.encode(manifest())), **changes}


def with_chunk(**changes) -> dict:
    found = members()
    found["files"][0]["chunks"][0] |= changes
    return found


def with_stored(**changes) -> dict:
    return with_chunk(stored=members()["files"][0]["chunks"][0]["stored"] | changes)


def with_file(**changes) -> dict:
    found = members()
    found["files"][0] |= changes
    return found


def with_paths(*paths: str) -> dict:
    return members(files=[{"path": path, "size": 0, "chunks": []} for path in paths])


# -- what is written is read ------------------------------------------------------------------------------------------


def test_encoded_manifest_decodes_to_itself_and_is_plain_json():
    data = encode(manifest())
    assert decode(data, PART) == decode(data) == manifest()
    assert encode(decode(data)) == data
    plain = json.loads(data)
    assert plain.pop("digest") == xxhash.xxh3_128_hexdigest(data[: data.rindex(b',"digest"')])
    assert plain == members()
    assert seal(msgspec.json.encode(manifest())) == data


def test_manifest_describes_its_part_origin_and_sizes():
    found = manifest()
    assert found.part == PART
    assert found.origin == CheckpointId("run", EARLIER, 100)
    assert manifest(resumed_from=None).origin is None
    assert (found.size, found.stored_size) == (5, 4)
    assert found.created_at.isoformat() == found.created


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@pytest.mark.parametrize("name", ["", "a\x1b[2J", "a\nb", "x" * 257])
def test_a_metric_whose_name_could_not_be_printed_is_refused(name):
    assert not is_metric_name(name)
    with pytest.raises(ManifestError):
        decode(encode(manifest(metrics={name: 1.0})))


@given(st.dictionaries(NAMES.filter(is_metric_name), st.floats(), max_size=5))
def test_every_metric_survives_encoding_nan_and_infinities_included(metrics):
    found = decode(encode(manifest(metrics=metrics_to_json(metrics)))).numbers
    assert found.keys() == metrics.keys()
    for name, value in metrics.items():
        assert found[name] == value or (math.isnan(found[name]) and math.isnan(value))


def test_members_that_a_later_release_adds_are_ignored():
    future = with_chunk(later=[{"x": None}]) | {"added": {"deep": [1, 2.5, "x"]}, "resumed_from": None}
    future["files"][0]["mode"] = 0o644
    assert decode(seal(future), PART) == manifest(resumed_from=None)


@given(st.integers(0, 10 * CHUNK_SIZE), st.integers(1, 2 * CHUNK_SIZE))
def test_chunks_cover_a_file_without_a_gap_and_only_the_last_is_short(size, chunk_size):
    if size // chunk_size > 10_000:
        size %= 10_000 * chunk_size
    sizes = chunk_sizes(size, chunk_size)
    assert sum(sizes) == size
    assert all(length == chunk_size for length in sizes[:-1])
    assert all(0 < length <= chunk_size for length in sizes)


def test_the_same_content_is_the_same_however_it_is_stored():
    spool = manifest(files=tuple(_unstored(file) for file in manifest().files))
    assert spool.same_content(manifest())
    assert spool.stored_size == 0
    assert manifest().same_content(manifest(metrics={}, created="2026-01-01T00:00:00Z"))
    other = File(path="a/b.bin", size=5, chunks=(Chunk(size=5, xxh3_128="f" * 32),))
    assert not spool.same_content(manifest(files=(other,)))
    assert not spool.same_content(manifest(resumed_from=None))
    assert not spool.same_content(manifest(step=201))


def _unstored(file: File) -> File:
    return File(
        path=file.path, size=file.size, chunks=tuple(Chunk(size=c.size, xxh3_128=c.xxh3_128) for c in file.chunks)
    )


# -- damage -----------------------------------------------------------------------------------------------------------


def test_every_single_flipped_bit_is_refused_as_corruption():
    data = encode(manifest())
    for index in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[index] ^= 1 << bit
            with pytest.raises(ManifestError):
                decode(bytes(flipped), PART)


def test_every_truncation_and_anything_appended_is_refused():
    data = encode(manifest())
    for length in range(len(data)):
        with pytest.raises(ManifestError):
            decode(data[:length], PART)
    for extra in (b"\n", b"\0", b"}", data):
        with pytest.raises(ManifestError):
            decode(data + extra, PART)


@settings(max_examples=examples(200))
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=100).map(lambda body: seal(body + b"}"))))
def test_garbage_is_refused_and_never_anything_else(data):
    with pytest.raises(ManifestError):
        decode(data)


def test_more_than_is_ever_read_is_refused_unread():
    largest = MAX_MANIFEST_SIZE - len(seal(members(padding="")))
    assert decode(seal(members(padding="x" * largest))) == manifest()
    for size in (largest + 1, 33 << 20):
        with pytest.raises(ManifestError, match="at most 33554432 are read"):
            decode(seal(members(padding="x" * size)))


# -- hostile content, with an intact seal -----------------------------------------------------------------------------

HOSTILE = {
    "the parent": with_paths("../x"),
    "a parent inside": with_paths("a/../../x"),
    "a parent last": with_paths("a/.."),
    "here": with_paths("./a"),
    "absolute": with_paths("/etc/passwd"),
    "an empty component": with_paths("a//b"),
    "a trailing slash": with_paths("a/"),
    "no path": with_paths(""),
    "the manifest's name": with_paths("manifest.json"),
    "below the manifest's name": with_paths("manifest.json/x"),
    "the name of a manifest being healed": with_paths("manifest.json.new"),
    "a path twice": with_paths("a", "b", "a"),
    "a file inside a file": with_paths("a/b/c", "a/b"),
    "a file inside a file, far apart": with_paths("a", "b", "a/b/c"),
    "a newline": with_paths("a\nb"),
    "an escape": with_paths("\x1b[2J"),
    "a NUL": with_paths("a\0"),
    "a delete": with_paths("\x7f"),
    "a component of 256 bytes": with_paths("ü" * 128),
    "a path of 1025": with_paths("/".join(["x" * 40] * 25) + "y"),
    "half a surrogate": json.dumps(with_paths("x")).replace('"x"', '"\\ud800"').encode(),
    "a chunk of 10^12 bytes": members(files=[with_chunk(size=10**12)["files"][0] | {"size": 10**12}]),
    "a chunk one byte too large": with_chunk(size=MAX_CHUNK_SIZE + 1),
    "an empty chunk": with_chunk(size=0),
    "a negative chunk": with_chunk(size=-5),
    "a size that is no integer": with_chunk(size=5.5),
    "chunks that add up to less": with_file(size=6),
    "chunks that add up to more": with_file(size=4),
    "a negative file": with_file(size=-1),
    "stored larger than any chunk": with_stored(size=2 * MAX_CHUNK_SIZE),
    "a digest in capitals": with_chunk(xxh3_128=DIGEST.upper()),
    "a digest with a newline": with_chunk(xxh3_128=DIGEST + "\n"),
    "a short digest": with_chunk(xxh3_128=DIGEST[1:]),
    "a codec that is a path": with_stored(codec="../x"),
    "a key of another codec": with_stored(key=KEY.replace(".zst", ".raw")),
    "a key of another chunk": with_stored(key=KEY.replace(DIGEST, DIGEST[::-1])),
    "a key of another rank": with_stored(key=KEY.replace("/00001/", "/00000/")),
    "a key of another run": with_stored(key=f"other/{KEY}"),
    "a key that climbs": with_stored(key=f"../other/{KEY}"),
    "a key that climbs inside": with_stored(key=KEY.replace("/00001/", "/../")),
    "an absolute key": with_stored(key=f"/{KEY}"),
    "a key of no chunk": with_stored(key=f"manifests/{PART.checkpoint.name}/{PART.name}.json"),
    "a key with foreign digits": with_stored(key=KEY.replace("000000000200", "\u0660" * 12)),
    "a key without an end": with_stored(key=KEY + "x" * 200),
    "an origin of the same attempt": members(resumed_from={"step": 100, "attempt": ATTEMPT}),
    "a later origin": members(resumed_from={"step": 100, "attempt": "f" + ATTEMPT[1:]}),
    "an origin of no form": members(resumed_from={"step": 100, "attempt": EARLIER + "\n"}),
    "an origin before time": members(resumed_from={"step": -1, "attempt": EARLIER}),
    "a run that climbs": members(run="../run"),
    "a run with a slash": members(run="a/b"),
    "no run": members(run=""),
    "an attempt of no form": members(attempt="x"),
    "an attempt with a newline": members(attempt=ATTEMPT + "\n"),
    "a negative step": members(step=-1),
    "a step beyond": members(step=10**12),
    "a step that is a flag": members(step=True),
    "a rank beyond the world": members(rank=2),
    "a negative rank": members(rank=-1),
    "a world of none": members(world_size=0),
    "a world too large": members(world_size=100_000),
    "created in no zone": members(created="2025-01-01T00:00:00"),
    "created elsewhere": members(created="2025-01-01T00:00:00+01:00"),
    "created never": members(created="yesterday"),
    "a metric that is no number": members(metrics={"loss": "low"}),
    "a metric that is a list": members(metrics={"loss": [1]}),
    "a metric beyond a float": json.dumps(members()).replace("0.5", "1" + "0" * 400).encode(),
    "too many metrics": members(metrics={str(number): 0 for number in range(MAX_METRICS + 1)}),
    "too many files": lambda: with_paths(*map(str, range(MAX_FILES + 1))),  # large, so only made by its test
    "a long writer": members(writer="x" * 65),
    "files missing": {name: value for name, value in members().items() if name != "files"},
    "a version that is no number": members(version="1"),
    "no version": {name: value for name, value in members().items() if name != "version"},
    "a list": b"[1]",
    "two objects": json.dumps(members()).encode() + b"{}",
    "bottomless": b'{"version":1,"x":' + b"[" * 100_000 + b"}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_content_is_refused_before_anything_is_made_of_it(name):
    content = HOSTILE[name]
    with pytest.raises(ManifestError) as caught:
        decode(seal(content() if callable(content) else content))
    assert str(caught.value).startswith("manifest: ")


@pytest.mark.parametrize(
    "other",
    [
        PartId(CheckpointId("other", ATTEMPT, 200), 1, 2),
        PartId(CheckpointId("run", EARLIER, 200), 1, 2),
        PartId(CheckpointId("run", ATTEMPT, 201), 1, 2),
        PartId(CheckpointId("run", ATTEMPT, 200), 0, 2),
        PartId(CheckpointId("run", ATTEMPT, 200), 1, 3),
    ],
)
def test_intact_manifest_under_another_name_is_refused(other):
    with pytest.raises(ManifestError, match="it says that it is run step 200"):
        decode(encode(manifest()), other)


OLDER = PartId(CheckpointId("run", EARLIER, 100), 1, 2)


@pytest.mark.parametrize(
    ("version", "key", "home"),
    [
        (VERSION, chunk_key(OLDER, DIGEST, "zst"), None),
        (VERSION, chunk_key(OLDER, DIGEST, "zst", 99), None),  # of a launch of more ranks
        (VERSION, chunk_key(OLDER, DIGEST, "zst", 99), 0),
        (VERSION, old_chunk_key(OLDER, DIGEST, "zst"), None),
        (VERSION, old_chunk_key(OLDER, DIGEST, "zst"), 0),
        (VERSION, old_chunk_key(PART, DIGEST, "zst"), None),  # a repair has moved another chunk of an old manifest
        (VERSION, chunk_key(PART, DIGEST, "zst", 0), 0),
        (VERSION, chunk_key(PART, DIGEST, "zst"), 1),
        (FIRST, old_chunk_key(PART, DIGEST, "zst"), None),
        (PATCHED, old_chunk_key(OLDER, DIGEST, "zst"), None),
    ],
)
def test_keys_of_the_part_of_its_homes_and_of_older_checkpoints_are_taken(version, key, home):
    form = with_chunk(home=home) if home is not None else members()
    form["files"][0]["chunks"][0]["stored"]["key"] = key
    chunk = decode(seal(form | {"version": version})).files[0].chunks[0]
    assert (chunk.stored.key, chunk.home) == (key, home)


@pytest.mark.parametrize(
    ("version", "key", "home", "why"),
    [
        (VERSION, chunk_key(PART, DIGEST, "zst", 0), None, "no key of a chunk of rank 1"),
        (VERSION, KEY, 0, "no key of a chunk of rank 0"),
        (VERSION, chunk_key(PART, DIGEST, "zst", 2), 2, "home 2"),
        (VERSION, old_chunk_key(PART, DIGEST, "zst").replace("/00001/", "/00000/"), 0, "no key"),
        (VERSION, KEY.replace("chunks/1/", "chunks/2/"), None, "no key"),
        (VERSION, chunk_key(OLDER, DIGEST, "zst").replace("chunks/1/", "chunks/01/"), None, "no key"),
        (FIRST, KEY, None, "no key"),
        (PATCHED, chunk_key(OLDER, DIGEST, "zst"), None, "no key"),
        (FIRST, old_chunk_key(PART, DIGEST, "zst"), 1, "home 1, in version 1"),
    ],
)
def test_keys_that_no_writer_of_the_version_makes_are_refused(version, key, home, why):
    form = with_chunk(home=home) if home is not None else members()
    form["files"][0]["chunks"][0]["stored"]["key"] = key
    with pytest.raises(ManifestError, match=why):
        decode(seal(form | {"version": version}))


@pytest.mark.parametrize(
    "path", ["a", "a/b", ".metadata", "...", "a..b", "-", "ü/é", "manifest.json.bak", "a/manifest.json", "x" * 255]
)
def test_ordinary_paths_are_taken(path):
    check_path(path, "here")


# -- patches ----------------------------------------------------------------------------------------------------------


def _stored(number: int, codec: str = "raw", *, old: bool = False, **more: object) -> dict[str, object]:
    name = f"{number:032x}"
    key = (old_chunk_key if old else chunk_key)(PART, name, codec)
    return {"size": 10, "xxh3_128": name, "stored": {"codec": codec, "size": 9, "xxh3_128": name, "key": key, **more}}


def _patch(number: int, base: object, *, old: bool = False) -> dict[str, object]:
    return _stored(number, f"patch{number:011x}", old=old, base=base)


def _delta(number: int) -> dict[str, object]:
    return _stored(number, f"delta{number:011x}", base=_stored(0))


def _long(patches: int, *, old: bool = False) -> dict[str, object]:
    entry = _stored(0, old=old)
    for number in range(patches):
        entry = _patch(number + 1, entry, old=old)
    return entry


def _of_patches(chunk: dict[str, object], version: int = VERSION) -> bytes:
    return seal(members(version=version, files=[{"path": "table", "size": 10, "chunks": [chunk]}]))


def test_a_patch_names_its_bases_down_to_a_whole_chunk():
    found = decode(_of_patches(_long(MAX_PATCHES)), PART)
    assert len(list(found.objects())) == MAX_PATCHES + 1
    assert decode(encode(found), PART) == found
    old = decode(_of_patches(_long(MAX_PATCHES, old=True), PATCHED), PART)
    assert old.directories == {f"chunks/{PART.checkpoint.name}/00001/"}


def test_a_manifest_is_of_the_newest_version_only_while_it_names_a_delta_or_one_below_a_patch():
    for entry in (_delta(1), _patch(2, _delta(1))):
        found = decode(_of_patches(entry, WITH_DELTAS), PART)
        assert decode(encode(found), PART) == found
        (chunk,) = found.chunks()
        assert found.with_chunks({(0, 0): chunk}).version == WITH_DELTAS
        whole = msgspec.structs.replace(chunk, stored=None)
        assert found.with_chunks({(0, 0): whole}).version == VERSION


@pytest.mark.parametrize(
    ("chunk", "version", "why"),
    [
        (_stored(1, "patch00000000000"), VERSION, "no stored base"),
        (_patch(1, {"size": 10, "xxh3_128": f"{2:032x}"}), VERSION, "no stored base"),
        (_stored(1, "raw", base=_stored(2)), VERSION, "is no patch, and has a base"),
        (_patch(1, {**_stored(2), "size": 11}), VERSION, "has 11 bytes, not 10"),
        (_patch(1, _stored(2, "raw", key="chunks/elsewhere")), VERSION, "is no key"),
        (_long(MAX_PATCHES + 1), VERSION, f"more than {MAX_PATCHES} patches"),
        (_long(1, old=True), FIRST, "is a patch, in a manifest of version 1"),
        (_patch(2, _delta(1)), VERSION, "is a delta, in a manifest of version 4"),
        (_stored(1, "delta00000000000"), WITH_DELTAS, "no stored base"),
    ],
    ids=[
        *("without", "unstored", "of a whole chunk", "of another size", "elsewhere", "too many", "version 1"),
        *("delta in version 4", "delta without"),
    ],
)
def test_a_patch_that_nobody_could_read_is_refused(chunk, version, why):
    with pytest.raises(ManifestError, match=why):
        decode(_of_patches(chunk, version), PART)


# -- other versions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 6, 10**6])
def test_a_newer_format_is_too_new_and_not_corrupt(version):
    """Whatever else it holds: only `version` and the seal are promised."""
    for found in (members(version=version), {"version": version}, {"version": version, "files": "elsewhere"}):
        with pytest.raises(FormatTooNew) as caught:
            decode(seal(found), PART)
        assert not isinstance(caught.value, ManifestError)
        assert str(version) in str(caught.value)


def test_a_damaged_newer_format_is_corrupt():
    data = bytearray(seal({"version": 2}))
    data[3] ^= 1
    with pytest.raises(ManifestError):
        decode(bytes(data))


MANY_THREADS = """
import os, sys, threading
from tierd.core.manifest import VERSION, Manifest
from tierd.core.manifest_codec import encode
one = Manifest(version=VERSION, run="r", step=1, attempt="0123456789ab-01234567", resumed_from=None, rank=0,
               world_size=1, created="2026-01-01T00:00:00+00:00", writer="t", metrics={}, files=())
sys.setswitchinterval(1e-6)
died = 0
for _ in range(40):
    pid = os.fork()
    if not pid:
        gate = threading.Barrier(8)
        threads = [threading.Thread(target=lambda: (gate.wait(), encode(one))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    died += os.waitpid(pid, 0)[1] != 0
print(died)
"""


def test_first_manifests_of_a_process_may_be_encoded_by_several_threads():
    """A daemon that takes over two ranks' first snapshots at once: some of these died of SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", MANY_THREADS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "0\n"
