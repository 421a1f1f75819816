"""The command `status`, which shows the state of the node's daemon, of any version.

Invariant: a member that the daemon does not send leaves out its line or shows as `unknown`; it never ends the command.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer

from tierd.cli.exit_codes import EXIT_ALERT, EXIT_WARNING
from tierd.cli.options import ConfigOption, JsonOption, SpoolOption, places
from tierd.cli.tables import Table, complain, console, disagreements, paused, print_json, print_lines, size, table
from tierd.core.errors import ConfigError, DaemonAbsent, DaemonUnavailable, VersionMismatch
from tierd.core.timeline.launches import Lease, Rival, held, warning
from tierd.daemon.reports import last_status
from tierd.events.alerts import ANSWER, BACKLOG, READ
from tierd.ipc import messages, replies
from tierd.ipc.client import Link
from tierd.spool.spool import Spool
from tierd.watching.passed_over import PassedOver

Members = dict[str, Any]
_MAX_REASONS = 5  # reasons and groups of files of a watched directory


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(status)


CheckOption = Annotated[
    bool, typer.Option("--check", help="Print only what is wrong, and exit with 10 for a warning, 11 for an alert.")
]


def status(
    spool: SpoolOption = None, config: ConfigOption = None, check: CheckOption = False, json: JsonOption = False
) -> None:
    """How the node's daemon does: each tier's backlog, failures and last events. Without a daemon: how it last did."""
    where = places(spool, None, config)
    if where.spool is None:
        raise ConfigError("the spool that --config names is not there yet: no daemon has run")
    answer = _answer(where.spool, last=not check)
    if json:
        print_json(answer)
    elif not check:
        _show(answer)
    if check:
        _check(answer, aloud=not json)


def _answer(spool: Spool, *, last: bool) -> Members:
    """Return the daemon's status; with `last` and without a daemon, the last one that was recorded."""
    try:
        return _ask(spool)
    except DaemonAbsent:
        recorded = last_status.read(spool.control) if last else None
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


def _ask(spool: Spool) -> Members:
    """Return the daemon's status. Every version answers this request, so a daemon of any version is shown."""
    try:
        with Link(spool) as link:
            return replies.read_member(link.ask(messages.StatusRequest()), "status", Members)
    except VersionMismatch as error:
        complain(error)
    with Link(spool, greet=False) as link:
        return replies.read_member(link.ask(messages.StatusRequest()), "status", Members)


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
    yield from held(msgspec.convert(answer.get("leases", []), list[Lease]))
    all_rivals = msgspec.convert(answer.get("launches", []), list[Rival])
    for _, rivals in itertools.groupby(all_rivals, key=lambda rival: rival.run):
        yield f"WARNING: {warning(rivals)}"


def _scrub(answer: Members) -> Iterator[str]:
    scrub = answer["scrub"]
    yield (
        f"scrub: oldest copy verified {scrub['oldest'] or 'never'}, {scrub['due']} overdue, {scrub['doing'] or 'idle'}"
    )


def _pause(answer: Members) -> Iterator[str]:
    if answer.get("paused"):
        yield f"{paused(answer['paused'])}: nothing is flushed; to go on: tierd resume --spool {answer['spool']}"


def doing(tier: Members) -> str:
    """Say what the daemon does for a tier, and since when it waits for an answer."""
    if since := tier.get("waiting_since"):
        waits = f"waiting for an answer since {since[11:19]} UTC"
        return f"{tier['doing']}; {waits}" if tier["doing"] else waits
    return str(tier["doing"] or (f"again in {tier['retry_in_s']:.0f} s" if tier["retry_in_s"] else "idle"))


COLUMNS: dict[str, Callable[[Members], str]] = {
    "TIER": lambda tier: tier["name"],
    "URL": lambda tier: tier["url"],
    "ANSWERS": lambda tier: "yes" if tier["reached"] and not tier.get("waiting_since") else "no",
    "PENDING": lambda tier: str(tier["pending_parts"]),
    "BYTES": lambda tier: size(tier["pending_bytes"]),
    "TO PRUNE": lambda tier: "append-only" if tier.get("append_only") else str(tier["pending_prunes"]),
    "DOING": lambda tier: (
        doing(tier)
        + (f"; waits until {tier['asked_until'][11:19]} UTC, as the server asked" if tier.get("asked_until") else "")
    ),
    "LAST ERROR": lambda tier: tier["last_error"] or "",
}


EVENT_COLUMNS = ("AT", "PLACE", "EVENT", "OF", "TEXT")


def _tiers(answer: Members) -> Iterator[Table]:
    yield table(None, COLUMNS, [[_cell(text, tier) for text in COLUMNS.values()] for tier in answer["tiers"]])


def _cell(text: Callable[[Members], str], tier: Members) -> str:
    try:
        return text(tier)
    except KeyError:
        return "unknown"


def _compression(answer: Members) -> Iterator[str]:
    for tier in answer["tiers"]:
        yield f"{tier['name']}: {tier['compression']}"


def _policies(answer: Members) -> Iterator[str]:
    yield from disagreements(answer.get("policies", []))


def _watches(answer: Members) -> Iterator[str]:
    for watch in answer.get("watches", []):
        waits = f"; it waits: {watch['waits']}" if watch["waits"] else ""
        counts = f"{watch['checkpoints']} checkpoints there, {watch['not_taken']} of them not taken"
        files = f"{watch['files']} files belong to none"
        yield f"watching {watch['directory']} as run {watch['run']}: {counts}; {files}{waits}"
        for unit in watch["reasons"][:_MAX_REASONS]:
            yield f"  {unit['path']} is not taken: {unit['why']}"
        for group in watch["passed_over"][:_MAX_REASONS]:
            yield f"  passed over: {msgspec.convert(group, PassedOver)}"


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
        yield f"ALERT {alert['place']}: {fails}, since {alert['since'][:19]}: {alert['why']}"


def _events(answer: Members) -> Iterator[Table]:
    members = ("at", "place", "what", "subject", "why")
    rows = [[event[member] for member in members] for event in answer["events"][-10:]]
    if rows:
        yield table(None, EVENT_COLUMNS, [[at[:19], *cells] for at, *cells in rows])


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
