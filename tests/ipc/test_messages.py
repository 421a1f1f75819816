"""The socket's language: requests come through as they were sent or not at all, errors as what they were."""

from __future__ import annotations

import inspect
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inventories import checkpoint, part

from tierd.core import errors
from tierd.core.errors import DaemonUnavailable, TierdError
from tierd.ipc import message_codec, messages
from tierd.ipc.protocol import PROTOCOL

OWNER = checkpoint(1, 100)
PART = part(OWNER, 1, 2)
ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, TierdError)]


@pytest.mark.parametrize(
    "request_",
    [
        messages.Attach(),
        messages.StatusRequest(),
        messages.ReportRequest(),
        messages.ReportRequest(run="r"),
        messages.CandidatesRequest(run="r"),
        messages.CandidatesRequest(run="r", metrics=("val/loss", "ä")),
        messages.Fetch(part=PART),
        messages.Fetch(part=PART, wanted={}),
        messages.Fetch(part=PART, wanted={"a/b": ((0, 1), (5, 9)), ".metadata": ()}),
        messages.Wait(part=PART, tier="s3"),
        messages.Wait(part=PART, tier="s3", timeout_s=1.5),
        messages.Pin(checkpoint=OWNER, pinned=False),
        messages.SaveGivenUp(part=PART, why="no room"),
        messages.FallbackNotice(
            checkpoint=OWNER, skipped=("\U0001f4a9" * messages.MAX_REASON,) * messages.MOST_REASONS
        ),
        messages.Pause(),
        messages.Pause(for_s=7200.0),
        messages.Resume(),
    ],
    ids=repr,
)
def test_request_is_a_single_line_and_decodes_to_itself(request_):
    line = messages.encode_line(request_)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert len(line) < messages.MAX_REQUEST
    assert message_codec.decode_request(line) == request_


def fetch(**changes) -> bytes:
    """A fetch request with something else in its part or checkpoint."""
    found = json.loads(messages.encode_line(messages.Fetch(part=PART)))
    for name, value in changes.items():
        (found["part"]["checkpoint"] if name in found["part"]["checkpoint"] else found["part"])[name] = value
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    "runs",
    [((1, 1),), ((5, 2),), ((-1, 2),), ((0, 1 << 40),), ((0,),), (("0", 1),), ((0, 2), (1, 3)), ((4, 5), (0, 1))],
)
def test_a_run_of_chunks_that_is_none_is_no_request(runs):
    found = json.loads(messages.encode_line(messages.Fetch(part=PART))) | {"wanted": {"a": runs}}
    with pytest.raises(msgspec.ValidationError):
        message_codec.decode_request(json.dumps(found).encode())


def test_good_request_differs_from_the_hostile_requests_only_in_content():
    assert message_codec.decode_request(fetch()) == messages.Fetch(part=PART)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"op": "reboot"}',
        b'{"op": "attach"',
        b'{"op": "candidates"}',
        b'{"op": "candidates", "run": 7}',
        b'{"op": "candidates", "run": "../x"}',
        b'{"op": "report", "run": "/etc"}',
        b'{"op": "wait", "part": null, "tier": "s3"}',
        b'{"op": "pin", "checkpoint": {"run": "r", "attempt": "a", "step": 1}, "pinned": true}',
        b'{"op": "pin", "checkpoint": {"run": "r"}, "pinned": true}',
        b'{"op": "pause", "for_s": 0}',
        b'{"op": "pause", "for_s": -1}',
        b'{"op": "pause", "for_s": 1e9}',
        b'{"op": "pause", "for_s": "2h"}',
        fetch(run="../../etc"),
        fetch(run="a/b"),
        fetch(run=""),
        fetch(attempt="../x"),
        fetch(attempt=OWNER.attempt + "\n"),
        fetch(step=-1),
        fetch(step=10**12),
        fetch(rank=2),
        fetch(rank=-1),
        fetch(world=0),
        fetch(world=100_000),
    ],
)
def test_garbage_and_names_that_could_lead_elsewhere_are_no_requests(line):
    with pytest.raises(msgspec.DecodeError):
        message_codec.decode_request(line)


