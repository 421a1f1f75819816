"""The head of a run's timeline: where each launch came from, and its newest complete checkpoint, apart from manifests.
FORMAT.md is its prose.

Law: a head says nothing that a manifest did not say before, and a later one forgets no launch that still matters. So it
outlives the manifests that it speaks of, and shows that there were some.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from tierd.core.errors import FormatTooNew, ManifestError
from tierd.core.ids import CheckpointId
from tierd.core.manifest import Attempt, Digest, Origin, Step
from tierd.core.seal import digest_of, seal, unsealed, version_of
from tierd.core.timeline import way

VERSION = 1
MAX_LAUNCHES = 4096
MAX_SIZE = 1 << 20  # bytes


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """One launch: what it resumed from (None: nothing), and the newest of its checkpoints that was complete there."""

    resumed_from: Origin | None
    newest: Step | None


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What node `by` says of `run` in one place; `by` is empty in a spool. `counter` is one more than that of the head
    whose digest is `before`; the first has neither. `written` is RFC 3339, for people."""

    version: int
    run: str
    by: Annotated[str, Meta(pattern=r"^([0-9a-f]{8})?\Z")]
    counter: Annotated[int, Meta(ge=1, lt=1 << 53)]
    before: Digest | None
    written: Annotated[str, Meta(max_length=64, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
    launches: Annotated[dict[Attempt, Known], Meta(max_length=MAX_LAUNCHES)]

    @property
    def digest(self) -> str:
        return digest_of(encode(self))


_decoder = msgspec.json.Decoder(Head)


def encode(head: Head) -> bytes:
    return seal(head)


def decode(data: bytes, run: str, by: str) -> Head:
    """Read an object that lies where the head of `run` by `by` belongs.

    Raises:
        ManifestError: it is damaged, or belongs elsewhere.
        FormatTooNew: a newer tierd wrote it.
    """
    where = f"head of {run} by {by or 'this node'}"
    body = unsealed(data, where, MAX_SIZE)
    try:
        if (version := version_of(body)) != VERSION:
            raise FormatTooNew(f"{where}: version {version}; this tierd reads {VERSION}: use a newer one")
        head = _decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ManifestError(f"{where}: {error}") from error
    if (head.run, head.by) != (run, by):
        raise ManifestError(f"{where}: it says that it is of {head.run!r} by {head.by!r}")
    if late := [one for one in head.launches if CheckpointId.parse(run, f"{0:012}.{one}") is None]:
        raise ManifestError(f"{where}: launch {late[0]} is of the year 2200 or later, and nobody can have made it")
    if any(known.resumed_from and known.resumed_from.attempt >= one for one, known in head.launches.items()):
        raise ManifestError(f"{where}: a launch resumes from one that is not earlier")
    return head


def together(heads: Iterable[Head]) -> dict[str, Known]:
    """What several heads tell of a run's launches: the newest step that any of them knows."""
    found: dict[str, Known] = {}
    for head in heads:
        for attempt, known in head.launches.items():
            other = found.get(attempt, known)
            steps = [one.newest for one in (other, known) if one.newest is not None]
            found[attempt] = Known(resumed_from=other.resumed_from, newest=max(steps, default=None))
    return found


def newest(launches: Mapping[str, Known], run: str) -> CheckpointId | None:
    """The newest complete checkpoint that is remembered of the newest launch that had one."""
    whole = {attempt: known.newest for attempt, known in launches.items() if known.newest is not None}
    return max((CheckpointId(run, attempt, step) for attempt, step in whole.items()), default=None)


def launches_of(
    complete: Iterable[CheckpointId],
    known: Iterable[CheckpointId],
    origins: Mapping[str, CheckpointId | None],
    remembered: Mapping[str, Known],
) -> dict[str, Known]:
    """What a head is to say of a run's launches.

    Args:
        complete: the checkpoints that are complete in its place.
        known: all that any place shows.
        origins: where launches came from, as far as anything tells.
        remembered: what heads of this place have said before; a newest step never goes back.
    """
    steps = {attempt: one.newest for attempt, one in remembered.items()}
    for one in complete:
        steps[one.attempt] = max(one.step, steps.get(one.attempt) or 0)
    wanted = {one.attempt for one in known}
    if origins:
        wanted |= way(max(origins), origins).keys()
    kept = sorted(wanted & origins.keys(), reverse=True)[:MAX_LAUNCHES]
    return {attempt: Known(resumed_from=_origin(origins[attempt]), newest=steps.get(attempt)) for attempt in kept}


def successor(heads: Iterable[Head], run: str, by: str, launches: Mapping[str, Known], written: str) -> Head:
    """The head that follows the latest of those that lie in a place."""
    last = max(heads, key=lambda head: head.counter, default=None)
    return Head(
        version=VERSION,
        run=run,
        by=by,
        counter=last.counter + 1 if last else 1,
        before=last.digest if last else None,
        written=written,
        launches=dict(launches),
    )


def _origin(origin: CheckpointId | None) -> Origin | None:
    return Origin(step=origin.step, attempt=origin.attempt) if origin else None
