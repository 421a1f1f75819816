"""The summary of a checkpoint's manifests on a tier: one small object, so that nobody lists or reads them all.

Invariant: a summary is a cache. It counts as absent if it cannot be read, and for a deletion also unless a listing
shows exactly the objects that its maker read.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from tierd.core.errors import ManifestError
from tierd.core.ids import MAX_WORLD, CheckpointId
from tierd.core.manifest import Digest, MetricName, Origin, metrics_to_json
from tierd.core.manifest_codec import decode_sealed, seal
from tierd.core.planning.copies import ManifestFacts

SUMMARY_VERSION = 1
MAX_SUMMARY_SIZE = 8 << 20  # bytes
MAX_NAMED = 1 << 19  # chunks of other checkpoints that a summary names; of more, only their checkpoints


class SummaryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`ManifestFacts` of rank 0's manifest, in JSON's types. `homed_sizes` has its keys in decimal digits."""

    created: str
    metrics: dict[MetricName, float | str]
    resumed_from: Origin | None
    size: Annotated[int, Meta(ge=0)]
    stored_size: Annotated[int, Meta(ge=0)]
    bases: tuple[str, ...]
    watched: bool
    homed_sizes: dict[str, int]
    replicas: bytes


class CheckpointSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The manifests of all `world_size` ranks of one checkpoint, which were there and readable together."""

    version: int
    run: str
    step: int
    attempt: str
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD)]
    listing: Digest  # the digest of these objects as the tier's listing showed them before and after they were read
    rank_0: SummaryFacts  # what planning needs of rank 0's manifest
    # by the name of another checkpoint, the chunks under its name that these manifests name: an 8-byte digest of each
    # key, sorted; None if they are too many
    shared: dict[str, bytes | None]

    @property
    def facts(self) -> ManifestFacts:
        """The facts of rank 0's manifest."""
        of, origin = self.rank_0, self.rank_0.resumed_from
        return ManifestFacts(
            datetime.fromisoformat(of.created),
            {name: float(value) for name, value in of.metrics.items()},
            CheckpointId(self.run, origin.attempt, origin.step) if origin else None,
            of.size,
            of.stored_size,
            frozenset(base for name in of.bases if (base := CheckpointId.parse(self.run, name))),
            of.watched,
            {int(name): size for name, size in of.homed_sizes.items()},
            of.replicas,
        )


def make_summary(
    checkpoint: CheckpointId, world: int, listing: str, facts: ManifestFacts, shared: dict[str, bytes | None]
) -> CheckpointSummary:
    origin = facts.origin
    return CheckpointSummary(
        version=SUMMARY_VERSION,
        run=checkpoint.run,
        step=checkpoint.step,
        attempt=checkpoint.attempt,
        world_size=world,
        listing=listing,
        rank_0=SummaryFacts(
            created=facts.created.isoformat(),
            metrics=metrics_to_json(facts.metrics),
            resumed_from=Origin(step=origin.step, attempt=origin.attempt) if origin else None,
            size=facts.size,
            stored_size=facts.stored_size,
            bases=tuple(sorted(base.name for base in facts.bases)),
            watched=facts.is_watched,
            homed_sizes={str(name): size for name, size in facts.homed_sizes.items()},
            replicas=facts.replicas,
        ),
        shared=shared,
    )


def encode_summary(summary: CheckpointSummary) -> bytes:
    return seal(summary)


def decode_summary(data: bytes, checkpoint: CheckpointId) -> CheckpointSummary:
    """Decode the object that is stored under the key of a checkpoint's summary.

    Raises:
        ManifestError: the object is damaged, or belongs under another key.
        WrongKey: the object is encrypted.
        FormatTooNew: a newer tierd wrote the object.
    """
    where = f"summary of {checkpoint}"
    summary = decode_sealed(data, where, MAX_SUMMARY_SIZE, SUMMARY_VERSION, _decoder)
    try:
        facts = summary.facts
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ManifestError(f"{where}: {error}") from error
    if CheckpointId(summary.run, summary.attempt, summary.step) != checkpoint:
        raise ManifestError(f"{where}: it says that it is of another checkpoint")
    if facts.created.tzinfo is None or facts.created.utcoffset() != UTC.utcoffset(None):
        raise ManifestError(f"{where}: created {summary.rank_0.created!r} is not in UTC")
    if facts.origin and facts.origin.attempt >= checkpoint.attempt:
        raise ManifestError(f"{where}: it resumes from {facts.origin.attempt}, which is not an earlier attempt")
    if any(
        CheckpointId.parse(summary.run, name) is None or len(chunks or b"") % 8
        for name, chunks in summary.shared.items()
    ):
        raise ManifestError(f"{where}: what it says of shared chunks is not in its form")
    return summary


# Made once, on import, because msgspec inspects a type on first use, and crashes if two threads do so at once.
_decoder = msgspec.json.Decoder(CheckpointSummary)
