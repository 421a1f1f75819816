"""Decode and check the messages that arrive on the spool's sockets.

Invariant: a request that is accepted names only valid runs, attempts, steps, ranks and ranges of chunks.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated, TypeVar, get_args

import msgspec
from msgspec import Meta

from tierd.core.errors import ConfigError, TierdError
from tierd.core.ids import CheckpointId, check_attempt, check_rank, check_run, check_step
from tierd.ipc.handoff_messages import AnyHanded, Persist, Recall
from tierd.ipc.messages import (
    AnyRequest,
    Attach,
    BacklogRequest,
    Candidates,
    DataLeakNotice,
    FellBack,
    Fetch,
    Hello,
    Launches,
    MakeRoom,
    NotesRequest,
    Pin,
    PreemptionNotice,
    Ranges,
    Remove,
    ReportRequest,
    Request,
    RestoreFinished,
    SaveGivenUp,
    Wait,
)

T = TypeVar("T")
_decoder: msgspec.json.Decoder[Hello | AnyRequest] = msgspec.json.Decoder(Hello | AnyRequest)
_handed: msgspec.json.Decoder[AnyHanded] = msgspec.json.Decoder(AnyHanded)
REQUESTS: dict[str, type[Request]] = {
    kind.__struct_config__.tag: kind for kind in get_args(Hello | AnyRequest)
}  # by `op`
HANDED: dict[str, type[Request]] = {kind.__struct_config__.tag: kind for kind in get_args(AnyHanded)}


class UnknownKind(msgspec.ValidationError):
    """A message whose `op` this version of tierd does not have; a later version may have it."""


class _Kind(msgspec.Struct):
    op: Annotated[str, Meta(pattern=r"^[a-z-]{1,32}\Z")]


_kind = msgspec.json.Decoder(_Kind)


def decode_request(line: bytes) -> Hello | AnyRequest:
    """Decode and check one request.

    Raises:
        UnknownKind: the request is of a later version.
        msgspec.DecodeError: the line is no request, or a name in it is not valid.
    """
    request = _decode(_decoder, REQUESTS, line)
    try:
        match request:
            case (
                ReportRequest(run=str(run))
                | BacklogRequest(run=str(run))
                | Attach(run=str(run))
                | Candidates(run=run)
                | Launches(run=run)
                | NotesRequest(run=run)
                | MakeRoom(run=run)
                | Remove(run=run)
            ):
                check_run(run)
            case Fetch(wanted=wanted) if not all(_in_order(runs) for runs in (wanted or {}).values()):
                raise ConfigError("runs of chunks are not in order, or one ends before it begins")
            case (
                Fetch(part=part)
                | Wait(part=part)
                | SaveGivenUp(part=part)
                | DataLeakNotice(part=part)
                | PreemptionNotice(part=part)
                | RestoreFinished(part=part)
            ):
                _check_checkpoint(part.checkpoint)
                check_rank(part.rank, part.world)
            case Pin(checkpoint=checkpoint) | FellBack(checkpoint=checkpoint):
                _check_checkpoint(checkpoint)
    except TierdError as error:
        raise msgspec.ValidationError(str(error)) from error
    return request


def decode_handed(packet: bytes) -> AnyHanded:
    """Decode and check one message of the hand-off socket; raises as `decode_request` does."""
    message = _decode(_handed, HANDED, packet)
    if isinstance(message, Persist | Recall):
        try:
            _check_checkpoint(message.part.checkpoint)
            check_rank(message.part.rank, message.part.world)
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
        raise UnknownKind(f"request {op!r} is not known to this version of tierd") from error


def _check_checkpoint(checkpoint: CheckpointId) -> None:
    check_run(checkpoint.run)
    check_attempt(checkpoint.attempt)
    check_step(checkpoint.step)
