"""The whole examination: every check of the spool, the machine, each tier and the service manager, within deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from tierd.core.config import HttpConfig, NotifyConfig
from tierd.core.diagnosis import tier_findings as judge
from tierd.core.diagnosis.findings import NODE, SYSTEM, Finding, finding
from tierd.core.errors import TierdError
from tierd.core.store_schemes import SCHEMES
from tierd.daemon.tiers.tier_identity import TiersOverlap, check_identities
from tierd.doctor import node_checks, tier_checks
from tierd.doctor.node_checks import StateSize
from tierd.doctor.receiver_checks import examine_port, examine_receivers
from tierd.doctor.tier_checks import ExaminedTier
from tierd.threads import call_in_thread


@dataclass(frozen=True, slots=True)
class ExaminationScope:
    """What is to be examined. Without a spool none was named.

    The spool keeps `keep_last` checkpoints; the daemon flushes for `drain_s` seconds after SIGTERM; one group of checks
    may take `group_s`. `receivers` and `http` are those of the configuration.
    """

    spool: Path | None
    keep_last: int
    drain_s: float
    tiers: Sequence[ExaminedTier]
    group_s: float = 30.0
    receivers: Sequence[NotifyConfig] = ()
    http: HttpConfig | None = None


async def examine(examined: ExaminationScope) -> list[Finding]:
    """Try everything, and return the findings in the order of the places. Takes about 45 s if everything hangs."""
    state = await _state(examined.spool, examined.group_s)
    groups = [_tier(subject, state.size if state else None, examined.group_s) for subject in examined.tiers]
    (findings, failures), tiers = await asyncio.gather(_node(examined, state), asyncio.gather(*groups))
    shared = await _shared(examined.tiers)
    for of, group in zip(examined.tiers, tiers, strict=True):
        findings += [*group, *_view(of, group, failures)]
        findings += [shared_finding for shared_finding in shared if shared_finding.place == of.place]
    is_silent = any(entry.finding == "silent daemon" for entry in findings)
    return [*findings, *await _outside(examined, is_silent)]


async def _outside(examined: ExaminationScope, is_silent: bool) -> list[Finding]:
    """Examine the receivers of events, and the port for HTTP if no silent daemon may have it."""
    receivers, http = examined.receivers, examined.http
    findings = await _call_check(
        "receiver", lambda: examine_receivers(receivers), examined.group_s, "notify", "receiver silent"
    )
    if http is not None and not is_silent:
        findings += await _call_check("HTTP port", lambda: examine_port(http), examined.group_s, "http")
    return findings


async def _shared(tiers: Sequence[ExaminedTier]) -> list[Finding]:
    """Find whether a tier is the place of another one under another name, or lies in it."""
    try:
        urls, stores = {of.place: of.url for of in tiers}, {of.place: of.store for of in tiers}
        silent = await check_identities(urls, stores, keep=False)
    except TiersOverlap as error:
        return [finding(error.tier, "another tier's place", str(error))]
    if len(tiers) < 2:
        return []
    return [finding(of.place, "own place", "no other tier is there") for of in tiers if of.place not in silent]


def _view(of: ExaminedTier, findings: Sequence[Finding], failures: Mapping[str, str]) -> list[Finding]:
    """Compare the operations with what the daemon says of the same tier, if both were tried."""
    works, url = judge.does_tier_work(findings), str(of.url)
    if works is None or url not in failures:
        return []
    difference = judge.daemon_view(of.place, works, failures[url])
    return [difference] if difference else []


async def _state(root: Path | None, group_s: float) -> StateSize | None:
    """Find the largest state of a spool. None also if it cannot be read: the checks of the disk say what is wrong."""
    if root is None:
        return None
    try:
        return await call_in_thread(lambda: node_checks.largest_state(root), group_s / 3)
    except (TimeoutError, OSError):
        return None


async def _node(examined: ExaminationScope, state: StateSize | None) -> tuple[list[Finding], Mapping[str, str]]:
    """Examine the spool, then this machine, then the service manager; each may need an answer of the one before.

    Returns:
        The findings, and what the daemon says of each tier: see `DaemonAnswer.failures`.
    """
    root, group_s = examined.spool, examined.group_s
    if root is None:
        return [], {}
    findings = await _call_check(
        "spool", lambda: node_checks.examine_spool(root, examined.keep_last, state), group_s, hung="spool silent"
    )
    findings += await _call_check("memory", lambda: node_checks.examine_machine(state.size if state else None), group_s)
    try:
        answer = await call_in_thread(lambda: node_checks.ask_daemon(root), group_s / 3)
    except TimeoutError:
        answer = node_checks.DaemonAnswer(_hung_finding(NODE, "daemon", group_s / 3))
    except OSError as error:  # the spool's own checks say what is wrong
        answer = node_checks.DaemonAnswer(finding(NODE, "not answered", str(error.strerror), "daemon"))
    findings.append(answer.finding)
    findings += await _call_check(
        "stop timeout", lambda: node_checks.examine_endings(answer.pid, examined.drain_s), group_s, SYSTEM
    )
    return findings, answer.failures


async def _call_check(
    check: str, call: Callable[[], Iterable[Finding]], group_s: float, place: str = NODE, hung: str = "not answered"
) -> list[Finding]:
    findings: list[Finding] = []
    try:
        await call_in_thread(lambda: findings.extend(call()), group_s)
    except TimeoutError:
        return [*findings, _hung_finding(place, check, group_s, hung)]
    except (OSError, TierdError) as error:
        return [*findings, finding(place, "not answered", str(error), check)]
    return findings


@dataclass(frozen=True, slots=True)
class _Group:
    """Checks of one tier that share a deadline.

    Attributes:
        check: the check that a failure of the whole group counts for.
        hung: the finding if the deadline passes.
        checks: the checks that are reported as not tried if the tier cannot be reached.
    """

    check: str
    source: Callable[[ExaminedTier], AsyncIterator[Finding]]
    hung: str = "no answer"
    checks: tuple[str, ...] = ()


_GROUPS = {  # by their names in a `StoreScheme`
    "connection": _Group("connection", tier_checks.examine_server),
    "operations": _Group("operations", tier_checks.examine_operations, checks=("operations",)),
    "bucket": _Group(
        "lifecycle", tier_checks.examine_bucket, "not answered", ("lifecycle", "object lock", "versioning", "multipart")
    ),
}
_CREDENTIALS = _Group("credentials", tier_checks.examine_credentials, "not answered")


async def _tier(of: ExaminedTier, state: int | None, group_s: float) -> list[Finding]:
    groups = _GROUPS | {
        "directory": _Group("directory", lambda of: tier_checks.examine_directory(of, state), "mount fails")
    }
    checks = SCHEMES[of.url.scheme].checks
    answers, credentials = await asyncio.gather(  # where credentials come from does not depend on an answer
        _in_turn(of, [groups[name] for name in checks if name in groups], group_s),
        _in_turn(of, [_CREDENTIALS] if "credentials" in checks else [], group_s),
    )
    return answers + credentials


async def _in_turn(of: ExaminedTier, groups: Iterable[_Group], group_s: float) -> list[Finding]:
    """Try one group after the other, until the tier cannot be reached: the rest would only repeat that."""
    findings: list[Finding] = []
    for group in groups:
        if judge.is_reached(findings):
            findings += await _gather_findings(of, group, group_s)
        else:
            why = "not tried, because the tier did not answer"
            findings += [finding(of.place, "not tried", why, check) for check in group.checks]
    return findings


async def _gather_findings(of: ExaminedTier, group: _Group, group_s: float) -> list[Finding]:
    gathered: list[Finding] = []
    try:
        async with asyncio.timeout(group_s), aclosing(group.source(of)) as findings:  # type: ignore[type-var]
            async for each_finding in findings:
                gathered.append(each_finding)
    except TimeoutError:
        gathered.append(_hung_finding(of.place, group.check, group_s, group.hung))
    except (OSError, TierdError) as error:
        gathered.append(finding(of.place, "not answered", str(error), group.check))
    return gathered


def _hung_finding(place: str, check: str, deadline_s: float, name: str = "not answered") -> Finding:
    return finding(place, name, f"no answer within {deadline_s:.0f} s", check)
