"""The codec `delta`: it gives the chunk back, is small after a step of training, and is bounded whatever it reads."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import by_hand
from support.seeds import examples

from tierd.codec import byte_planes, chunk_codec, element_deltas, numpy_loops
from tierd.codec.byte_planes import PLANE_HEAD
from tierd.codec.element_deltas import BLOCK_HEAD, HEAD, MAGIC, apply_delta, make_delta
from tierd.core.errors import CorruptChunk
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Chunk, StoredChunk
from tierd.spool.file_io import digest

FORMAT = (Path(__file__).parents[2] / "tierd" / "FORMAT.md").read_text()
PART = PartId(CheckpointId("r", "0123456789ab-01234567", 7), 3, 8)
WIDTHS = (1, 2, 4, 8)
CHANGES = ("none", "first and last", "far apart", "some", "half", "all", "noise")


def numbers(width: int, size: int, lead: int, seed: int) -> bytes:
    """Elements whose lower bytes are noise and whose top byte repeats, after `lead` bytes of something else."""
    noise = np.random.default_rng(seed)
    elements = noise.integers(0, 256, (size // width + 2, width), np.uint8)
    elements[:, -1] = noise.choice([62, 63, 190, 191], len(elements)) if width > 1 else 5
    return (bytes(lead) + elements.tobytes())[:size]


def described(raw: bytes) -> Chunk:
    return Chunk(size=len(raw), xxh3_128=digest(raw))


def changed(base: bytes, width: int, lead: int, change: str, seed: int) -> bytes:
    noise, data = np.random.default_rng(seed + 1), np.frombuffer(bytearray(base), np.uint8)
    if change == "noise":
        return noise.bytes(len(base))
    count = max(0, len(base) - lead) // width
    elements = data[lead : lead + count * width].view(f"<u{width}")
    places = {
        "none": np.zeros(count, bool),
        "first and last": np.isin(np.arange(count), (0, count - 1)),
        "far apart": np.isin(np.arange(count) % 511, (254, 510)),  # 254 and 255 equal elements in a row
        "some": noise.random(count) < 0.1,
        "half": noise.random(count) < 0.5,
        "all": np.ones(count, bool),
    }[change]
    steps = noise.integers(1, 4, count, np.int64) * noise.choice([-1, 1], count)
    elements[places] += steps[places].astype(f"<i{width}").view(f"<u{width}")
    return data.tobytes()


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from(WIDTHS), st.integers(0, 7), st.integers(0, 20_000), st.sampled_from(CHANGES), st.integers(0, 1000)
)
def test_a_delta_turns_the_base_into_the_chunk(width, lead, size, change, seed):
    base = numbers(width, size, lead, seed)
    raw = changed(base, width, lead, change, seed)
    made = make_delta(raw, base)
    if made is None:
        assert change in ("half", "all", "noise", "some") or size < 2000
        return
    assert bytes(made) == bytes(make_delta(raw, base)) and (not size or len(made) <= size / 4)
    assert bytes(apply_delta(made, base)) == raw
    memory = memoryview(bytearray(base))
    assert apply_delta(made, memory, memory) is memory and bytes(memory) == raw


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("change", CHANGES)
def test_every_block_of_a_large_chunk_reads_back_from_both_kinds_of_loops(monkeypatch, width, change):
    base = numbers(width, (3 << 20) + 13, 3 % width, 7)
    raw = changed(base, width, 3 % width, change, 7)
    monkeypatch.setattr(element_deltas, "MOST_SHARE", 1)
    made = make_delta(raw, base)
    assert made is not None or change == "noise"
    results = [bytes(apply_delta(made, base))] if made else []
    monkeypatch.setattr(byte_planes, "loops", numpy_loops)
    again = make_delta(raw, base)
    assert (made is None) == (again is None) and (made is None or bytes(made) == bytes(again))
    assert not made or results == [raw] == [bytes(apply_delta(made, base))]


@pytest.mark.parametrize("width", [2, 4, 8])
def test_elements_of_which_a_tenth_moves_by_a_few_units_take_little_more_than_the_entropy(width):
    base = numbers(width, 4 << 20, 0, 1)
    raw = changed(base, width, 0, "some", 1)
    entropy = 0.47 + 0.1 * 2.6  # bits of an element: whether it moves, and which of six ways
    assert len(make_delta(raw, base)) < 1.15 * len(base) * entropy / (8 * width)
    assert len(make_delta(raw, base)) < len(chunk_codec.encode(PART, described(raw), raw).data)


def test_sample_distinguishes_the_shorter_kind_of_patch_and_a_shorter_whole_chunk():
    base = numbers(2, 256 << 10, 0, 3)
    some, noise = (changed(base, 2, 0, change, 3) for change in ("some", "noise"))
    share = element_deltas.delta_share(*(np.frombuffer(data, np.uint8) for data in (some, base)))
    assert share == pytest.approx(len(make_delta(some, base)) / len(base), rel=0.3)
    assert chunk_codec.cheapest_patch(some, base) == "delta"
    row = bytearray(base)
    row[5000:5064] = np.random.default_rng(1).bytes(64)
    assert chunk_codec.cheapest_patch(bytes(row), base) == "patch"
    assert chunk_codec.cheapest_patch(noise, base) == ""
    assert chunk_codec.cheapest_patch(bytes(len(base)), base) == ""  # zeros are so short that no difference pays


def test_a_chunk_of_another_size_has_no_delta():
    assert make_delta(bytes(64), bytes(65)) is None


# -- what a reader refuses --------------------------------------------------------------------------------------------

COUNT = 64
BASE = numbers(2, 2 * COUNT, 0, 5)


def block(*, width: int = 2, lead: int = 0, differing: int = 0, gaps: int = 0, body: bytes = b"") -> bytes:
    return BLOCK_HEAD.pack(width, lead, differing, gaps) + body


def plane(data: bytes) -> bytes:
    return PLANE_HEAD.pack(0, len(data)) + data


def values(number: int) -> bytes:
    """A block of the codec `planes` with so many differences of 0."""
    return struct.pack("<BB", 2, 0) + plane(bytes(number)) + plane(b"\x80" * number)


def whole(*blocks: bytes, size: int = 2 * COUNT, log: int = 20, magic: bytes = MAGIC, zeros: bytes = bytes(3)) -> bytes:
    return HEAD.pack(magic, size, log, zeros) + b"".join(blocks)


@pytest.mark.parametrize(
    "right",
    [
        whole(block()),
        whole(block(differing=COUNT, body=values(COUNT))),
        whole(block(differing=2, gaps=2, body=plane(b"\x00\x3e") + values(2))),
        whole(block(width=1, lead=0)),
        whole(block(lead=1, body=BASE[:1] + BASE[-1:])),
    ],
)
def test_object_that_the_description_allows_is_read(right):
    assert bytes(apply_delta(right, BASE)) == BASE


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"TED",
        whole(block(), magic=b"TED2"),
        whole(block(), size=2 * COUNT + 1),
        whole(block(), log=11),
        whole(block(), log=21),
        whole(block(), zeros=b"\0\0\1"),
        whole(),
        whole(block(), b"x"),
        whole(block(width=3)),
        whole(block(width=0)),
        whole(block(lead=2)),
        whole(block(lead=1)),  # its edges are missing
        whole(block(differing=1)),  # without a gap
        whole(block(differing=COUNT + 1, body=values(COUNT + 1))),
        whole(block(differing=COUNT)),
        whole(block(differing=0, gaps=1, body=plane(b"\x00"))),
        whole(block(differing=1, gaps=COUNT + 1, body=plane(b"\xff" * COUNT + b"\x00") + values(1))),
        whole(block(differing=1, gaps=1, body=plane(b"\x40") + values(1))),  # the element behind the last
        whole(block(differing=2, gaps=2, body=plane(b"\x00\x3f") + values(2))),
        whole(block(differing=1, gaps=2, body=plane(b"\xff\x00") + values(1))),
        whole(block(differing=1, gaps=1, body=plane(b"\xff") + values(1))),  # ends without an element
        whole(block(differing=1, gaps=2, body=plane(b"\x00\xff") + values(1))),
        whole(block(differing=2, gaps=1, body=plane(b"\x00") + values(2))),
        whole(block(differing=1, gaps=2, body=plane(b"\x00\x00") + values(1))),
        whole(block(differing=2, gaps=2, body=plane(b"\x00\x00") + values(1))),
        whole(block(differing=1, gaps=1, body=plane(b"\x00") + values(2))),
        whole(block(differing=1, gaps=1, body=PLANE_HEAD.pack(1, 3) + b"abc" + values(1))),
    ],
)
@pytest.mark.parametrize("pure", [False, True])
def test_anything_else_is_a_value_error(monkeypatch, wrong, pure):
    if pure:
        monkeypatch.setattr(byte_planes, "loops", numpy_loops)
    with pytest.raises(ValueError):
        apply_delta(wrong, BASE)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(WIDTHS), st.sampled_from(CHANGES), st.integers(0, 20), st.data())
def test_a_spoilt_delta_is_refused_or_gives_as_many_bytes_and_never_passes_for_the_chunk(width, change, seed, data):
    base = numbers(width, 12_000, 0, seed)
    raw = changed(base, width, 0, change, seed)
    made = make_delta(raw, base)
    if made is None:
        return
    spoilt = bytearray(made)
    for _ in range(data.draw(st.integers(1, 4))):
        spoilt[data.draw(st.integers(0, len(spoilt) - 1))] = data.draw(st.integers(0, 255))
    spoilt = spoilt[: data.draw(st.integers(0, len(spoilt)))] if data.draw(st.booleans()) else spoilt
    answers = []
    for loops in (byte_planes.loops, numpy_loops):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(byte_planes, "loops", loops)
            try:
                answers.append(bytes(apply_delta(spoilt, base)))
            except ValueError:
                answers.append(b"")
    assert answers[0] == answers[1] and len(answers[0]) in (0, len(base))
    stored = StoredChunk(codec="delta" + 11 * "0", size=len(spoilt), xxh3_128=digest(spoilt), key="")
    chunk = Chunk(size=len(raw), xxh3_128=digest(raw), stored=stored)
    try:
        assert bytes(chunk_codec.decode(chunk, spoilt, "here", None, base)) == raw
    except CorruptChunk:
        pass


def test_frames_that_promise_much_take_no_memory():
    bomb = byte_planes.tools.search.compress(bytes(64 << 20))
    body = PLANE_HEAD.pack(1, len(bomb)) + bomb
    for wrong in (
        whole(block(differing=1, gaps=1, body=body)),
        whole(block(differing=COUNT, body=struct.pack("<BB", 2, 0) + body)),
    ):
        tracemalloc.start()
        with pytest.raises(ValueError):
            apply_delta(wrong, BASE)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


# -- the loops --------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(WIDTHS), st.binary(max_size=600), st.integers(0, 3), st.data())
def test_both_kinds_of_loops_find_and_add_the_same(width, old, room, data):
    count = len(old) // width
    new = bytearray(old[: count * width])
    for place in data.draw(st.lists(st.integers(0, max(len(new) - 1, 0)), max_size=20)) if new else []:
        new[place] ^= data.draw(st.integers(0, 255))
    arrays = [np.frombuffer(memory, np.uint8) for memory in (new, old[: count * width])]
    results = []
    for loops in (byte_planes.loops, numpy_loops):
        gaps, differences = np.zeros(count // (room + 1), np.uint8), np.zeros(count // (room + 1) * width, np.uint8)
        sizes = loops.find_changes(*arrays, width, gaps, differences)
        if sizes:
            gaps, differences = gaps[: sizes[0]], differences[: sizes[1] * width]
            back = arrays[1].copy()
            assert loops.add_changes(back, width, gaps, differences) and back.tobytes() == new
        results.append((sizes, (gaps.tobytes(), differences.tobytes()) if sizes else None))
    assert results[0] == results[1]


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(WIDTHS), st.integers(0, 300), st.lists(st.sampled_from([0, 1, 3, 254, 255])), st.integers(0, 9))
def test_both_kinds_of_loops_refuse_the_same_gaps(width, count, gaps, number):
    answers = []
    for loops in (byte_planes.loops, numpy_loops):
        elements, stored = np.zeros(count * width, np.uint8), np.array(gaps, np.uint8)
        fits = loops.add_changes(elements, width, stored, np.ones(number * width, np.uint8))
        answers.append((fits, elements.tobytes() if fits else b""))
    assert answers[0] == answers[1]


def test_the_numbers_in_the_description_are_those_of_the_code():
    text = FORMAT.split("#### `delta`")[1].split("\n## ")[0]
    assert MAGIC.decode() in text and (HEAD.size, BLOCK_HEAD.size) == (12, 10)
    assert f"A gap of {numpy_loops.LONGEST} " in text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("change", CHANGES)
def test_documented_program_reads_a_written_delta(width, change):
    base = numbers(width, 1_200_001, 5, 11)
    raw = changed(base, width, 5, change, 11)
    made = make_delta(raw, base)
    assert made is None or by_hand.program().apply_delta(bytes(made), base) == raw
