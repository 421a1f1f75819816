"""The requests of the control socket, and the rules of both unix sockets of the spool. All messages are JSON objects.

`ipc/message_codec.py` has the messages of the hand-off socket, the checks of both, and the answers.

Invariant: no byte of a checkpoint crosses a socket, only names and descriptors.

On the control socket a request is one line. The answer is any number of `{"working": true}` lines, at most `HEARTBEAT`
seconds apart, then one line with `ok`. On the hand-off socket a message is one packet with its descriptors, and so is
an answer. Training may wait for `PersistSnapshot`, `MakeRoom` and `CandidatesRequest`, so the daemon sends a sign of
life for these every `BEAT` seconds.

Both sockets exchange protocol numbers first (`ipc/protocol`). On the control socket the client begins with `Hello`, and
the daemon answers with its own number. On the hand-off socket the daemon greets with `ok` and its number, and the
client's first packet is `Hello`, without an answer. A client that sends no `Hello` predates the numbers; the daemon
still answers it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import MetricName
from tierd.ipc.protocol import PROTOCOL_TEXT, VERSION_TEXT, Peer, Protocol

HEARTBEAT = 5.0  # seconds
BEAT = 0.25  # seconds
# Exit status of a daemon whose spool another daemon holds; the process that started it can use that daemon.
EXIT_HELD = 7
EXIT_BAD_INPUT = 3  # of one that cannot use its configuration, which the process that started it chose
DAEMON_LOG = "daemon.log"  # in the spool's `.tierd/`: the standard error of a daemon that a trainer started
MAX_REQUEST = 64 << 10  # bytes
MAX_NOTE = 40_000  # bytes; 53,336 in base64, which fits into a request
MAX_REPLY = 64 << 20  # bytes
MAX_PAUSE = 366 * 86400.0  # seconds

Index = Annotated[int, Meta(ge=0, le=1 << 32)]  # of a chunk in its file
MAX_REASON = 1000  # characters of a reason
MOST_REASONS = 16  # reasons in a request
MAX_NOTE = 1000  # characters of a pin's note
Reason = Annotated[str, Meta(max_length=MAX_REASON)]
Measured = Annotated[float, Meta(ge=0, le=1e9)]  # seconds
Ranges = tuple[tuple[Index, Index], ...]  # (first, end) of ranges of chunks; `end` is exclusive


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", omit_defaults=True):
    """The base of every request.

    Invariant: a member that has its default is not sent, and an unknown member is ignored, because client and daemon
    may be of different versions. A member that is added later has a default with the meaning of its absence.
    """


class Hello(Request, frozen=True, kw_only=True, tag="hello"):
    """The client's protocol number and its version of tierd. Answer, on the control socket only: as `greeting`.

    Error: `VersionMismatch`, with the same members, after which the daemon closes the connection.
    """

    protocol: Annotated[str, Meta(pattern=PROTOCOL_TEXT)]
    version: Annotated[str, Meta(pattern=VERSION_TEXT)]

    @property
    def peer(self) -> Peer:
        return Peer(Protocol.parse(self.protocol), self.version)


class Attach(Request, frozen=True, kw_only=True, tag="attach"):
    """A trainer attaches; the connection's end detaches it.

    Answer: `pid`, `tiers` (name -> url), `keep_last` (of the spool), and `refused`: why the daemon does not take tiers
    of `to`, with the way out; absent if it has all of them.
    """

    # the run that the trainer saves. Until the trainer names its run, every run in the spool counts as having a
    # trainer.
    run: str | None = None
    # the URLs of the tiers that the trainer names, in order of preference. A daemon that a trainer started takes those
    # that it lacks. Empty: the trainer names none.
    to: Annotated[tuple[Annotated[str, Meta(max_length=4096)], ...], Meta(max_length=64)] = ()


class StatusRequest(Request, frozen=True, kw_only=True, tag="status"):
    """The daemon's state. Answer: `status`."""


class ReportRequest(Request, frozen=True, kw_only=True, tag="report"):
    """Every checkpoint of one run (or of all runs), its places, and retention's verdicts. Answer: `report`."""

    run: str | None = None


class RunsRequest(Request, frozen=True, kw_only=True, tag="runs"):
    """Every checkpoint that the daemon knows, without a new observation. Answer: `runs`, as HTTP's `/runs` has it."""


class CandidatesRequest(Request, frozen=True, kw_only=True, tag="candidates"):
    """The checkpoints of a run that a restore can use, from a new listing of every tier.

    Answer: `sight`, in the form of `core/timeline/run_view`.
    """

    run: str
    metrics: Annotated[tuple[MetricName, ...], Meta(max_length=8)] = ()


class Fetch(Request, frozen=True, kw_only=True, tag="fetch"):
    """Make the spool's copy of a part whole from the tiers, and hold it until the connection ends.

    Answer: `tiers`, the names of the tiers that provided chunks, and `defects`, if any: what is corrupt on others.
    Errors: `CorruptChunk` if every copy is proven bad, `StoreUnavailable` if a copy that might be good cannot be
    reached. Each `working` line before the answer has `done` and `total`, in raw bytes, and `tiers` once known.

    With `wanted`, only these chunks are fetched. This does not commit a part that the spool lacks. Its chunks are kept
    in `Spool.fetch_directory`, next to its manifest as `DRAFT_NAME`, until the connection ends. An empty `wanted`
    fetches the manifest only. Error: `ConfigError` for a chunk that the part does not have.
    """

    part: PartId
    wanted: dict[Annotated[str, Meta(max_length=1024)], Ranges] | None = None