# -- one minor version apart ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "members"),
    [
        (messages.ReportRequest(), "op"),
        (messages.CandidatesRequest(run="r"), "op run"),
        (messages.Fetch(part=PART), "op part"),
        (messages.Wait(part=PART, tier="s3"), "op part tier"),
        (messages.Pause(), "op"),
    ],
    ids=repr,
)
def test_a_member_that_is_not_set_is_not_sent(request_, members):
    """Because a daemon that does not know the member may refuse it."""
    assert set(json.loads(messages.encode_line(request_))) == set(members.split())


@pytest.mark.parametrize(
    ("message", "known"),
    [
        (b'{"op": "attach", "as": "root"}', messages.Attach()),
        (b'{"op": "candidates", "run": "r", "step": 1}', messages.CandidatesRequest(run="r")),
        (fetch(later=[1]), messages.Fetch(part=PART)),
    ],
)
def test_a_member_that_is_not_known_is_ignored(message, known):
    assert message_codec.decode_request(message) == known


def test_a_member_of_the_hand_off_that_is_not_known_is_ignored():
    assert message_codec.decode_handoff(b'{"op": "lend", "slot": 3, "pages": "huge"}') == message_codec.LendArena(
        slot=3
    )


@given(st.binary(max_size=100))
def test_any_bytes_are_a_request_or_refused_as_none(line):
    try:
        assert isinstance(message_codec.decode_request(line), messages.Request)
    except msgspec.DecodeError as error:
        assert str(error)  # what the daemon logs before it drops the connection


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_error_is_raised_on_the_other_side_with_its_class_and_text(kind):
    line = messages.encode_line(message_codec.error_reply(kind("bucket 'x': no\nsuch ü")))
    reply = msgspec.json.decode(line)
    assert reply["ok"] is False
    with pytest.raises(TierdError) as caught:
        message_codec.raise_error(reply)
    assert type(caught.value) is kind
    assert str(caught.value) == "bucket 'x': no\n  such ü"  # also after two ways through what makes it safe to look at


def test_every_condition_the_design_names_is_covered():
    assert len(ERRORS) >= 16
    assert {"StoreUnavailable", "CorruptChunk", "SpoolFull"} <= {kind.__name__ for kind in ERRORS}


def test_a_timeout_is_pythons_own():
    with pytest.raises(TimeoutError, match="not within 3 s"):
        message_codec.raise_error(message_codec.error_reply(TimeoutError("not within 3 s")))


@pytest.mark.parametrize(
    "reply", [{}, {"error": "KeyError"}, {"error": None}, {"error": "annotations"}, {"error": "Any"}]
)
def test_an_error_that_is_none_of_ours_says_that_the_daemon_failed(reply):
    with pytest.raises(DaemonUnavailable, match="the daemon failed"):
        message_codec.raise_error({"message": "x", **reply})


@pytest.mark.parametrize("read", [message_codec.decode_request, message_codec.decode_handoff])
def test_a_message_that_is_nested_too_deeply_is_none(read):
    with pytest.raises(msgspec.DecodeError):
        read(b'{"x":' + b"[" * 8000 + b',"op":"status"}')


@pytest.mark.parametrize(
    "reply", [{}, {"protocol": None, "version": "1"}, {"protocol": "1", "version": "1"}, {"version": "\ud800"}]
)
def test_a_greeting_without_a_protocol_number_is_of_before_the_numbers(reply):
    assert message_codec.parse_greeting({"ok": True, **reply}).protocol is None


def test_greeting_decodes_to_its_protocol_and_version():
    assert message_codec.parse_greeting({**message_codec.greeting("0.2.0"), "later": 1}) == (PROTOCOL, "0.2.0")
