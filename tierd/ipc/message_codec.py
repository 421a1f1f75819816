"""The hand-off socket's messages, and how messages and answers of both sockets are decoded and checked.

A message of the hand-off socket, on which a trainer gives its snapshots to the daemon, is one packet with its
descriptors, and so is an answer; `ipc/messages.py` has the rules of both sockets. An answer carries the daemon's
greeting, members, or an error, which the client raises again.

Invariant: a request that is accepted names only valid runs, attempts, steps, ranks and ranges of chunks.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta

from tierd.core import errors
from tierd.core.errors import DaemonUnavailable, TierdError
from tierd.core.ids import CheckpointId, PartId, check_attempt, check_rank, check_run, check_step
from tierd.core.manifest_codec import MAX_MANIFEST_SIZE
from tierd.ipc.messages import AnyRequest, Fetch, Hello, Index, Measured, Ranges, Request
from tierd.ipc.protocol import PROTOCOL, Peer

MAX_PACKET = 16 << 10  # bytes


class LendArena(Request, frozen=True, kw_only=True, tag="lend"):
    """Hand-off: the attached descriptor is the arena in which snapshots of `slot` will be. No answer."""

    slot: Annotated[int, Meta(ge=0, lt=64)]


class PersistSnapshot(Request, frozen=True, kw_only=True, tag="persist"):
    """Hand-off: the arena of `slot` holds a snapshot; commit it as a part of the spool.

    The arena begins with the tensor file. The attached descriptor holds the manifest, still without files, and then the
    state tree; `tensors`, `manifest` and `tree` are their sizes in bytes. Answer: `direct`, `recycled`, as in
    `commit.CommittedPart`.
    """

    part: PartId
    slot: Annotated[int, Meta(ge=0, lt=64)]
    tensors: Annotated[int, Meta(ge=1)]
    manifest: Annotated[int, Meta(ge=1, le=MAX_MANIFEST_SIZE)]
    tree: Annotated[int, Meta(ge=0)]
    blocked_s: Measured | None = None  # for which `save` blocked training; until now if it has not returned
    asked_s: Measured | None = None  # since `save` was called


class RecallSnapshot(Request, frozen=True, kw_only=True, tag="recall"):
    """Hand-off: return the snapshot that a dead trainer left in its arena, and the arena with it.

    Answer: `tensors`, `manifest`, `tree` as in `PersistSnapshot`, with both descriptors; the arena is then handed over
    as slot 0. Error: `ObjectNotFound`.
    """

    part: PartId


class DetachTrainer(Request, frozen=True, kw_only=True, tag="leave"):
    """Hand-off: this trainer ends in order, so no process will recall its snapshots. No answer."""


class LendSlots(Request, frozen=True, kw_only=True, tag="lend-slots"):
    """Hand-off: the attached descriptor is memory into which chunks of `part` are fetched from the tiers, until the
    connection ends.

    Answer: `manifest`, the size in bytes of the part's manifest, which the answer's descriptor holds. Errors: as
    `Fetch`, and nothing is quarantined.
    """

    part: PartId


class FillSlot(Request, frozen=True, kw_only=True, tag="fill"):
    """Hand-off: get a chunk as a tier stores it into the memory of `LendSlots`, `room` bytes from `begin` on.

    `file` and `index` are the chunk's place in the manifest of `LendSlots`. `readers` is how many clients of this node
    ask for the chunk, this one included, each of them soon. Answers come in any order, each with `begin`, `tier`, and
    `codec`, `size` and `digest` as in `StoredChunk`. The daemon verifies the chunk only if it has to decode it; it is
    then `raw`. Errors: as `Fetch`, and nothing is quarantined.
    """

    file: Index
    index: Index
    begin: Annotated[int, Meta(ge=0, le=1 << 40)]
    room: Annotated[int, Meta(ge=1, le=1 << 40)]
    readers: Annotated[int, Meta(ge=1, le=1 << 20)] = 1


AnyHandoff = Hello | LendArena | PersistSnapshot | RecallSnapshot | DetachTrainer | LendSlots | FillSlot


T = TypeVar("T")
_decoder: msgspec.json.Decoder[Hello | AnyRequest] = msgspec.json.Decoder(Hello | AnyRequest)
_handed: msgspec.json.Decoder[AnyHandoff] = msgspec.json.Decoder(AnyHandoff)
REQUESTS: dict[str, type[Request]] = {
    kind.__struct_config__.tag: kind for kind in get_args(Hello | AnyRequest)
}  # by `op`
HANDOFF_MESSAGES: dict[str, type[Request]] = {kind.__struct_config__.tag: kind for kind in get_args(AnyHandoff)}


class UnknownRequest(msgspec.ValidationError):
    """A message whose `op` this version of tierd does not have; a later version may have it."""


class _Kind(msgspec.Struct):
    op: Annotated[str, Meta(pattern=r"^[a-z-]{1,32}\Z")]


_kind = msgspec.json.Decoder(_Kind)


def decode_request(line: bytes) -> Hello | AnyRequest:
    """Decode and check one request.

    Raises:
        UnknownRequest: the request is of a later version.
        msgspec.DecodeError: the line is no request, or a name in it is not valid.
    """
    request = _checked(_decode(_decoder, REQUESTS, line))
    if isinstance(request, Fetch) and not all(map(_in_order, (request.wanted or {}).values())):
        raise msgspec.ValidationError("runs of chunks are not in order, or one ends before it begins")
    return request


def decode_handoff(packet: bytes) -> AnyHandoff:
    """Decode and check one message of the hand-off socket; raises as `decode_request` does."""
    return _checked(_decode(_handed, HANDOFF_MESSAGES, packet))


def _checked(message: T) -> T:
    """Check the names and numbers in a message: `run`, `checkpoint` and `part` mean the same in each."""
    part: PartId | None = getattr(message, "part", None)
    checkpoint: CheckpointId | None = part.checkpoint if part else getattr(message, "checkpoint", None)
    run: str | None = checkpoint.run if checkpoint else getattr(message, "run", None)
    try:
        if run is not None:
            check_run(run)
        if checkpoint is not None:
            check_attempt(checkpoint.attempt)
            check_step(checkpoint.step)
        if part is not None:
            check_rank(part.rank, part.world)
    except TierdError as error:
        raise msgspec.ValidationError(str(error)) from error
    return message


def _in_order(runs: Ranges) -> bool:
    # Ordered ranges bound the cost of a request by its part's number of chunks, however often it names them.
    ends = (0, *(end for _, end in runs))
    return all(end > first >= before for (first, end), before in zip(runs, ends, strict=False))


def _decode(decoder: msgspec.json.Decoder[T], kinds: Container[str], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error
    except msgspec.ValidationError as error:
        try:
            op = _kind.decode(data).op
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise error from None
        if op in kinds:
            raise
        raise UnknownRequest(f"request {op!r} is not known to this version of tierd") from error


def greeting(version: str) -> dict[str, Any]:
    return {"ok": True, "protocol": str(PROTOCOL), "version": version}


def parse_greeting(reply: dict[str, Any]) -> Peer:
    """Return the daemon that sent a greeting; one without a protocol number predates the numbers."""
    try:
        return msgspec.convert(reply, Hello).peer
    except (msgspec.ValidationError, UnicodeError):
        return Peer(None, "")


def read_member(reply: dict[str, Any], name: str, kind: type[T]) -> T:
    """Read a member of an answer. `DaemonUnavailable` means that the daemon is of another version."""
    try:
        return msgspec.convert(reply[name], kind, str_keys=True)
    except (KeyError, msgspec.ValidationError, UnicodeError) as error:
        raise DaemonUnavailable(
            f"the daemon is of another version of tierd ({type(error).__name__}: {error}): restart it with this version"
        ) from error


def error_reply(error: Exception) -> dict[str, Any]:
    """Encode an error with the name of its condition, so that the other side raises the same one."""
    condition_names = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return {"ok": False, "error": next(condition_names, type(error).__name__), "message": str(error)}


def raise_error(reply: dict[str, Any]) -> None:
    """Raise the error of an answer with ``ok: false``."""
    name, message = str(reply.get("error")), str(reply.get("message"))
    if name == "TimeoutError":
        raise TimeoutError(message)
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TierdError):
        raise kind(message)
    raise DaemonUnavailable(f"the daemon failed: {name}: {message}")
