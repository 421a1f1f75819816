"""What a run keeps: the rules of its retention policy, how they are checked, how two policies become one, and how a
policy is stored next to the run's manifests (FORMAT.md). `ranking` applies a policy to the checkpoints of one place.

Invariant: a stored policy that cannot be read means that the run's policy is not known, never that there is none. A
rule that this version does not know makes the object unreadable, because ignoring the rule would delete checkpoints
that it keeps. A duration or a rate names its unit, and no unit is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from tierd.core.conversion_messages import with_allowed_values
from tierd.core.errors import ConfigError, FormatTooNew, ManifestError, WrongKey
from tierd.core.ids import retention_key
from tierd.core.manifest_codec import encrypted_with

_UNITS = {
    f"{prefix}{kind}": base**power
    for kind, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("kMG" if base == 1000 else "KMG", 1)
}
_FORM = rf"([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)({'|'.join(_UNITS)})/s"
_RATE = re.compile(_FORM)
RATE_PATTERN = rf"^{_FORM}\Z"
Rate = Annotated[str, Meta(pattern=RATE_PATTERN)]  # "200MB/s", "1.5GiB/s"


def parse_rate(text: str) -> int:
    """A `Rate` in bytes per second, at least 1. Raises `ValueError`, whose message shows how to write one."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no rate: write 800kB/s, 200MB/s or 1GiB/s")
    bytes_per_s = int(float(match[1]) * _UNITS[match[2]])
    if bytes_per_s < 1:
        raise ValueError(f"{text!r} would never move a byte: write at least 1kB/s")
    return bytes_per_s


V = TypeVar("V")

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)([smhd])")
DURATION_PATTERN = r"^[0-9]{1,9}(\.[0-9]{1,9})?[smhd]\Z"
Duration = Annotated[str, Meta(pattern=DURATION_PATTERN)]  # "90s", "10m", "12h", "7d"


