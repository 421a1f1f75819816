"""Each format: every cut and every flipped bit in what its module calls covered is found, and nothing sound is refused.

The judge of a flipped bit that is found sound is another reader: Python's zipfile, safetensors, h5py. It has to see the
same content as before.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_safetensors
from support.bundles import table, write_bundle

from tierd.formats import weight_files
from tierd.formats.byte_source import ByteSource, DamagedFile, SoundFile, UncheckedFile, UnfinishedFile
from tierd.formats.file_checks import check_file, check_json
from tierd.formats.tensorflow_files import (
    BundleEntry,
    check_bundle_shard,
    fast_crc32c,
    read_bundle_index,
    read_table,
    slow_crc32c,
)
from tierd.formats.torch_pickles import check_pickle
from tierd.formats.weight_files import check_safetensors
from tierd.formats.zip_archives import check_zip

ERRORS = (DamagedFile, UnfinishedFile, UncheckedFile)
STATE = {"weight": torch.arange(40.0), "bias": torch.ones(3, dtype=torch.bfloat16), "step": 7}


@dataclass(frozen=True, slots=True)
class MemorySource:
    data: bytes | memoryview

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.data[offset : offset + length])


def verdict(name: str, data: bytes) -> SoundFile | Exception:
    try:
        return check_file(name, MemorySource(data))
    except ERRORS as error:
        return error


def is_sound(name: str, data: bytes) -> bool:
    return isinstance(verdict(name, data), SoundFile)


def saved(**options: bool) -> bytes:
    file = io.BytesIO()
    torch.save(STATE, file, **options)
    return file.getvalue()


def without_crc() -> bytes:
    torch.serialization.set_crc32_options(False)
    try:
        return saved()
    finally:
        torch.serialization.set_crc32_options(True)


def zipped(method: int, comment: bytes = b"", stream: bool = False) -> bytes:
    class Unseekable(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def seek(self, *_: object) -> int:
            raise io.UnsupportedOperation

    file = Unseekable() if stream else io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("empty", b"")
        archive.writestr("model.weights.h5", bytes(range(256)) * 20)
        archive.writestr("größe", b"x" * 100)
        with archive.open("wide", "w", force_zip64=True) as record:
            record.write(b"y" * 300)
        archive.comment = comment
    return file.getvalue()


ARCHIVES: dict[str, Callable[[], bytes]] = {
    "torch": saved,
    "stored": lambda: zipped(zipfile.ZIP_STORED),
    "deflated": lambda: zipped(zipfile.ZIP_DEFLATED),
    "commented": lambda: zipped(zipfile.ZIP_STORED, b"a comment" * 5),
    "streamed": lambda: zipped(zipfile.ZIP_DEFLATED, stream=True),
}


def content(data: bytes) -> list[tuple[str, bytes]]:
    """What Python's zipfile makes of an archive, checksums included."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(one.filename, archive.read(one)) for one in archive.infolist()]


def flips(data: bytes, seed: int, at: range | None = None) -> list[tuple[int, bytes]]:
    """One bit of each byte, by a seed."""
    chance = random.Random(seed)
    found = []
    for place in at or range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << chance.randrange(8)
        found.append((place, bytes(changed)))
    return found


# -- zip --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ARCHIVES)
def test_an_archive_is_sound(kind: str) -> None:
    assert verdict("model.pt", ARCHIVES[kind]()) == SoundFile("zip")


