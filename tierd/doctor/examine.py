"""The whole examination: every check of the spool, the machine, each tier and the service manager, within deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from tierd.core.diagnosis.findings import NODE, SYSTEM, Finding, finding
from tierd.core.errors import TierdError
from tierd.doctor import disk, machine, service, tier
from tierd.doctor.bounded import in_thread
from tierd.doctor.tier import Subject

_GROUP_S = 30.0  # seconds for one group of checks


@dataclass(frozen=True, slots=True)
class Examined:
    """What is to be examined.

    Attributes:
        spool: the spool's directory; None: no spool was named.
        keep_last: how many checkpoints the spool keeps.
        drain_s: how long the daemon flushes after SIGTERM, in seconds.
        tiers: the tiers.
    """

    spool: Path | None
    keep_last: int
    drain_s: float
    tiers: Sequence[Subject]


async def examine(what: Examined) -> list[Finding]:
    """Try everything, and return the findings in the order of the places. Takes about 45 s if everything hangs."""
    groups = [_node(what), *(group for one in what.tiers for group in _groups(one))]
    return [one for found in await asyncio.gather(*groups) for one in found]


async def _node(what: Examined) -> list[Finding]:
    """Examine the spool, then this machine, then the service manager; each may need an answer of the one before."""
    found: list[Finding] = []
    pid, state = 0, None
    if what.spool is not None:
        root = what.spool
        try:
            state = await in_thread(lambda: disk.largest_state(root), _GROUP_S / 3)
        except (TimeoutError, OSError):
            pass  # the checks of the disk say what is wrong
        size = state.size if state else None
        found += await _called("spool", lambda: disk.examine(root, what.keep_last, state))
        found += await _called("memory", lambda: machine.examine(size))
        try:
            answer, pid = await in_thread(lambda: service.daemon(root), _GROUP_S / 3)
        except TimeoutError:
            answer = _hung(NODE, "daemon", _GROUP_S / 3)
        found.append(answer)
        found += await _called("stop timeout", lambda: service.endings(pid, what.drain_s), SYSTEM)
    return found


async def _called(check: str, call: Callable[[], Iterable[Finding]], place: str = NODE) -> list[Finding]:
    found: list[Finding] = []
    try:
        await in_thread(lambda: found.extend(call()), _GROUP_S)
    except TimeoutError:
        return [*found, _hung(place, check, _GROUP_S)]
    except (OSError, TierdError) as error:
        return [*found, finding(place, "not answered", str(error), check)]
    return found


def _groups(of: Subject) -> Iterable[asyncio.Task[list[Finding]]]:
    checks: dict[str, AsyncIterator[Finding]] = {}
    match of.url.scheme:
        case "s3":
            checks = {"DNS": tier.server(of), "credentials": tier.credentials(of), "operations": tier.operations(of)}
            checks["lifecycle"] = tier.bucket(of)
        case "file":
            checks["directory"] = tier.directory(of)
        case "gs" | "az":
            checks["operations"] = tier.operations(of)
        case _ as unknown:
            assert_never(unknown)
    return [asyncio.ensure_future(_gathered(of.place, check, source)) for check, source in checks.items()]


async def _gathered(place: str, check: str, source: AsyncIterator[Finding]) -> list[Finding]:
    found: list[Finding] = []
    try:
        async with asyncio.timeout(_GROUP_S), aclosing(source) as findings:  # type: ignore[type-var]
            async for one in findings:
                found.append(one)
    except TimeoutError:
        found.append(_hung(place, check, _GROUP_S))
    except (OSError, TierdError) as error:
        found.append(finding(place, "not answered", str(error), check))
    return found


def _hung(place: str, check: str, deadline_s: float) -> Finding:
    return finding(place, "not answered", f"no answer within {deadline_s:.0f} s", check)
