"""The format: what version 1 left on a disk is read by today's code, is written the same by it, and is read by nothing
but FORMAT.md. The fixtures in tests/format/v1/ are never edited; see tests/format/make_v1.py."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from array import array
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from support import by_hand as hand
from support.world import read

from tierd.codec import chunk_codec
from tierd.core import manifest as manifest_module
from tierd.core import manifest_codec as seal_module
from tierd.core.errors import FormatTooNew, ManifestError
from tierd.core.ids import CheckpointId, PartId, summary_key
from tierd.core.manifest import Chunk, File, Manifest, Origin, StoredChunk, chunk_sizes
from tierd.core.manifest_codec import EncryptedManifest, decode, encode, seal
from tierd.core.planning.checkpoint_summary import decode_summary, encode_summary, make_summary
from tierd.core.planning.copies import ManifestFacts
from tierd.core.timeline.launch_chain import LaunchRecord, successor_head
from tierd.core.timeline.launch_chain import encode_head as encode_head
from tierd.daemon.tiers.shared_chunks import chunks_of_summary, pack_chunks
from tierd.daemon.transfer.tier_fetch import fetch
from tierd.spool import file_io
from tierd.spool.spool import Spool
from tierd.state.tensor_header import parse_layout
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.file_store import FileStore

HERE = Path(__file__).parent / "format"
V1 = HERE / "v1"
PLANES = HERE / "v1-planes"  # a tier whose one checkpoint shows the codec `planes`; see make_v1_planes.py
PATCHES = HERE / "v3-patches"  # a tier whose one checkpoint is stored as patches; see make_v3_patches.py
DELTAS = HERE / "v5-deltas"  # a tier whose one checkpoint is stored as deltas; see make_v5_deltas.py
V4 = HERE / "v4"  # a tier and a spool of two ranks that hold the same tensors; see make_v4.py
TIER = V1 / "tier"
FORMAT = (Path(__file__).parent.parent / "tierd" / "FORMAT.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", FORMAT, re.DOTALL)
OBJECTS = HERE / "v1-objects"  # the files of a part with plain objects; see make_v1_objects.py
WRAPPERS = HERE / "v1-wrappers"  # the files of a part with wrapper subclasses; see make_v1_wrappers.py
VALUES = HERE / "v1-values"  # the files of a part with packed runs; see make_v1_values.py
ENCRYPTED = HERE / "v1-encrypted"  # the tier of v1, encrypted; see make_v1_encrypted.py
A = CheckpointId("demo", "01941f297c00-0a0b0c0d", 100)
B = CheckpointId("demo", "01941f3ad400-1a1b1c1d", 200)
PARTS = [PartId(A, 0, 1), PartId(B, 0, 1)]


def tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def fixture_manifest(part: PartId) -> Manifest:
    return decode((TIER / part.manifest_key).read_bytes(), part)


def restored(part: PartId) -> dict[str, bytes]:
    """A part's files from the tier, by today's code."""
    run = TIER / part.checkpoint.run
    return {
        file.path: b"".join(
            bytes(chunk_codec.decode(chunk, (run / chunk.stored.key).read_bytes(), "v1")) for chunk in file.chunks
        )
        for file in fixture_manifest(part).files
    }


# -- read by today's code ---------------------------------------------------------------------------------------------


def test_fixture_has_every_feature_of_the_format():
    """Both codecs, several chunks, a borrowed one, an origin, non-finite metrics, a pin: else the rest proves less."""
    names = tree(V1)
    assert {name.rsplit(".", 1)[1] for name in names if "/chunks/" in name} == {"raw", "zst"}
    first, second = map(fixture_manifest, PARTS)
    assert max(len(file.chunks) for file in second.files) == 3
    assert ManifestFacts.of(second).bases == {A}
    assert (first.origin, second.origin) == (None, A)
    assert math.isnan(second.numbers["loss"])
    assert second.numbers["accuracy"] == math.inf
    assert first.numbers == {"loss": 0.5, "accuracy": 1.0}
    assert f"tier/demo/pins/{B.name}" in names


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_tier_of_version_1_is_read_and_verified(part):
    files = restored(part)
    assert set(files) == {"state.json", "tensors.safetensors"}
    assert {file.path: file.size for file in fixture_manifest(part).files} == {
        name: len(data) for name, data in files.items()
    }


def test_a_spool_of_version_1_is_read_and_verified(tmp_path):
    shutil.copytree(V1 / "spool", tmp_path / "spool")
    spool = Spool(tmp_path / "spool")
    assert spool.parts() == PARTS[1:]
    manifest = spool.manifest(PARTS[1])
    assert manifest.same_content(fixture_manifest(PARTS[1]))
    assert read(spool, PARTS[1]) == restored(PARTS[1])


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_state_of_version_1_is_restored(part):
    torch = pytest.importorskip("torch")
    from tierd.state.state_loading import unflatten

    files = restored(part)
    found = unflatten(files["state.json"], bytearray(files["tensors.safetensors"]))
    expected = _maker().state(part.checkpoint.step)
    assert found["model"]["tied"] is found["model"]["weight"]
    assert list(found["model"]) == ["weight", "tied", "phase"]
    moments, expected_moments = found["optimizer"]["state"][0], expected["optimizer"]["state"][0]
    pairs = [(found["model"][name], expected["model"][name]) for name in ("weight", "phase")]
    pairs += [(moments[name], expected_moments[name]) for name in ("exp_avg", "step")]
    for here, there in pairs:
        assert (here.dtype, here.shape) == (there.dtype, there.shape)
        assert torch.equal(here.reshape(-1).view(torch.uint8), there.reshape(-1).view(torch.uint8))  # NaNs too
    assert (found["data"], found["rest"]) == (expected["data"], expected["rest"])


def test_the_tensor_file_opens_with_the_safetensors_library():
    load = pytest.importorskip("safetensors.torch").load
    found = load(restored(PARTS[1])["tensors.safetensors"])
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "model/weight": (1024,),
        "model/phase": (2, 2),
        "optimizer/state/0/exp_avg": (32, 32),
        "optimizer/state/0/step": (),
    }


def test_the_objects_of_the_codec_planes_are_read_and_verified():
    found = decode((PLANES / PARTS[0].manifest_key).read_bytes(), PARTS[0])
    expected = _maker("make_v1_planes").contents()
    assert [chunk.stored.codec for chunk in found.chunks()].count("planes") >= 8
    for file in found.files:
        (chunk,) = file.chunks
        data = (PLANES / "demo" / chunk.stored.key).read_bytes()
        assert chunk_codec.decode(chunk, data, "v1") == expected[file.path], file.path


async def test_patches_are_read_and_verified_and_a_patch_of_patches_too(tmp_path):
    maker = _maker("make_v3_patches")
    part, spool = maker.PARTS[-1], Spool(tmp_path / "spool")
    manifest = decode((PATCHES / part.manifest_key).read_bytes(), part)
    assert sorted(len(list(chunk.objects())) for chunk in manifest.chunks()) == [1, 3, 3, 3]
    store = FileStore(PATCHES)
    await fetch(spool, part, {"tier": store})
    await store.aclose()
    assert {name: bytes(data) for name, data in read(spool, part).items()} == maker.contents(300)


async def test_deltas_are_read_and_verified_and_a_patch_of_a_delta_too(tmp_path):
    maker = _maker("make_v5_deltas")
    part, spool = maker.PARTS[-1], Spool(tmp_path / "spool")
    manifest = decode((DELTAS / part.manifest_key).read_bytes(), part)
    chains = {file.path: [stored.codec[:5] for stored in file.chunks[0].objects()] for file in manifest.files}
    assert {tuple(codecs[:2]) for codecs in chains.values()} == {("delta", "delta"), ("patch", "delta")}
    store = FileStore(DELTAS)
    await fetch(spool, part, {"tier": store})
    await store.aclose()
    assert {name: bytes(data) for name, data in read(spool, part).items()} == maker.contents(300)


async def test_a_tier_and_a_spool_of_version_4_are_read_and_verified(tmp_path):
    maker, store = _maker("make_v4"), FileStore(V4 / "tier")
    for step, rank in itertools.product(maker.STEPS, range(maker.WORLD)):
        part, spool = maker.part(step, rank), Spool(tmp_path / f"{step} {rank}")
        await fetch(spool, part, {"tier": store})
        assert {name: bytes(data) for name, data in read(spool, part).items()} == maker.contents(step, rank)
    await store.aclose()
    shutil.copytree(V4 / "spool", tmp_path / "spool")
    part, spool = maker.part(300, 1), Spool(tmp_path / "spool")
    manifest = spool.manifest(part)
    assert {name: bytes(data) for name, data in read(spool, part).items()} == maker.contents(300, 1)
    assert [chunk.home for chunk in manifest.chunks()].count(0) == 4


def test_fixture_of_version_4_has_every_form_of_a_key():
    """Of the own rank and of a home, of an older checkpoint, in the old form, and of a patch and its base."""
    maker = _maker("make_v4")
    part = maker.part(300, 1)
    manifest = decode((V4 / "tier" / part.manifest_key).read_bytes(), part)
    keys = [(stored.key, chunk.home) for chunk in manifest.chunks() for stored in chunk.objects()]
    assert {(key.split("/")[1][-1], key.split("/")[-3][:12], key.split("/")[-2], home) for key, home in keys} == {
        ("d", "000000000100", "00001", None),
        ("0", "000000000200", "00000", 0),
        ("0", "000000000300", "00000", 0),
        ("1", "000000000300", "00001", None),
    }
    assert sum(chunk.stored.base is not None for chunk in manifest.chunks()) == 1


def test_packed_runs_are_read():
    pytest.importorskip("torch")
    from support.exact import described

    from tierd.state.state_loading import unflatten

    files, expected = tree(VALUES), _maker("make_v1_values").state()
    found = unflatten(files["state.json"], bytearray(files["tensors.safetensors"]))
    assert described(found) == described(expected)
    assert files == _maker("make_v1_values").files()


def test_plain_objects_are_read():
    pytest.importorskip("torch")
    from support.state_files import flatten

    from tierd.state.kinds.random_generators import SavedRandom
    from tierd.state.state_loading import unflatten

    files, expected = tree(OBJECTS), _maker("make_v1_objects").state()
    found = unflatten(files["state.json"], bytearray(files["tensors.safetensors"]))
    buffers = found.pop("buffer"), expected.pop("buffer")
    assert [(one.getvalue(), one.tell()) for one in buffers] == [(b"scales \x00\xff", 3)] * 2
    generators, live = found.pop("random"), expected.pop("random")
    assert found == expected
    assert found["datetime"].fold == 1
    assert all(type(one) is SavedRandom for one in generators.values())
    made = {name: saved.rebuild() for name, saved in generators.items()}
    assert flatten(made).tree == flatten(live).tree
    assert [one.random() for one in made.values()] == [one.random() for one in live.values()]
    assert files == _maker("make_v1_objects").files()


def test_wrapper_subclasses_are_read():
    torch = pytest.importorskip("torch")
    from support.state_files import flatten

    from tierd.state.state_loading import unflatten

    files, expected = tree(WRAPPERS), _maker("make_v1_wrappers").state()
    found = unflatten(files["state.json"], bytearray(files["tensors.safetensors"]))
    weight, (nested,) = found["weight"].rebuild(), (one.rebuild() for one in found["nested"])
    assert flatten({"weight": weight, "nested": [nested]}).tree == files["state.json"]
    assert torch.equal(weight.b, expected["weight"].b)
    assert torch.equal(nested.b.b, expected["nested"][0].b.b)
    assert files == _maker("make_v1_wrappers").files()


def test_packed_runs_are_read_by_nothing_but_the_tables_of_the_format():
    pytest.importorskip("torch")
    from support.by_hand import values
    from support.exact import described

    files, expected = tree(VALUES), _maker("make_v1_values").state()
    found = values(files["state.json"], files["tensors.safetensors"])
    assert list(found) == list(expected)
    found["done"] = type(expected["done"])(found["done"], 2000)
    found["seen"]["by number"] = type(expected["seen"]["by number"])(found["seen"]["by number"])
    assert described(found) == described(expected)


# -- written the same by today's code ---------------------------------------------------------------------------------


def _maker(name="make_v1"):
    needed = {
        "make_v1": "torch",
        "make_v1_values": "torch",
        "make_v1_objects": "torch",
        "make_v1_wrappers": "torch",
        "make_v1_encrypted": "cryptography",
    }
    pytest.importorskip(needed.get(name, "numpy"))
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_same_input_is_still_written_as_the_same_bytes(tmp_path, monkeypatch):
    """A zstd chunk may be packed otherwise by another libzstd: there the raw bytes count, and what its manifest says of
    the packed ones is put aside before manifests are compared. Where files are cut is free, and here as it was then."""
    monkeypatch.setattr(file_io, "content_chunk_sizes", lambda read, size, limit: chunk_sizes(size, limit))
    _maker().build(tmp_path, lambda step: restored(PARTS[step == 200]))
    old, new = tree(V1), tree(tmp_path)
    assert sorted(new) == sorted(old)
    for name in old:
        if name.endswith(".zst"):
            import zstandard

            unpack = zstandard.ZstdDecompressor().decompress
            assert unpack(new[name]) == unpack(old[name])
        elif "/manifests/" in name:
            assert _without_packing(new[name]) == _without_packing(old[name])
        else:
            assert new[name] == old[name], name


def test_same_replicated_bytes_are_still_written_as_the_same_objects(tmp_path):
    _maker("make_v4").build(tmp_path)
    assert tree(tmp_path) == tree(V4)


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_the_same_state_is_still_flattened_to_the_same_tree_and_tensors(part):
    """Only the order of the tensors in their file is free, and was another when the fixtures were written."""
    load = pytest.importorskip("safetensors.torch").load
    old, new = restored(part), _maker().files(part.checkpoint.step)
    assert new["state.json"] == old["state.json"]
    before, now = load(old["tensors.safetensors"]), load(new["tensors.safetensors"])
    assert now.keys() == before.keys()
    for name, tensor in before.items():
        assert (now[name].dtype, now[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes(now[name].untyped_storage()) == bytes(tensor.untyped_storage())


def _without_packing(data: bytes) -> bytes:
    found = decode(data)
    assert encode(found) == data

    def blank(chunk: Chunk) -> Chunk:
        if chunk.stored.codec != "zst":
            return chunk
        stored = msgspec.structs.replace(chunk.stored, size=0, xxh3_128="0" * 32)
        return msgspec.structs.replace(chunk, stored=stored)

    files = tuple(
        msgspec.structs.replace(file, chunks=tuple(blank(chunk) for chunk in file.chunks)) for file in found.files
    )
    return encode(msgspec.structs.replace(found, files=files))


# -- read by nothing but FORMAT.md ------------------------------------------------------------------------------------


@pytest.fixture
def by_hand(tmp_path):
    """Runs FORMAT.md's own program, isolated from this checkout; returns its exit status, output and what it wrote."""
    program, *_ = PROGRAMS
    assert "tierd" not in program
    assert set(re.findall(r"^(?:import|from) (\w+)", program, re.M)) == {
        "json",
        "struct",
        "sys",
        "tempfile",
        "pathlib",
        "numpy",
        "xxhash",
        "zstandard",
    }
    (tmp_path / "restore.py").write_text(program)

    def run(tier: Path, name: str = "demo"):
        target = tmp_path / "target"
        shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, "-I", tmp_path / "restore.py", tier, name, target]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr, tree(target) if target.exists() else {}

    return run


