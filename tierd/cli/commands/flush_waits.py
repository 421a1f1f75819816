"""Commands that wait for the daemon to flush: drain, wait.

Invariant: neither command changes the daemon's plan. They ask it to observe and try again at once, and follow it.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
import typer

from tierd.cli import command_runtime
from tierd.cli.command_runtime import EXIT_UNFINISHED
from tierd.cli.missing_runs import checkpoint_not_found, full_attempt, naming_known_runs, only_run
from tierd.cli.options import AttemptOption, ConfigOption, JsonOption, SpoolOption
from tierd.cli.output import attempt_names, print_answer, print_json, print_lines
from tierd.cli.places import Places, resolve_places
from tierd.cli.progress import Meter, show_progress
from tierd.cli.tables import Table
from tierd.core.errors import ConfigError, DaemonUnavailable, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId, check_run, check_step
from tierd.core.planning.unflushed_parts import UnflushedPart, UnflushedParts, parse_backlog, unflushed_by_tier
from tierd.core.retention.policy import parse_duration
from tierd.core.units import format_size, pause_text
from tierd.ipc import messages
from tierd.ipc.daemon_connection import DaemonConnection

_MARGIN_S = 10.0  # that the daemon's answer may take beyond the time in the request
_LONGEST_S = 7 * 86400.0

OptionalRun = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="The run's name.", show_default="the only one")
]
OptionalStep = Annotated[
    int | None, typer.Argument(metavar="[STEP]", help="The checkpoint's step.", show_default="the newest")
]


class DrainResult(msgspec.Struct, frozen=True):
    """The output of `drain`.

    Attributes:
        left: parts that some tier still lacks.
        paused: as in `status`.
        left_to_nodes: what tiers with `backfill` lack and other nodes were to send, in words.
    """

    left: tuple[PendingPart, ...]
    paused: str | None
    left_to_nodes: tuple[str, ...] = ()


class PendingPart(msgspec.Struct, frozen=True):
    """One part that some tier lacks.

    Attributes:
        size: bytes in the spool.
        on: the tiers that have it.
        lacks: the tiers that want it, or that did not answer.
    """

    run: str
    step: int
    attempt: str
    rank: int
    world_size: int
    size: int
    on: tuple[str, ...]
    lacks: tuple[str, ...]


class WaitResult(msgspec.Struct, frozen=True):
    """The checkpoint that `wait` waited for.

    Attributes:
        tiers: the tiers that hold it whole and verified.
    """

    run: str
    step: int
    attempt: str
    tiers: tuple[str, ...]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (drain, wait):
        app.command()(command)


def drain(
    spool: SpoolOption = None,
    config: ConfigOption = None,
    deadline: Annotated[str, typer.Option("--deadline", metavar="TIME", help="Wait at most this long.")] = "90s",
    json: JsonOption = False,
) -> None:
    """Have the daemon flush everything now, newest first, and wait for it; exit code 9 when something is left."""
    end = time.monotonic() + _parse_time("--deadline", deadline)
    with _connect(resolve_places(spool, None, config)) as link:
        backlog = _drain(link, end)
    remaining = tuple(_left_part(part) for part in backlog.left)
    if json:
        print_json(DrainResult(remaining, backlog.paused, backlog.left_to_nodes))
    elif not remaining and not backlog.left_to_nodes:
        print_answer("everything is on every tier that wants it")
    elif remaining:
        names = attempt_names(part.attempt for part in remaining)
        rows = [
            (
                part.run,
                str(part.step),
                names[part.attempt],
                f"{part.rank}/{part.world_size}",
                format_size(part.size),
                *_tier_columns(part),
            )
            for part in remaining
        ]
        columns = ("RUN", "STEP", "ATTEMPT", "RANK", "BYTES", "IS ON", "IS NOT ON")
        print_answer(Table(columns, rows))
        for name, tier in backlog.tiers.items():
            if tier.error:
                print_answer(f"{name}: {tier.error}")
        if backlog.paused:
            print_answer(f"{pause_text(backlog.paused)}: nothing is flushed; to go on: tierd resume")
    for line in () if json else backlog.left_to_nodes:
        print_lines(line)
    if remaining or backlog.left_to_nodes:
        raise typer.Exit(EXIT_UNFINISHED)


def _drain(link: DaemonConnection, end: float) -> UnflushedParts:
    """Wait until the daemon's backlog is empty, `end` is over or the daemon is paused; return the backlog."""
    with show_progress("flushing") as meter:
        try:
            backlog = _ask(link, messages.BacklogRequest(hurry=True), end)
        except TimeoutError:  # a tier hangs, so the answer has no backlog of it
            link.close()
            raise StoreUnavailable("the tiers did not answer within --deadline; `tierd status` says which") from None
        total = backlog.left_bytes
        while backlog.left and not backlog.paused and time.monotonic() < end:
            total = max(total, backlog.left_bytes)  # because saves go on
            parts = ", ".join(f"{name} {count}" for name, (count, _) in unflushed_by_tier(backlog.left).items())
            meter.update(total - backlog.left_bytes, total, f"flushing (parts left: {parts})")
            time.sleep(command_runtime.current_timings().poll_s)
            backlog = _ask(link, messages.BacklogRequest(), max(end, time.monotonic() + _MARGIN_S))
    return backlog


