"""What client and daemon say to each other over the spool's unix sockets, in JSON objects.

Law: bytes of checkpoints never cross a socket, only names and descriptors. On the control socket a request is one line;
the answer is any number of `{"working": true}` lines, at most `HEARTBEAT` seconds apart, then one line with `ok`. On
the hand-off socket the daemon greets with `ok`; a message is one packet with its descriptors, and so is an answer.
Training may wait for `Persist`, `MakeRoom` and `Candidates`: from protocol 1.1 on, `BEAT` holds for these.

Both sockets exchange protocol numbers first (`core/protocol`). On the control socket the client begins with `Hello`,
and the daemon answers with its own number. On the hand-off socket the daemon's greeting has its number, and the
client's first packet is `Hello`, without an answer. A client that sends no `Hello` is older than the numbers; it is
answered all the same.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta

from tierd.core import errors
from tierd.core.errors import ConfigError, DaemonUnavailable, TierdError
from tierd.core.ids import CheckpointId, PartId, check_attempt, check_rank, check_run, check_step
from tierd.core.manifest import MetricName
from tierd.core.protocol import PROTOCOL, PROTOCOL_TEXT, VERSION_TEXT, Peer, Protocol
from tierd.core.seal import MAX_MANIFEST_SIZE

HEARTBEAT = 5.0  # seconds
BEAT = 0.25  # seconds
EXIT_HELD = 7  # how a daemon ends that finds another one on its spool: whoever started it can use that one
MAX_REQUEST = 64 << 10  # bytes
MAX_PACKET = 16 << 10  # bytes
MAX_REPLY = 64 << 20  # bytes
MAX_PAUSE = 366 * 86400.0  # seconds

Index = Annotated[int, Meta(ge=0, le=1 << 32)]  # of a chunk in its file
MAX_TOLD = 1000  # characters of a reason
MOST_TOLD = 16  # of them in a request
Told = Annotated[str, Meta(max_length=MAX_TOLD)]
Ranges = tuple[tuple[Index, Index], ...]  # (first, end) of runs of chunks, `end` not among them


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", omit_defaults=True):
    """The base of every request.

    Invariant: a member that has its default is not sent, and an unknown member is ignored, because client and daemon
    may be of different versions. A member that is added later has a default that means what its absence meant.
    """


class Hello(Request, frozen=True, kw_only=True, tag="hello"):
    """The client's protocol number and its version of tierd. Answer, on the control socket alone: as `greeting`.

    Error: `VersionMismatch`, with the same members, after which the daemon closes the connection.
    """

    protocol: Annotated[str, Meta(pattern=PROTOCOL_TEXT)]
    version: Annotated[str, Meta(pattern=VERSION_TEXT)]

    @property
    def peer(self) -> Peer:
        return Peer(Protocol.parse(self.protocol), self.version)


class Attach(Request, frozen=True, kw_only=True, tag="attach"):
    """A trainer is here; the connection's end says that it is gone. Answer: `pid`, `tiers` (name -> url), `keep_last`
    (of the spool).

    `run`: which it saves. While a trainer does not say so, every run in the spool counts as having a trainer.
    """

    run: str | None = None


class Status(Request, frozen=True, kw_only=True, tag="status"):
    """How the daemon does. Answer: `status`."""


class Report(Request, frozen=True, kw_only=True, tag="report"):
    """Every checkpoint of one run (or of all), where it lies, and retention's verdicts. Answer: `report`."""

    run: str | None = None


class Candidates(Request, frozen=True, kw_only=True, tag="candidates"):
    """What is there to restore of a run, from a fresh look at every tier. Answer: `sight`, as `core/sight.Sight`.

    `metrics`: those whose values are wanted.
    """

    run: str
    metrics: Annotated[tuple[MetricName, ...], Meta(max_length=8)] = ()


class Fetch(Request, frozen=True, kw_only=True, tag="fetch"):
    """Make the spool's copy of a part whole from the tiers, and hold it until the connection ends.

    Answer: `tiers`, the names of those that chunks came from. Errors: `CorruptChunk` when every copy is proven bad,
    `StoreUnavailable` when a copy that might be good cannot be reached. Until then each `working` line has `done` and
    `total`, in raw bytes, and `tiers`, once that is known.

    With `wanted`, by file, only these chunks are made right. A part that the spool lacks is not committed by that: they
    lie where it is put together (`Spool.fetching`), beside its manifest as `DRAFT_NAME`, until the connection ends. No
    file at all brings the manifest alone. Error: `ConfigError` for a chunk that the part does not have.
    """

    part: PartId
    wanted: dict[Annotated[str, Meta(max_length=1024)], Ranges] | None = None


