"""Where files are cut: whatever the bytes claim the cuts add up, and what did not change is a chunk that did not."""

from __future__ import annotations

import bisect
import io
import itertools
import json
import random
import struct
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.seeds import examples

from tierd.core import chunk_boundaries
from tierd.core.chunk_boundaries import (
    GRAIN,
    MAX_HEAD,
    FileRecord,
    content_chunk_sizes,
    cut_records,
    grain_of,
    home_ranges,
    safetensors_records,
    zip_records,
)
from tierd.core.manifest import CHUNK_SIZE, chunk_sizes

KIB, MIB = 1 << 10, 1 << 20


def reader(data):
    return lambda offset, length: data[offset : offset + length]


def safetensors(tensors, metadata=None):
    """A file of `(name, dtype, bytes)` in this order."""
    header, at = {"__metadata__": metadata} if metadata else {}, 0
    for name, dtype, data in tensors:
        header[name] = {"dtype": dtype, "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in tensors)


# -- records ----------------------------------------------------------------------------------------------------------

SIZES = st.integers(0, 40) | st.integers(0, 1000)
RECORDS = st.lists(st.builds(FileRecord, SIZES, st.binary(max_size=3), st.sampled_from([0, 1, 2, 4]), st.booleans()))


@settings(max_examples=examples(400))
@given(RECORDS, st.integers(1, 64), st.integers(1, 16))
def test_the_cuts_add_up_and_none_is_empty_or_too_large(records, grain, times):
    limit = grain * times
    sizes = cut_records(records, limit, grain)
    total = sum(record.size for record in records)
    assert sum(sizes) == total
    assert all(0 < size <= limit for size in sizes)
    turns = sum(
        (a.moving, a.home) != (b.moving, b.home)
        for a, b in itertools.pairwise(record for record in records if record.size)
    )
    if times > 1:
        assert len(sizes) <= 2 * total / grain + turns + 1
    assert sizes == cut_records(iter(records), limit, grain)


@settings(max_examples=examples(200))
@given(RECORDS, st.integers(1, 64), st.integers(1, 16))
def test_a_large_record_has_chunks_of_its_own_cut_from_its_beginning(records, grain, times):
    limit = grain * times
    ends = {0, *itertools.accumulate(cut_records(records, limit, grain))}
    at = 0
    for record in records:
        if record.size >= grain and not record.moving:
            own = {at + size for size in itertools.accumulate(chunk_sizes(record.size, limit))}
            assert {end for end in ends if at <= end <= at + record.size} == {at, *own}
        at += record.size


def test_moving_tensors_are_packed_into_full_chunks():
    still, moving = FileRecord(5 * MIB, b"s", 4), [FileRecord(MIB + 4096, bytes([i]), 4, True) for i in range(200)]
    sizes = cut_records([FileRecord(4096), still, *moving, FileRecord(8, b"step", 4)], 64 * MIB, MIB)
    moved = 200 * (MIB + 4096)
    assert sizes == [4096, 5 * MIB, *chunk_sizes(moved, 64 * MIB), 8]


def test_a_chunk_holds_one_element_size_where_that_is_not_next_to_nothing():
    wide, narrow = [FileRecord(3 * MIB, b"w", 4, True)] * 5, [FileRecord(MIB, b"n", 2, True)] * 5
    assert cut_records([*wide, *narrow], 64 * MIB, MIB) == [15 * MIB, 5 * MIB]
    assert cut_records([FileRecord(1000, b"w", 4, True), *narrow], 64 * MIB, MIB) == [5 * MIB + 1000]
    small = [FileRecord(300 * KIB, b"", 4)] * 2 + [FileRecord(300 * KIB, b"", 2)] * 2
    assert cut_records(small, 64 * MIB, MIB) == [600 * KIB, 600 * KIB]


def pieces(records, limit, grain):
    """Every chunk's size and what it holds: `(key, from, to)` of the records in it."""
    bounds = [0, *itertools.accumulate(record.size for record in records)]
    found, end = [], 0
    for size in cut_records(records, limit, grain):
        begin, end, held = end, end + size, []
        for index in range(bisect.bisect_right(bounds, begin) - 1, bisect.bisect_left(bounds, end)):
            low, high = bounds[index : index + 2]
            held.append((records[index].key, max(low, begin) - low, min(high, end) - low))
        found.append((size, tuple(held)))
    return found


def new_bytes(before, after, limit=64 * MIB, grain=MIB):
    known = set(pieces(before, limit, grain))
    return sum(size for size, held in pieces(after, limit, grain) if (size, held) not in known)


@pytest.mark.parametrize("largest", [64, 4 * KIB, 64 * KIB, 512 * KIB])
def test_after_an_insertion_packs_fall_into_step_again(largest):
    """Small records only: there an insertion has to be caught up with."""
    noise = random.Random(largest)
    worst = []
    for _ in range(20):
        count = min(4000, 40 * MIB // largest)
        records = [FileRecord(noise.randint(1, largest), noise.randbytes(8), 4) for _ in range(count)]
        at = noise.randrange(len(records))
        grown = [*records[:at], FileRecord(noise.randint(1, largest), b"new", 4), *records[at:]]
        grain = max(64, sum(record.size for record in records) // 64)
        worst.append(new_bytes(records, grown, 64 * grain, grain) / grain)
    assert sum(worst) / len(worst) < 4 and max(worst) < 10  # of 64 grains


@settings(max_examples=examples())
@given(RECORDS, st.data())
def test_an_insertion_among_large_records_changes_none_of_them(records, data):
    records = [FileRecord(64 + record.size, bytes([i % 256, i // 256])) for i, record in enumerate(records)]
    at = data.draw(st.integers(0, len(records)))
    new = FileRecord(data.draw(st.integers(0, 500)), b"new")
    assert new_bytes(records, [*records[:at], new, *records[at:]], 256, 64) == new.size


def test_a_table_that_grows_keeps_its_untouched_rows():
    before, after = (
        [FileRecord(10 * MIB + 5, b"t"), FileRecord(3 * MIB, b"z")],
        [FileRecord(12 * MIB, b"t"), FileRecord(3 * MIB, b"z")],
    )
    assert new_bytes(before, after, 4 * MIB) == 4 * MIB


def test_the_grain_grows_with_the_file_so_that_a_manifest_can_hold_its_chunks():
    assert grain_of(0) == grain_of(32 << 30) == GRAIN
    assert grain_of((32 << 30) + 1) == 2 * MIB
    assert grain_of(10 << 40) == min(512 * MIB, CHUNK_SIZE)
    assert grain_of(1 << 30, 1000) == 1000
    assert len(cut_records([FileRecord(2 * MIB, b"w")] * 50_000, CHUNK_SIZE, grain_of(100_000 * MIB))) <= 65536


# -- safetensors ------------------------------------------------------------------------------------------------------


def test_replicated_tensors_make_chunks_of_their_own():
    sizes = {"own": 300 * KIB, "a": 300 * KIB, "b": 3 * MIB, "c": 300 * KIB, "last": 300 * KIB}
    bounds = f"{300 * KIB}:{300 * KIB + 3 * MIB + 600 * KIB}:0"
    data = safetensors([(name, "F32", bytes(size)) for name, size in sizes.items()], {"tierd.homes": bounds})
    head = len(data) - sum(sizes.values())
    assert content_chunk_sizes(reader(data), len(data)) == [head + 300 * KIB, 300 * KIB, 3 * MIB, 300 * KIB, 300 * KIB]
    assert home_ranges(reader(data), len(data)) == [(head + 300 * KIB, head + 300 * KIB + 3 * MIB + 600 * KIB, 0)]


@pytest.mark.parametrize("text", ["", "1:0:0", "0:10", "0:99999999999:1", "0:8:-1", "8:16:0,0:8:1"])
def test_home_ranges_outside_the_file_or_out_of_order_are_ignored(text):
    data = safetensors([("a", "F32", bytes(16)), ("b", "F32", bytes(2 * MIB))], {"tierd.homes": text})
    assert len(home_ranges(reader(data), len(data))) == (text == "8:16:0,0:8:1")
    assert sum(content_chunk_sizes(reader(data), len(data))) == len(data)


def test_a_safetensors_file_is_cut_at_its_tensors():
    sizes = {"a": 5 * MIB, "b": 100, "c": 200, "d": 3 * MIB + 8, "e": 1}
    data = safetensors([(name, "F32", bytes(size)) for name, size in sizes.items()])
    head = len(data) - sum(sizes.values())
    assert content_chunk_sizes(reader(data), len(data), 2 * MIB) == [
        head,
        2 * MIB,
        2 * MIB,
        MIB,
        300,
        2 * MIB,
        MIB + 8,
        1,
    ]
    records = safetensors_records(reader(data), len(data))
    assert records == [FileRecord(head), *(FileRecord(size, name.encode(), 4) for name, size in sizes.items())]


def test_dtype_gives_the_element_size():
    kinds = ["F64", "F32", "BF16", "F8_E4M3", "I8", "BOOL", "C64", "F4", "what"]
    data = safetensors([(kind, kind, b"12345678") for kind in kinds])
    assert [record.width for record in safetensors_records(reader(data), len(data))[1:]] == [8, 4, 2, 1, 1, 1, 8, 1, 1]


@pytest.mark.parametrize(
    ("text", "moving"), [("4:12", [0, 1, 1, 0]), ("", [0] * 4), ("4:", [0] * 4), ("-4:12", [0] * 4), ("٤:12", [0] * 4)]
)
def test_metadata_names_the_moving_tensors(text, moving):
    data = safetensors([(name, "U8", b"1234") for name in "abcd"], {"format": "pt", "tierd.moving": text})
    assert [record.moving for record in safetensors_records(reader(data), len(data))[1:]] == moving


BIG = bytes(2 * MIB)
ODD = {
    "a hole": lambda h: h["b"].update(data_offsets=[2 * MIB + 4, 4 * MIB + 4]),
    "an overlap": lambda h: h["b"].update(data_offsets=[2 * MIB - 4, 4 * MIB - 4]),
    "backwards": lambda h: h["b"].update(data_offsets=[4 * MIB, 2 * MIB]),
    "negative": lambda h: h["a"].update(data_offsets=[-8, 2 * MIB]),
    "three offsets": lambda h: h["a"].update(data_offsets=[0, 1, 2]),
    "no number": lambda h: h["a"].update(data_offsets=[0, "1"]),
    "huge": lambda h: h["b"].update(data_offsets=[2 * MIB, 2**80]),
    "short": lambda h: h.pop("b"),
    "a list": lambda h: h.update(c=[1]),
    "metadata of numbers": lambda h: h.update(__metadata__={"tierd.moving": 1}),
    "a surrogate": lambda h: h.update({"\ud800": h.pop("b")}),
}


@pytest.mark.parametrize("case", ODD)
def test_an_odd_header_gets_fixed_cuts(case):
    header = {name: {"dtype": "U8", "data_offsets": [i * 2 * MIB, (i + 1) * 2 * MIB]} for i, name in enumerate("ab")}
    ODD[case](header)
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + BIG + BIG
    assert content_chunk_sizes(reader(data), len(data), 3 * MIB) == chunk_sizes(len(data), 3 * MIB)


@pytest.mark.parametrize("length", [0, 1, 5 * MIB, MAX_HEAD, 2**64 - 1])
@pytest.mark.parametrize("text", [b"{}", b"{" * 3 * MIB, b'{"a":' * MIB, b"\xff" * 2 * MIB])
def test_bytes_that_only_look_like_a_header_get_fixed_cuts(length, text):
    data = length.to_bytes(8, "little") + text + BIG
    assert content_chunk_sizes(reader(data), len(data)) == chunk_sizes(len(data))


def test_a_header_that_is_not_at_hand_gets_fixed_cuts():
    data = safetensors([(str(i), "U8", bytes(100)) for i in range(20_000)])
    assert content_chunk_sizes(reader(data[:4096]), len(data), MIB) == chunk_sizes(len(data), MIB)
    assert content_chunk_sizes(reader(data), len(data), MIB) != chunk_sizes(len(data), MIB)


GOOD = safetensors([("a", "F32", bytes(40)), ("b", "U8", bytes(30)), ("c", "F16", bytes(8))], {"tierd.moving": "40:70"})


def check_damaged(good, at, patch, more, limit):
    """With some bytes written over, and read as longer or shorter than it is, it is cut whole into pieces in limits."""
    data = bytearray(good)
    data[at : at + len(patch)] = patch
    for size in (len(data), len(data) + more, at):
        sizes = content_chunk_sizes(reader(bytes(data)), size, limit)
        assert sum(sizes) == size and all(0 < length <= limit for length in sizes)


@settings(max_examples=examples(400))
@given(st.integers(0, len(GOOD)), st.binary(max_size=12), st.integers(0, 4096), st.integers(1, 64))
def test_damage_cuts_otherwise_and_nothing_more(at, patch, more, limit):
    check_damaged(GOOD, at, patch, more, limit)


def test_a_file_of_no_more_than_a_grain_is_one_chunk():
    data = safetensors([(str(i), "U8", bytes(1000)) for i in range(100)])
    assert content_chunk_sizes(reader(data), len(data)) == [len(data)]
    assert content_chunk_sizes(reader(b""), 0) == []
    assert content_chunk_sizes(lambda *_: pytest.fail("read"), GRAIN) == [GRAIN]


# -- zip --------------------------------------------------------------------------------------------------------------


def archive(entries, name="x", **options):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", **options) as file:
        for number, data in enumerate(entries):
            file.writestr(f"{name}/data/{number}", data)
    return stream.getvalue()


ENTRIES = [bytes([i]) * size for i, size in enumerate([10, 3 * MIB, 20, 2 * MIB, 2 * MIB, 5 * MIB])]


@pytest.mark.parametrize("forced", [False, True], ids=["zip", "zip64"])
def test_an_archive_is_cut_where_the_content_of_an_entry_begins(monkeypatch, forced):
    if forced:
        for limit in ("ZIP64_LIMIT", "ZIP_FILECOUNT_LIMIT"):
            monkeypatch.setattr(zipfile, limit, 1)
    data = archive(ENTRIES, name="step-100")
    assert (b"PK\6\6" in data) == forced
    begun = [0, *itertools.accumulate(content_chunk_sizes(reader(data), len(data), 2 * MIB))]
    chunks = {data[begin:end] for begin, end in itertools.pairwise(begun)}
    assert all(entry[at : at + 2 * MIB] in chunks for entry in ENTRIES for at in range(0, len(entry), 2 * MIB) if at)
    assert sum(len(chunk) < 1000 for chunk in chunks) == 5  # before each large one, and what ends it


def test_archives_behind_each_other_are_located_from_the_end():
    files = [archive([entry, b"small"], name=str(i)) for i, entry in enumerate(ENTRIES)]
    for before in (b"", b"something" * 1000):
        data = before + b"".join(files)
        records = zip_records(reader(data), len(data))
        assert sum(record.size for record in records) == len(data)
        assert {len(entry) for entry in ENTRIES} <= {record.size for record in records}
    assert zip_records(reader(data + b"."), len(data) + 1) is None


def test_zip_entry_beyond_four_gigabytes_is_located():
    """A directory that names it; nothing of that size is written."""
    far, content = 5 << 30, 6 << 30
    extra = struct.pack("<2H3Q", 1, 24, content, content, far)
    full = 0xFFFFFFFF
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", *[45] * 6, 77, full, full, 1, len(extra), 0, 0, 0, 0, full)
    directory = entry + b"n" + extra
    at = far + 31 + content
    tail = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(directory), at)
    tail += struct.pack("<4sIQI", b"PK\6\7", 0, at + len(directory), 1)
    tail += struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(directory), full, 0)
    local = struct.pack("<4s5H3I2H", b"PK\3\4", *[45] * 5, 0, 0, 0, 1, 0) + b"n"
    size = at + len(directory) + len(tail)

    def read(offset, length):
        for begin, data in ((far, local), (at, directory + tail)):
            if begin <= offset < begin + len(data):
                return data[offset - begin :][:length]
        return bytes(length)

    key = (77).to_bytes(4, "little")
    assert zip_records(read, size) == [FileRecord(far), FileRecord(31), FileRecord(content, key), FileRecord(size - at)]


SMALL = archive([b"a" * 300, b"b" * 200], compression=zipfile.ZIP_DEFLATED) + archive([b"c" * 64])


@settings(max_examples=examples(400))
@given(st.integers(0, len(SMALL)), st.binary(max_size=12), st.integers(0, 4096), st.integers(1, 64))
def test_a_damaged_archive_is_cut_otherwise_and_nothing_more(at, patch, more, limit):
    check_damaged(SMALL, at, patch, more, limit)


def test_a_great_many_archives_are_not_all_looked_at():
    data = archive([b""]) * 150_000
    asked = []
    read = reader(data)
    sizes = content_chunk_sizes(lambda offset, length: asked.append(length) or read(offset, length), len(data))
    assert sum(sizes) == len(data) and len(asked) < 500_000


def test_a_header_of_more_entries_than_tensors_fit_in_it_is_not_read():
    entries = ",".join(f'"{number:x}":{{}}' for number in range(chunk_boundaries._MAX_TENSORS + 1))
    head = f"{{{entries}}}".encode()
    data = len(head).to_bytes(8, "little") + head
    assert chunk_boundaries.safetensors_records(lambda offset, size: data[offset : offset + size], len(data)) is None
