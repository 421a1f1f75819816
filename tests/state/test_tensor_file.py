"""The tensor file is plain safetensors: its layout, its strict reading, and what hostile headers get."""

from __future__ import annotations

import json
import mmap
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.seeds import examples
from support.state_files import copy_into, plan_layout
from torch import nn

from tierd.core.errors import StateMismatch, StateRefused, TierdError
from tierd.state.tensor_file import DTYPES, MAX_HEADER, PAGE, ReplicaShare, TensorFilePlanner, file_pieces, tensor_view
from tierd.state.tensor_header import parse_layout


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits at all, NaNs included (bool: 0 and 1)."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def written(tensors: dict[str, torch.Tensor]) -> bytearray:
    layout = plan_layout(tensors)
    buffer = bytearray(b"\xee" * layout.size)
    copy_into(layout, tensors, buffer)
    return buffer


def every_dtype() -> dict[str, torch.Tensor]:
    tensors = {f"{name}/{i}": random(dtype, 3, i) for i in (0, 1, 7) for name, dtype in DTYPES.items()}
    return tensors | {f"{name}/scalar": random(dtype, 1)[0] for name, dtype in DTYPES.items()}


def test_safetensors_opens_it_with_every_dtype(tmp_path):
    tensors = every_dtype()
    path = tmp_path / "tensors.safetensors"
    path.write_bytes(written(tensors))
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(loaded[name], tensor), name


def test_no_tensor_at_all(tmp_path):
    (tmp_path / "t").write_bytes(written({}))
    assert load_file(tmp_path / "t") == {}
    assert parse_layout(written({})).entries == {}


def test_layout_is_page_aligned_dense_and_aligned_by_element():
    layout = plan_layout(every_dtype())
    assert len(layout.header) % PAGE == 0
    end = len(layout.header)
    for entry in layout.entries.values():
        assert entry.offset == end
        assert entry.offset % entry.dtype.itemsize == 0
        end += entry.nbytes
    assert end == layout.size
    order = [
        (entry.nbytes == 0 or entry.nbytes % 64 != 0, -entry.dtype.itemsize, name)
        for name, entry in layout.entries.items()
    ]
    assert order == sorted(order)


def test_large_tensors_are_aligned_to_a_cache_line_with_any_tensors_between():
    tensors = {f"{i}/{name}": torch.ones(size) for i in range(5) for name, size in (("step", ()), ("w", (4, 16)))}
    tensors |= {"half": torch.ones(32, dtype=torch.float16), "odd": torch.ones(3, dtype=torch.int8)}
    entries = plan_layout(tensors).entries
    assert all(entry.offset % 64 == 0 for entry in entries.values() if entry.nbytes >= 64)
    assert list(entries) == [f"{i}/w" for i in range(5)] + ["half"] + [f"{i}/step" for i in range(5)] + ["odd"]


def test_the_header_is_the_json_that_the_standard_library_writes():
    names = ["a/b", 'quo"ted\\', "new\nline\x00", "é\u2028\U0001f600", "~2", ""]
    layout = plan_layout({name: torch.ones(i, 2) for i, name in enumerate(names)})
    text = layout.header[8:].rstrip().decode()
    assert text == json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
    assert json.loads(text).keys() == {"__metadata__", *names}


def test_layout_does_not_depend_on_the_order_given_or_on_values():
    tensors = every_dtype()
    backwards = {name: torch.empty_like(tensors[name], device="meta") for name in reversed(tensors)}
    assert plan_layout(backwards) == plan_layout(tensors)


def test_parse_is_the_inverse_of_plan():
    tensors = every_dtype()
    layout = plan_layout(tensors)
    buffer = written(tensors)
    parsed = parse_layout(buffer)
    assert parsed == layout
    for name, entry in parsed.entries.items():
        assert same_bits(tensor_view(buffer, entry), tensors[name])


def test_tensor_that_is_not_contiguous_is_copied():
    base = random(torch.float32, 6, 8)
    tensors = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": base[:1].expand(5, 8),
        "reversed": base.flip(0)[1:],
        "ten-d": random(torch.bfloat16, 2, 1, 2, 1, 2, 2, 1, 3, 1, 2).permute(9, 7, 5, 3, 1, 0, 2, 4, 6, 8),
        "scalar": base[3, 3],
        "empty": base[:, :0],
        "channels-last": random(torch.float16, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        "fp8": random(torch.float8_e4m3fn, 4, 6).t(),
        "u64": random(torch.uint64, 4, 6)[:, ::2],
        "bool": random(torch.bool, 4, 6)[::3],
    }
    buffer = written(tensors)
    for name, entry in parse_layout(buffer).entries.items():
        assert same_bits(tensor_view(buffer, entry), tensors[name]), name