class Wait(Request, frozen=True, kw_only=True, tag="wait"):
    """Answer when a tier holds the verified part; `StoreRefused` when it says no, `TimeoutError` when time is up.
    `needed`: a restore elsewhere needs it, so it is sent whatever retention says."""

    part: PartId
    tier: str
    timeout_s: float | None = None
    needed: bool = False


class Backlog(Request, frozen=True, kw_only=True, tag="backlog", omit_defaults=True):
    """What some tier still lacks, and whether the tiers take it. Answer: `backlog`, as `core/remaining.Backlog`.

    `hurry`: first wait for what trainers that died had handed over, look at every place afresh, and end every backoff.
    `run`: also look at this run, of which the spool may hold nothing yet.
    """

    hurry: bool = False
    run: str | None = None


class Pin(Request, frozen=True, kw_only=True, tag="pin"):
    """Pin a checkpoint in the spool and on every tier, or unpin it. Answer: nothing more than `ok`."""

    checkpoint: CheckpointId
    pinned: bool


class Failed(Request, frozen=True, kw_only=True, tag="failed"):
    """A trainer gave a save up; the daemon tells of it, unless it was its own doing. Answer: nothing more than `ok`."""

    part: PartId
    why: Told


class FellBack(Request, frozen=True, kw_only=True, tag="fell-back"):
    """A restore gives `checkpoint`, and passed over newer ones: which, and why. Answer: nothing more than `ok`."""

    checkpoint: CheckpointId
    skipped: Annotated[tuple[Told, ...], Meta(min_length=1, max_length=MOST_TOLD)]


class Pause(Request, frozen=True, kw_only=True, tag="pause"):
    """Leave the tiers as they are for `for_s` seconds, or until resumed. Answer: `paused`, as in `status`."""

    for_s: Annotated[float, Meta(gt=0, le=MAX_PAUSE)] | None = None


class Launches(Request, frozen=True, kw_only=True, tag="launches"):
    """The launches of `run` that save at the same time. Answer: `launches`, each a `core/launches.Rival`."""

    run: str


class MakeRoom(Request, frozen=True, kw_only=True, tag="make-room"):
    """A save of `run` met a full disk: give up verified local copies until `size_bytes` fit. It takes seconds at most.

    `quota`: the user's quota is used up, so what the file system has free says nothing. Answer: `freed_bytes`, and
    `enough`, whether a second try is worth it.
    """

    run: str
    size_bytes: Annotated[int, Meta(ge=0, le=1 << 60)]
    quota: bool = False


class Remove(Request, frozen=True, kw_only=True, tag="remove"):
    """Delete a whole run from the spool, because a person said so. Answer: nothing more than `ok`.

    Error: `ConfigError` while a trainer of that run is attached, or somebody restores it.
    """

    run: str


class Resume(Request, frozen=True, kw_only=True, tag="resume"):
    """Go on. Answer: `paused`, null."""


class Lend(Request, frozen=True, kw_only=True, tag="lend"):
    """Hand-off: the attached descriptor is the arena that snapshots of `slot` will lie in. No answer."""

    slot: Annotated[int, Meta(ge=0, lt=64)]


class Persist(Request, frozen=True, kw_only=True, tag="persist"):
    """Hand-off: the arena of `slot` holds a snapshot: make it a part of the spool.

    The arena begins with the tensor file, `tensors` bytes. The attached descriptor holds the manifest, still without
    files, and the state tree: `manifest` and `tree` bytes. Answer: `direct`, `recycled`, as `commit.Written` has them.
    """

    part: PartId
    slot: Annotated[int, Meta(ge=0, lt=64)]
    tensors: Annotated[int, Meta(ge=1)]
    manifest: Annotated[int, Meta(ge=1, le=MAX_MANIFEST_SIZE)]
    tree: Annotated[int, Meta(ge=0)]


class Recall(Request, frozen=True, kw_only=True, tag="recall"):
    """Hand-off: give the snapshot back that a trainer which died left in its arena, and the arena with it.

    Answer: `tensors`, `manifest`, `tree` as in `Persist`, with both descriptors; the arena is then lent as slot 0.
    Error: `ObjectNotFound`.
    """

    part: PartId


class Leave(Request, frozen=True, kw_only=True, tag="leave"):
    """Hand-off: this trainer ends in order; nobody will recall what it lent. No answer."""


