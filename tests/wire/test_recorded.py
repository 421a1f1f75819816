"""What earlier versions sent is understood today, and what they read is still sent. See README.md here."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from wire.record import V1, messages

from tierd.cli.commands.status_commands import SECTIONS
from tierd.core import errors
from tierd.core.run_report import Report
from tierd.core.timeline.run_view import RunView
from tierd.ipc import message_codec
from tierd.ipc import messages as wire

HERE = Path(__file__).parent
REQUESTS = sorted(HERE.glob("v?/*/*.request"))
REPLIES = sorted(HERE.glob("v?/*/*.reply"))
# `status` of before protocol numbers has members that were renamed once, before the first release: README.md says so.
ANSWERS = [path for path in REPLIES if path.parent.name != "errors" and path != V1.parent / "v0/control/status.reply"]
KINDS = [("control", op) for op in message_codec.REQUESTS] + [("handoff", op) for op in message_codec.HANDOFF_MESSAGES]


def name(path: Path) -> str:
    return path.relative_to(HERE).as_posix()


def of(op: str, paths: list[Path]) -> list[Path]:
    return [path for path in paths if path.name.split(".")[0] == op]


def last(path: Path) -> dict[str, Any]:
    """The answer, after the lines that say how far it is."""
    return json.loads(path.read_bytes().splitlines()[-1])


@pytest.mark.parametrize(("where", "op"), KINDS)
def test_every_kind_of_message_is_recorded(where, op):
    found = [path for path in of(op, REQUESTS) if path.parent == V1 / where]
    assert found, f"{op}: no recorded request; see tests/wire/README.md"


@pytest.mark.parametrize("path", REQUESTS, ids=name)
def test_recorded_request_keeps_its_meaning(path):
    sent = json.loads(path.read_bytes())
    read = message_codec.decode_handoff if path.parent.name == "handoff" else message_codec.decode_request
    if sent["op"] not in message_codec.REQUESTS | message_codec.HANDOFF_MESSAGES:
        with pytest.raises(message_codec.UnknownRequest, match=sent["op"]):
            read(path.read_bytes())
        return
    meant = json.loads(wire.encode_line(read(path.read_bytes())))
    set_now = {member: value for member, value in sent.items() if value is not None and value is not False}
    assert {member: meant.get(member) for member in set_now} == set_now


# What today's client does with the answers that it reads more of than `ok`.
READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "hello": message_codec.parse_greeting,
    "greeting": message_codec.parse_greeting,
    "attach": lambda reply: sorted(reply["tiers"].values()),
    "candidates": lambda reply: message_codec.read_member(reply, "sight", RunView),
    "report": lambda reply: message_codec.read_member(reply, "report", Report),
    "status": lambda reply: [list(section(reply["status"])) for section in SECTIONS],
    "fetch": lambda reply: [*reply["tiers"]],
    "notes": lambda reply: (
        message_codec.read_member(reply, "notes", dict[str, bytes]),
        message_codec.read_member(reply, "names", list[str]) if "names" in reply else None,
    ),
    "pause": lambda reply: reply["paused"],
    "resume": lambda reply: reply["paused"],
    "persist": lambda reply: (bool(reply["direct"]), bool(reply["recycled"])),
    "recall": lambda reply: (reply["tensors"], reply["manifest"], reply["tree"]),
}


@pytest.mark.parametrize("path", ANSWERS, ids=name)
def test_a_recorded_answer_is_read(path):
    reply = last(path)
    if not reply["ok"]:
        with pytest.raises(errors.TierdError):
            message_codec.raise_error(reply)
        return
    read = READERS.get(path.name.split(".")[0])
    if read:
        read(reply)


@pytest.mark.parametrize("path", [path for path in REPLIES if path.parent.name == "errors"], ids=name)
def test_recorded_error_is_raised_with_its_class(path):
    with pytest.raises(errors.TierdError) as raised:
        message_codec.raise_error(last(path))
    assert type(raised.value).__name__ == path.name.split(".")[0]


def test_every_error_is_recorded():
    members = inspect.getmembers(errors, inspect.isclass)
    kinds = {name for name, kind in members if issubclass(kind, errors.TierdError)}
    assert kinds == {path.name.split(".")[0] for path in (V1 / "errors").iterdir()}, "see tests/wire/README.md"


# -- the other direction: today's daemon, and a client of then --------------------------------------------------------


def shape(value: Any, at: str = "") -> set[str]:
    """The members in an answer, each with the kind of its value: null can become anything, and a list be empty."""
    match value:
        case dict():
            return {one for member, inner in value.items() for one in shape(inner, f"{at}.{member}")}
        case list():
            return {one for inner in value for one in shape(inner, f"{at}[]")} | {f"{at}: list"}
        case None:
            return {f"{at}: null"}
        case bool() | str():
            return {f"{at}: {type(value).__name__}"}
    return {f"{at}: number"}


@pytest.fixture(scope="module")
def today() -> dict[str, bytes]:
    return messages()


@pytest.mark.parametrize("path", ANSWERS, ids=name)
def test_recorded_answer_keeps_its_members(path, today):
    now = shape(json.loads(today[f"{path.parent.name}/{path.name}"].splitlines()[-1]))
    members = {one.split(":")[0] for one in now}
    for one in sorted(shape(last(path)) - now):
        member, kind = one.split(": ")
        assert member in members, f"{member} is missing, and clients of then read it"
        nullable = kind == "null" or f"{member}: null" in now
        assert nullable or kind == "list", f"{member} is no {kind} any more"


# Members that were added since, and that a daemon which does not know them ignores without harm.
ADDED = {"handoff/persist.request": frozenset({"asked_s", "blocked_s"})}


@pytest.mark.parametrize("path", [path for path in REQUESTS if path.parts[-3] == "v1"], ids=name)
def test_request_of_today_equals_the_recorded_request(path, today):
    """A daemon one minor version behind knows these members, and perhaps no others."""
    sent = json.loads(today[f"{path.parent.name}/{path.name}"])
    added = ADDED.get(f"{path.parent.name}/{path.name}", frozenset())
    assert sent.keys() == json.loads(path.read_bytes()).keys() | added
