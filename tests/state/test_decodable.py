"""What would not come back is not committed, and is named; and every tree that can be read is passed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.state_files import flatten, plan_layout
from support.training import fresh

from tierd.client.saving import slots
from tierd.core.errors import SaveFailed, StateRefused
from tierd.state import state_tree
from tierd.state.capture import DecodableText
from tierd.state.capturer import Capturer
from tierd.state.tensor_file import TensorFileLayout

EMPTY = plan_layout({})
NOT_BACK = "it would not come back from a checkpoint: "


def wrong(monkeypatch, kind, encoded):
    """Have values of one kind encoded so that nobody reads them again."""
    monkeypatch.setitem(state_tree.SCALARS, kind, lambda value: encoded)


def test_value_that_would_not_decode_to_itself_is_refused_by_its_path(local, spool, monkeypatch):
    state = {"a": {"b": [torch.ones(1), {1: 1j}]}, "c": [1, 2]}
    local.save(1, state).wait()
    wrong(monkeypatch, complex, {"$complex": [1]})
    for step in (2, 3):
        with pytest.raises(StateRefused, match=r'^state\["a"\]\["b"\]\[1\]\[1\]: it would not come back .* 1 parts'):
            local.save(step, state)
    assert [part.checkpoint.step for part in spool.parts()] == [1]
    monkeypatch.undo()
    local.save(4, state).wait()


def test_key_that_would_not_decode_to_itself_names_the_entry(local, spool, monkeypatch):
    wrong(monkeypatch, bytes, {"$unheard": "of"})
    with pytest.raises(StateRefused, match=r'^state\["b"\]: it would not come back .*unknown tag'):
        local.save(1, {"a": 1, "b": {b"k": torch.ones(1)}})
    assert spool.parts() == []


@pytest.mark.parametrize("attached", [False, True])
def test_save_fails_later_where_training_has_continued(local, spool, monkeypatch, attached):
    state = fresh()
    state["z"] = 1j
    if attached:
        local.attach(state["optimizer"])
        local.save(0, state).wait()
        state["optimizer"].zero_grad()
        state["model"](torch.randn(16, 8)).mean().backward()
        state["optimizer"].step()
        local.save(1, state).wait()
    else:
        state["long"] = [None, *range(300_000)]
    before = len(spool.parts())
    wrong(monkeypatch, complex, {"$complex": [1]})
    save = local.save(7, state)
    with pytest.raises(SaveFailed, match=r'state\["z"\]: it would not come back'):
        save.wait()
    assert isinstance(save.error(), StateRefused)
    assert len(spool.parts()) == before


def test_streamed_state_is_checked_to_decode_too(local, spool, monkeypatch):
    wrong(monkeypatch, complex, {"$complex": [1]})
    monkeypatch.setattr(slots, "available", lambda: 0)
    with pytest.raises(StateRefused, match=r'^state\["z"\]: it would not come back'):
        local.save(1, {"w": torch.ones(100), "z": 1j})
    assert spool.parts() == []


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"a": []},
        {"$": {"$x": 1}, "\ud800": (1, {2: None})},
        {"run": list(range(5000)), "floats": [0.5] * 5000, "mixed": [1, '],"', 2.5, None, True] * 900},
        {
            "z": torch.ones(2, 2, dtype=torch.complex64),
            "i": torch.ones(4, dtype=torch.float8_e8m0fnu),
            "e": torch.ones(0),
        },
        {"a": np.ones((2, 3)), "s": np.array(["a"]), "g": torch.Generator(), "n": np.float32(1)},
    ],
    ids=lambda state: ", ".join(state) or "nothing",
)
def test_decodable_state_passes_the_check(state):
    capturer = Capturer()
    for _ in range(2):
        capture = capturer.capture(state)
        capture.check(capture.tree())


TEXT = b'{"a":[1,2.5,null],"b":"x"}'


@pytest.mark.parametrize(
    "text",
    [
        b"",
        TEXT[:-1],
        TEXT + b" ",
        TEXT.replace(b'"b"', b'"c"'),
        TEXT.replace(b"2.5", b"2.5.1"),
        TEXT.replace(b"null", b"nul"),
        TEXT.replace(b"null", b"NaN"),
        TEXT.replace(b"[1", b"[,1"),
        TEXT.replace(b"1,", b"1,,"),
        TEXT.replace(b"]", b",]"),
        TEXT.replace(b"null", b"3,"),
    ],
)
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 1 << 16])
def test_every_byte_is_read(text, window):
    skeleton = DecodableText(['{"a":', ',"b":', "}"], EMPTY, window=window)
    skeleton.check(TEXT)
    with pytest.raises(StateRefused, match=f"^state.*{NOT_BACK}"):
        skeleton.check(text)


def test_a_header_that_cannot_be_read_is_refused():
    with pytest.raises(StateRefused, match=f"^state: {NOT_BACK}tensors.safetensors: "):
        DecodableText(["{}"], TensorFileLayout(b"\2\0\0\0\0\0\0\0[]", 10, {})).check(b"{}")


def test_a_tensor_that_is_not_in_the_file_is_refused():
    flat = flatten({"a": {"b": torch.ones(1)}})
    with pytest.raises(StateRefused, match=r'^state\["a"\]: .*the tensor file has no'):
        DecodableText([flat.tree.decode()], EMPTY).check(flat.tree)


values = st.recursive(
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text('a[],"\\') | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=30,
)


@given(values, st.integers(1, 30))
def test_checking_in_pieces_equals_checking_at_once(value, window):
    text = json.dumps(value, separators=(",", ":"))
    DecodableText(['{"a":', "}"], EMPTY, window=window).check(f'{{"a":{text}}}'.encode())
