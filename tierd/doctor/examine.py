"""The whole examination: every check of the spool, the machine, each tier and the service manager, within deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from tierd.core.diagnosis import tier as judge
from tierd.core.diagnosis.findings import NODE, SYSTEM, Finding, finding
from tierd.core.errors import TierdError
from tierd.daemon.tiers.identity import TiersOverlap, check_identities
from tierd.doctor import disk, machine, service, tier
from tierd.doctor.bounded import in_thread
from tierd.doctor.disk import State
from tierd.doctor.tier import Subject


@dataclass(frozen=True, slots=True)
class Examined:
    """What is to be examined.

    Attributes:
        spool: the spool's directory; None: no spool was named.
        keep_last: how many checkpoints the spool keeps.
        drain_s: how long the daemon flushes after SIGTERM, in seconds.
        tiers: the tiers.
        group_s: seconds for one group of checks.
    """

    spool: Path | None
    keep_last: int
    drain_s: float
    tiers: Sequence[Subject]
    group_s: float = 30.0


async def examine(what: Examined) -> list[Finding]:
    """Try everything, and return the findings in the order of the places. Takes about 45 s if everything hangs."""
    state = await _state(what.spool, what.group_s)
    size = state.size if state else None
    groups = [_tier(one, size, what.group_s) for one in what.tiers]
    (found, failures), tiers = await asyncio.gather(_node(what, state), asyncio.gather(*groups))
    shared = await _shared(what.tiers)
    for of, group in zip(what.tiers, tiers, strict=True):
        found += [*group, *_view(of, group, failures), *(one for one in shared if one.place == of.place)]
    return found


async def _shared(tiers: Sequence[Subject]) -> list[Finding]:
    """Find whether a tier is the place of another one under another name, or lies in it."""
    try:
        urls, stores = {of.place: of.url for of in tiers}, {of.place: of.store for of in tiers}
        silent = await check_identities(urls, stores, keep=False)
    except TiersOverlap as error:
        return [finding(error.tier, "another tier's place", str(error))]
    if len(tiers) < 2:
        return []
    return [finding(of.place, "own place", "no other tier is there") for of in tiers if of.place not in silent]


def _view(of: Subject, found: Sequence[Finding], failures: Mapping[str, str]) -> Iterable[Finding]:
    """Compare the operations with what the daemon says of the same tier, if both were tried."""
    works = judge.works(found)
    if works is not None and str(of.url) in failures:
        one = judge.view(of.place, works, failures[str(of.url)])
        return [one] if one else []
    return []


async def _state(root: Path | None, group_s: float) -> State | None:
    """Find the largest state of a spool. None also if it cannot be read: the checks of the disk say what is wrong."""
    if root is None:
        return None
    try:
        return await in_thread(lambda: disk.largest_state(root), group_s / 3)
    except (TimeoutError, OSError):
        return None


async def _node(what: Examined, state: State | None) -> tuple[list[Finding], Mapping[str, str]]:
    """Examine the spool, then this machine, then the service manager; each may need an answer of the one before.

    Returns:
        The findings, and what the daemon says of each tier: see `service.Asked.failures`.
    """
    found: list[Finding] = []
    failures: Mapping[str, str] = {}
    group_s = what.group_s
    if what.spool is not None:
        root = what.spool
        size = state.size if state else None
        found += await _called("spool", lambda: disk.examine(root, what.keep_last, state), group_s, hung="spool silent")
        found += await _called("memory", lambda: machine.examine(size), group_s)
        try:
            answer = await in_thread(lambda: service.daemon(root), group_s / 3)
        except TimeoutError:
            answer = service.Asked(_hung(NODE, "daemon", group_s / 3))
        except OSError as error:  # the spool's own checks say what is wrong
            answer = service.Asked(finding(NODE, "not answered", str(error.strerror), "daemon"))
        found.append(answer.finding)
        failures = answer.failures
        found += await _called("stop timeout", lambda: service.endings(answer.pid, what.drain_s), group_s, SYSTEM)
    return found, failures


async def _called(
    check: str, call: Callable[[], Iterable[Finding]], group_s: float, place: str = NODE, hung: str = "not answered"
) -> list[Finding]:
    found: list[Finding] = []
    try:
        await in_thread(lambda: found.extend(call()), group_s)
    except TimeoutError:
        return [*found, _hung(place, check, group_s, hung)]
    except (OSError, TierdError) as error:
        return [*found, finding(place, "not answered", str(error), check)]
    return found


@dataclass(frozen=True, slots=True)
class _Group:
    """Checks of one tier that share a deadline.

    Attributes:
        check: the check that a failure of the whole group counts for.
        source: makes the findings.
        hung: the finding if the deadline passes.
        checks: the checks that are reported as not tried if the tier cannot be reached.
    """

    check: str
    source: Callable[[Subject], AsyncIterator[Finding]]
    hung: str = "no answer"
    checks: tuple[str, ...] = ()


_SERVER = _Group("connection", tier.server)
_OPERATIONS = _Group("operations", tier.operations, checks=("operations",))
_BUCKET = _Group("lifecycle", tier.bucket, "not answered", ("lifecycle", "object lock", "versioning", "multipart"))
_CREDENTIALS = _Group("credentials", tier.credentials, "not answered")


async def _tier(of: Subject, state: int | None, group_s: float) -> list[Finding]:
    match of.url.scheme:
        case "s3":
            answers = _in_turn(of, (_SERVER, _OPERATIONS, _BUCKET), group_s)
            way, credentials = await asyncio.gather(answers, _in_turn(of, (_CREDENTIALS,), group_s))
            return [*way, *credentials]
        case "file":
            group = _Group("directory", lambda of: tier.directory(of, state), "mount fails")
            return await _in_turn(of, (group,), group_s)
        case "gs" | "az":
            return await _in_turn(of, (_OPERATIONS,), group_s)
        case _ as unknown:
            assert_never(unknown)


async def _in_turn(of: Subject, groups: Iterable[_Group], group_s: float) -> list[Finding]:
    """Try one group after the other, until the tier cannot be reached: the rest would only repeat that."""
    found: list[Finding] = []
    for group in groups:
        if judge.is_reached(found):
            found += await _gathered(of, group, group_s)
        else:
            why = "not tried, because the tier did not answer"
            found += [finding(of.place, "not tried", why, check) for check in group.checks]
    return found


async def _gathered(of: Subject, group: _Group, group_s: float) -> list[Finding]:
    found: list[Finding] = []
    try:
        async with asyncio.timeout(group_s), aclosing(group.source(of)) as findings:  # type: ignore[type-var]
            async for one in findings:
                found.append(one)
    except TimeoutError:
        found.append(_hung(of.place, group.check, group_s, group.hung))
    except (OSError, TierdError) as error:
        found.append(finding(of.place, "not answered", str(error), group.check))
    return found


def _hung(place: str, check: str, deadline_s: float, name: str = "not answered") -> Finding:
    return finding(place, name, f"no answer within {deadline_s:.0f} s", check)
