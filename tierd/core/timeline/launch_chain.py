"""The timeline, the chain of attempts from which the newest attempt descends; and a run's head, a record of each
launch's origin and newest complete checkpoint, separate from the manifests (FORMAT.md).

Invariant: a resume walks down the timeline only. Below an attempt's first checkpoint, it continues with the checkpoint
from which that attempt resumed, never with a later one of an abandoned branch. An attempt that no readable manifest or
head names does not count as the newest, because anybody may have put an object of that name. A head records only facts
that a manifest stated before, and a later head forgets no launch that still matters. So a head outlives the manifests
from which it was made, and proves that they existed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from tierd.core.errors import ManifestError
from tierd.core.ids import LATEST_MS, CheckpointId, launch_ms
from tierd.core.manifest import Attempt, Digest, Manifest, Origin, Step
from tierd.core.manifest_codec import decode_sealed, digest_of, seal


@dataclass(frozen=True, slots=True)
class Timeline:
    """One run's complete checkpoints, each either on the path or on a branch."""

    path: tuple[CheckpointId, ...]
    branches: tuple[CheckpointId, ...]
    # the attempt at which the walk had to end, because its origin is unknown: its manifests are deleted or unreadable
    unknown_origin: str | None
    # checkpoints, complete or not, of attempts that are newer by name than every attempt whose origin is known
    unproven: tuple[CheckpointId, ...] = ()


def order_by_timeline(
    observed: Collection[CheckpointId], complete: Collection[CheckpointId], origins: Mapping[str, CheckpointId | None]
) -> Timeline:
    """Order one run's checkpoints, `observed` in any place, for a resume.

    `origins` has by attempt the checkpoint that it resumed from (None: it began from nothing), if a manifest or a head
    says so. The newest attempt in `origins` counts as the newest. If `origins` is empty, the newest name does.
    """
    steps: dict[str, list[CheckpointId]] = {checkpoint.attempt: [] for checkpoint in observed}
    for checkpoint in complete:
        steps[checkpoint.attempt].append(checkpoint)
    path: list[CheckpointId] = []
    newest = max(origins or steps, default=None)
    attempts = ancestor_chain(newest, origins) if newest else {}
    for attempt, limit in attempts.items():
        path += sorted((c for c in steps.get(attempt, ()) if limit is None or c.step <= limit), reverse=True)
    last = next(reversed(attempts), None)
    return Timeline(
        tuple(path),
        branches=tuple(sorted(set(complete) - set(path), reverse=True)),
        unknown_origin=last if last not in origins else None,
        unproven=tuple(
            sorted((checkpoint for checkpoint in observed if newest and checkpoint.attempt > newest), reverse=True)
        ),
    )


def ancestor_chain(attempt: str, origins: Mapping[str, CheckpointId | None]) -> dict[str, int | None]:
    """The chain of attempts from `attempt` down to its first ancestor, each with its last step on it (None: all steps).

    The last attempt may be one that `origins` does not contain.
    """
    chain: dict[str, int | None] = {attempt: None}
    # The loop ends because every manifest's origin is an earlier attempt (core/manifest_codec.py).
    while origin := origins.get(attempt):
        attempt = origin.attempt
        chain[attempt] = origin.step
    return chain


def is_abandoned(checkpoint: CheckpointId, origins: Mapping[str, CheckpointId | None]) -> bool:
    """Whether a later launch is known, by its origin, that went back behind a checkpoint or never descended from it."""
    newest = max(origins, default="")
    if newest <= checkpoint.attempt:
        return False
    attempts = ancestor_chain(newest, origins)
    if checkpoint.attempt not in attempts:
        return next(reversed(attempts)) in origins  # else it may lie behind the launch whose origin is unknown
    last_step = attempts[checkpoint.attempt]
    return last_step is not None and checkpoint.step > last_step


def check_origin(manifest: Manifest, origins: dict[str, CheckpointId | None]) -> None:
    """Raise `ManifestError` if this manifest names another origin than the other parts of its attempt.

    Ranks that cannot talk may have resumed from different checkpoints under one given attempt. Then a checkpoint is
    complete by its name, and its parts belong to different histories.

    Args:
        origins: by attempt, the origin that its other parts name. The manifest's own is added if there is none yet.
    """
    attempt_origin = origins.setdefault(manifest.attempt, manifest.origin)
    if attempt_origin != manifest.origin:
        raise ManifestError(
            f"{manifest.part} goes on from {manifest.origin}, and other parts of its attempt from "
            f"{attempt_origin}: they "
            "do not belong together"
        )


HEAD_VERSION = 1
MAX_LAUNCHES = 4096
MAX_HEAD_SIZE = 1 << 20  # bytes
_MAX_COUNTER = (1 << 53) - 1  # the largest integer that every JSON reader represents exactly
_MAX_TIERS = 16  # the most tiers whose last head a spool remembers


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One launch: the checkpoint it resumed from (None: it began from nothing), and the step of its newest checkpoint
    that was complete in the head's place (None: none was)."""

    resumed_from: Origin | None
    newest: Step | None


class LastHead(msgspec.Struct, frozen=True):
    """The counter and digest of the head that was observed last in a place."""

    counter: Annotated[int, Meta(ge=1, le=_MAX_COUNTER)]
    digest: Digest