@pytest.mark.parametrize("kind", ARCHIVES)
def test_every_cut_of_an_archive_is_detected(kind: str) -> None:
    data = ARCHIVES[kind]()
    assert [cut for cut in range(len(data)) if is_sound("model.pt", data[:cut])] == []
    assert isinstance(verdict("model.pt", data[: len(data) // 2]), DamagedFile)


@pytest.mark.parametrize("kind", ARCHIVES)
def test_undetected_bit_flip_of_an_archive_changes_no_content(kind: str) -> None:
    data = ARCHIVES[kind]()
    expected = content(data)
    passed = [
        place for place, changed in flips(data, 1) if is_sound("model.pt", changed) and content(changed) != expected
    ]
    assert passed == []


def test_every_flipped_bit_of_content_is_detected() -> None:
    data = saved()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for one in archive.infolist():
            name, extra = struct.unpack_from("<2H", data, one.header_offset + 26)
            begin = one.header_offset + 30 + name + extra
            for place, changed in flips(data, 2, range(begin, begin + one.file_size)):
                error = verdict("model.pt", changed)
                assert isinstance(error, DamagedFile), place
                assert error.offset == begin and one.filename in error.reason


@pytest.mark.parametrize(("behind", "is_right"), [(b"", True), (b"left over", False)])
def test_bytes_behind_the_end_of_a_deflated_record_are_damage(behind: bytes, is_right: bool) -> None:
    """The record's size and CRC-32 are right, and its writer wrote no more."""
    packer, content = zlib.compressobj(wbits=-zlib.MAX_WBITS), b"x" * 100
    packed = packer.compress(content) + packer.flush() + behind
    about = struct.pack("<HHHHH3I", 20, 0, 8, 0, 33, zlib.crc32(content), len(packed), len(content))
    record = b"PK\3\4" + about + struct.pack("<HH", 1, 0) + b"a" + packed
    entry = b"PK\1\2" + struct.pack("<H", 20) + about + struct.pack("<5H2I", 1, 0, 0, 0, 0, 0, 0) + b"a"
    end = b"PK\5\6" + struct.pack("<4H2IH", 0, 0, 1, 1, len(entry), len(record), 0)
    assert is_sound("model.pt", record + entry + end) == is_right


def test_records_without_a_crc_are_reported_and_not_refused() -> None:
    found = verdict("model.pt", without_crc())
    assert isinstance(found, SoundFile) and "have no CRC" in (found.uncovered or "")


def test_an_archive_beyond_4_gib(tmp_path: Path) -> None:
    """torch writes a hole in place of 5 GiB; sizes and offsets have 8 bytes from there on."""
    path = tmp_path / "big.pt"
    with torch.serialization.skip_data():
        torch.save({"big": torch.empty(5 << 30, dtype=torch.uint8), "small": torch.ones(3)}, path)

    class Sparse:
        size = path.stat().st_size

        def read(self, offset: int, length: int) -> bytes:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(length)

    class Changed(Sparse):
        def __init__(self, place: int) -> None:
            self.place = place

        def read(self, offset: int, length: int) -> bytes:
            data = bytearray(super().read(offset, length))
            if offset <= self.place < offset + length:
                data[self.place - offset] ^= 4
            return bytes(data)

    assert check_zip(Sparse()).kind == "zip"
    with zipfile.ZipFile(path) as archive:
        last = archive.infolist()[-1].header_offset
        for place in (last, last + 30, archive.start_dir + 20, Sparse.size - 10, Sparse.size - 70):
            with pytest.raises(DamagedFile):
                check_zip(Changed(place))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_not_judged(method: int) -> None:
    assert isinstance(verdict("model.npz", zipped(method)), UncheckedFile)


def test_a_zip_bomb_is_not_expanded() -> None:
    data = bytearray(zipped(zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        at = archive.start_dir
    for place in (at + 24,):  # the size of the first record, in the directory
        data[place : place + 4] = (1 << 30).to_bytes(4, "little")
    assert isinstance(verdict("bomb.npz", bytes(data)), UncheckedFile | DamagedFile)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("zeros", bytes(64 << 20))
    assert isinstance(verdict("bomb.npz", file.getvalue()), UncheckedFile | SoundFile)


def test_overlapping_records_are_damage() -> None:
    """The second record's description is given the first one's header, as a zip bomb's is."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("same", b"x" * 50)
    one = file.getvalue()
    with zipfile.ZipFile(io.BytesIO(one)) as archive:
        start = archive.start_dir
    directory = one[start:-22]
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 2, 2, 2 * len(directory), start, 0)
    found = verdict("twice.npz", one[:start] + 2 * directory + end)
    assert isinstance(found, DamagedFile) and "overlap" in found.reason


# -- safetensors ------------------------------------------------------------------------------------------------------


def tensors() -> bytes:
    some = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0), "c": torch.ones(5, dtype=torch.int8)}
    return save_safetensors(some, metadata={"format": "pt"})


def header_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def test_safetensors_are_sound_and_every_cut_is_detected() -> None:
    data = tensors()
    assert is_sound("model.safetensors", data)
    assert [
        cut for cut in range(len(data)) if not isinstance(verdict("model.safetensors", data[:cut]), DamagedFile)
    ] == []
    assert isinstance(verdict("model.safetensors", data + b"\0"), DamagedFile)


def test_a_flipped_bit_of_a_header_that_is_sound_is_taken_by_safetensors_too(tmp_path: Path) -> None:
    data = tensors()
    wrong = []
    for place, changed in flips(data, 3, range(header_end(data))):
        path = tmp_path / "model.safetensors"
        path.write_bytes(changed)
        try:
            with safe_open(path, "pt") as file:
                shapes = sorted(tuple(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
            taken = shapes == [(0,), (2, 3), (5,)]
        except SafetensorError:
            taken = False
        if is_sound("model.safetensors", changed) and not taken:
            wrong.append(place)
    assert wrong == []


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (b'{"a":%(one)s,"a":%(one)s}', "a"),
        (b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', "dtype"),
        (b'{"__metadata__":{"step":"1","step":"2"},"a":%(one)s}', "step"),
    ],
)
def test_a_header_that_has_a_name_twice_is_damaged(header: bytes, name: str) -> None:
    """Readers differ in which of the two they take."""
    written = header.replace(b"%(one)s", b'{"dtype":"U8","shape":[4],"data_offsets":[0,4]}')
    found = verdict("model.safetensors", len(written).to_bytes(8, "little") + written + bytes(4))
    assert isinstance(found, DamagedFile) and f"'{name}' twice" in found.reason


def test_flipped_bit_of_a_tensor_cannot_be_detected() -> None:
    data = tensors()
    found = [verdict("model.safetensors", changed) for _, changed in flips(data, 4, range(header_end(data), len(data)))]
    assert all(isinstance(one, SoundFile) and one.uncovered for one in found)


def described(**shape: object) -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | shape}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "ends there"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "a header of"),
        ((100_000_001).to_bytes(8, "little") + bytes(100), "a header of"),
        (described(data_offsets=[4, 8]), "hole"),
        (described(data_offsets=[0, 1]), "1 bytes for F32"),
        (described(shape=[1 << 62, 1 << 62]), "4 bytes for F32"),
        (described(shape=[-1, -1]), "4 bytes for F32"),
        (described(data_offsets=[0, -4]), "hole|overlaps"),
        (described(data_offsets=[0, 1 << 80]), "no JSON|hole|bytes for"),
        (described(dtype=3), "no JSON of tensors"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "no JSON of tensors"),
        ((100_001).to_bytes(8, "little") + b"{" + b'"a":[' * 20_000, "no JSON of tensors"),
    ],
)
def test_hostile_safetensors(data: bytes, reason: str) -> None:
    with pytest.raises(DamagedFile, match=reason):
        check_safetensors(MemorySource(data.ljust(0)))


# -- HDF5 -------------------------------------------------------------------------------------------------------------

WRITER = """
import os, sys, h5py, numpy
file = h5py.File(sys.argv[1], "w", libver=sys.argv[2], userblock_size=int(sys.argv[3]))
file.create_dataset("layers/dense/0", data=numpy.arange(500.0))
if sys.argv[4] == "flushed":
    file.flush()
file.create_dataset("layers/dense/1", data=numpy.arange(50000.0))
if sys.argv[4] == "closed":
    file.close()
os._exit(0)
"""


def h5(path: Path, version: str = "earliest", block: int = 0, end: str = "closed") -> bytes:
    pytest.importorskip("h5py")
    subprocess.run([sys.executable, "-c", WRITER, str(path), version, str(block), end], check=True, timeout=250)
    return path.read_bytes()


@pytest.mark.loaders
@pytest.mark.parametrize("version", ["earliest", "latest"])
@pytest.mark.parametrize("block", [0, 1024])
def test_hdf5_is_sound_and_every_cut_is_detected(tmp_path: Path, version: str, block: int) -> None:
    data = h5(tmp_path / "a.h5", version, block)
    assert is_sound("a.h5", data)
    cuts = [*range(0, 2000, 7), *range(2000, len(data), 997), len(data) - 1]
    assert [cut for cut in cuts if is_sound("a.h5", data[:cut])] == []
    assert isinstance(verdict("a.h5", data[:-1]), DamagedFile)
    assert isinstance(verdict("a.h5", data + b"\0"), UnfinishedFile)


@pytest.mark.loaders
@pytest.mark.parametrize("version", ["earliest", "latest"])
@pytest.mark.parametrize("end", ["flushed", "killed"])
def test_hdf5_that_its_writer_did_not_close(tmp_path: Path, version: str, end: str) -> None:
    with pytest.raises(UnfinishedFile, match="has not closed it"):
        check_file("a.h5", MemorySource(h5(tmp_path / "a.h5", version, 0, end)))


@pytest.mark.loaders
@pytest.mark.parametrize("version", ["earliest", "latest"])
def test_a_flipped_bit_of_a_superblock_that_is_sound_is_taken_by_h5py_too(tmp_path: Path, version: str) -> None:
    import h5py

    data = h5(tmp_path / "a.h5", version)
    wrong = []
    for place, changed in flips(data, 5, range(96 if version == "earliest" else 48)):
        if is_sound("a.h5", changed):
            (tmp_path / "b.h5").write_bytes(changed)
            try:
                with h5py.File(tmp_path / "b.h5", "r") as file:
                    same = file["layers/dense/1"][49999] == 49999.0
            except (OSError, KeyError, RuntimeError):
                same = False
            wrong += [] if same else [place]
    # The ranks of the root's B-trees, which nothing else in the file repeats.
    assert [place for place in wrong if place not in range(16, 20)] == []


def superblock(version: int, end: int = 400, flags: int = 0, root: int = 96) -> bytes:
    """A file of 400 bytes after the specification: a superblock, and a root group's object header at 96."""
    nowhere, zero = b"\xff" * 8, bytes(8)
    addresses = [one.to_bytes(8, "little") for one in (end, root)]
    if version == 0:
        head = weight_files.HDF5_MAGIC + bytes((0, 0, 0, 0, 0, 8, 8, 0, 4, 0, 16, 0)) + flags.to_bytes(4, "little")
        head += zero + nowhere + addresses[0] + nowhere + zero + addresses[1] + bytes(24)
    else:
        head = weight_files.HDF5_MAGIC + bytes((version, 8, 8, flags)) + zero + nowhere + addresses[0] + addresses[1]
        head += weight_files.lookup3(head).to_bytes(4, "little")
    return (head.ljust(96, b"\0") + (b"\x01\0\x01\0\x01\0\0\0\x18" if version == 0 else b"OHDR")).ljust(400, b"\0")


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_superblock_by_hand(version: int) -> None:
    assert is_sound("a.h5", superblock(version))
    assert isinstance(verdict("a.h5", superblock(version)[:-1]), DamagedFile)  # cut off by a byte
    assert isinstance(verdict("a.h5", superblock(version, root=104)), DamagedFile)
    assert isinstance(verdict("a.h5", superblock(version, end=399)), UnfinishedFile)
    assert isinstance(verdict("a.h5", superblock(version, flags=1)), UnfinishedFile)  # open for writing
    if version:
        assert all(
            isinstance(verdict("a.h5", one), DamagedFile) for _, one in flips(superblock(version), 8, range(9, 48))
        )


def test_the_checksum_of_hdf5() -> None:
    """The two values that the hash's author gives for it."""
    assert weight_files.lookup3(b"") == 0xDEADBEEF
    assert weight_files.lookup3(b"Four score and seven years ago") == 0x17770551


# -- pickles and JSON -------------------------------------------------------------------------------------------------


def test_pickles_are_not_executed_and_every_cut_is_detected() -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return exec, ("raise SystemExit",)

    for protocol in range(2, 6):
        data = pickle.dumps({"evil": Evil(), "many": list(range(300)), "text": "é" * 300}, protocol)
        assert is_sound("metadata.pkl", data)
        assert [cut for cut in range(len(data)) if is_sound("metadata.pkl", data[:cut])] == []


@pytest.mark.parametrize("protocol", range(2, 6))
def test_files_of_torch_save_before_1_6_are_sound_and_every_cut_is_detected(protocol: int) -> None:
    state = {
        "model": {"weight": STATE["weight"], "view": STATE["weight"][3:]},
        "bias": STATE["bias"],
        "text": "é" * 300,
    }
    file = io.BytesIO()
    torch.save(state, file, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    data = file.getvalue()
    for name in ("old.pt", "old.tar", "old"):
        found = verdict(name, data)
        assert isinstance(found, SoundFile) and "before torch 1.6" in (found.note or "") and found.uncovered
    assert [cut for cut in range(len(data)) if is_sound("old.pt", data[:cut])] == []
    loaded = torch.load(io.BytesIO(data), weights_only=protocol < 4)
    assert torch.equal(loaded["model"]["view"], state["model"]["view"])


def test_number_of_elements_that_contradicts_the_pickle_is_damage() -> None:
    data = bytearray(saved(_use_new_zipfile_serialization=False))
    place = data.index((40).to_bytes(8, "little"))
    data[place] = 39
    assert isinstance(found := verdict("old.pt", bytes(data)), DamagedFile) and "39 elements" in str(found)


def torch_tar() -> bytes:
    """The tar archive of `torch.save` before 0.2."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:", format=tarfile.PAX_FORMAT) as archive:
        for name, size in (("sys_info", 40), ("pickle", 700), ("tensors", 512), ("storages", 5000)):
            info = tarfile.TarInfo(name)
            info.size = size
            archive.addfile(info, io.BytesIO(bytes(range(250)) * 20))
    return file.getvalue()


def test_tar_archives_of_torch_save_before_0_2_are_sound_and_every_cut_is_detected() -> None:
    data = torch_tar()
    for name in ("old.pt", "old.pth.tar", "old"):
        found = verdict(name, data)
        assert isinstance(found, SoundFile) and "before torch 0.2" in (found.note or "")
    end = data.rindex(bytes(range(250))) + 500
    assert [cut for cut in range(100, end, 50) if is_sound("old.pt", data[:cut])] == []
    changed = bytearray(data)
    changed[10] ^= 1
    assert isinstance(verdict("old.pt", bytes(changed)), DamagedFile)
    assert isinstance(verdict("old.tar", data.replace(b"storages", b"somewhat")), DamagedFile | UncheckedFile)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_verdict(data: bytes) -> None:
    for name in ("a.pt", "a.safetensors", "a.h5", "a.json", "a.keras", "a.pkl", "a", "a.npz"):
        verdict(name, data)
        verdict(name, b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + data)
    for check in (check_pickle, check_json, check_zip, check_safetensors, weight_files.check_hdf5, read_bundle_index):
        for head in (b"", b"\x80\x04", b"\x89HDF\r\n\x1a\n\x00", b"\x89HDF\r\n\x1a\n\x02", b"PK\x05\x06"):
            try:
                check(MemorySource(head + data))
            except ERRORS:
                pass


@pytest.mark.parametrize("text", ['{"loss": NaN, "best": -Infinity}', "[]", "3", '"x"', ' {"a": [1.5, null]}\n'])
def test_json_as_pythons_json_writes_it(text: str) -> None:
    assert is_sound("trainer_state.json", text.encode())


@pytest.mark.parametrize("text", ["", "  ", '{"a": 1', "{'a': 1}", "\0\0\0", '{"loss": NaN'])
def test_json_that_is_cut_off(text: str) -> None:
    assert isinstance(verdict("trainer_state.json", text.encode()), DamagedFile)


def test_json_that_is_too_deep_is_not_judged() -> None:
    assert isinstance(verdict("deep.json", b"[" * 100_000), UncheckedFile)
    assert isinstance(verdict("deep.json", b"[" * 100_000 + b"NaN"), UncheckedFile)


def test_zeros_in_place_of_a_file_are_damage() -> None:
    for name in ("a.pt", "a.safetensors", "a.h5", "a.json", "a.keras", "a.bin"):
        assert isinstance(verdict(name, bytes(5000)), DamagedFile), name
        assert isinstance(verdict(name, b""), DamagedFile), name


# -- TensorFlow -------------------------------------------------------------------------------------------------------

TENSORS: dict[str, bytes | list[bytes]] = {
    **{f"layer_with_weights-{one}/kernel/.ATTRIBUTES/VARIABLE_VALUE": bytes([one]) * (4 * one) for one in range(9)},
    "_CHECKPOINTABLE_OBJECT_GRAPH": [b"graph" * 60],
    "names": [b"one", b"", b"three"],
}


def bundle(directory: Path) -> tuple[bytes, list[bytes]]:
    write_bundle(directory / "ckpt-1", TENSORS, shards=2)
    return (directory / "ckpt-1.index").read_bytes(), [
        (directory / f"ckpt-1.data-{shard:05d}-of-00002").read_bytes() for shard in range(2)
    ]


def check_bundle(index: bytes, shards: list[bytes]) -> bool:
    try:
        found = read_bundle_index(MemorySource(index))
        for shard, entries in found.items():
            check_bundle_shard(MemorySource(shards[shard]), entries)
    except ERRORS:
        return False
    return len(found) == len(shards)


def test_tensorflows_checkpoint(tmp_path: Path) -> None:
    index, shards = bundle(tmp_path)
    assert check_bundle(index, shards)
    found = read_bundle_index(MemorySource(index))
    assert sorted(found) == [0, 1] and sum(map(len, found.values())) == len(TENSORS)
    assert all(check_bundle_shard(MemorySource(shards[one]), found[one]).uncovered is None for one in found)
    assert [cut for cut in range(len(index)) if check_bundle(index[:cut], shards)] == []
    assert [cut for cut in range(len(shards[0])) if check_bundle(index, [shards[0][:cut], shards[1]])] == []


def test_every_flipped_bit_of_a_table_is_detected(tmp_path: Path) -> None:
    index, shards = bundle(tmp_path)
    assert [place for place, changed in flips(index, 6) if check_bundle(changed, shards)] == []


def test_every_flipped_bit_of_a_shard_is_detected(tmp_path: Path) -> None:
    index, shards = bundle(tmp_path)
    for one in range(2):
        for place, changed in flips(shards[one], 7):
            assert not check_bundle(index, [changed if one == n else data for n, data in enumerate(shards)]), place


def test_without_awscrt_the_tensors_are_said_to_be_unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, shards = bundle(tmp_path)
    monkeypatch.setitem(sys.modules, "awscrt.checksums", None)
    assert fast_crc32c() is None
    found = read_bundle_index(MemorySource(index))
    assert "awscrt" in (check_bundle_shard(MemorySource(shards[0]), found[0]).uncovered or "")
    with pytest.raises(DamagedFile, match="ends there"):
        check_bundle_shard(MemorySource(shards[0][:-1]), found[0])


def test_a_length_of_more_than_64_bits_is_damage() -> None:
    data = bytes([0xFF] * 9 + [0x02]) + bytes(20)
    with pytest.raises(DamagedFile, match="more than 64 bits"):
        check_bundle_shard(MemorySource(data), [BundleEntry(0, len(data), 0, 7, 1, "text")])


def test_crc32c() -> None:
    """The check value of the algorithm, and both ways to compute it."""
    assert slow_crc32c(b"123456789") == 0xE3069283
    fast = fast_crc32c()
    assert fast is not None
    data = np.random.default_rng(1).bytes(1000)
    assert fast(data, 0) == slow_crc32c(data) == slow_crc32c(data[300:], slow_crc32c(data[:300]))


def test_a_table_is_read_in_order() -> None:
    entries = {f"{one:04d}".encode(): bytes(one % 50) for one in range(300)}
    assert dict(read_table(MemorySource(table(entries)))) == entries


class Counting:
    """A source that says how much was read of it at a time."""

    def __init__(self, source: ByteSource) -> None:
        self.source, self.size, self.most = source, source.size, 0

    def read(self, offset: int, length: int) -> bytes:
        assert offset >= 0 and length >= 0 and offset + length <= self.size
        self.most = max(self.most, length)
        return self.source.read(offset, length)


def test_content_is_read_a_piece_at_a_time() -> None:
    file = io.BytesIO()
    torch.save({"a": torch.zeros(8 << 20, dtype=torch.uint8)}, file)
    source = Counting(MemorySource(file.getvalue()))
    assert check_zip(source) and source.most <= 1 << 20
    source = Counting(MemorySource(save_safetensors({"a": torch.zeros(8 << 20, dtype=torch.uint8)})))
    assert check_safetensors(source) and source.most < 1000