def test_the_documented_program_restores_the_newest_checkpoint(by_hand):
    status, output, wrote = by_hand(TIER)
    assert (status, output) == (0, f"restored {B.name}\n")
    assert wrote == {f"00000-of-00001/{name}": data for name, data in restored(PARTS[1]).items()}


def test_documented_program_gathers_tensors_from_other_ranks_files(tmp_path):
    from support.divided import divided, divided_state, write_divided
    from support.state_files import files_of

    states = [divided_state(rank) for rank in range(4)]
    spool = Spool(tmp_path / "spool")
    parts = write_divided(spool, 1, divided(states, nodes=[(0, 2, 3), (1,)]))
    (tmp_path / "gather.py").write_text(PROGRAMS[2])
    for rank, state in enumerate(states):
        command = [sys.executable, "-I", "gather.py", spool.path(parts[0]).parent, str(rank), f"rank{rank}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
        files = files_of(state)
        gathered = (tmp_path / f"rank{rank}").read_bytes()
        assert hand.tensors(gathered) == hand.tensors(files["tensors.safetensors"])
        parse_layout(gathered)  # aligned, and without holes
        stored = {number: (spool.path(part) / "tensors.safetensors").read_bytes() for number, part in enumerate(parts)}
        assert hand.tensors_named(stored, rank) == hand.tensors(gathered)
        others = {number: file for number, file in stored.items() if number != rank}
        assert hand.values(b'{"$values":["list","int",2000]}', stored[rank], others) == state["list"]


@pytest.mark.parametrize(
    ("by_rank", "why"),
    [
        ({"3": ["model/large"]}, "lie in the part of rank 3"),
        ({"4": ["model/large"]}, "lie in the part of rank 4"),
        ({"0": ["model/large", "own"]}, "own is not in"),
        ({"1": ["model/large"]}, "model/large is not in"),
    ],
)
def test_documented_program_gathers_no_tensor_that_is_not_there(tmp_path, by_rank, why):
    from support.divided import divided, divided_state, with_elsewhere, write_divided

    divided_parts = divided([divided_state(rank) for rank in range(4)])
    spool = Spool(tmp_path / "spool")
    parts = write_divided(spool, 1, [*divided_parts[:3], with_elsewhere(divided_parts[3], by_rank)])
    (tmp_path / "gather.py").write_text(PROGRAMS[2])
    command = [sys.executable, "-I", "gather.py", spool.path(parts[0]).parent, "3", "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and why in done.stderr and not (tmp_path / "out").exists()
    stored = {number: (spool.path(part) / "tensors.safetensors").read_bytes() for number, part in enumerate(parts)}
    with pytest.raises(hand.Damaged):
        hand.tensors_named(stored, 3)


def test_the_documented_program_reads_the_codec_planes(by_hand):
    status, output, wrote = by_hand(PLANES)
    assert (status, output) == (0, f"restored {A.name}\n")
    assert wrote == {f"00000-of-00001/{name}": data for name, data in _maker("make_v1_planes").contents().items()}


@pytest.mark.parametrize(("root", "name"), [(PATCHES, "make_v3_patches"), (DELTAS, "make_v5_deltas")])
def test_the_documented_program_reads_patches_and_deltas(by_hand, root, name):
    maker = _maker(name)
    status, output, wrote = by_hand(root)
    assert (status, output) == (0, f"restored {maker.PARTS[-1].checkpoint.name}\n")
    assert wrote == {f"00000-of-00001/{name}": data for name, data in maker.contents(300).items()}


def test_documented_program_reads_chunks_of_several_ranks(by_hand):
    maker = _maker("make_v4")
    status, output, wrote = by_hand(V4 / "tier")
    assert (status, output) == (0, f"restored {maker.part(300, 0).checkpoint.name}\n")
    assert wrote == {
        f"{rank:05}-of-00002/{name}": data for rank in range(2) for name, data in maker.contents(300, rank).items()
    }


def test_documented_program_decrypts_chunks_of_several_ranks(tmp_path):
    (tmp_path / "tier").mkdir()
    plain, secret = tree(V4 / "tier"), bytes(range(32))

    async def encrypt() -> None:
        store = EncryptedStore(FileStore(tmp_path / "tier"), EncryptionKey(secret))
        for key, data in plain.items():
            await store.put(key, data)
        assert {info.key async for info in store.scan("demo/chunks/")} == {key for key in plain if "/chunks/" in key}
        await store.aclose()

    asyncio.run(encrypt())
    assert not {name for name in tree(tmp_path / "tier") if "/chunks/" in name} & plain.keys()
    status, output, decrypted_tier = decrypted(tmp_path / "tier", tmp_path, secret.hex())
    assert (status, output) == (0, "") and tree(decrypted_tier) == plain


@pytest.mark.parametrize(
    ("root", "name"),
    [(PLANES, name) for name in sorted(tree(PLANES)) if name.endswith(".planes")]
    + [(root, name) for root in (PATCHES, DELTAS) for name in sorted(tree(root)) if "/chunks/" in name],
)
def test_the_documented_program_notices_a_flip_in_planes_a_patch_or_its_base(by_hand, tmp_path, root, name):
    tier = tmp_path / "tier"
    shutil.copytree(root, tier)
    data = bytearray((tier / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tier / name).write_bytes(data)
    status, output, _ = by_hand(tier)
    assert status == 1
    assert "not restored: " in output


SUMMARY = (
    b'{"version":1,"run":"demo","step":7,"attempt":"001800000001-00000001","world_size":2,'
    b'"listing":"0123456789abcdef0123456789abcdef","rank_0":{"created":"2026-01-01T00:00:00+00:00",'
    b'"metrics":{"loss":0.5,"grad":"nan"},"resumed_from":{"step":3,"attempt":"001700000001-00000001"},"size":10,'
    b'"stored_size":9,"bases":["000000000003.001700000001-00000001"],"watched":false,"homed_sizes":{"5":4},'
    b'"replicas":"AQI="},"shared":{"000000000003.001700000001-00000001":"AAAAAAAAAAEAAAAAAAAAAg=="},'
    b'"digest":"0d44d243a54ad6c90015bc4bdbed8476"}\n'
)


def test_summary_of_a_checkpoint_is_written_as_the_same_bytes():
    own, base = CheckpointId("demo", "001800000001-00000001", 7), CheckpointId("demo", "001700000001-00000001", 3)
    created, metrics = datetime(2026, 1, 1, tzinfo=UTC), {"loss": 0.5, "grad": math.nan}
    facts = ManifestFacts(created, metrics, base, 10, 9, frozenset({base}), False, {5: 4}, b"\1\2")
    summary = make_summary(own, 2, "0123456789abcdef" * 2, facts, {base.name: pack_chunks([2, 1])})
    assert encode_summary(summary) == SUMMARY
    again = decode_summary(SUMMARY, own)
    assert again == summary and chunks_of_summary(again).chunks == {base: array("Q", [1, 2])}
    with pytest.raises(ManifestError, match="another checkpoint"):
        decode_summary(SUMMARY, base)
    with pytest.raises(FormatTooNew):
        decode_summary(seal(msgspec.structs.replace(summary, version=2)), own)


def test_documented_program_ignores_the_summary_of_a_checkpoint(by_hand, tmp_path):
    tier = tmp_path / "tier"
    shutil.copytree(TIER, tier)
    summary = tier / summary_key(PARTS[1].checkpoint)
    summary.parent.mkdir()
    summary.write_bytes(SUMMARY)
    assert by_hand(tier)[:2] == (0, f"restored {B.name}\n")


def test_the_documented_program_passes_over_an_incomplete_checkpoint(by_hand, tmp_path):
    tier = tmp_path / "tier"
    shutil.copytree(TIER, tier)
    manifest = tier / PARTS[1].manifest_key
    manifest.rename(manifest.with_name("00000-of-00002.json"))
    status, output, wrote = by_hand(tier)
    assert (status, output) == (0, f"restored {A.name}\n")
    assert wrote == {f"00000-of-00001/{name}": data for name, data in restored(PARTS[0]).items()}


@pytest.mark.parametrize("name", sorted(name for name in tree(TIER) if name.endswith((".raw", ".zst", ".json"))))
def test_the_documented_program_notices_a_flip_in_anything_that_it_reads(by_hand, tmp_path, name):
    tier = tmp_path / "tier"
    shutil.copytree(TIER, tier)
    data = bytearray((tier / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tier / name).write_bytes(data)
    status, output, wrote = by_hand(tier)
    read = {PARTS[1].manifest_key, *(f"demo/{chunk.stored.key}" for chunk in fixture_manifest(PARTS[1]).chunks())}
    both = {PARTS[0].manifest_key, *(f"demo/{chunk.stored.key}" for chunk in fixture_manifest(PARTS[0]).chunks())}
    if name in read & both:  # nothing is right any more
        assert (status, wrote) == (1, {}) and "not restored: " in output
        return
    part = PARTS[0] if name in read else PARTS[1]
    assert (status, output.splitlines()[-1]) == (0, f"restored {part.checkpoint.name}")
    assert ("passed over: " in output) == (name in read | {PARTS[0].manifest_key})
    assert wrote == {f"00000-of-00001/{path}": content for path, content in restored(part).items()}


def test_the_documented_program_refuses_another_version_and_an_unknown_run(by_hand, tmp_path):
    tier = tmp_path / "tier"
    shutil.copytree(TIER, tier)
    path = tier / PARTS[1].manifest_key
    path.write_bytes(seal(msgspec.structs.replace(fixture_manifest(PARTS[1]), version=2)))
    assert by_hand(tier)[:1] == (1,)
    assert "has version 2" in by_hand(tier)[1]
    (tier / "empty" / "manifests").mkdir(parents=True)
    assert "empty has no complete checkpoint" in by_hand(tier, "empty")[1]


def test_documented_program_follows_the_timeline_of_a_head(by_hand, tmp_path):
    """A third launch resumed from the first one's checkpoint, not from the second's, and of it nothing is whole."""
    tier, (first, second) = tmp_path / "tier", PARTS
    shutil.copytree(TIER, tier)
    later = f"{second.checkpoint.attempt[:11]}f-{'0' * 8}"
    came = {first.checkpoint.attempt: LaunchRecord(resumed_from=None, newest=first.checkpoint.step)}
    origin = Origin(step=first.checkpoint.step, attempt=first.checkpoint.attempt)
    assert later > second.checkpoint.attempt > first.checkpoint.attempt
    head = successor_head((), "demo", "0123abcd", came | {later: LaunchRecord(resumed_from=origin, newest=3)}, "")
    path = tier / "demo/timeline/0123abcd.json"
    path.parent.mkdir()
    path.write_bytes(encode_head(head))
    assert by_hand(tier)[:2] == (0, f"restored {first.checkpoint.name}\n")
    path.write_bytes(encode_head(head)[1:])
    status, output, _ = by_hand(tier)
    assert (status, output.splitlines()[-1]) == (0, f"restored {second.checkpoint.name}")
    assert "passed over: " in output and "0123abcd.json is damaged" in output


@pytest.mark.parametrize("attempt", ["fffffffffff0-00000000", "01ffffffffff-00000000"])
def test_the_documented_program_is_not_misled_by_a_planted_name(by_hand, tmp_path, attempt):
    tier = tmp_path / "tier"
    shutil.copytree(TIER, tier)
    planted = tier / f"demo/manifests/{99:012}.{attempt}/00000-of-00001.json"
    planted.parent.mkdir()
    planted.touch()
    status, output, _ = by_hand(tier)
    assert (status, output.splitlines()[-1]) == (0, f"restored {B.name}")


def decrypted(tier: Path, work: Path, secret: str) -> tuple[int, str, Path]:
    """Runs FORMAT.md's second program, isolated from this checkout."""
    _, program, _ = PROGRAMS
    assert set(re.findall(r"^(?:import|from) (\w+)", program, re.M)) == {
        *("base64", "cryptography", "hmac", "json", "pathlib", "sys"),
    }
    (work / "decrypt.py").write_text(program)
    (work / "key").write_text(secret + "\n")
    shutil.rmtree(work / "plain", ignore_errors=True)
    command = [sys.executable, "-I", work / "decrypt.py", work / "key", tier, work / "plain"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=work)
    return done.returncode, done.stdout + done.stderr, work / "plain"


def test_the_documented_program_decrypts_a_tier_for_the_other(by_hand, tmp_path):
    status, output, plain = decrypted(ENCRYPTED, tmp_path, _maker("make_v1_encrypted").SECRET.hex())
    assert (status, output) == (0, "")
    assert tree(plain) == {name: data for name, data in tree(TIER).items() if "/pins/" not in name}
    assert by_hand(plain)[:2] == (0, f"restored {B.name}\n")
    assert by_hand(ENCRYPTED)[0] == 1
    assert "has version 2" in by_hand(ENCRYPTED)[1]


async def test_documented_program_decrypts_heads_and_quarantined_manifests(tmp_path):
    objects = {"demo/timeline/0123abcd.json": b"a head", f"demo/quarantine/{B.name}/00000-of-00001.json": b"a manifest"}
    secret = _maker("make_v1_encrypted").SECRET
    (tmp_path / "tier").mkdir()
    store = EncryptedStore(FileStore(tmp_path / "tier"), EncryptionKey(secret))
    for key, data in objects.items():
        await store.put(key, data)
    await store.aclose()
    status, _, plain = decrypted(tmp_path / "tier", tmp_path, secret.hex())
    assert status == 0 and tree(plain) == objects


def test_documented_program_decrypts_a_tier_written_today(tmp_path):
    maker = _maker("make_v1_encrypted")
    (tmp_path / "tier").mkdir()
    asyncio.run(maker.build(tmp_path / "tier"))
    assert sorted(tree(tmp_path / "tier")) == sorted(tree(ENCRYPTED))  # names are no matter of chance
    status, _, plain = decrypted(tmp_path / "tier", tmp_path, maker.SECRET.hex())
    assert status == 0
    assert tree(plain) == {name: data for name, data in tree(TIER).items() if "/pins/" not in name}


def test_the_documented_program_refuses_another_key_a_flip_and_a_swap(tmp_path):
    secret = _maker("make_v1_encrypted").SECRET.hex()
    assert "of another key" in decrypted(ENCRYPTED, tmp_path, "00" * 32)[1]
    for name in (name for name in tree(ENCRYPTED) if "/chunks/" in name):
        tier = tmp_path / "tier"
        shutil.rmtree(tier, ignore_errors=True)
        shutil.copytree(ENCRYPTED, tier)
        data = bytearray((tier / name).read_bytes())
        data[len(data) // 2] ^= 1
        (tier / name).write_bytes(data)
        assert decrypted(tier, tmp_path, secret)[:1] == (1,)
    for pair in ("*/manifests/*/*", "*/chunks/*/*/*.raw"):
        shutil.rmtree(tier)
        shutil.copytree(ENCRYPTED, tier)
        one, two, *_ = sorted(tier.glob(pair))
        shutil.copyfile(one, two)
        assert f"not decrypted: {two.parent.relative_to(tier)}" in decrypted(tier, tmp_path, secret)[1]


def test_an_encrypted_tier_is_read_by_todays_code():
    from tierd.stores.encrypted_store import EncryptedStore
    from tierd.stores.encryption_keys import EncryptionKey
    from tierd.stores.file_store import FileStore

    async def work():
        store = EncryptedStore(FileStore(ENCRYPTED), EncryptionKey(_maker("make_v1_encrypted").SECRET))
        return {info.key: (info.size, bytes(await store.get(info.key))) async for info in store.scan("")}

    assert asyncio.run(work()) == {name: (len(data), data) for name, data in tree(TIER).items()}


# -- FORMAT.md says what the code does --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Manifest, File, Chunk, StoredChunk, Origin], ids=lambda kind: kind.__name__)
def test_every_member_is_in_the_tables(kind):
    for field in msgspec.structs.fields(kind):
        assert f"`{field.encode_name}`" in FORMAT


def test_no_member_in_the_tables_is_made_up():
    tables = FORMAT.split("## The manifest")[1].split("### The seal")[0]
    named = re.findall(r"^\| `(\w+)` \|", tables, re.M)
    known = {
        field.encode_name for kind in (Manifest, File, Chunk, StoredChunk) for field in msgspec.structs.fields(kind)
    }
    assert set(named) == known | {"digest"}
    assert set(json.loads((TIER / PARTS[1].manifest_key).read_bytes())) <= set(named)
    table = FORMAT.split("## An encrypted tier")[1].split("## Which one")[0]
    wrapped = {field.encode_name for field in msgspec.structs.fields(EncryptedManifest)}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == wrapped | {"digest"}


@pytest.mark.parametrize(
    "bound",
    [
        "MAX_FILES",
        "MAX_METRICS",
        "MAX_CHUNK_SIZE",
        "CHUNK_SIZE",
        "MAX_STEP",
        "MAX_WORLD",
    ],
)
def test_every_bound_is_written_down(bound):
    assert f"{getattr(manifest_module, bound):,}" in FORMAT


@pytest.mark.parametrize("bound", ["MAX_MANIFEST_SIZE", "_SEAL_SIZE"])
def test_every_bound_of_the_seal_is_written_down(bound):
    assert f"{getattr(seal_module, bound):,}" in FORMAT


def test_every_tag_of_the_state_tree_is_in_the_table_and_no_other():
    tree, tags = (pytest.importorskip(f"tierd.state.{name}") for name in ("state_tree", "value_kinds"))
    table = FORMAT.split("an object with one key, a tag:")[1].split("A *mapping*")[0]
    named = set(re.findall(r"`(\$\w+)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.M))))
    assert named == set(tags.VALUE_TAGS) | set(tree.NAMING) | {"$dtensor", "$wrapper"}
    assert named == set(re.findall(r"\$[a-z]+", tree.__doc__)) - {"$"}
