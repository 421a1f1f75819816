"""The state of the node's daemon, of any version, and its pause: `status`, `pause` and `resume`.

Invariant: a member that the daemon does not send leaves out its line or shows as `unknown`; it never ends the command.
`pause` and `resume` also work without a daemon.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from tierd.cli import command_runtime
from tierd.cli.command_runtime import EXIT_ALERT, EXIT_WARNING
from tierd.cli.commands.status_lines import event_table, lease_lines, problem_lines, problem_texts, tier_table
from tierd.cli.options import ConfigOption, JsonOption, SpoolOption
from tierd.cli.output import (
    age_of,
    complain,
    console,
    policy_conflict_lines,
    print_json,
    print_lines,
    terminal_width,
)
from tierd.cli.places import resolve_places
from tierd.cli.tables import Table
from tierd.core.errors import ConfigError, DaemonAbsent, DaemonUnavailable, RequestUnknown, SpoolHeld, VersionMismatch
from tierd.core.retention.policy import parse_duration
from tierd.core.timeline.concurrent_launches import Rival, concurrency_warning
from tierd.core.units import pause_text
from tierd.daemon import status_file
from tierd.daemon.tiers.tier_pauses import TierPause
from tierd.ipc import message_codec, messages
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.spool.spool import Spool
from tierd.spool.spool_access import spool_errors
from tierd.watching.unit_description import UnmatchedFiles

Members = dict[str, Any]
_MAX_EVENTS = 10
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
        at = recorded.get("at")
        complain(
            f"no daemon runs; this is the last known state, of {age_of(at)} ago ({str(at)[:19].replace('T', ' ')} UTC)"
        )
        return recorded


def _check(answer: Members, *, aloud: bool) -> None:
    if "problems" not in answer:
        raise DaemonUnavailable("the daemon is of an older version of tierd, which does not judge itself: restart it")
    problems = answer["problems"]
    if aloud:
        for _, text in problem_texts(answer):
            print_lines(text)
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
            out.print(line, soft_wrap=isinstance(line, Text))
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


def _problems(answer: Members) -> Iterator[Text]:
    yield from problem_lines(answer, terminal_width())


def _daemon(answer: Members) -> Iterator[str]:
    version = f"tierd {answer['version']}, protocol {answer['protocol']}" if "version" in answer else "version unknown"
    not_running = "" if answer.get("running", True) else ", not running"
    trainers = answer["trainers"]
    yield f"daemon {answer['pid']}, {version}{not_running}; {trainers} trainer{'s' * (trainers != 1)} attached"


def _spool(answer: Members) -> Iterator[str]:
    parts = answer["spool_parts"]
    yield f"spool {answer['spool']}: {parts} part{'s' * (parts != 1)}, {answer['spool_free']:.0%} of its disk is free"


def _launches(answer: Members) -> Iterator[str]:
    yield from lease_lines(answer)
    all_rivals = msgspec.convert(answer.get("launches", []), list[Rival])
    for _, rivals in itertools.groupby(all_rivals, key=lambda rival: rival.run):
        yield f"WARNING: {concurrency_warning(rivals)}"


def _scrub(answer: Members) -> Iterator[str]:
    scrub = answer["scrub"]
    oldest = f"{age_of(scrub['oldest'])} ago" if scrub["oldest"] else "never"
    yield f"scrub: oldest copy verified {oldest}, {scrub['due']} overdue, {scrub['doing'] or 'idle'}"


def _pause(answer: Members) -> Iterator[str]:
    if answer.get("paused"):
        yield f"nothing is flushed while paused; to go on: tierd resume --spool {answer['spool']}"


def _tiers(answer: Members) -> Iterator[str | Table]:
    yield from ("", tier_table(answer))


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


def _notify(answer: Members) -> Iterator[str | Table]:
    rows = [
        (receiver["name"], *(str(receiver[name]) for name in ("delivered", "dropped", "queued")), receiver["to"])
        for receiver in answer["notify"]
    ]
    if rows:
        yield from ("", Table(("RECEIVER", "DELIVERED", "DROPPED", "QUEUED", "TO"), rows, cut=True))


def _events(answer: Members) -> Iterator[str | Table]:
    if answer["events"]:
        yield from ("", event_table(answer["events"][-_MAX_EVENTS:]))


SECTIONS: tuple[Callable[[Members], Iterator[str | Text | Table]], ...] = (
    _problems,
    _daemon,
    _spool,
    _pause,
    _launches,
    _policies,
    _watches,
    _scrub,
    _tiers,
    _notify,
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
        console().print(pause_text(until) if until else "not paused")


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
