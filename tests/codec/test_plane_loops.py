"""The compiled inner loops give the bytes that NumPy's give, and refuse every buffer that is too small."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.seeds import examples

from tierd.codec import byte_planes, numpy_loops
from tierd.codec.number_layout import Bytes

try:
    from tierd.codec import _plane_loops
except ImportError:
    _plane_loops = None

compiled = pytest.mark.skipif(_plane_loops is None, reason="there is no compiler on this machine")
LARGEST = 1000  # elements: several of the loops' blocks, and a rest


def test_extension_is_compiled_where_a_compiler_is() -> None:
    assert (_plane_loops is not None) == (shutil.which("cc") is not None)
    assert byte_planes.loops is (_plane_loops if _plane_loops and _plane_loops.vectorised else numpy_loops)


def unaligned(data: bytes, offset: int) -> Bytes:
    """A writable copy of `data` that begins `offset` bytes after an aligned address."""
    memory = np.empty(len(data) + 16, np.uint8)
    memory = memory[offset : offset + len(data)]
    memory[:] = np.frombuffer(data, np.uint8)
    return memory


@st.composite
def element_bytes(draw: st.DrawFn) -> tuple[Bytes, int]:
    """Elements of one width at any address, and a rest that is no whole element."""
    width = draw(st.sampled_from((2, 4, 8)))
    count, rest = draw(st.integers(0, LARGEST)), draw(st.integers(0, width - 1))
    data = np.random.default_rng(draw(st.integers(0, 1 << 32))).bytes(count * width + rest)
    return unaligned(data, draw(st.integers(0, 8))), width


@compiled
@settings(max_examples=examples(300), deadline=None)
@given(element_bytes(), st.booleans())
def test_split_and_joined_elements_are_those_of_numpy(drawn: tuple[Bytes, int], folded: bool) -> None:
    elements, width = drawn
    count = len(elements) // width
    planes = []
    for loops in (_plane_loops, numpy_loops):
        low, high = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
        below = [np.zeros(2 * count, np.uint8) for _ in range(width // 2 - 1)]
        loops.split_top(elements, width, folded, low, high)
        for index, word in enumerate(below):
            loops.take_words(elements, width, index, word)
        planes.append([low.tobytes(), high.tobytes(), *(word.tobytes() for word in below)])
        for joining in (_plane_loops, numpy_loops):
            joined = unaligned(bytes(len(elements)), 1)
            joining.join(joined, width, folded, low, high, *below)
            assert joined[: count * width].tobytes() == elements[: count * width].tobytes()
            assert not joined[count * width :].any()
    assert planes[0] == planes[1]


@compiled
@settings(max_examples=examples(300), deadline=None)
@given(
    st.integers(0, 2 * LARGEST),
    st.integers(0, 255),
    st.integers(0, 200).map(lambda spread: spread % 21),
    st.integers(0, 1 << 32),
    st.integers(0, 100),
)
def test_pairs_are_those_of_numpy(size: int, base: int, spread: int, seed: int, room: int) -> None:
    plane = (base + np.random.default_rng(seed).integers(0, spread + 1, size)).astype(np.uint8)
    packed = []
    for loops in (_plane_loops, numpy_loops):
        halves, escapes = np.zeros((size + 1) // 2, np.uint8), np.zeros(room, np.uint8)
        number = loops.pack_pairs(plane, base, halves, escapes)
        packed.append((number, halves.tobytes(), escapes[:number].tobytes()) if number >= 0 else number)
    assert packed[0] == packed[1]
    if packed[0] == -1:
        return
    number, stored, others = packed[0]
    stored_halves = np.frombuffer(stored, np.uint8)
    for loops in (_plane_loops, numpy_loops):
        for given_others in (others, others + b"x", others[:-1]):
            back = np.zeros(size, np.uint8)
            fits = loops.unpack_pairs(stored_halves, base, np.frombuffer(given_others, np.uint8), back)
            assert fits == (len(given_others) == number)
            assert not fits or back.tobytes() == plane.tobytes()


@compiled
@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=400), st.integers(0, 255), st.binary(max_size=40), st.integers(0, 1))
def test_any_stored_pairs_are_read_as_numpy_reads_them(halves: bytes, base: int, escapes: bytes, odd: int) -> None:
    size = max(0, 2 * len(halves) - odd)
    answers = []
    for loops in (_plane_loops, numpy_loops):
        plane = np.zeros(size, np.uint8)
        fits = loops.unpack_pairs(np.frombuffer(halves, np.uint8), base, np.frombuffer(escapes, np.uint8), plane)
        answers.append((fits, plane.tobytes() if fits else b""))
    assert answers[0] == answers[1]


@compiled
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("split_top", (bytes(16), 4, 0, bytearray(3), bytearray(4))),
        ("split_top", (bytes(16), 4, 0, bytearray(4), bytearray(3))),
        ("split_top", (bytes(16), 3, 0, bytearray(9), bytearray(9))),
        ("take_words", (bytes(16), 4, 0, bytearray(7))),
        ("take_words", (bytes(16), 4, 2, bytearray(8))),
        ("take_words", (bytes(16), 4, -1, bytearray(8))),
        ("take_words", (bytes(16), 2, 0, bytearray(16))),
        ("pack_pairs", (bytes(9), 0, bytearray(4), bytearray(9))),
        ("unpack_pairs", (bytes(4), 0, b"", bytearray(9))),
        ("join", (bytearray(16), 4, 0, bytes(3), bytes(4), bytes(8))),
        ("join", (bytearray(16), 4, 0, bytes(4), bytes(3), bytes(8))),
        ("join", (bytearray(16), 4, 0, bytes(4), bytes(4), bytes(7))),
        ("join", (bytearray(16), 4, 0, bytes(4), bytes(4))),
        ("join", (bytearray(16), 2, 0, bytes(8), bytes(8), bytes(16))),
        ("join", (bytearray(16), 8, 0, bytes(2), bytes(2), bytes(4), bytes(4), bytes(3))),
        ("find_changes", (bytes(16), bytes(15), 2, bytearray(8), bytearray(16))),
        ("find_changes", (bytes(16), bytes(16), 3, bytearray(8), bytearray(16))),
        ("add_changes", (bytearray(16), 0, bytes(1), bytes(2))),
    ],
)
def test_buffers_that_do_not_fit_are_refused(function: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError):
        getattr(_plane_loops, function)(*arguments)


@compiled
def test_memory_that_may_not_be_written_is_refused() -> None:
    read_only = bytes(64)
    functions = {
        "split_top": (read_only, 2, 0, read_only, read_only),
        "take_words": (read_only, 4, 0, read_only),
        "pack_pairs": (read_only, 0, read_only, read_only),
        "unpack_pairs": (read_only, 0, b"", read_only),
        "join": (read_only, 2, 0, read_only, read_only),
        "find_changes": (read_only, read_only, 2, read_only, read_only),
        "add_changes": (read_only, 2, read_only, read_only),
    }
    for function, arguments in functions.items():
        with pytest.raises((BufferError, TypeError)):
            getattr(_plane_loops, function)(*arguments)