class Wait(Request, frozen=True, kw_only=True, tag="wait"):
    """Wait until a tier holds the verified part. Answer: `ok` only.

    Errors: `StoreRefused` if the tier refuses, `TimeoutError` if the time is up. While the part is sent, each `working`
    line before the answer has `done` and `total`, in raw bytes.
    """

    part: PartId
    tier: str
    timeout_s: float | None = None
    needed: bool = False  # a restore on another node needs the part, so it is flushed regardless of retention


class BacklogRequest(Request, frozen=True, kw_only=True, tag="backlog", omit_defaults=True):
    """The parts that some tier still lacks, and whether the tiers accept them.

    Answer: `backlog`, in the form of `core/planning/unflushed_parts.UnflushedParts`.
    """

    # First wait for the snapshots that dead trainers had handed over, observe every place again, and end every backoff.
    hurry: bool = False
    run: str | None = None  # also observe this run, of which the spool may hold nothing yet
    newest: bool = False  # the node ends soon: send the newest checkpoints first, as for `PreemptionNotice`


class Pin(Request, frozen=True, kw_only=True, tag="pin"):
    """Pin a checkpoint in the spool and on every tier, with a person's note, or remove the pin. Answer: `ok` only."""

    checkpoint: CheckpointId
    pinned: bool
    note: Annotated[str, Meta(max_length=MAX_NOTE)] = ""


class TrainerNotice(Request, frozen=True, kw_only=True):
    """The base of what a trainer reports of the step of `part`. Answer: `ok` only."""

    part: PartId
    why: Reason


class SaveGivenUp(TrainerNotice, frozen=True, kw_only=True, tag="failed"):
    """A trainer gave a save up. The daemon reports the failure, unless the daemon caused it."""


class DataLeakNotice(TrainerNotice, frozen=True, kw_only=True, tag="leaked"):
    """A trainer found samples that repeat or belong to the validation split."""


class PreemptionNotice(TrainerNotice, frozen=True, kw_only=True, tag="preempted"):
    """A trainer got notice that its node or job ends, and saves at this step. For the next ten minutes the daemon sends
    the newest checkpoints first, and an older one that is under way gives way.
    """


class FallbackNotice(Request, frozen=True, kw_only=True, tag="fell-back"):
    """A restore loads `checkpoint` and skipped newer ones, each with the reason. Answer: `ok` only."""

    checkpoint: CheckpointId
    skipped: Annotated[tuple[Reason, ...], Meta(min_length=1, max_length=MOST_REASONS)]


class RestoreFinished(Request, frozen=True, kw_only=True, tag="restored"):
    """A rank read and verified its part, and every rank loads this checkpoint. Answer: `ok` only."""

    part: PartId
    place: Annotated[str, Meta(max_length=64)]
    seconds: Measured  # for the search and the reading, without the loading into the state


class Pause(Request, frozen=True, kw_only=True, tag="pause"):
    """Leave the tiers as they are for `for_s` seconds, or until resumed. Answer: `paused`, as in `status`."""

    for_s: Annotated[float, Meta(gt=0, le=MAX_PAUSE)] | None = None


class LaunchesRequest(Request, frozen=True, kw_only=True, tag="launches"):
    """The launches of `run` that save at the same time. Answer: `launches`, each a `core/timeline/launches.Rival`."""

    run: str


NoteName = Annotated[str, Meta(pattern=r"^[a-z0-9]{1,32}(\.[a-z0-9]{1,32}){0,4}\Z")]


class NotesRequest(Request, frozen=True, kw_only=True, tag="notes"):
    """Put and remove notes of a launch's ranks on the daemon's first tier, then read and list notes, in this order.

    Answer: `notes`, the existing notes of `read` by name, in base64; `names`, the names that begin with `under`.
    """

    run: str
    launch: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    put: dict[NoteName, Annotated[bytes, Meta(max_length=MAX_NOTE)]] = {}
    remove: tuple[NoteName, ...] = ()
    read: tuple[NoteName, ...] = ()
    under: Annotated[str, Meta(pattern=r"^([a-z0-9]{1,32}\.){1,4}\Z")] | None = None


class MakeRoom(Request, frozen=True, kw_only=True, tag="make-room"):
    """A save of `run` met a full disk: delete verified local copies until `size_bytes` fit. This takes seconds at most.

    Answer: `freed_bytes`, and `enough`: whether a second try can succeed.
    """

    run: str
    size_bytes: Annotated[int, Meta(ge=0, le=1 << 60)]
    quota: bool = False  # the user's quota is used up, so the file system's free bytes are not the limit


class RemoveRun(Request, frozen=True, kw_only=True, tag="remove"):
    """Delete a whole run from the spool, at a person's request. Answer: `ok` only.

    Error: `ConfigError` while a trainer of that run is attached, or a process restores it.
    """

    run: str


class Resume(Request, frozen=True, kw_only=True, tag="resume"):
    """End a pause. Answer: `paused`, null."""


def encode_line(message: object) -> bytes:
    return msgspec.json.encode(message) + b"\n"


AnyRequest = (
    Attach
    | StatusRequest
    | ReportRequest
    | RunsRequest
    | CandidatesRequest
    | Fetch
    | Wait
    | BacklogRequest
    | Pin
    | SaveGivenUp
    | FallbackNotice
    | RestoreFinished
    | DataLeakNotice
    | PreemptionNotice
    | LaunchesRequest
    | NotesRequest
    | Pause
    | Resume
    | MakeRoom
    | RemoveRun
)
