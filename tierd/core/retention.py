"""Retention: which of one run's checkpoints in one place stay, and why.

Law: only verified, complete checkpoints count towards a rule, and the newest of them always stays. What is not verified
is not deleted; what cannot become complete any more goes once enough newer complete ones exist. No wall clock decides:
ages are differences between checkpoints.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tierd.core.ids import CheckpointId
from tierd.core.timeline import timeline

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")
Duration = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?[smhd]\Z")]  # "90s", "10m", "12h", "7d"


def seconds(duration: str) -> float:
    """A `Duration` in seconds."""
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise ValueError(f"{duration!r} is no duration: write 90s, 10m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


class Best(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keep the `count` checkpoints whose `metric` is smallest (``min``) or largest (``max``)."""

    metric: Annotated[str, Meta(min_length=1)]
    mode: Literal["min", "max"] = "min"
    count: Annotated[int, Meta(ge=1)] = 1


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint stays when any rule wants it.

    Attributes:
        keep_last: this many newest, both along the timeline and by launch and step: the checkpoints a resume falls back
            to, and what an abandoned branch wrote last. At least 1.
        keep_every_steps: every checkpoint whose step is a multiple.
        keep_within: every checkpoint made at most this long before the newest.
        keep_best: the best by a metric; a checkpoint without it, or with NaN, is not ranked.
    """

    keep_last: Annotated[int, Meta(ge=1)] = 3
    keep_every_steps: Annotated[int, Meta(ge=1)] | None = None
    keep_within: Duration | None = None
    keep_best: Best | None = None


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What retention needs to know of one checkpoint in one place.

    `origin` is the checkpoint that its attempt resumed from; `created` is None where no manifest can be read;
    `aside` says that it was proven corrupt and quarantined.
    """

    id: CheckpointId
    complete: bool
    verified: bool
    pinned: bool = False
    created: datetime | None = None
    metrics: Mapping[str, float] | None = None
    origin: CheckpointId | None = None
    aside: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a checkpoint stays, and every reason."""

    id: CheckpointId
    keep: bool
    reasons: tuple[str, ...]


def decide(checkpoints: Sequence[CheckpointInfo], policy: RetentionPolicy) -> tuple[Verdict, ...]:
    """Judge one run's checkpoints in one place. Newest first; deterministic."""
    ordered = sorted(checkpoints, key=_order, reverse=True)
    counted = _counted(checkpoints)
    reasons: dict[CheckpointId, list[str]] = {info.id: [] for info in ordered}
    for info in ordered:
        if info.pinned:
            reasons[info.id].append("pinned")
        if not info.verified:
            reasons[info.id].append("not verified yet")
    _keep_last(counted, policy.keep_last, reasons)
    _keep_steps(counted, policy.keep_every_steps, reasons)
    _keep_within(counted, policy.keep_within, reasons)
    _keep_best(counted, policy.keep_best, reasons)
    ages = [_order(info) for info in reversed(counted)]
    return tuple(
        _verdict(info, reasons[info.id], len(ages) - bisect_right(ages, _order(info)), policy) for info in ordered
    )


def leaders(checkpoints: Sequence[CheckpointInfo], policy: RetentionPolicy) -> tuple[CheckpointInfo, ...]:
    """Those of one run's checkpoints in one place on which the verdict over one more depends.

    `decide` over these and one that is added gives the added one the verdict, and the reasons to keep it, that it would
    have among all: the first of every rule's ranking outrank it or do not, and one of each attempt tells its origin.
    """
    counted = _counted(checkpoints)
    attempts = {info.id.attempt: info.id for info in counted}
    ranked = _ranked(counted, policy.keep_best)
    first = {
        *(info.id for info in counted[: policy.keep_last]),
        *_path(counted)[: policy.keep_last],
        *attempts.values(),
        *ranked[: policy.keep_best.count if policy.keep_best else 0],
    }
    return tuple(info for info in counted if info.id in first)


def _counted(checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Those that count towards a rule, newest first."""
    return sorted((info for info in checkpoints if info.complete and info.verified), key=_order, reverse=True)


def _order(info: CheckpointInfo) -> tuple[str, str, int]:
    return info.id.run, info.id.attempt, info.id.step  # as the ids sort, and many times as fast


def _verdict(info: CheckpointInfo, reasons: list[str], newer: int, policy: RetentionPolicy) -> Verdict:
    if reasons:
        return Verdict(info.id, True, tuple(reasons))
    if info.complete:
        return Verdict(info.id, False, (f"older than the last {policy.keep_last}, and no rule keeps it",))
    if newer < policy.keep_last:
        why = "quarantined: kept to be looked at" if info.aside else "incomplete: its other parts may still come"
        return Verdict(info.id, True, (why,))
    what = "quarantined" if info.aside else "incomplete"
    return Verdict(info.id, False, (f"{what}, and {newer} newer complete ones are verified",))


def _keep_last(counted: Sequence[CheckpointInfo], count: int, reasons: dict[CheckpointId, list[str]]) -> None:
    ids = [info.id for info in counted]
    path = _path(counted)
    on_path = set(path)
    for place, checkpoint in enumerate(path[:count], start=1):
        reasons[checkpoint].append("newest" if place == 1 else f"last {place} of {count}")
    for place, checkpoint in enumerate(ids[:count], start=1):
        if checkpoint not in on_path:
            reasons[checkpoint].append(f"last {place} of {count}, off the timeline")


def _path(counted: Sequence[CheckpointInfo]) -> tuple[CheckpointId, ...]:
    ids = [info.id for info in counted]
    return timeline(ids, ids, {info.id.attempt: info.origin for info in counted}).path


def _keep_steps(counted: Sequence[CheckpointInfo], every: int | None, reasons: dict[CheckpointId, list[str]]) -> None:
    for info in counted:
        if every and info.id.step % every == 0:
            reasons[info.id].append(f"every {every} steps")


def _keep_within(counted: Sequence[CheckpointInfo], within: str | None, reasons: dict[CheckpointId, list[str]]) -> None:
    if within is None or not counted:
        return
    newest = counted[0].created
    for info in counted:
        if newest and info.created and (newest - info.created).total_seconds() <= seconds(within):
            reasons[info.id].append(f"within {within} of the newest")


def _keep_best(counted: Sequence[CheckpointInfo], best: Best | None, reasons: dict[CheckpointId, list[str]]) -> None:
    if best is None:
        return
    for place, checkpoint in enumerate(_ranked(counted, best)[: best.count], start=1):
        reasons[checkpoint].append(f"best {best.metric}" + (f" ({place} of {best.count})" if best.count > 1 else ""))


def _ranked(counted: Sequence[CheckpointInfo], best: Best | None) -> list[CheckpointId]:
    """Those that have the metric, best first."""
    if best is None:
        return []
    ranked = [(info.metrics[best.metric], info.id) for info in counted if info.metrics and best.metric in info.metrics]
    # Equal values: the newer wins, so that a plateau does not pin its oldest checkpoint.
    ranked = [(value if best.mode == "max" else -value, checkpoint) for value, checkpoint in ranked if value == value]
    return [checkpoint for _, checkpoint in sorted(ranked, reverse=True)]