sizes = st.lists(st.integers(0, 9), max_size=3) | st.lists(st.sampled_from([16, 33, 64, 100]), min_size=2, max_size=2)
described = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), sizes, st.sampled_from(["", "t", "step"])), max_size=12)


@settings(max_examples=examples())
@given(described, st.integers(1, 6))
def test_the_pieces_are_the_image(described, pages):
    tensors = {}
    for number, (dtype, shape, how) in enumerate(described):
        tensor = random(DTYPES[dtype], *shape)
        if how == "t":
            tensor = tensor.permute(tuple(reversed(range(tensor.ndim))))
        elif how == "step" and tensor.ndim:
            tensor = tensor[::2]
        tensors[f"{number % 3}/{number}"] = tensor
    layout = plan_layout(tensors)
    buffer = memoryview(mmap.mmap(-1, pages * PAGE))
    found = [bytes(piece) for piece in file_pieces(layout, tensors, buffer)]
    assert b"".join(found) == written(tensors)
    assert all(len(piece) == len(buffer) for piece in found[:-1])
    assert 0 < len(found[-1]) <= len(buffer)


def test_pieces_of_tensors_in_training_join_to_their_file():
    tensors = {"w": nn.Parameter(torch.randn(50, 50)), "y": nn.Parameter(torch.randn(3)) * 2}
    found = b"".join(map(bytes, file_pieces(plan_layout(tensors), tensors, memoryview(bytearray(PAGE)))))
    assert found == written(tensors)
    for size in (0, 100, PAGE + 1):
        with pytest.raises(ValueError, match=f"a buffer of {size} bytes; it has to be a multiple of 4096"):
            next(file_pieces(plan_layout(tensors), tensors, memoryview(bytearray(size))))


