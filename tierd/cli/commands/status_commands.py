"""The state of the node's daemon, of any version: `status`.

Invariants: a member that the daemon does not send leaves out its line or shows as `unknown`; it never ends the command.
The command loads nothing of the daemon but the file of its last status, because people and probes run it often.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec
import typer

from tierd.cli.command_runtime import EXIT_ALERT, EXIT_WARNING
from tierd.cli.commands.status_lines import event_table, lease_lines, problem_lines, problem_texts, tier_table
from tierd.cli.options import ConfigOption, JsonOption, SpoolOption
from tierd.cli.output import (
    age_of,
    complain,
    policy_conflict_lines,
    print_answer,
    print_json,
    print_lines,
    terminal_width,
)
from tierd.cli.places import resolve_places
from tierd.cli.tables import Table
from tierd.core.errors import DaemonAbsent, DaemonUnavailable, VersionMismatch
from tierd.daemon import status_file
from tierd.ipc import message_codec, messages
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.spool.spool import Spool

Members = dict[str, Any]
_MAX_EVENTS = 10
_MAX_REASONS = 5  # reasons and groups of files of a watched directory


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(status)


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
    missing = []
    for section in SECTIONS:
        try:
            section_lines = list(section(answer))
        except KeyError as error:
            missing.append(str(error.args[0]))
            continue
        for line in section_lines:
            if isinstance(line, tuple):
                print_answer(line[0], style=line[1], wrap=False)
            else:
                print_answer(line)
    if missing:
        print_answer(f"not shown, because the daemon is of another version of tierd: {', '.join(missing)}")


def _ask_status(spool: Spool) -> Members:
    """Return the daemon's status. Every version answers this request, so a daemon of any version is shown."""
    try:
        with DaemonConnection(spool) as link:
            return message_codec.read_member(link.ask(messages.StatusRequest()), "status", Members)
    except VersionMismatch as error:
        complain(error)
    with DaemonConnection(spool, greet=False) as link:
        return message_codec.read_member(link.ask(messages.StatusRequest()), "status", Members)


def _problems(answer: Members) -> Iterator[tuple[str, str]]:
    yield from problem_lines(answer, terminal_width())


def _daemon(answer: Members) -> Iterator[str]:
    version = f"tierd {answer['version']}, protocol {answer['protocol']}" if "version" in answer else "version unknown"
    not_running = "" if answer.get("running", True) else ", not running"
    trainers = answer["trainers"]
    name = f"daemon {answer['pid']}" if answer["pid"] else "daemon"
    yield f"{name}, {version}{not_running}; {trainers} trainer{'s' * (trainers != 1)} attached"


def _spool(answer: Members) -> Iterator[str]:
    parts = answer["spool_parts"]
    yield f"spool {answer['spool']}: {parts} part{'s' * (parts != 1)}, {answer['spool_free']:.0%} of its disk is free"


def _launches(answer: Members) -> Iterator[str]:
    yield from lease_lines(answer)
    if not answer.get("launches"):
        return
    from tierd.core.timeline.concurrent_launches import Rival, concurrency_warning  # loads the inventory of places

    all_rivals = msgspec.convert(answer["launches"], list[Rival])
    for _, rivals in itertools.groupby(all_rivals, key=lambda rival: rival.run):
        yield f"WARNING: {concurrency_warning(rivals)}"


def _scrub(answer: Members) -> Iterator[str]:
    scrub = answer["scrub"]
    oldest = f"{age_of(scrub['oldest'])} ago" if scrub["oldest"] else "never"
    yield f"scrub: oldest copy verified {oldest}, {scrub['due']} overdue, {scrub['doing'] or 'idle'}"


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
        from tierd.watching.unit_description import UnmatchedFiles  # loads the layouts of others' checkpoints

        for group in watch["passed_over"][:_MAX_REASONS]:
            yield f"  passed over: {msgspec.convert(group, UnmatchedFiles)}"


def _notify(answer: Members) -> Iterator[str | Table]:
    rows = [
        (receiver["name"], *(str(receiver[name]) for name in ("delivered", "dropped", "queued")), receiver["to"])
        for receiver in answer["notify"]
    ]
    if rows:
        yield from ("", Table(("RECEIVER", "DELIVERED", "DROPPED", "QUEUED", "TO"), rows))


def _events(answer: Members) -> Iterator[str | Table]:
    if answer["events"]:
        yield from ("", event_table(answer["events"][-_MAX_EVENTS:]))


SECTIONS: tuple[Callable[[Members], Iterator[str | Table | tuple[str, str]]], ...] = (
    _problems,
    _daemon,
    _spool,
    _launches,
    _policies,
    _watches,
    _scrub,
    _tiers,
    _notify,
    _events,
)
