"""The state of the node's daemon, of any version, and its pause: `status`, `pause` and `resume`.

Invariant: a member that the daemon does not send leaves out its line or shows as `unknown`; it never ends the command.
`pause` and `resume` also work without a daemon.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tierd.cli import command_runtime
from tierd.cli.command_runtime import EXIT_ALERT, EXIT_WARNING
from tierd.cli.options import ConfigOption, JsonOption, SpoolOption
from tierd.cli.output import (
    Table,
    complain,
    console,
    format_size,
    make_table,
    pause_text,
    policy_conflict_lines,
    print_json,
    print_lines,
)
from tierd.cli.places import resolve_places
from tierd.core.errors import ConfigError, DaemonAbsent, DaemonUnavailable, RequestUnknown, SpoolHeld, VersionMismatch
from tierd.core.retention.policy import parse_duration
from tierd.core.timeline.concurrent_launches import Lease, Rival, concurrency_warning, describe_leases
from tierd.daemon import status_file
from tierd.daemon.tiers.tier_pauses import TierPause
from tierd.events.alerts import ANSWER, BACKLOG, READ, REPLICAS
from tierd.ipc import message_codec, messages
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.spool.spool import Spool
from tierd.spool.spool_access import spool_errors
from tierd.watching.unit_description import UnmatchedFiles

Members = dict[str, Any]
_MAX_REASONS = 5  # reasons and groups of files of a watched directory


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (status, pause, resume):
        app.command()(command)


CheckOption = Annotated[
    bool, typer.Option("--check", help="Print only what is wrong, and exit with 10 for a warning, 11 for an alert.")
]


def status(
    spool: SpoolOption = None, config: ConfigOption = None, check: CheckOption = False, json: JsonOption = False
) -> None:
    """How the node's daemon does: each tier's backlog, failures and last events. Without a daemon: how it last did."""
    answer = _answer(resolve_places(spool, None, config).node_spool, last=not check)
    if json:
        print_json(answer)
    elif not check:
        _show(answer)
    if check:
        _check(answer, aloud=not json)


def _answer(spool: Spool, *, last: bool) -> Members:
    """Return the daemon's status; with `last` and without a daemon, the last one that was recorded."""
    try:
        return _ask_status(spool)
    except DaemonAbsent:
        recorded = status_file.read_status(spool.control) if last else None
        if recorded is None:
            raise
        complain(f"no daemon runs; this is the last known state, {_age(recorded.get('at'))}")
        return recorded


def _age(at: object) -> str:
    """Format the age of a moment in RFC 3339."""
    try:
        seconds = (datetime.now(UTC) - datetime.fromisoformat(str(at))).total_seconds()
    except (ValueError, TypeError):
        return "of unknown age"
    unit, name = next(((n, name) for n, name in ((86400, "d"), (3600, "h"), (60, "min")) if seconds >= n), (1, "s"))
    return f"{max(seconds, 0) / unit:.0f} {name} old ({str(at)[:19]})"


def _check(answer: Members, *, aloud: bool) -> None:
    if "problems" not in answer:
        raise DaemonUnavailable("the daemon is of an older version of tierd, which does not judge itself: restart it")
    problems = answer["problems"]
    if aloud:
        for problem in problems:
            print_lines(f"{problem['severity'].upper()} {problem['place']}: {problem['why']}")
        if not problems:
            print_lines(f"OK: daemon {answer['pid']} on {answer['spool']}")
    severities = {each_problem["severity"] for each_problem in problems}
    if severities:
        raise typer.Exit(EXIT_ALERT if "alert" in severities else EXIT_WARNING)


def _show(answer: Members) -> None:
    out = console()
    missing = []
    for section in SECTIONS:
        try:
            section_lines = list(section(answer))
        except KeyError as error:
            missing.append(str(error.args[0]))
            continue
        for line in section_lines:
            out.print(line)
    if missing:
        out.print(f"not shown, because the daemon is of another version of tierd: {', '.join(missing)}")


def _ask_status(spool: Spool) -> Members:
    """Return the daemon's status. Every version answers this request, so a daemon of any version is shown."""
    try:
        with DaemonConnection(spool) as link:
            return message_codec.read_member(link.ask(messages.StatusRequest()), "status", Members)
    except VersionMismatch as error:
        complain(error)
    with DaemonConnection(spool, greet=False) as link:
        return message_codec.read_member(link.ask(messages.StatusRequest()), "status", Members)