def test_refusals_of_the_writer():
    with pytest.raises(StateRefused, match=r"tensor 'c': safetensors does not hold torch\.complex64"):
        plan_layout({"c": torch.ones(1, dtype=torch.complex64)})
    long = {"n" * (MAX_HEADER // 2): torch.ones(1), "m" * (MAX_HEADER // 2): torch.ones(1)}
    with pytest.raises(StateRefused, match=r"2 tensors need a header of .* bytes; safetensors allows 100000000"):
        plan_layout(long)
    layout = plan_layout({"a": torch.ones(1)})
    with pytest.raises(ValueError, match="a buffer of 4096 bytes for a layout of 4100"):
        copy_into(layout, {"a": torch.ones(1)}, bytearray(4096))


def raw_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def one(dtype: object = "F32", shape: object = (1,), span: object = (0, 4), **more: object) -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": span} | more}


HOSTILE = {
    "nothing": (b"", "a header of -1 bytes in a file of 0"),
    "short": (b"\0" * 7, "a header of -1 bytes in a file of 7"),
    "no header": (b"\0" * 8, "a header of 0 bytes in a file of 8"),
    "beyond the file": (raw_file(b"{}", length=3), "a header of 3 bytes in a file of 10"),
    "over 100 MB": (raw_file(b"{}", length=2**63), "a header of 9223372036854775808 bytes in a file of 10"),
    "no JSON": (raw_file(b"{]"), "Expecting property name"),
    "no UTF-8": (raw_file(b'{"\xff"}'), "invalid start byte"),
    "UTF-16": (raw_file("{}".encode("utf-16")), "codec can't decode|Expecting value"),
    "no object": (raw_file(b"[1]"), "the header is no object but list"),
    "NaN": (raw_file(b'{"a": NaN}'), "NaN is no JSON"),
    "deep": (raw_file(b"[" * 100_000), "recursion"),
    "huge int": (raw_file(b'{"a": ' + b"9" * 10_000 + b"}"), "integer string conversion"),
    "same name twice": (raw_file(b'{"a": 1, "a": 2}'), "a name occurs twice"),
    "metadata": (raw_file({"__metadata__": {"a": 1}}), "__metadata__ maps names to anything but strings"),
    "metadata list": (raw_file({"__metadata__": []}), "__metadata__ maps names to anything but strings"),
    "no description": (raw_file({"a": {}}), "'a' is not described by dtype, shape and data_offsets"),
    "another key": (raw_file(one(pickle=""), b"0000"), "'a' is not described by dtype, shape and data_offsets"),
    "unknown dtype": (raw_file(one("F33"), b"0000"), "'a' has the unknown dtype 'F33'"),
    "dtype no string": (raw_file(one([]), b"0000"), "'a' has the unknown dtype"),
    "negative shape": (raw_file(one(shape=[-1]), b"0000"), "'a' has an impossible shape"),
    "bool shape": (raw_file(one(shape=[True]), b"0000"), "'a' has an impossible shape"),
    "float shape": (raw_file(one(shape=[1.0]), b"0000"), "'a' has an impossible shape"),
    "huge shape": (raw_file(one(shape=[2**62, 4]), b"0000"), "'a' has an impossible shape"),
    "wrapping shape": (raw_file(one(shape=[2**32, 2**32, 1]), b"0000"), "'a' has an impossible shape"),
    "empty but huge": (raw_file(one(shape=[0, 2**62, 2**62], span=[0, 0])), "'a' has an impossible shape"),
    "many dimensions": (raw_file(one(shape=[1] * 65), b"0000"), "'a' has an impossible shape"),
    "out of range": (raw_file(one(span=[0, 8]), b"0000"), "'a' lies outside the file"),
    "backwards": (raw_file(one(span=[4, 0]), b"0000"), "'a' lies outside the file"),
    "negative offset": (raw_file(one(span=[-4, 0]), b"0000"), "'a' lies outside the file"),
    "three offsets": (raw_file(one(span=[0, 4, 4]), b"0000"), "'a' lies outside the file"),
    "wrong span": (raw_file(one(shape=[2]), b"0000"), "'a' needs 8 bytes and has 4"),
    "hole in front": (raw_file(one(span=[4, 8]), b"00000000"), "'a' begins at|not aligned"),
    "bytes behind": (raw_file(one("U8", [1], [0, 1]), b"00"), "the tensors end at 69, the file at 70"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_malformed_header_is_named(case):
    file, message = HOSTILE[case]
    with pytest.raises(StateMismatch, match=message) as caught:
        parse_layout(file, "model.safetensors")
    assert str(caught.value).startswith("model.safetensors: ")


def test_overlap_and_holes_between_tensors():
    def two(first, second, size):
        described = {
            "a": {"dtype": "U8", "shape": [first[1] - first[0]], "data_offsets": first},
            "b": {"dtype": "U8", "shape": [second[1] - second[0]], "data_offsets": second},
        }
        return raw_file(described, b"\0" * size)

    assert list(parse_layout(two([4, 8], [0, 4], 8)).entries) == ["b", "a"]
    for hostile in (two([0, 4], [2, 6], 6), two([0, 4], [0, 4], 4), two([0, 4], [6, 8], 8)):
        with pytest.raises(StateMismatch, match="begins at"):
            parse_layout(hostile)


def test_replicated_tensors_of_any_length_leave_every_tensor_aligned():
    """A bfloat16 tensor of an odd length was before a rank's own float32 ones: seed 0 of the kit's divided launches."""
    tensors = {f"{kind}/{name}": tensor for kind in ("own", "home0", "home3") for name, tensor in every_dtype().items()}
    homes = {name: int(name[4]) for name in tensors if name.startswith("home")}
    layout = TensorFilePlanner(tensors, share=ReplicaShare(homes=homes)).layout()
    assert parse_layout(layout.header + bytes(layout.size - len(layout.header))).entries == layout.entries


def test_misaligned_tensor_is_refused():
    text = json.dumps(one()).encode()
    text = text.ljust((len(text) // 4 + 1) * 4 + 1)  # data begins at 1 modulo 4
    with pytest.raises(StateMismatch, match="not aligned to its element size"):
        parse_layout(raw_file(text, b"0000"))


GOOD = bytes(written({"a": torch.arange(6.0), "b/c": torch.ones(2, 2, dtype=torch.int8), "e": torch.empty(0, 3)}))


@settings(max_examples=examples(400))
@given(st.integers(0, 400), st.binary(min_size=1, max_size=12), st.integers(0, len(GOOD)))
def test_damage_is_refused_or_harmless(at, patch, end):
    file = bytearray(GOOD)
    file[at : at + len(patch)] = patch
    for damaged in (file, file[:end]):
        try:
            layout = parse_layout(damaged)
        except TierdError:
            continue
        for entry in layout.entries.values():
            assert tensor_view(damaged, entry).numel() * entry.dtype.itemsize == entry.nbytes


@settings(max_examples=examples(200))
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["dtype", "shape", "data_offsets", "a", "__metadata__"]), inner, max_size=4
            )
        ),
    )
)
def test_any_json_is_refused_or_harmless(value):
    file = bytearray(raw_file(value, b"0" * 16))
    try:
        layout = parse_layout(file)
    except TierdError:
        return
    for entry in layout.entries.values():
        tensor_view(file, entry)


@pytest.mark.parametrize("text", [b"[[]," * 50_000, b'{"a":[' + b"0," * 100_000 + b"0]}", b'{"' + b"a" * 400_000])
def test_memory_is_bounded_by_the_file(text):
    file = raw_file(text)
    tracemalloc.start()
    try:
        with pytest.raises(StateMismatch):
            parse_layout(file)
        assert tracemalloc.get_traced_memory()[1] < 64 * len(file)
    finally:
        tracemalloc.stop()