T = TypeVar("T")
AnyHanded = Hello | Lend | Persist | Recall | Leave
AnyRequest = (
    Attach
    | Status
    | Report
    | Candidates
    | Fetch
    | Wait
    | Backlog
    | Pin
    | Failed
    | FellBack
    | Launches
    | Pause
    | Resume
    | MakeRoom
    | Remove
)
_decoder: msgspec.json.Decoder[Hello | AnyRequest] = msgspec.json.Decoder(Hello | AnyRequest)
_handed: msgspec.json.Decoder[AnyHanded] = msgspec.json.Decoder(AnyHanded)
REQUESTS: dict[str, type[Request]] = {
    kind.__struct_config__.tag: kind for kind in get_args(Hello | AnyRequest)
}  # by `op`
HANDED: dict[str, type[Request]] = {kind.__struct_config__.tag: kind for kind in get_args(AnyHanded)}


class UnknownKind(msgspec.ValidationError):
    """A message whose `op` this version of tierd does not have; a later one may."""


class _Kind(msgspec.Struct):
    op: Annotated[str, Meta(pattern=r"^[a-z-]{1,32}\Z")]


_kind = msgspec.json.Decoder(_Kind)


def encode_line(message: object) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode_request(line: bytes) -> Hello | AnyRequest:
    """Read one request.

    Raises:
        UnknownKind: a request of a later version.
        msgspec.DecodeError: not a request, or a name in it is none.
    """
    request = _decode(_decoder, REQUESTS, line)
    try:
        match request:
            case (
                Report(run=str(run))
                | Backlog(run=str(run))
                | Attach(run=str(run))
                | Candidates(run=run)
                | Launches(run=run)
                | MakeRoom(run=run)
                | Remove(run=run)
            ):
                check_run(run)
            case Fetch(wanted=wanted) if not all(_in_order(runs) for runs in (wanted or {}).values()):
                raise ConfigError("runs of chunks are not in order, or one ends before it begins")
            case Fetch(part=part) | Wait(part=part) | Failed(part=part):
                _check_checkpoint(part.checkpoint)
                check_rank(part.rank, part.world)
            case Pin(checkpoint=checkpoint) | FellBack(checkpoint=checkpoint):
                _check_checkpoint(checkpoint)
    except TierdError as error:
        raise msgspec.ValidationError(str(error)) from error
    return request


def decode_handed(packet: bytes) -> AnyHanded:
    """Read one message of the hand-off socket; raises as `decode_request`."""
    message = _decode(_handed, HANDED, packet)
    if isinstance(message, Persist | Recall):
        try:
            _check_checkpoint(message.part.checkpoint)
            check_rank(message.part.rank, message.part.world)
        except TierdError as error:
            raise msgspec.ValidationError(str(error)) from error
    return message


def _in_order(runs: Ranges) -> bool:
    # So that what a request costs is bounded by its part's chunks, however often it names them.
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


def greeting(version: str) -> dict[str, Any]:
    """What the daemon says of itself, where `version` is its version of tierd."""
    return {"ok": True, "protocol": str(PROTOCOL), "version": version}


def greeted(reply: dict[str, Any]) -> Peer:
    """The daemon that sent `reply`, a greeting; one without a number is older than the numbers."""
    try:
        return msgspec.convert(reply, Hello).peer
    except (msgspec.ValidationError, UnicodeError):
        return Peer(None, "")


def read_member(reply: dict[str, Any], name: str, kind: type[T]) -> T:
    """Read a member of an answer.

    Raises:
        DaemonUnavailable: a daemon of another version answers otherwise.
    """
    try:
        return msgspec.convert(reply[name], kind, str_keys=True)
    except (KeyError, msgspec.ValidationError, UnicodeError) as error:
        raise DaemonUnavailable(
            f"the daemon is of another version of tierd ({type(error).__name__}: {error}): restart it with this version"
        ) from error


def error_reply(error: Exception) -> dict[str, Any]:
    """An error as an answer: by the name of its condition, so that the other side raises the same one."""
    known = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return {"ok": False, "error": next(known, type(error).__name__), "message": str(error)}


def raise_error(reply: dict[str, Any]) -> None:
    """Raise what an answer with ``ok: false`` says."""
    name, message = str(reply.get("error")), str(reply.get("message"))
    if name == "TimeoutError":
        raise TimeoutError(message)
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TierdError):
        raise kind(message)
    raise DaemonUnavailable(f"the daemon failed: {name}: {message}")
