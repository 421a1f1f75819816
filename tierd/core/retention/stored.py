"""A run's stored retention policy: one JSON object next to the run's manifests, described in FORMAT.md.

Invariant: an object that cannot be read means that the run's policy is not known, never that there is none. A rule that
this version does not know makes the object unreadable, because ignoring the rule would delete checkpoints that it
keeps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from tierd.core.errors import FormatTooNew, ManifestError, WrongKey
from tierd.core.ids import retention_key
from tierd.core.manifest_codec import encrypted_with
from tierd.core.retention.policy import RetentionPolicy

FORMAT = 1
MAX_SIZE = 64 << 10  # bytes
PolicyOrigin = Literal["configuration", "trainer", "default"]
GIVEN: tuple[str, ...] = get_args(PolicyOrigin)
TierName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]{0,31}\Z")]
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class StoredRetention:
    """One node's policy for a run, as found in one place.

    Attributes:
        run: the run.
        by: the node's id, 8 hex digits; empty in the spool, which belongs to one node.
        given: the policy's origin; any word if the object is unreadable, because a newer tierd may have written it.
        host: the node's host name, for people.
        written: the time of writing in RFC 3339, for people.
        tiers: the names of all tiers on which the node keeps the run; empty if the object does not say.
        retention: the policy; None if the object cannot be read.
        why: why the object cannot be read; empty if it can.
        alien: whether the object is encrypted with another key than the tier is read with, or only one of the two has
            a key. No other object may be put next to it.
        contested: whether the object, of this node's id, may be another node's that has the same id.
    """

    run: str
    by: str
    given: str
    host: str = ""
    written: str = ""
    retention: RetentionPolicy | None = None
    why: str = ""
    alien: bool = False
    tiers: tuple[str, ...] = ()
    contested: bool = False


class _Object(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    by: str
    given: PolicyOrigin
    host: Annotated[str, Meta(max_length=255)] = ""
    written: Annotated[str, Meta(max_length=64)] = ""
    tiers: Annotated[tuple[TierName, ...], Meta(max_length=64)] = ()
    retention: RetentionPolicy


class _Version(msgspec.Struct, frozen=True):
    format: int


def encode(stored: StoredRetention) -> bytes:
    """Encode the object, indented for people. `stored.retention` must not be None."""
    rules = {name: value for name, value in msgspec.to_builtins(stored.retention).items() if value is not None}
    members: dict[str, Any] = {
        "format": FORMAT,
        "run": stored.run,
        "by": stored.by,
        "host": stored.host,
        "written": stored.written,
        "given": stored.given,
        **({"tiers": stored.tiers} if stored.tiers else {}),
        "retention": rules,
    }
    return msgspec.json.format(msgspec.json.encode(members), indent=2) + b"\n"


def decode(data: bytes, run: str, by: str, given: str) -> StoredRetention:
    """Decode the object that is stored under the key of the policy of `run`, `by` and `given`.

    Raises:
        WrongKey: the object is encrypted.
        ManifestError: the object is damaged, or belongs under another key.
        FormatTooNew: a newer tierd wrote the object, or it holds a rule that this version does not know.
    """
    where = f"retention of {run} by {by or 'this node'} ({given})"
    if len(data) > MAX_SIZE:
        raise ManifestError(f"{where}: it is longer than {MAX_SIZE} bytes")
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version > FORMAT or given not in GIVEN:
            raise FormatTooNew(f"{where}: a newer tierd wrote it (format {version})")
        record = msgspec.json.decode(data, type=_Object)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if "unknown field" in str(error):
            raise FormatTooNew(f"{where}: a newer tierd wrote it: {error}") from error
        if key_id := encrypted_with(data):
            raise WrongKey(
                f"{where}: it is encrypted with key {key_id}: name its file by the tier's key_file, or --key-file"
            ) from error
        raise ManifestError(f"{where}: {error}") from error
    if version < 1 or (record.run, record.by, record.given) != (run, by, given):
        raise ManifestError(f"{where}: it says that it is of {record.run!r} by {record.by!r} ({record.given})")
    if any(_CONTROL.search(text) for text in (record.host, record.written)):
        raise ManifestError(f"{where}: a control character")
    return StoredRetention(run, by, given, record.host, record.written, record.retention, tiers=record.tiers)


def unreadable(run: str, by: str, given: str, error: Exception) -> StoredRetention:
    """The record of an object that cannot be read."""
    why, alien = str(error), isinstance(error, WrongKey)
    if alien:  # the object is kept until a person decides, because either of the two keys may be the right one
        why += "; if the daemon that put it there was the one with the wrong key_file, or without, delete that object, "
        why += retention_key(run, by, given)
    return StoredRetention(run, by, given, why=why, alien=alien)


def is_plain(data: bytes) -> bool:
    """Whether `data` is an unencrypted stored policy: encrypted bytes have no JSON member `format`."""
    try:
        msgspec.json.decode(data, type=_Version)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True