def _daemon(answer: Members) -> Iterator[str]:
    version = f"tierd {answer['version']}, protocol {answer['protocol']}" if "version" in answer else "version unknown"
    not_running = "" if answer.get("running", True) else ", not running"
    yield f"daemon {answer['pid']}, {version}{not_running}"


def _spool(answer: Members) -> Iterator[str]:
    free = f"{answer['spool_free']:.0%} of its disk is free"
    yield f"spool {answer['spool']} ({answer['spool_parts']} parts, {free})"


def _trainers(answer: Members) -> Iterator[str]:
    yield f"trainers attached: {answer['trainers']}"


def _launches(answer: Members) -> Iterator[str]:
    yield from describe_leases(msgspec.convert(answer.get("leases", []), list[Lease]))
    all_rivals = msgspec.convert(answer.get("launches", []), list[Rival])
    for _, rivals in itertools.groupby(all_rivals, key=lambda rival: rival.run):
        yield f"WARNING: {concurrency_warning(rivals)}"


def _scrub(answer: Members) -> Iterator[str]:
    scrub = answer["scrub"]
    yield (
        f"scrub: oldest copy verified {scrub['oldest'] or 'never'}, {scrub['due']} overdue, {scrub['doing'] or 'idle'}"
    )


def _pause(answer: Members) -> Iterator[str]:
    if answer.get("paused"):
        yield f"{pause_text(answer['paused'])}: nothing is flushed; to go on: tierd resume --spool {answer['spool']}"


def activity_text(tier: Members) -> str:
    """Say what the daemon does for a tier, and since when it waits for an answer."""
    if since := tier.get("waiting_since"):
        waits = f"waiting for an answer since {since[11:19]} UTC"
        return f"{tier['doing']}; {waits}" if tier["doing"] else waits
    return str(tier["doing"] or (f"again in {tier['retry_in_s']:.0f} s" if tier["retry_in_s"] else "idle"))


TIER_COLUMNS: dict[str, Callable[[Members], str]] = {
    "TIER": lambda tier: tier["name"],
    "URL": lambda tier: tier["url"],
    "ANSWERS": lambda tier: "yes" if tier["reached"] and not tier.get("waiting_since") else "no",
    "PENDING": lambda tier: str(tier["pending_parts"]),
    "BYTES": lambda tier: format_size(tier["pending_bytes"]),
    "TO PRUNE": lambda tier: "append-only" if tier.get("append_only") else str(tier["pending_prunes"]),
    "DOING": lambda tier: (
        activity_text(tier)
        + (f"; waits until {tier['asked_until'][11:19]} UTC, as the server asked" if tier.get("asked_until") else "")
    ),
    "LAST ERROR": lambda tier: tier["last_error"] or "",
}


EVENT_COLUMNS = ("AT", "PLACE", "EVENT", "OF", "TEXT")


def _tiers(answer: Members) -> Iterator[Table]:
    yield make_table(
        None, TIER_COLUMNS, [[_cell(text, tier) for text in TIER_COLUMNS.values()] for tier in answer["tiers"]]
    )


def _cell(text: Callable[[Members], str], tier: Members) -> str:
    try:
        return text(tier)
    except KeyError:
        return "unknown"


def _compression(answer: Members) -> Iterator[str]:
    for tier in answer["tiers"]:
        yield f"{tier['name']}: {tier['compression']}"


def _policies(answer: Members) -> Iterator[str]:
    yield from policy_conflict_lines(answer.get("policies", []))


def _watches(answer: Members) -> Iterator[str]:
    for watch in answer.get("watches", []):
        waits = f"; it waits: {watch['waits']}" if watch["waits"] else ""
        counts = f"{watch['checkpoints']} checkpoints there, {watch['not_taken']} of them not taken"
        files = f"{watch['files']} files belong to none"
        yield f"watching {watch['directory']} as run {watch['run']}: {counts}; {files}{waits}"
        for unit in watch["reasons"][:_MAX_REASONS]:
            yield f"  {unit['path']} is not taken: {unit['why']}"
        for group in watch["passed_over"][:_MAX_REASONS]:
            yield f"  passed over: {msgspec.convert(group, UnmatchedFiles)}"