class Head(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node's record of a run in one place."""

    version: int
    run: str
    # the id of the node that wrote the head, 8 hex digits; empty in a spool
    by: Annotated[str, Meta(pattern=r"^([0-9a-f]{8})?\Z")]
    # one more than the counter of the head before; 1 in the first head
    counter: Annotated[int, Meta(ge=1, le=_MAX_COUNTER)]
    before: Digest | None  # the digest of the head before; None in the first head
    # the time of writing in RFC 3339, for people
    written: Annotated[str, Meta(max_length=64, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
    launches: Annotated[dict[Attempt, LaunchRecord], Meta(max_length=MAX_LAUNCHES)]  # the launches, by attempt
    # in a spool only: by URL, the last heads that this node observed on tiers
    tiers: Annotated[dict[str, LastHead], Meta(max_length=_MAX_TIERS)] = {}

    @property
    def digest(self) -> str:
        return digest_of(encode_head(self))


_decoder = msgspec.json.Decoder(Head)


def encode_head(head: Head) -> bytes:
    return seal(head)


def decode_head(data: bytes, run: str, by: str) -> Head:
    """Decode the object that is stored under the key of the head of `run` by node `by`.

    Raises:
        ManifestError: the object is damaged, or belongs under another key.
        WrongKey: the object is encrypted.
        FormatTooNew: a newer tierd wrote the object.
    """
    where = f"head of {run} by {by or 'this node'}"
    head = decode_sealed(data, where, MAX_HEAD_SIZE, HEAD_VERSION, _decoder)
    if (head.run, head.by) != (run, by):
        raise ManifestError(f"{where}: it says that it is of {head.run!r} by {head.by!r}")
    if any(launch_ms(attempt) >= LATEST_MS for attempt in head.launches):
        raise ManifestError(f"{where}: it tells of a launch that nobody can have made: of the year 2200 or later")
    if any(launch.resumed_from and launch.resumed_from.attempt >= attempt for attempt, launch in head.launches.items()):
        raise ManifestError(f"{where}: a launch resumes from one that is not earlier")
    return head


def merge_heads(heads: Iterable[Head]) -> dict[str, LaunchRecord]:
    """A run's launches according to several heads, each with the newest step that any of them records."""
    merged: dict[str, LaunchRecord] = {}
    for head in heads:
        for attempt, launch in head.launches.items():
            earlier = merged.get(attempt, launch)
            steps = [record.newest for record in (earlier, launch) if record.newest is not None]
            merged[attempt] = LaunchRecord(resumed_from=earlier.resumed_from, newest=max(steps, default=None))
    return merged


def newest_recorded(launches: Mapping[str, LaunchRecord], run: str) -> CheckpointId | None:
    """The newest complete checkpoint of the newest launch that had one."""
    newest_steps = {attempt: launch.newest for attempt, launch in launches.items() if launch.newest is not None}
    return max((CheckpointId(run, attempt, step) for attempt, step in newest_steps.items()), default=None)


def launches_to_record(
    complete: Iterable[CheckpointId],
    observed: Iterable[CheckpointId],
    origins: Mapping[str, CheckpointId | None],
    remembered: Mapping[str, LaunchRecord],
) -> dict[str, LaunchRecord]:
    """The launches to record in a run's new head, of those that any place shows.

    `complete` is what the head's place has complete, `remembered` what earlier heads of it record. A launch's newest
    step never decreases.
    """
    steps = {attempt: record.newest for attempt, record in remembered.items()}
    for checkpoint in complete:
        steps[checkpoint.attempt] = max(checkpoint.step, steps.get(checkpoint.attempt) or 0)
    attempts = {checkpoint.attempt for checkpoint in observed}
    if origins:
        attempts |= ancestor_chain(max(origins), origins).keys()
    recorded = sorted(attempts & origins.keys(), reverse=True)[:MAX_LAUNCHES]
    return {
        attempt: LaunchRecord(resumed_from=_origin(origins[attempt]), newest=steps.get(attempt)) for attempt in recorded
    }


def successor_head(
    heads: Iterable[Head], run: str, by: str, launches: Mapping[str, LaunchRecord], timestamp: str
) -> Head:
    """The head that follows the latest of a place's heads."""
    last = last_head_of(heads)
    return Head(
        version=HEAD_VERSION,
        run=run,
        by=by,
        counter=min(last.counter + 1, _MAX_COUNTER) if last else 1,
        before=last.digest if last else None,
        written=timestamp,
        launches=dict(launches),
    )


def last_head_of(heads: Iterable[Head]) -> LastHead | None:
    """The counter and digest of the latest of a place's heads; None if there is none."""
    last = max(heads, key=lambda head: head.counter, default=None)
    return LastHead(last.counter, last.digest) if last else None


def remember_heads(remembered: Mapping[str, LastHead], current: Mapping[str, LastHead | None]) -> dict[str, LastHead]:
    """The last heads on tiers, by URL, that a spool remembers after it read the heads in `current`.

    If a tier has no head any more, the spool keeps the one that it remembered.
    """
    fresh = {url: last for url, last in current.items() if last}
    heads = {**{url: last for url, last in remembered.items() if url not in fresh}, **fresh}
    return dict(list(heads.items())[-_MAX_TIERS:])


def rollback_reason(latest: LastHead | None, remembered: LastHead | None, unreadable: str = "") -> str | None:
    """Why a tier's head is older than the one `remembered` there, or can be older; None if it is not older.

    This cannot happen in normal operation, because every head has a larger counter than the one before. `unreadable`
    says why a head there cannot be read; it is empty if all can be.
    """
    if remembered is None or (latest and latest.counter >= remembered.counter):
        return None
    if latest is None and unreadable:  # anybody who can put objects there can do this to hide that it is older
        return (
            f"the run's head there cannot be read and was number {remembered.counter} before, so nothing shows "
            "whether the "
            f"run's history there is older now: {unreadable}"
        )
    state = f"number {latest.counter}" if latest else "gone"
    return (
        f"the run's head there is {state} and was number {remembered.counter} before: somebody deleted there, or "
        "put an older "
        "copy in its place"
    )


def _origin(origin: CheckpointId | None) -> Origin | None:
    return Origin(step=origin.step, attempt=origin.attempt) if origin else None