def _ask(link: DaemonConnection, request: messages.BacklogRequest, end: float) -> UnflushedParts:
    return parse_backlog(link.ask(request, max(0.1, end - time.monotonic())))


def _left_part(remaining: UnflushedPart) -> PendingPart:
    checkpoint = remaining.part.checkpoint
    return PendingPart(
        checkpoint.run,
        checkpoint.step,
        checkpoint.attempt,
        remaining.part.rank,
        remaining.part.world,
        remaining.size_bytes,
        remaining.on,
        remaining.lacks,
    )


def _tier_columns(part: PendingPart) -> tuple[str, str]:
    return ", ".join(part.on) or "no tier", ", ".join(part.lacks)


def wait(
    run: OptionalRun = None,
    step: OptionalStep = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    tier: Annotated[str | None, typer.Option("--tier", metavar="NAME", help="This tier.", show_default="all")] = None,
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="Wait at most this long.")] = "60s",
    attempt: AttemptOption = None,
    json: JsonOption = False,
) -> None:
    """Wait until a checkpoint is whole and verified on a tier; exit code 6 when a tier refuses or the time is over."""
    end = time.monotonic() + _parse_time("--timeout", timeout)
    if step is not None:
        check_step(step)
    where = resolve_places(spool, None, config)
    run = check_run(run or only_run(where))
    with (
        naming_known_runs(where, run),
        _connect(where) as link,
        show_progress("flushing") as meter,
    ):
        names = [status["name"] for status in link.ask(messages.StatusRequest())["status"]["tiers"]]
        if tier is not None and tier not in names:
            raise ConfigError(f"--tier {tier!r}: the daemon has no tier of that name; it has {', '.join(names)}")
        link.ask(messages.CandidatesRequest(run=run))  # after this, handed-over snapshots are in the spool
        summary = _find(link, run, step, full_attempt(where, run, attempt))
        checkpoint = CheckpointId(run, summary["attempt"], summary["step"])
        for name in [tier] if tier else names:
            try:
                _wait(link, checkpoint, summary, name, end, meter)
            except TimeoutError as error:
                raise StoreUnavailable(f"the time is over (--timeout {timeout}): {error}") from error
    waited = WaitResult(run, checkpoint.step, checkpoint.attempt, tuple([tier] if tier else names))
    if json:
        print_json(waited)
    else:
        print_answer(f"{checkpoint} is verified on {', '.join(waited.tiers)}")


def _find(link: DaemonConnection, run: str, step: int | None, attempt: str | None) -> dict[str, Any]:
    """Return the newest checkpoint that fits, as `ls` shows it."""
    summaries: list[dict[str, Any]] = link.ask(messages.ReportRequest(run=run))["report"]["checkpoints"]
    for summary in summaries:
        usable = any(copy["state"] != "quarantined" for copy in summary["copies"])
        if usable and step in (None, summary["step"]) and attempt in (None, summary["attempt"]):
            return dict(summary)
    raise checkpoint_not_found(run, step, [each_summary["step"] for each_summary in summaries], attempt)


def _wait(
    link: DaemonConnection, checkpoint: CheckpointId, summary: dict[str, Any], tier: str, end: float, meter: Meter
) -> None:
    """Wait until `tier` holds every rank's part. Other nodes have to send the parts that no place shows yet."""
    requested_parts = set[PartId]()
    while not any(copy["place"] == tier and copy["state"] == "verified" for copy in summary["copies"]):
        ranks = {rank for copy in summary["copies"] if copy["state"] != "quarantined" for rank in copy["ranks"]}
        parts = {PartId(checkpoint, rank, summary["world_size"]) for rank in ranks} - requested_parts
        for part in sorted(parts):
            remaining_s = max(0.0, end - time.monotonic())
            label = f"flushing rank {part.rank} of {part.world} to {tier}"

            def on_progress(line: dict[str, Any], text: str = label) -> None:
                meter.update(line.get("done", 0), line.get("total"), text)

            link.ask(messages.Wait(part=part, tier=tier, timeout_s=remaining_s), remaining_s + _MARGIN_S, on_progress)
        requested_parts |= parts
        if not parts:
            if time.monotonic() >= end:
                missing = summary["world_size"] - len(ranks)
                raise TimeoutError(f"{tier}: {checkpoint} lacks {missing} ranks' parts, which other nodes have to send")
            time.sleep(command_runtime.current_timings().listing_s)
        summary = _find(link, checkpoint.run, checkpoint.step, checkpoint.attempt)


def _connect(where: Places) -> DaemonConnection:
    """Connect to the daemon of the spool; the error says how to flush without a daemon."""
    spool = where.node_spool
    try:
        return DaemonConnection(spool)
    except DaemonUnavailable as error:
        options = f"--config {where.config_file}" if where.config_file else f"--spool {spool.root} --to URL"
        raise DaemonUnavailable(f"{error}; to flush once and end: tierd run {options} --until-idle") from None


def _parse_time(option: str, text: str) -> float:
    try:
        time_s = parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    if time_s > _LONGEST_S:
        raise ConfigError(f"{option} {text}: at most a week")
    return time_s