def _notify(answer: Members) -> Iterator[str]:
    for receiver in answer["notify"]:
        failed = f", the last failed: {receiver['last_error']}" if receiver["last_error"] else ""
        counts = f"{receiver['delivered']} delivered, {receiver['dropped']} dropped, {receiver['queued']} queued"
        yield f"{receiver['name']}: to {receiver['to']}: {counts}{failed}"


def _alerts(answer: Members) -> Iterator[str]:
    for alert in answer["alerts"]:
        doing = "observing" if alert["doing"] == "observe" else f"{alert['doing']} {alert['subject']}"
        fails = f"{doing} failed {alert['tries']} times in a row"
        if alert["subject"] == BACKLOG:
            fails = "what is to be pruned becomes ever more"
        if alert["subject"] == ANSWER:
            fails = "it does not answer"
        if alert["doing"] == READ:
            fails = f"reads of {alert['subject']} differ from each other"
        if alert["doing"] == REPLICAS:
            fails = f"replicas of run {alert['subject']} differ"
        yield f"ALERT {alert['place']}: {fails}, since {alert['since'][:19]}: {alert['why']}"


def _events(answer: Members) -> Iterator[Table]:
    members = ("at", "place", "what", "subject", "why")
    rows = [[event[member] for member in members] for event in answer["events"][-10:]]
    if rows:
        yield make_table(None, EVENT_COLUMNS, [[at[:19], *cells] for at, *cells in rows])


SECTIONS: tuple[Callable[[Members], Iterator[str | Table]], ...] = (
    _daemon,
    _spool,
    _trainers,
    _launches,
    _scrub,
    _pause,
    _tiers,
    _compression,
    _policies,
    _watches,
    _notify,
    _alerts,
    _events,
)


ForOption = Annotated[
    str | None,
    typer.Option("--for", metavar="TIME", help="Go on by itself after this time: 2h.", show_default="until resumed"),
]


def pause(
    spool: SpoolOption = None, config: ConfigOption = None, for_: ForOption = None, json: JsonOption = False
) -> None:
    """Leave the tiers as they are for a while: no flush, no prune, no scrub. Saves and restores go on."""
    _set_pause(spool, config, messages.Pause(for_s=None if for_ is None else _parse_duration(for_)), json=json)


def resume(spool: SpoolOption = None, config: ConfigOption = None, json: JsonOption = False) -> None:
    """End a pause; what is pending is flushed."""
    _set_pause(spool, config, messages.Resume(), json=json)


def _parse_duration(text: str) -> float:
    try:
        time_s = parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"--for: {error}") from error
    if not 0 < time_s <= messages.MAX_PAUSE:
        raise ConfigError(f"--for {text}: more than nothing and at most a year; without --for, until `tierd resume`")
    return time_s


def _set_pause(
    spool: Path | None, config: Path | None, request: messages.Pause | messages.Resume, *, json: bool
) -> None:
    home = resolve_places(spool, None, config).node_spool
    until = _ask_pause(home, request)
    if json:
        print_json({"spool": str(home.root), "paused": until})
    else:
        console().print(pause_text(until) or "not paused")


def _ask_pause(spool: Spool, request: messages.Pause | messages.Resume) -> str | None:
    """Send the request to the daemon that holds the spool. Without one, write the pause for the next daemon."""
    end = time.monotonic() + command_runtime.current_timings().listen_timeout_s
    while True:
        try:
            with DaemonConnection(spool) as link:
                answer: str | None = link.ask(request)["paused"]
                return answer
        except (VersionMismatch, RequestUnknown):  # a daemon runs, so only it may change the pause
            raise
        except DaemonUnavailable as error:
            try:
                with spool_errors(f"spool {spool.root}", spool.root), spool.lock():
                    state = TierPause(spool)
                    change = state.begin(request.for_s) if isinstance(request, messages.Pause) else state.end()
                    asyncio.run(change)
                    return state.until
            except SpoolHeld:  # a daemon is starting or ending, or does not answer
                if time.monotonic() > end:
                    raise error from None
        time.sleep(0.1)
