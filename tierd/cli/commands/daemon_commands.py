"""The daemon's own command, `run`; pin and unpin."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import structs

from tierd.cli.command_runtime import EXIT_NOTHING_TAKEN, EXIT_UNFINISHED
from tierd.cli.commands.checkpoint_commands import choose_checkpoint
from tierd.cli.missing_runs import checkpoint_not_found, full_attempt, naming_known_runs
from tierd.cli.options import (
    AttemptOption,
    ConfigOption,
    JsonOption,
    KeyFileOption,
    RunArgument,
    SpoolOption,
    StepArgument,
    ToOption,
    UrlArgument,
)
from tierd.cli.output import complain, print_answer, print_json
from tierd.cli.places import DEFAULTS, Places, default_places, default_spool, load_config, make_config, resolve_places
from tierd.core.config import Config
from tierd.core.errors import ConfigError, DaemonUnavailable, printable_json
from tierd.core.event_kinds import Event
from tierd.core.ids import CheckpointId
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.timeline.restore_order import restore_order
from tierd.core.timeline.run_view import RunView
from tierd.daemon.daemon_service import serve
from tierd.daemon.intake.active_watch import NothingTaken
from tierd.daemon.tiers import intents
from tierd.daemon.tiers.tier_observer import observe_places
from tierd.ipc import messages
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.message_codec import read_member
from tierd.logs import LogFormat
from tierd.logs import use_format as use_format
from tierd.stores.open import open_tiers


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (run, pin, unpin):
        app.command()(command)


def run(
    spool: SpoolOption = None,
    to: ToOption = None,
    config: ConfigOption = None,
    keep_last: Annotated[
        int | None,
        typer.Option(
            "--keep-last",
            metavar="N",
            min=1,
            help="Checkpoints to keep in each place; not given: each run's own policy.",
        ),
    ] = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when no trainer is attached and everything is flushed.")
    ] = False,
    await_trainer: Annotated[
        bool, typer.Option("--await-trainer", help="With --until-idle: give a first trainer 120 s to attach.")
    ] = False,
    key_file: KeyFileOption = None,
    log_format: Annotated[
        LogFormat,
        typer.Option("--log-format", metavar="text|json", help="The lines of the log on the standard error."),
    ] = "text",
    json: JsonOption = False,
) -> None:
    """Run the daemon: flush, verify, retain; until SIGTERM. With --json, each event is a line on stdout."""
    use_format(log_format)
    if spool is None and config is None:
        spool, config = default_places() if not to else (default_spool(), None)
    where = _daemon_config(spool, to, config, keep_last, key_file)
    on_event = print_event if json else None
    reread = (lambda: _load_config(config, keep_last)) if config is not None else None
    run_daemon(serve(where, until_idle=until_idle, await_trainer=await_trainer, reread=reread, on_event=on_event))


def run_daemon(serving: Coroutine[Any, Any, Sequence[object]]) -> None:
    """Run `serve` to its end, and exit with a code of its own if it left something or never took anything."""
    try:
        unfinished = asyncio.run(serving)
    except NothingTaken as error:
        complain(error)
        raise typer.Exit(EXIT_NOTHING_TAKEN) from None
    if unfinished:
        raise typer.Exit(EXIT_UNFINISHED)  # the log says what is left


def print_event(event: Event) -> None:
    """Print an event as a line of JSON."""
    sys.stdout.write(printable_json(msgspec.json.encode(event).decode()) + "\n")
    sys.stdout.flush()


def _daemon_config(
    spool: Path | None, to: list[str] | None, config: Path | None, keep_last: int | None, key_file: Path | None
) -> Config:
    if config is not None:
        if spool or to or key_file:
            raise ConfigError(
                "--config names the spool, the tiers and their keys itself; leave --spool, --to and --key-file out"
            )
        return _load_config(config, keep_last)
    if spool is None:
        raise ConfigError(f"no spool: give --spool DIR, or --config FILE; or {DEFAULTS}")
    if not to:
        raise ConfigError("no tier: name at least one with --to URL, or give --config FILE")
    retention = RetentionPolicy(keep_last=keep_last) if keep_last else None
    return make_config(str(spool.absolute()), to, retention, key_file)


def _load_config(path: Path, keep_last: int | None) -> Config:
    """Load a configuration. `--keep-last` is the policy of each place, so no place may have another."""
    config = load_config(path)
    if keep_last is None:
        return config
    own_policies = [f"tier {tier.name}" for tier in config.tier if tier.retention is not None]
    if config.retention is not None or own_policies:
        raise ConfigError(
            f"{path}: it says itself what is kept ({', '.join(own_policies) or '[retention]'}); leave --keep-last out, "
            "or remove that"
        )
    policy = RetentionPolicy(keep_last=keep_last)
    tiers = tuple(structs.replace(tier, retention=policy) for tier in config.tier)
    return structs.replace(config, retention=policy, tier=tiers)


def pin(
    run: RunArgument,
    step: StepArgument,
    url: UrlArgument = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    attempt: AttemptOption = None,
    note: Annotated[
        str, typer.Option("--note", metavar="TEXT", help="A line that ls and show print; replaces an earlier one.")
    ] = "",
    json: JsonOption = False,
) -> None:
    """Make retention leave a checkpoint alone, in the spool and on every tier."""
    if len(note) > messages.MAX_NOTE or not note.isprintable():
        raise ConfigError(f"--note: one line of at most {messages.MAX_NOTE} characters")
    _set_pin(resolve_places(spool, url, config), run, step, attempt, pinned=True, note=note, json=json)


def unpin(
    run: RunArgument,
    step: StepArgument,
    url: UrlArgument = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    attempt: AttemptOption = None,
    json: JsonOption = False,
) -> None:
    """Give a checkpoint back to retention."""
    _set_pin(resolve_places(spool, url, config), run, step, attempt, pinned=False, json=json)


def _set_pin(
    where: Places, run: str, step: int, attempt: str | None, *, pinned: bool, json: bool, note: str = ""
) -> None:
    with naming_known_runs(where, run):
        attempt = full_attempt(where, run, attempt)
        checkpoint = _pin_by_daemon(where, run, step, attempt, note, pinned=pinned)
        if checkpoint is None:
            checkpoint = asyncio.run(_pin_directly(where, run, step, attempt, note, pinned=pinned))
    if json:
        print_json({"run": run, "step": step, "attempt": checkpoint.attempt, "pinned": pinned})
    else:
        print_answer(f"{'pinned' if pinned else 'unpinned'} {checkpoint}")


def _pin_by_daemon(
    where: Places, run: str, step: int, attempt: str | None, note: str, *, pinned: bool
) -> CheckpointId | None:
    if where.spool is None or where.config is not None:
        return None
    try:
        link = DaemonConnection(where.spool)
    except DaemonUnavailable:
        raise DaemonUnavailable(
            f"no daemon holds spool {where.spool.root}, and it alone is not every place: name the tiers' URLs too"
        ) from None
    with link:
        view = read_member(link.ask(messages.CandidatesRequest(run=run)), "sight", RunView)
        order = restore_order([view], run, step, attempt)
        candidates = order.candidates
        if not candidates:
            raise checkpoint_not_found(run, step, [candidate.step for candidate in order.complete], attempt)
        checkpoint = candidates[0].checkpoint
        link.ask(messages.Pin(checkpoint=checkpoint, pinned=pinned, note=note))
        return checkpoint


async def _pin_directly(
    where: Places, run: str, step: int, attempt: str | None, note: str, *, pinned: bool
) -> CheckpointId:
    async with AsyncExitStack() as stack:
        stores = await open_tiers(where.config, stack) if where.config else {}
        inventory = await observe_places(where.spool, stores, run)
        checkpoint = choose_checkpoint(inventory, run, step, attempt)
        if pinned:
            await intents.pin(where.spool, stores.values(), checkpoint, note=note)
        else:
            await intents.unpin(where.spool, stores.values(), checkpoint)
        return checkpoint