def parse_duration(duration: str) -> float:
    """A `Duration` in seconds."""
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise ValueError(f"{duration!r} is no duration: write 90s, 10m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


class Best(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keep the `count` checkpoints whose `metric` is smallest (``min``) or largest (``max``).

    Attributes:
        metric: the name of a metric that was passed to `save`.
        mode: whether a smaller (`min`) or a larger (`max`) value is better.
        count: how many checkpoints the rule keeps.
    """

    metric: Annotated[str, Meta(min_length=1)]
    mode: Literal["min", "max"] = "min"
    count: Annotated[int, Meta(ge=1)] = 1


class _Unusable(ConfigError, ValueError):
    """A value of a rule cannot be used. Also a `ValueError`, because msgspec adds the path in a file to those only."""


_MAX_RULE_VALUES = 16  # values of one rule in a file; a merged policy may hold more
Steps = Annotated[int, Meta(ge=1)]


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A set of rules. A checkpoint is kept if any rule wants it.

    A rule whose type has a tuple takes one value or several. Policies of equal meaning compare equal,
    because several values are stored sorted and without duplicates, and a single value is stored without a tuple.

    Attributes:
        keep_last: this many newest checkpoints, both along the timeline and by launch and step. These are the
            checkpoints to which a resume falls back, and the last ones of an abandoned branch. At least 1.
        keep_within: every checkpoint made at most this long before the newest, such as `"12h"`. Of the pauses between
            its launch and the newest, two do not count, because the clocks of two launches may be wrong.
        keep_every_steps: every checkpoint whose step is a multiple of this number.
        keep_every: the oldest checkpoint, and each that was made at least this long after the last one that this rule
            keeps, such as `"1d"`. A checkpoint made that long *before* the last one counts too, because a clock may
            have been set back. TensorFlow calls this `keep_checkpoint_every_n_hours`.
        keep_best: the best checkpoints by a metric, as a `Best` or a dict of its members. A checkpoint whose metric is
            missing or NaN is not ranked.

    Raises:
        ConfigError: the value of a rule cannot be used; the error names the rule.
    """

    keep_last: Annotated[int, Meta(ge=1)] = 3
    keep_every_steps: Steps | Annotated[tuple[Steps, ...], Meta(max_length=_MAX_RULE_VALUES)] | None = None
    keep_within: Duration | None = None
    keep_every: Duration | Annotated[tuple[Duration, ...], Meta(max_length=_MAX_RULE_VALUES)] | None = None
    keep_best: Best | Annotated[tuple[Best, ...], Meta(max_length=_MAX_RULE_VALUES)] | None = None

    def __post_init__(self) -> None:
        """Check and normalize the rules."""
        for rule, size in _LARGEST.items():
            size(getattr(self, rule))
        for rule, unite in _UNITED.items():
            force_setattr(self, rule, _one_or_several(unite(rule_values(self, rule))))

    @property
    def every_steps(self) -> tuple[int, ...]:
        """The values of `keep_every_steps`."""
        return _several(self.keep_every_steps)

    @property
    def every(self) -> tuple[Duration, ...]:
        """The values of `keep_every`."""
        return _several(self.keep_every)

    @property
    def bests(self) -> tuple[Best, ...]:
        """The values of `keep_best`, one for each metric and mode."""
        return _several(self.keep_best)


def check_policy(policy: object) -> RetentionPolicy:
    """Check a policy that a program made by the same rules as one from a file. Raises `ConfigError`."""
    if not isinstance(policy, RetentionPolicy):
        raise ConfigError(f"retention={policy!r}: a tierd.Retention, such as tierd.Retention(keep_last=10)")
    for rule in _UNITED:
        if (count := len(rule_values(policy, rule))) > _MAX_RULE_VALUES:
            raise ConfigError(f"retention: {rule} has {count} values, at most {_MAX_RULE_VALUES}")
    try:
        return msgspec.convert(msgspec.to_builtins(policy), RetentionPolicy)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise ConfigError(f"retention={policy!r}: {with_allowed_values(str(error), RetentionPolicy)}") from error


def merge_policies(policies: Iterable[RetentionPolicy]) -> RetentionPolicy | None:
    """The policy that keeps every checkpoint that any of `policies` keeps; None for no policy.

    The result does not depend on the order, and merging a policy with itself changes nothing.
    """
    policy_list = list(policies)
    if not policy_list:
        return None
    merged: dict[str, Any] = {
        rule: max((getattr(policy, rule) for policy in policy_list), key=size) for rule, size in _LARGEST.items()
    }
    for rule in _UNITED:
        merged[rule] = tuple(value for policy in policy_list for value in rule_values(policy, rule))
    return RetentionPolicy(**merged)


def rule_values(policy: RetentionPolicy, rule: str) -> tuple[Any, ...]:
    """The values of one rule; none if the policy does not have it."""
    return _several(getattr(policy, rule))


def _several(values: object) -> tuple[Any, ...]:
    if isinstance(values, list | tuple):
        return tuple(values)
    return () if values is None else (values,)


def _count(count: int) -> int:
    if type(count) is not int or count < 1:
        raise _Unusable(f"keep_last={count!r}: a number of checkpoints from 1 on")
    return count


def _span(rule: str, text: Duration) -> float:
    try:
        return parse_duration(text)
    except (ValueError, TypeError) as error:
        raise _Unusable(f"{rule}={text!r}: a time is a text such as '90s', '10m', '12h' or '7d'") from error


def _within(span: Duration | None) -> tuple[float, str]:
    return (0.0, "") if span is None else (_span("keep_within", span), span)


def _unite_steps(values: tuple[int, ...]) -> list[int]:
    for steps in values:
        if type(steps) is not int or steps < 1:
            raise _Unusable(f"keep_every_steps={steps!r}: a number of steps from 1 on")
    return sorted(set(values))


def _unite_spans(values: tuple[Duration, ...]) -> list[Duration]:
    spans = dict(sorted(((_span("keep_every", span), span) for span in values), reverse=True))  # 60s is 1m
    return [spans[length_s] for length_s in sorted(spans)]


def _unite_bests(values: tuple[object, ...]) -> list[Best]:
    widest: dict[tuple[str, str], Best] = {}
    for best in sorted(map(_best, values), key=lambda best: best.count):
        widest[best.metric, best.mode] = best
    return [widest[key] for key in sorted(widest)]


def _best(value: object) -> Best:
    try:
        return msgspec.convert(msgspec.to_builtins(value), Best)
    except (msgspec.ValidationError, TypeError) as error:
        why = with_allowed_values(str(error), Best)
        raise _Unusable(
            f"keep_best={value!r}: {why}; give tierd.Best(metric='val_loss', mode='min', count=1), or a dict of these"
        ) from error


# What a rule's values must be, and which of them two policies keep together: the largest by this key if the larger of
# two values always keeps everything that the smaller keeps, else all that say something of their own.
_LARGEST: dict[str, Callable[[Any], Any]] = {"keep_last": _count, "keep_within": _within}
_UNITED: dict[str, Callable[[tuple[Any, ...]], list[Any]]] = {
    "keep_every_steps": _unite_steps,
    "keep_every": _unite_spans,
    "keep_best": _unite_bests,
}


def _one_or_several(values: list[V]) -> V | tuple[V, ...] | None:
    return None if not values else values[0] if len(values) == 1 else tuple(values)


FORMAT = 1
MAX_POLICY_SIZE = 64 << 10  # bytes
PolicyOrigin = Literal["configuration", "trainer", "default"]
GIVEN: tuple[str, ...] = get_args(PolicyOrigin)
TierName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]{0,31}\Z")]
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class StoredRetention:
    """One node's policy for a run, as found in one place."""

    run: str  # the run
    by: str  # the node's id, 8 hex digits; empty in the spool, which belongs to one node
    given: str  # the policy's origin; any word if the object is unreadable, because a newer tierd may have written it
    host: str = ""  # the node's host name, for people
    written: str = ""  # the time of writing in RFC 3339, for people
    retention: RetentionPolicy | None = None  # the policy; None if the object cannot be read
    why: str = ""  # why the object cannot be read; empty if it can
    # whether the object is encrypted with another key than the tier is read with, or only one of the two has a key. No
    # other object may be put next to it.
    alien: bool = False
    # the names of all tiers on which the node keeps the run; empty if the object does not say
    tiers: tuple[str, ...] = ()
    contested: bool = False  # whether the object, of this node's id, may be another node's that has the same id


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


def encode_policy(stored: StoredRetention) -> bytes:
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


def decode_policy(data: bytes, run: str, by: str, given: str) -> StoredRetention:
    """Decode the object that is stored under the key of the policy of `run`, `by` and `given`.

    Raises:
        WrongKey: the object is encrypted.
        ManifestError: the object is damaged, or belongs under another key.
        FormatTooNew: a newer tierd wrote the object, or it holds a rule that this version does not know.
    """
    where = f"retention of {run} by {by or 'this node'} ({given})"
    if len(data) > MAX_POLICY_SIZE:
        raise ManifestError(f"{where}: it is longer than {MAX_POLICY_SIZE} bytes")
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


def unreadable_policy(run: str, by: str, given: str, error: Exception) -> StoredRetention:
    """The record of an object that cannot be read."""
    why, alien = str(error), isinstance(error, WrongKey)
    if alien:  # the object is kept until a person decides, because either of the two keys may be the right one
        why += "; if the daemon that put it there was the one with the wrong key_file, or without, delete that object, "
        why += retention_key(run, by, given)
    return StoredRetention(run, by, given, why=why, alien=alien)


def is_plain_policy(data: bytes) -> bool:
    """Whether `data` is an unencrypted stored policy: encrypted bytes have no JSON member `format`."""
    try:
        msgspec.json.decode(data, type=_Version)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True
